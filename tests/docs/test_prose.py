"""Docstrings and comments name what exists: each name in backticks, and each class of errors."""

from __future__ import annotations

import inspect
import io
import re
import tokenize
from pathlib import Path

from tsfunc import errors

ROOT = Path(__file__).parent.parent.parent
PACKAGE = sorted((ROOT / "tsfunc").rglob("*.py"))
# Names of other libraries and of torch's C++, environment variables, and placeholders.
ELSEWHERE = frozenset(
    """
    AdvancedIndex FOLDER InputDescriptor TORCHINDUCTOR_CACHE_DIR computeStride infer_dense_strides
    is_channels_last_strides_2d jax_debug_nans jax_traceback_filtering lstm_cell spmd_axis_name
    stem_2
    """.split()
)
LIBRARIES = frozenset(["jax", "lax", "optax", "torch", "Tensor"])
_IN_BACKTICKS = re.compile(r"(?<!`)``?([A-Za-z_][\w.]*)(?:\(\))?``?(?!`)")


def is_prose(token: tokenize.TokenInfo) -> bool:
    return token.type == tokenize.COMMENT or (
        token.type == tokenize.STRING and token.string.endswith('"""')
    )


def test_each_name_in_backticks_exists() -> None:
    named = {path.stem for path in ROOT.rglob("*.py")} | {path.parent.name for path in PACKAGE}
    prose = []
    for path in PACKAGE:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if is_prose(token):
                at = f"{path.relative_to(ROOT)}:{token.start[0]}"
                prose += [(at, name) for name in _IN_BACKTICKS.findall(token.string)]
            elif token.type in (tokenize.NAME, tokenize.STRING):
                named.update(re.findall(r"\w+", token.string))
    for folder, kind in (("tsfunc", "*.h"), ("tsfunc", "*.cpp"), ("tests", "*.py")):
        for path in (ROOT / folder).rglob(kind):
            named.update(re.findall(r"\w+", path.read_text()))
    missing = [
        f"{at}: {name}"
        for at, name in prose
        if name.split(".")[0] not in LIBRARIES
        and not (named | ELSEWHERE).issuperset(name.split("."))
    ]
    assert missing == []


def test_the_tree_of_errors_has_each_class_below_its_base() -> None:
    tree: dict[str, tuple[str, ...]] = {}
    parents = [""]
    for line in re.findall(r"^    \S.*", errors.__doc__ or "", re.M):
        entry = re.fullmatch(r"    ([│├└─ ]*)(\w+)(?: \((.*)\))?", line)
        assert entry is not None
        marks, name, bases = entry.groups()
        depth = len(marks) // 4
        parents[depth:] = [name]
        above = [parents[depth - 1]] if depth else [] if bases else ["Exception"]
        tree[name] = (*above, *(bases.split(", ") if bases else ()))
    classes = {
        name: tuple(base.__name__ for base in kind.__bases__)
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and kind.__module__ == errors.__name__
    }
    assert tree == classes
