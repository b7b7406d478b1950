"""The laws of ``docs/semantics.md``: a transformed function means what the function means."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tsfunc import (
    checkpoint,
    cond,
    fori_loop,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    pytrees,
    specialize,
    vjp,
    vmap,
)
from tsfunc.errors import TypeCheckError

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "semantics.md"

X = torch.arange(6.0).reshape(3, 2) + 1

Function = Callable[..., Any]
Transform = Callable[[Function], Function]


def _sum(f: Function) -> Function:
    return lambda x: f(x).sum()


REVERSE: dict[str, Transform] = {
    "grad": lambda f: grad(_sum(f)),
    "grad_and_value": lambda f: grad_and_value(_sum(f)),
    "vjp": lambda f: lambda x: vjp(f, x)[1](torch.ones_like(x)),
    "jacrev": jacrev,
    "hessian": hessian,
    "linearize": lambda f: lambda x: linearize(f, x)[0],
    "vmap(grad)": lambda f: vmap(grad(_sum(f))),
    "grad(vmap)": lambda f: grad(_sum(vmap(f))),
}
OTHERS: dict[str, Transform] = {
    "vmap": vmap,
    "vmap(vmap)": lambda f: vmap(vmap(f)),
    "jvp": lambda f: lambda x: jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": jacfwd,
    "checkpoint": checkpoint,
}
EAGER = REVERSE | OTHERS
PROGRAMS: dict[str, Transform] = {
    "specialize": specialize,
    "specialize(vmap)": lambda f: specialize(vmap(f)),
    "specialize(grad)": lambda f: specialize(grad(_sum(f))),
    "vmap(specialize)": lambda f: vmap(specialize(f)),
}
SAME: dict[str, Transform] = {
    "specialize": specialize,
    "checkpoint": checkpoint,
    "vjp": lambda f: lambda x: vjp(f, x)[0],
    "specialize(vjp)": lambda f: specialize(lambda x: vjp(f, x)[0]),
}
"""The transforms that return what the function returns."""

BATCHED: dict[str, Transform] = {
    "vmap": vmap,
    "specialize(vmap)": lambda f: specialize(vmap(f)),
    "vmap(specialize)": lambda f: vmap(specialize(f)),
    "vmap(checkpoint)": lambda f: vmap(checkpoint(f)),
}


def every(*tables: dict[str, Any]) -> pytest.MarkDecorator:
    """Return the mark that parametrizes a test by the values of tables."""
    values = {name: value for table in tables for name, value in table.items()}
    return pytest.mark.parametrize("transform", values.values(), ids=values.keys())


# --- side effects


class State:
    """Everything that a function with side effects changes."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.table: dict[str, Any] = {"last": None}
        self.names: set[str] = {"old"}
        self.box = SimpleNamespace(value=None)
        self.clock: list[bool] = []
        self.count = 0

    def effects(self, x: Tensor) -> Tensor:
        started = time.perf_counter()
        self.log.append("first")
        print("first")
        y = x.sin()
        self.table["last"] = len(self.log)
        self.names.add("new")
        self.names.discard("old")
        self.box.value = tuple(self.log)
        self.count += 1
        del self.table["gone"]
        print("second", self.count)
        self.log.append("second")
        self.clock.append(time.perf_counter() > started)
        return y


@every(EAGER)
def test_effects_happen_once_and_in_order(
    transform: Transform, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, state = State(), State()
    plain.table["gone"] = state.table["gone"] = 1
    plain.effects(X)
    printed = capsys.readouterr().out
    transform(state.effects)(X)
    assert capsys.readouterr().out == printed
    assert vars(state) == vars(plain)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_effects_of_chunks_happen_once_for_each(chunk: int) -> None:
    state, x = [], torch.ones(5, 2)

    def f(x: Tensor) -> Tensor:
        state.append(x.shape)
        return x.sin()

    vmap(f, chunk_size=chunk)(x)
    assert state == [(2,)] * -(-5 // chunk)


def test_effects_of_split_examples_happen_for_each_group() -> None:
    ways: list[str] = []

    def f(x: Tensor) -> Tensor:
        if x > 0:
            ways.append("positive")
            return x * 2
        ways.append("other")
        return -x

    out = vmap(f, data_dependent="split")(torch.tensor([1.0, -2.0, 3.0, -4.0]))
    assert out.tolist() == [2, 2, 6, 4] and sorted(ways) == ["other", "positive"]


@pytest.mark.parametrize("times", [1, 2])
def test_effects_of_a_checkpoint_happen_again_in_the_derivative(times: int) -> None:
    log = []

    def f(x: Tensor) -> Tensor:
        log.append("before")
        return x.sin().cos()

    g = grad(lambda x: checkpoint(f)(x).sum())
    for _ in range(times):
        g(X)
    assert len(log) == 2 * times


@every(EAGER)
def test_loops_run_their_step_as_often_as_python(transform: Transform) -> None:
    log: list[Any] = []

    def step(i: int, x: Tensor) -> Tensor:
        log.append(i)
        return x * i

    def loop(x: Tensor) -> Any:
        return fori_loop(0, 3, step, x)

    transform(loop)(X)
    assert log == [0, 1, 2]


@pytest.mark.parametrize("kind", [bool, torch.tensor])
def test_the_branch_that_is_not_taken_runs_at_most_once_and_without_data(kind: Any) -> None:
    log, kept = [], torch.zeros(2)

    def yes(x: Tensor) -> Tensor:
        log.append("yes")
        kept.add_(1)
        return x.sin()

    def no(x: Tensor) -> Tensor:
        log.append("no")
        return -x

    for _ in range(3):
        assert cond(kind(False), yes, no, X).equal(-X)
    assert log.count("no") == 3 and log.count("yes") <= 1
    cond(kind(False), yes, no, X.double())
    assert log.count("no") == 4 and log.count("yes") <= 2
    assert kept.tolist() == [0, 0]


def test_a_branch_that_some_examples_take_runs_once_for_them() -> None:
    log = []

    def yes(x: Tensor) -> Tensor:
        log.append("yes")
        return x.sin()

    def no(x: Tensor) -> Tensor:
        log.append("no")
        return -x

    out = vmap(lambda x: cond(x.sum() > 5, yes, no, x))(X)
    assert torch.equal(out, torch.where(X.sum(1, keepdim=True) > 5, X.sin(), -X))
    assert sorted(log) == ["no", "yes"]


@every(PROGRAMS)
def test_effects_that_are_no_assignments_happen_when_a_program_is_made(
    transform: Transform, capsys: pytest.CaptureFixture[str]
) -> None:
    log, count = [], 0

    def f(x: Tensor) -> Tensor:
        nonlocal count
        print("traced")
        count += 1
        log.append(1)
        return x.sin()

    g = transform(f)
    for _ in range(3):
        g(X)
    assert capsys.readouterr().out == "traced\n" and log == [1] and count == 1


# --- assignments

FLAG: Any = None


class Assigned:
    """A place that a function assigns, how to assign it, and how to show it."""

    value: Any = None

    def __init__(self) -> None:
        self.owner = self
        self.table: dict[str, Any] = {"other": 0}
        self.items = [0, 0]
        self.names: set[Any] = set()
        self.kept: Any = None


def _attribute(places: Assigned, value: Any) -> None:
    places.kept = value


def _item_of_a_dict(places: Assigned, value: Any) -> None:
    places.table["last"] = value


def _item_of_a_list(places: Assigned, value: Any) -> None:
    places.items[0] = value


def _class_attribute(places: Assigned, value: Any) -> None:
    Assigned.value = value


def _global(places: Assigned, value: Any) -> None:
    global FLAG
    FLAG = value


def _update(places: Assigned, value: Any) -> None:
    places.table.update(last=value)


def _set(places: Assigned, value: Any) -> None:
    places.names.clear()
    places.names.add(value)


ASSIGNMENTS = [
    _attribute, _item_of_a_dict, _item_of_a_list, _class_attribute, _global, _update, _set,
]  # fmt: skip


def _shown(places: Assigned) -> list[Any]:
    return [places.kept, places.table, places.items, places.names, Assigned.value, FLAG]


@pytest.mark.parametrize("captured", [False, True], ids=["argument", "captured"])
@pytest.mark.parametrize("value", [5, "word", (1, 2.5), None], ids=repr)
@pytest.mark.parametrize("assign", ASSIGNMENTS)
def test_assignments_happen_at_every_call(
    assign: Callable[[Assigned, Any], None],
    value: Any,
    captured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the value is there already when the program is made."""
    monkeypatch.setitem(globals(), "FLAG", None)
    monkeypatch.setattr(Assigned, "value", None)
    places, plain = Assigned(), Assigned()

    def f(places: Assigned, x: Tensor) -> Tensor:
        assign(places, value)
        return x * 2

    g: Function = specialize(f)
    if captured:
        inner = specialize(lambda x: f(places, x))
        g = lambda places, x: inner(x)  # noqa: E731
    for before in (value, "else", value, "other", "else"):
        seen = []
        for each, call in ((plain, f), (places, g)):
            for other in ASSIGNMENTS:
                other(each, before)
            call(each, X)
            seen.append(copy.deepcopy(_shown(each)))
        assert seen[0] == seen[1]


def test_items_of_captured_containers_are_set_at_every_call() -> None:
    table: dict[Any, Any] = {}
    items = [0, 0]

    def f(x: Tensor) -> Tensor:
        table["rows"] = x.shape[0]
        table[x.shape[0]] = True
        items[1] = x.shape[0]
        return x * 2

    g = specialize(f)
    for n in (2, 3, 2, 2, 3, 2):
        table.clear()
        items[1] = -1
        g(torch.ones(n))
        assert table == {"rows": n, n: True} and items == [0, n]


@pytest.mark.parametrize("name", ["update", "append", "add", "extend", "insert"])
def test_methods_of_a_users_object_are_its_own(name: str) -> None:
    """Also where they are called as those of lists and sets."""

    class Meter:
        def __init__(self) -> None:
            self.total: Any = torch.zeros(())
            self.last: Any = None

        def note(self, x: Tensor) -> None:
            self.total = self.total + x
            self.last = 3

    setattr(Meter, name, Meter.note)
    meter: Any = Meter()
    scope: dict[str, Any] = {"meter": meter}
    exec(f"def f(x):\n    meter.{name}(x.sum())\n    return x * 2\n", scope)
    g = specialize(scope["f"])
    for n in (1, 2, 3):
        meter.last = None
        assert g(torch.ones(2)).equal(torch.full((2,), 2.0))
        assert meter.total.item() == 2 * n and meter.last == 3


# --- exceptions


class Special(Exception):
    """An exception that only these tests raise."""


@every(EAGER, PROGRAMS)
def test_an_exception_is_the_one_that_was_raised(transform: Transform) -> None:
    error, fails = Special("it is what it is"), True

    def f(x: Tensor) -> Tensor:
        if fails:
            raise error
        return x.sin()

    g = transform(f)
    for _ in range(2):
        with pytest.raises(Special) as caught:
            g(X)
        assert caught.value is error
    fails = False
    # The exception leaves nothing behind for the next call.
    for got, want in zip(
        pytrees.leaves_of(g(X)), pytrees.leaves_of(transform(torch.sin)(X)), strict=True
    ):
        assert torch.equal(got, want)
    assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32


def effects_before_an_exception(transform: Transform) -> dict[str, Any]:
    """Return what a function has assigned to captured objects before it raises."""
    table: dict[str, Any] = {}
    box, count = SimpleNamespace(), 0

    def f(x: Tensor) -> Tensor:
        nonlocal count
        table["reached"] = 1
        box.reached = True
        count = 2
        raise Special

    with pytest.raises(Special):
        transform(f)(X)
    return table | vars(box) | ({"count": count} if count else {})


@every(EAGER)
def test_effects_before_an_exception_stay(transform: Transform) -> None:
    assert effects_before_an_exception(transform) == {"reached": True, "count": 2}


@every(PROGRAMS)
def test_assignments_before_an_exception_are_undone_by_a_trace(transform: Transform) -> None:
    assert effects_before_an_exception(transform) == {}


# --- random numbers


def noisy(x: Tensor) -> Tensor:
    return x * torch.rand(2) + F.dropout(x) + torch.randn_like(x)


DRAWS: dict[str, Transform] = {
    **SAME,
    "jvp": lambda f: lambda x: jvp(f, (x,), (x,))[0],
    "grad_and_value": lambda f: (
        lambda x: grad_and_value(lambda x: (lambda y: (y.sum(), y))(f(x)), has_aux=True)(x)[1][1]
    ),
    "grad(checkpoint)": lambda f: (
        lambda x: grad_and_value(
            lambda x: (lambda y: (y.sum(), y))(checkpoint(f)(x)), has_aux=True
        )(x)[1][1]
    ),
}


@every(DRAWS)
def test_random_numbers_are_those_of_the_function(transform: Transform) -> None:
    g = transform(noisy)
    g(X)
    torch.manual_seed(3)
    want = [noisy(X), noisy(X), torch.rand(1)]
    torch.manual_seed(3)
    torch.testing.assert_close([g(X), g(X), torch.rand(1)], want)


SAME_DRAWS: dict[str, Transform] = {
    "vmap": lambda f: vmap(f, randomness="same"),
    "specialize(vmap)": lambda f: specialize(vmap(f, randomness="same")),
    "vmap(specialize)": lambda f: vmap(specialize(f), randomness="same"),
    "vmap(checkpoint)": lambda f: vmap(checkpoint(f), randomness="same"),
}


@pytest.mark.parametrize("name", list(BATCHED))
def test_random_numbers_of_a_batch_follow_randomness(name: str) -> None:
    """They are refused unless the caller says how; "same" draws what one example draws."""
    with pytest.raises(RuntimeError, match="randomness"):
        BATCHED[name](noisy)(X)
    g = SAME_DRAWS[name](noisy)
    g(X)
    torch.manual_seed(3)
    found = [g(X), g(X), torch.rand(1)]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for got in found[:2]:
        start = torch.get_rng_state()
        rows = []
        for x in X:
            torch.set_rng_state(start)
            rows.append(noisy(x))
        torch.testing.assert_close(got, torch.stack(rows))
    assert not torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found[2], torch.rand(1)), "the generator is where one example leaves it"


# --- types

TYPES: dict[str, Function] = {
    "a number and a tensor": lambda x: x.sum().double() * torch.ones(2),
    "a number and integers": lambda x: x.sum() + torch.arange(2),
    "a number of one and elements of the other": lambda x: x[0].double() * x,
    "halves and Python's": lambda x: x.half() * 2.5,
    "integers divided": lambda x: x.long() / 2,
    "integers and halves": lambda x: x.long()[0] + x.half(),
    "powers": lambda x: x.long() ** 2.0,
    "a sum of bools": lambda x: (x > 0).sum(),
    "a choice": lambda x: torch.where(x > 2, 1, x.half()),
    "complex": lambda x: x.sum() * 1j,
    "two numbers": lambda x: x.sum().half() * torch.tensor(2.0),
}


@pytest.mark.parametrize("f", TYPES.values(), ids=TYPES.keys())
@every(BATCHED)
def test_types_of_a_batch_are_those_of_the_loop(transform: Transform, f: Function) -> None:
    want = torch.stack([f(x) for x in X])
    got = transform(f)(X)
    assert got.dtype is want.dtype and torch.equal(got, want)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "expanded": lambda x: x[:1].expand(2, 3, 4, 5),
    "with gaps": lambda x: x[:, :, ::2],
}
SHAPED: dict[str, Function] = {
    "elementwise": torch.sin,
    "broadcast": lambda x: x + torch.ones(x.shape[1:]),
    "transposed": lambda x: x.transpose(1, 2),
    "cloned": lambda x: x.clone(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "reshaped": lambda x: x.reshape(-1),
    "reduced": lambda x: x.sum(1),
    "joined": lambda x: torch.cat([x, x]),
    "product": lambda x: x @ x.mT,
    "convolved": lambda x: F.conv2d(x, torch.ones(2, x.shape[1], 1, 1)),
    "written": lambda x: torch.empty_like(x).copy_(x),
    "other type": lambda x: x.double(),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("f", SHAPED.values(), ids=SHAPED.keys())
@every(SAME)
def test_results_have_the_type_and_strides_of_the_functions(
    transform: Transform, f: Function, layout: Callable[[Tensor], Tensor]
) -> None:
    x = layout(torch.randn(2, 3, 4, 5))
    got, want = transform(f)(x), f(x)
    assert got.dtype is want.dtype and got.stride() == want.stride()
    torch.testing.assert_close(got, want)


# --- identity and memory

W = torch.ones(2)
SHARED: dict[str, Function] = {
    "the argument": lambda x: [x],
    "twice": lambda x: [x.sin()] * 2,
    "views": lambda x: [x[..., :1], x.view(-1), x.mT if x.dim() > 1 else x[:]],
    "views of one result": lambda x: (lambda y: [y, y[..., 0], y.view(-1)])(x.sin()),
    "copies": lambda x: [x.clone(), x.clone(), x + 0, x * 1],
    "a captured tensor": lambda x: [W, W[:1], x],
    "equal values": lambda x: [x.sin(), x.sin(), torch.zeros(2), torch.zeros(2)],
}


def memory(values: Sequence[Any]) -> list[list[bool]]:
    """Return which of the values share memory."""
    ids = [x.untyped_storage().data_ptr() for x in values]
    return [[a == b for b in ids] for a in ids]


@pytest.mark.parametrize("f", SHARED.values(), ids=SHARED.keys())
@every(SAME, BATCHED)
def test_results_share_memory_as_the_functions_do(transform: Transform, f: Function) -> None:
    g = transform(f)
    for _ in range(2):
        assert memory([X, W, *g(X)]) == memory([X, W, *f(X)])


AUXILIARY: dict[str, Transform] = {
    "vjp": lambda f: lambda x: vjp(f, x, has_aux=True)[::2],
    "jvp": lambda f: lambda x: jvp(f, (x,), (x,), has_aux=True)[::2],
    "jacrev": lambda f: jacrev(f, has_aux=True),
    "grad": lambda f: grad(lambda x: (f(x)[0].sum(), f(x)[1]), has_aux=True),
    "specialize": specialize,
    "checkpoint": checkpoint,
    **BATCHED,
}


@every(AUXILIARY)
def test_non_tensors_are_returned_themselves(transform: Transform) -> None:
    thing = object()
    g = transform(lambda x: (x.sin(), (thing, "word")))
    for _ in range(2):
        kept = g(X)[1]
        assert kept[0] is thing and kept[1] == "word"


@pytest.mark.parametrize("transform", [specialize, checkpoint])
def test_the_argument_and_captured_tensors_come_back_themselves(transform: Any) -> None:
    same = torch.zeros(2)
    g = transform(lambda x: (x, [same, x], x.sin()))
    for _ in range(2):
        x = torch.ones(3)
        a, (b, c), d = g(x)
        assert a is x and b is same and c is x and d is not x


OF_CONTAINERS: dict[str, Transform] = {
    **EAGER,
    "vjp": lambda f: lambda x: vjp(f, x),
    "jvp": lambda f: lambda x: jvp(f, (x,), (pytrees.tree_map(torch.ones_like, x),)),
}


@every(OF_CONTAINERS)
def test_a_function_gets_containers_of_its_own(transform: Transform) -> None:
    seen = []

    def f(x: Any) -> Any:
        x["more"] = 1
        x["list"].append(2)
        seen.append(len(x["list"]))
        return x["list"][0].sin()

    given = {"list": [X]}
    transform(f)(given)
    assert seen == [2] and list(given) == ["list"] and len(given["list"]) == 1


# --- writes


def writes(x: Tensor) -> Tensor:
    x.mul_(2)
    x[0] += 1
    return x.sin()


WRITES = {**OTHERS, **{name: PROGRAMS[name] for name in PROGRAMS if "grad" not in name}}


@every(WRITES)
def test_a_write_into_an_argument_reaches_the_caller(transform: Transform) -> None:
    x, want = X.clone(), X.clone()
    batched = transform in (vmap, PROGRAMS["specialize(vmap)"], PROGRAMS["vmap(specialize)"])
    f = (lambda x: x.mul_(2).sin()) if transform is OTHERS["vmap(vmap)"] else writes
    g = transform(f)
    for _ in range(2):
        g(x)
        for each in want if batched else [want]:
            f(each)
        assert torch.equal(x, want)


@every(REVERSE)
def test_a_write_into_a_differentiated_tensor_is_refused_as_by_torch(transform: Transform) -> None:
    x = X.clone()
    with pytest.raises(RuntimeError, match=r"leaf Variable that requires grad.*in-place"):
        transform(writes)(x)
    assert torch.equal(x, X)


@every(EAGER, PROGRAMS)
def test_a_captured_tensor_is_written_once_for_all_examples(transform: Transform) -> None:
    w = torch.zeros(2)

    def f(x: Tensor) -> Tensor:
        w.add_(1)
        return x.sin()

    g = transform(f)
    for n in (1, 2, 3):
        g(X)
        assert w.tolist() == [n, n] and not w.requires_grad


@every(EAGER, PROGRAMS)
def test_tensors_made_inside_are_written_as_without_the_transform(transform: Transform) -> None:
    def f(x: Tensor) -> Tensor:
        y = torch.zeros(x.shape)
        y.add_(x)
        y[..., :1] *= x[..., :1] if x.dim() else x
        y.view(-1)[0].add_(1)
        return y.sin()

    def pure(x: Tensor) -> Tensor:
        first = torch.arange(x.shape[-1]) == 0 if x.dim() else torch.tensor(True)
        y = torch.where(first, x * x, x)
        return (y + (torch.arange(x.numel()) == 0).view(x.shape)).sin()

    if transform is OTHERS["vmap(vmap)"]:
        transform = vmap
    got, want = transform(f)(X), transform(pure)(X)
    torch.testing.assert_close(got, want)


# --- grad mode

MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
@every(EAGER, PROGRAMS)
def test_results_require_grad_as_those_of_the_function(transform: Transform, mode: Any) -> None:
    captured = torch.tensor(2.0, requires_grad=True)
    functions: list[Function] = [torch.sin, lambda x: (x * captured).sin()]
    for f in functions:
        g = transform(f)
        for x in (X, X.clone().requires_grad_(), X):
            for each_mode in (mode, torch.enable_grad, mode):
                with each_mode():
                    want = f(x).requires_grad
                    results = pytrees.leaves_of(g(x))
                assert all(each.requires_grad is want for each in results)


@pytest.mark.parametrize("mode", MODES[:2])
@every(EAGER, PROGRAMS)
def test_the_grad_mode_that_a_function_sees(transform: Transform, mode: Any) -> None:
    """It is that of the call; inside of reverse mode it is on."""
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return x.sin()

    on = transform in (*REVERSE.values(), PROGRAMS["specialize(grad)"])
    with mode():
        transform(f)(X)
        assert seen == [on or torch.is_grad_enabled()]
        assert torch.is_grad_enabled() is (mode is torch.enable_grad)


@every(REVERSE, PROGRAMS)
def test_a_grad_mode_that_is_left_on_return_is_put_back(transform: Transform) -> None:
    """Without them, and in the other transforms, it stays."""

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        torch.set_grad_enabled(not before)
        return y

    for before in (True, False):
        g = transform(f)
        with torch.set_grad_enabled(before):
            for _ in range(2):
                g(X)
                assert torch.is_grad_enabled() is before
            for other in OTHERS.values():
                torch.set_grad_enabled(before)
                other(f)(X)
                assert torch.is_grad_enabled() is not before


@pytest.mark.parametrize("use", ["dict", "list"])
def test_a_program_refuses_to_change_the_callers_containers(use: str) -> None:
    given: Any = {"x": X} if use == "dict" else [X]

    def of_dict(given: dict[str, Tensor]) -> Tensor:
        given["y"] = given["x"]
        return given["x"] * 2

    def of_list(given: list[Tensor]) -> Tensor:
        given.append(given[0])
        return given[0] * 2

    with pytest.raises(TypeCheckError, match=f"changes the {use}"):
        specialize(of_dict if use == "dict" else of_list)(given)
    assert len(given) == 1


# --- the page


def _named() -> list[tuple[str, str]]:
    return re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", PAGE.read_text())


def test_tests_that_the_page_names_exist() -> None:
    assert len(_named()) > 30
    for file, name in _named():
        text = (ROOT / file).read_text()
        for part in name.split("::"):
            assert re.search(rf"(?:def|class) {part}\b", text), (file, name)


def test_the_page_names_every_test_here() -> None:
    here = set(re.findall(r"^def (test_\w+)", Path(__file__).read_text(), re.M))
    named = {name for file, name in _named() if file == "tests/test_semantics.py"}
    assert here - named == {
        "test_tests_that_the_page_names_exist", "test_the_page_names_every_test_here",
        "test_the_page_is_short",
    }  # fmt: skip


def test_the_page_is_short() -> None:
    assert len(PAGE.read_text().split()) < 1200
