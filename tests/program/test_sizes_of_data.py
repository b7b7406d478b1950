"""Sizes and numbers that depend on data, in programs, in files, and verified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import rnn

import tsfunc
from tsfunc import MetaTensorType as Meta
from tsfunc.errors import (
    ConstraintViolation,
    DataDependentError,
    DescriptorViolation,
    ExportError,
    FailedCheckError,
)
from tsfunc.releases import release


def head(x: Tensor, n: Tensor) -> Tensor:
    k: Any = n.item()
    torch._check(k >= 2)
    return x[:k]


def rows_of(x: Tensor) -> Tensor:
    """The number of rows depends on data, until a sum with another tensor determines it."""
    found = x.nonzero()
    return torch.ones(found.shape[0], 3) + torch.arange(x.shape[0]).view(-1, 1)


def asked_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    mask = x > 0
    return x[mask].sort()[0], mask.nonzero()[:, 0]


def parts(x: Tensor, n: Tensor) -> Tensor:
    """The rule of an operator compares a number with 0, and is told that they differ."""
    return x.view(n.item(), -1)  # type: ignore[arg-type]


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], tuple[Tensor, ...]]] = {
    "item": (head, (torch.arange(5.0), torch.tensor(3)), (torch.arange(5.0), torch.tensor(4))),
    "denied": (parts, (torch.arange(6.0), torch.tensor(3)), (torch.arange(6.0), torch.tensor(1))),
    "replaced": (rows_of, (torch.ones(4),), (torch.full((4,), 2.0),)),
    "seen before": (asked_twice, (torch.tensor([1.0, -1, 2]),), (torch.tensor([-1.0, -1, 2]),)),
}


@pytest.mark.parametrize(("f", "first", "second"), CASES.values(), ids=CASES)
def test_programs_and_files(
    f: Callable[..., Any], first: tuple[Tensor, ...], second: tuple[Tensor, ...], tmp_path: Path
) -> None:
    program = tsfunc.specialize(f)
    program(*first)
    program.program.verify()
    program.save(tmp_path / "f.tsf")
    for g in (program, tsfunc.load(tmp_path / "f.tsf")):
        for args in (first, second):
            torch.testing.assert_close(g(*args), f(*args))


def pack(x: Tensor, lengths: Tensor, **options: Any) -> Any:
    return rnn.pack_padded_sequence(x, lengths, enforce_sorted=False, **options)


LSTM = torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True)


def of_a_layer(x: Tensor, lengths: Tensor) -> Any:
    out, states = LSTM(pack(x, lengths))
    return rnn.pad_packed_sequence(out), states


def batches_first(x: Tensor, lengths: Tensor) -> Any:
    packed = pack(x.transpose(0, 1), lengths, batch_first=True)
    return rnn.pad_packed_sequence(packed, batch_first=True, padding_value=-1.0)


def to_their_places(x: Tensor, lengths: Tensor) -> Any:
    packed = pack(x, lengths)
    packed = packed._replace(data=packed.data.sin())
    return rnn.pad_packed_sequence(packed, total_length=x.shape[0])[0] + x


@pytest.mark.parametrize("f", [of_a_layer, batches_first, to_their_places])
def test_packed_sequences(f: Callable[..., Any], tmp_path: Path) -> None:
    """A trace knows neither the number of rows nor the number of steps."""
    descriptors = {"x": Meta(["t", "b", 3]), "lengths": Meta(["b"], dtype=torch.int64)}
    program = tsfunc.specialize(f, descriptors)
    calls = [
        (torch.randn(t, len(lengths), 3), torch.tensor(lengths))
        for t, lengths in ((6, (2, 6)), (9, (9, 1, 4)), (3, (3, 3, 3, 1)))
    ]
    for args in calls:
        torch.testing.assert_close(program(*args), f(*args))
    assert program.cache_info().programs == 1
    program.save(tmp_path / "f.tsf")
    torch.testing.assert_close(tsfunc.load(tmp_path / "f.tsf")(*calls[1]), f(*calls[1]))


@pytest.mark.parametrize("name", ["GRU", "RNN"])
def test_a_layer_that_reads_the_number_of_packed_sequences(name: str, tmp_path: Path) -> None:
    """torch's own code has it as a Python number, so a program fixes it."""
    layer = getattr(torch.nn, name)(3, 4)

    def f(x: Tensor, lengths: Tensor) -> Any:
        return layer(pack(x, lengths))[1]

    program = tsfunc.specialize(f, {"x": Meta(["t", 2, 3])})
    for lengths in ((5, 2), (1, 5), (3, 3)):
        args = torch.randn(max(lengths), 2, 3), torch.tensor(lengths)
        torch.testing.assert_close(program(*args), f(*args))
    assert program.cache_info().programs == 1
    program.save(tmp_path / "f.tsf")
    torch.testing.assert_close(tsfunc.load(tmp_path / "f.tsf")(*args), f(*args))
    descriptors = {"x": Meta(["t", "b", 3]), "lengths": Meta(["b"], dtype=torch.int64)}
    with pytest.raises(ConstraintViolation, match=rf"b == 2  \(at {__file__}.*layer\(pack"):
        tsfunc.specialize(f, descriptors)(*args)


def test_strides_of_data_under_vmap() -> None:
    """The sizes of a tensor may be numbers while its strides depend on data."""

    def f(x: Tensor, lengths: Tensor) -> Any:
        rows = pack(x[0], lengths).data
        return tsfunc.vmap(lambda v: (rows * v.sum())[:1])(x)

    args = torch.randn(2, 4, 2, 3), torch.tensor([4, 2])
    torch.testing.assert_close(tsfunc.specialize(f)(*args), f(*args))


def test_a_known_number_is_one_where_derivatives_are_recorded() -> None:
    """C++ code that records derivatives reads elements by another operator."""

    def f(x: Tensor) -> Tensor:
        zeros = torch.zeros(torch.tensor(x.shape[0]) // 2, 3)  # type: ignore[call-overload]
        return (x.unflatten(0, (2, zeros.shape[0])) + zeros).sin().sum()

    program = tsfunc.specialize(tsfunc.grad(f), {"x": Meta(["2*n", 3])})
    for n in (2, 6):
        x = torch.randn(n, 3)
        torch.testing.assert_close(program(x), x.cos())


def test_a_packed_sequence_is_made_in_the_function() -> None:
    """Its constructor reads its tensors, so a call's specification can't hold one."""
    program = tsfunc.specialize(lambda packed: LSTM(packed)[1])
    with pytest.raises(DescriptorViolation, match=r"got a PackedSequence, .* in the function"):
        program(pack(torch.randn(5, 2, 3), torch.tensor([5, 2])))


def test_rows_of_a_packed_sequence_are_none_of_the_steps() -> None:
    def f(x: Tensor, lengths: Tensor) -> Any:
        rows = pack(x, lengths).data
        return rows + torch.ones(rows.shape[0], 1), rows.shape[0]

    program = tsfunc.specialize(f, {"x": Meta(["t", "b", 3]), "lengths": Meta(["b"])})
    for lengths in ((2, 6), (4, 5)):
        args = torch.randn(6, 2, 3), torch.tensor(lengths)
        torch.testing.assert_close(program(*args), f(*args))


def test_a_file_checks_the_facts_of_its_program(tmp_path: Path) -> None:
    program = tsfunc.specialize(head)
    program(torch.arange(5.0), torch.tensor(3))
    program.save(tmp_path / "f.tsf")
    loaded = tsfunc.load(tmp_path / "f.tsf")
    for g in (program, loaded):
        with pytest.raises(FailedCheckError, match=r"item_default >= 2 does not hold"):
            g(torch.arange(5.0), torch.tensor(1))
    loaded.save(tmp_path / "again.tsf")
    assert tsfunc.load(tmp_path / "again.tsf")(torch.arange(5.0), torch.tensor(2)).shape == (2,)


def test_numbers_among_the_results_of_an_operator() -> None:
    @torch.library.custom_op("tsfunc_tests::bounds", mutates_args=())
    def bounds(x: Tensor) -> tuple[int, int]:
        return int(x.min()), int(x.max())

    @bounds.register_fake
    def _(x: Tensor) -> Any:
        size = torch.library.get_ctx().new_dynamic_size
        return size(), size()

    def between(x: Tensor, y: Tensor) -> Tensor:
        low, high = torch.ops.tsfunc_tests.bounds(x)
        return y[low:high]

    program = tsfunc.specialize(between)
    y = torch.arange(9.0)
    for x in (torch.tensor([2, 5]), torch.tensor([0, 8])):
        torch.testing.assert_close(program(x, y), y[x[0] : x[1]])
    program.program.verify()
    assert program.cache_info().programs == 1


def test_operators_called_for_their_errors_stay() -> None:
    def positive(x: Tensor) -> Tensor:
        torch._assert_async((x > 0).all(), "expected positive numbers")
        return x.log()

    program = tsfunc.specialize(positive)
    program(torch.ones(3))
    with pytest.raises(RuntimeError, match="expected positive numbers"):
        program(-torch.ones(3))


def test_a_change_of_the_grad_mode_is_undone() -> None:
    def quiet(x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return x * 2

    program = tsfunc.specialize(quiet)
    for _ in range(2):
        program(torch.ones(2))
        assert torch.is_grad_enabled()


def test_saved_dims_that_are_solved_for(tmp_path: Path) -> None:
    program = tsfunc.specialize(lambda x: x * 2, {"x": tsfunc.MetaTensorType(["2*n+1"])})
    program(torch.ones(5))
    program.save(tmp_path / "f.tsf")
    loaded = tsfunc.load(tmp_path / "f.tsf")
    assert [loaded(torch.ones(n)).sum().item() for n in (9, 5, 1)] == [18, 10, 2]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_scripted_modules() -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * 2 + y

    program = tsfunc.specialize(torch.jit.script(Scaled()))
    for x in (torch.ones(2), torch.zeros(2)):
        torch.testing.assert_close(program(x, x), 3 * x)


def test_a_test_of_a_number_whose_other_side_raises_is_checked() -> None:
    def zeros(n: torch.Tensor) -> torch.Tensor:
        k = n.item()
        if k < 2:
            raise ValueError("too few")
        if not k <= 8:
            raise ValueError("too many")
        return torch.zeros(k)  # type: ignore[arg-type]

    f = tsfunc.specialize(zeros)
    for k in (3, 8, 2):
        assert f(torch.tensor(k)).shape == (k,)
    for k in (1, 9):
        with pytest.raises(FailedCheckError, match=r"item_default .* does not hold"):
            f(torch.tensor(k))
    with pytest.raises(DataDependentError, match=r"n\.item\(\) > 3 depends on data"):
        tsfunc.specialize(lambda n: n + 1 if n.item() > 3 else n)(torch.tensor(3))


CHOICES: list[Callable[[Tensor], Any]] = [
    lambda x: x * 2 if x[0].item() > 1 else x,
    lambda x: [x * 2 if x[0].item() > 1 else x for _ in range(2)],
    lambda x: {key: (x if x[0].item() > 1 else x * 2) for key in "ab"},
    lambda x: [y for y in (x, x * 2) if x[0].item() > 1],
]


@pytest.mark.parametrize("f", CHOICES, ids=["lambda", "list", "dict", "filter"])
def test_an_error_about_a_choice_uses_the_users_names(f: Callable[[Tensor], Any]) -> None:
    with pytest.raises(DataDependentError) as caught:
        tsfunc.specialize(f)(torch.full((2,), 2.0))
    said = str(caught.value)
    assert "x[0].item() > 1 depends on data" in said
    assert "torch._check(x[0].item() > 1)" in said and "item_default" not in said


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("least", [2, 4])
def test_a_failed_check_has_the_message_of_the_function(least: int, fresh: bool) -> None:
    def checked(x: Tensor) -> Tensor:
        k = x.nonzero().shape[0]
        torch._check(k >= least, lambda: f"expected {least} nonzeros, got {k}")
        return x * k

    def raised(x: Tensor) -> Tensor:
        k = x.nonzero().shape[0]
        if k < least:
            raise ValueError(f"expected {least} nonzeros, got {k}")
        return x * k

    for f in (checked, raised):
        g = tsfunc.specialize(f)
        if not fresh:
            torch.testing.assert_close(g(torch.ones(5)), torch.full((5,), 5.0))
        with pytest.raises(FailedCheckError) as caught:
            g(torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]))
        text = str(caught.value)
        assert f"shape[0] >= {least} does not hold" in text
        assert f"expected {least} nonzeros, got 1" in text
        with pytest.raises((RuntimeError, ValueError), match=f"expected {least} nonzeros, got 1"):
            f(torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]))


def _chosen(chosen: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mask of (expert, choice, token), and a row for each expert that a token chose."""
    mask = torch.nn.functional.one_hot(chosen, len(experts)).permute(2, 1, 0)
    return mask, (mask.sum((-1, -2)) > 0).nonzero()


def _step(out: Tensor, row: Tensor, mask: Tensor, *operands: Tensor) -> Tensor:
    x, weights, experts = operands
    choice, token = torch.where(mask[row[0]])
    y = (x[token] @ experts[row[0]]).tanh() * weights[token, choice, None]
    return out.index_add(0, token, y)


def mixture_by_loop(x: Tensor, chosen: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    mask, rows = _chosen(chosen, experts)
    out = torch.zeros_like(x)
    for row in rows:
        out = _step(out, row, mask, x, weights, experts)
    return out


def mixture_by_scan(x: Tensor, chosen: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    mask, rows = _chosen(chosen, experts)

    def step(out: Tensor, row: Tensor) -> tuple[Tensor, None]:
        return _step(out, row, mask, x, weights, experts), None

    return tsfunc.scan(step, torch.zeros_like(x), rows)[0]


@pytest.mark.parametrize("backend", ["python", "aot_eager"])
@pytest.mark.parametrize("differentiated", [False, True])
def test_a_mixture_of_experts_of_which_data_choose(backend: str, differentiated: bool) -> None:
    """A program has one scan over the chosen experts, for any number of them."""

    def derivative(f: Callable[..., Tensor]) -> Callable[..., Any]:
        if not differentiated:
            return f
        return tsfunc.grad(lambda *args: f(*args).sin().sum(), argnums=(0, 2, 3))

    program = tsfunc.specialize(derivative(mixture_by_scan), backend=backend)
    x, experts = torch.randn(5, 4), torch.randn(6, 4, 4)
    for most in (6, 1, 3):
        chosen = torch.stack([torch.randperm(6)[:2] % most for _ in x])
        args = (x, chosen, torch.rand(5, 2), experts)
        if backend != "python" and release(torch.__version__) >= (2, 14):
            # torch 2.14's scan tests if it has a step.
            with pytest.raises(ExportError, match="a size or number that data determine"):
                program(*args)
            return
        torch.testing.assert_close(program(*args), derivative(mixture_by_loop)(*args))
    assert len(program.programs) == 1


def test_a_python_loop_over_rows_of_data_is_refused_with_its_scan() -> None:
    args = torch.randn(5, 4), torch.zeros(5, 2, dtype=torch.long), torch.rand(5, 2)
    with pytest.raises(
        DataDependentError, match=r"(?s)loop over the rows .*for row in rows:\nWrite .*tsfunc\.scan"
    ):
        tsfunc.specialize(mixture_by_loop)(*args, torch.randn(3, 4, 4))


def int_of(count: Tensor) -> Any:
    return count.item()


def test_a_view_whose_size_of_data_equals_one_of_named_dims() -> None:
    def f(x: Tensor, count: Tensor) -> Tensor:
        return x.view(x.shape[0], int_of(count), 4).sum(-1)

    dims: Any = ["n", tsfunc.Dim("m", min=4, multiple_of=4)]
    program = tsfunc.specialize(f, {"x": Meta(dims), "count": Meta([])})
    for n, m in ((2, 8), (3, 12)):
        x, count = torch.randn(n, m), torch.tensor(m // 4)
        torch.testing.assert_close(program(x, count), f(x, count))
    assert len(program.programs) == 1
