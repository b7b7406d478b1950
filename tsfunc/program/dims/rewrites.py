"""Rewrites of lines that convert a named dim to a Python number, so that it stays symbolic."""

from __future__ import annotations

import re
from collections.abc import Iterable

_REWRITES = {
    "len": "x.shape[0] for len(x)",
    "int": "n // 2 for int(n / 2), torch.sym_int(y) for int(y)",
    "float": "torch.sym_float(n) for float(n)",
    "range": "tsfunc.fori_loop, tsfunc.scan or tsfunc.map for a loop over range(n)",
    "min": "torch.sym_min(a, b) for min(a, b)",
    "max": "torch.sym_max(a, b) for max(a, b)",
    "math.sqrt": "n ** 0.5 for math.sqrt(n)",
    "math.pow": "n ** p for math.pow(n, p)",
    "math.log": "torch.tensor(n).log() for math.log(n)",
    "math.log2": "torch.tensor(n).log2() for math.log2(n)",
    "math.exp": "torch.tensor(n).exp() for math.exp(n)",
}
# Python compares tuples item by item, even if their lengths differ.
_SHAPES = re.compile(r"\.shape\s*[!=]=")
_OF_SHAPES = "x.dim() == y.dim() and x.shape == y.shape where ranks may differ"


def rewrites_of(lines: Iterable[str]) -> str:
    """Return advice for the calls in some lines that need a Python number, or an empty text.

    Example:
        >>> print(rewrites_of(["y = x[: min(x.shape[0], 8)]"]))
        A function for every size has torch.sym_min(a, b) for min(a, b).
    """
    text = "\n".join(lines)
    found = [
        rewrite
        for call, rewrite in _REWRITES.items()
        if re.search(rf"(?<![\w.]){re.escape(call)}\(", text)
    ]
    if _SHAPES.search(text) and ".dim()" not in text:
        found.append(_OF_SHAPES)
    return f"A function for every size has {'; '.join(found)}." if found else ""
