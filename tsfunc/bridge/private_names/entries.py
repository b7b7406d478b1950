"""The form of an entry in the list of torch's private names, and the decorator that adds one."""

from __future__ import annotations

import enum
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class Risk(enum.Enum):
    """The likelihood that a release of torch removes or changes a name."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True)
class PrivateNames:
    """Names of torch that serve one purpose of the bridge.

    Attributes:
        title: the purpose in a few words.
        use: how the bridge uses them.
        stand_in: their possible substitute.
        risk: the likelihood that a release removes or changes them.
        releases: the releases in which the check was run and passed.
        behaves: raises an exception if the names do not behave as the bridge expects.
    """

    title: str
    names: tuple[str, ...]
    use: str
    stand_in: str
    risk: Risk
    releases: str
    behaves: Callable[[], None]

    def single_names(self) -> list[str]:
        """Return the names, with those that are joined by ``|`` split."""
        return [single for name in self.names for single in name.split("|")]

    def check(self) -> list[str]:
        """Return a line for each missing name, or for behavior that is not the expected one.

        Example:
            >>> [line for entry in PRIVATE_NAMES for line in entry.check()]
            []
        """
        failures = [line for line in map(missing_message, self.names) if line is not None]
        if failures:
            return failures
        try:
            with warnings.catch_warnings():
                # Modules of torch that are imported here use deprecated functions.
                warnings.simplefilter("ignore")
                self.behaves()
        except Exception as error:
            return [f"{self.title}: {type(error).__name__}: {error}"]
        return []


PRIVATE_NAMES: list[PrivateNames] = []


def is_listed(name: str) -> bool:
    """True if the list has ``name``, a parent of it, or an attribute below it."""
    if not name.startswith("torch."):  # an attribute of values
        return any(
            single_name.rpartition(".")[2] == name
            for entry in PRIVATE_NAMES
            for single_name in entry.single_names()
            if not single_name.startswith("torch.")
        )
    return any(
        covered_name == name
        or name.startswith(f"{covered_name}.")
        or covered_name.startswith(f"{name}.")
        for entry in PRIVATE_NAMES
        for covered_name in entry.single_names()
    )


def missing_message(name: str) -> str | None:
    """Return a message if torch does not have a name, else None."""
    if "|" in name:
        messages = [missing_message(single) for single in name.split("|")]
        return None if None in messages else messages[0]
    if not name.startswith("torch."):
        holder, _, attribute = name.partition(".")
        has_it = hasattr(HOLDERS[holder](), attribute)
        return None if has_it else f"torch {torch.__version__} has no {name}"
    parts = name.split(".")
    value: Any = torch
    for i, part in enumerate(parts[1:], start=2):
        if hasattr(value, part):
            value = getattr(value, part)
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            return f"torch {torch.__version__} has no {'.'.join(parts[:i])}"
    return None


def identity(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def sharding_state() -> Any:
    fsdp = importlib.import_module("torch.distributed.fsdp")
    state = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_state").FSDPState()
    modules, device = (torch.nn.Identity(),), torch.device("cpu")
    state.init(modules, device, fsdp.MixedPrecisionPolicy(), True)
    return state


# Makes a value of each class whose attributes are in the list.
HOLDERS: dict[str, Callable[[], Any]] = {
    "CustomOpDef": lambda: torch.library.custom_op("tsfunc_doctor::identity", mutates_args=())(
        identity
    ),
    "FSDPModule": lambda: importlib.import_module("torch.distributed.fsdp").FSDPModule,
    "FSDPState": lambda: sharding_state(),
    "Generator": lambda: torch.Generator(),
    "Graph": lambda: torch.fx.Graph(),
    "GraphNames": lambda: torch.fx.graph._Namespace(),
    "GraphNode": lambda: torch.fx.Graph().placeholder("x"),
    "Module": lambda: torch.nn.Identity(),
    "Node": lambda: torch.ones(1, requires_grad=True).sin().grad_fn,
    "OpOverload": lambda: torch.ops.aten.sin.default,
    "OpOverloadPacket": lambda: torch.ops.aten.sin,
    "Optimizer": lambda: torch.optim.SGD([torch.ones(1)]),
    "Tensor": lambda: torch.ones(1),
    "RNNBase": lambda: torch.nn.RNN(1, 1),
    "ProcessGroup": lambda: torch.distributed.ProcessGroup,
    "UntypedStorage": lambda: torch.ones(1).untyped_storage(),
}

Check = Callable[[], None]


def entry(
    title: str,
    names: str,
    *,
    use: str,
    stand_in: str,
    risk: Risk,
    below: str = "",
    releases: str = "2.13.0, 2.14.1",
) -> Callable[[Check], Check]:
    """Return a decorator that adds an entry with the decorated function as its check.

    Args:
        names: the names, separated by blanks.
        use: how the bridge uses them.
        stand_in: their possible substitute.
        risk: the likelihood that a release removes or changes them.
        below: a dotted name that the names are attributes of.
        releases: the releases of torch in which the check was run.
    """

    def add(behaves: Check) -> Check:
        dotted = tuple(f"{below}.{name}" if below else name for name in names.split())
        PRIVATE_NAMES.append(PrivateNames(title, dotted, use, stand_in, risk, releases, behaves))
        return behaves

    return add


def expect(condition: object, expected: str) -> None:
    """Raise a RuntimeError that names the expectation if ``condition`` is false."""
    if not condition:
        raise RuntimeError(f"expected {expected}")
