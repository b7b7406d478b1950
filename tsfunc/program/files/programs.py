"""Complete programs in files, and the calls that they answer.

For each kind of call, ``function.json`` has the assumptions about it, and the number of its
program. The guard of the program is generated anew from the assumptions.

``programs/0.json`` is a program: its graph, the indices of its inputs among the flattened
arguments, and the structure of its results.
"""

from __future__ import annotations

import dataclasses
import keyword
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.sizes.size_forms import step_of, symbol_of
from tsfunc.bridge.sizes.symbols import Condition, Symbols
from tsfunc.bridge.trace.tensor_guards import PropertyGuard, reader_of
from tsfunc.bridge.tracers.settings import SETTINGS, settings
from tsfunc.errors import DescriptorError
from tsfunc.program.closure.results import OutsideRef as FromOutside
from tsfunc.program.files.archive import Field
from tsfunc.program.files.callees import CalleeGraph, CalleeReader, CalleeWriter
from tsfunc.program.files.graphs import GraphReader, OutsideValues, encode_graph
from tsfunc.program.files.operators import NodeTypes
from tsfunc.program.files.state import FileContext, ProgramState, StateWriter
from tsfunc.program.files.values import (
    NoFileForm,
    TensorWriter,
    Trees,
    ValueReader,
    dtype_of,
    encode,
    encode_tree,
    printable,
)
from tsfunc.program.graphs.codegen import generate
from tsfunc.program.graphs.program import Program
from tsfunc.program.guarding.call_spec import CallSpec
from tsfunc.program.guarding.guards import Watched, variables_of
from tsfunc.program.guarding.inputs import InputSpec, ScalarSpec, sizes_of_call
from tsfunc.types import Dim, DimExpr, DimForm, MetaTensorType, TSTensor, parse_descriptor
from tsfunc.types.dims import parse_dim
from tsfunc.types.grammar import Descriptor
from tsfunc.types.sizes import fact_code

# --- the kinds of calls that programs answer, as JSON and back


def encode_form(form: CallSpec, where: Callable[[int], str]) -> Any:
    """Return the assumptions about a kind of call as JSON.

    Args:
        form: the kind of call.
        where: returns the name of an argument in errors, by its index.

    Raises:
        NoFileForm: a file can't hold an argument.
    """
    specs = {spec.position: spec for spec in form.inputs}
    numbers = {spec.position: spec.name for spec in form.scalars}
    leaves = []
    for i, leaf in enumerate(form.leaves):
        spec = specs.get(i)
        named = {"number": numbers[i]} if i in numbers else {}
        try:
            found = {"value": encode(leaf), **named} if spec is None else _encode_input(spec)
            leaves.append(found)
        except NoFileForm as error:
            raise NoFileForm(f"the argument {where(i)}, {_named(leaf, error)}") from None
    return {
        "arguments": encode_tree(form.tree),
        "leaves": leaves,
        "dims": {name: dim_text(dim) for name, dim in form.bounds.items()},
        "settings": {
            setting.name: encode(value)
            for setting, value in zip(SETTINGS, form.ambient, strict=True)
        },
        **({"conditions": conditions} if (conditions := facts_of(form)) else {}),
        **(
            {"asked": asked}
            if (asked := [*map(_encode_property_guard, form.property_guards)])
            else {}
        ),
        **({"one": [list(group) for group in form.groups]} if form.groups else {}),
    }


def _encode_property_guard(guard: PropertyGuard) -> Any:
    answer = guard.answer
    return {
        "argument": guard.position,
        "fact": guard.fact,
        "answer": list(answer) if isinstance(answer, tuple) else answer,
    }


def facts_of(form: CallSpec) -> list[str]:
    """Return the conditions of a form on named dims and on numbers that may vary."""
    return [condition.fact for condition in form.conditions]


def storable(form: CallSpec) -> CallSpec:
    """Return a form that a file can hold.

    If a condition of the form can't be written, the numbers are fixed to those of the call.
    """
    names = {name: name for name in (*form.bounds, *(spec.name for spec in form.scalars))}
    try:
        for condition in form.conditions:
            fact_code(condition.fact, names)
    except DescriptorError:
        held = [each for each in form.conditions if each.dims]
        fixed = tuple(each._replace(fact=each.fixed) for each in held)
        return dataclasses.replace(form, conditions=fixed, scalars=())
    return form


def _named(leaf: Any, error: NoFileForm) -> str:
    if isinstance(leaf, Watched):
        return f"an object of class {leaf.cls.__name__}"
    return str(error)


def _encode_input(spec: InputSpec) -> Any:
    x = spec.example
    return {
        "tensor": spec.name,
        "dtype": str(x.dtype).removeprefix("torch."),
        "device": str(x.device),
        "requires_grad": None if spec.any_grad else x.requires_grad,
        "shape": list(x.shape),
        "strides": list(x.stride()),
        "dims": [dim if isinstance(dim, int) else _dim_name(dim) for dim in spec.dims],
    }


def _dim_name(dim: DimForm) -> str:
    return dim.name if isinstance(dim, Dim) else str(dim)


def dim_text(dim: Dim) -> str:
    return str(MetaTensorType([dim]))


_NAME_OF_NUMBER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
_SETTINGS = frozenset(setting.name for setting in SETTINGS)


class FormReader:
    """Reads the forms of calls.

    Args:
        context: the context of the file.
        of_keywords: whether the function sees the order of its keyword arguments.
    """

    def __init__(self, context: FileContext, of_keywords: bool) -> None:
        self._of_keywords = of_keywords
        self._values = ValueReader(device=context.device)
        self._trees = Trees(context.classes, self._values)
        self._fake = Symbols({}).fake

    def decode(self, field: Field) -> CallSpec:
        """Return the form that `encode_form` wrote."""
        keys = ("arguments", "leaves", "dims", "settings")
        field.require_keys(keys, ("conditions", "asked", "one"))
        arguments, leaves_field, dims, ambient_field = map(field.at, keys)
        tree = self._trees.decode(arguments)
        if tree.type is not tuple or [x.type for x in tree.children()] != [tuple, dict]:
            arguments.expected("the structure of positional and keyword arguments")
        bounds = {name: read_dim(text, name) for name, text in dims.mapping().items()}
        leaves: list[Any] = []
        inputs = []
        scalars: list[ScalarSpec] = []
        for i, leaf in enumerate(leaves_field.items(tree.num_leaves)):
            value = leaf.get("value")
            leaves.append(None if value is None else self._values.decode(value))
            if value is None:
                inputs.append(self._input(i, leaf, bounds))
                continue
            leaf.require_keys(("value",), ("number",))
            name = leaf.get("number")
            if name is not None:
                taken = {*bounds, *(spec.name for spec in scalars)}
                scalars.append(read_scalar(name, i, leaves[-1], taken))
        ambient = self._settings(ambient_field)
        said = field.get("conditions")
        _require_sizes(dims, inputs, bounds)
        conditions = tuple(_condition(x, bounds, scalars) for x in _items(said))
        positions = frozenset(spec.position for spec in inputs)
        property_guards = tuple(_property_guard(x, positions) for x in _items(field.get("asked")))
        groups = tuple(_group(x, positions) for x in _items(field.get("one")))
        return CallSpec(
            tree, tuple(leaves), tuple(inputs), bounds, ambient, self._of_keywords, conditions,
            property_guards, groups, tuple(scalars),
        )  # fmt: skip

    def _settings(self, field: Field) -> tuple[Any, ...]:
        """Return torch's settings; a setting that is missing in the file gets its current value."""
        given = field.mapping()
        for name, value in given.items():
            if name not in _SETTINGS:
                value.fail("there is no such setting")
        return tuple(
            ValueReader().decode(given[setting.name]) if setting.name in given else setting.read()
            for setting in SETTINGS
        )

    def _input(self, position: int, field: Field, bounds: Mapping[str, Dim]) -> InputSpec:
        name, dtype, device, grad, shape_field, strides, dims_field = field.record(
            "tensor", "dtype", "device", "requires_grad", "shape", "strides", "dims"
        )
        shape = [size.integer(0) for size in shape_field.items()]
        steps = [step.integer(0) for step in strides.items(len(shape))]
        dims = tuple(_read_size(dim, bounds) for dim in dims_field.items(len(shape)))
        any_grad = grad.value is None
        try:
            with self._fake:
                example = torch.empty_strided(
                    shape, steps, dtype=dtype_of(dtype), device=self._values.device(device)
                ).requires_grad_(not any_grad and grad.flag())
        except (RuntimeError, OverflowError, TypeError) as error:
            field.fail(f"there is no such tensor: {str(error).splitlines()[0]}")
        return InputSpec(position, name.line(), example, dims, any_grad)


def _require_sizes(field: Field, inputs: Sequence[InputSpec], bounds: Collection[str]) -> None:
    """Check that the sizes of the tensors determine those of the named dims."""
    try:
        known = sizes_of_call(inputs)
    except (AssertionError, ArithmeticError):
        known = {}
    for name in bounds:
        if name not in known:
            field.fail(f"no tensor tells the size of {name[:40]}")


def _condition(field: Field, bounds: Mapping[str, Dim], scalars: Sequence[ScalarSpec]) -> Condition:
    text = field.line()
    variables = variables_of(bounds, scalars)
    try:
        code = fact_code(text, variables)
        shown = fact_code(text, {name: name for name in variables})
    except DescriptorError as error:
        field.fail(str(error))
    return Condition(code, shown, tuple(bounds), text)


def read_scalar(field: Field, position: int, value: Any, taken: Collection[str]) -> ScalarSpec:
    """Return a number among the arguments that may vary within its type."""
    name = field.text(_NAME_OF_NUMBER, "the name of a number")
    found = ScalarSpec(position, name, value)
    if type(value) not in (int, float) or not found.admits(value):
        field.fail("only a number that is finite can be another one")
    if name in taken or keyword.iskeyword(name):
        field.expected("another name")
    return found


def _items(field: Field | None) -> Sequence[Field]:
    """Return the items of an optional list."""
    return () if field is None else field.items()


def _property_guard(field: Field, positions: Collection[int]) -> PropertyGuard:
    argument, fact, answer = field.record("argument", "fact", "answer")
    text = fact.line()
    if reader_of(text) is None:
        fact.fail("there is no such question")
    told = answer.value
    if isinstance(told, list):
        told = tuple(each.integer(0) for each in answer.items())
    elif told is not None and not isinstance(told, bool | int):
        answer.expected("true, false, a number or numbers")
    return PropertyGuard(_position(argument, positions), text, told)


def _group(field: Field, positions: Collection[int]) -> tuple[int, ...]:
    found = tuple(_position(each, positions) for each in field.items())
    if not found:
        field.expected("the places of arguments")
    return found


def _position(field: Field, positions: Collection[int]) -> int:
    found = field.integer(0)
    if found not in positions:
        field.expected("the place of a tensor among the arguments")
    return found


def read_dim(field: Field, name: str) -> Dim:
    try:
        described = parse_descriptor(field.line()[:200])
        found = described.meta.dims if isinstance(described, TSTensor) else None
    except DescriptorError as error:
        field.fail(str(error))
    dim = found[0] if found is not None and len(found) == 1 else None
    if not isinstance(dim, Dim) or dim.name != name:
        field.expected(f"a description of the dim {name[:40]!r}")
    return dim


def _read_size(field: Field, bounds: Mapping[str, Dim]) -> DimForm:
    if type(field.value) is int:
        return field.integer(0)
    try:
        dim = parse_dim(field.line()[:200])
    except DescriptorError as error:
        field.fail(str(error))
    names = [dim.name] if isinstance(dim, Dim) else dim.names if isinstance(dim, DimExpr) else ()
    if not names or any(name not in bounds for name in names):
        field.expected("a size, or one made of named dims")
    return bounds[dim.name] if isinstance(dim, Dim) else dim


# --- programs as entries of a file


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
        reads = program.read_guards
        return encode(reads.values[at]) if at >= 0 and reads is not None else None

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
    field.require_keys(keys, ("state", "functions", "numbers"))
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
        callees,
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
        read_guards=state.read_guards,
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
    reader = GraphReader(context.tensors, context.device, types, context.made_with, callees)
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
