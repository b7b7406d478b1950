"""The context in which the entries of a file are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tsfunc.program.files.state import CellState
from tsfunc.program.files.tensors import TensorReader


@dataclass(frozen=True)
class FileContext:
    """The context in which the entries of a file are read.

    Attributes:
        tensors: the tensors of the file.
        classes: the classes of the file, by name.
        device: replaces every device of the file, if it is given.
        made_with: the torch version that the file was made with.
        state: the state that programs assign to.
        version: the version of the format.
    """

    tensors: TensorReader
    classes: Mapping[str, type]
    device: torch.device | None
    made_with: str
    state: CellState
    version: int
