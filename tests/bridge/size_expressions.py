"""Expressions over sizes, as a trace has them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from sympy import Symbol
from torch.utils._sympy.functions import FloorDiv, PythonMod

H, W = (Symbol(name, integer=True, positive=True) for name in "hw")


def expressions() -> st.SearchStrategy[Any]:
    steps = st.integers(1, 5)
    return st.recursive(
        st.sampled_from([H, W]) | st.integers(-3, 6).map(lambda n: H * 0 + n),
        lambda inner: st.one_of(
            st.builds(lambda a, b: a + b, inner, inner),
            st.builds(lambda a, b: a - b, inner, inner),
            st.builds(lambda a, b: a * b, inner, inner),
            st.builds(FloorDiv, inner, steps),
            st.builds(PythonMod, inner, steps),
        ),
        max_leaves=5,
    )
