"""Schemas of torch's operators as plain data."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import (
    _dispatch_find_schema_or_throw,
    _dispatch_get_all_op_names,
    _dispatch_has_kernel_for_dispatch_key,
)
from torch._library.custom_ops import CustomOpDef, _maybe_get_opdef
from torch._ops import OpOverload, OpOverloadPacket

from tsfunc.ops.catalogue.signature import Argument, OperatorSignature, Reader


def registered_overloads(namespace: str) -> list[str]:
    """Return the sorted names of all overloads of a namespace, or of all namespaces if empty."""
    start = f"{namespace}::" if namespace else ""
    return sorted(name for name in _dispatch_get_all_op_names() if name.startswith(start))


def overload_of(name: str) -> OpOverload | None:
    """Return the overload of a dispatcher name (``aten::add.Tensor``), or None."""
    qualified, _, overload = name.partition(".")
    namespace, _, base = qualified.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None) if base else None
    chosen = getattr(packet, overload or "default", None)
    return chosen if isinstance(chosen, OpOverload) else None


def operator_signature(name: str) -> OperatorSignature | None:
    """Return the schema of a dispatcher name, or None if torch has no such operator."""
    overload = overload_of(name)
    return (
        signature_of_overload(overload)
        if overload is not None and _is_registered(overload)
        else None
    )


def overloads_of(packet: str) -> Iterator[OperatorSignature]:
    """Yield the schemas of all overloads of an operator such as ``aten::add``."""
    space, _, base = packet.partition("::")
    operators = getattr(getattr(torch.ops, space), base, None)
    if isinstance(operators, OpOverloadPacket):
        for overload in (getattr(operators, name) for name in operators.overloads()):
            if _is_registered(overload):
                yield signature_of_overload(overload)


def _is_registered(overload: OpOverload) -> bool:
    """True for a dispatcher overload; TorchScript adds others (``aten::add`` of numbers)."""
    try:
        _dispatch_find_schema_or_throw(*overload.name().partition(".")[::2])
    except RuntimeError:
        return False
    return True


@functools.cache
def signature_of_overload(overload: OpOverload) -> OperatorSignature:
    schema = overload._schema
    return OperatorSignature(
        overload.name(),
        tuple(_argument(argument) for argument in schema.arguments),
        tuple(_schema_type(str(result.real_type)) for result in schema.returns),
        frozenset(str(tag).rpartition(".")[2] for tag in overload.tags),
        overload,
    )


def _argument(argument: Any) -> Argument:
    alias = argument.alias_info
    writes = alias is not None and alias.is_write
    return Argument(
        argument.name,
        _schema_type(str(argument.real_type)),
        argument.default_value if argument.has_default_value() else None,
        not argument.has_default_value(),
        argument.kwarg_only,
        writes,
        argument.is_out,
        alias is not None,
        argument.N or 0,
    )


def aliases_of_results(overload: OpOverload) -> tuple[tuple[int | None, ...], bool]:
    """Return the written argument that each result is, or None; and True if a result is a view."""
    schema = overload._schema
    memory = [_written_memory(argument) for argument in schema.arguments]
    written = [_written_memory(value) for value in schema.returns]
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return tuple(memory.index(alias) if alias else None for alias in written), views


def _written_memory(value: Any) -> frozenset[str] | None:
    """Return a schema's alias set of an argument or result that is written to, else None."""
    alias = value.alias_info
    return frozenset(alias.before_set) if alias is not None and alias.is_write else None


def _schema_type(kind: str) -> str:
    """Return a type such as ``Optional[List[Tensor]]`` as schemas write it: ``Tensor[]?``."""
    for long, mark in (("Optional[", "?"), ("List[", "[]")):
        if kind.startswith(long):
            return _schema_type(kind[len(long) : -1]) + mark
    return kind


def has_fake_kernel(name: str) -> bool:
    """True if an operator outside of torch's own namespaces can run on meta tensors."""
    is_of_torch = name.partition("::")[0] in ("aten", "prim", "prims")
    return not is_of_torch and bool(_dispatch_has_kernel_for_dispatch_key(name, "Meta"))


def operator_name(operator: Any) -> str:
    """Return the dispatcher name of an overload, a packet with one overload, or a custom op."""
    if isinstance(operator, CustomOpDef):
        operator = operator._opoverload
    if isinstance(operator, OpOverloadPacket) and len(operator.overloads()) == 1:
        operator = getattr(operator, operator.overloads()[0])
    return operator.name() if isinstance(operator, OpOverload) else str(operator)


def vmap_rule(name: str) -> Any:
    """Return the ``torch.library.register_vmap`` rule of a custom operator, or None."""
    defined = _maybe_get_opdef(name)
    return defined._vmap_fn if defined is not None else None


READER = Reader(
    operator_name,
    operator_signature,
    overloads_of,
    registered_overloads,
    has_fake_kernel,
    vmap_rule,
)
