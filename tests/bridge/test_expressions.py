"""Expressions over sizes as Python, for readers and for guards."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from sympy import Integer
from torch.utils._sympy.functions import FloorDiv, Max, Min, PythonMod

from tests.bridge.size_expressions import H, W, expressions
from tsfunc.bridge.sizes.expressions import code_text, python_text


def test_plain_cases() -> None:
    assert python_text(H - 3 * FloorDiv(W + 1, 2)) == "h - 3*((w + 1) // 2)"
    assert python_text(H + PythonMod(-H, 4)) == "h + ((-h) % 4)"
    assert python_text(1 - H * FloorDiv(W, 2)) == "-h*(w // 2) + 1"
    assert python_text(Max(H, W) - Min(H, 2)) == "max(h, w) - min(2, h)"


@given(expressions())
def test_both_are_the_expression(expr: Any) -> None:
    for text in (python_text(expr), code_text(expr)):
        for h, w in itertools.product((2, 3, 7), (2, 5)):
            value = Integer(expr.subs({H: h, W: w}))
            assert eval(text, {}, {"h": h, "w": w}) == value
    assert "(-1)" not in python_text(expr)
