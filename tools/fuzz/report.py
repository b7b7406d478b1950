"""Print failures as tests, and counts as tables."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import torch

from tools.fuzz import reference
from tools.fuzz.circumstances import GRADIENTS
from tools.fuzz.program import Program, call_text, source
from tools.fuzz.running import WRONG, Verdict, results

_IMPORTS = """\
import collections
import dataclasses

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import tsfunc
"""
_CHECK = """\
def same(found, expected):
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    elif isinstance(expected, dict):
        if not isinstance(found, dict):
            found = found._asdict() if hasattr(found, "_asdict") else vars(found)
        assert set(found) == set(expected)
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            same(one, other)
    else:
        assert found == expected
"""


def literal(value: Any) -> str:
    """Return the Python of a result."""
    if isinstance(value, torch.Tensor):
        text = f"torch.tensor({value.reshape(-1).tolist()}, dtype={value.dtype})"
        text = re.sub(r"\b(inf|nan)\b", r"math.\1", text)
        return f"{text}.reshape({', '.join(map(str, value.shape)) or '()'})"
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{k}": {literal(v)}' for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + "".join(f"{literal(v)}, " for v in value) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(literal(v) for v in value) + "]"
    return repr(value)


def as_test(program: Program, verdict: Verdict, name: str = "found") -> str:
    """Return a pytest file that fails while the fault exists; it needs torch and tsfunc alone."""
    torch.manual_seed(0)
    expected = results(program, reference)
    lines = [
        f'"""Seed {program.seed}: {verdict.kind}, {verdict.cause}."""',
        "",
        _IMPORTS,
        source(program),
        _CHECK,
        f"def test_{name}():",
        "    torch.manual_seed(0)",
    ]
    for call, value in enumerate(expected):
        around, function = program.circumstance(call), "program"
        if around == GRADIENTS:
            captured = ", ".join(name for name, _ in program.captured)
            function = f"(lambda *args: with_gradients(program, [{captured}], *args))"
        elif around:
            lines.append(f"    # with the circumstance {around!r}: tools/fuzz/circumstances.py")
        lines.append(f"    same({call_text(program, call, function)}, {literal(value)})")
    lines += ["", 'if __name__ == "__main__":', f"    test_{name}()"]
    text = "\n".join(lines) + "\n"
    return (
        text.replace("import torch\n", "import math\n\nimport torch\n", 1)
        if "math." in text
        else text
    )


def as_module(*programs: Program) -> str:
    """Return a module of programs as they are, for failures that a test can't show."""
    return _IMPORTS + "".join(f"\n\n{source(program)}" for program in programs)


def table(counts: Counter[str], columns: int = 3) -> str:
    """Return counts as lines."""
    cells = [f"{name} {count}" for name, count in counts.most_common()]
    width = max(map(len, cells), default=0) + 2
    rows = math.ceil(len(cells) / columns)
    lines = ["".join(cell.ljust(width) for cell in cells[i::rows]).rstrip() for i in range(rows)]
    return "\n".join("  " + line for line in lines)


__all__ = ["WRONG", "as_module", "as_test", "literal", "table"]
