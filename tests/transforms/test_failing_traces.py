"""A trace that fails restores the thread, and its tracers refuse every use."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C import (
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _functorch,
    _is_fwd_grad_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _meta_in_tls_dispatch_include,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import tsfunc
from tsfunc.dispatch import current_levels
from tsfunc.errors import TsfuncError


class Interrupt(BaseException):
    """Not an Exception, like KeyboardInterrupt."""


ERRORS = (ValueError, RuntimeError, KeyboardInterrupt, Interrupt, GeneratorExit, StopIteration)


def thread_state() -> tuple[Any, ...]:
    return (
        _dispatch_tls_local_include_set().raw_repr(),
        _dispatch_tls_local_exclude_set().raw_repr(),
        _functorch.maybe_current_level(),
        _is_fwd_grad_enabled(),
        _len_torch_dispatch_stack(),
        _len_torch_function_stack(),
        _meta_in_tls_dispatch_include(),
        forward_ad._current_level,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        current_levels(),
    )


class Counting(TorchFunctionMode):
    """Calls a function before each of the user's calls, with the values so far."""

    def __init__(self, before: Callable[[Any], None]) -> None:
        super().__init__()
        self.before = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.before(args)
        return func(*args, **(kwargs or {}))


class Fails:
    """Raises at the n-th call."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.left, self.error = at, error

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error("injected")


def body(x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.layer_norm(x.sin().cumsum(0), x.shape)
    y = torch.linalg.vecdot(torch.linalg.inv(torch.eye(5) * 2).mul(2), y)  # by FakeTensorMode
    z: torch.Tensor = torch.zeros(3) + y[:3]
    z[1:] = y[1:3] * y[0]
    return z @ y[:3]


class Formula(torch.autograd.Function):
    """A formula that makes calls that may raise: forward, backward and tangents."""

    fails: Callable[[], None]

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        Formula.fails()
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        Formula.fails()
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        Formula.fails()
        return grads[0] * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        Formula.fails()
        return tangents[0] * ctx.saved_tensors[0].cos()


def user_code(fails: Fails, kept: list[Any], patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def before(args: Any) -> None:
        kept.extend(x for x in args if isinstance(x, torch.Tensor))
        fails()

    def run(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        with Counting(before):
            return body(x)

    return run


def fake_rules(fails: Fails, kept: list[Any], patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    dispatch = FakeTensorMode.dispatch

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = dispatch(self, *args, **kwargs)
        fails()
        return out

    patch.setattr(FakeTensorMode, "dispatch", failing)

    def run(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return body(x)

    return run


def printed(fails: Fails, kept: list[Any], patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """torch's printing holds a guard of the thread's dispatch keys in its frame when it raises."""
    dispatch = FakeTensorMode.dispatch

    def failing(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = dispatch(self, func, types, args, kwargs)
        if isinstance(out, torch.Tensor):
            with torch._C._DisableTorchDispatch():
                repr(out)
        return out

    def intern(*args: Any, **kwargs: Any) -> str:
        fails()
        return ""

    patch.setattr(FakeTensorMode, "dispatch", failing)
    patch.setattr("torch._tensor_str._str_intern", intern)

    def run(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return body(x)

    return run


def formulas(fails: Fails, kept: list[Any], patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    patch.setattr(Formula, "fails", fails, raising=False)

    def run(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        apply: Any = Formula.apply
        y = apply(x)
        kept.append(y)
        return body(apply(y))

    return run


def hooks(fails: Fails, kept: list[Any], patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def saved(value: Any) -> Any:
        kept.append(value)
        fails()
        return value

    def seen(grad: torch.Tensor) -> None:
        kept.append(grad)
        fails()

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(saved, saved):
            y = x.sin()
            if y.requires_grad:
                y.register_hook(seen)
            fails()
            return body(y)

    return run


LOCATIONS = (user_code, fake_rules, printed, formulas, hooks)


def sums(transform: Callable[..., Any]) -> Callable[..., Any]:
    return lambda f: transform(lambda x: f(x).sum())


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "none": lambda f: f,
    "grad": sums(tsfunc.grad),
    "jvp": lambda f: lambda x: tsfunc.jvp(f, (x,), (x.cos(),))[1],
    "vmap": lambda f: tsfunc.vmap(lambda x, y: f(x) * y.sum(), in_dims=(None, 0)),
    "vmap_grad": lambda f: lambda x: tsfunc.vmap(sums(tsfunc.grad)(f))(torch.stack([x, x + 1])),
    "hessian": sums(tsfunc.hessian),
}

USES: tuple[Callable[[torch.Tensor], Any], ...] = (
    torch.sin,
    lambda t: t + 1,
    lambda t: torch.ones(()) * t,
    lambda t: t.add_(1),
    lambda t: t[0:1] if t.dim() else t[None],
    lambda t: torch.stack([t, t]),
    lambda t: t.tolist(),
    lambda t: t.clone(),
    lambda t: t.detach().sum(),
    lambda t: torch.zeros_like(t),
    lambda t: torch.empty(()).copy_(t),
    lambda t: tsfunc.specialize(lambda x: x * 2)(t),
    lambda t: tsfunc.vmap(lambda x: x * 2)(t[None]),
)


def check_refused(values: list[Any]) -> None:
    for value in values:
        if type(value) is torch.Tensor:
            continue
        for use in USES:
            with pytest.raises(TsfuncError):
                use(value)


@settings(max_examples=30)
@given(
    place=st.sampled_from(LOCATIONS), transform=st.sampled_from(sorted(TRANSFORMS)),
    error=st.sampled_from(ERRORS), at=st.integers(1, 25), symbolic=st.booleans(),
    caught=st.booleans(),
)  # fmt: skip
def test_a_failed_trace_leaves_the_thread_and_the_next_trace_whole(
    place: Any, transform: str, error: type[BaseException], at: int, symbolic: bool, caught: bool
) -> None:
    if caught and not issubclass(error, Exception):
        error = ValueError
    x = torch.tensor([0.3, -1.2, 0.5, 2.0, -0.4])
    arguments = (x, torch.ones(2, 2)) if transform == "vmap" else (x,)
    described = {"x": tsfunc.MetaTensorType(["n"])} if symbolic else None
    before = thread_state()
    kept: list[Any] = []
    transformed = TRANSFORMS[transform]
    fails = Fails(at, error)
    raised: list[BaseException] = []

    def tries(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        if caught:  # the exception is freed during the trace
            try:
                transformed(run)(x, *rest)
            except Exception:
                gc.collect()
            return x.sin() + 1
        return transformed(run)(x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        run = place(fails, kept, patch)
        try:
            tsfunc.specialize(tries, described)(*arguments)
        except BaseException as caught_error:
            raised.append(caught_error)
    assert thread_state() == before
    check_refused(kept[:3])
    assert thread_state() == before
    raised.clear()  # objects in its traceback are freed
    gc.collect()
    assert thread_state() == before
    g = tsfunc.grad(lambda x: body(x).sum())
    assert torch.allclose(tsfunc.specialize(g)(x), g(x), atol=1e-5)
    assert thread_state() == before


@pytest.mark.parametrize("method", ["lerp_", "addcmul_", "addcdiv_"])
@pytest.mark.parametrize("number", [False, True])
def test_in_place_operators_with_weights_push_tangents_in_a_program(
    method: str, number: bool
) -> None:
    def f(v: torch.Tensor) -> torch.Tensor:
        rest = (v * 2, 0.3) if number and method == "lerp_" else (v * 2, v.cos())
        return getattr(v * 1, method)(*rest)

    x = torch.tensor([1.0, 2.0, 4.0])
    pushed = lambda x: tsfunc.jvp(f, (x,), (x.sin(),))[1]  # noqa: E731
    expected = torch.autograd.functional.jvp(f, x, x.sin())[1]
    assert torch.allclose(tsfunc.specialize(pushed)(x), expected)
    with pytest.raises(RuntimeError):
        tsfunc.specialize(lambda x: getattr(x[:1] * 1, method)(x, x))(x)


def test_quantile_pushes_tangents_in_a_program() -> None:
    x = torch.tensor([1.0, 4.0, 2.0])
    f = lambda x: tsfunc.jvp(lambda v: torch.quantile(v, 0.5), (x,), (x.sin(),))[1]  # noqa: E731
    assert torch.equal(tsfunc.specialize(f)(x), x[2].sin())
    assert torch.equal(tsfunc.specialize(lambda x: x.sin() + 1)(x), x.sin() + 1)


def test_an_error_from_printing_that_is_kept_does_not_change_the_thread_when_it_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The function patches torch during its trace, and the trace removes the patches.
    monkeypatch.setattr(FakeTensorMode, "dispatch", FakeTensorMode.dispatch)
    monkeypatch.setattr("torch._tensor_str._str_intern", torch._tensor_str._str_intern)
    before = thread_state()
    kept: list[BaseException] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        try:
            raise ValueError("the user's")
        except ValueError as error:
            kept.append(error)
            return printed(Fails(1, RuntimeError), [], monkeypatch)(y)

    with pytest.raises(RuntimeError) as caught:
        tsfunc.specialize(f)(torch.ones(5))
    kept.append(caught.value)
    assert thread_state() == before
    del caught
    kept.clear()
    gc.collect()
    assert thread_state() == before
