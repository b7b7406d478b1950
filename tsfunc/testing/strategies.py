"""hypothesis strategies: tensors, pytrees of tensors, descriptors, and calls of operators.

Needs hypothesis, which ``tsfunc[testing]`` installs.

Example:
    >>> from hypothesis import given, settings
    >>> from tsfunc.testing import check_vmap, strategies
    >>> @settings(max_examples=5, database=None)
    ... @given(strategies.batches(strategies.tensors(min_rank=1)))
    ... def test(batch):
    ...     arg, dim = batch
    ...     check_vmap(lambda x: x.exp().sum(-1), arg, in_dims=(dim,))
    >>> test()
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from tsfunc import ops
from tsfunc.ops.catalogue.reader import reader
from tsfunc.ops.catalogue.trial import Trial
from tsfunc.ops.catalogue.trial_arguments import TrialParameters, arguments, trial_settings
from tsfunc.ops.registry import Category
from tsfunc.types import Dim, MetaTensorType

FLOATS = (torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.complex64, torch.int64, torch.uint8, torch.bool)

Strategy = st.SearchStrategy


def shapes(
    min_rank: int = 0, max_rank: int = 3, min_size: int = 0, max_size: int = 4
) -> Strategy[tuple[int, ...]]:
    """Generate shapes: tuples of sizes."""
    sizes = st.integers(min_size, max_size)
    return st.lists(sizes, min_size=min_rank, max_size=max_rank).map(tuple)


@st.composite
def tensors(
    draw: st.DrawFn,
    dtypes: Sequence[torch.dtype] = FLOATS,
    *,
    shape: Sequence[int] | None = None,
    min_rank: int = 0,
    max_rank: int = 3,
    min_size: int = 1,
    max_size: int = 4,
    low: float = -2.0,
    high: float = 2.0,
) -> torch.Tensor:
    """Generate finite tensors: plain, transposed, expanded, strided or sliced.

    Args:
        dtypes: the dtypes to choose from.
        shape: the shape; by default ``shapes`` generates one.
        low, high: the bounds of the values.
    """
    chosen = shape if shape is not None else draw(shapes(min_rank, max_rank, min_size, max_size))
    sizes = list(chosen)
    dtype = draw(st.sampled_from(list(dtypes)))
    seed = draw(st.integers(0, 2**31 - 1))
    layout = draw(st.sampled_from(["plain", "transposed", "expanded", "gaps", "part"]))
    generator = torch.Generator().manual_seed(seed)

    def made(sizes: Sequence[int]) -> torch.Tensor:
        return _values(list(sizes), dtype, low, high, generator)

    if layout == "transposed":
        return made(sizes[::-1]).permute(list(reversed(range(len(sizes)))))
    if layout == "expanded" and sizes:
        return made([1, *sizes[1:]]).expand(sizes)
    if layout == "gaps" and sizes:
        return made([*sizes[:-1], 2 * sizes[-1]])[..., ::2]
    if layout == "part" and sizes:
        return made([sizes[0] + 2, *sizes[1:]])[1:-1]
    return made(sizes)


def _values(
    sizes: list[int], dtype: torch.dtype, low: float, high: float, generator: torch.Generator
) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(sizes, generator=generator) < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        first = max(int(low), 0) if not dtype.is_signed else int(low)
        return torch.randint(first, max(int(high), first) + 1, sizes, generator=generator).to(dtype)
    wide = torch.rand(sizes, generator=generator, dtype=torch.float64) * (high - low) + low
    if dtype.is_complex:
        other = torch.rand(sizes, generator=generator, dtype=torch.float64) * (high - low) + low
        return torch.complex(wide, other).to(dtype)
    return wide.to(dtype)


def pytrees(leaves: Strategy[Any], *, max_leaves: int = 4) -> Strategy[Any]:
    """Generate nested lists, tuples and dicts of leaves."""

    def around(inner: Strategy[Any]) -> Strategy[Any]:
        names = st.sampled_from(["a", "b", "c"])
        return st.one_of(
            st.lists(inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3).map(tuple),
            st.dictionaries(names, inner, min_size=1, max_size=3),
        )

    return st.recursive(leaves, around, max_leaves=max_leaves)


@st.composite
def batches(
    draw: st.DrawFn, examples: Strategy[torch.Tensor], *, size: int | None = None
) -> tuple[torch.Tensor, int]:
    """Generate batches of an example, and the batch dim."""
    example = draw(examples)
    count = draw(st.integers(1, 4)) if size is None else size
    dim = draw(st.integers(0, example.dim()))
    scale = torch.arange(1, count + 1).view([-1, *[1] * example.dim()])
    whole = example.unsqueeze(0)
    batch = (
        whole * scale.to(example.dtype)
        if example.dtype is not torch.bool
        else whole.expand(count, *example.shape)
    )
    at = draw(st.booleans())
    laid_out = batch.movedim(0, dim)
    return (laid_out.contiguous() if at else laid_out), dim


@st.composite
def descriptors(
    draw: st.DrawFn,
    dtypes: Sequence[torch.dtype] = FLOATS,
    *,
    names: Sequence[str] = ("n", "m"),
    max_rank: int = 3,
) -> MetaTensorType:
    """Generate descriptors: a dtype, and for each dim a size, a name, bounds, or nothing."""
    dims = st.one_of(
        st.integers(1, 4),
        st.sampled_from(list(names)),
        st.sampled_from([Dim(name, min=1, max=8) for name in names]),
        st.none(),
    )
    shape = draw(st.lists(dims, max_size=max_rank))
    return MetaTensorType(shape, dtype=draw(st.sampled_from(list(dtypes))))


@st.composite
def described(
    draw: st.DrawFn, descriptor: MetaTensorType, sizes: Mapping[str, int] | None = None
) -> torch.Tensor:
    """Generate tensors that match a descriptor with a dtype and a rank.

    Args:
        sizes: the sizes of named dims; other sizes are drawn, one for each name.
    """
    sizes_by_name = dict(sizes or {})
    assert descriptor.shape is not None and descriptor.dtype is not None
    shape = []
    for dim in descriptor.shape:
        name = dim.name if isinstance(dim, Dim) else dim
        if isinstance(name, int):
            shape.append(name)
        elif isinstance(name, str):
            low, high = (dim.min, dim.max) if isinstance(dim, Dim) else (1, 6)
            upper = 6 if high is None else min(high, 6)
            if name not in sizes_by_name:
                sizes_by_name[name] = draw(st.integers(max(low or 0, 1), max(upper, low or 1)))
            shape.append(sizes_by_name[name])
        else:
            shape.append(draw(st.integers(1, 4)))
    return draw(tensors([descriptor.dtype], shape=shape))


@dataclass(frozen=True)
class OperatorCall:
    """A call of an ATen operator.

    Attributes:
        name: the dispatcher's name of the operator.
        args, kwargs: arguments that the operator accepts.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self) -> Any:
        """Run the operator and return its results."""
        return _signature(self.name).call(*self.args, **self.kwargs)


@st.composite
def operator_calls(
    draw: st.DrawFn, category: Category | str | None = None, *, low: float = 0.1, high: float = 0.9
) -> OperatorCall:
    """Generate calls of operators with valid arguments, of one category or of all.

    The arguments follow from the operator's schema and from the ranks that the operator accepts in
    trials. Left out are operators that mutate arguments, internal operators (``aten::_...``, those
    of a backend or of quantized tensors), which do not check their arguments, and unknown
    operators.
    """
    name = draw(st.sampled_from(_operators_of_category(category)))
    setting, ranks = _accepted_setting(name)
    assume(setting is not None)
    assert setting is not None
    chosen = draw(st.sampled_from(ranks))
    seed = draw(st.integers(0, 2**31 - 1))
    generator = torch.Generator().manual_seed(seed)

    def make(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.zeros(list(shape), dtype=dtype)
        return _values(list(shape), dtype, low, high, generator)

    args, kwargs = arguments(_signature(name), chosen, setting, make)
    call = OperatorCall(name, tuple(args), kwargs)
    assume(_is_taken(call))
    return call


def _is_taken(call: OperatorCall) -> bool:
    """True if the operator accepts the values of the call too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except Exception:
        return False
    return True


def _signature(name: str) -> Any:
    return reader().signature(name)


@lru_cache
def _operators_of_category(category: Category | str | None) -> list[str]:
    names = ops.operators(category)
    return [name for name in names if not _INTERNAL.search(name) and _is_plain(_signature(name))]


# The kernels of embedding_bag do not check offsets, and write out of bounds.
_INTERNAL = re.compile(
    r"::_|cudnn|miopen|mkldnn|mkl_|fbgemm|quantize|fake_quant|sparse|nested|_backward|embedding_bag"
)


def _is_plain(signature: Any) -> bool:
    return bool(signature.tensors) and not signature.mutates


@cache
def _accepted_setting(name: str) -> tuple[TrialParameters | None, list[dict[str, int]]]:
    """Return a setting that an operator accepts, and the ranks in it; tried on the meta device."""
    trial = Trial(_signature(name), "meta")
    for setting in trial_settings(trial.signature):
        ranks = [chosen for chosen, _ in trial.taken(setting)]
        if ranks or trial.calls > 200:
            return (setting, ranks) if ranks else (None, [])
    return None, []
