"""torch's forward-mode level, which transforms of all levels and threads share.

NOTE [one dual level]
torch has a single forward-mode level for all threads. The outermost jvp of a thread enters and
exits it. Inner jvps share it; their tangents are separate, because they belong to the tensors of
different levels. Two threads can't share it: tangents of one thread in saved values would outlive
that thread's jvp. A second thread therefore waits for its turn, but only for a limited time,
because the first thread may be waiting for the second inside of its jvp. After that time the second
thread differentiates the pullback instead, which gives the same result unless the function turns
grad mode off.

A reentrant lock is the turn. A thread holds it from the entry of its outermost jvp to the exit, so
its owner and its count are kept in C. A signal handler may raise at any step in between; no other
thread can take the turn before this one has undone its changes: NOTE [interrupts] in
``interrupts``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch.autograd import forward_ad

from tsfunc import hooks
from tsfunc.bridge.grad import missing_tangents
from tsfunc.bridge.tracers.interrupts import outermost
from tsfunc.bridge.tracers.registrations import prepare
from tsfunc.bridge.tracers.tracer import TracerLevel
from tsfunc.dispatch import current_levels

_dual_turn = threading.RLock()
_DUAL_PATIENCE = 10.0  # seconds
# Changed only by the thread that holds the turn:
_dual_users = 0
_dual_level_entered = False
_dual_owner = 0  # 0 if no thread is in a jvp


class DualLevelInUse(RuntimeError):
    """Raised if another thread holds torch's dual level."""


@hooks.leave_dual_level.add
def _leave_dual_level(before: int) -> None:
    """Exit the dual level that jvps of this thread have entered since it was at ``before``."""
    global _dual_users, _dual_owner
    if not _dual_turn.acquire(blocking=False):
        return  # another thread is in a jvp, so this one is in none
    if _dual_owner == threading.get_ident():
        # ``before`` may be the level of another thread, which has exited it since.
        if _dual_level_entered or (before < 0 and forward_ad._current_level >= 0):
            _exit_dual_level()
        _dual_users = 0
        _dual_owner = 0
    with suppress(RuntimeError):  # the turn is released as often as the thread has taken it
        while True:
            _dual_turn.release()


def _exit_dual_level() -> None:
    """Exit torch's dual level, also if an interrupt has cut off its entry or its exit."""
    global _dual_level_entered
    with suppress(RuntimeError):  # torch's level number may say that the level is entered, or not
        torch._C._exit_dual_level(level=0)
    forward_ad._current_level = -1
    _dual_level_entered = False


def can_carry_tangents() -> bool:
    """True if values on this thread can carry tangents.

    The jvp of another thread does not count, since it may exit the dual level at any moment.
    """
    return _outermost_may_carry_tangents() or any(
        isinstance(level, TracerLevel) and level.forward > 0 for level in current_levels()
    )


def may_carry_outer_tangents(level: TracerLevel | None) -> bool:
    """True if tensors of this level may carry tangents of an enclosing jvp."""
    if level is not None:
        return level.forward > 0
    return _outermost_may_carry_tangents()


def _outermost_may_carry_tangents() -> bool:
    """True if tensors outside of all levels may carry tangents, of a jvp or the user's own."""
    return outermost.forward > 0 or (forward_ad._current_level >= 0 and not _dual_level_entered)


_formulas_loaded = False
_formulas_lock = threading.Lock()


def _load_forward_formulas() -> None:
    """Load torch's forward formulas written in Python, which torch loads at the first dual."""
    global _formulas_loaded
    with _formulas_lock:
        if _formulas_loaded:
            return
        with warnings.catch_warnings():
            # torch.jit.script compiles the formulas and is deprecated: a DeprecationWarning up to
            # torch 2.13, a FutureWarning since 2.14.
            warnings.filterwarnings("ignore", message="`torch.jit.")
            forward_ad._maybe_load_decompositions()
        _formulas_loaded = True


@contextmanager
def dual_level(level: TracerLevel | None) -> Iterator[None]:
    """Context manager: the level's tensors can carry tangents.

    Raises:
        DualLevelInUse: another thread does not exit the dual level in time.
    """
    global _dual_users, _dual_level_entered, _dual_owner
    if not _formulas_loaded:
        _load_forward_formulas()
    missing_tangents.watch()
    if not _dual_turn.acquire(timeout=_DUAL_PATIENCE):
        raise DualLevelInUse
    _dual_owner = threading.get_ident()
    if not _dual_users and forward_ad._current_level < 0:
        # Set first: an interrupt may follow as soon as the level is entered.
        _dual_level_entered = True
        forward_ad.enter_dual_level()
    _dual_users += 1
    if level is not None:
        level.forward += 1
        level.autograd += 1
    else:
        prepare()
        outermost.forward += 1
    try:
        # The caller may have switched tangents off, as the forward of an autograd.Function does.
        with forward_ad._set_fwd_grad_enabled(True):
            yield
    finally:
        if level is not None:
            level.forward -= 1
            level.autograd -= 1
        else:
            outermost.forward -= 1
        _dual_users -= 1
        if _dual_users == 0:
            if _dual_level_entered:
                _exit_dual_level()
            _dual_owner = 0
        _dual_turn.release()


@contextmanager
def no_duals(levels: Sequence[TracerLevel], enabled: bool) -> Iterator[None]:
    """Context manager: the block is in no jvp, neither of plain tensors nor of these levels.

    Args:
        enabled: True if operators propagate tangents in the block.
    """
    plain, counts = outermost.forward, [level.forward for level in levels]
    outermost.forward = 0
    for level in levels:
        level.forward = 0
    try:
        with forward_ad._set_fwd_grad_enabled(enabled):
            yield
    finally:
        outermost.forward = plain
        for level, count in zip(levels, counts, strict=True):
            level.forward = count
