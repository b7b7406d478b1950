"""Pointwise operators: align the arguments and call the operator once.

Results have the broadcast shape of all arguments. A rule adds two steps to ``op(*args)``: it moves
batch dims for broadcasting, and it promotes logical scalars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops.dims import align, batches_first, logical_rank, promote_scalars, refuse_inplace
from tsfunc.ops.refusal import raise_as_one_example, refuse_like_torch
from tsfunc.ops.registry import Args, BatchDims, Kwargs, RuleLevel, aten_names, row, rows
from tsfunc.ops.shifts import Shift, shift_arguments
from tsfunc.ops.sparse_elementwise import is_mixed, sparse_elementwise


def is_aligned(args: Sequence[Any], bdims: BatchDims) -> bool:
    """True if all tensors have the same batch dim and rank, so that they need no alignment."""
    lead = bdims[0]
    if lead is None:
        return False
    rank = args[0].dim()
    for i in range(1, len(args)):
        arg = args[i]
        if isinstance(arg, Tensor) and (bdims[i] != lead or arg.dim() != rank):
            return False
    return True


@shift_arguments(Shift.SAME)
def pointwise(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Call the operator on any number of tensors and numbers, broadcast together."""
    try:
        count = len(args)
        if count == 1:
            return op(args[0], **kwargs), bdims[0]
        if count == 2:
            x, y = args
            bdim, other = bdims
            if other is None:
                # No alignment is needed if the batched tensor has logical dims and the other one
                # has no dim to the left of the batch dim. Equal dtypes need no promotion.
                if (
                    not isinstance(y, Tensor)
                    or 1 < x.dim() > y.dim() + bdim
                    or (y.dim() == 0 and x.dtype is y.dtype)
                ):
                    return op(x, y, **kwargs), bdim
            elif bdim is None:
                if (
                    not isinstance(x, Tensor)
                    or 1 < y.dim() > x.dim() + other
                    or (x.dim() == 0 and x.dtype is y.dtype)
                ):
                    return op(x, y, **kwargs), other
            elif bdim == other and x.dim() == y.dim():
                return op(x, y, **kwargs), bdim
        elif is_aligned(args, bdims):
            return op(*args, **kwargs), bdims[0]
        if count == 2 and is_mixed(*args):
            raise RuntimeError("torch does not broadcast a sparse value to a dense one")
        aligned, bdim = align(promote_scalars(args, bdims), bdims)
        return op(*aligned, **kwargs), bdim
    except RuntimeError:
        return sparse_elementwise(op, level, bdims, args, kwargs)


def pointwise_inplace(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Write the first argument; the other arguments are aligned with its batch dim."""
    x, bdim = args[0], bdims[0]
    if bdim is None:
        refuse_inplace(op)
    if is_aligned(args, bdims):
        op(*args, **kwargs)
        return x, bdim
    promoted = [x, *promote_scalars(args, bdims)[1:]]
    aligned, _ = align(promoted, bdims, x.dim() - 1 - bdim)
    op(*aligned, **kwargs)
    return x, bdim


@row("aten::clamp", "aten::clamp.Tensor", "aten::clip", "aten::clip.Tensor")
@shift_arguments(Shift.SAME)
def clamp(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Batch all three arguments if both bounds are tensors.

    torch's derivative compares two of the arguments and writes values that depend on the third one
    into the comparison, in place.
    """
    bounds = [x for x in args[1:] if isinstance(x, Tensor)]
    if len(bounds) == 2 and any(bdim is None for bdim in bdims):
        args = batches_first(args, bdims, level.batch_size)
        bdims = (0, 0, 0)
    return pointwise(op, level, bdims, args, kwargs)


@row("aten::frexp.Tensor", "aten::_prelu_kernel_backward")
def pointwise_pair(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Operators with two results: a separate rule, so that ``pointwise`` means one result."""
    return pointwise(op, level, bdims, args, kwargs)


@row("aten::where.self", "aten::where.ScalarSelf", "aten::where.ScalarOther", "aten::where.Scalar")
@shift_arguments(Shift.SAME)
def where(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The condition does not affect type promotion."""
    if is_aligned(args, bdims):
        return op(*args, **kwargs), bdims[0]
    x, y = promote_scalars(args[1:], bdims[1:])
    aligned, bdim = align((args[0], x, y), bdims)
    return op(*aligned, **kwargs), bdim


@row("aten::masked_fill.Scalar")
def masked_fill(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The result has the dtype of the first argument, so scalars are not promoted."""
    aligned, bdim = align(args, bdims)
    return op(*aligned, **kwargs), bdim


@row("aten::masked_fill.Tensor")
def masked_fill_tensor(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """A batched value is filled by ``where``: the operator accepts only a value without dims."""
    if bdims[2] is None:
        (x, mask), bdim = align(args[:2], bdims[:2])
        return op(x, mask, args[2], **kwargs), bdim
    if logical_rank(args[2], bdims[2]) or args[1].dtype is not torch.bool:
        return raise_as_one_example(op, bdims, args, kwargs)
    (x, mask, value), bdim = align(args, bdims)
    return torch.where(mask, _as_filling(value, x), x), bdim


def _as_filling(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a value in the dtype of the tensor that it fills; complex values must be real."""
    if value.is_complex() and not x.is_complex():
        name = str(x.dtype).removeprefix("torch.")
        torch.ops.aten._assert_async.msg(
            (value.imag == 0).all(), f"value cannot be converted to type {name} without overflow"
        )
        value = value.real
    return value.to(x.dtype)


@row("aten::masked_fill_.Scalar")
def masked_fill_scalar_inplace(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Align the mask with the batch dim of the written tensor."""
    x, bdim = args[0], bdims[0]
    if bdim is None:
        refuse_inplace(op)
    (_, mask), _ = align(args[:2], bdims[:2])
    op(x, mask, *args[2:], **kwargs)
    return x, bdim


@row("aten::masked_fill_.Tensor")
def masked_fill_tensor_inplace(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Fill masked elements with the value of a tensor; one value for each example by ``where``."""
    if bdims[2] is None:
        return masked_fill_scalar_inplace(op, level, bdims, args, kwargs)
    x, bdim = args[0], bdims[0]
    if bdim is None:
        refuse_inplace(op)
    if logical_rank(args[2], bdims[2]) or args[1].dtype is not torch.bool:
        return raise_as_one_example(op, bdims, args, kwargs)
    (_, mask, value), _ = align(args, bdims)
    x.copy_(torch.where(mask, _as_filling(value, x), x))
    return x, bdim


@row("aten::gelu_backward", "aten::rrelu_with_noise_backward", "aten::_prelu_kernel")
def pointwise_of_equal_shapes(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Broadcast explicitly: these kernels do not broadcast all arguments, or warn about it."""
    if is_aligned(args, bdims):
        return op(*args, **kwargs), bdims[0]
    aligned, bdim = align(args, bdims)
    tensors = [arg for arg in aligned if isinstance(arg, Tensor)]
    tensors = torch.broadcast_tensors(*tensors)
    return op(*tensors, *aligned[len(tensors) :], **kwargs), bdim


@row("aten::log_sigmoid_forward")
def log_sigmoid_forward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """The second result is a buffer for the backward pass, empty on devices other than the CPU."""
    buffered = args[0].device.type == "cpu"
    return op(*args, **kwargs), (bdims[0], bdims[0] if buffered else None)


@row("aten::log_sigmoid_backward")
def log_sigmoid_backward(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Ignore the buffer on devices other than the CPU, where it is empty."""
    if args[0].device.type == "cpu":
        return pointwise_of_equal_shapes(op, level, bdims, args, kwargs)
    (grad, x), bdim = align(args[:2], bdims[:2])
    return op(grad, x, args[2], **kwargs), bdim


def _with_inplace(names: str) -> tuple[list[str], list[str]]:
    """Return names for both rules; ``add.Tensor`` has the in-place variant ``add_.Tensor``."""
    plain = aten_names(names)
    return plain, ["_.".join(n.split(".")) if "." in n else n + "_" for n in plain]


# Operators with an in-place variant of the same overload name.
_BOTH = """
    abs absolute acos acosh arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh
    ceil celu clamp_max clamp_min conj_physical cos cosh deg2rad digamma elu erf erfc
    erfinv exp exp2 expm1 fix floor frac hardsigmoid hardswish hardtanh i0 leaky_relu lgamma log
    log10 log1p log2 logical_not logit mish mvlgamma nan_to_num neg negative rad2deg
    reciprocal relu relu6 round round.decimals rsqrt selu sgn sigmoid sign silu sin sinc sinh
    sqrt square tan tanh threshold trunc bitwise_not
    add.Scalar add.Tensor sub.Scalar sub.Tensor subtract.Scalar subtract.Tensor
    mul.Scalar mul.Tensor multiply.Scalar multiply.Tensor
    div.Scalar div.Scalar_mode div.Tensor div.Tensor_mode
    divide.Scalar divide.Scalar_mode divide.Tensor divide.Tensor_mode
    true_divide.Scalar true_divide.Tensor floor_divide.Scalar
    fmod.Scalar fmod.Tensor remainder.Scalar remainder.Tensor
    atan2 arctan2 copysign.Scalar copysign.Tensor hypot nextafter gcd lcm igamma igammac
    xlogy.Tensor xlogy.Scalar_Other addcmul addcdiv
    clamp_max.Tensor clamp_min.Tensor
    eq.Scalar eq.Tensor ne.Scalar ne.Tensor ge.Scalar ge.Tensor gt.Scalar gt.Tensor
    le.Scalar le.Tensor lt.Scalar lt.Tensor
    not_equal.Scalar not_equal.Tensor greater.Scalar greater.Tensor
    greater_equal.Scalar greater_equal.Tensor less.Scalar less.Tensor
    less_equal.Scalar less_equal.Tensor
    logical_and logical_or logical_xor
    bitwise_and.Scalar bitwise_and.Tensor bitwise_or.Scalar bitwise_or.Tensor
    bitwise_xor.Scalar bitwise_xor.Tensor
    bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar
    bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar
"""

# Operators without an in-place variant, or with one of another name.
_PLAIN = """
    _conj_physical angle positive floor_divide
    float_power.Scalar float_power.Tensor_Scalar
    float_power.Tensor_Tensor fmax fmin gelu hardshrink isfinite isinf isnan
    isneginf isposinf ldexp.Tensor logaddexp logaddexp2 max.other maximum min.other minimum
    polygamma pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor remainder.Scalar_Tensor
    rsub.Scalar rsub.Tensor signbit softplus softshrink xlogy.Scalar_Self
    __and__.Scalar __and__.Tensor __or__.Scalar __or__.Tensor __xor__.Scalar __xor__.Tensor
    __lshift__.Scalar __lshift__.Tensor __rshift__.Scalar __rshift__.Tensor
    bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor
    bitwise_left_shift.Scalar_Tensor bitwise_right_shift.Scalar_Tensor
    _dirichlet_grad _standard_gamma_grad _add_relu.Tensor _add_relu.Scalar
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_spherical_bessel_j0
    special_xlog1py special_xlog1py.other_scalar special_xlog1py.self_scalar
    special_zeta special_zeta.other_scalar special_zeta.self_scalar
    special_digamma special_erf special_erfc special_erfinv special_exp2 special_expit
    special_expm1 special_gammainc special_gammaincc special_gammaln special_i0 special_log1p
    special_logit special_multigammaln special_polygamma special_psi
    special_round special_sinc special_xlogy special_xlogy.other_scalar special_xlogy.self_scalar
"""

# Operators that take only operands of one dtype, even beside a tensor without dims.
_OF_ONE_DTYPE = "complex polar heaviside lerp.Scalar lerp.Tensor"
_OF_ONE_DTYPE_INPLACE = "heaviside_ lerp_.Scalar lerp_.Tensor"

_INPLACE = """
    clamp_ clamp_.Tensor clip_ clip_.Tensor
    __iand__.Scalar __iand__.Tensor __ior__.Scalar __ior__.Tensor __ixor__.Scalar __ixor__.Tensor
    floor_divide_.Tensor __ilshift__.Scalar __ilshift__.Tensor
    __irshift__.Scalar __irshift__.Tensor
    float_power_.Scalar float_power_.Tensor ldexp_ polygamma_ pow_.Scalar pow_.Tensor
    _add_relu_.Tensor _add_relu_.Scalar
"""

_BACKWARD = """
    elu_backward hardshrink_backward hardsigmoid_backward
    hardswish_backward hardtanh_backward leaky_relu_backward logit_backward mish_backward
    native_dropout_backward sigmoid_backward silu_backward
    softplus_backward softshrink_backward tanh_backward threshold_backward _masked_scale
"""

_POLYNOMIALS = [
    f"aten::special_{kind}{overload}"
    for kind in (
        *(f"{s}chebyshev_polynomial_{k}" for s in ("", "shifted_") for k in "tuvw"),
        "hermite_polynomial_h",
        "hermite_polynomial_he",
        "laguerre_polynomial_l",
        "legendre_polynomial_p",
    )
    for overload in ("", ".n_scalar", ".x_scalar")
]

_plain, _inplace = _with_inplace(_BOTH)
rows(pointwise, *_plain, *aten_names(_PLAIN), *_POLYNOMIALS)
rows(pointwise, *aten_names(_BACKWARD))
rows(refuse_like_torch(pointwise), *aten_names(_OF_ONE_DTYPE))
rows(refuse_like_torch(pointwise_inplace), *aten_names(_OF_ONE_DTYPE_INPLACE))
rows(pointwise_inplace, *_inplace, *aten_names(_INPLACE))
