"""Reruns a traced graph on fake values, to compare its operators' results with those recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tsfunc.bridge.sizes.assumed_constraints import assume
from tsfunc.bridge.sizes.fake_results import results_of
from tsfunc.bridge.sizes.symbolic_numbers import size_text
from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.bridge.tracers.user_queries import same_size
from tsfunc.ops.registry import Args, Kwargs


class FakeRerun:
    """Runs operators on fake tensors, outside of all levels and modes.

    Args:
        sample: a fake tensor of the trace, for its symbols, or None.
    """

    def __init__(self, sample: Any) -> None:
        is_fake = isinstance(sample, FakeTensor)
        self._mode = sample.fake_mode if is_fake else FakeTensorMode(allow_non_fake_inputs=False)

    def assume(self, constraints: Sequence[str]) -> None:
        """Assume constraints on named dims, and about numbers among the arguments."""
        env: Any = self._mode.shape_env
        if constraints and env is not None:
            assume(constraints, {**env.symbols.sizes, **env.symbols.numbers})

    def like(self, value: torch.Tensor) -> torch.Tensor:
        """Return a fake input with the metadata of another fake tensor."""
        with torch_state.outside_all_transforms(), self._mode:
            tensor = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
            tensor = tensor.conj() if value.is_conj() else tensor
            return torch._neg_view(tensor) if value.is_neg() else tensor

    def call(self, target: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Return the results of an operator, with autograd's dispatch keys active as in the trace.

        Without these keys torch's fake tensors run a composite operator whole, and some of torch's
        rules for composites are wrong: that of ``nll_loss`` has its arguments in another order.
        """
        with torch_state.outside_all_transforms(), torch.no_grad():
            op = operator_of(target) if isinstance(target, OpOverload) else None
            name, writes = (op.name, op.writes) if op is not None else ("", False)
            return results_of(
                self._mode, name, target, writes, _plain_lists(args), _plain_lists(dict(kwargs))
            )


def _plain_lists(value: Any) -> Any:
    """Replace the list class of torch.fx, which other code does not flatten, by lists."""
    if isinstance(value, dict):
        return {name: _plain_lists(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain_lists(item) for item in value]
    return tuple([_plain_lists(item) for item in value]) if type(value) is tuple else value


def difference(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return the first difference of dtype, device or shape of two tensors as text, or None."""
    if got.dtype != expected.dtype:
        return f"its dtype is {got.dtype}, not {expected.dtype}"
    if got.device != expected.device:
        return f"its device is {got.device}, not {expected.device}"
    same_shape = got.dim() == expected.dim() and all(
        same_size(m, n) for m, n in zip(got.shape, expected.shape, strict=True)
    )
    return None if same_shape else f"its shape is {_shape_text(got)}, not {_shape_text(expected)}"


def _shape_text(value: torch.Tensor) -> str:
    return f"[{', '.join(map(size_text, value.shape))}]"
