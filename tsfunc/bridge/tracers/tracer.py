"""Tracers: tensors that stand for a value of a level, and the two doors by which they are met.

Door 1, ``__torch_function__``: user code calls torch on a tracer. The call goes on into C++
with the subclass's override off for that one hop. Where no autograd is recorded at the tracer's
level, torch's autograd keys are excluded, so that composite operators (``linear``,
``cross_entropy``) arrive whole at

door 2, ``__torch_dispatch__``: any operator with its schema, also those that C++ and the
autograd engine call. It looks the operator's row up and dispatches.

Private names used here (torch 2.11 to 2.13): ``Tensor._make_wrapper_subclass`` makes a tensor
without storage; ``_C._skip_one_hop_torch_function`` calls a function past its
``__torch_function__`` check, once; ``_C.DisableTorchFunctionSubclass`` does so for a block;
``_C._DisableTorchDispatch`` has C++ treat a tracer as any tensor.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MemberDescriptorType
from typing import Any, ClassVar, Final, TypeVar, cast

import torch
from torch._C import (
    DisableTorchFunctionSubclass,
    _DisableTorchDispatch,
    _functorch,
    _skip_one_hop_torch_function,
)
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import forward_ad

from tsfunc.bridge.tracers.operators import TorchOperator, operator_of
from tsfunc.bridge.tracers.questions import unasked_of
from tsfunc.bridge.tracers.torch_state import (
    RestoredTorchState,
    TorchState,
    any_autocast,
    autocast_of_the_call,
    below_autograd,
    is_casting,
    tangents_enabled,
    without_autograd,
    without_tangents,
)
from tsfunc.dispatch import DispatchKey, Level, messages
from tsfunc.dispatch.state import tls, using
from tsfunc.errors import DataDependentError, EscapedTracerError

T = TypeVar("T", bound="Tracer")
NO_KWARGS: Final[Mapping[str, Any]] = {}


# Numbers of what is entered, in order.
serials: Final = itertools.count(1)


class TracerLevel(Level):
    """A level whose values are tracers.

    Attributes:
        autograd: how many transforms record autograd on this level's own tracers; while it
            is 0, calls go past torch's autograd on their way in.
        born: its place in the order of births, 0 while it is not known (``births``).
        forward: how many forward-mode transforms hang tangents on this level's tracers.
        serial: a later one has a higher number.
        functorch_depth: how many transforms of torch.func are outside of it.
        torch_state: what the level captured of torch's thread-local state.
    """

    __slots__ = ("autograd", "born", "forward", "functorch_depth", "serial", "torch_state")

    def __init__(self, key: DispatchKey, name: str | None = None, *, modal: bool = False) -> None:
        super().__init__(key, name, modal=modal)
        self.autograd = 0
        self.born = 0
        self.serial = next(serials)
        self.forward = 0
        self.torch_state = TorchState()
        if not tangents_enabled():
            # In a method of an ``autograd.Function``, where C++ pushes tangents that come from
            # outside by the class' own ``jvp``: a jvp inside of the level pushes but its own.
            self._restores += (without_tangents,)
        self.functorch_depth = _functorch.maybe_current_level() or 0

    @property
    def root(self) -> TracerLevel:
        """The transform's own level, for one that replaces it (``subsets``)."""
        return self

    def lift(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor from outside as one of this level's tracers."""
        raise TypeError(f"{self.name}: {type(self).__name__} does not say how it lifts a tensor.")

    def sees_factory(self, name: str, random: bool) -> bool:
        """Whether a factory function (a random one, or another) is this level's business.

        It is given to the innermost level that says yes.
        """
        return False

    def guard(self) -> AbstractContextManager[Any]:
        if self._restores:
            return _Both(self.torch_state(), super().guard())
        return self.torch_state()


class StandIn:
    """A level in the place of another one, whose tensors it takes in (``subsets``, ``bodies``)."""

    __slots__ = ()

    def stand_in_for(self, level: Level) -> None:
        """Has all that the level has; what is to be its own it sets after that."""
        own: type = type(self)
        other: type = type(level)
        for name in _carried_over(own, other):
            setattr(self, name, getattr(level, name))

    def into(self, value: Any) -> Any:
        """A tensor from outside as the code that runs at the level is to see it."""
        raise NotImplementedError


@functools.cache
def _carried_over(own: type, other: type) -> tuple[str, ...]:
    """The slots of a level's class that one in its place has too, but for what that works out."""
    names = [name for cls in other.__mro__ for name in cls.__dict__.get("__slots__", ())]
    places = [(name, getattr(own, name, None)) for name in names]
    return tuple(name for name, place in places if isinstance(place, MemberDescriptorType))


class _Substituted(threading.local):
    """What the code on this thread sees in the places of tensors: ``seen_as``."""

    def __init__(self) -> None:
        self.values: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, value: torch.Tensor) -> torch.Tensor:
        found = self.values.get(id(value))
        return value if found is None else found[1]


substituted: Final = _Substituted()


def seen_here(value: Any) -> Any:
    """A tensor as the code that runs is to see it: taken in by levels in the place of others.

    The outer levels' first: what an inner one makes of a tensor has to hold what they made of it.
    """
    if isinstance(value, torch.Tensor):
        if substituted.values:
            value = substituted.of(value)
        settle(value)
        for level in tls.state.levels:
            if isinstance(level, StandIn):
                value = level.into(value)
    return value


def all_seen_here(values: list[Any]) -> list[Any]:
    """What a transform is given, where it goes on with that in other ways than by calls."""
    if not any(isinstance(level, StandIn) for level in tls.state.levels):
        return values
    return [seen_here(value) for value in values]


# Classes of tracers with a record, and what sees their calls first (``marked``).
MARKED: dict[type, Callable[..., Any]] = {}


def settle(value: Any) -> None:
    """Before a value is looked at in other ways than by calls: its record may have a say."""
    if type(value) in MARKED and value.dispatch_level.alive:
        value.record.settle()


class _Both:
    """What others registered with ``dispatch.on_capture``, and torch's state inside of it."""

    def __init__(self, torch_state: RestoredTorchState, ours: AbstractContextManager[Any]) -> None:
        self.torch, self.ours = torch_state, ours

    def __enter__(self) -> None:
        self.ours.__enter__()
        self.torch.__enter__()

    def __exit__(self, *exc: Any) -> None:
        try:
            self.torch.__exit__(*exc)
        finally:
            self.ours.__exit__(*exc)


class Tracer(torch.Tensor):
    """The base of tensors that stand for values of a level.

    A subclass keeps what it stands for in attributes of its own and is made by :meth:`make`.
    Every torch operator called on one is dispatched with the bit of its level in the key set;
    ``register(op, key)`` and ``register_fallback(key)`` say what happens.

    Example: see ``examples/new_transform.py``.
    """

    # Laid out as any tensor: one that exists can become a tracer (``writes``).
    __slots__ = ()

    # The class has it for the dispatcher, which asks a type once; every tracer has its own.
    dispatch_level: TracerLevel = cast(Any, None)

    # The classes that an object which becomes such a tracer gets: one that is laid out as a tensor,
    # and one that is laid out as a tracer with slots (``turning``). None: the tracer's own class.
    forms: ClassVar[tuple[type[Tracer], type[Tracer]] | None] = None

    @classmethod
    def make(
        cls: type[T],
        like: torch.Tensor | None = None,
        level: Level | None = None,
        **attributes: Any,
    ) -> T:
        """A tracer that looks like a tensor of that shape, type and device.

        Args:
            like: by default the first of the attributes.
            level: inside a kernel by default the level that it runs for.
            attributes: what the tracer stands for.

        Raises:
            TypeError: there is nothing for it to look like, or no level for it to belong to.
        """
        if like is None:
            like = next(iter(attributes.values()), None)
        level = level or tls.state.running
        if not isinstance(like, torch.Tensor) or not isinstance(level, TracerLevel):
            raise TypeError(
                f"{cls.__name__}.make(): expected a tensor to look like, got {like!r}, and a "
                f"TracerLevel, got {level!r}. Outside of a kernel give level=."
            )
        shape = like.shape
        with unasked_of(shape):
            tracer = torch.Tensor._make_wrapper_subclass(
                cls,
                shape,
                like.stride(),
                like.storage_offset(),
                dtype=like.dtype,
                device=like.device,
            )
        tracer.dispatch_level = level
        for name, value in attributes.items():
            setattr(tracer, name, value)
        return tracer

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return door_1(func, types, args, kwargs or NO_KWARGS)

    # torch declares it as what a class without subclasses has: called without the operator.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return operator_of(func).call(args, kwargs or NO_KWARGS, True)

    def cut(self) -> torch.Tensor:
        """What the user's ``detach()`` returns: without the graphs of this and all outer levels.

        Autograd's own ``aten::detach`` at a tracer's level is another matter: it must leave the
        outer levels' graphs as they are.
        """
        raise TypeError(f"{type(self).__name__} does not say what detach() does.")

    def again(self) -> Any:
        """Another tracer for the same values, without the graph of its own level."""
        raise TypeError(f"{type(self).__name__} does not say how another one is made.")

    def from_outside(self) -> bool:
        """Whether its values are not the transformed function's own to write into."""
        return False

    def read(self, name: str) -> Any:
        """What a method gives that returns data as Python or NumPy values (``bool``, ``item``)."""
        raise DataDependentError(
            f"{self.dispatch_level.name}: {name} needs the data of a tensor that stands for "
            f"others. Use tensor operations instead."
        )

    def describe(self) -> str:
        """What ``repr`` shows of it."""
        return f"{type(self).__name__}({self.dispatch_level.name}, shape={tuple(self.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self.describe()} stands for a value inside of {self.dispatch_level.name} and can't "
            f"be pickled or copied; return it from the transformed function first."
        )


class SlottedTracer(Tracer):
    """Attributes in slots, which are read in half the time: for tracers that come in numbers."""

    __slots__ = ("bdim", "dispatch_level", "value")


_ATTRIBUTES: Any = vars(torch.Tensor)["__dict__"]


def attributes_of(tracer: Tracer) -> dict[str, Any]:
    """Return the attributes by which a tracer stands for a value, and those that users set."""
    if not isinstance(tracer, SlottedTracer):
        return dict(_ATTRIBUTES.__get__(tracer))
    slots = SlottedTracer.__slots__
    return {name: getattr(tracer, name) for name in slots if hasattr(tracer, name)}


def written(op: TorchOperator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an in-place operator returns: its first argument, in its new shape if it has one."""
    if op.reshapes:  # its own autograd has seen the call
        with DisableTorchFunctionSubclass(), _DisableTorchDispatch(), without_autograd():
            op.overload(*args, **kwargs)
    return args[0]


def innermost_level(values: Sequence[Any]) -> TracerLevel | None:
    """The innermost level of the tracers among values and lists of them."""
    found: TracerLevel | None = None
    for value in values:
        if isinstance(value, Tracer):
            level: TracerLevel | None = value.dispatch_level
        elif isinstance(value, list | tuple):
            level = innermost_level(value)
        elif isinstance(value, dict):
            level = innermost_level(list(value.values()))
        else:
            continue
        if level is None or level is found:
            continue
        if found is None or level.depth > found.depth or not level.alive or level.within(found):
            found = level
    return found


# torch declares it for tuples and dicts only, which is what comes.
hop: Callable[[Any, Any, Any, Any], Any] = _skip_one_hop_torch_function

# How a C function's type is told from a Python function, which meets the doors again inside.
_C_TYPES = (
    type(torch.sin), type(torch.Tensor.add), type(torch.Tensor.__add__),
    type(torch.Tensor.__getitem__), OpOverload,
)  # fmt: skip

# What door 1 answers by itself: methods whose meaning C++ can't be asked for.
Method = Callable[[Callable[..., Any], Any, Sequence[Any], Mapping[str, Any]], Any]
METHODS: dict[Any, Method] = {}

# Of these, those that leave every call to torch in which no tensor stands for a number.
FOR_NUMBERS: set[Any] = set()


def door_1(
    func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """User code calls ``func`` on a tracer."""
    remap_args = tls.state.remap_args
    if remap_args is not None:
        taken = remap_args(func, args, kwargs)
        if taken is not None:
            return func(*taken[0], **taken[1])
    if MARKED:
        for kind in types:
            if kind in MARKED:
                return MARKED[kind](func, types, args, kwargs)
    method = METHODS.get(func)
    if method is not None:
        out = method(func, types, args, kwargs)
        if out is not NotImplemented:
            return out
    return into_torch(func, types, args, kwargs)


# What the C functions that write are to do first; of operators the schema says it (``writes``).
WRITERS: dict[Any, Callable[..., None]] = {}


def _prepare_write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if isinstance(func, OpOverload):
        op = operator_of(func)
        if not op.written and not op.out_names:
            return
        prepare = WRITERS[OpOverload]
    elif "out" in kwargs:
        prepare = WRITERS["out"]
    else:
        found = WRITERS.get(func)
        if found is None:
            return
        prepare = found
    prepare(func, args, kwargs)


def into_torch(
    func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The way from door 1 into torch, past this check once, and past autograd if it can be."""
    if is_casting():
        with autocast_of_the_call():
            return _into_torch(func, types, args, kwargs)
    return _into_torch(func, types, args, kwargs)


def _into_torch(
    func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    if isinstance(func, _C_TYPES):
        level = innermost_level((*args, *kwargs.values()))
        if level is not None:
            if not level.alive:
                refuse_escaped(func, level)
            if (_functorch.maybe_current_level() or 0) > level.functorch_depth:
                # A transform of torch.func inside of the level: it is to see the call first.
                return hop(func, types, args, kwargs)
            _prepare_write(func, args, kwargs)
            if not level.autograd or torch.is_inference_mode_enabled():
                if isinstance(func, OpOverload) and not kwargs and not any_autocast():
                    # A dispatch mode that calls it is past autograd; what is inside is not.
                    return operator_of(func).call(args, kwargs, below_autograd())
                if torch.is_grad_enabled() or forward_ad._current_level >= 0:
                    args = tuple([_lift_recorded(arg, level) for arg in args])
                    kwargs = {k: _lift_recorded(v, level) for k, v in kwargs.items()}
                with without_autograd():
                    return hop(func, types, args, kwargs)
            args, kwargs = lifted(args, level), {k: _lift(v, level) for k, v in kwargs.items()}
    elif isinstance(func, OpOverloadPacket):
        WRITERS[OpOverloadPacket](func, args, kwargs)
    return hop(func, types, args, kwargs)


# NOTE [operands of outer levels]
# Where autograd is recorded at a level, C++ would see the graphs and tangents of outer levels'
# tensors too and take them for the level's own. So these are lifted to the level first: their own
# autograd goes on inside of the tracer.
_DIFFERENTIABLE = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
)


def _lift(value: Any, level: TracerLevel) -> Any:
    if isinstance(value, Tracer):
        return level.lift(value) if value.dispatch_level.depth < level.depth else value
    if isinstance(value, torch.Tensor):
        if value.requires_grad or (level.forward and value.dtype in _DIFFERENTIABLE):
            return level.lift(value)
        return value
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):  # as ``new`` asks
        lifted = [_lift(item, level) for item in value]
        return lifted if isinstance(value, list) else tuple(lifted)
    return value


# Where it is not, C++ goes past autograd, and of a composite function some parts may be of operands
# of outer levels alone (the 0 in ``w[i, 0]``). Those that are differentiated out there are lifted
# too, so that every part meets the level, which records as it found things.
def _lift_recorded(value: Any, level: TracerLevel) -> Any:
    if isinstance(value, torch.Tensor):
        if isinstance(value, Tracer) and value.dispatch_level.depth >= level.depth:
            return value
        with DisableTorchFunctionSubclass():
            recorded = value.requires_grad or (
                forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None
            )
        return level.lift(value) if recorded else value
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        lifted = [_lift_recorded(item, level) for item in value]
        return lifted if isinstance(value, list) else tuple(lifted)
    return value


def lifted(args: Sequence[Any], level: TracerLevel) -> tuple[Any, ...]:
    return tuple([_lift(arg, level) for arg in args])


def refuse_escaped(func: Any, level: Level) -> None:
    """Raises the error for a tracer that is used after its transform has ended."""
    raise EscapedTracerError(messages.escaped(getattr(func, "__name__", str(func)), level))


def metadata(
    func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Answers from the wrapper itself."""
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def at_level_of(values: Sequence[Any]) -> AbstractContextManager[None]:
    """Context manager: as inside of the values' innermost level, and of none further in.

    For what C++ calls there, wherever the thread is: the formula of a node's tangent.
    """
    level = innermost_level(values)
    levels = tls.state.levels
    if level is not None:
        return nullcontext() if levels[-1:] == (level,) else using(level.inner)
    return using(levels[0].outer) if levels else nullcontext()


def current_tracer_level() -> TracerLevel | None:
    """The innermost active level of this thread whose values are tracers."""
    return _innermost(tls.state.levels)


def tracer_level_outside(level: TracerLevel) -> TracerLevel | None:
    """As ``current_tracer_level``, where a level was entered."""
    return _innermost(level.outer.levels)


def _innermost(levels: Sequence[Level]) -> TracerLevel | None:
    for level in reversed(levels):
        if isinstance(level, TracerLevel):
            return level
    return None
