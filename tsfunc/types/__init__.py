"""What is promised of a function's arguments, and the checks that hold a call to it.

In the order in which a descriptor passes through them:

    dims         sizes: numbers, names with bounds, expressions
    meta         MetaTensorType: a tensor's dtype, shape, device, requires_grad, layout
    values       Python values: when two are the same
    descriptors  what users write, read into one union of frozen dataclasses
    checks       a descriptor as a function that finds what a value breaks
    compiled     the descriptors of a whole function, ready for its calls
"""

from tsfunc.types.compiled import Bindings, CompiledDescriptors, compile_descriptors
from tsfunc.types.descriptors import Descriptor, Value, as_descriptor
from tsfunc.types.dims import Dim, DimExpr, DimForm, DimSpec
from tsfunc.types.meta import MetaTensorType

__all__ = [
    "Bindings",
    "CompiledDescriptors",
    "Descriptor",
    "Dim",
    "DimExpr",
    "DimForm",
    "DimSpec",
    "MetaTensorType",
    "Value",
    "as_descriptor",
    "compile_descriptors",
]
