"""The container of a file.

The names, sizes and checksums of all entries are checked before their content is used. The entries
are not compressed, so reading takes no more memory than the file has bytes.

NOTE [unambiguous files]
A zip describes each entry twice: before its data, and in the directory at the end. If the two
differ, two readers may see different files. The same holds for bytes before, between or after the
entries. Both descriptions therefore have to agree, and the file may contain nothing but entries
and directory.
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
from tsfunc.program.fields import Field

# A zip of named, uncompressed entries, each with a checksum.

MANIFEST = "format.json"
_NAME = re.compile(r"[a-z_0-9]{1,40}(?:/[a-z_0-9]{1,40}){0,2}\.(?:json|safetensors|py)")
_DATE = (1980, 1, 1, 0, 0, 0)  # the same program makes the same file
# The local header of an entry: signature, version, flags, method, time, date, CRC-32, compressed
# and uncompressed size, and the lengths of name and extra field. Too large a size is in the extra
# field.
_HEADER = struct.Struct("<4s5H3I2H")
_IN_EXTRA, _LARGE = 0xFFFFFFFF, b"\1\0\x10\0"
# The end record: signature, disk numbers, the number of entries on this disk and in all, size and
# offset of the directory, and the length of the comment.
_LAST = struct.Struct("<4s4H2IH")
_MANY = 0xFFFF  # a larger number of entries is stored elsewhere

# The errors of zipfile for damaged archives, and for files that are not archives.
_ZIP_ERRORS = (
    zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, struct.error, NotImplementedError,
    RuntimeError, EOFError, OSError, ValueError, OverflowError, KeyError, IndexError,
)  # fmt: skip


def write_archive(head: Mapping[str, Any], entries: Mapping[str, bytes]) -> bytes:
    """Return the bytes of a file: the entries, and a manifest with a head."""
    listed = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in entries.items()
    }
    manifest = json_bytes({**head, "entries": listed})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in {MANIFEST: manifest, **entries}.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), data)
    return buffer.getvalue()


def json_bytes(value: Any) -> bytes:
    """Return a value as compact JSON on one line."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


class Archive:
    """A file that is open for reading, with its container checked.

    Args:
        file: the file; its position is moved.
    """

    def __init__(self, file: BinaryIO, label: str) -> None:
        self.label = label
        try:
            self._zip = zipfile.ZipFile(file)
            self._require_end(file)
        except _ZIP_ERRORS as error:
            raise FileFormatError(
                f"{label}: not a file of tsfunc, or it is cut off: {error}"
            ) from None
        self._infos = self._checked(file, self._zip.infolist())
        if MANIFEST not in self._infos:
            raise FileFormatError(
                f"{label}: not a file of tsfunc: expected an entry {MANIFEST}, got none."
            )
        self.head = Field.parse(self._bytes(MANIFEST), f"{label}: {MANIFEST}")

    def require_entries(self, listed: Field) -> None:
        """Check that the entries and their sizes are those that the manifest lists."""
        self._sums = {}
        for name, entry in listed.mapping().items():
            size, digest = entry.record("bytes", "sha256")
            self._sums[name] = digest.text()
            info = self._infos.get(name)
            if info is None:
                raise FileFormatError(f"{self.label}: {name}: the entry is missing.")
            if size.integer(0) != info.file_size:
                raise self._error(name, f"expected {size.value} bytes, got {info.file_size}")
        for name in self._infos:
            if name != MANIFEST and name not in self._sums:
                raise self._error(name, f"is not listed in {MANIFEST}")

    def names(self) -> list[str]:
        return list(self._infos)

    def read(self, name: str) -> bytes:
        """Return the bytes of an entry, with its checksum verified."""
        if name not in self._sums:
            raise FileFormatError(f"{self.label}: {name}: the entry is missing.")
        data = self._bytes(name)
        if hashlib.sha256(data).hexdigest() != self._sums[name]:
            raise self._error(name, "is damaged: its checksum is another")
        return data

    def json(self, name: str) -> Field:
        return Field.parse(self.read(name), f"{self.label}: {name}")

    def _require_end(self, file: BinaryIO) -> None:
        """Check that the file ends where the archive does.

        Raises:
            zipfile.BadZipFile: it does not.
        """
        file.seek(-_LAST.size, io.SEEK_END)
        mark, *disks, entries_on_disk, count, _, _, comment = _LAST.unpack(file.read())
        listed = len(self._zip.filelist)
        if mark != b"PK\5\6" or comment:
            raise zipfile.BadZipFile("there is a comment, or something after its end")
        if any(disks) or entries_on_disk != count:
            raise zipfile.BadZipFile("it is a part of an archive")
        if count != min(listed, _MANY):
            raise zipfile.BadZipFile(f"{listed} entries are listed, and said to be {count}")

    def _checked(self, file: BinaryIO, infos: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
        """Return the entries by name; see NOTE [unambiguous files]."""
        entries: dict[str, zipfile.ZipInfo] = {}
        end = 0
        for info in sorted(infos, key=lambda info: info.header_offset):
            name = info.filename
            if not _NAME.fullmatch(name):
                raise self._error(name, "is not the name of an entry")
            if name in entries:
                raise self._error(name, "is there twice")
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise self._error(name, "is compressed, which entries never are")
            if info.flag_bits & ~0x800:  # all flags except the one for UTF-8 names
                raise self._error(name, "is encrypted, or of a kind that entries never are")
            if info.header_offset < end:
                raise self._error(name, "overlaps another entry")
            if info.header_offset > end:
                raise self._error(name, "does not begin where the one before it ends")
            end = self._end(file, info)
            if end > self._zip.start_dir:
                raise self._error(name, "goes on beyond the end of the entries")
            entries[name] = info
        if end != self._zip.start_dir:
            raise FileFormatError(
                f"{self.label}: there is something between its last entry and the directory."
            )
        return entries

    def _end(self, file: BinaryIO, info: zipfile.ZipInfo) -> int:
        """Return the end of an entry; check that its header agrees with the directory."""
        file.seek(info.header_offset)
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(b"PK\3\4"):
            raise self._error(info.filename, "is cut off: it does not begin as one")
        _, _, flags, method, _, _, crc, *sizes, name_size, extra_size = _HEADER.unpack(header)
        name, extra = file.read(name_size), file.read(extra_size)
        if sizes == [_IN_EXTRA] * 2 and extra.startswith(_LARGE):
            sizes = list(struct.unpack_from("<QQ", extra.ljust(20, b"\0"), len(_LARGE)))
        said = (flags, method, crc, sizes, name)
        listed = (info.flag_bits, info.compress_type, info.CRC, [info.file_size] * 2,
                  info.filename.encode())  # fmt: skip
        if said != listed:
            raise self._error(info.filename, "differs from its record in the archive's directory")
        before = _HEADER.size + len(name) + len(extra)
        return info.header_offset + before + info.file_size

    def _bytes(self, name: str) -> bytes:
        try:
            data = self._zip.read(self._infos[name])
        except _ZIP_ERRORS as error:
            raise self._error(name, f"is damaged: {error}") from None
        if len(data) != self._infos[name].file_size:
            raise self._error(name, "is cut off")
        return data

    def _error(self, name: str, problem: str) -> FileFormatError:
        shown = name if len(name) <= 80 else f"{name[:77]}..."
        return FileFormatError(f"{self.label}: entry {shown!r} {problem}.")


def replace_file(path: Path, data: bytes) -> None:
    """Write a file; an existing file stays intact until the new one is complete."""
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
