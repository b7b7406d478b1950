"""``x.view(...)`` of an operator's result that the batch has laid out in another way.

For one example most results are contiguous, and programs take views of them. For a batch a result
has the batch dim where the arguments had theirs: between dims of the example, of which there is no
view as one then. So such a result is laid out anew, with the batch dim first. That is done to what
an operator at the level made and nobody else has: a view of a tensor from outside, or of one that
has views already, would not be one of it any more.

Private names used here (torch 2.11 to 2.13): ``_C._storage_Use_Count`` and
``UntypedStorage._cdata`` say how many tensors have a storage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _storage_Use_Count

from tsfunc.bridge.batch_tracer import BatchTracer
from tsfunc.bridge.births import born_inside
from tsfunc.bridge.fallback import PARTS
from tsfunc.bridge.turning import memory_of, physical
from tsfunc.ops.dims import front


def _view(x: BatchTracer, sizes: Any) -> torch.Tensor:
    """The view that the rule could not take."""
    level, at = x.dispatch_level, x.bdim
    assert at is not None
    own = _is_own(x)
    with level.restored():
        x.value.new_empty(x.shape).view(sizes)  # raises where there is none in any layout
        if not own:
            raise RuntimeError(
                f"{level.name}: view size is not compatible with input tensor's size and stride "
                f"(at least one dimension spans across two contiguous subspaces). Use "
                f".reshape(...) instead: the batch dim lies between dims that would become one."
            )
        x.value, x.bdim = front(x.value, at).contiguous(), 0
    return torch.ops.aten.view.default(x, sizes)


def _is_own(x: BatchTracer) -> bool:
    """Whether an operator at the level made its value, of which there are no views."""
    plain = physical(x)
    memory = None if plain is None else memory_of(plain)
    if plain is None or memory is None:
        return False
    tensors = _storage_Use_Count(memory) - 1  # the storage's own Python object is one more
    return tensors == 1 and id(plain) in born_inside(x.dispatch_level)


PARTS["aten::view"] = _view
