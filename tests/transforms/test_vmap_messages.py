"""Every message of vmap; those that users of torch.func match are equal word by word."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.transforms.support import messages_of_mistakes
from tsfunc import specialize, vmap
from tsfunc.errors import DataDependentError

X = torch.ones(3, 4)


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


MESSAGES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: vmap(torch.sin, randomness="some"),
        RuntimeError,
        "Only allowed values for randomness are 'error', 'different', or 'same'. Got some",
    ),
    (
        lambda: vmap(torch.sin, chunk_size=0),
        ValueError,
        "vmap: chunk_size should be None or greater than 0. (got 0)",
    ),
    (
        lambda: vmap(torch.sin, chunk_size=-2),
        ValueError,
        "chunk_size should be None or greater than 0. (got -2)",
    ),
    (lambda: vmap(lambda: X)(), ValueError, "vmap(<lambda>)(<inputs>): got no inputs."),
    (lambda: vmap(torch.sin)(input=X), ValueError, "got no inputs"),
    (
        lambda: vmap(torch.add, in_dims=[0, 0])(X, X),
        ValueError,
        "vmap(add, in_dims=[0, 0], ...)(<inputs>): expected `in_dims` to be int or a "
        "(potentially nested) tuple matching the structure of inputs, got: <class 'list'>.",
    ),
    (
        lambda: vmap(torch.sin, in_dims="0")(X),
        ValueError,
        "expected `in_dims` to be int or a (potentially nested) tuple",
    ),
    (
        lambda: vmap(torch.sin, in_dims=None)(X),
        ValueError,
        "expected `in_dims` to be int or a (potentially nested) tuple",
    ),
    (
        lambda: vmap(torch.add, in_dims=(0,))(X, X),
        ValueError,
        "vmap(add, in_dims=(0,), ...)(<inputs>): in_dims is not compatible with the structure of "
        "`inputs`. in_dims has structure (0,) but the inputs are (input 0, input 1): expected one "
        "entry for each of them",
    ),
    (
        lambda: vmap(torch.sin, in_dims=([0],))(X),
        ValueError,
        "in_dims is not compatible with the structure of `inputs`",
    ),
    (
        lambda: vmap(torch.sin, in_dims=(0.5,))(X),
        ValueError,
        "Got in_dim=0.5 for an input but in_dim must be either an integer dimension or None.",
    ),
    (
        lambda: vmap(torch.mul, in_dims=(0, 0))(X, 3),
        ValueError,
        "vmap(mul, in_dims=(0, 0), ...)(<inputs>): Got in_dim=0 for an input but the input is of "
        "type <class 'int'>. We cannot vmap over non-Tensor arguments, please use None as the "
        "respective in_dim",
    ),
    (
        lambda: vmap(torch.sin, in_dims=2)(X),
        ValueError,
        "vmap(sin, in_dims=2, ...)(<inputs>): Got in_dim=2 for some input, but that input is a "
        "Tensor of dimensionality 2 so expected in_dim to satisfy -2 <= in_dim < 2.",
    ),
    (
        lambda: vmap(torch.sin, in_dims=-3)(X),
        ValueError,
        "Got in_dim=-3 for some input, but that input is a Tensor of dimensionality 2",
    ),
    (lambda: vmap(torch.sin)(torch.ones(())), ValueError, "a Tensor of dimensionality 0"),
    (
        lambda: vmap(torch.add)(X, torch.ones(2, 4)),
        ValueError,
        "Expected all tensors to have the same size in the mapped dimension, got sizes [3, 2] "
        "for the mapped dimension: input 0 has 3 in dim 0, input 1 has 2 in dim 0",
    ),
    (
        lambda: vmap(lambda a, b: a, in_dims=(0,))(X, X),
        ValueError,
        "in_dims has structure (0,) but the inputs are (a, b)",
    ),
    (
        lambda: vmap(lambda params, b: b, in_dims=({"w": 0, "c": 0}, 0))({"w": X}, X),
        ValueError,
        "The entry for params has structure {'c': *, 'w': *}, and params has structure {'w': *}.",
    ),
    (
        lambda: vmap(lambda params, b: b, in_dims=({"w": "x"}, 0))({"w": X}, X),
        ValueError,
        "Got in_dim=x for an input but in_dim must be either an integer dimension or None. The "
        "input is params['w'].",
    ),
    (
        lambda: vmap(lambda params: params, in_dims={"params": {"w": "x"}})({"w": X}),
        ValueError,
        "The input is params['w'].",
    ),
    (
        lambda: vmap(lambda params, x: x, (0, 1))({"w": X, "b": X}, torch.ones(2, 4)),
        ValueError,
        "params['b'] has 3 in dim 0, params['w'] has 3 in dim 0, x has 4 in dim 1",
    ),
    (
        lambda: vmap(torch.sin, in_dims=(None,))(X),
        ValueError,
        "Expected at least one Tensor to vmap over",
    ),
    (
        lambda: vmap(torch.sin, out_dims="0")(X),
        ValueError,
        "vmap(sin, ..., out_dims=0): `out_dims` must be an int, None or a python collection of "
        "ints representing where in the outputs the vmapped dimension should appear.",
    ),
    (
        lambda: vmap(torch.sin, out_dims=0.5)(X),
        ValueError,
        "`out_dims` must be an int, None or a python collection of ints",
    ),
    (
        lambda: vmap(pair, out_dims=(0, "a"))(X),
        ValueError,
        "`out_dims` must be an int, None or a python collection of ints",
    ),
    (
        lambda: vmap(torch.sin, out_dims=(0, 0))(X),
        ValueError,
        "vmap(sin, ..., out_dims=(0, 0))(<inputs>): out_dims is not compatible with the structure "
        "of `outputs`. out_dims has structure",
    ),
    (
        lambda: vmap(pair, out_dims=(0, 0, 0))(X),
        ValueError,
        "out_dims is not compatible with the structure of `outputs`",
    ),
    (
        lambda: vmap(pair, out_dims={"a": 0})(X),
        ValueError,
        "out_dims is not compatible with the structure of `outputs`",
    ),
    (
        lambda: vmap(torch.sin, out_dims=2)(X),
        IndexError,
        "vmap(sin, ..., out_dims=2)(<inputs>): Dimension out of range (expected to be in range of "
        "[-2, 1], but got 2)",
    ),
    (
        lambda: vmap(torch.sin, out_dims=-3)(X),
        IndexError,
        "Dimension out of range (expected to be in range of [-2, 1], but got -3)",
    ),
    (
        lambda: vmap(torch.sin, in_dims=True)(X),
        ValueError,
        "vmap(sin, in_dims=True, ...)(<inputs>): Got in_dim=True for an input but in_dim must be "
        "either an integer dimension or None.",
    ),
    (
        lambda: vmap(torch.sin, out_dims=True)(X),
        ValueError,
        "vmap(sin, ..., out_dims=True): `out_dims` must be an int, None or a python collection of "
        "ints",
    ),
    (lambda: vmap(pair, out_dims=(0, False))(X), ValueError, "must be an int, None or a python"),
    (
        lambda: vmap(torch.sin, out_dims=None)(X),
        ValueError,
        "vmap(sin, ...): `sin` can not return a BatchedTensor when out_dim is None",
    ),
    (
        lambda: vmap(functools.partial(torch.add, X))(3),
        ValueError,
        "vmap(functools.partial(add, ...), in_dims=0, ...)(<inputs>): Got in_dim=0",
    ),
    (
        lambda: vmap(torch.nn.Linear(4, 2), in_dims=3)(X),
        ValueError,
        "vmap(Linear, in_dims=3, ...)",
    ),
    (
        lambda: vmap(lambda x: x.sum().backward())(X),
        RuntimeError,
        "backward() was called inside of vmap(<lambda>)",
    ),
    (
        lambda: vmap(lambda x: x.sum().item())(X),
        RuntimeError,
        "It looks like you're calling .item() on a Tensor",
    ),
    (
        lambda: vmap(lambda x: x.nonzero())(X),
        RuntimeError,
        "vmap: We do not support batching operators that can output dynamic shape. Attempted to "
        "vmap over aten::nonzero)",
    ),
    (
        lambda: vmap(lambda x: torch.where(x > 0))(X),
        RuntimeError,
        "Attempted to vmap over aten::where)",
    ),
]


test_mistakes_in_calls_of_vmap_have_messages = messages_of_mistakes(MESSAGES)


@torch.library.custom_op("tsfunc_tests::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x / 2


def test_a_loop_over_nothing() -> None:
    """The operator has no rule, and there is no example to run it for."""
    with pytest.raises(RuntimeError) as caught:
        vmap(halved)(X[:0])
    message = str(caught.value)
    assert "Batching rule not implemented for tsfunc_tests::halved" in message
    assert "The fallback path does not support vmap over dims of size 0" in message


@pytest.mark.filterwarnings("ignore::tsfunc.errors.SlowFallbackWarning")
def test_an_operator_that_resizes_its_written_argument() -> None:
    """torch allows it for a tensor without dims; a batch has no memory for the examples."""
    with pytest.raises(RuntimeError, match=r"aten::addbmm_ resizes the tensor that it writes"):
        vmap(lambda x: x.sum().addbmm_(torch.ones(2, 3, 4), torch.ones(2, 4, 5)))(X)


def test_a_failed_call_leaves_nothing_behind() -> None:
    def fails(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        vmap(vmap(fails))(torch.ones(2, 3))
    assert torch.equal(vmap(vmap(torch.sin))(X), X.sin())
    assert torch.rand(2).shape == (2,)


@pytest.mark.parametrize("installed", ["site-packages", "dist-packages"])
def test_a_library_that_looks_at_data_unless_it_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    """The user can't change the library's line; the message names two remedies."""
    folder = tmp_path / installed
    folder.mkdir()
    name = f"looking_library_in_{installed.replace('-', '_')}"
    (folder / f"{name}.py").write_text(
        "import torch\n"
        "def masked(x, mask):\n"
        "    if not torch.compiler.is_compiling() and mask.all():\n"
        "        return x\n"
        "    return torch.where(mask, x, 0.0)\n"
    )
    monkeypatch.syspath_prepend(folder)
    library: Any = importlib.import_module(name)
    mask = torch.arange(4) < torch.arange(2, 5)[:, None]
    with pytest.raises(DataDependentError) as caught:
        vmap(library.masked)(X, mask)
    message = str(caught.value)
    assert 'data_dependent="split"' in message
    assert "specialize(vmap(...))" in message and "torch.where" not in message

    want = torch.where(mask, X, 0.0)
    assert torch.equal(vmap(library.masked, data_dependent="split")(X, mask), want)
    assert torch.equal(specialize(vmap(library.masked))(X, mask), want)
    with pytest.raises(DataDependentError, match=r"Or write the choice with torch\.where"):
        vmap(lambda x, mask: x if mask.all() else -x)(X, mask)


def test_generator_functions_are_refused_where_they_are_called() -> None:
    def steps(x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x * 2
        yield x * 3

    async def later(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(5)
    with pytest.raises(TypeError, match="`steps` returned a generator, whose code runs when it is"):
        vmap(steps)(x)
    with pytest.raises(TypeError, match="`<lambda>` returned a generator"):
        vmap(lambda x: {"a": x, "b": steps(x)})(x)
    with pytest.raises(TypeError, match="`later` returned a coroutine"):
        vmap(later)(x)  # type: ignore[unused-coroutine]
    first, second = vmap(lambda x: list(steps(x)))(x)
    assert first.equal(x * 2) and second.equal(x * 3)


def test_a_module_is_named_by_its_class() -> None:
    """Its repr has a line for each submodule."""

    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(9)])

        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    for call in (vmap(Deep()), specialize(vmap(Deep(), data_dependent="split"))):
        with pytest.raises(DataDependentError) as caught:
            call(X)
        assert "vmap(Deep), at " in str(caught.value)
        assert "Linear" not in str(caught.value)


def test_the_advice_for_a_read_in_a_library_depends_on_the_trace() -> None:
    namespace: dict[str, Any] = {}
    source = "def pooled(x):\n    return x * int(x.max())\n"
    exec(compile(source, "/usr/lib/site-packages/graphs/pooling.py", "exec"), namespace)
    pooled = namespace["pooled"]
    for call, advice in (
        (vmap(pooled), r"Or trace the function, with tsfunc.specialize\(vmap"),
        (specialize(vmap(pooled)), "Or give the library arguments with which it reads no values"),
    ):
        with pytest.raises(DataDependentError, match=f"pooling.py:2, in pooled.* {advice}"):
            call(X)
