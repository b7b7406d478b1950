"""Everything that tsfunc registers with torch, once a process.

Importing the package changes nothing in torch. The first transform and the first tracer level of a
process run the preparations that other modules have declared, and register the kernels.

NOTE [kernels of factories]
Factory and random functions have no tensor argument that leads to a level. NOTE [the factory keys]
in ``torch_state`` describes how they are intercepted. While a level is active, the kernels here
send such a call to the innermost level of the thread that handles it: a random function in a vmap
gets its batching rule (which obeys ``randomness``), and a factory in a trace is recorded.

NOTE [dispatch handlers]
C++ brings a call on a tracer to ``__torch_dispatch__``. Before that it tests whether the tracer is
a DTensor, and the first such test of a process imports ``torch.distributed.tensor`` and
sympy, which takes half a second. A handler that ``torch.library.register_torch_dispatch`` has
registered for the operator and the class is called first, without that test. The handlers
registered here are those of the classes themselves. The registration is for the operators that
have a batching rule. Any other operator is brought to ``__torch_dispatch__`` as usual. The probes
of ``parsing`` are registered for the operators of one function at a time.

The kernels are registered for torch's unused keys ``VmapMode`` and ``TESTING_ONLY_GenericMode``.
``HigherOrderOperator.fallthrough`` lets a higher-order operator ignore a key, and
``_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS`` lists the keys that operators made later
ignore.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch._C import DisableTorchFunction, _parse_dispatch_key

from tsfunc import hooks
from tsfunc._lazy import call_uninterrupted
from tsfunc.bridge import compiled
from tsfunc.bridge.tracers.operators import may_draw, operator_of
from tsfunc.bridge.tracers.schemas import overload_of
from tsfunc.bridge.tracers.torch_state import (
    FACTORY_KEY_NAME,
    RANDOM_KEY_NAME,
    after,
    below_autograd,
    in_code_of_pass,
    in_dispatch_modes,
    is_storing_data,
    with_factory_key,
    with_random_key,
    without_factory_keys,
)
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel, innermost_level
from tsfunc.bridge.tracers.user_queries import has_symbols
from tsfunc.dispatch import Level, current_levels
from tsfunc.dispatch.state import tls
from tsfunc.ops.registry import all_rows

# --- the kernels of factories and random functions


RANDOM = (
    "rand rand.generator randn randn.generator randint randint.generator randint.low "
    "randint.low_generator randperm randperm.generator rand_like rand_like.generator randn_like "
    "randn_like.generator randint_like randint_like.generator randint_like.low_dtype "
    "randint_like.low_generator_dtype randint_like.Tensor randint_like.Tensor_generator "
    "normal.float_float normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor normal_ "
    "uniform_ exponential_ geometric_ cauchy_ log_normal_ random_ random_.to random_.from "
    "bernoulli bernoulli.p bernoulli_.float bernoulli_.Tensor multinomial poisson binomial dropout "
    "native_dropout feature_dropout alpha_dropout feature_alpha_dropout rrelu rrelu_with_noise "
    "_standard_gamma _sample_dirichlet"
).split()

FACTORIES = (
    "empty.memory_format empty_strided zeros ones full arange arange.start arange.start_step "
    "linspace logspace eye eye.m scalar_tensor tril_indices triu_indices hann_window "
    "hann_window.periodic hamming_window hamming_window.periodic blackman_window "
    "blackman_window.periodic bartlett_window bartlett_window.periodic kaiser_window "
    "kaiser_window.periodic kaiser_window.beta lift_fresh"
).split()

_handlers = compiled.load()
_libraries: dict[str, list[torch.library.Library]] = {}
_lock = threading.Lock()


def _install(key: str, names: Sequence[str]) -> None:
    """Register the kernels for a key, once per process."""
    call_uninterrupted(_install_once, key, names)


def _install_once(key: str, names: Sequence[str]) -> None:
    with _lock:
        if key in _libraries:
            return
        _let_higher_order_operators_ignore(key)
        library = torch.library.Library("aten", "IMPL")
        every = torch.library.Library("_", "IMPL")
        with warnings.catch_warnings():
            # torch's own kernels for the unused key only raise.
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
            warnings.filterwarnings("ignore", message="(?s).*[Ww]arning only once")
            if key == RANDOM_KEY_NAME:
                if _handlers is None:
                    library.impl("_efficientzerotensor", _zero_tangent, key, with_keyset=True)
                else:
                    _handlers.install_zero_tangent()
                for overload in _out_variants():
                    name = overload.name().removeprefix("aten::")
                    library.impl(name, _random_out_kernel(overload, key), key, with_keyset=True)
            else:
                every.fallback(torch.library.fallthrough_kernel, key)
                library.impl("_efficientzerotensor", _zero_tangent, key, with_keyset=True)
                for name in ("_to_copy", "clone"):
                    library.impl(name, _copy_kernel(name, key), key, with_keyset=True)
            for name in names:
                overload = overload_of(f"aten::{name}")
                if overload is None:
                    continue
                kernel = _kernel(overload, key)
                if _handlers is not None and operator_of(overload).training_argument is not None:
                    _handlers.register_if(name, "training", kernel)
                else:
                    library.impl(name, kernel, key, with_keyset=True)
        _libraries[key] = [library, every]


def _let_higher_order_operators_ignore(key: str) -> None:
    """Let torch's higher-order operators, those made later too, go past a key to the next one."""
    parsed: Any = _parse_dispatch_key(key)
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(parsed)
    for operator in list(torch._ops._higher_order_ops.values()):
        if parsed not in operator.py_kernels:
            operator.fallthrough(parsed)


def replace_in_transforms(operator: Any, func: Callable[..., Any]) -> None:
    """Replace a higher-order operator, called on any values, while random functions are watched.

    torch's own kernels serve torch's own traces, which are dispatch modes.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if in_dispatch_modes():
            with without_factory_keys():
                return operator(*args, **kwargs)
        return func(*args, **kwargs)

    operator.py_impl(_parse_dispatch_key(RANDOM_KEY_NAME))(call)


def _kernel(overload: Any, key: str) -> Callable[..., Any]:
    """Return the kernel of a factory while a level is active."""
    name = overload._schema.name.removeprefix("aten::")
    random = name in _RANDOM_NAMES
    inplace = random and name.endswith("_")
    rest = after(key)
    trains = operator_of(overload).training_argument is not None

    def factory(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not random and in_code_of_pass() and below_autograd():  # a kernel calls it
            with without_factory_keys():
                return overload.redispatch(keys & rest, *args, **kwargs)
        if is_storing_data() or (trains and not may_draw(operator_of(overload), args, kwargs)):
            return overload.redispatch(keys & rest, *args, **kwargs)
        level_of_args = innermost_level((*args, *kwargs.values()))
        for level in reversed(current_levels()):
            if random and level.forbids_random and not _spreads_over(level):
                raise RuntimeError(_refuse_random(level, overload))
            if isinstance(level, TracerLevel) and level.handles_factory(name, random):
                if level_of_args is not None and level_of_args.depth >= level.depth:
                    break  # the tracers lead to the level through their autograd
                if inplace:
                    for prepare in hooks.before_drawing.functions:
                        prepare(operator_of(overload), args[0], level)
                with without_factory_keys():
                    return level.wrap_factory_result(
                        operator_of(overload).run_at(level, args, kwargs)
                    )
        if name == "scalar_tensor":  # it fills a tensor of another factory
            with without_factory_keys():
                return overload.redispatch(keys & rest, *args, **kwargs)
        # Its parts, and forward mode's lazy zeros among them, come here separately.
        return overload.redispatch(keys & rest, *args, **kwargs)

    return factory


def _spreads_over(level: Level) -> bool:
    """True if the call is made by a vmap over the level's axis, which has a mode of its own."""
    return level in getattr(tls.state.running, "spread_over", ())


def _refuse_random(level: Level, overload: Any) -> str:
    return (
        f"{level.name}: expected a body without random operators, because of randomness='error', "
        f"got a call of {overload}. Pass randomness='split' to shard_map, so that each rank draws "
        f"the numbers of its own index, or 'same' for equal numbers."
    )


def _out_variants() -> Iterator[Any]:
    """Yield the overloads of random functions that write to ``out=`` tensors."""
    for name in sorted(_RANDOM_NAMES):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            form = getattr(packet, overload)
            if any(argument.is_out for argument in form._schema.arguments):
                yield form


def _random_out_kernel(overload: Any, key: str) -> Callable[..., Any]:
    """Return the kernel of a random function with ``out=`` while a level is active.

    Only tensors of the level can store one draw per example.
    """
    rest = after(key)
    outs = operator_of(overload).out_names

    def into(keys: Any, *args: Any, **kwargs: Any) -> Any:
        for level in reversed(current_levels()):
            if level.forbids_random and not _spreads_over(level):
                raise RuntimeError(_refuse_random(level, overload))
            if isinstance(level, TracerLevel) and level.handles_factory(overload.name(), True):
                if all(getattr(kwargs.get(n), "dispatch_level", None) is level for n in outs):
                    break  # the out tensors lead to the level
                raise RuntimeError(
                    f"{level.name}: calling out variants of random functions is not supported "
                    f"({overload.name()} was called with out=, a tensor that is not batched). "
                    f"Call it without, and copy the result into the tensor."
                )
        return overload.redispatch(keys & rest, *args, **kwargs)

    return into


def _zero_tangent(keys: Any, size: Sequence[Any], **kwargs: Any) -> Any:
    """Replace forward mode's lazy zeros, whose kernels treat a tracer as a tensor with storage.

    C++ makes the tangent of a Python number from such zeros and reads it as a number, so 0-dim
    zeros must be plain tensors. The formulas of ``maximum`` and ``minimum`` subtract tangents,
    which bool tensors refuse: the zeros of a bool operand are of int64, which C++ can read as a
    number too.
    """
    if not any(isinstance(level, TracerLevel) for level in current_levels()):
        lazy = torch.ops.aten._efficientzerotensor.default
        return lazy.redispatch(keys & after(RANDOM_KEY_NAME), size, **kwargs)
    if kwargs.get("dtype") is torch.bool:
        kwargs["dtype"] = torch.int64
    if not size or (in_code_of_pass() and not has_symbols(size)):
        with without_factory_keys():
            return torch.ops.aten.zeros.default(size, **kwargs)
    return torch.ops.aten.zeros.default(size, **kwargs)


def _copy_kernel(name: str, key: str) -> Callable[..., Any]:
    """Return the kernel of an operator with which kernels of torch convert plain tensors.

    Forward mode multiplies the zero tangent of a number by ``alpha``, in the memory of both. A copy
    that a trace makes of them has no memory.
    """
    overload = getattr(torch.ops.aten, name).default
    rest = after(key)

    def copy(keys: Any, x: Any, **kwargs: Any) -> Any:
        if isinstance(x, Tracer) or not below_autograd():
            return overload.redispatch(keys & rest, x, **kwargs)
        with DisableTorchFunction(), without_factory_keys():
            if isinstance(x, torch.Tensor):
                return overload.redispatch(keys & rest, x, **kwargs)
            return torch.tensor(x, dtype=kwargs.get("dtype"))  # C++ made a tensor of a number

    return copy


_RANDOM_NAMES = {name.partition(".")[0] for name in RANDOM}


# --- other kernels


Kernel = Callable[..., Any]
"""A function of an overload, the keys after the kernel's key, and a call with its keys first."""

_others: list[torch.library.Library] = []


def register_kernels(key: str, kernels: Mapping[str, Kernel]) -> None:
    """Register kernels for a key.

    Args:
        kernels: by the names of the operators, in place of those that torch has for the key.
            Operators that torch does not have are left out.
    """
    rest = after(key)
    library = torch.library.Library("aten", "IMPL")
    _others.append(library)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Ww]arning only once")
        for name, kernel in kernels.items():
            overload = overload_of(name)
            if overload is not None:
                bound_kernel = functools.partial(kernel, overload, rest)
                library.impl(name.removeprefix("aten::"), bound_kernel, key, with_keyset=True)


def register_replacements(kernels: Mapping[str, tuple[Kernel, bool]]) -> None:
    """Register kernels of operators for the time while a level is active.

    Args:
        kernels: as for ``register_kernels``, each with True if compiled handlers may leave it out
            for one derivative without forward mode.
    """
    if _handlers is None:
        plain = {name: kernel for name, (kernel, _) in kernels.items()}
        register_kernels(RANDOM_KEY_NAME, plain)
        return
    rest = after(RANDOM_KEY_NAME)
    for name, (kernel, skipped_by_one_derivative) in kernels.items():
        overload = overload_of(name)
        if overload is not None:
            bound_kernel = functools.partial(kernel, overload, rest)
            suffix = " more than once" if skipped_by_one_derivative else ""
            _handlers.register_if(
                name.removeprefix("aten::"), f"differentiated{suffix}", bound_kernel
            )


# --- the dispatch handlers of tracers


_DTENSOR = "torch.distributed.tensor"


@functools.cache
def register_dispatch_handlers() -> None:
    """Register the dispatch handler of each class of tracers, once: NOTE [dispatch handlers]."""
    names = [name for name in all_rows() if name.startswith("aten::")]
    for cls in dict.fromkeys(_subclasses(Tracer)):
        register_dispatch_handler(cls, _dispatch_handler(cls), names)


def register_dispatch_handler(
    cls: type[torch.Tensor], handler: Callable[..., Any], names: Iterable[str]
) -> None:
    """Register the dispatch handler of a class for operators: NOTE [dispatch handlers].

    Args:
        handler: a function of the class and the call.
        names: the names of the operators. Operators that have the handler already are left out.
    """
    if _DTENSOR in sys.modules:
        return
    library = torch.library.Library("aten", "FRAGMENT")
    _others.append(library)
    with _handler_lock:
        for name in names:
            if (cls, name) not in _have_handler:
                _have_handler.add((cls, name))
                torch.library.register_torch_dispatch(name, cls, handler, lib=library)


_handler_lock = threading.Lock()
_have_handler: set[tuple[type, str]] = set()


def _subclasses(cls: type[Tracer]) -> Iterator[type[Tracer]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _dispatch_handler(cls: type[Tracer]) -> Callable[..., Any]:
    """Return the dispatch handler of a class as a function of the class and the call."""
    handler = getattr(cls.__torch_dispatch__, "__func__", None)
    return handler if isinstance(handler, FunctionType) else _compiled_dispatch_handler


def _compiled_dispatch_handler(cls: type[Tracer], *call: Any) -> Any:
    return cls.__torch_dispatch__(*call)


# --- preparations


# A call, and the condition under which it is made; None for no condition.
_Preparation = tuple[Callable[[], Any], Callable[[], Any] | None]

_on_first_transform: list[_Preparation] = []
_on_first_level: list[_Preparation] = []


def on_first_transform(
    function: Callable[..., Any], *args: Any, needed: Callable[[], Any] | None = None
) -> None:
    """Declare a call to make once, when the process enters its first transform.

    Args:
        needed: returns a false value then if the call has nothing to do.
    """
    _on_first_transform.append((functools.partial(function, *args), needed))


def on_first_level(function: Callable[..., Any], *args: Any) -> None:
    """Declare a call to make once, when the process enters its first tracer level."""
    _on_first_level.append((functools.partial(function, *args), None))


def prepare() -> None:
    """Run the preparations; every transform calls this before it runs."""
    _run_preparations(_on_first_transform)


def _run_preparations(preparations: list[_Preparation]) -> None:
    if preparations:
        call_uninterrupted(_run_once, preparations)


def _run_once(preparations: list[_Preparation]) -> None:
    with _lock:
        for call, needed in preparations:
            if needed is None or needed():
                call()
        preparations.clear()


def watching_random() -> Any:
    """Context manager: random functions reach the active levels."""
    if RANDOM_KEY_NAME not in _libraries:
        prepare()
        _run_preparations(_on_first_level)
        _install(RANDOM_KEY_NAME, RANDOM)
    return with_random_key()


def watching_factories() -> Any:
    """Context manager: factory functions that are not random reach the active levels."""
    if FACTORY_KEY_NAME not in _libraries:
        _install(FACTORY_KEY_NAME, FACTORIES)
    return with_factory_key()
