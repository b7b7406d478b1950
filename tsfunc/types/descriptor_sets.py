"""``Descriptors``: the descriptors of a function's parameters, as one value.

Descriptors can be inferred from examples, widened by further examples, joined, compared, split into
narrower ones, printed, and parsed.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.errors import DescriptorError
from tsfunc.types.classes import class_type
from tsfunc.types.dims import Dim, DimForm, DimSpec, parse_dim, spell_dim
from tsfunc.types.grammar import Descriptor
from tsfunc.types.lattice import is_below, join_pairs, ordered_intersection
from tsfunc.types.meta import MetaTensorType, narrower_size, split_by, substitute, wider_of
from tsfunc.types.reading import as_descriptor, parse_descriptor
from tsfunc.types.single import ANY, TSTensor, literal
from tsfunc.types.sizes import DimExpr
from tsfunc.types.values import is_plain_value
from tsfunc.user_code import folded_class, folding


@folded_class
class Descriptors(Mapping[str, Descriptor]):
    """The descriptors of a function's parameters, which ``specialize`` accepts like a dict.

    Args:
        described: parameter name to descriptor, as for ``specialize``.

    Raises:
        DescriptorError: a key can't be the name of a parameter, or a descriptor is malformed.

    ``d <= e`` if every call that fits ``d`` fits ``e``. A parameter without a descriptor is open.

    Example:
        >>> d = Descriptors({"x": MetaTensorType(["n", 64], dtype=torch.float32), "train": False})
        >>> print(d)
        x: f32[n, 64]
        train: Literal[False]
        >>> Descriptors.parse(str(d)) == d
        True
        >>> d <= Descriptors({"x": torch.Tensor})
        True

    Source: the widening and splitting of the TorchScript Input Descriptor proposal.
    """

    __slots__ = ("_described",)

    def __init__(self, described: Mapping[str, object]) -> None:
        if not isinstance(described, Mapping):
            raise DescriptorError(
                f"Descriptors: expected a dict of parameter name to descriptor, got {described!r} "
                f"of type {type(described).__name__}"
            )
        for name in described:
            if not isinstance(name, str) or not name.isidentifier():
                raise DescriptorError(f"Descriptors: expected names of parameters, got {name!r}")
        self._described = {
            name: as_descriptor(descriptor, name) for name, descriptor in described.items()
        }

    def __getitem__(self, name: str) -> Descriptor:
        return self._described[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Descriptors) and self._described == other._described

    def __hash__(self) -> int:
        return hash(frozenset(self._described.items()))

    def __str__(self) -> str:
        return "\n".join(f"{name}: {descriptor}" for name, descriptor in self._described.items())

    def __repr__(self) -> str:
        return f"Descriptors.parse({', '.join(str(self).splitlines())!r})"

    @classmethod
    def parse(cls, text: str, scope: Mapping[str, object] | None = None) -> Descriptors:
        """Parse the text that ``str`` returns.

        Args:
            text: one ``name: descriptor`` per line, or several separated by commas.
            scope: the objects that the names of classes in the text refer to, see
                ``tsfunc.types.parse``.

        Raises:
            DescriptorError: the text is not a list of descriptors, or names a parameter twice.

        Example:
            >>> Descriptors.parse("x: f32[n, 64] cpu, y: List[int]")["y"]
            TSList(element=TSPrimitiveType(name='int'))
        """
        descriptors: dict[str, object] = {}
        for line in text.splitlines():
            for name, rest in _parameters(line):
                if name in descriptors:
                    raise DescriptorError(f"{text!r} describes {name!r} twice")
                descriptors[name] = parse_descriptor(rest, scope)
        return cls(descriptors)

    def __le__(self, other: Mapping[str, object]) -> bool:
        wider = _as_set(other)
        return is_below([self.get(name, ANY) for name in wider], wider.values())

    def __lt__(self, other: Mapping[str, object]) -> bool:
        return self <= other and not _as_set(other) <= self

    def __ge__(self, other: Mapping[str, object]) -> bool:
        return _as_set(other) <= self

    def __gt__(self, other: Mapping[str, object]) -> bool:
        return _as_set(other) < self

    def join(self, other: Mapping[str, object]) -> Descriptors:
        """Return the least descriptors that every call of either fits.

        Sizes that differ get a name; sizes that agree in all examples get the same name. The join
        of values that differ is their type.

        Example:
            >>> d, e = (Descriptors.parse(f"x: f32[{n}, 64], y: f32[{n}], k: Literal[{n}]")
            ...         for n in (3, 5))
            >>> print(d.join(e))
            x: f32[n, 64]
            y: f32[n]
            k: int
        """
        right = _as_set(other)
        if (wider := wider_of(self, right, self <= right, right <= self)) is not None:
            return wider
        names = ordered_intersection(self, right)
        joined = join_pairs([(self[name], right[name]) for name in names])
        pairs = zip(names, joined, strict=True)
        return Descriptors({name: descriptor for name, descriptor in pairs if descriptor != ANY})

    def widen(self, example: Mapping[str, object]) -> Descriptors:
        """Return the least descriptors above these that another example fits.

        Args:
            example: parameter name to value.

        Example:
            >>> print(Descriptors.parse("x: f32[3] cpu").widen({"x": torch.ones(4)}))
            x: f32[n] cpu
        """
        return self.join(infer_descriptors(example))

    def split(self, **alternatives: Iterable[Any]) -> tuple[Descriptors, ...]:
        """Return narrower descriptors, each for a separate program.

        Args:
            alternatives: by the name of a parameter its narrower descriptors or values; by the
                name of a size its sizes, which can be ``Dim`` with bounds. Several names give all
                combinations.

        Raises:
            DescriptorError: there is no such name, or an alternative is not narrower.

        Example:
            >>> d = Descriptors.parse("x: tensor[n, 3], train: bool")
            >>> for each in d.split(n=[1, Dim("n", min=2)], train=[True]):
            ...     print(", ".join(str(each).splitlines()))
            x: tensor[1, 3], train: Literal[True]
            x: tensor[n>=2, 3], train: Literal[True]
        """
        return split_by(self, alternatives, Descriptors._narrowed)

    def _narrowed(self, name: str, choice: Any) -> Descriptors:
        if name in self:
            narrower = Descriptors({**self, name: choice})
        else:
            narrower = self._with_size(name, choice)
        if not narrower <= self:
            had = self.get(name, name)
            raise DescriptorError(
                f"split({name}=...): {narrower.get(name, choice)} is not narrower than {had}"
            )
        return narrower

    def _with_size(self, name: str, size: Any) -> Descriptors:
        names = {
            dim.name
            for descriptor in self.values()
            for dim in descriptor.dims
            if isinstance(dim, Dim)
        }
        if name not in names:
            choices = ", ".join([*self, *sorted(names)]) or "none"
            raise DescriptorError(
                f"split({name}=...): there is no parameter and no size {name!r}; there are: "
                f"{choices}"
            )
        form = narrower_size(name, size)
        return Descriptors(
            {
                parameter: descriptor.map_tensors(lambda meta: substitute(meta, name, form))
                for parameter, descriptor in self.items()
            }
        )


def _parameters(line: str) -> Iterator[tuple[str, str]]:
    """Yield the parameters of a line and the texts of their descriptors."""
    starts, depth, quote = [], 0, ""
    for i, character in enumerate(line):
        if quote:
            quote = "" if character == quote and line[i - 1] != "\\" else quote
        elif character in "\"'":
            quote = character
        elif character in "[({":
            depth += 1
        elif character in "])}":
            depth -= 1
        elif character == "," and depth == 0:
            starts.append(i)
    for start, stop in itertools.pairwise([-1, *starts, len(line)]):
        part = line[start + 1 : stop]
        if not part.strip():
            continue
        match = re.match(r"\s*([^\W\d]\w*)\s*:(.*)", part)
        if match is None:
            raise DescriptorError(
                f"expected a descriptor of a parameter, such as `name: f32[n]`, got "
                f"{part.strip()!r}"
            )
        yield match[1], match[2]


def _as_set(written: Mapping[str, object]) -> Descriptors:
    return written if isinstance(written, Descriptors) else Descriptors(written)


# --- from examples


@folding()
def infer_descriptors(*examples: Mapping[str, object]) -> Descriptors:
    """Return the narrowest descriptors that all examples of a call fit.

    Tensors are described by the dtype, shape, device, requires_grad and layout that agree in all
    examples. Sizes that differ get a name; sizes that are equal in every example get the same name.
    Other values that differ are described by their type. A parameter that is missing in an example
    has its default there, and is open.

    Args:
        examples: parameter name to value; at least one.

    Returns:
        The descriptors of the parameters, which :func:`tsfunc.specialize` accepts.

    Raises:
        DescriptorError: no example was given, or one is not a dict of names.

    Example:
        >>> print(infer_descriptors(
        ...     {"x": torch.ones(3, 64), "y": torch.ones(3), "train": True},
        ...     {"x": torch.ones(5, 64), "y": torch.ones(5), "train": True},
        ... ))
        x: f32[n, 64] cpu no_grad strided
        y: f32[n] cpu no_grad strided
        train: Literal[True]

    Source: the extraction of descriptors in the TorchScript Input Descriptor proposal.
    """
    if not examples:
        raise DescriptorError("infer_descriptors: expected at least one example, got none")
    sets = [_of_example(example) for example in examples]
    joined = sets[0]
    for other in sets[1:]:
        joined = joined.join(other)
    return joined


def _of_example(example: Any) -> Descriptors:
    if not isinstance(example, Mapping):
        raise DescriptorError(
            f"infer_descriptors: expected each example to be a dict of parameter name to value, "
            f"got {example!r} of type {type(example).__name__}"
        )
    return Descriptors({name: descriptor_of(value) for name, value in example.items()})


def descriptor_of(value: Any) -> Descriptor:
    """Return the descriptor of a value: tensors by their metadata, plain values as literals.

    Other objects are described only by their class.
    """

    def leaf(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return TSTensor(meta=MetaTensorType.of(part))
        return literal(part) if is_plain_value(part) else class_type(type(part))

    return as_descriptor(pytrees.tree_map(leaf, value))


# --- with other sizes, and as Python code


def with_dims(descriptor: Descriptor, dims: Mapping[str, DimSpec]) -> Descriptor:
    """Return a descriptor with some named sizes replaced.

    Args:
        descriptor: the descriptor of one parameter.
        dims: name to the new size; None makes the size open, and all sizes computed from it.

    Example:
        >>> from tsfunc import Dim, MetaTensorType
        >>> from tsfunc.types import as_descriptor
        >>> print(with_dims(as_descriptor(MetaTensorType(["n", "2*n", 3])), {"n": Dim("n", min=5)}))
        tensor[n>=5, 2 * n, 3]
        >>> print(with_dims(as_descriptor(MetaTensorType(["n", "n+1"])), {"n": "2*m"}))
        tensor[2 * m, 2 * m + 1]
    """

    def named(meta: MetaTensorType) -> MetaTensorType:
        if meta.shape is None:
            return meta
        shape = tuple(
            size if size is ... else spell_dim(_size_of_form(parse_dim(size), dims))
            for size in meta.shape
        )
        return dataclasses.replace(meta, shape=shape)

    return descriptor.map_tensors(named)


def _size_of_form(form: DimForm, dims: Mapping[str, DimSpec]) -> DimForm:
    match form:
        case Dim(name):
            return parse_dim(dims[name]) if name in dims else form
        case DimExpr():
            forms = {name: parse_dim(dims.get(name, name)) for name in form.names}
            if None in forms.values():
                return None
            texts = {
                name: each.name if isinstance(each, Dim) else str(each)
                for name, each in forms.items()
            }
            return parse_dim(form.substitute(texts))
        case _:
            return form
