"""Control flow that is recorded: NOTE [control flow in programs] in ``bridge/control_flow``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.bodies import (
    Layer,
    Wrapping,
    arranged,
    current_trace,
    needed_layers,
    peeled,
    wrapped_in,
)
from tsfunc.bridge.control_flow import (
    Body,
    ControlFlow,
    Result,
    TracedBody,
    call,
    common,
    operands_of,
)
from tsfunc.bridge.tracer import seen_here
from tsfunc.bridge.tracing import TraceLevel
from tsfunc.transforms.arguments import with_places
from tsfunc.transforms.control.outputs import (
    check_branches,
    check_carried,
    none_stacked,
    slice_like,
)
from tsfunc.transforms.forward import jvp
from tsfunc.transforms.outlines import eval_shape
from tsfunc.transforms.reverse import vjp


class Operator(ControlFlow):
    """Control flow of a program; its derivatives are operators of a program too."""

    def pullback(self, count: int, by: Sequence[int], of: Sequence[int]) -> ControlFlow:
        return _Pullback(self, count, by, of)

    def pushforward(self, count: int, by: Sequence[int]) -> ControlFlow:
        return _Pushforward(self, count, by)


class _Pullback(Operator):
    def __init__(self, of_op: Operator, count: int, by: Sequence[int], of: Sequence[int]) -> None:
        super().__init__(f"{of_op.name}_pullback", of_op.bodies)
        self.op, self.count, self.by, self.of = of_op, count, tuple(by), tuple(of)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        inputs = operands[: self.count]
        cotangents = operands[self.count : self.count + len(self.of)]
        numbers = operands[self.count + len(self.of) :]

        def run(*chosen: Any) -> tuple[Any, ...]:
            found = self.op(*with_places(inputs, self.by, chosen), *numbers)
            return tuple(found[j] for j in self.of)

        _, pull = vjp(run, *(inputs[i] for i in self.by))
        pulled: tuple[Any, ...] = pull(cotangents)
        return pulled


class _Pushforward(Operator):
    def __init__(self, of_op: Operator, count: int, by: Sequence[int]) -> None:
        super().__init__(f"{of_op.name}_pushforward", of_op.bodies)
        self.op, self.count, self.by = of_op, count, tuple(by)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        inputs = operands[: self.count]
        tangents = operands[self.count : self.count + len(self.by)]
        numbers = operands[self.count + len(self.by) :]

        def run(*chosen: Any) -> tuple[Any, ...]:
            return self.op(*with_places(inputs, self.by, chosen), *numbers)

        _, pushed = jvp(run, tuple(inputs[i] for i in self.by), tuple(tangents))
        found: tuple[Any, ...] = pushed
        return found


class Switch(Operator):
    """``cond`` and ``switch``: the index, then what the branches use."""

    def __init__(self, name: str, bodies: Sequence[Body], run: Callable[..., Any]) -> None:
        super().__init__(name, bodies)
        self.run = run

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self.run(operands[0], self.bodies, operands)
        return found


class While(Operator):
    """``while_loop``: the carry, then what condition and body use."""

    def __init__(
        self, name: str, bodies: Sequence[Body], carried: int, run: Callable[..., Any]
    ) -> None:
        super().__init__(name, bodies)
        self.carried, self.run = carried, run

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        rest = operands[self.carried :]
        condition, body = self.bodies
        found: tuple[Any, ...] = self.run(
            lambda carry: condition(*carry, *rest)[0],
            lambda carry: body(*carry, *rest),
            operands[: self.carried],
        )
        return found


class Scan(Operator):
    """``scan``: the carry, what it goes along, then what the body uses."""

    def __init__(
        self, name: str, bodies: Sequence[Body], carried: int, along: int, length: int | None,
        reverse: bool,
    ) -> None:  # fmt: skip
        super().__init__(name, bodies)
        self.carried, self.along, self.length, self.reverse = carried, along, length, reverse

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        carried, stop = self.carried, self.carried + self.along
        carry, along, rest = operands[:carried], operands[carried:stop], operands[stop:]
        (body,) = self.bodies
        if not (along[0].shape[0] if along else self.length):
            none = [slice_like(x, 0) for x in along]
            types = eval_shape(body, *carry, *none, *rest)[carried:]
            return (*carry, *none_stacked(tuple(types), 0))
        step: Any = body.function
        results: list[Sequence[Any]] = []
        for row in self.rows(along):
            found = step((*carry, *row, *rest))
            carry = found[:carried]
            results.append(found[carried:])
        if self.reverse:
            results.reverse()
        return (*carry, *[torch.stack(column) for column in zip(*results, strict=True)])

    def rows(self, columns: Sequence[torch.Tensor]) -> Iterable[Sequence[Any]]:
        """What each step gets of what the scan goes along, in their order."""
        if not columns:
            assert self.length is not None
            return itertools.repeat((), self.length)
        slices = [x.unbind(0) for x in columns]
        if self.reverse:
            slices = [part[::-1] for part in slices]
        return zip(*slices, strict=True)


def record_switch(
    what: str, index: Any, branches: Sequence[Callable[..., Any]], names: Sequence[str],
    operands: Any, run: Callable[..., Any],
) -> Any:  # fmt: skip
    """Records a choice between branches; what the branch that is taken returns."""
    trace = _trace()
    inner, _ = peeled(seen_here(index))
    bodies = []
    for branch in branches:
        bodies.append(TracedBody(trace, lambda branch=branch: branch(*_seen(operands)), ()))
    for name, body in zip(names[1:], bodies[1:], strict=True):
        check_branches(
            what, (f"what {names[0]} returns", f"what {name} returns"), (bodies[0].out, body.out)
        )
    columns = zip(*(body.batched() for body in bodies), strict=True)
    wrappings = [
        common(column) if isinstance(leaf, torch.Tensor) else None
        for leaf, column in zip(bodies[0].leaves, columns, strict=True)
    ]
    ended = [body.end(wrappings) for body in bodies]
    results = ended[0]
    tensors, numbers, places = operands_of(bodies, 0)
    made = [
        Body(name.replace(" ", "_"), body.level.graph, tuple(1 + at for at in own))
        for name, body, own in zip(names, bodies, places, strict=True)
    ]
    op = Switch(what, made, run)
    found = call(op, trace, [inner, *tensors], numbers, [r for r in results if r is not None])
    return filled(bodies[0], found)


def _seen(operands: Any) -> Any:
    return pytrees.tree_map(seen_here, operands)


def filled(body: TracedBody, found: Sequence[Any]) -> Any:
    """Results in the structure of what a body returned, with what is no tensor in its place."""
    values = iter(found)
    leaves = [next(values) if isinstance(x, torch.Tensor) else x for x in body.leaves]
    return optree.tree_unflatten(body.spec, leaves)


def _trace() -> TraceLevel:
    trace = current_trace()
    assert trace is not None
    return trace


def as_traced(leaf: Any, trace: TraceLevel) -> Any:
    """A leaf of a carry as a tensor of the trace; what is neither tensor nor number is kept."""
    if isinstance(leaf, bool | int | float | complex):
        leaf = torch.tensor(leaf)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = seen_here(leaf)
    inner, wrapping = peeled(leaf)
    if getattr(inner, "dispatch_level", None) is trace:
        return leaf
    return wrapping.around(trace.lift(inner))


class Carry:
    """The carry of a loop that is recorded: which leaves are tensors, and their layouts."""

    def __init__(self, trace: TraceLevel, init: Any) -> None:
        self.trace = trace
        self.leaves, self.spec = pytrees.flatten(init)
        self.leaves = [as_traced(leaf, trace) for leaf in self.leaves]
        self.needed = [needed_layers(leaf) for leaf in self.leaves]

    def inputs(self) -> list[Any]:
        """The tensors among the leaves, laid out."""
        return [
            arranged(leaf, wrapping)
            for leaf, wrapping in zip(self.leaves, self.wrappings(), strict=True)
            if wrapping is not None
        ]

    def tree(self, tensors: Sequence[Any]) -> Any:
        """The carry with other tensors in it."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        return optree.tree_unflatten(self.spec, leaves)

    def widened(self, needed: Sequence[dict[int, Any]]) -> bool:
        """Takes over what a body's results need; whether that is more than was known."""
        grown = False
        for own, more in zip(self.needed, needed, strict=True):
            for depth, layer in more.items():
                if depth not in own or (own[depth].bdim is None and layer.bdim is not None):
                    own[depth] = layer
                    grown = True
        return grown

    def wrappings(self) -> list[Wrapping | None]:
        return [
            common([needs]) if isinstance(leaf, torch.Tensor) else None
            for leaf, needs in zip(self.leaves, self.needed, strict=True)
        ]


def along_first(x: Any) -> Any:
    """A tensor whose physical values have the dim to go along first, batch dims after it."""
    needed = needed_layers(x)
    layers = {
        depth: Layer(layer.level, None if layer.bdim is None else 1)
        for depth, layer in needed.items()
    }
    return arranged(x, wrapped_in(layers))


def stacked_result(one: Result, size: Any, trace: TraceLevel) -> Result:
    """What is known of the stacked results of all steps, from those of one."""
    value = one.value
    like = trace.fake_like(value, *_stacked_shape(value, size))
    layers = [
        Layer(layer.level, None if layer.bdim is None else layer.bdim + 1)
        for layer in one.wrapping.layers
    ]
    return Result(like, Wrapping(tuple(layers)))


def _stacked_shape(value: torch.Tensor, size: Any) -> tuple[list[Any], list[Any]]:
    shape = [size, *value.shape]
    strides: list[Any] = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        strides[i] = strides[i + 1] * shape[i + 1]
    return shape, strides


def record_scan(
    what: str, f: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, length: int | None,
    reverse: bool, dim: int, advice: str,
) -> tuple[Any, Any]:  # fmt: skip
    """Records a scan: one node, whatever its length."""
    trace = _trace()
    carry = Carry(trace, init)
    xs_leaves, xs_spec = pytrees.flatten(xs)
    along = [along_first(as_traced(x, trace).movedim(dim, 0)) for x in xs_leaves if x is not None]
    slices = [x.select(0, 0) for x in along]
    size = along[0].shape[0] if along else length

    def run(*values: Any) -> Any:
        rest = iter(values[len(values) - len(along) :])
        x = [None if x is None else next(rest) for x in xs_leaves]
        carried = carry.tree(values[: len(values) - len(along)])
        return f(carried, optree.tree_unflatten(xs_spec, x))

    while True:
        inputs = carry.inputs()
        body = TracedBody(trace, run, [*inputs, *slices])
        new, ys = body.out
        check_carried(what, ("the carry", "the carry that the function returns"),
                      (carry.tree(inputs), new), advice)  # fmt: skip
        needed = body.batched()
        if not carry.widened(needed[: len(carry.leaves)]):
            break
    y_leaves, y_spec = pytrees.flatten(ys)
    y_wrappings = [
        common([needs]) if isinstance(leaf, torch.Tensor) else None
        for leaf, needs in zip(y_leaves, needed[len(carry.leaves) :], strict=True)
    ]
    results = body.end([*carry.wrappings(), *y_wrappings])
    kept = [r for r in results[: len(carry.leaves)] if r is not None]
    stacked = [
        stacked_result(r, size, trace) for r in results[len(carry.leaves) :] if r is not None
    ]
    count = len(inputs) + len(along)
    tensors, numbers, places = operands_of([body], count)
    made = Body("body", body.level.graph, places[0])
    op = Scan(what, [made], len(inputs), len(along), length, reverse)
    found = call(op, trace, [*inputs, *along, *tensors], numbers, [*kept, *stacked])
    rest = iter(found[len(kept) :])
    ys_found = [
        next(rest).movedim(0, dim) if isinstance(x, torch.Tensor) else None for x in y_leaves
    ]
    return carry.tree(found[: len(kept)]), optree.tree_unflatten(y_spec, ys_found)


def record_while(
    what: str, cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init: Any,
    unseen: Callable[[Any, Any, Any], Any], run: Callable[..., Any], advice: str,
) -> Any:  # fmt: skip
    """Records a loop: one node, whatever the number of its steps."""
    trace = _trace()
    carry = Carry(trace, init)
    while True:
        inputs = carry.inputs()
        tree = carry.tree(inputs)
        body = TracedBody(trace, lambda *values: body_fun(carry.tree(values)), inputs)
        check_carried(what, ("the carry", "what the body returns"), (tree, body.out), advice)
        condition = TracedBody(trace, lambda *values: cond_fun(carry.tree(values)), inputs)
        needed = condition.batched()[0]
        if any(layer.bdim is not None for layer in needed.values()):
            return unseen(tree, cond_fun(tree), needed[max(needed)].level)
        if not carry.widened(body.batched()):
            break
    results = [r for r in body.end(carry.wrappings()) if r is not None]
    condition.end([Wrapping()])
    tensors, numbers, places = operands_of([condition, body], len(inputs))
    made = [
        Body(name, traced.level.graph, own)
        for name, traced, own in zip(("condition", "body"), (condition, body), places, strict=True)
    ]
    op = While(what, made, len(inputs), run)
    return carry.tree(call(op, trace, [*inputs, *tensors], numbers, results))
