"""torch's settings that affect operators besides their arguments.

A program is made under certain settings and serves calls under the same settings. They are read at
every call, so each is read by the cheapest function.

Private names used here (torch 2.11 to 2.13), each the C++ function behind a public one:
``_is_any_autocast_enabled`` (``is_autocast_enabled`` for every type of device),
``_get_deterministic_algorithms`` and ``_get_deterministic_algorithms_warn_only``,
``_get_cudnn_deterministic``, ``_get_cudnn_benchmark``, ``_get_float32_matmul_precision``;
``_len_torch_function_stack`` tells whether any function mode is active, such as the mode that
``set_default_device`` enters; ``nn.modules.module._has_any_global_hook``, and the dicts of these
hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C import (
    _get_cudnn_benchmark,
    _get_cudnn_deterministic,
    _get_deterministic_algorithms,
    _get_deterministic_algorithms_warn_only,
    _get_float32_matmul_precision,
    _is_any_autocast_enabled,
    _len_torch_function_stack,
)
from torch.nn.modules import module

from tsfunc.dispatch.state import tls


class Setting(NamedTuple):
    """A setting: its name, and the function that reads it."""

    name: str
    read: Callable[[], Any]


def autocast() -> tuple[Any, ...]:
    """Return the dtype of each device type with autocast on, and whether casts are cached."""
    if not _is_any_autocast_enabled():
        return ()
    found = [(kind, torch.get_autocast_dtype(kind)) for kind in _autocast_devices()
             if torch.is_autocast_enabled(kind)]  # fmt: skip
    return (*found, torch.is_autocast_cache_enabled())


@functools.cache
def _autocast_devices() -> tuple[str, ...]:
    kinds = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "privateuseone")
    return tuple(kind for kind in kinds if torch.amp.is_autocast_available(kind))


def mesh_axes() -> str:
    """Return the mesh axes that are bound, with their sizes and checks."""
    levels = tls.state.levels
    return "; ".join([level.binding for level in levels if level.binding]) if levels else ""


def default_device() -> torch.device:
    """Return the device on which factories make tensors."""
    # torch's function costs as much as ten operators; without function modes the device is the
    # CPU.
    return torch.get_default_device() if _len_torch_function_stack() else _CPU


_CPU = torch.device("cpu")

_PLAIN = (
    Setting("grad mode", torch.is_grad_enabled),
    Setting("inference mode", torch.is_inference_mode_enabled),
    Setting("default dtype", torch.get_default_dtype),
    Setting("deterministic algorithms", _get_deterministic_algorithms),
    Setting("warn_only of deterministic algorithms", _get_deterministic_algorithms_warn_only),
    Setting("cudnn.deterministic", _get_cudnn_deterministic),
    Setting("cudnn.benchmark", _get_cudnn_benchmark),
    Setting("float32 matmul precision", _get_float32_matmul_precision),
    Setting("mesh axes", mesh_axes),
)
SETTINGS = (*_PLAIN, Setting("autocast", autocast), Setting("default device", default_device))


def is_persistent(owner: torch.nn.Module, name: str) -> bool:
    """True if a module's buffer is part of its ``state_dict()``, which may have hooks."""
    return name not in owner._non_persistent_buffers_set


def hooks_of_all_modules() -> tuple[Any, ...]:
    """Return the hooks that torch calls with every module, in order."""
    if not module._has_any_global_hook():
        return ()
    kinds = (
        module._global_forward_pre_hooks, module._global_forward_hooks,
        module._global_backward_pre_hooks, module._global_backward_hooks,
    )  # fmt: skip
    return tuple(hook for kind in kinds for hook in kind.values())


def settings() -> tuple[Any, ...]:
    """Return the values of all settings, in the order of ``SETTINGS``."""
    return tuple([setting.read() for setting in SETTINGS])


def condition(now: tuple[Any, ...], scope: dict[str, Any]) -> str:
    """Return a Python expression that is true if the settings have changed.

    Args:
        now: the result of :func:`settings`.
        scope: receives the names in the expression.
    """
    *plain, casts, device = now
    parts = []
    for i, (setting, value) in enumerate(zip(_PLAIN, plain, strict=True)):
        if value == "":
            continue  # with no axis bound, the function has found none
        scope[f"setting_{i}"], scope[f"is_{i}"] = setting.read, value
        same = "is" if isinstance(value, bool | torch.dtype) else "=="
        parts.append(f"setting_{i}() {'is not' if same == 'is' else '!='} is_{i}")
    scope |= {"autocast": autocast, "any_autocast": _is_any_autocast_enabled, "casts": casts}
    scope |= {"modes": _len_torch_function_stack, "device": device}
    scope["default_device"] = default_device
    parts.append("autocast() != casts" if casts else "any_autocast()")
    ours = "default_device() != device"
    parts.append(f"modes() and {ours}" if device == _CPU else ours)
    return " or ".join(parts)
