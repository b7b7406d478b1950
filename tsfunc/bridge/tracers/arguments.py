"""The arguments of torch operators, as their schemas declare them.

Private names used here (torch 2.11 to 2.13): ``OpOverload._schema``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch._ops import OpOverload

from tsfunc.bridge.tracers.operators import TorchOperator


class OperatorArgument(NamedTuple):
    """One argument of an operator.

    Attributes:
        name: the keyword.
        type: the type in the schema: ``Tensor``, ``Optional[int]``, ``List[Tensor]``.
        shares: True if a result may share its memory.
        written: True if the operator writes to it.
        has_default: True if it may be omitted.
    """

    name: str
    type: str
    shares: bool
    written: bool
    has_default: bool


@functools.cache
def _arguments(overload: OpOverload) -> tuple[OperatorArgument, ...]:
    return tuple(
        OperatorArgument(
            a.name,
            str(a.type),
            a.alias_info is not None,
            a.alias_info is not None and a.alias_info.is_write,
            a.has_default_value(),
        )
        for a in overload._schema.arguments
    )


def arguments_of(op: TorchOperator) -> tuple[OperatorArgument, ...]:
    """Return an operator's arguments, in order."""
    return _arguments(op.overload)


def matched(
    op: TorchOperator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[OperatorArgument, Any]]:
    """Yield the arguments of a call, each with its value.

    Raises:
        TypeError: there are too many arguments, or an unknown keyword.
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
