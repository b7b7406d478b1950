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

from tsfunc._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
