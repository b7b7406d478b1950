"""Decompositions of operators, run on a level's tracers if no rule covers the whole operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch._C import DispatchKey as TorchKey
from torch._C import _skip_one_hop_torch_function

from tsfunc.bridge.tracers.batch_tracer import BatchLevel
from tsfunc.bridge.tracers.operators import PLAIN_TENSORS, TorchOperator
from tsfunc.bridge.tracers.registrations import watching_factories
from tsfunc.bridge.tracers.torch_state import without_autograd
from tsfunc.bridge.tracers.tracer import Tracer, lift_where
from tsfunc.ops.registry import Args, Kwargs


def run_decomposition(
    decomposition: Callable[..., Any], level: BatchLevel, args: Args, kwargs: Kwargs
) -> Any:
    """Run a decomposition on the tracers, at their own level.

    If that level records autograd, it has recorded the operator itself already. Unbatched tensors
    are lifted to tracers, because an outer level may differentiate them, and it may write
    into tensors made from them.
    """
    args = [lift_where(arg, level, is_outside) for arg in args]
    kwargs = {name: lift_where(arg, level, is_outside) for name, arg in kwargs.items()}
    autograd = without_autograd() if level.autograd else nullcontext()
    with level.at_own_level(), lifting_factories(level), autograd:
        return decomposition(*args, **kwargs)


def is_outside(value: Any, level: BatchLevel) -> bool:
    """True for a tensor that the level has no tracer for yet."""
    if isinstance(value, Tracer):
        return value.dispatch_level.depth < level.depth
    # A tracer is a strided tensor, and C++ reads the components of sparse tensors.
    return type(value) in PLAIN_TENSORS and value.layout is torch.strided


class lifting_factories:
    """Context manager that lifts factories' results, because C++ may write batched values there.

    A Python object can become a tracer later (``promotion``); a tensor that only C++ holds cannot.
    """

    __slots__ = ("_guard", "_level")

    def __init__(self, level: BatchLevel) -> None:
        self._level = level

    def __enter__(self) -> None:
        self._guard = watching_factories()
        self._level.lifts_factories += 1
        self._guard.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._level.lifts_factories -= 1
        self._guard.__exit__(*exc)


def decomposition_of(overload: Any) -> Callable[..., Any]:
    """Return a composite's decomposition, which skips the function handler for the call."""
    decomposition = overload.decompose
    if overload._schema.name in _COMPOSED_IN_CPP:
        decomposition = functools.partial(overload._op_dk, TorchKey.CompositeImplicitAutograd)
    return lambda *args, **kwargs: _skip_one_hop_torch_function(decomposition, (), args, kwargs)


# ``decompose`` runs torch's Python decompositions of these operators, which omit dropout.
_COMPOSED_IN_CPP = frozenset(f"aten::{name}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))


# Decompositions for tracers, by operator name with or without the overload.
DECOMPOSITIONS: dict[str, Callable[..., Any]] = {}


def own_decomposition(name: str) -> Callable[..., Any] | None:
    """Return this package's decomposition of an operator, or None."""
    return DECOMPOSITIONS.get(name) or DECOMPOSITIONS.get(name.partition(".")[0])


def required_decomposition(op: TorchOperator) -> Callable[..., Any] | None:
    """Return a composite's decomposition if it is always decomposed, else None."""
    if op.row is not None or op.special or op.has_kernel or op.overload.namespace != "aten":
        return None
    if not op.composite or own_decomposition(op.name) is not None:
        return None
    return decomposition_of(op.overload)


_T: Any = torch.Tensor
# Composites of one view or cast, whose plan takes less than a rule in Python.
OF_ONE_OPERATOR: Final = frozenset({
    _T.T.__get__, _T.mT.__get__, _T.type_as, _T.expand_as,
})  # fmt: skip
