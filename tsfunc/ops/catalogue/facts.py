"""Facts about an operator that follow from its category and schema."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tsfunc.ops.catalogue.classify import dim_arguments
from tsfunc.ops.catalogue.signature import OperatorSignature
from tsfunc.ops.catalogue.trial import Evidence
from tsfunc.ops.registry import Category


class ResultDims(enum.Enum):
    """The dims of an operator's results."""

    BROADCAST = "broadcast"  # the dims of all carriers, broadcast
    SAME = "same"  # the dims of the first carrier
    REDUCED = "reduced"  # the dims of the carriers without the reduced ones
    REARRANGED = "rearranged"  # dims of the carriers, moved, cut, added or removed by arguments
    BATCH = "batch"  # leading dims of the carriers, then new dims
    FEATURES = "features"  # new dims, then trailing dims of the carriers
    COMPUTED = "computed"  # a fixed number of dims
    GIVEN = "given"  # given by an argument
    FLAT = "flat"  # the dims of one carrier, or one dim; other carriers' dims do not matter
    LIST = "list"  # common dims of a list of carriers, or separate dims
    PARTS = "parts"  # given by the operators of its decomposition
    SPARSE = "sparse"  # sparse and dense dims
    DATA = "data"  # given by values
    NONE = "none"  # the operator returns no tensor
    UNKNOWN = "unknown"


_OF_CATEGORY = {
    Category.TENSOR_ITERATOR: ResultDims.BROADCAST,
    Category.FIXED: ResultDims.COMPUTED,
    Category.N_DIMENSIONAL: ResultDims.REARRANGED,
    Category.IDENTITY: ResultDims.SAME,
    Category.FLATTEN: ResultDims.FLAT,
    Category.COMPOSITE: ResultDims.PARTS,
    Category.BATCHED: ResultDims.BATCH,
    Category.FEATURE_BATCHED: ResultDims.FEATURES,
    Category.FACTORY: ResultDims.GIVEN,
    Category.TRIVIAL: ResultDims.GIVEN,
    Category.SPARSE: ResultDims.SPARSE,
    Category.DYNAMIC: ResultDims.DATA,
    Category.VARIADIC: ResultDims.LIST,
    Category.OTHER: ResultDims.UNKNOWN,
}


@dataclass(frozen=True)
class Facts:
    """Facts about an operator besides its category.

    Attributes:
        carriers: the arguments whose dims determine the dims of the results.
        dims: the arguments that name dims.
        result: the dims of the results.
        mutates: the arguments that the operator writes.
        aliases: the arguments that the results alias, or can alias.
        random: True if the operator draws random numbers.
        data_dependent: True if the shapes of the results, or a result that is not a tensor, depend
            on values.
    """

    carriers: tuple[str, ...]
    dims: tuple[str, ...]
    result: ResultDims
    mutates: tuple[str, ...]
    aliases: tuple[str, ...]
    random: bool
    data_dependent: bool

    @property
    def marks(self) -> list[str]:
        """The marks that apply: ``random`` and ``data-dependent``."""
        both = (("random", self.random), ("data-dependent", self.data_dependent))
        return [mark for mark, on in both if on]


RANDOM_TAG = "nondeterministic_seeded"
_DATA_TAGS = frozenset({"dynamic_output_shape", "data_dependent_output"})


def facts_of(
    signature: OperatorSignature,
    category: Category,
    evidence: Evidence,
    followed: Facts | None,
    reads_values: bool,
) -> Facts:
    """Return the facts of an operator.

    Args:
        evidence: the evidence of its trial calls, or of those of the operator that it follows.
        reads_values: True if it is marked as data-dependent in ``decided.txt``.
    """
    return Facts(
        _carriers(signature, category, evidence),
        dim_arguments(signature),
        _result(signature, category, evidence),
        signature.mutates,
        signature.aliases,
        RANDOM_TAG in signature.tags or (followed is not None and followed.random),
        reads_values
        or category is Category.DYNAMIC
        or bool(_DATA_TAGS & signature.tags)
        or (followed is not None and followed.data_dependent),
    )


def _carriers(
    signature: OperatorSignature, category: Category, evidence: Evidence
) -> tuple[str, ...]:
    if category is Category.FACTORY:
        return ()
    # A scalar argument (a scale, a fill value) does not determine dims.
    return tuple(a.name for a in signature.tensors if evidence.ranks.get(a.name) != [0])


def _result(signature: OperatorSignature, category: Category, evidence: Evidence) -> ResultDims:
    if not any("Tensor" in result for result in signature.returns):
        return ResultDims.NONE
    if category is Category.TENSOR_ITERATOR:
        reduces = signature.takes("keepdim", "reduction") or "reduction" in signature.tags
        shrinks = evidence.together and not evidence.same and not evidence.broadcasts
        return ResultDims.REDUCED if reduces or shrinks else ResultDims.BROADCAST
    return _OF_CATEGORY[category]
