"""Views, copies and moves of elements, and lists of tensors: sample calls for every row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.harness import Level, check, overload, rows_of, vary
from tsfunc import vmap
from tsfunc.ops import find

SHAPE_CHANGING = {
    "aten::squeeze_",
    "aten::squeeze_.dim",
    "aten::squeeze_.dims",
    "aten::t_",
    "aten::transpose_",
    "aten::swapaxes_",
    "aten::swapdims_",
    "aten::unsqueeze_",
    "aten::as_strided_",
}
X, Y, V, S = torch.randn(2, 3, 4), torch.randn(1, 3, 1), torch.randn(4), torch.randn(())
M, C = torch.randn(3, 4), torch.randn(2, 3, dtype=torch.complex64)
IMAGE, WIDE = torch.randn(2, 4, 5, 6), torch.randn(8, 4, 6)
LAST = {"memory_format": torch.channels_last}
DENSE = {"memory_format": torch.contiguous_format}

Call = tuple[Any, ...]
CALLS: dict[str, list[Call]] = {
    "view": [(X, [6, 4]), (X, [-1]), (X, [4, -1]), (S, [1, 1]), (X[:0], [0, 3, 4])],
    "reshape": [(X, [6, 4]), (X.mT, [-1]), (S, [1])],
    "_unsafe_view": [(X, [2, 12]), (S, [])],
    "view_copy": [(X, [24])],
    "_reshape_copy": [(X, [24])],
    "_reshape_alias": [(X, [6, 4], [4, 1])],
    "_reshape_alias_copy": [(X, [6, 4], [4, 1])],
    "expand": [(Y, [2, 3, 4]), (Y, [5, -1, -1, 2]), (S, []), (S, [3]), (V, [0, 4])],
    "expand_copy": [(Y, [6, 2, 3, 4])],
    "broadcast_to": [(Y, [6, 2, 3, 4]), (S, [2])],
    "permute": [(X, [2, 0, 1]), (X, [-1, 0, -2]), (S, [])],
    "permute_copy": [(X, [1, 0, 2])],
    "transpose.int": [(X, 0, -1), (X, 1, 1), (S, 0, -1)],
    "transpose_copy.int": [(X, 0, 2)],
    "swapaxes": [(X, 0, 2)],
    "swapdims": [(X, 0, 1)],
    "t": [(M,), (V,), (S,)],
    "t_copy": [(M,)],
    "squeeze": [(Y,), (X,), (S,), (torch.randn(1, 1),)],
    "squeeze_copy": [(Y,)],
    "squeeze.dim": [(Y, 0), (Y, 1), (Y, -1), (S, 0), (S, -1)],
    "squeeze_copy.dim": [(Y, 0)],
    "squeeze.dims": [(Y, [0, 2]), (Y, [-1, 1]), (Y, []), (S, [0])],
    "squeeze_copy.dims": [(Y, [0, 2])],
    "unsqueeze": [(X, 0), (X, 2), (X, 3), (X, -1), (X, -4), (S, 0), (S, -1)],
    "unsqueeze_copy": [(X, 1)],
    "select.int": [(X, 0, 1), (X, 1, -1), (X, -1, 2), (V, 0, 0)],
    "select_copy.int": [(X, 1, 2)],
    "slice.Tensor": [(X,), (X, 1, 1), (X, -1, -3, None, 2), (X, 0, 5, 9), (V, 0, 0, 2)],
    "slice_copy.Tensor": [(X, 1, 1, 2)],
    "narrow": [(X, 1, 1, 2), (X, -1, 0, 0)],
    "narrow_copy": [(X, 1, 1, 2)],
    "split.Tensor": [(X, 1), (X, 2, 1), (X, 3, -1)],
    "split.sizes": [(X, [1, 2], 1)],
    "split_with_sizes": [(X, [1, 1]), (X, [1, 3], -1)],
    "split_copy.Tensor": [(X, 2, 1)],
    "split_with_sizes_copy": [(X, [1, 2], 1)],
    "unsafe_split.Tensor": [(X, 2, 1)],
    "unsafe_split_with_sizes": [(X, [1, 2], 1)],
    "chunk": [(X, 2), (X, 3, -1)],
    "unsafe_chunk": [(X, 2, 1)],
    "tensor_split.sections": [(X, 2), (X, 3, -1)],
    "tensor_split.indices": [(X, [1, 2], 1), (X, [1])],
    "unbind.int": [(X,), (X, 1), (X, -1), (V,)],
    "unbind_copy.int": [(X, 1)],
    "diagonal": [(X,), (X, 1, 1, 2), (X, -1, -1, 0)],
    "diagonal_copy": [(X, 0, 0, 2)],
    "unfold": [(X, 1, 2, 1), (X, -1, 3, 1), (S, 0, 1, 1)],
    "unfold_copy": [(X, 1, 2, 1)],
    "view.dtype": [(X, torch.int32), (X, torch.float64), (X, torch.int16), (S, torch.int32)],
    "view_copy.dtype": [(X, torch.int32)],
    "view_as_complex": [(torch.randn(3, 2),), (torch.randn(2),)],
    "view_as_real": [(C,), (C[0, 0],)],
    "view_as_real_copy": [(C,)],
    "real": [(C,), (X,)],
    "imag": [(C,)],
    "flatten.using_ints": [(X,), (X, 1), (X, 0, -2), (V,), (S,)],
    "unflatten.int": [(X, 0, (1, -1)), (X, -1, (-1, 1)), (X, 1, (-1,)), (V, 0, (1, 1, -1))],
    "as_strided": [(V, [2, 2], [2, 1]), (V, [3], [1], 1), (X, [2, 2], [1, 4])],
    "as_strided_copy": [(V, [2, 2], [2, 1])],
    "as_strided_scatter": [(V, torch.randn(2, 2), [2, 2], [2, 1])],
    # n_dimensional.py
    "repeat": [(X, [1, 2, 1]), (X, [2, 1, 1, 3]), (S, []), (S, [2]), (V, [0])],
    "flip": [(X, [0]), (X, [-1, 1]), (X, []), (S, []), (S, [0])],
    "roll": [(X, [1]), (X, [1, 2], [0, -1]), (S, [1]), (V, [-1], [0])],
    "rot90": [(X,), (X, 3, [2, 0]), (X, 2, [0, 1]), (X, -1, [-1, 0])],
    "tril": [(X,), (M, 1), (M, -1)],
    "triu": [(X, 1), (M,)],
    "tril_": [(X,), (M, 1)],
    "triu_": [(X, -1), (M,)],
    "constant_pad_nd": [(X, [1, 2]), (X, [1, 2, 0, 1], 3.0), (X, [1] * 6), (V, [-1, 2]), (S, [])],
    "diag_embed": [(V,), (X, 1), (X, 0, 0, 2), (M, -1, -1, 0), (torch.randn(3), 0, 1, 0)],
    "trace": [(M,), (M.long(),)],
    "select_backward": [(M, [2, 3, 4], 0, 1), (M, [3, 4, 2], -1, 1), (S, [3], 0, 2)],
    "slice_backward": [(M, [3, 9], 1, 2, 6, 1), (M, [5, 4], -2, 0, 5, 2)],
    "diagonal_backward": [(M, [3, 4, 5], 0, 1, 2), (M, [4, 3, 5], 0, 0, -1)],
    "unfold_backward": [(torch.randn(2, 3, 2), [2, 4], 1, 2, 1), (torch.randn(1), [], 0, 1, 1)],
    "select_scatter": [(X, M, 0, 1), (X, torch.randn(2, 3), -1, 0)],
    "slice_scatter": [(X, torch.randn(2, 2, 4), 1, 1), (X, X[:1].clone(), 0, 0, 1)],
    "diagonal_scatter": [(M, torch.randn(3)), (X, torch.randn(3, 2), 0, 0, 2)],
    "pixel_shuffle": [(WIDE, 2), (WIDE.expand(2, 8, 4, 6), 2)],
    "pixel_unshuffle": [(WIDE, 2)],
    "channel_shuffle": [(IMAGE, 2), (X.expand(2, 2, 3, 4)[:, 0], 3)],
    "native_channel_shuffle": [(IMAGE, 2)],
    "repeat_interleave.self_int": [(X, 2), (X, 3, 1), (X, 2, -1), (S, 2), (V, 2, 0)],
    "reflection_pad1d": [(M, [1, 2]), (X, [2, 0])],
    "reflection_pad2d": [(X, [1, 1, 2, 0]), (IMAGE, [1, 2, 1, 0])],
    "reflection_pad3d": [(IMAGE, [1, 2, 1, 0, 1, 1]), (IMAGE[None], [1, 0, 0, 1, 1, 1])],
    "replication_pad1d": [(M, [1, 2]), (X, [2, 0])],
    "replication_pad2d": [(X, [1, 1, 2, 0]), (IMAGE, [1, 2, 1, 0])],
    "replication_pad3d": [(IMAGE, [1, 2, 1, 0, 1, 1]), (IMAGE[None], [1, 0, 0, 1, 1, 1])],
    "reflection_pad1d_backward": [(torch.randn(3, 7), M, [1, 2])],
    "reflection_pad2d_backward": [(torch.randn(2, 5, 6), X, [1, 1, 2, 0])],
    "reflection_pad3d_backward": [(torch.randn(2, 6, 6, 9), IMAGE, [1, 2, 1, 0, 1, 1])],
    "replication_pad1d_backward": [(torch.randn(2, 3, 6), X, [2, 0])],
    "replication_pad2d_backward": [(torch.randn(2, 4, 6, 9), IMAGE, [1, 2, 1, 0])],
    "replication_pad3d_backward": [(torch.randn(2, 6, 6, 9), IMAGE, [1, 2, 1, 0, 1, 1])],
    # identity.py
    "clone": [(X,), (IMAGE, LAST), (X, DENSE), (S, DENSE)],
    "contiguous": [(X,), (X.mT,), (IMAGE, LAST), (S,)],
    "_to_copy": [(X, {"dtype": torch.float64}), (IMAGE, LAST)],
    "to.dtype": [(X, torch.int64), (S, torch.float64, False, True)],
    "to.dtype_layout": [(X, {"dtype": torch.int64})],
    "copy_": [(X, torch.randn(3, 1)), (X, S), (X, X.long()), (S, torch.randn(()))],
    "copy": [(X, torch.randn(3, 1)), (X, X.double())],
    "fill_.Tensor": [(X, S), (S.clone(), S)],
    "fill.Tensor": [(X, S), (S, torch.tensor(2))],
    "fill_.Scalar": [(X, 2)],
    "fill.Scalar": [(X, 2)],
    "zero": [(X,)],
    "zero_": [(X,)],
    "is_same_size": [(X, X), (X, M)],
    "_has_same_storage_numel": [(X, X)],
    "_new_zeros_with_same_feature_meta": [(X, X), (S, S)],
    "zeros_like": [(X,), (IMAGE, LAST), (X, {"dtype": torch.int64})],
    "ones_like": [(X,), (S, DENSE)],
    "full_like": [(X, 3.0), (IMAGE, 2.0, LAST)],
    # variadic.py
    "cat": [([X, X],), ([X, torch.randn(2, 1, 4)], 1), ([X, X.double()], -1), ([X], 2)],
    "concat": [([X, X], 1)],
    "concatenate": [([X, X], -1)],
    "stack": [([X, X],), ([X, X], 1), ([X, X], -1), ([S, S.double()],), ([M, M, M, M], 2)],
    "_stack": [([X, X], 1)],
    "movedim.int": [(X, 0, 2), (X, -1, 0), (V, 0, 0), (S, 0, -1)],
    "movedim.intlist": [(X, [0, 1], [2, 0]), (X, [-1], [0]), (X, [], []), (S, [], [])],
    "moveaxis.int": [(X, 1, -1)],
    "moveaxis.intlist": [(X, [0, 2], [-1, -2])],
    "diag": [(M,), (M, 1), (M, -2), (V,), (V, -1)],
    "tile": [(X, [2]), (X, [2, 1, 3]), (X, [2, 1, 1, 2]), (S, []), (S, [2]), (V, [0])],
    "pad": [(X, [1, 2]), (X, [0, 1, 2, 0], "constant", 2.5), (V, [-1, 1]), (S, [])],
    "broadcast_tensors": [([X, Y],), ([V, X, S],), ([X],), ([S, S.double()],)],
    "block_diag": [([M, V, S],), ([M, M.double()],), ([torch.zeros(0, 2), M],)],
}
UNARY = """alias alias_copy detach detach_copy lift lift_fresh lift_fresh_copy _lazy_clone _conj
    _conj_copy _neg_view _neg_view_copy conj resolve_conj resolve_neg""".split()
NOT_HERE = {
    "aten::_fw_primal",
    "aten::_fw_primal_copy",
    "aten::resize",
    "aten::resize_",
    "aten::detach_",
    "aten::pin_memory",
    "aten::_pin_memory",
    "aten::empty_like",
}
FILES = ("views.py", "n_dimensional.py", "identity.py", "variadic.py")


def _call(call: Call) -> tuple[Call, dict[str, Any]]:
    return (call[:-1], call[-1]) if isinstance(call[-1], dict) else (call, {})


def test_every_row_is_here() -> None:
    here = {f"aten::{name}" for name in (*CALLS, *UNARY)} | SHAPE_CHANGING | NOT_HERE
    assert here == set(rows_of(*FILES))


@pytest.mark.filterwarnings("ignore:.*_stack is deprecated")
@pytest.mark.parametrize("name", CALLS)
def test_views_equal_the_loop(name: str) -> None:
    op = overload(f"aten::{name}")
    for call in CALLS[name]:
        args, kwargs = _call(call)
        alone = None if not name.startswith("to.") else [(0,)]
        assert check(op, *args, choices=alone, **kwargs), f"{name} refuses {call}"


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    for x in (C,) if "_conj" in name else (X, S, C):
        assert check(overload(f"aten::{name}"), x)


VIEWS = """view expand permute transpose.int t squeeze squeeze.dim squeeze.dims unsqueeze
    select.int slice.Tensor narrow split.Tensor unbind.int diagonal unfold view.dtype alias detach
    as_strided view_as_real""".split()


@pytest.mark.parametrize("name", VIEWS)
def test_views_share_memory(name: str) -> None:
    op, row = overload(f"aten::{name}"), find(f"aten::{name}")
    assert row is not None and row.rule is not None
    for call in CALLS.get(name, [(X,)]):
        x = torch.stack([vary(call[0], i) for i in range(3)])
        out, _ = row.rule(op, Level(3), [0] + [None] * (len(call) - 1), (x, *call[1:]), {})
        for part in out if isinstance(out, (list, tuple)) else [out]:
            same = part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            assert same, f"{name}{call[1:]} copies"


def test_the_batch_dim_is_never_squeezed() -> None:
    row = find("aten::squeeze")
    assert row is not None and row.rule is not None
    for bdim in range(3):
        x = torch.randn(1, 1, 1)
        out, where = row.rule(overload("aten::squeeze"), Level(1), [bdim], (x,), {})
        assert out.shape == (1,) and where == 0


@pytest.mark.parametrize("size", [0, 1])
def test_small_batches(size: int) -> None:
    for name, rest in [("view", [[-1]]), ("squeeze", []), ("expand", [[5, 2, 3, 4]])]:
        row = find(f"aten::{name}")
        assert row is not None and row.rule is not None
        x = torch.randn(2, size, 3, 4)
        bdims = [1] + [None] * len(rest)
        out, bdim = row.rule(overload(row.name), Level(size), bdims, (x, *rest), {})
        expected = overload(row.name)(torch.randn(2, 3, 4), *rest).shape
        assert out.shape[:bdim] + out.shape[bdim + 1 :] == expected


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("squeeze_", ()),
        ("squeeze_", (0,)),
        ("squeeze_", ([0, 2],)),
        ("unsqueeze_", (1,)),
        ("transpose_", (0, -1)),
        ("swapaxes_", (0, 1)),
        ("swapdims_", (0, 1)),
        ("t_", ()),
        ("as_strided_", ((2, 2), (1, 1))),
        ("resize_", ((2, 1),)),
    ],
)
def test_changes_of_shape_in_place(name: str, rest: tuple[Any, ...]) -> None:
    """The shape of the example changes; the shape of the physical value does not."""
    example = M if name == "t_" else Y
    expected = getattr(example.clone(), name)(*rest)

    def func(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = getattr(x, name)(*rest)
        assert y is x and x.shape == expected.shape
        return y * 1, x * 1

    for bdim in range(1 if name == "as_strided_" else example.dim() + 1):
        x = torch.stack([example] * 3).movedim(0, bdim).clone()
        shape = x.shape
        for out in vmap(func, in_dims=bdim)(x):
            assert all(torch.equal(part, expected) for part in out)
        assert x.shape == shape


def test_resize_of_a_batch_of_transposed_examples_is_refused() -> None:
    """The memory order of the elements differs from their logical order."""
    with pytest.raises(RuntimeError, match="in memory in their own order"):
        vmap(lambda x: x.t().resize_(2, 2))(torch.randn(3, 3, 4))


def test_one_target_for_all_examples_is_not_written() -> None:
    """The examples of an expanded batch share the memory of one example."""
    target, source = torch.randn(4), torch.randn(3, 2)
    out = vmap(lambda x, y: x.as_strided_scatter(y, [2], [2]))(target.expand(3, 4), source)
    same = [target.as_strided_scatter(part, [2], [2]) for part in source]
    assert torch.equal(out, torch.stack(same))


def test_layouts_are_those_of_an_example() -> None:
    for name in ("clone", "contiguous", "zeros_like", "_to_copy", "empty_like"):
        row = find(f"aten::{name}")
        assert row is not None and row.rule is not None
        for bdim in range(5):
            x = torch.stack([IMAGE] * 3).movedim(0, bdim)
            out, where = row.rule(overload(row.name), Level(3), [bdim], (x,), LAST)
            assert out.shape[where] == 3
            assert out.select(where, 0).is_contiguous(memory_format=torch.channels_last)
            out, where = row.rule(overload(row.name), Level(3), [bdim], (x,), DENSE)
            assert out.select(where, 0).is_contiguous()


def test_contiguous_does_not_copy_without_need() -> None:
    row = find("aten::contiguous")
    assert row is not None and row.rule is not None
    x = torch.randn(3, 2)
    out, _ = row.rule(overload(row.name), Level(3), [0], (x,), {})
    assert out.data_ptr() == x.data_ptr()


def test_cat_leaves_out_empty_vectors() -> None:
    assert check(torch.ops.aten.cat.default, [M, torch.zeros(0), M])


@pytest.mark.parametrize("name", ["select.int", "slice.Tensor", "split.Tensor", "unbind.int"])
def test_scalars_have_no_parts(name: str) -> None:
    row = find(f"aten::{name}")
    assert row is not None and row.rule is not None
    args = {"select.int": (0, 0), "slice.Tensor": (), "split.Tensor": (1,), "unbind.int": ()}[name]
    with pytest.raises((RuntimeError, IndexError), match="dim"):
        x = torch.zeros(3)
        row.rule(overload(row.name), Level(3), [0] + [None] * len(args), (x, *args), {})
