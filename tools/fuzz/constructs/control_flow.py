"""Control flow; bodies close over the variables outside."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tools.fuzz.draw import Draw, RejectedError
from tools.fuzz.program import Block


def _predicate(d: Draw, x: str) -> str:
    return d.one_of(f"{x}.sum() > {d.number()}", f"{x}.sum().sin() > 0.1", f"({x} > 0).any()")


def shaped(d: Draw, shape: tuple[int, ...]) -> Callable[[], str]:
    """Return a result in a shape, from a recent variable of the block."""

    def result() -> str:
        late = [
            n for n, v in d.env.items() if isinstance(v, torch.Tensor) and v.dtype is torch.float64
        ]
        fitting = [n for n in late if tuple(d.env[n].shape) == shape]
        text = ", ".join(map(str, shape))
        newest = d.body[-1].target if d.body else None
        if newest in fitting:
            return str(newest)
        if newest in late and fitting:
            return f"{d.rng.choice(fitting)} + {newest}.sum().sin()"
        if fitting:
            return f"{d.rng.choice(fitting)} * {d.number()}"
        return f"{d.rng.choice(late)}.sum().sin().expand({text or '()'})"

    return result


def choice(d: Draw) -> None:
    x = d.float()
    passes = d.chance(0.5)
    params = {f"p{d.taken + 1}": d.env[x]} if passes else {}
    shape = d.shape(x)
    by = d.float()
    pred = _predicate(d, by)
    # A tensor that branches write into. Examples that choose different branches have separate
    # tensors.
    shared = [d.let(f"{x} * {d.number()} + {by}.sum()")] if d.chance(0.3) else []
    count = d.rng.choice([2, 2, 3])
    branches = tuple(d.block("branch", params, 2, shaped(d, shape), shared) for _ in range(count))
    names = ", ".join(b.name for b in branches)
    operands = f", {x}" if passes else ""
    if count == 2:
        d.let(f"tsfunc.cond({pred}, {names}{operands})", branches)
    else:
        index = f"({by}.sum() * 3).abs().long() % 3"
        d.let(f"tsfunc.switch({index}, [{names}]{operands})", branches)
    for name in shared:
        d.let(f"{name} + 1")


def writes(d: Draw, *params: str) -> list[str]:
    """Return the parameters that a loop's body may write into: they are copies."""
    return [name for name in params if d.chance(0.4)]


def loop(d: Draw) -> None:
    x = d.float()
    shape = d.shape(x)
    p, i = f"p{d.taken + 1}", f"i{d.taken + 1}"
    body = d.block("step", {i: torch.tensor(1), p: d.env[x]}, 2, shaped(d, shape), writes(d, p))
    bounded = Block(body.name, body.params, body.body, f"({body.result}).sin()")
    lower, upper = d.pick(
        ("0", "2"), ("0", "3"), ("1", "3"), ("0", f"1 + ({d.float()}.sum() * 3).abs().long() % 3")
    )
    # The index is an int or a tensor, as the bounds are.
    step = f"lambda i, p: {body.name}(torch.as_tensor(i), p)"
    d.let(f"tsfunc.fori_loop({lower}, {upper}, {step}, {x})", (bounded,))


def while_(d: Draw) -> None:
    x = d.float()
    shape = d.shape(x)
    p = f"p{d.taken + 1}"
    most = d.rng.choice([1, 2, 3])
    body = d.block("step", {p: d.env[x]}, 2, shaped(d, shape), writes(d, p))
    limit = d.number()
    test = Block(
        f"test{d.taken}",
        (f"t{d.taken}",),
        (),
        f"(t{d.taken}[0] < {most}) & (t{d.taken}[1].sum() < {limit})",
    )
    step = Block(
        f"whole{d.taken}",
        (f"t{d.taken}",),
        (),
        f"(t{d.taken}[0] + 1, {body.name}(t{d.taken}[1]).sin())",
    )
    d.let(
        f"tsfunc.while_loop({test.name}, {step.name}, (torch.tensor(0), {x}))[1]",
        (body, test, step),
    )


def scan(d: Draw) -> None:
    carry = d.float()
    xs = d.float(min_rank=1)
    dim = d.dim(xs)
    if not d.size(xs, dim):
        raise RejectedError("no steps")
    p, q = f"p{d.taken + 1}", f"q{d.taken + 1}"
    sample = {p: d.env[carry], q: d.env[xs].select(dim, 0)}
    body = d.block("step", sample, 2, shaped(d, d.shape(carry)), writes(d, p, q))
    stacked = d.pick(p, q, f"{p}.sum() * {q}", f"{p} + {q}.sum()")
    both = Block(body.name, body.params, body.body, f"(({body.result}).sin(), {stacked})")
    reverse = d.pick("", ", reverse=True")
    along = f", dim={dim}" if d.chance(0.3) and dim == 0 else ""
    if not along:
        xs = xs if dim in (0, -len(d.shape(xs))) else f"{xs}.movedim({dim}, 0)"
    d.let(f"tsfunc.scan({body.name}, {carry}, {xs}{reverse}{along})[{d.pick(0, 1)}]", (both,))


def map_(d: Draw) -> None:
    xs = d.float(min_rank=1)
    if not d.size(xs, 0):
        raise RejectedError("no steps")
    p = f"p{d.taken + 1}"
    sample = d.env[xs].select(0, 0)
    body = d.block("each", {p: sample}, 2, shaped(d, tuple(sample.shape)), writes(d, p))
    size = d.pick("", "", ", batch_size=2")
    d.let(f"tsfunc.map({body.name}, {xs}{size})", (body,))


def associative(d: Draw) -> None:
    xs = d.float(min_rank=1)
    if not d.size(xs, 0):
        raise RejectedError("no steps")
    p, q = f"p{d.taken + 1}", f"q{d.taken + 1}"
    combine = d.pick(f"{p} + {q}", f"{p} * {q}", f"torch.maximum({p}, {q})")
    d.taken += 1
    block = Block(f"combine{d.taken}", (p, q), (), combine)
    reverse = d.pick("", ", reverse=True")
    d.let(f"tsfunc.associative_scan({block.name}, {xs}{reverse})", (block,))
