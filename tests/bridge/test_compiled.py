"""The compiled handlers have the results, errors and order of calls of the Python handlers.

The whole suite runs with them if they are built, and ``TSFUNC_COMPILED=0`` runs it without.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import typer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tsfunc import cli, explain, grad, hessian, jvp, vmap
from tsfunc.bridge import compiled
from tsfunc.bridge.tracers.batch_handlers import SlottedBatchTracer
from tsfunc.dispatch.state import tls

built = pytest.mark.skipif(
    "__torch_function__" not in vars(SlottedBatchTracer),
    reason="the compiled handlers are not built: python -m tsfunc build",
)

Function = Callable[..., torch.Tensor]


@pytest.fixture(params=["compiled", "python"])
def function_handler(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test with the handlers of either kind."""
    if request.param == "compiled":
        if "__torch_function__" not in vars(SlottedBatchTracer):
            pytest.skip("the compiled handlers are not built: python -m tsfunc build")
        yield request.param
        return
    with compiled.pause_handlers():
        yield request.param


def network(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.nn.functional.layer_norm(torch.tanh(x @ w) * 2.0 + x.sum(), (3,))
    parts = torch.cat([hidden.view(3, 1), x.unsqueeze(-1)], -1).softmax(0)
    return parts[1:].square().sum() - torch.stack(hidden.split(1)).mean()


@pytest.mark.parametrize("in_dim", [0, 1, -1])
@pytest.mark.parametrize("transform", [lambda f: f, grad, hessian], ids=["value", "grad", "hess"])
def test_results_are_those_of_the_loop(
    function_handler: str, in_dim: int, transform: Callable[[Function], Function]
) -> None:
    w = torch.randn(3, 3, dtype=torch.float64)
    batch = torch.randn(5, 3, dtype=torch.float64).movedim(0, in_dim)
    f = transform(lambda x: network(w, x))
    expected = torch.stack([f(x) for x in batch.unbind(in_dim)])
    for _ in range(2):  # the operators of the second call are known
        assert torch.allclose(vmap(f, in_dim)(batch), expected)


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1), (1, 0), (0, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.int64, torch.float32)])
def test_operands_are_promoted_as_examples(
    function_handler: str, ranks: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    x, y = (
        torch.rand(3, *[2] * rank).add(1).mul(3).to(dtype)
        for rank, dtype in zip(ranks, dtypes, strict=True)
    )
    for f in (torch.add, torch.maximum, torch.Tensor.__rpow__, torch.Tensor.__rtruediv__):
        for _ in range(3):
            for first, second in ((x, y), (y, x)):
                expected = torch.stack([f(*pair) for pair in zip(first, second, strict=True)])
                torch.testing.assert_close(vmap(f)(first, second), expected)
                for in_dims, args in (
                    ((0, None), (first, second[0])),
                    ((None, 0), (first[0], second)),
                ):
                    batch = first if in_dims[1] is None else second
                    pairs = [(a, args[1]) if in_dims[1] is None else (args[0], a) for a in batch]
                    expected = torch.stack([f(*pair) for pair in pairs])
                    torch.testing.assert_close(vmap(f, in_dims)(*args), expected)


def test_nested_levels_and_tangents(function_handler: str) -> None:
    x, t = (torch.randn(4, 3, 2, dtype=torch.float64) for _ in range(2))

    def pushed(a: torch.Tensor, b: torch.Tensor) -> Any:
        return jvp(lambda y: (y.sin() * y.exp()).cumsum(0), (a,), (b,))

    values, tangents = vmap(vmap(pushed, 1), 1)(x, t)  # of examples x[:, i, j]
    for i in range(3):
        for j in range(2):
            expected = torch.func.jvp(
                lambda y: (y.sin() * y.exp()).cumsum(0), (x[:, i, j],), (t[:, i, j],)
            )
            assert torch.allclose(values[i, j], expected[0])
            assert torch.allclose(tangents[i, j], expected[1])


def test_the_value_of_a_tracer_is_one_object(function_handler: str) -> None:
    class Kept(SlottedBatchTracer):
        __slots__ = ()

    x = torch.randn(4, 3)

    def f(row: torch.Tensor) -> torch.Tensor:
        read, written, changed = (made() for made in (row.sin, row.cos, row.exp))
        value = read.value  # type: ignore[attr-defined]
        assert value is read.value and torch.equal(value, x.sin())  # type: ignore[attr-defined]
        written.value = value  # type: ignore[attr-defined]
        assert written.value is value  # type: ignore[attr-defined]
        changed.__class__ = Kept
        assert torch.equal(changed.value, x.exp())  # type: ignore[attr-defined]
        changed.__class__ = SlottedBatchTracer
        return read + changed

    assert torch.allclose(vmap(f)(x), x.sin() + x.exp())


def test_writes_reach_aliases_that_python_has_not_read(function_handler: str) -> None:
    x, w = torch.randn(3, 4), torch.randn(2, 4)

    def f(row: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        written = row.sin()
        bits = written.view(torch.int32)
        written.add_(added)
        return bits * 1

    expected = torch.stack([torch.stack([f(row, added) for row in x]) for added in w])
    for _ in range(4):
        assert torch.equal(vmap(vmap(f, (0, None)), (None, 0))(x, w), expected)


VIEWS: dict[str, Function] = {
    "bits": lambda y: y.view(torch.int64),
    "flat": lambda y: y.view(-1),
    "reshaped": lambda y: torch.reshape(y, (2, 8)),
    "transposed": lambda y: y.mT,
    "row": lambda y: y[1],
    "column": lambda y: y.select(-1, 2),
    "slice": lambda y: y.narrow(0, 1, 2),
    "windows": lambda y: y.unfold(0, 2, 1),
    "diagonal": lambda y: y.diagonal(),
    "expanded": lambda y: y.unsqueeze(0).expand(2, 4, 4),
    "detached": lambda y: y.detach(),
}
WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "add": lambda y, w: y.add_(w),
    "multiply": lambda y, w: y[1:].mul_(w[0]),
    "copy": lambda y, w: y[0].copy_(w[1]),
    "item": lambda y, w: y.__setitem__((slice(None), 1), w[2]),
    "through a view": lambda y, w: y.view(2, 8).add_(w.reshape(2, 8)),
    "swap": lambda y, w: y.mT.sub_(w),
    "number": lambda y, w: y.mul_(2.0),
}
NESTED: dict[str, Callable[[Function], Function]] = {
    "value": lambda f: f,
    "grad": lambda f: grad(lambda row, w: f(row, w).sin().sum()),
    "grad of both": lambda f: (
        lambda *args: torch.cat(grad(lambda row, w: f(row, w).sin().sum(), (0, 1))(*args))
    ),
    "tangent": lambda f: lambda row, w: jvp(lambda x: f(x, w), (row,), (row.cos(),))[1],
}


def as_number(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_floating_point() else x.double() * 2.0**-60


@pytest.mark.parametrize("derivative", NESTED)
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_writes_and_aliases_of_nested_levels(
    function_handler: str, derivative: str, mode: Callable[[], Any]
) -> None:
    """Aliases of a value see its writes, even if no Python code has read the aliases before."""
    if derivative.startswith("grad") and mode is not nullcontext:
        pytest.skip("autograd records nothing in this mode")
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    x, w = torch.randn(3, 4, 4).double(), torch.randn(2, 4, 4).double()
    for _ in range(4):
        views = rng.sample([*VIEWS], 3)
        writes = rng.sample([*WRITES], rng.randrange(1, 3))
        print(views, writes)

        def f(row: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
            y = row.sin()
            aliases = [VIEWS[name](y) for name in views]  # noqa: B023
            for name in writes:  # noqa: B023
                WRITES[name](y, added)
            seen = [as_number(alias).cos().sum() * (i + 1) for i, alias in enumerate(aliases)]
            return y * added + torch.stack(seen).sum()

        g = NESTED[derivative](f)
        with mode():
            expected = torch.stack([torch.stack([g(row, added) for row in x]) for added in w])
            for _ in range(4):  # planned, seen, recorded, repeated
                found = vmap(vmap(g, (0, None)), (None, 0))(x, w)
                torch.testing.assert_close(found, expected)


def test_tangents_of_tensors_from_outside(function_handler: str) -> None:
    w, x = (torch.randn(*size, dtype=torch.float64) for size in ((3, 2), (4, 2)))

    def loss(row: torch.Tensor) -> torch.Tensor:
        return ((w @ row).tanh() * torch.cat([row, w[:, 0]])[:3]).sum()

    expected = torch.stack([torch.autograd.functional.hessian(loss, row) for row in x])
    for _ in range(3):
        assert torch.allclose(vmap(hessian(loss))(x), expected)


def test_backward_to_tensors_outside(function_handler: str) -> None:
    w = torch.randn(3, requires_grad=True)
    x = torch.randn(4, 3)
    vmap(lambda row: (row * w).sin().sum())(x).sum().backward()
    assert w.grad is not None
    assert torch.allclose(w.grad, (x * (x * w).cos()).sum(0))


def test_the_users_error_is_raised_once(function_handler: str) -> None:
    with pytest.raises(RuntimeError, match=r"size of tensor a \(3\) must match"):
        vmap(lambda x: x + torch.ones(2))(torch.ones(4, 3))
    with pytest.raises(IndexError, match="Dimension out of range"):
        vmap(lambda x: x.sum(4))(torch.ones(4, 3))
    with pytest.raises(RuntimeError, match="size of tensor a"):
        vmap(grad(lambda x: (x * torch.ones(2)).sum()))(torch.ones(4, 3))


def test_no_examples(function_handler: str) -> None:
    assert vmap(grad(lambda x: x.sin().sum()))(torch.ones(0, 3)).shape == (0, 3)


def test_modes_see_every_operator(function_handler: str) -> None:
    seen: list[str] = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    vmap(torch.sin)(torch.ones(2))
    with Seeing():  # type: ignore[no-untyped-call]
        vmap(torch.sin)(torch.ones(2))
    assert "aten::sin" in seen

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Functions():
        vmap(lambda x: torch.cos(x))(torch.ones(2))
    assert "cos" in seen


def test_explain_sees_every_call(function_handler: str) -> None:
    report = explain(lambda x: vmap(lambda y: y.sin().sum())(x), torch.ones(3, 2))
    assert {"aten::sin", "aten::sum"} <= {use.operator for use in report.uses}


@built
def test_another_subclass_meets_its_own_handler() -> None:
    class Doubling(torch.Tensor):
        physical: torch.Tensor

        @staticmethod
        def of(physical: torch.Tensor) -> Doubling:
            made = torch.Tensor._make_wrapper_subclass(Doubling, physical.shape)
            made.physical = physical
            return made

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*[a.physical if type(a) is cls else a for a in args], **(kwargs or {})) * 2

    vmap(torch.sin)(torch.ones(2))  # the operator has a compiled handler from here on
    x = torch.ones(3)
    assert torch.sin(Doubling.of(x)).allclose(x.sin() * 2)


class Named(torch.Tensor):
    """A class with a function handler only; it notes the calls and the levels around them."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(func, "__name__", ""))
        if func in (torch.sin, torch.Tensor.sin):
            assert not tls.state.levels
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out.as_subclass(cls) if isinstance(out, torch.Tensor) else out


SUBCLASSED: dict[str, Function] = {
    "pointwise": lambda x: x.sin() * 2,
    "a rule": lambda x: x.softmax(-1) @ x.mT,
    "shifted": lambda x: x.sum(0).cumsum(-1),
    "views": lambda x: torch.cat([x.unsqueeze(0)[..., 1:], x[None, :, :-1]]),
    "parts": lambda x: torch.nn.functional.mse_loss(x, x.cos(), reduction="none"),
}


@pytest.mark.parametrize("name", SUBCLASSED)
@pytest.mark.parametrize("nested", [False, True])
def test_classes_with_a_handler_of_functions_at_repeated_calls(
    function_handler: str, name: str, nested: bool
) -> None:
    """Results of calls on values of the class and plain values have the class, as in a loop."""
    f = SUBCLASSED[name]
    for call in range(6):
        x = torch.randn(2, 4, 3, 3)
        given = x.as_subclass(Named) if call % 2 else x
        Named.seen.clear()
        got = vmap(vmap(f))(given) if nested else vmap(f)(given[0])
        want = torch.stack([torch.stack([f(each) for each in one]) for one in x])
        assert type(got) is (Named if call % 2 else torch.Tensor)
        torch.testing.assert_close(got.as_subclass(torch.Tensor), want if nested else want[0])
        assert bool(Named.seen) == bool(call % 2)


def test_off_switch() -> None:
    """Without the library, or with the switch off, the Python handlers serve every call."""
    code = (
        "import torch, tsfunc; "
        "from tsfunc.bridge.tracers.batch_handlers import SlottedBatchTracer; "
        "assert '__torch_function__' not in vars(SlottedBatchTracer); "
        "assert tsfunc.vmap(torch.sin)(torch.ones(2)).shape == (2,)"
    )
    root = Path(__file__).resolve().parents[2]
    for setting in ({"TSFUNC_COMPILED": "0"}, {"TSFUNC_BUILD_DIR": os.devnull}):
        environment = {**os.environ, "PYTHONPATH": str(root), **setting}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)


class TestBuild:
    def test_a_missing_compiler_is_named(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("TSFUNC_BUILD_DIR", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(FileNotFoundError, match=r"expected a C\+\+ compiler, got none"):
            compiled.build()

    def test_a_missing_compiler_is_no_error_if_possible(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("TSFUNC_BUILD_DIR", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        cli.build_handlers(if_possible=True)
        assert "those in Python serve every call" in capsys.readouterr().out
        with pytest.raises(typer.Exit):
            cli.build_handlers()

    def test_libraries_of_other_sources_are_removed(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("TSFUNC_BUILD_DIR", str(tmp_path))
        path = compiled.library_path()
        old, other = (
            tmp_path / f"{path.stem[:-12]}0123456789ab.so",
            tmp_path / "tsfunc_handlers-x-1.so",
        )
        old.touch()
        other.touch()
        monkeypatch.setattr(compiled, "command", lambda output: ["cp", str(other), str(output)])
        assert compiled.build()[0] == path
        assert sorted(tmp_path.glob("*.so")) == sorted([path, other])

    def test_the_compilers_words_are_shown(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("TSFUNC_BUILD_DIR", str(tmp_path))
        monkeypatch.setenv("CXX", f"{sys.executable} -c import.sys;sys.exit('no.such.header')")
        with pytest.raises(RuntimeError, match="expected the compiler to succeed, got status"):
            compiled.build()
        assert not list(tmp_path.glob("*.so"))

    def test_a_library_that_is_there_is_kept(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("TSFUNC_BUILD_DIR", str(tmp_path))
        compiled.library_path().touch()
        assert compiled.build() == (compiled.library_path(), 0.0)
        cli.build_handlers()
        assert "is there already" in capsys.readouterr().out
