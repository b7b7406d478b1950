"""Helpers that the derivative transforms share: ``argnums``, checks of inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.batch.split_level import SplitLevel
from tsfunc.bridge.grad import autograd
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.batch_tracer import unwrap_ended
from tsfunc.bridge.tracers.level_proxies import all_as_seen_by_current_level
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel, innermost_level
from tsfunc.dispatch.state import innermost_of
from tsfunc.types.values import tensor_advice

Argnums = int | tuple[int, ...]


def is_nested(value: Any) -> bool:
    """True if a value is a nested tensor, of either of torch's layouts."""
    return (
        isinstance(value, torch.Tensor) and not isinstance(value, Tracer) and bool(value.is_nested)
    )


def sizes_text(x: torch.Tensor) -> str:
    """Return the shape of a tensor for people."""
    return "(nested)" if is_nested(x) else str(tuple(x.shape))


def same_sizes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors have equal shapes; for nested tensors, examples of equal shapes."""
    if is_nested(one) or is_nested(other):
        return one.layout == other.layout and torch.is_same_size(one, other)
    return one.shape == other.shape


def parameter_names(func: Callable[..., Any], count: int) -> list[str]:
    """Return the parameter names of the first positional arguments of a function."""
    kinds = inspect.Parameter
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = []
    for i in range(count):
        by_position = i < len(parameters) and parameters[i].kind not in (
            kinds.VAR_POSITIONAL, kinds.KEYWORD_ONLY, kinds.VAR_KEYWORD,
        )  # fmt: skip
        names.append(parameters[i].name if by_position else f"input {i}")
    return names


def leaf_names(name: str, value: Any) -> list[str]:
    """Return the user's spelling of each leaf of an argument: ``params['w']``."""
    return [accessor.codify(name) for accessor in pytrees.structure_of(value).accessors()]


def names_of_selected(
    func: Callable[..., Any], args: Sequence[Any], argnums: Argnums
) -> Callable[[], list[str]]:
    """Return a function that returns the spelling of each leaf that is differentiated by."""

    def names() -> list[str]:
        parameters = parameter_names(func, len(args))
        chosen = argnums if isinstance(argnums, tuple) else (argnums,)
        return [name for i in chosen for name in leaf_names(parameters[i], args[i])]

    return names


def check_argnums(
    api: str, func: Callable[..., Any], argnums: Argnums, count: int
) -> tuple[int, ...]:
    """Return the positions in ``argnums`` as nonnegative indices."""
    if isinstance(argnums, bool) or not isinstance(argnums, int | tuple):
        raise RuntimeError(f"{api}: argnums must be int or Tuple[int, ...], got: {type(argnums)}")
    chosen = argnums if isinstance(argnums, tuple) else (argnums,)
    if not chosen:
        raise RuntimeError(f"{api}: argnums must be non-empty")
    wrapped = []
    for argnum in chosen:
        if isinstance(argnum, bool) or not isinstance(argnum, int):
            raise RuntimeError(f"{api}: argnum must be int, got: {type(argnum)}")
        if not -count <= argnum < count:
            named = f": {', '.join(parameter_names(func, count))}" if count else ""
            raise RuntimeError(
                f"{api}: Got argnum={argnum}, but only {count} positional inputs{named}. Arguments "
                f"that are passed by name have no number: pass them by position."
            )
        wrapped.append(argnum % count)
    if len(set(wrapped)) != len(wrapped):
        raise RuntimeError(f"{api}: argnums elements must be unique, got {argnums}")
    return tuple(wrapped)


def replace_selected(args: Sequence[Any], argnums: Argnums, new: Any) -> tuple[Any, ...]:
    """Return the arguments with those that ``argnums`` names replaced."""
    positions, values = ((argnums,), (new,)) if isinstance(argnums, int) else (argnums, new)
    return tuple(with_replaced(args, positions, values))


def with_replaced(values: Sequence[Any], positions: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Return the values with those at ``positions`` replaced."""
    replaced = list(values)
    for position, value in zip(positions, new, strict=True):
        replaced[position] = value
    return replaced


def level_to_record_on(values: Any) -> TracerLevel | None:
    """Return the level that autograd records on: the innermost of the thread and of the values.

    A level that runs its one example unbatched has no tracers to record on, and is skipped.
    """
    current = innermost_of(TracerLevel)
    while isinstance(current, SplitLevel) and current.single and current.axis_name is None:
        current = innermost_of(TracerLevel, current.outer.levels)
    innermost = innermost_level(pytrees.leaves_of(values))
    if innermost is None or not innermost.alive:
        return current
    if current is not None and current.depth >= innermost.depth:
        return current
    return innermost


def values_of_ended_levels(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return tensors with the values of tracers that outlive their vmap.

    See NOTE [values that outlive a vmap].
    """
    for x in tensors:
        if isinstance(x, Tracer):
            values = unwrap_ended(tensors, {})
            return tensors if values is None else values[0]
    return tensors


def traced_inputs(
    primals: Sequence[torch.Tensor], level: TracerLevel | None
) -> Sequence[torch.Tensor]:
    """Return primals or cotangents as values of the current trace, if there is one.

    As a constant of the level, a tensor could not be an operand of the program's control flow and
    also be the tensor that is differentiated by. The batch dims of a cotangent from a vmap around
    the trace would be taken for those of a vmap in it.
    """
    primals = values_of_ended_levels(primals)
    trace = None if level is None else current_trace()
    if trace is None or level is trace:
        return primals
    return [trace.lifted_here(x) for x in primals]


def refuse_unrecorded(outputs: Sequence[torch.Tensor], level: TracerLevel | None) -> None:
    """Raise if a result belongs to a level of another thread, on which autograd did not record."""
    for out in outputs:
        other = out.dispatch_level if isinstance(out, Tracer) else None
        if other is not None and other.alive and (level is None or other.depth > level.depth):
            raise RuntimeError(
                f"the function to differentiate uses values of {other.name}, which was entered on "
                f"another thread. Pass them to the function as arguments, or differentiate on the "
                f"thread of {other.name}."
            )


def flatten_tensors(
    api: str, label: str, tree: Any, names: Callable[[], Sequence[str]] | None = None
) -> tuple[list[torch.Tensor], Any]:
    """Return the leaves of a pytree and its structure; raise if a leaf is not a tensor.

    Args:
        names: returns the user's spelling of each leaf, if the leaves are differentiated by; their
            dtypes are checked, too.
    """
    leaves, spec = pytrees.flatten(tree)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            named = f" It is {names()[i]}." if names is not None else ""
            advice = pytrees.static_advice(spec, i) or tensor_advice(leaf)
            raise ValueError(
                f"{api}: Expected {label} to only contain Tensors. Thing passed to transform API "
                f"must be Tensor, got {type(leaf)}.{named}{advice}"
            )
        if names is not None:
            autograd.check_differentiable(leaf, names, i)
    return all_as_seen_by_current_level(leaves), spec


def flatten_selected(
    api: str,
    func: Callable[..., Any],
    args: Sequence[Any],
    argnums: Argnums,
    label: str = "the differentiated arguments",
) -> tuple[Argnums, list[torch.Tensor], Any]:
    """Return the leaves of the arguments that ``argnums`` names.

    Returns:
        ``argnums`` with nonnegative indices, the leaves, and their structure.
    """
    chosen = check_argnums(api, func, argnums, len(args))
    positions = chosen[0] if isinstance(argnums, int) else chosen
    primals = args[positions] if isinstance(positions, int) else tuple(args[i] for i in positions)
    names = names_of_selected(func, args, chosen)
    flat, spec = flatten_tensors(api, label, primals, names)
    return positions, flat, spec


def flatten_matching(
    api: str, tree: Any, spec: optree.PyTreeSpec, mismatch: str, expected: str = "Tensors"
) -> list[torch.Tensor]:
    """Return the leaves of tangents or cotangents; raise if they are not those of some values.

    Args:
        spec: the structure of the values.
        mismatch: the message for another structure, with ``{expected}`` and ``{got}``.
        expected: the message for a leaf that is not a tensor begins with it.
    """
    leaves, got = pytrees.flatten(tree)
    if got != spec:
        texts = {"expected": pytrees.structure_text(spec), "got": pytrees.structure_text(got)}
        raise RuntimeError(f"{api}: {mismatch.format(**texts)}")
    refuse_other_leaves(api, leaves, spec, expected)
    return leaves


def refuse_other_leaves(
    api: str, leaves: Sequence[Any], spec: optree.PyTreeSpec, expected: str
) -> None:
    """Raise if a leaf is not a tensor."""
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            advice = pytrees.static_advice(spec, i) or tensor_advice(leaf)
            raise RuntimeError(f"{api}: Expected {expected}, got {type(leaf)}.{advice}")


def flatten_output(api: str, out: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the leaves of a function's output; raise if it is empty or a leaf is not a tensor."""
    leaves, spec = pytrees.flatten(out)
    if out is None or not leaves:
        raise RuntimeError(
            f"{api}: Expected f to be a function that has non-empty output (got output = {out})"
        )
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise RuntimeError(
                f"{api}: expected f(*primals) to return only tensors, got unsupported type "
                f"{type(leaf)}"
            )
    return all_as_seen_by_current_level(leaves), spec


def split_aux(api: str, output: Any, has_aux: bool) -> tuple[Any, Any]:
    """Return the output and the auxiliary part, which is None without ``has_aux``."""
    if not has_aux:
        return output, None
    if not (isinstance(output, tuple) and len(output) == 2):
        raise RuntimeError(
            f"{api}: output of function f should be a tuple: (output, aux) if has_aux is True, "
            f"got {_text_of(output)}"
        )
    return output


def _text_of(output: Any) -> str:
    return f"a tuple of {len(output)}" if isinstance(output, tuple) else str(type(output))


def refuse_complex(api: str, label: str, leaves: Sequence[torch.Tensor]) -> None:
    """Raise for complex tensors: jacrev and jacfwd are for real functions."""
    for i, leaf in enumerate(leaves):
        if leaf.is_complex():
            raise RuntimeError(
                f"{api}: Expected all {label} to be real but received complex tensor at flattened "
                f"input idx: {i}"
            )
