"""Errors that leave a transform show the user's frames alone, with the user's line last."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tsfunc
from tsfunc import (
    MetaTensorType,
    checkpoint,
    config,
    grad,
    hessian,
    jacfwd,
    jvp,
    scan,
    specialize,
    vjp,
    vmap,
)
from tsfunc.user_code import MODULES

LIBRARIES = tuple(str(Path(str(module.__file__)).parent) for module in (tsfunc, torch))

Function = Callable[..., Any]


def wrong(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = x * 2
    return (hidden @ w.T).sum()  # the line that fails


def raised(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


@pytest.fixture
def full() -> Iterator[None]:
    config.traceback = "full"
    yield
    config.traceback = "filtered"


X, W = torch.randn(5, 3), torch.randn(3, 2)
TOWERS: dict[str, Function] = {
    "grad": lambda: grad(wrong)(X[0], W),
    "vmap": lambda: vmap(wrong, (0, None))(X, W),
    "vmap(grad)": lambda: vmap(grad(wrong), (0, None))(X, W),
    "vmap(vmap(grad))": lambda: vmap(vmap(grad(wrong), (0, None)), (0, None))(X[None], W),
    "vjp": lambda: vjp(wrong, X, W),
    "jvp": lambda: jvp(wrong, (X, W), (X, W)),
    "jacfwd": lambda: jacfwd(wrong)(X, W),
    "hessian": lambda: hessian(wrong)(X, W),
    "checkpoint": lambda: checkpoint(wrong)(X, W),
    "specialize": lambda: specialize(wrong)(X, W),
    "specialize(vmap(grad))": lambda: specialize(vmap(grad(wrong), (0, None)))(X, W),
    "vmap(specialize)": lambda: vmap(specialize(wrong), (0, None))(X, W),
    "specialize(scan)": lambda: specialize(
        lambda x: scan(lambda c, row: (c, wrong(row, W)), torch.zeros(()), x)[1]
    )(X),
    "scan": lambda: scan(lambda c, row: (c, wrong(row, W)), torch.zeros(()), X),
    "map": lambda: tsfunc.map(lambda row: wrong(row, W), X),
    "associative_scan": lambda: tsfunc.associative_scan(lambda a, b: wrong(a, W), X),
    "cond": lambda: tsfunc.cond(X.sum() < 1e9, wrong, lambda x, w: x.sum(), X, W),
    "switch": lambda: tsfunc.switch(torch.tensor(0), [wrong, wrong], X, W),
    "fori_loop": lambda: tsfunc.fori_loop(0, 2, lambda i, x: wrong(x, W), X),
    "while_loop": lambda: tsfunc.while_loop(lambda x: True, lambda x: wrong(x, W), X),
}


@pytest.mark.parametrize("tower", TOWERS)
def test_the_users_line_is_last(tower: str) -> None:
    error = raised(TOWERS[tower])
    found = frames(error)
    assert not [frame for frame in found if frame.filename.startswith(LIBRARIES)]
    assert (found[-1].name, found[-1].line) == (
        "wrong", "return (hidden @ w.T).sum()  # the line that fails",
    )  # fmt: skip
    assert len("".join(traceback.format_exception(error)).splitlines()) <= 25


REFUSED: dict[str, Function] = {
    "specialize": lambda: specialize(wrong, {"no": 1}),
    "scan": lambda: scan(lambda c, row: (row, c), torch.zeros(()), X),
    "while_loop": lambda: tsfunc.while_loop(lambda x: x > 0, lambda x: x, X),
    "cond": lambda: tsfunc.cond(X.sum() < 1e9, torch.sum, torch.sin, X),
}


@pytest.mark.parametrize("call", REFUSED)
def test_a_refusal_shows_the_users_call_alone(call: str) -> None:
    error = raised(REFUSED[call])
    assert [frame.filename for frame in frames(error)] == [__file__] * 2
    assert len("".join(traceback.format_exception(error)).splitlines()) <= 25


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes of exceptions are Python 3.11's")
def test_a_note_names_the_rule_that_ran() -> None:
    error = raised(lambda: vmap(grad(wrong), (0, None))(X, W))
    (note,) = vars(error)["__notes__"]
    first, second, last = note.splitlines()
    assert first == "raised in vmap(grad(wrong)), where wrong had x: float32[3], w: float32[3, 2]"
    assert second == "for each example, matmul was called on float32[3], float32[2, 3]"
    assert last.endswith("tsfunc.config.traceback = 'full' shows them.")


@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    targets: torch.Tensor


PARAMS = {"bias": torch.zeros(2), "weight": W}
CIRCULAR: list[Any] = []
CIRCULAR.append(CIRCULAR)
# Calls of a function that fails, and the tensors that the note describes.
DESCRIBED: dict[str, tuple[Function, str]] = {
    "dict": (
        lambda: vmap(grad(lambda p, x: p["w"] @ x), (None, 0))(PARAMS, X),
        "had p['bias']: float32[2], p['weight']: float32[3, 2], x: float32[3]",
    ),
    "dict in a program": (
        lambda: specialize(lambda p, x: p["w"] @ x)(PARAMS, X),
        "had p['bias']: float32[2], p['weight']: float32[3, 2], x: float32[5, 3]",
    ),
    "dataclass": (
        lambda: vmap(lambda b: b.labels)(Batch(X, X[:, 0])),
        "had b.inputs: float32[3], b.targets: float32[]",
    ),
    "nested": (
        lambda: vmap(lambda xs: xs[0]["y"])([{"x": X}, (X, X)]),
        "had xs[0]['x']: float32[3], xs[1][0]: float32[3], xs[1][1]: float32[3]",
    ),
    "list that contains itself": (lambda: vmap(lambda x, k=CIRCULAR: x[9])(X), "had x: float32[3]"),
    "many": (
        lambda: grad(lambda ws, x: ws[5].sum())([W] * 5, X),
        ", ws[2]: float32[3, 2] and 2 more in ws, x: float32[5, 3]",
    ),
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes of exceptions are Python 3.11's")
@pytest.mark.parametrize("name", DESCRIBED)
def test_a_note_describes_tensors_in_containers(name: str) -> None:
    call, text = DESCRIBED[name]
    (note,) = vars(raised(call))["__notes__"]
    assert note.splitlines()[0].endswith(text)


# Calls that torch refuses, in C++ and in Python, as functions, methods and operators of Python.
REFUSED_CALLS: dict[str, tuple[Function, str]] = {
    "operator": (lambda x, w: x @ w, "matmul was called on float32[3], float32[4, 2]"),
    "reflected": (lambda x, w: w @ x, "matmul was called on float32[4, 2], float32[3]"),
    "function": (lambda x, w: torch.cat([x, w]), "cat was called on float32[3], float32[4, 2]"),
    "method": (lambda x, w: x.reshape(2, 2), "reshape was called on float32[3]"),
    "in place": (lambda x, w: x.add_(w), "add_ was called on float32[3], float32[4, 2]"),
    "index": (lambda x, w: x[4], "getitem was called on float32[3]"),
    "keyword": (lambda x, w: x.sum(dim=2), "sum was called on float32[3]"),
    "Python": (lambda x, w: F.mse_loss(x, w), "mse_loss was called on float32[3], float32[4, 2]"),
    "composite": (lambda x, w: F.linear(x, w), "linear was called on float32[3], float32[4, 2]"),
    "dispatch": (
        lambda x, w: torch.ops.aten.add.Tensor(x, w),
        "add was called on float32[3], float32[4, 2]",
    ),
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes of exceptions are Python 3.11's")
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_a_note_has_the_shapes_of_an_example_of_the_refused_call(name: str, nested: bool) -> None:
    call, text = REFUSED_CALLS[name]
    x, w = torch.randn(5, 3), torch.randn(4, 2)
    error = raised(
        lambda: (
            vmap(vmap(call, (0, None)), (0, None))(x[None], w)
            if nested
            else vmap(call, (0, None))(x, w)
        )
    )
    assert f"for each example, {text}\n" in vars(error)["__notes__"][0]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes of exceptions are Python 3.11's")
def test_errors_of_the_user_have_no_refused_call() -> None:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")

    def f(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(hook)
        return x.sin()

    def of_hook(x: torch.Tensor) -> torch.Tensor:
        f(x.requires_grad_()).backward()
        return x

    error = raised(lambda: vmap(of_hook)(torch.ones(3)))
    assert str(error) == "mine"
    assert "for each example" not in vars(error)["__notes__"][0]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes of exceptions are Python 3.11's")
@pytest.mark.parametrize("call", [vmap, lambda f: specialize(vmap(f))], ids=["vmap", "program"])
def test_a_note_has_the_shapes_of_a_module_of_torch(call: Any) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(4, 1))
    error = raised(lambda: call(module)(torch.ones(2, 6, 3)))
    assert "where Linear.forward had input: float32[6, 5]" in vars(error)["__notes__"][0]
    error = raised(lambda: call(F.cross_entropy)(torch.ones(2, 4, 3), torch.ones(2, 5).long()))
    where = "where cross_entropy had input: float32[4, 3], target: int64[5]"
    assert where in vars(error)["__notes__"][0]


def test_layers_of_torch_hold_no_guards_in_their_frames() -> None:
    """An error keeps the locals of these frames: NOTE [guards in frames] in ``interrupts``."""
    folder, functions = map(Path, MODULES)
    files = [functions, *folder.rglob("*.py")]
    assert len(files) > 20
    assert not [file for file in files if re.search(r"Guard\(|_Disable\w+\(", file.read_text())]


def test_an_error_of_a_program_is_at_the_users_line() -> None:
    table = torch.nn.Embedding(5, 3)

    def model(i: torch.Tensor) -> torch.Tensor:
        doubled = i * 2
        return table(doubled).sum()

    program = specialize(model, {"i": MetaTensorType(["n"], dtype=torch.int64)})
    program(torch.tensor([1, 2]))
    error = raised(lambda: program(torch.tensor([1, 9])))
    assert isinstance(error, IndexError)
    found = frames(error)
    assert not [frame for frame in found if "<tsfunc" in frame.filename]
    assert (found[-1].filename, found[-1].name) == (__file__, "model")
    assert found[-1].line is not None and found[-1].line.startswith("return table(doubled)")


def test_an_error_of_a_loaded_program_notes_the_users_line(tmp_path: Path) -> None:
    """The file of the code may be elsewhere, so that no frame shows it."""

    def rows(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        doubled = i * 2
        return x[doubled].sum()

    s = specialize(rows)
    s(torch.ones(3, 2), torch.tensor([0, 1]))
    s.save(tmp_path / "rows.tsf")
    program = tsfunc.load(tmp_path / "rows.tsf")
    error = raised(lambda: program(torch.ones(3, 2), torch.tensor([0, 9])))
    assert isinstance(error, IndexError)
    assert frames(error)[-1].filename == __file__
    (note,) = vars(error)["__notes__"]
    line = inspect.getsourcelines(rows)[1] + 2
    where = f"the operator was traced at {Path(__file__).name}:{line}"
    assert f"{where}  return x[doubled].sum()\n" in note


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # inductor's import
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_error_of_a_compiled_program_is_at_the_users_line(backend: str) -> None:
    table = torch.nn.Embedding(5, 3)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    calls = torch.zeros(())

    def step(i: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        calls.add_(1)
        loss: torch.Tensor = F.dropout(table(i)).sum()
        loss.backward()
        optimizer.step()
        return loss

    program = specialize(step, backend=backend)
    for _ in range(2):
        program(torch.tensor([1, 2]))
    before, weight = torch.get_rng_state(), table.weight.detach().clone()
    error = raised(lambda: program(torch.tensor([1, 9])))
    assert (type(error), str(error)) == (IndexError, "index out of range in self")
    found = frames(error)
    assert {frame.filename for frame in found} == {__file__}
    assert str(found[-1].line).startswith("loss: torch.Tensor")
    assert len("".join(traceback.format_exception(error)).splitlines()) <= 25
    assert table.weight.equal(weight), "the program that looks for the line writes nothing"
    if backend == "aot_eager":  # inductor draws before its kernel reads the index
        assert torch.get_rng_state().equal(before)


def test_shapes_that_torch_joins_with_x_have_the_users_names() -> None:
    pool = specialize(lambda x: F.max_pool2d(x, 4), {"x": MetaTensorType([1, "h", "w"])})
    error = raised(lambda: pool(torch.ones(1, 2, 3)))
    assert "(1xhxw)" in str(error), error


LOGGED = """
import torch, tsfunc
from tsfunc import MetaTensorType

w = torch.ones(2, 3)
for transform in (tsfunc.sparse_jacobian, tsfunc.specialize):
    try:
        transform(lambda x: (x @ w).sum())(torch.ones(4))
    except RuntimeError as error:
        assert "shape" in str(error) or "dim" in str(error)
"""


def test_torch_logs_no_traceback_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOGGED], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_wrong_arguments_show_the_call_alone() -> None:
    found = frames(raised(lambda: vmap(torch.add)(torch.ones(2), torch.ones(3))))
    assert {frame.filename for frame in found} == {__file__}


def test_all_frames_on_request(full: None) -> None:
    error = raised(TOWERS["vmap(grad)"])
    assert [frame for frame in frames(error) if frame.filename.startswith(LIBRARIES)]
    assert not hasattr(error, "__notes__")


def test_an_except_inside_of_a_transform_sees_the_error() -> None:
    def careful(x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.as_tensor(vmap(lambda row: row @ torch.ones(7))(x))
        except RuntimeError as error:
            assert not hasattr(error, "__notes__")
            return x.sum()

    assert grad(careful)(torch.ones(2, 3)).tolist() == [[1.0] * 3] * 2


def test_a_defect_of_the_library_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    import tsfunc.transforms.vmap as module

    def broken(*args: Any) -> Any:
        return None.missing  # type: ignore[attr-defined]

    broken.__code__ = broken.__code__.replace(co_filename=str(module.__file__))
    monkeypatch.setattr(module, "mapped_dims", broken)
    found = frames(raised(lambda: vmap(torch.sin)(torch.ones(2))))
    assert [frame for frame in found if frame.filename.startswith(LIBRARIES)]


class Misspelled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.wieght  # type: ignore[operator]


class Plain:
    weight = 2.0

    def scaled(self, x: torch.Tensor) -> Any:
        return x * self.wieght  # type: ignore[attr-defined]

    def deletes(self, x: torch.Tensor) -> torch.Tensor:
        del self.wieght  # type: ignore[attr-defined]
        return x


ATTENTION = torch.nn.MultiheadAttention(8, 2)
# Functions whose error a library raises because of the user's line.
MISTAKES: dict[str, Function] = {
    "attribute of a module": Misspelled(),
    "attribute of an object": Plain().scaled,
    "deleted attribute": Plain().deletes,
    "attribute of a tensor": lambda x: x.no_method(),
    "attribute of torch": lambda x: torch.no_function(x),  # type: ignore[attr-defined]
    "assertion of torch": lambda x: ATTENTION(x, x, x)[0],
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize(
    "transform", [grad, vmap, specialize, checkpoint, lambda f: specialize(vmap(f))]
)
def test_a_mistake_that_a_library_finds_folds(name: str, transform: Function) -> None:
    error = raised(lambda: transform(MISTAKES[name])(torch.ones(2, 4, 3)))
    assert isinstance(error, AssertionError if "assertion" in name else AttributeError)
    assert {frame.filename for frame in frames(error)} == {__file__}


def test_causes_are_folded_too() -> None:
    def chained(x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.as_tensor(vmap(torch.add)(x, torch.ones(7)))
        except ValueError as error:
            raise KeyError("chained") from error

    error = raised(lambda: grad(chained)(torch.ones(3)))
    assert error.args == ("chained",) and error.__cause__ is not None
    for each in (error, error.__cause__):
        assert not [f for f in frames(each) if f.filename.startswith(LIBRARIES)]


@pytest.mark.parametrize("is_setting", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_nan_in_a_program_is_at_the_users_line(
    mapped: bool, is_setting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logarithm(x: torch.Tensor) -> torch.Tensor:
        return x.log()

    program = specialize(vmap(logarithm) if mapped else logarithm)
    program(torch.ones(2))
    if is_setting:
        monkeypatch.setattr(tsfunc.config, "debug_nans", True)
        error = raised(lambda: program(-torch.ones(2)))
    else:
        with tsfunc.debug.nans():
            error = raised(lambda: program(-torch.ones(2)))
    assert {frame.filename for frame in frames(error)} == {__file__}
    assert frames(error)[-1].name == "logarithm"


def test_methods_of_specialized_functions_and_programs_are_folded(tmp_path: Path) -> None:
    weight = torch.ones(2, requires_grad=True)

    @specialize
    def step(x: torch.Tensor) -> None:
        (weight * x).sum().backward()

    step(torch.ones(2))
    double = specialize(lambda x: 2 * x)
    double(torch.ones(2))
    absent = tmp_path / "absent" / "program.tsf"
    for call in (
        lambda: step.save(tmp_path / "step.tsf"),
        lambda: step.to_exported_program(),
        lambda: double.lower({"y": MetaTensorType([3])}),
        lambda: double.save(absent),
        lambda: double.program.save(absent),
        lambda: step.program.to_exported_program(),
    ):
        assert frames(raised(call))[-1].filename == __file__


@pytest.mark.parametrize("key", ["momentum", 3, ("a", 1)])
@pytest.mark.parametrize("transform", [vmap, specialize])
def test_a_key_error_keeps_its_key(transform: Function, key: Any) -> None:
    error = raised(lambda: transform(lambda x: x * {"lr": 1.0}[key])(torch.ones(2)))
    assert isinstance(error, KeyError) and error.args == (key,)


def test_only_known_settings() -> None:
    with pytest.raises(ValueError, match="expected 'filtered' or 'full', got 'short'"):
        config.traceback = "short"  # type: ignore[assignment]
    assert repr(config) == "tsfunc.config(traceback='filtered', debug_nans=False)"


# Extension points keep every frame: see NOTE [folded tracebacks]. "spawn" starts processes.
EXTENSION_POINTS = {"Tracer", "TracerLevel", "spawn"}
PUBLIC = sorted(
    (module.__name__, name)
    for module in (tsfunc, tsfunc.custom_derivatives, tsfunc.debug, tsfunc.testing, tsfunc.types)
    for name in module.__all__
    if callable(getattr(module, name)) and name not in EXTENSION_POINTS
)
WRONG: tuple[tuple[Any, ...], ...] = (
    (), (object(),), (object(), object()), (-1,), ("?!",), ({"x": object()},), (len, object()),
)  # fmt: skip


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_public_calls_with_wrong_arguments_show_the_callers_line_alone(
    module: str, name: str
) -> None:
    public = getattr(sys.modules[module], name)
    for args in WRONG:
        try:
            public(*args)
        except Exception as error:
            shown = frames(error)
            own = [frame for frame in shown if frame.filename.startswith(LIBRARIES)]
            if own and own[-1].filename.startswith(LIBRARIES[1]):
                continue  # an error in torch's own code, kept like a defect
            assert not own, f"{name}{args}: {error!r} shows {own}"
            assert shown[-1].filename == __file__


def test_methods_and_constructors_of_public_classes_fold() -> None:
    described = tsfunc.Descriptors({"x": MetaTensorType(["n"])})
    for call in (
        lambda: tsfunc.Dim("n", min=3, max=2),
        lambda: MetaTensorType(["n +"]),
        lambda: MetaTensorType.parse("f33[n]"),
        lambda: described.split(y=[1]),
        lambda: MetaTensorType(["n"]).split(kind=[1]),
        lambda: tsfunc.types.TSList(3),  # type: ignore[arg-type]
    ):
        error = raised(call)
        assert [frame.filename for frame in frames(error)] == [__file__, __file__], error


def test_a_broken_law_shows_the_callers_line_alone() -> None:
    numbers = iter(range(9))
    error = raised(lambda: tsfunc.testing.check_vmap(lambda x: x * next(numbers), X))
    assert {frame.filename for frame in frames(error)} == {__file__}
    assert isinstance(error, AssertionError)


# --- names that the user knows, and shapes


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: x + torch.randn(4), "randn"),
        (F.dropout, "dropout"),
        (torch.bernoulli, "bernoulli"),
        (lambda x: x.clone().normal_(), "normal_"),
        (lambda x: torch.normal(x, x.abs()), "normal"),
        (lambda x: x.abs().multinomial(2), "multinomial"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_random_operation_has_its_name_in_torch(
    call: Function, name: str, compiled: bool
) -> None:
    f = specialize(vmap(call)) if compiled else vmap(call)
    with pytest.raises(RuntimeError, match=rf"\(the operation is {name}\)"):
        f(torch.rand(3, 4))


@pytest.mark.parametrize("transform", [vmap, specialize, grad], ids=lambda t: t.__name__)
def test_a_tracer_is_a_tensor_in_messages(transform: Function) -> None:
    x = torch.ones(3)
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'missing'") as error:
        transform(lambda x: x.missing)(x)
    assert len(traceback.format_exception(error.value)) < 10
    with pytest.raises(TypeError, match=r"for \+: 'Tensor' and 'str'"):
        transform(lambda x: x + "text")(x)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes from Python 3.11 on")
def test_an_error_of_a_program_has_the_shapes_of_its_call() -> None:
    f = specialize(lambda x, index: {"row": x[index]}, {"x": MetaTensorType(["n", 4])})
    for index in (0, 1):
        f(torch.ones(3, 4), torch.tensor([index]))
    with pytest.raises(IndexError) as error:
        f(torch.ones(5, 4), torch.tensor([9]))
    (note,) = getattr(error.value, "__notes__")  # noqa: B009 - not in Python 3.10
    assert "called with x: float32[5, 4], index: int64[1]" in note
    with pytest.raises(RuntimeError, match="dtype") as mismatch:
        specialize(lambda x: x @ torch.ones(4, 2).double())(torch.ones(3, 4))
    assert "x: float32[3, 4]" in getattr(mismatch.value, "__notes__")[0]  # noqa: B009 - as above


def test_a_shape_mismatch_names_the_operands_in_a_list() -> None:
    with pytest.raises(RuntimeError, match=r"examples of shape \(4,\), \(5, 2\)"):
        vmap(lambda x: torch.einsum("ij,jk->ik", x, torch.ones(5, 2)))(torch.ones(3, 4))
