"""torch's prototype functions for control flow, whose import paths may change.

The functions below import torch's when they are called, which is while torch records a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree

torch_tree_leaves: Callable[[Any], list[Any]] = _pytree.tree_leaves
torch_tree_map: Callable[..., Any] = _pytree.tree_map


def torch_while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carry: Any) -> Any:
    from torch._higher_order_ops import while_loop

    return while_loop(cond_fn, lambda carry: (body_fn(carry),), (carry,))[0]


def torch_scan(f: Callable[..., Any], init: Any, xs: Any, dim: int, reverse: bool) -> Any:
    from torch._higher_order_ops import scan

    return scan(f, init, xs, dim=dim, reverse=reverse)


def torch_map(f: Callable[..., Any], xs: Any) -> Any:
    from torch._higher_order_ops import map

    return map(f, xs)


def torch_associative_scan(fn: Callable[..., Any], xs: Any, dim: int, reverse: bool) -> Any:
    """Call torch's ``associative_scan`` with any combine function (``combine_mode="generic"``)."""
    from torch._higher_order_ops import associative_scan

    return associative_scan(fn, xs, dim, reverse, combine_mode="generic")
