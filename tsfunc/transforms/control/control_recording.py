"""Recording of control flow: see NOTE [control flow in programs].

The note is in ``bridge/control/control_flow``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.control.bodies import HiddenVmaps, needed_frames, rewrap_as
from tsfunc.bridge.control.control_flow import Body
from tsfunc.bridge.control.control_flow_calls import call_control_flow
from tsfunc.bridge.control.node_writes import memory_key
from tsfunc.bridge.control.traced_bodies import (
    TracedBody,
    TracedResult,
    common_order,
    have_same_strides,
    operands_of,
    order_of,
    union_of_frames,
    use_copies,
    written_outside,
)
from tsfunc.bridge.trace.trace_level import TraceLevel, current_trace
from tsfunc.bridge.tracers.draw_keys import (
    DrawCountSnapshot,
    count_draws,
    draw_counts,
    set_draw_counts,
)
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level
from tsfunc.bridge.tracers.nesting import is_of_active_level
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.bridge.tracers.tracer_stack import TracerStack, stack_of, unwrap_all
from tsfunc.bridge.tracers.user_queries import same_number
from tsfunc.dispatch.state import tls
from tsfunc.errors import DataDependentError
from tsfunc.ops.dims import dense_strides, is_expanded
from tsfunc.transforms.control.call_forms import Batching
from tsfunc.transforms.control.control_operators import (
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
from tsfunc.transforms.control.traced_vmap import call_for_examples, vmaps_of


def record_switch(
    label: str, index: Any, branches: Sequence[Callable[..., Any]], names: Sequence[str],
    operands: Any, batching: Batching,
) -> Any:  # fmt: skip
    """Record a choice between branches, and return the result of the branch that is taken.

    Raises:
        CannotUnbatch: a vmap whose examples choose differently can't be hidden.
    """
    trace = _trace()
    index = as_seen_by_current_level(index)
    hidden = HiddenVmaps(vmaps_of(index))
    if hidden.levels:
        chosen = rewrap_as(index, hidden.layout(needed_frames(index)))
    else:
        chosen, _ = unwrap_all(index)
    runs = [
        count_draws(
            lambda branch=branch: branch(*pytrees.tree_map(as_seen_by_current_level, operands))
        )
        for branch in branches
    ]
    bodies = [TracedBody(trace, run, (), hidden) for run in runs]
    written = written_outside(bodies)
    if written:  # NOTE [bodies without writes] in ``traced_bodies``

        def on_copies(run: Callable[[], Any]) -> Any:
            copies = use_copies(trace, written)
            return *run(), copies

        bodies = [TracedBody(trace, partial(on_copies, run), (), hidden) for run in runs]
    first, *_ = bodies[0].out
    for name, body in zip(names[1:], bodies[1:], strict=True):
        other, *_ = body.out
        check_branches(
            label, (f"the result of {names[0]}", f"the result of {name}"), (first, other)
        )
    dtypes = [common_dtype(column) for column in zip(*(b.leaves for b in bodies), strict=True)]
    for body in bodies:
        body.convert_results(dtypes)
    columns = zip(*(body.batched() for body in bodies), strict=True)
    stacks = [
        union_of_frames(column) if isinstance(leaf, torch.Tensor) else None
        for leaf, column in zip(bodies[0].leaves, columns, strict=True)
    ]
    # NOTE [layouts of results] in ``traced_bodies``.
    orders = [
        *map(common_order, zip(*(body.unwrapped_values(stacks) for body in bodies), strict=True))
    ]
    results, *_ = [body.end(stacks, orders) for body in bodies]
    tensors, numbers, places = operands_of(bodies, 0)
    if written:  # a derivative runs the bodies on the values that they got
        memories = set(map(memory_key, written))
        tensors = [x.clone() if memory_key(x) in memories else x for x in tensors]
    branch_bodies = [
        Body(name.replace(" ", "_"), body.level.graph, tuple(1 + at for at in places_of_body))
        for name, body, places_of_body in zip(names, bodies, places, strict=True)
    ]
    op = Switch(label, branch_bodies, batching)
    tensor_results = [r for r in results if r is not None]
    outputs = call_for_examples(op, hidden, trace, [chosen, *tensors], numbers, tensor_results)
    out, drawn, *values = fill_tensors(bodies[0], outputs)
    set_draw_counts(drawn)
    copy_back(written, *values)
    return out


def copy_back(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor] = ()) -> None:
    """Write the values of the copies that bodies have used into the tensors themselves."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def fill_tensors(body: TracedBody | Carry, tensors: Sequence[Any]) -> Any:
    """Return tensors in the structure of a body's results, or of a carry, with its other leaves."""
    values = iter(tensors)
    leaves = [next(values) if isinstance(x, torch.Tensor) else x for x in body.leaves]
    return optree.tree_unflatten(body.spec, leaves)


def _trace() -> TraceLevel:
    trace = current_trace()
    assert trace is not None
    return trace


def as_traced(leaf: Any, trace: TraceLevel) -> Any:
    """Return a leaf of a carry as a tensor of the trace; other leaves are unchanged."""
    if is_number(leaf):
        leaf = as_tensor(leaf)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = as_seen_by_current_level(leaf)
    if (
        isinstance(leaf, Tracer)
        and not is_of_active_level(leaf)
        and leaf.dispatch_level not in tls.state.levels
    ):
        return trace.lift(leaf)  # a value of a level outside of the trace
    inner, stack = unwrap_all(leaf)
    if getattr(inner, "dispatch_level", None) is trace:
        return leaf
    return stack.wrap(trace.lift(inner))


class Carry:
    """The carry of a recorded loop: its tensors and their layouts.

    A leaf that is a number at first (NOTE [numbers among results] in ``outputs``) is a number for
    the body until a step shows the dtype of the results in its place. The leaf stays a number if
    each step returns it unchanged.

    Attributes:
        spec: the structure of the carry.
        numbers: the leaves that are numbers, by position.
        copied: the positions of the leaves that the loop takes a copy of.
    """

    def __init__(self, trace: TraceLevel, init: Any, hidden: HiddenVmaps | None = None) -> None:
        self.trace, self.hidden = trace, hidden or HiddenVmaps()
        leaves, self.spec = pytrees.flatten(init)
        self.numbers = {i: leaf for i, leaf in enumerate(leaves) if is_number(leaf)}
        self.leaves = [leaf if is_number(leaf) else as_traced(leaf, trace) for leaf in leaves]
        self.needed = [needed_frames(leaf) for leaf in self.leaves]
        self.copied: set[int] = set()

    def inputs(self) -> list[Any]:
        """Return the tensors among the leaves, with their batch dims in front."""
        wrapped: list[Any] = []
        for i, (leaf, stack) in enumerate(zip(self.leaves, self.stacks(), strict=True)):
            if stack is None:
                continue
            tensor = rewrap_as(leaf, stack)
            if i in self.copied:  # the batching rule of clone may move batch dims
                tensor = rewrap_as(tensor.clone(memory_format=torch.contiguous_format), stack)
            wrapped.append(tensor)
        return wrapped

    def tree(self, tensors: Sequence[Any]) -> Any:
        """Return the carry with other tensors."""
        return fill_tensors(self, tensors)

    def tree_with_numbers(self, tensors: Sequence[Any]) -> Any:
        """Return the carry with other tensors, and the numbers of the first carry."""
        leaves = pytrees.flatten(self.tree(tensors))[0]
        return optree.tree_unflatten(
            self.spec, [self.numbers.get(i, leaf) for i, leaf in enumerate(leaves)]
        )

    def numbers_match(self, body: TracedBody) -> bool:
        """True if all numbers have the types that a body returned for them.

        Otherwise the numbers get these types, and the body must be traced again. In the end the
        numbers that the body returned become tensors.
        """
        same = True
        for i, number in self.numbers.items():
            current = self.leaves[i]
            if is_number(current) and same_number(current, body.leaves[i]):
                continue
            dtype = common_dtype((number, body.leaves[i]))
            if not isinstance(current, torch.Tensor) or current.dtype is not dtype:
                self.leaves[i] = as_traced(torch.full((), number, dtype=dtype), self.trace)
                self.needed[i] = needed_frames(self.leaves[i])
                same = False
        if same:
            rest = body.leaves[len(self.leaves) :]
            dtypes = [getattr(leaf, "dtype", None) for leaf in self.leaves]
            unchanged = [i for i, leaf in enumerate(self.leaves) if is_number(leaf)]
            body.convert_results([*dtypes, *[common_dtype((leaf,)) for leaf in rest]], unchanged)
        return same

    def add_frames(self, needed: Sequence[dict[int, Any]]) -> bool:
        """Add the tracers that a body's results need; True if there are new ones."""
        grown = False
        for frames, more in zip(self.needed, needed, strict=True):
            for depth, frame in more.items():
                if depth not in frames or (frames[depth].bdim is None and frame.bdim is not None):
                    frames[depth] = frame
                    grown = True
        return grown

    def orders(self, body: TracedBody, stacks: Sequence[TracerStack | None]) -> list[Any] | None:
        """Return the orders that a body's results are copied into, to be laid out as the carry is.

        None if a leaf of the carry has no order, and is copied from now on: the body must be traced
        again. See NOTE [layouts of results] in ``traced_bodies``.
        """
        orders: list[Any] = []
        before = len(self.copied)
        inputs = iter(body.given)
        for i, value in enumerate(body.unwrapped_values(stacks)[: len(self.leaves)]):
            carried = None if value is None else next(inputs)
            if carried is None or (have_same_strides(carried, value) and not is_expanded(carried)):
                orders.append(None)
                continue
            order = order_of(carried)
            if order is None:
                order = [*range(carried.dim())]
                self.copied.add(i)
            orders.append(order)
        return orders if len(self.copied) == before else None

    def stacks(self) -> list[TracerStack | None]:
        return [
            self.hidden.layout(needs) if isinstance(leaf, torch.Tensor) else None
            for leaf, needs in zip(self.leaves, self.needed, strict=True)
        ]

    def trace_step(
        self, run: Callable[..., Any], check: Callable[[Any, Any], None], slices: Sequence[Any] = ()
    ) -> tuple[list[Any], TracedBody]:
        """Return the tensors of the carry, and a body that returns numbers of the types it takes.

        Args:
            run: the step; it takes the tensors and the slices, and first returns the next carry.
            check: takes the carry and the result, and raises an error if they do not match.
        """
        while True:
            inputs = self.inputs()
            body = TracedBody(self.trace, run, [*inputs, *slices], self.hidden, by_value=True)
            check(self.tree_with_numbers(inputs), body.out)
            if self.numbers_match(body):
                return inputs, body

    def result_layout(self, body: TracedBody) -> tuple[list[Any], list[Any]] | None:
        """Return the stacks and orders with which the results of a step are laid out as the carry.

        None if the carry has changed for the results: the step must be traced again.
        """
        count, needed = len(self.leaves), body.batched()
        if self.add_frames(needed[:count]):
            return None
        stacks = [
            None if stack is None else self.hidden.input_layout(stack) for stack in self.stacks()
        ]
        stacks += [
            union_of_frames([needs]) if isinstance(leaf, torch.Tensor) else None
            for leaf, needs in zip(body.leaves[count:], needed[count:], strict=True)
        ]
        orders = self.orders(body, stacks)
        return None if orders is None else (stacks, orders)


def scan_dim_first(x: Any) -> Any:
    """Return a tensor whose physical value has the scanned dim first, then its batch dims."""
    return rewrap_as(x, stack_of(needed_frames(x)).shifted_by(1))


def stacked_result(one: TracedResult, size: Any, trace: TraceLevel) -> TracedResult:
    """Return the type of the stacked results, from that of one step's."""
    value = one.value
    shape = [size, *value.shape]
    like = trace.fake_like(value, shape, dense_strides(shape))
    return TracedResult(like, one.stack.shifted_by(1))


def record_scan(
    label: str, f: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, length: int | None,
    reverse: bool, dim: int, advice: str,
) -> tuple[Any, Any]:  # fmt: skip
    """Record a scan as one node, for any length."""
    trace = _trace()
    carry = Carry(trace, (init, draw_counts()))
    xs_leaves, xs_spec = pytrees.flatten(xs)
    along = [
        scan_dim_first(as_traced(x, trace).movedim(dim, 0)) for x in xs_leaves if x is not None
    ]
    slices = [x.select(0, 0) for x in along]
    if not along and isinstance(length, torch.SymInt):  # known when the program runs
        along = [as_traced(torch.arange(length), trace)]
        slices = [x.select(0, 0) for x in along]
    size = along[0].shape[0] if along else length

    def run(*values: Any) -> Any:
        rest = iter(values[len(values) - len(along) :])
        x = [None if x is None else next(rest) for x in xs_leaves]
        carried, drawn = carry.tree(values[: len(values) - len(along)])
        set_draw_counts(drawn)
        pair = f(carried, optree.tree_unflatten(xs_spec, x))
        check_pair(label, pair)
        return (pair[0], draw_counts()), pair[1]

    def check(before: Any, after: Any) -> None:
        names = ("the carry", "the carry that the function returns")
        check_carried(label, names, (before[0], after[0][0]), advice)

    layout = None
    while layout is None:
        inputs, body = carry.trace_step(run, check, slices)
        layout = carry.result_layout(body)
    if written := written_outside([body]):

        def f_on_copies(carried: Any, x: Any) -> Any:
            copies = use_copies(trace, written, carried[1])
            after, y = f(carried[0], x)
            return (after, copies), y

        copied = init, [x.clone() for x in written]
        (last, values), ys = record_scan(
            label, f_on_copies, copied, xs, length, reverse, dim, advice
        )
        copy_back(written, values)
        return last, ys
    y_spec, y_leaves = pytrees.structure_of(body.out[1]), body.leaves[len(carry.leaves) :]
    results = body.end(*layout)
    carry_results = [r for r in results[: len(carry.leaves)] if r is not None]
    stacked = [
        stacked_result(r, size, trace) for r in results[len(carry.leaves) :] if r is not None
    ]
    count = len(inputs) + len(along)
    tensors, numbers, places = operands_of([body], count)
    step = Body("body", body.level.graph, places[0])
    steps = size if isinstance(size, int) else None
    op = Scan(label, [step], len(inputs), len(along), steps, reverse)
    outputs = call_control_flow(
        op, trace, [*inputs, *along, *tensors], numbers, [*carry_results, *stacked]
    )
    rest = iter(outputs[len(carry_results) :])
    ys_found = [
        next(rest).movedim(0, stacked_dim(x.dim(), dim)) if isinstance(x, torch.Tensor) else None
        for x in y_leaves
    ]
    last, drawn = carry.tree(outputs[: len(carry_results)])
    set_draw_counts(drawn)
    return last, optree.tree_unflatten(y_spec, ys_found)


def record_while(
    label: str, cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init: Any,
    choice: Any, run_visible: Callable[[Any, Any, Any], Any], checkpoint: Checkpoint, advice: str,
    shown: Callable[[Any], Any] = lambda carry: carry,
) -> Any:  # fmt: skip
    """Record a loop as one node, for any number of steps.

    Args:
        cond_fun: takes the carry, and returns the condition of a step.
        body_fun: takes the carry, and returns the next carry.
        init: the first carry.
        choice: the condition of the first carry; None if no vmap may be hidden.
        run_visible: runs the loop of a vmap whose conditions differ, if no vmap is hidden; takes
            the carry, the condition and the vmap.
        shown: returns the user's part of a carry.

    Raises:
        CannotUnbatch: a vmap can't be hidden.
    """
    trace = _trace()
    carry = Carry(trace, init, HiddenVmaps([] if choice is None else vmaps_of(choice)))

    def check(before: Any, after: Any) -> None:
        names = ("the carry", "the result of the body")
        check_carried(label, names, (shown(before), shown(after)), advice)

    layout = None
    while layout is None:
        inputs, body = carry.trace_step(lambda *values: body_fun(carry.tree(values)), check)
        condition = TracedBody(
            trace, lambda *values: cond_fun(carry.tree(values)), inputs, carry.hidden,
            by_value=True,
        )  # fmt: skip
        condition.convert_results([torch.bool] * len(condition.leaves))
        differs = [x for x in condition.batched()[0].values() if x.bdim is not None]
        if differs and choice is None:
            tree = carry.tree(inputs)
            return run_visible(tree, cond_fun(tree), differs[-1].level)
        if differs:  # possible from the second step on, if the body batches its carry
            more = vmaps_of(condition.leaves[0])
            carry.hidden = HiddenVmaps([*carry.hidden.levels.values(), *more])
        else:
            layout = carry.result_layout(body)
    if written := written_outside([condition, body]):

        def body_on_copies(carried: Any) -> Any:
            copies = use_copies(trace, written, carried[1])
            return body_fun(carried[0]), copies

        def cond_on_copies(carried: Any) -> Any:
            use_copies(trace, written, carried[1])
            return cond_fun(carried[0])

        def in_sight(carried: Any, value: Any, level: Any) -> Any:
            return run_visible(carried[0], value, level), written

        copied = init, [x.clone() for x in written]
        last, values = record_while(
            label, cond_on_copies, body_on_copies, copied, choice, in_sight, checkpoint, advice,
            lambda carried: shown(carried[0]),
        )  # fmt: skip
        copy_back(written, values)
        return last
    results = [r for r in body.end(*layout) if r is not None]
    condition.end([TracerStack()])
    tensors, numbers, places = operands_of([condition, body], len(inputs))
    loop_bodies = [
        Body(name, traced.level.graph, places_of_body)
        for name, traced, places_of_body in zip(
            ("condition", "body"), (condition, body), places, strict=True
        )
    ]
    op = While(label, loop_bodies, len(inputs), checkpoint)
    return carry.tree(
        call_for_examples(op, carry.hidden, trace, [*inputs, *tensors], numbers, results)
    )


_OPEN_DRAWS = (
    "associative_scan: expected a function without random operators, because the scanned size is "
    'open in this program and the vmap has randomness="split". Give the scanned dim a fixed size '
    "in the descriptors, or draw the numbers before the scan and pass them as elements."
)


ELEMENTS = ("the elements", "the result of the function")


def record_associative_scan(
    fn: Callable[[Any, Any], Any], elems: Any, axes: Sequence[int], reverse: bool, advice: str
) -> Any:
    """Record an associative scan as one node, for any length.

    A body that draws random numbers can't be a node: the node combines slices one by one, and the
    function combines many slices with one draw.

    Args:
        axes: the scanned dim of each leaf.
        reverse: True to scan from the end.

    Returns:
        The scanned pytree, or None for a function that draws random numbers, if the length is
        fixed: the caller records each combination.

    Raises:
        DataDependentError: the function draws random numbers for each example, and the length is
            not fixed.
    """
    label = "associative_scan"
    trace = _trace()
    leaves, spec = pytrees.flatten(elems)
    moved = [as_traced(x, trace).movedim(at, 0) for x, at in zip(leaves, axes, strict=True)]
    if reverse:
        moved = [x.flip(0) for x in moved]
    one = Carry(trace, [scan_dim_first(x).select(0, 0) for x in moved])
    drew = False

    def run(*both: Any) -> Any:
        nonlocal drew
        before = DrawCountSnapshot()
        left, right = both[: len(leaves)], both[len(leaves) :]
        result = fn(optree.tree_unflatten(spec, left), optree.tree_unflatten(spec, right))
        drew = drew or not before.is_current()
        return result

    while True:
        slices = one.inputs()
        body = TracedBody(trace, run, [*slices, *slices], by_value=True)
        check_carried(label, ELEMENTS, (optree.tree_unflatten(spec, slices), body.out), advice)
        operators = [node.meta.get("op") for node in body.level.graph.nodes]
        if drew or any(getattr(op, "random", False) for op in operators):
            if isinstance(moved[0].shape[0], int):
                return None
            if drew:
                raise DataDependentError(_OPEN_DRAWS)
        body.convert_results([x.dtype for x in slices])
        if not one.add_frames(body.batched()):
            break
    stacks = [stack for stack in one.stacks() if stack is not None]
    results = [r for r in body.end(stacks) if r is not None]
    size = moved[0].shape[0]
    along = [rewrap_as(x, stack.shifted_by(1)) for x, stack in zip(moved, stacks, strict=True)]
    tensors, numbers, places = operands_of([body], 2 * len(leaves))
    op = AssociativeScan(label, [Body("combine", body.level.graph, places[0])], len(leaves))
    stacked = [stacked_result(r, size, trace) for r in results]
    outputs = call_control_flow(op, trace, [*along, *tensors], numbers, stacked)
    done = [x.flip(0) for x in outputs] if reverse else outputs
    return optree.tree_unflatten(spec, [x.movedim(0, at) for x, at in zip(done, axes, strict=True)])
