"""Fake tensors, and operators of fixed sizes run on them without FakeTensorMode.

A fake tensor is a tensor on the device ``meta`` (sizes, strides and dtype, no data) that shows the
device of the tensor which it stands for.

NOTE [operators without FakeTensorMode]
FakeTensorMode decides for each call which of its many rules applies, and its first instance
imports torch._dynamo and sympy, which takes a second. If all sizes are numbers and all tensors are
on the CPU, :func:`results_of_fixed_sizes` does without it:

1. Most operators are called on small tensors: NOTE [scaled-down calls].
2. Views, copies and factories run their kernel for ``meta`` tensors, as in FakeTensorMode. Other
   operators' kernels for ``meta`` tensors are Python functions of torch, which read the
   device of a fake tensor and import torch._dynamo.
3. FakeTensorMode computes all other results, and raises the errors. :class:`LazyFakeMode` sets it
   up at the first such call.

``tests/bridge/test_fake_mode.py`` compares the results with FakeTensorMode's over torch's operator
database. On other devices an operator may choose its kernel, and with it strides, by the device,
which a kernel for meta tensors can't see.

NOTE [scaled-down calls]
The result shapes of most operators are made of the sizes of their arguments: each size of a sum, a
product of matrices, a softmax or an embedding is a size of an argument, or 1. The choice, and
the layout of the result, depend on the order of the sizes and strides, on equality, and on sizes
0 and 1, but on no other value. Such an operator is called on the CPU with small tensors, whose
distinct sizes 2, 3, ... stand for the distinct sizes of the call in the same order. The result has
the dtype, the order of strides and, after replacing the sizes, the shape of the call's result:
those of the kernel itself, in microseconds, without torch's rules for fake tensors.

:data:`_RULES` and :data:`_NAMES` list these operators. An operator whose result sizes are computed
(``conv2d``, ``view``) or depend on data, or that draws random numbers, is not among them.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch._C import (
    DisableTorchFunction,
    _DisableTorchDispatch,
    _set_throw_on_mutable_data_ptr,
    _set_warn_deprecated_on_mutable_data_ptr,
)
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from tsfunc.bridge.sizes.fake_versions import count_write
from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.mode_handlers import guard_handlers
from tsfunc.bridge.tracers.registrations import on_first_level, register_kernels
from tsfunc.bridge.tracers.schemas import signature_of_overload
from tsfunc.bridge.tracers.torch_state import outside_functorch, preserve_dispatch_keys
from tsfunc.bridge.tracers.user_queries import SYMBOLIC
from tsfunc.ops import (
    attention,
    contractions,
    embedding,
    feature_batched,
    find,
    fixed,
    identity,
    indexing,
    losses,
    n_dimensional,
    reductions,
    sorting,
    tensor_iterator,
    views,
)
from tsfunc.ops.registry import Args, Kwargs
from tsfunc.user_code import in_public_call

_CPU, _META = torch.device("cpu"), torch.device("meta")
_make_subclass = torch.Tensor._make_subclass
_ATTRIBUTES: Final = "tsfunc_attributes"  # the attribute of a mode with those of its tensors

# The mode makes a new tensor, and the kernel returns its argument.
_ONLY_IN_THE_MODE: Final = frozenset({"aten::lift_fresh"})

# The kernels of ranges for meta tensors are Python functions that import sympy.
_RANGES: Final = frozenset({"aten::arange", "aten::arange.start", "aten::arange.start_step"})
_MOST_ELEMENTS: Final = 1 << 16

# The families of views and copies.
_FAMILIES: Final = (identity.COPIES, views.VIEWS)


class LazyFakeMode(FakeTensorMode):
    """A FakeTensorMode that is set up when it first runs an operator.

    Fake tensors can be made for it before that.

    Attributes:
        shape_env: torch's environment of symbolic sizes, or None.
        static_shapes: True if tensors from outside get fixed sizes.
    """

    def __init__(self) -> None:
        # FakeTensorMode's own __init__ is called later: see `set_up`.
        import torch._functorch.config as config

        self.shape_env = None
        self.static_shapes = True
        self._allow_unsafe_data_ptr_access = config.fake_tensor_allow_unsafe_data_ptr_access
        self.allow_meta = config.fake_tensor_allow_meta

    def set_up(self) -> None:
        """Become a FakeTensorMode, and import its modules.

        The class changes, because torch finds the rules of a mode by its class.
        """
        with torch_state.outside_all_transforms(), DisableTorchFunction():
            FakeTensorMode.__init__(self, shape_env=self.shape_env)
        guard_handlers()
        self.__class__ = FakeTensorMode  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that FakeTensorMode's ``__init__`` sets."""
        if name.startswith("__") or self.__class__ is FakeTensorMode:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self.set_up()
        return getattr(self, name)

    def __enter__(self) -> Any:
        self.set_up()
        return self.__enter__()


def new_fake(
    fake: FakeTensorMode,
    shape: Sequence[Any],
    strides: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
    layout: torch.layout = torch.strided,
) -> torch.Tensor:
    """Return a new fake tensor, without an operator call."""
    with DisableTorchFunction(), outside_functorch(), in_kernel_invocation_manager(fake):
        if layout is torch.strided:
            meta = torch.empty_strided(shape, strides, dtype=dtype, device=_META)
        else:
            meta = torch.empty(shape, dtype=dtype, device=_META, layout=layout)
        return as_fake(fake, meta, device)


def as_fake(fake: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a fake tensor for a tensor on ``meta``.

    FakeTensor's own constructor sets twenty attributes, one by one, to the same values for every
    tensor of a mode. The constructor runs once for each device, and further tensors get copies of
    these.
    """
    state = fake.__dict__  # the attributes of a LazyFakeMode are slower to read
    by_device: dict[torch.device, dict[str, Any]] = state.setdefault(_ATTRIBUTES, {})
    attributes = by_device.get(device)
    if attributes is None:
        with in_kernel_invocation_manager(fake):
            sample = FakeTensor(fake, torch.empty(0, device=_META), device)
        attributes = by_device[device] = dict(sample.__dict__)
    tensor = _make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
    )
    if state["_allow_unsafe_data_ptr_access"]:
        _set_warn_deprecated_on_mutable_data_ptr(tensor)
    else:
        _set_throw_on_mutable_data_ptr(tensor)
    tensor.__dict__.update(attributes)
    return tensor


def new_fake_input(
    fake: FakeTensorMode,
    shape: Sequence[Any],
    strides: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool = False,
    layout: torch.layout = torch.strided,
) -> torch.Tensor:
    """Return a new fake tensor outside of all levels.

    Args:
        shape, strides, dtype, device, layout: its metadata; strides are for strided tensors.
        requires_grad: True if it requires grad; ignored if its dtype has no derivative.
    """
    with torch_state.outside_all_transforms(), DisableTorchFunction():
        tensor = new_fake(fake, shape, strides, dtype, device, layout)
        can = tensor.is_floating_point() or tensor.is_complex()
        return tensor.requires_grad_() if requires_grad and can else tensor


def results_of_fixed_sizes(fake: FakeTensorMode, call: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the results of an operator on tensors of fixed sizes, as fake tensors.

    Returns:
        The results; NotImplemented if FakeTensorMode has to compute them: NOTE [operators without
        FakeTensorMode].
    """
    if not isinstance(call, OpOverload):
        return NotImplemented
    if not all(_is_meta_argument(leaf, fake) for leaf in _leaves((*args, *kwargs.values()))):
        return NotImplemented
    results = scaled_down(call, args, kwargs)
    if results is NotImplemented and call.name() in _RANGES:
        results = _range(call, args, kwargs)
    if results is NotImplemented:
        return _on_meta(fake, call, args, kwargs)
    return _as_fake(results, fake, {})


def _range(call: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return the metadata of a short range, which the kernel makes."""
    start, end, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    if not step or not abs(end - start) <= _MOST_ELEMENTS * abs(step):
        return NotImplemented
    with torch_state.outside_all_transforms(), DisableTorchFunction():
        try:
            result = call(*args, **{**kwargs, "device": _CPU})
        except Exception:
            return NotImplemented  # FakeTensorMode raises the error
    return Metadata(result.shape, result.stride(), result.dtype)


def _on_meta(fake: FakeTensorMode, call: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return the results of an operator's kernel for meta tensors."""
    if not _is_served(call):
        return NotImplemented
    metas: dict[int, Any] = {}
    fakes: dict[int, Any] = {}

    def meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in metas:
                metas[id(value)] = meta_of(value)
                fakes[id(metas[id(value)])] = value
            return metas[id(value)]
        if isinstance(value, list | tuple):
            return [meta(item) for item in value]
        return value

    at = _place_of_device(call)
    if isinstance(at, str):
        kwargs = {**kwargs, at: _META}
    elif at is not None and at < len(args):
        args = (*args[:at], _META, *args[at + 1 :])
    with preserve_dispatch_keys(), DisableTorchFunction(), _DisableTorchDispatch():
        try:
            plain = [meta(x) for x in args], {name: meta(x) for name, x in kwargs.items()}
            results = call(*plain[0], **plain[1])
        except Exception:
            return NotImplemented  # FakeTensorMode computes the results, or raises the error
    if call._schema.is_mutable:
        count_write(args[0])
    return _as_fake(results, fake, fakes)


def meta_of(x: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor on ``meta`` with the sizes and the storage of a fake tensor.

    C++ reads the device of a fake tensor in Python.
    """
    plain = torch.empty(0, dtype=x.dtype, device=_META)
    plain.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
    return plain


def _leaves(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value


def _is_meta_argument(value: Any, fake: FakeTensorMode) -> bool:
    """True if a kernel for meta tensors can use an argument.

    A tensor is one of the mode's, on the CPU, and its sizes, strides and dtype describe it fully.
    A device is the CPU, and a number has a value.
    """
    if isinstance(value, torch.Tensor):
        return (
            type(value) is FakeTensor
            and value.fake_mode is fake
            and value.fake_device == _CPU
            and value.layout is torch.strided
            and value.constant is None
            and not (value.is_quantized or value.is_conj() or value.is_neg())
            and not any(type(size) is torch.SymInt for size in (*value.shape, *value.stride()))
        )
    if isinstance(value, torch.device):
        return value == _CPU
    return not isinstance(value, SYMBOLIC)


def _as_fake(result: Any, fake: FakeTensorMode, fakes: Mapping[int, Any]) -> Any:
    """Return results as fake tensors.

    Args:
        fakes: the fake tensors of arguments, which results may be, by the meta tensor.
    """
    if isinstance(result, Metadata):
        return new_fake(fake, result.shape, result.strides, result.dtype, _CPU)
    if isinstance(result, torch.Tensor):
        if isinstance(result, FakeTensor):
            return result
        argument = fakes.get(id(result))
        if argument is not None:
            return argument
        return as_fake(fake, result, _CPU)
    if isinstance(result, list | tuple):
        return type(result)([_as_fake(item, fake, fakes) for item in result])
    return result


@functools.cache
def _place_of_device(overload: OpOverload) -> int | str | None:
    """Return where an operator takes a device: a position, or a keyword."""
    for i, argument in enumerate(signature_of_overload(overload).arguments):
        if argument.type in ("Device", "Device?"):
            return argument.name if argument.keyword else i
    return None


@functools.cache
def _is_served(overload: OpOverload) -> bool:
    """True for views, copies and factories: their kernels do not read the device."""
    name, tags = overload.name(), overload.tags
    if name in _ONLY_IN_THE_MODE or torch.Tag.inplace_view in tags:
        return False
    if not name.startswith("aten::") or torch.Tag.data_dependent_output in tags:
        return False
    row = find(name)
    served = row is not None and row.family in _FAMILIES
    return served or _place_of_device(overload) is not None


# --- errors of fake tensors


def _is_of_users(record: logging.LogRecord) -> bool:
    return not in_public_call()


# torch logs a traceback for an operator that raises on fake tensors. The error is raised too, and
# the user of a public function sees it there, folded.
logging.getLogger(FakeTensorMode.__module__).addFilter(_is_of_users)


# --- calls of operators on small tensors


# The batching rules of operators whose result sizes are sizes of the arguments, and the functions
# that make such rules.
_RULES: Final[tuple[Any, ...]] = (
    attention.attention, attention.fused, attention.fused_backward,
    contractions.einsum, embedding.embedding, embedding.embedding_dense_backward,
    feature_batched.layer_norm, feature_batched.native_layer_norm,
    feature_batched.native_layer_norm_backward, fixed.added_product,
    fixed.added_product_inplace, fixed.addmm, fixed.addr, fixed.bmm, fixed.linear,
    fixed.matmul, fixed.outer, fixed.product_of_ranks, indexing.gather, indexing.index_fill,
    indexing.index_select, indexing.index_write, indexing.scatter,
    losses.nll_loss_backward, losses.nll_loss_forward, losses.pointwise_loss,
    losses.pointwise_loss_backward, n_dimensional.flip, n_dimensional.triangle,
    n_dimensional.triangle_inplace, reductions.all_or_any, reductions.along_dim,
    reductions.along_inplace, reductions.aminmax, reductions.arg_extreme,
    reductions.count_nonzero, reductions.norm, reductions.over_all_dims, reductions.prod,
    reductions.reduction, reductions.variance, sorting.sort, tensor_iterator.clamp,
    tensor_iterator.masked_fill, tensor_iterator.masked_fill_scalar_inplace,
    tensor_iterator.masked_fill_tensor, tensor_iterator.masked_fill_tensor_inplace,
    tensor_iterator.pointwise, tensor_iterator.pointwise_inplace,
    tensor_iterator.pointwise_of_equal_shapes, tensor_iterator.where,
)  # fmt: skip


def _codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of the functions that it makes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_of(constant)


_CODES: Final = frozenset(
    code for rule in _RULES for code in _codes_of(inspect.unwrap(rule).__code__)
)

# Composite operators without such a rule.
_NAMES: Final = frozenset({
    "aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd", "aten::rms_norm",
    "aten::l1_loss", "aten::gelu", "aten::cat",
})  # fmt: skip

# Operators with such a rule whose result has half or twice a size of an argument.
_COMPUTED: Final = frozenset({
    "aten::glu", "aten::glu_backward", "aten::glu_jvp", "aten::glu_backward_jvp",
})  # fmt: skip

_CAT: Final = "aten::cat"  # the one with a result size that is a sum

# Arguments that are ints: sizes, and those that do not determine a size (a dtype is an int too).
_SIZES: Final = frozenset({"normalized_shape", "num_weights"})
_OTHER_INTS: Final = frozenset({
    "dim", "dims", "dtype", "input_dtype", "reduction", "ignore_index", "correction", "diagonal",
    "padding_idx",
})  # fmt: skip

_MOST_SCALED: Final = 1 << 16


class _NotScalable(Exception):
    """A call that a call on small tensors does not represent."""


class Metadata(NamedTuple):
    """The metadata of a strided tensor of fixed sizes on the CPU."""

    shape: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype


def scaled_down(call: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the metadata of an operator's results: NOTE [scaled-down calls].

    Args:
        args, kwargs: its arguments, with strided tensors of fixed sizes on the CPU.

    Returns:
        A ``Metadata`` for each new tensor, an argument for a result that is an argument, in the
        structure of the results; NotImplemented if the operator is not served.
    """
    names = _arguments(call)
    if names is None:
        return NotImplemented
    try:
        scale = _Scale(_all_sizes(names, args, kwargs))
        with torch_state.on_plain_tensors():
            # The arguments are made here too: under a mode they would have no memory.
            small = [scale.argument(name, x) for name, x in zip(names, args, strict=False)]
            named = {name: scale.argument(name, x) for name, x in kwargs.items()}
            out = call(*small, **named)
            sums = _sum_of_sizes(out, *args, **kwargs) if call.name() == _CAT else {}
            results = scale.result(out, sums)
        if call._schema.is_mutable:
            count_write(args[0])
        return results
    except Exception:
        return NotImplemented  # torch's rule reports the error


# The schema's types of ints, and of the attributes that C++ has as ints.
_INTS = frozenset({"int", "ScalarType", "Layout", "MemoryFormat"})


@functools.cache
def _arguments(call: Any) -> Sequence[str] | None:
    """Return the names of an operator's arguments; None if it is not served."""
    if call.name() not in _NAMES and not _has_rule(call.name()):
        return None
    if torch.Tag.inplace_view in call.tags:
        return None
    # An operator with a dropout probability draws nothing if it is 0, which a call checks.
    signature = signature_of_overload(call)
    draws = torch.Tag.nondeterministic_seeded in call.tags
    if draws and not signature.takes("dropout_p"):
        return None
    for i, argument in enumerate(signature.arguments):
        if argument.writes and (i > 0 or argument.keyword):
            return None
        is_size = argument.name in _SIZES or argument.name in _OTHER_INTS
        if not is_size and argument.type.rstrip("[]?") in _INTS:
            return None
    return [argument.name for argument in signature.arguments]


def _has_rule(name: str) -> bool:
    row = find(name)
    if row is None or row.rule is None or name in _COMPUTED:
        return False
    code: CodeType | None = getattr(inspect.unwrap(row.rule), "__code__", None)
    return code in _CODES


def _all_sizes(names: Sequence[str], args: Args, kwargs: Kwargs) -> Iterator[int]:
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        if name == "dropout_p" and value:
            raise _NotScalable
        if name in _SIZES:
            yield from (value,) if isinstance(value, int) else value
            continue
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                yield from item.shape


def _sum_of_sizes(result: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    """Return the size of concatenated tensors by its dim; empty vectors count as nothing."""
    dim %= result.dim()
    return {dim: sum(x.shape[dim] for x in tensors if x.shape != (0,))}


class _Scale:
    """A map of the sizes of a call to small sizes in the same order, 0 to 0 and 1 to 1."""

    def __init__(self, sizes: Iterator[int]) -> None:
        large = sorted({0, 1, *sizes})
        self._small = {size: i for i, size in enumerate(large)}
        self._large = large
        # By identity: an argument that occurs twice is one tensor.
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def argument(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = value, self._tensor(value)
            return self._tensors[id(value)][1]
        if name in _SIZES:
            return self._small[value] if isinstance(value, int) else [self._small[n] for n in value]
        if isinstance(value, list | tuple):
            return [self.argument("", item) for item in value]
        return value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        """Return a small tensor with the order and the gaps of a tensor's strides."""
        if value.is_conj() or value.is_neg():
            raise _NotScalable
        small = [self._small[n] for n in value.shape]
        strides, span = _rescale_strides(value.shape, value.stride(), small, gaps=True)
        if span > _MOST_SCALED:
            raise _NotScalable
        return torch.zeros(span, dtype=value.dtype).as_strided(small, strides)

    def result(self, value: Any, sums: Mapping[int, int] = MappingProxyType({})) -> Any:
        """Return a result's metadata in the call; ``sums`` has dims with sizes of their own."""
        if isinstance(value, list | tuple):
            return type(value)([self.result(item, sums) for item in value])
        if not isinstance(value, torch.Tensor):
            raise _NotScalable
        for original, small in self._tensors.values():
            if value is small:
                return original
            if value.untyped_storage()._cdata == small.untyped_storage()._cdata:
                raise _NotScalable  # a view
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise _NotScalable
        shape = [sums[d] if d in sums else self._large[n] for d, n in enumerate(value.shape)]
        strides, _ = _rescale_strides(value.shape, value.stride(), shape, gaps=False)
        return Metadata(shape, strides, value.dtype)


def _rescale_strides(
    shape: Sequence[int], strides: Sequence[int], sizes: Sequence[int], *, gaps: bool
) -> tuple[list[int], int]:
    """Return the strides of other sizes in the same order, and the number of elements they span.

    With ``gaps``, dims may be expanded, and a gap becomes one of a factor 2.
    """
    steps, step, other_step = [0] * len(shape), 1, 1
    for dim in sorted(range(len(shape)), key=lambda d: (strides[d], shape[d])):
        if gaps and strides[dim] == 0:
            continue
        if gaps and strides[dim] > step:
            step, other_step = strides[dim], 2 * other_step
        if strides[dim] != step:
            raise _NotScalable  # the tensor overlaps itself, or a dim of size 1 is out of order
        steps[dim] = other_step
        step *= max(shape[dim], 1)
        other_step *= max(sizes[dim], 1)
    return steps, other_step


def _fake_primal(
    overload: Any, rest: Any, keys: Any, dual: torch.Tensor, level: int
) -> torch.Tensor:
    """Return the primal of a tensor that carries no tangents, as a fake one.

    The rules for fake tensors run below autograd, and print their arguments for messages, which
    asks for their primals in a jvp. torch's kernel is for inference mode alone.
    """
    primal: torch.Tensor = torch.ops.aten.alias.default(dual)
    return primal


on_first_level(register_kernels, "Meta", {"aten::_fw_primal": _fake_primal})
