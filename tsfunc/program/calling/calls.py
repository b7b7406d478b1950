"""The first call of its kind: the check of its descriptors, and its trace."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import optree

from tsfunc import rage
from tsfunc.bridge.sizes.bounds import any_number, any_size
from tsfunc.bridge.trace.backward_passes import RetraceForBackward
from tsfunc.bridge.tracers.outermost import protected
from tsfunc.bridge.tracers.settings import settings
from tsfunc.dispatch.places import users_place
from tsfunc.errors import DataDependentError, TsfuncError
from tsfunc.program.calling.cache import Cache, CachedProgram
from tsfunc.program.calling.capture import TraceRequest, capture
from tsfunc.program.calling.leaves import described, places_of, spelled
from tsfunc.program.calling.reporting import log_program, progress
from tsfunc.program.calling.target import Target
from tsfunc.program.calling.variation import Variation
from tsfunc.program.closure.arg_codegen import key_orders, opening_lines
from tsfunc.program.closure.free_variables import FreeVariables
from tsfunc.program.closure.guard_builder import is_container, is_instance
from tsfunc.program.closure.instances import Instances, RetraceForStoredTensors
from tsfunc.program.closure.module_state import state_of
from tsfunc.program.closure.numbers import Earlier, Read
from tsfunc.program.closure.variables import CODE
from tsfunc.program.dims.small_sizes import RetraceForSmallSizes
from tsfunc.program.graphs.backends import Compiled
from tsfunc.program.graphs.equal import same_program
from tsfunc.program.graphs.program import Program
from tsfunc.program.guarding.cache_miss import UNSEEN, facts_of_call, passed_text, reason_for
from tsfunc.program.guarding.call_spec import form_of_call
from tsfunc.program.guarding.guard_texts import Guards, guard_texts
from tsfunc.program.guarding.guards import guard_lines
from tsfunc.program.guarding.inputs import (
    InputSpec,
    ScalarSpec,
    call_signature,
    describe_inputs,
    describe_scalars,
    with_dims_raised,
    with_sizes_fixed,
)
from tsfunc.program.guarding.opaque_arguments import opaque_arguments
from tsfunc.program.guarding.tensor_aliasing import RetraceForAliasing
from tsfunc.types import Dim


class FirstCall:
    """A call that no program answers.

    Args:
        target: the function that is called.
        arguments: positional and keyword arguments.
        flat: the flattened arguments.
        tree: their structure.

    Raises:
        DescriptorViolation: the call breaks all contracts.
    """

    def __init__(
        self,
        target: Target,
        arguments: tuple[Sequence[Any], Mapping[str, Any]],
        flat: list[Any],
        tree: optree.PyTreeSpec,
    ) -> None:
        self.func, self.name, self.closure = target.func, target.name, target.closure
        self.target = target
        self.flat, self.tree, self.ambient = flat, tree, settings()
        self.orders = key_orders(tree, target.sees_keywords)
        args, kwargs = arguments
        self.parameters = target.signature
        self.arguments = target.bound(args, kwargs)
        self.places = places_of(target.signature, len(flat), tree)
        self.passed = passed_text(len(args), kwargs)
        self.contract, self.bindings = target.contract(self.arguments)
        self.warning: str | None = None  # about the new program, if there is one
        self.earlier: Earlier = {}

    @protected
    def program(self, cache: Cache, reason: str | None = None) -> tuple[Program, Sequence[Any]]:
        """Return a program for the call, and the values that it reads of objects in the arguments.

        The program is kept in the cache.

        Args:
            cache: the cache of the function.
            reason: the reason for the program; None: the difference from earlier calls.
        """
        inputs, bounds = describe_inputs(self.flat, self.places, self.contract, self.bindings)
        facts = self.facts(inputs)
        self.earlier = self._earlier_numbers(cache)
        self.reason = reason or reason_for(facts, cache.history)
        scalars = self.scalars(inputs, bounds)
        signatures = {self.signature(inputs, each) for each in (scalars, ())}
        dropped = f"its program was dropped, of more than max_specializations={cache.limit}"
        is_full = len(cache.entries) == cache.limit
        if (
            self.reason == UNSEEN
            and is_full
            and all(each.signature not in signatures for each in cache.entries)
        ):
            self.reason = dropped
        sizes = self.sizes
        known = cache.known(signatures, self.flat, sizes)
        small = {name: size for name, size in sizes.items() if size < 2 and name in bounds}
        variation = Variation(self, cache, inputs, bounds, facts)
        made = known or variation.program() or self._traced(inputs, bounds, small)
        if known is None:
            cache.history.appendleft(facts)
            if made is not None:
                self.warning = variation.remember(made[0], called=reason is None)
        if made is not None:
            small = {name: size for name, size in sizes.items() if _is_small(made[0], name, size)}
            if not small and made[0].form.unmet(self.flat, sizes):
                # It was traced with other sizes: with its own sizes, the function raises its
                # error.
                small = {name: size for name, size in sizes.items() if name in bounds}
        if small:
            # NOTE [sizes 0 and 1] in program/graphs/equal, NOTE [small sizes] in
            # program/dims/small_sizes
            if known is None and made is not None:
                cache.keep(made[0])
            if known is not None or self.reason in (UNSEEN, dropped):
                self.reason = "; ".join(f"{name} is {size}" for name, size in small.items())
            made = self._with_fixed(made, small, inputs, bounds, scalars)
        assert made is not None
        entry, reached = made
        cache.keep(entry)
        return entry.program, reached

    def _earlier_numbers(self, cache: Cache) -> Earlier:
        """Return the numbers that programs have read from outside: NOTE [numbers that vary]."""
        found: dict[str, list[Read]] = {}
        if self.target.backend is None:  # backends make numbers constants
            for entry in cache.entries:
                for text, value in entry.program.numbers.items():
                    found.setdefault(text, []).append(value)
        return found

    def _with_fixed(
        self,
        made: tuple[CachedProgram, Sequence[Any]] | None,
        small: Mapping[str, int],
        inputs: Sequence[InputSpec],
        bounds: Mapping[str, Dim],
        scalars: Sequence[ScalarSpec],
    ) -> tuple[CachedProgram, Sequence[Any]]:
        """Return a program for calls with some sizes fixed; the general program if it is the same.

        Args:
            made: the general program; None if the function refuses the sizes that it was traced
                with.
            small: the sizes that are fixed.
            inputs, bounds, scalars: those of the call, in which the fixed sizes are named dims.
        """
        inputs = [with_sizes_fixed(spec, small) for spec in inputs]
        bounds = {name: dim for name, dim in bounds.items() if name not in small}
        fixed = self.trace(inputs, bounds)
        if made is None:
            return fixed
        some = {
            **self.sizes,
            **{name: any_size(dim) for name, dim in bounds.items()},
            **{scalar.name: any_number(type(scalar.value)) for scalar in scalars},
        }
        return _one_of(made, fixed, some)

    def _traced(
        self, inputs: Sequence[InputSpec], bounds: Mapping[str, Dim], small: Mapping[str, int]
    ) -> tuple[CachedProgram, Sequence[Any]] | None:
        """Return ``trace(...)``; None if the function refuses the hint for a size below 2."""
        try:
            return self.trace(inputs, bounds)
        except DataDependentError:  # such as ``item()`` of a tensor with several elements
            if small:
                return None
            raise
        except TsfuncError:
            raise
        except Exception:
            if small:
                return None
            raise

    def facts(self, inputs: Sequence[InputSpec]) -> dict[str, Any]:
        """Return the assumptions of a program for the call, by the user's names."""
        return facts_of_call(
            self.flat, self.places, inputs, self.ambient, self.arguments, self.orders, self.passed
        )

    def trace(
        self, inputs: Sequence[InputSpec], bounds: Mapping[str, Dim]
    ) -> tuple[CachedProgram, Sequence[Any]]:
        """Return a program for such calls, and the tensors that it reads from argument objects."""
        scalars = self.scalars(inputs, bounds)
        if scalars:
            try:
                found = self._trace(inputs, bounds, scalars)
            except Exception:  # for example, a symbol can't be hashed
                return self._trace(inputs, bounds, ())
            # A condition on the number and the sizes in general may fail for these.
            if not found[0].form.unmet(self.flat, self.sizes):
                return found
        return self._trace(inputs, bounds, ())

    def trace_for_any(
        self, inputs: Sequence[InputSpec], bounds: Mapping[str, Dim], numbers: frozenset[int]
    ) -> tuple[CachedProgram, Sequence[Any]]:
        """Do the same with further numbers as inputs, given by their positions."""
        return self._trace(inputs, bounds, self.scalars(inputs, bounds, numbers))

    def scalars(
        self,
        inputs: Sequence[InputSpec],
        bounds: Mapping[str, Dim],
        by_themselves: Collection[int] = (),
    ) -> Sequence[ScalarSpec]:
        """Return the numbers among the arguments that are inputs; backends make them constants."""
        if self.target.backend is not None:
            return ()
        return describe_scalars(
            self.flat, self.places, self.contract, inputs, bounds, by_themselves
        )

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of named dims in the call."""
        return {} if self.bindings is None else self.bindings.sizes

    def _trace(
        self, inputs: Sequence[InputSpec], bounds: Mapping[str, Dim], scalars: Sequence[ScalarSpec]
    ) -> tuple[CachedProgram, Sequence[Any]]:
        """Trace and compile a program, and show and log that."""
        with progress(self.name, self.reason):
            made = self._new_entry(inputs, bounds, scalars)
        self._record(made[0])
        return made

    def _new_entry(
        self, inputs: Sequence[InputSpec], bounds: Mapping[str, Dim], scalars: Sequence[ScalarSpec]
    ) -> tuple[CachedProgram, Sequence[Any]]:
        start = time.perf_counter()
        described = {} if self.contract is None else self.contract.descriptors
        request = TraceRequest(
            f"specialize({self.name})", self.name, self.func, self.flat, self.tree, inputs, bounds,
            scalars, opaque_arguments(self.func, described, self.parameters, spelled), described,
        )  # fmt: skip
        program, instances = self._with_numbers(request)
        signature = self.signature(inputs, scalars)
        bounds = {**bounds, **program.raised}
        inputs = [with_dims_raised(spec, program.raised) for spec in inputs]
        form = form_of_call(
            self.flat, self.tree, inputs, bounds, self.ambient, self.target.sees_keywords,
            program.conditions, program.property_guards, program.groups, scalars,
        )  # fmt: skip
        closure_lines = instances.builder.guard_lines
        program = dataclasses.replace(
            program,
            form=form,
            guard_lines=closure_lines,
            places=self.places,
            descriptors=self.descriptors(inputs, scalars),
            guards=self.guards(inputs, bounds, scalars, instances.builder.read, program),
            state=state_of(
                self.func, program.lifted, program.updates, len(self.flat), closure_lines.values,
                instances.builder.read,
            ),
        )  # fmt: skip
        if self.target.backend is not None:
            run = Compiled(
                program,
                self.target.backend,
                self.target.backend_name,
                [*self.flat, *closure_lines.values],
            )
            program = dataclasses.replace(program, run=run)
        lines, scope = guard_lines(self.flat, inputs, bounds, scalars, program.conditions)
        lines += form.more(scope)
        opening = opening_lines(self.tree, scope, self.target.sees_keywords)
        entry = CachedProgram(
            program,
            self.tree,
            closure_lines.function(self.ambient, lines, scope, late=opening is not None),
            closure_lines.function(self.ambient, late=True),
            self.reason,
            signature,
            form,
            None
            if opening is None
            else closure_lines.entry_code(self.ambient, opening, lines, scope),
            self.target.refused_by(self.contract),
            time.perf_counter() - start,
        )
        return entry, closure_lines.values

    def _with_numbers(self, request: TraceRequest) -> tuple[Program, Instances]:
        """Return ``_captured(...)``; numbers outside that can't be inputs are constants."""
        if self.earlier:
            with suppress(Exception):  # for example, a symbol can't be hashed
                return self._captured(request)
            self.earlier = {}
        return self._captured(request)

    def _captured(
        self, request: TraceRequest, every: bool = False, apart: bool = False
    ) -> tuple[Program, Instances]:
        """Return the program of a trace, and the objects that were watched.

        Args:
            request: the trace.
            every: whether variables that are only changed are guarded, too.
            apart: whether the function is known to compare its tensors by identity.
        """
        instances = self._instances(every)
        instances.compares_identity = instances.compares_identity or apart
        try:
            return capture(request, instances), instances
        except RetraceForStoredTensors:
            return self._captured(request, True, apart)
        except RetraceForBackward:
            request = dataclasses.replace(request, records=True)
        except RetraceForAliasing as told:
            return self._captured(dataclasses.replace(request, own=told.own), every, True)
        except RetraceForSmallSizes as edge:
            instances = self._instances(every)
            instances.compares_identity = instances.compares_identity or apart
            request = dataclasses.replace(request, retraced=edge.names)
            try:
                return capture(request, instances), instances
            except Exception:
                raise edge.refusal from None
        return self._captured(request, every, apart)

    def _record(self, entry: CachedProgram) -> None:
        """Log a new program, also in the log of ``rage``."""
        program = entry.program
        backend = self.target.backend_name
        log_program(program, entry.reason, entry.seconds, backend, entry.text)
        rage.record(
            "specialized",
            function=self.name,
            at=users_place(),
            reason=entry.reason,
            arguments=entry.text,
            backend=backend,
            milliseconds=round(entry.seconds * 1e3, 1),
            operators=sum(node.op == "call_function" for node in program.graph.nodes),
            guards=program.guards,
            program=program.source,
        )

    def signature(self, inputs: Sequence[InputSpec], scalars: Sequence[ScalarSpec]) -> Any:
        """Return the part of a call that does not depend on sizes of named dims and on numbers."""
        parts = self.flat, self.tree, self.orders, self.ambient, inputs, scalars
        return self.contract, call_signature(*parts)

    def guards(
        self,
        inputs: Sequence[InputSpec],
        bounds: Mapping[str, Dim],
        scalars: Sequence[ScalarSpec],
        read: Mapping[str, Any],
        program: Program,
    ) -> Guards:
        """Return the guards of a program for these inputs, for people."""
        positions = [spec.position for spec in scalars]
        return guard_texts(
            self.flat,
            self.places,
            inputs,
            bounds,
            self.ambient,
            self.arguments,
            read,
            positions,
            program.conditions,
            program.property_guards,
        )

    def descriptors(
        self, inputs: Sequence[InputSpec], scalars: Sequence[ScalarSpec]
    ) -> dict[str, Any]:
        """Return descriptors of exactly the calls that a program for these inputs is made for."""
        leaves = [type(value) if is_instance(value) else value for value in self.flat]
        for scalar in scalars:
            leaves[scalar.position] = type(scalar.value)
        return described(leaves, inputs, self.tree, self.parameters)

    def _instances(self, every: bool) -> Instances:
        instances = Instances(self.name, self.closure, self.earlier)
        free_variables = FreeVariables(instances, every)
        for i, value in enumerate(self.flat):
            if is_instance(value) or is_container(value):
                instances.add(value, spelled(self.places[i]), f"args[{i}]")
            elif hasattr(type(value), "__next__"):
                instances.builder.refuse_iterator(spelled(self.places[i]), "an argument", value)
        free_variables.add(self.func)
        for i, value in enumerate(self.flat):
            if isinstance(value, CODE):
                free_variables.scan(value)
            instances.generators.add(spelled(self.places[i]), value)
        return instances


def _one_of(
    symbolic: tuple[CachedProgram, Sequence[Any]],
    fixed: tuple[CachedProgram, Sequence[Any]],
    sizes: Mapping[str, Any],
) -> tuple[CachedProgram, Sequence[Any]]:
    """Return the entry for fixed sizes, with the symbolic program if it does the same there."""
    (one, reached), (other, same_reached) = symbolic, fixed
    alike = list(map(id, reached)) == list(map(id, same_reached)) and same_program(
        one.program, other.program, sizes
    )
    return (dataclasses.replace(other, program=one.program) if alike else other), same_reached


def _is_small(entry: CachedProgram, name: str, size: int) -> bool:
    """Return True if a program for any size of a named dim does not serve a size this small."""
    bounds = entry.form.bounds
    return name in bounds and (size < 2 or size < (bounds[name].min or 0))
