"""Constraints on sizes as text: accepted and refused texts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsfunc.errors import DescriptorError
from tsfunc.types.size_constraints import constraint_code

NAMES = {"n": "size_n", "m": "size_m"}


@pytest.mark.parametrize(
    "text",
    [
        "n == m",
        "n % 2 == 0 and not (n > m or m >= 3)",
        "math.floor(n / 2) > 1",
        "0.5 * float(n) > 1.5",
        "min(n, m) ** 2 <= max(-n, 3) - n // m",
        "n ** -0.5 < round(m * 0.3)",
    ],
)
@given(n=st.integers(2, 50), m=st.integers(2, 50))
def test_it_has_the_documented_meaning(text: str, n: int, m: int) -> None:
    code = constraint_code(text, NAMES)
    here = eval(text, {"math": math, "n": n, "m": m})
    assert eval(code, {"math": math, "size_n": n, "size_m": m}) == here


@pytest.mark.parametrize(
    "text",
    [
        "n",
        "n + 1",
        "k == 1",
        "n == 'a'",
        "n == True",
        "n == 1j",
        "n == 9223372036854775808",
        "n == 1e999",
        "n ** m == 1",
        "n ** 9 == 1",
        "n ** -m == 1",
        "n < m < 3",
        "n in (1, 2)",
        "(lambda: n)() == 1",
        "__import__('os') == 1",
        "math.exit(n) == 1",
        "n.real == 1",
        "n[0] == 1",
        "min(*n) == 1",
        "round(n, ndigits=m) == 1",
        "[n for n in m] == 1",
        "(n := 3) == 1",
        "n == 1; m == 2",
        "",
        "n ==",
        "\0",
        "(" * 150 + "n" + ")" * 150,
        "n == " + "-" * 1990 + "1",
        "n == 1 " * 1000,
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(DescriptorError):
        constraint_code(text, NAMES)
