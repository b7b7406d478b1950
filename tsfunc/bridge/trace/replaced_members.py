"""Members of torch's classes that a trace replaces, because a program can't repeat what they do.

NOTE [weights of recurrent modules]
A recurrent module also keeps its parameters in a list. If ``functional_call`` has replaced
parameters, the next forward pass makes a new list of the replacements, and the module keeps this
list after the call. In a trace, the module's code therefore gets a list of the parameters that the
module has at that moment, and the module's own list stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch.amp.grad_scaler import GradScaler
from torch.nn import RNNBase

from tsfunc.bridge.trace.scaling import step_or_skip


def _keep_weights(self: Any) -> None:
    """Implement ``RNNBase._update_flat_weights``: NOTE [weights of recurrent modules]."""


def _flat_weights(self: Any) -> list[Any]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


REPLACED_METHODS: Final[Mapping[Any, Callable[..., Any]]] = {
    GradScaler._maybe_opt_step: step_or_skip,
    RNNBase._update_flat_weights: _keep_weights,
}
"""The functions that a trace calls, by torch's methods."""

REPLACED_ATTRIBUTES: Final[Mapping[str, tuple[type, Callable[[Any], Any]]]] = {
    "_flat_weights": (RNNBase, _flat_weights),
}
"""For attributes of objects of a class: the class, and the function that computes the value."""
