"""Programs that are compiled by a backend.

NOTE [compiled programs]
A backend gets the program's graph and sample inputs, as from torch.compile. The tensors from
outside are inputs too, after the others, so that training reaches them. Named dims are symbolic in
the samples. A backend may add guards on them for its own purposes (for example, the size from which
it uses threads). A backend's guard does not restrict the program: for a call that fails the guard,
the graph is compiled again with sizes of that call.

If each operator has to be visible (inside of a transform or a trace, under a dispatch mode), the
program runs as Python, as it does without a backend.

The compiled module computes the values that a program assigns (NOTE [updates] in ``results.py``)
as its last results, and Python code assigns them afterwards.

If compiled code raises an error, the program runs as Python, without its assignments, and raises
the error of the operator itself, at the user's line. An error of a device is not repeated: later
calls of the device may raise it for any operator.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.mesh.agreement import agree_on_program
from tsfunc.bridge.mesh.lowering import DECOMPOSITIONS
from tsfunc.bridge.mesh.mesh_operators import MAP
from tsfunc.bridge.sizes.fake_mode import new_fake_input
from tsfunc.bridge.sizes.fake_results import storage_address
from tsfunc.bridge.sizes.symbols import Symbols
from tsfunc.bridge.trace.compiled_derivatives import (
    call_differentiably,
    refuse_second_derivative,
    without_donated_buffers,
)
from tsfunc.bridge.trace.graph_compilers import (
    Backend,
    CompilerFailed,
    any_wrapped,
    can_run_compiled,
    find_backend,
    inductor,
)
from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.interrupts import restoring_thread_state
from tsfunc.bridge.tracers.random_states import devices_of, drawing_from, states_of
from tsfunc.errors import ExportError
from tsfunc.ops.dims import dense_strides, memory_order, memory_span
from tsfunc.program.closure.results import InputRef
from tsfunc.program.graphs.codegen import generate
from tsfunc.program.graphs.compilable import keep_layouts, make_compilable
from tsfunc.program.graphs.data import ProgramData
from tsfunc.program.graphs.graph_module import graph_module
from tsfunc.program.graphs.number_inputs import (
    NumberResult,
    NumbersAsTensors,
    NumbersRefused,
    number_inputs,
)
from tsfunc.program.graphs.torch_operators import in_torch_operators, left_over, no_operator
from tsfunc.program.guarding.call_spec import CallSpec
from tsfunc.program.passes.effects import Aliases, every_node, is_random, writes
from tsfunc.types import Dim

Run = Callable[[Sequence[Any]], Sequence[Any]]


def resolve(backend: object) -> Backend:
    """Return the backend that a user has passed.

    Raises:
        TypeError: it is not a name or a function.
        ValueError: there is no backend of this name.
    """
    if backend == "inductor":
        return functools.partial(inductor, decompositions=DECOMPOSITIONS)
    if isinstance(backend, str):
        try:
            return find_backend(backend)
        except ValueError as error:
            raise ValueError(f"specialize(backend=...): {error}.") from None
    if not callable(backend):
        raise TypeError(
            f"specialize(backend=...): expected a name, or a function of a torch.fx module and "
            f"example inputs, got {type(backend).__name__}. Names are 'python' (the default), "
            f"'inductor', and those of torch.compiler.list_backends()."
        )
    return backend


class Compiled:
    """The ``run`` of a program that a backend compiles; the constructor compiles one variant.

    Args:
        program: a traced program with its ``call_spec``; it also runs as Python if necessary.
        name: the user's name of the backend, for errors.
        values: the values that the program is about to run on.
        now: False if the first call of the program compiles it.

    Raises:
        ExportError: the backend does not support a part of the program, or can't compile it.
        NumbersRefused: the backend can't take some numbers as inputs of the program.
        ValueError: the backend does not support the device.
    """

    def __init__(
        self,
        program: ProgramData,
        backend: Backend,
        name: str,
        values: Sequence[Any],
        now: bool = True,
    ) -> None:
        self._program, self._backend, self._name = program, backend, name
        outside = [node for node in program.graph.nodes if node.op == "get_attr"]
        self._lifted = [program.tensor(node) for node in outside]
        self._sizes = _named_sizes(program.call_spec)
        indices = number_inputs(program.graph, program.inputs)
        self._tensors = [i for i in program.inputs if i not in indices.values()]
        self._separate = _writes_outside(program.graph)
        self._repeatable = not self._separate and not any(map(is_random, program.graph.nodes))
        self._lock = threading.Lock()
        self._variants: list[tuple[Any, Callable[..., Any]]] = []
        self._module = _module(program)
        self._numbers: Any = None
        if indices:
            if name == "cudagraphs":
                raise NumbersRefused(indices)
            self._numbers = NumbersAsTensors(self._module, program.inputs, name != "inductor")
        self._ints: Mapping[str, int] = self._numbers.ints if indices else {}
        self._outputs = _keep_computed(self._module)
        _check_for_backend(
            program, name, self._module, [*self._input_tensors(values), *self._lifted]
        )
        self._assign = _assignments(program, len(values))
        self._count = program.out_tree.num_leaves
        for node in every_node(program.graph):
            if node.target is MAP:
                agree_on_program(str(node.args[3]), str(node.args[4]))
        if now:
            self.compile_for(values)

    def compile_for(self, values: Sequence[Any]) -> None:
        """Compile the program for values like those of a call, unless a plain call has to do it."""
        if not any_wrapped([*self._input_tensors(values), *self._lifted]):
            self._compile(values)

    @restoring_thread_state
    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        tensors = [*self._input_tensors(values), *self._lifted]
        if not can_run_compiled(tensors) or (self._separate and _share_memory(tensors)):
            return self._program.run(values)
        for holds, call in self._variants:
            if holds is None or holds(self._sizes_of(values)):
                return self._run(call, tensors, values)
        if len(self._variants) >= _MOST:
            return self._program.run(values)
        with self._lock:
            return self._run(self._compile(values), tensors, values)

    def _run(
        self, call: Callable[..., Any], tensors: Sequence[torch.Tensor], values: Sequence[Any]
    ) -> Sequence[Any]:
        inputs_made, numbers = self._numbers(values) if self._numbers is not None else ((), ())
        tensors = [*tensors, *inputs_made]
        if self._ints:
            call = _with_last(call, [values[i] for i in self._ints.values()])
        try:
            if not self._separate:
                once = functools.partial(self._run_uncompiled, values)
                again: Callable[..., Any] = once if self._repeatable else self._refuse
                results = call_differentiably(call, again, tensors)
                return self._results(results, numbers, values)
            results = call(*tensors)
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except Exception:
            self._raise_as_python(values)
            raise
        refuse_second_derivative(results, self._refuse_derivative)
        return self._results(results, numbers, values)

    def _raise_as_python(self, values: Sequence[Any]) -> None:
        """Run the program as Python for its error, without its assignments and on copies."""
        program = self._program
        lifted = {name: _copy_of_tensor(tensor) for name, tensor in program.lifted.items()}
        copies = [_copy_of_tensor(x) if isinstance(x, torch.Tensor) else x for x in values]
        _, run = generate(program.name, program.graph, program.inputs, lifted)
        devices = devices_of([x for x in copies if isinstance(x, torch.Tensor)])
        with drawing_from(states_of(devices), devices), torch.no_grad():
            try:
                run(copies)
            except Exception as error:
                raise error from None

    def _refuse(self, *_: Any) -> Sequence[Any]:
        return self._refuse_derivative("differentiated")

    def _refuse_derivative(self, how: str) -> Sequence[Any]:
        raise RuntimeError(
            f"{self._program.name}: expected a program that draws no random numbers and writes "
            f"into no closed-over tensor, since backend {self._name!r} has compiled it and its "
            f"derivative is {how}. Leave the backend out, and the program runs as Python."
        )

    def _run_uncompiled(self, values: Sequence[Any], *tensors: torch.Tensor) -> Sequence[Any]:
        """Run the graph as it was traced, on the tensors of a call of the compiled module."""
        module, indices = self._traced
        left = iter(tensors)
        lifted_names = set(self._tensors)
        inputs = [next(left) if i in lifted_names else values[i] for i in self._program.inputs]
        results = module(*inputs, *itertools.islice(left, len(self._lifted)))
        return [results[i] for i in indices]

    @functools.cached_property
    def _traced(self) -> tuple[torch.fx.GraphModule, Sequence[int]]:
        """The graph as it was traced, and the indices of the results of the compiled module."""
        graph = self._program.graph
        module = graph_module(self._program.name, graph, self._program.lifted, as_inputs=True)
        outputs = zip(_keep_computed(module), self._outputs, strict=True)
        return module, [out.at for out, result in outputs if type(result) is _ResultIndex]

    def _input_tensors(self, values: Sequence[Any]) -> list[torch.Tensor]:
        return [values[i] for i in self._tensors]

    def _sizes_of(self, values: Sequence[Any]) -> dict[str, int]:
        sizes = {name: values[i].shape[k] for name, (i, k) in self._sizes.items()}
        sizes.update((name, values[i]) for name, i in self._ints.items())
        return sizes

    def _results(
        self, tensors: Sequence[Any], numbers: Sequence[Any], values: Sequence[Any]
    ) -> Sequence[Any]:
        results = tuple(
            tensors[out.at]
            if type(out) is _ResultIndex
            else numbers[out.at]
            if type(out) is NumberResult
            else values[out.index]
            if type(out) is InputRef
            else out
            for out in self._outputs
        )
        if self._assign is None:
            return results
        self._assign([*values, *results[self._count :]])
        return results[: self._count]

    def _compile(self, values: Sequence[Any]) -> Callable[..., Any]:
        """Compile the graph for sizes like those of a call."""
        call_spec = self._program.call_spec
        named_dims = call_spec.named_dims if call_spec is not None else {}
        sizes = self._sizes_of(values)
        ints = {name: sizes.pop(name) for name in self._ints}
        symbols = Symbols({dim.name: dim for dim in named_dims.values()}, sizes, ints)
        tensors = dict(zip(self._tensors, self._input_tensors(values), strict=True))
        samples: list[Any] = [*_samples(self._program, tensors, symbols), *self._lifted]
        if self._numbers is not None:
            samples += self._numbers(values)[0]
        if named_dims or ints:
            samples = [_fake(x, x.shape, symbols) for x in samples]
        else:
            samples = [*_apart(samples)]
        samples += symbols.numbers.values()
        donated = nullcontext() if self._separate else without_donated_buffers()
        with torch_state.outside_all_transforms(), donated:
            try:
                call = self._backend(self._module, samples)
            except CompilerFailed as error:
                reason = str(error).strip().splitlines()[0]
                raise ExportError(
                    f"{self._program.name}: backend {self._name!r} can't compile the program: "
                    f"{reason}. Leave the backend out, and the program runs as Python."
                ) from error.__cause__
        # If a name is not a size itself, its value is unknown here, so each call is compiled.
        holds = symbols.condition()
        if holds is not None and set(sizes) != set(named_dims):
            holds = _never
        self._variants.append((holds, call))
        return call


_MOST = 8  # maximum number of variants of one program


def _never(sizes: Mapping[str, int]) -> bool:
    return False


class _ResultIndex:
    """Stand-in for a result of the module, the one of index ``at``."""

    def __init__(self, at: int) -> None:
        self.at = at


def _check_for_backend(
    program: ProgramData, name: str, module: torch.fx.GraphModule, tensors: Sequence[torch.Tensor]
) -> None:
    for operator, reason in left_over(module):
        raise ExportError(
            f"{program.name}: backend {name!r} has no place for {no_operator(operator, reason)}. "
            f"Leave the backend out, and the program runs as Python."
        )
    devices = {x.device.type for x in tensors}
    if name == "cudagraphs" and devices != {"cuda"}:
        kinds = ", ".join(sorted(devices)) or "no device"
        raise ValueError(
            f"{program.name}: backend 'cudagraphs' expected tensors on 'cuda', got tensors on "
            f"{kinds}; move them to 'cuda', or use 'inductor'."
        )


def _copy_of_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _module(program: ProgramData) -> torch.fx.GraphModule:
    """Return the graph as a module of operators that torch's compilers take."""
    module = in_torch_operators(
        graph_module(program.name, program.graph, program.lifted, as_inputs=True)
    )
    keep_layouts(module)
    make_compilable(module)
    return module


def _with_last(call: Callable[..., Any], ints: Sequence[int]) -> Callable[..., Any]:
    return lambda *tensors: call(*tensors, *ints)


def _keep_computed(module: torch.fx.GraphModule) -> list[Any]:
    """Let a module return only the results that it computes; return all results."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    results: Any = output.args[0]
    computed: list[torch.fx.Node] = []
    outputs: list[Any] = []
    for result in results:
        if isinstance(result, torch.fx.Node):
            outputs.append(_ResultIndex(len(computed)))
            computed.append(result)
        else:
            outputs.append(result)
    output.args = (tuple(computed),)
    module.recompile()
    return outputs


def _assignments(program: ProgramData, count: int) -> Callable[[Sequence[Any]], Any] | None:
    """Return a function that makes a program's assignments; None if there are none.

    The function takes the list of the program's ``count`` values, followed by the assigned tensors.
    """
    if not program.updates:
        return None
    slots = range(sum(len(update.slots()) for update in program.updates))
    graph = torch.fx.Graph()
    graph.output(tuple(graph.placeholder(f"assigned_{i}") for i in slots))
    places = [count + i for i in slots]
    return generate(f"assign_{program.name}", graph, places, {}, program.updates)[1]


def _named_sizes(call_spec: CallSpec | None) -> dict[str, tuple[int, int]]:
    """Return the input and the dim with the size of each named dim that is a dim itself."""
    places: dict[str, tuple[int, int]] = {}
    for spec in call_spec.inputs if call_spec is not None else ():
        for k, dim in enumerate(spec.dims):
            if isinstance(dim, Dim):
                places.setdefault(dim.name, (spec.position, k))
    return places


def _samples(
    program: ProgramData, inputs: Mapping[int, torch.Tensor], symbols: Symbols
) -> list[torch.Tensor]:
    """Return sample inputs, with symbols as the sizes of named dims."""
    call_spec = program.call_spec
    if call_spec is None or not call_spec.named_dims:
        return list(inputs.values())
    shapes = {spec.position: spec.shape(symbols.sizes) for spec in call_spec.inputs}
    return [
        _fake(x, shapes.get(position, list(x.shape)), symbols) for position, x in inputs.items()
    ]


def _apart(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return sample inputs of which no two share memory, as torch requires of its control flow.

    A program may be compiled for such inputs: a program that writes into its inputs runs as Python
    if they share memory.
    """
    seen: set[int] = set()
    samples = []
    for x in tensors:
        if x.layout is torch.strided and not x.is_conj() and not x.is_neg():
            memory = storage_address(x)
            if memory in seen:
                x = _with_own_memory(x).requires_grad_(x.requires_grad)
            seen.add(memory)
        samples.append(x)
    return samples


def _share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    return len({x.untyped_storage().data_ptr() for x in tensors}) < len(tensors)


def _with_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor with the same strides."""
    span = memory_span(tensor.shape, tensor.stride())
    memory = tensor.detach().as_strided((span,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride())


def _fake(like: torch.Tensor, shape: Sequence[Any], symbols: Symbols) -> torch.Tensor:
    """Return a fake tensor of a shape, with the stride order of another tensor."""
    if all(isinstance(size, int) for size in shape):
        strides: list[Any] = list(like.stride())
    else:
        strides = dense_strides(shape, memory_order(like.shape, like.stride()))
    return new_fake_input(symbols.fake, shape, strides, like.dtype, like.device, like.requires_grad)


def _writes_outside(graph: torch.fx.Graph) -> bool:
    """True if the program writes into its inputs or into closed-over tensors."""
    aliases = Aliases(graph)
    inputs = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    return any(writes(node) for node in graph.nodes) and any(map(aliases.is_written, inputs))
