"""The inputs of rules with ``symbolic_zeros=True``: zeros without tensors, and perturbed flags.

The names are those of ``jax.custom_derivatives``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tsfunc import pytrees


@dataclass(frozen=True)
class SymbolicZero:
    """A tangent or cotangent that is known to be zero, without a tensor of zeros.

    Rules that are set with ``symbolic_zeros=True`` get it, and any rule may return it.

    Attributes:
        shape: the shape of the tensor of zeros.
        dtype: the dtype of the tensor of zeros.

    Example:
        >>> import torch
        >>> from tsfunc import custom_jvp, jvp
        >>> from tsfunc.transforms.symbolic_zeros import SymbolicZero
        >>> @custom_jvp
        ... def product(x, y):
        ...     return x * y
        >>> def rule(primals, tangents):
        ...     (x, y), (dx, dy) = primals, tangents
        ...     assert type(dy) is SymbolicZero
        ...     return product(x, y), dx * y
        >>> _ = product.defjvp(rule, symbolic_zeros=True)
        >>> jvp(lambda x: product(x, torch.tensor(3.)), (torch.tensor(1.),), (torch.tensor(1.),))[1]
        tensor(3.)

    Corresponds to ``jax.custom_derivatives.SymbolicZero``.
    """

    shape: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class CustomVJPPrimal:
    """An argument of a ``fwd`` rule that is set with ``symbolic_zeros=True``.

    Attributes:
        value: the tensor or number.
        perturbed: True if a transform or autograd differentiates by the value.

    Corresponds to ``jax.custom_derivatives.CustomVJPPrimal``.
    """

    value: Any
    perturbed: bool


pytrees.add_leaf(SymbolicZero)
pytrees.add_leaf(CustomVJPPrimal)


def custom_vjp_primal_tree_values(tree: Any) -> Any:
    """Return the values of a pytree of :class:`CustomVJPPrimal`.

    Corresponds to ``jax.custom_derivatives.custom_vjp_primal_tree_values``.
    """
    return pytrees.tree_map(lambda x: x.value if isinstance(x, CustomVJPPrimal) else x, tree)


def zero_from_primal(x: Any, symbolic_zeros: bool = False) -> Any:
    """Return the zero tangent of a tensor or number; None for other values.

    With ``symbolic_zeros`` the tangent is a :class:`SymbolicZero`. Corresponds to
    ``jax.custom_derivatives.zero_from_primal``.
    """
    if isinstance(x, torch.Tensor):
        return SymbolicZero(x.shape, x.dtype) if symbolic_zeros else torch.zeros_like(x)
    if isinstance(x, bool | int | float | complex):
        dtype = torch.tensor(x).dtype if symbolic_zeros else None
        return type(x)() if dtype is None else SymbolicZero(torch.Size(), dtype)
    return None
