"""Programs over mesh axes: equal on every rank, with axes instead of groups, saved and loaded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import tsfunc
from tests.distributed.checks import Checks
from tsfunc import P, VirtualMesh, shard_map
from tsfunc.bridge.mesh.lowering import DECOMPOSITIONS
from tsfunc.errors import MeshError, RanksDisagree
from tsfunc.testing import simulated_rank, spawn

close = torch.testing.assert_close
CHECKS = Checks()


def body(w: Tensor, x: Tensor) -> Tensor:
    """A loss that reads its rank, permutes and sums."""
    n = tsfunc.axis_size("i")
    own = (x @ w).sin().sum() * (tsfunc.axis_index("i") + 1)
    moved = tsfunc.ppermute(own, "i", [(k, (k + 1) % n) for k in range(n)])
    return tsfunc.psum(own * moved, "i")


def arguments() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1.0, 1.0, 3), torch.arange(24.0).view(8, 3).cos()


def loss_over(size: int) -> Callable[..., Tensor]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    return shard_map(body, mesh, (P(), P("i")), P())


def text_of(rank: int, size: int, others: int) -> str:
    for _ in range(others * rank):  # a rank that makes more groups names them differently
        dist.new_group([rank], use_local_synchronization=True)
    gradient = tsfunc.specialize(tsfunc.grad(loss_over(size)))
    gradient(*arguments())
    return str(gradient.program)


@CHECKS.check
def a_program_is_saved_and_loaded(rank: int, size: int) -> None:
    gradient = tsfunc.specialize(tsfunc.grad(loss_over(size)))
    want = gradient(*arguments())
    with tempfile.TemporaryDirectory() as folder:
        gradient.save(Path(folder) / "program.ts")
        loaded = tsfunc.load(Path(folder) / "program.ts")
    close(loaded(*arguments()), want)
    assert "'i=2'" in str(gradient.program)


@CHECKS.check
def a_backend_compiles_a_program(rank: int, size: int) -> None:
    loss = loss_over(size)
    compiled = tsfunc.specialize(tsfunc.grad(loss), backend="aot_eager")
    close(compiled(*arguments()), tsfunc.grad(loss)(*arguments()))


def every_kind(w: Tensor, x: Tensor) -> Tensor:
    """A loss with each collective, of real, complex, integer and boolean numbers."""
    n = tsfunc.axis_size("i")
    moved = tsfunc.ppermute(x, "i", [(k, k + 1) for k in range(n - 1)])
    rows: Tensor = tsfunc.all_gather((x + moved) @ w, "i", tiled=True)
    own: Tensor = tsfunc.psum_scatter(rows * tsfunc.axis_index("i"), "i", tiled=True)
    sent: Tensor = tsfunc.all_to_all(rows, "i", 0, 0, tiled=True)
    signs = tsfunc.all_gather(x[0] > 0, "i").sum() + tsfunc.psum((x > 0).sum(), "i")
    waves: Tensor = tsfunc.all_gather(torch.complex(x, x.cos()), "i").abs()
    parts = own.sin().sum() + (sent * rows).mean() + waves.sum()
    return tsfunc.psum(parts * signs, "i")


@CHECKS.check
def inductor_has_functional_collectives(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    loss = shard_map(every_kind, mesh, (P(), P("i")), P())
    w, x = arguments()
    for f in (loss, tsfunc.grad(loss, (0, 1))):
        compiled = tsfunc.specialize(f, backend="inductor")
        close(compiled(w, x), f(w, x))
    compiled = tsfunc.specialize(loss, backend="inductor")
    leaf = w.clone().requires_grad_()
    compiled(leaf, x).backward()
    close(leaf.grad, tsfunc.grad(loss)(w, x))
    module = compiled.program.graph_module
    lowered = make_fx(module, decomposition_table=DECOMPOSITIONS)(w, x)
    names = [str(node.target) for node in lowered.graph.nodes]
    assert not any("tsfunc_mesh" in name for name in names)
    assert "_c10d_functional.all_reduce.default" in names


@CHECKS.check
def collectives_of_equal_values_are_local(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))

    def body(w: Tensor, x: Tensor) -> Tensor:
        twice = tsfunc.psum(w.sin(), "i") + tsfunc.psum(tsfunc.psum(x.sum(0), "i"), "i")
        every = tsfunc.all_gather(twice, "i", axis=1).cos()
        return tsfunc.psum((x @ twice).sum() * every.sum(), "i")

    loss = shard_map(body, mesh, (P(), P("i")), P())
    args = arguments()
    for f in (loss, tsfunc.grad(loss, (0, 1)), tsfunc.hessian(loss)):
        close(tsfunc.specialize(f)(*args), f(*args))
    program = tsfunc.specialize(loss)
    close(tsfunc.grad(program, (0, 1))(*args), tsfunc.grad(loss, (0, 1))(*args))
    program(*args)
    assert [use.times for use in program.properties().collectives] == [2]
    assert {use.collective: use.times for use in tsfunc.explain(loss, *args).collectives} == {
        "psum": 4, "all_gather": 1,
    }  # fmt: skip


@CHECKS.check
def captured_tensors_are_exchanged_by_name(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    own = torch.ones(2) + rank
    with tsfunc.mesh_axes(mesh):
        f = tsfunc.specialize(lambda x: x + tsfunc.psum(own, "i"))
        close(f(torch.zeros(2)), torch.full((2,), 3.0))
        own.add_(1)
        close(f(torch.zeros(2)), torch.full((2,), 5.0))
        assert "'sum', [], 'i', 'i=2;" in str(f.program)


@CHECKS.check
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


@CHECKS.check
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


@CHECKS.check
def a_specialized_function_uses_axes_that_are_bound(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    other = {"i": dist.new_group([rank], use_local_synchronization=True)}
    x = torch.arange(3.0) + rank

    def step(x: Tensor) -> Tensor:
        return tsfunc.pmean(x.square(), "i") + tsfunc.axis_index("i")

    specialized = tsfunc.specialize(step)
    gradient = tsfunc.specialize(tsfunc.grad(lambda x: step(x).sum()))
    for _ in range(2):
        with tsfunc.mesh_axes(mesh):
            want = step(x)
            for _ in range(3):
                close(specialized(x), want)
            close(gradient(x), tsfunc.grad(lambda x: step(x).sum())(x))
            assert "'i=2" in str(specialized.program)
        with tsfunc.mesh_axes(other):
            close(specialized(x), x.square())
        with pytest.raises(tsfunc.errors.UnboundAxisError, match="mesh_axes"):
            specialized(x)
        inside = shard_map(specialized, mesh, P(), P("i"))
        close(inside(torch.ones(3)), torch.cat([torch.ones(3) + k for k in range(size)]))
    assert len(specialized.programs) == 2  # one program for each mesh
    with tempfile.TemporaryDirectory() as folder, tsfunc.mesh_axes(mesh):
        specialized(x)
        specialized.save(Path(folder) / "step.ts")
        loaded = tsfunc.load(Path(folder) / "step.ts")
        close(loaded(x), step(x))


@CHECKS.check
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
    with pytest.raises(MeshError, match="a mesh of the axes i=2, over which this program"):
        loaded(*arguments())
    with (
        simulated_rank(0, i=4) as mesh,
        tsfunc.mesh_axes(mesh),
        pytest.raises(MeshError, match=r"of the axes i=2, .*got one with these meshes: .*i=4"),
    ):
        loaded(*arguments())


def saved_by_every_rank(rank: int, size: int, folder: str) -> bytes:
    for _ in range(3 * rank):
        dist.new_group([rank], use_local_synchronization=True)
    gradient = tsfunc.specialize(tsfunc.grad(loss_over(size)))
    gradient(*arguments())
    gradient.save(Path(folder) / f"{rank}.ts")
    return (Path(folder) / f"{rank}.ts").read_bytes()


def runs_the_file_of_rank_0(rank: int, size: int, folder: str) -> None:
    loaded = tsfunc.load(Path(folder) / "0.ts")
    with tsfunc.mesh_axes(init_device_mesh("cpu", (size,), mesh_dim_names=("i",))):
        close(loaded(*arguments()), tsfunc.grad(loss_over(size))(*arguments()))


def test_a_file_of_one_rank_runs_on_all_ranks_of_another_run(tmp_path: Path) -> None:
    first, second = spawn(saved_by_every_rank, 2, str(tmp_path))
    assert first == second
    spawn(runs_the_file_of_rank_0, 2, str(tmp_path))


def parallel_loss(w: Tensor, x: Tensor) -> Tensor:
    """Return the loss of a layer that is sharded over both axes."""
    hidden = torch.tanh(x @ w)
    return tsfunc.psum(hidden.square().sum(), ("dp", "tp"))


def ring_of_blocks(x: Tensor) -> Tensor:
    n = tsfunc.axis_size("dp")
    around = [(k, (k + 1) % n) for k in range(n)]

    def step(carry: tuple[Tensor, Tensor], _: Tensor) -> Any:
        total, block = carry
        return (total + block, tsfunc.ppermute(block, "dp", around)), None

    return tsfunc.scan(step, (torch.zeros_like(x), x), torch.zeros(n))[0][0]


@pytest.mark.parametrize(("dp", "tp"), [(4, 8), (16, 64)])
def test_a_large_mesh_is_simulated(dp: int, tp: int) -> None:
    """Programs are equal on all ranks, and counts and bytes are those of data parallelism, tensor
    parallelism and a ring.
    """
    w, x = torch.randn(8, 2 * tp), torch.randn(3 * dp, 8)
    texts = set()
    for rank in (0, 1, tp, dp * tp // 2 + 1, dp * tp - 1):
        with simulated_rank(rank, dp=dp, tp=tp) as mesh:
            loss = shard_map(parallel_loss, mesh, (P(None, "tp"), P("dp")), P())
            gradient = tsfunc.specialize(tsfunc.grad(loss)).lower(w, x)
            step = [(use.axis, use.collective, use.times, use.bytes)
                    for use in gradient.properties().collectives]  # fmt: skip
            # A shard's gradient is summed over dp, and gathered over tp.
            shard = 8 * 2 * 4
            assert step == [("dp", "psum", 1, shard), ("tp", "all_gather", 1, shard)]
            ring = shard_map(ring_of_blocks, mesh, P("dp"), P("dp"))
            moves = tsfunc.specialize(ring).lower(x).properties().collectives
            block = 3 * 8 * 4
            assert [(use.collective, use.times, use.bytes) for use in moves] == [
                ("all_gather", 1, block), ("ppermute", dp, dp * block),
            ]  # fmt: skip
            texts.add(f"{gradient}{tsfunc.specialize(ring).lower(x)}")
    assert len(texts) == 1


@pytest.mark.slow
def test_all_ranks_of_a_large_mesh_have_one_program() -> None:
    dp, tp = 64, 16
    w, x = torch.randn(8, 2 * tp), torch.randn(3 * dp, 8)
    texts = set()
    for rank in range(dp * tp):
        with simulated_rank(rank, dp=dp, tp=tp) as mesh:
            loss = shard_map(parallel_loss, mesh, (P(None, "tp"), P("dp")), P())
            texts.add(str(tsfunc.specialize(tsfunc.grad(loss)).lower(w, x)))
    assert len(texts) == 1


def draws(rank: int, size: int, state: Tensor) -> Tensor:
    """Return draws of six examples, sharded over the ranks, from a state of the generator."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    noisy = tsfunc.vmap(
        lambda x: torch.nn.functional.dropout(x + torch.randn(3)).sum() + torch.rand(()),
        randomness="split",
        mesh_axis="i",
    )
    torch.set_rng_state(state)
    return shard_map(noisy, mesh, P("i"), P("i"))(torch.arange(12.0))


def test_random_numbers_do_not_depend_on_the_number_of_ranks() -> None:
    torch.manual_seed(5)
    torch.randn(3)  # a state in the middle of a stream
    state = torch.get_rng_state()
    (whole,) = spawn(draws, 1, state)
    for found in spawn(draws, 2, state):
        assert torch.equal(found, whole)


@pytest.mark.slow
def test_random_numbers_on_four_ranks() -> None:
    state = torch.get_rng_state()
    (whole,) = spawn(draws, 1, state)
    for found in spawn(draws, 4, state):
        assert torch.equal(found, whole)


@CHECKS.check
def modes_of_randomness(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("i",))
    x = torch.zeros(size, 2)

    def drawn(over: Any, mode: str, seed: int = 3) -> Tensor:
        torch.manual_seed(seed)
        f = shard_map(lambda x: x + torch.randn(2), over, P("i"), P("i"), randomness=mode)
        return f(x)

    for mode in ("same", "split"):
        assert torch.equal(drawn(mesh, mode), drawn(VirtualMesh(i=size), mode))
        with pytest.raises(RanksDisagree, match="torch's generators in the state"):
            drawn(mesh, mode, rank)
    assert not torch.equal(*drawn(mesh, "different")[:2])
    for over in (mesh, VirtualMesh(i=size)):
        with pytest.raises(RuntimeError, match="random"):
            drawn(over, "error")


def test_a_large_mesh_in_one_process_has_its_values() -> None:
    dp, tp = 32, 32
    w, x = torch.randn(8, tp), torch.randn(dp, 8)
    loss = shard_map(parallel_loss, VirtualMesh(dp=dp, tp=tp), (P(None, "tp"), P("dp")), P())
    whole = lambda w, x: torch.tanh(x @ w).square().sum()  # noqa: E731
    close(tsfunc.grad(loss)(w, x), tsfunc.grad(whole)(w, x))
    ring = shard_map(ring_of_blocks, VirtualMesh(dp=dp), P("dp"), P("dp"))
    close(ring(x), x.sum(0).expand(dp, 8))


def test_a_rank_is_simulated_outside_of_process_groups() -> None:
    with (
        simulated_rank(1, i=2),
        pytest.raises(MeshError, match="a process without a process group"),
        simulated_rank(0, i=2),
    ):
        pass
    assert not dist.is_initialized()


test_on_two_ranks = CHECKS.tests()
