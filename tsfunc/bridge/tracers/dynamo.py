"""Interoperation with torch.compile, which traces Python by Dynamo.

Code inside a transform works on tracers, which Dynamo does not support. The functions that enter a
transform are therefore marked, so that Dynamo traces neither them nor their callees. The mark
costs a call nothing.

NOTE [transforms in torch.compile]
Dynamo traces torch.func's transforms. A transform that torch.func has too calls torch.func's while
Dynamo traces it, so that the graph does not break. With arguments that torch.func does not take,
and for transforms that it does not have, the graph breaks before the call.

NOTE [inside of torch.compile]
Dynamo traces a call of a specialized function as a call of the original function. Dynamo makes its
own graph and guards, so a program in between would gain nothing, and the graph need not break. If
the function calls a transform, the graph breaks before the call, and the program runs.

NOTE [compiled functions inside of transforms]
Code that Dynamo has compiled does not know tracers either. Inside a transform a compiled function
therefore runs as Python, as under ``torch.compiler.set_stance("force_eager")``, which holds for all
threads; transforms and traces see the operators that its Python calls. The same holds for forward
mode and higher derivatives of plain tensors, which compiled code does not have.

NOTE [control flow in torch's graphs]
While torch records a graph (torch.compile, torch.export, make_fx), control flow functions call
torch's own, so that the graph has them as operators; ``transforms/control/dynamo_forms`` lists
them. Inside an active transform, torch instead records the operators on batches and cotangents.

Dynamo does not trace calls of a function with ``_torchdynamo_disable``, and gives
``_torchdynamo_disable_msg`` as the reason; it traces ``_torchdynamo_inline`` of a function in its
place. ``torch.compile`` of a function compiles its ``_torchdynamo_orig_callable``, if
``_torchdynamo_wrapper_id`` is the function's id. ``_callback_from_stance`` returns Dynamo's
callback for a call of a compiled function, and None for a call that runs as Python.
``set_fullgraph_compiled_frame_count`` sets the number of frames that a call has compiled, -1 if
they are not counted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._C._dynamo import eval_frame
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.compiler import is_dynamo_compiling

from tsfunc.dispatch.state import tls

F = TypeVar("F", bound=Callable[..., Any])

_REASON = (
    "inside of tsfunc's transforms are tensors that torch.compile does not know, so its graph "
    "breaks at a transform or argument that torch.func does not have. Leave fullgraph=True out, "
    "compile the function that is transformed, or compile "
    "the operators that the transforms leave: f = tsfunc.specialize(f), and then f.graph_module, "
    "or tsfunc.specialize(f, backend='inductor')"
)
_skip: Any = eval_frame._FrameAction.SKIP
_SKIP_ALL = eval_frame._FrameExecStrategy(_skip, _skip)
# The marked code objects by id, because the hash of a code object covers all its contents.
_outside: dict[int, Any] = {}
# Copies of code objects whose functions Dynamo may trace or not, by the id of the original.
_copies: dict[int, tuple[CodeType, CodeType]] = {}


def outside_dynamo(func: F) -> F:
    """Mark a function so that Dynamo traces neither it nor its callees."""
    code: Any = getattr(func, "__code__")  # noqa: B009 - no attribute of every Callable
    if id(code) not in _outside:  # all functions that a transform makes share it
        eval_frame.set_code_exec_strategy(code, _SKIP_ALL)
        _outside[id(code)] = code
    func._torchdynamo_disable = True  # type: ignore[attr-defined]
    func._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return func


def copy_outside_dynamo(func: F) -> F:
    """Mark a function as :func:`outside_dynamo` does, but no other functions of its code.

    ``torch.compile`` of the function itself compiles a call of it, at which the graph breaks.
    """
    code: CodeType = getattr(func, "__code__")  # noqa: B009 - no attribute of every Callable
    if id(code) not in _copies:
        _copies[id(code)] = code, code.replace()
    func.__code__ = _copies[id(code)][1]
    outside_dynamo(func)
    marked: Any = func
    marked._torchdynamo_orig_callable = _call_of(_same_function(marked))
    marked._torchdynamo_wrapper_id = id(marked)
    return func


def _same_function(func: FunctionType) -> FunctionType:
    """Return a function of the same code and attributes, which the function can refer to."""
    same = FunctionType(
        func.__code__, func.__globals__, func.__name__, func.__defaults__, func.__closure__
    )
    same.__qualname__, same.__kwdefaults__ = func.__qualname__, func.__kwdefaults__
    same.__dict__.update(func.__dict__)
    return same


def _call_of(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return call


def replace_in_dynamo(other: Callable[..., Any]) -> Callable[[F], F]:
    """Return a decorator: Dynamo traces ``other`` in place of the decorated function."""

    def mark(func: F) -> F:
        func._torchdynamo_inline = other  # type: ignore[attr-defined]
        return func

    return mark


def delegate_in_dynamo(other: Callable[..., Any]) -> Callable[[F], F]:
    """Return a decorator: while Dynamo traces, calls go to ``other``.

    Args:
        other: takes the arguments of the decorated function; returns NotImplemented for arguments
            that it does not serve, at which Dynamo's graph breaks.
    """

    def decorate(func: F) -> F:
        @functools.wraps(func)
        def called(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                out = other(*args, **kwargs)
                if out is not NotImplemented:
                    return out
            return func(*args, **kwargs)

        outside_dynamo(func)  # after ``wraps``, which would mark the other function too
        return cast(F, called)

    return decorate


_compiled_code_runs_eagerly = False


def run_compiled_code_eagerly(inside: Callable[[], bool]) -> None:
    """Let compiled functions run as Python: NOTE [compiled functions inside of transforms].

    Nothing is compiled before Dynamo is imported, which takes seconds, so this waits for it.

    Args:
        inside: returns True inside the transforms whose values compiled code can't take.
    """
    global _compiled_code_runs_eagerly
    if _compiled_code_runs_eagerly:
        return
    module: Any = sys.modules.get("torch._dynamo.eval_frame")
    get_callback = getattr(module, "_callback_from_stance", None)
    if get_callback is None:
        return

    @functools.wraps(get_callback)
    def callback_of_call(callback: Any) -> Any:
        if not inside():
            return get_callback(callback)
        # With ``fullgraph=True`` a call that compiles nothing is an error, if they are counted.
        eval_frame.set_fullgraph_compiled_frame_count(-1)
        return None

    module._callback_from_stance = callback_of_call
    _compiled_code_runs_eagerly = True


_PROXY: Any = _TorchDispatchModeKey.PROXY


def torch_records() -> bool:
    """True if torch records calls: NOTE [control flow in torch's graphs]."""
    if is_dynamo_compiling():
        return True
    recording = _get_dispatch_mode(_PROXY) or _get_dispatch_mode_pre_dispatch(_PROXY)
    return recording is not None and not tls.state.levels
