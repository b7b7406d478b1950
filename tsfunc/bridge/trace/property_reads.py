"""Reads of tensor properties by a traced function: NOTE [tensor guards].

A property of an argument is read from the traced call and guarded. A property of a computed value
is either known or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch

from tsfunc.bridge.trace.tensor_guards import (
    TensorGuards,
    forwards_query,
    guards_for_user_query,
    without_handlers,
)

_T = torch.Tensor
PropertyReader = Callable[[TensorGuards, Any], Any]


def _is_recorded(value: Any) -> bool:
    """True if the traced function itself records autograd on a tracer (``requires_grad_()``)."""
    return bool(without_handlers(_GETS["requires_grad"], value))


def _is_leaf(guards: TensorGuards, value: Any) -> bool:
    if _is_recorded(value):
        return bool(without_handlers(_GETS["is_leaf"], value))
    argument = guards.argument(value)
    guards.of_grad = True
    if not value.tracks:
        return True
    if argument is None or not argument.sample.requires_grad:  # computed, or written in place
        return False
    return bool(guards.guard(argument, "{}.is_leaf"))


def _grad_fn(guards: TensorGuards, value: Any) -> Any:
    if _is_recorded(value):
        return without_handlers(_GETS["grad_fn"], value)
    argument = guards.argument(value)
    guards.of_grad = True
    if value.tracks and not (
        argument is not None
        and argument.sample.requires_grad
        and guards.guard(argument, "{}.grad_fn is None")
    ):
        guards.refuse(
            "grad_fn is read",
            "the values of a program get their autograd nodes only when it runs",
            "Read x.requires_grad or x.is_leaf instead.",
        )
    return None


def _output_nr(guards: TensorGuards, value: Any) -> int:
    argument = guards.argument(value)
    if argument is not None:
        return int(guards.guard(argument, "{}.output_nr"))
    node = _grad_fn(guards, value)
    return 0 if node is None else int(without_handlers(_GETS["output_nr"], value))


def _version(guards: TensorGuards, value: Any) -> NoReturn:
    refuse_version(guards)


def refuse_version(guards: TensorGuards) -> NoReturn:
    """Raise for a read of a tensor's ``_version``."""
    guards.refuse(
        "_version is read",
        "it counts the writes into a tensor, and its value differs from call to call",
        "Read it before the call, and pass the number as an argument.",
    )


def _is_view(guards: TensorGuards, value: Any) -> bool:
    argument = guards.argument(value)
    if argument is None:
        guards.refuse(
            "_is_view() of a computed value is called",
            "a program may share the memory of its values, or not",
            "Use x.clone() for memory of its own.",
        )
    return bool(guards.guard(argument, "{}._is_view()"))


def _base(guards: TensorGuards, value: Any) -> None:
    if _is_view(guards, value):
        guards.refuse(
            "_base is read",
            "the argument is a view of a tensor that is not an argument",
            "Pass the base as an argument, and take the view inside of the function.",
        )


def _hooks(guards: TensorGuards, value: Any) -> None:
    argument = guards.argument(value)
    if argument is not None and not guards.guard(argument, "{}._backward_hooks is None"):
        guards.refuse(
            "hooks are read",
            "a program does not call hooks",
            "Remove the hooks, or read them before the call and pass the results.",
        )


def _argument_property(name: str, fact: str) -> PropertyReader:
    """Return a reader: a guarded fact for arguments, the tracer's own value for others."""
    member = getattr(_T, name)
    func = member if callable(member) else member.__get__

    def read(guards: TensorGuards, value: Any) -> Any:
        argument = guards.argument(value)
        return without_handlers(func, value) if argument is None else guards.guard(argument, fact)

    return read


def _lazy_bit(name: str) -> PropertyReader:
    """Answer for lazy conjugation or negation, which views take from arguments."""

    def read(guards: TensorGuards, value: Any) -> Any:
        guards.guard_all(f"{{}}.{name}()")
        return getattr(value.value, name)()

    return read


def _grad(guards: TensorGuards, value: Any) -> Any:
    """Read the ``.grad`` of an argument: NOTE [backward passes in programs]."""
    argument, passes = guards.argument(value), value.dispatch_level.backward_passes
    if argument is None or passes is None:
        return without_handlers(_GRAD, value)
    return passes.get(argument.sample)


def _set_grad(guards: TensorGuards, value: Any) -> Any:
    argument = guards.argument(value)
    if argument is None:
        return NotImplemented
    if value.dispatch_level.bodies:
        guards.refuse(
            f"{argument.name}.grad is assigned",
            "it is assigned in the body of a branch or a loop, which has only results",
            "Return the gradient from the body, and assign it after the branch or loop.",
        )
    _grad(guards, value)  # the program assigns it if it differs from that before
    return NotImplemented


def _is_set_to(guards: TensorGuards, value: Any) -> NoReturn:
    guards.refuse(
        "is_set_to() is called", "the tensors of another call may not share one memory",
        "Compare the tensors before the call, and pass the result.",
    )  # fmt: skip


_GETS: Final[Mapping[str, Any]] = {
    name: member.__get__ for name, member in vars(_T.__base__).items() if hasattr(member, "__get__")
}
_GRAD: Final = _GETS["grad"]
VERSION: Final = _GETS["_version"]
PROPERTY_READERS: Final[Mapping[Any, PropertyReader]] = {
    _GETS["is_leaf"]: _is_leaf,
    _GETS["grad_fn"]: _grad_fn,
    _GETS["output_nr"]: _output_nr,
    _GETS["_version"]: _version,
    _GETS["_base"]: _base,
    _GETS["_backward_hooks"]: _hooks,
    _GETS["retains_grad"]: _argument_property("retains_grad", "{}.retains_grad"),
    _GRAD: _grad,
    vars(_T.__base__)["grad"].__set__: _set_grad,
    vars(_T.__base__)["grad"].__delete__: _set_grad,
    _T._is_view: _is_view,
    _T.is_inference: _argument_property("is_inference", "{}.is_inference()"),
    torch.is_inference: _argument_property("is_inference", "{}.is_inference()"),
    _T.is_conj: _lazy_bit("is_conj"),
    torch.is_conj: _lazy_bit("is_conj"),
    _T.is_neg: _lazy_bit("is_neg"),
    torch.is_neg: _lazy_bit("is_neg"),
    _T.is_set_to: _is_set_to,
}


@forwards_query
def read_guarded_property(read: PropertyReader, args: Sequence[Any]) -> Any:
    """Return a property of a traced tensor, guarded for an argument; else NotImplemented."""
    guards = guards_for_user_query(args[0])
    return NotImplemented if guards is None else read(guards, args[0])
