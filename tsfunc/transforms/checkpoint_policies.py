"""Policies for ``tsfunc.checkpoint``: they choose the results that are kept, not recomputed.

A policy takes a context, an operator and its arguments, and returns True if the result is kept, as
the policies of ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` do. The names are
those of ``jax.checkpoint_policies``. JAX's policies by value name have no counterpart: the
function is run again as a whole, so a kept value spares only the operator that made the value.
"""

from __future__ import annotations

from typing import Any

from tsfunc.bridge.grad.remat_policy import Policy, SaveEither

_WITHOUT_BATCH = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "addmm", "mv", "addmv", "dot", "vdot", "linear", "convolution", "_scaled_mm",
    )
)  # fmt: skip
_DOTS = _WITHOUT_BATCH | frozenset(
    f"aten::{name}"
    for name in (
        "bmm", "baddbmm", "addbmm", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    )
)  # fmt: skip


def _packet_name(op: Any) -> str:
    """Return an operator's name without its overload name."""
    name: str = op.name()
    return name.partition(".")[0]


def everything_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Keep all results, as without a checkpoint."""
    return True


def nothing_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Keep no results."""
    return False


def dots_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Keep the results of matrix products, convolutions and attention."""
    return _packet_name(op) in _DOTS


def dots_with_no_batch_dims_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Keep the results of convolutions and of matrix products without batch dims."""
    return _packet_name(op) in _WITHOUT_BATCH


def save_from_both_policies(first: Policy, second: Policy) -> Policy:
    """Return a policy that keeps the results that at least one of two policies keeps.

    Example:
        >>> import torch
        >>> from tsfunc import checkpoint, checkpoint_policies as policies
        >>> def exponentials(ctx, op, *args, **kwargs):
        ...     return op is torch.ops.aten.exp.default
        >>> both = policies.save_from_both_policies(policies.dots_saveable, exponentials)
        >>> f = checkpoint(lambda x: (x @ x).exp(), policy=both)
    """
    return SaveEither(first, second)


# JAX's other names of two of these policies.
checkpoint_dots = dots_saveable
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable
