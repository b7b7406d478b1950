"""``custom_jvp``: functions with a forward-mode derivative that the user defines.

NOTE [transposed rules]
A rule is linear in the tangents. Reverse mode transposes the rule by differentiating it by the
tangents. Suppose that the rule calls a function with a custom rule on the tangents; often this is
the function itself: ``f(t)`` for a linear ``f``. Such a call runs the function without its rule.
Transposing the inner rule would call the function again, without end.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.grad.autograd import depends_on_leaves, is_differentiable, next_sequence_number
from tsfunc.bridge.tracers.boundaries import boundary
from tsfunc.bridge.tracers.interrupts import resets, restoring_thread_state
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level
from tsfunc.dispatch.state import overriding
from tsfunc.errors import CustomRuleError
from tsfunc.transforms.custom_rules import (
    Result,
    Rule,
    RuleCall,
    RuleFunction,
    check_like,
    structure_error,
)
from tsfunc.transforms.reverse import vjp
from tsfunc.transforms.symbolic_zeros import SymbolicZero, zero_from_primal
from tsfunc.user_code import folded_class


@folded_class
class custom_jvp(Rule[Result]):
    """A function with a custom forward-mode derivative; reverse mode transposes the rule.

    Args:
        func: takes and returns pytrees.
        nondiff_argnums: positions of arguments that are not differentiated; the rule gets them
            first.
        nondiff_argnames: names of such arguments.

    ``defjvp(rule)`` sets the rule: it takes the tuple of primals and the tuple of tangents, and
    returns the result and its tangent, which must be linear in the tangents. ``defjvps(*rules)``
    sets one rule for each argument: it takes a tangent, the result and the primals, and returns
    the tangent of the result. None instead of a rule: the argument has no derivative.

    Raises:
        UndefinedRuleError: the function is called before a rule is set.
        CustomRuleError: a rule returns a wrong result.
        UndefinedDerivativeError: a derivative is requested by a closed-over tensor or by an
            argument of ``nondiff_argnums``, and the result depends on that tensor.

    Example:
        >>> import torch
        >>> from tsfunc import custom_jvp, grad
        >>> @custom_jvp
        ... def log1pexp(x):
        ...     return torch.log1p(torch.exp(x))
        >>> log1pexp.defjvps(lambda t, ans, x: (1 - 1 / (1 + torch.exp(x))) * t)
        >>> grad(log1pexp)(torch.tensor(100.))
        tensor(1.)

    Corresponds to ``jax.custom_jvp``.
    """

    label = "custom_jvp"

    rule: Callable[..., Any] | None = None
    symbolic_zeros = False

    def defjvp(self, rule: Callable[..., Any], symbolic_zeros: bool = False) -> Callable[..., Any]:
        """Set the rule; can be used as a decorator.

        Args:
            rule: takes primals and tangents.
            symbolic_zeros: if True, the rule gets a ``SymbolicZero`` as the tangent of each
                argument that is not differentiated by.
        """
        self.rule, self.symbolic_zeros = rule, symbolic_zeros
        return rule

    def defjvps(self, *rules: Callable[..., Any] | None) -> None:
        """Set a rule for each argument."""
        if self.nondiff_argnums:
            raise TypeError(
                f"custom_jvp: {self.name} has nondiff_argnums, which defjvps does not know of. "
                f"Use defjvp."
            )

        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            ans = self(*primals)
            parts = [
                one(t, ans, *primals)
                for one, t in zip(rules, tangents, strict=True)
                if one is not None
            ]
            zeros = pytrees.tree_map(zero_from_primal, ans)
            return ans, functools.reduce(_add, parts, zeros)

        self.rule, self.symbolic_zeros = rule, False

    def functions(self) -> Sequence[Any]:
        return (self.func, self.rule)

    @boundary("custom_jvp")
    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        if self.rule is None:
            raise self.missing("defjvp")
        args = self.positional(args, kwargs)
        if _is_transposed(args):
            return self.func(*args)
        return self.call_differentiably(args)

    def pushforward(
        self, call: RuleCall, sizes: Sequence[Any], operands: Sequence[Any], tangents: Sequence[Any]
    ) -> list[Any]:
        """Return the tangents of the result's tensors; None for zeros."""
        assert self.rule is not None
        fixed, primals = call.arguments(sizes, operands)
        symbolic = self.symbolic_zeros
        filled = [
            zero_from_primal(x, symbolic) if t is None else t
            for t, x in zip(tangents, operands, strict=False)
        ]
        directions = call.arguments_with(filled, zero_from_primal)
        if symbolic:
            zeros = pytrees.tree_map(lambda x: zero_from_primal(x, True), primals)
            positions = call.positions[: call.count]
            leaves, tree = pytrees.flatten(zeros)
            for position, t in zip(positions, filled, strict=True):
                leaves[position] = t
            directions = pytrees.unflatten(tree, leaves)
        returned = self.rule(*fixed, primals, directions)
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise CustomRuleError(
                f"custom_jvp: the rule of {self.name} has a wrong result: expected a pair, "
                f"the result and its tangent, got {type(returned).__name__}."
            )
        return self._checked(call, *pytrees.tree_map(as_seen_by_current_level, tuple(returned)))

    def _checked(self, call: RuleCall, out: Any, tangent: Any) -> list[Any]:
        leaves, tree = pytrees.flatten(out)
        tangents, tangent_tree = pytrees.flatten(tangent)
        if tree != tangent_tree:
            raise structure_error(f"custom_jvp: the tangent that the rule of {self.name} returns",
                                   out, tangent)  # fmt: skip
        if tree != call.out_tree:
            raise CustomRuleError(
                f"custom_jvp: the rule of {self.name} has a wrong result: expected the "
                f"structure of the function's result, {pytrees.structure_text(call.out_tree)}, got "
                f"{pytrees.structure_text(tree)}."
            )
        checked = []
        for position, x in zip(call.out_places, call.results, strict=True):
            where = f"custom_jvp: the rule of {self.name}:"
            if not isinstance(leaves[position], SymbolicZero):
                check_like(f"{where} the result of the function", leaves[position], x)
            t = tangents[position] if x.is_differentiable else None
            checked.append(check_like(f"{where} the tangent of a result", t, x))
        return checked


def _add(left: Any, right: Any) -> Any:
    leaves, tree = pytrees.flatten(left)
    sums = [a + b for a, b in zip(leaves, pytrees.leaves_of(right), strict=True)]
    return pytrees.unflatten(tree, sums)


class _Transposed(threading.local):
    """The tangents of the rules that are being transposed on this thread."""

    def __init__(self) -> None:
        self.tangents: tuple[torch.Tensor, ...] = ()
        self.since = 0


_transposed = resets(_Transposed())


def _as_transpose(tangents: tuple[torch.Tensor, ...], since: int) -> AbstractContextManager[None]:
    outer = _transposed.tangents
    since = _transposed.since if outer else since
    return overriding(_transposed, tangents=(*outer, *tangents), since=since)


def _is_transposed(args: Any) -> bool:
    """True if an argument depends on such tangents (NOTE [transposed rules])."""
    tangents, since = _transposed.tangents, _transposed.since
    return bool(tangents) and any(
        depends_on_leaves(x, tangents, since)
        for x in pytrees.leaves_of(args)
        if isinstance(x, torch.Tensor)
    )


class _Jvp(RuleFunction):
    @staticmethod
    def forward(ctx: Any, call: RuleCall, sizes: Sequence[Any], *operands: Any) -> Any:
        rule = call.rule
        out, ctx.depends = call.call_detached(
            lambda fixed, rest: rule.func(*rule.whole(fixed, rest)), sizes, operands
        )
        ctx.call, ctx.sizes = call, sizes
        return RuleFunction.save_for_derivatives(ctx, call, operands, (), out)

    @staticmethod
    @restoring_thread_state
    def backward(ctx: Any, *cotangents: Any) -> Any:
        call, sizes, operands = ctx.call, ctx.sizes, ctx.saved_tensors
        needed = ctx.needs_input_grad[2 : 2 + call.count]
        by = [i for i, need in enumerate(needed) if need and is_differentiable(operands[i])]
        of = [i for i, ct in enumerate(cotangents) if ct is not None and is_differentiable(ct)]
        cts_in: list[Any] = [None] * call.count
        since = next_sequence_number()

        def pushforward(*tangents: Any) -> tuple[Any, ...]:
            tangents_in: list[Any] = [None] * call.count
            for i, tangent in zip(by, tangents, strict=True):
                tangents_in[i] = tangent
            with _as_transpose(tangents, since):
                tangents_out = call.rule.pushforward(call, sizes, operands, tangents_in)
            return tuple(
                call.results[i].zero() if tangents_out[i] is None else tangents_out[i] for i in of
            )

        if of and by:
            with call.substituting_consts(operands):
                _, pullback = vjp(pushforward, *[torch.zeros_like(operands[i]) for i in by])
                for i, value in zip(by, pullback(tuple(cotangents[i] for i in of)), strict=True):
                    cts_in[i] = value
        others = RuleFunction.others(call, operands, ctx.depends and bool(of))
        return (None, None, *cts_in, *others)

    @staticmethod
    def jvp(ctx: Any, _call: Any, _sizes: Any, *tangents: Any) -> Any:
        call, operands = ctx.call, ctx.saved_tensors
        if ctx.depends and tangents[-1] is not None:
            call.raise_undefined()
        with call.substituting_consts(operands):
            pushforward = call.rule.pushforward(call, ctx.sizes, operands, tangents[: call.count])
        # torch needs dense zeros for the tangents of results.
        pairs = zip(pushforward, call.results, strict=True)
        return tuple(x.zero() if t is None and x.is_differentiable else t for t, x in pairs)


custom_jvp.kind = _Jvp
