"""Capture: run a function once on traced tensors, and record its operators.

See NOTE [backward passes in programs] in ``bridge/trace/lifted_tensors.py``.

NOTE [collections while tracing]
A trace makes hundreds of objects per operator and keeps most of them. Python's collector reacts by
scanning all objects again and again, those of torch included, which took two fifths of the time of
a trace of 10,000 operators. During a trace the collector therefore runs less often, and mostly on
new objects only.
"""

from __future__ import annotations

import functools
import gc
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn, TypeVar

import optree
import torch
import torch.fx

from tsfunc import pytrees, rage
from tsfunc.bridge.mesh.levels import MeshAxes
from tsfunc.bridge.sizes.symbolic_numbers import size_node, solved_node
from tsfunc.bridge.sizes.symbols import Condition, Symbols
from tsfunc.bridge.trace.class_members import give_members
from tsfunc.bridge.trace.lifted_tensors import Lifting
from tsfunc.bridge.trace.opaque import OpaqueValue, without_opaque_values
from tsfunc.bridge.trace.tensor_guards import TracedArgument
from tsfunc.bridge.trace.trace_level import TraceLevel, TraceTracer, node_of_output
from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.interrupts import restoring_thread_state, undoing
from tsfunc.bridge.tracers.registrations import watching_factories, watching_random
from tsfunc.bridge.tracers.torch_settings import (
    SharedChange,
    no_seeding,
    outside_modes,
    own_parametrizations,
    traces_compile,
    traces_replace_functions,
)
from tsfunc.bridge.tracers.tracer import sync_all
from tsfunc.dispatch.state import tls
from tsfunc.dispatch.user_checks import starts_trace
from tsfunc.errors import DataDependentError, TsfuncError
from tsfunc.program.assumptions import Assumptions, Retrace, trace_until_valid
from tsfunc.program.calling.counters import counter_value
from tsfunc.program.closure.closure_guards import ConditionHolds, NotOneOf, ResultIs, SameObject
from tsfunc.program.closure.guard_builder import ClosureNumber
from tsfunc.program.closure.instances import ClosureGradients, Instances
from tsfunc.program.closure.results import Update, names_in_source, with_placeholders
from tsfunc.program.closure.side_effects import (
    check_bodies,
    check_containers,
    check_frozen,
    check_texts,
    rewrite_size_error,
)
from tsfunc.program.dims.constraints import check_constraints
from tsfunc.program.graphs.codegen import generate, generated_name
from tsfunc.program.guard import Source
from tsfunc.program.guarding.call_spec import alias_tensors
from tsfunc.program.guarding.guards import variables_of
from tsfunc.program.guarding.inputs import Hide, InputSpec, NumberSpec, sizes_of_call, solving_order
from tsfunc.program.guarding.trace_guards import (
    Aliasing,
    ArgumentCondition,
    Property,
    SharedMemory,
    TraceGuard,
)
from tsfunc.program.passes.effects import every_node
from tsfunc.program.passes.simplify import literals_of, simplify
from tsfunc.program.program import Program
from tsfunc.types import Dim
from tsfunc.types.grammar import Descriptor
from tsfunc.user_code import error_location

# --- garbage collection while a function is traced


_SELDOM = (50_000, 50, 1_000)  # number of new objects, then of younger collections per older one

_before = gc.get_threshold()


def _collect_seldom() -> None:
    global _before
    now = gc.get_threshold()
    if 0 < now[0] < _SELDOM[0]:  # 0: the collector is turned off
        _before = now
        gc.set_threshold(*_SELDOM)


def _collect_as_before() -> None:
    if gc.get_threshold() == _SELDOM:
        gc.set_threshold(*_before)


rare_garbage_collection: Final = SharedChange(_collect_seldom, _collect_as_before)
"""A block in which collections are rare: NOTE [collections while tracing]."""


# --- capture


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class TraceRequest:
    """A function to trace, and its arguments.

    Attributes:
        label: the name of the trace in errors.
        name: the name of the function in the program, and in errors about its descriptors.
        func: the function; it is called with the (args, kwargs) that ``tree`` unflattens to.
        flat: the flattened arguments; all but tensors and ``numbers`` become constants.
        inputs: the tensors among them.
        named_dims: the named dims that stay symbolic.
        numbers: the numbers among the arguments that are inputs.
        hide_any: replaces the arguments of type ``Any``, on which no operation is allowed.
        described: the descriptors, by parameter, for errors.
        assumptions: the other assumptions of the trace.
    """

    label: str
    name: str
    func: Callable[..., Any]
    flat: Sequence[Any]
    tree: optree.PyTreeSpec
    inputs: Sequence[InputSpec]
    named_dims: Mapping[str, Dim] = field(default_factory=dict)
    numbers: Sequence[NumberSpec] = ()
    hide_any: Hide | None = None
    described: Mapping[str, Descriptor] = field(default_factory=dict)
    assumptions: Assumptions = field(default_factory=Assumptions)


@restoring_thread_state
def capture(request: TraceRequest, instances: Instances | None = None) -> Program:
    """Trace a function.

    Args:
        instances: the objects whose attributes are watched; without them, the function is traced
            until its assumptions hold. Tensors that are read from arguments are inputs of the
            program, after the flattened arguments.

    Raises:
        ConstraintViolation: the control flow of the function depends on the size of a named dim.
        TypeCheckError: it reads a value that can be neither compared nor lifted, or makes an
            assignment that a program can't repeat.
        DataDependentError: it uses a tensor as a Python number or bool.
        Retrace: it has to be traced again, with other ``instances``.
    """
    with rare_garbage_collection():
        if instances is not None:
            return _capture(_Trace(request, instances))
        return _finish_valid_trace(request, request.name, _capture)


def _capture(trace: _Trace) -> Program:
    """Return the program of a trace. If it fails, call the functions in ``level.failing`` first."""
    try:
        with undoing(trace.undo_assignments):
            return trace.program(trace.run())
    except Retrace:
        raise
    except BaseException as error:
        level: TraceLevel | None = getattr(trace, "level", None)  # the error may come before it
        for on_failure in [] if level is None else level.failing:
            on_failure(error)
        raise


@restoring_thread_state
def abstract_eval(request: TraceRequest) -> Any:
    """Return the results of a function for inputs of fixed sizes, with fake tensors as tensors.

    Raises:
        DataDependentError: the function uses a tensor as a Python number or bool.
    """

    def fakes(trace: _Trace) -> Any:
        with undoing(trace.undo_assignments):
            out = trace.run()
            trace.must_undo = False  # they are left as they are
        try:
            return pytrees.tree_map(trace.fake_value, out)
        finally:
            trace.symbols.end()

    return _finish_valid_trace(request, request.label, fakes)


def _finish_valid_trace(request: TraceRequest, name: str, finish: Callable[[_Trace], T]) -> T:
    """Return a result of a trace whose assumptions hold."""

    def result(assumptions: Assumptions) -> T:
        return finish(_Trace(replace(request, assumptions=assumptions), Instances(name)))

    return trace_until_valid(result, request.assumptions)[0]


class _Trace:
    """A function run once on traced tensors, and the program made from the recorded operations."""

    level: TraceLevel  # set by `run`, since it depends on the state at entry

    def __init__(self, request: TraceRequest, instances: Instances) -> None:
        self.request, self.instances = request, instances
        self.assumptions = request.assumptions
        instances.builder.arguments = request.flat
        numbers = {spec.name: spec.value for spec in request.numbers}
        sizes = sizes_of_call(request.inputs)
        hints = {
            name: size for name, size in sizes.items() if name not in self.assumptions.other_hints
        }
        undescribed = [spec.name for spec in request.numbers if spec.undescribed]
        self.symbols = Symbols(request.named_dims, hints, numbers, undescribed)
        self._attributes: list[str] = []
        self._numbers: list[int] = []
        # True while a failure of the trace must undo the function's assignments.
        self.must_undo = False

    def run(self) -> Any:
        """Run the function outside of all levels but those of mesh axes, and return its result."""
        axes = MeshAxes().bound if tls.state.levels else nullcontext
        with torch_state.outside_all_transforms(), axes(), outside_modes():
            self.level = TraceLevel(
                self.request.label, self.symbols, self.assumptions.records_autograd
            )
            answer = functools.partial(counter_value, self.level, self.instances.builder)
            self.symbols.computed_value = self.level.tensor_guards.answer = answer
            self.gradients = ClosureGradients(
                self.level, self.instances, self._attributes.append, self._retrace_with_autograd
            )
            self.must_undo = True
            watching = watching_random(), watching_factories()
            with traces_compile(), self.level, watching[0], watching[1], traces_replace_functions():
                return self._call(self._arguments())

    def undo_assignments(self) -> None:
        """Undo the assignments of a function whose trace has failed."""
        if self.must_undo:
            self.symbols.end()
            self.instances.restore()
            self.must_undo = False

    def _retrace_with_autograd(self) -> NoReturn:
        """Have the function traced again, with autograd recording."""
        raise Retrace(self.assumptions.with_changes(records_autograd=True))

    def _arguments(self) -> list[Any]:
        """Return the flattened arguments, with tracers and symbols for those that vary."""
        request, level, symbols = self.request, self.level, self.symbols
        tracers = [_input(level, spec, symbols) for spec in request.inputs]
        level.tensor_guards.attribute_of = self._attribute_of
        level.on_lift, level.effects_from_now = self._give_members, self.instances.effects_from_now
        for spec, tracer in zip(request.inputs, tracers, strict=True):
            argument = TracedArgument(
                spec.position, spec.name, spec.sample, tracer.value, spec.is_fixed
            )
            level.tensor_guards.add(tracer, argument)
            if type(spec.sample) is not torch.Tensor:
                for name in give_members(tracer, type(spec.sample)):
                    self._attribute_of(argument, f"__class__.{name}")
        numbers = {spec.name: _symbol_of_number(level, spec, symbols) for spec in request.numbers}
        sizes = _size_nodes(level, request.inputs, tracers, request.named_dims)
        for name, node in sizes.items():
            node.meta["number"] = symbols.sizes[name]
        symbols.record_in(level.graph, {**sizes, **numbers})
        traced = list(request.flat)
        for number in request.numbers:
            traced[number.position] = symbols.numbers[number.name]
        instances = self.instances
        assumptions = self.assumptions
        instances.compares_identity |= assumptions.compares_identity or assumptions.records_autograd
        self._own = {**assumptions.closure_tensors, **instances.builder.closure_tensors}
        self._alias_tensors = instances.compares_identity
        aliased = (
            alias_tensors(request.inputs, tracers, self._own) if self._alias_tensors else tracers
        )
        for spec, value in zip(request.inputs, aliased, strict=True):
            traced[spec.position] = value
        return traced

    def _give_members(self, tracer: TraceTracer, tensor: torch.Tensor) -> None:
        """Give a closed-over tensor the members of its class, and guard them."""
        builder = self.instances.builder
        for name in give_members(tracer, type(tensor)):
            source = builder.source_of(tensor) or Source.of_object(tensor, "a tensor")
            with self.instances.paused():
                value = getattr(type(tensor), name)
                builder.guard(value, source.attribute(f"__class__.{name}"))

    def _attribute_of(self, argument: TracedArgument, name: str) -> Any:
        """Return the value of a Python attribute of a tensor among the arguments, and guard it."""
        builder = self.instances.builder
        text = f"{argument.name}.{name}"
        self._attributes.append(text)
        with self.instances.paused():
            value = operator.attrgetter(name)(argument.sample)
            builder.guard(value, Source.of_argument(argument.position, text).attribute(name))
        return value

    def _number_read(self, number: ClosureNumber) -> Any:
        """Return the symbol of a closed-over number: NOTE [numbers that vary]."""
        graph = self.level.graph
        symbol = self.symbols.add_number(number.name, number.value, number.variable)
        first = next((node for node in graph.nodes if node.op != "placeholder"), None)
        with nullcontext() if first is None else graph.inserting_before(first):
            node = _mark_number(graph.placeholder(number.name), number.name)
        node.meta["number"] = symbol
        self.symbols.add_input(number.name, node)
        self._numbers.append(number.position)
        return symbol

    @starts_trace
    def _call(self, traced: list[Any]) -> Any:
        request = self.request
        args, kwargs = pytrees.unflatten(request.tree, traced)
        tree = request.tree
        if request.hide_any is not None:
            args, kwargs = request.hide_any(args, kwargs)
            traced, tree = pytrees.flatten((args, kwargs))
        mode = torch.set_grad_enabled(torch.is_grad_enabled())  # restores the mode
        try:
            seeding, weights = no_seeding(request.label), own_parametrizations()
            generators = self.instances.generators
            with mode, Lifting(self.level), self.instances, seeding as generators.draws, weights:
                self.instances.builder.numbers.start(self._number_read)
                out = request.func(*args, **kwargs)
            needed, assumptions = self.gradients.passes.needed, self.assumptions
            if needed and not assumptions.records_autograd:
                self._retrace_with_autograd()  # the function has handled the exception
            if assumptions.autograd_is_remembered and not needed:
                raise Retrace(
                    assumptions.with_changes(autograd_is_remembered=False, records_autograd=False)
                )
        except Exception as error:
            rewrite_size_error(request.label, self.symbols, error)
            if not isinstance(error, TsfuncError):  # these are recorded where they are raised
                rage.record(
                    "trace failed", label=request.label, at=error_location(error),
                    type=type(error).__name__, message=error,
                )  # fmt: skip
            raise
        sync_all(out)
        check_containers(request.label, request.func, (args, kwargs), traced, tree)
        return out

    def _guard_aliasing(self) -> list[TraceGuard]:
        """Guard the identities of the function's tensors: NOTE [tensor aliasing]."""
        instances, inputs = self.instances, self.request.inputs
        if not instances.compares_identity and not self.level.tensor_guards.hashes_tensors:
            return []
        captured = {**self._own, **instances.builder.closure_tensors}
        aliased = self._own if self._alias_tensors else {}
        aliasing = Aliasing.of(inputs)
        twice = len(aliasing.groups) < len(inputs) and not self._alias_tensors
        if twice or any(id(x.sample) in captured and id(x.sample) not in aliased for x in inputs):
            changes = {"compares_identity": True, "closure_tensors": captured}
            raise Retrace(self.assumptions.with_changes(**changes))
        guards = instances.builder.closure_guards
        for spec in inputs:
            source = Source.of_argument(spec.position)
            tensor = captured.get(id(spec.sample))
            if tensor is not None:
                guards.add(SameObject(source, tensor))
            elif captured:
                guards.add(NotOneOf(source, tuple(captured.values())))
        return [aliasing] if len(inputs) > 1 else []

    def fake_value(self, leaf: Any) -> Any:
        """Return a fake tensor for a returned tensor; other values are returned unchanged."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if isinstance(leaf, TraceTracer) and leaf.dispatch_level is self.level:
            return leaf.value
        return self.level.lift(leaf).value

    def program(self, out: Any) -> Program:
        """Return the program of the recorded operations, which returns the function's results."""
        request, level, symbols = self.request, self.level, self.symbols
        changes = self.instances.finish()
        self.must_undo = False
        updates = self.instances.updates(changes, self.assumptions)
        level.tensor_guards.refuse_assignments()
        if any(type(leaf) is OpaqueValue for leaf in pytrees.leaves_of(out)):
            out = without_opaque_values(out)
        replaced = with_placeholders(request.label, out, self.instances.builder.placeholder_of)
        leaves, out_tree = pytrees.flatten(replaced)
        check_texts(request.label, leaves, out_tree, symbols)
        check_bodies(request.label, updates, leaves, level)
        values = (*leaves, *updates.tensors)
        results = [node_of_output(leaf, level) for leaf in values]
        if self.gradients.passes.records_needlessly(values):
            run_without_grad(level.graph)
        level.graph.output(tuple(results))
        symbols.end()
        constraints = symbols.constraints()
        larger_minima = {} if not constraints else check_constraints(
            request.name, constraints, request.named_dims, sizes_of_call(request.inputs),
            request.described, self._undescribed_shapes(), self.assumptions,
        )  # fmt: skip
        first = len(request.flat)
        assigned = tuple(replace(update, owner=first + update.owner) for update in updates.updates)
        program = self._build_program(out_tree, assigned)
        conditions = symbols.conditions(variables_of(request.named_dims, request.numbers))
        self._guard_numbers([condition for condition in conditions if condition.of_closure])
        conditions = [condition for condition in conditions if not condition.of_closure]
        if level.tensor_guards.of_backward:
            self._guard_anomaly_mode()
        numbers = self.instances.builder.numbers
        properties = level.tensor_guards.property_guards.values()
        guards = [
            *map(ArgumentCondition, conditions), *map(Property, properties),
            *self._guard_aliasing(), *self._shared_memory(),
        ]  # fmt: skip
        return replace(
            program, trace_guards=tuple(guards), larger_minima=larger_minima,
            attributes=(*self._attributes, *numbers.inputs),
            looks_at_grad=level.tensor_guards.of_grad, numbers=dict(numbers.read),
        )  # fmt: skip

    def _shared_memory(self) -> list[TraceGuard]:
        """Guard the arguments that share memory, if a body of control flow writes into one."""
        positions = [spec.position for spec in self.request.inputs]
        may_share = self.level.tensor_guards.of_memory and len(positions) > 1
        return [SharedMemory.of(self.request.flat, positions)] if may_share else []

    def _guard_anomaly_mode(self) -> None:
        """Guard the mode in which backward passes look for NaN."""
        for setting in (torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled):
            name = f"torch.{setting.__name__}()"
            self.instances.builder.closure_guards.add(ResultIs(setting, (), setting(), name))

    def _guard_numbers(self, conditions: Sequence[Condition]) -> None:
        """Guard the conditions on closed-over numbers."""
        for condition in conditions:
            if condition.dims:
                raise DataDependentError(
                    f"{self.request.label}: {condition.text} compares a number that the function "
                    f"reads with a size."
                )
            self.instances.builder.closure_guards.add(ConditionHolds(condition))

    def _undescribed_shapes(self) -> dict[str, Sequence[int]]:
        """Return the shapes of the tensor arguments without descriptors, by parameter."""
        paths = self.request.tree.paths()  # those in containers have longer paths
        return {
            spec.name: spec.sample.shape
            for spec in self.request.inputs
            if spec.name.isidentifier()
            and spec.name not in self.request.described
            and len(paths[spec.position]) == 2
        }

    def _build_program(self, out_tree: optree.PyTreeSpec, updates: tuple[Update, ...]) -> Program:
        """Return the program of the simplified graph."""
        request, level, graph = self.request, self.level, self.level.graph
        # Tensors of the arguments' attributes are inputs, and come after the arguments.
        builder = self.instances.builder
        closure_positions = {
            id(x): len(request.flat) + i for i, x in enumerate(builder.closure_guards.values)
        }
        frozen = builder.closure == "freeze"
        if frozen:
            check_frozen(request.name, level, closure_positions)
        positions = [spec.position for spec in request.inputs]
        positions += [spec.position for spec in request.numbers]
        positions += [len(request.flat) + index for index in self._numbers]
        outside = {str(tracer.node.target): tensor for tensor, tracer in level.lifted.values()}
        frozen_values = {
            target: tensor.detach().clone()
            for target, tensor in outside.items()
            if frozen and id(tensor) not in closure_positions
        }
        literals = literals_of(graph)
        folded = simplify(request.name, graph, outside, frozen_values)
        nodes = every_node(graph)
        read = {str(node.target) for node in nodes if node.op == "get_attr"}
        # A constant that is only used by folded nodes is no longer in the graph.
        constants = {name: tensor for name, tensor in folded.items() if name in read}
        used = {node for node in graph.nodes if node.op == "get_attr"}
        lifted: dict[str, torch.Tensor] = dict(constants)
        named: dict[str, torch.Tensor] = {}  # the closed-over tensors that are inputs
        for tensor, tracer in level.lifted.values():
            if tracer.node not in used:
                continue
            if id(tensor) in closure_positions:
                named[str(tracer.node.target)] = tensor
                _make_input(graph, tracer.node)
                positions.append(closure_positions[id(tensor)])
            else:
                target = str(tracer.node.target)
                lifted[target] = frozen_values.get(target, tensor)
        for node in nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                node.meta["dims"] = tuple(map(self.symbols.spell_size, value.shape))
        names = self._rename_tensors({**lifted, **named})
        lifted = {names.get(name, name): tensor for name, tensor in lifted.items()}
        source, run = generate(request.name, graph, positions, lifted, updates)
        return Program(
            request.name, graph, tuple(positions), lifted, out_tree, source, run,
            frozenset({*constants, *(literals & lifted.keys())}), updates,
        )  # fmt: skip

    def _rename_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, str]:
        """Give closed-over tensors in the graph the user's names; return these by the old names."""
        request, graph = self.request, self.level.graph
        used_names = [generated_name(request.name), "args", *(node.name for node in graph.nodes)]
        read = self.instances.builder.read
        names = names_in_source(request.func, tensors, read, used_names)
        for node in graph.nodes:
            if node.op in ("get_attr", "placeholder") and node.target in names:
                node.name = node.target = names[node.target]
        return names


def run_without_grad(graph: torch.fx.Graph) -> None:
    """Have a program record nothing for autograd."""
    for node in graph.nodes:
        node.meta["requires_grad"] = node.op != "call_function" and node.meta.get("requires_grad")
        node.meta["no_grad"] = node.op == "call_function"


def _input(level: TraceLevel, spec: InputSpec, symbols: Symbols) -> TraceTracer:
    """Return the traced tensor for an argument: fixed sizes, and symbols for named dims."""
    sample = spec.sample
    shape = spec.shape(symbols.sizes)
    like = level.fake_like(sample, shape, spec.strides(shape))
    return level.input(spec.name, like, sample.requires_grad)


def _symbol_of_number(level: TraceLevel, spec: NumberSpec, symbols: Symbols) -> torch.fx.Node:
    node = _mark_number(level.graph.placeholder(spec.name), spec.name)
    node.meta["number"] = symbols.numbers[spec.name]
    return node


def _size_nodes(
    level: TraceLevel,
    inputs: Sequence[InputSpec],
    tracers: Sequence[TraceTracer],
    named_dims: Mapping[str, Dim],
) -> dict[str, torch.fx.Node]:
    """Return the node of each named dim: the size of an input, or a size computed from one."""
    nodes: dict[str, torch.fx.Node] = {}
    for spec, tracer in zip(inputs, tracers, strict=True):
        for i, dim in enumerate(spec.dims):
            if isinstance(dim, Dim) and dim.name in named_dims and dim.name not in nodes:
                nodes[dim.name] = _mark_number(size_node(level.graph, tracer.node, i), dim.name)
    tensors = {spec.position: tracer for spec, tracer in zip(inputs, tracers, strict=True)}
    for position, i, expression, name in solving_order(inputs, nodes):
        if name is not None and name in named_dims:
            size = size_node(level.graph, tensors[position].node, i)
            solved = solved_node(level.graph, size, expression.text, name, nodes)
            nodes[name] = _mark_number(solved, name)
    return nodes


def _mark_number(node: torch.fx.Node, name: str) -> torch.fx.Node:
    """Mark a node as the size of a named dim, or as a number, and return it."""
    node.meta["expr"] = name
    node.meta["value"] = operator.itemgetter(name)
    return node


def _make_input(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Turn a closed-over tensor that was read into the last input of the graph."""
    after = next(later for later in graph.nodes if later.op != "placeholder")
    with graph.inserting_before(after):
        placeholder = graph.placeholder(node.name)
    placeholder.meta = node.meta
    node.replace_all_uses_with(placeholder)
    graph.erase_node(node)
