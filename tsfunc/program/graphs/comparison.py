"""Comparison of a program with symbolic sizes and one that was traced for fixed sizes.

The fixed program may have constants in place of numbers that are inputs: NOTE [automatic dynamic
sizes].

NOTE [sizes 0 and 1]
Operators treat the sizes 0 and 1 differently: they broadcast, squeeze and decide contiguity. A
trace with symbolic sizes therefore assumes sizes of 2 or more. A call with a named dim of size 0
or 1 is traced once with that size fixed. If that trace has the same operators on the same numbers,
the symbolic program serves that size too; otherwise the call has a program of its own. A value
that depends on sizes alone (``arange(n)``) is a folded constant in the fixed program, and is
compared by value.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import Body, ControlFlow
from tsfunc.bridge.tracers import torch_state
from tsfunc.program.closure.closure_guards import AnyClosureNumber
from tsfunc.program.closure.results import InputRef, fill
from tsfunc.program.graphs.data import ProgramData
from tsfunc.program.passes.simplify import is_computable
from tsfunc.types.values import same_value


def same_program(symbolic: ProgramData, fixed: ProgramData, sizes: Mapping[str, Any]) -> bool:
    """True if the symbolic program does the same as a program with some sizes fixed.

    Args:
        symbolic: a program for any sizes of named dims.
        sizes: a number for each size and input number that is fixed, and a symbol for each other.
    """
    if symbolic.out_tree != fixed.out_tree or _tensor_places(symbolic) != _tensor_places(fixed):
        return False
    with torch_state.outside_all_transforms(), torch.no_grad():
        return _Matching(symbolic, fixed, sizes).is_whole()


def _tensor_places(program: ProgramData) -> Sequence[Any]:
    """Return the places of the inputs without those that are numbers."""
    numbers = () if program.call_spec is None else program.call_spec.numbers
    positions = {spec.position for spec in numbers}
    guards = () if program.closure_guards is None else program.closure_guards.guards
    read = {guard.source.path for guard in guards if isinstance(guard, AnyClosureNumber)}
    places = [_place(program, index) for index in program.inputs if index not in positions]
    return [place for place in places if place not in read]


def _place(program: ProgramData, position: int) -> Any:
    """Return the place of a value that a program is called with: an argument, or a path."""
    reads = () if program.closure_guards is None else program.closure_guards.inputs
    first = len(program.argument_paths)
    return position if position < first else reads[position - first][0].path


@dataclass
class _Matching:
    """A mapping of the steps of one program to those of the other."""

    symbolic: ProgramData
    fixed: ProgramData
    sizes: Mapping[str, Any]
    matched: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)
    values: dict[torch.fx.Node, torch.Tensor] = field(default_factory=dict)  # of `symbolic`

    def is_whole(self) -> bool:
        """True if all steps correspond, except those that the fixed program has folded."""
        return self._same_graph(self.symbolic.graph, self.fixed.graph)

    def _same_graph(self, symbolic: torch.fx.Graph, fixed: torch.fx.Graph) -> bool:
        right = iter([node for node in _tensor_nodes(fixed) if not self._is_constant(node)])
        b = next(right, None)
        for a in _tensor_nodes(symbolic):
            if b is not None and self._same_step(a, b):
                self.matched[a] = b
                b = next(right, None)
            elif self._value(a) is None:
                return False
        return b is None

    def _same_step(self, a: torch.fx.Node, b: torch.fx.Node) -> bool:
        quiet = a.meta.get("no_grad") == b.meta.get("no_grad")
        if a.op != b.op or not quiet:
            return False
        if isinstance(a.target, ControlFlow):
            return self._same_control_flow(a, b)
        if a.op == "call_function" and a.target is not b.target:
            return False
        if a.op == "get_attr":
            return self.symbolic.tensor(a) is self.fixed.tensor(b)
        if a.op == "output":
            if a.graph is not self.symbolic.graph:
                return self._same(a.args, b.args)
            return self._same_results(a.args[0], b.args[0])
        return self._same((a.args, a.kwargs), (b.args, b.kwargs))

    def _same_control_flow(self, a: torch.fx.Node, b: torch.fx.Node) -> bool:
        """True if two nodes run the same control flow.

        A body has a number of the symbolic program as an operand, and one of the fixed program as
        a constant.
        """
        places: list[int | None] = []  # of the operands of `a` among those of `b`
        count = 0
        for operand in a.args:
            following = b.args[count : count + 1]
            if following and self._same(operand, following[0]):
                places.append(count)
                count += 1
            elif isinstance(operand, torch.fx.Node) and "value" in operand.meta:
                places.append(None)
            else:
                return False
        return count == len(b.args) and self._same_operator(a.target, b.target, places)

    def _same_operator(self, a: Any, b: Any, places: Sequence[int | None]) -> bool:
        """True if two operators are one kind of control flow with the same bodies."""
        if a is b:
            return True
        if type(a) is not type(b) or not isinstance(a, ControlFlow):
            return same_value(a, b)
        mine, others = _attributes(a), _attributes(b)
        return (
            mine.keys() == others.keys()
            and all(self._same_operator(mine[name], others[name], places) for name in mine)
            and len(a.bodies) == len(b.bodies)
            and all(
                _inputs_without_numbers(x, places) == y.inputs
                and self._same_graph(x.graph, y.graph)
                for x, y in zip(a.bodies, b.bodies, strict=True)
            )
        )

    def _same_results(self, a: Any, b: Any) -> bool:
        """True if two programs return and assign the same; numbers may be constants."""
        count = self.symbolic.out_tree.num_leaves
        mine, others = self.symbolic.updates, self.fixed.updates
        return (
            self._same(a[:count], b[:count])
            and len(mine) == len(others)
            and all(
                (x.text, x.target, x.fills, x.deletes) == (y.text, y.target, y.fills, y.deletes)
                and self._same(InputRef(x.owner), InputRef(y.owner))
                and self._same(fill(x.value, a[count:]), fill(y.value, b[count:]))
                for x, y in zip(mine, others, strict=True)
            )
        )

    def _same(self, a: Any, b: Any) -> bool:
        if isinstance(a, torch.fx.Node):
            return self._same_value(a, b)
        if isinstance(a, list | tuple | deque) and isinstance(b, list | tuple | deque):
            return len(a) == len(b) and all(map(self._same, a, b))
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(self._same(a[k], b[k]) for k in a)
        if isinstance(a, InputRef) and isinstance(b, InputRef):
            return bool(_place(self.symbolic, a.index) == _place(self.fixed, b.index))
        return same_value(a, b)

    def _same_value(self, a: torch.fx.Node, b: Any) -> bool:
        if "value" in a.meta:
            return self._same_number(a.meta["value"](self.sizes), b)
        if not isinstance(b, torch.fx.Node):
            return False
        if "expr" in a.meta and "expr" in b.meta:  # a number of data
            return self._same_step(a, b)
        if not self._is_constant(b):
            return self.matched.get(a) is b
        one, other = self._value(a), self.fixed.tensor(b)
        return one is not None and one.dtype == other.dtype and torch.equal(one, other)

    def _same_number(self, a: Any, b: Any) -> bool:
        """True if a number of the symbolic program equals one of the fixed program.

        A float may differ by the order of roundings.
        """
        if isinstance(b, torch.fx.Node):
            return "value" in b.meta and bool(b.meta["value"](self.sizes) == a)
        if type(b) is float and isinstance(a, int | float):
            return math.isclose(a, b, rel_tol=1e-12)
        return type(b) in (int, float, bool) and bool(a == b)

    def _is_constant(self, node: torch.fx.Node) -> bool:
        return node.op == "get_attr" and str(node.target) in self.fixed.constants

    def _value(self, node: Any) -> torch.Tensor | None:
        """Return a tensor of ``symbolic`` that depends on constants and sizes alone, or None."""
        if node not in self.values:
            if node.op == "get_attr" and str(node.target) in self.symbolic.constants:
                self.values[node] = self.symbolic.tensor(node)
            elif is_computable(node):
                values = {argument: self._known(argument) for argument in node.all_input_nodes}
                if any(value is None for value in values.values()):
                    return None
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                try:
                    self.values[node] = node.meta["op"].overload(*args, **kwargs)
                except Exception:  # the operator does not accept such sizes
                    return None
        return self.values.get(node)

    def _known(self, node: torch.fx.Node) -> Any:
        """Return a tensor as ``_value`` does, or a number; None if it is unknown."""
        if "value" not in node.meta:
            return self._value(node)
        number = node.meta["value"](self.sizes)
        return number if isinstance(number, int | float) else None


def _inputs_without_numbers(body: Body, places: Sequence[int | None]) -> tuple[int, ...] | None:
    """Return the new places of a body's inputs, without the numbers that have none.

    None if a tensor has no place, because the operands of the body are not those of the operator.
    """
    if None not in places:
        return body.inputs
    nodes = [node for node in body.graph.nodes if node.op == "placeholder"]
    input_places = [places[i] if i < len(places) else None for i in body.inputs]
    if any(
        p is None and "value" not in node.meta for p, node in zip(input_places, nodes, strict=True)
    ):
        return None
    return tuple(place for place in input_places if place is not None)


def _attributes(op: ControlFlow) -> dict[str, Any]:
    """Return the attributes of control flow that are the same for each trace of its function."""
    return {k: v for k, v in vars(op).items() if k not in ("name", "__name__", "bodies")}


def _tensor_nodes(graph: torch.fx.Graph) -> Sequence[torch.fx.Node]:
    """Return the nodes with tensor values; numbers are compared at their uses."""
    return [node for node in graph.nodes if "expr" not in node.meta and not _is_number(node)]


def _is_number(node: torch.fx.Node) -> bool:
    if node.op != "call_function" or isinstance(node.target, ControlFlow):
        return False
    return "op" not in node.meta and "val" not in node.meta
