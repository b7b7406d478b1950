"""A batched tensor answers like one example, and refuses questions about one example's value."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
from torch import Tensor, nn

import tsfunc
from tests.transforms.support import loop, same
from tsfunc import vmap
from tsfunc.errors import DataDependentError

X = torch.arange(12.0).view(3, 4).sin()
W = torch.arange(4.0).cos()


ANSWERS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x.shape,
    "size()": lambda x: x.size(),
    "size(0)": lambda x: x.size(0),
    "size(-1)": lambda x: x.size(-1),
    "len": len,
    "dim": lambda x: (x.dim(), x.ndim, x.ndimension()),
    "numel": lambda x: (x.numel(), x.nelement()),
    "is_contiguous": lambda x: x.is_contiguous(),
    "is_contiguous, transposed": lambda x: x.T.is_contiguous(),
    "stride": lambda x: (x.stride(), x.stride(0), x.T.stride()),
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "layout": lambda x: x.layout,
    "requires_grad": lambda x: x.requires_grad,
    "is_leaf": lambda x: x.is_leaf,
    "grad": lambda x: x.grad,
    "grad_fn": lambda x: x.grad_fn,
    "is_floating_point": lambda x: (x.is_floating_point(), x.is_complex(), x.is_signed()),
    "torch.is_tensor": torch.is_tensor,
    "isinstance": lambda x: isinstance(x, Tensor),
    "not a Parameter": lambda x: isinstance(x, nn.Parameter),
    "type()": lambda x: x.type(),
    "element_size": lambda x: (x.element_size(), x.itemsize, x.nbytes),
    "storage_offset": lambda x: x.storage_offset(),
    "iteration": lambda x: len(list(x)),
    "reversed": lambda x: len(list(reversed(x))),
    "unpacking": lambda x: (lambda a, b: tuple(a.shape))(*x),
    "T": lambda x: x.T.shape,
    "mT": lambda x: x.mT.shape,
    "H": lambda x: x.H.shape,
    "result_type": lambda x: torch.result_type(x, 1.0),
    "is_same_size": lambda x: x.is_same_size(x),
    "hash": lambda x: hash(x) == id(x),
    "in a list": lambda x: any(x is y for y in [x]),
    "dir": lambda x: "sin" in dir(x),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_its_properties(name: str) -> None:
    seen = []

    def func(x: Tensor) -> Tensor:
        seen.append(ANSWERS[name](x))
        return x

    batch = torch.randn(5, 2, 3)
    vmap(func)(batch)
    assert seen == [ANSWERS[name](batch[0].clone())]


def test_lazily_conjugated_and_negated() -> None:
    """The tracer's value has the flag; the tracer's own is not read."""
    seen: list[Any] = []

    def func(z: Tensor) -> Tensor:
        conj = z.conj()
        resolved = conj.resolve_conj()
        seen.append((z.is_conj(), conj.is_conj(), torch.is_conj(conj), resolved.is_conj()))
        seen.append((conj.conj().is_conj(), conj.is_neg(), torch._neg_view(z).is_neg()))
        return resolved

    batch = torch.randn(3, 2, dtype=torch.complex64)
    same(vmap(func)(batch), batch.conj().resolve_conj())
    vmap(lambda z: vmap(func)(z))(batch[:, None])
    assert seen == [(False, True, True, False), (False, False, True)] * 2


OFFSETS: dict[str, Callable[[Tensor], Tensor]] = {
    "of what was made inside": lambda x: (x * 2)[1:].as_strided((2,), (1,), 1),
    "as it stands": lambda x: (x * 2)[2:].as_strided((2,), (1,)),
    "read off the tensor": lambda x: (lambda y: y.as_strided((2,), (1,), y.storage_offset()))(
        (x * 2)[1:3]
    ),
    "one further": lambda x: (lambda y: y.as_strided((2,), (1,), y.storage_offset() + 1))(
        (x * 2)[1:]
    ),
}


@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("at", [0, 1])
def test_offsets_into_memory(name: str, at: int) -> None:
    """torch's origin of offsets holds, for derivatives too."""
    func, batch = OFFSETS[name], X.movedim(0, at)
    want = torch.stack([func(x.clone()) for x in X])
    same(vmap(func, at)(batch), want)
    same(vmap(vmap(func), in_dims=at + 1)(batch[None]), want[:, None])
    same(
        vmap(tsfunc.grad(lambda x: (func(x) * W[:2]).sum()), at)(batch),
        torch.stack([torch.func.grad(lambda x: (func(x) * W[:2]).sum())(x.clone()) for x in X]),
    )


def test_offsets_of_a_batch_that_begins_later() -> None:
    """An offset that the user reads from the batch is that of its first example."""
    batch = torch.arange(24.0).view(2, 3, 4)[1].T  # examples are columns
    offset = batch.storage_offset()
    got = vmap(lambda x: x.as_strided((2,), (4,), offset + 4))(batch)
    same(got, batch[:, 1:])


STRIDED: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (lambda x: x.as_strided((4,), (1,), 1), "reads memory from 1 to 4, but the first example, of"),
    (lambda x: x.as_strided((2, 3), (2, 1)), "of shape (4,), has that from 0 to 3. This is not"),
    (lambda x: x[1:].as_strided((2,), (1,), 0), "supported inside of vmap: use other views"),
    (lambda x: x[:0].as_strided((2,), (1,)), "supported inside of vmap: use other views"),
    (lambda x: x.as_strided((2, 2), (1,)), "size and stride must have the same length, got [2, 2]"),
]


@pytest.mark.parametrize(("func", "message"), STRIDED, ids=range(len(STRIDED)))
def test_a_view_does_not_reach_into_other_examples(
    func: Callable[[Tensor], Tensor], message: str
) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        vmap(func)(X)


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "new_zeros": lambda x: x.new_zeros(2) + x.sum(),
    "new_ones": lambda x: x.new_ones(2, 2),
    "new_full": lambda x: x.new_full((2,), 3.0),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "new_empty": lambda x: x.new_empty(2).fill_(1),
    "to a dtype": lambda x: x.to(torch.float64),
    "to another": lambda x: x.to(x),
    "to a device": lambda x: x.to("cpu"),
    "type": lambda x: x.type(torch.int64),
    "type, by its name": lambda x: x.type("torch.DoubleTensor"),
    "type_as": lambda x: x.type_as(torch.zeros(1, dtype=torch.float64)),
    "float": lambda x: x.double().float(),
    "half": lambda x: x.half(),
    "long": lambda x: x.long(),
    "bool": lambda x: x.bool(),
    "clone": lambda x: x.clone(),
    "iteration": lambda x: sum(x),
    "unpacking": lambda x: (lambda a, b, c, d: a + b * c - d)(*x),
    "an index": lambda x: x[-1],
    "Ellipsis and None": lambda x: x[..., None, 1:],
    "a list as index": lambda x: x[[0, 2]],
    "a tensor as index": lambda x: x[torch.tensor([0, 2])],
    "a mask from outside": lambda x: x[torch.tensor([True, False, True, True])],
    "comparisons": lambda x: (x > 0) & (x < 1) | (x == 2),
    "reflected operators": lambda x: 1 - 2 / (3 + 2**x) % 5,
    "matmul operators": lambda x: torch.eye(4) @ x @ W,
    "abs, neg, invert": lambda x: ~(abs(-x) > 1),
    "torch.tensor": lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0]) * x,
    "torch.stack with one from outside": lambda x: torch.stack([x, W]),
    "torch.cat with one from outside": lambda x: torch.cat([W, x]),
    "torch.where": lambda x: torch.where(x > 0, x, W),
    "split": lambda x: x.split(2),
    "unbind": lambda x: x.unbind(),
    "unflatten": lambda x: x.unflatten(0, (2, 2)),
    "view by a dtype": lambda x: x.view(torch.int32),
    "meshgrid": lambda x: torch.meshgrid(x, x, indexing="ij"),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, torch.zeros(2, 4)),
    "einsum": lambda x: torch.einsum("i,j->ij", x, W),
    "sort": lambda x: tuple(x.sort()),
    "max with a dim": lambda x: tuple(x.max(0)),
    "copy.copy": lambda x: copy.copy(x) * 2,
    "copy.deepcopy": lambda x: copy.deepcopy(x) * 2,
    "data": lambda x: x.data * 2,
}


@pytest.mark.parametrize("name", RESULTS)
def test_its_results(name: str) -> None:
    func = RESULTS[name]
    same(vmap(func)(X), loop(func, 3)(X))
    same(vmap(vmap(func))(torch.stack([X, X + 1])), loop(loop(func, 3), 2)(torch.stack([X, X + 1])))


def test_a_copy_is_its_own() -> None:
    def func(x: Tensor) -> Tensor:
        y = copy.deepcopy({"x": x, "again": x})
        assert y["x"] is y["again"]
        y["x"].mul_(0)
        return x

    same(vmap(func)(X), X)


@pytest.mark.parametrize("show", [repr, str, lambda x: f"{x}"])
def test_it_can_be_shown(show: Callable[[Tensor], str]) -> None:
    seen = []

    def func(x: Tensor, y: Tensor) -> Tensor:
        seen.append(show(x))
        vmap(lambda a: seen.append(show(a)) or a)(x)  # type: ignore[func-returns-value]
        return x

    vmap(func, in_dims=(0, None))(X, W)
    outer, inner = seen
    assert "func" in outer
    assert "batch dim 0" in outer
    assert inner.count("BatchTracer") == 2


# Indexing by a number for each example.

I3, J3 = torch.tensor([0, -1, 2]), torch.tensor([1, 0, 1])
TABLE = torch.randn(3, 4, 5, 2, generator=torch.Generator().manual_seed(0))
WHICH = torch.tensor([0, 1, 1])
READS: dict[str, Callable[[Tensor, Any, Any], Tensor]] = {
    "x[i]": lambda x, i, j: x[i],
    "x[i, j]": lambda x, i, j: x[i, j],
    "x[:, i, j]": lambda x, i, j: x[:, i, j],
    "x[i, :, j]": lambda x, i, j: x[i, :, j],
    "x[..., j]": lambda x, i, j: x[..., j],
    "x[..., i, :]": lambda x, i, j: x[..., i, :],
    "x[None, i, 1:3]": lambda x, i, j: x[None, i, 1:3],
    "x[i, several]": lambda x, i, j: x[i, WHICH],
    "x[i, :, several]": lambda x, i, j: x[i, :, WHICH],
    "x[several, :, j]": lambda x, i, j: x[WHICH, :, j],
    "x[mask, i]": lambda x, i, j: x[torch.tensor([True, False, True, False]), i],
}
WRITES: dict[str, Callable[[Tensor, Any, Any], None]] = {
    "x[i] =": lambda x, i, j: x.__setitem__(i, 5.0),
    "x[i, j] =": lambda x, i, j: x.__setitem__((i, j), x[0, 0]),
    "x[:, i] =": lambda x, i, j: x.__setitem__((slice(None), i), x[0, 0]),
    "x[..., j] =": lambda x, i, j: x.__setitem__((..., j), x[..., 0] * 2),
    "x[i, 1:3, j] =": lambda x, i, j: x.__setitem__((i, slice(1, 3), j), x[0, 0, 0].sum()),
    "x[i, :, 1] =": lambda x, i, j: x.__setitem__((i, slice(None), 1), 7),
    "x[None, i] =": lambda x, i, j: x.__setitem__((None, i), 7),
}


def loop_ij(func: Callable[..., Tensor]) -> Tensor:
    return torch.stack([func(TABLE[n], int(I3[n]), int(J3[n])) for n in range(3)])


@pytest.mark.parametrize("name", READS)
def test_read_at_a_number_for_each_example(name: str) -> None:
    func = READS[name]
    same(vmap(func)(TABLE, I3, J3), loop_ij(func))
    per_example = tsfunc.grad(lambda x, i, j: func(x, i, j).pow(2).sum())
    plain = torch.func.grad(lambda x, i, j: func(x, i, j).pow(2).sum())
    same(vmap(per_example)(TABLE, I3, J3), loop_ij(plain))


@pytest.mark.parametrize("name", WRITES)
def test_write_at_a_number_for_each_example(name: str) -> None:
    def func(x: Tensor, i: Any, j: Any) -> Tensor:
        y = x.clone()
        WRITES[name](y, i, j)
        return y

    same(vmap(func)(TABLE, I3, J3), loop_ij(func))


def test_the_table_may_be_the_same_for_all() -> None:
    same(vmap(lambda i: W[i])(I3), W[I3])


# Reads that need an example's value.

REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "if": lambda x: 1 if (x > 0).all() else 2,
    "in": lambda x: x[0] in x,
    "list index": lambda x: [1, 2, 3][x[0].long()],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "len(x[mask])": lambda x: len(x[x > 0]),
    "torch.equal": lambda x: torch.equal(x, x + 1),
    "torch.allclose": lambda x: torch.allclose(x, x + 1),
    "is_nonzero": lambda x: torch.is_nonzero(x[0]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_python_value_is_refused(name: str) -> None:
    def func(x: Tensor) -> Tensor:
        REFUSED[name](x)
        return x

    with pytest.raises(DataDependentError):
        vmap(func)(X)
    with pytest.raises(RuntimeError):
        vmap(tsfunc.grad(lambda x: func(x).sum()))(X)


STORAGE: dict[str, Callable[[Tensor], Any]] = {
    "data_ptr": lambda x: x.data_ptr(),
    "untyped_storage": lambda x: x.untyped_storage(),
    "storage": lambda x: x.storage(),
    "share_memory_": lambda x: x.share_memory_(),
    "set_": lambda x: x.set_(torch.ones(4)),  # type: ignore[call-overload]
    "x.data = ...": lambda x: setattr(x, "data", torch.ones(4)),
}


@pytest.mark.parametrize("name", STORAGE)
def test_storage_is_refused(name: str) -> None:
    def func(x: Tensor) -> Tensor:
        STORAGE[name](x)
        return x

    said = " .torch.func says: mutating directly with `.data` under vmap" if "=" in name else ""
    with pytest.raises(RuntimeError, match=rf"of vmap\(func\){said}.*doesn't have storage"):
        vmap(func)(X)


def test_pickling_is_refused() -> None:
    with pytest.raises(TypeError, match=r"inside of vmap\(dumps\) and can't be pickled"):
        vmap(pickle.dumps)(X)


def test_the_result_can_be_pickled_and_copied() -> None:
    out = vmap(torch.sin)(X)
    same(pickle.loads(pickle.dumps(out)), X.sin())
    same(copy.deepcopy(out), X.sin())
