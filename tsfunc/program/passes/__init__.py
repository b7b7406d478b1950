"""Passes over a program's graph, one per file.

A pass changes the graph in place and keeps it well formed; ``simplify`` runs all passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
import torch.fx

from tsfunc.program.passes import verify
from tsfunc.program.passes.blocks import remove_unused_of_blocks
from tsfunc.program.passes.common import merge_common
from tsfunc.program.passes.dead import remove_dead
from tsfunc.program.passes.folding import fold_constants
from tsfunc.program.passes.layouts import free_layouts
from tsfunc.program.passes.mesh import mark_exchanges, share_equal_values
from tsfunc.program.passes.noops import remove_noops
from tsfunc.program.passes.slices import end_slices_alike


def simplify(
    name: str,
    graph: torch.fx.Graph,
    lifted: Collection[str],
    frozen: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Run every pass.

    Args:
        name: the name of the program, for errors.
        graph: a traced graph.
        lifted: the names of its tensors from outside.
        frozen: the tensors among them that never change.

    Returns:
        The constants that were computed, by the names of their ``get_attr`` nodes.

    Raises:
        MalformedProgramError: a pass has broken the graph, and verification is on
            (``verify.asked_for``).
    """
    constants: dict[str, torch.Tensor] = {}

    def run(step: Callable[..., dict[str, torch.Tensor] | None]) -> None:
        before = list(graph.nodes) if verify.asked_for() else None
        also = (frozen,) if step is fold_constants else ()
        constants.update(step(graph, *also) or {})
        if before is not None and before != list(graph.nodes):
            verify.verify(graph, {*lifted, *constants}, f"{name} after {step.__name__}")

    if verify.asked_for():
        verify.verify(graph, lifted, f"{name} as traced")
    for step in _PASSES:
        run(step)
    return constants


_PASSES: tuple[Callable[..., dict[str, torch.Tensor] | None], ...] = (
    free_layouts,
    end_slices_alike,
    remove_noops,
    share_equal_values,
    merge_common,
    fold_constants,
    remove_dead,
    remove_unused_of_blocks,
    remove_dead,
    mark_exchanges,
)

__all__ = [
    "end_slices_alike",
    "fold_constants",
    "free_layouts",
    "mark_exchanges",
    "merge_common",
    "remove_dead",
    "remove_noops",
    "remove_unused_of_blocks",
    "share_equal_values",
    "simplify",
]
