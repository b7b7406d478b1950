"""Constructs that are a single expression.

In a template ``{x}`` is a tensor of floats, ``{y}`` one that broadcasts to it, ``{n}`` a number,
``{m}`` a mask in the shape of ``{x}``, ``{d}`` and ``{e}`` dims of it, ``{o}`` a tensor of another
dtype than float64, ``{z}`` a complex one. A statement that torch
refuses is drawn again, so a template may fail for some shapes.
"""

from __future__ import annotations

import re

from tools.fuzz.draw import Construct, Draw


def template(text: str) -> Construct:
    """Return the construct of an expression."""

    def construct(d: Draw) -> None:
        x = d.float(min_rank=1 if re.search(r"\{[de]\}", text) else 0)
        found = {"x": x, "n": d.number(), "m": d.mask(x)}
        for letter, kind in (("o", "other"), ("z", "complex")):
            if f"{{{letter}}}" in text:
                found[letter] = d.variable(kind)
        if "{y}" in text:
            found["y"] = d.like(x)
        if "{d}" in text:
            found["d"] = str(d.dim(x))
        if "{e}" in text:
            found["e"] = str(d.dim(x))
        d.let(text.format(**found))

    construct.__name__ = text
    return construct


def templates(text: str) -> list[Construct]:
    return [template(line.strip()) for line in text.strip().splitlines()]
