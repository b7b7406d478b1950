"""Strides of results in traces equal those of torch's kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import MetaTensorType as Meta
from tsfunc import grad, jacfwd, specialize, vmap
from tsfunc.bridge.sizes.strides import hint_of

# By the number of operands.
FUNCTIONS: dict[int, dict[str, Callable[..., Tensor]]] = {
    1: {
        "sin": torch.sin,
        "logical_not": torch.logical_not,
        "gelu": torch.nn.functional.gelu,
        "clamp": lambda x: x.clamp(0, 1),
        "power": lambda x: x**2,
        "power of a number": lambda x: 2**x,
        "plus a number": lambda x: torch.add(x, 2.0, alpha=2),
        "from a number": lambda x: 1 - x,
        "by a number": lambda x: x / 3,
        "floor by a number": lambda x: x // 2.0,
        "remainder by a number": lambda x: x.remainder(2.0),
        "compared with a number": lambda x: x.gt(0),
        "masked": lambda x: x.masked_fill(x > 0, 1.0),
        "where and a number": lambda x: torch.where(x > 0, x, 1.0),
        "xlogy": lambda x: torch.xlogy(x, 2.0),
        "mvlgamma": lambda x: torch.mvlgamma(x.abs() + 1, 2),
        "multigammaln": lambda x: torch.special.multigammaln(x.abs() + 1, 2),
        "poisson": lambda x: torch.poisson(x.abs()),
        "standard_gamma": lambda x: torch._standard_gamma(x.exp()),
        "normal of a deviation": lambda x: torch.normal(1.0, x.abs()),
        "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
        "rrelu in evaluation": torch.nn.functional.rrelu,
    },
    2: {
        "add": torch.add,
        "mul": torch.mul,
        "atan2": torch.atan2,
        "maximum": torch.maximum,
        "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    },
    3: {
        "addcmul": torch.addcmul,
        "where": lambda x, y, z: torch.where(x.gt(0), y, z),
    },
}

aten = torch.ops.aten
# torch's rules for fake tensors take the operands of these operators in another order.
REORDERED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softplus_backward": lambda x, y: aten.softplus_backward(x, y, 1.0, 20.0),
    "elu_backward": lambda x, y: aten.elu_backward(x, 1.0, 1.0, 1.0, False, y),
    "hardtanh_backward": lambda x, y: aten.hardtanh_backward(x, y, -1.0, 1.0),
    "hardswish_backward": aten.hardswish_backward,
    "hardsigmoid_backward": aten.hardsigmoid_backward,
    "logit_backward": aten.logit_backward,
    "leaky_relu_backward": lambda x, y: aten.leaky_relu_backward(x, y, 0.1, False),
    "threshold_backward": lambda x, y: aten.threshold_backward(x, y, 0.5),
    "native_dropout_backward": lambda x, y: aten.native_dropout_backward(x, y > 0, 2.0),
    "mse_loss_backward": lambda x, y: aten.mse_loss_backward(x, x, y, 0),
    "smooth_l1_loss_backward": lambda x, y: aten.smooth_l1_loss_backward(x, x, y, 0, 1.0),
    "huber_loss_backward": lambda x, y: aten.huber_loss_backward(x, x, y, 0, 1.0),
    "binary_cross_entropy": lambda x, y: aten.binary_cross_entropy(
        x.sigmoid(), y.sigmoid(), None, 0
    ),
    "standard_gamma_grad": lambda x, y: torch._standard_gamma_grad(x.exp(), y.exp()),
    "xlogy": lambda x, y: torch.xlogy(x, y.exp()),
    "copysign": torch.copysign,
    "floor_divide": torch.floor_divide,
    "rsub": torch.rsub,
    "normal": lambda x, y: torch.normal(x, y.abs()),
}


def _laid_out(shape: list[int], rng: random.Random) -> Tensor:
    """Return a tensor whose dims are permuted in memory, some with gaps."""
    order = rng.sample(range(len(shape)), len(shape))
    x = torch.randn([shape[i] * rng.choice((1, 1, 2)) for i in order])
    for dim, i in enumerate(order):
        x = x.narrow(dim, 0, shape[i])
    return x.permute([order.index(i) for i in range(len(shape))])


@pytest.mark.parametrize(
    ("count", "name"), [(count, name) for count, found in FUNCTIONS.items() for name in found]
)
def test_operands_in_any_layout(count: int, name: str, request: pytest.FixtureRequest) -> None:
    rng = random.Random(f"{request.config.option.hypothesis_seed} {name}")
    f = FUNCTIONS[count][name]
    for _ in range(8):
        sizes = [rng.choice((1, 2, 3)) for _ in range(rng.randint(1, 5))]

        def operand(sizes: list[int] = sizes) -> Tensor:
            kept = sizes[-rng.choice((len(sizes), rng.randint(1, len(sizes)))) :]
            return _laid_out([n if rng.random() < 0.7 else 1 for n in kept], rng)

        operands = [operand() for _ in range(count)]
        if name == "addcmul":  # writes into the shape of its first operand
            operands[0] = _laid_out(list(torch.broadcast_shapes(*[x.shape for x in operands])), rng)
        strides: list[Any] = []

        def seen(*operands: Tensor, strides: list[Any] = strides) -> Tensor:
            out = f(*operands)
            strides[:] = out.stride()
            return out * 2

        specialize(seen)(*operands)
        assert tuple(strides) == f(*operands).stride(), [(x.shape, x.stride()) for x in operands]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", [*FUNCTIONS[2], *REORDERED])
def test_two_layouts(name: str, named: bool, request: pytest.FixtureRequest) -> None:
    """The result has the strides of the kernel's result, for named sizes, too."""
    rng = random.Random(f"{request.config.option.hypothesis_seed} {name}")
    f = {**FUNCTIONS[2], **REORDERED}[name]
    sizes: dict[Any, int] = {"b": 2, "s": 7, 3: 3}
    for _ in range(3):
        orders = [rng.sample(range(3), 3) for _ in range(2)]
        strides: list[Any] = []

        def seen(x: Tensor, y: Tensor, orders: Any = orders, strides: Any = strides) -> Tensor:
            out = f(x.permute(orders[0]), y.permute(orders[1]))
            strides.append([hint_of(step) for step in out.stride()])
            return out.clone()

        shapes = [[[*sizes][order.index(i)] for i in range(3)] for order in orders]
        operands = [torch.randn([sizes[n] for n in shape]) for shape in shapes]
        descriptors = {"x": Meta(shapes[0]), "y": Meta(shapes[1])}
        (specialize(seen, descriptors) if named else specialize(seen))(*operands)
        seen(*operands)
        assert strides[0] == strides[-1], orders


_STATISTICS = torch.zeros(4), torch.ones(4)


def _normalized(x: Tensor, training: bool) -> Tensor:
    mean, variance = (None, None) if training else _STATISTICS
    return torch.nn.functional.batch_norm(x, mean, variance, training=training)


def _normalized_backward(x: Tensor) -> Tensor:
    _, mean, scale = aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    grads = aten.native_batch_norm_backward(
        torch.ones_like(x), x, None, None, None, mean, scale, True, 1e-5, [True, False, False]
    )
    result: Tensor = grads[0]
    return result


# Operators whose results have the memory format of an argument, contiguous or channels last.
FORMATTED: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_norm": lambda x: _normalized(x, training=True),
    "batch_norm in evaluation": lambda x: _normalized(x, training=False),
    "native_batch_norm_backward": _normalized_backward,
    "max_unpool2d": lambda x: torch.nn.functional.max_unpool2d(
        x, torch.arange(30).view(6, 5).expand(x.shape), [2, 2], output_size=[12, 10]
    ),
    "channel_shuffle": lambda x: torch.nn.functional.channel_shuffle(x, 2),
    "replication_pad2d_backward": lambda x: aten.replication_pad2d_backward(
        torch.ones(x.shape[0], 4, 8, 7), x, [1, 1, 1, 1]
    ),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", FORMATTED)
def test_results_in_the_memory_format_of_an_argument(name: str, named: bool) -> None:
    f, strides = FORMATTED[name], list[Any]()
    plain = torch.randn(2, 4, 6, 5)
    for order in ([0, 1, 2, 3], [0, 2, 3, 1], [0, 2, 1, 3], [3, 2, 1, 0], [1, 0, 2, 3]):
        for end in (None, -2):
            gaps = plain.repeat(1, 2, 1, 1) if end else plain
            memory = gaps.permute(order).contiguous()
            back = [order.index(i) for i in range(4)]

            def seen(x: Tensor, back: Any = back) -> Tensor:
                out = f(x.permute(back)[:, :4])
                strides.append([hint_of(step) for step in out.stride()])
                return out.clone()

            shape = list(memory.shape)
            described = {"x": Meta(["n" if i == 0 else shape[k] for k, i in enumerate(order)])}
            (specialize(seen, described) if named else specialize(seen))(memory)
            seen(memory)
            assert strides[-2] == strides[-1], order


@pytest.mark.parametrize("training", [False, True])
def test_a_derivative_that_views_normalized_tokens(training: bool) -> None:
    """A batch norm over tokens returns another layout than its argument has."""

    def loss(x: Tensor) -> Tensor:
        tokens = _normalized(x.transpose(1, 2), training).transpose(1, 2).reshape(-1, 4)
        return (tokens * torch.arange(4.0)).square().cos().sum()

    program = specialize(grad(loss), {"x": Meta(["b", "s", 4])})
    for b, s in ((2, 7), (3, 5)):
        x = torch.randn(b, s, 4)
        torch.testing.assert_close(program(x), grad(loss)(x))


def test_a_training_step_that_views_a_gradient_of_softplus() -> None:
    """The reshape of the kernel's result is a view in the trace, too."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        x = torch.nn.functional.softplus((x.reshape(-1, 4) @ w).view(*x.shape[:2], 4))
        return (x.transpose(1, 2).contiguous().sin() * 2).sum()

    program = specialize(grad(loss, (0, 1)), {"x": Meta(["b", "s", 4])})
    w = torch.randn(4, 4)
    for b, s in ((2, 7), (3, 5)):
        x = torch.randn(b, s, 4)
        torch.testing.assert_close(program(x, w), grad(loss, (0, 1))(x, w))


@pytest.mark.parametrize("size", [1, 2])
def test_a_view_in_the_program_of_a_jacobian_over_the_last_dim(size: int) -> None:
    f = vmap(jacfwd(lambda v: (v * 2).reshape(-1)[:3]), in_dims=3)
    x = torch.randn(3, 4, 4, size)
    torch.testing.assert_close(specialize(f)(x), f(x))


def _drawn_indices(x: Tensor, rng: random.Random) -> tuple[Any, ...]:
    """Return indices of some dims, which broadcast, in random layouts."""
    sizes = [rng.choice((1, 2, 3)) for _ in range(rng.randint(1, 3))]
    indices: list[Any] = [slice(None)] * x.dim()
    for dim in rng.sample(range(x.dim()), rng.randint(1, x.dim())):
        kept = [n if rng.random() < 0.8 else 1 for n in sizes][rng.choice((0, 0, -1)) :]
        indices[dim] = _laid_out(kept, rng).abs().mul(9).long() % x.shape[dim]
    return tuple(indices)


def test_an_indexed_tensor(request: pytest.FixtureRequest) -> None:
    """The result has the layout of the indices in the indexed dims."""
    rng = random.Random(f"{request.config.option.hypothesis_seed}")
    for _ in range(40):
        x = _laid_out([rng.choice((1, 2, 3, 4)) for _ in range(rng.randint(1, 4))], rng)
        indices = _drawn_indices(x, rng)
        known: list[Any] = []

        def f(x: Tensor) -> Tensor:
            result: Tensor = x[indices]  # noqa: B023 - called in this step of the loop
            known.extend(result.stride())  # noqa: B023
            return result

        result = specialize(f)(x)
        pairs = zip(known, x[indices].stride(), result.shape, strict=True)
        assert all(step == expected for step, expected, size in pairs if size > 1)
        torch.testing.assert_close(result, x[indices])


@pytest.mark.parametrize("shape", [None, ["b", "t"], ["b", 5]])
def test_a_view_of_a_tensor_indexed_in_another_order(shape: Any) -> None:
    """A derivative views the eager result if that is possible, and copies otherwise."""
    weight = torch.randn(7, 3, requires_grad=True)

    def f(tokens: Tensor) -> Any:
        rows = weight[tokens[:, :-1].T]
        target = tokens[:, 1:].T.flatten() % 3
        loss = torch.nn.functional.cross_entropy(rows.flatten(0, 1), target)
        return torch.autograd.grad(loss, weight)

    program = specialize(f) if shape is None else specialize(f, {"tokens": Meta(shape)})
    for batch in (4, 2):
        tokens = torch.randint(0, 7, (batch, 5))
        torch.testing.assert_close(program(tokens), f(tokens))
