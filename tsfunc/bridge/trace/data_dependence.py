"""The message for code that needs the data of a traced tensor, with remedies."""

from __future__ import annotations

from tsfunc.bridge.tracers.user_queries import caller_of_handlers
from tsfunc.dispatch.messages import NUMPY_ADVICE, NUMPY_READS
from tsfunc.user_code import LIBRARIES, Location, source_line, user_location


def data_dependent_message(name: str, label: str) -> str:
    """Return the message for an operator or a method that needs data in a trace."""
    location = user_location()
    frame = caller_of_handlers()
    advice = NUMPY_ADVICE if name in NUMPY_READS else remedies()
    library = ""
    if frame.f_code.co_filename.startswith(LIBRARIES[1]):
        caller = Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        library = f", by {caller}{source_line(caller, ': ')}"
    return (
        f"{label}: a traced tensor was used as a Python number or bool ({name}, at "
        f"{location}{source_line(location, ': ')}{library}), but a trace has no data: "
        f"`if`, `while`, int() and float() on it can't be served. {advice}"
    )


def remedies() -> str:
    """Return the advice for code that needs data in a trace."""
    return (
        "Write a choice with tsfunc.cond(pred, true_fn, false_fn, *operands) or "
        "torch.where(pred, x, y), and use x.item() for a number that goes into tensors and sizes; "
        "state known properties of this number with torch._check(n > 0). Or make the value an "
        "argument that is not a tensor, which becomes a constant."
    )
