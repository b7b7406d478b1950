"""``dispatch.explain``: what a call would do, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import optree

from tsfunc.dispatch.keys import DispatchKeySet, split_bit
from tsfunc.dispatch.state import global_set, tls
from tsfunc.dispatch.table import Operator, fallthrough, keys_of_arguments, operators_of


@dataclass(frozen=True)
class Step:
    """One bit of the key set: where it came from and what the table holds for it."""

    level: int
    key: str
    sources: tuple[str, ...]
    kernel: str
    registered: str


@dataclass(frozen=True)
class Explanation:
    """The steps of a call, in the order in which its kernels would redispatch."""

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
    the later ones are those it reaches by redispatching.

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
    (operator,) = operators_of(op)
    state = tls.state
    found = _sources(args, kwargs)
    for bits, source in ((state.include, "the include set"), (global_set.bits, "the global set")):
        for level, key in DispatchKeySet.from_bits(bits):
            found.setdefault((level, key.name), []).append(source)
    every = keys_of_arguments(args, kwargs)[0] | state.include | global_set.bits
    kept = every & state.mask
    steps = tuple(_step(operator, bit, found) for bit in _bits_of(kept))
    explanation = Explanation(
        operator.name,
        DispatchKeySet.from_bits(kept),
        DispatchKeySet.from_bits(every & ~state.mask),
        steps,
    )
    print(explanation)
    return explanation


def _bits_of(bits: int) -> list[int]:
    found = []
    while bits:
        found.append(bits.bit_length() - 1)
        bits ^= 1 << found[-1]
    return found


def _sources(args: Any, kwargs: Any) -> dict[tuple[int, str], list[str]]:
    found: dict[tuple[int, str], list[str]] = {}
    accessors, leaves, _ = optree.tree_flatten_with_accessor((args, kwargs), none_is_leaf=True)
    for accessor, leaf in zip(accessors, leaves, strict=True):
        root = "args" if accessor.path[0] == 0 else "kwargs"
        path = optree.PyTreeAccessor(accessor[1:]).codify(root)
        for level, key in DispatchKeySet.from_bits(keys_of_arguments((leaf,), {})[0]):
            found.setdefault((level, key.name), []).append(path)
    return found


def _step(operator: Operator, bit: int, found: dict[tuple[int, str], list[str]]) -> Step:
    level, key = split_bit(bit)
    entry = operator.entry(key)
    if entry is None:
        kernel, registered = "no kernel: an error if reached", ""
    else:
        name = getattr(entry.kernel, "__qualname__", repr(entry.kernel))
        kernel = f"{'fallthrough' if entry.kernel is fallthrough else name} ({entry.kind})"
        registered = f"registered at {entry.site}"
    return Step(level, key.name, tuple(found.get((level, key.name), ["?"])), kernel, registered)
