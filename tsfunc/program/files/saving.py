"""Selection of the parts of a specialized function that go into a file, and the writing of it."""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import optree

from tsfunc.program.calling.cache import Cache
from tsfunc.program.calling.target import Target
from tsfunc.program.files.archive import replace
from tsfunc.program.files.forms import storable
from tsfunc.program.files.functions import Answer, SavedFunction, function_bytes, read_function
from tsfunc.program.files.state import is_current
from tsfunc.program.files.variants import also_answered
from tsfunc.program.graphs.program import Program
from tsfunc.types.values import class_name


def function_to_save(
    target: Target, cache: Cache, programs: Sequence[Program], exact: bool = False
) -> SavedFunction:
    """Return the parts of a specialized function that go into a file.

    Args:
        target: the function.
        cache: its programs.
        programs: the programs to save; an empty sequence selects all.
        exact: whether the file answers only calls like those that were made.

    Raises:
        RuntimeError: there is no program.
        ValueError: one of the programs does not belong to the function, or a guard on a value from
            outside fails for all of them.
    """
    if not cache.entries:
        raise RuntimeError(
            f"save({target.name}): there is no program yet; one is made by the first call."
        )
    known = cache.programs
    if any(program not in known for program in programs):
        raise ValueError(
            f"save({target.name}): expected some of its own programs (see .programs), got another."
        )
    chosen = [entry for entry in cache.entries if not programs or entry.program in programs]
    _refuse_attributes(target.name, [entry.program for entry in chosen])
    current = [entry for entry in chosen if is_current(entry.program)]
    if not current:
        raise ValueError(
            f"save({target.name}): what the function reads beside its arguments is not as it was "
            f"for any of the calls that there are programs for. Call it as it is now, then save it."
        )
    chosen = current
    if not exact:
        for entry in tuple(chosen):
            chosen += also_answered(target, entry, chosen)
    answers = tuple(Answer(entry.program, storable(entry.form), entry.text) for entry in chosen)
    described = tuple(contract.descriptors for contract in target.contracts)
    return SavedFunction(target.name, target.signature, described, cache.limit, answers)


def program_to_save(program: Program) -> SavedFunction:
    """Return a single program in the form of a file: a function of any arguments.

    Raises:
        ValueError: the program was made from a graph, and not for calls.
    """
    if program.form is None:
        raise ValueError(
            f"save({program.name}): the program was made by make_graph, and not for calls. Save "
            f"the program of a specialized function."
        )
    kinds = (("args", inspect.Parameter.VAR_POSITIONAL), ("kwargs", inspect.Parameter.VAR_KEYWORD))
    signature = inspect.Signature([inspect.Parameter(name, kind) for name, kind in kinds])
    _refuse_attributes(program.name, [program])
    answer = Answer(program, storable(program.form), "the program itself")
    return SavedFunction(program.name, signature, (), 1, (answer,))


def _refuse_attributes(name: str, programs: Sequence[Program]) -> None:
    for program in programs:
        for attribute in program.attributes:
            raise ValueError(
                f"save({name}): the function reads {attribute}, and a file has no place for "
                f"attributes of tensors and for numbers that vary outside. Pass what it is as an "
                f"argument."
            )


def write(path: Path, function: SavedFunction) -> None:
    """Write a file."""
    replace(path, function_bytes(function))


def pickled(function: SavedFunction) -> tuple[bytes, dict[str, type]]:
    """Return the bytes of a file, and the classes that it names."""
    trees = [answer.program.out_tree for answer in function.answers]
    trees += [answer.form.tree for answer in function.answers]
    classes = {class_name(cls): cls for tree in trees for cls in _classes_of(tree)}
    return function_bytes(function), classes


def unpickled(data: bytes, classes: Mapping[str, type]) -> Program:
    """Return the program of a file with one program."""
    (answer,) = read_function(io.BytesIO(data), "pickle", classes, None).answers
    return answer.program


def _classes_of(tree: optree.PyTreeSpec) -> Iterator[type]:
    if tree.type is not None and tree.type.__module__ not in ("builtins", "collections"):
        yield tree.type
    for child in tree.children():
        yield from _classes_of(child)
