"""The tensors that code reads, as operands: NOTE [hidden operands] in ``tracers/substitution``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tsfunc.bridge.grad.autograd import is_perturbed
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level
from tsfunc.bridge.tracers.reachable import Reachable
from tsfunc.bridge.tracers.tracer import Tracer


def consts_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tracers, and tensors with gradients or tangents, that code reads of objects.

    Each tensor is returned once. See NOTE [reachable tensors] in ``bridge/tracers/reachable``.
    """
    reachable = Reachable(values, only_named=True)
    tensors = [*reachable.tensors, *(entry.tensor for entry in reachable.entries)]
    return [
        tensor
        for tensor in {id(tensor): tensor for tensor in tensors}.values()
        if isinstance(tensor, Tracer) or is_perturbed(as_seen_by_current_level(tensor))
    ]
