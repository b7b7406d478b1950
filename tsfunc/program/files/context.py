"""What reading a file needs beside its entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tsfunc.program.files.state import State
from tsfunc.program.files.tensors import TensorReader


@dataclass(frozen=True)
class Context:
    """What reading a file needs beside its entries.

    Attributes:
        tensors: the file's.
        classes: what names of classes stand for.
        device: takes the place of every device, if it is given.
        made_with: the torch version that the file was made with.
        state: what programs assign to.
        version: of the format.
    """

    tensors: TensorReader
    classes: Mapping[str, type]
    device: torch.device | None
    made_with: str
    state: State
    version: int
