"""A transform of your own: interval arithmetic, which composes with vmap both ways.

``interval(f)`` takes bounds of f's inputs and gives bounds of its output: f of any values
between the first lies between the second. Run it: python examples/new_transform.py
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tsfunc import Tracer, TracerLevel, dispatch, vmap

# 1. A key: the column of the dispatcher's table in which this transform's kernels stand.
Interval = dispatch.DispatchKey.define("Interval", above=dispatch.DispatchKey.Batch)
INCREASING = {"aten::add.Tensor", "aten::exp", "aten::movedim.int", "aten::unsqueeze"}


# 2. A tracer: what a value is while the transform runs. torch takes it for a tensor.
class Bounds(Tracer):
    lo: Tensor
    hi: Tensor


def ends(x: Any) -> tuple[Any, Any]:
    return (x.lo, x.hi) if isinstance(x, Bounds) else (x, x)  # a constant is a point


# 3. Kernels: what operators mean for the key. They run as if outside of the transform: torch
# can be called on the ends, and where those are values of an outer vmap, it is met next.
@dispatch.register(torch.mul, Interval)
def mul(x: Any, y: Any) -> Bounds:
    corners = torch.stack([a * b for a in ends(x) for b in ends(y)])
    return Bounds.make(lo=corners.amin(0), hi=corners.amax(0))


@dispatch.register_fallback(Interval)  # serves every operator without a kernel of its own
def fallback(op: dispatch.Operator, args: Any, kwargs: Any) -> Bounds:
    if op.name not in INCREASING:
        raise NotImplementedError(f"interval: {op.name} has no kernel")
    lows, highs = zip(*map(ends, args), strict=True)
    return Bounds.make(lo=op(*lows, **kwargs), hi=op(*highs, **kwargs))


# 4. The transform: a level of the key, f called on tracers, and the ends of what it returns.
def interval(f: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def bounded(*pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        with TracerLevel(Interval) as level:
            return ends(f(*(Bounds.make(level=level, lo=lo, hi=hi) for lo, hi in pairs)))

    return bounded


x = torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([1.0, 0.5, 3.0])
outside = vmap(interval(lambda v: v * torch.exp(v)))(x)
inside = interval(vmap(lambda v: v * torch.exp(v)))(x)
torch.testing.assert_close(outside, inside)
print("bounds of x * exp(x):", *outside)
