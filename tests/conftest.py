"""Fixtures of every test: a device, repeatable random numbers, one thread, hypothesis' profile."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import register_random, settings

from tsfunc.bridge import compiled

TORCH_SEED = 0
HYPOTHESIS_SEED = "hypothesis_seed"

torch.set_num_threads(1)

# Every program of a test is verified after its trace and after each pass.
os.environ["TSFUNC_VERIFY"] = "1"

# The tests do not write to the user's own record; tests of the record set another folder.
os.environ["TSFUNC_RAGE"] = "off"

# Generated examples differ from run to run; a failure prints the seed.
settings.register_profile("tsfunc", deadline=None, print_blob=True)
settings.load_profile("tsfunc")


class TorchRandom:
    """Lets hypothesis restore torch's generator, so that each example starts from one state."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


# hypothesis has a weak reference, so keep it.
_torch_random = TorchRandom()
register_random(_torch_random)


def _device() -> torch.device:
    return torch.device(os.environ.get("TSFUNC_DEVICE") or "cpu")


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its seed
def _lacks_handlers() -> bool:
    """True if the compiled handlers are not built, though there is a compiler."""
    if compiled.library_path().exists():
        return False
    try:
        compiled.command(compiled.library_path())
    except FileNotFoundError:
        return False
    return True


def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed that the header prints; pytest-xdist passes it on to its workers."""
    if getattr(config.option, HYPOTHESIS_SEED, None) is None:
        setattr(config.option, HYPOTHESIS_SEED, str(random.SystemRandom().randrange(2**32)))
    if os.environ.get(compiled.SWITCH) == "1" and _lacks_handlers():
        raise pytest.UsageError(
            f"{compiled.SWITCH}=1: expected compiled handlers, got no {compiled.library_path()}. "
            f"Run python -m tsfunc build."
        )
    try:
        torch.empty(0, device=_device())
    except (AssertionError, NotImplementedError, RuntimeError) as e:
        raise pytest.UsageError(
            f"TSFUNC_DEVICE={os.environ.get('TSFUNC_DEVICE')}: torch can't use it here: {e}"
        ) from e


def pytest_collection_finish() -> None:
    """Exclude modules and collected tests, a million objects, from garbage collections.

    A full collection takes half a second with these objects, and many tests collect.
    """
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = getattr(config.option, HYPOTHESIS_SEED)
    return [
        f"torch {torch.__version__}, device {_device()}, {torch.get_num_threads()} thread",
        f"seeds: torch {TORCH_SEED}; hypothesis {seed} (repeat with --hypothesis-seed={seed})",
    ]


@pytest.fixture(scope="session", autouse=True)
def device() -> Iterator[torch.device]:
    """The device under test (``TSFUNC_DEVICE``), on which factories make their tensors, too."""
    chosen = _device()
    if chosen.type == "cpu":
        yield chosen
        return
    torch.set_default_device(chosen)
    yield chosen
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def torch_seed() -> None:
    """Every test sees the same random numbers, independent of earlier tests."""
    torch.manual_seed(TORCH_SEED)
