"""``custom_vjp`` and ``custom_gradient``: functions with a custom reverse-mode derivative."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

from tsfunc import pytrees
from tsfunc.bridge.grad.autograd import is_differentiable
from tsfunc.bridge.tracers.boundaries import boundary
from tsfunc.bridge.tracers.interrupts import restoring_thread_state
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level
from tsfunc.bridge.tracers.tracer import innermost_level
from tsfunc.dispatch.state import tls, using
from tsfunc.errors import CustomRuleError
from tsfunc.transforms.argnums import with_replaced
from tsfunc.transforms.custom_rules import (
    Result,
    Rule,
    RuleCall,
    RuleFunction,
    check_like,
    structure_error,
)
from tsfunc.transforms.reverse import vjp
from tsfunc.transforms.symbolic_zeros import CustomVJPPrimal, zero_from_primal
from tsfunc.transforms.transformed import Transformed, named_as
from tsfunc.user_code import folded_class

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


@folded_class
class custom_vjp(Rule[Result]):
    """A function with a reverse-mode derivative rule of the user.

    Args:
        func: takes and returns pytrees.
        nondiff_argnums: positions of arguments that are not differentiated; the rule ``bwd`` gets
            them first.
        nondiff_argnames: names of such arguments.

    ``defvjp(fwd, bwd)`` sets the rule: ``fwd`` takes the arguments of ``func`` and returns its
    result and a pytree of residuals. ``bwd`` takes the residuals and the cotangent of the result,
    and returns a tuple with a cotangent for each differentiated argument. None stands for zeros of
    a whole argument or of a part of it.

    Raises:
        UndefinedRuleError: the function is called before a rule is set.
        CustomRuleError: a rule returns a wrong result.
        UndefinedDerivativeError: a derivative is requested by a closed-over tensor or by an
            argument of ``nondiff_argnums``, and the result depends on that tensor. ``bwd`` may
            close over any tensor: derivatives of gradients by that tensor are correct.

    Example:
        >>> import torch
        >>> from tsfunc import custom_vjp, grad
        >>> @custom_vjp
        ... def clipped(x):
        ...     return x ** 2
        >>> clipped.defvjp(lambda x: (x ** 2, x), lambda x, ct: ((2 * x * ct).clamp(-1, 1),))
        >>> grad(clipped)(torch.tensor(3.))
        tensor(1.)

    Similar to ``jax.custom_vjp``; forward mode works too, by differentiating the pullback.
    """

    label = "custom_vjp"

    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None
    symbolic_zeros = False

    def defvjp(
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        symbolic_zeros: bool = False,
        optimize_remat: bool = False,
    ) -> None:
        """Set the two halves of the rule.

        Args:
            fwd, bwd: the rule.
            symbolic_zeros: if True, ``fwd`` gets a ``CustomVJPPrimal`` for each tensor and number,
                with a flag that is True if the value is differentiated by. ``bwd`` gets a
                ``SymbolicZero`` as the cotangent of each unused result.
            optimize_remat: accepted for compatibility with JAX, without effect. A program that is
                not differentiated always contains ``func`` itself.
        """
        self.fwd, self.bwd, self.symbolic_zeros = fwd, bwd, symbolic_zeros

    def functions(self) -> Sequence[Any]:
        return (self.func, self.fwd, self.bwd)

    @boundary("custom_vjp")
    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        if self.fwd is None or self.bwd is None:
            raise self.missing("defvjp(fwd, bwd)")
        return self.call_differentiably(self.positional(args, kwargs))

    def forward(self, call: RuleCall, fixed: Sequence[Any], rest: Sequence[Any]) -> tuple[Any, Any]:
        assert self.fwd is not None
        if self.symbolic_zeros:
            fixed, rest = pytrees.tree_map(_without_perturbation, fixed), _with_flags(call, rest)
        returned = self.fwd(*self.whole(fixed, rest))
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise CustomRuleError(
                f"custom_vjp: the fwd rule of {self.name} has a wrong result: expected a pair, "
                f"the result and the residuals, got {type(returned).__name__}."
            )
        out, residuals = pytrees.tree_map(as_seen_by_current_level, (returned[0], returned[1]))
        return out, residuals

    def backward(self, fixed: Sequence[Any], residuals: Any, cotangent: Any, rest: Any) -> Any:
        assert self.bwd is not None
        returned = pytrees.tree_map(
            as_seen_by_current_level, self.bwd(*fixed, residuals, cotangent)
        )
        if not isinstance(returned, tuple | list) or len(returned) != len(rest):
            got = len(returned) if isinstance(returned, tuple | list) else type(returned).__name__
            raise CustomRuleError(
                f"custom_vjp: the bwd rule of {self.name} has a wrong result: expected a tuple "
                f"of {len(rest)}, a cotangent for each differentiated argument, got {got}."
            )
        return returned


def _without_perturbation(leaf: Any) -> Any:
    is_supported = isinstance(leaf, torch.Tensor | bool | int | float | complex)
    return CustomVJPPrimal(leaf, False) if is_supported else leaf


def _with_flags(call: RuleCall, rest: Any) -> Any:
    """Return the arguments of a ``fwd`` rule with symbolic zeros: values with perturbed flags."""
    leaves = [_without_perturbation(leaf) for leaf in pytrees.leaves_of(rest)]
    for position, flag in zip(call.positions[: call.count], call.perturbed, strict=False):
        leaves[position] = CustomVJPPrimal(leaves[position].value, flag)
    return pytrees.unflatten(call.tree[0], leaves)


def _detach(leaf: Any) -> Any:
    """Return a residual without the graph of closed-over tensors, in the form that is saved."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf


class _Vjp(RuleFunction):
    @staticmethod
    def forward(ctx: Any, call: RuleCall, sizes: Sequence[Any], *operands: Any) -> Any:
        rule: Any = call.rule

        def forward(fixed: Any, rest: Any) -> Any:
            out, residuals = rule.forward(call, fixed, rest)
            residual_trees.append(pytrees.tree_map(_detach, residuals))
            return out

        residual_trees: list[Any] = []
        out, ctx.depends = call.call_detached(forward, sizes, operands)
        (residuals,) = residual_trees
        leaves, tree = pytrees.flatten(residuals)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.call, ctx.sizes, ctx.tree, ctx.at = call, sizes, tree, at
        ctx.rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        ctx.count = len(operands)
        return RuleFunction.save_for_derivatives(ctx, call, operands, [leaves[i] for i in at], out)

    @staticmethod
    @restoring_thread_state
    def backward(ctx: Any, *cotangents: Any) -> Any:
        call, sizes, saved = ctx.call, ctx.sizes, ctx.saved_tensors
        operands, residual_tensors = saved[: ctx.count], saved[ctx.count :]
        if all(ct is None for ct in cotangents):
            return (None,) * (2 + len(operands))
        with call.substituting_consts(operands):
            fixed, rest = call.arguments(sizes, operands)
            if torch.is_grad_enabled():
                # Under create_graph, the residuals must be functions of the arguments.
                _, residuals = call.rule.forward(call, fixed, rest)
            else:
                residuals = pytrees.unflatten(
                    ctx.tree, with_replaced(ctx.rest, ctx.at, residual_tensors)
                )
            cts_in = cotangents_by_rule(call, fixed, rest, residuals, cotangents, operands)
        return (None, None, *cts_in, *RuleFunction.others(call, operands, ctx.depends))

    @staticmethod
    def jvp(ctx: Any, _call: Any, _sizes: Any, *tangents: Any) -> Any:
        """Transpose the pullback, which is linear in the cotangent."""
        call = ctx.call
        if ctx.depends and tangents[-1] is not None:
            call.raise_undefined()
        operands = ctx.saved_tensors[: ctx.count]
        with call.substituting_consts(operands), _at_level_of((*operands, *tangents)):
            return _pushforward(call, ctx.sizes, operands, tangents[: call.count])


def _pushforward(
    call: RuleCall, sizes: Sequence[Any], operands: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, ...]:
    fixed, rest = call.arguments(sizes, operands)
    rule: Any = call.rule
    _, residuals = rule.forward(call, fixed, rest)
    of = [i for i, x in enumerate(call.results) if x.is_differentiable]
    by = [i for i, t in enumerate(tangents) if t is not None and is_differentiable(operands[i])]
    zeros = [x.zero() for x in call.results]

    def pullback(*cotangents: Any) -> tuple[Any, ...]:
        filled = with_replaced(zeros, of, cotangents)
        cts_in = cotangents_by_rule(call, fixed, rest, residuals, filled, operands)
        return tuple(torch.zeros_like(operands[i]) if cts_in[i] is None else cts_in[i]
                     for i in by)  # fmt: skip

    # torch needs dense zeros for the tangents of results.
    tangents_out = [zeros[i] if i in of else None for i in range(len(zeros))]
    if of and by:
        _, pushforward = vjp(pullback, *[zeros[i] for i in of])
        for i, value in zip(of, pushforward(tuple(tangents[i] for i in by)), strict=True):
            tangents_out[i] = value
    return tuple(tangents_out)


def cotangents_by_rule(
    call: RuleCall, fixed: Any, rest: Any, residuals: Any, cotangents: Any, operands: Sequence[Any]
) -> list[Any]:
    """Return a cotangent for each differentiated tensor, from the rule's tuple of pytrees."""
    rule: Any = call.rule
    symbolic = rule.symbolic_zeros
    filled = [
        x.zero(symbolic) if ct is None else ct
        for ct, x in zip(cotangents, call.results, strict=True)
    ]
    ct = call.result(filled, lambda x: zero_from_primal(x, symbolic))
    cts_in = rule.backward(fixed, residuals, ct, rest)
    flat: list[Any] = []
    for number, (arg, cotangent) in enumerate(zip(rest, cts_in, strict=True)):
        flat += _leaves_like(rule, number, arg, cotangent)
    gradients: list[Any] = []
    for position, x in zip(call.positions[: call.count], operands, strict=False):
        if not is_differentiable(x):
            gradients.append(None)
            continue
        label = f"custom_vjp: the bwd rule of {rule.name}: the cotangent of argument"
        none = " Where it is zero, return None." if flat[position] is not None else ""
        gradients.append(check_like(f"{label} {call.name(position)}", flat[position], x, none=none))
    return gradients


def _leaves_like(rule: Rule[Any], number: int, arg: Any, cotangent: Any) -> list[Any]:
    """Return a cotangent leaf for each leaf of an argument; None covers all leaves below it."""
    try:
        leaves = pytrees.broadcast_prefix(cotangent, arg, lambda x: x is None)
    except ValueError:
        leaves = []
    cotangents = [x for x in pytrees.leaves_of(cotangent) if x is not None]
    if len([x for x in leaves if x is not None]) != len(cotangents):
        raise structure_error(
            f"custom_vjp: the bwd rule of {rule.name}: the cotangent of argument "
            f"{rule.parameter(number)}", arg, cotangent,
        )  # fmt: skip
    return leaves


custom_vjp.kind = _Vjp


def custom_gradient(
    func: Callable[_Params, tuple[_Result, Any]],
) -> Transformed[_Params, _Result]:
    """Return a function whose derivative is the pullback that the function returns.

    Args:
        func: takes pytrees, and returns a pair: its result, and a pullback. The pullback takes the
            cotangent of the result and returns a tuple with a cotangent for each argument. A
            function of one argument may return its cotangent without a tuple.

    Returns:
        A function of the same arguments that returns the result.

    Raises:
        CustomRuleError: ``func`` does not return such a pair, or the pullback returns a wrong
        result.

    Example:
        >>> import torch
        >>> from tsfunc import custom_gradient, grad
        >>> @custom_gradient
        ... def f(x):
        ...     return x ** 2, lambda ct: ct * x
        >>> grad(f)(torch.tensor(3.))
        tensor(3.)

    Corresponds to ``jax.custom_gradient`` and ``tf.custom_gradient``. The backward pass calls
    ``func`` again to get the pullback. Higher derivatives are derivatives of the pullback.
    """

    call: Callable[..., Any] = func

    def pair(*args: Any) -> tuple[Any, Any]:
        returned = call(*args)
        if not isinstance(returned, tuple) or len(returned) != 2 or not callable(returned[1]):
            raise CustomRuleError(
                f"custom_gradient: {name}: expected a pair, its result and a function of the "
                f"result's cotangent, got {type(returned).__name__}."
            )
        return returned

    def value(*args: Any) -> Any:
        return pair(*args)[0]

    def fwd(*args: Any) -> Any:
        return value(*args), args

    def bwd(args: Any, cotangent: Any) -> Any:
        cts_in = pair(*args)[1](cotangent)
        if len(args) == 1 and not (isinstance(cts_in, tuple | list) and len(cts_in) == 1):
            return (cts_in,)
        return cts_in

    function: Any = custom_vjp(named_as(func)(value))
    name = function.name
    try:
        function.signature = inspect.signature(func)
    except (TypeError, ValueError):  # a builtin
        function.signature = None
    function.defvjp(fwd, bwd)
    return function


def _at_level_of(values: Sequence[Any]) -> AbstractContextManager[None]:
    """Context manager: activate the values' innermost level, and no level inside it.

    C++ calls the formula of a node's tangent at that level, on any thread.
    """
    level = innermost_level(values)
    levels = tls.state.levels
    if level is not None:
        return nullcontext() if levels[-1:] == (level,) else using(level.inner)
    return using(levels[0].outer) if levels else nullcontext()
