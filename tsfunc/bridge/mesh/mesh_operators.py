"""The operators of mesh axes: one for every exchange, and one for a rank's index.

NOTE [exchanges]
``tsfunc_mesh::map(x, kind, ints, axis, mesh)`` is a linear map from the ranks' values to the ranks'
values. Transforms see exchanges only as this operator: its transpose is a map again, its tangent is
the same map, vmap shifts its dims by one (``ops/collectives``), and a program has it as a node. The
node is the same on every rank: no argument depends on the rank, so a permutation is passed as a
whole, and a rank's index is an operator instead of a constant. The kinds, each with its transpose
(``EXCHANGES`` in ``exchanges`` has all facts of each):

========== ======= ==================================================================
sum                the sum over the ranks                              (sum)
gather     dim     the values along a new dim                          (scatter)
scatter    dim     the sum, of which each rank has its index along dim (gather)
all_to_all dim, to each rank is sent its index along dim               (reversed)
permute    pairs   sources, then destinations; zeros without a source  (reversed)
slice      dim     a rank's own part of a value that all ranks have    (tile)
tile       dim     the concatenated parts, on all ranks                (slice)
enter              an equal value of all ranks, as one value per rank  (total)
total              the sum over the ranks, as one value of all         (enter)
leave              equal values, one per rank, as one value of all     (share)
share              an equal value of all, divided by the rank count    (join)
join               as leave, but of cotangents of a shared value       (share)
========== ======= ==================================================================

The last seven are the boundary of ``shard_map``. The transposes of these exchanges are those of a
``vmap`` whose ``in_dims`` and ``out_dims`` are these specs. These transposes differ from those of
``torch.chunk`` and similar operators, which involve one process only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.library
from torch import Tensor
from torch._C import (
    DisableTorchFunctionSubclass,
    _after_autograd_keyset,
    _AutoDispatchBelowAutograd,
)
from torch.autograd import Function, forward_ad

from tsfunc.bridge.grad.autograd import outside_graph
from tsfunc.bridge.grad.custom_function import torch_apply
from tsfunc.bridge.mesh.exchanges import EXCHANGES, as_transpose_of, exchange, result_dtype
from tsfunc.bridge.mesh.meshes import mesh_named, sizes_of
from tsfunc.bridge.trace.trace_level import TraceLevel, current_trace
from tsfunc.bridge.tracers.interrupts import restoring_thread_state
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.bridge.tracers.torch_state import in_dispatch_modes
from tsfunc.dispatch.state import tls
from tsfunc.user_code import user_call_location

_library = torch.library.Library("tsfunc_mesh", "DEF")
_library.define(
    "map(Tensor x, str kind, int[] ints, str axis, str mesh) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)
_library.define(
    "index(str axis, str mesh, *, Device device) -> Tensor", tags=[torch.Tag.pt2_compliant_tag]
)
MAP: Any = torch.ops.tsfunc_mesh.map.default
INDEX: Any = torch.ops.tsfunc_mesh.index.default


def _run_exchange(x: Tensor, kind: str, ints: Sequence[int], axis: str, mesh: str) -> Tensor:
    # Below autograd, where detach() removes a tangent too.
    return exchange(x.detach(), kind, ints, axis, mesh)


def _run_index(axis: str, mesh: str, *, device: torch.device) -> Tensor:
    return torch.tensor(mesh_named(mesh).index(axis), device=device)


_library.impl("map", _run_exchange, "CompositeExplicitAutograd")
_library.impl("index", _run_index, "CompositeExplicitAutograd")


def _fake(x: Tensor, kind: str, ints: Sequence[int], axis: str, mesh: str) -> Tensor:
    shape = EXCHANGES[kind].shape(list(x.shape), ints, sizes_of(mesh)[axis])
    return x.new_empty(shape, dtype=result_dtype(kind, x.dtype))


def _fake_index(axis: str, mesh: str, *, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


torch.library.register_fake("tsfunc_mesh::map", _fake, lib=_library)
torch.library.register_fake("tsfunc_mesh::index", _fake_index, lib=_library)


def transpose_call(kind: str, ints: Sequence[int]) -> tuple[str, list[int]]:
    return EXCHANGES[kind].transpose, EXCHANGES[kind].transposed_ints(list(ints))


class _Exchange(Function):
    """An exchange in a graph: its backward is the transpose, its jvp is the exchange itself.

    torch's own node for an operator (``torch.library.register_autograd``) has no forward mode, and
    a trace treats it as a Function of the user. This class records one ``map`` node in a program.
    """

    @staticmethod
    def forward(ctx: Any, keys: Any, grad_mode: bool, x: Tensor, *call: Any) -> Any:
        ctx.call = call
        compared = str(call[-1]).endswith((";calls", ";values")) and not in_trace()
        ctx.location = user_call_location() if compared else None
        # Values inside of tracers belong to other levels, whose graphs continue.
        with outside_graph(grad_mode):
            return _below_autograd(keys, x, *call)

    @staticmethod
    @restoring_thread_state
    def backward(ctx: Any, cotangent: Any) -> Any:
        kind, ints, axis, mesh = ctx.call
        with nullcontext() if ctx.location is None else as_transpose_of(ctx.location):
            cotangent_in = exchange_at_levels(cotangent, *transpose_call(kind, ints), axis, mesh)
        return (None, None, cotangent_in, None, None, None, None)

    @staticmethod
    def jvp(ctx: Any, _keys: Any, _grad_mode: Any, tangent: Any, *_: Any) -> Any:
        kind, ints, axis, mesh = ctx.call
        return exchange_at_levels(tangent, kind, list(ints), axis, mesh)


def _below_autograd(keys: Any, x: Tensor, *call: Any) -> Any:
    with _AutoDispatchBelowAutograd():
        return MAP.redispatch(keys & _after_autograd_keyset, x, *call)


def _autograd(keys: Any, x: Tensor, *call: Any) -> Any:
    grad_mode = torch.is_grad_enabled()
    with DisableTorchFunctionSubclass():
        recorded = grad_mode and x.requires_grad
        has_tangent = (
            forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
        )
    if recorded or has_tangent:
        return torch_apply(_Exchange, keys, grad_mode, x, *call)
    return _below_autograd(keys, x, *call)


_library.impl("map", _autograd, "Autograd", with_keyset=True)


def exchange_at_levels(x: Tensor, kind: str, ints: list[int], axis: str, mesh: str) -> Tensor:
    if is_plain_exchange(x):
        return exchange(x, kind, ints, axis, mesh)
    return MAP(x, kind, ints, axis, mesh)


def is_plain_exchange(x: Tensor) -> bool:
    """True if an exchange of the tensor concerns neither autograd nor a transform or a trace."""
    return (
        type(x) is Tensor
        and not x.requires_grad
        and forward_ad._current_level < 0
        and not in_dispatch_modes()
        and not in_trace()
    )


def in_trace() -> bool:
    """True if a program is being traced, whose exchanges run later."""
    return current_trace() is not None


def outermost_trace() -> TraceLevel | None:
    """Return the level of the program that is being traced, or None."""
    for level in tls.state.levels:
        if isinstance(level, TraceLevel):
            return level
    return None


def axis_index(axis: str, mesh: str, device: torch.device | None) -> Tensor:
    """Return this rank's index along an axis; a trace records it as a node."""
    on = torch.get_default_device() if device is None else device
    trace = current_trace()
    if trace is None:
        return _run_index(axis, mesh, device=on)
    return operator_of(INDEX).run_at(trace, (axis, mesh), {"device": on})
