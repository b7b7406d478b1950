"""What users call: a transform a file, or a few of a kind.

A transform is loaded when it is asked for (``tsfunc.late``). Two things of control flow the bridge
needs before that may have happened: what torch's own operators are inside of transforms, and how a
call of an ``autograd.Function`` is recorded in a trace.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from tsfunc.bridge.control import torch_loops
from tsfunc.bridge.grad import custom_function
from tsfunc.bridge.mesh import in_place as in_place  # collectives that write


def _in_control(module: str, name: str) -> Callable[..., Any]:
    """A function of ``transforms/control``, which is loaded at its first call."""

    def called(*args: Any, **kwargs: Any) -> Any:
        home = importlib.import_module(f"tsfunc.transforms.control.{module}")
        return getattr(home, name)(*args, **kwargs)

    return called


for _name in ("cond", "while_loop", "scan", "map_impl", "associative_scan"):
    torch_loops.stands_for(
        getattr(torch.ops.higher_order, _name), _in_control("torch_forms", _name)
    )
torch_loops.stands_for_halving(_in_control("torch_forms", "generic_associative_scan"))
custom_function.on_trace(_in_control("functions", "record_function"))
