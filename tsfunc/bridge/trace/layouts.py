"""Layouts of tensors that a trace can't follow: compressed sparse and nested tensors."""

from __future__ import annotations

from typing import Final

import torch

from tsfunc.errors import ClosureError, TypeCheckError

_COMPRESSED: Final = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def check_layout(value: torch.Tensor, name: str | None = None) -> None:
    """Refuse a tensor whose layout a trace can't follow.

    Args:
        value: the tensor.
        name: the argument that it belongs to; None for a tensor from elsewhere.

    Raises:
        TypeCheckError: an argument has such a layout.
        ClosureError: another tensor has such a layout.
    """
    # Python answers a TypeError of an operator such as `*` by an error of its own.
    error = ClosureError if name is None else TypeCheckError
    place = name or "a tensor that the function captures or makes"
    if value.layout in _COMPRESSED:
        raise error(
            f"specialize: expected strided or COO tensors, got {value.layout} for {place}. A trace "
            f"can't follow compressed tensors. Pass x.to_dense() or x.to_sparse()."
        )
    if value.is_nested:
        raise error(
            f"specialize: expected strided or COO tensors, got a nested tensor for {place}. A "
            f"trace has no sizes for its examples. Pass x.to_padded_tensor(0.0), or specialize the "
            f"function of one example and call vmap of it with the nested tensor."
        )
