"""The registry of function rules, which define torch's Python functions on tracers.

NOTE [function rules]
A batching rule belongs to an operator (``ops/registry``). A function rule belongs to a callable of
torch, such as ``torch.narrow`` or ``Tensor.__getitem__``, and runs in the function handler, before
the call becomes operators. A callable may have one rule of each :class:`Stage`. The handler tries
them in the order of the stages. A rule that returns NotImplemented leaves the call to the next
one. After the last stage the handler calls torch, and each operator of the call finds its row or
its decomposition in the dispatch handler.

A module declares its rules in a :class:`FunctionRules` named ``function_rules``. The loader
(``bridge/__init__``) lists these modules and fills the registry, which refuses a second rule for
the same callable and stage. ``tsfunc ops NAME`` prints an operator's function rules, and
``explain`` names the one that served a call.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from tsfunc.dispatch.recorder import name_of_rule
from tsfunc.errors import DispatchError
from tsfunc.user_code import code_location_text

_F = TypeVar("_F", bound=Callable[..., Any])


class Stage(enum.IntEnum):
    """The stages of the function handler, in the order in which a call meets them.

    SELECTION
        ``rule(func, args, kwargs)`` for calls with a selection among the arguments
        (NOTE [selections] in ``batch/selections``). No later stage sees such a call.
    BATCHING
        ``rule(func, level, dims, values, kwargs)`` for calls on batched tensors of one level: a
        batching rule that takes the function's own arguments (``batch/batching_functions``).
    METHOD
        ``rule(func, types, args, kwargs)`` for calls on any tracer.
    WRITE
        ``rule(func, args, kwargs)`` prepares a write into an argument and returns nothing. torch
        is called next.
    """

    SELECTION = 1
    BATCHING = 2
    METHOD = 3
    WRITE = 4


@dataclass(frozen=True)
class FunctionRule:
    """One function rule.

    Attributes:
        function: the callable; a rule for the writes of a kind of callable has its class, and the
            rule for ``out=`` has that name.
        stage: the stage of the function handler.
        rule: the rule; the stage says how it is called.
        view: True if the result may be a view of an argument.
        options: True if a rule of the stage BATCHING takes keyword arguments.
        numbers: True if a rule of the stage METHOD serves only calls in which a tensor stands for
            a number; these go to it before a rule of the stage BATCHING.
        left_to_torch: takes the kinds of a call's arguments (NOTE [call plans] in ``call_plans``).
            At the stage METHOD, True if the rule leaves such a call to torch, provided that outer
            batch dims come first and no bound of a slice is a tensor. At the stage WRITE, True if
            there is nothing to prepare. Without it, no call is left to torch; with ``numbers``,
            calls are in which only the first argument is a tensor.
        shifts: the changes of the arguments of calls that a rule of the stage METHOD leaves to
            torch, if their batch dims are the first (``ops/shifts``).
        symbolic: True if a rule of the stage METHOD serves only calls in which a size is symbolic;
            others are left to torch.
        positions: True if tracers in the second argument of a call that is left to torch must be
            positions: integers with at least one dim.
        training: the position of an argument; there is nothing to prepare at the stage WRITE in
            calls in which it is False.
    """

    function: Any
    stage: Stage
    rule: Callable[..., Any]
    view: bool = False
    options: bool = False
    numbers: bool = False
    left_to_torch: Callable[[Sequence[Any]], bool] | None = None
    shifts: tuple[int, ...] | None = None
    symbolic: bool = False
    positions: bool = False
    training: int | None = None

    @property
    def name(self) -> str:
        """The name of the rule's Python function."""
        return name_of_rule(inspect.unwrap(self.rule))

    @property
    def source(self) -> str:
        """The ``file:line`` of the rule, or an empty string for a rule without Python code."""
        return code_location_text(self.rule)


class FunctionRules:
    """The function rules that one module declares."""

    def __init__(self) -> None:
        self.declared: dict[tuple[Stage, Any], FunctionRule] = {}

    def add(
        self,
        stage: Stage,
        rule: Callable[..., Any],
        *functions: Any,
        view: bool = False,
        options: bool = False,
        numbers: bool = False,
        left_to_torch: Callable[[Sequence[Any]], bool] | None = None,
        shifts: tuple[int, ...] | None = None,
        symbolic: bool = False,
        positions: bool = False,
        training: int | None = None,
    ) -> None:
        """Declare one rule for several callables.

        Raises:
            DispatchError: a callable has a rule of that stage already.
        """
        for function in functions:
            function_rule = FunctionRule(
                function, stage, rule, view, options, numbers, left_to_torch, shifts, symbolic,
                positions, training,
            )  # fmt: skip
            _refuse_second(self.declared, function_rule)
            self.declared[stage, function] = function_rule

    def replace(
        self,
        *functions: Any,
        serves: Callable[..., bool] | None = None,
        numbers: bool = False,
        left_to_torch: Callable[[Sequence[Any]], bool] | None = None,
        symbolic: bool = False,
    ) -> Callable[[_F], _F]:
        """Return a decorator that declares a replacement of functions, with their arguments.

        A replacement that returns NotImplemented leaves the call to torch.

        Args:
            serves: True for the arguments of a call that it serves; None: it serves all calls.
            numbers, left_to_torch, symbolic: as in :class:`FunctionRule`.
        """

        def declare(replacement: _F) -> _F:
            @functools.wraps(replacement)
            def method(func: Any, types: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
                if serves is not None and not serves(*args, *kwargs.values()):
                    return NotImplemented
                return replacement(*args, **kwargs)

            self.add(
                Stage.METHOD, method, *functions, numbers=numbers, left_to_torch=left_to_torch,
                symbolic=symbolic,
            )  # fmt: skip
            return replacement

        return declare


def _refuse_second(declared: Mapping[tuple[Stage, Any], FunctionRule], rule: FunctionRule) -> None:
    old = declared.get((rule.stage, rule.function))
    if old is not None:
        raise DispatchError(
            f"{rule.function!r} has a function rule of the stage {rule.stage.name} already, "
            f"{old.name} at {old.source}; the second one is {rule.name} at {rule.source}. Remove "
            f"one of them."
        )


class FunctionRegistry:
    """All function rules, by stage and callable.

    Attributes:
        tables: for each stage the rules by callable, which the function handler reads.
    """

    def __init__(self) -> None:
        self.tables: Mapping[Stage, dict[Any, Callable[..., Any]]] = {s: {} for s in Stage}
        self._rules: dict[tuple[Stage, Any], FunctionRule] = {}

    def load(self, modules: Iterable[FunctionRules]) -> None:
        """Add the rules of modules.

        Raises:
            DispatchError: two modules declare a rule for the same callable and stage.
        """
        for module in modules:
            for place, rule in module.declared.items():
                _refuse_second(self._rules, rule)
                self._rules[place] = rule
                self.tables[rule.stage][rule.function] = rule.rule

    def find(self, stage: Stage, function: Any) -> FunctionRule | None:
        """Return the rule of a callable for a stage, or None."""
        return self._rules.get((stage, function))

    def remove(self, stage: Stage, functions: Iterable[Any]) -> None:
        """Remove the rules of a stage for callables that have one."""
        for function in functions:
            if self._rules.pop((stage, function), None) is not None:
                del self.tables[stage][function]

    def rules_of(self, operator: str) -> list[tuple[str, FunctionRule]]:
        """Return the rules of the functions named like an operator, in the order of the stages.

        Args:
            operator: a dispatcher name; only operators of ``aten`` have function rules.

        Returns:
            The rules, each with the public name of its callable.
        """
        namespace, _, name = operator.partition("::")
        if namespace != "aten":
            return []
        base = name.partition(".")[0]
        rules: list[tuple[str, FunctionRule]] = []
        for stage in Stage:
            for owner, prefix in _OWNERS:
                for attribute in (base, *_DUNDERS.get(base, ())):
                    function = getattr(owner, attribute, None)
                    if inspect.isgetsetdescriptor(function):
                        function = function.__get__
                    rule = self.find(stage, function)
                    if rule is not None:
                        rules.append((f"{prefix}.{attribute}", rule))
        return rules


_OWNERS: Final = (
    (torch, "torch"),
    (torch.Tensor, "Tensor"),
    (torch.nn.functional, "torch.nn.functional"),
    (torch.linalg, "torch.linalg"),
    (torch.special, "torch.special"),
)

# The methods of Python's operators that call an operator of torch with another name.
PYTHON_OPERATORS: Final = {
    "add": ("__add__", "__radd__"),
    "sub": ("__sub__", "__rsub__"),
    "mul": ("__mul__", "__rmul__"),
    "div": ("__truediv__", "__rtruediv__"),
    "pow": ("__pow__", "__rpow__"),
    "remainder": ("__mod__",),
    "neg": ("__neg__",),
    "abs": ("__abs__",),
    "eq": ("__eq__",),
    "ne": ("__ne__",),
    "lt": ("__lt__",),
    "le": ("__le__",),
    "gt": ("__gt__",),
    "ge": ("__ge__",),
    "bitwise_and": ("__and__",),
    "bitwise_or": ("__or__",),
    "bitwise_xor": ("__xor__",),
    "bitwise_not": ("__invert__",),
    "add_": ("__iadd__",),
    "sub_": ("__isub__",),
    "mul_": ("__imul__",),
    "div_": ("__itruediv__",),
    "floor_divide_": ("__ifloordiv__",),
    "remainder_": ("__imod__",),
}
_DUNDERS: Final = PYTHON_OPERATORS | {
    "matmul": ("__matmul__",),
    "select": ("__getitem__",),
    "slice": ("__getitem__",),
    "index": ("__getitem__",),
    "index_put_": ("__setitem__",),
}

registry: Final = FunctionRegistry()
BATCHING: Final = registry.tables[Stage.BATCHING]
METHODS: Final = registry.tables[Stage.METHOD]
WRITERS: Final = registry.tables[Stage.WRITE]
SELECTIONS: Final = registry.tables[Stage.SELECTION]
