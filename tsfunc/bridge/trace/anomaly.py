"""torch's anomaly mode in traces: the checks for NaN become checks of the program.

In anomaly mode the autograd engine checks after each backward formula whether its results contain
NaN. A trace has no data for this check. A trace records an assertion instead, which raises torch's
error when the program runs, with the user's line of the forward call.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from tsfunc.bridge.trace.trace_level import TraceTracer, trace_kernel
from tsfunc.bridge.trace.trace_rules import read_number
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.dispatch import DispatchKey, register
from tsfunc.user_code import LIBRARIES


@register("aten::_local_scalar_dense", DispatchKey.Trace)
def _local_scalar_dense(value: TraceTracer) -> Any:
    """Return an element as a number; the engine's check for NaN becomes an assertion.

    C++ code that records derivatives calls this operator in place of ``aten::item``.
    """
    if not _is_engine_query(value):
        return read_number(torch.ops.aten._local_scalar_dense.default, value)
    message = _message(torch._C._current_autograd_node())
    sound = trace_kernel(operator_of(torch.ops.aten.logical_not.default), (value,), {})
    trace_kernel(operator_of(torch.ops.aten._assert_async.msg), (sound, message), {})
    # The message has the line of the forward call, which the engine's own error lacks.
    next(reversed(value.dispatch_level.graph.nodes)).meta["engine_check"] = True
    return False


def _is_engine_query(value: TraceTracer) -> bool:
    """True if the engine reads a number for its check for NaN."""
    if not torch.is_anomaly_check_nan_enabled() or not torch.is_anomaly_enabled():
        return False
    is_check = value.node.target is torch.ops.aten._is_any_true.default
    return is_check and torch._C._current_autograd_node() is not None


def _message(node: Any) -> str:
    """Return torch's message for NaN in the results of a formula, with the forward call's line."""
    stack = node.metadata.get("traceback_", ())
    lines = [line for line in map(_line_of, stack) if line is not None]
    at = f" (the forward call is at {lines[-1]})" if lines else ""
    return f"Function '{node.name()}' returned nan values in one of its outputs{at}."


def _line_of(entry: str) -> str | None:
    """Return the location of a line of a traceback; None if it is code of a library."""
    match = re.match(r'\s*File "(.*)", line (\d+), in (.*)', entry)
    if match is None or match[1].startswith(LIBRARIES):
        return None
    return f"{match[1]}:{match[2]}, in {match[3]}"
