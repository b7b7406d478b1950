"""The recorder receives calls of any key, from any thread."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from tsfunc.dispatch import (
    DispatchKey,
    Level,
    Operator,
    exclude,
    include,
    redispatch,
    register,
    register_fallback,
)
from tsfunc.dispatch.recorder import KernelUse, Recorder
from tsfunc.dispatch.recording import note, record_calls, run_as
from tsfunc.dispatch.state import outside_all_levels, tls
from tsfunc.user_code import Location, called_by_user, user_location, warn

HERE = Location(__file__, 1, "f")

Watched = DispatchKey.define("Watched")


@register_fallback(Watched)
def watched_column(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return redispatch(op, *args, **kwargs)


double = Operator("tests::recorded_double", native=lambda x: 2 * x)
triple = Operator("tests::recorded_triple", native=lambda x: 3 * x)


@register(triple, Watched)
def triple_cell(x: Any) -> Any:
    note("by parts", "double and add", "here:1")
    with tls.state.running.at_own_level():  # type: ignore[union-attr]
        return double(x) + x


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder(lambda: (HERE, False))
    with record_calls(recorder):
        yield recorder
    assert tls.state.plain


def test_each_call_of_a_level_is_recorded(recorder: Recorder) -> None:
    x = torch.ones(2)
    with Level(Watched, "outer", modal=True), Level(Watched, "inner", modal=True):
        for _ in range(3):
            assert torch.equal(double(x), 2 * x)
    site = f"{__file__}:{watched_column.__code__.co_firstlineno}"
    outer, inner = recorder.uses  # in the order in which they ended
    column = "watched_column"
    name = "tests::recorded_double"
    assert outer == KernelUse(name, HERE, False, "Watched", "outer", 1, "column", column, site)
    assert inner == KernelUse(name, HERE, False, "Watched", "inner", 2, "column", column, site)
    assert [count.times for count in recorder.uses.values()] == [3, 3]
    assert recorder.uses[inner].first < recorder.uses[outer].first
    assert recorder.uses[inner].seconds >= recorder.uses[outer].seconds > 0
    assert recorder.started == 6


def test_a_kernel_reports_itself_and_contains_its_parts(recorder: Recorder) -> None:
    with Level(Watched, "level", modal=True):
        triple(torch.ones(2))
    by_name = {use.operator: use for use in recorder.uses}
    use = by_name["tests::recorded_triple"]
    assert (use.how, use.rule, use.source) == ("by parts", "double and add", "here:1")
    assert by_name["tests::recorded_double"].within == "tests::recorded_triple"


def test_calls_of_no_level_are_not_recorded(recorder: Recorder) -> None:
    double(torch.ones(2))
    with include(Watched):
        double(torch.ones(2))
    assert not recorder.uses


def test_a_rule_that_is_in_no_table(recorder: Recorder) -> None:
    level = Level(Watched, "level")
    assert run_as("name", level, lambda a, b: a + b, 1, 2) == 3
    (use,) = recorder.uses
    assert use.operator == "name"
    assert use.how == "rule"
    assert use.source.startswith(__file__)
    assert run_as("name", level, max, 1, 2) == 2  # C code has no line


def test_a_call_is_reported_only_outside_of_other_calls(recorder: Recorder) -> None:
    def nested() -> None:
        recorder.run(KernelUse("inner", HERE, False, "", "", 0), lambda: None)

    recorder.run(KernelUse("outer", HERE, False, "", "", 0), nested, alone=True)
    recorder.run(KernelUse("alone", HERE, False, "", "", 0), lambda: None, alone=True)
    assert [use.operator for use in recorder.uses] == ["inner", "alone"]


def test_a_call_that_fails_is_recorded_and_nothing_is_left_behind(recorder: Recorder) -> None:
    def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        recorder.run(KernelUse("outer", HERE, False, "", "", 1), fails)
    assert recorder._within(1) == ""
    assert len(recorder.uses) == 1


def test_threads_record_the_levels_of_a_recorded_thread(recorder: Recorder) -> None:
    with Level(Watched, "level", modal=True) as level:
        thread = threading.Thread(target=lambda: double.run_at(level, (torch.ones(2),), {}))
        thread.start()
        thread.join()
    assert [use.transform for use in recorder.uses] == ["level"]


def test_states_made_from_a_recording_one_record_too(recorder: Recorder) -> None:
    with include(Watched), exclude(DispatchKey.Trace), outside_all_levels():
        assert tls.state.recorder is recorder
        assert not tls.state.plain


def test_a_state_is_plain_where_nothing_is_included_excluded_or_recorded() -> None:
    assert tls.state.plain
    with include(Watched):
        assert not tls.state.plain
    with exclude(Watched):
        assert not tls.state.plain
    note("nobody listens")
    assert run_as("name", Level(Watched, "level"), max, 1, 2) == 2


def test_the_users_line_is_outside_of_this_package_and_torch() -> None:
    place = user_location()
    assert place.file == __file__
    assert place.function == "test_the_users_line_is_outside_of_this_package_and_torch"
    assert str(place) == f"{__file__}:{place.line}, in {place.function}"
    assert called_by_user()


def through(*modules: str) -> bool:
    """Return ``called_by_user`` in the last of these modules, which call each other in order."""
    call = called_by_user
    for name in reversed(modules):
        scope = {"__name__": name, "call": call}
        exec("def passes_on():\n    return call()", scope)
        call = scope["passes_on"]  # type: ignore[assignment]
    return call()


@pytest.mark.parametrize(
    ("modules", "users"),
    [
        (("torch.nn",), True),
        (("torch.nn", "torch"), True),
        (("mine", "torch"), True),
        (("tsfunc.ops", "mine"), True),
        (("tsfunc.ops",), False),
        (("tsfunc.ops", "torch"), False),
        (("mine", "tsfunc", "torch.nn", "torch._ops"), False),
    ],
)
def test_a_call_is_the_users_if_the_first_module_beside_torch_is(
    modules: tuple[str, ...], users: bool
) -> None:
    # The reading function is in one of these modules, or calls for one as this package does.
    assert through(*modules, "tsfunc.dispatch") == users


def test_a_warning_stands_at_the_users_line() -> None:
    with pytest.warns(UserWarning, match="mine") as seen:
        warn("mine", UserWarning)
    assert seen[0].filename == __file__
    assert seen[0].lineno == inspect.currentframe().f_lineno - 2  # type: ignore[union-attr]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            warn("once a line", UserWarning)
    assert len(caught) == 1


def test_exchanges_are_counted_by_axis_and_collective() -> None:
    recorder = Recorder(lambda: (HERE, False))
    for axis, collective, size in (("i", "psum", 8), ("i", "psum", 4), ("j", "psum", 2)):
        recorder.record_collective(axis, collective, size)
    recorder.record_collective("i", "all_gather", 1)
    assert recorder.exchanges == {
        ("i", "psum"): (2, 12), ("j", "psum"): (1, 2), ("i", "all_gather"): (1, 1),
    }  # fmt: skip
