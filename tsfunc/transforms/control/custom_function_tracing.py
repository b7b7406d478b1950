"""Functions with custom rules, traced into graphs: the file form of a call of user Python.

NOTE [functions in files]
A call of an ``autograd.Function``, or of a function with a custom rule, is one node of a program,
which runs the user's Python. When the program is saved, the function and its rules are each traced
into a graph (``program/files/callees.py``), as a specialized function is, with the named dims of
the program. A rule whose control flow depends on data, or on sizes beyond the promises of the
descriptors, has no file form. A rule is traced for a call that requests all derivatives: by all
tensors with a differentiable dtype, with cotangents and tangents for all such results. If some are
missing when the program runs, zeros are passed instead.
"""

from __future__ import annotations

from typing import Any

from tsfunc.program.files.callees import CalleeWriter, TracedCallee
from tsfunc.transforms.control.custom_function_graphs import Tracing
from tsfunc.transforms.control.custom_function_methods import Methods
from tsfunc.transforms.control.custom_function_rules import solution, with_jvp, with_vjp, with_vmap
from tsfunc.transforms.control.functions import PythonCallee
from tsfunc.transforms.custom_jvp import custom_jvp
from tsfunc.transforms.custom_rules import RuleCall
from tsfunc.transforms.custom_vjp import custom_vjp
from tsfunc.transforms.custom_vmap import custom_vmap
from tsfunc.transforms.equations import Solved


def traced_callee(callee: PythonCallee, callees: CalleeWriter) -> TracedCallee:
    """Return a function of the user as graphs.

    Args:
        callee: the function.
        callees: the functions of the program that calls it.

    Raises:
        NoFileForm: a part of the function can't be traced.
    """
    function, batched = callee.function, not callees.batched
    tracing = Tracing(callee, callees.bounds, callees.sizes, callees.described)
    if function is custom_vjp.kind:
        return with_vjp(tracing)
    if function is custom_jvp.kind:
        return with_jvp(tracing)
    if function is custom_vmap.kind:
        return with_vmap(tracing, batched)
    if function is Solved:
        return solution(tracing)
    return Methods(tracing).traced(batched)


def key_of(callee: PythonCallee) -> Any:
    """Return a key that identifies a function with its static arguments within a program."""
    function, leaves = callee.function, [*callee.leaves]
    tree: Any = callee.tree
    if leaves and isinstance(leaves[0], RuleCall):
        call = leaves.pop(0)
        function = function, call.rule, tuple(call.places), call.count, tuple(call.sized)
        leaves += call.leaves
        tree = tree, call.tree, len(call.closed)
    return (
        function, tree, tuple(map(_static_key, leaves)), tuple(callee.types),
        tuple(callee.numbers), tuple(callee.places),
    )  # fmt: skip


def _static_key(leaf: Any) -> Any:
    """Return the key of a static argument, different for equal numbers of different types."""
    if leaf is None or isinstance(leaf, bool | int | float | complex | str):
        return type(leaf), repr(leaf)
    return id(leaf)
