"""The table of torch's operators against the torch at hand."""

from __future__ import annotations

import random

import pytest
import torch

import tsfunc
from tools.catalogue import PAGE, try_all, with_census
from tsfunc.bridge.tracers.schemas import operator_signature, registered_overloads
from tsfunc.ops import Category, all_rows
from tsfunc.ops.catalogue.decisions import read_decisions
from tsfunc.ops.catalogue.operator_table import PATH, read_table, render, tabulate
from tsfunc.ops.catalogue.trial import Evidence

TABLE = read_table()
NAMES = registered_overloads("aten")
# The table is made with one release of torch; other releases add and remove operators.
same_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the table is made with torch 2.13"
)


@same_torch
def test_no_overload_is_missing_and_none_is_extra() -> None:
    assert list(TABLE) == NAMES
    assert len(NAMES) == 3110


@same_torch
def test_the_table_follows_from_rules_and_decisions() -> None:
    evidence = {name: line.evidence for name, line in TABLE.items()}
    made = render(tabulate(NAMES, evidence))
    assert made == PATH.read_text("utf-8"), "run python -m tools.catalogue"


@same_torch
def test_the_census_of_the_docs_is_current() -> None:
    page = PAGE.read_text("utf-8")
    assert with_census(page) == page, "run python -m tools.catalogue"


@same_torch
def test_every_overload_has_a_category_that_somebody_or_some_rule_gave() -> None:
    assert [line.name for line in TABLE.values() if line.source.startswith("unknown")] == []


def test_the_table_follows_the_schema() -> None:
    for name in NAMES:
        signature = operator_signature(name)
        assert signature is not None
        if name in TABLE:
            facts = TABLE[name].facts
            assert facts.mutates == signature.mutates, name
            assert facts.aliases == signature.aliases, name
            assert facts.random or "nondeterministic_seeded" not in signature.tags, name


def test_a_variant_has_the_category_of_its_operator() -> None:
    for line in TABLE.values():
        if line.follows:
            assert line.category is TABLE[line.follows].category, line.name


def test_every_decision_is_about_an_operator_that_there_is() -> None:
    bare = {name.partition("::")[2] for name in NAMES}
    bare |= {name.partition("::")[2] for name in TABLE}  # torch 2.14 has no cholesky and no qr
    known = bare | {name.partition(".")[0] for name in bare}
    decisions = read_decisions()
    words = [*decisions.exact, *decisions.data_dependent]
    words += [decision.follows for decision in decisions.exact.values() if decision.follows]
    assert [word for word in words if word.removesuffix(".default") not in known] == []


def test_every_pattern_decides_something() -> None:
    decisions = read_decisions()
    sources = {line.source for line in TABLE.values()}
    for pattern, decision in decisions.patterns:
        assert f"decided: {decision.reason}" in sources, pattern


# Examples from the taxonomy itself (E. Z. Yang, 2020), and their consequences for other families.
EXAMPLES = {
    Category.TENSOR_ITERATOR: "add.Tensor sum sum.dim_IntList mul_.Tensor relu clamp where.self "
    "mean.dim amax lerp.Scalar logical_and eq.Scalar sigmoid_backward mse_loss max.dim",
    Category.FIXED: "convolution addbmm conv2d mm bmm.out upsample_nearest2d lstm.input dot",
    Category.N_DIMENSIONAL: "squeeze index_add tensordot index.Tensor gather topk fft_fft glu "
    "rot90 transpose_ view slice.Tensor scatter_.src constant_pad_nd diag_embed",
    Category.IDENTITY: "clone contiguous zeros_like detach to.dtype alias dropout "
    "cumsum softmax.int _log_softmax_backward_data flip roll sort renorm_",
    Category.FLATTEN: "take take.out put_ bucketize.Tensor bucketize.Scalar histc",
    Category.COMPOSITE: "kl_div isfinite isclose l1_loss poisson_nll_loss",
    Category.BATCHED: "nll_loss adaptive_avg_pool2d linalg_inv matmul cholesky max_pool2d tril "
    "layer_norm cdist reflection_pad2d nll_loss_backward",
    Category.FEATURE_BATCHED: "batch_norm embedding native_batch_norm group_norm cudnn_batch_norm",
    Category.FACTORY: "empty.memory_format zeros arange.start_out rand eye linspace new_zeros",
    Category.TRIVIAL: "size.int is_floating_point numel stride.int item dense_dim is_same_size",
    Category.SPARSE: "sparse_coo_tensor.indices coalesce to_dense _sparse_mm crow_indices",
    Category.DYNAMIC: "_unique2 nonzero masked_select bincount repeat_interleave.Tensor",
    Category.VARIADIC: "cat stack cat.out _foreach_add_.List block_diag einsum meshgrid hstack",
    Category.OTHER: "_nested_view_from_buffer _fused_adam_ fbgemm_pack_quantized_matrix",
}


@pytest.mark.parametrize(
    ("name", "category"),
    [(f"aten::{name}", c) for c, names in EXAMPLES.items() for name in names.split()],
)
def test_categories_of_known_operators(name: str, category: Category) -> None:
    assert tsfunc.ops.lookup(name).category is category


def test_other_says_why() -> None:
    for name in tsfunc.ops.operators(Category.OTHER):
        if name not in TABLE:  # of a newer torch, without a decision so far
            assert not torch.__version__.startswith("2.13.")
            continue
        assert TABLE[name].source.startswith(("decided: ", "follows ")), name


def tried() -> list[str]:
    return [name for name, line in TABLE.items() if line.evidence.tried]


@same_torch
def test_a_sample_tried_again_gives_the_same() -> None:
    names = sorted(random.Random(0).sample(tried(), 40))
    for name, evidence in try_all(names).items():
        assert evidence == TABLE[name].evidence, name


@same_torch
def test_an_operator_that_crashes_the_process_takes_nothing_with_it() -> None:
    found = try_all(["aten::sin", "aten::_chunk_cat", "aten::cos"])
    assert not found["aten::_chunk_cat"].tried
    assert found["aten::sin"].tried
    assert found["aten::cos"].tried


# Operators whose trial calls tell less than a real call would.
SAYS_LITTLE = {
    "aten::_saturate_weight_to_fp16",  # refuses vectors, although its shapes would allow them
    "aten::linalg_norm.ord_str",  # tried with the Frobenius norm, which takes matrices
    "aten::_thnn_differentiable_lstm_cell_backward",  # reads nothing if no gradient is given
    "aten::mkldnn_rnn_layer_backward",  # likewise
    "aten::_cummax_helper",  # writes a tensor of the same size and returns nothing
    "aten::_cummin_helper",  # likewise
    "aten::_masked_softmax_backward",  # returns a tensor with one dim for a tensor without dims
    "aten::_test_optional_floatlist",  # without numbers it returns its argument
    "aten::_test_optional_intlist",  # likewise
    "aten::_test_optional_filled_intlist",  # likewise
}


def test_trials_agree_with_every_category() -> None:
    for name in tried():
        evidence, category = TABLE[name].evidence, TABLE[name].category
        if name in SAYS_LITTLE:
            continue
        if category is Category.IDENTITY:
            assert evidence.same or not evidence.together, name
        if category is Category.TENSOR_ITERATOR:
            assert any(map(evidence.every_rank, evidence.ranks)), name
        if category is Category.FIXED:
            assert not all(map(evidence.every_rank, evidence.ranks)), name


def test_evidence_in_words_is_read_back() -> None:
    for evidence in (
        Evidence(),
        Evidence({"self": [0, 1, 2, 4], "other": [3]}, True, False, True, "apart"),
        Evidence({"self": [6]}),
    ):
        assert Evidence.parse(evidence.in_words()) == evidence
    assert Evidence({"a": [0, 1, 2, 5]}, True).in_words() == "a 0-2 5; together"


# Operators that have a row and that torch has since 2.14.
NEWER = {"aten::linalg_matrix_sqrth", "aten::linalg_polar"}


def test_rows_are_for_operators_of_the_table() -> None:
    rows = {name for name in all_rows() if name.startswith("aten::")}
    assert rows - TABLE.keys() == NEWER
