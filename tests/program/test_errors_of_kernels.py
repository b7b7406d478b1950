"""A program raises what its function raises, of the same class: NOTE [errors of kernels]."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from tsfunc import MetaTensorType, specialize

# torch's rules for fake tensors raise another class for some calls of these.
DIFFERENT = [
    "complex", "aminmax", "narrow_copy", "_chunk_cat", "cat", "nn.functional.embedding", "amax",
    "amin", "linalg.lstsq",
]  # fmt: skip
ENTRIES = [op for op in op_db if op.error_inputs_func is not None]

# One entry resizes a tensor that it passes as out.
pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")


def error_of(function: Callable[..., Any], args: tuple[Any, ...]) -> Exception | None:
    try:
        function(*args)
    except Exception as error:
        return error
    return None


def check_errors(op: Any) -> None:
    """Compare the errors of a function and of its program."""
    for error_input in op.error_inputs("cpu"):
        sample = error_input.sample_input
        args = (sample.input, *sample.args)
        function = functools.partial(op, **sample.kwargs)
        expected = error_of(function, args)
        if expected is None:  # it is refused on other devices
            continue
        found = error_of(specialize(function), args)
        assert isinstance(found, type(expected)), (op.name, expected, found)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_program_raises_the_class_of_its_function(name: str) -> None:
    for op in ENTRIES:
        if op.name == name:
            check_errors(op)


def test_programs_of_some_operators_raise_the_class_of_their_function() -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    for op in random.Random(seed).sample(ENTRIES, 10):
        check_errors(op)


@pytest.mark.slow
@pytest.mark.parametrize("op", ENTRIES, ids=lambda op: str(op.formatted_name))
def test_programs_of_the_database_raise_the_class_of_their_function(op: Any) -> None:
    check_errors(op)


@pytest.mark.parametrize("sizes", [(5, 3), ("n", 3), ("n", "m")], ids=str)
def test_a_function_handles_the_error_of_a_view(sizes: tuple[Any, ...]) -> None:
    def flat(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            return x.view(-1)
        return x.reshape(-1) * 2

    x = torch.rand(5, 4)[:, :3]
    program = specialize(flat, {"x": MetaTensorType(sizes)})
    torch.testing.assert_close(program(x), flat(x))
    torch.testing.assert_close(program(x.contiguous()), flat(x.contiguous()))
