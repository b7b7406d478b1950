"""Ways to run a program; a worker is asked for one by its name."""

from __future__ import annotations

from collections.abc import Callable

from tools.fuzz import running
from tools.fuzz.program import Program
from tools.fuzz.running import Verdict

MODES: dict[str, Callable[[Program], Verdict]] = {"towers": running.run}
