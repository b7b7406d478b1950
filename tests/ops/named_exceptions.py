"""Entries of the operator database without a program for all sizes, by name, with the reason.

``docs/coverage_named.md`` shows them.
"""

from __future__ import annotations

_RANK = "with some of its drivers it returns residuals if the rank is full, which data decide"
_COURSE = "in Python it asks which of two sizes is larger, and computes one thing or the other"

EXCEPTIONS: dict[str, str] = {
    "linalg.lstsq": _RANK,
    "linalg.lstsq.grad_oriented": _RANK,
    "pca_lowrank": _COURSE,
    "svd_lowrank": _COURSE,
    "tensor_split": "data decide how many tensors it returns",
}
