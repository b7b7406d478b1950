"""Results of fixed sizes without FakeTensorMode equal those of the mode, and of the kernels."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensorMode

import tsfunc
from tests.bridge.test_fake_cache import Trace, looks, tensors_in
from tests.ops.harness import database_calls
from tsfunc.bridge.sizes.fake_mode import (
    LazyFakeMode,
    Metadata,
    new_fake,
    results_of_fixed_sizes,
    scaled_down,
)
from tsfunc.bridge.tracers.operators import operator_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

aten: Any = torch.ops.aten
DTYPES = (torch.float32, torch.complex64, torch.int64)


def seen(results: Any, values: Any) -> Any:
    """Return the visible properties of results, and of the arguments after the call."""
    leaves, tree = optree.tree_flatten(results, none_is_leaf=True)
    given = tensors_in(values)
    return tree, [looks(leaf, given) for leaf in leaves], [looks(x, given) for x in given]


def compare(trace: Trace, op: Any, args: Any, kwargs: Any) -> bool:
    """Compare an operator's results with FakeTensorMode's; False if that mode serves it."""
    ours, theirs = trace.fake((args, kwargs)), trace.fake((args, kwargs))
    results = results_of_fixed_sizes(trace.symbols.fake, op, *ours)
    if results is NotImplemented:
        return False
    with DisableTorchFunction(), trace.symbols.fake:
        expected = op(*theirs[0], **theirs[1])
    if seen(results, ours) != seen(expected, theirs):
        # FakeTensorMode differs from the kernels in the strides of some dims of size 1.
        expected = op(*args, **kwargs)
        pairs = zip(tensors_in(results), tensors_in(expected), strict=True)
        assert all(metadata(x) == metadata(y) for x, y in pairs), (op, args, kwargs)
    return True


def metadata(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device


def calls(infos: Sequence[Any], dtypes: Sequence[torch.dtype], most: int) -> Iterator[Any]:
    for info in infos:
        for dtype in dtypes:
            if dtype in info.supported_dtypes("cpu") and "jiterator" not in info.name:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    yield from database_calls(info, dtype, most=most)


def compare_all(infos: Sequence[Any], dtypes: Sequence[torch.dtype], most: int) -> int:
    trace, compared = Trace(), 0
    for call in calls(infos, dtypes, most):
        if all(x.layout is torch.strided for x in tensors_in((call.args, call.kwargs))):
            with torch.no_grad():
                overload = operator_of(getattr(call.op, "overload", call.op)).overload
                compared += compare(trace, overload, call.args, call.kwargs)
    return compared


def test_drawn_operators_of_the_database(request: pytest.FixtureRequest) -> None:
    rng = random.Random(f"{request.config.option.hypothesis_seed}")
    assert compare_all(rng.sample(op_db, 20), [rng.choice(DTYPES[:2])], most=2) > 10


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(op_db), 50))
def test_operators_of_the_database(first: int) -> None:
    block = op_db[first : first + 50]  # the last block is smaller
    assert compare_all(block, DTYPES, most=3) > len(block)


def layout(rng: random.Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of a shape: contiguous, permuted, with gaps, or expanded."""
    order = rng.sample(range(len(shape)), len(shape))
    gap = rng.choice((0, 0, 1))
    memory = torch.ones([shape[d] + gap for d in order], dtype=dtype)
    for d in range(len(shape)):
        memory = memory.narrow(d, 0, shape[order[d]])
    x = memory.permute([order.index(d) for d in range(len(shape))]) if shape else memory
    if shape and rng.random() < 0.2:
        dim = rng.randrange(len(shape))
        x = x.narrow(dim, 0, min(1, shape[dim])).expand(shape) if shape[dim] else x
    return x


def sizes(rng: random.Random, rank: int) -> list[int]:
    return [rng.choice((0, 1, 1, 2, 3, 5, 7, 11, 16)) for _ in range(rank)]


def pointwise(rng: random.Random) -> tuple[Any, ...]:
    shape = sizes(rng, rng.randrange(5))
    others = [[1 if rng.random() < 0.3 else n for n in shape[rng.randrange(len(shape) + 1) :]]
              for _ in range(2)]  # fmt: skip
    dtypes = [rng.choice((torch.float32, torch.float64, torch.int32)) for _ in range(3)]
    x, y, z = (layout(rng, s, d) for s, d in zip([shape, *others], dtypes, strict=True))
    return rng.choice((
        (aten.sin.default, x), (aten.add.Tensor, x, y), (aten.mul.Tensor, y, x),
        (aten.gt.Scalar, x, 1), (aten.pow.Tensor_Scalar, x, 2.0), (aten.where.self, z > 0, x, y),
        (aten.clamp.default, x, 0, 1), (aten.gelu.default, x.double()), (aten.add_.Tensor, x, y),
        (aten.masked_fill.Scalar, x, y > 0, 1.0), (aten.addcmul.default, x, y, z),
    ))  # fmt: skip


def product(rng: random.Random) -> tuple[Any, ...]:
    n, k, m, b, c = sizes(rng, 5)
    f = torch.float32
    a, w, bias = layout(rng, (n, k), f), layout(rng, (k, m), f), layout(rng, (m,), f)
    return rng.choice((
        (aten.mm.default, a, w), (aten.linear.default, a, w.t(), bias),
        (aten.addmm.default, bias, a, w), (aten.mv.default, a, layout(rng, (k,), f)),
        (aten.bmm.default, layout(rng, (b, n, k), f), layout(rng, (b, k, m), f)),
        (aten.matmul.default, layout(rng, (b, c, n, k), f), w),
        (aten.matmul.default, layout(rng, (b, c, n, k), f), layout(rng, (c, k, m), f)),
        (aten.embedding.default, a, layout(rng, (b, c), torch.int64).clamp(0, max(n - 1, 0))),
    ))  # fmt: skip


def reduction(rng: random.Random) -> tuple[Any, ...]:
    shape = sizes(rng, rng.randrange(1, 5))
    dim, keep = rng.randrange(len(shape)), rng.random() < 0.5
    x = layout(rng, shape, torch.float32)
    last = shape[-1:]
    return rng.choice((
        (aten.sum.default, x), (aten.sum.dim_IntList, x, [dim], keep), (aten.mean.dim, x, [dim]),
        (aten.amax.default, x, [dim], keep), (aten.max.dim, x, dim, keep),
        (aten.var.correction, x, [dim]), (aten.softmax.int, x, dim), (aten.cumsum.default, x, dim),
        (aten.argmax.default, x, dim, keep), (aten.sort.default, x, dim),
        (aten.layer_norm.default, x, last), (aten.flip.default, x, [dim]),
        (aten.native_layer_norm.default, x, last, None, None, 1e-5),
        (aten.any.dim, x > 0, dim), (aten.gather.default, x, dim, x.long() * 0),
        (aten.cat.default, [x, layout(rng, shape, torch.float64), x], dim),
        (aten.cat.default, [torch.ones(0), x]),
        (aten.cross_entropy_loss.default, x, x.softmax(min(1, x.dim() - 1))),
    ))  # fmt: skip


@pytest.mark.parametrize("draw", [pointwise, product, reduction])
def test_scaled_down_calls_have_the_results_of_the_kernels(
    draw: Callable[[random.Random], tuple[Any, ...]], request: pytest.FixtureRequest
) -> None:
    rng = random.Random(f"{request.config.option.hypothesis_seed} {draw.__name__}")
    served = 0
    for _ in range(200):
        call, *args = draw(rng)
        found = scaled_down(call, args, {})
        if found is NotImplemented:
            continue
        expected = call(*args)
        served += 1
        both = (found, expected) if isinstance(expected, tuple) else ([found], [expected])
        for one, other in zip(*both, strict=True):
            if isinstance(one, Metadata):
                own = tuple(one.shape), tuple(one.strides), one.dtype
                assert own == (other.shape, other.stride(), other.dtype), (call, args)
            else:
                assert one is other, (call, args)
    assert served > 60


def alike_calls(shape: tuple[int, ...]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each overload of torch that a scaled-down call may serve, on tensors of one shape."""
    given: dict[str, Any] = {"Tensor": torch.rand(shape), "number": 0.5, "int": -1, "bool": False}
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in getattr(packet, "overloads", lambda: [])():
            call = getattr(packet, overload)
            needed = [x for x in call._schema.arguments if not x.has_default_value()]
            if all(str(x.type) in given and not x.kwarg_only for x in needed):
                yield call, [given[str(x.type)] for x in needed]


@pytest.mark.parametrize("rank", [2, 3])
def test_scaled_down_calls_serve_no_operator_with_computed_sizes(
    rank: int, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(f"{request.config.option.hypothesis_seed} {rank}")
    served = set()
    for _ in range(4):
        shape = tuple(2 * n for n in rng.sample(range(1, 8), rank))
        for call, args in alike_calls(shape):
            found = scaled_down(call, args, {})
            if isinstance(found, Metadata):
                served.add(call)
                assert tuple(found.shape) == call(*args).shape, (call, shape)
    assert len(served) > 100


def test_a_mode_is_set_up_when_it_runs_an_operator() -> None:
    mode = LazyFakeMode()
    x: Any = new_fake(mode, (3, 3), (3, 1), torch.float32, torch.device("cpu"))
    assert results_of_fixed_sizes(mode, aten.mm.default, (x, x), {}).shape == (3, 3)
    assert type(mode) is LazyFakeMode
    assert x.sin().shape == (3, 3) and type(mode) is FakeTensorMode


@pytest.mark.parametrize("args", [(5,), (2, 7), (0, 1, 0.3), (9, 2, -2), (1.5,), (3, 3), (10**6,)])
def test_ranges(args: tuple[float, ...]) -> None:
    overload = (aten.arange.default, aten.arange.start, aten.arange.start_step)[len(args) - 1]
    assert compare(Trace(), overload, args, {})


COLD = """
import sys, torch, torch.nn.functional as F, tsfunc
from tsfunc import grad, specialize, vmap
model = torch.nn.Sequential(
    torch.nn.Embedding(9, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.GELU(),
    torch.nn.Linear(16, 9), torch.nn.Softmax(-1),
)
specialize(lambda x: model(x + torch.arange(3)).sum())(torch.zeros(4, 3, dtype=torch.int64))
def attention(x):
    q, k, v = (z.view(2, 5, 3, 4).transpose(1, 2) for z in x.split(12, 2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()
specialize(attention)(torch.ones(2, 5, 36))
def loss(w, x):
    return (w @ x).tanh().square().sum()
specialize(vmap(grad(loss), in_dims=(None, 0)))(torch.ones(3, 3), torch.ones(5, 3))
print([m for m in ("torch._dynamo", "sympy", "torch.distributed.tensor") if m in sys.modules])
"""


def test_fixed_sizes_import_neither_dynamo_nor_sympy() -> None:
    # The verification of programs runs their operators in FakeTensorMode.
    env = {name: value for name, value in os.environ.items() if name != "TSFUNC_VERIFY"}
    command = [sys.executable, "-c", COLD]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert run.stdout == "[]\n"


def test_small_tensors_have_memory_under_a_mode_of_torch() -> None:
    """A trace of torch may call a trace: its modes make tensors without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tsfunc.bridge.sizes.fake_mode import scaled_down

    x = torch.ones(4, 3)
    with FakeTensorMode():
        found = scaled_down(torch.ops.aten.sum.dim_IntList, (x, [0]), {})
    assert tuple(found.shape) == (3,)


class _Interrupt(BaseException):
    pass


def test_an_interrupt_of_the_mode_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode enters itself again, and the interrupt comes before it exits."""
    mode = LazyFakeMode()
    with mode:
        x = torch.ones(3)

        def interrupted(self: FakeTensorMode, *_: Any) -> Any:
            self.__enter__()
            raise _Interrupt

        monkeypatch.setattr(FakeTensorMode, "dispatch", interrupted)
        with pytest.raises(_Interrupt):
            x.sin()
        monkeypatch.undo()
        assert x.sin().shape == (3,)


def test_rules_that_print_fake_tensors_run_in_a_jvp() -> None:
    """torch's rule for ``lerp_`` tries a form of the operator that its arguments do not match."""

    def quantile(x: torch.Tensor) -> torch.Tensor:
        return torch.quantile(x, 0.3)

    x, t = torch.randn(2, 5, dtype=torch.float64)
    program: Any = tsfunc.specialize(quantile)
    torch.testing.assert_close(
        tsfunc.jvp(program, (x,), (t,)), torch.func.jvp(quantile, (x,), (t,))
    )
