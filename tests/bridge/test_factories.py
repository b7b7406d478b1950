"""torch's factories in the table: BackendSelect chooses their backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tsfunc import dispatch, specialize, vmap
from tsfunc.dispatch import DispatchKey


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_the_requested_or_the_default_device(device: str | None) -> None:
    made = dispatch.redispatch("aten::zeros", [2, 3], device=device)
    assert made.shape == (2, 3)
    assert made.device.type == (device or torch.get_default_device().type)


def test_explain_shows_the_keys_of_a_factory(capsys: pytest.CaptureFixture[str]) -> None:
    steps = dispatch.explain("aten::arange", 3).steps
    assert [step.key for step in steps] == ["BackendSelect"]
    assert "_select_backend" in capsys.readouterr().out


def test_a_key_that_is_included_sees_a_factory_first() -> None:
    seen: list[str] = []
    key = DispatchKey.define("SeesFactories")

    @dispatch.register_fallback(key)
    def see(op: dispatch.Operator, args: Any, kwargs: Any) -> Any:
        seen.append(op.name)
        return dispatch.redispatch(op, *args, **kwargs)

    with dispatch.include(key):
        assert dispatch.redispatch("aten::ones", [2]).equal(torch.ones(2))
    assert seen == ["aten::ones"]


def test_levels_see_the_factories_that_are_their_business() -> None:
    xs = torch.zeros(3)
    drawn = vmap(lambda x: x + torch.rand(()), randomness="different")(xs)
    assert len(set(drawn.tolist())) == 3
    program = specialize(lambda x: x + torch.arange(3) + torch.rand(3))
    assert not program(xs).equal(program(xs))
    assert "arange" in str(program.program) and "rand" in str(program.program)
