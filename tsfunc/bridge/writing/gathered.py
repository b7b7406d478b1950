"""Views at places that differ from example to example: ``y[i]`` where ``i`` is a tracer.

NOTE [gathered views]
For one example ``y[i]`` is a view: what is written to it is written to ``y``, and the other way
round. For a batch there is no view of it, each example having another place, so the places are
copied into a tensor of their own, the *whole*, and what the user gets is a view of that. Such a
view is a copied view (``copied_views``), whose calls come by here first:

- Before a call reads it, the whole is copied anew if the base has been written to since: torch
  counts the writes to every memory, also those that no tracer sees.
- After a call has written to it, the whole is copied back to its places in the base.
- What is a view of it (``y[i].T[1:]``) is one more view of the same whole.

All this is done by calls at the user's own level, as if they stood in the program. So derivatives
of every kind, outer levels and traces see a program without views at places that differ. Where the
base is not the function's own to write into, the write is refused as it is for the base itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tsfunc.bridge.writing.copied_views import CopiedView


@dataclass
class Gathered(CopiedView):
    """Some places of a tensor.

    Attributes:
        dim: along which dim of it.
        places: the places there: a tensor of one dim, or the place alone.
    """

    dim: int
    places: torch.Tensor

    def copied(self) -> torch.Tensor:
        return _picked(self.as_it_lay(), self.dim, self.places)

    def put_back(self) -> None:
        places = [*[None] * self.dim, self.places]
        torch.ops.aten.index_put_.default(self.as_it_lay(), places, self.whole)


def gather(base: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
    """``base`` at places along a dim, as a view: without the dim where there is one place.

    ``places`` has a dim or none.
    """
    if not places.dim():
        places = places.clone()  # it is the user's own, who may write to it
    return Gathered(base, _picked(base, dim, places), dim, places).view()


def _picked(base: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
    """A copy of the places. Of the calls that make one, its backward formula saves no values."""
    out: torch.Tensor = torch.ops.aten.index.Tensor(base, [*[None] * dim, places])
    return out
