"""Abstract evaluation of functions: ``eval_shape`` and ``make_graph``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from optree import PyTreeSpec

from tsfunc import pytrees
from tsfunc.bridge.control.bodies import BodyLevel, HiddenVmaps, in_body
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.boundaries import boundary, check_function
from tsfunc.bridge.tracers.dynamo import outside_dynamo
from tsfunc.ops.registry import Args, Kwargs
from tsfunc.program import Program, capture
from tsfunc.program.calling.capture import TraceRequest, abstract_eval
from tsfunc.program.guarding.call_spec import placeholder
from tsfunc.program.guarding.inputs import InputSpec
from tsfunc.types import MetaTensorType
from tsfunc.types.meta import sizes_and_dtype
from tsfunc.user_code import folding, name_of


@boundary("eval_shape")
def eval_shape(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the shapes and dtypes of a function's results, without computing them.

    Args:
        func: takes and returns pytrees.
        args, kwargs: the arguments of ``func``. A :class:`MetaTensorType` with a dtype, fixed
            sizes and, if it is not the CPU, a device stands for a tensor.

    Returns:
        The result of ``func`` with a :class:`MetaTensorType` in place of each tensor; non-tensor
        leaves are unchanged. Inside of a specialized function with named dims, a size that depends
        on them is None.

    Raises:
        DescriptorError: a description lacks the dtype or a size.
        DataDependentError: the function uses a tensor as a Python number or bool, or the shape of
            a result depends on data.

    Example:
        >>> import torch
        >>> from tsfunc import MetaTensorType, eval_shape
        >>> x = MetaTensorType([1000000, 1000000], dtype=torch.float32)
        >>> print(eval_shape(lambda x, y: x @ y, x, torch.ones(1000000, 3)))
        f32[1000000, 3] cpu

    Corresponds to ``jax.eval_shape``.
    """
    check_function("eval_shape", func)
    return pytrees.tree_map(
        _descriptor_of, abstract_results(f"eval_shape({name_of(func)})", func, args, kwargs)
    )


@dataclass(frozen=True)
class AbstractTensor:
    """The shape, dtype and device of a tensor; in a trace its sizes may be symbolic."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


def abstract_results(label: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Return a function's result with an ``AbstractTensor`` for each tensor, without computing it.

    Args:
        args, kwargs: the arguments of ``func``; a :class:`MetaTensorType` stands for a tensor.
    """
    flat, tree = pytrees.flatten((tuple(args), dict(kwargs)))
    samples = [_sample(label, leaf) for leaf in flat]
    trace = current_trace()
    if trace is not None:
        # A temporary graph replaces the trace's graph and records the operators that the function
        # calls.
        body = BodyLevel(trace, HiddenVmaps())
        with in_body(body):
            args, kwargs = pytrees.unflatten(tree, [body.remap(leaf) for leaf in samples])
            return pytrees.tree_map(_abstract, func(*args, **kwargs))
    return pytrees.tree_map(
        _abstract, abstract_eval(_request(label, name_of(func), func, samples, tree))
    )


def results_without_data(label: str, func: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Return a function's result with fake tensors, which have a type and no data.

    Raises:
        DataDependentError: the function needs data.
    """
    flat, tree = pytrees.flatten((tuple(args), {}))
    return abstract_eval(_request(label, label, func, flat, tree))


@folding("make_graph")
@outside_dynamo
def make_graph(func: Callable[..., Any]) -> Callable[..., Program]:
    """Return a function that traces ``func`` and returns its operators as a program.

    Args:
        func: takes and returns pytrees.

    Returns:
        A function of the same arguments (tensors, or for each a :class:`MetaTensorType` with a
        dtype and fixed sizes) that returns the :class:`~tsfunc.program.Program`: ``print`` shows
        its Python source, ``.graph`` is the torch.fx graph. Transforms inside of ``func`` are
        applied; enclosing transforms are not.

    Raises:
        DescriptorError: a description lacks the dtype or a size.
        DataDependentError: the function uses a tensor as a Python number or bool.

    Example:
        >>> import torch
        >>> from tsfunc import grad, make_graph
        >>> program = make_graph(grad(lambda x: x.sin().sum()))(torch.ones(3))
        >>> [node.name for node in program.graph.nodes if "cos" in node.name]
        ['cos_default']

    Similar to ``jax.make_jaxpr`` and ``make_fx``.
    """

    @boundary("make_graph", func)
    def traced(*args: Any, **kwargs: Any) -> Program:
        name = name_of(func)
        flat, tree = pytrees.flatten((args, kwargs))
        label = f"make_graph({name})"
        samples = [_sample(label, leaf) for leaf in flat]
        return capture(_request(label, name, func, samples, tree))

    return traced


def _sample(label: str, leaf: Any) -> Any:
    """Return a placeholder tensor for a description; return other leaves unchanged."""
    if not isinstance(leaf, MetaTensorType):
        return leaf
    sizes, dtype = sizes_and_dtype(label, leaf)
    return placeholder(sizes, dtype, leaf.device or torch.device("cpu"))


def _request(
    label: str, name: str, func: Callable[..., Any], samples: list[Any], tree: PyTreeSpec
) -> TraceRequest:
    """Return the request of a trace for inputs of fixed sizes."""
    inputs = [
        InputSpec(i, f"x{i}", sample, tuple(sample.shape))
        for i, sample in enumerate(samples)
        if isinstance(sample, torch.Tensor)
    ]
    return TraceRequest(label, name, func, samples, tree, inputs)


def _abstract(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return AbstractTensor(tuple(leaf.shape), leaf.dtype, leaf.device)


def _descriptor_of(leaf: Any) -> Any:
    if not isinstance(leaf, AbstractTensor):
        return leaf
    shape = [size if isinstance(size, int) else None for size in leaf.shape]
    return MetaTensorType(shape, dtype=leaf.dtype, device=leaf.device)
