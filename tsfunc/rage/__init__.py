"""The rage: a record of what tsfunc did and refused, which is always kept.

What was traced and specialized, what was refused, with the reasons, the way a server keeps a log:
in memory, and in a file for each run of Python, both of bounded size. There are no tensor values in
it and no paths but the last names of files. ``python -m tsfunc rage`` makes a report of it to send
along with a bug; ``docs/rage.md`` says what is in it, where it lies and how to turn the file off.

Every other room may record; so it imports none of them.
"""

from __future__ import annotations

from tsfunc.rage.bundles import Run, bundle, runs
from tsfunc.rage.recorder import Event, events, record

__all__ = ["Event", "Run", "bundle", "events", "record", "runs"]
