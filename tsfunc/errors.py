"""Every error and warning of tsfunc, in one tree.

    TsfuncError
    ├── DispatchError (RuntimeError)          the table has no kernel, or a registration is refused
    ├── DescriptorError (ValueError)          a descriptor is not well formed
    │   └── AnnotationError (TypeError)       an annotation is not a type of the language
    ├── TypeCheckError (TypeError)            types disagree, or lack an attribute or operator
    ├── DescriptorViolation (ValueError)      a call breaks the contract of a descriptor
    ├── ConstraintViolation (ValueError)      a trace relies on more about a dim than is declared
    ├── ClosureError (RuntimeError)           a function reads a value that is not an argument
    ├── DataDependentError (RuntimeError)     a traced or batched value is used as a Python value
    ├── FailedCheckError (RuntimeError)       a size contradicts an assumption of the program
    ├── EscapedTracerError (RuntimeError)     a value is used after its transform has ended
    ├── UndefinedRuleError (RuntimeError, AttributeError)  a function has no custom rule yet
    ├── CustomRuleError (TypeError, ValueError)  a custom rule returns a wrong result
    ├── UndefinedDerivativeError (RuntimeError, TypeError)  a custom rule lacks a derivative
    ├── MissingRuleError (NotImplementedError)  an operator has no rule and can't be looped over
    ├── UnknownOperatorError (LookupError)    torch has no operator with the name
    ├── MalformedProgramError (RuntimeError)  a program's graph is not well formed
    ├── ExportError (RuntimeError)            a program can't be given to another of torch's tools
    ├── UnboundAxisError (NameError)          a collective names an axis that no vmap binds
    ├── MeshError (ValueError)                a mesh of processes does not fit a call or program
    ├── RanksDisagree (RuntimeError)          ranks call different collectives, or values differ
    ├── RanksFailed (RuntimeError)            ranks of a distributed call raised, ended or hang
    └── FileFormatError (ValueError)          a saved program is damaged
    ReadOnceWarning (UserWarning)             a traced function reads a clock, a file or noise
    SlowFallbackWarning (UserWarning)         an operator runs by the per-example loop
    MemoryBudgetWarning (UserWarning)         a memory budget can't be kept
    UntestedTorchWarning (UserWarning)        torch is newer than the releases that were tested

Each error also inherits from the built-in exception that torch.func raises in the same case.
"""

from __future__ import annotations

from collections.abc import Mapping

from tsfunc import rage


class TsfuncError(Exception):
    """The root of the tree: ``except tsfunc.errors.TsfuncError`` catches every error of tsfunc."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        rage.record("error", type=type(self).__name__, message=args[0] if args else "")


class DispatchError(TsfuncError, RuntimeError):
    """An operator has no kernel for a call, or a registration or key definition is refused."""


class DescriptorError(TsfuncError, ValueError):
    """A descriptor is not well formed: it cannot describe any call."""


class AnnotationError(DescriptorError, TypeError):
    """An annotation, or the text of one, is not a type of the language.

    Attributes:
        undefined: True if the annotation names something that is not defined, or not yet.
    """

    undefined = False


class TypeCheckError(TsfuncError, TypeError):
    """Branches or loops disagree in their types, or a type has no such attribute or operator."""


class DescriptorViolation(TsfuncError, ValueError):
    """A call breaks what its descriptors promise; the message has the path of each leaf."""


class ConstraintViolation(TsfuncError, ValueError):
    """Tracing relied on a fact about a named dim that its descriptor does not state.

    Args:
        message: the text of the error.
        mended: for each dim with a missing promise, the dim that makes the promise, as a
        suggestion.
    """

    def __init__(self, message: str = "", mended: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.mended = dict(mended or {})


class ClosureError(TsfuncError, RuntimeError):
    """A function reads a value that is not an argument, which ``closure="error"`` forbids."""


class DataDependentError(TsfuncError, RuntimeError):
    """A traced or batched value was used as a Python bool, number or list."""


class FailedCheckError(TsfuncError, RuntimeError):
    """A data-dependent size contradicts an assumption of a program or a ``torch._check``."""


class EscapedTracerError(TsfuncError, RuntimeError):
    """A traced or batched value was used after the transform that made it had ended."""


class UndefinedRuleError(TsfuncError, RuntimeError, AttributeError):
    """A function that needs a custom rule was called before the rule was set."""


class CustomRuleError(TsfuncError, TypeError, ValueError):
    """A custom rule returns a wrong structure, type or shape."""


class UndefinedDerivativeError(TsfuncError, RuntimeError, TypeError):
    """A requested derivative is not defined by the custom rule."""


class MissingRuleError(TsfuncError, NotImplementedError):
    """An operator has no rule for a transform, and a per-example loop cannot replace the rule."""


class UnknownOperatorError(TsfuncError, LookupError):
    """torch has no operator with the requested name."""


class UnboundAxisError(TsfuncError, NameError):
    """A collective names an axis that no active ``vmap`` binds."""

    def __init__(self, message: str, axis_name: object) -> None:
        super().__init__(message)
        self.axis_name = axis_name


class MeshError(TsfuncError, ValueError):
    """A mesh, or a spec of a mesh, does not fit its use."""


class RanksDisagree(TsfuncError, RuntimeError):
    """Ranks call different collectives, or hold different values where they promise equal ones.

    Attributes:
        axis_name: the mesh axis along which the ranks differ.
    """

    def __init__(self, message: str, axis_name: object = None) -> None:
        super().__init__(message)
        self.axis_name = axis_name


class RanksFailed(TsfuncError, RuntimeError):
    """Ranks of a distributed call raised, ended, or did not finish in time."""


class MalformedProgramError(TsfuncError, RuntimeError):
    """A program's graph uses an undefined value or contradicts its own metadata."""


class ExportError(TsfuncError, RuntimeError):
    """A program has a part that torch.export, or a backend, cannot represent."""


class FileFormatError(TsfuncError, ValueError):
    """A file is not a saved program, or the file is damaged."""


class ReadOnceWarning(UserWarning):
    """A traced function reads a clock, a file or noise; the program keeps the one result."""


class SlowFallbackWarning(UserWarning):
    """An operator without a batching rule runs once per example of the batch."""


class UntestedTorchWarning(UserWarning):
    """torch is newer than the releases that the package was tested with.

    The package warns once, as it is imported. A filter by category would import the package, so
    filter by the message: ``warnings.filterwarnings("ignore", message="tsfunc was tested")``.
    """


class MemoryBudgetWarning(UserWarning):
    """A call takes more memory than its budget even when it runs one example at a time."""
