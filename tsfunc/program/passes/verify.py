"""Verification of a program's graph.

In a well-formed graph every value is defined before its use, every argument is of the kind that
its operator takes, and every result has the type and shape that its metadata states.

``Program.verify()`` runs the verification. With ``TSFUNC_VERIFY=1`` in the environment, as in the
project's own tests, every graph is verified after the trace and after each pass.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import ControlFlow
from tsfunc.bridge.trace.rerun import FakeRerun, difference
from tsfunc.bridge.tracers.operators import TorchOperator
from tsfunc.errors import MalformedProgramError
from tsfunc.ops.catalogue.signature import Argument


def verify(
    graph: torch.fx.Graph,
    lifted: Collection[str] | None,
    label: str,
    constraints: Sequence[str] = (),
) -> None:
    """Verify a graph, and the graphs of the control-flow bodies in it.

    Args:
        graph: a traced graph, whose nodes have fake values.
        lifted: the names that ``get_attr`` nodes may have; None: any.
        label: the name of the graph in errors.
        constraints: constraints on the named dims that hold in every call. The symbols of a trace
            have these constraints already; those of a graph from a file do not.

    Raises:
        MalformedProgramError: the graph is malformed; the message names the value.
    """
    check = _Check(graph, lifted, label)
    check.definitions()
    check.kinds()
    check.results(constraints)
    for node in graph.nodes:
        if isinstance(node.target, ControlFlow):
            for body in node.target.bodies:
                verify(body.graph, (), f"{label}, {node.name}, {body.name}", constraints)


class _Check:
    def __init__(self, graph: torch.fx.Graph, lifted: Collection[str] | None, label: str) -> None:
        self.nodes = list(graph.nodes)
        self.lifted = lifted
        self.label = label

    def _fail(self, node: torch.fx.Node, problem: str) -> NoReturn:
        location = node.meta.get("location")
        at = f" (at {location})" if location is not None else ""
        raise MalformedProgramError(f"{self.label}: %{node.name}{at}: {problem}")

    def definitions(self) -> None:
        """Check that names are unique, definitions precede uses, and one output comes last."""
        defined: set[torch.fx.Node] = set()
        names: set[str] = set()
        for node in self.nodes:
            for arg in node.all_input_nodes:
                if arg not in defined:
                    self._fail(node, f"it uses %{arg.name}, which is not defined before it.")
            if node.name in names:
                self._fail(node, "another value has the same name.")
            if node.op not in ("placeholder", "get_attr", "call_function", "output"):
                self._fail(node, f"a program has no {node.op} nodes.")
            missing = self.lifted is not None and str(node.target) not in self.lifted
            if node.op == "get_attr" and missing:
                self._fail(node, f"the program has no tensor {node.target}.")
            if node.op == "output" and node is not self.nodes[-1]:
                self._fail(node, "there is something after the output.")
            defined.add(node)
            names.add(node.name)
        if not self.nodes or self.nodes[-1].op != "output":
            raise MalformedProgramError(
                f"{self.label}: expected an output node at its end, got none."
            )

    def kinds(self) -> None:
        """Check that each operator gets the arguments that its schema requires."""
        for node in self.nodes:
            op = node.meta.get("op")
            if not isinstance(op, TorchOperator):
                continue
            if op.overload is not node.target:
                self._fail(node, f"its operator is {op.name}, but it calls {node.target}.")
            try:
                arguments = list(op.signature.bind(node.args, node.kwargs))
            except TypeError as error:
                self._fail(node, f"{error}.")
            for argument, value in arguments:
                if not _is_kind(argument, value):
                    self._fail(
                        node,
                        f"{op.name}: expected a {argument.type} for {argument.name}, got "
                        f"{value!r}.",
                    )
            names = {argument.name for argument, _ in arguments}
            for argument in op.signature.arguments:
                if argument.required and argument.name not in names:
                    self._fail(node, f"{op.name}: expected an argument {argument.name}, got none.")

    def results(self, constraints: Sequence[str]) -> None:
        """Check that each operator, run on fake tensors, returns results as in the metadata."""
        tensors = [n.meta["val"] for n in self.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        rerun = FakeRerun(tensors[0] if tensors else None)
        rerun.assume(constraints)
        values: dict[torch.fx.Node, Any] = {}
        unknown: set[torch.fx.Node] = set()
        for node in self.nodes:
            if node.op == "output":
                return
            said = node.meta.get("val")
            if _is_unknown(node) or not unknown.isdisjoint(node.all_input_nodes):
                values[node] = node.meta.get("number") if said is None else rerun.like(said)
                if values[node] is None:
                    unknown.add(node)
                continue
            if node.op in ("placeholder", "get_attr"):
                number = node.meta.get("number")
                values[node] = number if said is None else rerun.like(said)
                continue
            values[node] = result = self._run_again(rerun, node, values)
            if isinstance(said, torch.Tensor):
                if not isinstance(result, torch.Tensor):
                    self._fail(node, f"it is a {type(result).__name__}, not a tensor.")
                unlike = difference(result, said)
                if unlike is not None:
                    self._fail(node, f"{unlike}.")

    def _run_again(
        self, rerun: FakeRerun, node: torch.fx.Node, values: dict[torch.fx.Node, Any]
    ) -> Any:
        if isinstance(node.target, ControlFlow):
            return dict(_indexed_results(node, rerun))
        if _reads_data(node):  # another run would find other data-dependent sizes
            said = node.meta.get("val")
            if said is None and "number" not in node.meta:
                return dict(_indexed_results(node, rerun))
            return node.meta["number"] if said is None else rerun.like(said)
        args = torch.fx.map_arg(node.args, values.__getitem__)
        kwargs = torch.fx.map_arg(node.kwargs, values.__getitem__)
        target: Any = node.target
        try:
            return rerun.call(target, args, kwargs)
        except Exception as error:
            self._fail(node, f"it can't be computed: {type(error).__name__}: {error}")


def _is_unknown(node: torch.fx.Node) -> bool:
    """True if a value has no metadata: files do not store data-dependent sizes."""
    if "number" in node.meta or node.meta.get("val") is not None or not node.users:
        return False
    return not any(user.target is operator.getitem for user in node.users)


def _reads_data(node: torch.fx.Node) -> bool:
    """True if the sizes of the results, or numbers among them, depend on data.

    An operator whose results follow from data that the trace has already seen does not count.
    """
    op = node.meta.get("op")
    tagged = isinstance(op, TorchOperator) and torch.Tag.dynamic_output_shape in op.overload.tags
    return tagged or bool(node.meta.get("reads_data"))


def _indexed_results(node: torch.fx.Node, rerun: FakeRerun) -> Iterator[tuple[Any, Any]]:
    """Yield the results of a call with several results, by index, from the metadata."""
    for user in node.users:
        if user.target is operator.getitem:
            said = user.meta.get("val")
            yield user.args[1], user.meta.get("number") if said is None else rerun.like(said)


_NUMBERS = frozenset({
    "int", "float", "bool", "number", "ScalarType", "Layout", "MemoryFormat",
})  # fmt: skip


def _is_kind(argument: Argument, value: Any) -> bool:
    """True if a value in a graph may be passed for an argument."""
    kind = argument.type
    if value is None:
        return kind.endswith("?") or not argument.required or kind == "Any"
    kind = kind.removesuffix("?")
    if kind == "Tensor":
        # torch converts numbers to tensors.
        return isinstance(value, torch.fx.Node | int | float | complex)
    if kind in ("Tensor[]", "Tensor?[]"):
        return isinstance(value, list | tuple) and all(v is None or _is_tensor(v) for v in value)
    if kind.endswith("[]"):
        items = value if isinstance(value, list | tuple) else [value]
        return not any(_is_tensor(item) or isinstance(item, str) for item in items)
    return not _is_tensor(value) and not (kind in _NUMBERS and isinstance(value, str | list))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
