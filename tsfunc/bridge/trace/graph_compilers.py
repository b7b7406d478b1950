"""The compilers of a program's graph: torch's backends, called without Dynamo.

NOTE [loops in Inductor]
Inductor rewrites ``scan`` and ``map_impl`` as ``while_loop``, and stores each carry with the layout
of its initial value. The rewriting requires two things of a program's graph, and of the graphs that
AOTAutograd makes of its derivatives: an initial value must not be an expanded tensor, whose
storage is smaller than a new carry; and each symbol in the sizes of stacked results must be an
operand, or the length of the loop. :class:`PrepareLoops` ensures both.

NOTE [compiled code on disk]
torch keeps the code that Inductor made in a directory (``TORCHINDUCTOR_CACHE_DIR``), and finds it
by the graph and the settings, in later processes too. Inductor stores code only if a tracing
context has the ``ShapeEnv`` of the sample inputs, which are therefore fake tensors. Two kinds of
graphs are compiled without such a context. In a graph with an exchange between ranks, a
decomposition of this package replaces the exchange by that of a rank, and torch's key does not
contain decompositions. The other kind is a graph that computes numbers (NOTE [loops in Inductor]).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.fx
from torch._C import _functorch
from torch._guards import TracingContext, tracing
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

from tsfunc._lazy import load
from tsfunc.bridge.trace.torch_tracing import copied_views
from tsfunc.bridge.tracers.interrupts import while_torch_traces
from tsfunc.bridge.tracers.operators import PLAIN_TENSORS
from tsfunc.bridge.tracers.torch_state import in_dispatch_modes
from tsfunc.bridge.tracers.tracer import Tracer

Backend = Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Callable[..., Any]]


class CompilerFailed(Exception):
    """Internal: a backend of torch raised an error, which is the cause."""


def inductor(
    module: torch.fx.GraphModule,
    samples: Sequence[torch.Tensor],
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Any:
    """Compile a graph with Inductor, with torch's own random numbers, as in eager mode.

    Args:
        decompositions: operators to decompose, in addition to Inductor's own decompositions.

    Raises:
        CompilerFailed: Inductor can't compile the module.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    from tsfunc.bridge.trace.inductor_loops import PrepareLoops, assert_in_bodies

    patches: dict[str, Any] = {"fallback_random": True}
    if _has_loops(module):
        assert_in_bodies(module)
        patches["post_grad_custom_pre_pass"] = PrepareLoops()
    if any(isinstance(value, torch.Generator) for value in vars(module).values()):
        patches["fx_graph_cache"] = False  # the cache has copies of the generators
    table = None
    if decompositions and any(node.target in decompositions for node in _every_node(module)):
        table = {**select_decomp_table(), **decompositions}
    compiler = functools.partial(compile_fx, config_patches=patches, decompositions=table)
    if _has_numbers(module) or table is not None:
        return _run_backend(compiler, module, samples)
    mode, fakes = _as_fakes(samples)
    with tracing(TracingContext(mode)):
        return _run_backend(compiler, module, fakes)


def _run_backend(
    backend: Any, module: torch.fx.GraphModule, samples: Sequence[torch.Tensor]
) -> Any:
    """Return the result of a torch backend for a module."""
    if _has_numbers(module):
        samples = _with_numbers(samples)
    elif any(_has_symbolic_sizes(node.meta.get("val")) for node in _every_node(module)):
        _, samples = _as_fakes(samples)
    try:
        with copied_views(), while_torch_traces():
            return backend(module, list(samples))
    except Exception as error:
        if type(error).__name__ == "GuardOnDataDependentSymNode":
            problem = f"torch {torch.__version__} branches on a size or number that data determine"
        else:
            problem = f"{type(error).__name__}: {error}"
        raise CompilerFailed(problem) from error


def _every_node(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Yield the nodes of a module and of its submodules."""
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            yield from part.graph.nodes


def _has_loops(module: torch.fx.GraphModule) -> bool:
    return any(isinstance(node.target, HigherOrderOperator) for node in module.graph.nodes)


# The operators that read a number from a tensor.
READS: Final = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


def _has_numbers(module: torch.fx.GraphModule) -> bool:
    """True if the graph computes numbers: in loops, or of tensors, as Adam does its step size."""
    return _has_loops(module) or any(node.target in READS for node in _every_node(module))


def _has_symbolic_sizes(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_symbolic_sizes, value))
    return isinstance(value, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape)


def _with_numbers(samples: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return fake samples for a graph that computes numbers, with symbols for these."""
    mode, fakes = _as_fakes(samples)
    env = mode.shape_env
    assert env is not None
    env.settings = dataclasses.replace(env.settings, allow_scalar_outputs=True)
    return fakes


def _as_fakes(samples: Sequence[torch.Tensor]) -> tuple[FakeTensorMode, Sequence[torch.Tensor]]:
    """Return fake samples, with the given ones' symbols or with fixed sizes, and their mode."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = next((x.fake_mode for x in samples if isinstance(x, FakeTensor)), None)
    if mode is None:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        samples = [mode.from_tensor(x, static_shapes=True) for x in samples]
    return mode, samples


def find_backend(name: str) -> Backend:
    """Return a torch backend by its name.

    Raises:
        ValueError: torch has no backend of this name.
    """
    load("torch._dynamo.backends.registry")
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        backend: Any = lookup_backend(name)
    except InvalidBackend:
        names = ", ".join(torch.compiler.list_backends())
        raise ValueError(
            f"there is no backend {name!r}: expected 'python', a function of a torch.fx module "
            f"and example inputs, or one of {names}"
        ) from None
    return functools.partial(_run_backend, backend)


def can_run_compiled(tensors: Sequence[torch.Tensor]) -> bool:
    """True if compiled code may run here: no mode, transform or class must see each operator."""
    return (
        all(type(x) in PLAIN_TENSORS for x in tensors)
        and forward_ad._current_level < 0
        and _functorch.maybe_current_level() is None
        and not in_dispatch_modes()
    )


def any_wrapped(tensors: Sequence[torch.Tensor]) -> bool:
    """True if some tensors are values of a transform, which no backend can take."""
    return _functorch.maybe_current_level() is not None or any(
        isinstance(x, Tracer) for x in tensors
    )
