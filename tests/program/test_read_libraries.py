"""Reads of libraries in a trace: their settings, stateful objects, files, random numbers."""

from __future__ import annotations

import decimal
import functools
import logging
import os
import pathlib
import queue
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tsfunc
from tests.transforms.test_soundness import ONES
from tsfunc import specialize
from tsfunc.errors import ReadOnceWarning, TypeCheckError
from tsfunc.program.calling.retrace_reasons import UNSEEN

# A function, a change of its answer, and a function that undoes the change.
Case = tuple[Callable[[Tensor], Any], Callable[[], Any], Callable[[], Any]]


def named() -> None:
    """A function that returns its own name."""


class Named:
    scale = 2.0


def nothing() -> None:
    pass


def settings() -> Iterator[tuple[str, Case]]:
    key = "READ_LIBRARIES"
    yield "a variable of the environment", (
        lambda x: x * len(os.getenv("READ_LIBRARIES", "")),
        lambda: os.environ.update({key: "a"}), lambda: os.environ.pop(key),
    )  # fmt: skip
    yield "sys.path", (
        lambda x: x * len(sys.path), lambda: sys.path.append("here"), lambda: sys.path.pop(),
    )  # fmt: skip
    fill: Any = torch.utils.deterministic
    put_fill = functools.partial(setattr, fill, "fill_uninitialized_memory")
    yield "a flag that torch makes up", (
        lambda x: x * (2 if fill.fill_uninitialized_memory else 3),
        lambda: put_fill(False), lambda: put_fill(True),
    )  # fmt: skip


def members() -> Iterator[tuple[str, Case]]:
    name = functools.partial(setattr, named, "__name__")
    yield "a function's name", (
        lambda x: x * len(named.__name__), lambda: name("another"), lambda: name("named"),
    )  # fmt: skip
    put = functools.partial(setattr, Named, "scale")
    yield "a class's __dict__", (
        lambda x: x * Named.__dict__["scale"], lambda: put(3.0), lambda: put(2.0),
    )  # fmt: skip
    weight: Any = torch.ones(2)
    yield "what a tensor gets later", (
        lambda x: x * getattr(weight, "factor", 2.0), lambda: setattr(weight, "factor", 3.0),
        nothing,
    )  # fmt: skip
    plain = torch.ones(2)
    yield "a tensor that becomes a parameter", (
        lambda x: x * (3 if isinstance(plain, nn.Parameter) else 2),
        lambda: setattr(plain, "__class__", nn.Parameter), nothing,
    )  # fmt: skip


def cases() -> dict[str, Case]:
    return {name: case for part in (settings, members) for name, case in part()}


# The changes that the reason of the new program does not name: of a value without a name in the
# function, and of the class of a tensor, which the program keeps and so has the new class too.
NO_NAME = {"what a tensor gets later", "a tensor that becomes a parameter"}


@pytest.mark.parametrize("what", cases())
def test_changes_are_seen(what: str) -> None:
    f, change, undo = cases()[what]
    specialize(torch.sin)(ONES)  # the first trace loads modules, which set variables
    before = f(ONES)
    g = specialize(f)
    for _ in range(2):
        assert g(ONES).equal(before)
    assert g.cache_info().programs == 1
    change()
    try:
        now = f(ONES)
        assert not now.equal(before)
        for _ in range(2):
            assert g(ONES).equal(now)
    finally:
        undo()
    assert g.cache_info().programs == 2
    assert (UNSEEN in str(g.cache_info())) == (what in NO_NAME)


NOISE = random.SystemRandom()
PATH = pathlib.Path(__file__)
CHANGING: dict[str, Callable[[Tensor], Any]] = {
    "SystemRandom.random": lambda x: x * NOISE.random(),
    "Random": lambda x: x * random.Random().random(),
    "default_rng": lambda x: x * np.random.default_rng().random(),
    r"PosixPath.read_text": lambda x: x * len(PATH.read_text()),
    "exists": lambda x: x * os.path.exists(__file__),
    "listdir": lambda x: x * len(os.listdir(".")),
    "abspath": lambda x: x * len(os.path.abspath("a")),
    "getcwd": lambda x: x * len(os.getcwd()),
    "expandvars": lambda x: x * len(os.path.expandvars("$READ_LIBRARIES")),
    "geterr": lambda x: x * len(np.geterr()["divide"]),
    "current_thread": lambda x: x * len(threading.current_thread().name),
    "getcontext": lambda x: x * decimal.getcontext().prec,
}


@pytest.mark.parametrize("what", CHANGING)
def test_functions_that_may_change_give_a_warning(what: str) -> None:
    with pytest.warns(ReadOnceWarning, match=f"{what} may give something else") as told:
        specialize(CHANGING[what])(ONES)
    assert told[0].filename == __file__


def test_an_object_of_a_library_is_guarded_by_identity() -> None:
    """A lock, an event, a queue or a logger with another state is the same object."""
    lock, event, items = threading.Lock(), threading.Event(), queue.SimpleQueue[int]()
    logger = logging.getLogger("read_libraries")
    variable: Any = None

    def f(x: Tensor) -> Tensor:
        return x * (3 if variable is None else 2)

    for variable in (lock, event, items, logger):
        g = specialize(f)
        assert g(ONES).equal(ONES * 2)
        lock.acquire(blocking=False)
        event.set()
        items.put(1)
        logger.disabled = not logger.disabled
        assert g(ONES).equal(ONES * 2) and g.cache_info().programs == 1
        variable = None
        assert g(ONES).equal(ONES * 3) and g.cache_info().programs == 2
    logger.disabled = False


SCALE = 2.0


def scaled(x: Tensor) -> Tensor:
    return x * SCALE if x.is_leaf else x


def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x


FILES = [torch.__file__, torch.nn.functional.__file__, tsfunc.__file__, os.__file__, "<string>", ""]


@pytest.mark.parametrize("file", FILES)
def test_the_file_of_the_code_decides_nothing(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    f = types.FunctionType(scaled.__code__.replace(co_filename=file), globals())
    g = specialize(f)
    leaf = torch.ones(2, requires_grad=True)
    assert g(leaf).equal(ONES * 2)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert g(leaf).equal(ONES * 3) and g.cache_info().programs == 2
    assert g(leaf * 1).equal(ONES) and g.cache_info().programs == 3
    h = types.FunctionType(seeds.__code__.replace(co_filename=file), globals())
    with pytest.raises(TypeCheckError, match="seed"):
        specialize(h)(ONES)


def test_generators_with_a_seed_of_the_functions_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f = specialize(lambda x: x * random.Random(1).random() * np.random.default_rng(0).random())
        assert f(ONES).equal(f(ONES))
