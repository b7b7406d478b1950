"""Text that messages and reports of all packages share."""

from __future__ import annotations


def count_text(number: int, noun: str) -> str:
    """Return a number and a noun, as a text: ``1 call``, ``2 calls``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
