"""Environments of symbolic sizes do not outlive what was traced in them."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tsfunc import load
from tsfunc.bridge.sizes.shape_environment import environment_class

FILE = Path(__file__).parents[1] / "program" / "files" / "format_1.tsf"


def test_nothing_keeps_that_of_a_file_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []
    cls = environment_class()
    begin = cls.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(weakref.ref(self))
        begin(self, *args, **kwargs)

    monkeypatch.setattr(cls, "__init__", noted)
    load(FILE)
    # torch's cache of the last 256 answers, whosoever they are of.
    inner: Any = ShapeEnv._inner_evaluate_expr
    inner.cache_clear()
    for _ in range(3):  # what has a finalizer takes another round
        gc.collect()
    assert made and not [env for env in made if env() is not None]
