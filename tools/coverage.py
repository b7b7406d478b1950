"""Sweeps the operator database and writes ``docs/coverage.md``.

    python -m tools.coverage                                   float32, vmap and vmap(vmap)
    python -m tools.coverage --dtypes all --most 4             every type, four samples of each row
    python -m tools.coverage --modes "vmap(grad)" --match add  one mode, rows by a pattern
    python -m tools.coverage --report                          the page alone, of what was found

Each row runs in a process that may crash. Results go to ``build/coverage.jsonl``, which is gone on
with where it exists; ``--anew FAIL,WRONG`` does rows with these verdicts again.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.ops.exceptions import exception_of
from tests.ops.sweep import Verdict
from tools.sweeping import MODES, PLAIN, Result, Task, forget, read, run, tasks_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "coverage.md"
FILE = ROOT / "build" / "coverage.jsonl"

GROUPS = {
    "float32": ("float32",),
    "float64": ("float64",),
    "float16, bfloat16": ("float16", "bfloat16"),
    "complex": ("complex64", "complex128", "complex32"),
    "integers": tuple("int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()),
    "bool": ("bool",),
    "float8": tuple(f"float8_{kind}" for kind in "e4m3fn e5m2 e4m3fnuz e5m2fnuz e8m0fnu".split()),
}
RIGHT = (Verdict.OK.name, Verdict.SPLIT.name)
COLUMNS = ("OK", "SPLIT", "LOOP", "DATA", "FAIL", "WRONG", "NONE")

HEAD = """\
# The operator database under the transforms

PyTorch tests its operators with a database: `op_db` of
`torch.testing._internal.common_methods_invocations`, and beside it those of custom operators, of
`autograd.Function` and of the `_foreach_` operators. A row is an entry, or a variant of it: the
method, the in-place form, the Python operator, `out=`, an alias. `tests/ops/database_extra.py` adds
calls of which there are few: convolutions, indexing, recurrent networks.

A row is right in a type and a mode if for each of its samples tried, for every choice of batched
tensors, the batch dim lying first, last, and anywhere, the result is the stacked loop's, values,
types and what is written in place; if no operator loops, with a warning or without one; and if a
batch of no examples has results of the right shapes. One sample that is not so makes the row the
worst that it was.

Where an entry addresses memory (`as_strided` and its kin) the batch dim comes first: elsewhere an
example's strides are those that it has in the batch, as under torch.vmap. Random entries are
compared by shapes, and by whether examples draw alike (`"same"`) or not (`"different"`).

`python -m tools.coverage` does this again and writes this page.

- **right**: as above.
- **split**: what decides a size or a Python value, such as `nonzero`: right with
  `data_dependent="split"`, an error that says so else.
- **loop**: right, but example by example.
- **refused**: neither right nor an error by mistake: the value decides.
- **failing**, **wrong**: what they say.
- **nothing**: torch itself refuses all samples, or they have no tensor to batch. Not counted.
"""


def page(results: Sequence[Result], note: str = "") -> str:
    """The page for these results; the note says what was tried."""
    parts = [HEAD, _samples(results, note)]
    for mode in MODES:
        chosen = [r for r in results if r.mode == mode]
        if chosen:
            parts.append(_table(mode, chosen))
    parts.append(_exceptions(results))
    return "\n".join(parts).rstrip() + "\n"


def _samples(results: Sequence[Result], note: str) -> str:
    counts = Counter(sum(r.counts.values()) > 0 for r in results)
    batches = sum(sum(r.counts.values()) for r in results)
    said = f"{counts[True]:,} rows of a type and mode, {batches:,} batches compared. {note}"
    return f"\n{said.strip()}\n"


def _table(mode: str, results: Sequence[Result]) -> str:
    lines = [
        f"## `{mode}`",
        "",
        "| type | right | split | loop | refused | failing | wrong | nothing | share |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, dtypes in GROUPS.items():
        group = [r for r in results if r.dtype in dtypes]
        if group:
            lines.append(_line(name, group))
    lines.append(_line("**all**", results))
    return "\n".join([*lines, ""])


def _line(name: str, results: Sequence[Result]) -> str:
    counts = Counter(r.verdict for r in results)
    cells = [f"{counts[verdict]:,}" for verdict in COLUMNS]
    return f"| {name} | {' | '.join(cells)} | {share(results):.2f} % |"


def share(results: Iterable[Result]) -> float:
    """How many of a hundred rows that can be compared are right."""
    counted = [r.verdict in RIGHT for r in results if r.verdict != Verdict.NONE.name]
    return 100 * sum(counted) / max(len(counted), 1)


def _exceptions(results: Sequence[Result]) -> str:
    """The rows that are not right: by name, with the reason."""
    found: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        if result.verdict in (*RIGHT, Verdict.NONE.name):
            continue
        known = exception_of(result.row, result.dtype, result.mode)
        why = known.reason if known is not None else f"**not explained**: {_said(result)}"
        found[result.row, result.verdict, why].append(result)
    lines = ["## What is not right, and why", ""]
    if not found:
        return "\n".join([*lines, "Nothing."])
    lines += ["| row | verdict | modes | types | why |", "|---|---|---|---|---|"]
    for (row, verdict, why), rows in sorted(found.items()):
        modes = ", ".join(f"`{m}`" for m in dict.fromkeys(r.mode for r in rows))
        types = ", ".join(sorted({r.dtype for r in rows}))
        lines.append(f"| `{row}` | {verdict.lower()} | {modes} | {types} | {why} |")
    return "\n".join(lines)


def _said(result: Result) -> str:
    messages = [said for verdict, _, said in result.messages if verdict == result.verdict]
    short = messages[0][:160] if messages else "the process ended"
    return short.replace("|", "\\|").replace("\n", " ")


def _tasks(options: argparse.Namespace) -> Iterator[Task]:
    dtypes = None if options.dtypes == "all" else options.dtypes.split(",")
    for task in tasks_of(options.modes.split(","), dtypes, options.most):
        if re.search(options.match, task.row):
            yield task


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.coverage", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--modes", default=",".join(PLAIN), help=f"of {', '.join(MODES)}")
    parser.add_argument("--dtypes", default="float32", help="names with commas, or all")
    parser.add_argument("--most", type=int, default=6, help="samples of a row")
    parser.add_argument("--match", default="", help="rows whose names have this pattern")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--anew", default="", help="verdicts whose rows are done again")
    parser.add_argument("--note", default="", help="a sentence for the page: what was tried")
    parser.add_argument("--report", action="store_true", help="write the page alone")
    options = parser.parse_args()
    if not options.report:
        if options.anew:
            forget(options.file, options.anew.split(","))
        run(_tasks(options), options.file, options.workers)
    results = read(options.file)
    PAGE.write_text(page(results, options.note))
    for mode in MODES:
        chosen = [r for r in results if r.mode == mode]
        if chosen:
            print(f"{mode}: {share(chosen):.2f} % of {len(chosen):,} rows")


if __name__ == "__main__":
    main()
