"""Types as straight-line Python: fast checks of values, of calls, and of descriptors.

Most values fit their types, and arguments are checked at every call. Generated code therefore
runs first, and returns at the first mismatch; ``checker.py`` then finds all mismatches.
The code can reject a value that fits, but never accepts one that does not fit.
"""

from __future__ import annotations

import abc
import functools
import inspect
import keyword
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from tsfunc.types.dims import Dim, DimForm
from tsfunc.types.meta import MetaTensorType, on_device
from tsfunc.types.scope import Scope
from tsfunc.types.sizes import DimExpr
from tsfunc.types.values import names_of_class, same_keys, same_value

Fits = Callable[..., bool]


class Generated(Protocol):
    """A type, as far as generated code needs it."""

    def emit(self, at: str, source: CheckCode, indent: str, /) -> None:
        """Add lines that return False if the variable ``at`` does not have the type."""


class Described(Generated, Protocol):
    """A descriptor, as far as generated code needs it."""

    @property
    def dims(self) -> list[DimForm]:
        """All sizes in the descriptor."""


def generate_type_check(type_: Generated, decide: Callable[[Any], Fits]) -> Fits:
    """Return a function of a value that returns True only if the value has the type.

    Args:
        decide: returns such a function for a type that generated code does not decide: a class
            with fields, an interface, a future.
    """
    source = _TypeSource(decide, ("value",))
    type_.emit("value", source, "    ")
    return source.function("fits", "value")


def generate_call(
    name: str,
    signature: inspect.Signature,
    types: Mapping[str, Generated],
    decide: Callable[[Any], Fits],
) -> Fits:
    """Return a function of the parameters that returns True only if each argument has its type.

    Args:
        name: the function's name in Python's errors about too many or too few arguments.
        types: parameter name to type; sizes of one name are equal within all of them.
    """
    source = _TypeSource(decide, signature.parameters)
    absent = source.name(_ABSENT)
    for parameter in signature.parameters.values():
        at, type_ = parameter.name, types[parameter.name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            source.loop(item := source.variable(), at, ((item, type_),), "    ")
        elif parameter.kind is parameter.VAR_KEYWORD:
            source.loop(item := source.variable(), f"{at}.values()", ((item, type_),), "    ")
        elif parameter.default is parameter.empty:
            type_.emit(at, source, "    ")
        else:
            source.lines.append(f"    if {at} is not {absent}:")
            type_.emit(at, source, "        ")
            source.lines.append("        pass")
    bare = [
        parameter.replace(
            annotation=parameter.empty,
            default=parameter.empty if parameter.default is parameter.empty else _Name(absent),
        )
        for parameter in signature.parameters.values()
    ]
    return source.function(name, str(inspect.Signature(bare))[1:-1])


_ABSENT = object()


def never(*args: object, **kwargs: object) -> bool:
    """Return False: the check of a type whose values generated code can't decide."""
    return False


class _Name(str):
    """A name whose repr is the name itself, for use in a signature."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _is_on(expected: torch.device, got: torch.device) -> bool:
    return on_device(got, expected)


@functools.lru_cache(maxsize=1024)
def _names_of(cls: type) -> tuple[str, ...] | None:
    return names_of_class(cls)


def refused_sizes(dim: Dim, at: str) -> Iterator[str]:
    """Yield Python conditions under which a dim does not allow a size."""
    if dim.one_of is not None:
        yield f"{at} not in {dim.one_of!r}"
        return
    if dim.min is not None:
        yield f"{at} < {dim.min}"
    if dim.max is not None:
        yield f"{at} > {dim.max}"
    if dim.multiple_of is not None:
        yield f"{at} % {dim.multiple_of}"


class CheckCode(abc.ABC):
    """The lines of a function, the objects they refer to, and a variable for each named size.

    Args:
        taken: names that are in use already.
    """

    def __init__(self, taken: Iterable[str]) -> None:
        self.lines: list[str] = []
        self.scope = Scope(taken=taken)
        self.sizes: dict[str, str] = {}
        self.seen: list[str] = []
        self.loops = 0

    def variable(self) -> str:
        """Return a new variable."""
        return self.scope.unused("value")

    def name(self, value: object) -> str:
        """Return a name for an object: builtins too, as a parameter can be called ``type``."""
        return "None" if value is None else self.scope.name(value)

    def no_instance(self, at: str, cls: type) -> str:
        return f"not {self.name(isinstance)}({at}, {self.name(cls)})"

    def function(self, name: str, parameters: str, result: str = "True") -> Fits:
        """Compile the lines to a function, which returns ``result`` (an expression) on success."""
        name = name if name.isidentifier() and not keyword.iskeyword(name) else "call"
        start = [f"    {variable} = -1" for variable in self.sizes.values()]
        start += [f"    {variable} = None" for variable in self.seen]
        text = "\n".join(
            [f"def {name}({parameters}):", *start, *self.lines, f"    return {result}"]
        )
        scope = dict(self.scope.objects)
        exec(compile(text, "<tsfunc type check>", "exec"), scope)
        return scope[name]

    def refuse(self, condition: str, indent: str) -> None:
        self.lines.append(f"{indent}if {condition}: return False")

    @abc.abstractmethod
    def undecided(self, at: str, type_: Generated, indent: str, cls: type | None = None) -> None:
        """Add the lines of a type that generated code does not decide.

        ``cls`` is the class of the values, if it alone decides in the descriptor of a call.
        """

    def field_names(self, at: str) -> str:
        """Return code for the names of a named tuple's elements."""
        return f"{self.name(_names_of)}({self.name(type)}({at}))"

    def elements(self, at: str, kind: type, element: Generated, indent: str) -> None:
        """Add lines for a list or tuple whose elements have one type."""
        self.refuse(self.no_instance(at, kind), indent)
        item = self.variable()
        self.loop(item, at, ((item, element),), indent)

    def literal(self, at: str, value: object, indent: str) -> None:
        if value is None or isinstance(value, bool):
            self.refuse(f"{at} is not {value}", indent)
        else:
            expected, same = self.name(value), self.name(same_value)
            self.refuse(f"{at} is not {expected} and not {same}({expected}, {at})", indent)

    def entries(
        self, at: str, entries: tuple[Any, ...], children: tuple[Generated, ...], indent: str
    ) -> None:
        """Add lines for a dict whose length is checked: it must have exactly these entries."""
        names = [repr(x) if type(x) is str else self.name(x) for x in entries]
        if all(type(entry) is str for entry in entries):
            missing = " or ".join(f"{name} not in {at}" for name in names)
            if missing:
                self.refuse(missing, indent)
        else:  # 1, 1.0 and True are the same key in Python
            self.refuse(f"not {self.name(same_keys)}({self.name(entries)}, {at})", indent)
        for name, child in zip(names, children, strict=True):
            part = self.variable()
            self.lines.append(f"{indent}{part} = {at}[{name}]")
            child.emit(part, self, indent)

    def loop(
        self, target: str, over: str, items: Iterable[tuple[str, Generated]], indent: str
    ) -> None:
        before = len(self.lines)
        self.loops += 1
        self.lines.append(f"{indent}for {target} in {over}:")
        for item, type_ in items:
            type_.emit(item, self, indent + "    ")
        self.loops -= 1
        if len(self.lines) == before + 1:  # all items fit, so the loop is removed
            self.lines.pop()

    def unpack(self, at: str, elements: Sequence[Generated], indent: str) -> None:
        items = [self.variable() for _ in elements]
        if items:
            self.lines.append(f"{indent}{', '.join(items)}, = {at}")
        for item, type_ in zip(items, elements, strict=True):
            type_.emit(item, self, indent)

    def tensor(self, at: str, meta: MetaTensorType, indent: str) -> None:
        if meta.dtype is not None:
            self.refuse(f"{at}.dtype is not {self.name(meta.dtype)}", indent)
        dims = meta.dims if meta.dims is not None else meta.trailing
        if meta.dims is not None and all(isinstance(dim, int) for dim in dims):
            self.refuse(f"{at}.shape != {dims}", indent)
        elif meta.shape is not None:
            shape, unlike = self.variable(), "<" if meta.dims is None else "!="
            self.lines.append(f"{indent}{shape} = {at}.shape")
            # In a loop, a shape equal to the previous tensor's fits again, as its names are bound.
            if self.loops:
                self.seen.append(seen := self.variable())
                self.lines.append(f"{indent}if {shape} != {seen}:")
                indent, outer = f"{indent}    ", indent
                self.lines.append(f"{indent}{seen} = {shape}")
            self.refuse(f"{self.name(len)}({shape}) {unlike} {len(dims)}", indent)
            for axis, dim in enumerate(dims, start=0 if meta.dims is not None else -len(dims)):
                self.size(f"{shape}[{axis}]", dim, indent)
            indent = outer if self.loops else indent
        if meta.device is not None:
            near = self.name(functools.partial(_is_on, meta.device))
            self.refuse(
                f"{at}.device != {self.name(meta.device)} and not {near}({at}.device)", indent
            )
        if meta.requires_grad is not None:
            self.refuse(f"{at}.requires_grad is not {meta.requires_grad}", indent)
        if meta.layout is not None:
            self.refuse(f"{at}.layout is not {self.name(meta.layout)}", indent)
        if meta.strides is not None or meta.memory_format is not None:
            self.refuse(f"not {self.name(meta.is_laid_out)}({at})", indent)

    def size(self, at: str, dim: DimForm, indent: str) -> None:
        if isinstance(dim, int):
            self.refuse(f"{at} != {dim}", indent)
        elif isinstance(dim, Dim):
            variable = self.sizes.get(dim.name) or self.sizes.setdefault(dim.name, self.variable())
            for refused in refused_sizes(dim, at):
                self.refuse(refused, indent)
            self.lines.append(f"{indent}if {variable} == -1: {variable} = {at}")
            self.lines.append(f"{indent}elif {variable} != {at}: return False")


class _TypeSource(CheckCode):
    """Code for types.

    ``decide`` returns a function for a type that generated code does not decide.
    """

    def __init__(self, decide: Callable[[Any], Fits], taken: Iterable[str]) -> None:
        super().__init__(taken)
        self.decide = decide

    def undecided(self, at: str, type_: Generated, indent: str, cls: type | None = None) -> None:
        self.refuse(f"not {self.name(self.decide(type_))}({at})", indent)


# --- descriptors of a call

CallCheck = Callable[[Mapping[str, object]], "dict[str, int] | None"]
"""Returns the sizes of named dims for the arguments of a call, or None where it can't tell."""


class _SlowError(Exception):
    """Raised for a descriptor that has no generated code."""


def generate_check(
    descriptors: Mapping[str, Described], signature: inspect.Signature
) -> CallCheck | None:
    """Return a function of a call's arguments that returns the sizes of named dims.

    The function returns None if the generated code does not decide the call.

    Args:
        signature: the function's signature, which has the defaults.

    Returns:
        The function; None if the descriptors have no generated code.
    """
    dims = (dim for descriptor in descriptors.values() for dim in descriptor.dims)
    if any(isinstance(dim, DimExpr) for dim in dims):
        return None  # an expression is computed or solved only when all of its names are known
    lines = _CallSource(("arguments",))
    try:
        for name, descriptor in descriptors.items():
            lines.argument(name, signature.parameters[name], descriptor)
    except _SlowError:
        return None
    return lines.finish()


class _CallSource(CheckCode):
    """Code for the descriptors of a call, which returns False or the named sizes."""

    def argument(self, name: str, parameter: inspect.Parameter, descriptor: Generated) -> None:
        default = parameter.default
        if parameter.kind is parameter.VAR_POSITIONAL:
            default = ()
        elif parameter.kind is parameter.VAR_KEYWORD:
            default = {}
        at = self.variable()
        if default is parameter.empty:
            self.refuse(f"{name!r} not in arguments", "    ")
            self.lines.append(f"    {at} = arguments[{name!r}]")
        else:
            self.lines.append(f"    {at} = arguments.get({name!r}, {self.name(default)})")
        descriptor.emit(at, self, "    ")

    def finish(self) -> CallCheck:
        pairs = ", ".join(f"{name!r}: {variable}" for name, variable in self.sizes.items())
        fits = self.function("fits", "arguments", f"{{{pairs}}}")

        def check(arguments: Mapping[str, object]) -> dict[str, int] | None:
            sizes: Any = fits(arguments)
            if sizes is False:
                return None
            if -1 in sizes.values():  # the value that would bind the size is absent
                return {name: size for name, size in sizes.items() if size != -1}
            return dict(sizes)

        return check if self.sizes else lambda arguments: None if fits(arguments) is False else {}

    def undecided(self, at: str, type_: Generated, indent: str, cls: type | None = None) -> None:
        if cls is None:
            raise _SlowError
        self.refuse(self.no_instance(at, cls), indent)
