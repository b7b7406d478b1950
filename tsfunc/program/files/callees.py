"""Functions with user-defined rules in files: the graphs of the functions and their rules.

A program calls an ``autograd.Function``, or a function with a rule, as one node. A file stores
such a function as *parts*, graphs of flat values: its results and its derivative. A rule may call
the function that it belongs to, so the functions are a list in the program, and a call names a
function by its index.

All kinds of functions have the same JSON: counts, lists of indices, and parts. A class says which
lists and parts it has, and what each part takes and returns. ``transforms`` defines the classes
and registers each of them here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.fx

from tsfunc._text import count_text
from tsfunc.dispatch.state import overriding
from tsfunc.program.fields import Field
from tsfunc.program.files.json_values import NoFileForm, printable_text
from tsfunc.program.files.operator_calls import NUMBER, TENSOR
from tsfunc.program.graphs.codegen import generate
from tsfunc.program.passes.effects import every_node
from tsfunc.types import Dim

_DEEPEST = 32  # the maximum depth of calls of functions by functions
_MOST = 1000
_MOST_OPERANDS = 1 << 16


@dataclass(eq=False)
class CalleeGraph:
    """One of the graphs of a function.

    Attributes:
        inputs: for each input of the graph, the index of a value that the part is called with.
        lifted: the closed-over tensors that it reads.
        dims: the named dims of its inputs in its trace.
        run: the graph as a Python function; None until ``make`` is called.
    """

    name: str
    graph: torch.fx.Graph
    inputs: tuple[int, ...]
    lifted: Mapping[str, torch.Tensor]
    dims: Mapping[str, Dim] = field(default_factory=dict)
    run: Callable[[Sequence[Any]], Sequence[Any]] | None = None

    def __call__(self, *values: Any) -> Sequence[Any]:
        assert self.run is not None
        return self.run(values)

    @property
    def results(self) -> Sequence[Any]:
        """The results of its graph: nodes, and None for a zero result."""
        *_, last = self.graph.nodes
        return last.args[0]

    def make(self) -> None:
        """Generate the Python function of the graph."""
        if self.run is None:
            _, self.run = generate(self.name, self.graph, self.inputs, self.lifted)


@dataclass(frozen=True)
class PartType:
    """The values that a part takes and returns.

    Attributes:
        returns: the number of its results.
        more: True if there may be further results, which other parts take.
        zeros: True if a result may be None, which stands for zeros.
    """

    takes: Sequence[str]
    returns: int
    more: bool = False
    zeros: bool = False


class TracedCallee:
    """A function that is made of parts.

    Attributes:
        kind: the name of its class in files.
        part_names: the attributes that are its parts; the first computes the function itself.
        optional: the parts that may be None.
        index_names: the attributes that are lists of indices.
        tensors: the number of tensors that it takes.
        numbers: the number of numbers that it takes after the tensors.
        results: the number of tensors that it returns.
        count: the number of the tensors that have a derivative or are solved for; they come first.
        refusal: the message of the error that replaces a derivative, or None.
        once_differentiable: True if the derivative has none itself.
    """

    kind: ClassVar[str]
    part_names: ClassVar[tuple[str, ...]]
    optional: ClassVar[frozenset[str]] = frozenset()
    index_names: ClassVar[tuple[str, ...]] = ()
    count = 0
    refusal: str | None = None
    once_differentiable = False

    def __init__(self, name: str, tensors: int, numbers: int, results: int) -> None:
        self.name, self.tensors, self.numbers, self.results = name, tensors, numbers, results

    @property
    def parts(self) -> Sequence[CalleeGraph]:
        return [part for name in self.part_names if (part := getattr(self, name)) is not None]

    @property
    def most_counted(self) -> int:
        """The upper bound of ``count``."""
        return self.tensors

    @property
    def own(self) -> list[str]:
        """The kinds of the values that the function takes."""
        return [TENSOR] * self.tensors + [NUMBER] * self.numbers

    def type_of_part(self, name: str) -> PartType:
        """Return the arguments and results of a part; the parts before it are known."""
        raise NotImplementedError

    def limits(self) -> Mapping[str, int]:
        """Return the upper bounds of the lists of indices, by name."""
        return {}

    def __call__(self, *operands: Any) -> Sequence[Any]:
        raise NotImplementedError


_by_name: dict[str, type[TracedCallee]] = {}


def register_callee(cls: type[TracedCallee]) -> None:
    """Make a kind of functions known to files."""
    _by_name[cls.kind] = cls


# --- writing


class CalleeWriter:
    """The functions that a program calls, each once.

    Args:
        encode: writes a part.
        sizes: the sizes of the named dims in the call that was traced.
        described: the descriptors of the program, by parameter, for errors.

    Attributes:
        named_dims: the named dims of the graph that is being written.
        entries: the JSON of each function.
    """

    def __init__(
        self,
        named_dims: Mapping[str, Dim],
        encode: Callable[[CalleeGraph], Any],
        sizes: Mapping[str, int],
        described: Mapping[str, Any],
    ) -> None:
        self.named_dims = named_dims
        self.sizes, self.described = sizes, described
        self.entries: list[Any] = []
        self._encode = encode
        self._numbers: dict[Any, int] = {}
        self._kept: list[Any] = []
        self._depth = 0

    def number(self, key: Any, kept_alive: Any, make: Callable[[], TracedCallee]) -> int:
        """Return the index of a function in the list.

        Args:
            kept_alive: an object that has to live as long as the ids in the key.
            make: makes the function if it is new.

        Raises:
            NoFileForm: a file can't hold it.
        """
        if key in self._numbers:
            return self._numbers[key]
        if self._depth >= _DEEPEST or len(self.entries) >= _MOST:
            raise NoFileForm(
                "a rule that calls functions with rules, which call others, without end (a rule "
                "that calls its own function must not do so with other numbers or sizes each time)"
            )
        number = self._numbers[key] = len(self.entries)
        self._kept.append(kept_alive)
        self.entries.append(None)
        self._depth += 1
        try:
            self.entries[number] = self._entry(make())
        finally:
            self._depth -= 1
        return number

    def _entry(self, callee: TracedCallee) -> dict[str, Any]:
        return {
            "kind": callee.kind,
            "name": printable_text(callee.name),
            "tensors": callee.tensors,
            "numbers": callee.numbers,
            "results": callee.results,
            "count": callee.count,
            "once_differentiable": callee.once_differentiable,
            "refusal": None if callee.refusal is None else printable_text(callee.refusal),
            "indices": {name: list(getattr(callee, name)) for name in callee.index_names},
            "parts": {name: self._part(getattr(callee, name)) for name in callee.part_names},
        }

    def _part(self, part: CalleeGraph | None) -> Any:
        if part is None:
            return None
        with overriding(self, named_dims=part.dims):
            return self._encode(part)


# --- reading


class CalleeReader:
    """The functions that a program of a file calls.

    A rule may call any of the functions, the function that it belongs to included. The first part
    of a function may not call the function itself, directly or indirectly.

    Args:
        field: the JSON list, if the file has one.
        decode: reads a part, for a function of this reader.
    """

    def __init__(
        self, field: Field | None, decode: Callable[[Field, Sequence[Any]], CalleeGraph]
    ) -> None:
        self._fields = field.items() if field is not None else []
        self._decode = decode
        self._made = [self._head(stored) for stored in self._fields]

    @staticmethod
    def _head(field: Field) -> TracedCallee:
        kind, name_field, *fields, _, _, _, _, _ = field.record(
            "kind", "name", "tensors", "numbers", "results", "count",
            "once_differentiable", "refusal", "indices", "parts",
        )  # fmt: skip
        cls: type[TracedCallee] = kind.one_of(_by_name, "a kind of function")
        counts = [stored.integer(0, _MOST_OPERANDS) for stored in fields]
        name = name_field.line()
        return cls(name, *counts)

    def at(self, field: Field) -> TracedCallee:
        """Return the function of an index."""
        return self._made[field.integer(0, len(self._made) - 1)]

    def finish(self) -> None:
        """Read the parts of all functions."""
        for stored, callee in zip(self._fields, self._made, strict=True):
            self._set_attributes(stored, callee)
        depths: dict[TracedCallee, int] = {}
        for stored, callee in zip(self._fields, self._made, strict=True):
            if _depth(callee, depths) > _DEEPEST:
                stored.fail("it calls others in a circle, or too deeply")
        for stored, callee in zip(self._fields, self._made, strict=True):
            try:
                for part in callee.parts:
                    part.make()
            except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
                stored.fail(f"no code can be made of it: {error}")

    def _set_attributes(self, field: Field, callee: TracedCallee) -> None:
        """Set the attributes of a function from its JSON."""
        callee.count = field.at("count").integer(0, callee.most_counted)
        callee.once_differentiable = field.at("once_differentiable").flag()
        refusal = field.at("refusal")
        callee.refusal = None if refusal.value is None else refusal.line()
        indices = field.at("indices").record(*callee.index_names)
        for name, index in zip(callee.index_names, indices, strict=True):
            numbers = [at.integer(0, 2 * _MOST_OPERANDS) for at in index.items()]
            setattr(callee, name, numbers)
        parts = field.at("parts").record(*callee.part_names)
        for name, part in zip(callee.part_names, parts, strict=True):
            setattr(callee, name, self._part(part, callee, name))
        for name, index in zip(callee.index_names, indices, strict=True):
            for at in index.items():
                at.integer(0, callee.limits()[name] - 1)

    def _part(self, field: Field, callee: TracedCallee, name: str) -> CalleeGraph | None:
        if field.value is None and name in callee.optional:
            return None
        expected = callee.type_of_part(name)
        part = self._decode(field, expected.takes)
        count = len(part.results)
        if count < expected.returns or (count > expected.returns and not expected.more):
            field.fail(f"expected {count_text(expected.returns, 'result')}, got {count}")
        if not expected.zeros and any(value is None for value in part.results):
            field.fail("expected a tensor for each result, got null")
        return part


def _depth(callee: TracedCallee, depths: dict[TracedCallee, int], around: int = 0) -> int:
    """Return the depth of the calls of functions by the first parts of functions.

    Args:
        depths: the depths of functions that have been computed.
        around: the number of functions around this one; beyond the limit it is not examined.
    """
    if callee not in depths:
        depths[callee] = _DEEPEST + 1  # the depth of a function that calls itself
        if around <= _DEEPEST:
            targets = (node.target for node in every_node(callee.parts[0].graph))
            called = [inner for x in targets if (inner := getattr(x, "callee", None)) is not None]
            inside = (_depth(callee, depths, around + 1) for callee in called)
            depths[callee] = 1 + max(inside, default=0)
    return depths[callee]
