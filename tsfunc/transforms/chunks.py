"""``chunk_size``: a ``vmap`` over some of the examples at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.trace.tracing import tracing_here
from tsfunc.bridge.tracers.batch_tracer import BatchLevel
from tsfunc.bridge.tracers.generators import rewindable
from tsfunc.ops.compressed import is_compressed
from tsfunc.ops.splitting import take_examples
from tsfunc.transforms.chunk_sizes import ChunkSizes, FixedSize, MeasuredSize, MemoryModel
from tsfunc.transforms.joined import Joined
from tsfunc.transforms.memory_budget import default_budget
from tsfunc.transforms.vmap_spec import Spec

# Runs the function at a level for some of the examples, on their inputs.
RunPart = Callable[[BatchLevel, Sequence[Any]], Any]

# What was measured, by what the calls have in common.
Models = dict[Any, MemoryModel]
_MODELS_KEPT = 64


def check_chunks(chunk_size: Any, memory_budget: Any) -> Any:
    """The chunk size that the arguments mean.

    Raises:
        ValueError: one of them is none, or they contradict one another.
    """
    if memory_budget is not None:
        number = isinstance(memory_budget, int | float) and not isinstance(memory_budget, bool)
        if not number or not memory_budget > 0:
            raise ValueError(
                f"vmap: memory_budget should be None or a number of bytes greater than 0. "
                f"(got {memory_budget!r})"
            )
        if chunk_size is not None and chunk_size != "auto":
            raise ValueError(
                f"vmap: memory_budget= goes with chunk_size='auto'. (got chunk_size={chunk_size})"
            )
        return "auto"
    if chunk_size is None or (isinstance(chunk_size, str) and chunk_size == "auto"):
        return chunk_size
    if isinstance(chunk_size, str) or not chunk_size > 0:
        raise ValueError(
            f"vmap: chunk_size should be None or greater than 0. (got {chunk_size}) It can be "
            f"'auto' too."
        )
    return chunk_size


def sizes_of_chunks(
    spec: Spec, flat: Sequence[Any], at: Sequence[int | None], size: Any, rest: Any, models: Models
) -> ChunkSizes | None:
    """How the examples are to be run, None for all at once.

    A trace has no memory to be measured: in a program chunks must have a number.

    Args:
        spec: the call's own arguments.
        flat: the flattened inputs, mapped ``at`` these dims.
        size: how many examples there are.
        rest: what else the function is called with.
        models: what earlier calls have found.
    """
    if spec.chunk_size != "auto":
        return FixedSize(spec.chunk_size) if spec.chunk_size < size else None
    if tracing_here() or size < 2:
        return None
    leaves = [*flat, *pytrees.leaves_of(rest)]
    device = _device_of(leaves)
    key = _signature(leaves, at)
    model = models.pop(key, None) or MemoryModel()
    models[key] = model  # the one used last stands last
    if len(models) > _MODELS_KEPT:
        del models[next(iter(models))]
    budget = _budget(spec, device)
    if model.known and model.largest(budget, size) >= size:
        return None
    return MeasuredSize(model, int(budget), size, device, spec.name)


def sizes_of_group(spec: Spec, flat: Sequence[Any], group: torch.Tensor) -> ChunkSizes | None:
    """As :func:`sizes_of_chunks`, for examples of one size among others; nothing is kept."""
    size = len(group)
    if spec.chunk_size != "auto":
        return FixedSize(spec.chunk_size) if spec.chunk_size is not None else None
    if size < 2:
        return None
    device = _device_of(flat)
    return MeasuredSize(MemoryModel(), int(_budget(spec, device)), size, device, spec.name)


def _budget(spec: Spec, device: torch.device) -> float:
    return default_budget(device) if spec.memory_budget is None else spec.memory_budget


def _device_of(leaves: Sequence[Any]) -> torch.device:
    """Where the memory is to be counted: on the accelerator that inputs are on, if one is."""
    devices = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
    devices = devices or [torch.get_default_device()]
    return next((device for device in devices if device.type != "cpu"), devices[0])


def _signature(leaves: Sequence[Any], at: Sequence[int | None]) -> Any:
    """What calls have in common that differ in nothing but their values and batch size."""
    found: list[Any] = [torch.is_grad_enabled()]
    dims = [*at, *[None] * (len(leaves) - len(at))]
    for leaf, dim in zip(leaves, dims, strict=True):
        if isinstance(leaf, torch.Tensor):
            shape = tuple(n for i, n in enumerate(leaf.shape) if i != dim)
            found.append((shape, leaf.dtype, leaf.device, leaf.requires_grad))
        else:
            plain = isinstance(leaf, bool | int | float | str | None)
            found.append((type(leaf), leaf if plain else None))
    return tuple(found)


def _examples(value: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    """Those of a chunk: a view, but of sparse tensors, which have none."""
    if value.layout is torch.sparse_coo or is_compressed(value):
        places = torch.arange(start, start + length, device=value.device)
        return take_examples(value, dim, places)
    return value.narrow(dim, start, length)


def run_in_chunks(
    spec: Spec,
    flat: Sequence[Any],
    at: Sequence[int | None],
    size: int,
    sizes: ChunkSizes,
    run: RunPart,
) -> Any:
    """Runs some of the examples at a time and puts the results together."""
    generators = rewindable(spec.randomness)
    if generators is not None and tracing_here():
        raise RuntimeError(
            f"vmap({spec.name}, randomness={spec.randomness!r}, chunk_size={spec.chunk_size}): in "
            f"a trace the chunks can't begin with the same random numbers, as this randomness "
            f"needs it. Leave out chunk_size inside of specialize."
        )
    joined = Joined(spec, size)
    start = 0
    while start < size:
        length = min(sizes.next(), size - start)
        part = [
            value if dim is None else _examples(value, dim, start, length)
            for value, dim in zip(flat, at, strict=True)
        ]
        if generators is not None and start:
            generators.rewind()
        level = BatchLevel(length, spec.randomness, spec.label, spec.strict, start, generators)
        with sizes.running(length):
            out = run(level, part)
        joined.add(start, out)
        del out  # so that its memory is free for the next chunk
        start += length
        sizes.keep(start, joined.kept)
    if generators is not None:
        generators.finish()
    return joined.result()
