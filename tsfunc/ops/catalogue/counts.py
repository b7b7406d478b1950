"""The number of operators in each category, in the installed torch and in 2020."""

from __future__ import annotations

from collections import Counter
from typing import Final

from tsfunc.ops.catalogue.lookup import category_of
from tsfunc.ops.catalogue.reader import reader
from tsfunc.ops.registry import Category

# E. Z. Yang, "A brief taxonomy of PyTorch operators by shape behavior", May 2020: all 1364
# operators of that time, including variants. The category Other did not exist.
CENSUS_2020: Final = {
    Category.TENSOR_ITERATOR: 505,
    Category.FIXED: 273,
    Category.N_DIMENSIONAL: 107,
    Category.COMPOSITE: 95,
    Category.BATCHED: 94,
    Category.FACTORY: 90,
    Category.TRIVIAL: 59,
    Category.IDENTITY: 42,
    Category.SPARSE: 40,
    Category.FEATURE_BATCHED: 19,
    Category.DYNAMIC: 15,
    Category.VARIADIC: 14,
    Category.FLATTEN: 11,
}


def census() -> Counter[Category]:
    """Return the number of ATen overloads of the installed torch in each category.

    Example:
        >>> import tsfunc
        >>> census = tsfunc.ops.census()
        >>> census[tsfunc.ops.Category.FACTORY] > 100, census.total() > 3000
        (True, True)
    """
    return Counter(filter(None, map(category_of, reader().names("aten"))))


def operators(category: Category | str | None = None) -> list[str]:
    """Return the names of all ATen overloads of the installed torch, or those of one category.

    Args:
        category: a :class:`Category` or its name, ``"Flatten"``.

    Raises:
        ValueError: there is no category of this name.

    Example:
        >>> import tsfunc
        >>> "aten::take" in tsfunc.ops.operators("Flatten")
        True
    """
    names = reader().names("aten")
    if category is None:
        return names
    wanted = Category(category)
    return [name for name in names if category_of(name) is wanted]


def census_rows() -> list[tuple[str, int, int | None]]:
    """Return each category's name, its count and its count in 2020 (or None), largest first."""
    now = census()
    ordered = sorted(Category, key=lambda category: -now[category])
    return [(category.value, now[category], CENSUS_2020.get(category)) for category in ordered]
