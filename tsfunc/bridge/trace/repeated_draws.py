"""Random numbers of a checkpoint's function in a trace: a rerun has those of the first run.

``torch.utils.checkpoint`` sets the states of generators before the backward pass runs a function
again. A program draws at every call, and has no operator that sets a state. A trace therefore keeps
the numbers: a rerun gets copies of them, and draws nothing (NOTE [replayed subsets] in ``replay``).
Control flow that draws gets the states that its first call had, as its derivatives do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.tracers.operators import TorchOperator, operator_of
from tsfunc.bridge.tracers.replay import keeps_draws, replay_object
from tsfunc.bridge.tracers.torch_settings import note_draw
from tsfunc.ops.registry import Args, Kwargs

_CLONE = operator_of(torch.ops.aten.clone.default)
_COPY = operator_of(torch.ops.aten.copy_.default)


def draw_once(
    op: TorchOperator, args: Args, kwargs: Kwargs, trace: Any, record: Callable[..., Any]
) -> Any:
    """Return the results of a random operator in a trace; those of the first run in a rerun.

    A checkpoint sets the states of torch's own generators only.

    Args:
        record: records a call of an operator in the trace.
    """
    generator = kwargs.get("generator")
    if generator is not None:
        note_draw(generator)
    if not keeps_draws(trace) or generator is not None:
        return record(op, args, kwargs, trace)
    drawn: list[Any] = []

    def copied(value: Any) -> Any:
        return record(_CLONE, (value,), {}, trace) if isinstance(value, torch.Tensor) else value

    def first() -> Any:
        # The function may write into the results.
        drawn.append(record(op, args, kwargs, trace))
        return pytrees.tree_map(copied, drawn[0])

    copies = replay_object(first, lambda copies: True, trace)
    if drawn:
        return drawn[0]
    if op.writes:
        return record(_COPY, (args[0], copies), {}, trace)
    return pytrees.tree_map(copied, copies)
