"""Programs exported to torch.export: its own tools accept them, for every size."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import Dim, cond, fori_loop, grad, make_graph, scan, specialize, switch, vmap
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import ExportError

WEIGHT = torch.nn.Parameter(torch.randn(4, 2))
Exported = torch.export.ExportedProgram


def layer(x: Tensor, p: dict[str, Tensor], k: int = 3) -> dict[str, Any]:
    h = x @ WEIGHT
    with torch.no_grad():
        h = h / h.std().clamp(min=1)
    return {"a": h.relu() * torch.arange(2.0), "b": [p["u"].view(x.shape[0], 2) + k]}


def saved_and_loaded(program: Exported) -> Exported:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


WAYS: dict[str, Callable[[Exported], Exported]] = {
    "module": lambda program: program,
    "save and load": saved_and_loaded,
    "decompositions": lambda program: program.run_decompositions(),
}


# torch's own passes use a deprecated class of torch.
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("way", WAYS)
def test_torchs_tools(way: str) -> None:
    f = specialize(layer, {"x": Meta([Dim("n", max=100), 4]), "p": {"u": Meta(["2*n"])}})
    f(torch.ones(3, 4), {"u": torch.ones(6)}, k=4)
    module = WAYS[way](f.to_exported_program()).module()
    for n in (2, 7):
        args = torch.randn(n, 4), {"u": torch.randn(2 * n)}
        torch.testing.assert_close(module(*args, k=4), layer(*args, k=4))


@pytest.mark.parametrize("size", ["a*b", "a+b", "a//2", "3*a", "2*a+1", "a-1"])
def test_sizes_that_are_expressions(size: str) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y * 2

    g = specialize(f, {"x": Meta([Dim("a", min=4), "b"]), "y": Meta([size])})
    length: Callable[..., int] = eval(f"lambda a, b: {size}")
    g(torch.ones(4, 6), torch.ones(length(4, 6)))
    module = g.to_exported_program().module()
    x, y = torch.randn(6, 3), torch.randn(length(6, 3))
    torch.testing.assert_close(module(x, y), f(x, y))


def test_multiples_are_multiples_there() -> None:
    g = specialize(lambda x: x.view(-1, 4).sum(1), {"x": Meta([Dim("n", multiple_of=4)])})
    g(torch.ones(16))
    x = torch.randn(24)
    torch.testing.assert_close(g.to_exported_program().module()(x), x.view(-1, 4).sum(1))


def test_sizes_for_which_torch_has_no_program_are_left_out() -> None:
    """torch.export would require the dim without the 2 that a kernel of 3 removes."""
    net = torch.nn.Sequential(torch.nn.Conv1d(3, 4, 3), torch.nn.BatchNorm1d(4)).eval()
    g = specialize(net, {"input": Meta(["b", 3, "n"])})
    g(torch.ones(2, 3, 8))
    x = torch.randn(3, 3, 5)
    torch.testing.assert_close(g.to_exported_program().module()(x), net(x))


def test_derivatives() -> None:
    f = specialize(vmap(grad(lambda x: (x @ WEIGHT).sin().sum())), {"x": Meta(["n", 4])})
    x = torch.randn(3, 4)
    want = f(x)
    program = f.to_exported_program()
    assert [p is not None for p in program.parameters()] == [True]
    torch.testing.assert_close(program.module()(x), want)


def test_writes_into_arguments() -> None:
    def f(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sum(0)

    g = specialize(f, {"x": Meta(["n", 2])})
    g(torch.ones(3, 2))
    a, b = torch.ones(5, 2), torch.ones(5, 2)
    torch.testing.assert_close([g.to_exported_program().module()(a), a], [f(b), b])


def test_control_flow() -> None:
    f = specialize(lambda x: cond(x.sum() > 0, torch.sin, torch.cos, x))
    f(torch.ones(3))
    module = f.to_exported_program().module()
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(module(x), f(x))


class Block(torch.nn.Module):
    """A module with all kinds of state: some unused, some tied, some replaced in each call."""

    seen: Tensor
    step: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.tied = self.layers[0].weight
        self.unused = torch.nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("step", torch.zeros(()))
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 1]), persistent=False)
        self.offset = torch.full((4,), 2.0)
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls = 1
        self.seen.add_(x.sum(0).detach())
        before = self.step
        self.step = self.step + 1
        y = self.layers(x) * self.mask + self.offset
        return y @ self.tied + torch.arange(4.0) + self.calls, before


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("way", WAYS)
def test_state_has_the_names_that_the_module_has(way: str) -> None:
    model = Block()
    eager = copy.deepcopy(model)
    f = specialize(model, {"x": Meta(["n", 4])})
    f(torch.zeros(3, 4))
    model.load_state_dict(eager.state_dict())
    exported = f.to_exported_program()
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    signature = exported.graph_signature
    assert set(exported.state_dict) == set(model.state_dict())
    assert {*signature.parameters, *signature.buffers} == set(own)
    assert set(signature.non_persistent_buffers) == {"mask"}
    assert len(signature.lifted_tensor_constants) == 2  # the offset, and arange(4.0)
    program = WAYS[way](exported)
    module = program.module()
    for n in (5, 2):
        x = torch.randn(n, 4)
        torch.testing.assert_close(module(x), eager(x))
        changed = dict(module.named_buffers())
        for name in ("seen", "step", "layers.1.running_mean"):
            torch.testing.assert_close(changed[name], eager.get_buffer(name))


def test_assignments_follow_all_reads() -> None:
    class Swap(torch.nn.Module):
        a: Tensor
        b: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.ones(2))
            self.register_buffer("b", torch.zeros(2))

        def forward(self) -> Tensor:
            first = self.a
            self.a, self.b = self.b, self.a
            return first

    model = Swap()
    f = specialize(model)
    f()
    eager = copy.deepcopy(model)
    module = f.to_exported_program().module()
    for _ in range(3):
        torch.testing.assert_close([module(), *module.buffers()], [eager(), eager.a, eager.b])


def test_a_buffer_that_changes_its_shape() -> None:
    class Grows(torch.nn.Module):
        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.total = self.total + x
            return self.total

    program = specialize(Grows()).lower({"x": Meta([3], dtype=torch.float32)})
    with pytest.raises(ExportError, match=r"self.total is assigned .*shape \(3,\)"):
        program.to_exported_program()


def test_numbers_are_dynamic() -> None:
    f = specialize(lambda x, k: x.repeat(k) * k, {"x": Meta(["n"]), "k": int})
    f(torch.ones(3), 4)
    module = f.to_exported_program().module()
    for n, k in ((2, 5), (7, 3)):
        torch.testing.assert_close(module(torch.ones(n), k), torch.full((n * k,), float(k)))


def test_facts_about_sizes_of_data_are_checked() -> None:
    def f(x: Tensor, n: Tensor) -> Tensor:
        k: Any = n.item()
        torch._check(k >= 2)
        torch._check(k <= x.shape[0])
        return x[:k]

    g = specialize(f)
    g(torch.ones(5), torch.tensor(3))
    module = g.to_exported_program().module()
    assert module(torch.ones(5), torch.tensor(4)).shape == (4,)
    with pytest.raises(RuntimeError, match=">= 2"):
        module(torch.ones(5), torch.tensor(1))


@dataclass
class Batch:
    x: Tensor
    rest: list[Tensor]


torch.export.register_dataclass(Batch, serialized_type_name="tests.test_exporting.Batch")


def test_containers_that_torch_knows() -> None:
    like: Any = Meta(["n", 2])
    f = specialize(lambda b: b.x + b.rest[0], {"b": Batch(like, [like])})
    f(Batch(torch.ones(3, 2), [torch.ones(3, 2)]))
    module = f.to_exported_program().module()
    x = torch.randn(7, 2)
    torch.testing.assert_close(module(Batch(x, [x])), 2 * x)


def test_names_of_closed_over_tensors() -> None:
    net, scale = torch.nn.Linear(3, 3), {"out": torch.ones(3)}
    f = specialize(lambda x: net(x) * scale["out"])
    f(torch.ones(3))
    names = list(f.to_exported_program().state_dict)
    assert names == ["net.weight", "net.bias", "scale.out"]


def test_assignments_that_it_has_no_place_for() -> None:
    kept: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        kept[:] = [x * 2]
        return x

    g = specialize(f)
    g(torch.ones(3))
    with pytest.raises(ExportError, match="assignment of a tensor to kept, which is not a buffer"):
        g.to_exported_program()


class Model:
    def __init__(self) -> None:
        self.w = torch.ones(3)


def test_values_that_it_can_not_hold() -> None:
    with_object = specialize(lambda m, x: x * m.w)
    with_object(Model(), torch.ones(3))
    with pytest.raises(ExportError, match=r"an argument of type Model.*graph_module"):
        with_object.to_exported_program()
    with pytest.raises(ExportError, match="without a record"):
        make_graph(torch.sin)(torch.ones(2)).to_exported_program()


class Scaled(torch.nn.Module):
    """A module with a constant, and a non-persistent buffer."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.rand(3)
        self.weight = torch.nn.Parameter(torch.rand(3))
        self.register_buffer("shift", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return x * self.scale + self.weight + self.shift


def test_constants_have_the_names_that_the_module_has_for_them() -> None:
    net = torch.nn.Sequential(Scaled(), Scaled())
    f = specialize(net)
    x = torch.randn(2, 3)
    want = f(x)
    program = f.program.to_exported_program()
    assert set(program.constants) == {"0.scale", "0.shift", "1.scale", "1.shift"}
    assert set(program.state_dict) == {"0.weight", "1.weight"}
    torch.testing.assert_close(program.module()(x), want)


def test_hooks_of_the_users_state_dict_are_left_alone() -> None:
    net = Scaled()
    called: list[str] = []
    hook: Any = net.register_state_dict_pre_hook
    hook(lambda *args: called.append("pre"))
    f = specialize(net)
    f(torch.ones(3))
    f.program.to_exported_program()
    assert called == []


def _choice(x: Tensor) -> Any:
    return cond(x.sum() > 0, lambda x: (x * x).sin(), torch.exp, x).sum()


def _switch(x: Tensor) -> Any:
    index = (x.sum() > 0).long()
    return switch(index, [torch.sin, lambda x: x * x], x).sum()


def _loop(x: Tensor) -> Any:
    return fori_loop(0, 3, lambda i, c: c.sin() + x, x).sum()


def _scan(x: Tensor) -> Any:
    last, ys = scan(lambda c, y: (c * 0.5 + y.sin(), c * y), x[0], x)
    return last + ys.sum()


DERIVATIVES = [
    *[pytest.param(f, 1, id=f.__name__) for f in (_choice, _switch, _loop, _scan)],
    *[
        pytest.param(f, 2, id=f"vmap of {f.__name__}", marks=pytest.mark.slow)
        for f in (_switch, _loop, _scan)
    ],
    pytest.param(_choice, 2, id="vmap of _choice"),
]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own call
@pytest.mark.parametrize(("f", "rank"), DERIVATIVES)
def test_derivatives_of_control_flow(f: Callable[[Tensor], Tensor], rank: int) -> None:
    """torch requires operands and results of bodies that share no memory."""
    g = grad(f) if rank == 1 else vmap(grad(f))
    x = torch.linspace(-1, 1, 15).view(5, 3)[(-1,) * (2 - rank)]
    sizes: list[int | str] = ["n", 3]
    specialized = specialize(lambda x: g(x), {"x": Meta(sizes[:rank])})
    specialized(x)
    exported = specialized.to_exported_program()
    for module in (exported.module(), exported.run_decompositions().module()):
        for one in (x, torch.cat([x, x * 0.5])):
            torch.testing.assert_close(module(one), g(one))
