"""The calls by which the catalogue tries operators."""

from __future__ import annotations

import itertools

import pytest
import torch

from tsfunc.bridge.tracers.schemas import registered_overloads
from tsfunc.ops.catalogue.reader import reader
from tsfunc.ops.catalogue.trial import RANKS, _choices
from tsfunc.ops.catalogue.trial_arguments import arguments, trial_settings

KINDS: dict[str, type | tuple[type, ...]] = {
    "int": int, "float": float, "number": (int, float), "bool": bool, "str": str,
    "ScalarType": torch.dtype, "Device": torch.device, "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
}  # fmt: skip


def test_an_argument_without_a_default_gets_a_value_of_its_type() -> None:
    for name in registered_overloads("aten"):
        signature = reader().signature(name)
        assert signature is not None
        setting = next(iter(trial_settings(signature)))
        args, kwargs = arguments(signature, {}, setting, lambda *_: torch.ones(()))
        for argument, value in zip(signature.inputs, args, strict=False):
            given = kwargs.get(argument.name, value)
            if argument.required and argument.type in KINDS:
                assert isinstance(given, KINDS[argument.type]), (name, argument.name)
            if argument.type.endswith("[]") and not argument.tensor:
                assert isinstance(given, list), (name, argument.name)


@pytest.mark.parametrize("count", range(7))
def test_tensors_of_one_rank_come_first_and_nothing_twice(count: int) -> None:
    found = list(itertools.islice(_choices(count), 200))
    assert len(set(found)) == len(found)
    assert all(len(ranks) == count for ranks in found)
    if count:
        alike = [ranks for ranks in found if len(set(ranks)) == 1]
        assert found[: len(RANKS)] == alike == [(rank,) * count for rank in RANKS]
