"""A program creates the function's own tensors anew in every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tsfunc
from tsfunc.pytrees import leaves_of

MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor of a number": lambda x: torch.tensor(1.0),
    "tensor of a list": lambda x: torch.tensor([1.0, 2.0, 3.0]),
    "tensor of lists": lambda x: torch.tensor([[1.0, 2.0, 3.0]] * 2),
    "tensor of whole numbers": lambda x: torch.tensor([1, 2, 3]),
    "tensor of a NumPy array": lambda x: torch.tensor(np.arange(3.0, dtype=np.float32)),
    "as_tensor": lambda x: torch.as_tensor([1.0, 2.0, 3.0]),
    "as_tensor of a NumPy array": lambda x: torch.as_tensor(np.ones(3, dtype=np.float32)),
    "asarray": lambda x: torch.asarray([1.0, 2.0, 3.0]),
    "from_numpy": lambda x: torch.from_numpy(np.ones(3, dtype=np.float32)),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0, 3.0]),
    "scalar_tensor": lambda x: torch.scalar_tensor(2.0),
    "zeros": lambda x: torch.zeros(3),
    "full": lambda x: torch.full((3,), 2.0),
    "arange": lambda x: torch.arange(3.0),
    "eye": lambda x: torch.eye(3),
    "a view of a tensor": lambda x: torch.tensor([[1.0, 2.0, 3.0]]).T.squeeze(1),
    "a parameter": lambda x: torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0])).data,
}
USES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "written": lambda x, made: x * made.add_(1).to(x.dtype).sum(),
    "written in part": lambda x, made: x + made.flatten()[:1].mul_(3).sum(),
    "returned": lambda x, made: (x * 2, made),
    "its view is returned": lambda x, made: (x * 2, made[...]),
}
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda f: f,
    "vmap": lambda f: tsfunc.vmap(lambda x: f(x)),
    "jvp": lambda f: lambda x: tsfunc.jvp(f, (x,), (x,)),
}


def written_over(result: Any) -> None:
    """Write into every tensor that a call has returned."""
    for leaf in leaves_of(result):
        leaf.fill_(7)


@pytest.mark.parametrize("backend", ["python", "aot_eager"])
@pytest.mark.parametrize("transform", list(TRANSFORMS))
@pytest.mark.parametrize("use", list(USES))
@pytest.mark.parametrize("maker", list(MAKERS))
def test_a_program_makes_a_new_object(maker: str, use: str, transform: str, backend: str) -> None:
    def f(x: Tensor) -> Any:
        return USES[use](x, MAKERS[maker](x))

    transformed = TRANSFORMS[transform](f)
    x = torch.randn(4, 3)
    want = transformed(x)
    specialized = tsfunc.specialize(transformed, backend=backend)
    for _ in range(3):
        got = specialized(x)
        torch.testing.assert_close(got, want)
        written_over(got)
