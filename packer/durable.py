"""Files that are whole or not there: written under a temporary name, hashed on the way, fsynced, renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from padless.packer.token_store import disk_full
from padless.runtime.format import FileInfo


class DurableFile:
    """A file under a temporary name: hashed as it is written, then fsynced and renamed, or removed."""

    def __init__(self, folder: str, name: str) -> None:
        import xxhash

        self.folder = folder
        self.path = os.path.join(folder, f".{name}.tmp")
        self.size = 0
        self.closed = False
        self._digest = xxhash.xxh3_128()
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not self.closed:
            os.close(self._descriptor)
            self.closed = True
        if os.path.exists(self.path):
            os.remove(self.path)

    def write(self, data: Any) -> int:
        """Append; DiskFullError where there is no room."""
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self.size += len(view)
        rest = view
        try:
            while len(rest):
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise disk_full(error, self.path, len(rest)) from error
        return len(view)

    def flush(self) -> None:
        """Part of the file protocol; every write goes straight through."""

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self.size

    def close(self) -> None:
        """Part of the file protocol; `commit` or the end of the `with` closes it."""

    def commit(self, name: Callable[[str], str]) -> FileInfo:
        """Put the complete file in its place, under the name that its checksum gives."""
        checksum = f"xxh3:{self._digest.hexdigest()}"
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise disk_full(error, self.path, self.size) from error
        os.close(self._descriptor)
        self.closed = True
        final = name(checksum)
        os.replace(self.path, os.path.join(self.folder, final))
        return FileInfo(file=final, bytes=self.size, checksum=checksum)


def write_bytes(folder: str, name: str, data: bytes) -> FileInfo:
    """Write a small file whole."""
    with DurableFile(folder, name.replace("/", "-")) as file:
        file.write(data)
        return file.commit(lambda checksum: name)


def sync_folder(folder: str) -> None:
    """Make renames in a folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
