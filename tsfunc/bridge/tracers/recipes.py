"""Recipes: the operators that a batching rule calls, recorded once and repeated.

NOTE [recipes]
A batching rule calls torch on the values of its arguments. Its calls depend on the metadata of the
values and on the arguments that are not tensors, but not on data (NOTE [batching rules] in
``ops/registry``). The compiled handlers record the calls at the second call of an operator with the
same plan, metadata and arguments, and repeat them from then on without Python.

The rule is recorded on tensors that share the data of the values, as a dispatch mode below autograd
sees its calls: composite operators stay whole, and decompose when the recipe runs, with autograd
as it is then. A recording is discarded, and the rule runs at each call, if

- the rule reads data (``item``), draws random numbers, or returns another object than a tensor;
- the rule reads another property of the level than its batch size;
- the size of a result depends on data (``nonzero``);
- the rule reads a property of a tensor that is not part of its metadata (``_UNSEEN``), such as the
  storage offset;
- the rule uses a tensor that is neither an argument nor a result, or writes to an argument or to a
  view of one; an operator that writes its first argument is recorded on a tensor of zeros in the
  place of that argument;
- the rule writes, and a value is a tracer of an outer level. The recorder has plain tensors in the
  place of tracers, but a write of a tracer into a plain tensor makes that a tracer (``writes``).

If ``TorchDispatchMode._should_skip_dynamo`` is True, torch wraps a mode's handler in a function
that imports Dynamo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch._C import DisableTorchFunction
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tsfunc.bridge.tracers.call_plans import CallPlan, bdims_at_call, plans_of_operator
from tsfunc.bridge.tracers.operators import TorchOperator, operator_of, tensors_in
from tsfunc.bridge.tracers.torch_state import without_autograd
from tsfunc.ops.registry import Args, Category, Kwargs, RuleLevel

Step = tuple[TorchOperator, str, str, tuple[Any, ...], dict[str, Any], Any]
_MASKS = frozenset({torch.bool, torch.uint8})
# Functions that read properties of a tensor which two tensors of equal metadata may not share.
_UNSEEN = frozenset({
    torch.Tensor.storage_offset, torch.Tensor.data_ptr, torch.Tensor.untyped_storage,
    torch.Tensor._is_view, *(
        getattr(torch.Tensor, name).__get__
        for name in ("_base", "_version", "grad", "grad_fn", "is_leaf")
    ),
})  # fmt: skip


class _NotRecordable(Exception):
    """The calls of a rule depend on more than metadata."""


class _BatchSize:
    """The part of a level that a recorded rule may read."""

    __slots__ = ("batch_size",)

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __getattr__(self, name: str) -> Any:
        raise _NotRecordable(name)


class _Properties(TorchFunctionMode):
    """Ends a recording at a property that the metadata of a tensor do not determine."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _UNSEEN:
            raise _NotRecordable(func)
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Records the operators that are called.

    Attributes:
        nested: True if values are tracers of outer levels.
        argument_memories: the storages of the tensors among the arguments, without the first one
            if the rule may write to it.
        recordable: the identities of all tensors that a recorded call may take.
    """

    def __init__(self, args: Sequence[Any], nested: bool, *, writable: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nested = nested
        self.steps: list[Step] = []
        self.argument_memories = frozenset(
            map(_storage_of, tensors_in(args[1:] if writable else args))
        )
        self.recordable = set(map(id, tensors_in(args)))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports Dynamo at the first recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload):
            raise _NotRecordable(func)
        op = operator_of(func)
        plans_of_operator(op)  # the values may be tracers of outer levels
        if op.random or op.out_names or _depends_on_data(op, args):
            raise _NotRecordable(op.name)
        if op.writes and self.nested:
            raise _NotRecordable(op.name)
        kwargs = kwargs or {}
        if not self.recordable.issuperset(map(id, tensors_in((*args, *kwargs.values())))):
            raise _NotRecordable(op.name)
        written = tensors_in([args[i] for i in op.written_by_call(args) if i < len(args)])
        if not self.argument_memories.isdisjoint(map(_storage_of, written)):
            raise _NotRecordable(op.name)  # the recording would write to the user's tensors
        out = func(*args, **kwargs)
        if not _has_tensors_only(out):
            raise _NotRecordable(op.name)
        self.recordable.update(map(id, tensors_in(out)))
        schema = func._schema
        self.steps.append((op, schema.name, schema.overload_name, tuple(args), kwargs, out))
        return out


def _storage_of(tensor: torch.Tensor) -> int:
    with DisableTorchFunction():
        return tensor.untyped_storage().data_ptr()


def _depends_on_data(op: TorchOperator, args: Sequence[Any]) -> bool:
    """True if the size of an operator's result depends on data."""
    if op.overload is torch.ops.aten.index.Tensor:
        return any(index.dtype in _MASKS for index in tensors_in(args[1]))
    if torch.Tag.dynamic_output_shape in op.overload.tags:
        return True
    if not op.composite:
        return False
    from tsfunc.ops.catalogue.lookup import category_of  # reads the catalogue's table

    return category_of(op.name) is Category.DYNAMIC


def _has_tensors_only(value: Any) -> bool:
    """True for a tensor, None, and lists of these."""
    if isinstance(value, list | tuple):
        return all(map(_has_tensors_only, value))
    return value is None or type(value) is torch.Tensor


def record_recipes(
    plan: CallPlan, batch_size: int, kinds: Sequence[Any], args: Args, kwargs: Kwargs, nested: bool
) -> tuple[list[Step], list[list[tuple[Any, int | None]]]] | None:
    """Return the calls of a plan's rule and its results with their batch dims, or None.

    Args:
        kinds: the kinds of the arguments, as ``unwrap_args`` makes them.
        args: tensors with the metadata of the values, and the other arguments.
        nested: True if values are tracers of outer levels.
    """
    assert plan.rule is not None
    assert plan.operator is not None
    if plan.operator.written_by_call(args) and not plan.writes:  # running statistics
        return None
    recorder = _Recorder((*args, *kwargs.values()), nested, writable=plan.writes)
    level = cast(RuleLevel, _BatchSize(batch_size))
    bdims = plan.bdims if plan.bdims is not None else bdims_at_call(plan, kinds, args, len(args))
    try:
        with without_autograd(), recorder, _Properties():
            result = plan.rule(plan.target, level, bdims, args, kwargs)
    except Exception:
        return None  # the rule itself raises the user's error
    if result is NotImplemented:
        return None
    out, out_dims = result
    if not _has_tensors_only(out):
        return None
    single = len(plan.operator.overload._schema.returns) == 1
    results = [out] if single else out or ()  # a check of errors returns nothing
    recipes = []
    for i, result in enumerate(results):
        bdim = out_dims if single or not isinstance(out_dims, list | tuple) else out_dims[i]
        parts = result if isinstance(result, list | tuple) else (result,)
        part_bdims = bdim if isinstance(bdim, list | tuple) else [bdim] * len(parts)
        recipes.append(list(zip(parts, part_bdims, strict=True)))
    if not recorder.recordable.issuperset(map(id, tensors_in(results))):
        return None
    return recorder.steps, recipes
