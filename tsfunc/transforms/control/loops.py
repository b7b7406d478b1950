"""``while_loop`` and ``fori_loop``: a body runs as long as a condition holds.

If the condition is known, the loop is Python's, and reverse mode goes back through its steps. If it
differs from example to example of a vmap, finished examples leave the batch: each step runs on the
active subset alone, and a loop costs the sum of its examples' steps. See NOTE [active subsets] in
``bridge/control/subsets``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.boundaries import boundary
from tsfunc.bridge.tracers.dynamo import torch_records
from tsfunc.bridge.tracers.user_queries import statically_known_true
from tsfunc.transforms.control import dynamo_forms
from tsfunc.transforms.control.call_forms import also_called, check_callable, takes_entries
from tsfunc.transforms.control.choice import choice_of
from tsfunc.transforms.control.control_operators import Checkpoint
from tsfunc.transforms.control.control_recording import record_scan
from tsfunc.transforms.control.loop_runs import ADVICE, CountedLoop, Loop
from tsfunc.transforms.control.outputs import as_tensor
from tsfunc.transforms.control.rank_agreement import agreed_loop, axes_of_exchanges
from tsfunc.transforms.control.skipped_bodies import check_zero_steps

_Carry = TypeVar("_Carry")


@boundary("while_loop", traceable=True)
@also_called(cond_fn="cond_fun", body_fn="body_fun", carried_inputs="init_val")
def while_loop(
    cond_fun: Callable[..., Any],
    body_fun: Callable[..., Any],
    init_val: _Carry,
    *,
    checkpoint: Checkpoint = None,
) -> _Carry:
    """Call a body on its own result as long as a condition holds.

    Args:
        cond_fun: takes the carry; returns a bool, or a tensor of one element.
        body_fun: takes the carry and returns the next carry: a pytree of the same structure, with
            leaves of the same dtypes and shapes.
        init_val: the first carry, any pytree.
        checkpoint: the values that reverse mode keeps. None keeps the values that autograd saves
            in each step, so that memory grows with the number of steps. "sqrt" keeps only carries,
            about the square root of ``2 n`` for ``n`` steps; the backward pass runs each step a
            second time. "log" keeps about ``log2(n)`` carries at a time, and runs a step up to
            that often.

    Returns:
        The first carry for which the condition does not hold.

    Raises:
        TypeError: the condition is not a valid predicate.
        TypeCheckError: the carry changes its type, or would do so in a first step.

    Example:
        >>> import torch
        >>> from tsfunc import vmap, while_loop
        >>> def doubled_past_100(x):
        ...     return while_loop(lambda x: x < 100, lambda x: 2 * x, x)
        >>> vmap(doubled_past_100)(torch.tensor([1., 30., 200.]))
        tensor([128., 120., 200.])

    Corresponds to ``jax.lax.while_loop``; it is also differentiable in reverse mode. torch's form,
    with functions that take the entries of a tuple or list as arguments, is accepted too, with its
    parameter names. Functions of one argument therefore get the entry of a tuple of one entry, not
    the tuple.
    """
    if checkpoint not in (None, "sqrt", "log"):
        raise ValueError(
            f'while_loop: checkpoint: expected None, "sqrt" or "log", got {checkpoint!r}.'
        )
    check_callable("while_loop", cond_fun=cond_fun, body_fun=body_fun)
    if torch_records():
        return dynamo_forms.while_loop(cond_fun, body_fun, init_val)
    if not takes_entries(cond_fun, init_val):
        last = _loop("while_loop", cond_fun, body_fun, checkpoint, init_val).run_to_end(init_val)
        return last

    entries: Any = init_val

    def body(carry: Any) -> Any:
        new = body_fun(*carry)
        if len(entries) == 1 and type(new) not in (tuple, list):
            new = (new,)
        return type(entries)(new) if type(new) in (tuple, list) else new

    loop = _loop("while_loop", lambda carry: cond_fun(*carry), body, checkpoint, init_val)
    loop.written = body_fun
    last = loop.run_to_end(init_val)
    return last


@boundary("fori_loop", traceable=True)
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init_val: _Carry,
    *,
    checkpoint: Checkpoint = None,
) -> _Carry:
    """Call a body with each integer of a range and its own last result.

    Args:
        lower: the first integer; a number or a tensor of one element.
        upper: the end of the range, exclusive; as ``lower``.
        body_fun: takes the integer (an int if both bounds are known integers, else a tensor)
            and the carry; returns the next carry, of the same type.
        init_val: the first carry, any pytree.
        checkpoint: as for ``while_loop``.

    Returns:
        The last carry.

    Raises:
        TypeError: a bound is not a number.
        TypeCheckError: the carry changes its type, or would do so in a first step.

    Example:
        >>> import torch
        >>> from tsfunc import fori_loop
        >>> fori_loop(0, 5, lambda i, total: total + i, torch.tensor(0))
        tensor(10)

    Corresponds to ``jax.lax.fori_loop``; it is differentiable in reverse mode even if the bounds
    are tensors.
    """
    check_callable("fori_loop", body_fun=body_fun)
    if torch_records():
        return dynamo_forms.fori_loop(lower, upper, body_fun, init_val)
    if isinstance(lower, torch.Tensor) or isinstance(upper, torch.Tensor):
        # The ranks of a mesh may have different bounds.
        carry = (torch.as_tensor(lower), torch.as_tensor(upper), init_val)
        step = lambda carry: (carry[0] + 1, carry[1], body_fun(carry[0], carry[2]))  # noqa: E731
        if axes_of_exchanges("fori_loop", (step,), (carry,)):
            counts = lambda carry: carry[0] < carry[1]  # noqa: E731
            last = _loop("fori_loop", counts, step, checkpoint, carry).run_to_end(carry)[2]
            return last
    bounds: list[Any] = [_known_bound(value) for value in (lower, upper)]
    trace = current_trace()
    if trace is not None and _has_known_length(*bounds):
        if all(isinstance(b, int) for b in bounds) and bounds[1] <= bounds[0]:
            step = functools.partial(body_fun, bounds[0])
            check_zero_steps("fori_loop", body_fun, step, init_val, ADVICE)
            return init_val
        numbers = torch.arange(bounds[0], torch.sym_max(*bounds))
        last = record_scan(
            "fori_loop", lambda carry, i: (body_fun(i, carry), None), init_val, numbers, None,
            False, 0, ADVICE,
        )[0]  # fmt: skip
        return last
    tensor = next((b for b in bounds if isinstance(b, torch.Tensor)), None)
    if tensor is not None:
        bounds = [b if isinstance(b, torch.Tensor) else as_tensor(b, device=tensor.device)
                  for b in bounds]  # fmt: skip

    def body(carry: Any) -> Any:
        i, last, value = carry
        return i + 1, last, body_fun(i, value)

    loop = CountedLoop("fori_loop", lambda carry: carry[0] < carry[1], body, checkpoint)
    loop.numbered = loop.written = body_fun
    last = loop.run_to_end((*bounds, init_val))[2]
    return last


def _loop(
    label: str,
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    checkpoint: Checkpoint,
    carry: Any,
) -> Loop:
    """Return a loop; if it exchanges values along mesh axes, it ends on all ranks at once."""
    axes = axes_of_exchanges(label, (cond_fun, body_fun), (carry,))
    if not axes:
        return Loop(label, cond_fun, body_fun, checkpoint)
    loop = Loop(label, *agreed_loop(axes, cond_fun, body_fun), checkpoint)
    loop.written = body_fun
    return loop


def _known_bound(value: Any) -> Any:
    """Return a bound of a range: an int if its value is known."""
    if isinstance(value, float) or (
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() == 1
    ):
        return value  # it has a gradient, and so do the counter values
    choice = choice_of(value, "fori_loop")
    if isinstance(choice, bool):
        raise TypeError("fori_loop: the bounds: expected integers, got a bool.")
    return choice if isinstance(choice, int) else value


def _has_known_length(lower: Any, upper: Any) -> bool:
    """True if the length of a range is known, or symbolic and at least one."""
    if isinstance(lower, int) and isinstance(upper, int):
        return True
    return all(isinstance(b, int | torch.SymInt) for b in (lower, upper)) and statically_known_true(
        lower < upper
    )
