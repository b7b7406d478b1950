"""Operators without a forward formula for which torch raises no error.

If an operator has no forward formula, torch usually raises, and ``jvp`` computes the tangent by the
pullback. For some operators torch silently gives a wrong tangent, or none:

- An operator of ``torch.library`` or of a C++ extension has an autograd kernel written for reverse
  mode, or none. If no argument requires a gradient, the operator drops the tangents.
- ``scatter_reduce`` with ``prod`` drops the tangents. ``_foreach_maximum`` and similar operators
  with numbers give the number as the tangent where they give the number as the value. torch's own
  tests list these operators as operators without forward mode.

Calls of these operators with tangents are therefore intercepted before autograd (NOTE [the factory
keys]). torch's own operators are refused. Other operators run, and are refused if none of their
results has a tangent. The functional collectives of torch.distributed are linear and have no
forward formula: they are applied to the tangents here.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import (
    DisableTorchFunctionSubclass,
    _dispatch_get_all_op_names,
    _dispatch_has_kernel_for_dispatch_key,
)
from torch._library.custom_ops import OPDEFS
from torch.autograd import forward_ad
from torch.library import _defs

from tsfunc import pytrees
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.bridge.tracers.schemas import overload_of
from tsfunc.bridge.tracers.torch_state import RANDOM_KEY_NAME, after, below_autograd
from tsfunc.errors import MissingRuleError
from tsfunc.ops.collectives import LINEAR

_LISTS = [
    f"_foreach_{name}{end}.{kind}"
    for name in ("maximum", "minimum", "clamp_min", "clamp_max")
    for end in ("", "_")
    for kind in ("Scalar", "ScalarList")
]
_SCATTERED = ["scatter_reduce.two", "scatter_reduce_.two"]

# torch's own namespaces, whose operators have forward formulas or have no derivatives.
_OF_TORCH = frozenset(
    "aten prims debugprims rngprims quantized _quantized quantization static_runtime onednn"
    " mkldnn mkldnn_prepacked mkl symm_mem profiler inductor inductor_prims sparse _test _native"
    " debug_mode_ops export tsfunc_mesh".split()
)

# An interceptor takes the operator's name, a function that continues the call, and the arguments;
# it returns the result of the call.
_Interceptor = Callable[[str, Callable[..., Any], Sequence[Any], Any], Any]

_libraries: dict[str, torch.library.Library] = {}
_custom: weakref.WeakSet[Any] = weakref.WeakSet()
_intercepted: set[str] = set()


class _OperatorListing:
    """The state of the list of operators at the last listing."""

    references: Sequence[Any] = ()
    counts: tuple[int, ...] = ()


def watch() -> None:
    """Intercept the operators defined since the last call; called before forward mode begins."""
    if not _libraries:
        for name in _LISTS:
            _intercept(f"aten::{name}", _refuse)
        for name in _SCATTERED:
            _intercept(f"aten::{name}", _refuse_product)
    references = OPDEFS.valuerefs()
    if references != _OperatorListing.references:
        _OperatorListing.references = references
        for definition in [made for made in OPDEFS.values() if made not in _custom]:
            _custom.add(definition)
            name = definition._opoverload.name()
            _intercepted.add(name)
            _intercept(name, _interceptor_for(name), definition._lib)
    # A module import or torch.ops.load_library loads C++ extensions.
    counts = len(_defs), len(torch.ops.loaded_libraries), len(sys.modules)
    if counts != _OperatorListing.counts:
        _OperatorListing.counts = counts
        for name in _dispatch_get_all_op_names():
            if name.partition("::")[0] not in _OF_TORCH and name not in _intercepted:
                _intercepted.add(name)
                if _may_be_differentiated(name):
                    _intercept(name, _interceptor_for(name))


def _interceptor_for(name: str) -> _Interceptor:
    if name in LINEAR:
        return _map_tangents
    return _refuse_write if name.startswith("c10d::") else _require_tangent


def _may_be_differentiated(name: str) -> bool:
    """True if an operator takes and returns tensors and is not composed of others."""
    if _dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return False
    overload = overload_of(name)
    if overload is None:
        return False
    schema = overload._schema
    sides = (schema.arguments, schema.returns)
    return name.startswith("c10d::") or all(
        any("Tensor" in str(one.type) for one in side) for side in sides
    )


def _intercept(
    name: str, interceptor: _Interceptor, library: torch.library.Library | None = None
) -> None:
    """Intercept calls of an operator with tangents before autograd."""
    overload = overload_of(name)
    if overload is None:
        return
    namespace, _, base = name.partition("::")
    if library is None:
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "IMPL")
        library = _libraries[namespace]
    rest = after(RANDOM_KEY_NAME)

    def operator(keys: Any, *args: Any, **kwargs: Any) -> Any:
        # Look the operator up by name: it may have been defined again.
        called = overload_of(name)
        assert called is not None

        def proceed(*args: Any, **kwargs: Any) -> Any:
            return called.redispatch(keys & rest, *args, **kwargs)

        pushing = forward_ad._current_level >= 0 and not below_autograd()
        if pushing and _carries_tangents((args, kwargs)):
            return interceptor(name, proceed, args, kwargs)
        return proceed(*args, **kwargs)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Ww]arning only once")
        library.impl(base, operator, RANDOM_KEY_NAME, with_keyset=True)


def _carries_tangents(values: Any) -> bool:
    tensors = [x for x in pytrees.leaves_of(values) if isinstance(x, torch.Tensor)]
    with DisableTorchFunctionSubclass():
        return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def _refuse(name: str, proceed: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    raise NotImplementedError(f"{name} does not support forward AD: it has no forward formula")


def _refuse_product(
    name: str, proceed: Callable[..., Any], args: Sequence[Any], kwargs: Any
) -> Any:
    if "prod" in (*args[4:5], kwargs.get("reduce")):
        _refuse(name, proceed, args, kwargs)
    return proceed(*args, **kwargs)


def _refuse_write(name: str, proceed: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    raise MissingRuleError(
        f"jvp: {name} writes into its arguments and has no derivative. Use tsfunc.psum and its "
        f"like, or the functional collectives of torch."
    )


def _require_tangent(
    name: str, proceed: Callable[..., Any], args: Sequence[Any], kwargs: Any
) -> Any:
    """Run the call; refuse it if its results can carry tangents and none does."""
    overload = overload_of(name)
    assert overload is not None
    if operator_of(overload).writes:
        _refuse(name, proceed, args, kwargs)
    out = proceed(*args, **kwargs)
    results = [x for x in pytrees.leaves_of(out) if isinstance(x, torch.Tensor)]
    if not any(x.is_floating_point() or x.is_complex() for x in results):
        return out
    if not _carries_tangents(out):
        if not _has_autograd(name):
            raise MissingRuleError(
                f"jvp: {name} was called with tangents and has no derivative. Give it one with "
                f"torch.library.register_autograd, or call it on x.detach() if its derivative is "
                f"zero."
            )
        _refuse(name, proceed, args, kwargs)
    return out


def _has_autograd(name: str) -> bool:
    """True if an operator has an autograd kernel for any device."""
    return any(
        _dispatch_has_kernel_for_dispatch_key(name, key)
        for key in ("Autograd", "AutogradCPU", "AutogradCUDA", "AutogradOther")
    )


def _map_tangents(name: str, proceed: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Run a linear operator on the primals and on the tangents."""
    if not LINEAR[name](args):
        _refuse(name, proceed, args, kwargs)
    overload = overload_of(name)
    with DisableTorchFunctionSubclass():
        primals = pytrees.tree_map(_primal, tuple(args))
        tangents = pytrees.tree_map(_tangent, tuple(args))
    wait = torch.ops._c10d_functional.wait_tensor
    if name == "_c10d_functional::_wrap_tensor_autograd":
        # An asynchronous tensor, which waits at its first use, can't carry a tangent.
        out, tangents_out = wait(*primals), wait(*tangents)
    else:
        out = proceed(*primals, **kwargs)
        tangents_out = pytrees.tree_map(wait, overload(*tangents, **kwargs))  # type: ignore[misc]
    with DisableTorchFunctionSubclass():
        if isinstance(out, torch.Tensor):
            return forward_ad.make_dual(out, tangents_out)
        return [forward_ad.make_dual(x, t) for x, t in zip(out, tangents_out, strict=True)]


def _primal(value: Any) -> Any:
    return forward_ad.unpack_dual(value).primal if isinstance(value, torch.Tensor) else value


def _tangent(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    primal, tangent = forward_ad.unpack_dual(value)
    return torch.zeros_like(primal) if tangent is None else tangent
