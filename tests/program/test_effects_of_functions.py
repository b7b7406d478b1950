"""Assignments that a function with its own derivative makes while it is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tsfunc import grad, specialize, vmap
from tsfunc.errors import TypeCheckError


class Cache:
    def __init__(self) -> None:
        self.items: list[Any] = []
        self.count = 0
        self.latest: Tensor | None = None
        self.named: dict[str, Any] = {}


def counts(cache: Cache, x: Tensor) -> None:
    cache.count += 1


def appends(cache: Cache, x: Tensor) -> None:
    cache.items.append(x * 2)


def appends_a_number(cache: Cache, x: Tensor) -> None:
    cache.items.append(1)


def assigns(cache: Cache, x: Tensor) -> None:
    cache.latest = x * 3


def names(cache: Cache, x: Tensor) -> None:
    cache.named["x"] = x


CHANGES: dict[str, Callable[[Cache, Tensor], None]] = {
    "count": counts, "items": appends, "numbers": appends_a_number, "latest": assigns,
    "named": names,
}  # fmt: skip


def function_that(change: Callable[[Cache, Tensor], None]) -> Any:
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, cache: Cache) -> Tensor:
            change(cache, x)
            ctx.save_for_backward(x)
            return x.sin() * (cache.count + 1)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return gradient * x.cos(), None

    return Sine


WAYS: dict[str, Callable[[Any], Any]] = {
    "": lambda f: f,
    "vmap": lambda f: lambda x, cache: vmap(lambda row: f(row, cache))(x),
    "grad": lambda f: lambda x, cache: grad(lambda x: f(x, cache).sum())(x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("captured", [False, True])
def test_a_function_that_changes_an_object_from_outside_is_refused(
    change: str, way: str, captured: bool
) -> None:
    """A program would run it on the object of the trace, at each call."""
    cache, sine = Cache(), function_that(CHANGES[change])
    f = WAYS[way](lambda x, given: sine.apply(x, cache if captured else given))
    with pytest.raises(TypeCheckError, match=r"Sine changes (cache|given)\.") as caught:
        specialize(f)(torch.ones(3), cache)
    assert "assign it outside of Sine" in str(caught.value)
    assert vars(cache) == vars(Cache())  # the trace has undone its assignments


def test_assignments_outside_of_the_function_are_part_of_the_program() -> None:
    sine = function_that(lambda cache, x: None)

    def f(x: Tensor, cache: Cache) -> Tensor:
        cache.count += 1
        cache.latest = sine.apply(x, Cache())
        return cache.latest + cache.count

    program = tsfunc.specialize(f)
    for start in (1.0, 2.0):
        ours, plain = Cache(), Cache()
        x = torch.full((3,), start)
        torch.testing.assert_close(program(x, ours), f(x, plain))
        assert ours.count == plain.count == 1
        torch.testing.assert_close(ours.latest, plain.latest)


def test_containers_that_change_before_and_after_the_function_are_part_of_the_program() -> None:
    sine = function_that(lambda cache, x: None)
    factors = {"first": 2.0}

    def f(x: Tensor, cache: Cache) -> Tensor:
        cache.items.append(len(cache.items))
        cache.named["before"] = cache.items[-1] * factors["first"]
        out = sine.apply(x, Cache())
        cache.named["after"] = cache.named.pop("before")
        cache.items[0] = out
        return out * factors["first"] + cache.named["after"]

    program = tsfunc.specialize(f)
    for start in (1.0, 2.0):
        x, ours, plain = torch.full((3,), start), Cache(), Cache()
        ours.items, plain.items = [7], [7]
        torch.testing.assert_close(program(x, ours), f(x, plain))
        torch.testing.assert_close(vars(ours), vars(plain))


@pytest.mark.parametrize("change", ["items", "numbers", "named"])
def test_the_error_names_the_container_that_the_function_changes(change: str) -> None:
    """Its caller has changed others before."""
    sine, other = function_that(CHANGES[change]), Cache()

    def f(x: Tensor, cache: Cache) -> Tensor:
        other.items.append(1)
        other.named["a"] = x
        cache.items, cache.named  # noqa: B018 - read before the function is called
        return sine.apply(x, cache)

    with pytest.raises(TypeCheckError, match=r"Sine changes cache\.(items|named)\. A program"):
        specialize(f)(torch.ones(3), Cache())


def test_a_function_may_read_the_numbers_of_a_container_that_vary() -> None:
    options = {"scale": 1.0}

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * options["scale"]

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient * options["scale"]

    program = specialize(lambda x: Scaled.apply(x) + len(options))  # type: ignore[no-untyped-call]
    for scale in (1.0, 2.5, -3.0, 4.0):
        options["scale"] = scale
        x = torch.ones(3)
        torch.testing.assert_close(program(x), x * scale + 1)
