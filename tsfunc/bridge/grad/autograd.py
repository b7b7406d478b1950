"""torch's autograd at one level: fresh inputs, backward passes, tangents, and detached results.

NOTE [autograd levels]
A reverse-mode transform uses torch's own graph, recorded on the tensors of the innermost level.
Without tracers these are plain tensors (no wrapper, no cost), otherwise they are tracers of that
level. Tensors of other levels are lifted to it first, so that the graphs of two levels never share
a differentiated input. Operations on the inner values, under the state that the level captured,
record the graphs of the outer levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass, _autograd
from torch.autograd import Variable, forward_ad

from tsfunc import pytrees
from tsfunc.bridge import compiled
from tsfunc.bridge.grad.dual_level import can_carry_tangents, may_carry_outer_tangents
from tsfunc.bridge.tracers.backward import has_ended, refuse_backward
from tsfunc.bridge.tracers.batch_tracer import BatchTracer
from tsfunc.bridge.tracers.grad_level import GradTracer
from tsfunc.bridge.tracers.interrupts import outermost
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level
from tsfunc.bridge.tracers.nesting import tensors_inside, with_tensors_inside
from tsfunc.bridge.tracers.registrations import prepare, watching_random
from tsfunc.bridge.tracers.torch_state import (
    code_of_pass,
    in_backward_formula,
    own_passes,
    records_on_values,
    set_grad_mode,
)
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel, sync
from tsfunc.bridge.tracers.user_queries import statically_known_true
from tsfunc.dispatch import current_levels
from tsfunc.ops.dims import is_expanded, without_overlaps

_alias = torch.ops.aten.alias.default


def lift(value: torch.Tensor, level: TracerLevel | None) -> torch.Tensor:
    """Return the value as a tracer of the level; unchanged without a level or at an inner one."""
    if level is None:
        return value
    if isinstance(value, Tracer) and value.dispatch_level.depth >= level.depth:
        return as_seen_by_current_level(value)
    sync(value)
    return level.lift(value)


def is_differentiable(value: Any) -> bool:
    """True for a tensor of floating-point or complex numbers."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def check_differentiable(
    value: torch.Tensor, names: Callable[[], Sequence[str]], index: int = 0
) -> None:
    """Raise if a tensor has no derivatives; its name in the user's spelling is at an index."""
    if not is_differentiable(value):
        raise RuntimeError(
            f"{names()[index]} of {value.dtype} can't be differentiated by: only Tensors of "
            f"floating point and complex dtype can require gradients. Convert it (x.float()), or "
            f"choose other arguments with argnums."
        )


def fresh_input(value: torch.Tensor, level: TracerLevel | None) -> torch.Tensor:
    """Return an alias of a tensor to differentiate by, connected to the tensor's own graph.

    The caller must have grad mode on, and autograd recording at the level.

    Raises:
        RuntimeError: the tensor's dtype is neither floating point nor complex.
    """
    check_differentiable(value, lambda: ["a tensor"])
    lifted = lift(value, level)
    with DisableTorchFunctionSubclass():
        if lifted.requires_grad and in_backward_formula() and not _counts(lifted):
            # A custom rule differentiates by a saved value. Without a leaf of its own, the results
            # would not be known to depend on a value that is differentiated by.
            lifted = detach_at_level(lifted)
        connected = lifted.requires_grad or may_carry_outer_tangents(level)
        if isinstance(lifted, Tracer) and lifted.dispatch_level is level and not connected:
            fresh: torch.Tensor = lifted.aliased_here()
        elif lifted.layout is torch.strided:
            fresh = _alias(lifted)
        else:  # sparse tensors have no aliases
            fresh = lifted.clone() if lifted.requires_grad else lifted.detach()
        if not fresh.requires_grad:
            fresh.requires_grad_()
            refuse_backward(fresh)
    return fresh


def _counts(value: torch.Tensor) -> bool:
    """True if a value depends on a leaf that ``reaches_other_leaves`` finds."""
    return can_carry_tangents() or reaches_active_leaves(value)


def without_inference_mode(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function under ``no_grad`` instead of inference mode, which can't record.

    Inference tensors among the arguments are cloned.
    """
    with torch.inference_mode(False), torch.no_grad():
        args, kwargs = pytrees.tree_map(_not_inference, (args, kwargs))
        return call(*args, **kwargs)


def _not_inference(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_inference():
        return value.clone()
    return value


def differentiates_here() -> bool:
    """True if the running code is inside of a derivative by tsfunc, at any level."""
    return outermost.recording > 0 or outermost.forward > 0


# The contexts that every derivative enters are classes: a generator's costs three times as much.
class _Recorded:
    """Context manager: autograd sees a level's tensors, and their values only if it did before.

    A function may turn grad mode off and differentiate by a level's tensors. Autograd records on
    these, but outer transforms, and the user's own graph, do not differentiate the function.

    Args:
        level: the level; None for plain tensors, which autograd sees always.
    """

    __slots__ = ("_before", "_captured", "_grad_mode", "_level")

    def __init__(self, level: TracerLevel | None, grad_mode: bool) -> None:
        self._level = level
        self._grad_mode = grad_mode

    def __enter__(self) -> None:
        level = self._level
        if level is not None:
            state = level.torch_state
            before = self._captured = state.grad_mode, state.paused
            state.grad_mode = records_on_values(state)
            state.paused |= before[0] and not state.grad_mode
            level.autograd += 1
        self._before = torch.is_grad_enabled()
        set_grad_mode(self._grad_mode)

    def __exit__(self, *error: object) -> None:
        set_grad_mode(self._before)
        level = self._level
        if level is not None:
            level.autograd -= 1
            level.torch_state.grad_mode, level.torch_state.paused = self._captured


class recording_at(_Recorded):
    """Context manager: autograd records on the tensors of a level; None for plain tensors.

    Inside of another derivative, plain tensors reach the kernels of NOTE [derivatives of forward
    formulas] too, which are otherwise active inside of levels alone.
    """

    __slots__ = ("_watching",)

    def __init__(self, level: TracerLevel | None) -> None:
        super().__init__(level, True)

    def __enter__(self) -> None:
        self._watching = None
        if self._level is None:
            prepare()
            if outermost.recording:
                self._watching = watching_random()
                self._watching.__enter__()
        super().__enter__()
        outermost.recording += 1

    def __exit__(self, *error: object) -> None:
        outermost.recording -= 1
        super().__exit__()
        if self._watching is not None:
            self._watching.__exit__(*error)


def _belongs_to(value: Any, level: TracerLevel) -> bool:
    """True if a tensor belongs to the level's transform, including its subsets."""
    return isinstance(value, Tracer) and value.dispatch_level.root is level.root


@contextmanager
def outside_graph(grad_mode: bool) -> Iterator[None]:
    """Context manager for the forward of an ``autograd.Function``: outer levels keep recording.

    C++ switches off grad mode and tangents for the forward; the block switches them on again. A
    level made in the meantime, to map the function, has captured the state without grad mode, so
    its captured grad mode is restored too.
    """
    innermost = [level for level in current_levels() if isinstance(level, TracerLevel)][-1:]
    captured = [level.torch_state.grad_mode for level in innermost]
    for level in innermost:
        level.torch_state.grad_mode |= grad_mode
    try:
        with torch.set_grad_enabled(grad_mode), forward_ad._set_fwd_grad_enabled(True):
            yield
    finally:
        for level, mode in zip(innermost, captured, strict=True):
            level.torch_state.grad_mode = mode


def requires_grad(value: torch.Tensor, level: TracerLevel | None) -> bool:
    """True if the value depends on an outer differentiated input of the level, or of an inner one.

    A tracer of a level further in does not require grad if only the value that it wraps does.
    """
    with DisableTorchFunctionSubclass():
        for x in with_tensors_inside(value) if isinstance(value, Tracer) else (value,):
            if level is not None and not _belongs_to_or_is_inside(x, level):
                return False
            if any(part.requires_grad for part in _with_tangents((x,), level)):
                return True
    return False


def _belongs_to_or_is_inside(value: Any, level: TracerLevel) -> bool:
    inside = isinstance(value, Tracer) and value.dispatch_level.depth > level.depth
    return inside or _belongs_to(value, level)


def _with_tangents(
    values: Sequence[torch.Tensor], level: TracerLevel | None
) -> Sequence[torch.Tensor]:
    """Return the values and their tangents, which have separate graphs."""
    if not may_carry_outer_tangents(level):
        return values
    tangents = [forward_ad.unpack_dual(value).tangent for value in values]
    return [*values, *(tangent for tangent in tangents if tangent is not None)]


def reaches_other_leaves(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], level: TracerLevel | None
) -> bool:
    """True if the outputs depend on leaves of the level other than the given ones.

    The derivatives of such outputs must be differentiable, because an outer transform may
    differentiate by those leaves. Leaves that have ended do not count, except inside of a jvp,
    whose tangents may be lost in a pass that is not recorded.
    """
    skip_ended = not can_carry_tangents()
    leaf_ids = set(map(id, leaves))

    def is_other(variable: torch.Tensor) -> bool:
        is_known = id(variable) in leaf_ids or (skip_ended and has_ended(variable))
        return not is_known and (level is None or _belongs_to(variable, level))

    with DisableTorchFunctionSubclass():
        outputs = _with_tangents(outputs, level)
        if any(out.is_leaf and out.requires_grad and is_other(out) for out in outputs):
            return True
    return _reaches(outputs, is_other)


def reaches_outer_leaves(outputs: Sequence[torch.Tensor], level: TracerLevel) -> bool:
    """True if the graph of the level goes on in a graph outside of it that can be differentiated.

    A pass of a pullback from outside, whose cotangents are tracers, makes such a graph.
    """

    def is_outer(leaf: torch.Tensor) -> bool:
        return not has_ended(leaf) and not _belongs_to_or_is_inside(leaf, level)

    return _reaches(outputs, is_outer)


def reaches_active_leaves(value: torch.Tensor) -> bool:
    """True if a tensor depends on a leaf of its own level that has not ended."""
    if value.is_leaf:
        return value.requires_grad and not has_ended(value)
    return _reaches((value,), lambda leaf: not has_ended(leaf))


def is_perturbed(value: Any, recorded: bool | None = None) -> bool:
    """True if a tensor is differentiated by, at any level and in either mode.

    Args:
        recorded: True if reverse mode counts; None: grad mode decides.
    """
    recorded = torch.is_grad_enabled() if recorded is None else recorded
    forward = can_carry_tangents()
    with DisableTorchFunction():  # a body's mode would take the values for tensors from outside
        while isinstance(value, torch.Tensor):
            if recorded and value.requires_grad:
                return True
            if forward and forward_ad.unpack_dual(value).tangent is not None:
                return True
            value = value.value if isinstance(value, BatchTracer | GradTracer) else None
    return False


def next_sequence_number() -> int:
    """Return the sequence number of the next node that this thread makes."""
    return _autograd._get_sequence_nr()


def depends_on_leaves(value: Any, leaves: Sequence[torch.Tensor], since: int) -> bool:
    """True if a tensor, or a value that it wraps, was computed from leaves of a graph.

    Args:
        since: the smallest sequence number of a node that can depend on the leaves.
    """
    return any(
        any(x is leaf for leaf in leaves) or _has_node_from(x, leaves, since)
        for x in with_tensors_inside(value)
    )


def _has_node_from(value: torch.Tensor, leaves: Sequence[torch.Tensor], since: int) -> bool:
    with DisableTorchFunctionSubclass():
        pending: list[Any] = [value.grad_fn]
        seen = set(pending)
        while pending:
            node = pending.pop()
            if node is None or node._sequence_nr() < since:
                continue
            variable = getattr(node, "variable", None)
            if variable is not None and any(variable is leaf for leaf in leaves):
                return True
            parents = {parent for parent, _ in node.next_functions} - seen
            seen |= parents
            pending += parents
    return False


def depends_on(outputs: Sequence[torch.Tensor], leaf: torch.Tensor) -> bool:
    """True if an output is a leaf, or depends on it."""
    return any(out is leaf for out in outputs) or _reaches(outputs, lambda x: x is leaf)


def _reaches(outputs: Sequence[torch.Tensor], is_target: Callable[[torch.Tensor], bool]) -> bool:
    """True if the graph of the outputs has a leaf for which ``is_target`` is True."""
    with DisableTorchFunctionSubclass():
        return any(map(is_target, _leaves(outputs)))


def _leaves_in_python(outputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the leaves of the graphs of tensors."""
    pending: list[Any] = [out.grad_fn for out in outputs if out.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        parents = node.next_functions
        if not parents:
            variable = getattr(node, "variable", None)
            if variable is not None:
                yield variable
        for parent, _ in parents:
            if parent is not None and parent not in seen:
                seen.add(parent)
                pending.append(parent)


_handlers = compiled.load()
_leaves: Callable[[Sequence[torch.Tensor]], Iterable[torch.Tensor]] = (
    _leaves_in_python if _handlers is None else _handlers.leaves
)


def differentiated_by_outer(outputs: Sequence[torch.Tensor]) -> bool:
    """True if the outputs carry tangents, or an outer level differentiates by their inputs.

    Some backward formulas (for example that of ``linalg.det``) use saved values without
    derivatives, unless grad mode is on when they run.
    """
    with DisableTorchFunction():
        forward = can_carry_tangents()
        inside = [x for out in outputs for x in tensors_inside(out)]
        return any(x.requires_grad for x in inside) or (
            forward
            and any(forward_ad.unpack_dual(x).tangent is not None for x in (*outputs, *inside))
        )


class unrecorded(_Recorded):
    """Context manager: a backward pass over the level's graph is not recorded in that graph.

    Code that the pass calls may record nevertheless, like a checkpoint that reruns its function.
    """

    __slots__ = ("_inner",)

    def __init__(self, level: TracerLevel | None) -> None:
        super().__init__(level, False)

    def __enter__(self) -> None:
        depth = 0 if self._level is None else self._level.depth
        self._inner = [
            active.torch_state
            for active in current_levels()
            if active.depth > depth and isinstance(active, TracerLevel)
        ]
        for state in self._inner:
            state.quiet += 1
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        for state in self._inner:
            state.quiet -= 1


def backward(
    outputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    create_graph: bool,
    retain_graph: bool,
) -> list[torch.Tensor | None]:
    """Run the engine's backward pass.

    If ``create_graph`` is True, the pass can reach the kernels of NOTE [derivatives of backward
    formulas].

    Returns:
        A cotangent for each input, or None for an input that the outputs do not depend on.
    """
    # Read the flag of the tracer's own level, not of the graph that outer levels record.
    with DisableTorchFunctionSubclass():
        pairs = [
            (out, ct) for out, ct in zip(outputs, cotangents, strict=True) if out.requires_grad
        ]
    if not pairs or not inputs:
        return [None] * len(inputs)
    for level in current_levels():
        if isinstance(level, TracerLevel):
            level.on_backward_pass()
    passes = own_passes()
    passes[0] += 1
    engine: Any = Variable._execution_engine
    try:
        with watching_random() if create_graph else nullcontext(), code_of_pass():
            return list(
                engine.run_backward(
                    tuple(out for out, _ in pairs),
                    tuple(ct for _, ct in pairs),
                    retain_graph or create_graph,
                    create_graph,
                    tuple(inputs),
                    True,
                    accumulate_grad=False,
                )
            )
    finally:
        passes[0] -= 1


def detach_at_level(value: torch.Tensor) -> torch.Tensor:
    """Return the value without its own level's graph; outer graphs and its tangent are kept."""
    with DisableTorchFunctionSubclass():
        if not value.requires_grad:
            return value
        if can_carry_tangents():
            primal, tangent = forward_ad.unpack_dual(value)
            if tangent is not None:
                return forward_ad.make_dual(primal.detach(), tangent.detach())
        return value.detach()


def detached_at(value: torch.Tensor, level: TracerLevel | None) -> torch.Tensor:
    """Return the value without the graph of a level; a value of an outer level has none there."""
    return detach_at_level(value) if level is None or _belongs_to(value, level) else value


def make_dual(
    primal: torch.Tensor, tangent: torch.Tensor, level: TracerLevel | None
) -> torch.Tensor:
    """Return the dual tensor of a primal and its tangent, as a tensor of the level."""
    primal, tangent = lift(primal, level), lift(tangent, level)
    if is_expanded(primal):
        # torch gives a tangent the strides of its primal, which fails for an expanded primal.
        primal = without_overlaps(primal)
    if not _known_to_have_equal_strides(primal, tangent) or differentiated_by_outer((tangent,)):
        # torch copies a tangent that is laid out in another way than its primal, without the
        # function handlers: NOTE [operands of outer levels].
        zeros = torch.ops.aten._new_zeros_with_same_feature_meta(tangent, primal)
        tangent = zeros.copy_(tangent)
    with DisableTorchFunctionSubclass():
        dual: torch.Tensor = forward_ad.make_dual(primal, tangent)
    return dual


def _known_to_have_equal_strides(primal: torch.Tensor, tangent: torch.Tensor) -> bool:
    """True if the strides are equal, whatever the values of their symbolic sizes."""
    pairs = zip(primal.stride(), tangent.stride(), strict=True)
    return all(statically_known_true(step == other) for step, other in pairs)


def unpack_dual(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the primal and the tangent; the tangent is None if the value has none."""
    sync(value)
    with DisableTorchFunctionSubclass():
        primal, tangent = forward_ad.unpack_dual(value)
    return primal, tangent
