"""The functions that compare sizes decide which guards a program gets; their files do not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tsfunc import MetaTensorType as Meta
from tsfunc import specialize, vmap
from tsfunc.bridge.tracers.user_queries import in_user_code, transform_code

ROOT = Path(__file__).resolve().parent.parent.parent

# Compile the package's modules under other file names, then print the guards of functions.
PROGRAM = """
import importlib.abc, importlib.machinery, json, sys, types

NAMES = json.loads(sys.argv[1])


def renamed(code, name):
    consts = [renamed(x, name) if isinstance(x, types.CodeType) else x for x in code.co_consts]
    return code.replace(co_filename=name, co_consts=tuple(consts))


class Renaming(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        code = super().get_code(fullname)
        if NAMES is None or code is None:
            return code
        home, _, own = code.co_filename.rpartition("/")
        return renamed(code, home + "/" + NAMES + own)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] != "tsfunc":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = Renaming(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, Finder())

import torch
import torch.nn.functional as F
from tsfunc import MetaTensorType as Meta
from tsfunc import Dim, cond, scan, specialize, vmap
from tsfunc.bridge.sizes.symbols import Symbols
from tsfunc.errors import TsfuncError

found = []
constraints, conditions = Symbols.constraints, Symbols.conditions


def recorded(self):
    out = constraints(self)
    found.append([(each.text, each.by_user) for each in out])
    return out


def conditioned(self, variables):
    out = conditions(self, variables)
    found.append([condition.text for condition in out])
    return out


Symbols.constraints, Symbols.conditions = recorded, conditioned


def chooses(x, y):
    return x.sin() if x.shape[0] > y.shape[0] else y.cos()


def checks(x, y):
    torch._check(x.shape[0] > 3)
    assert y.shape[0] % 2 == 0
    if x.shape[0] == y.shape[0] + 1:
        raise ValueError("sizes")
    return x.sum() + y.sum()


def counts(x, y):
    total = x.sum()
    for i in range(x.shape[0]):
        total = total + y[i % 2] * i
    return total


def operators(x, y):
    z = F.conv1d(x.reshape(1, 1, -1), torch.ones(1, 1, 3)).flatten()
    return torch.outer(z, y).unfold(0, 2, 2), torch.cat([x, y]).view(-1)


def edges(x, y):
    z = x[2:-2]
    return z.mean() if z.shape[0] - 2 > 1 else y


def modules(x, y):
    model = torch.nn.Sequential(torch.nn.Unflatten(0, (1, -1)), torch.nn.AdaptiveAvgPool1d(2))
    return model(x), model(y)


def batched(x, y):
    def f(a):
        return a * y if y.shape[0] > 4 else a + y

    return vmap(f)(x), vmap(lambda a: cond(a > 0, torch.sin, torch.cos, a))(y)


def bodies(x, y):
    def step(c, a):
        return (c + a if y.shape[0] < 100 else c), a

    return scan(step, x.sum(), y)


def tests_data(x, y):
    if (x < -1).any():
        raise ValueError("data")
    n = int((y > 0).sum())
    torch._check(n < y.shape[0] + 1)
    return y[y > 0].sum() + n


inner = specialize(lambda x: 2 * x, {"x": Meta([Dim("a", min=4)])})


def guarantees(x, y):
    return inner(x), inner(y)


FUNCTIONS = (
    guarantees, chooses, checks, counts, operators, edges, modules, batched, bodies, tests_data
)
for f in FUNCTIONS:
    x, y = torch.linspace(0, 1, 9), torch.linspace(0, 1, 6)
    found.append(f.__name__)
    try:
        specialize(f, {"x": Meta(["n"]), "y": Meta(["m"])})(x, y)
    except TsfuncError as error:
        found.append(type(error).__name__)
print(json.dumps(found))
"""


def guards(prefix: str | None) -> list[object]:
    """Return the guards of the functions with renamed files of the package."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(prefix)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_names_of_files_decide_no_guards() -> None:
    prefix = "".join(random.choices("abcdefgh", k=4)) + "_"
    print(prefix)
    before, after = guards(None), guards(prefix)
    assert len([name for name in before if isinstance(name, str)]) >= 9
    assert before == after


class TestUserCode:
    """``in_user_code`` tells a function's lines from the kernels of its operators."""

    def test_outside_of_traces(self) -> None:
        assert not in_user_code()

    def test_lines_of_the_function(self) -> None:
        seen = []

        def f(x: torch.Tensor) -> torch.Tensor:
            seen.append(in_user_code())
            return vmap(g)(x)

        def g(a: torch.Tensor) -> torch.Tensor:
            seen.append(in_user_code())
            return a.sin()

        specialize(f, {"x": Meta(["n"])})(torch.ones(3))
        assert seen == [True, True]

    def test_a_transforms_own_questions(self) -> None:
        seen = []

        def f(x: torch.Tensor) -> torch.Tensor:
            with transform_code():
                seen.append(in_user_code())
            seen.append(in_user_code())
            return x

        specialize(f, {"x": Meta(["n"])})(torch.ones(3))
        assert seen == [False, True]

    def test_kernels_are_not_user_code(self) -> None:
        seen = []

        @torch.library.custom_op("tsfunc_tests::asks_who", mutates_args=())
        def asks(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @asks.register_fake
        def _(x: torch.Tensor) -> torch.Tensor:
            seen.append(in_user_code())
            return torch.empty_like(x)

        specialize(lambda x: asks(x), {"x": Meta(["n"])})(torch.ones(3))
        assert seen
        assert not any(seen)

    @pytest.mark.parametrize("device", [False, True])
    def test_other_function_modes(self, device: bool) -> None:
        seen = []

        def f(x: torch.Tensor) -> torch.Tensor:
            if device:
                with torch.device("cpu"):
                    seen.append(in_user_code())
                    return x + torch.ones(())
            seen.append(in_user_code())
            return x

        specialize(f)(torch.ones(3))
        assert seen == [True]
