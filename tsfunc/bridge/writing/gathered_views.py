"""Views at indices that differ between examples: ``y[i]`` where ``i`` is a tracer.

NOTE [gathered views]
For one example ``y[i]`` is a view: a write to the view is a write to ``y``, and the reverse. A
batch has no such view, because each example has another index. The indexed elements are therefore
copied into a tensor of their own, the *whole*, and the user gets a view of the whole. The view is
an emulated view (``emulated_views``), so its hook sees each call first:

- Before a call reads the view, the whole is copied again if the base has been written to since.
  torch counts the writes to every storage, including writes that no tracer sees.
- After a call has written to the view, the whole is copied back to its places in the base.
- A view of the view (``y[i].T[1:]``) is one more view of the same whole.

These steps are calls at the user's own level, as if the program contained them. All derivatives,
outer levels and traces therefore see a program without views at differing indices. If the function
does not own the base, the write is refused like a write to the base itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tsfunc.bridge.writing.emulated_views import EmulatedView


@dataclass
class GatheredView(EmulatedView):
    """A emulated view of some indices of a tensor along one dim.

    Attributes:
        dim: the dim of the base that is indexed.
        places: the indices: a 0-dim or 1-dim tensor.
    """

    dim: int
    places: torch.Tensor

    def copied(self) -> torch.Tensor:
        return _picked(self.original_base(), self.dim, self.places)

    def put_back(self) -> None:
        places = [*[None] * self.dim, self.places]
        torch.ops.aten.index_put_.default(self.original_base(), places, self.whole)


def gather(base: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
    """Return ``base`` indexed along a dim, as an emulated view.

    A 0-dim ``places`` removes the dim; a 1-dim ``places`` keeps it.
    """
    if not places.dim():
        places = places.clone()  # the user owns places, and may write to it
    return GatheredView(base, _picked(base, dim, places), dim, places).view()


def _picked(base: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
    """Return a copy of the indexed elements; the operator's backward saves no values of base."""
    out: torch.Tensor = torch.ops.aten.index.Tensor(base, [*[None] * dim, places])
    return out
