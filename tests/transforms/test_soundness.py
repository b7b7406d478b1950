"""A program never serves a call that it was not made for: everything that it read is guarded."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tsfunc import grad, psum, scan, specialize, vmap
from tsfunc.errors import ClosureError, DataDependentError, EscapedTracerError, TypeCheckError

SCALE: Any = 2.0
TABLE: dict[str, Any] = {"scale": 2.0, "more": [1, 2]}
STATE: Any = 0
HANDLERS: dict[str, Any] = {}

config: Any = types.ModuleType("config_of_test_soundness")
config.__dict__.update(scale=2.0, nested=types.ModuleType("config_of_test_soundness.nested"))
config.nested.width = 3


class Config:
    scale = 2.0

    @classmethod
    def twice(cls, x: Tensor) -> Tensor:
        return x * cls.scale * 2

    @staticmethod
    def thrice(x: Tensor) -> Tensor:
        return x * Config.scale * 3


class Derived(Config):
    pass


class Made:
    """Made during the function's run."""

    def __init__(self, x: Tensor) -> None:
        self.x = x * SCALE

    def __add__(self, other: float) -> Any:
        return self.x + other * TABLE["scale"]


def helper(x: Tensor, by: float = 2.0, *, and_by: float = 1.0) -> Tensor:
    return x * by * and_by


ONES = torch.ones(2)


@contextlib.contextmanager
def changed(owner: Any, name: Any, value: Any) -> Iterator[None]:
    """Context manager: an attribute, or an element of a dict, has another value in the block."""
    get, put = (getattr, setattr) if not isinstance(owner, dict) else (dict.get, dict.__setitem__)
    before = get(owner, name)
    put(owner, name, value)
    try:
        yield
    finally:
        put(owner, name, before)


def follows(f: Callable[..., Any], change: contextlib.AbstractContextManager[Any]) -> None:
    """Check that a program agrees with its function before, during and after a change."""
    g = specialize(f)
    for _ in range(2):
        torch.testing.assert_close(g(ONES), f(ONES))
    with change:
        want = f(ONES)
        assert not torch.equal(torch.as_tensor(want), torch.as_tensor(g.program([ONES])))
        for _ in range(2):
            torch.testing.assert_close(g(ONES), want)
    torch.testing.assert_close(g(ONES), f(ONES))
    assert g.cache_info().programs == 2


READS: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "a global": (lambda x: x * SCALE, lambda: changed(globals(), "SCALE", 3.0)),
    "a type": (lambda x: x * 0 + isinstance(SCALE, int), lambda: changed(globals(), "SCALE", 2)),
    "an element of a dict": (lambda x: x * TABLE["scale"], lambda: changed(TABLE, "scale", 3.0)),
    "a nested element": (
        lambda x: x * len(TABLE["more"]), lambda: changed(TABLE, "more", [1, 2, 3])
    ),
    "a module": (lambda x: x * config.scale, lambda: changed(config, "scale", 3.0)),
    "a module in a module": (
        lambda x: x * config.nested.width, lambda: changed(config.nested, "width", 4)
    ),
    "a class": (lambda x: x * Config.scale, lambda: changed(Config, "scale", 3.0)),
    "a class that inherits": (lambda x: x * Derived.scale, lambda: changed(Config, "scale", 3.0)),
    "a class, shadowed": (lambda x: x * Derived.scale, lambda: changed(Derived, "scale", 3.0)),
    "a class method": (lambda x: Derived.twice(x), lambda: changed(Config, "scale", 3.0)),
    "a static method": (lambda x: Derived.thrice(x), lambda: changed(Config, "scale", 3.0)),
    "another static method": (
        lambda x: Config.thrice(x), lambda: changed(Config, "thrice", staticmethod(lambda x: x))
    ),
    "what __init__ reads": (lambda x: Made(x) + 1.0, lambda: changed(globals(), "SCALE", 3.0)),
    "what an operator reads": (lambda x: Made(x) + 1.0, lambda: changed(TABLE, "scale", 3.0)),
    "a helper": (lambda x: helper(x), lambda: changed(globals(), "helper", torch.sin)),
    "its defaults": (lambda x: helper(x), lambda: changed(helper, "__defaults__", (3.0,))),
    "its keyword defaults": (
        lambda x: helper(x), lambda: changed(helper, "__kwdefaults__", {"and_by": 3.0})
    ),
    "the environment": (
        lambda x: x * float(os.environ.get("SOUNDNESS", "1")),
        lambda: changed(os.environ._data, b"SOUNDNESS", b"2"),  # type: ignore[attr-defined]
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", READS)
def test_read_values_are_guarded(what: str) -> None:
    if what == "the environment":
        os.environ["SOUNDNESS"] = "1"
    f, change = READS[what]
    if what == "a class, shadowed":
        Derived.scale = 2.0
    try:
        follows(f, change())
    finally:
        os.environ.pop("SOUNDNESS", None)
        if "scale" in vars(Derived):
            del Derived.scale


def test_an_import_inside_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "config_of_test_soundness", config)

    def f(x: Tensor) -> Tensor:
        from config_of_test_soundness import scale  # type: ignore[import-not-found]

        return x * scale

    def g(x: Tensor) -> Tensor:
        import config_of_test_soundness as c

        return x * c.scale

    for each in (f, g):
        follows(each, changed(config, "scale", 3.0))


def test_partials_and_their_contents() -> None:
    def scaled(by: list[float], x: Tensor, and_by: float) -> Tensor:
        return x * by[0] * and_by

    by = [2.0]
    f = functools.partial(scaled, by, and_by=3.0)
    g = specialize(f)
    assert g(ONES).equal(ONES * 6)
    by[0] = 5.0
    assert g(ONES).equal(ONES * 15)
    f.keywords["and_by"] = 1.0
    assert g(ONES).equal(ONES * 5)
    h = specialize(lambda x: f(x))
    assert h(ONES).equal(ONES * 5)
    by[0] = 1.0
    assert h(ONES).equal(ONES)


def test_functions_in_containers_and_arguments() -> None:
    by = 2.0
    HANDLERS["scale"] = lambda x: x * by
    g = specialize(lambda x, name: HANDLERS[name](x))
    assert g(ONES, "scale").equal(ONES * 2)
    by = 3.0
    assert g(ONES, "scale").equal(ONES * 3)
    h = specialize(lambda x, do: do(x))
    do = HANDLERS["scale"]
    assert h(ONES, do).equal(ONES * 3)
    by = 4.0
    assert h(ONES, do).equal(ONES * 4)


def test_methods_of_objects_read_globals() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return self.scaled(x)

        def scaled(self, x: Tensor) -> Any:
            return x * SCALE

    net = nn.Sequential(Scaled())
    follows(lambda x: net(x), changed(globals(), "SCALE", 3.0))


def test_tensors_are_guarded_by_identity_and_type() -> None:
    w = torch.ones(2)
    f = specialize(lambda x: (x * w, w.requires_grad, w.dtype, tuple(w.shape)))
    f(ONES)
    w.data = torch.ones(2, dtype=torch.float64)
    assert f(ONES)[0].dtype is torch.float64 and f(ONES)[2] is torch.float64
    w.requires_grad_()
    assert f(ONES)[1]
    w = torch.zeros(2)
    assert f(ONES)[0].equal(torch.zeros(2))
    assert f.cache_info().programs == 4


def test_a_module_that_is_cast() -> None:
    net = nn.Linear(2, 2)
    f = specialize(net)
    f(ONES)
    net.double()
    x = ONES.double()
    torch.testing.assert_close(f(x), net(x))


SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "autocast to half": lambda: torch.autocast("cpu", torch.float16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_are_guarded(what: str) -> None:
    f = specialize(lambda x: x + torch.ones(2, 2) @ torch.ones(2, 2, device=x.device)[0])
    if what != "default device":
        for _ in range(2):
            f(ONES)
            with SETTINGS[what]():
                f(ONES)
        assert f.cache_info().programs == 2
        return
    g = specialize(lambda x: torch.ones(x.shape[0]))
    assert g(ONES).device.type == "cpu"
    with SETTINGS[what]():
        assert g(ONES).device.type == "meta"
    assert g(ONES).device.type == "cpu"


def test_flags_of_torch_are_guarded() -> None:
    f = specialize(lambda x: (x, torch.are_deterministic_algorithms_enabled()))
    assert f(ONES)[1] is False
    try:
        torch.use_deterministic_algorithms(True)
        assert f(ONES)[1] is True
    finally:
        torch.use_deterministic_algorithms(False)
    g = specialize(lambda x: (x, torch.get_float32_matmul_precision()))
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            assert g(ONES)[1] == precision
    finally:
        torch.set_float32_matmul_precision(before)
    h = specialize(lambda x: (x, torch.backends.cudnn.benchmark))
    with torch.backends.cudnn.flags(benchmark=True):
        assert h(ONES)[1] is True
    assert h(ONES)[1] is False


def test_threads_are_no_setting_of_a_program() -> None:
    f = specialize(lambda x: x + 1)
    f(ONES)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        f(ONES)
    finally:
        torch.set_num_threads(before)
    assert f.cache_info().programs == 1


class TestPlainTensorsInTransforms:
    """Results computed inside of a transform from outside tensors alone."""

    @pytest.mark.parametrize("depth", [1, 2])
    def test_it_is_not_a_constant(self, depth: int) -> None:
        w = torch.ones(2)

        def inner(x: Tensor) -> Tensor:
            made = torch.zeros(2)
            made += w
            return x * (w * 2 + F.softplus(w)).sum() + torch.stack([w, w]).sum() + made[0]

        f: Callable[[Tensor], Tensor] = inner
        for _ in range(depth):
            f = vmap(f)
        g, x = specialize(f), torch.ones((3,) * depth)
        for value in (1.0, 5.0):
            w.fill_(value)
            torch.testing.assert_close(g(x), f(x))
        assert g.cache_info().programs == 1


class TestClosure:
    def test_freeze_burns_in_values_and_tensors(self) -> None:
        by, w, table = 2.0, torch.ones(2), {"a": 1.0}
        f = specialize(lambda x: x * w * by + table["a"], closure="freeze")
        assert f(ONES).equal(ONES * 3)
        by, table["a"] = 3.0, 2.0
        w.fill_(7.0)
        assert f(ONES).equal(ONES * 3)
        w = torch.zeros(2)
        assert f(ONES).equal(ONES * 3) and f.cache_info()[:3] == (2, 1, 1)

    def test_freeze_of_a_module(self) -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(1.0)).eval()
        f = specialize(net, closure="freeze")
        want = f(ONES)
        torch.testing.assert_close(want, net(ONES).detach())
        nn.init.zeros_(net[0].weight)  # type: ignore[arg-type]
        net.train()
        assert f(ONES).equal(want) and not want.requires_grad
        assert f.cache_info().misses == 1

    def test_arguments_are_guarded_all_the_same(self) -> None:
        f = specialize(lambda x, by: x * by * SCALE, closure="freeze")
        assert f(ONES, 2.0).equal(ONES * 4) and f(ONES, 3.0).equal(ONES * 6)

    def test_freeze_refuses_writes_into_its_constants(self) -> None:
        w = torch.ones(2)
        with pytest.raises(ClosureError, match=r'closure="freeze".*writes into'):
            specialize(lambda x: w[0].add_(x[0]), closure="freeze")(ONES)
        assert w.equal(torch.ones(2))
        net = nn.BatchNorm1d(2)
        with pytest.raises(ClosureError, match="writes into"):
            specialize(net, closure="freeze")(torch.ones(3, 2))

    def test_error_names_variable_and_line(self) -> None:
        by, w = 2.0, torch.ones(2)
        cases: list[tuple[Callable[[Tensor], Tensor], str]] = [
            (lambda x: x * by, "by"),
            (lambda x: x * w, "w"),
            (lambda x: x * SCALE, "SCALE"),
            (lambda x: x * config.scale, r"config\.scale"),
        ]
        for f, name in cases:
            match = rf'closure="error"\): {name} is read at .*test_soundness\.py:\d+, in <lambda>'
            with pytest.raises(ClosureError, match=match):
                specialize(f, closure="error")(ONES)
        with pytest.raises(ClosureError, match=r"self\.weight is read at"):
            specialize(nn.Linear(2, 2), closure="error")(ONES)

    def test_error_lets_code_pass(self) -> None:
        f = specialize(lambda x: helper(F.relu(x)).sum(), closure="error")
        assert f(ONES).item() == 4.0

    def test_another_word(self) -> None:
        with pytest.raises(ValueError, match="closure: expected one of"):
            specialize(lambda x: x, closure="thaw")  # type: ignore[call-overload]


class TestUpdates:
    """Assignments to objects that outlive the call happen in every call, as without a program."""

    def test_a_variable_that_is_read_and_assigned(self) -> None:
        count = 0

        def f(x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return x * count

        g = specialize(f)
        for n in (1, 2, 3):
            assert g(ONES).equal(ONES * n) and count == n

    def test_a_global(self) -> None:
        def f(x: Tensor) -> Any:
            global STATE
            STATE = STATE + x.sum()
            return x * STATE

        with changed(globals(), "STATE", torch.zeros(())):
            g = specialize(f)
            for n in (2, 4, 6):
                assert g(ONES).equal(ONES * n) and STATE.item() == n
            assert g.cache_info().programs == 1

    def test_a_dict_and_a_list(self) -> None:
        state: dict[str, Any] = {"step": 0, "last": None}
        seen: list[Tensor] = []

        def f(x: Tensor) -> Tensor:
            state["step"] += 1
            state["last"] = (x * 2, {"a": [x + 1]})
            seen.append(x * state["step"])
            return sum(seen)  # type: ignore[return-value]

        g = specialize(f)
        for n in (1, 2):
            assert g(ONES).equal(ONES * sum(range(n + 1)))
            assert state["step"] == n and len(seen) == n
            assert state["last"][0].equal(ONES * 2) and state["last"][1]["a"][0].equal(ONES + 1)

    def test_sets_and_queues(self) -> None:
        names, queue = {"a"}, deque([1], maxlen=2)

        def f(x: Tensor, name: str) -> Tensor:
            names.add(name)
            queue.append(len(names))
            return x * len(names) + queue[0]

        g = specialize(f)
        assert g(ONES, "b").equal(ONES * 3) and names == {"a", "b"} and list(queue) == [1, 2]
        assert g(ONES, "b").equal(ONES * 4) and list(queue) == [2, 2] and queue.maxlen == 2

    def test_attributes_of_objects_modules_and_classes(self) -> None:
        class Counter:
            total = 0

            def __init__(self) -> None:
                self.calls = 0
                self.last: Tensor | None = None

        def f(counter: Counter, x: Tensor) -> Tensor:
            counter.calls += 1
            counter.last = x * counter.calls
            Counter.total = Counter.total + 1
            config.calls = 3
            return x

        g, one, other = specialize(f), Counter(), Counter()
        for counter, calls in ((one, 1), (other, 1), (one, 2)):
            g(counter, ONES)
            assert counter.calls == calls and counter.last.equal(ONES * calls)  # type: ignore[union-attr]
            assert config.calls == 3
            del config.calls
        assert Counter.total == 3

    def test_counters_are_changed_by_the_trace_only(self) -> None:
        traces, seen, by_name = 0, [], {"f": 0}

        def f(x: Tensor) -> Tensor:
            nonlocal traces
            traces += 1
            by_name["f"] += 1
            seen.append(tuple(x.shape))
            return x + 1

        g = specialize(f)
        for _ in range(3):
            g(ONES)
        assert (traces, seen, by_name) == (1, [(2,)], {"f": 1})
        seen.clear()
        g(ONES)
        assert not seen and g.cache_info().programs == 1

    def test_they_are_part_of_the_source(self) -> None:
        class Counter:
            def __init__(self) -> None:
                self.total = torch.zeros(2)

        counter = Counter()

        def f(x: Tensor) -> Tensor:
            counter.total = counter.total + x
            return x

        g = specialize(f)
        g(ONES)
        assert ".__dict__['total'] = add_tensor  # counter.total" in str(g.program)

    def test_with_symbolic_sizes(self) -> None:
        from tsfunc import MetaTensorType as Meta

        state: dict[str, Any] = {}

        def f(x: Tensor) -> Any:
            state["rows"] = x.shape[0]
            return x * state["rows"]

        g = specialize(f, {"x": Meta(["n"])})
        for n in (3, 5, 1):
            assert g(torch.ones(n)).equal(torch.full((n,), float(n))) and state["rows"] == n

    def test_objects_that_can_not_be_made_again(self) -> None:
        state: dict[str, Any] = {"made": None}

        def f(x: Tensor) -> Tensor:
            state["made"] = Made(x)
            return x if state["made"] is None else x + 1

        with pytest.raises(TypeCheckError, match=r"state.*it gets a Made that the function"):
            specialize(f)(ONES)
        assert state == {"made": None}

    def test_values_of_a_transform_inside(self) -> None:
        state: dict[str, Any] = {"last": None}

        def f(x: Tensor) -> Tensor:
            state["last"] = x * 2
            return x if state["last"] is None else x + 1

        with pytest.raises(EscapedTracerError, match=r"state.*vmap"):
            specialize(vmap(f))(ONES)
        assert state == {"last": None}

    def test_after_an_error_all_is_as_it_was(self) -> None:
        state, kept = {"n": 1}, [1]

        def f(x: Tensor) -> Tensor:
            state["n"] = state["n"] + 1
            kept.append(kept[0])
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            specialize(f)(ONES)
        assert state == {"n": 1} and kept == [1]

    def test_a_list_that_is_an_argument(self) -> None:
        def f(xs: list[Tensor]) -> Tensor:
            xs.append(xs[0])
            return xs[0]

        with pytest.raises(TypeCheckError, match=r"changes the list .*`xs`"):
            specialize(f)([ONES])


def test_the_modes_are_the_documented_ones() -> None:
    from tsfunc.program.closure.guard_builder import Closure

    assert Closure == Literal["guard", "freeze", "error"]


FROM_OUTSIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "item": lambda w, x: x * w[0].item(),
    "tolist": lambda w, x: x * w.tolist()[0],
    "an index": lambda w, x: x + w[0],
    "indices": lambda w, x: x + w[torch.tensor([1, 1])],
    "a mask": lambda w, x: x + w[w > 0].sum(),
    "a list of tensors": lambda w, x: x + torch._foreach_add([w], 1.0)[0],
    "lists of both": lambda w, x: torch._foreach_mul([x, w], 2)[1],
    "a copy": lambda w, x: x + copy.deepcopy(w),
    "writes": lambda w, x: x + w.index_put_((torch.tensor([0]),), x[:1] * 2),
}


@pytest.mark.parametrize("name", FROM_OUTSIDE)
def test_the_data_of_a_tensor_from_outside_is_read_at_every_call(name: str) -> None:
    w, x = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    f = FROM_OUTSIDE[name]
    s = specialize(lambda x: f(w, x))
    s(x)
    w.mul_(2).add_(1)
    expected = f(w.clone(), x)
    torch.testing.assert_close(s(x), expected)
    assert s.cache_info().programs == 1


def test_the_memory_of_a_tensor_from_outside_is_no_number_of_a_program() -> None:
    w = torch.ones(2)
    with pytest.raises(DataDependentError, match="numpy"):
        specialize(lambda x: x + float(w.numpy()[0]))(torch.ones(2))


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_recurrent_networks(name: str) -> None:
    net, x = getattr(nn, name)(2, 3), torch.randn(4, 1, 2)
    s, inside = specialize(net), specialize(lambda x: net(x)[0])
    for _ in range(2):
        torch.testing.assert_close(s(x), net(x))
        torch.testing.assert_close(inside(x), net(x)[0])
    assert s.cache_info().programs == inside.cache_info().programs == 1
    with torch.no_grad():
        net.weight_ih_l0.mul_(2)
    torch.testing.assert_close(s(x), net(x))


_DATA = torch.linspace(-1, 1, 12).view(3, 4)


def _of_all_data(f: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda x: vmap(f)(_DATA) + x


@pytest.mark.parametrize(
    "f",
    [
        _of_all_data(lambda row: row.sin()),
        _of_all_data(lambda row: row.sort(0).values),
        _of_all_data(grad(lambda row: (row.sin() ** 2).sum())),
        _of_all_data(vmap(lambda entry: entry * 2)),
        lambda x: vmap(lambda column: column.triu() + x, in_dims=1)(_DATA.expand(3, 3, 4)),
        lambda x: vmap(lambda row: row * x, chunk_size=2)(_DATA),
        lambda x: vmap(lambda row: row.sin() * x, data_dependent="split")(_DATA),
        lambda x: scan(lambda c, _: (c, vmap(lambda row: row.sin())(_DATA)), x, length=2)[1],
        lambda x: vmap(lambda i: vmap(lambda row: row * i)(_DATA))(x.expand(2)),
        lambda x: vmap(lambda i: psum(_DATA, "i") * i, axis_name="i")(x.expand(2)),
    ],
    ids=[
        "a function rule", "a rule", "gradients", "two vmaps", "another dim", "chunks", "split",
        "a body", "in a vmap", "psum",
    ],
)  # fmt: skip
def test_a_batch_from_outside_is_read_at_every_call(f: Any) -> None:
    program = specialize(f)
    x = torch.tensor(1.5)
    before = _DATA.clone()
    try:
        for _ in range(2):
            torch.testing.assert_close(program(x), f(x))
            _DATA.mul_(-2)
    finally:
        _DATA.copy_(before)
