"""A level on which a pullback is a linear function of its cotangents.

NOTE [linear pullbacks]
Autograd records a pass over the graph of a function in that same graph: the results depend on the
cotangents, and through the saved values on the inputs of the function. After the function has run,
only the cotangents are differentiated by. The results must not depend on the inputs then, which
outlive the transform: the user would get results that require grad, and ``backward()`` of them
would free the graph that the pullback needs again.

The cotangents of such a pass are therefore tracers of a level of its own, that of a batch whose
tensors are the same for all examples. All other tensors that the pass meets are saved values, and
constants of the level. Derivatives by the cotangents are recorded on the values inside the tracers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C import DisableTorchFunction

from tsfunc.bridge.grad import autograd
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, unwrap
from tsfunc.bridge.tracers.tracer import Tracer


class _LinearLevel(BatchLevel):
    """The level of a pass: the values that the recorded function has saved are constants."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(1, "same", "a pullback")
        self.detaches_operands = True

    def lift(self, value: torch.Tensor) -> torch.Tensor:
        # Rules of the user may also use tensors that the recorded function does not depend on.
        saved = not isinstance(value, Tracer) and not autograd.reaches_active_leaves(value)
        if saved:
            with DisableTorchFunction():  # a trace around the level would read its graph
                value = autograd.detach_at_level(value)
        return super().lift(value)

    def handles_factory(self, name: str, random: bool) -> bool:
        return False


def pullback_linearly(
    outputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    retain_graph: bool,
) -> list[torch.Tensor | None]:
    """Run a backward pass whose results can be differentiated by the cotangents, and by no input.

    Args:
        outputs: plain tensors, which depend on the inputs alone.
        inputs: leaves that have ended (``end_leaf``).
    """
    with _LinearLevel() as level, autograd.recording_at(level):
        lifted = [level.lift(ct) for ct in cotangents]
        cts_in = autograd.backward(
            outputs, lifted, inputs, create_graph=True, retain_graph=retain_graph
        )
    return [None if x is None else unwrap(x, level)[0] for x in cts_in]
