"""Operators by shape: the catalogue of categories and the batching rules (a file per category)."""

from __future__ import annotations

from tsfunc.ops import reductions, tensor_iterator  # noqa: F401  (declares rows)
from tsfunc.ops.registry import BatchLevel, Category, Row, all_rows, find, row, rows

__all__ = ["BatchLevel", "Category", "Row", "all_rows", "find", "row", "rows"]
