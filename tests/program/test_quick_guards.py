"""The first checks of a call are True only for equal metadata and settings."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tsfunc import specialize, vmap
from tsfunc.bridge.trace.tensor_guards import quick_check
from tsfunc.bridge.tracers.torch_settings import settings, settings_condition
from tsfunc.types.scope import Scope

SHAPES = [(), (1,), (4,), (2, 3), (3, 2), (1, 3), (0, 2), (2, 1, 2)]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.complex64, torch.bool]


class Named(Tensor):
    """A class of a user."""


def made(rng: random.Random) -> Tensor:
    """Return a tensor of random metadata."""
    shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
    inference = rng.random() < 0.1
    with torch.inference_mode() if inference else contextlib.nullcontext():
        x = torch.zeros(shape, dtype=dtype, device="meta" if rng.random() < 0.1 else "cpu")
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda x: x, lambda x: x, lambda x: x.mT if x.dim() > 1 else x,
        lambda x: x.expand(2, *x.shape), lambda x: x[..., ::2] if x.dim() else x,
        lambda x: x.conj(), lambda x: x.conj().imag if x.is_complex() else x,
        lambda x: x if x.is_meta else x.to_sparse(), lambda x: x.as_subclass(Named),
    ]  # fmt: skip
    with torch.no_grad():
        x = rng.choice(changes)(x)
    floating = x.is_floating_point() or x.is_complex()
    if floating and not inference and rng.random() < 0.3:
        x = torch.nn.Parameter(x) if rng.random() < 0.5 else x.requires_grad_()
    return x


def metadata(x: Tensor) -> tuple[Any, ...]:
    """Return the metadata of a tensor of fixed sizes that a program may depend on."""
    strides = x.stride() if x.layout is torch.strided else None
    return (
        type(x), x.dtype, x.device, x.layout, tuple(x.shape), strides, x.requires_grad,
        x.is_conj(), x.is_neg(), x.is_inference(),
    )  # fmt: skip


def test_true_for_tensors_of_the_same_metadata_only() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    tensors = [made(rng) for _ in range(120)]
    matches = 0
    for x, y in itertools.product(tensors, repeat=2):
        check = quick_check([x])
        if check is None:
            assert type(x) is Named or x.layout is not torch.strided
            continue
        assert check([y]) == check((y,)) == (metadata(x) == metadata(y)), (metadata(x), metadata(y))
        matches += x is not y and check([y])
    assert matches


def test_every_tensor_of_many_is_checked() -> None:
    examples = [torch.zeros(4) for _ in range(30)]
    check = quick_check(examples)
    assert check is not None and check(examples) and check(tuple(map(torch.ones_like, examples)))
    for k, other in itertools.product(range(30), (torch.zeros(5), torch.zeros(4).double(), 3.0)):
        changed: list[Any] = [*examples]
        changed[k] = other
        assert not check(changed)


def test_false_inside_of_transforms() -> None:
    check = quick_check([torch.zeros(3)])
    assert check is not None
    answers = []

    def asks(x: Tensor) -> Tensor:
        answers.append(check([x]))
        return x

    vmap(asks)(torch.zeros(2, 3))
    torch.func.vmap(asks)(torch.zeros(2, 3))
    torch.func.grad(lambda x: asks(x).sum())(torch.zeros(3))
    assert answers == [False] * 3


def test_a_program_serves_one_tensor_at_two_places() -> None:
    program = specialize(lambda x, y: x + 2 * y)
    program(torch.ones(3), torch.zeros(3))
    x = torch.arange(3.0)
    assert program(x, x).equal(3 * x)


@contextlib.contextmanager
def changed(read: Callable[[], Any], write: Callable[[Any], None], value: Any) -> Iterator[None]:
    """Context manager that changes a setting of the process."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


SWITCHES: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: torch.set_grad_enabled(rng.random() < 0.5),
    lambda rng: torch.inference_mode(rng.random() < 0.5),
    lambda rng: torch.autocast("cpu", enabled=rng.random() < 0.5),
    lambda rng: torch.device(rng.choice(["cpu", "meta"])),
    lambda rng: torch.backends.cudnn.flags(
        enabled=True, benchmark=rng.random() < 0.5, deterministic=rng.random() < 0.5
    ),
    lambda rng: changed(torch.get_default_dtype, torch.set_default_dtype,
                        rng.choice([torch.float32, torch.float64])),
    lambda rng: changed(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision,
                        rng.choice(["highest", "high", "medium"])),
    lambda rng: changed(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode,
                        rng.choice([0, 1, 2])),
)  # fmt: skip


@contextlib.contextmanager
def some_settings(rng: random.Random) -> Iterator[None]:
    """Context manager in which some of the settings may differ from their defaults."""
    with contextlib.ExitStack() as stack:
        for switch in rng.sample(SWITCHES, rng.choice([0, 0, 1, 1, 2])):
            stack.enter_context(switch(rng))
        yield


def test_settings_have_changed_if_one_of_them_has() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(300):
        scope = Scope()
        with some_settings(rng):
            before = settings()
            condition = settings_condition(before, scope.name)
            assert not eval(condition, scope.objects)
        for _ in range(5):
            with some_settings(rng):
                assert bool(eval(condition, scope.objects)) == (settings() != before)
