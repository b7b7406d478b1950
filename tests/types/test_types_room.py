"""The package as a whole: its exports, its imports, and the examples in its docstrings."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import sys
import types
from pathlib import Path

import pytest

import tsfunc.types

MODULES = [
    importlib.import_module(f"tsfunc.types.{module.name}")
    for module in pkgutil.iter_modules(tsfunc.types.__path__)
]
LOWER = ("tsfunc", "tsfunc.errors", "tsfunc.user_code")  # `from tsfunc import pytrees`
ALLOWED = {"optree", "torch", *sys.stdlib_module_names}


def test_all_equals_the_public_names() -> None:
    own = {
        name
        for name in dir(tsfunc.types)
        if getattr(getattr(tsfunc.types, name), "__module__", "").startswith("tsfunc.types.")
    }
    assert own <= set(tsfunc.types.__all__)
    assert len(tsfunc.types.__all__) == len(set(tsfunc.types.__all__))
    assert all(name in dir(tsfunc.types) for name in tsfunc.types.__all__)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_run(module: types.ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", tsfunc.types.__all__)
def test_public_functions_and_classes_are_documented(name: str) -> None:
    assert getattr(tsfunc.types, name).__doc__


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_imports_go_no_higher(module: types.ModuleType) -> None:
    assert module.__file__ is not None
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            own = name in LOWER or name.startswith("tsfunc.types.")
            assert own or name.split(".")[0] in ALLOWED, name
            assert "._" not in name, name
