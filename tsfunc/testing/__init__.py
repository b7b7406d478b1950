"""Laws that transforms keep, as functions that users can call on their own code.

Each law runs a transform and the computation that defines its result: a loop, finite differences,
or the function itself. ``tsfunc[testing]`` installs hypothesis, which generates inputs for the
laws: ``tsfunc.testing.strategies``. ``spawn`` runs a function on several processes,
``simulated_rank`` acts as one rank of a mesh of any size.

The public names are in ``__all__`` and in ``strategies``, and ``pytest_plugin`` is public. The
other modules of the package are private.
"""

from __future__ import annotations

from tsfunc.bridge.mesh.simulation import simulated_rank
from tsfunc.testing.laws import check_compose, check_grads, check_specialize, check_vmap
from tsfunc.testing.mesh_laws import check_shard_map
from tsfunc.testing.ranks import spawn
from tsfunc.testing.rules import check_custom_rule

__all__ = [
    "check_compose",
    "check_custom_rule",
    "check_grads",
    "check_shard_map",
    "check_specialize",
    "check_vmap",
    "simulated_rank",
    "spawn",
]


def __dir__() -> list[str]:
    return __all__
