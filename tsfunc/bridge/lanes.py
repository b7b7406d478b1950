"""Lanes: some of a vmap's examples, run by themselves.

NOTE [lanes]
A branch or a loop's body is to run on those examples alone that take it. These examples (lanes) are
a batch of their own: a :class:`LaneLevel` stands in the place of the vmap's level while the body
runs, at the same depth, with fewer examples. What the body touches of the whole batch's tensors is
taken over by ``index_select`` of the physical value, whether it was passed in or closed over: door
1 has the arguments of the body's calls looked at before anything else. The results of the parts are
put together by one ``cat`` and one ``index_select``. A lane that is left alone needs no batch:
where nothing is recorded at the level, its tensors are taken over as plain ones, and its steps cost
what those of a loop without vmap cost.

What happens to physical values is recorded by the autograd of the levels outside as any operator
is. At the vmap's own level, and at levels inside of it, whose tracers have the vmap's tracers for
values, taking over is a linear map, and an ``autograd.Function`` of its own: NOTE [linear maps].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, Final

import torch
from torch._C import DisableTorchFunction
from torch.autograd import Function

from tsfunc import pytrees
from tsfunc.bridge.attributes import OF_TYPES
from tsfunc.bridge.autograd import outside_graph
from tsfunc.bridge.batch_tracer import BatchLevel, BatchTracer, MadeTracer, wrap
from tsfunc.bridge.custom_function import torch_apply
from tsfunc.bridge.grad_level import GradTracer
from tsfunc.bridge.reruns import same_again
from tsfunc.bridge.split_level import StartAnew
from tsfunc.bridge.tracer import (
    METHODS,
    StandIn,
    Tracer,
    TracerLevel,
    seen_here,
    settle,
)
from tsfunc.dispatch.state import Level, capturing, tls, using
from tsfunc.ops.splitting import groups_of


class NeedsAll(BaseException):
    """Internal: a body that runs on lanes is given up, as it asks for the other examples' values.

    Who made the lanes runs it on all examples instead. No ``Exception``: the user's function is
    not to catch it.
    """

    def __init__(self, level: BatchLevel) -> None:
        super().__init__(f"{level.name} is needed whole (internal to tsfunc; should be caught)")
        self.level = level


class LaneLevel(BatchLevel, StandIn):
    """Some examples of a vmap, in the place of its level.

    Attributes:
        parent: the level that the examples are taken from.
        index: their numbers there, a tensor of outside of the level.
        alone: whether it is one lane, of which tensors are taken over as plain ones.
    """

    __slots__ = ("_composed", "_whole", "alone", "index", "parent")

    def __init__(self, parent: BatchLevel, index: torch.Tensor, alone: bool = False) -> None:
        self.stand_in_for(parent)
        self.parent = parent
        self.index = index
        self._whole = parent.whole
        self.batch_size = index.shape[0]
        self.inner = parent.inner.with_levels((*parent.outer.levels, self))
        self._kernel_states = {}
        self.alone = alone and _serves_plain(parent)
        self._composed = {id(parent): index}
        self.kind = MadeTracer
        self.born = 0
        self.lifts_factories = 0
        if parent.whole.courses is None and self.whole.randomness == "split":
            self.whole.courses = {}
        self.splitter = self if self.whole.splitter is not None else None

    @property
    def alive(self) -> bool:  # type: ignore[override]
        """As long as the vmap: backward passes run after the body has."""
        return self.whole.alive

    @property
    def whole(self) -> BatchLevel:
        return self._whole

    @property
    def root(self) -> TracerLevel:
        return self.whole

    def index_in(self, level: BatchLevel) -> torch.Tensor:
        """The lanes' numbers among the examples of a level that they come from."""
        known = self._composed.get(id(level))
        if known is None:
            assert isinstance(self.parent, LaneLevel)
            known = self.parent.index_in(level).index_select(0, self.index)
            self._composed[id(level)] = known
        return known

    @property
    def numbers(self) -> torch.Tensor | None:
        """The lanes' numbers in the whole as a plain tensor, None for all in their places.

        Where the lanes differ among the examples of a vmap outside, each lane stands for the
        example in its place in the parent, or for none.
        """
        outer = self.parent.numbers if isinstance(self.parent, LaneLevel) else None
        if isinstance(self.index, Tracer):
            return outer
        return self.index if outer is None else outer.index_select(0, self.index)

    def examples(self, device: torch.device) -> torch.Tensor:
        return self.whole.examples(device)[self.index_in(self.whole).to(device)]

    def places(self) -> torch.Tensor:
        index = self.index_in(self.whole)
        return self.whole.places().to(index.device)[index]

    def agree(self, answers: torch.Tensor) -> None:
        """Goes on where all lanes answer alike; else the vmap begins anew without some of them.

        Of the other examples, which are in no need of an answer, none is put off.
        """
        groups = groups_of(answers)
        if len(groups) == 1:
            return
        splitter, size = self.whole.splitter, self.whole.batch_size
        assert splitter is not None
        index = torch.arange(size, device="cpu") if self.numbers is None else self.numbers.cpu()
        group = torch.zeros(size, dtype=torch.int64, device="cpu")
        for number, lanes in enumerate(sorted(groups, key=len, reverse=True)):
            group[index[lanes]] = number
        splitter.agree(group)
        raise StartAnew(self.whole)

    def ancestors(self) -> Iterator[BatchLevel]:
        """The levels that the lanes were taken from, directly or not."""
        level = self.parent
        while isinstance(level, LaneLevel):
            yield level
            level = level.parent
        yield level

    def comes_from(self, level: TracerLevel) -> bool:
        """Whether a level is what the lanes were taken from, directly or not."""
        return any(level is known for known in self.ancestors())

    def of_parent(self, what: str, tree: Any) -> Any:
        """What the parent's code has made, at these lanes alone."""
        parent = self.parent
        leaves, structure = pytrees.flatten(tree)
        if parent.autograd or parent.forward or any(map(self._wrapped_again, leaves)):
            return run_in(self, what, lambda taken: taken, (tree,))
        with parent.restored():
            taken = [
                self._physical(x.value, x.bdim, parent) if isinstance(x, BatchTracer) else x
                for x in leaves
            ]
        return pytrees.unflatten(structure, taken)

    def _wrapped_again(self, value: Any) -> bool:
        """Whether a tracer is of another level than the lanes' parent."""
        return isinstance(value, Tracer) and not (
            type(value) is MadeTracer and value.dispatch_level is self.parent
        )

    def _physical(self, value: torch.Tensor, dim: int | None, level: BatchLevel) -> torch.Tensor:
        """A physical value of a level that the lanes come from, as the lanes have it."""
        if dim is not None:
            value = value.index_select(dim, self.index_in(level))
        if not self.alone:
            return wrap(value, dim, self)
        return value if dim is None else value.squeeze(dim)

    def into(self, value: Any) -> Any:
        """A value of a level that the lanes come from, at these lanes alone."""
        if isinstance(value, Tracer) and stale(value, self):
            settle(value)
            return linear(_Into(self), (value,))
        return value


def _serves_plain(level: BatchLevel) -> bool:
    """Whether code at a level could do without its tracers: nothing is recorded at it or inside."""
    inside = any(other.depth > level.depth for other in tls.state.levels)
    return not (inside or level.autograd or level.forward)


def lanes_of(level: BatchLevel, index: torch.Tensor, alone: bool = False) -> LaneLevel:
    """The examples of a level that have these numbers; ``alone`` as for the class."""
    size = index.shape[0]
    return same_again(
        lambda: LaneLevel(level, index, alone),
        lambda known: known.parent is level and known.batch_size == size,
    )


def guarded_lanes(level: BatchLevel, mask: torch.Tensor) -> LaneLevel:
    """A lane for every example: for those outside of the mask it has the first one that is in it.

    So a body sees no values that are not meant for it, where which those are can't be looked at.
    """
    numbers = torch.arange(level.batch_size, device=mask.device)
    return lanes_of(level, torch.where(mask, numbers, mask.long().argmax()))


def stale(value: Tracer, lanes: LaneLevel) -> bool:
    """Whether a tracer is to be taken over to the lanes.

    It is where it, or a tracer inside of it, is of a level that the lanes come from. One that is
    the same for all examples is too, where its level differentiates by it: what the lanes pull back
    to it differs from example to example.
    """
    inner: Any = value
    recorded = False
    while isinstance(inner, Tracer) and inner.dispatch_level.depth > lanes.depth:
        recorded = recorded or is_recorded(inner)
        inner = getattr(inner, "value", None)
    if not isinstance(inner, Tracer) or inner.dispatch_level.depth < lanes.depth:
        return recorded
    return inner.dispatch_level is not lanes and lanes.comes_from(inner.dispatch_level)


def is_recorded(value: Tracer) -> bool:
    """Whether the tracer's own level differentiates by it."""
    level = value.dispatch_level
    if level.forward:
        return True
    with DisableTorchFunction():  # a mode would take the value over
        return bool(level.autograd) and value.requires_grad


# NOTE [linear maps]
# Each map here is linear in its operands and has a transpose that is one too. ``run`` is given
# operands of one level, and calls itself on what is inside of them until it comes to the lanes'
# level, where it works on physical values. Where autograd is recorded at a level on the way, or
# tangents hang on its tracers, the map is one node of that level's graph.
class LinearMap:
    """A linear map of tensors at lanes' level or inside of it."""

    def run(self, values: Sequence[Any]) -> Any:
        raise NotImplementedError

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        raise NotImplementedError


def linear(f: LinearMap, values: Sequence[Tracer]) -> Any:
    """The map, as a node of the graph of its operands' level where one is recorded."""
    if any(is_recorded(v) for v in values):
        return torch_apply(_Node, f, torch.is_grad_enabled(), *values)
    return f.run(values)


class _Node(Function):
    """A linear map in a graph: its backward is the transpose, its tangent the map itself."""

    @staticmethod
    def forward(ctx: Any, f: LinearMap, grad_mode: bool, *values: Any) -> Any:
        ctx.f = f
        ctx.count = len(values)
        ctx.zeros = [_zeros_like(v) for v in values] if len(values) > 1 else None
        # What is inside belongs to other levels, whose graphs go on.
        with outside_graph(grad_mode):
            return f.run(values)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        return (None, None, *ctx.f.transpose(cotangent))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        given = tangents[2:]
        if ctx.zeros is not None:
            given = tuple(
                zero() if t is None else t for t, zero in zip(given, ctx.zeros, strict=True)
            )
        return linear(ctx.f, given)


def _zeros_like(value: Any) -> Callable[[], Any]:
    return lambda: torch.zeros_like(value)


_SAME: Final = object()


def rebuilt(tracer: Any, value: torch.Tensor, bdim: Any = _SAME) -> Any:
    """A tracer of the same level and kind for another value."""
    if isinstance(tracer, BatchTracer):
        dim = tracer.bdim if bdim is _SAME else bdim
        return wrap(value, dim, tracer.dispatch_level)
    assert isinstance(tracer, GradTracer)
    return tracer.dispatch_level.lift(value)


class _Into(LinearMap):
    """The whole's tensor at the lanes."""

    def __init__(self, lanes: LaneLevel) -> None:
        self.lanes = lanes
        self.source: BatchLevel | None = None

    def run(self, values: Sequence[Any]) -> Any:
        (value,) = values
        lanes = self.lanes
        level = value.dispatch_level
        with level.restored():
            if level.depth > lanes.depth:
                inner = value.value
                if isinstance(inner, Tracer) and inner.dispatch_level.depth >= lanes.depth:
                    return rebuilt(value, linear(self, (inner,)))
                self.source = lanes.whole
                return rebuilt(value, wrap(inner, None, lanes))
            self.source = level
            return lanes._physical(value.value, value.bdim, level)

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        assert self.source is not None
        return (spread(cotangent, self.lanes, self.source),)


class _Spread(LinearMap):
    """The lanes' tensor at the whole, with zeros for the other examples."""

    def __init__(self, lanes: LaneLevel, target: BatchLevel) -> None:
        self.lanes, self.target = lanes, target

    def run(self, values: Sequence[Any]) -> Any:
        (value,) = values
        lanes, target = self.lanes, self.target
        level = value.dispatch_level
        with level.restored():
            if level.depth > lanes.depth:
                return rebuilt(value, linear(self, (at_level(value.value, lanes),)))
            inner, dim = batched_value(value, lanes)
            shape = list(inner.shape)
            shape[dim] = target.batch_size
            zeros = inner.new_zeros(shape)
            return wrap(zeros.index_add(dim, lanes.index_in(target), inner), dim, target)

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        return (self.lanes.into(cotangent),)


def spread(value: Any, lanes: LaneLevel, target: BatchLevel) -> Any:
    """A tensor of the lanes among zeros for the other examples of a level they come from."""
    return linear(_Spread(lanes, target), (at_level(value, lanes),))


def batched_value(value: BatchTracer, level: BatchLevel) -> tuple[torch.Tensor, int]:
    """The physical value with a batch dim, and where it is."""
    if value.bdim is not None:
        return value.value, value.bdim
    inner = value.value
    return inner.unsqueeze(0).expand(level.batch_size, *inner.shape), 0


def at_level(value: torch.Tensor, level: BatchLevel) -> Any:
    """A tensor as a tracer of the level or of one inside of it."""
    settle(value)
    if isinstance(value, Tracer) and value.dispatch_level.depth >= level.depth:
        return value
    return level.lift(value)


class _Merge(LinearMap):
    """Parts of a batch put together: each with its lanes, every example in one of them."""

    def __init__(self, parts: Sequence[LaneLevel], target: BatchLevel, order: torch.Tensor) -> None:
        self.parts, self.target, self.order = parts, target, order

    def run(self, values: Sequence[Any]) -> Any:
        level = max((v.dispatch_level for v in values), key=lambda level: level.depth)
        with level.restored():
            if level.depth > self.target.depth:
                return self._inside(level, values)
            pairs = [batched_value(v, part) for v, part in zip(values, self.parts, strict=True)]
            dim = pairs[0][1]
            inner = [v if at == dim else v.movedim(at, dim) for v, at in pairs]
            return wrap(torch.cat(inner, dim).index_select(dim, self.order), dim, self.target)

    def _inside(self, level: TracerLevel, values: Sequence[Any]) -> Any:
        """At a level inside of the lanes': the values inside of its tracers, put together."""
        lifted: list[Any] = [
            v if v.dispatch_level.depth == level.depth else level.lift(v) for v in values
        ]
        batched = isinstance(level, BatchLevel) and any(v.bdim is not None for v in lifted)
        if not batched:
            inner = [v.value for v in lifted]
        else:
            assert isinstance(level, BatchLevel)
            pairs = [batched_value(v, v.dispatch_level) for v in lifted]
            inner = [v.movedim(at, 0) for v, at in pairs]
        inner = [at_level(v, part) for v, part in zip(inner, self.parts, strict=True)]
        merged = linear(self, inner)
        if isinstance(level, BatchLevel):
            return wrap(merged, 0 if batched else None, level)
        return level.lift(merged)

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        return tuple(part.into(cotangent) for part in self.parts)


def merge(values: Sequence[Any], parts: Sequence[LaneLevel], target: BatchLevel) -> Any:
    """What the parts of a batch gave, as one tensor of the whole."""
    order = torch.cat([part.index_in(target) for part in parts]).argsort()
    lifted = [at_level(part.into(v), part) for v, part in zip(values, parts, strict=True)]
    inmost = max((v.dispatch_level for v in lifted), key=lambda level: level.depth)
    if inmost.depth > target.depth:
        lifted = [
            v if v.dispatch_level.depth == inmost.depth else at_level(inmost.lift(v), target)
            for v in lifted
        ]
    return linear(_Merge(parts, target, order), lifted)


class _Retag(LinearMap):
    """The same examples, called another level's: lanes of the whole's size, one for each."""

    def __init__(self, source: BatchLevel, target: BatchLevel) -> None:
        self.source, self.target = source, target

    def run(self, values: Sequence[Any]) -> Any:
        (value,) = values
        level = value.dispatch_level
        if level.depth > self.target.depth:
            with level.restored():
                return rebuilt(value, linear(self, (at_level(value.value, self.source),)))
        return wrap(value.value, value.bdim, self.target)

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        return (retag(cotangent, self.target, self.source),)


def retag(value: Any, source: BatchLevel, target: BatchLevel) -> Any:
    """Lanes that stand for every example of the whole, each in its place, as the whole."""
    if not isinstance(value, Tracer) or value.dispatch_level.depth < source.depth:
        return value
    return linear(_Retag(source, target), (value,))


# NOTE [layouts]
# A tracer's physical value may have its batch dims anywhere, or not at all. Where a function of
# physical values is called (a body of control flow), they must be where that has them. To put them
# there changes nothing that the tracer's own level knows of: a linear map, and the identity.
class Layout(LinearMap):
    """Puts the batch dims of a tensor's physical values where they are wanted.

    Args:
        layers: the levels, the innermost first, each with its batch dim (None: none).
    """

    def __init__(self, layers: Sequence[tuple[TracerLevel, int | None]]) -> None:
        self.layers = layers

    def run(self, values: Sequence[Any]) -> Any:
        (value,) = values
        level, wanted = self.layers[0]
        with level.restored():
            inner, dim = value.value, getattr(value, "bdim", None)
            # This level's dim first: to move it may move those of the levels outside.
            rest = Layout(self.layers[1:])
            if not isinstance(level, BatchLevel):
                return level.lift(rest.of(inner))
            if dim is None and wanted is not None:
                inner = inner.unsqueeze(wanted).expand(
                    *inner.shape[:wanted], level.batch_size, *inner.shape[wanted:]
                )
            elif dim != wanted:
                inner = inner.movedim(dim, wanted)
            return wrap(rest.of(inner), wanted, level)

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor laid out."""
        if not self.layers:
            return value
        level = self.layers[0][0]
        own = isinstance(value, Tracer) and value.dispatch_level is level
        tracer: Any = value if own else level.lift(value)
        found: torch.Tensor = linear(self, (tracer,))
        return found

    def transpose(self, cotangent: Any) -> Sequence[Any]:
        return (cotangent,)


def takes_over(func: Any) -> bool:
    """Whether a call that is made while a body runs is the body's, with arguments to take over.

    A kernel's own call has what was taken over. What is asked of a tensor's type is the same
    inside and outside, and asked by the code that runs a body inside of this one too.
    """
    if tls.state.running is not None or func == _REQUIRES_GRAD:
        return False
    return METHODS.get(func) not in OF_TYPES


_REQUIRES_GRAD: Final = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


_WRITES = frozenset({torch.Tensor.__setitem__})
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, complex, type(None)})


class _TakingOver:
    """What door 1 asks, while a body runs on lanes, before it goes on with a call of the body's.

    What it closes over is taken over once. It stays as it is meanwhile: writes into it are refused.
    """

    __slots__ = ("lanes", "taken", "what")

    def __init__(self, lanes: LaneLevel, what: str) -> None:
        self.lanes, self.what = lanes, what
        self.taken: dict[int, tuple[Tracer, Any]] = {}

    def anew(self) -> _TakingOver:
        return _TakingOver(self.lanes, self.what)

    def __call__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        lanes = self.lanes
        known = self.taken
        quick: list[Any] = []
        for arg in args:
            kind = type(arg)
            if kind in _PLAIN or (kind is MadeTracer and arg.dispatch_level is lanes):
                quick.append(arg)
            elif id(arg) in known:
                quick.append(known[id(arg)][1])
            else:
                break
        else:
            if not kwargs:
                if all(map(is_, quick, args)) or not takes_over(func):
                    return None
                if quick[0] is args[0] or not _writes(func):
                    return quick, kwargs
        if not takes_over(func):
            return None
        if args and isinstance(args[0], Tracer) and _writes(func) and stale(args[0], lanes):
            raise RuntimeError(
                f"{self.what}: the body writes in place ({func.__name__}) into a tensor that it "
                f"closes over, of shape {tuple(args[0].shape)}, which only some of the examples "
                f"of {lanes.whole.name} are to see. Pass it in as an operand, write into a "
                f"clone of it, and return that."
            )
        taken = [self._taken(arg) for arg in args]
        named = {name: self._taken(arg) for name, arg in kwargs.items()} if kwargs else kwargs
        same = all(map(is_, taken, args)) and all(named[name] is kwargs[name] for name in kwargs)
        return None if same else (taken, named)

    def _taken(self, value: Any) -> Any:
        if isinstance(value, Tracer):
            if value.dispatch_level is self.lanes:
                return value
            known = self.taken.get(id(value))
            if known is None:
                known = value, seen_here(value)
                if known[1] is not value:
                    self.taken[id(value)] = known
            return known[1]
        if type(value) in (list, tuple):
            items = [self._taken(item) for item in value]
            return value if all(map(is_, items, value)) else type(value)(items)
        return value


@functools.lru_cache(maxsize=1024)
def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (
        func in _WRITES
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name not in ("__int__", "__index__", "__invert__"))
    )


@contextmanager
def in_lanes(lanes: LaneLevel, what: str) -> Iterator[None]:
    """The block runs on the lanes alone."""
    state = tls.state

    def seen(levels: Sequence[Level]) -> tuple[Level, ...]:
        return tuple(
            [
                lanes if level.depth == lanes.depth and isinstance(level, BatchLevel) else level
                for level in levels
            ]
        )

    inside = [level for level in state.levels if level.depth > lanes.depth]
    with (
        capturing(inside, seen),
        using(state.with_levels(seen(state.levels), _TakingOver(lanes, what))),
    ):
        yield


def run_in(lanes: LaneLevel, what: str, func: Callable[..., Any], args: Any) -> Any:
    """A function on the lanes' part of its arguments; what it returns is the lanes' too."""
    with in_lanes(lanes, what):
        taken = pytrees.tree_map(seen_here, args)
        return pytrees.tree_map(seen_here, func(*taken))
