"""A program: a graph of operators, made to run as straight-line Python."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optree
import torch
import torch.fx

from tsfunc.bridge.sizes.symbols import Condition
from tsfunc.bridge.trace.asked import Asked
from tsfunc.errors import MalformedProgramError
from tsfunc.program.graphs.codegen import generate
from tsfunc.program.graphs.drawing import draw
from tsfunc.program.graphs.fx_module import graph_module
from tsfunc.program.graphs.printing import printed
from tsfunc.program.graphs.properties import ProgramProperties, properties_of
from tsfunc.program.graphs.torch_operators import in_torch_operators
from tsfunc.program.guarding.forms import CallForm
from tsfunc.program.guarding.guard_texts import Guards
from tsfunc.program.passes.verify import verify
from tsfunc.program.reading.module_state import ModuleState
from tsfunc.program.reading.reach import Facts
from tsfunc.program.reading.updates import Update
from tsfunc.types import Dim


@dataclass(frozen=True, eq=False)
class Program:
    """A traced function.

    It holds for calls that look like the one it was traced for, but for the sizes of named dims.
    Its operators are those that the user called, autograd not applied: so it can be
    differentiated, vmapped and traced as the function itself.

    Attributes:
        name: the function's name.
        graph: its operators, as a torch.fx graph; an input for each tensor among the call's
            flattened arguments, in order, then for each number that is one.
        inputs: where each of the graph's inputs stands among the flattened arguments, after which
            come the tensors that are read of objects among them.
        lifted: the tensors from outside of the function that it reads, at every call anew, by
            the names that the graph and the source have for them.
        out_tree: the structure of what it returns.
        source: the Python that it runs as; ``str`` gives that with comments.
        run: takes the flattened arguments and returns the flattened results.
        constants: those of the lifted tensors that the program has computed itself.
        updates: the assignments that it ends with; the graph's last results are their tensors.
        form: what it takes for granted of its arguments, None where there is no record.
        descriptors: the same by parameter name, as :func:`specialize` takes it.
        guards: what is true of every call that it answers, for people: a line each, and ``print``
            shows them all.
        places: for each flattened argument its path, from the name of a parameter.
        conditions: what must hold of the numbers among its inputs.
        asked: what the function has asked of its arguments beside types and sizes.
        looks_at_grad: whether the function has asked which tensors require grad; where it has not,
            the program is the same for any that do.
        attributes: those of tensors among its arguments that the function has read, ``grad`` and
            the user's own.
        groups: the positions of tensors among the arguments, those together that are one; empty
            where the function does not tell.
        state: what the function's module calls the tensors that it reads from outside.
        facts: what later calls are held to beside their arguments, and what is read of it; None
            where there is no record.
        raised: the named dims that have a least size for it: NOTE [sizes at the edge] in ``edges``.
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
    form: CallForm | None = None
    descriptors: Mapping[str, Any] = field(default_factory=dict)
    guards: Guards = field(default_factory=Guards)
    places: Mapping[int, tuple[Any, ...]] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    asked: tuple[Asked, ...] = ()
    looks_at_grad: bool = True
    attributes: tuple[str, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    state: ModuleState = field(default_factory=ModuleState)
    facts: Facts | None = None
    raised: Mapping[str, Dim] = field(default_factory=dict)

    def __call__(self, flat: Sequence[Any]) -> Any:
        """Runs it on flattened arguments, and gives the results their structure."""
        return optree.tree_unflatten(self.out_tree, self.run(flat))

    def tensor(self, node: torch.fx.Node) -> torch.Tensor:
        """The tensor from outside that a ``get_attr`` node stands for."""
        return self.lifted[str(node.target)]

    def properties(self) -> ProgramProperties:
        """What is known of each value: type, sizes, device, layout, whether autograd records.

        Returns:
            A mapping from the name that the value has in the printed program to its
            :class:`~tsfunc.program.graphs.properties.Properties`; ``print`` shows it as a table.

        Example:
            >>> import torch
            >>> from tsfunc import MetaTensorType, specialize
            >>> f = specialize(lambda x: x.sum(1) > 0, {"x": MetaTensorType(["n", 3])})
            >>> _ = f(torch.ones(4, 3))
            >>> print(f.program.properties())
            value            dtype    shape   device  layout   requires_grad  constant  expression
            x                float32  [n, 3]  cpu     strided  False
            sum_dim_int_list float32  [n]     cpu     strided  False
            gt_scalar        bool     [n]     cpu     strided  False
        """
        return properties_of(self.graph, {name: self.lifted[name] for name in self.constants})

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The program as a ``torch.fx.GraphModule``.

        It takes the graph's inputs, which are the tensors among the flattened arguments, in
        order, and returns a tuple of the flattened results. What the program reads from outside
        are its parameters and buffers: the same tensors. Control flow is torch's own, where it
        has such an operator: ``torch.ops.higher_order.cond``, ``while_loop``, ``scan``,
        ``map_impl`` and ``associative_scan``, with bodies that are submodules.
        """
        return in_torch_operators(graph_module(self.name, self.graph, self.lifted))

    def draw(self) -> str:
        """A picture of the graph, as SVG text; notebooks show it by themselves.

        Example:
            >>> import torch
            >>> from tsfunc import make_graph
            >>> program = make_graph(lambda x: x.sin() + x.cos())(torch.ones(3))
            >>> program.draw().splitlines()[0].startswith("<svg ")
            True
        """
        return draw(self.name, self.graph, self.properties())

    _repr_svg_ = draw

    def to_exported_program(self) -> torch.export.ExportedProgram:
        """The program as a ``torch.export.ExportedProgram``.

        Returns:
            One of the function's own parameters, whose named dims are dynamic: torch.export's
            tools work on it (``module()``, ``torch.export.save``, ``run_decompositions()``).

        Raises:
            ExportError: the program has what torch.export has no place for: objects as arguments,
                control flow that torch has no operator for, containers that its pytrees do not
                know.

        Example:
            >>> import torch
            >>> from tsfunc import MetaTensorType, specialize
            >>> f = specialize(lambda x: x.sin(), {"x": MetaTensorType(["n", 3])})
            >>> _ = f(torch.ones(4, 3))
            >>> f.program.to_exported_program().module()(torch.zeros(7, 3)).shape
            torch.Size([7, 3])
        """
        from tsfunc.program.graphs.exporting import exported

        return exported(self)

    def verify(self) -> None:
        """Checks that the program is well formed.

        Every value is defined before it is used, every operator is given what its schema asks
        for, and returns what is known of its result; there are as many inputs and results as the
        program has.

        Raises:
            MalformedProgramError: something is wrong; the message names the value.
        """
        placeholders = sum(node.op == "placeholder" for node in self.graph.nodes)
        if placeholders != len(self.inputs):
            raise MalformedProgramError(
                f"{self.name}: its graph has {placeholders} inputs, the program {len(self.inputs)}."
            )
        results = [len(node.args[0]) for node in self.graph.nodes if node.op == "output"]
        wanted = self.out_tree.num_leaves + sum(len(each.slots()) for each in self.updates)
        if results and results[-1] != wanted:
            raise MalformedProgramError(
                f"{self.name}: its graph has {results[-1]} results, the program {wanted}."
            )
        conditions = () if self.form is None else self.form.conditions
        verify(self.graph, self.lifted, self.name, [each.fact for each in conditions])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that :func:`~tsfunc.load` reads: this program, and the calls it answers.

        Args:
            path: where to; a file that is there is replaced when the new one is whole.

        Raises:
            ValueError: the program has something that a file can't hold.

        Example:
            >>> import os, tempfile, torch, tsfunc
            >>> f = tsfunc.specialize(lambda x: x.sin())
            >>> _ = f(torch.ones(3))
            >>> path = os.path.join(tempfile.mkdtemp(), "sin.tsf")
            >>> f.program.save(path)
            >>> tsfunc.load(path)(torch.zeros(3))
            tensor([0., 0., 0.])
        """
        # Here, and not above: files need safetensors, which `import tsfunc` is to do without.
        from tsfunc.program.files.saving import program_to_save, write

        write(Path(path), program_to_save(self))

    def __reduce__(self) -> Any:
        """Its file form."""
        from tsfunc.program.files.saving import pickled, program_to_save, unpickled

        return unpickled, pickled(program_to_save(self))

    def __copy__(self) -> Program:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        """The same operators, with copies of the tensors that they read."""
        lifted = {name: copy.deepcopy(tensor, memo) for name, tensor in self.lifted.items()}
        source, run = generate(self.name, self.graph, self.inputs, lifted, self.updates)
        state = copy.deepcopy(self.state, memo)
        return replace(self, lifted=lifted, source=source, run=run, state=state)

    def __str__(self) -> str:
        return printed(self.name, self.graph, self.inputs, self.lifted, self.updates)
