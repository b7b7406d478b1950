"""Dependence of each entry of a graph's values on the entries of its inputs.

NOTE [index sets]
A dependence is a set of pairs: the index of an entry, and the index of an entry of the input. An
operator joins the pairs of its arguments with its own pairs. Operators that move entries are run
on the indices of the entries. For elementwise operators, reductions and operators along a dim, the
pattern follows from the shapes. Linear and bilinear operators (convolutions, matrix products) are
run on unit vectors, with the zeros of the other operand. For any other operator each result entry
depends on every entry. A pattern may have too many pairs but never too few, and it is valid for
all values of the inputs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from tsfunc import ops, pytrees
from tsfunc.bridge.grad.autograd import is_differentiable
from tsfunc.bridge.tracers.functorch import TORCH_FUNC
from tsfunc.bridge.tracers.operators import TorchOperator, operator_of
from tsfunc.ops.registry import Category

_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        "view", "reshape", "_unsafe_view", "view_as", "reshape_as", "unsqueeze", "squeeze",
        "transpose", "t", "permute", "movedim", "swapaxes", "swapdims", "expand", "expand_as",
        "broadcast_to", "slice", "select", "narrow", "flip", "fliplr", "flipud", "roll", "rot90",
        "fft_fftshift", "fft_ifftshift",
        "index", "index_select", "gather", "take", "take_along_dim", "unbind", "split",
        "split_with_sizes", "chunk", "tensor_split", "diagonal", "diag", "diag_embed", "cat",
        "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "tril", "triu", "clone",
        "contiguous", "alias", "repeat", "tile", "unfold", "ravel", "flatten", "unflatten",
        "numpy_T", "mT", "adjoint", "atleast_1d", "atleast_2d", "repeat_interleave",
    )
)  # fmt: skip
_ALONG = frozenset(
    f"aten::{name}"
    for name in (
        "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp",
        "cummax", "cummin", "sort", "softmin",
    )
)  # fmt: skip
_BILINEAR = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "mv", "dot", "bmm", "matmul", "linear", "addmm", "addmv", "outer", "conv1d", "conv2d",
        "conv3d", "convolution", "einsum", "tensordot", "inner", "kron", "diff", "pad",
        "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d",
        "replication_pad2d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "trace",
    )
)  # fmt: skip
_CHUNK = 1024


@dataclass(frozen=True)
class _Value:
    """A value of the graph for some inputs.

    Attributes:
        pattern: the pairs of its dependence; None for a value without a derivative.
        varies: True if it depends on the inputs.
    """

    value: Any
    pattern: torch.Tensor | None
    varies: bool


def dependence(graph: torch.fx.Graph, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the dependence of the graph's single result on the entries of its first input.

    Args:
        inputs: the inputs to run the graph on; the values of the first do not matter.

    Returns:
        The indices of entries of the result, and for each an index of an entry of the input; an
        integer tensor of shape [2, pairs].
    """
    patterns: dict[torch.fx.Node, Any] = {}
    patterns_of_inputs = iter(inputs)
    writes = any(_writes(node) for node in graph.nodes)
    for node in graph.nodes:
        if node.op == "placeholder":
            value = next(patterns_of_inputs)
            first = not patterns
            identity = torch.arange(value.numel()).expand(2, -1) if first else None
            patterns[node] = _Value(value, identity, first)
        elif node.op == "output":
            (out,) = node.args[0]
            known_value = patterns.get(out)
            if writes and known_value is not None:  # the pattern of a written value is unknown
                return _all_pairs(known_value.value.numel(), torch.arange(inputs[0].numel()))
            none = torch.zeros(2, 0, dtype=torch.long)
            return (
                none if known_value is None or known_value.pattern is None else known_value.pattern
            )
        elif node.target is operator.getitem:
            patterns[node] = patterns[node.args[0]][node.args[1]]
        else:
            patterns[node] = _call(node, patterns)
    raise AssertionError("a graph without an output")


def _operator(target: Any) -> TorchOperator | None:
    """Return the operator of a node; None for control flow and arithmetic on sizes."""
    return operator_of(target) if hasattr(target, "overloadpacket") else None


def _by_entry(name: str) -> bool:
    """True if an operator is elementwise or a reduction.

    The category IDENTITY only says that sizes stay the same. Such an operator is elementwise if it
    names no dim and its recorded test mixed no entries; only operators of torch are tested.
    """
    entry = ops.lookup(name)
    if entry.category is not Category.IDENTITY:
        return entry.category is Category.TENSOR_ITERATOR
    stays = not entry.facts.dims and entry.evidence.elements != "mixed"
    return stays and name.startswith("aten::")


def _writes(node: torch.fx.Node) -> bool:
    op = _operator(node.target)
    return op is not None and bool(op.written)


def _call(node: torch.fx.Node, patterns: Mapping[torch.fx.Node, Any]) -> Any:
    leaves, tree = pytrees.flatten((node.args, node.kwargs))
    values = [
        patterns[x] if isinstance(x, torch.fx.Node) else _Value(x, None, False) for x in leaves
    ]
    call = _OperatorCall(node.target, tree, values)
    outs = call.run([x.value for x in values])
    varies = any(x.varies for x in values)
    results = [
        _Value(out, call.pattern(i, out) if is_differentiable(out) else None, varies)
        for i, out in enumerate(outs if isinstance(outs, list | tuple) else [outs])
    ]
    return results if isinstance(outs, list | tuple) else results[0]


class _OperatorCall:
    """A call of an operator, and the dependence of its results."""

    def __init__(self, target: Any, tree: Any, values: Sequence[_Value]) -> None:
        self.target, self.tree, self.values = target, tree, values
        op = _operator(target)
        self.name = "" if op is None else op.name.partition(".")[0]
        self.by_entry = op is not None and _by_entry(op.name)
        self.by = [i for i, x in enumerate(values) if x.pattern is not None]

    def run(self, values: Sequence[Any]) -> Any:
        args, kwargs = pytrees.unflatten(self.tree, values)
        return self.target(*args, **kwargs)

    def with_tensors(self, make: Callable[[int, _Value], Any], position: int) -> Any:
        """Return one result of the call with other tensors as its arguments."""
        outs = self.run([
            make(i, x) if isinstance(x.value, torch.Tensor) else x.value
            for i, x in enumerate(self.values)
        ])  # fmt: skip
        return outs[position] if isinstance(outs, list | tuple) else outs

    def pattern(self, position: int, out: torch.Tensor) -> torch.Tensor | None:
        """Return the pattern of one of the results."""
        if not self.by or self.name == "aten::detach":
            return None
        parts = []
        for i in self.by:
            pattern = self.values[i].pattern
            assert pattern is not None
            local = self.local(i, position, out)
            parts.append(
                _all_pairs(out.numel(), pattern[1].unique())
                if local is None
                else _join(local, pattern, self.values[i].value.numel())
            )
        return torch.cat(parts, 1).unique(dim=1)

    def local(self, i: int, position: int, out: torch.Tensor) -> torch.Tensor | None:
        """Return pairs of entries of a result and of an argument; None if all pairs depend."""
        x = self.values[i].value
        tensors = [v.value for v in self.values if isinstance(v.value, torch.Tensor)]
        if self.name in _MOVES:
            return self.moved(i, position)
        if self.name in _BILINEAR:
            return self.bilinear(i, position, x)
        if self.name in _ALONG:
            return self.along(i, position, x)
        if self.by_entry:
            try:
                wide = torch.broadcast_shapes(*(t.shape for t in tensors))
            except RuntimeError:
                return None
            if out.shape == wide:
                columns = _entry_numbers(x).expand(wide).reshape(-1)
                return torch.stack([torch.arange(out.numel()), columns])
            return self.reduced_pairs(i, position, x) if len(tensors) == 1 else None
        return None

    def moved(self, i: int, position: int) -> torch.Tensor | None:
        """Return the pairs of an operator that moves entries, from a run on their indices."""
        if any(x.varies and x.pattern is None for x in self.values):
            return None  # the destinations depend on the inputs

        def numbers(j: int, x: _Value) -> Any:
            if not is_differentiable(x.value):
                return x.value
            entries = _entry_numbers(x.value).double()
            return entries + 1 if j == i else torch.zeros_like(entries)

        from_ = self.with_tensors(numbers, position).reshape(-1).long()
        rows = from_.nonzero().squeeze(1)
        return torch.stack([rows, from_[rows] - 1])

    def bilinear(self, i: int, position: int, x: torch.Tensor) -> torch.Tensor:
        """Return the pairs that unit vectors show, with the zeros of the other operand."""

        def of_entries(entries: torch.Tensor) -> Any:
            def made(j: int, v: _Value) -> Any:
                if not is_differentiable(v.value):
                    return v.value
                if j == i:
                    return entries
                return (
                    torch.ones_like(v.value, dtype=torch.double) if v.varies else _nonzeros(v.value)
                )

            return self.with_tensors(made, position)

        zero = of_entries(torch.zeros(x.shape, dtype=torch.double))
        parts = []
        for start in range(0, x.numel(), _CHUNK):
            stop = min(start + _CHUNK, x.numel())
            units = torch.zeros(stop - start, x.numel(), dtype=torch.double)
            units.diagonal(start).fill_(1)
            outs = TORCH_FUNC["vmap"](of_entries)(units.view(-1, *x.shape))
            at = (outs != zero).reshape(stop - start, -1).nonzero()
            parts.append(torch.stack([at[:, 1], at[:, 0] + start]))
        return torch.cat(parts, 1)

    def _nan_entries(self, i: int, position: int, at: tuple[Any, ...]) -> torch.Tensor:
        """Return the entries of a result that become NaN if some entries of an argument are NaN."""
        spoiled = torch.ones(self.values[i].value.shape, dtype=torch.double)
        spoiled[at] = torch.nan
        result: torch.Tensor = self.with_tensors(
            lambda j, x: spoiled if j == i else x.value, position
        )
        return result.isnan()

    def along(self, i: int, position: int, x: torch.Tensor) -> torch.Tensor | None:
        """Return the pairs of an operator along dims: each result depends on its whole slice."""
        if not x.numel():
            return None
        reached = self._nan_entries(i, position, (0,) * x.dim()).nonzero()
        mixed = [bool(reached[:, d].any()) for d in range(x.dim())]
        slices = _numbers_of([1 if m else n for m, n in zip(mixed, x.shape, strict=True)])
        return _pairs_within_slices(slices.expand(x.shape))

    def reduced_pairs(self, i: int, position: int, x: torch.Tensor) -> torch.Tensor | None:
        """Return the pairs of a reduction: a result depends on the entries of the reduced dims."""
        kept_dims = []
        for d, size in enumerate(x.shape):
            spoiled = self._nan_entries(i, position, (slice(None),) * d + (0,))
            if not spoiled.any():
                return None
            kept_dims.append(1 if spoiled.all() else size)
        numbers = _numbers_of(kept_dims)
        if numbers.numel() != spoiled.numel():
            return None
        rows = numbers.expand(x.shape).reshape(-1)
        return torch.stack([rows, torch.arange(x.numel())])


def _pairs_within_slices(slices: torch.Tensor) -> torch.Tensor:
    """Return all pairs of entries with the same slice number; all slices have the same size."""
    order = torch.argsort(slices.reshape(-1), stable=True)
    size = int((slices == slices.reshape(-1)[0]).sum())
    groups = order.view(-1, size)
    first = groups[:, :, None].expand(-1, -1, size).reshape(-1)
    return torch.stack([first, groups[:, None, :].expand(-1, size, -1).reshape(-1)])


def _numbers_of(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(list(shape))


def _entry_numbers(x: torch.Tensor) -> torch.Tensor:
    return _numbers_of(x.shape)


def _nonzeros(x: torch.Tensor) -> torch.Tensor:
    return (x != 0).double()


def _all_pairs(rows: int, columns: torch.Tensor) -> torch.Tensor:
    """Return the pairs of each row with the same columns."""
    return torch.cartesian_prod(torch.arange(rows), columns).T.reshape(2, -1)


def _join(local: torch.Tensor, pattern: torch.Tensor, size: int) -> torch.Tensor:
    """Return the pairs of a result's and the input's entries, via ``size`` entries in between."""
    pattern = pattern[:, pattern[0].argsort(stable=True)]
    counts = torch.bincount(pattern[0], minlength=size)
    starts = counts.cumsum(0) - counts
    many = counts[local[1]]
    rows = local[0].repeat_interleave(many)
    within = torch.arange(len(rows)) - (many.cumsum(0) - many).repeat_interleave(many)
    return torch.stack([rows, pattern[1][starts[local[1]].repeat_interleave(many) + within]])
