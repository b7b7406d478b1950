"""Calls that differ in one visible respect each get their own answer."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tsfunc
from tsfunc import MetaTensorType
from tsfunc.errors import DescriptorViolation


class Letter(str, enum.Enum):
    A = "a"


KEYS = st.sampled_from(
    [1, 1.0, True, 0, 0.0, -0.0, False, 1 + 0j, "a", Letter.A, (1,), (1.0,), (True, 0.0),
     (True, -0.0), frozenset([1]), frozenset([1.0])]
)  # fmt: skip


def kinds(key: Any) -> Any:
    if isinstance(key, tuple | frozenset):
        return type(key), [kinds(each) for each in key]
    return type(key), repr(key)


@settings(max_examples=30)
@given(st.lists(KEYS, min_size=2, max_size=5), st.booleans(), st.booleans())
def test_keys_of_dicts_are_those_of_the_call(keys: list[Any], closed: bool, more: bool) -> None:
    x = torch.ones(1)
    held: dict[Any, torch.Tensor] = {}

    def text(d: dict[Any, torch.Tensor]) -> tuple[torch.Tensor, str]:
        return sum(d.values(), x), str([kinds(key) for key in d])

    f: Any = tsfunc.specialize(lambda x: text(held)) if closed else tsfunc.specialize(text)
    for key in keys:
        d = {key: x, "more": x} if more else {key: x}
        held.clear()
        held.update(d)
        assert (f(x) if closed else f(d))[1] == text(d)[1]


LAYOUTS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.ones(4, 4),
    lambda: torch.ones(4, 4).t(),
    lambda: torch.ones(4).expand(4, 4),
    lambda: torch.ones(4).expand(4, 4).t(),
    lambda: torch.ones(4, 4, 2)[..., 0],
    lambda: torch.ones(4, 2, 4)[:, 0],
    lambda: torch.ones(8, 4)[::2],
    lambda: torch.ones(1).expand(4, 4),
    lambda: torch.ones(5, 4)[:4],
]


@settings(max_examples=20)
@given(
    st.lists(st.sampled_from(LAYOUTS), min_size=2, max_size=6),
    st.sampled_from([
        lambda x: x.stride(), lambda x: x.stride(0), lambda x: x.is_contiguous(),
        lambda x: x.t().stride(), lambda x: x.storage_offset(),
    ]),
    st.booleans(),
)  # fmt: skip
def test_strides_are_those_of_the_call(made: list[Any], ask: Any, attribute: bool) -> None:
    class Box:
        value: torch.Tensor

    f = tsfunc.specialize(lambda box: ask(box.value)) if attribute else tsfunc.specialize(ask)
    for each in made:
        box = Box()
        box.value = each()
        assert f(box if attribute else box.value) == ask(box.value)


@pytest.mark.filterwarnings("ignore::tsfunc.errors.RetraceWarning")  # some are traced by value
@settings(max_examples=20)
@given(
    st.lists(
        st.sampled_from([0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1.5, -1.5, 0.25]),
        min_size=2, max_size=6,
    ),
    st.sampled_from([
        lambda k: math.copysign(1, k), lambda k: math.copysign(1, k // 0.3), lambda k: -k,
        lambda k: math.atan2(0.0, k), lambda k: math.copysign(2, k % 1.5), lambda k: k / 2,
    ]),
    st.booleans(),
)  # fmt: skip
def test_floats_have_the_sign_of_the_call(numbers: list[float], ask: Any, by_type: bool) -> None:
    f = tsfunc.specialize(
        lambda x, k: torch.copysign(x, x * ask(k)), {"k": float} if by_type else None
    )
    for k in numbers:
        assert f(torch.ones(1), k).item() == math.copysign(1, ask(k))


def test_a_tensor_that_is_guaranteed_is_checked_at_every_call(tmp_path: Path) -> None:
    f = tsfunc.specialize(lambda x, y: x * 2 + y, {"x": torch.ones(3)})
    for run in (f, f):
        assert run(torch.ones(3), torch.zeros(3)).tolist() == [2, 2, 2]
        for bad in (torch.zeros(3), torch.ones(3).double(), torch.ones(4)):
            with pytest.raises(DescriptorViolation, match="x"):
                run(bad, torch.zeros(3))


class Config:
    def __init__(self, scale: float) -> None:
        self.scale = scale


def test_an_object_that_is_guaranteed_is_checked_at_every_call() -> None:
    config = Config(2.0)
    f = tsfunc.specialize(lambda x, c: x * c.scale, {"c": config})
    for _ in range(2):
        assert f(torch.ones(1), config) == 2
        with pytest.raises(DescriptorViolation):
            f(torch.ones(1), Config(2.0))
    g = tsfunc.specialize(lambda x, c: x * c["c"].scale, {"c": {"c": config}})
    for _ in range(2):
        assert g(torch.ones(1), {"c": config}) == 2
        with pytest.raises(DescriptorViolation):
            g(torch.ones(1), {"c": Config(2.0)})


def test_one_of_several_guarantees_is_kept_by_every_call() -> None:
    f = tsfunc.specialize(
        lambda x, y: x * 2, [{"x": torch.ones(2), "y": 1}, {"x": torch.zeros(2), "y": 2}]
    )
    one, two = (torch.ones(2), 1), (torch.zeros(2), 2)
    for x, y in (one, two, one):
        assert torch.equal(f(x, y), x * 2)
        with pytest.raises(DescriptorViolation):
            f(x + 2, y)


def test_the_class_of_a_tensor_that_is_guaranteed_is_checked_at_every_call() -> None:
    declared = Annotated[torch.nn.Parameter, MetaTensorType([3])]
    f = tsfunc.specialize(lambda x: x * 2, {"x": declared})
    for _ in range(2):
        f(torch.nn.Parameter(torch.ones(3)))
        with pytest.raises(DescriptorViolation):
            f(torch.ones(3, requires_grad=True))


@pytest.mark.parametrize("guaranteed", [True, False])
def test_a_guarantee_of_requires_grad_is_kept_by_a_file(tmp_path: Path, guaranteed: bool) -> None:
    f = tsfunc.specialize(
        lambda x, y: x * 2 + y, {"x": MetaTensorType([3], requires_grad=guaranteed)}
    )
    good, bad = (torch.ones(3, requires_grad=x) for x in (guaranteed, not guaranteed))
    f(good, good)
    f.save(tmp_path / "f")
    for run in (f, tsfunc.load(tmp_path / "f")):
        assert torch.equal(run(good, bad), 2 * good + bad)
        with pytest.raises(DescriptorViolation, match="requires_grad"):
            run(bad, good)


GLOBAL = [1, {"a": 2}]


def test_a_container_from_outside_is_returned_itself(tmp_path: Path) -> None:
    tensors = [torch.ones(2)]
    f = tsfunc.specialize(lambda x: (x + tensors[0], tensors, {"t": tensors}, GLOBAL, GLOBAL[1]))
    for _ in range(3):
        out = f(torch.ones(2))
        assert out[1] is tensors and out[2]["t"] is tensors
        assert out[3] is GLOBAL and out[4] is GLOBAL[1]
    tensors[0] = torch.zeros(2)
    assert f(torch.ones(2))[0].tolist() == [1, 1]
    g = tsfunc.specialize(lambda x: (x, GLOBAL))
    g(torch.ones(2))
    g.save(tmp_path / "g")
    assert tsfunc.load(tmp_path / "g")(torch.ones(2))[1] == GLOBAL


def test_a_list_that_a_program_fills_is_returned_itself() -> None:
    kept: list[torch.Tensor] = []

    def f(x: torch.Tensor) -> list[torch.Tensor]:
        kept.append(x * 2)
        return kept

    g = tsfunc.specialize(f)
    for i in range(3):
        assert g(torch.full((1,), float(i))) is kept
    assert [x.item() for x in kept] == [0, 2, 4]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("made_inside", [True, False])
def test_a_member_that_a_derived_class_overrides_later_is_seen(
    level: int, made_inside: bool
) -> None:
    class Base:
        scale = 1.0

        def act(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @property
        def shift(self) -> float:
            return 1.0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x + 5

    class Middle(Base):
        pass

    class Derived(Middle):
        pass

    one = Derived()

    def own() -> Derived:
        return Derived() if made_inside else one

    def f(x: torch.Tensor) -> torch.Tensor:
        each = own()
        return each(each.act(x) * each.scale + each.shift)

    g = tsfunc.specialize(f)
    x = torch.ones(1)
    overridden: Any = (Middle, Derived)[level - 1]
    assert g(x) == f(x)
    for name, value in (
        ("scale", 3.0),
        ("act", lambda self, x: x * 7),
        ("shift", property(lambda self: 11.0)),
        ("__call__", lambda self, x: x - 5),
    ):
        setattr(overridden, name, value)
        assert g(x) == f(x)
    for name in ("scale", "act", "shift", "__call__"):
        delattr(overridden, name)
        assert g(x) == f(x)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
@pytest.mark.parametrize("first", [None, torch.strided, torch.sparse_coo])
def test_compressed_arguments_are_refused_with_and_without_a_program(
    layout: torch.layout, first: torch.layout | None
) -> None:
    f = tsfunc.specialize(lambda x: x.to_dense() * 2)
    x = torch.eye(2)
    if first is not None:
        f(x if first is torch.strided else x.to_sparse(layout=first))
    with pytest.raises(tsfunc.errors.TypeCheckError, match="to_dense"):
        f(x.to_sparse(layout=layout))
    assert torch.equal(f(x.to_sparse()), x * 2) and torch.equal(f(x), x * 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused_wherever_they_come_from(layout: torch.layout) -> None:
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    with pytest.raises(tsfunc.errors.TypeCheckError, match=r"nested tensor for x\. .*vmap of it"):
        tsfunc.specialize(lambda x: x * 2)(nested)
    for f in (lambda x: nested * x, lambda x: x * nested):
        with pytest.raises(tsfunc.errors.ClosureError, match="nested tensor for a tensor that"):
            tsfunc.specialize(f)(torch.tensor(2.0))
    if layout is torch.jagged:
        with pytest.raises(tsfunc.errors.ClosureError, match="captures or makes"):
            tsfunc.specialize(lambda *x: torch.nested.nested_tensor([*x], layout=layout))(*rows)
    sums = tsfunc.vmap(tsfunc.specialize(torch.sum))(nested)
    assert torch.equal(sums, torch.stack([row.sum() for row in rows]))
