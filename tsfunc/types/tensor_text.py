"""Tensors as text: ``f32[n, 64] cpu no_grad``, as it is printed and as it is parsed."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import torch

from tsfunc.errors import AnnotationError, DescriptorError
from tsfunc.types.dims import Dim

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
    str(each).removeprefix("torch."): each
    for each in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
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
    """Return the arguments of `MetaTensorType` for the text of a tensor.

    Raises:
        AnnotationError: the text does not describe a tensor.
    """
    found = _TENSOR.fullmatch(text) if isinstance(text, str) else None
    if found is not None and found[1] in TENSOR_KINDS:
        return tensor_fields(found[1], found[2], TENSOR_WORD.findall(found[3]))
    if isinstance(text, str) and text.strip() in TENSOR_NAMES:
        return {}
    raise AnnotationError(f"{text!r} does not describe a tensor; write for example f32[n, 64] cpu")


def tensor_fields(kind: str, dims: str, words: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of `MetaTensorType` for the parts of a tensor's text.

    Args:
        kind: the name of the dtype, or ``tensor``.
        dims: the text between the brackets.
        words: the words after the brackets.

    Raises:
        DescriptorError: a dim or a word is malformed.
    """
    known: dict[str, Any] = {"dtype": _DTYPES.get(kind)}
    if dims.strip() != "...":
        known["shape"] = [_dim(dim.strip()) for dim in _split(dims)]
    for word in words:
        _add_word(word, known)
    return known


def _split(dims: str) -> list[str]:
    """Split the dims of a shape at commas outside of braces."""
    return re.split(r",(?![^{]*\})", dims) if dims.strip() else []


def _dim(text: str) -> Any:
    if text in ("?", "..."):
        return None if text == "?" else ...
    if text.isdecimal():
        return int(text)
    said = [_said_of_dim(part.strip()) for part in text.split(" and ")]
    if len(said) == 1 and said[0] is None:
        return text  # a name or an expression, or invalid
    dims = [dim for dim in said if dim is not None]
    if len(dims) < len(said) or len({dim.name for dim in dims}) > 1:
        raise DescriptorError(f"{text!r} does not describe one named size")
    return functools.reduce(Dim.meet, dims)


def _said_of_dim(text: str) -> Dim | None:
    """Parse ``n``, ``2<=n<=8``, ``n % 4 == 0`` or ``n in {2, 4}``; return None for other texts."""
    stepped, chosen = _STEPPED.fullmatch(text), _CHOSEN.fullmatch(text)
    if stepped is not None:
        return Dim(stepped[1], multiple_of=int(stepped[2]))
    if chosen is not None:
        return Dim(chosen[1], one_of=tuple(int(size) for size in _split(chosen[2])))
    bounded = _BOUNDED.fullmatch(text)
    if bounded is None:
        return None
    low, name, sign, limit = bounded.groups()
    least = limit if sign == ">" else low
    most = limit if sign == "<" else None
    return Dim(name, None if least is None else int(least), None if most is None else int(most))


def _add_word(word: str, known: dict[str, Any]) -> None:
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
        key, value = "strides", [_dim(each.strip()) for each in _split(strides)]
    else:
        key, value = "device", word
    if key in known:
        raise DescriptorError(f"{word} is the second {key} of one tensor")
    known[key] = value
