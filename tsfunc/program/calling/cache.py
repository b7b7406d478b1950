"""A specialized function: its contracts, and the cache of its programs."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import optree
import torch

from tsfunc import pytrees
from tsfunc._text import count_text
from tsfunc.bridge.control.control_flow import RandomStates
from tsfunc.bridge.trace.graph_compilers import Backend
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.tracer import Tracer
from tsfunc.bridge.tracers.user_queries import transform_code
from tsfunc.errors import DescriptorViolation
from tsfunc.program.closure.closure_guards import ClosureGuards
from tsfunc.program.closure.guard_builder import Closure, is_container, is_watched
from tsfunc.program.closure.guard_codegen import (
    Build,
    Enter,
    GuardFunction,
    flatten_lines,
    key_orders,
    unflatten_function,
)
from tsfunc.program.closure.refused_values import refused_values
from tsfunc.program.guard import Guard
from tsfunc.program.guarding.call_spec import CallSpec
from tsfunc.program.guarding.guards import Facts
from tsfunc.program.guarding.inputs import input_text
from tsfunc.program.passes.effects import every_node
from tsfunc.program.program import Program
from tsfunc.types import Bindings, Contract, Descriptors, as_descriptor
from tsfunc.types.grammar import Descriptor
from tsfunc.types.single import TSTensor, Value

# --- the specialized function of a user, and the contracts that its calls must satisfy


@dataclass(frozen=True)
class Target:
    """A function that is specialized.

    Attributes:
        name: its name in errors and programs.
        contracts: the sets of descriptors that a call may satisfy, narrower ones first.
        closure: the treatment of values that it reads beyond its arguments: NOTE [closures].
        backend: compiles its programs; None: they run as Python.
        backend_name: the user's name of the backend.
        hoist: True if its programs do work on parameters alone once: NOTE [hoisted work]; or the
            names of its parameters whose tensors count as such parameters too.
    """

    func: Callable[..., Any]
    name: str
    signature: inspect.Signature
    contracts: tuple[Contract, ...]
    closure: Closure
    backend: Backend | None
    backend_name: str
    hoist: bool | Collection[str]

    @property
    def takes_numbers(self) -> bool:
        """True if numbers can be inputs; they can't if compiled programs do some work once."""
        return self.backend is None or self.hoist is False

    @functools.cached_property
    def sees_keywords(self) -> bool:
        """True if the function has ``**kwargs``, and therefore sees their order.

        The signature of a wrapped function does not count.
        """
        function = self.func.forward if isinstance(self.func, torch.nn.Module) else self.func
        try:
            parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
        except ValueError:
            return True
        return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by parameter.

        Raises:
            TypeError: the function does not accept the arguments.
        """
        try:
            return dict(self.signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise TypeError(f"{self.name}{self.signature}: {error}") from None

    def refusal_test(
        self, contract: Contract | None, any_grad: bool = False
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], bool] | None:
        """Return a function that is True for calls that pass a guard, but have to be refused.

        A program refuses a call that satisfies a narrower contract, and a call that breaks all
        contracts. The guard checks types, sizes and attributes; the function checks the rest: a
        tensor or an object that a contract guarantees, and the class of a tensor.

        Args:
            contract: the contract that the program was made under; None for a program of a file.
            any_grad: True if the guard accepts tensors with any ``requires_grad``.

        Returns:
            A function of args and kwargs; None if the program never refuses a call.
        """
        narrower = [
            x
            for x in self.contracts
            if contract is not None
            and x is not contract
            and Descriptors(x.descriptors) < Descriptors(contract.descriptors)
        ]
        guaranteed = any(
            has_unguarded_guarantee(descriptor, any_grad)
            for x in self.contracts
            for descriptor in x.descriptors.values()
        )

        def refuses(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            arguments = self.bound(args, kwargs)
            if any(contract.is_kept(arguments) for contract in narrower):
                return True
            return guaranteed and not self._satisfies_contract(arguments)

        return refuses if narrower or guaranteed else None

    def _satisfies_contract(self, arguments: Mapping[str, Any]) -> bool:
        """True if a call satisfies one of the contracts."""
        with transform_code():
            # Generated code is fast, and its False may be wrong.
            if any(contract.is_kept(arguments) for contract in self.contracts):
                return True
        try:
            self.contract(arguments)
        except DescriptorViolation:
            return False
        return True

    def contract(self, arguments: Mapping[str, Any]) -> tuple[Contract | None, Bindings | None]:
        """Return the first contract that a call satisfies, and its bindings; None without any.

        Raises:
            DescriptorViolation: there are contracts, and the call satisfies none.
        """
        errors = []
        for contract in self.contracts:
            try:
                with transform_code():
                    return contract, contract.check(arguments)
            except DescriptorViolation as error:
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            listed = "\n".join(str(error) for error in errors)
            raise DescriptorViolation(
                f"{self.name}: the call breaks each of its {len(errors)} sets of descriptors:\n"
                f"{listed}"
            )
        return None, None


def hoisted_names(
    hoist: bool | Collection[str], name: str, signature: inspect.Signature
) -> bool | Collection[str]:
    """Return ``hoist``, with a single name as a tuple.

    Raises:
        ValueError: it is not a bool or names of parameters.
    """
    if isinstance(hoist, bool):
        return hoist
    names = tuple(hoist) if isinstance(hoist, list | tuple | set | frozenset) else (hoist,)
    unknown = [other for other in names if other not in signature.parameters]
    if unknown:
        raise ValueError(
            f"specialize({name}): hoist= expected True, False or names of parameters "
            f"({', '.join(signature.parameters)}), got {unknown[0]!r}."
        )
    return names


def has_unguarded_guarantee(descriptor: Descriptor, any_grad: bool) -> bool:
    """True if a descriptor makes a guarantee that the guard of a program does not check."""
    match descriptor:
        case Value(value):
            return isinstance(value, torch.Tensor) or is_watched(value) or is_container(value)
        case TSTensor(cls, meta):
            return cls is not torch.Tensor or (any_grad and meta.requires_grad is not None)
        case _:
            return any(has_unguarded_guarantee(part, any_grad) for part in descriptor.parts)


# --- the programs that a specialized function keeps, and the calls that each of them serves


_LONGEST: Final = 200  # characters


def _brief(descriptor: Any) -> str:
    """Return the text of a descriptor; that of many tensors is cut."""
    text = str(as_descriptor(descriptor))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


class EntryInfo(NamedTuple):
    """Information about one specialization.

    Attributes:
        descriptors: the descriptors of the call that it was made for, by parameter name.
        hits: the number of calls that it has served, without the call that it was made for.
        seconds: the time that it took to make it.
        reason: the reason why the call needed a new program.
    """

    descriptors: Mapping[str, Any]
    hits: int
    seconds: float
    reason: str


class CacheInfo(NamedTuple):
    """Information about the programs that a specialized function keeps.

    Attributes:
        hits: the number of calls that found a program.
        misses: the number of calls that were traced.
        programs: the number of programs that are kept.
        limit: the maximum number of programs.
        entries: the specializations, the most recently used first.
    """

    hits: int
    misses: int
    programs: int
    limit: int
    entries: tuple[EntryInfo, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.programs} of at most {count_text(self.limit, 'program')}; "
            f"{count_text(self.hits, 'call')} found a program, {self.misses} had to be traced"
        ]
        for entry in self.entries:
            described = ", ".join(f"{k}: {_brief(v)}" for k, v in entry.descriptors.items())
            hits = count_text(entry.hits, "hit")
            lines.append(f"  ({described}): {hits}, {entry.seconds:.3f} s, {entry.reason}")
        return "\n".join(lines)


@dataclass(eq=False)
class CachedProgram:
    """A program and the calls that it may serve.

    Attributes:
        tree: the structure of the arguments.
        flat_guard: the guard: a function of the flattened arguments that returns the values
            the program runs on after these, or None if it may not serve the call.
        closure_guard: the same without the guards on the arguments, except on watched objects.
        reason: the reason why the call that it was made for needed a new program.
        key: the part of the call that does not depend on sizes.
        call_spec: the assumptions about the arguments.
        call_guard: the same guard for arguments that are not flattened; returns all values that
            the program runs on, or None.
        refuses: returns True if a call that passes the guard breaks the contract, or satisfies a
            narrower one, whose programs serve it.
        seconds: the time that it took to make it.
        hits: the number of calls that it has served since.
    """

    program: Program
    tree: optree.PyTreeSpec
    flat_guard: GuardFunction
    closure_guard: GuardFunction
    reason: str
    key: Any
    call_spec: CallSpec
    call_guard: Enter | None = None
    refuses: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None
    seconds: float = 0.0
    hits: int = field(default=0, init=False)
    enter: Enter = field(init=False)
    run: Callable[[Sequence[Any]], Sequence[Any]] = field(init=False)
    build: Build = field(init=False)

    def __post_init__(self) -> None:
        self.enter = self.call_guard or self._guard_of_containers
        if self.refuses is not None:
            self.enter = functools.partial(_enter_unless_refused, self.enter, self.refuses)
        self.run, self.build = self.program.run, unflatten_function(self.program.out_tree)
        if any(isinstance(node.target, RandomStates) for node in every_node(self.program.graph)):
            self.run = _outside_traces(self.program.run)

    @classmethod
    def of_call_spec(
        cls,
        program: Program,
        call_spec: CallSpec,
        reason: str,
        refuses: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None,
        key: Any = None,
        guards: Sequence[Guard] | None = None,
    ) -> CachedProgram:
        """Return a program for calls, with a guard that is generated from their description.

        Args:
            guards: the guards on the arguments, if a call is at hand: with classes of tensors.
        """
        reads, settings = program.closure_guards or ClosureGuards(), call_spec.settings
        lines, scope = call_spec.guard_lines(guards)
        opening = flatten_lines(call_spec.tree, scope, call_spec.keyword_order)
        return cls(
            program, call_spec.tree,
            reads.function(settings, lines, scope.objects, lazy=opening is not None),
            reads.function(settings, lazy=True), reason, key, call_spec,
            None if opening is None else reads.entry_code(settings, opening, lines, scope.objects),
            refuses,
        )  # fmt: skip

    @property
    def text(self) -> str:
        """The tensors of the calls that it serves, on one line."""
        return "; ".join(f"{spec.name}: {input_text(spec)}" for spec in self.call_spec.inputs)

    def closure_differences(self, flat: Sequence[Any]) -> dict[str, tuple[Any, Any]] | None:
        """Return the values besides the arguments for which the program does not serve a call.

        Args:
            flat: the flattened arguments, which have the structure of the program's.

        Returns:
            The name of each, with its value in the call and that of the program; None if the
            program does not serve such arguments, or if none of the values has a name.
        """
        spec, reads = self.call_spec, self.program.closure_guards
        lines, scope = spec.guard_lines()
        holds = ClosureGuards().function(spec.settings, lines, scope.objects)
        if reads is None or holds(flat) is None:
            return None
        return refused_values(reads, spec.settings, flat)

    def _guard_of_containers(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any] | None:
        """Return the same as ``call_guard``, for arguments in any pytree containers."""
        flat, tree = optree.tree_flatten(
            (args, kwargs), none_is_leaf=True, namespace=pytrees.NAMESPACE
        )
        if tree != self.tree:
            return None
        orders = self.call_spec.key_orders
        if orders and key_orders(tree, self.call_spec.keyword_order) != orders:
            return None
        closure_values = self.flat_guard(flat)
        return None if closure_values is None else [*flat, *closure_values]


class NeedsInlining(Exception):
    """Internal: a program is called inside a trace that can't record its operations."""


def _outside_traces(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the runner of a program that reads generator states, with a check for traces.

    A trace can't record reads and writes of the states (NOTE [random numbers of derivatives]), and
    would draw different numbers for the derivative and for the function.
    """

    def checked(values: Sequence[Any]) -> Any:
        if current_trace() is not None:
            raise NeedsInlining
        return run(values)

    return checked


def _enter_unless_refused(
    enter: Enter,
    refuses: Callable[[tuple[Any, ...], dict[str, Any]], bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Any] | None:
    values = enter(args, kwargs)
    return None if values is None or refuses(args, kwargs) else values


class Cache:
    """Entries, the most recently used first.

    The tuple of entries is replaced and never changed, so another thread that iterates over it
    sees a consistent state.

    Args:
        auto_widen: True if sizes that vary become named dims, and numbers that vary inputs:
            NOTE [automatic dynamic sizes].

    Attributes:
        lock: held while a program is made or the entries are changed.
        history: the facts of the calls that programs were made for.
        varied: the same, with ``ANY`` for the values that may vary: NOTE [automatic dynamic sizes].
        fixed: the sizes and numbers that could not be widened together.
        required_numbers: the numbers whose values the function needs.
        constants: the closed-over numbers that are not inputs, since a symbol in their place
            would change what the function does: NOTE [numbers that vary].
        records_autograd: True if the function runs backward passes itself, as its last trace found
            out: NOTE [retracing].
        warned_about: the sizes and numbers that a warning has named: NOTE [retraces].
    """

    def __init__(self, limit: int, auto_widen: bool) -> None:
        self.limit = limit
        self.auto_widen = auto_widen
        self.lock = threading.RLock()
        self.entries: tuple[CachedProgram, ...] = ()
        self.history: deque[Facts] = deque(maxlen=_REMEMBERED)
        self.varied: deque[Facts] = deque(maxlen=_REMEMBERED)
        self.not_widened: set[frozenset[str]] = set()
        self.required_numbers: frozenset[str] = frozenset()
        self.constants: set[str] = set()
        self.records_autograd = False
        self.warned_about: set[str] = set()
        self.misses = self._former_hits = 0

    @property
    def hits(self) -> int:
        """The number of calls that found a program."""
        return self._former_hits + sum(entry.hits for entry in self.entries)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachedProgram | None:
        """Return the entry that may serve a call, or None."""
        for entry in self.entries:
            if entry.enter(args, kwargs) is not None:
                return entry
        return None

    def move_to_front(self, entry: CachedProgram) -> None:
        with self.lock:
            if entry in self.entries:
                self.entries = (entry, *(other for other in self.entries if other is not entry))

    def find_for_sizes(
        self, keys: Collection[Any], flat: Sequence[Any], sizes: Mapping[str, int]
    ) -> tuple[CachedProgram, Sequence[Any]] | None:
        """Return the symbolic program for a call if it was made for the call with other sizes."""
        for entry in self.entries:
            if entry.key in keys and not entry.call_spec.failing_guards(flat, sizes):
                closure_values = entry.closure_guard(flat)
                if closure_values is not None:
                    return entry, closure_values
        return None

    def add(self, entry: CachedProgram) -> None:
        """Put a program first among the entries."""
        if any(isinstance(value, Tracer) for value in entry.program.lifted.values()):
            return  # it belongs to an active outer transform, and ends with it
        with self.lock:
            others = [other for other in self.entries if other is not entry]
            self._former_hits += sum(evicted.hits for evicted in others[self.limit - 1 :])
            self.entries = (entry, *others)[: self.limit]

    @property
    def programs(self) -> tuple[Program, ...]:
        """All programs, the most recently used first."""
        return tuple(dict.fromkeys(entry.program for entry in self.entries))

    def info(self) -> CacheInfo:
        """Return the counts of calls, and information about each entry."""
        with self.lock:
            entries = tuple(
                EntryInfo(entry.program.descriptors, entry.hits, entry.seconds, entry.reason)
                for entry in self.entries
            )
            return CacheInfo(self.hits, self.misses, len(self.programs), self.limit, entries)

    def reset_counts(self) -> None:
        with self.lock:
            self.misses = self._former_hits = 0
            for entry in self.entries:
                entry.hits = 0

    def clear(self) -> None:
        """Drop all programs."""
        with self.lock:
            self.entries = ()
            self.history.clear()
            self.varied.clear()
            self.not_widened.clear()
            self.required_numbers = frozenset()
            self.constants.clear()
            self.records_autograd = False
            self.reset_counts()


_REMEMBERED = 256  # number of calls whose facts are kept
