"""``specialize``: turn a function into programs for inputs that descriptors describe.

A call runs in these steps. The arguments are flattened. The guard of each program, most recently
used first, tests whether the program was made for such arguments. The generated Python of the
first match runs. Without a match, the call is checked against the descriptors, the function is
traced, and the new program is kept.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, get_args, overload

import torch

from tsfunc import pytrees
from tsfunc.bridge.control.collectives import is_bound
from tsfunc.bridge.control.nans import is_watching
from tsfunc.bridge.trace.tracing import surely, tracing_here
from tsfunc.bridge.tracers.dynamo import instead_in_dynamo, outside_dynamo
from tsfunc.bridge.tracers.tracebacks import boundary, fold, is_boundary, spelled, watched_for_nans
from tsfunc.config import config
from tsfunc.dispatch.places import warn
from tsfunc.dispatch.state import tls
from tsfunc.errors import (
    DataDependentError,
    DescriptorError,
    NanError,
    RetraceWarning,
    UnboundAxisError,
)
from tsfunc.program import Program
from tsfunc.program.calling.cache import Cache, CacheInfo, NeedsInlining
from tsfunc.program.calling.calls import FirstCall, raise_user_assertion
from tsfunc.program.calling.target import Target
from tsfunc.program.closure.guard_builder import Closure
from tsfunc.program.closure.read_guards import Texts
from tsfunc.program.graphs.backends import resolve
from tsfunc.program.graphs.lowering import arguments_for
from tsfunc.program.graphs.properties import ProgramProperties
from tsfunc.transforms.control.serialization import register_all
from tsfunc.transforms.in_dims import by_position
from tsfunc.transforms.vmap_spec import name_of
from tsfunc.types import CompiledDescriptors, compile_descriptors
from tsfunc.types.compiled import in_order
from tsfunc.types.signatures import signature_of

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_Owner = TypeVar("_Owner")

register_all()  # so that files know the values that programs may hold


class Specialized(Generic[_Params, _Result]):
    """A function that runs as programs; made by :func:`specialize`.

    ``Specialized[P, R]`` is its type in annotations, with the parameters and the result of the
    function.
    """

    __name__: str  # unless the function has none, as an nn.Module
    func: Any
    _has_function = True  # the function can be traced for more calls

    def __init__(
        self,
        func: Callable[_Params, _Result],
        descriptors: Sequence[Mapping[str, object]],
        max_specializations: int,
        closure: Closure,
        auto_widen: bool = True,
        backend: Any = "python",
    ) -> None:
        functools.update_wrapper(self, func, updated=())
        self.func = func
        # The repr of a module has a line for each submodule.
        self.name = type(func).__name__ if isinstance(func, torch.nn.Module) else name_of(func)
        signature = signature_of(func)
        self._given = tuple(compile_descriptors(d, signature, name=self.name) for d in descriptors)
        contracts = in_order(self._given, f"specialize({self.name})")
        compiler = resolve(backend)
        named = backend if isinstance(backend, str) else name_of(backend)
        self.target = Target(func, self.name, signature, contracts, closure, compiler, named)
        self.cache = Cache(max_specializations, auto_widen)
        self._backend = backend

    def _inlined(self, *args: Any, **kwargs: Any) -> Any:
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

    @instead_in_dynamo(_inlined)
    @outside_dynamo
    @is_boundary
    def __call__(self, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        if config.debug_nans_set and not is_watching():
            watched: _Result = watched_for_nans(self, args, kwargs)
            return watched
        try:
            entries = self.cache.entries
            in_levels = bool(tls.state.levels)
            for entry in entries:
                if in_levels:
                    values = surely(entry.enter, args, kwargs)
                else:
                    values = entry.enter(args, kwargs)
                if values is not None:
                    entry.hits += 1
                    if entry is not entries[0]:
                        self.cache.use(entry)
                    try:
                        out: _Result = entry.build(entry.run(values))
                        return out
                    except NeedsInlining:
                        out = self._traced_again(args, kwargs)
                        return out
                    except RuntimeError as error:
                        raise_user_assertion(self.func, args, kwargs, entry.program, error)
                        raise
            out = self._first_call(args, kwargs)
            return out
        except UnboundAxisError as error:
            if not is_bound(error.axis_name):
                fold(error, self._label)
                raise
        except Exception as error:
            try:
                if isinstance(error, NanError):
                    self._find_nan(args, kwargs)
            except NanError as better:
                fold(better, self._label)
                raise better from None
            fold(error, self._label)
            raise
        # Programs are made outside of all transforms, so the vmap that binds the name is not
        # active.
        out = self.func(*args, **kwargs)
        return out

    def _find_nan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the function without its program: NOTE [watching for NaNs].

        Raises:
            NanError: the operator that makes the NaN, and the example.
        """
        if self._has_function and not tls.state.levels:
            with contextlib.suppress(DataDependentError):  # only a trace can serve the function
                self.func(*args, **kwargs)

    def _label(self) -> str:
        return f"specialize({spelled(self.func)})"

    def _traced_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function itself, because a trace could not record what its program does."""
        return self.func(*args, **kwargs)

    def _first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check the contract, trace the function, and keep the program."""
        flat, tree = pytrees.flatten((args, kwargs))
        call = FirstCall(self.target, (args, kwargs), flat, tree)
        if tracing_here():
            return self.func(*args, **kwargs)
        with self.cache.lock:
            found = self.cache.find(args, kwargs)
            if found is None:
                self.cache.misses += 1
                program, reached = call.program(self.cache)
        if found is not None:  # another thread has made it in the meantime
            return self(*args, **kwargs)
        if call.warning is not None:
            warn(call.warning, RetraceWarning)
        try:
            return program([*flat, *reached])
        except RuntimeError as error:
            raise_user_assertion(self.func, args, kwargs, program, error)
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
        contracts = self._given or tuple(
            compile_descriptors(each, target.signature, name=self.name)
            for each in self._by_parameter(descriptors)
        )
        if not contracts:
            raise DescriptorError(
                f"specialize({self.name}): lower() needs descriptors: what the arguments are, by "
                f"parameter name."
            )
        programs = tuple(self._lowered(contract) for contract in contracts)
        return programs[0] if len(programs) == 1 else programs

    def _by_parameter(self, descriptors: Sequence[object]) -> Sequence[Mapping[str, object]]:
        """Return each program's descriptors by name; positional ones are one program's."""
        by_name = [each for each in descriptors if isinstance(each, Mapping)]
        if len(by_name) == len(descriptors):
            return by_name
        names = by_position(self.target.signature.parameters)
        if len(descriptors) > len(names):
            raise DescriptorError(
                f"specialize({self.name}): lower() got {len(descriptors)} descriptors by position, "
                f"and the function has {len(names)} such parameter(s): {', '.join(names)}"
            )
        return [dict(zip(names, descriptors, strict=False))]

    def _lowered(self, contract: CompiledDescriptors) -> Program:
        bound = arguments_for(self.name, self.target.signature, contract)
        arguments = bound.args, bound.kwargs
        flat, tree = pytrees.flatten(arguments)
        target = dataclasses.replace(self.target, contracts=(contract,))
        with self.cache.lock:
            return FirstCall(target, arguments, flat, tree).program(self.cache, "lower()")[0]

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
    def guards(self) -> Texts:
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
        """Return the number of cache hits and misses, and the purpose and reason of each program.

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
        from tsfunc.program.files.saving import function_to_save, write

        exact = exact or not self._has_function
        write(Path(path), function_to_save(self.target, self.cache, programs, exact))

    def __reduce__(self) -> Any:
        """Return the file form, which has the programs but not the function.

        Without programs it is the name, if the function is imported by it, else the function.
        """
        if not self.cache.entries:
            if self._is_named():
                return getattr(self, "__qualname__")  # noqa: B009 - it has the function's
            described = [contract.descriptors for contract in self._given]
            options = self.cache.limit, self.target.closure, self.cache.auto_widen, self._backend
            return type(self), (self.func, described, *options)
        from tsfunc.program.files.saving import function_to_save, pickled
        from tsfunc.transforms.files import unpickle

        exact = not self._has_function
        return unpickle, pickled(function_to_save(self.target, self.cache, (), exact))

    def _is_named(self) -> bool:
        """Return True if an import of the function's module and name gives this object."""
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for name in getattr(self, "__qualname__", "<none>").split("."):
            found = getattr(found, name, None)
        return found is self

    def __copy__(self) -> Specialized[_Params, _Result]:
        return self._with(self.func)

    def __deepcopy__(self, memo: dict[int, Any]) -> Specialized[_Params, _Result]:
        return self._with(copy.deepcopy(self.func, memo))

    def _with(self, func: Callable[_Params, _Result]) -> Specialized[_Params, _Result]:
        """Return a copy for a function or a copy of it; a new function has no programs yet."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.func, made.target = func, dataclasses.replace(self.target, func=func)
        made.cache = Cache(self.cache.limit, self.cache.auto_widen)
        if func is self.func:
            made.cache.entries = self.cache.entries
        return made

    @overload
    def __get__(self, instance: None, owner: Any) -> Specialized[_Params, _Result]: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> Callable[..., _Result]: ...
    def __get__(self, instance: object, owner: Any) -> Any:
        called: Any = self
        return self if instance is None else functools.partial(called, instance)

    def __repr__(self) -> str:
        return f"<specialized {self.name}, {len(self.programs)} programs>"


Descriptors = Mapping[str, object] | Sequence[Mapping[str, object]]


@overload
def specialize(
    func: torch.nn.Module,
    descriptors: Descriptors | None = None,
    *,
    max_specializations: int = 64,
    closure: Closure = "guard",
    auto_widen: bool = True,
    backend: Any = "python",
) -> Specialized[..., Any]: ...
@overload
def specialize(
    func: Callable[_Params, _Result],
    descriptors: Descriptors | None = None,
    *,
    max_specializations: int = 64,
    closure: Closure = "guard",
    auto_widen: bool = True,
    backend: Any = "python",
) -> Specialized[_Params, _Result]: ...
@overload
def specialize(
    func: classmethod[_Owner, _Params, _Result],
    descriptors: Descriptors | None = None,
    *,
    max_specializations: int = 64,
    closure: Closure = "guard",
    auto_widen: bool = True,
    backend: Any = "python",
) -> classmethod[_Owner, _Params, _Result]: ...
@overload
def specialize(
    func: property,
    descriptors: Descriptors | None = None,
    *,
    max_specializations: int = 64,
    closure: Closure = "guard",
    auto_widen: bool = True,
    backend: Any = "python",
) -> property: ...
@overload
def specialize(
    func: Descriptors | None = None,
    descriptors: Descriptors | None = None,
    *,
    max_specializations: int = 64,
    closure: Closure = "guard",
    auto_widen: bool = True,
    backend: Any = "python",
) -> Callable[[Callable[_Params, _Result]], Specialized[_Params, _Result]]: ...
@boundary("specialize", traceable=True)
def specialize(
    func: Callable[..., Any] | classmethod[Any, ..., Any] | property | Descriptors | None = None,
    descriptors: Descriptors | None = None,
    *,
    max_specializations: int = 64,
    closure: Closure = "guard",
    auto_widen: bool = True,
    backend: Any = "python",
) -> Any:
    """Make a function run as programs, each traced once for calls that look alike.

    Args:
        func: takes and returns pytrees; a function or an ``nn.Module``; or a ``classmethod``,
            ``staticmethod`` or ``property`` of a class. Without it, or with the descriptors in its
            place, ``specialize`` is a decorator.
        descriptors: a dict from parameter names to descriptors, which are the contract that every
            call must keep: a :class:`MetaTensorType` for a tensor (a name for a size makes it
            symbolic: one program for all sizes), a type or typing object, any other Python value
            (which the argument must equal), or a container of these. A list of such dicts gives
            several contracts; a call uses the narrowest contract that it keeps. Properties that
            the descriptors leave open are taken from the call, and other values need another
            program.
        max_specializations: the most programs that are kept; the least recently used one is
            removed.
        auto_widen: if True, a size becomes a named dim by itself when a call differs from two
            programs in that size only, and numbers become inputs, so that one program serves all
            such calls. A value that varies and for which this is impossible gives a
            ``RetraceWarning``.
        backend: the form in which programs run: ``"python"``, generated source; ``"inductor"``, or
            another name of torch.compile's (``torch.compiler.list_backends()``, ``"cudagraphs"``);
            or a function that takes a ``torch.fx.GraphModule`` and example inputs and returns a
            callable. Inside of transforms and traces a program always runs as Python.
        closure: the treatment of values that the function reads and that are not arguments:
            variables, defaults, its own objects. ``"guard"``: every call checks that they are
            unchanged, and reads the data of tensors anew. ``"freeze"``: the values become
            constants.
            ``"error"``: reading them is an error.

    Returns:
        A callable of the same arguments, with ``program``, ``programs``, ``cache_info()`` and
        ``cache_clear()``. It can be used inside of other transforms, and transforms inside of it.

    Raises:
        DescriptorError: a descriptor is malformed, or its name is not a parameter; or a call keeps
            two contracts of which neither is narrower.
        DescriptorViolation: a call breaks the contract.
        ConstraintViolation: the function's control flow depends on the size of a named dim.
        DataDependentError: the function uses a tensor as a Python number or bool.
        ClosureError: the function reads a value that is not an argument, with ``closure="error"``.
        ValueError: ``closure``, ``backend`` or ``max_specializations`` has an invalid value.
        TypeError: ``func`` is not callable, or ``auto_widen`` is not a bool.
        ExportError: a program has a part that the backend cannot represent.

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

    The descriptors follow the TorchScript Input Descriptor proposal; compare
    ``torch.export`` and ``jax.jit``.
    """
    if func is None or isinstance(func, Mapping) or _is_list_of_mappings(func):
        if func is not None and descriptors is not None:
            raise DescriptorError(
                "specialize: got descriptors twice; write specialize(func, descriptors)."
            )
        given: Any = func if func is not None else descriptors
        return lambda f: specialize(
            f,
            given,
            max_specializations=max_specializations,
            closure=closure,
            auto_widen=auto_widen,
            backend=backend,
        )
    if closure not in get_args(Closure):
        raise ValueError(f"specialize: closure= takes one of {get_args(Closure)}, got {closure!r}.")
    if type(max_specializations) is not int or max_specializations < 1:
        raise ValueError(
            f"specialize: max_specializations= takes how many programs are kept, an int of 1 or "
            f"more, got {max_specializations!r}."
        )
    if type(auto_widen) is not bool:
        raise TypeError(f"specialize: auto_widen= takes True or False, got {auto_widen!r}.")
    if isinstance(func, staticmethod | classmethod | property):
        of_function = functools.partial(
            specialize, descriptors=descriptors, max_specializations=max_specializations,
            closure=closure, auto_widen=auto_widen, backend=backend,
        )  # fmt: skip
        return _of_class(func, of_function)
    if not callable(func):
        raise TypeError(
            f"specialize: expected a function and descriptors for its parameters, got "
            f"{type(func).__name__}."
        )
    if descriptors is None:
        every: Sequence[Mapping[str, object]] = ()
    elif isinstance(descriptors, Mapping):
        every = (descriptors,)
    elif descriptors and _is_list_of_mappings(descriptors):
        every = tuple(descriptors)
    else:
        raise DescriptorError(
            f"specialize: expected a dict of parameter name to descriptor, or a list of such "
            f"dicts, got {descriptors!r} of type {type(descriptors).__name__}."
        )
    return Specialized(func, every, max_specializations, closure, auto_widen, backend)


def _of_class(found: Any, of_function: Callable[[Any], Any]) -> Any:
    """Return the same kind of class member around the specialized function."""
    if isinstance(found, property):
        reads = None if found.fget is None else of_function(found.fget)
        return property(reads, found.fset, found.fdel, found.__doc__)
    return type(found)(of_function(found.__func__))


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)
