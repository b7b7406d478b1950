"""The names of ``jax.custom_derivatives``."""

from __future__ import annotations

from tsfunc.transforms.closure_convert import closure_convert
from tsfunc.transforms.custom_jvp import custom_jvp
from tsfunc.transforms.custom_vjp import custom_gradient, custom_vjp
from tsfunc.transforms.symbolic_zeros import (
    CustomVJPPrimal,
    SymbolicZero,
    custom_vjp_primal_tree_values,
    zero_from_primal,
)

__all__ = [
    "CustomVJPPrimal",
    "SymbolicZero",
    "closure_convert",
    "custom_gradient",
    "custom_jvp",
    "custom_vjp",
    "custom_vjp_primal_tree_values",
    "zero_from_primal",
]


def __dir__() -> list[str]:
    return __all__
