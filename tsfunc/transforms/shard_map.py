"""``shard_map``: turn a function of one rank's shards into a function of whole tensors.

The body runs once on each rank, on plain tensors. Levels bind the names of the mesh axes for
collectives. The conversions of inputs and outputs are exchanges among the ranks too:
NOTE [exchanges] in ``bridge/mesh/mesh_operators``. Over a :class:`VirtualMesh` the same body runs
as nested vmaps.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from tsfunc import pytrees
from tsfunc.bridge.control.axis_collectives import is_bound
from tsfunc.bridge.grad.autograd import is_differentiable, is_perturbed
from tsfunc.bridge.mesh.agreement import await_agreement, exchanged_texts
from tsfunc.bridge.mesh.failures import error_text, report
from tsfunc.bridge.mesh.levels import MeshLevel, agree_on_generators, cross_boundary, mesh_levels
from tsfunc.bridge.mesh.mesh_operators import outermost_trace
from tsfunc.bridge.mesh.meshes import Mesh, is_registered, registered_mesh
from tsfunc.bridge.mesh.spread_level import SpreadLevel
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.boundaries import boundary
from tsfunc.bridge.tracers.dtensors import is_dtensor
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level, substitute_tensors
from tsfunc.bridge.tracers.registrations import watching_random
from tsfunc.dispatch.state import tls, using
from tsfunc.errors import MeshError, RanksDisagree
from tsfunc.transforms.closure_convert import consts_of
from tsfunc.transforms.control.call_forms import also_called
from tsfunc.transforms.mesh_specs import P, bound_axes, check_divides, match_specs
from tsfunc.transforms.out_dims import result_of
from tsfunc.transforms.transformed import Transformed, named_as
from tsfunc.transforms.virtual_mesh import VirtualMesh, run_nested
from tsfunc.transforms.vmap_spec import Spec
from tsfunc.user_code import folding

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
AnyMesh = DeviceMesh | VirtualMesh | Mapping[str, Any]


@folding("shard_map")
@also_called(f="func")
def shard_map(
    func: Callable[_Params, _Result],
    mesh: AnyMesh,
    in_specs: Any,
    out_specs: Any,
    *,
    axis_names: Sequence[str] | None = None,
    randomness: str = "error",
    inputs: Literal["global", "local"] = "global",
    outputs: Literal["global", "local", "dtensor"] = "global",
    check: Literal["programs", "calls", "values"] | None = "programs",
) -> Transformed[_Params, _Result]:
    """Map a function of shards over the ranks of a mesh.

    Args:
        func: takes one rank's shards, which have the rank of the whole tensors, and returns its
            shards of the results. Collectives (:func:`tsfunc.psum` and others) exchange values
            along the mesh's axes by their names.
        mesh: a ``torch.distributed`` ``DeviceMesh`` with ``mesh_dim_names``, a
            :class:`tsfunc.VirtualMesh`, or a dict from names to process groups.
        in_specs: for each argument a :class:`tsfunc.P`, or a pytree prefix of such specs. Along an
            axis that a spec does not name, all ranks get the same shard.
        out_specs: the specs of the results. If a spec does not name an axis, the caller guarantees
            that the ranks along the axis return equal tensors.
        axis_names: the axes that the function sees; by default all axes of the mesh.
        randomness: the mode of random operators: "error", "same" (equal numbers on every rank),
            "different" (other numbers on every rank), or "split" (the numbers that ``vmap`` gives
            each index). "same" and "split" need equal states of torch's generators on all ranks,
            which are compared where calls are checked.
        inputs: "global" for whole tensors, equal on every rank, which are sliced without
            communication; "local" for tensors that are shards already. DTensors are passed as
            their shards, and their placements must match the spec.
        outputs: "global" assembles the shards on every rank; "local" returns this rank's shards;
            "dtensor" returns DTensors.
        check: "calls" makes the ranks agree on each collective before they run it, by a small
            collective. If ranks call different collectives, or one raises, all ranks raise an
            error instead of computing wrong numbers or waiting. "programs" does this outside of
            programs, and makes the ranks agree on each program at its first run. "values" also
            compares the bits of arguments and results that specs guarantee to be equal. None checks
            nothing.

    Returns:
        A function of the arguments of ``func``. Every transform can be applied to it and inside of
        it. Its derivatives are those of a ``vmap`` with the specs as ``in_dims`` and ``out_dims``:
        the gradient of a ``psum`` is a ``psum``, and the gradient by an input with ``P()`` is
        summed over the ranks.

    Raises:
        MeshError: a spec does not fit the mesh or a tensor, a DTensor has other placements, or the
            mesh's axes have no names.
        ValueError: an option has an invalid value, or an active ``vmap`` has the name of an axis.
        RanksDisagree: another rank calls another collective, runs another program, has other
            values although a spec guarantees equal ones, or has raised.

    Example:
        >>> import torch
        >>> from tsfunc import P, VirtualMesh, pmean, shard_map
        >>> def centered(x):
        ...     return x - pmean(x.mean(), "dp")
        >>> shard_map(centered, VirtualMesh(dp=2), P("dp"), P("dp"))(torch.tensor([1., 2., 6., 7.]))
        tensor([-3., -2.,  2.,  3.])

    Corresponds to ``jax.shard_map`` with ``check_vma=False``; JAX's name ``f`` of the first
    argument is accepted too.
    """
    _check_option("randomness", randomness, ("error", "same", "different", "split"))
    _check_option("inputs", inputs, ("global", "local"))
    _check_option("outputs", outputs, ("global", "local", "dtensor"))
    _check_option("check", check, ("programs", "calls", "values", None))

    plans = _ExchangePlans("in_specs", in_specs), _ExchangePlans("out_specs", out_specs)
    of_shards: Callable[..., Any] = func

    @named_as(func)
    @boundary("shard_map", func)
    def mapped(*args: Any) -> Any:
        if isinstance(mesh, VirtualMesh):
            if inputs != "global" or outputs != "global":
                raise ValueError(
                    "shard_map: expected inputs='global' and outputs='global' over a VirtualMesh, "
                    f"which has all ranks in one process, got {inputs!r} and {outputs!r}."
                )
            axes = bound_axes(mesh.sizes, axis_names)
            return run_nested(func, mesh, axes, in_specs, out_specs, randomness, args)
        registered = mesh_of(mesh)
        axes = bound_axes(registered.sizes, axis_names)
        _refuse_hidden(axes)
        with bound(registered, axes, check, randomness == "error", has_boundary=True) as levels:
            shards = _shards(args, plans[0], levels, inputs, mesh)
            with _enter_levels(func, list(levels.values())):
                if randomness == "error":
                    with watching_random():
                        out = of_shards(*shards)
                else:
                    if randomness != "different":
                        agree_on_generators(list(levels.values()))
                    body = of_shards if randomness == "same" else _spread_once(func, axes)
                    out = body(*shards)
            return _put_together(out, plans[1], levels, outputs, mesh)

    return mapped


@folding("mesh_axes")
@contextmanager
def mesh_axes(
    mesh: AnyMesh, *, check: Literal["programs", "calls", "values"] | None = "programs"
) -> Iterator[None]:
    """Context manager: bind the names of a mesh's axes in code that runs once on every rank.

    Tensors are this rank's own and are not wrapped. Collectives by the axes' names exchange
    values, as inside of :func:`tsfunc.shard_map`.

    Args:
        mesh: a ``DeviceMesh`` with names, or a dict from names to process groups.
        check: as for ``shard_map``.

    Returns:
        The context manager. Its ``with`` statement binds no value.

    Raises:
        MeshError: the mesh's axes have no names, or another mesh in use has the same names.
        ValueError: an active ``vmap`` has the name of an axis.

    Example:
        >>> import torch
        >>> from tsfunc import mesh_axes, psum
        >>> def on_every_rank(mesh, x):
        ...     with mesh_axes(mesh):
        ...         return psum(x, "dp")

    Corresponds to the body of ``jax.shard_map``, for a function that already runs on every rank.
    """
    if isinstance(mesh, VirtualMesh):
        raise MeshError(
            "mesh_axes: expected a mesh of processes, got a VirtualMesh, whose ranks are in one "
            "process. Use shard_map(f, mesh, in_specs, out_specs)."
        )
    registered = mesh_of(mesh)
    axes = tuple(registered.sizes)
    _refuse_hidden(axes)
    _check_option("check", check, ("programs", "calls", "values", None))
    with bound(registered, axes, check):
        yield


def mesh_of(mesh: Any) -> Mesh:
    """Return the mesh of a ``DeviceMesh`` or of a dict of process groups."""
    if isinstance(mesh, DeviceMesh):
        entry = _of_device_meshes.get(id(mesh))
        if entry is not None and entry[0]() is mesh and is_registered(entry[1]):
            return entry[1]
        names = mesh.mesh_dim_names
        if names is None:
            raise MeshError(
                f"shard_map: expected a mesh whose axes have names, got {mesh}. Give it "
                f"mesh_dim_names=."
            )
        registered = registered_mesh({name: mesh.get_group(name) for name in names})
        key = id(mesh)
        _of_device_meshes[key] = weakref.ref(mesh, lambda _: _of_device_meshes.pop(key)), registered
        return registered
    if isinstance(mesh, Mapping):
        return registered_mesh(mesh)
    raise MeshError(
        f"shard_map: expected a DeviceMesh, a VirtualMesh or a dict of process groups, got "
        f"{type(mesh).__name__}."
    )


# The key is the identity: an equal mesh may have new process groups, made after a destruction.
_of_device_meshes: dict[int, tuple[weakref.ref[DeviceMesh], Mesh]] = {}


class bound:
    """Context manager: activate levels that bind the names of axes, and return them by name.

    If calls are checked, the ranks agree at the end on the outcome of the block, so that a rank
    that raises does not leave others waiting.

    Args:
        check: as for ``shard_map``.
        forbids_random: True if random operators in the block raise an error.
        has_boundary: True for ``shard_map``, which converts values.
    """

    __slots__ = ("_check", "_levels", "_mesh")

    def __init__(
        self, mesh: Mesh, axes: Sequence[str], check: str | None, forbids_random: bool = False,
        has_boundary: bool = False,
    ) -> None:  # fmt: skip
        self._mesh, self._check = mesh, check
        self._levels: dict[str, MeshLevel] = {}
        for axis in axes:
            previous = list(self._levels.values())
            with using(previous[-1].inner if previous else tls.state):
                self._levels[axis] = MeshLevel(mesh, axis, check, forbids_random, has_boundary)

    def __enter__(self) -> dict[str, MeshLevel]:
        for level in self._levels.values():
            level.__enter__()
        return self._levels

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        levels = list(self._levels.values())
        try:
            trace_level = outermost_trace()
            if trace_level is not None:
                if error is not None:
                    # The other ranks may wait in an exchange of the program that they have made.
                    trace_level.failing.append(functools.partial(report, self._mesh))
            elif error is not None:
                _tell(self._mesh, levels, error)
            elif self._check is not None:
                for level in levels:
                    await_agreement(self._mesh, level.axis_name, "the end of the body")
        finally:
            for level in reversed(levels):
                level.__exit__(None, None, None)


def _tell(mesh: Mesh, levels: Sequence[MeshLevel], error: BaseException) -> None:
    """Report to the other ranks that this rank's body has raised.

    If each collective along an axis is preceded by an agreement, the error is exchanged in one.
    Along other axes, ranks may wait in a collective that this rank does not join, and read a
    report. Along the axis of a failed agreement, they raise the same error.
    """
    axis_name = error.axis_name if isinstance(error, RanksDisagree) else None
    informed = [
        level.axis_name
        for level in levels
        if level.check in ("calls", "values")
        or (level.check == "programs" and not mesh.has_programs(level.axis_name))
    ]
    report(mesh, error, informed)
    for axis in informed:
        if axis != axis_name:
            with suppress(RuntimeError):  # the group can't be reached any more
                exchanged_texts(mesh, axis, error_text(error))


def _refuse_hidden(axes: Sequence[Hashable]) -> None:
    meshes = {level.axis_name for level in mesh_levels()}
    for name in axes:
        if name not in meshes and is_bound(name):
            raise ValueError(
                f"shard_map: expected axes with other names than those of active vmaps, got "
                f"{name!r} for both. Rename one of them."
            )


def _check_option(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        raise ValueError(
            f"shard_map: {name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}."
        )


class _LeafExchanges(NamedTuple):
    """The exchanges that a spec stands for.

    Attributes:
        spread: a pair (dim, axis) for each axis of a sharded dim, the slowest axis of a dim first.
        same: the axes that the spec does not name.
        parts: a pair (dim, number of parts) for each sharded dim.
    """

    spec: P
    spread: tuple[tuple[int, str], ...]
    same: tuple[str, ...]
    parts: tuple[tuple[int, int], ...]

    def divides(self, x: torch.Tensor) -> bool:
        """True if each sharded dim can be split into equal parts."""
        shape = x.shape
        return all(dim < len(shape) and not shape[dim] % parts for dim, parts in self.parts)


class _ExchangePlans:
    """The exchanges of all leaves, by the structure of the arguments or results.

    Args:
        name: the parameter of ``shard_map``.
    """

    def __init__(self, name: str, specs: Any) -> None:
        self.name, self.specs = f"shard_map: {name}", specs
        self._known: dict[Any, list[_LeafExchanges]] = {}

    def of(self, tree: Any, value: Any, levels: Mapping[str, MeshLevel]) -> list[_LeafExchanges]:
        """Return the plan of each leaf.

        Args:
            tree: the structure of the value.
            value: the arguments or the results.
            levels: the mesh axes by name.

        Raises:
            MeshError: the specs do not fit the value or the mesh.
        """
        plan = self._known.get(tree)
        if plan is None:
            sizes = {name: level.batch_size for name, level in levels.items()}
            specs = match_specs(self.name, self.specs, value, sizes)
            plan = [
                _LeafExchanges(
                    spec,
                    tuple((dim, name) for dim, names in spec.dims() for name in names),
                    tuple(name for name in levels if name not in spec.names),
                    tuple(
                        (dim, math.prod(sizes[name] for name in names))
                        for dim, names in spec.dims()
                    ),
                )
                for spec in specs
            ]
            if len(self._known) < _MOST_PLANS:
                self._known[tree] = plan
        return plan


_MOST_PLANS = 64  # the most argument structures that one function keeps


def _enter_levels(
    func: Callable[..., Any], levels: Sequence[MeshLevel]
) -> AbstractContextManager[None]:
    """Context manager: tensors that the body captures are treated as arguments with ``P()``.

    The derivatives by these tensors are then summed over the ranks.
    """
    if not torch.is_grad_enabled() and not tls.state.levels[: -len(levels)]:
        return _UNCHANGED
    traced = current_trace() is not None  # a derivative of the program may come later
    captured = [
        x
        for x in consts_of([func])
        if is_differentiable(x) and (traced or is_perturbed(x)) and not is_dtensor(x)
    ]
    if not captured:
        return _UNCHANGED
    seen = [as_seen_by_current_level(x) for x in captured]
    return substitute_tensors(captured, [cross_boundary(levels, "enter", x) for x in seen])


_UNCHANGED: AbstractContextManager[None] = nullcontext()


def _shards(
    args: tuple[Any, ...],
    plans: _ExchangePlans,
    levels: Mapping[str, MeshLevel],
    inputs: str,
    mesh: Any,
) -> Any:
    """Return the arguments as shards for the body."""
    flat, tree = pytrees.flatten(args)
    shards = []
    for x, plan in zip(flat, plans.of(tree, args, levels), strict=True):
        if isinstance(x, torch.Tensor):
            if type(x) is not torch.Tensor and is_dtensor(x):
                x = _local_shard(x, plan.spec, mesh)
            elif inputs == "global" and plan.spread:
                if not plan.divides(x):
                    sizes = {name: level.batch_size for name, level in levels.items()}
                    check_divides(plans.name, x, plan.spec, sizes)
                for dim, name in plan.spread:
                    x = levels[name].exchange("slice", (dim,), x)
            if plan.same:
                x = cross_boundary([levels[name] for name in plan.same], "enter", x)
        shards.append(x)
    return pytrees.unflatten(tree, shards)


def _put_together(
    out: Any, plans: _ExchangePlans, levels: Mapping[str, MeshLevel], outputs: str, mesh: Any
) -> Any:
    """Return the results in the form that ``outputs`` names."""
    flat, tree = pytrees.flatten(out)
    results = []
    for x, plan in zip(flat, plans.of(tree, out, levels), strict=True):
        if isinstance(x, torch.Tensor):
            for dim, _ in plan.spread:
                if dim >= x.dim():
                    raise MeshError(
                        f"{plans.name}: expected a result with a dim {dim} for {plan.spec!r}, got "
                        f"one of shape {tuple(x.shape)}."
                    )
            if plan.same:
                x = cross_boundary([levels[name] for name in plan.same], "leave", x)
            if outputs == "dtensor":
                x = _as_dtensor(x, plan.spec, mesh)
            elif outputs == "global":
                for dim, name in reversed(plan.spread):
                    x = levels[name].exchange("tile", (dim,), x)
        results.append(x)
    return pytrees.unflatten(tree, results)


def _placements(spec: P, mesh: Any) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"shard_map: expected a DeviceMesh for DTensors, got {mesh!r}.")
    names = mesh.mesh_dim_names
    assert names is not None
    places: list[Any] = [Replicate() for _ in names]
    for dim, along in spec.dims():
        if [name for name in names if name in along] != list(along):
            raise MeshError(
                f"shard_map: expected the axes of a DTensor's dim in the mesh's order {names}, got "
                f"{spec!r}."
            )
        for name in along:
            places[names.index(name)] = Shard(dim)
    return places


def _local_shard(x: Any, spec: P, mesh: Any) -> torch.Tensor:
    """Return the local shard of a DTensor; raise if its placements differ from the spec."""
    expected = _placements(spec, mesh)
    if x.device_mesh != mesh or list(x.placements) != expected:
        raise MeshError(
            f"shard_map: in_specs: expected a DTensor on {mesh} placed as {expected} for {spec!r}, "
            f"got one on {x.device_mesh} placed as {list(x.placements)}. Redistribute it, or give "
            f"the spec that it has."
        )
    return x.to_local()


def _as_dtensor(x: torch.Tensor, spec: P, mesh: Any) -> torch.Tensor:
    """Return the DTensor that a shard belongs to."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(x, mesh, _placements(spec, mesh), run_check=False)


def _spread_once(func: Callable[..., Any], axes: Sequence[str]) -> Callable[..., Any]:
    """Return a function that runs one example of a batch that is spread over all ranks.

    The function draws the random numbers of its own index: NOTE [random numbers of an example] in
    ``ops/philox``.
    """
    spec = Spec(func, None, randomness="split", axis_size=1)

    def run(*args: Any) -> Any:
        level = SpreadLevel(1, "split", spec.label, False, axes)
        with level, watching_random():
            out = func(*args)
        return pytrees.tree_map(lambda x: _first_example(result_of(spec, x, 0, level)), out)

    return run


def _first_example(value: Any) -> Any:
    return value.select(0, 0) if isinstance(value, torch.Tensor) else value
