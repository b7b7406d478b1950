"""Decompositions of operators, run on a level's tracers if no rule covers the whole operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch._C import DispatchKey as TorchKey
from torch._C import _skip_one_hop_torch_function

from tsfunc import hooks
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, bdims_of, unwrap_args, wrap
from tsfunc.bridge.tracers.operators import PLAIN_TENSORS, TorchOperator, tensors_in
from tsfunc.bridge.tracers.registrations import watching_factories
from tsfunc.bridge.tracers.torch_state import without_autograd
from tsfunc.bridge.tracers.tracer import Tracer, lift_where
from tsfunc.ops.registry import Args, BatchDims, Kwargs, Rule, RuleLevel


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


@hooks.rule_of_parts.add
def _rule_of_parts(op: TorchOperator) -> Rule | None:
    """Return the batching rule of a composite that runs the operators it is composed of, or None.

    There is none if a result is not a tensor, and if this package decomposes the operator itself.
    """
    own = op.overload.namespace != "aten" or own_decomposition(op.name) is not None
    return None if own or not _TENSORS.issuperset(op.signature.returns) else _run_parts


_TENSORS: Final = frozenset({"Tensor", "Tensor[]"})


def _wrap_batched(arg: Any, bdim: Any, level: BatchLevel) -> Any:
    """Return an argument of a rule with tracers for its batched values."""
    if isinstance(bdim, list):
        return [_wrap_batched(item, dim, level) for item, dim in zip(arg, bdim, strict=True)]
    return arg if bdim is None else wrap(arg, bdim, level)


def _run_parts(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Run the decomposition on tracers of the level: a new one while calls are recorded."""
    if not isinstance(level, BatchLevel):
        with BatchLevel(level.batch_size, "error", "vmap") as recorded:
            return _run_parts(op, recorded, bdims, args, kwargs)
    given = [_wrap_batched(arg, bdim, level) for arg, bdim in zip(args, bdims, strict=True)]
    out = run_decomposition(decomposition_of(op), level, given, kwargs)
    _, values, kinds = unwrap_args((out,), level)
    known = set(map(id, tensors_in(args)))
    if not known.isdisjoint(map(id, tensors_in(values))):
        return NotImplemented  # the result is the argument, as an object
    return values[0], bdims_of(kinds, values)[0]


_T: Any = torch.Tensor
# Composites of one view or cast, whose plan takes less than a rule in Python.
OF_ONE_OPERATOR: Final = frozenset({
    _T.T.__get__, _T.mT.__get__, _T.type_as, _T.expand_as,
})  # fmt: skip
