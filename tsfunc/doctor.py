"""The command ``tsfunc doctor``: versions, devices, and checks of torch's private names.

The command is public, the module is private.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass

import torch

from tsfunc import releases
from tsfunc._text import count_text
from tsfunc.bridge import compiled
from tsfunc.bridge.private_names import PRIVATE_NAMES

_PACKAGES = "optree platformdirs rich safetensors typer sympy numpy".split()


@dataclass(frozen=True)
class Report:
    """The result of :func:`examine`.

    Attributes:
        facts: label and value of each fact about the installation.
        failures: a line for each private name of torch that is missing or behaves differently.
        checked: the number of names that were checked.
    """

    facts: tuple[tuple[str, str], ...]
    failures: tuple[str, ...]
    checked: int

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.facts)
        lines = [f"{label.ljust(width)}  {value}" for label, value in self.facts]
        if self.failures:
            lines.append(f"\n{len(self.failures)} of torch's private names failed their check:")
            lines += [f"  {line}" for line in self.failures]
        return "\n".join(lines)


def examine() -> Report:
    """Collect facts about the installation, and check torch's private names.

    Returns:
        The report. Its ``str`` is the output of the command.

    Example:
        >>> examine().failures
        ()
    """
    failures = tuple(line for entry in PRIVATE_NAMES for line in entry.check())
    checked = sum(len(entry.names) for entry in PRIVATE_NAMES)
    good = "all as expected" if not failures else f"{len(failures)} failed"
    facts = [
        ("tsfunc", _version("tsfunc")),
        ("torch", f"{torch.__version__} ({_tested_releases()})"),
        ("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("system", platform.platform()),
        *((name, _version(name)) for name in _PACKAGES),
        ("backends", "python, aot_eager, inductor" if _compiler() else "python, aot_eager"),
        ("handlers", _handlers()),
        ("C++ compiler", _compiler() or "not found: the backend inductor needs one"),
        ("devices", ", ".join(_devices())),
        ("private names", f"{checked} checked, {good}"),
    ]
    return Report(tuple(facts), failures, checked)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _tested_releases() -> str:
    tested = ", ".join(releases.TESTED_TORCH)
    release = torch.__version__.partition("+")[0]
    return "tested" if release in releases.TESTED_TORCH else f"not tested; tested are {tested}"


def _handlers() -> str:
    """Return a description of the code that handles batched tensors: compiled or Python."""
    if not compiled.is_enabled():
        return f"Python ({compiled.SWITCH}=0)"
    if compiled.library_path().exists():
        return "compiled"
    return "Python (python -m tsfunc build compiles them)"


def _compiler() -> str | None:
    names = [os.environ.get("CXX", ""), "g++", "clang++", "cl"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _devices() -> list[str]:
    devices = [f"cpu ({count_text(torch.get_num_threads(), 'thread')})"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        devices += [f"{kind}:{i}" for i in range(torch.accelerator.device_count())]
    return devices
