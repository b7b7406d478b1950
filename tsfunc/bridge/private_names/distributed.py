"""Private names of torch.distributed."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tsfunc.bridge.private_names.entries import Risk, entry, expect, sharding_state


@entry(
    "Classes of process groups",
    """torch._C._distributed_c10d.FakeWork torch._C._distributed_c10d.ProcessGroup
    torch._C._distributed_c10d.ReduceOp torch._C._distributed_c10d.Work
    ProcessGroup._allgather_base ProcessGroup._device_types ProcessGroup._reduce_scatter_base""",
    use="Collectives that write into their arguments are functional ones in a trace.",
    stand_in="torch.distributed.ProcessGroup, ReduceOp and Work; a finished work of our own.",
    risk=Risk.MEDIUM,
)
def _process_groups() -> None:
    distributed = torch._C._distributed_c10d
    expect(distributed.ProcessGroup is torch.distributed.ProcessGroup, "the public class")
    expect(distributed.ReduceOp is torch.distributed.ReduceOp, "the public class")
    expect(hasattr(distributed.Work.boxed(distributed.FakeWork()), "wait"), "a work that is done")


@entry(
    "The stores of process groups",
    "torch.distributed.distributed_c10d._world",
    use="A rank that raises leaves a report for ranks that wait for it.",
    stand_in="A store of this package's own for each mesh; or waits until the group's timeout.",
    risk=Risk.MEDIUM,
)
def _stores() -> None:
    expect(isinstance(torch.distributed.distributed_c10d._world.pg_map, dict), "a dict of groups")


@entry(
    "Modules with sharded parameters",
    """FSDPModule._get_fsdp_state FSDPState._mp_policy Module._forward_hooks
    Module._forward_pre_hooks""",
    use="A functional call gathers the parameters of the call, in place of the module's hooks.",
    stand_in="A refusal of modules that fully_shard was applied to.",
    risk=Risk.MEDIUM,
)
def _sharded_modules() -> None:
    fsdp = importlib.import_module("torch.distributed.fsdp")
    state = sharding_state()
    expect(state._mp_policy == fsdp.MixedPrecisionPolicy(), "the policy")
    for hooks in (state._modules[0]._forward_pre_hooks, state._modules[0]._forward_hooks):
        owners = [getattr(hook, "__self__", None) for hook in hooks.values()]
        expect(owners == [state], "one hook of the state")


@entry(
    "Checks of distribute_tensor",
    "torch.distributed.tensor._api.assert_no_mixed_partial_types",
    use="distribute_tensor, which detaches its argument, refuses the inputs of derivatives.",
    stand_in="A function of this package in the place of distribute_tensor.",
    risk=Risk.MEDIUM,
)
def _distribution() -> None:
    module: Any = importlib.import_module("torch.distributed.tensor._api")
    code = module.distribute_tensor.__code__
    expect("assert_no_mixed_partial_types" in code.co_names, "a check of the placements")
    expect(code.co_varnames[0] == "tensor", "an argument of the name tensor")


@entry(
    "The simulated process group",
    "torch.testing._internal.distributed.fake_pg",
    use="One process acts as one rank of a large mesh.",
    stand_in="A gloo group for each rank; or no simulation.",
    risk=Risk.MEDIUM,
)
def _simulated_group() -> None:
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    expect("fake" in torch.distributed.Backend.backend_list, "a backend named fake")
