"""Run a program by tsfunc and by the reference, and compare the results."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import linecache
import math
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import tsfunc
from tools.fuzz import reference, work
from tools.fuzz.circumstances import CHANGES, FLOAT32, GRADIENTS, around
from tools.fuzz.formulas import Formulas
from tools.fuzz.program import SHARED, Program, call_text, captured_text, source
from tools.fuzz.refusals import refused

OK, REFUSED, SKIPPED = "ok", "refused", "skipped"
WRONG, RAISES, BROKEN = "wrong", "raises", "broken"
CRASHES, HANGS = "crashes", "hangs"
FAILURES = (WRONG, RAISES, BROKEN, CRASHES, HANGS)

RTOL, ATOL = 1e-6, 1e-8
_SHAKEN = 1e-7  # relative change of the inputs for a check of the conditioning
_numbers = itertools.count()


@dataclass(frozen=True)
class Verdict:
    """The outcome of a program.

    Attributes:
        kind: one of the constants above.
        cause: equal for programs that fail alike: the origin of an error, or the part of the
            result that differs.
        detail: the text for readers.
        interrupts: the number of interrupts that reached the program.
    """

    kind: str
    cause: str = ""
    detail: str = ""
    interrupts: int = 0

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES


def namespace_of(text: str, module: Any) -> dict[str, Any]:
    """Run the definitions of a program, with its lines available to tracebacks."""
    filename = f"<program {next(_numbers)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    scope = {
        "__name__": "program", "torch": torch, "F": torch.nn.functional, "tsfunc": module,
        "collections": collections, "dataclasses": dataclasses,
    }  # fmt: skip
    exec(compile(text, filename, "exec", dont_inherit=True), scope)
    if module is reference and "remat" in scope:
        scope["remat"] = reference.remat
    if module is reference and "Record" in scope:  # torch's pytrees take the containers apart
        pytree.register_dataclass(scope["Record"])
    return scope


def results(program: Program, module: Any, shaken: float = 0.0) -> list[Any]:
    """Return the result of each call by tsfunc or by the reference, whose work is limited."""
    if module is not reference:
        return _results(program, module, shaken)
    with Formulas(), work.limited():
        return _results(program, module, shaken)


def _results(program: Program, module: Any, shaken: float) -> list[Any]:
    found: list[Any] = []
    scope = namespace_of(source(program), module)
    known: dict[tuple[int, str], Any] = {}  # results of the reference, shared by equal calls
    for call, number in enumerate(program.calls):
        own = program.circumstance(call)
        key = number, own if own in CHANGES else ""
        if key not in known or module is not reference:
            known[key] = _result(program, scope, call, module, shaken)
        found.append(known[key])
    return found


def _result(program: Program, scope: dict[str, Any], call: int, module: Any, shaken: float) -> Any:
    circumstance = program.circumstance(call)

    def changed(x: Any, shares: bool = False) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        if shaken:
            noisy = _shake(x, shaken)
            x = x.copy_(noisy) if shares else noisy
        return x.float() if circumstance == FLOAT32 else x

    shared = iter([leaf.layout == SHARED for p in program.params for leaf in p.leaves])

    def argument(x: Any) -> Any:
        return changed(x, next(shared)) if isinstance(x, torch.Tensor) else x

    for name, text in captured_text(program, call).items():
        before = program.circumstance(call - 1)
        if call == 0 or module is reference or {circumstance, before} & CHANGES:
            scope[name] = changed(eval(text, dict(scope)))
    captured = [scope[name] for name, _ in program.captured]
    args, kwargs = eval(call_text(program, call, "_Arguments"), {
        **scope, "_Arguments": lambda *args, **kwargs: (args, kwargs),
    })  # fmt: skip
    args, kwargs = _mapped(argument, args), _mapped(argument, kwargs)
    function = scope["program"]
    if circumstance == GRADIENTS:
        function = functools.partial(scope["with_gradients"], function, captured)
    with around(circumstance) if module is not reference else contextlib.nullcontext():
        value = function(*args, **kwargs)
    return pytree.tree_map(_plain, _as_dicts(value))


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return containers of the same classes, with the results of a function for the leaves."""
    if isinstance(tree, dict):
        return {key: _mapped(function, part) for key, part in tree.items()}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return dataclasses.replace(tree, **_mapped(function, vars(tree)))
    if hasattr(tree, "_fields"):
        return type(tree)(*[_mapped(function, part) for part in tree])
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(function, part) for part in tree)
    return function(tree)


def _as_dicts(value: Any) -> Any:
    """Return dicts in place of named tuples and dataclasses, which each run defines anew."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif dataclasses.is_dataclass(value):
        value = dict(vars(value))
    if isinstance(value, dict):
        return {key: _as_dicts(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_as_dicts(part) for part in value)
    return value


def _plain(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _shake(x: Any, by: float) -> Any:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    noise = (torch.arange(x.numel(), dtype=x.dtype) * 1.7 + 0.3).sin().reshape(x.shape)
    return x + by * noise


def run(program: Program) -> Verdict:
    """Run a program both ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.manual_seed(0)
            expected = results(program, reference)
        except work.TooMuchWorkError as error:
            return Verdict(SKIPPED, str(error))
        except Exception as error:
            return Verdict(SKIPPED, "the reference refuses", f"{type(error).__name__}: {error}")
        if not all(_finite(value) for value in expected):
            return Verdict(SKIPPED, "not finite")
        whole = process_state()
        verdict = compared(program, expected)
        if verdict.kind != BROKEN and (now := process_state()) != whole:
            return Verdict(BROKEN, "process state", f"{whole} became {now}; {verdict.detail}")
        if verdict.kind == WRONG and not _well_conditioned(program, expected):
            return Verdict(SKIPPED, "ill conditioned", verdict.detail)
    return verdict


def compared(program: Program, expected: list[Any]) -> Verdict:
    """Run a program by tsfunc and compare with what is expected."""
    whole = thread_state()
    error: BaseException | None = None
    found: list[Any] = []
    try:
        torch.manual_seed(0)
        found = results(program, tsfunc)
    except Exception as raised:
        error = raised
    if (now := thread_state()) != whole:
        return Verdict(BROKEN, "thread state", f"{whole} became {now}; {error}")
    if error is not None:
        if refused(error) is not None:
            return Verdict(REFUSED, type(error).__name__, str(error))
        if isinstance(error, RecursionError):
            return Verdict(RAISES, "RecursionError", str(error))
        return Verdict(RAISES, cause_of(error), _text(error))
    single = program.single
    for call, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        difference = different(ours, theirs, single or program.circumstance(call) == FLOAT32)
        if difference:
            detail = f"call {call} ({program.circumstance(call)}): {difference[1]}"
            return Verdict(WRONG, difference[0], detail)
    return Verdict(OK)


def thread_state() -> tuple[Any, ...]:
    """Return the state of the thread that transforms change temporarily and must restore."""
    return (
        str(torch._C._dispatch_tls_local_exclude_set()),
        str(torch._C._dispatch_tls_local_include_set()),
        torch.is_grad_enabled(),
        torch._C._is_fwd_grad_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    )


def process_state() -> tuple[Any, ...]:
    """Return the state of the thread, and torch's dual level, which all threads share.

    Other threads must be outside of jvps.
    """
    return (*thread_state(), forward_ad._current_level)


def cause_of(error: BaseException) -> str:
    """Return the class of an error and the last line of tsfunc in its traceback."""
    own = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "/tsfunc/" in frame.filename
    ]
    where = f"{own[-1].filename.split('/tsfunc/')[-1]}:{own[-1].name}" if own else "torch"
    return f"{type(error).__name__} at {where}"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:600]


def _finite(tree: Any) -> bool:
    return all(
        bool(x.isfinite().all()) and (not x.numel() or float(x.abs().max()) < 1e8)
        for x in pytree.tree_leaves(tree)
        if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
    )


def _scale(x: torch.Tensor) -> float:
    return 1 + (float(x.abs().max()) if x.numel() else 0.0)


def _kind_of(x: Any) -> str:
    return type(x).__name__


def different(ours: Any, theirs: Any, single: bool = False) -> tuple[str, str] | None:
    """Return what differs between two results, in a word and in a sentence.

    Results in single precision (``single``) are compared as closely as those of a well conditioned
    function may be.
    """
    mine, spec = pytree.tree_flatten(ours)
    others, other_spec = pytree.tree_flatten(theirs)
    if spec != other_spec:
        return "structure", f"{spec}, expected {other_spec}"
    for place, (a, b) in enumerate(zip(mine, others, strict=True)):
        if not isinstance(b, torch.Tensor):
            if a != b:
                return "value", f"leaf {place}: {a!r}, expected {b!r}"
            continue
        if not isinstance(a, torch.Tensor):
            return "class", f"leaf {place}: {_kind_of(a)}, expected a tensor"
        if a.shape != b.shape:
            return "shape", f"leaf {place}: {tuple(a.shape)}, expected {tuple(b.shape)}"
        if a.dtype != b.dtype:
            return "dtype", f"leaf {place}: {a.dtype}, expected {b.dtype}"
        rtol, atol = RTOL, ATOL
        if single:
            rtol, atol = 0.0, 1e-2 * _scale(b.to(torch.complex128))
        if not torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
            by = float((a.double() - b.double()).abs().max()) if not a.is_complex() else math.nan
            return "numbers", f"leaf {place}: off by {by:.3g}"
    return None


def _well_conditioned(program: Program, expected: list[Any]) -> bool:
    """Return False if a small change of the inputs changes the reference's result by much."""
    for by in (_SHAKEN, -0.7 * _SHAKEN):
        try:
            torch.manual_seed(0)
            shaken = results(program, reference, by)
        except Exception:
            return False
        for one, two in zip(shaken, expected, strict=True):
            pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(two), strict=True)
            for a, b in pairs:
                if not isinstance(b, torch.Tensor) or not b.is_floating_point():
                    continue
                atol = 1e4 * _SHAKEN * _scale(b)
                if a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=atol):
                    return False
    return True


def modules() -> tuple[types.ModuleType, types.ModuleType]:
    return tsfunc, reference
