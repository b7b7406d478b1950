"""Methods ``MyFunction.apply`` that are read before the first transform of the process."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

# The derivative that a class declares is three times the one that autograd finds in its forward.
CLASSES = """
    import torch
    class OldStyle(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale=2.0):
            if scale is None:
                raise LookupError("a scale is missing")
            ctx.scale = scale
            return x * scale
        @staticmethod
        def backward(ctx, g):
            return g * 3 * ctx.scale, None
    class NewStyle(torch.autograd.Function):
        generate_vmap_rule = True
        @staticmethod
        def forward(x, scale=2.0):
            if scale is None:
                raise LookupError("a scale is missing")
            return x * scale
        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.scale = inputs[1]
        @staticmethod
        def backward(ctx, g):
            return g * 3 * ctx.scale, None
        @staticmethod
        def jvp(ctx, t, _):
            return t * 3 * ctx.scale
    old, new = OldStyle.apply, NewStyle.apply
    import tsfunc
    x = torch.randn(4, 3)
    def check(got, want):
        torch.testing.assert_close(got, torch.full_like(x, want))
"""

CALLS = {
    "reverse mode outside of two vmaps": """
        for f in (old, new):
            check(tsfunc.grad(lambda x: tsfunc.vmap(tsfunc.vmap(f), 1)(x).sum())(x), 6.0)
            check(tsfunc.vmap(tsfunc.grad(lambda x: f(x, 5.0).sum()), 1, 1)(x), 15.0)
    """,
    "forward mode outside of vmap": """
        check(tsfunc.jvp(tsfunc.vmap(new, 1, 1), (x,), (torch.ones_like(x),))[1], 6.0)
    """,
    "a program": """
        program = tsfunc.specialize(tsfunc.grad(lambda x: tsfunc.vmap(old)(x).sum()))
        check(program(x), 6.0)
        check(program(x + 1), 6.0)
    """,
    "keywords": """
        check(tsfunc.grad(lambda x: tsfunc.vmap(lambda r: new(r, scale=4.0))(x).sum())(x), 12.0)
    """,
    "an exception in forward": """
        for f in (old, new):
            try:
                tsfunc.vmap(lambda r: f(r, None))(x)
            except LookupError as error:
                assert "a scale is missing" in str(error)
            else:
                raise AssertionError("no error")
    """,
    "torch.func, and no transform": """
        tsfunc.vmap(torch.sin)(x)
        check(torch.func.grad(lambda x: torch.func.vmap(new)(x).sum())(x), 6.0)
        for f in (old, new):
            leaf = x.clone().requires_grad_()
            f(leaf, 1.0).sum().backward()
            check(leaf.grad, 3.0)
    """,
}


@pytest.mark.parametrize("calls", CALLS)
def test_a_method_taken_early(calls: str) -> None:
    code = textwrap.dedent(CLASSES) + textwrap.dedent(CALLS[calls])
    run = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
