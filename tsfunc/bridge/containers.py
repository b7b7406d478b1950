"""Classes registered for torch's pytrees, which users of ``torch.func`` have registered there.

Private names used here (torch 2.11 to 2.13): ``torch.utils._pytree.SUPPORTED_NODES`` holds how
the classes are taken apart and put together that ``register_pytree_node`` and
``register_dataclass`` of that module were given.
"""

from __future__ import annotations

from typing import Any

import optree
from torch.utils import _pytree

from tsfunc.pytrees import NAMESPACE, on_unknown


@on_unknown
def _take_in(kind: type) -> bool:
    """Makes a class that torch's pytrees know a container here as well."""
    node = _pytree.SUPPORTED_NODES.get(kind)
    if node is None:
        return False

    def flatten(value: Any) -> tuple[Any, Any]:
        children, context = node.flatten_fn(value)
        return tuple(children), context

    def unflatten(context: Any, children: Any) -> Any:
        return node.unflatten_fn(list(children), context)

    optree.register_pytree_node(kind, flatten, unflatten, namespace=NAMESPACE)
    return True
