"""Random calls that torch refuses for one example are refused for a batch, and in a program.

The calls are samples of torch's operator database with one change: a tensor of another rank, size
or dtype, or another integer. Seeds are fresh and printed.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tsfunc

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

SIZE = 3  # the batch size
REFUSALS = (RuntimeError, IndexError, TypeError, ValueError)
DTYPES = (torch.int64, torch.int32, torch.bool, torch.float32, torch.float64, torch.complex64)
NUMBERS = (-9, -1, 0, 1, 2, 3, 17)

# torch itself writes past the end of memory, or allocates without bound, for some changed calls.
UNSAFE = {
    "lu_unpack", "linalg.ldl_solve", "combinations", "empty_strided",
    # These address the memory of the batch: tests/transforms/test_strided_views.py.
    "as_strided", "as_strided_copy",
    # running statistics of another length
    "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update",
}  # fmt: skip
# Families whose batched kernels accept more calls than their kernels for one example.
QUICK = """
    addmm addmv addbmm baddbmm addr expand complex heaviside gradient masked_scatter masked_select
    index_add native_layer_norm nn.functional.layer_norm
    nn.functional.group_norm nn.functional.linear nn.functional.conv1d nn.functional.conv2d
    nn.functional.conv_transpose1d nn.functional.cross_entropy nn.functional.soft_margin_loss
    nn.functional.multi_margin_loss nn.functional.binary_cross_entropy_with_logits
    nn.functional.adaptive_avg_pool2d nn.functional.adaptive_max_pool3d nn.functional.max_unpool2d
    nn.functional.pixel_shuffle nn.functional.unfold cov
    index_select index_fill put histogram istft
    isin nn.functional.one_hot __getitem__ index_put nn.functional.gaussian_nll_loss
    nn.functional.dropout nn.functional.dropout2d nn.functional.alpha_dropout
    nn.functional.feature_alpha_dropout
    lerp take bucketize nn.functional.embedding repeat_interleave to_sparse
""".split()


def changed(rng: random.Random, leaves: Sequence[Any]) -> list[Any] | None:
    """Return the arguments with one random change; None if the change does not apply."""
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) or type(x) is int]
    if not places:
        return None
    i = rng.choice(places)
    x, out = leaves[i], list(leaves)
    if not isinstance(x, Tensor):
        out[i] = rng.choice(NUMBERS)
        return out
    kind = rng.choice(["a dim of size 1", "a dim of size 2", "a dim less", "longer", "dtype"])
    if kind == "dtype":
        dtype = rng.choice(DTYPES)
        if x.is_complex() and not dtype.is_complex:
            return None
        out[i] = x.to(dtype)
        return out
    if kind.startswith("a dim of"):
        at = rng.randint(0, x.dim())
        out[i] = torch.stack([x] * int(kind[-1]), at)
        return out
    if not x.dim():
        return None
    at = rng.randrange(x.dim())
    if not x.shape[at]:
        return None
    if kind == "longer":
        out[i] = torch.cat([x, x.narrow(at, 0, 1)], at)
    else:
        out[i] = x.select(at, 0).clone()
    return out


def refused_calls(op: Any, rng: random.Random, tries: int) -> Iterator[tuple[Any, list[Any], str]]:
    """Yield changed samples that torch refuses: the function of leaves, the leaves, the error."""
    dtype = torch.float64 if torch.float64 in op.dtypes else sorted(op.dtypes, key=str)[0]
    samples = list(itertools.islice(op.sample_inputs("cpu", dtype), 40))
    for _ in range(tries):
        sample = rng.choice(samples)
        given, tree = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        if any(
            isinstance(x, Tensor) and (x.layout is not torch.strided or x.numel() > 3000)
            for x in given
        ):
            continue
        leaves = changed(rng, [x.detach() if isinstance(x, Tensor) else x for x in given])
        if leaves is None:
            continue

        def call(leaves: Sequence[Any], tree: Any = tree) -> Any:
            first, args, kwargs = pytree.tree_unflatten(list(leaves), tree)
            return op.op(first, *args, **kwargs)

        try:
            call([x.clone() if isinstance(x, Tensor) else x for x in leaves])
        except NotImplementedError:
            pass  # a kernel is missing, so the call itself may be valid
        except REFUSALS as error:
            if "INTERNAL ASSERT FAILED" not in str(error):  # a fault of torch, not a refusal
                yield call, leaves, str(error)
        except Exception:
            pass


def accepts(function: Callable[..., Any], values: Sequence[Any]) -> bool:
    """True if the call does not raise."""
    try:
        function(*values)
    except Exception:
        return False
    return True


def check(op: Any, tries: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    for call, leaves, error in refused_calls(op, rng, tries):
        tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves]
        place = f"seed {seed}: {op.formatted_name}{shapes}"
        if tensors and rng.random() < 0.25:

            def of_tensors(*parts: Tensor, tensors: Any = tensors, leaves: Any = leaves) -> Any:
                given = list(leaves)
                for i, part in zip(tensors, parts, strict=True):
                    given[i] = part
                return call(given)  # noqa: B023

            if accepts(tsfunc.specialize(of_tensors), [leaves[i].clone() for i in tensors]):
                pytest.fail(f"{place}: {error}\nThe program accepts the call.")
        for which in {tuple(tensors), *((i,) for i in tensors)}:
            at = rng.choice([0, -1])

            def of_batched(*parts: Tensor, which: Any = which, leaves: Any = leaves) -> Any:
                given = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
                for i, part in zip(which, parts, strict=True):
                    given[i] = part
                return call(given)  # noqa: B023

            inputs = [torch.stack([leaves[i]] * SIZE, at) for i in which]
            if accepts(tsfunc.vmap(of_batched, in_dims=at, randomness="different"), inputs):
                pytest.fail(f"{place}, batched {which} at {at}: {error}\nThe batch is accepted.")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_a_drawn_call_that_torch_refuses_is_refused_for_a_batch(name: str) -> None:
    for op in op_db:
        if op.name == name:
            check(op, tries=12)


ENTRIES = [op for op in op_db if op.dtypes and op.name not in UNSAFE]  # no dtypes: not on CPUs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", ENTRIES, ids=lambda op: str(op.formatted_name))
def test_the_law_for_the_whole_database(op: Any) -> None:
    check(op, tries=40)
