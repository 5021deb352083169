"""A packed folder's files as `verify` sees them, on this machine or behind a URL.

Behind a URL each file comes once, as it lies there now, and is hashed on the way: into the cache, where the
packs are then read from, or past it where the cache has it already, since the copy here says nothing of the
one there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from padless.runtime.format import (
    MANIFEST,
    BlockHasher,
    ChecksumError,
    FileInfo,
    FormatError,
    Manifest,
    PlanError,
    ShardInfo,
    SplitInfo,
    SplitsManifest,
    TableInfo,
    TruncatedFileError,
    check_bytes,
    check_file,
    hash_file,
    load_manifest,
    open_folder,
    parse_manifest,
)
from padless.runtime.storage import Storage, is_url

AnyFile = FileInfo | ShardInfo | TableInfo
_HERE = "copy the folder again, or rebuild it with pack-dataset build --force"
_THERE = "copy the folder there again, or rebuild it with pack-dataset build --force"


class Files(Protocol):
    """The files of one packed folder, or of a folder of splits."""

    path: str
    """The folder as a reader takes it."""

    def manifest(self) -> Manifest | SplitsManifest:
        """The manifest of either kind; raises NotPackedError, and what parsing it raises."""

    def of_split(self, split: str | None) -> tuple[Files, Manifest]:
        """The files of the one split asked for, and its manifest; raises SplitError."""

    def at(self, name: str) -> Files:
        """The folder of a split."""

    def read(self, name: str) -> bytes:
        """A small file's bytes; raises FormatError."""

    def check(self, file: AnyFile) -> None:
        """See that a listed file is there with its size and checksum; raises FormatError kinds."""

    def check_manifest(self, split: SplitInfo) -> str:
        """The same of a split's manifest; where it lies."""

    def names(self) -> list[str]:
        """The files that lie there, those below it left out."""

    def need_plan(self, name: str) -> None:
        """See that there is a plan of that name; raises PlanError."""


class LocalFiles:
    """Those of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, str(folder)

    def manifest(self) -> Manifest | SplitsManifest:
        return load_manifest(self.folder)

    def of_split(self, split: str | None) -> tuple[Files, Manifest]:
        folder, manifest = open_folder(self.folder, split)
        return LocalFiles(folder), manifest

    def at(self, name: str) -> Files:
        return LocalFiles(self.folder / name)

    def read(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as problem:
            raise FormatError(f"{name} cannot be read: {problem}") from None

    def check(self, file: AnyFile) -> None:
        path = self.folder / file.file
        check_file(path, file.bytes)
        _compare(str(path), file, hash_file(path), _HERE)

    def check_manifest(self, split: SplitInfo) -> str:
        path = self.folder / split.name / MANIFEST
        check_file(path, split.bytes, split.checksum)
        return str(path)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.is_file())

    def need_plan(self, name: str) -> None:
        from padless.runtime.plans import no_plan, plan_names

        if name not in (there := plan_names(self.folder)):
            raise PlanError(no_plan(self.path, name, ", ".join(there) or "none"))


class UrlFiles:
    """Those behind a URL; requests fail with RemoteError."""

    def __init__(self, url: str) -> None:
        from padless.runtime.remote import RemoteFolder

        self.path = url
        self._folder = RemoteFolder(Storage(url))

    def manifest(self) -> Manifest | SplitsManifest:
        return parse_manifest(self._folder.read(MANIFEST), f"{self.path}/{MANIFEST}")

    def of_split(self, split: str | None) -> tuple[Files, Manifest]:
        folder, manifest = self._folder.open(split)
        return UrlFiles(folder.url), manifest

    def at(self, name: str) -> Files:
        return UrlFiles(f"{self.path}/{name}")

    def read(self, name: str) -> bytes:
        return self._folder.storage.read(name)

    def check(self, file: AnyFile) -> None:
        where = f"{self.path}/{file.file}"
        if not self._folder.has(file):
            _compare(where, file, self._folder.open_file(file, hash_file), _THERE)
            return
        hashed, size = BlockHasher(), 0
        for piece in self._folder.storage.pieces(file.file):
            hashed.update(memoryview(piece))
            size += len(piece)
        if size != file.bytes:
            raise TruncatedFileError(f"{where} has {size} bytes, the manifest says {file.bytes}; {_THERE}")
        _compare(where, file, hashed, _THERE)

    def check_manifest(self, split: SplitInfo) -> str:
        where = f"{self.path}/{split.name}/{MANIFEST}"
        check_bytes(self.read(f"{split.name}/{MANIFEST}"), where, split.bytes, split.checksum)
        return where

    def names(self) -> list[str]:
        return sorted(name for name in self._folder.storage.listing() if "/" not in name)

    def need_plan(self, name: str) -> None:
        from padless.runtime.plans import no_plan

        if f"plans/{name}.parquet" not in self._folder.storage.listing():
            raise PlanError(no_plan(self.path, name, "see plans/ below it"))


def _compare(where: str, file: AnyFile, hashed: BlockHasher, way_out: str) -> None:
    """Hold a file against the manifest's checksum of it, and of its blocks; raises ChecksumError."""
    if hashed.checksum != file.checksum:
        raise ChecksumError(f"{where} is {hashed.checksum}, the manifest says {file.checksum}; {way_out}")
    told = file.block_checksums if isinstance(file, ShardInfo) else None
    if told not in (None, hashed.block_checksums):
        raise ChecksumError(
            f"{where} is unchanged, and the manifest's block_checksums of it are those of other bytes: the "
            f"manifest is damaged, and readers refuse the file; {way_out}"
        )


def files_of(path: str | Path) -> Files:
    """The files of a folder or of a URL."""
    return UrlFiles(str(path).rstrip("/")) if is_url(path) else LocalFiles(Path(path))
