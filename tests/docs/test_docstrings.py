"""Docstrings of public names have arguments, results, errors, an example and the source."""

from __future__ import annotations

import builtins
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

import tsfunc

PUBLIC = [getattr(tsfunc, name) for name in (*tsfunc.__all__, "map")]
FUNCTIONS = [each for each in PUBLIC if inspect.isfunction(each)]
CLASSES = [each for each in PUBLIC if inspect.isclass(each)]
SECTIONS = ("Args", "Returns", "Raises", "Example", "Attributes")
# A function of JAX, torch or another library, a proposal, or a paper with its year.
SOURCE = re.compile(r"(``|`)?\b(jax|torch|optax|tf)\.\w+|JAX|^Source: |\(\d{4}\)", re.M)


def sections_of(doc: str) -> dict[str, str]:
    """Return the text of each section by its title; the text before them has an empty title."""
    sections = {"": ""}
    title = ""
    for line in doc.splitlines():
        heading = re.fullmatch(r"(\w+):", line)
        if heading and heading[1] in SECTIONS:
            title = heading[1]
        elif line and not line.startswith(" "):
            title = ""
        sections[title] = f"{sections.get(title, '')}{line}\n"
    return sections


def entries_of(section: str) -> list[str]:
    """Return the names before the colons of a section's entries."""
    heads = re.findall(r"^    (\w+(?:, \w+)*):(?=\s)", section, re.M)
    return [name for head in heads for name in head.split(", ")]


def lacks(doc: str, parameters: list[str], *, returns: bool, raises: bool) -> list[str]:
    """Return the parts that a docstring lacks, for a function or class with these parameters."""
    sections = sections_of(doc)
    missing = []
    entries = entries_of(sections.get("Args", ""))
    if entries != parameters:
        missing.append(f"Args: expected {parameters}, got {entries}")
    if returns and "Returns" not in sections:
        missing.append("Returns")
    raised = entries_of(sections.get("Raises", ""))
    if raises and not raised and "raises no errors of its own" not in sections[""]:
        missing.append("Raises")
    for name in raised:
        kind = getattr(builtins, name, None) or getattr(tsfunc.errors, name, None)
        if not (inspect.isclass(kind) and issubclass(kind, BaseException)):
            missing.append(f"Raises: {name} is not an exception of Python or of tsfunc.errors")
    if not re.search(r">>> |^Example: .*docstring", doc, re.M):
        missing.append("Example")
    if not SOURCE.search(sections[""]):
        missing.append("the source: a function of JAX or torch, a proposal or a paper")
    return missing


def public(parameters: Iterable[str]) -> list[str]:
    return [name for name in parameters if not name.startswith("_")]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_function_documents_its_arguments_results_errors_example_and_source(
    function: Callable[..., Any],
) -> None:
    doc, signature = inspect.getdoc(function), inspect.signature(function)
    assert doc
    returns = signature.return_annotation not in (None, "None")
    assert lacks(doc, public(signature.parameters), returns=returns, raises=True) == []


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_class_documents_its_arguments_errors_example_and_source(cls: type) -> None:
    """It has attributes in place of arguments if it names a function that makes the class."""
    doc = inspect.getdoc(cls)
    assert doc
    own = not re.search(r"\b(made by|result of) :(func|meth):", doc)
    entries = entries_of(sections_of(doc).get("Args", ""))
    parameters = public(inspect.signature(cls).parameters) if own else []
    if parameters == ["args", "kwargs"]:  # for overloads, which a signature does not show
        parameters = entries
    assert lacks(doc, parameters, returns=False, raises=own) == []


def test_a_docstring_that_lacks_a_part_is_noticed() -> None:
    doc = inspect.getdoc(tsfunc.grad) or ""
    parameters = ["func", "argnums", "has_aux"]
    assert lacks(doc, parameters, returns=True, raises=True) == []
    assert lacks(doc, parameters[:2], returns=True, raises=True)[0].startswith("Args")
    for title in ("Returns", "Raises", "Example"):
        shorter = re.sub(rf"^{title}:\n(?:    .*\n)*", "", doc, flags=re.M)
        assert lacks(shorter, parameters, returns=True, raises=True) == [title]
    for before, missing in (("Corresponds to", "the source"), ("RuntimeError:", "Raises")):
        changed = re.sub(rf"{before}.*", "NoError:" if ":" in before else "", doc)
        assert lacks(changed, parameters, returns=True, raises=True)[0].startswith(missing)
