"""``explain`` predicts the steps of a call, and the call takes them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.dispatch.helpers import Plain, Value, line_of, unique
from tsfunc import dispatch, vmap
from tsfunc.dispatch import DispatchKey, DispatchKeySet, Explanation, Level, Operator, Step
from tsfunc.errors import DispatchError

EMPTY = DispatchKey.define(unique("ExplainEmpty"), above=DispatchKey.BackendSelect)
PASSED = DispatchKey.define(unique("ExplainPassed"), above=EMPTY)
SERVED = DispatchKey.define(unique("ExplainServed"), above=PASSED)
KEYS = (EMPTY, PASSED, SERVED)

log: list[str] = []


def logging(name: str, kind: str) -> Callable[..., None]:
    """Return a kernel that notes its name as in ``explain``, and calls the operator again."""

    def kernel(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        log.append(f"{name} ({kind})")
        dispatch.redispatch(op, *args, **kwargs)

    kernel.__qualname__ = name
    return kernel


def unboxed(op: Operator, name: str, kind: str) -> Callable[..., None]:
    boxed = logging(name, kind)

    def kernel(*args: Any, **kwargs: Any) -> None:
        boxed(op, args, kwargs)

    kernel.__qualname__ = name
    return kernel


dispatch.register_fallback(PASSED, dispatch.fallthrough)
dispatch.register_fallback(SERVED, logging("served", "column"))


def kernels_of(explanation: Explanation) -> list[str]:
    """Return the kernels that run, without fallthroughs and missing ones."""
    return [
        step.kernel for step in explanation.steps
        if not step.kernel.startswith(("fallthrough", "no kernel"))
    ]  # fmt: skip


cells = st.dictionaries(st.sampled_from(KEYS), st.booleans())
levels = st.lists(st.tuples(st.sampled_from(KEYS), st.booleans()), max_size=3)
sets = st.sets(st.sampled_from(KEYS))


@given(cells, st.sampled_from([None, True, False]), levels, sets, sets, sets)
def test_the_explained_rule_is_the_one_that_runs(
    filled: dict[DispatchKey, bool],
    row: bool | None,
    nest: list[tuple[DispatchKey, bool]],
    included: set[DispatchKey],
    outside: set[DispatchKey],
    excluded: set[DispatchKey],
) -> None:
    op = Operator(unique("explain::op"), native=lambda *args: log.append("_run_native (column)"))
    for key, passes in filled.items():
        kernel = dispatch.fallthrough if passes else unboxed(op, key.name, "cell")
        dispatch.register(op, key, kernel)
    if row is not None:
        dispatch.register_catch_all(op, unboxed(op, "row", "row") if row else dispatch.fallthrough)

    def call(values: list[Value]) -> None:
        with dispatch.include(*included), dispatch.exclude(*excluded):
            explanation = dispatch.explain(op, Plain(), *values)
            log.clear()
            try:
                op(Plain(), *values)
            except DispatchError as error:
                # The last step has no kernel, or redispatching has ended.
                missing = any("no kernel" in step.kernel for step in explanation.steps[-1:])
                assert ("no kernel for" if missing else "no key is left") in str(error)
            assert kernels_of(explanation) == log

    def enter(rest: list[tuple[DispatchKey, bool]], values: list[Value]) -> None:
        if not rest:
            return call(values)
        (key, modal), *rest = rest
        with Level(key, modal=modal) as level:
            enter(rest, [*values, Value(level)])

    with dispatch.include(*outside):
        enter(nest, [])


def test_the_explanation_is_returned_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    op = Operator(unique("explain::print"), native=lambda *args, **kwargs: None)
    here = test_the_explanation_is_returned_and_printed
    dispatch.register(op, SERVED, unboxed(op, "mine", "cell"))  # cell
    with dispatch.include(PASSED, EMPTY), dispatch.exclude(EMPTY), Level(SERVED) as level:
        value = Value(level)
        found = dispatch.explain(op, [Plain(), value], other={"a": value})
    site = f"registered at {line_of('cell', here)}".replace("\\", "")
    assert found.operator == op.name
    assert found.keys == DispatchKeySet.at(1, SERVED) | DispatchKeySet(
        PASSED, DispatchKey.BackendSelect, DispatchKey.CPU
    )
    assert found.masked == DispatchKeySet(EMPTY)
    assert found.steps[0] == Step(
        1, SERVED.name, ("args[0][1]", "kwargs['other']['a']"), "mine (cell)", site
    )
    assert str(found).splitlines()[:7] == [
        f"{op.name}: DispatchKeySet({SERVED.name}@1, {PASSED.name}@0, BackendSelect@0, CPU@0)",
        f"  excluded: DispatchKeySet({EMPTY.name}@0)",
        f"  {SERVED.name}@1  from args[0][1], kwargs['other']['a']",
        f"      -> mine (cell)  {site}",
        f"  {PASSED.name}@0  from the include set captured by {SERVED.name}",
        f"      -> fallthrough (column)  {found.steps[1].registered}",
        "  BackendSelect@0  from the global set",
    ]
    assert capsys.readouterr().out == f"{found}\n"


def test_nothing_is_run() -> None:
    op = Operator(unique("explain::dry"), native=lambda value: log.append("ran"))
    log.clear()
    dispatch.explain(op, Plain())
    assert log == []


def test_a_missing_kernel_ends_the_explanation() -> None:
    op = Operator(unique("explain::missing"))
    with dispatch.include(SERVED, EMPTY):
        *_, last = dispatch.explain(op, Plain()).steps
    assert (last.key, last.kernel) == (EMPTY.name, "no kernel: an error if reached")


def test_the_same_bit_can_have_several_sources() -> None:
    op = Operator(unique("explain::sources"), native=lambda *args: None)
    with dispatch.include(DispatchKey.CPU, DispatchKey.BackendSelect):
        select, cpu = dispatch.explain(op, Plain(), Plain()).steps
    assert select.sources == ("the include set", "the global set")
    assert cpu.sources == ("args[0]", "args[1]", "the include set")


def test_a_level_that_has_ended_or_is_not_here() -> None:
    op = Operator(unique("explain::gone"))
    with Level(SERVED, "the transform") as level:
        pass
    (step,) = dispatch.explain(op, Value(level)).steps
    assert step.kernel == "served (column), but the transform has ended: an error if reached"
    with dispatch.include(DispatchKeySet.at(3, SERVED)):
        (step,) = dispatch.explain(op, Plain()).steps
    assert step.kernel == ("served (column), but the level is not active here: an error if reached")


# torch's operators


def explained(*call: Any) -> list[Explanation]:
    """Return the explanations of a call on the examples of a batch."""
    found: list[Explanation] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(dispatch.explain(call[0], *(x if arg is ... else arg for arg in call[1:])))
        return x

    vmap(function)(torch.ones(3, 2))
    return found


def test_an_operator_of_torchs_on_a_batched_tensor() -> None:
    (found,) = explained(torch.ops.aten.sin.default, ...)
    assert found.operator == "aten::sin"
    batch, select = found.steps
    assert (batch.key, batch.level, batch.sources) == ("Batch", 1, ("args[0]",))
    assert batch.kernel == "batch_kernel (column)"
    assert "batching.py:" in batch.registered
    assert select.kernel == "fallthrough (column)"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ((torch.sin, ...), "aten::sin"),
        ((torch.add, ..., 2), "aten::add.Tensor"),
        ((torch.ops.aten.sum, ...), "aten::sum"),
        ((torch.ops.aten.sum, ..., [0]), "aten::sum.dim_IntList"),
        (("aten::add.Scalar", ..., 2), "aten::add.Scalar"),
        ((torch.pow, 2, ...), "aten::pow.Scalar"),
    ],
)
def test_of_several_overloads_the_one_that_takes_the_arguments(
    call: tuple[Any, ...], name: str
) -> None:
    (found,) = explained(*call)
    assert found.operator == name


def test_overloads_none_of_which_takes_the_arguments() -> None:
    for call in (torch.add, "a", 1), (torch.ops.aten.add, [1], 2):
        with pytest.raises(
            DispatchError,
            match=r"stands for \d operators, and it\(.*, int\) does not say which: aten::add",
        ):
            dispatch.explain(*call)


def test_redispatch_takes_a_packet_of_overloads() -> None:
    assert dispatch.redispatch(torch.add, torch.ones(2), 2).tolist() == [3.0, 3.0]


# In another process: a registered kernel can't be removed.
A_KERNEL_OF_ONES_OWN = """
import torch
from tsfunc import dispatch, vmap

x = torch.tensor([[-0.5, 2.0]])
torch.testing.assert_close(vmap(torch.special.erfcx)(x), torch.special.erfcx(x))

@dispatch.register(torch.special.erfcx, dispatch.DispatchKey.Batch)
def mine(value):
    return value

vmap(lambda row: dispatch.explain(torch.special.erfcx, row) and row)(x)
torch.testing.assert_close(vmap(torch.special.erfcx)(x), x)
torch.testing.assert_close(vmap(torch.sin)(x), torch.sin(x))
"""


def test_a_kernel_of_ones_own_comes_before_the_rule_that_is_found_faster() -> None:
    """``torch.erfcx`` has a rule that the handler finds without the table."""
    command = [sys.executable, "-c", A_KERNEL_OF_ONES_OWN]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "mine (cell)" in run.stdout


def test_an_excluded_batch_key_holds_for_the_rules_that_are_found_faster() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with dispatch.exclude(DispatchKey.Batch):
            return torch.sin(x)

    with pytest.raises(DispatchError, match=r"aten::sin\(BatchTracer\).*have .*Batch@1.*excluded"):
        vmap(function)(torch.ones(3))
