"""Policies for ``tsfunc.checkpoint``: which results are kept, and not computed again.

A policy takes a context, an operator and its arguments, and says whether its result is kept, as
those of ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` do. The names are those of
``jax.checkpoint_policies``. What JAX chooses by names of values has no counterpart: the function is
run again as a whole, so a value that is kept spares the work of the operator that made it alone.
"""

from __future__ import annotations

from typing import Any

from tsfunc.bridge.grad.kept import KeepsEither, Policy

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


def _name(op: Any) -> str:
    """An operator's name without that of its overload."""
    name: str = op.name()
    return name.partition(".")[0]


def everything_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """All are kept: as without a checkpoint."""
    return True


def nothing_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """None are."""
    return False


def dots_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """The results of matrix products, convolutions and attention are."""
    return _name(op) in _DOTS


def dots_with_no_batch_dims_saveable(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """The results of convolutions and of matrix products without batch dims are."""
    return _name(op) in _WITHOUT_BATCH


def save_from_both_policies(first: Policy, second: Policy) -> Policy:
    """A policy that keeps what either of two keeps.

    Example:
        >>> import torch
        >>> from tsfunc import checkpoint, checkpoint_policies as policies
        >>> def exponentials(ctx, op, *args, **kwargs):
        ...     return op is torch.ops.aten.exp.default
        >>> both = policies.save_from_both_policies(policies.dots_saveable, exponentials)
        >>> f = checkpoint(lambda x: (x @ x).exp(), policy=both)
    """
    return KeepsEither(first, second)


# JAX's other names of two of them.
checkpoint_dots = dots_saveable
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable
