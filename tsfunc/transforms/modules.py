"""Modules as functions of their state; torch's own tools, which all transforms take as they are."""

from __future__ import annotations

from torch.func import functional_call, stack_module_state

__all__ = ["functional_call", "stack_module_state"]
