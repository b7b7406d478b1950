"""The dispatcher: one extensible table from (operator, key) to kernels.

``keys`` has the dispatch keys, key sets, and those of a call's arguments; ``state`` the
thread-local state and the levels; ``table`` the table. ``explain`` reports how a call would be
dispatched. No operator is named in this package.

The public names are in ``__all__``. The modules of the package are private.
"""

from __future__ import annotations

from tsfunc.dispatch.explanation import Explanation, Step, explain
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


def __dir__() -> list[str]:
    return __all__
