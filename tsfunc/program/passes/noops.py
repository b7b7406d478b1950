"""No-ops: operators whose result equals their argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.sizes.symbolic_numbers import same_size
from tsfunc.bridge.tracers.arguments import matched
from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.program.passes.aliases import Aliases

Arguments = dict[str, Any]


def remove_noops(graph: torch.fx.Graph) -> None:
    """Replace results that are equal to an argument by the argument.

    An operator that returns its argument itself is always removed. An operator that makes a copy
    or an alias is removed if this can't be observed: neither tensor is written to, and the caller
    does not get the result.
    """
    aliases = Aliases(graph)
    for node in graph.nodes:
        op = node.meta.get("op")
        if not isinstance(op, TorchOperator) or op.writes:
            continue
        name = op.overload.overloadpacket.__name__
        if name not in _ITSELF and name not in _EQUAL:
            continue
        arguments = {
            argument.name: value for argument, value in matched(op, node.args, node.kwargs)
        }
        source = next(iter(arguments.values()), None)
        if not isinstance(source, torch.fx.Node) or not _look_alike(source, node):
            continue
        if name in _ITSELF:
            if _ITSELF[name](arguments, source):
                node.replace_all_uses_with(source)
                graph.erase_node(node)
        elif _EQUAL[name](arguments, source) and not (
            aliases.escapes(node) or aliases.is_written(node) or aliases.is_written(source)
        ):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _look_alike(source: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Return True if two values have the same dtype, device, shape, layout and lazy bits."""
    a, b = source.meta.get("val"), node.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return (
        (a.dtype, a.device, a.layout, a.dim()) == (b.dtype, b.device, b.layout, b.dim())
        and (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
        and all(same_size(m, n) for m, n in zip(a.shape, b.shape, strict=True))
        and all(same_size(m, n) for m, n in zip(a.stride(), b.stride(), strict=True))
    )


def _always(arguments: Arguments, source: torch.fx.Node) -> bool:
    return True


def _no_copy(arguments: Arguments, source: torch.fx.Node) -> bool:
    """Return True unless ``to`` has to copy; its argument has the requested type and device."""
    copies = arguments.get("copy", False)
    return copies is False and arguments.get("memory_format") in (None, torch.preserve_format)


def _drops_nothing(arguments: Arguments, source: torch.fx.Node) -> bool:
    return arguments.get("train") is False or arguments.get("p") == 0


def _is(name: str, neutral: float) -> Callable[[Arguments, torch.fx.Node], bool]:
    def check(arguments: Arguments, source: torch.fx.Node) -> bool:
        other = arguments.get(name)
        if not isinstance(other, int | float) or isinstance(other, bool):
            return False
        return bool(other == neutral) and arguments.get("rounding_mode") is None

    return check


def _in_order(arguments: Arguments, source: torch.fx.Node) -> bool:
    dims = arguments.get("dims")
    rank = source.meta["val"].dim()
    return isinstance(dims, list | tuple) and [d % rank for d in dims] == list(range(rank))


def _same_dim(arguments: Arguments, source: torch.fx.Node) -> bool:
    rank = source.meta["val"].dim()
    one, other = arguments.get("dim0"), arguments.get("dim1")
    return bool(rank and isinstance(one, int) and isinstance(other, int)
                and one % rank == other % rank)  # fmt: skip


def _whole(arguments: Arguments, source: torch.fx.Node) -> bool:
    """Return True for a slice with step 1, which is the whole tensor since the sizes are equal."""
    return bool(arguments.get("step", 1) == 1)


# Operators that return their argument, under a condition besides equal types and shapes.
_ITSELF: dict[str, Callable[[Arguments, torch.fx.Node], bool]] = {
    "to": _no_copy,
    "type_as": _always,
    "dropout": _drops_nothing,
    "alpha_dropout": _drops_nothing,
    "feature_dropout": _drops_nothing,
    "feature_alpha_dropout": _drops_nothing,
}
# Operators that make another tensor with the same elements.
_EQUAL: dict[str, Callable[[Arguments, torch.fx.Node], bool]] = {
    "_to_copy": _always,
    "alias": _always,
    "clone": _always,
    "expand": _always,
    "expand_as": _always,
    "lift_fresh_copy": _always,
    "view": _always,
    "view_as": _always,
    "reshape": _always,
    "slice": _whole,
    "permute": _in_order,
    "transpose": _same_dim,
    "div": _is("other", 1),
    "mul": _is("other", 1),
    "pow": _is("exponent", 1),
    "sub": _is("other", 0),
}
