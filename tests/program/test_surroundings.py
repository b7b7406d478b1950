"""Reads in a trace that are not plain variables: each is guarded, or refused."""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import datetime
import functools
import os
import random
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.transforms.test_soundness import ONES, changed, follows
from tsfunc import MetaTensorType as Meta
from tsfunc import load, specialize
from tsfunc.errors import ReadOnceWarning, TypeCheckError

FACTOR: Any = 2.0
here = sys.modules[__name__]
settings: Any = types.ModuleType("settings_of_test_surroundings")
settings.factor = 2.0


class _Meta(type):
    factor = 2.0


class _Thing(metaclass=_Meta):
    factor_of_class = 2.0

    @property
    def doubled(self) -> float:
        return 2.0


class _Always:
    def __get__(self, instance: Any, owner: Any) -> float:
        return 2.0


class _With:
    always = _Always()


def tool(x: Tensor) -> Any:
    return x * 2


def other_tool(x: Tensor) -> Any:
    return x * 3


tool.factor = 2.0  # type: ignore[attr-defined]
THING = _Thing()
WITH = _With()


@contextlib.contextmanager
def anomaly() -> Iterator[None]:
    torch.autograd.set_detect_anomaly(True)
    try:
        yield
    finally:
        torch.autograd.set_detect_anomaly(False)


@contextlib.contextmanager
def made(name: str, value: Any) -> Iterator[None]:
    """Context manager: a global of this module that exists in the block."""
    vars(here)[name] = value
    try:
        yield
    finally:
        del vars(here)[name]


@contextlib.contextmanager
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


READS: dict[str, tuple[Callable[[Tensor], Any], Callable[[], Any]]] = {
    "globals()": (lambda x: x * globals()["FACTOR"], lambda: changed(vars(here), "FACTOR", 3.0)),
    "vars(module)": (lambda x: x * vars(settings)["factor"],
                     lambda: changed(settings, "factor", 3.0)),
    "eval": (lambda x: x * eval("FACTOR + 1"), lambda: changed(vars(here), "FACTOR", 3.0)),
    "getattr": (lambda x: x * getattr(settings, "factor"),  # noqa: B009
                lambda: changed(settings, "factor", 3.0)),
    "a variable that is not there": (lambda x: x * (LATER if "LATER" in globals() else 1),  # type: ignore[name-defined] # noqa: F821
                                     lambda: made("LATER", 3.0)),
    "a builtin": (lambda x: x * max(1, 2), lambda: made("max", min)),
    "the code of a helper": (lambda x: tool(x),
                             lambda: changed(tool, "__code__", other_tool.__code__)),
    "an attribute of a function": (lambda x: x * tool.factor,  # type: ignore[attr-defined]
                                   lambda: changed(tool, "factor", 3.0)),
    "an attribute of a metaclass": (lambda x: x * _Thing.factor,
                                    lambda: changed(_Meta, "factor", 3.0)),
    "a property": (lambda x: x * THING.doubled,
                   lambda: changed(_Thing, "doubled", property(lambda self: 3.0))),
    "a number of torch's": (lambda x: x * torch.get_num_threads(), lambda: threads()),
    "a flag of torch's": (lambda x: x * (2 if torch.backends.cudnn.enabled else 3),
                          lambda: torch.backends.cudnn.flags(enabled=False)),
    "what torch.nn says": (lambda x: x * (2 if torch.is_anomaly_enabled() else 3),
                           lambda: anomaly()),
    "the environment as bytes": (lambda x: x * len(os.environb.get(b"SURROUNDINGS", b"")),
                                 lambda: changed(os.environ._data, b"SURROUNDINGS", b"abc")),  # type: ignore[attr-defined]
    "the command line": (lambda x: x * len(sys.argv), lambda: changed(sys, "argv", [])),
}  # fmt: skip


@pytest.mark.parametrize("what", READS)
def test_read_values_are_guarded(what: str) -> None:
    if what == "the environment as bytes":
        os.environ["SURROUNDINGS"] = "a"
    f, change = READS[what]
    try:
        follows(f, change())
    finally:
        os.environ.pop("SURROUNDINGS", None)


def test_a_reason_names_the_gradient_or_the_item_that_has_changed() -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    thing = types.SimpleNamespace(factor=2.0)
    things = np.array([None, thing], dtype=object)

    def f(x: Tensor) -> Tensor:
        return x * things[1].factor + (0 if weight.grad is None else weight.grad)

    program = specialize(f)
    program(torch.ones(2))
    thing.factor = 3.0
    program(torch.ones(2))
    assert "things[1].factor: 3.0, was 2.0" in str(program.cache_info())
    weight.grad = None
    program(torch.ones(2))
    assert "weight.grad: None, was f32[2]" in str(program.cache_info())


def showing() -> dict[str, tuple[Callable[[Tensor], Any], Callable[[], Any]]]:
    """Functions that read an object which shows others, and changes of these."""
    table, raw, numbers = {"a": 2.0}, bytearray(b"\x02"), array.array("d", [2.0])
    proxy, view, pairs = types.MappingProxyType(table), table.values(), table.items()
    window, thing, local = memoryview(raw), types.SimpleNamespace(factor=2.0), threading.local()
    variable = contextvars.ContextVar("variable", default=2.0)
    chain: Any = collections.ChainMap({}, table)
    local.factor = 2.0

    class Plain:
        factor = 2.0

    plain = Plain()
    referred, some, keyed = weakref.ref(plain), frozenset({plain}), {plain: 1.0}
    objects = np.array([plain], dtype=object)

    def change() -> None:
        table["a"] = thing.factor = local.factor = plain.factor = 3.0
        raw[0], numbers[0] = 3, 3.0
        variable.set(3.0)

    reads: dict[str, Callable[[Tensor], Any]] = {
        "a proxy": lambda x: x * proxy["a"], "a view": lambda x: x * sum(view),
        "pairs": lambda x: x * dict(pairs)["a"], "bytes": lambda x: x * raw[0],
        "a window": lambda x: x * window[0], "an array": lambda x: x * numbers[0],
        "a chain": lambda x: x * chain["a"], "a namespace": lambda x: x * thing.factor,
        "a thread's own": lambda x: x * local.factor, "a context": lambda x: x * variable.get(),
        "a reference": lambda x: x * referred().factor,  # type: ignore[union-attr]
        "a set": lambda x: x * sum(each.factor for each in some),
        "keys": lambda x: x * sum(each.factor for each in keyed),
        "an array of objects": lambda x: x * objects[0].factor,
    }  # fmt: skip
    return {name: (f, change) for name, f in reads.items()}


def test_a_number_in_a_tuple_becomes_an_input_and_the_length_is_guarded() -> None:
    table: dict[str, tuple[Any, ...]] = {"pair": (2.0, "a")}
    f = specialize(lambda x: x * table["pair"][0] + len(table["pair"]))
    for value in (2.0, 3.0, 4.0, 5.5):
        table["pair"] = value, "a"
        assert f(ONES).equal(ONES * value + 2)
    assert f.cache_info().programs == 2
    table["pair"] = 5.5, "a", "b"
    assert f(ONES).equal(ONES * 5.5 + 3)


class _Scaled:
    def __init__(self) -> None:
        self.scales: tuple[float, ...] = (0.5, 2.0)

    def of(self, x: Tensor) -> Tensor:
        assert self.scales is self.scales
        low, high = self.scales
        return (x * low + high) * len(self.scales)


class _ScaledModule(_Scaled, nn.Module):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        _Scaled.__init__(self)


class _InSlots(_Scaled):
    __slots__ = ("scales",)


class _Assigns(_Scaled):
    def of(self, x: Tensor) -> Tensor:
        self.last = self.scales
        self.scales = self.scales[1], self.scales[0] + 1
        return x * self.scales[0] + self.scales[1]


class _ShownWhole(_Scaled):
    def of(self, x: Tensor) -> Tensor:
        return super().of(x) + vars(self)["scales"][1]


# A tuple that is shown as a whole has a program for each value.
@pytest.mark.filterwarnings("ignore::tsfunc.errors.RetraceWarning")
@pytest.mark.parametrize("cls", [_Scaled, _ScaledModule, _InSlots, _Assigns, _ShownWhole])
def test_numbers_in_a_tuple_that_is_an_attribute_become_inputs(cls: type[_Scaled]) -> None:
    one, other = cls(), cls()
    f = specialize(lambda x: one.of(x))
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(6):
        one.scales = other.scales = rng.uniform(2, 3), rng.uniform(2, 3)
        torch.testing.assert_close(f(ONES), other.of(ONES))
        assert one.scales == other.scales and all(type(each) is float for each in one.scales)
        assert getattr(one, "last", None) == getattr(other, "last", None)
    assert cls is _ShownWhole or f.cache_info().programs == 2
    one.scales = other.scales = 2, 3
    torch.testing.assert_close(f(ONES), other.of(ONES))
    one.scales = 2.0, 3.0, 4.0
    if cls is not _Assigns:
        with pytest.raises(ValueError, match="too many values"):
            f(ONES)


@pytest.mark.parametrize("what", showing())
def test_viewed_contents_are_guarded(what: str) -> None:
    f, change = showing()[what]
    g = specialize(f)
    for _ in range(2):
        assert g(ONES).equal(ONES * 2)
    change()
    for _ in range(2):
        assert g(ONES).equal(ONES * 3)
    assert g.cache_info().programs == 2


def test_a_descriptor_of_the_users_own() -> None:
    f = specialize(lambda x: x * WITH.always)
    assert f(ONES).equal(ONES * 2)
    _With.always = 3.0  # type: ignore[assignment]
    assert f(ONES).equal(ONES * 3)


def test_a_class_that_gets_an_attribute() -> None:
    class Bare:
        pass

    f = specialize(lambda x: x * (Bare.factor if hasattr(Bare, "factor") else 1.0))
    assert f(ONES).equal(ONES)
    Bare.factor = 3.0  # type: ignore[attr-defined]
    assert f(ONES).equal(ONES * 3)


def test_hooks_of_all_modules() -> None:
    net = nn.Sequential(nn.Identity())
    f = specialize(net)
    assert f(ONES).equal(ONES)
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 3)
    try:
        assert f(ONES).equal(ONES * 9)
    finally:
        hook.remove()
    assert f(ONES).equal(ONES) and f.cache_info().programs == 2


class TestTensorsFromOutside:
    def test_their_gradients(self) -> None:
        w = nn.Parameter(torch.ones(2))
        f = specialize(lambda x: x if w.grad is None else x * w.grad)
        assert f(ONES).equal(ONES)
        w.grad = torch.full((2,), 3.0)
        assert f(ONES).equal(ONES * 3)
        w.grad.mul_(2)
        assert f(ONES).equal(ONES * 6) and f.cache_info().programs == 2
        w.grad = None
        assert f(ONES).equal(ONES)

    def test_one_program_serves_all_their_gradients(self) -> None:
        w = nn.Parameter(torch.ones(2))
        f = specialize(lambda x: x * w.grad)
        for value in (1.0, 2.0, 3.0):
            w.grad = torch.full((2,), value)
            assert f(ONES).equal(ONES * value)
        assert f.cache_info().programs == 1

    def test_their_strides(self) -> None:
        w = torch.arange(6.0).reshape(2, 3)
        f = specialize(lambda x: x * w.stride(0))
        assert f(ONES).equal(ONES * 3)
        w.set_(torch.zeros(3, 2).t())  # type: ignore[call-overload]
        assert f(ONES).equal(ONES)

    def test_attributes_that_were_given_to_them(self) -> None:
        w: Any = torch.ones(2)
        w.factor = 2.0
        f = specialize(lambda x: x * w.factor)
        assert f(ONES).equal(ONES * 2)
        w.factor = 3.0
        assert f(ONES).equal(ONES * 3)


class Pair(NamedTuple):
    first: Any
    second: Any


class TestOrderOfKeys:
    def by_place(self, table: dict[str, Tensor]) -> Any:
        return sum(value * (i + 1) for i, value in enumerate(table.values()))

    def test_of_a_dict(self, tmp_path: Path) -> None:
        f = specialize(self.by_place, {"table": {"a": Meta(["n"]), "b": Meta(["n"])}})
        one, other = torch.ones(2), torch.full((2,), 10.0)
        for table in ({"a": one, "b": other}, {"b": other, "a": one}, {"b": one, "a": other}):
            assert f(table).equal(self.by_place(table))
        assert f.cache_info().programs == 2
        assert "the keys of dict 0: 'b', 'a', was 'a', 'b'" in [
            entry.reason for entry in f.cache_info().entries
        ]
        f.save(tmp_path / "f.tsf")
        loaded = load(tmp_path / "f.tsf")
        for table in ({"a": one, "b": other}, {"b": other, "a": one}):
            assert loaded(table).equal(self.by_place(table))

    def test_inside_of_another_container(self) -> None:
        f = specialize(lambda pair: self.by_place(pair.first) + pair.second)
        one, other = torch.ones(2), torch.full((2,), 10.0)
        for table in ({"a": one, "b": other}, {"b": other, "a": one}):
            for _ in range(2):
                assert f(Pair(table, one)).equal(self.by_place(table) + one)
        assert f.cache_info().programs == 2

    def test_of_keyword_arguments(self) -> None:
        one, other = torch.ones(2), torch.full((2,), 10.0)
        f = specialize(lambda **table: self.by_place(table))
        assert f(a=one, b=other).equal(one + other * 2)
        assert f(b=other, a=one).equal(other + one * 2)
        g = specialize(lambda a, b: a - b)
        assert g(a=one, b=other).equal(g(b=other, a=one))
        assert g.cache_info().programs == 1


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "random": lambda x: x * random.random(),
    "numpy.random": lambda x: x * float(np.random.rand()),
}
SEEDS: dict[str, Callable[[], Any]] = {
    "manual_seed": lambda: torch.manual_seed(0),
    "seed": lambda: torch.seed(),
    "initial_seed": lambda: torch.initial_seed(),
    "set_rng_state": lambda: torch.set_rng_state(torch.zeros(5056, dtype=torch.uint8)),
    "get_rng_state": lambda: torch.get_rng_state(),
}


class TestRandomNumbers:
    """NOTE [random numbers from outside]."""

    @pytest.mark.parametrize("what", DRAWS)
    def test_of_python_and_numpy(self, what: str) -> None:
        before = random.getstate(), np.random.get_state(legacy=False)
        with pytest.raises(TypeCheckError, match=rf"draws from {what}, .*test_surroundings\.py"):
            specialize(DRAWS[what])(ONES)
        assert random.getstate() == before[0]
        assert str(np.random.get_state(legacy=False)) == str(before[1])
        frozen = specialize(DRAWS[what], closure="freeze")
        assert frozen(ONES).equal(frozen(ONES))

    @pytest.mark.parametrize(
        "make", [lambda: random.Random(0), lambda: np.random.default_rng(0)],
        ids=["Random", "default_rng"],
    )  # fmt: skip
    def test_of_generators(self, make: Callable[[], Any]) -> None:
        source = make()
        with pytest.raises(TypeCheckError, match="draws from source, or seeds it"):
            specialize(lambda x: x * source.random())(ONES)
        with pytest.raises(TypeCheckError, match="draws from given, or seeds it"):
            specialize(lambda x, given: x * given.random())(ONES, source)
        assert source.random() == make().random()

    def test_a_generator_that_is_not_drawn_from(self) -> None:
        source = random.Random(0)
        f = specialize(lambda x, draw: x * source.random() if draw else x * 2)
        assert f(ONES, False).equal(ONES * 2)

    @pytest.mark.parametrize("what", SEEDS)
    def test_seeds_are_refused(self, what: str) -> None:
        seed, state = SEEDS[what], torch.get_rng_state()
        with pytest.raises(TypeCheckError, match=r"random numbers is set or read at .*test_surr"):
            specialize(lambda x: (seed(), x + torch.rand(2))[1])(ONES)
        assert torch.get_rng_state().equal(state)

    def test_seeding_on_another_thread(self) -> None:
        def f(x: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: torch.manual_seed(3))
            thread.start()
            thread.join()
            return x * 2

        assert specialize(f)(ONES).equal(ONES * 2) and torch.initial_seed() == 3

    def test_a_generator_is_drawn_from_at_every_call(self) -> None:
        source = torch.Generator().manual_seed(0)
        f = specialize(lambda x: x + torch.rand(2, generator=source))
        got = [f(ONES) for _ in range(3)]
        source.manual_seed(0)
        for each in got:
            torch.testing.assert_close(each, ONES + torch.rand(2, generator=source))
        with pytest.raises(TypeCheckError, match="draws from source, or seeds it"):
            specialize(lambda x: x + torch.rand(2, generator=source.manual_seed(1)))(ONES)


def reads_file() -> int:
    with open(__file__) as file:
        return len(file.read())


CHANGING: dict[str, Callable[[Tensor], Any]] = {
    "time": lambda x: x + time.time(),
    "datetime.now": lambda x: x + datetime.datetime.now().microsecond,
    "open": lambda x: x + reads_file(),
    "urandom": lambda x: x + len(os.urandom(2)),
}


@pytest.mark.parametrize("what", CHANGING)
def test_functions_with_changing_results_give_a_warning(what: str) -> None:
    f = functools.partial(CHANGING[what])
    with pytest.warns(ReadOnceWarning, match=f"{what} may give something else") as told:
        specialize(f)(ONES)
    assert told[0].filename == __file__
    specialize(CHANGING[what], closure="freeze")(ONES)


def test_names_of_parameters_are_not_those_of_the_program() -> None:
    """Parameters with the names that generated code uses."""
    w = torch.full((2,), 3.0)
    scope: dict[str, Any] = {}
    names = "lifted_0 constant_0 args torch inf nan slice relu add_tensor Tensor deque".split()
    scope.update(w=w, relu_=torch.relu, full=torch.full, infinite=float("inf"))
    exec(
        f"def f({', '.join(names)}):\n"
        "    y = relu_(lifted_0[1:]) * w + full((2,), 5.0) + constant_0\n"
        "    y = y.where(y < infinite, -infinite)\n"
        "    return y, " + ", ".join(f"{name} * 2" for name in names),
        scope,
    )
    given = [torch.randn(2) for _ in names]
    g = specialize(scope["f"])
    for got, want in zip(g(*given), scope["f"](*given), strict=True):
        torch.testing.assert_close(got, want)


class TestTensorsThatAreOnlyKept:
    """NOTE [counters]: state that is only changed is examined when tensors are put into it."""

    def test_in_containers(self) -> None:
        seen: list[Any] = []
        last: dict[str, Any] = {}

        def f(x: Tensor) -> Tensor:
            y = x * 2
            seen.append(y)
            last["y"] = y
            return y

        g = specialize(f)
        for i, x in enumerate((torch.ones(2), torch.zeros(2))):
            g(x)
            assert len(seen) == i + 1
            assert seen[i].equal(x * 2) and last["y"].equal(x * 2)

    def test_in_a_variable(self) -> None:
        total = torch.zeros(2)

        def f(x: Tensor) -> Tensor:
            nonlocal total
            total += x
            return x * 2

        g = specialize(f)
        for i in range(3):
            g(torch.ones(2))
            assert total.equal(torch.full((2,), i + 1.0))

    def test_counts_stay_as_they_are(self) -> None:
        calls = []

        def f(x: Tensor) -> Tensor:
            calls.append(1)
            return x * 2

        g = specialize(f)
        for _ in range(3):
            g(torch.ones(2))
        assert calls == [1] and g.cache_info().programs == 1
