"""``x[mask]`` with a mask that differs between examples.

NOTE [selections]
The number of elements that a mask selects differs between examples, so a batch can't hold the
result. Many uses of the result don't depend on that number: elementwise functions, sums and means,
and a write by the same mask (``x[mask] = f(x[mask])``, which includes ``x[mask] *= 2``).
``x[mask]`` therefore returns a *selection*: all elements, and a mask of the selected ones. The dim
of the elements is the only dim of unknown size. An operation that needs this size raises an error
that names the line of ``x[mask]``.

Each element that is not selected is replaced by the first selected element of its example. A
function therefore behaves there as it does at a selected element: no logarithm of a number that the
mask excludes, and no infinite derivative. Before a reduction, the neutral element replaces them:
zero for a sum, the smallest number for a maximum (``selection_sums``; ``selection_rows``,
``selection_items``).

Selections are implemented by calls at the user's own level, as if the program contained these
calls. Derivatives of every kind, outer levels and traces see ``torch.where`` and similar operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload

from tsfunc.bridge.tracers.attributes import PROPERTY_METHODS
from tsfunc.bridge.tracers.batch_tracer import BatchTracer
from tsfunc.bridge.tracers.function_registry import METHODS, SELECTIONS, FunctionRules, Stage
from tsfunc.bridge.tracers.nesting import nested_tracers
from tsfunc.bridge.tracers.operators import objects_in, operator_of
from tsfunc.bridge.tracers.tracer import (
    HOOKED,
    NO_KWARGS,
    Tracer,
    call_below_function,
    innermost_level,
)
from tsfunc.bridge.writing.emulated_views import storage_state
from tsfunc.dispatch.messages import SPLIT
from tsfunc.errors import DataDependentError
from tsfunc.ops.refusal import require
from tsfunc.ops.registry import Args, Kwargs
from tsfunc.user_code import Location, user_location

_T = torch.Tensor
_ALL = slice(None)

SelectionRule = Callable[[Callable[..., Any], Sequence[Any], Kwargs], Any]


class SelectionRules(FunctionRules):
    """The rules that a module declares for calls with selections among their arguments."""

    def serve(self, rule: SelectionRule, names: str, *owners: Any) -> None:
        """Declare a rule for functions of torch.

        Args:
            names: the functions' names, separated by spaces.
            owners: the modules and classes that have the functions; torch and Tensor by default.
        """
        functions = [
            getattr(owner, name)
            for name in names.split()
            for owner in owners or (torch, _T)
            if hasattr(owner, name)
        ]
        self.add(Stage.SELECTION, rule, *functions)


def arguments_by_name(args: Sequence[Any], kwargs: Kwargs, *names: str) -> dict[str, Any]:
    """Return the arguments after the first by name, without those that were not given."""
    by_name = dict(zip(names, args[1:], strict=False))
    for name, value in kwargs.items():
        by_name[{"axis": "dim", "keepdims": "keepdim"}.get(name, name)] = value
    return by_name


class Selection(Tracer):
    """A tensor of some elements of another tensor, which differ between examples.

    Attributes:
        elements: all elements, of shape ``[*before, count, *after]``: the mask's dims are flattened
            into one.
        mask: True for the selected elements; it has one dim.
        after: the number of dims after that of the elements.
        source: the user's mask and its state; None after the selection was narrowed.
        line: the line of the user's code that made the selection.
    """

    elements: torch.Tensor
    mask: torch.Tensor
    after: int
    source: tuple[torch.Tensor, Any] | None
    line: Location

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _serve(func, types, args, kwargs or NO_KWARGS)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for value in args:
            if isinstance(value, Selection):
                value.refuse(str(func))
        return NotImplemented

    @property
    def hook(self) -> Selection:
        """The selection itself, which is its own hook (``tracer_hooks``)."""
        return self

    @property
    def element_dim(self) -> int:
        """The dim of the elements, as a negative number."""
        return -1 - self.after

    @property
    def is_first(self) -> bool:
        """True if the dim of the elements is the first."""
        return self.elements.dim() == self.after + 1

    def sync(self) -> NoReturn:
        """Raise, because a selection has no tensor of a known size."""
        self.refuse("a transform or a result")

    def refuse(self, by: str) -> NoReturn:
        """Raise the error for an operation that needs the number of selected elements."""
        raise DataDependentError(
            f"vmap: x[mask], at {self.line}: the size of the result depends on the "
            f"values of a batched tensor, so it would differ from example to example (torch.func "
            f"says: vmap: We do not support batching operators that can output dynamic shape. "
            f"Attempted to vmap over aten::index.Tensor). It can be used elementwise, summed, and "
            f"written back by its mask; {by}, at {user_location()}, needs its size. Use "
            f"torch.where(mask, x, fill) instead of x[mask], or call it outside of the vmapped "
            f"function. {SPLIT}."
        )

    @property
    def shape(self) -> NoReturn:  # type: ignore[override]
        self.refuse("shape")

    def size(self, dim: Any = None) -> Any:
        """Return the size of one dim; raise if it is the dim of the elements."""
        rank = self.elements.dim()
        if dim is None or dim % rank == self.element_dim % rank:
            self.refuse("size")
        return self.elements.size(dim)

    def numel(self) -> NoReturn:
        self.refuse("numel")

    def stride(self, dim: Any = None) -> NoReturn:
        self.refuse("stride")

    def __len__(self) -> NoReturn:
        self.refuse("len")

    def __iter__(self) -> NoReturn:
        self.refuse("iteration")

    def describe(self) -> str:
        return f"Selection(by a mask of {self.dispatch_level.name}, at {self.line})"

    def like(self, elements: torch.Tensor, after: int | None = None) -> Any:
        """Return a selection of another tensor by the same mask."""
        return _make(elements, self.mask, self.after if after is None else after, self.source,
                     self.line)  # fmt: skip

    def remapped(self, remap: Callable[[Any], Any]) -> Any:
        """Return the selection of remapped tensors; itself if these are the same."""
        source = None if self.source is None else (remap(self.source[0]), self.source[1])
        elements, mask = remap(self.elements), remap(self.mask)
        if elements is self.elements and mask is self.mask:
            return self
        return _make(elements, mask, self.after, source, self.line)

    def filled(self, value: Any) -> torch.Tensor:
        """Return all elements, with ``value`` in those that are not selected."""
        return torch.where(self.column(), self.elements, value)

    def column(self) -> torch.Tensor:
        """Return the mask with dims of size 1 for the dims after it, so that it broadcasts."""
        return self.mask.reshape(-1, *[1] * self.after)

    def count(self) -> torch.Tensor:
        """Return the number of selected elements as a tensor without dims."""
        return self.mask.sum()

    def in_order_of(self, mask: torch.Tensor, source: Any = None) -> torch.Tensor:
        """Return the elements in the order of another mask, which must select as many elements."""
        if mask is self.mask or (source is not None and _is_same_mask(source, self.source)):
            return self.elements
        count = mask.sum()
        require(
            count == self.count(),
            "shape mismatch: two masks are used together that do not select as many elements",
        )
        # The n-th element that one mask selects corresponds to the n-th of the other.
        order = (~self.mask).byte().argsort(stable=True)
        ordinal = (mask.cumsum(0) - 1).clamp(min=0)
        return self.elements.index_select(self.element_dim, order.index_select(0, ordinal))


def is_lazy(mask: Any) -> bool:
    """True if ``x[mask]`` is a selection: the mask is batched at a level without splits."""
    if not isinstance(mask, BatchTracer) or mask.dtype is not torch.bool:
        return False
    for tracer in nested_tracers(mask, BatchTracer):
        if tracer.bdim is not None and tracer.dispatch_level.splitter is None:
            return bool(tracer.dispatch_level.batch_size > 0)
    return False


def select(x: torch.Tensor, items: Sequence[Any]) -> Any:
    """``x[items]``, where one item is a lazy mask and the others are basic items."""
    view, mask, before = view_of(x, items)
    after = view.dim() - before - mask.dim()
    source = mask, storage_state(mask)
    elements = view.flatten(before, -1 - after) if mask.dim() else view.unsqueeze(before)
    flat = mask.clone().reshape(-1)
    if flat.shape[0]:
        first = flat.byte().argmax(0).reshape(1)
        fill = elements.detach().index_select(before, first)
        if fill.is_floating_point() or fill.is_complex():
            fill = torch.where(flat.any(), fill, 1.0)
        elements = torch.where(flat.reshape(-1, *[1] * after), elements, fill)
    return _make(elements, flat, after, source, user_location())


def view_of(x: torch.Tensor, items: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the view by the basic items, the mask, and the number of dims before the mask.

    The view keeps the dims that the mask indexes.

    Raises:
        IndexError: the mask's shape is not that of the dims that it indexes.
    """
    (position,) = [position for position, item in enumerate(items) if isinstance(item, Tracer)]
    mask = items[position]
    before = sum(1 for item in items[:position] if item is None or isinstance(item, slice))
    basic = [*items[:position], *[_ALL] * mask.dim(), *items[position + 1 :]]
    view = x if all(item == _ALL for item in basic) else x[tuple(basic)]
    spans = tuple(view.shape[before : before + mask.dim()])
    if spans != tuple(mask.shape):
        raise IndexError(
            f"The shape of the mask does not match the dims that it indexes: expected "
            f"{list(spans)} of {list(x.shape)}, got {list(mask.shape)}."
        )
    return view, mask, before


def spread(value: Selection, mask: torch.Tensor, right: int) -> torch.Tensor:
    """Return a selection as the values of a write by ``mask``, with ``right`` dims after it."""
    if value.after != right:
        value.refuse("a write to dims that it does not have")
    elements = value.in_order_of(mask.reshape(-1), (mask, storage_state(mask)))
    if not mask.dim():
        return elements.squeeze(value.element_dim)
    return elements.unflatten(value.element_dim, mask.shape)


def together(args: Sequence[Any], by: str) -> tuple[Selection, list[Any]]:
    """Return the first selection, and all values in the order of its elements.

    Values that broadcast with the elements are returned unchanged. ``by`` is the name of the
    operation, for the error.
    """
    lead = next(objects_in(Selection, args))
    values: list[Any] = []
    for value in args:
        if isinstance(value, Selection):
            if value.after != lead.after:
                lead.refuse(by)
            value = value.in_order_of(lead.mask, lead.source)
        elif (
            isinstance(value, torch.Tensor)
            and value.dim() > lead.after
            and value.shape[lead.element_dim] != 1
        ):
            lead.refuse(by)
        values.append(value)
    return lead, values


def _is_same_mask(one: Any, other: Any) -> bool:
    """True if two masks are the same tensor, without a write between."""
    if one is None or other is None or one[0] is not other[0] or one[1] is None:
        return False
    return other[1] is not None and one[1][0] is other[1][0] and one[1][1] == other[1][1]


def _make(
    elements: torch.Tensor, mask: torch.Tensor, after: int, source: Any, line: Location
) -> Selection:
    HOOKED.setdefault(Selection, _serve)
    level = innermost_level((elements, mask))
    return Selection.make(
        elements.detach(),
        level,
        elements=elements,
        mask=mask,
        after=after,
        source=source,
        line=line,
    )


def _serve(func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """The function handler for calls with selections among their arguments."""
    func = _function_of(func)
    rule = SELECTIONS.get(func)
    if rule is None and func in PROPERTY_METHODS and isinstance(args[0], Selection):
        return METHODS[func](func, types, args, kwargs)
    if rule is None:
        rule = _elementwise if _is_elementwise(func) else _composite
    out = rule(func, args, kwargs)
    if out is NotImplemented:
        next(objects_in(Selection, (*args, *kwargs.values()))).refuse(
            getattr(func, "__name__", str(func))
        )
    return out


@functools.cache
def _function_of(func: Any) -> Any:
    """Return torch's function for an operator, which programs call; other callables unchanged."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return func
    name = operator_of(func).packet
    for owner, prefix in ((torch.linalg, "linalg_"), (torch.special, "special_")):
        if name.startswith(prefix):
            return getattr(owner, name.removeprefix(prefix), func)
    owners = (_T, torch, torch.nn.functional)
    return next((getattr(owner, name) for owner in owners if hasattr(owner, name)), func)


def _composite(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Run a Python function of torch on selections; NotImplemented for other functions."""
    code = getattr(func, "__code__", None)
    if code is None or func in METHODS:
        return NotImplemented
    return call_below_function(func, (), args, kwargs)


# The methods of Python's operators, with the names of torch's functions.
_OPERATORS = {
    "truediv": "div", "rtruediv": "div", "itruediv": "div", "rdiv": "div", "idiv": "div",
    "floordiv": "floor_divide", "rfloordiv": "floor_divide", "ifloordiv": "floor_divide",
    "mod": "remainder", "rmod": "remainder", "imod": "remainder", "invert": "bitwise_not",
    "and": "bitwise_and", "rand": "bitwise_and", "iand": "bitwise_and", "or": "bitwise_or",
    "ror": "bitwise_or", "ior": "bitwise_or", "xor": "bitwise_xor", "rxor": "bitwise_xor",
    "ixor": "bitwise_xor", "radd": "add", "iadd": "add", "rsub": "sub", "isub": "sub",
    "rmul": "mul", "imul": "mul", "rpow": "pow", "ipow": "pow",
    "ilshift": "bitwise_left_shift", "lshift": "bitwise_left_shift",
    "irshift": "bitwise_right_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip
# Elementwise functions that don't have torch's pointwise tag.
_ELEMENTWISE_TOO = frozenset({
    "to", "type", "float", "double", "half", "bfloat16", "long", "int", "short", "char", "byte",
    "bool", "cfloat", "cdouble", "type_as", "clone", "contiguous", "detach", "zeros_like",
    "ones_like", "full_like", "zero", "fill", "masked_fill", "isclose", "hardswish", "logsigmoid",
    "log_sigmoid", "conj", "real", "imag", "resolve_conj", "resolve_neg", "relu6", "cpu",
})  # fmt: skip


@functools.cache
def _is_elementwise(func: Any) -> bool:
    """True if each element of the result depends on one element of each argument."""
    name = getattr(func, "__name__", "")
    owners = (torch, _T, torch.nn.functional, torch.special)
    if not any(getattr(owner, name, None) is func for owner in owners):
        return False
    base = name.strip("_")
    base = _OPERATORS.get(base, base)
    packet = getattr(torch.ops.aten, base, None)
    if base in _ELEMENTWISE_TOO:
        return True
    if packet is None or base in ("max", "min"):
        return False
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]
    return any(torch.Tag.pointwise in of_overload for of_overload in tags) and not any(
        torch.Tag.nondeterministic_seeded in of_overload for of_overload in tags
    )


def is_in_place(name: str) -> bool:
    """True if a function of torch with this name writes into its first argument."""
    if name.endswith("__"):
        return name.startswith("__i") and name != "__invert__"
    return name.endswith("_")


def _elementwise(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    name = func.__name__
    in_place = is_in_place(name)
    if "out" in kwargs or (in_place and not isinstance(args[0], Selection)):
        return NotImplemented
    if any(isinstance(value, list | tuple) for value in (*args, *kwargs.values())):
        return NotImplemented
    lead, values = together([*args, *kwargs.values()], name)
    out = func(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
    if in_place:
        return args[0]
    if isinstance(out, tuple):
        return type(out)([lead.like(part) for part in out])
    return lead.like(out)
