"""``MetaTensorType``: the metadata of a tensor argument."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, NoReturn, TypeAlias, TypeVar, Union, overload

import torch

from tsfunc.errors import AnnotationError, DescriptorError
from tsfunc.types.dims import Dim, DimForm, DimSpec, ShapeSpec, parse_dim, spell_dim
from tsfunc.types.meta_arguments import ATTRIBUTES, FORMAT_RANKS, Shape, read_arguments
from tsfunc.types.size_matching import Generalization, SideForm, SizeMatch
from tsfunc.types.sizes import DimExpr, SizeSum
from tsfunc.types.values import parse_fields, plain_name, size_text, tensor_text
from tsfunc.user_code import folded_class

T = TypeVar("T")

_UNION: Any = Union  # type checkers accept it only with constant arguments


@folded_class
@dataclass(frozen=True, init=False, repr=False)
class MetaTensorType:
    """The metadata of a tensor; None stands for an unknown property.

    A list or tuple as first argument is the shape.

    Args:
        dtype: a ``torch.dtype``, or ``float``, ``int``, ``bool`` or ``complex``, with the meaning
            that torch's factories give them (``float`` is ``torch.float64``).
        rank: the number of dims; it must agree with ``shape``, and follows from it.
        shape: one entry per dim: a size, a name (``"n"``), an expression (``"2*n+1"``), a ``Dim``
            with bounds, or None for an unknown size. ``...`` (or ``"..."``) as the first entry
            stands for any number of dims before the others.
        device: a ``torch.device`` or its name; ``"cuda"`` stands for every CUDA device.
        requires_grad: True or False.
        layout: a ``torch.layout``.
        strides: one entry per dim: an int, a name or an expression over sizes in shapes, or None
            for an unknown stride.
        memory_format: ``torch.contiguous_format``, ``channels_last`` or ``channels_last_3d``;
            a tensor fits if it is contiguous in this format.

    Raises:
        DescriptorError: no tensor could have this metadata.

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
        for name, value in read_arguments(args, kwargs).items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> MetaTensorType:
        """Return the metadata of a tensor, each size a number.

        Raises:
            DescriptorError: ``tensor`` is not a tensor.

        Example:
            >>> print(MetaTensorType.of(torch.zeros(2, 3)))
            f32[2, 3] cpu no_grad strided
        """
        if not isinstance(tensor, torch.Tensor):
            raise DescriptorError(
                f"MetaTensorType.of: expected a torch.Tensor, got {tensor!r} of type "
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
        """Return the metadata that a text describes, the inverse of ``str``.

        Raises:
            DescriptorError: the text does not describe a tensor.

        Example:
            >>> MetaTensorType.parse("f32[n, 64] cpu")
            MetaTensorType(dtype=torch.float32, shape=('n', 64), device='cpu')
        """
        fields = parse_fields(text)
        try:
            return cls(**fields)
        except DescriptorError as error:
            raise AnnotationError(f"{text!r} does not describe a tensor: {error}") from None

    def __le__(self, other: object) -> bool:
        """True if ``other`` describes every tensor that this describes.

        Example:
            >>> MetaTensorType([3, 3]) <= MetaTensorType(["n", "n"]) <= MetaTensorType(rank=2)
            True
        """
        if not isinstance(other, MetaTensorType):
            return NotImplemented
        sizes = SizeMatch(self.sizes)
        return describes_less(self, other, sizes) and sizes.is_settled()

    def __ge__(self, other: object) -> bool:
        return other <= self if isinstance(other, MetaTensorType) else NotImplemented

    def __lt__(self, other: object) -> bool:
        is_meta = isinstance(other, MetaTensorType)
        return self <= other and not other <= self if is_meta else NotImplemented

    def __gt__(self, other: object) -> bool:
        return other < self if isinstance(other, MetaTensorType) else NotImplemented

    def join(self, other: MetaTensorType) -> MetaTensorType:
        """Return the metadata common to both.

        Sizes that differ get a name. If the ranks differ, the last dims are kept.

        Example:
            >>> print(MetaTensorType([3, 3], dtype=float).join(MetaTensorType([4, 4])))
            tensor[n, n]
            >>> print(MetaTensorType([2, 64]).join(MetaTensorType([64])))
            tensor[..., 64]
        """
        if not isinstance(other, MetaTensorType):
            raise DescriptorError(
                f"join: expected a MetaTensorType, got {other!r} of type {type(other).__name__}"
            )
        if (wider := wider_of(self, other, self <= other, other <= self)) is not None:
            return wider
        sizes = Generalization(self.sizes, other.sizes, always_named=True)
        join_descriptions(self, other, sizes.count)
        return join_descriptions(self, other, sizes.size)

    def widen(self, example: torch.Tensor) -> MetaTensorType:
        """Return the least metadata that describes all tensors of this one, and ``example``.

        Example:
            >>> print(MetaTensorType.of(torch.ones(3)).widen(torch.ones(5, dtype=torch.float64)))
            tensor[n] cpu no_grad strided
        """
        return self.join(MetaTensorType.of(example))

    def split(self, **alternatives: Sequence[Any]) -> tuple[MetaTensorType, ...]:
        """Return narrower metadata, each for a separate program.

        Args:
            alternatives: by the name of an attribute its values (``dtype=[...]``), or by the name
                of a size its sizes, which can be ``Dim`` with bounds. Several names give all
                combinations.

        Raises:
            DescriptorError: there is no such attribute or size, or an alternative is not narrower.

        Example:
            >>> from tsfunc import Dim
            >>> wide = MetaTensorType(["n", 3])
            >>> for each in wide.split(dtype=[torch.float32], n=[1, Dim("n", min=2)]):
            ...     print(each)
            f32[1, 3]
            f32[n>=2, 3]
        """
        return split_by(self, alternatives, _split_one)

    @functools.cached_property
    def dims(self) -> tuple[DimForm, ...] | None:
        """The form of each dim of the shape; None if the rank is unknown.

        An int is fixed, a ``Dim`` named, a ``DimExpr`` computed from named sizes, None open.
        """
        return None if self.shape is None or ... in self.shape else _forms(self.shape)

    @functools.cached_property
    def trailing(self) -> tuple[DimForm, ...]:
        """The forms of the dims after ``...`` if the shape starts with it; else empty."""
        return _forms(self.shape[1:]) if self.shape and self.shape[0] is ... else ()

    @functools.cached_property
    def stride_forms(self) -> tuple[int | DimExpr | None, ...]:
        """The form of each stride; empty if all strides are unknown."""
        return tuple(
            DimExpr(stride) if isinstance(stride, str) else stride for stride in self.strides or ()
        )

    @property
    def sizes(self) -> tuple[DimForm, ...]:
        """All sizes in the shape and in the strides."""
        return (*(self.dims or self.trailing), *self.stride_forms)

    def dims_of_rank(self, rank: int) -> tuple[DimForm, ...] | None:
        """Return the form of each dim of a tensor of a rank; None if such tensors do not fit."""
        if self.dims is not None:
            return self.dims if len(self.dims) == rank else None
        leading = rank - len(self.trailing)
        return None if leading < 0 else (None,) * leading + self.trailing

    def is_laid_out(self, tensor: torch.Tensor) -> bool:
        """True if a tensor has the memory format and the strides that are numbers."""
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
        attributes = {
            "dtype": self.dtype,
            **sizes,
            "device": device,
            "requires_grad": self.requires_grad,
            "layout": self.layout,
            "strides": self.strides,
            "memory_format": self.memory_format,
        }
        words = [f"{name}={value!r}" for name, value in attributes.items() if value is not None]
        return f"MetaTensorType({', '.join(words)})"

    def __str__(self) -> str:
        shape = self.dims if self.shape is None or self.dims is not None else (..., *self.trailing)
        words = [tensor_text(self.dtype, shape, self.device, self.requires_grad, self.layout)]
        if self.strides is not None:
            words.append(f"strides[{', '.join(size_text(stride) for stride in self.strides)}]")
        if self.memory_format is not None:
            words.append(plain_name(self.memory_format))
        return " ".join(words)

    def __or__(self, other: object) -> Any:
        """Return ``typing.Union[meta, None]`` for ``meta | None``, as a class does."""
        return _UNION[self, other]

    def __ror__(self, other: object) -> Any:
        return _UNION[other, self]

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise TypeError.

        The method exists because Python 3.10's ``List[meta]`` requires a callable.
        """
        raise TypeError(f"{self!r} describes tensors and can't be called; it makes none")


def is_in_format(tensor: torch.Tensor, memory_format: torch.memory_format) -> bool:
    """True if a tensor is contiguous in a memory format."""
    rank = FORMAT_RANKS.get(memory_format)
    of_rank = rank is None or tensor.dim() == rank
    return of_rank and tensor.is_contiguous(memory_format=memory_format)


class _Spelled(tuple[Any, ...]):
    """A shape whose repr can be evaluated: ``(..., 64)``."""

    __slots__ = ()

    def __repr__(self) -> str:
        spelled = ["..." if item is ... else repr(item) for item in self]
        return f"({', '.join(spelled)}{',' * (len(spelled) == 1)})"


def _forms(shape: Iterable[Any]) -> tuple[DimForm, ...]:
    """Return the parsed forms of dims that are checked already; only text has another form."""
    return tuple(parse_dim(entry) if isinstance(entry, str) else entry for entry in shape)


def on_device(got: torch.device, expected: torch.device) -> bool:
    """True if a device is the expected one; without an index any device of its type is."""
    return got == expected or (expected.index is None and got.type == expected.type)


# --- the order


def describes_less(narrower: MetaTensorType, wider: MetaTensorType, sizes: SizeMatch) -> bool:
    """True if every property in ``wider`` follows from ``narrower``."""
    for name in _EXACT:
        attribute = getattr(wider, name)
        if attribute is not None and getattr(narrower, name) != attribute:
            return False
    if wider.device is not None and (
        narrower.device is None or not on_device(narrower.device, wider.device)
    ):
        return False
    if wider.strides is not None:
        ones, others = narrower.stride_forms, wider.stride_forms
        if len(ones) != len(others) or not all(map(sizes.fits, ones, others)):
            return False
    return _shapes_below(narrower, wider, sizes)


_EXACT = ("dtype", "requires_grad", "layout", "memory_format")


def _shapes_below(narrower: MetaTensorType, wider: MetaTensorType, sizes: SizeMatch) -> bool:
    if wider.shape is None:
        return True
    if narrower.dims is not None:
        others = wider.dims_of_rank(len(narrower.dims))
        return others is not None and all(map(sizes.fits, narrower.dims, others))
    count = len(wider.trailing)
    return (
        wider.dims is None
        and 0 < count <= len(narrower.trailing)
        and all(map(sizes.fits, narrower.trailing[-count:], wider.trailing))
    )


# --- joins


JoinSizes: TypeAlias = Callable[[SideForm, SideForm], DimForm]
"""A function that joins two sizes, one of which may be `ABSENT`."""


def join_descriptions(
    left: MetaTensorType, right: MetaTensorType, size: JoinSizes
) -> MetaTensorType:
    """Return the metadata common to both tensors; if the ranks differ, the last dims are kept."""
    attributes = {
        name: value for name in _EXACT if (value := getattr(left, name)) == getattr(right, name)
    }
    one, other = left.device, right.device
    if one is not None and other is not None and one.type == other.type:
        attributes["device"] = one if one == other else one.type
    attributes["shape"] = _join_shapes(left, right, size)
    if len(left.stride_forms) == len(right.stride_forms):
        pairs = zip(left.stride_forms, right.stride_forms, strict=True)
        attributes["strides"] = [_join_strides(*pair, size) for pair in pairs]
    return MetaTensorType(**attributes)


def _join_shapes(
    left: MetaTensorType, right: MetaTensorType, size: JoinSizes
) -> list[DimSpec | EllipsisType] | None:
    if left.dims is not None and right.dims is not None and len(left.dims) == len(right.dims):
        return [spell_dim(size(*pair)) for pair in zip(left.dims, right.dims, strict=True)]
    if left.shape is None or right.shape is None:
        return None
    ones, others = (x.trailing if x.dims is None else x.dims for x in (left, right))
    count = min(len(ones), len(others))
    pairs = zip(ones[len(ones) - count :], others[len(others) - count :], strict=True)
    return [..., *(spell_dim(size(*pair)) for pair in pairs)]


def _join_strides(
    left: int | DimExpr | None, right: int | DimExpr | None, size: JoinSizes
) -> int | str | None:
    if isinstance(left, int) and isinstance(right, int):
        return left if left == right else None
    joined = size(left, right)
    return joined.text if isinstance(joined, DimExpr) else None


# --- narrower metadata


def _split_one(meta: MetaTensorType, name: str, choice: Any) -> MetaTensorType:
    names = {dim.name for dim in meta.sizes if isinstance(dim, Dim)}
    if name in ATTRIBUTES:
        attributes = {
            attribute: getattr(meta, attribute) for attribute in ATTRIBUTES if attribute != "rank"
        }
        if name in ("rank", "shape"):
            del attributes["shape"]
        narrower = MetaTensorType(**{**attributes, name: choice})
    elif name in names:
        narrower = substitute(meta, name, narrower_size(name, choice))
    else:
        known_sizes = ", ".join(sorted(names)) or "none"
        raise DescriptorError(
            f"split({name}=...): expected an attribute of {meta} or one of its sizes "
            f"({known_sizes}), got {name!r}"
        )
    if not narrower <= meta:
        raise DescriptorError(f"split({name}=...): {narrower} is not narrower than {meta}")
    return narrower


def wider_of(left: T, right: T, below: bool, above: bool) -> T | None:
    """Return the wider of two descriptions, or None if there is none.

    Args:
        below: True if the right one describes everything that the left one does.
        above: the same of the left one; if both hold, they differ only in names of sizes.
    """
    if below and above:
        return min(left, right, key=str)
    if below or above:
        return right if below else left
    return None


def split_by(
    wide: T, alternatives: Mapping[str, Iterable[Any]], narrowed: Callable[[T, str, Any], T]
) -> tuple[T, ...]:
    """Return all combinations of alternatives for the parts of a description.

    Args:
        narrowed: returns a description with one alternative for a part.
    """
    results = [wide]
    for name, several in alternatives.items():
        if isinstance(several, str | Mapping) or not isinstance(several, Iterable):
            raise DescriptorError(
                f"split({name}=...): expected a list of alternatives, got {several!r} of type "
                f"{type(several).__name__}"
            )
        choices = list(several)
        results = [narrowed(result, name, choice) for result in results for choice in choices]
    return tuple(results)


def narrower_size(name: str, size: Any) -> DimForm:
    try:
        form = parse_dim(size)
    except DescriptorError as error:
        raise DescriptorError(f"split({name}=...): {error}") from None
    if not isinstance(form, int) and not (isinstance(form, Dim) and form.name == name):
        raise DescriptorError(
            f"split({name}=...): expected a size, or a Dim({name!r}, ...) with bounds, got {size!r}"
        )
    return form


def substitute(meta: MetaTensorType, name: str, form: DimForm) -> MetaTensorType:
    """Return metadata with a named size narrowed to bounds or to a number."""

    def replaced(dim: DimForm) -> DimForm:
        if isinstance(dim, Dim) and dim.name == name:
            return dim.meet(form) if isinstance(form, Dim) else form
        if isinstance(dim, DimExpr) and name in dim.names and isinstance(form, int):
            return parse_dim(str(dim.sum.substitute({name: SizeSum.of_int(form)})))
        return dim

    shape: Any = None
    if meta.shape is not None:
        sizes = [spell_dim(replaced(dim)) for dim in meta.dims or meta.trailing]
        shape = [..., *sizes] if meta.dims is None else sizes
    strides: Any = [spell_dim(replaced(stride)) for stride in meta.stride_forms] or None
    return MetaTensorType(
        meta.dtype, shape=shape, device=meta.device, requires_grad=meta.requires_grad,
        layout=meta.layout, strides=strides, memory_format=meta.memory_format,
    )  # fmt: skip


def sizes_and_dtype(label: str, meta: MetaTensorType) -> tuple[list[int], torch.dtype]:
    """Return the sizes and the dtype of a description.

    Raises:
        DescriptorError: a size or the dtype is open.
    """
    sizes = [n for n in meta.shape or () if isinstance(n, int)]
    if meta.dtype is None or meta.shape is None or len(sizes) < len(meta.shape):
        raise DescriptorError(
            f"{label}: expected a description with a dtype and fixed sizes, such as "
            f"MetaTensorType([3, 4], dtype=torch.float32), got {meta!r}."
        )
    return sizes, meta.dtype
