"""``backward()`` inside a transform, for leaves that the transformed function has made.

A training loop under vmap clones its parameters with gradients, and calls ``loss.backward()`` and
an optimizer. Each of these leaves is a tracer, and so is its ``.grad``; both end with the
function. A leaf that outlives the function would keep a tracer as its gradient, so such a call is
refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from tsfunc.bridge.tracers.tracer import METHODS, Tracer, innermost_level, metadata

_METHOD: Final = torch.Tensor.backward
_FUNCTION: Final = torch.autograd.backward


def backward(
    func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Handle ``Tensor.backward`` and ``torch.autograd.backward``.

    Raises:
        RuntimeError: a tensor from outside would get a gradient.
    """
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    results = _several(given["self" if func is _METHOD else "tensors"])
    inputs = given.get("inputs")
    leaves = list(_leaves(results)) if inputs is None else _several(inputs)
    if not leaves or not all(map(_made_inside, (*results, *leaves))):
        level = innermost_level((*args, *kwargs.values()))
        raise RuntimeError(_from_outside(level.name if level is not None else "a transform"))
    return metadata(func, types, args, kwargs)


def _several(value: Any) -> Sequence[Any]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def _leaves(results: Sequence[Any]) -> Iterator[Any]:
    """Yield the leaves of an autograd graph, which get its gradients."""
    todo = [x.grad_fn if x.grad_fn is not None else x for x in results if x.requires_grad]
    seen = set(todo)
    while todo:
        node: Any = todo.pop()
        if isinstance(node, torch.Tensor):
            yield node
            continue
        if hasattr(node, "variable"):
            yield node.variable
        nodes = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= nodes
        todo += nodes


def _made_inside(value: Any) -> bool:
    """True if a value's graph is the function's own: autograd records on no value outside."""
    if not isinstance(value, Tracer) or not value.dispatch_level.alive:
        return False
    while isinstance(value, Tracer):
        if getattr(value, "tracks", False):  # traced: the program would record it
            return False
        value = getattr(value, "value", None)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return False
    return True


def _from_outside(name: str) -> str:
    return (
        f"backward() was called inside of {name}, where it would store traced values in the "
        f".grad of tensors that outlive it (torch.func says: backward() called inside a functorch "
        f"transform). Use tsfunc.grad or tsfunc.vjp, or call backward() "
        f"on the transform's result; or begin with leaves that the function makes of its "
        f"arguments, and of nothing else that requires gradients: "
        f"weight = weight.detach().clone().requires_grad_(). What a factory function makes is the "
        f"same for all examples: for torch.zeros(3, requires_grad=True) write "
        f"x.new_zeros(3).requires_grad_(), with an argument x."
    )


METHODS[_METHOD] = METHODS[_FUNCTION] = backward
