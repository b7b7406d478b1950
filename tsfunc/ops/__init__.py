"""Operators by shape: the catalogue of categories and the batching rules (a file per family).

The public names are in ``__all__``. The modules of the package are private.
"""

from __future__ import annotations

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

# The names in `__init__.pyi` are loaded at their first use: transforms do not need the catalogue.
__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
