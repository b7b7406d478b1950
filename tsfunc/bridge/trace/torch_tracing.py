"""Traces by torch: of functions into graphs of torch's own operators, and of exported programs.

torch's tools need derivatives of control flow in this form: torch differentiates its own
control-flow operators, and traces the derivatives into further ones.

NOTE [emulated views]
torch differentiates the bodies of its loops with each view replaced by a copy (``expand_copy`` for
``expand``). The shape rules for these copies reject symbolic sizes, or specialize them. Therefore
an emulated view gets the shape of the view while this module or a backend traces.

NOTE [guards of torch.export]
torch.export traces the program's operators again, at the sizes of samples. If its rules choose
between two computations of one result, they test whether two sizes happen to be equal, whether a
size is 1, or which strides a view has. Each outcome would restrict the exported program to sizes
like those of the samples, although the result is right for all sizes that the descriptors allow.
With ``backed_size_oblivious`` the rules choose the computation that is right for every size, as for
sizes that depend on data. Decompositions of the exported program repeat the tests, so the exported
program sets the option itself.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.interrupts import resets, while_torch_traces
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.dispatch.state import overriding

CARRIES: Final = {"scan": 1, "while_loop": 2, "while_loop_stack_output": 2}
"""The index of the carry among the arguments of torch's loops; the operands of the body follow."""


def _copies() -> Iterator[tuple[OpOverload, OpOverload]]:
    """Yield the operators that copy a view, each with the operator of the view."""
    names = ("as_strided", "diagonal", "expand", "select", "slice", "split", "split_with_sizes",
             "unfold", "unsqueeze", "view")  # fmt: skip
    for name in names:
        view, copy = (getattr(torch.ops.aten, variant) for variant in (name, f"{name}_copy"))
        for overload in set(view.overloads()) & set(copy.overloads()):
            yield getattr(copy, overload), getattr(view, overload)


_VIEWS = dict(_copies())


class _Served(threading.local):
    """Attribute ``on``: True inside of :func:`copied_views`."""

    on = False


_served: Final = resets(_Served())


def copied_views() -> AbstractContextManager[None]:
    """Give copies of views symbolic sizes within a block: NOTE [emulated views]."""
    return overriding(_served, on=True)


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

    with torch_state.outside_all_transforms():
        mode, values = _in_one_mode(values)
        with (
            mode, copied_views(), while_torch_traces(), warnings.catch_warnings(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")  # torch's control flow warns about its own code
            module: torch.fx.GraphModule = make_fx(run, tracing_mode="real")(*values)
    module.graph.eliminate_dead_code()
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("unbacked_bindings", None)  # symbols of this trace only
    return module


def is_control_flow(target: Any) -> bool:
    """True if a node calls a torch operator that takes functions as arguments."""
    return isinstance(target, HigherOrderOperator)


def name_operators(graph: torch.fx.Graph) -> None:
    """Record the operator that each node of a torch-traced graph calls."""
    for node in graph.nodes:
        if isinstance(node.target, OpOverload):
            node.meta.setdefault("op", operator_of(node.target))


def is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def contiguous_like(value: torch.Tensor) -> torch.Tensor:
    """Return a contiguous clone of a fake tensor."""
    mode = value.fake_mode if isinstance(value, FakeTensor) else nullcontext()
    with torch_state.outside_all_transforms(), mode, torch.no_grad():
        return value.clone(memory_format=torch.contiguous_format)


def _in_one_mode(values: Sequence[Any]) -> tuple[FakeTensorMode, Sequence[Any]]:
    """Return a fake mode with symbols, which loops need for their length, and the values in it."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake_mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if fake_mode is not None and fake_mode.shape_env is not None:
        return fake_mode, values
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with mode:
        return mode, [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            if isinstance(x, torch.Tensor)
            else x
            for x in values
        ]


# --- torch.export


def exported_by_torch(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Mapping[str, Any],
) -> torch.export.ExportedProgram:
    """Export a module with ``torch.export``.

    Args:
        dynamic_shapes: the dynamic shapes by parameter, in torch.export's format.
    """
    with _size_oblivious():
        exported = torch.export.export(
            module, tuple(args), dict(kwargs), dynamic_shapes=dict(dynamic_shapes),
            prefer_deferred_runtime_asserts_over_guards=True,
        )  # fmt: skip
    return _oblivious_too(exported)


class _Exported(torch.export.ExportedProgram):
    """An exported program whose decompositions set ``backed_size_oblivious`` too."""

    def run_decompositions(self, *args: Any, **kwargs: Any) -> torch.export.ExportedProgram:
        with _size_oblivious():
            return _oblivious_too(super().run_decompositions(*args, **kwargs))


def _oblivious_too(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    program.__class__ = _Exported
    return program


def _size_oblivious() -> AbstractContextManager[None]:
    """Return a context in which torch adds few guards: NOTE [guards of torch.export]."""
    from torch.fx.experimental import _config

    config: Any = _config
    return config.patch(backed_size_oblivious=True)
