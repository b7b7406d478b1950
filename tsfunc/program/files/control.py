"""Control flow in files: the kinds of control flow, and the JSON of each.

``transforms`` defines the operators and registers each kind here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx

from tsfunc.bridge.control.control_flow import Body, ControlFlow
from tsfunc.program.files.callees import CalleeReader, CalleeWriter
from tsfunc.program.files.fields import Field
from tsfunc.program.files.values import NoFileForm

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
        device: reads a device.
        version: the version of the file's format.
        made_with: the torch version of the file, for errors.
        callees: the functions that the program calls.
    """

    graph: Callable[[Field], torch.fx.Graph]
    device: Callable[[Field], torch.device]
    version: int
    made_with: str
    callees: CalleeReader

    def __call__(self, field: Field) -> torch.fx.Graph:
        return self.graph(field)


@dataclass(frozen=True)
class ControlKind:
    """A kind of control flow.

    Attributes:
        name: its name in files.
        cls: the class of its operators.
        encode: returns the JSON fields of an operator, its bodies included.
        decode: makes an operator from its JSON, its name, a reader of the graphs of bodies, and
            the kinds of its operands; reports inconsistent JSON with `Field.fail`.
        since: the first version of the format that has it.
    """

    name: str
    cls: type[ControlFlow]
    encode: Callable[[Any, EncodeGraph], dict[str, Any]]
    decode: Callable[[Field, str, DecodeGraph, Sequence[Any]], ControlFlow]
    since: int = 1


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


def version_of(graph: torch.fx.Graph) -> int:
    """Return the first version of the format that has all control flow of a graph."""
    ops = [node.target for node in graph.nodes if isinstance(node.target, ControlFlow)]
    return max(map(_version_of, ops), default=1)


def _version_of(op: ControlFlow) -> int:
    own = [kind.since for kind in _by_name.values() if type(op) is kind.cls]
    inside = [version_of(body.graph) for body in op.bodies]
    derived = getattr(op, "op", None)
    if isinstance(derived, ControlFlow):
        inside.append(_version_of(derived))
    return max([1, *own, *inside])


def encode_bodies(op: ControlFlow, graph: EncodeGraph) -> list[Any]:
    """Return the bodies of an operator as JSON."""
    return [
        {"name": body.name, "graph": graph(body.graph), "inputs": list(body.inputs)}
        for body in op.bodies
    ]


def decode_control(field: Field, graph: DecodeGraph, kinds: Sequence[Any]) -> ControlFlow:
    """Return the operator that `encode_control` wrote.

    Args:
        field: the JSON of the operator.
        graph: reads the graph of a body.
        kinds: the kinds of the operands.
    """
    known = {name: each for name, each in _by_name.items() if each.since <= graph.version}
    kind = field.at("kind").one_of(known, "a kind of control flow")
    name = field.at("name").text(_NAME, "a name")
    found: ControlFlow = kind.decode(field, name, graph, kinds)
    return found


def decode_bodies(field: Field, graph: DecodeGraph, kinds: Sequence[Any]) -> list[Body]:
    """Return the bodies that `encode_bodies` wrote, for operands of these kinds."""
    bodies = []
    for each in field.items():
        name, inner, inputs_field = each.record("name", "graph", "inputs")
        inputs = tuple(at.integer(0, len(kinds) - 1) for at in inputs_field.items())
        read = graph(inner)
        own = [node for node in read.nodes if node.op == "placeholder"]
        if len(own) != len(inputs):
            inputs_field.fail(f"the graph has {len(own)} inputs, not {len(inputs)}")
        for node, at in zip(own, inputs, strict=True):
            if node.meta["kind"] != kinds[at]:
                inputs_field.fail(f"{node.name} is given a {kinds[at]}")
        bodies.append(Body(name.text(_NAME, "a name"), read, inputs))
    return bodies


def results_of(body: Body) -> int:
    """Return the number of results of a body."""
    (*_, last) = body.graph.nodes
    return len(last.args[0])
