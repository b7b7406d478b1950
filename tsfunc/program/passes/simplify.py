"""The passes that simplify the graph of a program, and their order.

NOTE [layouts of control flow]
The fake value of a node has the memory layout that the node's value has at run time. Control flow
is an exception: the result of a body has the layout of the branch that runs, a carry has the
layout of the last step, and a derivative the layout that autograd gives it. Inside of a trace,
autograd turns a ``reshape`` into a ``view`` if the value in the trace can be viewed. With another
layout at run time the ``view`` fails, and a ``reshape`` copies, as it does in the user's function.

The removal of an argument changes a body and its call. The graph is well formed at each step: the
new body is a copy of the old one with fewer arguments and results, and the call is then replaced
by a call of the new operator. Each kind of control flow determines the arguments and results that
it does not need (``ControlFlow.without_unused``). For example, a loop does not need a carry that
only affects itself.

A pass changes the graph in place and keeps it well formed; ``simplify`` runs all passes.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import Body, ControlFlow
from tsfunc.bridge.control.node_writes import written_arguments
from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.operators import UNDEFINED, TorchOperator, operator_of
from tsfunc.bridge.tracers.user_queries import same_size
from tsfunc.program.passes.compose_views import compose_views
from tsfunc.program.passes.effects import (
    Aliases,
    checks,
    communicates,
    every_node,
    is_pure,
    is_random,
    is_view,
    node_of_each_target,
    writes,
)
from tsfunc.program.passes.mesh import mark_exchanges, share_equal_values
from tsfunc.program.passes.verify import verify

# --- dead code: nodes whose results are not used


def remove_dead(graph: torch.fx.Graph) -> None:
    """Remove nodes without users, except inputs, checks, writes, random operators and user calls.

    A random operator stays even if its result is unused, since it advances the generator: later
    draws of the function must be the same as without a program. The handler of a user's class gets
    every call of the function.
    """
    for node in reversed(graph.nodes):
        if node.users or node.op not in ("call_function", "get_attr"):
            continue
        if not (writes(node) or is_random(node) or checks(node) or "call" in node.meta):
            graph.erase_node(node)


# --- views of values whose memory layout is known only when the program runs


_VIEWS: Final = frozenset({"aten::view", "aten::_unsafe_view"})


def free_layouts(graph: torch.fx.Graph, body: bool = False) -> None:
    """Turn views into reshapes in a graph with control flow and in its bodies.

    A view that is written to stays a view.
    """
    calls = [node.target for node in graph.nodes if isinstance(node.target, ControlFlow)]
    for call in calls:
        for other in call.bodies:
            free_layouts(other.graph, True)
    if not calls and not body:
        return
    aliases = Aliases(graph)
    reshape = torch.ops.aten.reshape.default
    for node in graph.nodes:
        op = node.meta.get("op")
        if isinstance(op, TorchOperator) and op.name in _VIEWS and not aliases.is_written(node):
            node.target, node.meta["op"] = reshape, operator_of(reshape)


# --- slices to the end of a dim, which torch writes as None or as the largest int


def normalize_slice_ends(graph: torch.fx.Graph) -> None:
    """Write the end of every slice to the end of a dim as None.

    torch writes the largest int or None, depending on how it parses an index and on its symbols.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        if len(node.args) > 3 and type(node.args[3]) is int and node.args[3] == sys.maxsize:
            node.update_arg(3, None)


# --- no-ops: operators whose result equals their argument


Arguments = dict[str, Any]


def remove_noops(graph: torch.fx.Graph, aliases: Aliases) -> None:
    """Replace results that are equal to an argument by the argument.

    An operator that returns its argument itself is always removed. An operator that makes a copy
    or an alias is removed if this can't be observed: neither tensor is written to, and the caller
    does not get the result. An operator that finds a size in data stays: its result has the size of
    its argument only if a check of that size, which reads it from the result, holds.
    """
    for node in graph.nodes:
        op = node.meta.get("op")
        if not isinstance(op, TorchOperator) or op.writes or node.meta.get("reads_data"):
            continue
        if "call" in node.meta:  # a class's handler gets this call
            continue
        name = op.packet
        keeps_value = _ITSELF.get(name) or _EQUAL.get(name)
        if keeps_value is None:
            continue
        arguments = {
            argument.name: value for argument, value in op.signature.bind(node.args, node.kwargs)
        }
        source = next(iter(arguments.values()), None)
        if (
            not isinstance(source, torch.fx.Node)
            or not isinstance(source.meta.get("val"), torch.Tensor)
            or not keeps_value(arguments, source)
            or not _same_metadata(source, node)
        ):
            continue
        if name in _ITSELF or not (
            aliases.escapes(node)
            or aliases.is_written(node)
            or aliases.is_written(source)
            or (not op.is_view and _reads_offset(node))
        ):
            aliases.replace(node, source)


def _same_metadata(source: torch.fx.Node, node: torch.fx.Node) -> bool:
    """True if two values have the same dtype, device, shape, layout and lazy bits."""
    a, b = source.meta["val"], node.meta.get("val")
    if not isinstance(b, torch.Tensor):
        return False
    return (
        (a.dtype, a.device, a.layout, a.dim()) == (b.dtype, b.device, b.layout, b.dim())
        and (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
        and all(same_size(m, n) for m, n in zip(a.shape, b.shape, strict=True))
        and all(same_size(m, n) for m, n in zip(a.stride(), b.stride(), strict=True))
    )


# Operators that depend on where in its storage a tensor begins. A copy begins at 0.
_OF_OFFSETS: Final = frozenset({
    "aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter", "aten::view.dtype",
    "aten::view_as_complex",
})  # fmt: skip


def _reads_offset(node: torch.fx.Node) -> bool:
    """True if an operator on a value, or on a view of it, depends on its offset."""
    ops = ((user, user.meta.get("op")) for user in node.users)
    return any(
        isinstance(op, TorchOperator)
        and (op.name in _OF_OFFSETS or (op.is_view and _reads_offset(user)))
        for user, op in ops
    )


def _always(arguments: Arguments, source: torch.fx.Node) -> bool:
    return True


def _no_copy(arguments: Arguments, source: torch.fx.Node) -> bool:
    """True unless ``to`` has to copy; its argument has the requested type and device."""
    copies = arguments.get("copy", False)
    return copies is False and arguments.get("memory_format") in (None, torch.preserve_format)


def _keeps_all_elements(arguments: Arguments, source: torch.fx.Node) -> bool:
    return arguments.get("train") is False or arguments.get("p") == 0


def _is(name: str, neutral: float) -> Callable[[Arguments, torch.fx.Node], bool]:
    def check(arguments: Arguments, source: torch.fx.Node) -> bool:
        other = arguments.get(name)
        if not isinstance(other, int | float) or isinstance(other, bool):
            return False
        return bool(other == neutral) and arguments.get("rounding_mode") is None

    return check


def _in_order(arguments: Arguments, source: torch.fx.Node) -> bool:
    dims = arguments.get("dims")
    rank = source.meta["val"].dim()
    return isinstance(dims, list | tuple) and [d % rank for d in dims] == list(range(rank))


def _same_dim(arguments: Arguments, source: torch.fx.Node) -> bool:
    rank = source.meta["val"].dim()
    one, other = arguments.get("dim0"), arguments.get("dim1")
    return bool(rank and isinstance(one, int) and isinstance(other, int)
                and one % rank == other % rank)  # fmt: skip


def _is_whole_slice(arguments: Arguments, source: torch.fx.Node) -> bool:
    """True for a slice with step 1, which is the whole tensor since the sizes are equal."""
    return bool(arguments.get("step", 1) == 1)


# Operators that return their argument, under a condition besides equal types and shapes.
_ITSELF: dict[str, Callable[[Arguments, torch.fx.Node], bool]] = {
    "to": _no_copy,
    "type_as": _always,
    "dropout": _keeps_all_elements,
    "alpha_dropout": _keeps_all_elements,
    "feature_dropout": _keeps_all_elements,
    "feature_alpha_dropout": _keeps_all_elements,
}
# Operators that make another tensor with the same elements.
_EQUAL: dict[str, Callable[[Arguments, torch.fx.Node], bool]] = {
    "_to_copy": _always,
    "alias": _always,
    "clone": _always,
    "expand": _always,
    "expand_as": _always,
    "lift_fresh_copy": _always,
    "view": _always,
    "view_as": _always,
    "reshape": _always,
    "slice": _is_whole_slice,
    "permute": _in_order,
    "transpose": _same_dim,
    "div": _is("other", 1),
    "mul": _is("other", 1),
    "pow": _is("exponent", 1),
    "sub": _is("other", 0),
}


# --- common subexpressions: equal computations on the same values are done once


def merge_common(graph: torch.fx.Graph, aliases: Aliases) -> None:
    """Merge equal pure nodes.

    Equal calls differ if one of their arguments is written to between them. Two results are also
    kept if one of them is written to, or if the caller gets both, since they are distinct tensors.
    """
    changes: dict[Any, int] = {}
    seen: dict[Any, torch.fx.Node] = {}
    for node in graph.nodes:
        if not is_pure(node):
            for target in written_arguments(node):
                memory = aliases.memory(target)
                changes[memory] = changes.get(memory, 0) + 1
            continue
        # The sizes of a data-dependent result have symbols from the call that found them.
        if aliases.is_written(node) or node.meta.get("reads_data"):
            continue
        before = changes and [changes.get(aliases.memory(x)) for x in node.all_input_nodes]
        key = _key_of_call(node, before if before and any(before) else ())
        try:
            earlier = seen.setdefault(key, node)
        except TypeError:  # an argument is not hashable
            continue
        if earlier is node or (aliases.escapes(earlier) and aliases.escapes(node)):
            continue
        for fact in ("number", "expr", "value"):  # a part of a number does not have all of them
            if fact in node.meta:
                earlier.meta.setdefault(fact, node.meta[fact])
        aliases.replace(node, earlier)


def _key_of_call(node: torch.fx.Node, changes: Sequence[int | None]) -> Any:
    """Return a key that is equal for equal calls; it is not hashable if an argument is not.

    Args:
        changes: the number of earlier writes to the memory of each of its arguments; empty if
            none was written to.
    """
    quiet = node.meta.get("no_grad", False)
    args = tuple([_freeze(arg) for arg in node.args])
    kwargs = node.kwargs
    called, op = node.target, node.meta.get("op")
    if op is not None and op.overload is called:
        called = op  # torch computes the hash of an overload in Python
    return called, args, _freeze(kwargs) if kwargs else (), quiet, tuple(changes)


_SEQUENCES: Final = (list, tuple)


_NUMBERS: Final = (int, float, complex)


def _freeze(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        return value
    if isinstance(value, _NUMBERS):  # 1, 1.0 and True are equal but different; so are 0.0 and -0.0
        return type(value).__name__, repr(value)
    if isinstance(value, _SEQUENCES):
        return ("list", *[_freeze(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _freeze(item)) for name, item in value.items()])
    return value


# --- constant folding: values that depend on no input are computed once, when the program is made


MOST_ELEMENTS = 1 << 16  # limit for a constant that a program keeps


def fold_constants(
    graph: torch.fx.Graph, aliases: Aliases, frozen: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Compute the nodes that depend on constants alone, and make them constants of the program.

    A node is not folded if the caller gets its result, or if it is written to. Nor is a node whose
    result is large and larger than its arguments, since a program should not store large tensors.

    Args:
        aliases: the memory of its values.
        frozen: tensors that never change, by the names of their ``get_attr`` nodes.

    Returns:
        The new constants, by the names of their ``get_attr`` nodes.
    """
    if torch_state.in_dispatch_modes():
        return {}  # a mode would see the operators, and may change their results
    values = {node: frozen[str(node.target)] for node in graph.nodes
              if node.op == "get_attr" and str(node.target) in frozen}  # fmt: skip
    folded: list[torch.fx.Node] = []
    with torch_state.outside_all_transforms(), torch.no_grad():
        for node in graph.nodes:
            if _is_foldable(node, aliases, values):
                result = _compute(node, values)
                if result is not None:
                    values[node] = result
                    folded.append(node)
    return {
        str(constant.target): values[node]
        for i, node in enumerate(folded)
        if any(user not in values for user in node.users)
        for constant in [_as_constant(graph, node, f"constant_{i}")]
    }


def literals_of(graph: torch.fx.Graph) -> set[str]:
    """Return the names of the tensors that ``torch.tensor(data)`` has made in the function."""
    copy = torch.ops.aten.lift_fresh_copy.default
    return {
        str(node.target)
        for node in every_node(graph)
        if node.op == "get_attr" and node.users and all(x.target is copy for x in node.users)
    }


def is_computable(node: torch.fx.Node) -> bool:
    """True if a node is a pure function of its arguments with a defined tensor result."""
    op = node.meta.get("op")
    return (
        isinstance(op, TorchOperator)
        and isinstance(node.meta.get("val"), torch.Tensor)
        and is_pure(node)
        and op.packet not in UNDEFINED
    )


def _is_foldable(node: torch.fx.Node, aliases: Aliases, values: Mapping[Any, Any]) -> bool:
    if not all(map(values.__contains__, node.all_input_nodes)):
        return False
    value = node.meta.get("val")
    return (
        is_computable(node)
        and not communicates(node)
        and isinstance(value, torch.Tensor)
        and all(isinstance(size, int) for size in value.shape)
        and 0 < value.numel() <= max(MOST_ELEMENTS, *_sizes_of(node, values))
        and not aliases.escapes(node)
        and not aliases.is_written(node)
    )


def _sizes_of(node: torch.fx.Node, values: Mapping[Any, torch.Tensor]) -> list[int]:
    """Return the sizes of a node's arguments."""
    return [0, *(values[arg].numel() for arg in node.all_input_nodes)]


def _compute(node: torch.fx.Node, values: Mapping[torch.fx.Node, torch.Tensor]) -> Any:
    """Return the result; None if it differs in type or layout from the result in the trace."""
    args = torch.fx.map_arg(node.args, values.__getitem__)
    kwargs = torch.fx.map_arg(node.kwargs, values.__getitem__)
    result = node.meta["op"].overload(*args, **kwargs)
    expected = node.meta["val"]
    as_traced = isinstance(result, torch.Tensor) and (
        (result.dtype, result.device, result.shape, result.stride())
        == (expected.dtype, expected.device, expected.shape, expected.stride())
    )
    return result if as_traced else None


def _as_constant(graph: torch.fx.Graph, node: torch.fx.Node, name: str) -> torch.fx.Node:
    with graph.inserting_before(node):
        attribute = graph.create_node("get_attr", name, name=name)
    attribute.target = attribute.name  # differs from `name` if a parameter has that name
    attribute.meta = {
        key: node.meta[key] for key in ("val", "requires_grad", "location") if key in node.meta
    }
    node.replace_all_uses_with(attribute)
    graph.erase_node(node)
    return attribute


# --- removal of unused arguments and results of control-flow bodies


def narrow_bodies(graph: torch.fx.Graph) -> None:
    """Remove unused arguments and results of each body in the graph, and in nested bodies."""
    for node in reversed(list(graph.nodes)):
        if not isinstance(node.target, ControlFlow):
            continue
        for body in node.target.bodies:
            merge_common(body.graph, Aliases(body.graph))
            narrow_bodies(body.graph)
            remove_dead(body.graph)
        _narrow(graph, node, node.target)


def _narrow(graph: torch.fx.Graph, node: torch.fx.Node, op: ControlFlow) -> None:
    if any(user.target is not operator.getitem for user in node.users):
        return
    for user in list(node.users):
        if not user.users:
            graph.erase_node(user)
    narrowed = op.without_unused(len(node.args), {user.args[1] for user in node.users})  # type: ignore[misc]
    if narrowed is None:
        return
    with graph.inserting_before(node):
        new = graph.call_function(narrowed.op, tuple(node.args[i] for i in narrowed.operands))
    new.meta = dict(node.meta)
    for user in list(node.users):
        user.args = (new, narrowed.results.index(user.args[1]))
    graph.erase_node(node)


def live_inputs(body: Body, results: Collection[int]) -> set[int]:
    """Return the indices of the operands that some results of a body, or its effects, depend on."""
    live = _live_nodes(body, results)
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    return {at for node, at in zip(inputs, body.inputs, strict=True) if node in live}


def narrowed_body(body: Body, results: Collection[int], numbers: Mapping[int, int]) -> Body:
    """Return a body with fewer arguments and results that computes the same.

    Args:
        body: the body, which is not changed.
        results: the indices of the results that are kept.
        numbers: the new indices of the operands that these results depend on.
    """
    live = _live_nodes(body, results)
    graph = torch.fx.Graph()
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    inputs: list[int] = []
    operands = iter(body.inputs)
    for node in body.graph.nodes:
        at = next(operands) if node.op == "placeholder" else None
        if node.op == "output":
            graph.output(tuple(values[node.args[0][i]] for i in sorted(results)))
        elif node in live:
            values[node] = graph.node_copy(node, values.__getitem__)
            if at is not None:
                inputs.append(numbers[at])
    return Body(body.name, graph, tuple(inputs))


def _live_nodes(body: Body, results: Collection[int]) -> set[torch.fx.Node]:
    nodes = list(body.graph.nodes)
    returned = nodes[-1].args[0]
    live = {returned[i] for i in results}
    for node in reversed(nodes[:-1]):
        if node in live or writes(node) or is_random(node) or checks(node):
            live.add(node)
            live.update(node.all_input_nodes)
    return live


# --- the order of the passes


T = TypeVar("T")


def verification_is_on() -> bool:
    """True if an environment variable enables the verification of every graph."""
    return os.environ.get("TSFUNC_VERIFY", "0") not in ("", "0")


def simplify(
    name: str, graph: torch.fx.Graph, lifted: Collection[str], frozen: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Run every pass.

    Args:
        lifted: the names of its closed-over tensors.
        frozen: the tensors among them that never change.

    Returns:
        The constants that were computed, by the names of their ``get_attr`` nodes.

    Raises:
        MalformedProgramError: a pass has broken the graph, and verification is on
            (``verification_is_on``).
    """

    def run(step: Callable[..., T], *args: Any) -> T:
        before = list(graph.nodes) if verification_is_on() else None
        result = step(graph, *args)
        constants = result if isinstance(result, dict) else {}
        if before is not None and before != list(graph.nodes):
            verify(graph, {*lifted, *constants}, f"{name} after {step.__name__}")
        return result

    if verification_is_on():
        verify(graph, lifted, f"{name} as traced")
    nodes = node_of_each_target(every_node(graph))
    views, exchanges = any(map(is_view, nodes)), any(map(communicates, nodes))
    run(free_layouts)
    run(normalize_slice_ends)
    aliases = Aliases(graph)
    run(remove_noops, aliases)
    if views:
        run(compose_views, aliases)
    if exchanges:
        run(share_equal_values)
        aliases = Aliases(graph)
    run(merge_common, aliases)
    constants = run(fold_constants, aliases, frozen)
    lifted = {*lifted, *constants}
    run(remove_dead)
    run(narrow_bodies)
    run(remove_dead)
    if exchanges:
        run(mark_exchanges)
    return constants


def simplify_part(graph: torch.fx.Graph) -> None:
    """Run the passes over a graph that becomes part of another program, and has no constants."""
    aliases = Aliases(graph)
    remove_noops(graph, aliases)
    merge_common(graph, aliases)
    remove_dead(graph)
    narrow_bodies(graph)
    remove_dead(graph)
