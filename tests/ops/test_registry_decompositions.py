"""The law of every differentiable decomposition: it computes the results of its operator.

The calls are those of ``test_registry.py`` and ``test_registry_options.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.harness import overload
from tests.ops.registry_examples import ELSEWHERE, UNTRIED
from tests.ops.test_registry import ROWS, seeded_calls
from tests.ops.test_registry_options import changed_calls
from tsfunc.ops import differentiable_decompositions

# The number of results to compare; the others are for the backward pass alone.
FIRST_RESULTS: Mapping[str, int] = {
    "aten::_linalg_det": 1,
    "aten::_linalg_slogdet": 2,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 1,
}
# Backward operators read results of the forward operator; a decomposition computes them again. The
# calls of these give other results. Calls that fit are in ``test_decompositions.py`` and
# ``test_attention_decompositions.py``.
OF_RESULTS = {
    "aten::batch_norm_backward", "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip


def decompositions() -> dict[str, list[Callable[..., Any]]]:
    """Return the decompositions in all tables, by operator."""
    found: dict[str, list[Callable[..., Any]]] = defaultdict(list)
    for table_name, table in vars(differentiable_decompositions).items():
        if table_name.isupper() and isinstance(table, dict):
            for name, entry in table.items():
                decomposition = entry[0] if isinstance(entry, tuple) else entry
                if decomposition not in found[name]:
                    found[name].append(decomposition)
    return found


DECOMPOSITIONS = decompositions()
TRIED = {*DECOMPOSITIONS} & ROWS - {*ELSEWHERE, *UNTRIED, *OF_RESULTS}


def copied(args: list[Any]) -> list[Any]:
    return [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]


@pytest.mark.filterwarnings("ignore")  # torch warns about deprecated operators
@pytest.mark.parametrize("name", sorted(TRIED))
def test_a_decomposition_computes_the_results_of_its_operator(name: str) -> None:
    op = overload(name)
    calls = [(args, kwargs) for args, kwargs in seeded_calls(name)]
    calls += [changed for args, kwargs in calls for changed in changed_calls(name, args, kwargs)]
    for args, kwargs in calls:
        try:
            expected = op(*copied(args), **kwargs)
        except (RuntimeError, IndexError, TypeError, ValueError):
            continue
        for decomposition in DECOMPOSITIONS[name]:
            out = decomposition(*copied(args), **kwargs)
            if out is NotImplemented:
                continue
            outs, wanted = (x if isinstance(x, (tuple, list)) else [x] for x in (out, expected))
            pairs = list(zip(outs, wanted, strict=True))
            for mine, theirs in pairs[: FIRST_RESULTS.get(name)]:
                if isinstance(mine, Tensor):  # torch may compute gradients that are not needed
                    torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("name", ["_softmax", "_safe_softmax", "_log_softmax", "logsumexp"])
@pytest.mark.parametrize("dim", [0, 1])
def test_exponentials_of_distant_rows_do_not_overflow(name: str, dim: int) -> None:
    """Each row is compared with its own maximum."""
    far = torch.tensor([0.0, 1000.0, -1000.0])
    x = torch.randn(3, 3, dtype=torch.float64) + (far if dim == 0 else far[:, None])
    rest: dict[str, tuple[Any, ...]] = {
        "_softmax": (dim, False), "_log_softmax": (dim, False), "logsumexp": ([dim],),
        "_safe_softmax": (dim,),
    }  # fmt: skip
    expected = overload(f"aten::{name}")(x, *rest[name])
    for decomposition in DECOMPOSITIONS[f"aten::{name}"]:
        torch.testing.assert_close(decomposition(x, *rest[name]), expected)
