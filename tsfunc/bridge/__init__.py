"""The layer between torch and the rest: tracers, the two handlers, torch's thread-local state.

This is the only room that uses torch's private names. Each file lists the private names that it
uses, with the torch releases that have them. Importing this package registers the kernels of the
built-in keys and the methods that the function handler answers by itself.
"""

from __future__ import annotations

from tsfunc.bridge.batch import (
    batching,
    composites,
    foreach,
    indexing,
    selection_items,
    selection_rows,
    selection_sums,
)
from tsfunc.bridge.grad import custom_function, saved_tensors, second_order, zero_tangents
from tsfunc.bridge.sizes import kernel_sizes
from tsfunc.bridge.trace import anomaly, data_methods, tracing
from tsfunc.bridge.tracers import attributes, compressed, containers, grad_level, methods
from tsfunc.bridge.writing import reshaped_views, reshaping

__all__ = [
    "anomaly",
    "attributes",
    "batching",
    "composites",
    "compressed",
    "containers",
    "custom_function",
    "data_methods",
    "foreach",
    "grad_level",
    "indexing",
    "kernel_sizes",
    "methods",
    "reshaped_views",
    "reshaping",
    "saved_tensors",
    "second_order",
    "selection_items",
    "selection_rows",
    "selection_sums",
    "tracing",
    "zero_tangents",
]
