"""Losses and their gradients against the loop: reductions run over each example separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tsfunc
import tsfunc.ops
from tests.ops.harness import check

aten = torch.ops.aten


def rand(*shape: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.rand(shape, dtype=torch.float64, generator=seeded) * 0.8 + 0.1


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shape", [(), (4,), (2, 4)])
def test_pointwise_losses(reduction: int, shape: tuple[int, ...]) -> None:
    x, t, w = rand(*shape), rand(*shape).flip(-1) if shape else rand(), rand(*shape) + 1
    grad = rand(*shape) if reduction == 0 else rand()
    for name, rest in (
        ("mse_loss", ()), ("smooth_l1_loss", (0.3,)), ("huber_loss", (0.3,)),
        ("soft_margin_loss", ()),
    ):  # fmt: skip
        assert check(getattr(aten, name).default, x, t, reduction, *rest)
        assert check(getattr(aten, name + "_backward").default, grad, x, t, reduction, *rest)
    assert check(aten.binary_cross_entropy.default, x, t, None, reduction)
    assert check(aten.binary_cross_entropy.default, x, t, w, reduction)
    assert check(aten.binary_cross_entropy_backward.default, grad, x, t, None, reduction)
    assert check(aten.binary_cross_entropy_backward.default, grad, x, t, w, reduction)
    logits = aten.binary_cross_entropy_with_logits.default
    assert check(logits, x, t, w, rand(*shape[-1:]) + 1, reduction)
    assert check(logits, x, t, None, None, reduction)


def test_losses_with_default_arguments() -> None:
    assert check(aten.mse_loss.default, rand(2, 4), rand(2, 4) * 2)
    assert check(aten.binary_cross_entropy_with_logits.default, rand(2, 4), rand(2, 4).flip(0))


NLL_CASES = [((5,), ()), ((2, 5), (2,)), ((2, 5, 3, 4), (2, 3, 4))]


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("case", NLL_CASES)
@pytest.mark.parametrize("ignore", [-100, 1])
def test_nll_loss(
    reduction: int, case: tuple[tuple[int, ...], tuple[int, ...]], ignore: int
) -> None:
    shape, places = case
    suffix = "2d" if len(shape) == 4 else ""
    forward = getattr(aten, f"nll_loss{suffix}_forward").default
    backward = getattr(aten, f"nll_loss{suffix}_backward").default
    x, target = rand(*shape).log(), ints(5, *places)
    grad = rand(*places) if reduction == 0 else rand()
    for weight in (None, rand(5)):
        assert check(forward, x, target, weight, reduction, ignore)
        total = forward(x, target, weight, reduction, ignore)[1] + 1
        assert check(backward, grad, x, target, weight, reduction, ignore, total)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_margin_losses(reduction: int, lead: tuple[int, ...]) -> None:
    x, target = rand(*lead, 5), ints(5, *lead)
    grad = rand(*lead) if reduction == 0 else rand()
    choices = [(0,), (1,), (0, 1)]
    w = rand(5)
    assert check(aten.multi_margin_loss.default, x, target, 2, 1.5, w, reduction, choices=choices)
    backward = aten.multi_margin_loss_backward.default
    choices = [(0,), (1,), (2,), (0, 1, 2)]
    assert check(backward, grad, x, target, 1, 1.5, w, reduction, choices=choices)
    labels = torch.tensor([2, 0, -1, 1, 1]).expand(*lead, 5).clone()
    choices = [(0,)]
    forward = aten.multilabel_margin_loss_forward.default
    assert check(forward, x, labels, reduction, choices=choices)
    is_target = forward(x, labels, reduction)[1]
    backward = aten.multilabel_margin_loss_backward.default
    choices = [(0,), (1,), (0, 1)]
    assert check(backward, grad, x, labels, reduction, is_target, choices=choices)


@pytest.mark.parametrize("reduction", [0, 1])
def test_margin_loss_of_one_sample_with_a_list_of_one_target(reduction: int) -> None:
    op = aten.multi_margin_loss.default
    assert check(op, rand(5), ints(5, 1), 1, 1.5, None, reduction, choices=[(0,), (1,), (0, 1)])


def test_margin_losses_of_one_number() -> None:
    assert check(aten.multi_margin_loss.default, rand(), torch.tensor(0), choices=[(0,)])
    forward = aten.multilabel_margin_loss_forward.default
    assert check(forward, rand(), torch.tensor(0), 1, choices=[(0,)])


def test_ctc_loss() -> None:
    x = rand(6, 2, 5).log_softmax(-1)
    targets = ints(4, 2, 3) + 1
    forward, backward = aten._ctc_loss.default, aten._ctc_loss_backward.default
    # For sequences shorter than the longest one, the kernel leaves part of its second result
    # unwritten.
    lengths = ([6, 6], [3, 3])
    assert check(forward, x, targets, *lengths, choices=[(0,), (0, 1), (1,)])
    loss, alpha = forward(x, targets, *lengths)
    args = (rand(2), x, targets, *lengths, loss, alpha, 0, False)
    assert check(backward, *args, choices=[(0,), (0, 2)])
    flat = torch.tensor([1, 2, 3, 4, 1, 2])
    assert check(forward, x, flat, *lengths, 0, True, choices=[(0,), (1,), (0, 1)])
    tensors = (torch.tensor([6, 6]), torch.tensor([3, 3]))
    choices = [(0,), (1,), (0, 1), (3,), (0, 2, 3)]
    assert check(aten._ctc_loss.Tensor, x, targets, *tensors, choices=choices)


@pytest.mark.parametrize("as_tensors", [True, False])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_programs_of_derivatives_of_ctc_loss(reduction: str, as_tensors: bool) -> None:
    """The size of the paths' probabilities depends on the longest target, which is data."""

    def f(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        steps, count, longest = len(x), x.shape[1], targets.shape[1]
        given: Any = torch.tensor if as_tensors else list  # torch's stub omits lists
        of_inputs = given([steps] * count)
        of_targets = given([longest, *[longest - 1] * (count - 1)])
        loss = F.ctc_loss(x.log_softmax(-1), targets, of_inputs, of_targets, reduction=reduction)
        return loss.sum()

    def gradient(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(f(x, targets), x)[0]

    program = tsfunc.specialize(tsfunc.grad(f))
    for steps, count, longest in ((6, 2, 3), (7, 3, 4)):
        x, targets = rand(steps, count, 5), ints(4, count, longest) + 1
        torch.testing.assert_close(program(x, targets), gradient(x, targets))
    xs, ts = rand(3, 6, 2, 5), ints(4, 3, 2, 3) + 1
    expected = torch.stack([gradient(x, t) for x, t in zip(xs, ts, strict=True)])
    for call in (tsfunc.vmap(tsfunc.grad(f)), tsfunc.specialize(tsfunc.vmap(tsfunc.grad(f)))):
        torch.testing.assert_close(call(xs, ts), expected)


X, TARGETS = torch.randn(3, 4, dtype=torch.float64), torch.tensor([3, 0, 1])
SHARES = torch.rand(3, 4, dtype=torch.float64)
BY_CONSTANTS: dict[str, Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]] = {
    "cross entropy of probabilities": lambda x, w, reduction: F.binary_cross_entropy(
        x.sigmoid(), SHARES, w, reduction=reduction
    ),
    "cross entropy of logits": lambda x, w, reduction: F.binary_cross_entropy_with_logits(
        x, SHARES, w, reduction=reduction
    ),
    "cross entropy with weights of the positive": lambda x, w, reduction: (
        F.binary_cross_entropy_with_logits(x, SHARES, w.cos(), pos_weight=w, reduction=reduction)
    ),
    "soft margin": lambda x, w, reduction: F.soft_margin_loss(
        x, w.expand(3, 4).cos(), reduction=reduction
    ),
    "logarithmic likelihood": lambda x, w, reduction: F.nll_loss(
        x, TARGETS, w, reduction=reduction, ignore_index=0
    ),
    "logarithmic likelihood of an image": lambda x, w, reduction: F.nll_loss(
        x[None].mT, TARGETS[None], w, reduction=reduction
    ),
    "smoothed cross entropy": lambda x, w, reduction: F.cross_entropy(
        x, TARGETS, w, reduction=reduction, label_smoothing=0.1
    ),
    "logarithmic likelihood with weights of zero": lambda x, w, reduction: F.nll_loss(
        x, TARGETS, w * SHARES.lt(0.5).any(0), reduction=reduction
    ),
}
BY_STATISTICS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "batch norm": lambda x, w: F.batch_norm(x, w, w.square(), w, w),
    "batch norm of images": lambda x, w: F.batch_norm(x[..., None, None], w.cos(), w),
    "instance norm": lambda x, w: F.instance_norm(x[None].mT, w, w.square(), use_input_stats=False),
    "batch norm by its operators": lambda x, w: (
        aten._native_batch_norm_legit(x, w, None, w, w, False, 0.1, 0.1)[0]
        + aten._native_batch_norm_legit_no_training(x, w, None, w, w, 0.1, 0.1)[0]
        + aten._batch_norm_no_update(x, w, w, w, w, 0.1, 0.1)[0]
    ),
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", BY_CONSTANTS)
def test_tangents_of_arguments_that_torch_takes_for_constants(name: str, reduction: str) -> None:
    """torch's forward mode ignores the tangents of these arguments."""

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return BY_CONSTANTS[name](x, w, reduction)

    _check_constants(loss)


@pytest.mark.parametrize("name", BY_STATISTICS)
def test_tangents_of_running_statistics(name: str) -> None:
    """torch's forward mode ignores them."""
    _check_constants(BY_STATISTICS[name])


def test_statistics_with_tangents_in_training() -> None:
    mean, var = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)

    def normed(mean: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(X, mean, var, training=True)

    out, tangent = tsfunc.jvp(normed, (mean,), (mean + 1,))
    torch.testing.assert_close(out, F.batch_norm(X, None, None, training=True))
    assert not tangent.any()
    torch.testing.assert_close(mean, 0.1 * X.mean(0))


def _check_constants(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    w = torch.rand(4, dtype=torch.float64) + 0.5
    for tangents in ((X * 0, w.sin()), (X.cos(), w.sin())):
        _check_pushed(loss, (X, w), tangents)
        _check_pushed(
            lambda x, w: tsfunc.grad(lambda x: loss(x, w).cos().sum())(x), (X, w), tangents
        )


def _check_pushed(
    f: Callable[..., torch.Tensor], at: tuple[torch.Tensor, ...], tangents: tuple[torch.Tensor, ...]
) -> None:
    """Compare the tangents of a function, of transforms of it and of programs with differences."""

    def shifted(by: float) -> torch.Tensor:
        return f(*(x + by * t for x, t in zip(at, tangents, strict=True)))

    want = (shifted(1e-5) - shifted(-1e-5)) / 2e-5

    def pushed(*at: torch.Tensor) -> torch.Tensor:
        return tsfunc.jvp(f, at, tangents)[1]

    for got in (
        pushed(*at),
        tsfunc.vmap(pushed, (None, 0))(at[0], torch.stack([at[1], at[1]]))[1],
        tsfunc.specialize(pushed)(*at),
        tsfunc.jvp(tsfunc.specialize(f), at, tangents)[1],
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
