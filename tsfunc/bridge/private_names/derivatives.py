"""Private names of torch's derivatives: autograd, forward mode, torch.func."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch.autograd import forward_ad

from tsfunc.bridge.private_names.entries import Risk, entry, expect


@entry(
    "Nodes of autograd",
    """torch._C._current_autograd_node torch._C._current_graph_task_id
    torch._C._autograd._get_sequence_nr torch.autograd.Variable._execution_engine
    Node._sequence_nr Tensor._backward_hooks Tensor._post_accumulate_grad_hooks
    torch.Tensor._backward_hooks""",
    use="explain and programs find the forward call of an operator of a backward pass; a level "
    "knows that a backward pass runs; gradients are computed without torch.autograd.grad's checks; "
    "one table of hooks serves all inputs of gradients.",
    stand_in="torch.autograd.grad; Node.metadata and hooks for the lines of backward passes.",
    risk=Risk.MEDIUM,
)
def _autograd_nodes() -> None:
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    number = torch._C._autograd._get_sequence_nr()
    y = x.sin()
    node: Any = y.grad_fn
    expect(node._sequence_nr() == number, "the number of the thread's next node")
    expect(torch._C._current_autograd_node() is None, "no node outside of a backward pass")
    expect(torch._C._current_graph_task_id() == -1, "-1 outside of a backward pass")
    x.register_hook(lambda g: seen.append(torch._C._current_graph_task_id()))
    engine: Any = torch.autograd.Variable._execution_engine
    (grad,) = engine.run_backward(
        (y,), (torch.ones(2),), False, False, (x,), allow_unreachable=True, accumulate_grad=False
    )
    expect(torch.equal(grad, x.detach().cos()), "the gradient")
    expect(len(seen) == 1 and seen[0] != -1, "the number of a backward pass")
    leaf: Any = torch.ones(2, requires_grad=True)
    leaf._post_accumulate_grad_hooks = OrderedDict({0: seen.append})
    leaf.sin().sum().backward()
    expect(seen[1:] == [leaf], "a call of the hook for the leaf")


@entry(
    "Lazy zeros of forward mode",
    "Tensor._is_zerotensor",
    use="Zero tangents without memory become plain zeros where they meet a tracer.",
    stand_in="Zeros in memory for every tangent that a tensor lacks.",
    risk=Risk.LOW,
)
def _lazy_zeros() -> None:
    x, y = torch.ones(2), torch.ones(2)
    with forward_ad.dual_level():
        unpacked = forward_ad.unpack_dual(forward_ad.make_dual(x, y) * y)
    expect(not unpacked.tangent._is_zerotensor(), "a tangent in memory")
    lazy = torch._efficientzerotensor(2)
    expect(lazy._is_zerotensor() and (lazy * x)._is_zerotensor(), "a product that is lazy")


@entry(
    "Checkpoints",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl|"
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
    use="A checkpoint that torch.utils.checkpoint makes runs again at the levels that it ran at.",
    stand_in="A generator of this package's own over saved_tensors_hooks.",
    risk=Risk.HIGH,
)
def _checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    from tsfunc.bridge.grad import checkpoints

    made: list[Any] = []
    theirs = getattr(torch.utils.checkpoint, checkpoints._NAME)

    def generator(*args: Any, **kwargs: Any) -> Any:
        made.append(theirs(*args, **kwargs))
        return made[-1]

    setattr(torch.utils.checkpoint, checkpoints._NAME, generator)
    try:
        checkpoint(torch.sin, torch.ones(2), use_reentrant=False)
    finally:
        setattr(torch.utils.checkpoint, checkpoints._NAME, theirs)
    expect(len(made) == 1 and hasattr(made[0], "send"), "a generator for each checkpoint")


@entry(
    "Hooks of saved tensors",
    """torch._C._autograd._top_saved_tensors_default_hooks
    torch._C._autograd._pop_saved_tensors_default_hooks
    torch._C._autograd._push_saved_tensors_default_hooks""",
    use="The first transform of a process may run inside of hooks that its thread has entered.",
    stand_in="None: a checkpoint by torch around the first transform of a process would fail.",
    risk=Risk.LOW,
)
def _saved_tensor_hooks() -> None:
    autograd = torch._C._autograd
    packed: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda x: x):
        hooks = autograd._top_saved_tensors_default_hooks(True)
        expect(hooks is not None and len(hooks) == 2, "the innermost hooks")
        autograd._pop_saved_tensors_default_hooks()
        try:
            torch.ones(2, requires_grad=True).sin()
            expect(not packed, "no hooks after the removal")
        finally:
            autograd._push_saved_tensors_default_hooks(*hooks)
        torch.ones(2, requires_grad=True).sin()
    expect(len(packed) == 1, "the hooks again")


@entry(
    "torch.func's stack",
    """torch._C._functorch._add_batch_dim torch._C._functorch.get_unwrapped
    torch._C._functorch.is_batchedtensor torch._C._functorch.is_functorch_wrapped_tensor
    torch._C._functorch.maybe_current_level torch._C._functorch.maybe_get_bdim
    torch._C._functorch.maybe_get_level torch._C._functorch.peek_interpreter_stack
    torch._C._functorch.pop_dynamic_layer_stack
    torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack""",
    use="Calls go to torch.func's transform where one is the innermost, and its tensors are told.",
    stand_in="A refusal of torch.func's transforms inside of and around this package's.",
    risk=Risk.MEDIUM,
)
def _functorch_stack() -> None:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    F = torch._C._functorch
    seen: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        level = F.maybe_current_level()
        seen.append(F.is_batchedtensor(x) and F.is_functorch_wrapped_tensor(x))
        seen.append(F.maybe_get_level(x) == level and F.maybe_get_bdim(x) == 0)
        seen.append(F.get_unwrapped(x).shape == (2, 3))
        with temporarily_clear_interpreter_stack():
            seen.append(F.maybe_current_level() is None)
            seen.append(F.peek_interpreter_stack() is None)
        seen.append(F.peek_interpreter_stack() is not None)
        return x

    torch.func.vmap(f)(torch.ones(2, 3))
    expect(seen == [True] * 6, f"facts of a batched tensor, got {seen}")
    expect(F.maybe_current_level() is None, "None outside of torch.func's transforms")
    expect(callable(F.pop_dynamic_layer_stack), "what takes a transform off the stack")
