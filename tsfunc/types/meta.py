"""`MetaTensorType`: what is known of a tensor before it comes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, NoReturn, TypeAlias, Union, overload

import torch

from tsfunc.errors import DescriptorError
from tsfunc.types.dims import Dim, DimExpr, DimForm, DimSpec, ShapeSpec, parse_dim, spell_dim

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

_FIELDS: tuple[str, ...] = (
    "dtype", "rank", "shape", "device", "requires_grad", "layout", "strides", "memory_format",
)  # fmt: skip

_RANKS = {torch.channels_last: 4, torch.channels_last_3d: 5}
"""The ranks that memory formats are of."""

Shape: TypeAlias = tuple["DimSpec | EllipsisType", ...]


@dataclass(frozen=True, init=False, repr=False)
class MetaTensorType:
    """What a descriptor promises of a tensor; None stands for what is not known.

    A list or tuple as first argument is the shape.

    Args:
        dtype: a ``torch.dtype``, or ``float``, ``int``, ``bool`` or ``complex``, which mean
            what they mean to torch's factories (``float`` is ``torch.float64``).
        rank: the number of dims; it must agree with `shape`, and follows from it.
        shape: a dim each: a size, a name (``"n"``), an expression (``"2*n+1"``), a `Dim`
            with bounds, or None for a size that is not known. ``...`` (or ``"..."``) as the
            first entry stands for any number of dims before the others.
        device: a ``torch.device`` or its name; ``"cuda"`` stands for every CUDA device.
        requires_grad: True or False.
        layout: a ``torch.layout``.
        strides: an entry each: an int, a name or an expression over sizes that shapes have, or
            None where it is not known.
        memory_format: ``torch.contiguous_format``, ``channels_last`` or ``channels_last_3d``;
            a tensor keeps it if it is contiguous in it.

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
        >>> print(MetaTensorType([..., 64]), MetaTensorType(["n", 3], strides=[1, "n"]))
        tensor[..., 64] tensor[n, 3] strides[1, n]

    Source: ``MetaTensorType`` of the TorchScript Input Descriptor proposal.
    """

    dtype: torch.dtype | None
    rank: int | None = field(init=False)
    shape: Shape | None
    device: torch.device | None
    requires_grad: bool | None
    layout: torch.layout | None
    strides: tuple[int | str | None, ...] | None
    memory_format: torch.memory_format | None

    @overload
    def __init__(
        self,
        dtype: torch.dtype | type[complex] | None = None,
        rank: int | None = None,
        shape: ShapeSpec | None = None,
        device: str | torch.device | None = None,
        requires_grad: bool | None = None,
        layout: torch.layout | None = None,
        strides: Sequence[int | str | None] | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        shape: ShapeSpec,
        /,
        *,
        dtype: torch.dtype | type[complex] | None = None,
        rank: int | None = None,
        device: str | torch.device | None = None,
        requires_grad: bool | None = None,
        layout: torch.layout | None = None,
        strides: Sequence[int | str | None] | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> None: ...
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _by_name(args, kwargs)
        shape = _shape(given.get("shape"), given.get("rank"))
        values = {
            "dtype": _dtype(given.get("dtype")),
            "rank": None if shape is None or ... in shape else len(shape),
            "shape": shape,
            "device": _device(given.get("device")),
            "requires_grad": _flag(given.get("requires_grad")),
            "layout": _layout(given.get("layout")),
            "strides": _strides(given.get("strides")),
            "memory_format": _memory_format(given.get("memory_format")),
        }
        _require_one_memory(values)
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

    @classmethod
    def parse(cls, text: str) -> MetaTensorType:
        """The description that ``str`` of one is.

        Raises:
            DescriptorError: the text describes no tensor.

        Example:
            >>> MetaTensorType.parse("f32[n, 64] cpu")
            MetaTensorType(dtype=torch.float32, shape=('n', 64), device='cpu')
        """
        from tsfunc.types.text import parse_tensor  # reads what this file defines

        return parse_tensor(text)

    def __le__(self, other: object) -> bool:
        """Whether every tensor that this describes is described by `other` too.

        Example:
            >>> MetaTensorType([3, 3]) <= MetaTensorType(["n", "n"]) <= MetaTensorType(rank=2)
            True
        """
        if not isinstance(other, MetaTensorType):
            return NotImplemented
        from tsfunc.types.descriptor_lattice import is_below_alone

        return is_below_alone(self, other)

    def __ge__(self, other: object) -> bool:
        return other <= self if isinstance(other, MetaTensorType) else NotImplemented

    def __lt__(self, other: object) -> bool:
        known = isinstance(other, MetaTensorType)
        return self <= other and not other <= self if known else NotImplemented

    def __gt__(self, other: object) -> bool:
        return other < self if isinstance(other, MetaTensorType) else NotImplemented

    def join(self, other: MetaTensorType) -> MetaTensorType:
        """What both promise. Sizes that differ get a name; of different ranks the last are kept.

        Example:
            >>> print(MetaTensorType([3, 3], dtype=float).join(MetaTensorType([4, 4])))
            tensor[n, n]
            >>> print(MetaTensorType([2, 64]).join(MetaTensorType([64])))
            tensor[..., 64]
        """
        from tsfunc.types.descriptor_lattice import join_alone

        return join_alone(self, other)

    def widen(self, example: torch.Tensor) -> MetaTensorType:
        """The least that is promised here and true of one more tensor.

        Example:
            >>> print(MetaTensorType.of(torch.ones(3)).widen(torch.ones(5, dtype=torch.float64)))
            tensor[n] cpu no_grad strided
        """
        return self.join(MetaTensorType.of(example))

    def split(self, **alternatives: Sequence[Any]) -> tuple[MetaTensorType, ...]:
        """Narrower descriptions, for a program each.

        Args:
            alternatives: by the name of an attribute its values (``dtype=[...]``), or by the name
                of a size its sizes, or a `Dim` with bounds. Of several every combination is given.

        Raises:
            DescriptorError: there is no such attribute or size, or an alternative is not narrower.

        Example:
            >>> wide = MetaTensorType(["n", 3])
            >>> for each in wide.split(dtype=[torch.float32], n=[1, Dim("n", min=2)]):
            ...     print(each)
            f32[1, 3]
            f32[n>=2, 3]
        """
        from tsfunc.types.descriptor_sets import split_meta

        return split_meta(self, alternatives)

    @functools.cached_property
    def dims(self) -> tuple[DimForm, ...] | None:
        """What each dim of the shape stands for; None where the rank is not known.

        An int is fixed, a `Dim` named, a `DimExpr` computed from named ones, None open.
        """
        return None if self.shape is None or ... in self.shape else _forms(self.shape)

    @functools.cached_property
    def trailing(self) -> tuple[DimForm, ...]:
        """What the last dims stand for where ``...`` comes before them; else nothing."""
        return _forms(self.shape[1:]) if self.shape and self.shape[0] is ... else ()

    @functools.cached_property
    def stride_forms(self) -> tuple[int | DimExpr | None, ...]:
        """What each stride is; nothing where none is known."""
        return tuple(
            DimExpr(each) if isinstance(each, str) else each for each in self.strides or ()
        )

    @property
    def sizes(self) -> tuple[DimForm, ...]:
        """All sizes that are spoken of, in the shape and in the strides."""
        return (*(self.dims or self.trailing), *self.stride_forms)

    def dims_of_rank(self, rank: int) -> tuple[DimForm, ...] | None:
        """What each dim of a tensor of a rank is; None where tensors of the rank don't fit."""
        if self.dims is not None:
            return self.dims if len(self.dims) == rank else None
        leading = rank - len(self.trailing)
        return None if leading < 0 else (None,) * leading + self.trailing

    def is_laid_out(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the memory format, and the strides that are numbers."""
        if self.strides is None and self.memory_format is None:
            return True
        if tensor.layout != torch.strided:
            return False
        strides = tensor.stride()
        forms = self.stride_forms or (None,) * len(strides)
        return (
            len(strides) == len(forms)
            and all(not isinstance(form, int) or form == step for form, step in zip(forms, strides))  # noqa: B905
            and (self.memory_format is None or is_in_format(tensor, self.memory_format))
        )

    def __repr__(self) -> str:
        if self.shape is not None and all(dim is None for dim in self.shape) and self.shape:
            sizes: dict[str, object] = {"rank": self.rank}
        else:
            sizes = {"shape": _Spelled(self.shape) if self.shape else self.shape}
        device = None if self.device is None else str(self.device)
        known = {
            "dtype": self.dtype,
            **sizes,
            "device": device,
            "requires_grad": self.requires_grad,
            "layout": self.layout,
            "strides": self.strides,
            "memory_format": self.memory_format,
        }
        words = [f"{name}={value!r}" for name, value in known.items() if value is not None]
        return f"MetaTensorType({', '.join(words)})"

    def __str__(self) -> str:
        shape = self.dims if self.shape is None or self.dims is not None else (..., *self.trailing)
        words = [tensor_text(self.dtype, shape, self.device, self.requires_grad, self.layout)]
        if self.strides is not None:
            words.append(f"strides[{', '.join(_size_text(each) for each in self.strides)}]")
        if self.memory_format is not None:
            words.append(_plain(self.memory_format))
        return " ".join(words)

    def __or__(self, other: object) -> Any:
        """``meta | None``, as with a class: ``typing.Union[meta, None]``."""
        return _UNION[self, other]

    def __ror__(self, other: object) -> Any:
        return _UNION[other, self]

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Refused; it is here because Python 3.10's ``List[meta]`` asks for a callable."""
        raise TypeError(f"{self!r} describes tensors and can't be called; it makes none")


def is_in_format(tensor: torch.Tensor, memory_format: torch.memory_format) -> bool:
    """Whether a tensor is contiguous in a memory format."""
    rank = _RANKS.get(memory_format)
    of_rank = rank is None or tensor.dim() == rank
    return of_rank and tensor.is_contiguous(memory_format=memory_format)


class _Spelled(tuple[Any, ...]):
    """A shape whose repr can be evaluated: ``(..., 64)``."""

    __slots__ = ()

    def __repr__(self) -> str:
        spelled = ["..." if each is ... else repr(each) for each in self]
        return f"({', '.join(spelled)}{',' * (len(spelled) == 1)})"


def _forms(shape: Iterable[Any]) -> tuple[DimForm, ...]:
    return tuple(map(parse_dim, shape))


def _size_text(size: object) -> str:
    if size is None:
        return "?"
    return "..." if size is ... else str(size)


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
    shape = "..." if dims is None else ", ".join(map(_size_text, dims))
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
    found = tuple(_dim(spec, axis) for axis, spec in enumerate(shape) if axis or not leading)
    if rank is None:
        return found if not leading else (..., *found) if found else None
    if len(found) > rank or (len(found) < rank and not leading):
        least = "at least " if leading else ""
        raise DescriptorError(
            f"MetaTensorType(rank={rank}, shape={list(shape)!r}): the shape has {least}"
            f"{len(found)} dim(s), so the rank must be {least}{len(found)}; leave the rank out, it "
            f"follows"
        )
    return (None,) * (rank - len(found)) + found


_ANY_DIMS = (..., "...")


def _strides(strides: object) -> tuple[int | str | None, ...] | None:
    if strides is None:
        return None
    if not isinstance(strides, list | tuple):
        raise DescriptorError(
            "MetaTensorType(strides=...): expected a list or tuple of strides, "
            f"got {strides!r} of type {type(strides).__name__}"
        )
    found = tuple(_stride(each, axis) for axis, each in enumerate(strides))
    return None if all(each is None for each in found) else found


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


def _require_one_memory(known: Mapping[str, Any]) -> None:
    """Strides and memory format fit the shape, and are those of a strided tensor."""
    shape, strides, memory_format = known["shape"], known["strides"], known["memory_format"]
    name = "strides" if strides is not None else "memory_format"
    given = known[name]
    if given is None:
        return
    if known["layout"] not in (None, torch.strided):
        raise DescriptorError(
            f"MetaTensorType(layout={known['layout']}, {name}={given!r}): only strided tensors "
            f"have {name.replace('_', ' ')}"
        )
    wanted = len(strides) if strides is not None else _RANKS.get(memory_format)
    least = 0 if shape is None else len(shape) - (... in shape)
    most = None if shape is None or ... in shape else least
    formats = _RANKS.get(memory_format, wanted)
    if wanted is None or (wanted == formats and least <= wanted and most in (None, wanted)):
        return
    sizes = "" if shape is None else f"shape={list(shape)!r}, "
    raise DescriptorError(
        f"MetaTensorType({sizes}{name}={given!r}): {name.replace('_', ' ')} of rank {wanted} can't "
        f"be those of a tensor of rank {least if wanted == formats else formats}"
    )


def _dim(spec: object, axis: int) -> DimSpec:
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
