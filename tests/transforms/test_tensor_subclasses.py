"""The table of docs/tensor_classes.md: the tensor classes that each transform supports."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.utils._pytree import tree_map  # a module for authors of wrapper subclasses

import tsfunc
from tsfunc import cond, grad, jvp, scan, specialize, vmap

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*prototype"),
    pytest.mark.filterwarnings("ignore:.*is_fx_tracing"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.masked"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.nested"),
    pytest.mark.filterwarnings("ignore::tsfunc.errors.SlowFallbackWarning"),
]


class Tagged(torch.Tensor):
    """A class without handlers."""


class Wrapped(torch.Tensor):
    """A wrapper whose operators run on the inner tensor."""

    inside: Any

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        made.inside = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def unwrapped(x: Any) -> Any:
            return x.inside if isinstance(x, Wrapped) else x

        out = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        return tree_map(lambda x: Wrapped(x) if isinstance(x, Tensor) else x, out)


X = torch.arange(6.0).reshape(2, 3) / 6


def dtensor() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(X, init_device_mesh("cpu", (1,)), [Shard(0)])


def nested(layout: torch.layout) -> Any:
    return torch.nested.nested_tensor([X[:1], X[:, :3]] if layout is torch.strided
                                      else [X[0], X[1, :2]], layout=layout)  # fmt: skip


def quantized() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = torch.nn.Linear(3, 2, bias=False)
    layer.weight = torch.nn.Parameter(X.clone(), requires_grad=False)
    quantize_(layer, Int8WeightOnlyConfig())
    return layer.weight


# The function of each class: its computation, and its derivative by the plain values.
KINDS: dict[str, Callable[[], Any]] = {
    "a class without handlers": lambda: X.as_subclass(Tagged),
    "a wrapper with `__torch_dispatch__`": lambda: Wrapped(X.clone()),
    "`Parameter`": lambda: torch.nn.Parameter(X.clone()),
    "`DTensor`": dtensor,
    "`MaskedTensor`": lambda: torch.masked.masked_tensor(X.clone(), X > 0.2),
    "nested, strided": lambda: nested(torch.strided),
    "nested, jagged": lambda: nested(torch.jagged),
}


def curve(x: Tensor) -> Tensor:
    return (x * 2).sin()


def total(x: Tensor) -> Tensor:
    return curve(x).sum()


# A call, and its results for plain tensors.
TRANSFORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "`vmap`": (lambda x: vmap(curve)(x), curve),
    "`grad`": (lambda x: grad(total)(x), lambda x: 2 * (2 * x).cos()),
    "`vmap(grad)`": (lambda x: vmap(grad(total))(x), lambda x: 2 * (2 * x).cos()),
    "`jvp`": (lambda x: jvp(curve, (x,), (x,))[1], lambda x: 2 * (2 * x).cos() * x),
    "`specialize`": (lambda x: specialize(curve)(x), curve),
    "`specialize(grad)`": (lambda x: specialize(grad(total))(x), lambda x: 2 * (2 * x).cos()),
    "`checkpoint`": (
        lambda x: grad(lambda y: tsfunc.checkpoint(total)(y))(x),
        lambda x: 2 * (2 * x).cos(),
    ),
    "`cond`": (lambda x: cond(torch.tensor(True), curve, torch.cos, x), curve),
    "`scan`": (
        lambda x: scan(lambda c, i: (c * 2, c.sum()), x, torch.arange(2))[0], lambda x: 4 * x,
    ),
}  # fmt: skip


def plain(x: Any) -> Tensor:
    """Return the values of a tensor of any of the classes, as a flat tensor."""
    if isinstance(x, Wrapped):
        x = x.inside
    elif hasattr(x, "full_tensor"):
        x = x.full_tensor()
    elif type(x).__name__ == "MaskedTensor":
        x = x.to_tensor(0)
    if x.is_nested:
        return torch.cat([each.flatten() for each in x.unbind()]).detach()
    return x.detach().as_subclass(torch.Tensor).flatten()


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def rows() -> dict[str, list[str]]:
    """Return the table of the page: the cells of each class."""
    page = (Path(__file__).parents[2] / "docs" / "tensor_classes.md").read_text()
    lines = [re.split(r"\s*\|\s*", line.strip("| ")) for line in page.splitlines() if "|" in line]
    assert lines[0][1:] == list(TRANSFORMS)
    return {line[0]: line[1:] for line in lines[2:]}


def outcome(kind: str, transform: str) -> str:
    call, expected = TRANSFORMS[transform]
    x = KINDS[kind]()
    try:
        got = plain(call(x))
    except Exception:
        return "no"
    want = expected(plain(x))
    if kind == "`MaskedTensor`":
        kept = (X > 0.2).flatten()
        want, got = want[kept], got[kept]
    torch.testing.assert_close(got, want)  # an error, but never a wrong value
    return "yes"


@pytest.mark.parametrize("kind", KINDS)
def test_the_table(kind: str, process_group: None) -> None:
    found = [outcome(kind, transform) for transform in TRANSFORMS]
    assert found == rows()[kind], f"the row of docs/tensor_classes.md is: {found}"


def test_every_row_is_tested() -> None:
    assert rows().keys() == KINDS.keys()


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_quantized_weights() -> None:
    weight, x = quantized(), torch.randn(4, 3)
    linear = torch.nn.functional.linear
    expected = linear(x, weight)
    torch.testing.assert_close(specialize(lambda x: linear(x, weight))(x), expected)
    torch.testing.assert_close(tsfunc.checkpoint(lambda x: linear(x, weight))(x), expected)
    torch.testing.assert_close(jvp(lambda x: linear(x, weight), (x,), (x,))[1], expected)
    slopes = grad(lambda x: linear(x, weight).sum())(x)
    torch.testing.assert_close(slopes, weight.dequantize().sum(0).expand(4, 3))
    torch.testing.assert_close(vmap(lambda row: linear(row, weight))(x), expected)
    rows = vmap(grad(lambda row: linear(row, weight).sum()))(x)
    torch.testing.assert_close(rows, weight.dequantize().sum(0).expand(4, 3))


class Packed(Wrapped):
    """A weight whose class implements ``linear``, and ``detach`` as the only operator."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            x, weight = args[:2]
            return (x.unsqueeze(-2) * weight.inside).sum(-1)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inside)
        raise NotImplementedError(f"Packed has no {func}")


def test_a_class_that_implements_a_function_takes_it_on_tracers() -> None:
    inside, x = torch.randn(2, 3), torch.randn(4, 3)
    weight: Any = Packed(inside)

    def loss(row: Tensor) -> Tensor:
        return torch.nn.functional.linear(row, weight).sin().sum()

    plain = (x @ inside.T).sin().sum(1)
    slopes = ((x @ inside.T).cos()) @ inside
    torch.testing.assert_close(vmap(loss)(x), plain)
    torch.testing.assert_close(specialize(vmap(loss))(x), plain)
    torch.testing.assert_close(vmap(vmap(loss))(x[None]), plain[None])
    torch.testing.assert_close(vmap(grad(loss))(x), slopes)
    with pytest.raises(NotImplementedError, match=r"aten\.(t|mul)"):  # neither case is implemented
        vmap(lambda row: row * weight)(x)
