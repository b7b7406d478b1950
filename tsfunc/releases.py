"""The releases of torch and Python that the package was tested with.

The module is private.
"""

from __future__ import annotations

import re
import warnings

from tsfunc.errors import UntestedTorchWarning

# The quick suite passed with each of them.
TESTED_TORCH = ("2.13.0", "2.14.1")


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 14, 1) for "2.14.1+cu130"."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def warn_if_untested(version: str) -> None:
    """Warn if a version of torch is newer than every release that the package was tested with."""
    newest = max(TESTED_TORCH, key=release)
    if release(version) > release(newest):
        warnings.warn(
            f"tsfunc was tested with torch up to {newest}, got torch {version}, which may have "
            f"changed what tsfunc relies on. `python -m tsfunc doctor` checks it.",
            UntestedTorchWarning,
            stacklevel=3,
        )
