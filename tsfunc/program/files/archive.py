"""The container of a file: a zip of named entries, none of them compressed, each with a checksum.

Nothing in a file is believed before it is checked: names, sizes and checksums of all entries
first. As nothing is compressed, what is read takes no more memory than the file has bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tsfunc.errors import FileFormatError
from tsfunc.program.files.fields import Field

MANIFEST = "format.json"
_NAME = re.compile(r"[a-z_0-9]{1,40}(?:/[a-z_0-9]{1,40}){0,2}\.(?:json|safetensors|py)")
_DATE = (1980, 1, 1, 0, 0, 0)  # the same program makes the same file

# What zipfile raises for archives that are none, or are damaged.
_ZIP_ERRORS = (
    zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, struct.error, NotImplementedError,
    RuntimeError, EOFError, OSError, ValueError, OverflowError, KeyError, IndexError,
)  # fmt: skip


def write_archive(head: Mapping[str, Any], entries: Mapping[str, bytes]) -> bytes:
    """The bytes of a file: the entries, and a manifest with a head."""
    listed = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in entries.items()
    }
    manifest = json_bytes({**head, "entries": listed})
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_STORED) as archive:
        for name, data in {MANIFEST: manifest, **entries}.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), data)
    return held.getvalue()


def json_bytes(value: Any) -> bytes:
    """A value as the JSON of a file: one line for each item of the outer containers."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


class Archive:
    """A file that is open for reading, its container checked.

    Args:
        file: where to read; its position is moved.
        what: what errors call the file.

    Attributes:
        head: the manifest.
    """

    def __init__(self, file: BinaryIO, what: str) -> None:
        self.what = what
        size = file.seek(0, io.SEEK_END)
        try:
            self._zip = zipfile.ZipFile(file)
        except _ZIP_ERRORS as error:
            raise FileFormatError(
                f"{what}: this is no file of tsfunc, or it is cut off: {error}"
            ) from None
        self._infos = self._checked(self._zip.infolist(), size)
        if MANIFEST not in self._infos:
            raise FileFormatError(f"{what}: this is no file of tsfunc: it has no {MANIFEST}.")
        self.head = Field.parse(self._bytes(MANIFEST), f"{what}: {MANIFEST}")

    def require_entries(self, listed: Field) -> None:
        """Checks that the entries are those that the manifest lists, with their sizes."""
        self._sums = {}
        for name, each in listed.mapping().items():
            size, digest = each.record("bytes", "sha256")
            self._sums[name] = digest.text()
            info = self._infos.get(name)
            if info is None:
                raise FileFormatError(f"{self.what}: {name}: the entry is missing.")
            if size.integer(0) != info.file_size:
                raise self._error(name, f"has {info.file_size} bytes, not {size.value}")
        for name in self._infos:
            if name != MANIFEST and name not in self._sums:
                raise self._error(name, f"is not listed in {MANIFEST}")

    def names(self) -> list[str]:
        """The names of all entries."""
        return list(self._infos)

    def read(self, name: str) -> bytes:
        """An entry, its checksum compared."""
        if name not in self._sums:
            raise FileFormatError(f"{self.what}: {name}: the entry is missing.")
        data = self._bytes(name)
        if hashlib.sha256(data).hexdigest() != self._sums[name]:
            raise self._error(name, "is damaged: its checksum is another")
        return data

    def json(self, name: str) -> Field:
        """An entry that is JSON."""
        return Field.parse(self.read(name), f"{self.what}: {name}")

    def _checked(self, infos: list[zipfile.ZipInfo], size: int) -> dict[str, zipfile.ZipInfo]:
        found: dict[str, zipfile.ZipInfo] = {}
        end = 0
        for info in sorted(infos, key=lambda info: info.header_offset):
            name = info.filename
            if not _NAME.fullmatch(name):
                raise self._error(name, "is no name of an entry")
            if name in found:
                raise self._error(name, "is there twice")
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise self._error(name, "is compressed, which entries never are")
            if info.flag_bits & ~0x800:  # all but that names are UTF-8
                raise self._error(name, "is encrypted, or of a kind that entries never are")
            if info.header_offset < end:
                raise self._error(name, "overlaps another entry")
            end = info.header_offset + info.file_size
            if end > size:
                raise self._error(name, "goes on beyond the end of the file")
            found[name] = info
        return found

    def _bytes(self, name: str) -> bytes:
        try:
            data = self._zip.read(self._infos[name])
        except _ZIP_ERRORS as error:
            raise self._error(name, f"is damaged: {error}") from None
        if len(data) != self._infos[name].file_size:
            raise self._error(name, "is cut off")
        return data

    def _error(self, name: str, what: str) -> FileFormatError:
        shown = name if len(name) <= 80 else f"{name[:77]}..."
        return FileFormatError(f"{self.what}: entry {shown!r} {what}.")


def replace(path: Path, data: bytes) -> None:
    """Writes a file; what was there stays whole until the new one is."""
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
