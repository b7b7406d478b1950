"""Calls of modules whose parameters ``fully_shard`` has sharded over processes.

The hooks of such a module gather its own parameters, even if a call replaces them. A functional
call therefore runs without these hooks, on the gathered tensors of the call. The transpose of the
gathering averages over the processes, as the module's own backward pass does.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from tsfunc.bridge.tracers.dtensors import is_dtensor
from tsfunc.bridge.tracers.interrupts import undoing

State = Mapping[str, Tensor]


@contextmanager
def gathering_shards(
    module: nn.Module, states: State | Sequence[State], tie_weights: bool
) -> Iterator[State | Sequence[State]]:
    """Context manager: yield the state for a call of a module, with each sharded tensor gathered.

    In the block the hooks that gather the module's own parameters are off. A module without sharded
    parts gets its state unchanged.

    Args:
        states: the tensors of the call by name, or several such dicts.
        tie_weights: if True, a tensor for one name of a parameter serves its other names.

    Raises:
        RuntimeError: the hooks of a part do more than gather.
    """
    parts = _sharded_parts(module)
    if not parts:
        yield states
        return
    dicts = [states] if isinstance(states, Mapping) else list(states)
    whole = [{name: _whole_tensor(value) for name, value in state.items()} for state in dicts]
    missing = _own_of(module, {name for state in dicts for name in state}, tie_weights)
    with ExitStack() as stack:
        for name, part in parts.items():
            stack.enter_context(_without_gathering(part, name))
        yield [*whole, missing]
    if isinstance(states, dict):  # buffers that the call has assigned are returned in the dict
        states.update({name: value for name, value in whole[0].items() if name not in missing
                       and not is_dtensor(states[name])})  # fmt: skip


def _sharded_parts(module: nn.Module) -> dict[str, Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: not applied
    kind: Any = getattr(fsdp, "FSDPModule", None)
    if kind is None:
        return {}
    return {name: part for name, part in module.named_modules() if isinstance(part, kind)}


def _whole_tensor(value: Any) -> Any:
    """Return the whole tensor of a sharded one; its gradient is the mean of the processes'."""
    if not is_dtensor(value):
        return value
    from torch.distributed.tensor import Partial

    return value.full_tensor(grad_placements=[Partial("avg")] * value.device_mesh.ndim)


def _own_of(module: nn.Module, names: set[str], tie_weights: bool) -> dict[str, Tensor]:
    """Return the module's own sharded parameters that a call does not replace, gathered."""
    named = dict(module.named_parameters(remove_duplicate=False))
    served = {id(named[name]) for name in names if name in named} if tie_weights else set()
    tensors: dict[str, Tensor] = {}
    for name, parameter in named.items():
        if name not in names and id(parameter) not in served and is_dtensor(parameter):
            tensors[name] = _whole_tensor(parameter)
            if tie_weights:
                served.add(id(parameter))
    return tensors


@contextmanager
def _without_gathering(part: Any, name: str) -> Iterator[None]:
    """Context manager: run a part of a module without the hooks that gather its parameters."""
    state = part._get_fsdp_state()
    before, after = part._forward_pre_hooks, part._forward_hooks
    policy = state._mp_policy
    plain = policy.param_dtype is policy.output_dtype is policy.reduce_dtype is None
    if not plain or not all(
        any(_owner(hook) is state for hook in hooks.values()) for hooks in (before, after)
    ):
        raise RuntimeError(
            f"functional_call: expected modules that fully_shard was applied to one by one and "
            f"without a mixed precision policy, got {type(part).__name__} (at {name!r}): its "
            f"forward does more than gather its parameters. Use tsfunc.all_gather on sharded "
            f"parameters inside of the function, or differentiate with .backward()."
        )

    def restore() -> None:
        part._forward_pre_hooks, part._forward_hooks = before, after

    with undoing(restore):
        part._forward_pre_hooks, part._forward_hooks = (
            OrderedDict((key, hook) for key, hook in hooks.items() if _owner(hook) is not state)
            for hooks in (before, after)
        )
        yield


def _owner(hook: Any) -> Any:
    return getattr(hook, "__self__", None)
