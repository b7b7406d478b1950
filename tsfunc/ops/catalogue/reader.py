"""The interface by which the catalogue inspects torch's operators; the bridge implements it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tsfunc.ops.catalogue.signature import Reader

_loaders: list[Callable[[], Reader]] = []


def install(load: Callable[[], Reader]) -> None:
    """Set the function that loads the reader at its first use."""
    _loaders[:] = [load]


@functools.lru_cache(maxsize=1)
def reader() -> Reader:
    """Return the reader of operators that ``import tsfunc`` installs."""
    return _loaders[0]()
