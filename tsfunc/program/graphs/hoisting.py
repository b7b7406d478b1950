"""Work on parameters alone, which a program does once.

NOTE [hoisted work]
``specialize(f, hoist=True)`` divides a program. Its first part has the operators that depend on
*kept* tensors alone: the tensors that the function reads from outside, and those of the parameters
that ``hoist`` names. The second part has the other operators, and takes the results of the first
part as further inputs. The results are stored together with the kept tensors. Stored results serve
a call with the same tensor objects, at the same addresses, whose counts of writes are the same
(``bridge/writing/storages.py``). The store holds the tensors and their memory, so neither an
object's id nor an address is used again.

The first part does not have

- operators that draw random numbers, write, check, exchange values with other processes, or find
  sizes in data, and control flow;
- operators whose results the caller gets, or that the program writes to: such a result would differ
  in a later call;
- operators after a write into memory from outside: all closed-over values may share one memory.

A program runs as a whole, and stores nothing, if

- autograd records and one of the kept tensors requires grad: gradients have to reach it, and the
  graph of the first part can be differentiated once;
- a transform, a trace, a mode or a class of tensors has to see every operator;
- torch does not count the writes into a kept tensor, as for tensors made in inference mode.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.fx

from tsfunc import pytrees
from tsfunc.bridge.control.control_flow import ControlFlow
from tsfunc.bridge.control.node_writes import declares_sharing, possibly_shared, written_arguments
from tsfunc.bridge.sizes.fake_results import storage_address
from tsfunc.bridge.trace.graph_compilers import can_run_compiled
from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.operators import UNDEFINED, TorchOperator
from tsfunc.bridge.writing.storages import write_counts
from tsfunc.dispatch.state import tls
from tsfunc.program.graphs.codegen import generate
from tsfunc.program.graphs.data import ProgramData
from tsfunc.program.passes.effects import Aliases, communicates, is_pure, is_view

Run = Callable[[Sequence[Any]], Sequence[Any]]
Compile = Callable[[ProgramData, Sequence[Any]], Run]


class _Stored(NamedTuple):
    """The results of the first part, and the values that they were computed from.

    Attributes:
        memories: tensors with their memory, which stays allocated if a kept tensor gets another.
        counts: their counts of writes and addresses.
    """

    tensors: Sequence[torch.Tensor]
    memories: Sequence[torch.Tensor]
    counts: Sequence[Any]
    results: Sequence[torch.Tensor]


class Hoisted:
    """The ``run`` of a program that does the work on kept tensors once: NOTE [hoisted work].

    Args:
        kept: the indices, among the values that it is called with, of those that are kept.
        compile: returns the ``run`` of a program for calls with such values.
    """

    def __init__(
        self, program: ProgramData, fixed: Collection[int], count: int, compile: Compile
    ) -> None:
        self._program, self._compile = program, compile
        self._lock = threading.Lock()
        self._runs: dict[ProgramData, Run] = {}
        self._stored: _Stored | None = None
        self._parts = _divide(program, fixed, count)

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        if self._parts is not None:
            first, rest, read = self._parts
            tensors = [values[i] for i in read]
            tensors += first.lifted.values()
            counts = self._counts(values, tensors)
            if counts is not None:
                stored = self._stored
                if stored is None or not _is_valid(stored, tensors, counts):
                    with torch.no_grad():
                        results = first.run(values)
                        memories = [x.detach() for x in tensors]
                    stored = self._stored = _Stored(tensors, memories, counts, results)
                return self._run(rest, [*values, *stored.results])
        return self._run(self._program, values)

    def _run(self, program: ProgramData, values: Sequence[Any]) -> Sequence[Any]:
        """Run the program or its second part, which is compiled for the first such call."""
        run = self._runs.get(program)
        if run is None:
            with self._lock:
                run = self._runs.get(program)
                if run is None:
                    run = self._runs[program] = self._compile(program, values)
        return run(values)

    def _counts(self, values: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Any] | None:
        """Return the counts of writes of the kept tensors; None if the program runs as a whole."""
        inputs = [values[i] for i in self._program.inputs]
        inputs = [x for x in inputs if isinstance(x, torch.Tensor)]
        if tls.state.levels or not can_run_compiled([*inputs, *tensors]):
            return None
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return None
        return write_counts(tensors)


def _is_valid(stored: _Stored, tensors: Sequence[torch.Tensor], counts: Sequence[Any]) -> bool:
    return counts == stored.counts and all(map(operator.is_, tensors, stored.tensors))


def _divide(
    program: ProgramData, fixed: Collection[int], count: int
) -> tuple[ProgramData, ProgramData, Sequence[int]] | None:
    """Return the two parts of a program, and the indices of the values that the first part reads.

    None: the first part would do nothing.
    """
    graph = program.graph
    chooses = any(isinstance(node.target, ControlFlow) for node in graph.nodes)
    aliases = Aliases(graph, None if chooses else _arguments_shared)
    indices = dict(zip(graph.find_nodes(op="placeholder"), program.inputs, strict=True))
    sources = {
        node
        for node in graph.nodes
        if (node.op == "get_attr" or indices.get(node) in fixed) and _is_fixed_tensor(node)
    }
    hoisted = _hoistable_nodes(graph, sources, aliases)
    results = [node for node in graph.nodes if node in hoisted and not hoisted >= set(node.users)]
    if all(node.target is operator.getitem or is_view(node) for node in hoisted):
        return None  # views cost less than a look at the counts of their tensors
    arguments = {argument for node in hoisted for argument in node.all_input_nodes} - hoisted
    read = [index for node, index in indices.items() if node in arguments]
    lifted = {str(node.target): program.tensor(node) for node in arguments if node.op == "get_attr"}
    first, rest = torch.fx.Graph(), torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        if node in arguments or node in hoisted:
            copies[node] = first.node_copy(node, copies.__getitem__)
    first.output(tuple([copies[node] for node in results]))
    copies = {node: rest.node_copy(node) for node in indices}
    for node in results:
        copies[node] = rest.placeholder(node.name)
        copies[node].meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
        copies[node].meta["requires_grad"] = False
    for node in graph.nodes:
        if node not in hoisted and node not in copies:
            copies[node] = rest.node_copy(node, copies.__getitem__)
    for node in rest.find_nodes(op="get_attr"):
        if not node.users:
            rest.erase_node(node)
    inputs = (*program.inputs, *range(count, count + len(results)))
    return (
        _part(program, first, read, lifted, ()),
        _part(program, rest, inputs, program.lifted, program.updates),
        read,
    )


_KEPT_META = ("val", "dims", "location")


def _part(
    program: ProgramData, graph: torch.fx.Graph, inputs: Sequence[int], lifted: Any, updates: Any
) -> ProgramData:
    source, run = generate(program.name, graph, inputs, lifted, updates)
    return replace(
        program, graph=graph, inputs=tuple(inputs), lifted=lifted, updates=updates, source=source,
        run=run,
    )  # fmt: skip


def _hoistable_nodes(
    graph: torch.fx.Graph, sources: Collection[torch.fx.Node], aliases: Aliases
) -> set[torch.fx.Node]:
    """Return the nodes of the first part."""
    hoisted: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if written := written_arguments(node):
            if any(map(aliases.is_from_outside, written)):
                break
        elif _may_be_hoisted(node, aliases) and all(
            argument in sources or argument in hoisted for argument in node.all_input_nodes
        ):
            hoisted.add(node)
    # Results that are several tensors stay with the operators that take these apart.
    waiting = [x for x in hoisted if not _is_fixed_tensor(x) and not hoisted >= set(x.users)]
    while waiting:
        node = waiting.pop()
        hoisted.discard(node)
        waiting += [user for user in node.users if user in hoisted]
        waiting += [x for x in node.all_input_nodes if x in hoisted and not _is_fixed_tensor(x)]
    return hoisted


def _may_be_hoisted(node: torch.fx.Node, aliases: Aliases) -> bool:
    if node.op != "call_function" or aliases.escapes(node) or aliases.is_written(node):
        return False
    if isinstance(node.meta.get("val"), torch.Tensor) and not _is_fixed_tensor(node):
        return False
    if node.target is operator.getitem:
        return bool(node.all_input_nodes)
    op = node.meta.get("op")
    return (
        isinstance(op, TorchOperator)
        and is_pure(node)
        and not communicates(node)
        and not node.meta.get("reads_data")
        and op.packet not in UNDEFINED
    )


def _arguments_shared(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments of a call whose memory its results may share.

    A composite operator does not declare whether it returns an argument or a view of it. The
    operator is therefore called on tensors of the same layouts without memory; named dims have the
    sizes of the call that was traced.
    """
    shared = list(possibly_shared(node))
    op, inputs = node.meta.get("op"), node.all_input_nodes
    if not shared or not isinstance(op, TorchOperator) or not op.composite or op.random:
        return shared
    if declares_sharing(op) or not all(map(_is_strided_tensor, inputs)):
        return shared
    with torch_state.outside_all_transforms(), torch.no_grad():
        try:
            metas = {each: _without_memory(each.meta["val"]) for each in inputs}
            args = torch.fx.map_arg(node.args, metas.__getitem__)
            kwargs = torch.fx.map_arg(node.kwargs, metas.__getitem__)
            results = pytrees.leaves_of(op.overload(*args, **kwargs))
        except Exception:  # an operator on data, a size of data
            return shared
    memories = {storage_address(x) for x in results if isinstance(x, torch.Tensor)}
    return [each for each in shared if storage_address(metas[each]) in memories]


def _without_memory(value: torch.Tensor) -> torch.Tensor:
    shape, strides = (
        [size if isinstance(size, int) else size.node.hint for size in sizes]
        for sizes in (value.shape, value.stride())
    )
    return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")


def _is_fixed_tensor(node: torch.fx.Node) -> bool:
    """True if a value is a strided tensor of fixed sizes."""
    return _is_strided_tensor(node) and all(
        isinstance(size, int) for size in node.meta["val"].shape
    )


def _is_strided_tensor(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
