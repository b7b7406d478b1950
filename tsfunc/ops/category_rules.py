"""Batching rules that follow from a category, for operators without a rule.

These rules apply to operators whose category is declared. A fake kernel is not enough evidence: by
its shapes, a softmax over the last dim looks like a sine. The fake kernel can only refute a
category. A call uses such a rule only if the result has, for each example, the shape that the
operator gives for one example. Otherwise the per-example loop runs it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tsfunc.ops.catalogue.classify import dim_arguments
from tsfunc.ops.dims import batch_to_front
from tsfunc.ops.identity import same_shape
from tsfunc.ops.registry import Args, BatchDims, Category, Kwargs, Rule, RuleLevel
from tsfunc.ops.tensor_iterator import pointwise, pointwise_inplace

if TYPE_CHECKING:
    from tsfunc.ops.catalogue.signature import OperatorSignature


def rule_of_category(category: Category, signature: OperatorSignature) -> Rule | None:
    """Return the rule of an operator's category, or None if the category has no rule."""
    if any(a.out or a.keyword for a in signature.tensors) or signature.form in ("out", "writing"):
        return None
    rule: Rule | None = None
    if category is Category.TENSOR_ITERATOR:
        rule = pointwise_inplace if signature.form == "in-place" else pointwise
    elif (
        len(signature.tensors) == 1
        and signature.form == "functional"
        and not dim_arguments(signature)  # such dims need a rule
    ):
        rule = _OF_ONE_TENSOR.get(category)
    return VerifiedRule(rule) if rule is not None else None


def batch_first(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Batch an operator on one tensor whose leading dims are a batch."""
    return op(batch_to_front(args[0], bdims[0]), *args[1:], **kwargs), 0


_MOST = 1000  # the maximum number of confirmed calls in the cache
_OF_ONE_TENSOR = {Category.IDENTITY: same_shape, Category.BATCHED: batch_first}


class VerifiedRule:
    """A category's rule, used only for calls that an operator's fake kernel agrees with."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        functools.update_wrapper(self, rule)  # the name and the source location
        self._confirmed: set[Any] = set()

    def __call__(
        self, op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
    ) -> Any:
        key = (level.batch_size, *map(str, bdims), *map(_argument_key, (*args, *kwargs.values())))
        if key not in self._confirmed:
            if not self._agrees(op, level, bdims, args, kwargs):
                return NotImplemented
            if len(self._confirmed) >= _MOST:
                self._confirmed.clear()
            self._confirmed.add(key)
        return self.rule(op, level, bdims, args, kwargs)

    def _agrees(
        self, op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
    ) -> bool:
        """True if the rule's result has the shape and dtype that one example's result has."""
        try:
            samples = [_fake(arg, None) for arg in args]
            out, out_dims = self.rule(op, level, bdims, samples, kwargs)
            example = [_fake(arg, bdim) for arg, bdim in zip(args, bdims, strict=True)]
            expected_result = op(*example, **kwargs)
        except Exception:
            # The operator has no fake kernel, or the fake kernel rejects one of the two calls.
            return False
        results, expected = _as_list(out), _as_list(expected_result)
        positions = out_dims if isinstance(out_dims, (tuple, list)) else [out_dims] * len(results)
        return len(results) == len(expected) == len(positions) and all(
            isinstance(result, Tensor)
            and result.dtype is one.dtype
            and bdim is not None
            and bdim < result.dim()
            and result.shape[bdim] == level.batch_size
            and result.shape[:bdim] + result.shape[bdim + 1 :] == one.shape
            for result, one, bdim in zip(results, expected, positions, strict=True)
        )


def _as_list(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def _argument_key(arg: Any) -> Any:
    return (arg.shape, arg.dtype) if isinstance(arg, Tensor) else repr(arg)


def _fake(arg: Any, dim: int | None) -> Any:
    """Return a meta tensor without the batch dim for a tensor; other values are unchanged."""
    if not isinstance(arg, Tensor):
        return arg
    shape = list(arg.shape)
    if dim is not None:
        del shape[dim]
    return torch.empty(shape, dtype=arg.dtype, device="meta")
