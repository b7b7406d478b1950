"""Operators by shape: the catalogue of categories and the batching rules (a file per category)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    quantiles,
    random,
    recurrent,
    reductions,
    segments,
    sorting,
    sparse,
    spectral,
    tensor_iterator,
    variadic,
    views,
    weight_norm,
)
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

if TYPE_CHECKING:
    from tsfunc.ops.catalogue.counts import census, operators
    from tsfunc.ops.catalogue.custom import register
    from tsfunc.ops.catalogue.lookup import OperatorEntry, category_of, lookup

# The catalogue is loaded when it is asked for: ``import tsfunc`` does not need it.
_LATE = {
    "OperatorEntry": "lookup",
    "category_of": "lookup",
    "census": "counts",
    "lookup": "lookup",
    "operators": "counts",
    "register": "custom",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        module = importlib.import_module(f"tsfunc.ops.catalogue.{_LATE[name]}")
        globals()[name] = getattr(module, name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
