"""checkpoint: derivatives are those of the function, and intermediate values are not kept."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

import tsfunc
from tests.transforms.support import leaves, same
from tsfunc import checkpoint, grad, jacfwd, jacrev, jvp, linearize, specialize, vjp, vmap
from tsfunc import checkpoint_policies as policies
from tsfunc.bridge.tracers.memory_meter import Meter

X = torch.arange(6.0, dtype=torch.float64).view(2, 3).cos()
W = torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * x * w

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return 2 * x * w * ct, x * x * ct


def limited(x: Tensor) -> Tensor:
    """Return a sum with a lower limit that is not recorded."""
    total = x.sum()
    with torch.no_grad():
        total.clamp_min_(1e-3)
    return total


# Functions of x that capture w.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda x, w: ((x * w).sin() * w).exp(),
    "a vmap inside": lambda x, w: vmap(lambda a: a.sin() * x)(w).sin(),
    "a gradient inside": lambda x, w: grad(lambda v: (v**3 * x).sum())(w).sin(),
    "both inside": lambda x, w: vmap(grad(lambda v: v**3 * x[0]))(w).sin() * x,
    "a tangent inside": lambda x, w: jvp(lambda v: v**3 * x, (w,), (w,))[1],
    "a Function": lambda x, w: Squared.apply(x.sin(), w),  # type: ignore[no-untyped-call]
    "a checkpoint inside": lambda x, w: checkpoint(lambda y: (y * w).sin().exp())(x.cos() * w),
    "a list": lambda x, w: torch.stack([x, w]).prod(0).sin(),
    "its argument": lambda x, w: x,
    "a write that is not recorded": lambda x, w: x * w / limited(x.square() + w.square()),
    "such a write in a vmap": lambda x, w: vmap(lambda a: a * x / limited(x * x + a))(w * w).sum(0),
    "a determinant": lambda x, w: torch.linalg.det(w.outer(w) + x.diag()) * x,
    "a view": lambda x, w: (x * w).flip(0)[None].T.squeeze(),
}

Build = Callable[[Callable[[Any], Any], Callable[[Tensor, Tensor], Tensor]], Any]


def of_both(made: Callable[[Any], Any], func: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the scalar function of w and x, with a checkpoint of the part of x."""
    return lambda w, x: made(lambda x: func(x, w))(x).sin().sum()


def each(f: Callable[..., Any]) -> Callable[..., Any]:
    return vmap(f, (None, 0))


def summed(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: sum(leaf.sin().sum() for leaf in leaves(f(*args)))


NESTINGS: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "grad": lambda f: grad(f, (0, 1))(W, X[0]),
    "vmap": lambda f: each(f)(W, X),
    "jvp": lambda f: jvp(f, (W, X[0]), (X[1], W)),
    "vmap(grad)": lambda f: each(grad(f, (0, 1)))(W, X),
    "grad(vmap)": lambda f: grad(summed(each(f)), (0, 1))(W, X),
    "grad(vmap) of both": lambda f: grad(summed(vmap(f)), (0, 1))(W.expand(2, 3), X),
    "vmap(jvp)": lambda f: vmap(lambda w, x: jvp(f, (w, x), (x, w)))(X, X),
    "jvp(grad)": lambda f: jvp(grad(f, (0, 1)), (W, X[0]), (X[1], W)),
    "grad(jvp)": lambda f: grad(lambda w, x: jvp(f, (w, x), (x, w))[1], (0, 1))(W, X[0]),
    "grad(vmap(jvp))": lambda f: grad(summed(vmap(lambda w, x: jvp(f, (w, x), (x, w)))), (0, 1))(
        X, X
    ),
    "jvp(jvp)": lambda f: jvp(lambda w, x: jvp(f, (w, x), (x, w))[1], (W, X[0]), (X[1], W)),
    "grad(grad)": lambda f: grad(summed(grad(f, (0, 1))), (0, 1))(W, X[0]),
    "grad(vjp)": lambda f: grad(
        lambda w, x: vjp(f, w, x)[1](torch.ones((), dtype=w.dtype))[1].sin().sum(), (0, 1)
    )(W, X[0]),
    "the pullback of a gradient": lambda f: vjp(grad(f, (0, 1)), W, X[0])[1]((X[1], W)),
    "grad(vmap(grad))": lambda f: grad(summed(each(grad(f, (0, 1)))), (0, 1))(W, X),
    "vmap(vmap(grad))": lambda f: each(each(grad(f, (0, 1))))(W, X[None]),
    "specialize(vmap(grad))": lambda f: specialize(each(grad(f, (0, 1))))(W, X),
    "grad(specialize)": lambda f: grad(specialize(f), (0, 1))(W, X[0]),
}


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_checkpoint_is_its_function(name: str, nesting: str) -> None:
    build, func = NESTINGS[nesting], FUNCTIONS[name]
    same(build(of_both(checkpoint, func)), build(of_both(lambda f: f, func)))


def products(x: Tensor) -> Tensor:
    a = torch.arange(9.0, dtype=torch.float64).view(3, 3).sin()
    return torch.nn.functional.linear((x @ a).sin() @ a, a).relu()


POLICIES: dict[str, Any] = {
    "nothing": policies.nothing_saveable,
    "everything": policies.everything_saveable,
    "dots": policies.dots_saveable,
    "a list": [torch.ops.aten.sin],
    "a function": lambda ctx, op, *args, **kwargs: op.overloadpacket is torch.ops.aten.sin,
    "both": policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable,
        lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE,
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_do_not_change_derivatives(policy: str) -> None:
    kept = checkpoint(products, policy=POLICIES[policy])

    def total(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: f(x).square().sum()

    x = X[0]
    same(grad(total(kept))(x), grad(total(products))(x))
    same(vmap(grad(total(kept)))(X), vmap(grad(total(products)))(X))
    same(grad(total(vmap(kept)))(X), grad(total(vmap(products)))(X))
    same(tsfunc.hessian(total(kept))(x), tsfunc.hessian(total(products))(x))


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket] = self.counts.get(func.overloadpacket, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("policy", "sines", "dots"), [("nothing", 2, 2), ("dots", 2, 0), ("everything", 1, 0)]
)
def test_policies_choose_the_recomputed_results(policy: str, sines: int, dots: int) -> None:
    """``dots`` counts the products beyond those without a checkpoint."""
    x = X.clone().requires_grad_()
    a = torch.eye(3, dtype=torch.float64)
    counts = []
    functions: list[Callable[..., Any]] = [lambda x: ((x @ a).sin() @ a) @ a]
    for func in functions:
        for made in (func, checkpoint(func, policy=POLICIES[policy])):
            with Counting() as counting:
                made(x).sum().backward()
            counts.append(counting.counts)
    plain, checked = counts
    mm, sin = torch.ops.aten.mm, torch.ops.aten.sin
    assert checked[sin] == sines
    assert checked[mm] - plain[mm] == dots


def test_a_kept_result_that_was_written_into_is_computed_again() -> None:
    def func(x: Tensor) -> Tensor:
        return (x @ torch.eye(3, dtype=x.dtype)).mul_(2).sin()

    want = grad(lambda x: func(x).sum())(X)
    for _ in range(2):
        same(grad(lambda x: checkpoint(func, policy=policies.dots_saveable)(x).sum())(X), want)


def long(x: Tensor) -> Tensor:
    for _ in range(20):
        x = x.sin()
    return x


class Keeping:
    """Counts the tensors that autograd keeps for a function: the most at any time."""

    def __init__(self) -> None:
        self.alive = self.most = 0

    def of(self, func: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda kept: kept.value):
                return func(*args)

        return counted

    def pack(self, value: Tensor) -> Any:
        self.alive += 1
        self.most = max(self.most, self.alive)
        kept = Kept(value)
        weakref.finalize(kept, self.gone)
        return kept

    def gone(self) -> None:
        self.alive -= 1


class Kept:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def most_kept(nesting: str, made: Callable[[Any], Any]) -> int:
    """Return the most bytes kept by a chain of twenty operators, or by a checkpoint of it."""
    keeping = Keeping()
    NESTINGS[nesting](of_both(lambda f: keeping.of(made(f)), lambda x, w: long(x * w)))
    gc.collect()
    assert keeping.alive == 0
    return keeping.most


REVERSE = [name for name in NESTINGS if "grad" in name and "specialize" not in name]


@pytest.mark.parametrize("nesting", REVERSE)
def test_less_is_kept(nesting: str) -> None:
    plain, kept = most_kept(nesting, lambda f: f), most_kept(nesting, checkpoint)
    assert plain >= 20 and kept <= plain // 4, (plain, kept)


def test_programs_keep_less_too() -> None:
    def kept(made: Callable[[Any], Any]) -> int:
        keeping = Keeping()
        program = specialize(made(long))
        program(X)
        grad(lambda x: keeping.of(program)(x).sum())(X)
        return keeping.most

    assert kept(lambda f: f) >= 20 and kept(checkpoint) <= 2


BIG = torch.linspace(0, 1, 20_000).view(2, -1)
LOOPS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: grad(f)(BIG),
    "vmap(grad)": lambda f: vmap(grad(f))(BIG),
    "grad(vmap)": lambda f: grad(lambda x: vmap(f)(x).sum())(BIG),
    "a program": lambda f: specialize(grad(f))(BIG),
}


@pytest.mark.parametrize("nesting", LOOPS)
@pytest.mark.parametrize(
    ("policy", "most"),
    [(None, lambda n: 3 * n), ("sqrt", lambda n: 5 * n**0.5), ("log", lambda n: 4 * math.log2(n))],
)
def test_the_memory_of_a_loop(policy: Any, most: Callable[[int], float], nesting: str) -> None:
    """Measured at the peak, backward pass and rerun included, in numbers of carries."""

    def peak(steps: int) -> float:
        def loop(x: Tensor) -> Tensor:
            def step(carry: Any) -> Any:
                return carry[0] + 1, carry[1].sin().cos()

            start = (torch.tensor(0), x)
            end = tsfunc.while_loop(lambda c: c[0] < steps, step, start, checkpoint=policy)
            return end[1].sum()

        LOOPS[nesting](loop)
        with Meter(torch.device("cpu")) as meter:
            LOOPS[nesting](loop)
        return meter.peak / (BIG.numel() * BIG.element_size())

    for steps in (32, 128):
        found = peak(steps)
        assert found <= most(steps) + 10
        if policy is None:
            assert found >= 2 * steps


def test_modules_and_their_contents() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh()).double()
    module(X).sum().backward()
    want = [p.grad for p in module.parameters()]
    module.zero_grad()
    checkpoint(module)(X).sum().backward()
    same([p.grad for p in module.parameters()], want)


def test_random_numbers_are_drawn_again() -> None:
    def noisy(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5).exp()

    def results(made: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        return (
            grad(lambda x: made(noisy)(x).sum())(X),
            vmap(grad(lambda x: made(noisy)(x).sum()), randomness="different")(X),
            grad(lambda x: vmap(made(noisy), randomness="different")(x).sum())(X),
            torch.rand(2),
        )

    same(results(checkpoint), results(lambda f: f))


def test_arguments_and_results_of_any_kind() -> None:
    @checkpoint(policy=None)
    def f(tree: Any, *, times: int) -> Any:
        return {"out": tree["x"].sin() * times, "rest": (times, None, tree["n"].argmax())}

    def total(x: Tensor) -> Any:
        out = f({"x": x, "n": torch.arange(3)}, times=2)
        assert out["rest"][:2] == (2, None)
        return out["out"].sum() + out["rest"][2]

    same(grad(total)(X), 2 * X.cos())


def test_results_can_be_written_into() -> None:
    same(grad(lambda x: checkpoint(torch.sin)(x).mul_(2).sum())(X), 2 * X.cos())
    same(vmap(grad(lambda x: checkpoint(torch.sin)(x).mul_(2).sum()))(X), 2 * X.cos())


def test_errors() -> None:
    with pytest.raises(TypeError, match="checkpoint: policy: expected None"):
        checkpoint(torch.sin, policy="some")

    def fails(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        grad(checkpoint(fails))(X)
    same(grad(lambda x: checkpoint(torch.sin)(x).sum())(X), X.cos())


def in_new_process(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert not done.returncode, done.stderr


def test_it_can_be_the_first_transform_of_a_process() -> None:
    """The patches of torch that derivatives need are made before the function's first run."""
    in_new_process("""
import torch
from tsfunc import checkpoint, grad, jvp

def f(x):
    return jvp(grad(lambda x: (x * x.sin()).sum()), (x,), (x.cos(),))[1]

x = torch.randn(4)
assert checkpoint(f)(x).allclose(f(x))
""")


@pytest.mark.parametrize("checkpointed", ["tsfunc.checkpoint(f)(x)", "theirs(f, x)"])
def test_the_first_level_of_a_process_can_be_inside(checkpointed: str) -> None:
    """The first run saves the same tensors as the reruns of a backward pass."""
    in_new_process(f"""
import functools
import torch
import tsfunc
from torch.utils.checkpoint import checkpoint

theirs = functools.partial(checkpoint, use_reentrant=False)
p = torch.randn(4, dtype=torch.float64)

def f(x):
    inner = lambda x: tsfunc.jacrev(lambda c: torch.stack([p.sum(), (p * c).sum()]))(x).sum(0) * x
    return tsfunc.jacfwd(inner)(x)

x = torch.randn(4, dtype=torch.float64, requires_grad=True)
def gradient(y):
    return torch.autograd.grad(y.square().sum(), x)[0]

found = gradient({checkpointed})
torch.testing.assert_close(found, gradient(f(x)))
""")


def test_a_trace_in_the_first_run_saves_nothing() -> None:
    """The rerun of a specialized function does not trace, and saves what its program saves."""

    def f(x: Tensor) -> Tensor:
        matrix = torch.eye(len(x), dtype=x.dtype) + x[:, None] * x.cos() * 0.1
        return matrix.det()

    x = torch.randn(4, dtype=torch.float64)
    found = grad(lambda x: checkpoint(specialize(tsfunc.hessian(f)))(x).sum())(x)
    same(found, grad(lambda x: tsfunc.hessian(f)(x).sum())(x))


def test_a_rerun_within_the_first_run() -> None:
    """The gradient of a branch runs the function again before its other branches have run."""
    square: Callable[..., Tensor] = grad(lambda c: (c * c).sum())
    branches = [square, lambda c: c * c * 2, lambda c: c * c * 3]

    def loss(made: Callable[[Any], Any], x: Tensor) -> Tensor:
        chosen = made(lambda x: tsfunc.switch(x[0].to(torch.int64), branches, x))(x)
        return torch.as_tensor(chosen).square().sum()

    x = torch.tensor([[0.5, 2.0], [1.5, -3.0], [0.25, 1.0], [2.5, 4.0]], dtype=torch.float64)
    found = vmap(grad(lambda x: loss(checkpoint, x)))(x)
    same(found, torch.stack([grad(lambda x: loss(lambda f: f, x))(row) for row in x]))


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize(
    "function",
    {
        "index": lambda x, w: w.index_put((torch.tensor([0, 1]),), (w * x)[:2], accumulate=True),
        "view": lambda x, w: (w * x).transpose(0, 1).contiguous().view(-1),
        "solve": lambda x, w: torch.linalg.solve(w + 2 * torch.eye(3, dtype=x.dtype), w * x),
        "sort": lambda x, w: (w * x).sort(0).values.amax(1),
        "prod": lambda x, w: torch.stack([w * x, w.sin() * x]).prod(0)[1:],
    }.values(),
    ids="index view solve sort prod".split(),
)
def test_a_second_run_ends_where_torch_ends_it(
    function: Callable[[Tensor, Tensor], Tensor], chunk_size: int | None, size: int
) -> None:
    """torch raises an exception in a hook when all values are there; no call is tried again."""
    x = torch.arange(1.0, size + 1, dtype=torch.float64).sin()
    w = torch.arange(9.0, dtype=torch.float64).view(3, 3).cos()

    def loss(run: Callable[..., Any], x: Tensor, w: Tensor) -> Tensor:
        out: Tensor = run(vmap(function, (0, None), chunk_size=chunk_size))(x, w)
        return out.sin().sum()

    for argnums in (0, (0, 1)):
        want = grad(lambda x, w: loss(lambda f: f, x, w), argnums)(x, w)
        got = grad(lambda x, w: loss(checkpoint, x, w), argnums)(x, w)
        again = grad(lambda x, w: loss(checkpoint, x, w), argnums)(x, w)
        same(got, want)
        same(again, want)


def _pulled_twice(x: Tensor) -> Tensor:
    out, pull = vjp(torch.sin, x)
    _, push = vjp(lambda ct: pull(ct)[0], torch.zeros_like(out))
    return push(torch.ones_like(x))[0]


def _pushed(x: Tensor) -> Tensor:
    _, push = linearize(torch.sin, x)
    return push(torch.ones_like(x)) * push(x)


@pytest.mark.parametrize("f", [_pulled_twice, _pushed])
def test_a_pullback_runs_derivatives_in_the_function_again(f: Any) -> None:
    """The pullback of a checkpoint runs after the function's own derivatives have ended."""
    x, ct = torch.randn(2, 4, dtype=torch.float64)
    _, expected = vjp(f, x)
    _, pull = vjp(checkpoint(f), x)
    for _ in range(2):
        torch.testing.assert_close(pull(ct), expected(ct))
    torch.testing.assert_close(jacrev(checkpoint(f))(x), jacrev(f)(x))
    mapped = vmap(lambda x: vjp(checkpoint(f), x)[1](ct)[0])(x.expand(3, 4))
    torch.testing.assert_close(mapped, expected(ct)[0].expand(3, 4))


def test_a_write_into_a_view_is_differentiated_inside_of_a_checkpoint() -> None:
    """The backward pass writes into a tensor that it makes."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y[0].tanh_()
        return y.sum()

    x = torch.randn(3, 2, dtype=torch.float64)
    want = torch.stack([torch.func.grad(f)(row) for row in x])
    for transformed in (checkpoint(grad(f)), grad(lambda x: checkpoint(f)(x))):
        torch.testing.assert_close(vmap(transformed)(x), want)
        torch.testing.assert_close(tsfunc.specialize(vmap(transformed))(x), want)


@pytest.mark.parametrize("outer", [jacfwd, jacrev])
def test_a_program_runs_second_derivatives_of_a_custom_function_again(outer: Any) -> None:
    """The second run records the derivatives that the first one recorded, and no more."""

    def f(x: Tensor) -> Any:
        y = Squared.apply(x.sin(), W) * 1.5  # type: ignore[no-untyped-call]
        y[0].mul_(x.sum())
        return (y * y * x).sum()

    second = outer(jacrev(f))
    for x in X:
        torch.testing.assert_close(specialize(checkpoint(second))(x), second(x))
    expected = torch.stack([second(x) for x in X])
    torch.testing.assert_close(specialize(vmap(checkpoint(second)))(X), expected)
