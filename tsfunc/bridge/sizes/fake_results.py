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
found in the same way (``results_by_example``).

Private names used here (torch 2.11 to 2.13): ``FakeTensorMode``, which works results out, and its
errors for what depends on data; ``DisableTorchFunction``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from tsfunc.bridge.sizes import packed_rules as packed_rules  # registers its rules
from tsfunc.bridge.sizes import result_rules as result_rules  # registers its rules
from tsfunc.bridge.sizes import split_rules as split_rules  # registers its rules
from tsfunc.bridge.sizes import window_rules as window_rules  # registers its rules
from tsfunc.bridge.sizes.elsewhere import Elsewhere, symbols_among
from tsfunc.bridge.sizes.reshape_rules import OTHER_SHAPES
from tsfunc.bridge.sizes.results_by_example import found_by_example
from tsfunc.bridge.sizes.shape_rules import SHAPE_RULES
from tsfunc.bridge.tracers.questions import set_aside
from tsfunc.bridge.tracers.torch_state import kept_keys

_Call = Callable[..., Any]

# What it returns depends on how large the memory behind its arguments is, which is not looked at
# where results are kept (here by torch's mode).
UNKEPT = frozenset({"aten::_new_zeros_with_same_feature_meta"})


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
    # The mode keeps results, which with symbolic sizes takes longer than most of its rules do. It
    # asks nothing where it has one, and it may be one that was wrong.
    keeps = name not in UNKEPT and (env is None or not symbols_among((args, kwargs)))
    if name in SHAPE_RULES:
        with _kept(fake, keeps):
            results = SHAPE_RULES[name](*args, **kwargs)
        if results is not NotImplemented:
            return results
    if env is None or writes:
        with _kept(fake, keeps):
            return call(*args, **kwargs)
    try:
        with set_aside(env) as asked, _kept(fake, keeps):
            results = call(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise
    except Exception:
        elsewhere = Elsewhere(env, call, args, kwargs)
        found = found_by_example(elsewhere, fake)
        if found is None and elsewhere.fix_refused():
            found = found_by_example(elsewhere, fake)
        if found is None:
            raise
        elsewhere.ask_fixed()
        return found
    if not asked:
        return results
    elsewhere = Elsewhere(env, call, args, kwargs)
    elsewhere.keep_needed(asked)
    if not elsewhere.agrees(results):
        results = found_by_example(elsewhere, fake)
    if results is not None:
        elsewhere.ask_needed(multiples=name in OTHER_SHAPES)
        return results
    with _kept(fake, False):
        return call(*args, **kwargs)


@contextmanager
def _kept(fake: FakeTensorMode, keeps: bool) -> Iterator[None]:
    """In the block operators run on fake tensors, whose mode keeps results, or does not."""
    cached, fake.cache_enabled = fake.cache_enabled, fake.cache_enabled and keeps
    try:
        with kept_keys(), DisableTorchFunction(), fake:
            yield
    finally:
        fake.cache_enabled = cached
