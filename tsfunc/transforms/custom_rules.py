"""Base of the functions with custom rules: the operands of a call, and the checks of rules.

A call is an ``autograd.Function`` of its operands: the tensors among the differentiated arguments,
the tensors among the other arguments, and the tensors that the rules close over
(NOTE [hidden operands] in ``bridge/tracers/level_proxies``). A rule defines no derivative by the
last two kinds. A derivative by them is an error if the result depends on them, which is known when
the function has run.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.autograd import Function

from tsfunc import pytrees
from tsfunc._text import count_text
from tsfunc.bridge.grad.autograd import (
    differentiates_here,
    is_differentiable,
    is_perturbed,
    outside_graph,
)
from tsfunc.bridge.grad.custom_function import trace_of
from tsfunc.bridge.grad.mapped_function import detach_alias
from tsfunc.bridge.mesh.levels import MeshAxes
from tsfunc.bridge.tracers.boundaries import check_function
from tsfunc.bridge.tracers.interrupts import resets
from tsfunc.bridge.tracers.level_proxies import as_seen_by_current_level, substitute_tensors
from tsfunc.bridge.tracers.user_queries import SYMBOLIC
from tsfunc.dispatch.state import overriding
from tsfunc.errors import CustomRuleError, UndefinedDerivativeError, UndefinedRuleError
from tsfunc.transforms.closure_convert import consts_of
from tsfunc.transforms.symbolic_zeros import SymbolicZero
from tsfunc.user_code import function_text, name_of


@dataclass(frozen=True)
class ResultMetadata:
    """The metadata of a result tensor, as known when a rule computes its derivative."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def is_differentiable(self) -> bool:
        """True if the dtype has derivatives."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def zero(self, symbolic: bool = False) -> Any:
        if symbolic:
            return SymbolicZero(self.shape, self.dtype)
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@contextmanager
def _enter_both(
    outer: AbstractContextManager[None], inner: AbstractContextManager[None]
) -> Iterator[None]:
    with outer, inner:
        yield


@dataclass(eq=False)
class RuleCall:
    """A call of a function with a rule: its operands' positions and its results' form.

    Attributes:
        leaves: the leaves of the differentiated arguments, then of the other arguments; None in
            the positions of operands and sizes.
        tree: the structures of the two groups of arguments, as a pair.
        positions: the positions of the operands among the leaves; closed-over operands have none.
        count: the number of operands that the rule differentiates by; they come first.
        sized: the positions of symbolic sizes among the leaves. In a program they differ between
            runs.
        closed: the tensors that the rules close over; their operands come after the others.
        perturbed: for each operand, True if a transform or autograd differentiates by it.
        out_tree: the structure of the result.
        out_places: the positions of the tensors among the leaves of the result.
        out_leaves: the leaves of the result, with None in the positions of tensors.
        results: the shapes, dtypes and devices of the tensors of the result.
        axes: the mesh axes that the call is made in.
    """

    rule: Rule[Any]
    leaves: Sequence[Any]
    tree: tuple[Any, Any]
    positions: Sequence[int]
    count: int
    sized: Sequence[int]
    closed: Sequence[torch.Tensor]
    perturbed: Sequence[bool] = ()
    out_tree: Any = None
    out_places: tuple[int, ...] = ()
    out_leaves: tuple[Any, ...] = ()
    results: tuple[ResultMetadata, ...] = ()
    axes: MeshAxes = field(default_factory=MeshAxes)

    @property
    def hidden(self) -> Sequence[bool]:
        """The flags ``perturbed`` of the operands that the rule does not differentiate by."""
        return self.perturbed[self.count :]

    def arguments(self, sizes: Sequence[Any], operands: Sequence[Any]) -> tuple[Any, Any]:
        """Return the arguments that are not differentiated by, and the others."""
        rest, fixed = self.tree
        leaves = self._filled(sizes, operands)
        at = rest.num_leaves
        return pytrees.unflatten(fixed, leaves[at:]), pytrees.unflatten(rest, leaves[:at])

    def _filled(self, sizes: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, operands, strict=False):
            leaves[position] = tensor
        for position, size in zip(self.sized, sizes, strict=True):
            leaves[position] = size
        return leaves

    def arguments_with(self, tensors: Sequence[Any], other: Callable[[Any], Any]) -> Any:
        """Return the differentiated arguments with other tensors; ``other`` maps the rest."""
        leaves = [other(leaf) for leaf in self.leaves[: self.tree[0].num_leaves]]
        for position, tensor in zip(self.positions[: self.count], tensors, strict=True):
            leaves[position] = tensor
        return pytrees.unflatten(self.tree[0], leaves)

    def substituting_consts(self, operands: Sequence[Any]) -> AbstractContextManager[None]:
        """Context manager: the rules see the operands in place of closed-over tensors.

        The mesh axes of the call are bound, even in a later backward pass.
        """
        first = len(self.positions)
        seen = substitute_tensors(self.closed, operands[first : first + len(self.closed)])
        return _enter_both(self.axes.bound(), seen) if self.axes.levels else seen

    def call_detached(
        self, func: Callable[[Any, Any], Any], sizes: Sequence[Any], operands: Sequence[Any]
    ) -> tuple[Any, bool]:
        """Call the function, or its ``fwd`` rule, in the forward of an ``autograd.Function``.

        Returns:
            The result, and True if it depends on a tensor that the rule does not differentiate by.
        """
        with self.substituting_consts(operands):
            if not any(self.hidden):
                returned = func(*self.arguments(sizes, operands))
                return pytrees.tree_map(as_seen_by_current_level, returned), False
            tensors = [x.detach() for x in operands[: self.count]]
            with outside_graph(True), overriding(_searches, active=True):
                returned = func(*self.arguments(sizes, (*tensors, *operands[self.count :])))
                leaves, tree = pytrees.flatten(pytrees.tree_map(as_seen_by_current_level, returned))
                depends = any(map(is_perturbed, leaves))
        detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]
        return pytrees.unflatten(tree, detached), depends

    def result_tensors(self, out: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Return the tensors of a result, and store its structure."""
        leaves, self.out_tree = pytrees.flatten(out)
        self.out_places = tuple(
            i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)
        )
        tensors = tuple(detach_alias(leaves[i], operands) for i in self.out_places)
        self.results = tuple(ResultMetadata(x.shape, x.dtype, x.device) for x in tensors)
        self.out_leaves = tuple(None if isinstance(x, torch.Tensor) else x for x in leaves)
        return tensors

    def result(self, tensors: Sequence[Any], other: Callable[[Any], Any] = lambda x: x) -> Any:
        """Return a result of the stored structure."""
        leaves = [other(leaf) for leaf in self.out_leaves]
        for position, tensor in zip(self.out_places, tensors, strict=True):
            leaves[position] = tensor
        return pytrees.unflatten(self.out_tree, leaves)

    def name(self, position: int) -> str:
        """Return the user's name of a leaf among the differentiated arguments."""
        number, *path = self.tree[0].paths()[position]
        name = self.rule.parameter(number)
        return name + "".join(f"[{key!r}]" for key in path)

    def raise_undefined(self) -> None:
        raise UndefinedDerivativeError(_undefined_message(self))


pytrees.add_leaf(RuleCall)  # not a container of its tensors


def _undefined_message(call: RuleCall) -> str:
    rule = call.rule
    return (
        f"{rule.label}: the result of {rule.name} depends on a tensor that it is differentiated by "
        f"but that its rule does not cover: it is closed over, or among the "
        f"arguments that nondiff_argnums name. Pass it as an argument that is differentiated by "
        f"(closure_convert finds captured tensors), or detach it with stop_gradient."
    )


class _Undefined(Function):
    """A guard tensor that depends on hidden operands; its derivative is an error."""

    @staticmethod
    def forward(call: RuleCall, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        if cotangent is not None:
            ctx.call.raise_undefined()
        return (None,) * len(ctx.needs_input_grad)

    @staticmethod
    def jvp(ctx: Any, _call: Any, *tangents: Any) -> Any:
        return torch.zeros(())


class RuleFunction(Function):
    """The call of a function with a rule, as an ``autograd.Function`` of the operands."""

    @classmethod
    def primal_results(
        cls, call: RuleCall, sizes: Sequence[Any], *operands: Any
    ) -> tuple[Any, ...]:
        """Return the result without a derivative: for traces, which do not call the rule yet."""
        with call.substituting_consts(operands):
            fixed, rest = call.arguments(sizes, operands)
            out = call.rule.func(*call.rule.whole(fixed, rest))
            return call.result_tensors(pytrees.tree_map(as_seen_by_current_level, out), operands)

    @classmethod
    def run_recorded(cls, call: RuleCall, sizes: Sequence[Any], *operands: Any) -> tuple[Any, ...]:
        """Run a recorded call, and check that its results are as they were when it was recorded."""
        expected = call.out_tree, [(x.dtype, len(x.shape)) for x in call.results]
        call = dataclasses.replace(call)
        results = cls.run(call, sizes, operands)
        if (call.out_tree, [(x.dtype, len(x.shape)) for x in call.results]) != expected:
            raise CustomRuleError(
                f"{call.rule.label}: {call.rule.name} and its rule return results of other "
                f"structures, types or ranks: {expected[0]} of {_types_text(expected[1])}, and "
                f"{pytrees.structure_text(call.out_tree)} of "
                f"{_types_text((x.dtype, len(x.shape)) for x in call.results)}."
            )
        return results

    @classmethod
    def run(cls, call: RuleCall, sizes: Sequence[Any], operands: Sequence[Any]) -> tuple[Any, ...]:
        """Run the call on tensors; in a trace, record it."""
        results: tuple[Any, ...]
        if trace_of(operands) is not None:
            results = apply(cls, call, sizes, *operands)
            return results
        call.perturbed = [is_perturbed(x) for x in operands]
        if not is_call_differentiated(call):
            return cls.primal_results(call, sizes, *operands)
        if any(call.hidden):
            pairs = zip(operands[call.count :], call.hidden, strict=True)
            guard = apply(_Undefined, call, *[x for x, hidden in pairs if hidden])
            operands = (*operands, guard)
        results = apply(cls, call, sizes, *operands)
        return results

    @staticmethod
    def save_for_derivatives(
        ctx: Any, call: RuleCall, operands: Sequence[Any], residuals: Sequence[Any], out: Any
    ) -> tuple[Any, ...]:
        """Save tensors for the derivatives of a call, and return the tensors of its result."""
        ctx.save_for_backward(*operands, *residuals)
        ctx.save_for_forward(*operands, *residuals)
        ctx.set_materialize_grads(False)
        results = call.result_tensors(out, operands)
        ctx.mark_non_differentiable(*[x for x in results if not is_differentiable(x)])
        return results

    @staticmethod
    def others(call: RuleCall, operands: Sequence[Any], depends: bool) -> list[Any]:
        """Return the cotangents of the hidden operands; the guard's cotangent raises the error."""
        gradients: list[Any] = [None] * (len(operands) - call.count)
        if depends:
            gradients[-1] = torch.zeros_like(operands[-1])
        return gradients


def is_call_differentiated(call: RuleCall) -> bool:
    """True if a derivative by an operand is requested, so that the rule is needed.

    Without a tsfunc transform that differentiates, closed-over tensors are parameters. If only
    parameters require gradients, autograd differentiates the function itself.
    """
    if any(call.perturbed[: call.count]):
        return True
    return any(call.hidden) and differentiates_here() and not _searches.active


class _DependencySearches(threading.local):
    """Attribute ``active``: True while a function runs on this thread to find hidden dependencies.

    Meanwhile, a function with a rule that they call is differentiated by autograd if only its
    hidden operands are perturbed.
    """

    active = False


_searches = resets(_DependencySearches())


def _types_text(types: Any) -> str:
    return (
        ", ".join(f"{dtype} of {count_text(rank, 'dim')}" for dtype, rank in types) or "no tensors"
    )


_T = TypeVar("_T")
# Without an annotation, as with a lambda, a type checker takes Any for the result.
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    Result = TypeVarWithDefault("Result", default=Any)
else:
    Result = TypeVar("Result")
_METHODS = frozenset({"defvjp", "defjvp", "defjvps", "def_vmap"})


class Rule(Generic[Result]):
    """Base class of the three kinds of custom rules: a function and its ``nondiff_argnums``."""

    label = "custom_rule"
    kind: type[RuleFunction]

    def __init__(
        self,
        func: Callable[..., Result],
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Sequence[str] = (),
    ) -> None:
        check_function(self.label, func)
        if hasattr(func, "__name__"):
            functools.update_wrapper(self, func, updated=())
        self.func = func
        self.name = name_of(func)
        try:
            self.signature: inspect.Signature | None = inspect.signature(func)
        except (TypeError, ValueError):  # a builtin
            self.signature = None
        numbers = self._several("nondiff_argnums", nondiff_argnums, int)
        names = self._several("nondiff_argnames", nondiff_argnames, str)
        parameters = [] if self.signature is None else [*self.signature.parameters]
        for name in names:
            if name not in parameters:
                raise ValueError(
                    f"{self.label}: nondiff_argnames: expected names of parameters of {self.name} "
                    f"({', '.join(parameters) or 'not known'}), got {name!r}."
                )
        positions = {*numbers, *(parameters.index(name) for name in names)}
        self.nondiff_argnums = tuple(sorted(positions))

    def _several(self, name: str, value: Any, cls: type[_T]) -> list[_T]:
        """Return the elements of an argument: one of a class, or a sequence of them."""
        several = [value] if isinstance(value, cls) else value
        if not isinstance(several, Sequence) or not all(isinstance(each, cls) for each in several):
            kind = "an int" if cls is int else "a str"
            raise TypeError(
                f"{self.label}({self.name}, {name}=...): expected {kind} or a sequence of "
                f"{cls.__name__}s, got {value!r}."
            )
        return list(several)

    def positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return all arguments by position, defaults included, as the rules get them."""
        if self.signature is None:
            if kwargs:
                raise TypeError(
                    f"{self.label}: {self.name} has no signature by which the arguments "
                    f"{', '.join(kwargs)} could be given a position. Give them by position."
                )
            return args
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{self.label}: expected arguments of {self.name}{self.signature}: {error}."
            ) from None
        bound.apply_defaults()
        without = [name for name in bound.kwargs if name in kwargs]
        if without:
            raise TypeError(
                f"{self.label}: the rule of {self.name} gets all arguments by position, which "
                f"{', '.join(without)} can't be given. Make them ordinary parameters."
            )
        return bound.args

    def __repr__(self) -> str:
        return f"{self.label}({function_text(self.func)})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS and "func" in vars(self):
            return getattr(self.func, name)  # an inner rule of another kind
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def fixed(self, args: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]]:
        """Return the arguments that are not differentiated, and the others."""
        fixed = {n % len(args) for n in self.nondiff_argnums} if args else set()
        return [args[i] for i in sorted(fixed)], tuple(
            arg for i, arg in enumerate(args) if i not in fixed
        )

    def whole(self, fixed: Sequence[Any], rest: Sequence[Any]) -> tuple[Any, ...]:
        """Return all arguments, merged from the two groups."""
        count = len(fixed) + len(rest)
        positions = {n % count for n in self.nondiff_argnums} if count else set()
        remaining, nondiff = iter(rest), iter(fixed)
        return tuple(next(nondiff if i in positions else remaining) for i in range(count))

    def parameter(self, number: int) -> str:
        """Return the name of a differentiated argument."""
        names = [] if self.signature is None else [*self.signature.parameters]
        count = max(len(names), number + len(self.nondiff_argnums) + 1)
        positions = {n % count for n in self.nondiff_argnums}
        differentiated = [
            names[i] if i < len(names) else str(i) for i in range(count) if i not in positions
        ]
        return differentiated[number]

    def missing(self, method: str) -> UndefinedRuleError:
        return UndefinedRuleError(
            f"{self.label}: {self.name} has no rule yet. Give it one with @{self.name}.{method}."
        )

    def functions(self) -> Sequence[Any]:
        """Return the function and its rules, which may close over tensors."""
        return (self.func,)

    def call_differentiably(self, args: tuple[Any, ...]) -> Any:
        """Run a call that may be differentiated."""
        args = pytrees.tree_map(as_seen_by_current_level, args)
        call, sizes, operands = self.prepare_call(args)
        if trace_of(operands) is None:
            call.perturbed = [is_perturbed(x) for x in operands]
            if not is_call_differentiated(call):
                return self.func(*args)
        return call.result(self.kind.run(call, sizes, operands))

    def prepare_call(self, args: tuple[Any, ...]) -> tuple[RuleCall, Sequence[Any], Sequence[Any]]:
        """Return a call, the symbolic sizes among its arguments, and its operands."""
        fixed, rest = self.fixed(args)
        leaves, tree = pytrees.flatten(rest)
        others, fixed_tree = pytrees.flatten(fixed)
        leaves += others
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        sized = [i for i, leaf in enumerate(leaves) if isinstance(leaf, SYMBOLIC)]
        tensors, sizes = [leaves[i] for i in positions], [leaves[i] for i in sized]
        for i in (*positions, *sized):
            leaves[i] = None
        closed = consts_of((*self.functions(), *leaves))
        count = sum(i < tree.num_leaves for i in positions)
        call = RuleCall(self, leaves, (tree, fixed_tree), positions, count, sized, closed)
        return call, tuple(sizes), (*tensors, *map(as_seen_by_current_level, closed))


def apply(function: Any, *args: Any) -> Any:
    """Call ``Function.apply``, which torch does not annotate."""
    return function.apply(*args)


def structure_error(label: str, expected: Any, got: Any) -> CustomRuleError:
    wanted, returned = (pytrees.structure_text(pytrees.structure_of(x)) for x in (expected, got))
    return CustomRuleError(f"{label}: expected the structure {wanted}, got {returned}.")


def check_like(label: str, value: Any, like: Any, *, none: str = "") -> Any:
    """Check that a tangent or cotangent has the shape and dtype of a tensor; None means zeros.

    Raises:
        CustomRuleError: the shape, the dtype or the kind of value differs.
    """
    if value is None:
        return None
    if isinstance(value, int | float | complex) and not like.shape:
        return ResultMetadata(like.shape, like.dtype, like.device).zero() + value
    if not isinstance(value, torch.Tensor | SymbolicZero):
        raise CustomRuleError(f"{label}: expected a tensor, or None for zeros, got {value!r}.")
    if value.shape != like.shape or value.dtype != like.dtype:
        raise CustomRuleError(
            f"{label}: expected {like.dtype} of shape {tuple(like.shape)}, got "
            f"{value.dtype} of shape {tuple(value.shape)}.{none}"
        )
    return None if isinstance(value, SymbolicZero) else value
