"""Results of chosen operators, kept from one run of a function to the next.

NOTE [what a policy keeps]
A dispatch mode sees each operator below the autograd of its arguments' level: what it returns in a
second run, instead of calling the operator, autograd ties to its graph as any result. The levels
outside of a tracer's are inside of the call. Where one of these records, the call must be made, so
that it saves what it saved the first time.

An operator that draws random numbers is always called again, for what comes after it is to draw
the same; and so is one that writes into its arguments.

Private names used here (torch 2.11 to 2.13): ``torch.utils._python_dispatch.TorchDispatchMode`` is
shown every operator below autograd; ``torch._ops`` has the types of operators;
``_SetExcludeDispatchKeyGuard`` puts a key into the thread's exclude set, or takes it out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DispatchKey as TorchKey
from torch._C import _SetExcludeDispatchKeyGuard
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from tsfunc import pytrees
from tsfunc.bridge.grad.autograd import tangents_here
from tsfunc.bridge.tracers.tracer import Tracer

# As torch has it: takes a context, an operator and its arguments.
Policy = Callable[..., "CheckpointPolicy | bool"]

SAVES = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def policy_of(operators: Sequence[Any]) -> Policy:
    """The policy that keeps the results of some operators, or of some overloads of theirs.

    Raises:
        TypeError: one of them is no operator.
    """
    chosen = frozenset(operators)
    if not all(isinstance(op, OpOverload | OpOverloadPacket) for op in chosen):
        raise TypeError
    return KeepsOperators(chosen)


@dataclass(frozen=True)
class KeepsOperators:
    """A policy that keeps the results of some operators."""

    chosen: frozenset[Any]

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return op in self.chosen or op.overloadpacket in self.chosen

    def overloads(self) -> list[Any]:
        """The operators, each overload by itself, in an order that is always the same."""
        found = {
            each
            for op in self.chosen
            for each in (
                [getattr(op, name) for name in op.overloads()]
                if isinstance(op, OpOverloadPacket)
                else [op]
            )
        }
        return sorted(found, key=str)


@dataclass(frozen=True)
class KeepsEither:
    """A policy that keeps what either of two keeps."""

    first: Policy
    second: Policy

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return any(
            policy(ctx, op, *args, **kwargs) in SAVES for policy in (self.first, self.second)
        )


class KeptResults:
    """What operators gave in a first run, for the runs after it.

    A call is told by its operator, the types and shapes of its arguments, and how many like it
    came before.

    Args:
        policy: whether the results of a call are kept.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.results: defaultdict[Any, dict[int, _Kept]] = defaultdict(dict)

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Context managers for the first run and for those after it."""
        return _First(self), _Again(self)


class _Mode(TorchDispatchMode):
    def __init__(self, kept: KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept
        self.seen: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self.seen.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _may_be_kept(func, args, kwargs):
            return func(*args, **kwargs)
        key = _key(func, args, kwargs)
        place = self.seen[key]
        self.seen[key] = place + 1
        return self.at(key, place, func, args, kwargs)

    def at(self, key: Any, place: int, func: Any, args: Any, kwargs: Any) -> Any:
        """A call, by its key and how many like it came before."""
        raise NotImplementedError


class _First(_Mode):
    def at(self, key: Any, place: int, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        context = SelectiveCheckpointContext(is_recompute=False, op_output=out)
        if self.kept.policy(context, func, *args, **kwargs) in SAVES:
            self.kept.results[key][place] = _Kept(out)
        return out


class _Again(_Mode):
    def at(self, key: Any, place: int, func: Any, args: Any, kwargs: Any) -> Any:
        kept = self.kept.results[key].get(place) if key in self.kept.results else None
        if kept is None or not kept.valid:
            return func(*args, **kwargs)
        return kept.given()


class _Kept:
    """A result: other tensors for the same memory, as long as nobody writes into that."""

    def __init__(self, out: Any) -> None:
        self.leaves, self.tree = pytrees.flatten(out)
        self.leaves = [_another(x) for x in self.leaves]
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [x._version for x in self.leaves if isinstance(x, torch.Tensor)]

    @property
    def valid(self) -> bool:
        return self._versions() == self.versions

    def given(self) -> Any:
        """The result, as another call of the operator would return it."""
        return pytrees.unflatten(self.tree, [_another(x) for x in self.leaves])


def _another(value: Any) -> Any:
    if isinstance(value, Tracer):
        return value.again()
    if not isinstance(value, torch.Tensor):
        return value
    with _SetExcludeDispatchKeyGuard(TorchKey.ADInplaceOrView, False):
        return value.detach()  # which counts as written into when the value does


def _may_be_kept(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """See NOTE [what a policy keeps]."""
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    tracers = [x for x in pytrees.leaves_of((args, kwargs)) if isinstance(x, Tracer)]
    return not (tracers and (tangents_here() or any(_recorded_outside(x) for x in tracers)))


def _recorded_outside(tracer: Any) -> bool:
    value = getattr(tracer, "value", None)
    while isinstance(value, torch.Tensor):
        if value.requires_grad:
            return True
        value = getattr(value, "value", None) if isinstance(value, Tracer) else None
    return False


def _key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    leaves = pytrees.leaves_of((tuple(args), dict(kwargs)))
    return func, *((x.dtype, tuple(x.shape)) for x in leaves if isinstance(x, torch.Tensor))
