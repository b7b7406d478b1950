"""Random operators, which follow ``level.randomness``.

NOTE [randomness]
Unlike other rules, these rules also run when no argument is batched.

- ``"different"``: the result is always batched. One call draws for the whole batch, with the batch
  dim first. The numbers do not depend on the position of the batch dim, and equal torch.func's.
- ``"split"``: the result is always batched, and each example draws as if it ran alone. The numbers
  are those of ``samplers``.
- ``"same"``: one example is drawn, and the result is batched only if other arguments are. A
  distribution that differs between examples raises an error, as in torch.func.
- ``"error"``: raises an error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tsfunc.ops import distributions, samplers
from tsfunc.ops.dims import (
    align,
    align_batch_dim,
    batch_to_front,
    expand_to_front,
    function_name,
    logical_rank,
    logical_shape,
    op_name,
    refuse_inplace,
    unit_dims,
    with_defaults,
)
from tsfunc.ops.refusal import raise_as_one_example, require
from tsfunc.ops.registry import Args, BatchDims, Kwargs, Rule, RuleLevel, row, rows


def check_randomness(op: Any, level: RuleLevel, kwargs: Mapping[str, Any]) -> None:
    """Raise if the vmap forbids random operators.

    Otherwise record on the level that an operator is about to draw.
    """
    refuse_in_error_mode(op, level)
    level.on_random_op(kwargs.get("generator"))


def generator_by_keyword(rule: Rule) -> Rule:
    """Return a rule that gets the generator of a call by keyword.

    Some operators take it as their last positional argument.
    """

    @functools.wraps(rule)
    def run(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        if args and (args[-1] is None or isinstance(args[-1], torch.Generator)):
            *args, generator = args
            bdims, kwargs = bdims[: len(args)], {**kwargs, "generator": generator}
        return rule(op, level, bdims, args, kwargs)

    return run


def refuse_in_error_mode(op: Any, level: RuleLevel) -> None:
    """Raise if the vmap forbids random operators."""
    if level.randomness == "error":
        raise RuntimeError(
            f"vmap: called random operation while in randomness error mode. Please either use "
            f"the 'same' or 'different' randomness flags on vmap, or 'split', by which each "
            f"example draws as if alone, or perform the randomness operation out of vmap (the "
            f"operation is {function_name(op)})"
        )


def require_one_distribution(op: Any, level: RuleLevel, bdims: BatchDims) -> None:
    """Raise if one draw is required but the parameters differ between examples."""
    if level.randomness == "same" and any(bdim is not None for bdim in bdims):
        raise RuntimeError(
            f"Vmap does not currently support same randomness with a batched tensor input: "
            f"{function_name(op)} draws from a distribution that differs from example to example. "
            f"Use the 'different' or 'split' randomness flags on vmap, or transform numbers of one "
            f"distribution (for instance mean + std * torch.randn_like(std))."
        )


def example_of(x: Tensor, bdim: int | None) -> Tensor:
    """Return a tensor with the shape and dtype of one example and unspecified values."""
    if bdim is None:
        return x
    return x.new_empty(logical_shape(x, bdim))


def draw_shape_like(level: RuleLevel, x: Tensor, bdim: int | None) -> tuple[Tensor, int | None]:
    """Return a tensor of the shape to draw: the batch, or one example under ``"same"``."""
    if level.randomness == "same":
        return example_of(x, bdim), None
    return expand_to_front(x, bdim, level.batch_size), 0


def random_factory(size_position: int) -> Rule:
    """Return the rule of a random factory whose size is ``args[size_position]``."""

    def rule(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        check_randomness(op, level, kwargs)
        if level.randomness == "same":
            return op(*args, **kwargs), None
        if level.randomness == "split":
            default = torch.int64 if "randint" in op_name(op) else torch.get_default_dtype()
            return samplers.sampled(
                op, level, args[size_position], kwargs.get("dtype") or default,
                kwargs.get("device") or torch.get_default_device(), args[:size_position], kwargs,
            ), 0  # fmt: skip
        before, size = args[:size_position], [level.batch_size, *args[size_position]]
        return op(*before, size, *args[size_position + 1 :], **kwargs), 0

    return rule


@row("aten::randperm", "aten::randperm.generator")
def randperm(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Call the operator per example, as torch.func does: its kernel draws one permutation."""
    check_randomness(op, level, kwargs)
    if level.randomness == "same":
        return op(*args, **kwargs), None
    if level.randomness == "split":
        draw = samplers.draw_for(level, kwargs.get("device") or torch.get_default_device(), kwargs)
        order = distributions.permutation(draw, args[0])
        return order.to(kwargs.get("dtype") or torch.int64), 0
    return torch.stack([op(*args, **kwargs) for _ in range(level.batch_size)]), 0


def random_like(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Draw in the shape and dtype of the first argument, whose values are not used."""
    check_randomness(op, level, kwargs)
    if level.randomness == "split":
        like, place_of_batch = args[0], bdims[0]
        out = samplers.sampled(
            op, level, logical_shape(like, place_of_batch), kwargs.get("dtype") or like.dtype,
            kwargs.get("device") or like.device, args[1:], kwargs,
        )  # fmt: skip
        return (out.movedim(0, place_of_batch), place_of_batch) if place_of_batch else (out, 0)
    x, bdim = draw_shape_like(level, args[0], bdims[0])
    if "memory_format" in kwargs:
        kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    return op(x, *args[1:], **kwargs), bdim


@row("aten::randint_like.Tensor", "aten::randint_like.Tensor_generator")
def randint_like(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The upper bound is a tensor with one number, shared or per example."""
    x, high = args
    if bdims[1] is None:
        bound = int(high) if level.randomness == "split" else high
        return random_like(op, level, bdims, [x, bound], kwargs)
    check_randomness(op, level, kwargs)
    require_one_distribution(op, level, bdims[1:])
    if high.dim() != 1:
        return raise_as_one_example(op, bdims, args, kwargs)
    require(high > 0, f"{function_name(op)} expected a high above 0")
    if level.randomness == "split":
        shape = logical_shape(x, bdims[0])
        draw = samplers.draw_for(level, x.device, kwargs)
        bounds = high.to(torch.int64).unsqueeze(1)
        values = distributions.integers(draw, math.prod(shape), 0, bounds)
        return samplers.in_shape(values.to(kwargs.get("dtype") or x.dtype), shape), 0
    x = expand_to_front(x, bdims[0], level.batch_size)
    # With numbers of 62 bits the remainders are almost uniformly distributed.
    generator = kwargs.get("generator")
    values = torch.randint(0, 1 << 62, x.shape, device=x.device, generator=generator)
    # In a floating dtype they would be rounded to multiples of a power of two.
    values = values % unit_dims(high.to(torch.int64), 1, x.dim() - 1)
    return values.to(kwargs.get("dtype") or x.dtype), 0


def shared_draw_error(op: Any) -> RuntimeError:
    """Return the error of a draw for each example into a tensor that all examples share."""
    return RuntimeError(
        f"vmap: Cannot ask for different inplace randomness on an unbatched tensor. This "
        f"will appear like same randomness. {function_name(op)} writes a tensor that is not "
        f"batched: use its out-of-place form, or make the tensor from a batched one (for "
        f"instance x.new_empty)."
    )


def random_inplace(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Overwrite the first argument."""
    check_randomness(op, level, kwargs)
    require_one_distribution(op, level, bdims[1:])
    x, bdim = args[0], bdims[0]
    if level.randomness == "same":
        if bdim is None:
            return op(*args, **kwargs), None
        x.copy_(op(example_of(x, bdim), *args[1:], **kwargs).unsqueeze(bdim))
        return x, bdim
    if bdim is None:
        if any(bdim is not None for bdim in bdims):
            refuse_inplace(op)
        raise shared_draw_error(op)
    if level.randomness == "split":
        if any(isinstance(arg, Tensor) for arg in args[1:]):
            out = _split_bernoulli(level, bdims, args, kwargs)
        else:
            shape = logical_shape(x, bdim)
            out = samplers.sampled(op, level, shape, x.dtype, x.device, args[1:], kwargs)
        x.copy_(out.movedim(0, bdim))
        return x, bdim
    rest = [
        align_batch_dim(arg, bdim, x.dim() - 1) if isinstance(arg, Tensor) else arg
        for arg, bdim in zip(args[1:], bdims[1:], strict=True)
    ]
    op(batch_to_front(x, bdim), *rest, **kwargs)
    return x, bdim


@generator_by_keyword
def sample_from(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Draw from a distribution whose parameters are tensors."""
    check_randomness(op, level, kwargs)
    require_one_distribution(op, level, bdims)
    if level.randomness == "same":
        return op(*args, **kwargs), None
    if level.randomness == "split":
        return samplers.of_parameters(op, level, bdims, args, kwargs), 0
    size = level.batch_size
    whole = [
        expand_to_front(x, bdim, size) if isinstance(x, Tensor) else x
        for x, bdim in zip(args, bdims, strict=True)
    ]
    rank = max(x.dim() for x in whole if isinstance(x, Tensor)) - 1
    placed = [align_batch_dim(x, 0, rank) if isinstance(x, Tensor) else x for x in whole]
    return op(*placed, **kwargs), 0


def _split_bernoulli(level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Tensor:
    """Draw for each example in the shape and dtype of the first argument, batch dim first.

    The last argument has the probabilities.
    """
    shape = logical_shape(args[0], bdims[0])
    draw = samplers.draw_for(level, args[0].device, kwargs)
    chances = samplers.parameter_rows(args[-1], bdims[-1], shape)
    values = distributions.bernoulli(draw, math.prod(shape), chances).to(args[0].dtype)
    return samplers.without_gradient(samplers.in_shape(values, shape), *args)


@row("aten::bernoulli", "aten::bernoulli.Tensor")
def bernoulli(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The last argument has the probabilities.

    An earlier tensor gives only the shape and dtype.
    """
    check_randomness(op, level, kwargs)
    require_one_distribution(op, level, bdims)
    if level.randomness == "split":
        return _split_bernoulli(level, bdims, args, kwargs), 0
    chance, bdim = args[0], bdims[0]
    if len(args) == 2:
        aligned, where = align(args, bdims)
        chance = torch.broadcast_tensors(*aligned)[1]
        bdim = None if all(bdim is None for bdim in bdims) else where
    out, bdim = sample_from(torch.bernoulli, level, [bdim], [chance], kwargs)
    return out.to(args[0].dtype), bdim


@row("aten::normal.Tensor_Tensor", "aten::normal.Tensor_float", "aten::normal.float_Tensor")
def normal(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Draw with tensor parameters; ``"split"`` scales and shifts standard normal numbers."""
    if level.randomness != "split":
        return sample_from(op, level, bdims, args, kwargs)
    check_randomness(op, level, kwargs)
    params, where = (*args, 1.0)[:2], [*bdims, None][:2]
    tensors = [x for x in params if isinstance(x, Tensor)]
    shape = samplers.broadcast_shape(params, where)
    dtype = tensors[0].dtype
    if len(tensors) == 2:
        dtype = torch.promote_types(dtype, tensors[1].dtype)
    draw = samplers.draw_for(level, tensors[0].device, kwargs)
    noise = samplers.in_shape(distributions.normal(draw, math.prod(shape), dtype), shape)
    (mean, std, noise), bdim = align(
        [x.detach() if isinstance(x, Tensor) else x for x in params] + [noise], [*where, 0]
    )
    return samplers.without_gradient((mean + std * noise).to(dtype), *params), bdim


@row("aten::multinomial")
def multinomial(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """The kernel takes one matrix, whose rows are distributions."""
    check_randomness(op, level, kwargs)
    require_one_distribution(op, level, bdims)
    if level.randomness == "same":
        return op(*args, **kwargs), None
    if level.randomness == "split":
        x, number, replacement = (*args, False)[:3]
        draw = samplers.draw_for(level, x.device, kwargs)
        return samplers.multinomial(op, draw, x, bdims[0], number, replacement), 0
    x = expand_to_front(args[0], bdims[0], level.batch_size)
    if x.dim() == 2:
        return op(x, *args[1:], **kwargs), 0
    out = op(x.flatten(0, 1), *args[1:], **kwargs)
    return out.unflatten(0, x.shape[:2]), 0


def keep_mask(
    level: RuleLevel, x: Tensor, bdim: int | None, keep: float, features: bool = False
) -> tuple[Tensor, int | None]:
    """Return ones with probability ``keep``, else zeros, per element or per feature map."""
    if level.randomness == "split":
        shape = logical_shape(x, bdim)
        if features:  # the dims of a feature map get size 1
            shape = [*shape[:2], *[1 for _ in shape[2:]]]
        values = distributions.bernoulli(
            samplers.draw_for(level, x.device, {}), math.prod(shape), keep
        )
        return samplers.in_shape(values.to(x.dtype), shape), 0
    like, bdim = draw_shape_like(level, x, bdim)
    if features:
        leading_dims = 2 if bdim is None else 3
        like = like[(...,) + (slice(0, 1),) * (like.dim() - leading_dims)]
    return torch.ops.aten.bernoulli.p(like.detach(), keep), bdim


def dropout_rule(alpha: bool, features: bool) -> Rule:
    """Return the rule of a dropout function; all of them have the same arguments."""

    def rule(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
        x, p, train = args
        if not train or p == 0:
            return x, bdims[0]
        if p == 1:  # no random numbers are needed
            return op(x, p, train), bdims[0]
        if (features and logical_rank(x, bdims[0]) < 2) or not x.is_floating_point():
            return raise_as_one_example(op, bdims, args, kwargs)
        check_randomness(op, level, kwargs)
        mask, mask_bdim = keep_mask(level, x, bdims[0], 1 - p, features)
        shift: Any = 0.0
        if alpha and p < 1:
            # Keeps the mean and variance when dropped values are SELU's lower limit.
            low = 1.7580993408473766
            scale = ((low * low * p + 1) * (1 - p)) ** -0.5
            mask, shift = mask * scale, (mask - 1 + p) * (low * scale)
        elif p < 1:
            mask = mask / (1 - p)
        values: list[Any] = [x, mask]
        where = [bdims[0], mask_bdim]
        if alpha and p < 1:
            values.append(shift)
            where.append(mask_bdim)
        aligned, bdim = align(values, where)
        out = aligned[0] * aligned[1]
        batched = bdims[0] is not None or mask_bdim is not None
        return (out + aligned[2] if alpha and p < 1 else out), bdim if batched else None

    return rule


@row("aten::native_dropout")
def native_dropout(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Return the result and the mask."""
    x, p, train = args
    if train is False:
        return op(x, p, train), bdims[0]
    check_randomness(op, level, kwargs)
    bdim = bdims[0]
    if level.randomness == "different" or (level.randomness == "same" and bdim is None):
        x, bdim = draw_shape_like(level, x, bdim)
        return op(x, p, train), bdim
    mask, mask_bdim = keep_mask(level, x, bdim, 1 - p)
    (x, mask), bdim = align([x, mask], [bdim, mask_bdim])
    scale = 0.0 if p == 1 else 1 / (1 - p)
    out = x * mask * scale
    return (out, mask.to(torch.bool).expand(out.shape)), bdim


@row("aten::rrelu_with_noise", "aten::rrelu_with_noise_")
@generator_by_keyword
def rrelu_with_noise(
    op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs
) -> Any:
    """Draw the slopes of negative values, and write them into ``noise``."""
    x, noise, lower, upper, training = with_defaults(args[:5], None, None, 1 / 8, 1 / 3, False)
    inplace = "noise_" in op.name()
    bdim = bdims[0]
    if not training:
        out = torch.nn.functional.leaky_relu(x, (lower + upper) / 2, inplace)
        return (out if inplace else out.contiguous()), bdim
    check_randomness(op, level, kwargs)
    if level.randomness == "same" and bdim is None and bdims[1] is None:
        return op(*args, **kwargs), None
    if bdim is None or bdims[1] is None:
        refuse_inplace(op)
    slopes = torch.where(x <= 0, _slopes(level, x, bdim, lower, upper, kwargs), 1.0)
    noise.copy_(slopes.movedim(bdim, bdims[1]))
    return (x.mul_(slopes) if inplace else (x * slopes).contiguous()), bdim


def _slopes(
    level: RuleLevel, x: Tensor, bdim: int, lower: float, upper: float, kwargs: Kwargs
) -> Tensor:
    """Return uniform slopes that broadcast with ``x``. Only the signs of ``x`` are read."""
    if level.randomness == "split":
        shape = logical_shape(x, bdim)
        draw = samplers.draw_for(level, x.device, kwargs)
        u = distributions.uniform(draw, math.prod(shape), x.dtype)
        return samplers.in_shape(u * (upper - lower) + lower, shape).movedim(0, bdim)
    generator = kwargs.get("generator")
    if level.randomness == "same" and x.device.type == "cpu":
        return _slopes_in_order(x, bdim, lower, upper, generator)
    like, drawn_at = draw_shape_like(level, x, bdim)
    slopes = torch.empty_like(like).uniform_(lower, upper, generator=generator)
    return slopes.unsqueeze(bdim) if drawn_at is None else slopes.movedim(drawn_at, bdim)


def _slopes_in_order(
    x: Tensor, bdim: int, lower: float, upper: float, generator: torch.Generator | None
) -> Tensor:
    """Return the numbers that each example gets when it draws alone.

    On the CPU only elements that are not positive draw a number, in double precision and in
    element order. The number of an element therefore depends on the count of such elements before
    it.
    """
    low = x.movedim(bdim, 0) <= 0
    count = low[:1].numel()
    values = torch.empty(count, dtype=torch.float64).uniform_(lower, upper, generator=generator)
    order = low.reshape(-1, max(count, 1)).cumsum(1).sub(1).clamp(min=0)
    slopes = values.to(x.dtype)[order].reshape(low.shape)
    return slopes.movedim(0, bdim)


@row("aten::rrelu")
@generator_by_keyword
def rrelu(op: Any, level: RuleLevel, bdims: BatchDims, args: Args, kwargs: Kwargs) -> Any:
    """Apply a leaky ReLU with drawn slopes, which are not returned."""
    x, lower, upper, training = with_defaults(args[:4], None, 1 / 8, 1 / 3, False)
    bdim = bdims[0]
    if lower > upper:
        return raise_as_one_example(op, bdims, args, kwargs)
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2).contiguous(), bdim
    check_randomness(op, level, kwargs)
    if bdim is None:
        if level.randomness == "same":
            return op(*args, **kwargs), None
        x, bdim = expand_to_front(x, None, level.batch_size), 0
    out = torch.where(x <= 0, x * _slopes(level, x, bdim, lower, upper, kwargs), x)
    return out.contiguous(), bdim  # as the kernel's result is


rows(dropout_rule(False, False), "aten::dropout")
rows(dropout_rule(False, True), "aten::feature_dropout")
rows(dropout_rule(True, False), "aten::alpha_dropout")
rows(dropout_rule(True, True), "aten::feature_alpha_dropout")
rows(
    random_factory(0), "aten::rand", "aten::rand.generator", "aten::randn", "aten::randn.generator"
)
rows(random_factory(1), "aten::randint", "aten::randint.generator")
rows(
    random_factory(2),
    "aten::randint.low",
    "aten::randint.low_generator",
    "aten::normal.float_float",
)
rows(
    random_like,
    "aten::rand_like",
    "aten::rand_like.generator",
    "aten::randn_like",
    "aten::randn_like.generator",
    "aten::randint_like",
    "aten::randint_like.generator",
    "aten::randint_like.low_dtype",
    "aten::randint_like.low_generator_dtype",
    "aten::bernoulli.p",
    "aten::normal_functional",
    "aten::uniform",
    "aten::exponential",
    "aten::geometric",
    "aten::cauchy",
    "aten::log_normal",
    "aten::random",
    "aten::random.from",
    "aten::random.to",
)
rows(
    random_inplace,
    "aten::normal_",
    "aten::uniform_",
    "aten::exponential_",
    "aten::geometric_",
    "aten::cauchy_",
    "aten::log_normal_",
    "aten::random_",
    "aten::random_.from",
    "aten::random_.to",
    "aten::bernoulli_.float",
    "aten::bernoulli_.Tensor",
)
rows(
    sample_from,
    "aten::poisson",
    "aten::binomial",
    "aten::_standard_gamma",
    "aten::_sample_dirichlet",
)
