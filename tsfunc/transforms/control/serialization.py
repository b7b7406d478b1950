"""Control flow in files: the encoder and the decoder of each operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from tsfunc.bridge.control.control_flow import Body, ControlFlow, RandomStates
from tsfunc.bridge.grad.remat_policy import Policy, SaveEither, SaveOperators
from tsfunc.program.fields import Field
from tsfunc.program.files.callees import TracedCallee
from tsfunc.program.files.graphs import (
    ControlKind,
    DecodeGraph,
    EncodeGraph,
    decode_bodies,
    decode_control,
    encode_bodies,
    encode_control,
    register_control,
    result_count,
)
from tsfunc.program.files.json_values import NoFileForm, ValueReader, encode
from tsfunc.program.files.operator_calls import NUMBER, TENSOR, operator_named
from tsfunc.transforms import checkpoint_policies as policies
from tsfunc.transforms.checkpoint import CheckpointCall, RecomputedCall
from tsfunc.transforms.control.autograd_functions import EnclosingVmap, FunctionCall, PythonCallee
from tsfunc.transforms.control.call_forms import Batching
from tsfunc.transforms.control.control_operators import (
    AssociativeScan,
    Checkpoint,
    Scan,
    Switch,
    While,
)
from tsfunc.transforms.control.custom_function_tracing import key_of, traced_callee
from tsfunc.transforms.control.custom_functions import register_callees
from tsfunc.transforms.control.derived_operators import (
    ControlFlowOperator,
    MappedOperator,
    Pullback,
    Pushforward,
    Replayed,
)

Kinds = Sequence[Any]
_BATCHING = {name: name for name in get_args(Batching)}
_CHECKPOINTS = {
    name: name for literal in get_args(Checkpoint) for name in get_args(literal) if name
}


def _encode_switch(op: Switch, graph: EncodeGraph) -> dict[str, Any]:
    return {"bodies": encode_bodies(op, graph), "batching": op.batching}


def _decode_switch(field: Field, name: str, graph: DecodeGraph, kinds: Kinds) -> ControlFlow:
    _, _, bodies_field, batching = field.record("kind", "name", "bodies", "batching")
    bodies = decode_bodies(bodies_field, graph, kinds)
    if not bodies or kinds[:1] != [TENSOR] or len({result_count(body) for body in bodies}) != 1:
        field.fail("expected a tensor to choose by, and branches with equal numbers of results")
    return Switch(name, bodies, batching.one_of(_BATCHING, f"one of {[*_BATCHING]}"))


def _encode_while(op: While, graph: EncodeGraph) -> dict[str, Any]:
    return {"bodies": encode_bodies(op, graph), "carried": op.carried, "checkpoint": op.checkpoint}


def _decode_while(field: Field, name: str, graph: DecodeGraph, kinds: Kinds) -> ControlFlow:
    _, _, bodies_field, carried_field, checkpoint = field.record(
        "kind", "name", "bodies", "carried", "checkpoint"
    )
    carried = carried_field.integer(0, len(kinds))
    bodies = decode_bodies(bodies_field, graph, kinds)
    if [result_count(body) for body in bodies] != [1, carried]:
        field.fail(f"expected a condition, and a body that returns the {carried} carried values")
    policy: Any = None
    if checkpoint.value is not None:
        policy = checkpoint.one_of(_CHECKPOINTS, f"null or one of {[*_CHECKPOINTS]}")
    return While(name, bodies, carried, policy)


def _encode_scan(op: Scan, graph: EncodeGraph) -> dict[str, Any]:
    return {
        "bodies": encode_bodies(op, graph),
        "carried": op.carried,
        "along": op.along,
        "length": op.length,
        "reverse": op.reverse,
    }


def _decode_scan(field: Field, name: str, graph: DecodeGraph, kinds: Kinds) -> ControlFlow:
    _, _, bodies_field, carried_field, along_field, length_field, reverse = field.record(
        "kind", "name", "bodies", "carried", "along", "length", "reverse"
    )
    carried = carried_field.integer(0, len(kinds))
    along = along_field.integer(0, len(kinds) - carried)
    length = None if length_field.value is None else length_field.integer(0)
    bodies = decode_bodies(bodies_field, graph, kinds)
    if len(bodies) != 1 or result_count(bodies[0]) < carried or (not along and length is None):
        field.fail(f"expected one body that returns the {carried} carried values, and a length")
    return Scan(name, bodies, carried, along, length, reverse.flag())


def _encode_derivative(op: Pullback | Pushforward, graph: EncodeGraph) -> dict[str, Any]:
    encoded = {"of": encode_control(op.op, graph), "count": op.count, "wrt": list(op.wrt)}
    return {**encoded, "results": list(op.of)} if isinstance(op, Pullback) else encoded


def _decode_pullback(field: Field, name: str, graph: DecodeGraph, kinds: Kinds) -> ControlFlow:
    _, _, of, count_field, wrt_field, results = field.record(
        "kind", "name", "of", "count", "wrt", "results"
    )
    given = [at.integer(0, 1 << 20) for at in results.items()]
    count = _count(count_field, kinds, len(given))
    op = _inner(of, graph, kinds, count, len(given))
    return Pullback(op, count, _positions(wrt_field, count), given)


def _decode_pushforward(field: Field, name: str, graph: DecodeGraph, kinds: Kinds) -> ControlFlow:
    _, _, of, count_field, wrt_field = field.record("kind", "name", "of", "count", "wrt")
    wrt = [at.integer(0, 1 << 20) for at in wrt_field.items()]
    count = _count(count_field, kinds, len(wrt))
    op = _inner(of, graph, kinds, count, len(wrt))
    return Pushforward(op, count, _positions(wrt_field, count))


def _count(field: Field, kinds: Kinds, more: int) -> int:
    """Return the number of tensors that the underlying operator takes."""
    count = field.integer(0, len(kinds))
    if count + more > len(kinds) or any(kind != TENSOR for kind in kinds[: count + more]):
        field.fail("there are fewer tensors than that")
    return count


def _inner(
    field: Field, graph: DecodeGraph, kinds: Kinds, count: int, more: int
) -> ControlFlowOperator:
    numbers = list(kinds[count + more :])
    if any(kind != NUMBER for kind in numbers):
        field.fail("numbers come after all tensors")
    return _operator(field, graph, [*kinds[:count], *numbers])


def _operator(field: Field, graph: DecodeGraph, kinds: Kinds) -> ControlFlowOperator:
    """Return the operator that another one is derived from."""
    op = decode_control(field, graph, kinds)
    if not isinstance(op, ControlFlowOperator):
        field.fail("it has no derivative")
    return op


def _positions(field: Field, count: int) -> list[int]:
    return [at.integer(0, count - 1) for at in field.items()]


def _encode_mapped(op: MappedOperator, graph: EncodeGraph) -> dict[str, Any]:
    return {"of": encode_control(op.op, graph), "batched": list(op.batched)}


def _decode_mapped(field: Field, name: str, graph: DecodeGraph, kinds: Kinds) -> ControlFlow:
    _, _, of, batched_field = field.record("kind", "name", "of", "batched")
    batched = [each.flag() for each in batched_field.items()]
    if len(batched) > len(kinds):
        batched_field.fail("there are fewer operands than that")
    return MappedOperator(_operator(of, graph, kinds), batched)


def _encode_prefixes(op: AssociativeScan, graph: EncodeGraph) -> dict[str, Any]:
    return {"bodies": encode_bodies(op, graph), "along": op.along}


def _decode_prefixes(field: Field, name: str, graph: DecodeGraph, kinds: Kinds) -> ControlFlow:
    _, _, bodies_field, along_field = field.record("kind", "name", "bodies", "along")
    along = along_field.integer(1, len(kinds))
    # The body takes two slices of each.
    bodies = decode_bodies(bodies_field, graph, [*kinds[:along], *kinds])
    if len(bodies) != 1 or result_count(bodies[0]) != along:
        field.fail(f"expected one body that returns {along} values, as many as the scan combines")
    return AssociativeScan(name, bodies, along)


def _encode_replayed(op: Replayed, graph: EncodeGraph) -> dict[str, Any]:
    devices = [str(device) for device in op.devices]
    return {"of": encode_control(op.op, graph), "count": op.count, "devices": devices}


def _decode_replayed(field: Field, name: str, graph: DecodeGraph, kinds: Kinds) -> ControlFlow:
    _, _, of, count_field, devices_field = field.record("kind", "name", "of", "count", "devices")
    devices = [graph.device(each) for each in devices_field.items()]
    states = RandomStates.count(devices)
    count = _count(count_field, kinds, states)
    inner = [*kinds[:count], *kinds[count + states :]]
    return Replayed(_operator(of, graph, inner), count, devices)


def _encode_states(op: RandomStates, graph: EncodeGraph) -> dict[str, Any]:
    return {"devices": [str(device) for device in op.devices]}


def _decode_states(field: Field, name: str, graph: DecodeGraph, kinds: Kinds) -> ControlFlow:
    *_, devices = field.record("kind", "name", "devices")
    if kinds:
        field.fail("the states of generators depend on nothing")
    return RandomStates([graph.device(each) for each in devices.items()])


_NAMED_POLICIES: dict[str, Policy] = {
    policy.__name__: policy
    for policy in (
        policies.everything_saveable, policies.nothing_saveable, policies.dots_saveable,
        policies.dots_with_no_batch_dims_saveable,
    )
}  # fmt: skip


def _encode_policy(policy: Policy) -> Any:
    if isinstance(policy, SaveOperators):
        return {"operators": [op.name() for op in policy.overloads()]}
    if isinstance(policy, SaveEither):
        return {"either": [_encode_policy(policy.first), _encode_policy(policy.second)]}
    name = getattr(policy, "__name__", type(policy).__name__)
    if _NAMED_POLICIES.get(name) is not policy:
        raise NoFileForm(f"a checkpoint whose policy is a user-defined function ({name})")
    return name


def _decode_policy(field: Field, made_with: str) -> Policy:
    if type(field.value) is str:
        return field.one_of(_NAMED_POLICIES, "a policy")
    if "either" in field.mapping():
        (either,) = field.record("either")
        first, second = either.items(2)
        return SaveEither(_decode_policy(first, made_with), _decode_policy(second, made_with))
    (operators,) = field.record("operators")
    found_ops = [operator_named(each, made_with)[0].overload for each in operators.items()]
    return SaveOperators(frozenset(found_ops))


def _encode_checkpoint(op: CheckpointCall, graph: EncodeGraph) -> dict[str, Any]:
    policy = _encode_policy(op.policy)
    return {"bodies": encode_bodies(op, graph), "policy": policy, "random": op.preserve}


def _decode_checkpoint(field: Field, name: str, graph: DecodeGraph, kinds: Kinds) -> ControlFlow:
    _, _, bodies, policy, random = field.record("kind", "name", "bodies", "policy", "random")
    body = _single(bodies, graph, kinds)
    return CheckpointCall(body, _decode_policy(policy, graph.made_with), random.flag())


def _encode_recompute(op: RecomputedCall, graph: EncodeGraph) -> dict[str, Any]:
    return {"bodies": encode_bodies(op, graph)}


def _decode_recompute(field: Field, name: str, graph: DecodeGraph, kinds: Kinds) -> ControlFlow:
    *_, bodies = field.record("kind", "name", "bodies")
    return RecomputedCall(name, [_single(bodies, graph, kinds)])


def _single(field: Field, graph: DecodeGraph, kinds: Kinds) -> Body:
    bodies = decode_bodies(field, graph, kinds)
    if len(bodies) != 1:
        field.fail(f"expected one body, got {len(bodies)}")
    return bodies[0]


# --- calls of functions with custom rules


_RANDOMNESS = {name: name for name in ("error", "different", "same", "split")}
_MOST = 1 << 16


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
    """Return the call that ``encode_call`` encoded."""
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
        randomness.one_of(_RANDOMNESS, f"one of {[*_RANDOMNESS]}"),
        axis,
        None if size.value is None else size.integer(0),
    )


def _dims(field: Field, count: int) -> tuple[int | None, ...]:
    items = field.items(count)
    return tuple(None if each.value is None else each.integer(0, _MOST) for each in items)


def register_all() -> None:
    """Register every kind of control flow for files."""
    for kind in (
        ControlKind("switch", Switch, _encode_switch, _decode_switch),
        ControlKind("while", While, _encode_while, _decode_while),
        ControlKind("scan", Scan, _encode_scan, _decode_scan),
        ControlKind("prefixes", AssociativeScan, _encode_prefixes, _decode_prefixes),
        ControlKind("pullback", Pullback, _encode_derivative, _decode_pullback),
        ControlKind("pushforward", Pushforward, _encode_derivative, _decode_pushforward),
        ControlKind("mapped", MappedOperator, _encode_mapped, _decode_mapped),
        ControlKind("checkpoint", CheckpointCall, _encode_checkpoint, _decode_checkpoint),
        ControlKind("recompute", RecomputedCall, _encode_recompute, _decode_recompute),
        ControlKind("replayed", Replayed, _encode_replayed, _decode_replayed),
        ControlKind("states", RandomStates, _encode_states, _decode_states),
        ControlKind("function", FunctionCall, encode_call, decode_call),
    ):
        register_control(kind)
    register_callees()
