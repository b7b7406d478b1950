"""The sizes in a shape: a number, a name, an expression, or nothing.

``parse_dim`` converts a size as a user writes it (``DimSpec``) to one of four forms (``DimForm``),
which all later stages match on::

    3, Dim("n", min=2), DimExpr("2 * n + 1"), None
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, TypeAlias

from tsfunc.errors import DescriptorError
from tsfunc.types.sizes import DimExpr, is_dim_name, is_int
from tsfunc.user_code import folded_class


@folded_class
@dataclass(frozen=True, repr=False)
class Dim:
    """A named size with its bounds.

    One name stands for one size within all descriptors of a function. If a name has several
    bounds, all of them hold.

    Args:
        name: a Python identifier.
        min: the smallest allowed size, or None.
        max: the largest allowed size, or None.
        multiple_of: a number that divides every size, or None.
        one_of: the only allowed sizes, or None.

    The bounds are normalized: ``min`` and ``max`` are allowed sizes, and ``one_of`` has only sizes
    that the other bounds allow.

    Raises:
        DescriptorError: the name is not an identifier, a bound is not a non-negative int, or no
            size fits all of them.

    Example:
        >>> batch = Dim("batch", min=2)
        >>> batch
        Dim('batch', min=2)
        >>> batch.admits(1)
        False
        >>> Dim("heads", min=3, multiple_of=4), Dim("k", min=2, one_of=(1, 2, 4))
        (Dim('heads', min=4, multiple_of=4), Dim('k', one_of=(2, 4)))

    Source: the symbolic lengths of the TorchScript Input Descriptor proposal, which has no bounds.
    """

    name: str
    min: int | None = None
    max: int | None = None
    multiple_of: int | None = None
    one_of: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not is_dim_name(self.name):
            raise DescriptorError(
                f"{self!r}: expected a Python identifier as name, got {self.name!r}"
            )
        for word, bound in (("min", self.min), ("max", self.max)):
            if bound is not None and (not is_int(bound) or bound < 0):
                raise DescriptorError(
                    f"{self!r}: {word}: expected a non-negative int or None, got {bound!r}"
                )
        step = self.multiple_of
        if step is not None and (not is_int(step) or step < 1):
            raise DescriptorError(
                f"{self!r}: multiple_of: expected a positive int or None, got {step!r}"
            )
        if self.one_of is not None and not _are_sizes(self.one_of):
            raise DescriptorError(
                f"{self!r}: one_of: expected the allowed sizes, non-negative ints, got "
                f"{self.one_of!r}"
            )
        for word, value in _normal_bounds(self).items():
            object.__setattr__(self, word, value)

    def __repr__(self) -> str:
        bounds: dict[str, object] = {
            "min": self.min,
            "max": self.max,
            "multiple_of": self.multiple_of,
            "one_of": self.one_of,
        }
        if (
            isinstance(self.one_of, tuple)
            and self.one_of
            and (self.min, self.max) == (self.one_of[0], self.one_of[-1])
        ):
            bounds = {"one_of": self.one_of}  # the other bounds follow from it
        words = [f"{word}={bound!r}" for word, bound in bounds.items() if bound is not None]
        return f"Dim({', '.join([repr(self.name), *words])})"

    def __str__(self) -> str:
        name = self.name
        if self.one_of is not None:
            return f"{name} in {{{', '.join(map(str, self.one_of))}}}"
        step = f"{name} % {self.multiple_of} == 0" if self.multiple_of else ""
        if self.min is None and self.max is None:
            return step or name
        low = "" if self.min is None else f"{self.min}<="
        high = "" if self.max is None else f"<={self.max}"
        bounds = f"{low}{name}{high}" if high else f"{name}>={self.min}"
        return f"{bounds} and {step}" if step else bounds

    @property
    def is_bounded(self) -> bool:
        """True if the dim excludes any size."""
        return not (self.min is None and self.max is None and self.multiple_of is None)

    def admits(self, size: int) -> bool:
        """True if a size is allowed."""
        if self.one_of is not None:
            return size in self.one_of
        return (
            (self.min is None or size >= self.min)
            and (self.max is None or size <= self.max)
            and (self.multiple_of is None or size % self.multiple_of == 0)
        )

    def admits_all(self, other: Dim) -> bool:
        """True if this dim allows every size that ``other`` allows."""
        if other.one_of is not None:
            return all(map(self.admits, other.one_of))
        if other.max is not None and other.max - (other.min or 0) <= _FEW * (
            other.multiple_of or 1
        ):
            step = other.multiple_of or 1
            return all(map(self.admits, range(other.min or 0, other.max + 1, step)))
        return (
            self.one_of is None
            and (other.min or 0) >= (self.min or 0)
            and (self.max is None or (other.max is not None and other.max <= self.max))
            and (other.multiple_of or 1) % (self.multiple_of or 1) == 0
        )

    def meet(self, other: Dim) -> Dim:
        """Return the dim of the same name with the sizes that both allow.

        Raises:
            DescriptorError: no size fits both.
        """
        lower = [d.min for d in (self, other) if d.min is not None]
        upper = [d.max for d in (self, other) if d.max is not None]
        steps = [d.multiple_of for d in (self, other) if d.multiple_of is not None]
        chosen = [set(d.one_of) for d in (self, other) if d.one_of is not None]
        common = tuple(sorted(set.intersection(*chosen))) if chosen else None
        low, high = max(lower, default=None), min(upper, default=None)
        if common == ():
            raise DescriptorError(f"no size is one of {self.one_of} and one of {other.one_of}")
        return Dim(self.name, low, high, math.lcm(*steps) if steps else None, common)

    def hull(self, other: Dim) -> Dim:
        """Return the narrowest dim of the same name with all sizes that either dim allows."""
        for one, rest in ((self, other), (other, self)):
            if one.admits_all(rest):
                return replace(one, name=self.name)
        if self.one_of is not None and other.one_of is not None:
            return Dim(self.name, one_of=tuple({*self.one_of, *other.one_of}))
        low = None if self.min is None or other.min is None else min(self.min, other.min)
        high = None if self.max is None or other.max is None else max(self.max, other.max)
        return Dim(self.name, low, high, math.gcd(_step(self), _step(other)) or None)

    def bounds_of(self, size: int) -> Dim:
        """Return the dim of the same name with only those bounds that a size fits.

        Example:
            >>> Dim("n", min=2, multiple_of=2).bounds_of(7), Dim("n", one_of=(2, 4)).bounds_of(3)
            (Dim('n', min=2), Dim('n'))
        """
        if self.admits(size):
            return self
        if self.one_of is not None:
            return Dim(self.name)
        low = self.min if self.min is not None and self.min <= size else None
        high = self.max if self.max is not None and size <= self.max else None
        step = self.multiple_of if self.multiple_of and size % self.multiple_of == 0 else None
        return Dim(self.name, low, high, step)


_FEW = 4096
"""The maximum number of sizes that are tried one by one."""


def _step(dim: Dim) -> int:
    """Return a number that divides all sizes."""
    return math.gcd(*dim.one_of) if dim.one_of is not None else dim.multiple_of or 1


def _are_sizes(sizes: object) -> bool:
    return isinstance(sizes, Iterable) and all(is_int(size) and size >= 0 for size in sizes)


def _normal_bounds(dim: Dim) -> dict[str, Any]:
    step = dim.multiple_of or 1
    low = -(-(dim.min or 0) // step) * step
    high = None if dim.max is None else dim.max // step * step
    chosen = dim.one_of
    if chosen is not None:
        plain = Dim(dim.name, dim.min, dim.max, dim.multiple_of)
        chosen = tuple(sorted({size for size in chosen if plain.admits(size)}))
        low, high, step = (chosen[0], chosen[-1], 1) if chosen else (1, 0, 1)
    if high is not None and low > high:
        raise DescriptorError(f"{dim!r}: no size is {' and '.join(_bound_texts(dim))}")
    return {
        "min": low or None,
        "max": high,
        "multiple_of": step if step > 1 else None,
        "one_of": chosen,
    }


def _bound_texts(dim: Dim) -> list[str]:
    bounds = {
        "at least": dim.min,
        "at most": dim.max,
        "a multiple of": dim.multiple_of,
        "one of": dim.one_of,
    }
    return [f"{words} {bound}" for words, bound in bounds.items() if bound is not None]


DimSpec: TypeAlias = int | str | Dim | DimExpr | None
"""A dim as it is written in a shape."""

ShapeSpec: TypeAlias = "Sequence[DimSpec | EllipsisType]"
"""A shape as it is written; ``...`` as its first entry stands for any number of dims."""

DimForm: TypeAlias = int | Dim | DimExpr | None
"""A dim in parsed form: fixed, named, computed or open."""


def parse_dim(spec: object) -> DimForm:
    """Return the form of a dim as written in a shape.

    Args:
        spec: a non-negative int; a name; an expression such as ``"2*n+1"``; a ``Dim``; or None for
            an unknown size.

    Raises:
        DescriptorError: the value is something else.

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
        "a dim: expected a non-negative int, a name, an expression, a Dim, or None for unknown, "
        f"got {spec!r} of type {type(spec).__name__}"
    )


def spell_dim(form: DimForm) -> DimSpec:
    """Return the shortest spelling of a dim that ``parse_dim`` converts back."""
    if isinstance(form, DimExpr):
        return form.text
    if isinstance(form, Dim):
        return form if form.is_bounded else form.name
    return form


def _size(size: int) -> int:
    if size < 0:
        raise DescriptorError(
            f"expected a size of 0 or more, got {size}; write None for an unknown dim"
        )
    if size > LARGEST:
        raise DescriptorError(f"expected a size of at most 2**63 - 1, got {size}")
    return size


LARGEST = 2**63 - 1


def _simplify(expression: DimExpr) -> DimForm:
    """Return the form of an expression: an int without names, a ``Dim`` for a single name."""
    if is_dim_name(expression.text):
        return Dim(expression.text)
    if expression.names:
        if expression.sum.most({}) <= 0:
            raise DescriptorError(
                f"{expression.text!r} is never more than 0, and a size can't be negative"
            )
        return expression
    return _size(expression.evaluate({}))
