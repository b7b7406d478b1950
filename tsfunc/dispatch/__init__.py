"""The dispatcher: one table from (operator, key) to kernels, open to everybody.

Keys and sets are in ``keys``, thread-local state and levels in ``state``, what arguments
contribute to a key set in ``arguments``, the table in ``table``; ``explain`` says what a call
would do. This room knows no operator.
"""

from __future__ import annotations

from tsfunc.dispatch.explain import Explanation, Step, explain
from tsfunc.dispatch.keys import DispatchKey, DispatchKeySet
from tsfunc.dispatch.state import (
    Level,
    current_levels,
    exclude,
    exclude_globally,
    excluded,
    global_keys,
    include,
    include_globally,
    included,
    on_capture,
    running_level,
)
from tsfunc.dispatch.table import (
    Operator,
    fallthrough,
    redispatch,
    register,
    register_catch_all,
    register_fallback,
)

__all__ = [
    "DispatchKey",
    "DispatchKeySet",
    "Explanation",
    "Level",
    "Operator",
    "Step",
    "current_levels",
    "exclude",
    "exclude_globally",
    "excluded",
    "explain",
    "fallthrough",
    "global_keys",
    "include",
    "include_globally",
    "included",
    "on_capture",
    "redispatch",
    "register",
    "register_catch_all",
    "register_fallback",
    "running_level",
]
