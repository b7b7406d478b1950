"""Handlers of torch's own dispatch modes, guarded so that an interrupt does not end the process.

NOTE [modes that enter themselves]
torch has one place on each thread for a fake mode, one for a proxy mode and one for a functional
mode. C++ takes the mode out of its place for a call of the mode's ``__torch_dispatch__``, and
afterwards puts it back in a destructor, which ends the process if the place is taken. A handler
enters its mode again, for example while it decomposes an operator. If an interrupt cuts off the
mode's ``__exit__`` there, the place stays taken. The handlers of the three classes are therefore
replaced, once a process, by functions that empty the place at their end.

A call may be interrupted at any step of a backend's compilation, as Inductor may take minutes.

Private names used here (torch 2.13 and 2.14): ``FakeTensorMode``, ``FunctionalTensorMode`` and
``ProxyTorchDispatchMode`` are the classes; ``_get_dispatch_mode`` returns the mode in the place of
a ``_TorchDispatchModeKey``, and ``_unset_dispatch_mode`` empties the place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from torch._C import _get_dispatch_mode, _TorchDispatchModeKey, _unset_dispatch_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from tsfunc.bridge.tracers.dynamo import outside_dynamo

MODES: Final[tuple[tuple[type[Any], _TorchDispatchModeKey], ...]] = (
    (FakeTensorMode, _TorchDispatchModeKey.FAKE),
    (FunctionalTensorMode, _TorchDispatchModeKey.FUNCTIONAL),
    (ProxyTorchDispatchMode, _TorchDispatchModeKey.PROXY),
)


@functools.cache
def guard_handlers() -> None:
    """Replace the handlers: NOTE [modes that enter themselves].

    If an interrupt stops this, or two threads run it, a handler may be guarded twice, which has no
    other effect.
    """
    for cls, key in MODES:
        cls.__torch_dispatch__ = _guarded(cls.__torch_dispatch__, key)


def _guarded(handler: Callable[..., Any], key: _TorchDispatchModeKey) -> Callable[..., Any]:
    """Return a handler after which the place of the mode is empty if it was empty before."""

    @functools.wraps(handler)
    def guarded(*call: Any, **keywords: Any) -> Any:
        if _get_dispatch_mode(key) is not None:
            return handler(*call, **keywords)
        try:
            return handler(*call, **keywords)
        finally:
            _unset_dispatch_mode(key)

    return outside_dynamo(guarded)
