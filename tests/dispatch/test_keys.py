"""Keys and key sets."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dispatch.helpers import line_of, unique
from tsfunc.dispatch import DispatchKey, DispatchKeySet
from tsfunc.dispatch.keys import BACKENDS, WIDTH, backend_of
from tsfunc.errors import DispatchError

Pair = tuple[int, DispatchKey]

BUILT_IN = (
    DispatchKey.Batch, DispatchKey.Grad, DispatchKey.Trace, DispatchKey.Specialize,
    DispatchKey.BackendSelect, *reversed(BACKENDS),
)  # fmt: skip

pairs = st.tuples(st.integers(0, 6), st.sampled_from(BUILT_IN))
pair_sets = st.frozensets(pairs, max_size=12)


def keyset(items: frozenset[Pair]) -> DispatchKeySet:
    made = DispatchKeySet()
    for level, key in items:
        made = made | DispatchKeySet.at(level, key)
    return made


def place(pair: Pair) -> tuple[int, int]:
    return pair[0], pair[1].priority


# Keys


def test_the_built_in_keys_fall_in_priority() -> None:
    priorities = [key.priority for key in BUILT_IN]
    assert priorities == sorted(priorities, reverse=True)
    assert [key for key in DispatchKey.all() if key in BUILT_IN] == list(BUILT_IN)


@pytest.mark.parametrize("key", BUILT_IN, ids=str)
def test_a_key_goes_above_or_below_another(key: DispatchKey) -> None:
    others = DispatchKey.all()
    above = DispatchKey.define(unique("Above"), above=key)
    below = DispatchKey.define(unique("Below"), below=key)
    assert above.priority > key.priority > below.priority
    assert [k for k in DispatchKey.all() if k not in (above, below)] == others


def test_a_key_goes_next_to_its_bound_where_there_is_room() -> None:
    bound = DispatchKey.define(unique("Bound"))
    above = DispatchKey.define(unique("Above"), above=bound)
    below = DispatchKey.define(unique("Below"), below=bound)
    at = DispatchKey.all().index(bound)
    assert DispatchKey.all()[at - 1 : at + 2] == [above, bound, below]


def test_a_key_goes_between_two() -> None:
    low = DispatchKey.define(unique("Low"), above=DispatchKey.Trace)
    middle = DispatchKey.define(unique("Middle"), above=low, below=DispatchKey.Grad)
    assert low.priority < middle.priority < DispatchKey.Grad.priority


def test_a_key_without_bounds_goes_above_all_others() -> None:
    for _ in range(12):  # halving the space above would end after ten steps
        others = DispatchKey.all()
        key = DispatchKey.define(unique("Top"))
        assert DispatchKey.all() == [key, *others]


def test_a_key_is_found_by_its_name() -> None:
    key = DispatchKey.define(unique("Named"), above=DispatchKey.CPU)
    assert DispatchKey.get(key.name) is key
    assert repr(key) == f"DispatchKey.{key.name}"


def test_a_key_is_itself_when_copied_or_pickled() -> None:
    for key in BUILT_IN:
        assert copy.deepcopy(key) is key
        assert pickle.loads(pickle.dumps(key)) is key


def test_an_unknown_key_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(DispatchError, match=r"get: expected .*Batch, .*got 'Btach'"):
        DispatchKey.get("Btach")


def test_a_key_is_not_made_by_calling_the_class() -> None:
    with pytest.raises(DispatchError, match=r"Write DispatchKey.define\(name, above"):
        DispatchKey()


def test_a_name_is_taken_once() -> None:
    name = unique("Twice")
    DispatchKey.define(name, above=DispatchKey.CPU)  # first
    here = test_a_name_is_taken_once
    with pytest.raises(
        DispatchError,
        match=rf"define\('{name}'\): the name is taken, by the definition at "
        rf"{line_of('first', here)}; this one is at {line_of('second', here)}",
    ):
        DispatchKey.define(name)  # second


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises(DispatchError, match=r"Batch is not below DispatchKey.CPU; swap the two"):
        DispatchKey.define(unique("X"), above=DispatchKey.Batch, below=DispatchKey.CPU)
    with pytest.raises(DispatchError, match=r"Trace is not below DispatchKey.Trace"):
        DispatchKey.define(unique("X"), above=DispatchKey.Trace, below=DispatchKey.Trace)


def test_keys_between_two_neighbours_run_out() -> None:
    low = DispatchKey.define(unique("Low"), above=DispatchKey.Specialize)
    high = DispatchKey.define(unique("High"), above=low, below=DispatchKey.Trace)
    free = high.priority - low.priority - 1
    made = [DispatchKey.define(unique("Fill"), above=low, below=high) for _ in range(free)]
    assert len({key.priority for key in made}) == free
    with pytest.raises(DispatchError, match=rf"the {free} priorities inside the bounds are taken"):
        DispatchKey.define(unique("Fill"), above=low, below=high)
    # Insertion elsewhere works: a full gap next to the bound is skipped.
    assert DispatchKey.define(unique("Beyond"), above=low).priority > high.priority


def test_no_key_fits_above_the_highest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DispatchKey._by_priority, WIDTH - 1, DispatchKey.Batch)
    with pytest.raises(DispatchError, match="no key fits above all others; give a bound"):
        DispatchKey.define(unique("TooHigh"))


def test_the_backend_of_a_device() -> None:
    assert backend_of("cpu") is DispatchKey.CPU
    assert backend_of("meta") is DispatchKey.Meta
    assert backend_of("an accelerator of next year") is DispatchKey.OtherBackend


# Key sets


@given(pair_sets, pair_sets)
def test_sets_are_sets_of_pairs(a: frozenset[Pair], b: frozenset[Pair]) -> None:
    x, y = keyset(a), keyset(b)
    assert x | y == keyset(a | b)
    assert x & y == keyset(a & b)
    assert x - y == keyset(a - b)
    assert x & ~y == keyset(a - b)
    assert (x == y) == (a == b)
    assert a != b or hash(x) == hash(y)
    assert len(x) == len(a)
    assert bool(x) == bool(a)
    assert frozenset(x) == a
    assert DispatchKeySet.from_bits(int(x)) == x


@given(pair_sets, pair_sets, pair_sets)
def test_sets_obey_the_laws_of_their_algebra(
    a: frozenset[Pair], b: frozenset[Pair], c: frozenset[Pair]
) -> None:
    x, y, z = keyset(a), keyset(b), keyset(c)
    assert ~~x == x
    assert ~(x | y) == ~x & ~y
    assert x & (y | z) == (x & y) | (x & z)
    assert x | (x & y) == x
    assert not x & ~x


@given(pair_sets, pairs)
def test_membership_at_a_level_and_at_any(a: frozenset[Pair], pair: Pair) -> None:
    x = keyset(a)
    _, key = pair
    assert (pair in x) == (pair in a)
    assert (key in x) == any(k is key for _, k in a)
    assert (pair in ~x) == (pair not in a)
    assert key in ~x


@given(pair_sets.filter(bool))
def test_levels_decide_first_and_priorities_within_a_level(a: frozenset[Pair]) -> None:
    x = keyset(a)
    assert list(x) == sorted(a, key=place, reverse=True)
    assert x.highest() == max(a, key=place)
    assert [repr(x)] == [
        f"DispatchKeySet({', '.join(f'{k.name}@{n}' for n, k in sorted(a, key=place)[::-1])})"
    ]


@given(pair_sets)
def test_sets_survive_copying_and_pickling(a: frozenset[Pair]) -> None:
    for x in (keyset(a), ~keyset(a)):
        assert pickle.loads(pickle.dumps(x)) == x
        assert copy.deepcopy(x) == x


def test_inner_levels_are_higher_for_any_priority() -> None:
    inner = DispatchKeySet.at(1, DispatchKey.OtherBackend)
    assert (DispatchKeySet(DispatchKey.Batch) | inner).highest() == (1, DispatchKey.OtherBackend)


def test_sets_are_made_from_keys_sets_and_iterables() -> None:
    both = DispatchKeySet(DispatchKey.CPU, DispatchKey.Batch)
    assert DispatchKeySet([DispatchKey.CPU, DispatchKey.Batch]) == both
    assert DispatchKeySet(DispatchKeySet(DispatchKey.CPU), DispatchKey.Batch) == both
    assert DispatchKey.CPU | DispatchKey.Batch == both
    assert DispatchKey.CPU | DispatchKeySet(DispatchKey.Batch) == both
    assert both - DispatchKey.Batch == DispatchKeySet(DispatchKey.CPU)
    assert both & DispatchKey.Batch == DispatchKeySet(DispatchKey.Batch)
    assert repr(~both) == "~DispatchKeySet(Batch@0, CPU@0)"


def test_a_set_does_not_change() -> None:
    with pytest.raises(AttributeError, match=r"make another with \| and &"):
        DispatchKeySet().bits = 1


def test_the_empty_set_has_no_highest() -> None:
    with pytest.raises(DispatchError, match=r"highest\(\): the set is empty"):
        DispatchKeySet().highest()


def test_a_complement_is_for_masking_only() -> None:
    infinite = ~DispatchKeySet(DispatchKey.CPU)
    with pytest.raises(DispatchError, match="can't iterate over a complement: intersect it"):
        next(iter(infinite))
    with pytest.raises(DispatchError, match="can't count a complement"):
        len(infinite)
    with pytest.raises(DispatchError, match="can't take the highest of a complement"):
        infinite.highest()


def test_invalid_keys_are_refused() -> None:
    with pytest.raises(TypeError, match="expected a DispatchKey or a DispatchKeySet, got 'CPU'"):
        DispatchKeySet(DispatchKey.CPU) | "CPU"  # type: ignore[operator]
    with pytest.raises(DispatchError, match=r"at\(-1, ...\): levels count from 0"):
        DispatchKeySet.at(-1, DispatchKey.CPU)
    with pytest.raises(DispatchError, match=r"bit 0 \(level 0, priority 0\) stands for no key"):
        DispatchKeySet.from_bits(1).highest()
