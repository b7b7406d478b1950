"""Methods and properties of a user's tensor class on traced tensors.

A trace runs on tracers. For an argument of a user's subclass of ``Tensor`` the tracer has a class
made here, with the members of the user's class; the same holds for tensors from outside. Results of
torch functions on it have that class too, as the results of ``Tensor.__torch_function__`` have, if
the user's class inherits this method. A class with a method of its own decides when the program
runs. The class of a result is then unknown in a trace, and the use of a member of the user's class
on such a result is refused. The method gets the function that the traced function called
(``UserCall``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.fx
from torch._ops import OpOverload
from torch.overrides import get_default_nowrap_functions

from tsfunc.bridge.trace.tensor_guards import USERS_CLASS, set_class, users_class
from tsfunc.bridge.trace.trace_level import TraceLevel, TraceTracer
from tsfunc.bridge.tracers.operators import map_items
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.ops.registry import Args, Kwargs

# Members that concern the object and not its meaning, and those that a tracer handles itself.
_COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
_OWN_MEMBERS = frozenset(
    {"__torch_function__", "__torch_dispatch__", "__weakref__", "__slots__", "__annotations__"}
    | {name for cls in (TraceTracer, Tracer) for name in (*vars(cls), *cls.__annotations__)}
    | (vars(object).keys() - _COMPARISONS)
)

# The types of constants in the calls that a program repeats.
_CONSTANTS = frozenset(
    {int, float, bool, complex, str, type(...), torch.dtype, torch.device, torch.layout}
    | {torch.memory_format}
)

_OF_CLASSES = frozenset({"__module__", "__firstlineno__", "__static_attributes__"})


def give_members(tracer: TraceTracer, cls: type) -> Iterator[str]:
    """Give a tracer the members of the class of its tensor, and return their names."""
    if users_class(cls) is torch.Tensor:
        return iter(())
    tracer_class = _tracer_class(cls)
    set_class(tracer, tracer_class)
    return (name for name in vars(tracer_class) if name not in _OWN_MEMBERS and hasattr(cls, name))


def _tracer_class(cls: type) -> type[TraceTracer]:
    """Return the class of tracers with the members of a user's class."""
    mro = cls.__mro__[: cls.__mro__.index(torch.Tensor)]
    members: dict[str, Any] = {}
    for base in reversed(mro):
        for name, member in vars(base).items():
            if name not in _OWN_MEMBERS:
                bound = isinstance(member, classmethod | staticmethod)
                members[name] = staticmethod(getattr(cls, name)) if bound else member
    # A class with a __torch_dispatch__ alone has a C function in this place.
    handler = getattr(getattr(cls, "__torch_function__"), "__func__", None)  # noqa: B009 - of any class
    inherited = handler is torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    if not inherited:
        refused = {
            name: property(_Refusal(cls, name)) for name in members if name not in _OF_CLASSES
        }
        of_results: Any = type(cls.__name__, (TraceTracer,), {"__slots__": (), **refused})
        of_results.__torch_function__ = _function_with(of_results, _keeping_calls)
    members |= {"__slots__": (), USERS_CLASS: cls}
    tracer_class: Any = type(cls.__name__, (TraceTracer,), members)
    tracer_class.__torch_function__ = (
        _function_with(tracer_class, TraceTracer.__torch_function__)
        if inherited
        else _function_with(of_results, _keeping_calls)
    )
    return tracer_class


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


def _function_with(of_results: type[TraceTracer], handle: Callable[..., Any]) -> Any:
    """Return a ``__torch_function__`` whose results have a class of tracers."""

    def function(
        cls: type[TraceTracer],
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = handle(func, types, args, kwargs)
        if func in get_default_nowrap_functions():
            return out
        return _with_members(out, of_results)

    return classmethod(function)


@dataclass(frozen=True)
class UserCall:
    """The call of the traced function that recorded a node: a class's handler gets its function.

    Attributes:
        function: the function that was called.
        args: its arguments, with an :class:`Operand` for each tensor.
        kwargs: its keyword arguments, likewise.
        tensors: the number of tensors among the node's arguments.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: int

    def on(self, node: torch.fx.Node) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
        """Return the call's arguments with a node's inputs; None if a pass changed the node."""
        nodes = _inputs(node)
        if len(nodes) != self.tensors:
            return None
        fill = partial(_with_nodes, nodes)
        return tuple(map(fill, self.args)), {name: fill(x) for name, x in self.kwargs.items()}


class Operand(NamedTuple):
    """The position of a tensor among the inputs of a node."""

    place: int


def _inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    nodes: list[torch.fx.Node] = []
    torch.fx.map_arg((node.args, node.kwargs), nodes.append)
    return nodes


def _with_nodes(nodes: Sequence[torch.fx.Node], arg: Any) -> Any:
    if isinstance(arg, Operand):
        return nodes[arg.place]
    return map_items(partial(_with_nodes, nodes), arg) if type(arg) in (list, tuple) else arg


def _keeping_calls(
    func: Callable[..., Any],
    types: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Handle a call, and keep it on the node that it records, if there is exactly one.

    Batching rules call overloads, and classes implement functions: a program chooses the function.
    """
    level = next((x.dispatch_level for x in args if isinstance(x, TraceTracer)), None)
    last = None if level is None else next(reversed(level.graph.nodes), None)
    out = TraceTracer.__torch_function__(func, types, args, kwargs)
    first = out[0] if isinstance(out, list | tuple) and out else out
    if level is None or isinstance(func, OpOverload) or not isinstance(first, TraceTracer):
        return out
    wrapped = []
    for node in reversed(level.graph.nodes):
        if node is last:
            break
        if node.op == "call_function" and node.target is not operator.getitem:
            wrapped.append(node)
    if len(wrapped) == 1:
        call = _call_of(wrapped[0], level, func, args, kwargs or {})
        if call is not None:
            wrapped[0].meta["call"] = call
    return out


def _call_of(
    node: torch.fx.Node, level: TraceLevel, func: Callable[..., Any], args: Args, kwargs: Kwargs
) -> UserCall | None:
    """Return the call that a node stands for; None if its arguments are not those of the node."""
    nodes = _inputs(node)

    def operand(arg: Any) -> Any:
        if isinstance(arg, TraceTracer):
            return Operand(nodes.index(arg.node))
        if isinstance(arg, torch.Tensor):
            return Operand(nodes.index(level.lifted[id(arg)][1].node))
        if isinstance(arg, list | tuple):
            return map_items(operand, list(arg) if isinstance(arg, torch.Size) else arg)
        if arg is not None and type(arg) not in _CONSTANTS:
            raise ValueError(arg)
        return arg

    try:
        call = tuple(map(operand, args)), {name: operand(arg) for name, arg in kwargs.items()}
    except (KeyError, ValueError):  # a size, or a tensor that the node does not take
        return None
    return UserCall(func, *call, len(nodes))


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
