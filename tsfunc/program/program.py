"""Programs as users see them: the data of a program, and the methods by which they go on from it.

Files, pages and exports take a ``ProgramData`` (``graphs/data.py``) and do not import this module,
so that ``Program`` can import them.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.fx

from tsfunc._text import count_text
from tsfunc.errors import MalformedProgramError
from tsfunc.program.graphs.codegen import generate
from tsfunc.program.graphs.data import ProgramData
from tsfunc.program.graphs.graph_module import graph_module
from tsfunc.program.graphs.properties import ProgramProperties, draw, properties_of
from tsfunc.program.graphs.torch_operators import in_torch_operators
from tsfunc.program.guarding.call_spec import conditions_among
from tsfunc.program.passes.verify import verify
from tsfunc.user_code import folded_class


@folded_class
@dataclass(frozen=True, eq=False, repr=False)
class Program(ProgramData):
    """A traced function.

    A program is valid for calls that look like the one it was traced for, with any sizes of named
    dims. Its operators are those that the user called, before autograd is applied, so the program
    can be differentiated, vmapped and traced as the function itself.

    Attributes:
        graph: its operators, as a torch.fx graph; it has an input for each tensor among the
            call's flattened arguments, in order, then one for each number that is an input.
        inputs: the index of each of the graph's inputs among the flattened arguments; larger
            indices are tensors that are read of objects among the arguments.
        lifted: the tensors from outside of the function that it reads at every call, by
            their names in the graph and the source.
        out_tree: the structure of its results.
        source: the Python that it runs as; ``str`` returns it with comments.
        run: takes the flattened arguments and returns the flattened results.
        constants: the names of the lifted tensors that constant folding has computed, or that
            ``torch.tensor(data)`` has made in the function.
        updates: the assignments that it ends with; the graph's last results are their tensors.
        call_spec: the assumptions about its arguments; None if they were not recorded.
        signature: the signature of the function; None if it was not recorded.
        descriptors: the assumptions by parameter name, as :func:`specialize` takes them.
        guards: the facts that hold in every call that it serves; printed, one line each;
            ``print`` shows all of them.
        argument_paths: the path of each flattened argument, from the name of a parameter.
        trace_guards: those among the guards that are on other facts about its arguments than types
            and sizes.
        looks_at_grad: True if the function has read ``requires_grad`` of a tensor; if not, the
            program is valid for any ``requires_grad``.
        attributes: the attributes of tensors that the function has read, ``grad`` and the user's
            own, and the closed-over numbers that are inputs.
        state: the module's names of the tensors that it reads from outside.
        closure_guards: the guards of later calls beyond their arguments, and the values read from
            outside; None if they were not recorded.
        numbers: the numbers that it has read from containers and objects outside, by the user's
            spelling; the type of those that are inputs.
        larger_minima: the named dims that have a larger minimum in it: NOTE [small sizes] in
            ``constraints``.
    """

    @classmethod
    def of(cls, data: ProgramData) -> Program:
        """Return the program with the data of a file."""
        return cls(**{field.name: getattr(data, field.name) for field in fields(data)})

    def properties(self) -> ProgramProperties:
        """Return the dtype, sizes, device, layout and ``requires_grad`` of each value.

        Returns:
            A mapping from the name of the value in the printed program to its
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

        The module takes the graph's inputs, which are the tensors among the flattened arguments, in
        order, and returns a tuple of the flattened results. The tensors that the program reads from
        outside are its parameters and buffers. Control flow uses torch's operators
        ``torch.ops.higher_order.cond``, ``while_loop``, ``scan``, ``map_impl`` and
        ``associative_scan``, with bodies as submodules, if torch has such an operator.
        """
        return in_torch_operators(graph_module(self.name, self.graph, self.lifted))

    def draw(self) -> str:
        """Return a picture of the graph as SVG text; notebooks show it automatically.

        Example:
            >>> import torch
            >>> from tsfunc import make_graph
            >>> program = make_graph(lambda x: x.sin() + x.cos())(torch.ones(3))
            >>> program.draw().splitlines()[0].startswith("<svg ")
            True
        """
        return draw(self.name, self.graph, self.properties())

    _repr_svg_ = draw

    def show(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        times: Mapping[str, float] | None = None,
    ) -> None:
        """Print the program with its types, lines and guards, or write it as an HTML page.

        The page needs no other file. Its graph can be moved (drag), scaled (wheel), reset (double
        click) and searched. A node shows its code, type, line of the user's code and time. A click
        on a node of control flow opens its bodies.

        Args:
            path: the file of the page; None prints the text.
            times: the seconds of nodes by name, as :meth:`measure` returns them, for the page.

        Example:
            >>> import torch, tsfunc
            >>> f = tsfunc.specialize(lambda x: x.sin())
            >>> _ = f(torch.ones(3))
            >>> f.program.show()  # doctest: +ELLIPSIS
            def program(args):
            ...
            guards:
              x: f32[3] cpu no_grad contiguous
            ...
        """
        if path is None:
            print(f"{self}\nguards:\n" + "\n".join(f"  {line}" for line in self.guards.texts))
            return
        from tsfunc.program.graphs.page import program_page

        Path(path).write_text(program_page(self, times), encoding="utf-8")

    def measure(self, flat: Sequence[Any], repeats: int = 5) -> dict[str, float]:
        """Run the program node by node, and return the least time of each node in seconds.

        Args:
            flat: the flattened arguments, and the other values that the program is called with.
            repeats: the number of runs.

        Example:
            >>> import torch
            >>> from tsfunc import make_graph
            >>> program = make_graph(lambda x: x.sin() + 1)(torch.ones(3))
            >>> sorted(program.measure([torch.ones(3)]))
            ['add_tensor', 'sin_default']
        """
        return node_times(self, flat, repeats)

    def to_exported_program(self) -> torch.export.ExportedProgram:
        """Return the program as a ``torch.export.ExportedProgram``.

        Returns:
            An exported program with the parameters of the function, whose named dims are dynamic.
            torch.export's tools work on it (``module()``, ``torch.export.save``,
            ``run_decompositions()``).

        Raises:
            ExportError: torch.export does not support a part of the program: objects as arguments,
                control flow without a torch operator, containers that are unknown to torch's
                pytrees.

        Example:
            >>> import torch
            >>> from tsfunc import MetaTensorType, specialize
            >>> f = specialize(lambda x: x.sin(), {"x": MetaTensorType(["n", 3])})
            >>> _ = f(torch.ones(4, 3))
            >>> f.program.to_exported_program().module()(torch.zeros(7, 3)).shape
            torch.Size([7, 3])
        """
        from tsfunc.program.graphs.exporting import export_program

        return export_program(self)

    def verify(self) -> None:
        """Check that the program is well formed.

        Every value is defined before it is used. Every operator gets the arguments that its schema
        requires, and returns the recorded types and shapes. The numbers of inputs and results are
        those of the program.

        Raises:
            MalformedProgramError: the program is malformed; the message names the value.
        """
        placeholders = sum(node.op == "placeholder" for node in self.graph.nodes)
        if placeholders != len(self.inputs):
            raise MalformedProgramError(
                f"{self.name}: expected a graph of {count_text(len(self.inputs), 'input')}, "
                f"as the program has, got {placeholders}."
            )
        results = [len(node.args[0]) for node in self.graph.nodes if node.op == "output"]
        expected = self.out_tree.num_leaves + sum(len(update.slots()) for update in self.updates)
        if results and results[-1] != expected:
            raise MalformedProgramError(
                f"{self.name}: expected a graph of {count_text(expected, 'result')}, "
                f"as the program has, got {results[-1]}."
            )
        constraints = [condition.constraint for condition in conditions_among(self.trace_guards)]
        verify(self.graph, self.lifted, self.name, constraints)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that :func:`~tsfunc.load` reads: this program, and the calls it serves.

        Args:
            path: the path of the file; an existing file is replaced when the new one is complete.

        Raises:
            ValueError: the program has a value that a file can't hold.

        Example:
            >>> import os, tempfile, torch, tsfunc
            >>> f = tsfunc.specialize(lambda x: x.sin())
            >>> _ = f(torch.ones(3))
            >>> path = os.path.join(tempfile.mkdtemp(), "sin.tsf")
            >>> f.program.save(path)
            >>> tsfunc.load(path)(torch.zeros(3))
            tensor([0., 0., 0.])
        """
        # A local import: files need safetensors, which `import tsfunc` does not require.
        from tsfunc.program.files.archive import replace_file
        from tsfunc.program.files.saved_functions import function_bytes, program_to_save

        replace_file(Path(path), function_bytes(program_to_save(self)))

    def __reduce__(self) -> Any:
        """Pickle the program as its file."""
        from tsfunc.program.files.saved_functions import pickle_function, program_to_save

        return Program._unpickled, pickle_function(program_to_save(self))

    @classmethod
    def _unpickled(cls, data: bytes, classes: Mapping[str, type]) -> Program:
        """Return the program of a file with one program."""
        from tsfunc.program.files.saved_functions import read_function

        (answer,) = read_function(io.BytesIO(data), "pickle", classes, None).answers
        return cls.of(answer.program)

    def __copy__(self) -> Program:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        """Return a program with the same operators, and copies of the tensors that they read."""
        lifted = {name: copy.deepcopy(tensor, memo) for name, tensor in self.lifted.items()}
        source, run = generate(self.name, self.graph, self.inputs, lifted, self.updates)
        state = copy.deepcopy(self.state, memo)
        return replace(self, lifted=lifted, source=source, run=run, state=state)

    def __repr__(self) -> str:
        inputs = ", ".join(self.descriptors)
        operators = sum(node.op == "call_function" for node in self.graph.nodes)
        return (
            f"<program {self.name}({inputs}), {count_text(operators, 'operator')}, "
            f"{count_text(len(self.guards.texts), 'guard')}>"
        )


# --- the time of each node


def node_times(program: ProgramData, flat: Sequence[Any], repeats: int = 5) -> dict[str, float]:
    """Run a program node by node, and return the least time of each node in seconds.

    The sum is more than the time of the program, which runs without the measurement. Updates of
    the program are not made.

    Args:
        flat: the values that the program is called with.
    """
    best: dict[str, float] = {}
    for _ in range(repeats):
        for name, seconds in _run_program(program, flat).items():
            best[name] = min(seconds, best.get(name, seconds))
    return best


def _run_program(program: ProgramData, flat: Sequence[Any]) -> dict[str, float]:
    values: dict[torch.fx.Node, Any] = {}
    positions = iter(program.inputs)
    times: dict[str, float] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = flat[next(positions)]
        elif node.op == "get_attr":
            values[node] = program.tensor(node)
        elif node.op == "call_function":
            args = torch.fx.map_arg(node.args, values.__getitem__)
            kwargs = torch.fx.map_arg(node.kwargs, values.__getitem__)
            quiet = torch.no_grad() if node.meta.get("no_grad") else contextlib.nullcontext()
            with quiet:
                _wait()
                start = time.perf_counter()
                values[node] = node.target(*args, **kwargs)
                _wait()
                times[node.name] = time.perf_counter() - start
    return times


def _wait() -> None:
    """Wait for the work of an accelerator."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
