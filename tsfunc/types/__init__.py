"""The types of values and of calls, and their checks.

The descriptor of a function's parameter is a type. The modules, in the order of their imports:

    sizes            expressions over named sizes, and their normal form
    size_constraints conditions on named sizes as text, and their code as guards
    dims             the sizes in a shape: numbers, names with bounds, expressions
    size_matching    comparison of the sizes of two types, whose names hold across a type
    meta             MetaTensorType: the metadata of a tensor, its order and joins
    meta_arguments   the arguments of MetaTensorType, checked and normalized
    values           Python values as literals, and classes by name: equality, and their text
    scope            the names of objects in generated code
    check_context    the state of a check of values, with every mismatch
    check_codegen    the check of values as generated code, which is fast for values that fit
    base             the base class of types: the operations on a type, as methods
    single           the types without parts: Any, single values, tensors, classes
    unions           the types of the values of several types
    futures          the types of values that are still being computed
    containers       the types of containers, and of objects with fields
    grammar          the grammar of the types, and their words in annotations
    classes          nominal types: enums, interfaces, torch's own classes, any class
    lattice          the subtype relation, and the least type above two types
    inference        the types of values
    text             the parser of types and descriptors
    annotation       the types of typing objects, classes and strings
    checker          the check of values against types, whose classes have annotations
    reading          the reading of users' descriptors, and of annotations of parameters
    signatures       the types of parameters, results and attributes, and the check of a call
    control_flow_types  the types of branches, and of values that loops carry

The descriptors of a call:

    descriptor_sets  the record of all parameters: from examples, widened, split, as text
    disjoint         descriptors that no call can fit together
    contract         the descriptors of a function, ready for its calls, and their order

The public names are in ``__all__``. The modules of the package are private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tsfunc._lazy import lazy_exports

if TYPE_CHECKING:
    from tsfunc.types.annotation import from_annotation, parse
    from tsfunc.types.base import TSAllType, TSType
    from tsfunc.types.check_context import Mismatch
    from tsfunc.types.checker import check
    from tsfunc.types.classes import interface
    from tsfunc.types.containers import (
        TSDict,
        TSFields,
        TSList,
        TSNamedTuple,
        TSPytree,
        TSTuple,
        TSTupleOf,
    )
    from tsfunc.types.contract import Bindings, Contract, compile_descriptors
    from tsfunc.types.control_flow_types import check_carry, differences, join_branches
    from tsfunc.types.descriptor_sets import Descriptors, infer_descriptors
    from tsfunc.types.dims import Dim, DimForm, DimSpec
    from tsfunc.types.futures import TSFuture, TSRRef
    from tsfunc.types.grammar import (
        Descriptor,
        TSCallType,
        TSInstanceClass,
        TSNominalType,
        TSStructuralType,
    )
    from tsfunc.types.inference import of_value, schema_of
    from tsfunc.types.lattice import is_subtype, join
    from tsfunc.types.meta import MetaTensorType
    from tsfunc.types.reading import as_descriptor, parse_descriptor
    from tsfunc.types.signatures import Signature, attribute_type, signature
    from tsfunc.types.single import (
        ANY,
        BOOL,
        DOUBLE,
        FLOAT,
        INT,
        NONE,
        STR,
        TENSOR,
        TSBuiltinClass,
        TSCustomClass,
        TSEnum,
        TSMetaType,
        TSModuleInterface,
        TSModuleType,
        TSPrimitiveType,
        TSTensor,
        Value,
    )
    from tsfunc.types.sizes import DimExpr
    from tsfunc.types.unions import TSOptional, TSUnion, optional
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "annotation": "from_annotation parse",
            "base": "TSAllType TSType",
            "classes": "interface",
            "contract": "Bindings Contract compile_descriptors",
            "check_context": "Mismatch",
            "checker": "check",
            "containers": "TSDict TSFields TSList TSNamedTuple TSPytree TSTuple TSTupleOf",
            "control_flow_types": "check_carry differences join_branches",
            "descriptor_sets": "Descriptors infer_descriptors",
            "dims": "Dim DimForm DimSpec",
            "futures": "TSFuture TSRRef",
            "grammar": "Descriptor TSCallType TSInstanceClass TSNominalType TSStructuralType",
            "inference": "of_value schema_of",
            "lattice": "is_subtype join",
            "meta": "MetaTensorType",
            "reading": "as_descriptor parse_descriptor",
            "signatures": "Signature attribute_type signature",
            "single": """
                ANY BOOL DOUBLE FLOAT INT NONE STR TENSOR TSBuiltinClass TSCustomClass TSEnum
                TSMetaType TSModuleInterface TSModuleType TSPrimitiveType TSTensor Value
            """,
            "sizes": "DimExpr",
            "unions": "TSOptional TSUnion optional",
        },
    )

__all__ = [
    "ANY",
    "BOOL",
    "DOUBLE",
    "FLOAT",
    "INT",
    "NONE",
    "STR",
    "TENSOR",
    "Bindings",
    "Contract",
    "Descriptor",
    "Descriptors",
    "Dim",
    "DimExpr",
    "DimForm",
    "DimSpec",
    "MetaTensorType",
    "Mismatch",
    "Signature",
    "TSAllType",
    "TSBuiltinClass",
    "TSCallType",
    "TSCustomClass",
    "TSDict",
    "TSEnum",
    "TSFields",
    "TSFuture",
    "TSInstanceClass",
    "TSList",
    "TSMetaType",
    "TSModuleInterface",
    "TSModuleType",
    "TSNamedTuple",
    "TSNominalType",
    "TSOptional",
    "TSPrimitiveType",
    "TSPytree",
    "TSRRef",
    "TSStructuralType",
    "TSTensor",
    "TSTuple",
    "TSTupleOf",
    "TSType",
    "TSUnion",
    "Value",
    "as_descriptor",
    "attribute_type",
    "check",
    "check_carry",
    "compile_descriptors",
    "differences",
    "from_annotation",
    "infer_descriptors",
    "interface",
    "is_subtype",
    "join",
    "join_branches",
    "of_value",
    "optional",
    "parse",
    "parse_descriptor",
    "schema_of",
    "signature",
]
