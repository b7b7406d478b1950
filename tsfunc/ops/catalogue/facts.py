"""What follows from an operator's category and schema: the facts beside the category."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tsfunc.ops.catalogue.classify import dim_arguments
from tsfunc.ops.catalogue.signature import Signature
from tsfunc.ops.catalogue.trial import Evidence
from tsfunc.ops.registry import Category


class Result(enum.Enum):
    """Which dims an operator's results have."""

    BROADCAST = "broadcast"  # those of all carriers, broadcast
    SAME = "same"  # those of the first carrier
    REDUCED = "reduced"  # those of the carriers, less those that are reduced
    REARRANGED = (
        "rearranged"  # those of the carriers moved, cut, added or removed, as arguments say
    )
    BATCH = "batch"  # the carriers' leading dims, then some of its own
    FEATURES = "features"  # some of its own, and the carriers' trailing dims
    COMPUTED = "computed"  # a fixed number of them
    GIVEN = "given"  # what an argument says
    FLAT = "flat"  # those of one carrier, or one; the other's don't count
    LIST = "list"  # what all carriers of a list have together, or each its own
    PARTS = "parts"  # what the operators that it is written in give
    SPARSE = "sparse"  # sparse and dense dims
    DATA = "data"  # what the values say
    NONE = "none"  # it returns no tensor
    UNKNOWN = "unknown"


_OF_CATEGORY = {
    Category.TENSOR_ITERATOR: Result.BROADCAST,
    Category.FIXED: Result.COMPUTED,
    Category.N_DIMENSIONAL: Result.REARRANGED,
    Category.IDENTITY: Result.SAME,
    Category.FLATTEN: Result.FLAT,
    Category.COMPOSITE: Result.PARTS,
    Category.BATCHED: Result.BATCH,
    Category.FEATURE_BATCHED: Result.FEATURES,
    Category.FACTORY: Result.GIVEN,
    Category.TRIVIAL: Result.GIVEN,
    Category.SPARSE: Result.SPARSE,
    Category.DYNAMIC: Result.DATA,
    Category.VARIADIC: Result.LIST,
    Category.OTHER: Result.UNKNOWN,
}


@dataclass(frozen=True)
class Facts:
    """What is known of an operator beside its category.

    Attributes:
        carriers: the arguments whose dims decide those of the results.
        dims: the arguments that name dims.
        result: which dims the results have.
        mutates: the arguments that it writes.
        aliases: the arguments whose memory its results share, or may share.
        random: whether it draws random numbers.
        data_dependent: whether the results' shapes, or a result that is no tensor, depend on
            values.
    """

    carriers: tuple[str, ...]
    dims: tuple[str, ...]
    result: Result
    mutates: tuple[str, ...]
    aliases: tuple[str, ...]
    random: bool
    data_dependent: bool

    @property
    def marks(self) -> list[str]:
        """``random`` and ``data-dependent``, where it is that."""
        both = (("random", self.random), ("data-dependent", self.data_dependent))
        return [mark for mark, on in both if on]


RANDOM_TAG = "nondeterministic_seeded"
_DATA_TAGS = frozenset({"dynamic_output_shape", "data_dependent_output"})


def facts_of(
    signature: Signature,
    category: Category,
    evidence: Evidence,
    followed: Facts | None,
    reads_values: bool,
) -> Facts:
    """The facts of an operator.

    Args:
        evidence: what trying it, or the operator that it follows, showed.
        followed: the facts of the operator that it follows.
        reads_values: whether a person has marked it as data-dependent.
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


def _carriers(signature: Signature, category: Category, evidence: Evidence) -> tuple[str, ...]:
    if category is Category.FACTORY:
        return ()
    # What takes no dims (a scale, a value to fill with) can't decide any.
    return tuple(a.name for a in signature.tensors if evidence.ranks.get(a.name) != [0])


def _result(signature: Signature, category: Category, evidence: Evidence) -> Result:
    if not any("Tensor" in result for result in signature.returns):
        return Result.NONE
    if category is Category.TENSOR_ITERATOR:
        reduces = signature.takes("keepdim", "reduction") or "reduction" in signature.tags
        shrinks = evidence.together and not evidence.same and not evidence.broadcasts
        return Result.REDUCED if reduces or shrinks else Result.BROADCAST
    return _OF_CATEGORY[category]
