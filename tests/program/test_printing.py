"""Texts of a program: its Python, the user's lines, and the known properties of each value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tsfunc
from tsfunc import MetaTensorType as Meta
from tsfunc import cond, grad, specialize, vmap

WEIGHT = torch.randn(4, 2, requires_grad=True)


def layer(x: Tensor) -> Tensor:
    hidden = x @ WEIGHT
    return hidden.relu() / x.shape[0]


def printed(func: Any, *args: Any) -> list[str]:
    f = specialize(func, {"x": Meta(["n", 4])})
    f(*args)
    return [line.strip() for line in str(f.program).splitlines()]


def test_types_and_lines_are_printed_beside_values() -> None:
    lines = printed(layer, torch.ones(3, 4))
    assert lines[0] == "def layer(args):"
    assert "# WEIGHT: float32[4, 2] cpu requires_grad" in lines
    assert "x = args[0]  # float32[n, 4] cpu" in lines
    at = next(i for i, line in enumerate(lines) if line.endswith("hidden = x @ WEIGHT"))
    assert lines[at].startswith("# test_printing.py:")
    assert lines[at + 1].startswith("matmul_default = matmul(x, WEIGHT)  # float32[n, 2] cpu")


def test_the_lines_of_a_backward_pass_are_those_of_its_forward_pass() -> None:
    lines = printed(vmap(grad(lambda x: layer(x).sum())), torch.ones(3, 4))
    relu = [i for i, line in enumerate(lines) if "threshold_backward" in line and "=" in line]
    above = [line for line in lines[: relu[0]] if line.startswith("# ")]
    assert "hidden.relu()" in above[-1]


def test_the_source_has_no_comments_and_does_the_same() -> None:
    f = specialize(layer, {"x": Meta(["n", 4])})
    f(torch.ones(3, 4))
    printed = "".join(
        line.partition("  #")[0].rstrip() + "\n"
        for line in str(f.program).splitlines()
        if not line.strip().startswith("#")
    )
    assert printed == f.program.source


def test_sizes_are_named_as_the_user_names_them() -> None:
    f = specialize(lambda x: torch.cat([x, x]).new_ones(x.shape[0] + 1), {"x": Meta(["n"])})
    f(torch.ones(3))
    known = f.program.properties()
    assert [known[name].shape for name in known if known[name].shape][-1] == ("n + 1",)
    assert any(each.expression == "n + 1" and each.dtype is int for each in known.values())


def test_bodies_of_control_flow_are_shown() -> None:
    lines = printed(lambda x: cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), x),
                    torch.ones(2, 4))  # fmt: skip
    assert sum(line.startswith("def ") for line in lines) == 3
    assert any("sin(" in line for line in lines) and any("cos(" in line for line in lines)


def test_properties() -> None:
    f = specialize(lambda x: torch.logical_and(x @ WEIGHT > 0, torch.ones(2)))
    f(torch.ones(3, 4))
    known = f.program.properties()
    product, compared = known["matmul_default"], known["gt_scalar"]
    assert product.dtype is torch.float32 and product.shape == (3, 2) and product.requires_grad
    assert compared.dtype is torch.bool and not compared.requires_grad
    assert compared.device == torch.device("cpu") and compared.layout is torch.strided
    (constant,) = f.program.constants
    assert known[constant].constant is f.program.lifted[constant] and compared.constant is None
    table = str(known).splitlines()
    assert table[0].split() == [
        "value", "dtype", "shape", "device", "layout", "requires_grad", "constant", "expression",
    ]  # fmt: skip
    assert len(table) == len(known) + 1 and "[1.0, 1.0]" in str(known)
    assert "Properties(dtype=torch.bool" in repr(known)


def test_writes_change_the_known_metadata() -> None:
    def f(x: Tensor) -> Tensor:
        out = torch.zeros(3, 2)
        out.add_(x @ WEIGHT)
        return out

    g = specialize(f)
    g(torch.ones(3, 4))
    known = g.program.properties()
    assert not known["zeros_default"].requires_grad and known["add__tensor"].requires_grad


def test_tensors_from_outside_have_the_users_names() -> None:
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 2), "weight": torch.nn.Linear(2, 2)})

    params = {"first_weight": torch.ones(2)}

    def apply(x: Tensor) -> Tensor:
        return model["weight"](model["first"](x)) * params["first_weight"]

    f = specialize(apply)
    want = apply(torch.ones(3, 4))
    assert f(torch.ones(3, 4)).equal(want)
    text = str(f.program)
    assert "lifted_" not in text
    assert (
        "params_first_weight" in text and "linear(x, model_first_weight, model_first_bias)" in text
    )
    module = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    program = specialize(module)
    program(torch.ones(3, 4))
    assert "linear(input_1, _0_weight, _0_bias)" in str(program.program)
    assert program.properties()["_1_running_mean"].shape == (2,)


def test_names_from_outside_do_not_hide_others() -> None:
    args = torch.ones(2)
    mul = torch.full((2,), 3.0)
    program = torch.full((2,), 5.0)

    def x_(x: Tensor) -> Tensor:
        return (x * args) * mul + program

    f = specialize(x_)
    assert f(torch.ones(2)).equal(torch.full((2,), 8.0))
    assert f(torch.ones(2) * 2).equal(torch.full((2,), 11.0))


def test_the_state_of_an_optimizer_has_the_names_of_its_parameters() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    program = specialize(step)
    for _ in range(2):
        program(torch.ones(4, 3))
    text = str(program.program)
    assert "model_weight = args" in text and "model_bias = args" in text
    assert "optimizer_state_optimizer_param_groups_0_params_1__exp_avg:" in text
    assert "lifted" not in text and "containing" not in text


def test_objects_of_the_library_are_printed_on_one_line() -> None:
    f = tsfunc.specialize(torch.sin)
    assert repr(f) == "<specialized sin, 0 programs>"
    f(torch.ones(2))
    assert repr(f) == "<specialized sin, 1 program>"
    for rule in (tsfunc.custom_vjp, tsfunc.custom_jvp, tsfunc.custom_vmap):
        assert repr(rule(torch.sin)) == f"{rule.__name__}(sin)"
