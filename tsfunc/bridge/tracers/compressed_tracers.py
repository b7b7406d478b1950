"""Tracers of values in sparse layouts, in particular compressed ones (CSR, CSC, BSR, BSC).

NOTE [compressed tracers]
C++ can't store such a layout in a tracer: with autograd recording, the process crashes when C++
reads it from a tensor subclass. The tracer is therefore strided in C++, and ``layout`` is read
in Python. Functions that choose by layout in C++, before any batching rule, are replaced here by
the operator that they would choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from tsfunc.bridge.tracers.attributes import read_from_value
from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.ops.compressed import is_compressed

_aten = torch.ops.aten
function_rules: Final = FunctionRules()


def _is_for_compressed(x: Any, *others: Any) -> bool:
    """True if the first tensor is a compressed tracer."""
    return isinstance(x, Tracer) and is_compressed(x)


def _to_dense(
    x: Tensor, dtype: torch.dtype | None = None, *, masked_grad: bool | None = None
) -> Any:
    return _aten._to_dense(x, dtype, masked_grad)


def _to_sparse(
    x: Tensor,
    *,
    layout: torch.layout | None = None,
    blocksize: Any = None,
    dense_dim: int | None = None,
) -> Any:
    return _aten._to_sparse(x, layout=layout, blocksize=blocksize, dense_dim=dense_dim)


def _stored(func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the number of stored elements, which all examples must share."""
    x = args[0]
    if not isinstance(x, Tracer) or is_compressed(x):
        return NotImplemented
    return x._indices().shape[1]


def _product(x: Tensor, *others: Any) -> Any:
    """Refuse a product whose derivative by the sparse matrix would be sparse."""
    if len(others) == 1 and x.requires_grad:
        raise NotImplementedError(
            f"vmap: torch.sparse.mm of a batch of tensors of layout {x.layout} has no derivative "
            f"by them. Use x @ y, whose derivative is dense, or x.to_sparse()."
        )
    return NotImplemented


function_rules.add(Stage.METHOD, _stored, Tensor._nnz)
function_rules.add(
    Stage.METHOD,
    read_from_value,
    Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.is_sparse_csr.__get__,  # type: ignore[attr-defined]
)
for _function, _mine in (
    (torch.sparse.mm, _product),
    (Tensor.to_dense, _to_dense),
    (Tensor.to_sparse, _to_sparse),
    (Tensor.to_sparse_csr, _aten._to_sparse_csr),
    (Tensor.to_sparse_csc, _aten._to_sparse_csc),
    (Tensor.to_sparse_bsr, _aten._to_sparse_bsr),
    (Tensor.to_sparse_bsc, _aten._to_sparse_bsc),
):
    function_rules.replace(_function, serves=_is_for_compressed)(_mine)
