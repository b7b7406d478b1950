"""What functions with rules of the user's have in common: a call's arguments, and its checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.autograd import tangents_here
from tsfunc.bridge.bodies import current_trace
from tsfunc.bridge.tracer import Tracer
from tsfunc.bridge.tracing import SYMBOLIC
from tsfunc.transforms.vmap_spec import name_of


@dataclass(frozen=True)
class Result:
    """What is known of a result's tensor when a rule is asked for its derivative."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def smooth(self) -> bool:
        """Whether it is of a type that has derivatives."""
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass(eq=False)
class Call:
    """A call's arguments apart: the tensors, and what they stand among."""

    function: Any
    leaves: list[Any]
    tree: Any
    places: list[int]
    out_tree: Any = None
    out_places: tuple[int, ...] = ()
    out_leaves: tuple[Any, ...] = ()
    results: tuple[Result, ...] = ()
    sized: tuple[int, ...] = ()
    fixed_sized: tuple[int, ...] = ()

    def taking(self, sizes: Sequence[Any]) -> Call:
        """The call, with the sizes of named dims among its arguments as they are now.

        In a program they are others each time, and so arguments of the ``autograd.Function``.
        """
        for place, size in zip(self.sized, sizes, strict=False):
            self.leaves[place] = size
        if self.fixed_sized:
            rule, fixed = self.function
            leaves, tree = pytrees.flatten(fixed)
            for place, size in zip(self.fixed_sized, sizes[len(self.sized) :], strict=True):
                leaves[place] = size
            self.function = rule, pytrees.unflatten(tree, leaves)
        return self

    def arguments(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments with other tensors in the places of theirs."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        found: tuple[Any, ...] = pytrees.unflatten(self.tree, leaves)
        return found

    def kept(self, out: Any) -> tuple[Any, ...]:
        """The tensors of a result; its structure is remembered."""
        leaves, self.out_tree = pytrees.flatten(out)
        self.out_places = tuple(
            i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)
        )
        tensors = tuple(leaves[i] for i in self.out_places)
        self.results = tuple(Result(x.shape, x.dtype) for x in tensors)
        self.out_leaves = tuple(None if isinstance(x, torch.Tensor) else x for x in leaves)
        return tensors

    def result(self, tensors: Sequence[Any]) -> Any:
        """A result of the remembered structure."""
        leaves = list(self.out_leaves)
        for place, tensor in zip(self.out_places, tensors, strict=True):
            leaves[place] = tensor
        return pytrees.unflatten(self.out_tree, leaves)

    def flat_tangents(self, tangents: Sequence[Any], primals: Sequence[Any]) -> list[Any]:
        """Zeros where there is no tangent."""
        return [
            torch.zeros_like(x) if t is None else t for t, x in zip(tangents, primals, strict=True)
        ]


def apart(function: Any, args: tuple[Any, ...]) -> tuple[Call, tuple[Any, ...], list[torch.Tensor]]:
    """A call, the sizes of named dims among its arguments, and the tensors."""
    leaves, tree = pytrees.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in places]
    rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    fixed = pytrees.leaves_of(function[1])
    call = Call(function, rest, tree, places)
    call.sized = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, SYMBOLIC))
    call.fixed_sized = tuple(i for i, leaf in enumerate(fixed) if isinstance(leaf, SYMBOLIC))
    sizes = (*(leaves[i] for i in call.sized), *(fixed[i] for i in call.fixed_sized))
    return call, sizes, tensors


class Rule:
    """What the three have in common: a function, and arguments that it is not mapped over."""

    what = "custom_rule"

    def __init__(
        self,
        func: Callable[..., Any],
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Sequence[str] = (),
    ) -> None:
        functools.update_wrapper(self, func, updated=())
        self.func = func
        self.name = name_of(func)
        try:
            self.signature: inspect.Signature | None = inspect.signature(func)
        except (TypeError, ValueError):  # of a builtin
            self.signature = None
        numbers = [nondiff_argnums] if isinstance(nondiff_argnums, int) else [*nondiff_argnums]
        names = [nondiff_argnames] if isinstance(nondiff_argnames, str) else [*nondiff_argnames]
        known = [] if self.signature is None else [*self.signature.parameters]
        for name in names:
            if name not in known:
                raise ValueError(
                    f"{self.what}: {self.name} has no parameter {name!r}, which nondiff_argnames "
                    f"names; its parameters are {', '.join(known) or 'not known'}."
                )
        places = {*numbers, *(known.index(name) for name in names)}
        self.nondiff_argnums = tuple(sorted(places))

    def positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments by position, which is how the rules get them, defaults included."""
        if self.signature is None:
            if kwargs:
                raise TypeError(
                    f"{self.what}: {self.name} has no signature by which the arguments "
                    f"{', '.join(kwargs)} could be given a position. Give them by position."
                )
            return args
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        without = [name for name in bound.kwargs if name in kwargs]
        if without:
            raise TypeError(
                f"{self.what}: the rule of {self.name} gets all arguments by position, which "
                f"{', '.join(without)} can't be given. Make them ordinary parameters."
            )
        return bound.args

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def fixed(self, args: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]]:
        """The arguments that are not differentiated, and the others."""
        fixed = {n % len(args) for n in self.nondiff_argnums} if args else set()
        return [args[i] for i in sorted(fixed)], tuple(
            arg for i, arg in enumerate(args) if i not in fixed
        )

    def whole(self, fixed: Sequence[Any], rest: Sequence[Any]) -> tuple[Any, ...]:
        """All arguments again."""
        places = {n % (len(fixed) + len(rest)) for n in self.nondiff_argnums}
        remaining, kept = iter(rest), iter(fixed)
        count = len(fixed) + len(rest)
        return tuple(next(kept if i in places else remaining) for i in range(count))

    def missing(self, method: str) -> RuntimeError:
        return RuntimeError(
            f"{self.what}: {self.name} has no rule yet. Give it one with @{self.name}.{method}."
        )


def apply(function: Any, *args: Any) -> Any:
    """``Function.apply``, which torch does not annotate."""
    return function.apply(*args)


def structure_error(what: str, expected: Any, got: Any) -> TypeError:
    return TypeError(
        f"{what} must have the structure {pytrees.structure_of(expected)}, got "
        f"{pytrees.structure_of(got)}."
    )


def is_differentiated(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether somebody may differentiate by one of the tensors, at whatever level; a trace may."""
    if tangents_here() or current_trace() is not None:
        return True
    return torch.is_grad_enabled() and any(_is_recorded(x) for x in tensors)


def _is_recorded(value: Any) -> bool:
    while isinstance(value, torch.Tensor):
        if value.requires_grad:
            return True
        value = getattr(value, "value", None) if isinstance(value, Tracer) else None
    return False


def check_alike(what: str, got: Sequence[Any], want: Sequence[Any]) -> None:
    """Raises where tensors are not of the shapes and types that they must have; None is any."""
    for value, like in zip(got, want, strict=True):
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{what} must be a tensor, or None for zeros; got {value!r}.")
        if value.shape != like.shape or value.dtype != like.dtype:
            raise TypeError(
                f"{what} must be of {like.dtype} and of shape {tuple(like.shape)}, got "
                f"{value.dtype} of shape {tuple(value.shape)}."
            )
