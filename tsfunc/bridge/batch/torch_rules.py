"""Batching rules that were written for torch.vmap, used unchanged.

``torch.library.register_vmap`` gives a custom operator a rule
``rule(info, in_dims, *args, **kwargs) -> (output, out_dims)``. torch keeps the rule of an operator
made by ``custom_op``, and it is called here. For other operators (``torch.library.define``, or a
kernel in C++) the rule is inside a kernel of torch.func's key, which torch.vmap over the values
calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._C import _dispatch_has_kernel_for_dispatch_key

from tsfunc import pytrees
from tsfunc.bridge.grad.mapped_function import results_of_rule
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, unwrap, wrap
from tsfunc.bridge.tracers.functorch import TORCH_FUNC
from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.bridge.tracers.schemas import vmap_rule
from tsfunc.dispatch.recorder import name_of_rule
from tsfunc.dispatch.recording import note
from tsfunc.ops.catalogue.reader import reader
from tsfunc.ops.category_rules import rule_of_category
from tsfunc.ops.registry import Args, Category, Kwargs, Rule
from tsfunc.user_code import code_location_text


def run_torch_rule(op: TorchOperator, level: BatchLevel, args: Args, kwargs: Kwargs) -> Any:
    """Run a custom operator by a rule that was written for torch, or by its ``pointwise`` tag.

    Return NotImplemented if the operator has neither, and for torch's own operators.
    """
    if op.overload.namespace == "aten":
        return NotImplemented
    rule = vmap_rule(op.name)
    if rule is not None:
        note("rule", name_of_rule(rule), code_location_text(rule))
        bdims, values = _batched(args, level)
        info = SimpleNamespace(batch_size=level.batch_size, randomness=level.randomness)
        returned = rule(info, tuple(bdims), *values, **kwargs)
        label = f"the rule that register_vmap was given for {op.name}"
        return results_of_rule(returned, label, values, args, level)
    if has_torch_rule(op):
        note("rule", "torch.vmap's")
        return _by_torch_vmap(op, level, args, kwargs)
    return _by_tag(op, level, args, kwargs)


def has_torch_rule(op: TorchOperator) -> bool:
    """True if a rule for torch.vmap is registered."""
    return bool(_dispatch_has_kernel_for_dispatch_key(op.name, "FuncTorchBatched"))


def _batched(args: Sequence[Any], level: BatchLevel) -> tuple[list[Any], list[Any]]:
    """Return batch dims and values of the arguments; a list argument has a list of batch dims."""
    bdims, values = [], []
    for arg in args:
        value, bdim = unwrap(arg, level)
        values.append(value)
        bdims.append([None] * len(arg) if bdim is None and isinstance(arg, (list, tuple)) else bdim)
    return bdims, values


def _by_torch_vmap(op: TorchOperator, level: BatchLevel, args: Args, kwargs: Kwargs) -> Any:
    bdims, values = _batched(args, level)
    mapped = TORCH_FUNC["vmap"](
        lambda *inner: op.overload(*inner, **kwargs), tuple(bdims), randomness=level.randomness
    )
    outs = mapped(*values)
    return pytrees.tree_map(lambda x: wrap(x, 0, level) if isinstance(x, torch.Tensor) else x, outs)


_by_tags: dict[str, Rule | None] = {}


def _by_tag(op: TorchOperator, level: BatchLevel, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator by the pointwise rule if its author tagged it as pointwise."""
    if torch.Tag.pointwise not in op.overload.tags:
        return NotImplemented
    if op.name not in _by_tags:
        signature = reader().signature(op.name)
        assert signature is not None
        _by_tags[op.name] = rule_of_category(Category.TENSOR_ITERATOR, signature)
    rule = _by_tags[op.name]
    if rule is None:
        return NotImplemented
    bdims, values = _batched(args, level)
    out = rule(op.overload, level, bdims, values, kwargs)
    if out is NotImplemented:
        return out
    note("category", name_of_rule(rule))
    return wrap(out[0], out[1], level)
