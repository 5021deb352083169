"""The packed folder's contract in one place; FORMAT.md beside this file is the specification.

Errors, manifest and schemas have a module each and are imported from here; this one finds the
manifest of a folder (or of one split in a folder of splits) and checks files against it. Importing
it takes milliseconds: pyarrow and xxhash are imported by the functions that use them.
"""

from __future__ import annotations

from pathlib import Path

from padless.runtime.blocks import BlockHasher, hash_file
from padless.runtime.buckets import Bucket, length_of_pack, max_lengths
from padless.runtime.errors import (
    BatchError,
    ChecksumError,
    CollateError,
    ForeignFileError,
    FormatError,
    ManifestError,
    MissingFileError,
    NotPackedError,
    PadlessError,
    PlanError,
    RemoteError,
    SplitError,
    StateError,
    StreamError,
    TruncatedFileError,
    VersionError,
)
from padless.runtime.fields import FORMAT_VERSION, load
from padless.runtime.images import (
    IMAGES,
    PackedImage,
    embedded_image,
    read_embedded,
    read_images,
    write_images,
)
from padless.runtime.manifest import (
    FileInfo,
    Manifest,
    ShardInfo,
    SourceInfo,
    SplitInfo,
    SplitsManifest,
    TableInfo,
)
from padless.runtime.schema import (
    ID_LIMITS,
    LEVELS,
    OWN_COLUMNS,
    ColumnInfo,
    column_problem,
    parse_type,
    schema_of,
    sequence_table_schema,
    shard_columns,
    shard_schema,
)

__all__ = [
    "FORMAT_VERSION",
    "ID_LIMITS",
    "IGNORE_INDEX",
    "IMAGES",
    "LEVELS",
    "MANIFEST",
    "OWN_COLUMNS",
    "WORK_FOLDER",
    "Bucket",
    "length_of_pack",
    "max_lengths",
    "BatchError",
    "BlockHasher",
    "ChecksumError",
    "CollateError",
    "ColumnInfo",
    "FileInfo",
    "ForeignFileError",
    "FormatError",
    "Manifest",
    "ManifestError",
    "MissingFileError",
    "NotPackedError",
    "PackedImage",
    "PadlessError",
    "PlanError",
    "RemoteError",
    "ShardInfo",
    "SourceInfo",
    "SplitError",
    "SplitInfo",
    "SplitsManifest",
    "StateError",
    "StreamError",
    "TableInfo",
    "TruncatedFileError",
    "VersionError",
    "check_bytes",
    "check_file",
    "checksum_bytes",
    "checksum_file",
    "column_problem",
    "embedded_image",
    "hash_file",
    "load_manifest",
    "open_folder",
    "parse_manifest",
    "parse_type",
    "read_embedded",
    "read_images",
    "read_manifest",
    "schema_of",
    "sequence_table_schema",
    "shard_columns",
    "shard_schema",
    "split_info",
    "write_images",
]

IGNORE_INDEX = -100
MANIFEST = "manifest.json"
WORK_FOLDER = ".work"


def load_manifest(folder: str | Path) -> Manifest | SplitsManifest:
    """The manifest of a folder, of either kind.

    Raises NotPackedError where there is none, and what `Manifest.from_json` raises.
    """
    path = Path(folder) / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise NotPackedError(_why_not_packed(Path(folder))) from None
    return parse_manifest(data, str(path))


def parse_manifest(data: bytes, where: str) -> Manifest | SplitsManifest:
    """A manifest of either kind out of its file's bytes; raises what `Manifest.from_json` raises."""
    if load(data, where, None).text("kind") == "splits":
        return SplitsManifest.from_json(data, where)
    return Manifest.from_json(data, where)


def open_folder(folder: str | Path, split: str | None = None) -> tuple[Path, Manifest]:
    """The folder of the one split asked for, and its manifest.

    Raises SplitError (listing the splits) where `split` is needed, unknown or out of place.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    if isinstance(manifest, Manifest):
        if split is not None:
            raise SplitError(f"{folder} is a single split: leave split={split!r} out")
        return folder, manifest
    info = split_info(manifest, split, str(folder))
    split = info.name
    chosen = load_manifest(folder / split)
    check_file(folder / split / MANIFEST, info.bytes, info.checksum)
    if isinstance(chosen, SplitsManifest):
        raise SplitError(f"{folder / split} is itself a folder of splits: open it by its own path")
    return folder / split, chosen


def split_info(manifest: SplitsManifest, split: str | None, folder: str) -> SplitInfo:
    """The split asked for; raises SplitError, listing what there is, where none or an unknown one is."""
    listed = ", ".join(manifest.names) or "none"
    if split is None:
        first = manifest.names[0] if manifest.names else "train"
        raise SplitError(
            f"{folder} is a folder of splits ({listed}): name one, as {folder}/{first} or as split={first!r}"
        )
    info = next((info for info in manifest.splits if info.name == split), None)
    if info is None:
        raise SplitError(f"{folder} has no split {split!r}; it has: {listed}")
    return info


def read_manifest(folder: str | Path, split: str | None = None) -> Manifest:
    """The manifest of one split; raises what `open_folder` raises."""
    return open_folder(folder, split)[1]


def checksum_bytes(data: bytes) -> str:
    """`xxh3:` and 32 hex digits: XXH3 with 128 bits."""
    import xxhash

    return f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"


def checksum_file(path: str | Path) -> str:
    """The checksum of a file, read a piece at a time into memory that stays in a core's own cache."""
    import xxhash

    digest = xxhash.xxh3_128()
    piece = memoryview(bytearray(1 << 18))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(piece):
            digest.update(piece[:size])
    return f"xxh3:{digest.hexdigest()}"


def check_bytes(data: bytes, name: str, size: int, checksum: str) -> None:
    """See that a file's bytes are as listed; raises TruncatedFileError or ChecksumError."""
    if len(data) != size:
        raise TruncatedFileError(f"{name} has {len(data)} bytes, {size} are listed; copy the folder again")
    if (found := checksum_bytes(data)) != checksum:
        raise ChecksumError(f"{name} is {found}, {checksum} is listed; copy the folder again")


def check_file(path: Path, size: int, checksum: str | None = None) -> None:
    """See that a listed file is there with its size and, where given, its checksum.

    Raises MissingFileError, TruncatedFileError or ChecksumError.
    """
    way_out = "copy the folder again or rebuild it with pack-dataset build --force"
    try:
        found = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"{path} is in the manifest and not on disk; {way_out}") from None
    except OSError as problem:  # links that go in a circle, no permission
        raise MissingFileError(f"{path} cannot be looked at ({problem.strerror}); {way_out}") from None
    if found != size:
        raise TruncatedFileError(f"{path} has {found} bytes, the manifest says {size}; {way_out}")
    if checksum is not None and (actual := checksum_file(path)) != checksum:
        raise ChecksumError(f"{path} is {actual}, the manifest says {checksum}; {way_out}")


def _why_not_packed(folder: Path) -> str:
    if not folder.is_dir():
        scheme = next((part for part in folder.parts if part.endswith(":") and len(part) > 2), None)
        if scheme is not None:  # Path("s3://bucket/packed")
            return f"{folder} is no folder; a Path drops a slash of {scheme}//: give a URL as text"
        return f"{folder} is no folder; give the folder that pack-dataset build wrote"
    if (folder / WORK_FOLDER).is_dir():
        return f"{folder} is an unfinished build; run the same pack-dataset build again to end it"
    inside = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    hint = f"; packed folders inside: {', '.join(inside[:8])}" if inside else ""
    return f"{folder} has no {MANIFEST}, so it is not a packed folder{hint}"
