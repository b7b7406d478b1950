"""tsfunc's control flow in the form of torch's operators, for ``torch.cond`` in transforms.

The functions have the names and arguments of the operators in ``torch.ops.higher_order``; the last
one replaces a Python function of torch. All of them take flat operands and return flat results.
``tsfunc.transforms`` registers them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.transforms.control import cond as choices
from tsfunc.transforms.control import loops
from tsfunc.transforms.control import scan as scans


def cond(
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any] = (),
) -> Any:
    return choices.cond(pred, lambda: true_fn(*operands), lambda: false_fn(*operands))


def while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any] = (),
) -> Any:
    def body(*carry: Any) -> tuple[Any, ...]:
        new = body_fn(*carry, *additional_inputs)
        return (new,) if isinstance(new, torch.Tensor) else tuple(new)

    # The entries of the carry are arguments, also of a carry with one entry.
    return loops.while_loop(
        lambda *carry: cond_fn(*carry, *additional_inputs), body, tuple(carried_inputs)
    )


def scan(
    combine_fn: Callable[..., Any],
    init: Sequence[Any],
    xs: Sequence[Any],
    additional_inputs: Sequence[Any] = (),
) -> Any:
    count = len(init)

    def step(carry: Sequence[Any], x: Sequence[Any]) -> tuple[Any, Any]:
        results = tuple(combine_fn(*carry, *x, *additional_inputs))
        return results[:count], results[count:]

    carry, ys = scans.scan(step, tuple(init), tuple(xs))
    return (*carry, *ys)


def map_impl(
    f: Callable[..., Any],
    xs: Sequence[Any],
    pos_args: Sequence[Any] = (),
    mutated_arg_indices: str = "",  # since torch 2.14; running f writes into the same inputs
) -> Any:
    return scans.map(lambda x: f(*x, *pos_args), tuple(xs))


def associative_scan(
    combine_fn: Callable[..., Any], xs: Sequence[Any], additional_inputs: Sequence[Any] = ()
) -> Any:
    def combine(left: Sequence[Any], right: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(combine_fn(*left, *right, *additional_inputs))

    return scans.associative_scan(combine, tuple(xs))


def generic_associative_scan(
    operator: Callable[..., Any],
    leaves: Sequence[Any],
    dim: int = 0,
    additional_inputs: Sequence[Any] = (),
) -> Any:
    """associative_scan with an operator that combines many slices at a time, pointwise."""

    def combine(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        return pytrees.flatten(operator(*left, *right, *additional_inputs))[0]

    return scans.associative_scan(combine, list(leaves), axis=dim)
