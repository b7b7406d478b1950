"""Functions with rules, as graphs: what a program that was loaded calls in the place of Python.

Each does what the user's function did, by what users have: one with a ``custom_vjp`` is a
``custom_vjp`` whose function and rules are the graphs. So it behaves the same under transforms.
All graphs take the function's tensors and then its numbers; rules take more after these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tsfunc.bridge.grad.mapped_function import differentiable
from tsfunc.errors import UndefinedDerivativeError
from tsfunc.program.files.callees import Part, TracedCallee
from tsfunc.transforms.custom_jvp import custom_jvp
from tsfunc.transforms.custom_rules import apply
from tsfunc.transforms.custom_vjp import custom_vjp
from tsfunc.transforms.custom_vmap import custom_vmap
from tsfunc.transforms.equations import Closed, Linear, Root, solved
from tsfunc.transforms.symbolic_zeros import SymbolicZero
from tsfunc.transforms.vmap import vmap


class WithVjp(TracedCallee):
    """A function with a ``custom_vjp``.

    Attributes:
        count: how many of its tensors it is differentiated by; they come first.
        primal: what it returns.
        forward: the same, and the residuals after that.
        backward: takes the residuals and a cotangent for each result of `smooth`; returns one for
            each tensor that is differentiated by, or None.
        smooth: the results that have cotangents.
    """

    count: int
    primal: Part
    forward: Part
    backward: Part
    smooth: Sequence[int]

    @property
    def parts(self) -> Sequence[Part]:
        return self.primal, self.forward, self.backward

    @functools.cached_property
    def _rule(self) -> Any:
        total = self.tensors + self.numbers

        def fwd(*args: Any) -> tuple[Any, Any]:
            found = self.forward(*args)
            kept = [x if i in self.backward.inputs else None for i, x in enumerate(args)]
            return tuple(found[: self.results]), (kept[: self.count], found[self.results :])

        def bwd(*given: Any) -> Sequence[Any]:
            *fixed, (kept, residuals), cotangents = given
            return self.backward(*kept, *fixed, *residuals, *(cotangents[j] for j in self.smooth))

        rule = custom_vjp(_named(self.name, self.primal), tuple(range(self.count, total)))
        rule.defvjp(fwd, bwd)
        return rule

    def __call__(self, *operands: Any) -> Sequence[Any]:
        found: Sequence[Any] = self._rule(*operands)
        return found


class WithJvp(TracedCallee):
    """A function with a ``custom_jvp``.

    Attributes:
        count: how many of its tensors it is differentiated by; they come first.
        primal: what it returns.
        push: takes a tangent for each tensor of `by`; returns one for each result, or None.
        by: the tensors that have tangents.
    """

    count: int
    primal: Part
    push: Part
    by: Sequence[int]

    @property
    def parts(self) -> Sequence[Part]:
        return self.primal, self.push

    @functools.cached_property
    def _rule(self) -> Any:
        total = self.tensors + self.numbers

        def rule(*given: Any) -> tuple[Any, Any]:
            *fixed, primals, tangents = given
            found = self.push(*primals, *fixed, *(tangents[i] for i in self.by))
            known = (SymbolicZero(torch.Size(), torch.bool),) * self.results  # which nobody asks
            return known, tuple(found)

        made = custom_jvp(_named(self.name, self.primal), tuple(range(self.count, total)))
        made.defjvp(rule)
        return made

    def __call__(self, *operands: Any) -> Sequence[Any]:
        found: Sequence[Any] = self._rule(*operands)
        return found


@dataclass(frozen=True)
class Batched:
    """What a function does with a batch, for some of its tensors batched.

    Attributes:
        given: which of the tensors are batched; their batch dim comes first.
        returned: which of the results are.
        part: the graph.
    """

    given: tuple[bool, ...]
    returned: tuple[bool, ...]
    part: Part


@dataclass(frozen=True)
class _Shaped:
    """Stands for a tensor of which nothing is used but the shape."""

    shape: Any


class Batches:
    """A function's rules for batches.

    Args:
        rules: those that there are: for each choice of batched tensors, or for few ones and for
            all of them.
        primal: the function itself.
        tensors: how many tensors it takes.
    """

    def __init__(self, rules: Sequence[Batched], primal: Callable[..., Any], tensors: int) -> None:
        self._rules = {rule.given: rule for rule in rules}
        self._primal, self._tensors = primal, tensors

    def __call__(
        self, size: Any, batched: Sequence[bool], operands: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[bool]]:
        """The results of a batch, and which of them are batched.

        The graphs were traced for batches of two and more. One example is the function's own
        business, and of none there is only the shape to tell.
        """
        tensors, numbers = list(operands[: self._tensors]), operands[self._tensors :]
        if isinstance(size, int) and size < 2:
            dims = (*(0 if flag else None for flag in batched), *[None] * len(numbers))
            found = vmap(self._primal, dims, randomness="same")(*tensors, *numbers)
            return found, [True] * len(found)
        rule = self._rules.get(tuple(batched)) or self._widest
        tensors = [
            x.unsqueeze(0).expand(size, *x.shape) if wanted and not flag else x
            for x, flag, wanted in zip(tensors, batched, rule.given, strict=True)
        ]
        return rule.part(*tensors, *numbers), rule.returned

    @property
    def _widest(self) -> Batched:
        """The rule for which most is batched."""
        return max(self._rules.values(), key=lambda rule: sum(rule.given))


class WithVmap(TracedCallee):
    """A function with a ``custom_vmap``.

    Attributes:
        primal: what it returns.
        batches: its rule, for choices of batched tensors.
    """

    primal: Part
    batches: Sequence[Batched]

    @property
    def parts(self) -> Sequence[Part]:
        return self.primal, *(each.part for each in self.batches)

    @functools.cached_property
    def _rule(self) -> Any:
        if not self.batches:
            return self.primal
        every = Batches(self.batches, self.primal, self.tensors)

        def rule(size: Any, batched: Any, *operands: Any) -> Any:
            found, flags = every(size, batched[: self.tensors], operands)
            return tuple(found), tuple(flags)

        made = custom_vmap(_named(self.name, self.primal))
        made.def_vmap(rule)
        return made

    def __call__(self, *operands: Any) -> Sequence[Any]:
        found: Sequence[Any] = self._rule(*operands)
        return found


class WithMethods(TracedCallee):
    """An ``autograd.Function``.

    Attributes:
        forward: what it returns, and after that what else is kept for derivatives.
        kept: what is kept, by its number among the tensors, the results, and these others.
        dirty: the tensors that are marked as written to.
        inert: the results that are marked as without derivatives.
        smooth: the results that have cotangents.
        by: the tensors that have tangents.
        backward: takes what is kept, the numbers, tensors of the shapes of the function's, and a
            cotangent for each result of `smooth`; returns one for each tensor, or None. Without it
            there is no reverse mode.
        once: whether ``backward`` is marked as one that has no derivative itself.
        refusal: what an error says instead of a derivative.
        push: the ``jvp`` method: takes the same with a tangent for each tensor of `by` instead;
            returns one for each result, or None.
        batches: the ``vmap`` method, for choices of batched tensors.
    """

    forward: Part
    kept: Sequence[int]
    dirty: Sequence[int]
    inert: Sequence[int]
    smooth: Sequence[int]
    by: Sequence[int]
    backward: Part | None
    once: bool
    refusal: str | None
    push: Part | None
    batches: Sequence[Batched]

    @property
    def parts(self) -> Sequence[Part]:
        others = [x for x in (self.backward, self.push) if x is not None]
        return self.forward, *others, *(each.part for each in self.batches)

    def __call__(self, *operands: Any) -> Sequence[Any]:
        found: Sequence[Any] = apply(self._function, *operands)
        return found

    @functools.cached_property
    def _function(self) -> Any:
        if not self.batches:
            return self._alone
        return type(self.name, (self._alone,), {"vmap": staticmethod(self._batched)})

    @functools.cached_property
    def _alone(self) -> Any:
        """The function without its rule for batches."""
        members: dict[str, Any] = {}
        known = self.tensors + self.results
        if all(at < known for at in self.kept):  # also torch's own transforms take it then
            members["forward"] = lambda *args: tuple(self.forward(*args))
            members["setup_context"] = self._keep
        else:
            members["forward"] = self._forward
        if self.backward is not None or self.refusal is not None:
            pull = self._pull
            members["backward"] = once_differentiable(pull) if self.once else pull
        if self.push is not None:
            members["jvp"] = self._push
        made = {name: staticmethod(member) for name, member in members.items()}
        return type(self.name, (Function,), made)

    def _forward(self, ctx: Any, *args: Any) -> tuple[Any, ...]:
        found = tuple(self.forward(*args))
        self._keep(ctx, args, found)
        return found[: self.results]

    def _keep(self, ctx: Any, args: Sequence[Any], found: Sequence[Any]) -> None:
        tensors = (*args[: self.tensors], *found)
        kept = [tensors[at] for at in self.kept]
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)
        ctx.numbers = args[self.tensors :]
        ctx.shapes = [x.shape for x in args[: self.tensors]]
        if self.dirty:
            ctx.mark_dirty(*(args[i] for i in self.dirty))
        inert = [x for j, x in enumerate(found[: self.results])
                 if j in self.inert or not differentiable(x)]  # fmt: skip
        ctx.mark_non_differentiable(*inert)

    def _pull(self, ctx: Any, *cotangents: Any) -> Any:
        if self.refusal is not None:
            raise UndefinedDerivativeError(self.refusal)
        assert self.backward is not None
        found = self.backward(*self._given(ctx), *(cotangents[j] for j in self.smooth))
        return (*found, *[None] * self.numbers)

    def _push(self, ctx: Any, *tangents: Any) -> Any:
        assert self.push is not None
        return tuple(self.push(*self._given(ctx), *(tangents[i] for i in self.by)))

    def _given(self, ctx: Any) -> Sequence[Any]:
        """What both derivatives are called with first."""
        shapes = [_Shaped(shape) for shape in ctx.shapes]
        return *ctx.saved_tensors, *ctx.numbers, *shapes

    def _batched(self, info: Any, in_dims: Sequence[int | None], *operands: Any) -> Any:
        dims = in_dims[: self.tensors]
        moved = [
            x if dim is None else x.movedim(dim, 0) for x, dim in zip(operands, dims, strict=False)
        ]
        rest = operands[self.tensors :]
        every = Batches(self.batches, lambda *args: apply(self._alone, *args), self.tensors)
        found, flags = every(info.batch_size, [dim is not None for dim in dims], [*moved, *rest])
        return tuple(found), tuple(0 if flag else None for flag in flags)


class LinearSolution(TracedCallee):
    """A ``linear_solve``.

    Attributes:
        count: how many tensors the unknown is. The function takes the right-hand side, and what the
            equation closes over.
        solve, product, transposed: as in ``equations.Linear``.
    """

    count: int
    solve: Part
    product: Part
    transposed: Part

    @property
    def parts(self) -> Sequence[Part]:
        return self.solve, self.product, self.transposed

    def __call__(self, *operands: Any) -> Sequence[Any]:
        solve, product, transposed = (_closed(part) for part in self.parts)
        equation = Linear(self.name, self.count, product, solve, transposed)
        return solved(equation, operands[: self.count], operands[self.count :])


class RootSolution(TracedCallee):
    """An ``implicit_root``.

    Attributes:
        count: how many tensors the unknown is. The function takes a guess, and what the equation
            closes over.
        solve, residual, tangent: as in ``equations.Root``.
    """

    count: int
    solve: Part
    residual: Part
    tangent: Part

    @property
    def parts(self) -> Sequence[Part]:
        return self.solve, self.residual, self.tangent

    def __call__(self, *operands: Any) -> Sequence[Any]:
        solve, residual, tangent = (_closed(part) for part in self.parts)
        equation = Root(self.name, self.count, residual, solve, tangent)
        return solved(equation, operands[: self.count], operands[self.count :])


def _closed(part: Part) -> Closed:
    return lambda values, closed: part(*values, *closed)


def _named(name: str, part: Part) -> Callable[..., Any]:
    """A part as a function that errors call as the user's."""

    def function(*args: Any) -> Any:
        return tuple(part(*args))

    function.__name__ = function.__qualname__ = name
    return function
