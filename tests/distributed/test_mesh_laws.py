"""The laws of mesh axes: shard_map over ranks is vmap over a dim, under every transform.

Each collective runs under each combination of transforms, outside and inside of the body, over
processes and over a VirtualMesh, and is compared with ``vmap`` over an unflattened tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tsfunc
from tests.distributed.checks import Check, Checks, failures, on_two_ranks
from tsfunc import P, VirtualMesh, shard_map
from tsfunc.bridge.mesh.levels import mesh_levels
from tsfunc.testing import check_shard_map

close = torch.testing.assert_close
CHECKS: dict[str, Check] = {}
LENGTH = 2  # of a rank's shard: a multiple of the number of ranks


def index(x: Tensor) -> Tensor:
    return x * (tsfunc.axis_index("i") + 1)


def ring(x: Tensor) -> Tensor:
    n = tsfunc.axis_size("i")

    def step(carry: tuple[Tensor, Tensor], _: Tensor) -> Any:
        total, block = carry
        block = tsfunc.ppermute(block, "i", [(k, (k + 1) % n) for k in range(n)])
        return (total + x * block.sin(), block), None

    return tsfunc.scan(step, (x, x), torch.zeros(n))[0][0]


def loop(x: Tensor) -> Tensor:
    return tsfunc.fori_loop(0, 3, lambda _, x: x + tsfunc.psum(x.sin(), "i"), x)


@tsfunc.custom_vjp
def scaled_psum(x: Tensor) -> Tensor:
    return tsfunc.psum(x.sin(), "i")


scaled_psum.defvjp(
    lambda x: (tsfunc.psum(x.sin(), "i"), x),
    lambda x, ct: (3 * tsfunc.psum(ct, "i") * x.cos(),),
)

COLLECTIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "psum": lambda x: x * tsfunc.psum(x.sin(), "i"),
    "pmean": lambda x: x * tsfunc.pmean(x.sin(), "i"),
    "pmax": lambda x: x * tsfunc.pmax(x.sin(), "i"),
    "pmin": lambda x: x * tsfunc.pmin(x.sin(), "i"),
    "all_gather": lambda x: x * tsfunc.all_gather(x.sin(), "i").pow(2).sum(0),
    "all_gather along dim 1": lambda x: x * tsfunc.all_gather(x.sin(), "i", axis=1).sum(1),
    "all_gather tiled": lambda x: x * tsfunc.all_gather(x.sin(), "i", tiled=True).square().sum(),
    "psum_scatter": lambda x: x * tsfunc.psum_scatter(x.sin(), "i", tiled=True).sum(),
    "psum_scatter of a dim": lambda x: (
        x * tsfunc.psum_scatter(x.sin().unflatten(0, (tsfunc.axis_size("i"), LENGTH)), "i").sum()
    ),
    "all_to_all": lambda x: x * tsfunc.all_to_all(x.sin(), "i", 0, 0, tiled=True),
    "all_to_all of a dim": lambda x: (
        tsfunc.all_to_all(x.sin().unflatten(0, (tsfunc.axis_size("i"), LENGTH)), "i", 0, 1)
        .flatten() * x
    ),
    "ppermute": lambda x: (
        x * tsfunc.ppermute(x.sin(), "i", [(k, k + 1) for k in range(tsfunc.axis_size("i") - 1)])
    ),
    "axis_index": index,
    "ring in scan": ring,
    "psum in fori_loop": loop,
    "psum in checkpoint": lambda x: tsfunc.checkpoint(lambda x: x * tsfunc.psum(x.sin(), "i"))(x),
    "psum in custom_vjp": lambda x: x * scaled_psum(x),
}  # fmt: skip
NO_TANGENT = {"psum in custom_vjp"}  # no forward-mode rule over a VirtualMesh

Body = Callable[[Tensor], Tensor]
Form = Callable[[Callable[[Body], Body], Body, Tensor], Any]


def scalar(f: Body) -> Body:
    return lambda x: f(x).square().sum()


def hessian_product(f: Body, x: Tensor) -> Any:
    return tsfunc.jvp(tsfunc.grad(scalar(f)), (x,), (x.cos(),))


def backward(f: Body, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    scalar(f)(leaf).backward()
    assert leaf.grad is not None
    return leaf.grad


# Uses of a body, given a function that makes a function of whole tensors of it.
FORMS: dict[str, Form] = {
    "value": lambda over, f, x: over(f)(x),
    "grad": lambda over, f, x: tsfunc.grad(scalar(over(f)))(x),
    "jvp": lambda over, f, x: tsfunc.jvp(over(f), (x,), (x.cos(),)),
    "hvp": lambda over, f, x: hessian_product(over(f), x),
    "grad of grad": lambda over, f, x: tsfunc.grad(
        lambda x: tsfunc.grad(scalar(over(f)))(x).cos().sum()
    )(x),
    "jacfwd": lambda over, f, x: tsfunc.jacfwd(over(f))(x),
    "jacrev": lambda over, f, x: tsfunc.jacrev(over(f))(x),
    "vmap": lambda over, f, x: tsfunc.vmap(over(f), 1, 1)(torch.stack([x, 2 * x, -x], 1)),
    "specialize": lambda over, f, x: tsfunc.specialize(over(f))(x),
    "specialize of grad": lambda over, f, x: tsfunc.specialize(tsfunc.grad(scalar(over(f))))(x),
    "grad of specialize": lambda over, f, x: tsfunc.grad(scalar(tsfunc.specialize(over(f))))(x),
    "backward": lambda over, f, x: backward(over(f), x),
    "checkpoint": lambda over, f, x: tsfunc.grad(scalar(tsfunc.checkpoint(over(f))))(x),
    "grad inside": lambda over, f, x: over(tsfunc.grad(scalar(f)))(x),
    "jvp inside": lambda over, f, x: over(lambda x: tsfunc.jvp(f, (x,), (x.cos(),))[1])(x),
    "vmap inside": lambda over, f, x: over(
        lambda x: tsfunc.vmap(f)(torch.stack([x, x.cos()])).sum(0)
    )(x),
    "vmap of grad inside": lambda over, f, x: over(
        lambda x: tsfunc.vmap(tsfunc.grad(scalar(f)))(torch.stack([x, x.cos()])).sum(0)
    )(x),
    "specialize inside": lambda over, f, x: over(tsfunc.specialize(f))(x),
    "grad inside and outside": lambda over, f, x: tsfunc.grad(scalar(over(tsfunc.grad(scalar(f)))))(
        x
    ),
}
FORWARD = {"jvp", "hvp", "jacfwd", "jvp inside"}


def by_vmap(size: int) -> Callable[[Body], Body]:
    def over(f: Body) -> Body:
        mapped = tsfunc.vmap(f, axis_name="i")
        return lambda x: mapped(x.unflatten(0, (size, -1))).flatten(0, 1)

    return over


def law(collective: str, form: str) -> Check:
    f, use = COLLECTIVES[collective], FORMS[form]

    def run(rank: int, size: int) -> None:
        x = torch.linspace(-1.0, 2.0, size * size * LENGTH, dtype=torch.float64)
        want = use(by_vmap(size), f, x)
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
        close(use(lambda f: shard_map(f, mesh, P("i"), P("i")), f, x), want)
        close(use(lambda f: shard_map(f, VirtualMesh(i=size), P("i"), P("i")), f, x), want)

    return run


for _collective in COLLECTIVES:
    for _form in FORMS:
        # vmap can't map the user's rule, which exchanges values, over the cotangents of jacrev.
        refused = {*FORWARD, "jacrev"} if _collective in NO_TANGENT else set()
        if _form not in refused:
            CHECKS[f"{_collective}: {_form}"] = law(_collective, _form)

# Further laws, outside of the matrix.
MORE = Checks()


@MORE.check
def sums_of_integers_and_transfers_are_equal_bit_for_bit(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    around = [(k, (k + 1) % size) for k in range(size)]
    numbers, reals = torch.arange(6 * size), torch.randn(6 * size, dtype=torch.float64)
    reals = reals if rank == 0 else torch.empty_like(reals)
    torch.distributed.broadcast(reals, 0)
    cases: list[tuple[Any, Tensor]] = [
        (lambda x: tsfunc.psum(x, "i"), numbers),
        (lambda x: tsfunc.ppermute(x, "i", around), reals),
        (
            lambda x: tsfunc.all_to_all(x.view(size, -1), "i", 0, 0).flatten(),
            torch.cat([reals] * size),
        ),
        (lambda x: tsfunc.all_gather(x, "i", tiled=True), reals),
    ]
    for f, x in cases:
        got = shard_map(f, mesh, P("i"), P("i"))(x)
        assert torch.equal(got, shard_map(f, VirtualMesh(i=size), P("i"), P("i"))(x))


@MORE.check
def axes_of_size_one_are_the_function(rank: int, size: int) -> None:
    mesh = {"i": torch.distributed.new_group([rank], use_local_synchronization=True)}
    x = torch.linspace(-1.0, 2.0, 4, dtype=torch.float64)
    f: Any = lambda x: x * tsfunc.psum(x.sin(), "i") + tsfunc.all_gather(x, "i")[0]  # noqa: E731
    own: Any = lambda x: x * x.sin() + x  # noqa: E731
    for spec in (P("i"), P()):
        mapped = shard_map(f, mesh, spec, spec)
        close(mapped(x), own(x))
        close(tsfunc.hessian(scalar(mapped))(x), tsfunc.hessian(scalar(own))(x))


@MORE.check
def gradients_of_gathered_parameters_are_scattered_sums(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    w = torch.linspace(-1.0, 2.0, 2 * size, dtype=torch.float64)
    x = torch.arange(3.0 * size, dtype=torch.float64).view(size, 3).cos()

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (w.sin().sum() * x).square().sum()

    def step(shard: Tensor, x: Tensor) -> Tensor:
        whole = lambda shard: loss(tsfunc.all_gather(shard, "i", tiled=True), x)  # noqa: E731
        out: Tensor = tsfunc.grad(whole)(shard)
        own = tsfunc.grad(loss)(tsfunc.all_gather(shard, "i", tiled=True), x)
        close(out, tsfunc.psum_scatter(own, "i", tiled=True))
        return out

    got = shard_map(step, mesh, (P("i"), P("i")), P("i"))(w, x)
    close(got, tsfunc.grad(lambda w: sum(loss(w, one) for one in x))(w))


@MORE.check
def axes_of_a_mesh_and_of_a_vmap_in_one_sum(rank: int, size: int) -> None:
    x = torch.linspace(-1.0, 2.0, 6 * size, dtype=torch.float64).view(2 * size, 3)

    def body(x: Tensor) -> Tensor:
        one = lambda v: v * tsfunc.psum(v.sin(), ("i", "b"))  # noqa: E731
        return tsfunc.vmap(one, axis_name="b")(x)

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    want = x * x.sin().sum(0)
    close(shard_map(body, mesh, P("i"), P("i"))(x), want)
    close(shard_map(body, VirtualMesh(i=size), P("i"), P("i"))(x), want)


@MORE.check
def the_law_for_users_finds_a_difference(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    x = torch.linspace(-1.0, 2.0, 2 * size)
    f: Any = lambda x: x * tsfunc.psum(x.sin(), "i")  # noqa: E731
    check_shard_map(f, mesh, P("i"), P("i"), x)

    def sees_its_process(x: Tensor) -> Any:
        return f(x) * (1.0 + bool(mesh_levels()))

    with pytest.raises(AssertionError, match="over processes and over a VirtualMesh differ"):
        check_shard_map(sees_its_process, mesh, P("i"), P("i"), x)


# Some checks of each kind are quick tests; the whole matrix is slow.
QUICK = {name: check for i, (name, check) in enumerate(CHECKS.items()) if i % 7 == 0} | MORE


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_laws(ranks: int) -> None:
    found = failures(CHECKS | MORE, ranks, timeout=900.0)
    bad = {name: texts for name, texts in found.items() if texts}
    assert not bad, "\n".join(f"{name}: {texts[0]}" for name, texts in bad.items())


test_law_on_two_ranks = on_two_ranks(QUICK)
