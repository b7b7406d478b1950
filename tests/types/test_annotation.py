"""from_annotation: typing objects, classes, strings."""

# The tests cover both of typing's styles, so neither may be turned into the other.
# ruff: noqa: UP006, UP007, UP045

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
import typing
from typing import (  # noqa: UP035
    Annotated,
    Any,
    Dict,
    ForwardRef,
    Generic,
    List,
    NamedTuple,
    NewType,
    Optional,
    Protocol,
    Tuple,
    TypeVar,
    Union,
)

import pytest
import torch
from torch import Tensor

from tests.types.strategies import Base, Color, Encoder, Record
from tsfunc.errors import AnnotationError, DescriptorError
from tsfunc.types import (
    ANY,
    BOOL,
    FLOAT,
    INT,
    NONE,
    STR,
    TENSOR,
    MetaTensorType,
    TSBuiltinClass,
    TSCustomClass,
    TSDict,
    TSEnum,
    TSFuture,
    TSList,
    TSModuleInterface,
    TSModuleType,
    TSNamedTuple,
    TSOptional,
    TSRRef,
    TSTensor,
    TSTuple,
    TSType,
    from_annotation,
    interface,
)
from tsfunc.types.annotation import attribute_types

META = MetaTensorType(["n", 64], dtype=torch.float32)
X = TSTensor(meta=META)
T = TypeVar("T")
Width = NewType("Width", int)
Old = collections.namedtuple("Old", ["a", "b"])


class Pair(NamedTuple):
    x: Tensor
    n: Optional[int] = None


class Batch(NamedTuple):
    x: META  # type: ignore[valid-type]
    rest: List[META]  # type: ignore[valid-type]


class Node(NamedTuple):
    next: Optional[Node]


class Box(Generic[T]): ...


class Config(typing.TypedDict):
    width: int


@pytest.mark.parametrize(
    ("annotation", "type_"),
    [
        (Any, ANY), (object, ANY), (int, INT), (float, FLOAT), (bool, BOOL), (str, STR),
        (None, NONE), (type(None), NONE), (Tensor, TENSOR), (MetaTensorType, TENSOR), (META, X),
        (torch.nn.Parameter, TSTensor(torch.nn.Parameter)),
        # old style, new style
        (List[int], TSList(INT)), (list[int], TSList(INT)),
        (Dict[str, Tensor], TSDict(STR, TENSOR)), (dict[str, Tensor], TSDict(STR, TENSOR)),
        (Tuple[int, Tensor], TSTuple((INT, TENSOR))), (tuple[int, Tensor], TSTuple((INT, TENSOR))),
        (Tuple[()], TSTuple(())), (tuple[()], TSTuple(())),
        (Optional[int], TSOptional(INT)), (Union[None, int], TSOptional(INT)),
        (int | None, TSOptional(INT)), (Union[int, int], INT), (Optional[None], NONE),
        (Optional[Any], ANY), (Union[int, Any], ANY),
        (torch.futures.Future[int], TSFuture(INT)), (torch.jit.Future[int], TSFuture(INT)),
        # a description at any leaf
        (List[META], TSList(X)), (list[META], TSList(X)), (Dict[str, META], TSDict(STR, X)),  # type: ignore[valid-type]
        (Optional[META], TSOptional(X)), (META | None, TSOptional(X)), (None | META, TSOptional(X)),
        (Tuple[int, META], TSTuple((INT, X))), (torch.futures.Future[META], TSFuture(X)),  # type: ignore[valid-type]
        (Annotated[Tensor, META], X), (Annotated[torch.nn.Parameter, META],
                                       TSTensor(torch.nn.Parameter, META)),
        (Batch, TSNamedTuple(("x", "rest"), (X, TSList(X)))),
        # classes
        (Pair, TSNamedTuple(("x", "n"), (TENSOR, TSOptional(INT)))),
        (Old, TSNamedTuple(("a", "b"), (TENSOR, TENSOR))),
        (torch.device, TSBuiltinClass(torch.device)), (torch.dtype, TSBuiltinClass(torch.dtype)),
        (torch.Stream, TSBuiltinClass(torch.Stream)),
        (torch.nn.ModuleList, TSBuiltinClass(torch.nn.ModuleList)),
        (torch.nn.ModuleDict, TSBuiltinClass(torch.nn.ModuleDict)),
        (Color, TSEnum(Color)), (Base, TSCustomClass(Base)), (Record, TSCustomClass(Record)),
        (torch.nn.Linear, TSCustomClass(torch.nn.Linear)),
        (Encoder, TSModuleInterface(Encoder)), (Box[int], TSCustomClass(Box)),
        # other wrappings
        (Annotated[int, "width"], INT), (Width, INT), (typing.Final[int], INT),
        (typing.ClassVar[int], INT), (X, X), (TSList(INT), TSList(INT)),
        # strings
        ("List[int]", TSList(INT)), ("int | None", TSOptional(INT)), ("f32[n, 64]", X),
        (ForwardRef("Dict[str, Tensor]"), TSDict(STR, TENSOR)),
        (List["int"], TSList(INT)),
    ],
)  # fmt: skip
def test_annotations_are_read(annotation: object, type_: TSType) -> None:
    assert from_annotation(annotation) == type_


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without RPC")
def test_remote_references() -> None:
    from torch.distributed.rpc import RRef

    assert from_annotation(RRef[int]) == TSRRef(INT)
    with pytest.raises(AnnotationError, match=r"write RRef\[X\]"):
        from_annotation(RRef)


@pytest.mark.parametrize(
    ("annotation", "type_"),
    [
        ("Node", TSCustomClass(Base)),
        ("List['Node']", TSList(TSCustomClass(Base))),
        ("Optional[Node]", TSOptional(TSCustomClass(Base))),
        (ForwardRef("Node"), TSCustomClass(Base)),
        (List["Node"], TSList(TSCustomClass(Base))),
        ("Meta(['n', 64], dtype=torch.float32) | None", TSOptional(X)),
        ("t.Dict[str, List[Tensor]]", TSDict(STR, TSList(TENSOR))),
        ("f32[n, 64]", X),
        ("List[f32[n, 64]]", TSList(X)),
    ],
)
def test_strings_see_the_scope(annotation: object, type_: TSType) -> None:
    scope = {"Node": Base, "Meta": MetaTensorType, "t": typing}
    assert from_annotation(annotation, scope) == type_


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (list, r"the annotation: list needs the types of its elements: write List\[X\]"),
        (List, r"typing\.List needs the types of its elements: write List\[X\]"),
        (Dict, r"write Dict\[K, V\]"),
        (Tuple, r"write Tuple\[X, Y\]"),
        (torch.futures.Future, r"write Future\[X\]"),
        (Tuple[int, ...], "can have any length, and the length of a tuple is part of its type"),
        (Union[int, str], "a union of int and str: the language has no unions but with None"),
        (Dict[Color, int], r"keys of a dict are .*, not tests\.types\.strategies\.Color"),
        (typing.Callable[[int], int], r"is not a type of the language; a type is Any, int, float"),
        (collections.deque[int], "is not a type of the language"),
        (typing.Literal[3], "is not a type of the language"),
        (T, "~T is not a type of the language"),
        (3, "3 is not a type of the language"),
        ([int], r"\[<class 'int'>\] is not a type of the language"),
        (Config, "Config is a TypedDict"),
        (Node, r"Node\.next: Node has itself among its elements; .*make it a class"),
        (Annotated[int, META], r"describes a tensor, but annotates int"),
        (
            TSModuleType(torch.nn.Linear, ()),
            "expected the class Linear, got the type of one module",
        ),
        ("nowhere", "nowhere is neither a word of the grammar nor a class"),
    ],
)
def test_bad_annotations_are_refused(annotation: object, message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        from_annotation(annotation)


def test_errors_say_where() -> None:
    with pytest.raises(AnnotationError, match=r"^f: parameter x: 'nowhere' can't be read: name"):
        from_annotation("nowhere", {}, where="f: parameter x")

    class Wrong(NamedTuple):
        x: list  # type: ignore[type-arg]

    with pytest.raises(AnnotationError, match=r"^the annotation: Wrong\.x: list needs the types"):
        from_annotation(Wrong)


def test_an_error_has_the_class_that_callers_of_typing_catch() -> None:
    for kind in (TypeError, ValueError, DescriptorError):
        with pytest.raises(kind):
            from_annotation(3)


def make_enum(members: dict[str, Any]) -> type[enum.Enum]:
    make: Any = enum.Enum  # mypy takes only literals as members
    return make("Made", members)


class TestEnums:
    def test_members_of_one_type(self) -> None:
        for values in ((1, 2), (1.0, 2.0), ("a", "b")):
            made = make_enum({"A": values[0], "B": values[1]})
            assert from_annotation(made) == TSEnum(made)

    @pytest.mark.parametrize("values", [(1, 2.0), (1, "a"), (True, False), (None,), ((1,), (2,))])
    def test_members_of_another_type(self, values: tuple[Any, ...]) -> None:
        made = make_enum({f"M{i}": value for i, value in enumerate(values)})
        with pytest.raises(AnnotationError, match="enum Made: expected members whose values are"):
            from_annotation(made)

    def test_a_parent_without_members(self) -> None:
        class Parent(enum.Enum):
            def double(self) -> int:
                return 2 * int(self.value)

        class Child(Parent):
            ONE = 1

        assert from_annotation(Child) == TSEnum(Child)
        with pytest.raises(AnnotationError, match="enum Parent has no members"):
            from_annotation(Parent)

    def test_a_parent_with_members(self) -> None:
        with pytest.raises(TypeError, match="extend"):

            class Child(Color):  # type: ignore[misc]
                GREEN = "green"


class TestAttributes:
    def test_of_a_class_and_its_bases(self) -> None:
        class Parent:
            a: int
            b: Tensor

        @dataclasses.dataclass
        class Child(Parent):
            b: META  # type: ignore[valid-type]
            c: List[META]  # type: ignore[valid-type]

        assert attribute_types(Child) == {"a": INT, "b": X, "c": TSList(X)}

    def test_an_annotation_that_is_no_type_says_nothing(self) -> None:
        class Holder:
            call: typing.Callable[[], int]
            missing: nowhere  # type: ignore[name-defined]  # noqa: F821
            own: Holder

        types = attribute_types(Holder)
        assert types["call"] == types["missing"] == ANY
        assert types["own"] == TSCustomClass(Holder)

    def test_a_class_that_is_defined_later(self) -> None:
        class Early:
            call: typing.Callable[[], int]
            later: Later

        assert attribute_types(Early)["later"] == ANY

        class Later:
            pass

        def knows() -> type:
            return Later

        Early.knows = knows  # type: ignore[attr-defined]
        assert attribute_types(Early)["later"] == TSCustomClass(Later)

    def test_they_are_read_once(self) -> None:
        """An annotation that is not a type is cached: every module has attributes of this kind."""

        class Layer(torch.nn.Module):
            width: int

        assert attribute_types(Layer)["width"] == INT
        assert attribute_types(Layer) is attribute_types(Layer)

    def test_names_are_those_of_the_module_that_has_them(self) -> None:
        """``torch.nn.Module`` calls itself ``Module``, which may be another class in this file."""

        class Layer(torch.nn.Module):
            pass

        wanted = TSDict(STR, TSOptional(TSCustomClass(torch.nn.Module)))
        assert attribute_types(Layer)["_modules"] == wanted


@pytest.mark.skipif(sys.version_info < (3, 12), reason="`type X = ...` is new in Python 3.12")
def test_type_aliases() -> None:
    scope: dict[str, Any] = {}
    exec("type Ints = list[int]", scope)
    assert from_annotation(scope["Ints"]) == TSList(INT)


class TestInterfaces:
    def test_a_protocol(self) -> None:
        class Step(Protocol):
            """Steps."""

            def step(self, x: Tensor, n: int = 3) -> Tensor:
                """One step."""

            def reset(self) -> None:
                raise NotImplementedError

            def stop(self) -> None:
                pass

        assert from_annotation(Step) == TSModuleInterface(Step)

    @pytest.mark.parametrize(
        ("body", "fault"),
        [
            ("width: int", "it has the attribute width"),
            ("width = 3", "width is a int"),
            ("def __init__(self): self.a = 3", "it has a constructor"),
            ("def f(self, x) -> int: ...", "f has no annotation for x"),
            ("def f(self, x: int, *y: int, z) -> int: ...", "f has no annotation for z"),
            ("def f(self, x: int) -> int: return x", "f has a body"),
            ("def f(self) -> int: return 3", "f has a body"),
            ("@property\n    def f(self) -> int: ...", "f is a property"),
            ("@staticmethod\n    def f() -> int: ...", "f is a staticmethod"),
        ],
    )
    @pytest.mark.parametrize("base", ["Protocol", "torch.nn.Module"])
    def test_has_nothing_but_abstract_methods(self, body: str, fault: str, base: str) -> None:
        scope: dict[str, Any] = {"Protocol": Protocol, "torch": torch, "__name__": __name__}
        exec(f"class Wrong({base}):\n    {body}\n", scope)
        with pytest.raises(AnnotationError, match=f"interface Wrong may have .*else: .*{fault}"):
            from_annotation(interface(scope["Wrong"]))

    def test_is_derived_from_interfaces_alone(self) -> None:
        with pytest.raises(
            AnnotationError, match="it is derived from Base, which is not an interface"
        ):

            @interface
            class Wrong(Base):
                def f(self) -> None: ...

    def test_a_class_that_implements_one_is_none_itself(self) -> None:
        @interface
        class Step(torch.nn.Module):
            def step(self, x: Tensor) -> Tensor: ...  # type: ignore[empty-body]

        class Doubling(Step):
            def step(self, x: Tensor) -> Tensor:
                return 2 * x

        assert from_annotation(Step) == TSModuleInterface(Step)
        assert from_annotation(Doubling) == TSCustomClass(Doubling)

    @pytest.mark.filterwarnings("ignore:`torch.jit.interface` is deprecated")
    def test_as_torch_declares_them(self) -> None:
        assert from_annotation(torch.jit.interface(Declared)) == TSModuleInterface(Declared)


class Declared(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[empty-body]
        pass
