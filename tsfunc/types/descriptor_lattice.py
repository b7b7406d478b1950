"""The order of descriptors: which promises more, and the least that two promise.

NOTE [the order of descriptors]
``d <= e`` if every call that keeps ``d`` keeps ``e``. `Anything` is above all.

- What is promised of a tensor less is above what is promised of it more; names of sizes mean here
  what they mean in types (NOTE [names of sizes]). Ranks that differ leave the last dims.
- A value is below its class, and below a description of it if it is a tensor. Two values of one
  class are joined by the class: ``3`` and ``4`` by ``int``.
- A container with exactly these children is below one of any number: ``[X, X]`` below ``List[X]``.
- A union is above each of its alternatives. No join makes a new one, but for None.

A join is above both, does not mind their order, and is the least that has no bounds which neither
has: of the sizes 3 and 4 it is a name, not a name from 3 to 4. Bounds are written, never inferred.
Of two that mean the same it is the one whose text sorts first; of one below the other, the other.

NOTE [joins of several]
``a.join(b).join(c)`` and ``a.join(b.join(c))`` mean the same where no bounds, expressions and
written unions are in them; the names in them may differ. No join that is of use does more:

- Names. ``[n, 3]`` with ``[7, 4]`` keeps its name, and the other dim has a new one: ``[n, m]``. To
  join it with ``[7, n]`` too changes nothing, which is below. ``[7, 4]`` is itself below
  ``[7, n]``, so that in the other order the join is that of ``[n, 3]`` and ``[7, n]`` alone: it has
  ``n`` in the first dim. By the same with ``[8, 3]`` it has ``n`` in the second one.
- Bounds. The sizes 3 and 4 keep ``n>=2``, so that ``n>=2`` is its join with either. Of the two of
  them alone the join is any size, and that with ``n>=2`` as well.
- Expressions. ``[2, 4]`` and ``[3, 9]`` are ``[n, n**2]``, and ``[n, 5*n-6]``: none is the least.
- Unions. ``int | str`` is above 3 and ``"a"``, of which the join is `Any`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tsfunc.errors import DescriptorError
from tsfunc.types.descriptor_facts import (
    SINGLE,
    class_of,
    dims_in,
    elements_of,
    entries_of,
    fits_class,
    items_of,
    keys_of,
    map_metas,
    meta_of,
    names_of,
)
from tsfunc.types.descriptors import (
    Anything,
    Descriptor,
    DictOf,
    FieldsOf,
    InstanceOf,
    ListOf,
    NamedOf,
    Nested,
    OfType,
    OneOf,
    TensorOf,
    TupleOf,
    Value,
)
from tsfunc.types.dims import DimForm
from tsfunc.types.grammar import assert_never
from tsfunc.types.lattice import (
    JoinSizes,
    common_class,
    counting,
    describes_less,
    is_subtype,
    join_descriptions,
    one_sided,
    same_size,
)
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.sizes import Generalization, Instance, SideForm
from tsfunc.types.values import same_keys


def is_below(narrower: Descriptor, wider: Descriptor, sizes: Instance) -> bool:
    """Whether all that `wider` promises follows from `narrower`, as far as names allow so far."""
    if isinstance(narrower, OneOf):
        return all(is_below(each, wider, sizes) for each in narrower.alternatives)
    match wider:
        case Anything():
            return True
        case OneOf(alternatives):
            return any(_is_below_for(narrower, each, sizes) for each in alternatives)
        case MetaTensorType():
            meta = meta_of(narrower)
            return meta is not None and describes_less(meta, wider, sizes)
        case TensorOf(cls, meta):
            own = meta_of(narrower)
            kept = own is not None and describes_less(own, meta, sizes)
            return kept and issubclass(class_of(narrower) or object, cls)
        case InstanceOf(cls):
            return fits_class(narrower, cls)
        case OfType(type_):
            return isinstance(narrower, OfType) and is_subtype(narrower.type, type_)
        case Value():
            return narrower == wider
        case ListOf(element):
            return _all_below(elements_of(narrower, list), element, sizes)
        case TupleOf(element):
            return _all_below(elements_of(narrower, tuple), element, sizes)
        case DictOf(key, item):
            if isinstance(narrower, DictOf):
                return is_below(narrower.key, key, sizes) and is_below(narrower.item, item, sizes)
            keys = [Value(entry) for entry in entries_of(narrower, dict)]
            items = elements_of(narrower, dict)
            return _all_below(keys, key, sizes) and _all_below(items, item, sizes)
        case Nested(kind, entries, children):
            return _is_nested_below(narrower, kind, entries, children, sizes)
        case NamedOf(names, children):
            return names_of(narrower) == names and _pairs_below(
                elements_of(narrower, tuple), children, sizes
            )
        case FieldsOf(cls, names, children):
            return fits_class(narrower, cls) and all(
                _field_below(narrower, name, child, sizes)
                for name, child in zip(names, children, strict=True)
            )
        case _:
            assert_never(wider)


def _is_below_for(narrower: Descriptor, wider: Descriptor, sizes: Instance) -> bool:
    """Like `is_below`, with what names mean taken back where it is not."""
    trial = sizes.copy()
    if not is_below(narrower, wider, trial):
        return False
    sizes.adopt(trial)
    return True


def _all_below(narrower: Iterable[Descriptor] | None, wider: Descriptor, sizes: Instance) -> bool:
    return narrower is not None and all(is_below(each, wider, sizes) for each in narrower)


def _pairs_below(
    ones: Sequence[Descriptor] | None, others: Sequence[Descriptor], sizes: Instance
) -> bool:
    return (
        ones is not None
        and len(ones) == len(others)
        and all(is_below(*pair, sizes) for pair in zip(ones, others, strict=True))
    )


def _is_nested_below(
    narrower: Descriptor, kind: type, entries: Sequence[Any], children: Any, sizes: Instance
) -> bool:
    if isinstance(narrower, NamedOf):
        return kind is tuple and _pairs_below(narrower.children, children, sizes)
    if not isinstance(narrower, Nested):
        return False
    if kind is dict and narrower.kind is dict:
        own = dict(zip(narrower.entries, narrower.children, strict=True))
        return same_keys(own, entries) and _pairs_below([own[e] for e in entries], children, sizes)
    same_kind = narrower.kind is kind or (kind is tuple and issubclass(narrower.kind, tuple))
    return (
        same_kind
        and narrower.entries == tuple(entries)
        and _pairs_below(narrower.children, children, sizes)
    )


def _field_below(narrower: Descriptor, name: str, wider: Descriptor, sizes: Instance) -> bool:
    if isinstance(narrower, FieldsOf) and name in narrower.names:
        return is_below(narrower.children[narrower.names.index(name)], wider, sizes)
    return wider == Anything()


def is_below_alone(narrower: Descriptor, wider: Descriptor) -> bool:
    """Whether all that `wider` promises follows from `narrower`, with no others beside them."""
    sizes = Instance(dims_in(narrower))
    return is_below(narrower, wider, sizes) and sizes.settled()


# --- join


def join_alone(left: MetaTensorType, right: MetaTensorType) -> MetaTensorType:
    """The join of two descriptions of tensors."""
    if not isinstance(right, MetaTensorType):
        raise DescriptorError(
            f"join: expected a MetaTensorType, got {right!r} of type {type(right).__name__}"
        )
    below, above = is_below_alone(left, right), is_below_alone(right, left)
    if below and above:
        return min(left, right, key=str)
    if below or above:
        return right if below else left
    (joined,) = join_pairs([(left, right)])
    assert isinstance(joined, MetaTensorType)
    return joined


def join_pairs(
    pairs: Sequence[tuple[Descriptor, Descriptor]],
) -> list[Descriptor]:
    """The join of each pair; names of sizes hold in all of them."""
    sizes = Generalization(
        (dim for left, _ in pairs for dim in dims_in(left)),
        (dim for _, right in pairs for dim in dims_in(right)),
        always_named=True,
    )
    for pair in pairs:
        _join(*pair, counting(sizes))
    return [_join(*pair, sizes.size) for pair in pairs]


def _join(left: Descriptor, right: Descriptor, size: JoinSizes) -> Descriptor:
    if isinstance(left, OneOf) or isinstance(right, OneOf) or Value(None) in (left, right):
        return _join_unions(left, right, size)
    one, other = meta_of(left), meta_of(right)
    if one is not None and other is not None and left != right:
        return _join_tensors(left, right, join_descriptions(one, other, size))
    match left, right:
        case (MetaTensorType(), _) if one is not None and other is not None:
            return join_descriptions(one, other, size)
        case TensorOf(cls), _ if one is not None and other is not None:
            return TensorOf(cls, join_descriptions(one, other, size))
        case _ if left == right and not dims_in(left):
            return left
        case Nested(kind, entries, ones), Nested(other_kind, others_entries, others) if (
            kind is other_kind and _same_entries(kind, entries, others_entries)
        ):
            own, by_entry = (
                dict(zip(entries, ones, strict=True)),
                dict(zip(others_entries, others, strict=True)),
            )
            entries = common_order(entries, others_entries)
            pairs = [(own[entry], by_entry[entry]) for entry in entries]
            return Nested(kind, entries, tuple(_join(*pair, size) for pair in pairs))
        case FieldsOf(cls, names, ones), FieldsOf(other_cls, other_names, others) if (
            cls is other_cls and names == other_names
        ):
            return FieldsOf(cls, names, _join_each(ones, others, size))
        case _:
            return _join_containers(left, right, size)


def common_order(ones: Iterable[Any], others: Iterable[Any]) -> tuple[Any, ...]:
    """What is in both, in the order that it has in both; sorted where they differ in that."""
    one, other = list(ones), list(others)
    left, right = [x for x in one if x in other], [x for x in other if x in one]
    return tuple(left if left == right else sorted(left, key=lambda x: (type(x).__name__, repr(x))))


def _same_entries(kind: type, ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return same_keys(ones, others) if kind is dict else tuple(ones) == tuple(others)


def _join_each(
    ones: Sequence[Descriptor], others: Sequence[Descriptor], size: JoinSizes
) -> tuple[Descriptor, ...]:
    return tuple(_join(*pair, size) for pair in zip(ones, others, strict=True))


def _join_tensors(left: Descriptor, right: Descriptor, meta: MetaTensorType) -> Descriptor:
    classes = [
        torch.Tensor if isinstance(each, Value) else class_of(each) for each in (left, right)
    ]
    cls = common_class(classes[0] or torch.Tensor, classes[1] or torch.Tensor) or torch.Tensor
    if cls is torch.Tensor:
        return meta
    return InstanceOf(cls) if meta == MetaTensorType() else TensorOf(cls, meta)


def _join_unions(left: Descriptor, right: Descriptor, size: JoinSizes) -> Descriptor:
    """``None`` beside one alternative is told apart; a union that was written stays one."""
    ones, others = _alternatives(left), _alternatives(right)
    none = (Value(None),) if Value(None) in (*_all(left), *_all(right)) else ()
    if len(ones) <= 1 and len(others) <= 1:
        rest = [_join(ones[0], others[0], size)] if ones and others else [*ones, *others]
        if not ones or not others:
            rest = [_one_sided(each, bool(ones), size) for each in rest]
    else:
        rest = [map_metas(each, _without_names) for each in (*ones, *others)]
    if any(each == Anything() for each in rest):
        return Anything()
    least: list[Descriptor] = []
    for each in rest:
        if not any(is_below_alone(each, other) for other in least):
            least = [*(other for other in least if not is_below_alone(other, each)), each]
    found = (*sorted(least, key=str), *none)
    return found[0] if len(found) == 1 else OneOf(found)


def _all(descriptor: Descriptor) -> tuple[Descriptor, ...]:
    return descriptor.alternatives if isinstance(descriptor, OneOf) else (descriptor,)


def _alternatives(descriptor: Descriptor) -> list[Descriptor]:
    return [each for each in _all(descriptor) if each != Value(None)]


def _without_names(meta: MetaTensorType) -> MetaTensorType:
    """In a union a name may mean a size of one alternative alone."""

    def opened(size: SideForm, _: SideForm) -> DimForm:
        return size if isinstance(size, int) else None

    return join_descriptions(meta, meta, opened)


def _join_containers(left: Descriptor, right: Descriptor, size: JoinSizes) -> Descriptor:
    for kind, made in ((list, ListOf), (tuple, TupleOf)):
        ones, others = elements_of(left, kind), elements_of(right, kind)
        if ones is not None and others is not None:
            names = names_of(left)
            if len(ones) == len(others) and made is TupleOf and _is_fixed(left, right):
                joined = _join_each(ones, others, size)
                if names is not None and names == names_of(right):
                    return NamedOf(names, joined)
                return Nested(tuple, tuple(range(len(joined))), joined)
            return made(_together([*ones], [*others], size))
    if class_of(left) is dict and class_of(right) is dict:
        keys = _together(keys_of(left), keys_of(right), size)
        return DictOf(keys, _together(items_of(left), items_of(right), size))
    return _join_classes(left, right)


def _is_fixed(*descriptors: Descriptor) -> bool:
    return not any(isinstance(each, TupleOf) for each in descriptors)


def _together(ones: list[Descriptor], others: list[Descriptor], size: JoinSizes) -> Descriptor:
    """One descriptor for all elements of two containers."""
    if not ones and not others:
        return Anything()
    one = functools.reduce(_join_parts, ones) if ones else None
    other = functools.reduce(_join_parts, others) if others else None
    if one is None or other is None:
        alone = one or other
        assert alone is not None
        return _one_sided(alone, other is None, size)
    return _join(one, other, size)


def _join_parts(left: Descriptor, right: Descriptor) -> Descriptor:
    """Join two parts of one descriptor, in which a name means one size."""
    return _join(left, right, same_size)


def _one_sided(descriptor: Descriptor, is_left: bool, size: JoinSizes) -> Descriptor:
    """Return the part of a join that only one of the two descriptors has."""
    return map_metas(descriptor, lambda meta: one_sided(meta, is_left, size))


def _join_classes(left: Descriptor, right: Descriptor) -> Descriptor:
    one, other = class_of(left), class_of(right)
    if isinstance(left, OfType) and left == right:
        return left
    if one is None or other is None:
        return Anything()
    for cls in SINGLE:
        if fits_class(left, cls) or fits_class(right, cls):
            return (
                InstanceOf(cls) if fits_class(left, cls) and fits_class(right, cls) else Anything()
            )
    if one is other:
        return InstanceOf(one)
    found = common_class(one, other)
    return Anything() if found is None else InstanceOf(found)
