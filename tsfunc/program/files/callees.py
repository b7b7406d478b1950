"""Functions with rules of the user's in files: what they and their rules do, as graphs.

A program calls an ``autograd.Function``, or a function with a rule, as one node. In a file such a
function is made of *parts*, graphs of flat values: what it returns, how its derivative goes, and
how a batch of it does. A rule may call the function that it belongs to, so functions stand in a
list of the program and calls say the number of theirs.

The room of transforms has the kinds of functions; it registers each here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import every_node
from tsfunc.program.files.fields import Field
from tsfunc.program.files.values import NoFileForm, printable
from tsfunc.program.graphs.codegen import generate
from tsfunc.types import Dim

_DEEPEST = 32  # functions that are called in each other
_MOST = 1000
_MOST_OPERANDS = 1 << 16


@dataclass(eq=False)
class Part:
    """One of the graphs that a function is made of.

    Attributes:
        name: what it is called.
        graph: its operators.
        inputs: for each of the graph's inputs which of the values it is that the part is called
            with.
        lifted: the tensors from outside that it reads.
        dims: the named dims of its inputs, where it was traced.
        run: the graph as Python.
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
        """What its graph returns: nodes, and None for what is zero."""
        *_, last = self.graph.nodes
        found: Sequence[Any] = last.args[0]
        return found

    def make(self) -> None:
        """Makes the graph run as Python."""
        if self.run is None:
            _, self.run = generate(self.name, self.graph, self.inputs, self.lifted)


class TracedCallee:
    """A function that is made of parts.

    Attributes:
        name: what it is called.
        tensors: how many tensors it takes.
        numbers: how many numbers it takes after these.
        results: how many tensors it returns.
        parts: its graphs; the first is what the function does.
    """

    def __init__(self, name: str, tensors: int, numbers: int, results: int) -> None:
        self.name, self.tensors, self.numbers, self.results = name, tensors, numbers, results

    @property
    def parts(self) -> Sequence[Part]:
        raise NotImplementedError

    def __call__(self, *operands: Any) -> Sequence[Any]:
        raise NotImplementedError


# Reads a part that is called with values of these kinds.
DecodePart = Callable[[Field, Sequence[Any]], Part]


@dataclass(frozen=True)
class CalleeKind:
    """A kind of functions.

    Attributes:
        name: what files call it.
        cls: its class.
        encode: what a file says of one beside how many operands it has.
        decode: gives one its parts, of what `encode` wrote.
    """

    name: str
    cls: type[TracedCallee]
    encode: Callable[[Any, CalleeWriter], dict[str, Any]]
    decode: Callable[[Any, Field, DecodePart], None]


_by_name: dict[str, CalleeKind] = {}


def register_callee(kind: CalleeKind) -> None:
    """Makes a kind of functions known to files."""
    _by_name[kind.name] = kind


# --- writing


class CalleeWriter:
    """The functions that a program calls, each once.

    Args:
        bounds: the named dims.
        encode: writes a part.
        sizes: of the named dims, in the call that was traced.
        described: the descriptors of the program, by parameter, for errors.

    Attributes:
        bounds: the named dims of the graph that is being written.
        entries: what the file says of each function.
        batched: whether the rule of a batch is being written. The functions that it calls have no
            such rules of their own: there would be no end to batches of batches.
    """

    def __init__(
        self,
        bounds: Mapping[str, Dim],
        encode: Callable[[Part], Any],
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
        """The number of a function.

        Args:
            key: what tells it from others.
            kept: is to live as long as the ids in the key.
            make: the function, if it is new.

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

    def part(self, part: Part) -> Any:
        """What the file says of a part."""
        before, self.bounds = self.bounds, part.dims
        try:
            return self._encode(part)
        finally:
            self.bounds = before

    def of_batch(self, part: Part) -> Any:
        """What the file says of a part that is a rule for a batch."""
        before, self.batched = self.batched, True
        try:
            return self.part(part)
        finally:
            self.batched = before


# --- reading


HEAD = ("kind", "name", "tensors", "numbers", "results")


class CalleeReader:
    """The functions that a program of a file calls.

    A rule may call any of them, the function that it belongs to among them. What a function
    returns must come to an end: its first part may not lead back to it.

    Args:
        field: the list, if there is one.
        decode: reads a part, for a function of this reader.
    """

    def __init__(self, field: Field | None, decode: Callable[[Field, Sequence[Any]], Part]) -> None:
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
        """The function of a number."""
        return self._made[field.integer(0, len(self._made) - 1)]

    def finish(self) -> None:
        """Reads the parts of all functions."""
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
    """How deeply the first parts of functions call each other, from one on.

    Args:
        callee: the function.
        known: those that have been looked at.
        around: in how many others it was met; beyond too many nothing is looked at.
    """
    if callee not in known:
        known[callee] = _DEEPEST + 1  # where it is met again meanwhile, there is no end
        if around <= _DEEPEST:
            targets = (node.target for node in every_node(callee.parts[0].graph))
            called = [found for x in targets if (found := getattr(x, "callee", None)) is not None]
            inside = (_depth(each, known, around + 1) for each in called)
            known[callee] = 1 + max(inside, default=0)
    return known[callee]
