"""A mesh whose ranks are the examples of nested vmaps in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.tracers.batch_tracer import BatchTracer
from tsfunc.transforms.collectives import all_gather, pmean
from tsfunc.transforms.mesh_specs import P, check_divides, match_specs
from tsfunc.transforms.vmap import vmap


class VirtualMesh:
    """A mesh of any size in one process, for tests and for small machines.

    :func:`tsfunc.shard_map` over it runs its body as nested ``vmap``\\ s, with the values and
    derivatives of a mesh of processes.

    Args:
        sizes: the size of each axis by its name, the outermost axis first.

    Raises:
        ValueError: an axis has fewer than one index.

    Example:
        >>> import torch
        >>> from tsfunc import P, VirtualMesh, psum, shard_map
        >>> mesh = VirtualMesh(dp=2, tp=2)
        >>> f = lambda x: x / psum(x, ("dp", "tp"))
        >>> shard_map(f, mesh, P(("dp", "tp")), P(("dp", "tp")))(torch.tensor([1., 2., 3., 4.]))
        tensor([0.1000, 0.2000, 0.3000, 0.4000])

    Corresponds to JAX on several devices of one host
    (``--xla_force_host_platform_device_count``).
    """

    def __init__(self, **sizes: int) -> None:
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"VirtualMesh: expected a size of at least 1, got {name}={size}.")
        self.sizes = dict(sizes)

    def __repr__(self) -> str:
        return f"VirtualMesh({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"


def run_nested(
    func: Callable[..., Any],
    mesh: VirtualMesh,
    axes: Sequence[str],
    in_specs: Any,
    out_specs: Any,
    randomness: str,
    args: tuple[Any, ...],
) -> Any:
    """Run a body on each index of the axes, as examples of one vmap for each axis."""
    sizes = {name: mesh.sizes[name] for name in axes}
    specs = match_specs("shard_map: in_specs", in_specs, args, sizes)
    flat, tree = pytrees.flatten(args)
    nested_dims = [
        _split_dims(x, spec, sizes) if isinstance(x, torch.Tensor) else x
        for x, spec in zip(flat, specs, strict=True)
    ]
    out_tree: Any = None
    leaf_specs: list[P] = []

    def body(*leaves: Any) -> list[Any]:
        nonlocal out_tree
        out = func(*pytrees.unflatten(tree, list(leaves)))
        leaf_specs[:] = match_specs("shard_map: out_specs", out_specs, out, sizes)
        leaves_out, out_tree = pytrees.flatten(out)
        return leaves_out

    def mapped(at: int, leaves: Sequence[Any]) -> list[Any]:
        """Run the body over the axes from ``at`` inward; dims of outer axes are mapped."""
        if at == len(axes):
            return body(*leaves)
        name = axes[at]
        in_dims = [
            0 if isinstance(x, torch.Tensor) and name in spec.names else None
            for x, spec in zip(leaves, specs, strict=True)
        ]

        def inner(leaves: list[Any]) -> dict[str, list[Any]]:
            return _by_axis(mapped(at + 1, leaves), leaf_specs, name)

        run = vmap(
            inner,
            in_dims=(in_dims,),
            out_dims={"spread": 0, "same": None},
            randomness=randomness,
            axis_size=sizes[name],
            axis_name=name,
        )
        parts = {key: iter(leaves_out) for key, leaves_out in run(list(leaves)).items()}
        return [next(parts["spread" if name in spec.names else "same"]) for spec in leaf_specs]

    results = mapped(0, nested_dims)
    whole = [
        _assemble(x, spec, sizes) if isinstance(x, torch.Tensor) else x
        for x, spec in zip(results, leaf_specs, strict=True)
    ]
    return pytrees.unflatten(out_tree, whole)


def _by_axis(leaves: Sequence[Any], specs: Sequence[P], name: str) -> dict[str, list[Any]]:
    """Return the results that are sharded over an axis, and those that are equal along it."""
    pairs = list(zip(leaves, specs, strict=True))
    return {
        "spread": [x for x, spec in pairs if name in spec.names],
        "same": [_value_equal_along(x, name) for x, spec in pairs if name not in spec.names],
    }


def _value_equal_along(x: Any, name: str) -> Any:
    """Return a value that is guaranteed to be equal at all indices of an axis, without its dim."""
    if not isinstance(x, BatchTracer) or x.bdim is None:
        return x
    if x.is_floating_point() or x.is_complex():
        return pmean(x, name)
    return all_gather(x, name)[0]


def _order(spec: P, sizes: dict[str, int]) -> tuple[list[int], list[int]]:
    """Return the positions of the axes' dims in an unflattened tensor, and their new positions."""
    places: dict[str, int] = {}
    before = 0
    for dim, names in spec.dims():
        for i, name in enumerate(names):
            places[name] = dim + before + i
        before += len(names)
    return [places[name] for name in sizes if name in places], list(range(len(places)))


def _split_dims(x: torch.Tensor, spec: P, sizes: dict[str, int]) -> torch.Tensor:
    """Return a tensor with a new leading dim for each axis of its spec, in the mesh's order."""
    check_divides("shard_map: in_specs", x, spec, sizes)
    for dim, names in reversed(list(spec.dims())):
        parts = [sizes[name] for name in names]
        x = x.unflatten(dim, [*parts, x.shape[dim] // math.prod(parts)])
    places, front = _order(spec, sizes)
    return x.movedim(places, front)


def _assemble(x: torch.Tensor, spec: P, sizes: dict[str, int]) -> torch.Tensor:
    """Return the original tensor of a result of ``_split_dims``."""
    places, front = _order(spec, sizes)
    x = x.movedim(front, places)
    for dim, names in spec.dims():
        x = x.flatten(dim, dim + len(names))
    return x
