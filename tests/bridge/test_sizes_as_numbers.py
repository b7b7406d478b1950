"""Named sizes as numbers of operators, in traces that repeat calls by plan and recipe."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tsfunc import MetaTensorType as Meta
from tsfunc import axis_size, pmean, psum, specialize, vmap

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a mean over the axis": vmap(lambda x: pmean(x, "i"), axis_name="i"),
    "a quotient": vmap(lambda x: psum(x, "i") / axis_size("i"), axis_name="i"),
    "a product": vmap(lambda x: psum(x, "i") * axis_size("i"), axis_name="i"),
    "a product with the size in front": vmap(
        lambda x: axis_size("i") * psum(x, "i"), axis_name="i"
    ),
    "a sum": vmap(lambda x: psum(x, "i") + axis_size("i"), axis_name="i"),
    "a float": vmap(lambda x: psum(x, "i") / (axis_size("i") * 0.5), axis_name="i"),
    "a comparison": vmap(lambda x: (x > axis_size("i")).double(), axis_name="i"),
    "a truth": vmap(lambda x: x * (axis_size("i") > 3), axis_name="i"),
    "a scale": vmap(lambda x: torch.add(x, x, alpha=axis_size("i")), axis_name="i"),
    "a write": vmap(lambda x: psum(x, "i").clone().mul_(axis_size("i")), axis_name="i"),
    "a power": vmap(lambda x: psum(x, "i") ** axis_size("i"), axis_name="i"),
    "a size of an example": lambda x: vmap(lambda y: y.sum() / y.shape[0])(x),
    "a size of the batch": lambda x: vmap(lambda y: y.sum() / x.shape[0])(x),
    "a size of what all examples share": lambda x: vmap(lambda y: y + x.sum() / x.shape[1])(x),
    "two levels": lambda x: vmap(lambda y: vmap(lambda z: z * x.shape[0] / y.shape[0])(y))(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_repeated_traces_keep_the_names_of_sizes(name: str) -> None:
    function = FUNCTIONS[name]
    for _ in range(4):  # a plan is made at the first call, a recipe recorded at the second
        program = specialize(function, {"x": Meta(["n", "m"])})
        for shape in ((3, 4), (5, 2), (2, 6)):
            x = torch.linspace(0.3, 2.1, shape[0] * shape[1], dtype=torch.float64).reshape(shape)
            torch.testing.assert_close(program(x), function(x))
