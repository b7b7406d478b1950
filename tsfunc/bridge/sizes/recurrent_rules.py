"""Result shapes of recurrent layers, and of packed sequences.

torch computes the shapes of a layer by all of its steps, which takes a second for twenty of them.

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
