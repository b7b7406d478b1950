"""An operator's call at sizes other than those of the trace, on fake tensors of fixed sizes.

NOTE [guards of operators] in ``fake_results`` describes the purpose.

For an operator whose fake-tensor rule does not support symbolic sizes, each size of a result is an
expression in the sizes of the arguments that matches the operator's results at several sizes.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensorMode

from tsfunc.bridge.sizes.equalities import is_multiple, or_one, required_equalities, satisfy
from tsfunc.bridge.tracers.user_queries import SYMBOLIC, suppress_guards
from tsfunc.ops.dims import dense_strides, memory_order

_TRIES = 8  # the number of accepted other sizes at which results are compared
ENOUGH = 2  # the least number of accepted sizes that a comparison needs
_SMALL = 2**22  # elements
_Call = Callable[..., Any]


def symbols_among(values: Any) -> set[Any]:
    """Return the symbols in the sizes of fake tensors, and in symbolic numbers."""
    symbols: set[Any] = set()
    for leaf in optree.tree_leaves(values, none_is_leaf=True):
        if isinstance(leaf, torch.Tensor):
            for size in (*leaf.shape, *leaf.stride()):
                if isinstance(size, torch.SymInt):
                    symbols |= size.node.expr.free_symbols
        elif isinstance(leaf, SYMBOLIC):
            symbols |= leaf.node.expr.free_symbols
    return symbols


class ShapeProbe:
    """An operator's call at sizes other than those of the trace.

    Args:
        args, kwargs: fake values.
    """

    def __init__(self, env: Any, call: _Call, args: Any, kwargs: Any) -> None:
        self.env, self.call = env, call
        self.args, self.kwargs = _plain_lists(args), _plain_lists(kwargs)
        self.symbols = sorted(symbols_among((args, kwargs)), key=str)
        hints = env.backed_var_to_val
        self.hints = {s: _python_number(hints[s]) if s in hints else 7 for s in self.symbols}
        self.fixed: list[Any] = []  # symbols that keep the value of the trace
        self.needed: list[Any] = []  # equalities that the operator needs; other sizes keep them

    def keep_required(self, conditions: Sequence[Any]) -> None:
        """Restrict other sizes to those that satisfy the equalities which the operator needs."""
        self.needed = required_equalities(conditions, self.hints, self.accepts)

    def guard_required(self, multiples: bool) -> None:
        """Add guards for the needed equalities to the trace.

        Args:
            multiples: True to include equalities that make a size a multiple of a number.
        """
        for fact in self.needed:
            if multiples or not is_multiple(fact):
                self.env.evaluate_expr(or_one(fact, self.hints, self.accepts))

    def fix_unaccepted(self) -> bool:
        """Fix the symbols for which the operator accepts no other size; True if there are any."""
        hints = self.hints
        self.fixed = [
            s
            for s in self.symbols
            if not any(
                self.accepts(self._within_bounds({**hints, s: hints[s] + k}))
                for k in (1, 2, hints[s])
            )
        ]
        return bool(self.fixed)

    def guard_fixed(self) -> None:
        """Add guards to the trace that the fixed symbols keep their values."""
        from sympy import Eq

        for symbol in self.fixed:
            self.env.evaluate_expr(Eq(symbol, self.hints[symbol]))

    def sizes(self) -> Iterator[dict[Any, int]]:
        """Yield sizes for the symbols: those of the trace, then others within the bounds."""
        hints = self.hints
        yield hints
        # Numbers among the arguments may be small or negative, unlike sizes.
        numbers = [s for s in self.symbols if float(self.env.var_to_range[s].lower) < 2]
        for value in (-1, 0, 1) if numbers else ():
            yield self._within_bounds({**hints, **dict.fromkeys(numbers, value)})
        drawn = random.Random(0)
        for factor in (2, 3):
            yield self._within_bounds({s: factor * hint for s, hint in hints.items()})
        # Draw each size separately, so that neither of two is always the larger one: near the
        # sizes of the call, then anywhere.
        for spread in (20, 3, 20, 8, 20, 50, 20, 200, 3, 8, 3):
            low = 2 if spread > 8 else None
            yield self._within_bounds({
                s: _python_number(hint + drawn.randrange(-spread, spread)) if s in numbers
                else drawn.randrange(low or max(2, hint - spread), (low or hint) + spread)
                for s, hint in hints.items()
            })  # fmt: skip

    def _within_bounds(self, sizes: Mapping[Any, Any]) -> dict[Any, Any]:
        hints = {symbol: self.hints[symbol] for symbol in self.fixed}
        within = {symbol: self._within(symbol, size) for symbol, size in {**sizes, **hints}.items()}
        return satisfy(self.needed, within)

    def _within(self, symbol: Any, size: Any) -> Any:
        bounds = self.env.var_to_range[symbol]
        size = max(size, int(bounds.lower)) if bounds.lower.is_Integer else size
        return min(size, int(bounds.upper)) if bounds.upper.is_Integer else size

    def results(self, sizes: Mapping[Any, int]) -> Any:
        """Return the results of the operator at given sizes; None if the operator raises."""
        try:
            mode = FakeTensorMode(allow_fallback_kernels=self._is_small(sizes))
        except ZeroDivisionError:  # no argument has such a size
            return None

        def fixed(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                shape, strides = at(leaf.shape, sizes), at(leaf.stride(), sizes)
                return torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device)
            return at([leaf], sizes)[0] if isinstance(leaf, SYMBOLIC) else leaf

        with DisableTorchFunction(), mode:
            try:
                args, kwargs = optree.tree_map(fixed, (self.args, self.kwargs), none_is_leaf=True)
                return self.call(*args, **kwargs)
            except Exception:
                return None

    def _is_small(self, sizes: Mapping[Any, int]) -> bool:
        """True if a real kernel may run at given sizes, in place of a missing fake rule.

        The kernel runs on zeros, and its result may be as large as all sizes of all arguments
        together: a histogram over a hundred bins in each of five dims is larger than any memory.
        """
        return self._largest(sizes) <= max(_SMALL, self._largest(self.hints))

    def _largest(self, sizes: Mapping[Any, int]) -> int:
        """Return an upper bound of the number of elements of a result."""
        leaves = optree.tree_leaves((self.args, self.kwargs))
        numbers = [abs(int(at([x], sizes)[0])) for x in leaves if isinstance(x, torch.SymInt)]
        counts = [math.prod(at(x.shape, sizes)) for x in leaves if isinstance(x, torch.Tensor)]
        return math.prod(max(1, count) for count in (*numbers, *counts))

    def agrees(self, results: Any) -> bool:
        """True if symbolic results match the operator's results at other sizes too."""
        taken = 0
        for sizes in itertools.islice(self.sizes(), 1, None):
            expected = self.results(sizes)
            if expected is None:
                continue
            if not _same_results(results, expected, sizes):
                return False
            taken += 1
            if taken == _TRIES:
                break
        return taken >= ENOUGH

    def accepts(self, sizes: Mapping[Any, int]) -> bool:
        """True if the operator accepts given sizes."""
        return self.results(sizes) is not None


def _python_number(value: Any) -> Any:
    """Return a number as a Python int or float."""
    return int(value) if value == int(value) else float(value)


def _plain_lists(value: Any) -> Any:
    """Return arguments with plain lists, because optree does not flatten the lists of graphs."""
    if isinstance(value, dict):
        return {name: _plain_lists(item) for name, item in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return [_plain_lists(item) for item in value]
    return value


def at(values: Sequence[Any], sizes: Mapping[Any, int]) -> list[Any]:
    """Evaluate symbolic numbers at given sizes."""
    evaluated: list[Any] = []
    for value in values:
        if not isinstance(value, SYMBOLIC):
            evaluated.append(value)
            continue
        expr = value.node.expr.xreplace(dict(sizes))
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
        evaluated.append(kind(expr))
    return evaluated


def _same_results(results: Any, others: Any, sizes: Mapping[Any, int]) -> bool:
    """True if symbolic results, evaluated at given sizes, match other results."""
    mine, theirs = (optree.tree_leaves(x, none_is_leaf=True) for x in (results, others))
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
        elif isinstance(x, SYMBOLIC) and at([x], sizes) != [y]:
            return False
    return True


# --- results fitted to those at fixed sizes


def fit_shapes(probe: ShapeProbe, fake: FakeTensorMode) -> Any:
    """Return the results of a call, fitted to results at fixed sizes; None if no fit exists."""
    taken: list[tuple[dict[Any, int], Any]] = []
    for sizes in probe.sizes():
        results = probe.results(sizes)
        if results is None and not taken:
            return None  # the operator refuses the sizes of the call itself
        if results is not None:
            taken.append((sizes, results))
    if len(taken) <= ENOUGH:
        return None
    atoms = _sizes_in((probe.args, probe.kwargs))
    leaves, tree = optree.tree_flatten(taken[0][1], none_is_leaf=True)
    columns = [optree.tree_leaves(results, none_is_leaf=True) for _, results in taken]
    if any(len(column) != len(leaves) for column in columns):
        return None
    points = [sizes for sizes, _ in taken]
    fitted = []
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            if any(column[i] != leaf for column in columns):
                return None
            fitted.append(leaf)
            continue
        like = _fit_tensor([column[i] for column in columns], points, atoms, fake)
        if like is None:
            return None
        fitted.append(like)
    return optree.tree_unflatten(tree, fitted)


def _fit_tensor(
    samples: Sequence[torch.Tensor],
    points: Sequence[Mapping[Any, int]],
    atoms: Sequence[Any],
    fake: FakeTensorMode,
) -> torch.Tensor | None:
    """Return a fake tensor that matches each sample at its sizes, or None."""
    first = samples[0]
    if any(not isinstance(x, torch.Tensor) or x.dim() != first.dim() for x in samples):
        return None
    shape = []
    for dim in range(first.dim()):
        size = _fitted_expression([int(x.shape[dim]) for x in samples], points, atoms)
        if size is None:
            return None
        shape.append(size)
    strides = dense_strides(shape, memory_order(first.shape, first.stride()))
    with DisableTorchFunction(), fake, suppress_guards(fake):
        return torch.empty_strided(shape, strides, dtype=first.dtype, device=first.device)


def _sizes_in(values: Any) -> list[Any]:
    """Return the distinct symbolic sizes of tensors, and symbolic ints, among arguments."""
    sizes: dict[Any, Any] = {}
    for leaf in optree.tree_leaves(values, none_is_leaf=True):
        for size in leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,):
            if isinstance(size, torch.SymInt):
                sizes.setdefault(size.node.expr, size)
    return list(sizes.values())


def _fitted_expression(
    wanted: Sequence[int], points: Sequence[Mapping[Any, int]], atoms: Sequence[Any]
) -> Any:
    """Return an expression in some sizes that has the wanted values, or None."""
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
