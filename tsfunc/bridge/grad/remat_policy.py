"""Results of chosen operators, saved for later runs of a function.

NOTE [results that a policy saves]
A dispatch mode sees each operator below the autograd of its arguments' level. In a second run the
mode returns a saved result instead of calling the operator, and autograd connects this result to
its graph like any other. The outer levels of a tracer run inside of the operator's call. If one of
them records, the call must be made, so that it saves the same tensors as in the first run.

An operator that draws random numbers is always called again, because later operators must draw the
same numbers as before. An operator that writes into its arguments is always called again too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from tsfunc import pytrees
from tsfunc.bridge.grad.dual_level import can_carry_tangents
from tsfunc.bridge.tracers.nesting import tensors_inside
from tsfunc.bridge.tracers.torch_state import with_views
from tsfunc.bridge.tracers.tracer import Tracer

# A function of a context, an operator and its arguments, as in torch.utils.checkpoint.
Policy = Callable[..., "CheckpointPolicy | bool"]

SAVES = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def policy_of(operators: Sequence[Any]) -> Policy:
    """Return the policy that saves the results of some operators, or of some of their overloads.

    Raises:
        TypeError: an item is not an operator.
    """
    chosen = frozenset(operators)
    if not all(isinstance(op, OpOverload | OpOverloadPacket) for op in chosen):
        raise TypeError
    return SaveOperators(chosen)


@dataclass(frozen=True)
class SaveOperators:
    """A policy that saves the results of some operators."""

    chosen: frozenset[Any]

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return op in self.chosen or op.overloadpacket in self.chosen

    def overloads(self) -> list[Any]:
        """Return the overloads of the operators in a fixed order."""
        every = {
            overload
            for op in self.chosen
            for overload in (
                [getattr(op, name) for name in op.overloads()]
                if isinstance(op, OpOverloadPacket)
                else [op]
            )
        }
        return sorted(every, key=str)


@dataclass(frozen=True)
class SaveEither:
    """A policy that saves each result that either of two policies saves."""

    first: Policy
    second: Policy

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return any(
            policy(ctx, op, *args, **kwargs) in SAVES for policy in (self.first, self.second)
        )


class SavedResults:
    """The saved results of a first run, for later runs.

    A call is identified by its operator, the dtypes and shapes of its tensor arguments, and the
    number of earlier calls with the same operator, dtypes and shapes.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.results: defaultdict[Any, dict[int, _SavedResult]] = defaultdict(dict)

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Return the context managers for the first run and for the later runs."""
        return _RecordMode(self), _ReplayMode(self)


class _Mode(TorchDispatchMode):
    def __init__(self, saved: SavedResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved = saved
        self.seen: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self.seen.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _may_be_saved(func, args, kwargs):
            return func(*args, **kwargs)
        key = _call_key(func, args, kwargs)
        position = self.seen[key]
        self.seen[key] = position + 1
        return self.at(key, position, func, args, kwargs)

    def at(self, key: Any, position: int, func: Any, args: Any, kwargs: Any) -> Any:
        """Handle a call by its key and the number of earlier calls with this key."""
        raise NotImplementedError


class _RecordMode(_Mode):
    def at(self, key: Any, position: int, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        context = SelectiveCheckpointContext(is_recompute=False, op_output=out)
        if self.saved.policy(context, func, *args, **kwargs) in SAVES:
            self.saved.results[key][position] = _SavedResult(out)
        return out


class _ReplayMode(_Mode):
    def at(self, key: Any, position: int, func: Any, args: Any, kwargs: Any) -> Any:
        saved = self.saved.results[key].get(position) if key in self.saved.results else None
        if saved is None or not saved.valid:
            return func(*args, **kwargs)
        return saved.aliases()


class _SavedResult:
    """A saved result, as aliases; it is valid until a write into its memory."""

    def __init__(self, out: Any) -> None:
        self.leaves, self.tree = pytrees.flatten(out)
        self.leaves = [_new_alias(x) for x in self.leaves]
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [x._version for x in self.leaves if isinstance(x, torch.Tensor)]

    @property
    def valid(self) -> bool:
        return self._versions() == self.versions

    def aliases(self) -> Any:
        """Return the result as new aliases, like another call of the operator."""
        return pytrees.unflatten(self.tree, [_new_alias(x) for x in self.leaves])


def _new_alias(value: Any) -> Any:
    if isinstance(value, Tracer):
        return value.aliased_here()
    if not isinstance(value, torch.Tensor):
        return value
    with with_views():
        return value.detach()  # shares the version counter of the value


def _may_be_saved(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if the result of a call may be saved: see NOTE [results that a policy saves]."""
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    tracers = [x for x in pytrees.leaves_of((args, kwargs)) if isinstance(x, Tracer)]
    recorded = any(inner.requires_grad for x in tracers for inner in tensors_inside(x))
    return not (recorded or (tracers and can_carry_tangents()))


def _call_key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    leaves = pytrees.leaves_of((tuple(args), dict(kwargs)))
    return func, *((x.dtype, tuple(x.shape)) for x in leaves if isinstance(x, torch.Tensor))
