"""Side by side with torch.func, whose transforms keep an interpreter stack of their own.

Where a transform of torch.func is the innermost one, what it traces are tensors of its own, on
which torch's plain autograd may not be used, and whose levels a tracer of ours would leave in
the wrong order. A transform that is called there is given to torch.func's of the same name.

Private names used here (torch 2.11 to 2.13): ``_functorch.maybe_current_level`` is the depth of
torch.func's stack; ``is_functorch_wrapped_tensor``, ``is_batchedtensor``, ``get_unwrapped``,
``maybe_get_bdim`` and ``maybe_get_level`` tell what a tensor of its transforms is, and
``_add_batch_dim`` makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.func
from torch._C import _functorch

from tsfunc.bridge.tracers.tracer import current_tracer_level

# torch.func's own transforms, also where its attributes have been replaced by ours.
TORCH_FUNC: Final[Mapping[str, Callable[..., Any]]] = {
    name: getattr(torch.func, name)
    for name in ("functional_call", "grad", "grad_and_value", "jvp", "linearize", "vjp", "vmap")
}


def functorch_depth() -> int:
    """How many transforms of torch.func are active on this thread."""
    level = _functorch.maybe_current_level()
    return 0 if level is None else int(level)


def delegate(name: str) -> Callable[..., Any] | None:
    """torch.func's transform of that name, where torch.func is the innermost; else None."""
    if _functorch.maybe_current_level() is None:
        return None
    level = current_tracer_level()
    if level is not None and level.functorch_depth >= functorch_depth():
        return None
    return TORCH_FUNC[name]


def differs_in_functorch(value: torch.Tensor) -> bool:
    """Whether a tensor differs among the examples of a vmap of torch.func."""
    if _functorch.maybe_current_level() is None:
        return False
    while _functorch.is_functorch_wrapped_tensor(value):
        if _functorch.is_batchedtensor(value):
            return True
        value = _functorch.get_unwrapped(value)
    return False


def batch_of_another(
    value: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """A batch of torch.func's vmap with what another tensor becomes in the place of that tensor.

    What its other transforms have wrapped stays: they differentiate this very tensor.
    """
    if not _functorch.is_batchedtensor(value):
        return value
    inner = _functorch.get_unwrapped(value)
    changed = change(inner)
    if changed is inner:
        return value
    return _functorch._add_batch_dim(
        changed, _functorch.maybe_get_bdim(value), _functorch.maybe_get_level(value)
    )


def teach_is_batched(module: Any, name: str, is_batched: Callable[[Any], bool]) -> None:
    """Have a module's own name of torch.func's ``is_batchedtensor`` know other batched tensors."""
    if getattr(module, name, None) is _functorch.is_batchedtensor:
        setattr(module, name, lambda x: _functorch.is_batchedtensor(x) or is_batched(x))
