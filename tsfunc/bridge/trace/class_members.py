"""Methods and properties of a user's tensor class on traced tensors.

A trace runs on tracers. For an argument of a user's subclass of ``Tensor`` the tracer has a class
made here, with the members of the user's class; the same holds for tensors from outside. Results of
torch functions on it have that class too, as the results of ``Tensor.__torch_function__`` have, if
the user's class inherits this method. A class with a method of its own decides when the program
runs. The class of a result is then unknown in a trace, and the use of a member of the user's class
on such a result is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import get_default_nowrap_functions

from tsfunc.bridge.trace.tensor_guards import USERS_CLASS, set_class, users_class
from tsfunc.bridge.trace.trace_level import TraceTracer
from tsfunc.bridge.tracers.tracer import Tracer

# Members that concern the object and not its meaning, and those that a tracer handles itself.
_COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
_OWN_MEMBERS = frozenset(
    {"__torch_function__", "__torch_dispatch__", "__weakref__", "__slots__", "__annotations__"}
    | {name for cls in (TraceTracer, Tracer) for name in (*vars(cls), *cls.__annotations__)}
    | (vars(object).keys() - _COMPARISONS)
)

_OF_CLASSES = frozenset({"__module__", "__firstlineno__", "__static_attributes__"})


def give_members(tracer: TraceTracer, cls: type) -> Iterator[str]:
    """Give a tracer the members of the class of its tensor, and return their names."""
    if users_class(cls) is torch.Tensor:
        return iter(())
    made = _tracer_class(cls)
    set_class(tracer, made)
    return (name for name in vars(made) if name not in _OWN_MEMBERS and hasattr(cls, name))


def _tracer_class(cls: type) -> type[TraceTracer]:
    """Return the class of tracers with the members of a user's class."""
    mro = cls.__mro__[: cls.__mro__.index(torch.Tensor)]
    members: dict[str, Any] = {}
    for each in reversed(mro):
        for name, member in vars(each).items():
            if name not in _OWN_MEMBERS:
                bound = isinstance(member, classmethod | staticmethod)
                members[name] = staticmethod(getattr(cls, name)) if bound else member
    # A class with a __torch_dispatch__ alone has a C function in this place.
    own = getattr(getattr(cls, "__torch_function__"), "__func__", None)  # noqa: B009 - of any class
    inherited = own is torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    if not inherited:
        refused = {
            name: property(_Refusal(cls, name)) for name in members if name not in _OF_CLASSES
        }
        of_results: Any = type(cls.__name__, (TraceTracer,), {"__slots__": (), **refused})
        of_results.__torch_function__ = _function_with(of_results)
    members |= {"__slots__": (), USERS_CLASS: cls}
    made: Any = type(cls.__name__, (TraceTracer,), members)
    made.__torch_function__ = _function_with(made if inherited else of_results)
    found: type[TraceTracer] = made
    return found


class _Refusal:
    """The getter of a member of a user's class, of a result whose class is unknown."""

    def __init__(self, cls: type, name: str) -> None:
        self.cls, self.name = cls, name

    def __call__(self, tracer: TraceTracer) -> Any:
        cls, name = self.cls.__name__, self.name
        raise TypeError(
            f"{tracer.dispatch_level.name}: `{name}` of {cls} is used on the result of a torch "
            f"function, but {cls} defines __torch_function__, which decides about the class of "
            f"results when the program runs. Call {cls}.{name}(x), or torch's function."
        )


def _function_with(of_results: type[TraceTracer]) -> Any:
    """Return a ``__torch_function__`` whose results have a class of tracers."""

    def function(
        cls: type[TraceTracer],
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = TraceTracer.__torch_function__(func, types, args, kwargs)
        if func in get_default_nowrap_functions():
            return out
        return _with_members(out, of_results)

    return classmethod(function)


def _with_members(value: Any, cls: type[TraceTracer]) -> Any:
    if type(value) is TraceTracer:
        set_class(value, cls)
    elif isinstance(value, list | tuple):
        for item in value:
            _with_members(item, cls)
    return value


def _as_subclass(self: Tracer, cls: type) -> Any:
    """Refuse ``x.as_subclass(cls)`` for a class that a traced value can't have."""
    if users_class(cls) is torch.Tensor:
        return self
    raise TypeError(
        f"{self.dispatch_level.name}: x.as_subclass({cls.__name__}) is called inside of the "
        f"transformed function, on a value that can't have another class. Call as_subclass before, "
        f"or on the result."
    )


Tracer.as_subclass = _as_subclass  # type: ignore[method-assign, assignment]
