"""Prints, callbacks and checks inside of transforms: which run, for which examples, how often."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tsfunc
from tsfunc import check, cond, debug, grad, jvp, scan, specialize, vmap
from tsfunc.errors import FailedCheckError

X = torch.tensor([1.0, 2.0, 3.0])


class Recorded:
    """A function that calls back with its argument, and the values of these calls."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def take(self, value: Tensor) -> None:
        assert type(value) is Tensor and not value.requires_grad
        self.values.append(value.tolist())

    def __call__(self, x: Tensor) -> Tensor:
        debug.callback(self.take, x * x)
        return x.sin().sum()


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "vmap": vmap,
    "vmap(grad)": lambda f: vmap(grad(f)),
    "grad(vmap)": lambda f: grad(lambda x: vmap(f)(x).sum()),
    "vmap(jvp)": lambda f: vmap(lambda x: jvp(f, (x,), (x,))),
    "vmap(checkpoint)": lambda f: vmap(tsfunc.checkpoint(f)),
}


@pytest.mark.parametrize("name", list(TRANSFORMS))
def test_a_callback_gets_each_example_in_order(name: str) -> None:
    seen = Recorded()
    TRANSFORMS[name](seen)(X)
    assert seen.values == [1.0, 4.0, 9.0]


@pytest.mark.parametrize("name", list(TRANSFORMS))
def test_a_program_calls_back_at_each_of_its_runs(name: str) -> None:
    seen = Recorded()
    f = specialize(TRANSFORMS[name](seen))
    for i in (1, 2, 3):
        f(X * i)
    assert seen.values == [float(v * v) for i in (1, 2, 3) for v in (X * i).tolist()]
    assert len(f.programs) == 1


def test_nested_vmaps_count_as_loops() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
    y = torch.arange(3.0)
    pairs: list[tuple[float, float]] = []

    def f(x: Tensor, y: Tensor) -> Tensor:
        debug.callback(lambda a, *, b: pairs.append((a.item(), b.item())), x, b=y)
        return x

    for transform in (lambda f: f, specialize):
        pairs.clear()
        transform(vmap(vmap(f, (0, 0)), (0, None)))(x, y)
        assert pairs == [(x[i, j].item(), y[j].item()) for i in range(2) for j in range(3)]
        pairs.clear()
        transform(vmap(vmap(f, (0, 0)), (1, None), out_dims=1))(x.T.contiguous(), y)
        assert pairs == [(x[i, j].item(), y[j].item()) for i in range(2) for j in range(3)]


def test_the_whole_batch_has_its_dims_in_front() -> None:
    shapes: list[Any] = []

    def f(x: Tensor) -> Tensor:
        debug.callback(lambda *v: shapes.append([tuple(each.shape) for each in v]), x, X,
                       per_example=False)  # fmt: skip
        return x

    vmap(vmap(f, in_dims=1))(torch.ones(2, 4, 5))
    assert shapes == [[(2, 5, 4), (2, 5, 3)]]


def test_values_without_a_batch_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    def f(x: Tensor) -> Tensor:
        debug.print("one {}", X)
        debug.print("no value")
        return x

    for call in (vmap(f), specialize(vmap(f))):
        call(X)
        assert capsys.readouterr().out == "one tensor([1., 2., 3.])\nno value\n"


def test_lines_are_formatted_and_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    def f(x: Tensor, k: int) -> Tensor:
        debug.print("{name}: {:.2f} of {k} {{}}", x, name="first", k=k)
        debug.print("then {}", {"x": (x, k)})
        return x

    specialize(f)(torch.tensor(1.0), 3)
    assert capsys.readouterr().out == "first: 1.00 of 3 {}\nthen {'x': (tensor(1.), 3)}\n"


def test_sizes_that_a_program_leaves_open_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    f = specialize(
        lambda x: (debug.print("{}", x.shape[0]), x * 2)[1], {"x": tsfunc.MetaTensorType(["n"])}
    )
    for n in (2, 5):
        f(torch.ones(n))
    assert capsys.readouterr().out == "2\n5\n"
    assert len(f.programs) == 1


def test_tensors_from_outside_are_those_of_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    outside = torch.tensor(1.0)
    f = specialize(lambda x: (debug.print("{}", outside), x)[1])
    f(X)
    outside.fill_(2)
    f(X)
    assert capsys.readouterr().out == "1.0\n2.0\n"


def chosen(x: Tensor) -> Tensor:
    def small(x: Tensor) -> Tensor:
        debug.print("small {}", x)
        return x

    def big(x: Tensor) -> Tensor:
        debug.print("big {}", x)
        return x * 2

    return cond(x > 1.5, big, small, x)


def test_a_branch_prints_the_examples_that_take_it(capsys: pytest.CaptureFixture[str]) -> None:
    vmap(chosen)(X)
    specialize(vmap(chosen))(X)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert sorted(lines[:3]) == sorted(lines[3:]) == ["big 2.0", "big 3.0", "small 1.0"]


def test_a_derivative_of_a_loop_prints_once(capsys: pytest.CaptureFixture[str]) -> None:
    def f(x: Tensor) -> Tensor:
        def step(c: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
            debug.print("{}", c)
            return c * x, c

        return scan(step, x, torch.arange(2))[0]

    for call in (grad(f), specialize(grad(f)), lambda x: jvp(f, (x,), (x,)),
                 specialize(lambda x: jvp(f, (x,), (x,)))):  # fmt: skip
        call(torch.tensor(3.0))
        assert capsys.readouterr().out == "3.0\n9.0\n"


def test_a_callback_may_raise() -> None:
    def f(x: Tensor) -> Tensor:
        debug.callback(lambda v: [][0], x)
        return x

    for call in (vmap(f), specialize(vmap(f))):
        with pytest.raises(IndexError, match="list index"):
            call(X)


def test_a_program_keeps_the_function_that_it_calls() -> None:
    values: list[float] = []

    def f(x: Tensor) -> Tensor:
        debug.callback(lambda v: values.append(v.item()), x)
        return x

    program = specialize(f)
    program(torch.tensor(1.0))
    import gc

    gc.collect()
    program(torch.tensor(2.0))
    module = program.graph_module
    module(torch.tensor(3.0))
    assert values == [1, 2, 3]


def test_a_file_holds_no_python_function(tmp_path: Path) -> None:
    f = specialize(lambda x: (debug.print("{}", x), x)[1])
    f(X)
    with pytest.raises(ValueError, match=r"a call of tsfunc.debug or tsfunc.check"):
        f.save(tmp_path / "f.tsf")


@pytest.mark.parametrize(
    ("args", "kwargs"), [(("{} {}", 1), {}), (("{a}", 1), {}), (("text", 1), {}), (("",), {"a": 1})]
)
def test_fields_are_the_arguments(args: Any, kwargs: Any) -> None:
    with pytest.raises(ValueError, match="one argument for each field"):
        debug.print(*args, **kwargs)


def root(x: Tensor) -> Tensor:
    check(x >= 0, "root: got {}", x)
    return x.sqrt()


BATCH = torch.tensor([4.0, -1.0, 9.0, -3.0])


CHECKED: dict[str, Any] = {
    "vmap": vmap(root),
    "program": specialize(vmap(root)),
    "vmap(grad)": vmap(grad(root)),
    "grad(vmap)": grad(lambda x: vmap(root)(x).sum()),
    "vmap(cond)": vmap(lambda x: cond(x < 100, root, lambda x: x, x)),
}


@pytest.mark.parametrize("name", list(CHECKED))
def test_a_check_names_the_examples_that_fail(name: str) -> None:
    call = CHECKED[name]
    call(BATCH.abs())
    with pytest.raises(FailedCheckError, match=r"got -1.0\n.* 2 of 4 examples: 1, 3") as caught:
        call(BATCH)
    assert caught.value.examples == ((1,), (3,))


def test_examples_of_chunks_and_subsets_are_those_of_the_call() -> None:
    with pytest.raises(FailedCheckError, match="1 of 2 examples: 3") as caught:
        vmap(root, chunk_size=2)(BATCH.abs() * torch.tensor([1, 1, 1, -1]))
    assert caught.value.examples == ((3,),)
    with pytest.raises(FailedCheckError, match="2 of 3 examples: 1, 3"):
        vmap(lambda x: cond(x < 9, root, lambda x: x, x))(BATCH)
    with pytest.raises(FailedCheckError, match=r"\(0, 1\), \(1, 1\)") as caught:
        vmap(vmap(root))(BATCH.view(2, 2))
    assert caught.value.examples == ((0, 1), (1, 1))


def test_a_check_of_a_branch_of_a_program() -> None:
    f = specialize(vmap(lambda x: cond(x < 9, root, lambda x: x, x)))
    f(BATCH.abs())
    with pytest.raises(FailedCheckError, match="2 of 3 examples that run here") as caught:
        f(BATCH)
    assert caught.value.examples == ()


def test_a_check_without_a_batch() -> None:
    for call in (root, specialize(root)):
        with pytest.raises(FailedCheckError, match=r"^root: got -1.0(\n|$)(?!The check)") as caught:
            call(torch.tensor(-1.0))
        assert caught.value.examples == ()
    with pytest.raises(FailedCheckError, match="never"):
        check(False, "never")
    check(True, "never")
    with pytest.raises(TypeError, match=r"expected a bool or a bool tensor, got torch.float32"):
        check(X, "x")
    with pytest.raises(TypeError, match="got str"):
        check("yes", "x")
