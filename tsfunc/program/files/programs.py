"""Programs as entries of a file.

``programs/0.json`` is a program: its graph, the indices of its inputs among the flattened
arguments, and the structure of its results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.sizes.size_forms import step_of, symbol_of
from tsfunc.bridge.sizes.symbols import Symbols
from tsfunc.bridge.tracers.settings import SETTINGS, settings
from tsfunc.program.closure.updates import OutsideRef as FromOutside
from tsfunc.program.files.callees import CalleeGraph, CalleeReader, CalleeWriter
from tsfunc.program.files.context import FileContext
from tsfunc.program.files.fields import Field
from tsfunc.program.files.forms import dim_text, read_dim, read_scalar
from tsfunc.program.files.graphs import GraphReader, OutsideValues, encode_graph
from tsfunc.program.files.node_types import NodeTypes
from tsfunc.program.files.state import ProgramState, StateWriter
from tsfunc.program.files.tensors import TensorWriter
from tsfunc.program.files.trees import Trees, encode_tree
from tsfunc.program.files.values import NoFileForm, ValueReader, encode, printable
from tsfunc.program.graphs.codegen import generate
from tsfunc.program.graphs.program import Program
from tsfunc.program.guarding.call_spec import CallSpec
from tsfunc.program.guarding.inputs import sizes_of_call
from tsfunc.types import Dim
from tsfunc.types.grammar import Descriptor


def encode_program(
    program: Program,
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
    numbers = [each for each in _numbers_of(program.graph) if each[0] not in names]
    form = program.form
    assert form is not None
    callees = CalleeWriter(
        form.bounds, lambda part: _encode_part(part, tensors, state, callees),
        sizes_of_call(form.inputs), described if described is not None else program.descriptors,
    )  # fmt: skip

    def container(value: Any) -> Any:
        at = value.index - len(form.leaves) if isinstance(value, FromOutside) else -1
        return encode(program.guard_lines.values[at]) if at >= 0 and program.guard_lines else None

    outside = OutsideValues(lifted, tensors.generator, container)
    named = {**names, **{symbol: name for symbol, name, _ in numbers}}
    graph = encode_graph(program.graph, outside, named, callees, in_cells)
    if callees.entries:
        _require_settings(form)
    return {
        "name": printable(program.name),
        "dims": {name: dim_text(form.bounds.get(name, Dim(name))) for name in _dims_in(names)},
        "inputs": [at for at in program.inputs if at < len(form.leaves)],
        "constants": sorted(program.constants),
        "graph": graph,
        **({"numbers": {name: encode(value) for _, name, value in numbers}} if numbers else {}),
        **({"functions": callees.entries} if callees.entries else {}),
        "results": encode_tree(program.out_tree),
        **state.of_program(program, in_cells),
    }


def _require_settings(form: CallSpec) -> None:
    """Refuse to trace functions with rules under settings that differ from those of their calls."""
    for setting, then, now in zip(SETTINGS[1:], form.ambient[1:], settings()[1:], strict=True):
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
            raise NoFileForm(f"a rule that reads what the program assigns to, in {part.name}")
        return tensors.name(tensor)

    return {
        "name": printable(part.name),
        "inputs": list(part.inputs),
        "graph": encode_graph(part.graph, OutsideValues(lifted, tensors.generator), None, callees),
    }


def what_it_does(encoded: Any) -> Any:
    """Return a program's JSON without the metadata that does not change its results."""
    if isinstance(encoded, dict):
        return {
            key: what_it_does(value)
            for key, value in encoded.items()
            if key not in ("requires_grad", "line", "told")
        }
    return [what_it_does(item) for item in encoded] if isinstance(encoded, list) else encoded


def has_key(encoded: Any, key: str) -> bool:
    """Return True if any object in some JSON has a key."""
    if isinstance(encoded, dict):
        return key in encoded or any(has_key(value, key) for value in encoded.values())
    return isinstance(encoded, list) and any(has_key(item, key) for item in encoded)


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


def _dims_in(names: Mapping[Any, Any]) -> list[str]:
    return [form if isinstance(form, str) else form[1] for form in names.values()]


def decode_program(field: Field, context: FileContext, form: CallSpec) -> Program:
    """Return the program that `encode_program` wrote; its code is generated from the graph.

    Args:
        field: the JSON of the program.
        context: the context of the file.
        form: the form of the calls that it was made for.
    """
    keys = ("name", "dims", "inputs", "constants", "graph", "results")
    since = {"state": 2, "functions": 4, "numbers": 4}
    field.require_keys(keys, [key for key, first in since.items() if context.version >= first])
    name_field, dims_field, inputs_field, constants, graph_field, results = map(field.at, keys)
    values = ValueReader(device=context.device)
    symbols = _symbols(dims_field, field.get("numbers"), form)
    plain = NodeTypes(Symbols({}), values)
    callees = CalleeReader(
        field.get("functions"),
        lambda part, kinds: _decode_part(part, kinds, plain, context, callees),
    )
    reader = GraphReader(
        context.tensors, context.device, NodeTypes(symbols, values), context.made_with,
        context.version, callees,
    )  # fmt: skip
    graph = reader.read(graph_field)
    callees.finish()
    tree = Trees(context.classes, values).decode(results)
    (*_, last) = graph.nodes
    more = len(last.args[0]) - tree.num_leaves
    state_field = field.get("state")
    if more < 0 or (more and state_field is None):
        results.fail(f"the graph has {len(last.args[0])} results")
    state = ProgramState(state_field, context.state, more, values)
    inputs = (*(at.integer(0, 1 << 31) for at in inputs_field.items()), *state.inputs)
    wanted = sum(node.op == "placeholder" for node in graph.nodes)
    if wanted != len(inputs):
        inputs_field.fail(f"the graph has {wanted} inputs")
    name = name_field.line()
    try:
        source, run = generate(name, graph, inputs, reader.lifted, state.updates)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        graph_field.fail(f"no code can be made of it: {error}")
    known = frozenset(each.text() for each in constants.items())
    if not known <= reader.lifted.keys():
        constants.fail("there are others than tensors of the program")
    return Program(
        name, graph, inputs, reader.lifted, tree, source, run, known, state.updates,
        guard_lines=state.guard_lines,
    )  # fmt: skip


def _decode_part(
    field: Field,
    kinds: Sequence[Any],
    types: NodeTypes,
    context: FileContext,
    callees: CalleeReader,
) -> CalleeGraph:
    """Return the graph that `_encode_part` wrote, for a part called with values of these kinds."""
    name, inputs_field, graph_field = field.record("name", "inputs", "graph")
    reader = GraphReader(
        context.tensors, context.device, types, context.made_with, context.version, callees
    )
    graph = reader.read(graph_field)
    inputs = tuple(at.integer(0, len(kinds) - 1) for at in inputs_field.items())
    own = [node.meta["kind"] for node in graph.nodes if node.op == "placeholder"]
    if own != [kinds[at] for at in inputs]:
        inputs_field.fail("the graph has other inputs")
    return CalleeGraph(name.line(), graph, inputs, reader.lifted)


def _numbers_of(graph: torch.fx.Graph) -> list[tuple[Any, str, int | float]]:
    """Return the numbers among a graph's inputs: their symbols, names, and values in the trace."""
    found = []
    for node in graph.nodes:
        symbol = symbol_of(node.meta.get("number"))
        if node.op == "placeholder" and symbol is not None:
            value = node.meta["number"].node.hint
            found.append((symbol, node.meta["expr"], type(value)(value)))
    return found


def _symbols(field: Field, numbers: Field | None, form: CallSpec) -> Symbols:
    """Return the symbols of a program, with the sizes of its own call as hints."""
    dims = {name: read_dim(text, name) for name, text in field.mapping().items()}
    called = sizes_of_call(form.inputs)
    sizes = {
        name: size for name, size in called.items() if name in dims and dims[name].admits(size)
    }
    scalars: dict[str, int | float] = {}
    for name, value in numbers.mapping().items() if numbers is not None else ():
        scalars[name] = read_scalar(Field(name, value), 0, ValueReader().decode(value), dims).value
    try:
        return Symbols(dims, sizes, scalars)
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:
        field.fail(f"there are no such dims: {error}")
