"""The parser of ``decided.txt``, the decisions made by hand."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path

from tsfunc.ops.registry import Category

_NOT_CATEGORIES = ("follows", "data-dependent")


@dataclass(frozen=True)
class Decision:
    """A category and its reason, or the name of the operator that is followed."""

    category: Category | None
    reason: str
    follows: str = ""


class Decisions:
    """All decisions, with lookup by an operator's name."""

    def __init__(self, text: str) -> None:
        self.exact: dict[str, Decision] = {}
        self.patterns: list[tuple[str, Decision]] = []
        self.data_dependent: set[str] = set()
        category: Category | None = None
        section = reason = ""
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            if line.startswith("["):
                section = line.strip("[] ")
                category = None if section in _NOT_CATEGORIES else Category(section)
            elif not line.startswith(" "):
                reason = line.strip()
            else:
                for word in line.split():
                    if section == "data-dependent":
                        self.data_dependent.add(word)
                    else:
                        self._add(word, category, reason, number)
        # If two patterns match, the longer one has precedence.
        self.patterns.sort(key=lambda pair: -len(pair[0]))

    def _add(self, word: str, category: Category | None, reason: str, number: int) -> None:
        name, _, target = word.partition("=")
        decision = Decision(category, reason, target)
        if "*" in name:
            self.patterns.append((name, decision))
        elif name in self.exact:
            raise ValueError(f"decided.txt:{number}: {name} is decided twice.")
        else:
            self.exact[name] = decision

    def of(self, name: str) -> Decision | None:
        """Return the decision for an overload (``add.Tensor``), its packet, or a pattern."""
        packet, dot, _ = name.partition(".")
        full = name if dot else f"{name}.default"
        decision = self.exact.get(full) or self.exact.get(packet)
        return decision or next(
            (d for p, d in self.patterns if fnmatch.fnmatchcase(packet, p)), None
        )

    def reads_values(self, name: str) -> bool:
        """True if a dispatcher name, or its packet, is marked as data-dependent."""
        bare = name.partition("::")[2]
        return bare in self.data_dependent or bare.partition(".")[0] in self.data_dependent


def read_decisions() -> Decisions:
    """Return the decisions that the package ships."""
    return Decisions(Path(__file__).with_name("decided.txt").read_text("utf-8"))
