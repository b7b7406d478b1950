"""The texts of tracers and sizes, in the user's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

import tsfunc
from tsfunc import MetaTensorType, grad, jvp, specialize, vmap


def texts_in(transform: Callable[[Callable[..., Any]], Any], *args: Any) -> list[str]:
    """Return the texts of the value that a transform passes to a function."""
    texts: list[str] = []

    def looked_at(x: Tensor) -> Tensor:
        texts.extend([repr(x), str(x), f"{x}"])
        return (x * x).sum()

    transform(looked_at)(*args)
    return texts


OF_VMAP = "of vmap(looked_at), batch dim 0:"
N3 = {"x": MetaTensorType(["n", 3])}
NK = {"x": MetaTensorType(["n", "k"])}


@pytest.mark.parametrize(
    ("transform", "start"),
    [
        (vmap, f"BatchTracer(f32[3] {OF_VMAP} tensor([["),
        (lambda f: vmap(vmap(f)), f"BatchTracer(f32[] {OF_VMAP} BatchTracer(f32[3] {OF_VMAP} ten"),
        (lambda f: vmap(grad(f)), f"BatchTracer(f32[3] {OF_VMAP} tensor([["),
        (lambda f: grad(lambda x: vmap(f)(x).sum()), f"BatchTracer(f32[3] {OF_VMAP} tensor([["),
        (lambda f: vmap(lambda x: jvp(f, (x,), (x,))), "BatchTracer(f32[3] of vmap(<lambda>), "),
        (specialize, "TraceTracer(f32[2, 3] of specialize(looked_at): x)"),
        (lambda f: specialize(f, N3), "TraceTracer(f32[n, 3] of specialize(looked_at): x)"),
        (lambda f: specialize(vmap(f), NK), f"BatchTracer(f32[k] {OF_VMAP} TraceTracer(f32[n, k]"),
    ],
    ids=["vmap", "nested", "vmap-grad", "grad-vmap", "vmap-jvp", "trace", "dims", "traced-vmap"],
)
def test_tracers_have_one_line(transform: Callable[..., Any], start: str) -> None:
    for text in texts_in(transform, torch.randn(2, 3)):
        assert text.startswith(start)
        assert "\n" not in text
        assert len(text) < 300
        assert "FakeTensor" not in text


def test_large_values_are_cut() -> None:
    (text, *_) = texts_in(vmap, torch.randn(300, 100, 100))
    assert len(text) < 200


def test_selections_have_one_line() -> None:
    texts: list[str] = []

    def looked_at(x: Tensor) -> Tensor:
        chosen = x[x > 0]
        texts.extend([repr(chosen), str(chosen), f"{chosen}"])
        return chosen.sum()

    vmap(looked_at)(torch.randn(3, 4))
    assert {text.partition(",")[0] for text in texts} == {"Selection(by a mask of vmap(looked_at)"}
    assert not any("\n" in text for text in texts)


def test_guards_have_one_line() -> None:
    f = specialize(lambda x, k: x * k, {"x": MetaTensorType(["n"])})
    f(torch.randn(3), 2.0)
    (program,) = f.programs
    for each in (f, program, program.guards, *program.guards[:2], f.cache_info(), tsfunc.config):
        assert "\n" not in repr(each)
    assert "x: f32[n]" in repr(program.guards)


def test_an_expression_is_spelled_from_its_own_symbols_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trace with a number for each parameter, as optimizers read them, took quadratic time."""
    divide, calls = sympy.Symbol.__truediv__, []

    def counted(self: sympy.Symbol, other: Any) -> Any:
        calls.append(self)
        return divide(self, other)

    monkeypatch.setattr(sympy.Symbol, "__truediv__", counted)
    counts = []
    for count in (8, 32):
        steps = [torch.tensor(float(i)) for i in range(count)]
        calls.clear()
        tsfunc.specialize(lambda xs, y: sum(y / (1 - 0.9 ** x.item()) for x in xs))(
            steps, torch.ones(3)
        )
        counts.append(len(calls))
    assert 0 < counts[1] <= 4 * counts[0]
