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
    """A class that decides the class of results."""

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


CALLS: list[tuple[Any, Any]] = []  # the functions that reached the handler, and their results


class Logged(torch.Tensor):
    """A class whose handler changes the result of each function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if not isinstance(out, Tensor | tuple) or isinstance(out, torch.Size):
            return out  # guards read this property, too
        CALLS.append(func)
        if isinstance(out, tuple) or not out.is_floating_point() or out is args[0]:
            return out
        return (out + len(str(func)) % 7).as_subclass(cls)


ROWS = torch.tensor([1, 0, 1])
WEIGHT = torch.randn(2, 2)
IDENTITY: dict[str, Any] = {
    "method": lambda x: x.mul(2),
    "function": lambda x: torch.mul(x, 2),
    "operator": lambda x: x * 2,
    "reflected": lambda x: 3 - x,
    "both": lambda x: x.mul(2) + torch.mul(x, 2),
    "no effect": lambda x: (x * 1).to(torch.float64),
    "unused": lambda x: (x.sin(), x.cos())[1],
    "keywords": lambda x: torch.add(x, x, alpha=3),
    "functional": lambda x: torch.nn.functional.softmax(x, dim=-1),
    "plain weight": lambda x: torch.nn.functional.linear(x, WEIGHT),
    "list": lambda x: torch.cat([x, x.abs()], dim=1),
    "several results": lambda x: x.max(1).values,
    "index": lambda x: x[ROWS],
    "property": lambda x: x.mT,
    "in place": lambda x: x.clone().add_(2),
    "order": lambda x: x.where(x > 0, x + 1),
}


@pytest.mark.parametrize("name", IDENTITY)
def test_a_handler_gets_the_function_that_was_called(name: str) -> None:
    f = IDENTITY[name]
    x: Any = torch.randn(2, 2, dtype=torch.float64).as_subclass(Logged)
    if name == "plain weight":
        x = x.float()
    program = specialize(f)
    program(x)
    for _ in range(2):
        CALLS.clear()
        expected = f(x)
        wanted = list(CALLS)
        CALLS.clear()
        found = program(x)
        assert wanted == CALLS and len(wanted) > 0
        with torch._C.DisableTorchFunctionSubclass():
            torch.testing.assert_close(plain(found), plain(expected))
    assert program.cache_info().programs == 1
