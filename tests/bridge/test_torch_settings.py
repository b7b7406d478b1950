"""``torch.compiler.is_compiling()`` is True in traces: on these threads, not on others."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tsfunc
from tsfunc import MetaTensorType as Meta

X = torch.arange(6.0).view(2, 3)


def asked_in(transform: Callable[[Callable[[Tensor], Tensor]], object]) -> list[bool]:
    """Return the value that a function reads in each of its runs in one call of a transform."""
    answers = []

    def asks(x: Tensor) -> Tensor:
        answers.append(bool(torch.compiler.is_compiling()))
        return x.sin()

    transform(asks)
    assert torch.compiler.is_compiling() is False
    return answers


TRACES: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "specialize": lambda f: tsfunc.specialize(f)(X),
    "an open size": lambda f: tsfunc.specialize(f, {"x": Meta(["n", 3])})(X),
    "specialize(vmap)": lambda f: tsfunc.specialize(tsfunc.vmap(f))(X),
    "specialize(grad)": lambda f: tsfunc.specialize(tsfunc.grad(lambda x: f(x).sum()))(X),
    "vmap(specialize)": lambda f: tsfunc.vmap(tsfunc.specialize(f))(X),
    "eval_shape": lambda f: tsfunc.eval_shape(f, X),
    "make_graph": lambda f: tsfunc.make_graph(f)(X),
    "a body of cond": lambda f: tsfunc.specialize(
        lambda x: tsfunc.cond(x.sum() > 0, f, torch.cos, x)
    )(X),
}
EAGER: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "vmap": lambda f: tsfunc.vmap(f)(X),
    "grad": lambda f: tsfunc.grad(lambda x: f(x).sum())(X),
    "jvp": lambda f: tsfunc.jvp(f, (X,), (X,)),
}


@pytest.mark.parametrize("name", TRACES)
def test_true_in_traces(name: str) -> None:
    answers = asked_in(TRACES[name])
    assert answers and all(answers)


@pytest.mark.parametrize("name", EAGER)
def test_false_in_eager_transforms(name: str) -> None:
    answers = asked_in(EAGER[name])
    assert answers and not any(answers)


def test_a_function_that_looks_at_data_unless_it_is_traced() -> None:
    def masked(x: Tensor, mask: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and mask.all():
            return x
        return torch.where(mask, x, 0.0)

    program = tsfunc.specialize(masked)
    for mask in (X > 2, X >= 0):
        assert torch.equal(program(X, mask), masked(X, mask))
    assert program.cache_info().programs == 1


def test_false_on_other_threads() -> None:
    traced, asked = threading.Event(), threading.Event()
    answers = []

    def waits(x: Tensor) -> Tensor:
        traced.set()
        assert asked.wait(30)
        assert torch.compiler.is_compiling()
        return x.sin()

    def other() -> None:
        assert traced.wait(30)
        answers.append(bool(torch.compiler.is_compiling()))
        asked.set()

    thread = threading.Thread(target=other)
    thread.start()
    tsfunc.specialize(waits)(X)
    thread.join()
    assert answers == [False]
    assert torch.compiler.is_compiling() is False


def test_false_after_a_trace_that_raises() -> None:
    def raises(x: Tensor) -> Tensor:
        raise KeyError("key")

    with pytest.raises(KeyError):
        tsfunc.specialize(raises)(X)
    assert torch.compiler.is_compiling() is False


def test_it_combines_with_other_answers() -> None:
    """Libraries write ``tracing = is_compiling(); tracing |= is_proxy(x)``."""

    def asks(x: Tensor) -> Tensor:
        for other in (False, True):
            flag = torch.compiler.is_compiling()
            assert (flag | other) is True and (other | flag) is True
            assert (flag & other) is other and (other & flag) is other
            assert (flag ^ other) is (not other) and flag == True  # noqa: E712
            assert repr(flag) == "True" and int(flag) == 1 and hash(flag) == hash(True)
        return x

    tsfunc.specialize(asks)(X)
