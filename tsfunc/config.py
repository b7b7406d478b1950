"""Settings of the process: ``tsfunc.config.traceback = "full"``.

The object ``tsfunc.config`` is public, the module is private.
"""

from __future__ import annotations

import logging
import os
from typing import Literal, get_args

Traceback = Literal["filtered", "full"]
LOGS = ("retraces", "guards", "code")


def log_to_stderr(names: str) -> None:
    """Write some of the package's logs to stderr.

    Args:
        names: names of ``LOGS``, separated by commas; empty for none.

    Raises:
        ValueError: there is no log of a name.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in LOGS:
            raise ValueError(
                f"TSFUNC_LOG: expected names of {', '.join(LOGS)}, separated by commas, "
                f"got {name!r}."
            )
    if chosen:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        for name in chosen:
            logger = logging.getLogger(f"tsfunc.{name}")
            logger.setLevel(logging.INFO)
            logger.addHandler(handler)


class Config:
    """The settings of tsfunc; the only instance is ``tsfunc.config``.

    Each setting has an environment variable, which is read when tsfunc is imported.

    Example:
        >>> import tsfunc
        >>> tsfunc.config.traceback
        'filtered'
    """

    __slots__ = ("_traceback", "debug_nans_set")

    def __init__(self) -> None:
        log_to_stderr(os.environ.get("TSFUNC_LOG", ""))
        self.debug_nans = os.environ.get("TSFUNC_DEBUG_NANS", "") not in ("", "0")
        self.traceback = os.environ.get("TSFUNC_TRACEBACK", "filtered")  # type: ignore[assignment]

    @property
    def traceback(self) -> Traceback:
        """The frames that a traceback shows: ``"filtered"`` or ``"full"``.

        ``"filtered"`` shows the user's frames only; ``"full"`` also shows those of the library.
        The environment variable is ``TSFUNC_TRACEBACK``. The setting corresponds to
        ``jax_traceback_filtering``.

        Raises:
            ValueError: another value is assigned.
        """
        return self._traceback

    @traceback.setter
    def traceback(self, value: Traceback) -> None:
        if value not in get_args(Traceback):
            raise ValueError(
                f"tsfunc.config.traceback: expected 'filtered' or 'full', got {value!r}."
            )
        self._traceback = value

    @property
    def debug_nans(self) -> bool:
        """True if every transform and program looks for NaNs, as :func:`tsfunc.debug.nans` does.

        The default is False. The environment variable is ``TSFUNC_DEBUG_NANS=1``. The setting
        corresponds to ``jax_debug_nans``.

        Raises:
            TypeError: a value other than a bool is assigned.
        """
        return self.debug_nans_set

    @debug_nans.setter
    def debug_nans(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"tsfunc.config.debug_nans: expected a bool, got {value!r}.")
        self.debug_nans_set = value

    def __repr__(self) -> str:
        settings = f"traceback={self._traceback!r}, debug_nans={self.debug_nans_set!r}"
        return f"tsfunc.config({settings})"


config = Config()
