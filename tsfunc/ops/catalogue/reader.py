"""The interface by which the catalogue inspects torch's operators; the bridge implements it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tsfunc import hooks

if TYPE_CHECKING:
    from tsfunc.ops.catalogue.signature import Reader


@functools.lru_cache(maxsize=1)
def reader() -> Reader:
    """Return the reader of operators that ``import tsfunc`` provides."""
    return hooks.catalogue_reader.provided()
