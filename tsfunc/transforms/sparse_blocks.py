"""Blocks of sparse Jacobians: a function of several tensors as a function of one vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tsfunc import pytrees
from tsfunc.transforms.argnums import (
    Argnums,
    flatten_output,
    flatten_selected,
    refuse_complex,
    replace_selected,
    split_aux,
)


@dataclass(frozen=True)
class ResultShape:
    """The shape and dtype of a result tensor."""

    shape: torch.Size
    dtype: torch.dtype

    def numel(self) -> int:
        return self.shape.numel()


@dataclass(eq=False)
class Blocks:
    """A call of a function of tensors, as a function of the vector of their entries.

    Attributes:
        vector: the entries of the arguments to differentiate by.
        function: takes such a vector and returns the vector of the results' entries.
        inputs: the tensors of those arguments, and their structure.
        outputs: the outlines of the results and their structure, known after a run of the
            function.
    """

    vector: torch.Tensor
    function: Callable[[torch.Tensor], torch.Tensor]
    inputs: tuple[Sequence[torch.Tensor], Any]
    outputs: tuple[Sequence[ResultShape], Any] = ((), None)

    def map_blocks(self, block: Callable[[int, int, ResultShape, torch.Tensor], Any]) -> Any:
        """Apply a function to each block, and return the results in the structure of ``jacrev``.

        Args:
            block: takes the block's first row and first column, the outline of the result, and the
                argument.
        """
        tensors, spec = self.inputs
        rows, row = [], 0
        for out in self.outputs[0]:
            parts, column = [], 0
            for x in tensors:
                parts.append(block(row, column, out, x))
                column += x.numel()
            rows.append(pytrees.unflatten(spec, parts))
            row += out.numel()
        return pytrees.unflatten(self.outputs[1], rows)

    def block_entries(
        self, pairs: torch.Tensor, row: int, column: int, out: ResultShape, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mask of a block's entries, and their positions in the block."""
        rows, columns = pairs[0] - row, pairs[1] - column
        inside = (rows >= 0) & (rows < out.numel()) & (columns >= 0) & (columns < x.numel())
        return inside, torch.stack([rows[inside], columns[inside]])


def blocks_of(
    api: str, func: Callable[..., Any], argnums: Argnums, has_aux: bool, args: Any, kwargs: Any
) -> Blocks:
    """Return a call as a function of one vector."""
    positions, tensors, spec = flatten_selected(
        api, func, args, argnums, "the arguments to differentiate by"
    )
    if not tensors:
        raise ValueError(f"{api}: the arguments to differentiate by have no tensor.")
    refuse_complex(api, "inputs", tensors)
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) > 1:
        raise ValueError(
            f"{api}: expected one dtype of the arguments to differentiate by, got "
            f"{', '.join(sorted(map(str, dtypes)))}."
        )
    sizes = [x.numel() for x in tensors]

    def function(vector: torch.Tensor) -> torch.Tensor:
        parts = zip(vector.split(sizes), tensors, strict=True)
        values = [part.view(x.shape) for part, x in parts]
        replaced = replace_selected(args, positions, pytrees.unflatten(spec, values))
        out, _ = split_aux(api, func(*replaced, **kwargs), has_aux)
        leaves, out_spec = flatten_output(api, out)
        refuse_complex(api, "outputs", leaves)
        blocks.outputs = [ResultShape(x.shape, x.dtype) for x in leaves], out_spec
        return torch.cat([x.reshape(-1) for x in leaves])

    blocks = Blocks(torch.cat([x.reshape(-1) for x in tensors]), function, (tensors, spec))
    return blocks


def joined_pattern(api: str, blocks: Blocks, sparsity: Any) -> torch.Tensor:
    """Return a pattern, given as a matrix or as blocks, as a matrix.

    For blocks the function is called once, to get the shapes of its results.
    """
    if isinstance(sparsity, torch.Tensor):
        return sparsity
    with torch.no_grad():
        blocks.function(blocks.vector)
    leaves, spec = pytrees.flatten(sparsity)
    expected, structure = pytrees.flatten(blocks.map_blocks(lambda row, column, out, x: None))
    if spec != structure:
        raise ValueError(
            f"{api}: sparsity: expected a matrix of the numbers of entries, or the structure of "
            f"the result, a tensor for each of {len(expected)} blocks, got "
            f"{pytrees.structure_text(spec)}."
        )
    width = len(blocks.inputs[0])
    rows = []
    for i, out in enumerate(blocks.outputs[0]):
        parts = [
            leaf.to_dense().reshape(out.numel(), x.numel())
            for leaf, x in zip(leaves[i * width :], blocks.inputs[0], strict=False)
        ]
        rows.append(torch.cat(parts, 1))
    return torch.cat(rows)
