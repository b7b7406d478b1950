"""Result shapes of operators whose fake-tensor rules in torch are missing or lack symbolic sizes.

Some torch kernels check data (``cov``), or read a number from a tensor that does not affect the
shape (``ctc_loss``); the rules of other operators do not support symbolic sizes. This module
defines their results. NOTE [guards of operators] in ``fake_results`` describes operators
without a rule here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from tsfunc.bridge.sizes.kernel_sizes import upsampled_sizes
from tsfunc.bridge.sizes.shape_rules import channels_last_order, new_like, shape_rule, view_like
from tsfunc.bridge.tracers.schemas import overload_of
from tsfunc.bridge.tracers.user_queries import (
    statically_known_true,
    suppress_guards,
    suppress_guards_of,
)
from tsfunc.ops.dims import wrap_dim


@shape_rule("cov", "corrcoef")
def _covariance(x: Any, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    dtype = x.dtype
    if not (x.is_floating_point() or x.is_complex()):
        dtype = torch.get_default_dtype()
    if aweights is not None:
        dtype = torch.promote_types(dtype, aweights.dtype)
    rows = x.shape[0] if x.dim() > 1 else 1
    return new_like(x, [] if rows == 1 else [rows, rows], dtype)


def _data_dependent_bool(overload: Any) -> Any:
    """Return the rule of an operator that returns a data-dependent bool: NOTE [sizes of data]."""

    def rule(x: Any, *args: Any, **kwargs: Any) -> Any:
        env = x.fake_mode.shape_env
        if env is None:
            raise DataDependentOutputException(overload)
        return env.create_unbacked_symbool()

    return rule


shape_rule("equal")(_data_dependent_bool(torch.ops.aten.equal.default))
shape_rule("allclose")(_data_dependent_bool(torch.ops.aten.allclose.default))


def _in_place(functional: Any) -> Callable[..., Any]:
    """Return the rule of an in-place operator; the functional operator checks its arguments.

    torch's own rule calls the functional operator by its packet. If the first overload does not
    match, C++ formats the arguments for a message, and the formatting fails inside a dual level.
    """

    def rule(x: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (x, *args) if isinstance(value, torch.Tensor)]
        # The functional operator checks dtypes; it does not broadcast symbolic sizes.
        ones = [new_like(t, [1] * t.dim()) for t in tensors]
        functional(*ones, *args[len(tensors) - 1 :], **kwargs)
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        torch._check(
            torch.broadcast_shapes(shape, x.shape) == x.shape,
            lambda: f"output with shape {x.shape} doesn't match the broadcast shape {shape}",
        )
        return x

    return rule


shape_rule("lerp_.Scalar")(_in_place(torch.ops.aten.lerp.Scalar))
shape_rule("lerp_.Tensor")(_in_place(torch.ops.aten.lerp.Tensor))
shape_rule("addcmul_")(_in_place(torch.ops.aten.addcmul.default))
shape_rule("addcdiv_")(_in_place(torch.ops.aten.addcdiv.default))


@shape_rule("arange", "arange.start", "arange.start_step")
def _arange(*bounds: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Any:
    """Return as many numbers as lie between floats that are found in data, a new size."""
    floats = [x for x in bounds if isinstance(x, torch.SymFloat) and x.node.hint is None]
    if not floats:
        return NotImplemented
    size = floats[0].node.shape_env.create_unbacked_symint()
    torch._check(size >= 0)
    return torch.empty(size, dtype=dtype or torch.get_default_dtype(), device=device)


@shape_rule("ctc_loss.IntList", "ctc_loss.Tensor", fixed=True)
def _ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: int = 1, zero_infinity: bool = False,
) -> Any:  # fmt: skip
    each = reduction == 0 and log_probs.dim() == 3
    return new_like(log_probs, [log_probs.shape[1]] if each else [])


@shape_rule("_ctc_loss", "_ctc_loss.Tensor")
def _losses_and_paths(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0,
    zero_infinity: bool = False,
) -> Any:  # fmt: skip
    """The losses and the log-probabilities of paths, whose size is from the longest target."""
    steps, count, _ = log_probs.shape
    if isinstance(target_lengths, torch.Tensor):
        env = log_probs.fake_mode.shape_env
        if env is None:
            raise DynamicOutputShapeException(torch.ops.aten._ctc_loss.Tensor)
        states = env.create_unbacked_symint()
        torch._check(states >= 1)
    else:
        states = 2 * max(target_lengths, default=0) + 1
    return new_like(log_probs, [count]), new_like(log_probs, [count, steps, states])


@shape_rule("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def _ctc_loss_backward(grad: Any, log_probs: Any, *_: Any) -> Any:
    return new_like(log_probs, log_probs.shape)


@shape_rule("linalg_lstsq")
def _lstsq(a: Any, b: Any, rcond: Any = None, *, driver: str | None = None) -> Any:
    """Least squares; gelsd and gelss on a tall matrix return residuals only for full rank."""
    driver = driver or "gelsy"
    if a.device.type != "cpu" or a.dim() != b.dim():
        return NotImplemented
    rows, columns = a.shape[-2:]
    compares_ranks = driver != "gelsy"
    is_tall = compares_ranks and bool(rows > columns)
    if is_tall and driver != "gels":
        return NotImplemented
    batch, right = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), b.shape[-1]
    height = (rows if is_tall else columns) if compares_ranks else torch.sym_max(rows, columns)
    order = [*range(len(batch)), len(batch) + 1, len(batch)]
    solved = new_like(a, [*batch, height, right], order=order)
    return (
        view_like(solved, [*batch, columns, right], solved.stride()),
        new_like(a, [*batch, right] if is_tall else [0]),
        new_like(a, [0] if driver == "gels" else batch, torch.int64),
        new_like(a, [*batch, rows] if driver in ("gelsd", "gelss") else [0]),
    )


@shape_rule("adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(x: Any, output_size: Sequence[Any]) -> Any:
    if all(isinstance(size, int) for size in x.shape):
        return NotImplemented
    sizes = [*output_size] if isinstance(output_size, list | tuple) else [output_size]
    shape = [*x.shape[: -len(sizes)], *sizes]
    return new_like(x, shape), new_like(x, shape, torch.int64)


@shape_rule("pixel_shuffle")
def _pixel_shuffle(x: Any, upscale_factor: int) -> Any:
    return _rearranged_pixels(x, upscale_factor, lambda c, h, w, f: (c // (f * f), h * f, w * f))


@shape_rule("pixel_unshuffle")
def _pixel_unshuffle(x: Any, downscale_factor: int) -> Any:
    return _rearranged_pixels(x, downscale_factor, lambda c, h, w, f: (c * f * f, h // f, w // f))


def _rearranged_pixels(x: Any, factor: int, sizes: Callable[..., tuple[Any, ...]]) -> Any:
    """Return the rearranged pixels; the operator checks the divisibility when the program runs."""
    if x.dim() < 3 or factor < 1 or all(isinstance(size, int) for size in x.shape):
        return NotImplemented
    with suppress_guards(x.fake_mode):
        result_sizes = sizes(*x.shape[-3:], factor)
        if math.prod(result_sizes) != math.prod(x.shape[-3:]):
            return NotImplemented  # torch's rule reports the error
    return new_like(x, [*x.shape[:-3], *result_sizes])


@shape_rule("combinations")
def _combinations(x: Any, r: int = 2, with_replacement: bool = False) -> Any:
    if type(r) is not int or r < 1 or isinstance(x.shape[0], int):
        return NotImplemented
    most = x.shape[0] + (r - 1 if with_replacement else 0)
    count: Any = 1
    for i in range(r):
        count = count * (most - i)
    return new_like(x, [count // math.factorial(r), r])


@shape_rule("masked_select")
def _masked_select(x: Any, mask: Any) -> Any:
    """Return as many elements as the mask selects, a number that torch keeps with the mask."""
    if mask.fake_mode.shape_env is None or x.dim() != mask.dim():
        return NotImplemented
    if not all(statically_known_true(a == b) for a, b in zip(x.shape, mask.shape, strict=True)):
        return NotImplemented
    return new_like(x, [mask.nonzero().shape[0]])


@shape_rule("tril_indices")
def _tril_indices(row: Any, col: Any, offset: Any = 0, **options: Any) -> Any:
    """Count the elements on and below a diagonal.

    Row ``i`` has ``i + 1 + offset`` of them, clamped to the range from 0 to ``col``: the sum is a
    combination of triangular numbers.
    """
    if all(isinstance(size, int) for size in (row, col, offset)):
        return NotImplemented
    count = (
        _twice_triangular(row + offset) - _twice_triangular(offset)
        - _twice_triangular(row + offset - col) + _twice_triangular(offset - col)
    ) // 2  # fmt: skip
    with suppress_guards_of([count]):
        dtype = options.get("dtype") or torch.int64
        return torch.empty(2, count, dtype=dtype, device=options.get("device"))


@shape_rule("triu_indices")
def _triu_indices(row: Any, col: Any, offset: Any = 0, **options: Any) -> Any:
    return _tril_indices(col, row, -offset, **options)


def _twice_triangular(size: Any) -> Any:
    """Return twice the sum 1 + 2 + ... + size, or 0 for a negative size."""
    if statically_known_true(size <= 0):
        return 0
    if not statically_known_true(size >= -1):
        size = torch.sym_max(size, 0)
    return size * (size + 1)


@shape_rule("_chunk_cat")
def _chunk_cat(tensors: Sequence[Any], dim: int, num_chunks: int) -> Any:
    first = tensors[0]
    dim = wrap_dim(dim, first.dim())
    total: Any = 0
    for x in tensors:
        part = -(-x.shape[dim] // num_chunks)
        for size in x.shape[dim + 1 :]:
            part = part * size
        total = total + part
    return new_like(first, [*first.shape[:dim], num_chunks, total])


@shape_rule("istft")
def _istft(
    x: Any, n_fft: int, hop_length: Any = None, win_length: Any = None, window: Any = None,
    center: bool = True, normalized: bool = False, onesided: bool | None = None, length: Any = None,
    return_complex: bool = False,
) -> Any:  # fmt: skip
    hop = n_fft // 4 if hop_length is None else hop_length
    result_length = n_fft + hop * (x.shape[-1] - 1)
    if length is not None:
        result_length = length
    elif center:
        result_length = result_length - 2 * (n_fft // 2)
    dtype = x.dtype if return_complex else x.dtype.to_real()
    return new_like(x, [*x.shape[:-2], result_length], dtype)


def _upsample(x: Any, output_size: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the spatial sizes from the arguments or from factors; keep the input's dim order."""
    if all(isinstance(size, int) and size for size in x.shape):
        return NotImplemented
    factors = kwargs.get("scale_factors") or args[-1] if output_size is None else None
    shape = [*x.shape[:2], *upsampled_sizes(x, output_size, factors)]
    return new_like(x, shape, order=channels_last_order(x, x.dim() - 2))


for _kind in ("nearest{}d", "nearest_exact{}d", "linear1d", "bilinear2d", "trilinear3d",
              "bicubic2d", "bilinear2d_aa", "bicubic2d_aa"):  # fmt: skip
    for _rank in (1, 2, 3) if "{}" in _kind else (0,):
        for _start in ("upsample_", "_upsample_"):
            _name = _start + _kind.format(_rank)
            shape_rule(_name, f"{_name}.vec")(_upsample)


def _batch_norm(name: str, training: int | None) -> Any:
    """Return the rule for one value per channel, where torch's own rule divides by zero."""
    overload: Any = overload_of(f"aten::{name}")

    def rule(x: Any, *args: Any) -> Any:
        values = math.prod(x.shape) // x.shape[1] if _is_fixed(x) and x.dim() > 1 else 0
        if values != 1 or (training is not None and not args[training]):
            return NotImplemented
        like, *statistics = overload(new_like(x, [2, *x.shape[1:]]), *args)
        return new_like(x, x.shape, like.dtype), *statistics

    return rule


def _is_fixed(x: Any) -> bool:
    return all(isinstance(size, int) and size for size in x.shape)


for _name, _training in (("native_batch_norm", 4), ("_native_batch_norm_legit", 4),
                         ("_native_batch_norm_legit.no_stats", 2),
                         ("_batch_norm_with_update", None)):  # fmt: skip
    shape_rule(_name, fixed=True)(_batch_norm(_name, _training))
