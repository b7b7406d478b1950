"""Files of exported programs for other runtimes: torch's AOTInductor, and ONNX."""

from __future__ import annotations

import logging
import os
import warnings

import torch
import torch.onnx

from tsfunc.errors import ExportError


def write_aoti_package(program: torch.export.ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Compile an exported program with a C++ compiler, and write the package.

    Args:
        path: the file of the package; its name ends with ``.pt2``.
    """
    from torch._inductor import aoti_compile_and_package

    with warnings.catch_warnings():  # torch's pytrees warn about themselves
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
        aoti_compile_and_package(program, package_path=os.fspath(path))


def write_onnx(program: torch.export.ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Write an exported program as an ONNX model, whose inputs have the names of the arguments.

    Raises:
        ImportError: onnx or onnxscript is not installed.
        ExportError: ONNX has no operator for something in the program.
    """
    import onnx  # noqa: F401 - the error of a missing package comes before the work
    import onnxscript  # noqa: F401

    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)  # it lists operators of torchvision, if that is missing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's exporter and onnxscript, about themselves
            torch.onnx.export(program, (), path, dynamo=True, verbose=False)
    except torch.onnx.OnnxExporterError as error:
        raise ExportError(f"ONNX can't represent the program: {error}") from error
    finally:
        registration.setLevel(level)
