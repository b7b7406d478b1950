"""Sizes that are computed from named sizes: expressions, and their normal form.

Every expression is first converted to plain data: the text of a ``DimExpr``, an expression in a
file, and an expression of sympy's (``bridge/sizes/expressions.py``). ``fold_form`` computes with
it: the size for given sizes, torch's symbolic size, and the normal form.

    DimExpr("2*n + 1")                             text, printed as it was written
    ["+", ["*", 2, "n"], 1]                        plain data
    SizeSum.of_form(["+", ["*", 2, "n"], 1])       the normal form: a sum of products of names

The normal form decides if expressions are equal for all sizes, bounds an expression, replaces
names, and solves for a name. A quotient, a remainder, a maximum or a minimum that does not simplify
is an atom of a product, like a name.
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
from typing import Any, TypeAlias, TypeVar

from tsfunc.errors import DescriptorError
from tsfunc.user_code import folded_class

T = TypeVar("T")

_MOST_TERMS = 64
HIGHEST_POWER = 8
_LONGEST_EXPRESSION = 200
"""The maximum length of an expression in characters; deep nesting would exhaust the parser."""

Range: TypeAlias = tuple[int, "int | None"]
"""The least and the largest size of a name; None if there is no largest one."""


def is_dim_name(name: object) -> bool:
    """True if ``name`` can name a dim: a Python identifier that is not a keyword."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def is_int(value: object) -> bool:
    """True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


# --- expressions as plain data


def fold_form(
    form: Any, leaf: Callable[[Any], T], operators: Mapping[str, Callable[[T, T], T]]
) -> T:
    """Compute a value from an expression as plain data.

    The text of a descriptor, files and sympy's expressions become such data first. Its values are
    numbers, normal forms, and torch's symbolic sizes.

    Args:
        form: a number, a name, or a list of an operator and its operands, such as
            ``["+", ["*", 2, "n"], 1]``. ``//`` and ``%`` have two operands, others two or more.
        leaf: returns the value of a number or a name.
        operators: the function of two values of each operator.

    Raises:
        ValueError: the data is not such a form.

    Example:
        >>> fold_form(["*", 2, "n"], {2: 2, "n": 5}.__getitem__, {"*": lambda x, y: x * y})
        10
    """
    if is_int(form) or isinstance(form, str):
        return leaf(form)
    operator_known = (
        isinstance(form, Sequence)
        and len(form) > 2
        and isinstance(form[0], str)
        and form[0] in operators
    )
    if not operator_known or (form[0] in ("//", "%") and len(form) != 3):
        raise ValueError(f"expected a size, got {form!r}")
    values = [fold_form(operand, leaf, operators) for operand in form[1:]]
    return functools.reduce(operators[form[0]], values)


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
        return _sum_of_terms({(): number})

    @staticmethod
    def of_name(name: str) -> SizeSum:
        return SizeSum(((((name, 1),), 1),))

    @staticmethod
    def of_form(form: Any) -> SizeSum:
        """Return the sum of an expression as plain data; see ``fold_form``."""
        return fold_form(form, SizeSum._of_leaf, _ON_SUMS)

    @staticmethod
    def _of_leaf(leaf: int | str) -> SizeSum:
        return SizeSum.of_int(leaf) if isinstance(leaf, int) else SizeSum.of_name(leaf)

    # --- arithmetic

    def __add__(self, other: SizeSum) -> SizeSum:
        terms = dict(self.terms)
        for term, factor in other.terms:
            terms[term] = terms.get(term, 0) + factor
        return _sum_of_terms(terms)

    def __neg__(self) -> SizeSum:
        return SizeSum(tuple((term, -factor) for term, factor in self.terms))

    def __sub__(self, other: SizeSum) -> SizeSum:
        return self + -other

    def __mul__(self, other: SizeSum) -> SizeSum:
        for scaled, number in ((self, other.number), (other, self.number)):
            if number is not None:
                return _sum_of_terms({term: factor * number for term, factor in scaled.terms})
        if min(len(self.terms), len(other.terms)) > 1 and (
            len(self.terms) * len(other.terms) > _MOST_TERMS
        ):
            return _of_operation("*", *sorted((self, other), key=str))
        terms: dict[Term, int] = {}
        for (one, factor), (two, more) in itertools.product(self.terms, other.terms):
            powers = dict(one)
            for atom, power in two:
                powers[atom] = powers.get(atom, 0) + power
            term = tuple(sorted(powers.items(), key=lambda item: str(item[0])))
            terms[term] = terms.get(term, 0) + factor * more
        return _sum_of_terms(terms)

    def __floordiv__(self, other: SizeSum) -> SizeSum:
        parts = self._divide(other.number)
        return _of_operation("//", self, other) if parts is None else parts[0]

    def __mod__(self, other: SizeSum) -> SizeSum:
        parts = self._divide(other.number)
        return _of_operation("%", self, other) if parts is None else SizeSum.of_int(parts[1])

    def _divide(self, divisor: int | None) -> tuple[SizeSum, int] | None:
        """Return quotient and remainder if all names cancel in the remainder, else None."""
        factors = [(term, factor) for term, factor in self.terms if term]
        if not divisor or any(factor % divisor for _, factor in factors):
            return None
        rest = dict(self.terms).get((), 0)
        quotient = {term: factor // divisor for term, factor in factors}
        return _sum_of_terms({**quotient, (): rest // divisor}), rest % divisor

    def divided_exactly(self, divisor: SizeSum) -> SizeSum | None:
        """Return the quotient by a number; None if it has a remainder."""
        parts = self._divide(divisor.number)
        return None if parts is None or parts[1] else parts[0]

    def combine(self, symbol: str, other: SizeSum) -> SizeSum:
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
        atoms = (atom for term, _ in self.terms for atom, _ in term if isinstance(atom, str))
        inner = (operand.names for operation in self.operations() for operand in operation.operands)
        return frozenset(atoms).union(*inner)

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
        """Return an upper bound of the sum, or inf; ``ranges`` are as for ``least``."""
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
                    operands = [operand.substitute(meaning) for operand in atom.operands]
                    value = functools.reduce(_ON_SUMS[atom.symbol], operands)
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
        return _sum_of_terms(slope), _sum_of_terms(rest)

    def solve(self, name: str, value: SizeSum, meaning: Mapping[str, SizeSum]) -> SizeSum | None:
        """Return the sum for a name with which this sum has a value.

        Args:
            meaning: the sums that replace the other names.

        Returns:
            The sum; None if there is none, or if this sum can't be solved for the name.
        """
        parts = self.split(name)
        if parts is None:
            return None
        slope, rest = (part.substitute(meaning) for part in parts)
        return (value - rest).divided_exactly(slope)


def _sum_of_terms(terms: Mapping[Term, int]) -> SizeSum:
    nonzero = [(term, factor) for term, factor in terms.items() if factor]
    if len(nonzero) > 1:
        nonzero.sort(key=_term_order)
    return SizeSum(tuple(nonzero))


def _of_operation(symbol: str, *operands: SizeSum) -> SizeSum:
    return SizeSum(((((Operation(symbol, operands), 1),), 1),))


def _term_order(entry: tuple[Term, int]) -> tuple[int, list[tuple[str, int]]]:
    """Order terms by their degree, then by their names."""
    term = entry[0]
    return -sum(power for _, power in term), [(str(atom), power) for atom, power in term]


def _operand(value: SizeSum) -> str:
    text = str(value)
    return text if text.isidentifier() or text.isdigit() else f"({text})"


_ON_SUMS: dict[str, Callable[[SizeSum, SizeSum], SizeSum]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "max": lambda one, other: one.combine("max", other),
    "min": lambda one, other: one.combine("min", other),
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
            KeyError: a name is not among ``sizes``.
            ZeroDivisionError: a divisor is zero.
        """
        return _value_of(_parse(self.text).form, sizes)

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
    """A parsed text: its normal spelling, its names, and the expression as plain data."""

    text: str
    names: tuple[str, ...]
    form: Any

    @functools.cached_property
    def sum(self) -> SizeSum:
        return SizeSum.of_form(self.form)


def _value_of(form: Any, sizes: Mapping[str, int]) -> int:
    """Return the size of an expression as plain data, for given sizes of the names."""
    return fold_form(form, lambda leaf: leaf if isinstance(leaf, int) else sizes[leaf], _ON_INTS)


_ON_INTS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
}
_SYMBOLS: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//",
}  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> _Expression:
    if len(text) > _LONGEST_EXPRESSION:
        raise DescriptorError(
            f"{text[:20]!r}...: expected an expression of at most {_LONGEST_EXPRESSION} "
            f"characters, got {len(text)}"
        )
    names: dict[str, None] = {}
    try:
        root = ast.parse(text.strip(), mode="eval").body
        form = _form_of(root, names, text)
        return _Expression(ast.unparse(root), tuple(names), form)
    except DescriptorError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise DescriptorError(
            f"{text!r} is neither a name nor an expression; write a Python identifier, or "
            "integers and names joined by +, -, *, // and **"
        ) from None


def _form_of(node: ast.expr, names: dict[str, None], text: str) -> Any:
    """Return ``node`` as plain data; add the names in ``node`` to ``names``."""
    match node:
        case ast.Constant(value=int(value)) if is_int(value):
            return value
        case ast.Name(id=name) if is_dim_name(name):
            names[name] = None
            return name
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return ["-", 0, _form_of(operand, names, text)]
        case ast.BinOp(left=base, op=ast.Pow(), right=ast.Constant(value=int(power))) if (
            is_int(power)
            and power <= HIGHEST_POWER
            and not any(isinstance(part, ast.Pow) for part in ast.walk(base))
        ):
            return ["*", 1, 1, *[_form_of(base, names, text)] * power]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SYMBOLS:
            divisor: dict[str, None] = {}
            form = [
                _SYMBOLS[type(op)], _form_of(left, names, text), _form_of(right, divisor, text),
            ]  # fmt: skip
            if isinstance(op, ast.FloorDiv) and not divisor and _value_of(form[2], {}) == 0:
                raise DescriptorError(f"{text!r} divides by zero")
            names.update(divisor)
            return form
        case _:
            raise DescriptorError(
                f"{text!r}: an expression joins integers and names by +, -, * and //, and raises "
                f"them to powers up to {HIGHEST_POWER}; {ast.unparse(node)!r} is none of these"
            )
