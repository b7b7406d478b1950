"""Control flow that composes with every transform, an operator (or a few of a kind) a file.

``functions`` is imported here for what it registers: how a trace records ``autograd.Function``.
"""

from __future__ import annotations

from tsfunc.transforms.control import functions as functions
