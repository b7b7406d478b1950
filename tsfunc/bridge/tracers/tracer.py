"""Tracers: tensors that represent a value of a level, and the two handlers that calls go through.

The function handler is ``__torch_function__``: user code calls torch on a tracer. The call
continues into C++ with the subclass's override disabled for that one hop. If no autograd is
recorded at the tracer's level, torch's autograd keys are excluded, so that composite operators
(``linear``, ``cross_entropy``) arrive whole at the dispatch handler.

The dispatch handler is ``__torch_dispatch__``: it receives any operator with its schema, including
operators that C++ and the autograd engine call. The handler looks up the operator's row and
dispatches.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, cast

import torch
from torch._C import (
    DisableTorchFunctionSubclass,
    _DisableTorchDispatch,
    _functorch,
    _skip_one_hop_torch_function,
)
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import forward_ad
from torch.overrides import resolve_name

from tsfunc import pytrees
from tsfunc.bridge.tracers.function_registry import METHODS, WRITERS
from tsfunc.bridge.tracers.modes_below import pop_modes, push_below_modes
from tsfunc.bridge.tracers.operators import C_FUNCTIONS, operator_of
from tsfunc.bridge.tracers.torch_state import (
    RestoredTorchState,
    TorchState,
    any_autocast,
    autocast_of_the_call,
    below_autograd,
    in_dispatch_modes,
    is_autocasting,
    tangents_enabled,
    with_views,
    without_autograd,
    without_tangents,
)
from tsfunc.bridge.tracers.user_queries import suppress_guards_of
from tsfunc.dispatch import DispatchKey, Level, messages
from tsfunc.dispatch.recording import run_as
from tsfunc.dispatch.state import tls
from tsfunc.errors import DataDependentError, EscapedTracerError
from tsfunc.ops.registry import Args, Kwargs
from tsfunc.user_code import fold_traceback

T = TypeVar("T", bound="Tracer")
Entered = TypeVar("Entered", bound="TracerLevel")
NO_KWARGS: Final[Mapping[str, Any]] = {}

# Numbers levels and saved-tensor hooks in the order they are made.
serials: Final = itertools.count(1)


class BackwardPass(NamedTuple):
    """A backward pass that the user's code starts.

    Attributes:
        results: the tensors that it starts from.
        inputs: the tensors that it computes derivatives by; None for all leaves.
        accumulates: True if it adds the derivatives to the ``.grad`` of the tensors.
        frees: True if it frees the graph.
    """

    results: Sequence[Any]
    inputs: Sequence[Any] | None
    accumulates: bool
    frees: bool


class TracerLevel(Level):
    """A level whose values are tracers: the active transform of a key.

    Args:
        key: the key whose kernels handle operators on the level's tracers.
        name: the name of the transform in error messages; by default that of the key.
        modal: if True, the kernels also get calls without any of the level's tracers.

    Raises:
        DispatchError: the level is entered twice, or under another state than it was made under.

    Example:
        >>> import torch
        >>> from tsfunc import Tracer, TracerLevel, dispatch
        >>> Twice = dispatch.DispatchKey.define("doc_Twice", above=dispatch.DispatchKey.Batch)
        >>> class Boxed(Tracer):
        ...     inside: torch.Tensor
        >>> @dispatch.register_fallback(Twice)
        ... def twice(op, args, kwargs):
        ...     args = [arg.inside if isinstance(arg, Boxed) else arg for arg in args]
        ...     return Boxed.make(inside=op(*args, **kwargs) * 2)
        >>> with TracerLevel(Twice) as level:
        ...     out = torch.neg(Boxed.make(level=level, inside=torch.ones(2)))
        >>> out.inside
        tensor([-2., -2.])

    Corresponds to a ``Trace`` of JAX.

    Attributes:
        autograd: the number of transforms that record autograd on this level's own tracers; while
            it is 0, calls skip torch's autograd on their way in.
        forward: the number of forward-mode transforms that attach tangents to this level's
            tracers.
        outside_roots: the function that runs at the level, and its arguments; a tensor that they
            reach is from outside of the function.
        serial: a number that increases with each new level.
        functorch_depth: the number of torch.func transforms outside of it.
        torch_state: the captured part of torch's thread-local state.
        above_modes: True if it put the user's modes below itself: NOTE [modes below levels].
    """

    __slots__ = (
        "above_modes", "autograd", "forward", "functorch_depth", "outside_roots", "serial",
        "torch_state",
    )  # fmt: skip

    def __init__(self, key: DispatchKey, name: str | None = None, *, modal: bool = False) -> None:
        super().__init__(key, name, modal=modal)
        self.autograd = 0
        self.outside_roots: Sequence[Any] = ()
        self.serial = next(serials)
        self.forward = 0
        self.torch_state = TorchState()
        if not tangents_enabled():
            # In a method of an ``autograd.Function`` C++ pushes outer tangents by the class's own
            # ``jvp``: a jvp inside the level must push only its own tangents.
            self.restores += (without_tangents,)
        self.functorch_depth = _functorch.maybe_current_level() or 0
        self.above_modes = False

    def __enter__(self: Entered) -> Entered:
        super().__enter__()
        self.above_modes = in_dispatch_modes() and push_below_modes()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.above_modes:
            pop_modes()
        super().__exit__(*exc)

    @property
    def root(self) -> TracerLevel:
        """The transform's own level, for a level that replaces it (``subsets``)."""
        return self

    def lift(self, value: torch.Tensor) -> torch.Tensor:
        """Return this level's tracer of a tensor from outside."""
        raise TypeError(f"{self.name}: {type(self).__name__} does not say how it lifts a tensor.")

    def wrap_for_inner_levels(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor from outside of all levels as the levels inside of this one wrap it."""
        return value

    def lift_for_outer_traces(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor as this level wraps it: an outer trace reads it as an input.

        Otherwise a call on such tensors alone would run while the program is traced.
        """
        if not isinstance(value, Tracer):
            for level in self.outer.levels:
                if isinstance(level, TracerLevel):
                    value = level.wrap_for_inner_levels(value)
        return value

    def handles_factory(self, name: str, random: bool) -> bool:
        """True if the level handles a factory function, or a random function.

        The innermost level that returns True gets the call.
        """
        return False

    def wrap_factory_result(self, result: Any) -> Any:
        """Return the result of a factory function or a random function, as the function gets it."""
        return result

    def on_backward_pass(self) -> None:
        """Note that a backward pass runs while the level is active."""

    def allows_backward_outside(self, call: BackwardPass) -> bool:
        """True if a backward pass at the level's tensors may reach tensors from outside.

        The level gets every pass that the user's code starts on its tensors before it runs.
        """
        return False

    def guard(self) -> AbstractContextManager[Any]:
        if self.restores:
            return _RestoredState(self.torch_state(), super().guard())
        return self.torch_state()


# Classes of tracers with a hook, and the functions that see their calls first (``tracer_hooks``).
HOOKED: dict[type, Callable[..., Any]] = {}


def sync(value: Any) -> None:
    """Update a tracer by its hook, before a use other than a call."""
    if type(value) in HOOKED and value.dispatch_level.alive:
        value.hook.sync()


def sync_all(tree: Any) -> None:
    """Sync the tensors of a pytree."""
    for leaf in pytrees.leaves_of(tree):
        sync(leaf)


class _RestoredState:
    """Combines the guards of ``dispatch.on_capture``, and torch's state inside them."""

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
    """The base class of tensors that represent values of a level.

    A subclass keeps its values in attributes of its own and is made by :meth:`make`. Every torch
    operator called on one is dispatched with the bit of its level in the key set; ``register(op,
    key)`` and ``register_fallback(key)`` define the kernels.

    Example: the docstring of :class:`TracerLevel`, and ``examples/new_transform.py``.

    Corresponds to a ``Tracer`` of JAX.
    """

    # With the memory layout of a plain tensor: an existing tensor can become a tracer
    # (``writes``).
    __slots__ = ()

    # A class attribute, because the dispatcher reads it once for each type; every tracer has its
    # own value.
    dispatch_level: TracerLevel = cast(Any, None)

    # The classes that an existing tensor may become: one with the layout of a plain tensor, and
    # one with the layout of a tracer with slots (``promotion``). None: the tracer's own class.
    layouts: ClassVar[tuple[type[Tracer], type[Tracer]] | None] = None

    @classmethod
    def make(
        cls: type[T],
        like: torch.Tensor | None = None,
        level: Level | None = None,
        **attributes: Any,
    ) -> T:
        """Return a tracer with the shape, strides, dtype and device of a tensor.

        Args:
            like: the tensor; by default the first of the attributes.
            level: the level; inside a kernel by default the level that the kernel runs for.
            attributes: the values of the tracer.

        Raises:
            TypeError: ``like`` or ``level`` is missing or has a wrong type.
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
        with suppress_guards_of(shape):
            tracer = torch.Tensor._make_wrapper_subclass(
                cls, shape, like.stride(), like.storage_offset(), dtype=like.dtype,
                device=like.device,
            )  # fmt: skip
        tracer.dispatch_level = level
        for name, value in attributes.items():
            setattr(tracer, name, value)
        return tracer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return function_handler(func, types, args, kwargs or NO_KWARGS)
        except EscapedTracerError as error:
            fold_traceback(error, str)  # the user called torch, not this package
            raise

    # torch's annotation is for classes without subclasses, which are called without the operator.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return operator_of(func).call(args, kwargs or NO_KWARGS, True)

    def detached_here(self) -> torch.Tensor:
        """Return the result of the user's ``detach()``, without graphs of this and outer levels.

        Autograd's own ``aten::detach`` at a tracer's level is different: it must keep the graphs
        of outer levels.
        """
        raise TypeError(
            f"{type(self).__name__} does not define detached_here(), the result of detach()."
        )

    def aliased_here(self) -> Any:
        """Return another tracer for the same values, without the graph of its own level."""
        raise TypeError(f"{type(self).__name__} does not define aliased_here().")

    def is_from_outside(self) -> bool:
        """True if the values are from outside, so the transformed function may not write them."""
        return False

    def base_identity(self) -> Any:
        """Return an object that identifies the tensor which the tracer is a view of, or itself.

        None if the tracer's value decides.
        """
        return None

    def base_here(self) -> Tracer | None:
        """Return a tracer of the tensor which the tracer is a view of; None if it is not a view.

        The function is for levels at which a base may have no object.
        """
        return None

    def is_lazily_conjugated(self) -> bool:
        """True if the value is lazily conjugated: C++ can't read this from the tracer."""
        value = getattr(self, "value", None)
        if isinstance(value, Tracer):
            return value.is_lazily_conjugated()
        return isinstance(value, torch.Tensor) and value.is_conj()

    def read(self, name: str) -> Any:
        """Return the result of a method that reads data as Python or NumPy values (``item``)."""
        raise DataDependentError(
            f"{self.dispatch_level.name}: {name} needs the data of a tensor that stands for "
            f"others. Use tensor operations instead."
        )

    def describe(self) -> str:
        """Return the text of ``repr``."""
        return f"{type(self).__name__}({self.dispatch_level.name}, shape={tuple(self.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self.describe()} stands for a value inside of {self.dispatch_level.name} and can't "
            f"be pickled or copied; return it from the transformed function first."
        )


class SlottedTracer(Tracer):
    """A tracer with slots, which are read twice as fast: for classes with many tracers."""

    __slots__ = ("bdim", "dispatch_level", "value")


_ATTRIBUTES: Any = vars(torch.Tensor)["__dict__"]


def attributes_of(tracer: Tracer) -> dict[str, Any]:
    """Return the attributes by which a tracer stands for a value, and those that users set."""
    if not isinstance(tracer, SlottedTracer):
        return dict(_ATTRIBUTES.__get__(tracer))
    slots = SlottedTracer.__slots__
    return {name: getattr(tracer, name) for name in slots if hasattr(tracer, name)}


def innermost_level(values: Sequence[Any]) -> TracerLevel | None:
    """Return the innermost level of the tracers in nested lists, tuples and dicts, or None."""
    innermost: TracerLevel | None = None
    for value in values:
        if isinstance(value, Tracer):
            level: TracerLevel | None = value.dispatch_level
        elif isinstance(value, list | tuple):
            level = innermost_level(value)
        elif isinstance(value, dict):
            level = innermost_level(list(value.values()))
        else:
            continue
        if level is None or level is innermost:
            continue
        is_deeper = innermost is None or level.depth > innermost.depth
        if is_deeper or not level.alive or (innermost is not None and level.within(innermost)):
            innermost = level
    return innermost


_skip_handler: Callable[..., Any] = _skip_one_hop_torch_function


def call_below_function(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call a function of torch without the ``__torch_function__`` of its arguments.

    torch frees a list of arguments one time too many, so they are passed as a tuple.
    """
    return _skip_handler(func, types, tuple(args), kwargs)


# The types of C functions; a Python function calls others, which reach the handlers again.
C_TYPES = (
    *C_FUNCTIONS, type(torch.Tensor.__add__), type(torch.Tensor.__getitem__), OpOverload,
)  # fmt: skip

Method = Callable[[Callable[..., Any], Any, Sequence[Any], Mapping[str, Any]], Any]


def function_handler(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Handle a call of ``func`` by user code on a tracer."""
    if len(types) > 1:
        for kind in types:
            if _has_handler(kind):
                return _handle_foreign_class(kind, func, types, args, kwargs)
    return _dispatch_function(func, types, args, kwargs)


@functools.lru_cache(maxsize=256)
def _has_handler(kind: type) -> bool:
    """True for a class of another library with a ``__torch_function__`` of its own."""
    default: Any = torch.Tensor.__torch_function__
    handler = getattr(kind.__torch_function__, "__func__", None)  # type: ignore[attr-defined]
    return not issubclass(kind, Tracer) and handler is not default.__func__


def _handle_foreign_class(kind: Any, func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Handle a call on tracers and a tensor of a class with its own handler.

    A rule calls operators on values, and a class may implement few of them: the quantized weights
    of torchao implement ``linear`` and not the transposition in its rule. The class then takes the
    call itself, on the tracers.
    """
    try:
        return _dispatch_function(func, types, args, kwargs)
    except (NotImplementedError, TypeError):
        out = kind.__torch_function__(func, types, args, kwargs)
        if out is NotImplemented:
            raise
        return out


def _dispatch_function(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    state = tls.state
    remap_args = state.remap_args
    if remap_args is not None:
        remapped = remap_args(func, args, kwargs)
        if remapped is not None:
            return func(*remapped[0], **remapped[1])
    if HOOKED:
        for kind in types:
            if kind in HOOKED:
                return HOOKED[kind](func, types, args, kwargs)
    method = METHODS.get(func)
    if method is not None:
        if state.recorder is None or method is metadata:
            out = method(func, types, args, kwargs)
        else:
            out = _run_recorded(method, func, types, args, kwargs)
        if out is not NotImplemented:
            return out
    return call_torch(func, types, args, kwargs)


def _run_recorded(method: Method, func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run a function rule of the stage METHOD for ``explain``."""
    level = innermost_level((*args, *kwargs.values()))
    if level is None:
        return method(func, types, args, kwargs)
    name = resolve_name(func) or getattr(func, "__name__", repr(func))
    return run_as(name, level, method, func, types, args, kwargs, how="function rule")


# Operators declare writes in their schemas (``writes``).
def _prepare_write(func: Any, args: Args, kwargs: Kwargs) -> None:
    if isinstance(func, OpOverload):
        op = operator_of(func)
        if not op.written and not op.out_names:
            return
        prepare = WRITERS.get(OpOverload)
    else:
        prepare = WRITERS.get("out" if "out" in kwargs else func)
    if prepare is not None:
        prepare(func, args, kwargs)


def call_torch(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call torch from the function handler, past this check once, and past autograd if possible."""
    if is_autocasting():
        with autocast_of_the_call():
            return _call_torch(func, types, args, kwargs)
    return _call_torch(func, types, args, kwargs)


def _call_torch(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(func, C_TYPES):
        level = innermost_level((*args, *kwargs.values()))
        if level is not None:
            if not level.alive:
                refuse_escaped(func, level)
            if (_functorch.maybe_current_level() or 0) > level.functorch_depth:
                # A torch.func transform inside the level must see the call first.
                return call_below_function(func, types, args, kwargs)
            _prepare_write(func, args, kwargs)
            unrecorded = not level.autograd or torch.is_inference_mode_enabled()
            if isinstance(func, OpOverload):
                below = below_autograd()
                if (below or (unrecorded and not kwargs)) and not any_autocast():
                    # A dispatch mode's handler is below autograd; values inside the tracers are
                    # not. The mode may be decomposing the operator, and must not get it again.
                    # A random operator must reach active levels without arguments too.
                    op = operator_of(func)
                    if below or not op.random:
                        return op.call(args, kwargs, below)
            if unrecorded:
                if torch.is_grad_enabled() or forward_ad._current_level >= 0:
                    args = tuple([lift_where(x, level, is_recorded_outside) for x in args])
                    kwargs = {
                        k: lift_where(v, level, is_recorded_outside) for k, v in kwargs.items()
                    }
                with without_autograd():
                    return call_below_function(func, types, args, kwargs)
            args = tuple([lift_where(x, level, needs_lift) for x in args])
            kwargs = {k: lift_where(v, level, needs_lift) for k, v in kwargs.items()}
    elif isinstance(func, OpOverloadPacket):
        WRITERS[OpOverloadPacket](func, args, kwargs)
    return call_below_function(func, types, args, kwargs)


L = TypeVar("L", bound=TracerLevel)


# NOTE [operands of outer levels]
# If autograd is recorded at a level, C++ would also see the graphs and tangents of outer levels'
# tensors, and take them for the level's own. Such tensors are therefore lifted to the level first:
# their own autograd continues inside the tracer.
def lift_where(value: Any, level: L, needs: Callable[[torch.Tensor, L], bool]) -> Any:
    """Return an argument in which the tensors that need it are lifted to a level.

    Args:
        value: the argument; lists and tuples are lifted item by item.
        needs: True for a tensor that is to be lifted, called as ``needs(tensor, level)``.
    """
    if isinstance(value, torch.Tensor):
        return level.lift(value) if needs(value, level) else value
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):  # ``new`` needs it
        lifted = [lift_where(item, level, needs) for item in value]
        return lifted if isinstance(value, list) else tuple(lifted)
    return value


def needs_lift(value: torch.Tensor, level: TracerLevel) -> bool:
    """True for an operand of an outer level while autograd is recorded at this level."""
    if isinstance(value, Tracer):
        return value.dispatch_level.depth < level.depth
    if value.requires_grad:
        return True
    return level.forward > 0 and (value.dtype.is_floating_point or value.dtype.is_complex)


# If no autograd is recorded at the level, C++ skips autograd, and some parts of a composite
# function may have only operands of outer levels (the 0 in ``w[i, 0]``). Operands that are
# differentiated at outer levels are lifted too, so that every part reaches the level, which
# records in the autograd state that it captured.
def is_recorded_outside(value: torch.Tensor, level: TracerLevel) -> bool:
    """True for an operand that an outer level differentiates."""
    if isinstance(value, Tracer) and value.dispatch_level.depth >= level.depth:
        return False
    with DisableTorchFunctionSubclass():
        if value.requires_grad or forward_ad._current_level < 0:
            return value.requires_grad
        with with_views(), _DisableTorchDispatch():  # modes must not get unpack_dual's alias
            return forward_ad.unpack_dual(value).tangent is not None


def refuse_escaped(func: Any, level: Level) -> None:
    """Raise the error for a tracer that is used after its transform has ended."""
    raise EscapedTracerError(messages.escape_message(getattr(func, "__name__", str(func)), level))


def metadata(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Answer from the wrapper tensor itself."""
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
