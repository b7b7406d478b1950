"""The first NaN: the error names the operator, the user's line and the example."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tsfunc import cond, debug, grad, jvp, scan, specialize, vmap
from tsfunc.errors import NanError

ROOT = Path(__file__).resolve().parents[2]


def shifted(x: Tensor) -> Tensor:
    y = x - 2
    z = y.sqrt()  # here
    return z.sum()


def norm(x: Tensor) -> Tensor:
    return x.square().sum().sqrt()


def fails(call: Callable[..., Any], *args: Any) -> NanError:
    with pytest.raises(NanError) as caught, debug.nans():
        call(*args)
    return caught.value


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda f: f,
    "grad": grad,
    "vmap": vmap,
    "vmap(grad)": lambda f: vmap(grad(f)),
    "vmap(jvp)": lambda f: vmap(lambda x: jvp(f, (x,), (x,))),
    "chunks": lambda f: vmap(f, chunk_size=2),
}


@pytest.mark.parametrize("program", [False, True])
@pytest.mark.parametrize("name", list(TRANSFORMS))
def test_the_operator_the_line_and_the_example(name: str, program: bool) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    at = random.Random(seed).randrange(6)
    x = torch.full((6,), 3.0)
    x[at] = 1.0
    call = TRANSFORMS[name](shifted)
    error = fails(specialize(call) if program else call, x)
    assert error.operator == "aten::sqrt"
    assert error.examples == ((at,) if "vmap" in name or name == "chunks" else ())
    assert "test_nans.py" in str(error) and "z = y.sqrt()  # here" in str(error)
    assert isinstance(error, FloatingPointError)


@pytest.mark.parametrize("program", [False, True])
def test_a_backward_pass_names_the_line_of_the_forward_call(program: bool) -> None:
    call = vmap(grad(norm))
    x = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]])
    error = fails(specialize(call) if program else call, x)
    assert error.examples == (2,)
    assert "the backward pass of" in str(error)
    assert "return x.square().sum().sqrt()" in str(error)
    assert "backward pass" in str(fails(grad(norm), torch.zeros(2)))


def test_nested_vmaps_have_an_index_each() -> None:
    x = torch.full((2, 3, 4), 3.0)
    x[1, 2, 0] = 0
    for call in (vmap(vmap(shifted)), specialize(vmap(vmap(shifted)))):
        assert fails(call, x).examples == (1, 2)
    moved = vmap(vmap(shifted, in_dims=1), in_dims=2)
    assert fails(moved, x).examples == (0, 2)
    assert "at (1,)" in str(fails(moved, x))


@pytest.mark.parametrize("program", [False, True])
def test_control_flow(program: bool) -> None:
    def choice(x: Tensor) -> Tensor:
        return cond(x < 2, lambda x: (x - 2).sqrt(), lambda x: x, x)

    def loop(x: Tensor) -> Tensor:
        return scan(lambda c, _: (c.log(), c), x, torch.arange(4))[0]

    make = specialize if program else lambda f: f
    assert fails(make(vmap(choice)), torch.tensor([4.0, 3.0, 1.0])).examples == (2,)
    assert fails(make(loop), torch.tensor(3.0)).operator == "aten::log"
    assert fails(make(vmap(loop)), torch.tensor([1e9, 3.0])).operator == "aten::log"


def test_calls_without_nans_are_unchanged() -> None:
    x = torch.randn(3, 4)
    functions: list[Callable[[Tensor], Any]] = [
        vmap(lambda x: x.softmax(0)), vmap(grad(norm)), specialize(vmap(grad(norm))),
        lambda x: torch.nansum(torch.full((3,), torch.nan)) + x,
        lambda x: torch.empty(5).fill_(1) + x[0, 0],
    ]  # fmt: skip
    for func in functions:
        want = func(x)
        with debug.nans():
            assert func(x).equal(want)


def test_a_nan_within_a_rule_is_not_an_error() -> None:
    x = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    with debug.nans():
        assert vmap(lambda x: torch.nansum(x))(x).tolist() == [1, 5]


def test_a_loaded_program_gives_the_line(tmp_path: Path) -> None:
    f = specialize(shifted)
    f(torch.ones(3))
    f.save(tmp_path / "f.tsf")
    error = fails(tsfunc.load(tmp_path / "f.tsf"), torch.ones(3))
    assert error.operator == "aten::sqrt" and "z = y.sqrt()  # here" in str(error)


def test_a_function_that_only_a_trace_can_serve() -> None:
    def f(x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            x.max().item()
        return (x - 2).log()

    error = fails(specialize(vmap(f)), torch.tensor([[1.0, 9.0], [3.0, 4.0]]))
    assert error.operator == "aten::log" and error.examples == ()
    assert "return (x - 2).log()" in str(error)


@pytest.fixture
def switched_on() -> Iterator[None]:
    tsfunc.config.debug_nans = True
    yield
    tsfunc.config.debug_nans = False


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("name", ["vmap", "grad", "specialize"])
def test_the_setting_holds_in_every_thread(name: str) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            getattr(tsfunc, name)(shifted)(torch.ones(2))
        except NanError as error:
            errors.append(error)

    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(errors) == 2


def test_the_setting_is_a_bool_and_off() -> None:
    assert tsfunc.config.debug_nans is False
    assert vmap(shifted)(torch.ones(2)).isnan().all()
    with pytest.raises(TypeError, match="expected a bool, got 1"):
        tsfunc.config.debug_nans = 1  # type: ignore[assignment]


def test_the_environment_switches_it_on() -> None:
    code = "import tsfunc; print(tsfunc.config.debug_nans)"
    for value, want in (("1", "True"), ("0", "False"), ("", "False")):
        out = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
            env={"TSFUNC_DEBUG_NANS": value, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert out.stdout.strip() == want
