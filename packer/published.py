"""A packed folder behind a URL as a build sees it: what is there, and whose.

    bucket/packed/manifest.json ...     as in a local folder
    bucket/packed/.work/lock            while a build goes there: who, since when

Nothing is known but a listing and small files: object storage has no renames and no locks that die with their
process.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from padless.packer.errors import InputError
from padless.packer.output import is_ours, stands_beside
from padless.runtime.format import (
    MANIFEST,
    WORK_FOLDER,
    Manifest,
    MissingFileError,
    SplitsManifest,
    TruncatedFileError,
    check_bytes,
    parse_manifest,
)
from padless.runtime.storage import Stamp, Storage

LOCK = f"{WORK_FOLDER}/lock"


def check_writable(url: str) -> None:
    """See that a build can go to such an address; raises InputError."""
    if url.startswith("hf://"):
        raise InputError(f"output {url} is on the Hub: build into a folder, and send it by pack-dataset push")
    if url.startswith(("http://", "https://")):
        raise InputError(f"output {url}: http is only read; give a folder, or a bucket (s3://, gs://)")


def is_held(url: str) -> bool:
    """Whether a build is at it, or was when it was stopped."""
    try:
        Storage(url).stamp(LOCK)
    except MissingFileError:
        return False
    return True


def read_published(url: str) -> tuple[Manifest | SplitsManifest, dict[str, Manifest]] | None:
    """The manifest behind a URL and that of each split; None where nothing is finished.

    Raises what parsing a damaged manifest raises, and RemoteError.
    """
    storage = Storage(url)
    try:
        manifest = parse_manifest(storage.read(MANIFEST), storage.where(MANIFEST))
    except MissingFileError:
        return None
    if isinstance(manifest, Manifest):
        return manifest, {"": manifest}
    manifests: dict[str, Manifest] = {}
    for info in manifest.splits:
        where = f"{info.name}/{MANIFEST}"
        data = storage.read(where)
        check_bytes(data, storage.where(where), info.bytes, info.checksum)
        inner = parse_manifest(data, storage.where(where))
        if not isinstance(inner, Manifest):
            raise InputError(
                f"{storage.where(info.name)} is itself a folder of splits: give another --output"
            )
        manifests[info.name] = inner
    return manifest, manifests


def check_published(url: str, manifests: Mapping[str, Manifest]) -> None:
    """See by a listing that all files are there with their sizes; raises as for a local folder."""
    listed = Storage(url).listing()
    for split, manifest in manifests.items():
        for file in manifest.files:
            name = f"{split}/{file.file}" if split else file.file
            way_out = "build it again with --force"
            if name not in listed:
                raise MissingFileError(f"{url}/{name} is in the manifest and not there; {way_out}")
            if listed[name].size not in (None, file.bytes):
                raise TruncatedFileError(
                    f"{url}/{name} has {listed[name].size} bytes, the manifest says {file.bytes}; {way_out}"
                )


def splits_there(storage: Storage, listed: Mapping[str, Stamp]) -> set[str]:
    """The split folders that builds made there: those of the manifest, and of the lock of one under way.

    Another data set in a folder below has a manifest of its own, and is none of them.
    """
    found: set[str] = set()
    for name in (MANIFEST, LOCK):
        try:
            content = json.loads(storage.read(name)) if name in listed else None
        except (ValueError, MissingFileError):
            continue
        names = content.get("splits") if isinstance(content, dict) else None
        for one in names if isinstance(names, list) else ():
            one = one.get("name") if isinstance(one, dict) else one
            found |= {one} if isinstance(one, str) else set()
    return found


def refuse_strangers(storage: Storage, listed: Mapping[str, Stamp], splits: Collection[str]) -> None:
    """See that nothing lies there but what a build with these `splits` writes; raises InputError."""
    owned = MANIFEST in listed or LOCK in listed
    strange = sorted(
        name
        for name in listed
        if name
        and not name.endswith("/")
        and name != LOCK
        and not (owned and (is_ours(name, splits) or stands_beside(name)))
    )
    if not strange and MANIFEST in listed:
        try:
            content = json.loads(storage.read(MANIFEST))
        except ValueError:
            content = None
        if not isinstance(content, dict) or content.get("format") != "padless":
            strange = [MANIFEST]
    if strange:
        raise InputError(
            f"output {storage.url} holds {strange[0]!r}, which padless did not write: give another address, "
            "or move it away (--force does not touch it either)"
        )
