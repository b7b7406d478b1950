"""The forms in which JAX's and torch's functions of control flow are called; all are equivalent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tsfunc
from tsfunc import specialize, vmap

# A type checker knows the first name of a parameter only, and rejects calls that are refused.
cond: Any = tsfunc.cond
switch: Any = tsfunc.switch
fori_loop: Any = tsfunc.fori_loop
over: Any = tsfunc.map
while_loop: Any = tsfunc.while_loop
scan: Any = tsfunc.scan
associative_scan: Any = tsfunc.associative_scan

X, Y = torch.tensor(3.0), torch.tensor(2.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda p: cond(p, torch.add, torch.sub, X, Y),
        lambda p: cond(p, torch.add, torch.sub, (X, Y)),
        lambda p: cond(p, lambda x, y: x + y, lambda x, y: x - y, [X, Y]),
        lambda p: cond(p, torch.add, torch.sub, operands=(X, Y)),
        lambda p: cond(pred=p, true_fn=torch.add, false_fn=torch.sub, operands=(X, Y)),
        lambda p: cond(p, lambda t: t[0] + t[1], lambda t: t[0] - t[1], operand=(X, Y)),
        lambda p: cond(p, lambda d: d["x"] + Y, lambda d: d["x"] - Y, {"x": X}),
        lambda p: cond(p, X, lambda x: x + Y, X - Y, lambda x: x),
        lambda p: cond(p, None, lambda _: X + Y, X, lambda x: x - Y),
        lambda p: cond(p, lambda: X + Y, lambda: X - Y),
        lambda p: cond(p, lambda: X + Y, lambda: X - Y, ()),
        lambda p: switch(int(p), [torch.sub, torch.add], X, Y),
    ],
    ids=[
        "jax",
        "tuple",
        "list",
        "operands",
        "torch-names",
        "operand",
        "one-dict",
        "five",
        "five-none",
        "nothing",
        "empty",
        "switch",
    ],
)
def test_forms_of_cond(call: Any) -> None:
    for p in (True, False):
        assert call(p) == (5 if p else 1)


@pytest.mark.parametrize(
    "pred",
    [1, 0, 2.5, 0.0, True, np.bool_(True), np.int64(0)],
    ids=["int", "zero", "float", "float-zero", "bool", "numpy-bool", "numpy-int"],
)
def test_nonzero_values_are_true(pred: Any) -> None:
    expected = 1 if pred else 2
    assert cond(pred, lambda: 1, lambda: 2) == expected
    tensor = torch.as_tensor(pred)
    assert cond(tensor, lambda: 1, lambda: 2) == expected
    assert specialize(lambda p: cond(p, lambda: 1, lambda: 2))(tensor) == expected
    batch = torch.stack([tensor, torch.zeros_like(tensor)])
    assert vmap(lambda p: cond(p, lambda: 1, lambda: 2))(batch).tolist() == [expected, 2]


def test_operands_given_twice_are_refused() -> None:
    with pytest.raises(TypeError, match="operands by position, or operand=, or operands="):
        cond(True, torch.sin, torch.cos, X, operand=X)
    with pytest.raises(TypeError, match="got the keyword arguments colour="):
        cond(True, torch.sin, torch.cos, colour=X)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: cond(True, 1, torch.sin), "true_fun"),
        (lambda: switch(0, [torch.sin, 2]), r"branches\[1\]"),
        (lambda: while_loop(lambda c: c, 3, 0), "body_fun"),
        (lambda: fori_loop(0, 1, 42, 0), "body_fun"),
        (lambda: scan(42, 0, torch.ones(3)), "f"),
        (lambda: over(42, torch.ones(3)), "f"),
        (lambda: associative_scan(42, torch.ones(3)), "fn"),
    ],
    ids=["cond", "switch", "while_loop", "fori_loop", "scan", "map", "associative_scan"],
)
def test_non_functions_are_refused(call: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f": {name}: expected a callable, got int"):
        call()


@pytest.mark.parametrize("wrap", [lambda f: f, specialize], ids=["plain", "specialize"])
@pytest.mark.parametrize(
    "loop",
    [
        lambda x: while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x)),
        lambda x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (0, x)),
        lambda x: while_loop(lambda i, x: i < 3, lambda i, x: [i + 1, x * 2], (0, x)),
        lambda x: (3, while_loop(lambda x: x.max() < 9, lambda x: x * 2, (x,))[0]),
        lambda x: while_loop(
            cond_fn=lambda i, x: i < 3, body_fn=lambda i, x: (i + 1, x * 2), carried_inputs=(0, x)
        ),
        lambda x: (3, fori_loop(0, 3, lambda i, x: x * 2, x)),
        lambda x: (3, fori_loop(np.int64(0), torch.tensor(3), lambda i, x: x * 2, x)),
        lambda x: (3, fori_loop(lower=0, upper=3, body_fun=lambda i, x: x * 2, init_val=x)),
        lambda x: (3, scan(lambda x, _: (x * 2, None), x, None, 3)[0]),
        lambda x: (3, scan(lambda x, _: (x * 2, None), x, (), length=3)[0]),
        lambda x: (3, scan(lambda x, _: (x * 2, None), x, {"a": None}, length=3)[0]),
        lambda x: (3, scan(combine_fn=lambda x, r: (x * 2, r), init=x, xs=torch.ones(3))[0]),
        lambda x: (3, scan(lambda x, r: (x * 2, r), x, torch.ones(3), None, False, 2)[0]),
    ],
    ids=[
        "jax-while",
        "torch-while",
        "torch-list",
        "torch-one",
        "torch-names",
        "fori",
        "fori-bounds",
        "fori-names",
        "scan-none",
        "scan-empty",
        "scan-dict",
        "scan-torch",
        "scan-positions",
    ],
)
def test_forms_of_loops(loop: Any, wrap: Any) -> None:
    steps, x = wrap(loop)(torch.tensor([1.0, 2.0]))
    assert steps == 3
    torch.testing.assert_close(x, torch.tensor([8.0, 16.0]))


@pytest.mark.parametrize("wrap", [lambda f: f, specialize], ids=["plain", "specialize"])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: associative_scan(torch.mul, x, reverse=True, axis=1),
        lambda x: associative_scan(torch.mul, x, True, 1),
        lambda x: associative_scan(torch.mul, x, 1, True),
        lambda x: associative_scan(torch.mul, x, 1, True, "generic"),
        lambda x: associative_scan(
            combine_fn=torch.mul, xs=x, dim=1, reverse=True, combine_mode="pointwise"
        ),
    ],
    ids=["jax-names", "jax", "torch", "torch-mode", "torch-names"],
)
def test_forms_of_associative_scan(call: Any, wrap: Any) -> None:
    x = torch.rand(2, 5) + 0.5
    torch.testing.assert_close(wrap(call)(x), x.flip(1).cumprod(1).flip(1))


def test_a_mode_that_torch_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected .pointwise. or .generic., got 'fast'"):
        associative_scan(torch.mul, X[None], 0, combine_mode="fast")


@pytest.mark.parametrize("wrap", [lambda f: f, specialize], ids=["plain", "specialize"])
def test_map_takes_more_arguments(wrap: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        return tsfunc.map(lambda pair, y, z: pair[0] * y + pair[1] * z, (x, x + 1), X, 2.0)

    x = torch.arange(4.0)
    torch.testing.assert_close(wrap(f)(x), x * 3 + (x + 1) * 2)


@pytest.mark.parametrize("wrap", [lambda f: f, specialize], ids=["plain", "specialize"])
def test_results_of_a_scan_with_too_few_dims_are_stacked_first(wrap: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        return scan(lambda c, row: (c + row.sum(), (c + row.sum(), row)), Y, x, dim=1)

    x = torch.arange(6.0).view(2, 3)
    carry, (sums, rows) = wrap(f)(x)
    torch.testing.assert_close(sums, 2 + x.sum(0).cumsum(0))
    torch.testing.assert_close(rows, x)
    assert carry == 17


def test_a_loop_over_a_range_of_floats_has_gradients_by_its_bounds() -> None:
    def f(x: torch.Tensor) -> Any:
        return fori_loop(x, x + 2.0, lambda i, c: c * i, x)

    for wrap in (lambda f: f, specialize):
        assert wrap(f)(X) == 3 * 3 * 4
        expected = tsfunc.grad(lambda x: x * x * (x + 1))(X)
        torch.testing.assert_close(wrap(tsfunc.grad(f))(X), expected)
    assert fori_loop(0.0, 2.5, lambda i, c: c + i, 0.0) == 3


def test_parameters_with_defaults_are_not_operands() -> None:
    """Functions made in a loop bind their captured values as defaults."""
    scaled = [lambda pair, i=i: (pair[0] + pair[1]) * i for i in (1, 10)]
    both = [X, Y]
    assert switch(torch.tensor(1), scaled, both) == 50
    assert cond(torch.tensor(True), *scaled, both) == 5
    assert vmap(lambda i: switch(i, scaled, both))(torch.tensor([1, 0])).tolist() == [50, 5]
    found = while_loop(
        lambda pair, n=3: pair[0] < n, lambda pair, by=2: (pair[0] + 1, pair[1] * by), (0, Y)
    )
    assert found[1] == 16
    assert cond(torch.tensor(True), lambda *both: both[0] - both[1], torch.add, both) == 1
    compiled = torch.compile(lambda p: cond(p, *scaled, both), backend="eager", fullgraph=True)
    assert compiled(torch.tensor(False)) == 50


def test_the_dim_of_an_associative_scan_in_torchs_place() -> None:
    x = torch.arange(6.0).view(2, 3)
    expected = x.flip(1).cumsum(1).flip(1)
    for run in (lambda f: f, specialize):
        f = run(lambda x: associative_scan(torch.add, x, 1, reverse=True))
        torch.testing.assert_close(f(x), expected)
        f = run(lambda x: associative_scan(torch.add, x, 1, True))
        torch.testing.assert_close(f(x), expected)
        f = run(lambda x: associative_scan(torch.add, x, -1, reverse=False, combine_mode="generic"))
        torch.testing.assert_close(f(x), x.cumsum(1))
