"""Arguments for trial calls of an operator, derived from its schema.

Every tensor gets a rank that the caller chooses and the same size in all its dims. Sizes that must
agree therefore do agree, and an error is about ranks. Numbers, lists and strings follow from
argument names, which torch's schemas use consistently.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tsfunc.ops.catalogue.signature import Argument, OperatorSignature

Make = Callable[[Sequence[int], torch.dtype], torch.Tensor]

_INDICES = frozenset(
    "index indices target targets offsets repeats tensor_indices_or_sections batch_sizes "
    "input_lengths target_lengths pivots LU_pivots offset2bag bag_size".split()
)
_MASKS = frozenset({"mask", "condition", "found_inf"})


@dataclass(frozen=True)
class TrialParameters:
    """The parameters of one series of trial calls.

    Attributes:
        size: the size of every dim.
        length: the length of lists of sizes and strides. None means the rank of the first tensor,
            and a negative number is added to that rank.
        dtype: the dtype of tensors that are not indices or masks by their names.
        labels: True if ``target`` and similar arguments are class labels, not values.
        optional: True if optional tensors are given.
    """

    size: int = 2
    length: int | None = None
    dtype: torch.dtype = torch.float32
    labels: bool = True
    optional: bool = False


def trial_settings(signature: OperatorSignature) -> Iterator[TrialParameters]:
    """Yield the settings to try, the most common first."""
    takes_lists = any(a.type.startswith("int[]") and a.required for a in signature.inputs)
    lengths: list[int | None] = [None, 1, 2, 3, -1, -2, 0, 4, 6] if takes_lists else [None]
    dtypes = [torch.float32, torch.int64, torch.bool, torch.complex64, torch.float64]
    labels = [True, False] if any(a.name in _INDICES for a in signature.tensors) else [False]
    optional = [False, True] if any(a.type == "Tensor?" for a in signature.tensors) else [False]
    for with_optional, size, dtype, label, length in itertools.product(
        optional, (2, 3, 1), dtypes, labels, lengths
    ):
        yield TrialParameters(size, length, dtype, label, with_optional)


def tensor_arguments(signature: OperatorSignature, setting: TrialParameters) -> list[Argument]:
    return [
        a
        for a in signature.tensors
        if a.type in ("Tensor", "Tensor[]", "Tensor?[]") or setting.optional
    ]


def arguments(
    signature: OperatorSignature, ranks: Mapping[str, int], setting: TrialParameters, make: Make
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of one call.

    Args:
        signature: the operator's schema.
        ranks: the rank of each tensor argument to be given, by its name.
        setting: the parameters of the call.
        make: makes a tensor of a shape and dtype.

    Returns:
        The positional arguments and the keyword arguments.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    first = next(iter(ranks.values()), 0)
    for argument in signature.inputs:
        if argument.tensor:
            value = _tensor(argument, ranks.get(argument.name), setting, make)
        elif argument.required:
            value = _value(argument, first, setting)
        else:
            continue  # keeps its default
        if argument.keyword:
            kwargs[argument.name] = value
        elif len(args) < signature.inputs.index(argument):
            if not argument.tensor or value is not None:
                kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _tensor(argument: Argument, rank: int | None, setting: TrialParameters, make: Make) -> Any:
    if rank is None:
        return None
    dtype = setting.dtype
    if argument.name in _INDICES and setting.labels:
        dtype = torch.int64
    elif argument.name in _MASKS:
        dtype = torch.bool
    value = make([setting.size] * rank, dtype)
    return [value, value] if argument.type.endswith("[]") else value


_FIRST_DIMS = frozenset("dim dimension axis dim0 axis0 start_dim source destination".split())
_LAST_DIMS = frozenset("dim1 dim2 axis1 end_dim".split())
_SIZES = frozenset("num_weights size end N C hidden_size n_fft num_classes".split())
_STRINGS = {
    "reduce": "sum", "UPLO": "L", "approximate": "none", "ord": "fro", "p": "fro",
    "mode": "constant", "interpolation": "linear", "indexing": "ij", "padding": "valid",
}  # fmt: skip


def _value(argument: Argument, rank: int, setting: TrialParameters) -> Any:
    kind, name = argument.type, argument.name
    if kind.endswith("?"):
        return None
    if kind == "int":
        if name in _FIRST_DIMS or name in _LAST_DIMS:
            return 0 if name in _FIRST_DIMS else -1
        return setting.size if name in _SIZES else 1
    if kind.endswith("[]"):
        return _list(argument, rank, setting)
    plain: dict[str, Any] = {
        "float": 0.5, "number": 0.5 if setting.dtype.is_floating_point else 1, "bool": False,
        "str": _STRINGS.get(name, ""),
        "ScalarType": torch.float32, "Device": torch.device("cpu"), "Layout": torch.strided,
        "MemoryFormat": torch.contiguous_format,
    }  # fmt: skip
    return plain.get(kind)


_SHAPES = frozenset(
    "size sizes shape output_size input_size input_sizes self_sizes normalized_shape".split()
)
_ZEROS = frozenset("pad padding output_padding shifts".split())


def _list(argument: Argument, rank: int, setting: TrialParameters) -> list[Any]:
    length = setting.length
    if argument.count > 1:
        length = argument.count
    elif argument.count == 1 or length is None:
        length = 1 if argument.count == 1 else rank
    elif length < 0:
        length = max(rank + length, 0)
    if argument.type != "int[]":
        return [argument.type == "bool[]"] * length
    name = argument.name
    if name.startswith("dim") or name in _FIRST_DIMS:
        return list(range(length))
    return [setting.size if name in _SHAPES else 0 if name in _ZEROS else 1] * length
