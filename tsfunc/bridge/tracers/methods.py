"""Methods of the function handler for Python protocols of tracers: copies and storages.

A tracer has no storage. Calls that need one (``data_ptr``, ``x.data = y``) would access memory
that does not exist, so they raise an error that names the call and an alternative.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.tracer import Method, Tracer, metadata, refuse_escaped
from tsfunc.dispatch import DispatchKey
from tsfunc.ops.registry import Args, Kwargs

_T = torch.Tensor
_DATA = "x.data = ..."


def _deepcopy(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Implement ``copy.deepcopy``: return a clone at the same level."""
    value, memo = args
    if not isinstance(value, Tracer):
        return metadata(func, types, args, kwargs)
    if id(value) not in memo:
        memo[id(value)] = value.clone()
    return memo[id(value)]


def _shallow_copy(self: Tracer) -> torch.Tensor:
    """Implement ``copy.copy``: return another object for the same values."""
    return self.view(self.shape)


def refuse_storage(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Raise an error for a call that needs the storage of a tracer."""
    value = args[0]
    if not isinstance(value, Tracer):
        return metadata(func, types, args, kwargs)
    level = value.dispatch_level
    if not level.alive:
        refuse_escaped(func, level)
    hint = (
        " (torch.func says: mutating directly with `.data` under vmap is not allowed)"
        if func.__name__ == _DATA and level.key is DispatchKey.Batch
        else ""
    )
    raise RuntimeError(
        f"{func.__name__} was used on a value of {level.name}{hint}: cannot access the storage or "
        f"data pointer of a Tensor that doesn't have storage. Use torch operations, which the "
        f"transform sees (x.copy_(y) instead of x.data = y, x.clone() for memory of its own)."
    )


def _named_setter(refuse: Method, name: str) -> Method:
    """Return the refusal of a property's setter, whose function is called ``__set__``."""

    def method(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

        call.__name__ = name
        return refuse(call, types, args, kwargs)

    return method


function_rules: Final = FunctionRules()
function_rules.add(Stage.METHOD, _deepcopy, _T.__deepcopy__)
_STORAGES = "data_ptr __dlpack__ untyped_storage storage _typed_storage share_memory_ apply_ map_"
function_rules.add(Stage.METHOD, refuse_storage, *[getattr(_T, name) for name in _STORAGES.split()])
function_rules.add(
    Stage.METHOD,
    _named_setter(refuse_storage, _DATA),
    _T.data.__set__,  # type: ignore[attr-defined]
)
# This method does not go through the function handler.
Tracer.set_ = lambda self, *args, **kwargs: refuse_storage(  # type: ignore[method-assign]
    _T.set_, (), (self, *args), kwargs
)
Tracer.__copy__ = _shallow_copy  # type: ignore[attr-defined]
