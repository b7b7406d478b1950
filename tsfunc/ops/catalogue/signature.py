"""An operator's schema as plain data, for those who may not touch torch's own objects.

``tsfunc.bridge.tracers.schemas`` makes these; everything in this room only reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

TENSOR_TYPES = frozenset({"Tensor", "Tensor?", "Tensor[]", "Tensor?[]"})


@dataclass(frozen=True)
class Argument:
    """One argument of an operator.

    Attributes:
        name: as the schema has it.
        type: as the schema writes it: ``Tensor``, ``Tensor?``, ``Tensor[]``, ``int[]``.
        default: its default value; meaningless where ``required``.
        required: whether it has no default.
        keyword: whether it is keyword-only.
        writes: whether the operator writes into it.
        out: whether it is an ``out=`` argument.
        aliased: whether a result may share its memory.
        count: the fixed length of a list, or 0 (``int[2]``).
    """

    name: str
    type: str
    default: Any = None
    required: bool = True
    keyword: bool = False
    writes: bool = False
    out: bool = False
    aliased: bool = False
    count: int = 0

    @property
    def tensor(self) -> bool:
        """Whether it is a tensor, an optional one or a list of them."""
        return self.type in TENSOR_TYPES


@dataclass(frozen=True)
class Signature:
    """What an operator takes, returns, writes and promises.

    Attributes:
        name: the dispatcher's name, ``aten::add.Tensor``.
        arguments: in the schema's order.
        returns: the types of the results.
        tags: torch's tags (``pointwise``, ``nondeterministic_seeded``), without their prefix.
        call: runs the operator.
    """

    name: str
    arguments: tuple[Argument, ...]
    returns: tuple[str, ...]
    tags: frozenset[str] = frozenset()
    call: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    @property
    def packet(self) -> str:
        """The name that all overloads share: ``add``."""
        return self.name.partition("::")[2].partition(".")[0]

    @property
    def tensors(self) -> tuple[Argument, ...]:
        """The tensor arguments that are read: those but ``out=``."""
        return tuple(a for a in self.arguments if a.tensor and not a.out)

    @property
    def inputs(self) -> tuple[Argument, ...]:
        """All arguments but ``out=``."""
        return tuple(a for a in self.arguments if not a.out)

    @property
    def mutates(self) -> tuple[str, ...]:
        """The arguments that are written."""
        return tuple(a.name for a in self.arguments if a.writes)

    @property
    def aliases(self) -> tuple[str, ...]:
        """The arguments whose memory a result shares, or may share, and that aren't written."""
        return tuple(a.name for a in self.arguments if a.aliased and not a.writes)

    @property
    def form(self) -> str:
        """``out``, ``in-place``, ``view``, ``functional``; ``writing`` for what is none of them."""
        if any(a.out for a in self.arguments):
            return "out"
        if self.mutates:
            dunder = self.packet.endswith("__")
            named = self.packet.startswith("__i") if dunder else self.packet.endswith("_")
            return "in-place" if named and self.arguments[0].writes else "writing"
        return "view" if self.aliases else "functional"

    def takes(self, *names: str) -> bool:
        """Whether it has an argument of one of these names."""
        return any(a.name in names for a in self.arguments)

    def __str__(self) -> str:
        shown = [f"{a.type} {a.name}" for a in self.arguments]
        return f"{self.name}({', '.join(shown)}) -> ({', '.join(self.returns)})"


@dataclass(frozen=True)
class Reader:
    """How operators are looked into.

    Attributes:
        name: the dispatcher name of an overload, or of what ``custom_op`` gave.
        signature: the schema of a dispatcher name, or None where torch has no such operator.
        overloads: the schemas of all overloads of a packet (``aten::add``).
        names: all overloads of a namespace; of every namespace where it is empty.
        fake: whether an operator has a fake kernel of its own, in Python.
        vmap_rule: what was registered with ``torch.library.register_vmap``, or None.
    """

    name: Callable[[Any], str]
    signature: Callable[[str], Signature | None]
    overloads: Callable[[str], Iterable[Signature]]
    names: Callable[[str], list[str]]
    fake: Callable[[str], bool]
    vmap_rule: Callable[[str], Any]


# A functional form takes these beside what its variant takes: an out= tensor has them itself.
_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


def functional_form(
    signature: Signature, overloads: Callable[[str], Iterable[Signature]]
) -> Signature | None:
    """The overload that a variant (``out=``, in-place, ``_copy``) is a variant of.

    Args:
        signature: the variant.
        overloads: gives all overloads of a packet by its name (``aten::add``); none where
            there is no such packet.
    """
    space = signature.name.partition("::")[0]
    found = [
        other
        for packet in _packets(signature)
        for other in overloads(f"{space}::{packet}")
        if other.name != signature.name and other.form in ("functional", "view", "writing")
    ]
    return matching(signature, found)


def _packets(signature: Signature) -> Iterable[str]:
    packet = signature.packet
    if signature.form == "out":
        yield packet
        yield f"{packet}_functional"
    elif signature.form == "in-place":
        base = f"__{packet[3:]}" if packet.endswith("__") else packet.rstrip("_")
        yield base
        yield f"{base}_functional"
    elif packet.endswith("_functional"):
        yield packet.removesuffix("_functional")
    elif "view_copy" in signature.tags and packet.endswith("_copy"):
        yield packet.removesuffix("_copy")


def matching(variant: Signature, forms: list[Signature]) -> Signature | None:
    """The form that takes the variant's inputs: by name and type, by type, or else most of them."""

    def inputs(signature: Signature) -> list[tuple[str, str]]:
        return [(a.name, a.type) for a in signature.inputs if a.name not in _OPTIONS]

    def likeness(form: Signature) -> tuple[bool, bool, int, bool]:
        found = inputs(form)
        return (
            found == wanted,
            [kind for _, kind in found] == [kind for _, kind in wanted],
            len(set(found) & set(wanted)),
            form.name.rpartition(".")[2] == variant.name.rpartition(".")[2],
        )

    wanted = inputs(variant)
    best = max(forms, key=likeness, default=None)
    return best if best is not None and any(likeness(best)[:3]) else None
