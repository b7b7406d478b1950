"""Settings of the process: ``tsfunc.config.traceback = "full"``."""

from __future__ import annotations

import os
from typing import Literal, get_args

Traceback = Literal["filtered", "full"]


class Config:
    """The settings of tsfunc; the only instance is ``tsfunc.config``.

    Each setting has an environment variable, which is read when tsfunc is imported.

    Example:
        >>> import tsfunc
        >>> tsfunc.config.traceback
        'filtered'
    """

    __slots__ = ("_traceback",)

    def __init__(self) -> None:
        self.traceback = os.environ.get("TSFUNC_TRACEBACK", "filtered")  # type: ignore[assignment]

    @property
    def traceback(self) -> Traceback:
        """Frames shown in tracebacks: ``"filtered"`` (the user's only) or ``"full"`` (all frames).

        The environment variable is ``TSFUNC_TRACEBACK``. JAX's counterpart is
        ``jax_traceback_filtering``.

        Raises:
            ValueError: on assignment of another value.
        """
        return self._traceback

    @traceback.setter
    def traceback(self, value: Traceback) -> None:
        if value not in get_args(Traceback):
            raise ValueError(
                f"tsfunc.config.traceback: expected 'filtered' or 'full', got {value!r}."
            )
        self._traceback = value

    def __repr__(self) -> str:
        return f"tsfunc.config(traceback={self._traceback!r})"


config = Config()
