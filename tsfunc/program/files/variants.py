"""Calls that a loaded function should answer beside those that were made before it was saved.

A specialized function traces for a call of another kind when it comes. A loaded one can't, so that
is done when it is saved, for what people change without a thought: named dims of size 0 and 1
(NOTE [sizes 0 and 1] in ``equal``), ``torch.no_grad``, and whether the arguments require grad.
What comes out is most often the same program, which is in the file once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optree
import torch

from tsfunc.bridge.settings import settings
from tsfunc.bridge.tracing import tracing_here
from tsfunc.program.cache import Cache, Entry
from tsfunc.program.calls import FirstCall, Target
from tsfunc.program.forms import CallForm, example_call


def also_answered(target: Target, entry: Entry, others: Sequence[Entry]) -> list[Entry]:
    """Entries for calls like that of an entry which none of the others answers."""
    if tracing_here():
        return []
    found: list[Entry] = []
    for sizes, grad, requires_grad in itertools.product(
        ({}, *_small_sizes(entry.form)), (True, False), (None, True, False)
    ):
        flat = example_call(entry.form, sizes, requires_grad)
        found += _traced(target, entry, flat, grad, [*others, *found])
    return found


def _traced(
    target: Target, entry: Entry, flat: list[Any], grad: bool, known: list[Entry]
) -> list[Entry]:
    """New entries that a call makes."""
    tree = entry.form.tree
    cache = Cache(len(known) + 2, auto_widen=False)
    cache.entries = tuple(known)
    args, kwargs = arguments = optree.tree_unflatten(tree, flat)
    with torch.set_grad_enabled(grad):
        if settings()[1:] != entry.form.ambient[1:]:  # all but the grad mode
            return []
        try:
            if cache.find(args, kwargs) is None:
                FirstCall(target, arguments, flat, tree).program(cache)
        except Exception:  # the function does not take such calls, or its descriptors do not
            return []
    return [made for made in cache.entries if made not in known]


def _small_sizes(form: CallForm) -> Iterator[Mapping[str, int]]:
    """Sizes of 0 and 1: for each named dim by itself, and 1 for all."""
    dims = form.bounds.values()
    for dim, size in itertools.product(dims, (0, 1)):
        if dim.admits(size):
            yield {dim.name: size}
    if len(dims) > 1 and all(dim.admits(1) for dim in dims):
        yield {dim.name: 1 for dim in dims}
