"""Programs, and the calls that they answer, as entries of a file.

``programs/0.json`` is a program: its graph, where its inputs stand among the flattened arguments,
and the structure of its results. ``calls.json`` has for each kind of call what is taken for granted
of it, and the number of its program; a guard is generated anew from that.
"""

from __future__ import annotations

import dataclasses
import keyword
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.sizes.size_forms import step_of, symbol_of
from tsfunc.bridge.sizes.symbols import Condition, Symbols
from tsfunc.bridge.trace.asked import Asked, answerer
from tsfunc.bridge.tracers.settings import SETTINGS, settings
from tsfunc.errors import DescriptorError
from tsfunc.program.files.callees import CalleeReader, CalleeWriter, Part
from tsfunc.program.files.fields import Field
from tsfunc.program.files.graphs import GraphReader, Outside, encode_graph
from tsfunc.program.files.node_types import NodeTypes
from tsfunc.program.files.state import ProgramState, State, StateWriter
from tsfunc.program.files.tensors import TensorReader, TensorWriter
from tsfunc.program.files.trees import Trees, encode_tree
from tsfunc.program.files.values import NoFileForm, Values, dtype_of, encode, printable
from tsfunc.program.graphs.codegen import generate
from tsfunc.program.graphs.program import Program
from tsfunc.program.guarding.forms import CallForm, Watched
from tsfunc.program.guarding.guards import variables_of
from tsfunc.program.guarding.inputs import InputSpec, ScalarSpec, sizes_of_call
from tsfunc.types import Dim, DimExpr, DimForm, MetaTensorType, parse_descriptor
from tsfunc.types.descriptors import Descriptor
from tsfunc.types.dims import parse_dim
from tsfunc.types.facts import fact_code


def encode_program(
    program: Program,
    bounds: Mapping[str, Dim],
    tensors: TensorWriter,
    state: StateWriter,
    described: Mapping[str, Descriptor] | None,
) -> Any:
    """A program as JSON.

    Args:
        program: what is written.
        bounds: its named dims.
        tensors: takes the tensors that it has from outside.
        state: takes what it assigns to.
        described: the descriptors of the function, for errors; None: those of the program.

    Raises:
        NoFileForm: it has something that a file can't hold.
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
    # A number that has turned out to be the size of an input has that one's name.
    numbers = [each for each in _numbers_of(program.graph) if each[0] not in names]
    count = len(program.form.leaves) if program.form is not None else len(program.inputs)
    sizes = {} if program.form is None else sizes_of_call(program.form.inputs)
    callees = CalleeWriter(
        bounds, lambda part: _encode_part(part, tensors, state, callees), sizes,
        described if described is not None else program.descriptors,
    )  # fmt: skip
    outside = Outside(lifted, tensors.generator)
    named = {**names, **{symbol: name for symbol, name, _ in numbers}}
    graph = encode_graph(program.graph, outside, named, callees, in_cells)
    if callees.entries and program.form is not None:
        _require_settings(program.form)
    return {
        "name": printable(program.name),
        "dims": {name: _dim_text(bounds.get(name, Dim(name))) for name in _dims_in(names)},
        "inputs": [at for at in program.inputs if at < count],
        "constants": sorted(program.constants),
        "graph": graph,
        **({"numbers": {name: encode(value) for _, name, value in numbers}} if numbers else {}),
        **({"functions": callees.entries} if callees.entries else {}),
        "results": encode_tree(program.out_tree),
        **state.of_program(program, in_cells),
    }


def _require_settings(form: CallForm) -> None:
    """Refuses to trace functions under other settings than those of their calls."""
    for setting, then, now in zip(SETTINGS[1:], form.ambient[1:], settings()[1:], strict=True):
        if then != now:
            raise NoFileForm(
                f"a function with rules that was called under another {setting.name} than that of "
                f"now. Save it under the settings that it is called under"
            )


def _encode_part(
    part: Part, tensors: TensorWriter, state: StateWriter, callees: CalleeWriter
) -> Any:
    """One of the graphs of a function with rules, as JSON."""

    def lifted(name: str) -> str:
        tensor = part.lifted[name]
        if state.holds(tensor):
            raise NoFileForm(f"a rule that reads what the program assigns to, in {part.name}")
        return tensors.name(tensor)

    return {
        "name": printable(part.name),
        "inputs": list(part.inputs),
        "graph": encode_graph(part.graph, Outside(lifted, tensors.generator), None, callees),
    }


def what_it_does(encoded: Any) -> Any:
    """A program's JSON without what is only known of its values."""
    if isinstance(encoded, dict):
        return {
            key: what_it_does(value)
            for key, value in encoded.items()
            if key not in ("requires_grad", "line")
        }
    return [what_it_does(item) for item in encoded] if isinstance(encoded, list) else encoded


def _names_of_symbols(graph: torch.fx.Graph) -> dict[Any, Any]:
    """What the symbols in the sizes of a graph's inputs are, as forms of sizes.

    That of a dim which is a multiple of something counts its steps.
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


@dataclass(frozen=True)
class Context:
    """What reading a file needs beside its entries.

    Attributes:
        tensors: the file's.
        classes: what names of classes stand for.
        device: takes the place of every device, if it is given.
        made_with: the torch version that the file was made with.
        state: what programs assign to.
        version: of the format.
    """

    tensors: TensorReader
    classes: Mapping[str, type]
    device: torch.device | None
    made_with: str
    state: State
    version: int


def decode_program(field: Field, context: Context) -> Program:
    """The program that `encode_program` wrote; its code is generated from the graph."""
    keys = ("name", "dims", "inputs", "constants", "graph", "results")
    since = {"state": 2, "functions": 4, "numbers": 4}
    field.require_keys(keys, [key for key, first in since.items() if context.version >= first])
    name_field, dims_field, inputs_field, constants, graph_field, results = map(field.at, keys)
    values = Values(device=context.device)
    symbols = _symbols(dims_field, field.get("numbers"))
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
        facts=state.facts,
    )  # fmt: skip


def _decode_part(
    field: Field, kinds: Sequence[Any], types: NodeTypes, context: Context, callees: CalleeReader
) -> Part:
    """The graph that `_encode_part` wrote, of a part that is called with such values."""
    name, inputs_field, graph_field = field.record("name", "inputs", "graph")
    reader = GraphReader(
        context.tensors, context.device, types, context.made_with, context.version, callees
    )
    graph = reader.read(graph_field)
    inputs = tuple(at.integer(0, len(kinds) - 1) for at in inputs_field.items())
    own = [node.meta["kind"] for node in graph.nodes if node.op == "placeholder"]
    if own != [kinds[at] for at in inputs]:
        inputs_field.fail("the graph has other inputs")
    return Part(name.line(), graph, inputs, reader.lifted)


def _numbers_of(graph: torch.fx.Graph) -> list[tuple[Any, str, int | float]]:
    """The numbers among a graph's inputs: their symbols, names, and what they were in the trace."""
    found = []
    for node in graph.nodes:
        symbol = symbol_of(node.meta.get("number"))
        if node.op == "placeholder" and symbol is not None:
            value = node.meta["number"].node.hint
            found.append((symbol, node.meta["expr"], type(value)(value)))
    return found


def _symbols(field: Field, numbers: Field | None) -> Symbols:
    dims = {name: _read_dim(text, name) for name, text in field.mapping().items()}
    scalars: dict[str, int | float] = {}
    for name, value in numbers.mapping().items() if numbers is not None else ():
        scalars[name] = _scalar(Field(name, value), 0, Values().decode(value), dims).value
    try:
        return Symbols(dims, scalars=scalars)
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:
        field.fail(f"there are no such dims: {error}")


# --- calls


def encode_form(form: CallForm, where: Callable[[int], str]) -> Any:
    """What is taken for granted of a kind of call, as JSON.

    Args:
        form: that.
        where: how errors call an argument, by its place.

    Raises:
        NoFileForm: an argument is of a kind that files can't hold.
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
        "dims": {name: _dim_text(dim) for name, dim in form.bounds.items()},
        "settings": {
            setting.name: encode(value)
            for setting, value in zip(SETTINGS, form.ambient, strict=True)
        },
        **({"conditions": conditions} if (conditions := facts_of(form)) else {}),
        **({"asked": [_encode_asked(each) for each in form.asked]} if form.asked else {}),
        **({"one": [list(group) for group in form.groups]} if form.groups else {}),
    }


def _encode_asked(asked: Asked) -> Any:
    answer = asked.answer
    return {
        "argument": asked.position,
        "fact": asked.fact,
        "answer": list(answer) if isinstance(answer, tuple) else answer,
    }


def facts_of(form: CallForm) -> list[str]:
    """What a form asks of named dims, and of the numbers that may be any one."""
    return [condition.fact for condition in form.conditions]


def storable(form: CallForm) -> CallForm:
    """A form that a file can hold: numbers are those of the call where a condition is too odd."""
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
        "requires_grad": x.requires_grad,
        "shape": list(x.shape),
        "strides": list(x.stride()),
        "dims": [dim if isinstance(dim, int) else _dim_name(dim) for dim in spec.dims],
    }


def _dim_name(dim: DimForm) -> str:
    return dim.name if isinstance(dim, Dim) else str(dim)


def _dim_text(dim: Dim) -> str:
    return str(MetaTensorType([dim]))


_NAME_OF_NUMBER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
_SETTINGS = frozenset(setting.name for setting in SETTINGS)


class FormReader:
    """Reads what is taken for granted of calls.

    Args:
        context: of the file.
        of_keywords: whether the function sees the order of its keyword arguments.
    """

    def __init__(self, context: Context, of_keywords: bool) -> None:
        self._of_keywords, self._version = of_keywords, context.version
        self._values = Values(device=context.device)
        self._trees = Trees(context.classes, self._values)
        self._fake = Symbols({}).fake

    def decode(self, field: Field) -> CallForm:
        """The form that `encode_form` wrote."""
        keys = ("arguments", "leaves", "dims", "settings")
        since = {"conditions": 3, "asked": 4, "one": 4}
        field.require_keys(keys, [key for key in since if self._version >= since[key]])
        arguments, leaves_field, dims, ambient_field = map(field.at, keys)
        tree = self._trees.decode(arguments)
        if tree.type is not tuple or [x.type for x in tree.children()] != [tuple, dict]:
            arguments.expected("the structure of positional and keyword arguments")
        bounds = {name: _read_dim(text, name) for name, text in dims.mapping().items()}
        leaves: list[Any] = []
        inputs = []
        scalars: list[ScalarSpec] = []
        for i, leaf in enumerate(leaves_field.items(tree.num_leaves)):
            value = leaf.get("value")
            leaves.append(None if value is None else self._values.decode(value))
            if value is None:
                inputs.append(self._input(i, leaf, bounds))
                continue
            leaf.require_keys(("value",), ("number",) if self._version > 3 else ())
            name = leaf.get("number")
            if name is not None:
                taken = {*bounds, *(spec.name for spec in scalars)}
                scalars.append(_scalar(name, i, leaves[-1], taken))
        ambient = self._settings(ambient_field)
        said = field.get("conditions")
        conditions = tuple(_condition(x, bounds, scalars) for x in _items(said))
        positions = frozenset(spec.position for spec in inputs)
        asked = tuple(_asked(x, positions) for x in _items(field.get("asked")))
        groups = tuple(_group(x, positions) for x in _items(field.get("one")))
        return CallForm(
            tree, tuple(leaves), tuple(inputs), bounds, ambient, self._of_keywords, conditions,
            asked, groups, tuple(scalars),
        )  # fmt: skip

    def _settings(self, field: Field) -> tuple[Any, ...]:
        """torch's settings; of one that the file does not know, any value will do."""
        given = field.mapping()
        for name, value in given.items():
            if name not in _SETTINGS:
                value.fail("there is no such setting")
        return tuple(
            Values().decode(given[setting.name]) if setting.name in given else setting.read()
            for setting in SETTINGS
        )

    def _input(self, position: int, field: Field, bounds: Mapping[str, Dim]) -> InputSpec:
        name, dtype, device, grad, shape_field, strides, dims_field = field.record(
            "tensor", "dtype", "device", "requires_grad", "shape", "strides", "dims"
        )
        shape = [size.integer(0) for size in shape_field.items()]
        steps = [step.integer(0) for step in strides.items(len(shape))]
        dims = tuple(_read_size(dim, bounds) for dim in dims_field.items(len(shape)))
        try:
            with self._fake:
                example = torch.empty_strided(
                    shape, steps, dtype=dtype_of(dtype), device=self._values.device(device)
                ).requires_grad_(grad.flag())
        except (RuntimeError, OverflowError, TypeError) as error:
            field.fail(f"there is no such tensor: {str(error).splitlines()[0]}")
        return InputSpec(position, name.line(), example, dims)


def _condition(field: Field, bounds: Mapping[str, Dim], scalars: Sequence[ScalarSpec]) -> Condition:
    text = field.line()
    try:
        code = fact_code(text, variables_of(bounds, scalars))
    except DescriptorError as error:
        field.fail(str(error))
    return Condition(code, text, tuple(bounds), text)


def _scalar(field: Field, position: int, value: Any, taken: Collection[str]) -> ScalarSpec:
    """A number among the arguments that may be any one of its type."""
    name = field.text(_NAME_OF_NUMBER, "the name of a number")
    found = ScalarSpec(position, name, value)
    if type(value) not in (int, float) or not found.admits(value):
        field.fail("only a number that is finite can be another one")
    if name in taken or keyword.iskeyword(name):
        field.expected("another name")
    return found


def _items(field: Field | None) -> Sequence[Field]:
    """The items of a list that need not be there."""
    return () if field is None else field.items()


def _asked(field: Field, positions: Collection[int]) -> Asked:
    argument, fact, answer = field.record("argument", "fact", "answer")
    text = fact.line()
    if answerer(text) is None:
        fact.fail("there is no such question")
    told = answer.value
    if isinstance(told, list):
        told = tuple(each.integer(0) for each in answer.items())
    elif told is not None and not isinstance(told, bool | int):
        answer.expected("true, false, a number or numbers")
    return Asked(_position(argument, positions), text, told)


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


def _read_dim(field: Field, name: str) -> Dim:
    try:
        described = parse_descriptor(field.line()[:200])
        found = described.dims if isinstance(described, MetaTensorType) else None
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
