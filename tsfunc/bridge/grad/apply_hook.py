"""A handler for every call of ``torch.autograd.Function.apply``.

``Function.apply`` has no hook for tensor subclasses. Code takes the method from a class before
the first transform runs (``f = MyFunction.apply`` at the head of a module), so the hook must also
reach methods that are already bound.

- torch 2.13: ``Function.apply`` is a Python method that ends in ``super().apply``, which is
  the method of the C++ base class. A class method on ``_SingleLevelFunction``, which stands between
  the two, receives every call.
- torch 2.14: ``Function.apply`` is the method of the C++ base class. A bound method of it holds
  only the class and the address of an entry in torch's method table. The hook replaces the function
  in that entry by ``PyObject_Call``, which has the same C signature. The call then becomes a call
  of the class, and the metaclass defines the result: ``FunctionMeta.__call__``. A ``Function``
  class has no other use for a call, since torch has deprecated instances of it.

torch's ``_SingleLevelFunction`` is the base class of ``Function`` and of the classes that
torch.func derives from one; its own base ``_FunctionBase`` has the ``apply`` that puts a node into
the graph.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._C import _FunctionBase, _functorch
from torch.autograd import Function
from torch.autograd.function import FunctionMeta, _SingleLevelFunction

from tsfunc import hooks
from tsfunc.bridge.tracers.registrations import on_first_transform
from tsfunc.errors import EscapedTracerError
from tsfunc.user_code import fold_traceback

Handler = Callable[..., Any]  # takes a class, and its arguments bound to those of ``forward``

_descriptor: Any = _FunctionBase.__dict__["apply"]
_own: Any = _descriptor  # torch's method without the hook


def applies_in_cpp() -> bool:
    """True if ``Function.apply`` is the C++ method itself, as it is since torch 2.14."""
    return Function.__dict__["apply"] is _descriptor


def call_torch_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Call torch's own method, which adds one node to the graph of the tensor arguments."""
    return _own.__get__(None, cls)(*args, **kwargs)


def call_apply(cls: Any, *args: Any) -> Any:
    """Call ``Function.apply`` for a class again, with the arguments that it was called with.

    A class may have an ``apply`` of its own that calls it with other arguments: torch.library makes
    such a class for an operator that takes a list of tensors.
    """
    return Function.__dict__["apply"].__get__(None, cls)(*args)


def apply_seen(cls: Any, args: tuple[Any, ...]) -> Any:
    """Call ``Function.apply`` with arguments that are already as the current level sees them.

    A level applies a class to the values inside of its tracers. Such a value may be a tensor that
    the running code sees replaced by its tracer (``level_proxies``), and must stay as it is.
    """
    if _functorch.maybe_current_level() is not None:
        return call_apply(cls, *args)
    return hooks.apply_seen_arguments.provided(cls, args)


def hook(handler: Handler) -> None:
    """Declare the handler of the calls of ``apply`` that users make, from the first transform on.

    The first transform raises a RuntimeError if torch's method table has not the expected form.
    """
    if not applies_in_cpp():

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return handler(cls, *(_by_position(cls, args, kwargs) if kwargs else args))
            except EscapedTracerError as error:
                fold_traceback(error, str)  # the user called torch, not this package
                raise

        on_first_transform(setattr, _SingleLevelFunction, "apply", classmethod(apply))
        return

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls, Function):
            if _functorch.maybe_current_level() is not None:
                return call_torch_apply(cls, *args, **kwargs)  # torch.func derives a class
            if kwargs or _has_setup(cls):
                args = _by_position(cls, args, kwargs)
        try:
            return handler(cls, *args)
        except EscapedTracerError as error:
            fold_traceback(error, str)
            raise

    on_first_transform(setattr, FunctionMeta, "__call__", call)
    on_first_transform(_redirect_method_table)


def _has_setup(cls: Any) -> bool:
    return cls.setup_context is not _SingleLevelFunction.setup_context


def _by_position(cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call of ``apply`` in the order of the parameters of ``forward``.

    As in torch, a Function with ``setup_context`` gets the defaults of ``forward``, too.

    Raises:
        TypeError: an argument can't be passed by position, or does not fit ``forward``.
    """
    has_setup = _has_setup(cls)
    ctx = () if has_setup else (None,)
    try:
        bound = inspect.signature(cls.forward).bind(*ctx, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{cls.__name__}.apply: {error}.") from None
    if has_setup:
        bound.apply_defaults()
    if bound.kwargs:
        names = ", ".join(map(repr, bound.kwargs))
        raise TypeError(
            f"{cls.__name__}.apply: expected arguments that forward takes by position, without a "
            f"gap, got {names} by keyword. Pass all arguments by position, and leave out the * "
            f"before a parameter of forward that is keyword-only."
        )
    return bound.args[len(ctx) :]


class _MethodDef(ctypes.Structure):
    """CPython's ``PyMethodDef``, a part of its stable ABI."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


_VARARGS_KEYWORDS_CLASS = 0x1 | 0x2 | 0x10  # METH_VARARGS | METH_KEYWORDS | METH_CLASS
_own_entry: _MethodDef | None = None  # must outlive the descriptor that is made from it


def _redirect_method_table() -> None:
    """Let the entry of ``apply`` call the class, and keep torch's method as a descriptor."""
    global _own, _own_entry
    api = ctypes.pythonapi
    pointers = 3  # d_type, d_name and d_qualname stand before PyMethodDescrObject.d_method
    place = id(_descriptor) + object.__basicsize__ + pointers * ctypes.sizeof(ctypes.c_void_p)
    entry = _MethodDef.from_address(ctypes.c_void_p.from_address(place).value or 0)

    bound = ctypes.py_object(_descriptor.__get__(None, Function))
    api.PyCFunction_GetFunction.restype = ctypes.c_void_p
    same_function = entry.function == api.PyCFunction_GetFunction(bound)
    same_flags = entry.flags == _VARARGS_KEYWORDS_CLASS
    if not (same_function and same_flags and entry.name == b"apply"):
        raise RuntimeError(
            "torch.autograd.Function.apply: expected a C++ class method with positional and "
            f"keyword arguments, got one with flags {entry.flags:#x}. This release of torch needs "
            "a newer tsfunc."
        )

    _own_entry = _MethodDef(entry.name, entry.function, entry.flags, entry.doc)
    api.PyDescr_NewClassMethod.restype = ctypes.py_object
    _own = api.PyDescr_NewClassMethod(ctypes.py_object(_FunctionBase), ctypes.byref(_own_entry))
    entry.function = ctypes.cast(api.PyObject_Call, ctypes.c_void_p).value
