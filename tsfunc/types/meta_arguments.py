"""The arguments of ``MetaTensorType``, checked and normalized."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import EllipsisType
from typing import Any, TypeAlias

import torch

from tsfunc.errors import DescriptorError
from tsfunc.types.dims import Dim, DimSpec, parse_dim, spell_dim
from tsfunc.types.sizes import DimExpr

_PYTHON_DTYPES: dict[object, torch.dtype] = {
    float: torch.float64,
    int: torch.int64,
    bool: torch.bool,
    complex: torch.complex128,
}
"""The dtypes that torch's own factories give to Python's number types."""

ATTRIBUTES: tuple[str, ...] = (
    "dtype", "rank", "shape", "device", "requires_grad", "layout", "strides", "memory_format",
)  # fmt: skip

FORMAT_RANKS = {torch.channels_last: 4, torch.channels_last_3d: 5}
"""The ranks that each memory format applies to."""

Shape: TypeAlias = tuple["DimSpec | EllipsisType", ...]


def read_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the normalized attributes of ``MetaTensorType``.

    Raises:
        DescriptorError: an argument could not describe any tensor.
    """
    by_name = _by_name(args, kwargs)
    shape = _shape(by_name.get("shape"), by_name.get("rank"))
    dtype = _dtype(by_name.get("dtype"))
    values = {
        "dtype": dtype,
        "rank": None if shape is None or ... in shape else len(shape),
        "shape": shape,
        "device": _device(by_name.get("device")),
        "requires_grad": _flag(by_name.get("requires_grad")),
        "layout": _layout(by_name.get("layout")),
        "strides": _strides(by_name.get("strides")),
        "memory_format": _memory_format(by_name.get("memory_format")),
    }
    _require_one_memory(values)
    _require_some_strides(values)
    if values["requires_grad"] and not (
        dtype is None or dtype.is_floating_point or dtype.is_complex
    ):
        raise DescriptorError(
            f"MetaTensorType(dtype={dtype}, requires_grad=True): only tensors of floating point "
            f"and complex numbers require gradients; leave requires_grad out"
        )
    return values


def _by_name(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constructor's arguments by name.

    The first positional one is the dtype or the shape.
    """
    shape_first = bool(args) and isinstance(args[0], list | tuple)
    order = ("shape",) if shape_first else ATTRIBUTES
    if len(args) > len(order):
        raise DescriptorError(
            f"MetaTensorType: expected at most {len(order)} positional argument(s) "
            f"({', '.join(order)}), got {len(args)}; give the others by name"
        )
    by_name = dict(zip(order, args, strict=False))
    for name, value in kwargs.items():
        if name not in ATTRIBUTES:
            raise DescriptorError(
                f"MetaTensorType: expected an attribute among {', '.join(ATTRIBUTES)}, got {name!r}"
            )
        if name in by_name:
            raise DescriptorError(
                f"MetaTensorType got {name!r} twice: {by_name[name]!r}, {value!r}"
            )
        by_name[name] = value
    return by_name


def _dtype(dtype: object) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    for python_type, meaning in _PYTHON_DTYPES.items():
        if dtype is python_type:
            return meaning
    hint = "; for the description of a tensor write MetaTensorType.of(tensor)"
    raise DescriptorError(
        "MetaTensorType(dtype=...): expected a torch.dtype, float, int, bool, complex or None, "
        f"got {dtype!r}{hint if isinstance(dtype, torch.Tensor) else ''}"
    )


def _shape(shape: object, rank: object) -> Shape | None:
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 0):
        raise DescriptorError(
            f"MetaTensorType(rank=...): expected a non-negative int or None, got {rank!r}"
        )
    if shape is None:
        return None if rank is None else (None,) * rank
    if not isinstance(shape, list | tuple):
        raise DescriptorError(
            "MetaTensorType(shape=...): expected a list or tuple of dims, "
            f"got {shape!r} of type {type(shape).__name__}"
        )
    leading = bool(shape) and shape[0] in _ANY_DIMS
    dims = tuple(_checked_dim(spec, axis) for axis, spec in enumerate(shape) if axis or not leading)
    if rank is None:
        return dims if not leading else (..., *dims) if dims else None
    if len(dims) > rank or (len(dims) < rank and not leading):
        least = "at least " if leading else ""
        raise DescriptorError(
            f"MetaTensorType(shape={list(shape)!r}): expected a rank of {least}{len(dims)}, the "
            f"number of dims in the shape, got rank={rank}; leave the rank out, it follows from "
            f"the shape"
        )
    return (None,) * (rank - len(dims)) + dims


_ANY_DIMS = (..., "...")


def _strides(strides: object) -> tuple[int | str | None, ...] | None:
    if strides is None:
        return None
    if not isinstance(strides, list | tuple):
        raise DescriptorError(
            "MetaTensorType(strides=...): expected a list or tuple of strides, "
            f"got {strides!r} of type {type(strides).__name__}"
        )
    forms = tuple(_stride(stride, axis) for axis, stride in enumerate(strides))
    return None if all(form is None for form in forms) else forms


def _stride(written: object, axis: int) -> int | str | None:
    try:
        form = parse_dim(written)
    except DescriptorError as error:
        raise DescriptorError(f"MetaTensorType(strides=...): stride {axis}: {error}") from None
    if not isinstance(form, Dim):
        return form.text if isinstance(form, DimExpr) else form
    if form.is_bounded:
        raise DescriptorError(
            f"MetaTensorType(strides=...): stride {axis}: the bounds of {form!r} belong to the "
            f"shape that has this size; write its name, {form.name!r}"
        )
    return form.name


def _memory_format(memory_format: object) -> torch.memory_format | None:
    if memory_format is None:
        return None
    if isinstance(memory_format, torch.memory_format) and memory_format in _MEMORY_FORMATS:
        return memory_format
    raise DescriptorError(
        "MetaTensorType(memory_format=...): expected torch.contiguous_format, "
        f"torch.channels_last, torch.channels_last_3d or None, got {memory_format!r}"
    )


_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


_memory_of = operator.itemgetter("shape", "strides", "memory_format")


def _require_one_memory(attributes: Mapping[str, Any]) -> None:
    """Raise unless strides and memory format fit the shape and the layout."""
    shape, strides, memory_format = _memory_of(attributes)
    name = "strides" if strides is not None else "memory_format"
    order = attributes[name]
    if order is None:
        return
    if attributes["layout"] not in (None, torch.strided):
        raise DescriptorError(
            f"MetaTensorType(layout={attributes['layout']}, {name}={order!r}): only strided "
            f"tensors have {name.replace('_', ' ')}"
        )
    rank_of_order = len(strides) if strides is not None else FORMAT_RANKS.get(memory_format)
    least = 0 if shape is None else len(shape) - (... in shape)
    most = None if shape is None or ... in shape else least
    formats = FORMAT_RANKS.get(memory_format, rank_of_order)
    if rank_of_order is None or (
        rank_of_order == formats and least <= rank_of_order and most in (None, rank_of_order)
    ):
        return
    sizes = "" if shape is None else f"shape={list(shape)!r}, "
    raise DescriptorError(
        f"MetaTensorType({sizes}{name}={order!r}): {name.replace('_', ' ')} of rank "
        f"{rank_of_order} can't be those of a tensor of rank "
        f"{least if rank_of_order == formats else formats}"
    )


def _require_some_strides(attributes: Mapping[str, Any]) -> None:
    """Raise unless numeric strides fit the memory format."""
    shape, strides, memory_format = _memory_of(attributes)
    if memory_format is None or shape is None or strides is None:
        return
    if not all(isinstance(entry, int) for entry in (*shape, *strides)):
        return
    tensor = torch.empty_strided(shape, strides, device="meta")
    if not tensor.is_contiguous(memory_format=memory_format):
        raise DescriptorError(
            f"MetaTensorType(shape={list(shape)!r}, strides={strides!r}, "
            f"memory_format={memory_format}): a tensor with these strides is not contiguous in "
            f"this format; leave one of them out"
        )


def _checked_dim(spec: object, axis: int) -> DimSpec:
    if spec is ... or spec == "...":
        raise DescriptorError(
            f"MetaTensorType(shape=...): dim {axis}: `...` stands for the dims before all others; "
            f"write None for one dim that is not known"
        )
    try:
        return spell_dim(parse_dim(spec))
    except DescriptorError as error:
        raise DescriptorError(f"MetaTensorType(shape=...): dim {axis}: {error}") from None


def _device(device: object) -> torch.device | None:
    if device is None:
        return None
    if not isinstance(device, str | torch.device):
        raise DescriptorError(
            f"MetaTensorType(device=...): expected a torch.device, its name or None, got {device!r}"
        )
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise DescriptorError(
            f"MetaTensorType(device=...): expected a device of torch, for example 'cpu', 'cuda' "
            f"or 'cuda:1', got {device!r}"
        ) from None
    # There is only one CPU: a tensor on "cpu:0" has the device "cpu".
    return torch.device(parsed.type) if parsed.type in ("cpu", "meta") else parsed


def _flag(requires_grad: object) -> bool | None:
    if requires_grad is None or isinstance(requires_grad, bool):
        return requires_grad
    raise DescriptorError(
        f"MetaTensorType(requires_grad=...): expected True, False or None, got {requires_grad!r}"
    )


def _layout(layout: object) -> torch.layout | None:
    if layout is None or isinstance(layout, torch.layout):
        return layout
    raise DescriptorError(
        "MetaTensorType(layout=...): expected a torch.layout such as torch.strided or None, "
        f"got {layout!r}"
    )
