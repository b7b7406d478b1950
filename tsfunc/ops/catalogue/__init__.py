"""The catalogue: what is known of every operator that torch registers.

``aten.tsv`` is the table, a line an overload, for people to read. ``decided.txt`` has what a
person decided, ``classify.py`` the rules for the rest, ``trial.py`` tries operators, and
``lookup.py`` answers.
"""

from __future__ import annotations

from tsfunc.ops.catalogue.counts import census, operators
from tsfunc.ops.catalogue.custom import register
from tsfunc.ops.catalogue.lookup import OperatorEntry, category_of, lookup

__all__ = ["OperatorEntry", "category_of", "census", "lookup", "operators", "register"]
