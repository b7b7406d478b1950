"""The states of torch's generators, and runs that repeat the draws of an earlier run."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from tsfunc.bridge.tracers.interrupts import undoing

_WITHOUT = ("cpu", "meta")  # without a generator for each device


def devices_of(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    """Return the devices other than the CPU whose generators a function of tensors may use."""
    devices = {tensor.device for tensor in tensors}
    return sorted((x for x in devices if x.type not in _WITHOUT), key=str)


def states_of(devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Return the states of the CPU's generator and of the devices' generators."""
    device_states = [torch.get_device_module(device).get_rng_state(device) for device in devices]
    return [torch.get_rng_state(), *device_states]


@contextmanager
def drawing_from(states: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> Iterator[None]:
    """Set the generators to these states within the block, and restore them after it."""
    with undoing(functools.partial(set_states, states_of(devices), devices)):
        set_states(states, devices)
        yield


def set_states(states: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> None:
    """Set the states of the CPU's generator and of the devices' generators."""
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        torch.get_device_module(device).set_rng_state(state, device)
