"""The schema of an operator as plain data, without torch's own objects.

``tsfunc.bridge.tracers.schemas`` makes these objects; the catalogue only reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tsfunc._text import count_text

TENSOR_TYPES = frozenset({"Tensor", "Tensor?", "Tensor[]", "Tensor?[]"})


@dataclass(frozen=True)
class Argument:
    """One argument of an operator.

    Attributes:
        name: the name in the schema.
        type: the type in the schema: ``Tensor``, ``Tensor?``, ``Tensor[]``, ``int[]``.
        default: the default value; meaningless if ``required``.
        required: True if it has no default.
        keyword: True if it is keyword-only.
        writes: True if the operator writes into it.
        out: True if it is an ``out=`` argument.
        aliased: True if a result can alias it.
        count: the fixed length of a list (``int[2]``), or 0.
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
        """True for a tensor, an optional tensor or a list of tensors."""
        return self.type in TENSOR_TYPES


@dataclass(frozen=True)
class OperatorSignature:
    """An operator's name, arguments, results and tags.

    Attributes:
        name: the dispatcher's name, ``aten::add.Tensor``.
        arguments: the arguments in the schema's order.
        returns: the types of the results.
        tags: torch's tags (``pointwise``, ``nondeterministic_seeded``), without their prefix.
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
        """The tensor arguments except ``out=``."""
        return tuple(a for a in self.arguments if a.tensor and not a.out)

    @property
    def inputs(self) -> tuple[Argument, ...]:
        """All arguments except ``out=``."""
        return tuple(a for a in self.arguments if not a.out)

    @property
    def mutates(self) -> tuple[str, ...]:
        """The names of the arguments that are written."""
        return tuple(a.name for a in self.arguments if a.writes)

    @property
    def aliases(self) -> tuple[str, ...]:
        """The names of the arguments that a result can alias and that are not written."""
        return tuple(a.name for a in self.arguments if a.aliased and not a.writes)

    @property
    def form(self) -> str:
        """``out``, ``in-place``, ``view``, ``functional`` or ``writing``.

        ``writing`` stands for mutating operators that have neither an out= argument nor an
        in-place name.
        """
        if any(a.out for a in self.arguments):
            return "out"
        if self.mutates:
            dunder = self.packet.endswith("__")
            named = self.packet.startswith("__i") if dunder else self.packet.endswith("_")
            return "in-place" if named and self.arguments[0].writes else "writing"
        return "view" if self.aliases else "functional"

    def takes(self, *names: str) -> bool:
        """True if the operator has an argument of one of these names."""
        return any(a.name in names for a in self.arguments)

    def position(self, *names: str) -> int | None:
        """Return the position of the argument with one of these names, or None."""
        return next((i for i, a in enumerate(self.arguments) if a.name in names), None)

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[Argument, Any]]:
        """Yield the arguments of a call, each with its value.

        Raises:
            TypeError: there are too many arguments, or an argument is unknown or given twice.
        """
        positional = [a for a in self.arguments if not a.keyword]
        if len(args) > len(positional):
            most = count_text(len(positional), "argument")
            raise TypeError(f"{self.name}: expected at most {most}, got {len(args)}")
        yield from zip(positional, args, strict=False)
        rest = {a.name: a for a in self.arguments}
        for argument, _ in zip(positional, args, strict=False):
            del rest[argument.name]
        for name, value in kwargs.items():
            if name not in rest:
                raise TypeError(
                    f"{self.name}: got {name} twice"
                    if self.takes(name)
                    else f"{self.name}: got an unknown argument {name[:40]!r}"
                )
            yield rest[name], value

    def in_order(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments of a call in the order of the schema.

        Raises:
            TypeError: as :meth:`bind`.
        """
        given = {argument.name: value for argument, value in self.bind(args, kwargs)}
        return [given[a.name] for a in self.arguments if a.name in given]

    def __str__(self) -> str:
        shown = [f"{a.type} {a.name}" for a in self.arguments]
        return f"{self.name}({', '.join(shown)}) -> ({', '.join(self.returns)})"


@dataclass(frozen=True)
class Reader:
    """The functions that inspect operators.

    Attributes:
        name: returns the dispatcher name of an overload or of a ``custom_op`` result.
        signature: returns the schema of a dispatcher name, or None if torch has no such operator.
        overloads: returns the schemas of all overloads of a packet (``aten::add``).
        names: returns all overloads of a namespace, or of every namespace for an empty string.
        fake: returns True if an operator has a fake kernel in Python.
        vmap_rule: returns the rule of ``torch.library.register_vmap``, or None.
    """

    name: Callable[[Any], str]
    signature: Callable[[str], OperatorSignature | None]
    overloads: Callable[[str], Iterable[OperatorSignature]]
    names: Callable[[str], list[str]]
    fake: Callable[[str], bool]
    vmap_rule: Callable[[str], Any]


# A functional form has these arguments in addition; an out= tensor determines them itself.
_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


def functional_form(
    signature: OperatorSignature, overloads: Callable[[str], Iterable[OperatorSignature]]
) -> OperatorSignature | None:
    """Return the overload of which an operator (``out=``, in-place, ``_copy``) is a variant.

    Args:
        overloads: returns all overloads of a packet by its name (``aten::add``), or an empty list.

    Returns:
        The schema of the overload, or None.
    """
    space = signature.name.partition("::")[0]
    candidates = [
        other
        for packet in _packets(signature)
        for other in overloads(f"{space}::{packet}")
        if other.name != signature.name and other.form in ("functional", "view", "writing")
    ]
    return matching_form(signature, candidates)


def _packets(signature: OperatorSignature) -> Iterable[str]:
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


def matching_form(
    variant: OperatorSignature, forms: list[OperatorSignature]
) -> OperatorSignature | None:
    """Return the form whose inputs match the variant's best.

    Equal names and types rank first, then equal types, then the number of equal inputs.
    """

    def inputs(signature: OperatorSignature) -> list[tuple[str, str]]:
        return [(a.name, a.type) for a in signature.inputs if a.name not in _OPTIONS]

    def likeness(form: OperatorSignature) -> tuple[bool, bool, int, bool]:
        offered = inputs(form)
        return (
            offered == expected,
            [kind for _, kind in offered] == [kind for _, kind in expected],
            len(set(offered) & set(expected)),
            form.name.rpartition(".")[2] == variant.name.rpartition(".")[2],
        )

    expected = inputs(variant)
    best = max(forms, key=likeness, default=None)
    return best if best is not None and any(likeness(best)[:3]) else None
