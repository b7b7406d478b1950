"""The methods of an ``autograd.Function``, traced into graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import Function

from tsfunc import pytrees
from tsfunc.bridge.grad.mapped_function import FunctionContext, differentiable, has_setup, torch_jvp
from tsfunc.bridge.grad.once_differentiable import is_marked
from tsfunc.errors import UndefinedDerivativeError
from tsfunc.transforms.control.custom_function_graphs import (
    Kept,
    Tracing,
    Values,
    batches_of,
    smooth_of,
    types_of,
)
from tsfunc.transforms.control.custom_functions import (
    CustomAutogradFunction,
)


class Methods:
    """Tracer of the methods of an ``autograd.Function``.

    Attributes:
        outputs: for each value that ``forward`` returns, its index among the tensors, or None.
        kept: the values that ``forward`` stored on its ctx.
    """

    def __init__(self, tracing: Tracing) -> None:
        self.tracing, self.callee = tracing, tracing.callee
        self.cls = tracing.callee.function
        self.made = CustomAutogradFunction(*tracing.head(0))
        self.outputs: list[int | None] = []
        self.materialize = True

    def traced(self, batched: bool) -> CustomAutogradFunction:
        made, tracing, cls = self.made, self.tracing, self.cls
        made.forward = tracing.part("forward", self._forward, tracing.operands)
        self.kept.forget()
        types = types_of(made.forward)
        made.smooth = [j for j in smooth_of(types[: made.results]) if j not in made.inert]
        made.by = [i for i in smooth_of(self.callee.types) if i in self._arguments()]
        everything = [*self.callee.types, *types]
        numbers = tracing.operands[made.tensors :]
        self.first = len(made.kept)
        given = [*(everything[at] for at in made.kept), *numbers, *self.callee.types]
        method = cls.backward if cls.backward is not Function.backward else cls.vjp
        made.once = is_marked(cls)
        made.backward = made.push = made.refusal = None
        try:
            if method is not Function.backward:
                self.backward = getattr(method, "__wrapped__", method) if made.once else method
                cotangents = [types[j] for j in made.smooth]
                made.backward = tracing.part("backward", self._backward, [*given, *cotangents])
            if cls.jvp is not torch_jvp:
                tangents = [self.callee.types[i] for i in made.by]
                made.push = tracing.part("jvp", self._push, [*given, *tangents])
        except UndefinedDerivativeError as error:
            made.refusal = str(error)
        made.batches = ()
        if batched and cls.vmap is not Function.vmap:
            made.batches = batches_of(tracing, self._batch, made.tensors)
        return made

    def _needs(self, values: Values) -> list[bool]:
        args = self.callee.filled(values)
        return [isinstance(x, torch.Tensor) and differentiable(x) for x in args]

    def _forward(self, values: list[Any]) -> Values:
        cls, made, ctx = self.cls, self.made, FunctionContext(self._needs(values))
        args = self.callee.filled(values)
        if has_setup(cls):
            out = cls.forward(*args)
            cls.setup_context(ctx, tuple(args), out)
        else:
            out = cls.forward(ctx, *args)
        outputs = out if isinstance(out, tuple | list) else (out,)
        leaves = pytrees.leaves_of(out)
        results = [x for x in leaves if isinstance(x, torch.Tensor)]
        numbers = {id(x): j for j, x in enumerate(results)}
        self.outputs = [numbers.get(id(x)) for x in outputs]
        made.results = len(results)
        told = dict(vars(ctx))
        known = [*values[: made.tensors], *results]
        made.dirty = [_place(x, known) for x in told.pop("dirty")]
        inert = [_place(x, known) - made.tensors for x in told.pop("not_differentiable")]
        made.inert = [j for j in inert if j >= 0]
        self.materialize = told.pop("materialize")
        self.kept = Kept(told)
        others: list[torch.Tensor] = []
        places = []
        for x in self.kept.tensors:
            at = _place(x, [*known, *others])
            if at < 0:
                at = len(known) + len(others)
                others.append(x)
            places.append(at)
        made.kept = places
        return *results, *others

    def _context(self, values: list[Any], method: str) -> FunctionContext:
        ctx = FunctionContext()
        vars(ctx).update(self.kept.filled(values[: self.first], self.tracing.names))
        return ctx.seen_by(method)

    def _backward(self, values: list[Any]) -> Values:
        made = self.made
        given = values[self.first + made.numbers + made.tensors :]
        of: dict[int | None, Any] = dict(zip(made.smooth, given, strict=True))
        ctx = self._context(values, "backward")
        found = self.backward(ctx, *(of.get(j) for j in self.outputs))
        found = found if isinstance(found, tuple | list) else (found,)
        pulled: list[Any] = [None] * made.tensors
        for i, ct in zip(self._arguments(), found, strict=False):
            if i is not None:
                pulled[i] = ct
        return pulled

    def _arguments(self) -> list[int | None]:
        """Return for each argument the index of its tensor; None for other arguments."""
        made = self.made
        args = self.callee.filled([_ArgumentIndex(i) for i in range(made.tensors + made.numbers)])
        return [
            x.number if isinstance(x, _ArgumentIndex) and x.number < made.tensors else None
            for x in args
        ]

    def _push(self, values: list[Any]) -> Values:
        made = self.made
        given = dict(zip(made.by, values[self.first + made.numbers + made.tensors :], strict=True))
        tangents = [None if i is None else given.get(i) for i in self._arguments()]
        found = self.cls.jvp(self._context(values, "jvp"), *tangents)
        found = found if isinstance(found, tuple | list) else (found,)
        pushed: list[Any] = [None] * made.results
        for j, tangent in zip(self.outputs, found, strict=False):
            if j is not None:
                pushed[j] = tangent
        return pushed

    def _batch(self, values: list[Any], flags: Sequence[bool], size: Any) -> tuple[Values, Values]:
        callee = self.callee
        info = SimpleNamespace(batch_size=size, randomness="error")
        marks = callee.filled([*flags, *[None] * self.made.numbers])
        in_dims = pytrees.tree_map(lambda x: 0 if x is True else None, tuple(marks))
        out, out_dims = self.cls.vmap(info, in_dims, *callee.filled(values))
        flat = pytrees.broadcast_prefix(out_dims, out, lambda dim: dim is None)
        pairs = [
            (x, dim)
            for x, dim in zip(pytrees.leaves_of(out), flat, strict=True)
            if isinstance(x, torch.Tensor)
        ]
        tensors = [x if dim is None else x.movedim(dim, 0) for x, dim in pairs]
        return tensors, [dim is not None for _, dim in pairs]


@dataclass(frozen=True)
class _ArgumentIndex:
    """Placeholder of a value among the arguments."""

    number: int


def _place(x: torch.Tensor, known: Sequence[torch.Tensor]) -> int:
    """Return the index of a tensor among others, by identity; -1 if it is not there."""
    return next((i for i, other in enumerate(known) if other is x), -1)
