"""The private names of torch that the bridge uses, each with a check and a substitute.

The command ``tsfunc doctor`` and the tests run the checks. A test compares the list with the names
that occur in the bridge's source, and ``docs/dependencies.md`` with the list. Each entry covers the
names that serve one purpose, and is in the module of the part of torch that the names belong to. A
dotted name that begins with ``torch`` also covers the attributes below it; a name such as
``OpOverload._schema`` is an attribute of the values of a class. A release of torch has exactly one
of the names that are joined by ``|``.

An entry lists the releases in which its check was run.
"""

from __future__ import annotations

from collections.abc import Iterator

from tsfunc.bridge.private_names import compilation, derivatives, dispatching, distributed, modules
from tsfunc.bridge.private_names.entries import (
    HOLDERS,
    PRIVATE_NAMES,
    PrivateNames,
    Risk,
    is_listed,
    missing_message,
)

__all__ = [
    "HOLDERS",
    "PRIVATE_NAMES",
    "PrivateNames",
    "Risk",
    "by_risk",
    "compilation",
    "dependency_table",
    "derivatives",
    "dispatching",
    "distributed",
    "is_listed",
    "missing_message",
    "modules",
]


def by_risk() -> Iterator[PrivateNames]:
    """Yield the entries, those with the highest risk first."""
    for risk in Risk:
        yield from (entry for entry in PRIVATE_NAMES if entry.risk is risk)


def dependency_table() -> str:
    """Return the list as the Markdown table of ``docs/dependencies.md``."""
    lines = ["| risk | purpose | names | stand-in |", "|---|---|---|---|"]
    for entry in by_risk():
        names = ", ".join(f"`{name}`" for name in entry.names).replace("|", "\\|")
        lines.append(
            f"| {entry.risk.value} | {entry.title}. {entry.use} | {names} | {entry.stand_in} |"
        )
    return "\n".join(lines)
