"""``einsum``: sums of products over named dims, in which the batch dim gets one more letter."""

from __future__ import annotations

import string
from functools import lru_cache
from typing import Any

from tsfunc.ops.dims import expand_at, logical_rank
from tsfunc.ops.refusal import raise_as_one_example
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row


@lru_cache(maxsize=1024)
def _with_batch(equation: str, positions: tuple[int | None, ...]) -> str | None:
    """Return the equation for the physical tensors.

    Returns:
        None if the equation does not have one term per tensor, or if no letter is unused.
    """
    text = "".join(equation.split())
    inputs, arrow, output = text.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(positions):
        return None
    letter = next((x for x in string.ascii_letters if x not in text), None)
    if letter is None:
        return None
    if not arrow:
        once = {x for x in inputs if x.isalpha() and inputs.count(x) == 1}
        output = ("..." if "..." in inputs else "") + "".join(sorted(once))
    mapped = []
    for term, bdim in zip(terms, positions, strict=True):
        if bdim is None:
            mapped.append(term)
        elif "." in term:  # an ellipsis has any number of dims: the batch is first
            mapped.append(letter + term)
        else:
            mapped.append(term[:bdim] + letter + term[bdim:])
    return f"{','.join(mapped)}->{letter}{output}"


@row("aten::einsum")
def einsum(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The batch dim gets its own letter, in its place."""
    equation, tensors = args
    positions = bdims[1]
    if "." in equation:
        tensors = [
            x if bdim is None else expand_at(x, bdim, level.batch_size, 0)
            for x, bdim in zip(tensors, positions, strict=True)
        ]
        positions = [None if bdim is None else 0 for bdim in positions]
    for x, bdim, term in zip(
        tensors, positions, equation.partition("->")[0].split(","), strict=False
    ):
        if "." not in term and logical_rank(x, bdim) != sum(map(str.isalpha, term)):
            return raise_as_one_example(op, (None, bdims[1]), args, kwargs)
    physical = _with_batch(equation, tuple(positions))
    if physical is None:
        return raise_as_one_example(op, (None, bdims[1]), args, kwargs)
    return op(physical, tensors, **kwargs), 0
