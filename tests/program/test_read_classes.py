"""Reads of classes, modules, containers and objects in a trace, in all their forms."""

from __future__ import annotations

import collections
import contextvars
import functools
import operator
import os.path
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.transforms.test_soundness import ONES
from tsfunc import specialize

# Each case makes a function with its arguments beside the tensor, and a change of its answer.
Case = tuple[Callable[..., Any], tuple[Any, ...], Callable[[], Any]]


def classes() -> Iterator[tuple[str, Case]]:
    """Methods and attributes that a class gets from other places, or that Python itself reads."""

    class Meta(type):
        by = 2.0

        def __getitem__(cls, key: int) -> float:
            return cls.by

        def __instancecheck__(cls, value: object) -> bool:
            return cls.by > 2

    class Chosen(metaclass=Meta):
        pass

    yield "a metaclass", (lambda x: x * Chosen[0], (), lambda: setattr(Meta, "by", 3.0))
    yield (
        "__instancecheck__",
        (lambda x: x * (3 if isinstance(x.dim(), Chosen) else 2), (), lambda: setattr(
            Meta, "by", 3.0)),
    )  # fmt: skip

    class Base:
        def factor(self) -> float:
            return 2.0

        def __len__(self) -> int:
            return 2

    class Derived(Base):
        def factor(self) -> float:
            return super().factor()

    one = Derived()
    change = lambda: setattr(Base, "factor", lambda self: 3.0)  # noqa: E731
    yield "a method by super()", (lambda x: x * one.factor(), (), change)
    yield "the same of an argument", (lambda x, one: x * one.factor(), (Derived(),), change)
    change = lambda: setattr(Base, "__len__", lambda self: 3)  # noqa: E731
    yield "a method that Python calls", (lambda x, one: x * len(one), (Derived(),), change)

    table = [2.0]

    class Asking:
        @property
        def factor(self) -> float:
            return table[0]

    put = lambda: operator.setitem(table, 0, 3.0)  # noqa: E731
    yield "what a property reads", (lambda x, one: x * one.factor, (Asking(),), put)

    class Plain:
        factor = 2.0

    change = lambda: setattr(Plain, "factor", 3.0)  # noqa: E731
    yield "a class that is an argument", (lambda x, cls: x * cls.factor, (Plain,), change)


def modules() -> Iterator[tuple[str, Case]]:
    module: Any = types.ModuleType("module_of_test_read_classes")
    module.factor = 2.0
    change = functools.partial(setattr, module, "factor", 3.0)
    yield "a module that is an argument", (lambda x, module: x * module.factor, (module,), change)
    table = [2.0]
    module.__getattr__ = lambda name: table[0]
    put = functools.partial(operator.setitem, table, 0, 3.0)
    yield "what a module's __getattr__ reads", (lambda x: x * module.made, (), put)

    def imports(x: Tensor) -> Tensor:
        import os.path

        return x * len(os.path.basename("a/bc"))

    def imports_as(x: Tensor) -> Tensor:
        import os.path as paths

        return x * len(paths.basename("a/bc"))

    def imports_from(x: Tensor) -> Tensor:
        from os import path as paths

        return x * len(paths.basename("a/bc"))

    for f in (imports, imports_as, imports_from):
        replace = functools.partial(setattr, os.path, "basename", lambda path: "abc")
        yield f"{f.__name__} os.path", (f, (), replace)
    relu = nn.ReLU()
    yield "a method of torch's modules", (
        lambda x: relu(x * 2), (), lambda: setattr(nn.ReLU, "forward", lambda self, x: x * 1.5),
    )  # fmt: skip


def containers() -> Iterator[tuple[str, Case]]:
    """Containers that are not pytrees; as arguments, their elements are guarded."""
    counter, namespace = collections.Counter(a=2), types.SimpleNamespace(a=2)
    yield "a Counter", (lambda x, c: x * c["a"], (counter,), lambda: counter.update(a=1))
    yield "a namespace", (
        lambda x, c: x * c.a, (namespace,), lambda: setattr(namespace, "a", 3)
    )  # fmt: skip
    made: Any = collections.defaultdict(lambda: 2.0)
    three = lambda: 3.0  # noqa: E731
    yield "what makes elements", (
        lambda x: x * made.default_factory(), (), lambda: setattr(made, "default_factory", three),
    )  # fmt: skip


def variables() -> Iterator[tuple[str, Case]]:
    def empty() -> Case:
        factor = 1.0

        def f(x: Tensor) -> Tensor:
            try:
                return x * factor
            except NameError:
                return x * 2

        def assign() -> None:
            nonlocal factor
            factor = 3.0

        del factor
        return f, (), assign

    yield "a variable without a value", empty()
    context: contextvars.ContextVar[Any] = contextvars.ContextVar("context")

    def asks(x: Tensor) -> Tensor:
        try:
            return x * (3 if context.get() is None else 1)
        except LookupError:
            return x * 2

    yield "a context that gets None", (asks, (), lambda: context.set(None))


def cases() -> dict[str, Case]:
    return {
        name: case
        for part in (classes, modules, containers, variables)
        for name, case in part()
    }  # fmt: skip


@pytest.mark.parametrize("what", cases())
def test_changes_are_seen(what: str) -> None:
    f, others, change = cases()[what]
    replaced = os.path.basename, nn.ReLU.forward
    g = specialize(f)
    try:
        for _ in range(2):
            assert g(ONES, *others).equal(ONES * 2)
        assert g.cache_info().programs == 1
        change()
        assert f(ONES, *others).equal(ONES * 3)
        for _ in range(2):
            assert g(ONES, *others).equal(ONES * 3)
        assert g.cache_info().programs == 2
    finally:
        os.path.basename, nn.ReLU.forward = replaced  # type: ignore[method-assign]


class Thing:
    pass


class TestWhichObject:
    """Identity distinguishes objects of one class, even if only Python reads the object."""

    some, other = Thing(), Thing()

    @pytest.mark.parametrize(
        "f",
        [
            lambda self, x, one: x * 2 if one is self.some else x * 3,
            lambda self, x, one: x * {self.some: 2, self.other: 3}[one],
            lambda self, x, one: x * 2 if one in {self.some} else x * 3,
            lambda self, x, one: x * 2 if one in [self.some] else x * 3,
        ],
        ids=["is", "a key", "in a set", "in a list"],
    )
    def test_an_argument_that_is_also_elsewhere(self, f: Any) -> None:
        g = specialize(f)
        for _ in range(2):
            assert g(self, ONES, self.some).equal(ONES * 2)
            assert g(self, ONES, self.other).equal(ONES * 3)
        assert g.cache_info().programs == 2

    def test_a_table_that_gets_a_key(self) -> None:
        table: dict[Thing, float] = {}
        g = specialize(lambda x, one: x * table.get(one, 2.0))
        assert g(ONES, self.some).equal(ONES * 2)
        table[self.other] = 3.0
        for one, by in ((self.other, 3), (self.some, 2), (self.other, 3)):
            assert g(ONES, one).equal(ONES * by)


class Marked(Tensor):
    """A user's class of tensors."""


def of_class(x: Tensor) -> Tensor:
    return x * 2 if x.__class__ is Tensor else x * 3


@functools.singledispatch
def dispatched(x: Any) -> Any:
    return x * 2


@dispatched.register
def _(x: nn.Parameter) -> Any:
    return x * 3


@dispatched.register
def _(x: Marked) -> Any:
    return x * 3


class TestClassesOfTensors:
    @pytest.mark.parametrize("f", [of_class, lambda x: dispatched(x)], ids=["class", "dispatch"])
    @pytest.mark.parametrize(
        "other",
        [nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(2).as_subclass(Marked)],
        ids=["Parameter", "Marked"],
    )
    def test_they_are_seen(self, f: Any, other: Tensor) -> None:
        for first, second in ((ONES, other), (other, ONES)):
            g = specialize(f)
            for x in (first, second, first):
                assert g(x).equal(f(x))
            assert g.cache_info().programs == 2

    def test_isinstance_of_a_class_of_the_users(self) -> None:
        g = specialize(lambda x: x * 2 if isinstance(x, Marked) else x * 3)
        marked = torch.ones(2).as_subclass(Marked)
        for _ in range(2):
            assert g(ONES).equal(ONES * 3) and g(marked).equal(ONES * 2)
        assert g.cache_info().programs == 2

    def test_a_parameter_is_a_tensor_without_a_guard(self) -> None:
        g: Any = specialize(lambda x: x * 2 if isinstance(x, list | tuple) else x * 3)
        for x in (ONES, nn.Parameter(torch.ones(2), requires_grad=False)):
            assert g(x).equal(ONES * 3)
        assert g.cache_info().programs == 1

    def test_their_attributes(self) -> None:
        g = specialize(lambda x: x * x.__dict__.get("factor", 2.0))
        assert g(ONES).equal(ONES * 2)
        tagged: Any = torch.ones(2)
        tagged.factor = 3.0
        assert g(tagged).equal(ONES * 3) and g(ONES).equal(ONES * 2)
        assert g.cache_info().programs == 2


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: x * len({x: 1, y: 2}),
        lambda x, y: x * len({each: each.dim() for each in (x, y)}),
        lambda x, y: x * (1 if operator.is_(x, y) else 2),
    ],
    ids=["keys", "comprehension", "operator"],
)
def test_tensors_that_are_distinguished(f: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = torch.ones(2), torch.ones(2)
    g = specialize(f)
    for _ in range(2):
        assert g(x, y).equal(x * 2) and g(x, x).equal(x)
    assert g.cache_info().programs == 2
