"""Environments of symbolic sizes are freed with the traces that used them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import Dim, load, specialize
from tsfunc import MetaTensorType as Meta
from tsfunc.bridge.sizes.shape_environment import environment_class
from tsfunc.errors import ConstraintViolation

FILE = Path(__file__).parents[1] / "program" / "files" / "containers.tsf"


@contextmanager
def none_kept() -> Iterator[None]:
    """Context manager: check that environments made in the block are freed after it."""
    made: list[weakref.ref[Any]] = []
    cls = environment_class()
    begin = cls.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(weakref.ref(self))
        begin(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "__init__", noted)
        yield
    for _ in range(3):  # objects with finalizers need another collection
        gc.collect()
    assert made and not [env for env in made if env() is not None]


def test_nothing_keeps_that_of_a_file_that_was_read() -> None:
    with none_kept():
        load(FILE)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "none of its sizes": lambda x: x.sin(),
    "slices": lambda x: x[:5] + x[-5:],
    "sizes among indices": lambda x: x[x.shape[0] // 2 :],
    "sizes as numbers": lambda x: x * x.shape[0],
    "reshaped": lambda x: x.reshape(2, -1) if x.shape[0] % 2 == 0 else x,
    "parts": lambda x: x.chunk(2)[0],
    "windows": lambda x: torch.nn.functional.max_pool1d(x[None], 3),
    "sizes of data": lambda x: x.nonzero() * x.sum().item(),
    "writes": lambda x: x.clone().t_().add_(1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_keeps_that_of_a_trace(name: str) -> None:
    even = {"x": Meta([Dim("n", multiple_of=2)])}
    with none_kept():
        for size in (8, 10):
            f = specialize(FUNCTIONS[name], even)
            f(torch.randn(size))
            del f


def test_nothing_keeps_that_of_a_trace_that_failed() -> None:
    with none_kept(), pytest.raises(ConstraintViolation):
        specialize(lambda x: x * len(x) if len(x) > 3 else x, {"x": Meta(["n"])})(torch.ones(5))
