"""Modules whose parameters are sharded over processes."""

from __future__ import annotations

import sys

from torch import nn


def refuse_fully_sharded(module: nn.Module, what: str) -> None:
    """Raise an error if ``fully_shard`` was applied to a module or one of its submodules.

    The forward of such a submodule gathers its own parameters, even if a call replaces them.

    Raises:
        RuntimeError: ``module`` has such a submodule.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: not applied
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
