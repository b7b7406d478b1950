"""Recipes repeat the calls of a batching rule: NOTE [recipes] in ``bridge/tracers/recipes.py``.

The recorder is tested on rules that this file defines. The laws of repeated calls run with the
compiled handlers, which use recipes, and with the Python ones, whose results are the same.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tsfunc import grad, jvp, pytrees, vmap
from tsfunc.bridge import compiled
from tsfunc.bridge.tracers.batch_handlers import SlottedBatchTracer
from tsfunc.bridge.tracers.call_plans import FUNCTION_PLANS, CallPlan, PlanStep
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.bridge.tracers.recipes import record_recipes
from tsfunc.ops import fixed
from tsfunc.testing.precision import epsilon, rounded_otherwise, uncertainty, wide

built = pytest.mark.skipif(
    "__torch_function__" not in vars(SlottedBatchTracer),
    reason="the compiled handlers are not built: python -m tsfunc build",
)
MM = torch.ops.aten.mm.default


def recorded(rule: Any, *args: Any, dims: Any = None, overload: Any = MM) -> Any:
    plan = CallPlan(PlanStep.RULE, overload, rule, operator_of(overload))
    return record_recipes(plan, 5, dims or [0] * len(args), args, {}, False)


NOT_RECORDED: dict[str, Callable[[Tensor, Any], Any]] = {
    "item": lambda x, level: x * x.sum().item(),
    "random": lambda x, level: x + torch.rand_like(x),
    "branch": lambda x, level: x if x.sum() > 0 else -x,
    "constant": lambda x, level: x + torch.tensor([1.0, 2.0]),
    "offset": lambda x, level: x.as_strided((5, 1), (2, 1), x.storage_offset()),
    "memory": lambda x, level: x * x.untyped_storage().nbytes(),
    "version": lambda x, level: x * x._version,
    "base": lambda x, level: x if x._base is None else -x,
    "randomness": lambda x, level: x * level.randomness,
    "examples": lambda x, level: x + level.example_indices(x.device).unsqueeze(1),
    "write": lambda x, level: x.add_(1),
    "write to a view": lambda x, level: x.view(-1).add_(1),
    "places": lambda x, level: x.new_zeros((x > 0).nonzero().shape),
    "a mask": lambda x, level: x.new_zeros(x[x > 0].shape),
    "refusal": lambda x, level: NotImplemented,
    "number": lambda x, level: x.sum().item(),
}


class TestRecorder:
    def test_the_calls_of_a_rule_are_recorded_whole(self) -> None:
        def rule(op: Any, level: Any, dims: Any, args: Any, kwargs: Any) -> Any:
            return args[0].transpose(1, 2).matmul(args[1]) * level.batch_size, 0

        x, y = torch.randn(5, 2, 3), torch.randn(5, 2, 4)
        steps, results = recorded(rule, x, y)
        assert [step[1] for step in steps] == ["aten::transpose", "aten::matmul", "aten::mul"]
        (((out, dim),),) = results
        assert dim == 0
        assert out.equal(x.transpose(1, 2).matmul(y) * 5)

    def test_tensors_that_require_gradients_look_so_to_the_rule(self) -> None:
        def rule(op: Any, level: Any, dims: Any, args: Any, kwargs: Any) -> Any:
            return args[0].exp() if args[0].requires_grad else args[0].sin(), 0

        steps, _ = recorded(lambda *a: (rule(*a)[0], 0), torch.randn(5, 2, requires_grad=True))
        assert [step[1] for step in steps] == ["aten::exp"]

    @pytest.mark.parametrize("name", NOT_RECORDED)
    def test_calls_that_depend_on_more_than_metadata_are_not(self, name: str) -> None:
        def rule(op: Any, level: Any, dims: Any, args: Any, kwargs: Any) -> Any:
            made = NOT_RECORDED[name](args[0], level)
            return made if made is NotImplemented else (made, 0)

        x = torch.randn(5, 2)
        before = x.clone()
        assert recorded(rule, x) is None
        assert x.equal(before)

    def test_random_numbers_are_not_drawn_for_a_recording(self) -> None:
        def rule(op: Any, level: Any, dims: Any, args: Any, kwargs: Any) -> Any:
            return args[0] + torch.randn(5, 2), 0

        before = torch.get_rng_state()
        assert recorded(rule, torch.randn(0, 2).new_zeros(5, 2)) is None
        assert torch.get_rng_state().equal(before)


def test_a_write_is_not_recorded_for_nested_batches() -> None:
    """A plain tensor that a tracer is written to becomes a tracer."""

    def rule(op: Any, level: Any, dims: Any, args: Any, kwargs: Any) -> Any:
        return args[0].new_zeros(5, 2).copy_(args[0]), 0

    plan = CallPlan(PlanStep.RULE, MM, rule, operator_of(MM))
    assert record_recipes(plan, 5, [0], [torch.ones(5, 2)], {}, False) is not None
    assert record_recipes(plan, 5, [0], [torch.ones(5, 2)], {}, True) is None


def rows(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((2, 3), (3, 4))),
    "bmm": (torch.bmm, ((2, 3, 4), (2, 4, 3))),
    "mv": (torch.mv, ((2, 3), (3,))),
    "outer": (torch.outer, ((2,), (3,))),
    "addmm": (torch.addmm, ((4,), (2, 3), (3, 4))),
    "linear": (F.linear, ((2, 3), (4, 3), (4,))),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (3,), w, b), ((2, 3), (3,), (3,))),
    "cat": (lambda x, y: torch.cat([x, y.sin(), x], 1), ((2, 3), (2, 4))),
    "split": (lambda x: torch.stack(x.split(2, -1)).prod(0), ((3, 4),)),
    "index": (lambda x: x[1:, None, ::2] * x[0, 1], ((3, 4),)),
    "reshape": (lambda x: x.reshape(-1, 2).view(2, -1).cumsum(0), ((3, 4),)),
    "softmax": (lambda x: x.softmax(-1).log(), ((3, 4),)),
    "product": (lambda x: x @ x.mT, ((3, 4),)),
    "where": (lambda x, y: torch.where(x > 0, x, y.exp()), ((3, 4), (4,))),
}


def derived(f: Callable[..., Tensor], order: str) -> Callable[..., Any]:
    """Return the function, its gradient or its tangent."""

    def loss(*args: Tensor) -> Tensor:
        return f(*args).square().sum()

    if order == "grad":
        return grad(loss)
    if order == "tangent":
        return lambda *a: jvp(f, a, tuple(x.cos() for x in a))[1]
    return f


def gradients(of: Callable[..., Tensor], args: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of the sum of squares."""
    leaves = [x.clone().requires_grad_() for x in args]
    of(*leaves).square().sum().backward()
    return [x.grad for x in leaves]


def batched(f: Callable[..., Tensor], order: str, args: Sequence[Tensor]) -> Any:
    if order == "nested":
        return vmap(vmap(f))(*[torch.stack([x, x.sin()]) for x in args])
    if order == "grad outside":
        return gradients(vmap(f), args)
    return vmap(derived(f, order))(*args)


def looped(f: Callable[..., Tensor], order: str, args: Sequence[Tensor]) -> Any:
    """Return the same as ``batched`` by a loop."""

    def loop(*args: Tensor) -> Tensor:
        g = derived(f, order)
        return torch.stack([g(*each) for each in zip(*args, strict=True)])

    if order == "nested":
        return torch.stack([loop(*args), loop(*[x.sin() for x in args])])
    return gradients(loop, args) if order == "grad outside" else loop(*args)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("order", ["value", "grad", "grad outside", "tangent", "nested"])
def test_repeated_calls_agree_with_the_loop(name: str, order: str) -> None:
    """The calls of one plan have changing sizes, strides, dtypes and batch dims.

    See NOTE [laws in narrow dtypes] for results in float32.
    """
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    f, shapes = FUNCTIONS[name]
    for size, dtype in itertools.product((4, 3), (torch.float64, torch.float32)):
        for _ in range(4):  # planned, seen, recorded, repeated
            args = [torch.randn(size, *shape).to(dtype) for shape in shapes]
            if rng.random() < 0.5:
                args[0] = args[0].transpose(0, -1).contiguous().transpose(0, -1)
            found, exact = batched(f, order, args), wide(args)
            expected = looped(f, order, exact)
            assert {x.dtype for x in pytrees.leaves_of(found)} == {dtype}
            if dtype is torch.float64:
                torch.testing.assert_close(found, expected)
                continue
            eps = epsilon(args)
            others = looped(f, order, rounded_otherwise(exact, eps))
            atol = uncertainty(others, expected, eps)
            torch.testing.assert_close(wide(found), expected, rtol=0, atol=atol)


def set_items(z: Tensor, index: Any, x: Tensor, y: Any) -> Tensor:
    z[1] = x
    z[index] = y
    z[:, 1:] += x[0]
    return z


STEPS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "sin": lambda x, w, n: x.sin(),
    "number": lambda x, w, n: x * 0.5 + n,
    "product": lambda x, w, n: x @ w,
    "linear": lambda x, w, n: F.linear(x, w),
    "sum": lambda x, w, n: x - x.sum(n - 1, keepdim=True),
    "mean": lambda x, w, n: x - x.mean(),
    "softmax": lambda x, w, n: F.softmax(x, dim=n - 1),
    "norm": lambda x, w, n: F.layer_norm(x, x.shape[-1:]),
    "cat": lambda x, w, n: torch.cat([x, x.cos()], 0)[n : n + x.shape[0]],
    "stack": lambda x, w, n: torch.stack([x, w[: x.shape[0]]], n).sum(n),
    "split": lambda x, w, n: torch.cat(x.split(2, -1)[::-1], -1),
    "view": lambda x, w, n: x.reshape(-1).roll(n).view(x.shape),
    "transpose": lambda x, w, n: x.mT.contiguous().mT * x,
    "index": lambda x, w, n: x + x[0, None, n],
    "where": lambda x, w, n: torch.where(x > 0, x, w[0]),
    "fill": lambda x, w, n: x.masked_fill(w[0] > 0, 0.5),
    "write": lambda x, w, n: x.clone().mul_(2.0).add_(w[0]),
    "copy": lambda x, w, n: torch.zeros_like(w).copy_(x).clamp_(-1.0, n / 2),
    "item": lambda x, w, n: set_items(x.sin(), n, x[n], w[0]),
    "item of a plain tensor": lambda x, w, n: set_items(torch.zeros_like(w), n, x[n], 0.5),
    "positions": lambda x, w, n: x.clone().index_put_((torch.tensor([n, 3]),), x[1:3] * n),
    "assigned positions": lambda x, w, n: set_items(x * 1, torch.tensor([3, n]), x[n], w[:2]),
    "assigned mask": lambda x, w, n: set_items(x * 1, torch.arange(4) > n, x[n], 0.5),
    "scatter": lambda x, w, n: x.clone().scatter_(0, torch.tensor([[n, 1, 0, 2]]), w),
    "fill in place": lambda x, w, n: x.sin().index_fill_(0, x[:, 0].argmax(), 0.5),
    "gather": lambda x, w, n: x.gather(1, x.argsort(1)),
    "einsum": lambda x, w, n: torch.einsum("ij,jk->ik", x, w),
    "clamp": lambda x, w, n: x.clamp(-1.0, n / 2),
    "detach": lambda x, w, n: x * torch.detach(x.cos()) + x.detach()[0],
    "default": lambda x, w, n: x.tril(n) + x.cumsum(n).triu(),
    "keywords": lambda x, w, n: x - x.mean(dim=n, keepdim=True) * x.std(n, correction=n),
    "several": lambda x, w, n: x - x.max(n, keepdim=True).values + torch.cummin(x, n)[0],
    "list": lambda x, w, n: x + torch.cat(x.unbind(n)).view(4, 4) + x.diagonal(n).norm(),
    "cast": lambda x, w, n: x.to(torch.float64).double().to(x.dtype) * x.float()[n],
    "pad": lambda x, w, n: F.pad(x, (n, 1), value=0.5)[:, n : n + 4],
    "dropout": lambda x, w, n: F.dropout(x.sin(), 0.5, False),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Decomposing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            out = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if out is NotImplemented else out


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "plain": nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "double": lambda: default_dtype(torch.float64),
    "deterministic": lambda: deterministic(),
    "flops": lambda: FlopCounterMode(display=False),
    "dispatch mode": Passing,
    "decomposing mode": Decomposing,
    "function mode": Functions,
    "saved tensors": torch.autograd.graph.save_on_cpu,
}

TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "value": lambda f: vmap(f, (0, None)),
    "weights too": lambda f: vmap(f),
    "grad": lambda f: vmap(grad(lambda x, w: f(x, w).sum()), (0, None)),
    "both gradients": lambda f: vmap(grad(lambda x, w: f(x, w).sum(), (0, 1))),
    "grad outside": lambda f: grad(lambda x, w: vmap(f, (0, None))(x, w).sum()),
    "tangent": lambda f: vmap(lambda x, w: jvp(lambda y: f(y, w), (x,), (x.cos(),))[1]),
    "nested": lambda f: lambda x, w: vmap(vmap(f, (0, None)), (None, 0))(x, w),
    "second": lambda f: vmap(grad(lambda x, w: grad(lambda y: f(y, w).sum())(x).square().sum())),
}


def outcome(f: Callable[..., Any], args: list[Tensor], mode: str) -> Any:
    """Return the results of a call and the gradients of its arguments, or its error."""
    given = [x.detach().requires_grad_(x.requires_grad) for x in args]
    try:
        with MODES[mode]():
            out = f(*given)
        results = [out] if isinstance(out, Tensor) else list(out)
        total = sum(x.sum() for x in results if x.requires_grad)
        if isinstance(total, Tensor):
            total.backward()
        return [*results, *(x.grad for x in given if x.grad is not None)]
    except RuntimeError as error:
        return type(error), str(error)


@built
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_compiled_handlers_agree_with_the_python_ones(transform: str) -> None:
    """Random programs are called repeatedly, with other metadata and in other modes."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(6):
        names = rng.choices(list(STEPS), k=4)
        number = rng.randrange(2)

        def program(x: Tensor, w: Tensor, names: list[str] = names, n: int = number) -> Tensor:
            for name in names:
                x = STEPS[name](x, w, n + 1 if name in ("sum", "softmax") else n)
            return x

        f = TRANSFORMS[transform](program)
        for _ in range(8):
            size, dtype = rng.choice((2, 3)), rng.choice((torch.float32, torch.float64))
            args = []
            for _ in range(2):
                x = torch.randn(size, 4, 4).to(dtype)
                if rng.random() < 0.4:
                    x = x.transpose(0, -1).contiguous().transpose(0, -1)
                if rng.random() < 0.2:
                    x = x[:1].expand(size, 4, 4)
                args.append(x.requires_grad_(rng.random() < 0.3))
            if transform in ("value", "grad", "grad outside"):
                args[1] = args[1].detach()[0].requires_grad_(args[1].requires_grad)
            mode = rng.choice(["plain", "plain", *MODES])
            for _ in range(rng.choice((1, 4, 6))):  # planned, seen, recorded, repeated
                found = outcome(f, args, mode)
            with compiled.pause_handlers():
                expected = outcome(f, args, mode)
            print(names, number, mode, [(tuple(x.shape), x.stride(), x.dtype) for x in args])
            if isinstance(expected, tuple):
                assert found == expected
                continue
            assert len(found) == len(expected)
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs, equal_nan=True, check_stride=True)
                assert mine.requires_grad == theirs.requires_grad
                assert mine.is_inference() == theirs.is_inference()


@contextmanager
def counting(*functions: Any) -> Iterator[list[str]]:
    """Context manager: count the calls of Python functions."""
    codes = {function.__code__ for function in functions}
    calls: list[str] = []

    def see(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code in codes:
            calls.append(frame.f_code.co_name)

    sys.setprofile(see)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@built
def test_the_plan_of_a_function_keeps_the_recipes_of_its_operator() -> None:
    FUNCTION_PLANS.pop(torch.trace, None)
    operator_of(torch.ops.aten.trace.default).plans = None
    f, x = vmap(torch.trace), torch.randn(5, 3, 3)
    for _ in range(5):
        found = f(x)
    kept = FUNCTION_PLANS[torch.trace]
    assert kept is not None
    assert [plan.recipes is not None for plan in kept.plans.values()] == [True]
    torch.testing.assert_close(found, x.diagonal(0, 1, 2).sum(-1))


@built
def test_the_rule_runs_for_new_metadata_only() -> None:
    f = vmap(grad(lambda w, x: (w.mm(x)).sin().sum()), (None, 0))
    for size in (7, 11):
        w, x = torch.randn(2, size), torch.randn(6, size, 5)
        ran = []
        for _ in range(5):  # the plan is made, the metadata are seen, the calls are recorded
            with counting(fixed.logical_matmul) as calls:
                f(w, x)
            ran.append(bool(calls))
        assert ran[0]
        assert ran[3:] == [False, False]


OFFSETS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "view": lambda x, y: x.as_strided((2,), (1,)),
    "copy": lambda x, y: torch.as_strided_copy(x, (2,), (1,)),
    "scatter": lambda x, y: torch.as_strided_scatter(x, y, (2,), (1,)),
    "gradient": lambda x, y: grad(
        lambda a: torch.as_strided_scatter(a, y, (2,), (1,)).square().sum()
    )(x),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_views_of_one_layout_at_different_offsets(name: str) -> None:
    """The offset into memory is not part of a recipe's metadata."""
    f = OFFSETS[name]
    whole, y = rows((40,), (3, 2))
    for offset in (0, 0, 0, 4, 8, 5, 0):
        x = whole[offset : offset + 12].view(3, 4)
        expected = torch.stack([f(x[i].clone(), y[i]) for i in range(3)])
        torch.testing.assert_close(vmap(f)(x, y), expected)


@built
def test_a_plan_has_recipes_of_its_last_calls() -> None:
    """A full table of recipes is cleared."""
    f = vmap(lambda x, alpha: torch.addmm(x, x, x, alpha=alpha), (0, None))
    x = torch.randn(4, 3, 3)
    for i in range(600):
        f(x, i / 7)
    for alpha in (0.5, 0.25):
        for _ in range(3):
            f(x, alpha)
        with counting(fixed.addmm) as calls:
            found = f(x, alpha)
        assert not calls
        torch.testing.assert_close(found, x + alpha * (x @ x))


def test_running_statistics_are_updated_once_by_each_call() -> None:
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    mean, var = torch.zeros(4, 3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
    expected = [mean.clone(), var.clone()]

    def loss(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, training=True).square().sum()

    for _ in range(4):
        vmap(grad(loss))(x, mean, var)
        for i in range(4):
            F.batch_norm(x[i], expected[0][i], expected[1][i], training=True)
        assert torch.allclose(mean, expected[0])
        assert torch.allclose(var, expected[1])


@built
def test_numbers_are_part_of_the_recipe() -> None:
    """C++ makes a tensor of a number before the rule sees it; another number needs other calls."""
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    for number in (1.0, 2.0, 1.0, 2.0, 1.0, 2.0, -0.0, 0.0):

        def loss(a: Tensor, b: Tensor, number: float = number) -> Tensor:
            return torch.lerp(a, b, number).sum() + a.clamp(number).sum()

        found = vmap(grad(loss))(x, y)
        expected = torch.func.vmap(torch.func.grad(loss))(x, y)
        assert torch.allclose(found, expected)


def test_one_tensor_in_two_places_is_not_two() -> None:
    x, y = rows((4, 3, 3), (4, 3, 3))
    f = vmap(grad(lambda a, b: a.mm(b).sum()))
    for first, second in ((x, x), (x, x), (x, x), (x, y), (y, x)):
        expected = torch.func.vmap(torch.func.grad(lambda a, b: a.mm(b).sum()))(first, second)
        assert torch.allclose(f(first, second), expected)
