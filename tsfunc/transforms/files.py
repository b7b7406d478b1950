"""``load``: a specialized function from a file that its ``save`` has written."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tsfunc import pytrees
from tsfunc.errors import (
    DescriptorError,
    DescriptorViolation,
    FileFormatError,
    TypeCheckError,
)
from tsfunc.program.calling.cache import Entry
from tsfunc.program.calling.calls import FirstCall
from tsfunc.program.calling.unanswered import why_unanswered
from tsfunc.transforms.specialize import Specialized

if TYPE_CHECKING:  # files need safetensors, which `import tsfunc` is to do without
    from tsfunc.program.files.state import State


class LoadedFunction(Specialized):
    """A function of which there are the programs alone; made by :func:`load`."""

    _has_function = False

    def __repr__(self) -> str:
        return f"<loaded {self.name}, {len(self.programs)} programs>"

    saved_state: State
    what: str  # where it was loaded from

    def _first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Says in what the call differs from those that there are programs for."""
        flat, tree = pytrees.flatten((args, kwargs))
        call = FirstCall(self.target, (args, kwargs), flat, tree)
        raise DescriptorViolation(
            f"{self.name}, loaded from {self.what}: there is no program for this call, and a file "
            f"does not have the function itself: {why_unanswered(call, self.cache.entries)}"
            f"Call it as these were called, or save it after a call like this one."
        )

    def _traced_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Says that there is no function to trace."""
        raise TypeCheckError(
            f"{self.name}, loaded from {self.what}, differentiates what draws random numbers, and "
            f"a trace can't record that it draws the same ones twice. Call it outside of "
            f"specialize, or save the function without the derivative, and differentiate what is "
            f"loaded."
        )

    @property
    def state(self) -> dict[str, Any]:
        """What the function's programs assign to, as it is now, by the user's names for it."""
        return self.saved_state.as_dict()

    @property
    def __assigned_state__(self) -> dict[str, list[Any]]:
        """The container of the state, by its name: traces of other functions look at it."""
        return {f"{self.name}.state": self.saved_state.values} if self.saved_state.values else {}

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadedFunction:
        """The same programs, with weights and state of their own."""
        unpickled, (data, classes) = self.__reduce__()
        copied: LoadedFunction = unpickled(data, classes)
        return copied

    def cache_clear(self) -> None:
        """Does nothing but set the counts to zero: programs that go could not be made again."""
        self.cache.forget_counts()


def load(
    path: str | os.PathLike[str],
    *,
    classes: Mapping[str, type] | None = None,
    device: torch.device | str | None = None,
) -> LoadedFunction:
    """A specialized function from a file.

    Nothing that is in a file is run: its programs are graphs of operators that torch has, looked
    up by their names, and their Python is generated anew.

    Args:
        path: a file that ``save`` of a specialized function, or of a program, has written.
        classes: the classes of named tuples and dataclasses among arguments and results, by the
            names that the file has for them (``module.Class``). Those that are imported already
            are found without; nothing is imported for a file.
        device: where everything is to be, instead of the devices that the file says.

    Returns:
        A callable like the specialized function, with the same programs, descriptors and
        weights. It answers the calls that its programs were made for, and no others.

    Raises:
        FileFormatError: it is no such file, it is damaged, or of a later format; or it needs
            an operator or a class that is not there. The message names the entry.
        OSError: the file can't be read.
        DescriptorViolation: when it is called, with what it has no program for.

    Example:
        >>> import os, tempfile, torch
        >>> from tsfunc import MetaTensorType, load, specialize
        >>> weight = torch.full((3,), 2.0)
        >>> f = specialize(lambda x: x @ weight, {"x": MetaTensorType(["n", 3])})
        >>> _ = f(torch.ones(5, 3))
        >>> path = os.path.join(tempfile.mkdtemp(), "f.tsf")
        >>> f.save(path)
        >>> load(path)(torch.ones(2, 3))
        tensor([6., 6.])

    As ``torch.export.load``, which keeps Python objects by pickle; the format is in
    ``docs/files.md``.
    """
    target = None if device is None else torch.device(device)
    with Path(path).open("rb") as file:
        return _read(file, str(path), classes or {}, target)


def unpickle(data: bytes, classes: Mapping[str, type]) -> LoadedFunction:
    """What pickle makes of a specialized function."""
    return _read(io.BytesIO(data), "pickle", classes, None)


def _read(
    file: Any, what: str, classes: Mapping[str, type], device: torch.device | None
) -> LoadedFunction:
    # Here, and not above: files need safetensors, which `import tsfunc` is to do without.
    from tsfunc.program.files.functions import read_function
    from tsfunc.transforms.control import cond, loops  # noqa: F401  what a program may run

    saved = read_function(file, what, classes, device)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise DescriptorViolation(f"{saved.name}: it was loaded from {what}, without its function.")

    missing.__name__ = missing.__qualname__ = saved.name
    missing.__signature__ = saved.signature  # type: ignore[attr-defined]
    try:
        loaded = LoadedFunction(missing, saved.descriptors, saved.limit, "freeze")
    except DescriptorError as error:  # each is well formed, but they do not go together
        raise FileFormatError(
            f"{what}: entry 'function.json': its descriptors are those of no function: {error}"
        ) from None
    loaded.saved_state, loaded.what = saved.state, what
    loaded.cache.entries = tuple(
        Entry.of_form(
            answer.program, answer.form, answer.reason, loaded.target.refused_by(None, True)
        )
        for answer in saved.answers
    )
    return loaded
