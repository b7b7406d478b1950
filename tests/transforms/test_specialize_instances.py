"""Objects as parameters: only the attributes that a trace reads are checked and read anew."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import pathlib
import threading
import types
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from torch import Tensor, nn

from tsfunc import MetaTensorType as Meta
from tsfunc import grad, specialize, vmap
from tsfunc.errors import DescriptorViolation, TypeCheckError
from tsfunc.program.closure import instances


class Mode(enum.Enum):
    ADD = "add"
    MUL = "mul"


class Scale:
    """A plain class, which torch does not know."""

    kind = "linear"

    def __init__(self, weight: Tensor, factor: float = 2.0, mode: Mode = Mode.MUL) -> None:
        self.weight = weight
        self.factor = factor
        self.mode = mode
        self.unused = object()

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.strength() if self.mode is Mode.MUL else x + self.strength()

    def strength(self) -> Tensor:
        return self.weight * self.factor

    @property
    def doubled(self) -> Tensor:
        return 2 * self.weight


class Net(nn.Module):
    shift: Tensor

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, width), nn.Linear(width, 2)])
        self.register_buffer("shift", torch.ones(2))
        self.gain = 3.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x + self.shift) * self.gain


def apply(model: Callable[[Tensor], Any], x: Tensor) -> Any:
    return model(x)


class Programs:
    """The programs of a specialized function, to be counted."""

    def __init__(self, specialized: Any) -> None:
        self.specialized = specialized

    def __len__(self) -> int:
        return int(self.specialized.cache_info().misses)


def traces(func: Callable[..., Any]) -> tuple[Any, Programs]:
    """Return the specialized function, and the calls that needed a new program."""
    specialized = specialize(func)
    return specialized, Programs(specialized)


class TestSeedExample:
    """The example of issue 49650, which torch.jit.script rejects."""

    def test_a_submodule_annotated_by_its_class(self) -> None:
        class TestSubModule(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.v = torch.rand((2, 3))

            def forward(self) -> Tensor:
                return self.v

        class TestModule(nn.Module):
            sub: TestSubModule

            def __init__(self) -> None:
                super().__init__()
                self.sub = TestSubModule()

            def forward(self) -> Any:
                return self.sub()

        module = TestModule()
        f = specialize(module)
        assert f().equal(module.sub.v) and f().equal(module.sub.v)
        module.sub.v = torch.rand((2, 3))
        assert f().equal(module.sub.v)
        module.sub = nn.Identity()  # type: ignore[assignment]
        with pytest.raises(TypeCheckError, match=r"TestModule\.sub, read at .*, violates the"):
            f()


class TestArguments:
    def test_a_tensor_attribute_is_an_input_of_the_program(self) -> None:
        f, calls = traces(apply)
        x = torch.randn(3)
        for _ in range(3):
            scale = Scale(torch.randn(3))
            torch.testing.assert_close(f(scale, x), scale(x))
        scale.weight = torch.randn(3)
        torch.testing.assert_close(f(scale, x), scale(x))
        assert len(calls) == 1
        assert "scale_weight" in str(f.program) or len(f.program.inputs) == 2
        assert not f.program.lifted

    @pytest.mark.parametrize(
        "change",
        [
            {"factor": 3.0},
            {"factor": 2},
            {"factor": -2.0},
            {"mode": Mode.ADD},
            {"weight": torch.randn(3, dtype=torch.float64)},
            {"weight": torch.randn(1)},
            {"weight": torch.randn(3, requires_grad=True)},
            {"weight": torch.randn(6)[::2]},
            {"kind": "other"},
            {"strength": lambda: torch.zeros(3)},
        ],
        ids=[
            "value",
            "type",
            "sign",
            "enum",
            "dtype",
            "shape",
            "requires_grad",
            "strides",
            "attribute of the class",
            "method",
        ],
    )
    def test_an_instance_that_differs_has_a_program_of_its_own(self, change: Any) -> None:
        f, calls = traces(lambda scale, x: (scale(x), scale.kind))
        x, scale = torch.randn(3), Scale(torch.randn(3))
        f(scale, x)
        other = Scale(torch.randn(3))
        for name, value in change.items():
            setattr(other, name, value)
        want = (other(x), other.kind)
        for _ in range(2):
            torch.testing.assert_close(f(other, x)[0], want[0])
            assert f(other, x)[1] == want[1]
        torch.testing.assert_close(f(scale, x)[0], scale(x))
        assert len(calls) == 2

    def test_attributes_that_are_not_read_do_not_matter(self) -> None:
        f, calls = traces(apply)
        x = torch.randn(3)
        f(Scale(torch.randn(3)), x)
        other = Scale(torch.randn(3))
        other.unused, other.extra = (i for i in range(3)), threading.Lock()  # type: ignore[attr-defined]
        f(other, x)
        assert len(calls) == 1

    def test_another_class_has_a_program_of_its_own(self) -> None:
        class Derived(Scale):
            def strength(self) -> Tensor:
                return self.weight

        f, calls = traces(apply)
        x, w = torch.randn(3), torch.randn(3)
        for model in (Scale(w), Derived(w), Scale(w), Derived(w)):
            torch.testing.assert_close(f(model, x), model(x))
        assert len(calls) == 2

    def test_properties_and_methods_run_as_they_are(self) -> None:
        f, calls = traces(lambda scale: scale.doubled + scale.strength())
        for _ in range(2):
            scale = Scale(torch.randn(3))
            torch.testing.assert_close(f(scale), 4 * scale.weight)
        assert len(calls) == 1

    def test_a_method_that_has_changed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        f, calls = traces(apply)
        x, scale = torch.randn(3), Scale(torch.ones(3))
        f(scale, x)
        monkeypatch.setattr(Scale, "strength", lambda self: self.weight * 5)
        torch.testing.assert_close(f(scale, x), 5 * x)
        assert len(calls) == 2

    def test_modules_as_arguments(self) -> None:
        f, calls = traces(apply)
        x = torch.randn(5, 3)
        for _ in range(3):
            net = Net()
            torch.testing.assert_close(f(net, x), net(x))
        assert len(calls) == 1 and not f.program.lifted
        net.gain = 4.0
        torch.testing.assert_close(f(net, x), net(x))
        wide = Net(6)
        torch.testing.assert_close(f(wide, x), wide(x))
        net.layers.append(nn.Linear(2, 2))
        torch.testing.assert_close(f(net, x), net(x))
        assert len(calls) == 4

    def test_gradients_reach_the_attributes(self) -> None:
        net, x = Net(), torch.randn(5, 3)
        f = specialize(lambda net, x: net(x).square().sum())
        for model in (net, Net()):
            f(model, x).backward()
            got = [p.grad for p in model.parameters()]
            want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
            torch.testing.assert_close(got, list(want))
        assert f.cache_info().programs == 1

    def test_hooks_and_the_training_flag_are_seen(self) -> None:
        f, calls = traces(apply)
        net, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0)), torch.randn(3)
        assert f(net, x).equal(torch.zeros(3))
        torch.testing.assert_close(f(net.eval(), x), net(x))
        handle = net[0].register_forward_hook(lambda module, args, out: out + 1)
        torch.testing.assert_close(f(net, x), net(x))
        handle.remove()
        torch.testing.assert_close(f(net, x), net(x))
        assert len(calls) == 3

    def test_writes_into_tensors_have_eagers_effect(self) -> None:
        class Count:
            def __init__(self) -> None:
                self.steps = torch.zeros(())

            def step(self) -> Tensor:
                return self.steps.add_(1)

        f, calls = traces(lambda count: count.step() * 2)
        one, other = Count(), Count()
        assert [f(c).item() for c in (one, one, other, one)] == [2, 4, 2, 6]
        assert (one.steps.item(), other.steps.item(), len(calls)) == (3, 1, 1)

    def test_one_object_in_two_places(self) -> None:
        f, calls = traces(lambda a, b, x: a(x) + b(x) if a is not b else a(x))
        x, one, other = torch.randn(3), Scale(torch.randn(3)), Scale(torch.randn(3))
        torch.testing.assert_close(f(one, one, x), one(x))
        torch.testing.assert_close(f(one, other, x), one(x) + other(x))
        torch.testing.assert_close(f(other, other, x), other(x))
        assert len(calls) == 2

    def test_one_tensor_in_two_places(self) -> None:
        f, calls = traces(lambda a, b: a.weight.add_(1) * b.weight)
        shared = torch.zeros(2)
        assert f(Scale(shared), Scale(shared)).equal(torch.ones(2))
        assert f(Scale(torch.zeros(2)), Scale(torch.zeros(2))).equal(torch.zeros(2))
        assert len(calls) == 2

    def test_inside_of_containers(self) -> None:
        f, calls = traces(lambda models, x: sum(m(x) for m in models["all"]))
        x = torch.randn(3)
        for n in (2, 2, 3):
            models = {"all": [Scale(torch.randn(3)) for _ in range(n)]}
            torch.testing.assert_close(f(models, x), sum(m(x) for m in models["all"]))
        assert len(calls) == 2

    def test_inside_of_other_transforms(self) -> None:
        scale, xs = Scale(torch.randn(3)), torch.randn(5, 3)
        f = specialize(apply)
        torch.testing.assert_close(vmap(lambda x: f(scale, x))(xs), scale(xs))
        got = grad(lambda w: f(Scale(w), xs).sum())(scale.weight)
        torch.testing.assert_close(got, grad(lambda w: Scale(w)(xs).sum())(scale.weight))

    def test_sizes_by_name_beside_an_object(self) -> None:
        f = specialize(apply, {"x": Meta(["n", 3])})
        for n in (3, 1, 5, 0, 1):
            scale, x = Scale(torch.randn(3)), torch.randn(n, 3)
            torch.testing.assert_close(f(scale, x), scale(x))
        assert f.cache_info().programs == 1

    def test_a_descriptor_by_class(self) -> None:
        f = specialize(apply, {"model": Scale})
        f(Scale(torch.ones(3)), torch.ones(3))
        with pytest.raises(DescriptorViolation, match="model: expected Scale, got Identity"):
            f(nn.Identity(), torch.ones(3))


class Holder:
    """An object with one attribute."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclasses.dataclass
class Settings:
    rate: float = 0.5
    names: tuple[str, ...] = ("a", "b")


class TestAttributes:
    @pytest.mark.parametrize(
        ("value", "same", "other"),
        [
            (1, 1, True), (True, True, 1), (1.0, 1.0, 1), (0.0, 0.0, -0.0),
            (float("nan"), float("nan"), 0.0), ("a", "a", "b"), (None, None, 0), (b"a", b"a", b"b"),
            (1j, 1j, 2j), (Mode.ADD, Mode.ADD, Mode.MUL),
            (torch.float32, torch.float32, torch.int8),
            (torch.device("cpu"), torch.device("cpu"), torch.device("meta")),
            (torch.Size([1]), torch.Size([1]), (1,)), (range(3), range(3), range(4)),
            ([1, "a"], [1, "a"], [1, "b"]), ((1, 2), (1, 2), [1, 2]), ({1, 2}, {1, 2}, {1, 3}),
            ({"a": [1]}, {"a": [1]}, {"a": [2]}), ({"a": 1}, {"a": 1}, {"b": 1}),
            ({"a": 1, "b": 2}, {"a": 1, "b": 2}, {"b": 2, "a": 1}),
            (list(range(99)), list(range(99)), [*range(98), True]),
            (pathlib.Path("a"), pathlib.Path("a"), pathlib.Path("b")),
            (types.SimpleNamespace(a=1), types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
            (argparse.Namespace(a=1), argparse.Namespace(a=1), argparse.Namespace(a=2)),
            (Settings(), Settings(), Settings(0.25)), (Settings(), Settings(), Settings(names=())),
            (len, len, max), (int, int, float), (frozenset("a"), frozenset("a"), frozenset("b")),
        ],
        ids=repr,
    )  # fmt: skip
    def test_values_are_compared(self, value: Any, same: Any, other: Any) -> None:
        def read(holder: Holder, x: Tensor) -> tuple[Tensor, Any]:
            found = holder.value
            if isinstance(found, Settings):
                found = (found.rate, found.names)
            elif isinstance(found, argparse.Namespace):
                found = found.a
            return x + 1, repr(found)

        f = specialize(read)
        x = torch.ones(1)
        for each in (value, same, value):
            assert f(Holder(each), x)[1] == read(Holder(each), x)[1]
        assert f.cache_info().misses == 1
        assert f(Holder(other), x)[1] == read(Holder(other), x)[1]
        assert f.cache_info().misses == 2

    def test_tensors_in_containers_are_inputs(self) -> None:
        f, calls = traces(lambda h: h.value["w"][0] * 2 + h.value["b"])
        for _ in range(2):
            w, b = torch.randn(3), torch.randn(3)
            torch.testing.assert_close(f(Holder({"w": [w], "b": b})), w * 2 + b)
        assert len(calls) == 1
        with pytest.raises(TypeError):
            f(Holder({"w": [1], "b": [2]}))

    def test_objects_in_objects(self) -> None:
        f, calls = traces(lambda h, x: h.value.value[0](x))
        x = torch.randn(3)
        for _ in range(2):
            scale = Scale(torch.randn(3))
            torch.testing.assert_close(f(Holder(Holder([scale])), x), scale(x))
        torch.testing.assert_close(f(Holder(Holder([nn.Identity()])), x), x)
        assert len(calls) == 2

    def test_an_object_that_leads_back_to_itself(self) -> None:
        outer = Holder(None)
        outer.value = [outer, torch.ones(2)]
        f, calls = traces(lambda h: h.value[0].value[1] * 2)
        assert f(outer).equal(torch.full((2,), 2.0)) and f(outer).equal(torch.full((2,), 2.0))
        assert len(calls) == 1

    def test_slots(self) -> None:
        class Slotted:
            __slots__ = ("factor", "weight")

            def __init__(self, weight: Tensor, factor: float) -> None:
                self.weight, self.factor = weight, factor

        f, calls = traces(lambda s: s.weight * s.factor)
        for factor in (2.0, 2.0, 3.0):
            assert f(Slotted(torch.ones(2), factor)).equal(torch.full((2,), factor))
        assert len(calls) == 2

    def test_attributes_that_are_not_there(self) -> None:
        f, calls = traces(lambda h, x: x * getattr(h, "factor", 1.0))
        x, holder = torch.ones(2), Holder(None)
        assert f(holder, x).equal(x)
        holder.factor = 3.0  # type: ignore[attr-defined]
        assert f(holder, x).equal(3 * x)
        net = nn.ReLU()
        assert f(net, x).equal(x)
        net.factor = 2.0  # type: ignore[assignment]
        assert f(net, x).equal(2 * x)
        assert len(calls) == 4

    def test_attributes_that_are_made(self) -> None:
        class Made:
            def __init__(self, table: dict[str, Tensor]) -> None:
                self.table = table

            def __getattr__(self, name: str) -> Tensor:
                return self.table[name]

        f, calls = traces(lambda made: made.weight * 2)
        for _ in range(2):
            w = torch.randn(3)
            torch.testing.assert_close(f(Made({"weight": w})), 2 * w)
        assert len(calls) == 1

    def test_cached_properties(self) -> None:
        class Cached:
            def __init__(self, weight: Tensor) -> None:
                self.weight = weight

            @functools.cached_property
            def doubled(self) -> Tensor:
                return 2 * self.weight

        f, calls = traces(lambda c: c.doubled + c.doubled)
        one, other = Cached(torch.ones(2)), Cached(torch.zeros(2))
        assert f(one).equal(torch.full((2,), 4.0)) and f(other).equal(torch.zeros(2))
        assert len(calls) == 1 and "doubled" not in vars(one)
        assert one.doubled is one.doubled  # outside of the function, it is an attribute
        assert f(one).equal(torch.full((2,), 4.0)) and len(calls) == 2

    def test_a_read_of_the_dict_guards_all_attributes(self) -> None:
        f, calls = traces(lambda h: sum(v for v in vars(h).values() if isinstance(v, Tensor)))
        for value in (torch.ones(2), torch.zeros(2)):
            assert f(Holder(value)).equal(value)
        other = Holder(torch.ones(2))
        other.more = torch.ones(2)  # type: ignore[attr-defined]
        assert f(other).equal(torch.full((2,), 2.0))
        assert len(calls) == 2

    @pytest.mark.parametrize("declared", ["float", "Optional[Tensor]", "Meta(['n', 2])"])
    def test_declarations_of_the_class_are_checked(self, declared: str) -> None:
        scope: dict[str, Any] = {"Optional": Optional, "Tensor": Tensor, "Meta": Meta}
        scope["__name__"] = __name__
        exec(f"class Declared:\n    value: {declared}\n", scope)
        holder = scope["Declared"]()
        good = {"float": 2.0, "Optional[Tensor]": None}.get(declared, torch.ones(3, 2))
        holder.value = good
        f = specialize(lambda h, x: (h.value, x))
        f(holder, torch.ones(1))
        holder.value = {"float": 2}.get(declared, torch.ones(3) if "Meta" in declared else "s")
        with pytest.raises(TypeCheckError) as caught:
            f(holder, torch.ones(1))
        text = str(caught.value)
        assert "Declared.value, read at" in text and "test_specialize_instances.py:" in text
        place = "Declared.value.shape" if "Meta" in declared else "Declared.value"
        assert f"  {place}: expected " in text

        def assign(h, x, value):  # type: ignore[no-untyped-def]
            h.value = value
            return x

        found, holder.value = holder.value, good
        specialize(functools.partial(assign, value=good))(holder, torch.ones(1))
        with pytest.raises(TypeCheckError) as caught:
            specialize(functools.partial(assign, value=found))(holder, torch.ones(1))
        text = str(caught.value)
        assert "Declared.value, assigned at" in text and "in assign" in text
        assert f"  {place}: expected " in text
        assert holder.value is good or holder.value == good  # a number is made anew

    def test_values_that_change_when_they_are_read(self) -> None:
        for value in (iter([1]), (i for i in range(3))):
            with pytest.raises(TypeCheckError, match=r"Holder\.value is read at .*test_specialize"):
                specialize(lambda h, x: (list(h.value), x))(Holder(value), torch.ones(1))
        with pytest.raises(TypeCheckError, match=r"Holder\.value\[1\] is read at .*is a generator"):
            specialize(lambda h: h.value[0])(Holder([torch.ones(1), (i for i in [1])]))


class TestAssignment:
    @pytest.mark.parametrize("own", [True, False], ids=["self", "argument"])
    def test_forbidden_assignments_to_a_module_are_undone_and_refused(self, own: bool) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(2))
                self.calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                self.weight = nn.Parameter(self.weight + 1)
                self.last = x
                self.register_buffer("new", x)
                self.inner = nn.Identity()
                return x

        module, x = Net(), torch.ones(2)
        weight = module.weight
        f: Any = specialize(module) if own else specialize(lambda m, x: m(x))
        with pytest.raises(TypeCheckError) as caught:
            f(x) if own else f(module, x)
        text, it = str(caught.value), "self" if own else "m"
        for name, problem in (("weight", "a parameter"), ("last", "register it as a buffer"),
                              ("inner", "a submodule"), ("new", "a new buffer")):  # fmt: skip
            found = next(line for line in text.splitlines() if f"  {it}.{name}" in line)
            assert problem in found and (name == "new" or f" at {__file__}:" in found)
        assert module.calls == 0 and module.weight is weight
        assert not hasattr(module, "last") and not hasattr(module, "new")

    def test_a_container_that_changes(self) -> None:
        def f(h: Holder, x: Tensor) -> Tensor:
            h.value.append(x * 2)
            return x

        g, one, other = specialize(f), Holder([1]), Holder([1])
        for holder in (one, other, one):
            g(holder, torch.ones(1))
        assert one.value == [1, torch.tensor([2.0]), torch.tensor([2.0])] and len(other.value) == 2

    def test_values_restored_by_the_function(self) -> None:
        def silent(net: nn.Module, x: Tensor) -> Tensor:
            training = net.training
            net.eval()
            try:
                return net(x)
            finally:
                net.train(training)

        f, calls = traces(silent)
        net, x = nn.Sequential(nn.Dropout(1.0)), torch.ones(3)
        for _ in range(2):
            assert f(net, x).equal(x)
        assert net.training and len(calls) == 1

    def test_after_an_error_all_is_as_it_was(self) -> None:
        def fail(holder: Holder, x: Tensor) -> None:
            holder.value = x
            raise ZeroDivisionError

        holder = Holder(3)
        with pytest.raises(ZeroDivisionError):
            specialize(fail)(holder, torch.ones(1))
        assert holder.value == 3 and "__getattribute__" not in vars(Holder)


class TestOwn:
    """The function's own objects: its module, captured objects, globals."""

    def test_attributes_of_closed_over_objects(self) -> None:
        scale = Scale(torch.ones(3))
        f, calls = traces(lambda x: scale(x))
        x = torch.randn(3)
        torch.testing.assert_close(f(x), 2 * x)
        scale.factor = 5.0
        torch.testing.assert_close(f(x), 5 * x)
        scale.weight = torch.zeros(3)
        torch.testing.assert_close(f(x), 0 * x)
        scale.weight.add_(1)
        torch.testing.assert_close(f(x), 5 * x)
        assert len(calls) == 3

    def test_methods_and_callable_objects(self) -> None:
        scale, x = Scale(torch.ones(3)), torch.randn(3)
        for read in (specialize(scale.strength), specialize(lambda: scale.doubled)):
            before = read()
            scale.weight = scale.weight + 1
            assert not read().equal(before)
        f = specialize(scale)
        torch.testing.assert_close(f(x), scale(x))
        scale.factor = 7.0
        torch.testing.assert_close(f(x), scale(x))
        g = specialize(functools.partial(apply, scale))
        torch.testing.assert_close(g(x), scale(x))
        scale.factor = 8.0
        torch.testing.assert_close(g(x), scale(x))

    def test_parameters_that_are_replaced(self) -> None:
        net, x = Net(), torch.randn(3)
        f = specialize(net)
        torch.testing.assert_close(f(x), net(x))
        net.layers[0].weight = nn.Parameter(torch.zeros(4, 3))
        torch.testing.assert_close(f(x), net(x))
        net.layers[1] = nn.Linear(4, 2)
        torch.testing.assert_close(f(x), net(x))

    def test_functional_call_inside(self) -> None:
        net, x = Net(), torch.randn(5, 3)

        def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(net, params, (x,))
            return out.square().sum()

        f, calls = traces(grad(loss))
        for _ in range(3):
            params = {name: torch.randn_like(p) for name, p in net.named_parameters()}
            got = f(params, x)
            torch.testing.assert_close(got, dict(torch.func.grad(loss)(params, x)))
        assert len(calls) == 1


class TestWatching:
    def test_classes_are_left_as_they_were(self) -> None:
        before = dict(vars(Scale)), dict(vars(nn.Linear)), dict(vars(Net))
        specialize(apply)(Scale(torch.ones(3)), torch.ones(3))
        specialize(apply)(Net(), torch.ones(3))
        assert before == (dict(vars(Scale)), dict(vars(nn.Linear)), dict(vars(Net)))
        assert not instances._watched

    def test_other_threads_see_objects_as_they_are(self) -> None:
        scale, seen, ready, go = Scale(torch.ones(3)), [], threading.Event(), threading.Event()

        def elsewhere() -> None:
            ready.wait()
            seen.append((type(scale), scale.factor, scale.weight))
            scale.unused = 3
            go.set()

        def wait(scale: Scale, x: Tensor) -> Tensor:
            ready.set()
            go.wait()
            return scale(x)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        f = specialize(wait)
        try:
            f(scale, torch.ones(3))
        except TypeCheckError as error:  # the other thread's assignment counts as a change
            assert "Scale.unused" in str(error)
        thread.join()
        assert seen == [(Scale, 2.0, scale.weight)]

    def test_a_class_with_a_lookup_of_its_own(self) -> None:
        class Logged:
            def __init__(self, factor: float) -> None:
                self.factor = factor

            def __getattribute__(self, name: str) -> Any:
                return object.__getattribute__(self, name)

        f, calls = traces(lambda o, x: x * o.factor)
        for factor in (2.0, 2.0, 3.0):
            assert f(Logged(factor), torch.ones(1)).item() == factor
        assert len(calls) == 2
        assert Logged.__getattribute__.__qualname__.endswith("Logged.__getattribute__")

    def test_two_threads_trace_at_once(self) -> None:
        results: list[Tensor] = []
        together = threading.Barrier(2)

        def slow(scale: Scale, x: Tensor) -> Tensor:
            together.wait()
            return scale(x)

        def run(factor: float) -> None:
            results.append(specialize(slow)(Scale(torch.ones(1), factor), torch.ones(1)))

        threads = [threading.Thread(target=run, args=(factor,)) for factor in (2.0, 3.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(r.item() for r in results) == [2.0, 3.0]
        assert not instances._watched
