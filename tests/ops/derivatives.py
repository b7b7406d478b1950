"""Modes of ``sweep`` for derivatives of batches, compared with torch's autograd in a Python loop.

The inputs of a derivative are ``case.differentiable``. Its output is a weighted sum of all results
that have a derivative, with a different weight for each number. The reference differentiates one
example at a time, on plain tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import tsfunc
from tests.ops.batches import Batch, looped, mapped
from tests.ops.database import Case, Results
from tests.ops.sweep import Mode, Run

Function = Callable[..., Results]
SPLIT = {"data_dependent": "split"}
DIFFERENT = "different"


class NotDifferentiable(Exception):
    """torch has no derivative for this call."""


def has_derivative(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def weights(x: Tensor) -> Tensor:
    """Return different numbers of the dtype and shape of ``x``."""
    w = torch.linspace(0.5, 1.5, max(x.numel(), 1), dtype=torch.float64)[: x.numel()]
    if x.is_complex():
        w = torch.complex(w, w.flip(0) - 0.7)
    return w.to(x.dtype).reshape(x.shape)


def total(outs: Sequence[Tensor], weighted_as: Sequence[Tensor] | None = None) -> Tensor:
    """Return one real number; ``weighted_as`` has one example of each batched result."""
    examples = outs if weighted_as is None else weighted_as
    parts = [(x * weights(like)).sum() for x, like in zip(outs, examples, strict=True)]
    real = [x.real if x.is_complex() else x for x in parts]
    return torch.stack([x.to(real[0].dtype) for x in real]).sum()


def scalar(f: Function) -> Callable[..., Tensor]:
    """Return the function to differentiate, of the results that torch can differentiate."""

    def one(*tensors: Tensor) -> Tensor:
        outs = [x for x in f(*tensors) if has_derivative(x)]
        if not outs:
            raise NotDifferentiable("no result has a derivative")
        return total(outs)

    return one


def filled(tensors: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Return the tensors with new values at some positions."""
    out = list(tensors)
    for place, value in zip(places, values, strict=True):
        out[place] = value
    return out


def leaves_of(tensors: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Return copies of the tensors at some positions that require grad."""
    return [tensors[i].detach().clone().requires_grad_() for i in places]


def torch_pulled(
    outs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Any = None, **options: Any
) -> Results:
    """Return torch's gradients, with zeros for inputs that the outputs do not depend on."""
    kept = [i for i, out in enumerate(outs) if out.requires_grad]
    if not kept:
        raise NotDifferentiable("no result depends on the inputs")
    given = None if cotangents is None else [cotangents[i] for i in kept]
    found = torch.autograd.grad(
        [outs[i] for i in kept], inputs, given, allow_unused=True, **options
    )
    return tuple(
        torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)
    )


def torch_grad(f: Callable[..., Tensor], places: Sequence[int]) -> Function:
    """Return a function for the gradient of one example."""

    def gradient(*tensors: Tensor) -> Results:
        inputs = leaves_of(tensors, places)
        return torch_pulled([f(*filled(tensors, places, inputs))], inputs)

    return gradient


def our_grad(f: Callable[..., Tensor], places: Sequence[int]) -> Function:
    def gradient(*tensors: Tensor) -> Results:
        inputs = [tensors[i] for i in places]
        of_inputs = tsfunc.grad(
            lambda *values: f(*filled(tensors, places, values)),
            argnums=tuple(range(len(places))),
        )
        return tuple(of_inputs(*inputs))

    return gradient


def gradient_mode(levels: int) -> Mode:
    """``vmap(grad)`` with several levels of vmap."""

    def run(randomness: str = "same", **options: Any) -> Run:
        def ours(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
            gradient = our_grad(scalar(case.call), case.differentiable)
            return mapped(gradient, batch, randomness, **options)(*inputs)

        return ours

    def plain(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
        return looped(torch_grad(scalar(case.call), case.differentiable), batch)(*inputs)

    name = "vmap(grad)" if levels == 1 else "vmap(vmap(grad))"
    return _with_drawn(Mode(name, levels, run(), plain, run(**SPLIT), writes=False), run(DIFFERENT))


def _with_drawn(mode: Mode, ours: Run) -> Mode:
    """Return the mode with a mode for draws from distributions that differ between examples."""
    drawn = Mode(f"{mode.name}, {DIFFERENT}", mode.levels, ours, mode.plain, writes=False)
    return dataclasses.replace(mode, drawn=(drawn,))


def _of_batch(
    f: Function, batch: Batch, *, ours: bool, randomness: str = "same", **options: Any
) -> Callable[..., Tensor]:
    """Return the function whose result is the sum of the weighted results of all examples."""

    def own(*example: Tensor) -> Results:
        # Use contiguous memory: torch's batch_norm has a wrong gradient for a weight with gaps.
        return f(*[x.clone() for x in example])

    def whole(*inputs: Tensor) -> Tensor:
        call = mapped(f, batch, randomness, **options) if ours else looped(own, batch, alias=True)
        outs = [x for x in call(*inputs) if has_derivative(x)]
        if not outs:
            raise NotDifferentiable("no result has a derivative")
        return total(outs, [x[0] for x in outs])

    return whole


def _grad_of_vmap(**options: Any) -> Run:
    def ours(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
        whole = _of_batch(case.call, batch, ours=True, **options)
        return our_grad(whole, case.differentiable)(*inputs)

    return ours


def _grad_of_loop(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
    return torch_grad(_of_batch(case.call, batch, ours=False), case.differentiable)(*inputs)


def _second(grad: Any, case: Case) -> Function:
    """Return the gradient of the weighted sum of the gradient."""
    first = grad(scalar(case.call), case.differentiable)
    return grad(scalar(first), case.differentiable)


def torch_second(case: Case) -> Function:
    """Return the second derivative of one example, as the gradient of the weighted gradient."""
    places, f = case.differentiable, scalar(case.call)

    def second(*tensors: Tensor) -> Results:
        inputs = leaves_of(tensors, places)
        value = f(*filled(tensors, places, inputs))
        first = torch_pulled([value], inputs, create_graph=True)
        return torch_pulled([total(first)], inputs)

    return second


def _vmap_second(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
    return mapped(_second(our_grad, case), batch, "same")(*inputs)


def _loop_second(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
    return looped(torch_second(case), batch)(*inputs)


# Second derivatives along a direction, computed in three ways.


def _dot(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """Return the real inner product."""
    parts = [(x.conj() * y).sum() for x, y in zip(xs, ys, strict=True)]
    return torch.stack([x.real if x.is_complex() else x for x in parts]).sum()


def along(case: Case, way: str) -> Function:
    """Return the second derivative along ``direction``, or the gradient of the first one."""
    places, f = case.differentiable, scalar(case.call)

    def second(*tensors: Tensor) -> Results:
        inputs = tuple(tensors[i] for i in places)
        v = tuple(direction(x) for x in inputs)
        numbers = tuple(range(len(places)))

        def of_inputs(*values: Tensor) -> Tensor:
            return f(*filled(tensors, places, values))

        def slope(*values: Tensor) -> Tensor:
            if way == "jvp(grad)":
                return _dot(tsfunc.grad(of_inputs, numbers)(*values), v)
            return tsfunc.jvp(of_inputs, values, v)[1]

        if way == "grad(jvp)":
            return (_dot(tsfunc.grad(slope, numbers)(*inputs), v),)
        return (tsfunc.jvp(slope, inputs, v)[1],)

    return second


def torch_along(case: Case) -> Function:
    """Return the second derivative along a direction by torch's double backward."""
    places, f = case.differentiable, scalar(case.call)

    def second(*tensors: Tensor) -> Results:
        inputs = leaves_of(tensors, places)
        v = [direction(x.detach()) for x in inputs]
        first = torch_pulled([f(*filled(tensors, places, inputs))], inputs, create_graph=True)
        return (_dot(torch_pulled([_dot(first, v)], inputs), v),)

    return second


def second_mode(way: str) -> Mode:
    """``vmap`` of one of "jvp(jvp)", "grad(jvp)" and "jvp(grad)"."""

    def ours(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
        return mapped(along(case, way), batch, "same")(*inputs)

    def plain(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
        return looped(torch_along(case), batch)(*inputs)

    return Mode(f"vmap({way})", 1, ours, plain, writes=False)


# Forward mode.


def direction(x: Tensor) -> Tensor:
    """Return a tangent whose numbers differ from example to example."""
    return x * 0.5 + (1 - 0.3j if x.is_complex() else 1)


def torch_pushed(f: Function, primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Results:
    """Return values and tangents by torch's forward mode."""
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(x.detach().clone(), t)
            for x, t in zip(primals, tangents, strict=True)
        ]
        outs = [forward_ad.unpack_dual(x) for x in f(*duals) if has_derivative(x)]
        if all(tangent is None for _, tangent in outs):
            raise NotDifferentiable("no result depends on the inputs")
        values = [primal.detach() for primal, _ in outs]
        pushed = [torch.zeros_like(p) if t is None else t.detach().resolve_conj() for p, t in outs]
    return (*values, *pushed)


def torch_pushed_by_pulling(
    f: Function, primals: Sequence[Tensor], tangents: Sequence[Tensor]
) -> Results:
    """Return values and tangents by the pullback's derivative, if there is no forward formula."""
    inputs = [x.detach().clone().requires_grad_() for x in primals]
    outs = [x for x in f(*inputs) if has_derivative(x)]
    cotangents = [torch.zeros_like(x, requires_grad=True) for x in outs]
    pulled = torch_pulled(outs, inputs, cotangents, create_graph=True)
    if any(type(x.grad_fn).__name__ == "Error" for x in pulled):
        # The node of results of @once_differentiable; torch fills in zeros if cotangents are
        # unused.
        raise NotDifferentiable("its pullback has no derivative")
    pushed = torch_pulled(pulled, cotangents, list(tangents))
    return (*[x.detach() for x in outs], *pushed)


def _jvp(case: Case, *, ours: bool) -> Function:
    """Return a function of the tensors, followed by the tangents."""
    count, places = len(case.tensors), case.differentiable

    def pushforward(*given: Tensor) -> Results:
        tensors, tangents = given[:count], given[count:]
        primals = tuple(tensors[i] for i in places)

        def of_primals(*values: Tensor) -> Results:
            outs = case.call(*filled(tensors, places, values))
            return tuple(x for x in outs if has_derivative(x))

        if ours:
            values, pushed = tsfunc.jvp(of_primals, primals, tuple(tangents))
            return (*values, *pushed)
        if not case.forward:  # torch may need a tangent or raise where the pullback needs none
            try:
                return torch_pushed_by_pulling(of_primals, primals, tangents)
            except (NotImplementedError, RuntimeError):
                return torch_pushed(of_primals, primals, tangents)
        try:
            return torch_pushed(of_primals, primals, tangents)
        except NotImplementedError:
            return torch_pushed_by_pulling(of_primals, primals, tangents)

    return pushforward


def _with_tangents(case: Case, batch: Batch, inputs: Sequence[Tensor], which: str) -> Any:
    """Return the batch with tangents: both primals and tangents are batched, or one of them."""
    (dims,) = batch.dims
    places = case.differentiable
    tangents = [direction(inputs[i]) for i in places]
    bdims = [dims[i] for i in places]
    first = [x if d is None else x.select(d, 0) for x, d in zip(inputs, dims, strict=True)]
    none: list[int | None] = [None] * len(dims)
    if which == "primals":
        tangents, bdims = [direction(first[i]) for i in places], [None] * len(places)
    elif which == "tangents":
        inputs, dims = first, tuple(none)
    every = (*dims, *bdims)
    if all(dim is None for dim in every):
        raise NotDifferentiable("nothing is batched")
    given = (*inputs, *tangents)
    return Batch(given, (every,), batch.sizes), given


def forward_mode(which: str) -> Mode:
    """``vmap(jvp)``; ``batched`` is "both", "primals" or "tangents"."""

    def run(randomness: str = "same", **options: Any) -> Run:
        def ours(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
            both, given = _with_tangents(case, batch, inputs, which)
            return mapped(_jvp(case, ours=True), both, randomness, **options)(*given)

        return ours

    def plain(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
        both, given = _with_tangents(case, batch, inputs, which)
        return looped(_jvp(case, ours=False), both)(*given)

    name = "vmap(jvp)" if which == "both" else f"vmap(jvp), {which}"
    return _with_drawn(Mode(name, 1, run(), plain, run(**SPLIT), writes=False), run(DIFFERENT))


def _jvp_of_vmap(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
    places = case.differentiable
    primals = tuple(inputs[i] for i in places)

    def whole(*values: Tensor) -> Results:
        outs = mapped(case.call, batch, "same")(*filled(inputs, places, values))
        return tuple(x for x in outs if has_derivative(x))

    values, pushed = tsfunc.jvp(whole, primals, tuple(direction(x) for x in primals))
    return (*values, *pushed)


def _loop_of_jvp(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
    both, given = _with_tangents(case, batch, inputs, "both")
    return looped(_jvp(case, ours=False), both)(*given)


# Reverse mode with different cotangents for each example.


def _vjp(case: Case, *, ours: bool) -> Function:
    """Return a function of the tensors, followed by a factor of the cotangents."""
    places = case.differentiable

    def pullback(*given: Tensor) -> Results:
        *tensors, factor = given

        def of_inputs(*values: Tensor) -> Results:
            outs = case.call(*filled(tensors, places, values))
            return tuple(x for x in outs if has_derivative(x))

        if ours:
            outs, pull = tsfunc.vjp(of_inputs, *[tensors[i] for i in places])
            return pull(tuple((weights(x) * factor).to(x.dtype) for x in outs))
        inputs = leaves_of(tensors, places)
        results = of_inputs(*inputs)
        cotangents = [(weights(x) * factor).to(x.dtype) for x in results]
        return torch_pulled(results, inputs, cotangents)

    return pullback


def _with_cotangents(batch: Batch, inputs: Sequence[Tensor]) -> Any:
    """Return a batch that shares the tensors of one example, with a factor for each example."""
    (dims,) = batch.dims
    first = [x if d is None else x.select(d, 0) for x, d in zip(inputs, dims, strict=True)]
    given = (*first, torch.linspace(1, 2, batch.sizes[0], dtype=torch.float64))
    return Batch(given, ((*[None] * len(dims), 0),), batch.sizes), given


def _vmap_of_vjp(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
    both, given = _with_cotangents(batch, inputs)
    return mapped(_vjp(case, ours=True), both, "same")(*given)


def _loop_of_vjp(case: Case, batch: Batch, inputs: Sequence[Tensor]) -> Results:
    both, given = _with_cotangents(batch, inputs)
    return looped(_vjp(case, ours=False), both)(*given)


VMAP_GRAD = gradient_mode(1)
GRAD_VMAP = _with_drawn(
    Mode("grad(vmap)", 1, _grad_of_vmap(), _grad_of_loop, _grad_of_vmap(**SPLIT), writes=False),
    _grad_of_vmap(randomness=DIFFERENT),
)
VMAP_JVP = forward_mode("both")
VMAP_JVP_PRIMALS = forward_mode("primals")
VMAP_JVP_TANGENTS = forward_mode("tangents")
JVP_VMAP = Mode("jvp(vmap)", 1, _jvp_of_vmap, _loop_of_jvp, writes=False)
VMAP_VJP = Mode("vmap(vjp), cotangents", 1, _vmap_of_vjp, _loop_of_vjp, writes=False)
VMAP_VMAP_GRAD = gradient_mode(2)
VMAP_GRAD_GRAD = Mode("vmap(grad(grad))", 1, _vmap_second, _loop_second, writes=False)
SECOND = (second_mode("jvp(jvp)"), second_mode("grad(jvp)"), second_mode("jvp(grad)"))

MODES = (VMAP_GRAD, GRAD_VMAP, VMAP_JVP)  # those swept whole
FURTHER = (
    VMAP_JVP_PRIMALS, VMAP_JVP_TANGENTS, VMAP_VJP, JVP_VMAP, VMAP_VMAP_GRAD, VMAP_GRAD_GRAD,
)  # fmt: skip

TOLERANCES = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 1e-3,
    torch.complex64: 1e-3,
}


def differ(got: Results, want: Results) -> str:
    """Return the differences, relative to the largest number, since gradients are sums."""
    if len(got) != len(want):
        return f"{len(got)} results, not {len(want)}"
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.shape != w.shape or g.dtype is not w.dtype:
            return f"result {k}: {g.dtype} {tuple(g.shape)}, not {w.dtype} {tuple(w.shape)}"
        wide = torch.complex128 if w.is_complex() else torch.float64
        mine, theirs = g.detach().to(wide), w.detach().to(wide)
        known = theirs.abs().nan_to_num(0, 0, 0)
        tolerance = TOLERANCES.get(w.dtype, 0.06)
        scale = tolerance * max(1.0, float(known.max()) if known.numel() else 0.0)
        if not torch.allclose(mine, theirs, rtol=tolerance, atol=scale, equal_nan=True):
            return f"result {k}: off by {float((mine - theirs).abs().nan_to_num(1e99).max()):.3g}"
    return ""
