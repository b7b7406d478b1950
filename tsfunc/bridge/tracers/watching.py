"""Data for ``explain`` besides the dispatcher's: lines of backward passes, and plain calls.

Private names used here (torch 2.11 to 2.13): ``_C._current_autograd_node`` is the node whose
backward formula runs on this thread, None outside of a backward pass; ``Node._sequence_nr`` is its
number, ``_C._autograd._get_sequence_nr`` is the number of this thread's next node.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from torch._C import _autograd, _current_autograd_node
from torch.overrides import TorchFunctionMode, resolve_name

from tsfunc.bridge.tracers.function_registry import METHODS
from tsfunc.bridge.tracers.tracer import innermost_level, metadata
from tsfunc.dispatch.places import Place, called_by_user, users_place
from tsfunc.dispatch.recorder import Recorder, Use
from tsfunc.dispatch.state import tls


class Lines:
    """Finds the user's line of a call; in a backward pass, the line of the forward call.

    Autograd numbers its nodes as it makes them, each just before its operator reaches a tracer.
    The node with number n therefore belongs to the first call that found the counter beyond n.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._places: list[Place] = []

    def here(self) -> tuple[Place, bool]:
        """Return the line, and whether the call belongs to its backward pass."""
        node = _current_autograd_node()
        place = self._of(node._sequence_nr()) if node is not None else None
        backward = place is not None
        place = place or users_place()
        number = _autograd._get_sequence_nr()
        # An autograd thread has a counter of its own.
        if not self._numbers or number >= self._numbers[-1]:
            self._numbers.append(number)
            self._places.append(place)
        return place, backward

    def _of(self, number: int) -> Place | None:
        i = bisect.bisect_right(self._numbers, number)
        return self._places[i] if i < len(self._places) else None


class PlainCalls(TorchFunctionMode):
    """Records the function's own torch calls that reach no level; these calls run unchanged."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if (
            METHODS.get(func) is metadata
            or getattr(func, "__name__", "") in _ATTRIBUTES
            or tls.state.running is not None
            or innermost_level((*args, *kwargs.values())) is not None
            or not called_by_user()
        ):
            return func(*args, **kwargs)
        place, backward = self.recorder.place()
        name = resolve_name(func) or getattr(func, "__name__", repr(func))
        use = Use(name, place, backward, "", "", 0, "torch")
        return self.recorder.run(use, lambda: func(*args, **kwargs), alone=True)


_ATTRIBUTES = frozenset({"__get__", "__set__", "__repr__", "__hash__"})
