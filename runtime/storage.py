"""Files behind a URL, by fsspec: s3, gs, http, hf, memory, whatever it has a driver for.

    storage = Storage("s3://bucket/packed", {"endpoint_url": "https://..."})
    storage.read("manifest.json"), storage.stamp("shard-00000-1f3a9c2e.arrow").size

Networks fail for a moment, and object storage says "slow down": a request that fails so is made again, at
growing intervals, a file from the byte where it stopped. What no patience helps against (no such file, no
permission, no driver) is told at once. The drivers have retries of their own, few of them, and http has none;
the price of both is that a host that is gone for good is given up after some ten seconds and more.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from padless.runtime.errors import MissingFileError, RemoteError

T = TypeVar("T")
TRIES = 5
"""Of a request that may be answered another time; a file's count begins anew with every piece that came."""
FIRST_PAUSE = 0.5
"""Seconds, before the second try; it doubles, and varies so that many readers do not come back together."""
_PIECE = 8 << 20
_FINAL = (
    *(FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(ImportError, NotImplementedError, ValueError, TypeError, AttributeError),
)
_NO_CREDENTIALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "DefaultCredentialsError",
)
_MARKS = ("ETag", "etag", "md5Hash")
_TIMES = ("Last-Modified", "LastModified", "mtime", "created")


def is_url(path: object) -> bool:
    """Whether it is an address and no local path."""
    return "://" in str(path)


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What a listing tells of a file: another stamp, another file."""

    size: int | None
    """Bytes; None where the server does not say."""
    mark: str
    """The store's own mark of the content, its ETag; "" where it has none."""
    time: str
    """When it was last written, where there is no mark."""


class Storage:
    """The files below one URL. May be shared by threads, and pickled; fsspec keeps the connections."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """Take the address and what fsspec's file system is to be opened with, besides its own settings."""
        self.url = url.rstrip("/")
        self.options = dict(options or {})

    def at(self, name: str) -> Storage:
        """The folder `name` below this one."""
        return Storage(self.where(name), self.options)

    def where(self, name: str) -> str:
        """A file's address; the storage's own where the name is empty."""
        return f"{self.url}/{name}" if name else self.url

    def read(self, name: str) -> bytes:
        """A small file's bytes. Raises MissingFileError and RemoteError, as everything here does."""
        return self.ask(name, lambda system, path: bytes(system.cat_file(path)))

    def stamp(self, name: str) -> Stamp:
        """Size and mark of a file, as they are now."""
        return self.ask(name, lambda system, path: stamp_of(system.info(path)))

    def listing(self) -> dict[str, Stamp]:
        """All files below, by their names from here; nothing where there is no such folder."""

        def ask(system: Any, path: str) -> dict[str, Stamp]:
            root = path.rstrip("/") + "/"
            found = system.find(path, detail=True)
            return {
                name[len(root) :]: stamp_of(info) for name, info in found.items() if name.startswith(root)
            }

        return self.ask("", ask)

    def pieces(self, name: str) -> Iterator[bytes]:
        """A file from its first byte to its last; where the connection breaks it goes on at that byte."""
        done = failures = 0
        while True:
            try:
                system, path = self._system(name)
                file, piece = _opened_at(system, path, done)
                with file:
                    while piece:
                        done += len(piece)
                        failures = 0
                        yield piece
                        piece = file.read(_PIECE)
                return
            except Exception as problem:  # every file system has errors of its own
                failures += 1
                self._pause_or_raise(name, problem, failures, "read")

    def ask(self, name: str, request: Callable[[Any, str], T], *, doing: str = "read") -> T:
        """What a request about a file gives: `request(file system, path)`, made again while that may help.

        `doing` is for messages. Raises MissingFileError where there is no such file, RemoteError, and
        FileExistsError as the request does.
        """
        for failures in range(1, TRIES + 1):
            try:
                return request(*self._system(name))
            except Exception as problem:
                self._pause_or_raise(name, problem, failures, doing)
        raise AssertionError("the last failure was raised")

    def _system(self, name: str) -> tuple[Any, str]:
        import fsspec

        options = self.options
        if self.url.startswith(("http://", "https://")) and "client_kwargs" not in options:
            import aiohttp

            # By default a download ends after five minutes, however well it goes on.
            patience = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
            options = {**options, "client_kwargs": {"timeout": patience}}
        system, root = fsspec.core.url_to_fs(self.url, **options)
        path = f"{root}/{name}" if name else root
        system.invalidate_cache(path)  # drivers answer out of old listings otherwise
        return system, path

    def _pause_or_raise(self, name: str, problem: Exception, failures: int, doing: str) -> None:
        """Wait before the next try, or raise what this failure means to a user."""
        where = self.where(name)
        cause = problem.__cause__
        if isinstance(problem, FileNotFoundError) and isinstance(cause, Exception):
            # What fsspec makes of whatever an http server answers when it is asked about a file.
            problem = cause if getattr(cause, "status", None) not in (None, 404, 410) else problem
            problem = cause if isinstance(cause, TimeoutError | ConnectionError) else problem
        status = getattr(problem, "status", None)
        words = " ".join(str(problem).split())[:300]
        why = f"{type(problem).__name__}: {words}" if words else type(problem).__name__
        if isinstance(problem, FileNotFoundError):
            raise MissingFileError(f"{where} is not there; see that the address is right") from None
        if isinstance(problem, FileExistsError | MissingFileError | RemoteError):
            raise problem
        if isinstance(problem, ImportError):
            raise RemoteError(f"{where}: {words}") from None
        if isinstance(problem, PermissionError) or status in (401, 403):
            raise RemoteError(
                f"{where} may not be {doing} ({why}): see that the address is right, and which credentials "
                "are used (the environment, fsspec's configuration or storage_options)"
            ) from problem
        if type(problem).__name__ in _NO_CREDENTIALS:
            raise RemoteError(
                f"{where} cannot be {doing} without credentials ({why}): give them by the environment, by "
                "fsspec's configuration or as storage_options"
            ) from problem
        refused = isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429)
        if refused or isinstance(problem, _FINAL) or failures >= TRIES:
            tried = f", tried {failures} times" if failures > 1 else ""
            error = RemoteError(
                f"{where} cannot be {doing} ({why}{tried}); see that the address is right and can be reached"
            )
            error.may_pass = not refused and not isinstance(problem, _FINAL)
            raise error from problem
        time.sleep(FIRST_PAUSE * 2 ** (failures - 1) * random.uniform(0.75, 1.25))


def cache_folder() -> str:
    """The folder on this machine for what comes from URLs or goes there."""
    return os.path.abspath(os.environ.get("PADLESS_CACHE") or os.path.expanduser("~/.cache/padless"))


def _opened_at(system: Any, path: str, done: int) -> tuple[Any, bytes]:
    """A file of which `done` bytes have been read, open behind them, and the piece that comes next."""
    if not done and "http" in system.protocol:
        # One answer that streams, which every server gives; a size, or the driver would ask for it first.
        file = system.open(path, "rb", block_size=0, size=1)
        return file, file.read(_PIECE)
    file = system.open(path, "rb", block_size=_PIECE)
    try:
        file.seek(done)
        return file, file.read(_PIECE)
    except ValueError:  # a server without ranges
        file = system.open(path, "rb", block_size=0)
        while done and (piece := file.read(min(done, _PIECE))):
            done -= len(piece)
        return file, file.read(_PIECE)


def stamp_of(info: Mapping[str, Any]) -> Stamp:
    """The stamp in what a file system of fsspec tells of a file."""
    size = info.get("size")
    mark = next((str(info[name]).strip('"') for name in _MARKS if info.get(name)), "")
    when = next((info[name] for name in _TIMES if info.get(name)), "")
    if isinstance(when, datetime):
        when = when.timestamp()
    return Stamp(size=None if size is None else int(size), mark=mark, time="" if mark else str(when))
