"""Control flow in files: the fields and the decoder of each operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from tsfunc.bridge.control.control_flow import Body, ControlFlow, RandomStates
from tsfunc.bridge.grad.remat_policy import Policy, SaveEither, SaveOperators
from tsfunc.program.fields import Field
from tsfunc.program.files.callees import TracedCallee
from tsfunc.program.files.graphs import (
    ControlKind,
    Fields,
    GraphReader,
    GraphWriter,
    StoredOperator,
    decode_control,
    register_control,
    result_count,
)
from tsfunc.program.files.json_values import NoFileForm, ValueReader, encode
from tsfunc.program.files.operator_calls import NUMBER, TENSOR, ValueType, operator_named
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

_BATCHING = {name: name for name in get_args(Batching)}
_CHECKPOINTS = {
    name: name for literal in get_args(Checkpoint) for name in get_args(literal) if name
}


def _decode_switch(stored: StoredOperator, bodies_field: Field, batching: Field) -> ControlFlow:
    bodies = stored.bodies(bodies_field)
    if (
        not bodies
        or stored.types[:1] != [TENSOR]
        or len({result_count(body) for body in bodies}) != 1
    ):
        stored.fail("expected a tensor to choose by, and branches with equal numbers of results")
    return Switch(stored.name, bodies, batching.one_of(_BATCHING, f"one of {[*_BATCHING]}"))


def _decode_while(
    stored: StoredOperator, bodies_field: Field, carried_field: Field, checkpoint: Field
) -> ControlFlow:
    carried = carried_field.integer(0, len(stored.types))
    bodies = stored.bodies(bodies_field)
    if [result_count(body) for body in bodies] != [1, carried]:
        stored.fail(f"expected a condition, and a body that returns the {carried} carried values")
    policy: Any = None
    if checkpoint.value is not None:
        policy = checkpoint.one_of(_CHECKPOINTS, f"null or one of {[*_CHECKPOINTS]}")
    return While(stored.name, bodies, carried, policy)


def _decode_scan(
    stored: StoredOperator,
    bodies_field: Field,
    carried_field: Field,
    along_field: Field,
    length_field: Field,
    reverse: Field,
) -> ControlFlow:
    carried = carried_field.integer(0, len(stored.types))
    along = along_field.integer(0, len(stored.types) - carried)
    length = None if length_field.value is None else length_field.integer(0)
    bodies = stored.bodies(bodies_field)
    if len(bodies) != 1 or result_count(bodies[0]) < carried or (not along and length is None):
        stored.fail(f"expected one body that returns the {carried} carried values, and a length")
    return Scan(stored.name, bodies, carried, along, length, reverse.flag())


def _decode_pullback(
    stored: StoredOperator, of: Field, count_field: Field, wrt_field: Field, results: Field
) -> ControlFlow:
    positions = [at.integer(0, 1 << 20) for at in results.items()]
    count = _count(stored, count_field, len(positions))
    op = _inner(stored, of, count, len(positions))
    return Pullback(op, count, _positions(wrt_field, count), positions)


def _decode_pushforward(
    stored: StoredOperator, of: Field, count_field: Field, wrt_field: Field
) -> ControlFlow:
    wrt = [at.integer(0, 1 << 20) for at in wrt_field.items()]
    count = _count(stored, count_field, len(wrt))
    op = _inner(stored, of, count, len(wrt))
    return Pushforward(op, count, _positions(wrt_field, count))


def _count(stored: StoredOperator, field: Field, more: int) -> int:
    """Return the number of tensors that the underlying operator takes."""
    types = stored.types
    count = field.integer(0, len(types))
    if count + more > len(types) or any(type_ != TENSOR for type_ in types[: count + more]):
        field.fail("there are fewer tensors than that")
    return count


def _inner(stored: StoredOperator, field: Field, count: int, more: int) -> ControlFlowOperator:
    tensors, numbers = stored.types[:count], stored.types[count + more :]
    if any(type_ != NUMBER for type_ in numbers):
        field.fail("numbers come after all tensors")
    return _operator(field, stored.reader, [*tensors, *numbers])


def _operator(field: Field, reader: GraphReader, types: Sequence[ValueType]) -> ControlFlowOperator:
    """Return the operator that another one is derived from."""
    op = decode_control(field, reader, types)
    if not isinstance(op, ControlFlowOperator):
        field.fail("it has no derivative")
    return op


def _positions(field: Field, count: int) -> list[int]:
    return [at.integer(0, count - 1) for at in field.items()]


def _decode_mapped(stored: StoredOperator, of: Field, batched_field: Field) -> ControlFlow:
    batched = [item.flag() for item in batched_field.items()]
    if len(batched) > len(stored.types):
        batched_field.fail("there are fewer operands than that")
    return MappedOperator(_operator(of, stored.reader, stored.types), batched)


def _decode_prefixes(
    stored: StoredOperator, bodies_field: Field, along_field: Field
) -> ControlFlow:
    along = along_field.integer(1, len(stored.types))
    # The body takes two slices of each.
    bodies = stored.bodies(bodies_field, [*stored.types[:along], *stored.types])
    if len(bodies) != 1 or result_count(bodies[0]) != along:
        stored.fail(f"expected one body that returns {along} values, as many as the scan combines")
    return AssociativeScan(stored.name, bodies, along)


def _decode_replayed(
    stored: StoredOperator, of: Field, count_field: Field, devices_field: Field
) -> ControlFlow:
    devices = [stored.reader.device(item) for item in devices_field.items()]
    states = RandomStates.count(devices)
    count = _count(stored, count_field, states)
    inner = [*stored.types[:count], *stored.types[count + states :]]
    return Replayed(_operator(of, stored.reader, inner), count, devices)


def _decode_states(stored: StoredOperator, devices: Field) -> ControlFlow:
    if stored.types:
        stored.fail("the states of generators depend on nothing")
    return RandomStates([stored.reader.device(item) for item in devices.items()])


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


def _encode_policy_of(op: CheckpointCall, writer: GraphWriter) -> Any:
    return _encode_policy(op.policy)


def _decode_policy(field: Field, made_with: str) -> Policy:
    if type(field.value) is str:
        return field.one_of(_NAMED_POLICIES, "a policy")
    if "either" in field.mapping():
        (either,) = field.record("either")
        first, second = either.items(2)
        return SaveEither(_decode_policy(first, made_with), _decode_policy(second, made_with))
    (operators,) = field.record("operators")
    found_ops = [operator_named(item, made_with)[0].overload for item in operators.items()]
    return SaveOperators(frozenset(found_ops))


def _decode_checkpoint(
    stored: StoredOperator, bodies: Field, policy: Field, random: Field
) -> ControlFlow:
    body = _single(stored, bodies)
    return CheckpointCall(body, _decode_policy(policy, stored.reader.made_with), random.flag())


def _decode_recompute(stored: StoredOperator, bodies: Field) -> ControlFlow:
    return RecomputedCall(stored.name, [_single(stored, bodies)])


def _single(stored: StoredOperator, field: Field) -> Body:
    bodies = stored.bodies(field)
    if len(bodies) != 1:
        field.fail(f"expected one body, got {len(bodies)}")
    return bodies[0]


# --- calls of functions with custom rules


_RANDOMNESS = {name: name for name in ("error", "different", "same", "split")}
_MOST = 1 << 16


def _callee_number(op: FunctionCall, writer: GraphWriter) -> int:
    """Return the number of the called function in the file."""
    callee, callees = op.callee, writer.callees
    if isinstance(callee, TracedCallee):
        return callees.number(id(callee), callee, lambda: callee)
    assert isinstance(callee, PythonCallee)
    return callees.number(key_of(callee), callee, lambda: traced_callee(callee, callees))


def _encode_maps(op: FunctionCall, writer: GraphWriter) -> list[Any]:
    return [
        {
            "in_dims": list(dim_map.in_dims),
            "out_dims": list(dim_map.out_dims),
            "randomness": dim_map.randomness,
            "axis_name": encode(dim_map.axis_name),
            "axis_size": _fixed_size(dim_map.axis_size),
        }
        for dim_map in op.maps
    ]


def _fixed_size(size: Any) -> Any:
    if size is not None and not isinstance(size, int):
        raise NoFileForm("a function with rules in a vmap of a size that no tensor has")
    return size


def _decode_call(
    stored: StoredOperator, number: Field, maps_field: Field, written_field: Field
) -> ControlFlow:
    callee = stored.reader.callees.at(number)
    if list(stored.types) != [TENSOR] * callee.tensors + [NUMBER] * callee.numbers:
        stored.fail(f"{callee.name} is called with other values than it takes")
    maps = [_decode_map(item, callee, stored.reader) for item in maps_field.items()]
    written = [at.integer(0, callee.tensors - 1) for at in written_field.items()]
    op = FunctionCall(callee, maps, written)
    op.name = op.__name__ = stored.name
    return op


def _decode_map(field: Field, callee: TracedCallee, reader: GraphReader) -> EnclosingVmap:
    ins, outs, randomness, axis_name, size = field.record(
        "in_dims", "out_dims", "randomness", "axis_name", "axis_size"
    )
    axis = ValueReader().decode(axis_name)
    if isinstance(axis, list | dict | slice):
        axis_name.fail_expected("the name of an axis")
    return EnclosingVmap(
        _read_dims(ins, callee.tensors),
        _read_dims(outs, callee.results),
        randomness.one_of(_RANDOMNESS, f"one of {[*_RANDOMNESS]}"),
        axis,
        None if size.value is None else size.integer(0),
    )


def _read_dims(field: Field, count: int) -> tuple[int | None, ...]:
    items = field.items(count)
    return tuple(None if item.value is None else item.integer(0, _MOST) for item in items)


def register_all() -> None:
    """Register every kind of control flow for files."""
    bodies, derivative = {"bodies": "bodies"}, {"of": "op", "count": "count", "wrt": "wrt"}
    loop = {**bodies, "carried": "carried"}
    scan = {**loop, "along": "along", "length": "length", "reverse": "reverse"}
    checkpoint: Fields = {**bodies, "policy": _encode_policy_of, "random": "preserve"}
    call: Fields = {"number": _callee_number, "maps": _encode_maps, "written": "written"}
    replayed = {"of": "op", "count": "count", "devices": "devices"}
    for kind in (
        ControlKind("switch", Switch, {**bodies, "batching": "batching"}, _decode_switch),
        ControlKind("while", While, {**loop, "checkpoint": "checkpoint"}, _decode_while),
        ControlKind("scan", Scan, scan, _decode_scan),
        ControlKind("prefixes", AssociativeScan, {**bodies, "along": "along"}, _decode_prefixes),
        ControlKind("pullback", Pullback, {**derivative, "results": "results"}, _decode_pullback),
        ControlKind("pushforward", Pushforward, derivative, _decode_pushforward),
        ControlKind("mapped", MappedOperator, {"of": "op", "batched": "batched"}, _decode_mapped),
        ControlKind("checkpoint", CheckpointCall, checkpoint, _decode_checkpoint),
        ControlKind("recompute", RecomputedCall, bodies, _decode_recompute),
        ControlKind("replayed", Replayed, replayed, _decode_replayed),
        ControlKind("states", RandomStates, {"devices": "devices"}, _decode_states),
        ControlKind("function", FunctionCall, call, _decode_call),
    ):
        register_control(kind)
    register_callees()
