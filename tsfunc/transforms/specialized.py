"""Functions that run as programs: the results of ``specialize`` and of ``load``.

A call runs in these steps. The arguments are flattened. The guard of each program, most recently
used first, tests whether the program was made for such arguments. The generated Python of the
first match runs. Without a match, the call is checked against the descriptors, the function is
traced, and the new program is kept. A loaded function has programs only, and refuses such a call.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import torch
from torch.compiler import is_dynamo_compiling

from tsfunc._text import count_text
from tsfunc.bridge.control.axis_collectives import is_bound
from tsfunc.bridge.control.nans import is_watching
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.trace.trace_rules import guard_or_none
from tsfunc.bridge.tracers.boundaries import watched_for_nans
from tsfunc.bridge.tracers.dynamo import outside_dynamo, replace_in_dynamo
from tsfunc.config import config
from tsfunc.dispatch.state import tls
from tsfunc.errors import (
    DataDependentError,
    DescriptorError,
    DescriptorViolation,
    FileFormatError,
    NanError,
    RetraceWarning,
    TypeCheckError,
    UnboundAxisError,
)
from tsfunc.program import Program
from tsfunc.program.calling.cache import (
    Cache,
    CachedProgram,
    CacheInfo,
    NeedsInlining,
    Target,
    hoisted_names,
)
from tsfunc.program.calling.cache_miss import CacheMiss
from tsfunc.program.calling.no_match import explain_miss
from tsfunc.program.calling.user_assertions import raise_user_assertion
from tsfunc.program.closure.guard_builder import Closure
from tsfunc.program.graphs.example_arguments import arguments_for
from tsfunc.program.graphs.properties import ProgramProperties
from tsfunc.program.guard import GuardTexts
from tsfunc.transforms.control.serialization import register_all
from tsfunc.transforms.in_dims import by_position
from tsfunc.transforms.transformed import Transformed
from tsfunc.types import Contract, compile_descriptors
from tsfunc.types.contract import in_order
from tsfunc.types.reading import signature_of
from tsfunc.user_code import fold_traceback, folded_class, function_text, is_boundary, name_of, warn

if TYPE_CHECKING:  # files need safetensors, which `import tsfunc` must not import
    from tsfunc.program.files.program_state import CellState

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_Owner = TypeVar("_Owner")

register_all()  # so that files know the values that programs may hold


@folded_class
class Specialized(Transformed[_Params, _Result]):
    """A function that runs as programs; made by :func:`specialize`.

    ``Specialized[P, R]`` is its type in annotations, with the parameters and the result of the
    function. A call takes the arguments of the function and returns its result.

    Example:
        >>> import torch
        >>> from tsfunc import Specialized, specialize
        >>> f: Specialized[[torch.Tensor], torch.Tensor] = specialize(torch.sin)
        >>> f(torch.zeros(2))
        tensor([0., 0.])

    Corresponds to the result of ``jax.jit``.
    """

    __name__: str  # unless the function has none, as an nn.Module
    func: Any
    _has_function = True  # the function can be traced for more calls

    def __init__(
        self,
        func: Callable[_Params, _Result],
        descriptors: Sequence[Mapping[str, object]],
        *,
        max_specializations: int,
        closure: Closure,
        auto_widen: bool,
        backend: Any,
        hoist: bool | Collection[str],
    ) -> None:
        functools.update_wrapper(self, func, updated=())
        self.func = func
        self.name = name_of(func)
        signature = signature_of(func)
        self._contracts = tuple(
            compile_descriptors(d, signature, name=self.name) for d in descriptors
        )
        contracts = self._contracts
        if len(contracts) > 1:
            contracts = in_order(contracts, f"specialize({self.name})")
        compiler = None
        if backend != "python":
            from tsfunc.program.graphs.backends import resolve

            compiler = resolve(backend)
        named = backend if isinstance(backend, str) else name_of(backend)
        hoisted = hoisted_names(hoist, self.name, signature)
        self.target = Target(
            func, self.name, signature, contracts, closure, compiler, named, hoisted
        )
        self.cache = Cache(max_specializations, auto_widen)
        self._backend = backend

    def _for_dynamo(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; Dynamo traces this instead: NOTE [inside of torch.compile]."""
        target = self.target
        if target.closure == "freeze":
            return self._outside(*args, **kwargs)
        if target.contracts:
            target.contract(target.bound(args, kwargs))
        return self.func(*args, **kwargs)

    @outside_dynamo
    def _outside(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    @replace_in_dynamo(_for_dynamo)
    @outside_dynamo
    @is_boundary
    def __call__(self, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        if config.debug_nans_set and not is_watching():
            try:
                return watched_for_nans(self, args, kwargs)
            except Exception as error:  # the call inside is not the outermost one, which folds
                fold_traceback(error, self._label, functools.partial(self._named, args, kwargs))
                raise
        try:
            entries = self.cache.entries
            in_levels = bool(tls.state.levels)
            for entry in entries:
                if in_levels:
                    values = guard_or_none(entry.enter, args, kwargs)
                else:
                    values = entry.enter(args, kwargs)
                if values is not None:
                    entry.hits += 1
                    if entry is not entries[0]:
                        self.cache.move_to_front(entry)
                    try:
                        return entry.build(entry.run(values))
                    except NeedsInlining:
                        return self._call_function(args, kwargs)
                    except RuntimeError as error:
                        if self._has_function:
                            raise_user_assertion(self.func, args, kwargs, entry.program, error)
                        raise
            return self._on_cache_miss(args, kwargs)
        except UnboundAxisError as error:
            if not is_bound(error.axis_name):
                fold_traceback(error, self._label)
                raise
        except Exception as error:
            # A ``raise`` of another error would add this frame to the folded traceback.
            try:
                if isinstance(error, NanError):
                    self._find_nan(args, kwargs)
                fold_traceback(error, self._label, functools.partial(self._named, args, kwargs))
                raise
            except NanError as better:
                if better is not error:
                    better.__suppress_context__ = True
                    fold_traceback(better, self._label)
                raise
        # Programs are made outside of all transforms, so the vmap that binds the name is not
        # active.
        return self.func(*args, **kwargs)

    def _find_nan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the function without its program: NOTE [watching for NaNs].

        Raises:
            NanError: the operator that makes the NaN, and the example.
        """
        if self._has_function and not tls.state.levels:
            with contextlib.suppress(DataDependentError):  # only a trace can serve the function
                self.func(*args, **kwargs)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of a call by parameter; none if the function does not take it."""
        try:
            return self.target.bound(args, kwargs)
        except TypeError:
            return {}

    def _label(self) -> str:
        return f"specialize({function_text(self.func)})"

    def _call_function(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function itself, because a trace could not record its program."""
        return self.func(*args, **kwargs)

    def _on_cache_miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check the contract, trace the function, and keep the program."""
        call = CacheMiss(self.target, args, kwargs)
        if current_trace() is not None:
            return self.func(*args, **kwargs)
        with self.cache.lock:
            cached = self.cache.find(args, kwargs)
            if cached is None:
                self.cache.misses += 1
                entry, closure_values = call.make_entry(self.cache)
        if cached is not None:  # another thread has made it in the meantime
            return self(*args, **kwargs)
        if call.warning is not None:
            warn(call.warning, RetraceWarning)
        try:
            return entry.build(entry.run([*call.flat, *closure_values]))
        except RuntimeError as error:
            if self._has_function:
                raise_user_assertion(self.func, args, kwargs, entry.program, error)
            raise

    def lower(self, *descriptors: object) -> Any:
        """Make programs ahead of any call, from descriptors alone.

        Args:
            descriptors: for each program a dict from parameter names to descriptors: the dtype and
                sizes of each tensor (a name for a size that may vary), and other values
                themselves. Or the descriptors of one program's positional arguments, in order, if
                one of them is not a dict. Without any, the descriptors that were given to
                ``specialize``.

        Returns:
            The :class:`~tsfunc.program.Program`; for several sets of descriptors, a tuple. Calls
            that match the program run it without a trace.

        Raises:
            DescriptorError: a descriptor lacks information that the trace needs, or there are no
                descriptors.
            ConstraintViolation, DataDependentError: as for a call.

        Example:
            >>> import torch
            >>> from tsfunc import MetaTensorType, specialize
            >>> f = specialize(lambda x, k: (x * k).sum(0))
            >>> program = f.lower({"x": MetaTensorType(["n", 2], dtype=torch.float32), "k": 3})
            >>> program.properties()["sum_dim_int_list"].shape
            (2,)
            >>> f(torch.ones(5, 2), 3), f.cache_info().misses
            (tensor([15., 15.]), 0)
            >>> f.lower(MetaTensorType(["n", 3], dtype=torch.float64), 2).descriptors["x"].shape
            ('n', 3)

        Corresponds to ``jax.jit(f).lower``.
        """
        target = self.target
        if descriptors and target.contracts:
            raise DescriptorError(
                f"specialize({self.name}): it has descriptors already, and lower() makes the "
                f"programs for these; it takes others where specialize was given none."
            )
        contracts = self._contracts or tuple(
            compile_descriptors(each, target.signature, name=self.name)
            for each in self._by_parameter(descriptors)
        )
        if not contracts:
            raise DescriptorError(
                f"specialize({self.name}): lower() expected descriptors of the arguments by "
                f"parameter name, got none."
            )
        programs = tuple(self._lower_one(contract) for contract in contracts)
        return programs[0] if len(programs) == 1 else programs

    def _by_parameter(self, descriptors: Sequence[object]) -> Sequence[Mapping[str, object]]:
        """Return each program's descriptors by name; positional ones are one program's."""
        by_name = [descriptor for descriptor in descriptors if isinstance(descriptor, Mapping)]
        if len(by_name) == len(descriptors):
            return by_name
        names = by_position(self.target.signature.parameters)
        if len(descriptors) > len(names):
            most = count_text(len(names), "descriptor")
            raise DescriptorError(
                f"specialize({self.name}): lower: expected at most {most} by position, "
                f"for {', '.join(names) or 'no parameter'}, got {len(descriptors)}."
            )
        return [dict(zip(names, descriptors, strict=False))]

    def _lower_one(self, contract: Contract) -> Program:
        bound = arguments_for(self.name, self.target.signature, contract)
        target = dataclasses.replace(self.target, contracts=(contract,))
        call = CacheMiss(target, bound.args, bound.kwargs)
        with self.cache.lock:
            entry, _ = call.make_entry(self.cache, "lower()")
        return entry.program

    @property
    def program(self) -> Program:
        """The most recently used program."""
        if not self.cache.entries:
            raise RuntimeError(
                f"specialize({self.name}): there is no program yet; one is made by the first call."
            )
        return self.cache.entries[0].program

    @property
    def programs(self) -> tuple[Program, ...]:
        """All programs, the most recently used first."""
        return self.cache.programs

    @property
    def descriptors(self) -> Mapping[str, Any]:
        """The descriptors that the current program was made for; ``specialize`` accepts them."""
        return self.program.descriptors

    @property
    def guards(self) -> GuardTexts:
        """The conditions that every call of the current program meets, one per line."""
        return self.program.guards.texts

    def properties(self) -> ProgramProperties:
        """Return the known properties of each value of the current program."""
        return self.program.properties()

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The current program as a ``torch.fx.GraphModule``."""
        return self.program.graph_module

    def draw(self) -> str:
        """Return the current program as an SVG picture."""
        return self.program.draw()

    def show(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        args: tuple[Any, ...] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Print all programs, or write them as one HTML page: :meth:`Program.show`.

        Args:
            path: the file of the page; None prints the text.
            args: positional arguments of a call, with which the program that serves them is
                measured for the page.
            kwargs: keyword arguments of that call.

        Example:
            >>> import os, tempfile, torch, tsfunc
            >>> f = tsfunc.specialize(lambda x: x.sin())
            >>> x = torch.ones(3)
            >>> _ = f(x)
            >>> page = os.path.join(tempfile.mkdtemp(), "f.html")
            >>> f.show(page, args=(x,))
        """
        if path is None:
            for program in self.programs:
                program.show()
            return
        from tsfunc.program.graphs.page import programs_page

        times: dict[Program, Mapping[str, float]] = {}
        if args is not None:
            for entry in self.cache.entries:
                values = entry.enter(args, dict(kwargs or {}))
                if values is not None:
                    times[entry.program] = entry.program.measure(values)
        text = programs_page(self.name, self.programs, times)
        Path(path).write_text(text, encoding="utf-8")

    def to_exported_program(self) -> torch.export.ExportedProgram:
        """Return the current program as a ``torch.export.ExportedProgram``."""
        return self.program.to_exported_program()

    def cache_info(self) -> CacheInfo:
        """Return the number of cache hits and misses, and information about each program.

        Example:
            >>> import torch
            >>> from tsfunc import specialize
            >>> f = specialize(lambda x: x.sin())
            >>> for n in (5, 7, 7):
            ...     _ = f(torch.ones(n))
            >>> [entry.reason for entry in f.cache_info().entries]
            ['x.shape[0]: 7, was 5', 'the first call']
        """
        return self.cache.info()

    def cache_clear(self) -> None:
        """Remove all programs."""
        self.cache.clear()

    def save(self, path: str | os.PathLike[str], *programs: Program, exact: bool = False) -> None:
        """Write a file that :func:`~tsfunc.load` reads.

        Args:
            path: the path of the file; an existing file is replaced when the new one is complete.
            programs: the programs of ``self.programs`` to save; by default all.
            exact: if True, the file serves only calls like those that were made. Otherwise the
                function is traced for more calls: for named dims of size 0 and 1, without recording
                (``torch.no_grad``), and for arguments with the other ``requires_grad``.

        Raises:
            RuntimeError: there is no program yet.
            ValueError: a program has a value that a file can't hold, or is not a program of this
                function.
        """
        # Imported here: files need safetensors, which `import tsfunc` must not import.
        from tsfunc.program.calling.saving import function_to_save
        from tsfunc.program.files.archive import replace_file
        from tsfunc.program.files.saved_functions import function_bytes

        exact = exact or not self._has_function
        saved = function_to_save(self.target, self.cache, programs, exact)
        replace_file(Path(path), function_bytes(saved))

    def __reduce__(self) -> Any:
        """Return the file form, which has the programs but not the function.

        Without programs it is the name, if the function is imported by it, else the function.
        """
        if not self.cache.entries:
            if self._is_named():
                return getattr(self, "__qualname__")  # noqa: B009 - it has the function's
            described = [contract.descriptors for contract in self._contracts]
            target, cache = self.target, self.cache
            rebuild = functools.partial(
                type(self), max_specializations=cache.limit, closure=target.closure,
                auto_widen=cache.auto_widen, backend=self._backend, hoist=target.hoist,
            )  # fmt: skip
            return rebuild, (self.func, described)
        from tsfunc.program.calling.saving import function_to_save
        from tsfunc.program.files.saved_functions import pickle_function

        exact = not self._has_function
        return _unpickle, pickle_function(function_to_save(self.target, self.cache, (), exact))

    def _is_named(self) -> bool:
        """True if an import of the function's module and name gives this object."""
        value: Any = sys.modules.get(getattr(self, "__module__", ""))
        for name in getattr(self, "__qualname__", "<none>").split("."):
            value = getattr(value, name, None)
        return value is self

    def __copy__(self) -> Specialized[_Params, _Result]:
        return self._with(self.func)

    def __deepcopy__(self, memo: dict[int, Any]) -> Specialized[_Params, _Result]:
        return self._with(copy.deepcopy(self.func, memo))

    def _with(self, func: Callable[_Params, _Result]) -> Specialized[_Params, _Result]:
        """Return a copy for a function or a copy of it; a new function has no programs yet."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.func, copy.target = func, dataclasses.replace(self.target, func=func)
        copy.cache = Cache(self.cache.limit, self.cache.auto_widen)
        if func is self.func:
            copy.cache.entries = self.cache.entries
        return copy

    @overload
    def __get__(self, instance: None, owner: Any) -> Specialized[_Params, _Result]: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> Specialized[..., _Result]: ...
    def __get__(self, instance: object, owner: Any) -> Any:
        """Return the function of an instance, which has the attributes of this object."""
        called: Any = self
        if instance is None:
            return self
        # Dynamo traces no calls of MethodType.
        return (functools.partial if is_dynamo_compiling() else MethodType)(called, instance)

    def __repr__(self) -> str:
        return f"<specialized {self.name}, {count_text(len(self.programs), 'program')}>"


class LoadedFunction(Specialized[..., Any]):
    """A function that consists of its programs only; made by :func:`load`."""

    _has_function = False

    def __repr__(self) -> str:
        return f"<loaded {self.name}, {count_text(len(self.programs), 'program')}>"

    saved_state: CellState
    label: str  # the file that it was loaded from

    def _on_cache_miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raise an error that tells how the call differs from the calls of the programs."""
        call = CacheMiss(self.target, args, kwargs)
        raise DescriptorViolation(
            f"{self.name}, loaded from {self.label}: there is no program for this call, and a file "
            f"does not have the function itself: {explain_miss(call, self.cache.entries)}"
            f"Call it as these were called, or save it after a call like this one."
        )

    def _call_function(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raise an error: the function cannot be traced again."""
        raise TypeCheckError(
            f"{self.name}, loaded from {self.label}, differentiates random operators, and a trace "
            f"can't record that two runs draw the same numbers. Call it outside of specialize, or "
            f"save the function without the derivative, and differentiate the loaded function."
        )

    @property
    def state(self) -> dict[str, Any]:
        """The state that the programs assign to, with its current values, by the user's names."""
        return self.saved_state.as_dict()

    @property
    def __assigned_state__(self) -> dict[str, list[Any]]:
        """The state by its name, for traces of other functions that look for assigned state."""
        return {f"{self.name}.state": self.saved_state.values} if self.saved_state.values else {}

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadedFunction:
        """Return a copy with the same programs and its own weights and state."""
        unpickled, (data, classes) = self.__reduce__()
        return unpickled(data, classes)

    def cache_clear(self) -> None:
        """Reset the counts. The programs are kept, since they could not be made again."""
        self.cache.reset_counts()


def _unpickle(data: bytes, classes: Mapping[str, type]) -> LoadedFunction:
    """Return the specialized function that pickle restores."""
    return read_loaded(io.BytesIO(data), "pickle", classes, None)


def read_loaded(
    file: Any, label: str, classes: Mapping[str, type], device: torch.device | None
) -> LoadedFunction:
    """Return the function of an open file.

    Args:
        device: the device in place of those in the file.
    """
    # Imported here: files need safetensors, which `import tsfunc` must not import.
    from tsfunc.program.files.saved_functions import read_function
    from tsfunc.transforms.control import cond, loops  # noqa: F401  what a program may run

    saved = read_function(file, label, classes, device)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise DescriptorViolation(
            f"{saved.name}: it was loaded from {label}, without its function."
        )

    missing.__name__ = missing.__qualname__ = saved.name
    missing.__signature__ = saved.signature  # type: ignore[attr-defined]
    try:
        loaded = LoadedFunction(
            missing, saved.descriptors, max_specializations=saved.limit, closure="freeze",
            auto_widen=True, backend="python", hoist=False,
        )  # fmt: skip
    except DescriptorError as error:  # each descriptor is valid, but they contradict each other
        raise FileFormatError(
            f"{label}: entry 'function.json': its descriptors are those of no function: {error}"
        ) from None
    loaded.saved_state, loaded.label = saved.state, label
    programs = {
        program: Program.of(program) for program in [answer.program for answer in saved.answers]
    }
    refused = loaded.target.refusal_test(None, True)
    loaded.cache.entries = tuple(
        CachedProgram.of_call_spec(
            programs[answer.program], answer.call_spec, answer.reason, refused
        )
        for answer in saved.answers
    )
    return loaded
