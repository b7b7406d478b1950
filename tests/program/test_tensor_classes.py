"""Methods and properties of a user's subclass of Tensor in programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import specialize, vmap

SCALE = 3.0


class Scaled(torch.Tensor):
    factor = 2.0

    def double(self) -> Any:  # shadows a method of torch
        return self * self.factor

    @property
    def half(self) -> Any:
        return self / 2

    @classmethod
    def label(cls) -> str:
        return cls.__name__

    @staticmethod
    def scale() -> float:
        return SCALE

    def __add__(self, other: Any) -> Any:
        return torch.mul(self, other)

    def __len__(self) -> int:
        return 77

    def sin(self) -> Any:
        return super().sin() * 10

    def chain(self) -> Any:
        scaled: Any = self * 2
        return scaled.double().half.sin()


FUNCTIONS: dict[str, Any] = {
    "a method": lambda x: x.double(),
    "a property": lambda x: x.half,
    "a chain of methods": lambda x: x.chain(),
    "an operator": lambda x: x + x,
    "super": lambda x: x.sin(),
    "a static method": lambda x: x * x.scale(),
    "a class method": lambda x: x * len(x.label()),
    "len": lambda x: x * len(x),
    "a method of a result": lambda x: torch.stack([x * 2, x]).double(),
    "a method of one of several results": lambda x: x.unbind()[1].double(),
    "the class of a result": lambda x: x * 2 if isinstance(x * 3, Scaled) else x,
}


def scaled(*values: float) -> Any:
    return torch.tensor(values).as_subclass(Scaled)


def plain(x: Tensor) -> Tensor:
    return x.as_subclass(torch.Tensor)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_programs_call_them(name: str) -> None:
    f = FUNCTIONS[name]
    program = specialize(f)
    for x in (scaled(1.0, 2.0), scaled(3.0, -4.0)):
        found, expected = program(x), f(x)
        assert type(found) is type(expected) is Scaled
        assert plain(found).equal(plain(expected))
    assert program.cache_info().programs == 1


def test_they_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    program = specialize(lambda x: x.double() * x.scale())
    x = scaled(1.0, 2.0)

    def check() -> None:
        assert plain(program(x)).equal(plain(x.double() * x.scale()))

    check()
    monkeypatch.setattr(Scaled, "factor", 5.0)
    check()
    monkeypatch.setattr(Scaled, "double", lambda self: self * 7)
    check()
    monkeypatch.setitem(globals(), "SCALE", 4.0)
    check()


def test_plain_tensors_have_programs_of_their_own() -> None:
    program = specialize(lambda x: x.double())
    assert program(torch.ones(2)).dtype is torch.float64
    assert program(scaled(1.0, 1.0)).dtype is torch.float32
    assert program(torch.ones(2)).dtype is torch.float64


@pytest.mark.parametrize("transform", [specialize, vmap])
def test_a_value_inside_of_a_transform_keeps_its_class(transform: Any) -> None:
    with pytest.raises(TypeError, match=r"x\.as_subclass\(Scaled\)"):
        transform(lambda x: x.as_subclass(Scaled))(torch.ones(2))


CAPTURED: dict[str, Any] = {
    "a method": lambda x, w: (x * w).double(),
    "a property": lambda x, w: (w + x).half,
    "an operator": lambda x, w: (x * w) + 3,
    "an overridden function": lambda x, w: (x * w).sin(),
    "the class": lambda x, w: x * 2 if isinstance(x * w, Scaled) else x,
}


@pytest.mark.parametrize("name", CAPTURED)
def test_results_of_captured_tensors_have_their_class(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = scaled(1.0, 2.0)
    f = CAPTURED[name]
    program = specialize(lambda x: f(x, w))

    def check() -> None:
        for x in (torch.ones(2), torch.tensor([3.0, -1.0])):
            found, expected = program(x), f(x, w)
            assert type(found) is type(expected) and plain(found).equal(plain(expected))

    check()
    monkeypatch.setattr(Scaled, "factor", 5.0)
    monkeypatch.setattr(Scaled, "__add__", lambda self, other: torch.mul(self, 2 * other))
    check()


class Deciding(torch.Tensor):
    """A class that decides about the class of results."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inherited: Any = super().__torch_function__
        out = inherited(func, types, args, kwargs or {})
        return out.as_subclass(torch.Tensor) if func is torch.mul else out

    def sin(self) -> Any:
        return super().sin() * 10

    @property
    def half(self) -> Any:
        return self / 2


def test_members_of_results_of_unknown_class_are_refused() -> None:
    x = torch.ones(2).as_subclass(Deciding)
    for f in (lambda x: torch.add(x, x).sin(), lambda x: (x - 1).half):
        with pytest.raises(TypeError, match="of Deciding is used on the result"):
            specialize(f)(x)
        with pytest.raises(TypeError, match="of Deciding is used on the result"):
            specialize(lambda y, f=f: f(y * x))(torch.ones(2))
    program = specialize(lambda x: torch.sin(x + 1) * x.sin())
    assert plain(program(x)).equal(plain(torch.sin(x + 1) * x.sin()))
