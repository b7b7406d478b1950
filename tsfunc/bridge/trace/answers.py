"""Functions that find a number in data which C++ asks for at once, in a trace.

It makes a Python bool of what ``equal`` and ``allclose`` return. In a trace the operators
themselves are called: the answer is a number that no trace knows, as that of ``item()`` is (NOTE
[sizes of data] in ``symbols``), and so is the number of classes that ``one_hot`` looks for.

Private names used here (torch 2.11 to 2.13): ``torch._ops.OpOverload`` is what an operator is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tsfunc.bridge.trace.tracing import TraceLevel
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.bridge.tracers.tracer import METHODS, innermost_level


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


for _overload, _functions in {
    torch.ops.aten.equal.default: (torch.equal, torch.Tensor.equal),
    torch.ops.aten.allclose.default: (torch.allclose, torch.Tensor.allclose),
}.items():
    for _function in _functions:
        METHODS[_function] = _answered(_overload)


def _one_hot(
    func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Without a number of classes there are as many as the largest of them asks for."""

    def called(x: Any, num_classes: Any = -1) -> Any:
        if type(num_classes) is not int or num_classes != -1 or not _is_traced(x):
            return NotImplemented
        return func(x, x.max().item() + 1)

    return called(*args, **{{"input": "x", "tensor": "x"}.get(k, k): v for k, v in kwargs.items()})


METHODS[torch.nn.functional.one_hot] = _one_hot
