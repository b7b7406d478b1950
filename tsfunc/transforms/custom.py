"""Functions whose derivatives or batching a user writes: ``custom_vjp``, ``custom_jvp``,
``custom_vmap``.

A call is an ``autograd.Function`` of the tensors among its arguments, whose methods call the
user's rules: so each level of tracers goes through them (``bridge/custom_function``), and what is
to be differentiated again is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function

from tsfunc import pytrees
from tsfunc.bridge.mapped_function import differentiable
from tsfunc.bridge.tracer import at_level_of
from tsfunc.transforms.custom_batching import call_rule
from tsfunc.transforms.custom_rules import (
    Call,
    Rule,
    apart,
    apply,
    check_alike,
    is_differentiated,
    structure_error,
)
from tsfunc.transforms.reverse import vjp


class custom_vjp(Rule):
    """A function whose reverse-mode derivative is the user's.

    Args:
        func: takes and returns pytrees.
        nondiff_argnums: positions of arguments that are not differentiated; the rule ``bwd`` gets
            them first. Of derivatives by them, and by what ``func`` closes over, it says nothing.
        nondiff_argnames: the same by name.

    ``defvjp(fwd, bwd)`` gives the rule: ``fwd`` takes what ``func`` takes and returns its result
    and a pytree of residuals; ``bwd`` takes the residuals and the cotangent of the result, and
    returns a tuple with a cotangent for each differentiated argument (None for zeros).

    Raises:
        RuntimeError: at a call that has no rule.
        TypeError: a rule does not return what it must.

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

    def __init__(
        self,
        func: Callable[..., Any],
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Sequence[str] = (),
    ) -> None:
        super().__init__(func, nondiff_argnums, nondiff_argnames)
        self.fwd: Callable[..., Any] | None = None
        self.bwd: Callable[..., Any] | None = None

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Gives the two halves of the rule."""
        self.fwd, self.bwd = fwd, bwd

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.fwd is None or self.bwd is None:
            raise self.missing("defvjp(fwd, bwd)")
        args = self.positional(args, kwargs)
        fixed, rest = self.fixed(args)
        call, sizes, tensors = apart((self, fixed), rest)
        if not is_differentiated(tensors):
            return self.func(*args)
        return call.result(apply(_Vjp, call, sizes, *tensors))

    def forward(self, fixed: Sequence[Any], rest: Sequence[Any]) -> tuple[Any, Any]:
        assert self.fwd is not None
        found = self.fwd(*self.whole(fixed, rest))
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TypeError(
                f"custom_vjp: the fwd rule of {self.name} must return a pair, the result and the "
                f"residuals, got {type(found).__name__}."
            )
        return found[0], found[1]

    def backward(self, fixed: Sequence[Any], residuals: Any, cotangent: Any, rest: Any) -> Any:
        assert self.bwd is not None
        found = self.bwd(*fixed, residuals, cotangent)
        if not isinstance(found, tuple | list) or len(found) != len(rest):
            raise TypeError(
                f"custom_vjp: the bwd rule of {self.name} must return a tuple of {len(rest)}, a "
                f"cotangent for each differentiated argument, got "
                f"{len(found) if isinstance(found, tuple | list) else type(found).__name__}."
            )
        return found


class _Vjp(Function):
    @staticmethod
    def forward(ctx: Any, call: Call, sizes: tuple[Any, ...], *tensors: Any) -> Any:
        rule, fixed = call.taking(sizes).function
        ctx.sizes = sizes
        out, residuals = rule.forward(fixed, call.arguments(tensors))
        leaves, tree = pytrees.flatten(residuals)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.call, ctx.tree, ctx.at = call, tree, at
        ctx.rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        ctx.count = len(tensors)
        ctx.save_for_backward(*tensors, *[leaves[i] for i in at])
        ctx.save_for_forward(*tensors, *[leaves[i] for i in at])
        found = tuple(x.view_as(x) if any(x is t for t in tensors) else x for x in call.kept(out))
        ctx.mark_non_differentiable(*[x for x in found if not differentiable(x)])
        return found

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        call = ctx.call.taking(ctx.sizes)
        rule, fixed = call.function
        tensors, saved = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        rest = call.arguments(tensors)
        if torch.is_grad_enabled():
            # To be differentiated again: the residuals as functions of the arguments.
            _, residuals = rule.forward(fixed, rest)
        else:
            leaves = list(ctx.rest)
            for i, value in zip(ctx.at, saved, strict=True):
                leaves[i] = value
            residuals = pytrees.unflatten(ctx.tree, leaves)
        pulled = rule.backward(fixed, residuals, call.result(cotangents), rest)
        return (None, None, *_cotangents_of(call, rest, pulled, tensors, rule.name))

    @staticmethod
    def jvp(ctx: Any, _call: Any, _sizes: Any, *tangents: Any) -> Any:
        """The transpose of the pullback, which is linear in the cotangent."""
        with at_level_of((*ctx.saved_tensors[: ctx.count], *tangents)):
            return _Vjp.pushed(ctx, tangents)

    @staticmethod
    def pushed(ctx: Any, tangents: Sequence[Any]) -> tuple[Any, ...]:
        call = ctx.call.taking(ctx.sizes)
        rule, fixed = call.function
        tensors = ctx.saved_tensors[: ctx.count]
        rest = call.arguments(tensors)
        out, residuals = rule.forward(fixed, rest)
        results = [x for x in pytrees.leaves_of(out) if isinstance(x, torch.Tensor)]
        of = [i for i, x in enumerate(results) if differentiable(x)]
        by = [i for i, t in enumerate(tangents) if t is not None and differentiable(tensors[i])]
        zeros = [torch.zeros_like(x) for x in results]

        def pull(*cotangents: Any) -> tuple[Any, ...]:
            given = list(zeros)
            for i, cotangent in zip(of, cotangents, strict=True):
                given[i] = cotangent
            pulled = rule.backward(fixed, residuals, call.result(given), rest)
            found = _cotangents_of(call, rest, pulled, tensors, rule.name)
            return tuple(torch.zeros_like(tensors[i]) if found[i] is None else found[i]
                         for i in by)  # fmt: skip

        _, push = vjp(pull, *[zeros[i] for i in of])
        pushed: list[Any] = [None] * len(results)
        for i, value in zip(of, push(tuple(tangents[i] for i in by)), strict=True):
            pushed[i] = value
        return tuple(pushed)


def _cotangents_of(
    call: Call, rest: Sequence[Any], pulled: Sequence[Any], tensors: Sequence[Any], name: str
) -> list[Any]:
    """A cotangent for each tensor among the arguments, from the rule's tuple of pytrees."""
    flat: list[Any] = []
    for arg, cotangent in zip(rest, pulled, strict=True):
        leaves, tree = pytrees.flatten(arg)
        if cotangent is None:
            flat += [None] * len(leaves)
            continue
        found, given = pytrees.flatten(cotangent)
        if given != tree:
            raise structure_error(
                f"custom_vjp: the bwd rule of {name}: the cotangent of an argument",
                arg, cotangent,
            )  # fmt: skip
        flat += found
    chosen = [
        flat[i] if differentiable(x) else None for i, x in zip(call.places, tensors, strict=True)
    ]
    check_alike(
        f"custom_vjp: the bwd rule of {name}: the cotangent of an argument", chosen, tensors
    )
    return chosen


class custom_jvp(Rule):
    """A function whose derivative is the user's, by its forward rule; reverse mode transposes it.

    Args:
        func: takes and returns pytrees.
        nondiff_argnums: positions of arguments that are not differentiated; the rule gets them
            first. Of derivatives by them, and by what ``func`` closes over, it says nothing.
        nondiff_argnames: the same by name.

    ``defjvp(rule)`` gives the rule: it takes the tuple of primals and the tuple of tangents, and
    returns the result and its tangent, which must be linear in the tangents. ``defjvps(*rules)``
    gives one for each argument: it takes a tangent, the result and the primals, and returns the
    tangent of the result (None instead of a rule: that argument has no derivative).

    Raises:
        RuntimeError: at a call that has no rule.
        TypeError: a rule does not return what it must.

    Example:
        >>> import torch
        >>> from tsfunc import custom_jvp, grad
        >>> @custom_jvp
        ... def log1pexp(x):
        ...     return torch.log1p(torch.exp(x))
        >>> log1pexp.defjvps(lambda t, ans, x: (1 - 1 / (1 + torch.exp(x))) * t)
        >>> grad(log1pexp)(torch.tensor(100.))
        tensor(1.)

    As ``jax.custom_jvp``.
    """

    what = "custom_jvp"

    def __init__(
        self,
        func: Callable[..., Any],
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Sequence[str] = (),
    ) -> None:
        super().__init__(func, nondiff_argnums, nondiff_argnames)
        self.rule: Callable[..., Any] | None = None

    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Gives the rule; can be used as a decorator."""
        self.rule = rule
        return rule

    def defjvps(self, *rules: Callable[..., Any] | None) -> None:
        """Gives a rule for each argument."""
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
            zeros = pytrees.tree_map(torch.zeros_like, ans)
            return ans, functools.reduce(_added, parts, zeros)

        self.rule = rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.rule is None:
            raise self.missing("defjvp")
        args = self.positional(args, kwargs)
        fixed, rest = self.fixed(args)
        call, sizes, tensors = apart((self, fixed), rest)
        if not is_differentiated(tensors):
            return self.func(*args)
        return call.result(apply(_Jvp, call, sizes, *tensors))

    def pushed(self, call: Call, fixed: Any, primals: Any, tangents: Any) -> tuple[Any, ...]:
        """The tangents of the result's tensors."""
        assert self.rule is not None
        found = self.rule(*fixed, call.arguments(primals), call.arguments(tangents))
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TypeError(
                f"custom_jvp: the rule of {self.name} must return a pair, the result and its "
                f"tangent, got {type(found).__name__}."
            )
        out, tangent = found
        if pytrees.structure_of(out) != pytrees.structure_of(tangent):
            raise structure_error(f"custom_jvp: the tangent that the rule of {self.name} returns",
                                   out, tangent)  # fmt: skip
        leaves = pytrees.leaves_of(tangent)
        if pytrees.structure_of(out) != call.out_tree:
            raise TypeError(
                f"custom_jvp: the rule of {self.name} must return what the function returns, of "
                f"the structure {call.out_tree}, got {pytrees.structure_of(out)}."
            )
        found = [leaves[i] for i in call.out_places]
        check_alike(
            f"custom_jvp: the rule of {self.name}: the tangent of a result",
            [t if x.smooth else None for t, x in zip(found, call.results, strict=True)],
            call.results,
        )
        return tuple(found)


def _added(left: Any, right: Any) -> Any:
    leaves, tree = pytrees.flatten(left)
    sums = [a + b for a, b in zip(leaves, pytrees.leaves_of(right), strict=True)]
    return pytrees.unflatten(tree, sums)


class _Jvp(Function):
    @staticmethod
    def forward(call: Call, sizes: tuple[Any, ...], *tensors: Any) -> Any:
        rule, fixed = call.taking(sizes).function
        out = rule.func(*rule.whole(fixed, call.arguments(tensors)))
        return tuple(x.view_as(x) if any(x is t for t in tensors) else x for x in call.kept(out))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, ctx.sizes = inputs[:2]
        ctx.save_for_backward(*inputs[2:])
        ctx.save_for_forward(*inputs[2:])
        ctx.mark_non_differentiable(*[x for x in output if not differentiable(x)])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        call, primals = ctx.call.taking(ctx.sizes), ctx.saved_tensors
        rule, fixed = call.function
        by = [i for i, x in enumerate(primals) if differentiable(x)]
        zeros = [torch.zeros_like(x) for x in primals]
        of = [i for i, ct in enumerate(cotangents) if ct is not None and differentiable(ct)]

        def pushed(*tangents: Any) -> tuple[Any, ...]:
            given = list(zeros)
            for i, tangent in zip(by, tangents, strict=True):
                given[i] = tangent
            found = rule.pushed(call, fixed, primals, given)
            return tuple(found[i] for i in of)

        _, pull = vjp(pushed, *[zeros[i] for i in by])
        pulled: list[Any] = [None] * len(primals)
        for i, value in zip(by, pull(tuple(cotangents[i] for i in of)), strict=True):
            pulled[i] = value
        return (None, None, *pulled)

    @staticmethod
    def jvp(ctx: Any, _call: Any, _sizes: Any, *tangents: Any) -> Any:
        call, primals = ctx.call.taking(ctx.sizes), ctx.saved_tensors
        rule, fixed = call.function
        return rule.pushed(call, fixed, primals, call.flat_tangents(tangents, primals))


class custom_vmap(Rule):
    """A function whose batching is the user's.

    Args:
        func: takes and returns pytrees of tensors.

    ``def_vmap(rule)`` gives the rule: ``rule(axis_size, in_batched, *args)`` is called under
    ``vmap`` with the number of examples, a pytree of bools for each argument that says which
    tensors are batched, and the arguments, batched ones with the examples along their first dim.
    It returns the result for all examples, and a pytree of bools for what of it is batched, along
    the first dim. Derivatives inside of the ``vmap`` are those of the rule.

    Raises:
        RuntimeError: under ``vmap``, where there is no rule.
        TypeError: the rule does not return what it must.

    Example:
        >>> import torch
        >>> from tsfunc import custom_vmap, vmap
        >>> @custom_vmap
        ... def matvec(a, x):
        ...     return a @ x
        >>> @matvec.def_vmap
        ... def rule(axis_size, in_batched, a, x):
        ...     if in_batched == [False, True]:
        ...         return x @ a.T, True
        ...     return torch.func.vmap(torch.mv)(a, x.expand(axis_size, -1)), True
        >>> vmap(matvec, in_dims=(None, 0))(torch.eye(2), torch.ones(3, 2)).shape
        torch.Size([3, 2])

    As ``jax.custom_batching.custom_vmap``, and differentiable in both modes.
    """

    what = "custom_vmap"

    def __init__(self, func: Callable[..., Any]) -> None:
        super().__init__(func)
        self.rule: Callable[..., Any] | None = None

    def def_vmap(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Gives the rule; can be used as a decorator."""
        self.rule = rule
        return rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = self.positional(args, kwargs)
        return call_rule(f"custom_vmap: the rule of {self.name}", self.batched, args, self.func)

    def batched(self, *args: Any) -> Any:
        """The rule."""
        if self.rule is None:
            raise self.missing("def_vmap")
        return self.rule(*args)
