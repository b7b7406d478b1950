"""Sizes that are computed from named sizes: expressions, their normal form, facts about them.

`DimExpr` is an expression as it is written. It is printed and evaluated in that form. Its `sum` is
the normal form: an immutable sum of products of names. The normal form decides if expressions are
equal for all sizes, bounds an expression, replaces names, and solves for a name. A quotient, a
remainder, a maximum or a minimum that does not simplify is an atom of a product, like a name.

    DimExpr("2*n + 1")        an expression in text
    SizeSum.of_form(["+", ["*", 2, "n"], 1])       and as plain data, for files and for sympy's
    fact_code("n % 4 == 0 and n <= 2 * m", ...)    a fact in a file, as code for a guard
"""

from __future__ import annotations

import ast
import functools
import itertools
import keyword
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tsfunc.errors import DescriptorError
from tsfunc.tracebacks import folded_class

_MOST_TERMS = 64
_HIGHEST_POWER = 8
_LONGEST_EXPRESSION = 200
"""The maximum length of an expression in characters; deep nesting would exhaust the parser."""

Range: TypeAlias = tuple[int, "int | None"]
"""The least and the largest size of a name; None if there is no largest one."""


def is_dim_name(name: object) -> bool:
    """Return True if `name` can name a dim: a Python identifier that is not a keyword."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def is_int(value: object) -> bool:
    """Return True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


# --- the normal form


@dataclass(frozen=True)
class Operation:
    """An operation on sums that does not simplify: ``//``, ``%``, ``max``, ``min``, ``*``.

    A product is one only if its terms would be too many.
    """

    symbol: str
    operands: tuple[SizeSum, ...]

    def __str__(self) -> str:
        if self.symbol in ("max", "min"):
            return f"{self.symbol}({', '.join(map(str, self.operands))})"
        return f"({f' {self.symbol} '.join(map(_operand, self.operands))})"


Atom: TypeAlias = str | Operation
Term: TypeAlias = "tuple[tuple[Atom, int], ...]"
"""A product: atoms with their powers, in the order of their texts; the empty product is 1."""


@dataclass(frozen=True)
class SizeSum:
    """A sum of products of names with integer coefficients, in one order for all equal sums.

    Example:
        >>> n, m = SizeSum.of_name("n"), SizeSum.of_name("m")
        >>> print((n + SizeSum.of_int(1)) * (n - SizeSum.of_int(1)), n + m - n)
        n ** 2 - 1 m
        >>> print((SizeSum.of_int(4) * n + SizeSum.of_int(7)) // SizeSum.of_int(4), n // m)
        n + 1 (n // m)
    """

    terms: tuple[tuple[Term, int], ...]

    @staticmethod
    def of_int(number: int) -> SizeSum:
        return _sum({(): number})

    @staticmethod
    def of_name(name: str) -> SizeSum:
        return SizeSum(((((name, 1),), 1),))

    @staticmethod
    def of_form(form: Any) -> SizeSum:
        """Return the sum of an expression as plain data.

        Args:
            form: a number, a name, or a list of an operator and its operands, such as
                ``["+", ["*", 2, "n"], 1]``. The operators are + * // % max and min.

        Raises:
            ValueError: the data is not such a form.
        """
        if is_int(form):
            return SizeSum.of_int(form)
        if isinstance(form, str):
            return SizeSum.of_name(form)
        if not isinstance(form, Sequence) or len(form) < 3 or not _is_operator(form[0]):
            raise ValueError(f"{form!r} is not a size")
        return functools.reduce(_CALLED[form[0]], map(SizeSum.of_form, form[1:]))

    # --- arithmetic

    def __add__(self, other: SizeSum) -> SizeSum:
        terms = dict(self.terms)
        for term, factor in other.terms:
            terms[term] = terms.get(term, 0) + factor
        return _sum(terms)

    def __neg__(self) -> SizeSum:
        return SizeSum(tuple((term, -factor) for term, factor in self.terms))

    def __sub__(self, other: SizeSum) -> SizeSum:
        return self + -other

    def __mul__(self, other: SizeSum) -> SizeSum:
        for scaled, number in ((self, other.number), (other, self.number)):
            if number is not None:
                return _sum({term: factor * number for term, factor in scaled.terms})
        if min(len(self.terms), len(other.terms)) > 1 and (
            len(self.terms) * len(other.terms) > _MOST_TERMS
        ):
            return _of_operation("*", *sorted((self, other), key=str))
        terms: dict[Term, int] = {}
        for (one, factor), (two, more) in itertools.product(self.terms, other.terms):
            powers = dict(one)
            for atom, power in two:
                powers[atom] = powers.get(atom, 0) + power
            term = tuple(sorted(powers.items(), key=_text_of_first))
            terms[term] = terms.get(term, 0) + factor * more
        return _sum(terms)

    def __floordiv__(self, other: SizeSum) -> SizeSum:
        parts = self._divided(other.number)
        return _of_operation("//", self, other) if parts is None else parts[0]

    def __mod__(self, other: SizeSum) -> SizeSum:
        parts = self._divided(other.number)
        return _of_operation("%", self, other) if parts is None else SizeSum.of_int(parts[1])

    def _divided(self, divisor: int | None) -> tuple[SizeSum, int] | None:
        """Return quotient and remainder if all names cancel in the remainder, else None."""
        factors = [(term, factor) for term, factor in self.terms if term]
        if not divisor or any(factor % divisor for _, factor in factors):
            return None
        rest = dict(self.terms).get((), 0)
        quotient = {term: factor // divisor for term, factor in factors}
        return _sum({**quotient, (): rest // divisor}), rest % divisor

    def divided_exactly(self, divisor: SizeSum) -> SizeSum | None:
        """Return the quotient by a number; None if it has a remainder."""
        parts = self._divided(divisor.number)
        return None if parts is None or parts[1] else parts[0]

    def joined(self, symbol: str, other: SizeSum) -> SizeSum:
        """Return the maximum or the minimum of two sums."""
        if self == other:
            return self
        if self.number is not None and other.number is not None:
            return SizeSum.of_int((max if symbol == "max" else min)(self.number, other.number))
        return _of_operation(symbol, *sorted((self, other), key=str))

    # --- queries

    def __str__(self) -> str:
        ordered = sorted(self.terms, key=_term_order)
        text = ""
        for term, factor in ordered:
            atoms = " * ".join(f"{a}" if power == 1 else f"{a} ** {power}" for a, power in term)
            part = atoms if atoms and abs(factor) == 1 else f"{abs(factor)} * {atoms}"
            part = part if atoms else str(abs(factor))
            sign = "-" if factor < 0 else "+"
            text += f" {sign} {part}" if text else f"{'-' if factor < 0 else ''}{part}"
        return text or "0"

    @property
    def number(self) -> int | None:
        """The value of a sum without names; None for another sum."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names in the sum, also those in its operations."""
        own = (atom for term, _ in self.terms for atom, _ in term if isinstance(atom, str))
        inner = (each.names for operation in self.operations() for each in operation.operands)
        return frozenset(own).union(*inner)

    def operations(self) -> Iterator[Operation]:
        """Yield each operation in the sum, and the operations in its operands."""
        for term, _ in self.terms:
            for atom, _ in term:
                if isinstance(atom, Operation):
                    yield atom
                    for operand in atom.operands:
                        yield from operand.operations()

    def least(self, ranges: Mapping[str, Range]) -> float:
        """Return a lower bound of the sum, -inf if none is found.

        Args:
            ranges: the least and the largest size of each name; (0, None) for a missing name.
        """
        total = 0.0
        for term, factor in self.terms:
            bounds = []
            for atom, power in term:
                if isinstance(atom, Operation):
                    return -math.inf
                bounds.append((*ranges.get(atom, (0, None)), power))
            if factor > 0:
                total += factor * math.prod(low**power for low, _, power in bounds)
            elif all(high != 0 for _, high, _ in bounds):
                highs = (math.inf if high is None else high**power for _, high, power in bounds)
                total += factor * math.prod(highs)
        return total

    def most(self, ranges: Mapping[str, Range]) -> float:
        """Return an upper bound of the sum, inf if none is found; `ranges` are as for `least`."""
        return -(-self).least(ranges)

    def substitute(self, meaning: Mapping[str, SizeSum]) -> SizeSum:
        """Return the sum with some names replaced."""
        total = SizeSum.of_int(0)
        for term, factor in self.terms:
            product = SizeSum.of_int(factor)
            for atom, power in term:
                if isinstance(atom, str):
                    value = meaning.get(atom, SizeSum.of_name(atom))
                else:
                    operands = [each.substitute(meaning) for each in atom.operands]
                    value = functools.reduce(_CALLED[atom.symbol], operands)
                for _ in range(power):
                    product = product * value
            total = total + product
        return total

    def split(self, name: str) -> tuple[SizeSum, SizeSum] | None:
        """Return ``a`` and ``b`` of ``a * name + b``, both without the name, or None."""
        slope: dict[Term, int] = {}
        rest: dict[Term, int] = {}
        for term, factor in self.terms:
            powers = dict(term)
            power = powers.pop(name, 0)
            inner = SizeSum(((tuple(powers.items()), 1),))
            if power > 1 or name in inner.names:
                return None
            (slope if power else rest)[tuple(powers.items())] = factor
        return _sum(slope), _sum(rest)

    def solve(self, name: str, value: SizeSum, meaning: Mapping[str, SizeSum]) -> SizeSum | None:
        """Return the sum for a name with which this sum has a value.

        Args:
            name: the name to solve for.
            value: the value of this sum.
            meaning: the sums that replace the other names.

        Returns:
            The sum; None if there is none, or if this sum can't be solved for the name.
        """
        parts = self.split(name)
        if parts is None:
            return None
        slope, rest = (part.substitute(meaning) for part in parts)
        return (value - rest).divided_exactly(slope)


def _sum(terms: Mapping[Term, int]) -> SizeSum:
    kept = [(term, factor) for term, factor in terms.items() if factor]
    if len(kept) > 1:
        kept.sort(key=_term_order)
    return SizeSum(tuple(kept))


def _of_operation(symbol: str, *operands: SizeSum) -> SizeSum:
    return SizeSum(((((Operation(symbol, operands), 1),), 1),))


def _term_order(entry: tuple[Term, int]) -> tuple[int, list[tuple[str, int]]]:
    """Order terms by their degree, then by their names."""
    term = entry[0]
    return -sum(power for _, power in term), [(str(atom), power) for atom, power in term]


def _text_of_first(item: tuple[Atom, int]) -> str:
    return str(item[0])


def _is_operator(symbol: object) -> bool:
    return isinstance(symbol, str) and symbol in _CALLED


def _operand(value: SizeSum) -> str:
    text = str(value)
    return text if text.isidentifier() or text.isdigit() else f"({text})"


_CALLED: dict[str, Callable[[SizeSum, SizeSum], SizeSum]] = {
    "+": operator.add,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "max": lambda one, other: one.joined("max", other),
    "min": lambda one, other: one.joined("min", other),
}


# --- expressions as they are written


@folded_class
@dataclass(frozen=True, repr=False)
class DimExpr:
    """A size computed from named sizes with ``+ - * // **`` and integers.

    Args:
        text: the expression; it is normalized.

    Raises:
        DescriptorError: the text is not such an expression.

    Example:
        >>> odd = DimExpr("2*n+1")
        >>> odd, odd.names, odd.evaluate({"n": 3})
        (DimExpr('2 * n + 1'), ('n',), 7)
    """

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", _parse(self.text).text)

    def __repr__(self) -> str:
        return f"DimExpr({self.text!r})"

    def __str__(self) -> str:
        return self.text

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the expression, each once, in order of appearance."""
        return _parse(self.text).names

    @property
    def sum(self) -> SizeSum:
        """The normal form: one sum for all expressions that are equal as polynomials."""
        return _parse(self.text).sum

    @property
    def normal(self) -> str:
        """The text of the normal form."""
        return str(self.sum)

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """Return the size for given sizes of the names; it can be negative.

        Raises:
            KeyError: a name is not among `sizes`.
            ZeroDivisionError: a divisor is zero.
        """
        return _parse(self.text).evaluate(sizes)

    def substitute(self, texts: Mapping[str, str]) -> str:
        """Return the text of the expression with names replaced by other expressions.

        Example:
            >>> DimExpr("2 * (n + m)").substitute({"n": "k - 1", "m": "m"})
            '2 * (k - 1 + m)'
        """
        parts = {name: ast.parse(text, mode="eval").body for name, text in texts.items()}
        return ast.unparse(_Renamed(parts).visit(ast.parse(self.text, mode="eval")))

    def solve(self, size: int, sizes: Mapping[str, int]) -> tuple[str, int | None] | None:
        """Solve for the only name without a size.

        Args:
            size: the value of the expression.
            sizes: the known sizes, by name.

        Returns:
            The name and its size. The size is None if no size, or every size, gives the value. The
            result is None if several names are unknown, or if the expression is not linear in the
            name.

        Example:
            >>> DimExpr("2*n+1").solve(7, {}), DimExpr("2*n+1").solve(6, {})
            (('n', 3), ('n', None))
            >>> DimExpr("a*b").solve(6, {"a": 2}), DimExpr("a*b").solve(6, {})
            (('b', 3), None)
        """
        unknown = [name for name in self.names if name not in sizes]
        parts = solved_for(self.text, unknown[0]) if len(unknown) == 1 else None
        if parts is None:
            return None
        slope, rest = (DimExpr(text).evaluate(sizes) for text in parts)
        solution, remainder = divmod(size - rest, slope) if slope else (-1, 0)
        return unknown[0], None if remainder or solution < 0 else solution


def solved_for(text: str, name: str) -> tuple[str, str] | None:
    """Return the texts of ``a`` and ``b`` if an expression is ``a * name + b``, else None."""
    parts = DimExpr(text).sum.split(name)
    return None if parts is None or not parts[0].terms else (str(parts[0]), str(parts[1]))


class _Renamed(ast.NodeTransformer):
    def __init__(self, parts: Mapping[str, ast.expr]) -> None:
        self._parts = parts

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._parts.get(node.id, node)


@dataclass(frozen=True)
class _Expression:
    """A parsed text: its normal spelling, its names, its value, and its normal form."""

    text: str
    names: tuple[str, ...]
    evaluate: Callable[[Mapping[str, int]], int]
    root: ast.expr

    @functools.cached_property
    def sum(self) -> SizeSum:
        return _sum_of(self.root)


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> _Expression:
    if len(text) > _LONGEST_EXPRESSION:
        raise DescriptorError(
            f"{text[:20]!r}...: an expression has at most {_LONGEST_EXPRESSION} characters, "
            f"got {len(text)}"
        )
    names: dict[str, None] = {}
    try:
        root = ast.parse(text.strip(), mode="eval").body
        evaluate = _build(root, names, text)
        return _Expression(ast.unparse(root), tuple(names), evaluate, root)
    except DescriptorError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise DescriptorError(
            f"{text!r} is neither a name nor an expression; write a Python identifier, or "
            "integers and names joined by +, -, *, // and **"
        ) from None


def _build(node: ast.expr, names: dict[str, None], text: str) -> Callable[[Mapping[str, int]], int]:
    """Return a function that computes `node`; add the names in `node` to `names`."""
    match node:
        case ast.Constant(value=int(value)) if is_int(value):
            return lambda sizes: value
        case ast.Name(id=name) if is_dim_name(name):
            names[name] = None
            return operator.itemgetter(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _build(operand, names, text)
            return lambda sizes: -inner(sizes)
        case ast.BinOp(left=base, op=ast.Pow(), right=ast.Constant(value=int(power))) if (
            is_int(power) and power <= _HIGHEST_POWER and not _has_power(base)
        ):
            inner = _build(base, names, text)
            return lambda sizes: inner(sizes) ** power
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            apply = _OPERATORS[type(op)]
            divisor: dict[str, None] = {}
            first, second = _build(left, names, text), _build(right, divisor, text)
            if isinstance(op, ast.FloorDiv) and not divisor and second({}) == 0:
                raise DescriptorError(f"{text!r} divides by zero")
            names.update(divisor)
            return lambda sizes: apply(first(sizes), second(sizes))
        case _:
            raise DescriptorError(
                f"{text!r}: an expression joins integers and names by +, -, * and //, and raises "
                f"them to powers up to {_HIGHEST_POWER}; {ast.unparse(node)!r} is none of these"
            )


def _has_power(node: ast.expr) -> bool:
    """Return True if an expression contains a power; powers of powers could be huge."""
    return any(isinstance(each, ast.Pow) for each in ast.walk(node))


def _sum_of(node: ast.expr) -> SizeSum:
    """Return the normal form of an expression that `_build` accepts."""
    match node:
        case ast.Constant(value=int(value)):
            return SizeSum.of_int(value)
        case ast.Name(id=name):
            return SizeSum.of_name(name)
        case ast.UnaryOp(operand=operand):
            return -_sum_of(operand)
        case ast.BinOp(left=base, op=ast.Pow(), right=ast.Constant(value=int(power))):
            return functools.reduce(operator.mul, [_sum_of(base)] * power, SizeSum.of_int(1))
        case ast.BinOp(left=left, op=op, right=right):
            one: SizeSum = _OPERATORS[type(op)](_sum_of(left), _sum_of(right))
            return one
        case _:
            raise AssertionError(f"not an expression: {ast.dump(node)}")


# --- facts as text

_LONGEST_FACT = 2000  # characters
_LARGEST_NUMBER = 1 << 63
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Div)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_FUNCTIONS = frozenset({
    "min", "max", "abs", "int", "float", "round", "math.floor", "math.ceil", "math.trunc",
    "math.sqrt",
})  # fmt: skip


def fact_code(text: str, variables: Mapping[str, str]) -> str:
    """Return a fact about named sizes as Python code that needs ``math`` in its scope.

    A file stores the conditions of a program on named sizes as such facts.

    Args:
        text: comparisons joined by ``and``, ``or`` and ``not``. They compare sums, products,
            quotients and remainders of names and numbers, and calls of ``min``, ``max``, ``abs``,
            ``round``, ``int``, ``float`` and some functions of ``math``.
        variables: name to its variable in the code.

    Raises:
        DescriptorError: the text is not such a fact, or has a name that is not in `variables`.

    Example:
        >>> fact_code("n % 2 == 0 and n > m", {"n": "size_n", "m": "size_m"})
        'size_n % 2 == 0 and size_n > size_m'
    """
    if len(text) > _LONGEST_FACT:
        raise DescriptorError(f"{text[:20]!r}...: a fact has at most {_LONGEST_FACT} characters")
    try:
        return ast.unparse(_fact(ast.parse(text, mode="eval").body, variables))
    except DescriptorError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise DescriptorError(f"{text[:200]!r} is not a fact about sizes") from None


def _fact(node: ast.expr, variables: Mapping[str, str]) -> ast.expr:
    match node:
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(op, [_fact(value, variables) for value in values])
        case ast.UnaryOp(op=ast.Not() as op, operand=operand):
            return ast.UnaryOp(op, _fact(operand, variables))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if isinstance(op, _COMPARISONS):
            return ast.Compare(_number(left, variables), [op], [_number(right, variables)])
        case _:
            raise DescriptorError(f"{ast.unparse(node)!r} is not a comparison of sizes")


def _number(node: ast.expr, variables: Mapping[str, str]) -> ast.expr:
    match node:
        case ast.Constant(value=value) if _is_tame(value):
            return ast.Constant(value)
        case ast.Name(id=name) if name in variables:
            return ast.parse(variables[name], mode="eval").body
        case ast.UnaryOp(op=ast.USub() as op, operand=operand):
            return ast.UnaryOp(op, _number(operand, variables))
        case ast.BinOp(left=base, op=ast.Pow() as op, right=power) if _is_power(power):
            return ast.BinOp(_number(base, variables), op, power)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _ARITHMETIC):
            return ast.BinOp(_number(left, variables), op, _number(right, variables))
        case ast.Call(func=func, args=args, keywords=[]) if ast.unparse(func) in _FUNCTIONS:
            return ast.Call(func, [_number(arg, variables) for arg in args], [])
        case _:
            raise DescriptorError(f"{ast.unparse(node)!r} is not made of sizes")


def _is_tame(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST_NUMBER


def _is_power(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    value = node.value if isinstance(node, ast.Constant) else None
    return _is_tame(value) and isinstance(value, int | float) and value <= _HIGHEST_POWER
