"""Functions with custom rules as graphs: the callees of a loaded program.

Each class rebuilds the user's function with the public tools: one with a ``custom_vjp`` is a
``custom_vjp`` whose function and rules are graphs. It therefore behaves the same under transforms.
All graphs take the function's tensors and then its numbers; rules take more values after these.
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
from tsfunc.program.files.callees import CalleeGraph, TracedCallee
from tsfunc.transforms.custom_jvp import custom_jvp
from tsfunc.transforms.custom_rules import apply
from tsfunc.transforms.custom_vjp import custom_vjp
from tsfunc.transforms.custom_vmap import custom_vmap
from tsfunc.transforms.equations import Closed, Linear, Root, solved
from tsfunc.transforms.symbolic_zeros import SymbolicZero
from tsfunc.transforms.vmap import vmap


class CustomVjp(TracedCallee):
    """A function with a ``custom_vjp``.

    Attributes:
        count: the number of tensors that the function is differentiated by; they come first.
        primal: the graph of the function.
        forward: the same with the residuals as further results.
        backward: takes the residuals and a cotangent for each result of `smooth`; returns a
            cotangent or None for each tensor that is differentiated by.
        smooth: the indices of the results that have cotangents.
    """

    count: int
    primal: CalleeGraph
    forward: CalleeGraph
    backward: CalleeGraph
    smooth: Sequence[int]

    @property
    def parts(self) -> Sequence[CalleeGraph]:
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


class CustomJvp(TracedCallee):
    """A function with a ``custom_jvp``.

    Attributes:
        count: the number of tensors that the function is differentiated by; they come first.
        primal: the graph of the function.
        push: takes a tangent for each tensor of `by`; returns a tangent or None for each result.
        by: the indices of the tensors that have tangents.
    """

    count: int
    primal: CalleeGraph
    push: CalleeGraph
    by: Sequence[int]

    @property
    def parts(self) -> Sequence[CalleeGraph]:
        return self.primal, self.push

    @functools.cached_property
    def _rule(self) -> Any:
        total = self.tensors + self.numbers

        def rule(*given: Any) -> tuple[Any, Any]:
            *fixed, primals, tangents = given
            found = self.push(*primals, *fixed, *(tangents[i] for i in self.by))
            known = (SymbolicZero(torch.Size(), torch.bool),) * self.results  # not used
            return known, tuple(found)

        made = custom_jvp(_named(self.name, self.primal), tuple(range(self.count, total)))
        made.defjvp(rule)
        return made

    def __call__(self, *operands: Any) -> Sequence[Any]:
        found: Sequence[Any] = self._rule(*operands)
        return found


@dataclass(frozen=True)
class Batched:
    """The batching rule of a function for one choice of batched tensors.

    Attributes:
        given: for each tensor, True if it is batched; the batch dim comes first.
        returned: for each result, True if it is batched.
        part: the graph.
    """

    given: tuple[bool, ...]
    returned: tuple[bool, ...]
    part: CalleeGraph


@dataclass(frozen=True)
class _Shaped:
    """Placeholder of a tensor of which only the shape is used."""

    shape: Any


class Batches:
    """The batching rules of a function.

    Args:
        rules: the rules for the choices of batched tensors: for each choice, or for choices of one
            tensor and of all.
        primal: the function itself.
        tensors: the number of tensors that the function takes.
    """

    def __init__(self, rules: Sequence[Batched], primal: Callable[..., Any], tensors: int) -> None:
        self._rules = {rule.given: rule for rule in rules}
        self._primal, self._tensors = primal, tensors

    def __call__(
        self, size: Any, batched: Sequence[bool], operands: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[bool]]:
        """Return the results of a batch, and for each True if it is batched.

        The graphs were traced for batches of at least two examples. A batch of one example, or of
        none, runs the function itself under ``vmap``.
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
        """The rule with the most batched tensors."""
        return max(self._rules.values(), key=lambda rule: sum(rule.given))


class CustomVmap(TracedCallee):
    """A function with a ``custom_vmap``.

    Attributes:
        primal: the graph of the function.
        batches: the batching rule, for choices of batched tensors.
    """

    primal: CalleeGraph
    batches: Sequence[Batched]

    @property
    def parts(self) -> Sequence[CalleeGraph]:
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


class CustomAutogradFunction(TracedCallee):
    """An ``autograd.Function``.

    Attributes:
        forward: the graph of ``forward``, with the other values kept for derivatives as further
            results.
        kept: the kept values, as indices among the tensors, the results and these other values.
        dirty: the tensors that are marked dirty.
        inert: the results that are marked as not differentiable.
        smooth: the results that have cotangents.
        by: the tensors that have tangents.
        backward: takes the kept values, the numbers, tensors with the shapes of the function's,
            and a cotangent for each result of `smooth`; returns a cotangent or None for each
            tensor. None if there is no reverse mode.
        once: True if ``backward`` is marked as once differentiable.
        refusal: the message of the error that replaces a derivative, or None.
        push: the ``jvp`` method: takes the same inputs as ``backward`` with a tangent for each
            tensor of `by` in place of cotangents; returns a tangent or None for each result.
        batches: the ``vmap`` method, for choices of batched tensors.
    """

    forward: CalleeGraph
    kept: Sequence[int]
    dirty: Sequence[int]
    inert: Sequence[int]
    smooth: Sequence[int]
    by: Sequence[int]
    backward: CalleeGraph | None
    once: bool
    refusal: str | None
    push: CalleeGraph | None
    batches: Sequence[Batched]

    @property
    def parts(self) -> Sequence[CalleeGraph]:
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
        """The function without its batching rule."""
        members: dict[str, Any] = {}
        known = self.tensors + self.results
        if all(at < known for at in self.kept):  # torch's own transforms can take it too
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
        """Return the first inputs of both derivatives."""
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
        count: the number of tensors of the unknown. The function takes the right-hand side, and
            the values that the equation closes over.
        solve, product, transposed: as in ``equations.Linear``.
    """

    count: int
    solve: CalleeGraph
    product: CalleeGraph
    transposed: CalleeGraph

    @property
    def parts(self) -> Sequence[CalleeGraph]:
        return self.solve, self.product, self.transposed

    def __call__(self, *operands: Any) -> Sequence[Any]:
        solve, product, transposed = (_closed(part) for part in self.parts)
        equation = Linear(self.name, self.count, product, solve, transposed)
        return solved(equation, operands[: self.count], operands[self.count :])


class RootSolution(TracedCallee):
    """An ``implicit_root``.

    Attributes:
        count: the number of tensors of the unknown. The function takes a guess, and the values
            that the equation closes over.
        solve, residual, tangent: as in ``equations.Root``.
    """

    count: int
    solve: CalleeGraph
    residual: CalleeGraph
    tangent: CalleeGraph

    @property
    def parts(self) -> Sequence[CalleeGraph]:
        return self.solve, self.residual, self.tangent

    def __call__(self, *operands: Any) -> Sequence[Any]:
        solve, residual, tangent = (_closed(part) for part in self.parts)
        equation = Root(self.name, self.count, residual, solve, tangent)
        return solved(equation, operands[: self.count], operands[self.count :])


def _closed(part: CalleeGraph) -> Closed:
    return lambda values, closed: part(*values, *closed)


def _named(name: str, part: CalleeGraph) -> Callable[..., Any]:
    """Return a part as a function that has the user's name in error messages."""

    def function(*args: Any) -> Any:
        return tuple(part(*args))

    function.__name__ = function.__qualname__ = name
    return function
