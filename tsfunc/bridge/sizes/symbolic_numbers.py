"""Symbolic sizes and numbers: their kind, their text, and their nodes.

NOTE [symbolic ints as plain ints]
Some operators take a plain int that may be symbolic in a trace: the steps of ``linspace``, the
offset of ``diagonal``, the classes of ``one_hot``. torch's argument parser reads the value of a
symbolic int there, which adds a guard on the value. The operator is therefore called without the
parser, and its result follows from NOTE [guards of operators] in ``fake_results``. If that
fails (``x.sum(k)`` over dims of several sizes), the parser runs after all. ``torch.tensor`` has no
schema, and becomes ``torch.full``.

NOTE [functions of math]
``math.cos`` is written in C and needs the value of a symbolic number, which would be a constant of
the program. While a function is traced, the module ``math`` has functions that return a symbolic
number for one, and the module's result for any other number. The replacements equal the functions
that they replace, so that guards on members of ``math`` hold on other threads. Only numbers that
are inputs are treated so: the functions of named dims stay as they are.

NOTE [lookups of numbers]
``epoch in milestones`` and ``rates[epoch]`` look for a number among the keys of a dict or a set. A
symbolic number has no hash in torch, since equal numbers must have equal hashes. The outcome of a
lookup depends on the keys alone that equal the number, so the number is compared with each key
(these comparisons are guards), and its hash is that of its value in the call. The container is read
off the bytecode of the caller. Any other use of the hash is refused, as in torch: ``seen[epoch] =
x`` would put the symbol into the dict.

NOTE [operations that raise]
``12 / k`` raises if k is 0. A function that catches the error has another path for this value, so
an operation of symbolic numbers that raises in a trace guards the values of its operands. One that
does not raise, where a function may catch its error, guards the condition for that: ``k != 0``.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.fx
from torch._ops import OpOverload, OpOverloadPacket

from tsfunc.bridge.sizes.expressions import FUNCTIONS_OF_MATH
from tsfunc.bridge.tracers.operators import C_FUNCTIONS, operator_of, overload_for
from tsfunc.bridge.tracers.torch_settings import replaces_in_traces
from tsfunc.bridge.tracers.tracer import HOOKED, TracerLevel, innermost_level
from tsfunc.bridge.tracers.user_queries import LISTS, PYTHON_TYPES, has_symbols, in_user_code
from tsfunc.dispatch import current_levels
from tsfunc.dispatch.user_checks import caller_may_catch, looked_up
from tsfunc.ops.registry import Args, Kwargs
from tsfunc.types.sizes import DimExpr, solved_for


def size_text(size: Any) -> str:
    """Return a size as text: a number, or an expression in the user's names."""
    if isinstance(size, int):
        return str(size)
    return size.node.shape_env.symbols.spell_size(size)


def kind_of(value: Any) -> type:
    """Return the kind of a plain or symbolic number: bool, int, float or complex."""
    for kind in (bool, int, float, complex):
        if isinstance(value, kind) or PYTHON_TYPES.get(type(value)) is kind:
            return kind
    raise TypeError(f"{type(value).__name__} is not a kind of number")


def symbols_in(results: Sequence[Any], fresh: Sequence[Any]) -> list[tuple[Any, int, int | None]]:
    """Find the fresh symbols in the results of an operator.

    Returns:
        For each occurrence the symbol, the index of the result, and the dim with that size, or
        None if the result is the number itself.
    """
    symbols: list[tuple[Any, int, int | None]] = []
    for i, result in enumerate(results):
        if isinstance(result, torch.Tensor):
            for dim, size in enumerate(result.shape):
                if isinstance(size, torch.SymInt) and size.node.expr in fresh:
                    symbols.append((size.node.expr, i, dim))
        elif isinstance(result, torch.SymInt | torch.SymFloat | torch.SymBool):
            symbols += [(s, i, None) for s in result.node.expr.free_symbols if s in fresh]
    return symbols


# --- symbolic ints as arguments that schemas declare as plain ints


def call_past_parser(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Call an operator with symbolic numbers, or return NotImplemented."""
    if func in (torch.tensor, torch.as_tensor):
        return _tensor(*args, **kwargs) if kwargs.keys() <= {"dtype", "device"} else NotImplemented
    packet = func if isinstance(func, OpOverloadPacket) else _packet(func)
    if packet is None:
        return NotImplemented
    overload = overload_for(
        packet, _replace_by_hints(args), {k: _replace_by_hints([v])[0] for k, v in kwargs.items()}
    )
    if overload is None:
        return NotImplemented
    if packet is not func and not _takes_plain_int(overload, args, kwargs):
        return NotImplemented
    try:
        return _call_overload(
            overload, _as_lists(args), {k: _as_lists([v])[0] for k, v in kwargs.items()}
        )
    except Exception:  # the parser reports the error, if there is one
        return NotImplemented


# The functions that take numbers for all of their tensors, as in `torch.div(x.shape[0], 2)`.
FUNCTIONS_OF_NUMBERS = frozenset({
    torch.add, torch.div, torch.divide, torch.floor_divide, torch.mul, torch.multiply, torch.sub,
    torch.subtract, torch.true_divide,
})  # fmt: skip


def numbers_as_tensors(args: Args, kwargs: Kwargs) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return a function's arguments in a trace, with tensors for operands that are all numbers.

    torch's parser makes tensors of them that are not traced: one for a symbolic number has an
    arbitrary value, and a kernel that converts one would write into a tensor without data.
    """
    if any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
        return args, kwargs
    named = {k: _as_tensor(x) if k in ("input", "other") else x for k, x in kwargs.items()}
    return [*map(_as_tensor, args[:2]), *args[2:]], named


def _as_tensor(value: Any) -> Any:
    if type(value) in PYTHON_TYPES:
        return _tensor(value)
    return torch.tensor(value) if isinstance(value, bool | int | float | complex) else value


def _call_overload(overload: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    op = operator_of(overload)
    level = innermost_level((*args, *kwargs.values()))
    if level is not None and (level.autograd or _any_hooked((*args, *kwargs.values()))):
        return NotImplemented  # autograd and the hooks of tracers need the usual path
    if level is not None:
        out = op.call(tuple(args), kwargs, True)
        tuple_class = getattr(
            torch.return_types, overload._schema.name.removeprefix("aten::"), None
        )
        return out if tuple_class is None else tuple_class(out)
    name = overload._schema.name.removeprefix("aten::")
    for active in reversed(current_levels()):
        if isinstance(active, TracerLevel) and active.handles_factory(name, op.random):
            return op.run_at(active, tuple(args), kwargs)
    return NotImplemented


def _as_lists(values: Sequence[Any]) -> list[Any]:
    """Return arguments as the parser passes them on, with shapes as lists of sizes."""
    return [list(value) if isinstance(value, torch.Size) else value for value in values]


def _any_hooked(values: Sequence[Any]) -> bool:
    items = (x for value in values for x in (value if type(value) in (list, tuple) else (value,)))
    return any(type(x) in HOOKED for x in items)


@functools.cache
def _packet(func: Callable[..., Any]) -> OpOverloadPacket | None:
    """Return the aten operator packet of a torch function with the same name, or None."""
    owner = getattr(func, "__module__", None) or getattr(func, "__objclass__", None)
    if type(func) not in C_FUNCTIONS or owner is None:
        return None
    packet = getattr(torch.ops.aten, func.__name__, None)
    return packet if isinstance(packet, OpOverloadPacket) else None


def _replace_by_hints(values: Sequence[Any]) -> list[Any]:
    """Replace symbolic arguments by their hints, or by stand-ins if they depend on data."""
    return [
        type(value)(_replace_by_hints(value)) if type(value) in LISTS
        else _hint(value) if type(value) in PYTHON_TYPES
        else value
        for value in values
    ]  # fmt: skip


def _hint(value: Any) -> Any:
    hint = value.node.hint
    return _DATA_STAND_IN[type(value)] if hint is None else hint


_DATA_STAND_IN = {torch.SymInt: 2, torch.SymFloat: 2.0, torch.SymBool: True}


def _takes_plain_int(overload: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    """True if a symbolic int is given for a plain int argument."""
    return any(
        has_symbols([args[i] if i < len(args) else kwargs.get(name)])
        for i, name in _plain_ints(overload)
    )


@functools.cache
def _plain_ints(overload: OpOverload) -> Sequence[tuple[int, str]]:
    """Return the position and name of each argument that is a plain int, or a list of them."""
    ints = []
    for i, argument in enumerate(overload._schema.arguments):
        kind = argument.real_type
        while kind.kind() in ("OptionalType", "ListType"):
            kind = kind.getElementType()
        if kind.kind() == "IntType":
            ints.append((i, argument.name))
    return ints


def _tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Any:
    """Return ``torch.tensor`` of symbolic numbers, or of lists of them."""
    if type(data) in LISTS:
        if dtype is None and _has_floats(data):
            dtype = torch.get_default_dtype()
        parts = [_tensor(part, dtype, device) for part in data]
        return NotImplemented if NotImplemented in parts else torch.stack(parts)
    if dtype is None:
        if type(data) not in PYTHON_TYPES and not isinstance(data, bool | int | float):
            return NotImplemented
        dtype = _dtype_of(data)
    return torch.full((), data, dtype=dtype, device=device)


def _dtype_of(number: Any) -> torch.dtype:
    """Return the dtype that ``torch.tensor`` gives a number."""
    if isinstance(number, bool | torch.SymBool):
        return torch.bool
    return torch.get_default_dtype() if _has_floats([number]) else torch.int64


def _has_floats(values: Sequence[Any]) -> bool:
    return any(
        _has_floats(value) if type(value) in LISTS
        else isinstance(value, float | torch.SymFloat)
        for value in values
    )  # fmt: skip


# --- nodes of sizes, and Python's functions of symbolic numbers


def divided_node(node: torch.fx.Node, step: int) -> torch.fx.Node:
    """Return the node of a number divided by a step, rounded down."""
    if step == 1:
        return node
    return node.graph.call_function(operator.floordiv, (node, step))


def solved_node(
    graph: torch.fx.Graph,
    size: torch.fx.Node,
    expression: str,
    name: str,
    nodes: Mapping[str, torch.fx.Node],
) -> torch.fx.Node:
    """Return the node of a dim name, by solving an expression that equals a size for the name."""
    factors = solved_for(expression, name)
    assert factors is not None
    slope, rest = factors
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    proxies: Any = {symbol: torch.fx.Proxy(node, tracer) for symbol, node in nodes.items()}
    solution: Any = torch.fx.Proxy(size, tracer)
    if rest != "0":
        solution = solution - DimExpr(rest).evaluate(proxies)
    if slope != "1":
        solution = solution // DimExpr(slope).evaluate(proxies)
    return solution.node


def size_node(graph: torch.fx.Graph, tensor: torch.fx.Node, dim: int) -> torch.fx.Node:
    return graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim))


def shape_node(graph: torch.fx.Graph, sizes: Sequence[Any]) -> torch.fx.Node:
    """Return the node for a ``torch.Size`` of numbers and nodes."""
    return graph.call_function(torch.Size, (list(sizes),))


def _divmod(number: Any, by: Any) -> tuple[Any, Any]:
    return number // by, number % by


def _rdivmod(by: Any, number: Any) -> tuple[Any, Any]:
    return number // by, number % by


def _texts_of_numbers(kind: Any) -> Callable[[Any], str]:
    """Return ``__repr__`` of a kind of symbolic numbers, by which Python also formats them.

    The symbols of NOTE [automatic dynamic sizes] replace plain numbers, so the user's code gets the
    text of the number, which reads its value.
    """
    plain_repr = kind.__repr__

    @functools.wraps(plain_repr)
    def text(number: Any) -> str:
        symbols = getattr(getattr(number.node, "shape_env", None), "symbols", None)
        if symbols is None or not in_user_code() or not symbols.reads_as_number(number):
            return str(plain_repr(number))
        return repr(int(number) if isinstance(number, torch.SymInt) else float(number))

    return text


for _kind in (torch.SymInt, torch.SymFloat):
    _kind.__repr__ = _texts_of_numbers(_kind)  # type: ignore[method-assign]


# --- operations of numbers: NOTE [operations that raise]


def _guarding_errors(
    operation: Callable[..., Any], is_defined: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return an operation of numbers that guards its operands where a function needs this.

    Args:
        is_defined: the condition on the operands under which the operation does not raise.
    """

    @functools.wraps(operation)
    def guarded(*operands: Any) -> Any:
        try:
            result = operation(*operands)
        except (ArithmeticError, ValueError):
            for number in operands:
                if type(number) in _SYMBOLIC_NUMBERS and _known_in_trace(number):
                    bool(number == number.node.hint)
            raise
        if is_defined is not None and result is not NotImplemented:
            symbolic = any(type(x) in _SYMBOLIC_NUMBERS and _known_in_trace(x) for x in operands)
            if symbolic and caller_may_catch():
                bool(is_defined(*operands))
        return result

    return guarded


def _known_in_trace(number: Any) -> bool:
    """True if a symbolic number of the user's code has a value in the traced call."""
    symbols = getattr(getattr(number.node, "shape_env", None), "symbols", None)
    return symbols is not None and number.node.hint is not None and in_user_code()


def _has_divisor(_dividend: Any, divisor: Any) -> Any:
    return divisor != 0


def _has_count(_number: Any, count: Any) -> Any:
    return count >= 0


def _has_power(base: Any, exponent: Any) -> Any:
    return exponent >= 0 or base != 0


_BINARY: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "truediv": _has_divisor, "floordiv": _has_divisor, "mod": _has_divisor, "pow": _has_power,
    "lshift": _has_count, "rshift": _has_count,
}  # fmt: skip
_SYMBOLIC_NUMBERS: Final = frozenset({torch.SymInt, torch.SymFloat})

for _kind in (torch.SymInt, torch.SymFloat):
    for _name in ("__floor__", "__ceil__", "__trunc__", "__round__"):
        setattr(_kind, _name, _guarding_errors(getattr(_kind, _name)))
    for _name, _defined in _BINARY.items():
        _left, _right = f"__{_name}__", f"__r{_name}__"
        _swapped = functools.partial(lambda defined, x, y: defined(y, x), _defined)
        setattr(_kind, _left, _guarding_errors(getattr(_kind, _left), _defined))
        setattr(_kind, _right, _guarding_errors(getattr(_kind, _right), _swapped))


# torch's symbolic ints have // and %, but not divmod, which Python does not derive from these.
for _name, _function in (("__divmod__", _divmod), ("__rdivmod__", _rdivmod)):
    if not hasattr(torch.SymInt, _name):
        setattr(torch.SymInt, _name, _function)


# --- functions of the module math: NOTE [functions of math]


class _FunctionOfMath:
    """A function of ``math`` that takes symbolic numbers, too."""

    def __init__(self, function: Callable[..., float]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        symbolic = not _SYMBOLIC_NUMBERS.isdisjoint(map(type, args))
        if len(args) == 2 and self.function is _log and symbolic:
            return self(args[0]) / self(args[1])
        if len(args) == 1 and symbolic:
            return _of_number(self.function, args[0])
        return self.function(*args)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.function

    def __hash__(self) -> int:
        return hash(self.function)


_log = FUNCTIONS_OF_MATH["log"]


def _of_number(function: Callable[..., float], number: Any) -> Any:
    """Return a function of a symbolic number, which is symbolic if the number is an input."""
    if _symbols_of_input(number) is None:
        return function(number)
    from torch.utils._sympy import functions

    number = torch.sym_float(number)
    expr = getattr(functions, f"OpaqueUnaryFn_{function.__name__}")(number.node.expr)
    env = number.node.shape_env
    hint = _guarding_errors(lambda value: function(value.node.hint))(number)
    return env.create_symfloatnode(expr, hint=hint)


def _symbols_of_input(number: Any) -> Any:
    """Return the symbols of a trace if a symbolic number depends on numbers among its inputs alone.

    The result is None for other numbers, and for numbers that are known.
    """
    symbols = getattr(getattr(number.node, "shape_env", None), "symbols", None)
    known = symbols is None or number.node.hint is None or not symbols.is_of_inputs(number)
    return None if known else symbols


_FOR_NUMBERS: Final = {
    name: _FunctionOfMath(function) for name, function in FUNCTIONS_OF_MATH.items()
}
replaces_in_traces(math, FUNCTIONS_OF_MATH, _FOR_NUMBERS)


# --- lookups in dicts and sets: NOTE [lookups of numbers]


def _hash_in_lookups(kind: Any) -> Callable[[Any], int]:
    """Return ``__hash__`` of a kind of symbolic numbers."""
    plain_hash = kind.__hash__

    @functools.wraps(plain_hash)
    def hashed(number: Any) -> int:
        if _symbols_of_input(number) is None or not in_user_code():
            return int(plain_hash(number))
        own_frame = inspect.currentframe()
        caller = own_frame and own_frame.f_back
        keys, needs_key = (caller and looked_up(caller)) or (None, False)
        if keys is None or len(keys) > _MOST_KEYS or not _PLAIN_KEYS.issuperset(map(type, keys)):
            return int(plain_hash(number))
        found = [key for key in keys if type(key) is not str and number == key]
        if needs_key and not found:
            return int(plain_hash(number))
        return hash(number.node.hint)

    return hashed


_MOST_KEYS = 64
_PLAIN_KEYS: Final = frozenset({int, float, str, bool})

for _kind in (torch.SymInt, torch.SymFloat):
    _kind.__hash__ = _hash_in_lookups(_kind)  # type: ignore[method-assign]
