"""Reruns a traced graph on fake values, to compare its operators' results with those recorded.

A trace adds constraints to its environment as guards. The environment of a program that was read
from a file has no guards: ``assume`` adds those of the file before results are computed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tsfunc.bridge.sizes.expressions import is_small, size_of_form
from tsfunc.bridge.sizes.fake_results import results_of
from tsfunc.bridge.sizes.symbolic_numbers import size_text
from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.bridge.tracers.user_queries import same_size
from tsfunc.ops.registry import Args, Kwargs


class FakeRerun:
    """Runs operators on fake tensors, outside of all levels and modes.

    Args:
        sample: a fake tensor of the trace, for its symbols, or None.
    """

    def __init__(self, sample: Any) -> None:
        is_fake = isinstance(sample, FakeTensor)
        self._mode = sample.fake_mode if is_fake else FakeTensorMode(allow_non_fake_inputs=False)

    def assume(self, constraints: Sequence[str]) -> None:
        """Assume constraints on named dims, and about numbers among the arguments."""
        env: Any = self._mode.shape_env
        if constraints and env is not None:
            assume(constraints, {**env.symbols.sizes, **env.symbols.numbers})

    def like(self, value: torch.Tensor) -> torch.Tensor:
        """Return a fake input with the metadata of another fake tensor."""
        with torch_state.outside_all_transforms(), self._mode:
            tensor = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
            tensor = tensor.conj() if value.is_conj() else tensor
            return torch._neg_view(tensor) if value.is_neg() else tensor

    def call(self, target: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Return the results of an operator, with autograd's dispatch keys active as in the trace.

        Without these keys torch's fake tensors run a composite operator whole, and some of torch's
        rules for composites are wrong: that of ``nll_loss`` has its arguments in another order.
        """
        with torch_state.outside_all_transforms(), torch.no_grad():
            op = operator_of(target) if isinstance(target, OpOverload) else None
            name, writes = (op.name, op.writes) if op is not None else ("", False)
            return results_of(
                self._mode, name, target, writes, _plain_lists(args), _plain_lists(dict(kwargs))
            )


def _plain_lists(value: Any) -> Any:
    """Replace the list class of torch.fx, which other code does not flatten, by lists."""
    if isinstance(value, dict):
        return {name: _plain_lists(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain_lists(item) for item in value]
    return tuple([_plain_lists(item) for item in value]) if type(value) is tuple else value


def difference(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return the first difference of dtype, device or shape of two tensors as text, or None."""
    if got.dtype != expected.dtype:
        return f"its dtype is {got.dtype}, not {expected.dtype}"
    if got.device != expected.device:
        return f"its device is {got.device}, not {expected.device}"
    same_shape = got.dim() == expected.dim() and all(
        same_size(m, n) for m, n in zip(got.shape, expected.shape, strict=True)
    )
    return None if same_shape else f"its shape is {_shape_text(got)}, not {_shape_text(expected)}"


def _shape_text(value: torch.Tensor) -> str:
    return f"[{', '.join(map(size_text, value.shape))}]"


# --- constraints given as text


_ARITHMETIC: dict[type, str] = {ast.Add: "+", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_LARGEST_POWER = 8


class _NotASize(Exception):
    """A constraint that cannot be added to the environment."""


def assume(constraints: Sequence[str], sizes: Mapping[str, Any]) -> None:
    """Assume constraints on symbols.

    Args:
        constraints: comparisons of sizes, joined by ``and``, ``or`` and ``not``. A constraint is
            ignored if it is too large to evaluate quickly, or contains numbers other than integers.
        sizes: the symbolic sizes, and numbers, by name.
    """
    for constraint in constraints:
        try:
            holds = _constraint(ast.parse(constraint, mode="eval").body, sizes)
        except (_NotASize, SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError):
            continue
        if isinstance(holds, torch.SymBool) and holds.node.hint:
            bool(holds)  # the environment relies on a condition that was true


def _constraint(node: ast.expr, sizes: Mapping[str, Any]) -> Any:
    match node:
        case ast.BoolOp(op=op, values=[first, *others]):
            join = operator.and_ if isinstance(op, ast.And) else operator.or_
            joined = _constraint(first, sizes)
            for other in others:
                joined = join(joined, _constraint(other, sizes))
            return joined
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return torch.sym_not(_constraint(operand, sizes))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _COMPARISONS[type(op)](_size_of_node(left, sizes), _size_of_node(right, sizes))
        case _:
            raise _NotASize


def _size_of_node(node: ast.expr, sizes: Mapping[str, Any]) -> Any:
    form = _form(node)
    if not is_small(form):
        raise _NotASize
    return size_of_form(form, sizes)


def _form(node: ast.expr) -> Any:
    """Return a size as plain data, see ``expressions``; raise _NotASize if it has none."""
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            return name
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return ["*", -1, _form(operand)]
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return ["+", _form(left), ["*", -1, _form(right)]]
        case ast.BinOp(left=base, op=ast.Pow(), right=ast.Constant(value=int() as power)) if (
            2 <= power <= _LARGEST_POWER
        ):
            return ["*", *[_form(base)] * power]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return [_ARITHMETIC[type(op)], _form(left), _form(right)]
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[_, _, *_] as args):
            return [name, *map(_form, args)]
        case _:
            raise _NotASize
