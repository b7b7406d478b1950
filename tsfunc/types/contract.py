"""The contract of a function: its descriptors, compiled to the check that runs at every call.

A function can have several sets of descriptors. The narrower of two sets comes first, so that a
call takes the most specific set. If a call can fit two sets and neither is narrower, the definition
raises an error. An empty list fits lists of any element type, and takes the first such set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tsfunc.errors import DescriptorError, DescriptorViolation
from tsfunc.types.check_codegen import CallCheck, generate_check
from tsfunc.types.check_context import Mismatch
from tsfunc.types.checker import TypeCheck
from tsfunc.types.descriptor_sets import Descriptors
from tsfunc.types.dims import Dim, DimForm
from tsfunc.types.disjoint import are_disjoint
from tsfunc.types.grammar import Descriptor
from tsfunc.types.meta import MetaTensorType
from tsfunc.types.reading import as_descriptor
from tsfunc.types.single import ANY, TSTensor
from tsfunc.types.sizes import DimExpr, solved_for
from tsfunc.types.values import Path
from tsfunc.user_code import folding

_ABSENT = object()


class Bindings:
    """The sizes and tensors of a call that fits its descriptors.

    Attributes:
        sizes: the size of each named dim.
        leaves: the metadata that describes each tensor, by the tensor's path.
    """

    __slots__ = ("_alternatives", "_leaves", "sizes")

    def __init__(
        self,
        sizes: Mapping[str, int],
        leaves: Mapping[Path, MetaTensorType] | Callable[[], Mapping[Path, MetaTensorType]],
        alternatives: Callable[[Path], set[MetaTensorType | None]] | None = None,
    ) -> None:
        self.sizes = sizes
        self._leaves = leaves
        self._alternatives = alternatives

    @property
    def leaves(self) -> Mapping[Path, MetaTensorType]:
        if callable(self._leaves):  # computed on demand: most calls do not need the leaves
            self._leaves = self._leaves()
        return self._leaves

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Bindings):
            return NotImplemented
        return self.sizes == other.sizes and self.leaves == other.leaves

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Bindings(sizes={dict(self.sizes)!r}, leaves={dict(self.leaves)!r})"

    def dims(self, path: Path) -> tuple[DimForm, ...] | None:
        """Return the form of each dim of the tensor at ``path``.

        An int is fixed, a ``Dim`` named, a ``DimExpr`` computed from named sizes, and None open.
        The result is None if the rank is not described: all dims are open. If it has fewer entries
        than the tensor has dims, they describe the last dims.
        """
        alternatives = None if self._alternatives is None else self._alternatives(path)
        if (
            alternatives is not None and len(alternatives) < 2
        ):  # no need to know which one the call has chosen
            meta = next(iter(alternatives), None)
        else:
            meta = self.leaves.get(path)
        if meta is None or meta.shape is None:
            return None
        return meta.trailing if meta.dims is None else meta.dims


@dataclass(frozen=True, eq=False)
class Contract:
    """The descriptors of a function, ready to check calls; ``compile_descriptors`` makes it.

    Attributes:
        call: the function with its parameters, as error messages write it.
        descriptors: the descriptor of each described parameter.
        dims: each named dim with all of its bounds in all descriptors.
    """

    call: str
    descriptors: Mapping[str, Descriptor]
    dims: Mapping[str, Dim]
    _defaults: Mapping[str, object] = field(repr=False)
    _fast_check: CallCheck | None = field(repr=False, default=None)

    def check(self, arguments: Mapping[str, object]) -> Bindings:
        """Check the arguments of a call.

        Args:
            arguments: parameter name to value. A missing parameter has its default.

        Raises:
            DescriptorViolation: the call breaks the descriptors; the message lists every mismatch
                by its path, as expected and got.
        """
        fast_check = self._fast_check
        sizes = None if fast_check is None else fast_check(arguments)
        if sizes is not None:
            return Bindings(sizes, lambda: self._check_fully(arguments).leaves, self._alternatives)
        context = self._check_fully(arguments)
        return Bindings(context.sizes, context.leaves)

    def is_kept(self, arguments: Mapping[str, object]) -> bool:
        """True if a call fits, by a fast check if there is one, which can miss a fit."""
        if self._fast_check is not None:
            return self._fast_check(arguments) is not None
        try:
            self._check_fully(arguments)
        except DescriptorViolation:
            return False
        return True

    def _check_fully(self, arguments: Mapping[str, object]) -> TypeCheck:
        """Check a call in full, and find every mismatch.

        Raises:
            DescriptorViolation: there is a mismatch.
        """
        context = TypeCheck(arguments, self.dims)
        for name, descriptor in self.descriptors.items():
            value = arguments.get(name, self._defaults.get(name, _ABSENT))
            if value is not _ABSENT:
                descriptor.check(value, (name,), context)
            elif ANY not in descriptor.choices:
                expected = "an argument, which its descriptor describes"
                context.fail((name,), "", expected, "none")
        mismatches = context.finish()
        if mismatches:
            raise self._violation(mismatches)
        return context

    def _alternatives(self, path: Path) -> set[MetaTensorType | None]:
        """Return the metadata that can describe a tensor at ``path``; None in it leaves it open."""
        if not path or path[0] not in self.descriptors:
            return set()
        return self.descriptors[path[0]].governing(path[1:])

    def _violation(self, mismatches: Sequence[Mismatch]) -> DescriptorViolation:
        return DescriptorViolation(
            f"{self.call}: the call breaks its descriptors:\n"
            + "".join(f"  {mismatch}\n" for mismatch in mismatches)
            + "Pass arguments that fit, or give descriptors that these arguments fit "
            "(None leaves an attribute open)."
        )


@folding()
def compile_descriptors(
    descriptors: Mapping[str, object], signature: inspect.Signature, *, name: str = "f"
) -> Contract:
    """Compile the descriptors of a function's parameters.

    Args:
        descriptors: parameter name to descriptor; see ``as_descriptor``. A parameter without a
            descriptor is open.
        signature: the signature of the function.
        name: the name of the function, for error messages.

    Raises:
        DescriptorError: a parameter does not exist, a descriptor is malformed, the bounds of a
            named dim contradict each other, or an expression has a name that no shape binds.

    Example:
        >>> import torch
        >>> def forward(x, flag): ...
        >>> described = {"x": MetaTensorType(["n", 200]), "flag": True}
        >>> contract = compile_descriptors(described, inspect.signature(forward), name="forward")
        >>> contract.check({"x": torch.ones(100, 200), "flag": True}).sizes
        {'n': 100}
        >>> contract.check({"x": torch.ones(100, 100), "flag": 1})
        Traceback (most recent call last):
        ...
        tsfunc.errors.DescriptorViolation: forward(x, flag): the call breaks its descriptors:
          x.shape[1]: expected 200, got 100
          flag: expected the value True (bool), got 1 (int)
        Pass arguments that fit, or give descriptors that these arguments fit (None leaves an \
attribute open).

    Source: the checking of calls in the TorchScript Input Descriptor proposal.
    """
    if not isinstance(signature, inspect.Signature):
        raise TypeError(f"compile_descriptors: expected an inspect.Signature, got {signature!r}.")
    call = f"{name}({', '.join(signature.parameters)})"
    try:
        read, dims = _read_descriptors(descriptors, signature)
    except DescriptorError as error:
        raise DescriptorError(f"descriptors of {call}: {error}") from None
    defaults = {
        parameter: default
        for parameter in read
        if (default := _default(signature.parameters[parameter])) is not _ABSENT
    }
    return Contract(call, read, dims, defaults, generate_check(read, signature))


def _read_descriptors(
    descriptors: Mapping[str, object], signature: inspect.Signature
) -> tuple[dict[str, Descriptor], dict[str, Dim]]:
    """Return the descriptors, in the order of the parameters, and the named dims in them."""
    _require_parameters(descriptors, signature)
    read = {
        parameter: as_descriptor(descriptors[parameter], parameter)
        for parameter in signature.parameters
        if parameter in descriptors
    }
    for parameter, descriptor in read.items():
        _require_kind(signature, signature.parameters[parameter], descriptor)
    leaves = [leaf for p, descriptor in read.items() for leaf in tensor_leaves(descriptor, p)]
    dims = _named_dims(leaves)
    _solve(leaves, dims)
    _require_sizes(leaves, dims)
    return read, dims


def _require_parameters(descriptors: object, signature: inspect.Signature) -> None:
    if not isinstance(descriptors, Mapping):
        raise DescriptorError(
            "expected a dict of parameter name to descriptor, "
            f"got {descriptors!r} of type {type(descriptors).__name__}"
        )
    unknown = [key for key in descriptors if key not in signature.parameters]
    if unknown:
        have = ", ".join(signature.parameters) or "none"
        raise DescriptorError(
            f"there is no parameter {', '.join(map(repr, unknown))}; the parameters are: {have}"
        )


_STARRED = {
    inspect.Parameter.VAR_POSITIONAL: ("*", "a tuple", tuple, "Tuple[X, ...]"),
    inspect.Parameter.VAR_KEYWORD: ("**", "a dict", dict, "Dict[str, X]"),
}


def _require_kind(
    signature: inspect.Signature, parameter: inspect.Parameter, descriptor: Descriptor
) -> None:
    """Raise if the descriptor of ``*args`` or ``**kwargs`` does not describe a tuple or dict."""
    if parameter.kind not in _STARRED or descriptor == ANY or descriptor.is_union:
        return
    stars, words, kind, spelling = _STARRED[parameter.kind]
    cls = descriptor.value_class
    if cls is None or not (issubclass(cls, kind) or issubclass(kind, cls)):
        raise DescriptorError(
            f"{parameter.name}: {stars}{parameter.name} is {words}; expected a descriptor of all "
            f"of it, such as {spelling}, got {descriptor.described or descriptor}"
        )
    by_name = {
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    for name in descriptor.entries_of(kind):
        if name in by_name:
            raise DescriptorError(
                f"{parameter.name}[{name!r}]: {name!r} is a separate parameter, and is never in "
                f"{stars}{parameter.name}; describe it by its name"
            )


def _default(parameter: inspect.Parameter) -> Any:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return ()
    if parameter.kind is parameter.VAR_KEYWORD:
        return {}
    return _ABSENT if parameter.default is parameter.empty else parameter.default


def _named_dims(leaves: list[tuple[str, MetaTensorType]]) -> dict[str, Dim]:
    """Return each named dim with all of its bounds.

    Raises:
        DescriptorError: the bounds of a name contradict each other.
    """
    dims: dict[str, Dim] = {}
    written: dict[str, list[str]] = {}
    for where, meta in leaves:
        for part, form in _sizes_with_paths(meta):
            if not isinstance(form, Dim):
                continue
            if form.is_bounded:
                written.setdefault(form.name, []).append(f"{form!r} at {where}{part}")
            try:
                dims[form.name] = dims.get(form.name, form).meet(form)
            except DescriptorError:
                raise DescriptorError(
                    f"the bounds of dim {form.name!r} contradict each other: "
                    f"{', '.join(written[form.name])}; one name is one size, rename one of them"
                ) from None
    return dims


def _sizes_with_paths(meta: MetaTensorType) -> Iterator[tuple[str, DimForm]]:
    """Yield all sizes in a tensor's metadata with their paths."""
    first = 0 if meta.dims is not None else -len(meta.trailing)
    for axis, form in enumerate(meta.dims or meta.trailing, first):
        yield f".shape[{axis}]", form
    for axis, form in enumerate(meta.stride_forms):
        yield f".stride()[{axis}]", form


def _solve(leaves: list[tuple[str, MetaTensorType]], dims: dict[str, Dim]) -> None:
    """Add the names that no shape has as a dim, but that an expression can be solved for.

    Raises:
        DescriptorError: a name can't be solved for.
    """
    pending = [
        (f"{where}{part}", form)
        for where, meta in leaves
        for part, form in _sizes_with_paths(meta)
        if isinstance(form, DimExpr)
    ]
    before = None
    while pending and len(pending) != before:
        before = len(pending)
        for _, form in pending:
            unknown = [name for name in form.names if name not in dims]
            if len(unknown) == 1 and solved_for(form.text, unknown[0]) is not None:
                dims[unknown[0]] = Dim(unknown[0])
        pending = [(at, form) for at, form in pending if any(n not in dims for n in form.names)]
    for at, form in pending:
        name = next(name for name in form.names if name not in dims)
        raise DescriptorError(
            f"{at} is {form.text!r}, but no shape has {name!r} as a dim of its own, so its "
            f"size is unknown"
        )


def _require_sizes(leaves: list[tuple[str, MetaTensorType]], dims: Mapping[str, Dim]) -> None:
    """Raise for an expression that is negative for all sizes that its names allow."""
    for where, meta in leaves:
        for part, form in _sizes_with_paths(meta):
            if not isinstance(form, DimExpr):
                continue
            ranges = {name: (dims[name].min or 0, dims[name].max) for name in form.names}
            if form.sum.most(ranges) < 0:
                names = ", ".join(repr(dims[name]) for name in form.names)
                raise DescriptorError(
                    f"{where}{part} is {form.text!r}, which is negative for every size of {names}"
                )


# --- several sets of descriptors for one function


def in_order(contracts: Sequence[Contract], what: str) -> tuple[Contract, ...]:
    """Return contracts in the order in which a call is checked against them.

    Args:
        contracts: the contracts, in the given order.
        what: the function, for errors.

    Raises:
        DescriptorError: a call can fit two contracts, neither of which is narrower.
    """
    all_ = [Descriptors(contract.descriptors) for contract in contracts]
    for j, right in enumerate(all_):
        for i, left in enumerate(all_[:j]):
            _require_order(left, right, (i + 1, j + 1), what)
    below = [sum(other < contract for other in all_) for contract in all_]
    return tuple(contracts[i] for i in sorted(range(len(all_)), key=below.__getitem__))


def _require_order(
    left: Descriptors, right: Descriptors, numbers: tuple[int, int], what: str
) -> None:
    below, above = left <= right, right <= left
    if below != above or (not below and are_disjoint(left, right)):
        return
    fault = "are equivalent" if below else "can both fit one call, and neither is narrower"
    shown = "".join(
        f"  {number}: {', '.join(str(contract).splitlines()) or 'nothing'}\n"
        for number, contract in zip(numbers, (left, right), strict=True)
    )
    raise DescriptorError(
        f"{what}: its descriptors {numbers[0]} and {numbers[1]} {fault}:\n{shown}Make one of them "
        f"narrower than the other, or let them differ in a dtype, a rank, a size, a class or a "
        f"value."
    )


# --- the tensors in a descriptor


def tensor_leaves(descriptor: Descriptor, where: str) -> Iterator[tuple[str, MetaTensorType]]:
    """Yield the metadata of each tensor in a descriptor, with the path of the tensor."""
    if isinstance(descriptor, TSTensor):
        yield where, descriptor.meta
        return
    for step, part in zip(descriptor.steps, descriptor.parts, strict=True):
        if step is not None or descriptor.is_union:
            yield from tensor_leaves(part, where + (step or ""))
