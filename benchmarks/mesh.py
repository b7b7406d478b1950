"""The cost of named axes over a mesh, with torch's fake backend: transfers take no time.

The process acts as one rank of a simulated mesh; a collective returns its argument at once. The
figures are the time of the library and of torch on the host.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed._functional_collectives as fc
from torch import Tensor

import tsfunc
from benchmarks.timing import Case
from benchmarks.vmapping import fifty_small
from tsfunc import P, shard_map
from tsfunc.testing import simulated_rank

GROUP = "process group"
FUNCTIONAL = "functional collectives"
OURS = "tsfunc"
CHECKED = "tsfunc, checked"
SPECIALIZED = "tsfunc, specialized"
TIMES = 100  # collectives in one call


@functools.cache
def simulated() -> Any:
    """A context with the simulated mesh."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(simulated_rank(0, dp=4, tp=2))


def group() -> Any:
    return simulated().get_group("dp")


def mapped(body: Callable[[Tensor], Any], check: Any = None) -> Callable[[Tensor], Any]:
    """Return the body on this rank's tensor, over one axis."""
    return shard_map(
        body, simulated(), P("dp"), P("dp"), axis_names=["dp"], inputs="local", outputs="local",
        check=check,
    )  # fmt: skip


def by_group(x: Tensor) -> Tensor:
    out = x.clone()
    group().allreduce([out]).wait()
    return out


def functional(x: Tensor) -> Tensor:
    ops: Any = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, "sum", group().group_name))


def summed(x: Tensor) -> Tensor:
    return tsfunc.psum(x, "dp")


def repeated(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    for _ in range(TIMES):
        out = f(x)
    return out


def chain(f: Callable[[Tensor], Tensor], first: Tensor) -> Tensor:
    x = first
    for _ in range(TIMES):
        x = f(x.sin() + first)  # differs between ranks
    return x


def pulled(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient of the sum of a collective's result, by autograd."""
    leaf = x.detach().requires_grad_()
    f(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def cases() -> Iterator[Case]:
    x = torch.randn(16)
    yield Case(
        "mesh: psum of 16 numbers",
        {
            GROUP: functools.partial(repeated, by_group, x),
            FUNCTIONAL: functools.partial(repeated, functional, x),
            OURS: functools.partial(mapped(functools.partial(repeated, summed)), x),
            CHECKED: functools.partial(mapped(functools.partial(repeated, summed), "calls"), x),
        },
        base=GROUP,
        goals={OURS: 2.0},
        per=TIMES,
    )
    specialized = tsfunc.specialize(mapped(functools.partial(chain, summed), "programs"))
    yield Case(
        "mesh: psum and sin in a program",
        {
            FUNCTIONAL: functools.partial(chain, functional, x),
            SPECIALIZED: functools.partial(specialized, x),
        },
        base=FUNCTIONAL,
        goals={SPECIALIZED: 1.5},
        per=TIMES,
    )
    yield Case(
        "mesh: psum and its backward pass",
        {
            FUNCTIONAL: functools.partial(pulled, lambda x: fc.all_reduce(x, "sum", group()), x),
            OURS: functools.partial(mapped(functools.partial(pulled, summed)), x),
        },
        base=FUNCTIONAL,
        goals={OURS: 1.0},
    )
    two = torch.randn(4, 4), torch.randn(4, 4)
    for check in (None, "programs"):
        both = shard_map(lambda x, y: y, simulated(), (P(), P("dp")), P("dp"), outputs="local",
                         check=check)  # type: ignore[arg-type]  # fmt: skip
        yield Case(
            f"mesh: call of shard_map with two arguments, check={check!r}",
            {"slice": lambda: two[1][:1].clone(), OURS: functools.partial(both, *two)},
            base="slice",
        )
    block = torch.randn(16, 12)
    inside = mapped(lambda x: functools.reduce(lambda x, _: fifty_small(x), range(400), x))
    yield Case(
        "mesh: 20,000 small operators in a body",
        {
            "outside": lambda: functools.reduce(lambda x, _: fifty_small(x), range(400), block),
            OURS: functools.partial(inside, block),
        },
        base="outside",
        goals={OURS: 1.03},
    )
