"""The table of docs/mesh.md: torch's distributed tools under transforms, compared with one process.

Each check is named after the tool and its use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import tsfunc
from tests.distributed.checks import Checks
from tsfunc.errors import MissingRuleError

CHECKS = Checks()
close = torch.testing.assert_close


class Case:
    """A network with its inputs, and the results of one process.

    Attributes:
        net: the network.
        x: the inputs of all ranks.
        own: the inputs of this rank.
        gradients: the gradients of the mean squared output by the parameters.
    """

    def __init__(self, rank: int, size: int) -> None:
        torch.manual_seed(0)
        self.mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.x = torch.randn(8, 4)
        self.own = self.x.chunk(size)[rank]
        self.gradients = self.gradients_of(copy.deepcopy(self.net), self.x)

    def gradients_of(self, net: nn.Module, x: Tensor, run: Any = None) -> dict[str, Tensor]:
        """Return the gradients that ``.backward()`` leaves in the parameters."""
        (run or net)(x).square().mean().backward()
        return {name.removeprefix("module."): whole(p.grad) for name, p in net.named_parameters()}

    def specialized_inside(self) -> nn.Sequential:
        """Return a copy of the network with a layer that runs as a program."""
        net = copy.deepcopy(self.net)
        net[0].forward = tsfunc.specialize(net[0].forward)
        return net

    def ddp(self) -> Any:
        return DistributedDataParallel(copy.deepcopy(self.net))

    def sharded(self) -> Any:
        return fully_shard(copy.deepcopy(self.net), mesh=self.mesh)

    def parallel(self) -> nn.Module:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(copy.deepcopy(self.net), self.mesh, plan)


def squares(net: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the squared output of a network, as a function of its inputs."""

    def total(x: Tensor) -> Tensor:
        return net(x).square().sum()

    return total


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check(name: str) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    def register(function: Callable[[Case], None]) -> Callable[[Case], None]:
        CHECKS[name] = lambda rank, size: function(Case(rank, size))
        return function

    return register


@check("DDP: around a module whose forward is specialized")
def _(case: Case) -> None:
    net = case.specialized_inside()
    close(case.gradients_of(net, case.own, DistributedDataParallel(net)), case.gradients)


@check("DDP: specialize, vmap and jvp of the module")
def _(case: Case) -> None:
    net = case.ddp()
    close(case.gradients_of(net, case.own, tsfunc.specialize(net)), case.gradients)
    close(tsfunc.vmap(case.ddp())(case.x), case.net(case.x))
    close(tsfunc.jvp(case.ddp(), (case.x,), (case.x,)),
          torch.func.jvp(case.net, (case.x,), (case.x,)))  # fmt: skip


@check("DDP: grad is this rank's own gradient, and pmean is the step of DDP")
def _(case: Case) -> None:
    net = case.ddp()

    def loss(params: Any) -> Tensor:
        return tsfunc.functional_call(net, params, (case.own,)).square().mean()

    own = tsfunc.grad(loss)(dict(net.named_parameters()))
    local = case.gradients_of(copy.deepcopy(case.net), case.own)
    close({name.removeprefix("module."): g for name, g in own.items()}, local)
    with tsfunc.mesh_axes(case.mesh):
        close(list(tsfunc.pmean(own, "i").values()), list(case.gradients.values()))


@check("fully_shard: around a module whose forward is specialized")
def _(case: Case) -> None:
    net: Any = case.specialized_inside()
    fully_shard(net[0], mesh=case.mesh)
    fully_shard(net, mesh=case.mesh)
    close(case.gradients_of(net, case.own), case.gradients)


@check("fully_shard: vmap, and grad and jvp by inputs")
def _(case: Case) -> None:
    close(tsfunc.vmap(case.sharded())(case.x), case.net(case.x))
    close(tsfunc.grad(squares(case.sharded()))(case.x), torch.func.grad(squares(case.net))(case.x))
    close(tsfunc.jvp(case.sharded(), (case.x,), (case.x,)),
          torch.func.jvp(case.net, (case.x,), (case.x,)))  # fmt: skip


@check("fully_shard: specialize of the module is refused")
def _(case: Case) -> None:
    with pytest.raises(RuntimeError, match="untyped_storage"):
        tsfunc.specialize(case.sharded())(case.x)


@check("parallelize_module: vmap, and grad by inputs and parameters")
def _(case: Case) -> None:
    close(tsfunc.vmap(case.parallel())(case.x) * 1, case.net(case.x))
    close(case.gradients_of(case.parallel(), case.x), case.gradients)
    net = case.parallel()
    loss = lambda p: tsfunc.functional_call(net, p, (case.x,)).square().mean()  # noqa: E731
    found = tsfunc.grad(loss)(dict(net.named_parameters()))
    close({name: whole(g) for name, g in found.items()}, case.gradients)
    close(tsfunc.grad(squares(case.parallel()))(case.x), torch.func.grad(squares(case.net))(case.x))


@check("parallelize_module: specialize and jvp are refused")
def _(case: Case) -> None:
    with pytest.raises(AttributeError, match="placements"):
        tsfunc.specialize(case.parallel())(case.x)
    with pytest.raises(MissingRuleError, match="between plain tensors and DTensors"):
        tsfunc.jvp(case.parallel(), (case.x,), (case.x,))


test_on_two_ranks = CHECKS.tests()


def test_a_check_that_would_not_run_is_refused() -> None:
    checks = Checks()
    checks.tests()
    with pytest.raises(AssertionError, match="later is added after the tests were made"):
        checks["later"] = lambda rank, size: None
