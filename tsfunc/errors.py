"""Every error and warning that tsfunc raises, in one tree.

    TsfuncError
    ├── DispatchError (RuntimeError)          the table has no kernel, or a registration is refused
    ├── DescriptorError (ValueError)          a descriptor is not well formed
    │   └── AnnotationError (TypeError)       what is written is no type of the language
    ├── TypeCheckError (TypeError)            types do not go together, or lack what is used of them
    ├── DescriptorViolation (ValueError)      a call breaks the contract of a descriptor
    ├── ConstraintViolation (ValueError)      a trace needs more of a dim than is promised
    ├── ClosureError (RuntimeError)           a function reads what is no argument, and may not
    ├── DataDependentError (RuntimeError)     a traced or batched value is used as a Python value
    ├── FailedCheckError (RuntimeError)       sizes are not what the running program relies on
    ├── EscapedTracerError (RuntimeError)     a value is used after its transform has ended
    ├── MissingRuleError (NotImplementedError)  an operator has no rule and can't be looped over
    ├── UnknownOperatorError (LookupError)    torch has no operator of a name
    ├── MalformedProgramError (RuntimeError)  a program's graph is not well formed
    ├── ExportError (RuntimeError)          a program can't be given to another of torch's tools
    ├── UnboundAxisError (NameError)          a collective names an axis that no vmap binds
    ├── MeshError (ValueError)              a mesh of processes is not what a call or program needs
    ├── RanksDisagree (RuntimeError)        ranks call other collectives, or have other values
    ├── RanksFailed (RuntimeError)          ranks of a distributed call raised, ended or hang
    └── FileFormatError (ValueError)          a saved program is damaged
    SlowFallbackWarning (UserWarning)         an operator runs by the per-example loop
    MemoryBudgetWarning (UserWarning)         a memory budget can't be kept
    UntestedTorchWarning (UserWarning)        torch is newer than the releases that were tested

Each is also the built-in exception that a caller of torch.func would catch.
"""

from __future__ import annotations

from collections.abc import Mapping

from tsfunc import rage


class TsfuncError(Exception):
    """The root of the tree: ``except tsfunc.errors.TsfuncError`` catches all that is ours."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        rage.record("error", type=type(self).__name__, message=args[0] if args else "")


class DispatchError(TsfuncError, RuntimeError):
    """An operator has no kernel for a call, or a registration or key definition is refused."""


class DescriptorError(TsfuncError, ValueError):
    """A descriptor is not well formed: it could not describe any call."""


class AnnotationError(DescriptorError, TypeError):
    """An annotation, or a text, is no type of the language.

    Attributes:
        undefined: whether for a name that is not defined, or not yet.
    """

    undefined = False


class TypeCheckError(TsfuncError, TypeError):
    """Branches or loops disagree in their types, or a type has no such attribute or operator."""


class DescriptorViolation(TsfuncError, ValueError):
    """A call breaks what its descriptors promise; the message has the path of each leaf."""


class ConstraintViolation(TsfuncError, ValueError):
    """Tracing relied on a fact about a named dim that its descriptor does not state.

    Args:
        message: what the error says.
        mended: for each dim of which more was asked the dim that promises it, as it is offered.
    """

    def __init__(self, message: str = "", mended: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.mended = dict(mended or {})


class ClosureError(TsfuncError, RuntimeError):
    """A function reads what is not among its arguments, which ``closure="error"`` forbids."""


class DataDependentError(TsfuncError, RuntimeError):
    """A value that is traced or batched was asked for as a Python bool, number or list."""


class FailedCheckError(TsfuncError, RuntimeError):
    """A size that depends on data is not what a program relies on, or ``torch._check`` says."""


class EscapedTracerError(TsfuncError, RuntimeError):
    """A traced or batched value was used after the transform that made it had ended."""


class UndefinedRuleError(TsfuncError, RuntimeError, AttributeError):
    """A function that was to be given a rule of the user's has none."""


class CustomRuleError(TsfuncError, TypeError, ValueError):
    """A rule of the user's does not return what it must."""


class UndefinedDerivativeError(TsfuncError, RuntimeError, TypeError):
    """A derivative is asked for of which a rule of the user's says nothing."""


class MissingRuleError(TsfuncError, NotImplementedError):
    """An operator has no rule for a transform, and no loop can stand in for one."""


class UnknownOperatorError(TsfuncError, LookupError):
    """torch has no operator of the name that was asked for."""


class UnboundAxisError(TsfuncError, NameError):
    """A collective names an axis that no active ``vmap`` has."""

    def __init__(self, message: str, axis_name: object) -> None:
        super().__init__(message)
        self.axis_name = axis_name


class MeshError(TsfuncError, ValueError):
    """A mesh, or a spec of one, does not fit what it is used for."""


class RanksDisagree(TsfuncError, RuntimeError):
    """Ranks call other collectives than one another, or differ where they promise to be equal.

    Attributes:
        axis_name: the mesh axis along which they differ.
    """

    def __init__(self, message: str, axis_name: object = None) -> None:
        super().__init__(message)
        self.axis_name = axis_name


class RanksFailed(TsfuncError, RuntimeError):
    """Ranks of a distributed call raised, ended, or did not finish in time."""


class MalformedProgramError(TsfuncError, RuntimeError):
    """A program's graph uses what is not there, or is not what it is said to be."""


class ExportError(TsfuncError, RuntimeError):
    """A program has what torch.export, or a backend, has no place for."""


class FileFormatError(TsfuncError, ValueError):
    """A file is not a saved program, or it is damaged."""


class ReadOnceWarning(UserWarning):
    """A traced function reads a clock, a file, or noise of the system; its program has it once."""


class SlowFallbackWarning(UserWarning):
    """An operator without a batching rule runs once per example of the batch."""


class UntestedTorchWarning(UserWarning):
    """torch is newer than the releases that the package was tested with.

    The package warns once, as it is imported. A filter by category would import the package, so
    filter by the message: ``warnings.filterwarnings("ignore", message="tsfunc was tested")``.
    """


class MemoryBudgetWarning(UserWarning):
    """A call takes more memory than its budget even when it runs one example at a time."""
