"""An operator of your own under every transform: a category, a batching rule, a derivative.

``roll_scale(x, shift, factor)`` rotates the last dim of ``x`` and scales it. Run it:
python examples/new_operator.py
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tsfunc import MetaTensorType, explain, grad, ops, specialize, vmap


# 1. The operator is torch's: a kernel, the shape of its result, and its derivative.
@torch.library.custom_op("examples::roll_scale", mutates_args=())
def roll_scale(x: Tensor, shift: int, factor: float) -> Tensor:
    return x.roll(shift, -1) * factor


@roll_scale.register_fake
def _(x: Tensor, shift: int, factor: float) -> Tensor:
    return torch.empty_like(x)


def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.shift, ctx.factor = inputs


def pull(ctx: Any, ct: Tensor) -> tuple[Any, ...]:
    return roll_scale(ct, -ctx.shift, ctx.factor), None, None


roll_scale.register_autograd(pull, setup_context=keep)


# 2. Its shape category and its batching rule. A rule gets the values and, for each, the dim that
# holds the examples (None for a value that is not batched). It returns the result and its batch
# dim. Here the last dim must not be the batch dim, so the examples go to the front.
def rule(
    op: Any,
    level: ops.RuleLevel,
    bdims: Sequence[int | None],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Tensor, int]:
    x, *rest = args
    return op(x.movedim(bdims[0], 0), *rest, **kwargs), 0


ops.register(roll_scale, category="N-Dimensional", rule=rule)


# 3. Every transform takes it: the loop is the law that the rule is held to.
batch = torch.randn(4, 5, dtype=torch.float64)
for in_dim in (0, 1):
    mapped = vmap(lambda row: roll_scale(row, 2, 3.0), in_dim)(batch)
    assert mapped.equal(torch.stack([roll_scale(row, 2, 3.0) for row in batch.unbind(in_dim)]))


def loss(row: Tensor) -> Tensor:
    return (roll_scale(row, 1, 0.5) * row).sin().sum()


def plain(row: Tensor) -> Tensor:
    return (row.roll(1) * 0.5 * row).sin().sum()


grads = vmap(grad(loss))(batch)
assert grads.allclose(torch.stack([torch.func.grad(plain)(row) for row in batch]))
program = specialize(vmap(grad(loss)), {"row": MetaTensorType(["n", 5])})
assert program(batch).allclose(grads) and program(batch[:2]).allclose(grads[:2])

report = explain(vmap(loss), batch)
(use,) = [use for use in report.uses if use.operator == "examples::roll_scale"]
print(f"{use.operator} was served by its {use.how} {use.rule}; slow loops: {len(report.loops)}")
