"""Operators by shape: the catalogue of categories and the batching rules (a file per family).

The public names are in ``__all__``. The modules of the package are private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tsfunc._lazy import lazy_exports
from tsfunc.ops import (  # noqa: F401  (imported so that their rows are declared)
    advanced_indexing,
    attention,
    batch_norm,
    batched,
    collectives,
    contractions,
    convolution,
    debug_calls,
    distances,
    dynamic,
    embedding,
    factories,
    feature_batched,
    fixed,
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
    scaled,
    segments,
    sorting,
    sparse,
    spectral,
    tensor_iterator,
    variadic,
    views,
    weight_norm,
)
from tsfunc.ops.registry import Category, Row, RuleLevel, all_rows, find, row, rows

__all__ = [
    "Category",
    "OperatorEntry",
    "Row",
    "RuleLevel",
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

# The catalogue is loaded at its first use, because transforms do not need it.
if TYPE_CHECKING:
    from tsfunc.ops.catalogue.counts import census, operators
    from tsfunc.ops.catalogue.custom import register
    from tsfunc.ops.catalogue.lookup import OperatorEntry, category_of, lookup
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "catalogue.counts": "census operators",
            "catalogue.custom": "register",
            "catalogue.lookup": "OperatorEntry category_of lookup",
        },
    )
