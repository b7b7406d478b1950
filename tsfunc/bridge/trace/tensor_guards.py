"""The properties of tensors that a trace depends on: class, layout, view, contiguous and so on.

NOTE [tensor guards]
Two tensors of one dtype and one shape may differ for a function that reads ``x.is_leaf`` or
``x.storage_offset()``. Such a property of an argument is read from the traced call, and becomes a
guard of the program. Most functions read no such property, and their programs have no such guard. A
property of a computed value is either known or refused. Properties that change without an
assignment (``_version``) are refused too.

The sizes of a tensor determine its strides, with one exception: with named dims a guard knows only
the order of the strides. A trace assumes that these tensors have no gaps in memory, as is true for
the results of operators; a function that reads the strides adds a guard on this.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final, NoReturn, TypeVar

import torch
from torch._C import DisableTorchFunctionSubclass
from torch._C._dynamo.guards import TensorGuards as TensorChecks

from tsfunc.bridge import compiled
from tsfunc.bridge.tracers import torch_state
from tsfunc.bridge.tracers.attributes import read_from_value
from tsfunc.bridge.tracers.function_registry import FunctionRules, Stage
from tsfunc.bridge.tracers.nesting import innermost_value
from tsfunc.bridge.tracers.operators import PLAIN_TENSORS
from tsfunc.bridge.tracers.tracer import Tracer, function_handler, metadata
from tsfunc.bridge.tracers.user_queries import in_user_code
from tsfunc.errors import ClosureError, TypeCheckError
from tsfunc.ops.dims import dense_strides, memory_order
from tsfunc.user_code import called_by_user, user_location

F = TypeVar("F", bound=Callable[..., Any])


# --- classes and layouts of tensors, and the quick comparison


USERS_CLASS: Final = "_users_class"  # of a tracer class with the members of a user's class


@functools.cache
def users_class(cls: type) -> type:
    """Return a tensor class if it is the user's, else ``torch.Tensor``.

    The user's class may redefine operators, so its instances have programs of their own.
    """
    return torch.Tensor if cls.__module__.partition(".")[0] in ("torch", "tsfunc") else cls


_COMPRESSED: Final = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def check_layout(value: torch.Tensor, name: str | None = None) -> None:
    """Refuse a tensor whose layout a trace can't follow.

    Args:
        name: the argument that it belongs to; None for a tensor from elsewhere.

    Raises:
        TypeCheckError: the layout is that of an argument.
        ClosureError: the layout is that of another tensor.
    """
    # Python replaces a TypeError of an operator such as `*` by an error of its own.
    error = ClosureError if name is None else TypeCheckError
    place = name or "a tensor that the function captures or makes"
    if value.layout in _COMPRESSED:
        raise error(
            f"specialize: expected strided or COO tensors, got {value.layout} for {place}. A trace "
            f"can't follow compressed tensors. Pass x.to_dense() or x.to_sparse()."
        )
    if value.is_nested:
        raise error(
            f"specialize: expected strided or COO tensors, got a nested tensor for {place}. A "
            f"trace has no sizes for its examples. Pass x.to_padded_tensor(0.0), or specialize the "
            f"function of one example and call vmap of it with the nested tensor."
        )


def is_tensor_of(value: Any, cls: type) -> bool:
    """True if a value is a tensor and ``users_class`` maps its class to ``cls``."""
    return isinstance(value, torch.Tensor) and users_class(type(value)) is cls


def are_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """True if tensors have torch's own classes and are strided."""
    return all(type(x) in PLAIN_TENSORS and x.layout is torch.strided for x in tensors)


def has_plain_inputs(level: Any) -> bool:
    """True if the tensors from outside of a trace are plain, as all values of the trace are."""
    samples = [argument.sample for _, argument in level.tensor_guards.arguments]
    return are_plain(map(innermost_value, [*samples, *level.tensors_outside().values()]))


def quick_check(samples: Sequence[torch.Tensor]) -> Callable[[Sequence[Any]], bool] | None:
    """Return a function that is True only for tensors with the same properties as the samples.

    The function may be False for tensors that do match, such as tensors of another class. Such
    tensors need a full check.

    Args:
        samples: tensors with their sizes and strides.

    Returns:
        The function, which takes a list or tuple of as many tensors as there are samples; None
        without samples, or if a sample is not a plain strided tensor.
    """
    if not samples or not are_plain(samples):
        return None
    with torch_state.outside_all_transforms():
        if _handlers is not None:
            return _handlers.tensor_check(tuple(samples))
        # torch's annotation is one list for all tensors; the function takes a list of lists.
        sizes: Any = [list(x.shape) for x in samples]
        strides: Any = [list(x.stride()) for x in samples]
        guards = TensorChecks(*samples, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guards.check
    return lambda tensors: check(*tensors)


_handlers = compiled.load()


# --- guards on other properties


def dense_order(x: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dims from the innermost in memory outwards; None if there are gaps."""
    order = memory_order(x.shape, x.stride())
    return tuple(order[::-1]) if dense_strides(x.shape, order) == [*x.stride()] else None


# The guarded properties of an argument, as source code, and the functions that read them.
_FACTS: Final[Mapping[str, Callable[[torch.Tensor], Any]]] = {
    "{}.is_leaf": lambda x: x.is_leaf,
    "{}.grad_fn is None": lambda x: x.grad_fn is None,
    "{}.retains_grad": lambda x: x.retains_grad,
    "{}.output_nr": lambda x: x.output_nr,
    "{}._is_view()": lambda x: x._is_view(),
    "{}._backward_hooks is None": lambda x: x._backward_hooks is None,
    "{}.is_inference()": lambda x: x.is_inference(),
    "{}.is_conj()": lambda x: x.is_conj(),
    "{}.is_neg()": lambda x: x.is_neg(),
    "{}.storage_offset()": lambda x: x.storage_offset(),
    "{}.stride()": lambda x: tuple(x.stride()),
    "dense_order({})": dense_order,
    "{}.is_contiguous()": lambda x: x.is_contiguous(),
    "{}.is_contiguous(memory_format=torch.channels_last)": lambda x: x.is_contiguous(
        memory_format=torch.channels_last
    ),
    "{}.is_contiguous(memory_format=torch.channels_last_3d)": lambda x: x.is_contiguous(
        memory_format=torch.channels_last_3d
    ),
    "type({}) is Tensor": lambda x: type(x) is torch.Tensor,
    "isinstance({}, Parameter)": lambda x: isinstance(x, torch.nn.Parameter),
    "isinstance({}, Buffer)": lambda x: isinstance(x, torch.nn.Buffer),
}
_ATTRIBUTE: Final = re.compile(r"hasattr\(\{\}, '([^\W\d]\w*)'\)")


def reader_of(fact: str) -> Callable[[torch.Tensor], Any] | None:
    """Return the function that reads a property; None for an unknown property."""
    attribute = _ATTRIBUTE.fullmatch(fact)
    if attribute is None:
        return _FACTS.get(fact)
    name = attribute[1]
    return lambda x: name in vars(x)


@dataclass(frozen=True)
class PropertyGuard:
    """A property of an argument that a trace has read.

    Attributes:
        position: the index of the flattened argument.
        fact: the property as Python code, with ``{}`` for the argument.
        answer: its value in the traced call.
    """

    position: int
    fact: str
    answer: Any

    def holds(self, value: torch.Tensor) -> bool:
        """True if the property of another tensor has the same value."""
        if isinstance(value, Tracer) and hasattr(value.dispatch_level, "tensor_guards"):
            return False  # a read here would add a guard to the outer trace
        answer = reader_of(self.fact)
        return answer is not None and bool(answer(value) == self.answer)


@dataclass(frozen=True)
class TracedArgument:
    """A tensor among the arguments of a trace.

    Attributes:
        position: the index of the flattened argument.
        name: its name in the program.
        sample: the tensor of the call.
        value: the fake tensor in its place.
        is_fixed: True if all of its sizes are ints.
    """

    position: int
    name: str
    sample: torch.Tensor
    value: torch.Tensor
    is_fixed: bool


class TensorGuards:
    """The guards of a trace on properties of tensors: NOTE [tensor guards].

    Attributes:
        label: the name of the trace in errors.
        property_guards: the properties of arguments that were read, with their values.
        of_grad: True if the function read whether a tensor requires grad.
        of_backward: True if the function ran a backward pass, which anomaly mode changes.
        attribute_of: reads a Python attribute of an argument, or ``grad``.
        answer: returns the value of a node if the trace can know it, else None.
        hashes_tensors: True if tensors were hashed (keys of a dict, elements of a set), so that
            their identity matters.
        of_memory: True if it matters which arguments share memory.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.of_grad = False
        self.of_backward = False
        self.property_guards: dict[tuple[int, str], PropertyGuard] = {}
        self.attribute_of: Callable[[TracedArgument, str], Any] = _attribute
        self.answer: Callable[[torch.fx.Node], Any] = lambda node: None
        self.hashes_tensors = False
        self.of_memory = False
        self._arguments: dict[int, tuple[Any, TracedArgument]] = {}

    def add(self, tracer: Any, argument: TracedArgument) -> None:
        self._arguments[id(tracer)] = tracer, argument

    @property
    def arguments(self) -> Iterator[tuple[Any, TracedArgument]]:
        """The tracers of arguments, each with its argument."""
        return iter(self._arguments.values())

    def argument(self, tracer: Any) -> TracedArgument | None:
        """Return the argument of a tracer, or None for a computed value."""
        level = tracer.dispatch_level
        while (taken := getattr(level, "taken", None)) is not None:  # a body of control flow
            outer = next(
                (outer_argument for outer_argument, inner in taken.values() if inner is tracer),
                None,
            )
            if not isinstance(outer, Tracer):
                return None
            tracer, level = outer, outer.dispatch_level
        entry = self._arguments.get(id(tracer))
        return None if entry is None else entry[1]

    def guard(self, argument: TracedArgument, fact: str) -> Any:
        """Return a property of an argument, and guard it."""
        key = argument.position, fact
        if key not in self.property_guards:
            answer = reader_of(fact)
            assert answer is not None
            self.property_guards[key] = PropertyGuard(*key, answer(argument.sample))
        return self.property_guards[key].answer

    def guard_all(self, fact: str) -> None:
        """Guard a property of every argument."""
        for _, argument in self.arguments:
            self.guard(argument, fact)

    def guard_strides(self, value: torch.Tensor) -> None:
        """Add guards on the strides of arguments that a fake tensor's strides depend on.

        Raises:
            TypeCheckError: the tensor is a view of an argument with gaps in memory and symbolic
                sizes.
        """
        for _, argument in self.arguments:
            x = argument.sample
            if x.layout is not torch.strided:
                continue
            if argument.is_fixed:
                if any(size < 2 for size in x.shape):  # a guard ignores the strides of such sizes
                    self.guard(argument, "{}.stride()")
                continue
            shared = _share_memory(value, argument.value)
            if shared and self.guard(argument, "dense_order({})") is None:
                self.refuse(
                    f"the strides of {argument.name}, or of a view of it, are read",
                    f"they are {tuple(x.stride())} for the sizes {tuple(x.shape)}, and not known "
                    f"for other sizes",
                    "Give its sizes as ints, or pass x.contiguous().",
                )

    def refuse_assignments(self) -> None:
        """Raise if the function has assigned an attribute of a tensor argument."""
        for tracer, argument in self.arguments:
            for name in vars(tracer).keys() - _OWN:
                raise TypeCheckError(
                    f"{self.label}: {argument.name}.{name} is assigned; a program does not assign "
                    f"to attributes of tensors. Return the value, and assign it after the call."
                )

    def refuse(self, read: str, why: str, remedy: str) -> NoReturn:
        """Raise for the read of a property that a program cannot guard.

        Raises:
            TypeCheckError: always.
        """
        raise TypeCheckError(f"{self.label}: {read} at {user_location()}; {why}. {remedy}")


# Attributes of a tracer: its own, and those in which torch's C++ keeps the sizes and strides that
# it has read.
_CAPSULES: Final = [f"_{kind}_capsule" for kind in ("sizes", "strides", "sym_sizes", "sym_strides")]
_OWN: Final = frozenset(
    {"dispatch_level", "value", "node", "tracks", *_CAPSULES, *(f"{x}_len" for x in _CAPSULES)}
)


def _attribute(argument: TracedArgument, name: str) -> Any:
    return getattr(argument.sample, name)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if fake tensors share a storage."""
    if one is other:
        return True
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


# --- tracers


def _guards_of(value: Any) -> TensorGuards | None:
    """Return the tensor guards of a tensor's trace for a query of user code; else None.

    Most queries come from kernels, and add no guards: NOTE [queries of user code].
    """
    return guards_for_user_query(value) if in_user_code() else None


def guards_for_user_query(value: Any) -> TensorGuards | None:
    """Return the guards of a tensor's trace if code outside of this package asks, else None."""
    if not isinstance(value, Tracer):
        return None
    guards: TensorGuards | None = getattr(value.dispatch_level, "tensor_guards", None)
    return guards if guards is not None and value.dispatch_level.alive and is_user_query() else None


# Frames between a query and its handler, besides every ``__torch_function__``.
_HANDLERS_BETWEEN: Final[set[CodeType]] = {function_handler.__code__, read_from_value.__code__}


def forwards_query(function: F) -> F:
    """Mark a function that forwards a query to its handler."""
    _HANDLERS_BETWEEN.add(function.__code__)
    return function


def is_user_query() -> bool:
    """True if the query comes from code outside of this package."""
    return called_by_user(passing=lambda frame: frame.f_globals.get("__name__") == __name__
                          or frame.f_code in _HANDLERS_BETWEEN
                          or frame.f_code.co_name == "__torch_function__")  # fmt: skip


def without_handlers(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return a tracer's own property, without a call of ``__torch_function__``."""
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


# --- methods that do not go through __torch_function__


def stride(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Implement ``x.stride()`` of a traced tensor."""
    guards = _guards_of(self)
    if guards is not None:
        guards.guard_strides(self.value)
    return without_handlers(torch.Tensor.stride, self, *args, **kwargs)


def contiguous(self: Any, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    """Implement ``x.is_contiguous()`` of a traced tensor."""
    guards = _guards_of(self)
    argument = None if guards is None else guards.argument(self)
    if guards is not None and argument is not None and not argument.is_fixed:
        return bool(guards.guard(argument, _FORMATS[memory_format]))
    if guards is not None:
        guards.guard_strides(self.value)
    return bool(without_handlers(torch.Tensor.is_contiguous, self, memory_format=memory_format))


_FORMATS: Final = {
    torch.contiguous_format: "{}.is_contiguous()",
    torch.channels_last: "{}.is_contiguous(memory_format=torch.channels_last)",
    torch.channels_last_3d: "{}.is_contiguous(memory_format=torch.channels_last_3d)",
}


def offset(self: Any) -> Any:
    """Implement ``x.storage_offset()`` of a traced tensor, whose storage may be from outside."""
    own_offset = without_handlers(torch.Tensor.storage_offset, self)
    return own_offset if _guards_of(self) is None else own_offset + offset_outside(self)


def offset_outside(x: Any) -> int:
    """Return the offset of the tensor from outside whose memory a traced tensor has, or 0."""
    guards: TensorGuards = x.dispatch_level.tensor_guards
    for _, argument in guards.arguments:
        if _share_memory(x.value, argument.value):
            return int(guards.guard(argument, "{}.storage_offset()"))
    for tensor, tracer in x.dispatch_level.lifted.values():
        if _share_memory(x.value, tracer.value):
            return int(tensor.storage_offset())
    return 0


def hash_of(self: Any) -> int:
    """Implement ``hash(x)`` of a traced tensor."""
    guards = _guards_of(self)
    if guards is not None:
        guards.hashes_tensors = True
    return id(self)


def class_of(self: Any) -> Any:
    """Implement ``x.__class__`` of a traced tensor, which ``isinstance`` reads too.

    Instances of a user's class have programs of their own. A guard tells a ``Parameter`` from
    another tensor.
    """
    guards = _guards_of(self) if "dispatch_level" in _DICT.__get__(self) else None
    if guards is None:
        return type(self)
    argument = guards.argument(self)
    if argument is None:
        return getattr(type(self), USERS_CLASS, torch.Tensor)
    cls = users_class(type(argument.sample))
    if cls is torch.Tensor and _names_class(inspect.currentframe()):
        whole = guards.guard(argument, "type({}) is Tensor")
        return cls if whole else guards.attribute_of(argument, "__class__")
    return cls


def _names_class(property_frame: FrameType | None) -> bool:
    """True if an expression ``x.__class__`` called the property."""
    frame = property_frame and property_frame.f_back
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] in (
        "LOAD_ATTR", "LOAD_METHOD",
    )  # fmt: skip


def set_class(self: Any, cls: type) -> None:
    """Implement ``x.__class__ = cls``."""
    vars(object)["__class__"].__set__(self, cls)


def dict_of(self: Any) -> Any:
    """Implement ``x.__dict__`` of a traced tensor."""
    namespace = _DICT.__get__(self)
    guards = _guards_of(self) if "dispatch_level" in namespace else None
    argument = None if guards is None else guards.argument(self)
    if guards is None or argument is None:
        return namespace
    return guards.attribute_of(argument, "__dict__")


_DICT: Final = vars(torch.Tensor)["__dict__"]


function_rules: Final = FunctionRules()
# Function modes see metadata calls.
function_rules.add(Stage.METHOD, metadata, stride, contiguous, offset)


def attribute(self: Any, name: str) -> Any:
    """Look up an attribute on the argument that a traced tensor stands for."""
    guards = None if name.startswith("__") else _guards_of(self)
    argument = None if guards is None else guards.argument(self)
    if guards is not None and argument is not None:
        kind = {"_is_param": "isinstance({}, Parameter)", "_is_buffer": "isinstance({}, Buffer)"}
        if name in kind:
            return guards.guard(argument, kind[name])
        if guards.guard(argument, f"hasattr({{}}, {name!r})"):
            return guards.attribute_of(argument, name)
    raise AttributeError(f"'Tensor' object has no attribute {name!r}", name=name, obj=self)
