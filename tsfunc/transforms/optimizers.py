"""Optimizers as functions of parameters, gradients and state, for use under all transforms."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from tsfunc import pytrees
from tsfunc.bridge.tracers.optimizer_state import make_state
from tsfunc.bridge.tracers.torch_settings import as_if_compiling
from tsfunc.types.values import tensor_advice
from tsfunc.user_code import folded_class, folding

__all__ = ["FunctionalOptimizer", "functional_optimizer"]


# The numbers in the states of torch's optimizers.
_NUMBERS: Final = frozenset({"step", "mu_product", "eta", "mu"})


@folded_class
class FunctionalOptimizer:
    """An optimizer without parameters and state of its own, made by :func:`functional_optimizer`.

    Example:
        >>> import torch
        >>> from tsfunc import functional_optimizer
        >>> sgd = functional_optimizer(torch.optim.SGD, lr=0.5)
        >>> params = {"w": torch.ones(2)}
        >>> params, state = sgd.step(params, {"w": torch.ones(2)}, sgd.init(params))
        >>> params
        {'w': tensor([0.5000, 0.5000])}

    Corresponds to ``optax.GradientTransformation`` for JAX.

    Attributes:
        cls: the class of torch's optimizer.
        options: its options.
    """

    def __init__(self, cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
        if not (isinstance(cls, type) and isinstance(options, Mapping)):
            raise TypeError(
                f"FunctionalOptimizer: expected a class of torch.optim and a dict of its options, "
                f"got {cls!r} and {options!r}."
            )
        single = {"foreach": False} if "foreach" in inspect.signature(cls).parameters else {}
        self.cls, self.options = cls, {**single, **options}

    def init(self, params: Any) -> Any:
        """Return the state before the first step.

        Args:
            params: a pytree of tensors.

        Returns:
            ``params`` with a dict of state in the place of each tensor; the dict is empty for an
            optimizer without state.
        """
        leaves, tree = pytrees.flatten(params)
        self._check_tensors("init", leaves, tree)
        copies = [_fresh_leaf(leaf) for leaf in leaves]
        optimizer = self._optimizer(copies, {})
        for copy in copies:
            copy.grad = torch.zeros_like(copy)
        with torch.no_grad(), as_if_compiling():
            make_state(optimizer)
        states = [self._complete(dict(optimizer.state[copy]), copy) for copy in copies]
        return tree.unflatten(states)

    def step(self, params: Any, grads: Any, state: Any, **options: Any) -> tuple[Any, Any]:
        """Return the parameters and the state after a step. The arguments stay unchanged.

        Args:
            params: a pytree of tensors.
            grads: their gradients, a pytree of the same structure; None leaves a tensor as it is.
            state: the result of ``init``, or of an earlier step.
            **options: other values of the optimizer's options, for this step. The learning rate of
                an optimizer that torch calls capturable (Adam and most others, not SGD) may be a
                tensor of one number, and so differ between the examples of a ``vmap``.

        Raises:
            TypeError: the optimizer has no such option.
            ValueError: ``grads`` or ``state`` has another structure than ``params``.
        """
        leaves, tree = pytrees.flatten(params)
        self._check_tensors("step", leaves, tree)
        gradients = self._like(tree, grads, "grads")
        states = self._like(tree, state, "state")
        for path, leaf, gradient, before in zip(
            tree.paths(), leaves, gradients, states, strict=True
        ):
            self._check(path, leaf, gradient, before)
        recorded = bool(self.options.get("differentiable"))
        new_params = [leaf.clone() if recorded else _fresh_leaf(leaf) for leaf in leaves]
        optimizer = self._optimizer(new_params, options)
        for leaf, gradient, before in zip(new_params, gradients, states, strict=True):
            leaf.grad = gradient if recorded or gradient is None else gradient.detach()
            if before:
                copies = {name: _copy_of_leaf(value, recorded) for name, value in before.items()}
                optimizer.state[leaf] = copies
        with as_if_compiling(), warnings.catch_warnings():
            # The copies of a differentiable step are not leaves, and have a .grad all the same.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
            optimizer.step()
        after = [dict(optimizer.state[leaf]) for leaf in new_params]
        results = new_params if recorded else [leaf.detach() for leaf in new_params]
        return tree.unflatten(results), tree.unflatten(after)

    def _optimizer(self, leaves: list[Any], options: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Return an optimizer of the parameters whose groups have the given options."""
        make: Any = self.cls
        optimizer: torch.optim.Optimizer = make(leaves, **self.options)
        for group in optimizer.param_groups:
            if "capturable" in group:  # it computes with tensors, and never with Python numbers
                group["capturable"] = True
            if unknown := options.keys() - group.keys():
                raise TypeError(
                    f"{self!r}.step: expected options among {', '.join(sorted(self.defaults))}, "
                    f"got {', '.join(sorted(unknown))}."
                )
            group.update(options)
        return optimizer

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The options with their values."""
        return self._optimizer([torch.zeros(1, 1)], {}).defaults

    def _complete(self, state: dict[str, Any], leaf: torch.Tensor) -> dict[str, Any]:
        """Return the state with the momentum of SGD, and its numbers in double precision.

        The first step of torch's SGD makes its momentum from the gradient. Adam computes
        ``1 - 0.999**step`` in Python, which has double precision.
        """
        state = {
            name: value.double() if name in _NUMBERS and isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }
        momentum = self.cls is torch.optim.SGD and self.options.get("momentum", 0)
        if momentum and not self.options.get("dampening", 0):
            return {**state, "momentum_buffer": torch.zeros_like(leaf).detach()}
        return state

    def _like(self, tree: Any, other: Any, name: str) -> list[Any]:
        try:
            leaves: list[Any] = tree.flatten_up_to(other)
        except ValueError:
            raise ValueError(
                f"functional_optimizer({self.cls.__name__}).step: {name} must have the structure "
                f"of params: expected {pytrees.structure_text(tree)}, got "
                f"{pytrees.structure_text(pytrees.structure_of(other))}."
            ) from None
        return leaves

    def _check_tensors(self, method: str, leaves: Sequence[Any], tree: Any) -> None:
        """Raise an error if a leaf of the parameters is not a tensor."""
        for path, leaf in zip(tree.paths(), leaves, strict=True):
            if not isinstance(leaf, torch.Tensor):
                at = "".join(f"[{entry!r}]" for entry in path)
                raise TypeError(
                    f"functional_optimizer({self.cls.__name__}).{method}: expected a tensor for "
                    f"params{at}, got {type(leaf).__name__}.{tensor_advice(leaf)}"
                )

    def _check(self, path: Any, param: Any, gradient: Any, state: Any) -> None:
        """Raise an error for a gradient or a state that is not one of its parameter."""
        at = "".join(f"[{entry!r}]" for entry in path)
        step = f"functional_optimizer({self.cls.__name__}).step"
        if not (gradient is None or isinstance(gradient, torch.Tensor)):
            raise TypeError(
                f"{step}: expected a tensor or None for grads{at}, got {type(gradient).__name__}. "
                f"The order of the arguments is params, grads, state."
            )
        if not isinstance(state, dict):
            raise TypeError(
                f"{step}: expected a dict, as init returns it, for state{at}, got "
                f"{type(state).__name__}. The order of the arguments is params, grads, state."
            )
        if gradient is not None and gradient.shape != param.shape:
            raise ValueError(
                f"{step}: expected grads{at} of shape {tuple(param.shape)}, as params{at} is, got "
                f"{tuple(gradient.shape)}."
            )

    def __repr__(self) -> str:
        set_options = {name: value for name, value in self.options.items() if name != "foreach"}
        options = "".join(f", {name}={value!r}" for name, value in set_options.items())
        return f"functional_optimizer({self.cls.__name__}{options})"


@folding("functional_optimizer")
def functional_optimizer(cls: type[torch.optim.Optimizer], **options: Any) -> FunctionalOptimizer:
    """Return an optimizer of torch as a pair of functions, whose state is a pytree.

    The optimizers of ``torch.optim`` keep their state, and write into parameters. Under ``vmap``,
    ``scan`` and other transforms, a training step is a function from parameters and state to new
    parameters and state.

    Args:
        cls: a class of ``torch.optim``, or another optimizer that is made from a list of
            parameters.
        options: the options of its constructor, as keyword arguments, such as ``lr``. With
            ``differentiable=True`` derivatives go through the steps: by the parameters, the
            gradients, the state, and a learning rate that is a tensor. Without it the results of
            a step are constants for derivatives, as for torch's optimizers.

    Returns:
        A :class:`FunctionalOptimizer` with ``init(params)``, which returns the state, and
        ``step(params, grads, state)``, which returns new parameters and state.

    Raises:
        TypeError: ``cls`` is not a class of optimizers; or its ``step`` needs a closure that it
            calls several times (``torch.optim.LBFGS``).

    Example:
        >>> import torch
        >>> from tsfunc import functional_optimizer, grad, scan, vmap
        >>> adam = functional_optimizer(torch.optim.Adam)
        >>> def train(lr, w):
        ...     def body(carry, _):
        ...         w, state = carry
        ...         grads = grad(lambda w: w.square().sum())(w)
        ...         return adam.step(w, grads, state, lr=lr), None
        ...     (w, _), _ = scan(body, (w, adam.init(w)), None, length=100)
        ...     return w
        >>> rates = torch.tensor([0.001, 0.1])
        >>> vmap(train, in_dims=(0, None))(rates, torch.ones(2)).abs().sum(1) < 0.1
        tensor([False,  True])

    Corresponds to the optimizers of optax (``init`` and ``update``) for JAX.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        name = type(cls).__name__
        optimizer = (
            f"an object of class {name}. Pass the class and its options: "
            f"functional_optimizer({name}, lr=0.1)"
        )
        raise TypeError(
            f"functional_optimizer: expected a class of optimizers, such as torch.optim.Adam, got "
            f"{optimizer if isinstance(cls, torch.optim.Optimizer) else repr(cls)}."
        )
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"functional_optimizer: {cls.__name__}.step needs a closure that it calls as often as "
            f"the values of the loss require; a function of gradients can't call it."
        )
    return FunctionalOptimizer(cls, options)


def _fresh_leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_()


def _copy_of_leaf(value: Any, recorded: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if recorded else value.detach().clone()
