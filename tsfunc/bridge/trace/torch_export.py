"""Runs ``torch.export`` with as few guards on sizes as possible.

NOTE [guards of torch.export]
torch.export traces the program's operators again, at the sizes of samples. If its rules choose
between two computations of one result, they test whether two sizes happen to be equal, whether a
size is 1, or which strides a view has. Each outcome would restrict the exported program to sizes
like those of the samples, although the result is right for all sizes that the descriptors allow.
With ``backed_size_oblivious`` the rules choose the computation that is right for every size, as for
sizes that depend on data. Decompositions of the exported program repeat the tests, so the exported
program sets the option itself.
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
    """Export a module with ``torch.export``.

    Args:
        dynamic_shapes: the dynamic shapes by parameter, in torch.export's format.
    """
    with _size_oblivious():
        exported = torch.export.export(
            module, tuple(args), dict(kwargs), dynamic_shapes=dict(dynamic_shapes),
            prefer_deferred_runtime_asserts_over_guards=True,
        )  # fmt: skip
    return _oblivious_too(exported)


class _Exported(torch.export.ExportedProgram):
    """An exported program whose decompositions set ``backed_size_oblivious`` too."""

    def run_decompositions(self, *args: Any, **kwargs: Any) -> torch.export.ExportedProgram:
        with _size_oblivious():
            return _oblivious_too(super().run_decompositions(*args, **kwargs))


def _oblivious_too(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    program.__class__ = _Exported
    return program


def _size_oblivious() -> AbstractContextManager[None]:
    """Return a context in which torch adds few guards: NOTE [guards of torch.export]."""
    from torch.fx.experimental import _config

    config: Any = _config
    return config.patch(backed_size_oblivious=True)
