"""Wrong descriptors: each raises where it is written, with the parameter and both sides."""

from __future__ import annotations

import array
import re
from collections.abc import Callable
from typing import Any, List, Literal, Optional, Set, Tuple, TypeVar  # noqa: UP035

import pytest
import torch

from tsfunc import Dim, specialize
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import DescriptorError
from tsfunc.types import Value


def f(x: Any, y: Any = None, *rest: Any, train: bool = False, **more: Any) -> Any:
    return x


def _inside_itself() -> list[Any]:
    found: list[Any] = [int]
    found.append(found)
    return found


LOOSE: Any = Meta  # arguments that a type checker would refuse
CALL = "descriptors of f(x, y, rest, train, more): "


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: {"z": int}, [CALL, "there is no parameter 'z'", "x, y, rest, train, more"]),
        (lambda: {1: int}, [CALL, "there is no parameter 1"]),
        (lambda: 3, ["expected a dict of parameter name to descriptor", "got 3 of type int"]),
        (lambda: [int], ["or a list of such dicts", "got [<class 'int'>] of type list"]),
        (lambda: {"x": Meta([-1])}, ["shape", "dim 0", "got -1", "None for an unknown"]),
        (lambda: {"x": Meta([3, 4], rank=3)}, ["rank=3", "expected a rank of 2"]),
        (lambda: {"x": Meta([..., 3, 4], rank=1)}, ["rank=1", "at least 2"]),
        (lambda: {"x": LOOSE(dtype="float32")}, ["dtype", "a torch.dtype", "got 'float32'"]),
        (lambda: {"x": Meta(device="gpu")}, ["expected a device of torch", "'cpu'", "got 'gpu'"]),
        (lambda: {"x": LOOSE(layout="strided")}, ["layout", "torch.strided", "got 'strided'"]),
        (lambda: {"x": LOOSE(requires_grad=1)}, ["requires_grad", "True, False", "got 1"]),
        (lambda: {"x": Meta(["2n"])}, ["dim 0", "'2n' is neither a name nor an expression"]),
        (lambda: {"x": Meta(["n/2"])}, ["'n / 2' is none of these", "+, -, * and //"]),
        (lambda: {"x": Meta(["n", "n//0"])}, ["dim 1", "'n//0' divides by zero"]),
        (lambda: {"x": Meta(["n", "7//(3-3)"])}, ["dim 1", "'7//(3-3)' divides by zero"]),
        (lambda: {"x": Meta(["n", "-n-1"])}, ["dim 1", "'-n - 1' is never more than 0"]),
        (lambda: {"x": Meta(["n", "n-2*n"])}, ["dim 1", "can't be negative"]),
        (lambda: {"x": Tuple[int, ..., int]}, [CALL, "x: typing.Tuple[int, ..., int]", "[X, ...]"]),  # noqa: UP006
        (lambda: {"x": Meta(["class"])}, ["'class' is neither", "a Python identifier"]),
        (lambda: {"x": Meta([Dim("3")])}, ["Dim('3')", "a Python identifier as name, got '3'"]),
        (lambda: {"x": LOOSE([1.5])}, ["a non-negative int, a name", "got 1.5 of type float"]),
        (lambda: {"x": Meta([Dim("n", min=5, max=4)])}, ["no size is at least 5 and at most 4"]),
        (lambda: {"x": Meta([Dim("n", multiple_of=0)])}, ["a positive int", "got 0"]),
        (
            lambda: {"x": Meta([Dim("n", min=5)]), "y": [Meta([Dim("n", max=4)])]},
            [CALL, "'n' contradict", "min=5) at x.shape[0]", "max=4) at y[0].shape[0]"],
        ),
        (
            lambda: {"x": Meta([Dim("n", one_of=[2, 4])]), "y": Meta([Dim("n", one_of=[3])])},
            [CALL, "the bounds of dim 'n' contradict each other"],
        ),
        (lambda: {"x": Meta(["n*k*k"])}, [CALL, "x.shape[0] is 'n * k * k'", "'n'"]),
        (lambda: {"x": Meta(["n"]), "y": Meta(strides=["k*k", 1])}, ["y.stride()[0]", "'k'"]),
        (lambda: {"x": Dim("n")}, [CALL, "x: Dim('n') is a size", "MetaTensorType([Dim('n')])"]),
        (lambda: {"x": "f32[n, 64]"}, [CALL, "x: 'f32[n, 64]' is a string", "parse("]),
        (lambda: {"x": {1, 2}}, [CALL, "x: {1, 2} (set) can't be hashed", "a frozenset"]),
        (lambda: {"x": [3, bytearray(2)]}, [CALL, "x[1]: bytearray(b'\\x00\\x00')", "hashed"]),
        (lambda: {"x": {"a": array.array("i")}}, [CALL, "x['a']: array('i')", "Value(...)"]),
        (lambda: {"x": Optional}, [CALL, "x: typing.Optional can't be checked at a call"]),
        (lambda: {"x": [int, Callable[[int], int]]}, [CALL, "x[1]: ", "can't be checked"]),
        (lambda: {"x": Set[int]}, [CALL, "x: typing.Set[int] can't be checked", "List[X]"]),  # noqa: UP006
        (lambda: {"x": List["Foo"]}, [CALL, "x[...]: ForwardRef('Foo') can't"]),  # type: ignore[name-defined]  # noqa: F821, UP006
        (lambda: {"x": TypeVar("T")}, [CALL, "x: ~T can't be checked"]),
        (
            lambda: {"x": dict[torch.Tensor, int]},
            [CALL, "x: expected keys of a dict that are not tensors"],
        ),
        (lambda: {"rest": Meta()}, [CALL, "rest: *rest is a tuple", "got tensor[...]"]),
        (lambda: {"more": int}, [CALL, "more: **more is a dict", "got int", "Dict[str, X]"]),
        (lambda: [], ["or a list of such dicts, got [] of type list"]),
        (lambda: {"x": Literal[[1]]}, [CALL, "x: [1] (list) can't be hashed"]),
        (lambda: {"x": _inside_itself()}, [CALL, "x: a list that contains itself", "Any"]),
        (lambda: {"x": Meta([2**63])}, ["dim 0", "at most 2**63 - 1, got 9223372036854775808"]),
        (
            lambda: {"x": Meta(dtype=torch.int64, requires_grad=True)},
            ["dtype=torch.int64, requires_grad=True", "floating point and complex"],
        ),
        (
            lambda: {"x": Meta([Dim("n", max=3)]), "y": [Meta(["n - 5"])]},
            [CALL, "y[0].shape[0] is 'n - 5'", "negative for every size of Dim('n', max=3)"],
        ),
        (
            lambda: {"x": Meta([Dim("n", max=3), Dim("m", min=2), "n - 2*m"])},
            ["x.shape[2] is 'n - 2 * m'", "Dim('n', max=3), Dim('m', min=2)"],
        ),
        (
            lambda: {
                "x": Meta([2, 3, 4, 5], strides=[60, 20, 5, 1], memory_format=torch.channels_last)
            },
            ["strides=(60, 20, 5, 1)", "is not contiguous in this format"],
        ),
        (
            lambda: {"more": {"train": bool}},
            [CALL, "more['train']: 'train' is a separate parameter", "in **more"],
        ),
        (lambda: [{"x": 1}, {"x": 1}], ["specialize(f): its descriptors 1 and 2 are equivalent"]),
    ],
)
def test_a_wrong_descriptor_is_refused_where_it_is_written(
    make: Callable[[], Any], words: list[str]
) -> None:
    with pytest.raises(DescriptorError) as error:
        specialize(f, make())
    for each in words:
        assert re.search(re.escape(each), str(error.value)), str(error.value)


@pytest.mark.parametrize(
    "right",
    [
        {"x": "sum"},
        {"x": frozenset({1})},
        {"x": Value({1, 2})},
        {"x": Value("f32[n]")},
        {"rest": (Meta(), Meta())},
        {"rest": Any, "more": {"scale": float}},
        {"x": Meta(dtype=torch.complex64, requires_grad=True)},
        {"x": Meta([2, 3, 4, 5], strides=[60, 1, 15, 3], memory_format=torch.channels_last)},
        {"x": Meta([Dim("n", max=5), "n - 5"])},
        {"x": Meta([Dim("n", max=3), "m", "m - n"])},
    ],
)
def test_lookalikes_are_refused(right: dict[str, Any]) -> None:
    specialize(f, right)
