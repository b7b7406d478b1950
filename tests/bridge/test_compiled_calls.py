"""Repeated calls inside vmap run in compiled code, without a Python function of this package."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tsfunc
from tsfunc import grad, hessian, vjp, vmap
from tsfunc.bridge.tracers.batch_handlers import SlottedBatchTracer
from tsfunc.bridge.tracers.operators import TorchOperator

pytestmark = pytest.mark.skipif(
    "__torch_function__" not in vars(SlottedBatchTracer),
    reason="the compiled handlers are not built: python -m tsfunc build",
)

PACKAGE = str(Path(tsfunc.__file__).parent)
REPEATS = 5

Function = Callable[..., Tensor]


@contextmanager
def entered_functions() -> Iterator[list[str]]:
    """Context manager: list the Python functions of this package that are called."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code.co_name)

    gc.disable()  # a collection calls functions of this package
    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        gc.enable()


@contextmanager
def operators_in_python() -> Iterator[list[str]]:
    """Context manager: list the operators that the Python handler calls."""
    called: list[str] = []
    call = TorchOperator.call

    def note(op: TorchOperator, *args: Any) -> Any:
        called.append(op.name)
        return call(op, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchOperator, "call", note)
        yield called


def check(function: Callable[..., Any], *batches: Tensor) -> None:
    """Compare with a loop, and list what the last of several calls enters."""
    entered: list[str] = []

    def repeated(*args: Any) -> Any:
        for _ in range(REPEATS - 1):
            function(*args)
        with entered_functions() as names:
            out = function(*args)
        entered.extend(names)
        return out

    got = vmap(repeated)(*batches)
    examples = [function(*example) for example in zip(*batches, strict=True)]
    torch.testing.assert_close(got, torch.stack(examples), equal_nan=True)
    assert entered == []


OPERANDS = {"scalars": (4,), "vectors": (4, 3), "matrices": (4, 2, 3)}
BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "div": lambda x, y: x / y,
    "pow": lambda x, y: torch.pow(x, y),
    "maximum": torch.maximum,
    "ge": lambda x, y: x >= y,
}


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("left", OPERANDS)
@pytest.mark.parametrize("right", OPERANDS)
def test_operands_of_any_ranks(name: str, left: str, right: str) -> None:
    x, y = torch.rand(OPERANDS[left]) + 1, torch.rand(OPERANDS[right]) + 1
    function = BINARY[name]
    check(function, x, y)
    plain = y[0]
    check(lambda a: function(a, plain), x)
    check(lambda a: function(plain, a), x)


# Calls on rows of numbers, on other rows of the same shape, and on positions among five.
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "x[i]": lambda x, y, i: x[i],
    "x[i, i]": lambda x, y, i: x[i, i],
    "x[..., i]": lambda x, y, i: x[..., i],
    "index_put": lambda x, y, i: x.index_put((i,), y[:3]),
    "take_along_dim": lambda x, y, i: torch.take_along_dim(x, i[:, None], 0),
    "one_hot": lambda x, y, i: F.one_hot(i, 5),
    "group_norm": lambda x, y, i: F.group_norm(x[None], 1),
    "cross_entropy": lambda x, y, i: F.cross_entropy(x[:3], i),
    "tensordot": lambda x, y, i: torch.tensordot(x, y, 2),
    "meshgrid": lambda x, y, i: torch.stack(torch.meshgrid(x[0], y[1], indexing="ij")),
    "inner": lambda x, y, i: torch.inner(x, y),
    "broadcast_tensors": lambda x, y, i: torch.cat(torch.broadcast_tensors(x, y)),
    "mse_loss": lambda x, y, i: F.mse_loss(x, y),
    "l1_loss": lambda x, y, i: F.l1_loss(x, y),
    "kl_div": lambda x, y, i: F.kl_div(x, y, reduction="sum"),
    "pairwise_distance": lambda x, y, i: F.pairwise_distance(x, y),
}


@pytest.mark.parametrize("name", CALLS)
def test_functions(name: str) -> None:
    x, y = torch.randn(4, 5, 5), torch.randn(4, 5, 5)
    check(CALLS[name], x, y, torch.randint(0, 5, (4, 3)))


@pytest.mark.parametrize("name", BINARY)
def test_operands_of_any_ranks_at_two_levels(name: str) -> None:
    function = BINARY[name]
    x, y = torch.rand(2, 3) + 1, torch.rand(2, 3, 4) + 1
    nested = vmap(vmap(function))
    derived = vmap(vmap(grad(lambda a, b: function(a, b).double().sum())))
    for _ in range(REPEATS):
        torch.testing.assert_close(nested(x, y), function(x[..., None], y))
        if name != "ge":
            leaf = x.clone().requires_grad_()
            function(leaf[..., None], y).sum().backward()
            torch.testing.assert_close(derived(x, y), leaf.grad)


def test_backward_passes_of_products_of_vectors() -> None:
    """C++ reshapes the product in place: ``squeeze_``."""
    w, x = torch.randn(3, 3), torch.randn(4, 3)
    function = vmap(grad(lambda row: (row @ w).sin().sum()))
    for _ in range(REPEATS):
        expected = function(x)
    with operators_in_python() as called:
        torch.testing.assert_close(function(x), expected)
    torch.testing.assert_close(expected, (x @ w).cos() @ w.mT)
    assert called == []


@pytest.mark.parametrize("transform", [grad, hessian, lambda f: vmap(grad(f))])
def test_known_calls_through_captured_pullbacks_run_no_python_handler(
    transform: Callable[[Function], Function],
) -> None:
    point = torch.randn(3, 3, dtype=torch.float64)
    pull = vjp(lambda y: (y.sin() * y.flip(0)).cumsum(0), point)[1]
    function = transform(lambda x: (pull(x)[0] * x).sin().sum())
    args = torch.randn(2, 3, 3, dtype=torch.float64) if transform not in (grad, hessian) else point
    for _ in range(3):
        expected = function(args)
    with operators_in_python() as called:
        torch.testing.assert_close(function(args), expected)
    assert called == []


def test_a_mask_in_the_place_of_positions() -> None:
    """Calls with positions and with masks have one plan; masks are served by their rule."""
    x, i = torch.randn(4, 5), torch.arange(5).repeat(4, 1)
    mask = torch.rand(4, 5) > 0.5
    put = vmap(lambda row, index: row.index_put((index,), torch.zeros(())))
    for _ in range(REPEATS):
        assert put(x, i).eq(0).all()
        torch.testing.assert_close(put(x, mask), x.masked_fill(mask, 0.0))


def test_an_index_of_no_dims_in_the_place_of_positions() -> None:
    x, i = torch.randn(4, 5, 2), torch.randint(0, 5, (4,))
    row = vmap(lambda a, index: a[index])
    for _ in range(REPEATS):
        torch.testing.assert_close(row(x, i[:, None]), x[torch.arange(4), i][:, None])
        torch.testing.assert_close(row(x, i), x[torch.arange(4), i])


def test_indices_of_a_tensor_from_outside_have_derivatives() -> None:
    w, i = torch.randn(5, 2, requires_grad=True), torch.randint(0, 5, (4, 3))
    for _ in range(REPEATS):
        rows = vmap(lambda index: w[:, 0][index] + w[index, 1] + w[index].sum(-1))(i)
        (got,) = torch.autograd.grad(rows.sum(), w)
        (expected,) = torch.autograd.grad((2 * w[i].sum(-1)).sum(), w)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["is_cuda", "is_meta", "itemsize", "nbytes", "nelement", "ndim"])
def test_metadata(name: str) -> None:
    def read(x: Tensor) -> Any:
        value = getattr(x, name)
        return value() if callable(value) else value

    entered: list[str] = []

    def function(x: Tensor) -> Tensor:
        with entered_functions() as names:
            value = read(x)
        entered.extend(names)
        assert value == read(torch.empty(4))
        return x

    vmap(function)(torch.randn(3, 4))
    assert entered == []


def test_results_that_are_arguments() -> None:
    def same(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(REPEATS):
            results = torch.broadcast_tensors(x, y)
            assert results[0] is x and results[1] is y
        return x

    vmap(same)(torch.randn(3, 4), torch.randn(3, 4))


@pytest.mark.parametrize(
    "convert",
    [lambda x: x.to(torch.float32), lambda x: x.to(dtype=torch.float32)],
    ids=["positional", "keyword"],
)
def test_a_repeated_call_that_returns_its_argument_runs_on_the_values(
    convert: Callable[[Tensor], Tensor],
) -> None:
    shapes: list[Any] = []

    def function(x: Tensor) -> Tensor:
        for _ in range(REPEATS):
            convert(x)
        with torch.profiler.profile(record_shapes=True) as profiler:
            assert convert(x) is x
        shapes.extend(event.input_shapes[0] for event in profiler.events() if event.input_shapes)
        return x

    vmap(function)(torch.randn(3, 2, 2))
    assert shapes == [[3, 2, 2]]
