"""torch's own control flow, called inside of our transforms: ``torch.cond`` and its like.

Outside of its compiler torch has Dynamo compile such a call, which knows nothing of tracers. So
while a level is active the call is made as it is, and its operator, such as
``torch.ops.higher_order.cond``, given to ours of the same meaning: which one that is,
``transforms/control/torch_forms`` says.

Private names used here (torch 2.13): ``torch._higher_order_ops.utils._hop_compile_and_call`` is
what torch's functions compile and call an operator by. Without it (it was seen in 2.13 alone) they
go to Dynamo inside of our transforms too, and only the operators themselves are ours. Of torch 2.11
to 2.13 is ``generic_associative_scan`` in ``torch._higher_order_ops.associative_scan``, which is no
operator, but Python that halves the elements until one is left, and so asks how many there are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch._higher_order_ops.utils
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

from tsfunc.bridge.tracers.tracer import METHODS
from tsfunc.dispatch.state import tls

OURS: Final[dict[HigherOrderOperator, Callable[..., Any]]] = {}


def stands_for(operator: HigherOrderOperator, func: Callable[..., Any]) -> None:
    """Registers what an operator of torch's is inside of transforms; it takes its arguments."""

    def called(_: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return func(*args, **kwargs)

    OURS[operator] = func
    METHODS[operator] = called


class _Given(TorchFunctionMode):
    """Gives calls of torch's operators to ours, also those without a tracer among the operands."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return OURS.get(func, func)(*args, **(kwargs or {}))


def _given_to_ours(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Any = None) -> Any:
        if not tls.state.levels:
            return compiled(fn, args, kwargs)
        with _Given():
            return fn(*args, **(kwargs or {}))

    return call


def stands_for_halving(func: Callable[..., Any]) -> None:
    """Registers what ``generic_associative_scan`` is inside of transforms."""
    home: Any = importlib.import_module("torch._higher_order_ops.associative_scan")
    halving = home.generic_associative_scan

    def call(*args: Any, **kwargs: Any) -> Any:
        return (func if tls.state.levels else halving)(*args, **kwargs)

    home.generic_associative_scan = call


def take_over() -> None:
    """Has torch's functions ask whether a level is active, before they compile anything."""
    utils: Any = torch._higher_order_ops.utils
    compiled = getattr(utils, "_hop_compile_and_call", None)
    if compiled is not None:
        utils._hop_compile_and_call = _given_to_ours(compiled)


take_over()
