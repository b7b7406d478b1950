"""What a user has specialized: the function, and the contracts that its calls are held to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tsfunc.bridge.trace.backends import Backend
from tsfunc.errors import DescriptorViolation
from tsfunc.program.reading.holding import Closure
from tsfunc.types import Bindings, CompiledDescriptors, Descriptors
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

    def is_narrower(
        self, contract: CompiledDescriptors | None
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], bool] | None:
        """Whether a call keeps a contract that is narrower than one; None where there is none."""
        if contract is None:
            return None
        own = Descriptors(contract.descriptors)
        narrower = [each for each in self.contracts if Descriptors(each.descriptors) < own]

        def is_kept(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            arguments = self.bound(args, kwargs)
            return any(each.is_kept(arguments) for each in narrower)

        return is_kept if narrower else None

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
