"""Guards on arguments: the code, the key, the facts, the text and the JSON of a guard agree."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tsfunc import Dim, load, specialize
from tsfunc.bridge.sizes.symbols import Symbols
from tsfunc.bridge.tracers.torch_settings import SETTINGS
from tsfunc.errors import DescriptorViolation, FileFormatError
from tsfunc.program.calling.retrace_reasons import differing_facts
from tsfunc.program.closure.closure_guards import ClosureGuards
from tsfunc.program.closure.guard_codegen import GuardFunction
from tsfunc.program.fields import Field
from tsfunc.program.files.json_values import NoFileForm, ValueReader, encode
from tsfunc.program.guard import Guard, GuardCode, Part
from tsfunc.program.guarding import guards, trace_guards
from tsfunc.program.guarding.call_spec import guard_lines, guards_on_arguments
from tsfunc.program.guarding.guards import ArgumentGuard
from tsfunc.program.guarding.inputs import InputSpec, input_text
from tsfunc.program.guarding.trace_guards import SharedMemory


class Holder:
    """An object whose attributes are watched."""


# Each is one object: the key of a guard may distinguish equal objects of other classes.
CONSTANTS: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 0.0, -0.0, 1.0, float("nan"), float("inf"), 1j, "", "a",
    torch.float32, torch.float64, torch.device("cpu"), Path("a"), Path("b"), len, min,
)  # fmt: skip


def name(position: int) -> str:
    return f"x[{position}]"


def tensors(shape: Sequence[int]) -> Iterator[Tensor]:
    """Yield tensors of the shape that differ in dtype, memory layout, and `requires_grad`."""
    rows, columns = shape
    for dtype in (torch.float32, torch.float64, torch.int64):
        yield torch.zeros(rows, columns, dtype=dtype)
        yield torch.zeros(columns, rows, dtype=dtype).t()
        yield torch.zeros(rows, 2 * columns, dtype=dtype)[:, ::2]
        yield torch.zeros(1, columns, dtype=dtype).expand(rows, columns)
        yield torch.zeros(rows, dtype=dtype)
        if dtype.is_floating_point:
            yield torch.zeros(rows, columns, dtype=dtype, requires_grad=True)


def guards_of(value: Any) -> list[ArgumentGuard]:
    inputs = [InputSpec(0, "x", value, tuple(value.shape))] if isinstance(value, Tensor) else []
    return guards_on_arguments([value], inputs)


def compiled(value: Any) -> GuardFunction:
    """Return the generated guard of a call with one argument."""
    lines, scope = guard_lines(guards_of(value), {}, 1)
    now = tuple(setting.read() for setting in SETTINGS)
    return ClosureGuards().function(now, lines, scope.objects)


@dataclass(frozen=True, eq=False)
class IsOdd(Guard):
    """A guard of a class that no other code knows."""

    position: int

    def lines(self, code: GuardCode) -> Iterable[str]:
        return (f"if args[{self.position}] % 2 == 0: return None",)


@pytest.mark.parametrize("part", [part for part in Part if part is not Part.SETTINGS])
def test_a_guard_of_a_new_class_is_checked(part: Part) -> None:
    class InPart(IsOdd):
        pass

    InPart.part = part
    settings = tuple(setting.read() for setting in SETTINGS)
    if part in (Part.ARGUMENTS, Part.SIZES, Part.FACTS):
        lines, scope = guard_lines([InPart(0)], {}, 1)
        check = ClosureGuards().function(settings, lines, scope.objects)
    else:
        check = ClosureGuards([InPart(0)]).function(settings)
    assert check([3]) is not None and check([4]) is None


@pytest.mark.parametrize("number", range(20))
def test_shared_memory_is_guarded_as_a_partition(number: int) -> None:
    draw = random.Random(torch.initial_seed() + number)

    def drawn() -> tuple[list[Tensor], list[int]]:
        memories = [torch.zeros(2, 3) for _ in range(3)]
        chosen = [draw.randrange(3) for _ in range(4)]
        views = [draw.choice([memories[i], memories[i][1:], memories[i].t()]) for i in chosen]
        return views, chosen

    traced, first = drawn()
    guard = SharedMemory.of(traced, range(4))
    lines, scope = guard_lines([guard], {}, 4)
    settings = tuple(setting.read() for setting in SETTINGS)
    check = ClosureGuards().function(settings, lines, scope.objects)
    for _ in range(8):
        called, second = drawn()
        same = all(
            (first[i] == first[j]) == (second[i] == second[j]) for i in range(4) for j in range(4)
        )
        assert (check(called) is not None) == guard.is_met(called) == same
    texts = list(guard.texts(lambda position: "abcd"[position]))
    shared = [group for group in guard.groups if len(group) > 1]
    expected = [f"{', '.join('abcd'[i] for i in group)} share memory" for group in shared]
    apart = ", ".join("abcd"[group[0]] for group in guard.groups)
    expected += [f"{apart} do not share memory"] if len(guard.groups) > 1 else []
    assert texts == expected


def test_the_text_of_an_input_has_its_dtype_and_dims() -> None:
    value = torch.ones(2, 3, dtype=torch.bfloat16)
    assert input_text(InputSpec(0, "x", value, (Dim("n"), 3))) == "bfloat16[n, 3]"
    assert input_text(InputSpec(0, "x", value[0, 0], ())) == "bfloat16[]"


def test_a_guard_without_a_part_is_an_error() -> None:
    with pytest.raises(AttributeError, match="part"):
        guard_lines([IsOdd(0)], {}, 1)


def test_the_classes_that_check_many_guards_at_once_have_places_of_their_own() -> None:
    classes: list[type[Guard]] = [Guard]
    for cls in classes:
        classes += cls.__subclasses__()
    at_once = [cls for cls in classes if "lines_of_many" in vars(cls) and cls is not Guard]
    ours = [cls for cls in classes if cls.__module__.startswith("tsfunc.")]
    places = Counter((cls.part, cls.order) for cls in ours if hasattr(cls, "part"))
    assert at_once and all(places[cls.part, cls.order] == 1 for cls in at_once)


def test_code_key_and_facts_agree_about_every_pair_of_calls() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    sizes = draw.sample(range(2, 9), 3)
    values = [*CONSTANTS, *tensors(sizes[:2]), *tensors(sizes[1:])]
    draw.shuffle(values)
    made = [(value, *guards_of(value), compiled(value)) for value in values]
    for one, first, answers in made:
        for other, second, _ in made:
            same_key = first.key == second.key
            assert (answers([other]) is not None) == same_key, (one, other)
            assert (not differing_facts(first.facts(name), second.facts(name))) == same_key, (
                one,
                other,
            )
            assert same_key or one is not other


@pytest.mark.parametrize("value", [None, 2, 1.5, "a", torch.float32, Holder()])
def test_a_guard_has_a_text_and_facts(value: Any) -> None:
    (guard,) = guards_of(value)
    (text,) = guard.texts(name)
    (fact,) = guard.facts(name)
    assert "x[0]" in text and "x[0]" in fact


def test_the_guards_show_which_arguments_are_one_tensor() -> None:
    f = specialize(lambda x, y, z: x + 1 if x is y else x + z)
    x, y = torch.ones(2), torch.ones(2)
    f(x, x, y)
    assert "x is y" in f.guards and "x, z are different tensors" in f.guards


def test_a_loaded_function_names_the_guard_of_the_trace_that_fails(tmp_path: Path) -> None:
    f = specialize(lambda x, y: x + 1 if x is y else x + y)
    x = torch.ones(2)
    f(x, x)
    f.save(tmp_path / "f.tsfunc", exact=True)
    with pytest.raises(DescriptorViolation, match="x is y does not hold"):
        load(tmp_path / "f.tsfunc")(x, torch.ones(2))


def test_a_file_with_an_unknown_kind_of_guard_is_refused() -> None:
    field = Field.parse(b'{"shape": [1]}', "here")
    with pytest.raises(
        FileFormatError, match="expected a guard: condition, property, aliasing, memory"
    ):
        trace_guards.read_trace_guard(field, trace_guards.DescribedArguments({}, (), ()))


def test_a_file_with_an_unknown_kind_of_argument_is_refused() -> None:
    reader = guards.ArgumentReader(ValueReader(), {}, Symbols({}).fake, set())
    with pytest.raises(FileFormatError, match="expected a number, a value or a tensor, got"):
        guards.read_argument_guard(0, Field.parse(b'{"shape": [1]}', "here"), reader)


def test_a_file_keeps_the_guards(tmp_path: Path) -> None:
    f = specialize(lambda x, y, k, c: x + k if x is y else x * y * len(c), {"k": int})
    for y in (torch.ones(4, requires_grad=True), torch.ones(4)):
        f(torch.ones(4), y, 2, "ab")
    f.save(tmp_path / "f.tsfunc")
    assert "x, y are different tensors" in f.guards and "k: any int" in f.guards
    assert load(tmp_path / "f.tsfunc").guards == f.guards


def test_json_is_read_back_as_the_same_guard() -> None:
    reader = guards.ArgumentReader(ValueReader(), {}, Symbols({}).fake, set())
    shape = random.sample(range(2, 9), 2)
    print("shape", shape)
    for value in (*CONSTANTS, *tensors(shape)):
        (guard,) = guards_of(value)
        try:
            text = json.dumps(guard.to_json(encode))
        except NoFileForm:  # a function, a path
            assert isinstance(value, Path) or callable(value)
            continue
        back = guards.read_argument_guard(0, Field.parse(text.encode(), "here"), reader)
        assert type(back) is type(guard)
        assert list(back.texts(name)) == list(guard.texts(name))
        assert repr(back.facts(name)) == repr(guard.facts(name))
        if isinstance(value, int | float | str | None):  # the keys of other values are their ids
            assert back.key == guard.key
