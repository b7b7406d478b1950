"""torch's reference implementations in Python; torch's functions run their primitives."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tsfunc
from tsfunc.errors import SlowFallbackWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import python_ref_db

# Random, data-dependent, with undefined values, or addressing memory outside of the example.
APART = """
    cauchy exponential geometric log_normal normal normal_ equal item narrow tensor_split empty_like
    new_empty new_empty_strided empty_permuted allclose as_strided nn.functional.dropout
    nn.functional.alpha_dropout
""".split()
ENTRIES = [
    info
    for info in python_ref_db
    if info.name.removeprefix("_refs.") not in APART
    and torch.float32 in info.supported_dtypes("cpu")
]


def right(info: Any, most: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(itertools.islice(info.sample_inputs("cpu", torch.float32), most))
    for sample in samples:
        leaves, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not places:
            continue

        def call(*given: Tensor, leaves: Any = leaves, tree: Any = tree, at: Any = places) -> Any:
            values = list(leaves)
            for i, value in zip(at, given, strict=True):
                values[i] = value
            first, args, kwargs = pytree.tree_unflatten(values, tree)
            return info.op(first, *args, **kwargs)

        tensors = [leaves[i] for i in places]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want = call(*tensors)
            warnings.simplefilter("error", SlowFallbackWarning)
            got = tsfunc.vmap(call)(*[torch.stack([x, x]) for x in tensors])
        pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)
        for mine, one in pairs:
            if isinstance(one, Tensor):
                torch.testing.assert_close(mine, torch.stack([one, one]), equal_nan=True)


@pytest.mark.parametrize("info", ENTRIES[::12], ids=lambda info: info.full_name)
def test_some_references(info: Any) -> None:
    right(info, most=1)


@pytest.mark.slow
@pytest.mark.parametrize("info", ENTRIES, ids=lambda info: info.full_name)
def test_every_reference(info: Any) -> None:
    right(info, most=3)


def test_the_implementation_attribute_of_a_primitive() -> None:
    """The attribute is private to torch: without it the primitives would loop."""
    for name in ("sin", "add", "broadcast_in_dim", "svd"):
        assert callable(getattr(torch.ops.prims, name).default.impl_aten)
