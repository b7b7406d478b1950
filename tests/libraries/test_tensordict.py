"""TensorDict and related classes under ``vmap``: the stacked loop, with batch sizes and names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tsfunc

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tensordict = pytest.importorskip("tensordict")
    pytest.importorskip("tensordict.nn")

TensorDict: Any = tensordict.TensorDict
LazyStack: Any = tensordict.LazyStackedTensorDict


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of tensordict
        yield


def nested() -> Any:
    inner = TensorDict(b=torch.randn(4, 3, 2), batch_size=[4, 3, 2], names=["N", "M", "K"])
    return TensorDict(
        a=torch.randn(4, 3), inner=inner, text="text", batch_size=[4, 3], names=["N", "M"]
    )


def lazy(stack_dim: int) -> Any:
    parts = [TensorDict(a=torch.randn(3, 2), b=torch.randn(3), batch_size=[3]) for _ in range(4)]
    return LazyStack(*parts, stack_dim=stack_dim)


@tensordict.tensorclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor
    text: str


@tensordict.tensorclass
class OfOne:
    a: torch.Tensor


Made: Any = Pair
Single: Any = OfOne

INPUTS: dict[str, Callable[[], Any]] = {
    "nested": nested,
    "locked": lambda: nested().lock_(),
    "lazy, dim 0": lambda: lazy(0),
    "lazy, dim 1": lambda: lazy(1),
    "a tensorclass": lambda: Made(torch.randn(4, 3), torch.randn(4, 3, 2), "t", batch_size=[4, 3]),
}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "identity": lambda t: t,
    "clone": lambda t: t.clone(),
    "apply": lambda t: t.apply(lambda x: x.sin()),
    "an entry": lambda t: t.get("a").sum(),
    "an entry more": lambda t: t.clone().set("c", t.get("a") * 2),
    "a sum": lambda t: t.select("a").sum(0),
    "beside a tensor": lambda t: (t.get("a").cos(), {"part": t.select("a")}),
    "stacked": lambda t: torch.stack([t.select("a"), t.select("a")], 0),
    "stacked lazily": lambda t: LazyStack.lazy_stack([t.select("a"), t.select("a")], 0),
    "without batch dims": lambda t: TensorDict(q=t.get("a").sum()),
    "a wider batch": lambda t: t.select("a").unsqueeze(0),
}


def shape_of(value: Any) -> Any:
    """Return the properties that two results must share beside their tensors."""
    if tensordict.is_tensor_collection(value):
        keys = sorted({*value.keys()} - {"text"})
        entries = {key: shape_of(value.get(key)) for key in keys}
        return list(value.batch_size), entries
    if isinstance(value, tuple | list):
        return [shape_of(each) for each in value]
    if isinstance(value, dict):
        return {key: shape_of(each) for key, each in value.items()}
    return list(value.shape) if isinstance(value, torch.Tensor) else value


def tensors_of(value: Any) -> list[torch.Tensor]:
    if tensordict.is_tensor_collection(value):
        keys = sorted({*value.keys()} - {"text"})
        return [x for key in keys for x in tensors_of(value.get(key))]
    if isinstance(value, dict):
        return [x for key in sorted(value) for x in tensors_of(value[key])]
    if isinstance(value, tuple | list):
        return [x for each in value for x in tensors_of(each)]
    return [value] if isinstance(value, torch.Tensor) else []


def stacked(results: list[Any], dim: int) -> Any:
    """Return the results of a loop as one, with the examples at ``dim``."""
    first = results[0]
    if isinstance(first, tuple):
        return tuple(stacked([each[i] for each in results], dim) for i in range(len(first)))
    if isinstance(first, dict):
        return {key: stacked([each[key] for each in results], dim) for key in first}
    if isinstance(first, torch.Tensor):
        return torch.stack(results, dim)
    rank = len(first.batch_size) + 1
    if not -rank <= dim < rank:
        raise IndexError(dim)
    return torch.stack([each.exclude("text") for each in results], dim % rank)


def assert_same(got: Any, want: Any) -> None:
    assert shape_of(got) == shape_of(want)
    for x, y in zip(tensors_of(got), tensors_of(want), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 3}, {"data_dependent": "split"}])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", INPUTS)
def test_vmap_is_the_stacked_loop(kind: str, function: str, options: dict[str, Any]) -> None:
    if kind == "a tensorclass" and function == "an entry more":
        pytest.skip("a tensorclass has the entries that it declares")
    func = FUNCTIONS[function]
    for in_dim in (0, 1, -1, -2):
        given = INPUTS[kind]()
        examples = given.unbind(in_dim % 2)
        for out_dim in (0, 1, -1):
            try:
                want = stacked([func(each) for each in examples], out_dim)
            except IndexError:
                with pytest.raises(IndexError):
                    tsfunc.vmap(func, in_dim, out_dim, **options)(given)
                continue
            assert_same(tsfunc.vmap(func, in_dim, out_dim, **options)(given), want)


@pytest.mark.parametrize("in_dim", [0, 1])
@pytest.mark.parametrize("out_dim", [0, 1])
@pytest.mark.parametrize("function", ["identity", "apply", "an entry more", "a wider batch"])
def test_names_are_those_of_torch_func(function: str, in_dim: int, out_dim: int) -> None:
    given, func = nested(), FUNCTIONS[function]
    got = tsfunc.vmap(func, in_dim, out_dim)(given)
    want = torch.func.vmap(func, in_dim, out_dim)(given)
    assert_same(got, want)
    assert got.names == want.names


def test_one_entry_in_out_dims_is_that_of_a_single_collection() -> None:
    given = nested()
    for dim in (0, 1):
        got = tsfunc.vmap(FUNCTIONS["apply"], out_dims=(dim,))(given)
        assert_same(got, torch.func.vmap(FUNCTIONS["apply"], out_dims=(dim,))(given))
    with pytest.raises(ValueError, match="not compatible"):
        tsfunc.vmap(FUNCTIONS["apply"], out_dims=(0, 0))(given)


@pytest.mark.parametrize("stack_dim", [0, 1])
@pytest.mark.parametrize("in_dim", [0, 1])
def test_locked_collections_are_locked_inside(stack_dim: int, in_dim: int) -> None:
    for given in (lazy(stack_dim), nested()):
        write = tsfunc.vmap(lambda t: t.set("c", t.get("a")), in_dim)
        write(given)
        given.lock_()
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            write(given)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 3}, {"data_dependent": "split"}])
@pytest.mark.parametrize("out_dim", [0, 1, -1])
@pytest.mark.parametrize("stack_dim", [0, 1])
@pytest.mark.parametrize("kind", ["a lazy stack", "a tensorclass"])
def test_a_lazy_stack_that_the_function_returns_stays_one(
    kind: str, stack_dim: int, out_dim: int, options: dict[str, Any]
) -> None:
    """It is torch.func's, for functions that return the collection that they receive."""
    given = lazy(stack_dim).exclude("b")
    if kind == "a tensorclass":
        given = Single.from_tensordict(given, {})

    def write(t: Any) -> Any:
        return t.set("a", t.get("a").sin())

    for func in (write, FUNCTIONS["identity"]):
        got = tsfunc.vmap(func, stack_dim, out_dim, **options)(given)
        dim = out_dim % 2
        stack = got._tensordict if kind == "a tensorclass" else got
        assert type(got) is type(given)
        assert isinstance(stack, LazyStack)
        assert stack.stack_dim == dim
        assert_same(got, stacked([func(each.clone()) for each in given.unbind(stack_dim)], dim))
    got = tsfunc.vmap(FUNCTIONS["identity"], stack_dim, **options)(given.lock_())
    assert got.is_locked
    assert not isinstance(tsfunc.vmap(lambda t: t.clone(), stack_dim)(given), LazyStack)


def test_the_function_sees_no_mapped_dim() -> None:
    seen = []

    def look(t: Any) -> Any:
        seen.append((list(t.batch_size), list(t["inner"].batch_size), t.names, t["text"]))
        return t["a"].sum()

    tsfunc.vmap(look)(nested())
    tsfunc.vmap(look, in_dims={"t": 1})(nested())
    assert seen == [([3], [3, 2], ["M"], "text"), ([4], [4, 2], ["N"], "text")]


def test_an_unmapped_collection_beside_a_mapped_tensor() -> None:
    given, x = nested(), torch.randn(5, 4, 3)
    got = tsfunc.vmap(lambda t, x: t["a"] * x, (None, 0))(given, x)
    torch.testing.assert_close(got, given["a"] * x)


def test_nested_vmaps() -> None:
    given = nested()
    got = tsfunc.vmap(tsfunc.vmap(lambda t: t.apply(torch.sin)), in_dims=1, out_dims=1)(given)
    assert_same(got, given.apply(torch.sin))


def test_parameters_of_an_ensemble() -> None:
    """They agree with ``torch.func.vmap`` of ``TensorDictParams``; each member has gradients."""
    layers = [torch.nn.Linear(2, 3) for _ in range(4)]
    params = tensordict.TensorDictParams(TensorDict.from_modules(*layers, as_module=False))
    module, x = torch.nn.Linear(2, 3), torch.randn(5, 2)

    def call(params: Any, x: torch.Tensor) -> torch.Tensor:
        with params.to_module(module):
            return module(x)

    got = tsfunc.vmap(call, (0, None))(params, x)
    torch.testing.assert_close(got, torch.stack([layer(x) for layer in layers]))
    got.square().sum().backward()
    grads = params["weight"].grad
    torch.stack([layer(x) for layer in layers]).square().sum().backward()
    torch.testing.assert_close(
        grads, torch.stack([x.weight.grad for x in layers if x.weight.grad is not None])
    )


def test_a_module_of_tensordicts() -> None:
    module = tensordict.nn.TensorDictModule(torch.nn.Linear(3, 2), in_keys=["a"], out_keys=["b"])
    given = TensorDict(a=torch.randn(4, 5, 3), batch_size=[4, 5])
    got = tsfunc.vmap(lambda t: module(t.clone()))(given)
    assert_same(got, module(given.clone()))


def test_gradients_for_each_example() -> None:
    given = TensorDict(a=torch.randn(4, 3), batch_size=[4])
    got = tsfunc.vmap(tsfunc.grad(lambda t: (t["a"] ** 3).sum()))(given)
    assert list(got.batch_size) == [4]
    torch.testing.assert_close(got["a"], 3 * given["a"] ** 2)


def test_as_a_program() -> None:
    given = nested().exclude("text")
    program = tsfunc.specialize(lambda x: tsfunc.vmap(lambda t: t["a"].sin())(given.set("a", x)))
    x = torch.randn(4, 3)
    torch.testing.assert_close(program(x), x.sin())


def test_a_dim_that_a_collection_has_not() -> None:
    given = TensorDict(a=torch.randn(4, 3), batch_size=[4])
    with pytest.raises(ValueError, match=r"in_dim=1 .* TensorDict with 1 batch dims"):
        tsfunc.vmap(lambda t: t["a"], in_dims=1)(given)


def test_sizes_that_differ() -> None:
    first = TensorDict(a=torch.randn(4, 3), batch_size=[4])
    with pytest.raises(ValueError, match="sizes"):
        tsfunc.vmap(lambda t, x: t["a"] + x)(first, torch.randn(5, 3))
