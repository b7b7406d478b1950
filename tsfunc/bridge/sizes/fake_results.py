"""Results of operators on fake tensors with symbolic sizes, with few guards.

NOTE [guards of operators]
torch's fake-tensor rules ask about sizes: whether a kernel is no longer than its input, whether
sizes are equal, how strides are ordered. Most questions only check arguments, which the operator
checks again when the program runs, or choose between ways to the same result; few determine the
result. A question of an operator is therefore first answered for the sizes of the call. The
operator then runs on fake tensors of other, fixed sizes. If its results have the sizes and strides
of the symbolic results there, the question adds no guard. Sizes that the operator refuses prove
nothing, except for the equalities that the operator needs (``equalities``). A question becomes a
requirement on the descriptors only for these equalities, or if the results differ, or if the
operator accepts too few sizes.

If a rule fails because it does not support symbolic sizes, the sizes of the results are found in
the same way (``shape_fitting``).

Private names used here (torch 2.11 to 2.13): ``FakeTensorMode``, which computes results, and its
errors for data-dependent results; ``DisableTorchFunction``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
from tsfunc.bridge.sizes.fake_mode import results_of_fixed_sizes
from tsfunc.bridge.sizes.reshape_rules import OTHER_SHAPES
from tsfunc.bridge.sizes.shape_fitting import fit_shapes
from tsfunc.bridge.sizes.shape_probe import ShapeProbe, symbols_among
from tsfunc.bridge.sizes.shape_rules import RULES_OF_FIXED_SIZES, SHAPE_RULES
from tsfunc.bridge.sizes.write_counts import counting_writes, update_versions
from tsfunc.bridge.tracers.guard_suppression import defer_guards
from tsfunc.bridge.tracers.torch_state import kept_keys

_Call = Callable[..., Any]

# The results of these operators depend on the size of the storage behind an argument, which caches
# of results ignore (here the cache of torch's fake mode).
UNKEPT = frozenset({"aten::_new_zeros_with_same_feature_meta"})


def results_of(
    fake: FakeTensorMode,
    name: str,
    call: _Call,
    writes: bool,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return the results of an operator on fake values: NOTE [guards of operators].

    Args:
        fake: the mode that computes the results.
        name: the name of the operator, which may have a rule in ``shape_rules``.
        call: runs the operator.
        writes: whether the operator writes to an argument.
        args, kwargs: fake values.
    """
    env = fake.shape_env
    # With symbolic sizes the cache of the mode is not used: a look-up takes longer than most
    # rules, and a hit asks no question and may be wrong.
    symbolic = env is not None and bool(symbols_among((args, kwargs)))
    keeps = name not in UNKEPT and not symbolic
    if not symbolic and name not in RULES_OF_FIXED_SIZES:
        results = results_of_fixed_sizes(fake, call, args, kwargs)
        if results is not NotImplemented:
            return results
    update_versions(args)
    if name in SHAPE_RULES:
        with _kept(fake, keeps):
            results = SHAPE_RULES[name](*args, **kwargs)
        if results is not NotImplemented:
            return results
    if env is None or writes:
        with _kept(fake, keeps), counting_writes(args) if writes else nullcontext():
            return call(*args, **kwargs)
    try:
        with defer_guards(env) as questions, _kept(fake, keeps):
            results = call(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise
    except Exception:
        probe = ShapeProbe(env, call, args, kwargs)
        found = fit_shapes(probe, fake)
        if found is None and probe.fix_refused():
            found = fit_shapes(probe, fake)
        if found is None:
            raise
        probe.ask_fixed()
        return found
    if not questions:
        return results
    probe = ShapeProbe(env, call, args, kwargs)
    probe.keep_needed(questions)
    if not probe.agrees(results):
        results = fit_shapes(probe, fake)
    if results is not None:
        probe.ask_needed(multiples=name in OTHER_SHAPES)
        return results
    with _kept(fake, False):
        return call(*args, **kwargs)


@contextmanager
def _kept(fake: FakeTensorMode, keeps: bool) -> Iterator[None]:
    """Run operators on fake tensors in a block, with or without the mode's cache."""
    cached, fake.cache_enabled = fake.cache_enabled, fake.cache_enabled and keeps
    try:
        with kept_keys(), DisableTorchFunction(), fake:
            yield
    finally:
        fake.cache_enabled = cached
