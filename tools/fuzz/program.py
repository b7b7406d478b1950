"""The syntax tree of a random program, and its Python.

A program is a function of tensors (statements, some with blocks: the bodies of control flow), a
tower of transforms around it, and calls. It is plain data that pickles, so a process that may die
can run it, and a minimizer can remove parts. Its Python needs torch and tsfunc alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tools.fuzz.helpers import with_helpers

NAME = re.compile(r"\b[a-z]+\d+\b")  # every variable of a program: x0, v3, c1, f2
LAYOUTS = ("dense", "gaps", "reversed", "offset", "rows", "narrow", "expanded")
SHARED = "shared"  # the layout of arguments that are views of one buffer
# The expression of a container of two, and how a function reads its elements.
CONTAINERS: Mapping[str, tuple[str, tuple[str, str]]] = {
    "dict": ('{{"a": {0}, "b": {1}}}', ('["a"]', '["b"]')),
    "pair": ("Pair({0}, {1})", (".a", ".b")),
    "record": ("Record({0}, {1})", (".a", ".b")),
    "list": ("[{0}, {1}]", ("[0]", "[1]")),
    "tuple": ("({0}, None, {1})", ("[0]", "[2]")),
    "nested": ('{{"a": [{0}], "b": ({1}, None)}}', ('["a"][0]', '["b"][0]')),
}


@dataclass(frozen=True)
class Block:
    """A local function: the body of a loop, a branch, the function of a nested transform."""

    name: str
    params: tuple[str, ...]
    body: tuple[Statement, ...]
    result: str


@dataclass(frozen=True)
class Statement:
    """One line and the blocks that precede it.

    Attributes:
        text: the line; ``v3 = ...`` defines a variable, others write into one.
        construct: the family that counts it.
    """

    text: str
    construct: str
    blocks: tuple[Block, ...] = ()

    @property
    def target(self) -> str | None:
        """Return the variable that the line defines."""
        match = re.match(r"([a-z]+\d+) = ", self.text)
        return match[1] if match else None

    @property
    def reads(self) -> frozenset[str]:
        """Return the variables in the line and its blocks."""
        names = set(NAME.findall(self.text.removeprefix(f"{self.target} = ")))
        for block in self.blocks:
            own = {*block.params, *(s.target for s in block.body)}
            for statement in block.body:
                names |= statement.reads - own
            names |= set(NAME.findall(block.result)) - own
            names.discard(block.name)
        return frozenset(names)


@dataclass(frozen=True)
class Leaf:
    """A tensor argument or a captured tensor.

    Attributes:
        shape: of one example.
        kind: "float", "single" (float32), "complex", "index" (integers of range(high)) or "mask".
        high: the bound of an index.
        phase: makes the values of this leaf its own.
        layout: one of ``LAYOUTS``: "reversed" is a transpose of all dims, "gaps" every second
            element of the last dim, "rows" every second element of the first dim, "offset" a part
            of a larger tensor, "narrow" a part of a larger last dim, "expanded" one row repeated;
            or ``SHARED``.
    """

    shape: tuple[int, ...]
    kind: str = "float"
    high: int = 1
    phase: float = 0.0
    layout: str = "dense"


@dataclass(frozen=True)
class Parameter:
    """A parameter of the function: a tensor, or a container of two.

    Attributes:
        container: one of ``CONTAINERS``: "pair" is a named tuple, "record" a dataclass.
        written: True if the function may write into it.
    """

    name: str
    leaves: tuple[Leaf, ...]
    container: str = "dict"
    written: bool = False

    @property
    def is_container(self) -> bool:
        return len(self.leaves) > 1

    @property
    def has_none(self) -> bool:
        """Return True if a part of it is None, which derivatives refuse as those of torch.func."""
        return self.is_container and "None" in CONTAINERS[self.container][0]

    def part(self, i: int) -> str:
        """Return the expression of an element."""
        return self.name + CONTAINERS[self.container][1][i]

    def filled(self, texts: Sequence[str]) -> str:
        """Return the expression of the container with these elements, or of the one element."""
        return CONTAINERS[self.container][0].format(*texts) if self.is_container else texts[0]


@dataclass(frozen=True)
class Transform:
    """A step of the tower.

    Attributes:
        kind: the transform's name.
        mapped: for ``vmap``, the dim of each leaf that is mapped, None where it is not.
        sizes: for ``vmap``, the number of examples in each call of the program.
        argnums: for derivatives, the parameters to differentiate by.
        options: further arguments, as Python.
        form: how the call is written, among those that the transform has.
    """

    kind: str
    mapped: tuple[int | None, ...] = ()
    sizes: tuple[int, ...] = ()
    argnums: tuple[int, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    form: str = ""


@dataclass(frozen=True)
class Program:
    """A function, its tower (innermost first), and its calls.

    Attributes:
        outside: statements before the function: pullbacks that it captures.
        calls: for each call of the transformed function the phase of its values; in a later
            call values, batch sizes and strides differ.
        sizes: in later calls, the sizes of an example in place of those that were drawn.
        circumstances: for each call what is different around it (``circumstances``), or none.
    """

    seed: str
    captured: tuple[tuple[str, Leaf], ...]
    params: tuple[Parameter, ...]
    body: tuple[Statement, ...]
    result: str
    tower: tuple[Transform, ...] = ()
    calls: tuple[int, ...] = (0,)
    keywords: frozenset[str] = field(default_factory=frozenset)
    sizes: tuple[tuple[int, int], ...] = ()
    circumstances: tuple[str, ...] = ()
    outside: tuple[Statement, ...] = ()

    @property
    def single(self) -> bool:
        """Return True if some of its values are in single precision."""
        leaves = [leaf for p in self.params for leaf in p.leaves]
        return any(leaf.kind == "single" for leaf in leaves) or any(
            word in source(self)
            for word in (".float()", "float32", "complex64", ".half()", "bfloat16")
        )

    def circumstance(self, call: int) -> str:
        """Return the circumstance of a call."""
        return self.circumstances[call] if self.circumstances else ""

    def with_(self, **changes: object) -> Program:
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def constructs(self) -> list[str]:
        return [statement.construct for statement in statements(self.body)]


def statements(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Yield the statements of a body and of its blocks."""
    for statement in body:
        yield statement
        for block in statement.blocks:
            yield from statements(block.body)


# ---- Python ------------------------------------------------------------------------------------


def _indent(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def lines_of(body: tuple[Statement, ...]) -> list[str]:
    """Return the lines of a body."""
    lines = []
    for statement in body:
        for block in statement.blocks:
            lines.append(f"def {block.name}({', '.join(block.params)}):")
            lines += _indent([*lines_of(block.body), f"return {block.result}"])
        lines.append(statement.text)
    return lines


def _shape(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape)) or "()"


def leaf_text(leaf: Leaf, shape: tuple[int, ...], phase: float) -> str:
    """Return the expression of a leaf's tensor, of this shape."""
    count = math.prod(shape)
    layout = leaf.layout if shape else "dense"
    if layout == "gaps":
        whole, after = (*shape[:-1], 2 * shape[-1]), "[..., ::2]"
        count *= 2
    elif layout == "reversed" and len(shape) > 1:
        whole, after = shape[::-1], f".permute({_shape(tuple(reversed(range(len(shape)))))})"
    elif layout in ("offset", "rows", "narrow", "expanded"):
        whole, after = {
            "offset": ((shape[0] + 1, *shape[1:]), "[1:]"),
            "rows": ((2 * shape[0], *shape[1:]), "[::2]"),
            "narrow": ((*shape[:-1], shape[-1] + 3), "[..., 2:-1]"),
            "expanded": ((1, *shape[1:]), f".expand({_shape(shape)})"),
        }[layout]
        count = math.prod(whole)
    else:
        whole, after = shape, ""
    numbers = f"torch.arange({count}, dtype=torch.float64)"
    if leaf.kind == "index":
        made = f"(({numbers} * 7 + {int(phase * 10)}) % {leaf.high}).long()"
    elif leaf.kind == "mask":
        made = f"(({numbers} * 0.7 + {phase:.2f}).sin() > 0)"
    else:
        made = f"({numbers} * 0.7 + {phase:.2f}).sin()"
    if leaf.kind == "single":
        made = f"{made}.float()"
    elif leaf.kind == "complex":
        made = f"torch.polar({made}.abs() + 0.3, {numbers} + {phase:.2f})"
    return f"{made}.reshape({_shape(whole)}){after}"


def batched_shape(leaf: Leaf, tower: tuple[Transform, ...], at: int, call: int) -> tuple[int, ...]:
    """Return the shape of a leaf outside of a tower; ``at`` is its index among all leaves."""
    shape = list(leaf.shape)
    for step in tower:
        if step.kind == "vmap" and step.mapped[at] is not None:
            dim = step.mapped[at]
            assert dim is not None
            size = step.sizes[call % len(step.sizes)]
            shape.insert(dim if dim >= 0 else len(shape) + 1 + dim, size)
    return tuple(shape)


def _leaf_of_call(leaf: Leaf, shape: tuple[int, ...], number: int, at: int) -> str:
    """Return the expression of a leaf in a call; ``at`` is its index among all leaves."""
    if leaf.layout == SHARED:
        return f"buffer[{at}:{at + math.prod(shape)}].view({_shape(shape)})"
    layout = leaf.layout
    if layout != "expanded":
        layout = LAYOUTS[(LAYOUTS.index(layout) + number) % (len(LAYOUTS) - 1)]
    return leaf_text(replace(leaf, layout=layout), shape, leaf.phase + 1.3 * number)


def arguments_text(program: Program, call: int) -> list[str]:
    """Return the expression of each argument of a call."""
    number = program.calls[call]
    texts, at = [], 0
    for parameter in program.params:
        parts = []
        for leaf in parameter.leaves:
            sizes = dict(program.sizes) if number else {}
            own = tuple(sizes.get(size, size) for size in leaf.shape)
            shape = batched_shape(replace(leaf, shape=own), program.tower, at, number)
            parts.append(_leaf_of_call(leaf, shape, number, at))
            at += 1
        texts.append(parameter.filled(parts))
    return texts


def _prefix(program: Program, entries: tuple[object, ...]) -> list[str]:
    """Return an entry for each parameter from entries for each leaf."""
    texts, at = [], 0
    for parameter in program.params:
        some = entries[at : at + len(parameter.leaves)]
        at += len(parameter.leaves)
        texts.append(
            str(some[0]) if len(set(some)) == 1 else parameter.filled([str(s) for s in some])
        )
    return texts


def _tuple(texts: list[str]) -> str:
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def _step(program: Program, step: Transform, inner: str, name: str) -> list[str]:
    """Return the lines that define the function ``name``, a transform of ``inner``."""
    params = [parameter.name for parameter in program.params]
    every = ", ".join(params)
    options = "".join(f", {key}={value}" for key, value in step.options)
    aux = ("has_aux", "True") in step.options

    def with_aux(function: str) -> str:
        """Return a function's result, and its auxiliary part: the whole output."""
        return f"(lambda out: ({function}(out), out))({inner}({every}))"

    if step.kind == "vmap":
        entries = _prefix(program, step.mapped)
        if step.form == "names":
            dims = [f'"{p}": {e}' for p, e in zip(params, entries, strict=True) if e != "None"]
            in_dims = "{" + ", ".join(dims) + "}"
        elif len(set(entries)) == 1 and entries[0].strip("-").isdigit():
            in_dims = entries[0]
        else:
            in_dims = _tuple(entries)
        return [f"{name} = tsfunc.vmap({inner}, in_dims={in_dims}{options})"]
    if step.kind in ("checkpoint", "specialize"):
        return [f"{name} = tsfunc.{step.kind}({inner}{options})"]
    if step.kind == "functional_call":
        return _call_of_module(step, inner, name, params)
    if step.kind in ("grad", "grad_and_value", "value_and_grad", "hessian"):
        argnums = step.argnums[0] if len(step.argnums) == 1 else step.argnums
        scalar = f"lambda {every}: " + (with_aux("total") if aux else f"total({inner}({every}))")
        return [
            f"def {name}({every}):",
            f"    return tsfunc.{step.kind}({scalar}, argnums={argnums}{options})({every})",
        ]
    if step.kind in ("jacrev", "jacfwd"):
        argnums = step.argnums[0] if len(step.argnums) == 1 else step.argnums
        some = f"lambda {every}: " + (with_aux("floats") if aux else f"floats({inner}({every}))")
        return [
            f"def {name}({every}):",
            f"    return tsfunc.{step.kind}({some}, argnums={argnums}{options})({every})",
        ]
    chosen = [params[i] for i in step.argnums]
    some = f"lambda {', '.join(chosen)}: "
    some += with_aux("floats") if aux else f"floats({inner}({every}))"
    more = ", *rest" if aux else ""
    tangents = [f"like({p}, lambda t: (t * {i + 2}).cos())" for i, p in enumerate(chosen)]
    if step.kind == "jvp":
        call = f"tsfunc.jvp({some}, {_tuple(chosen)}, {_tuple(tangents)}{options})"
        return [f"def {name}({every}):", f"    return {call}"]
    if step.kind == "vjp":
        return [
            f"def {name}({every}):",
            f"    out, pull{more} = tsfunc.vjp({some}, {', '.join(chosen)}{options})",
            f"    return (*pull(like(out, lambda t: t.cos())){more})"
            if aux
            else "    return pull(like(out, lambda t: t.cos()))",
        ]
    assert step.kind == "linearize"
    return [
        f"def {name}({every}):",
        f"    out, push{more} = tsfunc.linearize({some}, {', '.join(chosen)}{options})",
        f"    return (out, push({', '.join(tangents)}){more})",
    ]


def _call_of_module(step: Transform, inner: str, name: str, params: list[str]) -> list[str]:
    """Return the lines of a ``functional_call``; the form "buffers" also writes into buffers."""
    first, rest = params[0], params[1:]
    buffers = step.form == "buffers"
    zero = "torch.zeros((), dtype=torch.float64)"
    lines = [
        "class Model(torch.nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))",
        *[f'        self.register_buffer("{b}", {zero})' for b in ("seen", "last") if buffers],
        "",
        f"    def forward({', '.join(['self', *rest])}):",
    ]
    if buffers:
        lines += [
            "        self.seen.add_(self.weight.sum())",
            "        self.last = self.last * 0.5 + self.weight.sum().sin()",
            "        self.seen *= self.last",
        ]
    lines += [
        f"        return {inner}({', '.join(['self.weight', *rest])})"
        + (", self.last" if buffers else ""),
        "",
        f"{name}_model = Model()",
        f"def {name}({', '.join(params)}):",
        f"    state = {{'weight': {first}}}",
    ]
    call = f"tsfunc.functional_call({name}_model, state, {_tuple(rest)})"
    if not buffers:
        return [*lines, f"    return {call}"]
    return [
        *lines,
        f"    state['seen'] = torch.ones((), dtype={first}.dtype)",
        f"    state['last'] = {first}.detach().sum()",
        f"    return {call}, state['seen'], state['last']",
    ]


def source(program: Program) -> str:
    """Return the Python that defines ``program``, the transformed function."""
    lines: list[str] = []
    for name, leaf in program.captured:
        lines.append(f"{name} = {leaf_text(leaf, leaf.shape, leaf.phase)}")
    params = ", ".join(parameter.name for parameter in program.params)
    lines += lines_of(program.outside)
    lines.append(f"def f0({params}):")
    lines += _indent([*lines_of(program.body), f"return {program.result}"])
    for i, step in enumerate(program.tower):
        lines += _step(program, step, f"f{i}", f"f{i + 1}")
    written = [p.name for p in program.params if p.written]
    if written:
        lines.append(f"def program({params}):")
        lines.append(f"    return f{len(program.tower)}({params}), {', '.join(written)}")
    else:
        lines.append(f"program = f{len(program.tower)}")
    arguments = "".join(p.filled(["", ""]) for p in program.params if p.is_container)
    gradients = "with_gradients(" if "gradients" in program.circumstances else ""
    return with_helpers("\n".join(lines) + "\n", arguments + gradients)


def captured_text(program: Program, call: int) -> dict[str, str]:
    """Return the expressions of the captured tensors of a call."""
    changed = 1.3 * (1 + program.calls[call]) if program.circumstance(call) == "others" else 0.0
    return {
        name: leaf_text(leaf, leaf.shape, leaf.phase + changed) for name, leaf in program.captured
    }


def call_text(program: Program, call: int, function: str = "program") -> str:
    """Return the expression of a call."""
    parts = [
        f"{p.name}={text}" if p.name in program.keywords else text
        for p, text in zip(program.params, arguments_text(program, call), strict=True)
    ]
    text = f"{function}({', '.join(parts)})"
    if any(leaf.layout == SHARED for p in program.params for leaf in p.leaves):
        size = max(map(int, re.findall(r"buffer\[\d+:(\d+)\]", text)))
        numbers = f"torch.arange({size}, dtype=torch.float64)"
        return f"(lambda buffer: {text})(({numbers} * 0.7 + {program.calls[call]}).sin())"
    return text
