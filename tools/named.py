"""Sweep the operator database with named sizes, and write ``docs/coverage_named.md``.

    python -m tools.named                          every entry, with names found in both ways
    python -m tools.named --match cat --most 9     entries by a pattern, nine samples of each
    python -m tools.named --report                 write the page from earlier results

Each entry runs in a process that may crash. Results go to ``build/named.jsonl``; an existing file
is continued. ``--anew FAIL,WRONG,DATA`` runs entries with these verdicts again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tests.ops.named_exceptions import EXCEPTIONS
from tests.ops.named_sweep import WAYS, entries, type_of
from tests.ops.sweep import Verdict
from tools import sweeping
from tools.coverage import ROOT, share
from tools.sweeping import Result, Task

PAGE = ROOT / "docs" / "coverage_named.md"
FILE = ROOT / "build" / "named.jsonl"
COLUMNS = ("OK", "DATA", "FAIL", "WRONG", "NONE")

HEAD = """\
# The operator database as programs for all sizes

Each entry of PyTorch's operator test database is a function of the tensors of a sample. It is
specialized with a name for each size that may change: `specialize(f, {"x0": Meta(["d0", "d1"]),
...})`. Calls of the operator with other sizes show which sizes may change, and which of them
must change together. Sizes are named in two ways:

- *names apart*: a name for each size that may change by itself, and a common name for sizes that
  may only change together;
- *names by size*: a name for all sizes that are equal in the sample, 0 and 1 included.

Sizes that cannot change stay numbers: the sizes of a `reshape` to numbers, and sizes that decide
how many tensors there are.

An entry is right if the following hold for each of its samples that was tried. The program
agrees with the operator for the sample, at three other sizes, and with each named size 0 and 1
where the operator accepts these. One program serves all sizes of 2 or more. Random entries are
compared by shapes. The worst sample decides the verdict. `tests/ops/named_dims.py` and
`named_sweep.py` make the comparison; `python -m tools.named` repeats it and writes this page.
"""


def page(results: Sequence[Result], note: str = "") -> str:
    """Return the page for these results; the note states the sample."""
    lines = [HEAD]
    if note:
        lines += [note, ""]
    lines += ["| names | right | refused | failing | wrong | nothing to name | share |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for way in WAYS:
        chosen = [result for result in results if result.mode == way]
        if chosen:
            counts = Counter(result.verdict for result in chosen)
            cells = " | ".join(f"{counts[verdict]:,}" for verdict in COLUMNS)
            lines.append(f"| {way} | {cells} | {share(chosen):.2f} % |")
    lines += ["", "## Exceptions", "", "| entry | why |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in sorted(EXCEPTIONS.items())]
    lines += [f"| `{name}` | **not explained**: {said} |" for name, said in _unexplained(results)]
    return "\n".join(lines) + "\n"


def _unexplained(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    for result in results:
        right = result.verdict in (Verdict.OK.name, Verdict.NONE.name)
        if not right and result.row not in EXCEPTIONS:
            said = result.messages[0][2][:160] if result.messages else "the process ended"
            yield result.row, said.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    parser = sweeping.parser("python -m tools.named", __doc__, FILE, most=4)
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args()
    tasks = (
        Task(row.name, str(type_of(row)).removeprefix("torch."), way, options.most)
        for way in options.ways.split(",")
        for row in entries()
    )
    PAGE.write_text(page(sweeping.results_of(tasks, options), options.note))


if __name__ == "__main__":
    main()
