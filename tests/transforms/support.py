"""Comparisons with torch.func and with a Python loop, for the tests of transforms."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import optree
import pytest
import torch
import torch.func

import tsfunc

# Load torch's forward formulas; torch.func lets the warning of torch.jit.script through.
tsfunc.jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))

Api = ModuleType | Any  # tsfunc, or torch.func


def leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, none_is_leaf=True)


def same(got: Any, want: Any, **tolerance: Any) -> None:
    """Check that two pytrees have the same structure and the same tensors."""
    structure = optree.tree_structure
    assert structure(got, none_is_leaf=True) == structure(want, none_is_leaf=True)
    for g, w in zip(leaves(got), leaves(want), strict=True):
        if isinstance(w, torch.Tensor):
            assert type(g) is torch.Tensor or isinstance(g, torch.nn.Parameter)
            torch.testing.assert_close(g, w, **tolerance)
        else:
            assert g == w


def as_torch_func(build: Callable[[Api], Any], **tolerance: Any) -> Any:
    """Check that functions built from tsfunc's transforms agree with torch.func's."""
    torch.manual_seed(0)
    want = build(torch.func)
    torch.manual_seed(0)
    got = build(tsfunc)
    same(got, want, **tolerance)
    return got


def loop(
    func: Callable[..., Any], size: int, in_dims: Any = 0, out_dims: Any = 0
) -> Callable[..., Any]:
    """Return the definition of vmap: the function on each example, and the results stacked."""

    def looped(*args: Any) -> Any:
        dims = optree.broadcast_prefix(
            (in_dims,) * len(args) if isinstance(in_dims, int) else in_dims,
            args,
            is_leaf=lambda d: d is None,
            none_is_leaf=True,
        )
        flat, tree = optree.tree_flatten(args, none_is_leaf=True)
        outs = []
        for i in range(size):
            one = [x if d is None else x.select(d, i) for x, d in zip(flat, dims, strict=True)]
            outs.append(func(*optree.tree_unflatten(tree, one)))
        to = optree.broadcast_prefix(
            out_dims, outs[0], is_leaf=lambda d: d is None, none_is_leaf=True
        )
        parts = zip(*[leaves(out) for out in outs], strict=True)
        stacked = [
            part[0] if d is None else stack(part, d) for part, d in zip(parts, to, strict=True)
        ]
        spec = optree.tree_structure(outs[0], none_is_leaf=True)
        return optree.tree_unflatten(spec, stacked)

    return looped


def stack(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    rank = parts[0].dim() + 1
    return torch.stack(list(parts), dim % rank)


Mistake = tuple[Callable[[], Any], type[Exception], str]


def messages_of_mistakes(mistakes: Sequence[Mistake]) -> Callable[..., None]:
    """Return the test that each call raises its class of error, with its text in the message."""

    @pytest.mark.parametrize(("call", "kind", "message"), mistakes, ids=range(len(mistakes)))
    def test(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=re.escape(message)):
            call()

    return test
