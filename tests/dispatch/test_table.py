"""The table: registrations, and the kernel that a call runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.dispatch.helpers import Plain, Value, line_of, unique
from tsfunc import dispatch, hooks
from tsfunc.dispatch import DispatchKey, DispatchKeySet, Level, Operator, fallthrough
from tsfunc.errors import DispatchError, EscapedTracerError

LOW = DispatchKey.define(unique("TableLow"), above=DispatchKey.BackendSelect)
HIGH = DispatchKey.define(unique("TableHigh"), above=LOW)


def operator(native: Callable[..., Any] | None = None) -> Operator:
    return Operator(unique("table::op"), native=native)


# Precedence


def put(where: str, op: Operator, key: DispatchKey, kernel: Any) -> None:
    """Register a kernel, which returns its argument, for a cell, a row or a column."""
    if where == "cell":
        dispatch.register(op, key, kernel)
    elif where == "row":
        dispatch.register_catch_all(op, kernel)
    elif kernel is fallthrough:
        dispatch.register_fallback(key, kernel)
    else:
        dispatch.register_fallback(key, lambda op, args, kwargs: kernel(*args, **kwargs))


@pytest.mark.parametrize(
    ("filled", "wins"),
    [
        (("cell", "row", "column"), "cell"),
        (("cell", "row"), "cell"),
        (("cell", "column"), "cell"),
        (("row", "column"), "row"),
        (("cell",), "cell"),
        (("row",), "row"),
        (("column",), "column"),
    ],
)
def test_the_cell_comes_before_the_row_before_the_column(
    filled: tuple[str, ...], wins: str
) -> None:
    op, key = operator(), DispatchKey.define(unique("Precedence"), above=LOW)
    for where in reversed(filled):
        put(where, op, key, lambda value, where=where: where)
    with dispatch.include(key):
        assert op(Plain()) == wins


@pytest.mark.parametrize("passed", ["cell", "row", "column"])
def test_a_fallthrough_passes_the_call_to_the_next_key(passed: str) -> None:
    op, key = operator(), DispatchKey.define(unique("Through"), above=LOW)
    put(passed, op, key, fallthrough)
    dispatch.register(op, LOW, lambda value: "next")
    with dispatch.include(key, LOW):
        assert op(Plain()) == "next"


@pytest.mark.parametrize(("passed", "rest"), [("cell", ("row", "column")), ("row", ("column",))])
def test_falling_through_goes_to_the_next_key_not_to_the_next_place(
    passed: str, rest: tuple[str, ...]
) -> None:
    op, key = operator(), DispatchKey.define(unique("Through"), above=LOW)
    put(passed, op, key, fallthrough)
    for where in rest:
        put(where, op, key, lambda value: "the same key")
    dispatch.register(op, LOW, lambda value: "the next key")
    with dispatch.include(key, LOW):
        assert op(Plain()) == "the next key"


def test_a_row_serves_every_key_without_a_cell() -> None:
    op = operator(lambda value: "native")
    dispatch.register_catch_all(op, lambda value: "row")
    dispatch.register(op, LOW, lambda value: "cell")
    assert op(Plain()) == "row"
    with dispatch.include(LOW):
        assert op(Plain()) == "cell"
    with dispatch.include(LOW, HIGH):
        assert op(Plain()) == "row"


def test_columns_are_boxed() -> None:
    op, key = operator(), DispatchKey.define(unique("Boxed"), above=LOW)
    got = []

    @dispatch.register_fallback(key)
    def boxed(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        got.append((op, tuple(args), dict(kwargs)))
        return "done"

    value = Plain()
    with dispatch.include(key):
        assert op(value, 2, flag=True) == "done"
    assert got == [(op, (value, 2), {"flag": True})]


def test_cells_and_rows_get_the_arguments_as_they_are() -> None:
    for where in ("cell", "row"):
        op = operator()
        put(where, op, LOW, lambda *args, **kwargs: (args, kwargs))
        value = Plain()
        with dispatch.include(LOW):
            assert op(value, 2, flag=True) == ((value, 2), {"flag": True})


def test_a_later_registration_is_seen_by_operators_called_before() -> None:
    op, key = operator(lambda value: "native"), DispatchKey.define(unique("Late"), above=LOW)
    dispatch.register(op, key, fallthrough)
    other = operator(lambda value: "native")
    with dispatch.include(LOW):
        dispatch.register(op, LOW, lambda value: "cell")
        assert op(Plain()) == "cell"
        with pytest.raises(DispatchError, match="no kernel"):
            other(Plain())
        dispatch.register_catch_all(other, lambda value: "row")
        assert other(Plain()) == "row"
        dispatch.register(other, LOW, lambda value: "cell")
        assert other(Plain()) == "cell"
    with dispatch.include(key):
        third = operator(lambda value: "native")
        dispatch.register_fallback(key, lambda op, args, kwargs: "column")
        assert third(Plain()) == "column"


# Refusals


def test_a_name_is_taken_once() -> None:
    name = unique("table::twice")
    Operator(name)  # first
    here = test_a_name_is_taken_once
    with pytest.raises(
        DispatchError,
        match=rf"Operator\('{name}'\): the name is taken, by the operator made at "
        rf"{line_of('first', here)}; this one is at {line_of('second', here)}",
    ):
        Operator(name)  # second


def _kernel(*args: Any) -> None:
    """The kernel of both registrations: the places are not its definition."""


def test_a_cell_is_filled_once() -> None:
    op, here = operator(), test_a_cell_is_filled_once
    dispatch.register(op, LOW, _kernel)  # first
    with pytest.raises(
        DispatchError,
        match=rf"register\({op.name}, {LOW}\): a kernel is there already, registered at "
        rf"{line_of('first', here)}; this one is at {line_of('second', here)}",
    ):
        dispatch.register(op, LOW, _kernel)  # second
    with pytest.raises(DispatchError, match=rf"this one is at {line_of('third', here)}"):

        @dispatch.register(op, LOW)  # third
        def another() -> None: ...


def test_a_row_is_filled_once() -> None:
    op, here = operator(), test_a_row_is_filled_once
    dispatch.register_catch_all(op, fallthrough)  # first
    with pytest.raises(
        DispatchError,
        match=rf"register_catch_all\({op.name}\): a kernel is there already, registered at "
        rf"{line_of('first', here)}; this one is at {line_of('second', here)}",
    ):
        dispatch.register_catch_all(op)(_kernel)  # second


def test_a_column_is_filled_once() -> None:
    key, here = DispatchKey.define(unique("Column"), above=LOW), test_a_column_is_filled_once
    dispatch.register_fallback(key)(_kernel)  # first
    with pytest.raises(
        DispatchError,
        match=rf"register_fallback\({key}\): a kernel is there already, registered at "
        rf"{line_of('first', here)}; this one is at {line_of('second', here)}",
    ):
        dispatch.register_fallback(key, fallthrough)  # second
    with pytest.raises(DispatchError, match=r"registered at tsfunc.dispatch.table"):
        dispatch.register_fallback(DispatchKey.CPU, fallthrough)


def test_objects_that_name_no_operator_are_refused() -> None:
    for what in ("table::missing", 3, print):
        with pytest.raises(DispatchError, match=r"expected an Operator, .*, got "):
            dispatch.register(what, LOW, _kernel)


def test_a_key_without_a_kernel_is_an_error() -> None:
    op = operator(lambda value: value)
    message = (
        rf"{op.name}: no kernel for {LOW} at level 0, the highest of DispatchKeySet\({LOW.name}@0, "
        rf"BackendSelect@0, CPU@0\). Looked for, .* the cell \(register\(op, {LOW}\)\), the row "
        rf"\(register_catch_all\(op\)\), the column \(register_fallback\({LOW}\)\). Register one"
    )
    with dispatch.include(LOW), pytest.raises(DispatchError, match=message):
        op(Plain())


def test_an_operator_without_backend_kernels_is_an_error() -> None:
    op = operator()
    dispatch.register(op, LOW, fallthrough)
    message = rf"{op.name}\(Plain, flag=bool\): no backend kernel. It has kernels for: {LOW}. Regi"
    with dispatch.include(LOW), pytest.raises(DispatchError, match=message):
        op(Plain(), flag=True)
    with pytest.raises(DispatchError, match="It has kernels for: none"):
        operator()(Plain())


def test_a_call_without_keys_is_an_error_that_tells_of_factories() -> None:
    op = operator(lambda size: size)
    with pytest.raises(
        DispatchError,
        match=rf"{op.name}\(int\): no key is left to dispatch to \(key set "
        r"DispatchKeySet\(BackendSelect@0\)\). An operator without tensor arguments is a factory",
    ):
        op(3)


def test_a_call_with_its_keys_excluded_is_an_error_that_names_them() -> None:
    op = operator()
    with (
        Level(HIGH) as level,
        dispatch.exclude(HIGH),
        pytest.raises(
            DispatchError,
            match=rf"arguments have DispatchKeySet\({HIGH.name}@1\), which is exc",
        ),
    ):
        op(Value(level))


def test_fallthrough_is_no_function() -> None:
    assert repr(fallthrough) == "fallthrough"
    with pytest.raises(DispatchError, match="fallthrough marks a key that is passed over"):
        fallthrough()


def test_a_value_of_a_level_that_has_ended_is_refused() -> None:
    op = operator()
    dispatch.register(op, HIGH, _kernel)
    with Level(HIGH, "the transform") as level:  # made
        pass
    here = test_a_value_of_a_level_that_has_ended_is_refused
    message = (
        rf"{op.name}: got a value of the transform \(called at {line_of('made', here)}\) after "
        r"that transform had ended. Return the value"
    )
    with pytest.raises(EscapedTracerError, match=message):
        op(Value(level))
    # A new level at the same depth does not own it.
    with Level(HIGH) as new, pytest.raises(EscapedTracerError, match=message):
        op(Value(new), Value(level))


# Names


@pytest.fixture
def resolvers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hooks.resolve_operators, "functions", [])
    monkeypatch.setattr(hooks.choose_operator, "functions", [])
    yield


def test_names_of_several_operators(resolvers: None) -> None:
    ops = [operator(lambda value, i=i: i) for i in range(2)]
    hooks.resolve_operators.add(lambda what: ops if what == "both" else None)
    dispatch.register("both", HIGH, lambda value: "kernel")
    with dispatch.include(HIGH):
        assert [op(Plain()) for op in ops] == ["kernel"] * 2
    with pytest.raises(
        DispatchError,
        match=rf"'both' stands for 2 operators, and it\(Plain\) does not say which: "
        rf"{ops[0].name}, {ops[1].name}. Name the one that is meant",
    ):
        dispatch.redispatch("both", Plain())
    hooks.choose_operator.add(lambda what, args, kwargs: ops[len(args)])
    assert dispatch.redispatch("both", Plain()) == 1
    assert dispatch.redispatch("both", DispatchKeySet(DispatchKey.CPU), value=Plain()) == 0


def test_one_of_several_that_is_filled_keeps_the_others_empty(resolvers: None) -> None:
    ops = [operator() for _ in range(3)]
    hooks.resolve_operators.add(lambda what: ops)
    dispatch.register(ops[1], HIGH, _kernel)
    with pytest.raises(DispatchError, match=rf"register\({ops[1].name}, {HIGH}\): a kernel is"):
        dispatch.register("all", HIGH, _kernel)
    for op in (ops[0], ops[2]):
        assert op.entry(HIGH) is None


def test_listeners_hear_of_cells_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[Operator, DispatchKey | None]] = []
    monkeypatch.setattr(hooks.kernel_registered, "functions", [])
    hooks.kernel_registered.add(lambda op, key: heard.append((op, key)))
    op = operator()
    dispatch.register(op, HIGH, _kernel)
    dispatch.register_catch_all(op, _kernel)
    assert heard == [(op, HIGH), (op, None)]
    assert repr(op) == f"Operator({op.name!r})"
