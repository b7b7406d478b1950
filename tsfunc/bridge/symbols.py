"""Symbolic sizes: one symbol for each named dim, and what a trace asked of it.

torch's ShapeEnv does the algebra. Private names used here (torch 2.11 to 2.13):
``torch._guards.Source`` says where a symbol comes from; ``torch.fx.experimental.symbolic_shapes``
and ``torch.utils._sympy`` have ShapeEnv and its expressions. They import sympy, which takes half a
second, so this file imports them where a named dim is first traced.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tsfunc.types.dims import DimExpr
from tsfunc.types.polynomials import solved_for

# Sizes that stand for a named dim while tracing; large primes, so that none is the size of
# something else by chance.
_HINTS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069, 1087, 1091)


@dataclass(frozen=True)
class Need:
    """A fact about named dims that a trace relied on, and the line that made it."""

    fact: str
    line: str


class Symbols:
    """The named dims of one trace.

    Args:
        bounds: for each name the least and the greatest size (None: no limit), and what every
            size is a multiple of.
        scalars: numbers among the arguments that stay symbolic, by their names. What the trace
            asks of these is no need of it, but a condition of its program.
        examples: for some of the names a size that they may have; decisions that are no matter
            of what is computed, but of how, are made for these.
    """

    def __init__(
        self,
        bounds: Mapping[str, tuple[int | None, int | None, int]],
        scalars: Mapping[str, int | float] | None = None,
        examples: Mapping[str, int] | None = None,
    ) -> None:
        self.sizes: dict[str, Any] = {}
        self.scalars: dict[str, Any] = {}
        self._names: dict[Any, str] = {}
        self._steps: dict[Any, int] = {}
        self._env: Any = None
        if not bounds and not scalars:
            self.fake = FakeTensorMode()
            return
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._env = ShapeEnv(duck_shape=False)
        self.fake = FakeTensorMode(shape_env=self._env)
        hints = itertools.chain(_HINTS, itertools.count(_HINTS[-1] + 2, 2))
        for hint, (name, (least, most, step)) in zip(hints, bounds.items(), strict=False):
            low = -(-max(2, least or 2) // step)
            high = None if most is None else most // step
            hint = (examples or {}).get(name, hint * step) // step
            self.sizes[name] = step * self._size(name, hint, low, high, step)
        for name, value in (scalars or {}).items():
            self.scalars[name] = self._scalar(name, value)

    def _scalar(self, name: str, value: int | float) -> Any:
        """A symbol for a number of which nothing is promised."""
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = _source(name)
        symbol = self._env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        self._names[symbol], self._steps[symbol] = name, 1
        make = self._env.create_symintnode
        if isinstance(value, float):
            make = self._env.create_symfloatnode
        return make(symbol, hint=value, source=source)

    def _size(self, name: str, hint: int, low: int, most: int | None, step: int) -> Any:
        """A symbol for the size of a named dim, divided by what it is a multiple of."""
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        hint = max(low, min(hint, most)) if most is not None else max(low, hint)
        source = _source(name if step == 1 else f"{name} // {step}")
        symbol = self._env.create_symbol(
            hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
        )
        self._env.constrain_symbol_range(
            symbol, compiler_min=low, compiler_max=most if most is not None else (1 << 62)
        )
        self._names[symbol] = name
        self._steps[symbol] = step
        return self._env.create_symintnode(symbol, hint=hint, source=source)

    def needs(self) -> list[Need]:
        """What the trace found out by asking, and the descriptors do not say."""
        if self._env is None:
            return []
        return [
            Need(self.spell(guard.expr), _line(guard.sloc.framework_loc))
            for guard in self._env.guards
            if not self._is_of_scalars(guard.expr)
        ]

    def conditions(self, variables: Mapping[str, str]) -> list[str]:
        """What the trace found out about numbers among the arguments, as Python.

        Args:
            variables: what the names of dims and numbers are called there.
        """
        if not self.scalars:
            return []
        from torch.utils._sympy.printers import PythonPrinter

        known = {
            symbol: type(symbol)(_divided_text(variables[name], self._steps[symbol]))
            for symbol, name in self._names.items()
        }
        found = [
            PythonPrinter().doprint(guard.expr.xreplace(known))
            for guard in self._env.guards
            if self._is_of_scalars(guard.expr)
        ]
        return list(dict.fromkeys(found))

    def _is_of_scalars(self, expr: Any) -> bool:
        return any(self._names.get(symbol) in self.scalars for symbol in expr.free_symbols)

    def condition(self) -> Callable[[Mapping[str, int]], bool] | None:
        """Whether what was found out by asking holds for other sizes; None if there is nothing."""
        from torch.utils._sympy.printers import PythonPrinter

        if self._env is None or not self._env.guards:
            return None
        values = {
            symbol: type(symbol)(f"(sizes[{name!r}] // {self._steps[symbol]})")
            for symbol, name in self._names.items()
        }
        printer = PythonPrinter()
        facts = [printer.doprint(guard.expr.xreplace(values)) for guard in self._env.guards]
        text = " and ".join(f"({fact})" for fact in facts)
        holds: Callable[[Mapping[str, int]], bool] = eval(f"lambda sizes: {text}", {"math": math})
        return holds

    def spell(self, expr: Any) -> str:
        """An expression in the user's names."""
        names = {
            symbol: type(symbol)(name) / self._steps[symbol] for symbol, name in self._names.items()
        }
        return str(expr.xreplace(names))

    def spell_size(self, size: Any) -> str:
        """A size in the user's names."""
        return str(size) if isinstance(size, int) else self.spell(size.node.expr)

    def as_nodes(self, graph: torch.fx.Graph, inputs: Mapping[str, torch.fx.Node]) -> Any:
        """A function that records a symbolic number as a node, from those of its names."""
        cache: dict[Any, Any] = {}

        def record(value: Any) -> Any:
            expr = value.node.expr
            if expr.is_number:
                return int(expr) if isinstance(value, torch.SymInt) else float(expr)
            if expr not in cache:
                cache[expr] = self._node(expr, graph, inputs)
                cache[expr].meta["number"] = value
            return cache[expr]

        return record

    def _node(self, expr: Any, graph: torch.fx.Graph, inputs: Mapping[str, torch.fx.Node]) -> Any:
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        class Recorded(PythonReferenceAnalysis):
            """Python's operators on the graph's values."""

            int_truediv = staticmethod(operator.truediv)

        tracer = torch.fx.proxy.GraphAppendingTracer(graph)
        values = {
            symbol: _divided(torch.fx.Proxy(inputs[name], tracer), self._steps[symbol])
            for symbol, name in self._names.items()
        }
        node = sympy_interp(Recorded, values, expr).node
        node.meta["expr"] = self.spell(expr)
        node.meta["value"] = self._evaluator(expr)
        return node

    def _evaluator(self, expr: Any) -> Any:
        """A function from the sizes of the named dims to the number that an expression is."""
        names, steps = self._names, self._steps

        def value(sizes: Mapping[str, int]) -> Any:
            known = {symbol: sizes[name] // steps[symbol] for symbol, name in names.items()}
            found = expr.subs(known)
            return int(found) if found.is_integer else float(found)

        return value


def _line(frame: Any) -> str:
    """``file:line`` of a frame summary, where ShapeEnv kept one."""
    return f"{frame.filename}:{frame.lineno}" if hasattr(frame, "filename") else str(frame)


def size_text(size: Any) -> str:
    """A size as text: a number, or an expression in the user's names."""
    if isinstance(size, int):
        return str(size)
    expr, env = size.node.expr, size.node.shape_env
    names = {symbol: type(symbol)(name) for name, symbol in env.source_to_var.items()}
    return str(expr.xreplace(names))


def _source(text: str) -> Any:
    """Where a symbol comes from, which ShapeEnv wants to be told."""
    from torch._guards import Source

    class NamedDim(Source):
        @property
        def name(self) -> str:
            return text

        @property
        def _name_template(self) -> str:
            return text

        def __hash__(self) -> int:
            return hash(text)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, NamedDim)

    return NamedDim()


def _divided_text(variable: str, step: int) -> str:
    return variable if step == 1 else f"({variable} // {step})"


def _divided(value: Any, step: int) -> Any:
    return value if step == 1 else value // step


def solved_node(
    graph: torch.fx.Graph,
    size: torch.fx.Node,
    expression: str,
    name: str,
    nodes: Mapping[str, torch.fx.Node],
) -> torch.fx.Node:
    """The node for a name that an expression is solved for, which is a size."""
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
    """The node for a size of a tensor."""
    return graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim))


def same_size(left: Any, right: Any) -> bool:
    """Whether two sizes are known to be equal; that they are found out adds no guard."""
    if isinstance(left, int) or isinstance(right, int):
        return isinstance(left, int) and isinstance(right, int) and left == right
    return bool(left.node.expr == right.node.expr)
