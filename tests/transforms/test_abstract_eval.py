"""eval_shape and make_graph: the results and calls of a function, without running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tests.transforms.support import same
from tsfunc import MetaTensorType as Meta
from tsfunc import eval_shape, grad, jacrev, jvp, make_graph, specialize, vmap
from tsfunc.errors import DataDependentError, DescriptorError

X = torch.arange(6.0, dtype=torch.float64).view(2, 3)
W = torch.ones(3, dtype=torch.float64)

FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "product": (lambda x, w: x @ w, (X, W)),
    "containers": (lambda x: {"sum": x.sum(), "rest": [x.T, 3, None]}, (X,)),
    "types": (lambda x: (x > 1, x.float(), x.to(torch.complex64), x.argmax()), (X,)),
    "closed over": (lambda x: x * W, (X,)),
    "what it is given": (lambda x: x, (X,)),
    "what it is not given": (lambda x: W, (X,)),
    "a gradient": (grad(lambda x: x.sin().sum()), (X,)),
    "of each": (vmap(jacrev(torch.sin)), (X,)),
    "forward": (lambda x: jvp(torch.exp, (x,), (x,)), (X,)),
    "factories": (lambda x: torch.randn(x.shape[0], 4) + torch.arange(4), (X,)),
    "written to": (lambda x: x.clone().mul_(2)[1:], (X,)),
    "a loop": (lambda x: tsfunc.scan(lambda c, row: (c + row, row.sum()), x[0], x), (X,)),
}


def described(tree: Any) -> Any:
    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return Meta(list(leaf.shape), dtype=leaf.dtype, device=leaf.device)

    return torch.utils._pytree.tree_map(describe, tree)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_types_of_results(name: str) -> None:
    func, args = FUNCTIONS[name]
    want = described(func(*args))
    assert eval_shape(func, *args) == want
    assert eval_shape(func, *described(args)) == want
    assert make_graph(func)(*described(args)).graph is not None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_is_the_function(name: str) -> None:
    func, args = FUNCTIONS[name]
    program = make_graph(func)(*args)
    torch.manual_seed(0)
    want = func(*args)
    torch.manual_seed(0)
    same(program(list(args)), want)


def test_nothing_is_computed_and_nothing_drawn() -> None:
    huge = Meta([10**6, 10**6], dtype=torch.float32)
    assert eval_shape(lambda x: (x @ x).relu(), huge).shape == (10**6, 10**6)
    before = torch.get_rng_state()
    eval_shape(lambda: torch.rand(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_device_that_is_not_here() -> None:
    out = eval_shape(lambda x: x.half() + 1, Meta([3], dtype=torch.float32, device="cuda"))
    assert out.device.type == "cuda" and out.dtype is torch.float16


def test_keywords() -> None:
    assert eval_shape(lambda x, *, times: x.repeat(times), x=W, times=2).shape == (6,)


def test_inside_of_transforms_sizes_are_those_of_an_example() -> None:
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(eval_shape(lambda y: (y[None] * W * x).sum(1), x))
        return x.sin().sum()

    want = Meta([1], dtype=torch.float64, device="cpu")
    vmap(f)(X)
    grad(f)(W)
    vmap(grad(f))(X)
    grad(lambda x: vmap(f)(x).sum())(X)
    jvp(f, (W,), (W,))
    jvp(grad(f), (W,), (W,))
    vmap(vmap(f))(X[None])
    specialize(f)(W)
    specialize(vmap(grad(f)))(X)
    vmap(specialize(f))(X)
    assert len(seen) >= 10 and all(meta == want for meta in seen)


def test_named_dims_of_a_program_are_not_known() -> None:
    seen = []

    def twice(x: Tensor) -> Tensor:
        seen.append(eval_shape(torch.exp, x))
        return x * 2

    f = specialize(twice, {"x": Meta(["n", 3])})
    same(f(X), X * 2)
    assert [meta.shape for meta in seen] == [(None, 3)]
    # The program contains none of it.
    assert "exp" not in str(f.program)


def test_a_graph_shows_its_operators() -> None:
    program = make_graph(vmap(grad(lambda x: x.sin().sum())))(X)
    assert "cos(" in str(program) and "sin(" in str(program)
    assert make_graph(lambda x: x.sin())(X).inputs == (0,)


def test_descriptions_that_leave_something_open_are_refused() -> None:
    for meta in (Meta(["n"], dtype=torch.float32), Meta([3]), Meta(torch.float32)):
        with pytest.raises(DescriptorError, match=r"eval_shape\(sin\): expected a description"):
            eval_shape(torch.sin, meta)
    with pytest.raises(DescriptorError, match=r"make_graph\(sin\)"):
        make_graph(torch.sin)(Meta([None], dtype=torch.float32))


def test_functions_with_data_dependent_control_flow_are_refused() -> None:
    with pytest.raises(DataDependentError, match=r"eval_shape\(.*a traced tensor was used"):
        eval_shape(lambda x: x if x.sum() > 0 else -x, X)
    with pytest.raises(DataDependentError, match=r"make_graph"):
        make_graph(lambda x: x if x.sum() > 0 else -x)(X)


def test_a_size_that_depends_on_data_is_left_open() -> None:
    assert str(eval_shape(torch.nonzero, torch.ones(3, 2))) == "i64[?, 2] cpu"
