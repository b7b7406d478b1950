"""The rules that assign a shape category to an operator.

The sources are, in this order: the operator that a variant follows, a decision made by hand
(``decided.txt``), the schema and torch's tags, and the trial calls. Each verdict names its source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tsfunc.ops.catalogue.decisions import Decisions
from tsfunc.ops.catalogue.signature import OperatorSignature, functional_form, matching_form
from tsfunc.ops.catalogue.trial import Evidence
from tsfunc.ops.registry import Category

Overloads = Callable[[str], Iterable[OperatorSignature]]

# The names of arguments that name dims, if they are an int or a list of ints.
DIM_NAMES = frozenset(
    "dim dims dim0 dim1 dim2 axis axis0 axis1 dimension start_dim end_dim source destination "
    "dims_self dims_other ch_axis".split()
)
UNKNOWN = "unknown: schema, tags and trying do not tell"


@dataclass(frozen=True)
class Verdict:
    """A category and a description of its source."""

    category: Category
    source: str


def dim_arguments(signature: OperatorSignature) -> tuple[str, ...]:
    """Return the names of the arguments that name dims."""
    return tuple(
        a.name for a in signature.inputs if a.type.startswith("int") and a.name in DIM_NAMES
    )


def leads_to(
    signature: OperatorSignature, decisions: Decisions, overloads: Overloads
) -> str | None:
    """Return the operator that this operator follows, or None."""
    bare = signature.name.partition("::")[2]
    decided = decisions.exact.get(bare if "." in bare else f"{bare}.default")
    if decided is None and signature.form != "out":
        decided = decisions.exact.get(signature.packet)
    if decided is not None:
        return _target(signature, decided.follows, overloads) if decided.follows else None
    form = functional_form(signature, overloads)
    if form is not None:
        return form.name
    for prefix, suffix in (("special_", ""), ("", "_backward")):
        packet = signature.packet
        if packet.startswith(prefix) and packet.endswith(suffix):
            base = packet[len(prefix) : len(packet) - len(suffix)]
            if base != packet and decisions.of(packet) is None:
                target = _target(signature, base, overloads)
                if target is not None:
                    return target
    return None


def _target(signature: OperatorSignature, target: str, overloads: Overloads) -> str | None:
    """Return the overload of an operator's name that takes the arguments of ``signature``."""
    space = signature.name.partition("::")[0]
    packet, _, overload = target.partition(".")
    if overload:
        return f"{space}::{target}"
    forms = [o for o in overloads(f"{space}::{packet}") if o.form in ("functional", "view")]
    form = matching_form(signature, forms)
    return form.name if form is not None else None


def by_decision(signature: OperatorSignature, decisions: Decisions) -> Verdict | None:
    """Return the category that was decided by hand for this name, or None."""
    decided = decisions.of(signature.name.partition("::")[2])
    if decided is None or decided.category is None:
        return None
    return Verdict(decided.category, f"decided: {decided.reason}")


def by_schema(signature: OperatorSignature) -> Verdict | None:
    """Return the category that follows from the argument and result types or torch's tags."""
    tensors = [a for a in signature.tensors if a.type != "Tensor?"]
    if tensors and all(a.type == "Tensor[]" for a in tensors):
        return Verdict(Category.VARIADIC, "schema: its tensors come in lists")
    if not any("Tensor" in result for result in signature.returns):
        return Verdict(Category.TRIVIAL, "schema: it returns no tensor")
    if not signature.tensors:
        return Verdict(Category.FACTORY, "schema: it takes no tensor")
    if "dynamic_output_shape" in signature.tags:
        return Verdict(Category.DYNAMIC, "tag: dynamic_output_shape")
    for tag in ("pointwise", "reduction"):
        if tag in signature.tags:
            return Verdict(Category.TENSOR_ITERATOR, f"tag: {tag}")
    if signature.takes("keepdim"):
        return Verdict(Category.TENSOR_ITERATOR, "schema: a reduction, for it takes keepdim")
    return None


def by_trial(signature: OperatorSignature, evidence: Evidence) -> Verdict | None:
    """Return the category that follows from calls at ranks 0 to 6."""
    if not evidence.tried:
        return None
    first = next(iter(evidence.ranks))
    free = evidence.every_rank(first) and evidence.together and not dim_arguments(signature)
    if evidence.broadcasts and evidence.elements in ("apart", ""):
        return _try(Category.TENSOR_ITERATOR, "every rank, and the arguments broadcast")
    if free and evidence.same and evidence.elements == "apart":
        return _try(Category.TENSOR_ITERATOR, "every rank, each element by itself")
    if free and evidence.same and evidence.elements in ("copied", "ignored"):
        return _try(Category.IDENTITY, f"every rank, the same size, values {evidence.elements}")
    ranks = evidence.in_words().partition(";")[0]
    if dim_arguments(signature):
        names = ", ".join(dim_arguments(signature))
        return _try(Category.N_DIMENSIONAL, f"{ranks}; dims by {names}")
    if any(len(taken) == 1 and taken != [0] for taken in evidence.ranks.values()):
        return _try(Category.FIXED, ranks)
    lowest, highest = evidence.ranks[first][0], evidence.ranks[first][-1]
    if lowest and highest == 6:
        return _try(Category.BATCHED, ranks)
    if highest < 6:
        return _try(Category.FIXED, ranks)
    return None


def _try(category: Category, words: str) -> Verdict:
    return Verdict(category, f"tried: {words}")


def verdict(
    signature: OperatorSignature,
    decisions: Decisions,
    overloads: Overloads,
    followed: Callable[[str], Category | None],
    evidence: Evidence | None,
) -> Verdict:
    """Return the category of an operator.

    Args:
        decisions: the decisions made by hand.
        overloads: returns the schemas of all overloads of a packet's name.
        followed: returns the category of another operator, for variants.
        evidence: the evidence of trial calls, or None if the operator was not tried.
    """
    target = leads_to(signature, decisions, overloads)
    if target is not None:
        category = followed(target)
        if category is not None:
            return Verdict(category, f"follows {target}")
    decided = by_decision(signature, decisions) or by_schema(signature)
    if decided is None and evidence is not None:
        decided = by_trial(signature, evidence)
    return decided or Verdict(Category.OTHER, UNKNOWN)
