"""The table: operators are rows, dispatch keys are columns.

NOTE [precedence]
For an operator and a key the kernel is the first of these that is registered:

1. the cell: ``register(op, key)``;
2. the row: ``register_catch_all(op)``;
3. the column: ``register_fallback(key)``, boxed: it gets ``(op, args, kwargs)``.

If that kernel is ``fallthrough``, the next lower bit of the key set is tried. A key without any of
the three is an error. Every key set has ``BackendSelect``, which falls through unless the operator
has a cell for it. A row does not count as one: otherwise the row would come before the cells of the
backends. If no key is left (a call without tensor arguments), the row's kernel runs.

NOTE [state of a kernel]
A kernel of level 0 runs with its own key and all higher bits excluded, except backends. A kernel
of a level runs under the state that the level captured (NOTE [state captured by a level]),
likewise without its own bit and higher ones. Calling the operator again therefore reaches the next
key outwards, and a level that is entered inside a kernel has no excluded keys but the user's. The
kernel of a backend ends a call: it may call other operators, which reach their backends' kernels,
and factories, which are dispatched by BackendSelect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, overload

from tsfunc import hooks
from tsfunc.dispatch import messages
from tsfunc.dispatch.keys import (
    BACKEND_BITS,
    BACKENDS,
    WIDTH,
    DispatchKey,
    DispatchKeySet,
    backends_of_arguments,
    caller_site,
    keys_of_arguments,
    split_bit,
)
from tsfunc.dispatch.state import Level, State, global_set, tls, using
from tsfunc.errors import DispatchError, EscapedTracerError

Kernel = Callable[..., Any]
K = TypeVar("K", bound=Kernel)


class _Fallthrough:
    """The kernel that passes a call on to the next key of the set."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise DispatchError("fallthrough marks a key that is passed over; it can't be called.")

    def __repr__(self) -> str:
        return "fallthrough"


fallthrough: Final = _Fallthrough()


class Entry:
    """A kernel in the table, and the site of its registration.

    ``kind`` is "cell", "row" or "column"; a boxed kernel is called as ``(op, args, kwargs)``.
    """

    __slots__ = ("boxed", "kernel", "kind", "site")

    def __init__(self, kernel: Kernel, boxed: bool, kind: str, site: str) -> None:
        self.kernel, self.boxed, self.kind, self.site = kernel, boxed, kind, site


# A row's kernel that runs because no key is left runs under the state of a backend's kernel.
_NO_KEY_LEFT: Final = DispatchKey.OtherBackend.priority

_lock = threading.RLock()
_columns: dict[DispatchKey, Entry] = {}
_operators: dict[str, Operator] = {}


class Operator:
    """A row of the table; calling it dispatches.

    Args:
        name: ``"namespace::name"``, unique among all operators.
        native: the function that every backend without a cell runs.

    Attributes:
        outward: the callable by which a level's kernel continues at the next outer level, called on
            the values inside of the level's tracers. By default the operator itself; a subclass may
            set another one.

    Raises:
        DispatchError: the name is taken.

    Example:
        >>> import torch
        >>> from tsfunc.dispatch import DispatchKey, Operator, register
        >>> double = Operator("doc::double")
        >>> @register(double, DispatchKey.CPU)
        ... def double_cpu(x):
        ...     return x + x
        >>> double(torch.ones(2))
        tensor([2., 2.])
    """

    __slots__ = ("_cache", "_catch_all", "_cells", "name", "native", "outward", "site")

    def __init__(self, name: str, native: Kernel | None = None) -> None:
        self.name = name
        self.native = native
        self.outward: Kernel = self
        self.site = caller_site()
        self._cells: dict[DispatchKey, Entry] = {}
        self._catch_all: Entry | None = None
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

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of the operator's own: those registered for it, and ``native``."""
        entries = (*self._cells.values(), self._catch_all)
        kernels = tuple(entry.kernel for entry in entries if entry is not None)
        return kernels if self.native is None else (*kernels, self.native)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = tls.state
        keys, level = keys_of_arguments(args, kwargs)
        if level is not None and level.autograd and level.alive and level.key_bit & state.mask:
            return self.run_on_backend(args, kwargs)
        return self._run((keys | state.include | global_set.bits) & state.mask, level, args,
                         kwargs, True)  # fmt: skip

    def run_on_backend(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the backend's kernel on a level's tracers, for a level that records what it calls.

        A level whose autograd records does not see what the kernel of its key computes on the
        values inside, and a trace has no name for an operator that torch does not have. Both record
        the operators that the backend's kernel calls, one by one.
        """
        keys = backends_of_arguments(args, kwargs)
        kernel, boxed, _, _ = self._cache.get(keys) or self._choose(keys, args, kwargs)
        state, recording = tls.state, keys_of_arguments(args, kwargs)[0]
        with using(state.replace(backend_operator=self, backend_keys=recording)):
            return kernel(self, args, kwargs) if boxed else kernel(*args, **kwargs)

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], restore: bool = False) -> Any:
        """Dispatch a call; ``restore`` restores all that a level captured, not only this state."""
        state = tls.state
        keys, level = keys_of_arguments(args, kwargs)
        return self._run((keys | state.include | global_set.bits) & state.mask, level, args,
                         kwargs, restore)  # fmt: skip

    def redispatch(self, keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel for exactly this key set: no key is added or masked."""
        level = keys_of_arguments(args, kwargs)[1]
        return self._run(keys.bits, level, args, kwargs, True)

    def run_at(self, level: Level, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a level's kernel whatever the arguments are: for calls without a tensor argument."""
        keys, inner = keys_of_arguments(args, kwargs)
        if inner is not None and inner.depth > level.depth:
            level = inner
        return self._run(keys | level.key_bit, level, args, kwargs, True)

    def run_key(
        self, key: DispatchKey, level: Level, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the kernel of another key of a level, from within a kernel of that level."""
        bits = 1 << (level.depth * WIDTH + key.priority)
        return self._run(bits, level, args, kwargs, False)

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
            entry = self._choose(bits, args, kwargs)
        kernel, boxed, bit, depth = entry
        previous = tls.state
        if depth:
            if level is None or level.depth != depth:
                level = level_at(depth, level, previous)
                if level is None:
                    raise DispatchError(messages.no_level(self.name, depth, bits))
            if not level.alive:
                raise EscapedTracerError(messages.escape_message(self.name, level))
            tls.state = state = level.kernel_state(bit)
        else:
            ends = BACKEND_BITS >> bit & 1
            tls.state = state = (
                previous.backend_state(self, bit) if ends else previous.kernel_state(bit)
            )
        if state.recorder is not None:
            kernel, boxed = state.recorder.with_recording(self, bit, level, kernel, boxed), True
        try:
            if restore and depth:
                assert level is not None
                with level.guard():
                    return kernel(self, args, kwargs) if boxed else kernel(*args, **kwargs)
            return kernel(self, args, kwargs) if boxed else kernel(*args, **kwargs)
        finally:
            tls.state = previous

    def _choose(
        self, bits: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Kernel, bool, int, int]:
        """Return the kernel for a key set, its boxed flag, bit and depth; cached.

        The depth is 0 for a kernel that does not belong to a level.
        """
        rest = DispatchKeySet.from_bits(bits)._finite("dispatch on")
        # No registration may come between the lookup and the insertion into the cache.
        with _lock:
            while rest:
                bit = rest.bit_length() - 1
                entry = self.entry(split_bit(bit)[1])
                if entry is None:
                    raise DispatchError(messages.no_kernel(self.name, bit, bits))
                if entry.kernel is not fallthrough:
                    chosen = (entry.kernel, entry.boxed, bit, bit // WIDTH)
                    self._cache[bits] = chosen
                    return chosen
                rest ^= 1 << bit
            row = self._catch_all
            if row is not None and row.kernel is not fallthrough:
                chosen = (row.kernel, row.boxed, _NO_KEY_LEFT, 0)
                self._cache[bits] = chosen
                return chosen
        raise DispatchError(messages.no_key_left(self.name, bits, args, kwargs))

    def entry(self, key: DispatchKey) -> Entry | None:
        """Return the entry for a key: the cell, else the row, else the column."""
        row = self._catch_all if key is not DispatchKey.BackendSelect else None
        return self._cells.get(key) or row or _columns.get(key)


def level_at(depth: int, inner: Level | None, state: State) -> Level | None:
    """Return the level at a depth: ``inner``, a level around it, or an active one; else None."""
    levels = state.levels
    if inner is not None and inner.depth >= depth:
        levels = (*inner.outer.levels, inner)
    return next((level for level in levels if level.depth == depth), None)


def operators_of(op: Any) -> Sequence[Operator]:
    """Return the rows of an Operator, of a name, or of an object that a resolver resolves."""
    if isinstance(op, Operator):
        return (op,)
    if isinstance(op, str) and op in _operators:
        return (_operators[op],)
    for resolve in hooks.resolve_operators.functions:
        rows: Sequence[Operator] | None = resolve(op)
        if rows is not None:
            return rows
    raise DispatchError(
        f"expected an Operator, the name of one, or a torch operator (torch.ops.aten.add.Tensor, "
        f"torch.ops.aten.add, torch.add, 'aten::add.Tensor'), got {op!r}"
    )


def operator_for(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Operator:
    """Return the row that a call means: of several overloads, the one that takes the arguments."""
    rows = operators_of(op)
    if len(rows) == 1:
        return rows[0]
    for choose in hooks.choose_operator.functions:
        chosen: Operator | None = choose(op, args, kwargs)
        if chosen is not None:
            return chosen
    raise DispatchError(
        f"{op!r} stands for {len(rows)} operators, and "
        f"{messages.call_summary('it', args, kwargs)} does not say which: "
        f"{', '.join(o.name for o in rows)}. Name the one that is meant."
    )


def find_operator(name: str) -> Operator | None:
    """Return the operator with a name; None if there is none."""
    return _operators.get(name)


def _refuse_duplicate(what: str, old: Entry | None, site: str) -> None:
    if old is not None:
        raise DispatchError(
            f"{what}: a kernel is there already, registered at {old.site}; this one is at {site}. "
            f"Remove one of them."
        )


def _fill(op: Any, key: DispatchKey | None, kernel: Kernel) -> Kernel:
    """Fill the cell of each operator for a key, or its row if the key is None."""
    site = caller_site()
    with _lock:
        targets = operators_of(op)
        for target in targets:
            if key is None:
                _refuse_duplicate(f"register_catch_all({target.name})", target._catch_all, site)
            else:
                _refuse_duplicate(f"register({target.name}, {key})", target._cells.get(key), site)
        for target in targets:
            if key is None:
                target._catch_all = Entry(kernel, False, "row", site)
            else:
                target._cells[key] = Entry(kernel, False, "cell", site)
            target._cache.clear()
            for listener in hooks.kernel_registered.functions:
                listener(target, key)
    return kernel


@overload
def register(op: Any, key: DispatchKey) -> Callable[[K], K]: ...
@overload
def register(op: Any, key: DispatchKey, kernel: K) -> K: ...
def register(op: Any, key: DispatchKey, kernel: Any = None) -> Any:
    """Fill a cell: the kernel for one operator and one key, called as ``kernel(*args, **kwargs)``.

    Without ``kernel`` the function is a decorator. ``op`` is an :class:`Operator`, a torch
    operator (an overload; or an overload packet or a function such as ``torch.sin``, which stand
    for all overloads of that name), or a name. ``kernel=fallthrough`` passes the key over.

    Raises:
        DispatchError: the cell is filled already; the message names both registrations.
    """
    return (lambda k: _fill(op, key, k)) if kernel is None else _fill(op, key, kernel)


@overload
def register_catch_all(op: Any) -> Callable[[K], K]: ...
@overload
def register_catch_all(op: Any, kernel: K) -> K: ...
def register_catch_all(op: Any, kernel: Any = None) -> Any:
    """Fill a row: the kernel for one operator under every key without a cell of its own.

    ``BackendSelect`` needs a cell of its own. A call without any key runs the row's kernel.

    Raises:
        DispatchError: the row is filled already; the message names both registrations.
    """
    return (lambda k: _fill(op, None, k)) if kernel is None else _fill(op, None, kernel)


@overload
def register_fallback(key: DispatchKey) -> Callable[[K], K]: ...
@overload
def register_fallback(key: DispatchKey, kernel: K) -> K: ...
def register_fallback(key: DispatchKey, kernel: Any = None) -> Any:
    """Fill a column: the boxed kernel ``kernel(op, args, kwargs)`` of a key for every operator.

    Raises:
        DispatchError: the column is filled already; the message names both registrations.
    """
    if kernel is None:
        return lambda k: register_fallback(key, k)
    site = caller_site()
    with _lock:
        _refuse_duplicate(f"register_fallback({key})", _columns.get(key), site)
        _columns[key] = Entry(kernel, True, "column", site)
        for op in _operators.values():
            op._cache.clear()
    return kernel


def redispatch(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the operator again from inside a kernel, which continues at the next key outwards.

    With a :class:`DispatchKeySet` before the arguments, the call runs the kernel for exactly that
    set, and the arguments contribute no keys. The kernel of a backend is the last one: ``op(...)``
    in it is a new call, and ``redispatch`` of its operator is an error.

    Raises:
        DispatchError: no key is left to dispatch to.

    Example:
        >>> import torch
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
    if args and isinstance(args[0], DispatchKeySet):
        return operator_for(op, args[1:], kwargs).redispatch(*args, **kwargs)
    operator = operator_for(op, args, kwargs)
    state = tls.state
    if state.backend_operator is operator:
        keys = (keys_of_arguments(args, kwargs)[0] | state.include) & state.mask
        if not keys & ~(BACKEND_BITS | state.backend_keys):
            raise DispatchError(messages.redispatched_by_backend(operator.name, args, kwargs))
    return operator(*args, **kwargs)


def _run_native(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Column of every backend: run the native function of torch or of the operator's maker."""
    if op.native is None:
        keys = ", ".join(str(key) for key in op._cells) or "none"
        raise DispatchError(
            f"{messages.call_summary(op.name, args, kwargs)}: no backend kernel. "
            f"It has kernels for: {keys}. Register one for the arguments' backend, "
            f"or for all of them with Operator(name, native=function)."
        )
    if op.native is op.outward:
        bits, level = keys_of_arguments(args, kwargs)
        if level is not None:  # torch would bring the call of a tracer back here, without end
            raise DispatchError(messages.no_key_left(op.name, bits & tls.state.mask, args, kwargs))
    return op.native(*args, **kwargs)


for _backend in BACKENDS:
    _columns[_backend] = Entry(_run_native, True, "column", f"{__name__} (the operator's own)")
_columns[DispatchKey.BackendSelect] = Entry(fallthrough, True, "column", __name__)
