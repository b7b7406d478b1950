"""Programs that draw from a ``torch.Generator``, on each backend."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from tsfunc import checkpoint, cond, errors, fori_loop, grad, specialize, vmap

# torch's compilers use functions that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="inductor compiles C++")

FIRST, SECOND = torch.Generator(), torch.Generator()
INDUCTOR = pytest.param("inductor", marks=needs_gcc)


def several(x: Tensor) -> Tensor:
    uniform = torch.empty(3).uniform_(generator=FIRST)
    whole = torch.randint(0, 9, (3,), generator=SECOND)
    return uniform * x + whole + torch.randperm(3, generator=FIRST)


def with_parameters(x: Tensor) -> Tensor:
    drawn = torch.bernoulli(x.sigmoid(), generator=FIRST) + x.clone().normal_(generator=SECOND)
    return drawn + torch.multinomial(x.exp(), 3, generator=FIRST)


def normal(x: Tensor) -> Tensor:
    return torch.randn(3, generator=FIRST) * x.sin()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": normal,
    "several generators": several,
    "parameters": with_parameters,
    "vmap": lambda x: vmap(normal, randomness="different")(x.expand(2, 3)).sum(0),
    "vmap with the same numbers": lambda x: vmap(normal, randomness="same")(x.expand(2, 3)).sum(0),
    "grad": lambda x: grad(lambda x: normal(x).sum())(x),
    "checkpoint": lambda x: checkpoint(normal)(x) + normal(x) + several(x),
}
BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "cond": lambda x: cond(x.sum() > 9, normal, several, x),
    "fori_loop": lambda x: fori_loop(0, 3, lambda i, x: x + normal(x), x),
}


def drawn(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Return the results of three calls, from fixed states of the generators."""
    FIRST.manual_seed(3)
    SECOND.manual_seed(4)
    return [function(x) for _ in range(3)] + [FIRST.get_state(), SECOND.get_state()]


@pytest.mark.parametrize("backend", ["python", "aot_eager", INDUCTOR])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_program_draws_what_its_function_draws(name: str, backend: str) -> None:
    function, x = FUNCTIONS[name], torch.randn(3)
    program = specialize(function, backend=backend)
    for one, other in zip(drawn(program, x), drawn(function, x), strict=True):
        torch.testing.assert_close(one, other)


@needs_gcc
def test_equal_programs_draw_from_generators_of_their_own() -> None:
    """Inductor's cache would give the second program the generator of the first."""
    x, third = torch.randn(3), torch.Generator()
    for generator in (third, torch.Generator(), third):
        program = specialize(
            lambda x, g=generator: torch.rand(3, generator=g) * x, backend="inductor"
        )
        generator.manual_seed(7)
        results = [program(x) for _ in range(2)]
        generator.manual_seed(7)
        torch.testing.assert_close(
            results, [torch.rand(3, generator=generator) * x for _ in range(2)]
        )


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("name", BODIES)
def test_backends_refuse_draws_from_a_generator_in_bodies(name: str, backend: str) -> None:
    """Inductor would draw other numbers there."""
    function, x = BODIES[name], torch.randn(3)
    with pytest.raises(errors.ExportError, match=r"a body draws from a torch\.Generator"):
        specialize(function, backend=backend)(x)
    program = specialize(function)
    for one, other in zip(drawn(program, x), drawn(function, x), strict=True):
        torch.testing.assert_close(one, other)


class WithGenerators(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.by_name = torch.Generator(), {"second": torch.Generator()}

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(3, generator=self.by_name["second"])
        return x * torch.rand(3, generator=self.own) + drawn


MODULE = WithGenerators()
FROM_OUTSIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "a module": MODULE,
    "an argument": lambda x: of_argument(x, FIRST),
    "the default generator": lambda x: torch.rand(3, generator=torch.default_generator) * x,
    "a partial": functools.partial(lambda g, x: torch.rand(3, generator=g) * x, FIRST),
}


def of_argument(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(3, generator=generator) * x


@pytest.mark.parametrize("closure", ["guard", "freeze"])
@pytest.mark.parametrize("name", FROM_OUTSIDE)
def test_generators_from_outside_are_told_from_those_of_the_function(
    name: str, closure: Literal["guard", "freeze"]
) -> None:
    function, x = FROM_OUTSIDE[name], torch.ones(3)
    program = specialize(function, closure=closure)
    assert not program(x).equal(program(x))
    by_argument = specialize(of_argument, closure=closure)
    assert not by_argument(x, FIRST).equal(by_argument(x, FIRST))


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "seeded": lambda x: torch.rand(3, generator=torch.Generator().manual_seed(1)) * x,
    "not seeded": lambda x: torch.rand(3, generator=torch.Generator()) * x,
    "a copy": lambda x: torch.rand(3, generator=FIRST.clone_state()) * x,
    "in place": lambda x: x.clone().normal_(generator=torch.Generator()),
    "a permutation": lambda x: x[torch.randperm(3, generator=torch.Generator())],
    "vmap": lambda x: vmap(
        lambda x: x * torch.rand((), generator=torch.Generator()), randomness="same"
    )(x),
    "split": lambda x: vmap(
        lambda x: x * torch.rand((), generator=torch.Generator()), randomness="split"
    )(x),
    "a branch": lambda x: cond(x.sum() > 0, MADE["seeded"], torch.sin, x),
    "a gradient": lambda x: grad(lambda x: MADE["seeded"](x).sum())(x),
}


@pytest.mark.parametrize("closure", ["guard", "freeze"])
@pytest.mark.parametrize("name", MADE)
def test_a_draw_from_a_generator_that_the_function_makes_is_refused(
    name: str, closure: Literal["guard", "freeze"]
) -> None:
    """The function draws the same numbers at every call; a program would go on with the next."""
    program = specialize(MADE[name], closure=closure)
    with pytest.raises(errors.TypeCheckError, match=r"that it makes, at .*test_generators.py:\d"):
        program(torch.ones(3))
