"""The classification rules of the catalogue, on operators that the tests make up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc.ops import Category
from tsfunc.ops.catalogue.classify import Verdict, dim_arguments, verdict
from tsfunc.ops.catalogue.decisions import Decisions
from tsfunc.ops.catalogue.signature import Argument, OperatorSignature, functional_form
from tsfunc.ops.catalogue.trial import Evidence, Trial

X, Y = Argument("x", "Tensor"), Argument("y", "Tensor")
DIM = Argument("dim", "int")
OUT = Argument("out", "Tensor", writes=True, out=True, keyword=True, aliased=True)


def operator(
    call: Callable[..., Any] | None,
    *arguments: Argument,
    returns: tuple[str, ...] = ("Tensor",),
    tags: tuple[str, ...] = (),
    name: str = "made::up",
) -> OperatorSignature:
    return OperatorSignature(name, arguments, returns, frozenset(tags), call)


def classified(signature: OperatorSignature, decisions: str = "", device: str = "cpu") -> Verdict:
    evidence = Trial(signature, device).evidence() if signature.call is not None else Evidence()
    return verdict(signature, Decisions(decisions), lambda packet: [], lambda name: None, evidence)


def batched(x: Tensor) -> Tensor:
    if x.dim() < 2:
        raise RuntimeError("matrices only")
    return x.transpose(-1, -2).contiguous()


@pytest.mark.parametrize(
    ("signature", "category", "source"),
    [
        (operator(torch.sin, X), "TensorIterator", "every rank, each element by itself"),
        (operator(torch.hypot, X, Y), "TensorIterator", "every rank, and the arguments broadcast"),
        (operator(torch.clone, X), "Identity", "every rank, the same size, values copied"),
        (operator(torch.zeros_like, X), "Identity", "every rank, the same size, values ignored"),
        (operator(torch.mm, X, Y), "Fixed", "x 2, y 2"),
        (operator(torch.mv, X, Y), "Fixed", "x 2, y 1"),
        (operator(torch.cumsum, X, DIM), "N-Dimensional", "x 0-6; dims by dim"),
        (operator(batched, X), "Batched", "x 2-6"),
        (operator(torch.linalg.inv, X), "Batched", "x 2-6"),
    ],
)
def test_by_trying(signature: OperatorSignature, category: str, source: str) -> None:
    found = classified(signature)
    assert (found.category.value, found.source) == (category, f"tried: {source}")


def test_a_softmax_is_not_taken_for_a_sine_where_values_are_seen() -> None:
    assert classified(operator(lambda x: torch.softmax(x, -1), X)).category is Category.OTHER


@pytest.mark.parametrize(
    ("signature", "category", "source"),
    [
        (operator(None, Argument("xs", "Tensor[]")), "Variadic", "schema: its tensors come in"),
        (operator(None, X, returns=("int",)), "Trivial", "schema: it returns no tensor"),
        (operator(None, Argument("n", "int")), "Factory", "schema: it takes no tensor"),
        (operator(None, X, tags=("dynamic_output_shape",)), "Dynamic", "tag: dynamic_output"),
        (operator(None, X, tags=("pointwise",)), "TensorIterator", "tag: pointwise"),
        (operator(None, X, Argument("keepdim", "bool")), "TensorIterator", "schema: a reduction"),
        (operator(None, X), "Other", "unknown: "),
    ],
)
def test_by_schema_and_tags(signature: OperatorSignature, category: str, source: str) -> None:
    found = classified(signature)
    assert found.category.value == category
    assert found.source.startswith(source)


DECISIONS = """
# what a person says
[Flatten]
elements counted
    up.some u*
    up.default
[N-Dimensional]
something else
    upper down
[follows]
another name for it
    alias=up
[data-dependent]
reads values
    down up.some
"""


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("up", "Flatten"),
        ("up.some", "Flatten"),
        ("up.other", "Flatten"),
        ("upper.any", "N-Dimensional"),
        ("under", "Flatten"),
        ("other", None),
    ],
)
def test_the_most_exact_name_counts(name: str, category: str | None) -> None:
    found = Decisions(DECISIONS).of(name)
    assert (found and found.category and found.category.value) == category


def test_a_decision_counts_before_tags() -> None:
    found = classified(operator(torch.sin, X, tags=("pointwise",)), DECISIONS)
    assert (found.category.value, found.source) == ("Flatten", "decided: elements counted")


def test_decisions_on_data() -> None:
    decisions = Decisions(DECISIONS)
    assert decisions.reads_values("made::down.any")
    assert decisions.reads_values("made::up.some")
    assert not decisions.reads_values("made::up")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[Fixed]\nwhy\n    a b\n    a", "decided.txt:4: a is decided twice"),
        ("[Flat]\nwhy\n    a", "'Flat' is not a valid Category"),
    ],
)
def test_decisions_that_are_not_well_formed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Decisions(text)


ADD = operator(None, X, Y, name="made::add.Tensor")
ADD_SCALAR = operator(None, X, Argument("y", "number"), name="made::add.Scalar")
FORMS = {"made::add": [ADD_SCALAR, ADD]}


@pytest.mark.parametrize(
    ("variant", "form"),
    [
        (operator(None, X, Y, OUT, name="made::add.out"), ADD),
        (operator(None, Argument("x", "Tensor", writes=True), Y, name="made::add_.Any"), ADD),
        (operator(None, X, Argument("z", "number"), OUT, name="made::add.S_out"), ADD_SCALAR),
        (operator(None, X, Y, tags=("view_copy",), name="made::add_copy"), ADD),
        (operator(None, X, Y, name="made::add_copy"), None),
        (operator(None, X, Y, OUT, name="made::sub.out"), None),
    ],
)
def test_the_form_that_a_variant_follows(
    variant: OperatorSignature, form: OperatorSignature | None
) -> None:
    assert functional_form(variant, lambda packet: FORMS.get(packet, [])) is form


@pytest.mark.parametrize(
    ("signature", "form"),
    [
        (ADD, "functional"),
        (operator(None, X, OUT), "out"),
        (operator(None, Argument("x", "Tensor", aliased=True)), "view"),
        (operator(None, Argument("x", "Tensor", writes=True), name="made::add_"), "in-place"),
        (operator(None, Argument("x", "Tensor", writes=True), name="made::__iadd__"), "in-place"),
        (operator(None, X, Argument("y", "Tensor", writes=True)), "writing"),
    ],
)
def test_the_form_of_a_signature(signature: OperatorSignature, form: str) -> None:
    assert signature.form == form


def test_arguments_that_name_dims() -> None:
    signature = operator(
        None, X, DIM, Argument("source", "Tensor"), Argument("dims", "int[]"), Argument("n", "int")
    )
    assert dim_arguments(signature) == ("dim", "dims")


def test_only_the_fake_kernel_runs_on_meta_tensors() -> None:
    devices: set[str] = set()

    def watched(x: Tensor) -> Tensor:
        devices.add(x.device.type)
        return torch.empty_like(x)

    evidence = Trial(operator(watched, X), "meta").evidence()
    assert devices == {"meta"}
    assert evidence.same and evidence.elements == ""


def test_an_operator_that_refuses_everything_is_given_up() -> None:
    calls = 0

    def refuses(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        raise RuntimeError

    arguments = [Argument(name, "Tensor") for name in "abcde"]
    assert not Trial(operator(refuses, *arguments), "cpu").evidence().tried
    assert calls < 20_000
