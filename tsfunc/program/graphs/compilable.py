"""Operators that torch's compilers can't take, or compute with less precision, as simpler ones.

The step of a fused optimizer on a CPU is one operator, which has no rule for tensors without data
in torch, or is not functionalized without ``amsgrad``. A compiler gets the arithmetic of its
kernel, which it fuses again.

Inductor passes a number that was read from a tensor to a kernel as a float of 32 bits. The factors
``value`` and ``alpha`` are therefore given as the tensors that they were read from.

NOTE [layouts of compiled programs]
A program has views that fit the strides of its values. Inductor decomposes some operators (``cat``
of one tensor, ``stack``, ``interpolate``) into others whose results have other strides: a ``view``
of such a result fails, and ``as_strided`` takes other elements. A value that such a view depends
on, or that the program returns, is therefore put into the program's order of dims. Only values that
the compiler has in another order are copied.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.fx
from torch import Tensor

from tsfunc.bridge.control.node_writes import declares_sharing, possibly_shared
from tsfunc.bridge.sizes.strides import order_without_gaps
from tsfunc.bridge.trace.graph_compilers import READS
from tsfunc.bridge.tracers.operators import TorchOperator, operator_of

_aten = torch.ops.aten


def make_compilable(module: torch.fx.GraphModule) -> None:
    """Replace these operators in a module, and in the bodies of its control flow."""
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in list(part.graph.nodes):
                node.target = FUSED.get(node.target, node.target)
                _scale_by_tensor(node)
            part.recompile()


# --- factors that were read from tensors


def _scale_by_tensor(node: torch.fx.Node) -> None:
    """Let an operator take its factor as a tensor, if the factor was read from one."""
    scaling = SCALED.get(node.target)
    if scaling is None:
        return
    name, scaled = scaling
    number = node.kwargs.get(name)
    if not isinstance(number, torch.fx.Node) or number.target not in READS:
        return
    (read,) = number.args
    assert isinstance(read, torch.fx.Node)
    with node.graph.inserting_before(number):  # a copy, since later operators may write into it
        factor = node.graph.call_function(_aten.clone.default, (read,))
    node.target, node.kwargs = scaled, {"factor": factor}
    if not number.users:
        node.graph.erase_node(number)


def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, factor: Tensor) -> Tensor:
    return x + factor * a * b


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, factor: Tensor) -> Tensor:
    return x + factor * a / b


def _add(x: Tensor, other: Tensor, *, factor: Tensor) -> Tensor:
    return x + factor * other


def _sub(x: Tensor, other: Tensor, *, factor: Tensor) -> Tensor:
    return x - factor * other


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def write(x: Tensor, *args: Tensor, factor: Tensor) -> Tensor:
        return x.copy_(function(x, *args, factor=factor))

    write.__name__ = write.__qualname__ = f"{function.__name__}_"
    return write


# Operators, each with the name of its factor and the function that takes this as a tensor.
SCALED: Final[dict[Any, tuple[str, Callable[..., Tensor]]]] = {
    _aten.addcmul.default: ("value", _addcmul),
    _aten.addcmul_.default: ("value", _in_place(_addcmul)),
    _aten.addcdiv.default: ("value", _addcdiv),
    _aten.addcdiv_.default: ("value", _in_place(_addcdiv)),
    _aten.add.Tensor: ("alpha", _add),
    _aten.add_.Tensor: ("alpha", _in_place(_add)),
    _aten.sub.Tensor: ("alpha", _sub),
    _aten.sub_.Tensor: ("alpha", _in_place(_sub)),
}


# --- steps of fused optimizers


class _Step:
    """The step of one parameter: what all fused optimizers do before and after their own part.

    Args:
        found_inf: 1 if the step is left out, or None.
    """

    def __init__(self, found_inf: Tensor | None) -> None:
        self._found_inf = found_inf

    def write(self, old: Tensor, new: Tensor) -> None:
        if self._found_inf is not None:
            new = torch.where(self._found_inf == 1, old, new)
        old.copy_(new)

    def gradient(
        self, param: Tensor, grad: Tensor, weight_decay: float, grad_scale: Tensor | None,
        maximize: bool,
    ) -> Tensor:  # fmt: skip
        """Return the gradient that the step follows, and write it back where it was scaled."""
        if grad_scale is not None:
            scaled = grad / grad_scale
            self.write(grad, scaled)
            grad = scaled
        grad = -grad if maximize else grad
        return grad + param * weight_decay if weight_decay else grad


def _adam(decoupled: bool) -> Callable[..., None]:
    def fused_adam(
        params: Sequence[Tensor], grads: Sequence[Tensor], averages: Sequence[Tensor],
        squares: Sequence[Tensor], largest: Sequence[Tensor], steps: Sequence[Tensor], *,
        lr: Any, beta1: float, beta2: float, weight_decay: float, eps: float, amsgrad: bool,
        maximize: bool, grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
    ) -> None:  # fmt: skip
        one = _Step(found_inf)
        for i, param in enumerate(params):
            decay = 0.0 if decoupled else weight_decay
            grad, start = one.gradient(param, grads[i], decay, grad_scale, maximize), param
            if weight_decay and decoupled:
                start = param - lr * weight_decay * param
            step = steps[i].double()
            average = averages[i] + (1 - beta1) * (grad - averages[i])
            square = squares[i] * beta2 + (1 - beta2) * grad * grad
            top = torch.maximum(largest[i], square) if amsgrad else square
            size = lr / (1 - torch.pow(beta1, step))
            below = top.sqrt() / (1 - torch.pow(beta2, step)).sqrt() + eps
            one.write(param, start - size * average / below)
            one.write(averages[i], average)
            one.write(squares[i], square)
            if amsgrad:
                one.write(largest[i], top)

    return fused_adam


def _fused_sgd(
    params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor], *,
    weight_decay: float, momentum: float, lr: Any, dampening: float, nesterov: bool,
    maximize: bool, is_first_step: bool, grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    one = _Step(found_inf)
    for i, param in enumerate(params):
        grad = one.gradient(param, grads[i], weight_decay, grad_scale, maximize)
        if momentum:
            buffer = grad if is_first_step else buffers[i] * momentum + grad * (1 - dampening)
            one.write(buffers[i], buffer)
            grad = grad + momentum * buffer if nesterov else buffer
        one.write(param, param - lr * grad)


def _fused_adagrad(
    params: Sequence[Tensor], grads: Sequence[Tensor], sums: Sequence[Tensor],
    steps: Sequence[Tensor], *, lr: Any, lr_decay: float, weight_decay: float, eps: float,
    maximize: bool, grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    one = _Step(found_inf)
    for i, param in enumerate(params):
        grad = one.gradient(param, grads[i], weight_decay, grad_scale, maximize)
        rate = lr / (1 + (steps[i].double() - 1) * lr_decay)
        total = sums[i] + grad * grad
        one.write(param, param - rate * grad / (total.sqrt() + eps))
        one.write(sums[i], total)


FUSED: Final[dict[Any, Callable[..., None]]] = {
    getattr(getattr(_aten, name), overload): function
    for name, function in (
        ("_fused_adam_", _adam(decoupled=False)),
        ("_fused_adamw_", _adam(decoupled=True)),
        ("_fused_sgd_", _fused_sgd),
        ("_fused_adagrad_", _fused_adagrad),
    )
    for overload in ("default", "tensor_lr")
}
STEPS: Final = frozenset(FUSED.values())


# --- the strides of values


_aten = torch.ops.aten
_DEPENDS_ON_STRIDES: Final = frozenset({
    _aten.view.default, _aten.view.dtype, _aten._unsafe_view.default, _aten.view_as_complex.default,
    _aten.as_strided.default, _aten.as_strided_copy.default,
})  # fmt: skip


def keep_layouts(module: torch.fx.GraphModule) -> None:
    """Give values the program's order of dims in memory where something depends on it.

    Control flow gives the results of its bodies one layout, and views in a body copy:
    NOTE [layouts of torch's loops] in ``torch_operators.py``.
    """
    used: set[torch.fx.Node] = set()  # values on whose strides something depends
    for node in reversed(list(module.graph.nodes)):
        if node.op == "output":
            used.update(node.all_input_nodes)
        elif node in used or node.target in _DEPENDS_ON_STRIDES:
            used.update(possibly_shared(node))
            if node in used and _is_made(node):
                _keep_layout(node)
    module.recompile()


def _is_made(node: torch.fx.Node) -> bool:
    """True if an operator may make the value, alone or among others, and its memory."""
    if node.target is operator.getitem:
        (node,) = node.all_input_nodes
    op = node.meta.get("op")
    return node.op == "call_function" and not (
        isinstance(op, TorchOperator) and declares_sharing(op)
    )


def _keep_layout(node: torch.fx.Node) -> None:
    """Let all users of a value get it in the order of dims that it has in the program."""
    value = node.meta.get("val")
    order = order_without_gaps(value) if isinstance(value, Tensor) else None
    if order is None:
        return
    calls: list[tuple[Any, list[Any]]] = [(_aten.contiguous.default, [])]
    if order != sorted(order):
        back = sorted(range(len(order)), key=order.__getitem__)
        permute = _aten.permute.default
        calls = [(permute, [order]), *calls, (permute, [back])]
    users, result = list(node.users), node
    with node.graph.inserting_before(node.next):
        for target, args in calls:
            result = node.graph.call_function(target, (result, *args))
            result.meta = {**node.meta, "op": operator_of(target)}
    for user in users:
        user.replace_input_with(node, result)
