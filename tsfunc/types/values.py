"""Python values as literals, and classes by name: equality, and their text.

Types are printed and parsed, so their classes need names. The name of a class is its module and
qualified name; torch's own classes have their public names. A class that its name does not find
(because it was made inside of a function, or another class has replaced it) is remembered under
that name as long as it lives. If two classes have one name, the second name gets a number:
``module.f.<locals>.Model#2``.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import itertools
import math
import re
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import optree
import torch

from tsfunc import pytrees
from tsfunc.errors import AnnotationError, DescriptorError
from tsfunc.types.dims import Dim

_LONGEST_REPR = 80


def same_value(expected: object, got: object) -> bool:
    """True if a program with the constant ``expected`` is right for ``got``.

    The comparison is stricter than ``==``. The types must agree too (``1``, ``1.0`` and ``True``
    give different dtypes), ``0.0`` differs from ``-0.0``, and NaN equals NaN. Tensors are equal if
    they are the same object, or if neither requires grad and all of their attributes and elements
    agree. Values that can't be compared are equal only if they are the same object.

    Example:
        >>> same_value(1, 1), same_value(1, True), same_value(float("nan"), float("nan"))
        (True, False, True)
    """
    if expected is got:
        return True
    try:
        if isinstance(expected, torch.Tensor):
            return isinstance(got, torch.Tensor) and _same_tensor(expected, got)
        return type(expected) is type(got) and _same_of_one_type(expected, got)
    except Exception:  # a custom __eq__ can raise any exception; the values then count as different
        return False


def same_float(got: Any, expected: float) -> bool:
    """True if a value is this float: of its class, equal or both NaN, of the same sign."""
    if type(got) is not type(expected):
        return False
    equal = got == expected or (got != got and expected != expected)
    return equal and math.copysign(1, got) == math.copysign(1, expected)


def is_array(value: object) -> bool:
    """True if a value is a NumPy array, which no transform takes as a tensor.

    NumPy is not imported for the test: arrays occur only where a user has imported it.
    """
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def array_advice(value: object) -> str:
    """Return the advice for a NumPy array in place of a tensor, and nothing for other values."""
    return " Convert it: torch.from_numpy(array)." if is_array(value) else ""


def tensor_advice(value: object) -> str:
    """Return the advice for a value in place of a tensor that a transform needs."""
    if isinstance(value, torch.nn.Module):
        return (
            " Pass its parameters, dict(module.named_parameters()), and call it by "
            "functional_call(module, params, (x,))."
        )
    if isinstance(value, Iterator):
        return (
            " An iterator ends with its first use: pass a list or a dict of its tensors, such as "
            "dict(module.named_parameters())."
        )
    if isinstance(value, int | float | complex) and not isinstance(value, bool):
        return " Convert it: torch.tensor(value)."
    return array_advice(value)


def _same_of_one_type(expected: Any, got: Any) -> bool:
    if isinstance(expected, float):
        return same_float(got, expected)
    if isinstance(expected, complex):
        return same_value(expected.real, got.real) and same_value(expected.imag, got.imag)
    if isinstance(expected, list | tuple):
        return len(expected) == len(got) and all(map(same_value, expected, got))
    if isinstance(expected, dict):
        return same_keys(expected, got) and all(
            same_value(value, got[key]) for key, value in expected.items()
        )
    if isinstance(expected, set | frozenset):
        return same_keys(expected, got)
    if hasattr(expected, "__array__"):
        return _same_array(expected, got)
    return bool(expected == got)


def same_keys(expected: Collection[Any], got: Collection[Any]) -> bool:
    """True if two collections of distinct hashable values are equal, and have equal types.

    Example:
        >>> same_keys({1: "a"}, {1: "b"}), same_keys({1}, {True}), same_keys({(1,)}, {(1.0,)})
        (True, False, False)
    """
    keys_by_value = {key: key for key in got}
    return len(expected) == len(got) and all(
        key in keys_by_value and same_value(key, keys_by_value[key]) for key in expected
    )


def _same_array(expected: Any, got: Any) -> bool:
    """Compare two arrays as a whole; NumPy's ``==`` compares each element."""
    same_kind = expected.dtype == got.dtype and expected.shape == got.shape
    return bool(same_kind and expected.tobytes() == got.tobytes())


def _same_tensor(expected: torch.Tensor, got: torch.Tensor) -> bool:
    # No grad: a gradient must reach the argument, not the constant that replaces it.
    return (
        not expected.requires_grad
        and not got.requires_grad
        and expected.dtype == got.dtype
        and expected.device == got.device
        and expected.layout == got.layout
        and expected.shape == got.shape
        and torch.equal(expected, got)
    )


def describe(value: object) -> str:
    """Return a value and its type as error messages show them.

    Example:
        >>> describe(3), describe(torch.zeros(2, 3)), describe(None)
        ('3 (int)', 'f32[2, 3] cpu', 'None')
    """
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return tensor_text(value.dtype, value.shape, value.device)
    text = repr(value)
    if len(text) > _LONGEST_REPR:
        text = f"{text[: _LONGEST_REPR - 3]}..."
    return f"{text} ({type(value).__name__})"


# --- entries of containers, and literals, as text

Path: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Attribute:
    """The entry of a path that leads to an attribute of an object."""

    name: str

    def __str__(self) -> str:
        return self.name


def entry_text(kind: type, entry: object) -> str:
    """Return the access to a child: ``.field`` of a named tuple, else ``['key']`` or ``[0]``."""
    if isinstance(entry, Attribute):
        return f".{entry.name}"
    field = _field(kind, entry)
    return f"[{entry!r}]" if field is None else f".{field}"


def container_children(container: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the entries and children of a pytree node; a dict keeps its own order."""
    if isinstance(container, dict):
        return tuple(container), tuple(container.values())
    pytrees.flatten(container)  # registers classes that are not registered yet
    flat = optree.tree_flatten_one_level(container, none_is_leaf=True, namespace=pytrees.NAMESPACE)
    return tuple(flat.entries), tuple(flat.children)


def path_text(path: Path, roots: Mapping[str, object]) -> str:
    """Return a path in Python's notation: ``params['w'][0]``, ``state.step``."""
    return PathTexts(roots)(path)


class PathTexts:
    """The texts of paths that begin at the same roots, as ``path_text`` returns them.

    Each container is flattened once for all paths, and the last entry of a path is not looked up:
    the texts of all leaves of a tree take time in proportion to their number.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._roots = roots
        # By the id of a container, which is kept alive: the container, and a lookup by entry.
        self._opened: dict[int, tuple[object, Callable[[Any], Any]]] = {}

    def __call__(self, path: Path) -> str:
        """Return the text of a path."""
        text, value = str(path[0]), self._roots.get(path[0])
        for i, entry in enumerate(path[1:], start=1):
            if i > 1:
                value = self._child(value, path[i - 1])
            text += entry_text(type(value), entry)
        return text

    def _child(self, value: object, entry: object) -> object:
        """Return the child, or None, after which a path is shown by its entries only."""
        if isinstance(entry, Attribute):
            return getattr(value, entry.name, None)
        try:
            if id(value) not in self._opened:
                self._opened[id(value)] = value, _lookup(*container_children(value))
            return self._opened[id(value)][1](entry)
        except (LookupError, TypeError, ValueError):  # a leaf, or not one of the entries
            return None


def _lookup(entries: tuple[Any, ...], children: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Return a function from the entries of a container to its children."""
    try:
        return dict(zip(entries, children, strict=True)).__getitem__
    except TypeError:  # a registered class can have entries that can't be hashed
        return lambda entry: children[entries.index(entry)]


def field_text(kind: type, entry: object) -> str:
    """Return the name of a child in the text of a descriptor."""
    return _field(kind, entry) or key_text(entry)


def _field(kind: type, entry: object) -> str | None:
    if isinstance(entry, str) and dataclasses.is_dataclass(kind):
        return entry
    if isinstance(entry, int) and optree.is_namedtuple_class(kind):
        return str(optree.namedtuple_fields(kind)[entry])
    if isinstance(entry, int) and optree.is_structseq_class(kind):
        return str(optree.structseq_fields(kind)[entry])
    return None


def field_names(value: object) -> tuple[str, ...] | None:
    """Return the names of a named tuple's elements; None for any other value."""
    return names_of_class(type(value))


def names_of_class(cls: type) -> tuple[str, ...] | None:
    """Return ``field_names`` of the instances of a class."""
    if optree.is_namedtuple_class(cls):
        return tuple(optree.namedtuple_fields(cls))
    if optree.is_structseq_class(cls):  # torch.return_types
        return tuple(optree.structseq_fields(cls))
    return None


def key_text(key: object) -> str:
    """Return the key of a dict as text.

    A key without a literal is described, and can't be parsed.
    """
    text = literal_text(key)
    return describe(key) if text is None else text.removeprefix("Literal[").removesuffix("]")


def is_plain_value(value: object) -> bool:
    """True for a value without tensors or parts: a number, a string, an enum."""
    return isinstance(value, PLAIN_VALUES)


PLAIN_VALUES = (
    int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format, enum.Enum,
)  # fmt: skip


_LITERALS = (int, bool, float, complex, str, bytes)


def literal_text(value: object) -> str | None:
    """Return a value as text that can be parsed, or None."""
    if value is None:
        return "None"
    if type(value) in _LITERALS or (
        type(value) is tuple and value and all(type(item) in _LITERALS for item in value)
    ):
        return f"Literal[{value!r}]"
    if isinstance(value, enum.Enum) and value.name in type(value).__members__:
        return f"Literal[{class_name(type(value))}.{value.name}]"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return f"Literal[{value}]"
    return None


# --- the names of classes


NAME = re.compile(r"[^\W\d]\w*(?:\.(?:[^\W\d]\w*|<\w+>))*(?:#\d+)?")
"""A dotted name, as `class_name` makes it."""

_PUBLIC: dict[str, type] = {
    "torch.device": torch.device,
    "torch.dtype": torch.dtype,
    "torch.layout": torch.layout,
    "torch.memory_format": torch.memory_format,
    "torch.Size": torch.Size,
    "torch.Generator": torch.Generator,
    "torch.stream": torch.Stream,  # the spelling of the proposal
    "torch.Stream": torch.Stream,
    "torch.Event": torch.Event,
    "torch.cuda.Stream": torch.cuda.Stream,
    "torch.cuda.Event": torch.cuda.Event,
    "torch.nn.Module": torch.nn.Module,
    "torch.nn.ModuleList": torch.nn.ModuleList,
    "torch.nn.ModuleDict": torch.nn.ModuleDict,
    "torch.nn.Parameter": torch.nn.Parameter,
    "torch.nn.Buffer": torch.nn.Buffer,
}
_PUBLIC_NAMES = {cls: name for name, cls in _PUBLIC.items()}

_claims: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_claimed: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def class_name(cls: type) -> str:
    """Return the name by which ``find_object`` finds the class.

    Example:
        >>> class_name(torch.nn.Linear), class_name(complex)
        ('torch.nn.modules.linear.Linear', 'complex')
    """
    if cls in _PUBLIC_NAMES:
        return _PUBLIC_NAMES[cls]
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    name = f"{module}{cls.__qualname__}"
    return name if NAME.fullmatch(name) and _import_by_name(name) is cls else _claim(cls, name)


def _claim(cls: type, name: str) -> str:
    with _lock:
        claim = _claimed.get(cls)
        if claim is None:
            claim = _free(name if NAME.fullmatch(name) else "_." + re.sub(r"\W", "_", name))
            _claims[claim] = cls
            _claimed[cls] = claim
        return claim


def _free(name: str) -> str:
    """Return the name itself, or the name with the first number that is not in use."""
    names = itertools.chain([name], (f"{name}#{i}" for i in itertools.count(2)))
    return next(other for other in names if other not in _claims and _import_by_name(other) is None)


def find_object(name: str, scope: Mapping[str, object]) -> Any:
    """Return the object that a dotted name refers to, or None.

    Args:
        name: a name from ``class_name``, or a name as written in code that sees ``scope``.
        scope: names that take precedence.

    Nothing is imported: a class in a module that is not imported is not found.
    """
    root, *rest = name.split(".")
    if root in scope:
        return _attribute(scope[root], rest)
    value = _PUBLIC.get(name) or _claims.get(name)
    return _import_by_name(name) if value is None else value


def _import_by_name(name: str) -> Any:
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:i]))
        if module is not None:
            return _attribute(module, parts[i:])
    return getattr(builtins, name, None)


def _attribute(value: Any, names: list[str]) -> Any:
    for name in names:
        # vars instead of getattr: a lookup must not run a custom __getattr__.
        value = next((vars(c)[name] for c in _homes(value) if name in vars(c)), None)
    return value


def _homes(value: Any) -> tuple[Any, ...]:
    if isinstance(value, type):
        return value.__mro__
    return (value,) if hasattr(value, "__dict__") else ()


# --- texts of tensors


_SHORT_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex128: "c128",
    torch.complex64: "c64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}

_DTYPES = {short: dtype for dtype, short in _SHORT_DTYPES.items()} | {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in _SHORT_DTYPES
}
_LAYOUTS = {
    str(layout).removeprefix("torch."): layout
    for layout in vars(torch).values()
    if isinstance(layout, torch.layout)
}
_MEMORY_FORMATS = {
    str(memory_format).removeprefix("torch."): memory_format
    for memory_format in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
}
TENSOR_WORD = re.compile(r"strides\[[^\[\]]*\]|[a-z_]\w*(?::\d+)?")
_BOUNDED = re.compile(r"(?:(\d+)\s*<=)?\s*([^\W\d]\w*)\s*(?:([<>])=\s*(\d+))?")
_STEPPED = re.compile(r"([^\W\d]\w*)\s*%\s*(\d+)\s*==\s*0")
_CHOSEN = re.compile(r"([^\W\d]\w*)\s+in\s*\{([\d\s,]*)\}")
TENSOR_KINDS = frozenset({"tensor", *_DTYPES})
"""The names before the brackets of a tensor's text."""

TENSOR_NAMES = ("Tensor", "TensorType", "torch.Tensor", "torch.tensor")
_TENSOR = re.compile(rf"\s*(\w+)\s*\[([^\[\]]*)\]((?:\s*(?:{TENSOR_WORD.pattern}))*)\s*")


def tensor_text(
    dtype: torch.dtype | None,
    dims: Iterable[object] | None,
    device: torch.device | None = None,
    requires_grad: bool | None = None,
    layout: torch.layout | None = None,
) -> str:
    """Return a description of a tensor in one line; None is left out or shown as ``?``."""
    kind = "tensor" if dtype is None else _SHORT_DTYPES.get(dtype, plain_name(dtype))
    shape = "..." if dims is None else ", ".join(map(size_text, dims))
    words = [f"{kind}[{shape}]"]
    if device is not None:
        words.append(str(device))
    if requires_grad is not None:
        words.append("requires_grad" if requires_grad else "no_grad")
    if layout is not None:
        words.append(plain_name(layout))
    return " ".join(words)


def size_text(size: object) -> str:
    if size is None:
        return "?"
    return "..." if size is ... else str(size)


def plain_name(name: object) -> str:
    return str(name).removeprefix("torch.")


# --- parsing


def parse_fields(text: str) -> dict[str, Any]:
    """Return the arguments of ``MetaTensorType`` for the text of a tensor.

    Raises:
        AnnotationError: the text does not describe a tensor.
    """
    match = _TENSOR.fullmatch(text) if isinstance(text, str) else None
    if match is not None and match[1] in TENSOR_KINDS:
        return tensor_fields(match[1], match[2], TENSOR_WORD.findall(match[3]))
    if isinstance(text, str) and text.strip() in TENSOR_NAMES:
        return {}
    raise AnnotationError(f"{text!r} does not describe a tensor; write for example f32[n, 64] cpu")


def tensor_fields(kind: str, dims: str, words: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of ``MetaTensorType`` for the parts of a tensor's text.

    Args:
        dims: the text between the brackets.
        words: the words after the brackets.

    Raises:
        DescriptorError: a dim or a word is malformed.
    """
    fields: dict[str, Any] = {"dtype": _DTYPES.get(kind)}
    if dims.strip() != "...":
        fields["shape"] = [_dim_of_text(dim.strip()) for dim in _split_dims(dims)]
    for word in words:
        _add_word(word, fields)
    return fields


def _split_dims(dims: str) -> list[str]:
    """Split the dims of a shape at commas outside of braces."""
    return re.split(r",(?![^{]*\})", dims) if dims.strip() else []


def _dim_of_text(text: str) -> Any:
    if text in ("?", "..."):
        return None if text == "?" else ...
    if text.isdecimal():
        return int(text)
    said = [_bound_of_word(part.strip()) for part in text.split(" and ")]
    if len(said) == 1 and said[0] is None:
        return text  # a name or an expression, or invalid
    dims = [dim for dim in said if dim is not None]
    if len(dims) < len(said) or len({dim.name for dim in dims}) > 1:
        raise DescriptorError(f"{text!r} does not describe one named size")
    return functools.reduce(Dim.meet, dims)


def _bound_of_word(text: str) -> Dim | None:
    """Parse ``n``, ``2<=n<=8``, ``n % 4 == 0`` or ``n in {2, 4}``; return None for other texts."""
    stepped, chosen = _STEPPED.fullmatch(text), _CHOSEN.fullmatch(text)
    if stepped is not None:
        return Dim(stepped[1], multiple_of=int(stepped[2]))
    if chosen is not None:
        return Dim(chosen[1], one_of=tuple(int(size) for size in _split_dims(chosen[2])))
    bounded = _BOUNDED.fullmatch(text)
    if bounded is None:
        return None
    low, name, sign, limit = bounded.groups()
    least = limit if sign == ">" else low
    most = limit if sign == "<" else None
    return Dim(name, None if least is None else int(least), None if most is None else int(most))


def _add_word(word: str, fields: dict[str, Any]) -> None:
    """Add a word after the dims: requires_grad, strides, a layout, a memory format or a device."""
    key: str
    value: object
    if word in ("requires_grad", "no_grad"):
        key, value = "requires_grad", word == "requires_grad"
    elif word in _LAYOUTS:
        key, value = "layout", _LAYOUTS[word]
    elif word in _MEMORY_FORMATS:
        key, value = "memory_format", _MEMORY_FORMATS[word]
    elif word.startswith("strides["):
        strides = word.removeprefix("strides[").removesuffix("]")
        key, value = "strides", [_dim_of_text(stride.strip()) for stride in _split_dims(strides)]
    else:
        key, value = "device", word
    if key in fields:
        raise DescriptorError(f"{word} is the second {key} of one tensor")
    fields[key] = value
