"""Calls for every row of the registry, made from the schemas of operators.

The trials of the catalogue found which ranks an operator accepts together. Sizes agree, numbers
follow from the names of arguments (``tsfunc/ops/catalogue/trial_arguments.py``), and values are
random. ``registry_examples.py`` has hand-written calls for schemas that do not determine a call.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tests.ops.registry_examples import examples
from tsfunc.ops import lookup
from tsfunc.ops.catalogue.reader import reader
from tsfunc.ops.catalogue.signature import OperatorSignature, functional_form
from tsfunc.ops.catalogue.trial_arguments import (
    TrialParameters,
    arguments,
    tensor_arguments,
    trial_settings,
)

Call = tuple[list[Any], dict[str, Any]]
MOST = 4  # choices of ranks for one operator
_TRIES = 300


def calls(name: str) -> Iterator[Call]:
    """Return arguments for an operator, of which it accepts at least some."""
    given = list(examples(name))
    if given:
        yield from given
        return
    signature = reader().signature(name)
    assert signature is not None, f"torch has no {name}"
    ranks = _ranks(signature)
    for setting in trial_settings(signature) if ranks else ():
        found = list(itertools.islice(_taken(signature, ranks, setting), MOST))
        if found:
            yield from found
            return


def _taken(
    signature: OperatorSignature, ranks: Mapping[str, Sequence[int]], setting: TrialParameters
) -> Iterator[Call]:
    """Return the calls with one setting that the operator accepts."""
    names = [a.name for a in tensor_arguments(signature, setting)]
    allowed = [[r for r in ranks.get(name, range(5)) if r < 5] for name in names]
    for chosen in itertools.islice(_choices(allowed), _TRIES):
        args, kwargs = arguments(signature, dict(zip(names, chosen, strict=True)), setting, draw)
        if _works(signature, args, kwargs):
            yield args, kwargs


def _ranks(signature: OperatorSignature) -> Mapping[str, Sequence[int]]:
    """Return the ranks that the trials accepted for each argument; a variant has those of its form.

    Ranks that no trial accepted are left out: some such calls crash the process.
    """
    evidence = lookup(signature.name).evidence
    if not evidence.tried:
        form = functional_form(signature, reader().overloads)
        evidence = lookup(form.name).evidence if form is not None else evidence
    return evidence.ranks


def _choices(allowed: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Yield ranks for all tensors: 2 for all, then other ranks for all, then all combinations."""
    alike = [(rank,) * len(allowed) for rank in (2, 3, 1, 0, 4)]
    together = [r for r in alike if all(n in ranks for n, ranks in zip(r, allowed, strict=True))]
    seen = set(together)
    yield from together
    for ranks in itertools.product(*allowed):
        if ranks not in seen:
            yield ranks


def draw(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return values in (0, 1), with larger diagonals for floats, or the indices 0 and 1."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2, list(shape)).to(dtype)
    made = torch.rand(list(shape), dtype=torch.float64) * 0.8 + 0.1
    if len(shape) > 1:
        made.diagonal(0, -2, -1).add_(shape[-1])
    return made.to(dtype)


def _works(signature: OperatorSignature, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    assert signature.call is not None
    copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        signature.call(*copies, **kwargs)
        return True
    return False
