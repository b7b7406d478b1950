"""The thread-local sets, the global set, and the levels that capture them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dispatch.helpers import Plain, Value, line_of, on_another_thread, unique
from tsfunc import dispatch, hooks
from tsfunc.dispatch import DispatchKey, DispatchKeySet, Level, Operator, state
from tsfunc.errors import DispatchError

A = DispatchKey.define(unique("StateA"), above=DispatchKey.BackendSelect)
B = DispatchKey.define(unique("StateB"), above=A)
C = DispatchKey.define(unique("StateC"), above=B)

Guard = Callable[..., AbstractContextManager[None]]
guards = pytest.mark.parametrize(
    ("guard", "read"),
    [(dispatch.include, dispatch.included), (dispatch.exclude, dispatch.excluded)],
    ids=["include", "exclude"],
)
Read = Callable[[], DispatchKeySet]


@pytest.fixture(autouse=True)
def no_leak() -> Iterator[None]:
    """Check that no test leaves state behind, for this thread or for all."""
    before = state.tls.state, dispatch.global_keys()
    yield
    assert (state.tls.state, dispatch.global_keys()) == before


def recorder(key: DispatchKey) -> tuple[Operator, list[str]]:
    """Return an operator whose kernel for a key notes that it ran, and redispatches outwards."""
    ran: list[str] = []
    op = Operator(unique("state::recorder"), native=lambda *args: ran.append("native"))

    @dispatch.register(op, key)
    def kernel(*args: object) -> None:
        ran.append(key.name)
        dispatch.redispatch(op, *args)

    return op, ran


# Include and exclude


@guards
def test_guards_nest(guard: Guard, read: Read) -> None:
    assert A not in read()
    with guard(A):
        with guard(B, C):
            assert all(key in read() for key in (A, B, C))
        assert A in read()
        assert (0, B) not in read()
    assert A not in read()


@guards
def test_the_previous_set_comes_back_after_an_exception(guard: Guard, read: Read) -> None:
    with guard(A):
        before = read()
        with pytest.raises(ZeroDivisionError), guard(B):
            raise ZeroDivisionError
        assert read() == before


@guards
def test_a_guard_takes_effect_where_it_is_entered(guard: Guard, read: Read) -> None:
    first, second = guard(A), guard(B)
    assert A not in read()
    with first, second:
        assert A in read()
        assert B in read()


@guards
def test_guards_take_sets_with_levels(guard: Guard, read: Read) -> None:
    with guard(DispatchKeySet.at(2, A)):
        assert (2, A) in read()
        assert (0, A) not in read()


@guards
def test_guards_are_of_one_thread(guard: Guard, read: Read) -> None:
    with guard(A):
        assert on_another_thread(lambda: A not in read())

        def inside() -> bool:
            with guard(B):
                entered.set()
                go_on.wait()
                return A not in read() and B in read()

        entered, go_on = threading.Event(), threading.Event()
        results: list[bool] = []
        thread = threading.Thread(target=lambda: results.append(inside()))
        thread.start()
        entered.wait()
        as_seen_by_current_level = (0, B) in read()
        go_on.set()
        thread.join()
        assert results == [True]
        assert not as_seen_by_current_level


@given(st.lists(st.tuples(st.booleans(), st.sets(st.sampled_from((A, B, C)))), max_size=5))
def test_any_nesting_adds_up_and_is_undone(steps: list[tuple[bool, set[DispatchKey]]]) -> None:
    before = state.tls.state

    def nest(rest: list[tuple[bool, set[DispatchKey]]], inc: frozenset[DispatchKey],
             exc: frozenset[DispatchKey]) -> None:  # fmt: skip
        assert dispatch.included() == DispatchKeySet(inc)
        assert {key for key in (A, B, C) if key in dispatch.excluded()} == exc
        if not rest:
            raise ZeroDivisionError
        (including, keys), *rest = rest
        here = state.tls.state
        with pytest.raises(ZeroDivisionError):
            if including:
                with dispatch.include(*keys):
                    nest(rest, inc | keys, exc)
            else:
                with dispatch.exclude(*keys):
                    nest(rest, inc, exc | keys)
        assert state.tls.state is here
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        nest(steps, frozenset(), frozenset())
    assert state.tls.state is before


def test_an_included_key_is_in_every_call() -> None:
    op, ran = recorder(A)
    with dispatch.include(A):
        op(Plain())
    op(Plain())
    assert ran == [A.name, "native", "native"]


def test_excluding_beats_including() -> None:
    op, ran = recorder(A)
    with dispatch.exclude(A), dispatch.include(A):
        op(Plain())
    with dispatch.include(A), dispatch.exclude(A):
        op(Plain())
    assert ran == ["native", "native"]


def test_a_key_excluded_stays_so_at_levels_entered_later() -> None:
    op, ran = recorder(A)
    with dispatch.exclude(A), Level(A, modal=True) as level:
        op(Value(level), Plain())
        with Level(A, modal=True):
            op(Plain())
    assert ran == ["native", "native"]


def test_a_set_excluded_holds_at_levels_entered_later() -> None:
    op, ran = recorder(A)
    with dispatch.exclude(DispatchKeySet.at(2, A)), Level(A) as outer, Level(A) as inner:
        op(Value(outer), Value(inner), Plain())
    assert ran == [A.name, "native"]


def test_a_key_excluded_on_a_thread_is_so_at_levels_of_others() -> None:
    op, ran = recorder(A)
    with Level(A) as level:

        def call() -> None:
            with dispatch.exclude(A):
                op(Value(level), Plain())

        on_another_thread(call)
    assert ran == ["native"]


# The global set


def test_the_global_set_is_of_all_threads() -> None:
    op, ran = recorder(A)
    assert dispatch.global_keys() == DispatchKeySet(DispatchKey.BackendSelect)
    dispatch.include_globally(A)
    try:
        on_another_thread(lambda: op(Plain()))
        assert on_another_thread(dispatch.global_keys) == A | DispatchKey.BackendSelect
        op(Plain())
    finally:
        dispatch.exclude_globally(A)
    op(Plain())
    assert ran == [A.name, "native"] * 2 + ["native"]


# Levels


def test_levels_stack_up() -> None:
    assert dispatch.current_levels() == ()
    with Level(A) as outer:
        with Level(B) as inner:
            assert dispatch.current_levels() == (outer, inner)
            assert (outer.depth, inner.depth) == (1, 2)
            assert DispatchKeySet.from_bits(inner.key_bit) == DispatchKeySet.at(2, B)
        assert dispatch.current_levels() == (outer,)
        assert outer.alive
        assert not inner.alive
    assert not outer.alive


def test_a_level_ends_also_by_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), Level(A) as level:
        raise ZeroDivisionError
    assert not level.alive
    assert dispatch.current_levels() == ()


def test_a_level_has_a_name_and_the_line_that_made_it() -> None:
    level = Level(A, "the transform")  # made
    assert level.name == "the transform"
    assert Level(A).name == A.name
    here = test_a_level_has_a_name_and_the_line_that_made_it
    assert line_of("made", here).replace("\\", "") == level.site


def test_a_level_is_entered_once() -> None:
    with (level := Level(A)):
        pass
    with pytest.raises(DispatchError, match=r"entered before, and serves for one block only"):
        level.__enter__()


def test_a_level_is_entered_where_it_was_made() -> None:
    level = Level(A)
    with (
        dispatch.include(B),
        pytest.raises(DispatchError, match=r"under another dispatch state than .* `with Level\("),
    ):
        level.__enter__()


def test_a_modal_level_is_in_every_call_of_its_block() -> None:
    op, ran = recorder(A)
    with Level(A, modal=True) as level:
        assert dispatch.included() == DispatchKeySet.at(1, A)
        assert (level.depth, A) in dispatch.included()
        op(Plain())
    op(Plain())
    assert ran == [A.name, "native", "native"]


def test_kernels_run_under_the_state_that_their_level_captured() -> None:
    op = Operator(unique("state::seen"))
    seen: list[DispatchKeySet] = []

    @dispatch.register(op, A)
    def kernel(value: Value) -> None:
        assert dispatch.running_level() is value.dispatch_level
        assert dispatch.current_levels() == value.dispatch_level.outer.levels
        seen.append(dispatch.included())

    with dispatch.include(C), Level(A) as level:
        with dispatch.include(B), Level(B):
            op(Value(level))
            assert dispatch.running_level() is None
        on_another_thread(lambda: op(Value(level)))
    assert seen == [DispatchKeySet(C)] * 2


def test_a_kernel_excludes_its_own_bit_and_all_inner_ones() -> None:
    op = Operator(unique("state::excluded"))
    seen: list[list[bool]] = []

    @dispatch.register(op, B)
    def kernel(value: Value) -> None:
        excluded = dispatch.excluded()
        seen.append([pair in excluded for pair in ((2, A), (1, C), (1, B), (1, A), (0, B))])

    with Level(B) as level, Level(A):
        op(Value(level))
    assert seen == [[True, True, True, False, False]]


def test_a_level_inside_a_kernel_starts_afresh() -> None:
    op, ran = recorder(A)
    outer = Operator(unique("state::outer"))

    @dispatch.register(outer, C)
    def kernel(*args: object) -> None:
        with Level(A) as level:
            assert level.depth == 1  # the level of the kernel is masked, and not counted
            op(Value(level), Plain())

    with Level(C) as level:
        outer(Value(level))
    assert ran == [A.name, "native"]


def test_at_own_level_is_as_inside_of_the_transform() -> None:
    op, ran = recorder(A)
    outer = Operator(unique("state::parts"))

    @dispatch.register(outer, B)
    def kernel(value: Value) -> None:
        with value.dispatch_level.at_own_level():
            assert dispatch.current_levels() == (value.dispatch_level,)
            op(value, Plain())

    with Level(B) as level:
        dispatch.register(op, B, dispatch.fallthrough)
        outer(Value(level))
    assert ran == ["native"]


# States of kernels


def test_a_kernels_state_differs_in_its_keys_alone() -> None:
    op = Operator(unique("state::kept"))
    attributes = [name for name in state.State.__slots__ if not name.startswith("_")]
    with Level(A) as level:
        recorder: Any = object()
        remap_args: Any = object()
        full = state.State(
            1 << 3, 0b111000, (level,), level, 1 << 4, recorder, remap_args, op, 3, 7
        )
    for of_kernel in (full.kernel_state(4), full.backend_state(op, 4)):
        changed = {name for name in attributes if getattr(of_kernel, name) != getattr(full, name)}
        assert changed - {"backend_operator"} == {"mask", "running", "backend_keys"}
        assert of_kernel.running is None
    assert full.kernel_state(4).backend_operator is None
    assert full.backend_state(op, 4).backend_operator is op


def test_a_kernel_without_levels_enters_levels_below_the_hidden_ones() -> None:
    op = Operator(unique("state::hidden"))
    depths: list[int] = []

    @dispatch.register(op, A)
    def kernel() -> None:
        with Level(B) as level:
            depths.append(level.depth)

    with Level(C) as outer, state.outside_all_levels(), dispatch.include(A):
        op()
    assert depths == [outer.depth + 1]


# State of torch


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A variable that levels capture, like autocast's settings."""
    current = ["at first"]

    def capture() -> Callable[[], AbstractContextManager[None]]:
        value = current[0]

        @contextmanager
        def restore() -> Iterator[None]:
            previous, current[0] = current[0], value
            try:
                yield
            finally:
                current[0] = previous

        return restore

    monkeypatch.setattr(hooks.capture_state, "functions", [])
    dispatch.on_capture(capture)
    return current


def test_state_registered_with_on_capture_is_restored_in_kernels(captured: list[str]) -> None:
    op = Operator(unique("state::captured"))
    seen: list[str] = []
    dispatch.register(op, A, lambda value: seen.append(captured[0]))
    with Level(A) as level:
        captured[0] = "later"
        op(Value(level))
        on_another_thread(lambda: op(Value(level)))
        assert captured[0] == "later"
        with level.restored():
            assert captured[0] == "at first"
            assert dispatch.current_levels() == ()
        with pytest.raises(ZeroDivisionError), level.restored():
            raise ZeroDivisionError
        assert captured[0] == "later"
    assert seen == ["at first"] * 2


def test_a_restorer_that_fails_leaves_the_others_undone(captured: list[str]) -> None:
    def failing() -> Callable[[], AbstractContextManager[None]]:
        @contextmanager
        def restore() -> Iterator[None]:
            raise ZeroDivisionError
            yield

        return restore

    dispatch.on_capture(failing)
    with Level(A) as level:
        captured[0] = "later"
        with pytest.raises(ZeroDivisionError), level.guard():
            raise AssertionError("the block runs although its state could not be restored")
        assert captured[0] == "later"


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 20])
def test_a_thread_starts_inside_of_the_levels_of_others_up_to_a_limit(count: int) -> None:
    """Its first level is deeper than theirs, unless they are 16 deep: then it is the outermost."""

    def depth() -> int:
        with Level(A) as level:
            return level.depth

    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(Level(B))
        assert depth() == count + 1
        assert on_another_thread(depth) == (count + 1 if count < 16 else 1)
