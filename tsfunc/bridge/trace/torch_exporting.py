"""``torch.export`` of what a program became: it asks of sizes what it has to, and no more.

NOTE [questions of torch.export]
torch.export traces the program's operators once more, on sizes of examples. Where its rules choose
between ways to one result they ask these: whether two sizes happen to be one, whether a size is 1,
what a view's strides are. Each answer would hold the exported program to sizes like those of the
examples, though it is right for all that the descriptors allow. With ``backed_size_oblivious`` the
rules take the way that is right for every size, as they do for sizes that depend on data. Where the
exported program is decomposed they are asked again, so it takes care of that itself.

Private names used here (torch 2.11 to 2.13): ``torch.fx.experimental._config`` has
``backed_size_oblivious``, which torch's ONNX exporter sets as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch


def exported_by_torch(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Mapping[str, Any],
) -> torch.export.ExportedProgram:
    """What ``torch.export`` makes of a module.

    Args:
        module: what is exported.
        args, kwargs: the example arguments.
        dynamic_shapes: by parameter, as torch.export writes them.
    """
    with _oblivious():
        found = torch.export.export(
            module, tuple(args), dict(kwargs), dynamic_shapes=dict(dynamic_shapes),
            prefer_deferred_runtime_asserts_over_guards=True,
        )  # fmt: skip
    return _oblivious_too(found)


class _Exported(torch.export.ExportedProgram):
    """An exported program that asks no more where it is decomposed than where it was made."""

    def run_decompositions(self, *args: Any, **kwargs: Any) -> torch.export.ExportedProgram:
        with _oblivious():
            return _oblivious_too(super().run_decompositions(*args, **kwargs))


def _oblivious_too(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    program.__class__ = _Exported
    return program


def _oblivious() -> AbstractContextManager[None]:
    """A block in which torch asks as little as it can: NOTE [questions of torch.export]."""
    from torch.fx.experimental import _config

    config: Any = _config
    found: AbstractContextManager[None] = config.patch(backed_size_oblivious=True)
    return found
