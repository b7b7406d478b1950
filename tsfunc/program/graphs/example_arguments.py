"""Example arguments made from descriptors, to trace a function before its first call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch

from tsfunc.errors import DescriptorError
from tsfunc.program.guarding.call_spec import placeholder
from tsfunc.types import Contract, Dim, DimExpr, MetaTensorType
from tsfunc.types.containers import TSPytree, TSTuple
from tsfunc.types.grammar import Descriptor
from tsfunc.types.single import NONE, TSPrimitiveType, TSTensor, Value
from tsfunc.types.values import entry_text


def arguments_for(
    name: str, signature: inspect.Signature, contract: Contract
) -> inspect.BoundArguments:
    """Return a call that satisfies a contract, with tensors without data.

    Args:
        contract: the descriptors of its parameters; other parameters have their defaults.

    Raises:
        DescriptorError: a descriptor does not determine an example, or a parameter without a
            default has no descriptor.
    """
    make = _Maker(name, sizes_for(contract.dims))
    bound = signature.bind_partial()
    for parameter in signature.parameters.values():
        descriptor = contract.descriptors.get(parameter.name)
        if descriptor is not None:
            bound.arguments[parameter.name] = make.value(descriptor, parameter.name)
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        elif parameter.default is parameter.empty:
            raise DescriptorError(
                f"{name}.lower: the parameter {parameter.name} has neither a descriptor nor a "
                f"default. Write a MetaTensorType for a tensor, and any other value itself."
            )
    return bound


def sizes_for(dims: Mapping[str, Dim], sizes_to_try: Sequence[int] = ()) -> dict[str, int]:
    """Return a size of 2 or more for each named dim, all different if their bounds allow it.

    Args:
        sizes_to_try: sizes that are preferred if the bounds allow them.
    """
    sizes: dict[str, int] = {}
    for name, dim in dims.items():
        step = dim.multiple_of or 1
        least = -(-max(2, dim.min or 0) // step) * step
        first = [size * step for size in sizes_to_try if size * step > least]
        candidates = dim.one_of or [*first, *range(least, least + _TRIED * step, step)]
        allowed = [n for n in candidates if n >= 2 and dim.admits(n)]
        fresh = [n for n in allowed if n > min(allowed) and n not in sizes.values()]
        sizes[name] = (fresh or allowed or [dim.max or least])[0]
    return sizes


_TRIED = 256  # number of sizes that are tried for a named dim


_NUMBERS = {"int": 1033, "float": 0.625}  # unlikely sizes


class _Maker:
    def __init__(self, name: str, sizes: Mapping[str, int]) -> None:
        self.name = name
        self.sizes = sizes

    def value(self, descriptor: Descriptor, path: str) -> Any:
        match descriptor:
            case TSTensor(cls=torch.Tensor, meta=meta):
                return self._tensor(meta, path)
            case TSTensor(cls=torch.nn.Parameter, meta=meta) if meta != MetaTensorType():
                tensor = self._tensor(meta, path)
                return torch.nn.Parameter(tensor, requires_grad=tensor.requires_grad)
            case Value(value):
                return value
            case _ if descriptor == NONE:
                return None
            case TSPrimitiveType(name) if name in _NUMBERS:
                return _NUMBERS[name]  # an input: NOTE [numbers by their types] in ``inputs``
            case TSTuple(elements):
                return tuple(self.value(c, f"{path}[{i}]") for i, c in enumerate(elements))
            case TSPytree(kind, entries, children):
                pairs = zip(entries, children, strict=True)
                values = {e: self.value(c, path + entry_text(kind, e)) for e, c in pairs}
                return _container(kind, values)
            case _:
                raise DescriptorError(
                    f"{self.name}.lower: {path} is described as {descriptor}, which does not "
                    f"determine an example argument. Write a MetaTensorType for each tensor, a "
                    f"container with the final number of elements, and other values themselves."
                )

    def _tensor(self, meta: MetaTensorType, path: str) -> torch.Tensor:
        dims = meta.dims
        missing = [
            name for name, value in (("dtype", meta.dtype), ("shape", dims)) if value is None
        ]
        if dims is not None and None in dims:
            missing.append(f"dim {dims.index(None)} of the shape")
        if missing or dims is None or meta.dtype is None:
            raise DescriptorError(
                f"{self.name}.lower: the descriptor of {path}, {meta}, leaves the "
                f"{' and the '.join(missing)} open. A size that may vary has a name: "
                f"MetaTensorType(['n', 3], dtype=torch.float32)."
            )
        if None in meta.stride_forms:
            raise DescriptorError(
                f"{self.name}.lower: the descriptor of {path}, {meta}, leaves a stride open. Write "
                f"all strides, or none."
            )
        shape = [self._size(dim, path) for dim in dims]
        strides = [self._size(step, path) for step in meta.stride_forms]
        tensor = placeholder(
            shape,
            meta.dtype,
            meta.device or torch.device("cpu"),
            strides or None,
            meta.memory_format or torch.contiguous_format,
        )
        return tensor.requires_grad_() if meta.requires_grad else tensor

    def _size(self, dim: Any, path: str) -> int:
        if isinstance(dim, Dim):
            return self.sizes[dim.name]
        size = dim.evaluate(self.sizes) if isinstance(dim, DimExpr) else int(dim)
        if size < 0:
            raise DescriptorError(
                f"{self.name}.lower: {dim} in the shape of {path} is {size} for {self.sizes}; "
                f"give its dims bounds, such as Dim('n', min=2), that keep it from being negative."
            )
        return size


def _container(kind: type, children: Mapping[Any, Any]) -> Any:
    if kind is dict:
        return dict(children)
    if optree.is_namedtuple_class(kind):
        return kind(*children.values())
    if issubclass(kind, list | tuple):
        return kind(children.values())
    return kind(**children)
