"""Packed folders behind a URL: the manifest is read at once, every other file when it is needed.

    PackedStream("s3://bucket/packed")      whatever fsspec reads: s3, gs, http, hf, memory ...

A file comes whole into a cache on this machine (`shards` in `PADLESS_CACHE`, by default ~/.cache/padless,
up to `PADLESS_CACHE_BYTES`, by default 64 GiB) and is compared with the manifest's checksum on its way;
from then on it is read as a local one. `file://` works too, and keeps a slow network mount out of the way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from padless.runtime.cache import FileCache
from padless.runtime.errors import MissingFileError, NotPackedError, RemoteError, SplitError
from padless.runtime.format import MANIFEST, check_bytes, parse_manifest, split_info
from padless.runtime.manifest import FileInfo, Manifest, ShardInfo, TableInfo

T = TypeVar("T")
_PIECE = 8 << 20
_DEFAULT_BYTES = 64 << 30
_AT_ONCE = 2
_WAY_OUT = "see that the address is right and can be reached"


class RemoteFolder:
    """A packed folder's files by URL. May be shared by threads, and pickled."""

    def __init__(self, url: str) -> None:
        """Take the address and, from the environment, the place of the cache; raises RemoteError."""
        self.url = url.rstrip("/")
        limit = os.environ.get("PADLESS_CACHE_BYTES", str(_DEFAULT_BYTES))
        if not limit.isdecimal():
            raise RemoteError(f"PADLESS_CACHE_BYTES is {limit!r}; set it to a whole number of bytes")
        folder = os.environ.get("PADLESS_CACHE") or Path.home() / ".cache" / "padless"
        # A folder of its own: what else lies in the cache is not the limit's to remove.
        self.cache = FileCache(Path(folder).absolute() / "shards", int(limit))
        self._ahead: tuple[int, ThreadPoolExecutor] | None = None
        self._asked: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ahead": None, "_asked": set()}

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
        chosen = RemoteFolder(f"{self.url}/{info.name}")
        data = chosen.read(MANIFEST)
        check_bytes(data, f"{chosen.url}/{MANIFEST}", info.bytes, info.checksum)
        opened = parse_manifest(data, f"{chosen.url}/{MANIFEST}")
        if not isinstance(opened, Manifest):
            raise SplitError(f"{chosen.url} is itself a folder of splits: open it by its own address")
        return chosen, opened

    def read(self, name: str) -> bytes:
        """A small file's bytes; raises NotPackedError where there is none, and RemoteError."""
        try:
            return self._asking(name, lambda system, path: bytes(system.cat_file(path)))
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
            return self.cache.open(name, info.bytes, info.checksum, lambda: self._pieces(info.file), opened)
        except OSError as problem:
            raise RemoteError(
                f"{name} cannot be kept in {self.cache.folder} ({problem}); "
                "make room there, or set PADLESS_CACHE to another folder"
            ) from None

    def fetch(self, info: FileInfo | ShardInfo | TableInfo) -> None:
        """Let a listed file come into the cache; raises as `open_file` does."""
        self.open_file(info, lambda path: None)

    def read_ahead(self, files: Sequence[ShardInfo]) -> None:
        """Fetch files in threads, so that they are there when they are asked for.

        What goes wrong is told to whoever asks for the file.
        """
        if self._ahead is None or self._ahead[0] != os.getpid():  # threads do not live on in a fork
            self._ahead = os.getpid(), ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="padless-read-ahead")
            self._asked = set()
        for info in files:
            if info.file not in self._asked:
                self._asked.add(info.file)
                self._ahead[1].submit(self._fetch_and_forget, info)

    def _fetch_and_forget(self, info: ShardInfo) -> None:
        try:
            self.fetch(info)
        finally:
            self._asked.discard(info.file)

    def _pieces(self, name: str) -> Iterator[bytes]:
        file = self._asking(name, lambda system, path: system.open(path, "rb", block_size=_PIECE))
        with file:
            while piece := self._asking(name, lambda *_: file.read(_PIECE)):
                yield piece

    def _asking(self, name: str, ask: Callable[[Any, str], T]) -> T:
        """What a request about a file gives; its failures as ours. Systems are fsspec's to keep."""
        import fsspec

        try:
            system, root = fsspec.core.url_to_fs(self.url)
            return ask(system, f"{root}/{name}")
        except FileNotFoundError:
            raise MissingFileError(
                f"{self.url}/{name} is in the manifest and not there; {_WAY_OUT}"
            ) from None
        except ImportError as problem:
            raise RemoteError(f"{self.url}: {problem}") from None
        except Exception as problem:  # every file system has errors of its own
            raise RemoteError(
                f"{self.url}/{name} cannot be read ({type(problem).__name__}: {problem}); {_WAY_OUT}"
            ) from problem
