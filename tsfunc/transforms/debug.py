"""Prints and callbacks that work inside of transforms: ``tsfunc.debug``."""

from __future__ import annotations

import builtins
import contextlib
import itertools
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.control.effect_operator import Effect, example_indices
from tsfunc.bridge.control.nans import watch_nans
from tsfunc.bridge.tracers.checks import examples_text
from tsfunc.bridge.tracers.dynamo import outside_dynamo
from tsfunc.errors import FailedCheckError
from tsfunc.user_code import folding

__all__ = ["callback", "nans", "print"]


def __dir__() -> list[str]:
    return __all__


@outside_dynamo
@folding("debug.print")
def print(format: str, /, *args: Any, per_example: bool = True, **kwargs: Any) -> None:
    """Print values while a function runs, also inside of transforms and programs.

    Python's ``print`` shows tracers inside of a transform, and runs once, at the trace, in a
    specialized function. This function prints the values of tensors, at every call of a program.
    Lines appear in the order of the calls.

    Args:
        format: a format string, as for ``str.format``.
        args: the values of its fields: tensors, numbers, strings, and lists, tuples and dicts of
            these.
        per_example: under ``vmap``, True prints a line for each example; False prints one line
            with the whole batch, whose first dims are the batch dims, the outermost vmap's first.
            A value that is not batched is expanded to the batch.
        kwargs: the values of named fields.

    Raises:
        ValueError: the format string and the arguments do not match.

    A call without batched tensors prints once. In a branch or a loop that only some examples run,
    these examples are printed. ``grad`` and ``jvp`` print the values of the function. A function
    that is run again, as by ``checkpoint``, prints again. A program with a print, a
    callback or a check can't be saved to a file.

    Example:
        >>> import torch
        >>> from tsfunc import debug, grad, specialize, vmap
        >>> def f(x):
        ...     debug.print("x is {x}, its square {}", x * x, x=x)
        ...     return x.sin()
        >>> _ = specialize(vmap(grad(f)))(torch.tensor([1.0, 2.0]))
        x is 1.0, its square 1.0
        x is 2.0, its square 4.0

    Corresponds to ``jax.debug.print``.
    """
    _check_format("debug.print", format, args, kwargs)

    def show(*args: Any, **kwargs: Any) -> None:
        builtins.print(format.format(*args, **kwargs))

    _call_with(show, args, kwargs, per_example)


@outside_dynamo
@folding("debug.callback")
def callback(
    func: Callable[..., Any], /, *args: Any, per_example: bool = True, **kwargs: Any
) -> None:
    """Call a Python function with the values of tensors, also inside of transforms and programs.

    Args:
        func: a function of the arguments; its result is ignored. The function gets plain tensors
            that do not require a gradient, and may have any effect on the host.
        args: its arguments: pytrees of tensors and other values.
        per_example: under ``vmap``, True calls ``func`` for each example, in order; False calls it
            once with the whole batch, whose first dims are the batch dims, the outermost vmap's
            first. A tensor that is not batched is expanded to the batch.
        kwargs: its keyword arguments.

    A call without batched tensors calls ``func`` once. A program calls ``func`` at each of its
    runs, and keeps it. The rest is as for :func:`print`.

    Example:
        >>> import torch
        >>> from tsfunc import debug, vmap
        >>> norms = []
        >>> def f(x):
        ...     debug.callback(lambda norm: norms.append(norm.item()), x.norm())
        ...     return x * 2
        >>> _ = vmap(f)(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        >>> norms
        [5.0, 1.0]

    Corresponds to ``jax.debug.callback``.
    """
    _call_with(func, args, kwargs, per_example)


def _call_with(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], per_example: bool
) -> None:
    """Call a function with the values of its arguments: NOTE [debug effects]."""
    tensors, rebuilt = _tensors_of((args, kwargs))

    def call(values: Sequence[torch.Tensor], batch_dims: int) -> None:
        batch = values[0].shape[:batch_dims] if per_example and values else ()
        for index in itertools.product(*map(range, batch)):
            positional, named = rebuilt([value[index] for value in values])
            func(*positional, **named)

    Effect(call)(tensors)


def _tensors_of(tree: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """Return the tensors of a pytree, and the function that replaces them in the pytree.

    A symbolic number becomes a tensor, and is a number again in its place.
    """
    leaves, structure = pytrees.flatten(tree)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _VALUES)]
    numbers = {i for i in at if not isinstance(leaves[i], torch.Tensor)}
    tensors = [torch.full((), leaves[i]) if i in numbers else leaves[i] for i in at]
    rest = [None if isinstance(leaf, _VALUES) else leaf for leaf in leaves]

    def rebuilt(values: Sequence[torch.Tensor]) -> Any:
        rebuilt_leaves: list[Any] = list(rest)
        for i, value in zip(at, values, strict=True):
            rebuilt_leaves[i] = value.item() if i in numbers else value
        return optree.tree_unflatten(structure, rebuilt_leaves)

    return tensors, rebuilt


_VALUES = (torch.Tensor, torch.SymInt, torch.SymFloat)


@folding("debug.nans")
@contextlib.contextmanager
def nans() -> Iterator[None]:
    """Context manager: raise an error at the first operator that returns a NaN.

    The error names the operator, the line of the user's code, and the example of each ``vmap``.
    In a backward pass the line is that of the forward call. If a program makes a NaN, its function
    is called again without the program, which finds the example; a program without its function
    (:func:`tsfunc.load`) gives the line.

    A NaN among the arguments of a function is found at the first operator that passes it on.
    Operators that make a tensor from no tensor, as ``torch.full(size, nan)``, may make NaNs. Calls
    of torch outside of transforms are watched too, on the thread that entered the block. The
    operators of a program with a compiled backend are watched as far as torch calls them one by
    one. Every operator takes longer in the block, because its result is read.

    Raises:
        NanError: an operator returns a NaN.

    Example:
        >>> import torch
        >>> from tsfunc import debug, errors, vmap
        >>> def f(x):
        ...     y = x - 2
        ...     return y.log()
        >>> try:
        ...     with debug.nans():
        ...         _ = vmap(f)(torch.tensor([4.0, 1.0, 3.0]))
        ... except errors.NanError as error:
        ...     error.operator, error.examples
        ('aten::log', (1,))

    ``tsfunc.config.debug_nans = True`` has the same effect on every transform and program.
    Corresponds to ``jax.debug_nans``.
    """
    with watch_nans():
        yield


@outside_dynamo
@folding("check")
def check(holds: Any, message: str, /, *args: Any, **kwargs: Any) -> None:
    """Raise an error if a condition does not hold, also inside of transforms and programs.

    Under ``vmap`` the condition may differ from example to example. The error names the examples
    that fail. A program checks at every call.

    Args:
        holds: a bool, or a bool tensor whose elements must all be True.
        message: the message of the error, a format string as for ``str.format``.
        args: the values of its fields, those of the first example that fails: tensors, numbers,
            strings, and lists, tuples and dicts of these.
        kwargs: the values of its named fields.

    Raises:
        FailedCheckError: the condition does not hold; ``error.examples`` has the index of each
            example that fails, a tuple with an entry for each vmap. The tuple is empty for a branch
            or a loop of a program, which runs without the indices of its examples.
        TypeError: ``holds`` is neither a bool nor a bool tensor.
        ValueError: the message and its arguments do not match.

    The check reads the condition on the host, so it waits for an accelerator.

    Example:
        >>> import torch
        >>> from tsfunc import check, errors, vmap
        >>> def root(x):
        ...     check(x >= 0, "root: expected a number of at least 0, got {}", x)
        ...     return x.sqrt()
        >>> try:
        ...     vmap(root)(torch.tensor([4.0, -1.0, 9.0, -3.0]))
        ... except errors.FailedCheckError as error:
        ...     error.examples
        ((1,), (3,))

    Corresponds to ``jax.experimental.checkify.check``.
    """
    _check_format("check", message, args, kwargs)
    if isinstance(holds, bool):
        holds = torch.tensor(holds)
    if not isinstance(holds, torch.Tensor) or holds.dtype != torch.bool:
        got = holds.dtype if isinstance(holds, torch.Tensor) else type(holds).__name__
        raise TypeError(f"check: expected a bool or a bool tensor, got {got}. Compare it first.")
    indices = example_indices(holds)
    tensors, rebuilt = _tensors_of((args, kwargs))

    def run(values: Sequence[torch.Tensor], batch_dims: int) -> None:
        condition, *rest = values
        failed = ~condition.reshape(*condition.shape[:batch_dims], -1).all(-1)
        if failed.any():
            positions = [tuple(row) for row in failed.nonzero().tolist()]
            positional, named = rebuilt([x[positions[0]] for x in rest[len(indices) :]])
            text = message.format(*positional, **named)
            if not batch_dims:
                raise FailedCheckError(text)
            examples: list[tuple[int, ...]] = []
            # A body that was traced for one example does not know which examples run it.
            if len(indices) == batch_dims:
                examples = [tuple(int(x[at]) for x in rest[:batch_dims]) for at in positions]
            text += f"\nThe check failed for {len(positions)} of {failed.numel()} examples"
            if not examples:
                raise FailedCheckError(f"{text} that run here", examples)
            first = " (the message is that of the first one)" if len(examples) > 1 else ""
            raise FailedCheckError(f"{text}{examples_text(examples)}{first}", examples)

    Effect(run, checks=True)([holds, *indices, *tensors])


def _check_format(name: str, format: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that the fields of a format string are the arguments."""
    used: set[str] = set()
    automatic = 0
    for _, field, _, _ in string.Formatter().parse(format):
        if field is None:
            continue
        first = field.partition(".")[0].partition("[")[0]
        if not first:
            first, automatic = str(automatic), automatic + 1
        used.add(first)
    arguments = {str(i) for i in range(len(args))} | kwargs.keys()
    if used != arguments:
        raise ValueError(
            f"{name}({format!r}, ...): expected one argument for each field, got the fields "
            f"{sorted(used)} and the arguments {sorted(arguments)}. Double the braces of text: "
            f"'{{{{' and '}}}}'."
        )
