"""Passes: a program has fewer operators than its function, and the same results."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tsfunc import MetaTensorType as Meta
from tsfunc import cond, make_graph, specialize, vmap
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.errors import ClosureError
from tsfunc.program import Program
from tsfunc.program.passes.effects import Aliases, sources

X = torch.arange(6.0).view(2, 3) - 2.5
W = torch.arange(3.0)


def calls(program: Program) -> list[str]:
    """Return the names of the operators that a program calls."""
    return [
        str(node.target).removeprefix("aten.").partition(".")[0]
        for node in program.graph.nodes
        if node.op == "call_function"
    ]


def program_of(func: Callable[..., Any], *args: Any) -> Program:
    """Return a function's program; check that its results are the function's."""
    f = specialize(func)
    torch.testing.assert_close(f(*args), func(*args))
    return f.program


class TestCommon:
    def test_plain_case(self) -> None:
        assert calls(program_of(lambda x: x.sin() + x.sin(), X)) == ["sin", "add"]

    def test_numbers_that_are_equal_but_not_the_same(self) -> None:
        both = program_of(lambda x: x.bool() * 1 + x.bool() * 1.0, X)
        assert calls(both).count("mul") == 2
        zeros = program_of(lambda x: torch.atan2(x, x * 0.0) + torch.atan2(x, x * -0.0), X)
        assert calls(zeros).count("mul") == 2

    def test_calls_around_a_write_are_not_merged(self) -> None:
        def f(x: Tensor) -> Tensor:
            x = x.clone()
            before = x.sin()
            x.add_(1)
            return before + x.sin()

        assert calls(program_of(f, X)).count("sin") == 2

    def test_calls_that_no_write_concerns_are_merged(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x.exp()
            first = x.sin()
            y.add_(1)
            return first + x.sin() + y

        assert calls(program_of(f, X)).count("sin") == 1

    def test_a_write_through_a_view(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x.exp()
            first = y.sin()
            y[0].zero_()
            return first + y.sin()

        assert calls(program_of(f, X)).count("sin") == 2

    def test_inputs_may_be_one_memory(self) -> None:
        def f(x: Tensor, y: Tensor) -> Tensor:
            before = y.sin()
            x.zero_()
            return before - y.sin()

        a, b = torch.ones(3), torch.ones(3)
        torch.testing.assert_close(specialize(f)(a, a), f(b, b))

    def test_a_result_that_is_written_to_is_its_own(self) -> None:
        def f(x: Tensor) -> Tensor:
            a, b = x.sin(), x.sin()
            return a.add_(1) + b

        program_of(f, X)

    def test_results_of_the_caller_are_tensors_of_their_own(self) -> None:
        def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x.sin(), x.sin(), x.sin().view(-1)

        a, b, c = specialize(f)(X)
        a.zero_()
        torch.testing.assert_close([b, c], [X.sin(), X.sin().view(-1)])

    def test_random_numbers_are_drawn_each(self) -> None:
        f = specialize(lambda x: torch.rand_like(x) - torch.rand_like(x))
        assert f(X).abs().sum() > 0 and calls(f.program).count("rand_like") == 2

    def test_a_block_without_gradients_is_another_place(self) -> None:
        def f(x: Tensor) -> Tensor:
            with torch.no_grad():
                quiet = x.sin()
            return quiet * x.sin()

        x = X.clone().requires_grad_()
        specialize(f)(x).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, x.detach().sin() * x.detach().cos())


class TestNoOps:
    DOES_NOTHING: Sequence[tuple[str, Callable[[Tensor], Tensor]]] = (
        ("to", lambda x: x.to(torch.float32)),
        ("float", Tensor.float),
        ("type_as", lambda x: x.type_as(W)),
        ("dropout", lambda x: F.dropout(x, 0.5, training=False)),
        ("clone", Tensor.clone),
        ("view", lambda x: x.view(2, 3)),
        ("reshape", lambda x: x.reshape(2, 3)),
        ("expand", lambda x: x.expand(2, -1)),
        ("permute", lambda x: x.permute(0, -1)),
        ("transpose", lambda x: x.transpose(1, -1)),
        ("slice", lambda x: x[:]),
        ("mul", lambda x: x * 1),
        ("div", lambda x: x / 1.0),
        ("sub", lambda x: x - 0),
        ("pow", lambda x: x**1),
    )

    @pytest.mark.parametrize("name, nothing", DOES_NOTHING, ids=[n for n, _ in DOES_NOTHING])
    def test_nodes_without_effect_are_removed(
        self, name: str, nothing: Callable[[Tensor], Tensor]
    ) -> None:
        assert calls(program_of(lambda x: nothing(x).sin(), X)) == ["sin"]

    DOES_SOMETHING: Sequence[tuple[str, Callable[[Tensor], Tensor]]] = (
        ("another type", lambda x: x.to(torch.float64)),
        ("an integer division", lambda x: torch.div(x, 1, rounding_mode="floor")),
        ("a sum makes -0.0 0.0", lambda x: x + 0),
        ("integers become floats", lambda x: x.long() / 1),
        ("a slice from the end", lambda x: x[1:]),
        ("dims in another order", lambda x: x.permute(1, 0)),
        ("dropout of everything", lambda x: F.dropout(x, 1.0)),
        ("detach", Tensor.detach),
    )

    @pytest.mark.parametrize("name, use", DOES_SOMETHING, ids=[n for n, _ in DOES_SOMETHING])
    def test_nodes_with_an_effect_stay(self, name: str, use: Callable[[Tensor], Tensor]) -> None:
        assert len(calls(program_of(lambda x: use(x).sin(), X))) > 1

    def test_copies_that_are_written_to_or_returned_stay(self) -> None:
        x = X.clone()
        out = specialize(lambda x: (x.clone(), x * 1))(x)
        assert out[0] is not x and out[1] is not x
        specialize(lambda x: x.clone().zero_())(x)
        torch.testing.assert_close(x, X)

    def test_functions_that_return_their_argument(self) -> None:
        x = X.clone()
        assert specialize(lambda x: x.float())(x) is x

    def test_sizes_that_are_named(self) -> None:
        f = specialize(lambda x: x.view(x.shape[0], 3).sin(), {"x": Meta(["n", 3])})
        f(X)
        assert calls(f.program)[-1] == "sin" and "view" not in calls(f.program)


class TestFolding:
    def test_plain_case(self) -> None:
        program = program_of(lambda x: x * (torch.arange(3) * 2 + 1), X)
        assert calls(program) == ["mul"]
        (name,) = program.constants
        assert program.lifted[name].tolist() == [1, 3, 5]
        known = program.properties()[name].constant
        assert isinstance(known, Tensor) and known.tolist() == [1, 3, 5]

    def test_a_mask_is_made_once(self) -> None:
        def masked(x: Tensor) -> Tensor:
            return x.masked_fill(torch.ones(3, 3).tril().logical_not(), -torch.inf).softmax(-1)

        assert calls(program_of(masked, torch.randn(3, 3))) == ["masked_fill", "softmax"]

    def test_returned_objects_are_made_at_every_call(self) -> None:
        f = specialize(lambda x: (x, torch.zeros(2)))
        f(X)[1].add_(1)
        assert f(X)[1].tolist() == [0, 0]

    def test_written_tensors_are_made_at_every_call(self) -> None:
        def f(x: Tensor) -> Tensor:
            total = torch.zeros(3)
            for row in x:
                total += row
            return total * 1.5

        g = specialize(f)
        for _ in range(2):
            torch.testing.assert_close(g(X), f(X))

    def test_tensors_from_outside_are_no_constants(self) -> None:
        scale = torch.ones(3)
        f = specialize(lambda x: x * (scale * 2))
        f(X)
        scale.fill_(4.0)
        torch.testing.assert_close(f(X), X * 8)

    def test_random_numbers_and_large_results_stay(self) -> None:
        program = program_of(lambda x: x + (torch.zeros(300, 300) + 1).sum(), X)
        assert "zeros" in calls(program)
        f = specialize(lambda x: x + torch.rand(3) * 2)
        assert not torch.equal(f(X), f(X))

    def test_one_program_for_small_sizes_too(self) -> None:
        f = specialize(lambda x: x + torch.arange(3).sum(), {"x": Meta(["n"])})
        for n in (4, 1, 0):
            f(torch.zeros(n))
        assert f.cache_info().programs == 1


class TestFrozen:
    """Values that follow from frozen tensors are computed once."""

    def test_plain_case(self) -> None:
        f = specialize(lambda x: x @ (W.exp() * 2).diag() + W.sum(), closure="freeze")
        torch.testing.assert_close(f(X), X @ (W.exp() * 2).diag() + W.sum())
        assert calls(f.program) == ["matmul", "add"]

    def test_however_large_it_is(self) -> None:
        big = torch.ones(400, 400)
        f = specialize(lambda x: x + (big * 2)[:2, :3], closure="freeze")
        assert f(X).equal(X + 2) and calls(f.program) == ["add"]
        g = specialize(lambda x: x + big[:1].t().expand(400, 4000)[:2, :3], closure="freeze")
        assert g(X).equal(X + 1)

    def test_returned_objects_are_made_at_every_call(self) -> None:
        f = specialize(lambda x: (x, W * 2), closure="freeze")
        f(X)[1].zero_()
        assert f(X)[1].equal(W * 2)

    def test_a_model_that_does_not_train(self) -> None:
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).eval()
        f = specialize(net, closure="freeze")
        torch.testing.assert_close(f(X), net(X).detach())

    def test_a_branch_that_reads_a_constant_may_write_into_its_own_tensor(self) -> None:
        def branch(x: Tensor) -> Tensor:
            y = x.clone()
            y.add_(1)
            return y * W[0]

        f = specialize(lambda x: cond(x.sum() > 0, branch, torch.cos, x), closure="freeze")
        x = torch.ones(4)
        torch.testing.assert_close(f(x), branch(x))

    def test_a_branch_that_writes_into_a_constant_is_refused(self) -> None:
        big = torch.ones(3)

        def branch(x: Tensor) -> Tensor:
            big.view(3)[:2].add_(1)
            return x * 2

        f = specialize(lambda x: cond(x.sum() > 0, branch, torch.cos, x), closure="freeze")
        with pytest.raises(ClosureError, match="writes into a tensor that is not an argument"):
            f(torch.ones(3))


@pytest.mark.parametrize("norm", [torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d])
def test_statistics_are_updated_as_often_as_the_layer_is_called(norm: Any) -> None:
    nets = [norm(4, track_running_stats=True) for _ in range(2)]
    x = torch.randn(3, 4, 5)

    def twice(net: Any, x: Tensor) -> Any:
        net(x)  # the result is not used
        return net(x)

    f = specialize(lambda x: twice(nets[0], x))
    for _ in range(2):
        torch.testing.assert_close(f(x), twice(nets[1], x))
    torch.testing.assert_close(nets[0].running_mean, nets[1].running_mean)


class TestDeadCode:
    def test_plain_case(self) -> None:
        def f(x: Tensor, unused: Tensor) -> Tensor:
            x.cos()
            unused.sin().sum()
            return x.sin()

        program = program_of(f, X, X)
        assert calls(program) == ["sin"] and "unused" not in program.source

    def test_draws_advance_the_generator(self) -> None:
        def f(x: Tensor) -> Tensor:
            torch.rand(3)
            return x + torch.rand(3)

        torch.manual_seed(3)
        want = f(X)
        torch.manual_seed(3)
        torch.testing.assert_close(specialize(f)(X), want)


class TestPropagation:
    """Facts about values remove the operators that depend on them from the program."""

    def test_control_flow_on_static_properties_disappears(self) -> None:
        def f(x: Tensor) -> Tensor:
            if x.dtype is torch.float32 and x.dim() == 2 and x.shape[1] == 3:
                return x.sin()
            return x.cos()

        assert calls(program_of(f, X)) == ["sin"]

    def test_casts_of_autocast_are_explicit(self) -> None:
        def f(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ x.t()

        f_program = specialize(f)
        assert f_program(X).dtype is torch.bfloat16
        assert "bfloat16[2, 3]" in str(f_program.program)
        torch.testing.assert_close(f_program(X), f(X))

    def test_casts_of_autocast_around_the_call(self) -> None:
        f = specialize(lambda x: x @ x.t())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert f(X).dtype is torch.bfloat16
            assert "bfloat16[2, 3]" in str(f.program)
        assert f(X).dtype is torch.float32


@st.composite
def functions(draw: st.DrawFn) -> Callable[[Tensor], Any]:
    """Return straight-line functions with views, writes, constants, copies and repeated work."""
    steps = draw(
        st.lists(st.tuples(st.integers(0, 11), st.integers(0, 9), st.integers(0, 9)), max_size=14)
    )
    kept = draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))

    def run(x: Tensor) -> Any:
        values = [x * 1, x.sin()]
        for kind, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            if kind < 2:
                values.append(a + b)
            elif kind == 2:
                a.mul_(0.5)
            elif kind == 3:
                a[0].add_(b[1])
            elif kind == 4:
                values.append(a.t().t())
            elif kind == 5:
                values.append(a.clone())
            elif kind == 6:
                values.append(torch.full((2, 3), 0.5) * 2)
            elif kind == 7:
                values.append(a.view(2, 3))
            elif kind == 8:
                values.append(a.float() - 0)
            elif kind == 9:
                values.append(b.expand(2, 3))
            else:
                values.append(a.sin() * b)
        return [values[k % len(values)] for k in kept]

    return run


@given(func=functions())
def test_a_program_is_its_function(func: Callable[[Tensor], Any]) -> None:
    """Aliasing of results is the same, as shown by writes of the caller into results."""
    x, y = X.clone(), X.clone()
    got, want = specialize(func)(x), func(y)
    torch.testing.assert_close([x, *got], [y, *want])
    got[0].add_(1)
    want[0].add_(1)
    torch.testing.assert_close([x, *got], [y, *want])


@given(func=functions())
def test_a_program_in_vmap_is_its_function(func: Callable[[Tensor], Any]) -> None:
    xs = torch.stack([X, X + 1, X.cos()])
    want = [func(x) for x in xs.clone()]
    got = vmap(specialize(func))(xs.clone())
    torch.testing.assert_close(got, [torch.stack(each) for each in zip(*want, strict=True)])


@st.composite
def view_steps(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Return methods, with arguments, for views of views of a tensor of 24 numbers in 3 dims."""
    shape, steps = [2, 3, 4], []
    for _ in range(draw(st.integers(1, 6))):
        kinds = ("transpose", "permute", "unsqueeze", "squeeze", "reshape", "contiguous")
        kind = draw(st.sampled_from(kinds))
        args: Any
        if kind == "transpose":
            args = (draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, len(shape) - 1)))
            shape[args[0]], shape[args[1]] = shape[args[1]], shape[args[0]]
        elif kind == "permute":
            args = (draw(st.permutations(range(len(shape)))),)
            shape = [shape[i] for i in args[0]]
        elif kind == "unsqueeze":
            args = (draw(st.integers(0, len(shape))),)
            shape.insert(args[0], 1)
        elif kind == "squeeze":
            args = ()
            shape = [size for size in shape if size > 1]
        elif kind == "contiguous":
            args = ()
        else:
            shape = list(draw(st.sampled_from(((24,), (4, 6), (2, 1, 3, 4), (2, 3, 4), (8, 3)))))
            args = (tuple(shape),)
        steps.append((kind, args))
    return steps


def followed(x: Tensor, steps: Sequence[tuple[str, Any]]) -> Tensor:
    for kind, args in steps:
        x = getattr(x, kind)(*args)
    return x


class TestViewsOfViews:
    def test_permutations_become_one(self) -> None:
        f = program_of(lambda x: x.sin().transpose(0, 1).permute(2, 0, 1).transpose(1, 2), X[None])
        assert calls(f) == ["sin", "permute"]

    def test_permutations_that_undo_each_other_are_gone(self) -> None:
        f = program_of(lambda x: x.sin().t().t().cos().transpose(0, 1).transpose(1, 0), X)
        assert calls(f) == ["sin", "cos"]

    def test_other_views_become_one_or_none(self) -> None:
        f = program_of(lambda x: x.unsqueeze(1).flatten(0, 1).sin().view(6).view(3, 2).cos(), X)
        assert calls(f) == ["sin", "reshape", "cos"]

    @given(data=st.data())
    def test_reductions_keep_no_dims_for_a_view_that_drops_them(self, data: st.DataObject) -> None:
        x = torch.randn(2, 3, 4).permute(data.draw(st.permutations(range(3))))
        dims = data.draw(st.lists(st.integers(-3, 2), min_size=1, unique_by=lambda dim: dim % 3))
        name = data.draw(st.sampled_from(("sum", "mean", "amax", "amin")))
        shape = [size for i, size in enumerate(x.shape) if i not in {dim % 3 for dim in dims}]
        operand = torch.randn(shape)

        def f(x: Tensor, operand: Tensor) -> list[Tensor]:
            reduced = getattr(x, name)(dims, keepdim=True).reshape(shape)
            return [reduced, reduced * operand]

        program, want = make_graph(f)(x, operand), f(x, operand)
        got = specialize(f)(x, operand)
        assert calls(program) == [name, "mul"]
        assert [each.stride() for each in got] == [each.stride() for each in want]
        torch.testing.assert_close(got, want)
        with_both = program_of(lambda x: (y := x.sum(0, keepdim=True), y.view(-1)), X)
        assert calls(with_both) == ["sum", "view"]

    @pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin"])
    def test_a_reduction_of_a_tensor_without_dims_before_a_view(self, name: str) -> None:
        def f(x: Tensor) -> Tensor:
            reduced: Tensor = getattr(x, name)(0, keepdim=True)
            return reduced.view(1).sin()

        x = torch.tensor(0.5)
        torch.testing.assert_close(specialize(f)(x), f(x))

    def test_copies_before_views_are_made_by_the_first(self) -> None:
        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            y = x.t().contiguous()
            return y.view(-1), y.view(3, 1, 2)

        x, y = X.clone(), X.clone()
        got, want = specialize(f)(x), f(y)
        assert calls(program_of(f, X)) == ["t", "reshape", "reshape"]
        assert [each.stride() for each in got] == [each.stride() for each in want]
        got[0].add_(1)
        want[0].add_(1)
        torch.testing.assert_close((x, *got), (y, *want))

    def test_copies_before_views_of_their_argument_stay(self) -> None:
        def f(x: Tensor) -> Tensor:
            return x.clone(memory_format=torch.contiguous_format).view(-1)

        got = specialize(f)(X)
        assert calls(program_of(f, X)) == ["clone", "view"] and got.data_ptr() != X.data_ptr()

    def test_the_caller_gets_no_value_twice(self) -> None:
        f = specialize(lambda x: (y := x.sin(), y.t().t()))
        one, other = f(X)
        assert one is not other and one.data_ptr() == other.data_ptr()
        got = specialize(lambda x: x.t().t())(X)
        assert got is not X and got.data_ptr() == X.data_ptr()

    def test_named_sizes_keep_their_views(self) -> None:
        f = specialize(lambda x: x.sin().unsqueeze(0).flatten().cos(), {"x": Meta(["n", 3])})
        for n in (2, 5):
            x = torch.randn(n, 3)
            torch.testing.assert_close(f(x), x.sin().flatten().cos())

    @given(steps=view_steps(), start=st.sampled_from(("x", "sin", "permuted")), last=st.booleans())
    def test_chains_are_their_functions(
        self, steps: list[tuple[str, Any]], start: str, last: bool
    ) -> None:
        """Values, strides and shared memory are the same, with the last view as the result too."""

        def f(x: Tensor) -> list[Tensor]:
            first = x if start == "x" else x.sin() if start == "sin" else x.sin().permute(2, 0, 1)
            if start == "permuted":
                first = first.permute(1, 2, 0)
            view = followed(first, steps)
            return [view, first] if last else [view * 2]

        x = torch.randn(2, 3, 4)
        y = x.clone()
        got, want = specialize(f)(x), f(y)
        assert [each.stride() for each in got] == [each.stride() for each in want]
        torch.testing.assert_close([x, *got], [y, *want])
        got[0].add_(1)
        want[0].add_(1)
        torch.testing.assert_close([x, *got], [y, *want])

    @given(steps=view_steps())
    def test_derivatives_through_chains(self, steps: list[tuple[str, Any]]) -> None:
        def f(x: Tensor) -> Tensor:
            return followed(x.sin(), steps).square() * 0.5

        x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
        (got,) = torch.autograd.grad(specialize(f)(x).sum(), x)
        (want,) = torch.autograd.grad(f(x).sum(), x)
        torch.testing.assert_close(got, want)


def test_slices_to_the_end_say_so_by_none() -> None:
    """torch writes the largest int, unless the index has symbols."""
    program = program_of(lambda x: x[..., 0::2] + x[:, 0::2], X)
    assert "slice(x, 1, 0, None, 2)" in program.source


def _cast(count: int) -> torch.fx.Graph:
    """A chain of casts of a value to its own dtype, each of which may return its argument."""
    graph = torch.fx.Graph()
    value: Any = graph.placeholder("x")
    for _ in range(count):
        value = graph.call_function(torch.ops.aten.type_as.default, (value, value))
        value.meta["op"] = operator_of(torch.ops.aten.type_as.default)
    graph.output((value.args[0], value))
    return graph


def test_aliases_along_a_long_chain() -> None:
    """Each value is visited once, although paths to a source grow as two to the chain's length."""
    graph = _cast(2000)
    (x, *_, last, output) = graph.nodes
    aliases = Aliases(graph)
    assert sources(last) == {x}
    assert aliases.memory(last) == aliases.memory(x) and not aliases.is_written(last)
    output.args = ((),)
    aliases = Aliases(graph)
    assert not aliases.escapes(x)
    aliases.leaves(last)
    assert aliases.escapes(x)


class TestMemory:
    @pytest.mark.parametrize("write", [torch.Tensor.add_, torch.Tensor.mul_])
    def test_a_value_is_freed_after_its_last_use(self, write: Callable[..., Any]) -> None:
        """A value whose last write has an unused result is freed, too."""

        def f(x: Tensor) -> Tensor:
            y = x.exp()
            write(y, 2.0)
            z = y.sin()
            return z.cos() + 1

        class Live(TorchDispatchMode):
            def __init__(self) -> None:
                super().__init__()  # type: ignore[no-untyped-call]
                self.results: dict[str, weakref.ref[Tensor]] = {}
                self.seen: dict[str, list[str]] = {}

            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                live = [name for name, result in self.results.items() if result() is not None]
                name = func.overloadpacket.__name__
                self.seen[name] = live
                out = func(*args, **(kwargs or {}))
                self.results[name] = weakref.ref(out)
                return out

        program = program_of(f, X)
        with Live() as live:
            program.run([X])
        assert "exp" in live.seen["sin"]
        assert live.seen["cos"] == ["sin"]
        assert live.seen["add"] == ["cos"]
