"""What a function does, without its being done: ``eval_shape`` and ``make_graph``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from optree import PyTreeSpec

from tsfunc import pytrees
from tsfunc.bridge.control.bodies import BodyLevel, HiddenVmaps, current_trace, in_body
from tsfunc.bridge.tracers.dynamo import outside_dynamo
from tsfunc.bridge.tracers.tracebacks import boundary
from tsfunc.errors import DescriptorError
from tsfunc.program import Program, capture
from tsfunc.program.calling.capture import TraceRequest, outline
from tsfunc.program.guarding.forms import placeholder
from tsfunc.program.guarding.inputs import InputSpec
from tsfunc.transforms.vmap_spec import name_of
from tsfunc.types import MetaTensorType


@boundary("eval_shape")
def eval_shape(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The types of what a function returns, without computing it.

    Args:
        func: takes and returns pytrees.
        args, kwargs: its arguments; a :class:`MetaTensorType` of a type and fixed sizes (and, if
            it is not the CPU, a device) stands for any tensor of that description.

    Returns:
        What ``func`` returns, with the type, shape and device of each tensor in its place; what
        is no tensor is as it is. Inside of a specialized function with named dims, a size that
        depends on them is None.

    Raises:
        DescriptorError: a description leaves the type or a size open.
        DataDependentError: the function uses a tensor as a Python number or bool, or the shape of
            a result depends on data.

    Example:
        >>> import torch
        >>> from tsfunc import MetaTensorType, eval_shape
        >>> x = MetaTensorType([1000000, 1000000], dtype=torch.float32)
        >>> print(eval_shape(lambda x, y: x @ y, x, torch.ones(1000000, 3)))
        f32[1000000, 3] cpu

    As ``jax.eval_shape``.
    """
    return pytrees.tree_map(_type_of, looks_of(f"eval_shape({name_of(func)})", func, args, kwargs))


@dataclass(frozen=True)
class Look:
    """What a tensor looks like; in a trace its sizes may be symbolic."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


def looks_of(
    what: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What a function returns, with a `Look` for each tensor; without computing it.

    Args:
        what: how errors call it.
        func: takes and returns pytrees.
        args, kwargs: its arguments; a :class:`MetaTensorType` stands for a tensor.
    """
    flat, tree = pytrees.flatten((tuple(args), dict(kwargs)))
    examples = [_example(what, leaf) for leaf in flat]
    trace = current_trace()
    if trace is not None:
        # A graph of its own in the place of the trace's takes what the function calls.
        body = BodyLevel(trace, HiddenVmaps())
        with in_body(body):
            args, kwargs = pytrees.unflatten(tree, [body.into(leaf) for leaf in examples])
            return pytrees.tree_map(_look_of, func(*args, **kwargs))
    return pytrees.tree_map(_look_of, outline(_request(what, name_of(func), func, examples, tree)))


def without_data(what: str, func: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What a function returns, with tensors that have a type and no data in place of tensors.

    Args:
        what: how errors call the trace.
        func: takes and returns pytrees.
        args: its arguments.

    Raises:
        DataDependentError: the function needs data.
    """
    flat, tree = pytrees.flatten((tuple(args), {}))
    return outline(_request(what, what, func, flat, tree))


@outside_dynamo
def make_graph(func: Callable[..., Any]) -> Callable[..., Program]:
    """A function's operators as a program, for arguments like those that it is given.

    Args:
        func: takes and returns pytrees.

    Returns:
        A function of the same arguments (tensors, or a :class:`MetaTensorType` of a type and
        fixed sizes for each) that returns the :class:`~tsfunc.program.Program`: ``print`` shows
        its Python, ``.graph`` is the torch.fx graph. Transforms that ``func`` calls are applied;
        outer ones are not.

    Raises:
        DescriptorError: a description leaves the type or a size open.
        DataDependentError: the function uses a tensor as a Python number or bool.

    Example:
        >>> import torch
        >>> from tsfunc import grad, make_graph
        >>> program = make_graph(grad(lambda x: x.sin().sum()))(torch.ones(3))
        >>> [node.name for node in program.graph.nodes if "cos" in node.name]
        ['cos_default']

    As ``jax.make_jaxpr`` and ``make_fx``.
    """

    @boundary("make_graph", func)
    def traced(*args: Any, **kwargs: Any) -> Program:
        name = name_of(func)
        flat, tree = pytrees.flatten((args, kwargs))
        what = f"make_graph({name})"
        examples = [_example(what, leaf) for leaf in flat]
        return capture(_request(what, name, func, examples, tree))

    return traced


def _example(what: str, leaf: Any) -> Any:
    """A tensor that looks as a description says; anything else as it is."""
    if not isinstance(leaf, MetaTensorType):
        return leaf
    if leaf.dtype is None or leaf.shape is None or not all(isinstance(n, int) for n in leaf.shape):
        raise DescriptorError(
            f"{what}: expected a description with a dtype and fixed sizes, such as "
            f"MetaTensorType([3, 4], dtype=torch.float32), got {leaf!r}."
        )
    sizes = [n for n in leaf.shape if isinstance(n, int)]
    return placeholder(sizes, leaf.dtype, leaf.device or torch.device("cpu"))


def _request(
    what: str, name: str, func: Callable[..., Any], examples: list[Any], tree: PyTreeSpec
) -> TraceRequest:
    """A trace for inputs of fixed sizes."""
    inputs = [
        InputSpec(i, f"x{i}", example, tuple(example.shape))
        for i, example in enumerate(examples)
        if isinstance(example, torch.Tensor)
    ]
    return TraceRequest(what, name, func, examples, tree, inputs)


def _look_of(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return Look(tuple(leaf.shape), leaf.dtype, leaf.device)


def _type_of(leaf: Any) -> Any:
    if not isinstance(leaf, Look):
        return leaf
    shape = [size if isinstance(size, int) else None for size in leaf.shape]
    return MetaTensorType(shape, dtype=leaf.dtype, device=leaf.device)
