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
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import Body, ControlFlow
from tsfunc.bridge.sizes.expressions import form_of_size
from tsfunc.bridge.sizes.symbols import check_size
from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.bridge.tracers.schemas import name_of
from tsfunc.program.fields import Field
from tsfunc.program.files.callees import CalleeReader, CalleeWriter
from tsfunc.program.files.json_values import NoFileForm, ValueReader, encode, printable
from tsfunc.program.files.operator_calls import (
    NAMES_OF_FUNCTIONS,
    NOTHING,
    NUMBER,
    TENSOR,
    Kind,
    NodeTypes,
    encode_display_meta,
    encode_type,
    function_named,
    kind_of_item,
    kind_of_results,
    misfit,
    operator_named,
)
from tsfunc.program.files.tensors import TensorReader
from tsfunc.program.graphs.codegen import line_of
from tsfunc.user_code import source_line

# --- control flow in files: the kinds of control flow, and the JSON of each


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


@dataclass(frozen=True)
class EncodeGraph:
    """Writes the parts of control flow.

    Attributes:
        graph: writes the graph of a body.
        callees: the functions that the program calls.
    """

    graph: Callable[[torch.fx.Graph], Any]
    callees: CalleeWriter

    def __call__(self, graph: torch.fx.Graph) -> Any:
        return self.graph(graph)


@dataclass(frozen=True)
class DecodeGraph:
    """Reads the parts of control flow.

    Attributes:
        graph: reads the graph of a body.
        made_with: the torch version of the file, for errors.
        callees: the functions that the program calls.
    """

    graph: Callable[[Field], torch.fx.Graph]
    device: Callable[[Field], torch.device]
    made_with: str
    callees: CalleeReader

    def __call__(self, field: Field) -> torch.fx.Graph:
        return self.graph(field)


@dataclass(frozen=True)
class ControlKind:
    """A kind of control flow.

    Attributes:
        cls: the class of its operators.
        encode: returns the JSON fields of an operator, its bodies included.
        decode: makes an operator from its JSON, its name, a reader of the graphs of bodies, and
            the kinds of its operands; reports inconsistent JSON with ``Field.fail``.
    """

    name: str
    cls: type[ControlFlow]
    encode: Callable[[Any, EncodeGraph], dict[str, Any]]
    decode: Callable[[Field, str, DecodeGraph, Sequence[Any]], ControlFlow]


_by_name: dict[str, ControlKind] = {}


def register_control(kind: ControlKind) -> None:
    """Make a kind of control flow known to files."""
    _by_name[kind.name] = kind


def encode_control(op: ControlFlow, graph: EncodeGraph) -> dict[str, Any]:
    """Return a control-flow operator as JSON.

    Raises:
        NoFileForm: files do not have this kind of control flow.
    """
    for kind in _by_name.values():
        if type(op) is kind.cls:
            return {"kind": kind.name, "name": op.name, **kind.encode(op, graph)}
    raise NoFileForm(f"{op.name}, which runs Python code of its own")


def encode_bodies(op: ControlFlow, graph: EncodeGraph) -> list[Any]:
    return [
        {"name": body.name, "graph": graph(body.graph), "inputs": list(body.inputs)}
        for body in op.bodies
    ]


def decode_control(field: Field, graph: DecodeGraph, kinds: Sequence[Any]) -> ControlFlow:
    """Return the operator that ``encode_control`` wrote.

    Args:
        graph: reads the graph of a body.
    """
    kind = field.at("kind").one_of(_by_name, "a kind of control flow")
    name = field.at("name").text(_NAME, "a name")
    return kind.decode(field, name, graph, kinds)


def decode_bodies(field: Field, graph: DecodeGraph, kinds: Sequence[Any]) -> list[Body]:
    """Return the bodies that ``encode_bodies`` wrote, for operands of these kinds."""
    bodies = []
    for each in field.items():
        name, inner, inputs_field = each.record("name", "graph", "inputs")
        inputs = tuple(at.integer(0, len(kinds) - 1) for at in inputs_field.items())
        read = graph(inner)
        own = [node for node in read.nodes if node.op == "placeholder"]
        if len(own) != len(inputs):
            inputs_field.fail(f"expected {len(own)} inputs of the graph, got {len(inputs)}")
        for node, at in zip(own, inputs, strict=True):
            if node.meta["kind"] != kinds[at]:
                inputs_field.fail(f"{node.name}: expected a {node.meta['kind']}, got a {kinds[at]}")
        bodies.append(Body(name.text(_NAME, "a name"), read, inputs))
    return bodies


def result_count(body: Body) -> int:
    (*_, last) = body.graph.nodes
    return len(last.args[0])


# --- graphs as JSON, and back: a list of nodes, each with its call and its metadata


_LONG_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
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


def encode_graph(
    graph: torch.fx.Graph,
    closure: ClosureValues,
    names: Mapping[Any, Any] | None,
    callees: CalleeWriter,
    state: Sequence[torch.fx.Node] = (),
) -> Any:
    """Return a graph as JSON.

    Args:
        closure: the closed-over values.
        names: the names of the symbols of sizes; None: the types of values are left out.
        callees: the functions that the program calls.
        state: ``get_attr`` nodes that are inputs in the file, after the other inputs.

    Raises:
        NoFileForm: a file can't hold one of its nodes.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    nodes = [
        {"name": node.name, "input": _kind_of_input(node), **_facts(node, names)}
        for node in (*inputs, *state)
    ]
    outputs: Any = []
    for node in graph.nodes:
        if node.op == "output":
            outputs = [encode(value, str, closure.container) for value in node.args[0]]
            continue
        if node.op == "placeholder" or node in state:
            continue
        try:
            nodes.append({**_encode_node(node, closure, names, callees), **_facts(node, names)})
        except NoFileForm as error:
            raise error.within(_where(node)) from None
    return {"nodes": nodes, "outputs": outputs}


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
        facts["line"] = printable(line_of(node.meta["location"]))
    return facts


def _type_facts(node: torch.fx.Node, names: Mapping[Any, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        known = encode_type(value, names)
        if known is not None:
            facts["type"] = known
    number = form_of_size(node.meta["number"], names) if "number" in node.meta else None
    if number is not None:
        facts["number"] = number
    display = None if facts else encode_display_meta(node)
    return facts if display is None else {"display": display}


def _kind_of_input(node: torch.fx.Node) -> str:
    known = node.meta.get("kind")  # the metadata of a node that was read from a file
    if known is None:
        known = TENSOR if isinstance(node.meta.get("val"), torch.Tensor) else NUMBER
    return str(known)


def _encode_node(
    node: torch.fx.Node,
    closure: ClosureValues,
    names: Mapping[Any, Any] | None,
    callees: CalleeWriter,
) -> dict[str, Any]:
    target: Any = node.target
    if node.op == "get_attr":
        return {"name": node.name, "lifted": closure.tensor(str(target))}
    if target is operator.getitem:
        of, index = node.args
        assert isinstance(of, torch.fx.Node)
        return {"name": node.name, "item": index, "of": of.name}
    called: dict[str, Any]
    op = node.meta.get("op")
    if "effect" in node.meta:
        raise NoFileForm("a call of tsfunc.debug or tsfunc.check, which is a Python function")
    if isinstance(target, ControlFlow):
        inner = closure.of_body()
        parts = EncodeGraph(lambda graph: encode_graph(graph, inner, names, callees), callees)
        called = {"control": encode_control(target, parts)}
    elif isinstance(op, TorchOperator):
        called = {"operator": op.name}
    elif target is check_size:
        called = {"operator": _ASSERTION}
    elif "::" in name_of(target):
        called = {"operator": name_of(target)}
    elif target in NAMES_OF_FUNCTIONS:
        called = {"function": NAMES_OF_FUNCTIONS[target]}
    else:
        raise NoFileForm(f"a call of {getattr(target, '__name__', target)}")
    return {
        "name": node.name,
        **called,
        "args": [closure.encode(arg) for arg in node.args],
        "kwargs": {name: closure.encode(arg) for name, arg in node.kwargs.items()},
    }


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
        self._callees, self._is_body = callees, is_body
        self._tensors = tensors
        self._device = device
        self._types = types
        self._made_with = made_with
        self._values = ValueReader(self._known, device).with_other({"generator": self._generator})
        self._nodes: dict[str, torch.fx.Node] = {}
        self._kinds: dict[torch.fx.Node, Kind] = {}
        self.graph = torch.fx.Graph()
        self.lifted: dict[str, torch.Tensor] = {}

    def read(self, field: Field) -> torch.fx.Graph:
        """Return the graph that ``encode_graph`` wrote."""
        nodes, outputs = field.record("nodes", "outputs")
        for each in nodes.items():
            self._node(each)
        results = tuple(self._result(out) for out in outputs.items())
        self.graph.output(results)
        return self.graph

    def _result(self, field: Field) -> Any:
        value = self._values.decode(field)
        nodes: list[torch.fx.Node] = []
        if isinstance(value, list | dict):  # a constant, which contains no node
            torch.fx.map_arg(value, nodes.append)
        if nodes or type(value) is tuple:
            field.expected("the value of a leaf")
        return value

    def _known(self, field: Field) -> torch.fx.Node:
        name = field.text()
        if name not in self._nodes:
            field.fail(f"there is no node {name[:40]!r} before this one")
        return self._nodes[name]

    def _node(self, field: Field) -> None:
        readers = {
            "input": self._input,
            "lifted": self._lifted_tensor,
            "operator": self._operator,
            "function": self._function,
            "item": self._item,
            "control": self._control,
        }
        kinds = [kind for kind in readers if field.get(kind) is not None]
        if len(kinds) != 1:
            field.expected("a node")
        name = field.at("name").text(_LONG_NAME, "the name of a node")
        if name in self._nodes or name in _RESERVED or keyword.iskeyword(name):
            field.at("name").expected("another name")
        kind, node = readers[kinds[0]](field, name)
        if node.name != name:
            field.at("name").expected("a name that code can have")
        self._nodes[name] = node
        self._kinds[node] = kind
        self._read_facts(field, node)

    def _read_facts(self, field: Field, node: torch.fx.Node) -> None:
        known = field.get("type")
        if known is not None:
            self._types.read(known, node)
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

    def _input(self, field: Field, name: str) -> tuple[Kind, torch.fx.Node]:
        field.require_keys(("name", "input"), _OPTIONAL)
        kind = field.at("input").one_of({TENSOR: TENSOR, NUMBER: NUMBER}, "tensor or number")
        if any(node.op != "placeholder" for node in self._nodes.values()):
            field.fail("inputs come first")
        node = self.graph.create_node("placeholder", name, name=name)
        node.meta["kind"] = kind
        return kind, node

    def _lifted_tensor(self, field: Field, name: str) -> tuple[Kind, torch.fx.Node]:
        field.require_keys(("name", "lifted"), _OPTIONAL)
        if self._is_body:
            field.fail("there are no tensors of the file inside of control flow")
        self.lifted[name] = self._tensors.tensor(field.at("lifted"))
        return TENSOR, self.graph.create_node("get_attr", name, name=name)

    def _operator(self, field: Field, name: str) -> tuple[Kind, torch.fx.Node]:
        args, kwargs = self._arguments(field, "operator")
        op, signature = operator_named(field.at("operator"), self._made_with)
        wrong = misfit(signature, args, kwargs, self._kinds.__getitem__)
        if wrong is not None:
            field.fail(wrong)
        if op.name == _ASSERTION and len(args) == 2:
            return NOTHING, self.graph.create_node("call_function", check_size, args, name=name)
        node = self.graph.create_node("call_function", op.overload, args, kwargs, name=name)
        node.meta["op"] = op
        return kind_of_results(signature), node

    def _function(self, field: Field, name: str) -> tuple[Kind, torch.fx.Node]:
        args, kwargs = self._arguments(field, "function")
        function = function_named(field.at("function"))
        if function is torch.Size:
            if kwargs or len(args) != 1 or type(args[0]) is not list or not self._numbers(args[0]):
                field.fail("a shape is made of a list of numbers")
            return [NUMBER], self.graph.create_node("call_function", function, args, name=name)
        if kwargs or not 1 <= len(args) <= 3 or not self._numbers(args):
            field.fail("a function on sizes takes one to three numbers")
        return NUMBER, self.graph.create_node("call_function", function, args, name=name)

    def _numbers(self, values: Sequence[Any]) -> bool:
        return all(
            self._kinds[value] == NUMBER
            if isinstance(value, torch.fx.Node)
            else type(value) in (int, float, bool)
            for value in values
        )

    def _item(self, field: Field, name: str) -> tuple[Kind, torch.fx.Node]:
        field.require_keys(("name", "item", "of"), _OPTIONAL)
        of, index = self._known(field.at("of")), field.at("item").integer(0, 1 << 31)
        kind = kind_of_item(self._kinds[of], index)
        if kind is None:
            field.fail(f"{of.name} has no item {index}")
        node = self.graph.create_node("call_function", operator.getitem, (of, index), name=name)
        return kind, node

    def _control(self, field: Field, name: str) -> tuple[Kind, torch.fx.Node]:
        args, kwargs = self._arguments(field, "control")
        kinds = [self._kinds[arg] if isinstance(arg, torch.fx.Node) else NUMBER for arg in args]
        if kwargs or not all(kind in (TENSOR, NUMBER) for kind in kinds):
            field.fail("control flow takes tensors and numbers")
        parts = DecodeGraph(self._body, self._values.device, self._made_with, self._callees)
        op = decode_control(field.at("control"), parts, kinds)
        return [TENSOR], self.graph.create_node("call_function", op, args, name=name)

    def _body(self, field: Field) -> torch.fx.Graph:
        reader = GraphReader(
            self._tensors, self._device, self._types, self._made_with,
            self._callees, is_body=True,
        )  # fmt: skip
        return reader.read(field)

    def _generator(self, field: Field) -> torch.Generator:
        device, state = field.record("device", "state")
        return self._tensors.generator(state, self._values.device(device))

    def _arguments(self, field: Field, kind: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        field.require_keys(("name", kind, "args", "kwargs"), _OPTIONAL)
        args = tuple(self._values.decode(arg) for arg in field.at("args").items())
        kwargs = {}
        for name, value in field.at("kwargs").mapping().items():
            if not _LONG_NAME.fullmatch(name) or keyword.iskeyword(name):
                value.fail("not the name of an argument")
            kwargs[name] = self._values.decode(value)
        return args, kwargs
