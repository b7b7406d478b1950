"""torch's control flow for tsfunc's: NOTE [control flow in torch's graphs].

The note is in ``bridge/tracers/dynamo``. torch's operators take and return tensors that share no
memory. Initial carries and results of bodies are therefore copied, and their numbers become
tensors (NOTE [numbers among results] in ``outputs``); ints that branches return stay ints.
``batching=``, ``checkpoint=`` and ``unroll=`` have no effect here. Dynamo traces this file; it
supports torch's pytrees, but not optree or ``inspect``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc.bridge.control.torch_prototypes import (
    torch_associative_scan,
    torch_map,
    torch_scan,
    torch_tree_leaves,
    torch_tree_map,
    torch_while_loop,
)
from tsfunc.transforms.control.call_forms import unpacked_operands

_Function = Callable[..., Any]


def cond(pred: Any, true_fun: _Function, false_fun: _Function, operands: tuple[Any, ...]) -> Any:
    """Call ``torch.cond`` with branches that close over the operands."""
    unpacked = unpacked_operands(operands, true_fun, _takes)
    if not isinstance(pred, torch.Tensor | torch.SymBool):
        return (true_fun if pred else false_fun)(*unpacked)
    return torch.cond(
        _truth(pred),
        lambda: _own_branch_result(true_fun(*unpacked)),
        lambda: _own_branch_result(false_fun(*unpacked)),
        (),
    )


def switch(index: Any, branches: Sequence[_Function], operands: tuple[Any, ...]) -> Any:
    """Call a chain of ``torch.cond``, each between one branch and all later ones."""
    unpacked = unpacked_operands(operands, branches[0], _takes)
    last = len(branches) - 1
    if not isinstance(index, torch.Tensor | torch.SymInt):
        return branches[min(max(index, 0), last)](*unpacked)
    number = index.reshape(()) if isinstance(index, torch.Tensor) else index

    def of(first: int) -> Any:
        if first == last:
            return _own_branch_result(branches[first](*unpacked))
        return torch.cond(
            number <= first,
            lambda: _own_branch_result(branches[first](*unpacked)),
            lambda: of(first + 1),
            (),
        )

    return of(0)


def while_loop(cond_fun: _Function, body_fun: _Function, init: Any) -> Any:
    """Call torch's ``while_loop`` with a single carry."""
    if type(init) in (tuple, list) and init and _takes(cond_fun, len(init)):
        own_cond, own_body = cond_fun, body_fun

        def cond_fun(carry: Any) -> Any:
            return own_cond(*carry)

        def body_fun(carry: Any) -> Any:
            new = own_body(*carry)
            new = new if type(new) in (tuple, list) else (new,)
            return list(new) if isinstance(init, list) else tuple(new)

    return torch_while_loop(
        lambda carry: _truth(cond_fun(carry)),
        lambda carry: _own_tensors(body_fun(carry)),
        _own_tensors(init),
    )


def fori_loop(lower: Any, upper: Any, body_fun: _Function, init: Any) -> Any:
    """Call torch's ``while_loop`` with a counter in the carry."""
    if isinstance(lower, int) and isinstance(upper, int) and upper <= lower:
        return init
    last = _as_tensor(upper)
    return while_loop(
        lambda carry: carry["i"] < last,
        lambda carry: {"i": carry["i"] + 1, "value": body_fun(carry["i"], carry["value"])},
        {"i": _as_tensor(lower), "value": init},
    )["value"]


def scan(
    f: _Function, init: Any, xs: Any, length: int | None, reverse: bool = False, dim: int = 0
) -> Any:
    """Call torch's ``scan``; without results or ``xs``, it gets empty tensors or a range."""
    leaves = [x for x in torch_tree_leaves(xs) if x is not None]
    counted = not leaves

    def step(carry: Any, x: Any) -> Any:
        new, y = f(carry, xs if counted else x)
        return _own_tensors(new), torch.empty(0) if y is None else _own_tensors(y)

    if counted:
        return torch_scan(step, _own_tensors(init), torch.arange(length or 0), 0, reverse)
    return torch_scan(step, _own_tensors(init), xs, dim, reverse)


def map_(f: _Function, xs: Any, args: tuple[Any, ...]) -> Any:
    """Call torch's ``map``."""
    return torch_map(lambda x: _own_tensors(f(x, *args)), xs)


def associative_scan(fn: _Function, elems: Any, axis: int, reverse: bool, of_slices: bool) -> Any:
    """Call torch's ``associative_scan`` with a function of single slices."""

    def one(left: Any, right: Any) -> Any:
        if of_slices:
            return _own_tensors(fn(left, right))
        batches = [torch_tree_map(lambda x: x.unsqueeze(axis), tree) for tree in (left, right)]
        return torch_tree_map(lambda x: x.squeeze(axis).clone(), fn(*batches))

    return torch_associative_scan(one, elems, axis, reverse)


def _truth(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype is not torch.bool:
        return value != 0
    return value


def _own_branch_result(tree: Any) -> Any:
    """Return a branch's result as copies; ints are unchanged."""
    return torch_tree_map(lambda x: x if type(x) is int else _owned_leaf(x), tree)


def _own_tensors(tree: Any) -> Any:
    """Return a tree with copies of its tensors, and numbers as tensors."""
    return torch_tree_map(_owned_leaf, tree)


def _owned_leaf(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else _as_tensor(leaf)


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, bool):
        return torch.full((), leaf, dtype=torch.bool)
    if isinstance(leaf, int | torch.SymInt):
        number: Any = leaf
        return torch.full((), number, dtype=torch.int64)
    return torch.full((), leaf) if isinstance(leaf, float | complex) else leaf


def _takes(func: Any, count: int) -> bool | None:
    """True if a function takes so many arguments, by its code; None if it has none.

    The answer is that of ``call_forms.takes``, whose ``inspect`` Dynamo does not support.
    """
    if isinstance(func, functools.partial):
        return _takes(func.func, count + len(func.args))
    code = getattr(func, "__code__", None)
    if code is None:
        return None
    most: int = code.co_argcount
    needed = most - len(func.__defaults__ or ())
    if code.co_flags & 0x04:
        return needed <= count
    return count <= most and needed in (0, count)
