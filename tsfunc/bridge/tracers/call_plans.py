"""Call plans: the path of a call on batched tensors to its rule, decided once and kept as data.

NOTE [call plans]
A call on the tracers of one vmap needs a rule, arguments in the rule's form, and wrapped results.
None of this depends on the data, so it is decided at the first such call and kept as a
:class:`CallPlan`. Later calls with the same key run the plan (``batch_handlers``), and a call
without a plan goes to the dispatch table. Plans are the only fast path; the compiled handlers run
them too.

The key of a plan is the callable and, for each argument: the batch dim of a tracer of the level,
else the class; for a list, the kinds of its elements; and the names of keywords. The level itself
and the value of a number are not in the key. :func:`batch_tracer.unwrap_args` makes the kinds as it
unwraps the arguments. Facts that are checked when the plan runs, and are not in the key, are the
ranks of operands and the conditions of ``plan_conditions``. For values that are tracers, reading
them costs more than the rest of the key.

A function or an operator has one table of plans for calls that the level takes (``plans``) and one
for calls that autograd records at the level first (``recorded``). The thread's state chooses the
table, or none: included or excluded keys, autocast, inference mode, and transforms and modes of
torch leave a call to the dispatch table.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Final

import torch

from tsfunc.bridge import compiled
from tsfunc.bridge.tracers.batch_tracer import TRACERS, bdims_of
from tsfunc.bridge.tracers.decompositions import OF_ONE_OPERATOR
from tsfunc.bridge.tracers.function_registry import METHODS, WRITERS, FunctionRule, Stage, registry
from tsfunc.bridge.tracers.operators import (
    PLAIN_TENSORS,
    TorchOperator,
    operator_of,
    python_function,
)
from tsfunc.bridge.tracers.parsing import Form, find_form, has_forms
from tsfunc.bridge.tracers.torch_state import in_dispatch_modes
from tsfunc.bridge.tracers.tracer import C_TYPES
from tsfunc.ops.registry import Args, Kwargs, Rule
from tsfunc.ops.shifts import shifts_of
from tsfunc.ops.tensor_iterator import pointwise, pointwise_inplace

# Classes of arguments that a plan passes on as they are. A call with any other class has no plan.
PLAIN: Final = frozenset({
    int, float, bool, complex, str, type(None), slice, type(Ellipsis), torch.Tensor,
    torch.nn.Parameter, torch.dtype, torch.memory_format, torch.device, torch.layout,
    list, tuple, torch.Size,
})  # fmt: skip
_NUMBERS: Final = frozenset({int, float})
_MOST_PLANS: Final = 512


class PlanStep(enum.Enum):
    """The step of a plan that makes its results."""

    TABLE = "table"  # the call has no plan
    # Call the function on the values. It may return the first one: the result is then the tracer.
    DIRECT = "direct"
    # The same for two batched operands of one rank, and for one whose other operand is not batched
    # and broadcasts to it. The batching rule takes other operands.
    SAME_RANK = "same_rank"
    BROADCAST = "broadcast"
    RULE = "rule"  # call a batching rule
    UNBATCHED = "unbatched"  # call the function on the values, none of which is batched
    RECORDED = "recorded"  # call torch, which records the call at the level
    BELOW_AUTOGRAD = "below_autograd"  # call torch; its operators have plans of their own
    COMPOSITE = "composite"  # call a function that only calls others, which have plans of their own


class CallPlan:
    """The path of a call to its rule, as data.

    Attributes:
        step: how the results are made.
        function: the callable that is called on values.
        rule: the batching rule; also of a ``SAME_RANK`` or ``BROADCAST`` plan, for other operands.
        target: the callable that the rule gets.
        operator: the operator, or None for a rule of a Python function.
        bdims: the batch dims of the arguments, as the rule takes them; None if an argument is a
            list of tensors, whose length is not in the key.
        dim: the batch dim of the result of a plan that calls the function on the values.
        first: for a ``BROADCAST`` plan, True if the batched operand is the first.
        shifts: how the rule changes the arguments if the batch dims are the first (``ops/shifts``),
            for compiled handlers; None if the rule has to run.
        torch_form: the form in which torch calls the function's operator, for compiled handlers,
            which call the operator itself; None if the types of the arguments do not determine it.
        recipes: the rule's recipes, which compiled handlers make (NOTE [recipes]), or None. The
            plan of a Python function keeps those recipes of its operator that its calls have used.
        plain_positions: where the arguments have plain tensors, alone or in lists. If autograd
            records one of these, the plan does not hold: the table lifts it (``needs_lift``).
        needs_outer_dims_first: True if torch may be called only on values whose outer batch dims
            come first (``plan_conditions.has_outer_dims_first``).
        needs_fixed_sizes: True if torch may be called only if no size is symbolic.
        needs_positions: True if torch may be called only if the tensors in the second argument are
            positions (``plan_conditions.are_positions``).
        may_go_to_torch: True if the compiled handlers may call torch in place of the rule. The
            operators that torch then calls have their own plans.
        training: the position of the argument that must be False, because the function has no plan
            in training, in which it draws numbers or updates statistics; or None.
        form: the conversion of the arguments to an operator's schema, or None.
        writes: True if the call writes to its first argument, a batched tracer, and returns it.
    """

    __slots__ = (
        "bdims", "dim", "first", "form", "function", "may_go_to_torch", "needs_fixed_sizes",
        "needs_outer_dims_first", "needs_positions", "operator", "plain_positions", "recipes",
        "rule", "shifts", "step", "target", "torch_form", "training", "writes",
    )  # fmt: skip

    def __init__(
        self,
        step: PlanStep,
        function: Any = None,
        rule: Rule | None = None,
        operator: TorchOperator | None = None,
    ) -> None:
        self.step = step
        self.function = function
        self.rule = rule
        self.operator = operator
        self.target = function if operator is None else operator.overload
        self.dim: int | None = None
        self.bdims: list[Any] | None = None
        self.plain_positions: tuple[int, ...] = ()
        self.form: Form | None = None
        self.first = True
        self.shifts: tuple[int, ...] | None = None
        self.torch_form: Form | None = None
        self.recipes: Any = None
        self.needs_fixed_sizes = False
        self.needs_outer_dims_first = False
        self.needs_positions = False
        self.may_go_to_torch = False
        self.training: int | None = None
        self.writes = operator is not None and operator.inplace

    def __repr__(self) -> str:
        return f"CallPlan({self.step.value}, {self.function!r})"


TABLE: Final = CallPlan(PlanStep.TABLE)
COMPOSITE: Final = CallPlan(PlanStep.COMPOSITE)


class CallPlanTable:
    """The plans of one callable.

    Attributes:
        operator: the operator, for an overload.
        rule: the function rule of the stage BATCHING of a Python function, or None.
        may_parse: True if calls of a Python function may be converted to an operator's schema.
        composite: True for a function that is written in Python and has no function rule.
        training: the position of the argument without which a random function draws nothing.
        plans: the plans of calls that the level takes, by key.
        recorded: the plans of calls that autograd records at the level, by key.
    """

    __slots__ = ("composite", "may_parse", "operator", "plans", "recorded", "rule", "training")

    def __init__(
        self,
        operator: TorchOperator | None = None,
        rule: FunctionRule | None = None,
        may_parse: bool = False,
        composite: bool = False,
    ) -> None:
        self.operator, self.rule = operator, rule
        self.may_parse, self.composite = may_parse, composite
        self.training: int | None = None
        self.plans: dict[Any, CallPlan] = {}
        self.recorded: dict[Any, CallPlan] = {}

    def make(
        self, function: Any, args: Args, kwargs: Kwargs, kinds: Sequence[Any], key: Any
    ) -> CallPlan:
        """Decide the plan of a call that the level takes, and keep it."""
        if self.composite:
            plan = COMPOSITE if all(map(is_plain, kinds)) else TABLE
        elif self.operator is not None:
            plan = _operator_plan(self.operator, args, kwargs, kinds)
        elif self.training is not None:
            plan = TABLE
            if self.training < len(args) and all(map(is_plain, kinds)):
                plan = CallPlan(PlanStep.COMPOSITE)
                plan.training, plan.torch_form = self.training, _torch_form(function, args, kwargs)
        elif self._depends_on_modes(kwargs, kinds[len(args) :]):
            return TABLE
        else:
            plan = _function_plan(self, function, args, kwargs, kinds)
        return _keep(self.plans, key, plan)

    def make_recorded(
        self, function: Any, args: Args, kwargs: Kwargs, kinds: Sequence[Any], key: Any
    ) -> CallPlan:
        """Decide the plan of a call that autograd records at the level, and keep it."""
        if self.composite:
            return _keep(self.recorded, key, self.make(function, (), kwargs, kinds, key))
        if self.operator is not None and self.operator.inplace and type(kinds[0]) is not int:
            plan = TABLE  # the tensor that is written becomes a tracer first
        else:
            plan = _plan_of_torch(PlanStep.RECORDED, function, args, kwargs, kinds)
        return _keep(self.recorded, key, plan)

    def takes(self, kwargs: Mapping[str, Any], kinds: Sequence[Any]) -> bool:
        """True if the function rule takes keyword arguments of these kinds."""
        rule = self.rule
        return rule is not None and (not kwargs or (rule.options and _no_tensors(kinds)))

    def _depends_on_modes(self, kwargs: Mapping[str, Any], kinds: Sequence[Any]) -> bool:
        """True if the plan needs the call's schema, and a mode would see the probes for it."""
        return not self.takes(kwargs, kinds) and in_dispatch_modes()


def plans_of_operator(op: TorchOperator) -> CallPlanTable:
    plans: CallPlanTable | None = op.plans
    if plans is None:
        plans = op.plans = CallPlanTable(op)
    return plans


# The plans by function; None for a function whose calls have none.
FUNCTION_PLANS: dict[Any, CallPlanTable | None] = {}


def plans_of_function(function: Any) -> CallPlanTable | None:
    """Return the plans of a function at its first call, and keep them."""
    rule = registry.find(Stage.BATCHING, function)
    is_method = METHODS.get(function) is not None and not _serves_numbers(function)
    may_parse = has_forms(function) and function not in WRITERS and not is_method
    composite = (
        type(function) is FunctionType
        and rule is None
        and not any(registry.find(stage, function) for stage in (Stage.METHOD, Stage.WRITE))
    )
    method = registry.find(Stage.METHOD, function)
    below = method is not None and (method.left_to_torch is not None or method.symbolic)
    below = below or (isinstance(function, C_TYPES) and function in WRITERS)
    planned = rule is not None or may_parse or composite or below
    table = CallPlanTable(None, rule, may_parse, composite) if planned else None
    if table is not None and may_parse and rule is None:
        table.training = _training_argument(function)
    FUNCTION_PLANS[function] = table
    return table


def _training_argument(function: Any) -> int | None:
    """Return the position of the argument without which a function of one operator never draws."""
    packet = getattr(torch.ops.aten, function.__name__)
    if packet.overloads() != ["default"]:
        return None
    random = torch.Tag.nondeterministic_seeded in packet.default.tags
    return operator_of(packet.default).training_argument if random else None


def _training_of_rule(stage: Stage, function: Any) -> int | None:
    """Return the position of the argument without which a function rule is not needed, or None."""
    rule = registry.find(stage, function)
    return None if rule is None else rule.training


def _serves_numbers(function: Any) -> bool:
    """True if the function's method serves only calls in which a tensor stands for a number."""
    rule = registry.find(Stage.METHOD, function)
    return rule is not None and rule.numbers


def _keep(plans: dict[Any, CallPlan], key: Any, plan: CallPlan) -> CallPlan:
    """Keep a plan in a table of bounded size."""
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


def is_plain(kind: Any) -> bool:
    """True if a plan can take an argument of a kind (``unwrap_args``)."""
    if type(kind) is tuple:
        items = kind[1] if type(kind[1]) is frozenset else kind[1:]
        return all(map(is_plain, items))
    return kind is None or type(kind) is int or kind in PLAIN or kind in TRACERS


def _function_plan(
    table: CallPlanTable, function: Any, args: Args, kwargs: Kwargs, kinds: Sequence[Any]
) -> CallPlan:
    if not all(map(is_plain, kinds)) or not _has_batched(kinds):
        return TABLE
    if function in OF_ONE_OPERATOR and type(kinds[0]) is int and compiled.load() is not None:
        return COMPOSITE
    if _serves_numbers(function) and not _is_left_to_torch(Stage.METHOD, function, kinds):
        return TABLE  # a tensor stands for a number
    writes = function in WRITERS
    rule = table.rule
    if writes and (
        type(kinds[0]) is not int or not _is_left_to_torch(Stage.WRITE, function, kinds)
    ):
        rule = None  # the written tensor becomes a batched tracer first (``writes``)
    if rule is not None and table.takes(kwargs, kinds[len(args) :]):
        direct = None
        if rule.rule in (pointwise, pointwise_inplace):
            direct = _direct_plan(function, rule.rule, kinds, len(args))
        if direct is not None:
            direct.may_go_to_torch, direct.writes = isinstance(function, C_TYPES), writes
            direct.torch_form = _torch_form(function, args, kwargs)
            return direct
        plan = CallPlan(PlanStep.RULE, function, rule.rule)
        plan.bdims = _bdims_of_kinds(kinds[: len(args)])
        plan.may_go_to_torch = isinstance(function, C_TYPES) and (
            function not in METHODS or _is_left_to_torch(Stage.METHOD, function, kinds)
        )
        plan.writes = writes
        _note_conditions(plan, function, kinds)
        if plan.may_go_to_torch:
            plan.torch_form = _torch_form(function, args, kwargs)
            if function in METHODS:
                plan.plain_positions = _plain_positions(kinds[: len(args)])
            _shift_function(plan, function, kwargs, kinds)
        return plan
    if writes or (function in METHODS and not table.may_parse):
        plan = _below_plan(function, args, kwargs, kinds)
        writes = writes and _training_of_rule(Stage.WRITE, function) is None
        plan.writes = plan.may_go_to_torch and writes and type(kinds[0]) is int
        if plan.writes:
            _shift_function(plan, function, kwargs, kinds)
        return plan
    if not table.may_parse:
        return TABLE
    form = find_form(function, args, kwargs)
    if form is None:  # torch calls no operator of that name, or none at all
        return _below_plan(function, args, kwargs, kinds)
    op = form.op
    if op.direct_rule is None:
        return TABLE
    plan = CallPlan(PlanStep.RULE, op.overload, op.direct_rule, op)
    plan.may_go_to_torch, plan.torch_form = True, form
    plan.target = _target(op)
    _shift_function(plan, function, kwargs, kinds)
    bdims = _bdims_of_kinds(kinds)
    plan.form, plan.bdims = form, None if bdims is None else form.bdims_in_order(bdims, len(args))
    return plan


def _target(op: TorchOperator) -> Any:
    """Return the callable that a rule gets: one that parses arguments fast, if that suits the rule.

    A rule that declares how it shifts arguments only calls the operator with its own arguments.
    """
    if shifts_of(op.direct_rule) is None or len(op.overload._schema.returns) != 1:
        return op.overload
    function, reduction = python_function(op)
    return op.overload if function is None or reduction is not None else function


def _torch_form(function: Any, args: Args, kwargs: Kwargs) -> Form | None:
    """Return the form of a call for compiled handlers; None if there are none.

    The operator must have the function's meaning for tracers: ``aten::detach`` is also autograd's
    alias of a saved tensor, and makes an alias of a tracer.
    """
    if compiled.load() is None:
        return None
    if function is torch.Tensor.__getitem__:
        return _form_of_positions(args[1])
    if not has_forms(function) or in_dispatch_modes():
        return None  # a mode would see the probes
    form = find_form(function, args, kwargs)
    return None if form is None or form.op.by_tracers is not None else form


def _form_of_positions(index: Any) -> Form | None:
    """Return the form of ``x[i]`` or ``x[i, j]``, which call one operator if all are positions."""
    several = type(index) is tuple
    if not all(isinstance(item, torch.Tensor) for item in (index if several else (index,))):
        return None
    form = Form(operator_of(torch.ops.aten.index.Tensor), None)
    form.places, form.packed = (0, 1), None if several else 1
    return form


def _shift_function(
    plan: CallPlan, function: Any, kwargs: Mapping[str, Any], kinds: Sequence[Any]
) -> None:
    """Note in a plan how a call's arguments change if the batch dims are the first."""
    method, form = registry.find(Stage.METHOD, function), plan.torch_form
    if method is not None and method.shifts is not None:
        moved = kwargs or type(kinds[0]) is not int or _are_moved(kinds)
        plan.shifts = None if moved or plan.needs_positions else method.shifts
    elif form is not None and form.op.direct_rule is not None and "memory_format" not in kwargs:
        plan.shifts = _shifts(form.op.direct_rule, kinds)


def _bdims_of_kinds(kinds: Sequence[Any]) -> list[Any] | None:
    """Return the batch dims that kinds alone determine, or None for lists of tensors."""
    if any(type(kind) is tuple and type(kind[1]) is not frozenset for kind in kinds):
        return None
    return [kind if type(kind) is int else None for kind in kinds]


def bdims_at_call(
    plan: CallPlan, kinds: Sequence[Any], values: Sequence[Any], count: int
) -> Sequence[Any]:
    """Return the batch dims of a call with lists of tensors, as the rule takes them.

    Args:
        kinds: the kinds of the arguments, followed by those of the keyword arguments.
        values: the unwrapped arguments, followed by the unwrapped keyword arguments.
    """
    bdims = bdims_of(kinds, values)
    return bdims[:count] if plan.form is None else plan.form.bdims_in_order(bdims, count)


def _below_plan(function: Any, args: Args, kwargs: Kwargs, kinds: Sequence[Any]) -> CallPlan:
    """Return the plan of a function's call that torch makes operators of, below autograd."""
    plan = _plan_of_torch(PlanStep.BELOW_AUTOGRAD, function, args, kwargs, kinds)
    plan.may_go_to_torch = plan is not TABLE
    return plan


def _plan_of_torch(
    step: PlanStep, function: Any, args: Args, kwargs: Kwargs, kinds: Sequence[Any]
) -> CallPlan:
    """Return the plan of a call that torch gets on the tracers.

    Operands of outer levels are left to the function handler, which lifts them
    (NOTE [operands of outer levels]).
    """
    count = len(kinds) - len(kwargs)
    training: int | None = None
    for stage, rules in ((Stage.METHOD, METHODS), (Stage.WRITE, WRITERS)):
        if function in rules and not _is_left_to_torch(stage, function, kinds):
            training = _training_of_rule(stage, function)
            if training is None or training >= count:
                return TABLE
    if not _no_tensors(kinds[count:]):
        return TABLE
    for kind in kinds[:count]:
        if not is_plain(kind) or not TRACERS.isdisjoint(_leaf_kinds([kind])):
            return TABLE
    plan = CallPlan(step)
    plan.training = training
    plan.torch_form = _torch_form(function, args, kwargs)
    _note_conditions(plan, function, kinds)
    plan.plain_positions = _plain_positions(kinds[:count])
    return plan


def _plain_positions(kinds: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions of the arguments that are or contain plain tensors."""
    return tuple([i for i, k in enumerate(kinds) if not PLAIN_TENSORS.isdisjoint(_leaf_kinds([k]))])


def _note_conditions(plan: CallPlan, function: Any, kinds: Sequence[Any]) -> None:
    """Note in a plan which calls the function's rule of the stage METHOD leaves to torch."""
    method = registry.find(Stage.METHOD, function)
    if method is not None:
        plan.needs_outer_dims_first, plan.needs_fixed_sizes = True, method.symbolic
        plan.needs_positions = method.positions and any(
            kind is None or type(kind) is int for kind in _leaf_kinds(kinds[1:2])
        )


def _is_left_to_torch(stage: Stage, function: Any, kinds: Sequence[Any]) -> bool:
    """True if the function's rule leaves calls with arguments of these kinds to torch."""
    rule = registry.find(stage, function)
    if rule is None:
        return False
    if rule.left_to_torch is None:
        return rule.symbolic or (rule.numbers and _no_tensors(kinds[1:]))
    return rule.left_to_torch(kinds)


def _leaf_kinds(kinds: Iterable[Any]) -> Iterator[Any]:
    """Yield the kinds of arguments, and those of the elements for lists of tensors."""
    for kind in kinds:
        if type(kind) is not tuple:
            yield kind
        elif type(kind[1]) is not frozenset:
            yield from _leaf_kinds(kind[1:])


def _no_tensors(kinds: Sequence[Any]) -> bool:
    """True if no argument of a list of kinds has tensors."""
    return all(
        not _is_tensor(kind)
        and type(kind) is not int
        and (type(kind) is not tuple or type(kind[1]) is frozenset)
        for kind in kinds
    )


def _direct_plan(
    function: Any,
    rule: Rule,
    kinds: Sequence[Any],
    count: int,
    operator: TorchOperator | None = None,
) -> CallPlan | None:
    """Return the plan of a pointwise call whose operands need no alignment, or None.

    These are one tracer, two tracers of one batch dim, or a tracer and an unbatched tensor, and
    arguments that are not tensors.

    Args:
        rule: the pointwise rule that takes other operands.
        operator: the operator of an overload's call. ``function`` is torch's Python function of
            that name, which takes some calls with numbers for deprecated orders of arguments.
    """
    tracers = [place for place, kind in enumerate(kinds) if type(kind) is int]
    others = [kind for kind in kinds if type(kind) is not int]
    if not tracers or len({kinds[place] for place in tracers}) > 1:
        return None
    if len(kinds) > 1 and tracers in ([0], [1]) and _is_tensor(kinds[1 - tracers[0]]):
        if not _no_tensors(kinds[2:]) or (operator is not None and len(kinds) > 2):
            return None
        step = PlanStep.BROADCAST
    else:
        if not _no_tensors(others):
            return None
        if len(tracers) > 2 or (len(kinds) > 2 and tracers != list(range(len(tracers)))):
            return None
        if operator is not None and (
            len(kinds) > 2 or tracers[0] or not _NUMBERS.issuperset(others)
        ):
            return None
        step = PlanStep.DIRECT if len(tracers) == 1 else PlanStep.SAME_RANK
    plan = CallPlan(step, function, rule, operator)
    plan.dim, plan.first = kinds[tracers[0]], not tracers[0]
    plan.bdims = _bdims_of_kinds(kinds[:count])
    return plan


def _operator_plan(op: TorchOperator, args: Args, kwargs: Kwargs, kinds: Sequence[Any]) -> CallPlan:
    if op.direct_rule is None or op.reshapes or not all(map(is_plain, kinds)):
        return TABLE
    if kwargs and not _no_tensors(kinds[len(args) :]):
        return TABLE
    if not _has_batched(kinds):
        if op.always_ruled:
            return TABLE
        plan = CallPlan(PlanStep.UNBATCHED, op.overload, None, op)
        plan.bdims = []
        return plan
    if op.inplace and (not args or type(kinds[0]) is not int):
        return TABLE  # the written tensor becomes a batched tracer first
    if op.function is not None and not kwargs:
        direct = _direct_plan(op.function, op.direct_rule, kinds, len(args), op)
        if direct is not None:
            return direct
    plan = CallPlan(PlanStep.RULE, op.overload, op.direct_rule, op)
    plan.shifts = None if "memory_format" in kwargs else _shifts(op.direct_rule, kinds)
    plan.bdims = _bdims_of_kinds(kinds[: len(args)])
    return plan


def _shifts(rule: Rule, kinds: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the changes that a rule declares, if the batch dims of all tracers are the first."""
    shifts = shifts_of(rule)
    return None if shifts is None or _are_moved(kinds) else shifts


def _are_moved(kinds: Sequence[Any]) -> bool:
    """True if an argument has a batch dim other than the first."""
    return any(type(kind) is int and kind != 0 for kind in _leaf_kinds(kinds))


def _is_tensor(kind: Any) -> bool:
    """True for the kind of a tensor that is not batched, or not at the level."""
    return kind is None or kind in PLAIN_TENSORS or kind in TRACERS


def _has_batched(kinds: Sequence[Any]) -> bool:
    return any(type(kind) is int for kind in _leaf_kinds(kinds))


def arguments_of(
    plan: CallPlan, values: Sequence[Any], count: int, kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """Return the values and keyword arguments that a plan's callable takes.

    Args:
        values: the unwrapped arguments, followed by the unwrapped keyword arguments.

    Returns:
        The arguments, or None if they have another form than those that the plan was made for.
    """
    form = plan.form
    if form is None or form.as_it_is:
        return values[:count], kwargs
    packed = form.packed
    if packed is not None:
        values = [*values[:packed], tuple(values[packed:count]), *values[count:]]
    return form.arguments_in(values)
