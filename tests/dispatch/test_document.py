"""The dispatcher agrees with the document that it follows ("Let's talk about the PyTorch
dispatcher"): each test quotes a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.dispatch.helpers import Plain, unique
from tsfunc import dispatch
from tsfunc.dispatch import DispatchKey, DispatchKeySet, Operator, fallthrough
from tsfunc.dispatch.keys import BACKENDS
from tsfunc.errors import DispatchError

LOW = DispatchKey.define(unique("DocumentLow"), above=DispatchKey.BackendSelect)
MIDDLE = DispatchKey.define(unique("DocumentMiddle"), above=LOW)
HIGH = DispatchKey.define(unique("DocumentHigh"), above=MIDDLE)
FEATURES = (LOW, MIDDLE, HIGH)

CPU, SELECT = DispatchKey.CPU, DispatchKey.BackendSelect


def operator(native: Callable[..., Any] | None = None) -> Operator:
    return Operator(unique("document::op"), native=native)


def redispatching(op: Operator, name: str, log: list[str]) -> Callable[..., Any]:
    """Return a kernel that logs a name and redispatches."""

    def kernel(*args: Any) -> Any:
        log.append(name)
        return dispatch.redispatch(op, *args)

    return kernel


class TestKernelsCallOtherOperators:
    """The handler of a feature masks the feature; calls inside of it go on to the backend."""

    @pytest.mark.parametrize("outer", ["native", "cell", "row"])
    @pytest.mark.parametrize("inner", ["native", "cell", "row"])
    def test_a_backend_kernel_calls_another_operator(self, outer: str, inner: str) -> None:
        def made(where: str, kernel: Callable[..., Any]) -> Operator:
            op = operator(kernel if where == "native" else None)
            if where == "cell":
                dispatch.register(op, CPU, kernel)
            elif where == "row":
                dispatch.register_catch_all(op, kernel)
            return op

        increment = made(inner, lambda x: x + 1)
        double = made(outer, lambda x: 2 * increment(x))
        quadruple = made(outer, lambda x: double(double(x)))
        assert quadruple(torch.ones(2)).tolist() == [10.0, 10.0]

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_backend_kernel_calls_operators_of_every_backend(self, backend: DispatchKey) -> None:
        class Elsewhere:
            dispatch_keys = DispatchKeySet(backend)

        name = operator()
        for key in BACKENDS:
            dispatch.register(name, key, lambda *args, key=key: key.name)

        class Value:
            def __init__(self, key: DispatchKey) -> None:
                self.dispatch_keys = DispatchKeySet(key)

        every = operator(lambda x: [name(Value(key)) for key in BACKENDS])
        assert every(Elsewhere()) == [key.name for key in BACKENDS]

    def test_a_backend_kernel_calls_itself_on_other_values(self) -> None:
        total = operator()
        dispatch.register(total, CPU, lambda x: x[0] + total(x[1:]) if len(x) else x.sum())
        assert total(torch.arange(5.0)).item() == 10.0

    def test_a_backend_kernel_calls_factories(self) -> None:
        ones, fill = operator(lambda n: torch.ones(n)), operator(lambda x: x + ones(3))
        dispatch.register(ones, SELECT, lambda n: dispatch.redispatch(ones, DispatchKeySet(CPU), n))
        twice = operator(lambda n: fill(ones(n)) + fill(ones(n)))
        dispatch.register(
            twice, SELECT, lambda n: dispatch.redispatch(twice, DispatchKeySet(CPU), n)
        )
        assert fill(torch.zeros(3)).tolist() == [1.0] * 3
        # A factory's own kernel calls factories, too.
        assert twice(3).tolist() == [4.0] * 3

    def test_all_other_dispatches_bypass_the_feature(self) -> None:
        log: list[str] = []
        inner = operator(lambda x: log.append("inner backend"))
        outer = operator()

        @dispatch.register(outer, CPU)
        def backend(x: Any) -> None:
            log.append("outer backend")
            inner(x)

        for op, name in ((inner, "inner"), (outer, "outer")):
            dispatch.register(op, HIGH, redispatching(op, f"{name} feature", log))
        with dispatch.include(HIGH):
            outer(Plain())
            assert log == ["outer feature", "outer backend", "inner backend"]
            # "... so subsequent operator calls once again trigger autograd handlers."
            log.clear()
            inner(Plain())
            assert log == ["inner feature", "inner backend"]

    def test_a_feature_kernel_calls_another_operator(self) -> None:
        log: list[str] = []
        inner = operator(lambda x: log.append("inner backend"))
        dispatch.register(inner, HIGH, lambda x: log.append("not reached"))
        dispatch.register(inner, LOW, redispatching(inner, "inner low", log))
        outer = operator()
        dispatch.register(outer, HIGH, lambda x: inner(x))
        with dispatch.include(HIGH, LOW):
            outer(Plain())
        assert log == ["inner low", "inner backend"]

    def test_keys_excluded_by_the_user_stay_excluded_in_kernels(self) -> None:
        inner = operator(lambda x: "inner")
        outer = operator()
        dispatch.register(outer, HIGH, lambda x: inner(x))
        left = pytest.raises(DispatchError, match="no key is left")
        with dispatch.include(HIGH), dispatch.exclude(CPU), left:
            outer(Plain())

    def test_redispatching_in_a_backend_kernel_is_an_error(self) -> None:
        op = operator()
        dispatch.register(op, CPU, lambda x: dispatch.redispatch(op, x))
        message = rf"{op.name}\(Plain\): no key is left to dispatch to: redispatch was called in"
        with pytest.raises(DispatchError, match=message):
            op(Plain())
        refused = pytest.raises(DispatchError, match=message)
        with dispatch.include(LOW), dispatch.exclude(LOW), refused:
            op(Plain())


class TestPrecedence:
    """Exact registrations come first, and catch-all kernels come before fallbacks."""

    def test_an_exact_backend_kernel_comes_before_the_catch_all(self) -> None:
        op = operator()
        dispatch.register_catch_all(op, lambda x: "row")
        assert op(torch.ones(1)) == "row"
        dispatch.register(op, CPU, lambda x: "cell")
        assert op(torch.ones(1)) == "cell"
        assert op(torch.ones(1, device="meta")) == "row"

    @given(
        st.dictionaries(st.sampled_from([*FEATURES, SELECT, CPU]), st.booleans()),
        st.sampled_from([None, True, False]),
        st.booleans(),
        st.sets(st.sampled_from(FEATURES)),
    )
    def test_any_table(
        self,
        cells: Mapping[DispatchKey, bool],
        row: bool | None,
        native: bool,
        included: set[DispatchKey],
    ) -> None:
        """The test writes out the document's rule, and compares it with the call."""
        log: list[str] = []
        op = operator((lambda x: log.append("native")) if native else None)
        for key, passes in cells.items():
            dispatch.register(op, key, fallthrough if passes else redispatching(op, key.name, log))
        if row is not None:
            dispatch.register_catch_all(op, fallthrough if row else redispatching(op, "row", log))
        expected: list[str] = []
        ended = "no key is left"
        for key in sorted({*included, SELECT, CPU}, key=lambda key: -key.priority):
            if key in cells:
                ran = None if cells[key] else key.name
            elif key is SELECT:
                ran = None
            elif row is not None:
                ran = None if row else "row"
            elif key is CPU and native:
                ran = ended = "native"
            else:
                ended = "no backend kernel" if key is CPU else "no kernel"
                break
            if ran is not None:
                expected.append(ran)
        with dispatch.include(*included):
            try:
                op(Plain())
            except DispatchError as error:
                assert ended in str(error)
            else:
                assert ended == "native"
        if cells.get(CPU) and ended == "no key is left" and row is False:
            expected.append("row")  # serves a call without a remaining key
        assert log == expected


class TestBackendSelect:
    """It is in the global set and registered for a few operators; it falls through for the rest."""

    @pytest.mark.parametrize("row", [False, True])
    def test_it_falls_through_where_nothing_is_registered(self, row: bool) -> None:
        op = operator(lambda x: "native")
        if row:
            dispatch.register_catch_all(op, lambda x: "row")
        steps = dispatch.explain(op, Plain()).steps
        assert (SELECT.name, "fallthrough (column)") in [(s.key, s.kernel) for s in steps]
        assert op(Plain()) == ("row" if row else "native")

    def test_a_catch_all_serves_calls_that_have_no_key(self) -> None:
        make = operator()
        dispatch.register_catch_all(make, lambda n: torch.ones(n))
        assert make(2).tolist() == [1.0, 1.0]
        again = operator()
        dispatch.register_catch_all(again, lambda n: dispatch.redispatch(again, n))
        with pytest.raises(DispatchError, match="no key is left"):
            again(2)
        passed = operator()
        dispatch.register_catch_all(passed, fallthrough)
        with pytest.raises(DispatchError, match="no key is left"):
            passed(2)

    def test_it_dispatches_directly_and_bypasses_the_calculation(self) -> None:
        op = operator(lambda *args: "native")
        dispatch.register(op, DispatchKey.Meta, lambda *args: "meta")
        dispatch.register(
            op, SELECT, lambda x: dispatch.redispatch(op, DispatchKeySet(DispatchKey.Meta), x)
        )
        assert op(torch.ones(1)) == "meta"  # its arguments do not matter


def test_dispatch_considers_all_arguments() -> None:
    op = operator()
    dispatch.register(op, CPU, lambda *args: "cpu")
    dispatch.register(op, DispatchKey.Meta, lambda *args: "meta")
    plain, meta = torch.ones(1), torch.ones(1, device="meta")
    assert op(meta) == "meta"
    calls: Sequence[Sequence[Any]] = ([plain, meta], [meta, plain], [3, [meta, {"a": plain}]])
    assert [op(*call) for call in calls] == ["cpu"] * 3
