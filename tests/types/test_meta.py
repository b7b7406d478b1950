"""MetaTensorType: accepted and refused arguments, and its text."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

from tsfunc.errors import DescriptorError
from tsfunc.types import Dim, DimExpr, MetaTensorType


def test_both_orders_of_the_proposal() -> None:
    shape_first = MetaTensorType([100, 200], dtype=float)
    by_name = MetaTensorType(dtype=torch.float64, shape=(100, 200))
    in_order = MetaTensorType(torch.float64, 2, [100, 200])
    assert shape_first == by_name == in_order
    assert hash(shape_first) == hash(by_name)
    assert MetaTensorType(torch.Size([2])) == MetaTensorType(shape=[2])


@pytest.mark.parametrize("python_type", [float, int, bool, complex])
def test_python_dtypes_have_the_meaning_of_torch(python_type: Any) -> None:
    assert MetaTensorType(dtype=python_type).dtype == torch.zeros(1, dtype=python_type).dtype


def test_nothing_is_known_by_default() -> None:
    meta = MetaTensorType()
    assert all(getattr(meta, field.name) is None for field in dataclasses.fields(meta))
    assert meta.dims is None
    assert str(meta) == "tensor[...]"


def test_rank_and_shape_follow_from_each_other() -> None:
    assert MetaTensorType(rank=2) == MetaTensorType(shape=[None, None])
    assert MetaTensorType(["n", None]).rank == 2
    assert MetaTensorType([]).rank == 0
    assert MetaTensorType(rank=0).shape == ()


def test_a_dim_without_bounds_is_its_name() -> None:
    assert MetaTensorType([Dim("n")]) == MetaTensorType(["n"])
    assert MetaTensorType([Dim("n", min=1)]) != MetaTensorType(["n"])
    forms = (Dim("n"), 3, DimExpr("n + 1"), None)
    assert MetaTensorType(["n", 3, "n+1", None]).dims == forms


def test_equal_devices_are_equal_descriptors() -> None:
    assert MetaTensorType(device="cpu:0") == MetaTensorType(device=torch.device("cpu"))
    assert MetaTensorType(device="cuda") != MetaTensorType(device="cuda:0")


@pytest.mark.parametrize(
    ("meta", "text"),
    [
        (MetaTensorType(["n", 64], dtype=torch.float32, device="cpu"), "f32[n, 64] cpu"),
        (MetaTensorType(rank=2), "tensor[?, ?]"),
        (MetaTensorType(torch.bfloat16), "bf16[...]"),
        (MetaTensorType(bool, shape=[]), "bool[]"),
        (MetaTensorType([Dim("n", 2, 8), "2*n"]), "tensor[2<=n<=8, 2 * n]"),
        (MetaTensorType(requires_grad=True), "tensor[...] requires_grad"),
        (MetaTensorType([..., "n", 64]), "tensor[..., n, 64]"),
        (MetaTensorType(["..."]), "tensor[...]"),
        (MetaTensorType(["...", 3], rank=3), "tensor[?, ?, 3]"),
        (MetaTensorType([Dim("n", multiple_of=8)]), "tensor[n % 8 == 0]"),
        (MetaTensorType([Dim("n", 3, 20, 8)]), "tensor[8<=n<=16 and n % 8 == 0]"),
        (MetaTensorType([Dim("n", one_of=[4, 2]), 3]), "tensor[n in {2, 4}, 3]"),
        (MetaTensorType(["n", 3], strides=[1, "n"]), "tensor[n, 3] strides[1, n]"),
        (MetaTensorType(strides=[None, "n*2"]), "tensor[...] strides[?, n * 2]"),
        (MetaTensorType(memory_format=torch.channels_last), "tensor[...] channels_last"),
        (
            MetaTensorType(device="cuda:1", requires_grad=False, layout=torch.sparse_coo),
            "tensor[...] cuda:1 no_grad sparse_coo",
        ),
    ],
)
def test_str_and_repr(meta: MetaTensorType, text: str) -> None:
    assert str(meta) == text
    assert eval(repr(meta)) == meta == MetaTensorType.parse(text)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (("f32",), {}, r"dtype=\.\.\.\): expected a torch\.dtype, float, .* got 'f32'"),
        ((torch.ones(1),), {}, r"write MetaTensorType\.of\(tensor\)"),
        ((), {"dtype": str}, r"got <class 'str'>"),
        ((), {"rank": -1}, r"rank=\.\.\.\): expected a non-negative int or None, got -1"),
        ((), {"rank": True}, r"got True"),
        ((), {"shape": 3}, r"shape=\.\.\.\): expected a list or tuple of dims, got 3 of type int"),
        ((), {"shape": "n"}, r"got 'n' of type str"),
        (([3, -1],), {}, r"shape=\.\.\.\): dim 1: expected a size of 0 or more, got -1"),
        (([3, 4],), {"rank": 1}, r"shape=\[3, 4\]\): expected a rank of 2, .*got rank=1"),
        ((), {"device": "gpu"}, r"expected a device of torch, for example 'cpu', .*, got 'gpu'"),
        ((), {"device": 0}, r"device=\.\.\.\): expected a torch\.device, its name or None, got 0"),
        ((), {"requires_grad": 1}, r"requires_grad=\.\.\.\): expected True, False or None, got 1"),
        ((), {"layout": "strided"}, r"expected a torch\.layout such as torch\.strided"),
        (([3, ...],), {}, r"dim 1: `\.\.\.` stands for the dims before all others; write None"),
        (([..., 3, 4],), {"rank": 1}, r"expected a rank of at least 2, .*got rank=1"),
        (
            (),
            {"strides": 1},
            r"strides=\.\.\.\): expected a list or tuple of strides, got 1 of type",
        ),
        ((), {"strides": [-1]}, r"stride 0: expected a size of 0 or more, got -1"),
        ((), {"strides": [Dim("n", 2)]}, r"the bounds of Dim\('n', min=2\) belong to the shape"),
        (([3],), {"strides": [1, 1]}, r"strides of rank 2 can't be those of a tensor of rank 1"),
        ((), {"memory_format": "nhwc"}, r"expected torch\.contiguous_format, .* got 'nhwc'"),
        ((), {"memory_format": torch.preserve_format}, r"got torch\.preserve_format"),
        (([3],), {"memory_format": torch.channels_last}, r"of rank 4 can't be .* of rank 1"),
        (
            (),
            {"layout": torch.sparse_coo, "strides": [1]},
            r"only strided tensors have strides",
        ),
        (
            ([3], torch.float32),
            {},
            r"expected at most 1 positional argument\(s\) \(shape\), got "
            r"2; give",
        ),
        (([3],), {"shape": [4]}, r"got 'shape' twice: \[3\], \[4\]"),
        ((), {"size": 3}, r"expected an attribute among dtype, rank, .*, got 'size'"),
    ],
)
def test_bad_arguments_of_meta_are_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(DescriptorError, match=message):
        MetaTensorType(*args, **kwargs)


def test_of_describes_everything() -> None:
    tensor = torch.zeros(2, 0, 3, dtype=torch.float16, requires_grad=True)
    meta = MetaTensorType.of(tensor)
    assert meta == MetaTensorType(
        torch.float16, 3, [2, 0, 3], "cpu", requires_grad=True, layout=torch.strided
    )
    with pytest.raises(DescriptorError, match=r"expected a torch\.Tensor, got 3 of type int"):
        MetaTensorType.of(3)  # type: ignore[arg-type]


def test_it_is_a_frozen_value() -> None:
    meta = MetaTensorType(["n", Dim("m", min=2), "n*m"], dtype=float, device="cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        meta.dtype = torch.int64  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(meta)) == meta == copy.deepcopy(meta)
    assert dataclasses.replace(meta, shape=(3,)) == MetaTensorType(
        [3], dtype=torch.float64, device="cpu"
    )


def test_it_makes_no_tensors() -> None:
    with pytest.raises(TypeError, match=r"MetaTensorType\(rank=1\) describes tensors and can't be"):
        MetaTensorType(rank=1)()
