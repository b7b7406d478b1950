"""Sweep the operator database, and write ``docs/coverage.md`` and ``coverage_derivatives.md``.

    python -m tools.coverage                                   float32, vmap and vmap(vmap)
    python -m tools.coverage --dtypes all --most 4             every type, four samples of each row
    python -m tools.coverage --modes derivatives --dtypes all  vmap(grad), grad(vmap), vmap(jvp)
    python -m tools.coverage --modes "vmap(grad)" --match add  one mode, rows by a pattern
    python -m tools.coverage --report                          write the pages from earlier results

Each row runs in a process that may crash. Results go to ``build/coverage.jsonl``; an existing file
is continued. ``--anew FAIL,WRONG`` runs rows with these verdicts again. A page is written if there
are results for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.ops.database import VARIANTS
from tests.ops.exceptions import exception_of
from tests.ops.sweep import Verdict
from tools import sweeping
from tools.sweeping import DERIVATIVES, MODES, PLAIN, Result, tasks_of

ROOT = Path(__file__).parents[1]
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

_VERDICTS = """\
- **right**: as above.
- **split**: the data decide a size or a Python value, as in `nonzero`. The row is right with
  `data_dependent="split"`; without it, an error says so.
- **loop**: right, but example by example.
- **refused**: an error is the only possible outcome, because the data decide.
- **failing**: an error. **wrong**: another result.
- **nothing**: torch itself refuses all samples, or there is nothing to compare. Not counted.
"""

_PLAIN = """\
# The operator database under the transforms

PyTorch tests its operators with a database: `op_db` of
`torch.testing._internal.common_methods_invocations`, and similar lists of custom operators, of
`autograd.Function`s and of the `_foreach_` operators. A row of this page is an entry or a
variant of an entry: the method, the in-place form, the Python operator, `out=`, an alias.
`tests/ops/database_extra.py` adds calls that the database lacks: convolutions, indexing,
recurrent networks.

Each sample of a row is run for every choice of batched tensors, with the batch dim first, last
and in between. The row is right in a type and a mode if the following hold for all of its
samples:

- the result equals the stacked loop: values, types and writes in place;
- no operator runs as a loop over the examples;
- a batch without examples gives results of the right shapes.

The worst sample decides the verdict of a row.

Entries that address memory (`as_strided` and similar) are tried with the batch dim first,
because an example has the strides of the batch elsewhere, as under torch.vmap. Random entries
are compared by shapes, and by whether the examples draw alike (`"same"`) or differently
(`"different"`).

`python -m tools.coverage` repeats the measurement and writes this page.
"""

_DERIVATIVE = """\
# Derivatives of the operator database under the transforms

This page extends [coverage.md](coverage.md) to the modes `vmap(grad)`, `grad(vmap)` and
`vmap(jvp)`, for the rows that torch can differentiate on the CPU, in-place variants included.
The reference is torch's autograd on one example after another, with plain tensors. For the first
two modes it is the gradient of a weighted sum of all differentiable results. For `vmap(jvp)` it
is the values and the tangents. Tangents are computed as the pullback of the pullback where torch
has no forward formula or does not test it: for custom operators, products by `scatter_reduce`,
`_foreach_maximum` and similar operators, torch's forward mode silently gives a wrong tangent or
none, and `tsfunc.jvp` gives the right one. Each choice of batched tensors is tried, with the
batch dim first, last and in between.

Random operators draw the same numbers on both sides (`randomness="same"`). If examples draw from
different distributions, `"same"` is refused with torch.func's message, as PyTorch's tests
require; such rows are tried with `"different"`, and the results that do not depend on the
numbers are compared.

One refusal is not among the first samples: `_foreach_add_` of a list that is not batched and a
number that is batched. Python reads the value of the number before the call reaches tsfunc.

`python -m tools.coverage --modes derivatives --variants function,inplace --most 2` repeats the
measurement and writes this page. `tests/ops/test_database_derivatives.py` runs a sample of it,
and all of it in slow tests.
"""

_HIGHER = """
## Higher derivatives

`hessian`, `jacfwd(jacrev)`, `jacrev(jacfwd)`, `jvp(vjp)`, `hvp` and Jacobians of `hvp` under
`vmap`, and `grad` and `jvp` of `vmap(grad)`, were compared with nested plain autograd, for one
sample of each row in float64. No operator loops. These differ:

- The third derivative of `layer_norm` by three backward passes is torch's, and wrong. By `hvp`
  it is right.
- Jacobians by reverse mode of `hvp` through norms and standard deviations raise, as in torch,
  because torch's formulas write in place into tensors that are differentiated. By forward mode
  they are right. `glu` and `to_sparse` have no further derivative in torch.
- `max_unpool3d` and `as_strided_scatter` with repeated indices, a row of `_safe_softmax` that is
  masked as a whole, and `linalg.norm` at zero differ from torch's double backward in some of
  these modes.
"""


@dataclass(frozen=True)
class Page:
    """A page of the docs: its modes, and the text before and after their tables."""

    path: Path
    modes: tuple[str, ...]
    head: str
    tail: str = ""


PAGES = (
    Page(ROOT / "docs" / "coverage.md", PLAIN, _PLAIN),
    Page(ROOT / "docs" / "coverage_derivatives.md", DERIVATIVES, _DERIVATIVE, _HIGHER),
)


def page(form: Page, results: Sequence[Result], note: str = "") -> str:
    """Return the text of a page for these results; the note states the sample."""
    own = [result for result in results if result.mode in form.modes]
    parts = [f"{form.head}\n{_VERDICTS}", _samples(own, note)]
    for mode in form.modes:
        chosen = [result for result in own if result.mode == mode]
        if chosen:
            parts.append(_table(mode, chosen))
    parts.append(_exceptions(own))
    return "\n".join([*parts, form.tail]).rstrip() + "\n"


def _samples(results: Sequence[Result], note: str) -> str:
    compared = sum(sum(result.counts.values()) > 0 for result in results)
    batches = sum(sum(result.counts.values()) for result in results)
    most = {result.most for result in results if result.most is not None}
    tried = f" At most {max(most)} samples of a row." if len(most) == 1 else ""
    said = f"{compared:,} rows of a type and mode, {batches:,} batches compared.{tried} {note}"
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
    """Return the percentage of right rows among the comparable ones."""
    counted = [r.verdict in RIGHT for r in results if r.verdict != Verdict.NONE.name]
    return 100 * sum(counted) / max(len(counted), 1)


def _exceptions(results: Sequence[Result]) -> str:
    """Return the lines on the rows that are not right: by name, with the reason."""
    found: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        if result.verdict in (*RIGHT, Verdict.NONE.name):
            continue
        known = exception_of(result.row, result.dtype, result.mode)
        why = known.reason if known is not None else f"**not explained**: {_said(result)}"
        found[result.row, result.verdict, why].append(result)
    lines = ["## Exceptions", ""]
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


def main() -> None:
    parser = sweeping.parser("python -m tools.coverage", __doc__, FILE, most=6)
    groups = {"plain": PLAIN, "derivatives": DERIVATIVES}
    parser.add_argument(
        "--modes", default="plain", help=f"plain, derivatives, or of {', '.join(MODES)}"
    )
    parser.add_argument("--dtypes", default="float32", help="names with commas, or all")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="names with commas")
    options = parser.parse_args()
    modes = groups.get(options.modes) or options.modes.split(",")
    dtypes = None if options.dtypes == "all" else options.dtypes.split(",")
    tasks = tasks_of(modes, dtypes, options.most, options.variants.split(","))
    results = sweeping.results_of(tasks, options)
    for form in PAGES:
        if any(result.mode in form.modes for result in results):
            form.path.write_text(page(form, results, options.note))
    for mode in dict.fromkeys(result.mode for result in results):
        chosen = [result for result in results if result.mode == mode]
        print(f"{mode}: {share(chosen):.2f} % of {len(chosen):,} rows")


if __name__ == "__main__":
    main()
