"""``load``: read a specialized function from a file that its ``save`` has written."""

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
from tsfunc.program.calling.cache import CachedProgram
from tsfunc.program.calling.calls import FirstCall
from tsfunc.program.calling.no_match import why_unanswered
from tsfunc.transforms.specialize import Specialized

if TYPE_CHECKING:  # files need safetensors, which `import tsfunc` must not import
    from tsfunc.program.files.state import CellState


class LoadedFunction(Specialized[..., Any]):
    """A function that consists of its programs only; made by :func:`load`."""

    _has_function = False

    def __repr__(self) -> str:
        return f"<loaded {self.name}, {len(self.programs)} programs>"

    saved_state: CellState
    what: str  # the file that it was loaded from

    def _first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raise an error that tells how the call differs from the calls of the programs."""
        flat, tree = pytrees.flatten((args, kwargs))
        call = FirstCall(self.target, (args, kwargs), flat, tree)
        raise DescriptorViolation(
            f"{self.name}, loaded from {self.what}: there is no program for this call, and a file "
            f"does not have the function itself: {why_unanswered(call, self.cache.entries)}"
            f"Call it as these were called, or save it after a call like this one."
        )

    def _traced_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raise an error: the function cannot be traced again."""
        raise TypeCheckError(
            f"{self.name}, loaded from {self.what}, differentiates what draws random numbers, and "
            f"a trace can't record that it draws the same ones twice. Call it outside of "
            f"specialize, or save the function without the derivative, and differentiate what is "
            f"loaded."
        )

    @property
    def state(self) -> dict[str, Any]:
        """The state that the programs assign to, with its current values, by the user's names."""
        return self.saved_state.as_dict()

    @property
    def __assigned_state__(self) -> dict[str, list[Any]]:
        """The state by its name, for traces of other functions that look for assigned state."""
        return {f"{self.name}.state": self.saved_state.values} if self.saved_state.values else {}

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadedFunction:
        """Return a copy with the same programs and its own weights and state."""
        unpickled, (data, classes) = self.__reduce__()
        copied: LoadedFunction = unpickled(data, classes)
        return copied

    def cache_clear(self) -> None:
        """Reset the counts. The programs are kept, since they could not be made again."""
        self.cache.forget_counts()


def load(
    path: str | os.PathLike[str],
    *,
    classes: Mapping[str, type] | None = None,
    device: torch.device | str | None = None,
) -> LoadedFunction:
    """Load a specialized function from a file.

    No code of the file is run: its programs are graphs of torch operators, found by name, and
    their Python code is generated anew.

    Args:
        path: a file that ``save`` of a specialized function, or of a program, has written.
        classes: the classes of named tuples and dataclasses among arguments and results, by their
            names in the file (``module.Class``). Classes of imported modules are found without it;
            loading imports no modules.
        device: the device for all tensors and programs, in place of the devices in the file.

    Returns:
        A callable like the specialized function, with the same programs, descriptors and
        weights. It serves the calls that its programs were made for, and no others.

    Raises:
        FileFormatError: the file is not a saved function, is damaged or has a later format, or an
            operator or class that it names is missing. The message names the entry of the file.
        OSError: the file can't be read.
        DescriptorViolation: the loaded function is called with arguments that no program serves.

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

    Similar to ``torch.export.load``, which uses pickle for Python objects; the format is described
    in ``docs/files.md``.
    """
    target = None if device is None else torch.device(device)
    with Path(path).open("rb") as file:
        return _read(file, str(path), classes or {}, target)


def unpickle(data: bytes, classes: Mapping[str, type]) -> LoadedFunction:
    """Return the specialized function that pickle restores."""
    return _read(io.BytesIO(data), "pickle", classes, None)


def _read(
    file: Any, what: str, classes: Mapping[str, type], device: torch.device | None
) -> LoadedFunction:
    # Imported here: files need safetensors, which `import tsfunc` must not import.
    from tsfunc.program.files.functions import read_function
    from tsfunc.transforms.control import cond, loops  # noqa: F401  what a program may run

    saved = read_function(file, what, classes, device)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise DescriptorViolation(f"{saved.name}: it was loaded from {what}, without its function.")

    missing.__name__ = missing.__qualname__ = saved.name
    missing.__signature__ = saved.signature  # type: ignore[attr-defined]
    try:
        loaded = LoadedFunction(missing, saved.descriptors, saved.limit, "freeze")
    except DescriptorError as error:  # each descriptor is valid, but they contradict each other
        raise FileFormatError(
            f"{what}: entry 'function.json': its descriptors are those of no function: {error}"
        ) from None
    loaded.saved_state, loaded.what = saved.state, what
    loaded.cache.entries = tuple(
        CachedProgram.of_form(
            answer.program, answer.form, answer.reason, loaded.target.refused_by(None, True)
        )
        for answer in saved.answers
    )
    return loaded
