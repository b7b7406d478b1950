"""The law of ``shard_map``: a body over the ranks of a mesh is the body over a ``VirtualMesh``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.testing.laws import law, same
from tsfunc.transforms.forward import jvp
from tsfunc.transforms.reverse import vjp
from tsfunc.transforms.shard_map import mesh_of, shard_map
from tsfunc.transforms.specialize import specialize
from tsfunc.transforms.virtual_mesh import VirtualMesh


@law
def check_shard_map(
    func: Callable[..., Any],
    mesh: Any,
    in_specs: Any,
    out_specs: Any,
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Check that ``shard_map(func)`` over processes equals nested vmaps, with its derivatives.

    Every rank must call the check. The check compares the values, the pullback of a random
    cotangent, the pushforward of a random tangent if all arguments are floating-point tensors, and
    the values of ``specialize(shard_map(func))`` with the same over a :class:`tsfunc.VirtualMesh`.

    Args:
        func: the body; free of random operators and of side effects.
        mesh: a ``DeviceMesh`` with names, or a dict from names to process groups.
        in_specs, out_specs: as for ``shard_map``.
        args: whole tensors, equal on every rank.
        rtol, atol: as for ``torch.testing.assert_close``.

    Raises:
        AssertionError: the results differ.
        RanksDisagree: the ranks make different calls.

    Example:
        >>> import torch
        >>> from tsfunc import P, psum
        >>> from tsfunc.testing import check_shard_map, simulated_rank
        >>> with simulated_rank(0, dp=1) as mesh:
        ...     check_shard_map(lambda x: psum(x.sin(), "dp"), mesh, P("dp"), P(), torch.ones(4))
    """
    mapped = shard_map(func, mesh, in_specs, out_specs)
    virtual = shard_map(func, VirtualMesh(**mesh_of(mesh).sizes), in_specs, out_specs)
    want = virtual(*args)
    where = "over processes and over a VirtualMesh"
    same(f"shard_map(f) {where}", mapped(*args), want, rtol, atol)
    same(f"specialize(shard_map(f)) {where}", specialize(mapped)(*args), want, rtol, atol)
    leaves = pytrees.leaves_of((args, want))
    if all(isinstance(x, torch.Tensor) and x.is_floating_point() for x in leaves):
        generator = torch.Generator().manual_seed(0)  # equal numbers on every rank

        def like(tree: Any) -> Any:
            return pytrees.tree_map(
                lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device),
                tree,
            )

        tangents, cotangents = like(args), like(want)
        cts_in, tangents_out = (vjp(mapped, *args)[1](cotangents), jvp(mapped, args, tangents)[1])
        same(f"vjp {where}", cts_in, vjp(virtual, *args)[1](cotangents), rtol, atol)
        same(f"jvp {where}", tangents_out, jvp(virtual, args, tangents)[1], rtol, atol)
