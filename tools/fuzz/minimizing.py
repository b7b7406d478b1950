"""Minimize a failing program while it fails in the same way.

A step removes a transform, a call, a statement, an option or the statements of a block, or makes a
size smaller. A change is kept if the verdict has the same kind and the same cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tools.fuzz.program import NAME, Leaf, Program, Statement, statements
from tools.fuzz.running import Verdict

Fails = Callable[[Program], bool]


def minimized(
    program: Program, verdict: Verdict, run: Callable[[Program], Verdict], most: int = 300
) -> Program:
    """Return the smallest program found that fails like ``verdict``, in at most ``most`` runs."""
    left = most

    def fails(candidate: Program) -> bool:
        nonlocal left
        left -= 1
        found = run(candidate)
        return (found.kind, found.cause) == (verdict.kind, verdict.cause)

    changed = True
    while changed and left > 0:
        changed = False
        for step in _STEPS:
            again = True
            while again and left > 0:
                again = False
                for candidate in step(program):
                    if left <= 0:
                        break
                    if fails(candidate):
                        program, again, changed = candidate, True, True
                        break
    return program


# ---- Steps -------------------------------------------------------------------------------------


def _fewer_calls(program: Program) -> Iterator[Program]:
    if len(program.calls) > 1:
        for i in range(len(program.calls)):
            around = program.circumstances
            yield program.with_(
                calls=program.calls[:i] + program.calls[i + 1 :],
                circumstances=around[:i] + around[i + 1 :],
            )


def _plainer_calls(program: Program) -> Iterator[Program]:
    for i, around in enumerate(program.circumstances):
        if around:
            fewer = (*program.circumstances[:i], "", *program.circumstances[i + 1 :])
            yield program.with_(circumstances=fewer)


def _fewer_transforms(program: Program) -> Iterator[Program]:
    for i in reversed(range(len(program.tower))):
        yield program.with_(tower=program.tower[:i] + program.tower[i + 1 :])


def _plainer_transforms(program: Program) -> Iterator[Program]:
    for i, step in enumerate(program.tower):
        simpler = []
        for k in range(len(step.options)):
            simpler.append(replace(step, options=step.options[:k] + step.options[k + 1 :]))
        if step.form:
            simpler.append(replace(step, form=""))
        if len(step.argnums) > 1:
            simpler += [replace(step, argnums=(a,)) for a in step.argnums]
        if step.kind in ("grad_and_value", "value_and_grad"):
            simpler.append(replace(step, kind="grad"))
        for k, dim in enumerate(step.mapped):
            others = [d for j, d in enumerate(step.mapped) if j != k]
            if dim is not None and any(d is not None for d in others):
                simpler.append(
                    replace(step, mapped=(*step.mapped[:k], None, *step.mapped[k + 1 :]))
                )
            if dim not in (None, 0):
                simpler.append(replace(step, mapped=(*step.mapped[:k], 0, *step.mapped[k + 1 :])))
        if step.sizes and max(step.sizes) > 2:
            simpler.append(replace(step, sizes=tuple(min(s, 2) for s in step.sizes)))
            simpler.append(replace(step, sizes=tuple(min(s, 3) for s in step.sizes)))
        for new in simpler:
            if new != step:
                yield program.with_(tower=(*program.tower[:i], new, *program.tower[i + 1 :]))


def _fewer_statements(program: Program) -> Iterator[Program]:
    inside = "".join(s.text for s in statements(program.body))
    for body in _smaller_bodies(program.outside, inside):
        yield program.with_(outside=body)
    for body in _smaller_bodies(program.body, program.result):
        yield program.with_(body=body)


def _smaller_bodies(body: tuple[Statement, ...], result: str) -> Iterator[tuple[Statement, ...]]:
    """Yield the body without one statement, or with a simpler one in its place."""
    for i in reversed(range(len(body))):
        statement = body[i]
        rest = body[:i] + body[i + 1 :]
        target = statement.target
        used = target is not None and (
            any(target in s.reads for s in body[i + 1 :]) or target in NAME.findall(result)
        )
        if not used:
            yield rest
            continue
        for source in _operands(statement, any(s.target is None for s in body)):
            yield (
                *body[:i],
                Statement(f"{target} = {source}", statement.construct),
                *body[i + 1 :],
            )
    for i, statement in enumerate(body):
        for k, block in enumerate(statement.blocks):
            for smaller in _smaller_bodies(block.body, block.result):
                blocks = list(statement.blocks)
                blocks[k] = replace(block, body=smaller)
                yield (*body[:i], replace(statement, blocks=tuple(blocks)), *body[i + 1 :])


def _operands(statement: Statement, written: bool) -> Iterator[str]:
    """Yield simpler expressions for the statement; copies if its value is written into."""
    text = statement.text.split(" = ", 1)[1]
    for name in dict.fromkeys(re.findall(r"\b[xvcpq]\d+\b", text)):
        simple = f"{name}.clone()" if written else name
        if text not in (simple, name):
            yield simple
    if not text.startswith("torch.ones(()"):
        yield "torch.ones((), dtype=torch.float64)"


def _inlined(program: Program) -> Iterator[Program]:
    """Replace the name of a copy by the name that it copies."""
    for i, statement in enumerate(program.body):
        match = re.fullmatch(r"([a-z]+\d+) = ([a-z]+\d+)", statement.text)
        if match:
            old, new = match.groups()
            pattern = re.compile(rf"\b{old}\b")
            body = tuple(
                _renamed(s, pattern, new) for s in program.body[:i] + program.body[i + 1 :]
            )
            yield program.with_(body=body, result=pattern.sub(new, program.result))


def _renamed(statement: Statement, pattern: re.Pattern[str], new: str) -> Statement:
    blocks = tuple(
        replace(
            block,
            body=tuple(_renamed(s, pattern, new) for s in block.body),
            result=pattern.sub(new, block.result),
        )
        for block in statement.blocks
    )
    return replace(statement, text=pattern.sub(new, statement.text), blocks=blocks)


def _simpler_results(program: Program) -> Iterator[Program]:
    names = [n for n in dict.fromkeys(NAME.findall(program.result)) if n[0] in "xvc"]
    for name in names:
        if program.result != name:
            yield program.with_(result=name)
    for statement in reversed(program.body):
        if statement.target and statement.target != program.result and len(names) == 1:
            later = program.body[program.body.index(statement) + 1 :]
            if any(s.target == program.result for s in later):
                yield program.with_(result=statement.target)


def _fewer_parameters(program: Program) -> Iterator[Program]:
    every = (*program.outside, *program.body)
    mentioned = set(NAME.findall(program.result)).union(*(s.reads for s in every))
    for i, (name, _) in enumerate(program.captured):
        if name not in mentioned:
            yield program.with_(captured=program.captured[:i] + program.captured[i + 1 :])
    at = 0
    for i, parameter in enumerate(program.params):
        count = len(parameter.leaves)
        if len(program.params) > 1 and parameter.name not in mentioned:
            tower = []
            for step in program.tower:
                mapped = step.mapped[:at] + step.mapped[at + count :]
                argnums = tuple(a - (a > i) for a in step.argnums if a != i)
                if (step.argnums and not argnums) or (
                    step.mapped and all(d is None for d in mapped)
                ):
                    break
                options = tuple((k, v) for k, v in step.options if k != "descriptors")
                tower.append(replace(step, mapped=mapped, argnums=argnums, options=options))
            else:
                yield program.with_(
                    params=program.params[:i] + program.params[i + 1 :], tower=tuple(tower)
                )
        at += count


def _plainer_leaves(program: Program) -> Iterator[Program]:
    for i, parameter in enumerate(program.params):
        for k, leaf in enumerate(parameter.leaves):
            for new in _simpler_leaf(leaf):
                leaves = (*parameter.leaves[:k], new, *parameter.leaves[k + 1 :])
                params = list(program.params)
                params[i] = replace(parameter, leaves=leaves)
                yield program.with_(params=tuple(params))
    for i, (name, leaf) in enumerate(program.captured):
        for new in _simpler_leaf(leaf):
            captured = list(program.captured)
            captured[i] = (name, new)
            yield program.with_(captured=tuple(captured))


def _simpler_leaf(leaf: Leaf) -> Iterator[Leaf]:
    if leaf.layout != "dense":
        yield replace(leaf, layout="dense")
    for i, size in enumerate(leaf.shape):
        for smaller in (1, 2, 3):
            if smaller < size:
                yield replace(leaf, shape=(*leaf.shape[:i], smaller, *leaf.shape[i + 1 :]))


_STEPS = (
    _fewer_calls,
    _plainer_calls,
    _fewer_transforms,
    _simpler_results,
    _fewer_statements,
    _inlined,
    _fewer_parameters,
    _plainer_transforms,
    _plainer_leaves,
)
