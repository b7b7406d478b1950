"""tsfunc: function transforms for PyTorch that compose: vmap, grad, specialize."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tsfunc.releases import warn_if_untested

warn_if_untested(torch.__version__)  # before any import that can fail with a newer torch

from tsfunc import dispatch, errors, ops  # noqa: E402
from tsfunc import transforms as transforms  # noqa: E402  # with what it tells the bridge
from tsfunc._lazy import lazy_exports  # noqa: E402
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel  # noqa: E402
from tsfunc.config import config  # noqa: E402

# Every transform needs the modules above. The other names are loaded when they are first used.
if TYPE_CHECKING:
    from tsfunc import program as program
    from tsfunc import pytrees as pytrees
    from tsfunc import rage as rage
    from tsfunc import testing as testing
    from tsfunc import types as types
    from tsfunc.transforms import checkpoint_policies, custom_derivatives, debug
    from tsfunc.transforms.abstract_eval import eval_shape, make_graph
    from tsfunc.transforms.checkpoint import checkpoint
    from tsfunc.transforms.closure_convert import closure_convert
    from tsfunc.transforms.collectives import (
        all_gather,
        all_to_all,
        axis_index,
        axis_size,
        pmax,
        pmean,
        pmin,
        ppermute,
        psum,
        psum_scatter,
    )
    from tsfunc.transforms.control.cond import cond, switch
    from tsfunc.transforms.control.loops import fori_loop, while_loop
    from tsfunc.transforms.control.scan import associative_scan, scan
    from tsfunc.transforms.control.scan import map as map  # not in __all__: it would hide Python's
    from tsfunc.transforms.custom_jvp import custom_jvp
    from tsfunc.transforms.custom_vjp import custom_gradient, custom_vjp
    from tsfunc.transforms.custom_vmap import custom_vmap, sequential_vmap
    from tsfunc.transforms.debug import check
    from tsfunc.transforms.explain import CallReport, explain
    from tsfunc.transforms.forward import jvp
    from tsfunc.transforms.implicit import implicit_root, linear_solve
    from tsfunc.transforms.jacobians import hessian, jacfwd, jacrev
    from tsfunc.transforms.linear import hvp, linear_transpose, stop_gradient
    from tsfunc.transforms.linearize import linearize
    from tsfunc.transforms.mesh_specs import P
    from tsfunc.transforms.modules import functional_call, stack_module_state
    from tsfunc.transforms.optimizers import FunctionalOptimizer, functional_optimizer
    from tsfunc.transforms.reverse import grad, grad_and_value, value_and_grad, vjp
    from tsfunc.transforms.shard_map import mesh_axes, shard_map
    from tsfunc.transforms.sparse_jacobian import jacobian_sparsity, sparse_jacobian
    from tsfunc.transforms.specialize import load, specialize
    from tsfunc.transforms.specialized import Specialized
    from tsfunc.transforms.virtual_mesh import VirtualMesh
    from tsfunc.transforms.vmap import vmap
    from tsfunc.types import Descriptors, Dim, MetaTensorType, infer_descriptors
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "transforms.abstract_eval": "eval_shape make_graph",
            "transforms.checkpoint": "checkpoint",
            "transforms.closure_convert": "closure_convert",
            "transforms.collectives": """
                all_gather all_to_all axis_index axis_size pmax pmean pmin ppermute psum
                psum_scatter
            """,
            "transforms.control.cond": "cond switch",
            "transforms.control.loops": "fori_loop while_loop",
            "transforms.control.scan": "associative_scan scan map",
            "transforms.custom_jvp": "custom_jvp",
            "transforms.custom_vjp": "custom_gradient custom_vjp",
            "transforms.custom_vmap": "custom_vmap sequential_vmap",
            "transforms.debug": "check",
            "transforms.explain": "CallReport explain",
            "transforms.forward": "jvp",
            "transforms.implicit": "implicit_root linear_solve",
            "transforms.jacobians": "hessian jacfwd jacrev",
            "transforms.linear": "hvp linear_transpose stop_gradient",
            "transforms.linearize": "linearize",
            "transforms.mesh_specs": "P",
            "transforms.modules": "functional_call stack_module_state",
            "transforms.optimizers": "FunctionalOptimizer functional_optimizer",
            "transforms.reverse": "grad grad_and_value value_and_grad vjp",
            "transforms.shard_map": "mesh_axes shard_map",
            "transforms.sparse_jacobian": "jacobian_sparsity sparse_jacobian",
            "transforms.specialize": "load specialize",
            "transforms.specialized": "Specialized",
            "transforms.virtual_mesh": "VirtualMesh",
            "transforms.vmap": "vmap",
            "types": "Descriptors Dim MetaTensorType infer_descriptors",
        },
        modules=(
            "program",
            "pytrees",
            "rage",
            "types",
            "transforms.checkpoint_policies",
            "transforms.custom_derivatives",
            "transforms.debug",
            "testing",
        ),
    )

__version__ = "0.2.0"

__all__ = [
    "CallReport",
    "Descriptors",
    "Dim",
    "FunctionalOptimizer",
    "MetaTensorType",
    "P",
    "Specialized",
    "Tracer",
    "TracerLevel",
    "VirtualMesh",
    "all_gather",
    "all_to_all",
    "associative_scan",
    "axis_index",
    "axis_size",
    "check",
    "checkpoint",
    "checkpoint_policies",
    "closure_convert",
    "cond",
    "config",
    "custom_derivatives",
    "custom_gradient",
    "custom_jvp",
    "custom_vjp",
    "custom_vmap",
    "debug",
    "dispatch",
    "errors",
    "eval_shape",
    "explain",
    "fori_loop",
    "functional_call",
    "functional_optimizer",
    "grad",
    "grad_and_value",
    "hessian",
    "hvp",
    "implicit_root",
    "infer_descriptors",
    "jacfwd",
    "jacobian_sparsity",
    "jacrev",
    "jvp",
    "linear_solve",
    "linear_transpose",
    "linearize",
    "load",
    "make_graph",
    "mesh_axes",
    "ops",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "scan",
    "sequential_vmap",
    "shard_map",
    "sparse_jacobian",
    "specialize",
    "stack_module_state",
    "stop_gradient",
    "switch",
    "testing",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]
