"""The boundary of a transform: the calls of users.

The boundary folds the traceback of an error (NOTE [folded tracebacks] in ``user_code.py``), and
restores the state of the thread after it (NOTE [interrupts] in ``interrupts``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar, cast

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.compiler import is_dynamo_compiling

from tsfunc import hooks, pytrees
from tsfunc.bridge.tracers.dynamo import copy_outside_dynamo
from tsfunc.bridge.tracers.interrupts import outermost, run_outermost
from tsfunc.bridge.tracers.tracer_stack import unwrap_all
from tsfunc.config import config
from tsfunc.ops.dims import function_name
from tsfunc.user_code import (
    fold_traceback,
    is_boundary,
    keep_refused_call,
    label,
)

F = TypeVar("F", bound=Callable[..., Any])

# --- the public calls

_NO_FUNCTION: Final = object()  # None is a value that a user can pass
_MOST_TENSORS: Final = 3  # of one argument in the note of an error


def check_function(name: str, func: Any) -> None:
    """Raise TypeError for a value that is not callable in the place of a user's function."""
    if not callable(func):
        raise TypeError(
            f"{name}: expected a function, got {type(func).__name__}. Pass the function itself, "
            f"and call the result with the arguments."
        )


def boundary(name: str, func: Any = _NO_FUNCTION, traceable: bool = False) -> Callable[[F], F]:
    """Decorate a callable that users call: the traceback of an error that leaves it is folded.

    The outermost one of a thread restores the thread's state: NOTE [interrupts] in ``interrupts``.

    Args:
        func: the user's function, if the callable is made for one.
        traceable: True if Dynamo may trace the callable, which then delegates to torch.func's
            transform; otherwise Dynamo traces neither the callable nor its callees.

    Raises:
        TypeError: ``func`` is not callable.
    """
    if func is _NO_FUNCTION:
        func = None
    else:
        check_function(name, func)

    def decorate(entry: F) -> F:
        def entered(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return entry(*args, **kwargs)
            try:
                call: Callable[..., Any] = entry
                if config.debug_nans_set:
                    call, args, kwargs = watched_for_nans, (entry, args, kwargs), {}
                if outermost.inside:
                    return call(*args, **kwargs)
                return run_outermost(call, args, kwargs)
            except Exception as error:
                fold_traceback(error, lambda: label(name, func))
                raise

        is_boundary(entered)
        wrapped = cast(F, functools.wraps(entry)(entered))
        return wrapped if traceable else copy_outside_dynamo(wrapped)

    return decorate


def watched_for_nans(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function and look for NaNs: ``config.debug_nans``."""
    return hooks.call_watched_for_nans.provided(func, args, kwargs)


@hooks.describe_arguments.add
def _tensor_texts(arguments: Iterable[tuple[str, Any]]) -> str:
    """Return the tensors in the arguments of a function, by the user's spelling, as text."""
    texts: list[str] = []
    for name, argument in arguments:
        tensors = list(_tensors_in(name, argument))
        texts += [f"{at}: {_tensor_text(x)}" for at, x in tensors[:_MOST_TENSORS]]
        if len(tensors) > _MOST_TENSORS:
            texts[-1] += f" and {len(tensors) - _MOST_TENSORS} more in {name}"
    return ", ".join(texts)


def _tensors_in(name: str, argument: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors in an argument, each with its spelling: ``params['w']``."""
    # isinstance would fail for a stand-in of a value of type Any.
    if issubclass(type(argument), torch.Tensor):
        yield name, argument
        return
    try:
        leaves, structure = pytrees.flatten(argument)
    except Exception:  # the note must not replace the error: a list can contain itself
        return
    for accessor, leaf in zip(structure.accessors(), leaves, strict=True):
        if issubclass(type(leaf), torch.Tensor):
            yield accessor.codify(name), leaf


def _tensor_text(value: torch.Tensor) -> str:
    """Return the dtype and the shape of a tensor: ``float32[3, n]``."""
    with DisableTorchFunctionSubclass():
        # A nested tensor of strided layout has no shape.
        shape = "nested" if value.is_nested else ", ".join(map(_size_text, value.shape))
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"


def keep_call_of_example(error: Exception, func: Any, args: Any, kwargs: Any = None) -> None:
    """Keep the call of an example that torch refused, for the note of the error and its message."""

    def text() -> str:
        leaves = pytrees.leaves_of((args, kwargs or {}))
        types = ", ".join(_tensor_text(x) for x in leaves if isinstance(x, torch.Tensor))
        name = function_name(func)
        name = name.strip("_") if name.endswith("__") else name.lstrip("_")  # `add_` keeps its own
        return f"{name} was called on {types}"

    def refused_alone() -> str | None:
        return _error_of_example(type(error), func, args, kwargs or {})

    keep_refused_call(error, text, refused_alone)


def _error_of_example(kind: type, func: Any, args: Any, kwargs: Any) -> str | None:
    """Return the message of torch's error of a class for the first example, or None.

    NOTE [messages of examples]
    torch's message for a call of a rule has the sizes of all examples and counts their dims, and
    may be that of another operator: ``dot`` runs as ``bmm``. The user reads the message that the
    loop over the examples would raise. It is had by the call on copies of the first example, or on
    zeros of its shape in a trace, once, when the error leaves the outermost transform.
    """
    try:
        example, named = pytrees.tree_map(_first_example, (args, kwargs))
    except Exception:  # the batch is empty, or its sizes are not known
        return None
    try:
        func(*example, **named)
    except Exception as alone:
        return str(alone) if type(alone) is kind else None
    return None


def _first_example(value: Any) -> Any:
    """Return a copy of the first example's value of an argument of a call."""
    if not isinstance(value, torch.Tensor):
        return value
    with DisableTorchFunctionSubclass():
        inner, stack = unwrap_all(value)
        records = value.requires_grad or inner.requires_grad
        if type(inner) in (torch.Tensor, torch.nn.Parameter):
            inner = stack.batch_dims_first(inner.detach())[(0,) * len(stack.batch_levels)]
        else:  # of a trace
            shape = tuple(map(int, value.shape))
            inner = torch.zeros(shape, dtype=value.dtype, device=value.device)
        # A copy that is not a leaf of autograd may be written to.
        return inner.requires_grad_(records).clone()


def _size_text(size: Any) -> str:
    """Return a size as text: an int, or an expression of named dims."""
    symbols = getattr(size.node.shape_env, "symbols", None) if type(size) is torch.SymInt else None
    return str(size) if symbols is None else str(symbols.spell_size(size))
