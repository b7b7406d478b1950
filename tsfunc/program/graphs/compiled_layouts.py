"""The strides of a program's values under a compiler.

A program has views that fit the strides of its values. Inductor decomposes some operators (``cat``
of one tensor, ``stack``, ``interpolate``) into others whose results have other strides: a ``view``
of such a result fails, and ``as_strided`` takes other elements. A value that such a view depends
on, or that the program returns, is therefore put into the program's order of dims. Only values that
the compiler has in another order are copied.
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
import torch.fx
from torch import Tensor

from tsfunc.bridge.sizes.strides import order_without_gaps
from tsfunc.bridge.tracers.operators import TorchOperator, operator_of
from tsfunc.program.passes.effects import declares_sharing, possibly_shared

_aten = torch.ops.aten
_DEPENDS_ON_STRIDES: Final = frozenset({
    _aten.view.default, _aten.view.dtype, _aten._unsafe_view.default, _aten.view_as_complex.default,
    _aten.as_strided.default, _aten.as_strided_copy.default,
})  # fmt: skip


def keep_layouts(module: torch.fx.GraphModule) -> None:
    """Give values the program's order of dims in memory where something depends on it.

    Control flow gives the results of its bodies one layout, and views in a body copy:
    NOTE [layouts of torch's loops] in ``torch_operators.py``.
    """
    used: set[torch.fx.Node] = set()  # values on whose strides something depends
    for node in reversed(list(module.graph.nodes)):
        if node.op == "output":
            used.update(node.all_input_nodes)
        elif node in used or node.target in _DEPENDS_ON_STRIDES:
            used.update(possibly_shared(node))
            if node in used and _is_made(node):
                _keep_layout(node)
    module.recompile()


def _is_made(node: torch.fx.Node) -> bool:
    """True if an operator may make the value, alone or among others, and its memory."""
    if node.target is operator.getitem:
        (node,) = node.all_input_nodes
    op = node.meta.get("op")
    return node.op == "call_function" and not (
        isinstance(op, TorchOperator) and declares_sharing(op)
    )


def _keep_layout(node: torch.fx.Node) -> None:
    """Let all users of a value get it in the order of dims that it has in the program."""
    value = node.meta.get("val")
    order = order_without_gaps(value) if isinstance(value, Tensor) else None
    if order is None:
        return
    calls: list[tuple[Any, list[Any]]] = [(_aten.contiguous.default, [])]
    if order != sorted(order):
        back = sorted(range(len(order)), key=order.__getitem__)
        permute = _aten.permute.default
        calls = [(permute, [order]), *calls, (permute, [back])]
    users, result = list(node.users), node
    with node.graph.inserting_before(node.next):
        for target, args in calls:
            result = node.graph.call_function(target, (result, *args))
            result.meta = {**node.meta, "op": operator_of(target)}
    for user in users:
        user.replace_input_with(node, result)
