"""The registry of function rules: one declaration for each rule, in the order of the stages."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import tsfunc
from tsfunc import explain, vmap
from tsfunc.bridge.tracers.function_registry import (
    FunctionRegistry,
    FunctionRules,
    Stage,
    registry,
)
from tsfunc.errors import DispatchError

X = torch.linspace(-1, 1, 24).reshape(4, 6)


def declared(stage: Stage, rule: Any, *functions: Any) -> FunctionRules:
    rules = FunctionRules()
    rules.add(stage, rule, *functions)
    return rules


def test_a_second_rule_of_a_stage_is_refused() -> None:
    own = FunctionRegistry()
    own.load([declared(Stage.METHOD, len, torch.sin), declared(Stage.WRITE, len, torch.sin)])
    with pytest.raises(DispatchError, match=r"sin.*METHOD already, len.*second one is abs"):
        own.load([declared(Stage.METHOD, abs, torch.sin)])
    with pytest.raises(DispatchError, match="WRITE already"):
        declared(Stage.WRITE, abs, torch.cos, torch.cos)
    assert own.tables[Stage.METHOD] == {torch.sin: len}


def test_rules_are_listed_in_the_order_in_which_a_call_meets_them() -> None:
    stages = [rule.stage for name, rule in registry.rules_of("aten::index.Tensor")]
    assert stages == [Stage.SELECTION, Stage.BATCHING, Stage.METHOD]
    assert registry.rules_of("aten::no_such_operator") == []
    assert registry.rules_of("quantized::add") == []


def test_a_removed_rule_is_in_no_table() -> None:
    own = FunctionRegistry()
    own.load([declared(Stage.METHOD, len, torch.sin, torch.cos)])
    own.remove(Stage.METHOD, [torch.sin, torch.tan])
    assert own.tables[Stage.METHOD] == {torch.cos: len}
    assert own.find(Stage.METHOD, torch.sin) is None


def test_each_rule_with_python_code_has_a_source() -> None:
    without = [
        rule
        for table in registry.tables
        for function in registry.tables[table]
        if (rule := registry.find(table, function)) is not None and not rule.source
    ]
    # Overloads of torch that serve compressed tensors.
    assert {rule.function.__name__ for rule in without} <= {
        "to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc",
    }  # fmt: skip


def test_explain_names_the_function_rule_and_its_operators() -> None:
    starts = torch.tensor([0, 3, 1, 2])
    report = explain(vmap(lambda x, i: x.narrow(0, i, 2)), X, starts)
    (use,) = [use for use in report.uses if use.how == "function rule"]
    assert (use.operator, use.rule, use.times) == ("torch.Tensor.narrow", "_narrow", 1)
    assert "composites.py:" in use.source
    assert any(other.within == "torch.Tensor.narrow" for other in report.uses)
    torch.testing.assert_close(
        vmap(lambda x, i: x.narrow(0, i, 2))(X, starts),
        torch.stack([x[i : i + 2] for x, i in zip(X, starts.tolist(), strict=True)]),
    )


def test_explain_does_not_name_a_rule_that_leaves_the_call_to_torch() -> None:
    report = explain(vmap(lambda x: x.narrow(0, 1, 2)), X)
    assert [use.how for use in report.uses] == ["rule"]


def test_a_kernel_of_the_user_removes_the_rules_of_its_operators_functions() -> None:
    code = """
import torch
from tsfunc import vmap, dispatch
from tsfunc.bridge.tracers.function_registry import Stage, registry
x = torch.arange(6.0).reshape(2, 3)
assert vmap(lambda x: x[1])(x).equal(x[:, 1])
seen = []
@dispatch.register("aten::select.int", dispatch.DispatchKey.Batch)
def select(x, dim, index):
    seen.append(index)
    return dispatch.redispatch(torch.ops.aten.select.int, x.value, dim + 1, index)
assert registry.find(Stage.BATCHING, torch.Tensor.__getitem__) is None
vmap(lambda x: (x[1], x.sin())[1])(x)
assert seen == [1], seen
assert registry.find(Stage.BATCHING, torch.sin) is not None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_ops_command_prints_the_function_rules(capsys: pytest.CaptureFixture[str]) -> None:
    from tsfunc.cli import _one_operator

    _one_operator("aten::narrow")
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("torch.narrow"))
    assert "function rule _narrow (METHOD)" in line and "composites.py:" in line
    assert tsfunc.ops.lookup("aten::narrow").rule is not None


def test_gradient_with_coordinate_tensors_returns_a_tuple() -> None:
    points = (torch.arange(3.0).square(), torch.arange(4.0))
    x = torch.arange(24.0).view(2, 3, 4).sin()

    def slopes(x: torch.Tensor) -> Any:
        result = torch.gradient(x, spacing=points)
        assert type(result) is tuple
        return result

    want = tuple(torch.stack(parts) for parts in zip(*map(slopes, x), strict=True))
    cotangents = tuple(torch.ones_like(part[0]) for part in want)

    def pulled(x: torch.Tensor) -> Any:
        out, pull = tsfunc.vjp(slopes, x)
        return out, pull(cotangents)[0]

    batched, grads = vmap(pulled)(x)
    torch.testing.assert_close(batched, want)
    torch.testing.assert_close(grads, torch.stack([pulled(example)[1] for example in x]))
