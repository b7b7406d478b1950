"""The command line: ``tsfunc`` or ``python -m tsfunc``.

The command is public, the module is private.
"""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from tsfunc import ops, rage
from tsfunc.bridge import compiled
from tsfunc.bridge.batch.fallback import describe_execution
from tsfunc.bridge.trace.packaging import write_aoti_package, write_onnx
from tsfunc.bridge.tracers.function_registry import registry
from tsfunc.dispatch.recorder import name_of_rule
from tsfunc.errors import ExportError, FileFormatError, MalformedProgramError, UnknownOperatorError
from tsfunc.ops.catalogue import counts
from tsfunc.ops.catalogue.lookup import overload_names
from tsfunc.rage.event_recorder import folder_of_files
from tsfunc.transforms.specialize import load
from tsfunc.transforms.specialized import LoadedFunction


class ExportTarget(str, enum.Enum):
    """A format that ``export`` writes."""

    PT2 = "pt2"
    ONNX = "onnx"
    AOTI = "aoti"


FileArgument = Annotated[Path, typer.Argument(help="A file that save() wrote.")]

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tsfunc {sys.modules['tsfunc'].__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def tsfunc(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the versions."
    ),
) -> None:
    """Function transforms for PyTorch."""


@app.command("ops")
def show_operators(
    name: str = typer.Argument("", help="An operator, such as aten::add.Tensor."),
    category: str = typer.Option("", help="List the operators of one shape category."),
) -> None:
    """Show the catalogue of operators: a census, one operator, or one category."""
    if name:
        _one_operator(name)
    elif category:
        _one_category(category)
    else:
        _census()


@app.command("show")
def show_file(
    file: FileArgument,
    html: str = typer.Option("", help="Write one HTML page to this file instead."),
) -> None:
    """Show the programs of a file: code, types, users' lines, guards, bodies of control flow."""
    loaded = _load(file)
    if html:
        loaded.show(html)
        print(f"Wrote {html}: {_count(loaded)}.")
        return
    console = Console()
    for i, program in enumerate(loaded.programs, 1):
        print(f"# program {i} of {len(loaded.programs)}")
        if console.is_terminal:
            console.print(Syntax(str(program), "python", background_color="default"))
        else:
            print(program)
        print("guards:")
        for line in program.guards.texts:
            print(f"  {line}")


@app.command("verify")
def verify_file(file: FileArgument) -> None:
    """Check that a file is complete and that its programs are well formed."""
    loaded = _load(file)
    for program in loaded.programs:
        try:
            program.verify()
        except MalformedProgramError as error:
            _fail(str(error))
    print(f"{file}: {_count(loaded)} verified.")


@app.command("export")
def export_file(
    file: FileArgument,
    to: Annotated[
        ExportTarget, typer.Option(help="pt2: torch.export; onnx: ONNX; aoti: compiled by torch.")
    ],
    output: str = typer.Option(
        "", "--output", "-o", help="The file to write; by default beside FILE."
    ),
    program: int = typer.Option(1, help="The program to export; 1 is the one used last."),
) -> None:
    """Write a program of a file in a format of torch's tools."""
    loaded = _load(file)
    if not 1 <= program <= len(loaded.programs):
        _fail(f"{file}: there is no program {program}. It has {_count(loaded)}.")
    suffix = {"pt2": ".pt2", "onnx": ".onnx", "aoti": ".aoti.pt2"}[to.value]
    path = Path(output) if output else file.with_suffix(suffix)
    try:
        exported = loaded.programs[program - 1].to_exported_program()
        if to is ExportTarget.PT2:
            torch.export.save(exported, path)
        elif to is ExportTarget.ONNX:
            write_onnx(exported, path)
        else:
            write_aoti_package(exported, path)
    except ExportError as error:
        _fail(str(error))
    except ImportError as error:
        _fail(
            f"export --to {to.value} needs another package: {error}. pip install 'tsfunc[onnx]' "
            f"installs what ONNX needs."
        )
    print(f"Wrote {path}.")


def _load(file: Path) -> LoadedFunction:
    try:
        return load(file)
    except (FileFormatError, OSError) as error:
        _fail(str(error))


def _count(loaded: LoadedFunction) -> str:
    count = len(loaded.programs)
    return f"{count} program{'s' if count != 1 else ''} of {loaded.name}"


@app.command("rage")
def show_record(
    number: int = typer.Argument(
        0, help="The run to show; 1 is the newest. A terminal prompts for it."
    ),
    listed: bool = typer.Option(False, "--list", help="List the recorded runs."),
    output: str = typer.Option("", "--output", "-o", help="Write to a file."),
) -> None:
    """Show what a run of Python did with tsfunc and its errors, to attach to a bug report."""
    runs = rage.runs()
    if not runs:
        _fail(f"No run is remembered. Files are kept in {folder_of_files() or 'no folder'}.")
    if listed or (not number and len(runs) > 1 and _in_a_terminal()):
        _print_table(["run", "what"], [[str(i), str(run)] for i, run in enumerate(runs, 1)])
        if listed:
            return
        number = typer.prompt("Which run", default=1, type=int)
    if not 0 <= number <= len(runs):
        _fail(f"There is no run {number}. There are {len(runs)}: tsfunc rage --list shows them.")
    text = rage.bundle(runs[max(number, 1) - 1])
    if output:
        Path(output).write_text(text, encoding="utf-8")
    else:
        print(text, end="")


@app.command("build")
def build_handlers(
    if_possible: Annotated[
        bool, typer.Option("--if-possible", help="A failed compilation is a message, no error.")
    ] = False,
) -> None:
    """Compile the handlers of batched tensors, for faster eager vmap calls."""
    path = compiled.library_path()
    if path.exists():
        print(f"{path} is there already.")
        return
    print("Compiling the handlers of batched tensors for this torch takes half a minute or more.")
    try:
        path, seconds = compiled.build()
    except (OSError, RuntimeError) as error:
        if not if_possible:
            _fail(str(error))
        print(f"{error}\nThe handlers were not compiled: those in Python serve every call.")
        return
    print(f"{path} was compiled in {seconds:.0f} s. The next process that imports tsfunc uses it.")


@app.command("doctor")
def examine_installation() -> None:
    """Show versions, backends and devices, and check the private names of torch that are used."""
    from tsfunc import doctor  # loads torch's compilers

    report = doctor.examine()
    print(report)
    if report.failures:
        raise typer.Exit(1)


def _in_a_terminal() -> bool:
    return sys.stdin.isatty()


def _census() -> None:
    rows = counts.census_rows()
    cells = [[label, str(now), "" if then is None else str(then)] for label, now, then in rows]
    then = sum(counts.CENSUS_2020.values())
    total = ["all", str(sum(now for _, now, _ in rows)), str(then)]
    _print_table(["category", "now", "2020"], [*cells, total])


def _one_category(label: str) -> None:
    category_named = {category.value.lower(): category for category in ops.Category}.get(
        label.lower()
    )
    if category_named is None:
        categories = ", ".join(category.value for category in ops.Category)
        _fail(f"There is no category {label!r}. There are: {categories}.")
    entries = [ops.lookup(name) for name in ops.operators(category_named)]
    _print_table(["operator", "why"], [[entry.name, entry.source] for entry in entries])


def _one_operator(name: str) -> None:
    try:
        entry = ops.lookup(name if "::" in name else f"aten::{name}")
    except UnknownOperatorError as error:
        overloads = overload_names(name if "::" in name else f"aten::{name}")
        if not overloads:
            _fail(str(error))
        entries = [ops.lookup(overload) for overload in overloads]
        _print_table(
            ["overload", "category", "under vmap"],
            [[each.name, each.category.value, _rule_under_vmap(each)] for each in entries],
        )
        return
    facts = entry.facts
    lines = {
        "operator": entry.name,
        "category": entry.category.value,
        "why": entry.source,
        "dims of results": facts.result.value,
        "taken from": ", ".join(facts.carriers),
        "named by": ", ".join(facts.dims),
        "writes": ", ".join(facts.mutates),
        "shares memory of": ", ".join(facts.aliases),
        "also": ", ".join(facts.marks),
        "ranks it took": entry.evidence.in_words().partition(";")[0],
        "under vmap": _rule_under_vmap(entry),
    }
    rows = [[label, value] for label, value in lines.items() if value]
    _print_table(None, [*rows, *_function_rules(entry.name)])


def _function_rules(operator: str) -> list[list[str]]:
    """Return a row for each function rule of an operator, in the order in which they are tried."""
    rows = []
    for function, rule in registry.rules_of(operator):
        file, _, line = rule.source.rpartition(":")
        place = f", {_shorten_path(file)}:{line}" if line else ""
        rows.append([function, f"function rule {rule.name} ({rule.stage.name}){place}"])
    return rows


def _rule_under_vmap(entry: ops.OperatorEntry) -> str:
    if entry.rule is None:
        return describe_execution(entry.name)
    return f"rule {name_of_rule(entry.rule)}, {_shorten_path(entry.file)}:{entry.line}"


def _shorten_path(file: str) -> str:
    """Return a path relative to the working directory if it is below it, else unchanged."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _print_table(header: list[str] | None, rows: list[list[str]]) -> None:
    """Print a table: drawn in a terminal, aligned columns elsewhere."""
    console = Console()
    if console.is_terminal:
        table = Table(show_header=header is not None)
        for label in header or ["", ""]:
            table.add_column(label, justify="right" if label in ("now", "2020") else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    every = [*([header] if header else []), *rows]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    for row in every:
        print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


def _fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise typer.Exit(1)


def main() -> None:
    """Run the command with the arguments of the process."""
    app(prog_name="tsfunc")
