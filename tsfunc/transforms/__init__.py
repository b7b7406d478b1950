"""The public transforms: a file for each transform or for a few of a kind.

A transform is imported on first access (``tsfunc._lazy``). The bridge needs two parts of control
flow before that: the replacements of torch's own operators inside of transforms, and the function
that records a call of an ``autograd.Function`` in a trace.

The package is private: ``tsfunc`` has its public names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from tsfunc import hooks
from tsfunc.bridge.control import effect_operator as effect_operator  # debug.print and check
from tsfunc.bridge.control import nans as nans
from tsfunc.bridge.control import torch_calls
from tsfunc.bridge.mesh import in_place as in_place  # in-place collectives


def _in_control(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports ``name`` from ``transforms/control`` at its first call."""

    def called(*args: Any, **kwargs: Any) -> Any:
        home = importlib.import_module(f"tsfunc.transforms.control.{module}")
        return getattr(home, name)(*args, **kwargs)

    return called


for _name in ("cond", "while_loop", "scan", "map_impl", "associative_scan"):
    torch_calls.replace_operator(
        getattr(torch.ops.higher_order, _name), _in_control("torch_forms", _name)
    )
torch_calls.replace_halving(_in_control("torch_forms", "generic_associative_scan"))
hooks.record_function.add(_in_control("autograd_functions", "record_function"))
