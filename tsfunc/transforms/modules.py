"""Modules as functions of their state: torch's own tools, which work with all transforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

# By its own name, which stays torch's after `torch.func.stack_module_state = ...`.
from torch.func import stack_module_state as _stack_module_state

from tsfunc.bridge.mesh.sharded_modules import gathering_shards
from tsfunc.bridge.tracers.functorch import TORCH_FUNC
from tsfunc.bridge.tracers.interrupts import restoring_thread_state
from tsfunc.bridge.tracers.own_state import preserve_flat_weights, preserve_state
from tsfunc.bridge.tracers.registrations import prepare
from tsfunc.user_code import folding

__all__ = ["functional_call", "stack_module_state"]

State = Mapping[str, Tensor]


@folding("stack_module_state")
def stack_module_state(models: Sequence[nn.Module]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters and the buffers of several modules, each stacked along a new dim.

    The stacked parameters are new leaves, which do not depend on those of the modules.

    Args:
        models: modules of one class, all in training mode or all in evaluation mode, whose
            parameters and buffers have equal names, shapes and dtypes.

    Returns:
        ``(params, buffers)``: two dicts from names to tensors whose first dim is the number of
        modules. ``vmap`` of :func:`functional_call` runs an ensemble with them.

    Raises:
        RuntimeError: the list is empty, the modules differ in class or mode, or a parameter or
            buffer is missing from a module or has another shape there.
        TypeError: the models are not modules.

    Example:
        >>> import torch
        >>> from tsfunc import functional_call, stack_module_state, vmap
        >>> models = [torch.nn.Linear(2, 1) for _ in range(3)]
        >>> params, buffers = stack_module_state(models)
        >>> def run(params, x):
        ...     return functional_call(models[0], params, (x,))
        >>> vmap(run, in_dims=(0, None))(params, torch.ones(4, 2)).shape
        torch.Size([3, 4, 1])

    Same as ``torch.func.stack_module_state``.
    """
    if not isinstance(models, (Sequence, nn.ModuleList)) or not all(
        isinstance(model, nn.Module) for model in models
    ):
        raise TypeError(f"stack_module_state: expected a list of modules, got {models!r}.")
    if len({type(model) for model in models}) == 1:  # else torch raises the error
        for kind in ("parameters", "buffers"):
            _refuse_different(kind, [dict(getattr(model, f"named_{kind}")()) for model in models])
    return _stack_module_state(models)


def _refuse_different(kind: str, states: Sequence[State]) -> None:
    """Raise a RuntimeError if a module's tensors differ in names or shapes from the first's."""
    first = states[0]
    for i, state in enumerate(states):
        for name in dict.fromkeys([*first, *state]):
            a, b = (_describe(tree.get(name)) for tree in (first, state))
            if a != b:
                raise RuntimeError(
                    f"stack_module_state: expected {kind} of equal names and shapes in all models, "
                    f"got {name!r} {a} in models[0] and {b} in models[{i}]."
                )


def _describe(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"


def _check_state(state: object) -> None:
    """Raise torch's error, with advice, if the state of a call is not a dict or several dicts."""
    advice = (
        "The module's own are dict(module.named_parameters()), and the arguments of the module "
        "come after them: functional_call(module, params, (x,))."
    )
    if not isinstance(state, Mapping | Sequence):
        raise ValueError(
            f"functional_call: Expected parameter_and_buffer_dicts to be a dict, or a list/tuple "
            f"of dicts, but got {type(state)}. {advice}"
        )
    if not isinstance(state, Mapping) and not all(isinstance(tree, Mapping) for tree in state):
        raise ValueError(
            f"functional_call: Expected all elements of parameter_and_buffer_dicts to be "
            f"dictionaries. {advice}"
        )


@folding("functional_call")
@restoring_thread_state
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
            RuntimeError for a module that ``fully_shard`` was applied to with a mixed precision
            policy, or together with other modules.

    Example:
        >>> import torch
        >>> from tsfunc import functional_call, grad
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> state = {"weight": torch.ones(1, 2)}
        >>> grad(lambda s: functional_call(layer, s, (torch.tensor([3.0, 4.0]),)).sum())(state)
        {'weight': tensor([[3., 4.]])}

    Same as ``torch.func.functional_call``, except that a recurrent module keeps its own weights
    after the call. A module that ``fully_shard`` was applied to gathers the parameters of the call;
    their gradients are sharded, and averaged over the processes as in its own backward pass.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"functional_call: expected a module, got an object of type {type(module).__name__}. "
            f"A function takes its tensors as arguments."
        )
    _check_state(parameter_and_buffer_dicts)
    prepare()
    with (
        preserve_flat_weights(module),
        gathering_shards(module, parameter_and_buffer_dicts, tie_weights) as state,
        preserve_state(module, state),
    ):
        return TORCH_FUNC["functional_call"](
            module, state, args, kwargs, tie_weights=tie_weights, strict=strict
        )
