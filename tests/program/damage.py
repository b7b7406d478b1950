"""Damaged files: each is wrong in one respect, and right in all others."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import random
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def entries_of(data: bytes) -> dict[str, bytes]:
    """Return the entries of a file, by name."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def file_of(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a file with these entries and right checksums."""
    manifest = json.loads(entries["format.json"])
    manifest["entries"] = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in entries.items()
        if name != "format.json"
    }
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for name, data in {**entries, "format.json": json.dumps(manifest).encode()}.items():
            archive.writestr(zipfile.ZipInfo(name), data, compression)
    return held.getvalue()


def rewrite(path: Path, entry: str, change: Callable[[bytes], bytes]) -> None:
    """Change an entry of a file, and make its checksum right."""
    entries = entries_of(path.read_bytes())
    entries[entry] = change(entries[entry])
    path.write_bytes(file_of(entries))


def edited(data: bytes, entry: str, change: Callable[[Any], Any]) -> bytes:
    """Return a file with an entry of JSON changed: in place, or to the result of the change."""
    entries = entries_of(data)
    value = json.loads(entries[entry])
    changed = change(value)
    entries[entry] = json.dumps(value if changed is None else changed).encode()
    return file_of(entries)


# --- at random


def damaged(data: bytes, rng: random.Random) -> tuple[bytes, bool]:
    """Return a damaged file, and True if its checksums are right, as an attacker's are."""
    kind = rng.choice(_DAMAGES)
    try:
        return kind(data, rng), kind in _HOSTILE
    except RecursionError:  # a document nested so deeply that it can't be copied
        return _flip(data, rng), False


def _flip(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _splice(data: bytes, rng: random.Random) -> bytes:
    """Leave out, double, overwrite with noise, or move some bytes."""
    start = rng.randrange(len(data))
    part = data[start : start + rng.choice((1, 4, 30, 500))]
    rest = data[:start] + data[start + len(part) :]
    at = rng.randrange(len(rest) + 1)
    new = rng.choice((b"", part * 2, rng.randbytes(len(part)), part))
    return rest[:at] + new + rest[at:]


def _json(data: bytes, rng: random.Random) -> bytes:
    """Replace a value of one of the documents; the checksums are made right."""
    entries = entries_of(data)
    name = rng.choice([name for name in entries if name.endswith(".json")])
    document = json.loads(entries[name])
    for _ in range(rng.choice((1, 1, 2, 5))):
        document = _mutated(document, rng)
    entries[name] = rng.choice((_spelled, _spelled, _oddly))(document, rng)
    try:
        return file_of(entries)
    except (ValueError, TypeError, AttributeError, RecursionError):  # the manifest has changed
        return _flip(data, rng)


def _spelled(document: Any, rng: random.Random) -> bytes:
    return json.dumps(document).encode()


def _oddly(document: Any, rng: random.Random) -> bytes:
    text = json.dumps(document)
    at = rng.randrange(len(text) + 1)
    odd = rng.choice(("NaN", "-Infinity", "1e999", "9" * 5000, "[" * 3000, "\x00", '{"a":1,"a":2}'))
    return (text[:at] + odd + text[at + rng.choice((0, 1)) :]).encode()


_JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, -(1 << 63), 1 << 200,
    0.5, -0.0, 1e308, "", "x", "torch", "__class__", "a\nimport os\n", "x" * 5000, "\ud800", "*",
    "aten::sin", "aten::from_file", "aten::add.Tensor", "os::system", "float32", "cuda:99", "inf",
    "../../etc/passwd", "builtins.eval", "os.system", [], {}, [[]], [1, 2, 3], {"node": "x"},
    {"tuple": []}, {"dtype": "float64"}, {"float": "nan"}, {"class": "os.system", "children": []},
    {"list": ["*", "*"]}, {"dict": [[1, "*"], [1, "*"]]}, ["+", "n", "n"], ["//", "n", 0],
    {"slice": [0, {"node": "x"}, None]}, {"device": "meta"}, {"complex": [1, 2]},
)  # fmt: skip


def _mutated(document: Any, rng: random.Random) -> Any:
    """Return a document with one value changed."""
    places = list(_places(document))
    if not places:
        return rng.choice(_JUNK)
    container, key = rng.choice(places)
    what = rng.randrange(6)
    if what == 0:
        del container[key]
    elif what == 1 and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    elif what == 2:  # another value of the document
        other, at = rng.choice(places)
        container[key] = copy.deepcopy(other[at])
    elif what == 3 and isinstance(container[key], int):
        container[key] += rng.choice((-1, 1, 1 << 40))
    elif what == 4:
        for _ in range(rng.choice((3, 50, 150))):
            container[key] = [container[key]] if rng.random() < 0.5 else {"list": [container[key]]}
    else:
        container[key] = copy.deepcopy(rng.choice(_JUNK))
    return document


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of each value in a document."""
    pending = [value] if isinstance(value, dict | list) else []
    while pending:
        container = pending.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, item in list(items):
            yield container, key
            if isinstance(item, dict | list):
                pending.append(item)


def _memory(data: bytes, rng: random.Random) -> bytes:
    """Damage the safetensors entry, with right checksums."""
    entries = entries_of(data)
    damage = rng.choice((_flip, _cut, _splice))
    entries["tensors.safetensors"] = damage(entries["tensors.safetensors"], rng)
    return file_of(entries)


def _entries(data: bytes, rng: random.Random) -> bytes:
    """Leave out, rename, exchange, or compress entries."""
    entries = entries_of(data)
    one, other = rng.sample(sorted(entries), 2)
    what = rng.randrange(4)
    if what == 0 and one != "format.json":
        del entries[one]
    elif what == 1:
        entries[one], entries[other] = entries[other], entries[one]
    elif what == 2:
        entries[rng.choice(("../x.json", "/etc/x.json", "programs/9.json", "x"))] = b"{}"
    try:
        return file_of(entries, zipfile.ZIP_DEFLATED if what == 3 else zipfile.ZIP_STORED)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return _flip(data, rng)


def _headers(data: bytes, rng: random.Random) -> bytes:
    """Overwrite a number in the zip's own records: sizes, offsets, flags, lengths of names."""
    marks = (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06")
    places = [m.start() for mark in marks for m in re.finditer(re.escape(mark), data)]
    at = rng.choice(places) + rng.randrange(4, 46)
    width = rng.choice((1, 2, 4))
    value = rng.choice((0, 1, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, rng.getrandbits(32)))
    return data[:at] + (value % (1 << 8 * width)).to_bytes(width, "little") + data[at + width :]


def _loops(data: bytes, rng: random.Random) -> bytes:
    """Exchange names in a program, so that nodes refer to later ones, or to themselves."""
    entries = entries_of(data)
    name = rng.choice([name for name in entries if re.fullmatch(r"programs/\d+\.json", name)])
    text = entries[name].decode()
    names = sorted(set(re.findall(r'"name":"(\w+)"', text)))
    one, other = rng.choice(names), rng.choice(names)
    places = [m.start() for m in re.finditer(f'"{re.escape(one)}"', text)]
    at = rng.choice(places)
    entries[name] = (text[:at] + f'"{other}"' + text[at + len(one) + 2 :]).encode()
    return file_of(entries)


_HOSTILE = (_json, _memory, _entries, _loops)
_DAMAGES = (
    _flip, _cut, _splice, _headers, _json, _json, _json, _json, _memory, _entries, _loops,
)  # fmt: skip
