"""Common subexpressions: equal computations on the same values are done once."""

from __future__ import annotations

from typing import Any

import torch.fx

from tsfunc.program.passes.aliases import Aliases, written
from tsfunc.program.passes.effects import is_pure, writes


def merge_common(graph: torch.fx.Graph) -> None:
    """Merge equal pure nodes.

    Equal calls differ if one of their arguments is written to between them. Two results are also
    kept if one of them is written to, or if the caller gets both, since they are distinct tensors.
    """
    aliases = Aliases(graph)
    changes: dict[Any, int] = {}
    seen: dict[Any, torch.fx.Node] = {}
    for node in graph.nodes:
        if writes(node):
            for target in written(node):
                memory = aliases.memory(target)
                changes[memory] = changes.get(memory, 0) + 1
        # The sizes of a data-dependent result have symbols from the call that found them.
        if not is_pure(node) or aliases.is_written(node) or node.meta.get("reads_data"):
            continue
        key = _key(node, tuple(changes.get(aliases.memory(x), 0) for x in node.all_input_nodes))
        known = seen.setdefault(key, node) if key is not None else node
        if known is node or (aliases.escapes(known) and aliases.escapes(node)):
            continue
        node.replace_all_uses_with(known)
        graph.erase_node(node)
        if aliases.escapes(node):
            aliases.leaves(known)


def _key(node: torch.fx.Node, changes: tuple[int, ...]) -> Any:
    """Return a key that is equal for equal calls; None if an argument is not hashable.

    Args:
        node: the call.
        changes: the number of earlier writes to the memory of each of its arguments.
    """
    try:
        quiet = node.meta.get("no_grad", False)
        key = (node.target, _frozen(node.args), _frozen(node.kwargs), quiet, changes)
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return ("list", *(_frozen(item) for item in value))
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    # 1, 1.0 and True are equal but different arguments; so are 0.0 and -0.0.
    return (type(value).__name__, repr(value)) if isinstance(value, int | float) else value
