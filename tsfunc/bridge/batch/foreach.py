"""torch's operators on lists of tensors (``_foreach_*``), run position by position.

On the CPU torch does the same. Broadcasting, type promotion and writes are left to the rules of
the single operators.

NOTE [added numbers]
If ``_foreach_add`` adds a tensor without dims that does not require a gradient, torch's parser
reads the tensor as a number and loses its tangent. The parser does not read tracers. A batched call
must give the result of the loop over examples, so the tangent of such a tracer is dropped here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.autograd import forward_ad

from tsfunc.bridge.tracers.decompositions import DECOMPOSITIONS
from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.tracer import Method, Tracer

Single = Callable[..., Any]

_UNARY = """
    abs acos asin atan ceil clone cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2
    neg reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc
""".split()


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _per_tensor(single: Single, inplace: bool) -> Single:
    """Return a function that calls ``single`` on each position of its list arguments."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        count = next(len(arg) for arg in args if _is_list(arg))
        out = [
            single(*[arg[k] if _is_list(arg) else arg for arg in args], **kwargs)
            for k in range(count)
        ]
        return None if inplace else out

    return apply


def _addcmul_of_each(name: str) -> Single:
    """Return ``addcmul`` or ``addcdiv`` with the factor as a positional number or tensor."""

    def single(x: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Tensor:
        function = getattr(Tensor, name)
        if not isinstance(value, Tensor):
            return function(x, a, b, value=value)
        change = value * (a * b if "mul" in name else a / b)
        return x.add_(change) if name.endswith("_") else x.add(change)

    return single


def _elementwise_extreme(name: str) -> Single:
    """Return ``maximum`` or ``minimum`` by the clamp ``name``, which also takes numbers."""
    function = getattr(Tensor, name)
    return lambda x, other: function(x, other)


def _norm(x: Tensor, ord: float = 2, dtype: torch.dtype | None = None) -> Tensor:
    return torch.linalg.vector_norm(x, ord, dtype=dtype)


def _sum_of_powers(x: Tensor, ord: float = 2, dtype: torch.dtype | None = None) -> Tensor:
    return x.abs().pow(ord).sum(dtype=dtype)


def _singles() -> dict[str, Single]:
    """Return the function on single tensors of each operator, by name without overload."""
    singles: dict[str, Single] = {}
    for name in _UNARY:
        singles[name] = getattr(torch, name)
        if name != "clone":
            singles[f"{name}_"] = getattr(Tensor, f"{name}_")
    for name in ("add", "sub", "mul", "div", "pow", "lerp", "clamp_min", "clamp_max"):
        singles[name], singles[f"{name}_"] = getattr(torch, name), getattr(Tensor, f"{name}_")
    for name, clamp in (("maximum", "clamp_min"), ("minimum", "clamp_max")):
        singles[name], singles[f"{name}_"] = (
            _elementwise_extreme(clamp),
            _elementwise_extreme(f"{clamp}_"),
        )
    for name in ("addcmul", "addcdiv"):
        singles[name], singles[f"{name}_"] = _addcmul_of_each(name), _addcmul_of_each(f"{name}_")
    return singles | {
        "zero": torch.zeros_like,
        "zero_": Tensor.zero_,
        "copy": torch.ops.aten.copy,
        "copy_": Tensor.copy_,
        "max": torch.max,
        "mm": torch.mm,
        "norm": _norm,
        "powsum": _sum_of_powers,
    }


def _declare() -> None:
    """Register each operator as a part, which C++ calls, and as a method for Python calls.

    The Python calls need their own method: torch's parser takes a list of tracers for a list of
    numbers.
    """
    for name, single in _singles().items():
        inplace = name.endswith("_")
        apply = _per_tensor(single, inplace)
        if name.startswith("addc"):
            apply = _with_tensor_of_factors(apply)
        DECOMPOSITIONS[f"aten::_foreach_{name}"] = apply
        function = getattr(torch, f"_foreach_{name}", None)
        if function is not None:
            method = _method(apply, inplace)
            adds = name in ("add", "add_")
            rule = _dropping_tangent_of_number(method) if adds else method
            function_rules.add(Stage.METHOD, rule, function)


def _with_tensor_of_factors(single: Single) -> Single:
    """Return ``addcmul`` or ``addcdiv`` that also takes all factors in one tensor."""

    def call(x: Any, a: Any, b: Any, value: Any = 1, *, scalars: Any = None) -> Any:
        value = value if scalars is None else scalars
        return single(x, a, b, value.unbind() if isinstance(value, Tensor) else value)

    return call


def _dropping_tangent_of_number(method: Method) -> Method:
    """Drop the tangent of an added tensor without dims: NOTE [added numbers]."""

    def call(func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if len(args) == 2 and not kwargs and isinstance(args[1], Tracer) and not args[1].dim():
            with DisableTorchFunctionSubclass():
                number = args[1]
                if not number.requires_grad and number.dispatch_level.forward:
                    number = forward_ad.unpack_dual(number).primal
            args = args[0], number
        return method(func, types, args, kwargs)

    return call


def _method(single: Single, inplace: bool) -> Method:
    def method(func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        out = single(*args, **kwargs)
        return args[0] if inplace else tuple(out)

    return method


function_rules: Final = FunctionRules()
_declare()
