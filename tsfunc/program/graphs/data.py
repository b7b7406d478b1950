"""The data of a program: a graph of operators, and the straight-line Python that it runs as."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
import torch.fx

from tsfunc.program.closure.closure_guards import ClosureGuards
from tsfunc.program.closure.results import ModuleState, Update
from tsfunc.program.graphs.codegen import print_graph
from tsfunc.program.guard import Guards
from tsfunc.program.guarding.call_spec import CallSpec, descriptors_of
from tsfunc.program.guarding.trace_guards import TraceGuard
from tsfunc.types import Dim


@dataclass(frozen=True, eq=False, repr=False)
class ProgramData:
    """The data of a program, from which files, pages, exports and backends are made.

    ``Program``, in ``program/program.py``, describes the attributes, and adds the methods by which
    a user goes on to these.
    """

    name: str
    graph: torch.fx.Graph
    inputs: tuple[int, ...]
    lifted: Mapping[str, torch.Tensor]
    out_tree: optree.PyTreeSpec
    source: str
    run: Callable[[Sequence[Any]], Sequence[Any]]
    constants: frozenset[str] = frozenset()
    updates: tuple[Update, ...] = ()
    call_spec: CallSpec | None = None
    signature: inspect.Signature | None = None
    guards: Guards = field(default_factory=Guards)
    argument_paths: Mapping[int, tuple[Any, ...]] = field(default_factory=dict)
    trace_guards: tuple[TraceGuard, ...] = ()
    looks_at_grad: bool = True
    attributes: tuple[str, ...] = ()
    state: ModuleState = field(default_factory=ModuleState)
    closure_guards: ClosureGuards | None = None
    larger_minima: Mapping[str, Dim] = field(default_factory=dict)
    numbers: Mapping[str, int | float | type] = field(default_factory=dict)

    @functools.cached_property
    def descriptors(self) -> Mapping[str, Any]:
        """The assumptions about the arguments by parameter name, as ``specialize`` takes them."""
        if self.call_spec is None or self.signature is None:
            return {}
        return descriptors_of(self.call_spec, self.signature)

    @property
    def advice_about_attributes(self) -> str:
        """The remedy for a program whose attributes a file or an exported program can't hold."""
        if any(attribute.endswith(".grad") for attribute in self.attributes):
            return (
                "Write the training step as a function of the parameters and of the optimizer's "
                "state (tsfunc.grad, tsfunc.functional_optimizer), which returns the new ones."
            )
        return "Pass the attribute's value as an argument."

    def __call__(self, flat: Sequence[Any]) -> Any:
        """Run the program on flattened arguments, and return its results in their structure."""
        return optree.tree_unflatten(self.out_tree, self.run(flat))

    def tensor(self, node: torch.fx.Node) -> torch.Tensor:
        """Return the closed-over tensor that a ``get_attr`` node reads."""
        return self.lifted[str(node.target)]

    def __str__(self) -> str:
        return print_graph(self.name, self.graph, self.inputs, self.lifted, self.updates)
