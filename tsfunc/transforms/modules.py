"""Modules as functions of their state: torch's own tools, which work with all transforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.func
from torch import Tensor, nn

from tsfunc.bridge.mesh.sharded_modules import refuse_fully_sharded
from tsfunc.bridge.tracers.flat_weights import preserve_flat_weights
from tsfunc.bridge.tracers.functorch import TORCH_FUNC
from tsfunc.tracebacks import folding

stack_module_state = folding("stack_module_state")(torch.func.stack_module_state)

__all__ = ["functional_call", "stack_module_state"]

State = Mapping[str, Tensor]


@folding("functional_call")
def functional_call(
    module: nn.Module,
    parameter_and_buffer_dicts: State | Sequence[State],
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    """Call a module with other parameters and buffers, and leave the module unchanged.

    Args:
        module: the module to call.
        parameter_and_buffer_dicts: the tensors for the call by name, or several such dicts.
            Buffers that the call assigns are returned in the dict.
        args: the argument, or a tuple of arguments.
        kwargs: the keyword arguments.
        tie_weights: if True, names that share a tensor in the module share a tensor in the call.
        strict: if True, the dicts must have every parameter and buffer, and no other names.

    Returns:
        The result of the module.

    Raises:
        TypeError, ValueError, RuntimeError: as for ``torch.func.functional_call``; also
            RuntimeError for a module that ``fully_shard`` was applied to: its forward gathers its
            own parameters and would not depend on those of the call.

    Example:
        >>> import torch
        >>> from tsfunc import functional_call, grad
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> state = {"weight": torch.ones(1, 2)}
        >>> grad(lambda s: functional_call(layer, s, (torch.tensor([3.0, 4.0]),)).sum())(state)
        {'weight': tensor([[3., 4.]])}

    Same as ``torch.func.functional_call``, except that a recurrent module keeps its own weights
    after the call.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"functional_call: expected a module, got an object of type {type(module).__name__}. "
            f"A function takes its tensors as arguments."
        )
    refuse_fully_sharded(module, "functional_call")
    with preserve_flat_weights(module):
        return TORCH_FUNC["functional_call"](
            module, parameter_and_buffer_dicts, args, kwargs,
            tie_weights=tie_weights, strict=strict,
        )  # fmt: skip
