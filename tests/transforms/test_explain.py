"""explain: the rule that served each operator, and the line of its call."""

from __future__ import annotations

import inspect
import io
import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.func
from rich.console import Console
from torch import Tensor, nn

from tsfunc import CallReport, dispatch, explain, grad, hessian, jacfwd, jvp, specialize, vmap
from tsfunc.dispatch.state import tls
from tsfunc.errors import MissingRuleError, SlowFallbackWarning
from tsfunc.transforms.explain import OperatorUse

X = torch.arange(12.0).view(3, 4).sin()
W = torch.arange(4.0).cos()


def line_of(func: Callable[..., Any], text: str) -> int:
    """Return the line of a function that contains the text."""
    lines, first = inspect.getsourcelines(func)
    (found,) = [first + i for i, line in enumerate(lines) if text in line]
    return found


def only(report: CallReport, operator: str, **attributes: Any) -> OperatorUse:
    """Return the only row of an operator with these attributes."""
    rows = [
        use
        for use in report.uses
        if use.operator == operator
        and all(getattr(use, name) == value for name, value in attributes.items())
    ]
    assert len(rows) == 1, f"{rows}\n{report}"
    return rows[0]


@torch.library.custom_op("tsfunc_tests::fourthed", mutates_args=())
def fourthed(x: Tensor) -> Tensor:
    return x / 4


def f(x: Tensor) -> Any:
    y = torch.sin(x) @ W
    for _ in range(3):
        y = y + 1
    z = nn.functional.cross_entropy(x, W)
    return fourthed(x) + y + z


def test_a_plain_case() -> None:
    report = explain(vmap(lambda x: x.sin()), X)
    (use,) = report.uses
    assert use.operator == "aten::sin"
    assert use.category == "TensorIterator"
    assert (use.how, use.rule, use.times) == ("rule", "pointwise", 1)
    assert (use.transform, use.depth) == ("vmap(<lambda>)", 1)
    assert use.file == __file__
    assert use.function == "<lambda>"
    file, _, line = use.source.rpartition(":")
    assert file.endswith("tensor_iterator.py")
    assert "rows(" in "".join(Path(file).read_text().splitlines()[int(line) - 2 : int(line)])


def test_lines_times_and_ways() -> None:
    report = explain(vmap(f), X)
    assert report.function == "f"
    assert {use.file for use in report.uses} == {__file__}
    assert only(report, "aten::matmul").line == line_of(f, "@ W")
    assert only(report, "aten::add.Tensor", line=line_of(f, "y + 1")).times == 3
    composite = only(report, "aten::cross_entropy_loss")
    assert composite.how == "decomposition"
    parts = [use for use in report.uses if use.within == "aten::cross_entropy_loss"]
    assert "aten::_log_softmax" in [use.operator for use in parts]
    assert {use.line for use in parts} == {composite.line} == {line_of(f, "cross_entropy")}
    assert [use.line for use in report.uses] == sorted(use.line for use in report.uses)
    assert report.uses.index(composite) < report.uses.index(parts[0])


def test_loops_are_flagged_and_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = explain(vmap(f), X)
    (loop,) = report.loops
    assert loop.operator == "tsfunc_tests::fourthed"
    assert loop.category == "Other"  # it has no fake kernel for a category
    assert loop.line == line_of(f, "fourthed")
    assert loop.rule == "one call for each of 3 examples"
    assert "! tsfunc_tests::fourthed" in str(report)
    assert "1 of" in report.summary
    # The warning is given at the first call without explain.
    with pytest.warns(SlowFallbackWarning, match="fourthed"):
        vmap(f)(X)


def test_a_decomposition_in_python_has_its_source() -> None:
    report = explain(vmap(lambda x: torch.ops.aten.elu_backward(x, 1, 1, 1, False, x)), X)
    for use in report.uses:
        if use.how == "decomposition":
            assert "decompositions" in use.source


def test_unbatched_calls_run_once() -> None:
    def g(x: Tensor, w: Tensor) -> Tensor:
        return x + w.cos().sin()

    inside = lambda x: vmap(lambda y: g(y, x))(X)  # noqa: E731
    report = explain(vmap(inside), X)
    assert only(report, "aten::sin", depth=1).how == "rule"
    assert only(report, "aten::add.Tensor", depth=2).how == "rule"
    report = explain(vmap(lambda x: torch.zeros_like(x).unsqueeze(0) + x), X)
    assert {use.how for use in report.uses} <= {"rule", "once"}


def test_levels_of_nested_vmaps() -> None:
    report = explain(vmap(lambda a: vmap(lambda b: a * b)(X)), X)
    inner, outer = report.uses
    assert (inner.depth, outer.depth) == (2, 1)
    assert inner.within == outer.within == ""
    assert inner.seconds > outer.seconds


def test_a_backward_pass_stands_at_the_lines_of_the_forward_pass() -> None:
    def loss(x: Tensor) -> Tensor:
        y = torch.sin(x)
        z = y * x
        return z.sum()

    report = explain(vmap(grad(loss)), X)
    assert only(report, "aten::cos").backward
    assert only(report, "aten::cos").line == line_of(loss, "torch.sin")
    assert only(report, "aten::mul.Tensor", backward=False).line == line_of(loss, "y * x")
    assert only(report, "aten::expand").line == line_of(loss, "z.sum()")
    assert "backward" in only(report, "aten::cos").location


def test_derivatives_of_vmap() -> None:
    def loss(x: Tensor) -> Any:
        return vmap(lambda row: torch.sin(row).sum())(x).prod()

    report = explain(grad(loss), X)
    assert only(report, "aten::sin").transform == "vmap(<lambda>)"
    assert only(report, "torch.Tensor.prod").how == "torch"
    for transform in (hessian(torch.prod), jacfwd(torch.cumsum)):
        args = (W, 0) if transform.__name__ == "cumsum" else (W,)
        assert explain(transform, *args).uses
    assert explain(lambda: jvp(lambda x: vmap(torch.sin)(x), (X,), (X,))).uses


def test_calls_that_meet_no_transform() -> None:
    def g(x: Tensor) -> Tensor:
        scale = W.exp().sum()
        assert scale.shape == () and x.dim() == 1
        return x * scale

    report = explain(vmap(g), X)
    names = [(use.operator, use.how) for use in report.uses]
    assert names == [
        ("torch.Tensor.exp", "torch"),
        ("torch.Tensor.sum", "torch"),
        ("aten::mul.Tensor", "rule"),
    ]
    assert only(report, "torch.Tensor.exp").transform == ""


def test_a_warning_about_a_random_function_is_issued_once() -> None:
    report = explain(vmap(lambda x: x + torch.randn(4), randomness="different"), X)
    assert [use.operator for use in report.uses] == ["aten::randn", "aten::add.Tensor"]


def test_specialized_functions() -> None:
    def g(x: Tensor) -> Tensor:
        return torch.sin(x).sum()

    fast = specialize(vmap(g))
    first = explain(fast, X)
    assert only(first, "aten::sin", depth=2).how == "rule"
    assert only(first, "aten::sin", depth=1).how == "traced"
    again = explain(fast, X)
    assert {use.how for use in again.uses} == {"torch"}
    assert {use.file for use in again.uses} == {__file__}


def test_modules_keywords_and_names_of_their_own() -> None:
    model = nn.Linear(4, 2)
    report = explain(vmap(model), X)
    assert only(report, "aten::linear").function == "test_modules_keywords_and_names_of_their_own"
    report = explain(lambda *, func: vmap(lambda x: x.cos())(func), func=X)
    assert only(report, "aten::cos").how == "rule"


def test_rules_of_an_autograd_function() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2 * g

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
            return Twice.apply(x), in_dims[0]  # type: ignore[no-untyped-call]

    report = explain(vmap(Twice.apply), X)
    use = only(report, f"{Twice.__qualname__}.apply")
    assert use.rule.endswith("Twice.vmap")
    assert use.source.startswith(__file__)


def test_a_kernel_of_ones_own() -> None:
    @torch.library.custom_op("tsfunc_tests::kept", mutates_args=())
    def kept(x: Tensor) -> Tensor:
        return x.clone()

    @dispatch.register("tsfunc_tests::kept", dispatch.DispatchKey.Batch)
    def kept_batch(x: Any) -> Any:
        return x.aliased_here()

    report = explain(vmap(kept), X)
    use = only(report, "tsfunc_tests::kept")
    assert use.how == "kernel"
    assert use.rule.endswith("kept_batch")
    assert use.source.startswith(__file__)


def test_functions_of_torch_func_inside() -> None:
    report = explain(vmap(lambda x: torch.func.grad(lambda y: y.sin().sum())(x)), X)
    assert "aten::cos" in [use.operator for use in report.uses]


def test_a_thread_that_the_function_starts() -> None:
    found = []

    def g(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: found.append(torch.cumsum(x, 0)))
        thread.start()
        thread.join()
        return found.pop()

    report = explain(vmap(g), X)
    assert only(report, "aten::cumsum").times == 1


def test_the_result_is_that_of_the_call() -> None:
    out = []
    explain(vmap(lambda x: out.append(vmap(torch.sin)(x)) or x), X)  # type: ignore[func-returns-value]
    seen: list[Tensor] = []
    explain(lambda x: seen.append(vmap(grad(lambda y: y.sin().sum()))(x)), X)
    torch.testing.assert_close(seen[0], X.cos())


def test_an_error_of_the_call_is_raised_and_nothing_is_left_behind() -> None:
    with pytest.raises(MissingRuleError, match="fourthed"):
        explain(vmap(f, strict=True), X)
    assert tls.state.plain
    assert tls.state.recorder is None
    assert torch.equal(vmap(torch.sin)(X), X.sin())


def test_reports_are_data() -> None:
    report = explain(vmap(f), X)
    found = json.loads(json.dumps(report.to_dict()))
    assert found["function"] == "f"
    assert found["loops"] == 1
    assert found["calls"] == sum(row["times"] for row in found["operators"])
    assert found["operators"][0]["operator"] == report.uses[0].operator
    assert set(found["operators"][0]) == set(inspect.signature(OperatorUse).parameters)


def test_reports_in_a_terminal_and_in_a_notebook() -> None:
    report = explain(vmap(lambda x: fourthed(x).sin()), X)
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(report)
    for text in (console.export_text(), str(report), repr(report)):
        assert "TensorIterator" in text
        assert "test_explain.py" in text
    html = report._repr_html_()
    assert html.startswith("<table>")
    assert "&lt;lambda&gt;" in html
    assert "<lambda>" not in html
    assert html.count("<tr") == 1 + len(report.uses)


def test_it_differs_from_the_dispatchers(capsys: pytest.CaptureFixture[str]) -> None:
    assert not isinstance(dispatch.explain(torch.sin, X), CallReport)
    assert "CPU" in capsys.readouterr().out
