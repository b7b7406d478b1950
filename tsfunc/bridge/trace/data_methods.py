"""Traced functions whose C++ code would read a number from data at once.

C++ makes a Python bool of the results of ``equal`` and ``allclose``. A trace calls the operators
themselves instead. The answer is a symbolic number without a hint, like that of ``item()`` (NOTE
[sizes of data] in ``symbols``). The same holds for the number of classes that ``one_hot`` infers.

Private names used here (torch 2.11 to 2.13): ``torch._ops.OpOverload`` is the class of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch._ops import OpOverload

from tsfunc.bridge.trace.tracing import TraceLevel
from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.bridge.tracers.tracer import innermost_level


def _is_traced(*values: Any) -> bool:
    level = innermost_level(values)
    return isinstance(level, TraceLevel) and not level.autograd


def _answered(overload: OpOverload) -> Callable[..., Any]:
    def method(
        func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if not _is_traced(*args, *kwargs.values()) or "input" in kwargs:
            return NotImplemented
        return operator_of(overload).call(tuple(args), kwargs, True)

    return method


def _one_hot(
    func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Infer the number of classes from the largest class, if none is given."""

    def called(x: Any, num_classes: Any = -1) -> Any:
        if type(num_classes) is not int or num_classes != -1 or not _is_traced(x):
            return NotImplemented
        return func(x, x.max().item() + 1)

    return called(*args, **{{"input": "x", "tensor": "x"}.get(k, k): v for k, v in kwargs.items()})


function_rules: Final = FunctionRules()
function_rules.add(
    Stage.METHOD, _answered(torch.ops.aten.equal.default), torch.equal, torch.Tensor.equal
)
function_rules.add(
    Stage.METHOD, _answered(torch.ops.aten.allclose.default), torch.allclose, torch.Tensor.allclose
)
function_rules.add(Stage.METHOD, _one_hot, torch.nn.functional.one_hot)
