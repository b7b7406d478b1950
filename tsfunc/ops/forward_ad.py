"""Operators that torch's forward mode calls on tensors with tangents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tsfunc.ops.registry import BatchDims, RuleLevel, row


@row("aten::_fw_primal", "aten::_fw_primal_copy")
def primal(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return an alias of the value without this level's tangent, which the tracer holds."""
    return torch.ops.aten.alias(args[0]), bdims[0]
