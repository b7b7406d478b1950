"""Finds the first operator that returns a NaN: ``tsfunc.debug.nans``.

NOTE [watching for NaNs]
Two watchers see every operator. A recorder in the thread's state (``dispatch/recorder``) sees the
calls on tracers, whose results say which example a NaN belongs to. The recorder checks the
outermost of nested calls, which is the operator that the user called; a NaN inside of a rule that
does not reach the rule's result is ignored. A dispatch mode sees the calls on plain tensors: those
of programs and of torch's own backward passes. The mode checks only if no call on tracers is
running.

A program consists of calls on plain tensors, which do not say where the examples are. If one makes
a NaN, the function is called again without its program (``transforms/specialize``).
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tsfunc import hooks
from tsfunc.bridge.control.axis_collectives import axis_index
from tsfunc.bridge.tracers.batch_tracer import BatchLevel
from tsfunc.bridge.tracers.interrupts import undoing
from tsfunc.bridge.tracers.operators import PLAIN_TENSORS
from tsfunc.bridge.tracers.tracer_stack import unwrap_all
from tsfunc.bridge.tracers.user_queries import UserLines
from tsfunc.dispatch.recorder import KernelUse, Recorder
from tsfunc.dispatch.recording import record_calls
from tsfunc.errors import NanError
from tsfunc.ops.dims import function_name
from tsfunc.user_code import GENERATED, LOCATIONS, Location, is_user_frame, source_line

# They return memory that is not written yet, or the memory of an argument.
_UNWRITTEN = (
    "empty", "new_empty", "resize", "set_", "detach", "lift_fresh", "alias", "view_as_real",
)  # fmt: skip


class _Active(threading.local):
    watching = False


_active = _Active()


@contextlib.contextmanager
def watch_nans() -> Iterator[None]:
    """Raise a NanError at the first operator that makes a NaN: NOTE [watching for NaNs]."""
    if _active.watching:
        yield
        return
    lines = UserLines()
    recorder = _NanRecorder(lines.here)
    with undoing(_stop_watching):
        _active.watching = True
        with record_calls(recorder), _NanMode(recorder, lines):
            yield


def _stop_watching() -> None:
    _active.watching = False


def is_watching() -> bool:
    """True if the running thread looks for NaNs."""
    return _active.watching


@hooks.call_watched_for_nans.add
def call_watched(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function and look for NaNs."""
    with watch_nans():
        return func(*args, **kwargs)


class _NanRecorder(Recorder):
    """Looks at the results of calls on tracers."""

    def run(self, use: KernelUse, call: Callable[[], Any], *, alone: bool = False) -> Any:
        outermost = not self.running
        out = super().run(use, call, alone=alone)
        if outermost and _is_written(use.operator):
            _check_for_nans(use.operator, out, use.location, use.backward)
        return out


class _NanMode(TorchDispatchMode):
    """Looks at the results of calls on plain tensors."""

    def __init__(self, recorder: Recorder, lines: UserLines) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder, self.lines = recorder, lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (
            not self.recorder.running
            and _is_written(func.name())
            and _tensors_of_tree((args, kwargs))
        ):
            location, backward = self.lines.here()
            _check_for_nans(func.name(), out, _program_location() or location, backward)
        return out


def _is_written(operator: str) -> bool:
    return not operator.partition("::")[2].startswith(_UNWRITTEN)


def _tensors_of_tree(tree: Any) -> list[torch.Tensor]:
    leaves = optree.tree_leaves(tree, none_is_leaf=True)
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _program_location() -> Location | None:
    """Return the user's line of the statement of a program that is running; None outside of one."""
    frame = inspect.currentframe()
    while frame is not None and not is_user_frame(frame):
        if frame.f_code.co_filename.startswith(GENERATED):
            location = frame.f_globals.get(LOCATIONS, {}).get(frame.f_lineno)
            if location is not None:
                return (
                    location if isinstance(location, Location) else Location(str(location), 0, "")
                )
        frame = frame.f_back
    return None


def _check_for_nans(operator: str, out: Any, location: Location, backward: bool) -> None:
    """Raise an error if a result has a NaN."""
    for result in _tensors_of_tree(out):
        value, stack = unwrap_all(result)
        nan = _nan_mask(value)
        if nan is None:
            continue
        nan, levels = stack.batch_dims_first(nan), stack.batch_levels
        at = nan.nonzero()[0].tolist()
        examples = []
        for i, level in enumerate(levels):
            with torch.no_grad():
                number, _ = unwrap_all(axis_index(level, None))
            examples.append(int(number.reshape(-1)[at[i]]) + level.original.first)
        text = _message(operator, location, backward, levels, examples, at[len(levels) :], nan)
        raise NanError(text, operator, tuple(examples))


def _nan_mask(value: Any) -> torch.Tensor | None:
    """Return where a plain tensor has NaNs; None if it has none, or can't be read."""
    plain = type(value) in PLAIN_TENSORS
    if not plain or isinstance(value, FakeTensor) or value.device.type == "meta":
        return None
    if value.layout != torch.strided or not (value.is_floating_point() or value.is_complex()):
        return None
    with torch.no_grad():
        mask = value.detach().isnan()
        return mask if mask.any() else None


def _message(
    operator: str, location: Location, backward: bool, levels: Sequence[BatchLevel],
    examples: Sequence[int], at: Sequence[int], nan: torch.Tensor,
) -> str:  # fmt: skip
    line = f"{location}{source_line(location, ': ')}" if location.line else location.file
    within = "the backward pass of " if backward else ""
    where = "".join(
        f" in example {example} of {level.name}"
        for example, level in zip(examples, levels, strict=True)
    )
    element = f" at {tuple(at)}" if at else ""
    return (
        f"{function_name(operator)} returned a NaN{where}{element}, at {within}{line}\n"
        f"{int(nan.sum())} of the {nan.numel()} elements of the result are NaN."
    )
