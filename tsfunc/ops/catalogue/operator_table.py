"""The table of torch's operators: the reader and the writer of ``aten.tsv``.

The table has one overload per line, for review. An error in it is corrected in ``decided.txt`` or
in a rule, and ``python -m tools.catalogue`` writes the table again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tsfunc.ops.catalogue.classify import Overloads, Verdict, verdict
from tsfunc.ops.catalogue.decisions import read_decisions
from tsfunc.ops.catalogue.facts import Facts, ResultDims, facts_of
from tsfunc.ops.catalogue.reader import reader
from tsfunc.ops.catalogue.signature import OperatorSignature
from tsfunc.ops.catalogue.trial import Evidence
from tsfunc.ops.registry import Category

PATH = Path(__file__).with_name("aten.tsv")
_HEADER = "name category result carriers dims mutates aliases marks tried source".split()
_FOLLOWS = "follows "


@dataclass(frozen=True)
class Line:
    """One line of the table: an operator."""

    name: str
    category: Category
    source: str
    facts: Facts
    evidence: Evidence

    @property
    def follows(self) -> str:
        """The name of the operator that it follows, or the empty string."""
        return self.source.removeprefix(_FOLLOWS) if self.source.startswith(_FOLLOWS) else ""


class _Table(Mapping[str, Line]):
    """The lines of a table by name, each of which is parsed when it is first read."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = {text.partition("\t")[0]: text for text in texts}
        self._line = functools.cache(lambda name: _parse(self._texts[name]))

    def __getitem__(self, name: str) -> Line:
        return self._line(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


@functools.lru_cache(maxsize=1)
def read_table() -> Mapping[str, Line]:
    """Return the table that the package ships, by name."""
    return _Table(PATH.read_text("utf-8").splitlines()[1:])


def _parse(text: str) -> Line:
    name, category, result, carriers, dims, mutates, aliases, marks, tried, source = text.split(
        "\t"
    )
    facts = Facts(
        tuple(carriers.split()),
        tuple(dims.split()),
        ResultDims(result),
        tuple(mutates.split()),
        tuple(aliases.split()),
        "random" in marks,
        "data-dependent" in marks,
    )
    return Line(name, Category(category), source, facts, Evidence.parse(tried))


def render(lines: Iterable[Line]) -> str:
    rows = ["\t".join(_HEADER)]
    for line in lines:
        facts = line.facts
        rows.append("\t".join((
            line.name, line.category.value, facts.result.value, " ".join(facts.carriers),
            " ".join(facts.dims), " ".join(facts.mutates), " ".join(facts.aliases),
            " ".join(facts.marks), line.evidence.in_words(), line.source,
        )))  # fmt: skip
    return "\n".join(rows) + "\n"


class Classifier:
    """Classifies operators of the installed torch by the rules and decisions."""

    def __init__(self, evidence: Mapping[str, Evidence]) -> None:
        self.evidence = evidence
        self.decisions = read_decisions()
        self.lines: dict[str, Line] = {}
        self.overloads: Overloads = functools.lru_cache(None)(self._overloads)

    @staticmethod
    def _overloads(packet: str) -> list[OperatorSignature]:
        return list(reader().overloads(packet))

    def line(self, name: str) -> Line | None:
        """Return the line of an operator, or None if torch has no such operator."""
        if name not in self.lines:
            signature = reader().signature(name)
            if signature is None:
                return None
            self.lines[name] = self._line(signature)
        return self.lines[name]

    def _line(self, signature: OperatorSignature) -> Line:
        evidence = self.evidence.get(signature.name, Evidence())
        decided = verdict(signature, self.decisions, self.overloads, self._category, evidence)
        target = self._follow(decided)
        facts = facts_of(
            signature,
            decided.category,
            evidence if evidence.tried or target is None else target.evidence,
            target.facts if target is not None else None,
            self.decisions.reads_values(signature.name),
        )
        return Line(signature.name, decided.category, decided.source, facts, evidence)

    def _category(self, name: str) -> Category | None:
        line = self.line(name)
        return line.category if line is not None else None

    def _follow(self, decided: Verdict) -> Line | None:
        if not decided.source.startswith(_FOLLOWS):
            return None
        return self.line(decided.source.removeprefix(_FOLLOWS))


def tabulate(names: Sequence[str], evidence: Mapping[str, Evidence]) -> list[Line]:
    """Return the lines of the named operators."""
    classifier = Classifier(evidence)
    lines = [classifier.line(name) for name in names]
    return [line for line in lines if line is not None]
