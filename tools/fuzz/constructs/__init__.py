"""The constructs that functions are drawn from: a list for each family.

A construct takes a ``Draw`` and adds statements by its ``let`` and ``do``. The modules are named by
subject; ``templates.py`` makes the constructs that are a single expression.
"""

from __future__ import annotations

import random

from tools.fuzz.constructs import arithmetic, dtypes, layers, views
from tools.fuzz.constructs.control_flow import associative, choice, loop, map_, scan, while_
from tools.fuzz.constructs.indexing import (
    by_argument,
    by_mask_argument,
    embedding,
    gather,
    index,
    index_negative_axes,
    one_of_example,
    select_by_data,
    selected,
    take,
)
from tools.fuzz.constructs.nested import collective, nested, pulled
from tools.fuzz.constructs.writes import (
    factory,
    scatter,
    write_by_index,
    write_inplace_view,
    write_item,
    write_mask,
    write_view,
    write_whole,
)
from tools.fuzz.draw import Construct

CONSTRUCTS: dict[str, list[Construct]] = {
    "elementwise": arithmetic.ELEMENTWISE,
    "reductions": arithmetic.REDUCTIONS,
    "views": views.VIEWS,
    "products": arithmetic.PRODUCTS,
    "linear algebra": arithmetic.LINALG,
    "norms and losses": layers.NORMS,
    "convolutions": layers.CONVOLUTIONS,
    "sorting": arithmetic.SORTING,
    "recurrent cells": layers.RECURRENT,
    "indexing": [
        index, index, index_negative_axes, select_by_data, gather, take, one_of_example,
        embedding, by_argument, by_mask_argument, selected,
    ],
    "writes": [
        write_item, write_mask, write_view, write_view, write_inplace_view, write_whole,
        write_by_index,
    ],
    "scatter": [scatter],
    "factories": [factory],
    "cond and switch": [choice],
    "loops": [loop, while_],
    "scan and map": [scan, map_, associative],
    "nested transforms": [nested],
    "dtypes": dtypes.PROMOTION,
    "complex": dtypes.COMPLEX,
    "functions": dtypes.FUNCTIONS,
    "pullbacks": [pulled],
    "collectives": [collective],
}  # fmt: skip

# The constructs in bodies of control flow and of nested transforms; deeper bodies have the first
# list.
PLAIN_CONSTRUCTS = (
    "elementwise", "elementwise", "elementwise", "reductions", "views", "products", "indexing",
    "writes", "norms and losses", "sorting", "dtypes", "complex", "functions",
)  # fmt: skip
BLOCK_CONSTRUCTS = (
    *PLAIN_CONSTRUCTS,
    "cond and switch",
    "loops",
    "scan and map",
    "nested transforms",
    "pullbacks",
)


def construct_of(rng: random.Random, family: str) -> Construct:
    return rng.choice(CONSTRUCTS[family])
