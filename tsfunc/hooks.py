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
        """The function of a hook to which one module adds one."""
        return self.functions[-1]


# --- pytrees, user_code

unknown_class: Final[Hook[Callable[[type], bool]]] = Hook()
"""``pytrees`` met a class that is not a container; True if the function has made it one
(``bridge/tracers/containers.py``)."""

describe_arguments: Final[Hook[Callable[..., str]]] = Hook()
"""``user_code`` needs the text of the tensors among pairs of names and arguments
(``bridge/tracers/boundaries.py``)."""

# --- dispatch

resolve_operators: Final[Hook[Callable[[Any], Sequence[Any] | None]]] = Hook()
"""``table.py`` needs the operators that an object names; None for unknown objects
(``bridge/tracers/operators.py``)."""

choose_operator: Final[Hook[Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]]] = Hook()
"""``table.py`` needs the operator that takes some arguments, among those that an object names; None
for unknown objects (``bridge/tracers/operators.py``)."""

kernel_registered: Final[Hook[Callable[[Any, Any], None]]] = Hook()
"""``table.py`` filled the cell of an operator and a key, or its row (the key is None)
(``bridge/batch/batching_functions.py``)."""

capture_state: Final[Hook[Callable[[], Callable[[], AbstractContextManager[Any]]]]] = Hook()
"""``state.py`` makes a level; the function returns one whose context manager restores the state of
now (``dispatch.on_capture``)."""

# --- ops

row_declared: Final[Hook[Callable[[Any], None]]] = Hook()
"""``registry.py`` has a new row (``bridge/tracers/operators.py``,
``bridge/batch/batching_functions.py``)."""

catalogue_reader: Final[Hook[Callable[[], Any]]] = Hook()
"""The catalogue needs the schemas of all operators (``bridge/__init__.py``)."""

# --- bridge

direct_rule_known: Final[Hook[Callable[[str, Any], None]]] = Hook()
"""``tracers/operators.py`` has a new operator whose rule the dispatch handler calls directly
(``tracers/batch_handlers.py``)."""

outcome_of_check: Final[Hook[Callable[[Any], bool | None]]] = Hook()
"""``tracers/batch_tracer.py`` reads a bool of a batch; the function returns the outcome of a test
that raises for the other one, None for other tests (``tracers/checks.py``)."""

before_drawing: Final[Hook[Callable[[Any, Any, Any], None]]] = Hook()
"""``tracers/registrations.py`` calls a random operator that writes into a tensor that is not the
level's; the arguments are the operator, the tensor and the level (``writing/writes.py``)."""

call_watched_for_nans: Final[Hook[Callable[[Callable[..., Any], Any, Any], Any]]] = Hook()
"""``tracers/boundaries.py`` calls a function under ``config.debug_nans`` (``control/nans.py``)."""

leave_dual_level: Final[Hook[Callable[[int], None]]] = Hook()
"""``tracers/interrupts.py`` restores the state before a transform that failed; the argument is the
index of torch's dual level, -1 for none (``grad/dual_level.py``)."""

transform_failed: Final[Hook[Callable[[], object]]] = Hook()
"""``tracers/interrupts.py`` has restored the state before an outermost transform that failed
(``writing/module_state.py``)."""

apply_seen_arguments: Final[Hook[Callable[[Any, tuple[Any, ...]], Any]]] = Hook()
"""``grad/apply_hook.py`` applies an ``autograd.Function`` to arguments that are already as the
current level sees them (``grad/custom_function.py``)."""

record_function: Final[Hook[Callable[[Any, Any, Sequence[Any]], Any]]] = Hook()
"""``grad/custom_function.py`` records a call of an ``autograd.Function`` in a trace; the arguments
are the class, the level and the arguments (``transforms/control/autograd_functions.py``)."""
