"""A function of tensors as a graph of torch's own operators, traced by torch.

Derivatives of control flow are written so for torch's tools: torch knows those of its own operators
for it, and traces them into more of these.

NOTE [copied views]
torch differentiates the bodies of its loops with each view replaced by a copy (``expand_copy`` for
``expand``). Its rules for the shapes of these copies don't take symbolic sizes, or fix them. Here a
copied view has the shape of the view, while this module or a backend traces.

Private names used here (torch 2.11 to 2.14): ``torch._subclasses.fake_tensor`` has FakeTensorMode,
``torch._subclasses.fake_impls`` the rules for what operators return of fake tensors.
Of ``torch.fx.experimental.proxy_tensor`` it is ``make_fx``, which AOTAutograd traces by too; of
``torch._ops`` the classes of operators, HigherOrderOperator of those that take functions.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.dispatch import state


def _copies() -> Iterator[tuple[OpOverload, OpOverload]]:
    """The operators that copy a view, each with that view's operator."""
    names = ("as_strided", "diagonal", "expand", "select", "slice", "split", "split_with_sizes",
             "unfold", "unsqueeze", "view")  # fmt: skip
    for name in names:
        view, copy = (getattr(torch.ops.aten, each) for each in (name, f"{name}_copy"))
        for overload in set(view.overloads()) & set(copy.overloads()):
            yield getattr(copy, overload), getattr(view, overload)


_VIEWS = dict(_copies())
_served = threading.local()


@contextlib.contextmanager
def copied_views() -> Iterator[None]:
    """A block in which copies of views have symbolic sizes: NOTE [copied views]."""
    before = getattr(_served, "on", False)
    _served.on = True
    try:
        yield
    finally:
        _served.on = before


@register_op_impl(lambda op: op in _VIEWS and getattr(_served, "on", False))
def _copied_view(mode: FakeTensorMode, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    with mode:
        found = _VIEWS[op](*args, **kwargs)
        if isinstance(found, torch.Tensor):
            return found.clone(memory_format=torch.contiguous_format)
        return [x.clone(memory_format=torch.contiguous_format) for x in found]


def traced_by_torch(run: Callable[..., Any], values: Sequence[Any]) -> torch.fx.GraphModule:
    """A module of the operators that a function calls, for an input for each of the values.

    Args:
        run: takes what the values stand for, and returns a tuple of tensors.
        values: fake tensors of one trace, and numbers.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch_state.outside_all_levels(), state.outside_all_levels():
        mode, values = _of_one_mode(values)
        with mode, copied_views(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch's control flow warns of is its own doing
            module: torch.fx.GraphModule = make_fx(run, tracing_mode="real")(*values)
    module.graph.eliminate_dead_code()
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("unbacked_bindings", None)  # symbols of this trace, not of the next one
    return module


def is_control_flow(target: Any) -> bool:
    """Whether a node calls an operator of torch's whose arguments are functions."""
    return isinstance(target, HigherOrderOperator)


def name_operators(graph: torch.fx.Graph) -> None:
    """Notes at each node of a graph that torch has traced which operator it calls."""
    for node in graph.nodes:
        if isinstance(node.target, OpOverload):
            node.meta.setdefault("op", operator_of(node.target))


def is_strided(value: Any) -> bool:
    """True for a tensor that lies in memory by strides."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def contiguous_like(value: torch.Tensor) -> torch.Tensor:
    """A contiguous fake tensor that is otherwise like another one."""
    mode = value.fake_mode if isinstance(value, FakeTensor) else contextlib.nullcontext()
    with torch_state.outside_all_levels(), state.outside_all_levels(), mode, torch.no_grad():
        return value.clone(memory_format=torch.contiguous_format)


def draws(module: torch.nn.Module) -> bool:
    """Whether a module of torch's operators, or one in it, draws random numbers."""
    return any(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        for part in module.modules()
        if isinstance(part, torch.fx.GraphModule)
        for node in part.graph.nodes
    )


def _of_one_mode(values: Sequence[Any]) -> tuple[FakeTensorMode, Sequence[Any]]:
    """A mode with symbols, which loops need for the number of their steps, and values of it."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    own = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if own is not None and own.shape_env is not None:
        return own, values
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with mode:
        return mode, [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            if isinstance(x, torch.Tensor)
            else x
            for x in values
        ]


def pulled_back(
    run: Callable[..., Sequence[torch.Tensor]],
    primals: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """The cotangents of a function's inputs, by torch's autograd; zeros where there is none."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in primals]
        outs = run(*inputs)
    cotangents = [ct.contiguous() for ct in cotangents]  # they become carries of torch's loops
    pairs = [(out, ct) for out, ct in zip(outs, cotangents, strict=True) if out.requires_grad]
    found: Sequence[Any] = [None] * len(inputs)
    if pairs:
        results, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(results, inputs, given, allow_unused=True)
    return tuple(
        torch.zeros_like(x) if ct is None else ct for x, ct in zip(inputs, found, strict=True)
    )


def pushed_forward(
    run: Callable[..., Sequence[torch.Tensor]],
    primals: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """The tangents of a function's results: its pullback is linear, and this is its transpose.

    torch has reverse mode alone for its control flow.
    """
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in primals]
        outs = run(*inputs)
        moved = [out for out in outs if out.requires_grad]
        given = [torch.zeros_like(out).requires_grad_() for out in moved]
        pulled = torch.autograd.grad(moved, inputs, given, create_graph=True, allow_unused=True)
        pairs = [(p, t) for p, t in zip(pulled, tangents, strict=True) if p is not None]
    pushed: Sequence[Any] = [None] * len(given)
    if pairs:
        by, along = zip(*pairs, strict=True)
        pushed = torch.autograd.grad(by, given, along, allow_unused=True)
    rest = iter(pushed)
    found = [next(rest) if out.requires_grad else None for out in outs]
    return tuple(
        torch.zeros_like(out) if t is None else t for out, t in zip(outs, found, strict=True)
    )
