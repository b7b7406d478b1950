"""A batch raises for the calls that torch refuses for one example, and accepts the others."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

import tsfunc

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

SIZE = 3  # the batch size, which some examples have as a size, so that a rule could confuse the two

Call = Callable[..., Any]

PRODUCTS: dict[str, tuple[Call, int]] = {
    **{name: (getattr(torch, name), 2) for name in "mm bmm mv dot vdot matmul outer".split()},
    **{name: (getattr(torch, name), 3) for name in "addmm addmv addr addbmm baddbmm".split()},
    "linear": (torch.nn.functional.linear, 3),
    "in place": (lambda x, a, b: x.clone().addmm_(a, b), 3),
}

shapes = st.lists(st.integers(0, SIZE), max_size=3).map(tuple)


def taken(call: Callable[[], Any]) -> bool:
    """True if the call succeeds."""
    try:
        call()
    except (RuntimeError, IndexError):
        return False
    return True


def batched(values: Sequence[Any], which: Sequence[bool]) -> tuple[list[Any], tuple[Any, ...]]:
    """Return the values, some of them stacked three times, and their in_dims."""
    out = [torch.stack([x] * SIZE) if b else x for x, b in zip(values, which, strict=True)]
    return out, tuple(0 if b else None for b in which)


@settings(max_examples=120, deadline=None)
@given(name=st.sampled_from(sorted(PRODUCTS)), data=st.data())
def test_products_of_unequal_sizes_are_refused(name: str, data: st.DataObject) -> None:
    op, count = PRODUCTS[name]
    values = [torch.ones(data.draw(shapes)) for _ in range(count)]
    if name == "addmv":
        # For an empty matrix, torch returns the shape of the first argument, with a warning that
        # a release will refuse it. vmap returns an element for each row of the matrix.
        first, matrix, _ = values
        assume(matrix.numel() or matrix.dim() != 2 or first.shape == matrix.shape[:1])
    which = data.draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    inputs, in_dims = batched(values, which)
    with warnings.catch_warnings():
        # Some correct calls run in a loop, which warns.
        warnings.simplefilter("ignore", tsfunc.errors.SlowFallbackWarning)
        wanted = taken(lambda: op(*values))
        assert taken(lambda: tsfunc.vmap(op, in_dims)(*inputs)) == wanted
        if wanted:
            out = tsfunc.vmap(op, in_dims)(*inputs)
            torch.testing.assert_close(out, torch.stack([op(*values)] * SIZE))


DECOMPOSITIONS: dict[str, Call] = {
    name: getattr(torch.linalg, name)
    for name in "inv cholesky qr eig eigh svd svdvals det slogdet lu lu_factor ldl_factor "
    "matrix_exp pinv".split()
}
SOLVERS: dict[str, Call] = {
    "solve": torch.linalg.solve,
    "solve_triangular": lambda a, b: torch.linalg.solve_triangular(a, b, upper=True),
    "cholesky_solve": torch.cholesky_solve,
    "lstsq": torch.linalg.lstsq,
    "householder_product": torch.linalg.householder_product,
    "cdist": torch.cdist,
}


@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_a_vector_is_no_matrix(name: str) -> None:
    """This holds even if the vector's length is the number of examples."""
    vectors = torch.ones(SIZE, SIZE)
    with pytest.raises(RuntimeError, match="dimension"):
        DECOMPOSITIONS[name](vectors[0])
    with pytest.raises(RuntimeError, match="dimension"):
        tsfunc.vmap(DECOMPOSITIONS[name])(vectors)


@pytest.mark.parametrize("examples", [0, 1, 2, 5])
@pytest.mark.parametrize("bdim", [0, -1])
def test_an_error_is_that_of_one_example_for_any_number_of_them(examples: int, bdim: int) -> None:
    with pytest.raises(RuntimeError) as one:
        torch.mm(torch.ones(2), torch.ones(2, 2))
    vectors = torch.ones(examples, 2).movedim(0, bdim)
    with pytest.raises(RuntimeError) as all_of_them:
        tsfunc.vmap(torch.mm, (bdim, None))(vectors, torch.ones(2, 2))
    shown = "Inside of vmap, mm was called on examples of shape (2,), (2, 2)."
    assert str(all_of_them.value).startswith(f"{one.value}\n{shown}")


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("of", [((3,), (3, 3)), ((3, 3), ()), ((), (3,)), ((2, 3, 3), (3, 3, 1))])
def test_solvers_refuse_unequal_sizes(
    name: str, of: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    op = SOLVERS[name]
    values = [torch.ones(shape) + (torch.eye(3) if shape[-2:] == (3, 3) else 0) for shape in of]
    for which in ((True, False), (False, True), (True, True)):
        inputs, in_dims = batched(values, which)
        wanted = taken(lambda: op(*values))
        assert taken(lambda i=inputs, d=in_dims: tsfunc.vmap(op, d)(*i)) == wanted  # type: ignore[misc]


def test_the_message_is_that_of_torch_with_the_value() -> None:
    x, y = torch.ones(SIZE, 2, 2), torch.ones(SIZE, 2)
    with pytest.raises(RuntimeError) as plain:
        torch.mm(x[0], y[0])
    with pytest.raises(RuntimeError, match=re.escape(str(plain.value))) as caught:
        tsfunc.vmap(torch.mm)(x, y)
    assert "Inside of vmap, " in str(caught.value)
    assert "was called on examples of shape (2, 2), (2,)." in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nested_vmaps_say_the_shapes_of_the_example_once(dtype: torch.dtype) -> None:
    x, y = torch.ones(3, SIZE, 2, 2), torch.ones(3, SIZE, 2, dtype=dtype)
    with pytest.raises(RuntimeError, match="mm was called") as caught:
        tsfunc.vmap(tsfunc.vmap(torch.mm))(x, y)
    assert str(caught.value).count("nside of vmap") == 1
    assert str(caught.value).count("examples of shape (2, 2), (2,)") == 1


def test_a_wrong_dtype_is_no_mismatch_of_shapes() -> None:
    x, label = torch.ones(SIZE, 4), torch.ones(SIZE)
    with pytest.raises(RuntimeError, match="expected target dtype") as caught:
        tsfunc.vmap(torch.nn.functional.cross_entropy)(x, label)
    assert "mismatch" not in str(caught.value)


def test_the_message_says_the_dtypes_where_they_differ() -> None:
    x, y = torch.ones(SIZE, 2, 2), torch.ones(SIZE, 2, 2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="Inside of vmap, mm was called") as caught:
        tsfunc.vmap(torch.mm)(x, y)
    assert "and dtype torch.float32, torch.float64." in str(caught.value)


def test_a_bias_does_not_widen_the_result() -> None:
    x, weights, bias = torch.ones(2), torch.ones(SIZE, 1, 2), torch.ones(3)
    with pytest.raises(RuntimeError) as plain:
        torch.nn.functional.linear(x, weights[0], bias)
    with pytest.raises(RuntimeError, match=re.escape(str(plain.value))):
        tsfunc.vmap(lambda w: torch.nn.functional.linear(x, w, bias))(weights)


def test_an_empty_batch_is_refused_as_well() -> None:
    with pytest.raises(RuntimeError, match="Inside of vmap, "):
        tsfunc.vmap(torch.mm)(torch.ones(0, 2, 2), torch.ones(0, 2))


def test_nothing_is_written_before_a_refusal() -> None:
    x = torch.zeros(SIZE, 2, 2)
    with pytest.raises(RuntimeError, match="Inside of vmap, "):
        tsfunc.vmap(lambda x: x.addmm_(torch.ones(2, 3), torch.ones(3)))(x)
    assert not x.any()


ARGUMENTS: dict[str, tuple[Call, str]] = {
    "cov, fractions": (lambda x: torch.cov(x, fweights=x[0]), "expected fweights to have integral"),
    "cov, counts": (
        lambda x: torch.cov(x, aweights=x[0].long()),
        "expected aweights to have floating point dtype",
    ),
    "histogramdd": (lambda x: torch.histogramdd(x, [2, 2]), "The size of bins must be equal to"),
    "two sizes to infer": (lambda x: x.view(-1, -1), "only one dimension can be inferred"),
    "renorm": (lambda x: x[0].renorm(2, 0, 1.0), "at least 2 dimensions"),
    "linspace": (lambda x: torch.linspace(x[0], 1.0, 3), "only supports 0-dimensional"),
    "linspace of complex numbers": (
        lambda x: torch.linspace(x[0, 0] * 1j, 1.0, 3, dtype=torch.float32),
        "can't be safely cast",
    ),
    "logspace to a complex number": (
        lambda x: torch.logspace(x[0, 0], 1j, 3, dtype=torch.float32),
        "can't be safely cast",
    ),
    "a product without elements": (
        lambda x: x[:, :0] @ x[:0].long(),
        "expected m1 and m2 to have the same dtype",
    ),
    "masked_fill": (lambda x: x.masked_fill(x > 0, x[0]), "only supports a 0-dimensional value"),
    "index_fill with a complex number": (
        lambda x: x.index_fill(0, (x[0] > 2).long(), x[0, 0] * 1j),
        "Converting complex Scalar to non-complex type",
    ),
    "masked_scatter": (lambda x: x.masked_scatter(x, x), "boolean masks"),
    "embedding": (
        lambda x: torch.nn.functional.embedding(torch.tensor([0]), x[0]),
        "'weight' must be 2-D",
    ),
    "isin of bools": (lambda x: torch.isin(x > 0, x > 0), "Unsupported input type encountered"),
    "one_hot of a large class": (
        lambda x: torch.nn.functional.one_hot((x[0] + 2).long(), 2),
        "smaller than num_classes",
    ),
    "one_hot of a negative class": (
        lambda x: torch.nn.functional.one_hot((x[0] - 3).long(), 2),
        "Class values must be non-negative",
    ),
    "dropout of integers": (lambda x: torch.dropout(x.long(), 0.5, True), "can't be cast"),
    "subtraction of one bool": (lambda x: x - (x[0, 0] > 0), "with a bool tensor is not supported"),
    "index_put of values that do not broadcast": (
        lambda x: x[:, :1].index_put((x[:, 0] >= 0,), x[0]),
        "cannot be broadcast",
    ),
    "index_put of another dtype": (
        lambda x: x.index_put((x[:, 0] >= 0,), x[0].double()),
        "source and destination dtypes match",
    ),
    "view_as_complex": (lambda x: torch.view_as_complex(x[0, 0]), "one or more dimensions"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_bad_arguments_are_refused_as_by_torch(name: str) -> None:
    call, message = ARGUMENTS[name]
    x = torch.rand(SIZE, SIZE)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        call(x)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        tsfunc.vmap(call)(torch.stack([x] * SIZE))


MASKED: dict[str, Call] = {
    "a list of bools": lambda x: x[[True], [0]],
    "a tensor": lambda x: x[x[:1, 0] >= 0],
    "index_put": lambda x: x.index_put((x[:1, 0] >= 0,), x[0]),
    "in place": lambda x: x.clone().index_put_((x[0, :1] >= 0,), x[0, 0]),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_of_another_size_is_refused(name: str) -> None:
    call, x = MASKED[name], torch.rand(SIZE, SIZE)
    with pytest.raises(IndexError, match="The shape of the mask"):
        call(x)
    with pytest.raises(IndexError, match="The shape of the mask"):
        tsfunc.vmap(call)(torch.stack([x] * SIZE))


# Rules accept these calls: torch's check reads values, or Python's arguments.
UNSEEN = {"clamp_min", "clamp_max", "masked_fill"}


ENTRIES = [op for op in op_db if op.error_inputs_func is not None and op.name not in UNSEEN]


@pytest.mark.slow
@pytest.mark.parametrize("op", ENTRIES, ids=lambda op: str(op.formatted_name))
def test_error_inputs_of_torchs_database(op: Any) -> None:
    for error in op.error_inputs("cpu"):
        sample = error.sample_input
        leaves, tree = pytree.tree_flatten((sample.input, *sample.args))
        tensors = [
            i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.layout is torch.strided
        ]
        for chosen in itertools.product((False, True), repeat=len(tensors)):
            which = {i for i, b in zip(tensors, chosen, strict=True) if b}
            for at in (0, -1):
                inputs = [
                    torch.stack([x.detach()] * SIZE, at) if i in which else x
                    for i, x in enumerate(leaves)
                ]
                in_dims = [at if i in which else None for i in range(len(leaves))]
                if not which:
                    continue
                mapped = tsfunc.vmap(
                    lambda *a, s=sample: op(*a, **s.kwargs),
                    pytree.tree_unflatten(in_dims, tree),
                    randomness="different",
                )
                with pytest.raises(Exception), warnings.catch_warnings():  # noqa: B017
                    warnings.simplefilter("ignore")
                    mapped(*pytree.tree_unflatten(inputs, tree))


@pytest.mark.parametrize("bdim", [0, 2, -1])
def test_calls_that_take_no_more_dims_are_refused_as_for_one_example(bdim: int) -> None:
    whole = torch.randn(3, 2, 2, 2)
    calls: list[Call] = [
        torch.block_diag,
        lambda x: torch.block_diag(x, x[0]),
        lambda x: torch.reshape(x, (-1, -1)),
        lambda x: torch.ops.aten.view_copy(x, [-1, -1]),
        lambda x: torch.reshape(x, (3, 5)),
        lambda x: torch.einsum("ij,jk->ik", x, x),
        lambda x: torch.einsum("ij", x),
    ]
    for call in calls:
        with pytest.raises(RuntimeError) as one:
            call(whole[0])
        with pytest.raises(RuntimeError) as all_of_them:
            tsfunc.vmap(call, bdim)(whole.movedim(0, bdim))
        said, expected = (str(e.value).partition("\n")[0] for e in (all_of_them, one))
        assert said == expected
