"""``chunk_size``: a ``vmap`` that runs some of the examples at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.batch_tracer import BatchLevel
from tsfunc.bridge.tracers.draw_keys import CallKeys
from tsfunc.bridge.tracers.generators import NoGeneratorStates, generator_states_for
from tsfunc.ops.compressed import is_compressed
from tsfunc.ops.splitting import take_examples
from tsfunc.transforms.chunk_sizes import (
    ChunkSizes,
    FixedSize,
    MeasuredSize,
    MemoryModel,
    default_budget,
)
from tsfunc.transforms.joined import Joined
from tsfunc.transforms.vmap_spec import Spec

# Runs the function at a level for some of the examples, on the inputs of these examples.
RunPart = Callable[[BatchLevel, Sequence[Any]], Any]

# The memory models, by the signatures of the calls.
Models = dict[Any, MemoryModel]
_MODELS_KEPT = 64


def check_chunks(api: str, chunk_size: Any, memory_budget: Any) -> Any:
    """Return the chunk size for the two arguments of a transform.

    Raises:
        ValueError: an argument is invalid, or the two contradict each other.
    """
    if memory_budget is not None:
        number = isinstance(memory_budget, int | float) and not isinstance(memory_budget, bool)
        if not number or not memory_budget > 0:
            raise ValueError(
                f"{api}: memory_budget: expected None or a number of bytes greater than 0, got "
                f"{memory_budget!r}."
            )
        if chunk_size is not None and chunk_size != "auto":
            raise ValueError(
                f"{api}: memory_budget: expected chunk_size='auto' beside it, got {chunk_size!r}."
            )
        return "auto"
    if chunk_size is None or (isinstance(chunk_size, str) and chunk_size == "auto"):
        return chunk_size
    if isinstance(chunk_size, str) or not chunk_size > 0:
        raise ValueError(
            f"{api}: chunk_size should be None or greater than 0. (got {chunk_size}) It can be "
            f"'auto' too."
        )
    return chunk_size


def chunk_sizes_for(
    spec: Spec,
    flat: Sequence[Any],
    bdims: Sequence[int | None],
    size: Any,
    rest: Any,
    models: Models,
) -> ChunkSizes | None:
    """Return the source of the chunk sizes; None to run all examples at once.

    Memory is not measured in a trace: chunks in a program need a fixed size.

    Args:
        spec: the arguments of vmap.
        bdims: the dim that each is mapped over, or None.
        rest: the other arguments of the function.
        models: the memory models of earlier calls.
    """
    if spec.chunk_size != "auto":
        sizes = FixedSize(spec.chunk_size)
        return sizes if sizes.count(size) > 1 else None
    if current_trace() is not None or size < 2:
        return None
    leaves = [*flat, *pytrees.leaves_of(rest)]
    device = _device_of(leaves)
    key = _memory_key(leaves, bdims)
    model = models.pop(key, None) or MemoryModel()
    models[key] = model  # the most recently used model comes last
    if len(models) > _MODELS_KEPT:
        del models[next(iter(models))]
    budget = _budget(spec, device)
    if model.is_measured and model.largest(budget, size) >= size:
        return None
    return MeasuredSize(model, int(budget), size, device, spec.name)


def chunk_sizes_for_group(
    spec: Spec, flat: Sequence[Any], group: torch.Tensor
) -> ChunkSizes | None:
    """Return the chunk sizes for examples of equal size, without a model for later calls."""
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
    """Return the device whose memory is measured: the accelerator of an input if there is one."""
    devices = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
    devices = devices or [torch.get_default_device()]
    return next((device for device in devices if device.type != "cpu"), devices[0])


def _memory_key(leaves: Sequence[Any], bdims: Sequence[int | None]) -> Any:
    """Return the properties of a call that its memory depends on, without the batch size."""
    parts: list[Any] = [torch.is_grad_enabled()]
    leaf_bdims = [*bdims, *[None] * (len(leaves) - len(bdims))]
    for leaf, bdim in zip(leaves, leaf_bdims, strict=True):
        if isinstance(leaf, torch.Tensor):
            shape = tuple(n for i, n in enumerate(leaf.shape) if i != bdim)
            parts.append((shape, leaf.dtype, leaf.device, leaf.requires_grad))
        else:
            plain = isinstance(leaf, bool | int | float | str | None)
            parts.append((type(leaf), leaf if plain else None))
    return tuple(parts)


def _examples(value: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    """Return the examples of a chunk: a view, except for sparse tensors, which have no views."""
    if value.layout is torch.sparse_coo or is_compressed(value):
        positions = torch.arange(start, start + length, device=value.device)
        return take_examples(value, dim, positions)
    return value.narrow(dim, start, length)


def run_in_chunks(
    spec: Spec,
    flat: Sequence[Any],
    bdims: Sequence[int | None],
    size: int,
    sizes: ChunkSizes,
    run: RunPart,
) -> Any:
    """Run the examples in chunks and join the results."""
    generators = generator_states_for(spec.randomness)
    if generators is not None and current_trace() is not None:
        generators = NoGeneratorStates(
            f"vmap({spec.name}, randomness={spec.randomness!r}, chunk_size={spec.chunk_size}): in "
            f"a trace the chunks can't begin with the same random numbers, as this randomness "
            f"needs it. Leave out chunk_size inside of specialize."
        )
    keys = CallKeys() if spec.randomness == "split" else None
    joined = Joined(spec, size)
    start = 0
    for length in sizes.lengths(size):
        part = [
            value if bdim is None else _examples(value, bdim, start, length)
            for value, bdim in zip(flat, bdims, strict=True)
        ]
        if generators is not None and start:
            generators.rewind()
        level = BatchLevel(
            length, spec.randomness, spec.label, spec.strict, start, generators, keys
        )
        with sizes.running(length):
            out = run(level, part)
        joined.add(start, out)
        del out  # frees the memory for the next chunk
        start += length
        sizes.keep(start, joined.kept)
    if generators is not None:
        generators.finish()
    return joined.result()
