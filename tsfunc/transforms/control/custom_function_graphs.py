"""The graphs of functions with rules: NOTE [functions in files] in ``custom_function_tracing``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.grad.autograd import is_differentiable
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.user_queries import SYMBOLIC
from tsfunc.errors import DescriptorError, TsfuncError, UndefinedDerivativeError
from tsfunc.ops.dims import dense_strides, memory_order
from tsfunc.program.calling.capture import TraceRequest, capture
from tsfunc.program.files.callees import CalleeGraph
from tsfunc.program.files.json_values import NoFileForm
from tsfunc.program.graphs.example_arguments import sizes_for
from tsfunc.program.guarding.call_spec import conditions_among, placeholder
from tsfunc.program.guarding.inputs import InputSpec, NumberSpec, dims_in
from tsfunc.program.guarding.trace_guards import Property
from tsfunc.program.program import Program
from tsfunc.transforms.control.autograd_functions import OperandType, PythonCallee
from tsfunc.transforms.custom_rules import RuleCall
from tsfunc.transforms.equations import TENSOR
from tsfunc.types import Dim, DimExpr, DimForm
from tsfunc.types.dims import parse_dim
from tsfunc.types.grammar import Descriptor

Values = Sequence[Any]
_NUMBER = 1033  # the sample of a number


@dataclass(frozen=True)
class Number:
    """A number among the inputs of a part, as a text in the names of dims."""

    text: str


class Tracing:
    """Tracer of the parts of one function.

    Args:
        named_dims: the named dims of the program that calls the function.
        sizes: the sizes of these dims in the call that was traced.
        described: the descriptors of the program by parameter, for error messages.

    Attributes:
        name: the name of the function in error messages.
        operands: the types of the function's inputs.
        names: the named dims of the part that is being traced.
    """

    names: DimNames

    def __init__(
        self,
        callee: PythonCallee,
        named_dims: Mapping[str, Dim],
        sizes: Mapping[str, int],
        described: Mapping[str, Descriptor],
    ) -> None:
        self.callee, self.named_dims = callee, named_dims
        self.sizes, self.described = sizes, described
        self.name = self.name_of(callee)
        self.operands: list[OperandType | Number] = [
            *callee.types, *map(Number, callee.numbers)
        ]  # fmt: skip

    @staticmethod
    def name_of(callee: PythonCallee) -> str:
        """Return the user's name of a function, for errors."""
        first = callee.leaves[0] if callee.leaves else None
        return first.rule.name if isinstance(first, RuleCall) else callee.name

    def head(self, results: int) -> tuple[str, int, int, int]:
        """Return the constructor arguments of a callee with ``results`` result tensors."""
        return self.name, self.callee.tensors, len(self.callee.numbers), results

    def part(
        self, label: str, func: Callable[[list[Any]], Values],
        operands: Sequence[OperandType | Number], last: int = 0,
    ) -> CalleeGraph:  # fmt: skip
        """Return a function of flat values as a graph.

        Args:
            func: takes a list of values, and returns a list of tensors and Nones.
            last: the number of first values whose sizes define dims only if no other value does.

        Raises:
            NoFileForm: the function can't be traced.
        """
        self.names = names = DimNames(self.named_dims)
        dims = {i: names.dims(x) for i, x in enumerate(operands) if isinstance(x, OperandType)}
        forms = [names.number(x.text) if isinstance(x, Number) else None for x in operands]
        numbers = {i: form for i, form in enumerate(forms) if form is not None}

        def run(*values: Any) -> Any:
            filled = [
                size_of(numbers[i]) if i in numbers else value for i, value in enumerate(values)
            ]
            return [x if isinstance(x, torch.Tensor) else None for x in func(filled)]

        def traced(sizes: Mapping[str, int]) -> Program:
            flat: list[Any] = [_NUMBER] * len(operands)
            inputs: list[InputSpec] = []
            for i, x in enumerate(operands):
                if isinstance(x, OperandType):
                    flat[i] = _sample(x, dims[i], sizes)
                    inputs.append(InputSpec(i, f"x{i}", flat[i], dims[i]))
            inputs = [*inputs[last:], *inputs[:last]]
            specs = [
                NumberSpec(i, f"k{i}", _NUMBER)
                for i, x in enumerate(operands)
                if isinstance(x, Number) and i not in numbers
            ]
            tree = pytrees.structure_of((tuple(flat), {}))
            request = TraceRequest(
                f"save({self.name})", self.name, run, flat, tree, inputs, names.used, specs,
                described=self.described,
            )  # fmt: skip
            with torch.enable_grad():
                return capture(request)

        sizes = {name: self.sizes[name] for name in names.used if self.sizes.get(name, 0) > 1}
        try:
            program = traced({**sizes_for(names.used), **sizes})  # NOTE [sizes 0 and 1]
        except (NoFileForm, UndefinedDerivativeError):
            raise
        except Exception as error:
            raise self.refusal(label, self._words_of(error)) from None
        guards = program.trace_guards
        if conditions_among(guards) or program.larger_minima or program.updates:
            raise self.refusal(label, "it does not do the same for all sizes and numbers")
        properties = [guard.guard.fact for guard in guards if isinstance(guard, Property)]
        if properties or program.attributes:
            read = ", ".join([*properties, *program.attributes])
            raise self.refusal(label, f"it depends on more of tensors than types and sizes: {read}")
        used = _without_unused(program.graph, program.inputs)
        return CalleeGraph(label, program.graph, used, program.lifted, names.used, program.run)

    def refusal(self, label: str, why: str) -> NoFileForm:
        text = f", of which {label} can't be traced into a graph without Python: {why}"
        return NoFileForm(self.name, text)

    def _words_of(self, error: Exception) -> str:
        """Return the message of a tsfunc error without its prefix; of others the first line."""
        text = str(error)
        if not isinstance(error, TsfuncError):
            return f"{type(error).__name__}: {text.partition(chr(10))[0]}"
        for called in ("save", "specialize"):
            text = text.removeprefix(f"{called}({self.name}): ")
        return text.rstrip()


class DimNames:
    """The named dims of a part's inputs.

    A size that is computed from the dims in a form that descriptors lack gets its own name.
    """

    def __init__(self, named_dims: Mapping[str, Dim]) -> None:
        self.named_dims = named_dims
        self.used: dict[str, Dim] = {}
        self._others: dict[str, Dim] = {}

    def dims(self, type_: OperandType) -> tuple[DimForm, ...]:
        return tuple(size if isinstance(size, int) else self.dim(size) for size in type_.dims)

    def dim(self, text: str) -> DimForm:
        form = self._form(text)
        if form is None:
            form = self._others.setdefault(text, self._fresh())
            self.used[form.name] = form
        return form

    def _fresh(self) -> Dim:
        taken = {*self.named_dims, *self.used}
        return Dim(next(name for i in itertools.count() if (name := f"size_{i}") not in taken))

    def number(self, text: str) -> DimForm | None:
        """Return a number as a form in the known names; None if it is unknown."""
        form = self._form(text)
        is_known = form is not None and all(name in self.used for name in dims_in(form))
        return form if is_known else self._others.get(text)

    def _form(self, text: str) -> DimForm | None:
        """Return the dim form of a text in names of the program; None for other texts."""
        try:
            form = parse_dim(text)
        except DescriptorError:
            return None
        if not all(name in self.named_dims for name in dims_in(form)):
            return None
        self.used.update({name: self.named_dims[name] for name in dims_in(form)})
        return self.named_dims[form.name] if isinstance(form, Dim) else form


def size_of(form: DimForm) -> Any:
    """Return the symbolic size of a dim form in the running trace."""
    trace = current_trace()
    assert trace is not None
    sizes = trace.symbols.sizes
    if isinstance(form, Dim):
        return sizes[form.name]
    return form.evaluate(sizes) if isinstance(form, DimExpr) else form


def _sample(type_: OperandType, dims: Sequence[DimForm], sizes: Mapping[str, int]) -> torch.Tensor:
    """Return a tensor without data whose strides have the order of the type's strides."""
    shape = InputSpec(0, "", torch.empty(0), tuple(dims)).shape(sizes)
    strides = dense_strides(shape, memory_order(shape, type_.strides))
    tensor = placeholder(shape, type_.dtype, type_.device, strides)
    return tensor.requires_grad_() if is_differentiable(tensor) else tensor


def _without_unused(graph: torch.fx.Graph, inputs: Sequence[int]) -> tuple[int, ...]:
    """Remove unused inputs from a graph, and return the indices of the others."""
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    used = []
    for node, at in zip(nodes, inputs, strict=True):
        if node.users:
            used.append(at)
        else:
            graph.erase_node(node)
    return tuple(used)


def types_of(part: CalleeGraph) -> list[OperandType]:
    """Return the types of the tensors that a part returns."""
    types = []
    for node in part.results:
        value = node.meta["val"]
        dims = tuple(
            size if isinstance(size, int) else text
            for size, text in zip(value.shape, node.meta["dims"], strict=True)
        )
        steps = [step if isinstance(step, int) else step.node.hint for step in value.stride()]
        types.append(OperandType(dims, value.dtype, value.device, tuple(map(int, steps))))
    return types


def differentiable_indices(types: Sequence[OperandType]) -> list[int]:
    """Return the indices of the types that have derivatives."""
    return [i for i, x in enumerate(types) if x.dtype.is_floating_point or x.dtype.is_complex]


class PassedTree:
    """A pytree that one part passes to another; its tensors are results of the first part."""

    def __init__(self, tree: Any) -> None:
        self._leaves, self._tree = pytrees.flatten(tree)
        trace = current_trace()
        assert trace is not None
        for i, leaf in enumerate(self._leaves):
            if isinstance(leaf, SYMBOLIC):
                self._leaves[i] = Number(trace.symbols.spell_size(leaf))

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [x for x in self._leaves if isinstance(x, torch.Tensor)]

    def forget(self) -> None:
        """Replace the tensors, which belong to an ended trace, by placeholders."""
        self._leaves = [TENSOR if isinstance(x, torch.Tensor) else x for x in self._leaves]

    def filled(self, tensors: Sequence[torch.Tensor], names: DimNames) -> Any:
        rest = iter(tensors)
        leaves = []
        for leaf in self._leaves:
            if isinstance(leaf, Number):
                number = names.number(leaf.text)
                if number is None:
                    raise NoFileForm(f"a size, {leaf.text}, that a rule keeps")
                leaf = size_of(number)
            leaves.append(next(rest) if leaf is TENSOR else leaf)
        return pytrees.unflatten(self._tree, leaves)
