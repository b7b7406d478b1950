"""``closure_convert``: turn the tensors that a function closes over into arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc._text import count_text
from tsfunc.bridge.grad.autograd import is_perturbed
from tsfunc.bridge.tracers.boundaries import boundary, check_function
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level, substitute_tensors
from tsfunc.bridge.tracers.reachable import Reachable
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.user_code import folding, name_of


@folding("closure_convert")
def closure_convert(
    func: Callable[..., Any], *example_args: Any
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Return a function that takes its closed-over tensors as further arguments, and the tensors.

    Args:
        func: any function.
        example_args: arguments like those of later calls; only their number and structure matter.

    Returns:
        ``(converted, closed)``: ``converted(*args, *closed)`` equals ``func(*args)``. ``closed``
        has the tensors that a transform or autograd may differentiate by, and the tracers. Other
        values that ``func`` reads do not become arguments.

    Raises:
        TypeError: ``func`` is not callable, or ``converted`` is called with another structure or
            another number of tensors.

    Example:
        >>> import torch
        >>> from tsfunc import closure_convert, grad
        >>> def f(scale):
        ...     converted, closed = closure_convert(lambda x: x * scale, torch.zeros(()))
        ...     return converted(torch.tensor(2.), *closed)
        >>> grad(f)(torch.tensor(3.))
        tensor(2.)

    Similar to ``jax.closure_convert``. ``closure_convert`` serves functions with custom rules, such
    as solvers and integrators, whose closed-over tensors must be among the differentiable
    arguments.
    """
    check_function("closure_convert", func)
    originals = consts_of([func])
    closed = [as_seen_by_current_level(x) for x in originals]
    tree = pytrees.structure_of(example_args)
    name = name_of(func)

    @boundary("the function of closure_convert", func, traceable=True)
    def converted(*args: Any) -> Any:
        inputs = args[: len(args) - len(closed)]
        consts = args[len(inputs) :]
        tensors = all(isinstance(x, torch.Tensor) for x in consts)
        if len(args) < len(closed) or not tensors or pytrees.structure_of(inputs) != tree:
            raise TypeError(
                f"closure_convert: the function made of {name}: expected arguments of the "
                f"structure {pytrees.structure_text(tree)}, as its examples, followed by the "
                f"{count_text(len(closed), 'tensor')} that {name} closes over, got "
                f"{pytrees.structure_text(pytrees.structure_of(args))}."
            )
        with substitute_tensors(originals, consts):
            return func(*inputs)

    return converted, closed


def consts_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tracers, and tensors with gradients or tangents, that code reads of objects.

    Each tensor is returned once: NOTE [reachable tensors] in ``bridge/tracers/reachable``. They are
    the hidden operands of a call: NOTE [hidden operands] in ``bridge/tracers/level_proxies``.
    """
    reachable = Reachable(values, only_named=True)
    tensors = [*reachable.tensors, *(entry.tensor for entry in reachable.entries)]
    return [
        tensor
        for tensor in {id(tensor): tensor for tensor in tensors}.values()
        if isinstance(tensor, Tracer) or is_perturbed(as_seen_by_current_level(tensor))
    ]
