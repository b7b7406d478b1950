"""The law of every row for optional arguments: a rule passes each of them on.

The calls are those of ``test_registry.py``, with another value of one argument that has a default:
the other bool, greater and smaller numbers, other strings. Calls that torch refuses are left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from torch import Tensor

from tests.ops.harness import check, overload
from tests.ops.test_registry import APART, ROWS, seeded_calls

# Arguments that are not changed, by operator, and the reason.
KEPT: Mapping[tuple[str, str], str] = {
    ("aten::_embedding_bag_forward_only", "include_last_offset"): "sizes of results for backward",
    (
        "aten::_new_zeros_with_same_feature_meta",
        "self_num_batch_dims",
    ): "a count of dims",
    ("aten::_weight_norm_interface", "dim"): "the kernel does not check that the norms fit",
    ("aten::_masked_softmax", "mask_type"): "masks of other kinds have other shapes",
    ("aten::to.dtype", "memory_format"): "the rule takes calls with the default alone",
}
# Values of arguments that are strings; each operator refuses most of them.
STRINGS = ("ortho", "forward", "lower", "midpoint", "tanh", "trunc", "floor", "U", "L")
Changed = tuple[list[Any], dict[str, Any]]


def other_values(argument: Any) -> Iterator[Any]:
    """Return other values of an argument that has a default."""
    default, kind = argument.default_value, str(argument.real_type)
    if "ScalarType" in kind:
        return
    if isinstance(default, bool):
        yield not default
    elif isinstance(default, int):
        yield from (default + 1, default - 1)
    elif isinstance(default, float):
        yield from (default * 2 + 0.25, default / 2)
    elif "str" in kind:
        yield from STRINGS
    elif default is None:
        kind = kind.removeprefix("Optional[").removesuffix("]")
        values: dict[str, tuple[Any, ...]] = {
            "bool": (True, False), "float": (0.5, 2.0), "number": (0.5, 2.0), "int": (0, 1, -1),
            "SymInt": (0, 1, -1),
        }  # fmt: skip
        yield from values.get(kind, ())


def changed_calls(name: str, args: list[Any], kwargs: dict[str, Any]) -> Iterator[Changed]:
    """Return the calls with another value of one argument."""
    arguments = overload(name)._schema.arguments
    for i, argument in enumerate(arguments):
        # Defaults that are lists can't be read.
        with contextlib.suppress(RuntimeError):
            if not argument.has_default_value() or (name, argument.name) in KEPT:
                continue
            defaults = [other.default_value for other in arguments[len(args) : i]]
            for value in other_values(argument):
                if argument.kwarg_only or argument.name in kwargs:
                    yield list(args), {**kwargs, argument.name: value}
                else:
                    yield [*args[:i], *defaults, value, *args[i + 1 :]], kwargs


@pytest.mark.filterwarnings("ignore")  # torch warns about deprecated operators
@pytest.mark.parametrize("name", sorted(ROWS - APART))
def test_a_rule_passes_optional_arguments_on(name: str) -> None:
    op = overload(name)
    for args, kwargs in seeded_calls(name)[:2]:
        for changed, named in changed_calls(name, args, kwargs):
            try:
                op(*(x.clone() if isinstance(x, Tensor) else x for x in changed), **named)
            except (RuntimeError, IndexError, TypeError, ValueError):
                continue
            check(op, *changed, **named)
