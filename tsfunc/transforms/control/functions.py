"""``torch.autograd.Function`` in programs: one node, so that a program keeps its derivative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.bodies import Wrapping
from tsfunc.bridge.control_flow import TracedBody, call
from tsfunc.bridge.custom_function import on_trace, torch_apply
from tsfunc.bridge.tracing import TraceLevel
from tsfunc.transforms.control.programs import Operator, as_traced, filled


class FunctionCall(Operator):
    """A call of an ``autograd.Function``: its tensors; what else it takes is fixed.

    Nothing is known of what its methods do, so calls are neither merged nor removed.
    """

    opaque = True

    def __init__(self, function: Any, args: Sequence[Any]) -> None:
        super().__init__(function.__name__, ())
        self.function = function
        self.places = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        self.args = [None if isinstance(arg, torch.Tensor) else arg for arg in args]

    def filled(self, tensors: Sequence[Any]) -> list[Any]:
        args = list(self.args)
        for place, tensor in zip(self.places, tensors, strict=True):
            args[place] = tensor
        return args

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        leaves = pytrees.leaves_of(self.function.apply(*self.filled(operands)))
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def record_function(function: Any, trace: TraceLevel, args: Sequence[Any]) -> Any:
    """Records a call of an ``autograd.Function``; its results."""
    op = FunctionCall(function, args)
    tensors = [as_traced(args[place], trace) for place in op.places]
    body = TracedBody(trace, lambda *xs: torch_apply(function, *op.filled(xs)), tensors)
    wanted = [Wrapping() if isinstance(leaf, torch.Tensor) else None for leaf in body.leaves]
    results = [result for result in body.end(wanted) if result is not None]
    return filled(body, call(op, trace, tensors, (), results))


on_trace(record_function)
