"""Hooks: the functions of higher packages that lower packages call. This module is private.

NOTE [hooks]
Imports go down the list of packages only. A package that needs a function of a higher one calls
those that a hook has. Every hook is declared in this file, with the package that calls its
functions and the modules that add them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Hook(Generic[F]):
    """Functions that are called at one place, in the order in which they were added."""

    __slots__ = ("functions",)

    def __init__(self) -> None:
        self.functions: list[F] = []

    def add(self, function: F) -> F:
        """Add a function; ``add`` is a decorator as well."""
        self.functions.append(function)
        return function

    @property
    def provided(self) -> F:
        """The function of a hook that has exactly one."""
        return self.functions[-1]


# --- pytrees, user_code

unknown_class: Final[Hook[Callable[[type], bool]]] = Hook()
"""Called by ``pytrees`` for a class that is not a container. A function returns True if it has made
the class one. Added by ``bridge/tracers/torch_pytrees.py``."""

describe_arguments: Final[Hook[Callable[..., str]]] = Hook()
"""Called by ``user_code`` with pairs of names and arguments. The function returns the text of the
tensors among them. Added by ``bridge/tracers/boundaries.py``."""

# --- dispatch

resolve_operators: Final[Hook[Callable[[Any], Sequence[Any] | None]]] = Hook()
"""Called by ``dispatch/table.py`` with an object that names operators. The function returns these
operators, or None for an unknown object. Added by ``bridge/tracers/operators.py``."""

choose_operator: Final[Hook[Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]]] = Hook()
"""Called by ``dispatch/table.py`` with an object that names operators, and arguments. The function
returns the operator that takes the arguments, or None for an unknown object. Added by
``bridge/tracers/operators.py``."""

kernel_registered: Final[Hook[Callable[[Any, Any], None]]] = Hook()
"""Called by ``dispatch/table.py`` with the operator and the key of a cell that was filled; the key
of a catch-all kernel is None. Added by ``bridge/batch/batching_functions.py``."""

capture_state: Final[Hook[Callable[[], Callable[[], AbstractContextManager[Any]]]]] = Hook()
"""Called by ``dispatch/state.py`` when a level is made. The function returns one whose context
manager restores the state of that moment. Added by ``dispatch.on_capture``."""

# --- ops

row_declared: Final[Hook[Callable[[Any], None]]] = Hook()
"""Called by ``ops/registry.py`` with a new row. Added by ``bridge/tracers/operators.py`` and
``bridge/batch/batching_functions.py``."""

catalogue_reader: Final[Hook[Callable[[], Any]]] = Hook()
"""Called by the catalogue. The function returns the reader of the schemas of all operators. Added
by ``bridge/__init__.py``."""

# --- bridge

direct_rule_known: Final[Hook[Callable[[str, Any], None]]] = Hook()
"""Called by ``tracers/operators.py`` with a new operator whose rule the dispatch handler can call
directly. Added by ``tracers/batch_handlers.py``."""

rule_of_parts: Final[Hook[Callable[[Any], Callable[..., Any] | None]]] = Hook()
"""Called by ``tracers/operators.py`` with a composite that has no row. The function returns the
batching rule that runs its parts, or None. Added by ``tracers/decompositions.py``."""

outcome_of_check: Final[Hook[Callable[[Any], bool | None]]] = Hook()
"""Called by ``tracers/batch_tracer.py`` when a bool of a batch is read. The function returns the
outcome with which the caller's test raises no error, or None for other tests. Added by
``tracers/checks.py``."""

before_drawing: Final[Hook[Callable[[Any, Any, Any], None]]] = Hook()
"""Called by ``tracers/registrations.py`` with a random operator, the tensor that it writes into and
the level, if the tensor is not the level's. Added by ``writing/writes.py``."""

call_watched_for_nans: Final[Hook[Callable[[Callable[..., Any], Any, Any], Any]]] = Hook()
"""Called by ``tracers/boundaries.py`` with a function and its arguments under
``config.debug_nans``. The function returns the result of the call. Added by ``control/nans.py``."""

leave_dual_level: Final[Hook[Callable[[int], None]]] = Hook()
"""Called by ``tracers/interrupts.py`` with the index of torch's dual level, -1 for none, when it
restores the state before a transform that failed. Added by ``grad/dual_level.py``."""

transform_failed: Final[Hook[Callable[[], object]]] = Hook()
"""Called by ``tracers/interrupts.py`` when it has restored the state before an outermost transform
that failed. Added by ``writing/module_state.py``."""

apply_seen_arguments: Final[Hook[Callable[[Any, tuple[Any, ...]], Any]]] = Hook()
"""Called by ``grad/apply_hook.py`` with an ``autograd.Function`` and arguments that are already as
the current level sees them. The function returns the result. Added by
``grad/custom_function.py``."""

record_function: Final[Hook[Callable[[Any, Any, Sequence[Any]], Any]]] = Hook()
"""Called by ``grad/custom_function.py`` with an ``autograd.Function``, the level of a trace and the
arguments. The function records the call and returns its result. Added by
``transforms/control/autograd_functions.py``."""
