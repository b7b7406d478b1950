"""Symbolic sizes: their symbols, the constraints known on them, and operators' result shapes.

Symbols
    - ``symbols``: one symbol for each named dim, number, and size that depends on data
    - ``symbolic_numbers``: symbolic ints and floats, their text and nodes
    - ``expressions``: the edge to sympy
    - ``shape_environment``: torch's ShapeEnv, with the user's lines
Constraints
    - ``bounds``: constraints that hold for all sizes of the dims
    - ``equalities``: sizes that an operator requires to be equal
Results of operators
    - ``fake_results``: the results of a call on fake tensors
    - ``fake_mode``: calls of fixed sizes, without FakeTensorMode
    - ``kernel_errors``: the error of a call that a rule has refused
    - ``fake_versions``: the versions of fake tensors
    - ``shape_probe``: results found by calls at other sizes
    - ``strides``: the strides of results
    - ``kernel_sizes``: composite kernels that need plain ints
Shape rules
    - ``shape_rules``: rules that replace torch's, for views, splits and reshapes
    - ``result_rules``: rules that torch lacks, and those of windows and recurrent layers
    - ``sized_indexing``: ints and slices in ``x[...]``, and parts of fake tensors
"""
