"""Backends: a compiled program agrees with its program, in every context."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor

import tsfunc
from tsfunc import Dim, cond, grad, hessian, jacrev, jvp, specialize, vmap
from tsfunc import MetaTensorType as Meta

WEIGHT = torch.nn.Parameter(torch.randn(4, 2))
# AOTAutograd and Inductor warn about their own code.
pytestmark = pytest.mark.filterwarnings("ignore")
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="Inductor needs gcc")


@pytest.fixture(autouse=True)
def fresh_weight() -> Iterator[None]:
    yield
    WEIGHT.grad = None


def layer(x: Tensor) -> tuple[Tensor, int, None]:
    hidden = x @ WEIGHT
    with torch.no_grad():
        shift = hidden.mean()
    return ((hidden - shift).tanh() * x.shape[0]).sum(0), 3, None


class Recording:
    """A backend that runs the graph unchanged, and records its inputs."""

    def __init__(self) -> None:
        self.examples: list[Sequence[Tensor]] = []
        self.calls = 0

    def __call__(
        self, module: torch.fx.GraphModule, examples: Sequence[Tensor]
    ) -> Callable[..., Any]:
        self.examples.append(examples)

        def run(*tensors: Tensor) -> Any:
            self.calls += 1
            return module(*tensors)

        return run


def trained(func: Callable[[Tensor], Any], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a function's result, and the gradient that reaches the weight."""
    WEIGHT.grad = None
    out = func(x)[0]
    out.square().sum().backward()
    assert WEIGHT.grad is not None
    return out.detach(), WEIGHT.grad.clone()


class TestCallables:
    def test_plain_case(self) -> None:
        backend = Recording()
        f = specialize(layer, backend=backend)
        x = torch.randn(3, 4)
        for _ in range(2):
            got, want = f(x), layer(x)
            torch.testing.assert_close(got[0], want[0])
            assert got[1:] == want[1:]
        assert backend.calls == 2
        (examples,) = backend.examples
        assert [e.shape for e in examples] == [x.shape, WEIGHT.shape] and examples[1] is WEIGHT

    def test_named_dims_are_symbols_in_the_examples(self) -> None:
        backend = Recording()
        f = specialize(layer, {"x": Meta([Dim("n", multiple_of=2), 4])}, backend=backend)
        for n in (4, 8):
            torch.testing.assert_close(f(torch.ones(n, 4))[0], layer(torch.ones(n, 4))[0])
        ((x, _),) = backend.examples
        assert not isinstance(x.shape[0], int) and x.shape[1] == 4

    def test_guards_of_a_backend_do_not_restrict_a_program(self) -> None:
        made: list[bool] = []

        def backend(module: torch.fx.GraphModule, examples: Sequence[Tensor]) -> Any:
            large = bool(examples[0].shape[0] > 8)
            made.append(large)
            return lambda *tensors: [module(*tensors)[0] if large else module(*tensors)[0] + 0]

        f = specialize(lambda x: x * 2, {"x": Meta(["n"])}, backend=backend)
        for n in (4, 5, 20, 30, 6):
            torch.testing.assert_close(f(torch.ones(n)), torch.full((n,), 2.0))
        assert made == [False, True] and f.cache_info().programs == 1

    def test_transforms_and_traces_see_the_operators(self) -> None:
        backend = Recording()
        f = specialize(lambda x: (x @ WEIGHT).sin().sum(), backend=backend)
        plain = specialize(lambda x: (x @ WEIGHT).sin().sum())
        x = torch.randn(4)
        f(x)
        calls = backend.calls
        xs = torch.randn(3, 4)
        torch.testing.assert_close(vmap(f)(xs), vmap(plain)(xs))
        torch.testing.assert_close(vmap(grad(f))(xs), vmap(grad(plain))(xs))
        torch.testing.assert_close(jvp(f, (x,), (x,)), jvp(plain, (x,), (x,)))
        torch.testing.assert_close(torch.func.vmap(f)(xs), vmap(plain)(xs))
        torch.testing.assert_close(specialize(vmap(f))(xs), vmap(plain)(xs))
        assert backend.calls == calls
        torch.testing.assert_close(grad(f)(x), grad(plain)(x))
        assert backend.calls == calls + 1

    @pytest.mark.parametrize(
        "func", [torch.sin, lambda x: tsfunc.map(lambda y: y / 2, x)], ids=["operator", "loop"]
    )
    def test_a_first_call_inside_a_transform_compiles_nothing(self, func: Any) -> None:
        """The backend gets no tracers; the first plain call compiles."""
        backend = Recording()
        f = specialize(func, backend=backend)
        xs = torch.randn(3, 4)
        torch.testing.assert_close(vmap(f)(xs), func(xs))
        assert not backend.examples
        torch.testing.assert_close(f(xs[0]), func(xs[0]))
        assert len(backend.examples) == 1
        assert not any(isinstance(x, tsfunc.Tracer) for x in backend.examples[0])
        compiled = specialize(func, backend="aot_eager")
        torch.testing.assert_close(vmap(compiled)(xs), func(xs))

    def test_made_ahead(self) -> None:
        backend = Recording()
        f = specialize(layer, backend=backend)
        f.lower({"x": Meta(["n", 4], dtype=torch.float32)})
        assert len(backend.examples) == 1
        assert f(torch.ones(3, 4))[1] == 3
        assert (len(backend.examples), f.cache_info().misses) == (1, 0)

    @pytest.mark.parametrize(
        "backend", ["aot_eager", pytest.param("inductor", marks=[needs_gcc, pytest.mark.slow])]
    )
    def test_assignments(self, backend: str) -> None:
        class Running(torch.nn.Module):
            total: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(3))
                self.register_buffer("total", torch.zeros(3))
                self.calls, self.rows = 0, 0

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                self.total = self.total + x.sum(0)
                self.calls, self.rows = 1, x.shape[0]
                return x * self.weight, self.total * 2

        plain, compiled = Running(), Running()
        f = specialize(compiled, {"x": Meta(["n", 3])}, backend=backend)
        for n in (4, 5, 2):
            x = torch.randn(n, 3)
            got, want = f(x), plain(x)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(compiled.total, plain.total)
            assert (compiled.calls, compiled.rows) == (1, n)
            for out in (got, want):
                out[0].sum().backward()
            torch.testing.assert_close(compiled.weight.grad, plain.weight.grad)
        assert f.cache_info().programs == 1

    def test_arguments_that_share_memory_and_are_written_to(self) -> None:
        backend = Recording()

        def f(x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            return y * 2

        g = specialize(f, backend=backend)
        g(torch.ones(2), torch.ones(2))
        calls = backend.calls
        x = torch.ones(2)
        assert g(x, x).tolist() == [4, 4] and backend.calls == calls


class TestNames:
    def test_training_through_autograds_graphs(self) -> None:
        f = specialize(layer, {"x": Meta(["n", 4])}, backend="aot_eager")
        for n in (5, 2, 9):
            x = torch.randn(n, 4)
            torch.testing.assert_close(trained(f, x), trained(layer, x), rtol=1e-4, atol=1e-4)
        assert f.cache_info().programs == 1

    @needs_gcc
    @pytest.mark.slow
    def test_inductor(self) -> None:
        f = specialize(layer, {"x": Meta(["n", 4])}, backend="inductor")
        for n in (5, 2, 90, 1):
            x = torch.randn(n, 4)
            torch.testing.assert_close(trained(f, x), trained(layer, x), rtol=1e-4, atol=1e-3)

    @needs_gcc
    @pytest.mark.slow
    @pytest.mark.parametrize("descriptors", [None, {"x": Meta(["n", 4])}])
    def test_inductor_takes_its_code_from_disk(self, descriptors: Any) -> None:
        """The graph of the second program finds the code, as in a later process."""
        from torch._dynamo.utils import counters

        x = torch.randn(5, 4)
        trained(specialize(layer, descriptors, backend="inductor"), x)
        counters.clear()
        again = specialize(layer, descriptors, backend="inductor")
        torch.testing.assert_close(trained(again, x), trained(layer, x), rtol=1e-4, atol=1e-4)
        found = counters["aot_autograd"]
        assert found["autograd_cache_hit"] == 1 and not found["autograd_cache_bypass"]

    @needs_gcc
    @pytest.mark.slow
    def test_inductor_draws_the_numbers_of_eager_mode(self) -> None:
        def noisy(x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(x + torch.randn_like(x), 0.5)

        f, x = specialize(noisy, backend="inductor"), torch.ones(50)
        f(x)
        torch.manual_seed(5)
        got = f(x)
        torch.manual_seed(5)
        torch.testing.assert_close(got, noisy(x))

    @needs_gcc
    @pytest.mark.slow
    def test_inductor_of_per_example_gradients(self) -> None:
        func = vmap(grad(lambda w, x: (x @ w).tanh().square().sum()), in_dims=(None, 0))
        f = specialize(func, {"x": Meta(["n", 4])}, backend="inductor")
        for n in (3, 70):
            w, x = torch.randn(4, 2), torch.randn(n, 4)
            torch.testing.assert_close(f(w, x), func(w, x), rtol=1e-4, atol=1e-4)


class TestMistakes:
    def test_names_and_values_that_are_none(self) -> None:
        with pytest.raises(ValueError, match=r"no backend 'inducer'.*'python'.*inductor"):
            specialize(layer, backend="inducer")
        with pytest.raises(TypeError, match=r"expected a name, or a function.*got int"):
            specialize(layer, backend=3)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it is about the CPU")
    def test_cudagraphs_without_a_cuda_device(self) -> None:
        with pytest.raises(ValueError, match=r"'cudagraphs'.*got tensors on cpu.*'inductor'"):
            specialize(layer, backend="cudagraphs")(torch.ones(3, 4))

    def test_derivatives_of_control_flow(self) -> None:
        either = grad(lambda x: cond(x.sum() > 0, torch.sin, torch.cos, x).sum())
        f = specialize(either, backend=Recording())
        torch.testing.assert_close(f(torch.ones(2)), either(torch.ones(2)))


def smooth(x: Tensor) -> Tensor:
    return (x.sin() * x.roll(1)).square()


def smooth_choice(x: Tensor) -> Tensor:
    return cond(x.sum() > -9, lambda: x.sin() * x.roll(1), lambda: x * 3).square()


def smooth_loop(x: Tensor) -> Tensor:
    return tsfunc.fori_loop(0, 3, lambda i, c: c.sin() * c.roll(1) + x, x)


def plain_hessian(func: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(func(x).sum(), x, create_graph=True)
    return torch.stack([torch.autograd.grad(e, x, retain_graph=True)[0] for e in first])


def gradient(func: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return grad(lambda x: func(x).sum())


SECOND: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad of grad": lambda f, x: gradient(lambda x: gradient(f)(x).square() / 2)(x),
    "autograd of grad": lambda f, x: torch.autograd.grad(
        gradient(f)(y := x.clone().requires_grad_()).square().sum() / 2, y
    )[0],
    "autograd of autograd": lambda f, x: plain_hessian(f, x) @ gradient(f)(x),
    "linearize of grad": lambda f, x: tsfunc.linearize(gradient(f), x)[1](gradient(f)(x)),
    "jacrev of jacrev": lambda f, x: (
        tsfunc.jacrev(tsfunc.jacrev(lambda x: f(x).sum()))(x) @ gradient(f)(x)
    ),
    "vjp of grad": lambda f, x: tsfunc.vjp(gradient(f), x)[1](gradient(f)(x))[0],
}


@pytest.mark.parametrize("func", [smooth, smooth_choice, smooth_loop])
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_of_a_compiled_program(
    name: str, func: Callable[[Tensor], Tensor]
) -> None:
    """The product of the Hessian and the gradient, by each kind of second derivative."""
    x = torch.rand(3)
    (first,) = torch.autograd.grad(func(y := x.clone().requires_grad_()).sum(), y)
    expected = plain_hessian(func, x) @ first
    torch.testing.assert_close(SECOND[name](specialize(func, backend="aot_eager"), x), expected)


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.0)


def written_attention(x: Tensor) -> Tensor:
    y = x[:, None]
    return (y @ y.mT / 1.0).softmax(-1) @ y


def causal_attention(x: Tensor) -> Tensor:
    y = x.reshape(2, 2)
    mask = torch.tensor([[True, False], [True, True]])
    return F.scaled_dot_product_attention(y, y.sin(), y.cos(), attn_mask=mask)


def written_causal_attention(x: Tensor) -> Tensor:
    y = x.reshape(2, 2)
    mask = torch.tensor([[True, False], [True, True]])
    scores = (y @ y.sin().mT / math.sqrt(2)).masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ y.cos()


def unrandom(x: Tensor) -> Tensor:
    return F.rrelu(F.dropout(x, 0.3, training=False) - 0.5, 0.1, 0.3, training=False).sin()


def written_unrandom(x: Tensor) -> Tensor:
    return F.leaky_relu(x - 0.5, 0.2).sin()


@pytest.mark.parametrize(
    ("func", "written"),
    [
        (attention, written_attention),
        (causal_attention, written_causal_attention),
        (unrandom, written_unrandom),
    ],
)
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_of_layers_that_could_draw_and_do_not(
    name: str, func: Callable[[Tensor], Tensor], written: Callable[[Tensor], Tensor]
) -> None:
    x = torch.rand(4, dtype=torch.float64)
    (first,) = torch.autograd.grad(written(y := x.clone().requires_grad_()).sum(), y)
    expected = plain_hessian(written, x) @ first
    torch.testing.assert_close(SECOND[name](specialize(func, backend="aot_eager"), x), expected)


def test_linearize_of_a_compiled_program() -> None:
    x = torch.rand(3)
    _, expected = jvp(smooth_choice, (x,), (x,))
    _, push = tsfunc.linearize(specialize(smooth_choice, backend="aot_eager"), x)
    torch.testing.assert_close(push(x), expected)


@pytest.mark.parametrize("first", ["vjp", "grad"])
def test_a_compiled_program_keeps_its_graph_where_the_caller_does(first: str) -> None:
    """AOTAutograd alone refuses a pass that keeps the graph after one that does not."""
    run = specialize(smooth_choice, backend="aot_eager")
    x = torch.rand(3)
    expected = gradient(smooth_choice)(x)
    ways: dict[str, Callable[[], Tensor]] = {
        "vjp": lambda: tsfunc.vjp(run, x)[1](torch.ones(3))[0],
        "grad": lambda: gradient(run)(x),
    }
    for name in (first, "grad", "vjp"):
        torch.testing.assert_close(ways[name](), expected)


def drawing(x: Tensor) -> Tensor:
    return (x * torch.rand(3)).sin()


BUFFER = torch.zeros(3)


def writing(x: Tensor) -> Tensor:
    BUFFER.add_(x.detach())
    return x.sin() * x


@pytest.mark.parametrize("func", [drawing, writing])
def test_a_program_that_can_not_run_again_refuses_a_second_derivative(
    func: Callable[[Tensor], Tensor],
) -> None:
    run = specialize(func, backend="aot_eager")
    x = torch.rand(3, requires_grad=True)
    torch.manual_seed(0)
    (got,) = torch.autograd.grad(run(x).sum(), x)
    torch.manual_seed(0)
    torch.testing.assert_close(got, torch.autograd.grad(func(x).sum(), x)[0])
    with pytest.raises(RuntimeError, match=r"derivative is differentiated\. Leave the backend out"):
        torch.autograd.grad(run(x).sum(), x, create_graph=True)


def test_a_program_that_writes_outside_refuses_mapped_cotangents() -> None:
    run = specialize(writing, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"derivative is mapped\. Leave the backend out"):
        jacrev(run)(torch.rand(3))


def test_derivatives_of_a_branch_that_writes_into_its_own_tensors() -> None:
    def f(x: Tensor) -> Tensor:
        def doubled() -> Tensor:
            own = torch.zeros_like(x) + x
            own[0] *= 2.0
            return own.sin()

        return tsfunc.cond(x.sum() > 0, doubled, x.cos)

    run, x = specialize(f, backend="aot_eager"), torch.rand(3)
    torch.testing.assert_close(jacrev(run)(x), jacrev(f)(x))
    torch.testing.assert_close(hessian(run)(x), hessian(f)(x))


def test_rows_of_a_jacobian_through_writes_into_a_product() -> None:
    """A product has its own memory, so its writes do not reach the input."""

    def f(x: Tensor) -> Tensor:
        first, second = torch.ops.aten.unsafe_split(x @ x.mT, 2)
        first.add_(second)
        return first.sin_() * second

    x = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)
    run = specialize(f, backend="aot_eager")
    torch.testing.assert_close(jacrev(run)(x), jacrev(f)(x))
    torch.testing.assert_close(jacrev(jacrev(run))(x), jacrev(jacrev(f))(x))


def test_rows_of_a_jacobian_of_a_compiled_gradient() -> None:
    """The backward pass maps over its cotangents, which the compiled backward can't take."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).prod()

    def pushed(of: Any, x: torch.Tensor) -> Any:
        pull = tsfunc.vjp(of, x)[1]
        return tsfunc.jvp(lambda cotangent: pull(cotangent)[0], (x,), (x,))[1]

    x = torch.randn(3, dtype=torch.float64)
    compiled = tsfunc.specialize(tsfunc.grad(f), backend="aot_eager")
    hessian = torch.func.jacrev(torch.func.grad(f))
    same = torch.testing.assert_close
    same(tsfunc.jacrev(compiled)(x), hessian(x), msg=lambda text: f"{text} at {x}")
    same(tsfunc.jacrev(tsfunc.jacrev(compiled))(x), torch.func.jacrev(hessian)(x))
    same(pushed(compiled, x), hessian(x) @ x)
