"""An interpreter of towers of transforms that shares no code with tsfunc.

``vmap`` is a loop over the examples and a stack, derivatives are ``torch.autograd.grad`` with
``create_graph=True`` (forward mode by differentiating the pullback, which is linear), control flow
is Python's, and ``specialize`` and ``checkpoint`` return their function. Names and signatures are
those of tsfunc, so the same source runs with either module.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.func
from torch.utils import _pytree as pytree

from tools.fuzz import work

Function = Callable[..., Any]


class MetaTensorType:
    """Stands for a descriptor, which the reference ignores."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def _is_dim(value: Any) -> bool:
    return value is None or isinstance(value, int)


def _broadcast(prefix: Any, tree: Any) -> list[Any]:
    """Return the entry of ``prefix`` for each leaf of ``tree``."""
    if _is_dim(prefix):
        return [prefix] * len(pytree.tree_leaves(tree))
    if dataclasses.is_dataclass(tree):
        prefix, tree = vars(prefix), vars(tree)
    if isinstance(tree, Mapping):
        return [dim for name in tree for dim in _broadcast(prefix[name], tree[name])]
    return [dim for part, sub in zip(prefix, tree, strict=True) for dim in _broadcast(part, sub)]


def _dims_of_call(func: Function, in_dims: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the mapped dim of each leaf of ``(args, kwargs)``."""
    if isinstance(in_dims, dict):
        names = list(inspect.signature(func).parameters)
        by_position = [in_dims.get(name) for name in names[: len(args)]]
        by_keyword = {name: in_dims.get(name) for name in kwargs}
        return _broadcast(by_position, args) + _broadcast(by_keyword, kwargs)
    unmapped = [None] * len(pytree.tree_leaves(kwargs))
    return _broadcast(in_dims, args) + unmapped


def vmap(
    func: Function,
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str = "error",
    *,
    axis_size: int | None = None,
    axis_name: str | None = None,
    **_: Any,
) -> Function:
    """Return the loop over the examples, stacked.

    A named axis repeats the loop for each exchange: a run stops at an exchange that lacks the
    values of the other examples, and the next run has them.
    """

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        dims = _dims_of_call(func, in_dims, args, kwargs)
        sizes = {x.shape[d] for x, d in zip(leaves, dims, strict=True) if d is not None}
        (count,) = sizes or {axis_size}
        state = torch.get_rng_state()

        def example(i: int) -> Any:
            work.check()
            if randomness == "same":
                torch.set_rng_state(state)
            parts = [
                x if d is None else (x.select(d, i) if count else _made_up(x, d))
                for x, d in zip(leaves, dims, strict=True)
            ]
            own_args, own_kwargs = pytree.tree_unflatten(parts, spec)
            return func(*own_args, **own_kwargs)

        outputs = _exchanging(axis_name, example, count or 1)
        flat = [pytree.tree_leaves(output) for output in outputs]
        out_spec = pytree.tree_structure(outputs[0])
        stacked = [
            _stacked([leaves[k] for leaves in flat], dim, count)
            for k, dim in enumerate(_broadcast(out_dims, outputs[0]))
        ]
        return pytree.tree_unflatten(stacked, out_spec)

    return mapped


class _Exchange(Exception):
    """Ends the run of one example at an exchange, with the value of the example."""


class _Axis:
    """A named axis during the run of one example."""

    def __init__(self, index: int, count: int, known: Sequence[Sequence[Any]]) -> None:
        self.index, self.count, self.known = index, count, iter(known)

    def exchange(self, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the values of all examples."""
        for values in self.known:
            return values
        raise _Exchange(value)


_axes: dict[str, list[_Axis]] = {}


def _exchanging(name: str | None, example: Function, count: int) -> list[Any]:
    """Return the results of all examples, which may exchange values on a named axis."""
    if name is None:
        return [example(i) for i in range(count)]
    known: list[list[Any]] = []
    stack = _axes.setdefault(name, [])
    while True:
        outputs: list[Any] = []
        given: list[Any] = []
        for i in range(count):
            stack.append(_Axis(i, count, known))
            try:
                outputs.append(example(i))
            except _Exchange as exchange:
                given += exchange.args
            finally:
                stack.pop()
        if not given:
            return outputs
        known.append(given)


def psum(x: torch.Tensor, axis_name: str) -> torch.Tensor:
    """Add the values of all examples."""
    return torch.stack([*_axes[axis_name][-1].exchange(x)]).sum(0)


def pmean(x: torch.Tensor, axis_name: str) -> torch.Tensor:
    """Return the mean of all examples."""
    return psum(x, axis_name) / _axes[axis_name][-1].count


def all_gather(x: torch.Tensor, axis_name: str, *, axis: int = 0) -> torch.Tensor:
    """Stack the values of all examples."""
    return torch.stack([*_axes[axis_name][-1].exchange(x)], axis)


def axis_size(axis_name: str) -> int:
    """Return the number of examples."""
    return _axes[axis_name][-1].count


def axis_index(axis_name: str) -> torch.Tensor:
    """Return the number of the example."""
    return torch.tensor(_axes[axis_name][-1].index)


def _made_up(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return an example for a batch of no examples."""
    shape = list(x.shape)
    del shape[dim]
    return torch.ones(shape, dtype=x.dtype)


def _stacked(values: Sequence[Any], dim: int | None, count: int | None) -> Any:
    if dim is None or not isinstance(values[0], torch.Tensor):
        return values[0]
    whole = torch.stack([value.resolve_conj() for value in values], dim)
    return whole if count else whole.narrow(dim, 0, 0)


def _inputs(tree: Any) -> tuple[list[torch.Tensor], Any, Any]:
    """Return copies of the inputs to differentiate by, and their tree."""
    leaves, spec = pytree.tree_flatten(tree)
    fresh = [
        x.view_as(x) if x.requires_grad else x.detach().clone().requires_grad_() for x in leaves
    ]
    return fresh, spec, pytree.tree_unflatten(fresh, spec)


def _pull(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], cotangents: Sequence[Any]
) -> list[torch.Tensor]:
    """Return the product of cotangents with the Jacobian, differentiable again."""
    work.check()
    pairs = [(out, ct) for out, ct in zip(outputs, cotangents, strict=True) if out.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    with torch.enable_grad():
        found = torch.autograd.grad(
            [out for out, _ in pairs],
            inputs,
            [ct for _, ct in pairs],
            create_graph=True,
            allow_unused=True,
        )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def _with(args: Sequence[Any], names: Sequence[int], new: Sequence[Any]) -> list[Any]:
    replaced = list(args)
    for name, value in zip(names, new, strict=True):
        replaced[name] = value
    return replaced


def grad_and_value(
    func: Function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Function:
    """Return the gradient and the value."""

    @functools.wraps(func)
    def both(*args: Any, **kwargs: Any) -> Any:
        names = (argnums,) if isinstance(argnums, int) else argnums
        inputs, spec, chosen = _inputs([args[name] for name in names])
        out = func(*_with(args, names, chosen), **kwargs)
        value = out[0] if has_aux else out
        assert value.dim() == 0
        found = pytree.tree_unflatten(_pull([value], inputs, [torch.ones_like(value)]), spec)
        return (found[0] if isinstance(argnums, int) else tuple(found)), out

    return both


def value_and_grad(
    func: Function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Function:
    """Return the value and the gradient."""

    @functools.wraps(func)
    def both(*args: Any, **kwargs: Any) -> Any:
        return grad_and_value(func, argnums, has_aux)(*args, **kwargs)[::-1]

    return both


def grad(func: Function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Function:
    """Return the gradient."""

    @functools.wraps(func)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        found, out = grad_and_value(func, argnums, has_aux)(*args, **kwargs)
        return (found, out[1]) if has_aux else found

    return gradient


def _split(output: Any, has_aux: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return the output, and a tuple with the auxiliary part if there is one.

    torch.func and tsfunc refuse derivatives of a function without outputs.
    """
    out, aux = (output[0], (output[1],)) if has_aux else (output, ())
    assert pytree.tree_leaves(out)
    return out, aux


def vjp(func: Function, *primals: Any, has_aux: bool = False) -> Any:
    """Return the value, the pullback and the auxiliary part."""
    inputs, spec, chosen = _inputs(primals)
    out, aux = _split(func(*chosen), has_aux)
    outputs = pytree.tree_leaves(out)

    def pullback(cotangents: Any) -> Any:
        return pytree.tree_unflatten(_pull(outputs, inputs, pytree.tree_leaves(cotangents)), spec)

    return (out, pullback, *aux)


def jvp(
    func: Function, primals: tuple[Any, ...], tangents: tuple[Any, ...], has_aux: bool = False
) -> Any:
    """Return the value and the pushforward: the transpose of the pullback, which is linear."""
    inputs, _, chosen = _inputs(primals)
    out, aux = _split(func(*chosen), has_aux)
    outputs, spec = pytree.tree_flatten(out)
    duals = [torch.full_like(x, 0.5, requires_grad=True) for x in outputs]
    pulled = _pull(outputs, inputs, duals)
    pushed = pytree.tree_unflatten(_pull(pulled, duals, pytree.tree_leaves(tangents)), spec)
    return (out, pushed, *aux)


def linearize(func: Function, *primals: Any, has_aux: bool = False) -> Any:
    """Return the value, the pushforward at these primals, and the auxiliary part."""
    out, aux = _split(func(*primals), has_aux)
    return out, lambda *tangents: jvp(func, primals, tangents, has_aux)[1], *aux


def jacrev(
    func: Function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False, **_: Any
) -> Function:
    """Return the Jacobian, a row for each entry of the outputs."""
    return _jacobian(func, argnums, has_aux, forward=False)


def _jacobian(
    func: Function, argnums: int | tuple[int, ...], has_aux: bool, *, forward: bool
) -> Function:
    """Return the Jacobian.

    Args:
        forward: True for the dtypes of the outputs, which tangents have; False for those of inputs.
    """

    @functools.wraps(func)
    def jacobian(*args: Any) -> Any:
        names = (argnums,) if isinstance(argnums, int) else argnums
        inputs, spec, chosen = _inputs([args[name] for name in names])
        out, aux = _split(func(*_with(args, names, chosen)), has_aux)
        outputs, out_spec = pytree.tree_flatten(out)
        blocks = []
        for out in outputs:
            rows = [_pull([y], inputs, [torch.ones_like(y)]) for y in out.reshape(-1)]
            found = [
                torch.stack([row[k] for row in rows]).reshape(out.shape + x.shape)
                if rows
                else x.new_zeros(out.shape + x.shape)
                for k, x in enumerate(inputs)
            ]
            if forward and out.is_floating_point():
                found = [block.to(out.dtype) for block in found]
            tree = pytree.tree_unflatten(found, spec)
            blocks.append(tree[0] if isinstance(argnums, int) else tuple(tree))
        found = pytree.tree_unflatten(blocks, out_spec)
        return (found, *aux) if has_aux else found

    return jacobian


def jacfwd(
    func: Function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False, **_: Any
) -> Function:
    """Return the Jacobian, a column for each entry of the inputs."""
    return _jacobian(func, argnums, has_aux, forward=True)


def hessian(func: Function, argnums: int | tuple[int, ...] = 0) -> Function:
    """Return the Jacobian of the Jacobian."""
    return jacrev(jacrev(func, argnums), argnums)


def checkpoint(func: Function, **_: Any) -> Function:
    """Return the function."""
    return func


def specialize(func: Function, *_: Any, **__: Any) -> Function:
    """Return the function."""
    return func


def functional_call(module: torch.nn.Module, state: Any, args: Any) -> Any:
    """Call the module with other parameters, by torch's own function."""
    return torch.func.functional_call(module, state, args)


def cond(pred: Any, true_fun: Function, false_fun: Function, *args: Any) -> Any:
    """Choose by Python's ``if``."""
    return (true_fun if bool(pred) else false_fun)(*args)


def switch(index: Any, branches: Sequence[Function], *args: Any) -> Any:
    """Choose by Python's indexing."""
    return branches[min(max(int(index), 0), len(branches) - 1)](*args)


def while_loop(cond_fun: Function, body_fun: Function, init_val: Any, **_: Any) -> Any:
    """Run Python's ``while``."""
    carry = init_val
    while bool(cond_fun(carry)):
        carry = body_fun(carry)
    return carry


def fori_loop(lower: Any, upper: Any, body_fun: Function, init_val: Any, **_: Any) -> Any:
    """Run Python's ``for``."""
    carry = init_val
    for i in range(int(lower), int(upper)):
        carry = body_fun(torch.tensor(i), carry)
    return carry


def _slices(tree: Any, dim: int) -> list[Any]:
    leaves, spec = pytree.tree_flatten(tree)
    return [
        pytree.tree_unflatten([x.select(dim, i) for x in leaves], spec)
        for i in range(leaves[0].shape[dim])
    ]


def _stack_trees(trees: Sequence[Any], dim: int) -> Any:
    return pytree.tree_map(lambda *leaves: torch.stack(leaves, dim), *trees)


def scan(
    f: Function, init: Any, xs: Any, reverse: bool = False, *, dim: int = 0
) -> tuple[Any, Any]:
    """Loop by Python along a dim."""
    slices = _slices(xs, dim)
    ys = []
    for x in reversed(slices) if reverse else slices:
        init, y = f(init, x)
        ys.append(y)
    return init, _stack_trees(ys[::-1] if reverse else ys, dim)


def map(f: Function, xs: Any, *args: Any, **_: Any) -> Any:
    """Loop by Python over the first dim."""
    return _stack_trees([f(x, *args) for x in _slices(xs, 0)], 0)


def associative_scan(fn: Function, elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    """Combine one slice after the other."""

    def part(i: int) -> Any:
        return pytree.tree_map(lambda x: x.narrow(axis, i, 1), elems)

    count = pytree.tree_leaves(elems)[0].shape[axis]
    order = list(reversed(range(count))) if reverse else list(range(count))
    found = [part(order[0])]
    for i in order[1:]:
        found.append(fn(found[-1], part(i)))
    ordered = found[::-1] if reverse else found
    return pytree.tree_map(lambda *leaves: torch.cat(leaves, axis), *ordered)
