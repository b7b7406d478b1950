"""The parts of composite operators: run on a level's tracers, where no rule covers the whole.

Private names used here (torch 2.11 to 2.13): ``OpOverload.decompose`` runs a composite
operator's parts, ``OpOverload._op_dk`` is its kernel for one key, ``OpOverload._schema`` names it;
``_C._skip_one_hop_torch_function`` calls a function past its ``__torch_function__`` check, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import optree
import torch
from torch._C import DispatchKey as TorchKey
from torch._C import _skip_one_hop_torch_function

from tsfunc.bridge.tracers.batch_tracer import BatchLevel
from tsfunc.bridge.tracers.factories import watching_factories
from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.bridge.tracers.torch_state import without_autograd
from tsfunc.bridge.tracers.tracer import Tracer

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def run_parts(
    parts: Callable[..., Any], level: BatchLevel, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Calls the parts on the tracers again, at their own level.

    If that level records, it has seen the operator itself. Unbatched arguments come along as
    tracers: they may be differentiated outside of it, and the parts may write into what they make
    of them.
    """

    def lift(value: Any) -> Any:
        return level.lift(value) if is_outside(value, level) else value

    args, kwargs = optree.tree_map(lift, (tuple(args), dict(kwargs)), none_is_leaf=True)
    autograd = without_autograd() if level.autograd else nullcontext()
    with level.at_own_level(), lifting_factories(level), autograd:
        return parts(*args, **kwargs)


def is_outside(value: Any, level: BatchLevel) -> bool:
    """Whether it is a tensor that the level has no tracer for yet."""
    if isinstance(value, Tracer):
        return value.dispatch_level.depth < level.depth
    # A tracer stands for a strided tensor, and C++ asks sparse ones for what they are made of.
    return type(value) in PLAIN_TENSORS and value.layout is torch.strided


class lifting_factories:
    """Context manager: what factories make is of the level, as C++ may write batched values there.

    Python objects can be turned into tracers later (``turning``), what C++ refers to can't.
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


def parts_of_composite(overload: Any) -> Callable[..., Any]:
    """Runs a composite's parts; the call as such is not to meet door 1 again."""
    parts = overload.decompose
    if overload._schema.name in _COMPOSED_IN_CPP:
        parts = functools.partial(overload._op_dk, TorchKey.CompositeImplicitAutograd)
    return lambda *args, **kwargs: _skip_one_hop_torch_function(parts, (), args, kwargs)


# ``decompose`` takes the parts of these that torch has in Python. Those of recurrent networks leave
# dropout out, and those of upsampling compute in another way what is one kernel's.
_COMPOSED_IN_CPP = frozenset({
    *(f"aten::{name}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
    *(f"aten::upsample_{kind}" for kind in (
        "nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d",
    )),
    *(f"aten::_upsample_nearest_exact{rank}d" for rank in (1, 2, 3)),
})  # fmt: skip


# Operators written in others, for tracers, by their names with an overload or for all of them.
PARTS: dict[str, Callable[..., Any]] = {}


def written_here(name: str) -> Callable[..., Any] | None:
    """An operator's parts as they are written in this package."""
    return PARTS.get(name) or PARTS.get(name.partition(".")[0])


def composite_parts(op: TorchOperator) -> Callable[..., Any] | None:
    """What runs the parts of a composite that is run by these and in no other way."""
    if op.row is not None or op.special or op.has_kernel or op.overload.namespace != "aten":
        return None
    if not op.composite or written_here(op.name) is not None:
        return None
    return parts_of_composite(op.overload)
