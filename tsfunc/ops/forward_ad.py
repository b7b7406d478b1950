"""Operators that torch's forward mode calls on tensors with tangents."""

from __future__ import annotations

from typing import Any

import torch

from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, row


@row("aten::_fw_primal", "aten::_fw_primal_copy")
def primal(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return an alias of the value without this level's tangent, which the tracer holds."""
    return torch.ops.aten.alias(args[0]), bdims[0]
