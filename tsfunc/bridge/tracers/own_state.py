"""The state of a module that the parameters of another call replace for its time.

``functional_call`` gives a module other parameters for a call, and restores its own. A recurrent
module keeps lists of its weights besides: it notices the first change in its forward pass, and
rebuilds its lists. The module does not notice the second change, and would keep the weights of the
call.

In ``nn.RNNBase`` ``_flat_weights`` has the weights in the order of its operators' arguments, and
``_flat_weight_refs`` has weak references to these, by which the module notices a change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from tsfunc.bridge.tracers.interrupts import undoing


@contextmanager
def preserve_flat_weights(module: nn.Module) -> Iterator[None]:
    """Restore the weight lists of the recurrent modules in a module after the block."""
    lists = [
        (submodule, name, vars(submodule)[name])
        for submodule in module.modules()
        if isinstance(submodule, nn.RNNBase)
        for name in ("_flat_weights", "_flat_weight_refs")
        if name in vars(submodule)
    ]
    elements = [list(weights) for *_, weights in lists]

    def restore() -> None:
        for (owner, name, weights), before in zip(lists, elements, strict=True):
            weights[:] = before
            vars(owner)[name] = weights

    with undoing(restore):
        yield


def preserve_state(module: nn.Module, states: Any) -> undoing:
    """Context manager: restore the parameters and buffers of a call if an interrupt leaves them.

    Args:
        module: the module, which ``torch.func.functional_call`` gives the tensors.
        states: the tensors of the call by name, or several such dicts.
    """
    dicts = [states] if isinstance(states, Mapping) else list(states)
    names = {name for state in dicts for name in state}
    tensors = {id(value) for state in dicts for value in state.values()}
    own_names = [
        (entries, name, value, f"{prefix}.{name}" if prefix else name)
        for prefix, part in module.named_modules()
        for entries in (part._parameters, part._buffers)
        for name, value in entries.items()
    ]

    def restore() -> None:
        for entries, name, value, path in own_names:
            now = entries.get(name)
            # Tied parameters have several names, and the call one of them.
            if now is not value and (path in names or id(now) in tensors):
                entries[name] = value

    return undoing(restore)
