"""Changes of a graph with loops for Inductor: NOTE [loops in Inductor] in ``graph_compilers``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from tsfunc.bridge.trace.torch_tracing import CARRIES

_CHECK_ERRORS: Final = torch.ops.aten._linalg_check_errors.default
_STACKED: Final = {"scan": 3, "map_impl": 2}


class PrepareLoops(CustomGraphPass):
    """A pass for the carries, the symbols in result sizes, and the results of bodies."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in list(graph.nodes):
            if not isinstance(node.target, torch._ops.HigherOrderOperator):
                continue
            name = str(node.target)
            for body in _bodies(graph, node):
                _own_results(body)
            with graph.inserting_before(node):
                if name in CARRIES:
                    at = CARRIES[name]
                    carries = tuple(_contiguous_clone(graph, x) for x in node.args[at])
                    node.update_arg(at, type(node.args[at])(carries))
                if name in _STACKED:
                    _name_symbols(graph, node, _STACKED[name])

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


def _bodies(graph: torch.fx.Graph, node: torch.fx.Node) -> Iterator[torch.fx.GraphModule]:
    module: Any = graph.owning_module
    for arg in node.args:
        if isinstance(arg, torch.fx.Node) and arg.op == "get_attr":
            body = getattr(module, str(arg.target), None)
            if isinstance(body, torch.fx.GraphModule):
                yield body


def _own_results(body: torch.fx.GraphModule) -> None:
    """Clone the results of a body that are its inputs, views of these, or returned twice.

    Inductor takes ``x + zeros`` for ``x``, in results too, and then reuses the memory of the input
    while the result is still read.
    """
    output = body.graph.output_node()
    outputs: Any = output.args[0]
    if isinstance(outputs, torch.fx.Node):  # the condition of a loop
        return
    results: list[Any] = []
    sources = set()
    for result in outputs:
        if isinstance(result, torch.fx.Node) and isinstance(result.meta.get("val"), torch.Tensor):
            source = _source(result)
            if source.op in ("placeholder", "get_attr") or source in sources:
                with body.graph.inserting_before(output):
                    clone = body.graph.call_function(torch.ops.aten.clone.default, (result,))
                clone.meta["val"] = result.meta["val"].clone()
                result = clone
            sources.add(source)
        results.append(result)
    if any(new is not old for new, old in zip(results, outputs, strict=True)):
        output.args = (tuple(results),)
        body.recompile()


def _source(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node whose memory a node's value is a view of."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        first = node.args[0]
        if not isinstance(first, torch.fx.Node):
            break
        node = first
    return node


def assert_in_bodies(module: torch.fx.GraphModule) -> None:
    """Replace the checks of linear algebra in the bodies of loops and branches by assertions.

    AOTAutograd orders ``aten::_linalg_check_errors`` by a token, an input of the whole graph, and
    does not remove the token again if the check is in a body.
    """
    for body in module.modules():
        if body is module or not isinstance(body, torch.fx.GraphModule):
            continue
        checks = body.graph.find_nodes(op="call_function", target=_CHECK_ERRORS)
        for node in checks:
            info, name, *_ = node.args
            with body.graph.inserting_before(node):
                same = body.graph.call_function(torch.ops.aten.eq.Scalar, (info, 0))
                right = body.graph.call_function(torch.ops.aten.all.default, (same,))
                message = f"{name}: the factorization of an argument failed, or it is singular."
                body.graph.call_function(torch.ops.aten._assert_async.msg, (right, message))
            body.graph.erase_node(node)
        if checks:
            body.recompile()


def _contiguous_clone(graph: torch.fx.Graph, node: Any) -> Any:
    """Return a contiguous clone of an initial value that is expanded, other values unchanged."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or 0 not in value.stride():
        return node
    kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format}
    clone = graph.call_function(torch.ops.aten.clone.default, (node,), kwargs)
    clone.meta["val"] = value.clone(**kwargs)
    return clone


def _name_symbols(graph: torch.fx.Graph, loop: torch.fx.Node, at: int) -> None:
    """Make the missing symbols in the sizes of a loop's results operands of the loop.

    Args:
        loop: a ``scan`` or ``map_impl``.
        at: the index of the argument with the operands of each call of the body.
    """
    args: Any = loop.args
    symbols = {number.node.expr for number in _symints_among(args)}
    results = [
        size for size in _sizes_of_values(loop.meta["val"]) if isinstance(size, torch.SymInt)
    ]
    wanted = {symbol for size in results for symbol in size.node.expr.free_symbols}
    missing = sorted(wanted - symbols, key=str)
    size_nodes = [
        node for symbol in missing for node in [_node_of_symbol(graph, symbol)] if node is not None
    ]
    if not size_nodes:
        return
    loop.update_arg(at, (*args[at], *size_nodes))
    module: Any = graph.owning_module
    body = module.get_submodule(str(args[0].target))
    *_, last = [node for node in body.graph.nodes if node.op == "placeholder"]
    for node in size_nodes:
        with body.graph.inserting_after(last):
            last = body.graph.placeholder(f"{node.name}_unused")
            last.meta["val"] = node.meta["val"]
    body.recompile()


def _symints_among(args: Any) -> Iterator[torch.SymInt]:
    nodes: list[torch.fx.Node] = []
    torch.fx.node.map_arg(args, nodes.append)
    for node in nodes:
        if isinstance(node.meta.get("val"), torch.SymInt):
            yield node.meta["val"]


def _sizes_of_values(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield from (*value.shape, *value.stride())


def _node_of_symbol(graph: torch.fx.Graph, symbol: Any) -> torch.fx.Node | None:
    """Return a node for a symbol: an input, a size of an input, or None."""
    for node in graph.nodes:
        if node.op != "placeholder":
            return None
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr == symbol:
            return node
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                size_node: torch.fx.Node = graph.call_function(
                    torch.ops.aten.sym_size.int, (node, dim)
                )
                size_node.meta["val"] = size
                return size_node
    return None
