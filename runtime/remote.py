"""Packed folders behind a URL: the manifest is read at once, every other file when it is needed.

    PackedStream("s3://bucket/packed")      whatever fsspec reads: s3, gs, http, hf, memory ...
    PackedStream("s3://bucket/packed", storage_options={"endpoint_url": "https://...", "key": ...})

A file comes whole into a cache on this machine (`shards` in `PADLESS_CACHE`, by default ~/.cache/padless,
up to `PADLESS_CACHE_BYTES`, by default 64 GiB) and is compared with the manifest's checksum on its way;
from then on it is read as a local one. `file://` works too, and keeps a slow network mount out of the way.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from padless.runtime.cache import FileCache
from padless.runtime.errors import MissingFileError, NotPackedError, RemoteError, SplitError
from padless.runtime.format import MANIFEST, check_bytes, parse_manifest, split_info
from padless.runtime.manifest import FileInfo, Manifest, ShardInfo, TableInfo
from padless.runtime.storage import Storage, cache_folder

T = TypeVar("T")
_DEFAULT_BYTES = 64 << 30
_AT_ONCE = 2
_WAY_OUT = "see that the address is right and can be reached"
_GONE = "copy the folder there again; where it was built anew meanwhile, open it again"


class RemoteFolder:
    """A packed folder's files by URL. May be shared by threads, and pickled."""

    def __init__(self, storage: Storage) -> None:
        """Take the place of the files and, from the environment, that of the cache; raises RemoteError."""
        self.storage = storage
        limit = os.environ.get("PADLESS_CACHE_BYTES", str(_DEFAULT_BYTES))
        if not limit.isdecimal():
            raise RemoteError(f"PADLESS_CACHE_BYTES is {limit!r}; set it to a whole number of bytes")
        # A folder of its own: what else lies in the cache is not the limit's to remove.
        self.cache = FileCache(Path(cache_folder()) / "shards", int(limit))
        self._ahead: ReadAhead | None = None

    @property
    def url(self) -> str:
        """The folder's address."""
        return self.storage.url

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ahead": None}

    def open(self, split: str | None) -> tuple[RemoteFolder, Manifest]:
        """The folder of the one split asked for, and its manifest; raises what `open_folder` does."""
        data = self.read(MANIFEST)
        where = f"{self.url}/{MANIFEST}"
        manifest = parse_manifest(data, where)
        if isinstance(manifest, Manifest):
            if split is not None:
                raise SplitError(f"{self.url} is a single split: leave split={split!r} out")
            return self, manifest
        info = split_info(manifest, split, self.url)
        chosen = RemoteFolder(self.storage.at(info.name))
        data = chosen.read(MANIFEST)
        check_bytes(data, f"{chosen.url}/{MANIFEST}", info.bytes, info.checksum)
        opened = parse_manifest(data, f"{chosen.url}/{MANIFEST}")
        if not isinstance(opened, Manifest):
            raise SplitError(f"{chosen.url} is itself a folder of splits: open it by its own address")
        return chosen, opened

    def read(self, name: str) -> bytes:
        """A small file's bytes; raises NotPackedError where there is none, and RemoteError."""
        try:
            return self.storage.read(name)
        except MissingFileError:
            raise NotPackedError(
                f"{self.url} has no {name}, so it is not a packed folder; {_WAY_OUT}"
            ) from None

    def open_file(self, info: FileInfo | ShardInfo | TableInfo, opened: Callable[[Path], T]) -> T:
        """What `opened` makes of a listed file: a local one, complete and compared with its checksum.

        Raises MissingFileError, TruncatedFileError, ChecksumError or RemoteError.
        """
        name = f"{self.url}/{info.file}"
        try:
            return self.cache.open(
                name, info.bytes, info.checksum, lambda: self.storage.pieces(info.file), opened
            )
        except MissingFileError:
            raise MissingFileError(f"{name} is in the manifest and not there; {_GONE}") from None
        except OSError as problem:
            raise RemoteError(
                f"{name} cannot be kept in {self.cache.folder} ({problem}); "
                "make room there, or set PADLESS_CACHE to another folder"
            ) from None

    def has(self, info: FileInfo | ShardInfo | TableInfo) -> bool:
        """Whether a listed file lies in the cache, however it looks behind the URL by now."""
        return self.cache.has(info.bytes, info.checksum)

    def fetch(self, info: FileInfo | ShardInfo | TableInfo) -> None:
        """Let a listed file come into the cache; raises as `open_file` does."""
        self.open_file(info, lambda path: None)

    def read_ahead(self, files: Sequence[ShardInfo]) -> None:
        """Fetch files in threads, so that they are there when they are asked for.

        What goes wrong is told to whoever asks for the file.
        """
        if self._ahead is None or self._ahead.process != os.getpid():  # threads do not live on in a fork
            self._ahead = ReadAhead(self.fetch)
        self._ahead.ask(files)


class ReadAhead:
    """Threads that fetch what was asked for, in this order, and end when nothing is left.

    They die with the process, whatever they are at: it must not stay for files that nobody will read.
    """

    def __init__(self, fetch: Callable[[ShardInfo], None]) -> None:
        self.process = os.getpid()
        self._fetch = fetch
        self._lock = threading.Lock()
        self._waiting: dict[str, ShardInfo] = {}
        self._coming: dict[str, threading.Thread] = {}

    def ask(self, files: Sequence[ShardInfo]) -> None:
        """Have these fetched, unless they are on their way."""
        with self._lock:
            self._waiting |= {info.file: info for info in files if info.file not in self._coming}
            while self._waiting and len(self._coming) < _AT_ONCE:
                self._start()

    def _start(self) -> None:
        name = next(iter(self._waiting))
        thread = threading.Thread(target=self._run, args=(self._waiting.pop(name),), daemon=True)
        self._coming[name] = thread
        thread.start()

    def _run(self, info: ShardInfo) -> None:
        with contextlib.suppress(Exception):
            self._fetch(info)
        with self._lock:
            del self._coming[info.file]
            if self._waiting:
                self._start()

    def wait(self) -> None:
        """Come back when all that was asked for has come, or failed."""
        while threads := list(self._coming.values()):
            for thread in threads:
                thread.join()
