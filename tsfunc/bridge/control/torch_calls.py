"""torch's own control flow, such as ``torch.cond``, called inside of tsfunc's transforms.

torch compiles such a call with Dynamo, which does not support the tracers. On plain tensors torch's
operators drop tangents and second derivatives without an error. While a level is active or a
derivative is recorded, the call is therefore made without Dynamo, and its operator, such as
``torch.ops.higher_order.cond``, is replaced by the equivalent function of this library
(``transforms/control/torch_forms``).

torch's functions compile and call an operator by ``_higher_order_ops.utils._hop_compile_and_call``.
Without this name the functions go to Dynamo inside of the transforms too, and only the operators
are replaced. ``generic_associative_scan`` is not an operator but a Python function: it halves the
elements until one is left, and therefore reads their number.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch._higher_order_ops.utils
from torch._C import _functorch
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

from tsfunc.bridge.grad.autograd import differentiates_here
from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage, registry
from tsfunc.bridge.tracers.registrations import replace_in_transforms
from tsfunc.dispatch.state import tls

REPLACEMENTS: Final[dict[HigherOrderOperator, Callable[..., Any]]] = {}


def replace_operator(operator: HigherOrderOperator, func: Callable[..., Any]) -> None:
    """Register the replacement of a torch operator inside of transforms, with equal arguments."""

    def called(_: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return func(*args, **kwargs)

    REPLACEMENTS[operator] = func
    rules = FunctionRules()
    rules.add(Stage.METHOD, called, operator)
    registry.load([rules])
    replace_in_transforms(operator, func)


class _Given(TorchFunctionMode):
    """Replaces torch's operators, even in calls without a tracer among the operands."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))


def _in_transform() -> bool:
    """True while a level is active, or a derivative of plain tensors is, outside of torch.func."""
    if tls.state.levels:
        return True
    return differentiates_here() and _functorch.maybe_current_level() is None


def _redirect_to_own(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Any = None) -> Any:
        if not _in_transform():
            return compiled(fn, args, kwargs)
        with _Given():
            return fn(*args, **(kwargs or {}))

    return call


def replace_halving(func: Callable[..., Any]) -> None:
    """Register the replacement of ``generic_associative_scan`` inside of transforms."""
    home: Any = importlib.import_module("torch._higher_order_ops.associative_scan")
    halving = home.generic_associative_scan

    def call(*args: Any, **kwargs: Any) -> Any:
        return (func if _in_transform() else halving)(*args, **kwargs)

    home.generic_associative_scan = call


def patch_compiled_calls() -> None:
    """Patch torch so that its functions don't compile inside of a transform."""
    utils: Any = torch._higher_order_ops.utils
    compiled = getattr(utils, "_hop_compile_and_call", None)
    if compiled is not None:
        utils._hop_compile_and_call = _redirect_to_own(compiled)


patch_compiled_calls()
