"""Removal of private data from texts: folders, tensor values; long texts are cut."""

from __future__ import annotations

import os
import re
import sys

LONGEST = 8_000  # characters of one fact: enough for a program of 100 operators
_CUT = "\n[...]\n"

_END = r"\s:,;'\"`()\[\]{}<>"  # the characters that end a path without quotes
_QUOTED = re.compile(r"""(["'`])(?:~|[A-Za-z]:|\.\.?)?[\\/]+(?:[^"'`\n]*[\\/])?([^"'`\\/\n]*)\1""")
# The pattern starts at a separator and looks back from there, which is ten times as fast.
_BARE = re.compile(rf"[\\/](?<![\w.)\]\\/].)[\\/]*(?:[^{_END}\\/]+[\\/]+)*(?P<name>[^{_END}\\/]+)")
_VALUES = re.compile(r"(?P<kind>tensor|Parameter|array)\((?:[^()]|\([^()]*\))*\)")


def scrubbed(text: str) -> str:
    """Return a text for the record: paths without folders, tensors without values."""
    if len(text) > LONGEST:
        text = text[: LONGEST // 2] + _CUT + text[-LONGEST // 2 :]
    if "/" in text or "\\" in text:
        for folder in _known_folders():
            text = text.replace(folder, "/")
        text = _QUOTED.sub(r"\1\2\1", text.replace("~/", "/"))
        text = _BARE.sub(r"\g<name>", text)
    if "tensor(" in text or "Parameter(" in text or "array(" in text:
        text = _VALUES.sub(r"\g<kind>(...)", text)
    return text


def _known_folders() -> list[str]:
    """Return folders that are likely to contain code, the longest first; names may have spaces."""
    folders = {os.path.expanduser("~"), sys.prefix, *sys.path}
    try:
        folders.add(os.getcwd())
    except OSError:  # the folder was deleted
        pass
    separate = {os.path.join(folder, "") for folder in folders if os.path.isabs(folder)}
    return sorted(separate - {os.sep}, key=len, reverse=True)
