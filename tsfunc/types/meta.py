"""`MetaTensorType`: what is known of a tensor before it comes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Union, overload

import torch

from tsfunc.errors import DescriptorError
from tsfunc.types.dims import DimForm, DimSpec, parse_dim, spell_dim

_PYTHON_DTYPES: dict[object, torch.dtype] = {
    float: torch.float64,
    int: torch.int64,
    bool: torch.bool,
    complex: torch.complex128,
}
"""The dtypes that torch's own factories give to Python's number types."""

SHORT_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex128: "c128",
    torch.complex64: "c64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}

_UNION: Any = Union  # type checkers know it only with constant arguments

_FIELDS: tuple[str, ...] = ("dtype", "rank", "shape", "device", "requires_grad", "layout")


@dataclass(frozen=True, init=False, repr=False)
class MetaTensorType:
    """What a descriptor promises of a tensor; None stands for what is not known.

    A list or tuple as first argument is the shape.

    Args:
        dtype: a ``torch.dtype``, or ``float``, ``int``, ``bool`` or ``complex``, which mean
            what they mean to torch's factories (``float`` is ``torch.float64``).
        rank: the number of dims; it must agree with `shape`, and follows from it.
        shape: a dim each: a size, a name (``"n"``), an expression (``"2*n+1"``), a `Dim`
            with bounds, or None for a size that is not known.
        device: a ``torch.device`` or its name; ``"cuda"`` stands for every CUDA device.
        requires_grad: True or False.
        layout: a ``torch.layout``.

    Raises:
        DescriptorError: an argument could not describe any tensor.

    Example:
        >>> meta = MetaTensorType(["n", 64], dtype=torch.float32, device="cpu")
        >>> print(meta)
        f32[n, 64] cpu
        >>> meta
        MetaTensorType(dtype=torch.float32, shape=('n', 64), device='cpu')
        >>> meta.rank
        2

    Source: ``MetaTensorType`` of the TorchScript Input Descriptor proposal.
    """

    dtype: torch.dtype | None
    rank: int | None = field(init=False)
    shape: tuple[DimSpec, ...] | None
    device: torch.device | None
    requires_grad: bool | None
    layout: torch.layout | None

    @overload
    def __init__(
        self,
        dtype: torch.dtype | type[complex] | None = None,
        rank: int | None = None,
        shape: Sequence[DimSpec] | None = None,
        device: str | torch.device | None = None,
        requires_grad: bool | None = None,
        layout: torch.layout | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        shape: Sequence[DimSpec],
        /,
        *,
        dtype: torch.dtype | type[complex] | None = None,
        rank: int | None = None,
        device: str | torch.device | None = None,
        requires_grad: bool | None = None,
        layout: torch.layout | None = None,
    ) -> None: ...
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _by_name(args, kwargs)
        shape = _shape(given.get("shape"), given.get("rank"))
        values = {
            "dtype": _dtype(given.get("dtype")),
            "rank": None if shape is None else len(shape),
            "shape": shape,
            "device": _device(given.get("device")),
            "requires_grad": _flag(given.get("requires_grad")),
            "layout": _layout(given.get("layout")),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> MetaTensorType:
        """The full description of a tensor, each size a number.

        Raises:
            DescriptorError: `tensor` is no tensor.

        Example:
            >>> print(MetaTensorType.of(torch.zeros(2, 3)))
            f32[2, 3] cpu no_grad strided
        """
        if not isinstance(tensor, torch.Tensor):
            raise DescriptorError(
                f"MetaTensorType.of(tensor) describes a torch.Tensor, got {tensor!r} of type "
                f"{type(tensor).__name__}"
            )
        return cls(
            [int(size) for size in tensor.shape],
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
            layout=tensor.layout,
        )

    @functools.cached_property
    def dims(self) -> tuple[DimForm, ...] | None:
        """What each dim of the shape stands for; None where the rank is not known.

        An int is fixed, a `Dim` named, a `DimExpr` computed from named ones, None open.
        """
        return None if self.shape is None else tuple(map(parse_dim, self.shape))

    def __repr__(self) -> str:
        if self.shape is not None and all(dim is None for dim in self.shape) and self.shape:
            sizes: dict[str, object] = {"rank": self.rank}
        else:
            sizes = {"shape": self.shape}
        device = None if self.device is None else str(self.device)
        known = {
            "dtype": self.dtype,
            **sizes,
            "device": device,
            "requires_grad": self.requires_grad,
            "layout": self.layout,
        }
        words = [f"{name}={value!r}" for name, value in known.items() if value is not None]
        return f"MetaTensorType({', '.join(words)})"

    def __str__(self) -> str:
        return tensor_text(self.dtype, self.dims, self.device, self.requires_grad, self.layout)

    def __or__(self, other: object) -> Any:
        """``meta | None``, as with a class: ``typing.Union[meta, None]``."""
        return _UNION[self, other]

    def __ror__(self, other: object) -> Any:
        return _UNION[other, self]

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Refused; it is here because Python 3.10's ``List[meta]`` asks for a callable."""
        raise TypeError(f"{self!r} describes tensors and can't be called; it makes none")


def on_device(came: torch.device, promised: torch.device) -> bool:
    """Whether a device is the one that is promised, or one of that kind where none is."""
    return came == promised or (promised.index is None and came.type == promised.type)


def tensor_text(
    dtype: torch.dtype | None,
    dims: Iterable[object] | None,
    device: torch.device | None = None,
    requires_grad: bool | None = None,
    layout: torch.layout | None = None,
) -> str:
    """A description of a tensor in a line; what is None is left out or shown as ``?``."""
    kind = "tensor" if dtype is None else SHORT_DTYPES.get(dtype, _plain(dtype))
    shape = "..." if dims is None else ", ".join("?" if d is None else str(d) for d in dims)
    words = [f"{kind}[{shape}]"]
    if device is not None:
        words.append(str(device))
    if requires_grad is not None:
        words.append("requires_grad" if requires_grad else "no_grad")
    if layout is not None:
        words.append(_plain(layout))
    return " ".join(words)


def _plain(name: object) -> str:
    return str(name).removeprefix("torch.")


def _by_name(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's arguments by name, positional ones read in either of its two orders."""
    shape_first = bool(args) and isinstance(args[0], list | tuple)
    order = ("shape",) if shape_first else _FIELDS
    if len(args) > len(order):
        raise DescriptorError(
            f"MetaTensorType takes {len(order)} positional argument(s) "
            f"({', '.join(order)}), got {len(args)}; give the others by name"
        )
    given = dict(zip(order, args, strict=False))
    for name, value in kwargs.items():
        if name not in _FIELDS:
            raise DescriptorError(
                f"MetaTensorType has no attribute {name!r}; it has {', '.join(_FIELDS)}"
            )
        if name in given:
            raise DescriptorError(f"MetaTensorType got {name!r} twice: {given[name]!r}, {value!r}")
        given[name] = value
    return given


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


def _shape(shape: object, rank: object) -> tuple[DimSpec, ...] | None:
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
    if rank is not None and len(shape) != rank:
        raise DescriptorError(
            f"MetaTensorType(rank={rank}, shape={list(shape)!r}): the shape has {len(shape)} "
            f"dim(s), so the rank must be {len(shape)}; leave the rank out, it follows"
        )
    return tuple(_dim(spec, axis) for axis, spec in enumerate(shape))


def _dim(spec: object, axis: int) -> DimSpec:
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
        found = torch.device(device)
    except RuntimeError:
        raise DescriptorError(
            f"MetaTensorType(device=...): torch knows no device {device!r}; "
            "write for example 'cpu', 'cuda' or 'cuda:1'"
        ) from None
    # There is one CPU: tensors on "cpu:0" say that they are on "cpu".
    return torch.device(found.type) if found.type in ("cpu", "meta") else found


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
