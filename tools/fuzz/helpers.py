"""Definitions that the source of a program has if it mentions them."""

from __future__ import annotations

_LEAVES = """\
def leaves(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    if tree is None:
        return []
    if dataclasses.is_dataclass(tree):
        tree = vars(tree)
    parts = tree.values() if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in leaves(part)]
"""
_TOTAL = """\
def total(tree):
    return sum(leaf.sin().sum() for leaf in leaves(tree) if leaf.is_floating_point())
"""
_LIKE = """\
def like(tree, function):
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: like(part, function) for key, part in tree.items()}
    if dataclasses.is_dataclass(tree):
        return type(tree)(**like(vars(tree), function))
    if hasattr(tree, "_fields"):
        return type(tree)(*[like(part, function) for part in tree])
    if isinstance(tree, (list, tuple)):
        return type(tree)(like(part, function) for part in tree)
    return function(tree)
"""
_PAIR = """\
Pair = collections.namedtuple("Pair", ["a", "b"])
"""
_RECORD = """\
@dataclasses.dataclass
class Record:
    a: object
    b: object
"""
_GRADIENTS = """\
def with_gradients(function, captured, *args, **kwargs):
    inputs = floats([captured, args, kwargs])
    for tensor in inputs:
        tensor.requires_grad_()
    out = function(*args, **kwargs)
    loss = total(out)
    grads = [None] * len(inputs)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    for tensor in inputs:
        tensor.requires_grad_(False)
    made = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads)]
    return {"out": out, "gradients": made}
"""
_FLOATS = """\
def floats(tree):
    return tuple(leaf for leaf in leaves(tree) if leaf.is_floating_point())
"""
_REMAT = """\
def remat(function, x):
    return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)
"""
_CUBED = """\
class Cubed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x ** 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad

    @staticmethod
    def jvp(ctx, tangent):
        return 3 * ctx.saved_tensors[0] ** 2 * tangent
"""
_STRAIGHT = """\
class Straight(torch.autograd.Function):  # its derivative is not that of round
    generate_vmap_rule = True

    @staticmethod
    def forward(x, scale):
        return (x * 2).round() * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None

    @staticmethod
    def jvp(ctx, tangent, _):
        return tangent * ctx.scale
"""
_FLIPPED = """\
class Flipped(torch.autograd.Function):  # with a rule for a batch
    @staticmethod
    def forward(x):
        return x.flip(-1), x.sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx, grad, grad_of_sum):
        return grad.flip(-1) + grad_of_sum.expand(ctx.shape)

    @staticmethod
    def jvp(ctx, tangent):
        return tangent.flip(-1), tangent.sum()

    @staticmethod
    def vmap(info, in_dims, x):
        x = x.movedim(in_dims[0], 0)
        if x.dim() == 1:
            return (x.clone(), x.clone()), (0, 0)
        return (x.flip(-1), x.flatten(1).sum(1)), (0, 0)
"""
# Each definition with the text that needs it, those first that mention later ones.
HELPERS = (
    ("with_gradients(", _GRADIENTS),
    ("total(", _TOTAL),
    ("like(", _LIKE),
    ("floats(", _FLOATS),
    ("leaves(", _LEAVES),
    ("Pair(", _PAIR),
    ("Record(", _RECORD),
    ("remat(", _REMAT),
    ("Cubed.", _CUBED),
    ("Straight.", _STRAIGHT),
    ("Flipped.", _FLIPPED),
)
# The helpers that drawn functions call.
FUNCTIONS = "\n".join((_REMAT, _CUBED, _STRAIGHT, _FLIPPED))


def with_helpers(text: str, mentioned: str = "") -> str:
    """Return the text after the definitions that it, or ``mentioned``, needs."""
    found: list[str] = []
    for name, helper in HELPERS:
        if name in "".join((mentioned, text, *found)):
            found.insert(0, helper)
    return "\n".join([*found, text])
