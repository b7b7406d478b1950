"""A specialized function as a file: its programs, and the calls that each of them serves.

    format.json           the kind of file, and the size and checksum of each other entry
    function.json         the function: its parameters, its descriptors, the calls it serves
    programs/0.json       a program: its graph
    programs/0.py         the Python of the program, for people; it is never read
    tensors.json          the tensors of the programs
    tensors.safetensors   their memory

docs/files.md specifies the format.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import optree
import torch

from tsfunc.errors import AnnotationError, DescriptorError, FileFormatError
from tsfunc.program.fields import Field
from tsfunc.program.files.archive import Archive, json_bytes, write_archive
from tsfunc.program.files.json_values import NoFileForm, ValueReader, encode, printable_text
from tsfunc.program.files.operator_calls import NUMBER
from tsfunc.program.files.program_state import CellState, FileContext, StateWriter, read_state
from tsfunc.program.files.programs import (
    CallSpecReader,
    decode_program,
    encode_call_spec,
    encode_program,
    storable_spec,
    without_metadata,
)
from tsfunc.program.files.tensors import TensorReader, TensorWriter
from tsfunc.program.graphs.data import ProgramData
from tsfunc.program.guarding.call_spec import CallSpec, argument_paths_of, guards_of_call_spec
from tsfunc.types import parse_descriptor
from tsfunc.types.grammar import Descriptor
from tsfunc.types.values import class_name

KIND, VERSION = "tsfunc program", 3
_KINDS = {
    str(kind).lower(): kind
    for kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    )
}
_LONGEST_TEXT = 20_000


@dataclass(frozen=True)
class SavedProgram:
    """A program of a function, and a kind of call that it serves."""

    program: ProgramData
    call_spec: CallSpec
    reason: str


@dataclass(frozen=True)
class SavedFunction:
    """The parts of a function that a file has.

    Attributes:
        limit: the maximum number of programs.
        answers: its programs and the calls that they serve, the last used first.
        made_with: the torch version that it was made with.
        state: the state that its programs assign to, if it was read from a file.
    """

    name: str
    signature: inspect.Signature
    descriptors: tuple[Mapping[str, Descriptor], ...]
    limit: int
    answers: tuple[SavedProgram, ...]
    made_with: str = torch.__version__
    state: CellState = field(default_factory=CellState)


class UnsavableValueError(ValueError):
    """A function has a value that a file can't hold; the message names the value and a way out."""


# --- selection of the parts of a program that go into a file


def program_to_save(program: ProgramData) -> SavedFunction:
    """Return a single program in the form of a file: a function of any arguments.

    Raises:
        ValueError: the program was made from a graph, and not for calls.
    """
    if program.call_spec is None:
        raise ValueError(
            f"save({program.name}): the program was made by make_graph, and not for calls. Save "
            f"the program of a specialized function."
        )
    kinds = (("args", inspect.Parameter.VAR_POSITIONAL), ("kwargs", inspect.Parameter.VAR_KEYWORD))
    signature = inspect.Signature([inspect.Parameter(name, kind) for name, kind in kinds])
    refuse_attributes(program.name, [program])
    answer = SavedProgram(program, storable_spec(program.call_spec), "the program itself")
    return SavedFunction(program.name, signature, (), 1, (answer,))


def refuse_attributes(name: str, programs: Sequence[ProgramData]) -> None:
    """Refuse programs that read attributes of tensors, or numbers that vary outside."""
    for program in programs:
        for attribute in program.attributes:
            raise ValueError(
                f"save({name}): the function reads {attribute}, and a file has no place for "
                f"attributes of tensors and for numbers that vary outside. "
                f"{program.advice_about_attributes}"
            )


def pickle_function(function: SavedFunction) -> tuple[bytes, dict[str, type]]:
    """Return the bytes of a file, and the classes that it names."""
    trees = [answer.program.out_tree for answer in function.answers]
    trees += [answer.call_spec.tree for answer in function.answers]
    classes = {class_name(cls): cls for tree in trees for cls in _classes_of(tree)}
    return function_bytes(function), classes


def _classes_of(tree: optree.PyTreeSpec) -> Iterator[type]:
    if tree.type is not None and tree.type.__module__ not in ("builtins", "collections"):
        yield tree.type
    for child in tree.children():
        yield from _classes_of(child)


# --- writing


def function_bytes(function: SavedFunction) -> bytes:
    """Return the bytes of a file.

    Raises:
        UnsavableValueError: the function has a value that a file can't hold.
    """
    tensors = TensorWriter()
    entries: dict[str, bytes] = {}
    try:
        state = StateWriter([answer.program for answer in function.answers])
        numbers = _write_programs(function, tensors, state, entries)
        calls = [
            {
                "program": numbers[answer.program],
                "reason": printable_text(answer.reason),
                "form": encode_call_spec(answer.call_spec, _argument_names(answer.call_spec)),
            }
            for answer in function.answers
        ]
        head = {
            "name": printable_text(function.name),
            "parameters": [_encode_parameter(p) for p in function.signature.parameters.values()],
            "descriptors": [
                {name: _text(name, d) for name, d in descriptor.items()}
                for descriptor in function.descriptors
            ],
            "limit": function.limit,
            "calls": calls,
            **({"state": state.cells(tensors)} if len(state) else {}),
        }
    except NoFileForm as error:
        why = error.why or (
            ". Pass tensors, numbers, strings and containers of these; values that the "
            "function captures are part of its programs."
        )
        raise UnsavableValueError(
            f"save({function.name}): a file can't hold {error}{why}"
        ) from None
    records, memory = tensors.written()
    all_entries = {
        "function.json": json_bytes(head),
        **entries,
        "tensors.json": json_bytes(records),
        "tensors.safetensors": memory,
    }
    about = {"format": KIND, "version": VERSION, "tsfunc": _version(), "torch": torch.__version__}
    return write_archive(about, all_entries)


def _write_programs(
    function: SavedFunction, tensors: TensorWriter, state: StateWriter, entries: dict[str, bytes]
) -> dict[ProgramData, int]:
    """Write the programs, equal programs once; return the number of each program."""
    numbers: dict[ProgramData, int] = {}
    written: dict[bytes, int] = {}
    for program in dict.fromkeys(answer.program for answer in function.answers):
        only = function.descriptors[0] if len(function.descriptors) == 1 else None
        encoded = encode_program(program, tensors, state, only)
        number = written.setdefault(json_bytes(without_metadata(encoded)), len(written))
        numbers[program] = number
        if f"programs/{number}.json" not in entries:
            entries[f"programs/{number}.json"] = json_bytes(encoded)
            entries[f"programs/{number}.py"] = f"{program}\n".encode(errors="replace")
    return numbers


def _version() -> str:
    try:
        return importlib.metadata.version("tsfunc")
    except importlib.metadata.PackageNotFoundError:  # run from its source, not installed
        return "unknown"


def _argument_names(call_spec: CallSpec) -> Callable[[int], str]:
    """Return a function from the index of a flattened argument to its name in errors."""
    paths = call_spec.tree.paths()

    def argument_name(i: int) -> str:
        (which, first, *rest) = paths[i]
        at = "".join(f"[{entry!r}]" for entry in rest)
        return f"args[{first}]{at}" if which == 0 else f"{first}{at}"

    return argument_name


def _text(name: str, descriptor: Descriptor) -> str:
    text = str(descriptor)
    try:
        if str(parse_descriptor(text)) == text:
            return text
    except AnnotationError:
        pass
    raise NoFileForm(f"the descriptor of {name}, {text[:80]}, which has no text that reads back")


def _encode_parameter(parameter: inspect.Parameter) -> dict[str, Any]:
    record: dict[str, Any] = {"name": parameter.name, "kind": str(parameter.kind).lower()}
    if parameter.default is not parameter.empty:
        try:
            record["default"] = encode(parameter.default)
        except NoFileForm:
            record["default"] = {"unknown": True}
    return record


# --- reading


def read_function(
    file: BinaryIO, label: str, classes: Mapping[str, type], device: torch.device | None
) -> SavedFunction:
    """Return the function of a file.

    Args:
        classes: classes by name, in addition to those that are imported.
        device: replaces every device in the file, if it is given.

    Raises:
        FileFormatError: the file has another format, or it is damaged.
    """
    archive = Archive(file, label)
    made_with = _read_head(archive)
    values = ValueReader(device=device)
    tensors = TensorReader(
        archive.json("tensors.json"),
        archive.read("tensors.safetensors"),
        f"{label}: tensors.safetensors",
        values,
    )
    function = archive.json("function.json")
    keys = ("name", "parameters", "descriptors", "limit", "calls")
    function.require_keys(keys, ("state",))
    name, parameters, described, limit, calls = map(function.at, keys)
    state = read_state(function.get("state"), tensors, values)
    context = FileContext(tensors, classes, device, made_with, state)
    signature = _read_signature(parameters)
    answers = _read_answers(archive, calls, context, signature)
    return SavedFunction(
        name.line(),
        signature,
        tuple(
            _read_descriptors(described_field, signature, classes)
            for described_field in described.items()
        ),
        limit.integer(1),
        answers,
        made_with,
        state,
    )


def _read_head(archive: Archive) -> str:
    """Check the manifest of a file; return the torch version it was made with."""
    head = archive.head
    kind = head.get("format")
    if kind is None:
        head.fail(f"not a file of tsfunc: expected the format {KIND!r}, got none")
    if kind.value != KIND:
        kind.fail_expected(f"{KIND!r}, which a file of tsfunc has")
    version = head.at("version").integer(1)
    if version != VERSION:
        head.fail(
            f"expected a file of format {VERSION}, got format {version}, of a later version of "
            f"tsfunc ({head.at('tsfunc').line()})"
        )
    *_, made_with, entries = head.record("format", "version", "tsfunc", "torch", "entries")
    archive.require_entries(entries)
    return made_with.line()


@dataclass(frozen=True)
class _CallKind:
    """A kind of call, and the number of the program that serves it."""

    field: Field
    program: int
    reason: str
    call_spec: CallSpec


def _read_calls(field: Field, count: int, call_specs: CallSpecReader) -> list[_CallKind]:
    kinds = []
    for call in field.items():
        number, reason, call_spec = call.record("program", "reason", "form")
        program = number.integer(0, count - 1)
        kinds.append(_CallKind(call, program, reason.line(), call_specs.decode(call_spec)))
    return kinds


def _count_of_programs(archive: Archive) -> int:
    """Return the number of programs; check that there are no unknown entries."""
    files = {"format.json", "function.json", "tensors.json", "tensors.safetensors"}
    count = (len(archive.names()) - len(files)) // 2
    expected = files | {f"programs/{i}.{end}" for i in range(count) for end in ("json", "py")}
    for name in archive.names():
        if name not in expected:
            raise FileFormatError(
                f"{archive.label}: entry {name!r} does not belong in a file of tsfunc."
            )
    return count


def _read_answers(
    archive: Archive, calls: Field, context: FileContext, signature: inspect.Signature
) -> tuple[SavedProgram, ...]:
    """Return the programs with the calls that they serve."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    call_specs = CallSpecReader(context, inspect.Parameter.VAR_KEYWORD in kinds)
    count = _count_of_programs(archive)
    calls_read = _read_calls(calls, count, call_specs)
    made_for: dict[int, _CallKind] = {}
    for call in calls_read:
        # A program was made for its call with the most named dims; its other calls are special
        # cases.
        first_call = made_for.setdefault(call.program, call)
        if len(call.call_spec.named_dims) > len(first_call.call_spec.named_dims):
            made_for[call.program] = call
    if len(made_for) < count:
        calls.fail("there are programs that serve no call")
    programs = []
    for i in range(count):
        archive.read(f"programs/{i}.py")  # checks the checksum; the entry is not used
        first_call = made_for[i]
        program = decode_program(archive.json(f"programs/{i}.json"), context, first_call.call_spec)
        programs.append(_of_call_spec(first_call.field, program, first_call.call_spec, signature))
    return tuple(
        _answer(call.field, programs[call.program], call.call_spec, call.reason)
        for call in calls_read
    )


def _of_call_spec(
    field: Field, program: ProgramData, call_spec: CallSpec, signature: inspect.Signature
) -> ProgramData:
    try:
        read = dataclasses.replace(
            program,
            call_spec=call_spec,
            argument_paths=argument_paths_of(signature, len(call_spec.leaves), call_spec.tree),
            signature=signature,
            guards=guards_of_call_spec(call_spec, signature),
            trace_guards=call_spec.trace_guards,
        )
        _ = read.descriptors  # raises if the call is not one of the function
    except (TypeError, ValueError) as error:
        field.fail(f"not a call of the function: {error}")
    return read


def _answer(field: Field, program: ProgramData, call_spec: CallSpec, reason: str) -> SavedProgram:
    count = len(call_spec.leaves)
    arguments = [at for at in program.inputs if at < count]
    last = count + _reads(program)
    read = list(program.inputs[len(arguments) :])
    if read != list(range(count, last)) or any(update.owner != last for update in program.updates):
        field.fail("its program has inputs that the call does not have")
    tensors = {spec.position for spec in call_spec.inputs}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, at in zip(placeholders, arguments, strict=False):
        # A number is an input if its descriptor is its type; the call is guarded on its value.
        is_number = node.meta.get("value_type") == NUMBER
        number = is_number and type(call_spec.leaves[at]) in (int, float)
        if at not in tensors and not number:
            field.fail("its program has inputs that the call does not have")
    return SavedProgram(program, call_spec, reason)


def _reads(program: ProgramData) -> int:
    """Return the number of a program's inputs that it reads from its state."""
    return (
        len(program.closure_guards.values) - bool(program.updates)
        if program.closure_guards is not None
        else 0
    )


def _read_signature(field: Field) -> inspect.Signature:
    parameters = []
    for item in field.items():
        item.require_keys(("name", "kind"), ("default",))
        name = item.at("name").text()
        if not name.isidentifier():
            item.at("name").fail_expected("a name")
        kind = item.at("kind").one_of(_KINDS, "a kind of parameter")
        try:
            parameters.append(inspect.Parameter(name, kind, default=_default(item.get("default"))))
        except ValueError as error:
            item.fail(str(error))
    try:
        return inspect.Signature(parameters)
    except ValueError as error:
        field.fail(str(error))


class _UnknownDefault:
    """Stand-in for a default value that a file can't hold."""


def _default(field: Field | None) -> Any:
    if field is None:
        return inspect.Parameter.empty
    return _UnknownDefault() if field.value == {"unknown": True} else ValueReader().decode(field)


def _read_descriptors(
    field: Field, signature: inspect.Signature, classes: Mapping[str, type]
) -> dict[str, Descriptor]:
    descriptors = {}
    for name, text in field.mapping().items():
        if name not in signature.parameters:
            text.fail("there is no such parameter")
        if len(text.line()) > _LONGEST_TEXT:
            text.fail("the descriptor is too long")
        try:
            descriptors[name] = parse_descriptor(text.value, classes)
        except (DescriptorError, ValueError, TypeError, RecursionError) as error:
            text.fail(f"not a descriptor: {error}")
    return descriptors
