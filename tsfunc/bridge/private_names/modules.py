"""Private names of modules and optimizers."""

from __future__ import annotations

import operator
from typing import Any

import torch

from tsfunc.bridge.private_names.entries import Risk, entry, expect


@entry(
    "Hooks of all modules",
    """_global_backward_hooks _global_backward_pre_hooks _global_forward_hooks
    _global_forward_pre_hooks _has_any_global_hook""",
    below="torch.nn.modules.module",
    use="A program belongs to the hooks that run in every module.",
    stand_in="Wrappers around the public functions that register such hooks.",
    risk=Risk.LOW,
)
def _module_hooks() -> None:
    from torch.nn.modules import module

    before = len(module._global_forward_hooks)
    handle = module.register_module_forward_hook(lambda *_: None)
    try:
        expect(len(module._global_forward_hooks) == before + 1, "a hook in the table")
        expect(module._has_any_global_hook(), "True with a hook")
    finally:
        handle.remove()


@entry(
    "Buffers of modules",
    "Module._buffers Module._parameters Module._non_persistent_buffers_set",
    use="A batched tensor that a function assigns to a buffer of a module from outside is taken "
    "out of it; export registers each buffer as the module has it, in state_dict() or not.",
    stand_in="get_buffer and register_buffer; the names that state_dict() lacks.",
    risk=Risk.LOW,
)
def _buffers() -> None:
    module, x = torch.nn.Identity(), torch.ones(2)
    module.register_buffer("kept", x)
    module.register_buffer("left_out", x, persistent=False)
    expect(module._buffers["kept"] is x, "the table of buffers")
    expect(module._parameters == {}, "the table of parameters")
    expect(module._non_persistent_buffers_set == {"left_out"}, "those that are not saved")


@entry(
    "The handler of torch's functions in Python",
    """torch.nn.functional.handle_torch_function torch.functional.handle_torch_function
    torch._tensor.handle_torch_function""",
    use="The weights of F.l1_loss, which torch leaves out where a tensor has a class of its own; "
    "call plans of functions in Python.",
    stand_in="None: the loss would be computed without its weights, and calls take longer.",
    risk=Risk.LOW,
)
def _functional_handler() -> None:
    class Noting(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return kwargs

    x = torch.ones(2)
    loss: Any = torch.nn.functional.l1_loss
    given = loss(x.as_subclass(Noting), x, weight=x)
    expect(given["weight"] is x, "the weights of F.l1_loss")
    for module in (torch.nn.functional, torch.functional, torch._tensor):
        expect(hasattr(module, "handle_torch_function"), f"the handler of {module.__name__}")


@entry(
    "Replaced tensors of modules",
    "torch.nn.utils.stateless._reparametrize_module",
    use="A checkpoint in functional_call(module, ...) runs again with the tensors of the call, "
    "which has ended.",
    stand_in="A refusal of checkpoints in functional_call.",
    risk=Risk.MEDIUM,
)
def _replaced_tensors() -> None:
    from torch.nn.utils import stateless

    layer = torch.nn.Linear(2, 1)
    made: list[Any] = []
    theirs: Any = stateless._reparametrize_module

    def replace(*args: Any, **options: Any) -> Any:
        made.append(args[:2])
        return theirs(*args, **options)

    state = {"bias": torch.ones(1)}
    stateless._reparametrize_module = replace
    try:
        torch.func.functional_call(layer, state, (torch.ones(2),))
    finally:
        stateless._reparametrize_module = theirs
    expect(made[0][0] is layer and set(made[0][1]) == {"bias"}, "a context for each call")


@entry(
    "Cached weights of parametrized modules",
    "torch.nn.utils.parametrize._cache",
    use="A trace and functional_call compute the weights of parametrized modules from the tensors "
    "that they have, also inside of parametrize.cached().",
    stand_in="A refusal of parametrize.cached() around traces and functional_call.",
    risk=Risk.LOW,
)
def _cached_weights() -> None:
    from torch.nn.utils import parametrize

    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 1))
    with parametrize.cached():
        layer(torch.ones(2))
        expect(len(parametrize._cache) == 1, "a weight in the cache")
    expect(not parametrize._cache, "an empty cache")


@entry(
    "Weights of recurrent modules",
    "RNNBase._flat_weights RNNBase._flat_weights_names torch.nn.RNNBase._update_flat_weights",
    use="A trace of functional_call(module, ...) gives a recurrent module a list of its "
    "parameters.",
    stand_in="A refusal of such calls in programs: the module assigns the list.",
    risk=Risk.LOW,
)
def _recurrent_weights() -> None:
    layer: Any = torch.nn.GRU(2, 2)
    own = [getattr(layer, name) for name in layer._flat_weights_names]
    expect(all(map(operator.is_, own, layer._flat_weights)), "the weights of a GRU in order")
    layer._parameters["weight_ih_l0"] = torch.zeros(6, 2)
    layer._update_flat_weights()
    expect(layer._flat_weights[0] is layer.weight_ih_l0, "a list made anew")


@entry(
    "Steps of optimizers",
    """torch.amp.grad_scaler.GradScaler._maybe_opt_step Optimizer._init_group
    torch.optim.optimizer._get_value""",
    use="functional_optimizer(...).init() makes the state that the first step would make; a trace "
    "undoes a step that a GradScaler skips, and counts steps in double precision.",
    stand_in="An empty state: a scan then begins after a first step outside of it. A refusal of "
    "GradScaler.step in traces. Counts of steps in float32.",
    risk=Risk.MEDIUM,
)
def _optimizer_state() -> None:
    from torch.optim import optimizer as base

    from tsfunc.bridge.tracers.optimizer_state import make_state

    param = torch.ones(2, requires_grad=True)
    param.grad = torch.ones(2)
    adam = torch.optim.Adam([param])
    make_state(adam)
    expect({*adam.state[param]} == {"step", "exp_avg", "exp_avg_sq"}, "the state of Adam")
    expect(bool((param == 1).all()), "no step")
    scaler: Any = torch.amp.GradScaler("cpu")
    scaler._maybe_opt_step(adam, {"found_inf_per_device": {"cpu": torch.tensor(1.0)}})
    expect(bool((param == 1).all()), "no step with an infinite gradient")
    expect(base._get_value(torch.tensor(2.0)) == 2, "a number of the state")
