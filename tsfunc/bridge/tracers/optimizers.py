"""The state of torch's optimizers before their first step.

Private names used here (torch 2.13 and 2.14): ``_init_group`` of each class in ``torch.optim``
makes the missing state of a group's parameters, and puts parameters, gradients and state into the
lists that it is given.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of all parameters of an optimizer that its first step would make.

    State that depends on the first gradient, like the momentum of SGD, is left out, and so is the
    state of an optimizer that has no function for it. The parameters must have a ``.grad``.
    """
    init: Any = getattr(optimizer, "_init_group", None)
    if init is None:
        return
    names = list(inspect.signature(init).parameters)[1:]
    for group in optimizer.param_groups:
        lists: list[list[Any]] = [[] for _ in names]
        init(group, *lists)
