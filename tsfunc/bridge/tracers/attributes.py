"""Methods that handle calls on tracers in Python: attributes, ``detach``, and reads of data.

C++ can't handle these calls: it would use the wrapper tensor, or would not dispatch back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch._C import DisableTorchFunctionSubclass, _functorch

from tsfunc.bridge.tracers.backward import handle_backward
from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.tracer import (
    Tracer,
    innermost_level,
    lift_where,
    metadata,
    needs_lift,
    refuse_escaped,
)
from tsfunc.ops.registry import Args, Kwargs


def _show(func: Any, types: Any, args: Args, kwargs: Kwargs) -> str:
    value = args[0]
    return value.describe() if isinstance(value, Tracer) else object.__repr__(value)


def _detach(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    if not isinstance(value, Tracer):
        return metadata(func, types, args, kwargs)
    if not value.dispatch_level.alive:
        refuse_escaped(func, value.dispatch_level)
    return value.detached_here()


def _read(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    if not isinstance(value, Tracer):
        return metadata(func, types, args, kwargs)
    if not value.dispatch_level.alive:
        refuse_escaped(func, value.dispatch_level)
    return value.read(func.__name__)


def _format(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Format as ``_show`` without a format spec; with one, read the data."""
    return (_read if args[1] else _show)(func, types, args, kwargs)


def read_from_value(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Ask the value inside for properties that the tracer lacks: lazy conjugation, layout."""
    value = args[0]
    if isinstance(value, Tracer) and isinstance(inner := getattr(value, "value", None), _T):
        return func(inner)
    return metadata(func, types, args, kwargs)


def _real_or_imaginary(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the real or imaginary part as a view, also of a value that is lazily conjugated.

    C++ takes the view of the value without its conjugation, and the sign is another lazy bit. It
    can't read the bit of a value from the tracer.
    """
    value = args[0] if args else kwargs.get("input", kwargs.get("self"))
    if not isinstance(value, Tracer) or not value.is_complex() or not value.is_lazily_conjugated():
        return NotImplemented
    part = func(value.conj())
    return torch._neg_view(part) if func in _IMAGINARY else part


def _require_grad(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Record autograd on a tracer; from now on the level's calls must pass through autograd."""
    value = args[0]
    if isinstance(value, Tracer):
        value.dispatch_level.autograd += 1
    return metadata(func, types, args, kwargs)


def _make_dual(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make a dual tensor; from now on the level's calls must pass through autograd."""
    level = innermost_level(args)
    # A torch.func transform inside the level makes its own tensors, which the level must not wrap.
    if level is not None and (_functorch.maybe_current_level() or 0) <= level.functorch_depth:
        level.autograd += 1
        level.forward += 1
        args = tuple([lift_where(arg, level, needs_lift) for arg in args])
    return metadata(func, types, args, kwargs)


_T = torch.Tensor
function_rules: Final = FunctionRules()


def _existing(names: str, *, attributes: bool = False) -> list[Any]:
    """Return the methods of tensors, or the getters of attributes, that this torch has."""
    members = [getattr(_T, name) for name in names.split() if hasattr(_T, name)]
    return [member.__get__ for member in members] if attributes else members


function_rules.add(Stage.METHOD, metadata, *_existing(
    "dim size stride numel nelement ndimension is_contiguous is_floating_point is_complex "
    "is_signed is_inference element_size storage_offset get_device "
    "has_names is_set_to is_distributed is_nonzero_static"
))  # fmt: skip
function_rules.add(Stage.METHOD, metadata, *_existing(
    "shape dtype device ndim is_leaf grad_fn is_sparse is_cuda "
    "is_cpu is_meta is_quantized is_nested is_mps is_xpu itemsize nbytes names output_nr _version "
    "_base is_mkldnn retains_grad name volatile is_mtia is_ipu is_xla is_maia is_vulkan",
    attributes=True,
))  # fmt: skip
# C++ resets the hooks of a tensor that it writes in place.
_hooks: Any = _T._backward_hooks
function_rules.add(Stage.METHOD, metadata, _hooks.__set__, left_to_torch=lambda kinds: True)
function_rules.add(Stage.METHOD, _make_dual, torch._VF._make_dual)
function_rules.add(
    Stage.METHOD, _detach, _T.detach, torch.detach, *_existing("data", attributes=True)
)
function_rules.add(Stage.METHOD, _read, torch.is_nonzero, *_existing(
    "__bool__ __int__ __float__ __index__ __complex__ __array__ item tolist numpy is_nonzero"
))  # fmt: skip


@function_rules.replace(_T.unflatten)
def _unflatten(x: Any, dim: Any, sizes: Any) -> Any:
    """Call torch's function: the C++ method that the method calls would call it again."""
    return torch.unflatten(x, dim, sizes)


function_rules.add(
    Stage.METHOD, read_from_value, _T.is_conj, _T.is_neg, torch.is_conj, torch.is_neg
)
_IMAGINARY = frozenset({torch.imag, *_existing("imag", attributes=True)})
function_rules.add(
    Stage.METHOD,
    _real_or_imaginary,
    torch.real,
    *_existing("real", attributes=True),
    *_IMAGINARY,
    view=True,
)
function_rules.add(Stage.METHOD, _show, _T.__repr__)
function_rules.add(Stage.METHOD, _format, _T.__format__)
function_rules.add(
    Stage.METHOD,
    _require_grad,
    _T.requires_grad_,
    _T.requires_grad.__set__,  # type: ignore[attr-defined]
)

# The methods among these that only read properties, and those that do not need data.
OF_TYPES = frozenset({metadata, read_from_value})
PROPERTY_METHODS = OF_TYPES | {_show, _require_grad, handle_backward, _make_dual}


def _property(name: str) -> property:
    """Return a property that reads an attribute in Python, faster than the function handler."""
    get = getattr(_T, name).__get__

    def read(self: Tracer) -> Any:
        with DisableTorchFunctionSubclass():
            return get(self)

    return property(read)


def _layout(self: Tracer) -> torch.layout:
    """The layout of the value, because compressed tracers are strided themselves."""
    inner = getattr(self, "value", None)
    if isinstance(inner, torch.Tensor):
        return inner.layout
    with DisableTorchFunctionSubclass():
        return _T.layout.__get__(self)  # type: ignore[attr-defined]


def _method(name: str) -> Callable[..., Any]:
    call = getattr(_T, name)

    def method(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunctionSubclass():
            return call(self, *args, **kwargs)

    method.__name__ = name
    function_rules.add(Stage.METHOD, metadata, method)  # function modes see metadata calls
    return method


# The members that read the metadata of the tracer itself.
METADATA: Final = (
    "shape", "dtype", "device", "ndim", "dim", "size", "stride", "is_contiguous", "is_complex",
    "is_floating_point", "numel", "storage_offset",
)  # fmt: skip
for _name in METADATA:
    # A function mode gets the class's own method.
    setattr(Tracer, _name, (_method if callable(getattr(_T, _name)) else _property)(_name))
Tracer.layout = property(_layout)  # type: ignore[assignment]
