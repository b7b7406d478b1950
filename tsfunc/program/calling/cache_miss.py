"""A call that no program serves: the check of its descriptors, and its trace."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tsfunc import pytrees, rage
from tsfunc.bridge.sizes.bounds import any_number, any_size
from tsfunc.bridge.tracers.interrupts import restoring_thread_state
from tsfunc.bridge.tracers.torch_settings import settings
from tsfunc.errors import DataDependentError, ExportError, TsfuncError
from tsfunc.program.assumptions import Assumptions, Retrace, trace_until_valid
from tsfunc.program.calling.cache import Cache, CachedProgram, Target
from tsfunc.program.calling.capture import TraceRequest, capture
from tsfunc.program.calling.reports import log_program, progress
from tsfunc.program.calling.retrace_reasons import FIRST_CALL, UNSEEN, difference_text, reason_for
from tsfunc.program.calling.variation import Variation, is_special
from tsfunc.program.closure.free_variables import FreeVariables
from tsfunc.program.closure.guard_builder import (
    ClosureNumber,
    NumberHistory,
    Read,
    is_container,
    is_watched,
)
from tsfunc.program.closure.guard_codegen import SettingsAre, key_orders
from tsfunc.program.closure.instances import Instances
from tsfunc.program.closure.results import state_names
from tsfunc.program.closure.side_effects import CODE
from tsfunc.program.graphs.comparison import same_program
from tsfunc.program.graphs.data import ProgramData
from tsfunc.program.guard import Guards, Source
from tsfunc.program.guarding.call_spec import (
    argument_paths_of,
    arguments_text,
    call_spec_of,
    facts_of_call,
    guards_on_arguments,
    path_expression,
)
from tsfunc.program.guarding.inputs import (
    InputSpec,
    NumberSpec,
    hide_opaque_arguments,
    number_specs,
    refuse_arrays,
    tensor_inputs,
    with_bounds,
    with_fixed_sizes,
)
from tsfunc.types import Dim
from tsfunc.types.values import PathTexts
from tsfunc.user_code import user_location

if TYPE_CHECKING:
    from tsfunc.program.graphs.backends import Run

EntryAndValues = tuple[CachedProgram, Sequence[Any]]

# The number of programs whose values besides the arguments are compared with a call's.
_MOST_COMPARED = 8


class _ValuesByName(dict[str, Any]):
    """The values of sizes and numbers; a number that is read from outside has any value."""

    def __missing__(self, name: str) -> Any:
        self[name] = any_number(float)
        return self[name]


class CacheMiss:
    """A call that no program serves.

    Args:
        target: the function that is called.
        args, kwargs: its arguments.

    Raises:
        DescriptorViolation: the call breaks all contracts.
    """

    def __init__(self, target: Target, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        flat, tree = pytrees.flatten((args, kwargs))
        self.func, self.name, self.closure = target.func, target.name, target.closure
        self.target = target
        self.flat, self.tree, self.settings = flat, tree, settings()
        self.key_orders = key_orders(tree, target.sees_keywords)
        self.signature = target.signature
        self.by_parameter = target.bound(args, kwargs)
        self.argument_paths = argument_paths_of(target.signature, len(flat), tree)
        self._texts = PathTexts(self.by_parameter)
        self.passed = arguments_text(len(args), kwargs)
        self.contract, self.bindings = target.contract(self.by_parameter)
        self.warning: str | None = None  # about the new program, if there is one
        self.earlier: NumberHistory = {}
        self.closure_differences: Sequence[Mapping[str, tuple[Any, Any]]] = ()
        self.closure_inputs: Mapping[str, ClosureNumber] = {}
        self._compares = False  # True while a program is traced for a comparison
        # These are of the program that is made.
        self.reason: str
        self.small: Mapping[str, int]
        self.variation: Variation
        self.is_known: bool

    @restoring_thread_state
    def make_entry(self, cache: Cache, reason: str | None = None) -> EntryAndValues:
        """Return an entry for the call, and the values that it reads of objects in the arguments.

        The entry is kept in the cache.

        Args:
            cache: the cache of the function.
            reason: the reason for the program; None: the difference from earlier calls.
        """
        refuse_arrays(self.flat, self.argument_paths, self.contract, self.name_of)
        inputs, named_dims = tensor_inputs(
            self.flat, self.argument_paths, self.contract, self.bindings
        )
        facts = self.facts(inputs)
        self.earlier = self._earlier_numbers(cache)
        keys = {self.key(inputs, x) for x in (self.numbers(inputs, named_dims), ())}
        had_program = self._set_reason(cache, facts, keys, reason)
        self.small = {
            name: size for name, size in self.sizes.items() if size < 2 and name in named_dims
        }
        self.variation = variation = Variation(self, cache, inputs, named_dims, facts)
        serving = cache.find_for_sizes(keys, self.flat, self.sizes)
        self.is_known = serving is not None or had_program
        assumptions = Assumptions(
            records_autograd=cache.records_autograd, autograd_is_remembered=cache.records_autograd
        )
        if serving is None:
            traced, assumptions = self._valid_program(variation.assume_varying(assumptions))
            variation.record_outcome(assumptions)
            cache.history.appendleft(facts)
            if not assumptions.fixed:
                self.warning = variation.remember(traced[0], called=reason is None)
        else:
            traced = serving
        if not assumptions.fixed:
            small = self._sizes_not_served(traced[0], named_dims)
            if small:
                if serving is None:
                    cache.add(traced[0])
                fixed, assumptions = trace_until_valid(
                    self.trace,
                    assumptions.with_changes(fixed=frozenset(small)),
                    self.next_assumptions,
                )
                traced = self._general_if_equivalent(traced, fixed)
        cache.records_autograd = assumptions.records_autograd
        entry, closure_values = traced
        cache.add(entry)
        return entry, closure_values

    def _set_reason(
        self, cache: Cache, facts: Mapping[str, Any], keys: Collection[Any], reason: str | None
    ) -> bool:
        """Set the reason for the program; return True if such arguments have had a program."""
        self.reason = reason or (reason_for(facts, cache.history) if cache.history else FIRST_CALL)
        self.closure_differences = self._closure_differences(cache)
        had_program = self.reason == UNSEEN
        is_full = len(cache.entries) == cache.limit
        if had_program and is_full and all(entry.key not in keys for entry in cache.entries):
            self.reason = f"its program was dropped, of more than max_specializations={cache.limit}"
        if self.closure_differences and reason is None:
            fewest = min(self.closure_differences, key=len)
            self.reason = "; ".join(
                difference_text(name, *values) for name, values in fewest.items()
            )
        return had_program

    def _sizes_not_served(
        self, entry: CachedProgram, named_dims: Mapping[str, Dim]
    ) -> Collection[str]:
        """Return the named dims whose sizes in the call the general program may not serve.

        See NOTE [sizes 0 and 1] in ``program/graphs/comparison``, and NOTE [small sizes] in
        ``program/dims/constraints``.
        """
        small = [name for name, size in self.sizes.items() if _is_small(entry, name, size)]
        if not small and entry.call_spec.failing_guards(self.flat, self.sizes):
            # It was traced with other sizes: with its own sizes, the function raises its error.
            return [name for name in self.sizes if name in named_dims]
        return small

    def _valid_program(self, assumptions: Assumptions) -> tuple[EntryAndValues, Assumptions]:
        """Return a program whose assumptions hold, and the assumptions.

        A program with numbers as inputs that no descriptor describes is compared with the program
        for the numbers of the call: NOTE [automatic dynamic sizes].
        """
        traced, assumptions = trace_until_valid(self.trace, assumptions, self.next_assumptions)
        if not self._has_unknown_numbers(assumptions):
            return traced, assumptions
        outside = self.closure_inputs
        self._compares = True
        exact, alone = trace_until_valid(
            self.trace,
            assumptions.with_changes(varying=frozenset(), dims={}, closure_numbers=False),
            self.next_assumptions,
        )
        self._compares = False
        if self._is_equivalent(traced[0], exact[0], outside.values()):
            with contextlib.suppress(ExportError):  # then the program with constants may compile
                return self._now_compiled(traced), assumptions
        elif not any(is_special(number.value) for number in outside.values()):
            self.variation.cache.constants |= outside.keys()
        return self._now_compiled(exact), alone

    def _has_unknown_numbers(self, assumptions: Assumptions) -> bool:
        """True if the inputs of a program include numbers that no descriptor describes."""
        return bool(self.closure_inputs) or self.variation.has_numbers(assumptions)

    def _now_compiled(self, traced: EntryAndValues) -> EntryAndValues:
        """Have the backend compile a program that was traced for a comparison."""
        entry, closure_values = traced
        if self.target.backend is not None and self.target.hoist is False:
            start = time.perf_counter()
            with progress(self.name, entry.reason):
                entry.program.run.compile_for([*self.flat, *closure_values])  # type: ignore[attr-defined]
            entry.seconds += time.perf_counter() - start
        return traced

    def _closure_differences(self, cache: Cache) -> Sequence[Mapping[str, tuple[Any, Any]]]:
        """Return, for the last programs of such arguments, the other values that differ."""
        entries = [entry for entry in cache.entries if entry.tree == self.tree][:_MOST_COMPARED]
        if self.reason != UNSEEN:  # then a program may serve other sizes and numbers alone
            entries = [
                entry for entry in entries if entry.call_spec.named_dims or entry.call_spec.numbers
            ]
        return [x for x in (entry.closure_differences(self.flat) for entry in entries) if x]

    def _earlier_numbers(self, cache: Cache) -> NumberHistory:
        """Return the numbers that programs have read from outside: NOTE [numbers that vary]."""
        values: dict[str, list[Read]] = {}
        if self.target.takes_numbers:
            for entry in cache.entries:
                for text, value in entry.program.numbers.items():
                    if text not in cache.constants:
                        values.setdefault(text, []).append(value)
        return values

    def next_assumptions(self, assumptions: Assumptions, error: Exception) -> Assumptions | None:
        """Return the next weaker assumptions after a trace that has failed, or None.

        A trace with symbols may fail where the function does not: a symbol can't be hashed, for
        example, and the hint for a size below 2 may be a size that the function refuses.
        """
        if assumptions.varying:
            narrower = self.variation.narrowed(assumptions, error)
            if narrower is not None:
                return narrower
        if assumptions.closure_numbers and self.closure_inputs:
            return assumptions.with_changes(closure_numbers=False)
        if assumptions.varying:
            return assumptions.with_changes(varying=frozenset(), dims={})
        if assumptions.described_numbers and self._inputs(assumptions)[2]:
            return assumptions.with_changes(described_numbers=False)
        # ``item()`` of a tensor with several elements is a DataDependentError.
        refused = isinstance(error, DataDependentError) or not isinstance(error, TsfuncError)
        if refused and self.small and not assumptions.fixed:
            return assumptions.with_changes(fixed=frozenset(self.small))
        return None

    def _inputs(
        self, assumptions: Assumptions
    ) -> tuple[Sequence[InputSpec], Mapping[str, Dim], Sequence[NumberSpec]]:
        """Return the tensors among the arguments, the named dims, and the numbers as inputs."""
        inputs, named_dims, varied = self.variation.inputs_for(assumptions)
        if assumptions.fixed:
            sizes = {name: self.sizes[name] for name in assumptions.fixed}
            inputs = [with_fixed_sizes(spec, sizes) for spec in inputs]
            named_dims = {
                name: dim for name, dim in named_dims.items() if name not in assumptions.fixed
            }
        numbers = self.numbers(inputs, named_dims, varied)
        return (
            inputs,
            named_dims,
            [x for x in numbers if x.undescribed or assumptions.described_numbers],
        )

    def facts(self, inputs: Sequence[InputSpec]) -> dict[str, Any]:
        """Return the assumptions of a program for the call, by the user's names."""
        return facts_of_call(
            guards_on_arguments(self.flat, inputs),
            self.name_of,
            self.settings,
            self.key_orders,
            self.passed,
            self.by_parameter,
        )

    def numbers(
        self,
        inputs: Sequence[InputSpec],
        named_dims: Mapping[str, Dim],
        undescribed: Collection[int] = (),
    ) -> Sequence[NumberSpec]:
        """Return the numbers among the arguments that are inputs."""
        if not self.target.takes_numbers:
            return ()
        return number_specs(
            self.flat, self.argument_paths, self.contract, inputs, named_dims, undescribed
        )

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of named dims in the call."""
        return {} if self.bindings is None else self.bindings.sizes

    def trace(self, assumptions: Assumptions) -> EntryAndValues:
        """Return a program for such calls, and the tensors that it reads from argument objects.

        Raises:
            Retrace: one of the assumptions does not hold.
        """
        with progress(self.name, self._reason(assumptions)):
            traced = self._new_entry(assumptions)
        self._record(traced[0])
        return traced

    def _request(
        self,
        assumptions: Assumptions,
        inputs: Sequence[InputSpec],
        named_dims: Mapping[str, Dim],
        numbers: Sequence[NumberSpec],
    ) -> TraceRequest:
        described = {} if self.contract is None else self.contract.descriptors
        return TraceRequest(
            f"specialize({self.name})", self.name, self.func, self.flat, self.tree, inputs,
            named_dims, numbers,
            hide_opaque_arguments(described, self.signature, path_expression),
            described, assumptions,
        )  # fmt: skip

    def _new_entry(self, assumptions: Assumptions) -> EntryAndValues:
        start = time.perf_counter()
        inputs, named_dims, numbers = self._inputs(assumptions)
        instances = self._instances(assumptions)
        program = capture(self._request(assumptions, inputs, named_dims, numbers), instances)
        instances.generators.refuse_made()
        key = self.key(inputs, numbers)
        named_dims = {**named_dims, **program.larger_minima}
        inputs = [with_bounds(spec, program.larger_minima) for spec in inputs]
        call_spec = call_spec_of(
            self.flat, self.tree, inputs, named_dims, self.settings, self.target.sees_keywords,
            numbers, program.trace_guards,
        )  # fmt: skip
        guards = call_spec.guards(guards_on_arguments(self.flat, inputs, numbers))
        reads = instances.builder.closure_guards
        everything = [*guards, *reads.guards, SettingsAre(self.settings)]
        program = dataclasses.replace(
            program,
            call_spec=call_spec,
            closure_guards=reads,
            argument_paths=self.argument_paths,
            signature=self.signature,
            guards=Guards.of(everything, self.name_of),
            state=state_names(
                self.func, program.lifted, program.updates, len(self.flat), reads.values,
                instances.builder.read,
            ),
        )  # fmt: skip
        values = [*self.flat, *reads.values]
        hoist = self.target.hoist
        if hoist is not False:
            named = () if hoist is True else hoist
            fixed_positions = {i for i, path in self.argument_paths.items() if path[0] in named}
            fixed_positions.update(range(len(self.flat), len(values)))
            from tsfunc.program.graphs.hoisting import Hoisted

            run: Any = Hoisted(program, fixed_positions, len(values), self._compile)
        else:
            compared = self._compares or self._has_unknown_numbers(assumptions)
            run = self._compile(program, values, not compared, assumptions, numbers)
        program = dataclasses.replace(program, run=run)
        entry = CachedProgram.of_call_spec(
            program, call_spec, self._reason(assumptions),
            self.target.refusal_test(self.contract), key, guards,
        )  # fmt: skip
        entry.seconds = time.perf_counter() - start
        if any(not number.undescribed for number in numbers) and call_spec.failing_guards(
            self.flat, self.sizes
        ):
            # A condition on the number and the sizes in general fails for those of the call.
            raise Retrace(assumptions.with_changes(described_numbers=False))
        self.variation.check(entry, assumptions)
        return entry, reads.values

    def _compile(
        self,
        program: ProgramData,
        values: Sequence[Any],
        now: bool = True,
        assumptions: Assumptions = Assumptions(),  # noqa: B008  # it is frozen
        numbers: Sequence[NumberSpec] = (),
    ) -> Run:
        """Return a function that runs a program as the user has chosen.

        Raises:
            Retrace: the backend can't take some of the numbers as inputs.
        """
        backend, name = self.target.backend, self.target.backend_name
        if backend is None:
            return program.run
        from tsfunc.program.graphs.backends import Compiled
        from tsfunc.program.graphs.number_inputs import NumbersRefused

        try:
            return Compiled(program, backend, name, values, now)
        except NumbersRefused as refusal:
            raise self._with_constants(refusal.names, assumptions, numbers) from None

    def _with_constants(
        self, names: Collection[str], assumptions: Assumptions, numbers: Sequence[NumberSpec]
    ) -> Retrace:
        """Return the retrace after a backend has refused some numbers as inputs.

        Args:
            numbers: the numbers among the arguments that were inputs.
        """
        cache = self.variation.cache
        changes: dict[str, Any] = {}
        outside = {text for text, number in self.closure_inputs.items() if number.name in names}
        refused = [spec for spec in numbers if spec.name in names]
        if outside:
            cache.constants |= outside
            changes["closure_numbers"] = False
        if any(not spec.undescribed for spec in refused):
            changes["described_numbers"] = False
        undescribed = frozenset(self.name_of(spec.position) for spec in refused if spec.undescribed)
        if undescribed:
            changes |= self.variation.without(undescribed, assumptions)
        return Retrace(assumptions.with_changes(**changes))

    def _reason(self, assumptions: Assumptions) -> str:
        """Return the reason for a new program."""
        if assumptions.fixed and self.is_known:
            return "; ".join(
                f"{x} is {size}" for x, size in self.sizes.items() if x in assumptions.fixed
            )
        return self.reason

    def _general_if_equivalent(
        self, general: EntryAndValues, fixed: EntryAndValues
    ) -> EntryAndValues:
        """Return the entry for fixed sizes, with the general program if it does the same there."""
        (one, closure_values), (other, same_closure_values) = general, fixed
        same_reads = list(map(id, closure_values)) == list(map(id, same_closure_values))
        if same_reads and self._is_equivalent(one, other):
            other = dataclasses.replace(other, program=one.program)
        return other, same_closure_values

    def _is_equivalent(
        self, general: CachedProgram, exact: CachedProgram, outside: Iterable[ClosureNumber] = ()
    ) -> bool:
        """True if a program does the same as one in which some of its inputs are fixed.

        Args:
            exact: the program for the numbers and sizes of the call.
            outside: the closed-over numbers that are inputs of the first program alone.
        """
        values = _ValuesByName(self.sizes)
        values.update({number.name: number.value for number in outside})
        values.update({spec.name: spec.value for spec in general.call_spec.numbers})
        values.update({name: any_size(dim) for name, dim in exact.call_spec.named_dims.items()})
        values.update({x.name: any_number(type(x.value)) for x in exact.call_spec.numbers})
        for spec, other in zip(general.call_spec.inputs, exact.call_spec.inputs, strict=True):
            for dim, size in zip(spec.dims, other.dims, strict=True):
                if isinstance(dim, Dim) and isinstance(size, int):
                    values[dim.name] = size
        return same_program(general.program, exact.program, values)

    def _record(self, entry: CachedProgram) -> None:
        """Log a new program, also in the log of ``rage``."""
        program = entry.program
        backend = self.target.backend_name
        log_program(program, entry.reason, entry.seconds, backend, entry.text)
        rage.record(
            "specialized",
            function=self.name,
            at=user_location(),
            reason=entry.reason,
            arguments=entry.text,
            backend=backend,
            milliseconds=round(entry.seconds * 1e3, 1),
            operators=sum(node.op == "call_function" for node in program.graph.nodes),
            guards=program.guards.texts,
            program=program.source,
        )

    def key(self, inputs: Sequence[InputSpec], numbers: Sequence[NumberSpec]) -> Any:
        """Return the part of a call that does not depend on sizes of named dims and on numbers."""
        guarded = tuple(guard.key for guard in guards_on_arguments(self.flat, inputs, numbers))
        return self.contract, self.tree, self.key_orders, self.settings, guarded

    def name_of(self, position: int) -> str:
        """Return the user's spelling of a flattened argument."""
        return self._texts(self.argument_paths[position])

    def _instances(self, assumptions: Assumptions) -> Instances:
        earlier = self.earlier if assumptions.closure_numbers else {}
        instances = Instances(self.name, self.closure, earlier)
        self.closure_inputs = instances.builder.numbers.inputs  # it grows during the trace
        free_variables = FreeVariables(instances, assumptions.guards_changed)
        for i, value in enumerate(self.flat):
            if is_watched(value) or is_container(value):
                text = path_expression(self.argument_paths[i])
                instances.add(value, Source.of_argument(i, text, type(value).__name__))
            elif hasattr(type(value), "__next__"):
                instances.builder.refuse_iterator(
                    path_expression(self.argument_paths[i]), "an argument", value
                )
        free_variables.add(self.func)
        for i, value in enumerate(self.flat):
            if isinstance(value, CODE):
                free_variables.scan(value)
            instances.generators.add(path_expression(self.argument_paths[i]), value)
        return instances


def _is_small(entry: CachedProgram, name: str, size: int) -> bool:
    """True if a program for any size of a named dim does not serve a size this small."""
    named_dims = entry.call_spec.named_dims
    return name in named_dims and (size < 2 or size < (named_dims[name].min or 0))
