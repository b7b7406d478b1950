"""The sizes that a shape may promise: a number, a name, an expression, or nothing.

What a user writes (``DimSpec``) is read once, by `parse_dim`, into one of four forms
(``DimForm``), which every later stage matches on::

    3, Dim("n", min=2), DimExpr("2 * n + 1"), None
"""

from __future__ import annotations

import ast
import functools
import keyword
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tsfunc.errors import DescriptorError

_Evaluator = Callable[[Mapping[str, int]], int]

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}

_LONGEST_EXPRESSION = 200
"""Characters. Longer ones are no sizes of anything, and deep nesting would exhaust the parser."""


def is_dim_name(name: object) -> bool:
    """Whether `name` can name a dim: a Python identifier that is no keyword."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, repr=False)
class Dim:
    """A named size, with bounds.

    One name stands for one size within all the descriptors of one function. Where a name has
    several bounds, all of them hold.

    Args:
        name: a Python identifier.
        min: the smallest size that is allowed, or None.
        max: the largest size that is allowed, or None.

    Raises:
        DescriptorError: the name is no identifier, a bound is no non-negative int, or no size
            lies between the bounds.

    Example:
        >>> batch = Dim("batch", min=2)
        >>> batch
        Dim('batch', min=2)
        >>> batch.admits(1)
        False

    Source: the symbolic lengths of the TorchScript Input Descriptor proposal. Bounds are ours.
    """

    name: str
    min: int | None = None
    max: int | None = None

    def __post_init__(self) -> None:
        if not is_dim_name(self.name):
            raise DescriptorError(
                f"{self!r}: a dim is named by a Python identifier, got {self.name!r}"
            )
        for word, bound in (("min", self.min), ("max", self.max)):
            if bound is not None and (not _is_int(bound) or bound < 0):
                raise DescriptorError(
                    f"{self!r}: {word} must be a non-negative int or None, got {bound!r}"
                )
        if self.min is not None and self.max is not None and self.min > self.max:
            raise DescriptorError(
                f"{self!r}: no size is at least {self.min} and at most {self.max}"
            )

    def __repr__(self) -> str:
        bounds = (("min", self.min), ("max", self.max))
        words = [repr(self.name), *(f"{word}={b!r}" for word, b in bounds if b is not None)]
        return f"Dim({', '.join(words)})"

    def __str__(self) -> str:
        if self.min is None:
            return self.name if self.max is None else f"{self.name}<={self.max}"
        if self.max is None:
            return f"{self.name}>={self.min}"
        return f"{self.min}<={self.name}<={self.max}"

    @property
    def is_bounded(self) -> bool:
        """Whether any size is refused."""
        return self.min is not None or self.max is not None

    def admits(self, size: int) -> bool:
        """Whether `size` lies within the bounds."""
        return (self.min is None or size >= self.min) and (self.max is None or size <= self.max)

    def meet(self, other: Dim) -> Dim:
        """The dim of the same name that has the bounds of both.

        Raises:
            DescriptorError: no size lies within both.
        """
        lower = [d.min for d in (self, other) if d.min is not None]
        upper = [d.max for d in (self, other) if d.max is not None]
        return Dim(self.name, max(lower, default=None), min(upper, default=None))


@dataclass(frozen=True, repr=False)
class DimExpr:
    """A size that is computed from named ones, with ``+ - * //`` and integers.

    Args:
        text: the expression; it is kept in a normal spelling.

    Raises:
        DescriptorError: the text is no such expression.

    Example:
        >>> odd = DimExpr("2*n+1")
        >>> odd, odd.names, odd.evaluate({"n": 3})
        (DimExpr('2 * n + 1'), ('n',), 7)
    """

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", _parse_expression(self.text)[0])

    def __repr__(self) -> str:
        return f"DimExpr({self.text!r})"

    def __str__(self) -> str:
        return self.text

    @property
    def names(self) -> tuple[str, ...]:
        """The named dims that it is computed from, each once, in order of appearance."""
        return _parse_expression(self.text)[1]

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """The size, given those of the named dims; it may come out negative.

        Raises:
            KeyError: a name is not among `sizes`.
            ZeroDivisionError: a divisor is zero.
        """
        return _parse_expression(self.text)[2](sizes)


DimSpec: TypeAlias = int | str | Dim | DimExpr | None
"""A dim as it is written in a shape."""

DimForm: TypeAlias = int | Dim | DimExpr | None
"""A dim as it is worked with: fixed, named, computed, or open."""


def parse_dim(spec: object) -> DimForm:
    """What a dim written in a shape stands for.

    Args:
        spec: a non-negative int; a name; an expression such as ``"2*n+1"``; a `Dim`; or None
            for a size that is not known.

    Raises:
        DescriptorError: it is none of these.

    Example:
        >>> [parse_dim(spec) for spec in (3, "n", "n+1", "2*3", None)]
        [3, Dim('n'), DimExpr('n + 1'), 6, None]
    """
    if spec is None or isinstance(spec, Dim | DimExpr):
        return spec
    if isinstance(spec, str):
        return Dim(spec) if is_dim_name(spec) else _simplify(DimExpr(spec))
    if isinstance(spec, int) and not isinstance(spec, bool):
        return _size(spec)
    raise DescriptorError(
        "a dim is a non-negative int, a name, an expression, a Dim, or None for unknown; "
        f"got {spec!r} of type {type(spec).__name__}"
    )


def spell_dim(form: DimForm) -> DimSpec:
    """The shortest way to write a dim: what `parse_dim` reads back as `form`."""
    if isinstance(form, DimExpr):
        return form.text
    if isinstance(form, Dim):
        return form if form.is_bounded else form.name
    return form


def _size(size: int) -> int:
    if size < 0:
        raise DescriptorError(
            f"a size can't be negative, got {size}; write None for an unknown dim"
        )
    return size


def _simplify(expression: DimExpr) -> DimForm:
    """An expression without names is a number; one that is only a name is that name."""
    if is_dim_name(expression.text):
        return Dim(expression.text)
    if expression.names:
        return expression
    try:
        return _size(expression.evaluate({}))
    except ZeroDivisionError:
        raise DescriptorError(f"{expression.text!r} divides by zero") from None


@functools.lru_cache(maxsize=1024)
def _parse_expression(text: str) -> tuple[str, tuple[str, ...], _Evaluator]:
    """The normal spelling of an expression, the names in it, and what computes it."""
    if len(text) > _LONGEST_EXPRESSION:
        raise DescriptorError(
            f"{text[:20]!r}...: an expression has at most {_LONGEST_EXPRESSION} characters, "
            f"got {len(text)}"
        )
    names: dict[str, None] = {}
    try:
        root = ast.parse(text.strip(), mode="eval").body
        evaluate = _build(root, names, text)
        return ast.unparse(root), tuple(names), evaluate
    except DescriptorError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise DescriptorError(
            f"{text!r} is neither a name nor an expression; write a Python identifier, or "
            "integers and names joined by +, -, * and //"
        ) from None


def _build(node: ast.expr, names: dict[str, None], text: str) -> _Evaluator:
    """What computes `node`; adds the names that it meets to `names`."""
    match node:
        case ast.Constant(value=int(value)) if _is_int(value):
            return lambda sizes: value
        case ast.Name(id=name) if is_dim_name(name):
            names[name] = None
            return operator.itemgetter(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _build(operand, names, text)
            return lambda sizes: -inner(sizes)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            apply = _OPERATORS[type(op)]
            first, second = _build(left, names, text), _build(right, names, text)
            return lambda sizes: apply(first(sizes), second(sizes))
        case _:
            raise DescriptorError(
                f"{text!r}: an expression joins integers and names by +, -, * and //; "
                f"{ast.unparse(node)!r} is none of these"
            )
