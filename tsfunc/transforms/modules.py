"""Modules as functions of their state: torch's own tools, which all transforms take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import stack_module_state

from tsfunc.bridge.mesh.sharded_modules import refuse_fully_sharded
from tsfunc.bridge.tracers.flat_weights import flat_weights_kept
from tsfunc.bridge.tracers.functorch import TORCH_FUNC

__all__ = ["functional_call", "stack_module_state"]

State = Mapping[str, Tensor]


def functional_call(
    module: nn.Module,
    parameter_and_buffer_dicts: State | Sequence[State],
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    """Calls a module with other parameters and buffers, and leaves it as it was.

    Args:
        module: what is called.
        parameter_and_buffer_dicts: by their names the tensors to use for the call, or several
            such dicts. Buffers that the call assigns come back in the dict.
        args: its argument, or a tuple of them.
        kwargs: its keyword arguments.
        tie_weights: whether tensors that are one in the module are one in the call.
        strict: whether every parameter and buffer must be given, and nothing else.

    Returns:
        What the module returns.

    Raises:
        TypeError, ValueError, RuntimeError: as ``torch.func.functional_call``; and RuntimeError
            for a module that ``fully_shard`` was applied to, whose forward gathers parameters of
            its own and would not depend on those of the call.

    Example:
        >>> import torch
        >>> from tsfunc import functional_call, grad
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> state = {"weight": torch.ones(1, 2)}
        >>> grad(lambda s: functional_call(layer, s, (torch.tensor([3.0, 4.0]),)).sum())(state)
        {'weight': tensor([[3., 4.]])}

    As ``torch.func.functional_call``, after which a recurrent module goes on with the weights of
    the call.
    """
    refuse_fully_sharded(module, "functional_call")
    with flat_weights_kept(module):
        return TORCH_FUNC["functional_call"](
            module, parameter_and_buffer_dicts, args, kwargs,
            tie_weights=tie_weights, strict=strict,
        )  # fmt: skip
