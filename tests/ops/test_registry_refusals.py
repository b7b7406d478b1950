"""The law of every row for calls that its operator refuses: its rule refuses them as torch does.

The calls are those of ``test_registry.py``, with a tensor that has one dim less or one more, or
twice the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from tests.ops.harness import SIZE, Level, is_inplace, overload, plan
from tests.ops.test_registry import APART, ROWS, seeded_calls
from tsfunc.ops import all_rows

# Internal operators of torch do not check their arguments: some crash the process.
INNER = {name for name in ROWS if "::_" in name or "backward" in name or "embedding_bag" in name}
ERRORS = (RuntimeError, IndexError, TypeError, ValueError)
REFUSED = "Inside of vmap, "


def refused_calls(name: str) -> Iterator[tuple[list[Any], dict[str, Any], Exception, int]]:
    """Yield calls that torch refuses for the shape of one tensor, its error, and that tensor."""
    args, kwargs = seeded_calls(name)[0]
    for i, x in enumerate(args):
        if not isinstance(x, Tensor) or x.requires_grad:
            continue
        others = [x.unsqueeze(0)]
        if x.dim() and x.numel():
            others += [x.select(0, 0), x.repeat_interleave(2, -1)]
        for other in others:
            changed = [*args[:i], other.clone(), *args[i + 1 :]]
            try:
                overload(name)(
                    *(a.clone() if isinstance(a, Tensor) else a for a in changed), **kwargs
                )
            except ERRORS as error:
                yield changed, kwargs, error, i


@pytest.mark.filterwarnings("ignore")  # torch warns about deprecated operators
@pytest.mark.parametrize("name", sorted(ROWS - APART - INNER))
def test_a_rule_refuses_as_its_operator_does(name: str) -> None:
    op, row = overload(name), all_rows()[name]
    assert row.rule is not None
    for args, kwargs, error, changed in refused_calls(name):
        tensors = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        for which in {tuple(tensors), (changed,)}:
            if is_inplace(op) and 0 not in which:
                continue
            made = plan(args, dict.fromkeys(((i, None) for i in which), 0), SIZE)
            what = f"{[tuple(args[i].shape) for i in tensors]}, batched {which}: {error}"
            try:
                row.rule(op, Level(), made.dims, made.args, kwargs)
            except Exception as raised:
                # A Python error would be a failure of the rule itself.
                assert isinstance(raised, (type(error), RuntimeError, IndexError, ValueError)), what
                if REFUSED in str(raised):
                    assert type(raised) is type(error), what
                    said, own = (str(e).partition("\n")[0] for e in (raised, error))
                    assert said == own or not said, what
