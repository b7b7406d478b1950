"""Conditions on named dims follow from the descriptors, or the error offers some that do."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any, Union

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sympy import Eq, Ge, Gt, symbols, sympify
from torch import Tensor
from torch.utils._sympy.functions import FloorDiv

from tsfunc import Dim, specialize, vmap
from tsfunc import MetaTensorType as Meta
from tsfunc.bridge.sizes.bounds import holds_at, holds_for_all
from tsfunc.errors import ConstraintViolation, DataDependentError, DescriptorViolation

r = torch.randn
NAMES = {"MetaTensorType": Meta, "Dim": Dim, "torch": torch, "List": list, "Union": Union}


def refused(f: Callable[..., Any], described: Any, *args: Any) -> tuple[str, Any]:
    """Return the message of a constraint violation, and the descriptors that it offers."""
    with pytest.raises(ConstraintViolation) as caught:
        specialize(f, described)(*args)
    text = str(caught.value)
    offered = re.search(r"These descriptors guarantee it:\n  (\{.*\})", text)
    assert offered is not None, text
    return text, eval(offered[1], NAMES)


ONE: dict[str, tuple[Callable[[int], Any], int, str]] = {
    "n > 4": (lambda n: n > 4, 9, "Dim('n', min=5)"),
    "n <= 4": (lambda n: n > 4, 3, "Dim('n', max=4)"),
    "n == 64": (lambda n: n == 64, 64, "64"),
    "n % 8 == 0": (lambda n: n % 8 == 0, 16, "Dim('n', multiple_of=8)"),
    "n <= 100": (lambda n: n <= 100, 7, "Dim('n', max=100)"),
    "n > 100": (lambda n: n <= 100, 101, "Dim('n', min=101)"),
    "n != 3": (lambda n: n == 3, 7, "Dim('n', min=4)"),
    "3*n >= 20": (lambda n: 3 * n >= 20, 7, "Dim('n', min=7)"),
    "n // 2 > 3": (lambda n: n // 2 > 3, 9, "Dim('n', min=8)"),
    "3*(n // 3) == n": (lambda n: n // 3 * 3 == n, 9, "Dim('n', multiple_of=3)"),
    "n // 2 == (n + 1) // 2": (lambda n: n // 2 == (n + 1) // 2, 8, "Dim('n', multiple_of=2)"),
    "n % 2 != 0": (lambda n: n % 2 == 0, 5, "'2 * extra + 1'"),
    "n % 4 == 3": (lambda n: n % 4 == 3, 7, "'4 * extra + 3'"),
    "2*(n // 2) != n": (lambda n: n // 2 * 2 == n, 9, "'2 * extra + 1'"),
}


@pytest.mark.parametrize("constraint", ONE)
def test_the_dim_for_which_a_constraint_holds(constraint: str) -> None:
    ask, size, dim = ONE[constraint]

    def f(x: Tensor) -> Tensor:
        return x + 1 if ask(x.shape[0]) else x - 1

    described = {"x": Meta(shape=["n", 3], dtype=torch.float32)}
    text, offered = refused(f, described, torch.zeros(size, 3))
    assert f"  {constraint}  (at {__file__}:" in text and "in f; return x + 1 if ask" in text
    assert f"shape=[{dim}, 3]" in text and "dtype=torch.float32" in text
    assert not re.search(r"\b[su]\d+\b", text.replace(__file__, ""))
    g = specialize(f, offered)
    sizes = [n for n in range(2, 130) if fits(g, torch.zeros(n, 3))]
    assert size in sizes
    for n in sizes:
        torch.testing.assert_close(g(torch.zeros(n, 3)), f(torch.zeros(n, 3)))
    assert g.cache_info().programs == 1


@pytest.mark.parametrize("by", [2, 3, 8])
def test_sizes_that_are_rounded_up(by: int) -> None:
    """A dim padded to a multiple is divisible, for all sizes, and so are its products."""

    def f(x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x, (0, (-x.shape[2]) % by, 0, (-x.shape[1]) % by))
        n, h, w = x.shape
        blocks = x.view(n, h // by, by, w // by, by)
        return blocks.transpose(2, 3).reshape(-1, by * by).sum(1)

    g = specialize(f, {"x": Meta(["n", "h", "w"])})
    for shape in ((2, 8, 10), (3, 9, 7), (2, 2, 3), (1, 16, 24)):
        torch.testing.assert_close(g(torch.ones(shape)), f(torch.ones(shape)))
    described = {"x": Meta(["h", "w"])}
    with pytest.raises(ConstraintViolation, match="Dim\\('h', multiple_of=8\\)"):
        specialize(lambda x: x.view(x.shape[0] // 8, 8, x.shape[1]), described)(torch.ones(16, 3))


def fits(g: Any, x: Tensor) -> bool:
    try:
        g.target.contract({"x": x})
    except DescriptorViolation:
        return False
    return True


@given(low=st.integers(2, 60), size=st.integers(2, 60), step=st.integers(2, 6), k=st.integers(1, 9))
def test_several_facts_together(low: int, size: int, step: int, k: int) -> None:
    size = size * step

    def f(x: Tensor) -> Tensor:
        n = x.shape[0]
        big, even = n > low, n % step == 0
        return x * (2 if big else 3) + (4 if even else 5) + (1 if n // k > 1 else 0)

    x = torch.ones(size)
    try:
        specialize(f, {"x": Meta(["n"])})(x)
    except ConstraintViolation:
        _, offered = refused(f, {"x": Meta(["n"])}, x)
        g = specialize(f, offered)
        torch.testing.assert_close(g(x), f(x))


def test_equal_sizes_share_a_name() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x + y if x.shape[0] == y.shape[0] else x

    described = {"x": Meta(["n", 2]), "y": Meta(["m", 2])}
    text, offered = refused(f, described, torch.ones(3, 2), torch.ones(3, 2))
    assert "  n == m  (at" in text or "  m == n  (at" in text
    assert offered["x"].shape[0] == offered["y"].shape[0]
    g = specialize(f, offered)
    for n in (3, 5, 1):
        assert g(torch.ones(n, 2), torch.ones(n, 2)).equal(torch.full((n, 2), 2.0))


def test_a_size_computed_from_another() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, x]) + y if 2 * x.shape[0] == y.shape[0] else x

    described = {"x": Meta(["n"]), "y": Meta(["m"])}
    text, offered = refused(f, described, torch.ones(3), torch.ones(6))
    assert "'y': MetaTensorType(shape=['2 * n'])" in text
    g = specialize(f, offered)
    for n in (3, 5):
        torch.testing.assert_close(g(torch.ones(n), torch.ones(2 * n)), torch.full((2 * n,), 2.0))


OPERATORS: dict[str, tuple[Any, dict[str, list[Any]], tuple[Tensor, ...], dict[str, list[Any]]]] = {
    "add": (lambda x, y: x + y, {"x": ["n"], "y": ["m"]}, (r(3), r(3)), {"y": ["n"]}),
    "matmul": (
        lambda x, y: x @ y, {"x": ["a", "b"], "y": ["c", "d"]}, (r(3, 4), r(4, 5)),
        {"y": ["b", "d"]},
    ),
    "two at once": (
        lambda x, y: torch.bmm(x, y), {"x": ["a", "b", "c"], "y": ["d", "e", "f"]},
        (r(2, 3, 4), r(2, 4, 5)), {"y": ["a", "c", "f"]},
    ),
    "broadcast": (
        lambda x, y: x * y, {"x": ["a", "b"], "y": ["c"]}, (r(3, 4), r(4)), {"y": ["b"]},
    ),
    "cat": (
        lambda x, y: torch.cat([x, y]), {"x": ["a", "b"], "y": ["c", "d"]}, (r(3, 4), r(2, 4)),
        {"y": ["c", "b"]},
    ),
    "one of the sizes": (
        lambda x: torch.linalg.inv(x), {"x": ["a", "b"]}, (torch.eye(3),), {"x": ["a", "a"]},
    ),
    "a number": (
        lambda x: F.linear(x, torch.ones(2, 64)), {"x": ["a", "b"]}, (r(3, 64),), {"x": ["a", 64]},
    ),
    "a remainder": (
        lambda x: x.view(3, -1), {"x": ["n"]}, (r(6),), {"x": [Dim("n", multiple_of=3)]},
    ),
    "without the first": (
        lambda x, y: x + y[4:], {"x": ["n"], "y": ["m"]}, (r(3), r(7)), {"y": ["n + 4"]},
    ),
    "without the last": (
        lambda x, y: x + y[:-1], {"x": ["n"], "y": ["m"]}, (r(3), r(4)), {"y": ["n + 1"]},
    ),
    "without the first, of other sizes": (
        lambda x, y: x + y[4:], {"x": ["n"], "y": ["m"]}, (r(30), r(34)), {"y": ["n + 4"]},
    ),
    "the first few": (
        lambda x, y: x + y[:3], {"x": ["n"], "y": ["m"]}, (r(3), r(6)),
        {"x": [3], "y": [Dim("m", min=3)]},
    ),
    "every second": (
        lambda x, y: x + y[::2], {"x": ["n"], "y": ["m"]}, (r(3), r(6)), {"x": ["(m + 1) // 2"]},
    ),
    "halved": (
        lambda x, y: x + F.avg_pool1d(y[None], 2)[0], {"x": ["n"], "y": ["m"]}, (r(3), r(6)),
        {"x": ["m // 2"]},
    ),
    "two at once, and numbers": (
        lambda x: F.layer_norm(x, (2, 3)), {"x": ["a", "b", "c"]}, (r(4, 2, 3),),
        {"x": ["a", 2, 3]},
    ),
    "a number in several constraints": (
        lambda x, y: torch.native_group_norm(x, y, y, 1, 6, 3, 2, 1e-5),
        {"x": ["a", "b", "c"], "y": ["d"]}, (r(1, 6, 3), r(6)), {"x": ["a", 6, 3], "y": [6]},
    ),
    "a number that no other replaces": (
        lambda x, *bins: torch.histogramdd(x, bins)[0], {"x": ["a", "b"], "bins": ["c"]},
        (r(4, 2), torch.arange(3.0), torch.arange(3.0)), {"x": ["a", 2]},
    ),
    "one or a number": (
        lambda x: x.expand(3, 5), {"x": [3, "b"]}, (r(3, 5),), {"x": [3, Dim("b", one_of=(1, 5))]},
    ),
    "one or a number, twice": (
        lambda x: x + torch.ones(3, 5), {"x": ["a", "b"]}, (r(3, 5),),
        {"x": [Dim("a", one_of=(1, 3)), Dim("b", one_of=(1, 5))]},
    ),
    "what is one size is one or a number": (
        lambda x, y: x + y + torch.ones(5), {"x": ["a"], "y": ["b"]}, (r(5), r(5)),
        {"x": [Dim("a", one_of=(1, 5))], "y": ["a"]},
    ),
    "every second, and halved": (
        lambda x: F.max_pool1d(x, 2) + x[..., ::2], {"x": [1, "n"]}, (r(1, 8),),
        {"x": [1, Dim("n", multiple_of=2)]},
    ),
    "parts of a size that is left out": (
        lambda x: x.unflatten(0, (-1, 3)), {"x": ["n"]}, (r(9),),
        {"x": [Dim("n", multiple_of=3)]},
    ),
    "smaller, and larger again": (
        lambda x: F.interpolate(F.max_pool2d(F.max_pool2d(x, 2), 2), scale_factor=4) + x,
        {"x": ["b", 3, "h", "w"]}, (r(2, 3, 16, 8),),
        {"x": ["b", 3, Dim("h", multiple_of=4), Dim("w", multiple_of=4)]},
    ),
    "patches": (
        lambda x: x.view(x.shape[0], 3, x.shape[2] // 4, 4, x.shape[3] // 4, 4),
        {"x": ["b", 3, "h", "w"]}, (r(2, 3, 16, 8),),
        {"x": ["b", 3, Dim("h", multiple_of=4), Dim("w", multiple_of=4)]},
    ),
    "a product": (
        lambda x, y: x + y.flatten(), {"x": ["n"], "y": ["m", "k"]}, (r(6), r(3, 2)),
        {"x": ["k * m"]},
    ),
}  # fmt: skip


KERNELS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "groups": (lambda x: F.group_norm(x, 4), (3, 8, 3), (2, 12, 5), (3, 9, 3)),
    "gates": (lambda x: F.glu(x), (3, 8), (5, 6), (5, 7)),
    "two halves": (lambda x: torch.hsplit(x, 2)[1], (3, 8), (5, 6), (5, 7)),
    "pixels": (lambda x: F.pixel_shuffle(x, 2), (8, 3, 3), (4, 4, 5), (6, 4, 5)),
    "larger pixels": (lambda x: F.pixel_unshuffle(x, 3), (2, 6, 6), (3, 9, 12), (2, 9, 10)),
    "channels": (lambda x: F.channel_shuffle(x, 2), (3, 4, 5, 6), (2, 6, 3, 3), (2, 5, 3, 3)),
    "a long kernel": (lambda x: F.max_pool1d(x, 5), (2, 10), (3, 15), (2, 4)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_sizes_that_a_kernel_refuses_are_refused_when_the_program_runs(name: str) -> None:
    func, first, other, refused = KERNELS[name]
    f = specialize(func, {"x": Meta([f"d{i}" for i in range(len(first))])})
    for x in (r(*first), r(*other)):
        torch.testing.assert_close(f(x), func(x))
    with pytest.raises(RuntimeError) as own:
        func(r(*refused))
    with pytest.raises(RuntimeError) as found:
        f(r(*refused))
    assert str(found.value) == str(own.value)
    assert f.cache_info().programs == 1


@pytest.mark.parametrize("name", OPERATORS)
def test_sizes_that_an_operator_takes_only_where_they_are_equal(name: str) -> None:
    func, shapes, args, mended = OPERATORS[name]
    described: dict[str, Any] = {name: Meta(shape) for name, shape in shapes.items()}
    if "bins" in described:
        described["bins"] = (described["bins"],) * (len(args) - 1)
    _, offered = refused(func, described, *args)
    for parameter, shape in mended.items():
        assert offered[parameter].shape == Meta(shape).shape
    torch.testing.assert_close(specialize(func, offered)(*args), func(*args))


PROMISES: dict[str, tuple[Any, ...]] = {
    "least": ("a", Dim("b", min=4), lambda n: n >= 4, (5, 9), [Dim("a", min=4)]),
    "most": ("a", Dim("b", max=9), lambda n: n < 10, (5, 9), [Dim("a", max=9)]),
    "steps": ("a", Dim("b", multiple_of=4), lambda n: n % 4 == 0, (8, 12),
              [Dim("a", multiple_of=4)]),
    "steps of both": (
        Dim("a", multiple_of=6), Dim("b", multiple_of=4), lambda n: n % 4 == 0, (12, 24),
        [Dim("a", multiple_of=12)],
    ),
    "some numbers": (Dim("a", max=99), Dim("b", one_of=(8, 12)), lambda n: n > 7, (12, 8),
                     [Dim("a", one_of=(8, 12))]),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMISES)
def test_an_equal_dim_guarantees_the_facts_of_a_dim(name: str) -> None:
    """The function relies on the equality, which is guaranteed and therefore not recorded."""
    a, b, guaranteed, sizes, mended = PROMISES[name]

    def f(x: Tensor, y: Tensor) -> Tensor:
        return x + y if guaranteed(y.shape[0]) else x

    _, offered = refused(f, {"x": Meta([a]), "y": Meta([b])}, r(sizes[0]), r(sizes[0]))
    assert offered["x"].shape == Meta(mended).shape and offered["y"].shape == Meta(["a"]).shape
    g = specialize(f, offered)
    for size in sizes:
        x, y = r(size), r(size)
        torch.testing.assert_close(g(x, y), f(x, y))


def test_a_dim_that_is_a_number_minus_another_dim() -> None:
    def f(x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] + x.shape[1] == 9 else x

    _, offered = refused(f, {"x": Meta(["n", "m"])}, r(5, 4))
    assert offered["x"].shape == Meta([Dim("n", max=7), "9 - n"]).shape
    g = specialize(f, offered)
    for n in (0, 1, 5, 2, 7):
        x = r(n, 9 - n)
        torch.testing.assert_close(g(x), f(x))


def test_a_remainder_is_not_offered_with_bounds_that_no_shape_has() -> None:
    def f(x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] % 2 == 1 and x.shape[0] < 9 else x

    _, offered = refused(f, {"x": Meta(["n"])}, r(5))
    torch.testing.assert_close(specialize(f, offered)(torch.zeros(5)), torch.ones(5))


def test_a_named_dim_as_a_key() -> None:
    widths = {4: 1.0, 8: 2.0}
    g = specialize(lambda x: x * widths[x.shape[0]], {"x": Meta(["n"])})
    with pytest.raises(TypeError) as caught:
        g(r(4))
    assert "can't be a key of a dict" in str(caught.value) and __file__ in str(caught.value)
    h = specialize(lambda x: x * widths[int(x.shape[0])], {"x": Meta([None])})
    assert h(torch.ones(8)).equal(torch.full((8,), 2.0))


TEXTS: dict[str, Callable[[Tensor], Any]] = {
    "a size": lambda x: f"{x.shape[0]}",
    "a key": lambda x: {f"size {x.shape[0]}": x},
    "a shape": lambda x: (x, str(x.shape)),
    "a number of data": lambda x: f"{x.sum().item()}",
    "a tensor": lambda x: f"{x[0]}",
    "digits": lambda x: f"{x[0]:.2f}",
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_traced_values_are_not_returned(name: str) -> None:
    """They contain a symbol's name, which is wrong for every call."""
    with pytest.raises(DataDependentError):
        specialize(TEXTS[name], {"x": Meta(["n"])})(torch.ones(3))


def test_texts_of_known_values_are_returned() -> None:
    f = lambda x: {f"size {x.shape[1]}": x, "dtype": str(x.dtype)}  # noqa: E731
    g = specialize(f, {"x": Meta(["n", 2])})
    x = torch.ones(3, 2)
    assert g(x)["size 2"].equal(x) and g(x)["dtype"] == "torch.float32"


def test_a_named_dim_has_no_digits() -> None:
    with pytest.raises(TypeError) as caught:
        specialize(lambda x: f"{x.shape[0]:03d}", {"x": Meta(["n"])})(torch.ones(3))
    assert "has no digits" in str(caught.value) and __file__ in str(caught.value)


def test_a_product_guarantees_the_facts_of_a_dim() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x.flatten() + y if y.shape[0] > 10 else x

    _, offered = refused(f, {"x": Meta(["a", "b"]), "y": Meta([Dim("c", min=11)])}, r(4, 3), r(12))
    g = specialize(f, offered)
    for a, b in ((4, 3), (5, 4)):
        x, y = r(a, b), r(a * b)
        torch.testing.assert_close(g(x, y), f(x, y))


@pytest.mark.parametrize("driver", [None, "gels", "gelsy", "gelsd", "gelss"])
@pytest.mark.parametrize("shape", [(2, 3), (3, 3), (5, 3), (2, 2, 3)])
def test_solutions_that_depend_on_which_size_is_larger(
    driver: str | None, shape: tuple[int, ...]
) -> None:
    def f(a: Tensor, b: Tensor) -> Any:
        return tuple(torch.linalg.lstsq(a, b, driver=driver))

    described: Any = {
        "a": Meta(["k", "m", "n"][-len(shape) :]),
        "b": Meta(["k", "m", "p"][-len(shape) :]),
    }
    a, b = r(shape), r(*shape[:-1], 4)
    if driver in ("gelsd", "gelss") and shape[-2] > shape[-1]:
        with pytest.raises(DataDependentError):  # True if there are residuals
            specialize(f, described)(a, b)
        return
    if driver not in (None, "gelsy"):
        _, described = refused(f, described, a, b)
    g = specialize(f, described)
    for rows in (2 * shape[-2], shape[-2]):
        a, b = r(*shape[:-2], rows, 2 * rows + shape[-1]), r(*shape[:-2], rows, 4)
        if shape[-2] > shape[-1]:
            a, b = r(*shape[:-2], rows + 4, 3), r(*shape[:-2], rows + 4, 5)
        torch.testing.assert_close(g(a, b), f(a, b), rtol=1e-3, atol=1e-3)
        g.program.verify()


def test_the_sizes_of_a_grid() -> None:
    """Python's ``min`` compared the sizes."""

    def f(theta: Tensor, x: Tensor) -> Tensor:
        return F.grid_sample(x, F.affine_grid(theta, list(x.shape), False), align_corners=False)

    g = specialize(f, {"theta": Meta(["b", 2, 3]), "x": Meta(["b", "c", "h", "w"])})
    for b, c, h, w in ((3, 2, 5, 6), (2, 7, 4, 3), (1, 3, 2, 2)):
        theta, x = r(b, 2, 3), r(b, c, h, w)
        torch.testing.assert_close(g(theta, x), f(theta, x))
    assert g.cache_info().programs <= 2
    with pytest.raises(ValueError, match=r"not 0|non-zero"):
        g(r(0, 2, 3), r(0, 3, 2, 2))


def test_sizes_that_an_operator_takes_only_from_some_on_are_no_need() -> None:
    """The operator refuses the other sizes when the program runs, as it does in the function."""
    f = specialize(lambda x: F.max_pool2d(x, 3), {"x": Meta(["c", "h", "w"])})
    assert f(torch.ones(2, 9, 10)).shape == (2, 3, 3)
    with pytest.raises(RuntimeError, match="too small"):
        f(torch.ones(2, 2, 10))


# The condition on sizes a, b and c, a call, the dims that the error offers, other sizes that
# satisfy it, and sizes that do not.
ORDERS: dict[str, tuple[Any, tuple[int, ...], list[Any], list[Any], tuple[int, ...]]] = {
    "not below": (
        lambda a, b: a >= b, (7, 4), ["b + extra", "b"], [(9, 4), (5, 4), (4, 4)], (4, 5),
    ),
    "above": (
        lambda a, b: a > b, (7, 4), ["b + extra + 1", "b"], [(9, 4), (5, 4), (3, 2)], (4, 4),
    ),
    "below": (
        lambda a, b: a < b, (4, 7), ["a", "a + extra + 1"], [(4, 9), (4, 5), (1, 2)], (4, 4),
    ),
    "not equal": (
        lambda a, b: a != b, (4, 7), ["a", "a + extra + 1"], [(4, 9), (4, 5)], (4, 4),
    ),
    "twice": (
        lambda a, b: a > 2 * b + 3, (14, 4), ["2 * b + extra + 4", "b"], [(30, 3), (8, 2)], (7, 2),
    ),
    "up to a number": (
        lambda a, b: a >= b - 2, (4, 5), ["b + extra - 2", "b"], [(3, 5), (9, 5), (4, 4)], (2, 5),
    ),
    "one after the other": (
        lambda a, b, c: a > b and b >= c, (9, 5, 4),
        ["c + extra + extra2 + 1", "c + extra2", "c"], [(10, 9, 2), (5, 4, 4)], (5, 5, 4),
    ),
    "with a bound": (
        lambda a, b: a >= 5 and a >= b, (9, 5), ["b + extra", Dim("b", min=5)], [(20, 6), (6, 5)],
        (5, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_a_size_that_is_no_smaller_than_another_is_that_and_some_more(name: str) -> None:
    ask, call, mended, good, bad = ORDERS[name]

    def f(*xs: Tensor) -> Tensor:
        total: Tensor = sum(x.sum() for x in xs)  # type: ignore[assignment]
        return total if ask(*(x.shape[0] for x in xs)) else -total

    def tensors(sizes: tuple[int, ...]) -> list[Tensor]:
        return [torch.ones(size) for size in sizes]

    _, offered = refused(f, {"xs": tuple(Meta([d]) for d in "abc"[: len(call)])}, *tensors(call))
    assert [meta.shape for meta in offered["xs"]] == [Meta([dim]).shape for dim in mended]
    g = specialize(f, offered)
    for sizes in (call, *good, call):
        assert g(*tensors(sizes)).equal(f(*tensors(sizes)))
    with pytest.raises(DescriptorViolation):
        g(*tensors(bad))


def test_a_function_of_torch_that_compares_two_sizes() -> None:
    """The function transposes a wide matrix."""

    def f(x: Tensor) -> Tensor:
        return torch.svd_lowrank(x, 3)[1]

    _, offered = refused(f, {"x": Meta(["a", "b"])}, r(9, 7))
    assert offered["x"].shape == ("b + extra", "b")
    g = specialize(f, offered)
    for shape in ((9, 7), (12, 5), (6, 6)):
        x = torch.ones(shape)
        torch.manual_seed(0)
        want = f(x)
        torch.manual_seed(0)
        torch.testing.assert_close(g(x), want)


def test_undescribed_properties_are_open() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y.sum() if x.shape[0] % y.shape[0] > 1 else x.sum()

    described = {"x": Meta(["n"]), "y": Meta(["m"])}
    text, offered = refused(f, described, torch.ones(5), torch.ones(3))
    assert "left open" in text and offered["x"].shape == (None,)
    g = specialize(f, offered)
    for n, m in ((5, 3), (3, 5)):
        torch.testing.assert_close(g(torch.ones(n), torch.ones(m)), f(torch.ones(n), torch.ones(m)))


def test_open_dims_get_the_users_names() -> None:
    """A dim that first had an internal name in an offer is open, too."""

    def f(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x.new_zeros(max(t.shape[0] for t in (x, y, z)))

    described = {"x": Meta(["a"]), "y": Meta(["b"]), "z": Meta(["c"])}
    text, _ = refused(f, described, torch.ones(3), torch.ones(5), torch.ones(4))
    assert "it of a, b, c: left open" in text


def test_an_equality_is_solved_for_the_size_of_the_call() -> None:
    """Zero solves it, too."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        n, m = x.shape[0], y.shape[0]
        return x.sum() if n * (m - 4) == 2 * n and m // 2 == 3 else y

    _, offered = refused(f, {"x": Meta(["n"]), "y": Meta(["m"])}, torch.ones(3), torch.ones(6))
    assert offered["x"].shape == ("n",) and offered["y"].shape == (6,)


def test_containers_of_descriptors() -> None:
    def f(params: dict[str, Any], scale: float) -> Tensor:
        out: Tensor = params["w"][0] * scale
        return out if out.shape[0] >= 4 else -out

    described = {"params": {"w": [Meta(["n"])]}, "scale": 2.0}
    _, offered = refused(f, described, {"w": [torch.ones(5)]}, 2.0)
    assert offered["params"]["w"][0].shape == (Dim("n", min=4),) and offered["scale"] == 2.0
    specialize(f, offered)({"w": [torch.ones(5)]}, 2.0)


@pytest.mark.parametrize(
    ("dim", "ask"),
    [
        (Dim("n", min=5), lambda n: n > 4),
        (Dim("n", max=100), lambda n: n < 101),
        (Dim("n", multiple_of=8), lambda n: n % 4 == 0),
        (Dim("n", multiple_of=8), lambda n: 8 * (n // 8) == n),
        (Dim("n", one_of=(4, 6, 10)), lambda n: n % 2 == 0 and n != 8),
        (Dim("n", min=2, max=50), lambda n: n * n < 3000 and n != 77),
    ],
    ids=["min", "max", "multiple", "quotient", "choice", "product"],
)
def test_implied_facts_are_not_violations(dim: Dim, ask: Any) -> None:
    def f(x: Tensor) -> Tensor:
        return x + 1 if ask(x.shape[0]) else x - 1

    g = specialize(f, {"x": Meta([dim])})
    for n in [n for n in range(2, 60) if dim.admits(n)]:
        assert g(torch.zeros(n)).equal(torch.ones(n))
    assert g.cache_info().programs == 1


def test_the_line_is_the_users_innermost() -> None:
    def inner(n: int) -> bool:
        return True if n > 4 else False  # noqa: SIM210 - a SymBool is evaluated where it is used

    def f(x: Tensor) -> Tensor:
        return x if inner(x.shape[0]) else -x

    text, _ = refused(f, {"x": Meta(["n"])}, torch.ones(9))
    line = inner.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}, in inner; return True if n > 4" in text


def test_a_warning_for_a_line_of_torch_names_the_users_call() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.binary_cross_entropy(x, y)

    described = {"x": Meta(["n", 7]), "y": Meta(["m", 7])}
    text, _ = refused(f, described, torch.ones(3, 7), torch.ones(3, 7))
    assert "  m == n  (at" in text and "in f; return torch.nn.functional.binary_cross" in text
    torch_lines = re.findall(r"\(at (.*?):\d+", text)
    assert all(file == __file__ for file in torch_lines)


def test_names_in_torchs_own_errors_are_the_users() -> None:
    described = {"x": Meta(["rows"]), "y": Meta(["columns"])}
    with pytest.raises(RuntimeError, match=r"tensor a \(rows\) must match .* \(columns\)"):
        specialize(lambda x, y: x + y, described)(torch.ones(3), torch.ones(4))


def test_open_dims_have_a_program_for_each_path() -> None:
    def f(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 3 else x

    g = specialize(f, {"x": Meta([None])})
    for n in (2, 5, 2):
        torch.testing.assert_close(g(torch.ones(n)), f(torch.ones(n)))


def test_a_dim_may_have_any_name() -> None:
    for name in ("args", "a", "s", "t", "value_0", "Tensor", "p0", "v3"):
        g = specialize(lambda x, y: x.sum() * y, {"x": Meta([name]), "y": Meta([f"2*{name}"])})
        for n in (2, 3, 2):
            assert g(torch.ones(n), torch.ones(2 * n)).equal(torch.full((2 * n,), float(n)))
        assert g.cache_info().programs == 1


def _sum_of_some(x: Tensor, y: Tensor, z: Tensor) -> Tensor | None:
    if x.shape[0] >= 5 and x.shape[0] <= 36 and y.shape[0] % 3 == 0:
        return x + y[1:] + z[3:]
    return None


XYZ = {"x": Meta(["a"]), "y": Meta(["b"]), "z": Meta(["c"])}
PLANES = {"x": Meta(["a", "b"]), "y": Meta(["c", "d"]), "z": Meta(["e", "f"])}


@pytest.mark.parametrize(
    ("f", "described", "shapes", "others"),
    [
        (lambda x, y, z: x + y + z, PLANES, [(6, 3)] * 3, [[(4, 4)] * 3, [(1, 1)] * 3]),
        (lambda x, y, z: x + y + z, {**PLANES, "z": Meta(["e", 3])}, [(6, 3)] * 3, [[(4, 3)] * 3]),
        (lambda x, y, z: x + y[1:] + z[3:], XYZ, [(11,), (12,), (14,)], [[(5,), (6,), (8,)]]),
        (_sum_of_some, XYZ, [(11,), (12,), (14,)], []),
        (lambda x, y, z: x.flatten() + y.flatten() + z, {**PLANES, "z": Meta(["n"])},
         [(6, 8), (3, 16), (48,)], [[(5, 8), (4, 10), (40,)]]),
    ],
)  # fmt: skip
def test_descriptors_for_several_facts_hold_when_pasted(
    f: Callable[..., Any],
    described: Any,
    shapes: list[tuple[int, ...]],
    others: list[list[tuple[int, ...]]],
) -> None:
    """This holds if a dim that others are expressed in is itself expressed in another one, too."""
    _, offered = refused(f, described, *map(r, shapes))
    g = specialize(f, offered)
    for each in (shapes, *others):
        args = [r(shape) for shape in each]
        torch.testing.assert_close(g(*args), f(*args))


def test_an_assertion_of_torch_is_a_check() -> None:
    def f(x: Tensor) -> Tensor:
        torch._assert(x.shape[0] > 2, "too few")
        return x + 1

    g = specialize(f, {"x": Meta(["n"])})
    for n in (4, 7):
        torch.testing.assert_close(g(torch.ones(n)), f(torch.ones(n)))
    assert g.cache_info().programs == 1 and "n > 2" in g.guards
    with pytest.raises(AssertionError, match="too few"):
        g(torch.ones(2))


@pytest.mark.filterwarnings("ignore::tsfunc.errors.SlowFallbackWarning")
def test_a_loop_over_the_examples_is_named_with_its_remedy() -> None:
    @torch.library.custom_op("test_constraints::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    operator = torch.ops.test_constraints.twice
    f = specialize(lambda x: vmap(operator)(x), {"x": Meta(["b", 2])})
    remedy = "test_constraints::twice once for each example.*no batching rule.*register_vmap"
    with pytest.raises(ConstraintViolation, match=rf"(?s)b == 3 .*test_constraints\.py.*{remedy}"):
        f(torch.ones(3, 2))
    torch.library.register_vmap(operator.default, lambda info, dims, x: (x * 2, dims[0]))
    for b in (3, 5):
        assert f(torch.ones(b, 2)).equal(torch.full((b, 2), 2.0))
    assert f.cache_info().programs == 1


def test_shapes_of_other_ranks_are_compared_by_rank_first() -> None:
    def f(x: Tensor, m: Tensor) -> Tensor:
        return x * m if m.shape == x.shape else x * m.expand_as(x)

    def g(x: Tensor, m: Tensor) -> Tensor:
        same = m.dim() == x.dim() and m.shape == x.shape
        return x * m if same else x * m.expand_as(x)

    described = {"x": Meta(["b", "n"]), "m": Meta(["n"])}
    with pytest.raises(ConstraintViolation, match=r"has x\.dim\(\) == y\.dim\(\) and x\.shape == "):
        specialize(f, described)(torch.ones(3, 4), torch.ones(4))
    made = specialize(g, described)
    for b, n in ((3, 4), (4, 4), (2, 5)):
        x, m = r(b, n), r(n)
        torch.testing.assert_close(made(x, m), f(x, m))
    assert made.cache_info().programs == 1


def test_a_quotient_by_a_named_size_is_decided() -> None:
    def f(x: Tensor) -> Any:
        return x.split(x.shape[0] // 2)

    g = specialize(f, {"x": Meta(["2*n"])})
    for n in (10, 4, 26):
        torch.testing.assert_close(g(torch.arange(n)), f(torch.arange(n)))
    assert g.cache_info().programs == 1


@given(
    st.tuples(*[st.integers(-3, 3)] * 4), st.sampled_from(["n", "m", "n + m", "n - 1"]),
    st.sampled_from(["0", "2", "n", "m - 1"]), st.sampled_from([1, -1]),
    st.sampled_from(["==", ">=", ">"]),
)  # fmt: skip
def test_proved_facts_about_quotients_hold(
    factors: tuple[int, int, int, int], divisor: str, bound: str, sign: int, word: str
) -> None:
    a, b, c, d = factors
    n, m = symbols("n m", integer=True, positive=True)
    by, least = sympify(divisor, {"n": n, "m": m}), sympify(bound, {"n": n, "m": m})
    quotient = sign * FloorDiv(a * n + b * m + c * n * m + d, by)
    constraint = {"==": Eq, ">=": Ge, ">": Gt}[word](quotient, sign * least)
    if constraint.free_symbols and holds_for_all(constraint, {"n": Dim("n"), "m": Dim("m")}):
        for one, other in itertools.product(range(2, 9), repeat=2):
            assert holds_at(constraint, {"n": one, "m": other})


def test_a_tensor_without_a_descriptor_is_named() -> None:
    def f(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x @ w, y)

    args = r(8, 3), r(4, 8), torch.randint(3, (4,))
    text, _ = refused(f, {"x": Meta(["n", 8])}, *args)
    advice = re.search(r"The size 4 is y\.shape\[0\], .*: (\{.*\}) makes it n\.", text)
    assert advice is not None, text
    program = specialize(f, {"x": Meta(["n", 8]), **eval(advice[1], NAMES)})
    for n in (4, 6):
        x, y = r(n, 8), torch.randint(3, (n,))
        torch.testing.assert_close(program(args[0], x, y), f(args[0], x, y))
    assert program.cache_info().programs == 1


def test_a_described_tensor_in_a_container_is_not_named() -> None:
    def f(batch: dict[str, Tensor]) -> Tensor:
        return torch.stack([row * 2 for row in batch["x"]])

    text, _ = refused(f, {"batch": {"x": Meta(["n", 3])}}, {"x": r(4, 3)})
    assert "n == 4" in text and "no descriptor" not in text


def test_a_loop_over_a_named_dim_of_size_one_is_refused_after_few_steps() -> None:
    steps: list[int] = []

    def looped(x: Tensor) -> Tensor:
        for i in range(x.shape[0]):
            steps.append(i)
        return x

    program = specialize(looped, {"x": Meta(["n", 3])})
    with pytest.raises(ConstraintViolation, match="n == 1"):
        program(torch.ones(1, 3))
    assert len(steps) < 200
