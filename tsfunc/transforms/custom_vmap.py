"""``custom_vmap`` and ``sequential_vmap``: functions whose batching a user writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.control.bodies import current_trace
from tsfunc.bridge.grad.custom_function import trace_of
from tsfunc.errors import CustomRuleError
from tsfunc.transforms.arguments import with_places
from tsfunc.transforms.control.scan import map as map_examples
from tsfunc.transforms.custom_batching import call_rule, checked_result
from tsfunc.transforms.custom_rules import Call, Rule, RuleFunction, apply
from tsfunc.transforms.outlines import eval_shape
from tsfunc.types import MetaTensorType


class custom_vmap(Rule):
    """A function whose batching is the user's.

    Args:
        func: takes and returns pytrees of tensors.

    ``def_vmap(rule)`` gives the rule: ``rule(axis_size, in_batched, *args)`` is called under
    ``vmap`` with the number of examples, a pytree of bools for each argument that says which
    tensors are batched, and the arguments, batched ones with the examples along their first dim.
    It returns the result for all examples, and a pytree of bools for what of it is batched, along
    the first dim. Derivatives inside of the ``vmap`` are those of the rule.

    Raises:
        UndefinedRuleError: at a call that has no rule.
        CustomRuleError: the rule does not return what it must: a pair, of a result of the
            structure that the function returns, and of bools.

    Example:
        >>> import torch
        >>> from tsfunc import custom_vmap, vmap
        >>> @custom_vmap
        ... def matvec(a, x):
        ...     return a @ x
        >>> @matvec.def_vmap
        ... def rule(axis_size, in_batched, a, x):
        ...     if in_batched == [False, True]:
        ...         return x @ a.T, True
        ...     return torch.func.vmap(torch.mv)(a, x.expand(axis_size, -1)), True
        >>> vmap(matvec, in_dims=(None, 0))(torch.eye(2), torch.ones(3, 2)).shape
        torch.Size([3, 2])

    As ``jax.custom_batching.custom_vmap``, and differentiable in both modes.
    """

    what = "custom_vmap"

    def __init__(self, func: Callable[..., Any]) -> None:
        super().__init__(func)
        self.rule: Callable[..., Any] | None = None
        self._structures: dict[Any, Any] = {}

    def def_vmap(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Gives the rule; can be used as a decorator."""
        self.rule = rule
        return rule

    def functions(self) -> Sequence[Any]:
        return (self.func, self.rule)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = self.positional(args, kwargs)
        if self.rule is None:
            raise self.missing("def_vmap")
        return call_rule(self._what, self.rule, args, self.alone, self._compare)

    @property
    def _what(self) -> str:
        return f"custom_vmap: the rule of {self.name}"

    def checked(self, found: Any, size: Any) -> tuple[list[Any], list[bool]]:
        """What the rule has returned for so many examples, flat, and what of it is batched."""
        return checked_result(self._what, found, size)

    def alone(self, *args: Any) -> Any:
        """A call where nothing is batched; in a program it keeps the rule, for vmaps of that."""
        call, sizes, operands = self.prepared(args)
        if trace_of(operands) is None:
            return self.func(*args)
        return call.result(apply(self.kind, call, sizes, *operands))

    def _compare(self, args: Any, out: Any) -> None:
        """Checks that the rule returns the structure that the function does.

        Which that is, is found without data, once for arguments of the same types; of functions
        that need data nothing is known.
        """
        if current_trace() is not None:
            return
        leaves, tree = pytrees.flatten(args)
        try:
            key = tree, tuple(_key(leaf) for leaf in leaves)
            known = key in self._structures
        except TypeError:  # an argument without a hash
            return
        if not known:
            if len(self._structures) >= _MOST_KNOWN:
                self._structures.clear()
            self._structures[key] = self._structure(leaves, tree)
        got = pytrees.structure_of(out)
        if self._structures[key] in (None, got):
            return
        expected = self._structures[key] = self._structure(leaves, tree)  # it may be another by now
        if expected not in (None, got):
            raise CustomRuleError(
                f"{self._what} must return a result of the structure that the function returns, "
                f"{expected}, got {got}."
            )

    def _structure(self, leaves: Sequence[Any], tree: Any) -> Any:
        """What the function returns for arguments of such types, None where that is not known."""
        given = [
            MetaTensorType(list(x.shape), dtype=x.dtype, device=x.device)
            if isinstance(x, torch.Tensor)
            else x
            for x in leaves
        ]
        try:
            return pytrees.structure_of(eval_shape(self.func, *pytrees.unflatten(tree, given)))
        except Exception:  # the user's own: it asks for more than a type
            return None


# For how many types of arguments a function's structure is remembered.
_MOST_KNOWN = 64


def _key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    hash(leaf)
    return type(leaf), leaf


class _Alone(RuleFunction):
    """A call in a trace, which is the user's call again when the program runs."""

    @classmethod
    def called(cls, call: Call, sizes: Sequence[Any], *operands: Any) -> tuple[Any, ...]:
        with call.seeing(operands):
            fixed, rest = call.arguments(sizes, operands)
            found = pytrees.leaves_of(call.rule(*call.rule.whole(fixed, rest)))
        return tuple(x for x in found if isinstance(x, torch.Tensor))


custom_vmap.kind = _Alone


def sequential_vmap(func: Callable[..., Any]) -> custom_vmap:
    """A function that ``vmap`` calls with one example after the other.

    Args:
        func: takes and returns pytrees of tensors.

    Returns:
        A function of the same arguments. Under ``vmap`` it is a :func:`tsfunc.map`: one node in a
        program, and no more memory than one call takes; what is not batched is the same for all
        examples.

    Example:
        >>> import torch
        >>> from tsfunc import sequential_vmap, vmap
        >>> @sequential_vmap
        ... def step(x, scale):
        ...     assert x.dim() == 0
        ...     return x * scale
        >>> vmap(step, in_dims=(0, None))(torch.ones(3), torch.tensor(2.))
        tensor([2., 2., 2.])

    As ``jax.custom_batching.sequential_vmap``.
    """
    made = custom_vmap(func)

    @made.def_vmap
    def rule(axis_size: int, in_batched: Any, *args: Any) -> tuple[Any, bool]:
        leaves, tree = pytrees.flatten(args)
        flags = pytrees.leaves_of(tuple(in_batched))
        places = [i for i, flag in enumerate(flags) if flag]

        def one(rows: Sequence[Any]) -> Any:
            return func(*pytrees.unflatten(tree, with_places(leaves, places, rows)))

        return map_examples(one, [leaves[i] for i in places]), True

    return made
