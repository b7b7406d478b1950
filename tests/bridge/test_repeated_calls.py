"""Repeated calls in a trace have the nodes that they have without the shortcut."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tsfunc
from tests.ops.harness import Call, database_calls
from tsfunc import MetaTensorType as Meta
from tsfunc import grad, specialize, vmap
from tsfunc.bridge.trace.repeated_calls import RepeatedCalls
from tsfunc.bridge.trace.trace_level import trace_kernel
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.dispatch import DispatchKey, register
from tsfunc.program.calling import capture

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

r = torch.randn
aten: Any = torch.ops.aten


COUNTED = """
def counted(*args):
    traces.repeated += 1
    return repeat(*args)
"""


class Traces:
    """The graphs of traces before any pass, and the number of repeated calls in them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.graphs: list[list[Any]] = []
        self.repeated = 0
        simplify = vars(capture)["simplify"]

        def seen(name: str, graph: Any, *rest: Any) -> Any:
            self.graphs.append([described(node) for node in graph.nodes])
            return simplify(name, graph, *rest)

        # A frame of this module would be the user's line of each repeated call.
        scope = {"__name__": "tsfunc.tests", "traces": self, "repeat": RepeatedCalls._repeat}
        exec(COUNTED, scope)
        patch.setattr(capture, "simplify", seen)
        patch.setattr(RepeatedCalls, "_repeat", scope["counted"])

    def both(
        self, f: Callable[..., Any], args: Sequence[Any], descriptors: Any = None, *,
        values: bool = True,
    ) -> int:  # fmt: skip
        """Compare the traces of a function with and without repeated calls; return their number."""
        self.graphs, self.repeated = [], 0
        results, counts = [], []
        for patch in (lambda context: None, without_keys):
            with self.patch.context() as context:
                patch(context)
                results.append(specialize(f, descriptors)(*args))
            counts.append(self.repeated)
        (found, wanted), (repeated, both) = results, counts
        assert repeated == both, "calls are repeated without keys"
        first, second = self.graphs
        assert first == second
        if values:
            torch.testing.assert_close(found, wanted, equal_nan=True)
        return repeated


def without_keys(patch: pytest.MonkeyPatch) -> None:
    """Disable the shortcut for repeated calls."""
    patch.setattr(RepeatedCalls, "_key", lambda *call: None)


def described(node: Any) -> Any:
    """Return all properties of a node."""
    meta = dict(node.meta)
    value = meta.pop("val", None)
    looks = None
    if isinstance(value, Tensor):
        looks = (
            str(value.shape), str(value.stride()), str(value.storage_offset()), value.dtype,
            value.device, value.is_conj(), value.is_neg(), type(value),
        )  # fmt: skip
    meta.pop("number", None)
    meta.pop("value", None)
    return node.op, node.name, str(node.target), repr(node.args), repr(node.kwargs), looks, meta


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Traces:
    return Traces(monkeypatch)


CASES: dict[str, tuple[Callable[..., Any], list[Tensor], int]] = {
    "the same function of another tensor": (lambda x, y: (x.sin(), y.sin()), [r(3), r(3)], 1),
    "another shape": (lambda x, y: (x.sin(), y.sin()), [r(3), r(4)], 0),
    "another dtype": (lambda x, y: (x.sin(), y.sin()), [r(3), r(3).double()], 0),
    "other strides": (lambda x, y: (x.sin(), y.sin()), [r(3, 3), r(3, 3).t()], 0),
    "one tensor twice": (lambda x, y: (x * x, x * y, y * y), [r(3), r(3)], 1),
    "another number": (lambda x, y: (x * 2, y * 3, y * 2), [r(3), r(3)], 1),
    "another type of number": (lambda x, y: (x * 1, y * 1.0, y * True), [r(3), r(3)], 0),
    "zeros of both signs": (lambda x, y: (x * 0.0, y * -0.0, y * 0.0), [r(3), r(3)], 1),
    "keywords": (lambda x, y: (x.sum(0, keepdim=True), y.sum(0, keepdim=True)), [r(3), r(3)], 1),
    "other keywords": (lambda x, y: (x.sum(0, keepdim=True), y.sum(0)), [r(3), r(3)], 0),
    "lists": (lambda x, y: (torch.cat([x, y]), torch.cat([y, x])), [r(3), r(3)], 1),
    "lists of one tensor": (lambda x, y: (torch.cat([x, y]), torch.cat([x, x])), [r(3), r(3)], 0),
    "several results": (lambda x, y: (x.split(2), y.split(2)), [r(4), r(4)], 1),
    "named results": (lambda x, y: (x.max(0).values, y.max(0).values), [r(4), r(4)], 1),
    "views": (lambda x, y: (x.t().add_(1), y.t().add_(1), x, y), [r(2, 2), r(2, 2)], 1),
    "without gradients": (
        lambda x, y: (x.sin(), _without_grad(lambda: y.sin()), _without_grad(lambda: x.sin())),
        [r(3).requires_grad_(), r(3)], 1,
    ),
    "random numbers": (lambda x, y: (torch.rand_like(x), torch.rand_like(y)), [r(3), r(3)], 0),
    "a Python function": (lambda x, y: (F.layer_norm(x, (3,)), F.layer_norm(y, (3,))), [r(3), r(3)],
                          1),
    "sizes that change": (
        lambda x, y: [(z := v.clone(), z.sin(), z.unsqueeze_(0), z.sin())[3] for v in (x, y)],
        [r(3), r(3)], 3,
    ),
    "conjugates": (
        lambda x, y: (x.exp(), y.exp()), [r(3) + 1j, (r(3) + 1j).conj()], 0,
    ),
}  # fmt: skip


def _without_grad(f: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return f()


@pytest.mark.parametrize("name", CASES)
def test_repeated_calls_record_what_new_ones_would(
    name: str, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, args, count = CASES[name]
    made = [x.detach().clone().requires_grad_(x.requires_grad) for x in args]
    if name == "random numbers":
        torch.manual_seed(0)
        specialize(f)(*made)
        assert traces.repeated == 0
        return
    if name in ("another dtype", "other strides", "conjugates"):
        made = args
    # Calls of the function handler and of the dispatch handler share their keys.
    assert traces.both(f, made) == count


@pytest.mark.parametrize("f", [F.softmax, F.log_softmax, F.softmin, F.nll_loss])
def test_functions_in_python_warn_at_every_call(f: Callable[..., Any]) -> None:
    def called(x: Tensor) -> tuple[Tensor, ...]:
        if f is F.nll_loss:
            target = torch.zeros(2, dtype=torch.long)
            return f(x, target, size_average=True), f(x, target, size_average=True)
        return f(x), f(x), f(x.clone())

    counts = []
    for function in (called, specialize(called)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function(r(2, 2))
        counts.append(len(caught))
    assert counts[0] == counts[1] > 1


def test_named_dims(traces: Traces) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.sin(), y.sin(), (x @ y.t()).sum(0), (y @ x.t()).sum(0)

    descriptors = {"x": Meta(["n", 4]), "y": Meta(["n", 4])}
    assert traces.both(f, [r(5, 4), r(5, 4)], descriptors) == 4


@pytest.mark.parametrize("name", ["grad", "vmap", "vmap of grad"])
def test_transforms_inside_of_the_trace(name: str, traces: Traces) -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(5):
            x = (x.tanh() * 2).sin()
        return x.sum()

    transformed = {"grad": grad(f), "vmap": vmap(f), "vmap of grad": vmap(grad(f))}[name]
    # The second call of a vmap's operator may come by the other handler.
    assert traces.both(transformed, [r(3) if name == "grad" else r(4, 3)]) >= 9


def test_a_training_step(traces: Traces) -> None:
    """Autograd calls operators of a level that it records."""
    weights = [r(3, 3).requires_grad_() for _ in range(4)]

    def step(x: Tensor) -> Sequence[Tensor]:
        for weight in weights:
            x = (x @ weight).tanh()
        return torch.autograd.grad(x.sum(), weights)

    assert traces.both(step, [r(2, 3)]) > 4


def test_autocast_casts_every_call(traces: Traces) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = x @ x, aten.mm.default(x, x)
        with torch.autocast("cpu", torch.bfloat16):
            second = (
                y @ y,
                y @ x,
                x.relu(),
                y.relu(),
                aten.mm.default(y, y),
                vmap(lambda z: z @ x)(y),
            )
        return *first, *second, y @ y, aten.mm.default(y, y)

    assert traces.both(f, [r(3, 3), r(3, 3)]) > 1


def test_operators_called_by_name_are_differentiated(traces: Traces) -> None:
    weight = r(3).requires_grad_()

    def f(x: Tensor) -> Sequence[Tensor]:
        y = aten.sin.default(aten.mul.Tensor(x, weight))
        z = aten.sin.default(aten.mul.Tensor(y, weight)) + aten.sin.default(y)
        return torch.autograd.grad(z.sum(), [weight])

    x = r(3)
    assert traces.both(f, [x]) > 0
    torch.testing.assert_close(specialize(f)(x), f(x))


def test_results_have_memory_of_their_own(traces: Traces) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.sin(), y.sin()
        a.add_(1)
        return a, b

    x, y = r(3), r(3)
    torch.testing.assert_close(specialize(f)(x, y), f(x, y))
    assert traces.repeated == 1


def test_a_dispatch_mode_sees_every_call() -> None:
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = x.sin(), y.sin()
        with Mode():  # type: ignore[no-untyped-call]
            return first[0], y.sin() + first[1]

    x, y = r(3), r(3)
    torch.testing.assert_close(specialize(f)(x, y), f(x, y))
    assert seen.count(torch.ops.aten.sin.default) == 2  # of the trace, and of the call of f


def test_operators_with_a_kernel_of_their_own_are_not_repeated(traces: Traces) -> None:
    called = []
    with torch.library._scoped_library("tsfunc_repeated", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
        op = torch.ops.tsfunc_repeated.twice.default

        @register(op, DispatchKey.Trace)
        def kernel(x: Tensor) -> Any:
            called.append(x)
            return trace_kernel(operator_of(op), (x,), {})

        x, y = r(3), r(3)
        found = specialize(lambda x, y: (op(x), op(y)))(x, y)
        torch.testing.assert_close(found, (2 * x, 2 * y))
    assert len(called) == 2


def test_explain_sees_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), y.sin()

    reports = []
    for patch in (lambda context: None, without_keys):
        with monkeypatch.context() as context:
            patch(context)
            report = str(tsfunc.explain(specialize(f), r(3), r(3)))
            without_times = re.sub(r"\d+\.\d+", "", report)
            reports.append(re.sub(r"\W+", " ", without_times))
    assert reports[0] == reports[1]


# --- torch's database of operators


def _pair(call: Call) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return a function that makes a call twice, on its own tensors and on copies of them."""
    leaves, tree = optree.tree_flatten((call.args, call.kwargs), none_is_leaf=True)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i].detach() for i in places]
    op = call.op  # an attribute of type Any is refused in a trace

    def once(given: Sequence[Tensor]) -> Any:
        values = list(leaves)
        for i, tensor in zip(places, given, strict=True):
            values[i] = tensor
        args, kwargs = optree.tree_unflatten(tree, values)
        return op(*args, **kwargs)

    def twice(*given: Tensor) -> Any:
        return once(given[: len(places)]), once(given[len(places) :])

    return twice, [*tensors, *(x.clone() for x in tensors)]


def _compare(names: Sequence[Any], traces: Traces) -> int:
    repeated = 0
    for info in names:
        if torch.float32 not in info.supported_dtypes("cpu") or "jiterator" in info.name:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            calls = database_calls(info, torch.float32, most=2)
            for call in calls:
                twice, given = _pair(call)
                if operator_of(call.op).writes or not given:
                    continue  # a write is never repeated, and the second trace would see it
                if any(x.layout is not torch.strided for x in given):
                    continue
                try:
                    specialize(twice)(*given)
                except Exception:
                    continue
                try:
                    repeated += traces.both(twice, given, values=False)  # of new_empty, too
                except AssertionError as error:
                    raise AssertionError(f"{call.op}: {error}") from error
    return repeated


def test_some_operators_of_the_database(traces: Traces) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chosen = random.Random(seed).sample(list(op_db), 12)
    _compare([info for info in chosen if "random" not in info.name], traces)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(op_db), 50))
def test_operators_of_the_database(first: int, traces: Traces) -> None:
    assert _compare(op_db[first : first + 50], traces) > 5
