"""Operators without a forward formula of which torch does not say so.

Where an operator has no forward formula torch raises, and ``jvp`` finds the tangent by the
pullback. Of some it says nothing, and gives a wrong tangent or none:

- ``torch.library.register_autograd`` gives an operator that ``custom_op`` made a pullback. torch's
  kernel of it differentiates where something requires a gradient; where nothing does it goes past
  autograd, and tangents are lost.
- What products of ``scatter_reduce`` leave out, and of ``_foreach_maximum`` and its like with
  numbers the tangent is the number. torch's own tests know them as without forward mode.

So calls of these with tangents are met before autograd (NOTE [the factory keys]) and refused as
those of any operator without a formula.

Private names used here (torch 2.11 to 2.13): ``_library.custom_ops.OPDEFS`` has what ``custom_op``
made, each with the library ``_lib`` that it is registered in, its ``_opoverload``, and the pullback
as ``_backward_fn``; ``DisableTorchFunctionSubclass`` reads a tracer's own tangent.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch._library.custom_ops import OPDEFS
from torch.autograd import forward_ad

from tsfunc import pytrees
from tsfunc.bridge.tracers.operators import overload_of
from tsfunc.bridge.tracers.torch_state import RANDOM_KEY_NAME, after, below_autograd

_LISTS = [
    f"_foreach_{name}{end}.{kind}"
    for name in ("maximum", "minimum", "clamp_min", "clamp_max")
    for end in ("", "_")
    for kind in ("Scalar", "ScalarList")
]
_SCATTERED = ["scatter_reduce.two", "scatter_reduce_.two"]

_libraries: list[torch.library.Library] = []
_watched: weakref.WeakSet[Any] = weakref.WeakSet()
# The references that OPDEFS had when it was last looked at.
_known: list[Any] = []


def watch() -> None:
    """Before forward mode begins: custom operators that were made since are watched too."""
    if not _libraries:
        _watch_torchs_own()
    references = OPDEFS.valuerefs()
    if references != _known:
        _known[:] = references
        for made in [made for made in OPDEFS.values() if made not in _watched]:
            _watched.add(made)
            kernel = _kernel(made._opoverload, _has_pullback(made))
            made._lib.impl(made._opoverload, kernel, RANDOM_KEY_NAME, with_keyset=True)


def _watch_torchs_own() -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Ww]arning only once")
        for name in (*_LISTS, *_SCATTERED):
            overload = overload_of(f"aten::{name}")
            if overload is not None:
                kernel = _kernel(overload, _multiplies if name in _SCATTERED else _always)
                library.impl(name, kernel, RANDOM_KEY_NAME, with_keyset=True)


def _always(args: Any, kwargs: Any) -> bool:
    return True


def _multiplies(args: Any, kwargs: Any) -> bool:
    return "prod" in (*args[4:5], kwargs.get("reduce"))


def _has_pullback(made: Any) -> Callable[[Any, Any], bool]:
    find = weakref.ref(made)

    def asked(args: Any, kwargs: Any) -> bool:
        made = find()
        return made is not None and made._backward_fn is not None

    return asked


def _kernel(overload: Any, concerns: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    rest = after(RANDOM_KEY_NAME)

    def operator(keys: Any, *args: Any, **kwargs: Any) -> Any:
        pushing = forward_ad._current_level >= 0 and not below_autograd()
        if pushing and concerns(args, kwargs):
            _refuse_tangents(overload.name(), (args, kwargs))
        return overload.redispatch(keys & rest, *args, **kwargs)

    return operator


def _refuse_tangents(name: str, values: Any) -> None:
    tensors = [x for x in pytrees.leaves_of(values) if isinstance(x, torch.Tensor)]
    with DisableTorchFunctionSubclass():
        if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise NotImplementedError(f"{name} has a pullback, but does not support forward AD")
