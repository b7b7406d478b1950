"""The dispatcher's private names: keys, handlers, modes, operators, settings, tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from tsfunc.bridge.private_names.entries import HOLDERS, Risk, entry, expect


@entry(
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
        expect(excluded(key), "an excluded key")
        with C._ForceDispatchKeyGuard(*before):
            expect(not excluded(key), "the forced sets")
    with C._SetExcludeDispatchKeyGuard(key, True):
        expect(excluded(key), "an excluded key")
    with C._PreserveDispatchKeyGuard():
        C._dispatch_tls_set_dispatch_key_excluded(key, True)
    expect(not excluded(key), "the preserved sets")
    with C._AutoDispatchBelowAutograd():
        expect(excluded(key), "autograd's keys excluded")
    expect(not C._after_autograd_keyset.has(key), "the keys after autograd")
    included: Any = C._parse_dispatch_key("TESTING_ONLY_GenericMode")
    with C._IncludeDispatchKeyGuard(included):
        expect(C._dispatch_tls_local_include_set().has(included), "an included key")
    unused: Any = C._parse_dispatch_key("TESTING_ONLY_GenericWrapper")
    with C._ExcludeDispatchKeyGuard(C.DispatchKeySet(unused)):
        expect(excluded(unused) and bool((torch.ones(2) > 0).all()), "an excluded key without use")
    expect(not excluded(key), "the sets that were there before")
    expect(C._dispatch_keyset_full_after(key).has(C.DispatchKey.CPU), "the backend after autograd")


@entry(
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
    expect(wrapper.shape == (2, 3) and wrapper.dtype is torch.float64, "the metadata given")
    expect(torch.sin(wrapper).shape == (), "a call of __torch_dispatch__")
    with torch._C._DisableTorchDispatch():
        expect(make(Wrapper, wrapper.shape).shape == (2, 3), "a call without __torch_dispatch__")
    expect(torch.Tensor._make_subclass(Wrapper, torch.ones(2)).shape == (2,), "a subclass")


@entry(
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
    expect(torch.sin(x) == "seen", "a call of __torch_function__")
    with torch._C.DisableTorchFunctionSubclass():
        expect(isinstance(torch.sin(x), torch.Tensor), "a call without __torch_function__")
    with torch._C.DisableTorchFunction():
        expect(isinstance(torch.sin(x), torch.Tensor), "a call without __torch_function__")
        with torch._C._EnableTorchFunction():
            expect(torch.sin(x) == "seen", "a call of __torch_function__")
    state: Any = torch._C
    with torch._C.DisableTorchFunctionSubclass():
        before = state._get_torch_function_state()
        expect(not state._is_torch_function_enabled(), "calls are switched off")
        state._set_torch_function_state(state._TorchFunctionState.ENABLED)
        expect(state._is_torch_function_enabled(), "calls are switched on")
        state._set_torch_function_state(before)
    expect(
        isinstance(skip(torch.sin, (Seen,), (x,), {}), torch.Tensor),
        "one call without __torch_function__",
    )


@entry(
    "Stacks of modes",
    """torch._C._len_torch_function_stack torch._C._pop_torch_function_stack
    torch._C._push_on_torch_function_stack torch._C._len_torch_dispatch_stack
    torch._C._pop_torch_dispatch_stack torch._C._push_on_torch_dispatch_stack
    torch._C._get_dispatch_mode torch._C._TorchDispatchModeKey torch._C._unset_dispatch_mode
    torch._C._RestorePythonTLSSnapshot torch._ops._get_dispatch_mode_pre_dispatch
    torch._library.simple_registry.find_torch_dispatch_rule
    torch._subclasses.functional_tensor.FunctionalTensor
    torch._subclasses.functional_tensor.FunctionalTensorMode
    torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode
    torch.utils._python_dispatch.TorchDispatchMode
    torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo
    torch.utils._python_dispatch._get_current_dispatch_mode_stack
    torch.utils._device.DeviceContext torch.overrides._pop_mode
    torch.utils._python_dispatch._pop_mode torch._C._is_torch_function_mode_enabled
    torch.overrides._get_current_function_mode_stack""",
    use="A trace sets the modes of its caller apart, and reads which of torch's modes are active: "
    "its own mode is active while the traced function's code runs. An interrupt in the handler of "
    "a mode or a fake tensor of torch's own does not end the process.",
    stand_in="torch.overrides for function modes; the context managers of the modes themselves.",
    risk=Risk.MEDIUM,
)
def _modes() -> None:
    from torch.utils import _python_dispatch

    C = torch._C
    expect(_python_dispatch.TorchDispatchMode._should_skip_dynamo(), "a mode that Dynamo skips")
    expect(hasattr(C, "_RestorePythonTLSSnapshot"), "the state of a mode's caller")
    with _python_dispatch.TorchDispatchMode() as mode:
        expect(C._len_torch_dispatch_stack() > 0, "an active dispatch mode")
        expect(_python_dispatch._get_current_dispatch_mode_stack()[-1] is mode, "the mode on top")
        popped = C._pop_torch_dispatch_stack(None)
        C._push_on_torch_dispatch_stack(popped)
        expect(popped is mode, "the mode on top")
        expect(_python_dispatch._pop_mode() is mode, "the mode on top")
        C._push_on_torch_dispatch_stack(mode)
    expect(C._get_dispatch_mode(C._TorchDispatchModeKey.FAKE) is None, "no fake tensor mode")
    expect(C._get_dispatch_mode(C._TorchDispatchModeKey.PROXY) is None, "no proxy mode")
    expect(C._unset_dispatch_mode(C._TorchDispatchModeKey.PROXY) is None, "no proxy mode")
    functional = torch._subclasses.functional_tensor.FunctionalTensorMode()
    with functional:
        expect(C._unset_dispatch_mode(functional._mode_key) is functional, "the functional mode")
        C._push_on_torch_dispatch_stack(functional)
    metadata = torch._subclasses.functional_tensor.FunctionalTensor.metadata_fns
    expect(torch.ops.prim.device.default in metadata, "the operator for the device")
    rule = torch._library.simple_registry.find_torch_dispatch_rule.__code__
    expect("op" in rule.co_varnames, "a search for a rule of an operator")
    namespace = vars(torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode)
    expect("__torch_dispatch__" in namespace, "a handler of the proxy mode")
    proxy: Any = C._TorchDispatchModeKey.PROXY
    expect(torch._ops._get_dispatch_mode_pre_dispatch(proxy) is None, "no proxy mode")
    depth = C._len_torch_function_stack()
    with torch.device("meta"):
        expect(C._len_torch_function_stack() == depth + 1, "an active function mode")
        function_mode = C._pop_torch_function_stack()
        C._push_on_torch_function_stack(function_mode)
        expect(torch.overrides._pop_mode() is function_mode, "the mode on top")
        C._push_on_torch_function_stack(function_mode)
        active = torch.overrides._get_current_function_mode_stack()
        expect(active[-1] is function_mode, "the mode on top")
        expect(C._is_torch_function_mode_enabled(), "function modes in use")
        with C.DisableTorchFunction():
            expect(not C._is_torch_function_mode_enabled(), "no function modes")


@entry(
    "State that torch's context managers set",
    """torch._C._InferenceMode torch._C.is_inference_mode_enabled torch._C._only_lift_cpu_tensors
    torch._C._set_only_lift_cpu_tensors torch._C.autocast_increment_nesting
    torch._C.autocast_decrement_nesting torch._C.clear_autocast_cache torch._C.get_autocast_dtype
    torch._C.set_autocast_dtype torch._C.is_autocast_cache_enabled
    torch._C.set_autocast_cache_enabled torch.utils._python_dispatch._push_mode
    torch.utils._python_dispatch._is_in_torch_dispatch_mode
    torch.utils._python_dispatch._is_in_non_infra_torch_dispatch_mode
    torch.utils._python_dispatch._is_in_any_mode_without_ignore_compile_internals
    torch.utils._python_dispatch.set_is_in_mode_without_ignore_compile_internals""",
    use="A thread is as it was after an interrupted call.",
    stand_in="The context managers themselves; an interrupt inside of one would leave it half set.",
    risk=Risk.LOW,
)
def _context_state() -> None:
    from torch.utils import _python_dispatch

    C = torch._C
    before = C.is_inference_mode_enabled()
    guard = C._InferenceMode(not before)
    guard.__enter__()
    changed = C.is_inference_mode_enabled()
    guard.__exit__(None, None, None)
    expect(changed is not before, "another inference mode")
    lifts = C._only_lift_cpu_tensors()
    C._set_only_lift_cpu_tensors(not lifts)
    changed = C._only_lift_cpu_tensors()
    C._set_only_lift_cpu_tensors(lifts)
    expect(changed is not lifts, "a flag that changes")
    depth = C.autocast_increment_nesting()
    expect(C.autocast_decrement_nesting() == depth - 1, "the depth of autocast")
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        expect(C.get_autocast_dtype("cpu") is torch.float16, "the dtype of autocast")
        expect(not C.is_autocast_cache_enabled(), "autocast without a cache")
    flag = _python_dispatch._is_in_torch_dispatch_mode
    with _python_dispatch.TorchDispatchMode() as mode:
        expect(_python_dispatch._is_in_torch_dispatch_mode, "a flag for dispatch modes")
        C._pop_torch_dispatch_stack(None)
        _python_dispatch._push_mode(mode)
    expect(_python_dispatch._is_in_torch_dispatch_mode is flag, "the flag from before")


@entry(
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
    expect(changed, "a grad mode that changes")
    with forward_ad._set_fwd_grad_enabled(False):
        expect(not torch._C._is_fwd_grad_enabled(), "forward mode switched off")
        torch._C._set_fwd_grad_enabled(True)
        expect(torch._C._is_fwd_grad_enabled(), "forward mode switched on")
    expect(callable(torch._C._exit_dual_level), "what leaves the dual level")
    level = forward_ad._current_level
    with forward_ad.dual_level():
        expect(forward_ad._current_level == level + 1, "the number of the dual level")
        dual = torch._VF._make_dual(torch.ones(2), torch.ones(2), level=level + 1)
        expect(forward_ad.unpack_dual(dual).tangent is not None, "a tangent")


@entry(
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

    expect(issubclass(torch.autograd.Function, _SingleLevelFunction), "a base class of Function")
    expect(type(_SingleLevelFunction) is FunctionMeta, "a metaclass of its own")
    expect("apply" in torch._C._FunctionBase.__dict__, "the method in C++")


@entry(
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
    expect("aten::sin.out" in C._dispatch_get_all_op_names(), "aten::sin.out among the names")
    expect(C._dispatch_has_kernel("aten::sin"), "a kernel of aten::sin")
    expect(has_kernel("aten::sin", "CPU"), "a kernel for the CPU")
    expect(C._dispatch_find_schema_or_throw("aten::sin", ""), "a schema of aten::sin")
    name = C._jit_resolve_packet(sin._qualified_op_name, x)
    expect(name == "default", f"the overload 'default', got {name!r}")
    schema = sin.default._schema
    expect([a.name for a in schema.arguments] == ["self"], "the arguments of aten::sin")
    expect(isinstance(sin.default, torch._ops.OpOverload), "an OpOverload")
    keys = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    expect(isinstance(keys, list), "the keys that higher-order operators ignore")
    expect(callable(torch._ops._higher_order_ops["cond"].fallthrough), "a way to ignore a key")
    expect(torch.equal(sin.default._op(x), x.sin()), "the operator's function")
    key: Any = C.DispatchKey.CPU
    expect(torch.equal(sin.default._op_dk(key, x), x.sin()), "the kernel for one key")


@entry(
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

    definition = HOLDERS["CustomOpDef"]()
    expect(_maybe_get_opdef(definition._opoverload) is definition, "the definition of an overload")
    expect(any(known is definition for known in OPDEFS.values()), "the definition in the table")
    expect(isinstance(torch.library._defs, set), "the names of operators that Python defines")
    expect(definition._vmap_fn is None, "no vmap before one is registered")


@entry(
    "Decompositions, and C functions of torch.nn",
    "torch._decomp.decomposition_table torch._C._nn",
    use="An operator without a rule is batched by its decomposition; in-place functions of "
    "torch.nn.functional are known by their C functions.",
    stand_in="torch.export's public table of decompositions (torch.export.default_decompositions).",
    risk=Risk.LOW,
)
def _decompositions() -> None:
    from torch._decomp import decomposition_table

    expect(torch.ops.aten.hardswish.default in decomposition_table, "aten::hardswish")
    expect(torch.equal(torch._C._nn.gelu(torch.zeros(2)), torch.zeros(2)), "gelu")


@entry(
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
    expect(C._get_deterministic_algorithms() in (True, False), "a bool")
    expect(C._get_float32_matmul_precision() == torch.get_float32_matmul_precision(), "a setting")
    with torch.autocast("cpu", torch.bfloat16):
        expect(C._is_any_autocast_enabled(), "autocast")
        with C._DisableAutocast():
            expect(not C._is_any_autocast_enabled(), "no autocast")


@entry(
    "Identity and memory of tensors",
    """torch._C._storage_Use_Count torch._C._swap_tensor_impl torch._neg_view
    torch.Tensor._is_view Tensor._is_view Tensor._use_count UntypedStorage._cdata
    Tensor._base Tensor._version Generator._cdata""",
    use="A tensor that a transform's function writes to becomes a tracer in place; memory that "
    "tensors share is told by its address, and writes to it by its version. A generator that "
    "the function makes is told from others by its address.",
    stand_in="torch.utils.swap_tensors, which refuses tensors with weak references; data_ptr().",
    risk=Risk.MEDIUM,
)
def _identity_of_tensors() -> None:
    x, y = torch.ones(2), torch.zeros(3)
    storage = x.untyped_storage()
    expect(torch._C._storage_Use_Count(storage._cdata) >= 2, "two references to a storage")
    torch._C._swap_tensor_impl(x, y)
    expect(x.shape == (3,) and y.shape == (2,), "two tensors that changed places")
    expect(x[1:]._is_view() and not x._is_view(), "True for a view alone")
    view, version = x[1:], x._version
    expect(view._base is x and x._base is None, "the base of a view")
    view.add_(1)
    expect(x._version == view._version == version + 1, "one count of writes for shared memory")
    expect(torch._neg_view(y)[0] == -1, "a view with the sign changed")
    count: Any = x
    expect(count._use_count() >= 1, "the references to a tensor")
    generators: list[Any] = [torch.Generator(), torch.Generator()]
    expect(generators[0]._cdata != generators[1]._cdata, "the addresses of two generators")


@entry(
    "Sparse tensors",
    "torch.Tensor._nnz torch._sparse_sum Tensor._indices",
    use="Rules for sparse tensors that are not coalesced.",
    stand_in="values().shape[0], torch.sparse.sum and indices() of coalesced tensors.",
    risk=Risk.LOW,
)
def _sparse() -> None:
    x: Any = torch.eye(2).to_sparse()
    expect(x._nnz() == 2 and x._indices().shape == (2, 2), "the entries of a sparse tensor")
    expect(torch._sparse_sum(x) == 2, "their sum")


@entry(
    "Packing and padding of sequences",
    "torch._VF._pack_padded_sequence torch._VF._pad_packed_sequence",
    use="vmap packs and pads sequences whose lengths all examples share, and programs those of any "
    "lengths.",
    stand_in="The error of the C++ function, which reads the sizes of a tracer as numbers.",
    risk=Risk.LOW,
)
def _padding() -> None:
    x, lengths = torch.ones(2, 1, 3), torch.tensor([2])
    packed, counts = torch._VF._pack_padded_sequence(x, lengths, False)
    expect(packed.shape == (2, 3) and counts.tolist() == [1, 1], "one packed sequence")
    lengths = torch.tensor([1, 1])
    padded, counts = torch._VF._pad_packed_sequence(torch.ones(2, 3), lengths, False, 0.0, 2)
    expect(padded.shape == (2, 1, 3) and counts.tolist() == [2], "one padded sequence")


@entry(
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


@entry(
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
    expect(meter.peak >= 4000, f"at least 4000 bytes, got {meter.peak}")


@entry(
    "torch's pytrees",
    """torch.utils._pytree.SUPPORTED_NODES torch.utils._pytree.GetAttrKey
    torch.utils._pytree.tree_leaves torch.utils._pytree.tree_map""",
    use="Classes that users registered with torch's pytrees are containers here as well.",
    stand_in="torch.utils.pytree, as soon as it is public.",
    risk=Risk.LOW,
)
def _pytrees() -> None:
    from torch.utils import _pytree

    expect(_pytree.tree_leaves({"a": [1, 2]}) == [1, 2], "the leaves of a tree")
    expect(dict in _pytree.SUPPORTED_NODES, "the table of containers")
