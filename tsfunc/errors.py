"""The errors and warnings that tsfunc raises, in one tree.

    TsfuncError
    ├── DispatchError (RuntimeError)
    ├── DescriptorError (ValueError)
    │   └── AnnotationError (TypeError)
    ├── TypeCheckError (TypeError)
    ├── DescriptorViolation (ValueError)
    ├── ConstraintViolation (ValueError)
    ├── ClosureError (RuntimeError)
    ├── DataDependentError (RuntimeError)
    ├── FailedCheckError (RuntimeError)
    ├── NanError (FloatingPointError)
    ├── EscapedTracerError (RuntimeError)
    ├── UndefinedRuleError (RuntimeError, AttributeError)
    ├── CustomRuleError (TypeError, ValueError)
    ├── UndefinedDerivativeError (RuntimeError, TypeError)
    ├── MissingRuleError (NotImplementedError)
    ├── UnknownOperatorError (LookupError)
    ├── UnboundAxisError (NameError)
    ├── MeshError (ValueError)
    ├── RanksDisagree (RuntimeError)
    ├── RanksFailed (RuntimeError)
    ├── MalformedProgramError (RuntimeError)
    ├── ExportError (RuntimeError)
    └── FileFormatError (ValueError)
    ReadOnceWarning (UserWarning)
    RetraceWarning (UserWarning)
    SlowFallbackWarning (UserWarning)
    UntestedTorchWarning (UserWarning)
    MemoryBudgetWarning (UserWarning)

Each class is also the built-in exception that torch.func raises in the same case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tsfunc import rage


class TsfuncError(Exception):
    """The base class of tsfunc's errors: ``except tsfunc.errors.TsfuncError`` catches them all."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        rage.record("error", type=type(self).__name__, message=args[0] if args else "")


class DispatchError(TsfuncError, RuntimeError):
    """An operator has no kernel for a call, or a registration or key definition is invalid."""


class DescriptorError(TsfuncError, ValueError):
    """A descriptor is not well formed: it cannot describe any call."""


class AnnotationError(DescriptorError, TypeError):
    """An annotation or its text is not a type of the language.

    Attributes:
        undefined: True if a name in it is not defined, or not yet.
    """

    undefined = False


class TypeCheckError(TsfuncError, TypeError):
    """Types of branches or loops disagree, or a type lacks an attribute or operator."""


class DescriptorViolation(TsfuncError, ValueError):
    """A call breaks the contract of its descriptors; the message has the path of each leaf."""


class ConstraintViolation(TsfuncError, ValueError):
    """Tracing relied on a constraint on a named dim that its descriptor does not state.

    Args:
        suggested: for each affected dim, a dim that states the missing constraint.
    """

    def __init__(self, message: str = "", suggested: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.suggested = dict(suggested or {})


class ClosureError(TsfuncError, RuntimeError):
    """A function reads a value that is not an argument, which ``closure="error"`` forbids."""


class DataDependentError(TsfuncError, RuntimeError):
    """A traced or batched value is used as a Python bool, number or list."""


class FailedCheckError(TsfuncError, RuntimeError):
    """Data breaks an assumption of a program, a ``torch._check`` or a :func:`tsfunc.check`.

    Args:
        examples: the indices of the examples that fail a ``tsfunc.check``, one for each vmap.
    """

    def __init__(self, message: str = "", examples: Sequence[tuple[int, ...]] = ()) -> None:
        super().__init__(message)
        self.examples = tuple(examples)


class NanError(TsfuncError, FloatingPointError):
    """An operator returns a NaN while ``debug.nans()`` or ``config.debug_nans`` looks for it.

    Attributes:
        operator: the name of the operator.
        examples: the index of the first example that has a NaN, one entry for each vmap.
    """

    def __init__(
        self, message: str = "", operator: str = "", examples: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.operator = operator
        self.examples = examples


class EscapedTracerError(TsfuncError, RuntimeError):
    """A traced or batched value is used after the transform that made it has ended."""


class UndefinedRuleError(TsfuncError, RuntimeError, AttributeError):
    """A function with custom rules lacks the rule that a transform needs."""


class CustomRuleError(TsfuncError, TypeError, ValueError):
    """A custom rule returns an invalid result."""


class UndefinedDerivativeError(TsfuncError, RuntimeError, TypeError):
    """A custom rule does not define a derivative that a transform needs."""


class MissingRuleError(TsfuncError, NotImplementedError):
    """An operator has no rule for a transform, and a loop cannot replace the rule."""


class UnknownOperatorError(TsfuncError, LookupError):
    """torch has no operator of this name."""


class UnboundAxisError(TsfuncError, NameError):
    """A collective names an axis that no active ``vmap`` has."""

    def __init__(self, message: str, axis_name: object) -> None:
        super().__init__(message)
        self.axis_name = axis_name


class MeshError(TsfuncError, ValueError):
    """A mesh, or a spec of a mesh, does not fit its use."""


class RanksDisagree(TsfuncError, RuntimeError):
    """Ranks call different collectives, or have unequal values that must be equal.

    Attributes:
        axis_name: the mesh axis along which the ranks differ.
    """

    def __init__(self, message: str, axis_name: object = None) -> None:
        super().__init__(message)
        self.axis_name = axis_name


class RanksFailed(TsfuncError, RuntimeError):
    """Ranks of a distributed call raised, exited, or did not finish in time."""


class MalformedProgramError(TsfuncError, RuntimeError):
    """A program's graph uses an undefined value, or contradicts its declared structure."""


class ExportError(TsfuncError, RuntimeError):
    """A program contains something that torch.export, or a backend, cannot represent."""


class FileFormatError(TsfuncError, ValueError):
    """A file is not a saved program, or it is damaged."""


class ReadOnceWarning(UserWarning):
    """A traced function reads a clock, a file or system randomness.

    A program of the function keeps the value.
    """


class RetraceWarning(UserWarning):
    """Calls of a specialized function differ in a value, and each value needs a new program.

    The warning is given once for each argument, at the second new program for its values. Its
    message has the descriptors with which one program serves all values.
    """


class SlowFallbackWarning(UserWarning):
    """An operator without a batching rule runs once per example of the batch."""


class UntestedTorchWarning(UserWarning):
    """torch is newer than the releases that the package was tested with.

    The package warns once, when it is imported. A filter by category would import the package, so
    filter by the message: ``warnings.filterwarnings("ignore", message="tsfunc was tested")``.
    """


class MemoryBudgetWarning(UserWarning):
    """A call takes more memory than its budget even if it runs one example at a time."""
