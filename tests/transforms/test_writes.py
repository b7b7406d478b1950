"""Batched values written into plain tensors that the function itself made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.func
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tsfunc
from tests.transforms.support import loop, same
from tsfunc import vmap

X = torch.arange(1.0, 13.0).view(3, 4).sin()
Y = torch.arange(8.0).view(2, 4).cos()
W = torch.arange(4.0).cos()

Write = Callable[[Tensor, Tensor], Any]


def test_a_result_that_is_filled_in() -> None:
    """The plain case: a tensor is made, and its elements are set one by one."""

    def func(x: Tensor) -> Tensor:
        out = torch.zeros(3)
        for i in range(3):
            out[i] = x[i] * x[i + 1]
        return out

    same(vmap(func)(X), X[:, :3] * X[:, 1:])


MADE: dict[str, Callable[[], Tensor]] = {
    "zeros": lambda: torch.zeros(4),
    "ones": lambda: torch.ones(4),
    "full": lambda: torch.full((4,), 2.0),
    "arange": lambda: torch.arange(4.0),
    "linspace": lambda: torch.linspace(0, 1, 4),
    "eye": lambda: torch.eye(4)[1],
    "tensor": lambda: torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "empty": lambda: torch.empty(4).fill_(1),
    "new_zeros": lambda: W.new_zeros(4),
    "zeros_like": lambda: torch.zeros_like(W),
    "empty_like": lambda: torch.empty_like(W).fill_(1),
    "clone": lambda: W.clone(),
    "an operator": lambda: W * 2,
    "stack": lambda: torch.stack([W[0], W[1], W[2], W[3]]),
    "every other of": lambda: torch.zeros(8)[::2],
    "integers": lambda: torch.arange(4),
    "complex": lambda: torch.zeros(4, dtype=torch.complex64),
}

WRITES: dict[str, Write] = {
    "item": lambda out, x: out.__setitem__(1, x[0]),
    "slice": lambda out, x: out.__setitem__(slice(1, 3), x[:2]),
    "all": lambda out, x: out.__setitem__(slice(None), x),
    "view": lambda out, x: out[1:].copy_(x[1:]),
    "view of a view": lambda out, x: out[1:][:2].copy_(x[1:3]),
    "one of several": lambda out, x: [row.copy_(v) for row, v in zip(out, x, strict=True)],
    "chunk": lambda out, x: out.chunk(2)[1].copy_(x[:2]),
    "detached": lambda out, x: out.detach().copy_(x),
    "data": lambda out, x: out.data.copy_(x),
    "mask, number": lambda out, x: out.__setitem__(x > 0, 1),
    "mask, value": lambda out, x: out.__setitem__(x > 0, x.sum().to(out.dtype)),
    "masked_fill_": lambda out, x: out.masked_fill_(x > 0, 3),
    "batched index": lambda out, x: out.__setitem__(x.argmax(), 7),
    "index_put_": lambda out, x: out.index_put_((torch.tensor([0, 2]),), x[:2].to(out.dtype)),
    "index_add_": lambda out, x: out.index_add_(0, x.argsort()[:1], x[:1].to(out.dtype)),
    "index_fill_": lambda out, x: out.index_fill_(0, x.argsort()[:1], 3),
    "scatter_": lambda out, x: out.scatter_(0, x.argsort(), x.to(out.dtype)),
    "copy_": lambda out, x: out.copy_(x),
    "fill_": lambda out, x: out.fill_(x[0]),
    "add_": lambda out, x: out.add_(x.to(out.dtype)),
    "+=": lambda out, x: out.__iadd__(x.to(out.dtype)),
    "out=": lambda out, x: torch.add(x.to(out.dtype), 1, out=out),
    "overload": lambda out, x: torch.ops.aten.add_.Tensor(out, x.to(out.dtype)),
    "overload packet": lambda out, x: torch.ops.aten.add_(out, x.to(out.dtype)),
    "by keyword": lambda out, x: torch.dropout_(p=0.0, train=False, input=out) + out.copy_(x),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("made", MADE)
def test_made_and_written(made: str, write: str) -> None:
    def func(x: Tensor) -> Tensor:
        out = MADE[made]()
        WRITES[write](out, x)
        return out

    same(vmap(func)(X), loop(func, 3)(X))


def filled(x: Tensor) -> Tensor:
    """Return a tensor written through itself, and through views taken before and after."""
    out = torch.zeros(3, 4)
    before = out[1]
    before.copy_(x.sin())
    out[0] = x
    out.T[1:, 2] = x[1:] ** 2
    out[2, :2] += x[0]
    return out.clone()


def test_derivatives_of_writes() -> None:
    weights = torch.arange(12.0).view(3, 4).cos()

    def scalar(x: Tensor) -> Tensor:
        return (filled(x) * weights).sum()

    want = torch.stack([torch.func.grad(scalar)(x) for x in X])
    same(vmap(tsfunc.grad(scalar))(X), want)
    same(tsfunc.grad(lambda x: vmap(scalar)(x).sum())(X), want)
    hessians = torch.stack([torch.func.hessian(scalar)(x) for x in X])
    same(vmap(tsfunc.hessian(scalar))(X), hessians)
    same(vmap(tsfunc.jacrev(tsfunc.jacrev(scalar)))(X), hessians)
    pushed = vmap(lambda x: tsfunc.jvp(filled, (x,), (x.cos(),)))(X)
    same(pushed, loop(lambda x: torch.func.jvp(filled, (x,), (x.cos(),)), 3)(X))


def test_made_outside_of_the_derivative_and_written_in_it() -> None:
    def func(grad: Any, x: Tensor) -> Tensor:
        out = torch.zeros(2, 4)
        view = out[1]

        def scalar(x: Tensor) -> Tensor:
            view.copy_(x**3)
            out[0] = x
            return out.prod(0).sum()

        return grad(scalar)(x)

    want = torch.stack([func(tsfunc.grad, x) for x in X])
    same(want, 4 * X**3)
    same(vmap(lambda x: func(tsfunc.grad, x))(X), want)


def test_differentiated_unbatched_tensors_are_written() -> None:
    """The tensor becomes batched in place, and autograd records at its level."""

    def by_weight(grad: Any, x: Tensor) -> Tensor:
        def scalar(w: Tensor) -> Tensor:
            out = torch.zeros(4)
            out[1:] = w[1:]
            return (out * x).sum() + out.square().sum()

        return grad(scalar)(W)

    want = torch.stack([by_weight(torch.func.grad, x) for x in X])
    same(vmap(lambda x: by_weight(tsfunc.grad, x))(X), want)

    def pushed(jvp: Any, x: Tensor) -> Tensor:
        def written(w: Tensor) -> Tensor:
            out = torch.zeros(2, 4)
            out[0] = w
            out[1] = out[0] ** 2
            return out * x

        return jvp(lambda w: jvp(written, (w,), (W,))[1], (W,), (W.sin(),))

    same(vmap(lambda x: pushed(tsfunc.jvp, x))(X), loop(lambda x: pushed(torch.func.jvp, x), 3)(X))
    same(pushed(tsfunc.jvp, W), pushed(torch.func.jvp, W))


def test_gradients_reach_the_source_tensors() -> None:
    weight = W.clone().requires_grad_()

    def func(x: Tensor) -> Tensor:
        out = weight * 2
        view = out[1:]
        view.mul_(x[1:])
        with torch.no_grad():
            out[0] = x[0]
        return (out * x).sum()

    def gradient(mapped: Any) -> Tensor:
        return torch.autograd.grad(mapped(func)(X).sum(), weight)[0]

    same(gradient(vmap), gradient(lambda f: loop(f, 3)))


def test_in_lists_dicts_and_modules() -> None:
    def func(x: Tensor) -> tuple[Tensor, ...]:
        rows = [torch.zeros(4) for _ in range(2)]
        rows[0][1] = x[0]
        rows[1][2:] = x[2:]
        table = {"a": torch.zeros(2)}
        table["a"][0] = x[1]
        layer = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            layer.weight.copy_(x[None])
        assert isinstance(layer.weight, nn.Parameter)
        assert list(layer.parameters()) == [layer.weight]
        return rows[0], rows[1], table["a"], layer(x)

    same(vmap(func, randomness="same")(X), loop(func, 3)(X))


def test_it_is_the_same_object_with_its_attributes() -> None:
    def func(x: Tensor) -> Tensor:
        out = torch.zeros(4)
        out.note = "mine"  # type: ignore[attr-defined]
        reference = weakref.ref(out)
        alias = out
        out += x
        assert alias is out and reference() is out and out.note == "mine"  # type: ignore[attr-defined]
        return alias

    same(vmap(func)(X), X)


def test_views_in_other_types_follow() -> None:
    def func(x: Tensor) -> tuple[Tensor, ...]:
        z = torch.zeros(4, dtype=torch.complex64)
        parts, conjugate, imaginary = torch.view_as_real(z), z.conj(), z.imag
        negative = conjugate.imag
        parts[1, 1] = x[1]
        z[0] = x[0]
        numbers = torch.zeros(4)
        bits = numbers.view(torch.int32)
        numbers[0] = x[0]
        bits[1] = 7
        resolved = conjugate.resolve_conj(), negative.resolve_neg()
        return z, parts, imaginary.clone(), numbers, bits, *resolved

    same(vmap(func)(X), loop(func, 3)(X))


def test_views_without_the_tensor_that_they_are_of() -> None:
    def func(x: Tensor) -> tuple[Tensor, ...]:
        whole = torch.zeros(6)
        left, right = whole[:4].detach(), whole[2:].detach()
        del whole
        left[:] = x
        one, other = torch.zeros(4, 4).unsafe_chunk(2)
        one[0] = x
        return left, right, one, other

    same(vmap(func)(X), loop(func, 3)(X))


def test_a_graph_keeps_its_saved_values() -> None:
    weight = W.clone().requires_grad_()

    def func(x: Tensor) -> Tensor:
        out = torch.ones(4)
        before = (weight * out).sum() + weight.sum() * out[1:].sum()
        out[0] = x[0]
        return before + out.sum()

    same(vmap(func)(X), loop(func, 3)(X))


# Tensors from outside


REFUSED: dict[str, tuple[str, Callable[[Tensor, Tensor], Any]]] = {
    "itself": ("w", lambda w, x: w.add_(x)),
    "a view": ("w", lambda w, x: w[1:].add_(x[1:])),
    "an item": ("w", lambda w, x: w.__setitem__(0, x[0])),
    "detached": ("w", lambda w, x: w.detach().copy_(x)),
    "its data": ("w", lambda w, x: w.data.copy_(x)),
    "out=": ("w", lambda w, x: torch.add(x, 1, out=w)),
    "a batched index": ("w", lambda w, x: w.index_fill_(0, x.argsort()[:1], 0.0)),
    "contiguous": ("w", lambda w, x: w.contiguous().copy_(x)),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("collected", [False, True])
def test_a_tensor_from_outside_is_refused_by_name(name: str, collected: bool) -> None:
    expected, write = REFUSED[name]
    weight = W.clone()

    def func(x: Tensor, w: Tensor) -> Tensor:
        if collected:
            gc.collect()
        write(w, x)
        return x

    message = rf"vmap\(func\): \w+ writes values that differ .* `{expected}` \(shape .*made outside"
    with pytest.raises(RuntimeError, match=message) as caught:
        vmap(func, in_dims=(0, None))(X, weight)
    assert "w.clone()" in str(caught.value) and "in_dims" in str(caught.value)
    same(weight, W)


def test_where_the_function_finds_it() -> None:
    weight, rows = W.clone(), {"first": W.clone()}
    model = nn.Linear(4, 4)
    holder = nn.BatchNorm1d(4)

    class Config:
        offset = W.clone()

    config = Config()
    config.offset = W.clone()
    cases: list[tuple[str, Callable[[Tensor], Any]]] = [
        ("weight", lambda x: weight.add_(x)),
        (r"rows\['first'\]", lambda x: rows["first"].add_(x)),
        (r"model\.bias", lambda x: model.bias.detach().add_(x)),
        (r"holder\.running_mean", lambda x: next(holder.buffers()).add_(x)),
        (r"config\.offset", lambda x: config.offset.add_(x)),
        ("W", lambda x: W.add_(x)),
    ]
    for name, func in cases:
        with pytest.raises(RuntimeError, match=rf" `{name}` \(shape"):
            vmap(func)(X)


def test_memory_that_others_have_is_from_outside() -> None:
    weight = W.clone().requires_grad_()
    (weight * 2).sum().backward()
    array = np.zeros(4, dtype=np.float32)
    foreign: list[Callable[[Tensor], Any]] = [
        lambda x: weight.grad.add_(x),  # type: ignore[union-attr]
        lambda x: torch.from_numpy(array).add_(x),
        lambda x: torch.as_tensor(array).add_(x),
    ]
    for func in foreign:
        with pytest.raises(RuntimeError, match="made outside of the function"):
            vmap(func)(X)
    assert weight.grad is not None and not array.any()
    same(weight.grad, torch.full((4,), 2.0))


def test_a_captured_one_that_derivatives_would_be_lost_in() -> None:
    buffer = torch.zeros(4)

    def scalar(w: Tensor) -> Tensor:
        buffer.copy_(w)
        return buffer.sum()

    with pytest.raises(RuntimeError, match=r"differentiated into `buffer`.*its derivative wou"):
        vmap(lambda x: tsfunc.grad(scalar)(W) * x)(X)


def test_a_leaf_is_refused_as_torch_refuses_it() -> None:
    def func(x: Tensor) -> Tensor:
        leaf = torch.zeros(4, requires_grad=True)
        leaf[0] = x[0]
        return leaf

    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        func(W)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        vmap(func)(X)


def test_overlapping_remains_are_refused() -> None:
    def func(x: Tensor) -> Tensor:
        whole = torch.zeros(8)
        left, right = whole[:5].detach().requires_grad_(), whole[3:].detach()
        del whole
        right[0] = x[0]
        return left

    with pytest.raises(RuntimeError, match="shares memory with other views of a tensor that is go"):
        vmap(func)(X)


# Nested


def nested(func: Callable[[Tensor, Tensor], Any]) -> None:
    same(
        vmap(lambda x: vmap(lambda y: func(x, y))(Y))(X),
        loop(lambda x: loop(lambda y: func(x, y), 2)(Y), 3)(X),
    )


def test_made_and_written_in_the_inner_one() -> None:
    def func(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        out = torch.zeros(4)
        view = out[1:]
        out.add_(x)
        view.mul_(y[1:])
        out[0] = y[0]
        later = torch.zeros(4)
        later[1] = (x * y).sum()
        return out, view, later

    nested(func)


def test_made_of_the_outer_ones_values() -> None:
    def func(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        made = x * 2
        view, turned = made[1:], x.view(2, 2).T * 1
        alias = made.detach()
        view.mul_(y[1:])
        made[0] = y[0]
        turned[1, 0] = y[1]
        return made, view, alias, turned

    nested(func)
    same(
        vmap(lambda x: vmap(lambda y: func(x, y))(Y), in_dims=1)(X.T),
        loop(lambda x: loop(lambda y: func(x, y), 2)(Y), 3)(X),
    )


def test_made_in_the_outer_one_and_written_with_its_values_in_the_inner() -> None:
    def func(x: Tensor) -> Tensor:
        out = torch.zeros(4)

        def inner(y: Tensor) -> Tensor:
            out.copy_(x)
            return out * y

        return vmap(inner)(Y)

    same(vmap(func)(X), X[:, None] * Y)


OUTER: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "plain": lambda out, x, y: out.add_(y),
    "made batched by the outer one inside": lambda out, x, y: out.add_(x).add_(y),
    "through a view": lambda out, x, y: (out.add_(x), out[1:].add_(y[1:])),
    "the outer one's input": lambda out, x, y: x.add_(y),
}


@pytest.mark.parametrize("name", OUTER)
def test_made_in_the_outer_one_and_written_by_the_inner_is_refused(name: str) -> None:
    def func(x: Tensor) -> Tensor:
        out = torch.zeros(4)

        def inner(y: Tensor) -> Tensor:
            OUTER[name](out, x, y)
            return y

        return vmap(inner)(Y)

    with pytest.raises(RuntimeError, match=r"vmap\(inner\): add_ writes .*made outside"):
        vmap(func)(X.clone())


def test_inside_of_a_program() -> None:
    def func(x: Tensor) -> tuple[Tensor, ...]:
        out = torch.zeros(2, 4)
        view = out[1]
        view.copy_(x)
        out[0, 1:] = x[1:] * 2
        made = torch.arange(4.0).view(2, 2)
        made.T[0] += x[:2]
        return out, view, made

    mapped = vmap(func)
    want = loop(func, 3)(X)
    same(tsfunc.specialize(mapped)(X), want)
    named = tsfunc.specialize(mapped, {"x": tsfunc.MetaTensorType(shape=["n", 4])})
    same(named(X), want)
    same(named(X.repeat(2, 1)), loop(func, 6)(X.repeat(2, 1)))
    same(vmap(tsfunc.specialize(func))(X), want)


def test_two_vmaps_inside_of_a_program() -> None:
    """A traced tensor that the outer vmap made a tracer becomes a tracer of the inner one, too."""

    def func(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros(4)
        out[0] = x.sum()
        view = out[1:]
        view.mul_(2).add_(y[1:] * x[1:])
        return out, view

    def mapped(x: Tensor) -> Any:
        return vmap(lambda y: func(x, y))(Y)

    want = loop(lambda x: loop(lambda y: func(x, y), len(Y))(Y), len(X))(X)
    same(vmap(mapped)(X), want)
    same(tsfunc.specialize(vmap(mapped))(X), want)
    same(vmap(tsfunc.specialize(mapped))(X), want)


def test_a_tensor_that_a_program_reads_is_from_outside() -> None:
    weight = W.clone()
    with pytest.raises(RuntimeError, match="made outside"):
        tsfunc.specialize(vmap(lambda x: weight.add_(x)))(X)


def test_operators_that_write_into_new_tensors() -> None:
    same(vmap(lambda x: torch.vander(x, 3))(X), torch.stack([torch.vander(x, 3) for x in X]))

    def diagonal(x: Tensor) -> Tensor:
        return torch.block_diag(x.view(2, 2), W[None], x)

    same(vmap(diagonal)(X), loop(diagonal, 3)(X))


# Random programs

SHAPES = ((6,), (2, 3), (3, 2), (1, 6), (2, 1, 3))
MAKERS: Sequence[Callable[[tuple[int, ...], Tensor], Tensor]] = (
    lambda shape, w: torch.zeros(shape),
    lambda shape, w: torch.arange(6.0).reshape(shape),
    lambda shape, w: w.reshape(shape) * 2,
    lambda shape, w: w.reshape(shape).clone(),
)
VIEWS: Sequence[Callable[[Tensor], Tensor]] = (
    lambda t: t[0],
    lambda t: t[..., -1],
    lambda t: t[1:],
    lambda t: t[..., ::2],
    lambda t: t.transpose(0, -1),
    lambda t: t.unsqueeze(0),
    lambda t: t.flatten(),
    lambda t: t.unbind(0)[-1],
    lambda t: t.diagonal(dim1=0, dim2=-1) if t.dim() > 1 else t.detach(),
    lambda t: t.detach(),
    lambda t: t * 2,
    lambda t: t.as_strided((2,), (1,), t.storage_offset()),
)


def like(x: Tensor, target: Tensor) -> Tensor:
    """Return as many of the example's values as the target has, in its shape."""
    return x[: target.numel()].reshape(target.shape)


CHANGES: Sequence[Write] = (
    lambda t, x: t.copy_(like(x, t)),
    lambda t, x: t.add_(like(x, t)),
    lambda t, x: t.mul_(x[0]),
    lambda t, x: t.add_(1.5),
    lambda t, x: t.masked_fill_(like(x, t) > 0, 0.5),
    lambda t, x: t.__setitem__(like(x, t) > 0, x[1]),
    lambda t, x: t.__setitem__(0, x[2]),
    lambda t, x: t.__setitem__(Ellipsis, -t),
    lambda t, x: t.fill_(x[3]),
)

steps = st.lists(
    st.tuples(st.sampled_from("vvwwwm"), st.integers(0, 99), st.integers(0, 99)),
    min_size=2,
    max_size=10,
)


# If as_strided reaches elements outside of its input, torch has two gradients: by all elements
# after the base was written to, and by the input's own before. For a tensor without storage C++ has
# the second alone, so the differentiated views stay within their input.
WITHIN = (*VIEWS[:-1], lambda t: t.as_strided((2,), (t.stride(0),), t.storage_offset()))


def run(
    program: Sequence[tuple[str, int, int]],
    x: Tensor,
    w: Tensor,
    views: Sequence[Callable[[Tensor], Tensor]] = VIEWS,
) -> tuple[Tensor, ...]:
    """Make tensors, take views of them and write into them, by the given steps.

    A detached part of a tensor has no base. If a view of it reaches elements outside of it, no
    tensor covers both, and a write is refused (the test below).
    """
    tensors = [torch.zeros(6)]
    detached_parts: set[int] = set()
    for kind, which, how in program:
        target = tensors[which % len(tensors)]
        if kind == "m":
            shape = SHAPES[which % len(SHAPES)]
            tensors.append(MAKERS[how % len(MAKERS)](shape, w))
        elif kind == "v" and target.dim() and target.numel() > 1 and target.shape[0] > 1:
            place, view = which % len(tensors), how % len(views)
            is_part = place in detached_parts
            tensors.append((WITHIN if is_part else views)[view](target))
            detaches = view == 9 or (view == 8 and target.dim() < 2)
            if (is_part and view != 10) or (detaches and target.numel() < 6):
                detached_parts.add(len(tensors) - 1)
        elif kind == "w" and target.dim():
            CHANGES[how % len(CHANGES)](target, x)
    return tuple(tensors)


@given(steps, st.integers(0, 1), st.booleans())
@settings(deadline=None, max_examples=150)
def test_random_programs_equal_the_loop(program: Any, dim: int, collect: bool) -> None:
    x = torch.arange(1.0, 25.0).view(4, 6).sin()
    weight = torch.arange(6.0).cos()

    def func(x: Tensor) -> tuple[Tensor, ...]:
        if collect:
            gc.collect(0)
        return run(program, x, weight)

    want = loop(func, 4)(x)
    same(vmap(func, in_dims=dim)(x.movedim(0, dim)), want)
    same(vmap(vmap(func))(x.view(2, 2, 6)), tuple(t.view(2, 2, *t.shape[1:]) for t in want))


def test_a_view_that_reaches_out_of_a_detached_part_is_refused() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        whole = torch.zeros(6)
        part = whole[::2].detach()
        both = part.as_strided((2,), (1,), 0)
        whole.copy_(x)
        return whole, part, both

    with pytest.raises(RuntimeError, match="can't all become batched"):
        vmap(f)(torch.ones(4, 6))


def test_repeated_writes_into_a_detached_view_are_differentiated() -> None:
    """The second write had a view of a tensor that autograd took for a leaf."""

    def scalar(x: Tensor) -> Tensor:
        base = torch.zeros(6)
        view = base[1:3]
        part = view.detach()
        part[0] = x[2]
        part.mul_(x[0])
        assert part.storage_offset() == 1
        return (part + 1).sin().sum() + (view * x[:2]).sum()

    x = torch.arange(1.0, 19.0).view(3, 6).sin()
    want = torch.stack([torch.autograd.functional.jacobian(scalar, one) for one in x])
    same(tsfunc.grad(lambda x: vmap(scalar)(x).sum())(x), want)


@given(steps)
@settings(deadline=None, max_examples=80)
def test_random_programs_differentiated(program: Any) -> None:
    x = torch.arange(1.0, 19.0).view(3, 6).sin()
    weight = torch.arange(6.0).cos()

    def scalar(x: Tensor, w: Tensor) -> Tensor:
        parts = run(program, x, w, WITHIN)
        return sum(((p + 1).sin().sum() for p in parts), x.sum() + w.sum())

    try:
        wants = [torch.autograd.functional.jacobian(scalar, (one, weight)) for one in x]
    except RuntimeError:  # torch's autograd refuses it, too
        assume(False)
    want = tuple(torch.stack(parts) for parts in zip(*wants, strict=True))
    both = tsfunc.grad(scalar, argnums=(0, 1))
    same(vmap(both, in_dims=(0, None))(x, weight), want)
    total = tsfunc.grad(lambda x, w: vmap(scalar, (0, None))(x, w).sum(), argnums=(0, 1))
    same(total(x, weight), (want[0], want[1].sum(0)))
