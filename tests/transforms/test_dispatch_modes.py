"""torch's dispatch modes around transforms: the operators that they see, and differentiability."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tsfunc
from tests.transforms.support import same
from tsfunc import grad, jvp, specialize, vmap

X = torch.arange(12.0).view(3, 4).sin()
W: Tensor = torch.arange(16.0).view(4, 4).cos()


class Passing(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


FUNCTIONS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda x, w: x * w,
    lambda x, w: (x * w).sum(),
    lambda x, w: torch.cumsum(x * w, 0),
    lambda x, w: torch.nn.functional.cross_entropy(x, w),
    lambda x, w: grad(lambda y: (y.sin() * w).sum())(x),
    lambda x, w: vmap(lambda y: torch.cumsum(y * w, 0), 0)(x.expand(2, 4)),
]


@pytest.mark.parametrize("func", FUNCTIONS, ids=range(len(FUNCTIONS)))
def test_gradients_to_closed_over_tensors(func: Callable[[Tensor, Tensor], Any]) -> None:
    w = torch.arange(4.0).cos().requires_grad_()
    want = vmap(lambda x: func(x, w))(X)
    with Passing():  # type: ignore[no-untyped-call]
        got = vmap(lambda x: func(x, w))(X)
    same(got.detach(), want.detach())
    same(torch.autograd.grad(got.sum(), w), torch.autograd.grad(want.sum(), w))


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda m: m.grad(lambda x: (x @ W).tanh().sum()),
    "vmap(grad)": lambda m: m.vmap(m.grad(lambda x: (x @ W).tanh().sum())),
    "vmap(jvp)": lambda m: m.vmap(lambda x: m.jvp(lambda y: (y @ W).sin() * y, (x,), (x.cos(),))),
    "hessian": lambda m: m.hessian(lambda x: (x @ W).tanh().sum()),
    "grad(vmap)": lambda m: m.grad(lambda x: m.vmap(lambda y: (y @ W).exp())(x).sum()),
    "vmap(vmap)": lambda m: m.vmap(m.vmap(lambda x: torch.cumsum(x * 2, 0) @ x)),
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", list(TRANSFORMS))
def test_a_passing_mode_changes_nothing(name: str, depth: int) -> None:
    x = torch.randn(2, 3, 4) if name == "vmap(vmap)" else torch.randn(4, 4)
    want = TRANSFORMS[name](torch.func)(x)
    transformed = TRANSFORMS[name](tsfunc)

    def passed(x: Tensor) -> Any:
        with contextlib.ExitStack() as stack:
            for _ in range(depth):
                stack.enter_context(Passing())  # type: ignore[no-untyped-call]
            return transformed(x)

    same(passed(x), want)
    same(vmap(passed)(torch.stack([x, x])), torch.func.vmap(passed)(torch.stack([x, x])))


def test_flops_of_a_batch_are_counted() -> None:
    weight = torch.randn(5, 4, requires_grad=True)
    counter = FlopCounterMode(display=False)
    with counter:
        vmap(lambda x: weight @ x)(X).sum().backward()
    assert counter.get_total_flops() >= 2 * 3 * 4 * 5
    assert weight.grad is not None


SEEN: dict[str, Callable[[Any], Any]] = {
    **{name: make for name, make in TRANSFORMS.items() if name != "hessian"},
    "vmap": lambda m: m.vmap(lambda x: (x @ W).tanh()),
    "vmap(vmap(grad))": lambda m: m.vmap(m.vmap(m.grad(lambda x: (x @ W).tanh().sum()))),
    "jacrev": lambda m: m.jacrev(lambda x: (x @ W).sin()),
    "jacfwd": lambda m: m.jacfwd(lambda x: (x @ W).sin()),
    "jvp(vmap)": lambda m: lambda x: m.jvp(m.vmap(lambda y: (y @ W).exp()), (x,), (x.cos(),)),
}


class Physical(TorchDispatchMode):
    """Refuses tracers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        assert not types or set(types) <= {Tensor, torch.nn.Parameter}, (func, types)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SEEN)
def test_a_mode_sees_the_operators_that_reach_kernels(name: str) -> None:
    """FlopCounterMode counts the whole batch, as around torch.func."""
    x = torch.randn(3, 4, 4)[0 if name.startswith("jac") else slice(None)]
    counts = []
    for module in (torch.func, tsfunc):
        transformed = SEEN[name](module)
        for _ in range(3):  # plans and recipes are made at the first calls
            physical = Physical()  # type: ignore[no-untyped-call]
            with physical, FlopCounterMode(display=False) as counter:
                transformed(x)
            counts.append(counter.get_total_flops())
    assert len(set(counts)) == 1 and counts[0], counts


class InPython(TorchDispatchMode):
    """A mode that calls torch's functions in Python, below autograd, in place of some operators."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.mul.Tensor:
            return torch.multiply(*args)
        if func is torch.ops.aten.mv.default:
            return torch.matmul(*args)
        with self:
            out = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if out is NotImplemented else out


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "vector": lambda w, x: w @ x,
    "matrix": lambda w, x: w.T.mm(x[:, None].sin()),
    "linear": lambda w, x: torch.nn.functional.linear(x.sin(), w),
    "rows": lambda w, x: (w * x).sum(0),
    "einsum": lambda w, x: torch.einsum("ij,j->i", w, x * 2),
}


@pytest.mark.parametrize("mode", [InPython, lambda: FlopCounterMode(display=False)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_gradient_of_a_captured_tensor_under_a_mode(name: str, mode: Any) -> None:
    product = PRODUCTS[name]
    for _ in range(4):  # plans and recipes are made at the first calls
        weight = torch.randn(4, 4, requires_grad=True)
        x = torch.randn(3, 4)
        (want,) = torch.autograd.grad(
            torch.stack([product(weight, each) for each in x]).square().sum(), weight
        )
        with mode():
            out = vmap(lambda each, weight=weight: product(weight, each))(x)
        (got,) = torch.autograd.grad(out.square().sum(), weight)
        same(got, want)


COMPOSITE: dict[str, Callable[[Tensor], Tensor]] = {
    "a device": lambda x: x.sin().to(x.device),
    "a copy": lambda x: x.to(torch.float64, copy=True),
    "a norm": lambda x: torch.linalg.norm(x, dtype=torch.float64),
    "a dtype": lambda x: x.softmax(0, dtype=torch.float64),
    "an overload": lambda x: torch.ops.aten.to.dtype_layout(x, dtype=torch.float64),
    "a mean": lambda x: torch.nanmean(x, 0, dtype=torch.float64),
}


@pytest.mark.parametrize("mode", [InPython, lambda: FlopCounterMode(display=False)])
@pytest.mark.parametrize("name", COMPOSITE)
def test_composite_operators_with_keyword_arguments_under_a_mode(name: str, mode: Any) -> None:
    """The mode decomposes the operator, and does not get it again."""
    f = COMPOSITE[name]
    for _ in range(4):
        x = torch.randn(3, 4)
        with mode():
            out = vmap(f)(x)
        same(out, torch.stack([f(each) for each in x]))


DECOMPOSED: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "bilinear": lambda x: F.interpolate(x, size=(3, 5), mode="bilinear"),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "softmax": lambda x: x.softmax(-1),
}
TOWERS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "vmap": vmap,
    "vmap(jvp)": lambda f: vmap(lambda x: jvp(f, (x,), (x.cos(),))),
    "jvp(vmap)": lambda f: lambda x: jvp(vmap(f), (x,), (x.cos(),)),
    "vmap(grad)": lambda f: vmap(grad(lambda x: f(x).sin().sum())),
    "grad(vmap)": lambda f: grad(lambda x: vmap(f)(x).sin().sum()),
    "vmap(jvp(grad))": lambda f: vmap(
        lambda x: jvp(grad(lambda x: f(x).sin().sum()), (x,), (x.cos(),))
    ),
}


@pytest.mark.parametrize("mode", [InPython, lambda: FlopCounterMode(display=False)])
@pytest.mark.parametrize("name", DECOMPOSED)
@pytest.mark.parametrize("tower", TOWERS)
def test_operators_that_a_mode_decomposes_under_derivatives(
    tower: str, name: str, mode: Any
) -> None:
    transformed = TOWERS[tower](DECOMPOSED[name])
    for _ in range(2):
        x = torch.randn(3, 1, 2, 4, 4, dtype=torch.float64)
        with mode():
            got = transformed(x)
        torch.testing.assert_close(got, transformed(x))


class TenTimes(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 10 if getattr(func, "__name__", "") == "sin" else out


class TenTimesBelow(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 10 if func is torch.ops.aten.sin.default else out


@pytest.mark.parametrize("mode", [TenTimes, TenTimesBelow])
def test_a_mode_sees_a_program_run_and_not_its_trace(mode: Callable[[], Any]) -> None:
    """Otherwise it would act twice, and on calls outside of the program."""
    for first_inside in (True, False):
        f = specialize(lambda x: x.sin())
        for inside in (first_inside, True, False, True):
            with mode() if inside else contextlib.nullcontext():
                got = f(X)
            same(got, X.sin() * (10 if inside else 1))


def test_the_default_device_is_a_mode_that_a_trace_keeps() -> None:
    f = specialize(lambda x: (x.sin(), torch.ones(4)))
    for _ in range(2):
        with TenTimes(), torch.device("meta"):
            sine, ones = f(X)
        assert ones.is_meta and sine.equal(X.sin() * 10)
        assert f(X)[1].equal(torch.ones(4))


class Noting(TorchDispatchMode):
    """A mode that notes the names of its operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_a_write_reads_nothing_of_other_tensors() -> None:
    """A dispatch mode sees the operators of the function, and no other ones."""
    kept = []

    def f(x: Tensor) -> Tensor:
        # A class with a layout of its own, for which torch asks the innermost mode.
        rows = [torch.ones(2), torch.ones(3)]
        kept.append(torch.nested.nested_tensor(rows, layout=torch.jagged))
        out = torch.zeros(3)
        with Noting() as mode:
            out[0] = x.sum()
        names.update(mode.names)
        return out

    names: set[str] = set()
    x = torch.randn(2, 4)
    torch.testing.assert_close(vmap(f)(x), torch.nn.functional.pad(x.sum(1, keepdim=True), (0, 2)))
    assert "aten.copy_.default" in names
    assert not any(name.startswith("prim.") for name in names), names
