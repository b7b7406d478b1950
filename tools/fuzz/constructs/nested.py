"""Transforms of local functions, which close over the variables outside."""

from __future__ import annotations

from tools.fuzz.constructs.control_flow import shaped
from tools.fuzz.draw import Draw, RejectedError
from tools.fuzz.program import Block


def nested(d: Draw) -> None:
    """Add a transform of a local function that closes over outer variables."""
    x = d.float(min_rank=1)
    p = f"p{d.taken + 1}"
    kind = d.rng.randrange(9)
    if kind == 0:
        dim = d.dim(x)
        if not d.size(x, dim):
            raise RejectedError("no examples")
        sample = d.env[x].select(dim, 0)
        body = d.block("each", {p: sample}, 2, shaped(d, tuple(sample.shape)))
        out = d.pick("", ", out_dims=-1")
        d.let(f"tsfunc.vmap({body.name}, in_dims={dim}{out})({x})", (body,))
        return
    body = d.block("inner", {p: d.env[x]}, 2, shaped(d, d.shape(x)))
    scalar = Block(body.name, body.params, body.body, f"({body.result}).sum()")
    if kind == 1:
        d.let(f"tsfunc.grad({body.name})({x})", (scalar,))
    elif kind == 2:
        d.let(f"tsfunc.jvp({body.name}, ({x},), ({x}.cos(),))[1]", (body,))
    elif kind == 3:
        d.let(f"tsfunc.vjp({body.name}, {x})[1]({x}.cos())[0]", (body,))
    elif kind == 4:
        d.let(f"tsfunc.{d.pick('jacrev', 'jacfwd')}({body.name})({x})", (scalar,))
    elif kind == 5:
        d.let(f"tsfunc.checkpoint({body.name})({x})", (body,))
    elif kind == 6:
        d.let(f"tsfunc.specialize({body.name})({x})", (body,))
    elif kind == 7:
        d.let(f"tsfunc.specialize(tsfunc.grad({body.name}))({x})", (scalar,))
    else:
        d.let(f"tsfunc.linearize({body.name}, {x})[1]({x}.cos())", (body,))


def collective(d: Draw) -> None:
    """An exchange between the examples of a local function."""
    x = d.float(min_rank=1)
    dim = d.dim(x)
    if not d.size(x, dim):
        raise RejectedError("no examples")
    p, q = f"p{d.taken + 1}", f"q{d.taken + 1}"
    sample = d.env[x].select(dim, 0)
    body = d.block("each", {p: sample}, 1, shaped(d, tuple(sample.shape)))
    exchanged = d.pick(
        f'tsfunc.psum({q}.sin(), "i")',
        f'tsfunc.pmean({q} * {d.number()}, "i")',
        f'tsfunc.all_gather({q}, "i").square().sum(0)',
        f'tsfunc.all_gather({q}, "i", axis=-1).cumsum(-1)[..., 0]',
        f'{q} * (tsfunc.axis_index("i") + 1)',
        f'tsfunc.psum(tsfunc.psum({q}, "i") * {q}, "i")',
        f'{q} / (1 + tsfunc.psum({q}.abs(), "i"))',
        f'tsfunc.psum({q}, "i") / tsfunc.axis_size("i") * {q}',
        f'tsfunc.psum({q}.cos(), "i") + tsfunc.axis_size("i")',
    )
    d.taken += 1
    whole = Block(f"whole{d.taken}", (q,), (), f"{body.name}({exchanged})")
    d.let(f'tsfunc.vmap({whole.name}, in_dims={dim}, axis_name="i")({x})', (body, whole))
