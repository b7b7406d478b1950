"""``custom_vmap`` and ``sequential_vmap``: functions with batching rules of the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.bridge.grad.custom_function import trace_of
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.tracers.boundaries import boundary, check_function
from tsfunc.errors import CustomRuleError
from tsfunc.transforms.abstract_eval import eval_shape
from tsfunc.transforms.argnums import with_replaced
from tsfunc.transforms.control.scan import map as map_examples
from tsfunc.transforms.custom_batching import call_rule, checked_result
from tsfunc.transforms.custom_rules import Result, Rule, RuleCall, RuleFunction, apply
from tsfunc.types import MetaTensorType
from tsfunc.user_code import folded_class, folding


@folded_class
class custom_vmap(Rule[Result]):
    """A function with a batching rule of the user.

    Args:
        func: takes and returns pytrees of tensors.

    ``def_vmap(rule)`` sets the rule. Under ``vmap``, ``rule(axis_size, in_batched, *args)`` is
    called with the number of examples, a pytree of bools for each argument (True for batched
    tensors), and the arguments, with the batch dim first. The rule returns the result for all
    examples and a pytree of bools, True for the batched parts of the result, which have the batch
    dim first. Derivatives inside of the ``vmap`` are derivatives of the rule.

    Raises:
        UndefinedRuleError: the function is called before a rule is set.
        CustomRuleError: the rule does not return a pair of a result and bools, or the result has
            another structure than the function's.

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

    Corresponds to ``jax.custom_batching.custom_vmap``; differentiable in both modes.
    """

    label = "custom_vmap"

    def __init__(self, func: Callable[..., Result]) -> None:
        super().__init__(func)
        self.rule: Callable[..., Any] | None = None
        self._structures: dict[Any, Any] = {}

    def def_vmap(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Set the rule; can be used as a decorator."""
        self.rule = rule
        return rule

    def functions(self) -> Sequence[Any]:
        return (self.func, self.rule)

    @boundary("custom_vmap")
    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        args = self.positional(args, kwargs)
        if self.rule is None:
            raise self.missing("def_vmap")
        return call_rule(self._what, self.rule, args, self.on_unbatched, self._compare)

    @property
    def _what(self) -> str:
        return f"custom_vmap: the rule of {self.name}"

    def checked(self, returned: Any, size: Any) -> tuple[list[Any], list[bool]]:
        """Return the rule's result for ``size`` examples, flattened, and a flag for each leaf."""
        return checked_result(self._what, returned, size)

    def on_unbatched(self, *args: Any) -> Any:
        """Call the function on unbatched arguments; a trace records the call with its rule."""
        call, sizes, operands = self.prepare_call(args)
        if trace_of(operands) is None:
            return self.func(*args)
        return call.result(apply(self.kind, call, sizes, *operands))

    def _compare(self, args: Any, out: Any) -> None:
        """Check that the rule returns the same structure as the function.

        The structure is found without data, once for each set of argument types. A function that
        needs data is not checked.
        """
        if current_trace() is not None:
            return
        leaves, tree = pytrees.flatten(args)
        try:
            key = tree, tuple(_leaf_key(leaf) for leaf in leaves)
            is_known = key in self._structures
        except TypeError:  # an argument without a hash
            return
        if not is_known:
            if len(self._structures) >= _MOST_KNOWN:
                self._structures.clear()
            self._structures[key] = self._structure(leaves, tree)
        got = pytrees.structure_of(out)
        if self._structures[key] in (None, got):
            return
        expected = self._structures[key] = self._structure(leaves, tree)  # it may have changed
        if expected not in (None, got):
            raise CustomRuleError(
                f"{self._what}: expected a result of the function's structure, "
                f"{pytrees.structure_text(expected)}, got {pytrees.structure_text(got)}."
            )

    def _structure(self, leaves: Sequence[Any], tree: Any) -> Any:
        """Return the structure of the function's result for such arguments; None if unknown."""
        samples = [
            MetaTensorType(list(x.shape), dtype=x.dtype, device=x.device)
            if isinstance(x, torch.Tensor)
            else x
            for x in leaves
        ]
        try:
            return pytrees.structure_of(eval_shape(self.func, *pytrees.unflatten(tree, samples)))
        except Exception:  # an error of the user's function, which needs more than types
            return None


# The largest number of argument types whose structures are stored.
_MOST_KNOWN = 64


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    hash(leaf)
    return type(leaf), leaf


class _UnbatchedCall(RuleFunction):
    """A call in a trace; when the program runs, it calls the user's function again."""

    @classmethod
    def run_recorded(cls, call: RuleCall, sizes: Sequence[Any], *operands: Any) -> tuple[Any, ...]:
        with call.substituting_consts(operands):
            fixed, rest = call.arguments(sizes, operands)
            leaves = pytrees.leaves_of(call.rule(*call.rule.whole(fixed, rest)))
        return tuple(x for x in leaves if isinstance(x, torch.Tensor))


custom_vmap.kind = _UnbatchedCall


@folding("sequential_vmap")
def sequential_vmap(func: Callable[..., Result]) -> custom_vmap[Result]:
    """Return a function that ``vmap`` calls once per example.

    Args:
        func: takes and returns pytrees of tensors.

    Returns:
        A function of the same arguments and with the same results, of any shapes and dtypes.
        Under ``vmap`` it is a :func:`tsfunc.map` over the batched arguments: one node in a
        program, with the memory of one call. Unbatched arguments are the same for all examples.

    Raises:
        TypeError: under ``vmap``, a result is not a tensor or a number.

    Example:
        >>> import torch
        >>> from tsfunc import sequential_vmap, vmap
        >>> @sequential_vmap
        ... def step(x, scale):
        ...     assert x.dim() == 0
        ...     return x * scale
        >>> vmap(step, in_dims=(0, None))(torch.ones(3), torch.tensor(2.))
        tensor([2., 2., 2.])

    Corresponds to ``jax.custom_batching.sequential_vmap``.
    """
    check_function("sequential_vmap", func)
    function = custom_vmap(func)

    @function.def_vmap
    def rule(axis_size: int, in_batched: Any, *args: Any) -> tuple[Any, bool]:
        leaves, tree = pytrees.flatten(args)
        flags = pytrees.leaves_of(tuple(in_batched))
        positions = [i for i, flag in enumerate(flags) if flag]

        def one(rows: Sequence[Any]) -> Any:
            return func(*pytrees.unflatten(tree, with_replaced(leaves, positions, rows)))

        return map_examples(one, [leaves[i] for i in positions]), True

    return function
