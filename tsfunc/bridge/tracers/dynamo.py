"""Side by side with torch.compile: Dynamo breaks its graph at a transform, and stays outside.

What runs inside of a transform are tracers, which Dynamo knows nothing of. So the functions that
enter one are marked: not to be traced, and neither what they call. It costs a call nothing.

NOTE [inside of torch.compile]
A call of a specialized function is traced by Dynamo as a call of the function itself: Dynamo makes
a graph and guards of its own, so nothing is gained by a program in between, and the graph need not
break. Where the function calls a transform it does break, before the call, and the program runs.

NOTE [control flow in torch's graphs]
While torch records a graph (torch.compile, torch.export, make_fx) our control flow is torch's own,
so that it is an operator of that graph; ``transforms/control/in_torch`` has which. Where a
transform of ours is active what is recorded are its operators on batches and cotangents.

Private names used here (torch 2.11 to 2.13): ``_C._dynamo.eval_frame.set_code_exec_strategy``
says what Dynamo does with frames of a code object, and with frames below them;
``_torchdynamo_disable`` on a function keeps it from tracing calls of it, and
``_torchdynamo_disable_msg`` is the reason that it gives; one that is its
``_torchdynamo_inline`` is traced in its place. ``_C._get_dispatch_mode`` and, for what records
before autograd, ``_ops._get_dispatch_mode_pre_dispatch`` give the mode of a kind that is active.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._C._dynamo import eval_frame
from torch._ops import _get_dispatch_mode_pre_dispatch

from tsfunc.dispatch.state import tls

F = TypeVar("F", bound=Callable[..., Any])

_REASON = (
    "inside of tsfunc's transforms are tensors that torch.compile does not know, so its graph "
    "breaks there. Leave fullgraph=True out, compile the function that is transformed, or compile "
    "the operators that the transforms leave: f = tsfunc.specialize(f), and then f.graph_module, "
    "or tsfunc.specialize(f, backend='inductor')"
)
_skip: Any = eval_frame._FrameAction.SKIP
_SKIP_ALL = eval_frame._FrameExecStrategy(_skip, _skip)
# The code that it has been told of, by identity: its hash is that of all that it contains.
_outside: dict[int, Any] = {}


def outside_dynamo(func: F) -> F:
    """Marks a function that Dynamo does not trace, neither itself nor what it calls."""
    code: Any = getattr(func, "__code__")  # noqa: B009 - no attribute of every Callable
    if id(code) not in _outside:  # which all functions that a transform makes have in common
        eval_frame.set_code_exec_strategy(code, _SKIP_ALL)
        _outside[id(code)] = code
    func._torchdynamo_disable = True  # type: ignore[attr-defined]
    func._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return func


def instead_in_dynamo(other: Callable[..., Any]) -> Callable[[F], F]:
    """Marks a function in the place of which Dynamo traces another one."""

    def mark(func: F) -> F:
        func._torchdynamo_inline = other  # type: ignore[attr-defined]
        return func

    return mark


_PROXY: Any = _TorchDispatchModeKey.PROXY


def torch_records() -> bool:
    """Whether torch records what is called: NOTE [control flow in torch's graphs]."""
    if torch.compiler.is_dynamo_compiling():
        return True
    recording = _get_dispatch_mode(_PROXY) or _get_dispatch_mode_pre_dispatch(_PROXY)
    return recording is not None and not tls.state.levels
