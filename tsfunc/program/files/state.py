"""State in files: what programs assign to, which a loaded function has for itself.

NOTE [state of loaded functions]
A program may end with assignments to attributes, variables and elements of containers (NOTE
[updates] in ``updates.py``). The objects that these belong to are not in a file, but what is
assigned to is: a *cell* for each, with its value when it was saved. A loaded function's programs
read the tensors in the cells, and assign to these. What is no tensor can only have been assigned,
and not read: that would have made another program for each value, and a file has no surroundings to
look at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.tracers.settings import settings
from tsfunc.program.files.fields import Field
from tsfunc.program.files.tensors import TensorReader, TensorWriter
from tsfunc.program.files.values import NoFileForm, Values, encode, printable
from tsfunc.program.graphs.program import Program
from tsfunc.program.guarding.forms import Watched
from tsfunc.program.reading.reach import Facts
from tsfunc.program.reading.updates import Slot, Update

Path = tuple[Any, ...]
_MOST_CELLS = 1 << 20


def reached(program: Program) -> tuple[Any, ...] | None:
    """What a program reads, and assigns to, beside its arguments as it is now.

    None where something is not as it was when the program was made.
    """
    if program.facts is None or program.form is None:
        return ()
    return program.facts.function(settings())(program.form.leaves)


def is_current(program: Program) -> bool:
    """Whether what a program read from outside is as it was."""
    form = program.form
    of_objects = form is not None and any(isinstance(leaf, Watched) for leaf in form.leaves)
    return of_objects or reached(program) is not None


class StateWriter:
    """The cells of some programs."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._cells: dict[tuple[int, str], int] = {}
        self._owners: list[Any] = []  # kept alive, so that ids stay theirs
        self._values: list[tuple[str, Any]] = []
        self._places: dict[int, tuple[int, Path]] = {}
        for program in programs:
            if program.updates:
                self._collect(program)
        for i, (_, value) in enumerate(self._values):
            self._places.update({id(x): (i, path) for path, x in _tensors(value)})

    def __len__(self) -> int:
        return len(self._values)

    def _collect(self, program: Program) -> None:
        found = reached(program)
        for update in program.updates:
            if found is None:
                raise NoFileForm(f"{update.text}, which is not as it was when the program was made")
            if update.deletes:
                raise NoFileForm(f"a program that deletes {update.text}")
            if not update.keeps:
                raise NoFileForm(
                    f"a program that assigns to {update.text}, whose value it also looks at. Keep "
                    f"it in a buffer, which it can read and assign"
                )
            owner = found[update.owner - _count(program)]
            key = id(owner), update.target
            if key not in self._cells:
                self._cells[key] = len(self._cells)
                self._owners.append(owner)
                self._values.append((update.text, update.current(owner)))

    def cells(self, tensors: TensorWriter) -> list[Any]:
        """The cells as JSON.

        Raises:
            NoFileForm: one has something that a file can't hold.
        """
        found = []
        for text, value in self._values:
            try:
                encoded = encode(value, other=lambda x: _named_tensor(x, tensors))
            except NoFileForm as error:
                raise NoFileForm(f"{text}, {error}") from None
            found.append({"name": printable(text), "value": encoded})
        return found

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in a cell."""
        return id(tensor) in self._places

    def of_program(self, program: Program, lifted: Sequence[torch.fx.Node]) -> dict[str, Any]:
        """What a program reads of the cells, and assigns to them, as JSON; empty without any.

        Args:
            program: the program.
            lifted: those of its nodes that are tensors in cells.
        """
        count = _count(program)
        read = [at - count for at in program.inputs if at >= count]
        found = (reached(program) or ()) if read or program.updates else ()
        tensors = [*(found[at] for at in read), *(program.tensor(node) for node in lifted)]
        reads = []
        for tensor in tensors:
            if id(tensor) not in self._places:
                raise NoFileForm("a tensor that it reads of an object")
            cell, path = self._places[id(tensor)]
            reads.append({"cell": cell, "path": [encode(key) for key in path]})
        updates = []
        for update in program.updates:
            owner = found[update.owner - count]
            value = encode(update.value, other=_slot)
            updates.append({"cell": self._cells[id(owner), update.target], "value": value})
        if not reads and not updates:
            return {}
        return {"state": {"arguments": count, "reads": reads, "updates": updates}}


def _count(program: Program) -> int:
    """How many flattened arguments a program is called with."""
    return len(program.form.leaves) if program.form is not None else 0


def _named_tensor(value: Any, tensors: TensorWriter) -> Any:
    return {"tensor": tensors.name(value)} if isinstance(value, torch.Tensor) else None


def _slot(value: Any) -> Any:
    return {"result": value.index} if isinstance(value, Slot) else None


def _tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors in a value, and the way to each."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, (*path, key))
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from _tensors(item, (*path, i))


class State:
    """The cells of a loaded function.

    Attributes:
        names: what the user's code calls what each stands for.
        values: what is in them now.
    """

    def __init__(self, names: Sequence[str] = (), values: Sequence[Any] = ()) -> None:
        self.names, self.values = list(names), list(values)

    def __len__(self) -> int:
        return len(self.values)

    def as_dict(self) -> dict[str, Any]:
        """The values by name."""
        return dict(zip(self.names, self.values, strict=True))


def read_state(field: Field | None, tensors: TensorReader, values: Values) -> State:
    """The cells that a file has."""
    names, found = [], []
    reader = values.with_other({"tensor": tensors.tensor})
    for each in field.items() if field is not None else ():
        name, value = each.record("name", "value")
        names.append(name.line())
        found.append(reader.decode(value))
    return State(names, found)


class ProgramState:
    """What one program reads of the cells and assigns to them.

    Args:
        field: what the file says of it, if it does.
        state: the cells.
        results: how many results the graph has beside those of the function.

    Attributes:
        facts: what calls are held to of the cells; gives what the program reads.
        inputs: where that stands in the list that the program is called with.
        updates: its assignments.
        arguments: how many flattened arguments it is called with, None: any number.
    """

    def __init__(self, field: Field | None, state: State, results: int, values: Values) -> None:
        self.facts = Facts()
        self.inputs: list[int] = []
        self.updates: tuple[Update, ...] = ()
        self.arguments: int | None = None
        if field is None:
            if results:
                raise ValueError(f"{results} results are nobody's")
            return
        count, reads, updates = field.record("arguments", "reads", "updates")
        self.arguments = count.integer(0, _MOST_CELLS)
        cells = self.facts.bind(self.facts.name(state.values))
        for i, each in enumerate(reads.items()):
            self._read(each, state, cells)
            self.inputs.append(self.arguments + i)
        slots: list[int] = []

        def slot(index: Field) -> Slot:
            slots.append(index.integer(0, max(results - 1, 0)))
            return Slot(slots[-1])

        owner = self.arguments + len(self.inputs)
        reader = values.with_other({"result": slot})
        found = []
        for each in updates.items():
            cell_field, value = each.record("cell", "value")
            cell = cell_field.integer(0, len(state) - 1)
            target = f"{{}}[{cell}]"
            found.append(Update(state.names[cell], owner, target, reader.decode(value)))
        if sorted(slots) != list(range(results)):
            updates.fail(f"the graph has {results} results for them")
        if found:
            self.facts.result(cells, state.values)
        self.updates = tuple(found)

    def _read(self, field: Field, state: State, cells: str) -> None:
        cell_field, path = field.record("cell", "path")
        cell = cell_field.integer(0, len(state) - 1)
        variable, value = f"{cells}[{cell}]", state.values[cell]
        for key_field in path.items():
            key = Values().decode(key_field)
            try:
                value = value[key]
            except (LookupError, TypeError):
                key_field.fail("there is nothing there")
            variable += f"[{self.facts.spell(key)}]"
        if not isinstance(value, torch.Tensor):
            field.fail("there is no tensor there")
        self.facts.require_tensor(self.facts.bind(variable), value)
