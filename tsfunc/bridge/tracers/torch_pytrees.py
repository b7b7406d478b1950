"""Container classes registered with torch's pytrees, as users of ``torch.func`` do.

``torch.utils._pytree.SUPPORTED_NODES`` holds the flatten and unflatten functions that
``register_pytree_node`` and ``register_dataclass`` of that module were given.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import optree
from torch.utils import _pytree

from tsfunc.pytrees import NAMESPACE


def register_container(kind: type) -> bool:
    """Register a class of torch's pytrees with this package's pytrees; True if there is one."""
    node = _pytree.SUPPORTED_NODES.get(kind)
    if node is None:
        return False

    with_keys = node.flatten_with_keys_fn if dataclasses.is_dataclass(kind) else None

    def flatten(value: Any) -> tuple[Any, ...]:
        children, context = node.flatten_fn(value)
        if with_keys is None:
            return tuple(children), context
        keys = [key for key, _ in with_keys(value)[0]]
        names = tuple(key.name for key in keys if isinstance(key, _pytree.GetAttrKey))
        return tuple(children), context, names if len(names) == len(children) else None

    def unflatten(context: Any, children: Any) -> Any:
        return node.unflatten_fn(list(children), context)

    optree.register_pytree_node(kind, flatten, unflatten, namespace=NAMESPACE)
    return True
