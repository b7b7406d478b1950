"""``explain``: a report of the rules that served a call, by line of the user's code.

The call is run once with a recorder in the thread's state (``dispatch/recording``). The report
lists the operators that were called. ``dispatch.explain`` is different: it predicts the dispatch
of one operator call from its key set.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode, resolve_name

from tsfunc import ops
from tsfunc._text import count_text
from tsfunc.bridge.tracers.boundaries import boundary, check_function
from tsfunc.bridge.tracers.function_registry import METHODS
from tsfunc.bridge.tracers.tracer import innermost_level, metadata
from tsfunc.bridge.tracers.user_queries import UserLines
from tsfunc.dispatch import DispatchKey
from tsfunc.dispatch.recorder import KernelUse, Recorder, UseCount, name_of_rule
from tsfunc.dispatch.recording import record_calls
from tsfunc.dispatch.state import tls
from tsfunc.ops import Row, find
from tsfunc.program.graphs.page import document, table
from tsfunc.program.graphs.properties import CollectiveUse
from tsfunc.user_code import called_by_user, name_of

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class OperatorUse:
    """One row of a report: an operator, called from one line and served by one rule.

    Attributes:
        operator: the dispatcher's name (``aten::add.Tensor``); for a call without a transform, the
            name of the function (``torch.add``).
        category: the shape category; None for an operator that torch does not register.
        file, line, function: the line of the user's code that called the operator.
        backward: True if the call came from the backward pass of that line.
        transform: the transform that served the call, as ``vmap(f)``; an empty string for none.
        depth: the level of that transform, 1 for the outermost; 0 for none.
        how: "rule" (its batching rule), "function rule" (a rule of the called function, whose
            operators have their own rows), "kernel" (one registered for the transform's key),
            "decomposition" (its parts were called instead, and have their own rows), "loop"
            (once for each example: slow), "once" (no batched argument),
            "traced" (recorded in a program), "torch" (no transform).
        rule: the name of the rule or kernel.
        source: the ``file:line`` of the rule, if there is one.
        within: the operator that this operator is a part of, or an empty string.
        seconds: the total time of the calls on the host, including nested calls.
    """

    operator: str
    category: str | None
    file: str
    line: int
    function: str
    backward: bool
    transform: str
    depth: int
    how: str
    rule: str
    source: str
    within: str
    times: int
    seconds: float

    @property
    def location(self) -> str:
        """The user's line in short form."""
        suffix = ", backward" if self.backward else ""
        return f"{os.path.basename(self.file)}:{self.line}, {self.function}{suffix}"

    @property
    def served_by(self) -> str:
        """The kind of rule that served the operator, and the rule, in one phrase."""
        rule = self.rule + (f" ({_short(self.source)})" if self.source else "")
        return f"{self.how}: {rule}" if rule else self.how


_COLUMNS = ("operator", "category", "line", "transform", "served by", "times", "ms")


@dataclass(frozen=True)
class CallReport:
    """The result of :func:`explain`: a table by line of code, with ``!`` at slow loops.

    ``str()`` and rich show the table in a terminal, and a notebook shows it as HTML. ``to_dict``
    returns plain values. Its counterpart in torch is the table of ``torch.profiler.profile``.

    Example:
        >>> import torch
        >>> from tsfunc import explain, vmap
        >>> report = explain(vmap(torch.sin), torch.ones(3))
        >>> [(use.operator, use.how, use.times) for use in report.uses]
        [('aten::sin', 'rule', 1)]

    Attributes:
        function: the name of the called function.
        uses: a row for each operator, line and rule, in the order of the lines.
        collectives: the number of calls of each collective along each mesh axis, on this rank.
    """

    function: str
    uses: tuple[OperatorUse, ...]
    collectives: tuple[CollectiveUse, ...] = ()

    @property
    def loops(self) -> tuple[OperatorUse, ...]:
        """The rows that were served by the slow loop."""
        return tuple(use for use in self.uses if use.how == "loop")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain Python values, fit for JSON."""
        return {
            "function": self.function,
            "calls": sum(use.times for use in self.uses),
            "loops": sum(use.times for use in self.loops),
            "operators": [asdict(use) for use in self.uses],
            "collectives": [asdict(use) for use in self.collectives],
        }

    @property
    def summary(self) -> str:
        """One line with the number of calls and of slow loops."""
        calls, loops = sum(use.times for use in self.uses), len(self.loops)
        slow = (
            f"{loops} of {count_text(len(self.uses), 'row')} by the slow loop"
            if loops
            else "no slow loop"
        )
        exchanged = "".join(
            f", {use.times} {use.collective} along {use.axis!r} ({use.bytes} bytes)"
            for use in self.collectives
        )
        return f"{self.function}: {count_text(calls, 'call')} of operators, {slow}{exchanged}"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for use in self.uses:
            mark = "! " if use.how == "loop" else ""
            indent = "  " if use.within else ""
            level = f"{use.transform} (level {use.depth})" if use.depth else ""
            ms = f"{use.seconds * 1e3:.3f}"
            name = f"{mark}{indent}{use.operator}"
            yield (name, use.category or "", use.location, level, use.served_by, str(use.times), ms)

    def show(self, path: str | os.PathLike[str] | None = None) -> None:
        """Print the table, or write it as an HTML page that can be searched and sorted.

        Args:
            path: the file of the page, which needs no other file; None prints the table.

        Example:
            >>> import os, tempfile, torch
            >>> from tsfunc import explain, vmap
            >>> report = explain(vmap(torch.sin), torch.ones(3))
            >>> report.show(os.path.join(tempfile.mkdtemp(), "report.html"))
        """
        if path is None:
            print(self)
            return
        body = f"<section>{self._table()}</section>"
        Path(path).write_text(document(self.summary, body, {}), encoding="utf-8")

    def _table(self, caption: str = "") -> str:
        slow = [use.how == "loop" for use in self.uses]
        return table(_COLUMNS, list(self._rows()), slow, caption)

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title=self.summary, title_justify="left")
        for column in _COLUMNS:
            table.add_column(column, justify="right" if column in ("times", "ms") else "left")
        for use, row in zip(self.uses, self._rows(), strict=True):
            table.add_row(*row, style="bold red" if use.how == "loop" else None)
        return table

    def __str__(self) -> str:
        from rich.console import Console

        # Outside of a terminal no lines are folded: the table is as wide as its rows.
        inside = sys.stdout.isatty()
        width = max(shutil.get_terminal_size((160, 24)).columns, 120) if inside else 1000
        console = Console(file=io.StringIO(), width=width, color_system=None)
        console.print(self.__rich__())
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text.rstrip("\n")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the report as HTML for a notebook."""
        return self._table(self.summary)


@boundary("explain")
def explain(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> CallReport:
    """Run a call once, and report the operators that it called and the rules that served them.

    Args:
        func: a transformed function, as ``vmap(f)``, or any function that uses transforms.
        args, kwargs: the arguments of the call.

    Returns:
        A :class:`CallReport`: a row for each operator, the line of the user's code that called
        it, and the rule that served it (a batching rule, its parts, the slow loop), with
        the number of calls and their time. Operators of a backward pass that a transform runs are
        listed at the lines of the forward pass. Calls of torch outside of transforms are
        served by "torch". The report omits the operators of their own backward pass, and
        elementwise calls on threads that ``func`` starts.

    Raises:
        Exception: any exception of the call.

    Example:
        >>> import torch
        >>> from tsfunc import explain, vmap
        >>> report = explain(vmap(lambda x: torch.sin(x) @ x), torch.ones(3, 2))
        >>> for use in report.uses:
        ...     print(use.operator, use.category, use.how, use.times)
        aten::sin TensorIterator rule 1
        aten::matmul Batched rule 1
        >>> report.loops
        ()

    Calls that are not explained have no overhead. torch has no counterpart; the nearest is the
    table of ``torch.profiler.profile``, which knows nothing of rules and loops.
    """
    check_function("explain", func)
    recorder = Recorder(UserLines().here)
    with record_calls(recorder), _PlainCalls(recorder):
        func(*args, **kwargs)
    # Operators that a trace runs to compute result metadata are part of tracing.
    shown_uses = [(u, n) for u, n in recorder.uses.items() if u.key != DispatchKey.Specialize.name]
    counted = sorted(shown_uses, key=_order)
    exchanges = [CollectiveUse(*key, *count) for key, count in sorted(recorder.exchanges.items())]
    uses = tuple(_describe_use(use, count) for use, count in counted)
    return CallReport(name_of(func), uses, tuple(exchanges))


def _order(counted: tuple[KernelUse, UseCount]) -> tuple[str, int, bool, int]:
    """Return the sort key: by line, with each line's backward pass after it."""
    use, count = counted
    return use.location.file, use.location.line, use.backward, count.first


def _describe_use(use: KernelUse, count: UseCount) -> OperatorUse:
    row = find(use.operator)
    how, rule, source = _server_of(use, row)
    category = ops.category_of(use.operator)
    file, line, function = use.location
    return OperatorUse(
        use.operator, category.value if category is not None else None, file, line, function,
        use.backward, use.transform, use.depth, how, rule, source, use.within, count.times,
        count.seconds,
    )  # fmt: skip


def _server_of(use: KernelUse, row: Row | None) -> tuple[str, str, str]:
    """Return the kind of rule, the rule and the source of the rule."""
    if use.how not in ("cell", "row", "column"):
        return use.how, use.rule, use.source
    if use.how == "column" and use.key == DispatchKey.Batch.name and row and row.rule:
        return "rule", name_of_rule(row.rule), row.source
    how = "traced" if use.key == DispatchKey.Trace.name else "kernel"
    return how, use.rule, use.source


def _short(source: str) -> str:
    """Return ``file:line`` relative to the folder that contains the package."""
    folder = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
    return source.removeprefix(folder)


class _PlainCalls(TorchFunctionMode):
    """Records the function's own torch calls that reach no level; these calls run unchanged."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            METHODS.get(func) is metadata
            or getattr(func, "__name__", "") in _ATTRIBUTES
            or tls.state.running is not None
            or innermost_level((*args, *kwargs.values())) is not None
            or not called_by_user()
        ):
            return func(*args, **kwargs)
        location, backward = self.recorder.location()
        name = resolve_name(func) or getattr(func, "__name__", repr(func))
        use = KernelUse(name, location, backward, "", "", 0, "torch")
        return self.recorder.run(use, lambda: func(*args, **kwargs), alone=True)


_ATTRIBUTES = frozenset({"__get__", "__set__", "__repr__", "__hash__"})
