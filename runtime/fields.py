"""JSON out of a manifest, read with checks, and written so that equal content gives equal bytes.

Every getter names the file, the place in it and what was found there. Counts are whole, not
negative and small enough for sums in int64; names cannot leave the folder. This is a page of code
instead of a schema library, because a manifest is read in the first milliseconds of every command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from padless.runtime.errors import ManifestError, VersionError

FORMAT_VERSION = 1

T = TypeVar("T")
_NAME = re.compile(r"[^/\\:\x00-\x1f\x7f\ud800-\udfff]+")
# What file systems take.
_LONGEST_NAME = 255
_CHECKSUM = re.compile(r"xxh3:[0-9a-f]{32}")
_HEX = re.compile(r"[0-9a-f]*")
# No count of anything on a disk is above this, and eight of them still add up in int64.
_MAX_COUNT = 2**60


class Fields:
    """A JSON object; `where` is its file and `place` where it stands in it, for messages."""

    def __init__(self, data: dict[str, Any], where: str, place: str = "") -> None:
        self.data, self.where, self.place = data, where, place

    def error(self, key: str, problem: str) -> ManifestError:
        """The error to raise about a key."""
        return ManifestError(
            f"{self.where}: {self.place}{key[:80]} {problem}; the manifest is damaged or not "
            "padless's own, copy the folder again or rebuild it"
        )

    def get(self, key: str, kind: type[T], words: str) -> T:
        value = self.data.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.error(key, f"must be {words}, is {str(value)[:60]!r}")
        return value

    def text(self, key: str) -> str:
        return self.get(key, str, "a string")

    def optional_text(self, key: str) -> str | None:
        return None if self.data.get(key) is None else self.text(key)

    def integer(self, key: str) -> int:
        return self.get(key, int, "a whole number")

    def count(self, key: str, at_least: int = 0) -> int:
        value = self.integer(key)
        if not at_least <= value <= _MAX_COUNT:
            raise self.error(key, f"must be from {at_least} to 2**60, is {str(value)[:40]}")
        return value

    def name(self, key: str, folder: str = "") -> str:
        """A plain name, after `folder` (such as `tokenizer/`): it cannot point elsewhere."""
        value = self.text(key)
        name = value.removeprefix(folder)
        plain = name not in (".", "..") and _NAME.fullmatch(name) and len(name.encode()) <= _LONGEST_NAME
        if (folder and name == value) or not plain:
            raise self.error(key, f"must be {folder}NAME inside the folder, is {value[:80]!r}")
        return value

    def checksum(self, key: str) -> str:
        value = self.text(key)
        if not _CHECKSUM.fullmatch(value):
            raise self.error(key, f"must be xxh3: and 32 hex digits, is {value[:80]!r}")
        return value

    def hex(self, key: str, digits: int, purpose: str) -> str:
        """So many hex digits; what they are for is told where they are not."""
        value = self.text(key)
        if len(value) != digits or not _HEX.fullmatch(value):
            raise self.error(
                key, f"must be {digits} hex digits {purpose}, is {len(value)} characters: {value[:60]!r}"
            )
        return value

    def object(self, key: str) -> Fields:
        value: dict[str, Any] = self.get(key, dict, "an object")
        return Fields(value, self.where, f"{self.place}{key}.")

    def each(self, key: str, parse: Callable[[Fields], T]) -> tuple[T, ...]:
        """A list of objects, each through `parse`."""
        parsed = []
        for number, item in enumerate(self.get(key, list, "a list")):
            if not isinstance(item, dict):
                raise self.error(f"{key}[{number}]", "must be an object")
            parsed.append(parse(Fields(item, self.where, f"{self.place}{key}[{number}].")))
        return tuple(parsed)

    def pairs(self, key: str) -> tuple[tuple[int, int], ...]:
        """A list of pairs of whole numbers."""
        items = self.get(key, list, "a list")
        for item in items:
            if not isinstance(item, list) or [type(part) for part in item] != [int, int]:
                raise self.error(key, f"must hold pairs of whole numbers, has {str(item)[:60]}")
        return tuple((first, second) for first, second in items)

    def refuse_twice(self, names: Sequence[str]) -> None:
        """Raise where a name is listed twice."""
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise self.error(name, "is listed twice")
            seen.add(name)


def dump(content: dict[str, Any]) -> bytes:
    """The bytes of a manifest: keys sorted, UTF-8, a newline at the end."""
    content = {"format": "padless", "version": FORMAT_VERSION, **content}
    text = json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    # A file name that was no UTF-8 arrives as a lone surrogate; this writes it as JSON's \udcxx.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def load(data: bytes, where: str, kind: str | None) -> Fields:
    """The object in a manifest's bytes, of this kind where one is given.

    Raises VersionError for a later version, ManifestError for whatever is no manifest.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise ManifestError(f"{where} is no JSON ({problem}); copy or rebuild the folder") from None
    if not isinstance(content, dict) or content.get("format") != "padless":
        raise ManifestError(f"{where} is no manifest of a packed folder: its format is not padless")
    fields = Fields(content, where)
    version = fields.count("version", 1)
    if version > FORMAT_VERSION:
        raise VersionError(
            f"{where} has format version {version}, this padless reads up to {FORMAT_VERSION}; "
            "upgrade padless or build the folder again"
        )
    found = fields.text("kind")
    if found != (kind or found):
        raise fields.error("kind", f"must be {kind!r}, is {found[:60]!r}")
    return fields
