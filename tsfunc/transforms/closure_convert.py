"""``closure_convert``: what a function closes over, as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.tracers.seen_as import seen_as
from tsfunc.bridge.tracers.tracer import seen_here
from tsfunc.transforms.closed_over import closed_over
from tsfunc.transforms.vmap_spec import name_of


def closure_convert(
    func: Callable[..., Any], *example_args: Any
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """A function that takes what another one closes over as further arguments, and these.

    Args:
        func: any function.
        example_args: arguments like those that it will be called with; their number and structure
            count.

    Returns:
        ``(converted, closed)``: ``converted(*args, *closed)`` is ``func(*args)``. ``closed`` are
        the tensors by which somebody may differentiate, and those that stand for values of a
        transform; what else ``func`` reads is no argument.

    Raises:
        TypeError: ``converted`` is not called with such arguments, or not with as many tensors.

    Example:
        >>> import torch
        >>> from tsfunc import closure_convert, grad
        >>> def f(scale):
        ...     converted, closed = closure_convert(lambda x: x * scale, torch.zeros(()))
        ...     return converted(torch.tensor(2.), *closed)
        >>> grad(f)(torch.tensor(3.))
        tensor(2.)

    As ``jax.closure_convert``, for functions with rules of their own: what their solvers and
    integrators close over is to be among the arguments that these are differentiated by.
    """
    originals = closed_over([func])
    closed = [seen_here(x) for x in originals]
    tree = pytrees.structure_of(example_args)
    name = name_of(func)

    def converted(*args: Any) -> Any:
        own = args[: len(args) - len(closed)]
        given = args[len(own) :]
        tensors = all(isinstance(x, torch.Tensor) for x in given)
        if len(args) < len(closed) or not tensors or pytrees.structure_of(own) != tree:
            raise TypeError(
                f"closure_convert: the function made of {name} takes arguments of the structure "
                f"{tree}, as its examples, and then the {len(closed)} tensors that {name} closes "
                f"over; got {pytrees.structure_of(args)}."
            )
        with seen_as(originals, given):
            return func(*own)

    return converted, closed
