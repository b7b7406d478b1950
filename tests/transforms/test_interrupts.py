"""An exception that a signal handler raises at any step leaves the thread as it was."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import tsfunc
from tests.dispatch.helpers import on_another_thread
from tsfunc.bridge.grad import autograd
from tsfunc.bridge.tracers.boundaries import outermost
from tsfunc.dispatch import state

X = torch.arange(1.0, 7.0).view(3, 2).sin()


class Interrupt(BaseException):
    """The exception that the signal handler raises."""


def choice(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0.5 else x.sin()


def branch(x: Tensor) -> Tensor:
    out: Tensor = tsfunc.cond(x.sum() > 0.5, torch.sin, torch.cos, x)
    return out.sum()


def steps(x: Tensor) -> Tensor:
    out: Tensor = tsfunc.fori_loop(0, 3, lambda i, y: y * x, x)
    return out.sum()


def cubes(x: Tensor) -> Tensor:
    return (x**3).sum()


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "vmap": tsfunc.vmap(lambda x: x * 2 + x.sum()),
    "vmap of vmap": tsfunc.vmap(tsfunc.vmap(torch.sin, 0), 1),
    "split": tsfunc.vmap(choice, data_dependent="split"),
    "loop over the examples": tsfunc.vmap(lambda x: torch.nextafter(x, x + 1)),
    "random": tsfunc.vmap(lambda x: x + torch.randn(2), randomness="different"),
    "vmap of grad": tsfunc.vmap(tsfunc.grad(cubes)),
    "vmap of grad of cond": tsfunc.vmap(tsfunc.grad(branch)),
    "grad": tsfunc.grad(cubes),
    "grad of grad": tsfunc.grad(lambda x: tsfunc.grad(cubes)(x).sum()),
    "grad of vmap": tsfunc.grad(lambda x: tsfunc.vmap(cubes)(x).sum()),
    "grad of loop": tsfunc.grad(steps),
    "vjp": lambda x: tsfunc.vjp(torch.sin, x)[1](x),
    "jvp": lambda x: tsfunc.jvp(cubes, (x,), (x,)),
    "jvp of jvp": lambda x: tsfunc.jvp(lambda y: tsfunc.jvp(cubes, (y,), (y,))[1], (x,), (x,)),
    "hessian": tsfunc.hessian(cubes),
    "linearize": lambda x: tsfunc.linearize(torch.sin, x)[1](x),
    "program": lambda x: tsfunc.specialize(lambda y: tsfunc.vmap(torch.sin)(y) * 2, {})(x),
}


def observed() -> dict[str, Any]:
    """The state of the thread, as far as it can be read."""
    return {
        "include": str(torch._C._dispatch_tls_local_include_set()),
        "exclude": str(torch._C._dispatch_tls_local_exclude_set()),
        "grad": torch.is_grad_enabled(),
        "forward": torch._C._is_fwd_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "torch function": torch._C._is_torch_function_enabled(),
        "dual level": forward_ad._current_level,
        "torch.func": torch._C._functorch.maybe_current_level(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "state": state.tls.state,
        "recording": outermost.recording,
        "jvps": outermost.forward,
        "dual users": autograd._dual_users,
        "inside": outermost.inside,
        "active": [x for x, t in state.active_levels.items() if t == threading.get_ident()],
    }


def check_that_it_works(f: Callable[[Tensor], Any], want: Any) -> None:
    y = torch.ones(2, requires_grad=True)
    (y * y).sum().backward()
    assert y.grad is not None and y.grad.tolist() == [2.0, 2.0]
    if want is not None:
        torch.testing.assert_close(f(X), want)


@contextlib.contextmanager
def raising_after(events: int) -> Iterator[list[int]]:
    """Raise at the step of that number: as a function begins, or after a call into C.

    There Python runs signal handlers.
    """
    count = [0]

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename != __file__:
            count[0] += 1
            if count[0] == events:
                raise Interrupt

    sys.setprofile(profile)
    try:
        yield count
    finally:
        sys.setprofile(None)


def interrupted(f: Callable[[Tensor], Any], at: int) -> None:
    with contextlib.suppress(Interrupt), raising_after(at):
        f(X)


def hold(name: str, chosen: Callable[[int], list[int]]) -> None:
    f = FUNCTIONS[name]
    want = f(X)
    want = f(X) if name != "random" else None
    with raising_after(-1) as count:
        f(X)
    before = observed()
    for at in chosen(count[0]):
        interrupted(f, at)
        assert observed() == before, (name, at)
        check_that_it_works(f, want)


@pytest.fixture(autouse=True)
def ignored_in_destructors(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in a destructor is reported, and lost."""
    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_at_some_steps(name: str) -> None:
    def chosen(count: int) -> list[int]:
        rng = random.Random(name)
        ends = {*range(1, 25), *range(count - 24, count + 1)}
        return sorted(ends | {rng.randint(1, count) for _ in range(40)})

    hold(name, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_at_every_step(name: str) -> None:
    hold(name, lambda count: list(range(1, count + 1, 1 + count // 3000)))


def test_by_signals() -> None:
    rng, armed = random.Random(0), [False]

    def handler(*_: Any) -> None:
        if armed[0]:
            armed[0] = False
            raise Interrupt

    old = signal.signal(signal.SIGALRM, handler)
    names = [name for name in FUNCTIONS if name != "program"]
    try:
        for name in names:
            FUNCTIONS[name](X)
        before = observed()
        for i in range(400):
            name = names[i % len(names)]
            try:
                armed[0] = True
                signal.setitimer(signal.ITIMER_REAL, rng.random() * 0.003 + 1e-5)
                FUNCTIONS[name](X)
                armed[0] = False
            except Interrupt:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert observed() == before, (name, i)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_another_thread_can_use_forward_mode_afterwards() -> None:
    f = FUNCTIONS["jvp"]
    f(X)
    for at in range(1, 400, 7):
        interrupted(f, at)
    got = on_another_thread(lambda: f(X))
    torch.testing.assert_close(got, f(X))


def test_inside_of_contexts_that_stay() -> None:
    """The state before the call is restored, not the state of a fresh thread."""
    f = FUNCTIONS["vmap of grad"]
    f(X)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        f(X)
        before = observed()
        for at in range(1, 600, 11):
            interrupted(f, at)
            assert observed() == before, at


def test_an_error_of_the_function_restores_the_state() -> None:
    def leaves(x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        raise ZeroDivisionError

    before = observed()
    with pytest.raises(ZeroDivisionError):
        tsfunc.vmap(leaves)(X)
    assert observed() == before
