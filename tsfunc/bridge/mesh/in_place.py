"""``torch.distributed``'s collectives that write into their arguments, called on tracers.

``dist.all_reduce(x)`` goes through a process group into an operator (``c10d::allreduce_``) whose
schema does not declare the write. On a tracer, the call becomes the functional collective and a
copy of its result into the argument. A program therefore has both operators, and a vmap sends the
whole batch at once.

The wrappers of torch's functional collectives return tensors that wait at their first use. On a
tracer the wait follows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.bridge.grad.linear_maps import is_recorded
from tsfunc.bridge.tracers.decompositions import DECOMPOSITIONS
from tsfunc.bridge.tracers.schemas import overload_of
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel
from tsfunc.dispatch import DispatchKey, register, running_level
from tsfunc.errors import MissingRuleError

_functional: Any = torch.ops._c10d_functional
# The names of reductions; the functional collectives take them in lower case.
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def _all_reduce(tensors: Sequence[Tensor], group: Any, reduction: Any, *rest: Any) -> Any:
    for x in tensors:
        _write_result(
            "all_reduce", x, (x,), _functional.all_reduce(x, _word(reduction), _group_name(group))
        )
    return list(tensors), _completed_work()


def _broadcast(tensors: Sequence[Tensor], group: Any, source: int, *rest: Any) -> Any:
    for x in tensors:
        _write_result("broadcast", x, (x,), _functional.broadcast(x, source, _group_name(group)))
    return list(tensors), _completed_work()


def _all_gather(out: Tensor, x: Tensor, group: Any, *rest: Any) -> Any:
    gathered = _functional.all_gather_into_tensor(
        x.contiguous(), _group_size(group), _group_name(group)
    )
    _write_result("all_gather_into_tensor", out, (out, x), gathered)
    return out, _completed_work()


def _all_gather_list(
    outs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], group: Any, *rest: Any
) -> Any:
    size = _group_size(group)
    for parts, x in zip(outs, tensors, strict=True):
        gathered = _functional.all_gather_into_tensor(
            x.contiguous().unsqueeze(0), size, _group_name(group)
        )
        waited = _functional.wait_tensor(gathered)
        for part, value in zip(parts, waited.unbind(0), strict=True):
            _write_result("all_gather", part, (part, x), value, waited=True)
    return [list(parts) for parts in outs], _completed_work()


def _reduce_scatter(out: Tensor, x: Tensor, group: Any, reduction: Any, *rest: Any) -> Any:
    scattered = _functional.reduce_scatter_tensor(
        x.contiguous(), _word(reduction), _group_size(group), _group_name(group)
    )
    _write_result("reduce_scatter_tensor", out, (out, x), scattered)
    return out, _completed_work()


def _all_to_all(
    out: Tensor, x: Tensor, group: Any, sent: Sequence[int], split_sizes: Sequence[int], *rest: Any
) -> Any:
    size = _group_size(group)
    received = list(sent) or [out.shape[0] // size] * size
    split = list(split_sizes) or [x.shape[0] // size] * size
    exchanged = _functional.all_to_all_single(x.contiguous(), received, split, _group_name(group))
    _write_result("all_to_all_single", out, (out, x), exchanged)
    return _completed_work()


def _write_result(
    name: str, target: Tensor, operands: Sequence[Tensor], result: Tensor, *, waited: bool = False
) -> None:
    """Write a collective's result into the tensor that the user passed.

    Raises:
        MissingRuleError: a level differentiates by an operand.
    """
    if any(isinstance(x, Tracer) and is_recorded(x) for x in operands):
        raise MissingRuleError(
            f"torch.distributed.{name}: expected a tensor that nothing differentiates by, got one "
            f"inside of a derivative; a collective that writes into its argument has no "
            f"derivative. Use tsfunc.psum and its like, or the functional collectives of torch."
        )
    target.copy_(result if waited else _functional.wait_tensor(result))


def _unbox(group: Any) -> Any:
    from torch._C._distributed_c10d import ProcessGroup

    return group if isinstance(group, ProcessGroup) else ProcessGroup.unbox(group)


def _group_name(group: Any) -> Any:
    return _unbox(group).group_name


def _group_size(group: Any) -> int:
    return _unbox(group).size()


def _word(reduction: Any) -> str:
    """Return the functional collectives' name of a reduction."""
    from torch._C._distributed_c10d import ReduceOp

    op = reduction.op()
    for word in _REDUCTIONS:
        if op == getattr(ReduceOp, word):
            return word.lower()
    raise MissingRuleError(
        f"torch.distributed: expected one of the reductions {', '.join(_REDUCTIONS)} inside of a "
        f"transform, got {op}."
    )


def _completed_work() -> Any:
    from torch._C._distributed_c10d import FakeWork, Work

    return Work.boxed(FakeWork())


def _refuse(name: str) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        raise MissingRuleError(
            f"c10d::{name}: this collective writes into its arguments and has no functional form, "
            f"so it can't be called inside of a transform. Use tsfunc.psum and its like, or the "
            f"functional collectives of torch."
        )

    return kernel


def _run_at_level(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel, run at the level itself, so that it calls torch on tracers."""

    def run(*args: Any) -> Any:
        level = running_level()
        assert isinstance(level, TracerLevel)
        with level.at_own_level():
            return kernel(*args)

    return run


_KERNELS: dict[str, Callable[..., Any]] = {
    "allreduce_": _all_reduce,
    "broadcast_": _broadcast,
    "_allgather_base_": _all_gather,
    "allgather_": _all_gather_list,
    "_reduce_scatter_base_": _reduce_scatter,
    "alltoall_base_": _all_to_all,
    **{
        name: _refuse(name)
        for name in (
            "reduce_", "gather_", "scatter_", "reduce_scatter_", "alltoall_", "send", "recv_",
            "allreduce_coalesced_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
            "reduce_scatter_tensor_coalesced_", "recv_any_source_", "gather_into_tensor_",
        )
    },
}  # fmt: skip

DECOMPOSITIONS["_c10d_functional::_wrap_tensor_autograd"] = _functional.wait_tensor
for _operator, _kernel in _KERNELS.items():
    _overload = overload_of(f"c10d::{_operator}")
    if _overload is not None:
        for _key in (DispatchKey.Batch, DispatchKey.Grad, DispatchKey.Trace):
            register(_overload, _key, _run_at_level(_kernel))
