"""Complete programs in files, and the calls that they serve.

For each kind of call, ``function.to_json`` has the assumptions about it, and the number of its
program. The guard of the program is generated again from the assumptions.

``programs/0.to_json`` is a program: its graph, the indices of its inputs among the flattened
arguments, and the structure of its results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from tsfunc._text import count_text
from tsfunc.bridge.sizes.expressions import step_of, symbol_of
from tsfunc.bridge.sizes.symbols import Symbols
from tsfunc.bridge.tracers.torch_settings import SETTINGS, Setting, settings
from tsfunc.program.closure.results import InputRef
from tsfunc.program.fields import Field
from tsfunc.program.files.callees import CalleeGraph, CalleeReader, CalleeWriter
from tsfunc.program.files.graphs import ClosureValues, GraphReader, GraphWriter
from tsfunc.program.files.json_values import (
    NoFileForm,
    Trees,
    ValueReader,
    encode,
    encode_tree,
    printable_text,
)
from tsfunc.program.files.operator_calls import NodeTypes
from tsfunc.program.files.program_state import FileContext, ProgramState, StateWriter
from tsfunc.program.files.tensors import TensorWriter
from tsfunc.program.graphs.codegen import generate
from tsfunc.program.graphs.data import ProgramData
from tsfunc.program.guarding.call_spec import CallSpec, guards_on_arguments
from tsfunc.program.guarding.guards import (
    AnyNumber,
    ArgumentGuard,
    ArgumentReader,
    DimIs,
    TensorMeta,
    TypeIs,
    ValueIs,
    read_argument_guard,
    read_number_spec,
)
from tsfunc.program.guarding.inputs import InputSpec, sizes_of_call
from tsfunc.program.guarding.trace_guards import (
    DescribedArguments,
    read_trace_guard,
    trace_guard_to_json,
)
from tsfunc.types import Dim
from tsfunc.types.grammar import Descriptor
from tsfunc.types.values import describe

# --- the kinds of calls that programs serve, as JSON and back


def encode_call_spec(call_spec: CallSpec, where: Callable[[int], str]) -> Any:
    """Return the assumptions about a kind of call as JSON.

    Args:
        where: returns the name of an argument in errors, by its index.

    Raises:
        NoFileForm: a file can't hold an argument.
    """
    leaves = []
    for guard in guards_on_arguments(call_spec.leaves, call_spec.inputs, call_spec.numbers):
        try:
            leaves.append(guard.to_json(encode))
        except NoFileForm as error:
            leaf = _unstorable_text(guard, error)
            raise NoFileForm(f"the argument {where(guard.position)}, {leaf}") from None
    guards = [trace_guard_to_json(guard) for guard in call_spec.trace_guards]
    return {
        "arguments": encode_tree(call_spec.tree),
        "leaves": leaves,
        "dims": {name: DimIs(dim).to_json() for name, dim in call_spec.named_dims.items()},
        "settings": {
            setting.name: encode(value)
            for setting, value in zip(SETTINGS, call_spec.settings, strict=True)
        },
        **({"guards": guards} if guards else {}),
    }


def storable_spec(call_spec: CallSpec) -> CallSpec:
    """Return a description of calls that a file can hold.

    If a guard can't be written, the numbers are fixed to those of the call.
    """
    names = {*call_spec.named_dims, *(spec.name for spec in call_spec.numbers)}
    if all(guard.is_storable(names) for guard in call_spec.trace_guards):
        return call_spec
    fixed = [guard.for_fixed_numbers() for guard in call_spec.trace_guards]
    guards = tuple(guard for guard in fixed if guard is not None)
    return dataclasses.replace(call_spec, trace_guards=guards, numbers=())


def _unstorable_text(guard: ArgumentGuard, error: NoFileForm) -> str:
    return f"an object of class {guard.cls.__name__}" if isinstance(guard, TypeIs) else str(error)


_SETTINGS = frozenset(setting.name for setting in SETTINGS)


class CallSpecReader:
    """Reads the descriptions of calls.

    Args:
        keyword_order: True if the function sees the order of its keyword arguments.
    """

    def __init__(self, context: FileContext, keyword_order: bool) -> None:
        self._keyword_order = keyword_order
        self._values = ValueReader(device=context.device)
        self._trees = Trees(context.classes, self._values)
        self._fake = Symbols({}).fake

    def decode(self, field: Field) -> CallSpec:
        """Return the description that ``encode_call_spec`` wrote."""
        keys = ("arguments", "leaves", "dims", "settings")
        field.require_keys(keys, ("guards",))
        arguments, leaves_field, dims, settings_field = map(field.at, keys)
        tree = self._trees.decode(arguments)
        if tree.type is not tuple or [x.type for x in tree.children()] != [tuple, dict]:
            arguments.fail_expected("the structure of positional and keyword arguments")
        named_dims = {
            name: DimIs.from_json(text, name).dim for name, text in dims.mapping().items()
        }
        reader = ArgumentReader(self._values, named_dims, self._fake, set(named_dims))
        read = [
            read_argument_guard(i, leaf, reader)
            for i, leaf in enumerate(leaves_field.items(tree.num_leaves))
        ]
        leaves = [g.value if isinstance(g, AnyNumber | ValueIs) else None for g in read]
        inputs = [guard.spec for guard in read if isinstance(guard, TensorMeta)]
        numbers = [guard.spec for guard in read if isinstance(guard, AnyNumber)]
        settings = self._settings(settings_field)
        _require_sizes(dims, inputs, named_dims)
        tensors = frozenset(spec.position for spec in inputs)
        described = DescribedArguments(named_dims, numbers, tensors)
        guards = field.get("guards")
        listed = () if guards is None else guards.items()
        return CallSpec(
            tree, tuple(leaves), tuple(inputs), named_dims, settings, self._keyword_order,
            tuple(numbers),
            tuple(read_trace_guard(each, described) for each in listed),
        )  # fmt: skip

    def _settings(self, field: Field) -> tuple[Any, ...]:
        """Return torch's settings; a setting that is missing in the file gets its current value."""
        stored = field.mapping()
        for name, value in stored.items():
            if name not in _SETTINGS:
                value.fail("there is no such setting")
        return tuple(
            _decode_setting(setting, stored[setting.name])
            if setting.name in stored
            else setting.read()
            for setting in SETTINGS
        )


def _decode_setting(setting: Setting, field: Field) -> Any:
    value = ValueReader().decode(field)
    if not setting.admits(value):
        field.fail(f"expected a value that {setting.name} can have, got {describe(value)}")
    return value


def _require_sizes(field: Field, inputs: Sequence[InputSpec], named_dims: Collection[str]) -> None:
    """Check that the sizes of the tensors determine those of the named dims."""
    try:
        sizes = sizes_of_call(inputs)
    except (AssertionError, ArithmeticError):
        sizes = {}
    for name in named_dims:
        if name not in sizes:
            field.fail(f"no tensor tells the size of {name[:40]}")


# --- programs as entries of a file


def encode_program(
    program: ProgramData,
    tensors: TensorWriter,
    state: StateWriter,
    described: Mapping[str, Descriptor] | None,
) -> Any:
    """Return a program as JSON.

    Args:
        program: the program; it was made for calls.
        tensors: receives the tensors that it has from outside.
        state: has the cells of the programs' state.
        described: the descriptors of the function, for errors; None: those of the program.

    Raises:
        NoFileForm: a file can't hold a part of it.
    """

    def lifted(name: str) -> str:
        try:
            return tensors.name(program.lifted[name])
        except NoFileForm as error:
            raise NoFileForm(f"{name}, {error}") from None

    in_cells = [
        node
        for node in program.graph.nodes
        if node.op == "get_attr" and state.holds(program.tensor(node))
    ]
    names = _names_of_symbols(program.graph)
    # A number that equals the size of an input has the name of that size.
    numbers = [number for number in _numbers_of(program.graph) if number[0] not in names]
    call_spec = program.call_spec
    assert call_spec is not None
    callees = CalleeWriter(
        call_spec.named_dims,
        lambda part: _encode_part(part, tensors, state, callees),
        sizes_of_call(call_spec.inputs),
        program.descriptors if described is None else described,
    )

    def container(value: Any) -> Any:
        at = value.index - len(call_spec.leaves) if isinstance(value, InputRef) else -1
        reads = program.closure_guards
        return encode(reads.values[at]) if at >= 0 and reads is not None else None

    closure = ClosureValues(lifted, tensors.generator, container)
    named = {**names, **{symbol: name for symbol, name, _ in numbers}}
    graph = GraphWriter(closure, named, callees, in_cells).write(program.graph)
    if callees.entries:
        _require_settings(call_spec)
    return {
        "name": printable_text(program.name),
        "dims": {
            name: DimIs(call_spec.named_dims.get(name, Dim(name))).to_json()
            for name in [form if isinstance(form, str) else form[1] for form in names.values()]
        },
        "inputs": [at for at in program.inputs if at < len(call_spec.leaves)],
        "constants": sorted(program.constants),
        "graph": graph,
        **({"numbers": {name: encode(value) for _, name, value in numbers}} if numbers else {}),
        **({"functions": callees.entries} if callees.entries else {}),
        "results": encode_tree(program.out_tree),
        **state.of_program(program, in_cells),
    }


def _require_settings(call_spec: CallSpec) -> None:
    """Refuse to trace functions with rules under settings that differ from those of their calls."""
    for setting, then, now in zip(
        SETTINGS[1:], call_spec.settings[1:], settings()[1:], strict=True
    ):
        if then != now:
            raise NoFileForm(
                f"a function with rules that was called under another {setting.name} than that of "
                f"now. Save it under the settings that it is called under"
            )


def _encode_part(
    part: CalleeGraph, tensors: TensorWriter, state: StateWriter, callees: CalleeWriter
) -> Any:
    """Return one of the graphs of a function with rules as JSON."""

    def lifted(name: str) -> str:
        tensor = part.lifted[name]
        if state.holds(tensor):
            raise NoFileForm(f"a rule that reads state that the program assigns, in {part.name}")
        return tensors.name(tensor)

    writer = GraphWriter(ClosureValues(lifted, tensors.generator), None, callees)
    return {
        "name": printable_text(part.name),
        "inputs": list(part.inputs),
        "graph": writer.write(part.graph),
    }


def without_metadata(encoded: Any) -> Any:
    """Return a program's JSON without the metadata that does not change its results."""
    if isinstance(encoded, dict):
        return {
            key: without_metadata(value)
            for key, value in encoded.items()
            if key not in ("requires_grad", "line", "display")
        }
    return [without_metadata(item) for item in encoded] if isinstance(encoded, list) else encoded


def _names_of_symbols(graph: torch.fx.Graph) -> dict[Any, Any]:
    """Return the symbols in the sizes of a graph's inputs, with their forms of sizes.

    The symbol of a dim that is a multiple of a number counts the multiples.
    """
    names: dict[Any, Any] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        for size, text in zip(value.shape, node.meta.get("dims", ()), strict=False):
            symbol = symbol_of(size)
            if not text.isidentifier():
                continue
            if symbol is not None:
                names[symbol] = text
            elif (counted := step_of(size)) is not None:
                names[counted[0]] = ["//", text, counted[1]]
    return names


def decode_program(field: Field, context: FileContext, call_spec: CallSpec) -> ProgramData:
    """Return the program that ``encode_program`` wrote; its code is generated from the graph.

    Args:
        call_spec: the description of the calls that it was made for.
    """
    keys = ("name", "dims", "inputs", "constants", "graph", "results")
    field.require_keys(keys, ("state", "functions", "numbers"))
    name_field, dims_field, inputs_field, constants, graph_field, results = map(field.at, keys)
    values = ValueReader(device=context.device)
    symbols = _symbols(dims_field, field.get("numbers"), call_spec)
    plain = NodeTypes(Symbols({}), values)
    callees = CalleeReader(
        field.get("functions"),
        lambda part, types: _decode_part(part, types, plain, context, callees),
    )
    reader = GraphReader(
        context.tensors, context.device, NodeTypes(symbols, values), context.made_with,
        callees,
    )  # fmt: skip
    graph = reader.read(graph_field)
    callees.finish()
    tree = Trees(context.classes, values).decode(results)
    (*_, last) = graph.nodes
    more = len(last.args[0]) - tree.num_leaves
    state_field = field.get("state")
    if more < 0 or (more and state_field is None):
        results.fail(f"expected {count_text(len(last.args[0]), 'result')}, got {tree.num_leaves}")
    state = ProgramState(state_field, context.state, more, values)
    inputs = (*(at.integer(0, 1 << 31) for at in inputs_field.items()), *state.inputs)
    expected = sum(node.op == "placeholder" for node in graph.nodes)
    if expected != len(inputs):
        inputs_field.fail(f"expected {count_text(expected, 'input')}, got {len(inputs)}")
    name = name_field.line()
    try:
        source, run = generate(name, graph, inputs, reader.lifted, state.updates)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        graph_field.fail(f"no code can be made of it: {error}")
    constant_names = frozenset(constant.text() for constant in constants.items())
    if not constant_names <= reader.lifted.keys():
        constants.fail("there are others than tensors of the program")
    return ProgramData(
        name, graph, inputs, reader.lifted, tree, source, run, constant_names, state.updates,
        closure_guards=state.closure_guards,
    )  # fmt: skip


def _decode_part(
    field: Field,
    called_with: Sequence[Any],
    types: NodeTypes,
    context: FileContext,
    callees: CalleeReader,
) -> CalleeGraph:
    """Return the graph that ``_encode_part`` wrote, for operands of these types."""
    name, inputs_field, graph_field = field.record("name", "inputs", "graph")
    reader = GraphReader(context.tensors, context.device, types, context.made_with, callees)
    graph = reader.read(graph_field)
    inputs = tuple(at.integer(0, len(called_with) - 1) for at in inputs_field.items())
    input_types = [node.meta["value_type"] for node in graph.nodes if node.op == "placeholder"]
    if input_types != [called_with[at] for at in inputs]:
        inputs_field.fail("the graph has other inputs")
    return CalleeGraph(name.line(), graph, inputs, reader.lifted)


def _numbers_of(graph: torch.fx.Graph) -> list[tuple[Any, str, int | float]]:
    """Return the numbers among a graph's inputs: their symbols, names, and values in the trace."""
    numbers = []
    for node in graph.nodes:
        symbol = symbol_of(node.meta.get("number"))
        if node.op == "placeholder" and symbol is not None:
            value = node.meta["number"].node.hint
            numbers.append((symbol, node.meta["expr"], type(value)(value)))
    return numbers


def _symbols(field: Field, numbers: Field | None, call_spec: CallSpec) -> Symbols:
    """Return the symbols of a program, with the sizes of its own call as hints."""
    dims = {name: DimIs.from_json(text, name).dim for name, text in field.mapping().items()}
    called = sizes_of_call(call_spec.inputs)
    sizes = {
        name: size for name, size in called.items() if name in dims and dims[name].admits(size)
    }
    values: dict[str, int | float] = {}
    for name, value in numbers.mapping().items() if numbers is not None else ():
        values[name] = read_number_spec(
            Field(name, value), 0, ValueReader().decode(value), dims
        ).value
    try:
        return Symbols(dims, sizes, values)
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:
        field.fail(f"there are no such dims: {error}")
