"""Run a row's rule on physical values and compare it with the loop over the operator.

check(torch.ops.aten.add.Tensor, x, y)            # every choice of batched arguments
check(op, x, dim=1, choices=[(0,)])               # only args[0] batched
for call in database_calls("softmax"): check(call.op, *call.args, **call.kwargs)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tsfunc.ops.registry import Row, Splitter, all_rows, find

SIZE = 3  # examples in a batch; differs from the sizes in samples where possible

# Floating dtypes without arithmetic.
EIGHT_BITS = frozenset(
    {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)


def normal(*shape: int) -> torch.Tensor:
    """Return normal numbers that depend on the shape alone."""
    seeded = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=seeded)


def uniform(*shape: int) -> torch.Tensor:
    """Return numbers between 0 and 1 that depend on the shape alone."""
    seeded = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.rand(shape, dtype=torch.float64, generator=seeded)


def overload(name: str) -> Any:
    """Return the overload of a row: ``torch.ops.aten.add.Tensor`` for ``aten::add.Tensor``."""
    space, _, rest = name.partition("::")
    packet, _, which = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), which or "default")


def rows_of(*files: str) -> list[str]:
    """Return the rows that some files of ``tsfunc/ops`` declare."""
    ends = tuple(f"/{file}" for file in files)
    return sorted(n for n, r in all_rows().items() if r.source.rpartition(":")[0].endswith(ends))


@dataclass
class Level:
    """A stand-in for the vmap that a rule runs for."""

    batch_size: int = SIZE
    randomness: str = "error"
    splitter: Splitter | None = None
    in_backward_formula: bool = False

    def outside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def example_indices(self, device: torch.device) -> Tensor:
        return torch.arange(self.batch_size, device=device)

    def random_key(self, generator: torch.Generator | None) -> Tensor:
        return torch.randint(0, 1 << 32, (2,), generator=generator)

    def next_draw(self) -> int:
        return 0

    def on_random_op(self, generator: torch.Generator | None) -> None:
        pass


def vary(x: Tensor, i: int) -> Tensor:
    """Return example ``i`` of a batch made from ``x``: other values of its domain and shape."""
    if (x.is_floating_point() or x.is_complex()) and x.dtype not in EIGHT_BITS:
        return x * (1 - i / 16)
    if x.dtype is torch.bool and x.dim() == 0:
        return x ^ bool(i % 2)
    return x.reshape(-1).roll(i).reshape(x.shape)


def tensor_paths(args: Sequence[Any]) -> list[tuple[int, int | None]]:
    """Return the positions of the tensors: (argument, None) or (argument, index in its list)."""
    found: list[tuple[int, int | None]] = []
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor):
            found.append((i, None))
        elif isinstance(arg, (list, tuple)):
            found += [(i, j) for j, item in enumerate(arg) if isinstance(item, Tensor)]
    return found


def _at(args: Sequence[Any], path: tuple[int, int | None]) -> Any:
    i, j = path
    return args[i] if j is None else args[i][j]


def _replace(args: list[Any], path: tuple[int, int | None], value: Any) -> None:
    i, j = path
    if j is None:
        args[i] = value
    else:
        args[i] = list(args[i])
        args[i][j] = value


def subsets(count: int, limit: int = 3) -> Iterator[tuple[int, ...]]:
    """Return choices of batched tensors: every choice of few, else each, all, and all but one."""
    if count <= limit:
        for k in range(1, count + 1):
            yield from itertools.combinations(range(count), k)
        return
    yield tuple(range(count))
    for i in range(count):
        yield (i,)
        yield tuple(j for j in range(count) if j != i)


@dataclass
class Plan:
    """A call on physical values: the arguments of the rule, and the arguments of each example."""

    dims: list[Any]
    args: list[Any]
    examples: list[list[Any]] = field(default_factory=list)


def plan(args: Sequence[Any], batched: dict[tuple[int, int | None], int], size: int) -> Plan:
    """Batch the tensors at some paths, each with its batch dim at a position."""
    made = Plan([None] * len(args), list(args), [list(args) for _ in range(size)])
    for path, bdim in batched.items():
        variants = [vary(_at(args, path), i) for i in range(size)]
        _replace(made.args, path, torch.stack(variants).movedim(0, bdim))
        for example, variant in zip(made.examples, variants, strict=True):
            _replace(example, path, variant)
        i, j = path
        if j is None:
            made.dims[i] = bdim
        else:
            entry = made.dims[i] or [None] * len(args[i])
            made.dims[i] = [bdim if k == j else d for k, d in enumerate(entry)]
    return made


def _flat(out: Any, dims: Any) -> list[tuple[Any, Any]]:
    if isinstance(out, (list, tuple)):
        spread = dims if isinstance(dims, (list, tuple)) else [dims] * len(out)
        assert len(spread) == len(out), f"{len(out)} results, {len(spread)} dims"
        return [pair for o, d in zip(out, spread, strict=True) for pair in _flat(o, d)]
    return [(out, dims)]


def compare(out: Any, dims: Any, expected: Sequence[Any], what: str) -> None:
    """Compare a rule's result with the result of each example."""
    got = _flat(out, dims)
    for i, want in enumerate(expected):
        wanted = [w for w, _ in _flat(want, None)]
        assert len(wanted) == len(got), f"{what}: {len(got)} results, not {len(wanted)}"
        for k, ((value, bdim), w) in enumerate(zip(got, wanted, strict=True)):
            label = f"{what}: result {k} of example {i}, batch dim {bdim}"
            if not isinstance(w, Tensor):
                assert value == w or value is w, f"{label}: {value} is not {w}"
                continue
            assert bdim is None or 0 <= bdim < value.dim(), label
            assert bdim is None or value.shape[bdim] == len(expected), label
            mine = value if bdim is None else value.select(bdim, i)
            assert mine.shape == w.shape, f"{label}: {tuple(mine.shape)} not {tuple(w.shape)}"
            try:
                # Summing in another order changes the last digits.
                single = w.dtype in (torch.float32, torch.complex64)
                loose: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5} if single else {}
                if w.dtype in EIGHT_BITS:  # torch compares bits, of which the last one may differ
                    step = torch.finfo(w.dtype)
                    loose = {"rtol": step.eps, "atol": step.eps * step.tiny}
                    assert mine.dtype == w.dtype
                    mine, w = mine.float(), w.float()
                torch.testing.assert_close(mine, w, equal_nan=True, **loose)
            except AssertionError as e:
                raise AssertionError(f"{label}: {e}") from None


def is_inplace(op: Any) -> bool:
    """True if the operator writes its first argument."""
    first = op._schema.arguments[:1]
    return bool(first and first[0].alias_info is not None and first[0].alias_info.is_write)


def _clone(args: Sequence[Any]) -> list[Any]:
    def one(a: Any) -> Any:
        if isinstance(a, Tensor):
            return a.clone()
        return [one(x) for x in a] if isinstance(a, (list, tuple)) else a

    return [one(a) for a in args]


def run_plan(row: Row, op: Any, made: Plan, kwargs: dict[str, Any], what: str) -> bool:
    """Run one plan; return False if the operator refuses an example."""
    inplace = is_inplace(op)
    try:
        expected = [op(*_clone(e), **kwargs) for e in made.examples]
    except (RuntimeError, IndexError, NotImplementedError):
        return False
    physical, before = made.args, _clone(made.args)
    assert row.rule is not None
    result = row.rule(op, Level(len(made.examples)), made.dims, physical, kwargs)
    assert result is not NotImplemented, f"{what}: not covered"
    out, dims = result
    compare(out, dims, expected, what)
    if inplace:
        assert out is physical[0], f"{what}: an in-place rule returns args[0]"
    for path in tensor_paths(before):
        if not (inplace and path == (0, None)):
            old, new = _at(before, path), _at(physical, path)
            assert bool(((old == new) | (old != old)).all()), f"{what}: wrote {path}"
    return True


def check(
    op: Any,
    *args: Any,
    choices: Sequence[tuple[int, ...]] | None = None,
    batch_size: int = SIZE,
    seed: int = 0,
    **kwargs: Any,
) -> int:
    """Check an operator's row on logical sample arguments; return the number of plans that ran.

    ``choices`` are the choices of batched tensors, by their order in the arguments. The default is
    all choices; they contain the first argument if the operator writes it. The batch dims are
    first, last, and anywhere at random.
    """
    row = find(op.name())
    assert row is not None and row.rule is not None, f"{op.name()} has no rule"
    rng = random.Random(seed)
    paths = tensor_paths(args)
    ran = 0
    for choice in choices if choices is not None else subsets(len(paths)):
        if is_inplace(op) and 0 not in choice:
            continue
        chosen = [paths[i] for i in choice]
        ranks = [_at(args, p).dim() for p in chosen]
        layouts = [[0] * len(ranks), ranks, [rng.randint(0, r) for r in ranks]]
        for ats in {tuple(a): a for a in layouts}.values():
            made = plan(args, dict(zip(chosen, ats, strict=True)), batch_size)
            shapes = [tuple(_at(args, p).shape) for p in paths]
            what = f"{op.name()} {shapes} dims {made.dims} {kwargs or ''}"
            ran += run_plan(row, op, made, kwargs, what)
    return ran


@dataclass
class Call:
    """One operator call of a program, with cloned tensors."""

    op: Any
    args: list[Any]
    kwargs: dict[str, Any]

    def key(self) -> str:
        def show(a: Any) -> Any:
            if isinstance(a, Tensor):
                return (tuple(a.shape), a.dtype)
            return [show(x) for x in a] if isinstance(a, (list, tuple)) else a

        return f"{self.op.name()} {show(self.args)} {self.kwargs}"


class Recorder(TorchDispatchMode):
    """A mode that keeps each distinct call, forward and backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, Call] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, list(args), dict(kwargs or {}))
        key = call.key()
        if key not in self.calls:
            call.args = [a.detach() if isinstance(a, Tensor) else a for a in _clone(args)]
            self.calls[key] = call
        return func(*args, **(kwargs or {}))


def _sums(out: Any) -> list[Tensor]:
    leaves = [o for o, _ in _flat(out, None)] if isinstance(out, (list, tuple)) else [out]
    return [
        o.abs().sum() if o.is_complex() else o.sum()
        for o in leaves
        if isinstance(o, Tensor) and o.requires_grad
    ]


def record(fn: Any, *args: Any, backward: bool = True, **kwargs: Any) -> list[Call]:
    """Return the operator calls of ``fn`` and of its backward pass."""
    with Recorder() as seen:
        try:
            out = fn(*args, **kwargs)
            sums = _sums(out) if backward else []
            if sums:
                torch.stack([s.double() for s in sums]).sum().backward()
        except (RuntimeError, NotImplementedError):
            pass  # keep the calls made before the error
    return list(seen.calls.values())


def database_calls(info: Any, dtype: torch.dtype, most: int = 12) -> list[Call]:
    """Return the operator calls of an entry of torch's operator database (``op_db``)."""
    seen: dict[str, Call] = {}
    grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    samples = info.sample_inputs("cpu", dtype, requires_grad=grad)
    for sample in itertools.islice(samples, most):
        for call in record(info.op, sample.input, *sample.args, backward=grad, **sample.kwargs):
            seen.setdefault(call.key(), call)
    return list(seen.values())
