"""Schemas of torch's operators as plain data, for the catalogue in ``ops``.

Private names used here (torch 2.11 to 2.13): ``_dispatch_get_all_op_names`` lists what is
registered with the dispatcher, ``_dispatch_find_schema_or_throw`` tells whether a name is, and
``_dispatch_has_kernel_for_dispatch_key`` whether it has a kernel; ``OpOverload._schema`` is an
overload's schema; ``CustomOpDef``, what ``torch.library.custom_op`` makes of a function, has its
overload as ``_opoverload``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._C import (
    _dispatch_find_schema_or_throw,
    _dispatch_get_all_op_names,
    _dispatch_has_kernel_for_dispatch_key,
)
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from tsfunc.bridge.tracers.operators import overload_of, vmap_rule
from tsfunc.ops.catalogue.signature import Argument, Reader, Signature


def registered(namespace: str = "") -> list[str]:
    """The names of all overloads that a namespace has, sorted; of all, where it is empty."""
    start = f"{namespace}::" if namespace else ""
    return sorted(name for name in _dispatch_get_all_op_names() if name.startswith(start))


def signature_of(name: str) -> Signature | None:
    """The schema of a dispatcher name, or None where torch has no such operator."""
    overload = overload_of(name)
    return _signature(overload) if overload is not None and _is_registered(overload) else None


def overloads_of(packet: str) -> Iterator[Signature]:
    """The schemas of all overloads of ``aten::add``; none where there is no such operator."""
    space, _, base = packet.partition("::")
    found = getattr(getattr(torch.ops, space), base, None)
    if isinstance(found, OpOverloadPacket):
        for overload in (getattr(found, name) for name in found.overloads()):
            if _is_registered(overload):
                yield _signature(overload)


def _is_registered(overload: OpOverload) -> bool:
    """TorchScript keeps overloads of its own (``aten::add`` of numbers) with those of torch."""
    try:
        _dispatch_find_schema_or_throw(*overload.name().partition(".")[::2])
    except RuntimeError:
        return False
    return True


def _signature(overload: OpOverload) -> Signature:
    schema = overload._schema
    return Signature(
        overload.name(),
        tuple(_argument(argument) for argument in schema.arguments),
        tuple(_spelled(str(result.real_type)) for result in schema.returns),
        frozenset(str(tag).rpartition(".")[2] for tag in overload.tags),
        overload,
    )


def _argument(argument: Any) -> Argument:
    alias = argument.alias_info
    writes = alias is not None and alias.is_write
    return Argument(
        argument.name,
        _spelled(str(argument.real_type)),
        argument.default_value if argument.has_default_value() else None,
        not argument.has_default_value(),
        argument.kwarg_only,
        writes,
        argument.is_out,
        alias is not None,
        argument.N or 0,
    )


def _spelled(kind: str) -> str:
    """``Optional[List[Tensor]]`` as schemas write it: ``Tensor[]?``."""
    for long, mark in (("Optional[", "?"), ("List[", "[]")):
        if kind.startswith(long):
            return _spelled(kind[len(long) : -1]) + mark
    return kind


def has_fake_kernel(name: str) -> bool:
    """Whether an operator that is none of torch's own can run on meta tensors."""
    own = name.partition("::")[0] in ("aten", "prim", "prims")
    return not own and bool(_dispatch_has_kernel_for_dispatch_key(name, "Meta"))


def name_of(operator: Any) -> str:
    """The dispatcher name of an overload, a packet of just one, or what ``custom_op`` gave."""
    if isinstance(operator, CustomOpDef):
        operator = operator._opoverload
    if isinstance(operator, OpOverloadPacket) and len(operator.overloads()) == 1:
        operator = getattr(operator, operator.overloads()[0])
    return operator.name() if isinstance(operator, OpOverload) else str(operator)


READER = Reader(name_of, signature_of, overloads_of, registered, has_fake_kernel, vmap_rule)
