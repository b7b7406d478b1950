"""``torch.autograd.Function`` on tracers: each level outside goes through its ``backward``.

torch runs ``forward`` with grad mode off and puts one node in the graph of the tensors it is
given. For tracers that is the graph of their own level; what the values inside of them record
would be cut, as if ``forward`` had no derivative. So a call on tracers is given to the levels one
by one, the innermost first: the level's own node, if it records, and within its ``forward`` the
same function on the values inside; for a vmap that is a function whose ``forward`` and
``backward`` are those of the class, mapped.

``Function.apply`` has no hook for tensor subclasses, so it is replaced when the first level of the
process is entered; without tracers the replacement calls it.

Private names used here (torch 2.11 to 2.13): ``_functorch.maybe_current_level``;
``DisableTorchFunctionSubclass``; ``forward_ad._set_fwd_grad_enabled``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import optree
import torch
from torch._C import DisableTorchFunctionSubclass, _functorch
from torch.autograd import Function, forward_ad

from tsfunc.bridge.autograd import tangents_here
from tsfunc.bridge.batch_tracer import BatchLevel, BatchTracer, wrap
from tsfunc.bridge.factories import on_first_level, watching_random
from tsfunc.bridge.grad_level import GradTracer
from tsfunc.bridge.tracer import Tracer, TracerLevel, innermost_level, refuse_escaped
from tsfunc.dispatch.state import using

_torch_apply: Callable[..., Any] = Function.__dict__["apply"].__func__
_torch_vmap = Function.vmap
_torch_setup_context = Function.setup_context
_torch_jvp = Function.jvp


def install() -> None:
    """Replaces ``Function.apply``; a second call does nothing."""
    if Function.__dict__["apply"].__func__ is _torch_apply:
        Function.apply = classmethod(_apply)  # type: ignore[assignment, method-assign]


on_first_level(install)


@functools.wraps(_torch_apply)
def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    level = innermost_level(args) or innermost_level(tuple(kwargs.values()))
    if level is None:
        return _torch_apply(cls, *args, **kwargs)
    if not level.alive:
        refuse_escaped(cls, level)
    if (_functorch.maybe_current_level() or 0) > level.functorch_depth:
        return _torch_apply(cls, *args, **kwargs)
    return _at_level(cls, level, _bound(cls, args, kwargs))


def _bound(cls: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, ...]:
    """All arguments by position, with the defaults of ``forward``."""
    if not _has_setup(cls):
        return tuple(args)
    bound = inspect.signature(cls.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


def _has_setup(cls: Any) -> bool:
    return cls.setup_context is not _torch_setup_context


def _at_level(cls: Any, level: TracerLevel, args: tuple[Any, ...]) -> Any:
    """The call at one level: its own node if it records, and the levels outside within."""
    mapped = isinstance(level, BatchLevel) and cls.vmap is not _torch_vmap
    if not mapped and not any(_differentiated_outside(arg) for arg in args):
        return _torch_apply(cls, *args)
    if not level.autograd:
        return _inside(cls, level, args)
    if not _has_setup(cls):
        raise RuntimeError(
            f"{cls.__name__}.apply: this autograd.Function is differentiated at {level.name} and "
            f"once more outside of it. Then it must override the setup_context staticmethod, and "
            f"its forward take no ctx. See "
            f"https://pytorch.org/docs/main/notes/extending.func.html"
        )
    grad_mode = torch.is_grad_enabled()

    def forward(*tracers: Any) -> Any:
        with torch.set_grad_enabled(grad_mode), forward_ad._set_fwd_grad_enabled(True):
            return _inside(cls, level, tracers)

    node = type(cls.__name__, (cls,), {"forward": staticmethod(forward)})
    return _torch_apply(node, *[_lifted(arg, level) for arg in args])


def _lifted(arg: Any, level: TracerLevel) -> Any:
    if isinstance(arg, torch.Tensor) and not (
        isinstance(arg, Tracer) and arg.dispatch_level is level
    ):
        return level.lift(arg)
    return arg


def _differentiated_outside(arg: Any) -> bool:
    """Whether the value inside of a tracer, or a tensor of no level, records or has a tangent."""
    value = arg.value if isinstance(arg, BatchTracer | GradTracer) else arg
    with DisableTorchFunctionSubclass():
        while isinstance(value, torch.Tensor):
            if value.requires_grad:
                return True
            forward = tangents_here()
            if forward and forward_ad.unpack_dual(value).tangent is not None:
                return True
            value = value.value if isinstance(value, BatchTracer | GradTracer) else None
    return False


def _inside(cls: Any, level: TracerLevel, args: Sequence[Any]) -> Any:
    """The call on the values inside of the level's tracers; results are tracers again."""
    values = [_value(arg, level) for arg in args]
    dims = tuple([_dim(arg, level) for arg in args])
    with level.restored():
        if not isinstance(level, BatchLevel):
            outs: Any = cls.apply(*values)
            return optree.tree_map(lambda x: _wrapped(x, None, level), outs, none_is_leaf=True)
        if cls.vmap is not _torch_vmap and any(dim is not None for dim in dims):
            info = SimpleNamespace(batch_size=level.batch_size, randomness=level.randomness)
            outs, out_dims = cls.vmap(info, dims, *values)
            out_dims = optree.broadcast_prefix(
                out_dims, outs, is_leaf=lambda d: d is None, none_is_leaf=True
            )
        else:
            mapped = _Mapped(cls, level, dims)
            outs = _function_of(mapped).apply(*values)[: mapped.results]
            outs = optree.tree_unflatten(mapped.tree, outs)
            out_dims = mapped.out_dims
    leaves, tree = optree.tree_flatten(outs, none_is_leaf=True)
    wrapped = [_wrapped(x, dim, level) for x, dim in zip(leaves, out_dims, strict=True)]
    return optree.tree_unflatten(tree, wrapped)


def _value(arg: Any, level: TracerLevel) -> Any:
    own = isinstance(arg, BatchTracer | GradTracer) and arg.dispatch_level is level
    return arg.value if own else arg


def _dim(arg: Any, level: TracerLevel) -> int | None:
    return arg.bdim if isinstance(arg, BatchTracer) and arg.dispatch_level is level else None


def _wrapped(value: Any, dim: int | None, level: TracerLevel) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return wrap(value, dim, level) if isinstance(level, BatchLevel) else level.lift(value)


class _Context:
    """What the class' own methods see as ``ctx`` inside of a mapped call."""

    def __init__(self, needs_input_grad: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs_input_grad)
        self.saved_tensors: tuple[Any, ...] = ()
        self.not_differentiable: tuple[Any, ...] = ()
        self.materialize = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        raise RuntimeError(
            "ctx.mark_dirty under vmap, differentiated outside of it, is not supported: return a "
            "new tensor instead of writing into an argument."
        )

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.not_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize = value


class _Mapped:
    """A class mapped over the batch of a level: what its calls on the values inside share.

    Attributes:
        out_dims: where the batch dim of each result is.
        tree: the structure of the results.
        state: what the class stored on its ctx, each leaf as ("input", i), ("result", i) or
            ("other", value), and its batch dim.
    """

    def __init__(self, cls: Any, outer: BatchLevel, dims: Sequence[int | None]) -> None:
        self.cls, self.outer, self.dims = cls, outer, dims
        self.out_dims: list[int | None] = []
        self.tree: Any = None
        self.state: list[tuple[str, Any, int | None]] = []
        self.state_tree: Any = None
        self.results = 0

    def run(self, call: Callable[..., Any], values: Sequence[Any], at: Sequence[Any]) -> Any:
        """Calls a function on tracers of a vmap of its own, with that vmap's level."""
        outer = self.outer
        with using(outer.outer):
            level = BatchLevel(outer.batch_size, outer.randomness, f"vmap of {self.cls.__name__}")
            with level, watching_random():
                inputs = [
                    wrap(v, dim, level) if dim is not None and isinstance(v, torch.Tensor) else v
                    for v, dim in zip(values, at, strict=True)
                ]
                return call(level, inputs)

    def forward(self, *values: Any) -> Any:
        """The results, and after them what else was stored on the ctx."""
        cls, ctx = self.cls, _Context([_needs_grad(v) for v in values])

        def call(level: BatchLevel, inputs: Sequence[Any]) -> Any:
            if _has_setup(cls):
                out = cls.forward(*inputs)
                cls.setup_context(ctx, tuple(inputs), out)
            else:
                out = cls.forward(ctx, *inputs)
            leaves, self.tree = optree.tree_flatten(out, none_is_leaf=True)
            self.out_dims = [_dim(leaf, level) for leaf in leaves]
            results = [_value(leaf, level) for leaf in leaves]
            self.results = len(results)
            stored, self.state_tree = optree.tree_flatten(vars(ctx), none_is_leaf=True)
            self.state = []
            for leaf in stored:
                value, dim = _value(leaf, level), _dim(leaf, level)
                place = _place(value, values, results)
                if place is None and isinstance(value, torch.Tensor):
                    place = ("result", len(results))
                    results.append(value)
                kind, where = place or ("other", value)
                self.state.append((kind, where, dim))
            return tuple(results)

        return self.run(call, values, self.dims)

    def setup_context(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
        tensors = [
            inputs[where] if kind == "input" else output[where]
            for kind, where, _ in self.state
            if kind != "other"
        ]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        marked = self.restored(tensors, None).not_differentiable
        results = [x for x in output[: self.results] if any(x is m for m in marked)]
        ctx.mark_non_differentiable(
            *results, *[x for x in output[self.results :] if isinstance(x, torch.Tensor)]
        )
        ctx.set_materialize_grads(self.restored(tensors, None).materialize)

    def restored(self, tensors: Sequence[Any], level: BatchLevel | None) -> _Context:
        """The ctx as the class left it; its tensors as tracers of the level, if there is one."""
        remaining, leaves = iter(tensors), []
        for kind, where, dim in self.state:
            leaf = where if kind == "other" else next(remaining)
            if level is not None and dim is not None:
                leaf = wrap(leaf, dim, level)
            leaves.append(leaf)
        ctx = _Context(())
        vars(ctx).update(optree.tree_unflatten(self.state_tree, leaves))
        return ctx

    def derivative(self, method: str, ctx: Any, given: Sequence[Any], at: Any, to: Any) -> Any:
        """``backward`` or ``jvp`` of the class, mapped; results with their batch dims at ``to``."""

        def call(level: BatchLevel, inputs: Sequence[Any]) -> Any:
            inner = self.restored(ctx.saved_tensors, level)
            inner.needs_input_grad = tuple(ctx.needs_input_grad)
            found = getattr(self.cls, method)(inner, *inputs)
            found = found if isinstance(found, tuple) else (found,)
            return [
                _moved(_value(x, level), _dim(x, level), dim, level.batch_size, reduced=batched)
                for x, (dim, batched) in zip(found, to, strict=True)
            ]

        return self.run(call, given, at)


def _function_of(mapped: _Mapped) -> Any:
    """The autograd.Function of a mapped class."""

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        mapped.setup_context(ctx, inputs, output)

    def backward(ctx: Any, *grads: Any) -> Any:
        own = grads[: mapped.results]
        to = [(dim, True) for dim in mapped.dims]
        return tuple(mapped.derivative("backward", ctx, own, mapped.out_dims, to))

    def jvp(ctx: Any, *tangents: Any) -> Any:
        to = [(dim, False) for dim in mapped.out_dims]
        found = mapped.derivative("jvp", ctx, tangents, mapped.dims, to)
        stored = {where for kind, where, _ in mapped.state if kind == "result"}
        return (*found, *[None for where in stored if where >= mapped.results])

    members: dict[str, Any] = {
        "forward": staticmethod(mapped.forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward),
    }
    if mapped.cls.jvp is not _torch_jvp:
        members["jvp"] = staticmethod(jvp)
    return type(mapped.cls.__name__, (Function,), members)


def _needs_grad(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    with DisableTorchFunctionSubclass():
        return value.requires_grad


def _place(value: Any, inputs: Sequence[Any], results: Sequence[Any]) -> tuple[str, int] | None:
    """Which of the tensors that the call has anyhow a stored one is."""
    if isinstance(value, torch.Tensor):
        for kind, known in (("input", inputs), ("result", results)):
            for i, tensor in enumerate(known):
                if tensor is value:
                    return kind, i
    return None


def _moved(value: Any, dim: int | None, to: int | None, size: int, *, reduced: bool) -> Any:
    """A derivative with its batch dim where it belongs; summed where it has no place for one."""
    if not isinstance(value, torch.Tensor):
        return value
    if to is None:
        return value.sum(dim) if dim is not None and reduced else value
    if dim is None:
        shape = list(value.shape)
        shape.insert(to, size)
        return value.unsqueeze(to).expand(shape)
    return value.movedim(dim, to)
