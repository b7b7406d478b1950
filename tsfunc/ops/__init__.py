"""Operators by shape: the catalogue of categories and the batching rules (a file per category)."""

from __future__ import annotations

from tsfunc.ops import (  # noqa: F401  (imported so that their rows are declared)
    advanced_indexing,
    attention,
    batch_norm,
    batched,
    convolution,
    ctc,
    distances,
    dynamic,
    embedding,
    factories,
    feature_batched,
    fixed,
    forward_ad,
    histograms,
    identity,
    indexing,
    linalg,
    losses,
    n_dimensional,
    random,
    recurrent,
    reductions,
    segments,
    sorting,
    spectral,
    tensor_iterator,
    variadic,
    views,
    weight_norm,
)
from tsfunc.ops.catalogue import OperatorEntry, category_of, census, lookup, operators, register
from tsfunc.ops.registry import BatchLevel, Category, Row, all_rows, find, row, rows

__all__ = [
    "BatchLevel",
    "Category",
    "OperatorEntry",
    "Row",
    "all_rows",
    "category_of",
    "census",
    "find",
    "lookup",
    "operators",
    "register",
    "row",
    "rows",
]
