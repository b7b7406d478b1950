"""Names in generated code."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tsfunc.types.scope import Scope

STEMS = st.sampled_from(["sin", "sin_2", "x", "obj"])


@given(st.lists(st.tuples(STEMS, st.sampled_from(["a new object", "the last one", "none"]))))
def test_a_name_is_of_one_object_or_of_none(steps: list[tuple[str, str]]) -> None:
    taken, listed = object(), ["x_2"]
    scope = Scope({"x": taken}, listed)
    names, objects = ["x", *listed], [taken]
    for stem, of in steps:
        if of == "the last one":
            assert scope.objects[scope.name(objects[-1], stem)] is objects[-1]
            continue
        if of == "a new object":
            objects.append(object())
            names.append(scope.name(objects[-1], stem))
        else:
            names.append(scope.unused(stem))
        assert names[-1].startswith(stem)
    assert len({*names}) == len(names)
    assert [*scope.objects.values()] == objects


def test_names_count_from_their_stem() -> None:
    scope = Scope(taken=["sin_2"])
    assert [scope.name([], "sin") for _ in range(3)] == ["sin", "sin_3", "sin_4"]
    assert scope.name(None) == scope.name(None) == "obj"
