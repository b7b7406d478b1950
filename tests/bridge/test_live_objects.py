"""Live objects are found without an effect on what other threads do."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tsfunc.bridge.writing.creation_tracking import live_objects


class Marked:
    pass


def test_objects_are_found_in_the_order_of_their_creation() -> None:
    gc.collect()
    made = [Marked() for _ in range(5)]
    assert [x for x in live_objects((Marked,), generation=0) if x in made] == made
    gc.collect()
    assert not live_objects((Marked,), generation=0)
    assert set(map(id, live_objects((Marked,)))) == set(map(id, made))


def test_the_collector_stays_as_it_is() -> None:
    for switch in (gc.disable, gc.enable):
        switch()
        live_objects((Marked,))
        assert gc.isenabled() == (switch is gc.enable)


@pytest.mark.parametrize("generation", [0, None])
def test_a_tuple_that_is_being_made_is_left_alone(generation: int | None) -> None:
    """CPython extends the tuple in place, and raises a SystemError if it has another holder."""

    def elements() -> Iterator[list[int]]:
        for i in range(40):
            live_objects((Marked,), generation)
            yield [i]

    assert tuple(elements()) == tuple([i] for i in range(40))
