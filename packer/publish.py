"""A build's output behind a URL: made in a folder on this machine, uploaded, committed by the manifest.

    ~/.cache/padless/uploads/HASH/KEY/      the folder (in PADLESS_CACHE), as any build makes one
    bucket/packed/.work/lock                who is at it
    bucket/packed/shard-... -> the other files -> manifest.json, put where there is none -> what is stale goes

Shards are written in the last part of a build, at the speed of the disk, so uploading them only then costs
little and leaves one way to make a folder. What was uploaded is in a journal with the store's mark of it: a
run that goes on takes over what is still just that. Files are put whole (of several parts, they appear when
the last one is there), so a torn upload is not there at all; and until the manifest is, nothing is.

Two builds into one URL: on one machine a file lock keeps them apart, between machines the lock object, which
is created where there is none. Stores that cannot do that (it is checked before the commit that the lock is
still ours and the files are those that were uploaded) leave a moment in which the later one wins.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from padless.packer.errors import BusyError, InputError
from padless.packer.output import is_ours
from padless.packer.progress import Report, part_of
from padless.packer.published import LOCK, refuse_strangers, splits_there
from padless.packer.uploads import remove, send, send_all
from padless.runtime.format import (
    MANIFEST,
    Manifest,
    MissingFileError,
    checksum_bytes,
    checksum_file,
)
from padless.runtime.storage import Stamp, Storage, cache_folder

_COMMITS = ("manifest.json", "state.json", "dataset_dict.json")


class Publishing:
    """One build's hold of a URL; as a context it lets go by how the build ended."""

    def __init__(self, url: str, key: str, splits: Iterable[str], *, force: bool, report: Report) -> None:
        """`key` names all that decides the files' bytes; `splits` are the folders that will be there."""
        self.storage = Storage(url)
        self._force, self._report = force, report
        self._base = os.path.join(cache_folder(), "uploads", checksum_bytes(url.encode())[5:21])
        self._key = key[5:21]
        self._splits = {name for name in splits if name}
        """The split folders that are ours: of this build, and of those that were here before it."""
        self.folder = os.path.join(self._base, self._key)
        """Where the build is to make its folder."""

    def __enter__(self) -> Publishing:
        """Take hold; raises BusyError, InputError where something else lies there, and RemoteError."""
        os.makedirs(self._base, exist_ok=True)
        self._held = os.open(os.path.join(self._base, "lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._held)
            raise BusyError(
                f"another build of this machine is writing into {self.storage.url}; wait for it, or give "
                "another --output"
            ) from None
        try:
            for name in os.listdir(self._base):  # of a build that will not go on
                path = os.path.join(self._base, name)
                if os.path.isdir(path) and name != self._key:
                    shutil.rmtree(path)
                    self._forget()
            self._uploaded = self._take_up()
            listed = self.storage.listing()
            self._splits |= splits_there(self.storage, listed)
            refuse_strangers(self.storage, listed, self._splits)
            self._lock()
        except BaseException:
            os.close(self._held)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None or (isinstance(error, InputError) and not self._uploaded):
                if self._holder().get("token") == self._token():
                    remove(self.storage, [LOCK])
                shutil.rmtree(self._base)
        finally:
            os.close(self._held)

    # -- the lock object -------------------------------------------------------------------------------

    def _token(self) -> str:
        """What this machine's builds into the URL are known by, from run to run."""
        path = os.path.join(self._base, "token")
        if not os.path.exists(path):
            with open(path, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(16))
        with open(path, encoding="ascii") as file:
            return file.read()

    def _lock(self) -> None:
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        lock = {"token": self._token(), "host": socket.gethostname(), "since": since}
        mine = json.dumps({**lock, "splits": sorted(self._splits)}).encode()
        if self._create(LOCK, mine):
            return
        holder = self._holder()
        is_mine = holder.get("token") == self._token()
        if is_mine and holder.get("splits") == sorted(self._splits):
            return
        if not is_mine and not self._force:
            raise BusyError(
                f"a build on {holder.get('host', 'another machine')} has been writing into "
                f"{self.storage.url} since {holder.get('since', 'a moment ago')}: wait for it. If it is no "
                "more, the same command there goes on with it, and --force here begins anew"
            )
        self.storage.ask(LOCK, lambda system, path: system.pipe_file(path, mine), doing="written")

    def _holder(self) -> dict[str, Any]:
        try:
            found = json.loads(self.storage.read(LOCK))
        except (ValueError, MissingFileError):  # whoever took over may be done with it
            found = None
        return found if isinstance(found, dict) else {}

    def _create(self, name: str, data: bytes) -> bool:
        """Put a small file where there is none; whether there was none."""
        try:
            self.storage.ask(
                name, lambda system, path: system.pipe_file(path, data, mode="create"), doing="written"
            )
        except FileExistsError:
            return False
        return True

    # -- the journal -----------------------------------------------------------------------------------

    def _take_up(self) -> dict[str, tuple[str, Stamp]]:
        """Name -> checksum of what was uploaded by an earlier run, and the store's stamp of it."""
        found: dict[str, tuple[str, Stamp]] = {}
        try:
            with open(self._journal, encoding="utf-8") as file:
                for line in file:
                    row = json.loads(line)
                    found[row["name"]] = (row["checksum"], Stamp(**row["stamp"]))
        except (OSError, ValueError, KeyError, TypeError):  # nothing there, or torn at its end
            pass
        return found

    @property
    def _journal(self) -> str:
        return os.path.join(self._base, "uploads.jsonl")

    def _forget(self) -> None:
        if os.path.exists(self._journal):
            os.remove(self._journal)

    # -- the commit ------------------------------------------------------------------------------------

    def publish(self, manifests: Mapping[str, Manifest]) -> None:
        """Upload the folder of these splits and commit it; raises BusyError and RemoteError."""
        inside = {f"{split}/" if split else "": manifest for split, manifest in manifests.items()}
        shards = [prefix + shard.file for prefix, manifest in inside.items() for shard in manifest.shards]
        others = [prefix + file.file for prefix, manifest in inside.items() for file in manifest.files]
        others += [prefix + name for prefix in inside for name in ("dataset_info.json", "state.json")]
        others = [name for name in dict.fromkeys(others) if name not in set(shards)]
        if "" not in inside:
            others += ["dataset_dict.json", *(prefix + MANIFEST for prefix in inside)]
        checksums = {
            prefix + file.file: file.checksum
            for prefix, manifest in inside.items()
            for file in manifest.files
        }
        self._sent = part_of(self._report, "upload", sum(map(self._size, (*shards, *others))))
        # A data set that is there is left whole until the new one's shards, under new names, are there too.
        self._upload(shards, checksums)
        self._retract()
        self._upload(others, checksums)
        self._check([*shards, *others])
        with open(os.path.join(self.folder, MANIFEST), "rb") as file:
            data = file.read()
        if not self._create(MANIFEST, data) and self.storage.read(MANIFEST) != data:
            raise BusyError(
                f"another build has committed its manifest to {self.storage.url} meanwhile, and this one has "
                "not: give another --output, or --force"
            )
        self.sweep({MANIFEST, *shards, *others})

    def sweep(self, keep: Iterable[str]) -> None:
        """Remove what an earlier build left, other than the files to keep."""
        ours = (name for name in self.storage.listing() if is_ours(name, self._splits))
        remove(self.storage, sorted({*ours} - {*keep}))

    def _size(self, name: str) -> int:
        return os.path.getsize(os.path.join(self.folder, name))

    def _upload(self, names: list[str], checksums: Mapping[str, str]) -> None:
        listed, lock = self.storage.listing(), threading.Lock()

        def upload(name: str) -> None:
            path = os.path.join(self.folder, name)
            checksum = checksums.get(name) or checksum_file(path)
            known = self._uploaded.get(name)
            if known is None or known != (checksum, listed.get(name)):
                stamp = send(self.storage, path, name)
                row = {"name": name, "checksum": checksum, "stamp": asdict(stamp)}
                with lock, open(self._journal, "a", encoding="utf-8") as journal:
                    self._uploaded[name] = (checksum, stamp)
                    journal.write(json.dumps(row) + "\n")
            with lock:
                self._sent(self._size(name))

        send_all(names, upload)

    def _retract(self) -> None:
        """Take back an older commit, its manifest first."""
        listed = self.storage.listing()
        old = [name for name in listed if is_ours(name, self._splits) and name.rpartition("/")[2] in _COMMITS]
        old = [name for name in old if self._uploaded.get(name, ("", None))[1] != listed[name]]
        remove(self.storage, sorted(old, key=lambda name: name != MANIFEST))

    def _check(self, names: list[str]) -> None:
        """See that what lies there is what was uploaded, and that nobody took over."""
        listed = self.storage.listing()
        other = next((name for name in names if listed.get(name) != self._uploaded[name][1]), None)
        if other is not None:
            raise BusyError(
                f"{self.storage.where(other)} was written or removed by somebody else meanwhile; nothing was "
                "committed: the same command sends it again"
            )
        if (holder := self._holder()).get("token") != self._token():
            raise BusyError(
                f"a build on {holder.get('host', 'another machine')} took {self.storage.url} over at "
                f"{holder.get('since', 'some time')}; nothing of this one was committed"
            )
