"""Derivatives of batches: calls that were once wrong or refused, and tests of the modes themselves.

``database`` has the calls of torch's operator database, see its ``differentiable``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tests.ops.database import Case
from tests.ops.derivatives import (
    FURTHER,
    GRAD_VMAP,
    MODES,
    SECOND,
    VMAP_GRAD,
    VMAP_JVP,
    along,
    differ,
    torch_along,
)
from tests.ops.sweep import Mode, Verdict, sweep_case
from tsfunc import jacfwd, jacrev, jvp, specialize, vmap

F = torch.nn.functional
ALL = (*MODES, *FURTHER)


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    seeded = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.rand(shape, dtype=dtype, generator=seeded)


def case(f: Callable[..., Any], *tensors: Tensor) -> Case:
    """Return the case of a function that is differentiated by its float and complex tensors."""

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        out = f(*given)
        return tuple(out) if isinstance(out, tuple | list) else (out,)

    places = tuple(i for i, x in enumerate(tensors) if x.is_floating_point() or x.is_complex())
    return Case(call, tensors, differentiable=places)


def verdicts(mode: Mode, one: Case) -> dict[Verdict, str]:
    found = sweep_case(mode, one, random.Random(0), differ=differ)
    return {outcome.verdict: f"{outcome.what}: {outcome.message}" for outcome in found}


MASK = torch.tensor([True, False, True])


def _set(x: Tensor, where: Any, value: Tensor) -> Tensor:
    x[where] = value
    return x


# Each comment states the fault that the case once had.
CASES: dict[str, Case] = {
    # With only the bounds batched, torch's derivative wrote into an unbatched mask.
    "clamp": case(torch.clamp, rand(4), rand(4) - 0.2, rand(4) + 0.1),
    # torch's decomposition was recorded a second time, inside of the operator's derivative.
    "masked index": case(
        lambda x: torch.ops.aten._unsafe_masked_index(
            x, torch.tensor([True, False, True]), [torch.tensor([0, 5, 2])], 0.5
        ),
        rand(4, 2),
    ),
    # C++ asks the tracer if it requires grad, and chose an operator without a derivative.
    "bag of embeddings": case(
        lambda w, i: F.embedding_bag(i, w, torch.tensor([0, 2]), mode="sum"),
        rand(6, 2),
        torch.tensor([1, 5, 0, 1]),
    ),
    # Operators on the unbatched arguments were chosen without a derivative, too.
    "unbatched in a list": case(lambda x, y: torch.column_stack((x, y)), rand(3), rand(3, 2)),
    "parts in Python": case(
        lambda x, w, u: torch._VF.gru(x, rand(1, 2, 3), [w, u], False, 1, 0.0, False, False, False)[
            0
        ],
        rand(3, 2, 4),
        rand(9, 4),
        rand(9, 3),
    ),
    # A comparison that differs between examples wrote into the running statistics after they were
    # saved.
    "batch norm": case(
        lambda x: F.batch_norm(x, x.detach()[0].clone(), x.detach()[1].clone(), training=True),
        rand(4, 3),
    ),
    # The operator that autograd calls; its derivative needs a weight.
    "batch norm without a weight": case(
        lambda x, bias: torch.ops.aten._batch_norm_with_update(
            x, None, bias, x.detach()[0].clone(), x.detach()[1].clone(), 0.1, 1e-5
        )[0],
        rand(4, 3),
        rand(3),
    ),
    # The tangent was squeezed twice.
    "in place into the shape": case(lambda x: x.sin().squeeze_((1, 3)), rand(2, 1, 2, 1)),
    # Formulas whose number of looked-up elements depends on the values of an index or a mask.
    "index fill": case(
        lambda x, i, v: x.index_fill(1, i, v), rand(2, 4), torch.tensor([0, 2, 2, -4]), rand(1)[0]
    ),
    "index fill in place": case(
        lambda x, i, v: x.sin().index_fill_(0, i, v), rand(2, 4), torch.tensor([0]), rand(1)[0]
    ),
    "index fill of a scalar": case(
        lambda x, i, v: x.index_fill(0, i, v), rand(1)[0], torch.tensor([0]), rand(1)[0]
    ),
    "mask, one value": case(
        lambda x, m, v: x.index_put((None, m), v), rand(2, 3), MASK, rand(1)[0]
    ),
    "mask, a row": case(lambda x, m, v: x.index_put((m,), v), rand(3, 4), MASK, rand(4)),
    "mask, a value for each place": case(
        lambda x, m, v: x.index_put((m,), v), rand(3, 4), MASK, rand(2, 4)
    ),
    "mask, added": case(
        lambda x, m, v: x.index_put((m,), v, accumulate=True), rand(3, 4), MASK, rand(2, 1)
    ),
    "mask, in place": case(lambda x, m, v: _set(x.sin(), m, v), rand(3, 4), MASK, rand(2, 4)),
    # Parts of a composite function that read unbatched tensors bypassed autograd.
    "an index and a number": case(lambda x, i: x[i, 0], rand(4, 3), torch.tensor([1, 2])),
    "to the type of another": case(lambda x, y: x.to(y), rand(2, 3), rand(2, 3).float()),
    # The factor's formula reads the tensor's value from before the write.
    "renorm in place": case(lambda x: x.clone().renorm_(2, 0, 0.5), rand(3, 2, 4)),
    "a weight for each class": case(
        lambda x, t, w: F.multi_margin_loss(x, t, weight=w),
        rand(3, 4),
        torch.tensor([0, 2, 1]),
        rand(4),
    ),
    # C++ wrote the powers into memory of a plain tensor.
    "powers": case(lambda x: torch.vander(x, 4), rand(3)),
    "one power": case(lambda x: torch.vander(x, 1) * x[:, None], rand(3)),
    "powers of one number": case(lambda x: torch.vander(x) * x, rand(1)),
    "powers, rising": case(lambda x: torch.linalg.vander(x), rand(2, 3)),
    # Its formula takes a view of the indices, which does not exist with the batch dim further in.
    "unpooling": case(
        lambda x, i: F.max_unpool2d(x, i, [2]), *F.max_pool2d(rand(1, 4, 6), 2, return_indices=True)
    ),
    # Forward mode's lazy zeros reached kernels that need a tensor with storage.
    "dropout": case(lambda x: _seeded(F.dropout, x, 0.4), rand(4, 3)),
    "feature dropout": case(lambda x: _seeded(F.dropout2d, x, 0.4), rand(2, 4, 3, 3)),
}


def _positive(x: Tensor) -> Tensor:
    return x @ x.mT + torch.eye(len(x), dtype=x.dtype)


# Operators whose tangents torch can't differentiate again: torch's results are wrong, NaN or an
# error.
TWICE: dict[str, Case] = {
    "det": case(torch.linalg.det, rand(3, 3)),
    "slogdet": case(torch.linalg.slogdet, rand(3, 3)),
    "logdet": case(lambda x: torch.logdet(_positive(x)), rand(3, 3)),
    "solve": case(torch.linalg.solve, rand(3, 3) + torch.eye(3), rand(3, 2)),
    "solve a vector": case(torch.linalg.solve, rand(3, 3) + torch.eye(3), rand(3)),
    "solve from the right": case(
        lambda a, b: torch.linalg.solve(a, b, left=False), rand(3, 3) + torch.eye(3), rand(2, 3)
    ),
    "eigh": case(lambda x: torch.linalg.eigh(_positive(x))[1].abs(), rand(3, 3)),
    "eigvalsh": case(lambda x: torch.linalg.eigvalsh(_positive(x)), rand(3, 3)),
    "eig": case(lambda x: torch.linalg.eig(x)[0].abs(), rand(3, 3)),
    "householder product": case(torch.linalg.householder_product, rand(4, 3), rand(3)),
    "triangular solve": case(
        lambda b, a: torch.triangular_solve(b, a.triu() + torch.eye(3))[0], rand(3, 2), rand(3, 3)
    ),
    "triangular solve, transposed": case(
        lambda b, a: torch.triangular_solve(b, a.tril() + torch.eye(3), False, True)[0],
        rand(3, 2),
        rand(3, 3),
    ),
    "layer norm": case(lambda x, w, b: F.layer_norm(x, (3,), w, b), rand(2, 3), rand(3), rand(3)),
    "layer norm, two dims": case(lambda x: F.layer_norm(x, (2, 3)), rand(2, 2, 3)),
    "batch norm": case(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        rand(4, 3),
        rand(3),
        rand(3),
    ),
    "batch norm that updates": case(
        lambda x: F.batch_norm(
            x, x.detach()[0, :, 0].clone(), x.detach()[1, :, 0].clone(), None, None, True
        ),
        rand(4, 3, 2),
    ),
    "instance norm": case(lambda x, w: F.instance_norm(x, weight=w), rand(2, 3, 4), rand(3)),
    "cumprod": case(lambda x: torch.cumprod(x, 0), torch.tensor([0.5, 0.0, 2.0, 0.0]).double()),
    "glu": case(F.glu, rand(4)),
}


def _seeded(f: Callable[..., Tensor], *args: Any) -> Tensor:
    torch.manual_seed(0)
    return f(*args)


@pytest.mark.parametrize("mode", ALL, ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", CASES)
def test_derivatives_of_operators_are_right(name: str, mode: Mode) -> None:
    found = verdicts(mode, CASES[name])
    assert found.keys() <= {Verdict.OK, Verdict.NONE}, found


@pytest.mark.filterwarnings("ignore:torch.triangular_solve")
@pytest.mark.parametrize("mode", SECOND, ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", TWICE)
def test_tangents_can_be_differentiated_again(name: str, mode: Mode) -> None:
    assert verdicts(mode, TWICE[name]).keys() == {Verdict.OK}, verdicts(mode, TWICE[name])


@pytest.mark.filterwarnings("ignore:torch.triangular_solve")
@pytest.mark.parametrize("name", TWICE)
def test_tangents_of_plain_tensors_can_be_differentiated_again(name: str) -> None:
    one = TWICE[name]
    want = torch_along(one)(*one.tensors)[0]
    for way in ("jvp(jvp)", "grad(jvp)", "jvp(grad)"):
        torch.testing.assert_close(along(one, way)(*one.tensors)[0], want)


def test_logcumsumexp_has_second_derivatives() -> None:
    """torch's double backward takes logarithms of cotangents, which gives NaN."""

    def f(x: Tensor) -> Tensor:
        return (torch.logcumsumexp(x, 0) * torch.tensor([1.0, -2.0, 3.0])).sum()

    def written_out(x: Tensor) -> Tensor:
        return (x.exp().cumsum(0).log() * torch.tensor([1.0, -2.0, 3.0])).sum()

    x = rand(3)
    want = tsfunc.hessian(written_out)(x)
    for first in (tsfunc.jacfwd, tsfunc.jacrev):
        torch.testing.assert_close(tsfunc.jacfwd(first(f))(x), want)
    torch.testing.assert_close(tsfunc.jacrev(tsfunc.jacfwd(f))(x), want)


def test_by_ordinary_backward_too() -> None:
    x = rand(2, 3).requires_grad_()
    f = lambda x: F.layer_norm(x, (3,)).square().sum()  # noqa: E731
    v = rand(2, 3)
    _, tangent = tsfunc.jvp(f, (x,), (v,))
    want = torch.autograd.functional.hvp(f, x.detach(), v)[1]
    torch.testing.assert_close(torch.autograd.grad(tangent, x)[0], want)


@pytest.mark.parametrize("f", [torch.linalg.det, lambda x: torch.linalg.slogdet(x)[1]])
def test_examples_that_are_contiguous_in_a_batch_that_is_not(f: Callable[..., Any]) -> None:
    """The example's layout decides if the matrix or its transpose is factored."""
    batch = rand(3, 4, 3)[:, :3]
    want = torch.stack([tsfunc.grad(f)(x.clone()) for x in batch])
    torch.testing.assert_close(tsfunc.vmap(tsfunc.grad(f))(batch), want)


@pytest.mark.parametrize("mode", ALL, ids=lambda mode: mode.name)
def test_right_derivatives_pass_in_every_mode(mode: Mode) -> None:
    one = case(lambda x, y: (x.sin() * y, x @ y, x > y), rand(3), rand(3))
    assert verdicts(mode, one).keys() == {Verdict.OK}


@pytest.mark.parametrize("mode", ALL, ids=lambda mode: mode.name)
def test_wrong_derivatives_are_found(mode: Mode) -> None:
    """The modes find a function that computes something else under a level."""

    def odd(x: Tensor) -> Tensor:
        return x.sin() * 2 if tsfunc.dispatch.current_levels() else x.sin()

    assert Verdict.WRONG in verdicts(mode, case(odd, rand(3)))


def test_split_at_places_in_a_tensor() -> None:
    """C++ reads the positions from memory, which a tracer does not have."""
    x, places = rand(3, 5), torch.tensor([1, 3])

    def parts(x: Tensor) -> tuple[Tensor, ...]:
        return torch.tensor_split(x.sin(), places)

    pushed = tsfunc.vmap(lambda x: tsfunc.jvp(parts, (x,), (x,))[1])(x)
    torch.testing.assert_close(torch.cat(pushed, 1), x.cos() * x)
    with pytest.raises(tsfunc.errors.DataDependentError, match="tolist"):
        tsfunc.vmap(lambda x, at: torch.tensor_split(x, at))(
            x, torch.stack([places] * 3) * x[:, :2].long()
        )


def test_a_mask_that_has_another_number_of_places() -> None:
    def written(x: Tensor, mask: Tensor) -> Tensor:
        return x.sin().index_put((mask,), torch.ones(2)).sum()

    masks = torch.stack((MASK, ~MASK))
    with pytest.raises(RuntimeError, match="by a mask that has another number of positions"):
        tsfunc.vmap(tsfunc.grad(written))(torch.ones(2, 3), masks)


def test_values_without_derivatives_do_not_count() -> None:
    for mode in (VMAP_GRAD, GRAD_VMAP, VMAP_JVP):
        assert verdicts(mode, case(lambda x: x.argmax(), rand(3))).keys() == {Verdict.NONE}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("name", ["maximum", "minimum", "fmax", "fmin"])
def test_extrema_with_an_operand_of_another_dtype_have_forward_derivatives(
    name: str, dtype: torch.dtype
) -> None:
    """Forward mode subtracts the tangents of the operands, which bool tensors refuse."""
    op = getattr(torch, name)
    x = torch.randn(2, 5, dtype=torch.float64)
    for other in (torch.rand(5).round().to(dtype), torch.tensor(1).to(dtype)):

        def f(x: Tensor, other: Tensor = other) -> Tensor:
            out: Tensor = op(op(other, x) * 2, other)
            return out

        expected = torch.stack([torch.autograd.functional.jacobian(f, one) for one in x])
        for transformed in (vmap(jacfwd(f)), vmap(jacrev(f)), specialize(vmap(jacfwd(f)))):
            torch.testing.assert_close(transformed(x), expected)
        torch.testing.assert_close(jvp(f, (x,), (x,))[1], (expected * x[:, None]).sum(-1))
