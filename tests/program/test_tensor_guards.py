"""Properties of tensors, beside types and sizes, that a function reads are guarded."""

from __future__ import annotations

import abc
import enum
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from tsfunc import MetaTensorType, grad, load, specialize, vmap
from tsfunc.bridge.trace.tensor_guards import PropertyGuard, dense_order
from tsfunc.errors import ConstraintViolation, DescriptorViolation, TypeCheckError

Question = Callable[[Tensor], Any]


def leaf() -> Tensor:
    return torch.ones(3, requires_grad=True)


def view() -> Tensor:
    return torch.ones(9)[4:7]


def part(i: int) -> Tensor:
    return torch.ones(4, requires_grad=True).chunk(2)[i]


def made_in_inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3)


def keeping_its_gradient() -> Tensor:
    x = leaf() * 1
    x.retain_grad()
    return x


def with_gap() -> Tensor:
    return torch.ones(6, 8)[:, ::2]


def tagged(value: Any) -> Tensor:
    x: Any = torch.ones(3)
    x.tag = value
    return x


def tag_is_two(x: Any) -> Any:
    tag = x.tag
    return tag == 2


def with_gradient(value: Tensor | None) -> Tensor:
    x = leaf()
    x.grad = value
    return x


COMPLEX = torch.tensor([1 + 2j, 3 - 1j, 2j])

# A property, and tensors of one type and shape that differ in it.
QUESTIONS: dict[str, tuple[Question, Sequence[Callable[[], Tensor]]]] = {
    "a leaf": (lambda x: x.is_leaf, [leaf, lambda: leaf() * 1]),
    "retains_grad": (lambda x: x.retains_grad, [lambda: leaf() * 1, keeping_its_gradient]),
    "which result": (
        lambda x: x.output_nr,
        [functools.partial(part, 0), functools.partial(part, 1)],
    ),
    "an offset": (lambda x: x.storage_offset(), [lambda: torch.ones(3), view]),
    "the offset of a view": (
        lambda x: x[1:].storage_offset() > 1, [lambda: torch.ones(3), view],
    ),
    "lazily conjugated": (torch.is_conj, [COMPLEX.clone, COMPLEX.conj]),
    "conjugated again": (lambda x: x.conj().is_conj(), [COMPLEX.clone, COMPLEX.conj]),
    "lazily negated": (
        lambda x: x.is_neg(), [lambda: torch.ones(3), lambda: COMPLEX.conj().imag],
    ),
    "of inference mode": (lambda x: x.is_inference(), [lambda: torch.ones(3), made_in_inference]),
    "a parameter": (
        lambda x: isinstance(x, nn.Parameter), [leaf, lambda: nn.Parameter(torch.ones(3))],
    ),
    "a buffer": (
        lambda x: isinstance(x, nn.Buffer),
        [lambda: torch.ones(3), lambda: nn.Buffer(torch.ones(3))],
    ),
    "a view": (lambda x: x._is_view(), [lambda: torch.ones(3), view]),
    "has an attribute": (
        lambda x: hasattr(x, "tag"), [lambda: torch.ones(3), functools.partial(tagged, 1)],
    ),
    "its attribute": (
        tag_is_two, [functools.partial(tagged, 1), functools.partial(tagged, 2)],
    ),
    "strides of one": (
        lambda x: x.stride(0) > 4,
        [lambda: torch.ones(1, 4), lambda: torch.ones(36).as_strided((1, 4), (9, 1))],
    ),
    "channels last": (
        lambda x: x.is_contiguous(memory_format=torch.channels_last),
        [lambda: torch.ones(2, 3, 4, 5),
         lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    ),
    "has a gradient": (
        lambda x: x.grad is not None,
        [lambda: with_gradient(None), lambda: with_gradient(torch.ones(3))],
    ),
}  # fmt: skip
BY_NAME = pytest.mark.parametrize("name", QUESTIONS)
IN_FILES = [name for name in QUESTIONS if name not in ("its attribute", "has a gradient")]


def choosing(question: Question) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        return x * 2 if question(x) else x + 3

    return f


@BY_NAME
def test_another_answer_is_another_program(name: str) -> None:
    question, tensors = QUESTIONS[name]
    f = choosing(question)
    for order in (tensors, tensors[::-1]):
        g = specialize(f)
        for make in (*order, *order):
            torch.testing.assert_close(g(make()), f(make()))
        assert g.cache_info().programs == 2 and g.cache_info().hits == 2


@pytest.mark.parametrize("name", IN_FILES)
def test_a_file_has_the_questions(name: str, tmp_path: Path) -> None:
    question, (one, other) = QUESTIONS[name]
    f = choosing(question)
    g = specialize(f)
    g(one())
    g.save(tmp_path / "f.tsf", exact=True)
    loaded = load(tmp_path / "f.tsf")
    torch.testing.assert_close(loaded(one()), f(one()))
    with pytest.raises(DescriptorViolation):
        loaded(other())
    assert loaded.guards == g.guards


@pytest.mark.parametrize("tensor", [leaf, lambda: torch.ones(3)])
def test_computed_values_have_the_properties_of_autograd(tensor: Callable[[], Tensor]) -> None:
    weight = torch.ones(3, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        y, z = x * weight, x.sin()
        return x * (1 + 2 * y.is_leaf + 4 * z.is_leaf + 8 * (x.detach().grad_fn is None))

    torch.testing.assert_close(specialize(f)(tensor()), f(tensor()))


def test_leaves_that_the_function_makes() -> None:
    def f(x: Tensor) -> Tensor:
        weight = x.detach().clone().requires_grad_()
        loss = weight * 3
        assert weight.is_leaf and weight.grad_fn is None and not loss.is_leaf
        assert loss.grad_fn is not None and loss.output_nr == 0 and weight.grad is None
        loss.sum().backward()
        assert weight.grad is not None
        return weight.grad * x

    torch.testing.assert_close(specialize(f)(torch.ones(3)), torch.full((3,), 3.0))


def test_a_function_that_reads_no_property_has_one_program() -> None:
    f = specialize(lambda x: x * 2)
    for x in (leaf(), leaf() * 1, nn.Parameter(torch.ones(3))):
        f(x)
    assert f.cache_info().programs == 1


def test_the_answers_are_among_the_guards() -> None:
    f = specialize(choosing(lambda x: x.is_leaf))
    f(leaf())
    assert "x.is_leaf is True" in f.guards


def test_answers_in_traces_and_transforms() -> None:
    f = choosing(lambda x: x.is_leaf)
    inner = specialize(f)
    inner(leaf())
    outer = specialize(lambda x: inner(x))
    for x in (leaf(), leaf() * 1):
        torch.testing.assert_close(outer(x), f(x))
    torch.testing.assert_close(specialize(vmap(f))(torch.ones(2, 3)), torch.full((2, 3), 2.0))
    torch.testing.assert_close(grad(lambda x: inner(x).sum())(torch.ones(3)), torch.full((3,), 2.0))


def test_contiguous_where_sizes_are_named() -> None:
    f = choosing(lambda x: x.is_contiguous())
    g = specialize(f, {"x": MetaTensorType(["n", 4])})
    for x in (with_gap(), torch.ones(5, 4), torch.ones(7, 12)[:, ::3], torch.ones(3, 4)):
        torch.testing.assert_close(g(x), f(x))
    assert g.cache_info().programs == 2


def test_strides_where_sizes_are_named() -> None:
    def f(x: Tensor) -> Tensor:
        return x * x.stride(0) + x.t()[1:].stride(1)

    g = specialize(f, {"x": MetaTensorType(["n", "m"])})
    for x in (torch.ones(5, 4), torch.ones(3, 7), torch.ones(3, 7).t(), torch.ones(2, 9).t()):
        torch.testing.assert_close(g(x), f(x))
    assert g.cache_info().programs == 2
    with pytest.raises(TypeCheckError, match=r"strides of x.* \(8, 2\) for the sizes \(6, 4\)"):
        g(with_gap())


def test_dense_order() -> None:
    assert dense_order(torch.ones(2, 3)) == (1, 0)
    assert dense_order(torch.ones(2, 3).t()) == (0, 1)
    assert dense_order(with_gap()) is None
    assert not PropertyGuard(0, "dense_order({})", (1, 0)).holds(with_gap())


def _version(x: Tensor) -> Tensor:
    return x * x._version


def _node(x: Tensor) -> Tensor:
    return x * 2 if (x * 3).grad_fn is None else x


def _memory(x: Tensor) -> Tensor:
    return x * 2 if (x * 3)._is_view() else x


def _one_memory(x: Tensor) -> Tensor:
    return x * 2 if x.is_set_to(x[:]) else x


def _hooks(x: Tensor) -> Tensor:
    return x * 2 if x._backward_hooks is None else x


def _tags(x: Tensor) -> Tensor:
    setattr(x, "tag", 1)  # noqa: B010 - a tensor has no such attribute
    return x * 2


def hooked() -> Tensor:
    x = leaf()
    x.register_hook(lambda g: g)
    return x


@pytest.mark.parametrize(
    ("f", "x", "message"),
    [
        (_version, leaf, "_version is read at .*test_tensor_guards.py:.* counts the writes"),
        (_node, leaf, "grad_fn is read at .*Read x.requires_grad"),
        (_memory, leaf, r"_is_view\(\) of a computed value is called"),
        (lambda x: x * (x._base is None), lambda: torch.ones(4)[1:], "_base is read"),
        (_one_memory, leaf, r"is_set_to\(\) is called"),
        (_hooks, hooked, "hooks are read"),
        (_tags, leaf, "x.tag is assigned; .*assign it after the call"),
    ],
)  # fmt: skip
def test_unknown_properties_are_refused(f: Any, x: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(TypeCheckError, match=message):
        specialize(f)(x())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")  # TorchScript is deprecated
def test_sizes_that_cpp_reads_as_numbers_are_constraints_and_no_assignments() -> None:
    scripted = torch.jit.script(_sums_of_rows)
    f = specialize(lambda x: scripted(x) + 1, {"x": MetaTensorType(["n", 4])})
    with pytest.raises(ConstraintViolation, match="n == 3"):
        f(torch.ones(3, 4))
    fixed = specialize(lambda x: scripted(x) + 1)
    for n in (3, 5):
        assert fixed(torch.ones(n, 4)).tolist() == [5.0] * n


def _sums_of_rows(x: Tensor) -> Tensor:
    return x.reshape(x.size(0), -1).sum(dim=1)


def test_the_version_of_a_tensor_from_outside_is_refused() -> None:
    state = torch.ones(3)
    with pytest.raises(TypeCheckError, match="_version is read"):
        specialize(lambda x: x * state._version)(torch.ones(3))


def test_attributes_of_tensors_are_not_in_files(tmp_path: Path) -> None:
    f = specialize(lambda x: x if x.grad is None else x * x.grad)
    f(with_gradient(torch.full((3,), 2.0)))
    assert f(with_gradient(torch.full((3,), 5.0))).tolist() == [5, 5, 5]
    assert f.cache_info().programs == 1
    with pytest.raises(ValueError, match=r"the function reads x.grad, and a file has no place"):
        f.save(tmp_path / "f.tsf")


# --- one tensor in two roles


WEIGHT = torch.ones(3)
ONE = torch.ones(3)


def _is(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 if x is y else x * 3


def _by_id(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 if id(x) == id(y) else x * 3


def _in_a_set(x: Tensor, y: Tensor) -> Tensor:
    return x * len({x, y})


def _elsewhere(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 if x is WEIGHT else x * 3 + y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 if self.is_own(x) else y

    def is_own(self, x: Tensor) -> bool:
        return x is self.weight


MODULE = Tied()


@pytest.mark.parametrize("f", [_is, _by_id, _in_a_set, _elsewhere, MODULE])
def test_which_tensors_are_one(f: Callable[[Tensor, Tensor], Tensor]) -> None:
    own = MODULE.weight
    calls = [(ONE, torch.ones(3)), (ONE, ONE), (WEIGHT, ONE), (own, WEIGHT), (own, own)]
    for order in (calls, calls[::-1]):
        g = specialize(f)
        for call in (*order, *order):
            torch.testing.assert_close(g(*call), f(*call))


def test_one_tensor_for_two_names() -> None:
    g = specialize(_is, {"x": MetaTensorType(["n"]), "y": MetaTensorType(["m"])})
    for call in ((ONE, ONE), (ONE, torch.ones(4)), (ONE, torch.ones(3)), (WEIGHT, WEIGHT)):
        torch.testing.assert_close(g(*call), _is(*call))
    assert g.cache_info().programs == 2


def test_files_tell_one_tensor_from_two(tmp_path: Path) -> None:
    for call, other in (((ONE, ONE), (ONE, WEIGHT)), ((ONE, WEIGHT), (ONE, ONE))):
        g = specialize(_is)
        g(*call)
        g.save(tmp_path / "f.tsf", exact=True)
        loaded = load(tmp_path / "f.tsf")
        torch.testing.assert_close(loaded(*call), _is(*call))
        with pytest.raises(DescriptorViolation):
            loaded(*other)


def test_comparisons_with_non_tensors_add_no_guard() -> None:
    def f(x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        return x * y if mask is None and x.dtype is torch.float32 else x

    g = specialize(f)
    g(ONE, torch.ones(3))
    g(ONE, ONE)
    assert g.cache_info().programs == 1


# --- properties that libraries read


def _of_math(x: Tensor) -> Tensor:
    return x * math.sqrt(4)


def _of_torch(x: Tensor) -> Tensor:
    return nn.functional.relu(x) + torch.relu(-x)


def _imported(x: Tensor) -> Tensor:
    import math

    return x * math.sqrt(4)


def _other(*args: Any) -> Any:
    return args[0] * 7


@pytest.mark.parametrize(
    ("f", "owner", "name"),
    [
        (_of_math, math, "sqrt"), (_imported, math, "sqrt"), (_of_torch, torch, "relu"),
        (_of_torch, nn.functional, "relu"),
    ],
)  # fmt: skip
def test_functions_of_libraries_that_are_replaced(
    f: Callable[[Tensor], Tensor], owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = specialize(f)
    x = torch.tensor([1.0, -2.0])
    before = f(x)
    torch.testing.assert_close(g(x), before)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _other)
        assert not f(x).equal(before)
        torch.testing.assert_close(g(x), f(x))
    torch.testing.assert_close(g(x), before)
    assert g.cache_info().programs == 2


class Mode(enum.Enum):
    HALF = 0.5
    TWICE = 2.0


def test_the_value_of_an_enum_member(monkeypatch: pytest.MonkeyPatch) -> None:
    g, h = specialize(lambda x: x * Mode.HALF.value), specialize(lambda x, mode: x * mode.value)
    for value in (0.5, 3.0, 0.5):
        monkeypatch.setattr(Mode.HALF, "_value_", value)
        assert g(torch.ones(1)).item() == value
        assert h(torch.ones(1), Mode.HALF).item() == value
    assert g.cache_info().programs == h.cache_info().programs == 2


def test_a_class_that_is_registered_later() -> None:
    class Base(abc.ABC):  # noqa: B024 - it is for isinstance
        pass

    class Thing:
        pass

    thing = Thing()

    def f(x: Tensor) -> Tensor:
        return x * 2 if isinstance(thing, Base) else x

    g = specialize(f)
    assert g(torch.ones(1)).item() == 1
    Base.register(Thing)
    assert g(torch.ones(1)).item() == 2


# --- class attributes in the place of functions


class Layer:
    scale = 3.0

    def __init__(self) -> None:
        self.weight = torch.ones(2)

    @specialize
    @classmethod
    def scaled(cls, x: Tensor) -> Tensor:
        return x * cls.scale

    @specialize
    @staticmethod
    def twice(x: Tensor) -> Tensor:
        return x * 2

    def _norm(self) -> Tensor:
        """The norm."""
        return self.weight.sum()

    def _refuse(self, value: float) -> NoReturn:
        raise AttributeError("it is what it is")

    norm: Any = specialize(property(_norm, _refuse), max_specializations=2)


def test_specialize_around_methods_of_classes_and_properties() -> None:
    x = torch.ones(2)
    on_class: Any = Layer  # type checkers do not see a class method under its decorator
    assert on_class.scaled(x).tolist() == Layer().scaled(x).tolist() == [3, 3]
    assert Layer.twice(x).tolist() == Layer().twice(x).tolist() == [2, 2]
    assert Layer().norm.item() == pytest.approx(2)
    assert vars(Layer)["norm"].__doc__ == "The norm."
    with pytest.raises(AttributeError, match="it is what it is"):
        Layer().norm = 2.0


@pytest.mark.parametrize("value", [True, False])
def test_a_tensor_of_a_bool_that_was_found_in_data(value: bool) -> None:
    f = specialize(lambda x: (torch.tensor([x.item(), False]), torch.tensor([x.item(), 2])))
    bools, ints = f(torch.tensor(value))
    assert bools.tolist() == [value, False] and bools.dtype is torch.bool
    assert ints.tolist() == [int(value), 2] and ints.dtype is torch.int64
