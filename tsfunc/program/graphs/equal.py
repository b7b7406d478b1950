"""Whether a program with symbolic sizes is, for given sizes, the program traced for just these.

NOTE [sizes 0 and 1]
Operators treat the sizes 0 and 1 apart: they broadcast, squeeze, and decide contiguity. A trace
with symbolic sizes therefore takes them for 2 or more. A call with a named dim of size 0 or 1 is
traced once for itself; where the same operators come out on the same numbers, the symbolic
program serves that size too, and else the call has a program of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from tsfunc.program.graphs.program import Program
from tsfunc.program.reading.updates import same_updates


def same_program(symbolic: Program, fixed: Program, sizes: Mapping[str, int]) -> bool:
    """Whether the symbolic program does for these sizes what the fixed one does."""
    if symbolic.out_tree != fixed.out_tree or symbolic.inputs != fixed.inputs:
        return False
    if not same_updates(symbolic.updates, fixed.updates):
        return False
    left, right = _steps(symbolic.graph), _steps(fixed.graph)
    if len(left) != len(right):
        return False
    matched: dict[torch.fx.Node, torch.fx.Node] = {}
    for a, b in zip(left, right, strict=True):
        quiet = a.meta.get("no_grad") == b.meta.get("no_grad")
        if a.op != b.op or not quiet or (a.op == "call_function" and a.target is not b.target):
            return False
        if a.op == "get_attr" and not _same_tensor(symbolic, a, fixed, b):
            return False
        if not _same((a.args, a.kwargs), (b.args, b.kwargs), matched, sizes):
            return False
        matched[a] = b
    return True


def _same_tensor(symbolic: Program, a: torch.fx.Node, fixed: Program, b: torch.fx.Node) -> bool:
    """Whether two nodes stand for one tensor from outside, or for equal constants."""
    one, other = symbolic.tensor(a), fixed.tensor(b)
    if str(a.target) in symbolic.constants and str(b.target) in fixed.constants:
        return one.dtype == other.dtype and torch.equal(one, other)
    return one is other


def _steps(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes whose values are tensors; numbers are compared where they are used."""
    return [node for node in graph.nodes if "expr" not in node.meta and not _is_number(node)]


def _is_number(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and "op" not in node.meta and "val" not in node.meta


def _same(
    a: Any, b: Any, matched: Mapping[torch.fx.Node, torch.fx.Node], sizes: Mapping[str, int]
) -> bool:
    if isinstance(a, torch.fx.Node):
        if "value" in a.meta:
            return type(b) in (int, float) and bool(a.meta["value"](sizes) == b)
        return matched.get(a) is b
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(
            _same(x, y, matched, sizes) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k], matched, sizes) for k in a)
    return type(a) is type(b) and (a is b or bool(a == b))
