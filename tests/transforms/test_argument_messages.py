"""Messages about values that a transform can't take in the place of a function or of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tsfunc

api: Any = tsfunc  # mistakes in types are mistakes for mypy, too
X = torch.randn(3, 4)
LINEAR = torch.nn.Linear(4, 2)
TAKE_A_FUNCTION: dict[str, Callable[[Any], Any]] = {
    **{
        name: getattr(tsfunc, name)
        for name in (
            "vmap grad value_and_grad grad_and_value jacrev jacfwd hessian closure_convert "
            "make_graph sparse_jacobian jacobian_sparsity custom_vjp custom_jvp custom_vmap "
            "sequential_vmap"
        ).split()
    },
    "vjp": lambda f: tsfunc.vjp(f, X),
    "jvp": lambda f: tsfunc.jvp(f, (X,), (X,)),
    "hvp": lambda f: tsfunc.hvp(f, (X,), (X,)),
    "linearize": lambda f: tsfunc.linearize(f, X),
    "linear_transpose": lambda f: tsfunc.linear_transpose(f, X),
    "eval_shape": lambda f: tsfunc.eval_shape(f, X),
    "explain": lambda f: tsfunc.explain(f, X),
    "shard_map": lambda f: tsfunc.shard_map(f, tsfunc.VirtualMesh(dp=1), tsfunc.P(), tsfunc.P()),
}


@pytest.mark.parametrize("name", TAKE_A_FUNCTION)
def test_a_value_in_the_place_of_a_function_is_refused_where_the_transform_is_made(
    name: str,
) -> None:
    values = (None, "NoneType"), (X.sin(), "Tensor"), (3, "int"), ({"a": X}, "dict")
    for value, kind in values:
        with pytest.raises(
            TypeError, match=f"^{name}: expected a function, got {kind}. Pass the function itself"
        ):
            TAKE_A_FUNCTION[name](value)


def test_checkpoint_without_a_function_is_a_decorator() -> None:
    assert tsfunc.checkpoint(policy=None)(torch.sin)(X).equal(X.sin())
    with pytest.raises(TypeError, match=r"^checkpoint: expected a function, got int. Pass the"):
        api.checkpoint(3)


EQUATIONS: dict[str, Callable[[], Any]] = {
    "linear_solve: matvec": lambda: api.linear_solve(None, X, torch.sin),
    "linear_solve: solve": lambda: api.linear_solve(torch.sin, X, None),
    "implicit_root: f": lambda: api.implicit_root(None, X, torch.sin),
    "implicit_root: solve": lambda: api.implicit_root(torch.sin, X, None),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_a_value_in_the_place_of_a_function_of_an_equation(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: expected a callable, got NoneType."):
        EQUATIONS[name]()


ADVICE: dict[str, tuple[Callable[[], Any], str]] = {
    "parameters of a module": (
        lambda: api.grad(lambda p: p)(LINEAR.parameters()),
        r"It is p. An iterator ends with its first use: pass a list or a dict",
    ),
    "mapped parameters": (
        lambda: api.vmap(lambda p: p)(LINEAR.parameters()),
        r"None as the respective in_dim. An iterator ends .* The input is p.",
    ),
    "a module": (lambda: api.grad(lambda m: m(X).sum())(LINEAR), r"It is m. Pass its parameters"),
    "a number": (lambda: api.grad(lambda a: a)(2.0), r"It is a. Convert it: torch.tensor\(value"),
    "numbers of a list": (lambda: api.jacrev(sum)([2.0]), r"\[0\]. Convert it: torch.tensor"),
    "a primal": (lambda: api.jvp(torch.sin, (2.0,), (X,)), r"<class 'float'>. Convert it: torch"),
    "three results": (
        lambda: api.grad(lambda x: (x.sum(), 1, 2), has_aux=True)(X),
        r"\(output, aux\) if has_aux is True, got a tuple of 3",
    ),
    "an input of a module without its state": (
        lambda: api.functional_call(LINEAR, X),
        r"to be a dict, or a list/tuple of dicts, but got <class 'torch.Tensor'>. The module's own",
    ),
    "an iterator over parameters": (
        lambda: api.functional_call(LINEAR, LINEAR.named_parameters(), X),
        r"but got <class 'generator'>. The module's own are dict\(module.named_parameters",
    ),
    "a list of tensors": (
        lambda: api.functional_call(LINEAR, [X], X),
        r"Expected all elements of parameter_and_buffer_dicts to be dictionaries. The module's own",
    ),
    "one branch": (
        lambda: api.switch(torch.tensor(0), torch.sin, X),
        r"switch: branches: expected a list of callables, got builtin_function_or_method",
    ),
    "an optimizer": (
        lambda: api.functional_optimizer(torch.optim.SGD(LINEAR.parameters())),
        r"got an object of class SGD. Pass the class and its options: functional_optimizer\(SGD",
    ),
    "a module for an optimizer": (
        lambda: api.functional_optimizer(torch.optim.SGD).init({"layer": LINEAR}),
        r"\(SGD\).init: expected a tensor for params\['layer'\], got Linear. Pass its parameters",
    ),
    "a number for an optimizer": (
        lambda: api.functional_optimizer(torch.optim.SGD).step([2.0], [X], [{}]),
        r"\(SGD\).step: expected a tensor for params\[0\], got float. Convert it",
    ),
    "a shape as a descriptor": (
        lambda: api.specialize(lambda x: x, {"x": (3, 4)})(X),
        r"expected a tuple, got f32\[3, 4\] cpu; a tensor of this shape is MetaTensorType\(\[3, 4",
    ),
    "a program before the first call": (
        lambda: api.specialize(torch.sin).program,
        r"there is no program yet; one is made by the first call",
    ),
}


@pytest.mark.parametrize("name", ADVICE)
def test_the_message_has_a_remedy(name: str) -> None:
    call, message = ADVICE[name]
    with pytest.raises(Exception, match=message) as caught:
        call()
    *_, last = caught.traceback
    assert str(last.path).endswith(
        "test_argument_messages.py"
    )  # the frames of the library are folded
