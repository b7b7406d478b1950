"""Elementwise operators, reductions, products, linear algebra and sorting."""

from __future__ import annotations

from tools.fuzz.constructs.templates import templates

ELEMENTWISE = templates(
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
REDUCTIONS = templates(
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
PRODUCTS = templates(
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
LINALG = templates(
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
SORTING = templates(
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
