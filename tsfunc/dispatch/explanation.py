"""``dispatch.explain``: a report of how a call would be dispatched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree

from tsfunc.dispatch.keys import (
    BACKEND_BITS,
    WIDTH,
    DispatchKeySet,
    declares_its_keys,
    keys_of_arguments,
    split_bit,
)
from tsfunc.dispatch.state import Level, State, global_set, tls
from tsfunc.dispatch.table import Entry, Operator, fallthrough, level_at, operator_for


@dataclass(frozen=True)
class Step:
    """One bit of the key set: its sources and the table's kernel for it.

    Attributes:
        level: the level of the bit, 0 if it belongs to no transform.
        key: the name of the bit's key.
        sources: the arguments, as Python paths, and the sets that the bit comes from.
        kernel: the kernel's name, with "cell", "row" or "column" in brackets.
        registered: the ``file:line`` of the registration, or an empty string without a kernel.
    """

    level: int
    key: str
    sources: tuple[str, ...]
    kernel: str
    registered: str


@dataclass(frozen=True)
class Explanation:
    """The steps of a call, in the order in which its kernels would redispatch.

    Attributes:
        operator: the name of the operator.
        keys: the key set that the call is dispatched on.
        masked: the keys that the exclude set has removed from the key set.
        steps: one step a bit; the call runs the kernel of the first step that does not fall
        through.
    """

    operator: str
    keys: DispatchKeySet
    masked: DispatchKeySet
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        lines = [f"{self.operator}: {self.keys!r}"]
        if self.masked:
            lines.append(f"  excluded: {self.masked!r}")
        for step in self.steps:
            lines.append(f"  {step.key}@{step.level}  from {', '.join(step.sources)}")
            lines.append(f"      -> {step.kernel}  {step.registered}".rstrip())
        return "\n".join(lines)


def explain(op: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Print and return the key set of a call, the source of each bit, and the kernels.

    Nothing is run. The call runs the kernel of the first step that does not fall through. The
    later steps are the kernels that are reached when each kernel calls the operator again on the
    same arguments, under the state that the kernel runs under.

    Args:
        op: an operator, or an object that names one. A function that stands for several overloads
            (``torch.add``) means the overload that takes the arguments.
        args: the arguments of the call; ``kwargs`` are its keyword arguments.

    Raises:
        DispatchError: ``op`` names no operator, or no overload of it takes the arguments.

    Example:
        >>> import torch
        >>> from tsfunc import dispatch
        >>> shout = dispatch.Operator("doc::shout", native=str)
        >>> _ = dispatch.explain(shout, torch.ones(2))  # doctest: +ELLIPSIS
        doc::shout: DispatchKeySet(BackendSelect@0, CPU@0)
          BackendSelect@0  from the global set
              -> fallthrough (column)  ...
          CPU@0  from args[0]
              -> _run_native (column)  ...
    """
    operator = operator_for(op, args, kwargs)
    state = tls.state
    every = keys_of_arguments(args, kwargs)[0] | state.include | global_set.bits
    explanation = Explanation(
        operator.name,
        DispatchKeySet.from_bits(every & state.mask),
        DispatchKeySet.from_bits(every & ~state.mask),
        tuple(_redispatches(operator, args, kwargs)),
    )
    print(explanation)
    return explanation


def _redispatches(
    operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Step]:
    """Yield a step for each bit that the call meets if every kernel redispatches.

    The last step is the kernel of a backend.
    """
    from_arguments = _sources(args, kwargs)
    bits, innermost = keys_of_arguments(args, kwargs)
    state: State | None = tls.state
    while state is not None:
        rest = (bits | state.include | global_set.bits) & state.mask
        now, state = state, None
        while rest:
            bit = rest.bit_length() - 1
            rest ^= 1 << bit
            depth, key = split_bit(bit)
            entry = operator.entry(key)
            level = level_at(depth, innermost, now) if depth else None
            yield Step(
                depth,
                key.name,
                (*from_arguments.get(bit, ()), *_sets_with(bit, now)),
                _kernel(entry, depth, level),
                f"registered at {entry.site}" if entry is not None else "",
            )
            if entry is None or entry.kernel is not fallthrough:
                if entry is not None and not BACKEND_BITS >> bit & 1:
                    state = _next_state(now, bit, level)
                break


def _kernel(entry: Entry | None, depth: int, level: Level | None) -> str:
    if entry is None:
        return "no kernel: an error if reached"
    if entry.kernel is fallthrough:
        return f"fallthrough ({entry.kind})"
    kernel = f"{getattr(entry.kernel, '__qualname__', repr(entry.kernel))} ({entry.kind})"
    if depth and level is None:
        return f"{kernel}, but the level is not active here: an error if reached"
    if level is not None and not level.alive:
        return f"{kernel}, but {level.name} has ended: an error if reached"
    return kernel


def _next_state(state: State, bit: int, level: Level | None) -> State | None:
    """Return the state that the kernel of a bit runs under; None if the kernel does not run."""
    if bit < WIDTH:
        return state.kernel_state(bit)
    return level.kernel_state(bit) if level is not None and level.alive else None


def _sets_with(bit: int, state: State) -> Iterator[str]:
    """Yield the names of the sets, other than the arguments, that have the bit."""
    if state.include >> bit & 1:
        level = state.running
        yield "the include set" + (f" captured by {level.name}" if level is not None else "")
    if global_set.bits >> bit & 1:
        yield "the global set"


def _sources(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, list[str]]:
    """Return the paths of the arguments that each bit comes from."""
    paths: dict[int, list[str]] = {}
    accessors, leaves, _ = optree.tree_flatten_with_accessor(
        (tuple(args), dict(kwargs)), is_leaf=declares_its_keys, none_is_leaf=True
    )
    for accessor, leaf in zip(accessors, leaves, strict=True):
        root = "args" if accessor.path[0] == 0 else "kwargs"
        path = optree.PyTreeAccessor(accessor[1:]).codify(root)
        rest = keys_of_arguments((leaf,), {})[0]
        while rest:
            bit = rest.bit_length() - 1
            rest ^= 1 << bit
            paths.setdefault(bit, []).append(path)
    return paths
