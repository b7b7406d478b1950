"""A loaded function equals the saved one in everything that a user can observe."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.program.saved_functions import MADE
from tsfunc import MetaTensorType as Meta
from tsfunc import checkpoint, cond, grad, jvp, load, pytrees, specialize, value_and_grad, vmap
from tsfunc.errors import TypeCheckError


def _made(f: Callable[..., Any], *calls: tuple[Any, ...], dims: Any = None) -> Any:
    made = specialize(f, dims)
    for args in calls:
        made(*args)
    return made


def _sizes(x: Tensor) -> Any:
    size: Any = x.argmax().item()
    return x.nonzero(), x[x > 0] * 2, torch.zeros(size + 1)


X, Y = torch.tensor([0.5, -1.0, 2.0]), torch.ones(3)
N3 = {"x": Meta(["n", 3])}
# A function that makes the specialized function; the compared calls; the argument to differentiate
# and batch by, if any.
CASES: dict[str, tuple[Callable[[], Any], Sequence[tuple[Any, ...]], int | None]] = {
    **{
        name: (MADE[name][0], calls, by)
        for name, calls, by in (
            ("net", [(torch.randn(6, 4),)], 0),
            ("flowing", [(torch.randn(4, 3), torch.tensor(2))], 0),
            ("counting", [(torch.ones(2),), (torch.randn(2),)], None),
            ("running", [(torch.ones(2),), (torch.randn(2),)], None),
            ("chosen", [(torch.randn(2, 5), "sum"), (torch.randn(2, 5), "none")], 0),
            ("checking", [(torch.randn(8), torch.randn(5))], 0),
            ("again", [(torch.randn(4, 3),)], None),
            ("numbered", [(torch.randn(4, 2), 3, 0.5), (torch.randn(4, 2), 4, 7.5)], 0),
            ("ruled", [(torch.randn(5, 3),)], None),
            ("solving", [(torch.eye(3) * 4, torch.ones(3))], None),
        )
    },
    "sizes of data": (lambda: _made(_sizes, (X,)), [(X,), (-X,), (torch.ones(3),)], None),
    "a tree": (
        lambda: _made(lambda d: {"s": d["a"] * d["b"][0]}, ({"a": X, "b": [Y]},)),
        [({"a": Y, "b": [X]},)],
        None,
    ),
    "written into": (lambda: _made(lambda x: x.add_(1).mul(2), (X.clone(),)), [(Y.clone(),)], None),
    "autocast": (
        lambda: _made(torch.autocast("cpu", dtype=torch.bfloat16)(lambda x: x @ x.mT),
                      (torch.ones(2, 3),), dims=N3),
        [(torch.randn(5, 3),), (torch.randn(1, 3),), (torch.randn(5, 2),)],
        0,
    ),
}  # fmt: skip


def outcome(f: Any, *args: Any) -> Any:
    """Return a call's result, or the class of its error."""
    torch.manual_seed(0)
    try:
        return f(*pytrees.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, args))
    except Exception as error:
        return type(error).__name__


def alike(got: Any, want: Any) -> None:
    assert pytrees.structure_of(got) == pytrees.structure_of(want)
    for g, w in zip(pytrees.leaves_of(got), pytrees.leaves_of(want), strict=True):
        assert type(g) is type(w)
        if isinstance(w, Tensor):
            torch.testing.assert_close(g, w, equal_nan=True)
            assert g.requires_grad is w.requires_grad
        else:
            assert g == w


def total(f: Any) -> Any:
    """Return the sum of everything that a function returns."""
    return lambda *args: sum(
        x.sin().sum() for x in pytrees.leaves_of(f(*args)) if x.is_floating_point()
    )


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    make, calls, by = CASES[request.param]
    f = make()
    # Each added call traces the rules again, which takes long.
    f.save(tmp_path / "f.tsf", exact=request.param in ("again", "ruled", "solving"))
    return f, load(tmp_path / "f.tsf"), calls, by, tmp_path


def test_a_loaded_program_computes_the_same(case: Any) -> None:
    f, loaded, calls, _, _ = case
    for call in (*calls, *calls):
        alike(outcome(loaded, *call), outcome(f, *call))


def test_printed_and_known_values(case: Any) -> None:
    f, loaded, _, _, folder = case
    if not loaded.state:  # which has another name in a file
        assert str(loaded.program) == str(f.program)
    assert str(loaded.properties()) == str(f.properties())
    assert dict(loaded.descriptors) == dict(f.descriptors)
    # The loaded program has captured values as constants and does not guard them.
    assert set(loaded.guards) <= set(f.guards)
    for program in loaded.programs:
        program.verify()
    loaded.save(folder / "again.tsf")
    again = load(folder / "again.tsf")
    assert str(again.program) == str(loaded.program)
    assert str(again.properties()) == str(loaded.properties())


def test_copies_of_a_loaded_program_compute_the_same(case: Any) -> None:
    _, loaded, calls, _, _ = case
    for copied in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        want = copy.deepcopy(loaded)
        for call in calls:
            alike(outcome(copied, *call), outcome(want, *call))


def test_under_transforms(case: Any) -> None:
    f, loaded, ((*args,), *_), by, _ = case
    if by is None:
        return
    rest = {i: arg for i, arg in enumerate(args) if i != by}

    def of(g: Any) -> Any:
        return lambda x: g(*(rest.get(i, x) for i in range(len(args))))

    x = args[by]
    batch = torch.stack([x, x * 0.9])
    for transformed in (
        lambda g: grad(total(of(g)))(x),
        lambda g: jvp(of(g), (x,), (torch.ones_like(x),)),
        lambda g: vmap(of(g), randomness="same")(batch),
        lambda g: vmap(grad(total(of(g))), randomness="same")(batch),
        lambda g: specialize(g)(*args),
        lambda g: specialize(grad(total(of(g))))(x),
    ):
        alike(outcome(transformed, loaded), outcome(transformed, f))


@pytest.mark.parametrize("kind", ["checkpoint", "cond"])
def test_a_derivative_draws_the_numbers_of_the_call(kind: str, tmp_path: Path) -> None:
    """This holds if the derivative is traced again: value and slope belong to one function."""
    drops: dict[str, Callable[..., Tensor]] = {
        "checkpoint": checkpoint(torch.nn.functional.dropout),
        "cond": lambda x: cond(x.sum() > 0, torch.nn.functional.dropout, torch.cos, x),
    }
    drop = drops[kind]
    f = specialize(value_and_grad(lambda x: (drop(x) * x).sum()))
    x = torch.arange(1.0, 9.0)
    (value, slope) = outcome(f, x)
    torch.testing.assert_close((slope * x).sum() / 2, value)
    for again in (specialize(f), specialize(lambda x: f(x))):
        for _ in range(2):
            alike(outcome(again, x), (value, slope))
    f.save(tmp_path / "f.tsf")
    loaded = load(tmp_path / "f.tsf")
    alike(outcome(loaded, x), (value, slope))
    with pytest.raises(TypeCheckError, match="differentiates random operators"):
        specialize(loaded)(x)


@pytest.mark.slow
def test_in_a_process_that_has_not_seen_the_functions(tmp_path: Path) -> None:
    want = {}
    for i, name in enumerate(CASES):
        make, calls, _ = CASES[name]
        f = make()
        f.save(tmp_path / f"{i}.tsf", exact=True)
        want[name] = outcome(load(tmp_path / f"{i}.tsf"), *calls[0])
        torch.save(calls[0], tmp_path / f"{i}.pt")
    code = """
import sys, torch, tsfunc
for i in range(int(sys.argv[2])):
    args = torch.load(f"{sys.argv[1]}/{i}.pt")
    torch.manual_seed(0)
    torch.save(tsfunc.load(f"{sys.argv[1]}/{i}.tsf")(*args), f"{sys.argv[1]}/{i}.out")
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(len(CASES))], check=True)
    for i, name in enumerate(CASES):
        alike(torch.load(tmp_path / f"{i}.out", weights_only=False), want[name])
