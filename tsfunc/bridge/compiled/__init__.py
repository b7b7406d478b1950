"""The compiled handlers of batched tensors: how they are built, found and loaded.

The C++ files beside this one have the two handlers of ``batch_handlers``; NOTE [compiled handlers]
in ``handlers.cpp`` describes them. Without the compiled handlers, which are optional, the Python
handlers serve every call, with the same results. Importing tsfunc never compiles anything. ``python
-m tsfunc build`` compiles the handlers once for a version of torch and of Python, and puts the
library beside this file.

The library is compiled against torch's C++ headers, which are not stable between releases, so its
file name contains torch's version and a hash of the sources.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

SOURCE = Path(__file__).with_name("handlers.cpp")
MODULE = "tsfunc_handlers"
SWITCH = "TSFUNC_COMPILED"


def library_path() -> Path:
    """Return the path of the library for these sources, torch and Python.

    The library lies beside this file, or in the directory that ``TSFUNC_BUILD_DIR`` names.
    """
    files = [*sorted(SOURCE.parent.glob("*.h")), SOURCE]
    sources = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    tag = f"{sys.implementation.cache_tag}-torch{torch.__version__}-{sources}"
    directory = os.environ.get("TSFUNC_BUILD_DIR")
    return (Path(directory) if directory else SOURCE.parent) / f"{MODULE}-{tag}.so"


def is_enabled() -> bool:
    """True unless the environment variable ``TSFUNC_COMPILED`` is ``0``."""
    return os.environ.get(SWITCH, "1") != "0"


@functools.cache
def load() -> ModuleType | None:
    """Return the compiled handlers, or None if they are not built or switched off."""
    if not is_enabled():
        return None
    path = library_path()
    if not path.exists():
        return None
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_loader(MODULE, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@contextmanager
def pause_handlers() -> Iterator[None]:
    """Context manager: the Python handlers serve every call, on all threads (for tests)."""
    handlers = load()
    if handlers is not None:
        handlers.enable(False)
    try:
        yield
    finally:
        if handlers is not None:
            handlers.enable(True)


def command(output: Path) -> list[str]:
    """Return the compiler call that writes the library.

    Raises:
        FileNotFoundError: there is no C++ compiler.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError(
            "python -m tsfunc build: expected a C++ compiler, got none on PATH. Install g++ or "
            "clang++, or set CXX. tsfunc works without the compiled handlers, in Python."
        )
    package = Path(torch.__file__).parent
    libraries = package / "lib"
    return [
        *compiler.split(), "-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w",
        f"-I{sysconfig.get_paths()['include']}", f"-I{package / 'include'}",
        f"-I{package / 'include/torch/csrc/api/include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        str(SOURCE), "-o", str(output),
        f"-L{libraries}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10",
        f"-Wl,-rpath,{libraries}",
    ]  # fmt: skip


def build() -> tuple[Path, float]:
    """Compile the handlers for this torch and Python, unless the library exists.

    Returns:
        The library's path, and the compile time in seconds (0 for an existing library).

    Raises:
        FileNotFoundError: there is no C++ compiler.
        OSError: the directory is not writable. Set ``TSFUNC_BUILD_DIR`` to a writable one.
        RuntimeError: the compiler failed; the message has the end of its output.
    """
    path = library_path()
    if path.exists():
        return path, 0.0
    path.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        done = subprocess.run(command(built), capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(
                f"python -m tsfunc build: expected the compiler to succeed, got status "
                f"{done.returncode}:\n{done.stderr[-2000:]}"
            )
        os.replace(built, path)
    for old in path.parent.glob(f"{path.stem.rpartition('-')[0]}-*.so"):
        if old != path:  # of other sources, which no process can load any more
            old.unlink()
    return path, time.perf_counter() - start
