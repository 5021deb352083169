"""Sources behind URLs of what fsspec reads: s3, gs, http and others; the Hub has a way of its own.

    s3://bucket/data/part.jsonl.zst     s3://bucket/data/*.parquet     s3://bucket/data/     https://host/data.csv

A file is streamed from its first byte to its last, hashed on the way, and needs no room on the disk; only a
table of columns, which is read by seeking, is kept in a nameless file meanwhile, one at a time. The price is
that the parent hands the text of chunks to the workers, and that a walk begun again is a download begun
again. What the store said of a file when it was resolved has to be true when its last byte was read.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit, urlunsplit

import xxhash

from padless.packer.errors import InputError, SourceLostError
from padless.packer.sources.chunks import SourceFile
from padless.runtime.format import FormatError, MissingFileError, RemoteError
from padless.runtime.storage import Stamp, Storage, cache_folder, stamp_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Kind = Callable[[str], tuple[str | None, str | None]]
_OF_A_SAVED_FOLDER = ("state.json", "dataset_info.json")


def plain_name(url: str) -> str:
    """The address without what is secret or changes with the day: no user, no query of http."""
    if not url.startswith(("http://", "https://")):
        return url
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def url_files(spec: str, kind_of: Kind, kind_of_data: Kind) -> Iterator[SourceFile]:
    """The files that an address names: one, those that a pattern matches, or all of known kinds in a folder.

    `kind_of` gives kind and compression by a name, or raises; `kind_of_data` (None: not read) is for folders.
    Raises InputError and SourceLostError.
    """
    try:
        found = Storage(spec).ask("", lambda system, path: _look(system, path, spec))
    except FormatError as error:
        tell(spec, error)
    if isinstance(found, Stamp):
        yield _source(spec, found, kind_of)
        return
    is_folder = not _is_pattern(spec)
    if is_folder:
        _refuse_made(spec, found)
    root = spec.rstrip("/") + "/"
    chosen = [
        url
        for url in sorted(found)
        if not is_folder
        or kind_of_data(plain_name(url))[0]
        and not any(part.startswith(".") for part in url.removeprefix(root).split("/"))
    ]
    if not chosen:
        raise InputError(
            f"the folder {spec} holds no file to read"
            if is_folder
            else f"nothing matches {spec}; quote the pattern"
        )
    for url in chosen:
        yield _source(url, found[url], kind_of)


def _look(system: Any, path: str, spec: str) -> Stamp | dict[str, Stamp]:
    """What lies at an address: a file, or the files of a pattern or a folder by their own addresses."""
    if _is_pattern(spec):
        with contextlib.suppress(OSError):  # what is there by that very name goes first, as with paths
            info = system.info(path)
            if info["type"] == "file":
                return stamp_of(info)
        listed = system.glob(path, detail=True)
    else:
        is_http = spec.startswith(("http://", "https://"))
        info = {"type": "directory"} if is_http and spec.endswith("/") else system.info(path)
        if info["type"] != "directory":
            return stamp_of(info)
        listed = system.find(path, detail=True)
    protocol = spec.rpartition("://")[0]
    return {
        name if "://" in name else f"{protocol}://{name.lstrip('/')}": stamp_of(info)
        for name, info in listed.items()
        if info["type"] == "file" and not name.endswith("/")
    }


def _is_pattern(spec: str) -> bool:
    marks = "*[" if spec.startswith(("http://", "https://")) else "*?["
    return any(mark in spec for mark in marks)


def _source(url: str, stamp: Stamp, kind_of: Kind) -> SourceFile:
    kind, compression = kind_of(plain_name(url))
    if kind == "tokens":
        raise InputError(
            f"{url} has tokens, which are read together with the files beside it: copy them here"
        )
    if stamp.size == 0:
        raise InputError(f"{url} is empty (0 bytes); leave it out, or put it there again")
    return SourceFile(
        path=url,
        name=plain_name(url),
        kind=kind or "",
        compression=compression,
        revision=stamp.mark or None,
        stamp=stamp,
        size=stamp.size or 0,
    )


def _refuse_made(spec: str, found: Mapping[str, Stamp]) -> None:
    """See that a folder holds somebody's data, and not what a library made of them."""
    names = {url.rpartition("/")[2] for url in found}
    if "manifest.json" in names and any(name.startswith("shard-") for name in names):
        raise InputError(f"{spec} holds packed data: train on it by its URL, or copy it here and repack it")
    if names.issuperset(_OF_A_SAVED_FOLDER):
        raise InputError(f"{spec} is a folder of save_to_disk: name its files ({spec.rstrip('/')}/*.arrow)")


def tell(url: str, error: FormatError) -> NoReturn:
    """Raise what a failure to read a source means: bad input, or bad luck, after which the same goes on."""
    if isinstance(error, RemoteError) and error.may_pass:
        raise SourceLostError(f"{error}; what was finished is kept: the same command goes on") from error
    if isinstance(error, MissingFileError):
        raise InputError(f"there is no {url}; see that the address is right") from error
    raise InputError(str(error)) from error


def check_unchanged(file: SourceFile) -> None:
    """See that a file that was read is the one that was resolved; raises InputError or SourceLostError."""
    assert file.stamp is not None
    try:
        now = Storage(file.path).stamp("")
    except FormatError as error:
        tell(file.path, error)
    if now != file.stamp:
        raise InputError(
            f"{file.path} changed during the build ({_words(file.stamp)}, then {_words(now)}): build again "
            "once it is complete"
        )
    if file.stamp.size not in (None, file.bytes):
        raise SourceLostError(
            f"{file.path} stopped coming ({file.bytes:,} of {file.stamp.size:,} bytes); what was finished is "
            "kept: the same command goes on"
        )


def _words(stamp: Stamp) -> str:
    size = "" if stamp.size is None else f"{stamp.size:,} bytes"
    return ", ".join(word for word in (size, stamp.mark or stamp.time) if word)


class UrlFile(io.RawIOBase):
    """A file behind a URL, read from its start, that hashes whatever is read."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.hash = xxhash.xxh3_128()
        self.size = 0
        self._pieces = Storage(url).pieces("")
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        if not self._left:
            try:
                self._left = memoryview(next(self._pieces, b""))
            except FormatError as error:
                tell(self.url, error)
        data = self._left[: len(view)]
        view[: len(data)] = data
        self._left = self._left[len(data) :]
        self.hash.update(data)
        self.size += len(data)
        return len(data)

    def close(self) -> None:
        self._pieces.close()  # type: ignore[attr-defined]
        super().close()


def keep_nameless(read: Callable[[int], bytes], url: str) -> IO[bytes]:
    """What `read` gives up to its end, in a file that is gone when it is closed; DiskFullError."""
    from padless.packer.errors import disk_full

    folder = cache_folder()
    try:
        os.makedirs(folder, exist_ok=True)
        copy = tempfile.TemporaryFile(dir=folder)
    except OSError as error:
        raise InputError(
            f"{url} cannot be kept in {folder} ({error}) while it is read; set PADLESS_CACHE to another"
            " folder"
        ) from error
    try:
        while data := read(1 << 20):
            copy.write(data)
        copy.flush()
    except OSError as error:
        copy.close()
        if isinstance(error, SourceLostError):
            raise
        raise disk_full(
            error, f"{folder} (PADLESS_CACHE), which keeps {url} meanwhile,", len(data)
        ) from error
    return copy
