"""``torch.autograd.Function`` in programs: one node, so that the program keeps its derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.fx

from tsfunc import pytrees
from tsfunc.bridge.control.axis_collectives import named_axes
from tsfunc.bridge.control.bodies import needed_frames, rewrap_as
from tsfunc.bridge.control.control_flow import NoTorchOperator
from tsfunc.bridge.control.control_flow_calls import call_control_flow
from tsfunc.bridge.control.traced_bodies import TracedBody, union_of_frames
from tsfunc.bridge.grad.apply_hook import call_apply
from tsfunc.bridge.grad.autograd import is_differentiable
from tsfunc.bridge.grad.custom_function import torch_apply
from tsfunc.bridge.trace.trace_level import TraceLevel
from tsfunc.bridge.tracers.batch_tracer import BatchLevel
from tsfunc.bridge.tracers.tracer_stack import Frame, TracerStack, unwrap_all
from tsfunc.bridge.tracers.user_queries import SYMBOLIC
from tsfunc.errors import TypeCheckError
from tsfunc.program.closure.side_effects import SideEffect
from tsfunc.program.graphs.torch_operators import Writer
from tsfunc.transforms.argnums import with_replaced
from tsfunc.transforms.control.control_recording import as_traced, fill_tensors
from tsfunc.transforms.control.derived_operators import ExpandedOperator
from tsfunc.transforms.vmap import vmap


@dataclass(frozen=True)
class EnclosingVmap:
    """A vmap of the trace around a call: the call's batch dims, and the vmap's settings."""

    in_dims: tuple[int | None, ...]
    out_dims: tuple[int | None, ...]
    randomness: str
    axis_name: Hashable
    axis_size: int | None


class Callee(Protocol):
    """The callable of a program's node for a function with a custom derivative.

    Attributes:
        name: the name of the function in the program.
        tensors: the number of tensors that the function takes; numbers come after these.
    """

    @property
    def name(self) -> str: ...

    @property
    def tensors(self) -> int: ...

    def __call__(self, *operands: Any) -> Sequence[Any]: ...


@dataclass(frozen=True)
class OperandType:
    """The type of a tensor argument of a function, for one example.

    Attributes:
        dims: the sizes; a symbolic size is a text in the names of dims.
        strides: the strides, of which only the order matters.
    """

    dims: tuple[int | str, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]


class PythonCallee:
    """An ``autograd.Function`` of the user, or the one that runs a function with a custom rule.

    Arguments other than tensors and symbolic sizes are static.

    Attributes:
        leaves: the flattened arguments, None for tensors and sizes.
        tree: the structure of the arguments.
        positions: the positions of the tensors among the leaves.
        sizes: the positions of the sizes among the leaves.
        types: the types of the tensors.
        numbers: the sizes, as texts in the names of dims.
    """

    def __init__(self, function: Any, args: Sequence[Any]) -> None:
        self.name: str = function.__name__
        self.function = function
        self.leaves, self.tree = pytrees.flatten(tuple(args))
        self.positions = [i for i, x in enumerate(self.leaves) if isinstance(x, torch.Tensor)]
        self.sizes = [i for i, x in enumerate(self.leaves) if isinstance(x, SYMBOLIC)]
        self.types: Sequence[OperandType] = ()
        self.numbers: Sequence[str] = ()

    @property
    def tensors(self) -> int:
        return len(self.positions)

    def taken(self, spell: Callable[[Any], str]) -> tuple[list[Any], list[Any]]:
        """Return the tensors and the sizes, and store their types; ``spell`` spells sizes."""
        tensors = [self.leaves[i] for i in self.positions]
        sizes = [self.leaves[i] for i in self.sizes]
        self.types = [_operand_type(x, spell) for x in tensors]
        self.numbers = [spell(size) for size in sizes]
        for i in (*self.positions, *self.sizes):
            self.leaves[i] = None
        return tensors, sizes

    def filled(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments, from the flattened tensors followed by the sizes."""
        positions = (*self.positions, *self.sizes)
        return pytrees.unflatten(self.tree, with_replaced(self.leaves, positions, operands))

    def __call__(self, *operands: Any) -> Sequence[Any]:
        args = self.filled(operands)
        run = getattr(self.function, "run_recorded", None)
        leaves = pytrees.leaves_of(run(*args) if run else call_apply(self.function, *args))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _operand_type(x: torch.Tensor, spell: Callable[[Any], str]) -> OperandType:
    dims = tuple(size if isinstance(size, int) else spell(size) for size in x.shape)
    steps: Sequence[Any] = x.stride() if x.layout is torch.strided else ()
    strides = [step if isinstance(step, int) else step.node.hint for step in steps]
    return OperandType(dims, x.dtype, x.device, tuple(0 if n is None else int(n) for n in strides))


class FunctionCall(ExpandedOperator):
    """A call of a function with a custom derivative; its tensors come first, then its sizes.

    The effects of the function are unknown, so calls are neither merged nor removed.

    Attributes:
        maps: the vmaps around the call, the innermost first.
        written: the positions of tensors that are marked dirty. A call in a program writes to
            copies of these, which it returns, and the program copies them back to the originals.
    """

    opaque = True

    def __init__(
        self, callee: Callee, maps: Sequence[EnclosingVmap], written: Sequence[int]
    ) -> None:
        super().__init__(callee.name, ())
        self.callee, self.maps, self.written = callee, maps, written

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        count = self.callee.tensors
        tensors, sizes = operands[:count], operands[count:]

        def run(*tensors: Any) -> tuple[Any, ...]:
            tensors = tuple(x.clone() if i in self.written else x for i, x in enumerate(tensors))
            return tuple(self.callee(*tensors, *sizes))

        for mapped in self.maps:
            run = vmap(
                run,
                mapped.in_dims,
                mapped.out_dims,
                mapped.randomness,
                axis_name=mapped.axis_name,
                axis_size=mapped.axis_size,
            )
        return run(*tensors)

    def expanded(self) -> Callable[..., tuple[Any, ...]]:
        """Return the call itself: the trace records its operators and those of its derivatives."""
        return self

    def write_for_torch(self, writer: Writer, operands: Sequence[Any]) -> list[torch.fx.Node]:
        """Write the operators of the function, without the custom derivative."""
        nodes = [x for x in operands if isinstance(x, torch.fx.Node)]
        if writer.exact and any(map(writer.tracks, nodes)):
            raise NoTorchOperator(f"autograd would not see the derivative of {self.name}")
        return super().write_for_torch(writer, operands)


def record_function(function: Any, trace: TraceLevel, args: Sequence[Any]) -> Any:
    """Record a call of an ``autograd.Function``, and return its results.

    The vmaps inside of the trace become vmaps of the call when the program runs.
    """
    callee = PythonCallee(function, args)
    values, sizes = callee.taken(trace.symbols.spell_size)
    tensors = [_batch_dims_first(as_traced(value, trace)) for value in values]
    primal = getattr(function, "primal_results", functools.partial(torch_apply, function))
    inputs: list[Sequence[Any]] = []

    def run(*xs: Any) -> Any:
        inputs[:] = [xs]
        return primal(*callee.filled((*xs, *sizes)))

    effects = trace.effects_from_now()
    body = TracedBody(trace, run, tensors)
    _refuse_effects(callee.name, trace, effects())
    dirty = _dirty_results(body.leaves, inputs[0])
    written = list(dirty.values())
    for i in written:
        tensors[i] = _batch_dims_first(as_traced(values[i], trace).clone())
    batched = _batched_layers(tensors)
    wanted = [
        union_of_frames([needed, batched if is_differentiable(leaf) else {}])
        if isinstance(leaf, torch.Tensor)
        else None
        for leaf, needed in zip(body.leaves, body.batched(), strict=True)
    ]
    results = [result for result in body.end(wanted) if result is not None]
    maps = _maps(trace, [unwrap_all(x)[1] for x in tensors], [result.stack for result in results])
    op = FunctionCall(callee, maps, written)
    numbers = [trace.number_nodes(size) for size in sizes]
    outputs = list(call_control_flow(op, trace, tensors, numbers, results))
    for position, i in dirty.items():
        outputs[position] = values[i].copy_(outputs[position])
    return fill_tensors(body, outputs)


def _refuse_effects(name: str, trace: TraceLevel, effects: Sequence[SideEffect]) -> None:
    """Raise an error if a function changes objects from outside: each run of it would do so."""
    if effects:
        lines = [f" at {effect.line}" if effect.line else "" for effect in effects]
        texts = [f"{effect.text}{line}" for effect, line in zip(effects, lines, strict=True)]
        raise TypeCheckError(
            f"{trace.name}: {name} changes {', '.join(texts)}. A program runs {name}, which has "
            f"its own derivative, as one operator, with the objects of its trace. Return the new "
            f"value from {name}, and assign it outside of {name}."
        )


def _batch_dims_first(x: Any) -> Any:
    return rewrap_as(x, union_of_frames([needed_frames(x)]))


def _dirty_results(leaves: Sequence[Any], inputs: Sequence[Any]) -> dict[int, int]:
    """Return the positions of results that are arguments, and the positions of these arguments.

    An argument that ``forward`` returns without marking it dirty is a new tensor for torch.
    """
    results = [x for x in leaves if isinstance(x, torch.Tensor)]
    return {
        position: i
        for position, result in enumerate(results)
        for i, x in enumerate(inputs)
        if result is x
    }


def _batched_layers(tensors: Sequence[Any]) -> dict[int, Frame]:
    """Return the batch dims of the differentiable arguments, which all results get.

    The results may depend on these dims by the custom derivative only, and not by their values:
    see NOTE [results of a mapped function].
    """
    layers: dict[int, Frame] = {}
    for x in tensors:
        if is_differentiable(x):
            layers |= {d: frame for d, frame in needed_frames(x).items() if frame.bdim is not None}
    return layers


def _maps(
    trace: TraceLevel, inputs: Sequence[TracerStack], results: Sequence[TracerStack]
) -> list[EnclosingVmap]:
    """Return the vmaps that batch a tensor or have a named axis, the innermost first."""
    levels = {level.depth: level for level in named_axes(trace)}
    for stack in inputs:
        levels |= {level.depth: level for level in stack.batch_levels}
    return [
        _enclosing_vmap(levels[depth], inputs, results) for depth in sorted(levels, reverse=True)
    ]


def _enclosing_vmap(
    level: BatchLevel, inputs: Sequence[TracerStack], results: Sequence[TracerStack]
) -> EnclosingVmap:
    in_dims = tuple(stack.dim_at(level.depth) for stack in inputs)
    out_dims = tuple(stack.dim_at(level.depth) for stack in results)
    size = level.batch_size if all(dim is None for dim in in_dims) else None
    return EnclosingVmap(in_dims, out_dims, level.randomness, level.axis_name, size)
