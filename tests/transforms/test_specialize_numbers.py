"""Numbers whose descriptors are their types: inputs of the program, symbols in the trace."""

from __future__ import annotations

import math
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, List  # noqa: UP035

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.transforms.support import same
from tsfunc import MetaTensorType, grad, load, specialize, vmap
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import DescriptorViolation

META = Meta(["n"])
X = torch.tensor([0.5, -1.5, 2.0, 3.0, -0.25, 1.0])
INTS = [3, 4, 0, 1, -2, 6, 7]
FLOATS = [3.0, 0.25, 0.0, -0.0, 1.0, -5.25, math.inf, math.nan]


def _written_at(x: Tensor, k: int) -> Tensor:
    y = x.clone()
    y[k] = 7.0
    y[k:] += 1
    return y


@pytest.mark.parametrize(
    ("func", "values", "programs"),
    [
        (lambda x, k: x * k + k, INTS, 1),
        (lambda x, k: (x * k, k, k * 2 + 1, k**2, k // 2, k % 3, -k, k / 2), INTS, 1),
        (lambda x, k: x * k + k, FLOATS, 3),  # inf and nan can't be symbols
        (lambda x, k: x**k, [2.0, 0.5, 3.0], 1),
        (lambda x, k: (x > 0) * k, [2.5, 0.5], 1),
        (lambda x, k: x.long() * k, [2.5, 0.5], 1),
        (lambda x, k: torch.zeros(abs(k)) + x[0], [3, 4, 9], 1),
        (lambda x, k: torch.full((k,), 2.0), [3, 4, 9, 1, 0], None),
        (lambda x, k: torch.arange(k) * 2.0, [3, 4, 9], 1),
        (lambda x, k: x.expand(k, 6), [3, 4, 9], 1),
        (lambda x, k: x.roll(k), INTS, None),
        (lambda x, k: x[:k], [3, 4, 5], 1),
        (lambda x, k: x[:k], INTS, None),
        (lambda x, k: x.reshape(k, -1).sum(0), [1, 2, 3, 6], None),
        (lambda x, k: x * 2 if k > 3 else -x, INTS, 2),
        (lambda x, k: x * 2 if k > 0.5 else x * k, [0.1, 0.2, 0.7, 0.9], 2),
        (lambda x, k: sum(x * i for i in range(k)), [2, 3, 2, 3], 2),
        (lambda x, k: x.reshape(2, 3).sum(k), [0, 1, -1], 3),
        (lambda x, k: {3: x, 4: -x}[k], [3, 4, 3], 2),
        (lambda x, k: x * math.sqrt(k), [0.5, 2.0], 1),
        (lambda x, k: x[k], INTS[:5], 1),
        (lambda x, k: x.view(2, 3)[:, k], [0, 2, -1], 1),
        (lambda x, k: x.view(2, 3)[k, torch.tensor([0, 2])], [0, 1, -1], 1),
        (lambda x, k: x.view(2, 3)[None, ..., k], [0, 2, -1], 1),
        (lambda x, k: x[:k], INTS, 2),  # from the front, and from the end
        (lambda x, k: x[k:], [0, 3, 9, 1], 1),
        (lambda x, k: x[k : k + 2], [0, 3, 9, 1], 1),
        (lambda x, k: x[-k:], [2, 3, 9, 1], 1),
        (lambda x, k: torch.cat([x[k:], x[:k]]), [2, 3, 9, 1, 0], 1),
        (lambda x, k: x.select(0, k), INTS[:5], 1),
        (lambda x, k: x.narrow(0, 1, k), [3, 0, 1, 5], 1),
        (lambda x, k: x.topk(k).values, [3, 0, 1, 5], 1),
        (lambda x, k: x.kthvalue(k).values, [3, 1, 5], 1),
        (lambda x, k: torch.arange(-k, k, 2), [3, 0, 1, 5], 1),
        (lambda x, k: torch.full((k, k + 1), k), [3, 0, 1, 5], 1),
        (lambda x, k: torch.zeros(k).sum() + x.reshape(k, -1), [1, 2, 6], 1),
        (lambda x, k: x.view(2, 3).diagonal(k), [0, 2, 1], 1),
        (lambda x, k: x.view(2, 3).tril(k), INTS, 1),
        (lambda x, k: x.unfold(0, k, 1), [1, 2, 5], 1),
        (lambda x, k: torch.linspace(0, 1, k), [2, 1, 5], 1),
        (lambda x, k: F.one_hot(torch.arange(2), k), [3, 2, 7], 1),
        (lambda x, k: F.pad(x, (k, 1)), [3, 0, -2], 1),
        (lambda x, k: torch.tensor(k) + x, INTS, 1),
        (lambda x, k: torch.tensor([k, 2 * k]), INTS, 1),
        (lambda x, k: torch.tensor([k, 1]) * x[0], [0.5, -2.0], 1),
        (lambda x, k: torch.full((2,), k), [0.5, -2.0], 1),
        (lambda x, k: x.clamp(min=k), [0.5, -2.0], 1),
        (lambda x, k: (k, k * 2, x if k != 0 else -x), [0.5, -2.0, 0.0], 2),
        (lambda x, k: x * float(k) + int(k), [0, 3, 0], 2),
        (_written_at, [3, 0, 1], 1),
    ],
)
def test_a_number_by_its_type(
    func: Callable[..., Any], values: list[Any], programs: int | None
) -> None:
    s = specialize(func, {"k": type(values[0])})
    for _ in range(2):
        for value in values:
            torch.testing.assert_close(s(X, value), func(X, value), equal_nan=True)
    assert programs is None or s.cache_info().programs == programs
    assert s.cache_info().misses <= len(values)


def test_the_number_is_an_input_of_the_program() -> None:
    s = specialize(lambda x, k: x.new_zeros(k) + 1, {"k": int})
    s(X, 5)
    assert "k = args[1]" in s.program.source and "[k]" in str(s.program)
    assert s.program.descriptors["k"] is int


def test_conditions_on_a_number_are_among_the_guards() -> None:
    s = specialize(lambda x, k: x[:k] if k < x.shape[0] // 2 else x, {"x": META, "k": int})
    x = torch.randn(9)
    assert s(x, 2).equal(x[:2]) and s(x, 3).equal(x[:3]) and s(x, 8).equal(x)
    assert s.cache_info().programs == 2
    first, second = (program.guards.texts for program in s.programs[::-1])
    assert "k < n // 2" in first and "k >= 0" in first
    assert "k >= n // 2" in second and "k >= 0" not in second


def test_indices_and_slices_under_transforms() -> None:
    def f(x: Tensor, k: int) -> Tensor:
        return x[k] * x[:k].sum() + x[-k]

    s = specialize(f, {"x": META, "k": int})
    batched = specialize(vmap(f, (0, None)), {"x": Meta(["m", "n"]), "k": int})
    for n, k in ((5, 2), (9, 3), (4, 1)):
        x = torch.randn(3, n)
        torch.testing.assert_close(vmap(s, (0, None))(x, k), vmap(f, (0, None))(x, k))
        torch.testing.assert_close(batched(x, k), vmap(f, (0, None))(x, k))
        torch.testing.assert_close(grad(s)(x[0], k), grad(f)(x[0], k))
    assert batched.cache_info().programs <= 2  # slices of one element need another program


def test_other_types_of_numbers_break_the_descriptor() -> None:
    s = specialize(lambda x, k: x * k, {"k": int})
    assert s(X, 2).equal(2 * X)
    for other in (2.0, True, "2", torch.tensor(2)):
        with pytest.raises(DescriptorViolation, match="k: expected int"):
            s(X, other)


def test_a_bool_has_a_program_for_each_value() -> None:
    s = specialize(lambda x, on: x if on else -x, {"on": bool})
    assert s(X, True).equal(X) and s(X, False).equal(-X) and s(X, True).equal(X)
    assert s.cache_info().programs == 2


def test_numbers_inside_of_containers() -> None:
    s = specialize(lambda x, ks: x * ks[0] + ks[1], {"ks": List[int]})  # noqa: UP006
    for ks in ([2, 3], [5, 7], [9, 4]):
        assert s(X, ks).equal(X * ks[0] + ks[1])
    assert s.cache_info().programs == 1
    t = specialize(lambda x, p: x if p["a"] is None else x * p["a"], {"p": {"a": float | None}})
    for a in (None, 2.0, 3.5):
        assert t(X, {"a": a}).equal(X if a is None else X * a)
    assert t.cache_info().programs == 2


def test_a_value_beside_the_type_is_a_constant() -> None:
    s = specialize(lambda x, k: x * k, [{"k": 5}, {"k": int}])
    for k in (5, 2, 3, 5):
        assert s(X, k).equal(X * k)
    assert s.cache_info().programs == 2


def test_a_number_beside_named_sizes() -> None:
    def f(x: Tensor, k: int) -> Tensor:
        return x.narrow(0, 0, 2) * k + x.shape[0]

    s = specialize(f, {"x": MetaTensorType(["n"]), "k": int})
    for n, k in ((3, 2), (9, 2), (9, 5), (4, 8)):
        x = torch.randn(n)
        torch.testing.assert_close(s(x, k), f(x, k))
    assert s.cache_info().programs == 1


def test_without_a_descriptor_a_number_is_a_constant() -> None:
    def f(x: Tensor, k: int) -> Tensor:
        return x * k

    s = specialize(f)
    assert s(X, 2).equal(2 * X) and s(X, 3).equal(3 * X) and s.cache_info().programs == 2


def test_lowered_ahead_of_any_call() -> None:
    s = specialize(lambda x, k: x * k)
    s.lower({"x": MetaTensorType(["n"], dtype=torch.float32), "k": float})
    for k in (2.0, 3.5):
        assert s(X, k).equal(X * k)
    assert s.cache_info().programs == 1 and s.cache_info().misses == 0


def test_a_program_from_a_file_takes_other_numbers(tmp_path: Path) -> None:
    def f(x: Tensor, k: int) -> Tensor:
        return x.new_ones(k) * k

    s = specialize(f, {"k": int})
    s(X, 5)
    s.save(tmp_path / "s.tsf")
    loaded = load(tmp_path / "s.tsf")
    for k in (5, 6, 0):
        assert loaded(X, k).equal(torch.full((k,), float(k)))
    for refused in (f, s, loaded):  # by the operator, which checks its arguments
        with pytest.raises(RuntimeError, match="negative dimension -1"):
            refused(X, -1)


def test_inside_of_other_transforms() -> None:
    s = specialize(lambda x, k: (x * k).sin().sum(), {"k": float})
    for k in (2.0, 3.0):
        torch.testing.assert_close(grad(s)(X, k), k * torch.cos(X * k))
        torch.testing.assert_close(vmap(s, (0, None))(X, k), torch.sin(X * k))
    assert s.cache_info().programs <= 2


@pytest.mark.parametrize(
    "f",
    [
        lambda x, k: x.unfold(0, k, 1).square().sum(),
        lambda x, k: x.outer(x).diagonal(k).square().sum(),
        lambda x, k: (torch.ops.aten.narrow(x, 0, 0, k) * x[:k]).sum(),
        lambda x, k: (torch.ops.aten.mul(x, x) * k).sum(),
    ],
    ids=["unfold", "diagonal", "packet of an operator", "packet without numbers"],
)
def test_derivatives_of_calls_past_the_parser(f: Any) -> None:
    """They were zero: these calls bypassed autograd, too."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    program = specialize(grad(f), {"k": int})
    for k in (2, 3):
        torch.testing.assert_close(program(x, k), grad(f)(x, k))


class Metres(float):
    pass


class Phase(complex):
    pass


class Count(int):
    pass


@pytest.mark.parametrize("cls", [Metres, Phase, Count])
@pytest.mark.parametrize("place", ["an argument", "in a list", "an attribute", "a variable"])
def test_a_number_of_a_users_class_is_held_to_its_value(cls: Any, place: str) -> None:
    x, k = torch.tensor([1.0, -2.0]), cls(1)
    holder = types.SimpleNamespace()
    f = {
        "an argument": specialize(lambda x, n: x * n),
        "in a list": specialize(lambda x, n: x * n[0]),
        "an attribute": specialize(lambda x, n: x * n.k),
        "a variable": specialize(lambda x, n: x * k),
    }[place]
    for value in (2, 3, 5, 2):
        k = holder.k = cls(value)
        given = {"an argument": k, "in a list": [k], "an attribute": holder, "a variable": None}
        same(f(x, given[place]), x * value + (0j if cls is Phase else 0))


class Holder:
    def __init__(self, v: float) -> None:
        self.v = v


@pytest.mark.parametrize("kind", [int, float])
def test_numbers_of_objects_beside_sizes_of_0_and_1(kind: Any) -> None:
    """A number that has become an input is an input of the programs for small sizes, too."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw, holder = random.Random(seed), Holder(kind(2))
    for f in (
        lambda x, k: x * k.v,
        lambda x, k: x[: x.shape[0] // 2] + k.v * x.sum(),
        lambda x, k: torch.full_like(x, 2 * k.v + 1).cumsum(0),
    ):
        g = specialize(f, {"x": META})
        for _ in range(12):
            holder.v = kind(draw.randint(1, 9))
            x = torch.arange(1.0, 1 + draw.choice([0, 1, 2, 3, 5]))
            same(g(x, holder), f(x, holder))


# Operations of a number, with a number for which they raise, and one for which they do not.
RAISING: dict[str, tuple[Callable[[Any], Any], float, float]] = {
    "/": (lambda k: 12.0 / k, 0.0, 7.0),
    "//": (lambda k: 12 // k, 0, 7),
    "%": (lambda k: 12 % k, 0, 7),
    "% of floats": (lambda k: 12.0 % k, 0.0, 7.0),
    "**": (lambda k: k**-1, 0, 7),
    "<<": (lambda k: 1 << k, -1, 3),
    "divmod": (lambda k: divmod(3, k)[0], 0, 2),
    "sqrt": (math.sqrt, -1.0, 7.0),
    "log": (math.log, -1.0, 7.0),
    "exp": (math.exp, 1e4, 0.7),
    "a quotient of a difference": (lambda k: 1 / (k - 3), 3, 4),
}


@pytest.mark.filterwarnings("ignore::tsfunc.errors.RetraceWarning")
@pytest.mark.parametrize("closed_over", [False, True])
@pytest.mark.parametrize("name", RAISING)
def test_a_caught_error_of_a_number_is_of_this_number(name: str, closed_over: bool) -> None:
    operation, bad, good = RAISING[name]
    holder = types.SimpleNamespace()

    def decided(x: Tensor, k: Any) -> Tensor:
        number = holder.k if closed_over else k
        try:
            return x * number if operation(number) > 1 else x + number
        except (ArithmeticError, ValueError):
            return x - 1

    def computed(x: Tensor, k: Any) -> Tensor:
        number = holder.k if closed_over else k
        try:
            return x * operation(number)
        except (ArithmeticError, ValueError):
            return x - 1

    for f in (decided, computed):
        s = specialize(f)
        for k in (good, good * 2, good * 3, bad, good, good * 4, bad, good * 5):
            holder.k, argument = k, None if closed_over else k
            torch.testing.assert_close(s(X, argument), f(X, argument))
