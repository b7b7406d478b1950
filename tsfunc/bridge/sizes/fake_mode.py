"""Fake tensors, and operators of fixed sizes run on them without FakeTensorMode.

A fake tensor is a tensor on the device ``meta`` (sizes, strides and dtype, no data) that shows the
device of the tensor which it stands for.

NOTE [operators without FakeTensorMode]
FakeTensorMode decides for each call which of its many rules applies, and its first instance
imports torch._dynamo and sympy, which takes a second. If all sizes are numbers and all tensors are
on the CPU, :func:`results_of_fixed_sizes` does without it:

1. Most operators are called on small tensors: NOTE [scaled-down calls] in ``scaled_down``.
2. Views, copies and factories run their kernel for ``meta`` tensors, as in FakeTensorMode. Other
   operators' kernels for ``meta`` tensors are Python functions of torch's, which ask a fake tensor
   for its device and import torch._dynamo.
3. FakeTensorMode computes all other results, and raises the errors. :class:`LazyFakeMode` sets it
   up at the first such call.

``tests/bridge/test_fake_mode.py`` compares the results with FakeTensorMode's over torch's operator
database. On other devices an operator may choose its kernel, and with it strides, by the device,
which a kernel for meta tensors can't see.

Private names used here (torch 2.13 and 2.14): ``torch._subclasses.fake_tensor`` has FakeTensorMode,
FakeTensor and ``in_kernel_invocation_manager``, in which fake tensors are meta tensors;
``torch._functorch.config`` has the settings of fake tensors; ``DisableTorchFunction`` and
``_DisableTorchDispatch`` disable modes and handlers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._C import DisableTorchFunction, _DisableTorchDispatch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

from tsfunc.bridge.sizes.scaled_down import Metadata, scaled_down
from tsfunc.bridge.sizes.write_counts import count_write
from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.torch_state import kept_keys, outside_functorch
from tsfunc.dispatch import state
from tsfunc.ops import find, identity, views

_SYMBOLIC: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CPU, _META = torch.device("cpu"), torch.device("meta")

# The mode makes a new tensor, and the kernel returns its argument.
_ONLY_IN_THE_MODE: Final = frozenset({"aten::lift_fresh"})

# The kernels of ranges for meta tensors are Python functions that import sympy.
_RANGES: Final = frozenset({"aten::arange", "aten::arange.start", "aten::arange.start_step"})
_MOST_ELEMENTS: Final = 1 << 16

# The modules of the batching rules of views and copies.
_MODULES: Final = frozenset({identity.__name__, views.__name__})


class LazyFakeMode(FakeTensorMode):
    """A FakeTensorMode that is set up when it first runs an operator.

    Fake tensors can be made for it before that.

    Attributes:
        shape_env: torch's environment of symbolic sizes, or None.
        static_shapes: whether tensors from outside get fixed sizes.
    """

    def __init__(self) -> None:
        # FakeTensorMode's own __init__ is called later: see `set_up`.
        import torch._functorch.config as config

        self.shape_env = None
        self.static_shapes = True
        self._allow_unsafe_data_ptr_access = config.fake_tensor_allow_unsafe_data_ptr_access
        self.allow_meta = config.fake_tensor_allow_meta

    def set_up(self) -> None:
        """Become a FakeTensorMode, and import what it needs.

        The class changes, because torch finds the rules of a mode by its class.
        """
        with torch_state.outside_all_levels(), state.outside_all_levels(), DisableTorchFunction():
            FakeTensorMode.__init__(self, shape_env=self.shape_env)
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
) -> torch.Tensor:
    """Return a new fake tensor, without an operator call."""
    with DisableTorchFunction(), outside_functorch(), in_kernel_invocation_manager(fake):
        meta = torch.empty_strided(shape, strides, dtype=dtype, device=_META)
        return FakeTensor(fake, meta, device)


def new_fake_input(
    fake: FakeTensorMode,
    shape: Sequence[Any],
    strides: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool = False,
) -> torch.Tensor:
    """Return a new fake tensor outside of all levels.

    Args:
        fake: the mode of the fake tensor.
        shape, strides, dtype, device: its metadata.
        requires_grad: whether it requires grad, if its dtype can.
    """
    with torch_state.outside_all_levels(), state.outside_all_levels(), DisableTorchFunction():
        made = new_fake(fake, shape, strides, dtype, device)
        can = made.is_floating_point() or made.is_complex()
        return made.requires_grad_() if requires_grad and can else made


def results_of_fixed_sizes(
    fake: FakeTensorMode, call: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return the results of an operator on tensors of fixed sizes, as fake tensors.

    Returns:
        The results; NotImplemented if FakeTensorMode has to compute them: NOTE [operators without
        FakeTensorMode].
    """
    if not isinstance(call, OpOverload):
        return NotImplemented
    if not all(_is_plain(leaf, fake) for leaf in _leaves((*args, *kwargs.values()))):
        return NotImplemented
    results = scaled_down(call, args, kwargs)
    if results is NotImplemented and call.name() in _RANGES:
        results = _range(call, args, kwargs)
    if results is NotImplemented:
        return _on_meta(fake, call, args, kwargs)
    return _as_fake(results, fake, {})


def _range(call: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the metadata of a short range, which the kernel makes."""
    start, end, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    if not step or not abs(end - start) <= _MOST_ELEMENTS * abs(step):
        return NotImplemented
    with torch_state.outside_all_levels(), state.outside_all_levels(), DisableTorchFunction():
        try:
            made = call(*args, **{**kwargs, "device": _CPU})
        except Exception:
            return NotImplemented  # FakeTensorMode raises the error
    return Metadata(made.shape, made.stride(), made.dtype)


def _on_meta(
    fake: FakeTensorMode, call: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
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
            return [meta(each) for each in value]
        return value

    at = _place_of_device(call)
    if isinstance(at, str):
        kwargs = {**kwargs, at: _META}
    elif at is not None and at < len(args):
        args = (*args[:at], _META, *args[at + 1 :])
    with kept_keys(), DisableTorchFunction(), _DisableTorchDispatch():
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

    C++ asks a fake tensor for its device in Python.
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


def _is_plain(value: Any, fake: FakeTensorMode) -> bool:
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
    return not isinstance(value, _SYMBOLIC)


def _as_fake(result: Any, fake: FakeTensorMode, fakes: Mapping[int, Any]) -> Any:
    """Return results as fake tensors.

    Args:
        result: the results.
        fake: the mode.
        fakes: the fake tensors of arguments, which results may be, by the meta tensor.
    """
    if isinstance(result, Metadata):
        return new_fake(fake, result.shape, result.strides, result.dtype, _CPU)
    if isinstance(result, torch.Tensor):
        if isinstance(result, FakeTensor):
            return result
        given = fakes.get(id(result))
        if given is not None:
            return given
        return FakeTensor(fake, result, _CPU)
    if isinstance(result, list | tuple):
        return type(result)([_as_fake(each, fake, fakes) for each in result])
    return result


@functools.cache
def _place_of_device(overload: OpOverload) -> int | str | None:
    """Return where an operator takes a device: a position, or a keyword."""
    for i, argument in enumerate(overload._schema.arguments):
        if str(argument.type) in ("Device", "Optional[Device]"):
            return argument.name if argument.kwarg_only else i
    return None


@functools.cache
def _is_served(overload: OpOverload) -> bool:
    """True for views, copies and factories: their kernels do not ask for the device."""
    name, tags = overload.name(), overload.tags
    if name in _ONLY_IN_THE_MODE or torch.Tag.inplace_view in tags:
        return False
    if not name.startswith("aten::") or torch.Tag.data_dependent_output in tags:
        return False
    row = find(name)
    served = row is not None and getattr(row.rule, "__module__", "") in _MODULES
    return served or _place_of_device(overload) is not None
