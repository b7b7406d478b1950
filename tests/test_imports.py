"""Imports go one way between packages, torch's private names stay in one, importing is light."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import tsfunc
from tsfunc.bridge.private_names import PRIVATE_NAMES

ROOT = Path(__file__).resolve().parent.parent

# A package is a folder or a file of tsfunc/; it imports itself and what stands before it here.
PACKAGES = (
    "_lazy",
    "_text",
    "hooks",
    "rage",
    "config",
    "errors",
    "user_code",
    "releases",
    "pytrees",
    "types",
    "dispatch",
    "ops",
    "bridge",
    "program",
    "transforms",
    "testing",
    "doctor",
    "cli",
    "__main__",
)
PRIVATE_NAMES_PACKAGE = "bridge"
PRIVATE_ATTRIBUTES = {
    name.rpartition(".")[2]
    for entry in PRIVATE_NAMES
    for name in entry.single_names()
    if not name.startswith("torch.")
}

# The packages within a package, with the same meaning.
INNER_PACKAGES = {
    "bridge": (
        "compiled",
        "tracers",
        "sizes",
        "writing",
        "trace",
        "grad",
        "batch",
        "mesh",
        "control",
        "private_names",
    ),
    "program": (
        "assumptions",
        "fields",
        "guard",
        "passes",
        "dims",
        "closure",
        "guarding",
        "graphs",
        "files",
        "program",
        "calling",
    ),
}
# Installed packages that `import tsfunc` may load and `import torch` does not. The last one is
# tsfunc's own: the compiled handlers, if they are built.
LIGHT = {"tsfunc", "optree", "typing_extensions", "tsfunc_handlers"}
# Parts of torch that `import torch` does not load, and that take long to load.
HEAVY = ("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes")
# Packages of tsfunc that a first vmap of grad does not need: specialize, control flow, the tools.
UNUSED_BY_VMAP = (
    "tsfunc.ops.catalogue.lookup",
    "tsfunc.program",
    "tsfunc.testing",
    "tsfunc.transforms.control",
    "tsfunc.transforms.explain",
    "tsfunc.transforms.specialize",
    "tsfunc.transforms.specialized",
    "tsfunc.types.descriptor_sets",
    "tsfunc.types.grammar",
    "tsfunc.types.meta",
    "tsfunc.cli",
)
VMAP_OF_GRAD = """
from tsfunc import grad, vmap
vmap(grad(lambda w, x: (w @ x).tanh().square().sum()), in_dims=(None, 0))(
    torch.ones(2, 3), torch.ones(4, 3)
)
"""


def modules() -> list[tuple[str, Path]]:
    """Return each module under tsfunc/: its dotted name (with ``__init__``) and its file."""
    files = sorted((ROOT / "tsfunc").rglob("*.py"))
    return [(".".join(f.relative_to(ROOT).with_suffix("").parts), f) for f in files]


def package_of(module: str) -> str:
    """Return the package of a dotted name; the empty string for ``tsfunc`` itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__init__" else ""


def imported(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and full dotted name of each import, at any depth of the code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            # `from . import x` in a.b.c (or a.b.__init__) is a.b.x: each dot removes one part.
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def import_violations(module: str, source: str) -> list[str]:
    """Return the imports of a module of tsfunc that violate the order of the packages."""
    package = package_of(module)
    if not package:
        return []  # tsfunc/__init__.py exports from all packages
    if package not in PACKAGES:
        return [
            f"{module}: the package {package!r} is missing in PACKAGES of tests/test_imports.py"
        ]
    found = []
    for line, name in imported(module, ast.parse(source)):
        if name != "tsfunc" and not name.startswith("tsfunc."):
            continue
        target = package_of(name)
        if target not in PACKAGES:
            found.append(f"{module}:{line}: {name} is not in a package; import it from its module")
        elif PACKAGES.index(target) > PACKAGES.index(package):
            found.append(f"{module}:{line}: {package} may not import {name}: {target} comes later")
    return found


def inner_import_violations(module: str, source: str) -> list[str]:
    """Return the imports of a module that violate the order of the packages within its package."""
    package = package_of(module)
    order = INNER_PACKAGES.get(package, ())
    parts = module.split(".")
    if not order or parts[2:] == ["__init__"]:
        return []  # the package's ``__init__`` exports from all of its packages
    if parts[2] not in order:
        return [f"{module}: {parts[2]!r} has no place in INNER_PACKAGES of tests/test_imports.py"]
    found = []
    for line, name in imported(module, ast.parse(source)):
        if not name.startswith(f"tsfunc.{package}."):
            continue
        target = name.split(".")[2]
        if target not in order:
            found.append(f"{module}:{line}: {name} is not in a package; import it from its module")
        elif order.index(target) > order.index(parts[2]):
            found.append(f"{module}:{line}: {parts[2]} may not import {name}: it comes later")
    return found


def imports_between(files: Iterable[tuple[str, Path]]) -> dict[str, set[str]]:
    """Return the imports between modules, except those by which a package exports its modules."""
    sources = {name: file.read_text() for name, file in files if not name.endswith("__init__")}
    found: dict[str, set[str]] = {}
    for name, source in sources.items():
        dotted = [full for _, full in imported(name, ast.parse(source))]
        known = {*dotted, *(full.rpartition(".")[0] for full in dotted)}
        found[name] = (known & sources.keys()) - {name}
    return found


def circles(loads: dict[str, set[str]]) -> list[list[str]]:
    """Return import circles: one path from a module back to itself for each circle found."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> None:
        if module in way:
            found.append([*way[way.index(module) :], module])
        elif module not in done:
            for other in sorted(loads[module]):
                visit(other, [*way, module])
            done.add(module)

    for module in loads:
        visit(module, [])
    return found


def is_private(dotted: str) -> bool:
    """True if a dotted name below ``torch`` has a part that starts with a single underscore.

    The parts below ``torch.ops`` are names of operators (``torch.ops.aten._softmax``): they are
    data that the catalogue is made of, and part of what torch keeps stable.
    """
    root, *parts = dotted.split(".")
    if root != "torch" or parts[:1] == ["ops"]:
        return False
    return any(p.startswith("_") and not p.startswith("__") for p in parts)


def dotted_name(node: ast.AST, names: dict[str, str]) -> str | None:
    """Return ``torch.a.b`` for an attribute chain on a name that refers to torch."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join([names[node.id], *reversed(parts)])


def torch_names(tree: ast.Module) -> dict[str, str]:
    """Return the names that refer to torch: imports, and a global ``aten = torch.ops.aten``."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom):
            module = "" if node.level else node.module or ""
            if module.split(".")[0] == "torch":
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{module}.{alias.name}"
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            value = dotted_name(statement.value, names)
            if value is not None:
                names[statement.targets[0].id] = value
    return names


def private_uses(module: str, source: str) -> list[str]:
    """Return the places where a module outside of the bridge uses a private name of torch.

    These are imports, attribute chains that start at a name imported from torch, and the attributes
    of values in the bridge's list (``x._base``), except those that a method reads from its own
    object.
    """
    if package_of(module) == PRIVATE_NAMES_PACKAGE:
        return []
    tree = ast.parse(source)
    names = torch_names(tree)
    found = {(line, name) for line, name in imported(module, tree) if is_private(name)}
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            name = dotted_name(node, names)
            if name is not None and is_private(name):
                found.add((node.lineno, name))
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES:
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not of_self and dotted_name(node, names) is None:
                found.add((node.lineno, node.attr))
    return [f"{module}:{line}: {name} is private to torch" for line, name in sorted(found)]


def heavy_modules(loaded: Iterable[str]) -> list[str]:
    """Return the newly loaded modules that ``import tsfunc`` should not load."""
    return sorted(
        name
        for name in loaded
        if any(name == heavy or name.startswith(f"{heavy}.") for heavy in HEAVY)
        or (
            name.split(".")[0] not in LIGHT | {"torch"}
            and name.split(".")[0] not in sys.stdlib_module_names
        )
    )


def test_modules_are_found() -> None:
    assert "tsfunc.errors" in [name for name, _ in modules()]


def test_imports_go_one_way() -> None:
    found = [v for name, file in modules() for v in import_violations(name, file.read_text())]
    assert not found, "\n".join(found)


def test_imports_go_one_way_within_packages() -> None:
    found = [v for name, file in modules() for v in inner_import_violations(name, file.read_text())]
    assert not found, "\n".join(found)


def test_modules_import_in_no_circle() -> None:
    assert circles(imports_between(modules())) == []


def test_a_circle_of_imports_is_found() -> None:
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": {"b"}}) == [["b", "c", "b"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_an_import_against_the_order_within_a_room_is_found() -> None:
    source = "from tsfunc.bridge.batch import selections"
    assert "comes later" in inner_import_violations("tsfunc.bridge.tracers.tracer", source)[0]
    assert inner_import_violations("tsfunc.bridge.control.subsets", source) == []
    assert (
        "not in a package"
        in inner_import_violations(
            "tsfunc.bridge.control.subsets", "from tsfunc.bridge import subsets"
        )[0]
    )
    assert "no place in" in inner_import_violations("tsfunc.bridge.attic", source)[0]


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("tsfunc.dispatch.table", "from tsfunc.ops import rows", "dispatch may not import"),
        ("tsfunc.dispatch.table", "import tsfunc.ops.registry as r", "ops comes later"),
        ("tsfunc.dispatch.table", "from tsfunc import ops", "ops comes later"),
        ("tsfunc.dispatch.table", "from ..ops import rows", "ops comes later"),
        ("tsfunc.dispatch.__init__", "from ..ops import rows", "ops comes later"),
        ("tsfunc.program.passes.cse", "from ...transforms import vmap", "transforms comes later"),
        ("tsfunc.dispatch.table", "def f():\n    import tsfunc.cli", "table:2: dispatch may not"),
        ("tsfunc.errors", "from tsfunc import types", "types comes later"),
        ("tsfunc.testing.laws", "from tsfunc import vmap", "tsfunc.vmap is not in a package"),
        ("tsfunc.ops.rules", "import tsfunc", "tsfunc is not in a package"),
        ("tsfunc.attic", "import torch", "'attic' is missing in PACKAGES"),
    ],
)
def test_an_import_against_the_order_is_found(module: str, source: str, expected: str) -> None:
    found = import_violations(module, source)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tsfunc.types.descriptor_sets", "from tsfunc.errors import DescriptorError"),
        ("tsfunc.transforms.vmap", "from tsfunc import bridge, errors\nfrom . import grad"),
        ("tsfunc.dispatch.__init__", "from .keys import DispatchKey"),
        ("tsfunc.dispatch.keys", "from ..errors import DispatchError\nimport sys"),
        ("tsfunc.__init__", "from tsfunc.transforms import vmap\nfrom . import cli"),
        ("tsfunc.errors", "import tsfunctions\nfrom tsfunc_extra import ops"),
    ],
)
def test_an_import_in_order_is_let_through(module: str, source: str) -> None:
    assert import_violations(module, source) == []


def test_private_names_of_torch_are_used_in_one_package() -> None:
    found = [v for name, file in modules() for v in private_uses(name, file.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._C", "torch._C"),
        ("import torch._subclasses.fake_tensor as ft", "torch._subclasses.fake_tensor"),
        ("from torch import _functorch", "torch._functorch"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("import torch\ntorch._C._DisableTorchDispatch()", "torch._C._DisableTorchDispatch"),
        ("import torch.fx\ntorch.utils._pytree.tree_map", "torch.utils._pytree.tree_map"),
        ("import torch as t\nt.Tensor._make_subclass", "torch.Tensor._make_subclass"),
        ("from torch import Tensor as T\nT._make_subclass", "torch.Tensor._make_subclass"),
        ("import torch\nT = torch.Tensor\nT._make_subclass", "torch.Tensor._make_subclass"),
        ("def f(x):\n    return x.mT._base", "_base"),
        ("import torch.nn.functional as F\nF._verify_spatial_size", "torch.nn.functional._verify"),
    ],
)
def test_a_private_name_of_torch_is_found(source: str, name: str) -> None:
    found = private_uses("tsfunc.ops.rules", source)
    assert len(found) == 1
    assert name in found[0]
    assert private_uses("tsfunc.bridge.doors", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.ops.aten._softmax.default",
        "import torch\naten = torch.ops.aten\naten._to_copy.default",
        "import torch\ntorch.Tensor.__torch_function__\ntorch.__version__",
        "class A:\n    def f(self):\n        return self.torch._mine, self._base",
        "from tsfunc.dispatch import _state\n_state._table",
        "# torch._C in a comment\n'torch._C in a string'",
    ],
)
def test_a_public_name_is_let_through(source: str) -> None:
    assert private_uses("tsfunc.ops.rules", source) == []


def loaded_by(code: str) -> list[str]:
    """Return the modules that code loads in a fresh process, beside torch's own import."""
    lines = (
        "import json, sys, torch",
        "before = set(sys.modules)",
        code,
        "print(json.dumps(sorted(set(sys.modules) - before)))",
    )
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded: list[str] = json.loads(run.stdout)
    assert "tsfunc" in loaded
    return loaded


def below(names: Iterable[str], packages: Sequence[str]) -> list[str]:
    """Return the module names that are in ``packages`` or below one of them."""
    return [n for n in names if any(n == p or n.startswith(f"{p}.") for p in packages)]


def test_importing_tsfunc_loads_little_beside_torch() -> None:
    loaded = loaded_by("import tsfunc")
    assert heavy_modules(loaded) == []
    assert below(loaded, UNUSED_BY_VMAP) == []
    assert "tsfunc.transforms.vmap" not in loaded


def test_a_first_vmap_of_grad_loads_only_the_modules_it_needs() -> None:
    """torch itself loads sympy and more in it, when it first meets a tensor subclass."""
    loaded = loaded_by(VMAP_OF_GRAD)
    assert "tsfunc.transforms.vmap" in loaded
    assert below(loaded, (*UNUSED_BY_VMAP, "torch._dynamo", "torch._inductor")) == []


def test_a_first_call_whose_arguments_torch_parses_loads_nothing() -> None:
    """torch does not load DTensor for the probes that find the form of a call."""
    loaded = loaded_by(
        "import torch, tsfunc\ntsfunc.vmap(lambda x: torch.argmax(x.sin(), 0))(torch.ones(3, 4))"
    )
    assert below(loaded, ("sympy", "torch.distributed.tensor")) == []


def test_repeated_calls_do_not_load_dynamo() -> None:
    """The compiled handlers record the calls of batching rules at the second call."""
    loaded = loaded_by(
        "import torch, tsfunc\n"
        "f = tsfunc.vmap(tsfunc.grad(lambda x: (x.softmax(-1) @ torch.ones(4, 4)).sum()))\n"
        "for _ in range(4): f(torch.randn(3, 2, 4))"
    )
    assert below(loaded, ("torch._dynamo", "torch._inductor")) == []


FILES_OF_A_FIRST_SPECIALIZE = """
import sys, torch, tsfunc
files = set()
def seen(frame, event, arg):
    if event == "call":
        files.add(frame.f_code.co_filename)
x = torch.ones(3)
tsfunc.specialize(lambda x: x + 1)(x)
program = tsfunc.specialize(lambda x: x.sin())
sys.setprofile(seen)
program(x)
sys.setprofile(None)
print(*sorted(file for file in files if file.startswith(sys.argv[1])), sep="\\n")
"""


def test_a_first_specialize_passes_few_files() -> None:
    """A reader follows a call through these files; the process is warm."""
    # The suite verifies every program, which users do not.
    own = {name: value for name, value in os.environ.items() if name != "TSFUNC_VERIFY"}
    run = subprocess.run(
        [sys.executable, "-c", FILES_OF_A_FIRST_SPECIALIZE, str(ROOT / "tsfunc")],
        cwd=ROOT,
        env=own,
        capture_output=True,
        text=True,
        check=True,
    )
    files = run.stdout.split()
    assert 20 < len(files) <= 50, "\n".join(files)


def stubs() -> Iterator[tuple[str, ast.Module]]:
    """Yield the packages with lazily loaded names, and their stubs."""
    for stub in sorted((ROOT / "tsfunc").rglob("__init__.pyi")):
        package = ".".join(stub.parent.relative_to(ROOT).parts)
        yield package, ast.parse(stub.read_text())


def test_stubs_export_each_name_from_its_module() -> None:
    """A type checker takes ``name as name`` for public, and ``lazy_exports`` reads this form."""
    packages = dict(stubs())
    assert packages.keys() == {"tsfunc", "tsfunc.ops", "tsfunc.types"}
    for package, tree in packages.items():
        loaded = importlib.import_module(package)
        found = []
        for statement in tree.body[1:]:
            if isinstance(statement, ast.ImportFrom):
                (alias,) = statement.names
                assert alias.asname == alias.name, ast.unparse(statement)
                expected: dict[str, Any] = {}
                exec(ast.unparse(statement), expected)
                assert getattr(loaded, alias.name) is expected[alias.name]
                found.append(alias.name)
            else:
                assert ast.unparse(statement) in ("__all__: list[str]", "__version__: str")
        assert sorted(found) == dir(loaded)
        assert set(loaded.__all__) <= set(found)


def test_a_name_that_a_package_lacks_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tsfunc' has no attribute 'vamp'"):
        tsfunc.vamp  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'vamp'"):
        exec("from tsfunc import vamp")


def test_a_heavy_module_is_found() -> None:
    heavy = ["hypothesis", "numpy.f2py", "sympy.core", "torch._dynamo", "torch._inductor.config"]
    light = ["json.decoder", "optree", "torch.utils._pytree", "torch._dynamo_like", "tsfunc.ops"]
    assert heavy_modules([*light, *heavy]) == heavy


@pytest.mark.parametrize("package", ["bridge/tracers", "bridge/sizes"])
def test_the_index_of_a_package_names_each_of_its_files(package: str) -> None:
    folder = ROOT / "tsfunc" / package
    index = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    named = re.findall(r"``(\w+)``", index)
    files = [file.stem for file in folder.glob("*.py") if file.stem != "__init__"]
    assert sorted(set(named) & set(files)) == sorted(files) and len(named) == len(set(named))
    assert set(named) - set(files) <= {"vmap"}
