"""``checkpoint``: recompute the values that a derivative needs instead of keeping them.

Reverse mode saves values through torch's hooks, and a checkpoint is torch's non-reentrant one:
NOTE [recomputation] in ``bridge/grad/checkpoints`` explains why it is correct
inside of every transform. In a trace a checkpoint is a node of the program, which does the same
when the program runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import torch
import torch.fx
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tsfunc import pytrees
from tsfunc.bridge.control.control_flow import Axes, Body, ControlFlow
from tsfunc.bridge.control.control_flow_calls import call_control_flow
from tsfunc.bridge.control.traced_bodies import TracedBody, operands_of, union_of_frames
from tsfunc.bridge.grad.remat_policy import Policy, SavedResults, policy_of
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.boundaries import boundary
from tsfunc.bridge.tracers.draw_keys import count_draws, set_draw_counts
from tsfunc.bridge.tracers.dynamo import delegate_in_dynamo
from tsfunc.bridge.tracers.functorch import in_torch_func
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level
from tsfunc.bridge.tracers.random_states import devices_of, drawing_from, states_of
from tsfunc.bridge.tracers.registrations import prepare
from tsfunc.bridge.tracers.tracer import NO_KWARGS
from tsfunc.program.graphs.torch_operators import Writer
from tsfunc.transforms.argnums import with_replaced
from tsfunc.transforms.checkpoint_policies import everything_saveable, nothing_saveable
from tsfunc.transforms.control.control_recording import fill_tensors
from tsfunc.transforms.control.derived_operators import ControlFlowOperator
from tsfunc.transforms.transformed import Transformed, named_as
from tsfunc.user_code import folding

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def _checkpoint_in_dynamo(
    func: Callable[..., Any] | None = None,
    *,
    policy: Policy | Sequence[Any] | None = None,
    preserve_rng_state: bool = True,
) -> Any:
    """Return torch's checkpoint of a function, which torch.compile has in its graph.

    The transforms of torch.func, which take the place of this package's in the graph, do not
    support it. Inside of them the function is called as it is.
    """
    if func is None:
        return functools.partial(
            _checkpoint_in_dynamo, policy=policy, preserve_rng_state=preserve_rng_state
        )
    if policy is everything_saveable:
        return func
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if policy is not None and policy is not nothing_saveable:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if in_torch_func():
            return func(*args, **kwargs)
        return torch_checkpoint(func, *args, **options, **kwargs)

    return checkpointed


@overload
def checkpoint(
    func: Callable[_Params, _Result],
    *,
    policy: Policy | Sequence[Any] | None = None,
    preserve_rng_state: bool = True,
) -> Transformed[_Params, _Result]: ...
@overload
def checkpoint(
    func: None = None,
    *,
    policy: Policy | Sequence[Any] | None = None,
    preserve_rng_state: bool = True,
) -> Callable[[Callable[_Params, _Result]], Transformed[_Params, _Result]]: ...
@folding("checkpoint")
@delegate_in_dynamo(_checkpoint_in_dynamo)
def checkpoint(
    func: Callable[..., Any] | None = None,
    *,
    policy: Policy | Sequence[Any] | None = None,
    preserve_rng_state: bool = True,
) -> Any:
    """Return a function whose derivative recomputes the values that it needs.

    Args:
        func: takes and returns pytrees. ``checkpoint(policy=...)`` without it is a decorator.
        policy: the results to keep: one of ``tsfunc.checkpoint_policies``; a list of operators
            (such as ``torch.ops.aten.mm.default``); or a function that takes a context, an
            operator and its arguments, and returns a bool or a torch ``CheckpointPolicy``. By
            default no results are kept. Operators that draw random numbers or write are always
            called again.
        preserve_rng_state: if True, the recomputation draws the same random numbers.

    Returns:
        A function with the same arguments and results. Tensors that ``func`` closes over get
        gradients too. The function is differentiable in both modes, to any order and any number of
        times, inside and outside of the other transforms. In a program it is one node.

    Raises:
        TypeError: ``policy`` is not one of these forms.

    Example:
        >>> import torch
        >>> from tsfunc import checkpoint, grad
        >>> @checkpoint
        ... def block(x):
        ...     return x.sin().cos().exp()
        >>> grad(block)(torch.tensor(0.))
        tensor(-0.)

    Similar to ``jax.checkpoint`` and ``torch.utils.checkpoint``: Griewank, "Achieving logarithmic
    growth of temporal and spatial complexity in reverse automatic differentiation" (1992); Chen et
    al., "Training deep nets with sublinear memory cost" (2016).
    """
    keeps = _as_policy(policy)
    if func is None:
        return functools.partial(checkpoint, policy=policy, preserve_rng_state=preserve_rng_state)
    target = func

    @named_as(func)
    @boundary("checkpoint", func, traceable=True)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            in_torch = _checkpoint_in_dynamo(
                target, policy=policy, preserve_rng_state=preserve_rng_state
            )
            return in_torch(*args, **kwargs)
        if keeps is everything_saveable:
            return target(*args, **kwargs)
        if current_trace() is not None:
            return _record(target, args, kwargs, keeps, preserve_rng_state)
        return run(target, args, kwargs, keeps, preserve_rng_state)

    return checkpointed


def _as_policy(policy: Policy | Sequence[Any] | None) -> Policy:
    """Return a policy as a function."""
    if policy is None:
        return nothing_saveable
    if callable(policy):
        return policy
    try:
        return policy_of(policy)
    except TypeError:
        raise TypeError(
            f"checkpoint: policy: expected None, one of tsfunc.checkpoint_policies, a list of "
            f"operators such as torch.ops.aten.mm.default, or a function of a context, an operator "
            f"and its arguments, got {policy!r}."
        ) from None


def run(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] = NO_KWARGS,
    policy: Policy = nothing_saveable,
    preserve_rng_state: bool = True,
) -> Any:
    """Call a function once, and set it up to run again in backward passes."""
    prepare()
    leaves, tree = pytrees.flatten((tuple(args), dict(kwargs)))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in positions]
    rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    devices = devices_of(tensors)
    # The random states are arguments too, so that an outer checkpoint recomputes them: otherwise
    # each of several nested checkpoints would keep a state.
    states = states_of(devices) if preserve_rng_state else []
    state_count = len(states)
    first = True

    def flat(*values: torch.Tensor) -> Any:
        nonlocal first
        args, kwargs = pytrees.unflatten(tree, with_replaced(rest, positions, values[state_count:]))
        if first or not state_count:
            first = False
            return func(*args, **kwargs)
        with drawing_from(values[:state_count], devices):
            return func(*args, **kwargs)

    options: dict[str, Any] = {"preserve_rng_state": False}
    if policy is not nothing_saveable:
        options["context_fn"] = SavedResults(policy).contexts
    return torch_checkpoint(flat, *states, *tensors, use_reentrant=False, **options)


class RecomputedCall(ControlFlowOperator):
    """The body of a checkpoint as an operator."""

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        return self.bodies[0](*operands)

    def write_for_torch(self, writer: Writer, operands: Sequence[Any]) -> list[torch.fx.Node]:
        return writer.inline(self.bodies[0], operands)

    def expanded(self) -> Body:
        return self.bodies[0]


class CheckpointCall(RecomputedCall):
    """A checkpoint in a program; its operands are the values that the body uses."""

    def __init__(self, body: Body, policy: Policy, preserve: bool) -> None:
        super().__init__("checkpoint", [body])
        self.policy, self.preserve = policy, preserve

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        return run(self.bodies[0], operands, NO_KWARGS, self.policy, self.preserve)

    def result_axes(
        self, operands: Sequence[Axes], through: Callable[[Body, Sequence[Axes]], list[Axes]]
    ) -> list[Axes]:
        return through(self.bodies[0], operands)

    def pullback(self, count: int, wrt: Sequence[int], of: Sequence[int]) -> ControlFlow:
        """Run the body and pull back through it at once: no values need to be kept in between."""
        return RecomputedCall(self.name, self.bodies).pullback(count, wrt, of)


def _record(
    func: Callable[..., Any], args: Any, kwargs: Any, policy: Policy, preserve: bool
) -> Any:
    """Record a call as one node of the program."""
    trace = current_trace()
    assert trace is not None

    def of_seen() -> Any:
        seen_args, seen_kwargs = pytrees.tree_map(as_seen_by_current_level, (args, kwargs))
        return func(*seen_args, **seen_kwargs)

    traced = TracedBody(trace, count_draws(of_seen), ())
    wanted = [
        union_of_frames([needed]) if isinstance(leaf, torch.Tensor) else None
        for leaf, needed in zip(traced.leaves, traced.batched(), strict=True)
    ]
    results = [result for result in traced.end(wanted) if result is not None]
    tensors, numbers, (positions,) = operands_of([traced], 0)
    op = CheckpointCall(Body("checkpointed", traced.level.graph, positions), policy, preserve)
    out, counts_after = fill_tensors(
        traced, call_control_flow(op, trace, tensors, numbers, results)
    )
    set_draw_counts(counts_after)
    return out
