"""autograd.Function: every level uses its backward, whatever the derivative of its forward."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
from torch import Tensor

import tsfunc
from tests.transforms.support import Api, as_torch_func, same
from tsfunc.errors import DataDependentError

X = torch.arange(12.0).view(3, 4).sin()
W = torch.arange(4.0).cos()
S = torch.tensor(0.7)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    # Not the derivative, so that a result shows which rule ran.
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 4.5 * x**2

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return t * 7 * x

    generate_vmap_rule = True


class WithVmap(Cube):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return Cube.apply(x) * info.batch_size, in_dims[0]  # type: ignore[no-untyped-call]


class Clipped(torch.autograd.Function):
    """Two inputs, one of them not a tensor; two outputs, one without a derivative."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, limit: float) -> tuple[Tensor, Tensor]:
        return (x * w).clamp(max=limit), x > limit

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, ctx.limit = inputs
        ctx.save_for_backward(x, w)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        x, w = ctx.saved_tensors
        return g * w * ctx.limit, (g * x).sum() if w.dim() == 0 else g * x, None

    generate_vmap_rule = True


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = 4.5
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * ctx.factor * x**2


def total(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: func(*args).sum()


FUNCTIONS: dict[str, Callable[[Api, Any], Any]] = {
    "vmap": lambda T, f: T.vmap(f)(X),
    "vmap(vmap)": lambda T, f: T.vmap(T.vmap(f))(X),
    "grad": lambda T, f: T.grad(total(f))(W),
    "vmap(grad)": lambda T, f: T.vmap(T.grad(total(f)))(X),
    "grad(vmap)": lambda T, f: T.grad(total(T.vmap(f)))(X),
    "grad(vmap(vmap))": lambda T, f: T.grad(total(T.vmap(T.vmap(f))))(X),
    "grad(grad)": lambda T, f: T.grad(total(T.grad(total(f))))(W),
    "grad(vmap(grad))": lambda T, f: T.grad(total(T.vmap(T.grad(total(f)))))(X),
    "vmap(grad(vmap))": lambda T, f: T.vmap(T.grad(total(T.vmap(f))))(X),
    "grad(vmap(grad(vmap)))": lambda T, f: T.grad(total(T.vmap(T.grad(total(T.vmap(f))))))(X),
    "vmap(grad(grad))": lambda T, f: T.vmap(T.grad(total(T.grad(total(f)))))(X),
    "jacrev": lambda T, f: T.jacrev(f)(W),
    "jacrev(jacrev)": lambda T, f: T.jacrev(T.jacrev(f))(W),
    "jvp": lambda T, f: T.jvp(f, (W,), (W,)),
    "vmap(jvp)": lambda T, f: T.vmap(lambda x: T.jvp(f, (x,), (x,)))(X),
    "jvp(vmap)": lambda T, f: T.jvp(T.vmap(f), (X,), (X,)),
    "jacfwd": lambda T, f: T.jacfwd(f)(W),
    "grad(jvp)": lambda T, f: T.grad(lambda x: T.jvp(f, (x,), (x,))[1].sum())(W),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("cls", [Cube, WithVmap])
def test_custom_function(cls: Any, name: str) -> None:
    as_torch_func(lambda T: FUNCTIONS[name](T, cls.apply))


@pytest.mark.parametrize("at", [0, None])
def test_custom_function_of_several(at: int | None) -> None:
    w = W[:3] if at == 0 else S

    def build(T: Api) -> Any:
        mapped = T.vmap(lambda x, w: Clipped.apply(x, w, 0.4), in_dims=(0, at))  # type: ignore[no-untyped-call]
        value = mapped(X[:, :3], w)
        grads = T.grad(lambda x, w: mapped(x, w)[0].sum(), argnums=(0, 1))(X[:, :3], w)
        inner = T.grad(lambda x, w: Clipped.apply(x, w, 0.4)[0].sum(), argnums=(0, 1))  # type: ignore[no-untyped-call]
        return value, grads, T.vmap(inner, in_dims=(0, at))(X[:, :3], w)

    as_torch_func(build)


def test_custom_function_and_backward() -> None:
    for cls in (Cube, OldStyle):
        leaf = X.clone().requires_grad_()
        tsfunc.vmap(cls.apply)(leaf).sum().backward()
        same(leaf.grad, 4.5 * X**2)


def test_old_style_custom_function() -> None:
    f = OldStyle.apply
    same(tsfunc.vmap(f)(X), X**3)
    same(tsfunc.vmap(tsfunc.grad(total(f)))(X), 4.5 * X**2)
    same(tsfunc.grad(total(tsfunc.vmap(f)))(X), 4.5 * X**2)
    same(tsfunc.grad(total(tsfunc.vmap(tsfunc.vmap(f))))(X), 4.5 * X**2)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "j" not in name])
def test_old_style_at_several_levels(name: str) -> None:
    """It has the derivative of the new-style class, which torch.func supports."""
    same(FUNCTIONS[name](tsfunc, OldStyle.apply), FUNCTIONS[name](torch.func, Cube.apply))


def test_a_method_taken_before_the_first_transform() -> None:
    """``f = MyFunction.apply`` at the head of a module is the usual form."""
    code = """
        import torch
        class Tripled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()
            @staticmethod
            def backward(ctx, g):
                return g * 3
        tripled = Tripled.apply
        import tsfunc
        grad = tsfunc.grad(lambda x: tsfunc.vmap(tripled)(x).sum())(torch.zeros(2))
        torch.testing.assert_close(grad, torch.tensor([3., 3.]))
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


class Two(torch.autograd.Function):
    """A function with two results, one of which does not depend on the first argument."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x * w, 2 * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w, g * x + 2 * h

    generate_vmap_rule = True


def test_an_argument_and_a_result_that_are_not_batched() -> None:
    """Each example has its part in the gradient (torch.func counts the second result thrice)."""
    x, w = torch.arange(1.0, 4), S

    def both(map: Any) -> Any:
        return lambda x, w: sum(out.sum() for out in map(x, w))

    def looped(x: Tensor, w: Tensor) -> list[Tensor]:
        return [torch.stack(outs) for outs in zip(*[Two.apply(one, w) for one in x], strict=True)]  # type: ignore[no-untyped-call]

    got = tsfunc.grad(both(tsfunc.vmap(Two.apply, in_dims=(0, None))), argnums=(0, 1))(x, w)
    same(got, tsfunc.grad(both(looped), argnums=(0, 1))(x, w))


class Broadcast(Two):
    """A function that leaves broadcast sums to the engine, and ignores the cotangent's value."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        _, w = ctx.saved_tensors
        return g * w, torch.ones(w.shape)


def test_gradients_are_summed_to_the_shapes_of_one_example() -> None:
    x, w = X, X[:, :2, None]
    f = Broadcast.apply
    loop = tsfunc.grad(lambda x, w: sum(f(x[i], w[i]).sum() for i in range(3)), argnums=(0, 1))  # type: ignore[no-untyped-call]
    got = tsfunc.grad(lambda x, w: tsfunc.vmap(f)(x, w).sum(), argnums=(0, 1))(x, w)
    same(got, loop(x, w))
    alone = tsfunc.grad(lambda w: tsfunc.vmap(f, in_dims=(0, None))(x, w).sum())(S)
    same(alone, torch.tensor(3.0))


def test_custom_function_marks_dirty() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    f = total(lambda x: Doubled.apply(x.clone()))  # type: ignore[no-untyped-call]
    same(tsfunc.grad(total(tsfunc.vmap(f)))(X), torch.full_like(X, 2))
    same(tsfunc.vmap(tsfunc.grad(f))(X), torch.full_like(X, 2))
    same(
        tsfunc.grad(total(tsfunc.vmap(tsfunc.grad(lambda x: f(x) * f(x)))))(X),
        torch.full_like(X, 32),
    )


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x.exp_())
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return g * y


def written(x: Tensor) -> Any:
    y = x.clone()
    view = y.view(-1)
    z = Exp.apply(y)  # type: ignore[no-untyped-call]
    return (y + 2 * z + view).sum()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: tsfunc.specialize(tsfunc.vmap(f)),
        lambda f: tsfunc.vmap(tsfunc.specialize(f)),
        lambda f: tsfunc.specialize(tsfunc.vmap(tsfunc.checkpoint(f))),
    ],
    ids=["specialize(vmap)", "vmap(specialize)", "checkpoint"],
)
def test_programs_of_functions_that_write_to_an_argument(wrap: Any) -> None:
    kept = W.clone()
    expected = 4 * W.exp()
    torch.testing.assert_close(wrap(written)(W), expected)
    torch.testing.assert_close(wrap(tsfunc.grad(written))(W), expected)
    torch.testing.assert_close(wrap(tsfunc.grad(tsfunc.grad(written)))(W), expected)
    torch.testing.assert_close(tsfunc.grad(total(wrap(written)))(W), expected)
    assert W.equal(kept)


def test_a_program_writes_to_the_callers_argument_as_the_function_does() -> None:
    x = torch.tensor([0.0, 1.0])
    found = tsfunc.specialize(lambda x: Exp.apply(x))(x)  # type: ignore[no-untyped-call]
    assert found.equal(x) and x.equal(torch.tensor([0.0, 1.0]).exp())


def of_rule(rule: Callable[..., Any], generate: bool = False) -> Any:
    """Return an autograd.Function with the given vmap staticmethod."""

    class Ruled(torch.autograd.Function):
        generate_vmap_rule = generate

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return inputs[0] * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            return rule(info, in_dims, *args)

    return Ruled


def test_its_own_rule_gets_values_and_dims_of_containers() -> None:
    """As in torch: the structure of the arguments, with an entry for each tensor."""
    seen: list[Any] = []

    def rule(info: Any, in_dims: Any, x: Tensor, others: Any, flag: bool) -> Any:
        seen.append((info.batch_size, info.randomness, in_dims, flag))
        return (x + others[0].T, {"second": others[1]["y"]}), (0, {"second": None})

    apply = of_rule(rule).apply
    first, rest = tsfunc.vmap(lambda x, z: apply(x, [z, {"y": W}], True), in_dims=(0, -1))(X, X.T)
    assert seen == [(3, "error", (0, [1, {"y": None}], None), True)]
    same(first, X + X)
    same(rest["second"], W.expand(3, 4))


def _recording_backward(kept: list[Tensor], apply: Any) -> Any:
    """Return a Function whose backward passes its cotangent to ``apply``, and keeps the result."""

    class Recording(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.detach()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            kept.append(apply(g, [W], True))
            return g

    return Recording


@pytest.mark.parametrize("inside_of_backward", [False, True])
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("lib", [torch.func, tsfunc], ids=lambda lib: lib.__name__)
def test_a_result_that_its_rule_does_not_batch_outlives_the_vmap(
    lib: Any, levels: int, inside_of_backward: bool
) -> None:
    """Libraries gather such results in lists while a vmap of ``torch.autograd.grad`` runs."""
    kept: list[Tensor] = []

    def rule(info: Any, in_dims: Any, x: Tensor, others: Any, flag: bool) -> Any:
        return x.sum(in_dims[0]) + others[0], None

    apply = of_rule(rule).apply
    x = X.clone().requires_grad_()
    y = _recording_backward(kept, apply).apply(x.sin())

    def pull(g: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, g, retain_graph=True)[0]

    def call(g: Tensor) -> Tensor:
        if inside_of_backward:
            return pull(g)
        kept.append(apply(g, [W], True))
        return g

    rows = torch.stack([X, X.cos(), X.exp()])
    if levels == 1:
        got = lib.vmap(call)(rows)
        same(kept, [rows.sum(0) + W])
    else:
        got = lib.vmap(lambda one: lib.vmap(lambda k: call(one * k))(torch.ones(2)))(rows)[:, 0]
        with pytest.raises(RuntimeError, match="escaped"):  # the inner rule's, batched outside
            kept[0] + 1
    same(got, torch.stack([pull(g) for g in rows]) if inside_of_backward else rows)


RULES: list[tuple[Any, str]] = [
    (
        of_rule(lambda info, in_dims, x: (x, 0), generate=True),
        "vmap: Ruled has generate_vmap_rule=True and a vmap staticmethod: which of them is meant "
        "can't be told. Remove one.",
    ),
    (
        of_rule(lambda info, in_dims, x: x),
        "vmap: the vmap staticmethod of Ruled is expected to have two returns, (output, out_dims), "
        "got a Tensor.",
    ),
    (of_rule(lambda info, in_dims, x: (x, x, 0, 0)), "to have two returns, (output, out_dims), "),
    (
        of_rule(lambda info, in_dims, x: (x, (0,))),
        "vmap: the vmap staticmethod of Ruled returned an incompatible (output, out_dims): "
        "out_dims (0,) are not a prefix of the structure of the output, *.",
    ),
    (of_rule(lambda info, in_dims, x: ([x], (None,))), "returned an incompatible (output, out"),
]


@pytest.mark.parametrize(("cls", "message"), RULES, ids=range(len(RULES)))
def test_a_rule_that_is_not_well_formed(cls: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        tsfunc.vmap(cls.apply)(X)


class Times(torch.autograd.Function):
    """A function with all derivatives."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return g * y, g * x

    @staticmethod
    def jvp(ctx: Any, s: Tensor, t: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return s * y + t * x

    generate_vmap_rule = True


SECOND: dict[str, Callable[[Any], Any]] = {
    "jvp(jvp)": lambda f: tsfunc.jvp(lambda x: tsfunc.jvp(f, (x,), (W,))[1], (W,), (W,)),
    "jvp(grad)": lambda f: tsfunc.jvp(tsfunc.grad(f), (W,), (W,)),
    "jacfwd(jacfwd)": lambda f: tsfunc.jacfwd(tsfunc.jacfwd(f))(W),
    "vmap(jvp(jvp))": lambda f: tsfunc.vmap(
        lambda x: tsfunc.jvp(lambda y: tsfunc.jvp(f, (y,), (W,))[1], (x,), (x,))
    )(X),
    "jvp(vmap(jvp))": lambda f: tsfunc.jvp(
        tsfunc.vmap(lambda x: tsfunc.jvp(f, (x,), (W,))[1]), (X,), (X,)
    ),
}


@pytest.mark.parametrize("name", SECOND)
def test_tangents_of_tangents(name: str) -> None:
    """torch.func has zeros there: torch switches forward mode off for a Function's methods."""

    def f(x: Tensor) -> Tensor:
        return Times.apply(x, x.sin()).sum()  # type: ignore[no-untyped-call]

    same(SECOND[name](f), SECOND[name](lambda x: (x * x.sin()).sum()))


def test_forward_mode_without_a_jvp() -> None:
    """The tangent is the derivative of the pullback, as for an operator without a formula."""
    for f in (OldStyle.apply, lambda x: Two.apply(x, x)[0]):  # type: ignore[no-untyped-call]
        want = tsfunc.vjp(f, W)[1](torch.ones(4))[0]
        same(tsfunc.jvp(f, (W,), (torch.ones(4),))[1], want)
        same(tsfunc.vmap(lambda x, f=f: tsfunc.jvp(f, (x,), (x,))[1])(W), want * W)


def test_results_that_forward_makes_of_numbers() -> None:
    class Number(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.tensor(x.item() ** 2)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 5

    def pulled(c: Tensor) -> Any:
        _, pull = tsfunc.vjp(lambda x: Number.apply(x) * c, S)  # type: ignore[no-untyped-call]
        return pull(torch.ones(()))[0]

    same(tsfunc.vmap(pulled)(W), W * 5)


def of_a_branch(f: Any) -> Any:
    return lambda x: tsfunc.cond(torch.tensor(True), f, lambda y: f(y), x)


@pytest.mark.parametrize(
    ("cls", "wrap"),
    [(Cube, lambda f: f), (Cube, of_a_branch), (WithVmap, lambda f: f)],
    ids=["itself", "in a branch", "with a rule"],
)
def test_programs_of_mapped_functions_keep_their_derivatives(cls: Any, wrap: Any) -> None:
    """The vmap and the derivative may be inside of the program, or outside."""
    grad, vmap, program = tsfunc.grad, tsfunc.vmap, tsfunc.specialize
    x, f = X[0], cls.apply

    def total(f: Any) -> Any:
        return lambda x: f(x).sum()

    made = wrap(f)
    same(program(vmap(grad(made)))(x), vmap(grad(f))(x))
    same(vmap(grad(program(made)))(x), vmap(grad(f))(x))
    want = grad(total(vmap(f)))(x)
    same(program(grad(total(vmap(made))))(x), want)
    same(grad(total(program(vmap(made))))(x), want)
    same(grad(program(total(vmap(made))))(x), want)
    twice = grad(total(vmap(grad(f))))(x)
    same(grad(program(total(vmap(grad(made)))))(x), twice)
    pushed = tsfunc.jvp(vmap(f), (x,), (W,))[1]
    same(program(lambda x: tsfunc.jvp(vmap(made), (x,), (W,))[1])(x), pushed)
    same(tsfunc.jvp(program(vmap(made)), (x,), (W,))[1], pushed)
    same(program(vmap(vmap(made)))(X), vmap(vmap(f))(X))


class Through(torch.autograd.Function):
    """Returns its argument, with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0].cos()


def test_a_function_that_returns_its_argument() -> None:
    f, x = Through.apply, X[0]
    for found in (
        tsfunc.vmap(tsfunc.grad(f))(x),
        tsfunc.grad(lambda x: tsfunc.vmap(f)(x).sum())(x),
        tsfunc.specialize(tsfunc.vmap(tsfunc.grad(f)))(x),
        tsfunc.jvp(tsfunc.vmap(f), (x,), (torch.ones_like(x),))[1],
    ):
        same(found, x.cos())


def test_the_graph_of_an_outer_level_goes_through_a_function_of_an_inner_one() -> None:
    """The function's inner call has a tensor of the outer vmap alone, which is differentiated."""

    def f(x: Tensor) -> Any:
        def inner(y: Tensor) -> Any:
            return (OldStyle.apply(x) * y).sum()  # type: ignore[no-untyped-call]

        return tsfunc.vmap(inner)(W).sum()

    expected = torch.stack(
        [tsfunc.grad(lambda x: (OldStyle.apply(x) * W.sum()).sum())(x) for x in X]  # type: ignore[no-untyped-call]
    )
    torch.testing.assert_close(tsfunc.vmap(tsfunc.grad(f))(X), expected)


@pytest.mark.parametrize("order", [1, 2])
def test_programs_of_checkpointed_derivatives_of_mapped_functions(order: int) -> None:
    f = total(lambda x: OldStyle.apply(x))  # type: ignore[no-untyped-call]
    for _ in range(order):
        f = tsfunc.grad(f)
    found = tsfunc.specialize(tsfunc.vmap(tsfunc.checkpoint(f)))(W)
    torch.testing.assert_close(found, [4.5 * W**2, 9 * W][order - 1])


class _KeywordOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return cotangents[0], cotangents[0]


class _KeywordOnlyWithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, *, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return cotangents[0], cotangents[0]


@pytest.mark.parametrize("cls", [_KeywordOnly, _KeywordOnlyWithSetup])
@pytest.mark.parametrize(
    "transform", [tsfunc.vmap, lambda f: tsfunc.grad(lambda x: f(x).sum()), tsfunc.specialize]
)
def test_a_keyword_only_argument_is_an_error_that_names_the_function(
    cls: Any, transform: Any
) -> None:
    x = torch.rand(3)
    with pytest.raises(TypeError, match=rf"{cls.__name__}\.apply: .* got 'y' by keyword"):
        transform(lambda x: cls.apply(x, y=x))(x)


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y**2

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return cotangents[0] * y**2, cotangents[0] * 3 * x * y  # not the derivative of forward


def test_arguments_by_keyword_are_those_by_position() -> None:
    """Each level of a transform uses the class's derivative for both forms of the call."""
    x, y = torch.rand(2, 3, 4)

    def of(call: Callable[[Tensor, Tensor], Tensor]) -> Any:
        one = tsfunc.grad(lambda x, y: call(x, y).sum(), argnums=(0, 1))
        return tsfunc.grad(lambda x: tsfunc.vmap(call)(x, y).sum())(x), tsfunc.vmap(one)(x, y)

    apply: Any = _Weighted.apply
    same(of(lambda x, y: apply(x, y=y)), of(apply))
    same(of(lambda x, y: apply(y=y, x=x)), of(apply))
    same(apply(x, y=y), x * y**2)


class _OfNumPy(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.as_tensor(x.detach().numpy() ** 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return 2 * cotangents[0] * ctx.saved_tensors[0]


class _Nested(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Any:
        apply: Any = _OfNumPy.apply
        return apply(x)

    setup_context = _OfNumPy.setup_context
    backward = _OfNumPy.backward


@pytest.mark.parametrize("cls", [_OfNumPy, _Nested])
@pytest.mark.parametrize(
    "transform",
    [
        tsfunc.vmap, lambda f: tsfunc.vmap(tsfunc.grad(f)),
        lambda f: tsfunc.grad(lambda x: tsfunc.vmap(f)(x).sum()),
    ],
    ids=["vmap", "vmap of grad", "grad of vmap"],
)  # fmt: skip
def test_a_function_without_a_vmap_rule_that_reads_values_is_named(
    cls: Any, transform: Any
) -> None:
    x = torch.rand(3)
    message = r"_OfNumPy has no vmap rule.*vmap staticmethod.*generate_vmap_rule"
    with pytest.raises(DataDependentError, match=message):
        transform(cls.apply)(x)


def test_a_function_that_reads_values_runs_on_groups_of_examples() -> None:
    x, apply = torch.rand(3), _OfNumPy.apply
    same(tsfunc.vmap(apply, data_dependent="split")(x), x**2)


class _Generated(_OfNumPy):
    generate_vmap_rule = True


def test_other_functions_that_read_values_are_not_said_to_lack_a_rule() -> None:
    def solver(f: Any, z: Tensor) -> Tensor:
        while f(z).abs() > 1e-3:
            z = z - f(z)
        return z

    def root(x: Tensor) -> Any:
        return tsfunc.implicit_root(lambda z: z - x, torch.zeros(()), solver)

    for f in (root, _Generated.apply):
        with pytest.raises(DataDependentError) as caught:
            tsfunc.vmap(f)(torch.rand(3) + 1)
        assert "no vmap rule" not in str(caught.value)


class LastRow(torch.autograd.Function):
    """A view that begins later than its argument does, with a rule for vmap."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x[-1]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.cat([g.new_zeros(ctx.shape[0] - 1, *g.shape), g[None]])

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Any:
        return LastRow.apply(t)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return LastRow.apply(x.movedim(in_dims[0], 1)), 0  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("in_dim", [0, 1, 2])
def test_a_rule_returns_a_view_of_its_argument(in_dim: int) -> None:
    def build(api: Api) -> Any:
        def pushed(x: Tensor, t: Tensor) -> Any:
            return api.jvp(LastRow.apply, (x,), (t,))[1]

        def twice(x: Tensor) -> Any:
            return api.jvp(pushed, (x, x.cos()), (x.sin(), x.exp()))[1]

        return api.vmap(twice, in_dims=in_dim)(torch.stack([X, X + 1], in_dim))

    as_torch_func(build)
