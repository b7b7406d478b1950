"""``in_dims``: the dim of each input that a ``vmap`` maps over.

NOTE [in_dims by name]
A dict names parameters: ``in_dims={"x": 0, "mask": None}``. Its entries hold for arguments passed
by position and by keyword; parameters without an entry are not mapped. The name of ``*rest``
stands for the tuple of the collected arguments, the name of ``**options`` for all keyword
arguments without an entry under their own name. The dims of an *argument* that is a dict go into
the tuple of positional arguments, as in torch.func: ``in_dims=({"w": 0, "b": None},)``. A call
that could mean either is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc._text import count_text
from tsfunc.bridge.tracers.operators import PLAIN_TENSORS
from tsfunc.transforms.argnums import is_nested, leaf_names, parameter_names
from tsfunc.transforms.vmap_spec import Spec, is_dim
from tsfunc.types.values import is_array


def match_in_dims(spec: Spec, args: Any) -> Sequence[int | None]:
    """Return an entry of ``in_dims`` for each flattened positional input."""
    structure = pytrees.structure_of(args)
    in_dims = spec.in_dims
    if not isinstance(in_dims, int | tuple) and not (in_dims is None and spec.sized):
        raise ValueError(
            f"{spec.call()}: expected `in_dims` to be int or a (potentially nested) tuple "
            f"matching the structure of inputs, got: {type(in_dims)}. To map arguments by name, "
            f"give a dict of them"
            + (", and to map no argument, axis_size." if in_dims is None else ".")
        )
    if not structure.num_leaves and not spec.sized:
        raise ValueError(
            f"vmap({spec.name})(<inputs>): got no inputs. Maybe you forgot to add inputs, or you "
            f"are trying to vmap over a function with no inputs. The latter needs axis_size=, "
            f"and a mapped keyword argument its name: in_dims={{'x': 0}}."
        )
    try:
        dims = pytrees.broadcast_prefix(in_dims, args, is_dim)
    except ValueError:
        inputs = ", ".join(parameter_names(spec.func, len(args)))
        raise ValueError(
            f"{spec.call()}: in_dims is not compatible with the structure of `inputs`. in_dims "
            f"has structure {in_dims!r} but the inputs are ({inputs}): "
            f"expected one entry for each of them (it may hold for all that is in it)."
            f"{_mismatch(spec, args)}"
        ) from None
    if not all(map(is_dim, dims)):
        _refuse_entries(spec, dims, _names(spec, args))
    return dims


def _mismatch(spec: Spec, args: Sequence[Any]) -> str:
    """Return a sentence about the first input whose entry of ``in_dims`` does not fit it."""
    in_dims = spec.in_dims
    if not isinstance(in_dims, tuple) or len(in_dims) != len(args):
        return ""
    parameters = parameter_names(spec.func, len(args))
    for name, prefix, value in zip(parameters, in_dims, args, strict=True):
        try:
            pytrees.broadcast_prefix(prefix, value, is_dim)
        except ValueError:
            return (
                f" The entry for {name} has structure "
                f"{pytrees.structure_text(pytrees.structure_of(prefix))}, and {name} has structure "
                f"{pytrees.structure_text(pytrees.structure_of(value))}."
            )
    return ""


def _refuse_entries(spec: Spec, dims: Sequence[Any], names: Sequence[str]) -> None:
    for dim, name in zip(dims, names, strict=True):
        if not is_dim(dim):
            raise ValueError(
                f"{spec.call()}: Got in_dim={dim} for an input but in_dim must be either "
                f"an integer dimension or None. The input is {name}."
            )


def match_by_name(spec: Spec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int | None]:
    """Return an entry for each leaf of ``(args, kwargs)``, from a dict: NOTE [in_dims by name]."""
    names: Mapping[str, Any] = spec.in_dims
    parameters = spec.parameters
    if parameters is None:
        if args:
            raise ValueError(
                f"{spec.call()}: in_dims has names, but {spec.name} does not tell the names of "
                f"its parameters. Pass its arguments by keyword, or give in_dims as a tuple, one "
                f"entry for each positional argument."
            )
        by_position: list[Any] = []
        by_keyword = {name: names.get(name) for name in kwargs}
    else:
        _refuse_unknown(spec, parameters)
        _refuse_ambiguous(spec, args, kwargs)
        by_position = _of_positions(spec, parameters, args)
        rest = _name_of_kind(parameters, inspect.Parameter.VAR_KEYWORD)
        of_rest = names.get(rest) if rest is not None else None
        keywords = {name for name, p in parameters.items() if p.kind in _BY_KEYWORD}
        by_keyword = {
            name: names.get(name) if name in keywords or name in names else _inside(of_rest, name)
            for name in kwargs
        }
    dims: list[int | None] = []
    named = [*zip(_positional_names(parameters, len(args)), by_position, args, strict=True)]
    # The leaves of (args, kwargs) have the keywords in sorted order.
    named += [(name, by_keyword[name], kwargs[name]) for name in sorted(kwargs)]
    for name, prefix, value in named:
        dims += _match_one(spec, name, prefix, value)
    return dims


_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


Parameters = Mapping[str, inspect.Parameter]


def by_position(parameters: Parameters) -> list[str]:
    """Return the parameters that can be passed by position, without ``*args``."""
    return [name for name, parameter in parameters.items() if parameter.kind in _BY_POSITION]


def _name_of_kind(parameters: Parameters, kind: Any) -> str | None:
    """Return the name of ``*rest`` or ``**options``; None if there is none."""
    return next((name for name, p in parameters.items() if p.kind is kind), None)


def _positional_names(parameters: Parameters | None, count: int) -> list[str]:
    """Return the parameter name of each positional argument."""
    if parameters is None:
        return []
    names = by_position(parameters)[:count]
    rest = _name_of_kind(parameters, inspect.Parameter.VAR_POSITIONAL)
    return names + [f"{rest}[{i}]" for i in range(count - len(names))]


def _of_positions(spec: Spec, parameters: Parameters, args: Sequence[Any]) -> list[Any]:
    """Return the dict's entry for each positional argument."""
    names = by_position(parameters)
    rest = _name_of_kind(parameters, inspect.Parameter.VAR_POSITIONAL)
    extra = len(args) - len(names)
    if extra > 0 and rest is None:
        raise TypeError(
            f"{spec.call()}: expected at most {len(names)} positional arguments "
            f"({', '.join(names)}), got {len(args)}."
        )
    entries = [spec.in_dims.get(name) for name in names[: len(args)]]
    if extra > 0:
        of_rest = spec.in_dims.get(rest)
        if is_dim(of_rest):
            return [*entries, *[of_rest] * extra]
        if not isinstance(of_rest, tuple | list) or len(of_rest) != extra:
            raise ValueError(
                f"{spec.call()}: in_dims[{rest!r}] is for the {count_text(extra, 'argument')} that "
                f"*{rest} collects: expected an int, None or a tuple of {extra}, got {of_rest!r}."
            )
        entries += of_rest
    return entries


def _inside(of_rest: Any, name: str) -> Any:
    """Return the entry of one keyword from the entry of ``**options``."""
    return of_rest.get(name) if isinstance(of_rest, Mapping) else of_rest


def _match_one(spec: Spec, name: str, prefix: Any, value: Any) -> list[int | None]:
    try:
        dims = pytrees.broadcast_prefix(prefix, value, is_dim)
    except ValueError:
        raise ValueError(
            f"{spec.call()}: the entry of in_dims for `{name}` is not compatible with the "
            f"structure of that argument: the entry has structure "
            f"{pytrees.structure_text(pytrees.structure_of(prefix))}, the argument "
            f"{pytrees.structure_text(pytrees.structure_of(value))}."
        ) from None
    if not all(map(is_dim, dims)):
        _refuse_entries(spec, dims, leaf_names(name, value))
    return dims


def _refuse_unknown(spec: Spec, parameters: Parameters) -> None:
    unknown = [name for name in spec.in_dims if name not in parameters]
    if not unknown or _name_of_kind(parameters, inspect.Parameter.VAR_KEYWORD) is not None:
        return
    listed = ", ".join(map(repr, unknown))
    raise ValueError(
        f"{spec.call()}: in_dims names {listed}, but the parameters of {spec.name} are "
        f"{', '.join(parameters) or 'none'}. If these are the keys of an argument that is a dict, "
        f"write in_dims=({spec.in_dims},)."
    )


def _refuse_ambiguous(spec: Spec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if the only argument is a dict with just the names as keys, which could be meant."""
    names: Mapping[str, Any] = spec.in_dims
    if len(args) != 1 or kwargs or len(names) < 2 or not isinstance(args[0], Mapping):
        return
    if args[0].keys() == names.keys():
        first = next(iter(spec.parameters or names))
        raise ValueError(
            f"{spec.call()}: in_dims could name the parameters of {spec.name} or the keys of the "
            f"dict that is its only argument. Write in_dims=({names},) for the keys, "
            f"in_dims={{{first!r}: ...}} for the parameter."
        )


def mapped_dims(
    spec: Spec, flat: Sequence[Any], dims: Sequence[int | None], inputs: Any
) -> tuple[list[int | None], Any]:
    """Return the dims counted from the front, and the size that the mapped dims share.

    Args:
        dims: an entry of ``in_dims`` for each flattened input.
        inputs: the inputs before flattening, for the names in messages.
    """
    bdims: list[int | None] = []
    size: Any = spec.axis_size
    for value, dim in zip(flat, dims, strict=True):
        if dim is None:
            bdims.append(None)
            continue
        if not isinstance(value, torch.Tensor):
            if value is not None:
                _refuse_value(spec, value, dim, inputs, len(bdims))
            bdims.append(None)  # an omitted optional input has no dims
            continue
        if type(value) not in PLAIN_TENSORS and is_nested(value):
            raise RuntimeError("a nested tensor has no single size to match")
        shape = value.shape  # a strided nested tensor raises RuntimeError here
        rank = len(shape)
        if not -rank <= dim < rank:
            raise ValueError(
                f"{spec.call()}: Got in_dim={dim} for some input, but that input is a Tensor of "
                f"dimensionality {rank} so expected in_dim to satisfy -{rank} <= in_dim < {rank}. "
                f"The input is {_name_at(spec, inputs, len(bdims))}."
            )
        if dim < 0:
            dim += rank
        bdims.append(dim)
        if size is None:
            size = shape[dim]
        elif size != shape[dim]:
            _refuse_sizes(spec, flat, dims, inputs)
    if size is None:
        raise ValueError(
            f"{spec.call()}: Expected at least one Tensor to vmap over: every in_dim is None, "
            f"or there is no Tensor among the inputs. With axis_size= none is needed."
        )
    return bdims, size


def _names(spec: Spec, inputs: Any) -> list[str]:
    """Return the user's spelling of each flattened input: ``params['w']``."""
    args, kwargs = inputs if spec.by_name else (inputs, {})
    parameters = [*parameter_names(spec.func, len(args)), *kwargs]
    values = [*args, *kwargs.values()]
    names = []
    for name, value in zip(parameters, values, strict=True):
        names += leaf_names(name, value)
    return names


def _name_at(spec: Spec, inputs: Any, index: int) -> str:
    return _names(spec, inputs)[index]


def _refuse_value(spec: Spec, value: Any, dim: int, inputs: Any, index: int) -> None:
    hint = ""
    if is_array(value):
        hint = ", or convert it: torch.from_numpy(array)"
    elif isinstance(value, int | float | complex) and not isinstance(value, bool):
        hint = ", or convert the numbers: torch.tensor(values)"
    elif isinstance(value, Iterator):
        hint = ". An iterator ends with its first use: pass a list or a dict of its tensors"
    elif any(isinstance(held, torch.Tensor) for held in getattr(value, "__dict__", {}).values()):
        kind = type(value).__qualname__
        hint = (
            f". To map over the tensors that it holds, make {kind} a dataclass, or register it: "
            f'optree.register_pytree_node({kind}, flatten, unflatten, namespace="tsfunc")'
        )
    advice = pytrees.static_advice(pytrees.structure_of(inputs), index)
    raise ValueError(
        f"{spec.call()}: Got in_dim={dim} for an input but the input is of type "
        f"{type(value)}. We cannot vmap over non-Tensor arguments, please use None as "
        f"the respective in_dim{hint}. The input is {_name_at(spec, inputs, index)}.{advice}"
    )


def _refuse_sizes(spec: Spec, flat: Sequence[Any], dims: Sequence[int | None], inputs: Any) -> None:
    sizes = [value.shape[dim] for value, dim in zip(flat, dims, strict=True) if dim is not None]
    named = [
        f"{name} has {value.shape[dim]} in dim {dim}"
        for name, value, dim in zip(_names(spec, inputs), flat, dims, strict=True)
        if dim is not None
    ]
    beside = f", and axis_size={spec.axis_size}" if spec.sized else ""
    raise ValueError(
        f"{spec.call()}: Expected all tensors to have the same size in the mapped dimension, "
        f"got sizes {sizes} for the mapped dimension{beside}: {', '.join(named)}"
    )
