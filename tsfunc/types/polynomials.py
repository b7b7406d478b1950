"""Expressions over named sizes as polynomials: equality, bounds, substitution and solutions.

A quotient by ``//`` that is not known to be exact is an atom, like a name.
"""

from __future__ import annotations

import ast
import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

_Monomial = tuple[tuple[str, int], ...]
"""Names with their powers, sorted; without any it is 1."""

_MOST_TERMS = 64


class TooLargeError(Exception):
    """A polynomial has too many terms."""


@dataclass(frozen=True)
class Polynomial:
    """A sum of products of names with integer coefficients.

    Example:
        >>> print(Polynomial.of("(n + 1) * (n - 1)"), Polynomial.of("2*a - a"))
        n ** 2 - 1 a
    """

    terms: Mapping[_Monomial, int]

    @staticmethod
    def of(text: str) -> Polynomial:
        """Return the polynomial of an expression.

        Raises:
            TooLargeError: it has too many terms.
        """
        return _read(ast.parse(text, mode="eval").body)

    def __add__(self, other: Polynomial) -> Polynomial:
        terms = Counter(dict(self.terms))
        for monomial, factor in other.terms.items():
            terms[monomial] += factor
        return _sum(terms)

    def __neg__(self) -> Polynomial:
        return Polynomial({monomial: -factor for monomial, factor in self.terms.items()})

    def __mul__(self, other: Polynomial) -> Polynomial:
        terms: Counter[_Monomial] = Counter()
        for one, factor in self.terms.items():
            for two, more in other.terms.items():
                powers = Counter(dict(one))
                powers.update(dict(two))
                terms[tuple(sorted(powers.items()))] += factor * more
        return _sum(terms)

    def __str__(self) -> str:
        ordered = sorted(self.terms, key=lambda m: (-sum(power for _, power in m), m))
        text = ""
        for monomial in ordered:
            factor = self.terms[monomial]
            names = " * ".join(n if power == 1 else f"{n} ** {power}" for n, power in monomial)
            term = names if names and abs(factor) == 1 else f"{abs(factor)} * {names}"
            term = term if names else str(abs(factor))
            sign = "-" if factor < 0 else "+"
            text += f" {sign} {term}" if text else f"{'-' if factor < 0 else ''}{term}"
        return text or "0"

    @property
    def key(self) -> int | str:
        """The value of a constant polynomial, else its text."""
        return self.terms.get((), 0) if set(self.terms) <= {()} else str(self)

    def least(self, ranges: Mapping[str, tuple[int, int | None]]) -> float:
        """Return a lower bound of the polynomial.

        Args:
            ranges: the least and the largest value (or None) of each name; (0, None) for a missing
                name.
        """
        total = 0.0
        for monomial, factor in self.terms.items():
            if any(atom.startswith("(") for atom, _ in monomial):  # a quotient
                return -math.inf
            bounds = [(*ranges.get(atom, (0, None)), power) for atom, power in monomial]
            if factor > 0:
                total += factor * math.prod(low**power for low, _, power in bounds)
            elif all(high != 0 for _, high, _ in bounds):
                highs = (math.inf if high is None else high**power for _, high, power in bounds)
                total += factor * math.prod(highs)
        return total

    def divided(self, divisor: int) -> Polynomial | None:
        """Return the quotient by a number; None if it has a remainder."""
        if not divisor or any(factor % divisor for factor in self.terms.values()):
            return None
        return Polynomial({monomial: f // divisor for monomial, f in self.terms.items()})

    def substitute(self, meaning: Mapping[str, Polynomial]) -> Polynomial | None:
        """Return the polynomial with names replaced; None if a quotient contains such a name."""
        total = Polynomial({})
        for monomial, factor in self.terms.items():
            term = Polynomial({(): factor})
            for atom, power in monomial:
                if atom.startswith("(") and not _names(atom).isdisjoint(meaning):
                    return None
                for _ in range(power):
                    term = term * meaning.get(atom, Polynomial({((atom, 1),): 1}))
            total = total + term
        return total

    def split(self, name: str) -> tuple[Polynomial, Polynomial] | None:
        """Return ``a`` and ``b`` of ``a * name + b``, both without the name, or None."""
        slope: dict[_Monomial, int] = {}
        rest: dict[_Monomial, int] = {}
        for monomial, factor in self.terms.items():
            powers = dict(monomial)
            power = powers.pop(name, 0)
            if power > 1 or any(name in _names(atom) for atom in powers):
                return None
            (slope if power else rest)[tuple(sorted(powers.items()))] = factor
        return Polynomial(slope), Polynomial(rest)


def _sum(terms: Mapping[_Monomial, int]) -> Polynomial:
    left = {monomial: factor for monomial, factor in terms.items() if factor}
    if len(left) > _MOST_TERMS:
        raise TooLargeError
    return Polynomial(left)


def _read(node: ast.expr) -> Polynomial:
    match node:
        case ast.Constant(value=int(value)):
            return _sum({(): value})
        case ast.Name(id=name):
            return Polynomial({((name, 1),): 1})
        case ast.UnaryOp(operand=operand):
            return -_read(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
            base, found = _read(left), _sum({(): 1})
            for _ in range(power):
                found = found * base
            return found
        case ast.BinOp(left=left, op=op, right=right):
            one, other = _read(left), _read(right)
            if isinstance(op, ast.FloorDiv):
                return _quotient(one, other)
            if isinstance(op, ast.Mult):
                return one * other
            return one + (-other if isinstance(op, ast.Sub) else other)
        case _:
            raise AssertionError(f"no expression: {ast.dump(node)}")


def _quotient(one: Polynomial, other: Polynomial) -> Polynomial:
    divisor = other.terms.get((), 0) if set(other.terms) <= {()} else 0
    if divisor and all(factor % divisor == 0 for factor in one.terms.values()):
        return Polynomial({monomial: f // divisor for monomial, f in one.terms.items()})
    return Polynomial({((f"(({one}) // ({other}))", 1),): 1})


@functools.lru_cache(maxsize=1024)
def _names(atom: str) -> frozenset[str]:
    found = ast.walk(ast.parse(atom, mode="eval"))
    return frozenset(node.id for node in found if isinstance(node, ast.Name))


@functools.lru_cache(maxsize=1024)
def normal_text(text: str) -> str:
    """Return a text that is equal for all expressions of the same polynomial."""
    try:
        return str(Polynomial.of(text))
    except (TooLargeError, RecursionError):
        return text


def is_never_positive(text: str) -> bool:
    """Return True if `most` shows that an expression is at most 0 for all sizes."""
    return most(text, {}) <= 0


def polynomial_of(key: int | str) -> Polynomial:
    """Return the polynomial of a number, a name or the text of an expression."""
    if isinstance(key, int):
        return _sum({(): key})
    if key.startswith("?"):  # stands for a size without a name
        return Polynomial({((key, 1),): 1})
    return Polynomial.of(key)


def solve(
    text: str, name: str, value: Polynomial, meaning: Mapping[str, Polynomial]
) -> Polynomial | None:
    """Return the polynomial of a name for which an expression has a value.

    Args:
        text: the expression.
        name: the name to solve for.
        value: the value of the expression.
        meaning: the polynomials of the other names in the expression.

    Returns:
        The polynomial; None if there is none, or the expression can't be solved for the name.
    """
    try:
        parts = Polynomial.of(text).split(name)
        if parts is None:
            return None
        slope, rest = (part.substitute(meaning) for part in parts)
        if slope is None or rest is None or not isinstance(slope.key, int):
            return None
        return (value + -rest).divided(slope.key)
    except (TooLargeError, RecursionError):
        return None


@functools.lru_cache(maxsize=1024)
def solved_for(text: str, name: str) -> tuple[str, str] | None:
    """Return the texts of ``a`` and ``b`` if an expression is ``a * name + b``, else None."""
    try:
        found = Polynomial.of(text).split(name)
    except (TooLargeError, RecursionError):
        return None
    return None if found is None or not found[0].terms else (str(found[0]), str(found[1]))


def most(text: str, ranges: Mapping[str, tuple[int, int | None]]) -> float:
    """Return an upper bound of an expression.

    Args:
        text: the expression.
        ranges: the least and the largest size (or None) of each name; a missing one is open.
    """
    try:
        return -(-Polynomial.of(text)).least(ranges)
    except (TooLargeError, RecursionError):
        return math.inf
