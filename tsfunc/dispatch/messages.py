"""Messages of the errors that are raised when a call can't be dispatched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tsfunc.dispatch.keys import DispatchKey, DispatchKeySet, keys_of_arguments, split_bit
from tsfunc.dispatch.state import Level, tls
from tsfunc.user_code import Location, is_installed_file, user_location


def call_summary(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a short form of the call: the operator and the types of its arguments."""
    kinds = [type(arg).__name__ for arg in args]
    kinds += [f"{key}={type(arg).__name__}" for key, arg in kwargs.items()]
    return f"{name}({', '.join(kinds)})"


def escape_message(name: str, level: Level) -> str:
    """Return the message for a value that is used after its level has ended."""
    peer = (
        " (torch.func says: your tensor may have escaped from inside a function being vmapped)"
        if level.key is DispatchKey.Batch
        else ""
    )
    return (
        f"{name}: got a value of {level.name} (called at {level.site}) after that transform "
        f"had ended{peer}. Return the value from the transformed function instead of storing it "
        f"in a variable or object outside of it."
    )


def no_kernel(name: str, bit: int, bits: int) -> str:
    """Return the message for a key without a cell, row or column."""
    level, key = split_bit(bit)
    return (
        f"{name}: no kernel for {key} at level {level}, the highest of "
        f"{DispatchKeySet.from_bits(bits)!r}. Looked for, in this order: the cell "
        f"(register(op, {key})), the row (register_catch_all(op)), the column "
        f"(register_fallback({key})). Register one of them, with `fallthrough` to pass {key} over."
    )


def no_level(name: str, depth: int, bits: int) -> str:
    """Return the message for a level that neither the thread nor the arguments have."""
    return (
        f"{name}: the key set {DispatchKeySet.from_bits(bits)!r} names level {depth}, but only "
        f"{len(tls.state.levels)} levels are active on this thread, and no argument is a value "
        f"of that level."
    )


def no_key_left(name: str, bits: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the message for a key set that is empty or has only keys that fall through."""
    what = (
        f"{call_summary(name, args, kwargs)}: no key is left to dispatch to "
        f"(key set {DispatchKeySet.from_bits(bits)!r})."
    )
    masked = keys_of_arguments(args, kwargs)[0] & ~bits
    if masked:
        return (
            f"{what} The arguments have {DispatchKeySet.from_bits(masked)!r}, which is excluded "
            f"here. Call the operator on the values that they stand for, or outside of the block "
            f"that excludes it."
        )
    return (
        f"{what} An operator without tensor arguments is a factory: give it a BackendSelect "
        f"kernel (register(op, DispatchKey.BackendSelect)) that chooses the backend."
    )


def redispatched_by_backend(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the message for an operator that its own backend kernel redispatches."""
    return (
        f"{call_summary(name, args, kwargs)}: no key is left to dispatch to: redispatch was called "
        f"in the kernel of a backend, which is the last one. Compute the result there, or call "
        f"the operator on other values with op(...)."
    )


# The option of vmap that serves functions whose control flow depends on per-example values.
SPLIT = (
    'vmap(..., data_dependent="split") runs the function for each group of examples whose values '
    "agree"
)


# The methods by which NumPy reads a tensor, and the advice for them.
NUMPY_READS = frozenset({"__array__", "numpy"})
NUMPY_ADVICE = (
    "NumPy can't compute with tensors inside of a transform: use torch's functions, and "
    "torch.from_numpy(array) for an array that the function uses."
)


def read_of_batch(name: str, level: Level, *, in_check: bool = False) -> str:
    """Return the message for a Python value that is read from a batched tensor.

    Args:
        in_check: True if the condition of a check is computed of the value.
    """
    ways = f"{SPLIT}. {_advice(user_location())}"
    if in_check and name == "item" and not is_installed_file(user_location().file):
        ways = (
            f"In a check, leave out .item(): `assert x.sum() > 2` and "
            f"`torch._check(bool(x.sum() > 2))` test every example. {ways}"
        )
    if name in ("__bool__", "is_nonzero"):
        return (
            f"{level.name}, at {user_location()}: It looks like you're attempting to use a Tensor "
            f"in some data-dependent control flow. The value differs from example to example, so "
            f"`if`, `while` and `and` can't go one way for all. {ways}"
        )
    if name in NUMPY_READS:
        ways = f"{NUMPY_ADVICE} {ways}"
    called = ".item()" if name in ("__int__", "__float__", "__index__") else f".{name}()"
    return (
        f"vmap: It looks like you're calling {called} on a Tensor inside of {level.name}, at "
        f"{user_location()}. We don't support vmap over calling {called} on a Tensor: its value "
        f"differs from example to example. {ways}"
    )


def _advice(location: Location) -> str:
    """Return the advice for a line that reads a Python value; a library's can't be rewritten."""
    if is_installed_file(location.file):
        if torch.compiler.is_compiling():  # it is traced
            return (
                "Or give the library arguments with which it reads no values, such as sizes as "
                "numbers, or call it outside of the vmapped function."
            )
        return (
            "Or trace the function, with tsfunc.specialize(vmap(...)): many libraries read no "
            "values while torch.compiler.is_compiling() is True, as it is in a trace."
        )
    return (
        "Or write the choice with torch.where or other tensor operations, or take the value out "
        "of the function."
    )


def read_of_empty_batch(name: str, level: Level) -> str:
    """Return the message for a Python value that is read from an empty batch."""
    return (
        f"{level.name}, at {user_location()}: {name} asks for a value of each example, but the "
        f"batch has size 0, so no value decides which branch the function takes. Return early for "
        f"an empty batch."
    )
