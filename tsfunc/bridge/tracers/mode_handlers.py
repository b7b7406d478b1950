"""Handlers of torch's own modes and tensors, guarded so that an interrupt does not end the process.

NOTE [modes that enter themselves]
torch has one place on each thread for a fake mode, one for a proxy mode and one for a functional
mode. C++ takes the mode out of its place for a call of the mode's ``__torch_dispatch__``, and
afterwards puts it back in a destructor, which ends the process if the place is taken. A handler
enters its mode again, for example while it decomposes an operator. If an interrupt cuts off the
mode's ``__exit__`` there, the place stays taken. The handlers of the three classes are therefore
replaced, once a process, by functions that empty the place at their end.

NOTE [metadata without interrupts]
A fake tensor keeps its device in Python, and C++ calls a handler for it. Autograd, for example,
calls the handler for each result that it records, in ``Node::add_input_metadata``, which is
declared to raise nothing: an exception of the handler ends the process. A handler can't hold an
interrupt back, because it may be raised before the handler's first step. While torch traces or a
backend compiles, signal handlers in Python are therefore replaced by functions that look at the
stack. If C++ reads metadata, the signal is sent once more a millisecond later; otherwise the
replaced handler runs. Interrupts do not wait for the end of a backend's compilation, as Inductor
may take minutes.

``FunctionalTensor.metadata_fns`` has the operators for metadata, but two; C++ calls
``find_torch_dispatch_rule`` before a handler.
"""

from __future__ import annotations

import _thread
import functools
import inspect
import signal
import threading
import time

# The public functions are Python, and may be interrupted themselves.
from _signal import getsignal as _handler_of  # type: ignore[import-not-found]
from _signal import signal as _set_handler
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey, _unset_dispatch_mode
from torch._library.simple_registry import find_torch_dispatch_rule
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from tsfunc.bridge.tracers.dynamo import outside_dynamo

MODES: Final[tuple[tuple[type[Any], _TorchDispatchModeKey], ...]] = (
    (FakeTensorMode, _TorchDispatchModeKey.FAKE),
    (FunctionalTensorMode, _TorchDispatchModeKey.FUNCTIONAL),
    (ProxyTorchDispatchMode, _TorchDispatchModeKey.PROXY),
)


_METADATA: Final = FunctionalTensor.metadata_fns | {
    torch.ops.aten.sym_is_contiguous.default,
    torch.ops.prim.layout.default,
}
_AGAIN_AFTER = 0.001  # seconds


@functools.cache
def guard_handlers() -> None:
    """Replace the handlers: NOTE [modes that enter themselves], NOTE [metadata without interrupts].

    If an interrupt stops this, or two threads run it, a handler may be guarded twice, which has no
    other effect.
    """
    for cls, key in MODES:
        cls.__torch_dispatch__ = _guarded(cls.__torch_dispatch__, key)
    tensors: Any = FakeTensor
    tensors.__torch_dispatch__ = classmethod(_guarded(tensors.__torch_dispatch__.__func__, None))


def _guarded(handler: Callable[..., Any], key: _TorchDispatchModeKey | None) -> Callable[..., Any]:
    """Return a handler after which the place of the mode is empty if it was empty before."""

    @functools.wraps(handler)
    def guarded(*call: Any, **keywords: Any) -> Any:
        if key is None or _get_dispatch_mode(key) is not None:
            return handler(*call, **keywords)
        try:
            return handler(*call, **keywords)
        finally:
            _unset_dispatch_mode(key)

    return outside_dynamo(guarded)


_CALLED: Final[CodeType] = next(
    code for code in _guarded.__code__.co_consts if isinstance(code, CodeType)
)
_RULE: Final = find_torch_dispatch_rule.__code__

# --- signal handlers: NOTE [metadata without interrupts]


def _reads_metadata(frame: FrameType | None) -> bool:
    """True if C++ reads metadata below a frame, or below one of its callers."""
    while frame is not None:
        if frame.f_code is _CALLED and frame.f_locals["call"][1] in _METADATA:
            return True
        if frame.f_code is _RULE and frame.f_locals["op"] in _METADATA:
            return True
        frame = frame.f_back
    return False


def _handle(before: Callable[[int, FrameType | None], Any], number: int, frame: Any) -> None:
    """Run the handler ``before`` of a signal, now or later."""
    if _reads_metadata(inspect.currentframe()):
        _thread.start_new_thread(_send_again, (number,))
    else:
        before(number, frame)


def _send_again(number: int) -> None:
    """Send a signal to the main thread."""
    time.sleep(_AGAIN_AFTER)
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, number)


def replacements() -> dict[int, tuple[Any, Any]]:
    """Return each signal's handler in Python and its replacement; empty outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # Python runs handlers on the main thread
    return {
        number: (handler, functools.partial(_handle, handler))
        for number in range(1, signal.NSIG)
        if callable(handler := _handler_of(number))
    }


def replace(handlers: dict[int, tuple[Any, Any]]) -> None:
    for number, (_, replacement) in handlers.items():
        _set_handler(number, replacement)


def put_back(handlers: dict[int, tuple[Any, Any]]) -> None:
    """Put the handlers back, unless others have been set in the meantime."""
    for number, (handler, replacement) in handlers.items():
        if _handler_of(number) is replacement:
            _set_handler(number, handler)
