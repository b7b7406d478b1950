"""Keeps the user's dispatch modes below all levels: they see the operators that reach kernels.

NOTE [modes below levels]
C++ calls the dispatch modes of a thread (``TorchDispatchMode``) before the handler of a tensor
class. A mode around a transform would get tracers, and the operators that their rules call would
not pass it a second time: FlopCounterMode would count one example of a batch. A level that is
entered under a user's mode therefore pushes a mode of its own, which is innermost and is called
first. The innermost mode brings a call on tracers to their handler while the user's modes are still
active, and these get the operators of the rules. A mode that the function itself enters gets
tracers.

Modes of torch's own tools (fake, functional and proxy modes) are not modes of the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._C import _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


class _TracersFirst(TorchDispatchMode):
    """Calls the handler of tracers; other calls go on to the modes outside."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports Dynamo

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        for cls in types:
            if hasattr(cls, "dispatch_level"):  # a class of tracers
                _push_on_torch_dispatch_stack(self)
                try:
                    return cls.__torch_dispatch__(func, types, args, kwargs or {})
                finally:
                    _pop_torch_dispatch_stack(None)
        return func(*args, **(kwargs or {}))


def push_below_modes() -> bool:
    """Put the modes of the user below the levels; return False if no mode of the user is active."""
    innermost: Any = _get_current_dispatch_mode_stack()[-1]
    if getattr(innermost, "_mode_key", None) is not None or type(innermost) is _TracersFirst:
        return False
    _push_on_torch_dispatch_stack(_TracersFirst())  # type: ignore[no-untyped-call]
    return True


def pop_modes() -> None:
    """Undo :func:`push_below_modes`."""
    _pop_torch_dispatch_stack(None)
