"""Traced functions whose C++ code would read a number from data at once.

C++ makes a Python bool of the results of ``equal`` and ``allclose``. A trace calls the operators
themselves instead. The answer is a symbolic number without a hint, like that of ``item()`` (NOTE
[sizes of data] in ``symbols``). The same holds for the number of classes that ``one_hot`` infers,
for the count of batches from which ``BatchNorm(momentum=None)`` computes its momentum, and for the
norms from which ``Adafactor`` computes its step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch._ops import OpOverload

from tsfunc.bridge.trace.trace_level import TraceLevel, current_trace
from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.bridge.tracers.tracer import innermost_level
from tsfunc.ops.registry import Args, Kwargs


def _is_traced(*values: Any) -> bool:
    level = innermost_level(values)
    return isinstance(level, TraceLevel) and not level.autograd


def _as_symbolic_bool(overload: OpOverload) -> Callable[..., Any]:
    def method(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
        if not _is_traced(*args, *kwargs.values()) or "input" in kwargs:
            return NotImplemented
        return operator_of(overload).call(tuple(args), kwargs, True)

    return method


def _one_hot(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Infer the number of classes from the largest class, if none is given."""

    def called(x: Any, num_classes: Any = -1) -> Any:
        if type(num_classes) is not int or num_classes != -1 or not _is_traced(x):
            return NotImplemented
        return func(x, x.max().item() + 1)

    return called(*args, **{{"input": "x", "tensor": "x"}.get(k, k): v for k, v in kwargs.items()})


def _batch_norm(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Update the running statistics by a momentum from data, as ``momentum=None`` does.

    The kernel takes the momentum as a number. With 1 it writes the statistics of the batch.
    """
    args = operator_of(torch.ops.aten.batch_norm.default).signature.in_order(args, kwargs)
    if len(args) < 7 or not isinstance(args[6], torch.SymFloat):
        return NotImplemented
    x, weight, bias, mean, variance, training, momentum, *rest = args
    if not training or mean is None:
        return NotImplemented
    statistics = mean.clone(), variance.clone()
    out = func(x, weight, bias, *statistics, True, 1.0, *rest)
    decay: Any = 1.0 - momentum
    with torch.no_grad():
        for running, of_batch in zip((mean, variance), statistics, strict=True):
            running.mul_(decay).add_(of_batch * momentum)
    return out


def _float(value: Any) -> Any:
    """Return ``float(value)``; for a traced count of batches, the number of the program."""
    if isinstance(value, torch.Tensor) and current_trace() is not None:
        return value.item()
    return float(value)


# BatchNorm calls float() on its count of batches, and Python requires a float of ``__float__``.
vars(torch.nn.modules.batchnorm)["float"] = _float


def _extreme(choose: Callable[..., Any], of_symbols: Callable[[Any, Any], Any]) -> Any:
    """Return ``max`` or ``min`` of two values: a symbolic number if one of them is symbolic."""

    def chosen(*values: Any) -> Any:
        symbolic = len(values) == 2 and any(isinstance(v, torch.SymFloat) for v in values)
        return of_symbols(*values) if symbolic else choose(*values)

    return chosen


# Adafactor bounds its step by norms of parameters and updates. Python's functions compare them.
torch.optim.Adafactor.__init__.__globals__.update(
    max=_extreme(max, torch.sym_max), min=_extreme(min, torch.sym_min)
)

function_rules: Final = FunctionRules()
function_rules.add(
    Stage.METHOD, _batch_norm, torch.batch_norm,
    left_to_torch=lambda kinds: len(kinds) > 6 and kinds[6] is float,
)  # fmt: skip
function_rules.add(
    Stage.METHOD, _as_symbolic_bool(torch.ops.aten.equal.default), torch.equal, torch.Tensor.equal
)
function_rules.add(
    Stage.METHOD,
    _as_symbolic_bool(torch.ops.aten.allclose.default),
    torch.allclose,
    torch.Tensor.allclose,
)
function_rules.add(
    Stage.METHOD,
    _one_hot,
    torch.nn.functional.one_hot,
    left_to_torch=lambda kinds: True,  # a call with a plan is not one of a trace
)
