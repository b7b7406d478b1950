"""Capture: a function run once on traced tensors, its operators recorded."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import optree
import torch
import torch.fx

from tsfunc import pytrees
from tsfunc.bridge import torch_state
from tsfunc.bridge.factories import watching_factories, watching_random
from tsfunc.bridge.marked import settle_all
from tsfunc.bridge.symbols import Symbols, size_node, solved_node
from tsfunc.bridge.tracing import Lifting, TraceLevel, TraceTracer, node_of_output, ways_out
from tsfunc.bridge.untyped import without_stand_ins
from tsfunc.dispatch import state
from tsfunc.dispatch.places import condition_of, place_of, source_of
from tsfunc.errors import ClosureError, DataDependentError, TypeCheckError
from tsfunc.program.codegen import generate
from tsfunc.program.constraints import check_needs
from tsfunc.program.guards import variables_of
from tsfunc.program.inputs import InputSpec, ScalarSpec, sizes_of_call, solving_order
from tsfunc.program.instances import Instances
from tsfunc.program.passes import simplify
from tsfunc.program.program import Program
from tsfunc.program.untyped import StandIn
from tsfunc.program.updates import Update
from tsfunc.types import Dim
from tsfunc.types.descriptors import Descriptor
from tsfunc.types.signatures import signature_of


def capture(
    func: Callable[..., Any],
    name: str,
    flat: Sequence[Any],
    tree: optree.PyTreeSpec,
    inputs: Sequence[InputSpec],
    bounds: Mapping[str, Dim],
    what: str = "specialize",
    instances: Instances | None = None,
    untyped: Mapping[int, StandIn] | None = None,
    scalars: Sequence[ScalarSpec] = (),
    described: Mapping[str, Descriptor] | None = None,
) -> Program:
    """Traces a function.

    Args:
        func: takes what ``tree`` unflattens to: a tuple of (args, kwargs).
        name: how errors and the program call it.
        flat: the flattened arguments; those that are no tensors are burnt in.
        tree: their structure.
        inputs: the tensors among them.
        bounds: the named dims that stay symbolic.
        what: which transform it is traced for.
        instances: the objects whose attributes are watched. The tensors among what is read of
            arguments are inputs of the program that come after the flattened arguments.
        untyped: the arguments of type ``Any``, with which nothing may be computed.
        scalars: the numbers among the arguments that are inputs.
        described: the descriptors, by parameter, for errors.

    Raises:
        ConstraintViolation: the function's course depends on the size of a named dim.
        TypeCheckError: it reads what can be neither compared nor lifted, or assigns to an object.
        DataDependentError: it uses a tensor as a Python number or bool.
    """
    symbols = Symbols(bounds, sizes_of_call(inputs), {spec.name: spec.value for spec in scalars})
    instances = instances or Instances(name)
    level, out = _traced(
        f"{what}({name})", func, flat, tree, inputs, bounds, symbols, instances, untyped or {},
        scalars,
    )  # fmt: skip
    updates = instances.finish()
    leaves, out_tree = pytrees.flatten(without_stand_ins(out))
    level.graph.output(tuple(node_of_output(leaf, level) for leaf in (*leaves, *updates.tensors)))
    symbols.record_in(None, {})
    check_needs(name, symbols.needs(), bounds, sizes_of_call(inputs), described or {})
    reached = {id(x): len(flat) + i for i, x in enumerate(instances.held.facts.values)}
    assigned = tuple(replace(each, owner=len(flat) + each.owner) for each in updates.updates)
    frozen = instances.held.closure == "freeze"
    if frozen:
        _check_frozen(name, level, reached)
    positions = [*(spec.position for spec in inputs), *(spec.position for spec in scalars)]
    program = _finish(name, level, positions, reached, out_tree, symbols, assigned, frozen)
    conditions = symbols.conditions(variables_of(bounds, scalars))
    return replace(program, conditions=tuple(conditions)) if conditions else program


def outline(
    what: str,
    func: Callable[..., Any],
    flat: Sequence[Any],
    tree: optree.PyTreeSpec,
    inputs: Sequence[InputSpec],
) -> Any:
    """What a function returns for inputs of fixed sizes, with fake tensors in place of tensors.

    Args:
        what: how errors call the trace.
        func, flat, tree, inputs: as for :func:`capture`.

    Raises:
        DataDependentError: the function uses a tensor as a Python number or bool.
    """
    level, out = _traced(what, func, flat, tree, inputs, {}, Symbols({}), Instances(what), {}, ())

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if isinstance(leaf, TraceTracer) and leaf.dispatch_level is level:
            return leaf.value
        return level.lift(leaf).value

    return pytrees.tree_map(fake, out)


def _traced(
    what: str,
    func: Callable[..., Any],
    flat: Sequence[Any],
    tree: optree.PyTreeSpec,
    inputs: Sequence[InputSpec],
    bounds: Mapping[str, Dim],
    symbols: Symbols,
    instances: Instances,
    untyped: Mapping[int, StandIn],
    scalars: Sequence[ScalarSpec],
) -> tuple[TraceLevel, Any]:
    """Traces a function outside of all levels; the trace's level, and what it returns."""
    with torch_state.outside_all_levels(), state.outside_all_levels():
        level = TraceLevel(what, symbols)
        try:
            return level, _run(
                what, level, func, flat, tree, inputs, bounds, symbols, instances, untyped, scalars
            )
        except BaseException:
            instances.put_back()
            raise


def _run(
    what: str,
    level: TraceLevel,
    func: Callable[..., Any],
    flat: Sequence[Any],
    tree: optree.PyTreeSpec,
    inputs: Sequence[InputSpec],
    bounds: Mapping[str, Dim],
    symbols: Symbols,
    instances: Instances,
    untyped: Mapping[int, StandIn],
    scalars: Sequence[ScalarSpec],
) -> Any:
    """Runs the function on traced tensors; what it returns."""
    traced = list(flat)
    with level, watching_random(), watching_factories():
        tracers = [_input(level, spec, symbols) for spec in inputs]
        numbers = {spec.name: _number(level, spec, symbols) for spec in scalars}
        sizes = _size_nodes(level, inputs, tracers, bounds)
        symbols.record_in(level.graph, {**sizes, **numbers})
        for scalar in scalars:
            traced[scalar.position] = symbols.scalars[scalar.name]
        for spec, tracer in zip(inputs, tracers, strict=True):
            traced[spec.position] = tracer
        for position, stand_in in untyped.items():
            traced[position] = stand_in(traced[position])
        args, kwargs = pytrees.unflatten(tree, traced)
        try:
            with Lifting(level), instances:
                out = func(*args, **kwargs)
        except Exception as error:
            _explain(what, symbols, error)
            raise
        settle_all(out)
        _check_containers(what, func, args, kwargs, traced, tree)
        return out


def _explain(what: str, symbols: Symbols, error: Exception) -> None:
    """Puts an error of torch's about sizes in the user's names.

    Raises:
        DataDependentError: a size that depends on data was asked for as a Python value.
    """
    text, about_data = symbols.explained(error)
    if about_data:
        place = place_of(error)
        asked = condition_of(place) or text
        raise DataDependentError(
            f"{what}: {text} depends on data, which a trace does not have, and is asked at "
            f"{place}{source_of(place, ': ')}\nIf it always holds say so before, with "
            f"torch._check({asked}): the program then checks it when it runs. {ways_out()}"
        ) from None
    if len(error.args) == 1 and isinstance(error.args[0], str) and text != error.args[0]:
        error.args = (text,)


def _check_containers(
    what: str,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    leaves: Sequence[Any],
    tree: optree.PyTreeSpec,
) -> None:
    """Refuses a function that changes a list or dict that it was given, which a program can't.

    Raises:
        TypeCheckError: it did.
    """
    now, structure = pytrees.flatten((args, kwargs))
    if structure == tree and all(a is b for a, b in zip(now, leaves, strict=True)):
        return
    given_args, given_kwargs = pytrees.unflatten(tree, leaves)
    pairs = [(str(i), given_args[i], each) for i, each in enumerate(args)]
    pairs += [(name, given_kwargs[name], each) for name, each in kwargs.items()]
    names = list(signature_of(func).parameters)
    for name, before, after in pairs:
        (some, one), (others, other) = pytrees.flatten(before), pytrees.flatten(after)
        if one != other or any(a is not b for a, b in zip(some, others, strict=True)):
            at = int(name) if name.isdigit() else -1
            name = names[at] if 0 <= at < len(names) else name
            raise TypeCheckError(
                f"{what}: the function changes the {type(after).__name__} that it is given as "
                f"`{name}`, or one inside of it. A program is given its elements alone, and can't "
                f"change the caller's: return what is new, or change a copy."
            )


def _input(level: TraceLevel, spec: InputSpec, symbols: Symbols) -> TraceTracer:
    """The traced tensor for an argument: its fixed sizes, and symbols for its named dims."""
    example = spec.example
    shape = spec.shape(symbols.sizes)
    like = level.fake_like(example, shape, _strides(example, shape))
    return level.input(spec.name, like, example.requires_grad)


def _number(level: TraceLevel, spec: ScalarSpec, symbols: Symbols) -> torch.fx.Node:
    """The input for a number."""
    node = _named(level.graph.placeholder(spec.name), spec.name)
    node.meta["number"] = symbols.scalars[spec.name]
    return node


def _strides(example: torch.Tensor, shape: Sequence[Any]) -> list[Any]:
    """The example's strides; of a shape with symbols, those of the same order of dims."""
    strides = example.stride()
    if all(isinstance(size, int) for size in shape):
        return list(strides)
    order = sorted(range(len(shape)), key=lambda i: (strides[i], -i))
    found: list[Any] = [0] * len(shape)
    step: Any = 1
    for i in order:
        found[i] = step
        step = step * shape[i]
    return found


def _size_nodes(
    level: TraceLevel,
    inputs: Sequence[InputSpec],
    tracers: Sequence[TraceTracer],
    bounds: Mapping[str, Dim],
) -> dict[str, torch.fx.Node]:
    """The node of each named dim: the size of the first input that has it, or worked out of one."""
    nodes: dict[str, torch.fx.Node] = {}
    for spec, tracer in zip(inputs, tracers, strict=True):
        for i, dim in enumerate(spec.dims):
            if isinstance(dim, Dim) and dim.name in bounds and dim.name not in nodes:
                nodes[dim.name] = _named(size_node(level.graph, tracer.node, i), dim.name)
    tensors = {spec.position: tracer for spec, tracer in zip(inputs, tracers, strict=True)}
    for position, i, expression, name in solving_order(inputs, nodes):
        if name is not None and name in bounds:
            size = size_node(level.graph, tensors[position].node, i)
            nodes[name] = _named(solved_node(level.graph, size, expression.text, name, nodes), name)
    return nodes


def _named(node: torch.fx.Node, name: str) -> torch.fx.Node:
    """A node that is the size of a named dim."""
    node.meta["expr"] = name
    node.meta["value"] = operator.itemgetter(name)
    return node


def _check_frozen(name: str, level: TraceLevel, reached: Mapping[int, int]) -> None:
    """Refuses a program that writes into tensors that it has copies of.

    Raises:
        ClosureError: it does.
    """
    memory = {
        tracer.value.untyped_storage()._cdata
        for tensor, tracer in level.lifted.values()
        if id(tensor) not in reached
    }
    for node in level.graph.nodes:
        op = node.meta.get("op")
        for i in op.written if op is not None else ():
            target = node.args[i] if i < len(node.args) else None
            value = target.meta.get("val") if isinstance(target, torch.fx.Node) else None
            if value is not None and value.untyped_storage()._cdata in memory:
                raise ClosureError(
                    f'specialize({name}, closure="freeze"): {op.name} writes into a tensor that '
                    f"is no argument, and is burnt in. Make it an argument, or use "
                    f'closure="guard".'
                )


def _finish(
    name: str,
    level: TraceLevel,
    positions: list[int],
    reached: Mapping[int, int],
    out_tree: optree.PyTreeSpec,
    symbols: Symbols,
    updates: tuple[Update, ...],
    frozen: bool,
) -> Program:
    """The program of a recorded graph; `reached` has the positions of tensors of arguments."""
    graph = level.graph
    outside = [str(tracer.node.target) for _, tracer in level.lifted.values()]
    constants = simplify(name, graph, outside)
    used = {node for node in graph.nodes if node.op == "get_attr"}
    lifted: dict[str, torch.Tensor] = {node: constants[node] for node in constants}
    for tensor, tracer in level.lifted.values():
        if tracer.node not in used:
            continue
        if id(tensor) in reached:
            _make_input(graph, tracer.node)
            positions.append(reached[id(tensor)])
        else:
            lifted[str(tracer.node.target)] = tensor.detach().clone() if frozen else tensor
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            node.meta["dims"] = tuple(symbols.spell_size(size) for size in value.shape)
    source, run = generate(name, graph, positions, lifted, updates)
    return Program(
        name, graph, tuple(positions), lifted, out_tree, source, run, frozenset(constants), updates
    )


def _make_input(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Makes a tensor that was read from outside an input of the graph, after the others."""
    after = next(each for each in graph.nodes if each.op != "placeholder")
    with graph.inserting_before(after):
        made = graph.placeholder(node.name)
    made.meta = node.meta
    node.replace_all_uses_with(made)
    graph.erase_node(node)
