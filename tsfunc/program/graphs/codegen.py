"""The Python that a program runs as, and its text for people.

An operator is called through torch's Python function of the same name if that parses the same
arguments faster than the overload. Results are deleted after their last use; those without a use
have no name.
"""

from __future__ import annotations

import ast
import cmath
import keyword
import linecache
import math
import operator
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import ControlFlow
from tsfunc.bridge.grad.second_order import BACKWARD_FORMULAS, make_differentiable
from tsfunc.bridge.mesh.failures import report_failures
from tsfunc.bridge.mesh.mesh_operators import MAP
from tsfunc.bridge.mesh.meshes import split_check
from tsfunc.bridge.trace.class_members import UserCall
from tsfunc.bridge.tracers.interrupts import restoring_thread_state
from tsfunc.bridge.tracers.operators import (
    METHODS_OF_SIZES,
    TorchOperator,
    fast_function,
    runs_in_cpp,
)
from tsfunc.bridge.writing.module_state import note_assignment
from tsfunc.program.closure.results import InputRef, Update, fill
from tsfunc.program.graphs.properties import properties_of
from tsfunc.program.passes.effects import every_node, node_of_each_target, selects_by_mask
from tsfunc.program.passes.owned_carries import owned_carries, without_copies
from tsfunc.types.scope import Scope
from tsfunc.types.values import same_value
from tsfunc.user_code import LOCATIONS, Location

# --- python source of a graph: one line per operator, without an interpreter or modules


_LITERALS: Final = frozenset({int, bool, str, type(None)})
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def _spell(value: Any, scope: Scope) -> str:
    """Return an argument as Python."""
    if isinstance(value, torch.fx.Node):
        return str(value.target) if value.op == "get_attr" else value.name
    if type(value) in _LITERALS:
        return repr(value)
    if isinstance(value, InputRef):
        return f"args[{value.index}]"
    if isinstance(value, deque):
        return f"{scope.name(deque, 'deque')}({_spell(list(value), scope)})"
    if isinstance(value, set):
        return f"{scope.name(value, 'elements')}.copy()"
    if isinstance(value, list):
        return "[" + ", ".join(_spell(item, scope) for item in value) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(_spell(item, scope) + ", " for item in value) + ")"
    if type(value) is defaultdict:
        factory = scope.name(value.default_factory, "factory")
        return f"{scope.name(defaultdict, 'defaultdict')}({factory}, {_spell(dict(value), scope)})"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{_spell(k, scope)}: {_spell(v, scope)}" for k, v in value.items())
            + "}"
        )
    if isinstance(value, slice):
        parts = ", ".join(_spell(part, scope) for part in (value.start, value.stop, value.step))
        return f"{scope.name(slice, 'slice')}({parts})"
    if isinstance(value, _TORCH_CONSTANTS):
        return f"{scope.name(torch, 'torch')}.{str(value).removeprefix('torch.')}"
    if isinstance(value, torch.device):
        return f"{scope.name(torch, 'torch')}.device({str(value)!r})"
    if type(value) is float and math.isfinite(value):
        return repr(value)
    if type(value) is complex and cmath.isfinite(value):
        text = repr(value)
        if same_value(value, ast.literal_eval(text)):
            return text
        return f"{scope.name(complex, 'complex')}({value.real!r}, {value.imag!r})"  # signs of zeros
    if type(value) is float:
        return _spell_infinite(value, scope)
    return scope.name(value, "constant")


def _spell_infinite(value: float, scope: Scope) -> str:
    """Return an infinity or NaN, with its sign."""
    sign = "-" if math.copysign(1, value) < 0 else ""
    kind = scope.name(math.nan, "nan") if math.isnan(value) else scope.name(math.inf, "inf")
    return f"{sign}{kind}"


_OPERATORS = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.truediv: "/", operator.eq: "==",
    operator.ne: "!=", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
    operator.and_: "&", operator.or_: "|",
}  # fmt: skip
_SIZE: Final = torch.ops.aten.sym_size.int


def _right_hand_side(node: torch.fx.Node, scope: Scope) -> str:
    """Return the right-hand side of a node's line."""
    target: Any = node.target
    args, op = node.args, node.meta.get("op")
    if target is operator.getitem:
        return f"{_spell(args[0], scope)}[{args[1]!r}]"
    if selects_by_mask(node):
        # Under vmap, a mask in brackets makes a selection: NOTE [selections].
        indices: Any = args[1]
        items = [":" if index is None else _spell(index, scope) for index in indices]
        return f"{_spell(args[0], scope)}[{', '.join(items)}]"
    if target is _SIZE:
        return f"{_spell(args[0], scope)}.shape[{args[1]!r}]"
    if op is None and target in _OPERATORS and len(args) == 2:
        left, right = (_spell(arg, scope) for arg in args)
        return f"{left} {_OPERATORS[target]} {right}"
    kwargs: Mapping[str, Any] = node.kwargs
    call: UserCall | None = node.meta.get("call")
    on_node = None if call is None else call.on(node)
    if isinstance(target, ControlFlow):
        called = scope.name(target, target.name)
    elif call is not None and on_node is not None:
        (args, kwargs), function = on_node, call.function
        called = scope.name(function, getattr(function, "__name__", "function"))
    elif isinstance(op, TorchOperator):
        function = fast_function(op, args, kwargs)
        sizes: Any = args[1] if op.name in METHODS_OF_SIZES else None
        if sizes and function is METHODS_OF_SIZES[op.name] and len(args) == 2:
            args = (args[0], *sizes)  # parsed faster than a list
        called = scope.name(function, op.packet)
    else:
        called = scope.name(target, getattr(target, "__name__", "function"))
    parts = [_spell(arg, scope) for arg in args]
    if kwargs:
        parts += [f"{name}={_spell(arg, scope)}" for name, arg in kwargs.items()]
    return f"{called}({', '.join(parts)})"


def _last_uses(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[str]]:
    """Return the names whose last use a node is, for each node that is one."""
    seen: set[torch.fx.Node] = set()
    dropped: dict[torch.fx.Node, list[str]] = {}
    for node in reversed(graph.nodes):
        last = [arg for arg in node.all_input_nodes if arg not in seen]
        if last:
            seen.update(last)
            names = [arg.name for arg in last if arg.op == "call_function"]
            if names and node.op != "output":
                dropped[node] = names
    return dropped


# A statement's Python, indented within the function's body, and the node that it computes: None for
# a statement that only deletes or opens a block.
Statement = tuple[str, torch.fx.Node | None]


def statements(
    graph: torch.fx.Graph, inputs: Sequence[int], scope: Scope, updates: Sequence[Update] = ()
) -> Iterator[Statement]:
    """Yield a graph as the statements of a function's body.

    Args:
        inputs: the index of each input in the list that the function is called with.
        scope: receives the objects that the statements use.
        updates: the assignments that the function ends with.
    """
    indices = iter(inputs)
    dropped = _last_uses(graph)
    quiet = False
    for node in graph.nodes:
        if node.op == "placeholder":
            index = next(indices)
            if node.users:
                quiet = False  # the inputs of a body come at their first use
                yield f"{node.name} = args[{index}]", node
        elif node.op == "output":
            yield from _last_statements(node, updates, scope)
        elif node.op == "call_function":
            if node.meta.get("no_grad"):
                if not quiet:
                    yield f"with {scope.name(torch, 'torch')}.no_grad():", None
                indent, quiet = "    ", True
            else:
                indent, quiet = "", False
            # A result without users is not held until the program ends.
            result = f"{node.name} = " if node.users else ""
            yield f"{indent}{result}{_right_hand_side(node, scope)}", node
            if node in dropped:
                yield f"{indent}del {', '.join(dropped[node])}", None


def scope_of(name: str, graph: torch.fx.Graph, lifted: Mapping[str, torch.Tensor]) -> Scope:
    """Return the scope of a graph's source, in which the values and the function have names."""
    # The function may have the name of an operator.
    return Scope(lifted, taken=(generated_name(name), *(node.name for node in graph.nodes)))


def generated_name(name: str) -> str:
    """Return the name of a function in the source."""
    return name if name.isidentifier() and not keyword.iskeyword(name) else "program"


def generate(
    name: str,
    graph: torch.fx.Graph,
    inputs: Sequence[int],
    lifted: Mapping[str, torch.Tensor],
    updates: Sequence[Update] = (),
) -> tuple[str, Callable[[Sequence[Any]], Sequence[Any]]]:
    """Return the source of a graph, and the function that it defines.

    Args:
        inputs: the index of each input in the list that the function is called with.
        lifted: the tensors that the graph's ``get_attr`` nodes name.
        updates: the assignments that the function ends with.
    """
    for node in graph.nodes:
        if isinstance(node.target, ControlFlow):
            write_bodies(node.target)
    scope = scope_of(name, graph, lifted)
    called = generated_name(name)
    written = list(statements(graph, inputs, scope, updates))
    lines = [f"    {text}\n" for text, _ in written]
    source = f"def {called}(args):\n{''.join(lines)}"
    # The user's line of each line, for tracebacks; line 1 is the function's head.
    locations = {
        line: location
        for line, (_, node) in enumerate(written, start=2)
        if node is not None and (location := node.meta.get("location")) is not None
    }
    objects = {**scope.objects, LOCATIONS: locations}
    exec(compile(source, f"<tsfunc program {called}>", "exec"), objects)
    function: Callable[[Sequence[Any]], Sequence[Any]] = objects[called]
    operators = {node.meta.get("op") for node in graph.nodes}
    if any(isinstance(op, TorchOperator) and op.name in BACKWARD_FORMULAS for op in operators):
        function = make_differentiable(function)
    meshes = {split_check(str(node.args[4]))[0] for node in every_node(graph) if node.target is MAP}
    if meshes:
        function = report_failures(function, sorted(meshes))
    return source, function if _keeps_state(graph) else restoring_thread_state(function)


_KEEPING = frozenset({"_operator", "builtins", "math"})  # modules of functions without state


def _keeps_state(graph: torch.fx.Graph) -> bool:
    """True if no statement changes the state of the thread for a while.

    Then an interrupt can come between any two statements: NOTE [interrupts] in ``interrupts``.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return not any(node.meta.get("no_grad") for node in calls) and all(
        _runs_no_python(node.target) for node in node_of_each_target(calls)
    )


def _runs_no_python(function: Any) -> bool:
    """True for a function that does not run Python code."""
    return runs_in_cpp(function) or getattr(function, "__module__", None) in _KEEPING


def _last_statements(
    output: torch.fx.Node, updates: Sequence[Update], scope: Scope
) -> Iterator[Statement]:
    """Yield the updates, whose tensors are the last results of the graph, and the return."""
    results: Any = output.args[0]
    count = len(results) - sum(len(update.slots()) for update in updates)

    def spell(value: Any) -> str:
        return _spell(fill(value, results[count:]), scope)

    for update in updates:
        if update.buffer is not None and update.slots():
            arguments = f"args[{update.owner}], {update.buffer!r}, {spell(update.value)}"
            yield f"{scope.name(note_assignment, 'note_assignment')}({arguments})", None
        for text in update.statements(f"args[{update.owner}]", spell):
            yield f"{text}  # {update.text}", None
    yield f"return {_spell(tuple(results[:count]), scope)}", output


def write_bodies(op: ControlFlow) -> None:
    """Generate the Python of the bodies of control flow."""
    for body in op.bodies:
        if body.function is None:
            body.source, body.function = generate(body.name, body.graph, body.inputs, {})
            owned = owned_carries(body, op.carried) if op.carried else {}
            if owned:
                graph = without_copies(body, owned)
                body.owned = tuple(owned)
                body.in_place = generate(body.name, graph, body.inputs, {})[1]


# --- a program as text: its Python, with the type of each value and the user's own lines


def print_graph(
    name: str,
    graph: torch.fx.Graph,
    inputs: Sequence[int],
    lifted: Mapping[str, torch.Tensor],
    updates: Sequence[Update] = (),
) -> str:
    """Return the source of a graph, with comments.

    The type of each value is at the end of its line. Each of the user's lines precedes its values.
    The bodies of control flow come first, as functions of their own.
    """
    bodies = [
        print_graph(body.name, body.graph, body.inputs, {}) + "\n"
        for node in graph.nodes
        if isinstance(node.target, ControlFlow)
        for body in node.target.bodies
    ]
    lines = [f"def {generated_name(name)}(args):"]
    lines += [f"    {line}" for line in _lines(name, graph, inputs, lifted, updates)]
    return "".join(bodies) + "".join(f"{line}\n" for line in lines)


def _lines(
    name: str,
    graph: torch.fx.Graph,
    inputs: Sequence[int],
    lifted: Mapping[str, torch.Tensor],
    updates: Sequence[Update] = (),
) -> Iterator[str]:
    properties = properties_of(graph)
    for node in graph.nodes:
        if node.op == "get_attr":
            yield f"# {node.target}: {properties[node.name]}"
    last = ""
    for text, node in statements(graph, inputs, scope_of(name, graph, lifted), updates):
        location = node.meta.get("location") if node is not None else None
        if location is not None and line_of(location) != last:
            last = line_of(location)
            indent = text[: len(text) - len(text.lstrip())]
            yield f"{indent}# {last}"
        comment = (
            f"  # {properties[node.name]}" if node is not None and node.name in properties else ""
        )
        yield text + comment


def line_of(location: Location | str) -> str:
    """Return one of the user's lines: the file, the number and the text, if it is available.

    A program that was loaded from a file has the text itself.
    """
    if isinstance(location, str):
        return location
    text = linecache.getline(location.file, location.line).strip()
    return f"{Path(location.file).name}:{location.line}" + (f"  {text}" if text else "")
