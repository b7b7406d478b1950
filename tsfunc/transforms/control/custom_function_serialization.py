"""Functions with custom rules in files: the encoders and decoders of calls and functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tsfunc.bridge.control.control_flow import ControlFlow
from tsfunc.program.files.archive import Field
from tsfunc.program.files.callees import (
    HEAD,
    CalleeKind,
    CalleeWriter,
    DecodePart,
    TracedCallee,
    register_callee,
)
from tsfunc.program.files.graphs import DecodeGraph, EncodeGraph
from tsfunc.program.files.operators import NUMBER, TENSOR
from tsfunc.program.files.values import NoFileForm, ValueReader, encode, printable
from tsfunc.transforms.control.custom_function_tracing import key_of, traced_callee
from tsfunc.transforms.control.custom_functions import (
    Batched,
    CustomAutogradFunction,
    CustomJvp,
    CustomVjp,
    CustomVmap,
    LinearSolution,
    RootSolution,
)
from tsfunc.transforms.control.functions import EnclosingVmap, FunctionCall, PythonCallee

Kinds = Sequence[Any]
_RANDOMNESS = {name: name for name in ("error", "different", "same", "split")}
_MOST = 1 << 16


# --- calls


def encode_call(op: FunctionCall, graph: EncodeGraph) -> dict[str, Any]:
    """Return the file form of a call of a function, except its name."""
    callee, callees = op.callee, graph.callees
    if isinstance(callee, TracedCallee):
        number = callees.number(id(callee), callee, lambda: callee)
    else:
        assert isinstance(callee, PythonCallee)
        number = callees.number(
            key_of(callee), callee,
            lambda: traced_callee(callee, callees),
        )  # fmt: skip
    maps = [
        {
            "in_dims": list(each.in_dims),
            "out_dims": list(each.out_dims),
            "randomness": each.randomness,
            "axis_name": encode(each.axis_name),
            "axis_size": _fixed(each.axis_size),
        }
        for each in op.maps
    ]
    return {"number": number, "maps": maps, "written": list(op.written)}


def _fixed(size: Any) -> Any:
    if size is not None and not isinstance(size, int):
        raise NoFileForm("a function with rules in a vmap of a size that no tensor has")
    return size


def decode_call(field: Field, name: str, graph: DecodeGraph, kinds: Kinds) -> ControlFlow:
    """Return the call that `encode_call` encoded."""
    *_, number, maps_field, written_field = field.record(
        "kind", "name", "number", "maps", "written"
    )
    callee = graph.callees.at(number)
    if list(kinds) != [TENSOR] * callee.tensors + [NUMBER] * callee.numbers:
        field.fail(f"{callee.name} is called with other values than it takes")
    maps = [_decode_map(each, callee, graph) for each in maps_field.items()]
    written = [at.integer(0, callee.tensors - 1) for at in written_field.items()]
    op = FunctionCall(callee, maps, written)
    op.name = op.__name__ = name
    return op


def _decode_map(field: Field, callee: TracedCallee, graph: DecodeGraph) -> EnclosingVmap:
    ins, outs, randomness, axis_name, size = field.record(
        "in_dims", "out_dims", "randomness", "axis_name", "axis_size"
    )
    axis = ValueReader().decode(axis_name)
    if isinstance(axis, list | dict | slice):
        axis_name.expected("the name of an axis")
    return EnclosingVmap(
        _dims(ins, callee.tensors),
        _dims(outs, callee.results),
        randomness.one_of(_RANDOMNESS, "what becomes of random numbers"),
        axis,
        None if size.value is None else size.integer(0),
    )


def _dims(field: Field, count: int) -> tuple[int | None, ...]:
    items = field.items(count)
    return tuple(None if each.value is None else each.integer(0, _MOST) for each in items)


# --- functions


def _require(field: Field, *keys: str) -> Sequence[Field]:
    """Return the fields of an entry other than the common ones."""
    return field.record(*HEAD, *keys)[len(HEAD) :]


def _own(callee: TracedCallee) -> list[Any]:
    """Return the kinds of a function's inputs."""
    return [TENSOR] * callee.tensors + [NUMBER] * callee.numbers


def _places(field: Field, count: int) -> list[int]:
    return [at.integer(0, count - 1) for at in field.items()]


def _results(field: Field, part: Any, count: int, *, nothing: bool = False) -> Any:
    """Return a part after checking that it returns ``count`` values."""
    found = part.results
    if len(found) != count:
        field.fail(f"it returns {len(found)} values, not {count}")
    if not nothing and any(value is None for value in found):
        field.fail("it returns nothing where there must be a tensor")
    return part


def _encode_vjp(callee: CustomVjp, to: CalleeWriter) -> dict[str, Any]:
    return {
        "count": callee.count,
        "smooth": list(callee.smooth),
        "primal": to.part(callee.primal),
        "forward": to.part(callee.forward),
        "backward": to.part(callee.backward),
    }


def _decode_vjp(callee: CustomVjp, field: Field, part: DecodePart) -> None:
    count, smooth, primal, forward, backward = _require(
        field, "count", "smooth", "primal", "forward", "backward"
    )
    own, results = _own(callee), callee.results
    callee.count = count.integer(0, callee.tensors)
    callee.smooth = _places(smooth, results)
    callee.primal = _results(primal, part(primal, own), results)
    callee.forward = part(forward, own)
    residuals = len(callee.forward.results) - results
    _results(forward, callee.forward, results + max(residuals, 0))
    callee.backward = _results(
        backward, part(backward, [*own, *[TENSOR] * (residuals + len(callee.smooth))]),
        callee.count, nothing=True,
    )  # fmt: skip


def _encode_jvp(callee: CustomJvp, to: CalleeWriter) -> dict[str, Any]:
    return {
        "count": callee.count,
        "by": list(callee.by),
        "primal": to.part(callee.primal),
        "push": to.part(callee.push),
    }


def _decode_jvp(callee: CustomJvp, field: Field, part: DecodePart) -> None:
    count, by, primal, push = _require(field, "count", "by", "primal", "push")
    own, results = _own(callee), callee.results
    callee.count = count.integer(0, callee.tensors)
    callee.by = _places(by, callee.count)
    callee.primal = _results(primal, part(primal, own), results)
    given = [*own, *[TENSOR] * len(callee.by)]
    callee.push = _results(push, part(push, given), results, nothing=True)


def _encode_vmap(callee: CustomVmap, to: CalleeWriter) -> dict[str, Any]:
    return {"primal": to.part(callee.primal), "batches": _encode_batches(callee.batches, to)}


def _decode_vmap(callee: CustomVmap, field: Field, part: DecodePart) -> None:
    primal, batches = _require(field, "primal", "batches")
    callee.primal = _results(primal, part(primal, _own(callee)), callee.results)
    callee.batches = _decode_batches(callee, batches, part)


def _encode_batches(batches: Sequence[Batched], to: CalleeWriter) -> list[Any]:
    return [
        {"given": list(each.given), "returned": list(each.returned), "part": to.of_batch(each.part)}
        for each in batches
    ]


def _decode_batches(callee: TracedCallee, field: Field, part: DecodePart) -> list[Batched]:
    found = []
    for each in field.items():
        given, returned, part_field = each.record("given", "returned", "part")
        made = _results(part_field, part(part_field, _own(callee)), callee.results)
        flags = tuple(flag.flag() for flag in given.items(callee.tensors))
        of_results = tuple(flag.flag() for flag in returned.items(callee.results))
        found.append(Batched(flags, of_results, made))
    return found


_METHODS = ("kept", "dirty", "inert", "smooth", "by")


def _encode_methods(callee: CustomAutogradFunction, to: CalleeWriter) -> dict[str, Any]:
    return {
        **{name: list(getattr(callee, name)) for name in _METHODS},
        "once": callee.once,
        "refusal": None if callee.refusal is None else printable(callee.refusal),
        "forward": to.part(callee.forward),
        "backward": None if callee.backward is None else to.part(callee.backward),
        "push": None if callee.push is None else to.part(callee.push),
        "batches": _encode_batches(callee.batches, to),
    }


def _decode_methods(callee: CustomAutogradFunction, field: Field, part: DecodePart) -> None:
    *places, once, refusal, forward, backward, push, batches = _require(
        field, *_METHODS, "once", "refusal", "forward", "backward", "push", "batches"
    )
    own, results = _own(callee), callee.results
    callee.forward = part(forward, own)
    others = len(callee.forward.results) - results
    _results(forward, callee.forward, results + max(others, 0))
    tensors = callee.tensors
    counts = (tensors + results + others, tensors, results, results, tensors)
    for name, at, count in zip(_METHODS, places, counts, strict=True):
        setattr(callee, name, _places(at, count))
    callee.once = once.flag()
    callee.refusal = None if refusal.value is None else refusal.line()
    given = [*[TENSOR] * len(callee.kept), *own[tensors:], *own[:tensors]]
    callee.backward = callee.push = None
    if backward.value is not None:
        pull = part(backward, [*given, *[TENSOR] * len(callee.smooth)])
        callee.backward = _results(backward, pull, tensors, nothing=True)
    if push.value is not None:
        callee.push = _results(
            push, part(push, [*given, *[TENSOR] * len(callee.by)]), results, nothing=True
        )
    callee.batches = _decode_batches(callee, batches, part)


def _encode_linear(callee: LinearSolution, to: CalleeWriter) -> dict[str, Any]:
    names = ("solve", "product", "transposed")
    return {"count": callee.count, **{name: to.part(getattr(callee, name)) for name in names}}


def _decode_linear(callee: LinearSolution, field: Field, part: DecodePart) -> None:
    count, solve, product, transposed = _require(field, "count", "solve", "product", "transposed")
    callee.count = _unknown(count, callee)
    own = _own(callee)
    callee.solve = _results(solve, part(solve, own), callee.results)
    callee.product = _results(product, part(product, own), callee.count)
    callee.transposed = part(transposed, own)
    _at_least(transposed, callee.transposed, callee.count)


def _encode_root(callee: RootSolution, to: CalleeWriter) -> dict[str, Any]:
    names = ("solve", "residual", "tangent")
    return {"count": callee.count, **{name: to.part(getattr(callee, name)) for name in names}}


def _decode_root(callee: RootSolution, field: Field, part: DecodePart) -> None:
    count, solve, residual, tangent = _require(field, "count", "solve", "residual", "tangent")
    callee.count = _unknown(count, callee)
    own = _own(callee)
    callee.solve = _results(solve, part(solve, own), callee.results)
    callee.residual = _results(residual, part(residual, own), callee.count)
    callee.tangent = part(tangent, [*[TENSOR] * callee.count, *own])
    _at_least(tangent, callee.tangent, callee.count)


def _unknown(field: Field, callee: TracedCallee) -> int:
    return field.integer(0, min(callee.tensors, callee.results))


def _at_least(field: Field, part: Any, count: int) -> None:
    _results(field, part, max(len(part.results), count))


def register_callees() -> None:
    """Register every kind of function for files."""
    for kind in (
        CalleeKind("vjp", CustomVjp, _encode_vjp, _decode_vjp),
        CalleeKind("jvp", CustomJvp, _encode_jvp, _decode_jvp),
        CalleeKind("vmap", CustomVmap, _encode_vmap, _decode_vmap),
        CalleeKind("methods", CustomAutogradFunction, _encode_methods, _decode_methods),
        CalleeKind("linear", LinearSolution, _encode_linear, _decode_linear),
        CalleeKind("root", RootSolution, _encode_root, _decode_root),
    ):
        register_callee(kind)
