"""Functions with a ``backward`` marked ``@once_differentiable``: a second derivative is an error.

torch runs such a ``backward`` without a graph, so its results have no recorded dependence on the
inputs of ``forward``. Differentiating them again is an error in torch if no recorded path exists,
and gives zero otherwise. This library raises an error in both cases. Each call gets one more
operand, the guard, which depends on all the others. The results of ``backward`` depend on the guard
and on the cotangents by a function without derivatives. Forward mode of a function without a
``jvp`` is a derivative of ``backward`` too, and raises the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tsfunc.bridge.grad import apply_hook
from tsfunc.bridge.grad.autograd import differentiates_here, is_perturbed
from tsfunc.bridge.grad.dual_level import can_carry_tangents
from tsfunc.bridge.grad.mapped_function import has_setup, torch_jvp
from tsfunc.errors import UndefinedDerivativeError


@once_differentiable
def _mark(ctx: Any) -> None: ...


_torch_vmap = Function.vmap

# All functions that the decorator makes share one code object.
_CODE: Final = _mark.__code__
_GUARDED: Final = "__tsfunc_guarded__"


def is_marked(cls: Any) -> bool:
    """True if the ``backward`` of a class is marked ``@once_differentiable``."""
    return getattr(cls.backward, "__code__", None) is _CODE


def is_once_differentiable(cls: Any, args: Sequence[Any]) -> bool:
    """True if the class is marked and a transform differentiates by an argument."""
    return is_marked(cls) and differentiates_here() and any(is_perturbed(x) for x in args)


def call_guarded(cls: Any, args: Sequence[Any]) -> Any:
    """Run the call so that a second derivative raises ``UndefinedDerivativeError``."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    guard: Any = _Guard.apply(*tensors)  # type: ignore[no-untyped-call]
    return apply_hook.call_apply(_guarded(cls), *args, guard)


class _Guard(Function):
    """A scalar that depends on tensors, with zero derivatives."""

    @staticmethod
    def forward(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count = len(inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *_cotangents: Any) -> Any:
        return (None,) * ctx.count

    @staticmethod
    def jvp(ctx: Any, *_tangents: Any) -> Any:
        return torch.zeros(())


class _GuardedCotangent(Function):
    """A cotangent that depends on the guard and on other cotangents, without a derivative."""

    @staticmethod
    def forward(name: str, cotangent: torch.Tensor, *others: Any) -> torch.Tensor:
        return cotangent.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        if cotangent is not None:
            _refuse(ctx.name)
        return (None,) * len(ctx.needs_input_grad)

    @staticmethod
    def jvp(ctx: Any, *_tangents: Any) -> Any:
        _refuse(ctx.name)


def _refuse(name: str) -> None:
    raise UndefinedDerivativeError(
        f"{name}: trying to differentiate twice a function whose backward is marked with "
        f"@once_differentiable, which has no derivative itself (nor a forward mode, unless the "
        f"function has a jvp method). If backward consists of differentiable operators, remove the "
        f"decorator."
    )


def _guarded(cls: Any) -> Any:
    """Return the class with the guard as one more operand; the class is made once."""
    subclass = cls.__dict__.get(_GUARDED)
    if subclass is not None:
        return subclass
    backward = cls.backward.__wrapped__

    def guarded_backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            results = backward(ctx, *cotangents)
        results = results if isinstance(results, tuple) else (results,)
        if torch.is_grad_enabled() or can_carry_tangents():
            others = [ctx.once_guard, *[ct for ct in cotangents if ct is not None]]
            results = tuple(
                _GuardedCotangent.apply(cls.__name__, x, *others)  # type: ignore[no-untyped-call]
                if isinstance(x, torch.Tensor)
                else x
                for x in results
            )
        return (*results, None)

    members: dict[str, Any] = {"backward": staticmethod(guarded_backward)}
    if has_setup(cls):
        members["forward"] = staticmethod(lambda *args: cls.forward(*args[:-1]))

        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.once_guard = inputs[-1]
            cls.setup_context(ctx, tuple(inputs[:-1]), output)

        members["setup_context"] = staticmethod(setup_context)
    else:

        def forward(ctx: Any, *args: Any) -> Any:
            ctx.once_guard = args[-1]
            return cls.forward(ctx, *args[:-1])

        members["forward"] = staticmethod(forward)
    if cls.jvp is not torch_jvp:
        members["jvp"] = staticmethod(lambda ctx, *tangents: cls.jvp(ctx, *tangents[:-1]))
    if cls.vmap is not _torch_vmap:  # the class's vmap calls the class itself, at the outer levels

        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            return cls.vmap(info, tuple(in_dims[:-1]), *args[:-1])

        members["vmap"] = staticmethod(vmap)
    subclass = type(cls.__name__, (cls,), members)
    setattr(cls, _GUARDED, subclass)
    return subclass
