"""Strides of the results of pointwise operators, of some others, and of views.

torch computes pointwise operators with its TensorIterator, which orders the dims by the strides of
the operands. The rules of its fake tensors differ from the kernels for some operands with dims of
size 1, with fewer dims than the result, or with a number as an operand: a program made with such
strides would take views that the kernels' results do not have. Here the order is that of the
kernels. The same holds for normalizations and a few other operators, whose kernels choose between
contiguous and channels last.

Source: ``TensorIteratorBase::fast_set_up`` in torch.

torch's rule for fake tensors accepts some views that the kernel refuses: those that join dims
across a dim of size 1. A program with such a view would fail, or read the wrong elements.

Source: ``computeStride`` in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.ops.dims import dense_strides, memory_order
from tsfunc.ops.tensor_iterator import clamp, pointwise, where

# --- hints


def hint_of(size: Any) -> int:
    """Return a size as an int; for a symbolic size, its hint.

    A size that depends on data has no hint: each gets a number of its own, which stands for it in
    comparisons of sizes and strides.
    """
    if isinstance(size, int):
        return size
    node = size.node
    if node.hint is not None:
        return int(node.hint)
    hints = node.shape_env.backed_var_to_val
    numbers = {
        symbol: hints.get(symbol, _FIRST_DATA_SIZE + 2 * int(symbol.name[1:]))
        for symbol in node.expr.free_symbols
    }
    return int(node.expr.xreplace(numbers))


_FIRST_DATA_SIZE: Final = 1009  # larger than most sizes and no multiple of them


class _Layout(NamedTuple):
    """The sizes and strides of a tensor, or their hints."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


def layout_of(x: torch.Tensor) -> _Layout:
    """Return the sizes and strides of a tensor; for symbolic ones, their hints."""
    return _Layout(tuple(map(hint_of, x.shape)), tuple(map(hint_of, x.stride())))


def order_without_gaps(x: torch.Tensor) -> list[int] | None:
    """Return the dims from the outermost in memory inwards; None if there are gaps or overlaps."""
    if x.layout is not torch.strided:
        return None
    layout = layout_of(x)
    order = memory_order(layout.shape, layout.strides)
    return order if _has_order(layout, order) else None


# --- the strides of pointwise operators


_RULES = frozenset({clamp, pointwise, where})
# Operators whose kernel writes into a contiguous result.
_CONTIGUOUS = frozenset({
    "aten::masked_fill.Scalar", "aten::masked_fill.Tensor", "aten::pow.Scalar",
    "aten::mse_loss_backward", "aten::smooth_l1_loss_backward", "aten::huber_loss_backward",
    "aten::_standard_gamma_grad", "aten::_dirichlet_grad", "aten::mvlgamma",
    "aten::special_multigammaln", "aten::normal.Tensor_Tensor", "aten::normal.float_Tensor",
    "aten::poisson", "aten::_standard_gamma", "aten::rrelu", "aten::rrelu_with_noise",
    "aten::rrelu_with_noise_functional",
})  # fmt: skip
# Operators whose kernel writes into a tensor like the first operand.
_LIKE_FIRST = frozenset({"aten::binary_cross_entropy"})
# Operators whose kernel takes the second operand first.
_SECOND_FIRST = frozenset(
    {"aten::leaky_relu_backward", "aten::threshold_backward", "aten::rsub.Tensor"}
)
# The index of the argument whose memory format a kernel on a CPU gives to its first result.
_FORMATTED: Final[dict[str, int]] = {
    **dict.fromkeys(
        (
            "aten::batch_norm", "aten::native_batch_norm", "aten::_native_batch_norm_legit",
            "aten::_native_batch_norm_legit.no_stats", "aten::_batch_norm_with_update",
            "aten::_native_batch_norm_legit_no_training", "aten::max_unpool2d",
            "aten::channel_shuffle", "aten::native_channel_shuffle",
        ),
        0,
    ),
    **dict.fromkeys(
        (
            "aten::native_batch_norm_backward", "aten::batch_norm_backward",
            "aten::replication_pad2d_backward",
        ),
        1,
    ),
}  # fmt: skip
# Operators for whose kernel a number is a tensor without dims, besides those of overload "Tensor".
_NUMBER_OPERANDS = frozenset({"Scalar", "Scalar_Other", "Scalar_Self", "ScalarOther", "ScalarSelf"})
_INDEXING = frozenset({"aten::index.Tensor", "aten::_unsafe_index.Tensor"})
_CAPTURING = frozenset({"aten::lerp.Scalar"})


def kernel_strides(op: TorchOperator, args: Sequence[Any], result: Any) -> list[int] | None:
    """Return the strides of an operator's result, if torch's rule for fake tensors has others.

    The answer is None for equal strides and for operators that are not described here. Strides of
    symbolic sizes are compared by their hints: the strides of a tensor without gaps are multiples
    of each other.

    Args:
        result: the result; the first one if there are several.
    """
    if op.name in _INDEXING:
        return _index_strides(args, result)
    if op.name in _FORMATTED:
        return _formatted_strides(args[_FORMATTED[op.name]], result)
    written = op.name in _CONTIGUOUS or op.name in _LIKE_FIRST
    if op.row is None or (op.row.rule not in _RULES and not written):
        return None
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if not isinstance(result, torch.Tensor) or not tensors:
        return None
    if op.name in _SECOND_FIRST:
        tensors.reverse()
    operands = [layout_of(x) for x in tensors]
    shape, strides = layout_of(result)
    if 0 in shape:
        return None
    order: Sequence[int] | None
    if op.name in _CONTIGUOUS:
        order = range(len(shape))
    elif op.name in _LIKE_FIRST:
        if operands[0].shape != shape:
            return None  # a sum
        order = memory_order(shape, operands[0].strides)
    elif any(x.shape != shape for x in operands) or (shape and _wraps_number(op, args)):
        order = _broadcast_order(operands, shape)
    else:
        order = _common_order(operands)
        if (
            order is None
            and operands.count(operands[0]) == len(operands)
            and _is_dense(operands[0])
        ):
            return None if strides == operands[0].strides else list(tensors[0].stride())
        order = _broadcast_order(operands, shape) if order is None else order
    return (
        None if list(strides) == dense_strides(shape, order) else dense_strides(result.shape, order)
    )


def _formatted_strides(like: torch.Tensor, result: Any) -> list[Any] | None:
    """Return the strides of a result without gaps in the memory format of another tensor.

    Source: ``is_channels_last_strides_2d`` in torch.
    """
    if not isinstance(result, torch.Tensor) or result.device.type != "cpu":
        return None
    (shape, strides), (sizes, steps) = layout_of(result), layout_of(like)
    if 0 in shape:
        return None
    order, rank = list(range(len(shape))), len(sizes)
    if rank in (4, 5) and steps[1] and len(shape) == rank:
        last = [0, *range(2, rank), 1]
        least = 0  # the least stride that the next dim may have
        for dim in reversed(last):
            if steps[dim] < least or (dim == 0 and least == steps[1]):
                break
            least = steps[dim] * sizes[dim]
        else:
            order = last
    dense = dense_strides(shape, order)
    return None if list(strides) == dense else dense_strides(result.shape, order)


def _broadcast_order(operands: Sequence[_Layout], shape: Sequence[int]) -> Sequence[int]:
    """Return the order in memory of a result without gaps, whose dims the operands order."""
    return memory_order(shape, *[_broadcast_strides(x, shape) for x in operands])


def _index_strides(args: Sequence[Any], result: Any) -> list[Any] | None:
    """Return the strides of an indexed tensor, which follow the layout of the indices, too.

    The kernel's operands are the tensor, expanded in the indexed dims, and the indices, expanded in
    the others. torch's rule for fake tensors leaves out the indices.

    Source: ``AdvancedIndex`` in torch.
    """
    x, indices = args
    present = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in present):
        return None  # masks become indices of one dim
    at = [dim for dim, index in enumerate(indices) if index is not None]
    rest = [dim for dim in range(x.dim()) if dim not in at]
    adjacent = at == list(range(at[0], at[-1] + 1))
    before = [dim for dim in rest if adjacent and dim < at[0]]
    first, last = len(before), result.dim() - (len(rest) - len(before))
    shape, found = layout_of(result)
    if last == first or 0 in shape:
        return None  # indices without dims
    indexed = shape[first:last]
    steps = [_broadcast_strides(layout_of(index), indexed) for index in present]
    if result.device.type != "cpu" and any(step != steps[0] for step in steps):
        steps = [dense_strides(indexed)] * len(present)
    source = [hint_of(x.stride(dim)) for dim in rest]
    operands = [[*source[:first], *[0] * len(indexed), *source[first:]]]
    operands += [
        _strides_among_ones(indexed, step, first, len(shape) - last, shape) for step in steps
    ]
    order = memory_order(shape, *operands)
    return (
        None if list(found) == dense_strides(shape, order) else dense_strides(result.shape, order)
    )


def _strides_among_ones(
    shape: Sequence[int], strides: Sequence[int], before: int, after: int, wanted: Sequence[int]
) -> list[int]:
    """Return the strides of a view with more dims of size 1, expanded to the wanted shape.

    Source: ``computeStride`` in torch.
    """
    base, elements = strides[-1], 1
    steps: list[int] = []
    sizes = [*[1] * before, *shape, *[1] * after]
    all_strides = [*[1] * before, *strides, *[1] * after]
    for size, step, whole in zip(*map(reversed, (sizes, all_strides, wanted)), strict=True):
        if size != 1 and step != elements * base:
            base, elements = step, 1
        steps.insert(0, elements * base if size == whole else 0)
        elements = elements * size
    return steps


def _wraps_number(op: TorchOperator, args: Sequence[Any]) -> bool:
    """True if a number is an operand: a tensor without dims for the kernel."""
    if not any(isinstance(x, int | float | complex) for x in args):
        return False
    if op.name.partition(".")[2] in _NUMBER_OPERANDS:
        return op.name not in _CAPTURING
    types = [argument.type.kind() for argument in op.overload._schema.arguments]
    pairs = zip(args, types, strict=False)
    return any(kind == "TensorType" and not isinstance(x, torch.Tensor) for x, kind in pairs)


def _common_order(operands: Sequence[_Layout]) -> Sequence[int] | None:
    """Return the order of the dims that all operands have in memory; None for another one."""
    rank = len(operands[0].shape)
    for order in (tuple(range(rank)), *([(0, 2, 3, 1)] if rank == 4 else [])):
        if all(_has_order(x, order) for x in operands):
            return order
    return None


def _has_order(x: _Layout, order: Sequence[int]) -> bool:
    """True if the tensor is without gaps in an order of its dims."""
    dense = dense_strides(x.shape, order)
    return all(n == 1 or a == b for n, a, b in zip(x.shape, x.strides, dense, strict=True))


def _is_dense(x: _Layout) -> bool:
    """True if the tensor has no gaps and does not overlap itself."""
    expected = 1
    for step, n in sorted((step, n) for step, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if step != expected:
            return False
        expected *= n
    return True


def _broadcast_strides(x: _Layout, shape: Sequence[int]) -> list[int]:
    """Return an operand's strides in the dims of the result, 0 in those that it lacks."""
    missing = len(shape) - len(x.shape)
    pairs = zip(x.shape, x.strides, shape[missing:], strict=True)
    return [0] * missing + [0 if n == 1 and size != 1 else step for n, step, size in pairs]


# NOTE [layouts of derivatives]
# torch's derivatives have any strides. A trace takes those of the derivatives of control flow for
# the strides of the tensor that each belongs to, without gaps: an operand for a cotangent, and a
# result for a tangent. It makes a view of a derivative where these strides have one, so a
# derivative with other strides is copied when the program runs.
def derivative_strides(tensor: torch.Tensor) -> list[int] | None:
    """Return the strides of a derivative by a tensor; None if they are not known numbers."""
    if tensor.layout is not torch.strided:
        return None
    steps = tensor.stride()
    if not all(type(n) is int for n in (*steps, *tensor.shape)):
        return None
    return dense_strides(tensor.shape, memory_order(tensor.shape, steps))


# --- the strides of views


def check_view(name: str, args: Sequence[Any], result: Any) -> None:
    """Raise the error of torch's kernel if a tensor has no such view.

    Args:
        name: the name of the operator; other operators than ``aten::view`` are not checked.
        args: the arguments, of which the first is the tensor.
        result: the view by torch's rule for fake tensors.

    Raises:
        RuntimeError: the tensor has no such view.
    """
    if name != "aten::view" or not isinstance(result, torch.Tensor):
        return
    x = args[0]
    sizes = (*x.shape, *x.stride(), *result.shape)
    if not all(type(n) is int for n in sizes) or 0 in result.shape:
        return  # a comparison would be a guard
    if not has_view(x.shape, x.stride(), result.shape):
        raise RuntimeError(
            "view size is not compatible with input tensor's size and stride (at least one "
            "dimension spans across two contiguous subspaces). Use .reshape(...) instead."
        )


def has_view(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> bool:
    """True if a tensor of these sizes and strides has a view of the wanted sizes.

    Both have the same number of elements, which is not 0.
    """
    if not shape:
        return True
    at = len(wanted) - 1
    elements, viewed = 1, 1
    step = strides[-1]  # of the innermost dim of a run that one dim can view
    for dim in reversed(range(len(shape))):
        elements *= shape[dim]
        if dim > 0 and (shape[dim - 1] == 1 or strides[dim - 1] == elements * step):
            continue
        while at >= 0 and (viewed < elements or wanted[at] == 1):
            viewed *= wanted[at]
            at -= 1
        if viewed != elements:
            return False
        if dim > 0:
            elements, viewed, step = 1, 1, strides[dim - 1]
    return at == -1
