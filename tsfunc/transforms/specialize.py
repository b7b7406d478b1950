"""``specialize`` and ``load``: functions that run as programs, traced here or read from a file."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar, get_args, overload

import torch

from tsfunc.bridge.tracers.boundaries import boundary
from tsfunc.bridge.tracers.dynamo import delegate_in_dynamo
from tsfunc.errors import DescriptorError
from tsfunc.program.closure.guard_builder import Closure
from tsfunc.transforms.specialized import LoadedFunction, Specialized, read_loaded
from tsfunc.user_code import folding

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_Owner = TypeVar("_Owner")


DescriptorsOrContracts = Mapping[str, object] | Sequence[Mapping[str, object]]


_NO_FUNCTIONS = (Mapping, Sequence, classmethod, staticmethod, property)


def _specialize_in_dynamo(
    func: Any = None, descriptors: Any = None, *, closure: Closure = "guard", **options: Any
) -> Any:
    """Return the function itself, whose call Dynamo traces; NotImplemented for a contract."""
    contract = func is None or isinstance(func, _NO_FUNCTIONS) or descriptors is not None
    return NotImplemented if contract or closure != "guard" else func


class _Options(TypedDict, total=False):
    """The options of ``specialize``, whose meaning and defaults are in its docstring."""

    max_specializations: int
    closure: Closure
    auto_widen: bool
    backend: Any
    hoist: bool | Collection[str]


@overload
def specialize(
    func: torch.nn.Module,
    descriptors: DescriptorsOrContracts | None = None,
    **options: Unpack[_Options],
) -> Specialized[..., Any]: ...
@overload
def specialize(
    func: Callable[_Params, _Result],
    descriptors: DescriptorsOrContracts | None = None,
    **options: Unpack[_Options],
) -> Specialized[_Params, _Result]: ...
@overload
def specialize(
    func: classmethod[_Owner, _Params, _Result],
    descriptors: DescriptorsOrContracts | None = None,
    **options: Unpack[_Options],
) -> classmethod[_Owner, _Params, _Result]: ...
@overload
def specialize(
    func: property,
    descriptors: DescriptorsOrContracts | None = None,
    **options: Unpack[_Options],
) -> property: ...
@overload
def specialize(
    func: DescriptorsOrContracts | None = None,
    descriptors: DescriptorsOrContracts | None = None,
    **options: Unpack[_Options],
) -> Callable[[Callable[_Params, _Result]], Specialized[_Params, _Result]]: ...
@boundary("specialize", traceable=True)
@delegate_in_dynamo(_specialize_in_dynamo)
def specialize(
    func: Callable[..., Any]
    | classmethod[Any, ..., Any]
    | property
    | DescriptorsOrContracts
    | None = None,
    descriptors: DescriptorsOrContracts | None = None,
    *,
    max_specializations: int = 64,
    closure: Closure = "guard",
    auto_widen: bool = True,
    backend: Any = "python",
    hoist: bool | Collection[str] = False,
) -> Any:
    """Make a function run as programs, each traced once for calls with the same types and sizes.

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
        closure: the treatment of values that the function reads and that are not arguments:
            variables, defaults, its own objects. ``"guard"``: every call checks that they are
            unchanged, and reads the data of tensors again. ``"freeze"``: the values become
            constants. ``"error"``: reading them is an error.
        auto_widen: if True, a size becomes a named dim by itself when a call differs from two
            programs in that size only, and numbers become inputs, so that one program serves all
            such calls. A value that varies and for which this is impossible gives a
            ``RetraceWarning``.
        backend: the form in which programs run: ``"python"``, generated source; ``"inductor"``, or
            another name of torch.compile's (``torch.compiler.list_backends()``, ``"cudagraphs"``);
            or a function that takes a ``torch.fx.GraphModule`` and example inputs and returns a
            callable. Inside of transforms and traces a program always runs as Python.
        hoist: if True, the work that depends only on tensors which the function reads from outside
            (parameters of a module, captured tensors) is done at the first call, and again after a
            write into one of them. The names of parameters of the function add the tensors of
            these arguments. Under grad mode, a tensor that requires grad among them has the work
            done at every call. Writes that torch does not count (through ``x.data``, NumPy) are
            not seen.

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
        ValueError: ``closure``, ``backend``, ``hoist`` or ``max_specializations`` has an invalid
            value.
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
    options: _Options = {
        "max_specializations": max_specializations, "closure": closure, "auto_widen": auto_widen,
        "backend": backend, "hoist": hoist,
    }  # fmt: skip
    if func is None or isinstance(func, Mapping) or _is_list_of_mappings(func):
        if func is not None and descriptors is not None:
            raise DescriptorError(
                "specialize: expected descriptors once, got them twice. Write specialize(func, "
                "descriptors)."
            )
        contract = descriptors if func is None else func
        return functools.partial(specialize, descriptors=contract, **options)
    if closure not in get_args(Closure):
        raise ValueError(
            f"specialize: closure: expected one of {get_args(Closure)}, got {closure!r}."
        )
    if type(max_specializations) is not int or max_specializations < 1:
        raise ValueError(
            f"specialize: max_specializations: expected the number of programs to keep, an int of "
            f"1 or more, got {max_specializations!r}."
        )
    if type(auto_widen) is not bool:
        raise TypeError(f"specialize: auto_widen: expected True or False, got {auto_widen!r}.")
    if isinstance(func, staticmethod | classmethod | property):
        return _of_class(func, functools.partial(specialize, descriptors=descriptors, **options))
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
    return Specialized(func, every, **options)


def _of_class(member: Any, of_function: Callable[[Any], Any]) -> Any:
    """Return the same kind of class member around the specialized function."""
    if isinstance(member, property):
        reads = None if member.fget is None else of_function(member.fget)
        return property(reads, member.fset, member.fdel, member.__doc__)
    return type(member)(of_function(member.__func__))


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)


@folding("load")
def load(
    path: str | os.PathLike[str],
    *,
    classes: Mapping[str, type] | None = None,
    device: torch.device | str | None = None,
) -> LoadedFunction:
    """Load a specialized function from a file.

    No code of the file is run: its programs are graphs of torch operators, found by name, and
    their Python code is generated again.

    Args:
        path: a file that ``save`` of a specialized function, or of a program, has written.
        classes: the classes of named tuples and dataclasses among arguments and results, by their
            names in the file (``module.Class``). Classes of imported modules are found without it;
            loading imports no modules.
        device: the device for all tensors and programs, in place of the devices in the file.

    Returns:
        A callable like the specialized function, with the same programs, descriptors and weights. A
        loaded function serves the calls that its programs were made for, and no others.

    Raises:
        FileFormatError: the file is not a saved function, is damaged or has a later format, or an
            operator or class that it names is missing. The message names the entry of the file.
        OSError: the file can't be read.
        DescriptorViolation: the loaded function is called with arguments that no program serves.

    Example:
        >>> import os, tempfile, torch
        >>> from tsfunc import MetaTensorType, load, specialize
        >>> weight = torch.full((3,), 2.0)
        >>> f = specialize(lambda x: x @ weight, {"x": MetaTensorType(["n", 3])})
        >>> _ = f(torch.ones(5, 3))
        >>> path = os.path.join(tempfile.mkdtemp(), "f.tsf")
        >>> f.save(path)
        >>> load(path)(torch.ones(2, 3))
        tensor([6., 6.])

    Similar to ``torch.export.load``, which uses pickle for Python objects; the format is described
    in ``docs/files.md``.
    """
    target = None if device is None else torch.device(device)
    with Path(path).open("rb") as file:
        return read_loaded(file, str(path), classes or {}, target)
