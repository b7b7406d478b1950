"""The types of values that another thread or process may still be computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tsfunc.types.base import ComposedType, Order, TSType
from tsfunc.types.check_context import CheckContext
from tsfunc.types.values import Attribute, Path, describe
from tsfunc.user_code import folded_class


class LaterType(ComposedType):
    """A type of values that another thread or process may still be computing."""

    by_parts = True
    language_only = True
    element: TSType

    @property
    def parts(self) -> tuple[TSType, ...]:
        return (self.element,)

    @property
    def closed(self) -> bool:
        return False

    def is_above(self, narrower: TSType, order: Order) -> bool:
        return type(narrower) is type(self) and order.pairs_below(narrower.parts, self.parts)


@folded_class
@dataclass(frozen=True)
class TSFuture(LaterType):
    """``Future[X]``: a value that is still being computed."""

    words: ClassVar = ("Future", "torch.futures.Future", "torch.jit.Future")
    spelling: ClassVar = "Future[X]"
    steps: ClassVar = (".value()",)

    element: TSType

    def __str__(self) -> str:
        return f"Future[{self.element}]"

    @classmethod
    def has_origin(cls, origin: type) -> bool:
        return issubclass(origin, torch.futures.Future | torch.jit.Future)

    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        if not isinstance(value, torch.futures.Future):
            return context.fail(path, "", self, describe(value))
        if value.done():
            self.element.check(_outcome(value), (*path, Attribute("value()")), context)


@folded_class
@dataclass(frozen=True)
class TSRRef(LaterType):
    """``RRef[X]``: a value that another process holds."""

    words: ClassVar = ("RRef", "torch.distributed.rpc.RRef")
    spelling: ClassVar = "RRef[X]"
    steps: ClassVar = (".local_value()",)

    element: TSType

    def __str__(self) -> str:
        return f"RRef[{self.element}]"

    @classmethod
    def has_origin(cls, origin: type) -> bool:
        # A torch that is built without RPC lacks the class.
        return any(base.__name__ == "PyRRef" for base in origin.__mro__)

    def check(self, value: Any, path: Path, context: CheckContext) -> None:
        if not TSRRef.has_origin(type(value)):
            return context.fail(path, "", self, describe(value))
        if value.is_owner():
            result = value.local_value()
            self.element.check(result, (*path, Attribute("local_value()")), context)


def _outcome(future: Any) -> object:
    try:
        return future.value()
    except Exception as error:  # the future's function raised an exception of any class
        return error
