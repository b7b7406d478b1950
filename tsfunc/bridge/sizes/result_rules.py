"""Result shapes of operators whose fake-tensor rules in torch are missing or lack symbolic sizes.

Some torch kernels check data (``cov``), or read a number from a tensor that does not affect the
shape (``ctc_loss``); the rules of other operators do not support symbolic sizes. This module
defines their results. NOTE [guards of operators] in ``fake_results`` describes operators
without a rule here.

NOTE [windows]
torch's rules for pooling and patches read the size of a window, which adds a guard on its value.
The operator checks that a window fits when the program runs.

NOTE [recurrent layers]
torch computes the shapes of a layer by all of its steps, which takes a second for twenty of them. A
packed sequence has as many rows as the sum of its lengths, and as many batch sizes as its longest
sequence: NOTE [sizes of data] in ``symbols``. The first batch size is the number of sequences.
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
    has_symbols,
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


# --- windows: pooling, and the patches of unfold


def _average_pool(dims: int) -> Callable[..., Any]:
    """Return the rule for averages over windows in the last dims."""

    def rule(
        x: Any, kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Any:  # fmt: skip
        shape = _pooled_shape(x, dims, ceil_mode, kernel_size, stride or kernel_size, padding, 1)
        if shape is None:
            return NotImplemented
        return new_like(x, shape, order=channels_last_order(x, dims))

    return rule


def _max_pool(dims: int, *, with_indices: bool) -> Callable[..., Any]:
    """Return the rule for maxima over windows in the last dims, with or without indices."""

    def rule(
        x: Any, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:  # fmt: skip
        shape = _pooled_shape(
            x, dims, ceil_mode, kernel_size, stride or kernel_size, padding, dilation
        )
        if shape is None:
            return NotImplemented
        order = channels_last_order(x, dims)
        values = new_like(x, shape, order=order)
        return (values, new_like(x, shape, torch.int64, order)) if with_indices else values

    return rule


for _dims in (1, 2, 3):
    shape_rule(f"avg_pool{_dims}d")(_average_pool(_dims))
    shape_rule(f"max_pool{_dims}d")(_max_pool(_dims, with_indices=False))
    shape_rule(f"max_pool{_dims}d_with_indices")(_max_pool(_dims, with_indices=True))


@shape_rule("im2col")
def _patches(x: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    if not has_symbols((kernel_size, dilation, padding, stride)) or x.dim() not in (3, 4):
        return NotImplemented
    counts = _counts(x.shape[-2:], kernel_size, stride, padding, dilation)
    values = x.shape[-3] * math.prod(_per_dim(kernel_size, 2))
    return new_like(x, [*x.shape[:-3], values, math.prod(counts)])


def _pooled_shape(x: Any, dims: int, ceil_mode: bool, *window: Any) -> list[Any] | None:
    """Return the shape of a pooled tensor; None to use torch's rule."""
    if not has_symbols(window) or ceil_mode or x.dim() not in (dims + 1, dims + 2):
        return None
    return [*x.shape[:-dims], *_counts(x.shape[-dims:], *window)]


def _counts(
    sizes: Sequence[Any], kernel: Any, stride: Any, padding: Any, dilation: Any
) -> list[Any]:
    """Return the number of windows along each dim."""
    window = (_per_dim(extent, len(sizes)) for extent in (kernel, stride, padding, dilation))
    return [
        (size + 2 * around - apart * (length - 1) - 1) // step + 1
        for size, length, step, around, apart in zip(sizes, *window, strict=True)
    ]


def _per_dim(value: Any, dims: int) -> Sequence[Any]:
    """Return an argument for each dim; torch accepts one value for all dims."""
    numbers = [*value] if isinstance(value, list | tuple) else [value]
    return numbers * dims if len(numbers) == 1 else numbers


# --- recurrent layers, and packed sequences


def _fresh_size(x: Any, overload: Any) -> Any:
    """Return a fresh symbolic size without a hint, of at least 1."""
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

    env = x.fake_mode.shape_env
    if env is None:
        raise DynamicOutputShapeException(overload)
    size = env.create_unbacked_symint()
    _constrain_range_for_size(size, min=1)
    return size


@shape_rule("_pack_padded_sequence", fixed=True)
def _pack(x: Any, lengths: Any, batch_first: bool) -> Any:
    overload = torch.ops.aten._pack_padded_sequence.default
    rows, steps = _fresh_size(x, overload), _fresh_size(x, overload)
    return new_like(x, [rows, *x.shape[2:]]), new_like(lengths, [steps], torch.int64)


@shape_rule("_pad_packed_sequence", fixed=True)
def _pad(
    data: Any, batch_sizes: Any, batch_first: bool, padding_value: Any, total_length: Any
) -> Any:
    count = _fresh_size(data, torch.ops.aten._pad_packed_sequence.default)
    shape = [total_length, count, *data.shape[1:]]
    order = [1, 0, *range(2, len(shape))]
    if batch_first:
        shape[:2] = shape[1::-1]
    padded = new_like(data, shape, order=order if batch_first else ())
    return padded, new_like(batch_sizes, [count], torch.int64)


@shape_rule("lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data", fixed=True)
def _layers(
    data: Any, batch_sizes: Any, hx: Any, params: Sequence[Any], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool,
) -> Any:  # fmt: skip
    features, ended = _features_and_states(data, hx, bidirectional)
    return new_like(data, [data.shape[0], features]), *ended


@shape_rule("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input", fixed=True)
def _layers_of_steps(
    x: Any, hx: Any, params: Sequence[Any], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    if x.dim() != 3:
        return NotImplemented  # torch raises the error
    features, ended = _features_and_states(x, hx, bidirectional)
    order = (1, 0, 2) if batch_first else ()
    return new_like(x, [*x.shape[:2], features], order=order), *ended


def _features_and_states(x: Any, hx: Any, bidirectional: bool) -> tuple[Any, list[Any]]:
    """Return the number of features of a layer's result, and the states after the last step."""
    states = [hx] if isinstance(hx, torch.Tensor) else list(hx)
    features = states[0].shape[-1] * (2 if bidirectional else 1)
    return features, [new_like(x, state.shape, state.dtype) for state in states]
