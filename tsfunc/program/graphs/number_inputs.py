"""Numbers among the inputs of a program that a backend compiles.

NOTE [numbers of compiled programs]
A compiler takes tensors and sizes. Python therefore computes each number that an operator needs,
such as ``1 - rate``, before the compiled code runs, and the module takes it as a tensor without
dims. The tensor has the value that the number has without a backend, to the last bit.

- A backend that runs torch's operators reads the number from the tensor, so that each operator gets
  the number itself.
- Inductor passes numbers that are read from tensors as floats of 32 bits. An operator that takes a
  number is therefore replaced by its overload that takes a tensor, in the dtype in which the
  operator computes.
- An int stays an int where a size, a position or a loop needs it.

If another operator needs a number, the number stays a constant of its program.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch
import torch.fx

from tsfunc.bridge.sizes.symbols import check_size
from tsfunc.bridge.trace.graph_compilers import READS
from tsfunc.bridge.tracers.schemas import operator_signature, overloads_of
from tsfunc.ops.catalogue.signature import Argument
from tsfunc.program.graphs.codegen import generate
from tsfunc.program.graphs.compilable import SCALED, STEPS

_aten = torch.ops.aten
_Origins = dict[torch.fx.Node, frozenset[torch.fx.Node]]


class NumbersRefused(Exception):
    """Internal: a compiler can't take some of a program's numbers as inputs."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self.names = frozenset(names)


class NumberResult:
    """Stand-in for a result that is a number, the one of index ``at``."""

    def __init__(self, at: int) -> None:
        self.at = at


def number_inputs(graph: torch.fx.Graph, inputs: Sequence[int]) -> dict[str, int]:
    """Return the index of each number among the inputs of a program, by its name in the graph."""
    placeholders = graph.find_nodes(op="placeholder")
    return {x.name: i for x, i in zip(placeholders, inputs, strict=True) if _is_number(x)}


class NumbersAsTensors:
    """Makes a module take tensors in place of numbers, and computes these tensors for each call.

    The module takes the inputs that are tensors, then the tensors of the numbers that its operators
    need, then the ints of ``ints``.

    Args:
        module: a module with the inputs and results of a program. Its graph is changed.
        inputs: the index of each input of the program, among the values that it is called with.
        reads: True if the backend reads numbers from tensors exactly.

    Attributes:
        ints: the index of each int that the module takes, by its name.

    Raises:
        NumbersRefused: the module can't take some of the numbers.
    """

    def __init__(self, module: torch.fx.GraphModule, inputs: Sequence[int], reads: bool) -> None:
        self._graph, self._reads = module.graph, reads
        self._placeholders = self._graph.find_nodes(op="placeholder")
        indices = dict(zip(self._placeholders, inputs, strict=False))  # tensors from outside follow
        self._origins = _origins(self._graph)
        self._made: dict[tuple[torch.fx.Node, torch.dtype], torch.fx.Node] = {}
        self._read: dict[torch.fx.Node, torch.fx.Node] = {}
        self._results: dict[torch.fx.Node, NumberResult] = {}
        self._refused: set[torch.fx.Node] = set()
        self._end = next(other for other in self._graph.nodes if other.op != "placeholder")
        for node in list(self._graph.nodes):
            if node not in self._origins and any(map(self._origins.get, node.all_input_nodes)):
                self._replace(node)
        self._compute = self._computation(indices)
        self.ints = {node.name: indices[node] for node in self._take_out_numbers()}
        if self._refused:
            raise NumbersRefused([node.name for node in self._refused])

    def __call__(self, values: Sequence[Any]) -> tuple[list[torch.Tensor], Sequence[Any]]:
        """Return the tensors of the numbers, and the numbers among the results.

        Args:
            values: the values that the program is called with.
        """
        numbers = self._compute(values)
        tensors = [
            torch.tensor(number, dtype=dtype)
            for number, (_, dtype) in zip(numbers, self._made, strict=False)
        ]
        return tensors, numbers[len(tensors) :]

    # --- the uses of numbers

    def _replace(self, node: torch.fx.Node) -> None:
        """Replace the numbers that a node uses."""
        if node.op == "output":
            node.args = torch.fx.map_arg(node.args, self._result)
        elif self._reads and (_signature(node) is not None or node.target in STEPS):
            node.args = torch.fx.map_arg(node.args, self._as_read)
            node.kwargs = torch.fx.map_arg(node.kwargs, self._as_read)
        elif not self._reads:
            self._use_tensors(node)
        for argument in node.all_input_nodes:
            if self._origins.get(argument) and not _is_int(argument):
                self._refused |= self._origins[argument]

    def _result(self, node: torch.fx.Node) -> Any:
        if not self._origins.get(node):
            return node
        return self._results.setdefault(node, NumberResult(len(self._results)))

    def _as_read(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return a number that is read from a tensor, in place of a float."""
        if not self._origins.get(node) or _is_int(node):
            return node
        if node not in self._read:
            tensor = self._tensor(node, torch.float64)
            with self._graph.inserting_before(self._end):
                self._read[node] = self._graph.call_function(READS[0], (tensor,))
        return self._read[node]

    def _tensor(self, node: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
        """Return the input of the module for a number."""
        if (node, dtype) not in self._made:
            self._made[node, dtype] = self._new_input(f"{node.name}_{len(self._made)}")
        return self._made[node, dtype]

    def _new_input(self, name: str) -> torch.fx.Node:
        with self._graph.inserting_before(self._end):
            return self._graph.placeholder(name)

    # --- numbers as tensors

    def _use_tensors(self, node: torch.fx.Node) -> None:
        """Let a call take tensors in place of its numbers, if it can."""
        if node.target in STEPS:
            wide = functools.partial(self._in_dtype, torch.float64)
            node.args, node.kwargs = torch.fx.map_arg((node.args, node.kwargs), wide)
            return
        signature, value = _signature(node), node.meta.get("val")
        if signature is None or not isinstance(value, torch.Tensor):
            return
        names = [argument.name for argument in signature.arguments]
        by_name = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        numbers = {
            argument.name
            for argument in signature.arguments
            if argument.type in _TAKES_NUMBERS and self._is_replaced(by_name.get(argument.name))
        }
        dtype = _computes_in(node, value)
        if not numbers or (dtype in _HALF and signature.name.endswith("_")):
            return
        if node.target in _FILLED:
            self._fill(node, by_name, value)
        elif node.target in SCALED and SCALED[node.target][0] in numbers:
            name, scaled = SCALED[node.target]
            if dtype not in _HALF:
                factor = self._in_dtype(dtype, by_name.pop(name))
                args = [self._in_dtype(dtype, x) for x in by_name.values()]
                node.target, node.args, node.kwargs = scaled, tuple(args), {"factor": factor}
        elif (other := _on_tensors(signature.name, frozenset(numbers))) is not None:
            arguments, node.target = other
            self._call_on_tensors(node, arguments, by_name, dtype)

    def _is_replaced(self, value: Any) -> bool:
        return isinstance(value, torch.fx.Node) and bool(self._origins.get(value))

    def _in_dtype(self, dtype: torch.dtype, value: Any) -> Any:
        """Return the tensor for a number, or another value itself."""
        return self._tensor(value, dtype) if self._is_replaced(value) else value

    def _call_on_tensors(
        self,
        node: torch.fx.Node,
        arguments: Sequence[Argument],
        by_name: Mapping[str, Any],
        dtype: torch.dtype,
    ) -> None:
        """Give a call the arguments of an overload that takes tensors in place of its numbers.

        Operators compute in 32 bits with numbers and tensors of half precision.
        """
        narrow = dtype in _HALF
        dtype = torch.float32 if narrow else dtype
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        with self._graph.inserting_before(node):
            for argument in arguments:
                if argument.name not in by_name:
                    continue
                value = self._in_dtype(dtype, by_name[argument.name])
                if argument.tensor and isinstance(value, int | float):
                    value = self._graph.call_function(
                        _aten.full.default, ([], value), {"dtype": dtype}
                    )
                elif narrow and argument.tensor and _is_floating(value):
                    value = self._graph.call_function(
                        _aten._to_copy.default, (value,), {"dtype": dtype}
                    )
                if argument.keyword or len(args) < arguments.index(argument):
                    kwargs[argument.name] = value
                else:
                    args.append(value)
        node.args, node.kwargs = tuple(args), kwargs
        if narrow:
            with self._graph.inserting_after(node):
                narrowed = self._graph.call_function(
                    _aten._to_copy.default, (node,), {"dtype": node.meta["val"].dtype}
                )
            node.replace_all_uses_with(narrowed, lambda user: user is not narrowed)

    def _fill(self, node: torch.fx.Node, by_name: dict[str, Any], value: torch.Tensor) -> None:
        """Replace a call that makes a tensor of one number."""
        number = by_name.pop("fill_value")
        first = next(iter(by_name))
        options = {**by_name, "dtype": value.dtype}
        with self._graph.inserting_before(node):
            empty = self._graph.call_function(_FILLED[node.target], (options.pop(first),), options)
        node.target, node.kwargs = _aten.fill.Tensor, {}
        node.args = (empty, self._tensor(number, value.dtype))

    # --- the inputs and the computation of the numbers

    def _computation(self, indices: Mapping[torch.fx.Node, int]) -> Any:
        """Return the function that computes the numbers of the tensors, then those of results."""
        outputs = [*(node for node, _ in self._made), *self._results]
        needed = set(outputs)
        for node in reversed(self._graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        graph = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        places = []
        for node in self._graph.nodes:
            if node in needed and (node in self._origins or node in indices):
                copies[node] = graph.node_copy(node, copies.__getitem__)
                if node.op == "placeholder":
                    places.append(indices[node])
        graph.output(tuple([copies[node] for node in outputs]))
        return generate("numbers", graph, places, {})[1]

    def _take_out_numbers(self) -> list[torch.fx.Node]:
        """Take the numbers out of the graph, and return the ints that it takes.

        The floats that it needs are refused.
        """
        for node in reversed([*self._origins]):
            if node.op != "placeholder" and not node.users:
                self._graph.erase_node(node)
        remaining = []
        for node in self._placeholders:
            if not _is_number(node):
                continue
            if node.users and not _is_int(node):
                self._refused.add(node)
            elif node.users:
                remaining.append(node)
                number = self._new_input(node.name)
                number.meta = node.meta
                node.replace_all_uses_with(number)
                self._graph.erase_node(node)
            else:
                self._graph.erase_node(node)
        return remaining


_TAKES_NUMBERS: Final = ("number", "number?", "Tensor", "Tensor?")
_HALF: Final = (torch.float16, torch.bfloat16)

# The operators that fill a new tensor with a number, and those that make it.
_FILLED: Final[dict[Any, Any]] = {
    _aten.full.default: _aten.empty.memory_format,
    _aten.full_like.default: _aten.empty_like.default,
    _aten.new_full.default: _aten.new_empty.default,
}


def _is_number(node: torch.fx.Node) -> bool:
    return "number" in node.meta and "val" not in node.meta


def _is_int(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("number"), torch.SymInt | torch.SymBool)


def _is_floating(value: Any) -> bool:
    tensor = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point()


def _signature(node: torch.fx.Node) -> Any:
    """Return the signature of the operator that a node calls, or None."""
    packet = getattr(node.target, "overloadpacket", None)
    return None if packet is None else operator_signature(node.target.name())  # type: ignore[union-attr]


def _origins(graph: torch.fx.Graph) -> _Origins:
    """Return the nodes that Python can compute before a call, each with the numbers it needs."""
    origins: _Origins = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "placeholder" and _is_number(node):
            origins[node] = frozenset([node])
        elif node.target is _aten.sym_size.int and inputs[0].op == "placeholder":
            origins[node] = frozenset()
        elif (
            node.op == "call_function"
            and inputs
            and all(x in origins for x in inputs)
            and node.target is not check_size
            and not hasattr(node.target, "overloadpacket")
            and "val" not in node.meta
        ):
            origins[node] = frozenset().union(*(origins[x] for x in inputs))
    return origins


def _computes_in(node: torch.fx.Node, value: torch.Tensor) -> torch.dtype:
    """Return the dtype in which an operator computes on its tensors and numbers."""
    if value.dtype is not torch.bool:
        return value.dtype
    dtype = torch.bool
    for argument in node.all_input_nodes:
        operand = argument.meta.get("val")
        if isinstance(operand, torch.Tensor):
            dtype = torch.promote_types(dtype, operand.dtype)
    for argument in node.all_input_nodes:
        if _is_number(argument):
            dtype = torch.result_type(torch.empty(1, dtype=dtype), 1 if _is_int(argument) else 1.0)
    return dtype


@functools.cache
def _on_tensors(name: str, numbers: frozenset[str]) -> tuple[Sequence[Argument], Any] | None:
    """Return the overload of an operator that takes tensors as the named arguments."""
    signature = operator_signature(name)
    assert signature is not None
    for other in overloads_of(name.partition(".")[0]):
        pairs = list(zip(signature.arguments, other.arguments, strict=False))
        if len(signature.arguments) == len(other.arguments) and all(
            mine.name == theirs.name
            and (theirs.tensor if mine.name in numbers else _accepts(mine.type, theirs.type))
            for mine, theirs in pairs
        ):
            return other.arguments, other.call
    return None


def _accepts(kind: str, other: str) -> bool:
    return kind == other or (kind in ("number", "number?") and other in ("Tensor", "Tensor?"))
