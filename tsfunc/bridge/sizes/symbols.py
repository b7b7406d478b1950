"""Symbolic sizes: one symbol for each named dim and each size that depends on data.

torch's ShapeEnv does the algebra (``shape_environment``). The modules of ShapeEnv import sympy,
which takes half a second, so this file imports them when a symbol is first made.

NOTE [hints]
A named dim is traced with the size of the call as its hint, so that the function takes the same
branches as in the call. The conditions on the symbol that were tested (:meth:`Symbols.constraints`)
determine whether another size would take another branch. Operators treat sizes 0 and 1 specially,
so another hint replaces these sizes: NOTE [sizes 0 and 1] in ``program/graphs/comparison``.

NOTE [sizes of data]
``nonzero``, ``x[mask]`` and ``x.item()`` return numbers that a trace does not know: each is a
symbol without a hint, made together with the node that computes it (:meth:`Symbols.register`).
Conditions on the symbol can't be evaluated; assertions (``torch._check``, and operators' checks of
their arguments) become calls of :func:`check_size` in the program.

A body of control flow (NOTE [bodies] in ``bodies.py``) has such symbols of its own, and its
assertions are checked in the body. The asserted constraints therefore hold only there, and the code
around the body can't rely on them (``scoped_constraints``).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.fx

from tsfunc._lazy import call_uninterrupted
from tsfunc.bridge.sizes.expressions import code_text, exact, has_name, number_node, python_text
from tsfunc.bridge.sizes.fake_mode import LazyFakeMode
from tsfunc.bridge.sizes.shape_environment import (
    environment_class,
    scoped_constraints,
    source_called,
)
from tsfunc.bridge.sizes.symbolic_numbers import divided_node
from tsfunc.bridge.tracers.user_queries import PYTHON_TYPES
from tsfunc.errors import FailedCheckError
from tsfunc.types import Dim
from tsfunc.user_code import Location

# Hints for a named dim of size 0 or 1: primes that are rarely the size of another dim, and small
# enough for a loop of the function over the dim.
_HINTS = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167)


@dataclass(frozen=True)
class Constraint:
    """A constraint on named dims that a trace relies on, and the line that it comes from.

    Attributes:
        text: the constraint as Python code.
        expr: the constraint as an expression in symbols with the names of the dims.
        location: the user's line.
        by_user: True if the user's code tests the constraint or gets a number of results that
            depends on it; False if torch or this package tests it for another reason.
        reason: why this package relies on it, and the remedy; empty for other constraints.
    """

    text: str
    expr: Any
    location: Location
    by_user: bool
    reason: str = ""


class Condition(NamedTuple):
    """A constraint on numbers among the arguments, which a guard of the program checks.

    Attributes:
        code: the Python code of the guard.
        text: the text for people, in the user's names.
        dims: the named dims in the condition.
        constraint: the condition in the names of dims and numbers, as files store it
            (``types/size_constraints.py``).
        fixed: the condition in the names of dims only, with the call's value for each number among
            the arguments.
        number: the name of the number whose value the condition fixes, if it does.
        of_closure: True if it is on a number that the function reads from outside.
    """

    code: str
    text: str
    dims: tuple[str, ...] = ()
    constraint: str = ""
    fixed: str = ""
    number: str | None = None
    of_closure: bool = False


def check_size(holds: bool, text: str) -> None:
    """Assert a constraint on sizes that depend on data; programs call this function.

    Args:
        holds: True if the constraint holds.
        text: the text of the error.

    Raises:
        FailedCheckError: the constraint does not hold.
    """
    if isinstance(holds, torch.SymBool):  # in a trace of the program
        torch._check(holds, lambda: text)
    elif not holds:
        raise FailedCheckError(text)


class Symbols:
    """The symbols of one trace.

    Args:
        sizes: the size of each dim in the call, if there is one.
        numbers: numbers among the arguments that stay symbolic, by name. Questions about them
            become conditions of the program.
        read_as_numbers: the names of the numbers whose ``repr`` the user's code gets as that of a
            plain number.

    Attributes:
        fake: the mode that computes results.
        sizes: the symbolic size of each named dim.
        numbers: the symbolic numbers among the arguments.
        graph: the graph that records numbers; None before and after the trace.
        computed_value: returns the value of a node that computes a number, if the trace can know
            it.
    """

    def __init__(
        self,
        dims: Mapping[str, Dim],
        sizes: Mapping[str, int] = MappingProxyType({}),
        numbers: Mapping[str, int | float] = MappingProxyType({}),
        read_as_numbers: Collection[str] = (),
    ) -> None:
        self.fake = LazyFakeMode()
        self.sizes: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {}
        self._values = dict(numbers)
        self._read_as_numbers = frozenset(read_as_numbers)
        self._read: dict[str, str] = {}
        self._names: dict[Any, str] = {}
        self._steps: dict[Any, int] = {}
        self._definitions: dict[Any, torch.fx.Node] = {}
        self._answers: dict[Any, Any] = {}  # symbols for bools, and the expressions of these bools
        self._env: Any = None
        self.graph: torch.fx.Graph | None = None
        self.computed_value: Callable[[torch.fx.Node], Any] = lambda node: None
        self._inputs: Mapping[str, torch.fx.Node] = {}
        self._nodes: dict[Any, Any] = {}
        self._bodies: list[tuple[torch.fx.Graph, Callable[[Any], Any]]] = []
        if dims or numbers:
            self._make_symbols()
        for i, (name, dim) in enumerate(dims.items()):
            hint = _hint(dim, sizes.get(name, 0), i)
            # Without a hint, only the size of the call is allowed.
            self.sizes[name] = self._size(name, dim, hint) if hint else dim.max
        for name, value in numbers.items():
            self.numbers[name] = self._number_symbol(name, value)

    def _make_symbols(self) -> None:
        self._env = environment_class()(self)
        self.fake.shape_env = self._env
        self.fake.static_shapes = False

    def _size(self, name: str, dim: Dim, hint: int) -> Any:
        """Return the size of a named dim: its ``multiple_of`` times a symbol."""
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        step = dim.multiple_of or 1
        hint //= step
        source = source_called(name if step == 1 else f"{name} // {step}")
        # A symbol that counts steps may be 1, unlike a size: torch must not specialize it.
        create = functools.partial(
            self._env.create_symbol, hint, source=source, dynamic_dim=DimDynamic.DYNAMIC,
            constraint_dim=None, do_not_specialize_zero_one=step > 1,
        )  # fmt: skip
        symbol = call_uninterrupted(create)  # the first one imports hundreds of modules
        most = dim.max if dim.max is not None else 1 << 62
        low = min(-(-max(2, dim.min or 2) // step), hint)
        self._env.constrain_symbol_range(symbol, compiler_min=low, compiler_max=most // step)
        self._names[symbol] = name
        self._steps[symbol] = step
        return step * self._env.create_symintnode(symbol, hint=hint, source=source)

    def add_number(self, name: str, value: int | float, variable: str) -> Any:
        """Return a symbolic number for a number that the function reads during the trace."""
        if self._env is None:
            self._make_symbols()
        self._values[name], self._read[name] = value, variable
        self.numbers[name] = self._number_symbol(name, value)
        return self.numbers[name]

    def add_input(self, name: str, node: torch.fx.Node) -> None:
        """Register the node of a number that the function reads during the trace."""
        self._inputs = {**self._inputs, name: node}

    def _number_symbol(self, name: str, value: int | float) -> Any:
        """Return a symbolic number without guarantees."""
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = source_called(name)
        symbol = self._env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        self._names[symbol], self._steps[symbol] = name, 1
        if isinstance(value, float):
            return self._env.create_symfloatnode(symbol, hint=value, source=source)
        return self._env.create_symintnode(symbol, hint=value, source=source)

    # --- sizes that depend on data

    @property
    def environment(self) -> Any:
        """torch's ShapeEnv with the symbols; None if there are none yet."""
        return self._env

    @property
    def innermost_graph(self) -> torch.fx.Graph | None:
        """Return the graph that is being recorded: the body's inside of a body."""
        return self._bodies[-1][0] if self._bodies else self.graph

    def allow_data(self) -> bool:
        """Let operators return symbols for data-dependent results; True if they did not before."""
        if self._env is not None:
            return False
        self._make_symbols()
        return True

    def fresh(self) -> list[Any]:
        """Return the symbols that were made since the last call."""
        if self._env is None:
            return []
        fresh = list(self._env.pending_fresh_unbacked_symbols)
        self._env.pending_fresh_unbacked_symbols.clear()
        return fresh

    def register(self, symbol: Any, node: torch.fx.Node, text: str, number: Any = None) -> None:
        """Register the node that computes a fresh symbol, and the symbol's text for people."""
        if symbol not in self._definitions:
            self._definitions[symbol] = node
            self._names[symbol] = text
            node.meta["expr"] = text
            if isinstance(number, torch.SymBool):
                self._answers[symbol] = number.node.expr
            if number is not None:
                node.meta["number"] = number

    def assert_in_program(self, expr: Any, location: Location) -> None:
        """Let the program check a constraint when it runs."""
        if self.graph is None or not all(s in self._names
                                          for s in expr.free_symbols):  # fmt: skip
            return  # the trace has ended, or the symbols are not part of the program
        text = f"{self.spell(expr)} does not hold, which the program relies on (at {location})."
        if self._bodies:
            graph, number = self._bodies[-1]
            holds = number(self._env.create_symboolnode(expr))
        else:
            graph, holds = self.graph, self._node(expr)
        node = graph.call_function(check_size, (holds, text))
        node.meta["location"] = location

    @contextmanager
    def in_body(self, graph: torch.fx.Graph, number: Callable[[Any], Any]) -> Iterator[None]:
        """Check assertions of a block in the graph of a body, and let them hold only in the block.

        Args:
            number: records a symbolic number in the graph.
        """
        self._bodies.append((graph, number))
        try:
            with scoped_constraints(self._env):
                yield
        finally:
            self._bodies.pop()

    def nodes_in(self, graph: torch.fx.Graph, expr: Any) -> dict[Any, torch.fx.Node]:
        """Return the data-dependent symbols of an expression that a graph computes, with nodes."""
        nodes = {symbol: self._definitions.get(symbol) for symbol in expr.free_symbols}
        return {s: node for s, node in nodes.items() if node is not None and node.graph is graph}

    def number_of(self, symbol: Any) -> Any:
        if symbol.is_integer:
            return self._env.create_symintnode(symbol, hint=None)
        return self._env.create_symfloatnode(symbol, hint=None)

    # --- conditions

    def answer(self, expr: Any) -> Any:
        """Return the value of a condition on numbers of data; None if it is not known."""
        if self.graph is None or self._bodies or not expr.free_symbols <= self._names.keys():
            return None
        return self.computed_value(self._node(expr))

    def constraints(self) -> list[Constraint]:
        """Return the constraints on named dims that the trace relies on."""
        if self._env is None:
            return []
        return [
            Constraint(
                self.spell(exact(guard.expr)),
                self._in_dims(exact(guard.expr)),
                location,
                by_user,
                self._env.reasons.get(location, ""),
            )
            for guard, (location, by_user, is_check) in zip(
                self._env.guards, self._env.guard_origins, strict=True
            )
            if not is_check and not self._is_of_numbers(guard.expr)
        ]

    def conditions(self, variables: Mapping[str, str]) -> list[Condition]:
        """Return the conditions on numbers among the arguments, and the checks.

        A failed check of sizes (NOTE [checks of arguments] in ``dispatch/user_checks``) raises in
        the function itself, so the check is a condition of the program, and the descriptors need
        not guarantee it.

        Args:
            variables: the variables of the guard, by the names of dims and numbers.
        """
        if self._env is None:
            return []
        variables = {**variables, **self._read}
        of_guard = self._symbols_as_code(variables.get)
        stored, named = self._as_dims_or_numbers(), self._symbols_as_code(str)
        conditions = [
            Condition(
                code_text(guard.expr.xreplace(of_guard)),
                self.spell(guard.expr),
                tuple(sorted(self._dims_in(guard.expr))),
                code_text(guard.expr.xreplace(named)),
                code_text(guard.expr.xreplace(stored)),
                self._fixed_by(guard.expr),
                any(self._names.get(symbol) in self._read for symbol in guard.expr.free_symbols),
            )
            for guard, (*_, check) in zip(self._env.guards, self._env.guard_origins, strict=True)
            if check or self._is_of_numbers(guard.expr)
        ]
        return list(dict.fromkeys(conditions))

    def _fixed_by(self, expr: Any) -> str | None:
        """Return the name of the number whose value an equality fixes, or None."""
        from sympy import Eq

        if not isinstance(expr, Eq) or not any(side.is_number for side in expr.args):
            return None
        return next((self._names[side] for side in expr.args if side.is_Symbol
                     and self._names.get(side) in self.numbers), None)  # fmt: skip

    def reads_as_number(self, number: Any) -> bool:
        """True if a text of a symbolic number must be the text of its value."""
        names = [self._names.get(symbol) for symbol in number.node.expr.free_symbols]
        return bool(names) and self._read_as_numbers.issuperset(names)

    def is_of_inputs(self, number: Any) -> bool:
        """True if a number depends on numbers among the inputs, and on nothing else."""
        symbols = number.node.expr.free_symbols
        return bool(symbols) and all(self._names.get(symbol) in self.numbers for symbol in symbols)

    def _symbols_as_code(self, code_of: Callable[[str], str | None]) -> dict[Any, Any]:
        """Return the symbols that have code as symbols whose names are the code.

        Args:
            code_of: returns the code of a named dim or number, or None.
        """
        codes = {symbol: code_of(name) for symbol, name in self._names.items()}
        return {
            symbol: type(symbol)(_divided_text(code, self._steps.get(symbol, 1)))
            for symbol, code in codes.items()
            if code is not None
        }

    def _as_dims_or_numbers(self) -> dict[Any, Any]:
        """Return each symbol as an expression in its named dim, or as the call's number."""
        from sympy import sympify

        of_call = {
            symbol: sympify(self._values[name])
            for symbol, name in self._names.items()
            if name in self._values
        }
        return {**self._symbols_as_code(str), **of_call}

    def condition(self) -> Callable[[Mapping[str, int]], bool] | None:
        """Return a function that checks all guards at other sizes; None without guards."""
        if self._env is None or not self._env.guards:
            return None
        values = self._symbols_as_code(lambda name: f"sizes[{name!r}]")
        constraints = [code_text(guard.expr.xreplace(values)) for guard in self._env.guards]
        text = " and ".join(f"({constraint})" for constraint in constraints)
        return eval(f"lambda sizes: {text}", {"math": math})

    def _dims_in(self, expr: Any) -> set[str]:
        return {self._names.get(symbol, "") for symbol in expr.free_symbols} & self.sizes.keys()

    def _is_of_numbers(self, expr: Any) -> bool:
        return any(self._names.get(symbol) in self.numbers for symbol in expr.free_symbols)

    def explain_error(self, error: Exception) -> tuple[str, bool]:
        """Return an error's message in the user's names, and True if it is about unknown data."""
        text = str(error)
        if self._env is None:
            return text, False
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        if isinstance(error, GuardOnDataDependentSymNode):
            return self._spell_data(error.cond), True
        if GuardOnDataDependentSymNode.__name__ in text and self._env.refused is not None:
            return self._spell_data(self._env.refused), True  # raised through TorchScript's C++
        return self.in_users_names(text), False

    def _spell_data(self, expr: Any) -> str:
        """Return an expression as Python, in which no number of data has the name of a node."""
        text = self.spell(expr)
        names = {definition.name for definition in self._definitions.values()} & {
            *re.findall(r"\w+", text)
        }
        for i, name in enumerate(sorted(names, key=text.index), 1):
            number = "<number of data>" if len(names) == 1 else f"<number {i} of data>"
            text = re.sub(rf"\b{name}\b", number, text)
        return text

    def in_users_names(self, text: str) -> str:
        """Return a text with the user's names in place of the trace's symbols."""
        names = {str(symbol): name for symbol, name in self._all_names().items()}
        # torch writes shapes as (1xs39xs94), too.
        return re.sub(r"(?:\b|(?<=\dx))[a-z]+\d+(?=\b|x)", lambda at: names.get(at[0], at[0]), text)

    def _all_names(self) -> dict[Any, str]:
        """Return a name for each symbol; those that no node has yet are numbers of data."""
        if self._env is None:
            return self._names
        unnamed = [symbol for symbol in self._env.var_to_range if symbol not in self._names]
        return {**{symbol: f"<number {i} of data>" for i, symbol in enumerate(unnamed, 1)},
                **self._names}  # fmt: skip

    def _in_dims(self, expr: Any) -> Any:
        """Return an expression in symbols with names for people."""
        from sympy import Symbol

        symbols, names = expr.free_symbols, self._names
        if not symbols <= names.keys():
            names = self._all_names()
        # These symbols have no assumptions, or `n > 0` would simplify to true.
        return expr.xreplace({
            symbol: Symbol(names[symbol]) / self._steps.get(symbol, 1)
            for symbol in symbols & names.keys()
        })  # fmt: skip

    def spell(self, expr: Any) -> str:
        """Return an expression as Python, in the user's names."""
        from sympy import Symbol

        answers = {s: Symbol(self._names[s]) for s in expr.free_symbols & self._answers.keys()}
        return python_text(self._in_dims(self._with_answers(expr, answers)))

    def _with_answers(self, expr: Any, answers: Mapping[Any, Any]) -> Any:
        """Replace torch's comparisons of bool symbols with 1 by the bools themselves."""
        from sympy import Not

        for symbol, answer in answers.items():
            condition = self._answers[symbol]
            expr = expr.xreplace({Not(condition): Not(answer), condition: answer})
        return expr

    def spelled_in(self, text: str) -> str | None:
        """Return the name of the first symbol that a text contains, or None."""
        return next((name for symbol, name in self._names.items() if has_name(text, symbol)), None)

    def spell_size(self, size: Any) -> str:
        """Return a size as text in the user's names."""
        return str(size) if type(size) is int else self.spell(size.node.expr)

    # --- numbers as nodes

    def record_in(self, graph: torch.fx.Graph, inputs: Mapping[str, torch.fx.Node]) -> None:
        """Start to record symbolic numbers in a graph, from the nodes of named dims."""
        self.graph, self._inputs = graph, inputs

    def end(self) -> None:
        """Stop the recording, and drop the nodes.

        The fake tensors of nodes hold the environment in C++, and the environment holds the nodes.
        Python's collector does not see such a cycle, so neither would be freed.
        """
        self.graph, self._inputs = None, {}
        self.computed_value = lambda node: None
        self._nodes.clear()
        self._definitions.clear()

    def record(self, value: Any) -> Any:
        """Return a symbolic number as a node, or as a constant if it is known."""
        expr = value.node.expr
        if expr in (True, False) or getattr(expr, "is_number", False):
            return PYTHON_TYPES[type(value)](expr)
        if expr not in self._nodes:
            self._nodes[expr] = self._node(expr)
            self._nodes[expr].meta["number"] = value
        return self._nodes[expr]

    def _node(self, expr: Any) -> torch.fx.Node:
        assert self.graph is not None
        sized = {s for s in expr.free_symbols if self._names.get(s) in self._inputs}
        values = {s: self._definitions[s] for s in expr.free_symbols - sized}
        for symbol in sized:
            values[symbol] = divided_node(self._inputs[self._names[symbol]], self._steps[symbol])
        node = self.write(self.graph, expr, values)
        if expr.free_symbols == sized:
            node.meta["value"] = self._evaluator(expr)
        return node

    def write(
        self, graph: torch.fx.Graph, expr: Any, values: Mapping[Any, torch.fx.Node]
    ) -> torch.fx.Node:
        """Write an expression into a graph, given the nodes of its symbols."""
        from sympy import Symbol

        answers = {symbol: Symbol(f"{symbol}_") for symbol in values if symbol in self._answers}
        all_values = {**values, **{answers[symbol]: values[symbol] for symbol in answers}}
        node: torch.fx.Node = number_node(graph, all_values, self._with_answers(expr, answers))
        if expr not in self._definitions and node not in values.values():
            node.meta["expr"] = self.spell(expr)
        return node

    def _evaluator(self, expr: Any) -> Any:
        """Return a function from the sizes of the named dims to the value of an expression.

        If a size is a sympy symbol, the value is an expression too.
        """
        names, steps = self._names, self._steps

        def value(sizes: Mapping[str, Any]) -> Any:
            sizes_of_symbols = {symbol: sizes[names[symbol]] for symbol in expr.free_symbols}
            sizes_of_symbols = {
                symbol: x if steps[symbol] == 1 else x // steps[symbol]
                for symbol, x in sizes_of_symbols.items()
            }
            value = expr.subs(sizes_of_symbols)
            if value.free_symbols:
                return value
            if value.is_Boolean:
                return bool(value)
            return int(value) if value.is_integer else float(value)

        return value


def _hint(dim: Dim, size: int, number: int) -> int:
    """Return the hint of a named dim: the size of the call if it is 2 or more."""
    if size >= 2:
        return size
    low, prime = max(2 * (dim.multiple_of or 1), dim.min or 2), _HINTS[number % len(_HINTS)]
    sizes = [prime * step for step in range(1, 1025)] + [*range(low, low + 4096)]
    return next((candidate for candidate in sizes if candidate >= low and dim.admits(candidate)), 0)


def _divided_text(variable: str, step: int) -> str:
    return variable if step == 1 else f"({variable} // {step})"


def can_be_symbol(value: Any) -> bool:
    """True if a value is a number that a symbol can stand for."""
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int and abs(value) < 1 << 62
