"""The guards on values that a function reads: each accepts that value, and no other."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tsfunc import specialize
from tsfunc.bridge.sizes.symbols import Condition
from tsfunc.bridge.tracers.torch_settings import SETTINGS
from tsfunc.program.closure import closure_guards
from tsfunc.program.closure.closure_guards import (
    IN_DICT,
    AnyClosureNumber,
    ClosureGuards,
    ConditionHolds,
    Distinct,
    EqualValue,
    KeysAre,
    LengthIs,
    MemberIs,
    Missing,
    NoMember,
    NotOneOf,
    ResultIs,
    SameContents,
    SameObject,
    SameObjectAs,
    SourceGuard,
    TensorConstant,
    TensorInput,
    TypeOf,
    ValueGuard,
)
from tsfunc.program.closure.guard_codegen import SettingsAre, differs
from tsfunc.program.closure.refused_values import refused_values
from tsfunc.program.guard import ABSENT, Difference, Guard, GuardCode, Source
from tsfunc.types.values import same_value


class Holder:
    """An object with one attribute."""

    def __init__(self, value: Any = 1) -> None:
        self.value = value


def now() -> tuple[Any, ...]:
    return tuple(setting.read() for setting in SETTINGS)


FIRST, SECOND = Source.of_argument(0, "x"), Source.of_argument(1, "y")
HOLDER, OTHER = Holder(), Holder()
TENSOR, MORE = torch.ones(2), torch.ones(3)
TINY = torch.ones(2, dtype=torch.float64)
# Guards on arguments, with arguments that they accept, and arguments that they refuse.
CASES: list[tuple[tuple[Guard, ...], list[list[Any]], list[list[Any]]]] = [
    ((SameObject(FIRST, HOLDER),), [[HOLDER]], [[OTHER], [None]]),
    ((EqualValue(FIRST, 1),), [[1]], [[True], [1.0], [2], ["1"]]),
    ((EqualValue(FIRST, None),), [[None]], [[0], [False]]),
    ((EqualValue(FIRST, 0.0),), [[0.0]], [[-0.0], [0], [float("nan")]]),
    ((EqualValue(FIRST, float("nan")),), [[float("nan")]], [[0.0]]),
    ((SameContents(FIRST, {1, 2}),), [[{1, 2}]], [[{1, 3}], [frozenset({1, 2})]]),
    ((TypeOf(FIRST, Holder),), [[HOLDER], [OTHER]], [[1], [Holder]]),
    ((KeysAre(FIRST, ["a", 1]),), [[{"a": 0, 1: 0}]], [[{1: 0, "a": 0}], [{"a": 0, 1.0: 0}]]),
    ((KeysAre(FIRST, []),), [[{}]], [[{"a": 0}]]),
    ((KeysAre(FIRST, [], plain=True),), [[{}]], [[{"a": 0}]]),
    ((LengthIs(FIRST, 2),), [[[1, 2]]], [[[1]], [3]]),
    ((LengthIs(FIRST, 1, 2),), [[deque([1], 2)]], [[deque([1], 3)], [deque([1])]]),
    ((SameObjectAs(FIRST, SECOND),), [[HOLDER, HOLDER]], [[HOLDER, OTHER]]),
    ((Distinct((FIRST, SECOND)),), [[HOLDER, OTHER]], [[HOLDER, HOLDER]]),
    ((NotOneOf(FIRST, (HOLDER,)),), [[OTHER]], [[HOLDER]]),
    ((Missing(FIRST, "other"),), [[HOLDER]], [[type("T", (), {"other": 1})()]]),
    ((Missing(FIRST, "a", IN_DICT),), [[{"b": 1}]], [[{"a": 1}]]),
    ((TensorConstant(FIRST, TENSOR),), [[TENSOR]], [[MORE], [TINY]]),
    ((TensorInput(FIRST, TENSOR),), [[TENSOR], [torch.zeros(2)]], [[MORE], [TINY], [1]]),
    (
        (
            AnyClosureNumber(FIRST, "number_0", int, 3, lambda k: k < 9),
            ConditionHolds(Condition("number_0 > 2", "k > 2")),
        ),
        [[3], [8]], [[2], [9], [3.0]],
    ),
    ((ResultIs(len, (FIRST,), 2, "len(x)"),), [["ab"]], [["a"], [3]]),
    ((MemberIs(random, "Random", random.Random),), [[]], []),
    ((MemberIs(random, "Random", Holder),), [], [[]]),
    ((NoMember(Holder, "other"),), [[]], []),
    ((NoMember(Holder, "value"), NoMember(Holder, "__init__")), [], [[]]),
    ((SettingsAre(now()),), [[]], []),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_guard_accepts_the_values_that_were_read(number: int) -> None:
    guards, accepted, refused = CASES[number]
    answers = ClosureGuards(list(guards)).function(now())
    for args in accepted:
        assert answers(args) == (), args
    for args in refused:
        assert answers(args) is None, args


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_refused_call_is_told_by_name_from_the_traced_one(number: int) -> None:
    guards, _, refused = CASES[number]
    for args in refused:
        if isinstance(guards[0], LengthIs | ResultIs) and isinstance(args[0], int):
            continue  # the guard on its type precedes those on its elements
        found = refused_values(ClosureGuards(list(guards)), now(), args)
        assert found and all(name and one is not other for name, (one, other) in found.items())


def test_a_difference_of_dicts_names_the_entries_that_one_of_them_lacks() -> None:
    guard = ResultIs(lambda: {"b": 2, "c": 3}, (), {"a": 1, "c": 3}, "os.environ")
    assert list(guard.differences()) == [
        Difference("os.environ['b']", 2, ABSENT),
        Difference("os.environ['a']", ABSENT, 1),
    ]


def test_every_kind_has_a_case() -> None:
    kinds = {
        each for each in vars(closure_guards).values()
        if isinstance(each, type) and issubclass(each, Guard)
    }  # fmt: skip
    of_cases = {type(guard) for guards, *_ in CASES for guard in guards}
    assert kinds - {Guard, SourceGuard, ValueGuard} == of_cases


class _Float(float):
    pass


@pytest.mark.parametrize(
    "values",
    [
        (complex(0, 0), complex(0, -0.0), complex(-0.0, 0)),
        (complex(float("nan"), 1), complex(1, float("nan")), 1j),
        (0.0, -0.0, float("nan"), 0),
        (_Float(0), _Float(-0.0), 0.0),
        (1, 1.0, True, 1 + 0j),
    ],
    ids=["signs", "nans", "floats", "a subclass", "types"],
)
def test_numbers_that_compare_equal_have_programs_of_their_own(values: tuple[Any, ...]) -> None:
    """This holds for arguments and for closed-over values: equality does not distinguish them."""
    holder = Holder()

    def closes(x: torch.Tensor) -> Any:
        return x, holder.value

    def takes(x: torch.Tensor, value: Any) -> Any:
        return x, value

    x, closing, taking = torch.ones(2), specialize(closes), specialize(takes)
    for value in [*values, *values]:
        holder.value = value
        for found in (closing(x)[1], taking(x, value)[1]):
            assert (type(found), repr(found)) == (type(value), repr(value))
    assert len(closing.programs) <= len(values)


@pytest.mark.parametrize("first", [3, "text"])
def test_a_tensor_may_replace_a_constant_that_a_program_reads(first: Any) -> None:
    holder = Holder()
    holder.value = first
    program = specialize(lambda x: (x, holder.value))
    x, tensor = torch.ones(2), torch.arange(2.0)
    program(x)
    holder.value = tensor
    assert program(x)[1].equal(tensor)


def test_complex_constants_of_a_program_keep_the_signs_of_zeros() -> None:
    zeros = [complex(a, b) for a in (0.0, -0.0, 1.0) for b in (0.0, -0.0, -2.0)]

    def function(x: torch.Tensor) -> Any:
        return [torch.full_like(x, zero) for zero in zeros]

    x = torch.ones(2, dtype=torch.complex128)
    assert [repr(t[0].item()) for t in specialize(function)(x)] == [repr(zero) for zero in zeros]


def test_values_that_are_gone() -> None:
    source = FIRST.attribute("a", "x.a").item("b", "x.a['b']")
    answers = ClosureGuards([EqualValue(source, 1)]).function(now())
    assert answers([Holder()]) is None and answers([None]) is None


def guards_of(value: Any, source: Source) -> Iterator[Guard]:
    """Guard a nested value like a trace, with some facts stated twice."""
    yield TypeOf(source, type(value))
    yield TypeOf(source, type(value))
    if isinstance(value, Holder):
        yield Missing(source, "other")
        yield from guards_of(value.value, source.attribute("value"))
    elif isinstance(value, dict):
        yield KeysAre(source, list(value), plain=True)
        yield Missing(source, "z", IN_DICT)
        for key, item in value.items():
            yield from guards_of(item, source.item(key, ""))
    else:
        yield EqualValue(source, value)


KEYS = st.sampled_from(["a", "b", 1, 1.0, True, None, (1, "a"), (1.0, "a")])
NESTED = st.recursive(
    st.sampled_from([0, 0.0, -0.0, False, None, "a"]),
    lambda inner: (
        st.dictionaries(KEYS, inner, max_size=3)
        | st.lists(st.tuples(st.sampled_from("abc"), inner), max_size=3).map(OrderedDict)
        | inner.map(Holder)
    ),
)


def equals(a: Any, b: Any) -> bool:
    """Return True if two nested values are the same in types, order and signs."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Holder):
        return equals(a.value, b.value)
    if isinstance(a, dict):
        same = [*map(repr, a)] == [*map(repr, b)]
        return same and all(map(equals, a.values(), b.values()))
    return repr(a) == repr(b)


def changed(draw: Any, value: Any) -> Any:
    """Return a copy of a nested value in which at most one place differs."""
    if draw(st.integers(0, 3)) == 0:
        return draw(NESTED)
    if isinstance(value, Holder):
        return Holder(changed(draw, value.value))
    if isinstance(value, dict) and value:
        at = draw(st.sampled_from(list(value)))
        items = [(k, changed(draw, x) if k is at else x) for k, x in value.items()]
        kind = draw(st.sampled_from([type(value), dict]))
        return kind(items if draw(st.booleans()) else reversed(items))
    return copy.copy(value)


@given(st.data())
def test_guards_together_accept_equal_values_and_no_others(data: st.DataObject) -> None:
    before = data.draw(NESTED)
    answers = ClosureGuards(list(guards_of(before, FIRST))).function(now())
    assert answers([copy.deepcopy(before)]) == ()
    for _ in range(3):
        after = changed(data.draw, before)
        assert (answers([after]) == ()) == equals(before, after), after


def test_a_path_has_one_variable() -> None:
    reads = ClosureGuards()
    key = ("a", 1)
    for _ in range(2):
        source = FIRST.attribute("value", "x.value").item(key, "x.value[('a', 1)]")
        reads.add(EqualValue(source, 1))
        assert reads.add_input(source, 1) == 0
    assert reads.values == (1,)
    assert reads.function(now())([Holder({key: 1})]) == (1,)


def test_a_tensor_that_is_replaced_becomes_an_input() -> None:
    reads = ClosureGuards()
    source = FIRST.attribute("value", "x.value")
    reads.guard_identity(source, TENSOR)
    assert reads.function(now())([Holder(torch.zeros(2))]) is None
    reads.make_input(source, TENSOR)
    new = torch.zeros(2)
    found = reads.function(now())([Holder(new)])
    assert found is not None and found[0] is new


def test_the_guards_of_a_program_are_frozen_data() -> None:
    config = {"scale": 2.0}
    f = specialize(lambda x: x * config["scale"])
    f(TENSOR)
    guards = f.program.guards
    assert all(isinstance(each, Guard) for each in guards) and str(guards) == str(f.guards)
    assert "config['scale'] is 2.0 (float)" in f.guards
    (read,) = (each for each in guards if isinstance(each, EqualValue))
    assert read.value == 2.0 and read.source.text == "config['scale']"
    with pytest.raises(dataclasses.FrozenInstanceError):
        read.value = 3.0  # type: ignore[misc]


CONSTANTS: list[Any] = [
    None, True, False, 0, 1, 0.0, -0.0, 1.0, float("nan"), 0j, -0j, complex(0.0, -0.0),
    complex(float("nan"), 0.0), _Float(0.0), _Float(-0.0), "", "1", b"", b"1", (), (0,), (0.0,),
    (-0.0,), frozenset({0}), frozenset({0.0}), torch.device("cpu"), torch.device("meta"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CONSTANTS)))
def test_the_code_for_a_constant_tells_apart_what_same_value_does(number: int) -> None:
    constant, code = CONSTANTS[number], GuardCode()
    condition = differs("got", constant, code)
    for got in (*CONSTANTS, torch.ones(2)):
        other = copy.deepcopy(got)
        differ = eval(condition, {**code.scope.objects, "got": other})
        assert differ != same_value(constant, other), other
