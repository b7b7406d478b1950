"""Modules whose parameters are sharded over processes."""

from __future__ import annotations

import sys

from torch import nn


def refuse_fully_sharded(module: nn.Module, what: str) -> None:
    """Raise an error for a module with parts that ``fully_shard`` was applied to.

    The forward of such a part gathers the parameters that it was given by ``fully_shard``, also
    where others stand in the places of these.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # applied to nothing before it is imported
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is None:
        return
    for name, part in module.named_modules():
        if isinstance(part, kind):
            raise RuntimeError(
                f"{what}: expected a module that computes with the parameters of the call, got "
                f"{type(module).__name__}, to which fully_shard was applied (at {name!r}): its "
                f"forward gathers its own parameters, and the result would not depend on those "
                f"of the call. Use tsfunc.all_gather on sharded parameters inside of the function, "
                f"or differentiate with .backward()."
            )
