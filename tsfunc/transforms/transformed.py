"""The types of the functions that transforms return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, overload

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result", covariant=True)
_Cotangent = TypeVar("_Cotangent", contravariant=True)


class Transformed(Generic[_Params, _Result]):
    """A function with the parameters of the function that was transformed, for type checkers.

    At run time it is a plain function. A ``Callable`` in its place would give errors for lambdas:
    mypy takes a ``Callable`` that is made of a lambda for an untyped function, and infers no lambda
    in a context such as ``Callable[..., Tensor]``.
    """

    __name__: str

    def __call__(self, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        raise NotImplementedError

    @overload
    def __get__(self, instance: None, owner: Any) -> Transformed[_Params, _Result]: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> Callable[..., _Result]: ...
    def __get__(self, instance: object, owner: Any) -> Any:
        raise NotImplementedError


class Pullback(Protocol[_Cotangent]):
    """The function that ``vjp`` returns: its cotangents are like the result of the function."""

    def __call__(
        self,
        cotangents: _Cotangent,
        retain_graph: bool = True,
        create_graph: bool | None = None,
    ) -> tuple[Any, ...]: ...


def named_as(
    func: Callable[_Params, Any],
) -> Callable[[Callable[..., Any]], Transformed[_Params, Any]]:
    """Return a decorator that gives a wrapper the name, docstring and parameters of ``func``.

    Partials and modules have no name; their wrappers are unchanged.
    """
    named: Any = functools.wraps(func) if hasattr(func, "__name__") else lambda wrapper: wrapper
    return cast(Callable[[Callable[..., Any]], Transformed[_Params, Any]], named)
