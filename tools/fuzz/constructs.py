"""The constructs that functions are drawn from: a list for each family.

A construct takes a ``Draw`` and adds statements by its ``let`` and ``do``. A construct that is a
single expression is a template: ``{x}`` is a tensor of floats, ``{y}`` one that broadcasts to it,
``{n}`` a number, ``{m}`` a mask in the shape of ``{x}``, ``{d}`` and ``{e}`` dims of it. A
statement that torch refuses is drawn again, so a template may fail for some shapes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import torch

from tools.fuzz.draw import Construct, Draw, RejectedError
from tools.fuzz.program import Block


def template(text: str) -> Construct:
    """Return the construct of an expression."""

    def construct(d: Draw) -> None:
        x = d.float(min_rank=1 if re.search(r"\{[de]\}", text) else 0)
        found = {"x": x, "n": d.number(), "m": d.mask(x)}
        if "{y}" in text:
            found["y"] = d.like(x)
        if "{d}" in text:
            found["d"] = str(d.dim(x))
        if "{e}" in text:
            found["e"] = str(d.dim(x))
        d.let(text.format(**found))

    construct.__name__ = text
    return construct


def templates(text: str) -> list[Construct]:
    return [template(line.strip()) for line in text.strip().splitlines()]


_ELEMENTWISE = templates(
    """
    {x}.sin()
    torch.cos({x})
    {x}.tanh() * {n}
    torch.exp({x}.sin())
    ({x} * {x} + 1).log()
    ({x}.square() + 0.5).sqrt()
    {n} - {x}
    {x} / ({y}.square() + 1)
    1 / ({x}.abs() + 0.7)
    {x} * {y}
    {y} + {x} * {n}
    torch.sigmoid({x})
    F.softplus({x})
    F.gelu({x})
    F.silu({x})
    F.elu({x})
    F.relu({x} - 0.123)
    F.leaky_relu({x} + 0.0123)
    {x}.abs()
    {x} ** 2
    {x} ** 3
    ({x}.square() + 1) ** {y}.sin()
    {x}.clamp(-0.513, 0.717)
    {x}.clamp(min=-0.313)
    torch.where({m}, {x}, {n})
    torch.where({m}, {x}, {y})
    torch.where({m}, {x}.sin(), 0.0)
    {x}.where({m}, {y})
    {x}.where({m}, torch.tensor({n}, dtype=torch.float64))
    {y}.where({y} > 0, {x})
    {n} ** {x}.sin().abs()
    {x} // ({y}.square() + 0.7) + {x}
    {n} % ({x}.square() + 0.3)
    ({x} * 4).floor() / 4 * {x}
    ({x} > {n}) ^ ({x} < {y})
    torch.where(~({m}), {x}, 1) + ({m})
    ({x} * 3).long() * {x}
    {x}.float().double() * {x}
    {x}.to(torch.complex128).mul(1 + 2j).abs()
    (3 * {x}).round(decimals=1) - {x}
    torch.maximum({x}, {y} * 0.9 + 0.01)
    torch.minimum({x}, {y} - 0.137)
    torch.atan2({x}, {y}.square() + 1)
    torch.hypot({x}, {y} + 3)
    torch.lerp({x}, {y}, 0.3)
    torch.addcmul({x}, {x}, {y}, value=0.5)
    torch.addcdiv({x}, {x}, {y}.square() + 1)
    {x}.erf()
    torch.expm1({x}.sin())
    torch.log1p({x} * {x})
    {x}.masked_fill({m}, {n})
    {x}.sign() * {x}
    torch.xlogy({x}, {y}.square() + 1)
    torch.logaddexp({x}, {y})
    torch.fmod({x}, 0.71)
    {x}.frac()
    {x}.nan_to_num()
    ({m}).to({x}.dtype)
    torch.logit({x}.sigmoid())
    torch.special.i0e({x})
    torch.special.entr({x}.square() + 1)
    torch.sinc({x} + 2.3)
    torch.copysign({x}, {y})
    torch.heaviside({x}, {y}) * {x}
    torch.polar({x}.square() + 1, {x}).real
    torch.view_as_real(torch.complex({x}, {y} * {x}))
    torch.complex({x}, {x}.sin()).abs()
    torch.complex({x}, {x}.cos()).conj().imag
    (torch.complex({x}, {x}.cos()) * 1j).angle()
    """
)
_REDUCTIONS = templates(
    """
    {x}.sum()
    {x}.sum({d})
    {x}.sum({d}, keepdim=True)
    {x}.mean()
    {x}.mean({d})
    {x}.sum(({d}, {e}))
    {x}.prod()
    {x}.prod({d})
    {x}.amax({d})
    {x}.amin(({d}, {e}), keepdim=True)
    {x}.max()
    {x}.max({d}).values
    {x}.min({d}, keepdim=True)[0]
    {x}.argmax({d})
    {x}.argmin()
    {x}.var({d})
    {x}.std()
    {x}.std({d}, keepdim=True)
    torch.var_mean({x}, {d}, correction=0)[0]
    {x}.logsumexp({d})
    {x}.norm()
    {x}.norm(dim={d})
    torch.linalg.vector_norm({x}, 3, {d})
    {x}.cumsum({d})
    ({x} + 2).cumprod({d})
    {x}.logcumsumexp({d})
    {x}.cummax({d}).values
    {x}.softmax({d})
    {x}.log_softmax({d})
    {x}.median()
    {x}.median({d})[0]
    {x}.quantile(0.3)
    {x}.quantile(0.6, {d})
    {x}.nansum({d})
    ({x} > {n}).any({d})
    ({x} > 0).all()
    {x}.count_nonzero({d})
    torch.aminmax({x}).max
    torch.diff({x}, dim={d})
    torch.trapezoid({x}, dim={d})
    {x}.sum({d}).sum() * {x}
    {x}.dist({y})
    {x}.renorm(2, {d}, 0.9)
    """
)
_VIEWS = templates(
    """
    {x}.reshape(-1)
    {x}.flatten()
    {x}.ravel() * 2
    {x}.unsqueeze({d})
    {x}[None]
    {x}[..., None]
    {x}.squeeze()
    {x}.squeeze({d})
    {x}.transpose({d}, {e})
    {x}.movedim({d}, {e})
    {x}.swapaxes({d}, {e})
    {x}.mT
    {x}.t()
    {x}.permute(tuple(reversed(range({x}.dim()))))
    {x}.expand(2, *{x}.shape)
    {x}.expand_as({x})
    {x}.diagonal()
    {x}.diagonal(-1, {d}, {e})
    {x}.select({d}, 0)
    {x}.select({d}, -1)
    {x}.narrow({d}, 1, 1)
    {x}.chunk(2, {d})[-1]
    {x}.split(2, {d})[0]
    {x}.unbind({d})[-1]
    {x}.unfold({d}, 2, 1)
    {x}.flip({d})
    {x}.roll(1, {d})
    {x}.roll(2)
    {x}.rot90(1, (0, 1))
    {x}.repeat(2, *[1] * {x}.dim())
    {x}.tile((2,))
    {x}.repeat_interleave(2, {d})
    {x}.view(-1)
    {x}.contiguous().view({x}.shape[0], -1)
    {x}.unflatten({d}, (1, -1))
    {x}.view_as({x})
    {x}.triu()
    {x}.tril(-1)
    {x}.diag()
    torch.diag_embed({x})
    torch.block_diag({x}, {x})
    torch.stack([{x}, {x} * {n}], {d})
    torch.cat([{x}, {x}.sin()], {d})
    torch.hstack([{x}, {x}])
    torch.column_stack([{x}, {x}])
    torch.broadcast_tensors({x}, {y})[1]
    torch.atleast_3d({x})
    {x}.clone()
    {x}.contiguous()
    {x}.detach() * {x}
    F.pad({x}, (1, 2))
    F.pad({x}, (0, 1), value=0.5)
    torch.constant_pad_nd({x}, (-1, 1))
    {x}.contiguous().as_strided((2,), (1,))
    {x}.reshape({x}.shape[0], -1)
    {x}.reshape(*{x}.shape[:-1], 1, -1)
    {x}.reshape({x}.shape[::-1])
    {x}.view({x}.shape) * 2
    {x}.view(-1, {x}.shape[-1])
    {x}.contiguous().view({x}.numel(), 1)
    {x}.flatten(0, 1)
    {x}.unflatten({d}, (1, {x}.shape[{d}]))
    {x}.mT.reshape({x}.shape)
    {x}.expand(2, *{x}.shape).reshape(-1, *{x}.shape[1:])
    {x}[..., None].expand(*{x}.shape, 2).reshape({x}.shape[0], -1)
    {x}[::2].reshape(-1)
    {x}.transpose({d}, {e}).reshape({x}.shape[0], -1)
    """
)
_PRODUCTS = templates(
    """
    {x} @ {x}.mT
    {x}.mT @ {x}
    {x} @ {y}
    {x}.matmul({y})
    torch.outer({x}, {y})
    torch.dot({x}, {x}.sin())
    torch.mv({x}, {y})
    torch.einsum("i,j->ij", {x}, {x}.cos())
    torch.einsum("ij,kj->ik", {x}, {x} * 2)
    torch.einsum("...i,...i->...", {x}, {y})
    torch.tensordot({x}, {x}, 1)
    torch.tensordot({x}, {x}, dims=([0], [0]))
    torch.kron({x}, {y})
    torch.bmm({x}, {x}.mT)
    torch.addmm({y}, {x}, {x}.mT)
    torch.cdist({x}, {x} + 1.5)
    torch.cross({x}, {x}.roll(1, {d}), {d})
    torch.linalg.multi_dot([{x}, {x}.mT, {x}])
    F.linear({x}, {x})
    F.bilinear({x}, {x}, torch.ones(2, {x}.shape[-1], {x}.shape[-1], dtype=torch.float64))
    torch.baddbmm({y}, {x}, {x}.mT)
    torch.inner({x}, {y})
    torch.vander({x})
    F.cosine_similarity({x}, {y} + 1, {d})
    F.pdist({x})
    """
)
_LINALG = templates(
    """
    torch.linalg.inv({x} @ {x}.mT + 2 * torch.eye({x}.shape[-2], dtype=torch.float64))
    torch.linalg.det({x} @ {x}.mT + torch.eye({x}.shape[-2], dtype=torch.float64))
    torch.linalg.slogdet({x} @ {x}.mT + torch.eye({x}.shape[-2], dtype=torch.float64))[1]
    torch.linalg.cholesky({x} @ {x}.mT + torch.eye({x}.shape[-2], dtype=torch.float64))
    torch.linalg.solve({x} @ {x}.mT + 2 * torch.eye({x}.shape[-2], dtype=torch.float64), {x})
    torch.linalg.matrix_exp({x} @ {x}.mT * 0.1)
    torch.linalg.eigvalsh({x} @ {x}.mT + torch.diag(torch.arange({x}.shape[-2]) * 2.0))
    torch.linalg.svdvals({x} + 1.3)
    torch.linalg.matrix_norm({x})
    torch.linalg.pinv({x} @ {x}.mT + 2 * torch.eye({x}.shape[-2], dtype=torch.float64))
    torch.linalg.qr({x} @ {x}.mT + 3 * torch.eye({x}.shape[-2], dtype=torch.float64))[1]
    torch.fft.rfft({x}).abs().square()
    torch.fft.fft({x}, dim={d}).real
    torch.fft.irfft(torch.fft.rfft({x}, dim={d}), n={x}.shape[{d}], dim={d})
    torch.fft.fftshift({x})
    torch.trace({x})
    torch.linalg.solve_triangular(({x} @ {x}.mT + 2).triu().abs() + 1, {x}, upper=True)
    """
)
_NORMS = templates(
    """
    F.layer_norm({x}, {x}.shape[-1:])
    F.layer_norm({x}, {x}.shape[-1:], {x}.reshape(-1)[:{x}.shape[-1]], None)
    F.rms_norm({x}, {x}.shape[-1:])
    F.group_norm({x}[None], 1)
    F.batch_norm({x}, None, None, training=True)
    F.instance_norm({x}[None])
    F.normalize({x}, dim={d})
    F.local_response_norm({x}[None], 2)
    F.mse_loss({x}, {y})
    F.smooth_l1_loss({x}, {y})
    F.l1_loss({x}, {x}.sin() - 1, weight={x}.square() + 1)
    F.l1_loss({x}, {x}.cos() + {n}, reduction="none", weight={x})
    F.huber_loss({x}, {y}, reduction="none")
    F.kl_div({x}.log_softmax({d}), {x}.cos().softmax({d}), reduction="sum")
    F.binary_cross_entropy_with_logits({x}, {y}.sigmoid())
    F.binary_cross_entropy({x}.sigmoid(), {y}.sigmoid())
    F.cross_entropy({x}, torch.arange({x}.shape[0]) % {x}.shape[-1])
    F.cross_entropy({x}, {x}.argmin(-1), label_smoothing=0.1)
    F.nll_loss({x}.log_softmax(-1), torch.zeros({x}.shape[0], dtype=torch.long), reduction="none")
    F.soft_margin_loss({x}, {x}.sign())
    F.scaled_dot_product_attention({x}, {x}.sin(), {x}.cos())
    F.scaled_dot_product_attention({x}, {x}.sin(), {x}.cos(), is_causal=True)
    F.one_hot({x}.argmax({d}), {x}.shape[{d}]).double() * {n}
    F.embedding(torch.arange(3) % {x}.shape[0], {x})
    F.glu({x}, {d})
    F.softmin({x}, {d})
    F.gaussian_nll_loss({x}, {y}, {x}.square() + 0.5)
    F.poisson_nll_loss({x}, {y}.square())
    F.triplet_margin_loss({x}, {x}.sin() - 1, {x}.cos() + 1)
    F.margin_ranking_loss({x}, {y} * 0.3, {x}.sign())
    torch.cov({x})
    torch.corrcoef({x})
    """
)
_CONVOLUTIONS = templates(
    """
    F.conv1d({x}[None], {x}[:, None, :2], groups={x}.shape[0])
    F.conv1d({x}[None], torch.ones(2, {x}.shape[0], 2, dtype=torch.float64), padding=1)
    F.conv1d({x}, {x}[:1, :, :2].sin(), stride=2)
    F.conv2d({x}[None], {x}[None, :, :2, :1].cos())
    F.conv2d({x}[None], torch.ones(1, {x}.shape[0], 2, 2, dtype=torch.float64), padding="same")
    F.conv_transpose1d({x}[None], {x}[:, None, :2])
    F.conv_transpose2d({x}[None], {x}[:, None, :1, :2])
    F.avg_pool1d({x}[None], 2)
    F.max_pool1d({x}[None], 2, 1)
    F.max_pool2d({x}[None], 2)
    F.avg_pool2d({x}[None], (1, 2))
    F.adaptive_avg_pool1d({x}[None], 2)
    F.adaptive_max_pool1d({x}[None], 2)
    F.lp_pool1d({x}[None].abs() + 0.3, 2, 2)
    F.interpolate({x}[None], scale_factor=2, mode="nearest")
    F.interpolate({x}[None], size=4, mode="linear")
    F.interpolate({x}[None], size=(3, 4), mode="bilinear")
    F.unfold({x}[None], 2)
    F.pad({x}[None], (1, 1), mode="reflect")
    F.pad({x}[None], (1, 1), mode="replicate")
    F.pad({x}[None], (1, 1), mode="circular")
    F.pixel_shuffle({x}[None].repeat_interleave(4, 1), 2)
    F.channel_shuffle({x}[None], 1)
    F.interpolate({x}[None], size={x}.shape[-1] + 2, mode="linear", align_corners=True)
    F.interpolate({x}[None, None], scale_factor=1.5, mode="bicubic")
    F.interpolate({x}[None, None], scale_factor=(1, 2), mode="bilinear", align_corners=True)
    F.interpolate({x}[None], scale_factor=0.5, mode="area")
    F.interpolate({x}[None], size={x}.shape[-1] + 1, mode="nearest-exact")
    F.interpolate({x}[None, None], size=(4, 3), mode="bilinear", antialias=True)
    F.grid_sample({x}[None], torch.full((1, 2, 2, 2), 0.3).double(), align_corners=False)
    """
)
# Weights are products of the input with itself, so that their sizes fit.
_RECURRENT = templates(
    """
    torch.rnn_tanh_cell({x}, {x}.cos(), {x}.mT @ {x}, {x}.mT @ {x}.sin())
    torch.rnn_relu_cell({x}, {x}.cos(), {x}.mT @ {x} + 0.3, {x}.mT @ {x}.sin())
    torch.gru_cell({x}, {x}.cos(), ({x}.mT @ {x}).repeat(3, 1), ({x}.mT @ {x}).sin().tile(3, 1))
    torch.lstm_cell({x}, ({x}.cos(), {x}), *[({x}.mT @ {x}).repeat(4, 1)] * 2)[0]
    torch.lstm_cell({x}, ({x}.cos(), {x}), *[({x}.mT @ {x}).tile(4, 1)] * 2)[1]
    torch.rnn_tanh({x}[:, None], {x}[None, :1], [{x}.mT @ {x}] * 2, False, 1, 0.0, False, False, False)[0]
    torch.gru({x}[:, None], {x}[None, :1], [({x}.mT @ {x}).repeat(3, 1)] * 2, False, 1, 0.0, False, False, False)[0]
    torch.lstm({x}[:, None], [{x}[None, :1].sin()] * 2, [({x}.mT @ {x}).repeat(4, 1)] * 2, False, 1, 0.0, False, False, False)[0]
    torch.lstm({x}[None], [{x}[None, :1].sin()] * 2, [({x}.mT @ {x}).repeat(4, 1)] * 2, False, 1, 0.0, False, False, True)[2]
    """  # noqa: E501
)
_SORTING = templates(
    """
    {x}.sort({d})[0]
    {x}.sort({d}, descending=True).values
    {x}.sort({d})[1]
    {x}.argsort({d})
    {x}.topk(2, {d})[0]
    {x}.topk(1, {d}, largest=False).values
    {x}.kthvalue(1, {d})[0]
    {x}.msort()
    torch.searchsorted({x}.sort(-1)[0].contiguous(), {x})
    torch.bucketize({x}, torch.tensor([-0.5, 0.1, 0.6], dtype=torch.float64))
    {x}.gather({d}, {x}.argsort({d}))
    torch.take_along_dim({x}, {x}.argsort({d}), {d})
    {x}.argsort({d}).argsort({d}) * {x}
    torch.histc({x}, 3, -1, 1)
    {x}.mode({d})[0]
    """
)


# ---- Indexing and writes -----------------------------------------------------------------------


def _index_item(d: Draw, size: int) -> str:
    """Return one index of a dim of this size."""
    kind = d.rng.randrange(7)
    if kind == 0:
        return str(d.place(size))
    if kind == 1:
        return f"{d.rng.randrange(max(size, 1))}:"
    if kind == 2:
        return f":{d.rng.randrange(1, size + 1) if size else 0}"
    if kind == 3:
        return "::2"
    if kind == 4:
        return d.indices(size, [d.rng.choice([1, 2, 3])])
    if kind == 5:
        return d.indices(size, [])
    return ":"


def _subscript(d: Draw, x: str) -> str:
    shape = d.shape(x)
    if not shape:
        return d.one_of("...", "None", "()")
    items = [_index_item(d, size) for size in shape[: d.rng.randrange(1, len(shape) + 1)]]
    if d.chance(0.15):
        items.insert(d.rng.randrange(len(items) + 1), d.pick("None", "..."))
    return ", ".join(items)


def index(d: Draw) -> None:
    x = d.float()
    d.let(f"{x}[{_subscript(d, x)}]")


def index_negative_axes(d: Draw) -> None:
    x = d.float(min_rank=1)
    items = [_index_item(d, size) for size in d.shape(x)[-1:]]
    d.let(f"{x}[..., {items[0]}]")


def select_by_data(d: Draw) -> None:
    x = d.float(min_rank=1)
    dim = d.dim(x)
    d.let(f"{x}.index_select({dim}, {d.indices(d.size(x, dim), [2])})")


def gather(d: Draw) -> None:
    x = d.float(min_rank=1)
    dim = d.dim(x)
    shape = list(d.shape(x))
    shape[dim] = d.rng.choice([1, 2, 3])
    d.let(f"{x}.gather({dim}, {d.indices(d.size(x, dim), shape)})")


def take(d: Draw) -> None:
    x = d.float()
    d.let(f"torch.take({x}, {d.indices(int(d.env[x].numel()), [2])})")


def one_of_example(d: Draw) -> None:
    x = d.float(min_rank=1)
    d.let(f"{x}[{d.indices(d.size(x, 0), [])}]")


def embedding(d: Draw) -> None:
    x = d.float(min_rank=2, max_rank=2)
    d.let(f"F.embedding({d.indices(d.size(x, 0), [2, 1])}, {x})")


def by_argument(d: Draw) -> None:
    """Index by an integer argument."""
    x, i = d.float(min_rank=1), d.variable("index")
    d.let(f"{x}[{i} % {max(1, d.size(x, 0))}]")


def by_mask_argument(d: Draw) -> None:
    m = d.variable("mask")
    x = d.variable("float", lambda v: tuple(v.shape) == d.shape(m))
    d.let(d.pick(f"torch.where({m}, {x}, 0.5)", f"{x} * {m}", f"{x}.masked_fill(~{m}, 2.0)"))


def selected(d: Draw) -> None:
    """Read by a mask, in forms that need no data-dependent size."""
    x = d.float(min_rank=1)
    m = d.mask(x)
    d.let(
        d.pick(
            f"{x}[{m}].sum()", f"{x}[{m}].sin().sum()", f"({x}[{m}] * {d.number()}).square().sum()"
        )
    )


def _written(d: Draw, min_rank: int = 0, *, own: bool = False) -> str:
    """Return a tensor that the function may write into; ``own``: made in the same block."""
    shared = [name for name in d.shared if len(d.shape(name)) >= min_rank]
    if shared and not own and d.chance(0.5):
        return str(d.rng.choice(shared))
    x = d.float(min_rank=min_rank)
    made = d.pick(
        f"{x}.clone()",
        f"{x}.clone()",
        f"{x} * {d.number()}",
        f"torch.zeros({', '.join(map(str, d.shape(x))) or '()'}, dtype=torch.float64)",
        f"torch.zeros_like({x})",
        f"{x}.new_ones({x}.shape)",
        f"torch.cat([{x}.unsqueeze(0), {x}.sin().unsqueeze(0)])",
        f"{x}.transpose(0, -1).clone()" if d.shape(x) else f"{x}.clone()",
        f"{x}.permute({tuple(reversed(range(len(d.shape(x)))))})"
        ".clone(memory_format=torch.contiguous_format)",
    )
    return d.let(made)


def write_item(d: Draw) -> None:
    y = _written(d, 1)
    text = _subscript(d, y)
    value = d.pick(d.number(), d.float(max_rank=0) if d.chance(0.5) else d.number(), d.float())
    d.do(f"{y}[{text}] {d.pick('=', '=', '+=', '*=')} {value}")


def write_mask(d: Draw) -> None:
    y = _written(d, 1)
    x = d.variable("float", lambda v: tuple(v.shape) == d.shape(y))
    m = d.mask(x)
    d.do(
        d.pick(
            f"{y}[{m}] = {d.number()}",
            f"{y}[{m}] *= {d.number()}",
            f"{y}[{m}] = {x}[{m}].sin()",
            f"{y}[{m}] += {x}[{m}] * 2",
            f"{y}.masked_fill_({m}, {d.number()})",
            f"{y}[{m}] = {y}[{m}].cos()",
        )
    )


def write_view(d: Draw) -> None:
    y = _written(d, 1)
    dim, other = d.dim(y), d.dim(y)
    view = d.pick(
        f"{y}[0]",
        f"{y}[..., -1]",
        f"{y}.reshape(-1)",
        f"{y}.view(-1)",
        f"{y}.flatten()",
        f"{y}.transpose({dim}, {other})",
        f"{y}.mT",
        f"{y}.select({dim}, {d.place(d.size(y, dim))})",
        f"{y}.narrow({dim}, 0, 1)",
        f"{y}.diagonal()",
        f"{y}.unsqueeze({dim})",
        f"{y}.chunk(2, {dim})[0]",
        f"{y}.unbind({dim})[0]",
        f"{y}.movedim({dim}, 0)",
        f"{y}[::2]",
        f"{y}.squeeze()",
    )
    if d.chance(0.5):
        view = d.let(view)
    value = d.like(y) if d.chance(0.3) else d.number()
    d.do(
        d.pick(
            f"{view}[0] = {d.number()}",
            f"{view}[-1] = {value}",
            f"{view}.mul_({value})",
            f"{view}.add_({value})",
            f"{view}.sin_()",
            f"{view}.fill_({d.number()})",
            f"{view}.copy_({view}.cos())",
            f"{view}.zero_()",
            f"{view}.clamp_(-0.41, 0.43)",
        )
    )
    if d.chance(0.3) and view.isalnum():
        d.do(f"{y}.mul_({d.number()})")
        d.let(f"{view} + 1")


def write_inplace_view(d: Draw) -> None:
    """Change a tensor's own shape in place."""
    y = _written(d, 1, own=True)
    dim, other = d.dim(y), d.dim(y)
    d.do(
        d.pick(
            f"{y}.t_()",
            f"{y}.transpose_({dim}, {other})",
            f"{y}.unsqueeze_({dim})",
            f"{y}.squeeze_()",
            f"{y}.swapaxes_({dim}, {other})",
        )
    )
    if d.chance(0.5):
        d.do(f"{y}.add_({d.number()})")


def write_whole(d: Draw) -> None:
    y = _written(d)
    x = d.like(y)
    d.do(
        d.pick(
            f"{y}.add_({x})",
            f"{y}.mul_({x}.sin())",
            f"{y} += {x}",
            f"{y} *= {d.number()}",
            f"{y}.copy_({x})",
            f"{y}.copy_({d.number()})",
            f"{y}.sigmoid_()",
            f"{y}.addcmul_({y}, {x})",
            f"{y}.lerp_({x}, 0.3)",
            f"{y}.fill_diagonal_(0.5)",
            f"{y}.square_()",
            f"{y}.sub_({x}, alpha=2)",
            f"{y}.fill_({x}.sum())",
            f"torch.add({y}, {x}, out={y})",
            f"F.relu({y}, inplace=True)",
        )
    )


def write_by_index(d: Draw) -> None:
    y = _written(d, 1)
    dim = d.dim(y)
    size = d.size(y, dim)
    rows = d.indices(size, [2])
    shape = list(d.shape(y))
    shape[dim] = 2
    factor = d.float(max_rank=0) if d.chance(0.5) else d.number()
    values = f"torch.ones({', '.join(map(str, shape))}, dtype=torch.float64) * {factor}"
    full = d.indices(size, shape)
    d.do(
        d.pick(
            f"{y}.index_add_({dim}, {rows}, {values})",
            f"{y}.index_fill_({dim}, {rows}, {d.number()})",
            f"{y}.scatter_add_({dim}, {full}, {values})",
            f"{y}.scatter_({dim}, {full}, {d.number()})",
            f"{y}.scatter_reduce_({dim}, {full}, {values}, 'amax')",
            f"{y}.index_put_(({d.indices(d.size(y, 0), [2])},), {y}[0] * 2, accumulate=True)",
        )
    )


def scatter(d: Draw) -> None:
    y = d.float(min_rank=1)
    dim = d.dim(y)
    size = d.size(y, dim)
    shape = list(d.shape(y))
    shape[dim] = 2
    full = d.indices(size, shape)
    values = f"torch.ones({', '.join(map(str, shape))}, dtype=torch.float64) * {d.number()}"
    along = ", ".join("-1" if i == dim % len(shape) else "1" for i in range(len(shape)))
    places = f"torch.arange({size}).reshape({along}).expand_as({y})"
    d.let(
        d.pick(
            f"{y}.scatter_add({dim}, {full}, {values})",
            f"{y}.index_add({dim}, {d.indices(size, [2])}, {values})",
            f"{y}.index_fill({dim}, {d.indices(size, [2])}, {d.number()})",
            f"{y}.scatter({dim}, {places}, {y}.sin())",
            f"{y}.scatter_reduce({dim}, {full}, {values}, 'sum')",
            f"{y}.scatter_reduce({dim}, {full}, {values}, 'mean')",
            f"{y}.select_scatter({y}.select({dim}, 0).sin(), {dim}, -1)",
            f"{y}.slice_scatter({y}.narrow({dim}, 0, 1).sin(), {dim}, 1, 2)",
            f"{y}.diagonal_scatter({y}.diagonal().cos())",
            f"{y}.masked_scatter({d.mask(y)}, {y}.sin())",
            f"torch.index_put({y}, ({d.indices(d.size(y, 0), [1])},), {y}[:1].cos())",
        )
    )


# ---- Factories ---------------------------------------------------------------------------------


def factory(d: Draw) -> None:
    x = d.float()
    n = d.rng.choice([2, 3, 4])
    d.let(
        d.pick(
            f"torch.arange({n}, dtype=torch.float64) * {x}.sum()",
            f"torch.eye({n}, dtype=torch.float64) * {x}.mean()",
            f"torch.full_like({x}, {d.number()}) * {x}",
            f"torch.linspace(0, 1, {n}, dtype=torch.float64) + {x}.sum()",
            f"torch.tensor([1.0, {d.number()}], dtype=torch.float64) * {x}.sum()",
            f"torch.ones({n}, dtype=torch.float64)",
            f"{x}.new_full(({n},), 0.3) * {x}.sum()",
            f"torch.stack([{x}.sum(), {x}.mean()])",
            f"torch.meshgrid({x}.reshape(-1)[:2], {x}.reshape(-1)[:3], indexing='ij')[1]",
            f"torch.combinations({x}.reshape(-1)[:3])",
            f"torch.cartesian_prod({x}.reshape(-1)[:2], {x}.reshape(-1)[:2])",
            f"torch.tril_indices({n}, {n}).double() * {x}.sum()",
            f"torch.scalar_tensor(2.0, dtype=torch.float64) * {x}",
        )
    )


# ---- Control flow ------------------------------------------------------------------------------


def _predicate(d: Draw, x: str) -> str:
    return d.one_of(f"{x}.sum() > {d.number()}", f"{x}.sum().sin() > 0.1", f"({x} > 0).any()")


def _shaped(d: Draw, shape: tuple[int, ...]) -> Callable[[], str]:
    """Return a result in a shape, from a recent variable of the block."""

    def result() -> str:
        late = [
            n for n, v in d.env.items() if isinstance(v, torch.Tensor) and v.dtype is torch.float64
        ]
        fitting = [n for n in late if tuple(d.env[n].shape) == shape]
        text = ", ".join(map(str, shape))
        newest = d.body[-1].target if d.body else None
        if newest in fitting:
            return str(newest)
        if newest in late and fitting:
            return f"{d.rng.choice(fitting)} + {newest}.sum().sin()"
        if fitting:
            return f"{d.rng.choice(fitting)} * {d.number()}"
        return f"{d.rng.choice(late)}.sum().sin().expand({text or '()'})"

    return result


def choice(d: Draw) -> None:
    x = d.float()
    passes = d.chance(0.5)
    params = {f"p{d.taken + 1}": d.env[x]} if passes else {}
    shape = d.shape(x)
    by = d.float()
    pred = _predicate(d, by)
    # A tensor that branches write into. Examples that choose different branches have separate
    # tensors.
    shared = [d.let(f"{x} * {d.number()} + {by}.sum()")] if d.chance(0.3) else []
    count = d.rng.choice([2, 2, 3])
    branches = tuple(d.block("branch", params, 2, _shaped(d, shape), shared) for _ in range(count))
    names = ", ".join(b.name for b in branches)
    operands = f", {x}" if passes else ""
    if count == 2:
        d.let(f"tsfunc.cond({pred}, {names}{operands})", branches)
    else:
        index = f"({by}.sum() * 3).abs().long() % 3"
        d.let(f"tsfunc.switch({index}, [{names}]{operands})", branches)
    for name in shared:
        d.let(f"{name} + 1")


def loop(d: Draw) -> None:
    x = d.float()
    shape = d.shape(x)
    p, i = f"p{d.taken + 1}", f"i{d.taken + 1}"
    body = d.block("step", {i: torch.tensor(1), p: d.env[x]}, 2, _shaped(d, shape))
    bounded = Block(body.name, body.params, body.body, f"({body.result}).sin()")
    lower, upper = d.pick(
        ("0", "2"), ("0", "3"), ("1", "3"), ("0", f"1 + ({d.float()}.sum() * 3).abs().long() % 3")
    )
    d.let(f"tsfunc.fori_loop({lower}, {upper}, {body.name}, {x})", (bounded,))


def while_(d: Draw) -> None:
    x = d.float()
    shape = d.shape(x)
    p = f"p{d.taken + 1}"
    most = d.rng.choice([1, 2, 3])
    body = d.block("step", {p: d.env[x]}, 2, _shaped(d, shape))
    limit = d.number()
    test = Block(
        f"test{d.taken}",
        (f"t{d.taken}",),
        (),
        f"(t{d.taken}[0] < {most}) & (t{d.taken}[1].sum() < {limit})",
    )
    step = Block(
        f"whole{d.taken}",
        (f"t{d.taken}",),
        (),
        f"(t{d.taken}[0] + 1, {body.name}(t{d.taken}[1]).sin())",
    )
    d.let(
        f"tsfunc.while_loop({test.name}, {step.name}, (torch.tensor(0), {x}))[1]",
        (body, test, step),
    )


def scan(d: Draw) -> None:
    carry = d.float()
    xs = d.float(min_rank=1)
    dim = d.dim(xs)
    if not d.size(xs, dim):
        raise RejectedError("no steps")
    p, q = f"p{d.taken + 1}", f"q{d.taken + 1}"
    sample = {p: d.env[carry], q: d.env[xs].select(dim, 0)}
    body = d.block("step", sample, 2, _shaped(d, d.shape(carry)))
    stacked = d.pick(p, q, f"{p}.sum() * {q}", f"{p} + {q}.sum()")
    both = Block(body.name, body.params, body.body, f"(({body.result}).sin(), {stacked})")
    reverse = d.pick("", ", reverse=True")
    along = f", dim={dim}" if d.chance(0.3) and dim == 0 else ""
    if not along:
        xs = xs if dim in (0, -len(d.shape(xs))) else f"{xs}.movedim({dim}, 0)"
    d.let(f"tsfunc.scan({body.name}, {carry}, {xs}{reverse}{along})[{d.pick(0, 1)}]", (both,))


def map_(d: Draw) -> None:
    xs = d.float(min_rank=1)
    if not d.size(xs, 0):
        raise RejectedError("no steps")
    p = f"p{d.taken + 1}"
    sample = d.env[xs].select(0, 0)
    body = d.block("each", {p: sample}, 2, _shaped(d, tuple(sample.shape)))
    size = d.pick("", "", ", batch_size=2")
    d.let(f"tsfunc.map({body.name}, {xs}{size})", (body,))


def associative(d: Draw) -> None:
    xs = d.float(min_rank=1)
    if not d.size(xs, 0):
        raise RejectedError("no steps")
    p, q = f"p{d.taken + 1}", f"q{d.taken + 1}"
    combine = d.pick(f"{p} + {q}", f"{p} * {q}", f"torch.maximum({p}, {q})")
    d.taken += 1
    block = Block(f"combine{d.taken}", (p, q), (), combine)
    reverse = d.pick("", ", reverse=True")
    d.let(f"tsfunc.associative_scan({block.name}, {xs}{reverse})", (block,))


# ---- Transforms inside of the function ---------------------------------------------------------


def nested(d: Draw) -> None:
    """Add a transform of a local function that closes over outer variables."""
    x = d.float(min_rank=1)
    p = f"p{d.taken + 1}"
    kind = d.rng.randrange(9)
    if kind == 0:
        dim = d.dim(x)
        if not d.size(x, dim):
            raise RejectedError("no examples")
        sample = d.env[x].select(dim, 0)
        body = d.block("each", {p: sample}, 2, _shaped(d, tuple(sample.shape)))
        out = d.pick("", ", out_dims=-1")
        d.let(f"tsfunc.vmap({body.name}, in_dims={dim}{out})({x})", (body,))
        return
    body = d.block("inner", {p: d.env[x]}, 2, _shaped(d, d.shape(x)))
    scalar = Block(body.name, body.params, body.body, f"({body.result}).sum()")
    if kind == 1:
        d.let(f"tsfunc.grad({body.name})({x})", (scalar,))
    elif kind == 2:
        d.let(f"tsfunc.jvp({body.name}, ({x},), ({x}.cos(),))[1]", (body,))
    elif kind == 3:
        d.let(f"tsfunc.vjp({body.name}, {x})[1]({x}.cos())[0]", (body,))
    elif kind == 4:
        d.let(f"tsfunc.{d.pick('jacrev', 'jacfwd')}({body.name})({x})", (scalar,))
    elif kind == 5:
        d.let(f"tsfunc.checkpoint({body.name})({x})", (body,))
    elif kind == 6:
        d.let(f"tsfunc.specialize({body.name})({x})", (body,))
    elif kind == 7:
        d.let(f"tsfunc.specialize(tsfunc.grad({body.name}))({x})", (scalar,))
    else:
        d.let(f"tsfunc.linearize({body.name}, {x})[1]({x}.cos())", (body,))


def collective(d: Draw) -> None:
    """An exchange between the examples of a local function."""
    x = d.float(min_rank=1)
    dim = d.dim(x)
    if not d.size(x, dim):
        raise RejectedError("no examples")
    p, q = f"p{d.taken + 1}", f"q{d.taken + 1}"
    sample = d.env[x].select(dim, 0)
    body = d.block("each", {p: sample}, 1, _shaped(d, tuple(sample.shape)))
    exchanged = d.pick(
        f'tsfunc.psum({q}.sin(), "i")',
        f'tsfunc.pmean({q} * {d.number()}, "i")',
        f'tsfunc.all_gather({q}, "i").square().sum(0)',
        f'tsfunc.all_gather({q}, "i", axis=-1).cumsum(-1)[..., 0]',
        f'{q} * (tsfunc.axis_index("i") + 1)',
        f'tsfunc.psum(tsfunc.psum({q}, "i") * {q}, "i")',
        f'{q} / (1 + tsfunc.psum({q}.abs(), "i"))',
        f'tsfunc.psum({q}, "i") / tsfunc.axis_size("i") * {q}',
        f'tsfunc.psum({q}.cos(), "i") + tsfunc.axis_size("i")',
    )
    d.taken += 1
    whole = Block(f"whole{d.taken}", (q,), (), f"{body.name}({exchanged})")
    d.let(f'tsfunc.vmap({whole.name}, in_dims={dim}, axis_name="i")({x})', (body, whole))


CONSTRUCTS: dict[str, list[Construct]] = {
    "elementwise": _ELEMENTWISE,
    "reductions": _REDUCTIONS,
    "views": _VIEWS,
    "products": _PRODUCTS,
    "linear algebra": _LINALG,
    "norms and losses": _NORMS,
    "convolutions": _CONVOLUTIONS,
    "sorting": _SORTING,
    "recurrent cells": _RECURRENT,
    "indexing": [
        index, index, index_negative_axes, select_by_data, gather, take, one_of_example,
        embedding, by_argument, by_mask_argument, selected,
    ],
    "writes": [
        write_item, write_mask, write_view, write_view, write_inplace_view, write_whole,
        write_by_index,
    ],
    "scatter": [scatter],
    "factories": [factory],
    "cond and switch": [choice],
    "loops": [loop, while_],
    "scan and map": [scan, map_, associative],
    "nested transforms": [nested],
    "collectives": [collective],
}  # fmt: skip

# The constructs in bodies of control flow and of nested transforms; deeper bodies have the first
# list.
PLAIN_CONSTRUCTS = (
    "elementwise", "elementwise", "elementwise", "reductions", "views", "products", "indexing",
    "writes", "norms and losses", "sorting",
)  # fmt: skip
BLOCK_CONSTRUCTS = (
    *PLAIN_CONSTRUCTS,
    "cond and switch",
    "loops",
    "scan and map",
    "nested transforms",
)


def construct_of(rng: random.Random, family: str) -> Construct:
    return rng.choice(CONSTRUCTS[family])
