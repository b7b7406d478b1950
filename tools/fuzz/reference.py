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
        pairs = [*zip(leaves, dims, strict=True)]
        sizes = {x.shape[d] for x, d in pairs if d is not None and x is not None}
        (count,) = sizes or {axis_size}
        state = torch.get_rng_state()

        def example(i: int) -> Any:
            work.check()
            if randomness == "same":
                torch.set_rng_state(state)
            parts = [
                x if d is None or x is None else (x.select(d, i) if count else _made_up(x, d))
                for x, d in pairs
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


def _tensors(tree: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[Any]], Any]]:
    """Return the tensors of a tree, and the function that puts others in their places."""
    leaves, spec = pytree.tree_flatten(tree)

    def filled(values: Sequence[Any]) -> Any:
        rest = iter(values)
        return pytree.tree_unflatten([x if x is None else next(rest) for x in leaves], spec)

    return [x for x in leaves if x is not None], filled


class _Recorded:
    """A function that ran with grad mode on, its inputs and its results.

    With grad mode off around it, a derivative has its value and is a constant.
    """

    def __init__(self, func: Function, has_aux: bool, primals: Any, place: Any) -> None:
        """Run the function.

        Args:
            func: the function.
            has_aux: True if the second part of its result is auxiliary.
            primals: the tree to differentiate by.
            place: returns the positional arguments, from other primals.
        """
        tensors, self.filled = _tensors(primals)
        with torch.enable_grad():
            self.inputs = [
                x.view_as(x) if x.requires_grad else x.detach().clone().requires_grad_()
                for x in tensors
            ]
            output = func(*place(self.filled(self.inputs)))
        out, aux = (output[0], (output[1],)) if has_aux else (output, ())
        self.outputs, self.filled_outputs = _tensors(out)
        # torch.func and tsfunc refuse derivatives of a function without outputs.
        assert self.outputs
        self.out, self.aux = _kept(out), _kept(aux)

    def pull(self, cotangents: Any) -> Any:
        """Return the product of cotangents with the Jacobian."""
        found = _directions(cotangents, self.outputs)
        return self.filled(_pull(self.outputs, self.inputs, found))

    def push(self, tangents: Any) -> Any:
        """Return the product of the Jacobian with tangents: pulling is linear, so transpose it."""
        with torch.enable_grad():
            duals = [torch.full_like(x, 0.5, requires_grad=True) for x in self.outputs]
            pulled = _pull(self.outputs, self.inputs, duals)
        return self.filled_outputs(_pull(pulled, duals, _directions(tangents, self.inputs)))


def _directions(tree: Any, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of a tree of tangents or cotangents, which are as their values are."""
    found, _ = _tensors(tree)
    for x, value in zip(found, like, strict=True):
        assert x.shape == value.shape and x.dtype == value.dtype
    return found


def _kept(tree: Any) -> Any:
    """Return the tree; with grad mode off, as constants."""
    if torch.is_grad_enabled():
        return tree
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, tree)


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
    pulled = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]
    return list(_kept(pulled))


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
        ran = _recorded(func, argnums, has_aux, args, kwargs)
        (value,) = ran.outputs
        assert value.dim() == 0
        found = ran.pull([torch.ones_like(value)])
        out = (ran.out, *ran.aux) if has_aux else ran.out
        return (found[0] if isinstance(argnums, int) else tuple(found)), out

    return both


def _recorded(
    func: Function, argnums: int | tuple[int, ...], has_aux: bool, args: Any, kwargs: Any
) -> _Recorded:
    """Run a function that is differentiated by some of its arguments."""
    names = (argnums,) if isinstance(argnums, int) else argnums

    def called(*args: Any) -> Any:
        return func(*args, **kwargs)

    primals = [args[name] for name in names]
    return _Recorded(called, has_aux, primals, lambda new: _with(args, names, new))


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


def vjp(func: Function, *primals: Any, has_aux: bool = False) -> Any:
    """Return the value, the pullback and the auxiliary part."""
    ran = _Recorded(func, has_aux, primals, lambda new: new)
    return (ran.out, ran.pull, *ran.aux)


def jvp(
    func: Function, primals: tuple[Any, ...], tangents: tuple[Any, ...], has_aux: bool = False
) -> Any:
    """Return the value, the pushforward and the auxiliary part."""
    ran = _Recorded(func, has_aux, primals, lambda new: new)
    return (ran.out, ran.push(tangents), *ran.aux)


def linearize(func: Function, *primals: Any, has_aux: bool = False) -> Any:
    """Return the value, the pushforward at these primals, and the auxiliary part."""
    ran = _Recorded(func, has_aux, primals, lambda new: new)
    return (ran.out, lambda *tangents: ran.push(tangents), *ran.aux)


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
        ran = _recorded(func, argnums, has_aux, args, {})
        blocks = []
        for out in ran.outputs:
            with torch.enable_grad():
                entries = out.reshape(-1).unbind()
            rows = [_pull([y], ran.inputs, [torch.ones_like(y)]) for y in entries]
            found = [
                torch.stack([row[k] for row in rows]).reshape(out.shape + x.shape)
                if rows
                else x.new_zeros(out.shape + x.shape)
                for k, x in enumerate(ran.inputs)
            ]
            if forward and out.is_floating_point():
                found = [block.to(out.dtype) for block in found]
            tree = ran.filled(found)
            blocks.append(tree[0] if isinstance(argnums, int) else tuple(tree))
        found = ran.filled_outputs(blocks)
        return (found, *ran.aux) if has_aux else found

    return jacobian


def jacfwd(
    func: Function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False, **_: Any
) -> Function:
    """Return the Jacobian, a column for each entry of the inputs."""
    return _jacobian(func, argnums, has_aux, forward=True)


def hessian(func: Function, argnums: int | tuple[int, ...] = 0) -> Function:
    """Return the Jacobian of the Jacobian."""
    return jacfwd(jacrev(func, argnums), argnums)


def remat(func: Function, x: Any) -> Any:
    """Call the function: stands for torch's checkpoint."""
    return func(x)


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


def _copies(tree: Any) -> Any:
    """Return copies: a body of a loop may write into its arguments."""
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


def while_loop(cond_fun: Function, body_fun: Function, init_val: Any, **_: Any) -> Any:
    """Run Python's ``while``."""
    carry = init_val
    while bool(cond_fun(carry)):
        carry = body_fun(_copies(carry))
    return carry


def fori_loop(lower: Any, upper: Any, body_fun: Function, init_val: Any, **_: Any) -> Any:
    """Run Python's ``for``."""
    carry = init_val
    for i in range(int(lower), int(upper)):
        carry = body_fun(torch.tensor(i), _copies(carry))
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
        init, y = f(_copies(init), _copies(x))
        ys.append(y)
    return init, _stack_trees(ys[::-1] if reverse else ys, dim)


def map(f: Function, xs: Any, *args: Any, **_: Any) -> Any:
    """Loop by Python over the first dim."""
    return _stack_trees([f(_copies(x), *args) for x in _slices(xs, 0)], 0)


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
