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
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.transforms.test_soundness import ONES
from tsfunc import specialize
from tsfunc.errors import ReadOnceWarning

# A function, what changes its answer, and what undoes that.
Case = tuple[Callable[[Tensor], Any], Callable[[], Any], Callable[[], Any]]


def named() -> None:
    """A function that is asked what it is called."""


class Named:
    scale = 2.0


def nothing() -> None:
    pass


def settings() -> Iterator[tuple[str, Case]]:
    context, precision = decimal.getcontext(), decimal.getcontext().prec

    def rounds(digits: int) -> None:
        context.prec = digits

    put = functools.partial(rounds, 2), functools.partial(rounds, precision)
    yield "decimal", (lambda x: x * float(Decimal(1) / Decimal(3)), *put)
    third = Decimal(1)
    yield "a decimal number", (lambda x: x * float(third / 3), *put)
    folder = os.getcwd()
    yield "the folder", (
        lambda x: x * len(os.path.abspath("a")), lambda: os.chdir("/"), lambda: os.chdir(folder),
    )  # fmt: skip
    key = "READ_LIBRARIES"
    yield "a path with a variable", (
        lambda x: x * len(os.path.expandvars("$READ_LIBRARIES")),
        lambda: os.environ.update({key: "a"}), lambda: os.environ.pop(key),
    )  # fmt: skip
    yield "sys.path", (
        lambda x: x * len(sys.path), lambda: sys.path.append("here"), lambda: sys.path.pop(),
    )  # fmt: skip
    old = np.geterr()
    yield "how NumPy warns", (
        lambda x: x * len(np.geterr()["divide"]), lambda: np.seterr(divide="raise"),
        lambda: np.seterr(**old),
    )  # fmt: skip
    fill: Any = torch.utils.deterministic
    put_fill = functools.partial(setattr, fill, "fill_uninitialized_memory")
    yield "a flag that torch makes up", (
        lambda x: x * (2 if fill.fill_uninitialized_memory else 3),
        lambda: put_fill(False), lambda: put_fill(True),
    )  # fmt: skip
    thread = threading.current_thread()
    name = thread.name
    yield "the name of a thread", (
        lambda x: x * len(threading.current_thread().name),
        lambda: setattr(thread, "name", "another name"), lambda: setattr(thread, "name", name),
    )  # fmt: skip


def states() -> Iterator[tuple[str, Case]]:
    lock, line, items = threading.Lock(), threading.Semaphore(2), queue.SimpleQueue[int]()
    logger = logging.getLogger("read_libraries")
    yield "a lock", (lambda x: x * (3 if lock.locked() else 2), lock.acquire, nothing)
    yield "a semaphore", (lambda x: x * (3 if line._value < 2 else 2), line.acquire, nothing)
    yield "a queue", (lambda x: x * (2 if items.empty() else 3), lambda: items.put(1), nothing)
    yield "a logger", (
        lambda x: x * (3 if logger.isEnabledFor(logging.DEBUG) else 2),
        lambda: logger.setLevel(logging.DEBUG), lambda: logger.setLevel(logging.NOTSET),
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
    return {name: case for part in (settings, states, members) for name, case in part()}


@pytest.mark.parametrize("what", cases())
def test_what_changes_is_seen(what: str) -> None:
    f, change, undo = cases()[what]
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


NOISE = random.SystemRandom()
PATH = pathlib.Path(__file__)
CHANGING: dict[str, Callable[[Tensor], Any]] = {
    "SystemRandom.random": lambda x: x * NOISE.random(),
    "Random": lambda x: x * random.Random().random(),
    "default_rng": lambda x: x * np.random.default_rng().random(),
    r"PosixPath.read_text": lambda x: x * len(PATH.read_text()),
    "exists": lambda x: x * os.path.exists(__file__),
    "listdir": lambda x: x * len(os.listdir(".")),
}


@pytest.mark.parametrize("what", CHANGING)
def test_what_may_change_by_itself_is_told_of(what: str) -> None:
    with pytest.warns(ReadOnceWarning, match=f"{what} may give something else") as told:
        specialize(CHANGING[what])(ONES)
    assert told[0].filename == __file__


def test_generators_with_a_seed_of_the_functions_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f = specialize(lambda x: x * random.Random(1).random() * np.random.default_rng(0).random())
        assert f(ONES).equal(f(ONES))
