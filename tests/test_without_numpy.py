"""The package works where NumPy is not installed."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = """
    import sys, warnings

    sys.modules["numpy"] = None  # an import of it raises ModuleNotFoundError
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch, tsfunc

    same = torch.testing.assert_close
    x = torch.randn(4, 3)
    same(tsfunc.vmap(tsfunc.grad(lambda row: row.sin().sum()))(x), x.cos())
    same(tsfunc.cond(torch.tensor(True), torch.sin, torch.cos, x), x.sin())
    same(tsfunc.vmap(lambda r: tsfunc.cond(r.sum() > 0, torch.sin, torch.cos, r))(x),
         torch.where(x.sum(1, keepdim=True) > 0, x.sin(), x.cos()))
    same(tsfunc.while_loop(lambda c: c.sum() < 10, lambda c: c + 1, torch.zeros(2)),
         torch.full((2,), 5.0))
    same(tsfunc.fori_loop(0, 3, lambda i, c: c + 1, x), x + 3)
    same(tsfunc.scan(lambda c, row: (c + row, c), torch.zeros(3), x)[0], x.sum(0))
    same(tsfunc.vmap(lambda r: r[r > 0].sum(), data_dependent="split")(x), x.relu().sum(1))
    f = lambda x: tsfunc.cond(x.sum() > 0, torch.sin, torch.cos, x)
    same(tsfunc.specialize(f)(x), f(x))
    same(tsfunc.sparse_jacobian(torch.sin)(x[0]).to_dense(), x[0].cos().diag())

    def noisy(x):
        return torch.nn.functional.dropout(x) + torch.randn(3)

    draws = []
    for chunk_size in (None, 3):
        torch.manual_seed(0)
        draws.append(tsfunc.vmap(noisy, randomness="split", chunk_size=chunk_size)(x))
    same(*draws, rtol=0, atol=0)
    tsfunc.explain(torch.sin, x)
    assert sys.modules["numpy"] is None
"""


def test_nothing_needs_numpy() -> None:
    run = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
