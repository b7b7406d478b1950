"""The pytest plugin: failures under its options, and seeds that repeat them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import torch
import tsfunc


def test_seed(tsfunc_seed):
    print("drew", torch.rand(()).item(), tsfunc_seed)
    assert False


def test_nan():
    tsfunc.vmap(torch.log)(torch.tensor([1.0, -1.0]))


def test_retrace():
    f = tsfunc.specialize(lambda x, k: x.sum(k))
    for k in (0, 1, 2):
        f(torch.ones(2, 2, 2), k)


def test_fine():
    assert tsfunc.vmap(torch.sin)(torch.zeros(2)).sum() == 0
"""


def run(folder: Path, *options: str) -> str:
    (folder / "test_users.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tsfunc.testing.pytest_plugin", "-p",
               "no:cacheprovider", "-q", "-rA", *options]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    return done.stdout + done.stderr


def outcomes(text: str) -> dict[str, str]:
    return {
        name: word
        for word, name in re.findall(r"^(PASSED|FAILED) test_users.py::(\w+)", text, re.M)
    }


def test_a_failure_names_its_seed_and_can_be_repeated(tmp_path: Path) -> None:
    first = run(tmp_path, "-k", "seed")
    (seed,) = re.findall(r"repeat it with --tsfunc-seed (\d+)", first)
    again = run(tmp_path, "-k", "seed", "--tsfunc-seed", seed)
    drawn = [re.findall(r"drew (\S+) (\d+)", text)[0] for text in (first, again)]
    assert drawn[0] == drawn[1] and drawn[0][1] == seed


@pytest.mark.parametrize(
    ("option", "failed", "message"),
    [
        ("--tsfunc-nans", "test_nan", "log returned a NaN in example 1 of vmap(log)"),
        ("--tsfunc-strict", "test_retrace", "k varies, and each value is traced again"),
    ],
)
def test_an_option_fails_the_tests_that_it_selects(
    tmp_path: Path, option: str, failed: str, message: str
) -> None:
    assert outcomes(run(tmp_path, "-k", "not seed")) == dict.fromkeys(
        ("test_nan", "test_retrace", "test_fine"), "PASSED"
    )
    text = run(tmp_path, "-k", "not seed", option)
    found = outcomes(text)
    assert [name for name, word in found.items() if word == "FAILED"] == [failed]
    assert message in text
