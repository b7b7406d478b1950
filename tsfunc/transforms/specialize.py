"""``specialize``: a function made a program for inputs that descriptors describe.

The way of a call: the arguments are flattened; the guard of each program, most recently used
first, looks whether the program was made for such arguments; its generated Python runs. Where none
was, the call is checked against the descriptors, the function is traced for it, and the new
program is kept.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.collectives import is_bound
from tsfunc.bridge.dynamo import outside_dynamo
from tsfunc.bridge.tracer import Tracer
from tsfunc.bridge.tracing import tracing_here
from tsfunc.errors import DescriptorError, DescriptorViolation, UnboundAxisError
from tsfunc.program import Program, capture
from tsfunc.program.equal import same_program
from tsfunc.program.guards import Guard, generate_guard
from tsfunc.program.holding import is_instance
from tsfunc.program.inputs import (
    InputSpec,
    call_signature,
    describe_inputs,
    short_text,
    with_sizes_fixed,
)
from tsfunc.program.instances import Instances
from tsfunc.program.reach import Reach
from tsfunc.program.reads import Read, reads_of, unchanged
from tsfunc.transforms.vmap_spec import name_of
from tsfunc.types import (
    Bindings,
    CompiledDescriptors,
    Dim,
    compile_descriptors,
)
from tsfunc.types.meta import tensor_text


class CacheInfo(NamedTuple):
    """What a specialized function keeps: its programs, and why each was made."""

    hits: int
    misses: int
    programs: int
    limit: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Entry:
    """A program and the calls that it may answer."""

    program: Program
    tree: optree.PyTreeSpec
    guard: Guard
    reach: Reach | None
    ambient: tuple[Any, ...]
    reads: list[Read]
    reason: str
    signature: Any


def _ambient() -> tuple[Any, ...]:
    """torch's settings that decide what operators do, beside their arguments."""
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


class Specialized:
    """A function that runs as programs; made by :func:`specialize`."""

    def __init__(
        self,
        func: Callable[..., Any],
        descriptors: Sequence[Mapping[str, object]],
        max_programs: int,
    ) -> None:
        functools.update_wrapper(self, func, updated=())
        self.func = func
        self.name = name_of(func)
        self.max_programs = max_programs
        target = func.forward if isinstance(func, torch.nn.Module) else func
        self.signature = inspect.signature(target)
        self.contracts = tuple(
            compile_descriptors(d, self.signature, name=self.name) for d in descriptors
        )
        self._entries: list[_Entry] = []
        self._hits = self._misses = 0

    @outside_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat, tree = optree.tree_flatten(
            (args, kwargs), none_is_leaf=True, namespace=pytrees.NAMESPACE
        )
        ambient = _ambient()
        entries = self._entries
        for i, entry in enumerate(entries):
            if (
                entry.ambient == ambient
                and entry.tree == tree
                and entry.guard(flat)
                and unchanged(entry.reads)
            ):
                reached = entry.reach(flat) if entry.reach is not None else ()
                if reached is None:
                    continue
                self._hits += 1
                if i:
                    entries.insert(0, entries.pop(i))
                program = entry.program
                results = program.run([*flat, *reached] if reached else flat)
                return optree.tree_unflatten(program.out_tree, results)
        try:
            return self._first_call(args, kwargs, flat, tree, ambient)
        except UnboundAxisError as error:
            if not is_bound(error.axis_name):
                raise
            # A program is made outside of all transforms, where the vmap that has the name is not.
            return self.func(*args, **kwargs)

    def _first_call(
        self, args: Any, kwargs: Any, flat: list[Any], tree: optree.PyTreeSpec, ambient: Any
    ) -> Any:
        """Checks the contract, traces, and keeps the program."""
        if pytrees.structure_of((args, kwargs)) != tree:  # a class is taken for a container now
            return self(*args, **kwargs)
        arguments, places = self._bind(args, kwargs, len(flat), tree, flat)
        contract, bindings = self._contract(arguments)
        if tracing_here():
            return self.func(*args, **kwargs)
        self._misses += 1
        call = _Call(self, flat, tree, ambient, places)
        inputs, bounds = describe_inputs(flat, places, contract, bindings)
        known = self._known(call, inputs)
        entry, reached = known or call.trace(inputs, bounds)
        sizes = bindings.sizes if bindings is not None else {}
        small = {name: size for name, size in sizes.items() if size < 2 and name in bounds}
        if small:
            # NOTE [sizes 0 and 1] in program/equal
            if known is None:
                self._keep(entry)
            inputs = [with_sizes_fixed(spec, small) for spec in inputs]
            bounds = {name: dim for name, dim in bounds.items() if name not in small}
            fixed, same_reached = call.trace(inputs, bounds)
            alike = (
                set(sizes) == set(small)
                and list(map(id, reached)) == list(map(id, same_reached))
                and same_program(entry.program, fixed.program, sizes)
            )
            entry = dataclasses.replace(fixed, program=entry.program) if alike else fixed
            reached = same_reached
        self._keep(entry)
        return entry.program([*flat, *reached])

    def _keep(self, entry: _Entry) -> None:
        """Puts a program first among the entries."""
        if any(isinstance(value, Tracer) for value in entry.program.lifted.values()):
            return  # it belongs to an outer transform that is active now, and ends with it
        self._entries.insert(0, entry)
        del self._entries[self.max_programs :]

    def _known(
        self, call: _Call, inputs: Sequence[InputSpec]
    ) -> tuple[_Entry, Sequence[Any]] | None:
        """The symbolic program for such a call, if another size of it was seen before."""
        signature = call.signature(inputs)
        for entry in self._entries:
            if entry.signature == signature and unchanged(entry.reads):
                reached = () if entry.reach is None else entry.reach(call.flat)
                if reached is not None:
                    return entry, reached
        return None

    def _bind(
        self, args: Any, kwargs: Any, count: int, tree: optree.PyTreeSpec, flat: Sequence[Any]
    ) -> tuple[dict[str, Any], dict[int, tuple[Any, ...]]]:
        """The arguments by parameter, and for each flattened one its path from a parameter."""
        bound = self.signature.bind(*args, **kwargs).arguments
        numbers = [_Place(i) for i in range(count)]
        numbered_args, numbered_kwargs = optree.tree_unflatten(tree, numbers)
        numbered = self.signature.bind(*numbered_args, **numbered_kwargs).arguments
        places: dict[int, tuple[Any, ...]] = {}
        for name, value in numbered.items():
            paths, leaves, _ = optree.tree_flatten_with_path(
                value, none_is_leaf=True, namespace=pytrees.NAMESPACE
            )
            for path, leaf in zip(paths, leaves, strict=True):
                places[leaf.index] = (name, *path)
        return dict(bound), places

    def _contract(
        self, arguments: Mapping[str, Any]
    ) -> tuple[CompiledDescriptors | None, Bindings | None]:
        """The first of the contracts that the call keeps."""
        errors = []
        for contract in self.contracts:
            try:
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

    @property
    def program(self) -> Program:
        """The program that was used last."""
        if not self._entries:
            raise RuntimeError(
                f"specialize({self.name}): there is no program yet; one is made by the first call."
            )
        return self._entries[0].program

    @property
    def programs(self) -> tuple[Program, ...]:
        """All programs, the most recently used first."""
        return tuple(dict.fromkeys(entry.program for entry in self._entries))

    def cache_info(self) -> CacheInfo:
        """How many calls found a program, and why each program was made."""
        reasons = tuple(entry.reason for entry in self._entries)
        return CacheInfo(self._hits, self._misses, len(self.programs), self.max_programs, reasons)

    def cache_clear(self) -> None:
        """Forgets all programs."""
        self._entries.clear()
        self._hits = self._misses = 0

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<specialized {self.name}, {len(self.programs)} programs>"


class _Call:
    """A call that no program is there for: what it is traced with.

    Args:
        specialized: the function that is called.
        flat: the flattened arguments.
        tree: their structure.
        ambient: torch's settings.
        places: the path of each from a parameter.
    """

    def __init__(
        self,
        specialized: Specialized,
        flat: list[Any],
        tree: optree.PyTreeSpec,
        ambient: Any,
        places: Mapping[int, tuple[Any, ...]],
    ) -> None:
        self.func, self.name = specialized.func, specialized.name
        self.flat, self.tree, self.ambient, self.places = flat, tree, ambient, places
        self.reads, self.objects = reads_of(self.func)

    def trace(
        self, inputs: Sequence[InputSpec], bounds: Mapping[str, Dim]
    ) -> tuple[_Entry, Sequence[Any]]:
        """A program for such calls, and the tensors that it reads of objects in the arguments."""
        instances = self._instances()
        program = capture(
            self.func, self.name, self.flat, self.tree, inputs, bounds, instances=instances
        )
        guard = generate_guard(self.flat, inputs, bounds)
        held = instances.held
        reach = held.facts.function() if held.facts else None
        reason = "; ".join(
            [f"{spec.name}: {short_text(spec)}" for spec in inputs]
            + [f"{place.text}: {tensor_text(x.dtype, x.shape)}" for x, place in held.inputs]
        )
        entry = _Entry(
            program, self.tree, guard, reach, self.ambient, self.reads, reason,
            self.signature(inputs),
        )  # fmt: skip
        return entry, tuple(x for x, _ in held.inputs)

    def _instances(self) -> Instances:
        instances = Instances(self.name)
        for i, value in enumerate(self.flat):
            if is_instance(value):
                instances.add(value, _spell(self.places[i]), f"args[{i}]")
        for name, value in self.objects.items():
            instances.add(value, name, None)
        return instances

    def signature(self, inputs: Sequence[InputSpec]) -> Any:
        """What calls have in common that differ in nothing but the sizes of named dims."""
        return call_signature(self.flat, self.tree, self.ambient, inputs)


def _spell(path: Sequence[Any]) -> str:
    """The path of an argument as a user would write it."""
    return str(path[0]) + "".join(f"[{entry!r}]" for entry in path[1:])


@dataclass(frozen=True)
class _Place:
    """Stands for a flattened argument while its path is looked for."""

    index: int


Descriptors = Mapping[str, object] | Sequence[Mapping[str, object]]


def specialize(
    func: Callable[..., Any] | Descriptors | None = None,
    descriptors: Descriptors | None = None,
    *,
    max_programs: int = 64,
) -> Any:
    """Makes a function run as programs, each traced once for calls that look alike.

    Args:
        func: takes and returns pytrees; a function or an ``nn.Module``. Without it, or with the
            descriptors in its place, ``specialize`` is a decorator.
        descriptors: by parameter name what the arguments are, and thereby the contract that
            every call must keep: a :class:`MetaTensorType` for a tensor (a name for a size makes
            it symbolic: one program for all sizes), a type or typing object, any other Python
            value (which the argument must equal), or a container of these. A list of such dicts
            gives several contracts, tried in order. What they leave open is taken from the call,
            and another value means another program.
        max_programs: how many programs are kept; beyond it the least recently used one goes.

    Returns:
        A callable of the same arguments, with ``program``, ``programs``, ``cache_info()`` and
        ``cache_clear()``. It can be used inside of other transforms, and they inside of it.

    Raises:
        DescriptorError: a descriptor is malformed, or names no parameter.
        DescriptorViolation: at a call that breaks the contract.
        ConstraintViolation: the function's course depends on the size of a named dim.
        DataDependentError: the function uses a tensor as a Python number or bool.

    Example:
        >>> import torch
        >>> from tsfunc import MetaTensorType, specialize
        >>> @specialize({"x": MetaTensorType(shape=["n", 2]), "double": True})
        ... def f(x, double):
        ...     return 2 * x if double else x
        >>> f(torch.ones(3, 2), True).sum(), f(torch.ones(5, 2), True).sum()
        (tensor(12.), tensor(20.))
        >>> f.cache_info().programs
        1

    The descriptors are those of the TorchScript Input Descriptor proposal; compare
    ``torch.export`` and ``jax.jit``.
    """
    if func is None or isinstance(func, Mapping) or _is_list_of_mappings(func):
        if func is not None and descriptors is not None:
            raise DescriptorError(
                "specialize: got descriptors twice; write specialize(func, descriptors)."
            )
        given: Any = func if func is not None else descriptors
        return lambda f: specialize(f, given, max_programs=max_programs)
    if not callable(func):
        raise TypeError(
            f"specialize: expected a function and descriptors for its parameters, got "
            f"{type(func).__name__}."
        )
    if descriptors is None:
        every: Sequence[Mapping[str, object]] = ()
    else:
        every = (descriptors,) if isinstance(descriptors, Mapping) else tuple(descriptors)
    return Specialized(func, every, max_programs)


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)
