"""``tsfunc.ops.lookup``: the catalogue entry of one of torch's operators or a custom operator."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from tsfunc.errors import UnknownOperatorError
from tsfunc.ops.catalogue.facts import Facts
from tsfunc.ops.catalogue.operator_table import Classifier, Line, read_table
from tsfunc.ops.catalogue.reader import reader
from tsfunc.ops.catalogue.trial import Evidence, Trial
from tsfunc.ops.registry import Category, Rule, find
from tsfunc.user_code import code_location


@dataclass(frozen=True)
class OperatorEntry:
    """The catalogue entry of one operator.

    Attributes:
        name: the dispatcher's name, ``aten::add.Tensor``.
        category: how the shapes of its results follow from those of its arguments.
        source: the reason for the category: a rule, a decision, or the operator that it follows.
        facts: facts about its arguments and results.
        evidence: the ranks that each tensor argument accepted in trial calls.
        rule: its batching rule, or None if vmap runs it by its decomposition, by its functional
            form, or in a loop.
        file: the file of the rule, or the empty string.
        line: the line of the rule, or 0.
    """

    name: str
    category: Category
    source: str
    facts: Facts
    evidence: Evidence
    rule: Rule | None
    file: str
    line: int


def lookup(operator: Any) -> OperatorEntry:
    """Return the catalogue entry of an operator: its shape category, facts and batching rule.

    torch's operators are in a table. A custom operator, or one that is not in the table, gets its
    category from its schema, its tags and its fake kernel, and its source says so.

    Args:
        operator: a dispatcher name (``"aten::add.Tensor"``; a default overload has no suffix), an
            overload (``torch.ops.aten.add.Tensor``), or the result of ``torch.library.custom_op``.

    Raises:
        UnknownOperatorError: torch has no operator of this name; the message lists similar names.

    Example:
        >>> import tsfunc
        >>> entry = tsfunc.ops.lookup("aten::add.Tensor")
        >>> entry.category.value, entry.source, entry.facts.result.value
        ('TensorIterator', 'tag: pointwise', 'broadcast')
        >>> tsfunc.ops.lookup(torch.ops.aten.native_dropout.default).facts.random
        True
        >>> tsfunc.ops.lookup("aten::add.Tensr")
        Traceback (most recent call last):
        ...
        tsfunc.errors.UnknownOperatorError: lookup('aten::add.Tensr'): torch has no operator of this
        name. Similar names are: aten::add.Tensor, aten::add_.Tensor, aten::div.Tensor.

    Source:
        The categories are those of E. Z. Yang's "A brief taxonomy of PyTorch operators by shape
        behavior" (2020).
    """
    name = operator if isinstance(operator, str) else reader().name(operator)
    line = read_table().get(name) or _outside_of_the_table(name)
    if line is None:
        raise UnknownOperatorError(_unknown_message(operator, name))
    row = find(name)
    category, source = line.category, line.source
    rule = row.rule if row is not None else reader().vmap_rule(name)
    if row is not None and row.category is not None:
        category, source = row.category, f"registered at {row.source}"
    file, number = ("", 0) if rule is None else code_location(rule)
    return OperatorEntry(name, category, source, line.facts, line.evidence, rule, file, number)


_found: dict[str, Line] = {}


def _outside_of_the_table(name: str) -> Line | None:
    """Classify an operator outside of the table: a custom one, or one of another torch release."""
    if name not in _found:
        signature = reader().signature(name)
        if signature is None:
            return None
        evidence = {name: line.evidence for name, line in read_table().items()}
        fake = reader().fake(name)
        if fake:
            evidence[name] = Trial(signature, "meta").evidence()
        line = Classifier(evidence).line(name)
        if line is None or (fake and not line.evidence.tried):
            return line  # a fake kernel can still be registered
        _found[name] = line
    return _found[name]


def overload_names(name: str) -> list[str]:
    """Return the names of an operator's overloads; an empty list for an unknown operator."""
    return sorted(signature.name for signature in reader().overloads(name))


def _unknown_message(operator: Any, name: str) -> str:
    start = f"lookup({operator!r}): torch has no operator of this name."
    overloads = overload_names(name)
    if overloads:
        return f"{start} It has these overloads: {', '.join(overloads)}."
    every = reader().names("")
    if "::" not in name and (f"aten::{name}" in every or any(reader().overloads(f"aten::{name}"))):
        return f"{start} Names begin with a namespace: aten::{name}."
    similar = difflib.get_close_matches(name, every, n=3, cutoff=0.5)
    if similar:
        return f"{start} Similar names are: {', '.join(similar)}."
    return f"{start} A custom operator must be defined first."


def category_of(name: str) -> Category | None:
    """Return the category of an operator by its dispatcher name, or None.

    The result is None if torch has no such operator.
    """
    line = read_table().get(name) or _outside_of_the_table(name)
    row = find(name)
    if row is not None and row.category is not None:
        return row.category
    return line.category if line is not None else None
