"""Calls of torch's functions in Python, which give their arguments to a ``__torch_function__``.

NOTE [functions in Python]
A function of torch that is written in Python calls ``torch.overrides.handle_torch_function`` if an
argument has a ``__torch_function__``, by a global name of its own module. The name is replaced, for
two reasons:

- ``F.l1_loss`` gives its handler the input, the target and the reduction, but not the weights
  (torch 2.13 and 2.14), so that every class with a ``__torch_function__`` computes the loss without
  them. The weights are among the ``relevant_args``.
- The replacement of the compiled handlers runs the call's plan, without the search for handlers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function

from tsfunc.bridge import compiled
from tsfunc.errors import EscapedTracerError
from tsfunc.user_code import fold_traceback


def handle_with_all_arguments(
    public_api: Callable[..., Any], relevant_args: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """Call the handler of a function in Python, with the argument that torch omits.

    The signature is that of ``handle_torch_function``.
    """
    if public_api is LOSES_ARGUMENTS and len(relevant_args) == 3 and relevant_args[2] is not None:
        kwargs.setdefault("weight", relevant_args[2])
    try:
        return handle_torch_function(public_api, relevant_args, *args, **kwargs)
    except EscapedTracerError as error:
        fold_traceback(error, str)  # the user called torch, not this package
        raise


LOSES_ARGUMENTS = F.l1_loss


def replace_handle_torch_function() -> None:
    """Replace ``handle_torch_function`` where torch's functions in Python call it."""
    handlers = compiled.load()
    vars(F)["handle_torch_function"] = handle_with_all_arguments
    if handlers is not None:
        for module in (F, torch.functional, torch._tensor):
            vars(module)["handle_torch_function"] = handlers.handle_torch_function
