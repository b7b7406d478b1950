"""Transforms of local functions, which close over the variables outside."""

from __future__ import annotations

from tools.fuzz.constructs.control_flow import shaped
from tools.fuzz.draw import Draw, RejectedError
from tools.fuzz.program import Block


def nested(d: Draw) -> None:
    """Add a transform of a local function that closes over outer variables."""
    if d.chance(0.12):
        mapped_writes(d)
        return
    x = d.float(min_rank=1)
    p = f"p{d.taken + 1}"
    kind = d.rng.randrange(12)
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
    block = scalar if kind in (1, 4, 7) else body
    d.let(
        (
            "",
            f"tsfunc.grad({body.name})({x})",
            f"tsfunc.jvp({body.name}, ({x},), ({x}.cos(),))[1]",
            f"tsfunc.vjp({body.name}, {x})[1]({x}.cos())[0]",
            f"tsfunc.{d.pick('jacrev', 'jacfwd')}({body.name})({x})",
            f"tsfunc.checkpoint({body.name})({x})",
            f"tsfunc.specialize({body.name})({x})",
            f"tsfunc.specialize(tsfunc.grad({body.name}))({x})",
            f"tsfunc.linearize({body.name}, {x})[1]({x}.cos())",
            f"torch.no_grad()({body.name})({x}).detach() * {x}",
            f"torch.enable_grad()({body.name})({x})",
            f"remat({body.name}, {x})",
        )[kind],
        (block,),
    )


def mapped_writes(d: Draw) -> None:
    """Write into the examples of a tensor that the function made."""
    x = d.let(f"{d.float(min_rank=1)}.clone()")
    dim = d.dim(x)
    if not d.size(x, dim):
        raise RejectedError("no examples")
    p = f"p{d.taken + 1}"
    sample = d.env[x].select(dim, 0)
    body = d.block("each", {p: sample}, 2, shaped(d, tuple(sample.shape)), [p])
    d.let(f"tsfunc.vmap({body.name}, in_dims={dim})({x})", (body,))
    d.let(f"{x} + 1")


# ---- Pullbacks and pushforwards that are kept ---------------------------------------------------


def pullback(d: Draw) -> None:
    """Keep a pullback (``r1[1]``) or a pushforward (``w1[1]``) with its value."""
    x = d.float()
    p = f"p{d.taken + 1}"
    body = d.block("inner", {p: d.env[x]}, 2, shaped(d, d.shape(x)))
    function = d.one_of(
        body.name, body.name, f"tsfunc.specialize({body.name})", f"tsfunc.checkpoint({body.name})"
    )
    prefix, transform = d.pick(("r", "vjp"), ("r", "vjp"), ("w", "linearize"))
    d.let(f"tsfunc.{transform}({function}, {x})", (body,), prefix)


def pulled(d: Draw) -> None:
    """Call a pullback or a pushforward that is kept, under a transform or without."""
    names = [name for name in d.env if name[0] in "rw"]
    if not names:
        pullback(d)
        names = [name for name in d.env if name[0] in "rw"]
    name = d.rng.choice(names)
    shape = tuple(d.env[name][0].shape)
    if d.chance(0.6):
        ct = d.variable("float", lambda v: tuple(v.shape) == shape)
    else:
        ct = d.let(f"{name}[0].cos() * {d.float()}.sum()")
    call, part = f"{name}[1]", "[0]" if name[0] == "r" else ""
    inner = f"lambda t: {call}(t){part}"
    d.let(
        d.pick(
            f"{call}({ct}){part}",
            f"{call}({ct}){part} * {name}[0].sum()",
            f"tsfunc.vmap({call})(torch.stack([{ct}, {ct}.sin()])){part}",
            f"tsfunc.vmap({inner}, in_dims=-1)(torch.stack([{ct}, {ct}.sin()], -1))",
            f"tsfunc.specialize({call})({ct}){part}",
            f"tsfunc.jacrev({inner})({ct})",
            f"tsfunc.jacfwd({inner})({ct})",
            f"tsfunc.grad(lambda t: ({call}(t){part} * t.sum()).sin().sum())({ct})",
            f"tsfunc.jvp({inner}, ({ct},), ({ct}.cos(),))[1]",
            f"tsfunc.vjp({inner}, {ct})[1]({call}({ct}){part})[0]",
            f"tsfunc.checkpoint({inner})({ct})",
            f"tsfunc.map({inner}, torch.stack([{ct}, {ct}.sin()]))",
        )
    )


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
