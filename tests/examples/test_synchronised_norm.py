"""The example runs, and compares itself with torch's batch norm of the whole batch."""

from __future__ import annotations

import pytest

from examples import synchronised_norm


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    synchronised_norm.main()
    assert "of the whole batch" in capsys.readouterr().out
