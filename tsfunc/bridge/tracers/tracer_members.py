"""The members of torch's tensors that compiled handlers put on the class of tracers.

NOTE [methods of tracers] in ``compiled/methods.h`` has the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import GetSetDescriptorType, MethodDescriptorType, MethodWrapperType
from typing import Any, Final

import torch

from tsfunc.bridge import compiled
from tsfunc.bridge.tracers.batch_tracer import BatchTracer
from tsfunc.bridge.tracers.function_registry import METHODS
from tsfunc.bridge.tracers.tracer import Tracer, metadata

_T: Any = torch.Tensor
_TRANSPOSES: Final = ("T", "mT")
# The tensor in whose place the running code sees the tracer may have other ones.
_OF_AUTOGRAD: Final = frozenset({
    "_base", "_version", "grad_fn", "is_inference", "is_leaf", "name", "output_nr", "retains_grad",
    "volatile",
})  # fmt: skip

Member = tuple[str, Any, Any]


def install() -> None:
    """Let the classes of batched tensors have the members, if the compiled handlers are built.

    All members of tracers that are written in Python must be there before.
    """
    handlers = compiled.load()
    if handlers is None:
        return
    members, operators = tuple(_members()), _python_operators()
    for kind in BatchTracer.layouts:
        handlers.install_members(kind, members, operators)


def _members() -> Iterator[Member]:
    """Yield the names, torch's members, and the functions by which plans know them.

    The function is None for a member that reads the metadata of the tracer itself.
    """
    metadata_names = [name for name in dir(_T) if _reads_metadata(getattr(_T, name))]
    for name in metadata_names:
        if name not in _OF_AUTOGRAD:
            yield name, getattr(_T, name), None
    for name in _TRANSPOSES:
        yield name, getattr(_T, name), _T.transpose
    yield "unflatten", _T.unflatten, torch.unflatten
    for name in dir(_T):
        member = getattr(_T, name)
        is_own = getattr(Tracer, name) is not member
        is_method = isinstance(member, MethodDescriptorType) and not name.startswith("_")
        if is_method and not is_own and name not in metadata_names:
            yield name, member, member


def _reads_metadata(member: Any) -> bool:
    """True if the function handler reads a member from the tracer itself."""
    if isinstance(member, GetSetDescriptorType):
        member = member.__get__
    is_member = isinstance(member, MethodDescriptorType | MethodWrapperType)
    return is_member and METHODS.get(member) is metadata


def _python_operators() -> tuple[tuple[Any, Any, Any, Any], ...]:
    """Return the members that Python's operators call, in the order of ``compiled/methods.h``.

    Each has the function by which plans know it and torch's member, with a tracer on the left and
    with one on the right.
    """

    def in_front(function: Any, member: Any) -> tuple[Any, Any, Any, Any]:
        return function, member, None, None

    return (
        (_T.add, _T.__add__, _T.add, _T.__radd__),
        (_T.sub, _T.__sub__, _T.__rsub__, _T.__rsub__),
        (_T.mul, _T.__mul__, _T.mul, _T.__rmul__),
        (_T.div, _T.__truediv__, _T.__rtruediv__, _T.__rtruediv__),
        (_T.matmul, _T.__matmul__, _T.__rmatmul__, _T.__rmatmul__),
        (_T.__pow__, _T.__pow__, _T.__rpow__, _T.__rpow__),
        in_front(_T.lt, _T.__lt__),
        in_front(_T.le, _T.__le__),
        in_front(_T.eq, _T.__eq__),
        in_front(_T.ne, _T.__ne__),
        in_front(_T.gt, _T.__gt__),
        in_front(_T.ge, _T.__ge__),
        in_front(_T.neg, _T.__neg__),
        in_front(_T.__getitem__, _T.__getitem__),
        in_front(_T.__setitem__, _T.__setitem__),
    )
