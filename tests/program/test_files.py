"""A loaded function equals the saved one."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tsfunc
from tests.program.damage import edited, rewrite
from tests.program.saved_functions import again
from tsfunc import Dim, grad, load, pytrees, specialize, vmap
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import DescriptorViolation, FileFormatError, MalformedProgramError

WEIGHT = torch.randn(4, 3, requires_grad=True)
KEPT = Path(__file__).parent / "files"


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Scaled:
    x: Tensor
    by: float


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "nested": lambda x: (x, [x + 1, None], {"b": x, "a": 3, 1: "text"}),
    "named": lambda x: Pair(x, Pair(2.5, x)),
    "dataclass": lambda x: Scaled(x, 0.5),
    "torch": lambda x: x.max(0),
    "ordered": lambda x: collections.OrderedDict(z=x, a=x * 2),
    "deque": lambda x: collections.deque([x], 3),
    "constants": lambda x: {"f": torch.half, "d": x.device, "n": math.nan, "c": 1j, "b": True},
    "made": lambda x: torch.zeros(x.shape[0] * 2 + 1, dtype=torch.int32),
    "sizes": lambda x: (x.shape[0] // 2, x.unsqueeze(-1), x.view(-1, 1)[:: x.shape[0] - 1]),
    "nothing": lambda x: (),
}


# Checks of the sizes n and m by the function, from which n >= m follows.
CHECKS: dict[str, Callable[[int, int], None]] = {
    "n >= m": lambda n, m: torch._check(n >= m),
    "n - m >= 0": lambda n, m: torch._check(n - m >= 0),
    "n == 2 * m": lambda n, m: torch._check(n == 2 * m),
    "n * n >= m * m": lambda n, m: (torch._check(n * n >= m * m), torch._check(m <= n))[1],
}


def _tells(x: Tensor) -> Tensor:
    return x * 2 if x.requires_grad else x * 3


ASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of an argument": lambda x, y: _tells(x) + y,
    "of what is computed": lambda x, y: _tells(x + y),
    "of one and the other": lambda x, y: x if x.requires_grad != y.requires_grad else y,
    "in a branch": lambda x, y: tsfunc.cond(x.sum() > 0, _tells, torch.sin, x) + y,
    "in a loop": lambda x, y: tsfunc.fori_loop(0, 2, lambda i, c: c + _tells(x), y),
    "in a checkpoint": lambda x, y: tsfunc.checkpoint(_tells)(x) * y,
    "of a leaf": lambda x, y: x * 2 if (x * y).is_leaf else y,
    "not": lambda x, y: x * y,
}


def saved(func: Any, path: Path, *calls: tuple[Any, ...], **options: Any) -> Any:
    """Return a function specialized for some calls, saved and loaded."""
    made = specialize(func, **options)
    for args in calls:
        made(*args)
    made.save(path / "f.tsf")
    return load(path / "f.tsf")


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


class TestRoundTrips:
    def test_plain_case(self, tmp_path: Path) -> None:
        f = specialize(lambda x: F.relu(x @ WEIGHT), {"x": Meta(["n", 4])})
        x = torch.randn(5, 4)
        want = f(x)
        f.save(tmp_path / "layer.tsf")
        loaded = tsfunc.load(tmp_path / "layer.tsf")
        same(loaded(x), want)
        assert loaded.program.source == f.program.source
        assert str(loaded.program) == str(f.program)
        assert str(loaded.program.properties()) == str(f.program.properties())
        loaded.program.verify()

    def test_constants_that_others_were_computed_from_are_gone(self, tmp_path: Path) -> None:
        def f(x: Tensor) -> Any:
            return tsfunc.hessian(lambda y: (y**3).prod())(x)

        x = torch.randn(3)
        made = specialize(f)
        want = made(x)
        assert made.program.constants <= made.program.lifted.keys()
        made.save(tmp_path / "f.tsf")
        torch.testing.assert_close(load(tmp_path / "f.tsf")(x), want)

    def test_sizes_of_dims_that_are_multiples_are_known(self, tmp_path: Path) -> None:
        dim = Dim("n", min=2, max=40, multiple_of=2)
        f = specialize(lambda x: x.reshape(2, -1).cumsum(1) * x[0], {"x": Meta([dim])})
        f(torch.randn(6))
        f.save(tmp_path / "f.tsf")
        loaded = load(tmp_path / "f.tsf")
        loaded(torch.randn(8))
        assert str(loaded.program.properties()) == str(f.program.properties())
        loaded.program.verify()

    @pytest.mark.parametrize(
        "f",
        [
            lambda x: (x.nonzero(), x[x > 0].sum()),
            lambda x: torch.zeros(x.argmax().item() + 1) + 1,
            lambda x: torch.unique(x)[1:] * 2,
        ],
        ids=["nonzero", "item", "unique"],
    )
    def test_programs_over_sizes_of_data_are_verified(
        self, f: Callable[[Tensor], Any], tmp_path: Path
    ) -> None:
        loaded = saved(f, tmp_path, (torch.randn(6),))
        x = torch.randn(6)
        same(loaded(x), f(x))
        loaded.program.verify()
        made = specialize(f)
        made(x)
        assert str(loaded.program) == str(made.program)
        assert loaded.properties() == made.properties()
        loaded.save(tmp_path / "g.tsf")
        assert (tmp_path / "f.tsf").read_bytes() == (tmp_path / "g.tsf").read_bytes()

    @pytest.mark.parametrize("check", CHECKS)
    def test_checked_facts_are_known_to_verification(self, check: str, tmp_path: Path) -> None:
        """Sizes of results follow from it: ``min(n, m)`` is ``m`` if ``n >= m``."""

        def f(x: Tensor, y: Tensor) -> Tensor:
            CHECKS[check](x.shape[0], y.shape[0])
            return x[: y.shape[0]] * 2 + y

        made = specialize(f, {"x": Meta(["n"]), "y": Meta(["m"])})
        made(torch.ones(8), torch.ones(4))
        made.save(tmp_path / "f.tsf", exact=True)
        loaded = load(tmp_path / "f.tsf")
        assert str(loaded.program) == str(made.program)
        loaded.program.verify()

        def longer(program: Any) -> None:
            nodes = program["graph"]["nodes"]
            sliced = next(n for n in nodes if n.get("operator") == "aten::slice.Tensor")
            sliced["type"]["shape"] = [["+", "m", 1]]

        path = tmp_path / "g.tsf"
        path.write_bytes(edited((tmp_path / "f.tsf").read_bytes(), "programs/0.json", longer))
        with pytest.raises(MalformedProgramError, match="its shape is"):
            load(path).program.verify()

    @pytest.mark.parametrize("n", [0, 1, 2, 3, 17])
    def test_every_size_of_a_named_dim(self, n: int, tmp_path: Path) -> None:
        """This holds for sizes that need no program with symbolic sizes, too."""

        def f(x: Tensor) -> Tensor:
            total = x.sum(0)
            return total + 1 if x.shape[0] == 1 else total * x.shape[0]

        loaded = saved(f, tmp_path, (torch.randn(5, 3),), descriptors={"x": Meta(["n", 3])})
        x = torch.randn(n, 3)
        same(loaded(x), f(x))

    @pytest.mark.parametrize("kind", RESULTS)
    def test_results_of_every_kind_are_loaded(self, kind: str, tmp_path: Path) -> None:
        result = RESULTS[kind]
        loaded = saved(result, tmp_path, (torch.randn(4),), descriptors={"x": Meta(["n"])})
        x = torch.randn(6)
        got, want = loaded(x), result(x)
        assert type(got) is type(want)
        assert pytrees.structure_of(got) == pytrees.structure_of(want)
        for g, w in zip(pytrees.leaves_of(got), pytrees.leaves_of(want), strict=True):
            assert type(g) is type(w)
            if isinstance(w, Tensor | float):
                same(g, w)
            else:
                assert g == w

    def test_static_arguments_are_guarded(self, tmp_path: Path) -> None:
        def f(x: Tensor, *, scale: float, mode: str) -> Any:
            return x * scale if mode == "times" else x + scale

        made = specialize(f)
        x = torch.randn(3)
        for scale, mode in ((2, "times"), (2.0, "times"), (-0.0, "plus"), (math.nan, "plus")):
            made(x, scale=scale, mode=mode)
        made.save(tmp_path / "f.tsf")
        loaded = load(tmp_path / "f.tsf")
        for scale, mode in ((2, "times"), (2.0, "times"), (-0.0, "plus"), (math.nan, "plus")):
            same(loaded(x, scale=scale, mode=mode), f(x, scale=scale, mode=mode))
        with pytest.raises(DescriptorViolation, match="no program for this call"):
            loaded(x, scale=True, mode="times")
        with pytest.raises(DescriptorViolation, match=r"It has programs for:\n  x: float32\[3\]"):
            loaded(torch.randn(4), scale=2, mode="times")

    def test_descriptors_go_with_it(self, tmp_path: Path) -> None:
        described = {"x": Meta([Dim("n", min=2, max=8)], dtype=torch.float32), "k": 3}
        loaded = saved(lambda x, k: x * k, tmp_path, (torch.ones(4), 3), descriptors=described)
        same(loaded(torch.ones(8), 3), torch.full((8,), 3.0))
        with pytest.raises(DescriptorViolation, match=r"x.shape\[0\]: expected"):
            loaded(torch.ones(9), 3)
        with pytest.raises(DescriptorViolation, match="k: expected the value 3"):
            loaded(torch.ones(8), 4)

    def test_settings_are_guarded(self, tmp_path: Path) -> None:
        f = specialize(lambda x: x * 2 if torch.is_grad_enabled() else x * 3)
        f(torch.ones(4))
        f.save(tmp_path / "exact.tsf", exact=True)
        f.save(tmp_path / "f.tsf")
        with torch.no_grad(), pytest.raises(DescriptorViolation, match="no program"):
            load(tmp_path / "exact.tsf")(torch.ones(4))
        loaded = load(tmp_path / "f.tsf")
        for grad_mode, requires_grad in itertools.product((True, False), repeat=2):
            with torch.set_grad_enabled(grad_mode):
                x = torch.ones(4, requires_grad=requires_grad)
                same(loaded(x), f(x))
        torch.set_default_dtype(torch.float64)
        try:
            with pytest.raises(DescriptorViolation, match="no program"):
                loaded(torch.ones(4, dtype=torch.float32))
        finally:
            torch.set_default_dtype(torch.float32)

    def test_closed_over_values_are_kept(self, tmp_path: Path) -> None:
        scale = 3.0
        loaded = saved(lambda x: x * scale, tmp_path, (torch.ones(2),))
        scale = 5.0
        same(loaded(torch.ones(2)), torch.full((2,), 3.0))

    def test_one_program_of_several(self, tmp_path: Path) -> None:
        f = specialize(lambda x: x.cos())
        f(torch.ones(2))
        f(torch.ones(3))
        f.save(tmp_path / "f.tsf", f.program)
        loaded = load(tmp_path / "f.tsf")
        same(loaded(torch.ones(3)), torch.ones(3).cos())
        with pytest.raises(DescriptorViolation):
            loaded(torch.ones(2))

    def test_a_program_by_itself(self, tmp_path: Path) -> None:
        f = specialize(lambda x, y: {"z": x.cos().sum() + y}, {"x": Meta(["n"])})
        f(torch.ones(2), y=torch.ones(2))
        f.program.save(tmp_path / "f.tsf")
        loaded = load(tmp_path / "f.tsf")
        same(loaded(torch.zeros(3), y=torch.ones(2)), {"z": torch.full((2,), 4.0)})
        assert loaded.cache_info().programs == 1

    def test_no_grad_inside(self, tmp_path: Path) -> None:
        def f(x: Tensor) -> Tensor:
            with torch.no_grad():
                y = x * 2
            return x * y

        x = torch.ones(3, requires_grad=True)
        loaded = saved(f, tmp_path, (x,))
        same(torch.autograd.grad(loaded(x).sum(), x)[0], torch.full((3,), 2.0))

    def test_other_transforms_of_a_loaded_function(self, tmp_path: Path) -> None:
        loaded = saved(lambda x: x.sin().sum(), tmp_path, (torch.ones(3),))
        x = torch.randn(5, 3)
        same(vmap(grad(loaded))(x), x.cos())
        same(specialize(loaded)(x[0]), x[0].sin().sum())

    def test_derivatives_by_a_part_of_an_argument(self, tmp_path: Path) -> None:
        """The set of tensors that require grad makes no difference unless the function reads it."""
        f = specialize(lambda d, y: (d["a"] * d["b"]["c"] * y).sum())
        a, c, y = torch.randn(3, 3).unbind()
        f({"a": a, "b": {"c": c}}, y)
        f.save(tmp_path / "f.tsf")
        loaded = load(tmp_path / "f.tsf")
        same(grad(loaded)({"a": a, "b": {"c": c}}, y), {"a": c * y, "b": {"c": a * y}})
        same(grad(lambda a: loaded({"a": a, "b": {"c": c}}, y))(a), c * y)
        _, pull = tsfunc.vjp(lambda c, y: loaded({"a": a, "b": {"c": c}}, y), c, y)
        same(pull(torch.tensor(1.0)), (a * y, a * c))
        same(vmap(grad(lambda c: loaded({"a": a, "b": {"c": c}}, y)))(torch.ones(2, 3)),
             (a * y).expand(2, 3))  # fmt: skip
        with pytest.raises(
            DescriptorViolation, match=r"in d\['a'\]\.dtype: float64, was float32\."
        ):
            loaded({"a": a.double().requires_grad_(), "b": {"c": c}}, y)

    @pytest.mark.parametrize("ask", ASKS)
    def test_properties_of_grad_are_read(self, ask: str, tmp_path: Path) -> None:
        f = specialize(ASKS[ask])
        x, y = torch.ones(3), torch.full((3,), 2.0)
        f(x, y)
        f.save(tmp_path / "f.tsf")
        loaded = load(tmp_path / "f.tsf")
        for of_x, of_y in itertools.product((False, True), repeat=2):
            args = x.clone().requires_grad_(of_x), y.clone().requires_grad_(of_y)
            same(loaded(*args), ASKS[ask](*args))
            assert loaded(*args).requires_grad is ASKS[ask](*args).requires_grad

    def test_the_same_program_makes_the_same_file(self, tmp_path: Path) -> None:
        f = specialize(lambda x: x @ WEIGHT)
        f(torch.ones(2, 4))
        for name in ("a", "b"):
            f.save(tmp_path / name)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        load(tmp_path / "a").save(tmp_path / "c")
        assert (tmp_path / "a").read_bytes() == (tmp_path / "c").read_bytes()

    def test_a_loaded_program_has_the_conditions_on_its_numbers(self, tmp_path: Path) -> None:
        f = specialize(lambda x, k: x * k if k > 3 else x - k)
        for k in (5.0, 6.0, 7.0):
            f(torch.ones(2), k)
        f.save(tmp_path / "f.tsf", exact=True)
        program, loaded = f.program, load(tmp_path / "f.tsf").program
        for each in (program, loaded):
            (guard,) = each.trace_guards
            assert list(guard.texts(str)) == ["k > 3.0"]


class TestTensors:
    def test_views_of_one_storage_stay_views_of_one(self, tmp_path: Path) -> None:
        base = torch.zeros(6)
        even, whole, bits = base[::2], base, base.view(torch.int32)

        def f(x: Tensor) -> tuple[Tensor, ...]:
            even.add_(x)
            return whole + 0, bits + 0

        loaded = saved(f, tmp_path, (torch.ones(3),))
        for _ in range(2):
            got, want = loaded(torch.ones(3)), f(torch.ones(3))
            same(got, want)

    def test_state_is_written_and_saved_again(self, tmp_path: Path) -> None:
        norm = nn.BatchNorm1d(3)
        f = specialize(norm)
        x = torch.randn(8, 3)
        f(x)
        f.save(tmp_path / "a.tsf")
        loaded = load(tmp_path / "a.tsf")
        same(loaded(x), f(x))
        loaded.save(tmp_path / "b.tsf")
        same(load(tmp_path / "b.tsf")(x), f(x))

    def test_parameters_stay_parameters(self, tmp_path: Path) -> None:
        layer = nn.Linear(4, 3)
        loaded = saved(layer, tmp_path, (torch.ones(2, 4),))
        kept = list(loaded.program.lifted.values())
        assert all(type(each) is nn.Parameter and each.requires_grad for each in kept)
        loaded(torch.ones(2, 4)).sum().backward()
        assert all(each.grad is not None for each in kept)

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.randn(3, dtype=torch.float64),
            torch.randn(4, 3).t(),
            torch.randn(1).expand(4),
            torch.randn(3, dtype=torch.complex128),
            torch.randn(3, dtype=torch.complex64).conj(),
            torch.tensor([True, False]),
            torch.tensor(3),
            torch.zeros(0, 3),
            torch.randn(1000)[5:8],
            torch.randn(4).to(torch.float8_e4m3fn),
            torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        ],
        ids=lambda t: f"{t.dtype}{list(t.shape)}",
    )
    def test_kinds_of_tensors(self, tensor: Tensor, tmp_path: Path) -> None:
        loaded = saved(lambda x: (x, tensor.clone(), tensor), tmp_path, (torch.ones(1),))
        _, cloned, whole = loaded(torch.ones(1))
        for got in (cloned, whole):
            assert got.dtype is tensor.dtype
            same(got.to(torch.complex128), tensor.to(torch.complex128))
        assert whole.is_conj() or whole.stride() == tensor.stride() or tensor.is_conj()

    def test_only_the_part_that_is_used_is_saved(self, tmp_path: Path) -> None:
        part = torch.zeros(1_000_000)[5:8]
        saved(lambda x: x + part, tmp_path, (torch.ones(3),))
        assert (tmp_path / "f.tsf").stat().st_size < 20_000

    def test_devices_are_replaced_when_a_file_is_loaded(self, tmp_path: Path) -> None:
        f = specialize(lambda x: x + torch.ones(3, device=x.device))
        f(torch.ones(3))
        f.save(tmp_path / "f.tsf")
        loaded = load(tmp_path / "f.tsf", device="meta")
        assert loaded(torch.ones(3, device="meta")).device.type == "meta"


class TestCopies:
    def test_pickle(self) -> None:
        f = specialize(lambda x: Pair(x @ WEIGHT, 3), {"x": Meta(["n", 4])})
        f(torch.ones(2, 4))
        x = torch.randn(3, 4)
        again = pickle.loads(pickle.dumps(f))
        assert type(again(x)) is Pair
        same(again(x).a, x @ WEIGHT)

    def test_copies_of_a_function_share_its_programs(self) -> None:
        f = specialize(lambda x: x + 1)
        f(torch.ones(2))
        for make in (copy.copy, copy.deepcopy):
            other = make(f)
            assert other.programs == f.programs
            other(torch.ones(3))
            assert len(other.programs) == 2 and len(f.programs) == 1

    def test_a_deep_copy_of_a_module_has_weights_of_its_own(self) -> None:
        f = specialize(nn.Linear(2, 2))
        x = torch.ones(1, 2)
        want = f(x)
        other = copy.deepcopy(f)
        with torch.no_grad():
            other.func.weight.zero_()
        same(f(x), want)
        same(other(x), other.func.bias[None])


class TestRefusals:
    def test_values_that_no_file_can_hold(self, tmp_path: Path) -> None:
        class Config:
            width = 3

        f = specialize(lambda x, config, out: x * config.width)
        f(torch.ones(2), Config(), out=None)
        with pytest.raises(ValueError, match=r"args\[1\], an object of class Config"):
            f.save(tmp_path / "f.tsf")
        assert not list(tmp_path.iterdir())

    def test_by_the_name_of_the_argument(self, tmp_path: Path) -> None:
        f = specialize(lambda x, *, how: x)
        f(torch.ones(2), how={"key": [torch.sin]})
        with pytest.raises(ValueError, match=r"the argument how\['key'\]\[0\], a builtin"):
            f.save(tmp_path / "f.tsf")

    def test_sparse_state(self, tmp_path: Path) -> None:
        weight = torch.eye(2).to_sparse()
        f = specialize(lambda x: weight @ x)
        f(torch.ones(2))
        with pytest.raises(ValueError, match=r"a tensor of layout torch.sparse_coo"):
            f.save(tmp_path / "f.tsf")

    def test_saving_compiles_nothing(self, tmp_path: Path) -> None:
        compiled: list[torch.fx.GraphModule] = []

        def backend(module: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
            compiled.append(module)
            return module.forward

        layer = torch.nn.Linear(4, 3)
        f = specialize(layer, {"input": Meta(["n", 4])}, backend=backend)
        f(torch.randn(5, 4))
        count = len(compiled)
        f.save(tmp_path / "layer.tsf")
        assert len(compiled) == count == 1
        loaded = load(tmp_path / "layer.tsf")
        for n in (0, 1, 6):
            x = torch.randn(n, 4)
            torch.testing.assert_close(loaded(x), layer(x))

    def test_nothing_to_save(self, tmp_path: Path) -> None:
        f = specialize(lambda x: x)
        with pytest.raises(RuntimeError, match="there is no program yet"):
            f.save(tmp_path / "f.tsf")
        f(torch.ones(1))
        other = specialize(lambda x: x)
        other(torch.ones(1))
        with pytest.raises(ValueError, match=r"expected programs in \.programs"):
            f.save(tmp_path / "f.tsf", other.program)

    def test_a_class_that_is_not_there(self, tmp_path: Path) -> None:
        f = specialize(lambda x: Pair(x, 1))
        f(torch.ones(1))
        f.save(tmp_path / "f.tsf")
        rewrite(tmp_path / "f.tsf", "programs/0.json", lambda data: data.replace(b"Pair", b"Pear"))
        with pytest.raises(FileFormatError, match=r"results.class: the class .*Pear' is not known"):
            load(tmp_path / "f.tsf")
        name = f"{Pair.__module__}.Pear"
        assert type(load(tmp_path / "f.tsf", classes={name: Pair})(torch.ones(1))) is Pair


class Running(nn.Module):
    """State that is assigned, beside weights."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))
        self.layer = nn.Linear(2, 2)
        self.steps = 0
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor, update: bool = True) -> Tensor:
        if update:
            self.total = self.total * 0.5 + x.detach().sum(0)
            self.steps = 1
        return self.layer(x) + self.total


TABLE: dict[str, Any] = {"h": torch.zeros(2), "factor": 3}
FLIP = False
STEPS = 0


class TestState:
    """NOTE [state of loaded functions]."""

    def test_buffers_that_are_assigned(self, tmp_path: Path) -> None:
        net = Running()
        f = specialize(net, {"x": Meta(["n", 2])})
        f(torch.ones(3, 2), True)
        f(torch.ones(3, 2), False)
        f.save(tmp_path / "f.tsf")
        loaded = load(tmp_path / "f.tsf")
        assert loaded.state["self.total"].equal(net.total) and loaded.state["self.steps"] == 1
        for n, update in ((4, True), (1, False), (2, True), (1, True), (5, False)):
            x = torch.randn(n, 2)
            torch.testing.assert_close(loaded(x, update), net(x, update))
        assert loaded.state["self.total"].equal(net.total)
        loaded.save(tmp_path / "g.tsf")
        again = load(tmp_path / "g.tsf")
        x = torch.randn(3, 2)
        torch.testing.assert_close(again(x, True), net(x, True))
        assert not again.state["self.total"].equal(loaded.state["self.total"])

    def test_copies_have_a_state_of_their_own(self, tmp_path: Path) -> None:
        f = specialize(Running())
        f(torch.ones(1, 2))
        f.save(tmp_path / "f.tsf")
        loaded = load(tmp_path / "f.tsf")
        for copied in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
            copied(torch.ones(1, 2))
            assert copied.state["self.total"].equal(torch.full((2,), 1.5))
        assert loaded.state["self.total"].equal(torch.ones(2))

    def test_variables_and_containers(self, tmp_path: Path) -> None:
        count = torch.zeros(1)

        def f(x: Tensor, update: bool) -> Tensor:
            nonlocal count
            if update:
                TABLE["h"] = TABLE["h"] * 0.5 + x
                count = count + 1
            return TABLE["h"] * TABLE["factor"] + count

        made = specialize(f)
        for update in (True, False, True, False):
            made(torch.ones(2), update)
        made.save(tmp_path / "f.tsf")
        loaded = load(tmp_path / "f.tsf")
        for update in (True, False, True, True, False):
            x = torch.randn(2)
            torch.testing.assert_close(loaded(x, update), f(x, update))
        assert loaded.state["count"].equal(count) and loaded.state["TABLE"]["factor"] == 3

    def test_a_single_program(self, tmp_path: Path) -> None:
        net = Running()
        f = specialize(net)
        f(torch.ones(1, 2))
        f.program.save(tmp_path / "f.tsf")
        loaded = load(tmp_path / "f.tsf")
        for _ in range(2):
            torch.testing.assert_close(loaded(torch.ones(1, 2)), net(torch.ones(1, 2)))

    def test_values_that_are_read_and_assigned_are_refused(self, tmp_path: Path) -> None:
        def flips(x: Tensor) -> Tensor:
            global FLIP
            FLIP = not FLIP
            return x * 2 if FLIP else x

        f = specialize(flips)
        f(torch.ones(2))
        f(torch.ones(2))
        with pytest.raises(ValueError, match="assigns to FLIP, whose value it also looks at"):
            f.save(tmp_path / "f.tsf")

    def test_changed_values_are_refused(self, tmp_path: Path) -> None:
        def counts(x: Tensor) -> Tensor:
            global STEPS
            STEPS += 1
            return x * STEPS

        f = specialize(counts)
        f(torch.ones(2))
        with pytest.raises(ValueError, match=r"save\(counts\): every program is out of date"):
            f.save(tmp_path / "f.tsf")

    def test_only_programs_with_valid_guards_are_saved(self, tmp_path: Path) -> None:
        net = nn.Sequential(nn.Dropout(1.0))
        f = specialize(net)
        f(torch.ones(2))
        net.eval()
        f(torch.ones(2))
        net.train()
        f(torch.ones(2))
        net.eval()
        f.save(tmp_path / "f.tsf")
        assert load(tmp_path / "f.tsf")(torch.ones(2)).equal(torch.ones(2))

    def test_a_state_of_another_type_has_no_program(self, tmp_path: Path) -> None:
        table = {"h": torch.zeros(1)}

        def grows(x: Tensor) -> Tensor:
            table["h"] = torch.cat([table["h"], x])
            return table["h"]

        f = specialize(grows)
        f(torch.ones(1))
        f(torch.ones(1))
        f.program  # noqa: B018
        table["h"] = torch.zeros(2)
        f.save(tmp_path / "f.tsf", exact=True)
        loaded = load(tmp_path / "f.tsf")
        assert loaded(torch.ones(1)).tolist() == [0.0, 0.0, 1.0]
        with pytest.raises(DescriptorViolation, match="there is no program for this call"):
            loaded(torch.ones(1))


class TestKeptFiles:
    """Files in the repository, written by earlier code, load and have the same results."""

    def test_tensors_that_may_require_grad(self) -> None:
        loaded = load(KEPT / "any_grad.tsf")
        a, c, y = torch.ones(4), torch.full((4,), 2.0), torch.full((4,), 3.0)
        same(loaded({"a": a, "b": {"c": c}}, y), torch.tensor(24.0))
        same(grad(lambda c, y: loaded({"a": a, "b": {"c": c}}, y), (0, 1))(c, y), (a * y, a * c))
        loaded.program.verify()

    def test_conditions_and_shapes(self) -> None:
        loaded = load(KEPT / "conditions.tsf")
        got = loaded(torch.ones(8), torch.ones(5))
        same(got[0], torch.full((5,), 2.0))
        assert got[1] == torch.Size([8])
        with pytest.raises(DescriptorViolation, match=r"n % 2 == 0 does not hold"):
            loaded(torch.ones(7), torch.ones(5))

    def test_a_kept_file_with_state_loads(self) -> None:
        loaded, net = load(KEPT / "state.tsf"), Running()
        net.total = torch.tensor([3.0, 3.0])
        for n, update in ((3, True), (1, True), (2, False), (4, True)):
            x = torch.arange(2.0 * n).reshape(n, 2)
            torch.testing.assert_close(loaded(x, update), net(x, update))
        assert loaded.state["self.total"].equal(net.total)
        loaded.program.verify()

    def test_the_version(self, tmp_path: Path) -> None:
        f = specialize(lambda x: x + 1)
        f(torch.ones(2))
        f.save(tmp_path / "f.tsf", exact=True)
        assert b'"version":3' in (tmp_path / "f.tsf").read_bytes()

    def test_containers_and_numbers(self) -> None:
        step = load(KEPT / "containers.tsf")
        weight = torch.arange(12.0).reshape(4, 3)
        for n in (5, 1, 2, 9):
            x, y = torch.ones(n, 4), torch.zeros(2)
            got = step(x, y, scale=2.0)
            h = (x @ weight) * 2.0
            same(got["total"], h.sum())
            same(got["pair"], (h.max(0)[0], [h.max(0)[1], None]))
            same(got["y"], torch.tensor([0.0, 0.0, 0.0, 2.0]))
            assert got["n"] == 2 * n + 1
        assert got["count"] == 4
        assert step(x, y, scale=math.nan, mode="mean")["total"].isnan()
        with torch.no_grad():
            same(step(x, y, scale=2.0)["total"], h.sum())
        with pytest.raises(DescriptorViolation, match=r"x.shape\[1\]: expected 4, got 3"):
            step(torch.ones(2, 3), y, scale=2.0)
        step.program.verify()

    def test_a_kept_file_with_checkpoints_loads(self) -> None:
        loaded = load(KEPT / "checkpoints.tsf")
        for n in (4, 7):
            _same_when_seeded(loaded, again, torch.randn(n, 3))
        loaded.program.verify()


def _same_when_seeded(one: Any, other: Any, *args: Any) -> None:
    """Check that two functions draw the same random numbers."""
    found = []
    for f in (one, other):
        torch.manual_seed(0)
        found.append(f(*args))
    same(*found)


class TestRunAgain:
    def test_checkpoints_and_derivatives_of_random_functions(self, tmp_path: Path) -> None:
        f = specialize(again, {"x": Meta(["n", 3])})
        f(torch.randn(4, 3))
        f.save(tmp_path / "f.tsf", exact=True)
        loaded = load(tmp_path / "f.tsf")
        for n in (4, 7):
            x = torch.randn(n, 3)
            _same_when_seeded(loaded, again, x)
            assert type(loaded(x)[-1]) is torch.Size

    def test_in_a_process_that_has_only_loaded_it(self) -> None:
        code = "import sys, torch, tsfunc; tsfunc.load(sys.argv[1])(torch.randn(4, 3))"
        subprocess.run([sys.executable, "-c", code, str(KEPT / "checkpoints.tsf")], check=True)

    @pytest.mark.parametrize("policy", [None, "dots_saveable", [torch.ops.aten.mm]])
    def test_under_transforms(self, policy: Any, tmp_path: Path) -> None:
        if isinstance(policy, str):
            policy = getattr(tsfunc.checkpoint_policies, policy)
        inner = tsfunc.checkpoint(lambda x: (x @ x.T).sin().sum(), policy=policy)
        f = specialize(lambda x: inner(x) * 2)
        x = torch.randn(3, 3)
        f(x)
        f.save(tmp_path / "f.tsf")
        loaded, xs = load(tmp_path / "f.tsf"), torch.randn(2, 3, 3)
        same(grad(loaded)(x), grad(f)(x))
        same(vmap(grad(loaded))(xs), vmap(grad(f))(xs))
        same(tsfunc.jvp(loaded, (x,), (x,)), tsfunc.jvp(f, (x,), (x,)))
        same(grad(lambda x: grad(loaded)(x).sum())(x), grad(lambda x: grad(f)(x).sum())(x))

    def test_a_policy_of_the_users_is_refused(self, tmp_path: Path) -> None:
        def mine(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            return True

        f = specialize(tsfunc.checkpoint(torch.sin, policy=mine))
        f(torch.ones(2))
        with pytest.raises(ValueError, match=r"policy is a user-defined function \(mine\)"):
            f.save(tmp_path / "f.tsf")


class TestControlFlow:
    def test_branches_loops_and_their_derivatives(self, tmp_path: Path) -> None:
        scale = torch.randn(3)

        def f(x: Tensor) -> Any:
            y = tsfunc.cond(x.sum() > 0, lambda x: x * scale, lambda x: x - 1, x)
            _, z = tsfunc.while_loop(
                lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (torch.tensor(0), y)
            )
            return tsfunc.scan(lambda c, r: (c + r, c * r), torch.zeros(3), z)

        for func in (f, grad(lambda x: f(x)[0].sum())):
            made = specialize(func, {"x": Meta(["n", 3])})
            made(torch.randn(4, 3))
            made.save(tmp_path / "f.tsf")
            loaded = load(tmp_path / "f.tsf")
            assert loaded.program.source == made.program.source
            for n in (4, 2, 7):
                x = torch.randn(n, 3)
                torch.testing.assert_close(loaded(x), func(x))
