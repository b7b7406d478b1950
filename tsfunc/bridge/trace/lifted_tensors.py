"""Tensors from outside in a trace: they are lifted, and backward passes add to their ``.grad``.

NOTE [backward passes in programs]
A trace is above autograd: torch records on the program's values when the program runs. A function
that calls ``loss.backward()`` or ``torch.autograd.grad`` differentiates while it runs, so its
trace is made again with autograd recording at the trace's own level (``records``): inputs and
tensors from outside that require gradients are leaves there, C++ records a graph on tracers, and
the pass runs formulas that the trace records like any other operator.

The ``.grad`` of a tensor from outside is that of its tracer. The first use of it in the trace
reads it from the tensor, and the program has it as an input; ``backward()`` writes into it in
place, or makes a new one, as it does in eager mode. If the function ends with another ``.grad``
than it found, the program assigns it (NOTE [updates] in ``program/closure/results.py``). The
tensor outside keeps its own throughout the trace.

A pass frees its graph, and no result whose graph was freed can be differentiated again. If only
such results require gradients, and no recorded write into a tensor from outside is left, the
program runs under ``no_grad``: it records nothing that could never be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.fx
from torch._C import DisableTorchFunctionSubclass

from tsfunc.bridge.sizes.symbolic_numbers import (
    FUNCTIONS_OF_NUMBERS,
    call_past_parser,
    numbers_as_tensors,
)
from tsfunc.bridge.trace.opaque import OpaqueValue
from tsfunc.bridge.trace.property_reads import PROPERTY_READERS, VERSION, refuse_version
from tsfunc.bridge.trace.tensor_guards import is_user_query
from tsfunc.bridge.trace.trace_level import TraceLevel, TraceTracer
from tsfunc.bridge.trace.trace_rules import _reads_requires_grad
from tsfunc.bridge.tracers.attributes import PROPERTY_METHODS
from tsfunc.bridge.tracers.backward import graph_leaves, nodes_of
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, detached_operand
from tsfunc.bridge.tracers.function_registry import METHODS
from tsfunc.bridge.tracers.methods import refuse_storage
from tsfunc.bridge.tracers.nesting import is_of_active_level
from tsfunc.bridge.tracers.torch_state import in_code_of_pass, rule_of_pass
from tsfunc.bridge.tracers.tracer import BackwardPass
from tsfunc.bridge.tracers.user_queries import UserCode, has_symbols
from tsfunc.dispatch.state import tls


@dataclass
class GradSlot:
    """The ``.grad`` of a tensor from outside.

    Attributes:
        tracer: the tensor's tracer, which has the current ``.grad``.
        before: the tracer of the ``.grad`` that the trace has found; None if there was none.
    """

    tracer: TraceTracer
    owner: torch.Tensor
    before: torch.Tensor | None

    @property
    def now(self) -> torch.Tensor | None:
        """The current ``.grad``."""
        with DisableTorchFunctionSubclass():
            return self.tracer.grad


class BackwardPasses:
    """The backward passes of a trace, and the ``.grad`` of tensors from outside.

    Args:
        check: refuses a tensor that a pass can't add a gradient to.
        record: has the function traced again, with autograd recording.

    Attributes:
        needed: True if the function needs a trace in which autograd records.
    """

    def __init__(
        self,
        level: TraceLevel,
        read: Callable[[torch.Tensor], torch.Tensor | None],
        check: Callable[[torch.Tensor], None],
        record: Callable[[], NoReturn],
    ) -> None:
        self.level, self._read, self._check, self._record = level, read, check, record
        self.needed = False
        self.slots: dict[int, GradSlot] = {}
        self._freed: set[Any] = set()

    def serve(self, call: BackwardPass) -> bool:
        """See ``TracerLevel.allows_backward_outside``."""
        tensors = (*call.results, *(call.inputs or ()))
        if not all(isinstance(x, TraceTracer) and x.dispatch_level is self.level for x in tensors):
            return False
        if any(x.tracks for x in tensors):
            self.require()
        with DisableTorchFunctionSubclass():
            leaves = list(graph_leaves(call.results)) if call.inputs is None else call.inputs
            if call.accumulates:
                for leaf in leaves:
                    self._reach(leaf)
            if call.frees:
                self._freed.update(_run_nodes(call.results, call.inputs))
        return True

    def require(self) -> None:
        """Have the function traced again if autograd does not record in this trace."""
        self.needed = True
        if not self.level.records:
            self._record()

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the ``.grad`` of a tensor from outside, as the function sees it."""
        return self._slot(tensor).now

    def set(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """Assign the ``.grad`` of a tensor from outside, for the rest of the trace."""
        slot = self._slot(tensor)
        with DisableTorchFunctionSubclass():
            slot.tracer.grad = value

    def _slot(self, owner: torch.Tensor) -> GradSlot:
        slot = self.slots.get(id(owner))
        if slot is None:
            argument = self._argument_of(owner)
            tracer = self.level.lift(owner) if argument is None else argument
            grad = self._read(owner)
            before = None if grad is None else self.level.lift(grad)
            with DisableTorchFunctionSubclass():
                tracer.grad = before
            slot = self.slots[id(owner)] = GradSlot(tracer, owner, before)
        return slot

    def _argument_of(self, owner: torch.Tensor) -> TraceTracer | None:
        """Return the tracer of a tensor that is an argument, or None."""
        arguments = self.level.tensor_guards.arguments
        return next((tracer for tracer, base in arguments if base.sample is owner), None)

    def changed(self) -> Iterator[GradSlot]:
        """Yield each ``.grad`` that the function has replaced."""
        return (slot for slot in self.slots.values() if slot.now is not slot.before)

    def records_needlessly(self, results: Sequence[Any]) -> bool:
        """True if no result, and no tensor from outside, needs the program's own graph."""
        if not self._freed or not self.level.records:
            return False  # without records, the level's graphs lead to the function's leaves only
        outside = [tracer for _, tracer in self.level.lifted.values()]
        outside += [tracer for tracer, _ in self.level.tensor_guards.arguments]
        with DisableTorchFunctionSubclass():
            graphs = [x for x in (*results, *outside) if isinstance(x, torch.Tensor) and x.grad_fn]
            return all(not self._freed.isdisjoint(nodes_of([x])) for x in graphs)

    def _reach(self, leaf: Any) -> None:
        """Prepare the ``.grad`` of a leaf that a pass is about to add to."""
        owner = self._owner(leaf)
        if owner is not None:
            self._check(owner)
            self._slot(owner)

    def _owner(self, tracer: Any) -> torch.Tensor | None:
        """Return the tensor from outside that a tracer stands for, or None."""
        argument = self.level.tensor_guards.argument(tracer)
        if argument is not None:
            return argument.sample
        return next((x for x, lifted in self.level.lifted.values() if lifted is tracer), None)


def _run_nodes(results: Sequence[Any], inputs: Sequence[Any] | None) -> Iterator[Any]:
    """Yield the nodes that a backward pass runs: those on a path from the results to the inputs.

    The nodes of leaves, which all graphs share, are left out.
    """
    nodes = [node for node in nodes_of(results) if not hasattr(node, "variable")]
    if inputs is None:
        yield from nodes
        return
    ends = {x.grad_fn for x in inputs if x.grad_fn is not None}
    leaves = {id(x) for x in inputs}
    # A node runs if one of the nodes after it is an end or runs. Sequence numbers grow from the
    # inputs to the results, so that the nodes after a node come before it in this order.
    leads: set[Any] = set()
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):
        after = [before for before, _ in node.next_functions if before is not None]
        if any(each in ends or each in leads or id(getattr(each, "variable", None)) in leaves
               for each in after):  # fmt: skip
            leads.add(node)
            yield node


# --- the function mode that lifts tensors from outside


# Calls that read only metadata, or that concern the tensor from outside itself.
_METADATA_CALLS = frozenset({*PROPERTY_METHODS, _reads_requires_grad, refuse_storage})


_GRAD = vars(torch.Tensor.__base__)["grad"]


_SET_GRAD = (_GRAD.__set__, _GRAD.__delete__)


def has_hooks(tensor: torch.Tensor) -> bool:
    """True if a backward pass calls hooks of a tensor."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _is_active(trace: TraceLevel) -> bool:
    """True if the running code is recorded by a trace, or by the body of control flow in it."""
    for level in tls.state.levels:  # a trace asks this at every call
        if level is trace or (isinstance(level, TraceLevel) and level.depth >= trace.depth):
            return True
    return False


class Lifting(UserCode):
    """A function mode that also records the function's own calls on tensors from outside.

    Without the mode, results of such tensors alone would be computed at trace time, and be stale
    once the tensors change.
    """

    def __init__(self, level: TraceLevel) -> None:
        super().__init__()
        self.level = level

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, args_in = kwargs or {}, args
        running = tls.state.running
        if running is not None and running.depth < self.level.depth:
            # The kernel of an outer level: a backward pass computes with saved tensors of it.
            return func(*args, **kwargs)
        if not _is_active(self.level):
            # A backward pass runs the function of a checkpoint again, at the checkpoint's levels.
            return func(*args, **kwargs)
        repeated = self.level.repeated.repeat(func, args, kwargs)
        if repeated is not NotImplemented:
            return repeated
        if OpaqueValue in types:
            return OpaqueValue.__torch_function__(func, types, args, kwargs)
        if func is torch._assert and isinstance(args[0], torch.SymBool):
            with self:  # the function's code asks, not the code of an operator
                return torch._check_with(AssertionError, args[0], lambda: args[1])
        passes = self.level.backward_passes
        if passes is not None and not is_of_active_level(args[0] if args else None):
            if func == _GRAD.__get__:
                return passes.get(args[0])
            if func in _SET_GRAD:
                return passes.set(args[0], self._lifted(args[1]) if len(args) > 1 else None)
        if func == VERSION and not is_of_active_level(args[0]) and is_user_query():
            refuse_version(self.level.tensor_guards)
        if METHODS.get(func) not in _METADATA_CALLS and func not in PROPERTY_READERS:
            args = tuple([self._lifted(arg) for arg in args])
            kwargs = {name: self._lifted(arg) for name, arg in kwargs.items()}
        if func in FUNCTIONS_OF_NUMBERS:
            args, kwargs = numbers_as_tensors(args, kwargs)
        if has_symbols(args, kwargs):
            out = call_past_parser(func, args, kwargs)
            if out is not NotImplemented:
                return out
        if in_code_of_pass():
            with rule_of_pass():
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        # The result of an in-place write is the given tensor: `self.w += 1` assigns the module's
        # own parameter again.
        return args_in[0] if args_in and out is args[0] else out

    def _lifted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            innermost = tls.state.levels[-1]
            if isinstance(innermost, BatchLevel) and innermost.detaches_operands:
                value = detached_operand(value)
            return self.level.lifted_here(value)
        if type(value) in (list, tuple):
            return type(value)(self._lifted(item) for item in value)
        if type(value) is dict:
            return {key: self._lifted(item) for key, item in value.items()}
        return value
