"""The weight lists that recurrent modules keep besides their parameters.

``functional_call`` gives a module other parameters for a call, and restores its own. A recurrent
module notices the first change in its forward pass, and rebuilds its lists. It does not notice the
second change, and would keep the weights of the call.

Private names used here (torch 2.13 and 2.14): in ``nn.RNNBase`` ``_flat_weights`` has the weights
in the order of its operators' arguments, and ``_flat_weight_refs`` has weak references to these,
by which the module notices a change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def preserve_flat_weights(module: nn.Module) -> Iterator[None]:
    """Restore the weight lists of the recurrent modules in a module after the block."""
    lists = [
        (each, name, vars(each)[name])
        for each in module.modules()
        if isinstance(each, nn.RNNBase)
        for name in ("_flat_weights", "_flat_weight_refs")
        if name in vars(each)
    ]
    elements = [list(weights) for *_, weights in lists]
    try:
        yield
    finally:
        for (owner, name, weights), before in zip(lists, elements, strict=True):
            weights[:] = before
            vars(owner)[name] = weights
