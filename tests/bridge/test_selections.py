"""``x[mask]`` with a mask of each example: calls that need no size agree with the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

import tsfunc
from tsfunc.errors import DataDependentError, EscapedTracerError

EXAMPLES = 4


def stacked(f: Callable[..., Any], *batches: torch.Tensor) -> Any:
    outs = [f(*[batch[i].clone() for batch in batches]) for i in range(batches[0].shape[0])]
    return pytree.tree_map(lambda *each: torch.stack(each), outs[0], *outs[1:])


def given(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tensors, masks (one of which selects almost nothing), and matching operands."""
    torch.manual_seed(seed)
    x, other = torch.randn(2, EXAMPLES, 3, 5)
    mask = torch.rand(EXAMPLES, 3, 5) > 0.5
    mask[2] = False
    mask[:, 0] = True
    return x, mask, other


def written(write: Callable[..., None]) -> Callable[..., torch.Tensor]:
    """Return a function that writes into its tensor and returns it."""

    def f(b: torch.Tensor, m: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        b = b.clone()
        write(b, m, c)
        return b

    return f


def test_a_mask_chooses_the_doubled_elements() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[y > 0] *= 2
        return y

    x = torch.tensor([[1.0, -1.0], [2.0, 3.0]])
    assert tsfunc.vmap(doubled)(x).tolist() == [[2.0, -1.0], [4.0, 6.0]]


def _add(b: Any, m: Any, c: Any) -> None:
    b[m] += 1.0


def _multiply(b: Any, m: Any, c: Any) -> None:
    b[m] *= c[m]


def _clamp(b: Any, m: Any, c: Any) -> None:
    b[m] = b[m].clamp(0)


def _several(b: Any, m: Any, c: Any) -> None:
    b[m] = 2 * b[m] - c[m] / 3 + c[0, 0]


def _center(b: Any, m: Any, c: Any) -> None:
    b[m] -= b[m].mean()


def _running(b: Any, m: Any, c: Any) -> None:
    b[m] = b[m].cumsum(0)


def _shares(b: Any, m: Any, c: Any) -> None:
    b[m] = torch.softmax(b[m], 0)


def _computed_again(b: Any, m: Any, c: Any) -> None:
    b[b > 0] = torch.sqrt(b[b > 0])


def _rows(b: Any, m: Any, c: Any) -> None:
    b[m[:, 0]] = b[m[:, 0]] @ c.T @ c


def _behind(b: Any, m: Any, c: Any) -> None:
    b[:, m[0]] += c[:, m[0]]


def _other_places(b: Any, m: Any, c: Any) -> None:
    b[m.flip(0)] = c[m]


def _put(b: Any, m: Any, c: Any) -> None:
    b.index_put_((m,), b[m] * 2)


def _accumulated(b: Any, m: Any, c: Any) -> None:
    b.index_put_((m,), c[m], accumulate=True)


def _selected_in_place(b: Any, m: Any, c: Any) -> None:
    part = b[m]
    part.mul_(2)
    part[part > 1] = 0.0
    b[m] = part


WRITES = [_add, _multiply, _clamp, _several, _center, _running, _shares, _computed_again, _rows,
          _behind, _other_places, _put, _accumulated, _selected_in_place]  # fmt: skip


def _one_hot_weight() -> torch.Tensor:
    return torch.arange(1.0, 6.0)


READS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "sum": lambda b, m, c: b[m].sum(),
    "mean": lambda b, m, c: torch.mean(b[m]),
    "rows": lambda b, m, c: b[m[:, 0]].mean(0),
    "rows_kept": lambda b, m, c: b[m[:, 0]].sum((0, 1), keepdim=True),
    "inside_of_rows": lambda b, m, c: b[m[:, 0]].norm(dim=1).sum(),
    "norm": lambda b, m, c: torch.linalg.vector_norm(b[m]),
    "prod": lambda b, m, c: b[m].prod(),
    "any": lambda b, m, c: (b[m] > 1).any(),
    "all": lambda b, m, c: (b[m] > -1).all(),
    "std": lambda b, m, c: b[m].std(),
    "var": lambda b, m, c: b[m[:, 0]].var(0, correction=0),
    "max": lambda b, m, c: b[m].max(),
    "max_along": lambda b, m, c: tuple(b[m[:, 0]].max(0)),
    "max_of_rows": lambda b, m, c: b[m[:, 0]].max(1).values.sum(),
    "maximum": lambda b, m, c: torch.max(b[m], c[m]).sum(),
    "amin": lambda b, m, c: b[m].amin(),
    "argmax": lambda b, m, c: b[m].argmax(),
    "median": lambda b, m, c: b[m].median(),
    "logsumexp": lambda b, m, c: b[m].logsumexp(0),
    "first": lambda b, m, c: b[m][0],
    "last": lambda b, m, c: b[m[:, 0]][-1, 1:],
    "log": lambda b, m, c: b[b > 0].log().sum(),
    "narrowed": lambda b, m, c: b[m][b[m] > 0].sum(),
    "masked_select": lambda b, m, c: torch.masked_select(b, m).sum(),
    "ratio": lambda b, m, c: (c[0, 0] / b[b != 0]).sum(),
    "column": lambda b, m, c: b[m[:, 0], 1].sum(),
    "rows_in_part": lambda b, m, c: b[m[:, 0]][:, None, 1:].sum(),
    "flag": lambda b, m, c: b[m[1, 1]].sum(),
    "joined": lambda b, m, c: torch.cat([b[m], c[m], c[0]]).square().sum(),
    "flat": lambda b, m, c: b[m[:, 0]].flatten().mean(),
    "gram": lambda b, m, c: b[m[:, 0]].T @ c[m[:, 0]],
    "dot": lambda b, m, c: torch.dot(b[m], c[m]),
    "products": lambda b, m, c: (b[m[:, 0]] @ c.T).relu().mean(0),
    "linear": lambda b, m, c: functional.linear(b[m[:, 0]], c).sum(0),
    "layer_norm": lambda b, m, c: functional.layer_norm(b[m[:, 0]], (5,)).sum(0),
    "normalize": lambda b, m, c: functional.normalize(b[m[:, 0]], dim=-1).sum(0),
    "cosine": lambda b, m, c: functional.cosine_similarity(b[m[:, 0]], c[m[:, 0]]).mean(),
    "mse": lambda b, m, c: functional.mse_loss(b[m], c[m]),
    "module": lambda b, m, c: torch.nn.BCEWithLogitsLoss()(b[m], (c[m] > 0).float()),
    "kl": lambda b, m, c: functional.kl_div(b[m[:, 0]], c[m[:, 0]].exp(), reduction="batchmean"),
    "cross_entropy": lambda b, m, c: functional.cross_entropy(
        b[m[:, 0]], c[m[:, 0]].argmax(1), weight=_one_hot_weight(), ignore_index=2
    ),
    "table": lambda b, m, c: c[(b[m] > 0).long()].mean((0, 1)),
    "embedding": lambda b, m, c: functional.embedding((b[m] > 0).long(), c).mean((0, 1)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_writes_by_a_mask(write: Callable[..., None]) -> None:
    batches = given()
    f = written(write)
    torch.testing.assert_close(tsfunc.vmap(f, strict=True)(*batches), stacked(f, *batches))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def _one(write: Callable[[Any, Any, Any], None]) -> Callable[[Any], Any]:
    def f(x: Any) -> Any:
        x = x.clone()
        write(x, x > 0, x.exp())
        return x

    return f


@pytest.mark.parametrize("write", [_add, _multiply, _clamp, _running, _computed_again])
def test_writes_by_a_mask_of_one_element(write: Callable[..., None]) -> None:
    """The examples have no dims, as in ``vmap`` of a function of one number."""
    f = _one(write)
    x = torch.tensor([0.5, -1.5, 2.0], dtype=torch.float64)
    torch.testing.assert_close(tsfunc.vmap(f)(x), stacked(f, x))
    gradients = stacked(lambda x: torch.autograd.functional.jacobian(f, x), x)
    torch.testing.assert_close(tsfunc.vmap(tsfunc.grad(f))(x), gradients)


@pytest.mark.parametrize("name", READS)
def test_operations_that_need_no_size(name: str) -> None:
    batches, f = given(), READS[name]
    got, want = tsfunc.vmap(f, strict=True)(*batches), stacked(f, *batches)
    torch.testing.assert_close(got, want, equal_nan=True)


def _total(f: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def total(b: torch.Tensor, m: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        parts = [part.float().sum() for part in pytree.tree_leaves(f(b, m, c))]
        return torch.stack(parts).sum()

    return total


SMOOTH = [*[(f.__name__, written(f)) for f in WRITES], *READS.items()]
_NOT_SMOOTH = {"any", "all", "argmax"}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("f", [pytest.param(f, id=n) for n, f in SMOOTH if n not in _NOT_SMOOTH])
def test_derivatives_are_the_loops(f: Callable[..., Any]) -> None:
    b, m, c = given(1)
    b[1] = 0.0  # whose logarithms are infinite where no mask selects them
    total = _total(f)
    both = tsfunc.grad(total, argnums=(0, 2))
    each = [both(b[i], m[i], c[i]) for i in range(EXAMPLES)]
    want = tuple(torch.stack(part) for part in zip(*each, strict=True))
    inside = tsfunc.vmap(both, strict=True)(b, m, c)
    torch.testing.assert_close(inside, want, equal_nan=True)
    outside = tsfunc.grad(lambda b, c: tsfunc.vmap(total)(b, m, c).sum(), argnums=(0, 1))(b, c)
    torch.testing.assert_close(outside, want, equal_nan=True)


@pytest.mark.parametrize("write", [_several, _rows, _center], ids=lambda f: f.__name__)
def test_masks_of_an_outer_vmap(write: Callable[..., None]) -> None:
    b, m, c = given(2)
    f = written(write)
    got = tsfunc.vmap(lambda m: tsfunc.vmap(lambda b, c: f(b, m, c))(b, c))(m)
    want = stacked(lambda m: torch.stack([f(b[i], m, c[i]) for i in range(EXAMPLES)]), m)
    torch.testing.assert_close(got, want)


def test_in_programs() -> None:
    f = written(_several)
    batch = tsfunc.MetaTensorType(shape=["n", 3, 5])
    program = tsfunc.specialize(tsfunc.vmap(f), dict.fromkeys("bmc", batch))
    for size in (4, 3):
        batches = [value[:size] for value in given(size)]
        torch.testing.assert_close(program(*batches), stacked(f, *batches))


def test_around_programs() -> None:
    f, batches = written(_several), given(5)
    nested = batches[0], batches[1].unsqueeze(1), batches[2]
    for function, args in ((f, batches), (tsfunc.vmap(f, (None, 0, None)), nested)):
        want = tsfunc.vmap(function)(*args)
        program = tsfunc.specialize(function)
        torch.testing.assert_close(tsfunc.vmap(program)(*args), want)
        torch.testing.assert_close(tsfunc.specialize(tsfunc.vmap(program))(*args), want)
        assert program.cache_info().programs == 1


def test_around_a_program_that_needs_the_size_of_a_derivative() -> None:
    gradient = tsfunc.grad(lambda x: x[x > 0].sin().sum())
    x = torch.tensor([[1.0, -1.0], [2.0, 3.0]])
    with pytest.raises(tsfunc.errors.DataDependentError, match=r"shape, at .*needs its size"):
        tsfunc.vmap(tsfunc.specialize(gradient))(x)
    torch.testing.assert_close(tsfunc.specialize(tsfunc.vmap(gradient))(x), stacked(gradient, x))


def _in_a_branch(x: torch.Tensor) -> torch.Tensor:
    def some() -> torch.Tensor:
        y = torch.zeros_like(x) + x
        y[y > 0.5] *= x.mean()
        return y.tanh()

    return tsfunc.cond(x.mean() < 0.1, some, lambda: x * 0.8)


def _in_steps(x: torch.Tensor) -> torch.Tensor:
    def step(row: torch.Tensor) -> torch.Tensor:
        row = row * x.sum()
        row[row > 0.5] *= 0.5
        return row.sin()

    return tsfunc.map(step, x)


@pytest.mark.parametrize("f", [_in_a_branch, _in_steps])
def test_in_bodies_of_control_flow(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    signs = torch.tensor([1.0, -1.0, 1.0]).reshape(3, 1, 1)
    x = torch.rand(3, 2, 2, dtype=torch.float64) * signs + 0.2
    hessian = tsfunc.hessian(lambda x: f(x).sum())
    for function in (f, hessian):
        want = stacked(function, x)
        torch.testing.assert_close(tsfunc.vmap(function)(x), want)
        torch.testing.assert_close(tsfunc.specialize(tsfunc.vmap(function))(x), want)
    torch.testing.assert_close(tsfunc.vmap(tsfunc.specialize(f))(x), stacked(f, x))


@hypothesis.given(st.integers(0, 2**16), st.sampled_from([torch.int64, torch.float64]))
@hypothesis.settings(max_examples=20, deadline=None)
def test_any_mask(seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    x = torch.randint(-4, 5, (EXAMPLES, 6)).to(dtype)
    mask = torch.rand(EXAMPLES, 6) > torch.rand(())

    def f(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.clone()
        y[mask] = y[mask].cumsum(0) + 1
        return y, x[mask].sum(), (x[mask] * 2 > 3).any(), x[mask].count_nonzero()

    torch.testing.assert_close(tsfunc.vmap(f)(x, mask), stacked(f, x, mask))


def test_experts_take_the_rows_that_are_theirs() -> None:
    torch.manual_seed(0)
    tokens, weights = torch.randn(EXAMPLES, 7, 3), torch.randn(2, 3, 3)

    def routed(tokens: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(7, 3)
        best = tokens.sum(-1) > 0
        for expert, mine in zip(weights, (best, ~best), strict=True):
            out[mine] = torch.tanh(tokens[mine] @ expert)
        return out

    torch.testing.assert_close(tsfunc.vmap(routed)(tokens), stacked(routed, tokens))


def test_a_mask_that_was_written_to_keeps_its_selection() -> None:
    x, mask, _ = given()

    def f(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mask = mask.clone()
        part = x[mask]
        mask.fill_(False)
        return part.sum()

    torch.testing.assert_close(tsfunc.vmap(f)(x, mask), stacked(f, x, mask))


@pytest.mark.parametrize(
    "asks",
    [
        lambda part: part,
        lambda part: part.shape,
        lambda part: part.numel(),
        lambda part: len(part),
        lambda part: part.sort().values.sum(),
        lambda part: torch.stack([part, part]).sum(),
        lambda part: part + torch.ones(3),
        lambda part: functional.dropout(part).sum(),
        lambda part: part[1:].sum(),
        lambda part: list(part),
    ],
    ids=["result", "shape", "numel", "len", "sort", "stack", "add", "dropout", "slice", "list"],
)
def test_a_read_of_the_size_is_an_error(asks: Callable[[Any], Any]) -> None:
    x, mask, _ = given()
    with pytest.raises(DataDependentError, match=r"test_selections.py:\d+, in <lambda>") as caught:
        tsfunc.vmap(lambda x, mask: asks(x[mask]), randomness="different")(x, mask)
    assert "torch.where(mask, x, fill)" in str(caught.value)
    assert "data_dependent=" in str(caught.value)


def test_masks_that_select_unlike_are_an_error() -> None:
    x, mask, _ = given()
    with pytest.raises(RuntimeError, match="do not select as many"):
        tsfunc.vmap(lambda x, mask: (x[mask] + x[x > 0]).sum())(x, mask)


def test_a_maximum_of_nothing_is_an_error() -> None:
    x, _, _ = given()
    with pytest.raises(RuntimeError, match="selects no element"):
        tsfunc.vmap(lambda x: x[x > 100].max())(x)


def test_a_mask_of_another_shape_is_an_error() -> None:
    x, mask, _ = given()
    with pytest.raises(IndexError, match=r"mask does not match .*\[5, 3\].*got \[3, 5\]"):
        tsfunc.vmap(lambda x, mask: x.T[mask].sum())(x, mask)


def test_after_the_transform_it_is_an_escaped_value() -> None:
    x, mask, _ = given()
    kept = []

    def f(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kept.append(x[mask])
        return x

    tsfunc.vmap(f)(x, mask)
    with pytest.raises(EscapedTracerError, match="had ended"):
        kept[0].sum()


def test_split_still_has_the_sizes() -> None:
    x, mask, _ = given()
    sizes = tsfunc.vmap(lambda x, m: x[m].numel(), data_dependent="split")(x, mask)
    assert sizes.tolist() == mask.flatten(1).sum(1).tolist()
