"""Derivatives of compiled code, of any order.

NOTE [second derivatives of compiled code]
AOTAutograd compiles a graph and its backward pass, and no more. A second derivative through its
node raises an error, or is zero without one: the node saves its inputs detached if they are views,
as the inputs of a transform are. Compiled code therefore runs inside of a node of our own. A plain
backward pass runs the compiled backward. A pass that is itself recorded (``create_graph=True``), or
whose cotangents are values of a transform (the rows of ``jacrev``), runs the uncompiled function
on the saved inputs, and differentiates that.

NOTE [kept graphs of compiled code]
AOTAutograd lets a backward pass reuse the saved buffers ("donated"), unless the first pass that
runs keeps its graph. If it does not, a later pass that keeps its graph is an error. A program
serves both kinds: ``vjp`` keeps the graph, ``grad`` does not. Programs are therefore compiled
without donated buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.autograd import Function

from tsfunc.bridge.trace.graph_compilers import can_run_compiled
from tsfunc.bridge.tracers.interrupts import restoring_thread_state

Run = Callable[..., Sequence[Any]]


def without_donated_buffers() -> AbstractContextManager[None]:
    """Context manager: no pass reuses saved buffers (NOTE [kept graphs of compiled code])."""
    from torch._functorch import config

    return config.patch(donated_buffer=False)


def call_differentiably(
    compiled: Run, uncompiled: Run, tensors: Sequence[torch.Tensor]
) -> Sequence[Any]:
    """Call compiled code so that its results can be differentiated any number of times.

    Args:
        compiled: the code, which writes into no tensor from outside.
        uncompiled: a function with the same results, without effects.
        tensors: the arguments of both.
    """
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
        return compiled(*tensors)
    return _Call.apply(compiled, uncompiled, *tensors)  # type: ignore[no-untyped-call]


def refuse_second_derivative(results: Sequence[Any], refuse: Callable[[str], Any]) -> None:
    """Let a backward pass that is recorded or transformed call a function that raises."""

    def before(cotangents: Any) -> None:
        if torch.is_grad_enabled():
            refuse("differentiated")
        if not can_run_compiled([x for x in cotangents if isinstance(x, torch.Tensor)]):
            refuse("mapped")

    for node in {x.grad_fn for x in results if isinstance(x, torch.Tensor) and x.grad_fn}:
        node.register_prehook(before)


class _Call(Function):
    @staticmethod
    def forward(ctx: Any, compiled: Run, uncompiled: Run, *tensors: torch.Tensor) -> Any:
        inside = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        with torch.enable_grad():
            results = compiled(*inside)
        outs = [x.detach() if isinstance(x, torch.Tensor) else x for x in results]
        ctx.uncompiled = uncompiled
        ctx.differentiable = [
            i for i, x in enumerate(results) if isinstance(x, torch.Tensor) and x.requires_grad
        ]
        ctx.wrt = [i for i, x in enumerate(tensors) if x.requires_grad]
        ctx.recorded = [results[i] for i in ctx.differentiable], [inside[i] for i in ctx.wrt]
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(
            *[
                x
                for i, x in enumerate(outs)
                if isinstance(x, torch.Tensor) and i not in ctx.differentiable
            ]
        )
        return tuple(outs)

    @staticmethod
    @restoring_thread_state
    def backward(ctx: Any, *cotangents: Any) -> Any:
        tensors = ctx.saved_tensors
        outs, inputs = ctx.recorded
        recorded = torch.is_grad_enabled()
        again = recorded or not can_run_compiled([x for x in cotangents if x is not None])
        if again:
            # An alias of each: the derivatives are those of this call, whatever else uses a tensor.
            with torch.enable_grad():
                tensors = [x.view_as(x) if x.requires_grad else x for x in tensors]
                results = ctx.uncompiled(*tensors)
            outs, inputs = [results[i] for i in ctx.differentiable], [tensors[i] for i in ctx.wrt]
        chosen = [cotangents[i] for i in ctx.differentiable]
        pairs = [
            (x, g) for x, g in zip(outs, chosen, strict=True) if g is not None and x.requires_grad
        ]
        gradients: list[Any] = [None] * (2 + len(tensors))
        if pairs and inputs:
            retain = again or _get_current_graph_task_keep_graph()
            with without_donated_buffers() if retain else nullcontext():
                grads = torch.autograd.grad(
                    [x for x, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True,
                    create_graph=recorded, retain_graph=retain,
                )  # fmt: skip
            for i, grad in zip(ctx.wrt, grads, strict=True):
                gradients[2 + i] = grad
        return tuple(gradients)
