"""Pointwise rules: every row on arguments made from its schema, and peculiarities of some."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tsfunc
from tests.ops.harness import Level, check, is_inplace, overload, rows_of
from tsfunc.ops import find

ROWS = rows_of("tensor_iterator.py")
Shapes = tuple[tuple[int, ...], ...]
SHAPES: list[Shapes] = [
    ((2, 4), (2, 4), (2, 4)),
    ((2, 4), (4,), ()),
    ((2, 4), (2, 1), (1, 4)),
    ((), (), ()),
]
OUT_OF_PLACE_SHAPES: list[Shapes] = [
    ((), (2, 4), (4,)),
    ((1, 4), (2, 1), (2, 4)),
    ((4,), (0, 4), (4,)),
]
# Arguments whose value matters, by name, for all operators.
VALUES: dict[str, Any] = {
    "rounding_mode": "floor",
    "is_result": False,
    "training": True,
    "self_is_result": False,
    "approximate": "none",
    "decimals": 1,
    "n": 2,
    "p": 2,
    "eps": 0.1,
    "lower": 0.125,
    "upper": 0.3,
    "min": 0.2,
    "max": 0.7,
}


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    x = torch.rand(shape) * 0.8 + 0.1
    return (x * 5).to(dtype) if dtype in (torch.int64, torch.bool) else x.to(dtype)


def arguments(op: Any, shapes: tuple[Any, ...], dtype: torch.dtype) -> Any:
    """Return positional and keyword arguments made from an operator's schema."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    left = iter(itertools.cycle(shapes))
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if "Tensor" in kind:
            wanted = torch.bool if argument.name == "mask" else dtype
            value: Any = _tensor(next(left), wanted)
        elif argument.name in VALUES:
            value = VALUES[argument.name]
        elif argument.has_default_value():
            if argument.kwarg_only:
                continue
            value = argument.default_value
        else:
            value = True if "bool" in kind else 2
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


SPECIAL = {
    "aten::where.self",
    "aten::_prelu_kernel_backward",
    "aten::rrelu_with_noise_backward",
    "aten::_masked_scale",  # has no CPU kernel
}


@pytest.mark.parametrize("name", [n for n in ROWS if n not in SPECIAL])
def test_every_row(name: str) -> None:
    op = overload(name)
    ran = 0
    shapes = SHAPES if is_inplace(op) else SHAPES + OUT_OF_PLACE_SHAPES
    for dtype in (torch.float32, torch.int64, torch.bool):
        for chosen in shapes:
            args, kwargs = arguments(op, chosen, dtype)
            ran += check(op, *args, **kwargs)
    if ran == 0:
        args, kwargs = arguments(op, SHAPES[0], torch.float64)
        ran = check(op, *args, **kwargs)
    assert ran > 0, "the operator accepts none of these arguments"


@pytest.mark.parametrize("shapes", SHAPES + OUT_OF_PLACE_SHAPES)
def test_where(shapes: tuple[tuple[int, ...], ...]) -> None:
    condition, x, y = (torch.randn(s) for s in shapes)
    assert check(torch.ops.aten.where.self, condition > 0, x, y)
    assert check(torch.ops.aten.where.self, condition > 0, x, y.double())
    assert check(torch.ops.aten.where.self, condition > 0, x.long(), y)


def test_prelu_of_weights_for_each_example() -> None:
    """The kernel warns where it has to broadcast its input."""
    x, weight = torch.randn(2, 4), torch.randn(3, 1)
    got = tsfunc.vmap(torch.nn.functional.prelu, (None, 0))(x, weight)
    want = torch.stack([torch.nn.functional.prelu(x, w) for w in weight])
    torch.testing.assert_close(got, want)


def test_second_derivatives_of_logsigmoid() -> None:
    """Its backward kernel warns where it has to broadcast, too."""
    x = torch.randn(3, 5, dtype=torch.float64)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.logsigmoid(x).square().sum()

    want = torch.stack([torch.autograd.functional.hessian(f, one) for one in x])
    torch.testing.assert_close(tsfunc.vmap(tsfunc.hessian(f))(x), want)


def test_prelu_backward() -> None:
    x, weight = torch.randn(2, 4), torch.randn(1, 4)
    assert check(torch.ops.aten._prelu_kernel_backward.default, x, x * 2, weight)


@pytest.mark.parametrize("training", [False, True])
def test_rrelu_backward(training: bool) -> None:
    op = torch.ops.aten.rrelu_with_noise_backward.default
    for shape in ((2, 4), ()):
        grad, x, noise = (torch.randn(shape) for _ in range(3))
        assert check(op, grad, x, noise, 0.1, 0.3, training, False)


DTYPES = [torch.bool, torch.int32, torch.int64, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("shapes", [((3,), ()), ((), (3,)), ((), ()), ((3,), (3,))])
def test_types_are_promoted_as_logical_tensors(shapes: tuple[Any, Any]) -> None:
    for one, two in itertools.product(DTYPES, repeat=2):
        x, y = _tensor(shapes[0], one), _tensor(shapes[1], two)
        assert check(torch.ops.aten.mul.Tensor, x, y)
        assert check(torch.ops.aten.eq.Tensor, x, y)
        assert check(torch.ops.aten.addcmul.default, x, y, x) or torch.bool in (one, two)
        check(torch.ops.aten.add_.Tensor, x, y)
        check(torch.ops.aten.maximum.default, x, y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [2, 2.5, True, 1j])
def test_numbers_count_less_in_type_promotion(dtype: torch.dtype, number: Any) -> None:
    for shape in ((), (3,)):
        assert check(torch.ops.aten.mul.Tensor, _tensor(shape, dtype), number)


_CLAMPS: dict[str, Callable[..., torch.Tensor]] = {
    "torch.clamp": torch.clamp,
    "torch.clip": lambda x, low, high: torch.clip(x, max=high, min=low),
    "clamp": lambda x, low, high: x.clamp(low, high),
    "clip": lambda x, low, high: x.clip(low, max=high),
    "clamp_": lambda x, low, high: x.clone().clamp_(low, high),
    "clip_": lambda x, low, high: x.clone().clip_(min=low, max=high),
    "out": lambda x, low, high: torch.clamp(x, low, high, out=torch.empty_like(x)),
}


@pytest.mark.parametrize("bounds", [(0.5, -0.5, 2.0), (1, -2, 3)])
@pytest.mark.parametrize("shape", [(3,), (3, 4)])
@pytest.mark.parametrize("name", _CLAMPS)
def test_a_bound_of_each_example_beside_a_number(
    name: str, shape: tuple[int, ...], bounds: tuple[float, ...]
) -> None:
    """torch treats a tensor without dims as a number if the other bound is a number."""
    clamp, bound = _CLAMPS[name], torch.tensor(bounds)
    functions = (lambda x, y: clamp(x, -1.5, y), lambda x, y: clamp(x, y, 1))
    integers = [] if name in ("clamp_", "clip_", "out") else [(torch.randn(shape) * 3).long()]
    for x, f in itertools.product([torch.randn(shape) * 2, *integers], functions):
        expected = torch.stack([f(a, b) for a, b in zip(x, bound, strict=True)])
        for call in (tsfunc.vmap(f), tsfunc.specialize(tsfunc.vmap(f))):
            out = call(x, bound)
            assert out.dtype is expected.dtype
            assert out.equal(expected)


def test_derivatives_beside_a_bound_of_each_example() -> None:
    x, y = torch.randn(3, 4), torch.rand(3)

    def pulled(transforms: Any) -> Any:
        return lambda x, y: transforms.grad(lambda x: (x.clamp(-0.5, y) * x).sum())(x)

    expected = torch.stack([pulled(torch.func)(a, b) for a, b in zip(x, y, strict=True)])
    assert tsfunc.vmap(pulled(tsfunc))(x, y).equal(expected)


def test_the_kernel_gets_aligned_operands_unchanged() -> None:
    seen: list[Any] = []

    def op(*args: Any) -> torch.Tensor:
        seen.extend(args)
        return torch.add(*args)

    row = find("aten::add.Tensor")
    assert row is not None and row.rule is not None
    x, y, small = torch.randn(5, 2, 3), torch.randn(5, 2, 3), torch.randn(3)
    cases: list[Any] = [((x, y), (0, 0)), ((x, small), (0, None)), ((small, x), (None, 1))]
    for args, bdims in cases:
        seen.clear()
        out, bdim = row.rule(op, Level(5), bdims, args, {})
        assert bdim == next(dim for dim in bdims if dim is not None)
        assert out.shape == (5, 2, 3)
        assert all(a is b for a, b in zip(seen, args, strict=True))


@pytest.mark.parametrize("name", [n for n in ROWS if is_inplace(overload(n))])
def test_inplace_into_an_unbatched_tensor(name: str) -> None:
    op = overload(name)
    args, kwargs = arguments(op, ((2, 3),), torch.float32)
    tensors = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    if len(tensors) == 1:
        return
    bdims: list[Any] = [None] * len(args)
    bdims[tensors[-1]] = 0
    row = find(name)
    assert row is not None and row.rule is not None
    with pytest.raises(RuntimeError, match="in place into a tensor that is not batched"):
        row.rule(op, Level(2), bdims, args, kwargs)


@pytest.mark.parametrize("fill", [torch.Tensor.masked_fill, torch.Tensor.masked_fill_])
def test_a_real_tensor_is_filled_with_the_complex_values_that_are_real(fill: Any) -> None:
    x, mask = torch.randn(3, 4), torch.rand(3, 4) > 0.5
    real = torch.complex(torch.randn(3), torch.zeros(3))

    def filled(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> Any:
        return fill(x.clone(), mask, value)

    want = torch.stack([filled(*example) for example in zip(x, mask, real, strict=True)])
    torch.testing.assert_close(tsfunc.vmap(filled)(x, mask, real), want)
    with pytest.raises(RuntimeError, match=r"cannot be converted to type .* without overflow"):
        filled(x[1], mask[1], real[1] + 1j)
    with pytest.raises(RuntimeError, match=r"cannot be converted to type .* without overflow"):
        tsfunc.vmap(filled)(x, mask, real + 1j)
