"""Numbers that a function puts into tensors: ``torch.tensor(x.shape[1]) // 2`` as a size.

A trace has no data, but the elements of a tensor that is computed from sizes and plain numbers
alone are known: each is a number, or an expression in the sizes. A read of such an element gives
that number, as if the function had computed it without tensors.

The elements are computed when they are read, from the nodes that lead to the tensor. Integers may
depend on sizes: an operator that only moves elements runs on their positions in a list, and
arithmetic appends to the list. If no size is open, as in ``(torch.linspace(0, 1, 5) > 0).all()``,
the operators themselves run.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import optree
import torch
import torch.fx

from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.operators import UNDEFINED, TorchOperator
from tsfunc.bridge.tracers.user_queries import statically_known_true

MOST_ELEMENTS: Final = 64  # of a tensor whose elements are followed
MOST_NODES: Final = 256  # that lead to a number
MOST_CONSTANT_ELEMENTS: Final = 1 << 16  # of a tensor that is computed to read a number
_DTYPES: Final = (torch.int64, torch.bool)  # a number in them is exact
_INT64: Final = 1 << 63


class _Unknown(Exception):
    """The elements do not follow from sizes and plain numbers."""


def known_number(node: torch.fx.Node, tensors: Mapping[torch.fx.Node, torch.Tensor]) -> Any:
    """Return the element of a tensor of one element, if it follows from sizes and plain numbers.

    Args:
        tensors: the tensors of plain numbers that the function has made, by their nodes.

    Returns:
        A number, or a symbolic number; None if it is not known.
    """
    number = _count_of_sequences(node)
    if number is None and node.meta["val"].dtype in _DTYPES:
        number = _number_of_sizes(node, tensors)
    return _constant_number(node, tensors) if number is None else number


def _count_of_sequences(node: torch.fx.Node) -> Any:
    """Return the number of sequences that are packed, if it is the element; else None.

    The second result of ``_pack_padded_sequence`` has the number of sequences at each step: all of
    them at the first.
    """
    if _operator_name(node) != "select" or node.args[1:] != (0, 0):
        return None
    sizes: Any = node.args[0]
    if sizes.target is not operator.getitem or sizes.args[1] != 1:
        return None
    packed = sizes.args[0]
    if _operator_name(packed) != "_pack_padded_sequence" or _is_written(node.graph, {sizes}):
        return None
    x, _, batch_first = packed.args
    return x.meta["val"].shape[0 if batch_first else 1]


def _number_of_sizes(node: torch.fx.Node, tensors: Mapping[torch.fx.Node, torch.Tensor]) -> Any:
    """Return an integer or a bool that may depend on sizes; None if it is not known."""
    try:
        order = _ancestors(node, lambda x: x in tensors or "number" in x.meta, _is_followed)
        if not order or _is_written(node.graph, {*order}):
            return None
        elements = _Elements(tensors)
        with torch_state.outside_all_transforms(), torch.no_grad():
            for step in order:
                elements.add(step)
            return elements.element(node)
    except _Unknown:
        return None


def _ancestors(
    node: torch.fx.Node,
    is_known: Callable[[torch.fx.Node], bool],
    is_followed: Callable[[torch.fx.Node], bool],
) -> list[torch.fx.Node] | None:
    """Return the nodes that a node is computed from, in order, and the node itself.

    The answer ends at nodes that are known, and is None if one of the others is not followed.
    """
    order: dict[torch.fx.Node, None] = {}
    pending = [node]
    while pending:
        each = pending[-1]
        if each in order or is_known(each):
            pending.pop()
            continue
        if len(order) + len(pending) > MOST_NODES or not is_followed(each):
            return None
        inputs = [x for x in each.all_input_nodes if x not in order and not is_known(x)]
        if inputs:
            pending += inputs
        else:
            order[pending.pop()] = None
    return [*order]


def _is_followed(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and (
        node.target is operator.getitem
        or _operator_name(node) in _FOLLOWED
        or (node.meta.get("op") is not None and node.meta["op"].is_view)
    )


def _operator_name(node: torch.fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else str(packet.__name__)


def _is_written(graph: torch.fx.Graph, nodes: set[torch.fx.Node]) -> bool:
    """True if a call writes into one of the tensors, or into a view of one."""
    nodes = set(nodes)
    for node in graph.nodes:
        op = node.meta.get("op")
        inputs = [x for x in node.all_input_nodes if x in nodes]
        if not inputs or op is None:
            continue
        if op.writes:
            return True
        if op.is_view:
            nodes.add(node)
    return False


def _constant_number(node: torch.fx.Node, tensors: Mapping[torch.fx.Node, torch.Tensor]) -> Any:
    """Return a Python number that is computed from plain numbers alone; None if it is not known.

    The operators run as they will in the program, which checks the settings of torch that they
    depend on.
    """
    order = _ancestors(node, tensors.__contains__, lambda x: _is_constant_call(x, tensors))
    if not order or torch_state.in_dispatch_modes() or _is_written(node.graph, {*order}):
        return None
    values: dict[torch.fx.Node, Any] = {}
    with torch_state.outside_all_transforms(), torch.no_grad():
        for step in order:
            if _is_literal(step, tensors):
                values[step] = tensors[step.all_input_nodes[0]]
                continue
            args, kwargs = torch.fx.map_arg((step.args, step.kwargs), values.__getitem__)
            call = operator.getitem if step.target is operator.getitem else step.meta["op"].overload
            values[step] = call(*args, **kwargs)
            kinds = [
                [(x.dtype, x.shape) for x in optree.tree_leaves(result)]
                for result in (values[step], step.meta.get("val", values[step]))
            ]
            if kinds[0] != kinds[1]:
                return None
        return values[node].item()


def _is_literal(node: torch.fx.Node, tensors: Mapping[torch.fx.Node, torch.Tensor]) -> bool:
    """True if a node is the tensor that ``torch.tensor(data)`` has made in the function."""
    return _operator_name(node) == "lift_fresh_copy" and node.args[0] in tensors


def _is_constant_call(node: torch.fx.Node, tensors: Mapping[torch.fx.Node, torch.Tensor]) -> bool:
    """True if a call of torch's operators returns small tensors, the same at every run."""
    if any(x in tensors for x in node.all_input_nodes) and not _is_literal(node, tensors):
        return False  # a tensor from outside
    op, values = node.meta.get("op"), optree.tree_leaves(node.meta.get("val"))
    called = isinstance(op, TorchOperator) and (
        op.overload.namespace == "aten"
        and not (op.writes or op.asserts or op.random or op.packet in UNDEFINED)
    )
    return (called or node.target is operator.getitem) and all(
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and all(type(size) is int for size in value.shape)
        and value.numel() <= MOST_CONSTANT_ELEMENTS
        for value in values
    )


class _Elements:
    """The elements of tensors, as positions in one list of numbers."""

    def __init__(self, tensors: Mapping[torch.fx.Node, torch.Tensor]) -> None:
        self._numbers: list[Any] = []
        self._positions: dict[torch.fx.Node, Any] = {}
        self._tensors = tensors

    def element(self, node: torch.fx.Node) -> Any:
        """Return the element of a tensor of one element."""
        return self._numbers[int(self._positions[node])]

    def add(self, node: torch.fx.Node) -> None:
        """Compute the elements of a node, given those of the nodes before.

        Raises:
            _Unknown: they do not follow from these.
        """
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            plain = value.dtype in _DTYPES and value.device.type == "cpu"
            is_fixed = all(type(size) is int for size in value.shape)
            small = is_fixed and value.numel() <= MOST_ELEMENTS
            if not plain or not small:
                raise _Unknown
        positions = self._computed(node)
        if isinstance(value, torch.Tensor) and positions.shape != value.shape:
            raise _Unknown
        self._positions[node] = positions

    def _computed(self, node: torch.fx.Node) -> Any:
        name = _operator_name(node)
        if node.target is operator.getitem:
            return self._positions[node.args[0]][node.args[1]]  # type: ignore[index]
        source = node.args[0] if node.args else None
        if _is_literal(node, self._tensors):
            constant = self._tensors[source]  # type: ignore[index]
            return self._new(constant.flatten().tolist(), constant.shape)
        if name in _FACTORIES:
            return self._new([self._number(node.args[_FACTORIES[name]])], ()).expand(
                node.meta["val"].shape
            )
        if name in _REDUCTIONS and len(node.args) == 1 and not node.kwargs:
            (x,) = self._operands(node.args)
            return self._new([_REDUCTIONS[name](self._at(x))], ())
        if name in _REDUCTIONS:
            raise _Unknown
        if name in _REARRANGEMENTS or node.meta["op"].is_view:
            return self._moved(node)
        return self._pointwise(self._function(node), self._operands(_operands_of(node)))

    def _moved(self, node: torch.fx.Node) -> Any:
        """Run an operator that moves elements on their positions."""

        def positions(x: torch.fx.Node) -> Any:
            if x not in self._positions:
                raise _Unknown  # a symbolic number
            return self._positions[x]

        kwargs = {name: x for name, x in node.kwargs.items() if name in ("dim", "memory_format")}
        assert callable(node.target)
        return node.target(
            *torch.fx.map_arg(node.args, positions), **torch.fx.map_arg(kwargs, positions)
        )

    def _function(self, node: torch.fx.Node) -> Callable[..., Any]:
        name = _operator_name(node)
        if name == "div":
            rounding = node.kwargs.get("rounding_mode")
            name = {"floor": "floor_divide", "trunc": "trunc_divide"}.get(str(rounding), "")
        if name in ("add", "sub", "rsub"):
            alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
            scale = self._number(alpha)
            if name == "rsub":
                return lambda a, b: b - a * scale
            return lambda a, b: a + b * scale if name == "add" else a - b * scale
        if name not in _ARITHMETIC:
            raise _Unknown
        return _ARITHMETIC[name]

    def _operands(self, args: Sequence[Any]) -> list[torch.Tensor]:
        return [
            self._positions[x] if isinstance(x, torch.fx.Node) and x in self._positions
            else self._new([self._number(x)], ())
            for x in args
        ]  # fmt: skip

    def _number(self, arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            arg = arg.meta.get("number")
        if type(arg) not in (int, bool, torch.SymInt, torch.SymBool):
            raise _Unknown
        return arg

    def _at(self, positions: torch.Tensor) -> list[Any]:
        return [self._numbers[i] for i in positions.flatten().tolist()]

    def _pointwise(self, function: Callable[..., Any], operands: Sequence[torch.Tensor]) -> Any:
        columns = torch.broadcast_tensors(*operands)
        rows = zip(*map(self._at, columns), strict=True)
        return self._new([function(*row) for row in rows], columns[0].shape)

    def _new(self, numbers: Sequence[Any], shape: Sequence[int]) -> torch.Tensor:
        """Append numbers to the list, and return their positions."""
        if any(type(x) is int and not -_INT64 <= x < _INT64 for x in numbers):
            raise _Unknown
        start = len(self._numbers)
        self._numbers += numbers
        return torch.arange(start, start + len(numbers)).reshape(shape)


def _operands_of(node: torch.fx.Node) -> Sequence[Any]:
    """Return the arguments of arithmetic that are operands."""
    count = 1 if _operator_name(node) in _OF_ONE else 2
    if len(node.args) < count:
        raise _Unknown
    return node.args[:count]


def _divide(a: Any, b: Any) -> Any:
    if not statically_known_true(b != 0):
        raise _Unknown
    return a // b


def _divide_truncating(a: Any, b: Any) -> Any:
    if not (statically_known_true(a >= 0) and statically_known_true(b > 0)):
        raise _Unknown
    return a // b


def _remainder(a: Any, b: Any) -> Any:
    if not statically_known_true(b != 0):
        raise _Unknown
    return a % b


def _largest(numbers: Sequence[Any]) -> Any:
    if not numbers:
        raise _Unknown
    largest = numbers[0]
    for number in numbers[1:]:
        largest = torch.sym_max(largest, number)
    return largest


def _least(numbers: Sequence[Any]) -> Any:
    return -_largest([-number for number in numbers])


# The operators that make a tensor of one number, with the position of the number.
_FACTORIES: Final = {"full": 1, "scalar_tensor": 0}
# The operators that return the elements of their arguments, and are not views.
_REARRANGEMENTS: Final = frozenset({
    "alias", "cat", "clone", "contiguous", "detach", "flatten", "lift_fresh", "lift_fresh_copy",
    "repeat", "reshape", "stack",
})  # fmt: skip
# The operators that compute each element from one element of each operand.
_ARITHMETIC: Final[dict[str, Callable[..., Any]]] = {
    "mul": operator.mul,
    "neg": operator.neg,
    "floor_divide": _divide,
    "trunc_divide": _divide_truncating,
    "remainder": _remainder,
    "minimum": torch.sym_min,
    "maximum": torch.sym_max,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_OF_ONE: Final = frozenset({"neg"})
# The operators that compute one number from all elements.
_REDUCTIONS: Final[dict[str, Callable[[Sequence[Any]], Any]]] = {
    "sum": sum, "prod": math.prod, "max": _largest, "min": _least,
}  # fmt: skip
_FOLLOWED: Final = frozenset(
    {*_FACTORIES, *_REARRANGEMENTS, *_ARITHMETIC, *_REDUCTIONS, "div", "add", "sub", "rsub"}
)
