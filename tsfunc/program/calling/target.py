"""What a user has specialized: the function, and the contracts that its calls are held to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tsfunc.bridge.trace.backends import Backend
from tsfunc.errors import DescriptorViolation
from tsfunc.program.reading.holding import Closure, is_container, is_instance
from tsfunc.types import Bindings, CompiledDescriptors, Descriptors
from tsfunc.types.grammar import Descriptor, TSTensor, Value, children_of_type
from tsfunc.types.signatures import takes_any_keyword


@dataclass(frozen=True)
class Target:
    """What is specialized.

    Attributes:
        func: the function.
        name: how errors and programs call it.
        signature: its parameters.
        contracts: the descriptors that a call may keep, narrower ones first.
        closure: what becomes of what it reads and is no argument: NOTE [closures].
        backend: what compiles its programs, None: they run as Python.
        backend_name: what the user calls it.
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
        """Whether the function sees the order of its keyword arguments."""
        return takes_any_keyword(self.func)

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by parameter.

        Raises:
            TypeError: there is no such call of the function.
        """
        try:
            return dict(self.signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise TypeError(f"{self.name}{self.signature}: {error}") from None

    def refused_by(
        self, contract: CompiledDescriptors | None, any_grad: bool = False
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], bool] | None:
        """Whether a program refuses a call that its guard accepts; None if it never does.

        It refuses a call that keeps a narrower contract, and one that breaks all contracts. A guard
        looks at types, sizes and attributes; a tensor or an object that a contract promises, and
        the class of a tensor, are checked here.

        Args:
            contract: the one that the program was made under; None for a program of a file.
            any_grad: whether the guard accepts tensors that require grad and others alike.
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
        """Whether a call keeps one of the contracts."""
        if any(each.is_kept(arguments) for each in self.contracts):  # quickly, if it says yes
            return True
        try:
            self.contract(arguments)
        except DescriptorViolation:
            return False
        return True

    def contract(
        self, arguments: Mapping[str, Any]
    ) -> tuple[CompiledDescriptors | None, Bindings | None]:
        """The first of the contracts that a call keeps.

        Raises:
            DescriptorViolation: there are some, and it keeps none.
        """
        errors = []
        for contract in self.contracts:
            try:
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
    """Whether a descriptor promises what the guard of a program does not look at."""
    match descriptor:
        case Value(value):
            return isinstance(value, torch.Tensor) or is_instance(value) or is_container(value)
        case TSTensor(cls, meta):
            return cls is not torch.Tensor or (any_grad and meta.requires_grad is not None)
        case _:
            return any(promises_more(each, any_grad) for each in children_of_type(descriptor))
