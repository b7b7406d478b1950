"""Normalisation layers and their gradients against the loop."""

from __future__ import annotations

import pytest
import torch

import tsfunc.ops  # noqa: F401  (declares rows)
from tests.ops.harness import Level, check, normal
from tsfunc.ops.registry import find

aten = torch.ops.aten
MASKS = [[True, True, True], [True, False, False], [False, True, True]]


@pytest.mark.parametrize("lead", [(), (2,), (2, 4)])
@pytest.mark.parametrize("shape", [(5,), (5, 6)])
def test_layer_norm(lead: tuple[int, ...], shape: tuple[int, ...]) -> None:
    x, w, b = normal(*lead, *shape), normal(*shape) + 2, normal(*shape)
    assert check(aten.native_layer_norm.default, x, list(shape), w, b, 1e-5)
    assert check(aten.native_layer_norm.default, x, list(shape), None, None, 1e-5)
    assert check(aten.layer_norm.default, x, list(shape), w, b)
    assert check(aten.layer_norm.default, x, list(shape), w, b, 0.5, False)
    assert check(aten.layer_norm.default, x, list(shape))
    _, mean, rstd = aten.native_layer_norm(x, shape, w, b, 1e-5)
    for mask in MASKS:
        grad = normal(*lead, *shape) * 2
        op = aten.native_layer_norm_backward.default
        assert check(op, grad, x, list(shape), mean, rstd, w, b, mask)


def test_rms_norm() -> None:
    x, w = normal(2, 4, 5), normal(5)
    assert check(aten._fused_rms_norm.default, x, [5], w, 1e-5)
    assert check(aten._fused_rms_norm.default, x, [5], None, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel is for GPUs only")
def test_rms_norm_backward() -> None:
    x, w = normal(2, 4, 5).cuda(), normal(5).cuda()
    _, rstd = aten._fused_rms_norm(x, [5], w, 1e-5)
    op = aten._fused_rms_norm_backward.default
    assert check(op, x * 2, x, [5], rstd, w, [True, True], choices=[(0,), (0, 1, 2, 3)])


@pytest.mark.parametrize("spatial", [(), (3,), (3, 4)])
def test_group_norm(spatial: tuple[int, ...]) -> None:
    x, w, b = normal(2, 6, *spatial), normal(6) + 2, normal(6)
    hw = x.numel() // 12
    assert check(aten.native_group_norm.default, x, w, b, 2, 6, hw, 3, 1e-5)
    assert check(aten.native_group_norm.default, x, None, None, 2, 6, hw, 3, 1e-5)
    _, mean, rstd = aten.native_group_norm(x, w, b, 2, 6, hw, 3, 1e-5)
    for mask in MASKS:
        op = aten.native_group_norm_backward.default
        assert check(op, x * 2 + 1, x, mean, rstd, w, 2, 6, hw, 3, mask)


@pytest.mark.parametrize("spatial", [(), (4,), (3, 4)])
def test_batch_norm(spatial: tuple[int, ...]) -> None:
    x, w, b = normal(2, 5, *spatial), normal(5) + 2, normal(5)
    mean, var = normal(5), normal(5).abs() + 1
    op = aten.native_batch_norm.default
    assert check(op, x, w, b, None, None, True, 0.1, 1e-5)
    assert check(op, x, None, None, None, None, True, 0.1, 1e-5)
    assert check(op, x, w, b, mean, var, False, 0.1, 1e-5)
    assert check(op, x, None, None, mean, var, False, 0.1, 1e-5)
    no_training = aten._native_batch_norm_legit_no_training.default
    assert check(no_training, x, w, b, mean, var, 0.1, 1e-5)
    assert check(aten._native_batch_norm_legit.no_stats, x, w, b, True, 0.1, 1e-5)
    functional = aten._native_batch_norm_legit_functional.default
    assert check(functional, x, w, b, mean, var, True, 0.1, 1e-5)


@pytest.mark.parametrize("spatial", [(), (3, 4)])
@pytest.mark.parametrize("train", [False, True])
def test_batch_norm_backward(spatial: tuple[int, ...], train: bool) -> None:
    x, w = normal(2, 5, *spatial), normal(5) + 2
    mean, var = normal(5), normal(5).abs() + 1
    _, m, v = aten.native_batch_norm(x, w, None, mean.clone(), var.clone(), train, 0.1, 1e-5)
    for mask in MASKS:
        op = aten.native_batch_norm_backward.default
        assert check(op, x * 2 + 1, x, w, mean, var, m, v, train, 1e-5, mask)


@pytest.mark.parametrize("bdim", [0, 1])
def test_running_statistics_are_updated_in_place(bdim: int) -> None:
    found = find("aten::native_batch_norm")
    assert found is not None and found.rule is not None
    x = normal(3, 2, 5, 4)
    means, variances = torch.zeros(3, 5).double(), torch.ones(3, 5).double()
    expected = [(means[i].clone(), variances[i].clone()) for i in range(3)]
    for i, (m, v) in enumerate(expected):
        aten.native_batch_norm(x[i], None, None, m, v, True, 0.1, 1e-5)
    mean = means.movedim(0, bdim).contiguous()
    var = variances.movedim(0, bdim).contiguous()
    args = [x, None, None, mean, var, True, 0.1, 1e-5]
    op = aten.native_batch_norm.default
    found.rule(op, Level(), [0, None, None, bdim, bdim, None, None, None], args, {})
    torch.testing.assert_close(mean.movedim(bdim, 0), torch.stack([m for m, _ in expected]))
    torch.testing.assert_close(var.movedim(bdim, 0), torch.stack([v for _, v in expected]))
    args[3] = means[0]
    with pytest.raises(RuntimeError, match="running_var, which will be updated in place"):
        found.rule(op, Level(), [0, None, None, None, bdim, None, None, None], args, {})
