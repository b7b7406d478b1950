"""An exception that a signal handler raises at any step leaves the thread's state unchanged."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tsfunc
from tests.dispatch.helpers import on_another_thread
from tsfunc._lazy import call_uninterrupted
from tsfunc.bridge.grad import dual_level
from tsfunc.bridge.tracers.interrupts import open_blocks, outermost
from tsfunc.dispatch import state
from tsfunc.program.closure import instances
from tsfunc.user_code import AbandonedRun

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


def quiet(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.sum().exp()
    return x * scale


def scanned(x: Tensor) -> Tensor:
    out: Tensor = tsfunc.scan(lambda total, row: (total + row.sin(), row), x[0] * 0, x)[0]
    return out.sum()


@tsfunc.custom_vjp
def ruled(x: Tensor) -> Tensor:
    return x.sin()


ruled.defvjp(lambda x: (x.sin(), x), lambda x, g: (tsfunc.vmap(torch.cos)(x) * g,))


class Owner:
    """An object that a traced function assigns to."""

    last: Any = 0.0

    def remember(self, x: Tensor) -> Tensor:
        total = self.last = x.sum()
        return x * total


OWNER = Owner()
LAYER = torch.nn.Linear(2, 1)
OWN = dict(LAYER.named_parameters())
GIVEN = {name: torch.ones(3, *value.shape) for name, value in OWN.items()}
OPTIMIZER = tsfunc.functional_optimizer(torch.optim.SGD, lr=0.1)
PULL = tsfunc.vjp(torch.sin, X)[1]
PUSH = tsfunc.linearize(torch.sin, X)[1]
CHECKPOINTED = tsfunc.checkpoint(lambda x: tsfunc.vmap(torch.sin)(x))


def derived(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the gradient by a backward pass that the user starts."""
    leaf = x.detach().requires_grad_()
    f(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


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
    "pullback alone": lambda x: PULL(x),
    "pushforward alone": lambda x: PUSH(x),
    "backward of checkpoint": lambda x: derived(CHECKPOINTED, x),
    "backward of a rule": lambda x: derived(ruled, x),
    "functional_call": lambda x: tsfunc.vmap(partial(tsfunc.functional_call, LAYER))(GIVEN, x),
    "step of an optimizer": tsfunc.vmap(lambda x: OPTIMIZER.step(x, x * 2, OPTIMIZER.init(x))[0]),
    "explain": lambda x: tsfunc.explain(tsfunc.vmap(torch.sin), x).loops,
    "call of a program": tsfunc.specialize(quiet),
    "call of a program with a loop": tsfunc.specialize(scanned),
    "backward of a program with a loop": tsfunc.specialize(tsfunc.grad(scanned)),
    "program that assigns": lambda x: tsfunc.specialize(lambda y: OWNER.remember(y) * 2)(x),
    "program": lambda x: tsfunc.specialize(lambda y: tsfunc.vmap(torch.sin)(y) * 2, {})(x),
}


def observed() -> dict[str, Any]:
    """Return the state of the thread, as far as it can be read."""
    return {
        "include": str(torch._C._dispatch_tls_local_include_set()),
        "exclude": str(torch._C._dispatch_tls_local_exclude_set()),
        "grad": torch.is_grad_enabled(),
        "forward": torch._C._is_fwd_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "torch function": torch._C._is_torch_function_enabled(),
        "dual level": forward_ad._current_level,
        "torch.func": torch._C._functorch.maybe_current_level(),
        "function modes": _get_current_function_mode_stack(),
        "dispatch modes": _python_dispatch._get_current_dispatch_mode_stack(),
        "in dispatch modes": _python_dispatch.is_in_torch_dispatch_mode(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "autocast": (
            torch.autocast_increment_nesting(),
            torch.autocast_decrement_nesting(),
            torch.is_autocast_cache_enabled(),
            torch.get_autocast_dtype("cpu"),
        ),
        "lifting": torch._C._only_lift_cpu_tensors(),
        "compiling": torch.compiler.is_compiling(),
        "generator": vars(torch.random)["default_generator"] is torch.default_generator,
        "collector": (gc.isenabled(), gc.get_threshold()),
        "warnings": (id(warnings.filters), warnings.showwarning),
        "watched classes": len(instances._watched),
        "open blocks": open_blocks(),
        "parameters": [id(x) for x in LAYER.parameters()],
        "state": state.tls.state,
        "recording": outermost.recording,
        "jvps": outermost.forward,
        "dual users": dual_level._dual_users,
        "inside": outermost.inside,
        "active": [x for x, t in state.active_levels.items() if t == threading.get_ident()],
    }


def check_that_it_works(f: Callable[[Tensor], Any], want: Any) -> None:
    y = torch.ones(2, requires_grad=True)
    (y * y).sum().backward()
    assert y.grad is not None and y.grad.tolist() == [2.0, 2.0]
    if want is not None:
        torch.testing.assert_close(f(X), want)
    assert type(OWNER.last) in (float, Tensor)
    assert vars(Owner).keys() == MEMBERS


MEMBERS = vars(Owner).keys() | set()


@contextlib.contextmanager
def raising_after(events: int) -> Iterator[list[int]]:
    """Raise at a numbered step: when a function begins, or after a call into C.

    Python runs signal handlers at these points.
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
    """Python reports an interrupt in a destructor, and drops it."""
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
    """The state from before the call is restored, not that of a fresh thread."""
    f = FUNCTIONS["vmap of grad"]
    f(X)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        f(X)
        before = observed()
        for at in range(1, 600, 11):
            interrupted(f, at)
            assert observed() == before, at


class _Passing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["program", "call of a program", "vmap of grad"])
def test_inside_of_modes_and_hooks_that_stay(name: str) -> None:
    """A trace leaves the modes of its caller and enters them again."""
    f = FUNCTIONS[name]
    f(X)
    with (
        torch.device("cpu"), BaseTorchFunctionMode(), _Passing(), warnings.catch_warnings(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    ):  # fmt: skip
        want = f(X)
        with raising_after(-1) as count:
            f(X)
        before = observed()
        rng = random.Random(name)
        for at in sorted(rng.randint(1, count[0]) for _ in range(60)):
            interrupted(f, at)
            assert observed() == before, at
        torch.testing.assert_close(f(X), want)


def test_inside_of_a_mode_that_enters_itself_again() -> None:
    """FlopCounterMode enters itself in its handler, and keeps a flag for each entry."""
    f = tsfunc.vmap(lambda x: x.sin() @ x)
    f(X)
    with FlopCounterMode(display=False), raising_after(-1) as count:
        f(X)
    for at in range(1, count[0], 2):
        with FlopCounterMode(display=False):
            interrupted(f, at)
        assert not _python_dispatch.is_in_torch_dispatch_mode(), at


def test_contexts_of_torch_that_the_function_enters() -> None:
    """Each is written in Python, and may be interrupted after its first change."""

    def f(x: Tensor) -> Tensor:
        with (
            torch.inference_mode(), torch.autocast("cpu", torch.float16, cache_enabled=False),
            torch.set_grad_enabled(False), warnings.catch_warnings(), torch.device("cpu"),
            _Passing(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        ):  # fmt: skip
            return x @ x

    vmapped = tsfunc.vmap(f)
    x = torch.randn(2, 3, 3)
    vmapped(x)
    with raising_after(-1) as count:
        vmapped(x)
    before = observed()
    for at in range(1, count[0] + 1):
        with contextlib.suppress(Interrupt), raising_after(at):
            vmapped(x)
        assert observed() == before, at


def test_an_interrupt_while_the_state_is_restored() -> None:
    """A second exception, at any step of the first one's handling, changes nothing."""

    def fails(x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        raise ZeroDivisionError

    f = tsfunc.vmap(fails)
    before = observed()
    with raising_after(-1) as count, contextlib.suppress(ZeroDivisionError):
        f(X)
    for at in range(1, count[0] + 1):
        with contextlib.suppress(Interrupt, ZeroDivisionError), raising_after(at):
            f(X)
        assert observed() == before, at


def test_random_numbers_after_an_interrupted_repetition() -> None:
    """A checkpoint draws the same numbers again; the generator continues from its last state."""
    f = tsfunc.grad(tsfunc.checkpoint(lambda x: (x * torch.rand_like(x)).sum().sin()))
    f(X)
    torch.manual_seed(3)
    f(X)
    after = torch.get_rng_state()
    with raising_after(-1) as count:
        f(X)
    for at in random.Random(0).sample(range(1, count[0] + 1), 60):
        torch.manual_seed(3)
        start = torch.get_rng_state()
        interrupted(f, at)
        state = torch.get_rng_state()
        assert torch.equal(state, start) or torch.equal(state, after), at


@pytest.mark.parametrize(
    "names, times, seconds",
    [
        (("program that assigns", "program", "hessian"), 60, 5e-3),
        # The threads take torch's dual level from each other at Python's shortest switch interval.
        (("jvp", "hessian"), 800, 5e-6),
    ],
    ids=["programs", "jvps"],
)
def test_an_interrupt_while_another_thread_runs_transforms(
    names: tuple[str, ...], times: int, seconds: float
) -> None:
    """The other thread continues, and both threads return right results afterwards.

    Args:
        seconds: the time after which Python lets the other thread run.
    """
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    stop, wrong = threading.Event(), []
    functions = [FUNCTIONS[name] for name in names]
    wants = [f(X) for f in functions]

    def work() -> None:
        while not stop.is_set():
            for f, want in zip(functions, wants, strict=True):
                if f is FUNCTIONS["program that assigns"]:
                    continue  # it assigns to an object that both threads would share
                try:
                    torch.testing.assert_close(f(X), want)
                except BaseException as error:
                    wrong.append(error)

    before, interval = observed(), sys.getswitchinterval()
    thread = threading.Thread(target=work)
    thread.start()
    sys.setswitchinterval(seconds)
    try:
        for _ in range(times):
            for f in functions:
                interrupted(f, rng.randint(1, 4000))
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert not wrong, wrong[0]
    assert observed() == before
    for f, want in zip(functions, wants, strict=True):
        check_that_it_works(f, want)


def test_an_interrupt_of_a_call_that_began_inside_of_another_threads_jvp() -> None:
    """The interrupted thread exits the dual level, although torch had one when it began."""
    f = FUNCTIONS["jvp"]
    want, before = f(X), observed()
    for at in range(1, 400):
        entered, leave = threading.Event(), threading.Event()

        def held(x: Tensor, entered: Any = entered, leave: Any = leave) -> Tensor:
            entered.set()
            leave.wait(60)
            return x.sin()

        thread = threading.Thread(target=tsfunc.jvp, args=(held, (X,), (X,)))

        def late(x: Tensor, leave: Any = leave, thread: Any = thread, at: int = at) -> Tensor:
            leave.set()
            thread.join()
            with raising_after(at):
                out: Tensor = f(x)[0]
            return out

        thread.start()
        assert entered.wait(60)
        with contextlib.suppress(Interrupt):
            tsfunc.vmap(late, in_dims=None, axis_size=2)(X)
        leave.set()
        thread.join()
        assert observed() == before, at
    check_that_it_works(f, want)


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """Python ignores SIGINT in a process that a shell runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_waits_for_the_end_of_an_import() -> None:
    """A module whose import is interrupted may never be imported again."""
    done = []

    def register() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))  # Python calls the handler here
        done.append(1)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        call_uninterrupted(register)
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is handler
    assert on_another_thread(lambda: call_uninterrupted(int, "3")) == 3
    with pytest.raises(ZeroDivisionError):
        call_uninterrupted(divmod, 1, 0)
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_error_of_the_function_restores_the_state() -> None:
    def leaves(x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        raise ZeroDivisionError

    before = observed()
    with pytest.raises(ZeroDivisionError):
        tsfunc.vmap(leaves)(X)
    assert observed() == before


_BLOCK = """
def block(function, interrupt):
    try:
        raise interrupt
    finally:
        function()
"""


def block_of(directory: str) -> Callable[[Callable[[], Any], BaseException], Any]:
    """Return a function whose ``finally`` calls a function while an interrupt passes."""
    scope: dict[str, Any] = {}
    exec(compile(_BLOCK, os.path.join(directory, "block.py"), "exec"), scope)
    return cast("Callable[[Callable[[], Any], BaseException], Any]", scope["block"])


def failing() -> None:
    raise RuntimeError("this block was not entered")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(3), Interrupt()])
@pytest.mark.parametrize("name", ["vmap", "grad", "program", "checkpoint"])
def test_an_error_of_torchs_that_replaces_an_interrupt(name: str, interrupt: BaseException) -> None:
    block = block_of(os.path.dirname(torch.__file__))

    def f(x: Tensor) -> Tensor:
        try:
            block(failing, interrupt)
        except RuntimeError as error:
            raise ValueError("no result") from error  # as a backend's error becomes one
        return x.sum()

    transforms: dict[str, Callable[[Tensor], Any]] = {
        "vmap": tsfunc.vmap(f), "grad": tsfunc.grad(f), "program": tsfunc.specialize(f),
        "checkpoint": tsfunc.checkpoint(f),
    }  # fmt: skip
    before = observed()
    with pytest.raises(type(interrupt)) as caught:
        transforms[name](X)
    assert caught.value is interrupt
    assert observed() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no result")])
def test_an_abandoned_run_is_no_interrupt(error: BaseException) -> None:
    def again(x: Tensor) -> Tensor:
        block(lambda: throw(error), AbandonedRun())
        return x

    def throw(error: BaseException) -> None:
        raise error

    block = block_of(os.path.dirname(tsfunc.__file__))
    with pytest.raises(type(error)) as caught:
        tsfunc.vmap(again)(X)
    assert caught.value is error


def test_an_interrupt_that_the_function_handles_is_its_own() -> None:
    block = block_of("of a user")

    def cleaned(x: Tensor) -> Tensor:
        block(failing, KeyboardInterrupt())
        return x

    def caught(x: Tensor) -> Tensor:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ValueError("stopped") from None

    with pytest.raises(RuntimeError, match="not entered"):
        tsfunc.vmap(cleaned)(X)
    with pytest.raises(ValueError, match="stopped"):
        tsfunc.specialize(caught)(X)
