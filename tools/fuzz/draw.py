"""Draw random functions: each statement runs on one example as it is drawn.

A statement is dropped if torch refuses it, or if its values are not finite or too large. A
construct therefore does not need to know which shapes an operator accepts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from tools.fuzz import reference
from tools.fuzz.helpers import FUNCTIONS
from tools.fuzz.program import (
    CONTAINERS,
    LAYOUTS,
    SHARED,
    Block,
    Leaf,
    Parameter,
    Program,
    Statement,
    leaf_text,
)

_DTYPES = {
    "float": torch.float64,
    "single": torch.float32,
    "complex": torch.complex128,
    "index": torch.int64,
    "mask": torch.bool,
}
Construct = Callable[["Draw"], None]

_LARGEST = 1e3  # a value beyond it would make a comparison of derivatives a matter of rounding
_MOST = 150  # elements of a variable


class RejectedError(Exception):
    """A drawn statement can't be used."""


class Draw:
    """A function that is being drawn: its statements and the values of its variables."""

    def __init__(self, rng: random.Random, sizes: Sequence[int]) -> None:
        self.rng = rng
        self.sizes = sizes
        self.env: dict[str, Any] = {}
        self.body: list[Statement] = []
        self.construct = ""
        self.taken = 0
        self.shared: list[str] = []
        self.namespace = {"torch": torch, "tsfunc": reference, "F": torch.nn.functional}
        exec(FUNCTIONS, self.namespace)
        self.writable: frozenset[str] = frozenset()  # arguments that the function may write into

    # ---- Choices -----------------------------------------------------------------------------

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def one_of(self, *texts: str) -> str:
        return self.rng.choice(texts)

    def number(self) -> str:
        return f"{self.rng.choice([-2, -1, 0.5, 1.5, 2, 3, -0.25])}"

    def variable(self, kind: str, fits: Callable[[torch.Tensor], bool] = lambda x: True) -> str:
        """Return a variable of a kind; recent ones are more likely.

        Kinds are those of leaves, and "other": tensors of any dtype but that of "float".
        """
        wanted = [_DTYPES[kind]] if kind in _DTYPES else [*_DTYPES.values()][1:]
        names = [
            name
            for name, value in self.env.items()
            if isinstance(value, torch.Tensor) and value.dtype in wanted and fits(value)
        ]
        if not names:
            raise RejectedError(kind)
        if self.chance(0.5):
            return names[max(0, len(names) - 1 - int(self.rng.expovariate(1.0)))]
        return self.rng.choice(names)

    def float(self, min_rank: int = 0, max_rank: int = 9) -> str:
        return self.variable("float", lambda x: min_rank <= x.dim() <= max_rank)

    def like(self, x: str) -> str:
        """Return a float that broadcasts to the shape of ``x``: a variable or a new expression."""
        shape = self.shape(x)

        def fits(y: torch.Tensor) -> bool:
            own = [1] * (len(shape) - y.dim()) + list(y.shape)
            return y.dim() <= len(shape) and all(
                a in (1, b) for a, b in zip(own, shape, strict=True)
            )

        return self.variable("float", fits)

    def shape(self, x: str) -> tuple[int, ...]:
        return tuple(self.env[x].shape)

    def dim(self, x: str) -> int:
        rank = len(self.shape(x))
        if not rank:
            raise RejectedError("no dims")
        return self.rng.randrange(-rank, rank)

    def size(self, x: str, dim: int) -> int:
        return self.shape(x)[dim]

    def place(self, size: int) -> int:
        """Return an index of a dim, from the front or the back."""
        if not size:
            raise RejectedError("no elements")
        return self.rng.randrange(-size, size)

    def mask(self, x: str) -> str:
        """Return an expression of a mask in the shape of ``x``."""
        return self.one_of(
            f"({x} > {self.number()})", f"({x}.sin() > 0.1)", f"({x} * 3 < {x}.exp())"
        )

    def indices(self, size: int, shape: Sequence[int]) -> str:
        """Return an expression of indices below ``size``, shared by all examples or not."""
        if not size:
            raise RejectedError("no elements")
        text = ", ".join(map(str, shape))
        count = 1
        for s in shape:
            count *= s
        if self.chance(0.5):
            step = self.rng.randrange(1, 4)
            shaped = f".reshape({text or '()'})"
            return f"((torch.arange({count}) * {step} + 1) % {size}){shaped}"
        try:
            x = self.variable("float", lambda v: v.numel() == count)
        except RejectedError:
            x = self.float()
            if not self.env[x].numel():
                raise
            return f"(({x}.sum() * 5).abs().long() % {size}).expand({text or '()'})"
        return f"(({x}.reshape({text or '()'}) * 7).abs().long() % {size})"

    # ---- Statements --------------------------------------------------------------------------

    def let(self, expression: str, blocks: tuple[Block, ...] = (), prefix: str = "v") -> str:
        """Define a variable."""
        self.taken += 1
        name = f"{prefix}{self.taken}"
        self.add(Statement(f"{name} = {expression}", self.construct, blocks))
        return name

    def do(self, line: str, blocks: tuple[Block, ...] = ()) -> None:
        """Add a line that writes into a variable."""
        self.add(Statement(line, self.construct, blocks))

    def add(self, statement: Statement) -> None:
        from tools.fuzz.program import lines_of

        scope = {**self.namespace, **self.env}
        kept = {
            name: x.clone()
            for name, x in self.env.items()
            if name[0] in "cx" and name not in self.writable and isinstance(x, torch.Tensor)
        }
        try:
            exec("\n".join(lines_of((statement,))), scope)
        except Exception as error:
            raise RejectedError(str(error)) from None
        if not all(x.equal(self.env[name]) for name, x in kept.items()):
            # A write through an alias, such as a contiguous tensor of one element, changes the next
            # call, or what the caller has.
            raise RejectedError("writes into a captured tensor or an argument")
        if statement.target is not None:
            value = scope[statement.target]
            self.env[statement.target] = value
        self.check()
        self.body.append(statement)

    def check(self) -> None:
        """Refuse values that would make a comparison meaningless."""
        for value in self.env.values():
            if not isinstance(value, torch.Tensor):
                continue
            if value.numel() > _MOST:
                raise RejectedError("too large")
            if value.is_floating_point() and value.numel():
                largest = value.detach().abs().max()
                if not largest <= _LARGEST:
                    raise RejectedError("not finite, or too large")

    @contextmanager
    def attempt(self, construct: str) -> Iterator[None]:
        """Add a construct; remove its statements if it is rejected."""
        body, env = list(self.body), dict(self.env)
        copies = {k: v.clone() for k, v in env.items() if isinstance(v, torch.Tensor)}
        self.construct = construct
        try:
            yield
        except RejectedError:
            self.body, self.env = body, {**env, **copies}

    def block(
        self, prefix: str, params: dict[str, Any], most: int, result: Callable[[], str],
        shared: Sequence[str] = (),
    ) -> Block:  # fmt: skip
        """Draw a local function of sample values; it may read all variables outside.

        Args:
            shared: variables outside, or its own parameters, that it may write into.
        """
        self.taken += 1
        name = f"{prefix}{self.taken}"
        body, env, construct = self.body, dict(self.env), self.construct
        before, self.shared = self.shared, [*shared]
        self.body = []
        copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in params.items()}
        self.env = {**env, **copies}
        outside = {k: v.clone() for k, v in env.items() if isinstance(v, torch.Tensor)}
        try:
            from tools.fuzz.constructs import BLOCK_CONSTRUCTS, PLAIN_CONSTRUCTS, construct_of

            for _ in range(self.rng.randrange(most + 1)):
                deep = construct.count("/") > 0
                family = self.rng.choice(PLAIN_CONSTRUCTS if deep else BLOCK_CONSTRUCTS)
                with self.attempt(f"{construct}/{family}"):
                    construct_of(self.rng, family)(self)
            self.construct = construct
            block = Block(name, tuple(params), tuple(self.body), result())
        finally:
            self.body, self.env, self.construct = body, {**env, **outside}, construct
            self.shared = before
        return block


def draw_function(rng: random.Random, seed: str, families: Sequence[str] | None = None) -> Program:
    """Draw a function of one example, without a tower, from some families of constructs or all."""
    from tools.fuzz.constructs import CONSTRUCTS, construct_of
    from tools.fuzz.constructs.nested import pullback

    sizes = rng.sample([2, 3, 4, 5], 4)
    if rng.random() < 0.15:
        sizes[rng.randrange(4)] = rng.choice([0, 1, 1])
    draw = Draw(rng, sizes)
    captured = []
    for i in range(rng.choice([0, 0, 1, 2])):
        leaf = _leaf(rng, sizes, 10 + i, kinds=("float", "float", "float", "mask"))
        captured.append((f"c{i}", leaf))
        draw.env[f"c{i}"] = eval(leaf_text(leaf, leaf.shape, leaf.phase), {"torch": torch})
    if captured and rng.random() < 0.3:
        with draw.attempt("pullbacks"):
            pullback(draw)
    outside, draw.body = tuple(draw.body), []
    params = _parameters(draw, families is None)
    start = len(draw.body)
    families = list(CONSTRUCTS if families is None else families)
    wanted = rng.randrange(1, 8)
    for _ in range(4 * wanted):
        if len(draw.body) - start >= wanted:
            break
        family = rng.choice(families)
        with draw.attempt(family):
            construct_of(rng, family)(draw)
    return Program(seed, tuple(captured), params, tuple(draw.body), _result(draw), outside=outside)


def _parameters(draw: Draw, all_kinds: bool) -> tuple[Parameter, ...]:
    """Draw the parameters; they become variables, and so do the elements of containers."""
    rng = draw.rng
    kinds: tuple[str, ...] = ("float", "float", "float", "float", "index", "mask")
    kinds += ("single", "complex") if all_kinds else ()
    params = []
    shares = rng.random() < 0.1
    for i in range(rng.choice([1, 1, 2, 2, 3])):
        leaves = tuple(
            _leaf(rng, draw.sizes, i * 2 + k, kinds if i else ("float",))
            for k in range(2 if rng.random() < 0.25 else 1)
        )
        if shares:
            leaves = tuple(replace(x, layout=SHARED) if x.kind == "float" else x for x in leaves)
        container = rng.choice(["dict", *CONTAINERS])
        own = all(x.kind == "float" and x.layout != "expanded" for x in leaves)
        written = own and rng.random() < 0.1
        parameter = Parameter(f"x{i}", leaves, container, written)
        params.append(parameter)
        for k, leaf in enumerate(leaves):
            name = f"v{draw.taken + 1}" if parameter.is_container else parameter.name
            value = eval(leaf_text(leaf, leaf.shape, leaf.phase), {"torch": torch})
            if parameter.is_container:
                draw.taken += 1
                draw.body.append(Statement(f"{name} = {parameter.part(k)}", "containers"))
            draw.env[name] = value
            if written:
                draw.writable |= {name}
                draw.shared.append(name)
    return tuple(params)


def _leaf(rng: random.Random, sizes: Sequence[int], phase: int, kinds: Sequence[str]) -> Leaf:
    rank = rng.choice([0, 1, 1, 2, 2, 2, 3])
    shape = tuple(rng.sample(list(sizes), rank))
    kind = rng.choice(list(kinds))
    layout = rng.choice(["dense", "dense", "dense", *LAYOUTS])
    return Leaf(shape, kind, rng.choice(list(sizes)) or 1, 0.4 + 0.9 * phase, layout)


def _result(draw: Draw) -> str:
    """Return the expression of the function's result, which always has a float."""
    names = [
        name
        for name, value in draw.env.items()
        if isinstance(value, torch.Tensor) and value.dtype is torch.float64 and name[0] in "xv"
    ]
    late = names[-1]
    form = draw.rng.randrange(9)
    other = draw.rng.choice(
        [n for n, v in draw.env.items() if isinstance(v, torch.Tensor) and name_is_local(n)]
    )
    if form == 0:
        return f'{{"out": {late}, "other": {other}}}'
    if form == 1:
        return f"({late}, {other})"
    if form == 2:
        return f'{{"out": [{late}, {draw.rng.choice(names)}]}}'
    if form == 4:
        return f'{{"out": ({late}, None), "other": {other}}}'
    if form == 3:
        return f"({late} * {draw.rng.choice(names)}.sum(),)"
    return late


def name_is_local(name: str) -> bool:
    return name[0] in "xv"
