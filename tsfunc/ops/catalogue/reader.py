"""What the catalogue asks of torch's operators, which only the bridge can look into."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tsfunc.ops.catalogue.signature import Reader

_loaders: list[Callable[[], Reader]] = []


def install(load: Callable[[], Reader]) -> None:
    """Has ``load`` called for the reader when one is asked for first."""
    _loaders[:] = [load]


@functools.lru_cache(maxsize=1)
def reader() -> Reader:
    """How operators are looked into, as ``import tsfunc`` has installed it."""
    return _loaders[0]()
