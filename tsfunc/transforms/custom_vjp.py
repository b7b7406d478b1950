"""``custom_vjp`` and ``custom_gradient``: functions whose reverse-mode derivative a user writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.grad.mapped_function import differentiable
from tsfunc.bridge.tracers.tracer import at_level_of, seen_here
from tsfunc.errors import CustomRuleError
from tsfunc.transforms.arguments import like
from tsfunc.transforms.custom_rules import Call, Rule, RuleFunction, alike, structure_error
from tsfunc.transforms.reverse import vjp
from tsfunc.transforms.symbolic_zeros import CustomVJPPrimal, zero_from_primal


class custom_vjp(Rule):
    """A function whose reverse-mode derivative is the user's.

    Args:
        func: takes and returns pytrees.
        nondiff_argnums: positions of arguments that are not differentiated; the rule ``bwd`` gets
            them first.
        nondiff_argnames: the same by name.

    ``defvjp(fwd, bwd)`` gives the rule: ``fwd`` takes what ``func`` takes and returns its result
    and a pytree of residuals; ``bwd`` takes the residuals and the cotangent of the result, and
    returns a tuple with a cotangent for each differentiated argument (None for zeros, of a whole
    argument or of a part of it).

    Raises:
        UndefinedRuleError: at a call that has no rule.
        CustomRuleError: a rule does not return what it must.
        UndefinedDerivativeError: the result depends on what the functions close over, or on an
            argument of ``nondiff_argnums``, and a derivative by that is asked for. ``bwd`` may
            close over anything: derivatives of gradients have the right part by that.

    Example:
        >>> import torch
        >>> from tsfunc import custom_vjp, grad
        >>> @custom_vjp
        ... def clipped(x):
        ...     return x ** 2
        >>> clipped.defvjp(lambda x: (x ** 2, x), lambda x, ct: ((2 * x * ct).clamp(-1, 1),))
        >>> grad(clipped)(torch.tensor(3.))
        tensor(1.)

    As ``jax.custom_vjp``; forward mode too is served, by differentiating the pullback.
    """

    what = "custom_vjp"

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
        """Gives the two halves of the rule.

        Args:
            fwd, bwd: the rule.
            symbolic_zeros: whether ``fwd`` gets a ``CustomVJPPrimal`` for each tensor and number,
                which says if somebody differentiates by it, and ``bwd`` a ``SymbolicZero`` for the
                cotangent of a result that nobody uses.
            optimize_remat: taken for the sake of programs written for JAX. The result of ``func``
                itself is what a program has where nobody differentiates, with it and without.
        """
        self.fwd, self.bwd, self.symbolic_zeros = fwd, bwd, symbolic_zeros

    def functions(self) -> Sequence[Any]:
        return (self.func, self.fwd, self.bwd)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.fwd is None or self.bwd is None:
            raise self.missing("defvjp(fwd, bwd)")
        return self.differentiated(self.positional(args, kwargs))

    def forward(self, call: Call, fixed: Sequence[Any], rest: Sequence[Any]) -> tuple[Any, Any]:
        assert self.fwd is not None
        if self.symbolic_zeros:
            fixed, rest = pytrees.tree_map(_unperturbed, fixed), _with_flags(call, rest)
        found = self.fwd(*self.whole(fixed, rest))
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise CustomRuleError(
                f"custom_vjp: the fwd rule of {self.name} must return a pair, the result and the "
                f"residuals, got {type(found).__name__}."
            )
        out, residuals = pytrees.tree_map(seen_here, (found[0], found[1]))
        return out, residuals

    def backward(self, fixed: Sequence[Any], residuals: Any, cotangent: Any, rest: Any) -> Any:
        assert self.bwd is not None
        found = pytrees.tree_map(seen_here, self.bwd(*fixed, residuals, cotangent))
        if not isinstance(found, tuple | list) or len(found) != len(rest):
            raise CustomRuleError(
                f"custom_vjp: the bwd rule of {self.name} must return a tuple of {len(rest)}, a "
                f"cotangent for each differentiated argument, got "
                f"{len(found) if isinstance(found, tuple | list) else type(found).__name__}."
            )
        return found


def _unperturbed(leaf: Any) -> Any:
    taken = isinstance(leaf, torch.Tensor | bool | int | float | complex)
    return CustomVJPPrimal(leaf, False) if taken else leaf


def _with_flags(call: Call, rest: Any) -> Any:
    """The arguments as a ``fwd`` rule gets them that asks who is perturbed."""
    leaves = [_unperturbed(leaf) for leaf in pytrees.leaves_of(rest)]
    for place, flag in zip(call.places[: call.count], call.perturbed, strict=False):
        leaves[place] = CustomVJPPrimal(leaves[place].value, flag)
    return pytrees.unflatten(call.tree[0], leaves)


def _cut(leaf: Any) -> Any:
    """A residual without the graph of what ``fwd`` closes over, as what it is kept."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf


class _Vjp(RuleFunction):
    @staticmethod
    def forward(ctx: Any, call: Call, sizes: Sequence[Any], *operands: Any) -> Any:
        rule: Any = call.rule

        def forward(fixed: Any, rest: Any) -> Any:
            out, residuals = rule.forward(call, fixed, rest)
            kept.append(pytrees.tree_map(_cut, residuals))
            return out

        kept: list[Any] = []
        out, ctx.depends = call.watched(forward, sizes, operands)
        (residuals,) = kept
        leaves, tree = pytrees.flatten(residuals)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.call, ctx.sizes, ctx.tree, ctx.at = call, sizes, tree, at
        ctx.rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        ctx.count = len(operands)
        saved = (*operands, *[leaves[i] for i in at])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)
        found = call.kept(out, operands)
        ctx.mark_non_differentiable(*[x for x in found if not differentiable(x)])
        return found

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        call, sizes, saved = ctx.call, ctx.sizes, ctx.saved_tensors
        operands, kept = saved[: ctx.count], saved[ctx.count :]
        if all(ct is None for ct in cotangents):
            return (None,) * (2 + len(operands))
        with call.seeing(operands):
            fixed, rest = call.arguments(sizes, operands)
            if torch.is_grad_enabled():
                # To be differentiated again: the residuals as functions of the arguments.
                _, residuals = call.rule.forward(call, fixed, rest)
            else:
                leaves = list(ctx.rest)
                for i, value in zip(ctx.at, kept, strict=True):
                    leaves[i] = value
                residuals = pytrees.unflatten(ctx.tree, leaves)
            found = pulled_by_rule(call, fixed, rest, residuals, cotangents, operands)
        return (None, None, *found, *RuleFunction.others(call, operands, ctx.depends))

    @staticmethod
    def jvp(ctx: Any, _call: Any, _sizes: Any, *tangents: Any) -> Any:
        """The transpose of the pullback, which is linear in the cotangent."""
        call = ctx.call
        if ctx.depends and tangents[-1] is not None:
            call.refuse_hidden()
        operands = ctx.saved_tensors[: ctx.count]
        with call.seeing(operands), at_level_of((*operands, *tangents)):
            return _pushed(call, ctx.sizes, operands, tangents[: call.count])


def _pushed(
    call: Call, sizes: Sequence[Any], operands: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, ...]:
    fixed, rest = call.arguments(sizes, operands)
    rule: Any = call.rule
    _, residuals = rule.forward(call, fixed, rest)
    of = [i for i, x in enumerate(call.results) if x.smooth]
    by = [i for i, t in enumerate(tangents) if t is not None and differentiable(operands[i])]
    zeros = [x.zero() for x in call.results]

    def pull(*cotangents: Any) -> tuple[Any, ...]:
        given = list(zeros)
        for i, cotangent in zip(of, cotangents, strict=True):
            given[i] = cotangent
        found = pulled_by_rule(call, fixed, rest, residuals, given, operands)
        return tuple(torch.zeros_like(operands[i]) if found[i] is None else found[i]
                     for i in by)  # fmt: skip

    # Torch has no other zeros among the tangents of results.
    pushed = [zeros[i] if i in of else None for i in range(len(zeros))]
    if of and by:
        _, push = vjp(pull, *[zeros[i] for i in of])
        for i, value in zip(of, push(tuple(tangents[i] for i in by)), strict=True):
            pushed[i] = value
    return tuple(pushed)


def pulled_by_rule(
    call: Call, fixed: Any, rest: Any, residuals: Any, cotangents: Any, operands: Sequence[Any]
) -> list[Any]:
    """A cotangent for each tensor that is differentiated by, from the rule's tuple of pytrees."""
    rule: Any = call.rule
    symbolic = rule.symbolic_zeros
    given = [
        x.zero(symbolic) if ct is None else ct
        for ct, x in zip(cotangents, call.results, strict=True)
    ]
    ct = call.result(given, lambda x: zero_from_primal(x, symbolic))
    pulled = rule.backward(fixed, residuals, ct, rest)
    flat: list[Any] = []
    for number, (arg, cotangent) in enumerate(zip(rest, pulled, strict=True)):
        flat += _leaves_like(rule, number, arg, cotangent)
    found: list[Any] = []
    for place, x in zip(call.places[: call.count], operands, strict=False):
        if not differentiable(x):
            found.append(None)
            continue
        what = f"custom_vjp: the bwd rule of {rule.name}: the cotangent of argument"
        none = " Where it is zero, return None." if flat[place] is not None else ""
        found.append(alike(f"{what} {call.name(place)}", flat[place], x, none=none))
    return found


def _leaves_like(rule: Rule, number: int, arg: Any, cotangent: Any) -> list[Any]:
    """The cotangent's leaf for each of an argument's; None stands for zeros of what is below it."""
    try:
        found = pytrees.broadcast_prefix(cotangent, arg, lambda x: x is None)
    except ValueError:
        found = []
    given = [x for x in pytrees.leaves_of(cotangent) if x is not None]
    if len([x for x in found if x is not None]) != len(given):
        raise structure_error(
            f"custom_vjp: the bwd rule of {rule.name}: the cotangent of argument "
            f"{rule.parameter(number)}", arg, cotangent,
        )  # fmt: skip
    return found


custom_vjp.kind = _Vjp


def custom_gradient(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns its pullback beside its result.

    Args:
        func: takes pytrees, and returns a pair: its result, and a function that takes the
            cotangent of that and returns a tuple with a cotangent for each argument; of one
            argument, its cotangent without a tuple will do.

    Returns:
        A function of the same arguments that returns the result.

    Raises:
        CustomRuleError: ``func`` returns no such pair, or the pullback not what it must.

    Example:
        >>> import torch
        >>> from tsfunc import custom_gradient, grad
        >>> @custom_gradient
        ... def f(x):
        ...     return x ** 2, lambda ct: ct * x
        >>> grad(f)(torch.tensor(3.))
        tensor(3.)

    As ``jax.custom_gradient`` and ``tf.custom_gradient``. The pullback runs where the arguments
    are known, so ``func`` is called again for it; its derivatives are those of the pullback.
    """

    def pair(*args: Any) -> tuple[Any, Any]:
        found = func(*args)
        if not isinstance(found, tuple) or len(found) != 2 or not callable(found[1]):
            raise CustomRuleError(
                f"custom_gradient: {name} must return a pair, its result and a function of the "
                f"result's cotangent, got {type(found).__name__}."
            )
        return found

    def value(*args: Any) -> Any:
        return pair(*args)[0]

    def fwd(*args: Any) -> Any:
        return value(*args), args

    def bwd(args: Any, cotangent: Any) -> Any:
        pulled = pair(*args)[1](cotangent)
        if len(args) == 1 and not (isinstance(pulled, tuple | list) and len(pulled) == 1):
            return (pulled,)
        return pulled

    made = custom_vjp(like(func)(value))
    name = made.name
    try:
        made.signature = inspect.signature(func)
    except (TypeError, ValueError):  # of a builtin
        made.signature = None
    made.defvjp(fwd, bwd)
    return made
