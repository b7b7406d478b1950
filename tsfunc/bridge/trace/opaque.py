"""Values of type ``Any`` in a trace: they may only be passed on and returned.

A program has no check for a value that its descriptor describes as ``Any``. The traced function
gets an opaque value in its place, and every use of it raises an error that names the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from tsfunc import pytrees
from tsfunc.errors import TypeCheckError
from tsfunc.user_code import user_location


class OpaqueValue:
    """The opaque value in place of a value of type ``Any`` while a function is traced.

    Args:
        text: an expression for the value: ``x``, ``params['w']``.
        parameter: the parameter whose descriptor describes the value.
    """

    __slots__ = ("_parameter", "_text", "_value")

    @property
    def __class__(self) -> type[Any]:
        """Raise; ``isinstance`` reads the class of objects that are not direct instances."""
        _refuse(self, "its class is read")

    @__class__.setter
    def __class__(self, cls: type[Any]) -> None:
        _refuse(self, "its class is assigned")

    def __init__(self, value: Any, text: str, parameter: str) -> None:
        object.__setattr__(self, "_value", value)
        object.__setattr__(self, "_text", text)
        object.__setattr__(self, "_parameter", parameter)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytrees.leaves_of((tuple(args), dict(kwargs or {})))
        value = next(leaf for leaf in leaves if type(leaf) is OpaqueValue)
        _refuse(value, f"{getattr(func, '__name__', func)}(...)")

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(self, f".{name}")

    def __repr__(self) -> str:
        return f"<{_of(self, '_text')}, of type Any>"

    def __hash__(self) -> int:
        _refuse(self, "hash(...)")


def _of(value: OpaqueValue, name: str) -> Any:
    return object.__getattribute__(value, name)


def _refuse(value: OpaqueValue, use: str) -> NoReturn:
    text = _of(value, "_text")
    raise TypeCheckError(
        f"{text} is of type Any, of which nothing is known, so that nothing can be computed with "
        f"it: {use} at {user_location()}. Its descriptor says so: describe "
        f"{_of(value, '_parameter')!r} with a concrete type."
    )


def _refuse_attribute(name: str) -> Callable[..., NoReturn]:
    def method(self: OpaqueValue, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self, name)

    method.__name__ = name
    return method


pytrees.add_leaf(OpaqueValue)

# Python looks up operators in the class, without __getattr__.
_BINARY = "add sub mul truediv floordiv mod divmod pow matmul lshift rshift and or xor"
_OTHERS = (
    "eq ne lt le gt ge neg pos abs invert bool int float complex index round trunc floor ceil len "
    "iter next reversed contains getitem setitem delitem call enter exit setattr delattr"
)
for _name in (
    *(f"__{prefix}{word}__" for word in _BINARY.split() for prefix in ("", "r", "i")),
    *(f"__{word}__" for word in _OTHERS.split()),
):
    setattr(OpaqueValue, _name, _refuse_attribute(_name))


def without_opaque_values(tree: Any) -> Any:
    """Replace the opaque values in a pytree by their values."""
    return pytrees.tree_map(lambda x: _of(x, "_value") if type(x) is OpaqueValue else x, tree)
