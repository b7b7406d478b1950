"""Regenerate the catalogue of torch's operators: ``python -m tools.catalogue [--retry]``.

The command also updates the census in ``docs/operators.md``.

``tsfunc/ops/catalogue/aten.tsv`` has a line for each ATen overload that ``import torch`` registers.
The lines follow from the schemas of the installed torch, from ``decided.txt``, and from trial calls
of each operator, whose results are kept in the file itself. After a change of ``decided.txt`` or of
a rule, run this; after a change of torch, run it with ``--retry``, which tries every operator again
in ten minutes.

Some operators crash the process when they are tried. The trials run in another process, which is
started again after a crash.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tsfunc.bridge.tracers.schemas import operator_signature, registered_overloads
from tsfunc.ops.catalogue.counts import CENSUS_2020
from tsfunc.ops.catalogue.operator_table import PATH, read_table, render, tabulate
from tsfunc.ops.catalogue.trial import Evidence, Trial
from tsfunc.ops.registry import Category

PAGE = Path(__file__).parents[1] / "docs" / "operators.md"
SECONDS = 120  # for one operator


def try_all(names: Sequence[str]) -> dict[str, Evidence]:
    """Return the observed behaviour of each operator; empty if the operator crashes the process."""
    found: dict[str, Evidence] = {}
    rest = list(names)
    crashed = ""
    while rest:
        done = list(_in_a_process(rest))
        found.update(done)
        rest = rest[len(done) :]
        if rest and rest[0] == crashed:
            found[rest.pop(0)] = Evidence()  # it crashes a fresh process, too
            print(f"{crashed} crashes", file=sys.stderr)
        crashed = rest[0] if rest else ""
    return found


def _in_a_process(names: Sequence[str]) -> Iterator[tuple[str, Evidence]]:
    run = subprocess.run(
        [sys.executable, "-m", "tools.catalogue", "--worker"],
        input="\n".join(names), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    for name, line in zip(names, run.stdout.splitlines(), strict=False):
        yield name, Evidence.parse(line)


def worker() -> None:
    """Read names of operators, and write a line with the result of the trial of each."""
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of operators
    for name in sys.stdin.read().split():
        signal.alarm(SECONDS)
        signature = operator_signature(name)
        assert signature is not None
        print(Trial(signature, "cpu").evidence().in_words(), file=out, flush=True)


START, END = "<!-- census -->\n", "<!-- end of census -->"


def census() -> str:
    """Return the docs' table: numbers of operators by category, and by the category's source."""
    lines = Counter(line.category for line in read_table().values())
    sources: dict[Category, Counter[str]] = {category: Counter() for category in Category}
    for line in read_table().values():
        sources[line.category][line.source.split()[0].rstrip(":")] += 1
    rows = [
        "| category | 2.13 | 2020 | by decision | by following | by schema or tag | by trying |"
    ]
    rows.append("|---|--:|--:|--:|--:|--:|--:|")
    for category, count in lines.most_common():
        by = sources[category]
        then = CENSUS_2020.get(category, "")
        cells = (by["decided"], by["follows"], by["schema"] + by["tag"], by["tried"])
        rows.append(f"| {category.value} | {count} | {then} | {' | '.join(map(str, cells))} |")
    then = sum(CENSUS_2020.values())
    every = sum(sources.values(), Counter[str]())
    cells = (every["decided"], every["follows"], every["schema"] + every["tag"], every["tried"])
    rows.append(f"| all | {lines.total()} | {then} | {' | '.join(map(str, cells))} |")
    return "\n".join(rows) + "\n"


def with_census(page: str) -> str:
    """Return the page of the docs with the present census."""
    before, _, rest = page.partition(START)
    return f"{before}{START}{census()}{END}{rest.partition(END)[2]}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Writes the catalogue of torch's operators.")
    parser.add_argument("--retry", action="store_true", help="try every operator again")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return
    names = registered_overloads("aten")
    forms = [n for n in names if (s := operator_signature(n)) and s.form not in ("out", "in-place")]
    if options.retry:
        evidence = try_all(forms)
    else:
        evidence = {name: line.evidence for name, line in read_table().items()}
        evidence.update(try_all([name for name in forms if name not in evidence]))
    PATH.write_text(render(tabulate(names, evidence)), "utf-8")
    read_table.cache_clear()
    PAGE.write_text(with_census(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
