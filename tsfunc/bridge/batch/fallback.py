"""Operators without a batching rule: decompositions and the loop over examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch

from tsfunc.bridge.batch.torch_rules import has_torch_rule, run_torch_rule
from tsfunc.bridge.sizes.shape_environment import needed_number
from tsfunc.bridge.tracers.batch_tracer import BatchLevel, unwrap, wrap
from tsfunc.bridge.tracers.decompositions import (
    decomposition_of,
    own_decomposition,
    run_decomposition,
)
from tsfunc.bridge.tracers.generators import GeneratorStates
from tsfunc.bridge.tracers.operators import (
    TorchOperator,
    functional_overload,
    operator_of,
    tensors_in,
)
from tsfunc.bridge.tracers.schemas import overload_of
from tsfunc.dispatch import Operator
from tsfunc.dispatch.recording import note
from tsfunc.dispatch.state import tls
from tsfunc.errors import MissingRuleError, SlowFallbackWarning
from tsfunc.ops.compressed import is_compressed, stack_examples
from tsfunc.ops.dims import refuse_inplace
from tsfunc.ops.philox import Philox
from tsfunc.ops.random import check_randomness
from tsfunc.ops.registry import Args, Kwargs
from tsfunc.ops.splitting import agree_on_results
from tsfunc.user_code import code_location_text, user_location, warn

_DECOMPOSITIONS = "torch._decomp.decompositions"  # the module whose decompositions are used
_WAYS_TO_GIVE_A_RULE = "tsfunc.ops.row, or torch.library.register_vmap for an operator of your own"


def without_rule(op: Operator, level: BatchLevel, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator without a row, by torch's rule, a decomposition or the loop."""
    if isinstance(op, TorchOperator):
        if op.out_names:
            return write_out(op, level, args, kwargs)
        out = run_torch_rule(op, level, args, kwargs)
        if out is not NotImplemented:
            return out
        decomposition = _usable_decomposition(op)
        if decomposition is not None:
            note("decomposition", *_name_and_source(decomposition, op))
            out = run_decomposition(decomposition, level, args, kwargs)
            if out is not NotImplemented:
                return out
    return loop_over_examples(op, level, args, kwargs)


def describe_execution(name: str) -> str:
    """Return a description of how vmap runs an operator that has no row."""
    overload = overload_of(name)
    if overload is None:
        return "not at all: torch has no such operator"
    op = operator_of(overload)
    if op.out_names:
        return "by the form that returns its result, which is then copied"
    if op.overload.namespace != "aten" and has_torch_rule(op):
        return "by the rule that was registered with torch"
    if own_decomposition(name) is not None:
        return "by its parts, as written here"
    if op.composite:
        return "by its parts, as torch composes it"
    if _usable_decomposition(op) is not None:
        return "by torch's decomposition"
    if op.is_view:
        return "not at all: a view can't be looped over"
    return "in a loop over the examples, with a warning"


def write_out(op: TorchOperator, level: BatchLevel, args: Args, kwargs: Kwargs) -> Any:
    """Run an ``out=`` call: call the functional form and copy its results into ``out``.

    Raises:
        MissingRuleError: the operator has no functional form.
        RuntimeError: a result's dtype can't be cast to that of its ``out`` tensor.
    """
    functional_with_names = functional_overload(op)
    if functional_with_names is None:
        raise MissingRuleError(
            f"vmap: {op.name}: there is no form of this operator that returns its result, so out= "
            f"can't be served. Call it without out=."
        )
    functional, options_of_out = functional_with_names
    note("decomposition", f"{functional} and copy_")
    rest = {name: arg for name, arg in kwargs.items() if name not in op.out_names}
    outs = [kwargs[name] for name in op.out_names]
    if options_of_out:  # a factory takes dtype, layout and device from ``out``
        rest |= {name: getattr(outs[0], name) for name in options_of_out}
    form = operator_of(functional)
    results = form.run_at(level, args, rest) if form.random else None
    with level.at_own_level():
        if results is None:
            results = functional(*args, **rest)
        results = [results] if isinstance(results, torch.Tensor) else results
        tensors = outs[0] if isinstance(outs[0], list | tuple) else outs
        for out, result in zip(tensors, results, strict=True):
            _write_result(op, out, result)
    if not op.overload._schema.returns:
        return None
    return outs[0] if len(outs) == 1 else tuple(outs)


def _write_result(op: TorchOperator, out: torch.Tensor, result: torch.Tensor) -> None:
    if not torch.can_cast(result.dtype, out.dtype):
        raise RuntimeError(
            f"vmap: {op.name}: result type {result.dtype} can't be cast to the type of out=, "
            f"{out.dtype}."
        )
    if out.shape != result.shape:
        out.resize_(result.shape)
    out.copy_(result)


def _usable_decomposition(op: TorchOperator) -> Callable[..., Any] | None:
    if (our_decomposition := own_decomposition(op.name)) is not None:
        return our_decomposition
    if op.composite:
        return decomposition_of(op.overload)
    if op.overload.namespace == "prims":
        return _implementation_of(op.overload)
    if op.writes or op.random or op.is_view:
        return None
    from torch._decomp import decomposition_table

    decomposition: Callable[..., Any] | None = decomposition_table.get(op.overload)
    # Decompositions into torch's reference primitives don't help: primitives have no rules.
    return decomposition if getattr(decomposition, "__module__", "") == _DECOMPOSITIONS else None


def _name_and_source(decomposition: Callable[..., Any], op: TorchOperator) -> tuple[str, str]:
    """Return the name and ``file:line`` of a decomposition, as reports show them."""
    if op.composite and own_decomposition(op.name) is None:
        return "torch's own composite", ""
    name = f"{decomposition.__module__}.{decomposition.__name__}"
    return name, code_location_text(decomposition)


def _implementation_of(prim: Any) -> Callable[..., Any] | None:
    """Return the implementation of a torch primitive by torch's own functions."""
    return getattr(prim, "impl_aten", None)


_warned: set[str] = set()


def loop_over_examples(op: Operator, level: BatchLevel, args: Args, kwargs: Kwargs) -> Any:
    """Run the operator once for each example and stack the results.

    Raises:
        MissingRuleError: the level is strict, or the operator can't be looped over: it writes
            ``out=``, returns a view, resizes an argument, gives results of different shapes, or
            the batch has no examples.
    """
    _check_loop(op, level, kwargs)
    strict = _strict_level(level)
    if strict is not None:
        raise MissingRuleError(
            f"{strict.name}: {op.name} has no batching rule for this call, at {user_location()}. "
            f"It would run once for each of {level.batch_size} examples, which strict=True does "
            f"not allow. Give it a rule ({_WAYS_TO_GIVE_A_RULE}), call another operator there, "
            f"or leave out strict=True."
        )
    note("loop", f"one call for each of {level.batch_size} examples")
    if op.name not in _warned and tls.state.recorder is None:
        _warned.add(op.name)
        warn(
            f"There is a performance drop because we have not yet implemented the batching rule "
            f"for {op.name}: vmap runs it once for each of {level.batch_size} examples. "
            f"Give it a rule: {_WAYS_TO_GIVE_A_RULE}.",
            SlowFallbackWarning,
        )
    leaves, tree = optree.tree_flatten((tuple(args), dict(kwargs)), none_is_leaf=True)
    pairs = [unwrap(leaf, level) for leaf in leaves]
    _check_written(op, level, args)
    results = []
    begin = _example_seeder(op, level, kwargs)
    for i in range(needed_number(level.batch_size, _reason(op))):
        begin(i)
        sliced = [v if bdim is None else v.select(bdim, i) for v, bdim in pairs]
        one_args, one_kwargs = optree.tree_unflatten(tree, sliced)
        shapes = _written_shapes(op, one_args)
        results.append(op.outward(*one_args, **one_kwargs))
        if _written_shapes(op, one_args) != shapes:
            raise MissingRuleError(
                f"vmap: {op.name} resizes the tensor that it writes, but all examples of a batch "
                f"have one size. Call the variant of the operator that returns its result."
            )
    begin(None)
    returned = op.returned if isinstance(op, TorchOperator) else ()
    if len(returned) == 1 and returned[0] is not None:
        return args[returned[0]]
    if level.splitter is not None:
        agree_on_results(op, level, results)
    out = _stack(op, level, results)
    if not any(position is not None for position in returned):
        return out
    both = zip(out, returned, strict=True)
    return tuple(part if position is None else args[position] for part, position in both)


def _reason(op: Operator) -> str:
    """Return why a loop needs the number of examples, and the remedy."""
    return (
        f"vmap runs {op.name} once for each example, because it has no batching rule for this "
        f"call, and a program has a fixed number of calls. For one program for every number of "
        f"examples, give it a rule ({_WAYS_TO_GIVE_A_RULE}), or call other operators there."
    )


def _check_written(op: Operator, level: BatchLevel, args: Sequence[Any]) -> None:
    """Raise if the operator writes into an unbatched tensor, which all examples would share."""
    if isinstance(op, TorchOperator) and op.writes:
        for position in op.written:
            for target in tensors_in(args[position : position + 1]):
                if unwrap(target, level)[1] is None:
                    refuse_inplace(op.native)


def _written_shapes(op: Operator, args: Sequence[Any]) -> list[torch.Size]:
    """Return the shapes of the tensors that an operator writes to."""
    if not isinstance(op, TorchOperator) or not op.writes:
        return []
    return [x.shape for position in op.written for x in tensors_in(args[position : position + 1])]


def _example_seeder(
    op: Operator, level: BatchLevel, kwargs: Mapping[str, Any]
) -> Callable[[int | None], None]:
    """Return the function to call before each example of a loop, and with None after the last.

    An operator that draws its own random numbers starts from one generator state for all
    examples (randomness "same"), or from a seed for each example ("split"). See NOTE [random
    numbers of an example] in ``ops/philox``.
    """
    if not (isinstance(op, TorchOperator) and op.random) or level.randomness == "different":
        return lambda i: None
    generator = kwargs.get("generator")
    seeds: list[list[int]] = []
    if level.randomness == "split":
        seeds = Philox(level, torch.device("cpu"), generator).words(2).tolist()
    generators = GeneratorStates(always=True)
    generators.on_random_op(generator)

    def begin(i: int | None) -> None:
        if (not seeds and i is not None) or (i is None and seeds):
            generators.rewind()
        elif i is not None:
            high, low = seeds[i]
            (torch if generator is None else generator).manual_seed((high << 31) + low)

    return begin


def _strict_level(level: BatchLevel) -> BatchLevel | None:
    """Return the level, or else the nearest outer level, that is strict; None without one."""
    for enclosing in (level, *reversed(level.outer.levels)):
        if isinstance(enclosing, BatchLevel) and enclosing.strict:
            return enclosing
    return None


def _check_loop(op: Operator, level: BatchLevel, kwargs: Mapping[str, Any]) -> None:
    if not isinstance(op, TorchOperator):
        return
    if op.out_names or op.is_view:
        raise MissingRuleError(
            f"Batching rule not implemented for {op.name}; the fallback path doesn't work on "
            f"out= or view ops."
        )
    if level.batch_size == 0:
        raise MissingRuleError(
            f"Batching rule not implemented for {op.name}, and a loop over a batch of size 0 "
            f"can't tell the shape of its results (torch.func says: The fallback path does not "
            f"support vmap over dims of size 0)."
        )
    if op.random:
        check_randomness(op, level, kwargs)


def _stack(op: Operator, level: BatchLevel, results: Sequence[Any]) -> Any:
    first = results[0]
    if isinstance(first, torch.Tensor):
        shapes = {tuple(r.shape) for r in results}
        if len(shapes) > 1:
            raise MissingRuleError(
                f"vmap: {op.name}: expected results of one shape for all examples, got "
                f"{sorted(shapes)}."
            )
        together = stack_examples if is_compressed(first) else torch.stack
        return wrap(together(list(results)), 0, level)
    if isinstance(first, list | tuple):
        parts = [_stack(op, level, part) for part in zip(*results, strict=True)]
        return parts if isinstance(first, list) else tuple(parts)
    if any(r != first for r in results):
        raise MissingRuleError(
            f"vmap: {op.name} gave different Python values for different examples. Use a tensor "
            f"operation instead."
        )
    return first
