"""The types of values and of calls, and their checks.

A descriptor of a function's parameter is a type. The modules, in the order in which they rest on
each other:

    polynomials  expressions over sizes: when two are the same, and solved for a name
    dims         sizes: numbers, names with bounds, expressions
    meta         MetaTensorType: a tensor's dtype, shape, device, requires_grad, layout
    class_names  how a class is called in a text, and found by it
    values       Python values as literals: when two are the same, and their text
    grammar      the types: frozen dataclasses under one union
    classes      nominal types: enums, interfaces, torch's own classes, any class
    descriptors  what a type says of a value: its class, its tensors, its parts
    sizes        the sizes of two types compared: names hold across a type
    lattice      which type is below which, and the least type above two
    inference    the types of values
    text         a text read into a type, or a descriptor
    annotation   what typing objects, classes and strings stand for
    reading      what users write for a descriptor
    conformance  whether a value is of a type, and every place where it is not
    generated    the same as generated code, which is fast for values that are right
    interfaces   whether a class has what an interface asks for
    signatures   the types of parameters and results, and the check of a call
    attributes   what an attribute of a type is
    control_flow the types of branches, and of what loops carry

The descriptors of a call:

    descriptor_sets the record of all parameters: from examples, widened, split, as text
    checks       a descriptor as a function that finds what a value breaks
    choosing     which of several sets of descriptors a call is checked by
    compiled     the descriptors of a whole function, ready for its calls
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tsfunc.late import late

if TYPE_CHECKING:
    from tsfunc.types.annotation import from_annotation, parse
    from tsfunc.types.attributes import attribute_type
    from tsfunc.types.classes import interface
    from tsfunc.types.compiled import Bindings, CompiledDescriptors, compile_descriptors
    from tsfunc.types.conformance import Mismatch, check
    from tsfunc.types.control_flow import check_carry, differences, join_branches
    from tsfunc.types.descriptor_sets import Descriptors, infer_descriptors
    from tsfunc.types.dims import Dim, DimExpr, DimForm, DimSpec
    from tsfunc.types.grammar import (
        ANY,
        BOOL,
        DOUBLE,
        FLOAT,
        INT,
        NONE,
        STR,
        TENSOR,
        Descriptor,
        TSAllType,
        TSBuiltinClass,
        TSCallType,
        TSCustomClass,
        TSDict,
        TSEnum,
        TSFields,
        TSFuture,
        TSInstanceClass,
        TSList,
        TSMetaType,
        TSModuleInterface,
        TSModuleType,
        TSNamedTuple,
        TSNominalType,
        TSOptional,
        TSPrimitiveType,
        TSPytree,
        TSRRef,
        TSStructuralType,
        TSTensor,
        TSTuple,
        TSTupleOf,
        TSType,
        TSUnion,
        Value,
        optional,
    )
    from tsfunc.types.inference import of_value, schema_of
    from tsfunc.types.lattice import is_subtype, join
    from tsfunc.types.meta import MetaTensorType
    from tsfunc.types.reading import as_descriptor, parse_descriptor
    from tsfunc.types.signatures import Signature, signature
else:
    __getattr__, __dir__ = late(
        __name__,
        {
            "annotation": "from_annotation parse",
            "attributes": "attribute_type",
            "classes": "interface",
            "compiled": "Bindings CompiledDescriptors compile_descriptors",
            "conformance": "Mismatch check",
            "control_flow": "check_carry differences join_branches",
            "descriptor_sets": "Descriptors infer_descriptors",
            "dims": "Dim DimExpr DimForm DimSpec",
            "grammar": """
                ANY BOOL DOUBLE FLOAT INT NONE STR TENSOR Descriptor TSAllType TSBuiltinClass
                TSCallType TSCustomClass TSDict TSEnum TSFields TSFuture TSInstanceClass TSList
                TSMetaType TSModuleInterface TSModuleType TSNamedTuple TSNominalType TSOptional
                TSPrimitiveType TSPytree TSRRef TSStructuralType TSTensor TSTuple TSTupleOf TSType
                TSUnion Value optional
            """,
            "inference": "of_value schema_of",
            "lattice": "is_subtype join",
            "meta": "MetaTensorType",
            "reading": "as_descriptor parse_descriptor",
            "signatures": "Signature signature",
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
    "CompiledDescriptors",
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
