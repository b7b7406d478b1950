"""Control flow that is recorded: see NOTE [control flow in programs].

The note is in ``bridge/control/control_flow``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.control.bodies import (
    Apart,
    Layer,
    Wrapping,
    arranged,
    current_trace,
    needed_layers,
    peeled,
    wrapped_in,
)
from tsfunc.bridge.control.control_flow import Body
from tsfunc.bridge.control.control_flow_calls import call
from tsfunc.bridge.control.traced_bodies import Result, TracedBody, common, operands_of
from tsfunc.bridge.sizes.shape_rules import in_order
from tsfunc.bridge.sizes.symbolic_numbers import same_number
from tsfunc.bridge.trace.tracing import TraceLevel, is_traced
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel, seen_here
from tsfunc.dispatch.state import tls
from tsfunc.transforms.control.arguments import Batching
from tsfunc.transforms.control.by_example import call_of, vmaps_of
from tsfunc.transforms.control.operators import (
    AssociativeScan,
    Checkpoint,
    Scan,
    Switch,
    While,
)
from tsfunc.transforms.control.outputs import (
    as_tensor,
    check_branches,
    check_carried,
    check_pair,
    common_dtype,
    is_number,
    stacked_dim,
)


def record_switch(
    what: str, index: Any, branches: Sequence[Callable[..., Any]], names: Sequence[str],
    operands: Any, batching: Batching,
) -> Any:  # fmt: skip
    """Records a choice between branches; what the branch that is taken returns.

    Raises:
        NotApart: the choice differs from example to example of a vmap that can't be set apart.
    """
    trace = _trace()
    index = seen_here(index)
    apart = Apart(vmaps_of(index))
    if apart.levels:
        chosen = arranged(index, apart.wrapping(needed_layers(index)))
    else:
        chosen, _ = peeled(index)
    bodies = []
    for branch in branches:
        bodies.append(TracedBody(trace, lambda branch=branch: branch(*_seen(operands)), (), apart))
    for name, body in zip(names[1:], bodies[1:], strict=True):
        check_branches(
            what, (f"what {names[0]} returns", f"what {name} returns"), (bodies[0].out, body.out)
        )
    dtypes = [common_dtype(column) for column in zip(*(b.leaves for b in bodies), strict=True)]
    for body in bodies:
        body.settle(dtypes)
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
    op = Switch(what, made, batching)
    known = [r for r in results if r is not None]
    return filled(bodies[0], call_of(op, apart, trace, [chosen, *tensors], numbers, known))


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


def _is_active(level: TracerLevel) -> bool:
    return level in tls.state.levels


def as_traced(leaf: Any, trace: TraceLevel) -> Any:
    """A leaf of a carry as a tensor of the trace; what is neither tensor nor number is kept."""
    if is_number(leaf):
        leaf = as_tensor(leaf)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = seen_here(leaf)
    if isinstance(leaf, Tracer) and not is_traced(leaf) and not _is_active(leaf.dispatch_level):
        return trace.lift(leaf)  # of a level outside of the trace
    inner, wrapping = peeled(leaf)
    if getattr(inner, "dispatch_level", None) is trace:
        return leaf
    return wrapping.around(trace.lift(inner))


class Carry:
    """The carry of a loop that is recorded: which leaves are tensors, and their layouts.

    What is a number at first (NOTE [numbers among results] in ``outputs``) is one for the body
    until a step has shown of what dtype the results in its place are; it stays one if each step
    returns it as it is.

    Attributes:
        leaves: the first carry, flat.
        spec: its structure.
        numbers: the leaves that are numbers, by their places.
    """

    def __init__(self, trace: TraceLevel, init: Any, apart: Apart | None = None) -> None:
        self.trace, self.apart = trace, apart or Apart()
        leaves, self.spec = pytrees.flatten(init)
        self.numbers = {i: leaf for i, leaf in enumerate(leaves) if is_number(leaf)}
        self.leaves = [leaf if is_number(leaf) else as_traced(leaf, trace) for leaf in leaves]
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

    def given(self, tensors: Sequence[Any]) -> Any:
        """The same, with the numbers that were given in their places."""
        leaves = pytrees.flatten(self.tree(tensors))[0]
        return optree.tree_unflatten(
            self.spec, [self.numbers.get(i, leaf) for i, leaf in enumerate(leaves)]
        )

    def settled(self, body: TracedBody) -> bool:
        """Whether all numbers are of the types that a body returned in their places.

        Those that were not are now, and the body is to be traced with them. What the body returned
        is then made tensors.
        """
        same = True
        for i, number in self.numbers.items():
            known = self.leaves[i]
            if is_number(known) and same_number(known, body.leaves[i]):
                continue
            dtype = common_dtype((number, body.leaves[i]))
            if not isinstance(known, torch.Tensor) or known.dtype is not dtype:
                self.leaves[i] = as_traced(torch.full((), number, dtype=dtype), self.trace)
                self.needed[i] = needed_layers(self.leaves[i])
                same = False
        if same:
            rest = body.leaves[len(self.leaves) :]
            dtypes = [getattr(leaf, "dtype", None) for leaf in self.leaves]
            kept = [i for i, leaf in enumerate(self.leaves) if is_number(leaf)]
            body.settle([*dtypes, *[common_dtype((leaf,)) for leaf in rest]], kept)
        return same

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
            self.apart.wrapping(needs) if isinstance(leaf, torch.Tensor) else None
            for leaf, needs in zip(self.leaves, self.needed, strict=True)
        ]

    def wrappings_of_one(self) -> list[Wrapping | None]:
        """The layouts for an example of the vmaps that the body is traced without."""
        return [None if w is None else self.apart.without(w) for w in self.wrappings()]


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
    shape = [size, *value.shape]
    like = trace.fake_like(value, shape, in_order(shape))
    return Result(like, _one_dim_in(one.wrapping))


def _one_dim_in(wrapping: Wrapping) -> Wrapping:
    """The layout of physical values with one more dim in front."""
    return Wrapping(
        tuple(
            Layer(layer.level, None if layer.bdim is None else layer.bdim + 1)
            for layer in wrapping.layers
        )
    )


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
    if not along and isinstance(length, torch.SymInt):  # known when the program runs
        along = [as_traced(torch.arange(length), trace)]
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
        check_pair(what, body.out)
        new, ys = body.out
        check_carried(what, ("the carry", "the carry that the function returns"),
                      (carry.given(inputs), new), advice)  # fmt: skip
        if not carry.settled(body):
            continue
        needed = body.batched()
        if not carry.widened(needed[: len(carry.leaves)]):
            break
    y_spec = pytrees.structure_of(ys)
    y_leaves = body.leaves[len(carry.leaves) :]
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
    steps = size if isinstance(size, int) else None
    op = Scan(what, [made], len(inputs), len(along), steps, reverse)
    found = call(op, trace, [*inputs, *along, *tensors], numbers, [*kept, *stacked])
    rest = iter(found[len(kept) :])
    ys_found = [
        next(rest).movedim(0, stacked_dim(x.dim(), dim)) if isinstance(x, torch.Tensor) else None
        for x in y_leaves
    ]
    return carry.tree(found[: len(kept)]), optree.tree_unflatten(y_spec, ys_found)


def record_while(
    what: str, cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init: Any,
    choice: Any, unseen: Callable[[Any, Any, Any], Any], checkpoint: Checkpoint, advice: str,
) -> Any:  # fmt: skip
    """Records a loop: one node, whatever the number of its steps.

    Args:
        what: how errors call it.
        cond_fun: takes the carry, and says whether there is a step.
        body_fun: takes the carry, and returns the next.
        init: the first carry.
        choice: what the condition says of that; None where no vmap is to be set apart.
        unseen: makes a loop of a vmap whose conditions differ, where none is set apart: given the
            carry, the condition and the vmap.
        checkpoint: what reverse mode keeps of the steps.
        advice: what errors say is to be done.

    Raises:
        NotApart: a vmap can't be set apart.
    """
    names = ("the carry", "what the body returns")
    trace = _trace()
    carry = Carry(trace, init, Apart([] if choice is None else vmaps_of(choice)))
    while True:
        inputs = carry.inputs()
        apart = carry.apart
        body = TracedBody(trace, lambda *values: body_fun(carry.tree(values)), inputs, apart)
        check_carried(what, names, (carry.given(inputs), body.out), advice)
        if not carry.settled(body):
            continue
        condition = TracedBody(trace, lambda *values: cond_fun(carry.tree(values)), inputs, apart)
        condition.settle([torch.bool] * len(condition.leaves))
        differs = [x for x in condition.batched()[0].values() if x.bdim is not None]
        if differs and choice is None:
            tree = carry.tree(inputs)
            return unseen(tree, cond_fun(tree), differs[-1].level)
        if differs:  # as it may from the second step on, if the body batches what it carries
            more = vmaps_of(condition.leaves[0])
            carry.apart = Apart([*apart.levels.values(), *more])
        elif not carry.widened(body.batched()):
            break
    results = [r for r in body.end(carry.wrappings_of_one()) if r is not None]
    condition.end([Wrapping()])
    tensors, numbers, places = operands_of([condition, body], len(inputs))
    made = [
        Body(name, traced.level.graph, own)
        for name, traced, own in zip(("condition", "body"), (condition, body), places, strict=True)
    ]
    op = While(what, made, len(inputs), checkpoint)
    return carry.tree(call_of(op, carry.apart, trace, [*inputs, *tensors], numbers, results))


ELEMENTS = ("the elements", "what the function returns")


def record_associative_scan(
    fn: Callable[[Any, Any], Any], elems: Any, axes: Sequence[int], reverse: bool, advice: str
) -> Any:
    """Records an associative scan: one node, whatever its length.

    Args:
        fn: combines two slices.
        elems: what it goes along.
        axes: the dim to go along, of each leaf.
        reverse: whether it goes from the end.
        advice: what errors say is to be done.
    """
    what = "associative_scan"
    trace = _trace()
    leaves, spec = pytrees.flatten(elems)
    moved = [as_traced(x, trace).movedim(at, 0) for x, at in zip(leaves, axes, strict=True)]
    if reverse:
        moved = [x.flip(0) for x in moved]
    one = Carry(trace, [along_first(x).select(0, 0) for x in moved])
    while True:
        slices = one.inputs()
        body = TracedBody(
            trace,
            lambda *both: fn(
                optree.tree_unflatten(spec, both[: len(leaves)]),
                optree.tree_unflatten(spec, both[len(leaves) :]),
            ),
            [*slices, *slices],
        )
        check_carried(what, ELEMENTS, (optree.tree_unflatten(spec, slices), body.out), advice)
        body.settle([x.dtype for x in slices])
        if not one.widened(body.batched()):
            break
    wrappings = [w for w in one.wrappings() if w is not None]
    results = [r for r in body.end(wrappings) if r is not None]
    size = moved[0].shape[0]
    along = [arranged(x, _one_dim_in(w)) for x, w in zip(moved, wrappings, strict=True)]
    tensors, numbers, places = operands_of([body], 2 * len(leaves))
    op = AssociativeScan(what, [Body("combine", body.level.graph, places[0])], len(leaves))
    stacked = [stacked_result(r, size, trace) for r in results]
    found = call(op, trace, [*along, *tensors], numbers, stacked)
    done = [x.flip(0) for x in found] if reverse else found
    return optree.tree_unflatten(spec, [x.movedim(0, at) for x, at in zip(done, axes, strict=True)])
