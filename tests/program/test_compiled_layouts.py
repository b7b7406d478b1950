"""Values of compiled programs have the strides that their views depend on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tsfunc import MetaTensorType as Meta
from tsfunc import specialize

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own warnings during compilation
_needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="Inductor needs gcc")

# Operators that Inductor decomposes into others, whose results have other strides.
MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "cat of one": lambda x: torch.cat([x]),
    "cat with an empty tensor": lambda x: torch.cat([x, x[..., :0]], -1),
    "cat with another dtype": lambda x: torch.cat([x, x[..., :0].double()], -1),
    "stack": lambda x: torch.stack([x], -1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2.0),
    "pointwise": torch.sin,
}


def _view(x: Tensor) -> Any:
    return x.view(-1) * 2


def _strided(x: Tensor) -> Any:
    return x.as_strided((3, 2), (2, 5)) * 2


def _written(x: Tensor) -> Any:
    x.flatten(1)[:, ::2].mul_(3)
    return x, x.sum(0)


def _inner_view(x: Tensor) -> Any:
    return x.transpose(0, 1).unflatten(1, (2, -1)) + 1


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "returned": lambda x: x,
    "viewed": _view,
    "as_strided": _strided,
    "written": _written,
    "split": _inner_view,
}
# A backend with Inductor's decompositions that runs them as eager operators, and Inductor.
_DECOMPOSED, _INDUCTOR = "aot_eager_decomp_partition", "inductor"
CASES = [
    (maker, view, _DECOMPOSED)
    for maker in MAKERS
    for view in VIEWS
    if (maker, view) != ("pointwise", "viewed")
]
COMPILED = [("interpolate", view, _INDUCTOR) for view in VIEWS]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("maker", "view", "backend"),
    [*CASES, *(pytest.param(*case, marks=[pytest.mark.slow, _needs_gcc]) for case in COMPILED)],
)
def test_values_have_the_strides_of_the_program(
    maker: str, view: str, backend: str, named: bool
) -> None:
    def f(x: Tensor) -> Any:
        return VIEWS[view](MAKERS[maker](x.transpose(0, 2)))

    x = torch.randn(3, 4, 6)
    program = specialize(f, {"x": Meta(["n", 4, 6])} if named else None, backend=backend)
    results, expected = program(x), f(x)
    torch.testing.assert_close(results, expected)
    for one, other in zip(*map(_tensors, (results, expected)), strict=True):
        assert one.stride() == other.stride()


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)
