"""The descriptors of a function: their refusals when they are made, and at each call."""

from __future__ import annotations

import enum
import inspect
import re
from collections import deque, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Dict, List, Optional, Tuple, Union  # noqa: UP035

import optree
import pytest
import torch

from tests.types.strategies import Deep, Encoder, Level
from tsfunc.errors import DescriptorError, DescriptorViolation
from tsfunc.types import (
    Bindings,
    Contract,
    Dim,
    DimExpr,
    MetaTensorType,
    Value,
    compile_descriptors,
    parse,
)

State = namedtuple("State", ["weight", "step"])


class Mode(str, enum.Enum):
    SUM = "sum"


@dataclass
class Batch:
    x: MetaTensorType(["n", 8])  # type: ignore[valid-type]
    scale: float = 1.0


@optree.register_pytree_node_class(namespace="tsfunc")
@dataclass
class Point:
    x: torch.Tensor
    n: int

    def __tree_flatten__(self) -> Any:
        return (self.n, self.x), None, ("n", "x")

    @classmethod
    def __tree_unflatten__(cls, metadata: None, children: Any) -> Point:
        return cls(children[1], children[0])


def forward(params: Any, x: Any, y: Any = None, *rest: Any, train: Any = False) -> None: ...


@optree.register_pytree_node_class(namespace="tsfunc")
@dataclass
class Pair:
    first: MetaTensorType(["n"])  # type: ignore[valid-type]
    second: MetaTensorType(["m"])  # type: ignore[valid-type]
    name: str

    def __tree_flatten__(self) -> Any:
        return (self.second, self.first), self.name

    @classmethod
    def __tree_unflatten__(cls, name: str, children: Any) -> Pair:
        return cls(children[1], children[0], name)


def contract_of(**descriptors: object) -> Contract:
    return compile_descriptors(descriptors, inspect.signature(forward), name="forward")


def violations(descriptors: Mapping[str, object], arguments: Mapping[str, object]) -> list[str]:
    """Return the lines of the error, without its first and last, which are checked here."""
    with pytest.raises(DescriptorViolation) as caught:
        contract_of(**descriptors).check(arguments)
    first, *lines, last = str(caught.value).split("\n")
    assert first == "forward(params, x, y, rest, train): the call breaks its descriptors:"
    assert last.startswith("Pass arguments that fit, or give descriptors that these")
    return [line.removeprefix("  ") for line in lines]


# --- the example of the proposal


def test_the_example_of_the_proposal() -> None:
    meta = MetaTensorType([100, 200], dtype=float)
    contract = {"x": meta, "train": True}
    x = torch.randn([100, 200], dtype=float)  # type: ignore[call-overload]
    assert contract_of(**contract).check({"x": x, "train": True}).leaves == {("x",): meta}

    bad = torch.ones([100], dtype=float)  # type: ignore[call-overload]
    assert violations(contract, {"x": bad, "train": True}) == [
        "x.shape: expected [100, 200], got [100]"
    ]


def test_the_shapes_of_the_proposal() -> None:
    contract = contract_of(x=MetaTensorType(["i", "i", 100]), y=MetaTensorType(["i1", "i2", "i3"]))
    sizes = contract.check({"x": torch.ones(4, 4, 100), "y": torch.ones(1, 2, 3)}).sizes
    assert sizes == {"i": 4, "i1": 1, "i2": 2, "i3": 3}
    lines = violations({"x": MetaTensorType(["i", "i", 100])}, {"x": torch.ones(4, 5, 99)})
    assert lines == [
        "x.shape[1]: expected 4 (i is 4 at x.shape[0]), got 5",
        "x.shape[2]: expected 100, got 99",
    ]


# --- refused when made


@pytest.mark.parametrize(
    ("descriptors", "message"),
    [
        (
            {"z": int, "x": int},
            r"descriptors of forward\(params, x, y, rest, train\): there is no parameter 'z'; "
            r"the parameters are: params, x, y, rest, train",
        ),
        ({1: int}, r"there is no parameter 1;"),
        ([int], r"expected a dict of parameter name to descriptor, got \[<class 'int'>\] of type"),
        ({"x": {"w": Optional}}, r"train\): x\['w'\]: typing\.Optional can't be checked"),
        (
            {"x": [MetaTensorType([Dim("n", min=5)])], "y": MetaTensorType([3, Dim("n", max=4)])},
            r"the bounds of dim 'n' contradict each other: Dim\('n', min=5\) at x\[0\]\.shape"
            r"\[0\], Dim\('n', max=4\) at y\.shape\[1\]; one name is one size",
        ),
        (
            {"x": MetaTensorType(["n"]), "y": MetaTensorType(["n*k*k"])},
            r"y\.shape\[0\] is 'n \* k \* k', but no shape has 'k' as a dim of its own",
        ),
    ],
)
def test_refused_when_made(descriptors: Any, message: str) -> None:
    with pytest.raises(DescriptorError, match=message):
        compile_descriptors(descriptors, inspect.signature(forward), name="forward")


def test_a_function_without_parameters() -> None:
    with pytest.raises(DescriptorError, match=r"g\(\): there is no .*the parameters are: none"):
        compile_descriptors({"x": 1}, inspect.signature(lambda: None), name="g")


# --- refused at a call


def test_every_mismatch_is_listed() -> None:
    contract = {
        "params": {"w": [MetaTensorType(["n", 64], dtype=torch.float32)]},
        "x": MetaTensorType(torch.float32, device="meta", requires_grad=True),
        "train": False,
    }
    call = {
        "params": {"w": [torch.ones(3, 32, dtype=torch.float16)]},
        "x": torch.ones(3).to_sparse(),
        "train": 0,
    }
    assert violations(contract, call) == [
        "params['w'][0].dtype: expected torch.float32, got torch.float16",
        "params['w'][0].shape[1]: expected 64, got 32",
        "x.device: expected meta, got cpu",
        "x.requires_grad: expected True, got False",
        "train: expected the value False (bool), got 0 (int)",
    ]


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("descriptor", "value", "line"),
    [
        (MetaTensorType(["n"]), 3, "x: expected a tensor, tensor[n], got 3 (int)"),
        (torch.Tensor, None, "x: expected a tensor, tensor[...], got None"),
        (MetaTensorType(rank=1), X, "x.shape: expected [?], got [2, 3]"),
        (MetaTensorType([Dim("n", 3, 8), 3]), X, "x.shape[0]: expected 3<=n<=8, got 2"),
        (MetaTensorType(layout=torch.sparse_coo), X, "x.layout: expected torch.sparse_coo, got "),
        (MetaTensorType(device="cuda"), X, "x.device: expected cuda, got cpu"),
        (
            MetaTensorType(["n", "2*n"]),
            X,
            "x.shape[1]: expected 2 * n = 4 (n is 2 at x.shape[0]), got 3",
        ),
        (
            MetaTensorType(["n", "n//(n-2)"]),
            X,
            "x.shape[1]: expected n // (n - 2), which divides by zero (n is 2 at x.shape[0]), got",
        ),
        (int, True, "x: expected int, got True (bool)"),
        (float, 2, "x: expected float, got 2 (int)"),
        (str, X, "x: expected str, got f32[2, 3] cpu"),
        ("sum", "mean", "x: expected the value 'sum' (str), got 'mean' (str)"),
        (None, 0, "x: expected the value None, got 0 (int)"),
        (X, X + 1, "x: expected the value f32[2, 3] cpu, got another f32[2, 3] cpu"),
        (List[int], (1,), "x: expected a list, got (1,) (tuple)"),  # noqa: UP006
        (List[int], [1, "a"], "x[1]: expected int, got 'a' (str)"),  # noqa: UP006
        (Tuple[int, ...], [1], "x: expected a tuple, got [1] (list)"),  # noqa: UP006
        (Tuple[int, int], (1,), "x: expected a tuple of length 2, got one of 1"),  # noqa: UP006
        (Tuple[int, int], [1, 2], "x: expected a tuple, got [1, 2] (list)"),  # noqa: UP006
        (Dict[str, int], [], "x: expected a dict, got [] (list)"),  # noqa: UP006
        (Dict[str, int], {3: 1}, "a key of x: expected str, got 3 (int)"),  # noqa: UP006
        (Dict[str, int], {"a": "b"}, "x['a']: expected int, got 'b' (str)"),  # noqa: UP006
        ({"a": int}, 3, "x: expected a dict, got 3 (int)"),
        ({"a": int}, {}, "x['a']: expected this key, got a dict without it"),
        ({}, {"b": 3}, "x['b']: expected no such key, got 3 (int)"),
        (State(int, int), State(1, "a"), "x.step: expected int, got 'a' (str)"),
        (State(int, int), (1, 2), "x: expected a State, got (1, 2) (tuple)"),
        (Optional[int], "a", "x: expected int | None, got 'a' (str)"),  # noqa: UP045
        (MetaTensorType([2]) | None, 3, "x: expected tensor[2] | None, got 3 (int)"),
        (MetaTensorType([2, 4]) | None, X, "x.shape[1]: expected 4, got 3"),
        (Union[int, str], 2.0, "x: expected int | str, got 2.0 (float)"),  # noqa: UP007
        (MetaTensorType([2, 4]) | int, X, "x.shape[1]: expected 4, got 3"),
        (
            MetaTensorType(float) | MetaTensorType(int),
            X,
            "x: expected f64[...] | i64[...], got f32[2, 3] cpu",
        ),
        (Value([1, 2]), [1, 3], "x: expected the value [1, 2] (list), got [1, 3] (list)"),
    ],
)
def test_violations_have_messages(descriptor: object, value: object, line: str) -> None:
    (found,) = violations({"x": descriptor}, {"x": value})
    assert found.startswith(line)


def test_keys_that_are_right_are_still_checked() -> None:
    lines = violations({"x": {"a": int, "b": int}}, {"x": {"b": "no", "c": 1}})
    assert lines == [
        "x['a']: expected this key, got a dict without it",
        "x['b']: expected int, got 'no' (str)",
        "x['c']: expected no such key, got 1 (int)",
    ]


def test_named_dims_across_parameters_in_the_order_of_the_signature() -> None:
    n = MetaTensorType(["n"])
    contract = {"y": n, "x": n, "params": [n]}  # the order of the dict plays no part
    call = {"params": [torch.ones(3)], "x": torch.ones(3), "y": torch.ones(4)}
    assert violations(contract, call) == [
        "y.shape[0]: expected 3 (n is 3 at params[0].shape[0]), got 4"
    ]


def test_bounds_of_one_name_add_up() -> None:
    contract = {"x": MetaTensorType(["n"]), "y": MetaTensorType([Dim("n", min=2)])}
    call = {"x": torch.ones(1), "y": torch.ones(1)}
    assert violations(contract, call) == ["x.shape[0]: expected n>=2, got 1"]
    assert contract_of(**contract).dims == {"n": Dim("n", min=2)}


def test_an_expression_may_come_before_its_names() -> None:
    contract = contract_of(x=MetaTensorType(["2*n+1"]), y=MetaTensorType(["n"]))
    assert contract.check({"x": torch.ones(7), "y": torch.ones(3)}).sizes == {"n": 3}


def test_an_expression_whose_name_did_not_come() -> None:
    contract = {"x": MetaTensorType(["n//2"]), "y": MetaTensorType(["n"]) | None}
    assert violations(contract, {"x": torch.ones(4), "y": None}) == [
        "x.shape[0]: expected n // 2, got 4: the call has no n"
    ]


def test_an_alternative_that_fails_binds_nothing() -> None:
    either = MetaTensorType(["n", 5]) | MetaTensorType(["m", 3])
    found = contract_of(x=either, y=MetaTensorType(["n"])).check({"x": X, "y": torch.ones(7)})
    assert found.sizes == {"m": 2, "n": 7}
    assert found.leaves[("x",)] == MetaTensorType(["m", 3])


def test_attributes_of_containers_have_the_paths_of_their_entries() -> None:
    """An attribute that is a child has the child's entry; others are named."""
    first, second = MetaTensorType(["n"]), MetaTensorType(["m"])
    pair = Pair(torch.ones(2), torch.ones(3), "a")
    bindings = contract_of(params=[Pair]).check({"params": [pair]})
    assert bindings.leaves == {("params", 0, 1): first, ("params", 0, 0): second}
    pair = Pair(torch.ones(2), torch.ones(()), 3)  # type: ignore[arg-type]
    lines = violations({"x": Pair}, {"x": pair})
    assert [line.partition(":")[0] for line in lines] == ["x[0].shape", "x.name"]


def test_the_dims_of_a_leaf_with_one_alternative_need_no_leaves() -> None:
    """The leaves of a call cost a full check."""

    def leaves() -> Any:
        raise AssertionError("the leaves are not needed")

    meta = MetaTensorType(["n", 3])
    one = Bindings({"n": 2}, leaves, lambda path: {meta})
    assert one.dims(("x",)) == meta.dims
    assert Bindings({"n": 2}, leaves, lambda path: set()).dims(("x",)) is None
    other = MetaTensorType([3, "n"])
    two = Bindings({"n": 2}, lambda: {("x",): other}, lambda path: {meta, other})
    assert two.dims(("x",)) == other.dims


def test_the_alternative_fits_the_bound_names() -> None:
    either = MetaTensorType(["n", "a"]) | MetaTensorType(["b", "n"])
    contract = contract_of(params=MetaTensorType(["n"]), x=either)
    assert contract.check({"params": torch.ones(3), "x": X}).sizes == {"n": 3, "b": 2}
    assert contract.check({"params": torch.ones(2), "x": X}).sizes == {"n": 2, "a": 3}
    either = MetaTensorType(["n", "a"]) | int
    assert violations(
        {"params": [MetaTensorType(["n"])], "x": either}, {"params": [torch.ones(3)], "x": X}
    ) == ["x.shape[0]: expected 3 (n is 3 at params[0].shape[0]), got 2"]


# --- accepted


def test_defaults_replace_missing_arguments() -> None:
    assert contract_of(y=None, rest=(), train=False).check({}) == Bindings({}, {})
    assert violations({"x": int, "train": True}, {}) == [
        "x: expected an argument, which its descriptor describes, got none",
        "train: expected the value True (bool), got False (bool)",
    ]
    keywords = compile_descriptors({"kw": {}}, inspect.signature(lambda **kw: kw))
    assert keywords.check({}) == Bindings({}, {})


def test_parameters_without_a_descriptor_are_open() -> None:
    assert contract_of().check({"x": object()}) == Bindings({}, {})
    assert contract_of(x=Any, y=[Any]).check({"x": 3, "y": [4]}) == Bindings({}, {})
    assert contract_of(x=Union[Any, int]).check({"x": "a"}) == Bindings({}, {})  # noqa: UP007


def test_bindings_have_the_form_of_each_dim() -> None:
    contract = contract_of(x=[MetaTensorType(["n", 3, "n+1", None]), MetaTensorType(float)])
    x = [torch.ones(2, 3, 3, 9), torch.ones(4, dtype=torch.float64)]
    found = contract.check({"x": x})
    assert found.dims(("x", 0)) == (Dim("n"), 3, DimExpr("n + 1"), None)
    assert found.dims(("x", 1)) is None
    assert found.dims(("y",)) is None


def test_leaf_descriptors_are_found_by_optree_paths() -> None:
    meta, other = MetaTensorType(["n"]), MetaTensorType(rank=2)
    described = {"params": {"b": [meta, None], "a": State(other, int)}, "x": meta | other}
    contract = contract_of(**described)
    params = {"b": [torch.ones(2), None], "a": State(torch.ones(1, 1), 3)}
    tree: Any = {"params": params, "x": torch.ones(1, 1), "y": 4}
    paths, leaves, _ = optree.tree_flatten_with_path(tree, none_is_leaf=True)
    governed = {
        path: contract.descriptors[path[0]].governing(path[1:])
        for path in paths
        if path[0] in contract.descriptors
    }
    assert governed == {
        ("params", "b", 0): {meta},
        ("params", "b", 1): set(),
        ("params", "a", 0): {other},
        ("params", "a", 1): set(),
        ("x",): {meta, other},  # the call decides
    }
    assert len(leaves) == len(governed) + 1
    assert contract.check({"params": params, "x": torch.ones(1, 1)}).leaves[("x",)] == other


def test_tensors_are_read_by_their_attributes_alone() -> None:
    class Tracer(torch.Tensor):
        @property
        def shape(self) -> torch.Size:  # type: ignore[override]
            return torch.Size([7, 8])

        @property
        def requires_grad(self) -> bool:  # type: ignore[override]
            return True

    tracer = torch.ones(1).as_subclass(Tracer)
    contract = contract_of(x=MetaTensorType(["n", 8], requires_grad=True))
    assert contract.check({"x": tracer}).sizes == {"n": 7}


def test_cuda_without_an_index_is_every_cuda_device() -> None:
    class OnCuda(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda:1")

    tensor = torch.ones(1).as_subclass(OnCuda)
    for expected in ("cuda", "cuda:1"):
        contract_of(x=MetaTensorType(device=expected)).check({"x": tensor})
    for expected in ("cuda:0", "cpu"):
        line = f"x.device: expected {expected}, got cuda:1"
        assert violations({"x": MetaTensorType(device=expected)}, {"x": tensor}) == [line]


def test_other_containers_that_optree_knows() -> None:
    contract = {"x": deque([int, MetaTensorType(["n"])])}
    assert contract_of(**contract).check({"x": deque([1, torch.ones(2)])}).leaves == {
        ("x", 1): MetaTensorType(["n"])
    }
    assert violations(contract, {"x": deque(["a", 2])}) == [
        "x[0]: expected int, got 'a' (str)",
        "x[1]: expected a tensor, tensor[n], got 2 (int)",
    ]
    assert violations(contract, {"x": deque([1])}) == ["x: expected children [0, 1], got [0]"]


class TestTypes:
    """Types of the language as descriptors, and classes with annotated fields."""

    def test_fields_of_a_dataclass(self) -> None:
        n = MetaTensorType(["n"])
        contract = {"x": Batch, "y": n}
        found = contract_of(**contract).check({"x": Batch(torch.ones(2, 8)), "y": torch.ones(2)})
        assert found.sizes == {"n": 2}
        assert found.leaves == {("x", "x"): MetaTensorType(["n", 8]), ("y",): n}
        wrong = Batch(torch.ones(2, 7), "s")  # type: ignore[arg-type]
        assert violations(contract, {"x": [wrong], "y": torch.ones(2)})[0].startswith(
            "x: expected Batch, got [Batch("
        )
        assert violations(contract, {"x": wrong, "y": torch.ones(3)}) == [
            "x.x.shape[1]: expected 8, got 7",
            "x.scale: expected float, got 's' (str)",
            "y.shape[0]: expected 2 (n is 2 at x.x.shape[0]), got 3",
        ]
        del wrong.x
        assert violations({"x": Batch}, {"x": wrong})[0] == (
            "x.x: expected this attribute, got an instance of Batch without it"
        )

    def test_a_dataclass_that_optree_was_taught(self) -> None:
        meta = MetaTensorType(["n"])
        contract = contract_of(x=[Point(meta, 3)])  # type: ignore[arg-type]
        point = [Point(torch.ones(4), 3)]
        path = next(path for path, leaf in _leaves({"x": point}) if isinstance(leaf, torch.Tensor))
        assert contract.check({"x": point}).leaves == {path: meta}
        described = contract_of(x=list[Point]).check({"x": point})
        assert described.leaves == {path: MetaTensorType()}

    def test_named_tuples_of_any_class(self) -> None:
        contract = {"x": parse("namedtuple(weight: f32[n], step: int)"), "y": State}
        good = State(torch.ones(3), 1)
        found = contract_of(**contract).check({"x": good, "y": good})
        assert found.leaves == {("x", 0): MetaTensorType(["n"], dtype=torch.float32)}
        assert violations(contract, {"x": State(torch.ones(3, 3), 1.0), "y": (1, 2)}) == [
            "x.weight.shape: expected [n], got [3, 3]",
            "x.step: expected int, got 1.0 (float)",
            "y: expected a State, got (1, 2) (tuple)",
        ]
        assert violations(contract, {"x": (good.weight, 1), "y": good})[0].startswith(
            "x: expected a named tuple of weight, step, got ("
        )

    def test_tensors_of_a_derived_class(self) -> None:
        described = Annotated[torch.nn.Parameter, MetaTensorType(["n"])]
        parameter = torch.nn.Parameter(torch.ones(2))
        assert contract_of(x=described).check({"x": parameter}).sizes == {"n": 2}
        lines = violations({"x": described}, {"x": torch.ones(2)})
        assert lines == ["x: expected Parameter, got f32[2] cpu"]
        lines = violations({"x": described}, {"x": torch.nn.Parameter(torch.ones(2, 2))})
        assert lines == ["x.shape: expected [n], got [2, 2]"]

    def test_futures_and_interfaces(self) -> None:
        future: Any = torch.futures.Future()
        future.set_result([1, "a"])
        contract = {"x": [torch.futures.Future[list[int]]], "y": Encoder}
        assert violations(contract, {"x": [future], "y": 3}) == [
            "x[0].value()[1]: expected int, got 'a' (str)",
            "y.encode: expected a method encode(self, x: 'torch.Tensor', depth: 'int') "
            "-> 'torch.Tensor', got none in int",
        ]
        future = torch.futures.Future()
        assert contract_of(**contract).check({"x": [future], "y": Deep()}) == Bindings({}, {})

    @pytest.mark.parametrize("kind", [int, float, bool, str])
    def test_members_of_an_enum_and_bools_are_no_numbers(self, kind: type) -> None:
        fits = {int: 3, float: 3.0, bool: True, str: "s"}
        for value in (3, 3.0, True, "s", Level.LOW, Mode.SUM, None):
            contract = {"x": kind}
            if type(value) is kind:
                contract_of(**contract).check({"x": value})
            else:
                (line,) = violations(contract, {"x": value})
                assert line.startswith(f"x: expected {kind.__name__}, got ")
        assert contract_of(x=parse(kind.__name__)).check({"x": fits[kind]}) == Bindings({}, {})


def _leaves(value: Any) -> list[tuple[Any, Any]]:
    paths, leaves, _ = optree.tree_flatten_with_path(value, none_is_leaf=True, namespace="tsfunc")
    return list(zip(paths, leaves, strict=True))


def test_the_message_is_one_text() -> None:
    with pytest.raises(DescriptorViolation, match=re.escape("x[0].shape[0]: expected 2, got 3")):
        contract_of(x=[MetaTensorType([2])]).check({"x": [torch.ones(3)]})


def test_a_name_that_no_dim_is_alone_is_solved_for() -> None:
    contract = contract_of(x=MetaTensorType(["2*n+1", "a*b"]), y=MetaTensorType(["a", "b+m-n"]))
    found = contract.check({"x": torch.ones(7, 6), "y": torch.ones(2, 5)})
    assert dict(found.sizes) == {"a": 2, "n": 3, "b": 3, "m": 5}


@pytest.mark.parametrize(
    ("descriptors", "shapes", "lines"),
    [
        (
            {"x": MetaTensorType(["2*n"])},
            {"x": [5]},
            ["x.shape[0]: expected 2 * n, got 5: no size n gives it"],
        ),
        (
            {"x": MetaTensorType(["n+3"])},
            {"x": [2]},
            ["x.shape[0]: expected n + 3, got 2: no size n gives it"],
        ),
        (
            {"x": MetaTensorType(["2*n"]), "y": MetaTensorType(["n+1"])},
            {"x": [4], "y": [4]},
            ["y.shape[0]: expected n + 1 = 3 (n is 2 at x.shape[0] = 2 * n), got 4"],
        ),
        (
            {"x": MetaTensorType(["a*b"]), "y": MetaTensorType(["a"])},
            {"x": [4], "y": [0]},
            ["x.shape[0]: expected a * b, got 4: no size b gives it"],
        ),
        (
            {"x": MetaTensorType(["a*b"]), "y": MetaTensorType(["a"])},
            {"x": [0], "y": [0]},
            [
                "x.shape[0]: expected a * b, got 0: a * b is 0 for every b (a is 0 at y.shape[0]), "
                "so b can't be determined"
            ],
        ),
    ],
)
def test_expressions_that_solve_for_no_size(
    descriptors: dict[str, Any], shapes: dict[str, Any], lines: list[str]
) -> None:
    arguments = {name: torch.ones(shape) for name, shape in shapes.items()}
    assert violations(descriptors, arguments) == lines


@pytest.mark.parametrize(
    ("meta", "good", "bad", "line"),
    [
        (
            MetaTensorType([..., 3]), [torch.ones(3), torch.ones(2, 5, 3)], torch.ones(3, 2),
            "x.shape[1]: expected 3, got 2",
        ),
        (
            MetaTensorType(["...", "n", "n"]), [torch.ones(2, 2), torch.ones(7, 4, 4)],
            torch.ones(3), "x.shape: expected [..., n, n], got [3]",
        ),
        (
            MetaTensorType([..., "n", "n"]), [], torch.ones(5, 2, 3),
            "x.shape[2]: expected 2 (n is 2 at x.shape[1]), got 3",
        ),
        (
            MetaTensorType([Dim("n", multiple_of=4)]), [torch.ones(8), torch.ones(0)],
            torch.ones(6), "x.shape[0]: expected n % 4 == 0, got 6",
        ),
        (
            MetaTensorType([Dim("n", one_of=[2, 4])]), [torch.ones(2), torch.ones(4)],
            torch.ones(3), "x.shape[0]: expected n in {2, 4}, got 3",
        ),
        (
            MetaTensorType(["n", 3], strides=[1, "n"]), [torch.ones(3, 5).t()], torch.ones(5, 3),
            "x.stride()[0]: expected 1, got 3",
        ),
        (
            MetaTensorType(strides=[2, None]), [torch.ones(3, 2)], torch.ones(4),
            "x.stride(): expected [2, ?], got [1]",
        ),
        (
            MetaTensorType(memory_format=torch.channels_last),
            [torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)],
            torch.ones(2, 3, 4, 5),
            "x: expected torch.channels_last, got strides [60, 20, 5, 1]",
        ),
        (
            MetaTensorType(memory_format=torch.contiguous_format), [torch.ones(2, 3)],
            torch.ones(3, 3).to_sparse(),
            "x.layout: expected torch.contiguous_format, got torch.sparse_coo",
        ),
    ],
)  # fmt: skip
def test_shapes_and_layouts(
    meta: MetaTensorType, good: list[torch.Tensor], bad: torch.Tensor, line: str
) -> None:
    for x in good:
        contract_of(x=meta).check({"x": x})
    assert line in violations({"x": meta}, {"x": bad})
