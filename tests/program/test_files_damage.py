"""Each defect of a file has its error message."""

from __future__ import annotations

import copy
import io
import json
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.program.damage import edited, entries_of, file_of
from tests.program.saved_functions import MADE, Running
from tsfunc import MetaTensorType as Meta
from tsfunc import checkpoint, load, specialize
from tsfunc.errors import FileFormatError

WEIGHT = torch.randn(4, 3)
EVEN = WEIGHT[:, ::2]
GRAPH, FUNCTION, TENSORS = "programs/0.json", "function.json", "tensors.json"


def layer(x: torch.Tensor, k: float) -> Any:
    return {"z": (x @ WEIGHT) * k, "n": x.shape[0] + 1, "e": EVEN + 1}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    f = specialize(layer, {"x": Meta(["n", 4])})
    f(torch.randn(5, 4), 2.0)
    path = tmp_path_factory.mktemp("files") / "f.tsf"
    f.save(path, exact=True)
    return path.read_bytes()


def refused(path: Path, data: bytes, match: str) -> None:
    path /= "f.tsf"
    path.write_bytes(data)
    with pytest.raises(FileFormatError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    # The path contains the name of the test, and that the pattern.
    assert re.search(match, message.removeprefix(f"{path}: ")), message


def archive_of(entries: dict[str, bytes], manifest: Any) -> bytes:
    """Return a file with an unchecked manifest."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for name, data in {**entries, "format.json": json.dumps(manifest).encode()}.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return held.getvalue()


LOCAL, LISTED, LAST = b"PK\3\4", b"PK\1\2", b"PK\5\6"
# Numbers in the records of a zip: the record, the position, the numbers, and the error.
RECORDS: dict[str, tuple[bytes, int, str, tuple[int, ...], str]] = {
    "encrypted": (LISTED, 8, "<H", (1,), "entry 'format.json' is encrypted"),
    "encrypted inside": (LOCAL, 6, "<H", (1,), "'format.json' differs from its record"),
    "sizes later": (LISTED, 8, "<H", (8,), "of a kind that entries never are"),
    "sizes later inside": (LOCAL, 6, "<H", (8,), "differs from its record in the archive"),
    "method": (LISTED, 10, "<H", (99,), "'format.json' is compressed"),
    "method inside": (LOCAL, 8, "<H", (12,), "differs from its record in the archive"),
    "checksum inside": (LOCAL, 14, "<I", (7,), "differs from its record in the archive"),
    "sizes inside": (LOCAL, 18, "<2I", (1, 1), "differs from its record in the archive"),
    "no size": (LOCAL, 18, "<2I", (0xFFFFFFFF,) * 2, "differs from its record in the archive"),
    "name inside": (LOCAL, 30, "<B", (ord("g"),), "differs from its record in the archive"),
    "length of name": (LOCAL, 26, "<H", (5,), "differs from its record in the archive"),
    "length of more": (LOCAL, 28, "<H", (500,), "entry '.*' overlaps another entry"),
    "no entry": (LOCAL, 0, "<B", (0,), "'format.json' is cut off: it does not begin as one"),
    "place": (LISTED, 42, "<I", (7,), "'format.json' does not begin where the one before it ends"),
    "parts": (LAST, 4, "<2H", (1, 1), "it is a part of an archive"),
    "fewer": (LAST, 8, "<2H", (1, 1), "6 entries are listed, and said to be 1"),
    "many": (LAST, 8, "<2H", (0xFFFF,) * 2, "6 entries are listed, and said to be 65535"),
    "directory": (LAST, 16, "<I", (7,), "does not begin where the one before it ends"),
    "no directory": (LAST, 16, "<I", (0xFFFFFFF0,), "overlaps another entry|cut off"),
}


def moved(data: bytes, by: int) -> bytes:
    """Return an archive whose directory is moved."""
    found = bytearray(data)
    (before,) = struct.unpack_from("<I", found, len(found) - 6)
    struct.pack_into("<I", found, len(found) - 6, before + by)
    return bytes(found)


class TestContainers:
    def test_no_archive(self, good: bytes, tmp_path: Path) -> None:
        refused(tmp_path, b"", "not a file of tsfunc, or it is cut off")
        refused(tmp_path, b"\x80\x04pickle", "not a file of tsfunc, or it is cut off")
        for end in (1, 100, len(good) // 2, len(good) - 1):
            refused(tmp_path, good[:end], "not a file of tsfunc, or it is cut off")

    def test_another_archive(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "f.tsf", "w") as archive:
            archive.writestr("data.json", "{}")
        refused(tmp_path, (tmp_path / "f.tsf").read_bytes(), r"not a file of tsfunc.*format\.json")

    def test_flipped_bits(self, good: bytes, tmp_path: Path) -> None:
        at = good.index(b"aten::mul")
        flipped = good[:at] + b"b" + good[at + 1 :]
        refused(tmp_path, flipped, rf"entry '{GRAPH}' is damaged: Bad CRC-32")

    def test_checksums(self, good: bytes, tmp_path: Path) -> None:
        """Checksums find damage that the archive's own 32-bit check misses."""
        other = edited(good, GRAPH, set_in("mul", "requires_grad", False))
        entries = {**entries_of(other), "format.json": entries_of(good)["format.json"]}
        sizes = json.loads(entries["format.json"])
        sizes["entries"][GRAPH]["bytes"] = len(entries[GRAPH])
        refused(tmp_path, archive_of(entries, sizes), "is damaged: its checksum is another")

    @pytest.mark.parametrize("name", ["../../etc/x.json", "/etc/x.json", "C:/x.json", "x.pickle"])
    def test_names_that_lead_elsewhere(self, name: str, good: bytes, tmp_path: Path) -> None:
        data = file_of({**entries_of(good), name: b"{}"})
        refused(tmp_path, data, "is not the name of an entry")

    def test_entries_that_are_compressed(self, good: bytes, tmp_path: Path) -> None:
        bomb = {**entries_of(good), "tensors.safetensors": bytes(50_000_000)}
        data = file_of(bomb, zipfile.ZIP_DEFLATED)
        assert len(data) < 100_000
        refused(tmp_path, data, "is compressed, which entries never are")

    def test_entries_twice(self, good: bytes, tmp_path: Path) -> None:
        (tmp_path / "f.tsf").write_bytes(good)
        with (
            pytest.warns(UserWarning, match="Duplicate"),
            zipfile.ZipFile(tmp_path / "f.tsf", "a") as archive,
        ):
            archive.writestr(GRAPH, "{}")
        refused(tmp_path, (tmp_path / "f.tsf").read_bytes(), f"entry '{GRAPH}' is there twice")

    @pytest.mark.parametrize("name", RECORDS)
    def test_records_of_the_archive(self, name: str, good: bytes, tmp_path: Path) -> None:
        """NOTE [unambiguous files]: an archive that could be read in two ways is refused."""
        mark, at, form, values, match = RECORDS[name]
        where = good.rindex(mark) if mark == LAST else good.index(mark)
        data = bytearray(good)
        struct.pack_into(form, data, where + at, *values)
        refused(tmp_path, bytes(data), match)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda good, at: b"#!/bin/sh\n" + good, "not begin where the one before it ends"),
            (lambda good, at: good + b"more", "something after its end"),
            (lambda good, at: moved(good[:at] + b"more" + good[at:], 4), "something between its"),
            (lambda good, at: good[:-2] + b"\4\0more", "there is a comment"),
            (lambda good, at: moved(good[: at - 9] + good[at:], -9), "beyond the end of the"),
        ],
        ids=["before", "after", "between", "comment", "short"],
    )
    def test_bytes_beside_the_entries(
        self, change: Callable[[bytes, int], bytes], match: str, good: bytes, tmp_path: Path
    ) -> None:
        refused(tmp_path, change(good, good.index(b"PK\1\2")), match)

    def test_entries_that_lie_in_others(self, good: bytes, tmp_path: Path) -> None:
        directory = good.index(b"PK\1\2")
        length = 46 + len("format.json")
        twice = good[:directory] + good[directory : directory + length] + good[directory:]
        more = bytearray(moved(twice, 0))
        count, size = len(entries_of(good)) + 1, len(good) - 22 - directory + length
        struct.pack_into("<2HI", more, len(more) - 14, count, count, size)
        refused(tmp_path, bytes(more), "entry 'format.json' is there twice")

    def test_large_entries(self, good: bytes, tmp_path: Path) -> None:
        """Sizes of 4 GiB and more are in another field; any size may be there."""
        held = io.BytesIO()
        with zipfile.ZipFile(held, "w") as archive:
            for name, data in entries_of(good).items():
                with archive.open(zipfile.ZipInfo(name), "w", force_zip64=True) as entry:
                    entry.write(data)
        path = tmp_path / "f.tsf"
        path.write_bytes(held.getvalue())
        assert load(path)(torch.ones(2, 4), 2.0)["n"] == 3
        at = held.getvalue().index(b"\1\0\x10\0") + 4
        refused(tmp_path, held.getvalue()[:at] + bytes(8) + held.getvalue()[at + 8 :], "directory")

    def test_entries_of_a_stream(self, good: bytes, tmp_path: Path) -> None:
        """Their sizes come after their data, so they are unknown before the data is read."""

        class Stream(io.BytesIO):
            def seekable(self) -> bool:
                return False

            def seek(self, *args: int) -> int:
                raise OSError

        held = Stream()
        with zipfile.ZipFile(held, "w") as archive:
            for name, data in entries_of(good).items():
                archive.writestr(zipfile.ZipInfo(name), data)
        refused(tmp_path, held.getvalue(), "or of a kind that entries never are")

    def test_entries_missing_and_more(self, good: bytes, tmp_path: Path) -> None:
        entries = entries_of(good)
        del entries[GRAPH]
        refused(tmp_path, file_of(entries), "does not belong in a file of tsfunc|is missing")
        more = {**entries_of(good), "programs/7.json": b"{}"}
        refused(tmp_path, file_of(more), r"'programs/7\.json' does not belong in a file of tsfunc")

    def test_sizes_that_are_not_so(self, good: bytes, tmp_path: Path) -> None:
        manifest = json.loads(entries_of(good)["format.json"])
        manifest["entries"][GRAPH]["bytes"] = 1 << 60
        data = archive_of(entries_of(good), manifest)
        refused(tmp_path, data, f"entry '{GRAPH}' expected .* bytes, got")

    def test_a_later_format(self, good: bytes, tmp_path: Path) -> None:
        data = edited(good, "format.json", lambda manifest: {**manifest, "version": 99})
        refused(
            tmp_path,
            data,
            r"expected a file of format \d+, got format 99, of a later version of tsfunc",
        )

    @pytest.mark.parametrize(
        ("entry", "change", "match"),
        [
            (GRAPH, lambda d: d["state"]["reads"][0].update(cell=9), "expected an integer from 0"),
            (GRAPH, lambda d: d["state"]["reads"][0].update(path=["x"]), "there is nothing there"),
            (GRAPH, lambda d: d["state"]["reads"][0].update(cell=0), "not the path of a tensor"),
            (GRAPH, lambda d: d["state"]["updates"].pop(1), "results for them"),
            (GRAPH, lambda d: d["state"].update(arguments=7), "inputs that the call does not have"),
            (GRAPH, lambda d: d["state"].update(reads=[]), "expected 2 inputs, got"),
            (GRAPH, lambda d: d.pop("state"), "expected 2 results, got"),
            (FUNCTION, lambda d: d.pop("state"), "expected an integer from 0"),
            (FUNCTION, lambda d: d["state"][0].update(value={"tensor": "t9"}), "no tensor 't9'"),
        ],
    )
    def test_damaged_state_is_refused(
        self, entry: str, change: Any, match: str, tmp_path: Path
    ) -> None:
        f = specialize(Running())
        f(torch.ones(2))
        f.save(tmp_path / "f.tsf", exact=True)
        data = (tmp_path / "f.tsf").read_bytes()
        refused(tmp_path, edited(data, entry, lambda d: change(d) and None), match)

    @pytest.mark.parametrize(
        ("entry", "change", "match"),
        [
            (
                FUNCTION,
                lambda d: add_condition(d, "print(n) == 1"),
                "is not made of sizes",
            ),
            (
                FUNCTION,
                lambda d: add_condition(d, "k == 1"),
                "is not made of sizes",
            ),
            (
                FUNCTION,
                lambda d: add_condition(d, "n"),
                "expected a comparison of sizes",
            ),
            (FUNCTION, lambda d: add_condition(d, 3), "expected"),
            (FUNCTION, lambda d: form_of(d).update(guards={}), "expected"),
            (GRAPH, lambda d: shape_of(d).update(args=[[1], [2]]), "a list of numbers"),
            (GRAPH, lambda d: shape_of(d).update(args=[[{"node": "x"}]]), "a list of numbers"),
            (GRAPH, lambda d: shape_of(d).update(args=[3]), "a list of numbers"),
        ],
        ids=["call", "name", "no fact", "number", "object", "two", "tensor", "no list"],
    )
    def test_conditions_and_shapes(
        self, entry: str, change: Any, match: str, tmp_path: Path
    ) -> None:
        make, exact = MADE["checking"]
        make().save(tmp_path / "f.tsf", exact=exact)
        data = (tmp_path / "f.tsf").read_bytes()
        refused(tmp_path, edited(data, entry, lambda d: change(d) and None), match)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda c: c.update(policy="mine"), "policy: expected a policy"),
            (lambda c: c.update(policy={"either": ["dots_saveable"]}), "expected a list of 2"),
            (lambda c: c.update(policy={"operators": ["aten::none"]}), "no operator 'aten::none'"),
            (lambda c: c.update(policy={"either": [], "operators": []}), "policy"),
            (lambda c: c.update(random=1), "random: expected"),
            (lambda c: c["bodies"].append(c["bodies"][0]), "expected one body, got 2"),
            (lambda c: c.update(kind="recompute"), "recompute|policy"),
            (lambda c: c.update(kind="states"), "devices is missing"),
        ],
    )
    def test_damaged_checkpoints_are_refused(self, change: Any, match: str, tmp_path: Path) -> None:
        f = specialize(checkpoint(torch.sin))
        f(torch.ones(2))
        f.save(tmp_path / "f.tsf", exact=True)
        data = (tmp_path / "f.tsf").read_bytes()
        name = "programs/0.json"
        control = next(i for i, n in enumerate(json.loads(entries_of(data)[name])["graph"]["nodes"])
                       if "control" in n)  # fmt: skip

        def changed(program: Any) -> None:
            change(program["graph"]["nodes"][control]["control"])

        refused(tmp_path, edited(data, name, changed), match)

    def test_nothing_is_derived_from_states(self, tmp_path: Path) -> None:
        f = specialize(checkpoint(torch.sin))
        f(torch.ones(2))
        f.save(tmp_path / "f.tsf", exact=True)
        states = {"kind": "states", "name": "s", "devices": ["cpu"]}

        def changed(program: Any) -> None:
            for node in program["graph"]["nodes"]:
                if "control" in node:
                    node["args"] = []
                    node["control"] = {"kind": "mapped", "name": "m", "of": states, "batched": []}

        data = edited((tmp_path / "f.tsf").read_bytes(), "programs/0.json", changed)
        refused(tmp_path, data, "it has no derivative")

    def test_arguments_that_no_call_has(self, good: bytes, tmp_path: Path) -> None:
        def change(document: Any) -> None:
            form = document["calls"][-1]["form"]
            form["arguments"] = {"tuple": [*form["arguments"]["tuple"], {"dict": []}]}

        refused(tmp_path, edited(good, FUNCTION, change), "structure of positional and keyword")

    def test_descriptors_between_which_a_call_can_not_choose(
        self, good: bytes, tmp_path: Path
    ) -> None:
        def change(document: Any) -> None:
            document["descriptors"] = 2 * document["descriptors"][:1]

        refused(tmp_path, edited(good, FUNCTION, change), "descriptors are those of no function")

    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            load(tmp_path / "f.tsf")


def form_of(document: Any) -> Any:
    return document["calls"][0]["form"]


def add_condition(document: Any, condition: Any) -> None:
    form_of(document)["guards"].append({"condition": condition})


def shape_of(document: Any) -> Any:
    return node(document, "size")


def node(document: Any, name: str) -> Any:
    return next(n for n in document["graph"]["nodes"] if n["name"].startswith(name))


def set_in(name: str, key: str, value: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        node(document, name)[key] = value

    return change


def first_leaf(document: Any) -> Any:
    return document["calls"][0]["form"]["leaves"][0]


GRAPHS: list[tuple[str, Callable[[Any], Any], str]] = [
    ("unknown operator", set_in("mul", "operator", "aten::mull.Tensor"),
     r"nodes\[\d+\]\.operator: there is no operator 'aten::mull.Tensor'.*torch is 2"),
    ("another library's", set_in("mul", "operator", "mine::mul"),
     r"import the module that registers it \(mine\)"),
    ("files", set_in("mul", "operator", "aten::from_file"), "no operator 'aten::from_file'"),
    ("attributes", set_in("mul", "operator", "__class__::__init__"), "there is no operator"),
    ("too many", set_in("mul", "args", [1, 2, 3, 4]), "expected at most 2 arguments, got 4"),
    ("too few", set_in("mul", "args", []), "expected an argument self, got none"),
    ("kinds", set_in("mul", "args", [{"node": "x"}, "two"]), "aten::mul.Tensor: expected other "
     "of type"),
    ("keywords", set_in("mul", "kwargs", {"out": None}), "got an unknown argument 'out'"),
    ("code in a keyword", set_in("mul", "kwargs", {"a=print()": 1}), "not the name of an argument"),
    ("cycles", set_in("mul", "args", [{"node": "mul_tensor"}, 2]), "no node 'mul_tensor' before"),
    ("names that are code", set_in("mul", "name", "x; print()"), "expected the name of a node"),
    ("names of others", set_in("mul", "name", "args"), "expected another name"),
    ("names of builtins", set_in("mul", "name", "len"), "expected a name that code can have"),
    ("keywords as names", set_in("mul", "name", "while"), "expected another name"),
    ("a number that is no tensor", set_in("sym_size", "args", [5, 0]), "no code can be made of it"),
    ("functions",
     lambda d: next(n for n in d["graph"]["nodes"] if "function" in n).update(function="eval"),
     "expected a function on sizes"),
    ("lines that are code", set_in("mul", "line", "\nprint()"), r"line: expected a line of text"),
    ("dtypes", set_in("mul", "args", [{"node": "x"}, {"dtype": "float33"}]), "a dtype of torch"),
    (
        "nan",
        lambda d: set_in("mul", "args", [{"float": "NaN"}])(d),
        "expected nan, -nan, inf or -inf",
    ),
    ("integers", set_in("mul", "args", [{"node": "x"}, 1 << 80]), "expected an integer"),
    ("sizes", lambda d: node(d, "mul")["type"].update(shape=[1 << 62, 1 << 62]), "is no such"),
    ("size expressions", lambda d: node(d, "mul")["type"].update(shape=[["**", 2, "n"], 3]),
     r"shape\[0\]\[0\]: expected a size"),
    ("dims", lambda d: node(d, "mul")["type"].update(shape=["m", 3]), "expected a size, got 'm'"),
    ("results", lambda d: d.update(results={"tuple": ["*"]}), "expected 3 results, got 1"),
    ("inputs", lambda d: d.update(inputs=[0, 1]), "expected 1 input, got 2"),
    ("keys", lambda d: d.update(more=1), "there is no 'more' in such an object"),
    ("no keys", lambda d: d.pop("graph"), "graph is missing"),
    ("classes", lambda d: d.update(results={"class": "os._wrap_close", "children": []}),
     "not a container|children is missing|data is missing"),
    ("functions as classes", lambda d: d.update(results={"class": "os.system", "children": []}),
     "the class 'os.system' is not known here"),
    ("depth", lambda d: d.update(results=_nested(120)), "nested too deeply"),
]  # fmt: skip


def _nested(depth: int) -> Any:
    tree: Any = "*"
    for _ in range(depth):
        tree = {"tuple": [tree]}
    return tree


@pytest.mark.parametrize(("change", "match"), [g[1:] for g in GRAPHS], ids=[g[0] for g in GRAPHS])
def test_damaged_graphs_are_refused(
    change: Callable[[Any], Any], match: str, good: bytes, tmp_path: Path
) -> None:
    refused(tmp_path, edited(good, GRAPH, lambda d: change(d) and None), f"{GRAPH}: .*(?:{match})")


def settings(function: Any) -> Any:
    return function["calls"][0]["form"]["settings"]


FUNCTIONS: list[tuple[str, Callable[[Any], Any], str]] = [
    ("a program that is not there", lambda d: d["calls"][0].update(program=4), "expected an int"),
    ("inputs", lambda d: d["calls"][0]["form"]["leaves"].reverse(), "that the call does not have"),
    ("no calls", lambda d: d.update(calls=[]), "programs that serve no call"),
    ("parameters", lambda d: d["parameters"][0].update(name="a b"), "expected a name"),
    ("no name", lambda d: d["parameters"][0].update(name=""), "expected a name"),
    ("two of a name", lambda d: d["parameters"].append(d["parameters"][0]), "duplicate parameter"),
    ("descriptors", lambda d: d["descriptors"][0].update(x="f32[n"), "not a descriptor"),
    ("of no parameter", lambda d: d["descriptors"][0].update(z="int"), "is no such parameter"),
    ("huge tensors", lambda d: first_leaf(d).update(shape=[1 << 62, 1 << 62], strides=[1, 1]),
     "there is no such tensor"),
    ("negative sizes", lambda d: first_leaf(d).update(shape=[-1, 4]), "expected an integer from 0"),
    ("ranks", lambda d: first_leaf(d).update(dims=["n"]), "expected a list of 2"),
    ("dims", lambda d: first_leaf(d).update(dims=["__import__('os')", 4]), "joins integers and"),
    ("bounds", lambda d: d["calls"][0]["form"]["dims"].update(n="tensor[m]"), "of the dim 'n'"),
    ("grad", lambda d: first_leaf(d).update(requires_grad=1), "grad: expected true or false"),
    ("settings", lambda d: settings(d).update(mood=1), "no such setting"),
    ("values of settings", lambda d: settings(d).update({"default dtype": 1}),
     "a value that default dtype can have, got 1"),
    ("types of settings", lambda d: settings(d).update({"grad mode": 1}),
     "a value that grad mode can have, got 1"),
    ("names of settings", lambda d: settings(d).update({"float32 matmul precision": "fair"}),
     "a value that float32 matmul precision can have, got 'fair'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "match"), [f[1:] for f in FUNCTIONS], ids=[f[0] for f in FUNCTIONS]
)
def test_damaged_functions_are_refused(
    change: Callable[[Any], Any], match: str, good: bytes, tmp_path: Path
) -> None:
    data = edited(good, FUNCTION, lambda d: change(d) and None)
    refused(tmp_path, data, f"{FUNCTION}: .*{match}")


TENSOR_CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("beyond the memory", {"first": 1000}, "goes beyond its memory of"),
    ("long strides", {"strides": [1 << 40, 1]}, "goes beyond its memory of"),
    ("huge", {"shape": [1 << 40, 1 << 40]}, "too many elements|goes beyond"),
    ("dtypes", {"dtype": "object"}, "expected a dtype of torch"),
    ("devices", {"device": "cuda:99"}, r"no device cuda:99 here .*load\(path, device=...\)"),
    ("no devices", {"device": "os"}, "expected a device of torch"),
    ("negative", {"strides": [-1, 1]}, "expected an integer from 0"),
    ("integers that require grad", {"dtype": "int32", "requires_grad": True}, "can't require grad"),
    ("memory", {"memory": "t9"}, "expected the tensors .* of the programs, got"),
]


@pytest.mark.parametrize(
    ("new", "match"), [t[1:] for t in TENSOR_CHANGES], ids=[t[0] for t in TENSOR_CHANGES]
)
def test_damaged_tensors_are_refused(
    new: dict[str, Any], match: str, good: bytes, tmp_path: Path
) -> None:
    data = edited(good, TENSORS, lambda d: {**d, "t0": {**d["t0"], **new}})
    refused(tmp_path, data, match)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": NaN}', "NaN is not a number of JSON"),
        (b'{"a": 1, "a": 1}', "a key twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "expected the JSON of a program, got other data"),
        (b"\xff", "expected the JSON of a program, got other data"),
        (b"", "expected the JSON of a program, got other data"),
        (b"3", "expected an object"),
    ],
    ids=["depth", "nan", "twice", "digits", "utf", "empty", "number"],
)
def test_damaged_documents_are_refused(
    text: bytes, match: str, good: bytes, tmp_path: Path
) -> None:
    refused(tmp_path, file_of({**entries_of(good), GRAPH: text}), f"{GRAPH}: .*{match}")


def test_the_memory_of_tensors(good: bytes, tmp_path: Path) -> None:
    entries = entries_of(good)
    entries["tensors.safetensors"] = entries["tensors.safetensors"][:-1]
    refused(tmp_path, file_of(entries), r"tensors\.safetensors: not safetensors data")


def _function(kind: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a change to the first function of a kind."""

    def changed(program: Any) -> None:
        change(next(each for each in program["functions"] if each["kind"] == kind))

    return changed


def _part(name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a change to a part of the first function with a `custom_vjp`."""
    return _function("vjp", lambda function: change(function["parts"][name]))


def _index(kind: str, name: str, new: int) -> Callable[[Any], Any]:
    """Return a change of the first index of that name in the first function of a kind."""

    def changed(function: Any) -> None:
        indices = function["indices"][name]
        indices[:1] = [new]

    return _function(kind, changed)


def _call(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a change to the first call of a function."""

    def changed(program: Any) -> None:
        nodes = program["graph"]["nodes"]
        change(next(n for n in nodes if n.get("control", {}).get("kind") == "function")["control"])

    return changed


def _calls_itself(function: Any) -> None:
    """Return a change: the function calls one of its rules, which calls the function."""
    parts = function["parts"]
    parts["primal"] = copy.deepcopy(parts["forward"])
    del parts["primal"]["graph"]["outputs"][1:]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_function("vjp", lambda f: f.update(kind="eval")), "kind: expected a kind of function"),
        (_function("vjp", lambda f: f.update(kind="jvp")), "wrt.* is missing|no 'differentiable'"),
        (_function("vjp", lambda f: f.update(tensors=2)), "called with other values"),
        (_function("vjp", lambda f: f.update(tensors=1 << 40)), "tensors: expected an integer"),
        (_function("vjp", lambda f: f.update(results=2)), "expected 2 results, got 1"),
        (_function("vjp", lambda f: f.update(count=2)), "count: expected an integer"),
        (
            _index("vjp", "differentiable", 1),
            "differentiable.*expected an integer",
        ),
        (
            _part("backward", lambda p: p["inputs"].append(0)),
            "has other inputs",
        ),
        (
            _part("primal", lambda p: p.update(name="a\nb")),
            "expected a line of text",
        ),
        (
            _part("primal", lambda p: p["graph"].update(outputs=[None])),
            "expected a tensor for each result, got null",
        ),
        (_function("vjp", _calls_itself), "in a circle, or too deeply"),
        (_index("jvp", "wrt", 3), "wrt.*expected an integer"),
        (_function("jvp", lambda f: f.update(more=1)), "there is no 'more' in such an object"),
        (
            _index("methods", "saved", 9),
            "saved.*expected an integer",
        ),
        (_function("methods", lambda f: f.update(refusal="a\nb")), "refusal: expected a line"),
        (
            _function("methods", lambda f: f.update(once_differentiable=0)),
            "once_differentiable: expected true or false",
        ),
        (_call(lambda c: c.update(number=99)), "number: expected an integer"),
        (_call(lambda c: c.update(written=[1])), "written.*expected an integer"),
        (_call(lambda c: c.update(maps=[{}])), "in_dims is missing"),
        (lambda p: p.update(functions=[]), "number: expected an integer"),
        (lambda p: p.update(functions={}), "functions: expected a list"),
    ],
)
def test_damaged_rules_are_refused(
    change: Callable[[Any], Any], match: str, tmp_path: Path
) -> None:
    data = (Path(__file__).parent / "files" / "rules.tsf").read_bytes()
    refused(tmp_path, edited(data, GRAPH, lambda d: change(d) and None), match)


@pytest.mark.parametrize(
    ("display", "match"),
    [
        ({"number": "bool", "text": "n"}, "number: expected int or float"),
        ({"number": "int", "text": "a\nb"}, "text: expected a line of text"),
        ({"dtype": "float32", "shape": [-1], "device": "cpu"}, r"shape\[0\]: expected an integer"),
        ({"dtype": "float32", "shape": "n", "device": "cpu"}, "shape: expected a list"),
        ({"dtype": "object", "shape": [], "device": "cpu"}, "expected a dtype"),
        ({"dtype": "float32", "shape": []}, "device is missing"),
    ],
)
def test_displayed_types(display: Any, match: str, tmp_path: Path) -> None:
    f = specialize(lambda x: x[x > 0])
    f(torch.ones(2))
    f.save(tmp_path / "f.tsf", exact=True)
    data = (tmp_path / "f.tsf").read_bytes()

    def changed(program: Any) -> None:
        next(n for n in program["graph"]["nodes"] if "display" in n)["display"] = display

    refused(tmp_path, edited(data, GRAPH, changed), f"display.*{match}|{match}")


def test_damaged_generators_are_refused(tmp_path: Path) -> None:
    data = (Path(__file__).parent / "files" / "rules.tsf").read_bytes()

    def generator(state: Any) -> Callable[[Any], Any]:
        def changed(program: Any) -> None:
            nodes = program["graph"]["nodes"]
            drawn = next(n for n in nodes if n.get("operator") == "aten::rand.generator")
            drawn["kwargs"]["generator"]["generator"].update(state)

        return changed

    refused(tmp_path, edited(data, GRAPH, generator({"state": "t9"})), "there is no tensor 't9'")
    refused(
        tmp_path, edited(data, GRAPH, generator({"device": "meta"})), "not the state of a generator"
    )
    broken = edited(data, TENSORS, lambda d: d.update({"t0": {**d["t0"], "dtype": "int8"}}))
    refused(tmp_path, broken, "its data is torch.uint8")
    entries = entries_of(data)
    memory = bytearray(entries["tensors.safetensors"])
    memory[-5056:] = bytes(5056)
    entries["tensors.safetensors"] = bytes(memory)
    refused(tmp_path, file_of(entries), "not the state of a generator of cpu")
