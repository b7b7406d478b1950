"""Small sizes: those for which a size computed from them is 0 or 1.

NOTE [small sizes]
Operators treat the sizes 0 and 1 differently (NOTE [sizes 0 and 1] in ``equal``). This includes
sizes that are computed from named dims, such as the size ``h - 2`` that a convolution leaves of
``h``. torch tests for these sizes when it decides about broadcasting and empty tensors. Only few
sizes of ``h`` lead to them, and user code rarely depends on it. The program is therefore made for
the other sizes: its named dims have a minimum size of their own. A call with a smaller size has a
program in which that size is a number. A test in the function's own code remains a fact that the
descriptors must promise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tsfunc.bridge.sizes.bounds import has_maximum, with_larger
from tsfunc.bridge.sizes.symbols import Need
from tsfunc.types import Dim


def away_from(needs: Sequence[Need], dims: Mapping[str, Dim]) -> tuple[dict[str, Dim], list[Need]]:
    """Return larger minima for named dims that satisfy the needs about small sizes.

    Args:
        needs: the facts that a trace relies on, beyond those that the dims promise.
        dims: the named dims.

    Returns:
        The dims with a new minimum, and the needs that no minimum satisfies.
    """
    found: dict[str, Dim] = {}
    rest = []
    for need in sorted(needs, key=lambda need: len(need.expr.free_symbols)):
        names = sorted(str(symbol) for symbol in need.expr.free_symbols)
        about = {name: found.get(name, dims[name]) for name in names}
        raised = (
            with_larger(need.expr, about) if not need.by_user and _is_of_edges(need.expr) else None
        )
        if raised is None:
            rest.append(need)
        else:
            found.update(raised)
    return found, rest


def names_at_edge(needs: Sequence[Need]) -> frozenset[str]:
    """Return the named dims for which torch, or this package, relies on an unpromised fact."""
    asked = [need.expr.free_symbols for need in needs if not need.by_user]
    return frozenset(str(symbol) for symbol in set().union(*asked))


def _is_of_edges(fact: Any) -> bool:
    """Return True if a fact compares a size with 0 or 1, or contains a maximum of sizes."""
    from sympy.core.relational import Relational

    if not isinstance(fact, Relational):
        return False
    return has_maximum(fact) or not {0, 1}.isdisjoint((fact.lhs, fact.rhs))
