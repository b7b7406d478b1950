"""Writes to tensors, and the grad mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.semantics.transform_tables import (
    EAGER,
    OTHERS,
    PROGRAMS,
    REVERSE,
    Function,
    Transform,
    X,
    every,
)
from tsfunc import (
    pytrees,
    vmap,
)

# --- writes


def writes(x: Tensor) -> Tensor:
    x.mul_(2)
    x[0] += 1
    return x.sin()


WRITES = {**OTHERS, **{name: PROGRAMS[name] for name in PROGRAMS if "grad" not in name}}


@every(WRITES)
def test_a_write_into_an_argument_reaches_the_caller(transform: Transform) -> None:
    x, want = X.clone(), X.clone()
    batched = transform in (vmap, PROGRAMS["specialize(vmap)"], PROGRAMS["vmap(specialize)"])
    f = (lambda x: x.mul_(2).sin()) if transform is OTHERS["vmap(vmap)"] else writes
    g = transform(f)
    for _ in range(2):
        g(x)
        for each in want if batched else [want]:
            f(each)
        assert torch.equal(x, want)


@every(REVERSE)
def test_a_write_into_a_differentiated_tensor_is_refused_as_by_torch(transform: Transform) -> None:
    x = X.clone()
    with pytest.raises(RuntimeError, match=r"leaf Variable that requires grad.*in-place"):
        transform(writes)(x)
    assert torch.equal(x, X)


@every(EAGER, PROGRAMS)
def test_a_captured_tensor_is_written_once_for_all_examples(transform: Transform) -> None:
    w = torch.zeros(2)

    def f(x: Tensor) -> Tensor:
        w.add_(1)
        return x.sin()

    g = transform(f)
    for n in (1, 2, 3):
        g(X)
        assert w.tolist() == [n, n] and not w.requires_grad


@every(EAGER, PROGRAMS)
def test_tensors_made_inside_are_written_as_without_the_transform(transform: Transform) -> None:
    def f(x: Tensor) -> Tensor:
        y = torch.zeros(x.shape)
        y.add_(x)
        y[..., :1] *= x[..., :1] if x.dim() else x
        y.view(-1)[0].add_(1)
        return y.sin()

    def pure(x: Tensor) -> Tensor:
        first = torch.arange(x.shape[-1]) == 0 if x.dim() else torch.tensor(True)
        y = torch.where(first, x * x, x)
        return (y + (torch.arange(x.numel()) == 0).view(x.shape)).sin()

    if transform is OTHERS["vmap(vmap)"]:
        transform = vmap
    got, want = transform(f)(X), transform(pure)(X)
    torch.testing.assert_close(got, want)


# --- grad mode

MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
@every(EAGER, PROGRAMS)
def test_results_require_grad_as_those_of_the_function(transform: Transform, mode: Any) -> None:
    captured = torch.tensor(2.0, requires_grad=True)
    functions: list[Function] = [torch.sin, lambda x: (x * captured).sin()]
    for f in functions:
        g = transform(f)
        for x in (X, X.clone().requires_grad_(), X):
            for each_mode in (mode, torch.enable_grad, mode):
                with each_mode():
                    want = f(x).requires_grad
                    results = pytrees.leaves_of(g(x))
                assert all(each.requires_grad is want for each in results)


@pytest.mark.parametrize("mode", MODES[:2])
@every(EAGER, PROGRAMS)
def test_the_grad_mode_that_a_function_sees(transform: Transform, mode: Any) -> None:
    """It is the mode of the call; inside of reverse mode it is on."""
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return x.sin()

    on = transform in (*REVERSE.values(), PROGRAMS["specialize(grad)"])
    with mode():
        transform(f)(X)
        assert seen == [on or torch.is_grad_enabled()]
        assert torch.is_grad_enabled() is (mode is torch.enable_grad)


@every(REVERSE, PROGRAMS)
def test_a_grad_mode_that_is_left_on_return_is_put_back(transform: Transform) -> None:
    """Without these transforms, and in the others, it stays."""

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        torch.set_grad_enabled(not before)
        return y

    for before in (True, False):
        g = transform(f)
        with torch.set_grad_enabled(before):
            for _ in range(2):
                g(X)
                assert torch.is_grad_enabled() is before
            for other in OTHERS.values():
                torch.set_grad_enabled(before)
                other(f)(X)
                assert torch.is_grad_enabled() is not before
