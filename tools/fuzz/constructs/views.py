"""Views and reshapes."""

from __future__ import annotations

from tools.fuzz.constructs.templates import templates

VIEWS = templates(
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
