"""Rows for the sweep: the entries of torch's operator database, with the variants of each.

``rows()`` lists them; ``row.cases(dtype)`` yields functions of tensors alone, with the tensors of
one sample each. ``sweep`` compares transforms of these functions.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.autograd_function_db import autograd_function_db
    from torch.testing._internal.common_methods_invocations import (
        foreach_binary_op_db,
        foreach_other_op_db,
        foreach_pointwise_op_db,
        foreach_reduce_op_db,
        foreach_unary_op_db,
        op_db,
    )
    from torch.testing._internal.custom_op_db import custom_op_db

from tests.ops.database_extra import EXTRA, Extra

FOREACH = (
    foreach_unary_op_db,
    foreach_binary_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_other_op_db,
)
Results = tuple[Tensor, ...]

VARIANTS = ("function", "method", "inplace", "operator", "out")
FUNCTION, METHOD, INPLACE, OPERATOR, OUT = VARIANTS


@dataclass(frozen=True)
class Case:
    """One sample of a row: a function of tensors, and the tensors.

    Attributes:
        call: takes the tensors and returns the tensors among the results.
        tensors: the arguments of one example.
        written: the positions of the tensors that the call writes into. They are always batched,
            and their values after the call are the last results, in this order.
        reshapes: True if the call changes the shape of the written tensors (``squeeze_``), and not
            their memory.
        ordered: True if integers must keep their order (offsets), which torch does not check.
        differentiable: the positions of the tensors to differentiate by.
        forward: True if torch's tests cover forward mode for the entry.
    """

    call: Callable[..., Results]
    tensors: tuple[Tensor, ...]
    written: tuple[int, ...] = ()
    reshapes: bool = False
    ordered: bool = False
    differentiable: tuple[int, ...] = ()
    forward: bool = True


@dataclass(frozen=True)
class Row:
    """A way to call an entry of the database.

    Attributes:
        name: the entry's full name, with the variant unless it is the function.
        variant: "function", "method", "inplace", "operator" or "out".
        call: takes the arguments of the entry's samples.
        dtypes: those that the entry lists for the CPU.
        differentiable: those of ``dtypes`` for which torch has a derivative.
        samples: returns the samples of a dtype, with or without ``requires_grad``.
        checked: the call in torch's own gradient checks: on the hermitian part of a matrix, for
            example, if derivatives are defined for hermitian matrices only.
        forward: True if torch's tests cover forward mode for the entry.
    """

    name: str
    variant: str
    call: Callable[..., Any]
    dtypes: frozenset[torch.dtype]
    differentiable: frozenset[torch.dtype]
    samples: Callable[[torch.dtype, bool], Iterator[Any]]
    checked: Callable[..., Any] | None = None
    forward: bool = True

    @property
    def entry(self) -> str:
        """Return the name without the variant."""
        return self.name.partition(" ")[0]

    def cases(self, dtype: torch.dtype, most: int | None, grad: bool = False) -> Iterator[Case]:
        """Return at most ``most`` samples as functions of tensors: the same ones in each run.

        With ``grad`` the cases are for derivatives: the call returns the results that the entry
        differentiates, and an in-place operator writes into a copy.
        """
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = list(itertools.islice(self.samples(dtype, grad), 3000))
        if most is not None and len(samples) > most:
            # The first samples are plain ones; of the rest, take some of each kind.
            chosen = random.Random(0).sample(range(3, len(samples)), max(most - 3, 0))
            samples = [*samples[: min(3, most)], *(samples[i] for i in sorted(chosen))]
        for sample in samples:
            if not grad:
                yield from self._case(sample)
            elif self.variant in (FUNCTION, INPLACE):
                yield from self._differentiable_case(sample)

    def _differentiable_case(self, sample: Any) -> Iterator[Case]:
        leaves, tree = optree.tree_flatten(
            (sample.input, tuple(sample.args), sample.kwargs), none_is_leaf=True
        )
        if self.variant == INPLACE and sample.broadcasts_input:
            return
        # Sparse tensors can't be stacked, so all examples share them.
        places = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided
        ]
        by = [n for n, i in enumerate(places) if leaves[i].requires_grad]
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        func = functools.partial(_differentiable, self, sample.output_process_fn_grad)
        tensors = tuple(leaves[i] for i in places)
        call = functools.partial(_call, func, leaves, tree, places)
        written, _ = _written(call, tensors)
        if set(written) & set(by):  # into a copy, as for in-place variants
            call, written = functools.partial(_of_copies, call), ()
        yield Case(call, tensors, written, differentiable=tuple(by), forward=self.forward)

    def _case(self, sample: Any) -> Iterator[Case]:
        leaves, tree = optree.tree_flatten(
            (sample.input, tuple(sample.args), sample.kwargs), none_is_leaf=True
        )
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = tuple(leaves[i].detach() for i in places)
        if self.variant == OUT:
            yield from _out_case(self.call, leaves, tree, places, tensors)
            return
        # If the input would be broadcast, torch refuses to write into it, or resizes it.
        if self.variant == INPLACE and (places[:1] != [0] or sample.broadcasts_input):
            return
        call = functools.partial(_call, self.call, leaves, tree, places)
        written, reshapes = _written(call, tensors)
        call = functools.partial(_with_written, call, written)
        yield Case(call, tensors, written, reshapes, ordered="embedding_bag" in self.name)


def _differentiable(
    row: Row, process: Callable[[Any], Any], first: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return a call for the differentiable results; a call that writes gets a copy."""
    if row.variant == INPLACE:
        first = optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, first)
    call = row.call if row.checked is None else functools.partial(row.checked, row.call)
    return process(call(first, *args, **kwargs))


def _of_copies(call: Callable[..., Results], *tensors: Tensor) -> Results:
    return call(*[x.clone() for x in tensors])


def tensors_of(out: Any) -> Results:
    """Return the tensors among the results."""
    return tuple(x for x in optree.tree_leaves(out) if isinstance(x, Tensor))


def _call(
    func: Callable[..., Any], leaves: Sequence[Any], tree: Any, places: Sequence[int], *tensors: Any
) -> Results:
    filled = list(leaves)
    for place, tensor in zip(places, tensors, strict=True):
        filled[place] = tensor
    args, kwargs = _arguments(tree, filled)
    return tensors_of(func(*args, **kwargs))


def _with_written(
    call: Callable[..., Results], written: Sequence[int], *tensors: Tensor
) -> Results:
    """Return the results, followed by the written tensors."""
    return (*call(*tensors), *[tensors[i] for i in written])


def _written(
    call: Callable[..., Results], tensors: Sequence[Tensor]
) -> tuple[tuple[int, ...], bool]:
    """Return the positions of the written tensors, and True if their memory stays as it was."""
    own = [x.clone() for x in tensors]
    versions = [x._version for x in own]
    memory = [x.detach() for x in own]
    try:
        call(*own)
    except Exception:  # a call that torch refuses is found by the sweep
        return (), False
    changed = [not _same(x, old) for x, old in zip(tensors, memory, strict=True)]
    written = [i for i, x in enumerate(own) if changed[i] or x._version != versions[i]]
    return tuple(written), not any(changed)


def _same(x: Tensor, y: Tensor) -> bool:
    """True if the values are equal bit by bit, NaN included."""
    if x.layout is not torch.strided:
        return True
    return torch.equal(
        *[v.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for v in (x, y)]
    )


def _out_case(
    func: Callable[..., Any],
    leaves: Sequence[Any],
    tree: Any,
    places: Sequence[int],
    tensors: tuple[Tensor, ...],
) -> Iterator[Case]:
    """Return the case with ``out=``: tensors of the right shape and dtype are further arguments.

    Return None if torch refuses ``out=``, or returns another result with it (``fft.ihfftn`` over
    one dim forgets to conjugate).
    """
    args, kwargs = _arguments(tree, leaves)
    try:
        results = func(*args, **kwargs)
        if not isinstance(results, Tensor | tuple | list):
            return
        made = tuple(r.new_zeros(r.shape) for r in tensors_of(results))
        single = isinstance(results, Tensor)
        func(*args, **kwargs, out=made[0] if single else made)
    except Exception:
        return
    if not all(_same(x, y) for x, y in zip(made, tensors_of(results), strict=True)):
        return
    if any(x.layout is not torch.strided for x in made):  # sparse tensors can't be stacked
        return
    count = len(tensors)

    def call(*given: Tensor) -> Results:
        outs = given[count:]
        filled = list(leaves)
        for place, tensor in zip(places, given, strict=False):
            filled[place] = tensor
        args, kwargs = _arguments(tree, filled)
        return tensors_of(func(*args, **kwargs, out=outs[0] if single else outs))

    given = (*tensors, *made)
    written = sorted({*_written(call, given)[0], *range(count, len(given))})
    yield Case(functools.partial(_with_written, call, written), given, tuple(written))


def _arguments(tree: Any, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    first, args, kwargs = optree.tree_unflatten(tree, list(leaves))
    return [first, *args], kwargs


def _samples_of(info: Any, dtype: torch.dtype, grad: bool) -> Iterator[Any]:
    options = {"num_input_tensors": [3]} if info.name.startswith("_foreach") else {}
    return iter(info.sample_inputs("cpu", dtype, requires_grad=grad, **options))


def _named(info: Any, seen: dict[str, int]) -> str:
    """Return a unique name for the entry; some entries share one."""
    name = getattr(info, "full_name", info.name).replace(" ", "")
    seen[name] = seen.get(name, 0) + 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"


def _differentiable_dtypes(info: Any, variant: str) -> frozenset[torch.dtype]:
    supported = info.supports_inplace_autograd if variant == INPLACE else info.supports_autograd
    if not supported or variant == OUT:
        return frozenset()
    return frozenset(
        dtype
        for dtype in info.supported_backward_dtypes("cpu")
        if dtype.is_floating_point or dtype.is_complex
    )


def _variants(info: Any) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield the suffix of the name, the kind and the callable of each variant."""
    yield "", FUNCTION, info.op
    if info.inplace_variant is not None:
        yield "", INPLACE, info.inplace_variant
    if info.method_variant is not None:
        yield "", METHOD, info.method_variant
    if info.operator_variant is not None:
        yield "", OPERATOR, info.operator_variant
    if info.inplace_operator_variant is not None:
        yield "operator", INPLACE, info.inplace_operator_variant
    if info.supports_out:
        yield "", OUT, info.op
    for alias in info.aliases:
        name = getattr(alias, "name", "alias")
        yield name, FUNCTION, alias.op
        if alias.inplace_variant is not None:
            yield name, INPLACE, alias.inplace_variant
        if alias.method_variant is not None:
            yield name, METHOD, alias.method_variant


def _database_rows() -> Iterator[Row]:
    seen: dict[str, int] = {}
    in_op_db = {id(info) for info in op_db}  # comparing two entries takes long
    for info in itertools.chain(op_db, autograd_function_db, custom_op_db, *FOREACH):
        if "jiterator" in info.name:
            continue  # compiles for a GPU
        entry = _named(info, seen)
        for suffix, variant, call in _variants(info):
            if call is None:
                continue
            parts = [entry]
            if suffix:
                parts.append(f"as {suffix}")
            if variant != FUNCTION:
                parts.append(f"({variant})")
            yield Row(
                " ".join(parts),
                variant,
                call,
                frozenset(info.supported_dtypes("cpu")),
                _differentiable_dtypes(info, variant),
                functools.partial(_samples_of, info),
                info.gradcheck_wrapper if id(info) in in_op_db else None,
                info.supports_forward_ad,
            )


def _extra_samples(extra: Extra, dtype: torch.dtype, grad: bool) -> Iterator[Any]:
    for sample in extra.samples(dtype):
        for leaf in optree.tree_leaves((sample.input, sample.args)):
            if grad and isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaf.requires_grad_()
        yield sample


def _extra_rows() -> Iterator[Row]:
    for extra in EXTRA:
        yield Row(
            extra.name,
            INPLACE if extra.writes else FUNCTION,
            extra.call,
            frozenset(extra.dtypes),
            frozenset(d for d in extra.dtypes if extra.differentiable and d.is_floating_point),
            functools.partial(_extra_samples, extra),
        )


@functools.cache
def rows() -> tuple[Row, ...]:
    """Return every row, in the database's order, followed by the rows of ``database_extra``."""
    return tuple(sorted((*_database_rows(), *_extra_rows()), key=operator.attrgetter("name")))
