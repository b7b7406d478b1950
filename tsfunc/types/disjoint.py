"""Disjoint descriptors: no value fits both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tsfunc.errors import DescriptorError
from tsfunc.types.containers import TSDict, TSFields, TSPytree, TSTuple
from tsfunc.types.dims import Dim, DimForm
from tsfunc.types.grammar import Descriptor
from tsfunc.types.meta import MetaTensorType, on_device
from tsfunc.types.single import ANY, Value
from tsfunc.types.sizes import DimExpr

_SizeKey = tuple[int, str]
"""A named size, and the index of its set of descriptors."""


def are_disjoint(left: Mapping[str, Descriptor], right: Mapping[str, Descriptor]) -> bool:
    """True if no call can fit both sets; False if that can't be shown."""
    sizes: list[tuple[DimForm, DimForm]] = []
    disjoint = any(_disjoint(left[name], right[name], sizes) for name in left if name in right)
    return disjoint or _contradict(sizes)


def _disjoint(left: Descriptor, right: Descriptor, sizes: list[tuple[DimForm, DimForm]]) -> bool:
    """True if no value fits both; add the pairs of sizes that would have to be equal."""
    if ANY in (left, right):
        return False
    if left.is_union or right.is_union:
        return all(_all_disjoint(one, other) for one in left.choices for other in right.choices)
    one, other = left.described, right.described
    if one is not None and other is not None:
        return _disjoint_tensors(one, other, sizes)
    if isinstance(left, Value) and isinstance(right, Value):
        return left != right
    return _disjoint_classes(left, right) or _disjoint_parts(left, right, sizes)


def _all_disjoint(left: Descriptor, right: Descriptor) -> bool:
    sizes: list[tuple[DimForm, DimForm]] = []
    return _disjoint(left, right, sizes) or _contradict(sizes)


def _disjoint_classes(left: Descriptor, right: Descriptor) -> bool:
    one, other = left.value_class, right.value_class
    if one is None or other is None:
        return False
    return not left.fits_class(other) and not right.fits_class(one)


def _disjoint_parts(
    left: Descriptor, right: Descriptor, sizes: list[tuple[DimForm, DimForm]]
) -> bool:
    if isinstance(left, TSFields) and isinstance(right, TSFields):
        others = dict(zip(right.names, right.children, strict=True))
        pairs = zip(left.names, left.children, strict=True)
        return any(_disjoint(each, others[name], sizes) for name, each in pairs if name in others)
    if TSDict in (type(left), type(right)) and left.value_class is right.value_class is dict:
        return _disjoint_elements(left.item_types, right.item_types)
    if isinstance(left, TSTuple) and isinstance(right, TSTuple):
        if len(left.elements) != len(right.elements):
            return True
        elements = zip(left.elements, right.elements, strict=True)
        return any(_disjoint(*element, sizes) for element in elements)
    if isinstance(left, TSPytree) and isinstance(right, TSPytree) and left.kind is right.kind:
        if set(left.entries) != set(right.entries):
            return True
        by_entry = dict(zip(right.entries, right.children, strict=True))
        both = zip(left.entries, left.children, strict=True)
        return any(_disjoint(child, by_entry[entry], sizes) for entry, child in both)
    for kind in (list, tuple):
        ones, others_ = left.element_types(kind), right.element_types(kind)
        if ones is not None and others_ is not None:
            return _disjoint_elements(ones, others_)
    return False


def _disjoint_elements(ones: Sequence[Descriptor] | None, others: Any) -> bool:
    """True if elements of the two containers can't have a common type."""
    return any(_all_disjoint(one, other) for one in ones or () for other in others or ())


def _disjoint_tensors(
    left: MetaTensorType, right: MetaTensorType, sizes: list[tuple[DimForm, DimForm]]
) -> bool:
    for name in ("dtype", "requires_grad", "layout"):
        one, other = getattr(left, name), getattr(right, name)
        if one is not None and other is not None and one != other:
            return True
    if left.device is not None and right.device is not None:
        near = on_device(left.device, right.device) or on_device(right.device, left.device)
        if not near:
            return True
    if left.dims is not None:
        others = right.dims_of_rank(len(left.dims))
        ones: Any = left.dims
    else:
        rank = len(right.trailing) if right.dims is None else len(right.dims)
        rank = max(rank, len(left.trailing)) if right.dims is None else rank
        ones, others = left.dims_of_rank(rank), right.dims_of_rank(rank)
    if ones is None or others is None:
        return True
    sizes.extend(zip(ones, others, strict=True))
    return False


def _contradict(pairs: Sequence[tuple[DimForm, DimForm]]) -> bool:
    """True if the sizes of all pairs can't be equal at once."""
    group: dict[_SizeKey, _SizeKey] = {}
    allowed: dict[_SizeKey, Dim] = {}

    def root(key: _SizeKey) -> _SizeKey:
        while key in group:
            key = group[key]
        return key

    def narrowed(key: _SizeKey, dim: Dim) -> bool:
        try:
            allowed[key] = dim.meet(allowed.get(key, dim))
        except DescriptorError:
            return False
        return True

    for pair in pairs:
        roots = []
        for side, form in enumerate(pair):
            if isinstance(form, Dim):
                at = root((side, form.name))
                if not narrowed(at, Dim("n", form.min, form.max, form.multiple_of, form.one_of)):
                    return True
                roots.append(at)
        numbers = [form for form in pair if isinstance(form, int)]
        if len(set(numbers)) > 1:
            return True
        if numbers and roots and not narrowed(roots[0], Dim("n", numbers[0], numbers[0])):
            return True
        if len(roots) == 2 and roots[0] != roots[1]:
            group[roots[1]] = roots[0]
            if roots[1] in allowed and not narrowed(roots[0], allowed.pop(roots[1])):
                return True
    sizes_by_key = {
        key: dim.max
        for key in [*group, *allowed]
        if (dim := allowed.get(root(key))) is not None and (dim.min or 0) == dim.max
    }
    return any(_differ(pair, sizes_by_key) for pair in pairs)


def _differ(pair: tuple[DimForm, DimForm], sizes_by_key: Mapping[_SizeKey, int | None]) -> bool:
    """True if both sizes are known and differ."""
    values: list[int | None] = []
    for side, form in enumerate(pair):
        if isinstance(form, DimExpr):
            sizes = {name: sizes_by_key.get((side, name)) for name in form.names}
            if any(size is None for size in sizes.values()):
                return False
            try:
                values.append(form.evaluate({name: size or 0 for name, size in sizes.items()}))
            except ZeroDivisionError:
                return True
        elif isinstance(form, Dim):
            values.append(sizes_by_key.get((side, form.name)))
        else:
            values.append(form)
    return None not in values and values[0] != values[1]
