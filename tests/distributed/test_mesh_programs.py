"""Programs over mesh axes: the same on every rank, with axes and not groups, saved and loaded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tsfunc
from tests.distributed.checks import Check, failures
from tsfunc import P, shard_map
from tsfunc.errors import MeshError
from tsfunc.testing import spawn

close = torch.testing.assert_close
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def body(w: Tensor, x: Tensor) -> Tensor:
    """A loss that reads its rank, permutes and sums."""
    n = tsfunc.axis_size("i")
    own = (x @ w).sin().sum() * (tsfunc.axis_index("i") + 1)
    moved = tsfunc.ppermute(own, "i", [(k, (k + 1) % n) for k in range(n)])
    out: Tensor = tsfunc.psum(own * moved, "i")
    return out


def arguments() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1.0, 1.0, 3), torch.arange(24.0).view(8, 3).cos()


def loss_over(size: int) -> Callable[..., Tensor]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    return shard_map(body, mesh, (P(), P("i")), P())


def text_of(rank: int, size: int, others: int) -> str:
    for _ in range(others * rank):  # groups get other names on ranks that make more of them
        dist.new_group([rank], use_local_synchronization=True)
    gradient = tsfunc.specialize(tsfunc.grad(loss_over(size)))
    gradient(*arguments())
    return str(gradient.program)


@check
def a_program_is_saved_and_loaded(rank: int, size: int) -> None:
    gradient = tsfunc.specialize(tsfunc.grad(loss_over(size)))
    want = gradient(*arguments())
    with tempfile.TemporaryDirectory() as folder:
        gradient.save(Path(folder) / "program.ts")
        loaded = tsfunc.load(Path(folder) / "program.ts")
    close(loaded(*arguments()), want)
    assert "'i=2'" in str(gradient.program)


@check
def a_backend_compiles_a_program(rank: int, size: int) -> None:
    loss = loss_over(size)
    compiled = tsfunc.specialize(tsfunc.grad(loss), backend="aot_eager")
    close(compiled(*arguments()), tsfunc.grad(loss)(*arguments()))


@check
def dtensors_and_shards(rank: int, size: int) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    w, x = arguments()
    dw, dx = distribute_tensor(w, mesh, [Replicate()]), distribute_tensor(x, mesh, [Shard(0)])
    double = lambda w, x: (2 * x @ w, x)  # noqa: E731
    specs = (P(), P("i")), (P("i"), P("i"))
    out, same = shard_map(double, mesh, *specs, outputs="dtensor")(dw, dx)
    assert isinstance(out, DTensor) and list(out.placements) == [Shard(0)]
    close(out.full_tensor(), 2 * x @ w)
    close(same.full_tensor(), x)
    own = x.chunk(size)[rank]
    local = shard_map(double, mesh, *specs, inputs="local", outputs="local")(w, own)
    close(local, (2 * own @ w, own))
    with pytest.raises(MeshError, match=r"expected a DTensor on .* placed as"):
        shard_map(double, mesh, *specs)(dw, distribute_tensor(x, mesh, [Replicate()]))
    with pytest.raises(MeshError, match=f"to be a multiple of {size}"):
        shard_map(double, mesh, *specs)(w, torch.ones(2 * size + 1, 3))


@check
def a_local_view_binds_axes(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    with tsfunc.mesh_axes(mesh):
        x = torch.tensor(float(rank))
        close(tsfunc.psum(x, "i"), torch.tensor(size * (size - 1) / 2))
        close(tsfunc.specialize(lambda x: tsfunc.psum(x, "i"))(x), tsfunc.psum(x, "i"))
        with pytest.raises(ValueError, match="got 'k' for both"):
            tsfunc.vmap(lambda x: shard_map(torch.sin, {"k": dist.group.WORLD}, P(), P())(x),
                        axis_name="k")(torch.ones(3))  # fmt: skip
    with pytest.raises(tsfunc.errors.UnboundAxisError, match="mesh_axes"):
        tsfunc.psum(x, "i")


@check
def examples_are_spread_over_ranks(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    x = torch.arange(6.0)

    def exchange(x: Tensor) -> Tensor:
        out: Tensor = x * tsfunc.psum(x.sin(), "b") + tsfunc.axis_index("b") * 10
        moved: Tensor = tsfunc.ppermute(x, "b", [(0, 4), (5, 1)])
        return out + moved

    spread = tsfunc.vmap(exchange, axis_name="b", mesh_axis="i")
    close(shard_map(spread, mesh, P("i"), P("i"))(x), tsfunc.vmap(exchange, axis_name="b")(x))

    def noisy(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x + torch.randn(3))

    torch.manual_seed(3)
    whole = tsfunc.vmap(noisy, randomness="split")(x)
    spread = shard_map(
        tsfunc.vmap(noisy, randomness="split", mesh_axis="i"), mesh, P("i"), P("i")
    )  # fmt: skip
    for f in (spread, tsfunc.specialize(spread)):
        torch.manual_seed(3)
        assert torch.equal(f(x), whole)
    torch.manual_seed(3)
    by_rank = tsfunc.vmap(lambda x: x + torch.randn(3), randomness="split")(x.view(size, -1))
    torch.manual_seed(3)
    draw = shard_map(lambda x: x + torch.randn(3), mesh, P("i"), P("i"), randomness="split")
    assert torch.equal(draw(x), by_rank.flatten())


@pytest.fixture(scope="module")
def errors() -> dict[str, list[str]]:
    return failures(CHECKS)


@pytest.mark.parametrize("name", list(CHECKS))
def test_on_two_ranks(errors: dict[str, list[str]], name: str) -> None:
    assert not errors[name], "\n".join(errors[name])


def test_every_rank_has_the_same_program() -> None:
    texts = spawn(text_of, 2, 3)
    assert texts[0] == texts[1]
    assert "= index('i', 'i=2'" in texts[0]


def saved(rank: int, size: int, file: str) -> None:
    gradient = tsfunc.specialize(tsfunc.grad(loss_over(size)))
    gradient(*arguments())
    if rank == 0:
        gradient.save(Path(file))


def test_a_program_says_which_mesh_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "program.ts"
    spawn(saved, 2, str(file))
    loaded = tsfunc.load(file)
    with pytest.raises(MeshError, match="a mesh with the axes i=2, got a process"):
        loaded(*arguments())
