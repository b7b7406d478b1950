"""The rage: a record of tsfunc's actions and refusals, which is always kept.

The record is a log, as of a server: traces, specializations, and refusals with their reasons. The
record is kept in memory and in a file for each run of Python, both of bounded size. The record
contains no tensor values, and only the last names of paths. ``python -m tsfunc rage`` makes a
report of it to attach to a bug report; ``docs/rage.md`` describes the content, the location, and
how to turn the file off.

Every other package may record events, so this one imports none of them.

The public names are in ``__all__``. The modules of the package are private.
"""

from __future__ import annotations

from tsfunc.rage.bundles import Run, bundle, runs
from tsfunc.rage.event_recorder import Event, events, record

__all__ = ["Event", "Run", "bundle", "events", "record", "runs"]


def __dir__() -> list[str]:
    return __all__
