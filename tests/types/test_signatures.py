"""signature: the types of parameters and results, and the check of a call."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Callable, List, Optional  # noqa: UP035

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.types.strategies import Base, types, values
from tsfunc.errors import AnnotationError
from tsfunc.types import MetaTensorType, TSCustomClass, check, parse, signature

META = MetaTensorType(["n", 8])


def shown(func: Any) -> str:
    return str(signature(func))


class Model(torch.nn.Module):
    def forward(self, x, n: int = 3):  # type: ignore[no-untyped-def]
        return x

    def method(self, other: Model) -> Model:
        return self

    def annotated(self: Any, x: int) -> int:
        return x

    @staticmethod
    def static(x, n: int) -> int:  # type: ignore[no-untyped-def]
        return n

    @classmethod
    def make(cls, width: int) -> Model:
        return cls()


@dataclass
class Batch:
    x: META  # type: ignore[valid-type]
    scale: float = 1.0


class Callee:
    def __call__(self, x: int) -> None: ...


class TestRules:
    def test_by_annotation_by_default_and_else_a_tensor(self) -> None:
        def f(a, b: int, c=1.5, d: Optional[str] = "s", *e, g: List[int], **h: META):  # type: ignore[no-untyped-def, valid-type]  # noqa: UP006, UP045
            ...

        found = signature(f)
        assert {name: str(type_) for name, type_ in found.parameters.items()} == {
            "a": "Tensor",
            "b": "int",
            "c": "float",
            "d": "Optional[str]",
            "e": "Tensor",
            "g": "List[int]",
            "h": "tensor[n, 8]",
        }
        assert found.returns is None
        assert str(found) == (
            "f(a: Tensor, b: int, c: float = 1.5, d: Optional[str] = 's', *e: Tensor, "
            "g: List[int], **h: tensor[n, 8])"
        )

    @pytest.mark.parametrize(
        ("default", "type_"),
        [(1, "int"), (True, "bool"), ("s", "str"), ((1, "a"), "Tuple[int, str]"),
         ([1], "List[int]"), ([], "List[Tensor]"), (torch.float32, "torch.dtype"),
         (None, "Optional[Tensor]"),
         (torch.ones(1), "Tensor"), (torch.nn.ReLU(), "torch.nn.modules.activation.ReLU")],
    )  # fmt: skip
    def test_the_type_of_a_default(self, default: object, type_: str) -> None:
        def f(x=default): ...  # type: ignore[no-untyped-def]

        assert signature(f).parameters["x"] == parse(type_)

    def test_a_default_of_none_allows_none(self) -> None:
        def f(x: int = None, y: None = None, z: Any = None): ...  # type: ignore[assignment, no-untyped-def]  # noqa: RUF013

        assert [str(t) for t in signature(f).parameters.values()] == [
            "Optional[int]",
            "None",
            "Any",
        ]

    def test_its_return_value(self) -> None:
        def f() -> "Optional[Model]": ...  # noqa: UP037, UP045

        assert signature(f).returns == parse("Optional[Model]", {"Model": Model})
        assert signature(lambda x: x).returns is None

    def test_strings_see_globals_cells_and_the_class(self) -> None:
        class Local: ...

        def f(x: Local, y: List[Model]) -> Tensor:  # noqa: UP006
            return Local  # type: ignore[return-value]

        assert signature(f).parameters["x"] == TSCustomClass(Local)

    def test_names_that_mean_nothing(self) -> None:
        def f(x: nowhere): ...  # type: ignore[name-defined, no-untyped-def]  # noqa: F821

        with pytest.raises(AnnotationError, match=r"^f: parameter x: 'nowhere' can't be read"):
            signature(f)

    def test_annotations_that_are_no_types(self) -> None:
        def f(x: Callable[[], int]): ...  # type: ignore[no-untyped-def]

        with pytest.raises(
            AnnotationError, match=r"^f: parameter x: .*is not a type of the language"
        ):
            signature(f)

        def g() -> list: ...  # type: ignore[empty-body, type-arg]

        with pytest.raises(
            AnnotationError, match=r"^g: the result: list needs the types of its elements"
        ):
            signature(g)


class TestSelf:
    def test_its_type_is_the_class(self) -> None:
        types_ = signature(Model.method).parameters
        assert list(types_) == ["self", "other"] and types_["self"] == TSCustomClass(Model)

    def test_a_bound_method_has_none(self) -> None:
        assert shown(Model().method) == f"method(other: {__name__}.Model) -> {__name__}.Model"
        assert shown(Model.make) == f"make(width: int) -> {__name__}.Model"

    def test_a_static_method_has_none(self) -> None:
        assert shown(Model.static) == shown(Model().static) == "static(x: Tensor, n: int) -> int"

    @pytest.mark.parametrize(
        "func", [Model.annotated, Model().annotated], ids=["function", "bound"]
    )
    def test_it_may_not_be_annotated(self, func: Any) -> None:
        with pytest.raises(AnnotationError, match="annotated: expected self without an annotation"):
            signature(func)

    def test_outside_of_a_class_it_is_a_name_like_any_other(self) -> None:
        def f(self: int) -> None: ...

        assert shown(f) == "f(self: int) -> None"


class TestCallables:
    def test_a_module_is_its_forward(self) -> None:
        assert shown(Model()) == "forward(x: Tensor, n: int = 3)"

    def test_a_class_is_its_constructor(self) -> None:
        assert shown(Batch).endswith(f"(x: tensor[n, 8], scale: float = 1.0) -> {__name__}.Batch")

    def test_a_partial_lacks_its_bound_parameters(self) -> None:
        def f(x: int, y: str, z: Tensor) -> None: ...

        assert shown(functools.partial(f, 3)) == "f(y: str, z: Tensor) -> None"

    def test_wrappers_and_instances(self) -> None:
        @functools.wraps(Model.static)
        def wrapper(*args: Any) -> Any: ...

        assert shown(wrapper) == "static(x: Tensor, n: int) -> int"
        assert shown(Callee()) == "__call__(x: int) -> None"

    def test_callables_without_a_signature(self) -> None:
        with pytest.raises(AnnotationError, match="has no signature"):
            signature(torch.sin)


class TestParameterBinding:
    def test_every_mismatch_of_a_call(self) -> None:
        def f(x: META, n, *rest: int, flag: bool = True, **more: str): ...  # type: ignore[no-untyped-def, valid-type]

        found = signature(f)
        assert found.check(torch.ones(2, 8), torch.ones(1), 1, 2, flag=False, a="b") == []
        assert found.check(x=torch.ones(2, 8), n=torch.ones(1)) == []
        assert [str(m) for m in found.check(torch.ones(2, 7), 3, 1, "a", flag=1, a=2)] == [
            "x.shape[1]: expected 8, got 7",
            "n: expected a tensor, tensor[...], got 3 (int)",
            "rest[1]: expected int, got 'a' (str)",
            "flag: expected bool, got 1 (int)",
            "a: expected str, got 2 (int)",
        ]

    def test_a_default_is_not_checked(self) -> None:
        def f(x: float = 0) -> None: ...

        assert signature(f).check() == []
        assert len(signature(f).check(0)) == 1

    def test_sizes_of_one_name_are_equal_in_all_parameters(self) -> None:
        def f(x: META, y: META): ...  # type: ignore[no-untyped-def, valid-type]

        assert [str(m) for m in signature(f).check(torch.ones(2, 8), torch.ones(3, 8))] == [
            "y.shape[0]: expected 2 (n is 2 at x.shape[0]), got 3"
        ]

    def test_too_many_and_too_few(self) -> None:
        def scale(x, /, *, by: float): ...  # type: ignore[no-untyped-def]

        for args, kwargs in (((), {}), ((1, 2), {}), ((1,), {"to": 2.0})):
            with pytest.raises(TypeError, match=r"scale\(\)"):
                signature(scale).check(*args, **kwargs)

    def test_parameters_that_are_called_as_builtins_are(self) -> None:
        def f(type: int, len: List[int], isinstance: str, _0: Tensor, _1: Tensor, tuple=(1,)): ...  # type: ignore[no-untyped-def]  # noqa: UP006

        x = torch.ones(1)
        assert signature(f).check(1, [1], "a", x, x, (2,)) == []
        assert len(signature(f).check("1", 1, 2, 3, 4, [2])) == 6

    @given(st.data())
    @settings(max_examples=50)
    def test_a_call_is_checked_as_its_arguments_are(self, data: st.DataObject) -> None:
        one, other = data.draw(types(names=False)), data.draw(types(names=False))
        value = data.draw(values(one) | values(other))

        def f(x, y): ...  # type: ignore[no-untyped-def]

        f.__annotations__ = {"x": one, "y": other}
        want = [*check(value, one, "x"), *check(value, other, "y")]
        assert signature(f).check(value, value) == want

    def test_computed_sizes_and_classes_with_fields(self) -> None:
        def f(x: MetaTensorType(["2*n"]), y: MetaTensorType(["n"]), z: Batch): ...  # type: ignore[no-untyped-def, valid-type]

        batch = Batch(torch.ones(3, 8))
        assert signature(f).check(torch.ones(6), torch.ones(3), batch) == []
        assert [m.path for m in signature(f).check(torch.ones(6), torch.ones(2), batch)] == [
            "z.x.shape[0]",
            "x.shape[0]",
        ]


def test_a_plain_class_is_checked_by_isinstance() -> None:
    def f(x: Base): ...  # type: ignore[no-untyped-def]

    assert signature(f).check(Base()) == [] and len(signature(f).check(3)) == 1
