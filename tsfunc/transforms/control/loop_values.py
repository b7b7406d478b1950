"""The arguments of a loop's body, which are values of its own.

NOTE [values of a loop's body]
A body may write in place into its arguments. The writes reach what it returns, and nothing else:
not the tensors that the loop was called with, and not the results of earlier steps. The first step
therefore runs on copies. If it writes into them, as the counts of writes tell, later steps get
copies of scanned slices, and the loop keeps the written part of each carry apart. A part that has
the memory of the last carry is kept, so that a step which fills a part of a buffer copies nothing.
A part with other memory, which another tensor may share, is copied. If autograd saves values of the
steps, each carry is copied. A trace of a body makes the same copies: NOTE [bodies without writes]
in ``bridge/control/traced_bodies``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from tsfunc import pytrees
from tsfunc.bridge.control.node_writes import memory_key, physical_tensor
from tsfunc.bridge.control.subset_arguments import write_count
from tsfunc.bridge.tracers.nesting import is_differentiated


class LoopValues:
    """Keeps the values of a loop's body apart: NOTE [values of a loop's body].

    Args:
        writes: False for a body that is known not to write into its arguments.

    Attributes:
        written: the leaves of the carry that the body writes into, by position; None if no step
            has been made.
        records: True if autograd saves values of each step, which later steps may not change.
        slices_written: True if the body writes into its other arguments.
    """

    def __init__(self, writes: bool | None = None) -> None:
        self.written: list[int] | None = [] if writes is False else None
        self.records = self.slices_written = False

    def call(self, body: Callable[..., Any], carry: Any, *slices: Any) -> tuple[Any, Any]:
        """Call a body with a carry of the loop and slices of tensors.

        Returns:
            The carry that the body got, and its result.
        """
        if self.written is not None:
            if self.slices_written:
                slices = _copy_tensors(slices)
            return carry, body(carry, *slices)
        # Local variables hold the copies: what the loop holds is from outside for a vmap.
        copy, copies = _copy_tensors(carry), _copy_tensors(slices)
        before, before_slices = _states(copy), _states(copies)
        result = body(copy, *copies)
        self.written = _written_positions(before)
        self.records = torch.is_grad_enabled() and any(
            is_differentiated(before[i][0]) for i in self.written
        )
        self.slices_written = bool(_written_positions(before_slices))
        return copy, result

    def next_carry(self, carry: Any, result: Any) -> Any:
        """Return the carry that a step has returned, apart from other tensors if it is written."""
        if not self.written:
            return result
        if not self.records and _returns_unchanged(carry, result):
            return result
        before = pytrees.flatten(carry)[0]
        after, structure = pytrees.flatten(result)
        memories = {
            memory_key(before[i]) for i in self.written if isinstance(before[i], torch.Tensor)
        }
        free = set(memories)
        for i in self.written:
            if isinstance(after[i], torch.Tensor):
                memory = memory_key(after[i])
                if memory not in free or self.records:
                    after[i] = after[i].clone()
                free.discard(memory)
        for i, x in enumerate(after):
            if isinstance(x, torch.Tensor) and i not in self.written and memory_key(x) in memories:
                after[i] = x.clone()
        return pytrees.unflatten(structure, after)

    def result(self, y: Any) -> Any:
        """Return another result of a step, which later steps do not change."""
        return _copy_tensors(y) if self.written and y is not None else y


def _returns_unchanged(carry: Any, result: Any) -> bool:
    """True if a step has returned the tensors that it got, or a tuple of them with numbers."""
    if type(carry) is tuple and type(result) is tuple:
        pairs = zip(carry, result, strict=True)
        return all(x is y or type(y) in _NUMBERS for x, y in pairs)
    return result is carry


_NUMBERS: Final = (int, float, bool, type(None))


def _states(tree: Any) -> list[tuple[Any, Any, int]]:
    """Return the leaves of a tree, with the tensors inside of them and their counts of writes."""
    return [
        (x, physical_tensor(x), write_count(x)) if isinstance(x, torch.Tensor) else (x, x, 0)
        for x in pytrees.flatten(tree)[0]
    ]


def _written_positions(states: list[tuple[Any, Any, int]]) -> list[int]:
    """Return the positions of tensors that have been written into."""
    return [
        i
        for i, (x, inner, count) in enumerate(states)
        if isinstance(x, torch.Tensor)
        and (physical_tensor(x) is not inner or write_count(x) != count)
    ]


def _copy_tensors(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    return pytrees.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)
