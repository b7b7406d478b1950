"""Modules whose state a functional call replaces, for functions that run again after the call.

A checkpoint runs its function again in the backward pass, which may come after ``functional_call``
has given the module its own parameters back. The function then runs with the tensors that the
module had when the checkpoint was made. ``functional_call`` of this package and of torch replace
the tensors by ``torch.nn.utils.stateless._reparametrize_module``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch.nn.utils.stateless
from torch import nn
from torch.compiler import is_dynamo_compiling

from tsfunc.bridge.tracers.interrupts import resets
from tsfunc.bridge.tracers.own_state import preserve_flat_weights, preserve_state
from tsfunc.bridge.tracers.registrations import on_first_transform
from tsfunc.bridge.tracers.torch_settings import own_parametrizations
from tsfunc.dispatch.state import overriding

_NAME = "_reparametrize_module"
_torch_replace: Any = getattr(torch.nn.utils.stateless, _NAME)


class ReplacedState(NamedTuple):
    """The tensors that a call has given to a module, by their names."""

    module: nn.Module
    tensors: Mapping[str, torch.Tensor]


class _Calls(threading.local):
    active: Sequence[tuple[nn.Module, Sequence[str]]] = ()


_calls = resets(_Calls())


def _replace(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], *args: Any, **options: Any
) -> Any:
    """Return torch's context manager for a call; the call is known while the context is active."""
    context = _torch_replace(module, tensors, *args, **options)
    return context if is_dynamo_compiling() else _noting(module, tuple(tensors), context)


@contextmanager
def _noting(
    module: nn.Module, names: Sequence[str], context: AbstractContextManager[None]
) -> Iterator[None]:
    active = (*_calls.active, (module, names))
    with context, overriding(_calls, active=active), own_parametrizations():
        yield


on_first_transform(setattr, torch.nn.utils.stateless, _NAME, _replace)


def replaced_states() -> list[ReplacedState]:
    """Return the tensors of modules that calls have replaced on this thread, outermost first."""
    return [ReplacedState(module, _state_by_name(module, names)) for module, names in _calls.active]


def _state_by_name(module: nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of a module by their names, without names that it lacks."""
    tensors = {name: _tensor_of(module, name) for name in names}
    return {name: value for name, value in tensors.items() if value is not None}


def _tensor_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return a parameter or buffer by its name; None if the module has none of this name."""
    path, _, last = name.rpartition(".")
    try:
        part = module.get_submodule(path)
    except AttributeError:
        return None
    return {**part._parameters, **part._buffers}.get(last)


@contextmanager
def with_states(states: Sequence[ReplacedState]) -> Iterator[None]:
    """Context manager: modules have replaced tensors again."""
    with ExitStack() as stack:
        for module, tensors in states:
            stack.enter_context(preserve_flat_weights(module))
            stack.enter_context(preserve_state(module, tensors))
            stack.enter_context(_replace(module, dict(tensors), tie_weights=True))
        yield
