"""Sizes that make a derived size 0 or 1: NOTE [small sizes] in ``program/dims/constraints``."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tsfunc import Dim, MetaTensorType, functional_call, grad, load, scan, specialize, vmap
from tsfunc.bridge.sizes.bounds import lower_bound, without_common_factor
from tsfunc.bridge.sizes.symbols import Symbols
from tsfunc.errors import ConstraintViolation

IMAGES = {"x": MetaTensorType(["n", 1, "h", "w"])}


def loss(x: Tensor) -> Tensor:
    """Return the loss of an image whose inner sizes are three less, then halved."""
    weight = torch.ones(2, 1, 3, 3) / 9
    y = F.max_pool2d(F.conv2d(x, weight).relu(), 2)
    return F.adaptive_avg_pool2d(y, 1).square().sum()


def test_plain_case() -> None:
    f = specialize(vmap(grad(loss)), IMAGES)
    for n, h, w in [(3, 9, 9), (5, 20, 7), (2, 30, 31)]:
        x = torch.randn(n, 1, h, w)
        torch.testing.assert_close(f(x), vmap(grad(loss))(x))
    assert f.cache_info().programs == 1
    assert f.descriptors["x"].shape[2:] == (Dim("h", min=6), Dim("w", min=6))


@pytest.mark.parametrize("first", [(2, 4, 5), (1, 12, 4)])
def test_calls_at_the_edge_have_programs_of_their_own(first: tuple[int, int, int]) -> None:
    f = specialize(vmap(grad(loss)), IMAGES)
    for n, h, w in [first, (2, 8, 9), (2, 4, 4), first]:
        x = torch.randn(n, 1, h, w)
        torch.testing.assert_close(f(x), vmap(grad(loss))(x))
    x = torch.randn(3, 1, 17, 18)
    misses = f.cache_info().misses
    f(x)
    assert f.cache_info().misses == misses


def test_sizes_that_torch_refuses_are_refused_by_a_program() -> None:
    f = specialize(vmap(grad(loss)), IMAGES)
    f(torch.randn(2, 1, 9, 9))
    with pytest.raises(RuntimeError, match="can't be greater than"):
        f(torch.randn(2, 1, 2, 9))


def test_stacked_networks_of_images_of_any_size() -> None:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 2)).eval()
    state = {name: torch.stack([x, 2 * x]) for name, x in net.state_dict().items()}

    def score(state: dict[str, Tensor], x: Tensor) -> Any:
        return functional_call(net, state, (x,)).square().mean()

    def gradients(state: dict[str, Tensor], x: Tensor) -> Any:
        return vmap(grad(score, argnums=1), (0, None))(state, x)

    f = specialize(gradients, {"x": MetaTensorType(["n", 3, "h", "w"])})
    for n, h, w in [(5, 9, 9), (2, 11, 7), (2, 3, 3)]:
        x = torch.randn(n, 3, h, w)
        torch.testing.assert_close(f(state, x), gradients(state, x))
    assert f.cache_info().programs == 2


def test_descriptors_must_guarantee_the_conditions_of_the_function() -> None:
    def f(x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] - 2 != 0 else x

    with pytest.raises(ConstraintViolation, match="n - 2 != 0"):
        specialize(f, {"x": MetaTensorType(["n"])})(torch.ones(5))


def test_tracers_are_made_without_asking_for_anything() -> None:
    f = specialize(vmap(lambda x: F.max_pool2d(x, 2)), IMAGES)
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(f(x), F.max_pool2d(x, 2))
    assert f.descriptors["x"].shape == ("n", 1, "h", "w")


def test_a_file_keeps_the_least_sizes(tmp_path: Any) -> None:
    f = specialize(vmap(grad(loss)), IMAGES)
    f(torch.randn(2, 1, 9, 9))
    f.save(tmp_path / "f.tsf", exact=True)
    loaded = load(tmp_path / "f.tsf")
    x = torch.randn(4, 1, 11, 12)
    torch.testing.assert_close(loaded(x), vmap(grad(loss))(x))
    with pytest.raises(ValueError, match="no program for this call"):
        loaded(torch.randn(4, 1, 5, 12))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("n - 2", 3), ("n * m - 4", 16), ("n // 2", 2), ("m % 2", 0), ("n - m", None)],
)
def test_a_number_that_an_expression_is_not_below(text: str, expected: int | None) -> None:
    dims = {"n": Dim("n", min=5), "m": Dim("m", multiple_of=4, min=4)}
    symbols = Symbols(dims, {"n": 9, "m": 8})
    size = eval(text, dict(symbols.sizes))
    expr = symbols._in_dims(size.node.expr)
    found = lower_bound(expr, dims)
    assert found == expected if expected is not None else found < 0


def test_a_small_size_beside_a_factor() -> None:
    """``b * (t - 1) != b`` is a condition on ``t`` alone: a loop's step has all elements."""

    def f(x: Tensor) -> Tensor:
        columns = x[:, 1:].transpose(0, 1)
        _, rows = scan(lambda carry, row: (carry, row.sin()), x.new_zeros(1), columns)
        return rows.flatten(0, 1).square().sum()

    program = specialize(grad(f), {"x": MetaTensorType(["b", "t"])})
    for b, t in ((4, 9), (2, 3), (5, 2), (3, 7)):
        x = torch.randn(b, t)
        y = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(y[:, 1:].sin().square().sum(), y)
        torch.testing.assert_close(program(x), expected)
    assert program.cache_info().programs == 2


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ("Ne(b*(t - 1), b)", "Ne(t - 1, 1)"),
        ("20*b < 20*b*t", "1 < t"),
        ("Ne(20*t - 20, 20)", "Ne(t - 1, 1)"),
        ("Ne(b*t, 0)", "Ne(b*t, 0)"),
        ("Ne((b - 5)*t, b - 5)", "Ne((b - 5)*t, b - 5)"),
    ],
)
def test_a_common_factor_that_is_positive(constraint: str, expected: str) -> None:
    dims = {"b": Dim("b"), "t": Dim("t")}
    found, wanted = (sympy.sympify(text) for text in (constraint, expected))
    reduced = without_common_factor(found, dims)
    assert reduced.func == wanted.func
    assert sympy.expand(reduced.lhs - wanted.lhs) == sympy.expand(reduced.rhs - wanted.rhs) == 0
