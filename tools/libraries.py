"""Imports of other libraries that need help with a CPU build of torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch


def load_torchvision() -> None:
    """Import torchvision if it is installed, even if its C++ operators do not load.

    Its wheels on PyPI are for CUDA. With a CPU build of torch, two of its operators fail in Python;
    the models of the tests and benchmarks call neither.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", schema)
        importlib.import_module("torchvision")
