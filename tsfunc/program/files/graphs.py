"""The graphs of programs in files, with their control flow.

``transforms`` defines the operators and registers each kind here.

    {"name": "x", "input": "tensor"}                        or "number"
    {"name": "w", "lifted": "t0"}                           a tensor of the file
    {"name": "y", "operator": "aten::sin", "args": [{"node": "x"}], "kwargs": {}}
    {"name": "m", "function": "add", "args": [{"node": "n"}, 1], "kwargs": {}}
    {"name": "c", "item": 0, "of": "pair"}
    {"name": "z", "control": CONTROL, "args": [...], "kwargs": {}}

A node may also have ``type`` (of a tensor), ``number`` (the size that a number is), ``display``
(the type of a tensor, for display only), ``no_grad`` (autograd does not record it),
``requires_grad`` (autograd records it), ``line`` (the user's).
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.fx

from tsfunc._text import count_text
from tsfunc.bridge.control.control_flow import Body, ControlFlow
from tsfunc.bridge.sizes.expressions import form_of_size
from tsfunc.bridge.sizes.symbols import check_size
from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.bridge.tracers.schemas import operator_name
from tsfunc.program.fields import IDENTIFIER, Field
from tsfunc.program.files.callees import CalleeReader, CalleeWriter
from tsfunc.program.files.json_values import NoFileForm, ValueReader, encode, printable_text
from tsfunc.program.files.operator_calls import (
    NAMES_OF_FUNCTIONS,
    NOTHING,
    NUMBER,
    TENSOR,
    NodeTypes,
    ValueType,
    encode_display_meta,
    encode_type,
    function_named,
    misfit,
    operator_named,
    type_of_item,
    type_of_results,
)
from tsfunc.program.files.tensors import TensorReader
from tsfunc.program.graphs.codegen import line_of
from tsfunc.user_code import source_line

# --- control flow in files: the kinds of control flow, and the JSON of each


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


# The keys of an operator's JSON, each with an attribute of the operator or with its encoder.
Fields = Mapping[str, "str | Callable[[Any, GraphWriter], Any]"]


@dataclass(frozen=True)
class ControlKind:
    """A kind of control flow.

    Attributes:
        cls: the class of its operators.
        fields: the JSON besides ``kind`` and ``name``.
        decode: makes an operator from its ``StoredOperator`` and its fields; reports inconsistent
            JSON with ``Field.fail``.
    """

    name: str
    cls: type[ControlFlow]
    fields: Fields
    decode: Callable[..., ControlFlow]


_by_name: dict[str, ControlKind] = {}


def register_control(kind: ControlKind) -> None:
    """Make a kind of control flow known to files."""
    _by_name[kind.name] = kind


def encode_control(op: ControlFlow, writer: GraphWriter) -> dict[str, Any]:
    """Return a control-flow operator as JSON.

    Raises:
        NoFileForm: files do not have this kind of control flow.
    """
    for kind in _by_name.values():
        if type(op) is kind.cls:
            fields = {
                key: _encode_attribute(getattr(op, field), writer)
                if isinstance(field, str)
                else field(op, writer)
                for key, field in kind.fields.items()
            }
            return {"kind": kind.name, "name": op.name, **fields}
    raise NoFileForm(f"{op.name}, which runs Python code of its own")


def _encode_attribute(value: Any, writer: GraphWriter) -> Any:
    """Return an attribute of a control-flow operator as JSON."""
    if isinstance(value, ControlFlow):
        return encode_control(value, writer)
    if isinstance(value, Body):
        graph = writer.of_body().write(value.graph)
        return {"name": value.name, "graph": graph, "inputs": list(value.inputs)}
    if isinstance(value, list | tuple):
        return [_encode_attribute(item, writer) for item in value]
    return str(value) if isinstance(value, torch.device) else value


@dataclass(frozen=True)
class StoredOperator:
    """A control-flow operator in a file.

    Attributes:
        field: its JSON.
        reader: the reader of the graph that it is in.
        types: the types of its operands.
    """

    field: Field
    name: str
    reader: GraphReader
    types: Sequence[ValueType]

    def fail(self, problem: str) -> NoReturn:
        """Raise an error about the operator as a whole."""
        self.field.fail(problem)

    def bodies(self, field: Field, types: Sequence[ValueType] | None = None) -> list[Body]:
        """Return the bodies of the operator, by default for its operands."""
        types = self.types if types is None else types
        return [self._body(item, types) for item in field.items()]

    def _body(self, field: Field, types: Sequence[ValueType]) -> Body:
        name, inner, inputs_field = field.record("name", "graph", "inputs")
        inputs = tuple(at.integer(0, len(types) - 1) for at in inputs_field.items())
        read = self.reader.of_body().read(inner)
        body_inputs = [node for node in read.nodes if node.op == "placeholder"]
        if len(body_inputs) != len(inputs):
            expected = count_text(len(body_inputs), "input")
            inputs_field.fail(f"expected {expected} of the graph, got {len(inputs)}")
        for node, at in zip(body_inputs, inputs, strict=True):
            if node.meta["value_type"] != types[at]:
                inputs_field.fail(
                    f"{node.name}: expected a {node.meta['value_type']}, got a {types[at]}"
                )
        return Body(name.text(_NAME, "a name"), read, inputs)


def decode_control(field: Field, reader: GraphReader, types: Sequence[ValueType]) -> ControlFlow:
    """Return the operator that ``encode_control`` wrote, for operands of these types."""
    kind = field.at("kind").one_of(_by_name, "a kind of control flow")
    name = field.at("name").text(_NAME, "a name")
    _, _, *fields = field.record("kind", "name", *kind.fields)
    return kind.decode(StoredOperator(field, name, reader, types), *fields)


def result_count(body: Body) -> int:
    (*_, last) = body.graph.nodes
    return len(last.args[0])


# --- graphs as JSON, and back: a list of nodes, each with its call and its metadata


# The list of values that generated code is called with.
_RESERVED = frozenset({"args"})
# The operator in a file that checks a size that depends on data.
_ASSERTION = "aten::_assert_scalar"
_FLAGS = ("no_grad", "requires_grad")
_OPTIONAL = ("type", "number", "line", "display", *_FLAGS)


@dataclass(frozen=True)
class ClosureValues:
    """The closed-over values of a graph, by their names in the file.

    Attributes:
        tensor: returns the name of the tensor of a ``get_attr`` node.
        generator: returns the name of the state of a generator of random numbers.
        container: encodes a list or dict that the program returns unchanged in each call.
    """

    tensor: Callable[[str], str]
    generator: Callable[[torch.Generator], str]
    container: Callable[[Any], Any] | None = None

    def of_body(self) -> ClosureValues:
        """Return the same for a control-flow body, which takes its tensors as arguments."""
        return ClosureValues(_refuse_tensor, self.generator)

    def encode(self, value: Any) -> Any:
        """Return an argument of a node as JSON."""
        return encode(value, str, self._other)

    def _other(self, value: Any) -> Any:
        if not isinstance(value, torch.Generator):
            return None
        return {"generator": {"device": str(value.device), "state": self.generator(value)}}


class GraphWriter:
    """Writes one graph.

    Attributes:
        closure: the closed-over values.
        names: the names of the symbols of sizes; None: the types of values are left out.
        callees: the functions that the program calls.
        state: ``get_attr`` nodes that are inputs in the file, after the other inputs.
    """

    def __init__(
        self,
        closure: ClosureValues,
        names: Mapping[Any, Any] | None,
        callees: CalleeWriter,
        state: Sequence[torch.fx.Node] = (),
    ) -> None:
        self.closure, self.names, self.callees, self.state = closure, names, callees, state

    def of_body(self) -> GraphWriter:
        """Return the writer of a body of control flow."""
        return GraphWriter(self.closure.of_body(), self.names, self.callees)

    def write(self, graph: torch.fx.Graph) -> Any:
        """Return a graph as JSON.

        Raises:
            NoFileForm: a file can't hold one of its nodes.
        """
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        *nodes, output = dict.fromkeys((*inputs, *self.state, *graph.nodes))
        return {
            "nodes": [self._node(node) for node in nodes],
            "outputs": [encode(value, str, self.closure.container) for value in output.args[0]],
        }

    def _node(self, node: torch.fx.Node) -> dict[str, Any]:
        try:
            if "effect" in node.meta:
                called = "tsfunc.debug or tsfunc.check, which is a Python function"
                raise NoFileForm(f"a call of {called}")
            for kind in NODE_KINDS:
                encoded = kind.encode(node, self)
                if encoded is not None:
                    return {"name": node.name, **encoded, **_facts(node, self.names)}
            raise NoFileForm(f"a call of {getattr(node.target, '__name__', node.target)}")
        except NoFileForm as error:
            raise error.within(_where(node)) from None

    def call(self, node: torch.fx.Node, key: str, called: Any) -> dict[str, Any]:
        return {
            key: called,
            "args": [self.closure.encode(arg) for arg in node.args],
            "kwargs": {name: self.closure.encode(arg) for name, arg in node.kwargs.items()},
        }


def _where(node: torch.fx.Node) -> str:
    """Return the user's line of a node, for errors."""
    location = node.meta.get("location")
    return (
        f" (at {location}{source_line(location, ': ')})"
        if location is not None
        else f" ({node.name})"
    )


def _facts(node: torch.fx.Node, names: Mapping[Any, Any] | None) -> dict[str, Any]:
    """Return the JSON of a node's metadata."""
    facts: dict[str, Any] = {} if names is None else _type_facts(node, names)
    for key in _FLAGS:
        if node.meta.get(key):
            facts[key] = True
    if "location" in node.meta:
        facts["line"] = printable_text(line_of(node.meta["location"]))
    return facts


def _type_facts(node: torch.fx.Node, names: Mapping[Any, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        encoded = encode_type(value, names)
        if encoded is not None:
            facts["type"] = encoded
    number = form_of_size(node.meta["number"], names) if "number" in node.meta else None
    if number is not None:
        facts["number"] = number
    display = None if facts else encode_display_meta(node)
    return facts if display is None else {"display": display}


def _refuse_tensor(name: str) -> str:
    raise NoFileForm(f"the tensor {name} inside of control flow")


class GraphReader:
    """Reads one graph.

    Args:
        device: replaces every device of the file, if it is given.
        made_with: the torch version of the file, for errors.
        callees: the functions that the program calls.
        is_body: True if the graph is a body of control flow.
    """

    def __init__(
        self,
        tensors: TensorReader,
        device: torch.device | None,
        types: NodeTypes,
        made_with: str,
        callees: CalleeReader,
        is_body: bool = False,
    ) -> None:
        self.callees, self.is_body = callees, is_body
        self.tensors = tensors
        self._device = device
        self._types = types
        self.made_with = made_with
        self._values = ValueReader(self.known, device).with_other({"generator": self._generator})
        self._nodes: dict[str, torch.fx.Node] = {}
        self.value_types: dict[torch.fx.Node, ValueType] = {}
        self.graph = torch.fx.Graph()
        self.lifted: dict[str, torch.Tensor] = {}

    def read(self, field: Field) -> torch.fx.Graph:
        """Return the graph that a ``GraphWriter`` wrote."""
        nodes, outputs = field.record("nodes", "outputs")
        for node in nodes.items():
            self._node(node)
        results = tuple(self._result(out) for out in outputs.items())
        self.graph.output(results)
        return self.graph

    def _result(self, field: Field) -> Any:
        value = self._values.decode(field)
        nodes: list[torch.fx.Node] = []
        if isinstance(value, list | dict):  # a constant, which contains no node
            torch.fx.map_arg(value, nodes.append)
        if nodes or type(value) is tuple:
            field.fail_expected("the value of a leaf")
        return value

    def known(self, field: Field) -> torch.fx.Node:
        """Return a node that was read before, by its name."""
        name = field.text()
        if name not in self._nodes:
            field.fail(f"there is no node {name[:40]!r} before this one")
        return self._nodes[name]

    def _node(self, field: Field) -> None:
        kinds = [kind for kind in NODE_KINDS if field.get(kind.key) is not None]
        if len(kinds) != 1:
            field.fail_expected("a node")
        name = field.at("name").text(IDENTIFIER, "the name of a node")
        if name in self._nodes or name in _RESERVED or keyword.iskeyword(name):
            field.at("name").fail_expected("another name")
        field.require_keys(("name", kinds[0].key, *kinds[0].keys), _OPTIONAL)
        type_, node = kinds[0].decode(self, field, name)
        if node.name != name:
            field.at("name").fail_expected("a name that code can have")
        self._nodes[name] = node
        self.value_types[node] = type_
        self._read_facts(field, node)

    def _read_facts(self, field: Field, node: torch.fx.Node) -> None:
        type_field = field.get("type")
        if type_field is not None:
            self._types.read(type_field, node)
        number = field.get("number")
        if number is not None:
            self._types.read_number(number, node)
        display = field.get("display")
        if display is not None:
            self._types.read_display_meta(display, node)
        for key in _FLAGS:
            flag = field.get(key)
            if flag is not None:
                node.meta[key] = flag.flag()
        line = field.get("line")
        if line is not None:
            node.meta["location"] = line.line()

    def of_body(self) -> GraphReader:
        """Return the reader of a body of control flow."""
        return GraphReader(
            self.tensors, self._device, self._types, self.made_with, self.callees, is_body=True
        )

    def device(self, field: Field) -> torch.device:
        """Return a device, as it is replaced."""
        return self._values.device(field)

    def _generator(self, field: Field) -> torch.Generator:
        device, state = field.record("device", "state")
        return self.tensors.generator(state, self.device(device))

    def arguments(self, field: Field) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = tuple(self._values.decode(arg) for arg in field.at("args").items())
        kwargs = {}
        for name, value in field.at("kwargs").mapping().items():
            if not IDENTIFIER.fullmatch(name) or keyword.iskeyword(name):
                value.fail("not the name of an argument")
            kwargs[name] = self._values.decode(value)
        return args, kwargs

    def call(
        self, target: Any, name: str, args: tuple[Any, ...], kwargs: Any = None
    ) -> torch.fx.Node:
        return self.graph.create_node("call_function", target, args, kwargs, name=name)


# --- the kinds of nodes: each with its encoder and its decoder


@dataclass(frozen=True)
class NodeKind:
    """A kind of node.

    Attributes:
        key: the key of the JSON that only nodes of this kind have.
        keys: the other keys, besides the name and the metadata.
        encode: returns the JSON of all these keys; None for a node of another kind.
        decode: makes the node from its JSON and its name; also returns the type of its value.
    """

    key: str
    keys: tuple[str, ...]
    encode: Callable[[torch.fx.Node, GraphWriter], dict[str, Any] | None]
    decode: Callable[[GraphReader, Field, str], tuple[ValueType, torch.fx.Node]]


def _encode_input(node: torch.fx.Node, writer: GraphWriter) -> dict[str, Any] | None:
    if node.op != "placeholder" and node not in writer.state:
        return None
    stored_type = node.meta.get("value_type")  # the metadata of a node that was read from a file
    if stored_type is None:
        stored_type = TENSOR if isinstance(node.meta.get("val"), torch.Tensor) else NUMBER
    return {"input": str(stored_type)}


def _decode_input(reader: GraphReader, field: Field, name: str) -> tuple[ValueType, torch.fx.Node]:
    type_ = field.at("input").one_of({TENSOR: TENSOR, NUMBER: NUMBER}, "tensor or number")
    if any(node.op != "placeholder" for node in reader.value_types):
        field.fail("inputs come first")
    node = reader.graph.create_node("placeholder", name, name=name)
    node.meta["value_type"] = type_
    return type_, node


def _encode_tensor(node: torch.fx.Node, writer: GraphWriter) -> dict[str, Any] | None:
    return {"lifted": writer.closure.tensor(str(node.target))} if node.op == "get_attr" else None


def _decode_tensor(reader: GraphReader, field: Field, name: str) -> tuple[ValueType, torch.fx.Node]:
    if reader.is_body:
        field.fail("a body of control flow does not have tensors of the file")
    reader.lifted[name] = reader.tensors.tensor(field.at("lifted"))
    return TENSOR, reader.graph.create_node("get_attr", name, name=name)


def _encode_item(node: torch.fx.Node, writer: GraphWriter) -> dict[str, Any] | None:
    if node.target is not operator.getitem:
        return None
    of, index = node.args
    assert isinstance(of, torch.fx.Node)
    return {"item": index, "of": of.name}


def _decode_item(reader: GraphReader, field: Field, name: str) -> tuple[ValueType, torch.fx.Node]:
    of, index = reader.known(field.at("of")), field.at("item").integer(0, 1 << 31)
    type_ = type_of_item(reader.value_types[of], index)
    if type_ is None:
        field.fail(f"{of.name} has no item {index}")
    return type_, reader.call(operator.getitem, name, (of, index))


def _encode_control(node: torch.fx.Node, writer: GraphWriter) -> dict[str, Any] | None:
    if not isinstance(node.target, ControlFlow):
        return None
    return writer.call(node, "control", encode_control(node.target, writer))


def _decode_control(
    reader: GraphReader, field: Field, name: str
) -> tuple[ValueType, torch.fx.Node]:
    args, kwargs = reader.arguments(field)
    types = [reader.value_types[arg] if isinstance(arg, torch.fx.Node) else NUMBER for arg in args]
    if kwargs or not all(type_ in (TENSOR, NUMBER) for type_ in types):
        field.fail("control flow takes tensors and numbers")
    return [TENSOR], reader.call(decode_control(field.at("control"), reader, types), name, args)


def _encode_operator(node: torch.fx.Node, writer: GraphWriter) -> dict[str, Any] | None:
    op = node.meta.get("op")
    if isinstance(op, TorchOperator):
        called = op.name
    else:
        called = _ASSERTION if node.target is check_size else operator_name(node.target)
    return writer.call(node, "operator", called) if "::" in called else None


def _decode_operator(
    reader: GraphReader, field: Field, name: str
) -> tuple[ValueType, torch.fx.Node]:
    args, kwargs = reader.arguments(field)
    op, signature = operator_named(field.at("operator"), reader.made_with)
    wrong = misfit(signature, args, kwargs, reader.value_types.__getitem__)
    if wrong is not None:
        field.fail(wrong)
    if op.name == _ASSERTION and len(args) == 2:
        return NOTHING, reader.call(check_size, name, args)
    node = reader.call(op.overload, name, args, kwargs)
    node.meta["op"] = op
    return type_of_results(signature), node


def _encode_function(node: torch.fx.Node, writer: GraphWriter) -> dict[str, Any] | None:
    if node.target not in NAMES_OF_FUNCTIONS:
        return None
    return writer.call(node, "function", NAMES_OF_FUNCTIONS[node.target])


def _decode_function(
    reader: GraphReader, field: Field, name: str
) -> tuple[ValueType, torch.fx.Node]:
    args, kwargs = reader.arguments(field)
    function = function_named(field.at("function"))
    if function is torch.Size:
        listed = len(args) == 1 and type(args[0]) is list
        if kwargs or not listed or not _are_numbers(args[0], reader):
            field.fail("a shape is made of a list of numbers")
        return [NUMBER], reader.call(function, name, args)
    if kwargs or not 1 <= len(args) <= 3 or not _are_numbers(args, reader):
        field.fail("a function on sizes takes one to three numbers")
    return NUMBER, reader.call(function, name, args)


def _are_numbers(values: Sequence[Any], reader: GraphReader) -> bool:
    return all(
        reader.value_types[value] == NUMBER
        if isinstance(value, torch.fx.Node)
        else type(value) in (int, float, bool)
        for value in values
    )


_CALL = ("args", "kwargs")
NODE_KINDS = (
    NodeKind("input", (), _encode_input, _decode_input),
    NodeKind("lifted", (), _encode_tensor, _decode_tensor),
    NodeKind("item", ("of",), _encode_item, _decode_item),
    NodeKind("control", _CALL, _encode_control, _decode_control),
    NodeKind("operator", _CALL, _encode_operator, _decode_operator),
    NodeKind("function", _CALL, _encode_function, _decode_function),
)
