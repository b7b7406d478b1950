"""Sizes at the edge: those for which a size that is worked out of them is 0 or 1.

NOTE [sizes at the edge]
Operators treat the sizes 0 and 1 apart (NOTE [sizes 0 and 1] in ``equal``), also where such a size
is worked out of named dims, as the ``h - 2`` that a convolution leaves of ``h``. torch asks whether
it is, as it decides what broadcasts and what is empty. It is for few sizes, and no function means
anything by it. So the program is made for the others: its named dims have a least size of their
own. A call with a smaller one has a program in which that size is a number. What the function
itself asks, in its own code, is a need of it all the same, and the descriptors must promise it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tsfunc.bridge.sizes.bounds import has_maximum, with_larger
from tsfunc.bridge.sizes.symbols import Need
from tsfunc.errors import ConstraintViolation
from tsfunc.types import Dim


class AtTheEdge(Exception):
    """A trace may have been made with sizes at the edge, which says nothing of others.

    Args:
        names: the named dims that may have them.
        refusal: what there is to say if it fails with others too.
    """

    def __init__(self, names: frozenset[str], refusal: ConstraintViolation) -> None:
        super().__init__(", ".join(sorted(names)))
        self.names, self.refusal = names, refusal


def away_from(needs: Sequence[Need], dims: Mapping[str, Dim]) -> tuple[dict[str, Dim], list[Need]]:
    """What some needs ask of named dims, if they ask for no more than not to be at the edge.

    Args:
        needs: what a trace has relied on, beyond what the dims promise.
        dims: the named dims.

    Returns:
        The dims that have another least size for it, and the needs that are none of this.
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
    """The named dims of which torch, or this package, has asked for more than is promised."""
    asked = [need.expr.free_symbols for need in needs if not need.by_user]
    return frozenset(str(symbol) for symbol in set().union(*asked))


def _is_of_edges(fact: Any) -> bool:
    """Whether a fact is about sizes that are 0 or 1, or others."""
    from sympy.core.relational import Relational

    if not isinstance(fact, Relational):
        return False
    return has_maximum(fact) or not {0, 1}.isdisjoint((fact.lhs, fact.rhs))
