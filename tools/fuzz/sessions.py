"""Sessions: values that a specialized function reads change between its calls.

A session has values outside of a function (globals, attributes, containers, defaults, closures,
settings), a function that reads some and assigns some, and a list of calls and changes. It runs
twice in separate namespaces, with ``specialize`` and without. Each call must have the same result,
and the values outside must be equal in the end.
"""

from __future__ import annotations

import linecache
import random
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import tsfunc
from tools.fuzz import reference, running
from tools.fuzz.refusals import refused
from tools.fuzz.running import OK, RAISES, REFUSED, SKIPPED, WRONG, Verdict


@dataclass(frozen=True)
class Reading:
    """A value outside of the function.

    Attributes:
        name: the name that counts it.
        setup: the lines that make it.
        uses: lines of the function that read or assign it; ``out`` is the result so far.
        changes: lines that run between calls.
        observed: expressions that are compared in the end.
    """

    name: str
    setup: str
    uses: tuple[str, ...]
    changes: tuple[str, ...]
    observed: tuple[str, ...] = ()


READINGS = (
    Reading(
        "global number", "g = 2.0",
        ("out = out * g", "out = out + 1 if g > 2.5 else out - 1", "out = out * int(g)"),
        ("g = 3.0", "g = 2", "g = True", "g = -0.0", "g = float('nan')", "g += 0.5"), ("g",),
    ),
    Reading(
        "global tensor", "t = torch.arange(3.0)",
        ("out = out + t", "out = out * t.sum()", "out = out + t.dim()", "out = out + (t is u)"),
        ("t.add_(1)", "t = t * 2", "t = torch.tensor(4.0)", "t = t.double()", "t = u",
         "t.requires_grad_(True)", "t.data = t.data + 1", "t = torch.arange(6.0)[::2]",
         "t.resize_(1)"),
        ("t",),
    ),
    Reading(
        "list of numbers", "ns = [1.0, 2.0]",
        ("out = out * sum(ns)", "out = out + len(ns)", "out = out + ns[-1]",
         "for n in ns: out = out * n"),
        ("ns.append(4.0)", "ns[0] = 5.0", "ns.pop()", "ns = [2.0, 1.0]", "ns.reverse()",
         "ns.append(1)", "ns[0] = True"),
        ("ns",),
    ),
    Reading(
        "list of tensors", "ts = [torch.ones(3), torch.arange(3.0)]",
        ("out = out + sum(ts)", "out = torch.stack([out.expand(3), *ts]).sum(0)",
         "ts[0] = out * 1"),
        ("ts[0].mul_(2)", "ts.append(torch.ones(3))", "ts[0] = ts[1]", "ts.pop()"), ("ts",),
    ),
    Reading(
        "dict", 'd = {"a": 1.0, "b": torch.ones(3)}',
        ('out = out * d["a"]', 'out = out + d["b"]', 'out = out + d.get("c", 0.5)',
         "out = out * len(d)", "out = out + next(iter(d.values()))", 'd["a"] = 7.0',
         'd["last"] = out * 2', 'out = out + ("c" in d)', "out = out + len(''.join(sorted(d)))"),
        ('d["a"] = 4.0', 'd["c"] = 2.0', 'd["b"].add_(1)', 'd["b"] = torch.zeros(3)',
         "d = dict(reversed(d.items()))", 'd.pop("c", None)', 'd[1] = 1.0', 'd[1.0] = 2.0',
         'd["a"] = 1'),
        ("d",),
    ),
    Reading(
        "set", "s = {1, 2}",
        ("out = out * len(s)", "out = out + (3 in s)", "out = out + sum(s)"),
        ("s.add(3)", "s.discard(1)", "s = {5}"), ("sorted(s)",),
    ),
    Reading(
        "object",
        "class Thing:\n    rate = 0.5\n    def __init__(self):\n        self.scale = 2.0\n"
        "        self.weight = torch.ones(3)\n"
        "    def act(self, v):\n        return v * self.scale\n"
        "    @property\n    def twice(self):\n        return self.scale * 2\n"
        "class Other(Thing):\n    rate = 9.0\no = Thing()",
        ("out = out * o.scale", "out = out + o.rate", "out = o.act(out)", "out = out + o.twice",
         "out = out + o.weight", "o.scale = 4.0", "o.scale += 1", "o.weight = out.expand(3) * 1",
         'out = out + getattr(o, "extra", 0.25)', 'out = out * (2 if hasattr(o, "extra") else 3)',
         "out = out + isinstance(o, Other)", "out = out + Thing().scale",
         "o.last = out.sum()"),
        ("o.scale = 3.0", "Thing.rate = 1.5", "o.rate = 7.0", "o = Thing()", "o.extra = 2.0",
         "Thing.act = lambda self, v: v * 5", "o.act = lambda v: v * 6", "o.__class__ = Other",
         "Thing.twice = 11.0", "Other.scale = 1.0", "o.weight.mul_(3)", "o.__dict__.pop('rate', 0)",
         "Thing.extra = 8.0", "Thing.__getattr__ = lambda self, name: 1.25",
         "Thing.act.__defaults__ = None", "o.scale = 2", "o.scale = '2'"),
        ("vars(o).get('scale')", "o.weight"),
    ),
    Reading(
        "nested objects",
        "class Node: pass\nn = Node()\nn.inner = Node()\nn.inner.value = 2.0\nn.all = [n.inner]",
        ("out = out * n.inner.value", "out = out + n.all[0].value", "n.inner.value = 6.0",
         "out = out + (n.all[0] is n.inner)"),
        ("n.inner.value = 3.0", "n.inner = Node(); n.inner.value = 5.0", "n.all[0].value = 1.0",
         "n.all = [Node()]; n.all[0].value = 0.5"),
        ("n.inner.value", "n.all[0].value"),
    ),
    Reading(
        "function",
        "def h(v, by=2.0, *, plus=1.0):\n    return v * by + plus\nh.extra = 3.0",
        ("out = h(out)", "out = out + h.extra", "out = h(out, plus=0.5)"),
        ("h.__defaults__ = (3.0,)", "h.__kwdefaults__ = {'plus': 4.0}", "h.extra = 5.0",
         "h = lambda v, plus=0.0: v - 1",
         "h.__code__ = (lambda v, by=2.0, *, plus=1.0: v).__code__"),
    ),
    Reading(
        "closure",
        "def make():\n    k, w = 2.0, torch.ones(3)\n    def read(v):\n        return v * k + w\n"
        "    def count(v):\n        nonlocal k\n        k = k + 1\n        return v * k\n"
        "    def put(value):\n        nonlocal k\n        k = value\n"
        "    return read, count, put, w\nread, count, put, w = make()",
        ("out = read(out)", "out = count(out)"),
        ("put(3.0)", "put(torch.tensor(2.5))", "w.add_(1)", "put(4)", "read = count"),
        ("read(torch.ones(3))",),
    ),
    Reading(
        "partial", "p = functools.partial(torch.mul, torch.tensor(2.0))",
        ("out = p(out)",),
        ("p = functools.partial(torch.add, torch.tensor(2.0))", "p.args[0].add_(1)"),
    ),
    Reading(
        "module",
        "class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = torch.nn.Parameter(torch.ones(3))\n        self.factor = 2.0\n"
        "        self.register_buffer('seen', torch.zeros(()))\n"
        "        self.act = torch.nn.Tanh()\n"
        "    def forward(self, v):\n        self.seen += 1\n"
        "        if self.training:\n            v = v + 10\n"
        "        return self.act(v * self.w * self.factor)\nnet = Net()",
        ("out = net(out)", "out = out + net.seen", "out = out * net.factor"),
        ("net.eval()", "net.train()", "net.factor = 3.0", "net.w.data.mul_(2)",
         "net.w = torch.nn.Parameter(torch.zeros(3))", "net.act = torch.nn.Sigmoid()",
         "net.register_forward_hook(lambda m, a, r: r * 2)", "net.requires_grad_(False)",
         "net.seen.zero_()", "net = Net()", "net.act.training = False",
         "Net.forward = lambda self, v: v"),
        ("net.seen", "net.w"),
    ),
    Reading(
        "dtype and device", "dtype = torch.float64",
        ("out = out.to(dtype)", "out = out + torch.ones(3, dtype=dtype)",
         "out = out + torch.ones(3).dtype.itemsize"),
        ("dtype = torch.float32", "dtype = torch.float16", "torch.set_default_dtype(torch.float64)",
         "torch.set_default_dtype(torch.float32)"),
    ),
    Reading(
        "grad mode", "",
        ("out = out * 2 if torch.is_grad_enabled() else out * 3",
         "out = out + out.requires_grad"),
        ("torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)",
         "x = x.detach().requires_grad_()", "x = x.detach()"),
    ),
    Reading(
        "builtin", "",
        ("out = out + abs(-3.0)", "out = out * len([1, 2])", "out = out + max(1, 2)"),
        ("abs = lambda v: 8.0", "globals().pop('abs', None)", "max = min"),
    ),
    Reading(
        "array", "import numpy as np\na = np.array([1.0, 2.0, 3.0])",
        ("out = out + torch.from_numpy(a)", "out = out * float(a[0])",
         "out = out + a.sum().item()"),
        ("a[0] = 5.0", "a = a * 2", "a = a.astype(np.float32)"), ("a.tolist()",),
    ),
    Reading(
        "dataclass and tuple",
        "@dataclasses.dataclass\nclass Config:\n    width: int = 2\n    rate: float = 0.5\n"
        "config = Config()\npair = (1.0, torch.ones(3))",
        ("out = out * config.width + config.rate", "out = out + pair[0] * pair[1]",
         "out = out + (config == Config())"),
        ("config.width = 4", "config = dataclasses.replace(config, rate=2.0)", "pair[1].add_(1)",
         "pair = (2.0, *pair[1:])", "pair = (1, *pair[1:])", "Config.rate = 3.0"),
    ),
    Reading(
        "argument",
        "x = torch.linspace(0.1, 0.9, 3)",
        ("out = out + (x.stride(0) if x.dim() else 0)", "out = out * x.shape[-1]",
         "out = out + x.is_contiguous()", "out = out + getattr(x, 'tag', 0.5)",
         "out = out + (x is y)", "x.mul_(2)", "y.add_(x)", "out = out + x + y",
         "out = out + x.element_size()"),
        ("x = torch.linspace(0.2, 0.8, 6)[::2]", "x = x.double()", "x = x * 0.5", "x.tag = 2.0",
         "y = x", "y = x.view(3)", "y = torch.ones(1, 3)", "x = x.clone()",
         "y = torch.ones(3).requires_grad_()", "x = torch.linspace(0.1, 0.9, 1)"),
        ("x", "y"),
    ),
)  # fmt: skip
BY_NAME = {reading.name: reading for reading in READINGS}

CALL = "call"
_HEADER = """\
import dataclasses, functools, math
import torch
import tsfunc
x, y, u = torch.linspace(0.1, 0.9, 3), torch.ones(3), torch.arange(3.0) + 0.5
"""


@dataclass(frozen=True)
class Session:
    """Values outside, the lines of the function, and the sequence of calls and changes."""

    seed: str
    readings: tuple[str, ...]
    uses: tuple[str, ...]
    events: tuple[str, ...]
    transform: str = "tsfunc.specialize({f})"

    @property
    def constructs(self) -> list[str]:
        return list(self.readings)


_TRANSFORMS = (
    "tsfunc.specialize({f})",
    "tsfunc.specialize({f})",
    "tsfunc.specialize(tsfunc.checkpoint({f}))",
    "tsfunc.vmap(tsfunc.specialize({f}), in_dims=(None, None), axis_size=2)",
    "tsfunc.specialize(lambda x, y: tsfunc.jvp(lambda x: {f}(x, y), (x,), (x.cos(),))[0])",
)


def draw_session(rng: random.Random, seed: str) -> Session:
    """Draw a session."""
    readings = rng.sample(READINGS, rng.choice([1, 2, 2, 3]))
    uses = [
        use for r in readings for use in rng.sample(r.uses, min(len(r.uses), rng.choice([1, 2, 2])))
    ]
    rng.shuffle(uses)
    events = [CALL]
    for _ in range(rng.randrange(2, 9)):
        changes = [change for r in readings for change in r.changes]
        if rng.random() < 0.6 and changes:
            events.append(rng.choice(changes))
        if rng.random() < 0.8:
            events.append(CALL)
    events.append(CALL)
    names = tuple(r.name for r in readings)
    writes = any(use.startswith(("x.", "y.")) for use in uses)
    transform = rng.choice(_TRANSFORMS[:2] if writes else _TRANSFORMS)
    return Session(seed, names, tuple(uses), tuple(events), transform)


def source(session: Session) -> str:
    """Return the Python of a session up to its calls."""
    lines = [_HEADER.rstrip()]
    lines += [BY_NAME[name].setup for name in session.readings if BY_NAME[name].setup]
    lines += ["def f(x, y):", "    out = x * 1.5", *(f"    {use}" for use in session.uses)]
    lines += ["    return out"]
    return "\n".join(lines) + "\n"


def _transforms() -> dict[str, Any]:
    return {name: getattr(tsfunc, name) for name in ("checkpoint", "jvp", "vmap")}


def _play(session: Session, specialized: bool) -> tuple[list[Any], BaseException | None]:
    """Return the results of the calls, with errors in place of results, and the final values."""
    text = source(session)
    filename = f"<session {session.seed}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    module = types.ModuleType("session")
    sys.modules["session"] = module  # the place where classes look up their module
    scope = vars(module)
    exec(compile(text, filename, "exec", dont_inherit=True), scope)
    plain = types.SimpleNamespace(**{**_transforms(), "specialize": reference.specialize})
    function = eval(
        session.transform.format(f="f"), scope, {} if specialized else {"tsfunc": plain}
    )
    found: list[Any] = []
    error: BaseException | None = None
    for event in session.events:
        if event == CALL:
            try:
                found.append(_looks(function(scope["x"], scope["y"])))
            except Exception as raised:
                found.append(type(raised).__name__)
                error = error or raised
        else:
            try:
                exec(event, scope)
            except Exception as raised:
                found.append(f"change: {type(raised).__name__}")
    for name in session.readings:
        for expression in BY_NAME[name].observed:
            try:
                found.append(_looks(eval(expression, scope)))
            except Exception as raised:
                found.append(type(raised).__name__)
    return found, error


def _looks(value: Any) -> Any:
    """Return the compared properties of a value: types and tensors' settings are among them."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.requires_grad, type(value).__name__, value.detach().clone())
    if isinstance(value, dict):
        return [(repr(key), _looks(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [_looks(part) for part in value]
    return f"{type(value).__name__} {value!r}"


def run_session(session: Session) -> Verdict:
    """Play a session with and without ``specialize``."""
    torch.set_default_dtype(torch.float32)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.set_grad_enabled(True)
            expected, plain_error = _play(session, specialized=False)
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(True)
            found, error = _play(session, specialized=True)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    if any(isinstance(e, str) and e.startswith("change:") for e in expected):
        return Verdict(SKIPPED, "a change fails")
    if error is not None and plain_error is None:
        if refused(error) is not None or _is_refusal(error):
            return Verdict(REFUSED, type(error).__name__, str(error))
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Verdict(
            RAISES, running.cause_of(error), f"{type(error).__name__}: {error} {where.line}"[:600]
        )
    if plain_error is not None:
        return Verdict(SKIPPED, "the function raises")
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        difference = running.different(ours, theirs)
        if difference is not None:
            detail = f"value {place}: {difference[1]}; {ours!r}, expected {theirs!r}"
            return Verdict(WRONG, difference[0], detail[:600])
    return Verdict(OK)


# Documented errors of programs: docs/soundness.md.
_REFUSED = (
    "can't be assigned",
    "can't change",
    "is refused",
    "is an argument",
    "burnt in",
    "value of the body of",
)


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, TypeError | RuntimeError) and any(w in str(error) for w in _REFUSED)


def smaller_sessions(session: Session) -> Iterator[Session]:
    """Yield sessions with a part removed."""
    if session.transform != _TRANSFORMS[0]:
        yield replace(session, transform=_TRANSFORMS[0])
    for i in range(len(session.readings)):
        if len(session.readings) > 1:
            yield replace(session, readings=session.readings[:i] + session.readings[i + 1 :])
    for i in range(len(session.events)):
        yield replace(session, events=session.events[:i] + session.events[i + 1 :])
    for i in range(len(session.uses)):
        if len(session.uses) > 1:
            yield replace(session, uses=session.uses[:i] + session.uses[i + 1 :])


def minimized_session(session: Session, verdict: Verdict, run: Any) -> Session:
    """Return the smallest session found that fails in the same way."""
    again = True
    while again:
        again = False
        for candidate in smaller_sessions(session):
            found = run(candidate)
            if (found.kind, found.cause) == (verdict.kind, verdict.cause):
                session, again = candidate, True
                break
    return session


def as_program(session: Session, verdict: Verdict) -> str:
    """Return the Python of a session, which prints the results of both runs."""
    lines = [f"# Seed {session.seed}: {verdict.kind}, {verdict.cause}", source(session)]
    lines.append(f"g_ = {session.transform.format(f='f')}")
    for event in session.events:
        lines.append("print(g_(x, y))" if event == CALL else event)
    lines.append("# Compare with the same where tsfunc.specialize returns its function.")
    return "\n".join(lines) + "\n"
