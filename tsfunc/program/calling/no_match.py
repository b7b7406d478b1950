"""The error text for a call that no program serves, if no program can be made for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optree

from tsfunc.program.calling.cache import CachedProgram
from tsfunc.program.calling.cache_miss import CacheMiss
from tsfunc.program.calling.retrace_reasons import differing_facts, reason_for
from tsfunc.program.guarding.call_spec import (
    CallSpec,
    arguments_text,
    facts_of_call,
    guards_on_arguments,
    names_in_call,
)
from tsfunc.program.guarding.inputs import sizes_of_call, tensor_inputs

_MOST_LISTED = 12


def explain_miss(call: CacheMiss, entries: Sequence[CachedProgram]) -> str:
    """Return the difference of a call from the nearest program's calls, and a list of programs."""
    inputs, _ = tensor_inputs(call.flat, call.argument_paths, call.contract, call.bindings)
    facts = call.facts(inputs)
    call_specs = [entry.call_spec for entry in entries]
    facts_of_programs = [_facts(call_spec, call, facts) for call_spec in call_specs]
    sizes = sizes_of_call(inputs)
    broken = [
        fact
        for call_spec, others in zip(call_specs, facts_of_programs, strict=True)
        if not differing_facts(facts, others)
        for guard in call_spec.failing_guards(call.flat, sizes)
        for fact in guard.texts(call.name_of)
    ]
    if broken:
        unlike = " and ".join(f"{fact} does not hold" for fact in dict.fromkeys(broken))
    else:
        unlike = (
            f"it differs from the nearest that has one in {reason_for(facts, facts_of_programs)}"
        )
    kinds = list(dict.fromkeys(entry.reason for entry in entries))
    listed = "".join(f"  {kind}\n" for kind in kinds[:_MOST_LISTED])
    if len(kinds) > _MOST_LISTED:
        listed += f"  and {len(kinds) - _MOST_LISTED} more\n"
    return f"{unlike}. It has programs for:\n{listed}"


def _facts(call_spec: CallSpec, call: CacheMiss, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the facts of a program's calls; a fact that may vary is taken from the call."""
    args, kwargs = optree.tree_unflatten(call_spec.tree, call_spec.leaves)
    leaves = list(call_spec.leaves)
    for spec in call_spec.numbers if call_spec.tree == call.tree else ():
        if spec.admits(call.flat[spec.position]):
            leaves[spec.position] = call.flat[spec.position]
    facts_of_program = facts_of_call(
        guards_on_arguments(leaves, call_spec.inputs),
        names_in_call(call_spec, call.target.signature),
        call_spec.settings,
        call_spec.key_orders,
        arguments_text(len(args), kwargs),
        call.target.bound(args, kwargs),
    )
    if not any(spec.any_grad for spec in call_spec.inputs):
        return facts_of_program
    return {name: facts.get(name, value) if name.endswith(".requires_grad") else value
            for name, value in facts_of_program.items()}  # fmt: skip
