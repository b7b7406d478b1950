"""The cache of a specialized function: its reports, its evictions, and its dynamic sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from tsfunc import MetaTensorType as Meta
from tsfunc import specialize, vmap
from tsfunc.errors import DescriptorViolation, RetraceWarning


def counted(func: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """Return the function, and a list with an entry for each time that Python ran it."""
    calls: list[int] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return func(*args, **kwargs)

    return run, calls


def reasons(specialized: Any) -> list[str]:
    """Return the reason of each program, in order."""
    return [entry.reason for entry in reversed(specialized.cache_info().entries)]


class Model:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class TestInfo:
    def test_plain_case(self) -> None:
        f = specialize(lambda x, k: x * k, {"x": Meta(["n", 2])})
        for n, k in ((3, 1), (4, 1), (3, 2)):
            f(torch.ones(n, 2), k)
        info = f.cache_info()
        assert (info.hits, info.misses, info.programs, info.limit) == (1, 2, 2, 64)
        newest, oldest = info.entries
        assert (newest.reason, oldest.reason) == ("k: 2, was 1", "the first call")
        assert (newest.hits, oldest.hits) == (0, 1) and newest.seconds > 0
        assert oldest.descriptors["k"] == 1 and oldest.descriptors["x"].shape[1] == 2
        first_line = "2 of at most 64 programs; 1 call found a program, 2 had to be traced"
        assert str(info).splitlines()[0] == first_line
        assert "k: 2, was 1" in str(info)

    @pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo])
    @pytest.mark.parametrize("requires_grad", [False, True])
    def test_descriptors_describe_the_arguments(
        self, layout: torch.layout, requires_grad: bool
    ) -> None:
        class Scale:
            by = 3

        f = specialize(lambda x, k, scale: (x * k).to_dense() * scale.by)
        x = torch.eye(2, dtype=torch.float64)
        x = (x if layout is torch.strided else x.to_sparse()).requires_grad_(requires_grad)
        f(x, 2, Scale())
        assert f.program.descriptors == {"x": Meta.of(x), "k": 2, "scale": Scale}

    CALLS: Sequence[tuple[str, Any, Any]] = (
        ("x.shape[0]: 7, was 5", torch.ones(5), torch.ones(7)),
        ("x.dtype: float64, was float32", torch.ones(5), torch.ones(5, dtype=torch.float64)),
        ("x.requires_grad: True, was False", torch.ones(5), torch.ones(5, requires_grad=True)),
        ("x.stride(): (2,), was contiguous", torch.ones(5), torch.ones(10)[::2]),
        ("x: 2.5, was 2.0", 2.0, 2.5),
        ("x: 'b' (str), was 'a' (str)", "a", "b"),
        ("the structure of x: a list of 1, was absent; x: absent, was 1", 1, [1]),
        ("the structure of x: {'a': _, 'b': _}, was {'a': _}", {"a": 2}, {"a": 2, "b": 3}),
        ("type(x): Model, was absent; x: absent, was 1", 1, Model(1.0)),
    )

    @pytest.mark.parametrize("reason, before, now", CALLS, ids=[c[0] for c in CALLS])
    def test_the_reason_for_a_new_program(self, reason: str, before: Any, now: Any) -> None:
        f = specialize(lambda x, y: y)
        f(before, torch.ones(1))
        f(now, torch.ones(1))
        assert sorted(reasons(f)[1].split("; ")) == sorted(reason.split("; "))

    def test_settings_and_values_from_outside(self) -> None:
        scale = 2.0
        f = specialize(lambda x: x * scale)
        f(torch.ones(2))
        with torch.no_grad():
            f(torch.ones(2))
        scale = 3.0
        f(torch.ones(2))
        assert reasons(f)[1:] == [
            "grad mode: False, was True",
            "scale: 3.0, was 2.0",
        ]

    def test_the_same_arguments_by_name(self) -> None:
        f, x = specialize(lambda x, y: x + y), torch.ones(2)
        f(x, x)
        f(x, y=x)
        f(y=x, x=x)
        assert reasons(f)[1:] == [
            "the arguments: (_, y=_), was (_, _)",
            "the arguments: (y=_, x=_), was (_, y=_)",
        ]

    def test_the_nearest_call_is_compared(self) -> None:
        f = specialize(lambda x, y: x)
        f(torch.ones(2), 1)
        f(torch.ones(3).double(), 2)
        f(torch.ones(4), 1)
        assert reasons(f)[2] == "x.shape[0]: 4, was 2"

    def test_many_differences_are_not_all_listed(self) -> None:
        f = specialize(lambda *xs: xs[0])
        f(*range(9))
        f(*range(1, 10))
        assert (
            reasons(f)[1]
            == "xs[0]: 1, was 0; xs[1]: 2, was 1; xs[2]: 3, was 2; xs[3]: 4, was 3; and 5 more"
        )

    def test_clear(self) -> None:
        f = specialize(lambda x: x)
        f(torch.ones(2))
        f(torch.ones(2))
        f.cache_clear()
        assert f.cache_info() == (0, 0, 0, 64, ())
        f(torch.ones(2))
        assert reasons(f) == ["the first call"]


class TestLimit:
    def test_the_least_recently_used_goes(self) -> None:
        run, calls = counted(lambda x, k: x * k)
        f = specialize(run, max_specializations=2, auto_widen=False)
        x = torch.ones(2)
        for k in (1, 2, 1):
            f(x, k)
        with pytest.warns(RetraceWarning):
            f(x, 3)  # the program for 2 is evicted
        assert len(calls) == 3
        f(x, 1)
        assert len(calls) == 3
        f(x, 2)
        assert len(calls) == 4 and f.cache_info().programs == 2
        assert f.cache_info().hits == 2  # the calls of evicted programs are counted

    @pytest.mark.filterwarnings("ignore:specialize.* varies")
    @given(calls=st.lists(st.integers(0, 5), max_size=20), limit=st.integers(1, 4))
    def test_it_is_a_least_recently_used_cache(self, calls: list[int], limit: int) -> None:
        run, traced = counted(lambda x, k: x + k)
        f = specialize(run, max_specializations=limit, auto_widen=False)
        kept: list[int] = []
        misses = 0
        for k in calls:
            assert f(torch.zeros(1), k).item() == k
            misses += k not in kept
            kept = [k, *(other for other in kept if other != k)][:limit]
        assert len(traced) == misses == f.cache_info().misses
        assert f.cache_info().hits == len(calls) - misses

    def test_the_reason_says_that_a_program_was_dropped(self) -> None:
        f = specialize(lambda x: x + 1, max_specializations=1, auto_widen=False)
        for n in (2, 3, 2):
            f(torch.ones(n))
        (entry,) = f.cache_info().entries
        assert entry.reason == "its program was dropped, of more than max_specializations=1"

    @pytest.mark.parametrize("limit", [0, -1, 2.5, None, "3", True])
    def test_a_wrong_limit(self, limit: Any) -> None:
        with pytest.raises(
            ValueError, match="max_specializations: expected the number of programs"
        ):
            specialize(lambda x: x, max_specializations=limit)


def test_auto_widen_is_a_bool() -> None:
    with pytest.raises(TypeError, match="auto_widen: expected True or False, got 'no'"):
        specialize(torch.sin, auto_widen="no")  # type: ignore[call-overload]


class TestWidening:
    def test_plain_case(self) -> None:
        run, calls = counted(lambda x: x.sum(0) + x.shape[0])
        f = specialize(run)
        for n in range(2, 30):
            x = torch.randn(n, 3)
            torch.testing.assert_close(f(x), x.sum(0) + n)
        assert len(calls) == 3 and f.cache_info().programs == 3
        assert [str(dim) for dim in f.descriptors["args"][0].shape] == ["n>=2", "3"]

    def test_sizes_with_other_answers_have_a_program_of_their_own(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[0] > 9 else x * 3

        run, calls = counted(f)
        g = specialize(run)
        for n in (*range(2, 30), 6, 25, 2):
            x = torch.randn(n, 3)
            torch.testing.assert_close(g(x), f(x))
        assert g.cache_info().programs == 4
        assert len(calls) <= 10  # a trace that discovers it, and one that is bounded
        shapes = {str(p.descriptors["args"][0].shape[0]) for p in g.programs}
        assert {"2<=n<=9", "n>=10"} <= shapes

    def test_sizes_that_leave_the_same_remainder_have_one_program(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            return x.view(4, -1) if x.shape[0] % 4 == 0 else x

        g = specialize(f)
        for n in range(8, 80, 4):
            assert g(torch.ones(n)).shape == (4, n // 4)
        assert g.cache_info().programs == 3

    @pytest.mark.filterwarnings("ignore:specialize.* varies")
    def test_it_can_be_turned_off(self) -> None:
        f = specialize(lambda x: x + 1, auto_widen=False)
        for n in range(2, 9):
            f(torch.ones(n))
        assert f.cache_info().programs == 7

    def test_sizes_that_are_equal_in_every_call_are_one(self) -> None:
        f = specialize(lambda batch: batch["x"].sum(1) * batch["y"])
        for n in range(2, 9):
            f({"x": torch.ones(n, 3), "y": torch.ones(n)})
        assert f.cache_info().programs == 3
        with pytest.raises(RuntimeError):  # as in eager mode: they are not equal here
            f({"x": torch.ones(12, 3), "y": torch.ones(11)})

    def test_sizes_that_vary_separately_have_a_dim_each(self) -> None:
        def outer(x: Tensor, y: Tensor) -> Tensor:
            return (x[:, None] * y).sum(0) + x.shape[0] - y.shape[0]

        run, calls = counted(outer)
        f = specialize(run)
        for n, m in ((4, 6), (2, 3), (3, 5), (7, 7), (9, 2), (2, 8)):
            x, y = torch.randn(n), torch.randn(m)
            torch.testing.assert_close(f(x, y), outer(x, y))
        assert f.cache_info().programs == 3 and len(calls) == 3
        assert [str(x.shape[0]) for x in f.descriptors["args"]] == ["n>=2", "n2>=2"]

    def test_equal_sizes_among_those_that_vary_separately(self) -> None:
        """Sequences of tokens, masks and labels: two sizes in five places."""
        run, calls = counted(lambda x, y: (x["ids"] * x["mask"]).sum(1) * y + x["ids"].shape[1])
        f = specialize(run)
        for n, t in ((4, 6), (2, 3), (3, 5), (8, 8), (2, 20)):
            f({"ids": torch.ones(n, t), "mask": torch.ones(n, t)}, torch.ones(n))
        assert f.cache_info().programs == 3 and len(calls) == 3

    @pytest.mark.filterwarnings("ignore:specialize.* vary")
    def test_sizes_that_depend_on_each_other(self) -> None:
        def pairs(x: Tensor, y: Tensor) -> Tensor:
            return x.repeat(2) * y

        run, calls = counted(pairs)
        f = specialize(run)
        for n in range(2, 9):
            x, y = torch.randn(n), torch.randn(2 * n)
            torch.testing.assert_close(f(x, y), pairs(x, y))
        assert f.cache_info().programs == 7 and len(calls) <= 9  # two attempts

    @given(sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=4, max_size=9))
    @pytest.mark.filterwarnings("ignore:specialize.* var")
    def test_programs_of_two_sizes_stay_their_function(self, sizes: list[tuple[int, int]]) -> None:
        def f(x: Tensor, y: Tensor) -> Tensor:
            total = x.sum(0) * y.shape[0] + y.sum() * x.shape[1]
            return total * 2 if x.shape[0] > 3 else total + (x.shape[0] > y.shape[0])

        g = specialize(f)
        for n, m in sizes:
            x, y = torch.randn(n, m), torch.randn(m)
            torch.testing.assert_close(g(x, y), f(x, y))

    def test_one_size_after_the_other(self) -> None:
        f = specialize(lambda x: x * 2)
        for n in range(2, 9):
            f(torch.ones(n, 3))
        for m in range(4, 9):
            f(torch.ones(20, m))
        for n, m in ((30, 30), (31, 32)):
            x = torch.randn(n, m)
            torch.testing.assert_close(f(x), x * 2)
        assert f.cache_info().programs <= 10

    @pytest.mark.filterwarnings("ignore:specialize.* varies")
    def test_a_function_that_needs_the_number(self) -> None:
        def course(x: Tensor) -> Tensor:
            return x * int(x.shape[0])

        run, calls = counted(course)
        f = specialize(run)
        for n in range(2, 11):
            torch.testing.assert_close(f(torch.ones(n)), course(torch.ones(n)))
        assert f.cache_info().programs == 9 and len(calls) == 10  # one attempt

    def test_sizes_0_and_1_have_programs_of_their_own(self) -> None:
        f = specialize(lambda x: x.sum(0))
        for n in (2, 3, 4, 5, 1, 0, 6):
            torch.testing.assert_close(f(torch.ones(n, 2)), torch.full((2,), float(n)))
        assert f.cache_info().programs == 5

    def test_values_fixed_by_a_contract_stay_fixed(self) -> None:
        f = specialize(lambda x: x.sum(1), {"x": Meta([None, 3])})
        for n in range(2, 9):
            f(torch.ones(n, 3))
        assert f.cache_info().programs == 3
        with pytest.raises(DescriptorViolation):
            f(torch.ones(9, 4))

    def test_evicted_programs_are_remembered(self) -> None:
        run, calls = counted(lambda x: x + 1)
        f = specialize(run, max_specializations=1)
        for n in range(2, 20):
            f(torch.ones(n))
        assert len(calls) == 3

    @given(sizes=st.lists(st.integers(0, 12), min_size=4, max_size=12))
    def test_programs_stay_their_function(self, sizes: list[int]) -> None:
        def f(x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([x, x]).cumsum(0) + y.sum() * x.shape[0]

        g = specialize(f)
        for n in sizes:
            x, y = torch.randn(n, 2), torch.randn(n)
            torch.testing.assert_close(g(x, y), f(x, y))


class Pair(NamedTuple):
    a: Any
    b: Any


class TestStructures:
    """Arguments are taken out of their containers by generated code, or by the pytree library."""

    STRUCTURES: Sequence[tuple[str, Any, Any]] = (
        ("a list of another length", [1, 2], [1, 2, 3]),
        ("a tuple for a list", [1, 2], (1, 2)),
        ("another key", {"a": 1}, {"b": 1}),
        ("a key more", {"a": 1}, {"a": 1, "b": 2}),
        ("nested deeper", [[1], 2], [[[1]], 2]),
        ("a leaf for a container", [[1], 2], [1, 2]),
        ("an empty container", [], [[]]),
        ("None for a container", [None], [[]]),
        ("a named tuple for a tuple", (1, 2), Pair(1, 2)),
        ("another order", {1: 2, 3: 4}, {3: 2, 1: 4}),
    )

    @pytest.mark.parametrize("name, one, other", STRUCTURES, ids=[s[0] for s in STRUCTURES])
    def test_other_structures_are_other_calls(self, name: str, one: Any, other: Any) -> None:
        f = specialize(lambda x, y: (y, repr(x)))
        y = torch.ones(2)
        for _ in range(2):
            for value in (one, other):
                assert f(value, y)[1] == repr(value)
        assert f.cache_info()[:3] == (2, 2, 2)

    @pytest.mark.parametrize(
        "value", [[], (), {}, [1, (2, {"k": [3, None]})], Pair(1, [2]), {(1, 2): 3, "s": ()}]
    )
    def test_results_come_back_as_they_were_made(self, value: Any) -> None:
        f = specialize(lambda x: (value, [x * 2], {"x": x}))
        for _ in range(2):
            got = f(torch.ones(2))
            assert got[0] == value and type(got[0]) is type(value)
            assert got[1][0].tolist() == [2, 2] and list(got[2]) == ["x"]

    def test_positions_and_keywords(self) -> None:
        f = specialize(lambda x, *more, scale=1, **named: x * scale + sum(more) + named.get("z", 0))
        x = torch.ones(2)
        for _ in range(2):
            assert f(x).tolist() == [1, 1]
            assert f(x, 3, scale=2).tolist() == [5, 5]
            assert f(x, z=4).tolist() == [5, 5]
            assert f(scale=3, x=x).tolist() == [3, 3]
        assert f.cache_info().hits == 4

    def test_many_tensors(self) -> None:
        f = specialize(lambda tensors: tensors[3] + tensors[198])
        tensors = [torch.full((4,), float(i)) for i in range(200)]
        for _ in range(3):
            assert f(tensors).tolist() == [201.0] * 4
        f([*tensors[:50], torch.ones(4, dtype=torch.float64), *tensors[51:]])
        f([tensors[0]] * 200)  # one tensor in many places
        torch.nn.Parameter(tensors[0])
        f([torch.nn.Parameter(t, requires_grad=False) for t in tensors])
        assert f.cache_info().misses == 2


class TestThreads:
    def run(self, count: int, work: Callable[[int], None]) -> None:
        errors: list[BaseException] = []
        start = threading.Barrier(count)

        def body(i: int) -> None:
            try:
                start.wait()
                work(i)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def test_one_trace_for_all(self) -> None:
        run, calls = counted(lambda x: x.sin())
        f = specialize(run)
        x = torch.randn(3)
        self.run(8, lambda i: torch.testing.assert_close(f(x), x.sin()))
        assert len(calls) == 1 and f.cache_info()[:3] == (7, 1, 1)

    # Sizes and numbers vary together, and the order of calls differs from run to run.
    @pytest.mark.filterwarnings("ignore::tsfunc.errors.RetraceWarning")
    def test_calls_of_many_kinds(self) -> None:
        f = specialize(lambda x, k: (x * k).sum(), max_specializations=3)

        def work(i: int) -> None:
            for j in range(20):
                x = torch.ones(2 + (i + j) % 4)
                assert f(x, j % 3).item() == x.shape[0] * (j % 3)

        self.run(6, work)
        info = f.cache_info()
        assert info.hits + info.misses == 120 and info.programs <= 3

    def test_functions_that_call_each_other(self) -> None:
        inner = specialize(lambda x: x.sin())
        outer = specialize(lambda x: inner(x) * 2)
        again = specialize(lambda x: outer(x) + inner(x))

        def work(i: int) -> None:
            for n in (2, 3, 4):
                x = torch.randn(n, i + 2)
                torch.testing.assert_close(again(x), 3 * x.sin())
                torch.testing.assert_close(vmap(outer)(x), 2 * x.sin())
                torch.testing.assert_close(inner(x), x.sin())

        self.run(6, work)

    def test_programs_made_ahead(self) -> None:
        f = specialize(lambda x, k: x * k)

        def work(i: int) -> None:
            f.lower({"x": Meta(["n"], dtype=torch.float32), "k": i % 2})
            assert f(torch.ones(3), i % 2).tolist() == [float(i % 2)] * 3

        self.run(6, work)
        assert f.cache_info().misses == 0
