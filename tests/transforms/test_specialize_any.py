"""``Any`` in specialized functions: descriptors hide the value, annotations promise nothing."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Dict, NamedTuple  # noqa: UP035

import pytest
import torch
from torch import Tensor, nn

from tsfunc import MetaTensorType, grad, scan, specialize, vmap, while_loop
from tsfunc.errors import TypeCheckError

X = torch.tensor([1.0, -2.0])


def add(x: Any, y: Tensor) -> Any:
    return x + y


def as_second_argument(x: Any, y: Tensor) -> Tensor:
    return torch.add(y, x)


def method(x: Any, y: Tensor) -> Any:
    return x.sin()


def in_a_list(x: Any, y: Tensor) -> Tensor:
    return torch.cat([y, x])


def shape(x: Any, y: Tensor) -> Any:
    return x.shape


def mapped(x: Any, y: Tensor) -> Any:
    return vmap(torch.sin)(x)


def differentiated(x: Any, y: Tensor) -> Any:
    return grad(torch.sum)(x)


def by_string(x: Any, y: Tensor) -> Any:
    return -x


def from_the_left(x: Any, y: Tensor) -> Any:
    return y * x


def asked(x: Any, y: Tensor) -> Tensor:
    return y if isinstance(x, Tensor) else -y


def decided(x: Any, y: Tensor) -> Tensor:
    return y if x else -y


def called(x: Any, y: Tensor) -> Any:
    return x(y)


def compared(x: Any, y: Tensor) -> Any:
    return y if x == "sum" else -y


def indexed(x: Any, y: Tensor) -> Any:
    return y[x]


def keyed(x: Dict[str, Any], y: Tensor) -> Any:  # noqa: UP006
    return x["a"] * 2


def measured(x: Any, y: Tensor) -> Any:
    return y * len(x)


def iterated(x: Any, y: Tensor) -> Any:
    return [y for _ in x]


def entries(x: Any, y: Tensor) -> Any:
    return [y for _ in x.values()]


def entry(x: Any, y: Tensor) -> Any:
    return x["a"]


USES: list[tuple[Callable[..., Any], Any, str]] = [
    (add, X, "__add__"),
    (as_second_argument, X, r"add\(...\)"),
    (method, X, ".sin"),
    (in_a_list, X, r"cat\(...\)"),
    (shape, X, ".shape"),
    (mapped, X, "its class is read"),
    (differentiated, X, "its class is read"),
    (by_string, 2.0, "__neg__"),
    (from_the_left, 2.0, "__rmul__"),
    (asked, X, "its class is read"),
    (decided, True, "__bool__"),
    (called, torch.sin, "__call__"),
    (called, nn.Identity(), "__call__"),
    (compared, "sum", "__eq__"),
    (indexed, 0, "getitem"),
    (measured, [1, 2], "__len__"),
    (measured, (), "__len__"),
    (iterated, [X, X], "__iter__"),
    (iterated, (1, X), "__iter__"),
    (entries, {"a": X}, ".values"),
    (entry, {"a": X}, "__getitem__"),
]


@pytest.mark.parametrize(("func", "value", "use"), USES)
def test_nothing_is_computed_with_any(func: Callable[..., Any], value: Any, use: str) -> None:
    _, first = inspect.getsourcelines(func)
    with pytest.raises(TypeCheckError, match=use) as error:
        specialize(func, {"x": Any})(value, X)
    text = str(error.value)
    assert text.startswith("x is of type Any, of which nothing is known")
    assert f"test_specialize_any.py:{first + 1}, in {func.__name__}" in text
    assert text.endswith("Its descriptor says so: describe 'x' with a concrete type.")


@pytest.mark.parametrize(("func", "value"), [(func, value) for func, value, _ in USES])
def test_an_annotation_of_any_promises_nothing(func: Callable[..., Any], value: Any) -> None:
    torch.testing.assert_close(specialize(func)(value, X), func(value, X))


def test_the_path_of_a_leaf() -> None:
    described = {"x": Dict[str, Any]}  # noqa: UP006
    with pytest.raises(TypeCheckError, match=r"^x\['a'\] is of type Any"):
        specialize(keyed, described)({"a": X}, X)
    assert specialize(keyed)({"a": X}, X).equal(2 * X)


@pytest.mark.parametrize("value", [X, 3, "sum", None, {"a": X, "b": 1}, [X, X]])
def test_any_is_passed_on_and_returned(value: Any) -> None:
    def f(x: Any, y: Tensor) -> Any:
        return {"x": x, "pair": (x, y + 1)}

    found = specialize(f, {"x": Any})(value, X)
    assert str(found["x"]) == str(value) == str(found["pair"][0])
    torch.testing.assert_close(found["pair"][1], X + 1)


def test_a_container_of_type_any_has_one_stand_in_wherever_it_lies() -> None:
    def f(*rest: Tensor, x: Dict[str, Any], **more: Any) -> Any:  # noqa: UP006
        return len(x["a"]), more

    s = specialize(f, {"x": Dict[str, Any]})  # noqa: UP006
    with pytest.raises(TypeCheckError, match=r"^x\['a'\] is of type Any.*: __len__ at"):
        s(X, x={"a": [1, 2]}, y=X)
    described = specialize(lambda *xs: len(xs[1]), {"xs": (Tensor, Any)})
    with pytest.raises(TypeCheckError, match=r"^xs\[1\] is of type Any.*: __len__ at"):
        described(X, [1, 2])


def test_none_is_a_concrete_type() -> None:
    def f(y: Tensor, x: Any = None) -> Tensor:
        return y if x is None else -y

    s = specialize(f, {"x": Any})
    assert s(X).equal(X) and s(X, None).equal(X) and s(X, 3).equal(-X)


def test_a_descriptor_refines_the_annotation() -> None:
    s = specialize(add, {"x": MetaTensorType(["n"]), "y": MetaTensorType(["n"])})
    assert s(X, X).equal(2 * X) and s(torch.ones(3), torch.ones(3)).equal(torch.full((3,), 2.0))
    assert specialize(keyed, {"x": {"a": Tensor}})({"a": X}, X).equal(2 * X)
    assert specialize(add, {"x": 3})(3, X).equal(X + 3)


def test_a_descriptor_may_say_any() -> None:
    def f(x, y):  # type: ignore[no-untyped-def]
        return x + y

    assert specialize(f)(X, X).equal(2 * X)
    with pytest.raises(TypeCheckError, match="Its descriptor says so: describe 'y' with"):
        specialize(f, {"y": Any})(X, X)
    with pytest.raises(TypeCheckError, match=r"x\['b'\] is of type Any"):
        specialize(lambda x: x["a"] + x["b"], {"x": {"a": Tensor, "b": Any}})({"a": X, "b": X})


class Pair(NamedTuple):
    a: Tensor
    b: Any


@dataclasses.dataclass
class Record:
    w: Tensor
    b: Any
    act: Callable[[Tensor], Tensor] = torch.sin


def test_fields_annotated_as_any() -> None:
    def whole(d: Record, p: Pair) -> Any:
        return d.act(d.w) + p.a + d.b * p.b, d.b, p.b

    for descriptors in (None, {"d": Record, "p": Pair}):
        total, b, three = specialize(whole, descriptors)(Record(X, X + 5), Pair(X, 3))
        torch.testing.assert_close(total, torch.sin(X) + X + 3 * (X + 5))
        assert b.equal(X + 5) and three == 3


class Scaled(nn.Module):
    scale: Any
    shift: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.shift = None

    def forward(self, x: Tensor) -> Any:
        return x * self.scale


def test_attributes_annotated_as_any() -> None:
    assert specialize(Scaled())(X).equal(2 * X)
    assert specialize(lambda m, x: m(x))(Scaled(), X).equal(2 * X)


def test_functions_of_any_arguments_need_no_types() -> None:
    def f(*args: Any, **kwargs: Any) -> Any:
        return args[0] + kwargs["y"]

    assert specialize(f)(X, y=X).equal(2 * X)


def test_functions_of_the_library_take_any_pytree() -> None:
    doubled = specialize(partial(while_loop, lambda x: x.sum() < 8, lambda x: 2 * x))
    assert doubled(X.abs()).tolist() == [4, 8]
    total = specialize(partial(scan, lambda c, row: (c + row, None)))
    assert total(torch.zeros(2), torch.ones(3, 2))[0].tolist() == [3, 3]
