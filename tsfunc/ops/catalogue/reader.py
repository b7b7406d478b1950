"""What this room asks of torch's operators, which only the bridge can look into.

``tsfunc.bridge.schemas`` installs the one reader there is when ``tsfunc`` is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tsfunc.ops.catalogue.signature import Signature


@dataclass(frozen=True)
class Reader:
    """How operators are looked into.

    Attributes:
        name: the dispatcher name of an overload, or of what ``custom_op`` gave.
        signature: the schema of a dispatcher name, or None where torch has no such operator.
        overloads: the schemas of all overloads of a packet (``aten::add``).
        names: all overloads of a namespace; of every namespace where it is empty.
        fake: whether an operator has a fake kernel of its own, in Python.
        vmap_rule: what was registered with ``torch.library.register_vmap``, or None.
    """

    name: Callable[[Any], str]
    signature: Callable[[str], Signature | None]
    overloads: Callable[[str], Iterable[Signature]]
    names: Callable[[str], list[str]]
    fake: Callable[[str], bool]
    vmap_rule: Callable[[str], Any]


_installed: list[Reader] = []


def install(reader: Reader) -> None:
    """Gives this room its reader."""
    _installed[:] = [reader]


def reader() -> Reader:
    """The reader that ``import tsfunc`` has installed."""
    return _installed[0]
