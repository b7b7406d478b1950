"""The calls of torch that ``explain`` reports although they reach no level."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode, resolve_name

from tsfunc.bridge.tracers.function_registry import METHODS
from tsfunc.bridge.tracers.tracer import innermost_level, metadata
from tsfunc.dispatch.recorder import KernelUse, Recorder
from tsfunc.dispatch.state import tls
from tsfunc.user_code import called_by_user


class PlainCalls(TorchFunctionMode):
    """Records the function's own torch calls that reach no level; these calls run unchanged."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            METHODS.get(func) is metadata
            or getattr(func, "__name__", "") in _ATTRIBUTES
            or tls.state.running is not None
            or innermost_level((*args, *kwargs.values())) is not None
            or not called_by_user()
        ):
            return func(*args, **kwargs)
        location, backward = self.recorder.location()
        name = resolve_name(func) or getattr(func, "__name__", repr(func))
        use = KernelUse(name, location, backward, "", "", 0, "torch")
        return self.recorder.run(use, lambda: func(*args, **kwargs), alone=True)


_ATTRIBUTES = frozenset({"__get__", "__set__", "__repr__", "__hash__"})
