"""The sweep finds planted faults, and passes correct functions."""

from __future__ import annotations

import random

import pytest
import torch

from tests.ops.database import Case, rows
from tests.ops.sweep import (
    VMAP,
    VMAP_VMAP,
    Mode,
    Verdict,
    loops_silently,
    sweep,
    sweep_case,
    without_examples,
)

ROWS = {row.name: row for row in rows()}
CASE = Case(lambda x, y: (x + y,), (torch.randn(2, 3), torch.randn(3)))


def test_the_database_and_the_extra_operators() -> None:
    assert len({row.entry for row in ROWS.values()}) > 700
    for name in ("add", "add (inplace)", "add (method)", "add (out)", "extra.conv2d"):
        assert name in ROWS


@pytest.mark.parametrize("mode", [VMAP, VMAP_VMAP], ids=lambda mode: mode.name)
def test_right_results_pass(mode: Mode) -> None:
    outcomes = list(sweep_case(mode, CASE, random.Random(0)))
    assert outcomes and all(outcome.verdict is Verdict.OK for outcome in outcomes)
    for name in ("add", "add (inplace)", "add (out)"):
        found = {outcome.verdict for outcome in sweep(ROWS[name], torch.float32, mode, most=3)}
        assert found == {Verdict.OK}


def test_faults_are_found() -> None:
    broken = Mode("broken", 1, lambda *given: (VMAP.ours(*given)[0] + 1,), VMAP.plain)
    assert {o.verdict for o in sweep_case(broken, CASE, random.Random(0))} == {Verdict.WRONG}


def test_calls_that_torch_refuses_do_not_count() -> None:
    refused = Case(lambda x: (x.view(5),), (torch.randn(4),))
    assert {o.verdict for o in sweep_case(VMAP, refused, random.Random(0))} == {Verdict.NONE}


def test_writes_are_seen() -> None:
    """An in-place call that leaves its argument unchanged is wrong, even if its result is right."""
    lost = Mode("lost", 1, lambda case, batch, inputs: VMAP.ours(case, batch, batch.fresh()),
                VMAP.plain)  # fmt: skip
    case = next(ROWS["add (inplace)"].cases(torch.float32, most=1))
    outcomes = list(sweep_case(lost, case, random.Random(0)))
    assert outcomes and all("written inputs" in outcome.message for outcome in outcomes)


def test_a_silent_loop_is_found() -> None:
    """A loop without a warning is found, too."""
    case = Case(lambda x: (x.sin(),), (torch.randn(3),))
    looping = Mode("looping", 1, VMAP.plain, VMAP.plain)
    assert not loops_silently(VMAP, case, [(0,)])
    assert "operators for 7 examples" in loops_silently(looping, case, [(0,)])


def test_batches_of_no_examples_are_compared_by_their_shapes() -> None:
    outcome = without_examples(VMAP, CASE, [(0, 1)])
    assert outcome.verdict is Verdict.OK
    case = Case(lambda x, y: ((x + y).sum(),), CASE.tensors)
    broken = Mode("broken", 1, lambda *given: (VMAP.ours(*given)[0][:, 0],), VMAP.plain)
    assert without_examples(broken, CASE, [(0, 1)]).verdict is Verdict.WRONG
    assert without_examples(VMAP, case, [(0,)]).verdict is Verdict.OK
