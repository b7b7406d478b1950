"""Programs: the results of tracing a function.

In the order of a call: ``capture`` records a function as a graph, ``passes`` simplify the graph,
``codegen`` writes it as Python, and ``program`` holds the result.

The public names are in ``__all__``. The modules of the package are private.
"""

from __future__ import annotations

from tsfunc.program.calling.capture import capture
from tsfunc.program.program import Program

__all__ = ["Program", "capture"]


def __dir__() -> list[str]:
    return __all__
