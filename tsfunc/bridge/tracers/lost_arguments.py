"""Arguments that torch does not pass on to a ``__torch_function__``.

NOTE [lost arguments]
``F.l1_loss`` gives its handler the input, the target and the reduction, but not the weights (torch
2.13 and 2.14), so that every class with a ``__torch_function__`` computes the loss without them.
They are among the ``relevant_args`` of ``handle_torch_function``.

Names used here: the module ``torch.nn.functional`` calls ``torch.overrides.handle_torch_function``
by a global name of its own, which is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch.overrides import handle_torch_function

from tsfunc.errors import EscapedTracerError
from tsfunc.user_code import fold


def handle_with_all_arguments(
    public_api: Callable[..., Any], relevant_args: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """Call the handler of a function of torch.nn.functional with the argument that torch omits.

    The signature is that of ``handle_torch_function``.
    """
    if public_api is F.l1_loss and len(relevant_args) == 3 and relevant_args[2] is not None:
        kwargs.setdefault("weight", relevant_args[2])
    try:
        return handle_torch_function(public_api, relevant_args, *args, **kwargs)
    except EscapedTracerError as error:
        fold(error, str)  # the user called torch, not this package
        raise


def pass_all_arguments() -> None:
    """Let the functions of torch.nn.functional pass on all of their arguments."""
    vars(F)["handle_torch_function"] = handle_with_all_arguments
