"""Control flow whose choice differs from example to example of a vmap inside of a trace.

Its bodies are traced for one example, and the call is one for a batch of calls, which runs lanes
when the program runs: NOTE [levels set apart] in ``bridge/control/bodies``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tsfunc.bridge.control.attempts import NotApart
from tsfunc.bridge.control.bodies import Apart, needed_layers, peeled
from tsfunc.bridge.control.control_flow import Body, ControlFlow
from tsfunc.bridge.control.control_flow_calls import call
from tsfunc.bridge.control.lanes import LaneLevel
from tsfunc.bridge.control.taking_over import refused_write
from tsfunc.bridge.control.traced_bodies import Result
from tsfunc.bridge.sizes.shape_rules import in_order
from tsfunc.bridge.trace.tracing import TraceLevel
from tsfunc.bridge.tracers.batch_tracer import BatchLevel
from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.program.passes.effects import is_random, writes
from tsfunc.transforms.control.derived import Mapped, Operator
from tsfunc.transforms.control.operators import While


def vmaps_of(value: Any) -> list[BatchLevel]:
    """The vmaps that a choice is batched by.

    Raises:
        NotApart: one of them can't be set apart: it stands in another's place, or splits.
    """
    found = []
    for layer in needed_layers(value).values():
        level = layer.level
        if layer.bdim is None or not isinstance(level, BatchLevel):
            continue
        if isinstance(level, LaneLevel) or level.origin is not level or level.splitter is not None:
            raise NotApart(level.origin.whole)
        found.append(level)
    return found


def call_of(
    op: Operator, apart: Apart, trace: TraceLevel, tensors: Sequence[Any], numbers: Sequence[Any],
    results: Sequence[Result],
) -> tuple[Any, ...]:  # fmt: skip
    """Calls an operator, for each example of the vmaps that its bodies were traced without.

    Args:
        op: the operator for one example.
        apart: the vmaps.
        trace: what records the call.
        tensors: what it is called with, laid out as `apart` has it.
        numbers: the symbolic numbers after these.
        results: what is known of its results for one example.

    Raises:
        NotApart: its bodies draw random numbers, or may; or a branch writes into an operand, which
            may be meant for it alone.
        RuntimeError: a loop's body writes into what it closes over.
    """
    if not apart.levels:
        return call(op, trace, tensors, numbers, results)
    columns = list(zip(*(apart.flags(peeled(x)[1]) for x in tensors), strict=True))
    level = next(iter(apart.levels.values()))
    batched = {i for flags in columns for i, each in enumerate(flags) if each}
    written = {i: by for body in op.bodies for i, by in _written(body).items() if i in batched}
    if isinstance(op, While):
        for i, by in written.items():
            if i >= op.carried:
                raise RuntimeError(refused_write(op.name, by, tuple(tensors[i].shape), level))
    elif written:
        raise NotApart(level.origin.whole)
    if any(is_random(node) for body in op.bodies for node in body.graph.nodes):
        raise NotApart(level.origin.whole)
    mapped = op
    for flags in reversed(columns):  # the innermost vmap first
        mapped = Mapped(mapped, flags)
    sizes = [apart.levels[depth].batch_size for depth in sorted(apart.levels)]
    return call(mapped, trace, tensors, numbers, [_of_all(r, sizes, apart, trace) for r in results])


def _written(body: Body) -> dict[int, str]:
    """The numbers of the operands that a body writes into, or into views of them, and by what."""
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    numbers = dict(zip(inputs, body.inputs, strict=True))
    found: dict[Any, str] = {}
    for node in body.graph.nodes:
        if isinstance(node.target, ControlFlow):
            for inner in node.target.bodies:
                found |= {_base(node.args[i]): by for i, by in _written(inner).items()}
        elif writes(node):
            found[_base(node.args[0])] = node.meta["op"].name.removeprefix("aten::")
    return {numbers[node]: by for node, by in found.items() if node in numbers}


def _base(node: Any) -> Any:
    """What a node is a view of, or has been written into."""
    op = node.meta.get("op")
    while isinstance(op, TorchOperator) and (op.is_view or op.writes):
        node = node.args[0]
        op = node.meta.get("op")
    return node


def _of_all(one: Result, sizes: Sequence[Any], apart: Apart, trace: TraceLevel) -> Result:
    shape = (*sizes, *one.value.shape)
    value = trace.fake_like(one.value, shape, in_order(shape))
    return Result(value, apart.around_result(one.wrapping))
