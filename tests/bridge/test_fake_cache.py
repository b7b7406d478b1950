"""An operator returns the same metadata from the cache as without the cache."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import tsfunc
from tests.ops.harness import database_calls
from tsfunc import MetaTensorType as Meta
from tsfunc import specialize
from tsfunc.bridge.sizes import fake_results
from tsfunc.bridge.sizes.fake_results import FakeCache
from tsfunc.bridge.sizes.symbols import Symbols
from tsfunc.bridge.tracers.operators import operator_of
from tsfunc.bridge.tracers.user_queries import defer_guards
from tsfunc.errors import ConstraintViolation
from tsfunc.types import Dim

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

r = torch.randn
aten: Any = torch.ops.aten


class Trace:
    """The fake tensors of a trace, and its cache.

    Args:
        sizes: the sizes that are symbols in the trace.
    """

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        names = {f"n{size}": size for size in sizes}
        self.symbols = Symbols({name: Dim(name) for name in names}, names)
        self.symbolic = {size: self.symbols.sizes[name] for name, size in names.items()}
        self.kept = FakeCache(self.symbols.fake)

    def fake(self, values: Any) -> Any:
        """Return the values with fake tensors; views of one memory stay views of one memory."""
        memories: dict[int, Tensor] = {}

        def made(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            memory = memories.get(leaf.untyped_storage()._cdata)
            if memory is None or memory.dtype != leaf.dtype:
                size = leaf.untyped_storage().nbytes() // leaf.element_size()
                memory = torch.empty(size, dtype=leaf.dtype, device=leaf.device)
                memories[leaf.untyped_storage()._cdata] = memory
            view = memory.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
            return view.conj() if leaf.is_conj() else view

        with self.symbols.fake:
            return optree.tree_map(made, values, none_is_leaf=True)

    def of_sizes(self, *shapes: Sequence[int]) -> list[Any]:
        """Return contiguous fake tensors, with symbols for the symbolic sizes."""
        env = self.symbols.fake.shape_env
        with defer_guards(env), self.symbols.fake:
            return [torch.empty([self.symbolic.get(n, n) for n in shape]) for shape in shapes]


def memory_of(value: Tensor) -> int | None:
    """Return an identifier of a tensor's memory; None if it is empty or not strided."""
    empty = any(type(size) is int and size == 0 for size in value.shape)
    if value.layout is not torch.strided or empty:
        return None
    return value.untyped_storage()._cdata


def looks(value: Any, arguments: Sequence[Any]) -> Any:
    """Return the visible properties of a fake result, and the arguments that it is, or aliases."""
    if not isinstance(value, Tensor):
        return type(value), value
    memories = [memory_of(x) for x in arguments]
    memory = memory_of(value)
    return (
        str(value.shape), str(value.stride()), str(value.storage_offset()), value.dtype,
        value.device, value.requires_grad, value.is_conj(), value.is_neg(), type(value),
        torch._C._dispatch_key_set(value), [x is value for x in arguments],
        [each == memory for each in memories],
    )  # fmt: skip


def tensors_in(values: Any) -> list[Any]:
    return [x for x in optree.tree_leaves(values, none_is_leaf=True) if isinstance(x, Tensor)]


def check(trace: Trace, op: Any, made: Callable[[], Any]) -> bool:
    """Call an operator twice, on new arguments; return True if the cache served the second call.

    Each result is compared with torch's own.
    """
    row = operator_of(op)
    count = len(trace.kept._cached)
    for _ in range(2):
        (args, kwargs), (others, more) = made(), made()
        try:
            wanted = trace.kept._compute(row, others, more)
        except Exception:
            return False
        found = trace.kept.of(row, args, kwargs)
        given, expected = tensors_in((args, kwargs)), tensors_in((others, more))
        leaves, tree = optree.tree_flatten(found, none_is_leaf=True)
        wanted_leaves, wanted_tree = optree.tree_flatten(wanted, none_is_leaf=True)
        assert tree == wanted_tree, op
        for leaf, other in zip(leaves, wanted_leaves, strict=True):
            assert looks(leaf, given) == looks(other, expected), op
        for one, other in zip(given, expected, strict=True):
            assert looks(one, given) == looks(other, expected), op
            assert one._version == other._version, op
    return len(trace.kept._cached) > count


def calls_of(info: Any) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from database_calls(info, torch.float32, most=3)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(op_db), 50))
def test_kept_results_are_those_of_the_rules(first: int) -> None:
    kept = 0
    for info in op_db[first : first + 50]:
        if torch.float32 not in info.supported_dtypes("cpu") or "jiterator" in info.name:
            continue
        trace = Trace()
        for call in calls_of(info):
            values = call.args, call.kwargs
            if all(x.layout is torch.strided for x in tensors_in(values)):
                with torch.no_grad():
                    kept += check(trace, call.op, functools.partial(trace.fake, values))
    assert kept > 10


x, w, image = r(4, 6), r(6, 3), r(2, 3, 8, 8)
CALLS: dict[str, tuple[Any, list[Any]]] = {
    "sin": (aten.sin.default, [x]),
    "numbers of other types": (aten.mul.Tensor, [x.int(), 2]),
    "broadcast": (aten.add.Tensor, [x, r(6)]),
    "one tensor twice": (aten.mul.Tensor, [x, x]),
    "product": (aten.matmul.default, [x, w]),
    "strides that are permuted": (aten.add.Tensor, [x.t(), x.t()]),
    "strides of 0": (aten.exp.default, [x[:1].expand(4, 6)]),
    "channels last": (aten.relu.default, [image.contiguous(memory_format=torch.channels_last)]),
    "convolution": (aten.conv2d.default, [image, r(5, 3, 3, 3)]),
    "transposed": (aten.transpose.int, [x, 0, 1]),
    "view with an offset": (aten.select.int, [x, 1, 2]),
    "view of a view": (aten.slice.Tensor, [x[1:], 0, 1, 3]),
    "reshaped as a view": (aten.reshape.default, [x, [24]]),
    "reshaped as a copy": (aten.reshape.default, [x.t(), [24]]),
    "itself": (aten.contiguous.default, [x]),
    "itself, of another type": (aten.to.dtype, [x, torch.float32]),
    "list of views": (aten.split.Tensor, [x, 2]),
    "several": (aten.topk.default, [x, 2]),
    "some of them None": (
        aten.native_layer_norm_backward.default,
        [x, x, [6], r(4, 1), r(4, 1), r(6), r(6), [True, False, True]],
    ),
    "list of tensors": (aten.cat.default, [[x, x], 1]),
    "written": (aten.add_.Tensor, [x, 1.0]),
    "written into a view": (aten.mul_.Tensor, [x[1:], x[1:]]),
    "shape is changed": (aten.t_.default, [x]),
    "conjugated lazily": (aten.conj.default, [x + 1j]),
    "of what is conjugated": (aten.sin.default, [(x + 1j).conj()]),
    "another type's view": (aten.view_as_real.default, [x + 1j]),
    "empty": (aten.sum.dim_IntList, [r(0, 3), [0]]),
}  # fmt: skip
UNCACHED = {"shape is changed", "conjugated lazily", "another type's view"}


@pytest.mark.parametrize("name", CALLS)
def test_repeated_calls_have_the_metadata_of_new_ones(name: str) -> None:
    trace = Trace()
    op, args = CALLS[name]
    assert check(trace, op, lambda: trace.fake((args, {}))) == (name not in UNCACHED)


SYMBOLIC: dict[str, tuple[Any, list[Any]]] = {
    "sin": (aten.sin.default, [(7, 4)]),
    "broadcast": (aten.add.Tensor, [(7, 4), (4,)]),
    "product": (aten.matmul.default, [(7, 11), (11, 4)]),
    "transposed": (aten.transpose.int, [(7, 11), 0, 1]),
    "slice": (aten.slice.Tensor, [(7, 11), 0, 0, 3]),
    "reshaped": (aten.reshape.default, [(7, 4), [-1]]),
    "layer norm": (aten.layer_norm.default, [(7, 4), [4], (4,), (4,)]),
    "sum": (aten.sum.dim_IntList, [(7, 11), [0]]),
    "parts": (aten.chunk.default, [(7, 4), 2, 1]),
    "written": (aten.add_.Tensor, [(7, 11), 1.0]),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_calls_with_symbolic_sizes(name: str) -> None:
    op, args = SYMBOLIC[name]
    trace = Trace([7, 11])

    def made() -> Any:
        tensors = iter(trace.of_sizes(*[x for x in args if isinstance(x, tuple)]))
        return [next(tensors) if isinstance(x, tuple) else x for x in args], {}

    assert check(trace, op, made)


def _making(trace: Trace, *args: Any) -> Callable[[], Any]:
    return lambda: (trace.fake(args), {})


@pytest.mark.parametrize("offset", [0, 3])
def test_indexed_parts_share_one_kept_result(offset: int) -> None:
    """The cached result does not depend on the offsets of the part and of the tensor."""
    trace = Trace()
    base = r(60)
    calls: list[tuple[Any, Any, tuple[Any, ...]]] = []
    for dim in (0, 1, -1):
        calls += [(aten.select.int, base, (dim, i)) for i in (*range(4), -1, -4)]
        for start, stop in ((0, 2), (1, 3), (2, 4), (3, 9), (1, None), (-2, None), (2, 2), (3, 1)):
            calls.append((aten.slice.Tensor, base, (dim, start, stop)))
            calls.append((aten.slice.Tensor, base, (dim, start, stop, 2)))
    for op, memory, rest in calls:
        view = memory.as_strided((4, 4), (1, 5), offset)
        check(trace, op, _making(trace, view, *rest))
    before = len(trace.kept._cached)
    for i in (1, 2, 3):
        check(trace, aten.select.int, _making(trace, r(9, 4), 0, i))
    assert len(trace.kept._cached) == before + 1


def test_a_part_of_a_conjugate_is_one() -> None:
    trace = Trace()
    for x in (r(4, 3, dtype=torch.complex64), r(4, 3, dtype=torch.complex64).conj()):
        for i in (0, 1, 2):
            check(trace, aten.select.int, _making(trace, x, 0, i))


def test_writes_are_kept_wherever_they_go() -> None:
    trace = Trace()
    base = r(20)
    for i in range(5):
        view = base[4 * i : 4 * i + 4]
        check(trace, aten.add_.Tensor, _making(trace, view, 1))
    assert len(trace.kept._cached) == 1


def test_every_result_has_a_memory_of_its_own() -> None:
    trace = Trace([7])
    for shape in ((7, 4), (5, 4)):
        (a,) = trace.of_sizes(shape)
        found = [trace.kept.of(operator_of(aten.sin.default), [a], {}) for _ in range(3)]
        assert len({value.untyped_storage()._cdata for value in found}) == 3


def test_settings_are_looked_at() -> None:
    trace = Trace()
    op, kept = operator_of(aten.div.Tensor), []
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            kept.append(trace.kept.of(op, trace.fake([x.int(), 2]), {}).dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert kept == [torch.float32, torch.float64, torch.float32]


def test_results_that_share_a_memory_of_their_own_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = Trace()
    (a,) = trace.fake([r(4)])
    with trace.symbols.fake:
        halves = torch.empty(8).split(4)
    monkeypatch.setattr(fake_results, "results_of_fixed_sizes", lambda *given: halves)
    for _ in range(2):
        assert trace.kept.of(operator_of(aten.sin.default), [a], {}) is halves


class TestPrograms:
    """Traced functions with calls that the cache must keep apart."""

    def test_autocast(self) -> None:
        def f(x: Tensor) -> tuple[Tensor, torch.dtype, Tensor, torch.dtype]:
            first = x @ x
            with torch.autocast("cpu", torch.bfloat16):
                second = x @ x
            return first, first.dtype, second, second.dtype

        x = r(3, 3)
        found, wanted = specialize(f)(x), f(x)
        assert found[1::2] == wanted[1::2] == (torch.float32, torch.bfloat16)
        torch.testing.assert_close(found[::2], wanted[::2])

    def test_numbers_read_before_and_after_a_write(self) -> None:
        """The cache keys a tensor's data by its version, which counts writes."""

        def f(x: Tensor) -> Tensor:
            y, z = x + 1, x + 1
            y.add_(1)
            before = z.item()
            z.add_(1)
            return torch.zeros(3) + before + 10 * z.item()

        x = torch.tensor(2.0)
        torch.testing.assert_close(specialize(f)(x), f(x))

    @pytest.mark.parametrize("views", [1, 3])
    def test_numbers_read_before_and_after_a_write_to_a_view(self, views: int) -> None:
        def f(x: Tensor) -> Tensor:
            y = x * 2
            reading, writing = y[1], y
            for _ in range(views):
                writing = writing[:]
            before = reading.item()
            same = reading.item()
            writing[1:].add_(1)
            return torch.zeros(3) + before + 10 * same + 100 * reading.item()

        x = torch.randn(3)
        torch.testing.assert_close(specialize(f)(x), f(x))

    def test_sizes_of_data(self) -> None:
        def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            a, b = x.nonzero(), y.nonzero()
            return a * 2, b * 2, torch.cat([a * 2, b * 2])

        x, y = torch.tensor([0, 1, 2]), torch.tensor([3, 0, 0])
        for found, wanted in zip(specialize(f)(x, y), f(x, y), strict=True):
            assert torch.equal(found, wanted)

    @pytest.mark.parametrize("shape", [[5, 4], ["n", 4]], ids=str)
    def test_views_are_written_through(self, shape: list[Any]) -> None:
        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            y, z = x.clone(), x.clone()
            y.t()[1] = 3.0
            z.t()[1].mul_(2.0)
            return y, z

        x = r(5, 4)
        f_of_sizes = specialize(f, {"x": Meta(shape)})
        torch.testing.assert_close(f_of_sizes(x), f(x))

    @pytest.mark.parametrize("shape", [[5, 4], ["n", 4]], ids=str)
    def test_a_write_is_one_into_that_tensor_alone(self, shape: list[Any]) -> None:
        """Autograd counts writes into saved values, by the tensors that stand for them."""

        def f(x: Tensor) -> Tensor:
            saved, other = x.sin(), x.sin()
            result = saved.exp()
            other.add_(1.0)
            return (result * other).sum()

        x = r(5, 4)
        found = specialize(tsfunc.grad(f), {"x": Meta(shape)})(x)
        torch.testing.assert_close(found, tsfunc.grad(f)(x))

        def broken(x: Tensor) -> Tensor:
            saved = x.exp()
            result = saved.exp()
            saved.add_(1.0)
            return result.sum()

        with pytest.raises(RuntimeError, match="inplace operation"):
            specialize(tsfunc.grad(broken), {"x": Meta(shape)})(x)

    def test_custom_operators_are_not_cached(self) -> None:
        asked = []

        @torch.library.custom_op("kept_results::double", mutates_args=())
        def double(x: Tensor) -> Tensor:
            return x * 2

        @double.register_fake
        def _(x: Tensor) -> Tensor:
            asked.append(x.shape)
            return torch.empty_like(x)

        specialize(lambda x: double(double(double(x + 1) + 1) + 1))(r(3))
        assert len(asked) >= 3

    def test_an_error_names_the_first_of_several_lines(self) -> None:
        def f(x: Tensor, y: Tensor) -> Tensor:
            first = x + y
            return first + (x + y)

        with pytest.raises(ConstraintViolation, match="first = x"):
            specialize(f, {"x": Meta(["n"]), "y": Meta(["m"])})(r(3), r(3))

    def test_facts_checked_in_branches_hold_in_them_alone(self) -> None:
        def checked(x: Tensor) -> Tensor:
            n = x.sum().item()
            torch._check(n == 3)
            return torch.ones(int(n)) * 2 + torch.ones(3)

        def unchecked(x: Tensor) -> Tensor:
            return torch.zeros(3) + x.sum()

        def f(x: Tensor, flag: Tensor) -> Tensor:
            return tsfunc.cond(flag, checked, unchecked, x)

        f_of_any = specialize(f)
        x = torch.tensor([1, 2])
        for flag in (True, False):
            torch.testing.assert_close(f_of_any(x, torch.tensor(flag)), f(x, torch.tensor(flag)))
