"""Calls of operators whose schemas do not determine valid arguments.

``RECORDED`` has programs, whose operator calls are recorded in the forward and backward pass.
``BY_HAND`` has calls of single operators. ``ELSEWHERE`` has calls of operators whose kernels are
for other devices: the tests compare the shapes and dtypes of their results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.harness import record, rows_of

Call = tuple[list[Any], dict[str, Any]]
Calls = Callable[[], list[Call]]
aten = torch.ops.aten


def call(*args: Any, **kwargs: Any) -> Call:
    return list(args), kwargs


def wide(*shape: int) -> Tensor:
    """Return values to which autograd reacts."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def plain(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) + 0.1


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


RESAMPLINGS = (
    "upsample_nearest1d upsample_linear1d _upsample_nearest_exact1d",
    "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa",
    "upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d",
)


def _resampling(kind: str, rank: int) -> list[Call]:
    x = plain(2, 3, *(3, 2, 4)[:rank])
    align = [] if "nearest" in kind else [False]
    return [call(x, [4] * rank, *align, None), call(x, None, *align, [1.5] * rank)]


def _norms() -> Any:
    x = wide(4, 3, 2)
    weight, bias = wide(3), wide(3)
    out = F.batch_norm(x, plain(3), positive(3), weight, bias, training=True)
    again = F.batch_norm(x, plain(3), positive(3), weight, bias)
    layer = F.layer_norm(x, (3, 2), wide(3, 2), wide(3, 2))
    group = F.group_norm(wide(4, 4, 2), 2, wide(4), wide(4))
    return out, again, layer, group, F.rms_norm(x, (2,), wide(2))


def _ctc() -> Any:
    log_probs = F.log_softmax(wide(5, 2, 4), -1)
    lengths = torch.tensor([5, 4]), torch.tensor([2, 1])
    targets = torch.tensor([[1, 2], [3, 1]])
    return (
        torch.ctc_loss(log_probs, targets, [5, 4], [2, 1]),
        F.ctc_loss(log_probs, targets, *lengths),
    )


def _bags() -> Any:
    weights = wide(5, 3)
    indices, offsets = torch.tensor([0, 2, 1, 4]), torch.tensor([0, 3])
    summed = F.embedding_bag(indices, weights, offsets, mode="sum", per_sample_weights=wide(4))
    return summed, F.embedding_bag(indices, weights, offsets, mode="mean")


def _float8() -> tuple[Tensor, Tensor]:
    kind = torch.float8_e4m3fn
    return plain(4, 16).to(kind), plain(32, 16).to(kind).t()


def _segments() -> Any:
    lengths = torch.tensor([2, 1, 3])
    return [
        torch.segment_reduce(wide(6, 2), how, lengths=lengths)
        for how in ("sum", "mean", "max", "min")
    ]


def _folds() -> Any:
    grids = F.grid_sample(wide(2, 3, 4, 4, 4), wide(2, 2, 2, 2, 3), align_corners=False)
    up = [
        F.interpolate(wide(1, 2, 3, 3, 3), scale_factor=2, mode=mode)
        for mode in ("trilinear", "nearest", "nearest-exact")
    ]
    return grids, up


RECORDED: Mapping[str, Callable[[], Any]] = {
    "norms": _norms,
    "ctc_loss": _ctc,
    "embedding_bag": _bags,
    "segment_reduce": _segments,
    "grids": _folds,
    "convolution": lambda: F.conv2d(wide(2, 3, 5, 5), wide(4, 3, 3, 3), wide(4)),
    "glu": lambda: F.glu(wide(3, 4)),
    "cdist": lambda: torch.cdist(wide(2, 3, 2), wide(2, 4, 2)),
    "pdist": lambda: F.pdist(wide(4, 3)),
    "nll_loss": lambda: F.nll_loss(F.log_softmax(wide(4, 3), 1), whole(3, 4)),
    "nll_loss of one": lambda: F.nll_loss(F.log_softmax(wide(3), 0), whole(3)),
    "nll_loss2d": lambda: F.nll_loss(F.log_softmax(wide(2, 3, 4, 4), 1), whole(3, 2, 4, 4)),
    "multi_margin_loss": lambda: F.multi_margin_loss(wide(4, 3), whole(3, 4)),
    "multilabel_margin_loss": lambda: F.multilabel_margin_loss(
        wide(2, 4), torch.tensor([[3, 0, -1, 1], [1, 2, 3, -1]])
    ),
    "binary_cross_entropy": lambda: F.binary_cross_entropy(
        wide(4).sigmoid(), positive(4).clamp(max=1)
    ),
    "slice": lambda: wide(4, 3)[1:3],
    "diagonal": lambda: wide(3, 3).diagonal(),
    "unfold": lambda: wide(5, 3).unfold(0, 2, 1),
    "padding": lambda: (
        [F.pad(wide(2, 3, 4), (1, 1), mode) for mode in ("reflect", "replicate")]
        + [F.pad(wide(1, 3, 4, 4), (1, 1, 1, 1), mode) for mode in ("reflect", "replicate")]
    ),
    "attention": lambda: F.scaled_dot_product_attention(
        wide(2, 2, 3, 4), wide(2, 2, 3, 4), wide(2, 2, 3, 4)
    ),
    "weight_norm": lambda: torch._weight_norm(wide(3, 2), wide(3, 1), 0),
}


@functools.cache
def recorded() -> dict[str, list[Call]]:
    """Return the calls of these programs, by operator."""
    found: dict[str, list[Call]] = {}
    for program in RECORDED.values():
        for each in record(lambda program=program: _leaves(program())):
            found.setdefault(each.op.name(), []).append((each.args, each.kwargs))
    return found


def _leaves(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    return [leaf for item in out for leaf in _leaves(item)]


def _spread() -> list[Call]:
    """Return the calls of scatter and similar operators with a reduction."""
    index = torch.tensor([[0, 1, 2], [2, 0, 1]])
    return [call(plain(3, 3), 0, index, plain(2, 3), reduce=how) for how in ("add", "multiply")]


def _spread_value() -> list[Call]:
    index = torch.tensor([[0, 1, 2], [2, 0, 1]])
    return [call(plain(3, 3), 0, index, 1.5, reduce=how) for how in ("add", "multiply")]


def _index_reduce() -> list[Call]:
    index = torch.tensor([0, 2])
    return [
        call(plain(3, 2), 0, index, plain(2, 2), how, include_self=keep)
        for how, keep in (("prod", True), ("mean", False), ("amax", True), ("amin", False))
    ]


def _bounds() -> list[Call]:
    return [call(plain(3), -0.5, 0.5), call(plain(2, 2), 0.0), call(plain(2), None, 0.1)]


def _lu() -> tuple[Tensor, Tensor]:
    factors, pivots = torch.linalg.lu_factor(plain(3, 3) + 3 * torch.eye(3, dtype=torch.float64))
    return factors, pivots


def _positive() -> Tensor:
    """Return a symmetric matrix with positive eigenvalues."""
    a = plain(3, 3)
    return a @ a.mT + torch.eye(3, dtype=torch.float64)


def _ldl() -> list[Call]:
    a = plain(3, 3)
    factors, pivots = torch.linalg.ldl_factor(a + a.mT + 6 * torch.eye(3, dtype=torch.float64))
    return [call(factors, pivots, plain(3, 2))]


def _fractional() -> list[Call]:
    return [call(plain(1, 2, 5, 5, 5), [2, 2, 2], [2, 2, 2], torch.rand(1, 2, 3).double())]


def _rnn_layer() -> list[Call]:
    shapes = [(5, 2, 3), (16, 3), (16, 4), (16,), (16,), (2, 4), (2, 4)]
    tensors = [torch.randn(*shape) for shape in shapes]
    return [call(*tensors, False, [], 2, 4, 1, True, False, False, False)]


BY_HAND: Mapping[str, Calls] = {
    "aten::einsum": lambda: [
        call("ij,kj->ik", [plain(2, 4), plain(3, 4)]),
        call("i...,...i", [plain(2, 4), plain(4, 2)]),
        call("ii", [plain(3, 3)]),
    ],
    "aten::conv3d": lambda: [
        call(plain(2, 2, 3, 4, 3), plain(4, 2, 2, 3, 2), plain(4), [1, 2, 1], [1], [1], 1),
        call(plain(2, 3, 4, 3), plain(2, 1, 2, 2, 2), plain(2), [1], [0, 1, 0], [1], 2),
    ],
    "aten::conv3d.padding": lambda: [
        call(plain(2, 2, 3, 4, 3), plain(4, 2, 2, 3, 2), plain(4), [1], "same"),
        call(plain(2, 3, 4, 3), plain(2, 2, 3, 3, 1), None, [1], "same"),
    ],
    "aten::_reshape_alias": lambda: [call(plain(2, 6), [3, 4], [4, 1])],
    "aten::_reshape_alias_copy": lambda: [call(plain(2, 6), [3, 4], [4, 1])],
    "aten::rand": lambda: [call([2, 3])],
    "aten::rand.generator": lambda: [call([2, 3], generator=None)],
    "aten::randn": lambda: [call([2, 3])],
    "aten::randn.generator": lambda: [call([2, 3], generator=None)],
    "aten::randint": lambda: [call(5, [2, 3])],
    "aten::randint.generator": lambda: [call(5, [2, 3], generator=None)],
    "aten::randint.low": lambda: [call(2, 5, [2, 3])],
    "aten::randint.low_generator": lambda: [call(2, 5, [2, 3], generator=None)],
    "aten::randperm": lambda: [call(4)],
    "aten::randperm.generator": lambda: [call(4, generator=None)],
    "aten::normal.float_float": lambda: [call(0.0, 1.0, [2, 3])],
    "aten::randint_like.Tensor": lambda: [call(plain(2, 3), torch.tensor(5))],
    "aten::randint_like.Tensor_generator": lambda: [
        call(plain(2, 3), torch.tensor(5), generator=None)
    ],
    "aten::randint_like.low_dtype": lambda: [call(plain(2, 3), 2, 5)],
    "aten::randint_like.low_generator_dtype": lambda: [call(plain(2), 2, 5, generator=None)],
    "aten::scatter.reduce": _spread,
    "aten::scatter_.reduce": _spread,
    "aten::scatter.value_reduce": _spread_value,
    "aten::scatter_.value_reduce": _spread_value,
    "aten::index_reduce": _index_reduce,
    "aten::index_reduce_": _index_reduce,
    "aten::clamp": _bounds,
    "aten::clamp_": _bounds,
    "aten::clip": _bounds,
    "aten::clip_": _bounds,
    "aten::lu_unpack": lambda: [call(*_lu()), call(*_lu(), unpack_pivots=False)],
    "aten::linalg_lu_solve": lambda: [
        call(*_lu(), plain(3, 2)),
        call(*_lu(), plain(2, 3), left=False),
    ],
    "aten::linalg_ldl_solve": _ldl,
    "aten::linalg_matrix_sqrth": lambda: [call(_positive())],
    "aten::linalg_polar": lambda: [call(_positive()), call(plain(4, 3))],
    "aten::_linalg_check_errors": lambda: [
        call(torch.zeros((), dtype=torch.int32), "here", is_matrix=True)
    ],
    "aten::fractional_max_pool3d": _fractional,
    "aten::affine_grid_generator": lambda: [
        call(plain(2, 2, 3), [2, 1, 3, 4], True),
        call(plain(1, 3, 4), [1, 1, 2, 3, 4], False),
    ],
    **{
        f"aten::{kind}.vec": functools.partial(_resampling, kind, rank)
        for rank, kinds in enumerate(RESAMPLINGS, 1) for kind in kinds.split()
    },
    "aten::mkldnn_rnn_layer": _rnn_layer,
    "aten::_embedding_bag_forward_only": lambda: [
        call(plain(5, 3), torch.tensor([0, 2, 1, 4]), torch.tensor([0, 3]))
    ],
    "aten::istft": lambda: [
        call(torch.randn(*shape, dtype=torch.complex128), 4, None, None, torch.ones(4).double())
        for shape in ((3, 5), (2, 3, 5))
    ],
    "aten::glu_jvp": lambda: [call(plain(3, 2), plain(3, 4), plain(3, 4), -1)],
    "aten::glu_backward_jvp": lambda: [
        call(plain(3, 4), plain(3, 2), plain(3, 4), plain(3, 2), plain(3, 4), -1)
    ],
    "aten::_fused_rms_norm": lambda: [call(plain(3, 4), [4], plain(4), 1e-6)],
    "aten::native_batch_norm": lambda: [
        call(plain(4, 3, 2), plain(3), plain(3), None, None, True, 0.1, 1e-5),
        call(plain(4, 3, 2), plain(3), plain(3), plain(3), positive(3), False, 0.1, 1e-5),
    ],
    "aten::_batch_norm_no_update": lambda: [
        call(plain(4, 3, 2), plain(3), plain(3), plain(3), positive(3), 0.1, 1e-5)
    ],
    "aten::_native_batch_norm_legit.no_stats": lambda: [
        call(plain(4, 3, 2), plain(3), plain(3), True, 0.1, 1e-5)
    ],
    "aten::batch_norm_backward": lambda: [
        call(
            plain(4, 3, 2), plain(4, 3, 2), plain(3), plain(3), positive(3), plain(3), positive(3),
            training, 1e-5, [True, True, True], torch.empty(0, dtype=torch.uint8),
        )
        for training in (True, False)
    ],
    "aten::addbmm_": lambda: [call(plain(2, 4), plain(3, 2, 5), plain(3, 5, 4))],
    "aten::_scaled_mm": lambda: [call(*_float8(), torch.tensor(0.5), torch.tensor(3.0))],
    "aten::_scaled_mm_v2": lambda: [
        call(
            *_float8(), [torch.tensor(0.5)], [0], [0], [torch.tensor(3.0)], [0], [0], None,
            torch.bfloat16,
        )
    ],
    "aten::_euclidean_dist": lambda: [call(plain(3, 2), plain(4, 2))],
    "aten::scaled_dot_product_attention": lambda: [
        call(plain(2, 3, 4), plain(2, 3, 4), plain(2, 3, 4)),
        call(plain(3, 4), plain(5, 4), plain(5, 4)),
    ],
    "aten::nonzero_static": lambda: [call(whole(2, 2, 3), size=2, fill_value=-1)],
}  # fmt: skip


def meta(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")


def _attention() -> list[Tensor]:
    return [meta(2, 2, 4, 8) for _ in range(3)]


def _image() -> Tensor:
    return meta(4, 3, 2, 2)


def _drawn() -> list[Tensor]:
    """Return stand-ins for lengths or seeds that a GPU kernel passes to its backward kernel."""
    return [torch.empty(0, dtype=torch.int64, device="meta") for _ in range(2)]


ALL_THREE = [True, True, True]
ELSEWHERE: Mapping[str, Calls] = {
    "aten::_scaled_dot_product_efficient_attention": lambda: [call(*_attention(), None, True)],
    "aten::_scaled_dot_product_flash_attention": lambda: [call(*_attention())],
    "aten::_scaled_dot_product_cudnn_attention": lambda: [call(*_attention(), None, True)],
    "aten::_scaled_dot_product_efficient_attention_backward": lambda: [
        call(
            meta(2, 2, 4, 8), *_attention(), None, meta(2, 2, 4, 8), meta(2, 2, 4), *_drawn(),
            0.0, [True, True, True, False],
        )
    ],
    "aten::_scaled_dot_product_flash_attention_backward": lambda: [
        call(
            meta(2, 2, 4, 8), *_attention(), meta(2, 2, 4, 8), meta(2, 2, 4), *_drawn(),
            4, 4, 0.0, False, *_drawn(),
        )
    ],
    "aten::_scaled_dot_product_cudnn_attention_backward": lambda: [
        call(
            meta(2, 2, 4, 8), *_attention(), meta(2, 2, 4, 8), meta(2, 2, 4), *_drawn(),
            None, *_drawn(), 4, 4, 0.0, False,
        )
    ],
    "aten::cudnn_batch_norm": lambda: [
        call(_image(), meta(3), meta(3), None, None, True, 0.1, 1e-5)
    ],
    "aten::miopen_batch_norm": lambda: [
        call(_image(), meta(3), meta(3), None, None, True, 0.1, 1e-5)
    ],
    "aten::cudnn_batch_norm_backward": lambda: [
        call(_image(), _image(), meta(3), None, None, meta(3), meta(3), 1e-5, meta(0))
    ],
    "aten::_thnn_fused_lstm_cell_backward_impl": lambda: [
        call(meta(2, 4), meta(2, 4), meta(2, 4), meta(2, 4), meta(2, 16), True)
    ],
    "aten::_fused_rms_norm_backward": lambda: [
        call(meta(3, 4), meta(3, 4), [4], meta(3, 1), meta(4), [True, True])
    ],
    "aten::_masked_scale": lambda: [call(meta(2, 3), meta(2, 3).byte(), 2.0)],
}  # fmt: skip

# Rows that can't be tried without their device, with the reason.
UNTRIED: Mapping[str, str] = {
    "aten::convolution_overrideable": "a hook for backends that are not torch's own",
    "aten::convolution_backward_overrideable": "a hook for backends that are not torch's own",
    "aten::mkldnn_max_pool2d": "it takes tensors of the layout mkldnn only",
    "aten::_fw_primal_copy": "it has a meaning within forward mode's own passes only",
    "aten::pin_memory": "memory is pinned for a GPU",
    "aten::_pin_memory": "memory is pinned for a GPU",
}

_STAND_INS = "tests/ops/test_kernels_elsewhere.py"

# Rows whose calls depend on each other, or read all examples at once, and the test of each.
RUN_BY_HAND: Mapping[str, str] = {
    **dict.fromkeys(
        rows_of("sparse.py", "compressed.py"), "tests/ops/test_sparse.py::test_each_row_is_met"
    ),
    **dict.fromkeys(
        rows_of("collectives.py"), "tests/distributed/test_functional.py::test_on_two_ranks"
    ),
    **dict.fromkeys(
        ("aten::_thnn_fused_lstm_cell", "aten::_thnn_fused_gru_cell"),
        f"{_STAND_INS}::test_fused_cells_are_the_loop_over_their_examples",
    ),
    "aten::_thnn_fused_gru_cell_backward": (
        f"{_STAND_INS}::test_gradients_of_fused_cells_are_the_loop_over_their_examples"
    ),
    "aten::_embedding_bag_backward": "tests/ops/test_embedding.py::test_embedding_bag",
    "aten::mkldnn_rnn_layer": "tests/ops/test_recurrent.py::test_lstm_layer",
    "aten::mkldnn_rnn_layer_backward": "tests/ops/test_recurrent.py::test_lstm_layer_backward",
    "aten::_batch_norm_with_update": "tests/ops/test_registry.py::test_statistics_are_updated",
    "aten::_assert_async": "tests/ops/test_registry.py::test_assertions_are_for_all_examples",
    "aten::_assert_async.msg": "tests/ops/test_registry.py::test_assertions_are_for_all_examples",
    "aten::_is_all_true": "tests/ops/test_registry.py::test_assertions_are_for_all_examples",
    "aten::_is_any_true": "tests/ops/test_registry.py::test_assertions_are_for_all_examples",
    "aten::resize_": "tests/transforms/test_inplace.py::test_resize",
}
# The number of results with defined values; the other results are for the backward kernel alone.
FIRST_RESULTS: Mapping[str, int] = {
    "aten::_ctc_loss": 1,
    "aten::_ctc_loss.Tensor": 1,
    "aten::_scaled_dot_product_efficient_attention": 1,
    "aten::_scaled_dot_product_flash_attention": 1,
    "aten::_scaled_dot_product_cudnn_attention": 1,
}


def examples(name: str) -> Iterator[Call]:
    """Return the calls in this file for an operator."""
    yield from BY_HAND[name]() if name in BY_HAND else recorded().get(name, ())
