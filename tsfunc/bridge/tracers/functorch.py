"""Interoperation with torch.func, whose transforms keep an interpreter stack of their own.

If a torch.func transform is the innermost one, the traced tensors are its own. torch's plain
autograd must not run on them, and a tracer of this package would leave their levels in the wrong
order. A transform that is called there delegates to the torch.func transform of the same name, as
it does while Dynamo traces it (NOTE [transforms in torch.compile] in ``dynamo``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.func
from torch._C import _functorch
from torch.compiler import is_dynamo_compiling

from tsfunc.bridge.tracers.tracer import TracerLevel
from tsfunc.dispatch.state import innermost_of


def _value_and_grad(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return torch.func's grad_and_value of a function, with the value first."""
    both = TORCH_FUNC["grad_and_value"](*args, **kwargs)
    return lambda *args, **kwargs: both(*args, **kwargs)[::-1]


# torch.func's own transforms, even after its attributes were replaced by this package's.
TORCH_FUNC: Final[Mapping[str, Callable[..., Any]]] = {
    "value_and_grad": _value_and_grad,
    **{
        name: getattr(torch.func, name)
        for name in (
            "functional_call",
            "grad",
            "grad_and_value",
            "hessian",
            "jacfwd",
            "jacrev",
            "jvp",
            "vjp",
            "vmap",
        )
    },
}


def functorch_depth() -> int:
    """Return the number of active torch.func transforms on this thread."""
    level = _functorch.maybe_current_level()
    return 0 if level is None else int(level)


def in_torch_func() -> bool:
    """True inside of a torch.func transform. Dynamo knows the answer where it traces the call."""
    return _functorch.peek_interpreter_stack() is not None


def delegate(name: str) -> Callable[..., Any] | None:
    """Return torch.func's transform of this name if it has to take the call, else None."""
    if is_dynamo_compiling():
        return TORCH_FUNC[name]
    if _functorch.maybe_current_level() is None:
        return None
    level = innermost_of(TracerLevel)
    if level is not None and level.functorch_depth >= functorch_depth():
        return None
    return TORCH_FUNC[name]


def is_batched_in_functorch(value: torch.Tensor) -> bool:
    """True if a tensor differs among the examples of a torch.func vmap."""
    if _functorch.maybe_current_level() is None:
        return False
    while _functorch.is_functorch_wrapped_tensor(value):
        if _functorch.is_batchedtensor(value):
            return True
        value = _functorch.get_unwrapped(value)
    return False


def map_inner_tensor(
    value: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return a batched tensor of torch.func's vmap with the tensor inside it changed.

    Wrappers of other torch.func transforms stay as they are, because these differentiate that very
    tensor.
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


def extend_is_batched(module: Any, is_batched: Callable[[Any], bool]) -> None:
    """Teach a module's import of torch.func's ``is_batchedtensor`` about other batched tensors."""
    if getattr(module, "is_batchedtensor", None) is _functorch.is_batchedtensor:
        module.is_batchedtensor = lambda x: _functorch.is_batchedtensor(x) or is_batched(x)
