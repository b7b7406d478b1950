"""Reverse mode: ``vjp``, ``grad`` and its two forms with the value.

NOTE [autograd levels] in ``bridge/grad/autograd`` explains which level records which operators.

NOTE [differentiable derivatives]
torch must know before a backward pass if its result will be differentiated again. The result is
differentiated again if the inputs or the outputs depend on tensors that are differentiated by
outside of this transform: by an enclosing transform at the same level, or by the user. Otherwise
the pass is plain: its buffers are freed during the pass, and its results carry no graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import optree
import torch

from tsfunc import pytrees
from tsfunc.bridge.control.linear_calls import call_where_made
from tsfunc.bridge.grad import autograd
from tsfunc.bridge.grad.custom_function import trace_of
from tsfunc.bridge.grad.dual_level import can_carry_tangents, may_carry_outer_tangents
from tsfunc.bridge.grad.linear_level import pullback_linearly
from tsfunc.bridge.trace.trace_level import current_trace
from tsfunc.bridge.trace.trace_rules import traces_dtensors
from tsfunc.bridge.tracers.backward import end_leaf
from tsfunc.bridge.tracers.boundaries import boundary, check_function
from tsfunc.bridge.tracers.dtensors import refusing_distribution, replicated_like, unit_cotangent
from tsfunc.bridge.tracers.dynamo import delegate_in_dynamo
from tsfunc.bridge.tracers.functorch import TORCH_FUNC, delegate
from tsfunc.bridge.tracers.level_proxies import all_as_seen_by_current_level
from tsfunc.bridge.tracers.operators import PLAIN_TENSORS
from tsfunc.bridge.tracers.torch_state import in_backward_formula
from tsfunc.bridge.tracers.tracer import Tracer, TracerLevel
from tsfunc.errors import EscapedTracerError
from tsfunc.transforms.argnums import (
    Argnums,
    flatten_matching,
    flatten_output,
    flatten_selected,
    flatten_tensors,
    level_to_record_on,
    names_of_selected,
    refuse_unrecorded,
    replace_selected,
    same_sizes,
    sizes_text,
    split_aux,
    traced_inputs,
)
from tsfunc.transforms.transformed import Pullback, Transformed, named_as
from tsfunc.user_code import folding

_Aux = TypeVar("_Aux")
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class RecordedRun:
    """A function run once with its autograd graph: inputs, outputs and the pullback."""

    __slots__ = (
        "differentiable", "in_jvp", "inputs", "level", "outer_grad", "outer_inputs", "outputs",
    )  # fmt: skip

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        level: TracerLevel | None,
        outer_grad: bool,
        outer_inputs: bool,
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.level = level
        self.outer_grad = outer_grad
        self.outer_inputs = outer_inputs
        self.in_jvp = may_carry_outer_tangents(level)
        self.differentiable = outer_grad and self.depends_on_others()

    def end_inputs(self) -> None:
        """Declare that only the pullback of this run may still differentiate by its inputs."""
        for x in self.inputs:
            end_leaf(x)

    def depends_on_others(self) -> bool:
        """True if the outputs depend on tensors that are differentiated by outside."""
        return self.outer_inputs or autograd.reaches_other_leaves(
            self.outputs, self.inputs, self.level
        )

    def _inner_levels(self, values: Sequence[torch.Tensor]) -> list[TracerLevel]:
        """Return the levels of values that are inside of the level of the run."""
        depth = 0 if self.level is None else self.level.depth
        levels = [x.dispatch_level for x in values if isinstance(x, Tracer)]
        return [level for level in levels if level.depth > depth]

    def refuse_inner_duals(self, cotangents: Sequence[torch.Tensor]) -> None:
        """Raise if cotangents belong to a jvp that is inside of another jvp of the recorded run.

        The pass meets saved tensors that have tangents of the outer jvp, and C++ would take these
        for tangents of the inner one. ``jvp`` then differentiates the pullback instead.
        """
        if not may_carry_outer_tangents(self.level):
            return
        if any(level.forward for level in self._inner_levels(cotangents)):
            raise NotImplementedError(
                "The pullback of vjp does not support forward mode AD inside of another jvp, which "
                "the pullback was made in."
            )

    def pullback(
        self, cotangents: Sequence[torch.Tensor], *, retain: bool, outlives: bool = False
    ) -> list[torch.Tensor]:
        """Return a cotangent for each input; zeros if no output depends on the input.

        Args:
            outlives: True if the transform has returned, so only the pullback differentiates by its
                inputs.
        """
        pulled = functools.partial(self._pulled, retain=retain, outlives=outlives)
        return [*call_where_made(pulled, self.outputs, cotangents)]

    def _pulled(
        self, cotangents: Sequence[torch.Tensor], retain: bool, outlives: bool
    ) -> list[torch.Tensor]:
        level = self.level
        cotangents = traced_inputs(cotangents, level)
        lifted = [autograd.lift(ct, level) for ct in cotangents]
        # The grad mode at the pull decides: vjp and its pullback may be called under two modes.
        records = torch.is_grad_enabled()
        others = records and (
            self.differentiable or (not self.outer_grad and self.depends_on_others())
        )
        create = others or (
            records
            and (
                any(autograd.requires_grad(ct, level) for ct in lifted)
                # A pass that is not recorded loses the tangents of an outer jvp, which saved values
                # may carry, and the derivatives of a program by the cotangents, its inputs.
                or (
                    (can_carry_tangents() or _in_inner_trace(level))
                    and bool(self._inner_levels(cotangents))
                )
            )
        )
        # A result escapes only if nothing will end its graph: it belongs to no level, is not made
        # in a backward pass, and is not part of a jvp.
        escapes = outlives and level is None
        escapes = escapes and not in_backward_formula() and not self.in_jvp
        if create and not others and escapes and self._is_plain(lifted):
            cts_in = pullback_linearly(self.outputs, lifted, self.inputs, retain_graph=retain)
            return self._with_zeros(cts_in)
        # Formulas compute with values of an outer graph, which a trace does not record by itself.
        again = (
            create
            or autograd.differentiated_by_outer(self.outputs)
            or (
                level is not None
                and current_trace() is not None
                and autograd.reaches_outer_leaves(self.outputs, level)
            )
        )
        with autograd.recording_at(level) if again else autograd.unrecorded(level):
            cts_in = autograd.backward(
                self.outputs, lifted, self.inputs, create_graph=again, retain_graph=retain
            )
            full = self._with_zeros(cts_in)
        return [autograd.detach_at_level(g) for g in full] if again and not create else full

    def _is_plain(self, cotangents: Sequence[torch.Tensor]) -> bool:
        """True if all tensors of the pullback can be wrapped in tracers."""
        return all(
            isinstance(x, Tracer)
            or (type(x) in PLAIN_TENSORS and x.layout is torch.strided and not x.is_nested)
            for x in (*self.inputs, *self.outputs, *cotangents)
        )

    def _with_zeros(self, cts_in: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        pairs = zip(cts_in, self.inputs, strict=True)
        return [torch.zeros_like(x) if g is None else g for g, x in pairs]

    def released(self, value: Any) -> Any:
        """Return an output of the recorded run for the outside, without the graph of this run."""
        if isinstance(value, torch.Tensor) and not self.differentiable:
            return autograd.detached_at(value, self.level)
        return value

    def released_aux(self, aux: Any) -> Any:
        """Return the auxiliary part for the outside; it may depend on what no output depends on."""
        return pytrees.tree_map(self._released_part, aux)

    def _released_part(self, value: Any) -> Any:
        released = (
            self.outer_grad
            and isinstance(value, torch.Tensor)
            and autograd.reaches_other_leaves((value,), self.inputs, self.level)
        )
        return value if released else self.released(value)


def _in_inner_trace(level: TracerLevel | None) -> bool:
    """True if a trace, or the body of control flow in it, is inside of a level."""
    trace = current_trace()
    return trace is not None and (level is None or trace.depth > level.depth)


def run_recorded(
    func: Callable[..., tuple[Sequence[torch.Tensor], Any]],
    primals: Sequence[torch.Tensor],
    everything: Any,
) -> tuple[RecordedRun, Any]:
    """Run ``func`` on fresh inputs; it returns the outputs and any other value."""
    level = level_to_record_on(everything)
    outer_grad = torch.is_grad_enabled()
    outer_inputs = any(autograd.requires_grad(x, level) for x in primals)
    with autograd.recording_at(level):
        inputs = [autograd.fresh_input(x, level) for x in traced_inputs(primals, level)]
        with refusing_distribution(inputs):
            outputs, rest = func(inputs)
        refuse_unrecorded(outputs, level)
        outputs = [autograd.lift(out, level) for out in outputs]
    return RecordedRun(inputs, outputs, level, outer_grad, outer_inputs), rest


@overload
def vjp(
    func: Callable[..., _Result], *primals: Any, has_aux: Literal[False] = False
) -> tuple[_Result, Pullback[_Result]]: ...
@overload
def vjp(
    func: Callable[..., tuple[_Result, _Aux]], *primals: Any, has_aux: Literal[True]
) -> tuple[_Result, Pullback[_Result], _Aux]: ...
@overload
def vjp(func: Callable[..., Any], *primals: Any, has_aux: bool) -> Any: ...
@boundary("vjp", traceable=True)
def vjp(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Return the value of a function, and the function that pulls cotangents back through it.

    Args:
        func: takes pytrees of tensors and returns a pytree of tensors; with ``has_aux``, returns a
            tuple of such a pytree and an auxiliary value.
        primals: the point of evaluation.
        has_aux: if True, ``func`` returns an auxiliary value, which is passed through.

    Returns:
        ``(output, vjp_fn)``, with ``has_aux`` ``(output, vjp_fn, aux)``.
        ``vjp_fn(cotangents, retain_graph=True, create_graph=None)`` takes a pytree like the output
        and returns a tuple with a pytree like each primal. It can be called any number of times,
        unless it is called with ``retain_graph=False``. Its results can be differentiated again if
        grad mode is on, or if ``create_graph`` is True.

    Raises:
        RuntimeError: an output is not a tensor, or the cotangents do not match the output.
        ValueError: a primal is not a tensor.

    Example:
        >>> import torch
        >>> from tsfunc import vjp
        >>> out, vjp_fn = vjp(torch.sin, torch.zeros(2))
        >>> vjp_fn(torch.ones(2))
        (tensor([1., 1.]),)

    Corresponds to ``torch.func.vjp`` and ``jax.vjp``.
    """
    check_function("vjp", func)
    if (other := delegate("vjp")) is not None:
        return other(func, *primals, has_aux=has_aux)
    if torch.is_inference_mode_enabled():
        return autograd.without_inference_mode(vjp, func, *primals, has_aux=has_aux)
    return _vjp(func, primals, has_aux, outlives=True)


def inner_vjp(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Return the results of :func:`vjp` for a transform that ends after it has used the pullback.

    No result of the pullback may leave the transform with a graph.
    """
    return _vjp(func, primals, has_aux, outlives=False)


def _vjp(func: Callable[..., Any], primals: Sequence[Any], has_aux: bool, *, outlives: bool) -> Any:
    names = names_of_selected(func, primals, tuple(range(len(primals))))
    flat, spec = flatten_tensors("vjp(f, *primals)", "primals", primals, names)

    def run(inputs: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Any]:
        output, aux = split_aux("vjp(f, *primals)", func(*pytrees.unflatten(spec, inputs)), has_aux)
        leaves, out_spec = flatten_output("vjp(f, *primals)", output)
        return leaves, (leaves, out_spec, aux)

    recorded, (leaves, out_spec, aux) = run_recorded(run, flat, primals)
    recorded.end_inputs()

    @boundary("the pullback of vjp", func)
    def vjp_fn(
        cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None
    ) -> tuple[Any, ...]:
        refuse_ended_trace(recorded.outputs)
        flat_cotangents = match_cotangents("vjp_fn(cotangents)", cotangents, leaves, out_spec)
        recorded.refuse_inner_duals(flat_cotangents)
        create = torch.is_grad_enabled() if create_graph is None else create_graph
        with torch.set_grad_enabled(create):
            cts_in = recorded.pullback(flat_cotangents, retain=retain_graph, outlives=outlives)
        return pytrees.unflatten(spec, cts_in)

    out = pytrees.unflatten(out_spec, [recorded.released(leaf) for leaf in leaves])
    if has_aux:
        return out, vjp_fn, recorded.released_aux(aux)
    return out, vjp_fn


def refuse_ended_trace(outputs: Sequence[torch.Tensor]) -> None:
    """Raise if a graph that was recorded in a trace is used while the program runs."""
    trace = trace_of(outputs)
    if trace is not None and not trace.alive:
        raise EscapedTracerError(
            f"The pullback or pushforward of a function belongs to {trace.name}, which has ended. "
            f"A custom rule in a program runs with the program, after the trace: call vjp or "
            f"linearize inside of the rule, with the values that it needs as arguments."
        )


def match_cotangents(
    api: str, tree: Any, outputs: Sequence[torch.Tensor], out_spec: optree.PyTreeSpec
) -> Sequence[torch.Tensor]:
    """Return the flattened cotangents; raise if they do not match the outputs."""
    flat = flatten_matching(
        api, tree, out_spec,
        "Expected pytree structure of cotangents to be the same as pytree structure of outputs to "
        "the function. cotangents: {got}, primal output: {expected}",
    )  # fmt: skip
    for ct, out in zip(flat, outputs, strict=True):
        if not same_sizes(ct, out):
            raise RuntimeError(
                f"{api}: expected a cotangent of shape {sizes_text(out)}, as the output, got one "
                f"of shape {sizes_text(ct)}."
            )
    seen: list[torch.Tensor] = all_as_seen_by_current_level(flat)
    return [replicated_like(ct, out) for ct, out in zip(seen, outputs, strict=True)]


def _value_and_grad(
    api: str, func: Callable[..., Any], argnums: Argnums, has_aux: bool, args: Any, kwargs: Any
) -> tuple[Any, Any, Any]:
    """Return the gradient, the value and the auxiliary part."""
    positions, flat, spec = flatten_selected(api, func, args, argnums)

    def run(inputs: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Any]:
        new = pytrees.unflatten(spec, inputs)
        out, aux = split_aux(api, func(*replace_selected(args, positions, new), **kwargs), has_aux)
        return [_check_scalar(api, out)], (out, aux)

    recorded, (out, aux) = run_recorded(run, flat, (args, kwargs))
    value = recorded.outputs[0]
    cts_in = recorded.pullback([unit_cotangent(value, like_value=traces_dtensors())], retain=False)
    recorded.end_inputs()
    value = recorded.released(out)
    if not recorded.outer_grad:
        cts_in, value = (
            [autograd.detach_at_level(g) for g in cts_in],
            autograd.detach_at_level(value),
        )
    grads = pytrees.unflatten(spec, cts_in)
    if has_aux:
        aux = recorded.released_aux(aux)
    return grads, value, aux


def _check_scalar(api: str, out: Any) -> torch.Tensor:
    if not isinstance(out, torch.Tensor):
        advice = " With an auxiliary output, pass has_aux=True." if isinstance(out, tuple) else ""
        raise RuntimeError(f"{api}: Expected f(*args) to return a Tensor, got {type(out)}.{advice}")
    if out.dim() != 0:
        raise RuntimeError(
            f"{api}: Expected f(*args) to return a scalar Tensor, got tensor with {out.dim()} "
            f"dims. Maybe you wanted to use the vjp or jacrev APIs instead?"
        )
    if out.is_complex():
        raise RuntimeError(
            f"{api}: grad can be implicitly created only for real scalar outputs but got "
            f"{out.dtype}. Differentiate its real part, or use vjp."
        )
    return out


@overload
def grad(
    func: Callable[_Params, Any], argnums: Argnums = 0, has_aux: Literal[False] = False
) -> Transformed[_Params, Any]: ...
@overload
def grad(
    func: Callable[_Params, tuple[Any, _Aux]], argnums: Argnums = 0, *, has_aux: Literal[True]
) -> Transformed[_Params, tuple[Any, _Aux]]: ...
@overload
def grad(
    func: Callable[_Params, Any], argnums: Argnums = 0, *, has_aux: bool
) -> Transformed[_Params, Any]: ...
@overload
def grad(
    func: Callable[_Params, Any], argnums: Argnums, has_aux: bool
) -> Transformed[_Params, Any]: ...
@folding("grad")
@delegate_in_dynamo(TORCH_FUNC["grad"])
def grad(
    func: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function that computes the gradient of a scalar function.

    Args:
        func: returns a tensor of shape ``()``; with ``has_aux``, a tuple of such a tensor and an
            auxiliary value.
        argnums: the positional arguments to differentiate by: an int, or a tuple of ints.
        has_aux: if True, ``func`` returns an auxiliary value.

    Returns:
        A function of the same arguments that returns the gradient, a pytree like the argument (a
        tuple of pytrees for a tuple of ``argnums``); with ``has_aux`` ``(gradient, aux)``.

    Raises:
        RuntimeError: ``argnums`` does not fit the arguments, or the result is not a scalar tensor.
        ValueError: an argument to differentiate by is not a tensor.

    Example:
        >>> import torch
        >>> from tsfunc import grad
        >>> grad(torch.sin)(torch.tensor(0.))
        tensor(1.)

    Corresponds to ``torch.func.grad`` and ``jax.grad``.
    """

    def call(args: Sequence[Any], kwargs: Any) -> Any:
        api = "in grad: grad_and_value(f)(*args)"
        grads, _, aux = _value_and_grad(api, func, argnums, has_aux, args, kwargs)
        return (grads, aux) if has_aux else grads

    return _transformed("grad", func, argnums, has_aux, call)


def _transformed(
    name: str,
    func: Callable[..., Any],
    argnums: Argnums,
    has_aux: bool,
    call: Callable[[Sequence[Any], Any], Any],
) -> Callable[..., Any]:
    """Return the function that a transform of reverse mode gives to the user.

    Args:
        call: computes the result for the arguments and keyword arguments of ``func``.
    """

    @named_as(func)
    @boundary(name, func, traceable=True)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        if (other := delegate(name)) is not None:
            return other(func, argnums, has_aux)(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            return autograd.without_inference_mode(call, args, kwargs)
        return call(args, kwargs)

    return gradient


@overload
def grad_and_value(
    func: Callable[_Params, _Result], argnums: Argnums = 0, has_aux: Literal[False] = False
) -> Transformed[_Params, tuple[Any, _Result]]: ...
@overload
def grad_and_value(
    func: Callable[_Params, tuple[_Result, _Aux]], argnums: Argnums = 0, *, has_aux: Literal[True]
) -> Transformed[_Params, tuple[Any, tuple[_Result, _Aux]]]: ...
@overload
def grad_and_value(
    func: Callable[_Params, Any], argnums: Argnums = 0, *, has_aux: bool
) -> Transformed[_Params, Any]: ...
@overload
def grad_and_value(
    func: Callable[_Params, Any], argnums: Argnums, has_aux: bool
) -> Transformed[_Params, Any]: ...
@folding("grad_and_value")
@delegate_in_dynamo(TORCH_FUNC["grad_and_value"])
def grad_and_value(
    func: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function that computes the gradient and the value of a scalar function.

    Args:
        func: returns a tensor of shape ``()``; with ``has_aux``, a tuple of such a tensor and an
            auxiliary value.
        argnums: the positional arguments to differentiate by: an int, or a tuple of ints.
        has_aux: if True, ``func`` returns an auxiliary value.

    Returns:
        A function of the same arguments that returns ``(gradient, value)``; with ``has_aux``
        ``(gradient, (value, aux))``. The gradient is that of :func:`grad`.

    Raises:
        RuntimeError, ValueError: as for :func:`grad`.

    Example:
        >>> import torch
        >>> from tsfunc import grad_and_value
        >>> grad_and_value(torch.sin)(torch.tensor(0.))
        (tensor(1.), tensor(0.))

    Corresponds to ``torch.func.grad_and_value``.
    """

    def call(args: Sequence[Any], kwargs: Any) -> Any:
        grads, value, aux = _value_and_grad(
            "grad_and_value(f)(*args)", func, argnums, has_aux, args, kwargs
        )
        return (grads, (value, aux)) if has_aux else (grads, value)

    return _transformed("grad_and_value", func, argnums, has_aux, call)


@overload
def value_and_grad(
    func: Callable[_Params, _Result], argnums: Argnums = 0, has_aux: Literal[False] = False
) -> Transformed[_Params, tuple[_Result, Any]]: ...
@overload
def value_and_grad(
    func: Callable[_Params, tuple[_Result, _Aux]], argnums: Argnums = 0, *, has_aux: Literal[True]
) -> Transformed[_Params, tuple[tuple[_Result, _Aux], Any]]: ...
@overload
def value_and_grad(
    func: Callable[_Params, Any], argnums: Argnums = 0, *, has_aux: bool
) -> Transformed[_Params, Any]: ...
@overload
def value_and_grad(
    func: Callable[_Params, Any], argnums: Argnums, has_aux: bool
) -> Transformed[_Params, Any]: ...
@folding("value_and_grad")
@delegate_in_dynamo(TORCH_FUNC["value_and_grad"])
def value_and_grad(
    func: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function that computes the value and the gradient of a scalar function.

    Args:
        func: returns a tensor of shape ``()``; with ``has_aux``, a tuple of such a tensor and an
            auxiliary value.
        argnums: the positional arguments to differentiate by: an int, or a tuple of ints.
        has_aux: if True, ``func`` returns an auxiliary value.

    Returns:
        A function of the same arguments that returns ``(value, gradient)``; with ``has_aux``
        ``((value, aux), gradient)``. The gradient is that of :func:`grad`.

    Raises:
        RuntimeError, ValueError: as for :func:`grad`.

    Example:
        >>> import torch
        >>> from tsfunc import value_and_grad
        >>> value_and_grad(torch.sin)(torch.tensor(0.))
        (tensor(0.), tensor(1.))

    Corresponds to ``jax.value_and_grad``.
    """

    def call(args: Sequence[Any], kwargs: Any) -> Any:
        grads, value, aux = _value_and_grad(
            "value_and_grad(f)(*args)", func, argnums, has_aux, args, kwargs
        )
        return ((value, aux), grads) if has_aux else (value, grads)

    return _transformed("value_and_grad", func, argnums, has_aux, call)
