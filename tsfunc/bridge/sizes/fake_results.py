"""Results of operators on fake tensors with symbolic sizes, with few guards.

NOTE [guards of operators]
torch's fake-tensor rules test conditions on sizes: whether a kernel is longer than its input,
whether sizes are equal, how strides are ordered. Most conditions only check arguments, which the
operator checks again when the program runs, or choose between two computations of the same result;
few determine the result. A condition is therefore first evaluated for the sizes of the call. The
operator then runs on fake tensors of other, fixed sizes. If its results have the sizes and strides
of the symbolic results there, the condition adds no guard. Sizes that the operator refuses prove
nothing, except for the equalities that the operator needs (``equalities``). A condition becomes a
requirement on the descriptors only for these equalities, or if the results differ, or if the
operator accepts too few sizes.

If a rule fails because it does not support symbolic sizes, the sizes of the results are found in
the same way (``shape_probe``).

NOTE [cached results]
A model calls the same operators on tensors of the same metadata again and again, and torch's
fake-tensor rules take longer than the rest of a traced call. The cache therefore maps the metadata
of the arguments (sizes, strides, dtype, device, and shared storages) to that of the results, and
makes new fake tensors with this metadata. The guards on symbolic sizes from the first call remain,
so a cached result needs no further guard.

Nothing is cached for

- operators that are not torch's own, whose rules may depend on anything, and those in ``UNCACHED``;
- arguments that their metadata does not fully describe: a tensor that is not strided or has a
  constant value, a generator;
- sizes that depend on data (NOTE [sizes of data] in ``symbols``): each call makes new symbols, and
  constraints on them may hold only in a part of the trace;
- results that are not tensors, or whose metadata or storage a new tensor cannot have.

The storage offset of an argument is not part of the metadata, and the offset of a view is stored
relative to its source; ``x[i]`` is cached as ``x[0]`` with a further offset. A loop over the rows
of a tensor calls torch's rule once.

The cache lives as long as the trace: newly registered kernels, and settings that are not in
``_SETTINGS``, do not invalidate it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch._C import (
    DisableTorchFunction,
    _DisableTorchDispatch,
    _get_cudnn_enabled,
    _get_cudnn_sdp_enabled,
    _get_flash_sdp_enabled,
    _get_math_sdp_enabled,
    _get_mem_efficient_sdp_enabled,
    _get_mkldnn_enabled,
)
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)

from tsfunc.bridge.sizes import result_rules as result_rules  # registers its rules
from tsfunc.bridge.sizes.fake_mode import as_fake, new_fake, results_of_fixed_sizes
from tsfunc.bridge.sizes.fake_versions import (
    count_write,
    counting_writes,
    fakes_in,
    update_versions,
)
from tsfunc.bridge.sizes.kernel_errors import error_of_kernel
from tsfunc.bridge.sizes.shape_probe import ShapeProbe, fit_shapes, symbols_among
from tsfunc.bridge.sizes.shape_rules import (
    OTHER_SHAPES,
    RULES_OF_FIXED_SIZES,
    SHAPE_RULES,
    is_of_data,
)
from tsfunc.bridge.sizes.sized_indexing import PARTS, part_from_start
from tsfunc.bridge.sizes.strides import check_view, kernel_strides
from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.bridge.tracers.torch_settings import SETTINGS
from tsfunc.bridge.tracers.torch_state import preserve_dispatch_keys
from tsfunc.bridge.tracers.user_queries import SYMBOLIC, defer_guards, has_symbols, suppress_guards
from tsfunc.dispatch.state import overriding
from tsfunc.errors import TsfuncError
from tsfunc.ops.registry import Args, Kwargs

_Call = Callable[..., Any]
_META: Final = torch.device("meta")

# The results of these operators depend on the size of the storage behind an argument, which caches
# of results ignore (here the cache of torch's fake mode).
UNCACHED = frozenset({"aten::_new_zeros_with_same_feature_meta"})


def results_of(
    fake: FakeTensorMode, name: str, call: _Call, writes: bool, args: Args, kwargs: Kwargs
) -> Any:
    """Return the results of an operator on fake values: NOTE [guards of operators].

    Args:
        name: the name of the operator, which may have a rule in ``shape_rules``.
        writes: True if the operator writes to an argument.
    """
    results = _by_kernel(fake, name, call, args, kwargs)
    if results is NotImplemented:
        return _by_rule(fake, name, call, writes, args, kwargs)
    return results


def _by_kernel(fake: FakeTensorMode, name: str, call: _Call, args: Args, kwargs: Kwargs) -> Any:
    """Return the results of the operator's own kernel, at fixed sizes; else NotImplemented."""
    if name in RULES_OF_FIXED_SIZES:
        return NotImplemented
    return results_of_fixed_sizes(fake, call, args, kwargs)


def _by_rule(
    fake: FakeTensorMode, name: str, call: _Call, writes: bool, args: Args, kwargs: Kwargs
) -> Any:
    """Return the results by a rule of this package, or by torch's rules for fake tensors."""
    env = fake.shape_env
    # With symbolic sizes the cache of the mode is not used: a look-up takes longer than most
    # rules, and a hit tests no condition and may be wrong.
    symbolic = env is not None and bool(symbols_among((args, kwargs)))
    keeps = name not in UNCACHED and not symbolic
    update_versions(args)
    if name in SHAPE_RULES:
        with _with_cache(fake, keeps):
            results = SHAPE_RULES[name](*args, **kwargs)
        if results is not NotImplemented:
            return results
    if env is None or writes:
        with _with_cache(fake, keeps), counting_writes(args) if writes else nullcontext():
            return call(*args, **kwargs)
    try:
        with defer_guards(env) as conditions, _with_cache(fake, keeps):
            results = call(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise
    except Exception:
        probe = ShapeProbe(env, call, args, kwargs)
        results = fit_shapes(probe, fake)
        if results is None and probe.fix_unaccepted():
            results = fit_shapes(probe, fake)
        if results is None:
            raise
        probe.guard_fixed()
        return results
    if not conditions:
        return results
    probe = ShapeProbe(env, call, args, kwargs)
    probe.keep_required(conditions)
    if not probe.agrees(results):
        results = fit_shapes(probe, fake)
    if results is not None:
        probe.guard_required(multiples=name in OTHER_SHAPES)
        return results
    with _with_cache(fake, False):
        return call(*args, **kwargs)


@contextmanager
def _with_cache(fake: FakeTensorMode, keeps: bool) -> Iterator[None]:
    """Run operators on fake tensors in a block, with or without the mode's cache."""
    cached = overriding(fake, cache_enabled=fake.cache_enabled and keeps)
    with cached, preserve_dispatch_keys(), DisableTorchFunction(), fake:
        yield


# --- the results that are known already


# Types whose values are the same argument if they compare equal.
PLAIN: Final = frozenset({
    int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
})  # fmt: skip

_SYMBOLIC: Final = frozenset(SYMBOLIC)

# The settings that results depend on: those of programs, and others that choose kernels, and with
# them strides.
_SETTINGS: Final = (
    *[setting.read for setting in SETTINGS],
    _get_cudnn_enabled, _get_mkldnn_enabled, _get_math_sdp_enabled, _get_flash_sdp_enabled,
    _get_mem_efficient_sdp_enabled, _get_cudnn_sdp_enabled,
)  # fmt: skip


class IncompleteMetadataError(Exception):
    """A value has properties that its metadata does not describe."""


class MetadataKey(NamedTuple):
    """The metadata of a strided tensor; symbolic sizes are sympy expressions."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    is_conj: bool
    is_neg: bool


@dataclass(frozen=True, slots=True)
class _Result:
    """The description of a result.

    Attributes:
        source: the index of the tensor argument whose storage the result shares.
        is_source: True if the result is that tensor itself.
        shape, strides: those of the computed result.
        offset: its storage offset; for a view, relative to the source.
        elements: the number of elements of its own storage, at the sizes of the call.
        symbolic: True if its sizes are symbolic.
    """

    source: int
    is_source: bool
    shape: Sequence[Any]
    strides: Sequence[Any]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    elements: int
    symbolic: bool
    known: KnownMetadata | None


# Operators whose results depend on the storage offset of an argument.
_OF_OFFSETS: Final = frozenset({
    "aten::as_strided", "aten::as_strided_", "aten::as_strided_copy", "aten::as_strided_scatter",
    "aten::_reshape_alias", "aten::storage_offset", "aten::sym_storage_offset",
})  # fmt: skip

_OWN_MEMORY, _ANOTHER_RESULT = -1, -2  # special values of source


class CachedResults(NamedTuple):
    """The metadata of results: of one, or of a list or tuple, whose items may be None."""

    container: type | None
    results: tuple[_Result | None, ...]


class KnownMetadata:
    """The metadata of fake tensors of one trace; equal metadata is one object.

    Attributes:
        key: the metadata, with None for an offset that is a number.
        is_fixed: True if sizes, strides and the offset are numbers.
    """

    __slots__ = ("is_fixed", "key")

    def __init__(self, key: MetadataKey) -> None:
        self.key = key
        self.is_fixed = key.offset is None and all(
            type(size) is int for size in (*key.shape, *key.strides)
        )


_KNOWN: Final = "_tsfunc_metadata"  # the attribute of a fake tensor with its known metadata


def fixed_metadata(value: torch.Tensor) -> MetadataKey | None:
    """Return the known metadata of a fake tensor without symbolic sizes; else None."""
    metadata: KnownMetadata | None = value.__dict__.get(_KNOWN)
    return metadata.key if metadata is not None and metadata.is_fixed else None


class TraceMetadata:
    """The metadata of the fake tensors of one trace."""

    def __init__(self) -> None:
        self._of_data: dict[Any, bool] = {}
        self._known: dict[MetadataKey, KnownMetadata] = {}

    def known(self, value: Any) -> KnownMetadata:
        """Return the metadata of a fake tensor, without a storage offset that is a number.

        The tensor keeps it until an operator writes to it, which may change its sizes.

        Raises:
            IncompleteMetadataError: the metadata would not describe the tensor fully.
        """
        attributes = value.__dict__
        metadata: KnownMetadata | None = attributes.get(_KNOWN)
        if metadata is None:
            with DisableTorchFunction():
                key = self.of(value)
            if type(key.offset) is int:
                shape, strides, _, dtype, device, is_conj, is_neg = key
                key = MetadataKey(shape, strides, None, dtype, device, is_conj, is_neg)
            metadata = attributes[_KNOWN] = self._known.setdefault(key, KnownMetadata(key))
        return metadata

    def of(self, value: Any) -> MetadataKey:
        """Return the metadata of a fake tensor.

        Raises:
            IncompleteMetadataError: the metadata would not describe the tensor fully.
        """
        if value.layout is not torch.strided or value.is_quantized or value.constant is not None:
            raise IncompleteMetadataError
        return MetadataKey(
            tuple([x if type(x) is int else self.number(x) for x in value.shape]),
            tuple([x if type(x) is int else self.number(x) for x in value.stride()]),
            self.number(value.storage_offset()),
            value.dtype, value.fake_device, value.is_conj(), value.is_neg(),
        )  # fmt: skip

    def number(self, value: Any) -> Any:
        """Return a number, or the expression of a symbolic number.

        Raises:
            IncompleteMetadataError: the number depends on data.
        """
        if type(value) is int:
            return value
        expr = getattr(value.node, "expr", None)
        of_data = self._of_data.get(expr)
        if of_data is None:
            of_data = self._of_data[expr] = expr is None or is_of_data(value)
        if of_data:
            raise IncompleteMetadataError
        return expr


class FakeCache:
    """The cached results of operators on the fake tensors of one trace."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self.fake = fake
        self.metadata = TraceMetadata()
        self._cached: dict[Any, CachedResults] = {}
        self._settings: list[list[Any]] = []

    def settings(self) -> int:
        """Return a number for the settings that results depend on; equal settings have the same."""
        now = [read() for read in _SETTINGS]
        for number, earlier in enumerate(self._settings):
            if earlier == now:
                return number
        self._settings.append(now)
        return len(self._settings) - 1

    def keeps(self, op: TorchOperator) -> bool:
        """True if the metadata of arguments, without offsets, determines an operator's results."""
        return op.name not in UNCACHED and op.name not in _OF_OFFSETS

    def of(self, op: TorchOperator, args: Args, kwargs: Kwargs) -> Any:
        """Return the results of an operator on fake values: NOTE [cached results].

        Raises:
            Exception: the operator's kernel raises it for such arguments: NOTE [errors of kernels].
        """
        with DisableTorchFunction():
            try:
                return self._of(op, args, kwargs)
            except (TsfuncError, UnsupportedOperatorException, DataDependentOutputException,
                    DynamicOutputShapeException):  # fmt: skip
                raise
            except Exception as error:
                found = error_of_kernel(op, args, kwargs, error)
                if found is error:
                    raise
        raise found

    def _of(self, op: TorchOperator, args: Args, kwargs: Kwargs) -> Any:
        moved = part_from_start(op, args, kwargs) if op.name in PARTS else None
        if moved is not None and self._is_plain(moved[0][0]):
            first, further = moved
            result = self._of(op, first, kwargs)
            return self._like(self._further_view(result, first[0], further), first[:1])
        tensors: list[Any] = []
        try:
            key = self._key(op, args, kwargs, tensors)
        except IncompleteMetadataError:
            return self._compute(op, args, kwargs)
        cached = self._cached.get(key)
        if cached is not None:
            if op.writes:  # a mode's constants for a tensor depend on its version
                for i in op.written:
                    count_write(args[i])
            return self.make_results(cached, tensors)
        results = self._compute(op, args, kwargs)
        try:
            if self._key(op, args, kwargs, []) == key:  # no argument has changed its metadata
                self._cached[key] = self.described(results, tensors)
        except IncompleteMetadataError:
            pass
        return results

    def _is_plain(self, x: Any) -> bool:
        """True if sizes, strides and dtype describe the views of a tensor fully."""
        try:
            metadata = self.metadata.of(x)
        except IncompleteMetadataError:
            return False
        is_of_mode = x.fake_mode is self.fake and not x.requires_grad
        return is_of_mode and not metadata.is_conj and not metadata.is_neg

    def _further_view(self, view: Any, source: Any, further: int) -> _Result:
        """Describe a view like another view of the same tensor, further on in the storage."""
        offset = view.storage_offset() - source.storage_offset() + further
        return _Result(
            0, False, view.shape, view.stride(), offset, view.dtype, view.fake_device,
            0, False, None,
        )  # fmt: skip

    def _compute(self, op: TorchOperator, args: Any, kwargs: Any) -> Any:
        call = self.fake, op.name, op.overload
        results = _by_kernel(*call, args, kwargs)
        of_kernel = results is not NotImplemented
        if not of_kernel:
            results = _by_rule(*call, op.writes, args, kwargs)
        if op.writes:
            for x in fakes_in((*args, *kwargs.values())):
                x.__dict__.pop(_KNOWN, None)
        if of_kernel:
            return results
        check_view(op.name, args, results)
        several = isinstance(results, tuple | list)
        first = results[0] if several and results else results
        strides = kernel_strides(op, args, first)
        if strides is None:
            return results
        tensor = new_fake(self.fake, first.shape, strides, first.dtype, first.device)
        return (tensor, *results[1:]) if several else tensor

    # --- the keys of calls

    def _key(
        self, op: TorchOperator, args: Any, kwargs: Mapping[str, Any], tensors: list[Any]
    ) -> tuple[Any, ...]:
        """Return the key of a call, and append its tensors to ``tensors``."""
        if op.overload.namespace != "aten" or op.name in UNCACHED:
            raise IncompleteMetadataError
        if op.writes and (op.reshapes or not op.inplace or torch.is_inference_mode_enabled()):
            raise IncompleteMetadataError
        parts: list[Any] = [op, self.settings()]
        self._take(op, args, parts, tensors)
        for name, value in kwargs.items():
            parts.append(name)
            self._take(op, (value,), parts, tensors)
        if not tensors:  # the arguments alone do not determine the result of a factory
            raise IncompleteMetadataError
        return tuple(parts)

    def _take(self, op: TorchOperator, values: Any, parts: list[Any], tensors: list[Any]) -> None:
        parts.append(len(values))
        for value in values:
            kind = type(value)
            if kind in PLAIN:  # 1, 1.0 and True compare equal, but are different arguments
                parts += (kind, value)
            elif kind is FakeTensor and value.fake_mode is self.fake:
                parts.append(self.metadata.known(value))
                if op.name in _OF_OFFSETS:
                    parts.append(self.metadata.number(value.storage_offset()))
                # Record whether two arguments are the same tensor.
                parts.append(next((i for i, x in enumerate(tensors) if x is value), -1))
                tensors.append(value)
            elif isinstance(value, list | tuple):
                self._take(op, value, parts, tensors)
            elif kind in _SYMBOLIC:
                parts += (kind, self.metadata.number(value))
            else:
                raise IncompleteMetadataError

    # --- storing

    def described(self, results: Any, tensors: Sequence[Any]) -> CachedResults:
        """Return the metadata of the results of a call, given its tensor arguments.

        Raises:
            IncompleteMetadataError: new tensors can't have the metadata.
        """
        memories = {storage_address(value): i for i, value in reversed([*enumerate(tensors)])}
        if type(results) not in (list, tuple):
            return CachedResults(None, (self._result(results, tensors, memories),))
        described = []
        for result in results:
            described.append(None if result is None else self._result(result, tensors, memories))
            if result is not None:
                memories.setdefault(storage_address(result), _ANOTHER_RESULT)
        return CachedResults(type(results), tuple(described))

    def _result(self, value: Any, tensors: Sequence[Any], memories: Mapping[int, int]) -> _Result:
        """Describe a result.

        Raises:
            IncompleteMetadataError: sizes and strides over a storage do not describe the result
                fully.
        """
        if type(value) is not FakeTensor or value.fake_mode is not self.fake:
            raise IncompleteMetadataError
        metadata = self.metadata.of(value)
        same = next((i for i, given in enumerate(tensors) if given is value), _OWN_MEMORY)
        source = same if same >= 0 else memories.get(storage_address(value), _OWN_MEMORY)
        if source == _ANOTHER_RESULT or value.requires_grad or metadata.is_conj or metadata.is_neg:
            raise IncompleteMetadataError
        if source >= 0:
            source_metadata = self.metadata.of(tensors[source])
            if (
                source_metadata.dtype != metadata.dtype
                or source_metadata.is_conj
                or source_metadata.is_neg
            ):
                raise IncompleteMetadataError
        shape, strides, offset = value.shape, value.stride(), value.storage_offset()
        if source >= 0:
            offset = offset - tensors[source].storage_offset()
        size = value.untyped_storage().nbytes()
        size = size if isinstance(size, int) else size.node.hint
        if size is None:  # it depends on data, and the sizes do not
            raise IncompleteMetadataError
        symbolic = has_symbols((*shape, *strides, offset))
        return _Result(
            source, same >= 0, shape, strides, offset, metadata.dtype, metadata.device,
            size // value.element_size(), symbolic,
            None if symbolic else self.metadata.known(value),
        )  # fmt: skip

    # --- making

    def make_results(self, cached: CachedResults, tensors: Sequence[Any]) -> Any:
        """Return new results with known metadata.

        Args:
            tensors: the tensor arguments of the call.
        """
        if cached.container is None:
            return self._like(cached.results[0], tensors)
        return cached.container([self._like(result, tensors) for result in cached.results])

    def _like(self, result: _Result | None, tensors: Sequence[Any]) -> Any:
        if result is None:
            return None
        if result.is_source:
            return tensors[result.source]
        source = tensors[result.source] if result.source >= 0 else None
        sizes = () if source is None else (*source.shape, *source.stride())
        if not result.symbolic and not has_symbols(sizes):
            with _DisableTorchDispatch():
                tensor = as_fake(self.fake, _of_fixed_sizes(result, source), result.device)
            if result.known is not None:
                tensor.__dict__[_KNOWN] = result.known
            return tensor
        with in_kernel_invocation_manager(self.fake), suppress_guards(self.fake):
            return as_fake(self.fake, _of_symbolic_sizes(result, source), result.device)


def _of_fixed_sizes(result: _Result, source: torch.Tensor | None) -> torch.Tensor:
    """Return a meta tensor with the sizes and strides of a result; ``source`` has its storage."""
    if source is None and not result.offset:
        return torch.empty_strided(result.shape, result.strides, dtype=result.dtype, device=_META)
    if source is None:
        memory = torch.empty_strided((result.elements,), (1,), dtype=result.dtype, device=_META)
        return memory.as_strided(result.shape, result.strides, result.offset)
    plain = torch.empty(0, dtype=source.dtype, device=_META)
    offset = source.storage_offset() + result.offset
    return plain.set_(source.untyped_storage(), offset, result.shape, result.strides)


def _of_symbolic_sizes(result: _Result, source: torch.Tensor | None) -> torch.Tensor:
    """Return a meta tensor with the symbolic sizes of a result; ``source`` has its storage.

    A new storage has the size of the call, because torch is slow to compute a symbolic one.
    """
    memory, offset = source, result.offset
    if memory is None:
        memory = torch.empty_strided((result.elements,), (1,), dtype=result.dtype, device=_META)
    else:
        offset = memory.storage_offset() + offset
    return torch.as_strided(memory, result.shape, result.strides, offset)


def storage_address(value: torch.Tensor) -> int:
    """Return the address of a tensor's storage object, which fake tensors have too."""
    return value.untyped_storage()._cdata
