"""torch's operators as rows of the dispatch table.

``OpOverload`` is torch's Python object for one overload of an operator. The object itself is
public (``torch.ops.aten.sin.default``), but its class, its ``_schema`` and its composite kernels
have only private names (torch 2.13 and 2.14). ``_jit_resolve_packet`` finds the overload whose
schema accepts given arguments, as a call of the packet does. ``_maybe_get_opdef`` finds the
definition of a ``torch.library.custom_op``, which has the rule of ``register_vmap`` as
``_vmap_fn``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import torch
from torch._C import (
    DisableTorchFunctionSubclass,
    _DisableTorchDispatch,
    _dispatch_has_kernel,
    _dispatch_has_kernel_for_dispatch_key,
    _jit_resolve_packet,
)
from torch._ops import OpOverload, OpOverloadPacket

from tsfunc import hooks
from tsfunc.bridge.tracers.schemas import (
    aliases_of_results,
    overload_of,
    overloads_of,
    signature_of_overload,
)
from tsfunc.bridge.tracers.torch_state import without_autograd
from tsfunc.dispatch import DispatchKey, DispatchKeySet, Operator, register
from tsfunc.dispatch.keys import backend_of, keys_of_arguments
from tsfunc.dispatch.state import tls
from tsfunc.dispatch.table import find_operator
from tsfunc.errors import DispatchError
from tsfunc.ops import Row, find
from tsfunc.ops.catalogue.signature import OperatorSignature
from tsfunc.ops.dims import NoExamples
from tsfunc.ops.registry import Args, Kwargs, Rule
from tsfunc.ops.tensor_iterator import pointwise, pointwise_inplace

PLAIN_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""torch's own classes of tensors; instances of other classes have handlers or other storage."""

C_FUNCTIONS: Final = (type(torch.sin), type(torch.Tensor.add))
"""The types of functions and methods written in C, without slots such as ``__add__``."""

# The fourth and fifth arguments of these operators are running statistics, which they write to in
# training; most of their schemas do not declare this.
STATISTICS = frozenset({
    "aten::batch_norm", "aten::native_batch_norm", "aten::_native_batch_norm_legit",
    "aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::instance_norm",
    "aten::_batch_norm_with_update",
})  # fmt: skip


CALL_ERRORS: Final = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NoExamples, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip
"""The classes of the errors that operators and rules raise for a call that they can't serve.

Such a call may be tried in another way. An exception of another class comes from a hook or a mode
of the user or of torch, which the call has reached: a checkpoint ends its second run so.
"""

# C++ needs the lazy conjugation of a value, which its tracer does not have.
_ALWAYS_RULED = frozenset({"aten::view_as_real"})


def _updates_statistics(name: str, args: Sequence[Any]) -> bool:
    """True if a call of such an operator is in training and has a momentum."""
    decisive = [True, *args[5:6]] if name == "aten::_batch_norm_with_update" else args[5:7]
    return len(decisive) == 2 and bool(decisive[0]) and decisive[1] != 0


def watch_direct_rules(listener: Callable[[str, TorchOperator], None]) -> None:
    """Call ``listener(op.name, op)`` for each operator with a direct rule, known ones first."""
    for op in operators_by_id.values():
        if op.rule_is_direct:
            listener(op.name, op)
    hooks.direct_rule_known.add(listener)


class TorchOperator(Operator):
    """The row of an ``OpOverload``, with properties that rules and handlers read at every call."""

    __slots__ = (
        "always_ruled",
        "asserts",
        "by_tracers",
        "composite",
        "direct_rule",
        "function",
        "inplace",
        "is_view",
        "keywords",
        "out_names",
        "overload",
        "packet",
        "plans",
        "probability_argument",
        "random",
        "reshapes",
        "returned",
        "row",
        "signature",
        "special",
        "training_argument",
        "view_operator",
        "writes",
        "written",
    )  # fmt: skip

    overload: OpOverload
    row: Row | None
    direct_rule: Rule | None
    signature: OperatorSignature

    def __init__(self, overload: OpOverload) -> None:
        # True if it has a composite kernel, which calls other operators and does no checks itself.
        # A name that the dispatcher does not have raises here, before the table has a row for it.
        name = overload.name()
        self.composite = name not in _OUTSIDE_OF_THE_DISPATCHER and (
            _dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        )
        super().__init__(name, overload)
        self.outward = overload  # torch itself brings the call to the outer levels
        self.overload = overload
        self.signature = signature_of_overload(overload)
        self.packet: str = overload.overloadpacket.__name__  # without namespace and overload
        self.row = find(self.name)
        self.random = torch.Tag.nondeterministic_seeded in overload.tags
        # The arguments that decide if a random operator draws numbers: ``may_draw``.
        self.training_argument: int | None = None
        self.probability_argument: int | None = None
        if self.random:
            self.training_argument = self.signature.position("train", "training")
            self.probability_argument = self.signature.position("dropout_p", "dropout")
        # True if its rule also gets calls without batched arguments, as far as `needs_rule` says.
        self.always_ruled = self.random or self.name in _ALWAYS_RULED
        # True if it changes the shape of the tensor itself (squeeze_, transpose_).
        self.reshapes = torch.Tag.inplace_view in overload.tags
        arguments = self.signature.arguments
        # Its keyword-only arguments; the function handler sees other arguments as keywords too.
        self.keywords = frozenset(a.name for a in arguments if a.keyword)
        self.out_names = tuple(a.name for a in arguments if a.out)
        self.writes = bool(self.signature.mutates)
        # The positions of its written positional arguments.
        self.written = tuple(i for i, a in enumerate(arguments) if a.writes and not a.keyword)
        if self.name in STATISTICS:
            self.written = (3, 4)
        # True if it returns nothing, and is called for the error that it may raise.
        self.asserts = not self.signature.returns and not self.writes
        # The written argument that each result is; None for a new result.
        self.returned, self.is_view = aliases_of_results(overload)
        # True if it returns its first argument.
        self.inplace = not self.out_names and self.returned == (0,)

        self.special = self.writes or self.random or self.name == "aten::detach"
        # The rule that the dispatch handler runs directly: None for special calls, and once a
        # kernel is registered.
        self.direct_rule = self._direct_rule()
        # Handles calls on batched tensors directly (NOTE [queries of autograd]), or None.
        self.by_tracers: Callable[[Sequence[Any]], Any] | None = None
        # Its call plans (``call_plans``), made at its first call on a batched tensor.
        self.plans: Any = None
        # Runs the operator on values alone, faster than the overload (``call_plans``).
        self.function = self._function()
        # The operator of the view that the tensor becomes, if it reshapes.
        self.view_operator: TorchOperator | None = None
        if self.reshapes and self.direct_rule is not None:
            functional = functional_overload(self)
            assert functional is not None
            self.view_operator = operator_of(functional[0])
        if self.rule_is_direct:
            for listener in hooks.direct_rule_known.functions:
                listener(self.name, self)
        if not any("Tensor" in argument.type for argument in arguments):
            register(self, DispatchKey.BackendSelect, functools.partial(_select_backend, self))

    @property
    def rule_is_direct(self) -> bool:
        """True if the dispatch handler runs the operator's rule without the table."""
        ruled = self.direct_rule is not None or self.by_tracers is not None
        return ruled and self.overload.namespace == "aten"

    @property
    def has_kernel(self) -> bool:
        """True if a registered kernel exists that vmap must call."""
        return self._catch_all is not None or DispatchKey.Batch in self._cells

    def _direct_rule(self) -> Rule | None:
        """Return the rule of a call that is not special, or that writes its first argument only."""
        if self.row is None:
            parts = self.composite and not self.special
            return hooks.rule_of_parts.provided(self) if parts else None
        inplace = self.inplace and self.written == (0,) and not self.random
        return self.row.rule if inplace or not self.special else None

    def _function(self) -> Any:
        """Return the fast function of a pointwise operator, or None for other operators."""
        if self.direct_rule is not pointwise and self.direct_rule is not pointwise_inplace:
            return None
        if self.inplace and self.overload.namespace == "aten":
            return getattr(torch.Tensor, self.packet, self.overload._op)
        return python_function(self)[0] or self.overload._op

    def written_by_call(self, args: Args) -> tuple[int, ...]:
        """Return the positions of the arguments that a call with these arguments writes to."""
        if self.name not in STATISTICS:
            return self.written
        if not _updates_statistics(self.name, args):
            return ()
        return tuple(i for i in self.written if args[i] is not None)

    def written_argument(self, args: Args, kwargs: Kwargs) -> Any:
        """Return the first argument of an in-place call, in its new shape if it has one."""
        if self.reshapes:  # autograd has seen the call already
            with DisableTorchFunctionSubclass(), _DisableTorchDispatch(), without_autograd():
                self.overload(*args, **kwargs)
        return args[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator as user code does, through autograd if a level records on its values.

        Inside that level's own kernel the call has passed autograd already.
        """
        level = keys_of_arguments(args, kwargs)[1]
        records = level is not None and getattr(level, "autograd", False)
        if records and level.key_bit & tls.state.mask:
            return self.overload(*args, **kwargs)
        return self.call(args, kwargs, restore=True)


# C++ reads the sizes of tensors of subclasses by operators of torch.jit: NOTE [sizes for C++].
_OUTSIDE_OF_THE_DISPATCHER = frozenset({"aten::size", "aten::stride"})


operators_by_id: dict[int, TorchOperator] = {}  # by the ids of their overloads
_lock = threading.RLock()


def operator_of(overload: OpOverload) -> TorchOperator:
    """Return the row of an overload, made at the first call."""
    # By id: the hash of an overload is computed in Python, and rows keep their overloads alive.
    op = operators_by_id.get(id(overload))
    if op is None:
        # Two threads may get here at once: one of them makes the row, and the other gets that row.
        with _lock:
            operator = find_operator(overload.name())
            op = operator if isinstance(operator, TorchOperator) else TorchOperator(overload)
            operators_by_id[id(overload)] = op
    return op


@hooks.row_declared.add
def _update_row(row: Row) -> None:
    """Update the row of an operator that was called before its declaration."""
    op = find_operator(row.name)
    if isinstance(op, TorchOperator):
        op.row = row
        op.direct_rule = op._direct_rule()
        op.plans = None
        op.function = op._function()


_FACTORY_ATTRIBUTES = ("dtype", "device")
_FACTORY_OPTIONS = frozenset({*_FACTORY_ATTRIBUTES, "layout", "pin_memory"})


def runs_in_cpp(function: Any) -> bool:
    """True for an overload of an operator of torch's own, whose kernels are C++."""
    return isinstance(function, OpOverload) and function._schema.name.startswith("aten::")


@functools.cache
def functional_overload(op: TorchOperator) -> tuple[Any, Sequence[str]] | None:
    """Return the overload that returns what one writes to ``out=`` or in place, or None.

    The overload takes the same arguments. The second item has the attributes of ``out=`` that the
    overload takes as factory arguments instead.
    """
    expected = [(a.name, a.type, a.writes) for a in op.signature.inputs]
    namespace, _, name = op.name.partition(".")[0].partition("::")
    if expected and not op.out_names:
        expected[0] = (*expected[0][:2], False)
        name = name.removesuffix("_")
    names = {name for name, *_ in expected}
    for form in overloads_of(f"{namespace}::{name}"):
        options = {a.name for a in form.arguments} & _FACTORY_OPTIONS - names
        rest = [(a.name, a.type, a.writes) for a in form.arguments if a.name not in options]
        if rest == expected and form.form != "out":
            return form.call, [name for name in _FACTORY_ATTRIBUTES if name in options]
    return None


def _resolve(op: Any) -> Sequence[Operator] | None:
    """Return the operators of other arguments that ``dispatch.register`` accepts."""
    if isinstance(op, OpOverload):
        return (operator_of(op),)
    if isinstance(op, str):
        chosen = overload_of(op)
        return (operator_of(chosen),) if chosen is not None else None
    if isinstance(op, OpOverloadPacket):
        return _overloads(op)
    name = getattr(op, "__name__", None)
    packet = getattr(torch.ops.aten, name, None) if callable(op) and name else None
    return _overloads(packet) if isinstance(packet, OpOverloadPacket) else None


def _overloads(packet: OpOverloadPacket) -> Sequence[Operator]:
    """Return the functional overloads of a packet; its ``out=`` overloads are derived from these.

    TorchScript keeps overloads of its own in some packets (``aten::mul.left_t`` repeats a list);
    no torch call reaches these.
    """
    overloads = [getattr(packet, name) for name in packet.overloads()]
    operators = [operator_of(one) for one in overloads if _dispatch_has_kernel(one.name())]
    without_out = [op for op in operators if not op.out_names]
    if not without_out:
        raise DispatchError(f"{packet} has no overload that returns its result.")
    return without_out


def overload_for(packet: OpOverloadPacket, args: Args, kwargs: Kwargs) -> OpOverload | None:
    """Return the overload of a packet whose schema accepts the arguments, or None."""
    try:
        name = _jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    except RuntimeError:
        return None
    overload: OpOverload = getattr(packet, name)
    return overload if _dispatch_has_kernel(overload.name()) else None


def _choose(op: Any, args: Args, kwargs: Kwargs) -> Operator | None:
    packet = op if isinstance(op, OpOverloadPacket) else getattr(torch.ops.aten, op.__name__)
    overload = overload_for(packet, args, kwargs)
    return None if overload is None else operator_of(overload)


hooks.resolve_operators.add(_resolve)
hooks.choose_operator.add(_choose)


def _select_backend(op: Operator, *args: Any, **kwargs: Any) -> Any:
    """The BackendSelect kernel of factories: the requested device, or the default one."""
    device = torch.device(kwargs.get("device") or torch.get_default_device())
    return op.redispatch(DispatchKeySet(backend_of(device.type)), *args, **kwargs)


def fast_function(op: TorchOperator, args: Sequence[Any], kwargs: Any) -> Any:
    """Return the fastest callable that runs an overload on these arguments.

    torch's Python functions parse arguments in half the time of an overload's own parser. These
    functions also accept deprecated argument orders, so calls with numbers at tensor positions of
    these orders use the overload. ``OpOverload._op`` is its C++ callable.
    """
    overload = op.overload
    function, reduction = python_function(op)
    # The Python function uses 0 (none) if it is omitted, whatever the schema's default is.
    if function is None or (
        reduction is not None and len(args) <= reduction and "reduction" not in kwargs
    ):
        return overload._op
    if len(args) > 2:
        numbers = [x for x in args if isinstance(x, int | float) and not isinstance(x, bool)]
        if len(numbers) > 1:
            return overload._op
    for arg in args:
        if isinstance(arg, list) and None in arg:
            return overload._op  # torch's function of that name accepts no list with gaps
    return function


@functools.cache
def python_function(op: TorchOperator) -> tuple[Any, int | None]:
    """Return torch's Python function of an operator's name, and the position of ``reduction``."""
    overload = op.overload
    name = overload._schema.name.removeprefix("aten::")
    if op.name in METHODS_OF_SIZES:
        return METHODS_OF_SIZES[op.name], None
    # torch's functions take several results as one argument `out`, overloads by a name for each.
    single = op.out_names in ((), ("out",))
    if overload.namespace == "aten" and name not in _OVERLOAD_ONLY and single:
        for owner in (torch, torch.nn.functional):
            function = getattr(owner, name, None)
            if isinstance(function, type(torch.sin)):
                return function, op.signature.position("reduction")
    return None, None


# Operators that torch has as methods alone; these take the sizes as arguments of their own, too.
METHODS_OF_SIZES: Final = {"aten::view": torch.Tensor.view, "aten::expand": torch.Tensor.expand}
# Python functions of these names differ from the operators of the same names.
_OVERLOAD_ONLY = frozenset({"to", "view", "dropout", "pad", "split", "norm", "stft", "istft"})


# The packets whose results have undefined elements.
UNDEFINED: Final = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
})  # fmt: skip


def may_draw(op: TorchOperator, args: Args, kwargs: Kwargs) -> bool:
    """True if a call may draw random numbers.

    Attention draws nothing without a dropout probability, recurrent layers and dropout nothing if
    they are not in training.
    """
    if not op.random:
        return False

    def argument_at(position: int | None) -> Any:
        if position is None or position < len(args):
            return None if position is None else args[position]
        argument = op.signature.arguments[position]
        return kwargs.get(argument.name, argument.default)

    probability = argument_at(op.probability_argument)
    if isinstance(probability, int | float) and probability == 0:
        return False
    return argument_at(op.training_argument) is not False


def needs_rule(op: TorchOperator, args: Args, kwargs: Kwargs) -> bool:
    """True if a call without batched arguments is for the operator's rule, too."""
    return op.always_ruled and (op.name in _ALWAYS_RULED or may_draw(op, args, kwargs))


def map_items(function: Callable[[Any], Any], arg: Any) -> Any:
    """Return an argument with a function applied to the items of nested lists and tuples."""
    if type(arg) is list or type(arg) is tuple:
        return type(arg)([map_items(function, item) for item in arg])
    return function(arg)


T = TypeVar("T")


def objects_in(kind: type[T], values: Any) -> Iterator[T]:
    """Yield the objects of a class in nested lists, tuples and dicts."""
    if isinstance(values, kind):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from objects_in(kind, value)
    elif isinstance(values, dict):
        yield from objects_in(kind, list(values.values()))


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    return objects_in(torch.Tensor, values)
