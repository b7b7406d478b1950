"""Result shapes for packed sequences, whose numbers of rows and steps depend on data.

A packed sequence has as many rows as the sum of its lengths, and as many batch sizes as its
longest sequence: NOTE [sizes of data] in ``symbols``. The first batch size is the number of
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from tsfunc.bridge.sizes.shape_rules import new_like, shape_rule


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
    states = [hx] if isinstance(hx, torch.Tensor) else list(hx)
    features = states[0].shape[-1] * (2 if bidirectional else 1)
    ended = [new_like(data, state.shape, state.dtype) for state in states]
    return new_like(data, [data.shape[0], features]), *ended
