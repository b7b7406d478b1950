"""A tool that sees every call: it counts the operators that run, also those on plain tensors.

Tracers see the calls that have one among their arguments. A dispatch mode of torch sees each
operator that torch finally runs, after all transforms: one operator for a whole batch, those of
backward passes, and those of programs. Run it: python examples/count_operators.py
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tsfunc import grad, vmap


class OperatorCount(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[op.name()] += 1
        return op(*args, **(kwargs or {}))


def count(f: Callable[..., Any], *args: Any) -> Counter[str]:
    with OperatorCount() as mode:
        f(*args)
    return mode.calls


def loss(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * torch.ones(3).exp()).sum()


batch = torch.randn(5, 3)
print("one example:", dict(count(loss, batch[0])))
print("vmap:", dict(count(vmap(loss), batch)))
print("vmap of grad:", dict(count(vmap(grad(loss)), batch)))
