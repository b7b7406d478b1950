"""Conversion of a program to a ``torch.export.ExportedProgram``.

torch.export traces the program's graph again, as the ``forward`` of a module with the user's
parameters, buffers and submodules under the same names. The signature, the ``state_dict`` and the
results of torch.export's tools are therefore those of the user's module.

NOTE [assignments in exported programs]
A program ends with the function's assignments. An assignment to a buffer becomes a write into it,
as in torch.export. Assignments of values without tensors are left out, as in torch.export, and
values that the function read are constants. Other tensors can't be assigned.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
import torch.fx

from tsfunc import pytrees
from tsfunc.bridge.control.node_writes import written_arguments
from tsfunc.bridge.trace.torch_tracing import exported_by_torch
from tsfunc.bridge.tracers.torch_settings import is_persistent
from tsfunc.errors import ExportError
from tsfunc.ops.dims import memory_order, permuted_back
from tsfunc.program.graphs.compilable import make_compilable
from tsfunc.program.graphs.data import ProgramData
from tsfunc.program.graphs.example_arguments import sizes_for
from tsfunc.program.graphs.graph_module import graph_module
from tsfunc.program.graphs.torch_operators import in_torch_operators, left_over, no_operator
from tsfunc.program.guarding.call_spec import CallSpec
from tsfunc.program.guarding.guards import WatchedPlaceholder
from tsfunc.program.guarding.inputs import InputSpec
from tsfunc.program.passes.effects import sources
from tsfunc.types import Dim, DimExpr

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
# Sizes of the samples: primes are rarely constants in functions, or factors of constants.
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
_PLAIN = (int, float, bool, str, type(None))


def export_program(program: ProgramData) -> torch.export.ExportedProgram:
    """Return the program as a torch.export program; see ``Program.to_exported_program``."""
    call_spec = program.call_spec
    if call_spec is None:
        raise ExportError(
            f"{program.name}: expected a program made for a call, got one without a record of "
            f"its call."
        )
    graph = in_torch_operators(
        graph_module(program.name, program.graph, program.lifted, as_inputs=True), exact=False
    )
    make_compilable(graph)
    problem = next(_problems(program, call_spec, graph), None)
    if problem is not None:
        raise ExportError(
            f"{program.name}: an ExportedProgram cannot hold {problem.removesuffix('.')}. "
            f"`.graph_module` is the program for torch's other tools."
        )
    sizes = sizes_for(call_spec.named_dims, _PRIMES)
    leaves = list(call_spec.leaves)
    for spec in call_spec.inputs:
        leaves[spec.position] = _sample(spec, sizes)
    args, kwargs = pytrees.unflatten(call_spec.tree, leaves)
    names = _parameters(program, call_spec, len(args))
    module = _module(program, graph, names, list(kwargs))
    # torch.export infers some relations only if they are not given.
    failed: Exception | None = None
    least = {name: max(2, dim.min or 0) for name, dim in call_spec.named_dims.items()}
    for with_expressions in (True, True, False):
        try:
            shapes = _shapes(program, call_spec, names, with_expressions, least)
            return exported_by_torch(module, args, kwargs, shapes)
        except Exception as error:
            failed = failed or error
            least.update(_least_of(str(error), least))
    raise ExportError(
        f"{program.name}: torch.export could not take the program over: {failed}"
    ) from failed


def _problems(
    program: ProgramData, call_spec: CallSpec, graph: torch.fx.GraphModule
) -> Iterator[str]:
    inputs = set(program.inputs)
    for i, leaf in enumerate(call_spec.leaves):
        if i not in inputs and not isinstance(leaf, _PLAIN):
            cls = leaf.cls if isinstance(leaf, WatchedPlaceholder) else type(leaf)
            yield f"an argument of type {cls.__name__}"
    for position in program.inputs:
        if position >= len(call_spec.leaves) and position not in program.state.inputs:
            yield f"attributes of tensors. {program.advice_about_attributes}"
    for i, update in enumerate(program.updates):
        if update.slots() and i not in program.state.assigned:
            text = update.text
            yield f"the assignment of a tensor to {text}, which is not a buffer of the module"
    for name, reason in left_over(graph):
        yield no_operator(name, reason)


# --- the arguments


def _sample(spec: InputSpec, sizes: Mapping[str, int]) -> torch.Tensor:
    like = spec.sample
    shape = spec.shape(sizes)
    order = memory_order(like.shape, like.stride())
    tensor = torch.empty([int(shape[i] or 0) for i in order], dtype=like.dtype, device=like.device)
    sample = permuted_back(tensor, order)
    return sample.requires_grad_() if like.requires_grad else sample


def _least_of(error: str, least: Mapping[str, int]) -> dict[str, int]:
    """Return the minimum sizes in an error of torch.export that are larger than the given ones.

    torch.export has no program for small sizes (NOTE [small sizes] in
    ``program/dims/constraints``).
    """
    said = re.findall(r"^\s*(\w+) = Dim\('\w+', min=(\d+)", error, re.MULTILINE)
    return {name: int(low) for name, low in said if int(low) > least.get(name, 1 << 62)}


def _shapes(
    program: ProgramData,
    call_spec: CallSpec,
    names: Sequence[str],
    with_expressions: bool,
    least: Mapping[str, int],
) -> dict[str, Any]:
    """Return the dynamic dims, and dynamic ints, in the form of torch.export.

    Args:
        call_spec: the assumptions about its arguments.
        names: the positional parameters.
        with_expressions: True if expressions are passed to torch.export; False if it infers them.
        least: the minimum size of each named dim.
    """
    dims = {name: _export_dim(dim, least[name]) for name, dim in call_spec.named_dims.items()}
    shapes: list[Any] = [None] * len(call_spec.leaves)
    for position in program.inputs:
        if position < len(shapes) and type(call_spec.leaves[position]) is int:
            shapes[position] = torch.export.Dim.DYNAMIC
    for spec in call_spec.inputs:
        shapes[spec.position] = {
            i: _dim_for_export(dim, dims, with_expressions) for i, dim in enumerate(spec.dims)
        }
    args, kwargs = pytrees.unflatten(call_spec.tree, [_ExportShape(shape) for shape in shapes])
    return {
        **{name: _as_given(arg) for name, arg in zip(names, args, strict=True)},
        **{name: _as_given(arg) for name, arg in kwargs.items()},
    }


class _ExportShape:
    """The dynamic dims of one leaf, while the containers around it are built."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _as_given(tree: Any) -> Any:
    """Return containers of dynamic dims as torch.export takes them: objects as lists of entries."""
    if isinstance(tree, _ExportShape):
        return tree.value
    if isinstance(tree, dict):
        return {key: _as_given(item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        entries = [_as_given(item) for item in tree]
        named = optree.is_namedtuple_instance(tree)
        return type(tree)(*entries) if named else type(tree)(entries)
    return [_as_given(child) for child in pytrees.children_of(tree)]


def _export_dim(dim: Dim, least: int) -> Any:
    """Return a named dim in torch.export's form: a multiple is a number times another dim."""
    step = dim.multiple_of or 1
    most = None if dim.max is None else dim.max // step
    name = dim.name if step == 1 else f"{dim.name}_by_{step}"
    base = torch.export.Dim(name, min=-(-least // step), max=most)
    return base if step == 1 else step * base


def _dim_for_export(dim: Any, dims: Mapping[str, Any], with_expressions: bool) -> Any:
    """Return a dim in torch.export's form, which has linear expressions of one name only."""
    if isinstance(dim, Dim):
        return dims[dim.name]
    if not isinstance(dim, DimExpr):
        return torch.export.Dim.STATIC
    line = _line(dim) if with_expressions else None
    if line is None:
        return torch.export.Dim.AUTO
    name, factor, rest = line
    if factor > 1 and isinstance(dims[name], type(2 * torch.export.Dim("n"))):
        return torch.export.Dim.AUTO  # a multiple of a multiple
    product = dims[name] if factor == 1 else factor * dims[name]
    return product + rest if rest > 0 else product - -rest if rest else product


def _line(dim: DimExpr) -> tuple[str, int, int] | None:
    """Return ``(name, factor, rest)`` of ``factor * name + rest``; None for other expressions."""
    if len(dim.names) != 1:
        return None
    (name,) = dim.names
    start = dim.evaluate({name: 0})
    factor = dim.evaluate({name: 1}) - start
    straight = all(dim.evaluate({name: n}) == factor * n + start for n in (2, 3, 7, 12, 101))
    return (name, factor, start) if straight and factor > 0 else None


def _parameters(program: ProgramData, call_spec: CallSpec, count: int) -> list[str]:
    """Return names for the positional arguments: the function's parameters if possible."""
    numbered = pytrees.unflatten(call_spec.tree, range(len(call_spec.leaves)))[0]
    names = []
    for i, each in enumerate(numbered):
        leaves, _ = pytrees.flatten(each)
        path = program.argument_paths.get(leaves[0], ()) if leaves else ()
        name = str(path[0]) if path else ""
        names.append(name if name.isidentifier() and name not in names else f"arg_{i}")
    return names[:count]


# --- the module


def _module(
    program: ProgramData, graph: torch.fx.GraphModule, names: Sequence[str], keywords: Sequence[str]
) -> torch.nn.Module:
    """Return a module with the function's parameters and state that computes the program."""

    class Exported(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            flat, _ = pytrees.flatten((args, kwargs))
            arguments = [
                flat[i] if i < len(flat) else _tensor_at(self, replaced[i]) for i in program.inputs
            ]
            arguments += [
                _tensor_at(self, p).clone() if p in copied else _tensor_at(self, p) for p in paths
            ]
            outputs = graph.forward(*arguments)
            count = program.out_tree.num_leaves
            results, values = list(outputs[:count]), outputs[count:]
            _assign(self, program, results, values)
            return pytrees.unflatten(program.out_tree, results)

    parameters = [inspect.Parameter(name, _POSITIONAL) for name in ("self", *names)]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in keywords]
    signature = inspect.Signature(parameters)
    Exported.forward.__signature__ = signature  # type: ignore[attr-defined]
    root = Exported()
    if program.state.module is not None:
        _give_state(root, program.state.module)
    replaced, paths = program.state.inputs, _lifted_paths(program, root)
    # torch's loops do not take constants.
    state_names = {name for named in (root.named_parameters, root.named_buffers)
             for name, _ in named(remove_duplicate=False)}  # fmt: skip
    copied = set(paths) - state_names if any(graph.children()) else set()
    return root


def _give_state(root: torch.nn.Module, module: torch.nn.Module) -> None:
    """Register parameters, buffers and submodules as a module has them, without their forwards.

    A submodule or tensor with two names stays one object.
    """
    copies = {id(module): root}
    for path, submodule in module.named_modules(remove_duplicate=False):
        parent, _, name = path.rpartition(".")
        like = copies.setdefault(id(submodule), torch.nn.Module())
        if path:
            copies[id(module.get_submodule(parent))].add_module(name, like)
        like.train(submodule.training)
        for name, parameter in submodule.named_parameters(recurse=False, remove_duplicate=False):
            like.register_parameter(name, parameter)
        for name, buffer in submodule.named_buffers(recurse=False, remove_duplicate=False):
            like.register_buffer(name, buffer, persistent=is_persistent(submodule, name))


def _lifted_paths(program: ProgramData, root: torch.nn.Module) -> list[str]:
    """Return the path in the module of each tensor that the program reads from outside.

    A tensor that is not in the traced module's state is added to the module. It becomes a constant
    if the program has computed it or if a module was traced; otherwise, or if it is written to, it
    becomes a parameter or buffer.
    """
    of_module = program.state.module is not None
    changed = {
        source
        for node in program.graph.nodes
        for target in written_arguments(node)
        for source in sources(target)
    }
    paths = []
    for node in program.graph.nodes:
        if node.op != "get_attr":
            continue
        name, tensor = str(node.target), program.tensor(node)
        path = program.state.names.get(name)
        if path is None or not of_module:
            fixed = (of_module or name in program.constants) and node not in changed
            wanted = path or program.state.attributes.get(name, name)
            path = _put_tensor(root, wanted, name, tensor, fixed)
        paths.append(path)
    return paths


def _put_tensor(
    root: torch.nn.Module, dotted_name: str, name: str, tensor: torch.Tensor, fixed: bool
) -> str:
    """Put a tensor into a module at a path, or under its name if the path is taken."""
    *path, last = dotted_name.split(".")
    at = root
    for part in path:
        if not hasattr(at, part):
            at.add_module(part, torch.nn.Module())
        at = getattr(at, part)
        if not isinstance(at, torch.nn.Module):
            return _put_tensor(root, name, f"{name}_", tensor, fixed)
    if not last or hasattr(at, last):
        return _put_tensor(root, name, f"{name}_", tensor, fixed)
    if fixed:
        setattr(at, last, tensor.detach())
    elif isinstance(tensor, torch.nn.Parameter):
        at.register_parameter(last, tensor)
    else:
        at.register_buffer(last, tensor)
    return dotted_name


def _tensor_at(root: torch.nn.Module, path: str) -> torch.Tensor:
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _assign(
    root: torch.nn.Module, program: ProgramData, results: list[Any], values: Sequence[Any]
) -> None:
    """Write the values that the program assigns to buffers into the buffers.

    Args:
        results: the results; results that may share memory with a buffer are replaced by copies.
        values: the tensors that its updates assign, in order.
    """
    if not program.state.assigned:
        return
    replaced = list(values)
    nodes: Any = program.graph.output_node().args[0]
    for i, node in enumerate(nodes):
        if isinstance(node, torch.fx.Node) and sources(node):
            if i < len(results):
                results[i] = results[i].clone()
            else:
                replaced[i - len(results)] = replaced[i - len(results)].detach().clone()
    rest = iter(replaced)
    for i, update in enumerate(program.updates):
        for value in [next(rest) for _ in update.slots()]:
            buffer = _tensor_at(root, program.state.assigned[i])
            if buffer.shape != value.shape or buffer.dtype != value.dtype:
                raise ExportError(
                    f"{program.name}: {update.text} is assigned a tensor of type {value.dtype} and "
                    f"shape {tuple(value.shape)}, and was {buffer.dtype} of shape "
                    f"{tuple(buffer.shape)}; an ExportedProgram writes into the buffer, whose "
                    f"dtype and shape can't change."
                )
            buffer.copy_(value.detach())
