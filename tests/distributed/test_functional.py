"""torch's functional collectives, its in-place collectives, and DTensors under transforms.

References are the loop over examples, finite sums over ranks, torch.func, and plain tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tsfunc
from tests.distributed.checks import Check, Checks
from tsfunc.errors import MissingRuleError

CHECKS = Checks()
close = torch.testing.assert_close


def world() -> Any:
    return dist.group.WORLD


def waited(x: Tensor) -> Tensor:
    return x * 1  # a collective's result waits at its first use


FUNCTIONAL: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": lambda x: fc.all_reduce(x, "sum", world()),
    "all_reduce of the mean": lambda x: fc.all_reduce(x, "avg", world()),
    "all_gather": lambda x: fc.all_gather_tensor(x, 0, world()),
    "all_gather along dim 1": lambda x: fc.all_gather_tensor(x, 1, world()),
    "reduce_scatter": lambda x: fc.reduce_scatter_tensor(x, "sum", 0, world()),
    "reduce_scatter along dim 1": lambda x: fc.reduce_scatter_tensor(x, "sum", 1, world()),
    "all_to_all": lambda x: fc.all_to_all_single(x, None, None, world()),
    "broadcast": lambda x: fc.broadcast(x, 1, world()),
    "all_reduce_coalesced": lambda x: fc.all_reduce_coalesced([x, 2 * x], "sum", world())[1],
    "all_gather_coalesced": lambda x: (
        fc.all_gather_into_tensor_coalesced([x, 2 * x], world())[1]
    ),
    "reduce_scatter_coalesced": lambda x: (
        fc.reduce_scatter_tensor_coalesced([2 * x, x], "sum", [0, 0], world())[0]
    ),
}  # fmt: skip
# gloo has no mean, and not every torch has derivatives of broadcast and the coalesced forms.
BY_REVERSE_MODE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def example(rank: int, dim: int) -> Tensor:
    """Return three examples of shape (4, 2), different ones on each rank, along ``dim``."""
    x = torch.arange(24.0).reshape(3, 4, 2).sin() + rank
    return x.movedim(0, dim)


def register(name: str, f: Callable[[Tensor], Tensor]) -> None:
    def maps_as_the_loop(rank: int, size: int) -> None:
        for dim in (0, 1, 2):
            x = example(rank, dim)
            loop = torch.stack([waited(f(one.contiguous())) for one in x.unbind(dim)])
            close(tsfunc.vmap(f, dim)(x), loop)
        close(waited(tsfunc.specialize(tsfunc.vmap(f, 2))(x)), loop)
        close(tsfunc.vmap(tsfunc.specialize(f), 2)(x), loop)

    def pushes_tangents(rank: int, size: int) -> None:
        x = example(rank, 0)
        t = x.cos()
        nonlinear = lambda x: f(x.sin())  # noqa: E731
        one, direction = x[0], t[0]
        want = waited(f(one.cos() * direction))
        close(tsfunc.jvp(nonlinear, (one,), (direction,))[1], want)
        program = tsfunc.specialize(lambda x, t: tsfunc.jvp(nonlinear, (x,), (t,))[1])
        close(program(one, direction), want)
        loop = torch.stack([waited(f(a.cos() * b)) for a, b in zip(x, t, strict=True)])
        close(tsfunc.vmap(lambda x, t: tsfunc.jvp(nonlinear, (x,), (t,))[1])(x, t), loop)
        close(tsfunc.jvp(tsfunc.vmap(nonlinear), (x,), (t,))[1], loop)

    # gloo lacks this reduction, so the call itself raises.
    if name != "all_reduce of the mean":
        CHECKS[f"{name}: vmap"] = maps_as_the_loop
        CHECKS[f"{name}: jvp"] = pushes_tangents

    def agrees_with_reverse_mode(rank: int, size: int) -> None:
        x = example(rank, 0)[0]
        t = torch.ones_like(x) / (rank + 1)
        g = lambda x: f(x.sin()).exp().sum()  # noqa: E731
        # The derivatives of all ranks' outputs together are those of all ranks' inputs.
        tangent = tsfunc.jvp(g, (x,), (t,))[1]
        slope = (tsfunc.grad(g)(x) * t).sum()
        dist.all_reduce(tangent)
        dist.all_reduce(slope)
        close(tangent, slope)

    if name in BY_REVERSE_MODE:
        CHECKS[f"{name}: both modes agree"] = agrees_with_reverse_mode


for _name, _f in FUNCTIONAL.items():
    register(_name, _f)


def written(call: Callable[[Tensor, int], Tensor]) -> Check:
    """The in-place collective agrees with its result outside of transforms."""

    def run(rank: int, size: int) -> None:
        def f(x: Tensor) -> Tensor:
            return call(x, size)

        x = example(rank, 0).flatten(1)
        close(tsfunc.specialize(f)(x[1]), f(x[1]))
        loop = torch.stack([f(one) for one in x])
        close(tsfunc.vmap(f)(x), loop)
        close(tsfunc.vmap(f, 1)(x.T), loop)
        close(tsfunc.specialize(tsfunc.vmap(f, 1))(x.T), loop)

    return run


def sum_in_place(x: Tensor, size: int) -> Tensor:
    x = x * 1
    dist.all_reduce(x)
    return x


def largest_in_place(x: Tensor, size: int) -> Tensor:
    x = x * 1
    work = dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    work.wait()
    return x


def gather_into(x: Tensor, size: int) -> Tensor:
    out = torch.empty(8 * size)
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def gather_list(x: Tensor, size: int) -> Tensor:
    out = [torch.empty(8) for _ in range(size)]
    dist.all_gather(out, x.contiguous())
    return torch.stack(out)


def scatter_into(x: Tensor, size: int) -> Tensor:
    out = torch.empty(8 // size)
    dist.reduce_scatter_tensor(out, x.contiguous())
    return out


def broadcast_in_place(x: Tensor, size: int) -> Tensor:
    x = x * 1
    dist.broadcast(x, 0)
    return x


def exchange_into(x: Tensor, size: int) -> Tensor:
    out = torch.empty(8)
    dist.all_to_all_single(out, x.contiguous())
    return out


for _call in (
    sum_in_place, largest_in_place, gather_into, gather_list, scatter_into, broadcast_in_place,
    exchange_into,
):  # fmt: skip
    CHECKS[f"{_call.__name__}"] = written(_call)


@CHECKS.check
def writes_have_no_derivative(rank: int, size: int) -> None:
    x = example(rank, 0)[0]

    def f(x: Tensor) -> Tensor:
        return sum_in_place(x, size).sum()

    with pytest.raises(MissingRuleError, match="has no derivative"):
        tsfunc.specialize(tsfunc.grad(f))(x)
    with pytest.raises(MissingRuleError, match="has no derivative"):
        tsfunc.vmap(tsfunc.grad(f))(x)
    with pytest.raises(MissingRuleError, match="has no derivative"):
        tsfunc.jvp(f, (x,), (x,))


@CHECKS.check
def collectives_without_a_functional_form_are_refused(rank: int, size: int) -> None:
    def reduced(x: Tensor) -> Tensor:
        x = x * 1
        dist.reduce(x, 0)
        return x

    with pytest.raises(MissingRuleError, match="no functional form"):
        tsfunc.specialize(reduced)(torch.ones(3))


@CHECKS.check
def a_sharded_module_is_a_function_of_its_parameters(rank: int, size: int) -> None:
    """Derivatives are those of one process; ranks with parts of a batch average their gradients."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size,))
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 2)).double()
    net[2].weight = nn.Parameter(torch.randn(2, 5, dtype=torch.float64))
    sharded = copy.deepcopy(net)
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    x = torch.randn(8, 4, dtype=torch.float64)
    own = x.chunk(size)[rank]
    sharded.eval(), net.eval()

    def loss(module: nn.Module, x: Tensor) -> Callable[[Any], Tensor]:
        return lambda p: tsfunc.functional_call(module, p, (x,)).square().mean()

    state: dict[str, Any] = dict(sharded.named_parameters())
    plain = dict(net.named_parameters())
    expected = torch.func.grad(loss(net, x))(plain)
    for part in (x, own):
        gradients = tsfunc.grad(loss(sharded, part))(state)
        assert {name: g.placements for name, g in gradients.items()} == {
            name: p.placements for name, p in state.items()
        }
        close({name: whole(g) for name, g in gradients.items()}, expected)
    first = {"0.weight": state["0.weight"]}  # the module's own parameters for the rest
    close(whole(tsfunc.grad(loss(sharded, own))(first)["0.weight"]), expected["0.weight"])
    doubled = {name: 2 * p for name, p in state.items()}
    with_plain = {name: 2 * p for name, p in plain.items()}
    close(tsfunc.jvp(loss(sharded, x), (doubled,), (state,)),
                 torch.func.jvp(loss(net, x), (with_plain,), (plain,)))  # fmt: skip
    sharded.train(), net.train()
    buffers = dict(sharded.named_buffers())
    tsfunc.functional_call(sharded, buffers, (x,))
    net(x)
    close(buffers, dict(net.named_buffers()))
    sharded(own).square().mean().backward()  # the hooks are restored
    assert all(p.grad is not None for p in sharded.parameters())


@CHECKS.check
def a_sharded_module_with_a_policy_is_not(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    pair: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    fully_shard(pair, mesh=mesh)
    single = nn.Linear(4, 2)
    fully_shard(single, mesh=mesh, mp_policy=policy)
    for module in (single, nn.Sequential(*pair)):
        with pytest.raises(RuntimeError, match="does more than gather"):
            tsfunc.functional_call(module, dict(module.named_parameters()), (torch.ones(3, 4),))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": lambda w, x: torch.tanh(x @ w).sum(),
    "linear": lambda w, x: (x @ w).sum(),
    "square": lambda w, x: (x @ w).square().mean(),
}


def whole(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(whole, value))
    assert isinstance(value, DTensor)
    return value.full_tensor()


def of_dtensors(f: Callable[[Tensor, Tensor], Tensor]) -> Check:
    """Derivatives of DTensors are those of the whole tensors."""

    def run(rank: int, size: int) -> None:
        torch.manual_seed(0)
        x, w = torch.randn(8, 4), torch.randn(4, 6)
        mesh = init_device_mesh("cpu", (size,))
        dx = distribute_tensor(x, mesh, [Shard(0)])
        want = torch.func.grad(f)(w, x)
        second = torch.func.jvp(lambda w: torch.func.grad(f)(w, x), (w,), (w,))[1]
        for placement in (Replicate(), Shard(0), Shard(1)):
            dw = distribute_tensor(w, mesh, [placement])
            close(whole(tsfunc.grad(f)(dw, dx)), want)
            close(whole(tsfunc.specialize(tsfunc.grad(f))(dw, dx)), want)
            close(whole(tsfunc.specialize(lambda w: tsfunc.grad(f)(w, dx))(dw)), want)
            close(whole(tsfunc.value_and_grad(f)(dw, dx)), (f(w, x), want))
            out, pull = tsfunc.vjp(lambda w: f(w, dx), dw)
            close(whole(pull(torch.tensor(2.0))), (2 * want,))
            close(whole(pull(torch.ones_like(out))), (want,))
            pushed = tsfunc.jvp(lambda w: f(w, dx), (dw,), (dw,))
            close(whole(pushed), (f(w, x), (want * w).sum()))
            close(whole(tsfunc.hvp(lambda w: f(w, dx), (dw,), (dw,))), second)

    return run


def jacobians_of_dtensors(rank: int, size: int) -> None:
    """Jacobians, and the gradient of each example, are those of the whole tensors."""
    torch.manual_seed(0)
    x, w = torch.randn(8, 4), torch.randn(4, 2)
    mesh = init_device_mesh("cpu", (size,))
    dx = distribute_tensor(x, mesh, [Shard(0)])

    def outputs(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ w).sum(0)

    def loss(row: Tensor) -> Tensor:
        return torch.tanh(row * row).sum()

    want = torch.func.jacrev(outputs)(w, x)
    for placement in (Replicate(), Shard(0), Shard(1)):
        dw = distribute_tensor(w, mesh, [placement])
        close(whole(tsfunc.jacrev(outputs)(dw, dx)), want)
        close(whole(tsfunc.jacrev(outputs, chunk_size=2)(dw, dx)), want)
        placed = distribute_tensor(x, mesh, [placement])
        close(
            whole(tsfunc.vmap(tsfunc.grad(loss))(placed)), torch.func.vmap(torch.func.grad(loss))(x)
        )


DISTRIBUTED: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "jvp": lambda f, x: tsfunc.jvp(f, (x,), (x,))[1],
    "jvp of a result": lambda f, x: tsfunc.jvp(lambda y: f(y * 2), (x,), (x,))[1],
    "jvp of jvp": lambda f, x: tsfunc.jvp(lambda y: tsfunc.jvp(f, (y,), (y,))[1], (x,), (x,)),
    "grad": lambda f, x: tsfunc.grad(lambda y: f(y).sum())(x),
    "vjp": lambda f, x: tsfunc.vjp(f, x)[1](x),
    "jacrev": lambda f, x: tsfunc.jacrev(f)(x),
    "jacfwd": lambda f, x: tsfunc.jacfwd(f)(x),
    "linearize": lambda f, x: tsfunc.linearize(f, x)[1](x),
    "hvp": lambda f, x: tsfunc.hvp(lambda y: f(y).sum(), (x,), (x,)),
    "vmap of grad": lambda f, x: tsfunc.vmap(tsfunc.grad(lambda y: f(y).sum()))(x[None]),
    "specialize of jvp": lambda f, x: tsfunc.specialize(lambda y: tsfunc.jvp(f, (y,), (y,)))(x),
}


def distribution_inside(rank: int, size: int) -> None:
    """Derivatives through ``distribute_tensor``, which detaches, are refused and never zero."""
    mesh = init_device_mesh("cpu", (size,))
    x = torch.arange(4.0)
    for placement in (Shard(0), Replicate()):
        for source in (0, None):

            def distributed(x: Tensor, placement: Any = placement, source: Any = source) -> Tensor:
                placed = distribute_tensor(x, mesh, [placement], src_data_rank=source)
                return whole(placed * placed)

            def redistributed(x: Tensor, placement: Any = placement) -> Tensor:
                local = DTensor.from_local(x, mesh, [Replicate()])
                return whole(local.redistribute(mesh, [placement]) ** 2)

            for transform in DISTRIBUTED.values():
                with pytest.raises(MissingRuleError, match="DTensor"):
                    transform(distributed, x)
            # The remedy of the message, and tensors that are constant on purpose.
            close(tsfunc.grad(lambda x: redistributed(x).sum())(x), 2 * x)
            constant = tsfunc.jvp(lambda x, d=distributed: d(x.detach()) + x, (x,), (x,))
            close(constant, (x * x + x, x))
            close(tsfunc.grad(lambda x, d=distributed: (d(x.detach()) * x).sum())(x), x * x)


for _name, _loss in LOSSES.items():
    CHECKS[f"{_name} of DTensors"] = of_dtensors(_loss)
CHECKS["Jacobians of DTensors"] = jacobians_of_dtensors
CHECKS["distribute_tensor inside of a derivative"] = distribution_inside


test_on_two_ranks = CHECKS.tests()
