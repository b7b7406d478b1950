"""torch.compile of functions that call tsfunc: right results; one graph if torch.func has one."""

from __future__ import annotations

import functools
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tests.transforms.support import same
from tsfunc.pytrees import leaves_of

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="torch.compile needs gcc")

X = torch.arange(12.0).view(3, 4).sin()
W = torch.arange(4.0).cos()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of Dynamo and Inductor
        yield
    torch._dynamo.reset()


def scalar(x: Tensor) -> Tensor:
    return (x.sin() ** 2).sum()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return g * 2


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "vmap": (lambda x, w: tsfunc.vmap(torch.dot, in_dims=(0, None))(x * 2, w) + 1, (X, W)),
    "grad": (lambda x: tsfunc.grad(scalar)(x + 1) * 3, (X,)),
    "vmap(grad)": (lambda x: tsfunc.vmap(tsfunc.grad(scalar))(x + 1) * 3, (X,)),
    "jvp": (lambda x: tsfunc.jvp(torch.sin, (x,), (x,))[1] * 3, (X,)),
    "hessian": (lambda x: tsfunc.hessian(scalar)(x).sum(0) + x, (W,)),
    "autograd.Function": (lambda x: Scaled.apply(x + 1).sum(), (X,)),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_around_a_transform(name: str) -> None:
    """Dynamo traces as far as it can, without generating code."""
    func, args = FUNCTIONS[name]
    compiled = torch.compile(func, backend="eager")
    for _ in range(2):
        same(compiled(*args), func(*args))


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_around_a_transform_with_inductor(name: str) -> None:
    func, args = FUNCTIONS[name]
    compiled = torch.compile(func)
    for _ in range(2):
        same(compiled(*args), func(*args), rtol=1e-4, atol=1e-5)


def test_a_compiled_transform() -> None:
    compiled = torch.compile(tsfunc.vmap(tsfunc.grad(scalar)), backend="eager")
    same(compiled(X), tsfunc.vmap(tsfunc.grad(scalar))(X))


WEIGHT = torch.nn.Parameter(torch.ones(4))
SPECIALIZED: dict[str, Callable[..., Tensor]] = {
    "a function": tsfunc.specialize(lambda x: (x * WEIGHT).sin()),
    "a module": tsfunc.specialize(torch.nn.Linear(4, 4)),
    "with descriptors": tsfunc.specialize(
        lambda x: x.sin(), {"x": tsfunc.MetaTensorType(["n", 4], dtype=torch.float32)}
    ),
    "of a transform": tsfunc.specialize(tsfunc.vmap(tsfunc.grad(lambda x: (x * WEIGHT).sum()))),
}


@pytest.mark.parametrize("name", SPECIALIZED)
def test_a_specialized_function_inside(name: str) -> None:
    """It is part of one graph, without a warning."""
    inner = SPECIALIZED[name]
    compiled = torch.compile(lambda x: inner(x * 2) + 1, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Dynamo's own warning, about tensors that it passes on at graph breaks.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        for n in (3, 3, 5):
            x = torch.randn(n, 4, requires_grad=True)
            got, want = compiled(x), inner(x * 2) + 1
            same(got, want)
            (grad,) = torch.autograd.grad(got.sum(), x, allow_unused=True)
            (expected,) = torch.autograd.grad(want.sum(), x, allow_unused=True)
            assert (grad is None) == (expected is None)
            if grad is not None:
                same(grad, expected)


def test_a_function_that_is_specialized_inside() -> None:
    """Dynamo traces the function itself, as if it were specialized outside."""
    compiled = torch.compile(
        lambda x: tsfunc.specialize(lambda x: x.sin(), hoist=True)(x * 2) + 1,
        backend="eager", fullgraph=True,
    )  # fmt: skip
    same(compiled(X), (X * 2).sin() + 1)


def test_an_error_passes_code_that_dynamo_has_made() -> None:
    """The code's constants may be dicts, so that it has no hash."""
    namespace = {"tsfunc": tsfunc, "torch": torch}
    exec("def call(x):\n    return tsfunc.vmap(torch.sin)(x) + 0", namespace)
    call: Any = namespace["call"]
    call.__code__ = call.__code__.replace(co_consts=(*call.__code__.co_consts, {}))
    with pytest.raises(ValueError, match="in_dim=0"):
        call(torch.ones(()))


def test_gradients_reach_tensors_closed_over_by_a_specialized_function() -> None:
    compiled = torch.compile(lambda x: SPECIALIZED["a function"](x).sum(), backend="aot_eager")
    compiled(torch.zeros(2, 4)).backward()
    assert WEIGHT.grad is not None
    WEIGHT.grad = None


def test_descriptors_hold_inside_too() -> None:
    compiled = torch.compile(lambda x: SPECIALIZED["with descriptors"](x), backend="eager")
    with pytest.raises(Exception, match=r"shape\[1\]"):
        compiled(torch.ones(3, 5))


def test_frozen_values_stay_frozen_inside() -> None:
    scale = 2.0
    frozen = tsfunc.specialize(lambda x: x * scale, closure="freeze")
    frozen(X)
    scale = 5.0
    compiled = torch.compile(lambda x: frozen(x) + 1, backend="eager")
    same(compiled(X), X * 2 + 1)


def test_a_compiled_specialized_function() -> None:
    inner = SPECIALIZED["a function"]
    same(torch.compile(inner, backend="eager")(X), inner(X))


def product(w: Tensor, x: Tensor) -> Tensor:
    return (torch.tanh(x * w) * x).sum()


MODULE = torch.nn.Linear(4, 3)
PARAMETERS = {name: p.detach().clone() for name, p in MODULE.named_parameters()}
PER_EXAMPLE = tsfunc.vmap(tsfunc.grad(product), in_dims=(None, 0))
ROWS = tsfunc.jacrev(torch.sin, chunk_size=2)
BOTH = tsfunc.value_and_grad(product)


@functools.wraps(PER_EXAMPLE)
def doubled(w: Tensor, x: Tensor) -> Tensor:
    gradients: Tensor = PER_EXAMPLE(w, x)
    return 2 * gradients


def module_loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    out: Tensor = tsfunc.functional_call(MODULE, parameters, (x,))
    return out.square().sum()


# Calls of W and X that torch.func supports, too.
IN_ONE_GRAPH: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "vmap": lambda w, x: tsfunc.vmap(torch.dot, (None, 0), chunk_size=2)(w, x),
    "vmap of a negative dim": lambda w, x: tsfunc.vmap(torch.sin, in_dims=-1, out_dims=1)(x),
    "vmap(grad)": lambda w, x: tsfunc.vmap(tsfunc.grad(product), (None, 0))(w, x),
    "grad(vmap)": lambda w, x: tsfunc.grad(lambda w: PER_EXAMPLE(w, x).sum())(w),
    "made outside": lambda w, x: PER_EXAMPLE(w, x),
    "compiled itself": PER_EXAMPLE,
    "wrapped by the user": doubled,
    "grad_and_value": lambda w, x: tsfunc.grad_and_value(product, argnums=(0, 1))(w, x),
    "value_and_grad": lambda w, x: tsfunc.value_and_grad(product)(w, x),
    "value_and_grad made outside": lambda w, x: BOTH(w, x),
    "jvp": lambda w, x: tsfunc.jvp(torch.sin, (x,), (x.cos(),)),
    "vjp": lambda w, x: tsfunc.vjp(torch.sin, x)[1](x),
    "linearize": lambda w, x: tsfunc.linearize(torch.sin, x)[1](x),
    "jacrev": lambda w, x: tsfunc.jacrev(torch.sin)(w),
    "jacrev made outside": lambda w, x: ROWS(w),
    "jacfwd": lambda w, x: tsfunc.jacfwd(torch.sin)(w),
    "hessian": lambda w, x: tsfunc.hessian(scalar)(w),
    "hvp": lambda w, x: tsfunc.hvp(scalar, (w,), (w.cos(),)),
    "hvp by several arguments": lambda w, x: tsfunc.hvp(
        lambda a, b: (a * b.sin()).sum(), (x, x + 1), (x.cos(), x)
    ),
    "vmap(hvp)": lambda w, x: tsfunc.vmap(lambda e: tsfunc.hvp(scalar, (e,), (e,)))(x),
    "functional_call": lambda w, x: tsfunc.vmap(tsfunc.grad(module_loss), (None, 0))(PARAMETERS, x),
}


@pytest.mark.parametrize("name", IN_ONE_GRAPH)
def test_transforms_of_torch_func_do_not_break_the_graph(name: str) -> None:
    func = IN_ONE_GRAPH[name]
    same(torch.compile(func, backend="eager", fullgraph=True)(W, X), func(W, X))


def block(x: Tensor, scale: float = 1.0) -> Tensor:
    return (x @ W).sin().exp() * scale


def keeps_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return bool(op is torch.ops.aten.mv.default)


POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "everything": {"policy": tsfunc.checkpoint_policies.everything_saveable},
    "operators": {"policy": [torch.ops.aten.mv.default]},
    "function": {"policy": keeps_products, "preserve_rng_state": False},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoints_do_not_break_the_graph(policy: str) -> None:
    checkpoint: Any = tsfunc.checkpoint
    made_outside = checkpoint(block, **POLICIES[policy])
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda x: checkpoint(block, **POLICIES[policy])(x, scale=2.0),
        lambda x: checkpoint(**POLICIES[policy])(block)(x, scale=2.0),
        lambda x: made_outside(x, scale=2.0),
    ]
    (expected,) = torch.autograd.grad(block(x := X.clone().requires_grad_(), 2.0).sum(), x)
    for f in ways:
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
        x = X.clone().requires_grad_()
        compiled(x).sum().backward()
        same(x.grad, expected)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_checkpoints_inside_of_transforms(fullgraph: bool) -> None:
    """torch.func's transforms, which the graph has, do not take torch's checkpoints."""
    inner = tsfunc.checkpoint(block)
    for f in (
        tsfunc.grad(lambda x: inner(x).sum()),
        tsfunc.vmap(tsfunc.grad(inner)),
        tsfunc.vmap(tsfunc.checkpoint(lambda x: tsfunc.grad(inner)(x) * 2)),
        lambda x: tsfunc.jvp(inner, (x,), (x,))[1],
    ):
        same(torch.compile(f, backend="aot_eager", fullgraph=fullgraph)(X), f(X))


NAMED = tsfunc.vmap(lambda w, x: w * x, in_dims={"x": 0})
CONTRACT = {"x": tsfunc.MetaTensorType(["n", 4])}


def squares() -> dict[str, Any]:
    by_vjp = tsfunc.custom_vjp(lambda x: x * x)
    by_vjp.defvjp(lambda x: (x * x, x), lambda x, ct: (2 * x * ct,))
    by_jvp = tsfunc.custom_jvp(lambda x: x * x)
    by_jvp.defjvp(lambda primals, tangents: (primals[0] ** 2, 2 * primals[0] * tangents[0]))
    by_vmap = tsfunc.custom_vmap(lambda x: x * x)
    by_vmap.def_vmap(lambda size, batched, x: (x * x, batched[0]))
    return {"custom_vjp": by_vjp, "custom_jvp": by_jvp, "custom_vmap": by_vmap}


SQUARES = squares()
# Calls with arguments, and of transforms, that torch.func does not have.
BREAKING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "in_dims by name": lambda w, x: tsfunc.vmap(lambda w, x: w * x, in_dims={"x": 0})(w, x=x) + 1,
    "made outside": lambda w, x: NAMED(w, x) + 1,
    "strict": lambda w, x: tsfunc.vmap(torch.sin, strict=True)(x) + 1,
    "randomness": lambda w, x: tsfunc.vmap(torch.sin, randomness="split")(x) + 1,
    "axis_name": lambda w, x: tsfunc.vmap(lambda x: tsfunc.psum(x, "i"), axis_name="i")(x) + 1,
    "memory_budget": lambda w, x: tsfunc.jacrev(torch.sin, memory_budget=2**20)(w) + 1,
    "custom_vjp": lambda w, x: SQUARES["custom_vjp"](x) + 1,
    "custom_jvp": lambda w, x: SQUARES["custom_jvp"](x) + 1,
    "custom_vmap": lambda w, x: SQUARES["custom_vmap"](x) + 1,
    "explain": lambda w, x: [tsfunc.explain(torch.sin, x), x + 1][1],
    "specialize with descriptors": lambda w, x: tsfunc.specialize(scalar, CONTRACT)(x) + 1,
    "specialize as a decorator": lambda w, x: tsfunc.specialize(CONTRACT)(scalar)(x) + 1,
}


@pytest.mark.parametrize("name", BREAKING)
def test_other_transforms_break_the_graph(name: str) -> None:
    func = BREAKING[name]
    same(torch.compile(func, backend="eager")(W, X), func(W, X))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"inside of tsfunc's transforms.*graph_module"):
        torch.compile(func, backend="eager", fullgraph=True)(W, X)


# Functions that torch.func does not have, with their arguments.
COMPILED: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Tensor, ...]]]] = {
    "vmap": lambda: (tsfunc.vmap(torch.sin, randomness="split"), (X,)),
    "in_dims by name": lambda: (NAMED, (W, X)),
    "sparse_jacobian": lambda: (tsfunc.sparse_jacobian(torch.sin), (W,)),
    "pullback": lambda: (tsfunc.vjp(torch.sin, X)[1], (X,)),
    "pushforward": lambda: (tsfunc.linearize(torch.sin, X)[1], (X,)),
    "linear_transpose": lambda: (tsfunc.linear_transpose(lambda x: 2 * x, X), (X,)),
    "custom_vjp": lambda: (SQUARES["custom_vjp"], (X,)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_other_transforms_compiled_directly(name: str) -> None:
    func, args = COMPILED[name]()
    for got in (
        torch.compile(func, backend="eager")(*args),
        torch.compiler.disable(func)(*args),
    ):
        for each, want in zip(leaves_of(got), leaves_of(func(*args)), strict=True):
            same(each.to_dense(), want.to_dense())
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"inside of tsfunc's transforms.*graph_module"):
        torch.compile(func, backend="eager", fullgraph=True)(*args)


def test_functions_of_a_transform_share_one_compilation() -> None:
    torch._dynamo.utils.counters.clear()
    for shift in range(torch._dynamo.config.recompile_limit + 1):
        mapped = tsfunc.vmap(lambda x, shift=shift: x + shift, strict=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            same(torch.compile(mapped, backend="eager")(X), X + shift)
    assert torch._dynamo.utils.counters["frames"]["total"] == 1


def test_one_graph_of_the_operators_below_transforms() -> None:
    """The remedy that the refusal names."""
    inner = SPECIALIZED["of a transform"]
    inner(X)
    compiled = torch.compile(inner.graph_module, backend="aot_eager", fullgraph=True)  # type: ignore[attr-defined]
    same(compiled(X)[0], inner(X))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "vmap": lambda f: tsfunc.vmap(f)(X),
    "grad": lambda f: tsfunc.grad(f)(X),
    "jvp": lambda f: tsfunc.jvp(f, (X,), (X,)),
    "vmap(grad)": lambda f: tsfunc.vmap(tsfunc.grad(f))(X),
    "grad(grad)": lambda f: tsfunc.grad(lambda x: tsfunc.grad(f)(x).sum())(X),
    "hessian": lambda f: tsfunc.hessian(f)(X[0]),
    "specialize": lambda f: tsfunc.specialize(f, {"x": tsfunc.MetaTensorType(["n", 4])})(X),
    "specialize(vmap(grad))": lambda f: tsfunc.specialize(tsfunc.vmap(tsfunc.grad(f)))(X),
    "a body of map": lambda f: tsfunc.map(f, X),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_function_inside(name: str, fullgraph: bool) -> None:
    """Its Python runs on tracers, without a warning."""
    compiled = torch.compile(scalar, backend="aot_eager", fullgraph=fullgraph)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = TRANSFORMS[name](compiled)
    for each, want in zip(leaves_of(got), leaves_of(TRANSFORMS[name](scalar)), strict=True):
        same(each, want)
    same(compiled(X), scalar(X))


def test_a_compiled_function_is_compiled_outside() -> None:
    graphs = []

    def backend(module: torch.fx.GraphModule, examples: object) -> torch.fx.GraphModule:
        graphs.append(module)
        return module

    compiled = torch.compile(scalar, backend=backend)
    tsfunc.vmap(compiled)(X)
    assert not graphs
    compiled(X)
    assert len(graphs) == 1


def test_a_compiled_module_inside() -> None:
    layer = torch.nn.Linear(4, 2)
    compiled = torch.compile(layer, backend="eager")
    same(tsfunc.vmap(compiled)(X), layer(X))
    same(tsfunc.specialize(compiled)(X), layer(X))
