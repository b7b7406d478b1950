"""The specialized function of a user, and the contracts that its calls must satisfy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tsfunc.bridge.trace.backends import Backend
from tsfunc.bridge.tracers.user_code import implementation
from tsfunc.errors import DescriptorViolation
from tsfunc.program.closure.guard_builder import Closure, is_container, is_instance
from tsfunc.types import Bindings, CompiledDescriptors, Descriptors
from tsfunc.types.grammar import Descriptor, TSTensor, Value, children_of_type
from tsfunc.types.signatures import takes_any_keyword


@dataclass(frozen=True)
class Target:
    """A function that is specialized.

    Attributes:
        func: the function.
        name: its name in errors and programs.
        signature: its parameters.
        contracts: the sets of descriptors that a call may satisfy, narrower ones first.
        closure: the treatment of values that it reads beyond its arguments: NOTE [closures].
        backend: compiles its programs; None: they run as Python.
        backend_name: the user's name of the backend.
    """

    func: Callable[..., Any]
    name: str
    signature: inspect.Signature
    contracts: tuple[CompiledDescriptors, ...]
    closure: Closure = "guard"
    backend: Backend | None = None
    backend_name: str = "python"

    @functools.cached_property
    def sees_keywords(self) -> bool:
        """True if the function sees the order of its keyword arguments."""
        return takes_any_keyword(self.func)

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by parameter.

        Raises:
            TypeError: the function does not accept such a call.
        """
        try:
            return dict(self.signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise TypeError(f"{self.name}{self.signature}: {error}") from None

    def refused_by(
        self, contract: CompiledDescriptors | None, any_grad: bool = False
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], bool] | None:
        """Return a function that is True for calls that pass a guard, but have to be refused.

        A program refuses a call that satisfies a narrower contract, and a call that breaks all
        contracts. The guard checks types, sizes and attributes; the function checks the rest: a
        tensor or an object that a contract promises, and the class of a tensor.

        Args:
            contract: the contract that the program was made under; None for a program of a file.
            any_grad: whether the guard accepts tensors with any ``requires_grad``.

        Returns:
            A function of args and kwargs; None if the program never refuses a call.
        """
        own = None if contract is None else Descriptors(contract.descriptors)
        narrower = [x for x in self.contracts if own and Descriptors(x.descriptors) < own]
        promised = any(
            promises_more(each, any_grad) for x in self.contracts for each in x.descriptors.values()
        )

        def refuses(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            arguments = self.bound(args, kwargs)
            if any(each.is_kept(arguments) for each in narrower):
                return True
            return promised and not self._keeps(arguments)

        return refuses if narrower or promised else None

    def _keeps(self, arguments: Mapping[str, Any]) -> bool:
        """Return True if a call satisfies one of the contracts."""
        with implementation():
            if any(each.is_kept(arguments) for each in self.contracts):  # fast; False may be wrong
                return True
        try:
            self.contract(arguments)
        except DescriptorViolation:
            return False
        return True

    def contract(
        self, arguments: Mapping[str, Any]
    ) -> tuple[CompiledDescriptors | None, Bindings | None]:
        """Return the first contract that a call satisfies, and its bindings; None without any.

        Raises:
            DescriptorViolation: there are contracts, and the call satisfies none.
        """
        errors = []
        for contract in self.contracts:
            try:
                with implementation():
                    return contract, contract.check(arguments)
            except DescriptorViolation as error:
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            listed = "\n".join(str(error) for error in errors)
            raise DescriptorViolation(
                f"{self.name}: the call breaks each of its {len(errors)} sets of descriptors:\n"
                f"{listed}"
            )
        return None, None


def promises_more(descriptor: Descriptor, any_grad: bool) -> bool:
    """Return True if a descriptor makes a promise that the guard of a program does not check."""
    match descriptor:
        case Value(value):
            return isinstance(value, torch.Tensor) or is_instance(value) or is_container(value)
        case TSTensor(cls, meta):
            return cls is not torch.Tensor or (any_grad and meta.requires_grad is not None)
        case _:
            return any(promises_more(each, any_grad) for each in children_of_type(descriptor))
