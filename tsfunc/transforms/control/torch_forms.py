"""torch's operators for control flow as ours: what ``torch.cond`` and its like are in transforms.

Their functions take flat operands, and return flat results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc.bridge.torch_loops import stands_for
from tsfunc.transforms.control.cond import cond
from tsfunc.transforms.control.loops import while_loop
from tsfunc.transforms.control.scan import associative_scan, map, scan

_own = torch.ops.higher_order


@stands_for(_own.cond)
def _cond(
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any] = (),
) -> Any:
    return cond(pred, lambda: true_fn(*operands), lambda: false_fn(*operands))


@stands_for(_own.while_loop)
def _while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any] = (),
) -> Any:
    def body(carry: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(body_fn(*carry, *additional_inputs))

    return while_loop(
        lambda carry: cond_fn(*carry, *additional_inputs), body, tuple(carried_inputs)
    )


@stands_for(_own.scan)
def _scan(
    combine_fn: Callable[..., Any],
    init: Sequence[Any],
    xs: Sequence[Any],
    additional_inputs: Sequence[Any] = (),
) -> Any:
    count = len(init)

    def step(carry: Sequence[Any], x: Sequence[Any]) -> tuple[Any, Any]:
        found = tuple(combine_fn(*carry, *x, *additional_inputs))
        return found[:count], found[count:]

    carry, ys = scan(step, tuple(init), tuple(xs))
    return (*carry, *ys)


@stands_for(_own.map_impl)
def _map(f: Callable[..., Any], xs: Sequence[Any], pos_args: Sequence[Any] = ()) -> Any:
    return map(lambda x: f(*x, *pos_args), tuple(xs))


@stands_for(_own.associative_scan)
def _associative_scan(
    combine_fn: Callable[..., Any], xs: Sequence[Any], additional_inputs: Sequence[Any] = ()
) -> Any:
    def combine(left: Sequence[Any], right: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(combine_fn(*left, *right, *additional_inputs))

    return associative_scan(combine, tuple(xs))
