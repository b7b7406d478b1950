"""Writes the catalogue of torch's operators anew: ``python -m tools.catalogue [--retry]``.

``tsfunc/ops/catalogue/aten.tsv`` has a line for each ATen overload that ``import torch``
registers. It follows from the schemas of the torch at hand, from ``decided.txt``, and from
what trying each operator showed, which is kept in the file itself. After a change of
``decided.txt`` or of a rule, run this; after a change of torch, run it with ``--retry``, which
takes ten minutes and tries every operator again.

Some operators crash the process when they are tried. They are tried in a process of their own,
which goes on after the one that crashed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence

from tsfunc.bridge.schemas import registered, signature_of
from tsfunc.ops.catalogue.table import PATH, read_table, render, tabulate
from tsfunc.ops.catalogue.trial import Evidence, Trial

SECONDS = 120  # for one operator


def try_all(names: Sequence[str]) -> dict[str, Evidence]:
    """What trying shows of each operator; nothing where it crashes the process."""
    found: dict[str, Evidence] = {}
    rest = list(names)
    crashed = ""
    while rest:
        done = list(_in_a_process(rest))
        found.update(done)
        rest = rest[len(done) :]
        if rest and rest[0] == crashed:
            found[rest.pop(0)] = Evidence()  # in a fresh process too, so it was this one
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
    """Reads names, and writes for each a line with what trying it showed."""
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what operators print
    for name in sys.stdin.read().split():
        signal.alarm(SECONDS)
        signature = signature_of(name)
        assert signature is not None
        print(Trial(signature, "cpu").evidence().in_words(), file=out, flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Writes the catalogue of torch's operators.")
    parser.add_argument("--retry", action="store_true", help="try every operator again")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return
    names = registered("aten")
    forms = [n for n in names if (s := signature_of(n)) and s.form not in ("out", "in-place")]
    if options.retry:
        evidence = try_all(forms)
    else:
        evidence = {name: line.evidence for name, line in read_table().items()}
        evidence.update(try_all([name for name in forms if name not in evidence]))
    PATH.write_text(render(tabulate(names, evidence)), "utf-8")


if __name__ == "__main__":
    main()
