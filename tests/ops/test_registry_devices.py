"""The law of every row for devices: its results are on the device of its arguments.

The device is ``meta``, which every machine has. A tensor that a rule makes on another device meets
the arguments there, which torch refuses, or is the result. The calls are those of
``test_registry.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.harness import SIZE, Level, overload, plan, tensor_paths
from tests.ops.registry_examples import ELSEWHERE, RUN_BY_HAND, UNTRIED
from tests.ops.test_registry import EFFECTS, ROWS, seeded_calls
from tsfunc.errors import DataDependentError
from tsfunc.ops import all_rows, lookup

META = torch.device("meta")
# Sentences of errors of calls that have no meaning on this device, or are refused on every device.
REFUSED = (
    "cannot be called on meta tensors",  # the rule or the kernel reads values
    "same randomness with a batched tensor",
    "mat2 must be col_major",  # the rule's check of layouts runs on zeros, whose strides differ
)
# This kernel chooses a library by the device.
OF_LIBRARIES = {"aten::_batch_norm_with_update_functional"}
# The calls of ``ELSEWHERE`` are on this device already.
APART_HERE = {*RUN_BY_HAND, *UNTRIED, *ELSEWHERE, *EFFECTS, *OF_LIBRARIES}


def on_meta(value: Any) -> Any:
    """Return an argument with meta tensors, and this device in place of another."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, (list, tuple)):
        return [on_meta(item) for item in value]
    return META if isinstance(value, torch.device) else value


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


@pytest.mark.filterwarnings("ignore")  # torch warns about deprecated operators
@pytest.mark.parametrize("name", sorted(ROWS - APART_HERE))
def test_results_are_on_the_device_of_the_arguments(name: str) -> None:
    row, random = all_rows()[name], lookup(name).facts.random
    assert row.rule is not None
    for args, kwargs in seeded_calls(name):
        if not tensor_paths(args):
            continue
        made = plan(args, dict.fromkeys(tensor_paths(args), 0), SIZE)
        named = {key: on_meta(value) for key, value in kwargs.items()}
        for randomness in ("same", "different", "split") if random else ("error",):
            level = Level(randomness=randomness)
            try:
                out, _ = row.rule(overload(name), level, made.dims, on_meta(made.args), named)
            except (NotImplementedError, DataDependentError):  # no kernel, or results of any size
                continue
            except RuntimeError as error:
                if not any(sentence in str(error) for sentence in REFUSED):
                    raise
                continue
            assert all(x.device == META for x in tensors_in(out)), randomness
