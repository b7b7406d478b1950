"""The example of a user's operator runs, and needs the public API only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "new_operator.py"


def test_it_runs_as_a_script() -> None:
    run = subprocess.run([sys.executable, str(EXAMPLE)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "examples::roll_scale was served by its rule rule; slow loops: 0\n"


def test_it_takes_the_public_api_only() -> None:
    for node in ast.walk(ast.parse(EXAMPLE.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            assert not node.module.startswith("tsfunc.")
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_")
