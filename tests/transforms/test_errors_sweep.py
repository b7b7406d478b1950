"""Mistakes in calls of every public function: short tracebacks that end at the user's line."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tsfunc

LIBRARIES = tuple(str(Path(str(module.__file__)).parent) for module in (tsfunc, torch))
# Names that a user of torch and of this package has no way to know.
INTERNALS = re.compile(
    r"fake_mode|FakeTensor|PyTreeSpec|NoneIsLeaf|LeafSpec|\bs\d+\b|\bzuf?\d+\b|\bu\d+\b|SymNode|ShapeEnv"
    r"|proxy_tensor|functorch|TraceTracer|_C\.|lifted_\d|__torch_\w+__|_lazy"
)

api: Any = tsfunc  # mistakes in types are mistakes for mypy, too
X, W = torch.randn(5, 3), torch.randn(3, 2)
MESH = api.VirtualMesh(i=2)


def wrong(x: torch.Tensor) -> torch.Tensor:
    return (x @ torch.ones(7, 7)).sum()


def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def step(carry: Any, x: Any) -> Any:
    return carry + x.sum(), x


def layer(w: Any, x: Any) -> Any:
    return x @ w


@tsfunc.custom_vjp
def squared(x: Any) -> Any:
    return x * x


@tsfunc.custom_jvp
def cubed(x: Any) -> Any:
    return x**3


@tsfunc.custom_vmap
def doubled(x: Any) -> Any:
    return 2 * x


squared.defvjp(lambda x: (x * x, x), lambda x, ct: (ct, ct))
cubed.defjvp(lambda primals, tangents: (primals[0] ** 3, torch.ones(9)))
doubled.def_vmap(lambda *args: 3)
f = total
Call = Callable[[], Any]

# For each public function: mistakes in shapes, in_dims, numbers of arguments, names and types.
MISTAKES: dict[str, list[Call]] = {
    "Descriptors": [
        lambda: api.Descriptors(3), lambda: api.Descriptors({3: api.MetaTensorType(["n"])}),
    ],
    "Dim": [lambda: api.Dim("n", min=3, max=2), lambda: api.Dim("3n"), lambda: api.Dim()],
    "MetaTensorType": [
        lambda: api.MetaTensorType(["n+"]), lambda: api.MetaTensorType(dtype="float33"),
        lambda: api.MetaTensorType([1.5]),
    ],
    "P": [lambda: api.shard_map(f, MESH, (api.P("no"),), api.P())(X)],
    "VirtualMesh": [lambda: api.VirtualMesh(i=0), lambda: api.VirtualMesh(3)],
    "all_gather": [lambda: api.all_gather(X, "i"), lambda: api.all_gather(X)],
    "all_to_all": [
        lambda: api.all_to_all(X, "i", 0, 0),
        lambda: api.vmap(lambda x: api.all_to_all(x, "i", 0, 0), axis_name="i")(X),
    ],
    "associative_scan": [
        lambda: api.associative_scan(lambda a, b: a @ b, X),
        lambda: api.associative_scan(lambda a: a, X), lambda: api.associative_scan(f, ()),
        lambda: api.associative_scan(torch.add, (X, W)),
    ],
    "axis_index": [lambda: api.axis_index("i"), lambda: api.axis_index()],
    "axis_size": [lambda: api.axis_size("i"), lambda: api.axis_size()],
    "check": [
        lambda: api.check(X, "no"), lambda: api.check(True, "{}"),
        lambda: api.check(False, "never"),
        lambda: api.vmap(lambda x: api.check(x.sum() > 99, "small {}", x))(X),
    ],
    "checkpoint": [
        lambda: api.checkpoint(wrong)(X), lambda: api.checkpoint(f)(),
        lambda: api.checkpoint(3)(X), lambda: api.checkpoint(f, policy=3)(X),
    ],
    "closure_convert": [
        lambda: api.closure_convert(3)(X), lambda: api.closure_convert(wrong)[0](X),
    ],
    "cond": [
        lambda: api.cond(X, f, f, X), lambda: api.cond(X.sum() < 1e9, f, torch.sin, X),
        lambda: api.cond(X.sum() < 1e9, wrong, f, X), lambda: api.cond(True, f),
        lambda: api.cond(X.sum() < 1e9, 3, f, X), lambda: api.cond("yes", f, f, X),
    ],
    "custom_gradient": [
        lambda: api.grad(api.custom_gradient(lambda x: (x.sum(), lambda ct: (ct, ct))))(X),
        lambda: api.custom_gradient(3)(X),
    ],
    "custom_jvp": [
        lambda: api.jvp(cubed, (X,), (X,)), lambda: cubed(),
        lambda: api.jvp(api.custom_jvp(lambda x: x), (X,), (X,)),
        lambda: api.custom_jvp(3)(X),
    ],
    "custom_vjp": [
        lambda: api.grad(lambda x: squared(x).sum())(X), lambda: squared(),
        lambda: api.grad(api.custom_vjp(f))(X), lambda: api.custom_vjp(3)(X),
    ],
    "custom_vmap": [
        lambda: api.vmap(doubled)(X), lambda: api.vmap(api.custom_vmap(f))(X),
        lambda: api.custom_vmap(3)(X),
    ],
    "eval_shape": [
        lambda: api.eval_shape(wrong, X), lambda: api.eval_shape(f),
        lambda: api.eval_shape(3, X),
    ],
    "explain": [
        lambda: api.explain(wrong, X), lambda: api.explain(f), lambda: api.explain(3),
    ],
    "fori_loop": [
        lambda: api.fori_loop(0, 2, lambda i, x: x @ x, X),
        lambda: api.fori_loop(0, 2, lambda i, x: x.sum(), X),
        lambda: api.fori_loop(0, 2, lambda x: x, X), lambda: api.fori_loop("a", 2, f, X),
    ],
    "functional_call": [
        lambda: api.functional_call(torch.nn.Linear(3, 2), {"no": W}, (X,), strict=True),
        lambda: api.functional_call(torch.nn.Linear(3, 2), {"weight": torch.ones(2, 9)}, (X,)),
        lambda: api.functional_call(f, {}, (X,)),
    ],
    "functional_optimizer": [
        lambda: api.functional_optimizer(3),
        lambda: api.functional_optimizer(torch.optim.SGD, learning=3).init(X),
    ],
    "grad": [
        lambda: api.grad(wrong)(X), lambda: api.grad(f, argnums=3)(X),
        lambda: api.grad(torch.sin)(X), lambda: api.grad(f)(X.long()),
        lambda: api.grad(f, has_aux=True)(X), lambda: api.grad(f)(),
        lambda: api.grad(3)(X),
        lambda: api.grad(f, argnums="x")(X), lambda: api.grad(lambda x: "no")(X),
    ],
    "grad_and_value": [
        lambda: api.grad_and_value(wrong)(X), lambda: api.grad_and_value(f, argnums=3)(X),
        lambda: api.grad_and_value(f, has_aux=True)(X), lambda: api.grad_and_value(f)(),
    ],
    "hessian": [
        lambda: api.hessian(wrong)(X), lambda: api.hessian(f, argnums=2)(X),
        lambda: api.hessian(f)(), lambda: api.hessian(f)(X.long()),
    ],
    "hvp": [
        lambda: api.hvp(f, (X,), (W,)), lambda: api.hvp(wrong, (X,), (X,)),
        lambda: api.hvp(f, (X,)), lambda: api.hvp(torch.sin, (X,), (X,)),
    ],
    "implicit_root": [
        lambda: api.implicit_root(wrong, X, solver=lambda g, x: x),
        lambda: api.implicit_root(lambda x: x, X),
    ],
    "infer_descriptors": [
        lambda: api.infer_descriptors(f), lambda: api.infer_descriptors(3),
        lambda: api.infer_descriptors(f, 3),
    ],
    "jacfwd": [
        lambda: api.jacfwd(wrong)(X), lambda: api.jacfwd(f, argnums=2)(X),
        lambda: api.jacfwd(f, has_aux=True)(X), lambda: api.jacfwd(f)(),
    ],
    "jacobian_sparsity": [
        lambda: api.jacobian_sparsity(wrong)(X), lambda: api.jacobian_sparsity(f)(),
    ],
    "jacrev": [
        lambda: api.jacrev(wrong)(X), lambda: api.jacrev(f, argnums=2)(X),
        lambda: api.jacrev(f, chunk_size=0)(X), lambda: api.jacrev(f)(),
    ],
    "jvp": [
        lambda: api.jvp(wrong, (X,), (X,)), lambda: api.jvp(f, (X,), (W,)),
        lambda: api.jvp(f, X, X), lambda: api.jvp(f, (X,), (X, X)), lambda: api.jvp(f),
        lambda: api.jvp(f, (X,), (X,), has_aux=True), lambda: api.jvp(f, (), ()),
    ],
    "linear_solve": [
        lambda: api.linear_solve(lambda x: x @ W, X),
        lambda: api.linear_solve(lambda x: x, "b"), lambda: api.linear_solve(f),
    ],
    "linear_transpose": [
        lambda: api.linear_transpose(lambda x: x @ W, X)(X),
        lambda: api.linear_transpose(wrong, X), lambda: api.linear_transpose(f),
        lambda: api.linear_transpose(lambda x: x * x, X)(X),
    ],
    "linearize": [
        lambda: api.linearize(wrong, X), lambda: api.linearize(f, X)[1](W),
        lambda: api.linearize(f), lambda: api.linearize(f, X)[1](),
    ],
    "load": [lambda: api.load("/no/such/file"), lambda: api.load(__file__)],
    "make_graph": [
        lambda: api.make_graph(wrong)(X), lambda: api.make_graph(f)(),
        lambda: api.make_graph(3)(X),
    ],
    "map": [
        lambda: api.map(wrong, X), lambda: api.map(f), lambda: api.map(f, torch.ones(())),
        lambda: api.map(lambda x, y: x, (X, W)),
    ],
    "mesh_axes": [lambda: api.mesh_axes(3).__enter__(), lambda: api.mesh_axes()],
    "pmax": [lambda: api.pmax(X, "i"), lambda: api.pmax(X)],
    "pmean": [lambda: api.pmean(X, "i"), lambda: api.pmean(X)],
    "pmin": [lambda: api.pmin(X, "i"), lambda: api.pmin(X)],
    "ppermute": [
        lambda: api.ppermute(X, "i", [(0, 1)]), lambda: api.ppermute(X, "i"),
        lambda: api.vmap(lambda x: api.ppermute(x, "i", [(0, 9)]), axis_name="i")(X),
    ],
    "psum": [
        lambda: api.psum(X, "i"), lambda: api.psum(X),
        lambda: api.vmap(lambda x: api.psum(x, "j"), axis_name="i")(X),
        lambda: api.specialize(lambda x: api.psum(x, "j"))(X),
    ],
    "psum_scatter": [
        lambda: api.psum_scatter(X, "i"),
        lambda: api.vmap(lambda x: api.psum_scatter(x, "i"), axis_name="i")(X),
    ],
    "scan": [
        lambda: api.scan(step, X.sum(), 3), lambda: api.scan(lambda c, x: (x, c), X.sum(), X),
        lambda: api.scan(lambda c: c, X, X), lambda: api.scan(lambda c, x: c, X.sum(), X),
        lambda: api.scan(step, X.sum(), (X, W)), lambda: api.scan(step, X.sum()),
    ],
    "sequential_vmap": [
        lambda: api.vmap(api.sequential_vmap(wrong))(X[None]),
        lambda: api.sequential_vmap(3)(X),
    ],
    "shard_map": [
        lambda: api.shard_map(f, MESH, (api.P("i"),), api.P())(X),
        lambda: api.shard_map(f, 3, (api.P("i"),), api.P())(X),
        lambda: api.shard_map(f, MESH, (api.P("i"), api.P()), api.P())(X), lambda: api.shard_map(f),
        lambda: api.shard_map(wrong, MESH, (api.P(),), api.P())(X),
    ],
    "sparse_jacobian": [
        lambda: api.sparse_jacobian(wrong)(X), lambda: api.sparse_jacobian(f, argnums=3)(X),
        lambda: api.sparse_jacobian(f)(),
    ],
    "specialize": [
        lambda: api.specialize(wrong)(X), lambda: api.specialize(f)(),
        lambda: api.specialize(f, {"y": api.MetaTensorType(["n"])}),
        lambda: api.specialize(f, {"x": api.MetaTensorType(["n"])})(X),
        lambda: api.specialize(f, backend="none")(X), lambda: api.specialize(3),
        lambda: api.specialize(lambda x: x if x.sum() > 0 else -x)(X),
        lambda: api.specialize(lambda x: x * len(x), {"x": api.MetaTensorType(["n", 3])})(X),
        lambda: api.specialize(wrong, {"x": api.MetaTensorType(["n", "m"])})(X),
    ],
    "stack_module_state": [
        lambda: api.stack_module_state([]), lambda: api.stack_module_state(3),
        lambda: api.stack_module_state([torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)]),
        lambda: api.stack_module_state([torch.nn.Linear(3, 2), torch.nn.ReLU()]),
    ],
    "stop_gradient": [lambda: api.stop_gradient()],
    "switch": [
        lambda: api.switch(torch.tensor(0), [], X), lambda: api.switch(X, [f, f], X),
        lambda: api.switch(torch.tensor(0), [f, torch.sin], X),
        lambda: api.switch(torch.tensor(0), [wrong, f], X),
        lambda: api.switch(torch.tensor(0.5), [f, f], X),
    ],
    "value_and_grad": [
        lambda: api.value_and_grad(wrong)(X), lambda: api.value_and_grad(f, argnums=3)(X),
        lambda: api.value_and_grad(f)(X.long()), lambda: api.value_and_grad(f)(),
    ],
    "vjp": [
        lambda: api.vjp(wrong, X), lambda: api.vjp(f, X)[1](X), lambda: api.vjp(f),
        lambda: api.vjp(f, X, has_aux=True), lambda: api.vjp(f, X)[1](),
        lambda: api.vjp(3, X),
    ],
    "vmap": [
        lambda: api.vmap(wrong)(X[None]), lambda: api.vmap(torch.add)(X, W),
        lambda: api.vmap(f, in_dims=2)(X), lambda: api.vmap(f, in_dims=(0, 0))(X),
        lambda: api.vmap(f, in_dims=None)(X), lambda: api.vmap(f, in_dims="x")(X),
        lambda: api.vmap(f, out_dims=3)(X), lambda: api.vmap(f, out_dims=(0, 0))(X),
        lambda: api.vmap(f)(), lambda: api.vmap(f)(3), lambda: api.vmap(3)(X),
        lambda: api.vmap(f, chunk_size=0)(X), lambda: api.vmap(f, randomness="some")(X),
        lambda: api.vmap(torch.nn.functional.dropout)(X), lambda: api.vmap(f)(X, X),
        lambda: api.vmap(lambda x: x.item())(X[0]), lambda: api.vmap(f)(torch.ones(())),
        lambda: api.vmap(layer, (0, 0))(W, X),
    ],
    "while_loop": [
        lambda: api.while_loop(lambda x: x > 0, lambda x: x, X),
        lambda: api.while_loop(lambda x: x.sum() < 9, lambda x: x.sum(), X.abs() - 9),
        lambda: api.while_loop(lambda x: True, lambda x: x @ x, X),
        lambda: api.while_loop(lambda: True, lambda x: x, X),
    ],
}  # fmt: skip
# Classes of returned objects, and names for extensions (docs/reference/extending.md). Descriptors
# are outside of the part that folds tracebacks; a constructor and the entry of a ``with`` block
# show their frames, too.
UNFOLDED = {
    "Descriptors", "Dim", "MetaTensorType", "VirtualMesh", "infer_descriptors", "mesh_axes",
}  # fmt: skip
WITHOUT_MISTAKES = {"CallReport", "FunctionalOptimizer", "Specialized", "Tracer", "TracerLevel"}
CASES = [(name, i) for name, calls in MISTAKES.items() for i in range(len(calls))]


def test_every_public_function_is_called() -> None:
    public = {
        name
        for name in (*tsfunc.__all__, "map")
        if callable(getattr(tsfunc, name)) and not isinstance(getattr(tsfunc, name), ModuleType)
    }
    assert public - WITHOUT_MISTAKES == MISTAKES.keys()


def problems(error: BaseException, folded: bool = True) -> list[str]:
    """Return the defects of an error's text for a user."""
    text = "".join(traceback.format_exception(error))
    found = []
    if len(text.splitlines()) > 25:
        found.append(f"{len(text.splitlines())} lines")
    chain: list[BaseException] = [error]
    if error.__cause__ is not None:
        chain.append(error.__cause__)
    for each in chain:
        foreign = [
            f"{frame.filename}:{frame.lineno}"
            for frame in traceback.extract_tb(each.__traceback__)
            if frame.filename.startswith(LIBRARIES) or frame.filename.startswith("<")
        ]
        found += [f"frames of libraries: {', '.join(foreign)}"] if foreign and folded else []
    said = str(error) + "".join(getattr(error, "__notes__", ()))
    said = said.replace(__file__, "")  # a folder may have the name of a symbol
    found += [f"the name {name}" for name in sorted(set(INTERNALS.findall(said)))]
    return found


@pytest.mark.parametrize(("name", "number"), CASES)
def test_an_error_is_short_and_ends_at_the_users_line(name: str, number: int) -> None:
    call = MISTAKES[name][number]
    with pytest.raises(Exception) as caught:
        call()
    assert not problems(caught.value, name not in UNFOLDED), inspect.getsource(call)
