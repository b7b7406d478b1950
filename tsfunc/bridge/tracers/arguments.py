"""What a torch operator's schema says of its arguments.

Private names used here (torch 2.11 to 2.13): ``OpOverload._schema``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch._ops import OpOverload

from tsfunc.bridge.tracers.operators import TorchOperator


class Argument(NamedTuple):
    """One argument of an operator.

    Attributes:
        name: as keyword.
        type: as the schema writes it: ``Tensor``, ``Optional[int]``, ``List[Tensor]``.
        shares: whether a result may have its memory.
        written: whether it is written into.
        has_default: whether it may be left out.
    """

    name: str
    type: str
    shares: bool
    written: bool
    has_default: bool


@functools.cache
def _arguments(overload: OpOverload) -> tuple[Argument, ...]:
    return tuple(
        Argument(
            a.name,
            str(a.type),
            a.alias_info is not None,
            a.alias_info is not None and a.alias_info.is_write,
            a.has_default_value(),
        )
        for a in overload._schema.arguments
    )


def arguments_of(op: TorchOperator) -> tuple[Argument, ...]:
    """An operator's arguments, in order."""
    return _arguments(op.overload)


def matched(
    op: TorchOperator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Argument, Any]]:
    """The arguments of a call, each with what is given for it.

    Raises:
        TypeError: there are more than the operator has, or one by a name that it has not.
    """
    declared = arguments_of(op)
    if len(args) > len(declared):
        raise TypeError(f"{op.name} takes {len(declared)} arguments, got {len(args)}")
    yield from zip(declared, args, strict=False)
    names = {argument.name: argument for argument in declared}
    for name, value in kwargs.items():
        if name not in names:
            raise TypeError(f"{op.name} has no argument {name}")
        yield names[name], value
