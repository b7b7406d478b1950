"""The circumstances of a call: what is different around it, but does not change its result.

A call that is repeated must give the result of a first call, whatever plan, recipe or program the
earlier calls have left behind. A program therefore has a circumstance for each of its calls.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tsfunc.bridge import compiled

# Circumstances that change the call itself, also in the reference.
GRADIENTS = "gradients"  # all floats require grad, and the gradients are results
FLOAT32 = "float32"  # all floats are of this dtype
OTHERS = "others"  # other captured tensors
CHANGES = frozenset({GRADIENTS, FLOAT32, OTHERS})
PLAIN = ""


class _Passing(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class _Decomposing(TorchDispatchMode):
    """Calls the parts of composite operators, as FlopCounterMode does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # not an operator of the dispatcher
            return NotImplemented
        with self:
            out = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if out is NotImplemented else out


class _Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# Circumstances around a call of tsfunc, each with a function that returns a context manager.
CONTEXTS: Mapping[str, Any] = {
    "python handlers": compiled.pause_handlers,
    "flops": lambda: FlopCounterMode(display=False),
    "dispatch mode": _Passing,
    "decomposing mode": _Decomposing,
    "function mode": _Functions,
    "device": lambda: torch.device("cpu"),
    "no_grad": torch.no_grad,
    "saved tensors": torch.autograd.graph.save_on_cpu,
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "deterministic": _deterministic,
}
KINDS = (GRADIENTS, GRADIENTS, GRADIENTS, FLOAT32, OTHERS, OTHERS, *CONTEXTS)


def draw_circumstances(
    rng: random.Random, calls: int, frozen: bool, modules: bool
) -> tuple[str, ...]:
    """Draw the circumstance of each call of a program.

    Args:
        rng: the source of the draws.
        calls: the number of calls.
        frozen: True if captured tensors are constants of the program.
        modules: True if the program calls a module. FlopCounterMode has hooks on the inputs of
            modules, and torch refuses these in ``autograd.grad``, also in torch.func.
    """
    kinds = [
        kind
        for kind in KINDS
        if (not frozen or kind in CONTEXTS) and not (modules and kind == "flops")
    ]
    some = rng.sample(kinds, 2)
    return tuple(rng.choice((PLAIN, PLAIN, *some)) for _ in range(calls))


def around(circumstance: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context manager of a circumstance, for a call of tsfunc."""
    made = CONTEXTS.get(circumstance, contextlib.nullcontext)()
    assert isinstance(made, contextlib.AbstractContextManager)
    return made
