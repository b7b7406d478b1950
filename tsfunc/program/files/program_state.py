"""The state of programs in files, and the context in which a file is read.

NOTE [state of loaded functions]
A program may end with assignments to attributes, variables and elements of containers (NOTE
[updates] in ``results.py``). A file does not contain the owners of these targets. Instead, the file
contains a *cell* for each target, with the value that the target had when it was saved. The
programs of a loaded function read the tensors in the cells, and assign to the cells. A value that
is not a tensor can only have been assigned, and not read: a read would have made a program for each
value, and a loaded function has no surroundings to guard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from tsfunc.bridge.tracers.torch_settings import settings
from tsfunc.program.closure.closure_guards import ClosureGuards
from tsfunc.program.closure.results import ResultSlot, Update
from tsfunc.program.fields import Field
from tsfunc.program.files.json_values import NoFileForm, ValueReader, encode, printable_text
from tsfunc.program.files.tensors import TensorReader, TensorWriter
from tsfunc.program.graphs.data import ProgramData
from tsfunc.program.guard import Source
from tsfunc.program.guarding.guards import WatchedPlaceholder

# --- state in files: the values that programs assign to, of which each loaded function has its own


Path = tuple[Any, ...]
_MOST_CELLS = 1 << 20


def closure_values(program: ProgramData) -> tuple[Any, ...] | None:
    """Return the current values that a program reads and assigns to beyond its arguments.

    Returns:
        The values; None if a guard on one of them fails.
    """
    if program.closure_guards is None or program.call_spec is None:
        return ()
    return program.closure_guards.function(settings())(program.call_spec.leaves)


def is_current(program: ProgramData) -> bool:
    """True if the guards on the closed-over values of a program still hold."""
    call_spec = program.call_spec
    of_objects = call_spec is not None and any(
        isinstance(leaf, WatchedPlaceholder) for leaf in call_spec.leaves
    )
    return of_objects or closure_values(program) is not None


class StateWriter:
    """The cells of some programs."""

    def __init__(self, programs: Sequence[ProgramData]) -> None:
        self._cells: dict[tuple[int, str], int] = {}
        self._owners: list[Any] = []  # keeps the owners alive, so that ids stay unique
        self._values: list[tuple[str, Any]] = []
        self._cells_of_tensors: dict[int, tuple[int, Path]] = {}
        for program in programs:
            if program.updates:
                self._collect(program)
        for i, (_, value) in enumerate(self._values):
            self._cells_of_tensors.update(
                {id(x): (i, path) for path, x in _tensors_with_paths(value)}
            )

    def __len__(self) -> int:
        return len(self._values)

    def _collect(self, program: ProgramData) -> None:
        objects = closure_values(program)
        for update in program.updates:
            if objects is None:
                raise NoFileForm(f"{update.text}, which is not as it was when the program was made")
            if update.deletes:
                raise NoFileForm(f"a program that deletes {update.text}")
            if not update.keeps:
                raise NoFileForm(
                    f"a program that assigns to {update.text}, whose value it also looks at. Keep "
                    f"it in a buffer, which it can read and assign"
                )
            owner = objects[update.owner - _argument_count(program)]
            key = id(owner), update.target
            if key not in self._cells:
                self._cells[key] = len(self._cells)
                self._owners.append(owner)
                self._values.append((update.text, update.current(owner)))

    def cells(self, tensors: TensorWriter) -> list[Any]:
        """Return the cells as JSON.

        Raises:
            NoFileForm: a file can't hold the value of a cell.
        """
        encoded_cells = []
        for text, value in self._values:
            try:
                encoded = encode(value, other=lambda x: _named_tensor(x, tensors))
            except NoFileForm as error:
                raise NoFileForm(f"{text}, {error}") from None
            encoded_cells.append({"name": printable_text(text), "value": encoded})
        return encoded_cells

    def holds(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._cells_of_tensors

    def of_program(self, program: ProgramData, lifted: Sequence[torch.fx.Node]) -> dict[str, Any]:
        """Return a program's reads of the cells and assignments to them, as JSON.

        Returns:
            An object with the key "state"; an empty object if the program uses no cell.
        """
        count = _argument_count(program)
        read = [at - count for at in program.inputs if at >= count]
        objects = (closure_values(program) or ()) if read or program.updates else ()
        tensors = [*(objects[at] for at in read), *(program.tensor(node) for node in lifted)]
        reads = []
        for tensor in tensors:
            if id(tensor) not in self._cells_of_tensors:
                raise NoFileForm("a tensor that it reads of an object")
            cell, path = self._cells_of_tensors[id(tensor)]
            reads.append({"cell": cell, "path": [encode(key) for key in path]})
        updates = []
        for update in program.updates:
            owner = objects[update.owner - count]
            value = encode(update.value, other=_slot)
            updates.append({"cell": self._cells[id(owner), update.target], "value": value})
        if not reads and not updates:
            return {}
        return {"state": {"arguments": count, "reads": reads, "updates": updates}}


def _argument_count(program: ProgramData) -> int:
    """Return the number of flattened arguments of a program."""
    return len(program.call_spec.leaves) if program.call_spec is not None else 0


def _named_tensor(value: Any, tensors: TensorWriter) -> Any:
    return {"tensor": tensors.name(value)} if isinstance(value, torch.Tensor) else None


def _slot(value: Any) -> Any:
    return {"result": value.index} if isinstance(value, ResultSlot) else None


def _tensors_with_paths(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the tensors in a value, each with the keys that lead to it."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_with_paths(item, (*path, key))
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from _tensors_with_paths(item, (*path, i))


class CellState:
    """The cells of a loaded function.

    Attributes:
        names: the user's spelling of the target that each cell replaces.
    """

    def __init__(self, names: Sequence[str] = (), values: Sequence[Any] = ()) -> None:
        self.names, self.values = list(names), list(values)

    def __len__(self) -> int:
        return len(self.values)

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return dict(zip(self.names, self.values, strict=True))


def read_state(field: Field | None, tensors: TensorReader, values: ValueReader) -> CellState:
    """Return the cells of a file."""
    names, contents = [], []
    reader = values.with_other({"tensor": tensors.tensor})
    for item in field.items() if field is not None else ():
        name, value = item.record("name", "value")
        names.append(name.line())
        contents.append(reader.decode(value))
    return CellState(names, contents)


class ProgramState:
    """The reads of cells and assignments to cells of one program.

    Args:
        field: the JSON of the program's state, if it has any.
        results: the number of results of the graph beyond those of the function.

    Attributes:
        closure_guards: the guards on the cells; they return the values that the program reads.
        inputs: the indices of these values in the list that the program is called with.
        updates: the assignments of the program.
        arguments: the number of flattened arguments; None if any number is possible.
    """

    def __init__(
        self, field: Field | None, state: CellState, results: int, values: ValueReader
    ) -> None:
        self.closure_guards = ClosureGuards()
        self.inputs: list[int] = []
        self.updates: tuple[Update, ...] = ()
        self.arguments: int | None = None
        if field is None:
            if results:
                raise ValueError(f"{results} results belong to no assignment")
            return
        count, reads, updates = field.record("arguments", "reads", "updates")
        self.arguments = count.integer(0, _MOST_CELLS)
        cells = Source.of_object(state.values)
        for i, read in enumerate(reads.items()):
            self._read(read, state, cells)
            self.inputs.append(self.arguments + i)
        slots: list[int] = []

        def slot(index: Field) -> ResultSlot:
            slots.append(index.integer(0, max(results - 1, 0)))
            return ResultSlot(slots[-1])

        owner = self.arguments + len(self.inputs)
        reader = values.with_other({"result": slot})
        assigned = []
        for update in updates.items():
            cell_field, value = update.record("cell", "value")
            cell = cell_field.integer(0, len(state) - 1)
            target = f"{{}}[{cell}]"
            assigned.append(Update(state.names[cell], owner, target, reader.decode(value)))
        if sorted(slots) != list(range(results)):
            updates.fail(f"the graph has {results} results for them")
        if assigned:
            self.closure_guards.add_input(cells, state.values)
        self.updates = tuple(assigned)

    def _read(self, field: Field, state: CellState, cells: Source) -> None:
        cell_field, path = field.record("cell", "path")
        cell = cell_field.integer(0, len(state) - 1)
        source, value = cells.item(cell, state.names[cell]), state.values[cell]
        for key_field in path.items():
            key = ValueReader().decode(key_field)
            try:
                value = value[key]
            except (LookupError, TypeError):
                key_field.fail("there is nothing there")
            source = source.item(key, f"{source.text}[{key!r}]")
        if not isinstance(value, torch.Tensor):
            field.fail("not the path of a tensor")
        self.closure_guards.guard_input(source, value)


# --- the context in which the entries of a file are read


@dataclass(frozen=True)
class FileContext:
    """The context in which the entries of a file are read.

    Attributes:
        tensors: the tensors of the file.
        classes: the classes of the file, by name.
        device: replaces every device of the file, if it is given.
        made_with: the torch version that the file was made with.
        state: the state that programs assign to.
    """

    tensors: TensorReader
    classes: Mapping[str, type]
    device: torch.device | None
    made_with: str
    state: CellState
