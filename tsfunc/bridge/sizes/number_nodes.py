"""Symbolic numbers as nodes of a graph: the arithmetic of a program on the sizes of its arguments.

Private names used here (torch 2.11 to 2.13): ``torch.utils._sympy`` has ``sympy_interp``, which
walks an expression of ShapeEnv, and ``PythonReferenceAnalysis``, which maps each function of such
an expression to Python's. These modules import sympy, which takes half a second, so this file
imports them when a number is first recorded. ``torch._C._EnableTorchFunction`` lets ``sym_not``
and similar functions dispatch on the nodes of a graph.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.tracers.questions import in_user_code
from tsfunc.types.sizes import DimExpr, solved_for


def number_node(graph: torch.fx.Graph, values: Mapping[Any, torch.fx.Node], expr: Any) -> Any:
    """Return the node that computes an expression.

    Args:
        graph: the graph that records the node.
        values: the node of each symbol in the expression.
        expr: a sympy expression of ShapeEnv.
    """
    from torch.utils._sympy.interp import sympy_interp

    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    known = {symbol: torch.fx.Proxy(node, tracer) for symbol, node in values.items()}
    with torch._C._EnableTorchFunction():  # also if an operator's rule asks for the node
        return sympy_interp(_recorded(), known, expr).node


@functools.cache
def _recorded() -> Any:
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    base: Any = PythonReferenceAnalysis

    class NumberRecorder(base):  # type: ignore[misc]
        """Python's operators and functions, recorded on the values of the graph."""

        int_truediv = staticmethod(operator.truediv)

        @staticmethod
        def floor_to_int(x: Any, dtype: Any) -> Any:
            return _called(math.floor, x)

        @staticmethod
        def ceil_to_int(x: Any, dtype: Any) -> Any:
            return _called(math.ceil, x)

        @staticmethod
        def trunc_to_int(x: Any, dtype: Any) -> Any:
            return _called(math.trunc, x)

        @staticmethod
        def round_to_int(x: Any, dtype: Any) -> Any:
            return _called(round, x)

        @staticmethod
        def round_decimal(x: Any, digits: int) -> Any:
            return _called(round, x, digits)

        @staticmethod
        def floor(x: Any) -> Any:
            return torch.sym_float(_called(math.floor, x))

        @staticmethod
        def ceil(x: Any) -> Any:
            return torch.sym_float(_called(math.ceil, x))

        @staticmethod
        def trunc(x: Any) -> Any:
            return torch.sym_float(_called(math.trunc, x))

    return NumberRecorder


def _called(function: Callable[..., Any], x: Any, *rest: Any) -> Any:
    """Record a function that needs a Python number; a node has no such number yet."""
    if isinstance(x, torch.fx.Proxy):
        return x.tracer.create_proxy("call_function", function, (x, *rest), {})
    return function(x, *rest)


def divided(node: torch.fx.Node, step: int) -> torch.fx.Node:
    """Return the node of a number divided by a step, rounded down."""
    if step == 1:
        return node
    return node.graph.call_function(operator.floordiv, (node, step))


def solved_node(
    graph: torch.fx.Graph,
    size: torch.fx.Node,
    expression: str,
    name: str,
    nodes: Mapping[str, torch.fx.Node],
) -> torch.fx.Node:
    """Return the node of a dim name, by solving an expression that equals a size for the name."""
    factors = solved_for(expression, name)
    assert factors is not None
    slope, rest = factors
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    known: Any = {each: torch.fx.Proxy(node, tracer) for each, node in nodes.items()}
    found: Any = torch.fx.Proxy(size, tracer)
    if rest != "0":
        found = found - DimExpr(rest).evaluate(known)
    if slope != "1":
        found = found // DimExpr(slope).evaluate(known)
    node: torch.fx.Node = found.node
    return node


def size_node(graph: torch.fx.Graph, tensor: torch.fx.Node, dim: int) -> torch.fx.Node:
    """Return the node for a size of a tensor."""
    return graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim))


def shape_node(graph: torch.fx.Graph, sizes: Sequence[Any]) -> torch.fx.Node:
    """Return the node for a ``torch.Size`` of numbers and nodes."""
    return graph.call_function(torch.Size, (list(sizes),))


def _divmod(number: Any, by: Any) -> tuple[Any, Any]:
    return number // by, number % by


def _rdivmod(by: Any, number: Any) -> tuple[Any, Any]:
    return number // by, number % by


def _texts_of_numbers(kind: Any) -> Callable[[Any], str]:
    """Return ``__repr__`` of a kind of symbolic numbers, by which Python also formats them.

    The user has not asked for the symbols of NOTE [automatic dynamic sizes], so the user's code
    reads the text of the number, which is a question for its value.
    """
    own = kind.__repr__

    @functools.wraps(own)
    def text(number: Any) -> str:
        symbols = getattr(getattr(number.node, "shape_env", None), "symbols", None)
        if symbols is None or not in_user_code() or not symbols.reads_as_number(number):
            return str(own(number))
        return repr(int(number) if isinstance(number, torch.SymInt) else float(number))

    return text


for _kind in (torch.SymInt, torch.SymFloat):
    _kind.__repr__ = _texts_of_numbers(_kind)  # type: ignore[method-assign]


# torch's symbolic ints have // and %, but not divmod, which Python does not derive from these.
for _name, _function in (("__divmod__", _divmod), ("__rdivmod__", _rdivmod)):
    if not hasattr(torch.SymInt, _name):
        setattr(torch.SymInt, _name, _function)
