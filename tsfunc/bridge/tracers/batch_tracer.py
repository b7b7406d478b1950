"""Batched tensors: the level of a vmap, and its tracers; ``batch_handlers`` adds the handlers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass

from tsfunc import hooks
from tsfunc.bridge import compiled
from tsfunc.bridge.tracers.draw_keys import CallKeys, as_seen_by_kernel
from tsfunc.bridge.tracers.generators import GeneratorStates
from tsfunc.bridge.tracers.nesting import tracer_of
from tsfunc.bridge.tracers.operators import TorchOperator, map_items
from tsfunc.bridge.tracers.torch_state import in_backward_formula, on_plain_tensors
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel, refuse_escaped
from tsfunc.bridge.tracers.user_queries import (
    caller_of_handlers,
    environment_of,
    forwards_call,
    suppress_guards_of,
)
from tsfunc.dispatch import DispatchKey, Operator, messages
from tsfunc.dispatch.keys import WIDTH
from tsfunc.dispatch.user_checks import computes_check
from tsfunc.errors import DataDependentError
from tsfunc.ops.compressed import LAYOUTS as _COMPRESSED
from tsfunc.ops.compressed import check_batch
from tsfunc.ops.registry import Args, Kwargs, Splitter
from tsfunc.ops.splitting import common_value, comparison_rows

_make_wrapper = torch.Tensor._make_wrapper_subclass
_strided = torch.strided
_Tensor = torch.Tensor
_shape_of = _Tensor.shape.__get__  # type: ignore[attr-defined]
_dtype_of = _Tensor.dtype.__get__  # type: ignore[attr-defined]
_device_of = _Tensor.device.__get__
_grad_fn_of = _Tensor.grad_fn.__get__  # type: ignore[union-attr]

_items_of = tuple.__getitem__
_WITHOUT_FIRST = slice(1, None)
_NUMBERS = frozenset({"scalar_tensor", "lift_fresh"})


class BatchLevel(TracerLevel):
    """The level of an active vmap.

    Attributes:
        randomness: the randomness mode of random operators.
        strict: True if no operator may be looped over, in this and in inner levels.
        axis_name: the name of the axis for collectives.
        first: the index of the first example in the whole call.
        generators: the initial states of torch's generators, for a call that runs in parts.
        random_keys: the keys of the call's random numbers, if examples draw as if alone.
        draw_count: the number of draws of each example: NOTE [draws by example] in ``draw_keys``.
        key_index: the index of ``key_bit``.
        kind: the class of its tracers.
        detaches_operands: True if the level's operators get plain tensors without their autograd
            graphs, as constants: NOTE [linear pullbacks] in ``linear_level``.
        lifts_factories: more than 0 while C++ runs the parts of an operator: tensors that they
            make to write into are the level's from the start.
        splitter: chooses between examples with different answers; None refuses them.
        spread_over: the levels of mesh axes that the axis continues over, the slowest first.
    """

    __slots__ = ("axis_name", "batch_size", "detaches_operands", "draw_count", "first",
                 "generators", "key_index", "kind", "lifts_factories", "random_keys", "randomness",
                 "splitter", "spread_over", "strict")  # fmt: skip

    def __init__(
        self,
        batch_size: int,
        randomness: str,
        name: str,
        strict: bool = False,
        first: int = 0,
        generators: GeneratorStates | None = None,
        keys: CallKeys | None = None,
    ) -> None:
        super().__init__(DispatchKey.Batch, name)
        self.batch_size = batch_size
        self.randomness = randomness
        self.strict = strict
        self.first = first
        self.generators = generators
        self.axis_name: Hashable = None
        self.random_keys = CallKeys() if keys is None and randomness == "split" else keys
        self.draw_count: Any = 0
        self.kind: type[BatchTracer] = BatchTracer.layouts[1]
        self.splitter: Splitter | None = None
        self.spread_over: tuple[Any, ...] = ()
        self.lifts_factories = 0
        self.detaches_operands = False
        self.key_index = self.depth * WIDTH + DispatchKey.Batch.priority

    def lift(self, value: torch.Tensor) -> torch.Tensor:
        value = self.lift_for_outer_traces(value)
        return wrap(value, None, self)

    def handles_factory(self, name: str, random: bool) -> bool:
        # A number that C++ makes a tensor of must stay a number, because its dtype has lower
        # priority.
        return random or (self.lifts_factories > 0 and name not in _NUMBERS)

    @property
    def in_backward_formula(self) -> bool:
        return in_backward_formula()

    def example_indices(self, device: torch.device) -> torch.Tensor:
        """Return the index of each example in the whole call, as a 1-dim int64 tensor."""
        return torch.arange(self.first, self.first + self.batch_size, device=device)

    def outside(self) -> AbstractContextManager[None]:
        return on_plain_tensors()

    @property
    def original(self) -> BatchLevel:
        """The level, or the level that this one is a duplicate of."""
        return self

    def duplicate(self, name: str) -> BatchLevel:
        """Return a level for the same batch, which a rule enters on its arguments."""
        return _DuplicateLevel(self, name)

    def random_key(self, generator: torch.Generator | None) -> torch.Tensor:
        """Return the call's key from a generator, as a value of the active outer levels."""
        assert self.random_keys is not None
        return as_seen_by_kernel(self.random_keys.key(generator))

    def next_draw(self) -> Any:
        """Count a draw; return the number before, an int or the physical value of a tensor."""
        drawn = self.draw_count
        if not isinstance(drawn, torch.Tensor):
            self.draw_count = drawn + 1
            return drawn
        value, bdim = drawn, None
        if isinstance(drawn, BatchTracer) and drawn.dispatch_level is self:
            value, bdim = drawn.value, drawn.bdim
        value = as_seen_by_kernel(value)
        self.draw_count = wrap(value + 1, bdim, self)
        return value

    @property
    def root(self) -> BatchLevel:
        return self

    def on_random_op(self, generator: torch.Generator | None) -> None:
        """Note that a random operator will draw from the generator; None is torch's own."""
        if self.generators is not None:
            self.generators.on_random_op(generator)


class _DuplicateLevel(BatchLevel):
    """A second level for the batch of another level, which keeps the draw counts."""

    __slots__ = ("level",)

    def __init__(self, level: BatchLevel, name: str) -> None:
        drawn, self.level = level.draw_count, level
        super().__init__(
            level.batch_size,
            level.randomness,
            name,
            level.strict,
            0,
            level.generators,
            level.random_keys,
        )
        self.splitter = level.splitter
        self.detaches_operands = level.detaches_operands
        self.axis_name = level.axis_name
        self.spread_over = level.spread_over
        self.draw_count = drawn

    @property
    def original(self) -> BatchLevel:
        return self.level.original

    def example_indices(self, device: torch.device) -> torch.Tensor:
        return self.level.example_indices(device)

    def next_draw(self) -> Any:
        return self.level.next_draw()

    @property
    def draw_count(self) -> Any:
        """The number of draws of each example, a value of the other level."""
        return self.level.draw_count

    @draw_count.setter
    def draw_count(self, drawn: Any) -> None:
        self.level.draw_count = drawn


class BatchTracer(Tracer):
    """A tensor with one value for each example, stored in a physical ``value``.

    ``bdim`` is the batch dim of ``value``, or None if all examples have the same value.
    """

    __slots__ = ()

    value: torch.Tensor
    bdim: int | None
    dispatch_level: BatchLevel
    layouts: ClassVar[tuple[type[BatchTracer], type[BatchTracer]]]

    def aliased_here(self) -> BatchTracer:
        return wrap(self.value, self.bdim, self.dispatch_level)

    def detached_here(self) -> BatchTracer:
        return wrap(self.value.detach(), self.bdim, self.dispatch_level)

    @forwards_call
    def read(self, name: str) -> Any:
        if self.bdim is None:
            return getattr(self.value, name)()
        return read_value(self, name)

    def describe(self) -> str:
        from tsfunc.bridge.tracers.texts import text_of, value_text

        level = self.dispatch_level
        value = value_text(self.value)
        if not level.alive:
            shown = f": {value}" if self.bdim is None else ""
            return f"BatchTracer(of {level.name}, which has ended{shown})"
        dims = "the same for each example" if self.bdim is None else f"batch dim {self.bdim}"
        return f"BatchTracer({text_of(self)} of {level.name}, {dims}: {value})"


def unwrap_ended(args: Args, kwargs: Kwargs) -> tuple[Any, Any] | None:
    """Return the arguments with the values of tracers that outlive their vmap.

    NOTE [values that outlive a vmap]
    A value that all examples share is a plain tensor under a ``vmap`` alone. Under a derivative
    inside of the vmap it is a tracer, because autograd records at the level. After the vmap has
    ended, such a tracer stands for its value. The handlers do not look for these tracers: a call
    on a tracer of an ended level is refused, and then repeated with the values.

    Returns:
        The arguments, or None if a tracer of an ended level is batched, or none is there.
    """
    changed = False

    def value(arg: Any) -> Any:
        nonlocal changed
        while isinstance(arg, BatchTracer) and not arg.dispatch_level.alive:
            if arg.bdim is not None:
                raise LookupError
            changed, arg = True, arg.value
        return arg

    try:
        values = [map_items(value, arg) for arg in args]
        named = {name: map_items(value, arg) for name, arg in kwargs.items()}
    except LookupError:
        return None
    return (values, named) if changed else None


def update_history(value: Any) -> None:
    """Update the history that autograd has of a view, before a write to it.

    After a write to its base, or to another view of it, torch takes a view for a leaf that requires
    gradients, and refuses a second write, until its ``grad_fn`` is read.
    """
    if isinstance(value, _Tensor):
        with DisableTorchFunctionSubclass():
            if value.requires_grad:
                _grad_fn_of(value)


def wrap_in_python(value: torch.Tensor, bdim: int | None, level: BatchLevel) -> BatchTracer:
    """Return the tracer of a physical value, at the value's storage offset.

    Forward mode compares the offsets of primals and tangents.
    """
    tracer: Any
    if type(value) is _Tensor and bdim is not None and value.layout is _strided:
        offset = value.storage_offset()
        # Positional arguments parse faster; the None is the memory format.
        shape: Any = value.shape
        if bdim == 0:
            # With the batch dim outermost in a contiguous value, the examples are contiguous too.
            # An empty batch counts as contiguous whatever its strides are, and needs its strides.
            plain = shape[0] and value.is_contiguous() and not offset
            shape = _items_of(shape, _WITHOUT_FIRST)  # a slice of a torch.Size is slower
            strides = None if plain else value.stride()[1:]
        else:
            shape = shape[:bdim] + shape[bdim + 1 :]
            strides = value.stride()
            strides = strides[:bdim] + strides[bdim + 1 :]
        tracer = _make_wrapper(
            level.kind, shape, strides, offset or None, None, value.dtype, _strided, value.device
        )
    else:
        tracer = _wrapper(value, bdim, level)
    tracer.dispatch_level = level
    tracer.bdim = bdim
    tracer.value = value
    return tracer


_handlers = compiled.load()
# The compiled handlers make tracers too; ``batch_handlers`` sets them up before there are levels.
wrap: Callable[..., BatchTracer] = wrap_in_python if _handlers is None else _handlers.wrap


def _wrapper(value: torch.Tensor, bdim: int | None, level: BatchLevel) -> Any:
    # Bypass the handlers, because a value may be a tracer itself.
    with DisableTorchFunctionSubclass():
        shape: Any = _shape_of(value)
        if type(value) is not _Tensor and environment_of(_sizes_and_strides(value)) is not None:
            return _symbolic_wrapper(value, bdim, level)
        layout, dtype, device = value.layout, _dtype_of(value), _device_of(value)
        strides: Any = None
        offset: Any = _Tensor.storage_offset(value) if layout is _strided else None
        if type(offset) is int and offset == 0:
            offset = None
        if layout is _strided and not (
            not bdim
            and offset is None
            and (bdim is None or shape[0] != 0)
            and _Tensor.is_contiguous(value)
        ):
            strides = _Tensor.stride(value)
    if bdim is not None:
        shape = shape[:bdim] + shape[bdim + 1 :]
        if strides is not None:
            strides = strides[:bdim] + strides[bdim + 1 :]
    if layout in _COMPRESSED:  # NOTE [compressed tracers]
        check_batch(value)
        layout = _strided
    return _make_wrapper(level.kind, shape, strides, offset, None, dtype, layout, device)


def _sizes_and_strides(value: torch.Tensor) -> tuple[Any, ...]:
    return (*value.shape, *(value.stride() if value.layout is _strided else ()))


def _symbolic_wrapper(value: torch.Tensor, bdim: int | None, level: BatchLevel) -> Any:
    """Return the wrapper of a value with symbolic sizes or strides, without guards."""
    shape: Any = value.shape
    strided = value.layout is _strided
    strides = value.stride() if strided else None
    offset = _Tensor.storage_offset(value) if strided else None
    if bdim is not None:
        shape = shape[:bdim] + shape[bdim + 1 :]
        strides = None if strides is None else strides[:bdim] + strides[bdim + 1 :]
    with suppress_guards_of(_sizes_and_strides(value)):
        return _make_wrapper(
            level.kind, shape, strides, offset, None, value.dtype, value.layout, value.device,
        )  # fmt: skip


_TESTS = frozenset({"__bool__", "is_nonzero"})


def read_value(tracer: BatchTracer, name: str) -> Any:
    """Return the Python value of a data read (``item``) for a batched tracer."""
    level = tracer.dispatch_level
    if level.splitter is None:
        # The item of a bool is the truth of its value.
        is_test = name in _TESTS or (name == "item" and tracer.dtype is torch.bool)
        if is_test and tracer.numel() == 1:
            for outcome_of in hooks.outcome_of_check.functions:
                outcome = outcome_of(tracer)
                if outcome is not None:
                    return outcome
        in_check = computes_check(caller_of_handlers())
        raise DataDependentError(messages.read_of_batch(name, level, in_check=in_check))
    if not level.batch_size:
        raise DataDependentError(messages.read_of_empty_batch(name, level))
    bdim, value = tracer.bdim, tracer.value
    assert bdim is not None
    if type(value) is torch.Tensor and value.numel() == level.batch_size:
        answer = common_value(value, name)
        if answer is not None:
            return answer
    with level.restored():
        if tracer.numel() == 1 or name in ("tolist", "numpy", "__array__"):
            level.splitter.agree(comparison_rows(value, bdim, name))
        # One result for all; it raises if the tensors have no single value.
        return getattr(tracer.value.select(bdim, 0), name)()


_SEQUENCES = frozenset({list, tuple, torch.Size})
_INT = frozenset({int})
NO_TENSORS = frozenset({int, float, bool, slice, type(None), type(Ellipsis)})

# The classes of batched tensors whose attributes are read without a hook (``tracer_hooks``).
TRACERS: set[type] = set()

Unwrapped = tuple[BatchLevel | None, list[Any], list[Any]]


def unwrap_args(args: Sequence[Any], current: BatchLevel | None = None) -> Unwrapped:
    """Return the level of a call, the values of its arguments, and their kinds.

    Lists and tuples with tensors are unwrapped item by item. Tracers of other levels are values.

    Args:
        current: the level; by default that of the innermost tracer.

    Returns:
        The level, or None if no tracer of :data:`TRACERS` is among the arguments, or if one level
        replaces another; the values; and the kinds. The kind of a tracer of the level is its batch
        dim, or None if all examples have the same value. That of a list with other items than ints
        is a tuple: its class, and the kinds of its items, or one kind if all are equal. Any other
        kind is a class. The kinds are the arguments' part of the key of a call plan
        (``call_plans``).

    Raises:
        EscapedTracerError: ``current`` is given, and a tracer belongs to a level inside of it.
    """
    level = current
    values: list[Any] = []
    kinds: list[Any] = []
    for arg in args:
        kind: Any = type(arg)
        if kind in TRACERS or (current is not None and isinstance(arg, BatchTracer)):
            level_of_arg = arg.dispatch_level
            if level_of_arg is level or level is None:
                level = level_of_arg
                kinds.append(arg.bdim)
                values.append(arg.value)
                continue
            if current is None:
                return _unwrap_innermost(args)
            if level_of_arg.depth >= current.depth:
                refuse_escaped("an operator", level_of_arg)
        elif kind in _SEQUENCES or (current is not None and isinstance(arg, list | tuple)):
            items = set(map(type, arg))
            if not items <= NO_TENSORS:
                inner = unwrap_args(arg, current)
                if not inner[2]:  # one level replaces another
                    return inner
                kind = (kind, *_without_repeats(inner[2]))
                if inner[0] is not None and (
                    current is None or any(isinstance(item, Tracer) for item in arg)
                ):
                    if level is not None and inner[0] is not level:
                        return _unwrap_innermost(args)
                    level, arg = inner[0], inner[1]
            elif not items <= _INT:
                kind = (kind, frozenset(items))
        values.append(arg)
        kinds.append(kind)
    return level, values, kinds


def _without_repeats(kinds: list[Any]) -> list[Any]:
    """Return the kinds of a list's items, or one for all: then lists of any length have one key."""
    return kinds[:1] if kinds.count(kinds[0]) == len(kinds) else kinds


def bdims_of(kinds: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Return the batch dims of unwrapped arguments, as batching rules take them."""
    return [
        kind if type(kind) is int else _bdims_of_items(kind, value) if type(kind) is tuple else None
        for kind, value in zip(kinds, values, strict=True)
    ]


def _bdims_of_items(kind: tuple[Any, ...], values: Sequence[Any]) -> list[Any] | None:
    kinds = kind[1:]
    if type(kinds[0]) is frozenset:
        return None
    if len(kinds) == 1:
        kinds = kinds * len(values)
    bdims = bdims_of(kinds, values)
    return None if all(bdim is None for bdim in bdims) else bdims


def _unwrap_innermost(args: Sequence[Any]) -> Unwrapped:
    """Unwrap arguments of several levels."""
    levels = set(_levels_of(args))
    innermost = max(levels, key=lambda level: level.depth)
    if any(level.depth == innermost.depth for level in levels - {innermost}):
        return None, [], []
    return unwrap_args(args, innermost)


def _levels_of(args: Sequence[Any]) -> Iterator[BatchLevel]:
    for arg in args:
        if type(arg) in TRACERS:
            yield arg.dispatch_level
        elif type(arg) in _SEQUENCES:
            yield from _levels_of(arg)


def detached_operand(value: Any) -> Any:
    """Return an argument as a level that detaches operands uses it."""
    if not isinstance(value, torch.Tensor) or isinstance(value, Tracer) or not value.requires_grad:
        return value
    with DisableTorchFunction():  # a trace around the level would read the tensor with its graph
        return value.detach()


def unwrap(arg: Any, level: BatchLevel) -> tuple[Any, Any]:
    """Return the value and the batch dim of one argument: :func:`unwrap_args`."""
    _, values, kinds = unwrap_args((arg,), level)
    return values[0], bdims_of(kinds, values)[0]


def rewrap(
    op: Operator, level: BatchLevel, args: Args, kwargs: Kwargs, out: Any, out_dims: Any
) -> Any:
    """Wrap the results of a rule in tracers; an in-place operator returns its argument."""
    if isinstance(out, torch.Tensor):
        if isinstance(op, TorchOperator) and op.inplace:
            args[0].bdim = out_dims
            return op.written_argument(args, kwargs)
        return wrap_result(out, out_dims, level, args)
    if isinstance(out, list | tuple):
        wrapped = _rewrap_items(out, out_dims, level, args)
        return wrapped if isinstance(out, list) else tuple(wrapped)
    return out


def _rewrap_items(items: Sequence[Any], dims: Any, level: BatchLevel, args: Args) -> list[Any]:
    """Return results as tracers, also in nested lists; ``dims`` has the dim of each, or one."""
    every = not isinstance(dims, list | tuple)
    return [
        _rewrap_one(item, dims if every else dims[i], level, args) for i, item in enumerate(items)
    ]


def _rewrap_one(item: Any, bdim: Any, level: BatchLevel, args: Args) -> Any:
    if isinstance(item, torch.Tensor):
        return wrap_result(item, bdim, level, args)
    if isinstance(item, list | tuple):
        return _rewrap_items(item, bdim, level, args)
    return item


def wrap_result(value: torch.Tensor, bdim: int | None, level: BatchLevel, args: Args) -> Any:
    """Return the tracer of a result: the argument's if the operator returned an argument itself."""
    itself = tracer_of(value, args, level)
    return itself if itself is not None and itself.bdim == bdim else wrap(value, bdim, level)
