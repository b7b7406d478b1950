"""The pass that composes views of views.

NOTE [composed views]
A batching rule folds the batch dim into another dim or puts it beside one, calls an operator, and
undoes this. The program of a transformed function therefore has chains of views, each of which
costs a call. Two kinds of chains become one call, or none if they undo each other:

- permutations of dims (``t``, ``transpose``, ``permute``): a ``permute``,
- operators that keep the order of the elements (``view``, ``reshape``, ``flatten``, ``unflatten``,
  ``unsqueeze``, ``squeeze``) with fixed sizes: a ``reshape``. The result is a view wherever the
  chain is one. ``reshape`` and ``flatten`` copy what they can't view, and the composition may then
  be a view, so a chain with one of them stays if the caller gets its result.

Two operators before a view are a part of it: a reduction that keeps its dims (``keepdim=True``)
does not keep them if the view drops them. A contiguous copy before views that its argument can't
have becomes the copy that the first view makes as a ``reshape``.

A value that is written to keeps its chain. If a chain undoes itself, the caller gets the value that
it began with only if that is a new tensor of the program, and not a result already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.fx

from tsfunc.bridge.control.node_writes import possibly_shared
from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.operators import TorchOperator, operator_of
from tsfunc.bridge.writing.storages import memory_of
from tsfunc.ops.dims import wrap_dim
from tsfunc.program.passes.effects import Aliases

_PERMUTATIONS: Final = frozenset({"aten::t", "aten::transpose.int", "aten::permute"})
_VIEWS_IN_ORDER: Final = frozenset({
    "aten::view", "aten::unsqueeze", "aten::squeeze", "aten::squeeze.dim", "aten::squeeze.dims",
    "aten::unflatten.int",
})  # fmt: skip
_MAY_COPY: Final = frozenset({"aten::reshape", "aten::flatten.using_ints"})
_IN_ORDER: Final = _VIEWS_IN_ORDER | _MAY_COPY


def compose_views(graph: torch.fx.Graph, aliases: Aliases) -> None:
    """Replace a view of a view by one view, or by the value itself (NOTE [composed views])."""
    if torch_state.in_dispatch_modes():
        return  # a mode would see the reshapes that this pass tries
    results = {node for output in graph.find_nodes(op="output") for node in output.all_input_nodes}
    seen: set[torch.fx.Node] = set()
    for node in graph.nodes:
        seen.add(node)
        if _is_composable(node, aliases) and _operator_name(node) in _IN_ORDER:
            if _drop_kept_dims(node, node.args[0], aliases, results):
                continue
            _reshape_instead_of_copy(node, node.args[0], aliases, seen)
        if _is_composable(node, aliases):
            chain = [node]
            while _is_composable(chain[-1].args[0], aliases, node):
                chain.append(chain[-1].args[0])
            source: Any = chain[-1].args[0]
            if len(chain) > 1 and isinstance(source, torch.fx.Node):
                _compose(chain, source, aliases, results)


def _operator_name(node: Any) -> str:
    op = node.meta.get("op") if isinstance(node, torch.fx.Node) else None
    return op.name if isinstance(op, TorchOperator) else ""


def _is_composable(node: Any, aliases: Aliases, after: torch.fx.Node | None = None) -> bool:
    """True if a node may be in a chain, before a node of the same kind if one is given."""
    name = _operator_name(node)
    kind = _PERMUTATIONS if name in _PERMUTATIONS else _IN_ORDER if name in _IN_ORDER else ()
    if name not in kind or not node.args or aliases.is_written(node):
        return False
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    if after is None:
        return True
    quiet = node.meta.get("no_grad", False) == after.meta.get("no_grad", False)
    return quiet and _operator_name(after) in kind


def _compose(
    chain: Sequence[torch.fx.Node],
    source: torch.fx.Node,
    aliases: Aliases,
    results: set[torch.fx.Node],
) -> None:
    """Replace the first node of a chain, which ends with a view of ``source``."""
    node, escapes = chain[0], aliases.escapes(chain[0])
    value, before = node.meta["val"], source.meta.get("val")
    if not isinstance(before, torch.Tensor) or before.layout is not torch.strided:
        return
    target: Any
    if _operator_name(node) in _PERMUTATIONS:
        order = list(range(before.dim()))
        for view in reversed(chain):
            order = [order[i] for i in _permutation(view)]
        target, argument = torch.ops.aten.permute.default, order
        undone = order == list(range(before.dim()))
    else:
        if escapes and any(_operator_name(view) in _MAY_COPY for view in chain):
            return
        if (
            not _has_fixed_layout(value)
            or not _has_fixed_layout(before)
            or not _same_strides(before, value)
        ):
            return
        target, argument = torch.ops.aten.reshape.default, list(value.shape)
        undone = value.shape == before.shape and value.stride() == before.stride()
    if not undone:
        node.target, node.meta["op"] = target, operator_of(target)
        node.args, node.kwargs = (source, argument), {}
    elif not escapes or (_is_new(source) and source not in results):
        aliases.replace(node, source)
        if escapes:
            results.add(source)


_KEEPING_DIMS: Final = frozenset({
    "aten::sum.dim_IntList", "aten::mean.dim", "aten::amax", "aten::amin",
})  # fmt: skip


def _drop_kept_dims(
    node: torch.fx.Node, source: Any, aliases: Aliases, results: set[torch.fx.Node]
) -> bool:
    """Replace a view of a reduction by a reduction that does not keep its dims; True if done."""
    if (
        _operator_name(source) not in _KEEPING_DIMS
        or len(source.users) > 1
        or "call" in source.meta
    ):
        return False
    arguments = source.meta["op"].signature.bind(source.args, source.kwargs)
    values = {argument.name: value for argument, value in arguments}
    dims, reduced_value, value = values.get("dim"), source.meta["val"], node.meta["val"]
    if (
        values.get("keepdim") is not True
        or not dims
        or not _has_fixed_layout(reduced_value)
        or not _has_fixed_layout(value)
    ):
        return False
    reduced = {wrap_dim(dim, reduced_value.dim()) for dim in dims}
    shape = [size for i, size in enumerate(reduced_value.shape) if i not in reduced]
    if list(value.shape) != shape or not (value.is_contiguous() and reduced_value.is_contiguous()):
        return False
    source.args = tuple(False if arg is True else arg for arg in source.args)
    source.kwargs = {k: False if k == "keepdim" else v for k, v in source.kwargs.items()}
    source.meta["val"] = value
    if aliases.escapes(node):
        results.add(source)
    aliases.replace(node, source)
    return True


# Operators that copy, with their default memory formats.
_COPIES: Final = {
    "aten::clone": torch.preserve_format, "aten::contiguous": torch.contiguous_format,
}  # fmt: skip


def _reshape_instead_of_copy(
    node: torch.fx.Node, source: Any, aliases: Aliases, seen: set[torch.fx.Node]
) -> None:
    """Let the first view of a contiguous copy make the copy, and the others be views of it."""
    default = _COPIES.get(_operator_name(source))
    if default is None or "call" in source.meta or len(source.args) != 1:
        return
    if source.kwargs.get("memory_format", default) is not torch.contiguous_format:
        return
    views, value = list(source.users), node.meta["val"]
    quiet = source.meta.get("no_grad", False)
    for view in views:
        if (
            not _is_composable(view, aliases)
            or _operator_name(view) not in _IN_ORDER
            or view.meta.get("no_grad", False) != quiet
            or (view in seen and view is not node)
            or not _has_fixed_layout(view.meta["val"])
            or not _same_strides(value, view.meta["val"])
        ):
            return
    original: Any = source.args[0]
    before = original.meta["val"]
    if not _has_fixed_layout(before) or not _copies(before, value):
        return
    reshape = torch.ops.aten.reshape.default
    for view in views:
        view.target, view.meta["op"], view.kwargs = reshape, operator_of(reshape), {}
        view.args = (original if view is node else node, list(view.meta["val"].shape))


def _copies(before: torch.Tensor, value: torch.Tensor) -> bool:
    """True if a reshape copies, and its result has the strides of the value."""
    with torch_state.outside_all_transforms(), torch.no_grad():
        meta = torch.empty_strided(before.shape, before.stride(), device="meta")
        copied = meta.reshape(value.shape)
        shared = memory_of(copied) == memory_of(meta)
    return not shared and copied.stride() == value.stride()


def _is_new(node: torch.fx.Node) -> bool:
    """True if a value has memory of its own."""
    return node.op == "call_function" and "op" in node.meta and not any(possibly_shared(node))


def _permutation(node: torch.fx.Node) -> list[int]:
    """Return the dim of the argument that is at each position of the result."""
    rank = node.meta["val"].dim()
    arguments: Any = (*node.args[1:], *node.kwargs.values())
    if _operator_name(node) == "aten::permute":
        return [dim % rank for dim in arguments[0]]
    order = list(range(rank))
    if rank:
        one, other = (dim % rank for dim in arguments) if arguments else (0, rank - 1)
        order[one], order[other] = order[other], order[one]
    return order


def _has_fixed_layout(value: torch.Tensor) -> bool:
    """True if a value has elements, and its sizes and strides are numbers."""
    numbers = (*value.shape, *value.stride())
    return all(type(n) is int for n in numbers) and math.prod(value.shape) > 0


def _same_strides(before: torch.Tensor, value: torch.Tensor) -> bool:
    """True if a reshape has the strides of the chain's result."""
    with torch_state.outside_all_transforms(), torch.no_grad():
        meta = torch.empty_strided(before.shape, before.stride(), device="meta")
        return meta.reshape(value.shape).stride() == value.stride()
