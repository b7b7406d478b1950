"""The facts about named dims that a trace relies on, checked against the descriptors.

A fact must hold for every size that the descriptors allow. If it does not, the error shows the
user's line that relies on it, and the descriptors for which it would hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tsfunc.bridge.sizes.bounds import holds
from tsfunc.bridge.sizes.size_texts import python_text
from tsfunc.bridge.sizes.symbols import Need
from tsfunc.dispatch.places import source_of
from tsfunc.errors import ConstraintViolation
from tsfunc.program.assumptions import Assumptions, Retrace
from tsfunc.program.dims.rewrites import rewrites_of
from tsfunc.program.dims.small_sizes import away_from, names_at_edge
from tsfunc.program.dims.suggested_fixes import suggested_dims, text_of_fixes
from tsfunc.types import Dim
from tsfunc.types.grammar import Descriptor


def check_needs(
    name: str,
    needs: Sequence[Need],
    dims: Mapping[str, Dim],
    sizes: Mapping[str, int],
    described: Mapping[str, Descriptor],
    assumptions: Assumptions,
) -> dict[str, Dim]:
    """Refuse a trace that relies on more than the descriptors promise.

    Args:
        name: the name of the function.
        needs: the facts that the trace relies on.
        dims: the named dims.
        sizes: their sizes in the call.
        described: the descriptors, by parameter.
        assumptions: the other assumptions of the trace.

    Returns:
        The named dims with another minimum size for this trace: NOTE [small sizes].

    Raises:
        ConstraintViolation: the trace relies on more than the descriptors promise.
        Retrace: the same, but it may apply to the sizes of the call alone.
    """
    unmet = [need for each in needs for need in _parts(each) if not holds(need.expr, dims)]
    if not unmet:
        return {}
    unmet = [_of_call(need, sizes) for need in unmet]
    raised, rest = away_from(unmet, dims)
    if not rest:
        return raised
    refusal = _refusal(name, rest, dims, sizes, described)
    at_edge = names_at_edge(rest)
    if at_edge and not assumptions.other_hints:
        raise Retrace(assumptions.moved(other_hints=at_edge, refusal=refusal))
    raise refusal


def _parts(need: Need) -> Sequence[Need]:
    """Return the needs whose conjunction a need is."""
    from sympy import And

    parts = sorted(And.make_args(need.expr), key=str)
    if len(parts) == 1:
        return [need]
    return [dataclasses.replace(need, fact=python_text(part), expr=part) for part in parts]


def _of_call(need: Need, sizes: Mapping[str, int]) -> Need:
    """Return a need that fixes a number, with the number of the call.

    The trace has another size as a hint for a size of 0 or 1, so its number differs.
    """
    from sympy import Eq

    names = {str(symbol): symbol for symbol in need.expr.free_symbols}
    small = {symbol: sizes[name] for name, symbol in names.items() if sizes.get(name, 2) < 2}
    if not small or not isinstance(need.expr, Eq) or not need.expr.rhs.is_number:
        return need
    value = need.expr.lhs.subs({symbol: sizes[name] for name, symbol in names.items()})
    expr = Eq(need.expr.lhs, value, evaluate=False)
    return dataclasses.replace(need, fact=python_text(expr), expr=expr)


def _refusal(
    name: str,
    unmet: Sequence[Need],
    dims: Mapping[str, Dim],
    sizes: Mapping[str, int],
    described: Mapping[str, Descriptor],
) -> ConstraintViolation:
    lines = "".join(
        f"  {need.fact}  (at {need.place}{source_of(need.place, '; ')})\n"
        for need in dict.fromkeys(unmet)
    )
    suggested = suggested_dims(unmet, dims, sizes)
    return ConstraintViolation(
        f"specialize({name}): one program can't serve every size that the descriptors allow, "
        f"because the function asks for more than they promise:\n{lines}"
        f"{text_of_fixes(suggested, described) if described else ''}"
        f"{_rewritten(unmet)}",
        suggested,
    )


def _rewritten(unmet: Sequence[Need]) -> str:
    text = rewrites_of(dict.fromkeys(source_of(need.place) for need in unmet))
    return f"\n{text}" if text else ""
