"""torch has every private name that the bridge uses, and each behaves as the bridge expects.

The names come from the bridge's source, so that the list is complete: imports of private modules or
names, attribute chains that start at an import from torch, and private attributes of torch's
objects (``OpOverload._schema``), which are read from a value. The list with the checks,
``tsfunc/bridge/private_names/``, has these names and no others.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from tests.test_imports import dotted_name, imported, is_private, torch_names
from tsfunc.bridge.private_names import (
    HOLDERS,
    PRIVATE_NAMES,
    PrivateNames,
    Risk,
    by_risk,
    dependency_table,
    is_listed,
)
from tsfunc.bridge.private_names import missing_message as missing_in_torch

ROOT = Path(__file__).resolve().parent.parent.parent
BRIDGE = ROOT / "tsfunc" / "bridge"


Source = tuple[str, str]  # a file's name and its text


def sources() -> list[Source]:
    files = sorted(BRIDGE.rglob("*.py"))
    return [(file.name, file.read_text()) for file in files if file.parent.name != "private_names"]


def named(source: Source) -> Iterator[tuple[str, str]]:
    """Yield each private dotted name in a file, and its line."""
    file, text = source
    tree = ast.parse(text)
    names = torch_names(tree)
    for line, name in imported("tsfunc.bridge", tree):
        if is_private(name):
            yield name, f"{file}:{line}"
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            found = dotted_name(node, names)
            if found is not None and is_private(found):
                yield found, f"{file}:{node.lineno}"


def own_names(texts: list[str]) -> set[str]:
    """Return the private names that only tsfunc defines on values: methods, attributes, slots."""
    found: set[str] = set()
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found.update(n.name for n in node.body if isinstance(n, ast.FunctionDef))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
                slots = (n for n in ast.walk(node.value) if isinstance(n, ast.Constant))
                found.update(str(slot.value) for slot in slots)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    torchs = [make() for make in HOLDERS.values()]
    return {name for name in found if not any(hasattr(value, name) for value in torchs)}


def read_off_values(source: Source, own: set[str]) -> Iterator[tuple[str, str]]:
    """Yield each private attribute of a value that tsfunc does not define, and its line.

    Attributes that a method reads from its own object (``self._values``) are left out.
    """
    file, text = source
    tree = ast.parse(text)
    names = torch_names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        private = node.attr.startswith("_") and not node.attr.startswith("__")
        of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        if private and not of_self and node.attr not in own and dotted_name(node, names) is None:
            yield node.attr, f"{file}:{node.lineno}"


def collected(pairs: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, where in pairs:
        found.setdefault(name, []).append(where)
    return dict(sorted(found.items()))


ALL = sources()
OURS = own_names([file.read_text() for file in sorted((ROOT / "tsfunc").rglob("*.py"))])
NAMES = collected(pair for source in ALL for pair in named(source))
ATTRIBUTES = collected(pair for source in ALL for pair in read_off_values(source, OURS))


def missing(dotted: str, where: list[str]) -> str | None:
    """Return a message about a name that torch lacks, or None if torch has the name."""
    parts = dotted.split(".")
    value: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], start=2):
        if not hasattr(value, part):
            try:
                value = importlib.import_module(".".join(parts[:i]))
                continue
            except ImportError:
                return (
                    f"torch {torch.__version__} has no {'.'.join(parts[:i])}, which "
                    f"tsfunc/bridge uses as {dotted}: {', '.join(where)}"
                )
        value = getattr(value, part)
    return None


# Inductor, which is imported here, uses a deprecated part of torch.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("name", list(NAMES))
def test_a_private_name_is_there(name: str) -> None:
    message = missing(name, NAMES[name])
    assert message is None, message


@pytest.mark.parametrize("name", list(ATTRIBUTES))
def test_a_private_attribute_is_there(name: str) -> None:
    assert any(hasattr(make(), name) for make in HOLDERS.values()), (
        f"torch {torch.__version__} has no .{name} on any of {', '.join(HOLDERS)}, which "
        f"tsfunc/bridge reads: {', '.join(ATTRIBUTES[name])}"
    )


def test_names_are_found() -> None:
    assert "torch._C._ForceDispatchKeyGuard" in NAMES
    assert "torch.Tensor._make_wrapper_subclass" in NAMES
    assert "torch.autograd.forward_ad._current_level" in NAMES
    assert {"_schema", "_base", "_version", "_buffers"} <= set(ATTRIBUTES)
    assert hasattr(forward_ad, "_current_level")


def test_a_missing_name_is_reported_with_the_file_that_uses_it() -> None:
    source = ("doors.py", "import torch\nfrom torch._C import _Gone\ntorch._C._Gone()\n")
    ((name, where),) = collected(named(source)).items()
    message = missing(name, where)
    assert message is not None
    assert "has no torch._C._Gone, which tsfunc/bridge uses" in message
    assert message.endswith("doors.py:2, doors.py:3")
    assert missing("torch._gone_room.name", ["a.py:1"]) is not None
    assert missing("torch._subclasses.fake_tensor.FakeTensorMode", ["a.py:1"]) is None


def test_an_attribute_of_a_value_is_found_and_our_own_is_not() -> None:
    source = ("doors.py", "def f(op, level):\n    op._schema\n    level._ours\n    op.__name__\n")
    assert list(read_off_values(source, {"_ours"})) == [("_schema", "doors.py:2")]
    text = "class A:\n    __slots__ = ('_mine', '_base')\n    _kept: int\nname = '_said'"
    assert own_names([text]) >= {"_mine", "_kept"}
    assert not own_names([text]) & {"_base", "_said"}, "an attribute of torch's, and a string"


@pytest.mark.parametrize("entry", PRIVATE_NAMES, ids=lambda entry: entry.title)
def test_a_listed_name_is_there_and_behaves(entry: PrivateNames) -> None:
    assert entry.check() == []


@pytest.mark.parametrize("name", [*NAMES, *ATTRIBUTES])
def test_a_name_in_the_source_is_listed(name: str) -> None:
    assert is_listed(name), (
        f"{name} ({', '.join([*NAMES.get(name, ()), *ATTRIBUTES.get(name, ())])}) is not in "
        f"tsfunc/bridge/private_names/: add it with a check and a stand-in."
    )


def test_a_listed_name_is_in_the_source() -> None:
    text = "\n".join(text for _, text in ALL)
    listed = [name for entry in PRIVATE_NAMES for name in entry.single_names()]
    assert len(listed) == len(set(listed))
    assert [name for name in listed if name.rpartition(".")[2] not in text] == []


def test_a_name_that_is_not_listed_is_noticed() -> None:
    assert is_listed("torch._C.DispatchKey.CPU")
    assert is_listed("torch._C._functorch")
    assert is_listed("_schema")
    assert not is_listed("torch._C._Gone")
    assert not is_listed("torch._C.DispatchKeyring")
    assert not is_listed("_gone")


def test_a_failed_check_names_the_missing_or_differing_property() -> None:
    def differs() -> None:
        raise RuntimeError("expected 1, got 2")

    def entry(names: tuple[str, ...]) -> PrivateNames:
        return PrivateNames("A purpose", names, "", "", Risk.LOW, "", differs)

    assert entry(("torch._C._Gone",)).check() == [
        f"torch {torch.__version__} has no torch._C._Gone"
    ]
    assert entry(("torch._C.DispatchKey",)).check() == [
        "A purpose: RuntimeError: expected 1, got 2"
    ]
    assert missing_in_torch("torch._C._Gone|torch._C.DispatchKey") is None
    assert missing_in_torch("torch._C._Gone|torch._gone.name") is not None
    assert missing_in_torch("OpOverload._gone") is not None


def test_the_docs_have_the_list() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
    assert dependency_table() in page, "paste the output of python -m tsfunc.bridge.private_names"
    assert list(by_risk()) == sorted(by_risk(), key=lambda entry: list(Risk).index(entry.risk))
    for entry in PRIVATE_NAMES:
        assert entry.use and entry.stand_in and entry.releases
