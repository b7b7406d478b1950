"""Functions with rules of the user's in files: the graphs of the functions and their rules.

A program calls an ``autograd.Function``, or a function with a rule, as one node. A file stores
such a function as *parts*, graphs of flat values: its results, its derivative and its batching
rule. A rule may call the function that it belongs to, so the functions are a list in the program,
and a call names a function by its index.

``transforms`` defines the kinds of functions and registers each of them here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import every_node
from tsfunc.program.files.archive import Field
from tsfunc.program.files.values import NoFileForm, printable
from tsfunc.program.graphs.codegen import generate
from tsfunc.types import Dim

_DEEPEST = 32  # the maximum depth of calls of functions by functions
_MOST = 1000
_MOST_OPERANDS = 1 << 16


@dataclass(eq=False)
class CalleeGraph:
    """One of the graphs of a function.

    Attributes:
        name: its name.
        graph: its operators.
        inputs: for each input of the graph, the index of a value that the part is called with.
        lifted: the tensors from outside that it reads.
        dims: the named dims of its inputs in its trace.
        run: the graph as a Python function; None until `make` is called.
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
        found: Sequence[Any] = last.args[0]
        return found

    def make(self) -> None:
        """Generate the Python function of the graph."""
        if self.run is None:
            _, self.run = generate(self.name, self.graph, self.inputs, self.lifted)


class TracedCallee:
    """A function that is made of parts.

    Attributes:
        name: its name.
        tensors: the number of tensors that it takes.
        numbers: the number of numbers that it takes after the tensors.
        results: the number of tensors that it returns.
        parts: its graphs; the first computes the function itself.
    """

    def __init__(self, name: str, tensors: int, numbers: int, results: int) -> None:
        self.name, self.tensors, self.numbers, self.results = name, tensors, numbers, results

    @property
    def parts(self) -> Sequence[CalleeGraph]:
        raise NotImplementedError

    def __call__(self, *operands: Any) -> Sequence[Any]:
        raise NotImplementedError


# Reads a part that is called with values of the given kinds.
DecodePart = Callable[[Field, Sequence[Any]], CalleeGraph]


@dataclass(frozen=True)
class CalleeKind:
    """A kind of functions.

    Attributes:
        name: its name in files.
        cls: its class.
        encode: returns the JSON of a function, apart from the fields that all kinds have.
        decode: sets the parts of a function from the JSON that `encode` returned.
    """

    name: str
    cls: type[TracedCallee]
    encode: Callable[[Any, CalleeWriter], dict[str, Any]]
    decode: Callable[[Any, Field, DecodePart], None]


_by_name: dict[str, CalleeKind] = {}


def register_callee(kind: CalleeKind) -> None:
    """Make a kind of functions known to files."""
    _by_name[kind.name] = kind


# --- writing


class CalleeWriter:
    """The functions that a program calls, each once.

    Args:
        bounds: the named dims.
        encode: writes a part.
        sizes: the sizes of the named dims in the call that was traced.
        described: the descriptors of the program, by parameter, for errors.

    Attributes:
        bounds: the named dims of the graph that is being written.
        entries: the JSON of each function.
        batched: whether a batching rule is being written. The functions that it calls get no
            batching rules of their own, since the nesting of batches would be infinite.
    """

    def __init__(
        self,
        bounds: Mapping[str, Dim],
        encode: Callable[[CalleeGraph], Any],
        sizes: Mapping[str, int],
        described: Mapping[str, Any],
    ) -> None:
        self.bounds = bounds
        self.sizes, self.described = sizes, described
        self.entries: list[Any] = []
        self.batched = False
        self._encode = encode
        self._numbers: dict[Any, int] = {}
        self._kept: list[Any] = []
        self._depth = 0

    def number(self, key: Any, kept: Any, make: Callable[[], TracedCallee]) -> int:
        """Return the index of a function in the list.

        Args:
            key: identifies the function.
            kept: an object that has to live as long as the ids in the key.
            make: makes the function if it is new.

        Raises:
            NoFileForm: a file can't hold it.
        """
        key = self.batched, key
        if key in self._numbers:
            return self._numbers[key]
        if self._depth >= _DEEPEST or len(self.entries) >= _MOST:
            raise NoFileForm(
                "a rule that calls functions with rules, which call others, without end (a rule "
                "that calls its own function must not do so with other numbers or sizes each time)"
            )
        number = self._numbers[key] = len(self.entries)
        self._kept.append(kept)
        self.entries.append(None)
        self._depth += 1
        try:
            self.entries[number] = self._entry(make())
        finally:
            self._depth -= 1
        return number

    def _entry(self, callee: TracedCallee) -> dict[str, Any]:
        kind = next(each for each in _by_name.values() if type(callee) is each.cls)
        return {
            "kind": kind.name,
            "name": printable(callee.name),
            "tensors": callee.tensors,
            "numbers": callee.numbers,
            "results": callee.results,
            **kind.encode(callee, self),
        }

    def part(self, part: CalleeGraph) -> Any:
        """Return the JSON of a part."""
        before, self.bounds = self.bounds, part.dims
        try:
            return self._encode(part)
        finally:
            self.bounds = before

    def of_batch(self, part: CalleeGraph) -> Any:
        """Return the JSON of a part that is a batching rule."""
        before, self.batched = self.batched, True
        try:
            return self.part(part)
        finally:
            self.batched = before


# --- reading


HEAD = ("kind", "name", "tensors", "numbers", "results")


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
        self._made = [self._head(each) for each in self._fields]

    @staticmethod
    def _head(field: Field) -> TracedCallee:
        kind: CalleeKind = field.at("kind").one_of(_by_name, "a kind of function")
        counts = [field.at(key).integer(0, _MOST_OPERANDS) for key in HEAD[2:]]
        name = field.at("name").line()
        return kind.cls(name, *counts)

    def at(self, field: Field) -> TracedCallee:
        """Return the function of an index."""
        return self._made[field.integer(0, len(self._made) - 1)]

    def finish(self) -> None:
        """Read the parts of all functions."""
        for each, callee in zip(self._fields, self._made, strict=True):
            _by_name[each.at("kind").text()].decode(callee, each, self._decode)
        depths: dict[TracedCallee, int] = {}
        for each, callee in zip(self._fields, self._made, strict=True):
            if _depth(callee, depths) > _DEEPEST:
                each.fail("it calls others in a circle, or too deeply")
        for each, callee in zip(self._fields, self._made, strict=True):
            try:
                for part in callee.parts:
                    part.make()
            except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
                each.fail(f"no code can be made of it: {error}")


def _depth(callee: TracedCallee, known: dict[TracedCallee, int], around: int = 0) -> int:
    """Return the depth of the calls of functions by the first parts of functions.

    Args:
        callee: the outermost function.
        known: the depths of functions that have been computed.
        around: the number of functions around this one; beyond the limit it is not examined.
    """
    if callee not in known:
        known[callee] = _DEEPEST + 1  # the depth of a function that calls itself
        if around <= _DEEPEST:
            targets = (node.target for node in every_node(callee.parts[0].graph))
            called = [found for x in targets if (found := getattr(x, "callee", None)) is not None]
            inside = (_depth(each, known, around + 1) for each in called)
            known[callee] = 1 + max(inside, default=0)
    return known[callee]
