"""A trace restores the garbage collector."""

from __future__ import annotations

import gc

import pytest
import torch

from tsfunc import specialize
from tsfunc.program.calling.capture import rare_garbage_collection


def test_it_runs_less_often_and_then_as_before() -> None:
    before = gc.get_threshold()
    seen = []

    @specialize
    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(gc.get_threshold())
        return x * 2

    assert specialize(lambda x: inner(x) + 1)(torch.ones(2)).tolist() == [3.0, 3.0]
    assert seen[0][0] > before[0] and gc.get_threshold() == before

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no")

    with pytest.raises(KeyError):
        specialize(fails)(torch.ones(2))
    assert gc.get_threshold() == before


def test_settings_of_the_user_stay() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(0)
        with rare_garbage_collection():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
        gc.set_threshold(*before)
        with rare_garbage_collection(), rare_garbage_collection():
            gc.set_threshold(123, 4, 5)
        assert gc.get_threshold() == (123, 4, 5)
    finally:
        gc.set_threshold(*before)
