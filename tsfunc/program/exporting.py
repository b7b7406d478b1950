"""A program handed over to ``torch.export``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from tsfunc import pytrees
from tsfunc.errors import ExportError
from tsfunc.program.forms import CallForm, Watched
from tsfunc.program.inputs import InputSpec
from tsfunc.program.lowering import sizes_for
from tsfunc.program.program import Program
from tsfunc.program.torch_operators import left_over
from tsfunc.types import Dim, DimExpr

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
_PLAIN = (int, float, bool, str, type(None))


def exported(program: Program) -> torch.export.ExportedProgram:
    """The program as torch.export has one; see ``Program.to_exported_program``."""
    form = _form(program)
    sizes = sizes_for(form.bounds)
    leaves = list(form.leaves)
    for spec in form.inputs:
        leaves[spec.position] = _example(spec, sizes)
    args, kwargs = pytrees.unflatten(form.tree, leaves)
    names = _parameters(program, len(args))
    module = _module(program, names, list(kwargs))
    # torch.export finds some relations by itself alone, and fails on others if they are given.
    failed: Exception | None = None
    for given in (True, False):
        try:
            return torch.export.export(
                module, args, kwargs, dynamic_shapes=_shapes(form, names, given),
                prefer_deferred_runtime_asserts_over_guards=True,
            )  # fmt: skip
        except Exception as error:
            failed = failed or error
    raise ExportError(
        f"{program.name}: torch.export could not take the program over: {failed}"
    ) from failed


def _shapes(form: CallForm, names: Sequence[str], given: bool) -> dict[str, Any]:
    """The dynamic dims as torch.export writes them.

    Args:
        form: what the program takes for granted.
        names: the positional parameters.
        given: whether expressions are given, or are for torch.export to find.
    """
    dims = {
        name: torch.export.Dim(name, min=max(2, dim.min or 0), max=dim.max)
        for name, dim in form.bounds.items()
    }
    shapes: list[Any] = [None] * len(form.leaves)
    for spec in form.inputs:
        shapes[spec.position] = {i: _dim(dim, dims, given) for i, dim in enumerate(spec.dims)}
    args, kwargs = pytrees.unflatten(form.tree, shapes)
    return {**dict(zip(names, args, strict=True)), **kwargs}


def _form(program: Program) -> CallForm:
    """What the program was made for, if torch.export can say such a thing."""
    form = program.form
    if form is None:
        raise ExportError(f"{program.name}: there is no record of what the program was made for.")
    problem = next(_problems(program, form), None)
    if problem is not None:
        raise ExportError(
            f"{program.name}: an ExportedProgram has no place for {problem}. "
            f"`.graph_module` is the program for torch's other tools."
        )
    return form


def _problems(program: Program, form: CallForm) -> Iterator[str]:
    positions = {spec.position for spec in form.inputs}
    for i, leaf in enumerate(form.leaves):
        if i not in positions and not isinstance(leaf, _PLAIN):
            cls = leaf.cls if isinstance(leaf, Watched) else type(leaf)
            yield f"an argument of type {cls.__name__}"
    if any(position >= len(form.leaves) for position in program.inputs):
        yield "tensors that are attributes of arguments"
    if program.updates:
        yield f"assignments ({', '.join(each.text for each in program.updates)})"
    for name in left_over(program.graph_module):
        yield f"{name}, which torch has no operator for"


def _example(spec: InputSpec, sizes: Mapping[str, int]) -> torch.Tensor:
    like = spec.example
    shape = spec.shape(sizes)
    order = sorted(range(len(shape)), key=lambda i: (like.stride(i), -i), reverse=True)
    made = torch.empty([int(shape[i] or 0) for i in order], dtype=like.dtype, device=like.device)
    back = sorted(range(len(order)), key=order.__getitem__)
    example = made.permute(back)
    return example.requires_grad_() if like.requires_grad else example


def _dim(dim: Any, dims: Mapping[str, Any], given: bool) -> Any:
    """A dim as torch.export writes it: of expressions it knows the linear ones in one name."""
    if isinstance(dim, Dim):
        return dims[dim.name]
    if not isinstance(dim, DimExpr):
        return torch.export.Dim.STATIC
    line = _line(dim) if given else None
    if line is None:
        return torch.export.Dim.AUTO
    name, factor, rest = line
    product = dims[name] if factor == 1 else factor * dims[name]
    return product + rest if rest > 0 else product - -rest if rest else product


def _line(dim: DimExpr) -> tuple[str, int, int] | None:
    """``factor * name + rest``, if the expression is of that form."""
    if len(dim.names) != 1:
        return None
    (name,) = dim.names
    start = dim.evaluate({name: 0})
    factor = dim.evaluate({name: 1}) - start
    straight = all(dim.evaluate({name: n}) == factor * n + start for n in (2, 3, 7, 12, 101))
    return (name, factor, start) if straight and factor > 0 else None


def _parameters(program: Program, count: int) -> list[str]:
    """Names for the positional arguments: those of the function's parameters, where it has them."""
    form = program.form
    assert form is not None
    numbered = pytrees.unflatten(form.tree, range(len(form.leaves)))[0]
    names = []
    for i, each in enumerate(numbered):
        leaves, _ = pytrees.flatten(each)
        found = program.places.get(leaves[0], ()) if leaves else ()
        name = str(found[0]) if found else ""
        names.append(name if name.isidentifier() and name not in names else f"arg_{i}")
    return names[:count]


def _module(program: Program, names: Sequence[str], keywords: Sequence[str]) -> torch.nn.Module:
    """The function as a module of the same parameters, whose state is what the program reads."""
    graph = program.graph_module

    class Exported(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.program = graph

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            flat, _ = pytrees.flatten((args, kwargs))
            results = self.program(*(flat[i] for i in program.inputs))
            return pytrees.unflatten(program.out_tree, results)

    parameters = [inspect.Parameter(name, _POSITIONAL) for name in ("self", *names)]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in keywords]
    signature = inspect.Signature(parameters)
    Exported.forward.__signature__ = signature  # type: ignore[attr-defined]
    return Exported()
