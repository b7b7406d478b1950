"""Traces a function of tensors into a graph of torch's own operators, with torch's tracer.

torch's tools need derivatives of control flow in this form: torch differentiates its own
control-flow operators, and traces the derivatives into further ones.

NOTE [emulated views]
torch differentiates the bodies of its loops with each view replaced by a copy (``expand_copy`` for
``expand``). Its shape rules for these copies reject symbolic sizes, or specialize them. Therefore
an emulated view gets the shape of the view while this module or a backend traces.

Private names used here (torch 2.13 and 2.14): ``torch._subclasses.fake_tensor`` has FakeTensorMode,
``torch._subclasses.fake_impls`` has the fake-tensor rules of operators.
``torch.fx.experimental.proxy_tensor`` has ``make_fx``, which AOTAutograd uses too; ``torch._ops``
has the classes of operators, HigherOrderOperator for those that take functions.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.dispatch import state
from tsfunc.dispatch.undoing import resets


def _copies() -> Iterator[tuple[OpOverload, OpOverload]]:
    """Yield the operators that copy a view, each with the operator of the view."""
    names = ("as_strided", "diagonal", "expand", "select", "slice", "split", "split_with_sizes",
             "unfold", "unsqueeze", "view")  # fmt: skip
    for name in names:
        view, copy = (getattr(torch.ops.aten, each) for each in (name, f"{name}_copy"))
        for overload in set(view.overloads()) & set(copy.overloads()):
            yield getattr(copy, overload), getattr(view, overload)


_VIEWS = dict(_copies())


class _Served(threading.local):
    """Attribute ``on``: True inside of :func:`copied_views`."""

    on = False


_served: Final = resets(_Served())


@contextlib.contextmanager
def copied_views() -> Iterator[None]:
    """Give copies of views symbolic sizes within a block: NOTE [emulated views]."""
    before = _served.on
    _served.on = True
    try:
        yield
    finally:
        _served.on = before


@register_op_impl(lambda op: op in _VIEWS and _served.on)
def _copied_view(mode: FakeTensorMode, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    with mode:
        views = _VIEWS[op](*args, **kwargs)
        if isinstance(views, torch.Tensor):
            return views.clone(memory_format=torch.contiguous_format)
        return [x.clone(memory_format=torch.contiguous_format) for x in views]


def traced_by_torch(run: Callable[..., Any], values: Sequence[Any]) -> torch.fx.GraphModule:
    """Return a module of the operators that a function calls, with one input for each value.

    Args:
        run: takes as many arguments as there are values, and returns a tuple of tensors.
        values: fake tensors of one trace, and numbers.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch_state.outside_all_levels(), state.outside_all_levels():
        mode, values = _in_one_mode(values)
        with mode, copied_views(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's control flow warns about its own code
            module: torch.fx.GraphModule = make_fx(run, tracing_mode="real")(*values)
    module.graph.eliminate_dead_code()
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("unbacked_bindings", None)  # symbols of this trace only
    return module


def data_dependent(error: Exception) -> str | None:
    """Return the reason of an error of torch's tracer about a value of a tensor; None for others.

    Errors that were raised for it count, too.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, GuardOnDataDependentSymNode):
            return (
                "the value of a tensor decides how it runs, as it decides the number of steps of "
                "a while_loop, and torch can't trace that here"
            )
        cause = cause.__cause__
    return None


def is_control_flow(target: Any) -> bool:
    """True if a node calls a torch operator that takes functions as arguments."""
    return isinstance(target, HigherOrderOperator)


def name_operators(graph: torch.fx.Graph) -> None:
    """Record the operator that each node of a torch-traced graph calls."""
    for node in graph.nodes:
        if isinstance(node.target, OpOverload):
            node.meta.setdefault("op", operator_of(node.target))


def is_strided(value: Any) -> bool:
    """True if a value is a strided tensor."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def contiguous_like(value: torch.Tensor) -> torch.Tensor:
    """Return a contiguous clone of a fake tensor."""
    mode = value.fake_mode if isinstance(value, FakeTensor) else contextlib.nullcontext()
    with torch_state.outside_all_levels(), state.outside_all_levels(), mode, torch.no_grad():
        return value.clone(memory_format=torch.contiguous_format)


def draws(module: torch.nn.Module) -> bool:
    """True if a module of torch's operators, or a submodule, draws random numbers."""
    return any(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        for part in module.modules()
        if isinstance(part, torch.fx.GraphModule)
        for node in part.graph.nodes
    )


def _in_one_mode(values: Sequence[Any]) -> tuple[FakeTensorMode, Sequence[Any]]:
    """Return a fake mode with symbols, which loops need for their length, and the values in it."""
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
    """Return the cotangents of a function's inputs, by torch's autograd; zeros if none."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in primals]
        outs = run(*inputs)
    cotangents = [ct.contiguous() for ct in cotangents]  # torch's loops carry them
    pairs = [(out, ct) for out, ct in zip(outs, cotangents, strict=True) if out.requires_grad]
    gradients: Sequence[Any] = [None] * len(inputs)
    if pairs:
        results, given = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(results, inputs, given, allow_unused=True)
    return tuple(
        torch.zeros_like(x) if ct is None else ct for x, ct in zip(inputs, gradients, strict=True)
    )


def pushed_forward(
    run: Callable[..., Sequence[torch.Tensor]],
    primals: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Return the tangents of a function's results, as the transpose of the linear pullback.

    torch's control flow supports only reverse mode.
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
    tangents_out = [next(rest) if out.requires_grad else None for out in outs]
    return tuple(
        torch.zeros_like(out) if t is None else t for out, t in zip(outs, tangents_out, strict=True)
    )
