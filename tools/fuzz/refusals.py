"""Documented errors: a program that raises one counts as refused.

Each entry has the class, a pattern of the message, and the page that states the limit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    error: str
    pattern: str
    page: str
    reason: str


REFUSALS = (
    Refusal(
        "ConstraintViolation", "", "docs/soundness.md",
        "the function's course depends on the size of a named dim",
    ),
    Refusal(
        "DescriptorViolation", "", "docs/descriptors.md",
        "a later call has other sizes than a descriptor guarantees",
    ),
    Refusal(
        "TypeCheckError", r"(?s)one type, got.*\[[^\]]*[a-z]", "docs/soundness.md",
        "branches whose sizes are equal for some sizes of a named dim only",
    ),
    Refusal(
        "TypeCheckError", r"(?s)one type, got.*f64\[.*f32\[|one type, got.*f32\[.*f64\[",
        "docs/coming_from_jax.md", "branches of which one is float64 for a float32 call",
    ),
    Refusal(
        "DataDependentError", "", "docs/soundness.md",
        "a size or a Python value that depends on data",
    ),
    Refusal(
        "NotImplementedError", "no forward-mode derivative of a pullback", "docs/sharp_bits.md",
        "a pullback of control flow that a vmap in a program has made, called in a body",
    ),
    Refusal(
        "ExportError", "", "docs/programs.md", "a backend has no place for what a program has",
    ),
    Refusal(
        "RuntimeError", r"^freeze|closure=.freeze.|burnt in", "docs/soundness.md",
        'a program with closure="freeze" may not write into what it burns in',
    ),
    Refusal(
        "RuntimeError", r"randomness", "docs/torch_func.md",
        'a draw that "same" or "error" refuses',
    ),
)  # fmt: skip


def refused(error: BaseException) -> Refusal | None:
    """Return the entry that covers an error."""
    names = {cls.__name__ for cls in type(error).__mro__}
    for entry in REFUSALS:
        if entry.error in names and re.search(entry.pattern, str(error)):
            return entry
    return None
