"""Pytrees: the containers, and the results of taking them apart."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

import tsfunc
from tsfunc import pytrees

Pair = namedtuple("Pair", ["a", "b"])
X = torch.arange(3.0)


@dataclasses.dataclass
class State:
    x: Any
    step: Any = 3


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    total: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.x.sum())
        object.__setattr__(self, "twice", self.x * 2)
        object.__setattr__(self, "note", "kept")

    @functools.cached_property
    def mean(self) -> Tensor:
        return self.x.mean()


@dataclasses.dataclass
class Slotted:
    __slots__ = ("x", "y")
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Settings:
    size: int
    names: tuple[str, ...] = ()


TREES = [
    X,
    None,
    "a string",
    [X, (X, None)],
    {"b": X, "a": [1]},
    OrderedDict([("b", X), ("a", 2)]),
    Pair(X, 1),
    X.max(0),
    State(X),
    State({"k": [State(X, 1)]}),
    Slotted(X, X + 1),
]


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_flatten_and_unflatten_are_inverse(tree: Any) -> None:
    leaves, structure = pytrees.flatten(tree)
    again = pytrees.unflatten(structure, leaves)
    assert type(again) is type(tree)
    assert pytrees.structure_of(again) == structure
    assert all(a is b for a, b in zip(pytrees.leaves_of(again), leaves, strict=True))


def test_default_dicts_and_deques_keep_their_type() -> None:
    tree: Any = defaultdict[str, Any](list, {"a": X}), deque([X, X], maxlen=5)
    filled, queue = pytrees.tree_map(lambda x: x + 1, tree)
    assert filled.default_factory is list
    assert queue.maxlen == 5
    assert torch.equal(queue[0], X + 1)


def test_a_dataclass_gets_its_attributes_without_init() -> None:
    got = pytrees.tree_map(lambda x: torch.stack([x, x]), Frozen(X))
    assert torch.equal(got.x, torch.stack([X, X]))
    assert torch.equal(got.total, torch.stack([X.sum(), X.sum()]))  # not the sum of both
    assert torch.equal(got.twice, 2 * got.x)
    assert got.note == "kept"


def test_cached_properties_are_computed_again() -> None:
    made = Frozen(X)
    assert made.mean == 1
    assert pytrees.tree_map(lambda x: x * 3, made).mean == 3


def test_a_dataclass_without_tensors_is_a_leaf() -> None:
    settings = Settings(3, ("a",))
    assert pytrees.leaves_of([settings])[0] is settings


def test_an_unset_field_stays_unset() -> None:
    half = object.__new__(Slotted)
    half.x = X
    got = pytrees.tree_map(torch.neg, half)
    assert torch.equal(got.x, -X)
    assert not hasattr(got, "y")


def test_a_dataclass_with_a_new_of_its_own_is_a_leaf() -> None:
    @dataclasses.dataclass
    class Once:
        x: Tensor

        def __new__(cls, x: Tensor) -> Any:
            return object.__new__(cls)

    value = Once(X)
    assert pytrees.leaves_of(value) == [value]


def test_a_module_that_is_a_dataclass_is_a_leaf() -> None:
    @dataclasses.dataclass(eq=False)
    class Layer(torch.nn.Module):
        weight: Tensor

        def __post_init__(self) -> None:
            super().__init__()

    layer = object.__new__(Layer)
    torch.nn.Module.__init__(layer)
    layer.weight = X
    assert pytrees.leaves_of(layer) == [layer]


def test_a_recursive_structure_is_an_error() -> None:
    @dataclasses.dataclass
    class Node:
        x: Any
        parent: Any = None

    node = Node(None)
    node.parent = node
    assert pytrees.leaves_of(node) == [node]
    node.x = X
    with pytest.raises(RecursionError):
        pytrees.flatten(node)


def test_structures_distinguish_the_constants_of_a_dataclass() -> None:
    @dataclasses.dataclass
    class Named:
        x: Tensor

    one, two, three = Named(X), Named(X), Named(X)
    one.note, two.note, three.note = "a", "b", "a"  # type: ignore[attr-defined]
    assert pytrees.structure_of(one) == pytrees.structure_of(three)
    assert pytrees.structure_of(one) != pytrees.structure_of(two)
    assert pytrees.structure_of(one) != pytrees.structure_of(Named(X))
    assert "x" in str(pytrees.structure_of(one))


@dataclasses.dataclass(frozen=True)
class Model:
    weight: Tensor
    activation: Callable[[Tensor], Tensor] = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(default=2.0, metadata={"static": True})

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(self.weight @ x) * self.scale


def test_static_fields_are_kept() -> None:
    model = Model(torch.eye(3), torch.tanh)
    assert pytrees.leaves_of(model) == [model.weight]
    assert pytrees.structure_of(model) == pytrees.structure_of(Model(X, torch.tanh))
    assert pytrees.structure_of(model) != pytrees.structure_of(Model(X, torch.sin))
    assert pytrees.structure_of(model) != pytrees.structure_of(Model(X, torch.tanh, 3.0))


def test_transforms_of_functions_of_a_model_with_static_fields() -> None:
    def loss(model: Model, x: Tensor) -> Tensor:
        return model(x).square().sum()

    def by_weight(activation: Callable[[Tensor], Tensor], scale: float) -> Tensor:
        def of_weight(weight: Tensor, x: Tensor) -> Tensor:
            return (activation(weight @ x) * scale).square().sum()

        return torch.func.vmap(torch.func.grad(of_weight), (None, 0))(weight, batch)

    weight, batch = torch.randn(3, 3), torch.randn(4, 3)
    per_example = tsfunc.vmap(tsfunc.grad(loss), in_dims=(None, 0))
    program = tsfunc.specialize(per_example)
    for activation, scale in ((torch.tanh, 2.0), (torch.sin, 2.0), (torch.sin, 3.0)):
        model = Model(weight, activation, scale)
        for gradient in (per_example(model, batch), program(model, batch)):
            assert isinstance(gradient, Model) and gradient.activation is activation
            torch.testing.assert_close(gradient.weight, by_weight(activation, scale))


def test_errors_name_the_field_to_declare_static() -> None:
    wrong = State(X)  # its step is a number
    for call in (
        lambda: tsfunc.grad(lambda state: state.x.sum())(wrong),
        lambda: tsfunc.vjp(lambda state: state.x, wrong),
        lambda: tsfunc.jvp(lambda state: state.x, (wrong,), (wrong,)),
        lambda: tsfunc.vmap(lambda state: state.x)(wrong),
    ):
        with pytest.raises((ValueError, RuntimeError), match=r"of State .*step: \.\.\. = datac"):
            call()
    with pytest.raises(ValueError, match=r"got <class 'int'>\. It is pair\[1\]\. Convert"):
        tsfunc.grad(lambda pair: pair[0].sum())((X, 1))


@pytest.mark.parametrize(
    "namespace", [optree.registry.__dict__["__GLOBAL_NAMESPACE"], "tsfunc", "of the tests"]
)
def test_a_class_registered_with_optree_keeps_its_registration(namespace: str) -> None:
    @dataclasses.dataclass
    class Half:
        x: Tensor
        static: Tensor

    optree.register_pytree_node(
        Half, lambda h: ((h.x,), h.static), lambda kept, xs: Half(xs[0], kept), namespace=namespace
    )
    half = Half(X, X + 1)
    assert pytrees.leaves_of(half) == [X]
    assert pytrees.tree_map(torch.neg, half).static is half.static


def test_a_class_can_be_registered_after_it_was_seen() -> None:
    class Late:
        x = X

    late = Late()
    assert pytrees.leaves_of(late) == [late]
    optree.register_pytree_node(
        Late, lambda one: ((one.x,), None), lambda _, xs: Late(), namespace="of the tests"
    )
    assert pytrees.leaves_of(late) == [X]


def test_a_class_registered_for_torchs_pytrees() -> None:
    class Box:
        def __init__(self, x: Any, label: str) -> None:
            self.x, self.label = x, label

    box = Box([X, 2], "l")
    assert pytrees.leaves_of(box) == [box]
    torch_pytree.register_pytree_node(
        Box, lambda b: ([b.x], [b.label]), lambda xs, context: Box(*xs, *context)
    )
    leaves, structure = pytrees.flatten((box, box))
    assert len(leaves) == 4
    assert pytrees.unflatten(structure, leaves)[0].label == "l"
    assert structure != pytrees.structure_of((box, Box([X, 2], "m")))
    hash(structure)


def test_a_dataclass_registered_for_torchs_pytrees() -> None:
    @dataclasses.dataclass
    class Point:
        x: Tensor
        y: Tensor | None = None

    torch_pytree.register_dataclass(Point)
    got = pytrees.tree_map(torch.neg, Point(X))
    assert torch.equal(got.x, -X)
    assert got.y is None


def test_classes_that_are_met_inside_of_one_another() -> None:
    @dataclasses.dataclass
    class Inner:
        x: Any

    @dataclasses.dataclass
    class Outer:
        x: Any

    pytrees.flatten(Outer(X))
    inner, outer = Inner(X), Outer(X)
    outer.beside = [Inner(X)]  # type: ignore[attr-defined]
    inner.x = [outer]
    assert len(pytrees.leaves_of(inner)) == 2
    got = pytrees.tree_map(torch.neg, inner)
    assert torch.equal(got.x[0].beside[0].x, -X)


def test_threads_may_meet_a_class_at_once() -> None:
    for _ in range(20):

        @dataclasses.dataclass
        class Fresh:
            x: Tensor

        barrier = threading.Barrier(4)
        found: list[int] = []

        def meet(cls: Any = Fresh, wait: Any = barrier, out: list[int] = found) -> None:
            wait.wait()
            out.append(len(pytrees.leaves_of([cls(X), cls(X), 1])))

        threads = [threading.Thread(target=meet) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [3] * 4


def test_a_prefix_holds_for_all_below() -> None:
    def is_int(value: Any) -> bool:
        return isinstance(value, int)

    tree = (State(X, X), {"b": [X, X], "a": X})
    prefix = (State(0, 1), {"b": 2, "a": 3})
    assert pytrees.broadcast_prefix(prefix, tree, is_int) == [0, 1, 3, 2, 2]
    assert pytrees.broadcast_prefix(5, tree, is_int) == [5] * 5
    with pytest.raises(ValueError):
        pytrees.broadcast_prefix((0,), tree, is_int)


def test_a_map_over_several_trees() -> None:
    tree = {"a": 1, "b": [2, (3, None)]}
    assert pytrees.tree_map(lambda *xs: xs, {"a": 1, "b": [2]}, {"a": 3, "b": [4]}) == {
        "a": (1, 3), "b": [(2, 4)],
    }  # fmt: skip
    for other in ({"a": 1, "b": [2]}, {"a": 1, "b": (2, (3, None))}, 5):
        with pytest.raises(ValueError, match=r"rest\[1\]: expected .* \{'a': \*, 'b': .*got"):
            pytrees.tree_map(lambda *xs: xs, tree, tree, other)
