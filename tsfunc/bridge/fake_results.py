"""Results on fake tensors with symbolic sizes: what an operator's own questions are worth.

NOTE [questions of operators]
torch's rules for fake tensors ask about sizes: a kernel that is no longer than its input, sizes
that are equal, strides in some order. Most of these are checks of arguments, which the operator
itself makes again when the program runs, or choose between ways to the same result; few tell what
the result looks like. So a question of an operator is first answered for the sizes of the call,
and no more is asked of the descriptors if the result is right for others too: the operator is run
on fake tensors of other, fixed sizes, and its results are to have the sizes and strides that the
symbolic ones have there. Sizes that the operator refuses say nothing, but of those that it wants
equal (``equalities``). Only for these, and where the results are others, or too few sizes are
taken, is the question one that the descriptors must answer.

Where a rule fails because it was never written for symbolic sizes, the sizes of the results are
found in the same way: expressions in the sizes of the arguments that give what the operator gave.

Private names used here (torch 2.11 to 2.13): ``SymInt.node`` with its ``expr``, ``FakeTensorMode``,
``DisableTorchFunction``, and of ShapeEnv ``var_to_range`` and ``backed_var_to_val`` (``var_to_val``
in older versions).
"""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from tsfunc.bridge import result_rules as result_rules  # registers its rules
from tsfunc.bridge import split_rules as split_rules
from tsfunc.bridge.equalities import required
from tsfunc.bridge.questions import set_aside, unasked
from tsfunc.bridge.shape_rules import SHAPE_RULES

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_TRIES = 8  # other sizes that are tried
_ENOUGH = 2  # of these that must be taken
_SMALL = 2**22  # elements
_Call = Callable[..., Any]


def results_of(
    fake: FakeTensorMode,
    name: str,
    call: _Call,
    writes: bool,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """The results of an operator on fake values: NOTE [questions of operators].

    Args:
        fake: the mode that works them out.
        name: the operator's, for which there may be a rule of our own (``shape_rules``).
        call: runs the operator.
        writes: whether it writes into an argument.
        args, kwargs: fake values.
    """
    env = fake.shape_env
    if name in SHAPE_RULES:
        with DisableTorchFunction(), fake:
            results = SHAPE_RULES[name](*args, **kwargs)
        if results is not NotImplemented:
            return results
    if env is None or writes:
        with DisableTorchFunction(), fake:
            return call(*args, **kwargs)
    # The mode keeps results, and asks nothing where it has one: not where these were wrong before.
    wrong: set[int] = env.__dict__.setdefault("tsfunc_wrong", set())
    try:
        with set_aside(env) as asked, _kept(fake, id(call) not in wrong):
            results = call(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise
    except Exception:
        found = found_by_example(Elsewhere(env, call, args, kwargs), fake)
        if found is None:
            raise
        return found
    if not asked:
        return results
    elsewhere = Elsewhere(env, call, args, kwargs)
    if not elsewhere.agrees(results):
        wrong.add(id(call))
        results = found_by_example(elsewhere, fake)
    if results is not None:
        for fact in required(asked, next(elsewhere.sizes()), elsewhere.takes):
            env.evaluate_expr(fact)
        return results
    with _kept(fake, False):
        return call(*args, **kwargs)


@contextmanager
def _kept(fake: FakeTensorMode, keeps: bool) -> Iterator[None]:
    """In the block operators run on fake tensors, whose mode keeps results, or does not."""
    cached, fake.cache_enabled = fake.cache_enabled, fake.cache_enabled and keeps
    try:
        with DisableTorchFunction(), fake:
            yield
    finally:
        fake.cache_enabled = cached


@contextmanager
def unlogged() -> Iterator[None]:
    """A block in which torch logs nothing of operators that refuse what they are tried on.

    The error itself is raised all the same; its traceback on stderr beside it is of no use.
    """
    before, _logger.disabled = _logger.disabled, True
    try:
        yield
    finally:
        _logger.disabled = before


_logger = logging.getLogger(FakeTensorMode.__module__)


def symbols_among(values: Any) -> set[Any]:
    """The symbols in the sizes of fake tensors, and in numbers."""
    found: set[Any] = set()
    for leaf in optree.tree_leaves(values, none_is_leaf=True):
        if isinstance(leaf, torch.Tensor):
            for size in (*leaf.shape, *leaf.stride()):
                if isinstance(size, torch.SymInt):
                    found |= size.node.expr.free_symbols
        elif isinstance(leaf, _SYMBOLIC):
            found |= leaf.node.expr.free_symbols
    return found


class Elsewhere:
    """An operator's call at other sizes than those of the trace.

    Args:
        env: the environment of the symbols.
        call: runs the operator.
        args, kwargs: fake values.
    """

    def __init__(self, env: Any, call: _Call, args: Any, kwargs: Any) -> None:
        self.env, self.call = env, call
        self.args, self.kwargs = _plain(args), _plain(kwargs)
        self.symbols = sorted(symbols_among((args, kwargs)), key=str)
        known = getattr(env, "backed_var_to_val", None)
        known = env.var_to_val if known is None else known
        self.here = {s: _number(known[s]) if s in known else 7 for s in self.symbols}

    def sizes(self) -> Iterator[dict[Any, int]]:
        """Sizes for the symbols: those of the trace, then others within the bounds."""
        hints = self.here
        yield hints
        # Numbers among the arguments may be small or negative, where sizes may not.
        scalars = [s for s in self.symbols if self._least(s) < 2]
        for value in (-1, 0, 1) if scalars else ():
            yield self._bounded({**hints, **dict.fromkeys(scalars, value)})
        drawn = random.Random(0)
        for factor in (2, 3):
            yield self._bounded({s: factor * hint for s, hint in hints.items()})
        # Each by itself, so that none is always the larger one; near the call's, then anywhere.
        for spread in (20, 3, 20, 8, 20, 50, 20, 200, 3, 8, 3):
            low = 2 if spread > 8 else None
            yield self._bounded({
                s: _number(hint + drawn.randrange(-spread, spread)) if s in scalars
                else drawn.randrange(low or max(2, hint - spread), (low or hint) + spread)
                for s, hint in hints.items()
            })  # fmt: skip

    def _bounded(self, sizes: Mapping[Any, Any]) -> dict[Any, Any]:
        return {symbol: self._within(symbol, size) for symbol, size in sizes.items()}

    def _least(self, symbol: Any) -> float:
        """The least number that a symbol may be."""
        return float(self.env.var_to_range[symbol].lower)

    def _within(self, symbol: Any, size: Any) -> Any:
        bounds = self.env.var_to_range[symbol]
        size = max(size, int(bounds.lower)) if bounds.lower.is_Integer else size
        return min(size, int(bounds.upper)) if bounds.upper.is_Integer else size

    def results(self, sizes: Mapping[Any, int]) -> Any:
        """What the operator gives there; None where it refuses."""
        try:
            mode = FakeTensorMode(allow_fallback_kernels=self._is_small(sizes))
        except ZeroDivisionError:  # no argument has such a size
            return None

        def fixed(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                shape, strides = at(leaf.shape, sizes), at(leaf.stride(), sizes)
                return torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device)
            return at([leaf], sizes)[0] if isinstance(leaf, _SYMBOLIC) else leaf

        with DisableTorchFunction(), mode, unlogged():
            try:
                args, kwargs = optree.tree_map(fixed, (self.args, self.kwargs), none_is_leaf=True)
                return self.call(*args, **kwargs)
            except Exception:
                return None

    def _is_small(self, sizes: Mapping[Any, int]) -> bool:
        """Whether a kernel may run there: for an operator without a rule for fake tensors.

        It does so on zeros, and what it returns may have all sizes of all arguments: a histogram
        over a hundred bins in each of five dims is larger than any memory.
        """
        return self._largest(sizes) <= max(_SMALL, self._largest(self.here))

    def _largest(self, sizes: Mapping[Any, int]) -> int:
        """How many elements a result may have."""
        leaves = optree.tree_leaves((self.args, self.kwargs))
        numbers = [abs(int(at([x], sizes)[0])) for x in leaves if isinstance(x, torch.SymInt)]
        counts = [math.prod(at(x.shape, sizes)) for x in leaves if isinstance(x, torch.Tensor)]
        return math.prod(max(1, count) for count in (*numbers, *counts))

    def agrees(self, results: Any) -> bool:
        """Whether symbolic results are right at other sizes too, as far as is seen."""
        taken = 0
        for sizes in itertools.islice(self.sizes(), 1, None):
            found = self.results(sizes)
            if found is None:
                continue
            if not _same(results, found, sizes):
                return False
            taken += 1
            if taken == _TRIES:
                break
        return taken >= _ENOUGH

    def takes(self, sizes: Mapping[Any, int]) -> bool:
        """Whether the operator does not refuse some sizes."""
        return self.results(sizes) is not None


def _number(value: Any) -> Any:
    """A number as Python's own."""
    return int(value) if value == int(value) else float(value)


def _plain(value: Any) -> Any:
    """Arguments with lists for those of graphs, which optree does not look into."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return [_plain(item) for item in value]
    return value


def at(values: Sequence[Any], sizes: Mapping[Any, int]) -> list[Any]:
    """Symbolic numbers as those that they are for some sizes."""
    found: list[Any] = []
    for value in values:
        if not isinstance(value, _SYMBOLIC):
            found.append(value)
            continue
        expr = value.node.expr.xreplace(dict(sizes))
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
        found.append(kind(expr))
    return found


def _same(results: Any, found: Any, sizes: Mapping[Any, int]) -> bool:
    """Whether symbolic results are, for some sizes, like others."""
    mine, theirs = (optree.tree_leaves(x, none_is_leaf=True) for x in (results, found))
    if len(mine) != len(theirs):
        return False
    for x, y in zip(mine, theirs, strict=True):
        if isinstance(x, torch.Tensor):
            if not isinstance(y, torch.Tensor) or x.dtype is not y.dtype:
                return False
            shape = at(x.shape, sizes)
            strides = zip(shape, at(x.stride(), sizes), y.stride(), strict=False)
            if shape != list(y.shape) or any(n > 1 and a != b for n, a, b in strides):
                return False
        elif isinstance(x, _SYMBOLIC) and at([x], sizes) != [y]:
            return False
    return True


# --- results of rules that are not written for symbolic sizes


def found_by_example(elsewhere: Elsewhere, fake: FakeTensorMode) -> Any:
    """The results of a call, worked out from those at fixed sizes; None where that can't be."""
    taken: list[tuple[dict[Any, int], Any]] = []
    for sizes in elsewhere.sizes():
        found = elsewhere.results(sizes)
        if found is None and not taken:
            return None  # it refuses the sizes of the call itself
        if found is not None:
            taken.append((sizes, found))
    if len(taken) <= _ENOUGH:
        return None
    atoms = _sizes_in((elsewhere.args, elsewhere.kwargs))
    leaves, tree = optree.tree_flatten(taken[0][1], none_is_leaf=True)
    columns = [optree.tree_leaves(found, none_is_leaf=True) for _, found in taken]
    if any(len(column) != len(leaves) for column in columns):
        return None
    points = [sizes for sizes, _ in taken]
    made = []
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            if any(column[i] != leaf for column in columns):
                return None
            made.append(leaf)
            continue
        like = _fitted([column[i] for column in columns], points, atoms, fake)
        if like is None:
            return None
        made.append(like)
    return optree.tree_unflatten(tree, made)


def _fitted(
    examples: Sequence[torch.Tensor],
    points: Sequence[Mapping[Any, int]],
    atoms: Sequence[Any],
    fake: FakeTensorMode,
) -> torch.Tensor | None:
    """A fake tensor that is like each example at its sizes."""
    first = examples[0]
    if any(not isinstance(x, torch.Tensor) or x.dim() != first.dim() for x in examples):
        return None
    shape = []
    for dim in range(first.dim()):
        size = _expression([int(x.shape[dim]) for x in examples], points, atoms)
        if size is None:
            return None
        shape.append(size)
    order = sorted(range(first.dim()), key=lambda d: (first.stride(d), -d))
    strides: list[Any] = [1] * first.dim()
    step: Any = 1
    for dim in order:
        strides[dim] = step
        step = step * shape[dim]
    with DisableTorchFunction(), fake, unasked(fake):
        return torch.empty_strided(shape, strides, dtype=first.dtype, device=first.device)


def _sizes_in(values: Any) -> list[Any]:
    """The distinct symbolic sizes of tensors, and symbolic numbers, among arguments."""
    found: dict[Any, Any] = {}
    for leaf in optree.tree_leaves(values, none_is_leaf=True):
        for size in leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,):
            if isinstance(size, torch.SymInt):
                found.setdefault(size.node.expr, size)
    return list(found.values())


def _expression(
    wanted: Sequence[int], points: Sequence[Mapping[Any, int]], atoms: Sequence[Any]
) -> Any:
    """An expression in some sizes that has the wanted values; None where none is found."""
    if len(set(wanted)) == 1:
        return wanted[0]
    for candidate in _candidates(wanted, points, atoms):
        pairs = zip(points, wanted, strict=True)
        if all(at([candidate], sizes) == [value] for sizes, value in pairs):
            return candidate
    return None


def _candidates(
    wanted: Sequence[int], points: Sequence[Mapping[Any, int]], atoms: Sequence[Any]
) -> Iterator[Any]:
    yield from atoms
    for atom in atoms:
        here, there = at([atom], points[0])[0], at([atom], points[1])[0]
        if here != there and (wanted[1] - wanted[0]) % (there - here) == 0:
            slope = (wanted[1] - wanted[0]) // (there - here)
            yield slope * atom + (wanted[0] - slope * here)
        for by in (2, 3, 4, 8):
            yield atom // by + (wanted[0] - here // by)
            yield (atom + 1) // by + (wanted[0] - (here + 1) // by)
    for some, other in itertools.combinations(atoms, 2):
        one, two = at([some, other], points[0])
        yield some + other + (wanted[0] - one - two)
        yield some - other + (wanted[0] - one + two)
        yield other - some + (wanted[0] - two + one)
        yield some * other
        yield torch.sym_min(some, other)
        yield torch.sym_max(some, other)
        for k in (-4, -3, -2, -1, 1, 2, 3, 4):
            yield torch.sym_min(some + k, other)
            yield torch.sym_min(some, other + k)
    for several in itertools.combinations(atoms, 3):
        yield several[0] * several[1] * several[2]
        yield several[0] + several[1] + several[2]
