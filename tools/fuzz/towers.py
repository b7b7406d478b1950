"""Draw towers of transforms around a function."""

from __future__ import annotations

import random

from tools.fuzz import reference
from tools.fuzz.circumstances import CHANGES, PLAIN, draw_circumstances
from tools.fuzz.program import NAME, SHARED, Parameter, Program, Transform
from tools.fuzz.running import results
from tools.fuzz.work import TooMuchWorkError

_KINDS = {
    "vmap": 9,
    "grad": 3,
    "grad_and_value": 1,
    "value_and_grad": 1,
    "vjp": 2,
    "jvp": 3,
    "jacrev": 2,
    "jacfwd": 2,
    "hessian": 1,
    "linearize": 2,
    "checkpoint": 3,
    "functional_call": 2,
    "specialize": 6,
}
_DERIVATIVES = frozenset(_KINDS) - {"vmap", "checkpoint", "functional_call", "specialize"}
_ORDER = {"hessian": 2}
_MOST_ORDER = 3
# The largest number of Jacobian entries for each value of the function; bounds the size of a
# result.
_JACOBIANS = frozenset({"jacrev", "jacfwd", "hessian"})
# The phases of the calls: the first call makes a plan, the second one records a recipe.
_CALLS = ((0, 0, 0, 0), (0, 1, 0, 1), (0, 0, 1, 1, 0), (0, 1, 2, 0, 1, 2), (0, 0, 0, 1, 2))
BATCH_SIZES = (6, 7, 2, 3, 1, 0)


def draw_tower(rng: random.Random, program: Program, inductor: bool = False) -> Program:
    """Return the program with a tower of one to four transforms, and its calls."""
    depth = rng.choice([1, 1, 2, 2, 3, 3, 4])
    floats = [
        i
        for i, p in enumerate(program.params)
        if not p.written
        and not p.has_none
        and all(leaf.kind in ("float", "single") for leaf in p.leaves)
    ]
    # A checkpoint repeats writes into arguments, examples that share memory see each other's, and
    # the interpreter differentiates by copies.
    written = any(p.written for p in program.params)
    leaves = [leaf for p in program.params for leaf in p.leaves]
    without = {"checkpoint"} if written else set()
    if written and any(leaf.layout == SHARED for leaf in leaves):
        without |= {"vmap", *_DERIVATIVES}
    tower: list[Transform] = []
    order = jacobians = 0
    while len(tower) < depth:
        kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
        if kind in without:
            continue
        if kind in _DERIVATIVES:
            if not floats or order + _ORDER.get(kind, 1) > _MOST_ORDER:
                continue
            if kind in _JACOBIANS and jacobians + _ORDER.get(kind, 1) > 2:
                continue
            order += _ORDER.get(kind, 1)
            jacobians += (kind in _JACOBIANS) * _ORDER.get(kind, 1)
            chosen = rng.sample(floats, rng.choice([1, 1, min(2, len(floats))]))
            options = []
            if kind in ("jacrev", "jacfwd") and rng.random() < 0.2:
                name = "chunk_size" if kind == "jacrev" else None
                options = [(name, "2")] if name else []
            if kind != "hessian" and rng.random() < 0.2:
                options.append(("has_aux", "True"))
            tower.append(Transform(kind, argnums=tuple(sorted(chosen)), options=tuple(options)))
        elif kind == "vmap":
            tower.append(_vmap(rng, program, tuple(tower)))
        elif kind == "functional_call":
            first = program.params[0]
            if first.is_container or first.leaves[0].kind != "float":
                continue
            if any(step.kind == kind for step in tower):
                continue
            tower.append(Transform(kind, form=rng.choice(["", "buffers"])))
        elif kind == "specialize":
            tower.append(_specialize(rng, program, tuple(tower), inductor))
        else:
            tower.append(Transform(kind))
    calls = rng.choice(_CALLS)
    return surrounded(rng, _resized(rng, program.with_(tower=tuple(tower), calls=calls)))


def surrounded(rng: random.Random, program: Program) -> Program:
    """Return the program with circumstances for those calls that the reference can compute."""
    options = {option for step in program.tower for option in step.options}
    frozen = ("closure", '"freeze"') in options
    modules = any(step.kind == "functional_call" for step in program.tower)
    drawn = draw_circumstances(rng, len(program.calls), frozen, modules)
    for kind in CHANGES & set(drawn):
        calls = [i for i, own in enumerate(drawn) if own == kind]
        some = program.with_(
            calls=tuple(program.calls[i] for i in calls), circumstances=(kind,) * len(calls)
        )
        try:
            results(some, reference)
        except TooMuchWorkError:
            raise
        except Exception:
            drawn = tuple(PLAIN if own == kind else own for own in drawn)
    return program.with_(circumstances=drawn)


def _resized(rng: random.Random, program: Program) -> Program:
    """Return the program with other example sizes in later calls, if it accepts them."""
    described = any(key == "descriptors" for step in program.tower for key, _ in step.options)
    if max(program.calls) == 0 or not described or rng.random() < 0.3:
        return program
    sizes = {size for p in program.params for leaf in p.leaves for size in leaf.shape if size > 1}
    larger = program.with_(sizes=tuple((size, size + 4) for size in sorted(sizes)))
    try:
        results(larger, reference)
    except Exception:
        return program
    return larger


def _leaves(program: Program) -> int:
    return sum(len(p.leaves) for p in program.params)


def _vmap(rng: random.Random, program: Program, below: tuple[Transform, ...]) -> Transform:
    ranks = [
        len(leaf.shape) + sum(s.kind == "vmap" and s.mapped[at] is not None for s in below)
        for at, leaf in enumerate(leaf for p in program.params for leaf in p.leaves)
    ]
    mapped: list[int | None] = []
    written = [p.written for p in program.params for _ in p.leaves]
    for rank, every in zip(ranks, written, strict=True):
        where = rng.random()
        if where < 0.2 and not every:
            mapped.append(None)
        elif where < 0.4:
            mapped.append(0)
        else:
            mapped.append(rng.randrange(-rank - 1, rank + 1))
    if all(dim is None for dim in mapped):
        mapped[rng.randrange(len(mapped))] = rng.randrange(-1, 1)
    pool = [6, 7, 2, 3] if rng.random() < 0.85 else [1, 0, 5]
    first = rng.choice(pool)
    sizes = (first, rng.choice([first, 4, 3, 2]), rng.choice([first, 5, 2]))
    options: list[tuple[str, str]] = []
    if rng.random() < 0.3:
        options.append(("out_dims", _out_dims(rng, program, below)))
    if rng.random() < 0.2:
        options.append(("chunk_size", rng.choice(["1", "2", "4"])))
    if rng.random() < 0.2:
        options.append(("randomness", rng.choice(['"different"', '"same"', '"split"'])))
    if rng.random() < 0.05:
        options.append(("data_dependent", '"split"'))
    form = "names" if rng.random() < 0.2 else ""
    return Transform("vmap", tuple(mapped), sizes, options=tuple(options), form=form)


def _out_dims(rng: random.Random, program: Program, below: tuple[Transform, ...]) -> str:
    """Return a dim, or a tree of dims in the form of the function's result."""
    same = all(step.kind in ("vmap", "checkpoint", "specialize") for step in below)
    if not same or "*" in program.result or rng.random() < 0.3:
        return rng.choice(["-1", "0"])
    return NAME.sub(lambda _: rng.choice(["-1", "0"]), program.result)


def _specialize(
    rng: random.Random, program: Program, below: tuple[Transform, ...], inductor: bool
) -> Transform:
    options: list[tuple[str, str]] = []
    backend = rng.random()
    if inductor and backend < 0.5:
        options.append(("backend", '"inductor"'))
    elif backend < 0.1:
        options.append(("backend", '"aot_eager"'))
    if rng.random() < 0.05:
        options.append(("closure", '"freeze"'))
    if rng.random() < 0.5:
        described = _descriptors(rng, program, below)
        if described:
            options.insert(0, ("descriptors", "{" + ", ".join(described) + "}"))
    return Transform("specialize", options=tuple(options))


def _descriptors(rng: random.Random, program: Program, below: tuple[Transform, ...]) -> list[str]:
    """Return descriptors that name batch dims: one name for each ``vmap`` below.

    Half of them also name the sizes of an example: one name for each size.
    """
    named = rng.random() < 0.5
    texts, at = [], 0
    for parameter in program.params:
        parts = [_shape(program, at + k, below, named) for k in range(len(parameter.leaves))]
        at += len(parameter.leaves)
        if rng.random() < 0.2:
            continue
        metas = [f"tsfunc.MetaTensorType([{', '.join(shape)}])" for shape in parts]
        if parameter.is_container and parameter.container != "dict":
            continue
        texts.append(f'"{parameter.name}": {parameter.filled(metas)}')
    return texts


def _shape(program: Program, at: int, below: tuple[Transform, ...], named: bool) -> list[str]:
    leaf = [leaf for p in program.params for leaf in p.leaves][at]
    shape = [f'"s{size}"' if named and size > 1 else str(size) for size in leaf.shape]
    for number, step in enumerate(below):
        if step.kind == "vmap" and step.mapped[at] is not None:
            dim = step.mapped[at]
            assert dim is not None
            shape.insert(dim if dim >= 0 else len(shape) + 1 + dim, f'"n{number}"')
    return shape


def parameter_names(program: Program) -> list[str]:
    return [parameter.name for parameter in program.params]


__all__ = ["BATCH_SIZES", "Parameter", "draw_tower", "parameter_names"]
