"""The lists of weights that recurrent modules keep beside their parameters.

``functional_call`` gives a module other parameters for a call, and its own back. A recurrent
module notices the first in its forward pass, and makes its lists anew; nothing has it notice the
second, so that it would go on with the weights of the call.

Private names used here (torch 2.11 to 2.13): of ``nn.RNNBase`` ``_flat_weights``, the weights in
the order that its operators take them in, and ``_flat_weight_refs``, weak references to these, by
which it notices that they are others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def flat_weights_kept(module: nn.Module) -> Iterator[None]:
    """A block after which the recurrent modules in a module have the lists that they had."""
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
