"""Trial calls of an operator at ranks 0 to 6, to observe its effect on dims.

Every tensor has the same size in all dims, so an error is about the rank. Some operators crash the
process instead of raising (``aten::_chunk_cat`` on tensors without dims). torch's operators are
therefore tried in a separate process (``python -m tools.catalogue``). Custom operators are tried
on meta tensors, which run only their fake kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tsfunc.ops.catalogue.signature import OperatorSignature
from tsfunc.ops.catalogue.trial_arguments import (
    TrialParameters,
    arguments,
    tensor_arguments,
    trial_settings,
)

RANKS = range(7)
_AT_ONE_SETTING = 400  # calls
_IN_ALL = {"cpu": 10_000, "meta": 2_000}  # without a fake kernel every call fails


@dataclass(frozen=True)
class Evidence:
    """The result of the trial calls of an operator.

    Attributes:
        ranks: for each tensor argument, the ranks that succeeded together with some ranks of the
            others; empty if no call succeeded.
        together: True if all tensors can have one shape, at every rank that the first one accepts.
        same: True if the result then has that shape, for any sizes.
        broadcasts: True if the arguments broadcast against each other.
        elements: how values depend on the first argument: ``copied`` from it, ``ignored``,
            ``apart`` (each element separately), ``mixed``; empty if not tried.
    """

    ranks: dict[str, list[int]] = field(default_factory=dict)
    together: bool = False
    same: bool = False
    broadcasts: bool = False
    elements: str = ""

    @property
    def tried(self) -> bool:
        """True if any call succeeded."""
        return bool(self.ranks)

    def every_rank(self, name: str) -> bool:
        """True if an argument can have any rank."""
        return self.ranks.get(name) == list(RANKS)

    def in_words(self) -> str:
        """Return a text such as ``self 0-6, other 0-6; together same broadcasts apart``.

        The text is empty if no call succeeded.
        """
        if not self.tried:
            return ""
        ranks = ", ".join(f"{name} {_spans(taken)}" for name, taken in self.ranks.items())
        marks = [mark for mark in ("together", "same", "broadcasts") if getattr(self, mark)]
        return f"{ranks}; {' '.join([*marks, self.elements])}".rstrip("; ")

    @staticmethod
    def parse(words: str) -> Evidence:
        """Parse the result of :meth:`in_words`."""
        if not words:
            return Evidence()
        ranks, _, rest = words.partition(";")
        marks = set(rest.split())
        ranks_by_name = dict(part.strip().split(" ", 1) for part in ranks.split(","))
        return Evidence(
            {name: _ranks(spans) for name, spans in ranks_by_name.items()},
            "together" in marks,
            "same" in marks,
            "broadcasts" in marks,
            next(iter(marks - {"together", "same", "broadcasts"}), ""),
        )


def _spans(ranks: Sequence[int]) -> str:
    """Return ``[0, 1, 2, 4]`` as ``0-2 4``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return " ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _ranks(spans: str) -> list[int]:
    ranks: list[int] = []
    for span in spans.split():
        first, _, last = span.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


def result_tensors(results: Any) -> list[torch.Tensor]:
    """Return the tensors among results, in order."""
    if isinstance(results, torch.Tensor):
        return [results]
    if isinstance(results, (list, tuple)):
        return [t for item in results for t in result_tensors(item)]
    return []


class Trial:
    """Trial calls of one operator on one device."""

    def __init__(self, signature: OperatorSignature, device: str) -> None:
        self.signature = signature
        self.device = device
        self.calls = 0

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return zeros, which are valid indices.

        Float matrices get a diagonal of ones, to be invertible.
        """
        tensor = torch.zeros(list(shape), dtype=dtype, device=self.device)
        if len(shape) > 1 and (dtype.is_floating_point or dtype.is_complex):
            tensor.diagonal(0, -2, -1).fill_(1)
        return tensor

    def call(self, ranks: dict[str, int], setting: TrialParameters) -> Any:
        """Return the results of a call, or None if it raises."""
        try:
            args, kwargs = arguments(self.signature, ranks, setting, self.make)
            return self.run(args, kwargs)
        except Exception:
            return None

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        assert self.signature.call is not None
        self.calls += 1
        out = self.signature.call(*args, **kwargs)
        return () if out is None else out

    def evidence(self) -> Evidence:
        for setting in trial_settings(self.signature):
            taken = list(self.taken(setting))
            if taken or self.calls > _IN_ALL[self.device]:
                break
        return self.summary(setting, taken) if taken else Evidence()

    def taken(self, setting: TrialParameters) -> Iterator[tuple[dict[str, int], Any]]:
        """Yield each combination of ranks that succeeds, with the results of the call."""
        names = [a.name for a in tensor_arguments(self.signature, setting)]
        for ranks in itertools.islice(_choices(len(names)), _AT_ONE_SETTING):
            chosen = dict(zip(names, ranks, strict=True))
            out = self.call(chosen, setting)
            if out is not None:
                yield chosen, out

    def summary(
        self, setting: TrialParameters, taken: list[tuple[dict[str, int], Any]]
    ) -> Evidence:
        names = list(taken[0][0])
        ranks = {name: sorted({chosen[name] for chosen, _ in taken}) for name in names}
        alike = {next(iter(c.values())) for c, _ in taken if c and len(set(c.values())) == 1}
        together = bool(names) and alike >= set(ranks[names[0]])
        return Evidence(
            ranks,
            together,
            together and all(self.keeps(names, rank, setting) for rank in alike),
            len(names) > 1 and self.broadcasts(names, setting),
            self.elements(names, setting) if together and self.device != "meta" else "",
        )

    def on(
        self, shapes: Mapping[str, Sequence[int]], setting: TrialParameters
    ) -> list[torch.Tensor]:
        """Return the result tensors for arguments of these shapes.

        The list is empty if the call raises.
        """
        rest = iter(shapes.values())

        def make(_: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            return self.make(next(rest), dtype)

        ranks = {name: len(shape) for name, shape in shapes.items()}
        try:
            return result_tensors(self.run(*arguments(self.signature, ranks, setting, make)))
        except Exception:
            return []

    def keeps(self, names: Sequence[str], rank: int, setting: TrialParameters) -> bool:
        """True if arguments of one shape, its sizes all different, give results of that shape."""
        shape = [2, 3, 4, 5, 6, 7][:rank]
        results = self.on(dict.fromkeys(names, shape), setting)
        return bool(results) and all(list(t.shape) == shape for t in results)

    def broadcasts(self, names: Sequence[str], setting: TrialParameters) -> bool:
        """True if a row and columns give a matrix, for a row in each of the arguments."""
        for i in range(len(names)):
            shapes = {name: [1, 3] if j == i else [2, 1] for j, name in enumerate(names)}
            results = self.on(shapes, setting)
            if not results or any(list(t.shape) != [2, 3] for t in results):
                return False
        return True

    def elements(self, names: Sequence[str], setting: TrialParameters) -> str:
        """Return how elements of the first result depend on elements of the first argument."""
        base = torch.tensor([[0.1, -1.3, 2.6], [-0.4, 1.7, -2.2]])

        def result(x: torch.Tensor) -> torch.Tensor | None:
            first = True

            def make(_: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
                nonlocal first
                chosen, first = (x if first else base), False
                return chosen.to(dtype).clone()

            torch.manual_seed(0)
            try:
                args = arguments(self.signature, dict.fromkeys(names, 2), setting, make)
                results = result_tensors(self.run(*args))
            except Exception:
                return None
            return results[0] if results and results[0].shape == base.shape else None

        before = result(base)
        if before is None or before.layout is not torch.strided:
            return ""
        if before.dtype == torch.float32 and torch.equal(before, base):
            return "copied"
        touched = [[1, 1], [0, 2], [1, 0]]
        apart, moved = True, False
        for i, j in touched:
            changed = base.clone()
            changed[i, j] = -changed[i, j] * 1.25
            after = result(changed)
            if after is None:
                return ""
            different = ~torch.isclose(before, after, rtol=0, atol=0, equal_nan=True)
            moved = moved or bool(different.any())
            different[i, j] = False
            apart = apart and not bool(different.any())
        return "mixed" if not apart else "apart" if moved else "ignored"


def _choices(count: int) -> Iterator[tuple[int, ...]]:
    """Yield ranks for ``count`` tensors: equal ranks first, then other combinations."""
    if count == 0:
        yield ()
        return
    seen = set()
    alike = ((rank,) * count for rank in RANKS)
    if count <= 3:
        rest: Iterator[tuple[int, ...]] = itertools.product(RANKS, repeat=count)
    else:
        pairs = itertools.product(RANKS, range(5))
        rest = (r for a, b in pairs for r in ((a, *[b] * (count - 1)), (a, a, *[b] * (count - 2))))
    for ranks in itertools.chain(alike, rest):
        if ranks not in seen:
            seen.add(ranks)
            yield ranks
