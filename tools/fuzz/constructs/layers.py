"""Norms, losses, convolutions, pooling, interpolation and recurrent cells."""

from __future__ import annotations

from tools.fuzz.constructs.templates import templates

NORMS = templates(
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
CONVOLUTIONS = templates(
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
RECURRENT = templates(
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
