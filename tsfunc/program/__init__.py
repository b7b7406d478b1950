"""Programs: what a traced function became.

In the order in which a call meets them: ``capture`` records a function as a graph, ``passes``
simplify it, ``codegen`` writes it as Python, ``program`` holds it all.
"""

from __future__ import annotations

from tsfunc.program.calling.capture import capture
from tsfunc.program.graphs.program import Program

__all__ = ["Program", "capture"]
