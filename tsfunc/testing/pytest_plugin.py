"""A pytest plugin: seeds that can be repeated, a search for NaNs, and warnings that fail a test.

Load it with ``pytest -p tsfunc.testing.pytest_plugin``, or in ``conftest.py`` of the root folder::

    pytest_plugins = ["tsfunc.testing.pytest_plugin"]

Options of pytest:

``--tsfunc-seed N``
    The seed of every test that uses the fixture ``tsfunc_seed``.
``--tsfunc-nans``
    Each test fails at the first operator that returns a NaN (:func:`tsfunc.debug.nans`).
``--tsfunc-strict``
    A ``SlowFallbackWarning`` or a ``RetraceWarning`` fails the test.

Fixture ``tsfunc_seed``: an int that is fresh in each run and seeds torch's and Python's generators.
The report of a failed test shows it.
"""

from __future__ import annotations

import random
import secrets
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tsfunc.errors import RetraceWarning, SlowFallbackWarning
from tsfunc.transforms import debug

_SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tsfunc")
    group.addoption("--tsfunc-seed", type=int, default=None, help="the seed of tsfunc_seed")
    group.addoption("--tsfunc-nans", action="store_true", help="fail at the first NaN")
    group.addoption(
        "--tsfunc-strict", action="store_true", help="fail on slow fallbacks and on retraces"
    )


@pytest.fixture
def tsfunc_seed(request: pytest.FixtureRequest) -> int:
    """Return a fresh seed, or that of ``--tsfunc-seed``, and seed torch and Python with it."""
    option: int | None = request.config.getoption("--tsfunc-seed")
    seed = secrets.randbelow(2**31) if option is None else option
    request.node.stash[_SEED] = seed
    random.seed(seed)
    torch.manual_seed(seed)
    return seed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run a test under the chosen options."""
    with warnings.catch_warnings():
        if item.config.getoption("--tsfunc-strict"):
            for category in (SlowFallbackWarning, RetraceWarning):
                warnings.simplefilter("error", category)
        if item.config.getoption("--tsfunc-nans"):
            with debug.nans():
                return (yield)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """Add the seed to the report of a failed test."""
    report: Any = yield
    seed = item.stash.get(_SEED, None)
    if seed is not None and report.failed:
        report.sections.append(("tsfunc", f"repeat it with --tsfunc-seed {seed}"))
    return report
