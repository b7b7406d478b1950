"""Batches of choices and loops for torch's own operators, which can't run on a subset.

All examples make every step, and a branch that any example takes runs on all examples. An example
that does not take the branch gets the tensors of one that does: NOTE [unreadable choices]
in ``cond``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.fx

from tsfunc.bridge.control.control_flow import Body, ControlFlow
from tsfunc.program.graphs.torch_operators import Writer
from tsfunc.transforms.vmap import vmap

Flags = Sequence[bool]

_CONTIGUOUS: Final = torch.contiguous_format  # NOTE [layouts of torch's loops]


class MaskedBatch:
    """The form of a batch of calls.

    Attributes:
        writer: makes the forms of control flow in the bodies.
        flags: for each operand, True if it has a leading batch dim.
    """

    def __init__(self, writer: Writer, flags: Flags) -> None:
        self.writer, self.flags = writer, tuple(flags)

    def loop(self, condition: Body, body: Body, carried: int) -> Callable[..., tuple[Any, ...]]:
        """Return the form of a loop.

        Args:
            condition: the condition for one example.
            body: the body for one example.
            carried: the number of operands that are carried.
        """
        flags = [True] * carried + list(self.flags[carried:])
        every = MaskedBatch(self.writer, flags)

        def goes_on(*state: Any) -> torch.Tensor:
            active: torch.Tensor = state[carried]
            return active.any()

        def step(*state: Any) -> tuple[Any, ...]:
            carry, active, rest = state[:carried], state[carried], state[carried + 1 :]
            taken = every.guarded([*carry, *rest], active)
            new = every.run(body, taken)
            again = every.run(condition, [*new, *taken[carried:]])[0]
            kept = [_where(active, x, old) for x, old in zip(new, carry, strict=True)]
            return (*kept, active & (again != 0))

        def run(*given: Any) -> tuple[Any, ...]:
            size = self._size(given)
            carry = [
                (x if batched else x.expand(size, *x.shape)).clone(memory_format=_CONTIGUOUS)
                for x, batched in zip(given[:carried], self.flags, strict=False)
            ]
            rest = given[carried:]
            active = every.run(condition, [*carry, *rest])[0] != 0
            found = torch.ops.higher_order.while_loop(goes_on, step, (*carry, active), tuple(rest))
            return tuple(found[:carried])

        return run

    def choice(self, branches: Sequence[Body]) -> Callable[..., tuple[Any, ...]]:
        """Return the form of a choice between branches, by the first operand."""
        last = len(branches) - 1
        either = torch.ops.higher_order.cond

        def guarded(i: int, given: Sequence[Any]) -> tuple[Any, ...]:
            found = self.run(branches[i], self.guarded(given, given[0] == i))
            return tuple(x.contiguous() for x in found)

        def of(i: int, *given: Any) -> tuple[Any, ...]:
            """Run the branch of the first example, which is branch ``i`` or a later one."""
            if i == last:
                return guarded(i, given)
            taken: tuple[Any, ...] = either(
                given[0][0] == i,
                lambda *xs: guarded(i, xs),
                lambda *xs: of(i + 1, *xs),
                given,
            )
            return taken

        def over(i: int, given: Sequence[Any], found: Sequence[Any]) -> tuple[Any, ...]:
            count = len(given)

            def chosen(*xs: Any) -> tuple[Any, ...]:
                new = guarded(i, xs[:count])
                mask = xs[0] == i
                return tuple(_where(mask, x, y) for x, y in zip(new, xs[count:], strict=True))

            mask = given[0] == i
            also = mask.any() & (given[0][0] != i)
            taken: tuple[Any, ...] = either(
                also, chosen, lambda *xs: tuple(map(_copied, xs[count:])), (*given, *found)
            )
            return taken

        def run(*given: Any) -> tuple[Any, ...]:
            index = given[0].reshape(self._size(given)).long().clamp(0, last)
            operands = (index, *given[1:])
            found = of(0, *operands)
            for i in range(last + 1):
                found = over(i, operands, found)
            return found

        return run

    def guarded(self, given: Sequence[Any], mask: torch.Tensor) -> list[Any]:
        """Return the operands; examples outside the mask get those of the first one inside."""
        numbers = torch.arange(mask.shape[0], device=mask.device)
        index = torch.where(mask, numbers, mask.long().argmax())
        return [
            x.index_select(0, index) if batched else x for x, batched in self._with_flags(given)
        ]

    def run(self, body: Body, given: Sequence[Any]) -> list[Any]:
        """Run a body for every example, and return its results, each with a leading batch dim."""
        pairs = list(self._with_flags(given))
        values: dict[torch.fx.Node, tuple[Any, bool]] = {}
        places = iter(body.inputs)
        for node in body.graph.nodes:
            if node.op == "placeholder":
                values[node] = pairs[next(places)]
            elif node.op == "output":
                size = self._size(given)
                found = [values[each] for each in node.args[0]]
                return [x if batched else x.expand(size, *x.shape) for x, batched in found]
            elif node.target is operator.getitem:
                results, batched = values[node.args[0]]
                values[node] = results[node.args[1]], batched
            else:
                values[node] = self._call(node, values)
        raise AssertionError(f"{body.name} returns nothing")

    def _call(
        self, node: torch.fx.Node, values: dict[torch.fx.Node, tuple[Any, bool]]
    ) -> tuple[Any, bool]:
        """Return the result of a node of a body, and True if it is batched."""
        inputs = list(dict.fromkeys(node.all_input_nodes))
        given, flags = [values[x][0] for x in inputs], [values[x][1] for x in inputs]
        if node.meta.get("no_grad"):
            given = [x.detach() if isinstance(x, torch.Tensor) else x for x in given]
        if isinstance(node.target, ControlFlow):
            own = [(x, False) if not isinstance(x, torch.fx.Node) else values[x] for x in node.args]
            at = [batched for _, batched in own]
            if any(at):
                form = node.target.torch_form_of_batch(self.writer, node.args, at)
            else:
                form = node.target.torch_form(self.writer, node.args)
            return tuple(form(*[x for x, _ in own])), any(at)

        def run(*xs: Any) -> Any:
            known = dict(zip(inputs, xs, strict=True))
            args = torch.fx.node.map_arg(node.args, known.__getitem__)
            kwargs = torch.fx.node.map_arg(node.kwargs, known.__getitem__)
            target: Any = node.target
            return target(*args, **kwargs)

        if not any(flags):
            return run(*given), False
        dims = tuple(0 if batched else None for batched in flags)
        return vmap(run, in_dims=dims, randomness="same")(*given), True

    def _with_flags(self, given: Sequence[Any]) -> list[tuple[Any, bool]]:
        rest = [False] * (len(given) - len(self.flags))
        return list(zip(given, [*self.flags, *rest], strict=True))

    def _size(self, given: Sequence[Any]) -> Any:
        return next(x.shape[0] for x, batched in self._with_flags(given) if batched)


def _where(mask: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.reshape(-1, *[1] * (new.dim() - 1)), new, old).contiguous()


def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=_CONTIGUOUS)


def flattened(
    form: Callable[..., tuple[Any, ...]], outer: Flags, inner: Flags
) -> Callable[..., tuple[Any, ...]]:
    """Return a batch of batches of calls, from the form of one batch.

    Args:
        form: takes operands with one leading dim in place of the two batch dims.
        outer: for each operand, True if it has the first batch dim.
        inner: for each operand, True if it has the second batch dim.
    """

    def run(*given: Any) -> tuple[Any, ...]:
        pairs = list(zip(outer, inner, strict=True))
        tensors = given[: len(pairs)]
        rows = next(x.shape[0] for x, (a, _) in zip(tensors, pairs, strict=True) if a)
        columns = next(x.shape[int(a)] for x, (a, b) in zip(tensors, pairs, strict=True) if b)
        flat = []
        for x, (a, b) in zip(tensors, pairs, strict=True):
            if a or b:
                rest = x.shape[int(a) + int(b) :]
                x = x if a else x.unsqueeze(0)
                x = x if b else x.unsqueeze(1)
                x = x.expand(rows, columns, *rest).reshape(rows * columns, *rest)
            flat.append(x)
        found = form(*flat, *given[len(pairs) :])
        return tuple(x.reshape(rows, columns, *x.shape[1:]) for x in found)

    return run
