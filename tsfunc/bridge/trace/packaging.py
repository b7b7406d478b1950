"""Packages that torch's AOTInductor compiles of exported programs.

Private names used here (torch 2.13 and 2.14): ``torch._inductor.aoti_compile_and_package``, which
torch documents by this name.
"""

from __future__ import annotations

import os

import torch


def write_aoti_package(program: torch.export.ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Compile an exported program with a C++ compiler, and write the package.

    Args:
        program: the exported program.
        path: the file of the package; its name ends with ``.pt2``.
    """
    from torch._inductor import aoti_compile_and_package

    aoti_compile_and_package(program, package_path=os.fspath(path))
