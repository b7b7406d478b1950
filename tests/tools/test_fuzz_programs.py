"""The fuzzer finds planted faults, its reference is right, and its generated tests run."""

from __future__ import annotations

import itertools
import random
import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tsfunc
from tests.transforms import support  # noqa: F401 (loads torch's forward formulas)
from tools import fuzz_programs
from tools.fuzz import minimizing, reference, running, work
from tools.fuzz.circumstances import GRADIENTS, KINDS
from tools.fuzz.draw import Draw, RejectedError, draw_function
from tools.fuzz.modes import MODES
from tools.fuzz.program import (
    CONTAINERS,
    SHARED,
    Block,
    Leaf,
    Parameter,
    Program,
    Statement,
    Transform,
    arguments_text,
    source,
)
from tools.fuzz.report import as_test
from tools.fuzz.sessions import Session, minimized_session, run_session
from tools.fuzz.towers import draw_tower, surrounded
from tools.fuzz.workers import Worker
from tools.fuzz_programs import drawn, show


def program_of(
    *lines: str,
    result: str,
    shape: tuple[int, ...] = (2, 3),
    tower: Sequence[Transform] = (),
    calls: tuple[int, ...] = (0,),
) -> Program:
    body = tuple(Statement(line, "test") for line in lines)
    params = (Parameter("x0", (Leaf(shape),)),)
    return Program("test", (), params, body, result, tuple(tower), calls)


def mapped_leaves(*dims: int) -> Transform:
    return Transform("vmap", dims, (4,))


def mapped(dim: int) -> Transform:
    return Transform("vmap", (dim,), (4,))


@pytest.mark.parametrize(
    "transform",
    [
        lambda m, f, x: m.vmap(f, in_dims=1, out_dims=-1)(x),
        lambda m, f, x: m.vmap(m.vmap(f, -1), 1)(x),
        lambda m, f, x: m.grad(lambda y: f(y).sin().sum())(x),
        lambda m, f, x: m.jvp(f, (x,), (x.cos(),)),
        lambda m, f, x: m.vjp(f, x)[1](x.cos() if f(x).shape == x.shape else f(x)),
        lambda m, f, x: m.jacrev(f)(x),
        lambda m, f, x: m.jacfwd(m.jacrev(f))(x),
        lambda m, f, x: m.hessian(lambda y: f(y).sin().sum())(x),
        lambda m, f, x: m.vmap(m.grad(lambda y: f(y).cos().sum()), 1)(x),
        lambda m, f, x: m.grad(lambda y: m.vmap(f, -1)(y).sin().sum())(x),
        lambda m, f, x: m.jvp(m.grad(lambda y: f(y).cos().sum()), (x,), (x.sin(),)),
        lambda m, f, x: m.grad(lambda y: m.jvp(f, (y,), (y.sin(),))[1].sum())(x),
    ],
    ids=itertools.count(),
)
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sin() * x,
        lambda x: x.cumsum(0).exp().sum(-1),
        lambda x: (x @ x.mT).tanh() if x.dim() == 2 else x * x.sum(),
        lambda x: x.flip(0).square().cumprod(-1),
    ],
    ids=itertools.count(),
)
def test_the_reference_agrees_with_torch_func(transform: Any, f: Any) -> None:
    x = torch.randn(2, 2, 3, dtype=torch.float64) * 0.3
    torch.testing.assert_close(transform(reference, f, x), transform(torch.func, f, x))


def test_the_reference_exchanges_values_of_a_named_axis() -> None:
    x = torch.randn(3, 2, dtype=torch.float64)

    def f(row: torch.Tensor) -> Any:
        total = reference.psum(row.exp(), "i")
        inner = reference.vmap(lambda y: y - reference.pmean(y, "j"), axis_name="j")(row)
        gathered = reference.all_gather(row / total, "i", axis=-1)
        return total * inner + gathered.sum(-1) * reference.axis_index("i")

    found = reference.vmap(f, axis_name="i")(x)
    total = x.exp().sum(0)
    expected = total * (x - x.mean(1, keepdim=True))
    expected = expected + (x / total).sum(0) * torch.arange(3)[:, None]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("container", CONTAINERS)
def test_containers_of_arguments_and_other_sizes_in_later_calls(container: str) -> None:
    x = Parameter("x0", (Leaf((2, 3)), Leaf((3,), layout="narrow")), container)
    body = (Statement(f"v1 = {x.part(0)}.sin() * {x.part(1)}", "test"),)
    derivative = Transform("checkpoint" if x.has_none else "vjp", argnums=(0,))
    names = '{"x0": {"a": tsfunc.MetaTensorType(["m", "n"]), "b": tsfunc.MetaTensorType(["n"])}}'
    options = (("descriptors", names),) if container == "dict" else ()
    tower = (derivative, Transform("specialize", options=options), mapped_leaves(-1, 0))
    for sizes in ((), ((2, 5), (3, 7))):
        program = Program("test", (), (x,), body, "v1", tower, (0, 1), sizes=sizes)
        assert running.run(program) == running.Verdict(running.OK)
        assert (", 7" in arguments_text(program, 1)[0]) == bool(sizes)


def test_a_planted_fault_is_found_and_minimized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that assumes that the batch dim is in front."""
    from tsfunc.ops import n_dimensional

    def wrong(dims: Sequence[int], rank: int, at: int) -> list[int]:
        return [dim % rank + 1 for dim in dims]

    monkeypatch.setattr(n_dimensional, "physical_dims", wrong)
    for number in range(400):
        rng = random.Random(f"planted/{number}")
        program = draw_tower(rng, draw_function(rng, "planted", ["views"]))
        if not any(name in str(program.body) for name in ("flip", "roll", "rot90")):
            continue
        verdict = running.run(program)
        if verdict.kind == running.WRONG:
            break
    small = minimizing.minimized(program, verdict, running.run)
    assert [step.kind for step in small.tower] == ["vmap"]
    (line,) = (s.text for s in small.body if any(n in s.text for n in ("flip", "roll", "rot90")))
    assert len(small.body) <= 3 and line
    monkeypatch.undo()
    assert running.run(small).kind == running.OK


def test_a_printed_test_runs_and_fails_where_the_result_is_wrong(tmp_path: Path) -> None:
    program = program_of("v1 = x0.sin()", result='{"out": v1}', tower=[mapped(-1)], calls=(0, 1))
    text = as_test(program, running.Verdict(running.WRONG, "numbers"))
    path = tmp_path / "test_printed.py"
    assert "reference" not in text
    path.write_text(text)
    runpy.run_path(str(path))["test_found"]()
    path.write_text(text.replace("x0.sin()", "x0.cos()"))
    with pytest.raises(AssertionError):
        runpy.run_path(str(path))["test_found"]()


def test_a_gradient_that_is_lost_at_a_repeated_call_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mode under which results of repeated calls are detached."""
    program = program_of(
        "v1 = x0.sin() * x0", result="v1", tower=[mapped(-1)], calls=(0, 1, 0, 1)
    ).with_(circumstances=("flops", "gradients", "others", "gradients"))
    assert running.run(program).kind == running.OK
    calls = itertools.count()

    def planted(f: Any, *args: Any, **kwargs: Any) -> Any:
        mapped_ = vmap(f, *args, **kwargs)
        return lambda x: mapped_(x.detach() if next(calls) % 4 == 3 else x)

    vmap = tsfunc.vmap
    monkeypatch.setattr(tsfunc, "vmap", planted)
    verdict = running.run(program)
    assert (verdict.kind, verdict.cause) == (running.WRONG, "numbers")
    assert "call 3 (gradients)" in verdict.detail


@pytest.mark.parametrize("circumstance", sorted({*KINDS}))
def test_circumstances_do_not_change_results(circumstance: str) -> None:
    program = program_of("v1 = c0 @ x0.sin()", result="v1.sum(0)", tower=[mapped(-1)])
    program = program.with_(
        captured=(("c0", Leaf((3, 2))),), calls=(0, 1, 0, 1), circumstances=("", circumstance) * 2
    )
    verdict = running.run(program)
    assert verdict.kind == running.OK, verdict.detail


def test_a_printed_test_compares_the_gradients_of_a_call(tmp_path: Path) -> None:
    program = program_of("v1 = c0 * x0.sin()", result="v1", tower=[mapped(-1)], calls=(0, 1))
    program = program.with_(captured=(("c0", Leaf((2, 3))),), circumstances=("flops", "gradients"))
    text = as_test(program, running.Verdict(running.WRONG, "numbers"))
    path = tmp_path / "test_printed.py"
    path.write_text(text)
    assert "circumstance 'flops'" in text
    runpy.run_path(str(path))["test_found"]()
    path.write_text(text.replace("program = f1", "program = lambda x: f1(x.detach())"))
    with pytest.raises(AssertionError):
        runpy.run_path(str(path))["test_found"]()


def test_programs_that_write_into_captured_tensors_are_not_drawn() -> None:
    draw = Draw(random.Random(0), [1, 2, 3, 4])
    draw.env["c0"] = torch.ones(1, 1, dtype=torch.float64)
    draw.let("c0.permute((1, 0)).contiguous()")
    with pytest.raises(RejectedError, match="captured"):
        draw.do("v1.add_(1)")


def test_loops_of_the_reference_run_on_copies_and_its_derivatives_run_once() -> None:
    x = torch.randn(3, dtype=torch.float64)
    expected = x + 2

    def step(_: Any, carry: torch.Tensor) -> torch.Tensor:
        return carry.add_(1)

    assert reference.fori_loop(0, 2, step, x).equal(expected) and not x.equal(expected)
    runs = itertools.count()
    _, push = reference.linearize(lambda y: y * next(runs), x)
    assert push(x).equal(0 * x) and push(x).equal(0 * x)
    with torch.no_grad():
        leaf = x.clone().requires_grad_()
        found = reference.grad(lambda y: (y * leaf).sum())(x)
    assert found.equal(leaf) and not found.requires_grad


def test_the_reference_keeps_none_in_containers() -> None:
    tree: dict[str, Any] = {"a": torch.randn(3), "b": None}
    found = reference.vmap(lambda t: {"a": t["a"].sin(), "b": t["b"]})(tree)
    assert found["b"] is None and found["a"].equal(tree["a"].sin())


def test_writes_into_arguments_and_shared_memory_are_compared() -> None:
    params = (
        Parameter("x0", (Leaf((2, 3), layout=SHARED),), written=True),
        Parameter("x1", (Leaf((3,), layout=SHARED),)),
    )
    body = (Statement("x0.mul_(2)", "test"), Statement("v1 = x0.sin() * x1", "test"))
    tower = (Transform("specialize"),)
    program = Program("test", (), params, body, "v1", tower, (0, 1, 0))
    assert running.run(program) == running.Verdict(running.OK)
    lost = program.with_(
        body=(Statement("x0.mul_(2 if tsfunc.__name__ == 'tsfunc' else 3)", "test"), *body[1:]),
        result="x1 * 1",
    )
    assert running.run(lost).kind == running.WRONG


@pytest.mark.parametrize("kind", ["single", "complex"])
def test_dtypes_of_parameters(kind: str) -> None:
    params = (Parameter("x0", (Leaf((2, 3)),)), Parameter("x1", (Leaf((3,), kind),)))
    body = (Statement("v1 = x0 * x1", "test"), Statement("v2 = v1.abs().sum(-1)", "test"))
    vmap = Transform("vmap", (-1, None), (4,))
    for result, tower in (("v1", (vmap,)), ("v2", (Transform("grad", argnums=(0,)), vmap))):
        program = Program("test", (), params, body, result, tower, (0, 1, 0))
        assert running.run(program) == running.Verdict(running.OK)


def test_a_lost_derivative_of_a_kept_pullback_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Block("inner1", ("p1",), (), "p1.sin()")
    outside = (Statement("r1 = tsfunc.vjp(inner1, c0)", "test", (inner,)),)
    program = program_of(
        "v1 = tsfunc.specialize(r1[1])(x0)[0]",
        result="v1",
        tower=[Transform("grad", argnums=(0,))],
    ).with_(captured=(("c0", Leaf((2, 3))),), outside=outside)
    assert running.run(program) == running.Verdict(running.OK)
    specialize = tsfunc.specialize
    monkeypatch.setattr(
        tsfunc, "specialize", lambda f: lambda ct: [g.detach() for g in specialize(f)(ct)]
    )
    verdict = running.run(program)
    assert (verdict.kind, verdict.cause) == (running.WRONG, "numbers")
    assert "tsfunc.vjp" in source(minimizing.minimized(program, verdict, running.run))


def test_buffers_of_modules_are_written() -> None:
    tower = [Transform("functional_call", form="buffers"), mapped(-1), Transform("specialize")]
    program = program_of("v1 = x0.sin()", result="v1", tower=tower, calls=(0, 1, 0))
    assert running.run(program) == running.Verdict(running.OK)


def test_programs_of_a_seed_are_the_same() -> None:
    assert [source(drawn(f"0/{i}")) for i in range(5)] == [
        source(drawn(f"0/{i}")) for i in range(5)
    ]


@pytest.mark.parametrize("when", ["drawn", "run"])
def test_a_program_with_too_much_work_is_dropped(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Plain autograd takes minutes for some towers of derivatives."""
    monkeypatch.setattr(work, "MOST", 100)
    tower = [Transform("jacrev", argnums=(0,)), Transform("jacfwd", argnums=(0,))]
    program = program_of("v1 = x0.sin() * x0.cos()", result="v1", shape=(4, 5), tower=tower)
    monkeypatch.setattr(fuzz_programs, "draw_function", lambda *_: program)
    monkeypatch.setattr(fuzz_programs, "draw_tower", lambda rng, p, _: (
        surrounded(rng, p) if when == "drawn" else p
    ))  # fmt: skip
    monkeypatch.setattr("tools.fuzz.towers.draw_circumstances", lambda *_: (GRADIENTS,))
    with Worker() as worker:
        monkeypatch.setattr(worker, "run", lambda program, _: running.run(program))
        _, verdict = fuzz_programs.run_drawn("0/1", False, worker)
    assert (verdict.kind, verdict.cause) == (
        running.SKIPPED,
        "more operators than the reference may run",
    )


def test_a_crash_and_a_hang_are_verdicts() -> None:
    crash = program_of(
        'v1 = x0 if tsfunc.__name__ != "tsfunc" else __import__("os").abort()', result="v1"
    )
    hang = program_of(
        'v1 = x0 if tsfunc.__name__ != "tsfunc" else __import__("time").sleep(600)', result="v1"
    )
    good = program_of("v1 = x0.sin()", result="v1")
    with Worker() as worker:
        assert worker.run(crash).kind == running.CRASHES
        assert worker.run(good).kind == running.OK
        worker.limit = 3
        verdict = worker.run(hang)
        assert verdict.kind == running.HANGS
        assert "most recent call first" in verdict.detail and "in f0" in verdict.detail


class NoWorker(Worker):
    def run(self, one: Any, mode: str = "towers") -> running.Verdict:
        raise AssertionError("a program that hangs ran again")


def test_what_hangs_is_shown_without_further_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Smaller programs would each take the time limit. The files that are kept can be imported."""
    verdict = running.Verdict(running.HANGS, "time", "no end after 180 s of CPU time")
    program = program_of("v1 = x0.sin()", result="v1", tower=[mapped(0)])
    session = Session("test", ("global number",), ("out = out * g",), ("call",))
    for one in (program, session):
        show("1/0", one, verdict, NoWorker(), tmp_path)
        runpy.run_path(str(tmp_path / "test_1_0.py"))
    shown = capsys.readouterr().out
    assert shown.count("no end after 180 s") == 2 and "x0.sin()" in shown and "out * g" in shown


def test_a_session_finds_a_value_that_a_program_takes_for_constant() -> None:
    """The session is right with ``specialize``, and wrong if closures are constants."""
    session = Session(
        "test", ("global number", "list of numbers"), ("out = out * g", "out = out + len(ns)"),
        ("call", "ns.append(4.0)", "call", "g = 3.0", "call"),
    )  # fmt: skip
    assert run_session(session).kind == running.OK
    frozen = replace(session, transform='tsfunc.specialize({f}, closure="freeze")')

    def run(one: Session) -> running.Verdict:
        return run_session(replace(one, transform=frozen.transform))

    verdict = run(session)
    assert verdict.kind == running.WRONG
    small = minimized_session(session, verdict, run)
    assert small.events.count("call") == 2 and len(small.events) == 3 and len(small.readings) == 1


@pytest.mark.parametrize("mode", ["threads", "interrupts"])
def test_modes_run_right_programs(mode: str) -> None:
    good = program_of("v1 = x0.sin() * x0.sum()", result="v1", tower=[mapped(-1)], calls=(0, 1))
    one = (good, good) if mode == "threads" else good
    assert MODES[mode](one).kind == running.OK


def test_an_interrupted_program_that_leaves_the_thread_changed_is_found() -> None:
    """An interrupted function turns grad mode off and does not restore it."""
    line = (
        "v1 = x0 if tsfunc.__name__ != 'tsfunc' else [torch.set_grad_enabled(False), "
        "__import__('time').sleep(0.3), torch.set_grad_enabled(True), x0][3]"
    )
    try:
        verdict = MODES["interrupts"](program_of(line, result="v1"))
    finally:
        torch.set_grad_enabled(True)
    assert verdict.kind == running.BROKEN


def test_a_refusal_that_the_docs_state_is_no_failure() -> None:
    program = program_of("v1 = x0.nonzero().double()", result="v1", tower=[mapped(0)])
    assert running.run(program).kind in (running.REFUSED, running.SKIPPED)


def test_results_that_depend_on_rounding_are_not_compared() -> None:
    """The sign of a difference that is zero apart from rounding."""
    program = program_of(
        "v1 = (x0.sum() * 3 - (x0 * 3).sum()) * 1e16", result="v1 + x0", tower=[mapped(0)]
    )
    assert running.run(program).kind in (running.OK, running.SKIPPED)
