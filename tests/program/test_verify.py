"""Verification refuses a broken graph, for each kind of mistake that a pass could make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor

from tsfunc import MetaTensorType as Meta
from tsfunc import cond, specialize
from tsfunc.errors import MalformedProgramError
from tsfunc.program import Program
from tsfunc.program.passes import simplify
from tsfunc.program.passes import simplify as passes


def traced() -> Program:
    """A program with a size, a list of tensors and a chain of operators."""

    def f(x: Tensor) -> Tensor:
        return torch.cat([x.sin(), x.cos()]).sum(1) / x.shape[0]

    g = specialize(f, {"x": Meta(["n", 3])})
    g(torch.ones(4, 3))
    program: Program = g.program
    program.verify()
    return program


def node(program: Program, start: str) -> torch.fx.Node:
    return next(n for n in program.graph.nodes if n.name.startswith(start))


def drop_the_output(program: Program) -> None:
    program.graph.erase_node(node(program, "output"))


def move_after_its_use(program: Program) -> None:
    node(program, "cat").append(node(program, "sin"))


def go_on_after_the_output(program: Program) -> None:
    with program.graph.inserting_after(node(program, "output")):
        program.graph.call_function(torch.ops.aten.sin.default, (node(program, "x"),))


def name_it_as_another(program: Program) -> None:
    node(program, "sin").name = "cos_default"


def call_a_module(program: Program) -> None:
    with program.graph.inserting_before(node(program, "output")):
        program.graph.call_module("layer")


def read_what_is_not_there(program: Program) -> None:
    with program.graph.inserting_before(node(program, "output")):
        program.graph.get_attr("weight")


def give_a_list_for_a_tensor(program: Program) -> None:
    sine = node(program, "sin")
    sine.args = ([sine.args[0]],)


def give_a_tensor_for_a_list(program: Program) -> None:
    node(program, "cat").args = (node(program, "sin"),)


def give_a_tensor_for_a_number(program: Program) -> None:
    node(program, "sum").args = (node(program, "cat"), [node(program, "sin")])


def give_a_text_for_a_number(program: Program) -> None:
    node(program, "cat").args = (node(program, "cat").args[0], "last")


def leave_an_argument_out(program: Program) -> None:
    node(program, "div").args = (node(program, "sum"),)


def give_too_much(program: Program) -> None:
    sine = node(program, "sin")
    sine.args = (sine.args[0], 3)


def give_it_by_a_wrong_name(program: Program) -> None:
    node(program, "cat").kwargs = {"axis": 0}


def say_another_type(program: Program) -> None:
    sine = node(program, "sin")
    sine.meta["val"] = sine.meta["val"].to(torch.float64)


def say_another_shape(program: Program) -> None:
    total = node(program, "sum")
    total.meta["val"] = node(program, "sin").meta["val"]


def call_another_operator(program: Program) -> None:
    node(program, "sin").target = torch.ops.aten.cos.default


def sum_over_a_dim_that_is_not_there(program: Program) -> None:
    node(program, "sum").args = (node(program, "cat"), [5])


BREAKS: dict[Callable[[Program], None], str] = {
    drop_the_output: "expected an output node at its end, got none",
    move_after_its_use: "%cat_default .*uses %sin_default, which is not defined before it",
    go_on_after_the_output: "something after the output",
    name_it_as_another: "another value has the same name",
    call_a_module: "a program has no call_module nodes",
    read_what_is_not_there: "the program has no tensor weight",
    give_a_list_for_a_tensor: r"aten::sin: expected a Tensor for self, got \[x\]",
    give_a_tensor_for_a_list: r"aten::cat: expected a Tensor\[\] for tensors, got sin_default",
    give_a_tensor_for_a_number: "expected a .*int.* for dim",
    give_a_text_for_a_number: "aten::cat: expected a int for dim, got 'last'",
    leave_an_argument_out: "aten::div.Tensor: expected an argument other, got none",
    give_too_much: "aten::sin: expected at most 1 argument, got 2",
    give_it_by_a_wrong_name: "aten::cat: got an unknown argument 'axis'",
    say_another_type: "its dtype is torch.float32, not torch.float64",
    say_another_shape: r"its shape is \[2\*n\], not \[n, 3\]",
    call_another_operator: "its operator is aten::sin, but it calls aten.cos.default",
    sum_over_a_dim_that_is_not_there: "it can't be computed: IndexError",
}


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda f: f.__name__)
def test_a_broken_graph_is_refused(break_it: Callable[[Program], None]) -> None:
    program = traced()
    break_it(program)
    with pytest.raises(MalformedProgramError, match=BREAKS[break_it]):
        program.verify()


def test_the_number_of_inputs() -> None:
    program = traced()
    with program.graph.inserting_before(node(program, "sin")):
        program.graph.placeholder("more")
    with pytest.raises(
        MalformedProgramError, match="expected a graph of 1 input, as the program has, got 2"
    ):
        program.verify()


def test_the_number_of_results() -> None:
    program = traced()
    output = node(program, "output")
    output.args = (output.args[0] * 2,)  # type: ignore[operator]
    with pytest.raises(
        MalformedProgramError, match="expected a graph of 1 result, as the program has, got 2"
    ):
        program.verify()


def test_the_message_names_the_users_line() -> None:
    program = traced()
    give_too_much(program)
    with pytest.raises(MalformedProgramError, match=r"%sin_default \(at .*test_verify.py:\d+"):
        program.verify()


def test_bodies_of_control_flow() -> None:
    f = specialize(lambda x: cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), x))
    f(torch.ones(3))
    program = f.program
    program.verify()
    call = next(n for n in program.graph.nodes if hasattr(n.target, "bodies"))
    inner = [n for body in call.target.bodies for n in body.graph.nodes]
    sine = next(n for n in inner if n.name.startswith("sin"))
    sine.args = (sine.args[0], 1)
    with pytest.raises(MalformedProgramError, match="expected at most 1 argument,"):
        program.verify()


def test_a_pass_that_breaks_a_graph_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(graph: torch.fx.Graph) -> None:
        first = next(n for n in graph.nodes if n.op == "call_function")
        graph.output(first)

    monkeypatch.setattr(passes, "remove_dead", careless)
    with pytest.raises(MalformedProgramError, match=r"after careless: .*after the output"):
        specialize(lambda x: x.sin())(torch.ones(2))


@pytest.mark.parametrize("setting, asked", [("1", True), ("0", False), ("", False)])
def test_an_environment_variable_enables_it(
    setting: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSFUNC_VERIFY", setting)
    assert simplify.verification_is_on() is asked
    calls: list[Any] = []
    monkeypatch.setattr(simplify, "verify", lambda *args: calls.append(args))
    specialize(lambda x: x.sin())(torch.ones(2))
    assert bool(calls) is asked


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_composite_is_run_again_as_it_was_traced(reduction: str) -> None:
    """Verification decomposes it as the trace did: torch's own rule gives another shape."""

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x, target, reduction=reduction)

    f = specialize(loss, {"x": Meta(["n", "c"]), "target": Meta(["n"], dtype=torch.int64)})
    for n in (8, 1, 0):
        x, target = torch.randn(n, 3), torch.ones(n, dtype=torch.int64)
        torch.testing.assert_close(f(x, target), loss(x, target), equal_nan=True)
