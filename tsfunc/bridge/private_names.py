"""The private names of torch that the bridge uses, each with a check and a substitute.

The command ``tsfunc doctor`` and the tests run the checks. A test compares the list with the names
that occur in the bridge's source, and ``docs/dependencies.md`` with the list. Each entry covers the
names that serve one purpose. A dotted name that begins with ``torch`` also covers the attributes
below it; a name such as ``OpOverload._schema`` is an attribute of the values of a class. A release
of torch has exactly one of the names that are joined by ``|``.

An entry lists the releases in which its check was run.

Private names used here (torch 2.13 and 2.14): all of them.
"""

from __future__ import annotations

import enum
import importlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad


class Risk(enum.Enum):
    """The likelihood that a release of torch removes or changes a name."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True)
class PrivateNames:
    """Names of torch that serve one purpose of the bridge.

    Attributes:
        title: the purpose in a few words.
        names: the dotted names.
        use: how the bridge uses them.
        stand_in: their possible substitute.
        risk: the likelihood that a release removes or changes them.
        releases: the releases in which the check was run and passed.
        behaves: raises an exception if the names do not behave as the bridge expects.
    """

    title: str
    names: tuple[str, ...]
    use: str
    stand_in: str
    risk: Risk
    releases: str
    behaves: Callable[[], None]

    def single_names(self) -> list[str]:
        """Return the names, with those that are joined by ``|`` split."""
        return [single for name in self.names for single in name.split("|")]

    def check(self) -> list[str]:
        """Return a line for each missing name, or for behavior that is not the expected one.

        Example:
            >>> [line for entry in PRIVATE_NAMES for line in entry.check()]
            []
        """
        failures = [line for line in map(missing, self.names) if line is not None]
        if failures:
            return failures
        try:
            with warnings.catch_warnings():
                # Modules of torch that are imported here use deprecated functions.
                warnings.simplefilter("ignore")
                self.behaves()
        except Exception as error:
            return [f"{self.title}: {type(error).__name__}: {error}"]
        return []


PRIVATE_NAMES: list[PrivateNames] = []


def covered(name: str) -> bool:
    """Return True if the list has ``name``, a parent of it, or an attribute below it."""
    if not name.startswith("torch."):  # an attribute of values
        return any(
            known.rpartition(".")[2] == name
            for entry in PRIVATE_NAMES
            for known in entry.single_names()
            if not known.startswith("torch.")
        )
    return any(
        known == name or name.startswith(f"{known}.") or known.startswith(f"{name}.")
        for entry in PRIVATE_NAMES
        for known in entry.single_names()
    )


def missing(name: str) -> str | None:
    """Return a message if torch does not have a name, else None."""
    if "|" in name:
        messages = [missing(single) for single in name.split("|")]
        return None if None in messages else messages[0]
    if not name.startswith("torch."):
        holder, _, attribute = name.partition(".")
        has_it = hasattr(_HOLDERS[holder](), attribute)
        return None if has_it else f"torch {torch.__version__} has no {name}"
    parts = name.split(".")
    value: Any = torch
    for i, part in enumerate(parts[1:], start=2):
        if hasattr(value, part):
            value = getattr(value, part)
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            return f"torch {torch.__version__} has no {'.'.join(parts[:i])}"
    return None


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def _sharding_state() -> Any:
    fsdp = importlib.import_module("torch.distributed.fsdp")
    state = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_state").FSDPState()
    modules, device = (torch.nn.Identity(),), torch.device("cpu")
    state.init(modules, device, fsdp.MixedPrecisionPolicy(), True)
    return state


# Makes a value of each class whose attributes are in the list.
_HOLDERS: dict[str, Callable[[], Any]] = {
    "CustomOpDef": lambda: torch.library.custom_op("tsfunc_doctor::identity", mutates_args=())(
        _identity
    ),
    "FSDPModule": lambda: importlib.import_module("torch.distributed.fsdp").FSDPModule,
    "FSDPState": lambda: _sharding_state(),
    "GraphNode": lambda: torch.fx.Graph().placeholder("x"),
    "Module": lambda: torch.nn.Identity(),
    "Node": lambda: torch.ones(1, requires_grad=True).sin().grad_fn,
    "OpOverload": lambda: torch.ops.aten.sin.default,
    "OpOverloadPacket": lambda: torch.ops.aten.sin,
    "Optimizer": lambda: torch.optim.SGD([torch.ones(1)]),
    "Tensor": lambda: torch.ones(1),
    "ProcessGroup": lambda: torch.distributed.ProcessGroup,
    "UntypedStorage": lambda: torch.ones(1).untyped_storage(),
}

Check = Callable[[], None]


def _entry(
    title: str,
    names: str,
    *,
    use: str,
    stand_in: str,
    risk: Risk,
    below: str = "",
    releases: str = "2.13.0, 2.14.1",
) -> Callable[[Check], Check]:
    """Return a decorator that adds an entry with the decorated function as its check.

    Args:
        title: the purpose.
        names: the names, separated by blanks.
        use: how the bridge uses them.
        stand_in: their possible substitute.
        risk: the likelihood that a release removes or changes them.
        below: a dotted name that the names are attributes of.
        releases: the releases of torch in which the check was run.
    """

    def add(behaves: Check) -> Check:
        dotted = tuple(f"{below}.{name}" if below else name for name in names.split())
        PRIVATE_NAMES.append(PrivateNames(title, dotted, use, stand_in, risk, releases, behaves))
        return behaves

    return add


def _expect(condition: object, what: str) -> None:
    """Raise a RuntimeError that names the expectation if ``condition`` is false."""
    if not condition:
        raise RuntimeError(f"expected {what}")


@_entry(
    "The thread's dispatch keys",
    """DispatchKey DispatchKeySet _ExcludeDispatchKeyGuard _ForceDispatchKeyGuard
    _IncludeDispatchKeyGuard _SetExcludeDispatchKeyGuard _dispatch_keyset_full_after
    _dispatch_tls_is_dispatch_key_excluded _dispatch_tls_local_exclude_set
    _dispatch_tls_local_include_set _parse_dispatch_key _PreserveDispatchKeyGuard
    _AutoDispatchBelowAutograd _after_autograd_keyset""",
    below="torch._C",
    use="A level captures the sets of included and excluded keys, and restores them in its rules.",
    stand_in="The guards of c10 in a compiled extension; they are part of the C++ interface.",
    risk=Risk.LOW,
)
def _dispatch_keys() -> None:
    C = torch._C
    key: Any = C._parse_dispatch_key("AutogradCPU")
    excluded = C._dispatch_tls_is_dispatch_key_excluded
    before = C._dispatch_tls_local_include_set(), C._dispatch_tls_local_exclude_set()
    with C._ExcludeDispatchKeyGuard(C.DispatchKeySet(key)):
        _expect(excluded(key), "an excluded key")
        with C._ForceDispatchKeyGuard(*before):
            _expect(not excluded(key), "the forced sets")
    with C._SetExcludeDispatchKeyGuard(key, True):
        _expect(excluded(key), "an excluded key")
    with C._PreserveDispatchKeyGuard():
        C._dispatch_tls_set_dispatch_key_excluded(key, True)
    _expect(not excluded(key), "the preserved sets")
    with C._AutoDispatchBelowAutograd():
        _expect(excluded(key), "autograd's keys excluded")
    _expect(not C._after_autograd_keyset.has(key), "the keys after autograd")
    included: Any = C._parse_dispatch_key("TESTING_ONLY_GenericMode")
    with C._IncludeDispatchKeyGuard(included):
        _expect(C._dispatch_tls_local_include_set().has(included), "an included key")
    _expect(not excluded(key), "the sets that were there before")
    _expect(C._dispatch_keyset_full_after(key).has(C.DispatchKey.CPU), "the backend after autograd")


@_entry(
    "Tensors without storage",
    """torch.Tensor._make_wrapper_subclass torch.Tensor._make_subclass
    torch._C._disabled_torch_function_impl torch._C._DisableTorchDispatch""",
    use="A tracer is a wrapper subclass with the metadata that its level shows.",
    stand_in="None. torch documents wrapper subclasses, under these names.",
    risk=Risk.LOW,
)
def _wrappers() -> None:
    class Wrapper(torch.Tensor):
        __torch_function__: Any = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            return marker

    marker = torch.full((), 7.0)
    make: Any = torch.Tensor._make_wrapper_subclass
    wrapper = make(Wrapper, (2, 3), dtype=torch.float64)
    _expect(wrapper.shape == (2, 3) and wrapper.dtype is torch.float64, "the metadata given")
    _expect(torch.sin(wrapper).shape == (), "a call of __torch_dispatch__")
    with torch._C._DisableTorchDispatch():
        _expect(make(Wrapper, wrapper.shape).shape == (2, 3), "a call without __torch_dispatch__")
    _expect(torch.Tensor._make_subclass(Wrapper, torch.ones(2)).shape == (2,), "a subclass")


@_entry(
    "Calls without __torch_function__",
    """DisableTorchFunction DisableTorchFunctionSubclass _EnableTorchFunction
    _skip_one_hop_torch_function _get_torch_function_state
    _set_torch_function_state _is_torch_function_enabled
    _TorchFunctionState""",
    below="torch._C",
    use="A rule reads a tracer's own attributes, and calls functions past its handler.",
    stand_in="super().__torch_function__, at the cost of another Python call.",
    risk=Risk.LOW,
)
def _torch_function() -> None:
    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            return "seen"

    x: Any = torch.ones(2).as_subclass(Seen)
    skip: Any = torch._C._skip_one_hop_torch_function
    _expect(torch.sin(x) == "seen", "a call of __torch_function__")
    with torch._C.DisableTorchFunctionSubclass():
        _expect(isinstance(torch.sin(x), torch.Tensor), "a call without __torch_function__")
    with torch._C.DisableTorchFunction():
        _expect(isinstance(torch.sin(x), torch.Tensor), "a call without __torch_function__")
        with torch._C._EnableTorchFunction():
            _expect(torch.sin(x) == "seen", "a call of __torch_function__")
    state: Any = torch._C
    with torch._C.DisableTorchFunctionSubclass():
        before = state._get_torch_function_state()
        _expect(not state._is_torch_function_enabled(), "calls are switched off")
        state._set_torch_function_state(state._TorchFunctionState.ENABLED)
        _expect(state._is_torch_function_enabled(), "calls are switched on")
        state._set_torch_function_state(before)
    _expect(
        isinstance(skip(torch.sin, (Seen,), (x,), {}), torch.Tensor),
        "one call without __torch_function__",
    )


@_entry(
    "Stacks of modes",
    """torch._C._len_torch_function_stack torch._C._pop_torch_function_stack
    torch._C._push_on_torch_function_stack torch._C._len_torch_dispatch_stack
    torch._C._pop_torch_dispatch_stack torch._C._push_on_torch_dispatch_stack
    torch._C._get_dispatch_mode torch._C._TorchDispatchModeKey
    torch._ops._get_dispatch_mode_pre_dispatch
    torch.utils._python_dispatch.TorchDispatchMode
    torch.utils._python_dispatch._get_current_dispatch_mode_stack
    torch.utils._device.DeviceContext torch.overrides._pop_mode
    torch.utils._python_dispatch._pop_mode torch._C._is_torch_function_mode_enabled
    torch.overrides._get_current_function_mode_stack""",
    use="A trace sets the modes of its caller apart, and reads which of torch's modes are active: "
    "its own mode is active while the traced function's code runs.",
    stand_in="torch.overrides for function modes; the context managers of the modes themselves.",
    risk=Risk.MEDIUM,
)
def _modes() -> None:
    from torch.utils import _python_dispatch

    C = torch._C
    with _python_dispatch.TorchDispatchMode() as mode:
        _expect(C._len_torch_dispatch_stack() > 0, "an active dispatch mode")
        _expect(_python_dispatch._get_current_dispatch_mode_stack()[-1] is mode, "the mode on top")
        popped = C._pop_torch_dispatch_stack(None)
        C._push_on_torch_dispatch_stack(popped)
        _expect(popped is mode, "the mode on top")
        _expect(_python_dispatch._pop_mode() is mode, "the mode on top")
        C._push_on_torch_dispatch_stack(mode)
    _expect(C._get_dispatch_mode(C._TorchDispatchModeKey.FAKE) is None, "no fake tensor mode")
    _expect(C._get_dispatch_mode(C._TorchDispatchModeKey.PROXY) is None, "no proxy mode")
    proxy: Any = C._TorchDispatchModeKey.PROXY
    _expect(torch._ops._get_dispatch_mode_pre_dispatch(proxy) is None, "no proxy mode")
    depth = C._len_torch_function_stack()
    with torch.device("meta"):
        _expect(C._len_torch_function_stack() == depth + 1, "an active function mode")
        function_mode = C._pop_torch_function_stack()
        C._push_on_torch_function_stack(function_mode)
        _expect(torch.overrides._pop_mode() is function_mode, "the mode on top")
        C._push_on_torch_function_stack(function_mode)
        active = torch.overrides._get_current_function_mode_stack()
        _expect(active[-1] is function_mode, "the mode on top")
        _expect(C._is_torch_function_mode_enabled(), "function modes in use")
        with C.DisableTorchFunction():
            _expect(not C._is_torch_function_mode_enabled(), "no function modes")


@_entry(
    "Nodes of autograd",
    """torch._C._current_autograd_node torch._C._current_graph_task_id
    torch._C._autograd._get_sequence_nr torch.autograd.Variable._execution_engine
    Node._sequence_nr Tensor._backward_hooks Tensor._post_accumulate_grad_hooks""",
    use="explain and programs find the forward call of an operator of a backward pass; a level "
    "knows that a backward pass runs; gradients are computed without torch.autograd.grad's checks; "
    "one table of hooks serves all inputs of gradients.",
    stand_in="torch.autograd.grad; Node.metadata and hooks for the lines of backward passes.",
    risk=Risk.MEDIUM,
)
def _autograd_nodes() -> None:
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    number = torch._C._autograd._get_sequence_nr()
    y = x.sin()
    node: Any = y.grad_fn
    _expect(node._sequence_nr() == number, "the number of the thread's next node")
    _expect(torch._C._current_autograd_node() is None, "no node outside of a backward pass")
    _expect(torch._C._current_graph_task_id() == -1, "-1 outside of a backward pass")
    x.register_hook(lambda g: seen.append(torch._C._current_graph_task_id()))
    engine: Any = torch.autograd.Variable._execution_engine
    (grad,) = engine.run_backward(
        (y,), (torch.ones(2),), False, False, (x,), allow_unreachable=True, accumulate_grad=False
    )
    _expect(torch.equal(grad, x.detach().cos()), "the gradient")
    _expect(len(seen) == 1 and seen[0] != -1, "the number of a backward pass")
    leaf: Any = torch.ones(2, requires_grad=True)
    leaf._post_accumulate_grad_hooks = OrderedDict({0: seen.append})
    leaf.sin().sum().backward()
    _expect(seen[1:] == [leaf], "a call of the hook for the leaf")


@_entry(
    "Switches of autograd, and tangents",
    """torch._C._set_grad_enabled torch._C.is_grad_enabled torch._C._is_fwd_grad_enabled
    torch._C._set_fwd_grad_enabled torch._C._exit_dual_level
    torch.autograd.forward_ad._set_fwd_grad_enabled torch.autograd.forward_ad._current_level
    torch.autograd.forward_ad._maybe_load_decompositions torch._VF._make_dual""",
    use="A level has grad modes and tangents of its own.",
    stand_in="torch.set_grad_enabled and forward_ad.dual_level, with one dual level in a process.",
    risk=Risk.MEDIUM,
)
def _switches() -> None:
    on = torch.is_grad_enabled()
    torch._C._set_grad_enabled(not on)
    changed = torch.is_grad_enabled() is not on
    torch._C._set_grad_enabled(on)
    _expect(changed, "a grad mode that changes")
    with forward_ad._set_fwd_grad_enabled(False):
        _expect(not torch._C._is_fwd_grad_enabled(), "forward mode switched off")
        torch._C._set_fwd_grad_enabled(True)
        _expect(torch._C._is_fwd_grad_enabled(), "forward mode switched on")
    _expect(callable(torch._C._exit_dual_level), "what leaves the dual level")
    level = forward_ad._current_level
    with forward_ad.dual_level():
        _expect(forward_ad._current_level == level + 1, "the number of the dual level")
        dual = torch._VF._make_dual(torch.ones(2), torch.ones(2), level=level + 1)
        _expect(forward_ad.unpack_dual(dual).tangent is not None, "a tangent")


@_entry(
    "Padding of packed sequences",
    "torch._VF._pad_packed_sequence",
    use="vmap refuses the padding of packed sequences with the remedy.",
    stand_in="The error of the C++ function, which reads the sizes of a tracer as numbers.",
    risk=Risk.LOW,
)
def _padding() -> None:
    lengths = torch.tensor([1, 1])
    padded, counts = torch._VF._pad_packed_sequence(torch.ones(2, 3), lengths, False, 0.0, 2)
    _expect(padded.shape == (2, 1, 3) and counts.tolist() == [2], "one padded sequence")


@_entry(
    "Lazy zeros of forward mode",
    "Tensor._is_zerotensor",
    use="Zero tangents without memory become plain zeros where they meet a tracer.",
    stand_in="Zeros in memory for every tangent that a tensor lacks.",
    risk=Risk.LOW,
)
def _lazy_zeros() -> None:
    x, y = torch.ones(2), torch.ones(2)
    with forward_ad.dual_level():
        unpacked = forward_ad.unpack_dual(forward_ad.make_dual(x, y) * y)
    _expect(not unpacked.tangent._is_zerotensor(), "a tangent in memory")
    lazy = torch._efficientzerotensor(2)
    _expect(lazy._is_zerotensor() and (lazy * x)._is_zerotensor(), "a product that is lazy")


@_entry(
    "Calls of autograd.Function",
    "torch._C._FunctionBase torch.autograd.function._SingleLevelFunction",
    use="Every call of MyFunction.apply, methods that were taken early included, comes to a "
    "handler (bridge/grad/apply_hook.py, where torch 2.13 and 2.14 differ).",
    stand_in="Function.apply replaced as the package is imported; methods that were taken from a "
    "class before do not come to it.",
    risk=Risk.HIGH,
)
def _functions() -> None:
    from torch.autograd.function import FunctionMeta, _SingleLevelFunction

    _expect(issubclass(torch.autograd.Function, _SingleLevelFunction), "a base class of Function")
    _expect(type(_SingleLevelFunction) is FunctionMeta, "a metaclass of its own")
    _expect("apply" in torch._C._FunctionBase.__dict__, "the method in C++")


@_entry(
    "Checkpoints",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl|"
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
    use="A checkpoint that torch.utils.checkpoint makes runs again at the levels that it ran at.",
    stand_in="A generator of this package's own over saved_tensors_hooks.",
    risk=Risk.HIGH,
)
def _checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    from tsfunc.bridge.grad import checkpoints

    made: list[Any] = []
    theirs = getattr(torch.utils.checkpoint, checkpoints._NAME)

    def generator(*args: Any, **kwargs: Any) -> Any:
        made.append(theirs(*args, **kwargs))
        return made[-1]

    setattr(torch.utils.checkpoint, checkpoints._NAME, generator)
    try:
        checkpoint(torch.sin, torch.ones(2), use_reentrant=False)
    finally:
        setattr(torch.utils.checkpoint, checkpoints._NAME, theirs)
    _expect(len(made) == 1 and hasattr(made[0], "send"), "a generator for each checkpoint")


@_entry(
    "Hooks of saved tensors",
    """torch._C._autograd._top_saved_tensors_default_hooks
    torch._C._autograd._pop_saved_tensors_default_hooks
    torch._C._autograd._push_saved_tensors_default_hooks""",
    use="The first transform of a process may run inside of hooks that its thread has entered.",
    stand_in="None: a checkpoint by torch around the first transform of a process would fail.",
    risk=Risk.LOW,
)
def _saved_tensor_hooks() -> None:
    autograd = torch._C._autograd
    packed: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda x: x):
        hooks = autograd._top_saved_tensors_default_hooks(True)
        _expect(hooks is not None and len(hooks) == 2, "the innermost hooks")
        autograd._pop_saved_tensors_default_hooks()
        try:
            torch.ones(2, requires_grad=True).sin()
            _expect(not packed, "no hooks after the removal")
        finally:
            autograd._push_saved_tensors_default_hooks(*hooks)
        torch.ones(2, requires_grad=True).sin()
    _expect(len(packed) == 1, "the hooks again")


@_entry(
    "torch.func's stack",
    """torch._C._functorch._add_batch_dim torch._C._functorch.get_unwrapped
    torch._C._functorch.is_batchedtensor torch._C._functorch.is_functorch_wrapped_tensor
    torch._C._functorch.maybe_current_level torch._C._functorch.maybe_get_bdim
    torch._C._functorch.maybe_get_level torch._C._functorch.pop_dynamic_layer_stack
    torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack""",
    use="Calls go to torch.func's transform where one is the innermost, and its tensors are told.",
    stand_in="A refusal of torch.func's transforms inside of and around this package's.",
    risk=Risk.MEDIUM,
)
def _functorch_stack() -> None:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    F = torch._C._functorch
    seen: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        level = F.maybe_current_level()
        seen.append(F.is_batchedtensor(x) and F.is_functorch_wrapped_tensor(x))
        seen.append(F.maybe_get_level(x) == level and F.maybe_get_bdim(x) == 0)
        seen.append(F.get_unwrapped(x).shape == (2, 3))
        with temporarily_clear_interpreter_stack():
            seen.append(F.maybe_current_level() is None)
        return x

    torch.func.vmap(f)(torch.ones(2, 3))
    _expect(seen == [True] * 4, f"facts of a batched tensor, got {seen}")
    _expect(F.maybe_current_level() is None, "None outside of torch.func's transforms")
    _expect(callable(F.pop_dynamic_layer_stack), "what takes a transform off the stack")


@_entry(
    "Operators and their kernels",
    """torch._C._dispatch_find_schema_or_throw torch._C._dispatch_get_all_op_names
    torch._C._dispatch_has_kernel torch._C._dispatch_has_kernel_for_dispatch_key
    torch._C._jit_resolve_packet torch._ops.OpOverload torch._ops.OpOverloadPacket
    torch._ops.HigherOrderOperator torch._ops._higher_order_ops
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    OpOverload._schema OpOverload._op OpOverload._op_dk
    OpOverloadPacket._qualified_op_name""",
    use="The catalogue lists operators; a call finds its overload, its schema and its kernels; "
    "higher-order operators ignore this package's keys.",
    stand_in="torch.ops for the list, torch.jit's schemas and the overloads tried in their order.",
    risk=Risk.MEDIUM,
)
def _operators() -> None:
    C, sin, x = torch._C, torch.ops.aten.sin, torch.ones(2)
    has_kernel: Any = C._dispatch_has_kernel_for_dispatch_key
    _expect("aten::sin.out" in C._dispatch_get_all_op_names(), "aten::sin.out among the names")
    _expect(C._dispatch_has_kernel("aten::sin"), "a kernel of aten::sin")
    _expect(has_kernel("aten::sin", "CPU"), "a kernel for the CPU")
    _expect(C._dispatch_find_schema_or_throw("aten::sin", ""), "a schema of aten::sin")
    name = C._jit_resolve_packet(sin._qualified_op_name, x)
    _expect(name == "default", f"the overload 'default', got {name!r}")
    schema = sin.default._schema
    _expect([a.name for a in schema.arguments] == ["self"], "the arguments of aten::sin")
    _expect(isinstance(sin.default, torch._ops.OpOverload), "an OpOverload")
    keys = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    _expect(isinstance(keys, list), "the keys that higher-order operators ignore")
    _expect(callable(torch._ops._higher_order_ops["cond"].fallthrough), "a way to ignore a key")
    _expect(torch.equal(sin.default._op(x), x.sin()), "the operator's function")
    key: Any = C.DispatchKey.CPU
    _expect(torch.equal(sin.default._op_dk(key, x), x.sin()), "the kernel for one key")


@_entry(
    "Operators of the user's own",
    """torch.library._defs torch._library.custom_ops.CustomOpDef torch._library.custom_ops.OPDEFS
    torch._library.custom_ops._maybe_get_opdef CustomOpDef._lib
    CustomOpDef._opoverload CustomOpDef._vmap_fn""",
    use="The overload, derivative and batching rule that torch.library registers for an operator.",
    stand_in="The same facts recorded by wrappers around torch.library's public functions.",
    risk=Risk.HIGH,
)
def _custom_operators() -> None:
    from torch._library.custom_ops import OPDEFS, _maybe_get_opdef

    definition = _HOLDERS["CustomOpDef"]()
    _expect(_maybe_get_opdef(definition._opoverload) is definition, "the definition of an overload")
    _expect(any(known is definition for known in OPDEFS.values()), "the definition in the table")
    _expect(isinstance(torch.library._defs, set), "the names of operators that Python defines")
    _expect(definition._vmap_fn is None, "no vmap before one is registered")


@_entry(
    "Settings that programs depend on",
    """_DisableAutocast _get_cudnn_benchmark _get_cudnn_deterministic _get_cudnn_enabled
    _get_cudnn_sdp_enabled _get_deterministic_algorithms _get_deterministic_algorithms_warn_only
    _get_flash_sdp_enabled _get_float32_matmul_precision _get_math_sdp_enabled
    _get_mem_efficient_sdp_enabled _get_mkldnn_enabled _is_any_autocast_enabled""",
    below="torch._C",
    use="A program belongs to the settings that it was traced under, which each call reads.",
    stand_in="The public functions that call these (torch.backends, torch.is_autocast_enabled).",
    risk=Risk.LOW,
)
def _settings() -> None:
    C = torch._C
    _expect(C._get_deterministic_algorithms() in (True, False), "a bool")
    _expect(C._get_float32_matmul_precision() == torch.get_float32_matmul_precision(), "a setting")
    with torch.autocast("cpu", torch.bfloat16):
        _expect(C._is_any_autocast_enabled(), "autocast")
        with C._DisableAutocast():
            _expect(not C._is_any_autocast_enabled(), "no autocast")


@_entry(
    "Hooks of all modules",
    """_global_backward_hooks _global_backward_pre_hooks _global_forward_hooks
    _global_forward_pre_hooks _has_any_global_hook""",
    below="torch.nn.modules.module",
    use="A program belongs to the hooks that run in every module.",
    stand_in="Wrappers around the public functions that register such hooks.",
    risk=Risk.LOW,
)
def _module_hooks() -> None:
    from torch.nn.modules import module

    before = len(module._global_forward_hooks)
    handle = module.register_module_forward_hook(lambda *_: None)
    try:
        _expect(len(module._global_forward_hooks) == before + 1, "a hook in the table")
        _expect(module._has_any_global_hook(), "True with a hook")
    finally:
        handle.remove()


@_entry(
    "Buffers of modules",
    "Module._buffers Module._non_persistent_buffers_set",
    use="A batched tensor that a function assigns to a buffer of a module from outside is taken "
    "out of it; export registers each buffer as the module has it, in state_dict() or not.",
    stand_in="get_buffer and register_buffer; the names that state_dict() lacks.",
    risk=Risk.LOW,
)
def _buffers() -> None:
    module, x = torch.nn.Identity(), torch.ones(2)
    module.register_buffer("kept", x)
    module.register_buffer("left_out", x, persistent=False)
    _expect(module._buffers["kept"] is x, "the table of buffers")
    _expect(module._non_persistent_buffers_set == {"left_out"}, "those that are not saved")


@_entry(
    "The profiler of one thread",
    """torch._C._autograd._disable_profiler_legacy torch._C._autograd._enable_profiler_legacy
    torch._C._autograd._profiler_enabled torch._C._profiler.ProfilerConfig
    torch._C._profiler.ProfilerState torch._C._profiler._ExperimentalConfig""",
    use='vmap(chunk_size="auto") measures the memory of its first chunks on the CPU.',
    stand_in="torch.profiler with profile_memory=True, which is slower to start.",
    risk=Risk.HIGH,
)
def _profiler() -> None:
    from tsfunc.bridge.tracers.memory_meter import Meter

    with Meter(torch.device("cpu")) as meter:
        torch.ones(1000).sin()
    _expect(meter.peak >= 4000, f"at least 4000 bytes, got {meter.peak}")


@_entry(
    "Fake tensors",
    """DataDependentOutputException DynamicOutputShapeException FakeTensor FakeTensorMode
    in_kernel_invocation_manager""",
    below="torch._subclasses.fake_tensor",
    use="A trace computes the metadata of results without memory.",
    stand_in="Shape rules of this package's own, which exist for the common operators.",
    risk=Risk.MEDIUM,
)
def _fake_tensors() -> None:
    from torch._subclasses import fake_tensor

    with fake_tensor.FakeTensorMode() as mode:
        x = torch.ones(2, 3)
        _expect(isinstance(x, fake_tensor.FakeTensor), "a fake tensor")
        _expect((x @ x.T).shape == (2, 2), "the shape of a product")
        try:
            x.sum().item()
        except fake_tensor.DataDependentOutputException:
            pass
        else:
            raise RuntimeError("expected an error for a result that depends on data")
    with fake_tensor.in_kernel_invocation_manager(mode):
        _expect(x.device.type == "meta", "the device of a fake tensor in a kernel")
    _expect(isinstance(mode.epoch, int), "the epoch of counts that masks keep")


@_entry(
    "Fake tensors made by copying attributes",
    """torch._C._set_throw_on_mutable_data_ptr torch._C._set_warn_deprecated_on_mutable_data_ptr""",
    use="A trace makes a fake tensor in a quarter of the time of its constructor.",
    stand_in="The constructor of FakeTensor.",
    risk=Risk.MEDIUM,
)
def _copied_fake_tensors() -> None:
    from torch._subclasses import fake_tensor

    from tsfunc.bridge.sizes.fake_mode import as_fake

    mode, device = fake_tensor.FakeTensorMode(), torch.device("cpu")
    meta = torch.ones(2, 3, device="meta")
    copy, made = as_fake(mode, meta, device), fake_tensor.FakeTensor(mode, meta, device)
    _expect(copy.device == device and type(copy) is type(made), "a fake tensor")
    _expect(vars(copy) == vars(made), "the attributes that the constructor sets")
    with mode:
        _expect((copy @ copy.T).shape == (2, 2), "the shape of a product")


@_entry(
    "Shapes of operators in torch's traces",
    "torch._subclasses.fake_impls.register_op_impl",
    use="Views of open sizes are views in the traces that torch makes of a program.",
    stand_in="reshape in place of view in what torch traces.",
    risk=Risk.HIGH,
)
def _fake_implementations() -> None:
    from torch._subclasses import fake_impls

    decorator: Any = fake_impls.register_op_impl([])  # for no operators
    _expect(decorator(_identity) is _identity, "a decorator")


@_entry(
    "Passes over Inductor's graphs",
    """torch._inductor.custom_graph_pass.CustomGraphPass
    torch._inductor.custom_graph_pass.get_hash_for_files""",
    use="Inductor compiles programs with loops whose carries own their memory.",
    stand_in="The same pass over the program, before Inductor takes it.",
    risk=Risk.MEDIUM,
)
def _inductor_passes() -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    _expect(hasattr(CustomGraphPass, "uuid"), "the key of a pass in Inductor's cache")
    _expect(len(get_hash_for_files((__file__,))) > 0, "a hash of files")


@_entry(
    "Classes of process groups",
    """torch._C._distributed_c10d.FakeWork torch._C._distributed_c10d.ProcessGroup
    torch._C._distributed_c10d.ReduceOp torch._C._distributed_c10d.Work
    ProcessGroup._allgather_base ProcessGroup._device_types ProcessGroup._reduce_scatter_base""",
    use="Collectives that write into their arguments are functional ones in a trace.",
    stand_in="torch.distributed.ProcessGroup, ReduceOp and Work; a finished work of our own.",
    risk=Risk.MEDIUM,
)
def _process_groups() -> None:
    distributed = torch._C._distributed_c10d
    _expect(distributed.ProcessGroup is torch.distributed.ProcessGroup, "the public class")
    _expect(distributed.ReduceOp is torch.distributed.ReduceOp, "the public class")
    _expect(hasattr(distributed.Work.boxed(distributed.FakeWork()), "wait"), "a work that is done")


@_entry(
    "The stores of process groups",
    "torch.distributed.distributed_c10d._world",
    use="A rank that raises leaves a report for ranks that wait for it.",
    stand_in="A store of this package's own for each mesh; or waits until the group's timeout.",
    risk=Risk.MEDIUM,
)
def _stores() -> None:
    _expect(isinstance(torch.distributed.distributed_c10d._world.pg_map, dict), "a dict of groups")


@_entry(
    "Modules with sharded parameters",
    """FSDPModule._get_fsdp_state FSDPState._mp_policy Module._forward_hooks
    Module._forward_pre_hooks""",
    use="A functional call gathers the parameters of the call, in place of the module's hooks.",
    stand_in="A refusal of modules that fully_shard was applied to.",
    risk=Risk.MEDIUM,
)
def _sharded_modules() -> None:
    fsdp = importlib.import_module("torch.distributed.fsdp")
    state = _sharding_state()
    _expect(state._mp_policy == fsdp.MixedPrecisionPolicy(), "the policy")
    for hooks in (state._modules[0]._forward_pre_hooks, state._modules[0]._forward_hooks):
        owners = [getattr(hook, "__self__", None) for hook in hooks.values()]
        _expect(owners == [state], "one hook of the state")


@_entry(
    "Checks of distribute_tensor",
    "torch.distributed.tensor._api.assert_no_mixed_partial_types",
    use="distribute_tensor, which detaches its argument, refuses the inputs of derivatives.",
    stand_in="A function of this package in the place of distribute_tensor.",
    risk=Risk.MEDIUM,
)
def _distribution() -> None:
    module: Any = importlib.import_module("torch.distributed.tensor._api")
    code = module.distribute_tensor.__code__
    _expect("assert_no_mixed_partial_types" in code.co_names, "a check of the placements")
    _expect(code.co_varnames[0] == "tensor", "an argument of the name tensor")


@_entry(
    "The simulated process group",
    "torch.testing._internal.distributed.fake_pg",
    use="One process acts as one rank of a large mesh.",
    stand_in="A gloo group for each rank; or no simulation.",
    risk=Risk.MEDIUM,
)
def _simulated_group() -> None:
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    _expect("fake" in torch.distributed.Backend.backend_list, "a backend named fake")


@_entry(
    "Arguments of nodes of graphs",
    "GraphNode._update_args_kwargs",
    use="A trace records a call without a look-up of its node by target and a search for symbolic "
    "numbers.",
    stand_in="The properties args and kwargs of torch.fx.Node.",
    risk=Risk.LOW,
)
def _arguments_of_nodes() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node: Any = graph.create_node("call_function", torch.sin)
    node._update_args_kwargs((x,), {"out": x})
    _expect(node.args == (x,) and node.kwargs == {"out": x}, "the arguments")
    _expect(node in x.users and node.all_input_nodes == [x], "the users of the arguments")


@_entry(
    "Symbolic sizes",
    """torch._guards.Source torch.fx.experimental._config
    torch.fx.experimental.symbolic_shapes._constrain_range_for_size
    torch._check torch._check_with torch._assert""",
    use="Named dims are symbols of a ShapeEnv; torch._check states facts about sizes.",
    stand_in="The algebra of sizes in tsfunc/types, and rules of shapes of this package's own.",
    risk=Risk.MEDIUM,
)
def _symbolic_sizes() -> None:
    from torch.fx.experimental import _config
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    _expect(hasattr(_config, "backed_size_oblivious"), "the setting backed_size_oblivious")
    environment: Any = ShapeEnv()
    source: Any = type("Named", (torch._guards.Source,), {"name": "n", "_name_template": "n"})()
    symbol = environment.create_symbol(7, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    size = environment.create_symintnode(symbol, hint=7, source=source)
    _expect(size.node.shape_env is environment and size.node.hint == 7, "a symbolic size")
    torch._check(size > 3)
    _expect(len(environment.guards) > 0, "a guard for each question")
    new_symbol = environment.create_unbacked_symint().node.expr
    _expect(new_symbol in environment.var_to_range, "the symbols of an environment")
    _expect(new_symbol in environment.pending_fresh_unbacked_symbols, "symbols without a node")


@_entry(
    "Checks of values",
    """torch._check_tensor_all_with torch._is_all_true torch.Tensor._is_all_true
    torch._assert_async torch.distributions.Distribution._validate_sample""",
    use="torch's functions for checks, and those of torch.distributions, take batched tensors.",
    stand_in="tsfunc.check, and distributions with validate_args=False.",
    risk=Risk.MEDIUM,
)
def _checks_of_values() -> None:
    passes = torch.tensor([True, False])
    try:
        torch._assert_async(passes[1], "it fails")
    except RuntimeError as error:
        _expect("it fails" in str(error), "the message of an assertion")
    else:
        _expect(False, "an error of an assertion that fails")
    _expect(not torch._is_all_true(passes) and not passes._is_all_true(), "a False for all")
    try:
        torch._check_tensor_all_with(KeyError, passes, lambda: "some fail")
    except KeyError as error:
        _expect(error.args == ("some fail",), "the message of a check")
    else:
        _expect(False, "an error of the class that a check names")
    try:
        torch.distributions.Normal(0.0, 1.0)._validate_sample(torch.tensor(torch.nan))
    except ValueError:
        return
    _expect(False, "a refusal of a value outside of the support")


@_entry(
    "Functions of size expressions",
    """functions.FloorDiv functions.Max functions.Min functions.Mod functions.PythonMod
    functions.ToFloat functions.TruncToInt interp.sympy_interp printers.PythonPrinter
    reference.PythonReferenceAnalysis value_ranges.ValueRanges value_ranges.bound_sympy""",
    below="torch.utils._sympy",
    use="Expressions of sizes are read, bounded, solved and printed.",
    stand_in="The algebra of sizes in tsfunc/types.",
    risk=Risk.MEDIUM,
)
def _size_expressions() -> None:
    import sympy
    from torch.utils._sympy.functions import FloorDiv, Mod
    from torch.utils._sympy.printers import PythonPrinter
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    n = sympy.Symbol("n", integer=True, positive=True)
    _expect(FloorDiv(n, 2).subs(n, 7) == 3 and Mod(n, 4).subs(n, 7) == 3, "quotients")
    _expect(bound_sympy(n + 1, {n: ValueRanges(2, 5)}).upper == 6, "bounds of a sum")
    _expect("n // 2" in PythonPrinter().doprint(FloorDiv(n, 2)), "an expression as Python code")


@_entry(
    "Frames that Dynamo skips",
    """_FrameAction _FrameExecStrategy set_code_exec_strategy""",
    below="torch._C._dynamo.eval_frame",
    use="torch.compile leaves the frames of this package alone.",
    stand_in="torch.compiler.disable on each entry point.",
    risk=Risk.HIGH,
)
def _frames() -> None:
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy((lambda: None).__code__, strategy)


@_entry(
    "Calls of compiled functions",
    """torch._C._dynamo.eval_frame.set_fullgraph_compiled_frame_count
    torch._dynamo.eval_frame._callback_from_stance""",
    use="A function that torch.compile has compiled runs as Python inside of a transform.",
    stand_in="torch.compiler.set_stance, which holds for all threads.",
    risk=Risk.MEDIUM,
)
def _compiled_calls() -> None:
    from torch._C._dynamo.eval_frame import set_fullgraph_compiled_frame_count as counted
    from torch._dynamo import eval_frame

    _expect(eval_frame._callback_from_stance(None) is None, "None stays None without a stance")
    before = counted(-1)
    _expect(counted(before) == -1, "the count that was set")


@_entry(
    "The flag of torch.compiler.is_compiling",
    """torch.compiler._is_compiling_flag""",
    use="torch.compiler.is_compiling() is True inside of a trace, for libraries that check it.",
    stand_in="A function in the place of torch.compiler.is_compiling.",
    risk=Risk.MEDIUM,
)
def _is_compiling() -> None:
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag
    compiler._is_compiling_flag = True
    try:
        _expect(compiler.is_compiling(), "the flag")
    finally:
        compiler._is_compiling_flag = before


@_entry(
    "Steps of optimizers",
    """torch.amp.grad_scaler.GradScaler._maybe_opt_step Optimizer._init_group""",
    use="functional_optimizer(...).init() makes the state that the first step would make; a trace "
    "undoes a step that a GradScaler skips.",
    stand_in="An empty state: a scan then begins after a first step outside of it. A refusal of "
    "GradScaler.step in traces.",
    risk=Risk.MEDIUM,
)
def _optimizer_state() -> None:
    from tsfunc.bridge.tracers.optimizers import make_state

    param = torch.ones(2, requires_grad=True)
    param.grad = torch.ones(2)
    adam = torch.optim.Adam([param])
    make_state(adam)
    _expect({*adam.state[param]} == {"step", "exp_avg", "exp_avg_sq"}, "the state of Adam")
    _expect(bool((param == 1).all()), "no step")
    scaler: Any = torch.amp.GradScaler("cpu")
    scaler._maybe_opt_step(adam, {"found_inf_per_device": {"cpu": torch.tensor(1.0)}})
    _expect(bool((param == 1).all()), "no step with an infinite gradient")


@_entry(
    "Guards in C++",
    "torch._C._dynamo.guards.TensorGuards",
    use="A program's guard compares the metadata of all fixed-size tensors in one call.",
    stand_in="Comparisons in Python, which take ten times as long.",
    risk=Risk.HIGH,
)
def _guards() -> None:
    guards: Any = torch._C._dynamo.guards.TensorGuards
    x = torch.ones(2, 3)
    check = guards(x, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]])
    _expect(check.check(torch.zeros(2, 3)), "True for the same metadata")
    _expect(not check.check(torch.zeros(2, 4)), "False for another size")


@_entry(
    "Compilers",
    """torch._inductor.aoti_compile_and_package torch._inductor.compile_fx.compile_fx
    torch._inductor.decomposition.select_decomp_table
    torch._dynamo.backends.registry.lookup_backend torch._dynamo.exc.InvalidBackend
    torch._functorch.config torch._C._autograd._get_current_graph_task_keep_graph
    torch._guards.TracingContext torch._guards.tracing""",
    use='specialize(backend="inductor") and other backends by name, and tsfunc export --to aoti.',
    stand_in="torch.compile of the program's module.",
    risk=Risk.LOW,
)
def _compilers() -> None:
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import InvalidBackend
    from torch._functorch import config
    from torch._guards import TracingContext, tracing
    from torch._inductor.decomposition import select_decomp_table

    context = TracingContext(None)
    with tracing(context):
        _expect(TracingContext.try_get() is context, "the context that a compiler runs in")
    with config.patch(donated_buffer=False):
        _expect(config.donated_buffer is False, "a setting for donated buffers")
    _expect(
        torch._C._autograd._get_current_graph_task_keep_graph() is True,
        "True outside of a backward pass",
    )
    _expect(torch.ops.aten.lerp.Scalar in select_decomp_table(), "a table of decompositions")
    _expect(callable(lookup_backend("aot_eager")), "the backend aot_eager")
    try:
        lookup_backend("a backend that does not exist")
    except InvalidBackend:
        return
    raise RuntimeError("expected an error for an unknown backend")


@_entry(
    "Control flow in torch's graphs",
    """torch._higher_order_ops.associative_scan torch._higher_order_ops.map
    torch._higher_order_ops.scan torch._higher_order_ops.utils
    torch._higher_order_ops.while_loop""",
    use="Exported and compiled programs have torch's operators of control flow, and torch's own "
    "control flow is this package's inside of transforms.",
    stand_in="Loops unrolled for export; torch.cond alone is public.",
    risk=Risk.HIGH,
)
def _control_flow() -> None:
    from torch._higher_order_ops import associative_scan, map, scan, utils, while_loop

    for function in (associative_scan, map, scan, while_loop):
        _expect(callable(function), "functions")
    _expect(callable(utils._hop_compile_and_call), "the function that compiles a call")


@_entry(
    "Identity and memory of tensors",
    """torch._C._storage_Use_Count torch._C._swap_tensor_impl torch._neg_view
    torch.Tensor._is_view Tensor._is_view Tensor._use_count UntypedStorage._cdata
    Tensor._base Tensor._version""",
    use="A tensor that a transform's function writes to becomes a tracer in place; memory that "
    "tensors share is told by its address, and writes to it by its version.",
    stand_in="torch.utils.swap_tensors, which refuses tensors with weak references; data_ptr().",
    risk=Risk.MEDIUM,
)
def _identity_of_tensors() -> None:
    x, y = torch.ones(2), torch.zeros(3)
    storage = x.untyped_storage()
    _expect(torch._C._storage_Use_Count(storage._cdata) >= 2, "two references to a storage")
    torch._C._swap_tensor_impl(x, y)
    _expect(x.shape == (3,) and y.shape == (2,), "two tensors that changed places")
    _expect(x[1:]._is_view() and not x._is_view(), "True for a view alone")
    view, version = x[1:], x._version
    _expect(view._base is x and x._base is None, "the base of a view")
    view.add_(1)
    _expect(x._version == view._version == version + 1, "one count of writes for shared memory")
    _expect(torch._neg_view(y)[0] == -1, "a view with the sign changed")
    count: Any = x
    _expect(count._use_count() >= 1, "the references to a tensor")


@_entry(
    "torch's pytrees",
    """torch.utils._pytree.SUPPORTED_NODES torch.utils._pytree.GetAttrKey
    torch.utils._pytree.tree_leaves torch.utils._pytree.tree_map""",
    use="Classes that users registered with torch's pytrees are containers here as well.",
    stand_in="torch.utils.pytree, as soon as it is public.",
    risk=Risk.LOW,
)
def _pytrees() -> None:
    from torch.utils import _pytree

    _expect(_pytree.tree_leaves({"a": [1, 2]}) == [1, 2], "the leaves of a tree")
    _expect(dict in _pytree.SUPPORTED_NODES, "the table of containers")


@_entry(
    "Sparse tensors",
    "torch.Tensor._nnz torch._sparse_sum Tensor._indices",
    use="Rules for sparse tensors that are not coalesced.",
    stand_in="values().shape[0], torch.sparse.sum and indices() of coalesced tensors.",
    risk=Risk.LOW,
)
def _sparse() -> None:
    x: Any = torch.eye(2).to_sparse()
    _expect(x._nnz() == 2 and x._indices().shape == (2, 2), "the entries of a sparse tensor")
    _expect(torch._sparse_sum(x) == 2, "their sum")


@_entry(
    "Decompositions, and C functions of torch.nn",
    "torch._decomp.decomposition_table torch._C._nn",
    use="An operator without a rule is batched by its decomposition; in-place functions of "
    "torch.nn.functional are known by their C functions.",
    stand_in="torch.export's public table of decompositions (torch.export.default_decompositions).",
    risk=Risk.LOW,
)
def _decompositions() -> None:
    from torch._decomp import decomposition_table

    _expect(torch.ops.aten.hardswish.default in decomposition_table, "aten::hardswish")
    _expect(torch.equal(torch._C._nn.gelu(torch.zeros(2)), torch.zeros(2)), "gelu")


def by_risk() -> Iterator[PrivateNames]:
    """Yield the entries, those with the highest risk first."""
    for risk in Risk:
        yield from (entry for entry in PRIVATE_NAMES if entry.risk is risk)


def table() -> str:
    """Return the list as the Markdown table of ``docs/dependencies.md``."""
    lines = ["| risk | purpose | names | stand-in |", "|---|---|---|---|"]
    for entry in by_risk():
        names = ", ".join(f"`{name}`" for name in entry.names).replace("|", "\\|")
        lines.append(
            f"| {entry.risk.value} | {entry.title}. {entry.use} | {names} | {entry.stand_in} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
