"""in_dims by name, axis_size, and strict."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import pytest
import torch
import torch.func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tsfunc
from tests.transforms.support import messages_of_mistakes, same
from tsfunc import grad, jvp, specialize, vmap
from tsfunc.errors import MissingRuleError, SlowFallbackWarning, TsfuncError

X = torch.arange(12.0).view(3, 4).sin()
W = torch.arange(4.0).cos()


def many(a: Any, b: Any, *rest: Any, c: Any = 1.0, **options: Any) -> Any:
    """A function with every kind of parameter, whose order matters."""
    out = a * 2 + b
    for i, value in enumerate(rest):
        out = out * (i + 2) + value
    for name in sorted(options):
        out = out * len(name) - options[name]
    return out * c


# in_dims by name.

dims = st.sampled_from([None, 0, 1, -1])


@settings(max_examples=60)
@given(
    st.tuples(dims, dims, dims, dims, dims),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)
def test_names_are_as_a_tuple_of_all_arguments(
    chosen: tuple[int | None, ...], rest: int, has_c: bool, has_option: bool
) -> None:
    """The reference is the call with all arguments by position, in torch.func's form."""
    if all(dim is None for dim in chosen[:2]):
        chosen = (0, *chosen[1:])

    def value(dim: int | None) -> Tensor:
        return torch.randn(4) if dim is None else torch.randn(4, 3).movedim(1, dim)

    a, b, c, option = (value(dim) for dim in (chosen[0], chosen[1], chosen[3], chosen[4]))
    more = [value(chosen[2]) for _ in range(rest)]
    in_dims: dict[str, Any] = {"a": chosen[0], "b": chosen[1], "rest": chosen[2]}
    kwargs: dict[str, Any] = {}
    if has_c:
        kwargs["c"], in_dims["c"] = c, chosen[3]
    if has_option:
        kwargs["longer"], in_dims["longer"] = option, chosen[4]

    def by_position(a: Any, b: Any, rest: Any, kwargs: Any) -> Any:
        return many(a, b, *rest, **kwargs)

    given_dims = {name: in_dims[name] for name in kwargs}
    want = vmap(by_position, (chosen[0], chosen[1], chosen[2], given_dims))(a, b, more, kwargs)
    same(vmap(many, in_dims)(a, b, *more, **kwargs), want)
    if not rest:
        same(vmap(many, in_dims)(b=b, a=a, **kwargs), want)
    same(vmap(many, in_dims, chunk_size=2)(a, b, *more, **kwargs), want)


def test_a_plain_case() -> None:
    def masked(x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return x * mask * scale

    mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
    want = X * mask
    in_dims = {"x": 0, "mask": None}
    same(vmap(masked, in_dims=in_dims)(X, mask), want)
    same(vmap(masked, in_dims=in_dims)(X, mask=mask), want)
    same(vmap(masked, in_dims=in_dims)(mask=mask, x=X), want)
    same(vmap(masked, in_dims={"x": 0})(X, mask, 2.0), want * 2)


def test_entries_are_prefixes_of_their_argument() -> None:
    def f(params: dict[str, Any], x: Tensor) -> Any:
        return params["w"] @ x + params["b"][0]

    w, b = torch.randn(3, 2, 4), torch.randn(2)
    want = torch.stack([w[i] @ X[i] + b for i in range(3)])
    got = vmap(f, in_dims={"params": {"w": 0, "b": None}, "x": 0})({"w": w, "b": [b]}, x=X)
    torch.testing.assert_close(got, want)


def test_an_entry_for_the_rest() -> None:
    same(vmap(many, {"a": 0, "rest": (None, 0)})(X, W, W, X), many(X, W, W, X))
    same(vmap(many, {"a": 0, "options": 0})(X, W, one=X, other=X), many(X, W, one=X, other=X))
    same(
        vmap(many, {"a": 0, "options": {"one": 0}})(X, W, one=X, other=W),
        many(X, W, one=X, other=W),
    )
    same(vmap(many, {"a": 0, "one": None, "options": 0})(X, W, one=W), many(X, W, one=W))


def test_modules_methods_partials_and_callables() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, by: Tensor) -> Tensor:
            return x * by

        def other(self, x: Tensor, by: Tensor) -> Tensor:
            return x - by

        def __repr__(self) -> str:
            return "Scaled()"

    by = {"x": 0, "by": None}
    module = Scaled()
    same(vmap(module, by)(X, by=W), X * W)
    same(vmap(module.other, by)(X, W), X - W)
    same(vmap(functools.partial(module.other, by=W), by)(X), X - W)

    class Callable_:
        def __call__(self, x: Tensor, *, by: Tensor) -> Tensor:
            return x + by

    same(vmap(Callable_(), by)(X, by=W), X + W)


def test_a_builtin_has_its_arguments_by_keyword() -> None:
    same(vmap(torch.add, {"input": 0, "other": None})(input=X, other=W), X + W)
    with pytest.raises(ValueError, match="does not tell the names of its parameters"):
        vmap(torch.add, {"input": 0})(X, W)


def test_int_and_tuple_leave_keywords_unmapped_as_torch_func() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum()

    for in_dims in (0, (0,)):
        same(vmap(f, in_dims)(X, y=X), torch.func.vmap(f, in_dims)(X, y=X))


def test_a_dict_as_argument_has_its_dims_in_a_tuple() -> None:
    def f(d: dict[str, Tensor]) -> Tensor:
        return d["x"] * d["mask"]

    tree = {"x": X, "mask": W}
    same(vmap(f, ({"x": 0, "mask": None},))(tree), X * W)
    with pytest.raises(ValueError, match=re.escape("write in_dims=({'x': 0, 'mask': None},)")):
        vmap(f, {"x": 0, "mask": None})(tree)


def test_a_call_that_could_mean_either_is_refused() -> None:
    def f(x: Any, mask: Any = None) -> Any:
        return x["x"] * x["mask"]

    message = "could name the parameters of f or the keys of the dict that is its only argument"
    with pytest.raises(ValueError, match=message):
        vmap(f, {"x": 0, "mask": None})({"x": X, "mask": W})
    got = vmap(f, {"x": {"x": 0, "mask": None}})({"x": X, "mask": W})
    same(got, X * W)


test_mistakes_in_arguments_of_vmap_have_messages = messages_of_mistakes(
    [
        (
            lambda: vmap(many, {"a": 0, "rest": (0,)})(X, W, X, X),
            ValueError,
            "in_dims['rest'] is for the 2 arguments that *rest collects: expected an int, None or "
            "a tuple of 2, got (0,)",
        ),
        (
            lambda: vmap(lambda x, mask: x, {"x": 0, "msk": 0})(X, W),
            ValueError,
            "in_dims names 'msk', but the parameters of <lambda> are x, mask.",
        ),
        (
            lambda: vmap(lambda x: x, {"x": [0]})(X),
            ValueError,
            "the entry of in_dims for `x` is not compatible with the structure of that argument",
        ),
        (
            lambda: vmap(lambda x: x, {"x": "0"})(X),
            ValueError,
            "Got in_dim=0 for an input but in_dim must be either an integer dimension or None",
        ),
        (
            lambda: vmap(lambda x: x, {"x": True})(X),
            ValueError,
            "Got in_dim=True for an input but in_dim must be either an integer",
        ),
        (lambda: vmap(lambda x: x, {"x": None})(X), ValueError, "With axis_size= none is needed"),
        (lambda: vmap(lambda x: x, {})(X), ValueError, "at least one Tensor to vmap over"),
        (
            lambda: vmap(lambda x: x, {"x": 0})(X, X),  # type: ignore[call-arg]
            TypeError,
            "expected at most 1 positional arguments (x), got 2",
        ),
        (
            lambda: vmap(lambda x, n: x, {"x": 0, "n": 0})(X, 3),
            ValueError,
            "Got in_dim=0 for an input but the input is of type <class 'int'>",
        ),
        (
            lambda: torch.func.grad(lambda x: vmap(torch.sin, {"input": 0})(input=x).sum())(W),
            RuntimeError,
            "a dict as in_dims can't be served inside of a transform of torch.func",
        ),
    ]
)


def test_names_compose() -> None:
    def f(x: Tensor, *, y: Tensor) -> Tensor:
        return (x.sin() * y).sum()

    y = torch.randn(5, 4)
    inner = vmap(f, {"y": 0})
    want = torch.stack([torch.stack([f(a, y=b) for b in y]) for a in X])
    torch.testing.assert_close(vmap(inner, {"x": 0})(X, y=y), want)
    torch.testing.assert_close(vmap(grad(f), {"x": 0, "y": None})(X, y=W), X.cos() * W)
    torch.testing.assert_close(grad(lambda x: vmap(f, {"x": 0})(x, y=W).sum())(X), X.cos() * W)
    torch.testing.assert_close(specialize(vmap(f, {"x": 0}))(X, y=W), (X.sin() * W).sum(1))
    _, tangent = jvp(lambda x: vmap(f, {"x": 0})(x, y=W), (X,), (torch.ones_like(X),))
    torch.testing.assert_close(tangent, (X.cos() * W).sum(1))


# axis_size.


def test_axis_size_without_a_mapped_argument() -> None:
    same(vmap(lambda: W, axis_size=2)(), torch.stack([W, W]))
    same(vmap(lambda x: x, in_dims=None, out_dims=1, axis_size=2)(W), torch.stack([W, W], 1))
    same(vmap(lambda x, n: x * n, in_dims=(None, None), axis_size=3)(W, 2), (2 * W).expand(3, 4))
    same(vmap(lambda x: x, in_dims={}, axis_size=0)(W), torch.zeros(0, 4))
    same(vmap(lambda: W, axis_size=5, chunk_size=2)(), W.expand(5, 4))


def test_axis_size_draws_for_each_example() -> None:
    draw = vmap(lambda: torch.randn(2), axis_size=4, randomness="different")()
    assert draw.shape == (4, 2)
    assert draw.unique().numel() == 8
    once = vmap(lambda: torch.randn(2), axis_size=4, randomness="same")()
    assert once.unique().numel() == 2


def test_axis_size_is_checked_against_mapped_arguments() -> None:
    same(vmap(torch.sin, axis_size=3)(X), X.sin())
    message = "got sizes [3] for the mapped dimension, and axis_size=4"
    with pytest.raises(ValueError, match=re.escape(message)):
        vmap(torch.sin, axis_size=4)(X)


def test_axis_size_composes() -> None:
    got = vmap(lambda x: vmap(lambda: x, axis_size=2)())(X)
    same(got, torch.stack([X, X], 1))
    same(grad(lambda x: vmap(lambda: x.sin(), axis_size=3)().sum())(W), 3 * W.cos())
    same(specialize(lambda x: vmap(lambda: x, axis_size=x.shape[0])())(W), W.expand(4, 4))


@pytest.mark.parametrize(
    ("size", "kind", "message"),
    [
        (-1, ValueError, "axis_size: expected 0 or more, got -1"),
        (2.0, TypeError, "axis_size: expected None or an int, got 2.0"),
        (True, TypeError, "axis_size: expected None or an int, got True"),
    ],
)
def test_a_bad_axis_size(size: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        vmap(torch.sin, axis_size=size)


# strict.


@torch.library.custom_op("tsfunc_tests::thirded", mutates_args=())
def thirded(x: Tensor) -> Tensor:
    return x / 3


def test_strict_makes_a_loop_an_error() -> None:
    def f(x: Tensor) -> Any:
        y = x * 2
        return thirded(y)

    with pytest.raises(MissingRuleError) as caught:
        vmap(f, strict=True)(X)
    message = str(caught.value)
    line = f.__code__.co_firstlineno + 2
    assert "tsfunc_tests::thirded has no batching rule" in message
    assert f"{__file__}:{line}, in f" in message
    assert "register_vmap" in message
    assert isinstance(caught.value, TsfuncError)
    same(vmap(torch.sin, strict=True)(X), X.sin())


def test_strict_holds_for_inner_vmaps_and_ends_with_its_call() -> None:
    batch = torch.stack([X, X])
    with pytest.raises(MissingRuleError, match="thirded has no batching rule"):
        vmap(vmap(thirded), strict=True)(batch)
    with pytest.raises(MissingRuleError):
        vmap(vmap(thirded, strict=True))(batch)
    with pytest.raises(MissingRuleError):
        vmap(lambda x: vmap(thirded)(x), in_dims=None, axis_size=2, strict=True)(X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowFallbackWarning)
        same(vmap(vmap(thirded))(batch), batch / 3)


def test_strict_lets_decompositions_through() -> None:
    got = vmap(lambda x: torch.special.entr(x) + torch.nn.functional.gelu(x), strict=True)(X.abs())
    want = torch.special.entr(X.abs()) + torch.nn.functional.gelu(X.abs())
    torch.testing.assert_close(got, want)


def test_strict_is_ours_alone() -> None:
    with pytest.raises(RuntimeError, match="strict= can't be served inside of a transform of"):
        torch.func.vmap(lambda x: tsfunc.vmap(torch.sin, strict=True)(x))(X)
