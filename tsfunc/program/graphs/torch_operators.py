"""Operators of a program as torch's own: control flow, and recurrent layers of any length.

torch has one operator for all layers and steps of an ``LSTM``. torch's tools decompose it into as
many steps as the sample has, which refuses every other length. A scan of one step serves all
lengths (``bridge/batch/recurrent_layers``).

A program's control-flow operators (``bridge/control/control_flow``) run as Python does, step by
step, and are vmapped and differentiated as the user's calls are. torch.export, Inductor and other
tools of torch support torch's operators instead: ``cond``, ``while_loop``, ``scan``, ``map_impl``,
``associative_scan``, whose bodies are submodules. Each kind of control flow writes itself in this
form (``ControlFlow.write_for_torch``). A batch of calls is traced again into control flow of the
whole batch, and a derivative into control flow that computes it (``bridge/control/retraced``).

NOTE [layouts of torch's loops]
torch's operators assume that a carry has one layout in the whole loop, that of its initial value,
and that the results of all branches have the same layout. Inductor writes each new carry into
memory of that layout. An expanded tensor has fewer elements in memory than its shape has, so it
can't be a carry. All carries and all results of bodies are therefore contiguous copies here. Views
of them that rely on another layout copy (``reshape``). torch traces the body of a scan on
contiguous slices, so the tensors that are scanned are made contiguous, too.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.fx

from tsfunc.bridge.batch.recurrent_layers import LAYERS
from tsfunc.bridge.control.control_flow import Body, ControlFlow, NoTorchOperator, RandomStates
from tsfunc.bridge.control.retraced import fake_value
from tsfunc.bridge.grad.autograd import is_differentiable
from tsfunc.bridge.sizes.expressions import number_node
from tsfunc.bridge.sizes.symbolic_numbers import size_node
from tsfunc.bridge.trace.graph_nodes import base_node
from tsfunc.bridge.trace.torch_tracing import (
    CARRIES,
    contiguous_like,
    is_control_flow,
    is_strided,
    name_operators,
    traced_by_torch,
)
from tsfunc.bridge.tracers.operators import TorchOperator, operator_of
from tsfunc.bridge.tracers.user_queries import PYTHON_TYPES
from tsfunc.program.graphs.graph_module import name_generators

# --- recurrent layers over a named dim of time, as torch's scan


def has_open_time(node: torch.fx.Node) -> bool:
    """True if a node is a recurrent layer with a symbolic number of steps."""
    op = node.meta.get("op")
    if not isinstance(op, TorchOperator) or op.name not in LAYERS:
        return False
    x: Any = node.args[0]
    return isinstance(x.meta["val"].shape[1 if node.args[-1] else 0], torch.SymInt)


def as_scan(node: torch.fx.Node) -> Callable[..., Any]:
    """Return a function of a recurrent layer's arguments that computes it with torch's scan."""
    return LAYERS[node.meta["op"].name]


# --- control flow of a program as torch's own higher-order operators


# Operators that torch decomposes into a computation and a check, and operators that do both.
_CHECKED: Final[dict[Any, Any]] = {
    torch.ops.aten.linalg_inv.default: torch.ops.aten.linalg_inv_ex.default,
    torch.ops.aten.inverse.default: torch.ops.aten.linalg_inv_ex.default,
    torch.ops.aten.linalg_solve.default: torch.ops.aten.linalg_solve_ex.default,
    torch.ops.aten.linalg_cholesky.default: torch.ops.aten.linalg_cholesky_ex.default,
}

_NONE: Final[Mapping[str, torch.Tensor]] = MappingProxyType({})

# Writes a block: takes its inputs and returns its results, or a single node for one result.
Write = Callable[["Writer", list[torch.fx.Node]], "Sequence[torch.fx.Node] | torch.fx.Node"]


def in_torch_operators(module: torch.fx.GraphModule, exact: bool = True) -> torch.fx.GraphModule:
    """Return the module with torch's operators in place of a program's, if torch has them.

    An operator without a counterpart stays: :func:`left_over` lists it.

    Args:
        module: the module, which is changed.
        exact: True if an ``autograd.Function`` on tensors that require grad stays, so that the
            module has its derivative, and if recurrent layers over a named dim of time stay.
            If False, the forward of the function is inlined, and these layers become scans.
    """
    graph = module.graph
    writer = Writer(module, graph, exact)
    for node in list(graph.nodes):
        if not writer.translates(node):
            _note_shape(node, node.args)
            continue
        nodes, children = set(graph.nodes), dict(module.named_children())
        try:
            with graph.inserting_before(node):
                results = writer.translate(node, node.args)
        except NoTorchOperator as error:
            node.meta[_REASON] = str(error)
            for added in reversed([other for other in graph.nodes if other not in nodes]):
                graph.erase_node(added)
            for name in [name for name, _ in module.named_children() if name not in children]:
                delattr(module, name)
            continue
        for user in list(node.users):
            result = results[user.args[1]]
            result.meta.setdefault("val", user.meta.get("val"))
            user.replace_all_uses_with(result)
            graph.erase_node(user)
        graph.erase_node(node)
    name_generators(module, graph)  # those of inlined bodies
    for part in _graph_modules(module):
        _drop_states(part.graph)
        part.recompile()
    _without_repeats(module)
    module.recompile()
    return module


def _graph_modules(module: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """Return a module and the bodies of its control flow."""
    return (part for part in module.modules() if isinstance(part, torch.fx.GraphModule))


def _note_shape(node: torch.fx.Node, args: Sequence[Any]) -> None:
    """Note the new type of a node that an operator like ``squeeze_`` reshapes in place."""
    op = node.meta.get("op")
    if isinstance(op, TorchOperator) and op.reshapes:
        args[0].meta["val"] = node.meta["val"]


def _drop_states(graph: torch.fx.Graph) -> None:
    """Remove states of random generators, and views of them, that no operator uses."""
    states: list[torch.fx.Node] = []
    for node in graph.nodes:
        viewed = any(argument in states for argument in node.all_input_nodes) and _may_be_view(node)
        if viewed or isinstance(node.target, RandomStates):
            states.append(node)
    for node in reversed(states):
        if not node.users:
            graph.erase_node(node)


def _without_repeats(module: torch.fx.GraphModule) -> None:
    """Pass each operand of a ``cond`` once: torch.export names the inputs of its bodies by them.

    torch's trace of the derivative of a ``cond`` may have the same operand twice.
    """
    for node in module.graph.nodes:
        if node.target is not torch.ops.higher_order.cond:
            continue
        truth, *bodies, operands = node.args
        if len(set(operands)) == len(operands) or any(len(body.users) > 1 for body in bodies):
            continue
        for body in bodies:
            part = module.get_submodule(str(body.target))
            assert isinstance(part, torch.fx.GraphModule)
            inputs = [inner for inner in part.graph.nodes if inner.op == "placeholder"]
            first: dict[Any, torch.fx.Node] = {}
            for operand, placeholder in zip(operands, inputs, strict=True):
                earlier = first.setdefault(operand, placeholder)
                if earlier is not placeholder:
                    placeholder.replace_all_uses_with(earlier)
                    part.graph.erase_node(placeholder)
            part.recompile()
        node.args = (truth, *bodies, tuple(dict.fromkeys(operands)))
    for part in module.children():
        if isinstance(part, torch.fx.GraphModule):
            _without_repeats(part)


def _keep_apart(module: torch.fx.GraphModule, is_body: bool = False) -> None:
    """Give operands and results of bodies memory of their own, and carries one layout.

    Args:
        module: control flow that torch has traced.
        is_body: True if it is a body itself.
    """
    graph = module.graph
    writer = Writer(module, graph)
    for node in graph.nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default
    name_operators(graph)
    for node in graph.nodes:
        if is_control_flow(node.target):
            args = list(node.args)
            at = CARRIES.get(str(node.target))
            operands: list[torch.fx.Node] = []
            with graph.inserting_before(node):
                if at is not None:
                    args[at] = type(args[at])(map(writer.owned, args[at]))
                torch.fx.node.map_arg(args, operands.append)
                distinct = iter(writer.distinct(operands))

            def own(_: Any, nodes: Iterator[Any] = distinct) -> Any:
                return next(nodes)

            node.args = torch.fx.node.map_arg(tuple(args), own)
    (*_, last) = graph.nodes
    if is_body and isinstance(last.args[0], list | tuple):
        with graph.inserting_before(last):
            last.args = (type(last.args[0])(writer.apart(last.args[0])),)
    module.recompile()
    for part in module.children():
        if isinstance(part, torch.fx.GraphModule):
            _keep_apart(part, is_body=True)


_REASON: Final = "no_torch_operator"  # a key of a node's meta


def left_over(module: torch.fx.GraphModule) -> list[tuple[str, str]]:
    """Return the names of a program's own operators that are left in a module, with the reasons."""
    nodes = [node for part in _graph_modules(module) for node in part.graph.nodes]
    left = [node for node in nodes if isinstance(node.target, ControlFlow)]
    # States of generators are left over because of other operators, which have the reason.
    left.sort(key=lambda node: isinstance(node.target, RandomStates))
    return [(node.target.name, node.meta.get(_REASON, "")) for node in left]


def no_operator(name: str, reason: str) -> str:
    """Return the text of an error for an operator that is left over."""
    text = f"{name}, which torch has no operator for"
    return f"{text} ({reason.strip().splitlines()[0]})" if reason.strip() else text


class Writer:
    """Writes operators into the graph of a module, and their bodies as its submodules.

    Attributes:
        exact: see :func:`in_torch_operators`.
        records: True in a body if autograd may record an input of the graph. The nodes of a body
            do not say if it records them.
    """

    records = False

    def __init__(self, root: torch.nn.Module, graph: torch.fx.Graph, exact: bool = True) -> None:
        self.root, self.graph, self.exact = root, graph, exact

    def call(self, target: Any, *args: Any) -> torch.fx.Node:
        return self.graph.call_function(target, args)

    def items(self, node: torch.fx.Node, count: int) -> list[torch.fx.Node]:
        """Return the results of an operator with several results."""
        return [self.call(operator.getitem, node, i) for i in range(count)]

    def distinct(self, operands: Sequence[Any]) -> list[Any]:
        """Return the operands with copies of those that share memory, as torch requires."""
        nodes: list[Any] = []
        roots: set[torch.fx.Node] = set()
        for node in operands:
            tensor = isinstance(node, torch.fx.Node) and isinstance(
                node.meta.get("val"), torch.Tensor
            )
            root = base_node(node) if tensor else None
            if root in roots:
                nodes.append(self.call(torch.ops.aten.clone.default, node))
                nodes[-1].meta["val"] = node.meta["val"]
                continue
            if root is not None:
                roots.add(root)
            nodes.append(node)
        return nodes

    def owned(self, node: Any) -> Any:
        """Return a contiguous copy of a tensor: NOTE [layouts of torch's loops]."""
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if value is not None and not is_strided(value):
            return node
        if not isinstance(node, torch.fx.Node):  # None, or a number
            return node
        clone = torch.ops.aten.clone.default
        copied = self.graph.call_function(
            clone, (node,), {"memory_format": torch.contiguous_format}
        )
        copied.meta["op"] = operator_of(clone)
        if value is not None:
            copied.meta["val"] = contiguous_like(value)
        return copied

    def recorded(self, carry: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Return the first carry of a loop so that autograd records all of it, if it records any.

        torch takes a carry for a constant if it does not require grad before the first step. The
        others get a zero that depends on the operands: the sum of an empty part of each.
        """
        tracked = [x for x in operands if _is_real_or_complex(x) and self.tracks(x)]
        aten = torch.ops.aten
        nodes = []
        for node in carry:
            if _is_real_or_complex(node):
                value = node.meta["val"]
                for x in tracked:
                    flat = self.call(aten.reshape.default, x, [-1])
                    none = self.call(aten.abs.default, self.call(aten.slice.Tensor, flat, 0, 0, 0))
                    zero = self.call(aten.sum.default, none)
                    kind = {"dtype": value.dtype}
                    zero = self.graph.call_function(aten._to_copy.default, (zero,), kind)
                    node = self.call(aten.sub.Tensor, node, zero)  # a sum would change -0.0
                    node.meta["val"] = value
            nodes.append(node)
        return nodes

    def tracks(self, node: torch.fx.Node) -> bool:
        """True if autograd may record a tensor when the graph runs."""
        return self.records or bool(node.meta.get("requires_grad"))

    def truth(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return a predicate of dtype bool, as torch requires."""
        value = node.meta.get("val")
        is_bool = isinstance(value, torch.Tensor) and value.dtype is torch.bool
        return node if is_bool else self.call(torch.ops.aten.ne.Scalar, node, 0)

    def block(self, name: str, like: Sequence[Any], write: Write) -> torch.fx.Node:
        """Add a submodule; return its node.

        Args:
            like: nodes with the types of its inputs.
        """
        root, graph = torch.nn.Module(), torch.fx.Graph()
        inputs = []
        for i, node in enumerate(like):
            inputs.append(graph.placeholder(f"x{i}"))
            if isinstance(node, torch.fx.Node) and "val" in node.meta:
                inputs[-1].meta["val"] = node.meta["val"]
        inner = Writer(root, graph, self.exact)
        kinds = ("placeholder", "get_attr")
        outer_inputs = (x for op in kinds for x in self.graph.find_nodes(op=op, sort=False))
        inner.records = self.records or any(map(self.tracks, outer_inputs))
        results = write(inner, inputs)
        if isinstance(results, torch.fx.Node):
            graph.output(results)
        else:
            graph.output(inner.apart(results))
        if name_generators(root, graph):
            # Inductor draws other numbers there.
            raise NoTorchOperator("a body draws from a torch.Generator")
        return self._part(name, torch.fx.GraphModule(root, graph, name))

    def _part(self, name: str, part: Any) -> torch.fx.Node:
        """Add a submodule or a tensor that the graph refers to; return its node."""
        taken = {*dict(self.root.named_children()), *dict(self.root.named_buffers())}
        at = next(each for i in itertools.count() if (each := f"{name}_{i}") not in taken)
        if isinstance(part, torch.nn.Module):
            self.root.add_module(at, part)
        else:
            self.root.register_buffer(at, part)
        return self.graph.get_attr(at)

    def apart(self, results: Sequence[Any]) -> tuple[Any, ...]:
        """Return results with memory of their own and one layout, as torch requires of bodies."""
        return tuple(map(self.owned, results))

    def translates(self, node: torch.fx.Node) -> bool:
        """True if torch's operators replace a node.

        States of generators stay: they are dropped if no operator of torch's uses them.
        """
        if isinstance(node.target, ControlFlow):
            return not isinstance(node.target, RandomStates)
        return not self.exact and has_open_time(node)

    def translate(self, node: torch.fx.Node, args: Sequence[Any]) -> Sequence[Any]:
        """Write the operators that replace a node; return its results.

        Raises:
            NoTorchOperator: torch has no such operators.
        """
        if isinstance(node.target, ControlFlow):
            return node.target.write_for_torch(self, args)
        layer = as_scan(node)
        operands: list[torch.fx.Node] = []
        torch.fx.node.map_arg(args, operands.append)

        def run(*values: Any) -> Any:
            rest = iter(values)
            return layer(*torch.fx.node.map_arg(args, lambda _: next(rest)))

        return self.written(node.name, run, operands)

    def inline(
        self, body: Body, operands: Sequence[Any], constants: Mapping[str, torch.Tensor] = _NONE
    ) -> list[torch.fx.Node]:
        """Write the operators of a body; return its results.

        Args:
            operands: the values that it takes.
            constants: the tensors that its ``get_attr`` nodes name.
        """
        values: dict[torch.fx.Node, Any] = {}
        positions = iter(body.inputs)
        for node in body.graph.nodes:
            if node.op == "placeholder":
                values[node] = operand = operands[next(positions)]
                if isinstance(operand, torch.fx.Node) and "val" in node.meta:
                    operand.meta.setdefault("val", node.meta["val"])
            elif node.op == "output":
                return [values[item] for item in node.args[0]]
            elif node.op == "get_attr":
                values[node] = self._part(str(node.target), constants[str(node.target)])
                values[node].meta = dict(node.meta)
            elif self.translates(node):
                args = torch.fx.node.map_arg(node.args, values.__getitem__)
                values[node] = self.translate(node, args)
            elif node.target is operator.getitem and isinstance(values[node.args[0]], list):
                values[node] = values[node.args[0]][node.args[1]]
                if isinstance(values[node], torch.fx.Node) and "val" in node.meta:
                    values[node].meta.setdefault("val", node.meta["val"])
            elif node.target in _CHECKED:
                args = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = self._checked(node, *args)
            elif node.meta.get("no_grad"):
                # A body has no grad mode: its no_grad operators get detached tensors.
                cut = {argument: self._cut(values[argument]) for argument in node.all_input_nodes}
                values[node] = self.graph.node_copy(node, cut.__getitem__)
            else:
                values[node] = self.graph.node_copy(node, values.__getitem__)
                _note_shape(node, values[node].args)
        raise AssertionError(f"{body.name} returns nothing")

    def number(self, value: Any, operands: Sequence[Any]) -> Any:
        """Write a symbolic number that is one of some operands, or depends on them.

        Returns:
            Its node; a number if the value is known.

        Raises:
            NoTorchOperator: it depends on something else.
        """
        expr = value.node.expr
        if not expr.free_symbols:
            return PYTHON_TYPES[type(value)](expr)
        numbers_by_expr: dict[Any, Callable[[], torch.fx.Node]] = {}
        for operand in operands:
            meta = operand.meta if isinstance(operand, torch.fx.Node) else {}
            if "number" in meta:
                node = functools.partial(_itself, operand)
                numbers_by_expr.setdefault(meta["number"].node.expr, node)
            for dim, size in enumerate(getattr(meta.get("val"), "shape", ())):
                if isinstance(size, torch.SymInt):
                    node = functools.partial(size_node, self.graph, operand, dim)
                    numbers_by_expr.setdefault(size.node.expr, node)
        if expr in numbers_by_expr:
            number = numbers_by_expr[expr]()
        elif expr.free_symbols <= numbers_by_expr.keys():
            number = number_node(
                self.graph, {s: numbers_by_expr[s]() for s in expr.free_symbols}, expr
            )
        else:
            raise NoTorchOperator(f"the size {expr} is not a size of its operands")
        number.meta["number"] = value
        return number

    def _checked(
        self, node: torch.fx.Node, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> torch.fx.Node:
        """Write an operator that raises by itself, for which torch has a separate check.

        A check is an effect for AOTAutograd, which does not support effects in bodies.
        """
        options = {"check_errors": True, **kwargs}
        call = self.graph.call_function(_CHECKED[node.target], tuple(args), options)
        first = self.call(operator.getitem, call, 0)
        first.meta = {key: node.meta[key] for key in ("val", "requires_grad") if key in node.meta}
        return first

    def _cut(self, node: Any) -> Any:
        """Return a detached tensor."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return node
        detached = self.call(torch.ops.aten.detach.default, node)
        detached.meta["val"] = node.meta["val"]
        detached.meta["op"] = operator_of(torch.ops.aten.detach.default)
        return detached

    def written(
        self, name: str, form: Callable[..., Any], operands: Sequence[Any]
    ) -> list[torch.fx.Node]:
        """Write torch's trace of a function of the operands; return its results.

        Raises:
            NoTorchOperator: torch can't trace it.
        """
        try:
            module = traced_by_torch(form, [fake_value(operand) for operand in operands])
        except NoTorchOperator:
            raise
        except Exception as error:  # torch's errors about unsupported control flow
            raise NoTorchOperator(f"{name}: {error}") from error
        _keep_apart(module)
        values: dict[torch.fx.Node, Any] = {}
        left = iter(self.distinct(operands))
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(left)
            elif node.op == "get_attr":
                name = str(node.target)
                values[node] = self._part(name, getattr(module, name))
            elif node.op == "output":
                return [values[item] for item in node.args[0]]
            else:
                values[node] = self.graph.node_copy(node, values.__getitem__)
        raise AssertionError(f"{name} returns nothing")


def one_of(node: Any, dim: int | None) -> Any:
    """Return a node with the type of a tensor's slice along a dim; the node if ``dim`` is None."""
    if dim is None or not isinstance(node, torch.fx.Node):
        return node
    placeholder = torch.fx.Graph().placeholder("x")
    placeholder.meta["val"] = node.meta["val"].select(dim, 0)
    return placeholder


def _is_real_or_complex(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and is_differentiable(node.meta.get("val"))


def _itself(node: torch.fx.Node) -> torch.fx.Node:
    return node


def _may_be_view(node: torch.fx.Node) -> bool:
    op = node.meta.get("op")
    if not isinstance(op, TorchOperator):
        return node.target is operator.getitem
    return op.is_view or op.writes or op.name == "aten::detach"
