"""``dispatch.explain``: what a call would do, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree

from tsfunc.dispatch.arguments import keys_of_arguments, speaks_for_itself
from tsfunc.dispatch.keys import BACKEND_BITS, WIDTH, DispatchKeySet, split_bit
from tsfunc.dispatch.state import Level, State, global_set, tls
from tsfunc.dispatch.table import Entry, Operator, fallthrough, level_at, operator_for


@dataclass(frozen=True)
class Step:
    """One bit of the key set: where it came from and what the table holds for it.

    Attributes:
        level: the level of the bit, 0 where it belongs to no transform.
        key: the name of its key.
        sources: the arguments, as Python paths, and the sets that it came from.
        kernel: the kernel's name, and in brackets whether it is the cell's, row's or column's.
        registered: where, or the empty string without a kernel.
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
        operator: the name of the operator that the call means.
        keys: the key set that the call is dispatched by.
        masked: what the exclude set has taken out of it.
        steps: the first that does not fall through is what the call runs.
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
    """Prints and returns the key set of a call, where each bit comes from, and its kernels.

    Nothing is run. The first step that does not fall through is the kernel that the call runs;
    the later ones are those that are reached when each kernel calls the operator again on the
    same arguments, under the state that it runs under.

    Args:
        op: an operator, or what names one. A function that stands for several overloads
            (``torch.add``) means the one that takes the arguments.
        args: the arguments of the call, and ``kwargs`` its keyword arguments.

    Raises:
        DispatchError: ``op`` names no operator, or several of which none takes the arguments.

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
        tuple(_steps(operator, args, kwargs)),
    )
    print(explanation)
    return explanation


def _steps(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Step]:
    """Yield a step for each bit that the call meets if every kernel redispatches.

    A backend's kernel is the last one.
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
    """What the kernel of a bit runs under; None where it does not run."""
    if bit < WIDTH:
        return state.below(bit)
    return level.kernel_state(bit) if level is not None and level.alive else None


def _sets_with(bit: int, state: State) -> Iterator[str]:
    """Which of the sets beside the arguments have the bit."""
    if state.include >> bit & 1:
        level = state.running
        yield "the include set" + (f" captured by {level.name}" if level is not None else "")
    if global_set.bits >> bit & 1:
        yield "the global set"


def _sources(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, list[str]]:
    """The paths of the arguments that each bit comes from."""
    found: dict[int, list[str]] = {}
    accessors, leaves, _ = optree.tree_flatten_with_accessor(
        (tuple(args), dict(kwargs)), is_leaf=speaks_for_itself, none_is_leaf=True
    )
    for accessor, leaf in zip(accessors, leaves, strict=True):
        root = "args" if accessor.path[0] == 0 else "kwargs"
        path = optree.PyTreeAccessor(accessor[1:]).codify(root)
        rest = keys_of_arguments((leaf,), {})[0]
        while rest:
            bit = rest.bit_length() - 1
            rest ^= 1 << bit
            found.setdefault(bit, []).append(path)
    return found
