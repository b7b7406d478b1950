"""The layer between torch and the rest: tracers, the two handlers, torch's thread-local state.

No other package uses torch's private names; ``private_names/`` lists them, each with its use and a
check. ``__init__`` is the loader of the package: it fills the registry of function rules, imports
the kernels of the built-in keys, tells the catalogue how operators are read, lists what the first
transform of a process prepares, and lets functions of torch that are written in Python call the
handlers.

The package is private.
"""

from __future__ import annotations

from typing import Any

from tsfunc import hooks
from tsfunc.bridge.batch import (
    batching,
    batching_functions,
    composites,
    foreach,
    masks,
    packed_sequences,
    recurrent_layers,
    selection_items,
    selection_rows,
    selection_sums,
    symbolic_composites,
    tracer_indices,
)
from tsfunc.bridge.grad import (
    checkpoints,
    custom_function,
    lazy_tensors,
    saved_tensors,
    second_order,
)
from tsfunc.bridge.sizes import kernel_sizes
from tsfunc.bridge.trace import (
    anomaly,
    class_members,
    data_methods,
    tensor_guards,
    trace_level,
    trace_rules,
)
from tsfunc.bridge.tracers import (
    attributes,
    backward,
    checks,
    compressed_tracers,
    grad_level,
    methods,
    python_functions,
    torch_pytrees,
    tracer_members,
)
from tsfunc.bridge.tracers.function_registry import registry
from tsfunc.bridge.writing import outside, reshaped_views, reshaping, strided_views, writes

# The modules that declare function rules.
_RULES = (
    attributes, backward, batching_functions, checks, composites, compressed_tracers, data_methods,
    foreach, tracer_indices, kernel_sizes, masks, methods, packed_sequences, recurrent_layers,
    reshaped_views,
    reshaping, selection_items, selection_rows, selection_sums, strided_views,
    symbolic_composites, tensor_guards, trace_rules, writes,
)  # fmt: skip
# The modules that give tracers members of their own, which compiled ones do not replace.
_MEMBERS = (attributes, class_members, methods)
# The modules that fill cells and columns of the dispatch table, by decorators.
_KERNELS = (anomaly, batching, grad_level, trace_level, trace_rules)
# The modules that declare what the first transform or level of a process prepares.
_PREPARATIONS = (
    checkpoints, checks, custom_function, lazy_tensors, outside, saved_tensors, second_order,
)  # fmt: skip


@hooks.catalogue_reader.add
def _reader() -> Any:
    # The schemas of all operators, which the catalogue reads at its first use.
    from tsfunc.bridge.tracers.schemas import READER

    return READER


registry.load([module.function_rules for module in _RULES])
hooks.unknown_class.add(torch_pytrees.register_container)
python_functions.replace_handle_torch_function()
tracer_members.install()
