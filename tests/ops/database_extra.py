"""Calls that torch's database covers too little: convolutions, indexing, writes by index."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing import make_tensor
from torch.testing._internal.opinfo.core import SampleInput

FLOATS = (torch.float32, torch.float64)
MANY = (torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool, torch.bfloat16)

Arguments = tuple[Any, ...]
Make = Callable[..., Tensor]


@dataclass(frozen=True)
class Extra:
    """An additional entry.

    Attributes:
        given: takes a function that makes tensors; returns the arguments of each sample.
        writes: True if the call writes into its first argument.
    """

    name: str
    call: Callable[..., Any]
    given: Callable[[Make], Iterator[Arguments]]
    dtypes: Sequence[torch.dtype] = FLOATS
    writes: bool = False
    differentiable: bool = True

    def samples(self, dtype: torch.dtype) -> Iterator[SampleInput]:
        def make(*shape: int, **options: Any) -> Tensor:
            return make_tensor(shape, **{"dtype": dtype, "device": "cpu", **options})

        for first, *rest in self.given(make):
            yield SampleInput(first, args=tuple(rest))


def _convolution(rank: int, transposed: bool) -> Extra:
    def call(x: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
        name = f"conv_transpose{rank}d" if transposed else f"conv{rank}d"
        return getattr(torch.nn.functional, name)(x, weight, bias, **options)

    def given(make: Make) -> Iterator[Arguments]:
        size = (7,) * rank
        options: list[dict[str, Any]] = [
            {},
            {"stride": 2},
            {"dilation": 2},
            {"padding": 1},
            {"stride": tuple(range(1, rank + 1)), "padding": tuple(range(rank))},
            {"groups": 2},
            {"groups": 4, "stride": 2, "padding": 1, "dilation": 2},
        ]
        if transposed:
            options += [{"stride": 2, "output_padding": 1}, {"groups": 2, "stride": 3}]
        else:
            options += [{"padding": "same", "dilation": 2}, {"padding": "valid"}]
        for chosen, biased, batched in itertools.product(options, (True, False), (True, False)):
            groups = chosen.get("groups", 1)
            shape = (4, 8 // groups) if transposed else (8, 4 // groups)
            x = make(*((2,) if batched else ()), 4, *size)
            weight = make(*shape, *(3, 2, 3)[:rank])
            yield x, weight, make(8) if biased else None, chosen
        yield make(0, 4, *size), make(4, 4, *(2,) * rank), None, {}

    kind = "conv_transpose" if transposed else "conv"
    return Extra(f"extra.{kind}{rank}d", call, given)


def _indices(make: Make) -> Iterator[tuple[Tensor, Any]]:
    """Yield tensors with indices for them."""

    def ints(high: int, *shape: int) -> Tensor:
        return make(*shape, dtype=torch.int64, low=0, high=high)

    x = make(4, 5, 6)
    plain: tuple[Any, ...] = (
        0,
        -1,
        slice(1, 3),
        slice(None, None, 2),
        slice(3, 3),
        None,
        Ellipsis,
        (0, None, slice(1, 4)),
        (Ellipsis, 2),
        (Ellipsis, None),
        (slice(None), 1, slice(None, -1)),
        (None, Ellipsis, None),
        True,
        (slice(None), True),
    )
    rows = [True, False, True, True]
    advanced: tuple[Any, ...] = (
        ints(4, 3),
        ints(4),
        ints(4, 2, 3),
        ints(4, 0),
        [0, 2],
        [-1],
        (ints(4, 3), ints(5, 3)),
        (ints(4, 3, 1), slice(None), ints(6, 2)),
        (slice(None), ints(5, 3)),
        (slice(1, 3), ints(5, 3), slice(0, 4, 2)),
        (Ellipsis, ints(6, 2)),
        (None, ints(4, 3), None),
        (0, ints(5, 3)),
        (ints(4, 3), 1),
        (ints(4, 3), None, ints(5, 3)),
        (ints(4), ints(5)),
        (ints(4), slice(None), ints(6)),
        (ints(4, 3), ints(5), ints(6, 2, 1)),
        ([0, 1], [2, 3]),
        rows,
        (slice(None), [True, False, True, True, False]),
        ints(4, 3) - 4,
    )
    for index in (*plain, *advanced):
        yield x, index
    yield make(), ()
    yield make(), None
    yield make(0, 3), slice(None)
    yield make(3, 0), ints(3, 2)


def _getitem() -> Extra:
    def call(x: Tensor, index: Any) -> Tensor:
        return x[index]

    return Extra("extra.__getitem__", call, _indices, MANY)


def _get_mask() -> Extra:
    """Yield masks that all examples share, so that sizes are known."""

    def call(x: Tensor, mask: Sequence[Any]) -> Tensor:
        return x[torch.tensor(mask)]

    def given(make: Make) -> Iterator[Arguments]:
        yield make(4, 5), [True, False, True, True]
        yield make(2, 3), [[True, False, True], [False, False, True]]
        yield make(2), [False, False]

    return Extra("extra.__getitem__.mask", call, given, MANY)


def _setitem() -> Extra:
    def call(x: Tensor, index: Any, value: Any) -> Tensor:
        x[index] = value
        return x

    def given(make: Make) -> Iterator[Arguments]:
        for x, index in _indices(make):
            if _repeats(x, index):
                continue
            shape = x[index].shape
            yield x.clone(), index, make(*shape)
            yield x.clone(), index, make()
            if shape:
                yield x.clone(), index, make(*shape[1:])
            yield x.clone(), index, 1

    return Extra("extra.__setitem__", call, given, MANY, writes=True)


def _repeats(x: Tensor, index: Any) -> bool:
    """True if an element is written twice, which leaves the result undefined."""
    chosen = torch.arange(x.numel()).view(x.shape)[index].reshape(-1)
    return len(set(chosen.tolist())) < chosen.numel()


def _set_mask() -> Extra:
    def call(x: Tensor, mask: Tensor, value: Any) -> Tensor:
        x[mask] = value
        return x

    def given(make: Make) -> Iterator[Arguments]:
        def mask(*shape: int) -> Tensor:
            return make(*shape, dtype=torch.bool)

        for value in (1, make()):
            yield make(4), mask(4), value
            yield make(4, 5), mask(4, 5), value
            yield make(4, 5), mask(4), value
            yield make(), mask(), value

    return Extra("extra.__setitem__.mask", call, given, MANY, writes=True)


def _index_put(name: str, writes: bool) -> Extra:
    def call(x: Tensor, indices: Any, value: Tensor, accumulate: bool) -> Tensor:
        return getattr(torch.Tensor, name)(x, indices, value, accumulate)

    def given(make: Make) -> Iterator[Arguments]:
        for accumulate in (False, True):
            for x, index in _indices(make):
                indices = index if isinstance(index, tuple) else (index,)
                if not indices or not all(isinstance(i, Tensor) for i in indices):
                    continue
                if not accumulate and _repeats(x, index):
                    continue
                shape = x[index].shape
                yield x.clone(), indices, make(*shape), accumulate
                yield x.clone(), indices, make(), accumulate
        mask = torch.tensor([True, False, True, True])
        yield make(4, 5), (mask,), make(3, 5), False
        yield make(4, 5), (mask,), make(), True

    return Extra(f"extra.{name}", call, given, MANY, writes)


def _batch_norm() -> Extra:
    def call(x: Tensor, *rest: Any) -> Tensor:
        return torch.nn.functional.batch_norm(x, *rest)

    def given(make: Make) -> Iterator[Arguments]:
        for shape in ((4, 3), (4, 3, 5), (2, 3, 4, 4), (2, 3, 2, 3, 2)):
            mean, var = make(3), make(3, low=0.5, high=2)
            for weight, bias in ((make(3), make(3)), (None, None), (make(3), None)):
                yield make(*shape), mean, var, weight, bias, False
                yield make(*shape), None, None, weight, bias, True

    return Extra("extra.batch_norm", call, given)


def _cells() -> Iterator[Extra]:
    """Yield recurrent layers, as a whole and cell by cell."""
    for name, gates, hidden in (
        ("lstm", 4, 2),
        ("gru", 3, 1),
        ("rnn_tanh", 1, 1),
        ("rnn_relu", 1, 1),
    ):
        yield _network(name, gates, hidden)
        yield _cell(name, gates, hidden)


def _network(name: str, gates: int, hidden: int) -> Extra:
    def call(x: Tensor, states: Any, weights: list[Tensor], options: tuple[Any, ...]) -> Any:
        first = tuple(states) if hidden == 2 else states[0]
        return getattr(torch._VF, name)(x, first, weights, *options)

    def given(make: Make) -> Iterator[Arguments]:
        for layers, both, biased, first in itertools.product((1, 2), *[(False, True)] * 3):
            ways = 1 + both
            weights = []
            for layer in range(layers):
                width = 4 if layer == 0 else 3 * ways
                for _ in range(ways):
                    weights += [make(gates * 3, width), make(gates * 3, 3)]
                    if biased:
                        weights += [make(gates * 3), make(gates * 3)]
            x = make(2, 5, 4) if first else make(5, 2, 4)
            states = [make(layers * ways, 2, 3) for _ in range(hidden)]
            yield x, states, weights, (biased, layers, 0.0, False, both, first)

    return Extra(f"extra.{name}", call, given)


def _cell(name: str, gates: int, hidden: int) -> Extra:
    def call(x: Tensor, states: list[Tensor], *weights: Any) -> Any:
        cell = getattr(torch._VF, f"{name}_cell")
        return cell(x, states if hidden == 2 else states[0], *weights)

    def given(make: Make) -> Iterator[Arguments]:
        states = [make(2, 3) for _ in range(hidden)]
        weights = make(gates * 3, 4), make(gates * 3, 3)
        yield make(2, 4), states, *weights, make(gates * 3), make(gates * 3)
        yield make(2, 4), states, *weights

    return Extra(f"extra.{name}_cell", call, given)


def _methods() -> Iterator[Extra]:
    """Yield methods that the database lacks."""

    def unary(call: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[..., Any]:
        def given(make: Make) -> Iterator[Arguments]:
            for shape in shapes or ((), (4,), (3, 4), (2, 3, 4, 5), (0, 3)):
                yield (make(*shape),)

        return given

    def one(name: str, call: Callable[..., Any], *shapes: tuple[int, ...]) -> Extra:
        return Extra(f"extra.{name}", call, unary(call, *shapes), MANY, differentiable=False)

    images = ((2, 3, 4, 5), (0, 3, 4, 5))
    last = torch.channels_last
    yield one("to.channels_last", lambda x: x.to(memory_format=last), *images)
    yield one("to.dtype_channels_last", lambda x: x.to(torch.float64, memory_format=last), *images)
    yield one("contiguous.channels_last", lambda x: x.contiguous(memory_format=last), *images)
    yield one("clone.channels_last", lambda x: x.clone(memory_format=last), *images)
    yield one("to.same", lambda x: x.to(x.dtype))
    yield one("to.copy", lambda x: x.to(x.dtype, copy=True))
    yield one("type", lambda x: x.type(torch.float64))
    yield one("type_as", lambda x: x.type_as(torch.zeros((), dtype=torch.float64)))
    yield one("iter", lambda x: list(x), (4,), (3, 4))
    yield one("len", lambda x: x * len(x), (4,), (3, 4))
    yield one("new_full", lambda x: x.new_full((2, 3), 1) + x, (3,), (2, 3))
    yield one("new_tensor", lambda x: x.new_tensor([1, 0]) * x, (2,), (3, 2))
    yield one("T", lambda x: x.T, (3, 4))
    yield one("mT", lambda x: x.mT, (3, 4), (2, 3, 4))
    yield one("H", lambda x: x.H, (3, 4))
    yield one("real", lambda x: x.real)
    yield one("unflatten", lambda x: x.unflatten(-1, (2, -1)), (4,), (3, 4))
    yield one("split_views", lambda x: x.split([1, 2], -1), (3,), (2, 3))
    yield one("atleast", lambda x: torch.atleast_3d(x))
    yield one("block_diag", lambda x: torch.block_diag(x, x), (), (3,), (2, 3))
    yield one("cartesian_prod", lambda x: torch.cartesian_prod(x, x), (3,))
    yield one("meshgrid", lambda x: torch.meshgrid(x, x, indexing="xy"), (3,))
    yield one("combinations", lambda x: torch.combinations(x, 2), (4,))
    yield one("swapaxes", lambda x: x.swapaxes(0, -1), (3, 4), (2, 3, 4))
    yield one("ravel", lambda x: x.ravel())


EXTRA: tuple[Extra, ...] = (
    *(_convolution(rank, transposed) for rank in (1, 2, 3) for transposed in (False, True)),
    _getitem(),
    _get_mask(),
    _setitem(),
    _set_mask(),
    _index_put("index_put", writes=False),
    _index_put("index_put_", writes=True),
    _batch_norm(),
    *_cells(),
    *_methods(),
)
