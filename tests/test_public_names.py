"""docs/public.md is the list of public names: the modules and their names agree with it."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import tsfunc

PAGE = (Path(__file__).parents[1] / "docs" / "public.md").read_text()
# Modules whose public names are their ``__all__``, and modules in which all names without an
# underscore are public.
LISTED = ("custom_derivatives debug dispatch ops program rage testing types").split()
BY_NAME = "checkpoint_policies errors pytrees".split()
# A package, or a module directly below the package, whose docstring states that it is private.
PRIVATE = "bridge cli config doctor hooks releases transforms user_code".split()
# Modules inside of public packages that are public themselves.
PARTS = {"testing.strategies", "testing.pytest_plugin"}


def modules() -> list[str]:
    return [m.name for m in pkgutil.walk_packages(tsfunc.__path__, "tsfunc.")]


def test_the_page_names_the_public_modules() -> None:
    bullets = PAGE.partition("Everything else is private")[0]
    named = set(re.findall(r"`tsfunc\.(\w+)`", bullets)) - {"map", "__all__"}
    assert named == {*LISTED, *BY_NAME}


def test_modules_of_the_package_are_public_or_say_that_they_are_private() -> None:
    found = {m.name for m in pkgutil.iter_modules(tsfunc.__path__) if not m.name.startswith("_")}
    transforms = {"custom_derivatives", "checkpoint_policies", "debug"}
    assert found == {*LISTED, *BY_NAME, *PRIVATE} - transforms
    for name in PRIVATE:
        doc = importlib.import_module(f"tsfunc.{name}").__doc__ or ""
        assert "private" in doc.lower(), f"the docstring of tsfunc.{name} should say it is private"
        assert f"`tsfunc.{name}`" in PAGE, f"docs/public.md should name tsfunc.{name} as private"


@pytest.mark.parametrize("name", LISTED)
def test_public_rooms_list_their_names(name: str) -> None:
    module = getattr(tsfunc, name)
    listed = module.__all__
    assert len(listed) == len(set(listed))
    assert not [each for each in listed if each.startswith("_")]
    for each in listed:
        assert getattr(module, each) is not None
    hidden = {each for each in dir(module) if not each.startswith("_")} - {*listed}
    assert not hidden, f"dir(tsfunc.{name}) has names that are not in its __all__"


def test_dir_is_the_public_names() -> None:
    names = {name for name in dir(tsfunc) if not name.startswith("_")}
    assert names == {*tsfunc.__all__, "map", *LISTED, *BY_NAME}


@pytest.mark.parametrize("name", [m for m in modules() if m.count(".") > 1])
def test_a_module_inside_of_a_package_is_private(name: str) -> None:
    """Packages state it for their modules; a public one is listed here and in the page."""
    package, inner = name.split(".")[1], name.partition(".")[2]
    if inner in PARTS:
        assert f"`tsfunc.{inner}`" in PAGE
        return
    doc = importlib.import_module(f"tsfunc.{package}").__doc__ or ""
    assert "private" in doc.lower(), f"the docstring of tsfunc.{package} has no word of private"


def test_modules_of_public_functions() -> None:
    """A name in ``__all__`` is defined in the package, or re-exported from torch."""
    for name in tsfunc.__all__:
        value = getattr(tsfunc, name)
        if not isinstance(value, ModuleType):
            owner = type(value).__module__ if name == "config" else value.__module__
            assert owner.startswith(("tsfunc.", "torch.")), (name, owner)
