"""``out_dims``: unwrap results from their tracers and place the batch dim."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator, Sequence
from typing import Any

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, BatchTracer
from tsfunc.ops.sparse_elementwise import batched_sparse
from tsfunc.transforms.vmap_spec import Spec, is_dim
from tsfunc.user_code import inner_function, name_of


def match_out_dims(spec: Spec, out: Any, tree: optree.PyTreeSpec) -> Sequence[int | None]:
    """Return an entry of ``out_dims`` for each flattened output."""
    out_dims = spec.out_dims
    entries = [] if is_dim(out_dims) else pytrees.leaves_of(out_dims)
    if isinstance(out_dims, str) or not all(map(is_dim, entries)):
        raise ValueError(
            f"vmap({spec.name}, ..., out_dims={out_dims}): `out_dims` must be an int, None "
            f"or a python collection of ints representing where in the outputs the vmapped "
            f"dimension should appear."
        )
    try:
        if tree.is_leaf() and not is_dim(out_dims):
            # A collection with one dim counts for a single output, as in torch.func.
            (only,) = entries
            return [only]
        return pytrees.broadcast_prefix(out_dims, out, is_dim)
    except ValueError:
        raise ValueError(
            f"{spec.call(out=True)}: out_dims is not compatible with the structure of `outputs`. "
            f"out_dims has structure {pytrees.structure_text(pytrees.structure_of(out_dims))} "
            f"but outputs has structure {pytrees.structure_text(tree)}."
        ) from None


def result_of(spec: Spec, leaf: Any, out_dim: int | None, level: BatchLevel) -> Any:
    """Return an output unwrapped from its tracer, with the batch dim at ``out_dim``.

    Non-tensor outputs are the same for all examples and are returned unchanged.
    """
    if isinstance(leaf, BatchTracer) and leaf.dispatch_level is level:
        value, bdim = leaf.value, leaf.bdim
    elif isinstance(leaf, torch.Tensor):
        value, bdim = leaf, None
    else:
        if type(leaf) not in _PLAIN:
            _refuse_hidden(spec, leaf, level)
        return leaf
    if out_dim is None:
        if bdim is not None:
            raise ValueError(
                f"vmap({spec.name}, ...): `{spec.name}` can not return a BatchedTensor when "
                f"out_dim is None: this output differs from example to example. Give it an "
                f"out_dim."
            )
        return value
    rank = value.dim() + (bdim is None)
    if not -rank <= out_dim < rank:
        raise IndexError(
            f"{spec.call(out=True)}: Dimension out of range (expected to be in range of "
            f"[{-rank}, {rank - 1}], but got {out_dim})"
        )
    if out_dim < 0:
        out_dim += rank
    if bdim is None:
        if value.layout not in (torch.strided, torch.jagged):  # layouts that can't be expanded
            value = batched_sparse(value, None, level.batch_size)
            return value.movedim(0, out_dim) if out_dim else value
        shape = list(value.shape)
        shape.insert(out_dim, level.batch_size)
        return value.unsqueeze(out_dim).expand(shape)
    return value if bdim == out_dim else value.movedim(bdim, out_dim)


# Types that hold no tensor.
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)


def _refuse_hidden(spec: Spec, leaf: Any, level: BatchLevel) -> None:
    """Raise if an object that is not a container holds a tracer of the level, or will make one."""
    if isinstance(leaf, Generator | AsyncGenerator | Coroutine):
        if isinstance(leaf, Coroutine):
            leaf.close()  # Python would warn that nothing has awaited it
        raise TypeError(
            f"vmap({spec.name}, ...): `{spec.name}` returned a {type(leaf).__name__}, whose code "
            f"runs when it is read, and the vmap has ended by then. Return its values, as a "
            f"list(...) for example, or map the function that reads it."
        )
    for path, value in _held(leaf):
        if isinstance(value, BatchTracer) and value.dispatch_level is level:
            kind = type(leaf).__qualname__
            if callable(leaf):
                raise ValueError(
                    f"vmap({spec.name}, ...): `{spec.name}` returned {kind} {name_of(leaf)}{path}, "
                    f"a batched tensor, which has no meaning once the vmap has ended. Call it "
                    f"inside of {spec.name}, and return the tensors."
                )
            raise ValueError(
                f"vmap({spec.name}, ...): `{spec.name}` returned a value of type {kind} that holds "
                f"a batched tensor ({kind}{path}), but {kind} is not a container that vmap can "
                f"look into. Return the tensors themselves, in a tuple, dict or dataclass, or "
                f"register the class: optree.register_pytree_node({kind}, flatten, unflatten, "
                f'namespace="tsfunc").'
            )


def _held(leaf: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each attribute, closed-over value or argument of an object."""
    for name, value in _attributes(leaf):
        paths, values, _ = optree.tree_flatten_with_path(
            value, none_is_leaf=True, namespace=pytrees.NAMESPACE
        )
        for path, inner in zip(paths, values, strict=True):
            yield name + "".join(f"[{entry!r}]" for entry in path), inner


def _attributes(leaf: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(leaf, type | torch.nn.Module):
        return
    if isinstance(leaf, functools.partial):
        yield " with arguments", (leaf.args, leaf.keywords)
    inner = inner_function(leaf)
    closure = getattr(inner, "__closure__", None)
    if isinstance(closure, tuple):
        names = inner.__code__.co_freevars
        for name, cell in zip(names, closure, strict=True):
            try:
                yield f" with {name!r} from around it", cell.cell_contents
            except ValueError:
                continue  # not assigned yet
    fields = dataclasses.fields(leaf) if dataclasses.is_dataclass(leaf) else ()
    slots = [name for kind in type(leaf).__mro__ for name in _slots_of(kind)]
    for name in {*getattr(leaf, "__dict__", ()), *slots, *(field.name for field in fields)}:
        if hasattr(leaf, name):
            yield f".{name}", getattr(leaf, name)


def _slots_of(kind: type) -> Sequence[str]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
