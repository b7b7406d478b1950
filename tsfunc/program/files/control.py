"""Control flow in files: which kinds there are, and what a file says of each.

The room of transforms has the operators; it registers each kind here.
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
    """Writes what control flow is made of.

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
    """Reads what control flow is made of.

    Attributes:
        graph: reads the graph of a body.
        device: reads a device.
        version: of the format that the file is of.
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
        name: what files call it.
        cls: the class of its operators.
        encode: what a file says of one beside its bodies: names to what JSON has.
        decode: makes one of what a file says, its name, what reads the graphs of bodies, and the
            kinds of what it is called with; refuses by `Field.fail` what does not go together.
        since: the version of the format that has it first.
    """

    name: str
    cls: type[ControlFlow]
    encode: Callable[[Any, EncodeGraph], dict[str, Any]]
    decode: Callable[[Field, str, DecodeGraph, Sequence[Any]], ControlFlow]
    since: int = 1


_by_name: dict[str, ControlKind] = {}


def register_control(kind: ControlKind) -> None:
    """Makes a kind of control flow known to files."""
    _by_name[kind.name] = kind


def encode_control(op: ControlFlow, graph: EncodeGraph) -> dict[str, Any]:
    """An operator of control flow as JSON.

    Raises:
        NoFileForm: it is of no kind that files have.
    """
    for kind in _by_name.values():
        if type(op) is kind.cls:
            return {"kind": kind.name, "name": op.name, **kind.encode(op, graph)}
    raise NoFileForm(f"{op.name}, which runs Python code of its own")


def version_of(graph: torch.fx.Graph) -> int:
    """The first version of the format that has all control flow of a graph."""
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
    """The bodies of an operator."""
    return [
        {"name": body.name, "graph": graph(body.graph), "inputs": list(body.inputs)}
        for body in op.bodies
    ]


def decode_control(field: Field, graph: DecodeGraph, kinds: Sequence[Any]) -> ControlFlow:
    """The operator that `encode_control` wrote.

    Args:
        field: what the file says of it.
        graph: reads the graph of a body.
        kinds: what the operator is called with.
    """
    known = {name: each for name, each in _by_name.items() if each.since <= graph.version}
    kind = field.at("kind").one_of(known, "a kind of control flow")
    name = field.at("name").text(_NAME, "a name")
    found: ControlFlow = kind.decode(field, name, graph, kinds)
    return found


def decode_bodies(field: Field, graph: DecodeGraph, kinds: Sequence[Any]) -> list[Body]:
    """The bodies that `encode_bodies` wrote, for an operator that is called with these kinds."""
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
    """How many results a body has."""
    (*_, last) = body.graph.nodes
    return len(last.args[0])
