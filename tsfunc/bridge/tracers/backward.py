"""``backward()`` inside a transform, for leaves that the transformed function has made.

A training loop under vmap clones its parameters with gradients, and calls ``loss.backward()`` and
an optimizer. Each of these leaves is a tracer, and so is its ``.grad``; both end with the
function. A leaf that outlives the function would keep a tracer as its gradient, so such a call is
refused, unless the level accepts it: a trace records the pass, and its program assigns the
``.grad`` (``program/calling/capture.py``).
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.graph import GradientEdge

from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.nesting import nested_tracers, tensors_inside
from tsfunc.bridge.tracers.torch_state import Rerun, current_rerun
from tsfunc.bridge.tracers.tracer import BackwardPass, Tracer, innermost_level, metadata, serials
from tsfunc.ops.registry import Args, Kwargs

_METHOD: Final = torch.Tensor.backward
_FUNCTION: Final = torch.autograd.backward
_GRAD: Final = torch.autograd.grad


def handle_backward(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Handle ``Tensor.backward`` and ``torch.autograd.backward``.

    Raises:
        RuntimeError: a tensor from outside would get a gradient.
    """
    arguments = inspect.signature(func).bind(*args, **kwargs).arguments
    results = _several(arguments["self" if func is _METHOD else "tensors"])
    inputs = arguments.get("inputs")
    inputs = None if inputs is None else _several(inputs)
    level = innermost_level((*args, *kwargs.values()))
    call = BackwardPass(results, inputs, True, not _keeps_graph(arguments))
    if level is None or not level.allows_backward_outside(call):
        leaves = list(graph_leaves(results)) if inputs is None else inputs
        if not leaves or not all(map(_graph_is_internal, (*results, *leaves))):
            raise RuntimeError(
                _refuse_use_in_backward(level.name if level is not None else "a transform")
            )
    return metadata(func, types, args, kwargs)


def _grad(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Handle ``torch.autograd.grad``."""
    arguments = inspect.signature(func).bind(*args, **kwargs).arguments
    inputs = arguments["inputs"]
    inputs = list(inputs.values()) if isinstance(inputs, dict) else _several(inputs)
    level = innermost_level((*args, *kwargs.values()))
    call = BackwardPass(_several(arguments["outputs"]), inputs, False, not _keeps_graph(arguments))
    if level is None or not level.allows_backward_outside(call):
        return NotImplemented
    return metadata(func, types, args, kwargs)


def _retain_grad(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Handle ``Tensor.retain_grad``, which prepares a later backward pass."""
    level = innermost_level(args)
    if level is None or not level.allows_backward_outside(BackwardPass(args, (), False, False)):
        return NotImplemented
    return metadata(func, types, args, kwargs)


def _several(value: Any) -> Sequence[Any]:
    return (value,) if isinstance(value, torch.Tensor | GradientEdge) else tuple(value)


def _keeps_graph(arguments: Mapping[str, Any]) -> bool:
    keeps = arguments.get("retain_graph")
    return bool(arguments.get("create_graph") if keeps is None else keeps)


def nodes_of(results: Sequence[Any]) -> Iterator[Any]:
    """Yield the nodes of an autograd graph, each once, in the same order in every process."""
    todo = [x.grad_fn for x in results if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    seen = set(todo)
    while todo:
        node: Any = todo.pop()
        yield node
        nodes = dict.fromkeys(before for before, _ in node.next_functions if before is not None)
        todo += [before for before in nodes if before not in seen]
        seen.update(nodes)


def graph_leaves(results: Sequence[Any]) -> Iterator[Any]:
    """Yield the leaves of an autograd graph, which get its gradients."""
    yield from (x for x in results if x.requires_grad and x.grad_fn is None)
    yield from (node.variable for node in nodes_of(results) if hasattr(node, "variable"))


def _graph_is_internal(value: Any) -> bool:
    """True if a value's graph is the function's own: autograd records on no value outside."""
    if not isinstance(value, Tracer) or not value.dispatch_level.alive:
        return False
    # The program would record a traced value.
    traced = any(getattr(tracer, "tracks", False) for tracer in nested_tracers(value))
    return not traced and not any(inner.requires_grad for inner in tensors_inside(value))


def _refuse_accumulation(leaf: torch.Tensor) -> None:
    raise RuntimeError(
        "backward() was called inside of a function that tsfunc differentiates, for a value that "
        "depends on the transform's arguments (torch.func says: backward() called inside a "
        "functorch transform). Use tsfunc.grad or tsfunc.vjp inside of it, or call backward() on "
        "the transform's result. For leaves that the function makes itself, backward() works: "
        "weight = weight.detach().clone().requires_grad_()."
    )


_REFUSED: Final = OrderedDict({0: _refuse_accumulation})


def refuse_backward(leaf: torch.Tensor) -> None:
    """Let ``backward()`` fail if it reaches a leaf that a transform differentiates by.

    All leaves share one table of hooks, which costs a quarter of
    ``Tensor.register_post_accumulate_grad_hook``.
    """
    leaf._post_accumulate_grad_hooks = _REFUSED


class _EndedHooks(OrderedDict[int, Any]):
    """The hooks of a leaf that only the pullback of its own transform differentiates by.

    Attributes:
        at: the serial number of the transform's end.
        rerun: the run of a function that a backward pass runs again, in which the leaf was made.
    """

    at: int
    rerun: Rerun | None


def _drop_gradient(leaf: torch.Tensor) -> None:
    """Drop a gradient that ``backward()`` has added to a leaf, if the leaf's transform has ended.

    The graph of a transform's result reaches the leaf if the result also depends on tensors of the
    user.
    """
    if not has_ended(leaf):
        _refuse_accumulation(leaf)
    with DisableTorchFunctionSubclass():
        leaf.grad = None


_DROPPED: Final = {0: _drop_gradient}


def end_leaf(leaf: torch.Tensor) -> None:
    """Declare that the function of a leaf's transform has run: only its pullback is left."""
    with DisableTorchFunctionSubclass():
        if leaf._post_accumulate_grad_hooks is _REFUSED:
            hooks = _EndedHooks(_DROPPED)
            hooks.at, hooks.rerun = next(serials), current_rerun()
            leaf._post_accumulate_grad_hooks = hooks


def has_ended(leaf: torch.Tensor) -> bool:
    """True if no active transform differentiates by a leaf (``end_leaf``).

    In a function that the pullback of an ended vjp runs again, the leaves of that vjp have not
    ended, as in the first run. Those that had ended before the first run have, and so have those
    of the function's own transforms.
    """
    hooks = leaf._post_accumulate_grad_hooks
    if type(hooks) is not _EndedHooks:
        return False
    rerun = current_rerun()
    return rerun is None or hooks.rerun is rerun or hooks.at < rerun.first


def _refuse_use_in_backward(name: str) -> str:
    return (
        f"backward() was called inside of {name}, where it would store traced values in the "
        f".grad of tensors that outlive it (torch.func says: backward() called inside a functorch "
        f"transform). Use tsfunc.grad or tsfunc.vjp, or call backward() "
        f"on the transform's result; or begin with leaves that the function makes of its "
        f"arguments, and of nothing else that requires gradients: "
        f"weight = weight.detach().clone().requires_grad_(). The result of a factory function is "
        f"the same for all examples: for torch.zeros(3, requires_grad=True) write "
        f"x.new_zeros(3).requires_grad_(), with an argument x."
    )


function_rules: Final = FunctionRules()
function_rules.add(Stage.METHOD, handle_backward, _METHOD, _FUNCTION)
function_rules.add(Stage.METHOD, _grad, _GRAD)
function_rules.add(Stage.METHOD, _retain_grad, torch.Tensor.retain_grad)
