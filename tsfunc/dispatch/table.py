"""The table: operators are rows, dispatch keys are columns.

NOTE [precedence]
For an operator and a key the kernel is, in this order,

1. the cell's: ``register(op, key)``;
2. the row's: ``register_catch_all(op)``;
3. the column's: ``register_fallback(key)``, boxed: it gets ``(op, args, kwargs)``.

Where the kernel found is ``fallthrough``, the next lower bit of the key set is tried.
A key without any of the three is an error, except ``BackendSelect``, whose column falls through.

NOTE [what a kernel runs under]
A kernel of level 0 runs with its own key and all higher bits excluded. A kernel of a level runs
under the state that the level captured (NOTE [state captured by a level]), likewise without its
own bit and higher ones. Calling the operator again therefore goes on outwards, and a level that
is entered inside a kernel starts afresh.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, overload

import optree
import torch

from tsfunc.dispatch.keys import (
    BACKENDS,
    WIDTH,
    DispatchKey,
    DispatchKeySet,
    backend_of,
    caller_site,
    split_bit,
)
from tsfunc.dispatch.state import Level, global_set, tls
from tsfunc.errors import DispatchError, EscapedTracerError

Kernel = Callable[..., Any]
K = TypeVar("K", bound=Kernel)


class _Fallthrough:
    """The kernel that does nothing: the next key of the set is tried."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise DispatchError("fallthrough marks a key that is passed over; it can't be called.")

    def __repr__(self) -> str:
        return "fallthrough"


fallthrough: Final = _Fallthrough()


class _Entry:
    """A kernel in the table, and where it was registered."""

    __slots__ = ("boxed", "kernel", "kind", "site")

    def __init__(self, kernel: Kernel, boxed: bool, kind: str, site: str) -> None:
        self.kernel, self.boxed, self.kind, self.site = kernel, boxed, kind, site


_lock = threading.RLock()
_columns: dict[DispatchKey, _Entry] = {}
_operators: dict[str, Operator] = {}
_resolvers: list[Callable[[Any], Sequence[Operator] | None]] = []


class Operator:
    """A row of the table; calling it dispatches.

    Args:
        name: as ``"namespace::name"``; one operator a name.
        native: the function that the backends run, where one serves them all.

    Raises:
        DispatchError: the name is taken.

    Example:
        >>> from tsfunc.dispatch import DispatchKey, Operator, register
        >>> double = Operator("doc::double")
        >>> @register(double, DispatchKey.CPU)
        ... def double_cpu(x):
        ...     return x + x
        >>> double(torch.ones(2))
        tensor([2., 2.])
    """

    __slots__ = ("_cache", "_catch_all", "_cells", "name", "native", "site")

    def __init__(self, name: str, native: Kernel | None = None) -> None:
        self.name = name
        self.native = native
        self.site = caller_site(2)
        self._cells: dict[DispatchKey, _Entry] = {}
        self._catch_all: _Entry | None = None
        self._cache: dict[int, tuple[Kernel, bool, int, int]] = {}
        with _lock:
            old = _operators.get(name)
            if old is not None:
                raise DispatchError(
                    f"Operator({name!r}): the name is taken, by the operator made at {old.site}; "
                    f"this one is at {self.site}. Use that one or choose another name."
                )
            _operators[name] = self

    def __repr__(self) -> str:
        return f"Operator({self.name!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(args, kwargs, restore=True)

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], restore: bool = False) -> Any:
        """Dispatches; ``restore`` brings back all that a level captured, not only our state."""
        state = tls.state
        keys, level = keys_of_arguments(args, kwargs)
        return self._run((keys | state.include | global_set.bits) & state.mask, level, args,
                         kwargs, restore)  # fmt: skip

    def redispatch(self, keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Calls the kernel for exactly this key set: nothing is added to it or masked."""
        level = keys_of_arguments(args, kwargs)[1]
        return self._run(keys.bits, level, args, kwargs, True)

    def run_at(self, level: Level, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a level's kernel, whatever the arguments are: for what has no tensor argument."""
        found, inner = keys_of_arguments(args, kwargs)
        if inner is not None and inner.depth > level.depth:
            level = inner
        return self._run(found | level.bits, level, args, kwargs, True)

    def _run(
        self,
        bits: int,
        level: Level | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        restore: bool,
    ) -> Any:
        entry = self._cache.get(bits)
        if entry is None:
            entry = self._choose(bits, args)
        kernel, boxed, bit, depth = entry
        previous = tls.state
        if depth:
            if level is None or level.depth != depth:
                level = _level_at(depth, self)
            if not level.alive:
                raise EscapedTracerError(escaped_message(self.name, level))
            tls.state = level.kernel_state(bit)
        else:
            tls.state = previous.below(bit)
        try:
            if restore and depth:
                assert level is not None
                with level.guard():
                    return kernel(self, args, kwargs) if boxed else kernel(*args, **kwargs)
            return kernel(self, args, kwargs) if boxed else kernel(*args, **kwargs)
        finally:
            tls.state = previous

    def _choose(self, bits: int, args: Sequence[Any]) -> tuple[Kernel, bool, int, int]:
        rest = bits
        while rest > 0:
            bit = rest.bit_length() - 1
            entry = self.entry(split_bit(bit)[1])
            if entry is None:
                raise DispatchError(_no_kernel(self, bit, bits))
            if entry.kernel is not fallthrough:
                chosen = (entry.kernel, entry.boxed, bit, bit // WIDTH)
                self._cache[bits] = chosen
                return chosen
            rest ^= 1 << bit
        raise DispatchError(
            f"{self.name}({', '.join(type(a).__name__ for a in args)}): no key is left to "
            f"dispatch to (key set {DispatchKeySet.from_bits(bits)!r}). An operator without "
            f"tensor arguments is a factory: give it a BackendSelect kernel "
            f"(register(op, DispatchKey.BackendSelect)) that chooses the backend."
        )

    def entry(self, key: DispatchKey) -> _Entry | None:
        """What stands in the table for a key: cell, then row, then column."""
        return self._cells.get(key) or self._catch_all or _columns.get(key)

    def has_cell(self, key: DispatchKey) -> bool:
        """Whether a kernel is registered for just this operator and key, or for its row."""
        return key in self._cells or self._catch_all is not None


def _level_at(depth: int, op: Operator) -> Level:
    levels = tls.state.levels
    if depth <= len(levels):
        return levels[depth - 1]
    raise DispatchError(
        f"{op.name}: the key set names level {depth}, but only {len(levels)} are active here."
    )


def escaped_message(name: str, level: Level) -> str:
    """What to say of a value that is used after its level has ended."""
    return (
        f"{name}: got a value of {level.name} (called at {level.site}) after that transform "
        f"had ended. Return the value from the transformed function instead of storing it "
        f"in a variable or object outside of it."
    )


def _no_kernel(op: Operator, bit: int, bits: int) -> str:
    level, key = split_bit(bit)
    return (
        f"{op.name}: no kernel for {key} at level {level}, the highest of "
        f"{DispatchKeySet.from_bits(bits)!r}. Looked for, in this order: the cell "
        f"(register(op, {key})), the row (register_catch_all(op)), the column "
        f"(register_fallback({key})). Register one of them, with `fallthrough` to pass {key} over."
    )


# What a value of a type contributes to a call's key set.
_NONE, _LEVEL, _KEYS, _TREE, _TENSOR = range(5)
_kinds: dict[type, int] = {
    type(None): _NONE, int: _NONE, float: _NONE, bool: _NONE, complex: _NONE, str: _NONE,
    torch.dtype: _NONE, torch.device: _NONE, torch.layout: _NONE, torch.memory_format: _NONE,
    torch.Size: _NONE, torch.Tensor: _TENSOR, torch.nn.Parameter: _TENSOR,
    list: _TREE, tuple: _TREE, dict: _TREE,
}  # fmt: skip


def _kind_of(value: Any) -> int:
    t = type(value)
    kind = _kinds.get(t)
    if kind is not None:
        return kind
    if hasattr(t, "dispatch_level"):
        kind = _LEVEL
    elif hasattr(t, "dispatch_keys"):
        kind = _KEYS
    elif isinstance(value, torch.Tensor):
        kind = _TENSOR
    else:
        # Not kept: a type can be registered as a pytree at any time.
        leaf = optree.tree_is_leaf(value, none_is_leaf=True)
        return _KEYS if hasattr(value, "dispatch_keys") else _NONE if leaf else _TREE
    _kinds[t] = kind
    return kind


def keys_of_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, Level | None]:
    """The bits that the arguments contribute, and the innermost level found among them."""
    bits = 0
    level: Level | None = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = _kinds.get(type(value))
        if kind is None:
            kind = _kind_of(value)
        if kind == _LEVEL:
            found = value.dispatch_level
            bits |= found.bits
            level = _innermost(level, found)
        elif kind == _TENSOR:
            bits |= 1 << backend_of(value.device.type).priority
        elif kind == _TREE:
            leaves = optree.tree_leaves(value, none_is_leaf=True)
            more, found = keys_of_arguments(leaves, {})
            bits |= more
            if found is not None:
                level = _innermost(level, found)
        elif kind == _KEYS:
            bits |= value.dispatch_keys.bits
    return bits, level


def _innermost(a: Level | None, b: Level) -> Level:
    """The inner one of two levels; of two at the same depth the one that has ended.

    Values of two transforms at one depth meet only where one of them has escaped.
    """
    if a is None or a is b or b.depth > a.depth or (b.depth == a.depth and not b.alive):
        return b
    return a


def operators_of(op: Any) -> Sequence[Operator]:
    """The rows that a registration means: an Operator, a name, or what a resolver knows."""
    if isinstance(op, Operator):
        return (op,)
    if isinstance(op, str) and op in _operators:
        return (_operators[op],)
    for resolve in _resolvers:
        found = resolve(op)
        if found is not None:
            return found
    raise DispatchError(
        f"{op!r} names no operator. Expected an Operator, the name of one, or a torch operator "
        f"(torch.ops.aten.add.Tensor, torch.ops.aten.add, torch.add, 'aten::add.Tensor')."
    )


def on_resolve(resolve: Callable[[Any], Sequence[Operator] | None]) -> None:
    """Teaches ``register`` what else names an operator; ``resolve`` returns None if it can't."""
    _resolvers.append(resolve)


def find_operator(name: str) -> Operator | None:
    """The operator of that name, if it has been made."""
    return _operators.get(name)


def _forget_choices() -> None:
    for op in _operators.values():
        op._cache.clear()


def _refuse_duplicate(what: str, old: _Entry | None, site: str) -> None:
    if old is not None:
        raise DispatchError(
            f"{what}: a kernel is there already, registered at {old.site}; this one is at {site}. "
            f"Remove one of them."
        )


@overload
def register(op: Any, key: DispatchKey) -> Callable[[K], K]: ...
@overload
def register(op: Any, key: DispatchKey, kernel: K) -> K: ...
def register(op: Any, key: DispatchKey, kernel: Any = None) -> Any:
    """Fills a cell: the kernel for one operator and one key, called as ``kernel(*args, **kwargs)``.

    Without ``kernel`` it is a decorator. ``op`` is an :class:`Operator`, a torch operator
    (an overload; or an overload packet or a function such as ``torch.sin``, which stand for all
    overloads of that name), or a name. ``kernel=fallthrough`` passes the key over.

    Raises:
        DispatchError: the cell is filled already; the message names both places.
    """
    if kernel is None:
        return lambda k: register(op, key, k)
    site = _site_of(kernel)
    with _lock:
        targets = operators_of(op)
        for target in targets:
            what = f"register({target.name}, {key})"
            _refuse_duplicate(what, target._cells.get(key), site)
        for target in targets:
            target._cells[key] = _Entry(kernel, False, "cell", site)
            target._cache.clear()
    return kernel


@overload
def register_catch_all(op: Any) -> Callable[[K], K]: ...
@overload
def register_catch_all(op: Any, kernel: K) -> K: ...
def register_catch_all(op: Any, kernel: Any = None) -> Any:
    """Fills a row: the kernel for one operator under every key without a cell of its own.

    Raises:
        DispatchError: the row is filled already; the message names both places.
    """
    if kernel is None:
        return lambda k: register_catch_all(op, k)
    site = _site_of(kernel)
    with _lock:
        targets = operators_of(op)
        for target in targets:
            _refuse_duplicate(f"register_catch_all({target.name})", target._catch_all, site)
        for target in targets:
            target._catch_all = _Entry(kernel, False, "row", site)
            target._cache.clear()
    return kernel


@overload
def register_fallback(key: DispatchKey) -> Callable[[K], K]: ...
@overload
def register_fallback(key: DispatchKey, kernel: K) -> K: ...
def register_fallback(key: DispatchKey, kernel: Any = None) -> Any:
    """Fills a column: the boxed kernel ``kernel(op, args, kwargs)`` for every operator of a key.

    Raises:
        DispatchError: the column is filled already; the message names both places.
    """
    if kernel is None:
        return lambda k: register_fallback(key, k)
    site = _site_of(kernel)
    with _lock:
        _refuse_duplicate(f"register_fallback({key})", _columns.get(key), site)
        _columns[key] = _Entry(kernel, True, "column", site)
        _forget_choices()
    return kernel


def _site_of(kernel: Any) -> str:
    code = getattr(kernel, "__code__", None)
    if code is None:
        return caller_site(3)
    return f"{code.co_filename}:{code.co_firstlineno}"


def redispatch(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Inside a kernel: calls the operator again, which goes on to the next key outwards.

    With a :class:`DispatchKeySet` before the arguments the kernel for exactly that set is
    called, and nothing is computed from the arguments.

    Example:
        >>> from tsfunc import dispatch
        >>> calls = []
        >>> Count = dispatch.DispatchKey.define("Count")
        >>> @dispatch.register_fallback(Count)
        ... def count(op, args, kwargs):
        ...     calls.append(op.name)
        ...     return dispatch.redispatch(op, *args, **kwargs)
        >>> triple = dispatch.Operator("doc::triple", native=lambda x: 3 * x)
        >>> with dispatch.include(Count):
        ...     _ = triple(torch.ones(2))
        >>> calls
        ['doc::triple']
    """
    (target,) = operators_of(op)
    if args and isinstance(args[0], DispatchKeySet):
        return target.redispatch(args[0], *args[1:], **kwargs)
    return target.call(args, kwargs, restore=True)


def _run_native(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The column of every backend: what torch itself, or the operator's maker, gave for it."""
    if op.native is None:
        keys = ", ".join(str(key) for key in op._cells) or "none"
        raise DispatchError(
            f"{op.name}({', '.join(type(a).__name__ for a in args)}): no backend kernel. "
            f"It has kernels for: {keys}. Register one for the arguments' backend, "
            f"or for all of them with Operator(name, native=function)."
        )
    return op.native(*args, **kwargs)


for _backend in BACKENDS:
    _columns[_backend] = _Entry(_run_native, True, "column", f"{__name__} (the operator's own)")
_columns[DispatchKey.BackendSelect] = _Entry(fallthrough, True, "column", __name__)
