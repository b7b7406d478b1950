"""The public names, each from the module that defines it: ``lazy_exports`` reads this file, too."""

from tsfunc.ops.catalogue.counts import census as census
from tsfunc.ops.catalogue.counts import operators as operators
from tsfunc.ops.catalogue.custom import register as register
from tsfunc.ops.catalogue.lookup import OperatorEntry as OperatorEntry
from tsfunc.ops.catalogue.lookup import category_of as category_of
from tsfunc.ops.catalogue.lookup import lookup as lookup
from tsfunc.ops.registry import Category as Category
from tsfunc.ops.registry import Row as Row
from tsfunc.ops.registry import RuleLevel as RuleLevel
from tsfunc.ops.registry import all_rows as all_rows
from tsfunc.ops.registry import find as find
from tsfunc.ops.registry import row as row
from tsfunc.ops.registry import rows as rows

__all__: list[str]
