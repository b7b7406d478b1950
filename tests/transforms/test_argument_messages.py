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
TRANSFORMS = (
    "vmap grad value_and_grad grad_and_value jacrev jacfwd hessian checkpoint closure_convert "
    "make_graph sparse_jacobian jacobian_sparsity"
).split()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_value_in_the_place_of_a_function_is_refused_where_the_transform_is_made(
    name: str,
) -> None:
    for value, kind in ((X.sin(), "Tensor"), (3, "int"), ({"a": X}, "dict")):
        with pytest.raises(
            TypeError, match=f"expected a function, got {kind}. Pass the function itself"
        ):
            getattr(api, name)(value)


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
