"""Tensors of several dtypes and their promotion; custom functions."""

from __future__ import annotations

from tools.fuzz.constructs.templates import templates

PROMOTION = templates(
    """
    {o} * {n}
    {o} + {x}
    {x} - {o}
    {o} / 3
    {o} * 0.5
    {o} + True
    {n} - {o} * 2
    {o} * {x}.sum()
    {x} * {o}.sum()
    ({o} * 2).to({x}.dtype) * {x}
    {o}.double() * {x}
    {o}.float() + 1
    {x}.float()
    {x}.float() * 2 + {x}
    {x}.float() * {n}
    ({x} * 3).long()
    ({x} * 3).int() * {n}
    {x} > {n}
    ({x} * 4).long() // 2
    ({x} * 4).long() % 3
    ({x} * 4).to(torch.int32) + ({x} * 2).long()
    ({x} > 0) + 1
    ({x} > 0).sum()
    ({x} > 0) * 0.5
    ({x} * 4).long().sum({d})
    ({x} * 4).long().cumsum({d}) * {x}
    ({x} * 4).long().float().mean()
    ({x} > 0).cumsum({d})
    ({x} > 0).double().mean({d})
    torch.where({m}, {o}, {x})
    torch.where({m}, {x}.float(), 1)
    torch.where({m}, ({x} * 3).long(), 0.5)
    torch.cat([{x}.float(), {x}], {d})
    torch.stack([({x} * 2).long(), {x}], {d})
    {x} ** ({x} > 0)
    2 ** ({x} > 0).long()
    ({x}.square() + 1) ** ({x} * 2).long()
    torch.true_divide(({x} * 3).long(), 2)
    torch.add({x}, {x}.float(), alpha=2)
    torch.mul({x}.float(), 2.5)
    torch.result_type({x}.float(), 1.5) == torch.float32 and {x}.float().sum()
    ({x}.float() @ {x}.float().mT).double()
    {x}.float().softmax({d}, dtype=torch.float64)
    {x}.float().sum({d}, dtype=torch.float64)
    ({x} > 0).to(torch.uint8) + 255
    {x}.half().double() * {x}
    {x}.to(torch.bfloat16).to({x}.dtype) * {x}
    {x}.float().clamp(min=-0.3).double()
    {o}.abs() * {x}
    {o}.reshape(-1)
    {o}.flip(0)
    {o}[..., None]
    {o}.mT
    torch.zeros_like({o}, dtype=torch.float64) + {x}
    {x}.type_as({o})
    {x}.new_tensor([1, 2]) * {x}.sum()
    torch.full_like({x}, 2, dtype=torch.long) * {x}
    """
)
COMPLEX = templates(
    """
    torch.complex({x}, {x}.cos())
    torch.polar({x}.square() + 1, {y})
    {x} * 1j
    {x} + (1 - 0.5j)
    {x}.to(torch.complex128)
    {z} * {x}
    {z} * {n}
    {z} * {z}.conj()
    {z}.abs()
    {z}.real * {x}
    {z}.imag
    {z}.conj()
    {z}.conj() * {x}
    {z}.mH
    {z} @ {z}.mH
    ({z} @ {z}.mT).real
    {z}.sum()
    {z}.exp().imag
    {z}.angle()
    {z}.sgn().real
    {z} / (2 + {z}.abs())
    torch.view_as_real({z})
    torch.view_as_real({z}.resolve_conj())[..., 0]
    torch.view_as_complex(torch.stack([{x}, {x}.sin()], -1))
    torch.where({m}, {z}, 0)
    torch.where({m}, {x}, {z})
    torch.fft.fft({z}).real
    torch.fft.ifft({z}).abs().square()
    {z}.square().real
    {z}.mean().abs()
    {z}.cumsum(0).imag
    {z}.reshape(-1)
    {z}.conj().reshape(-1)[:2]
    {z}[0].conj().imag
    {z}.conj().imag.neg() * 2
    torch.vdot({z}.reshape(-1), {z}.reshape(-1)).real
    torch.linalg.vector_norm({z})
    torch.stack([{z}, {z}.conj()])
    torch.cat([{z}, {x}.to({z}.dtype)])
    {z}.to(torch.complex64)
    torch.complex({x}.float(), {x}.float()) * {x}
    {z}.prod().abs()
    torch.linalg.det({z} @ {z}.mH + torch.eye({z}.shape[-2])).real
    torch.einsum("ij,kj->ik", {z}, {z}.conj()).real
    """
)
FUNCTIONS = templates(
    """
    Cubed.apply({x})
    Cubed.apply({x}.sin() * {n})
    Straight.apply({x}, {n})
    Straight.apply({x} * {y}, 0.5) * {x}
    Flipped.apply({x})[0] * {x}
    Flipped.apply({x}.sin())[1]
    Flipped.apply(Cubed.apply({x}))[0]
    torch.no_grad()(Cubed.apply)({x}).detach() * {x}
    ({x} - {x}.detach()).sin() + {x}
    {x}.detach().sin() * {y}
    """
)
