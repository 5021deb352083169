"""An export behind a URL: made in a folder on this machine, uploaded, complete when its record is there.

    bucket/out/export.unfinished.json    the names that will be there, while an upload is under way
    bucket/out/data-00000.parquet ...
    bucket/out/export.json               last; until then there is no export

A run that was stopped leaves objects that the first of these names, so the next one may replace them; what
nothing names is somebody else's and never touched. Unlike a build's, an upload does not go on where it was:
exports are made in a small part of the time that a build takes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from padless.packer.errors import BusyError, InputError
from padless.packer.sources.resolve import EXPORT_RECORD
from padless.packer.uploads import remove, send, send_all
from padless.runtime.format import MissingFileError, checksum_bytes
from padless.runtime.storage import Storage, cache_folder

UNFINISHED = "export.unfinished.json"


class ExportUpload:
    """One export's hold of a URL."""

    def __init__(self, url: str, asked: Mapping[str, Any], *, force: bool) -> None:
        """See what is there; `asked` is what the record of this very export says.

        Raises InputError for what may not be replaced, and RemoteError.
        """
        if url.startswith(("hf://", "http://", "https://")):
            raise InputError(
                f"--output {url}: exports go into a folder or a bucket (s3://, gs://), not there"
            )
        self.storage = Storage(url)
        listed = self.storage.listing()
        record, begun = (self._read(name) if name in listed else {} for name in (EXPORT_RECORD, UNFINISHED))
        is_ours = record.get("format") == asked["format"]
        files = {file["file"]: file["bytes"] for file in record["files"]} if is_ours else {}
        self.there: dict[str, Any] | None = None
        """The record of this very export, where it lies there already."""
        if is_ours and not force:
            missing = next(
                (n for n, size in files.items() if n not in listed or listed[n].size != size), None
            )
            if any(record.get(key) != value for key, value in asked.items()):
                raise InputError(
                    f"{url} is an export of other data, or in another form ({record.get('target')}): give "
                    "another address, or --force to replace it"
                )
            if missing is not None:
                raise InputError(f"{url}/{missing} is not as it was written: --force writes the export anew")
            self.there = record
        self._ours = {*files, "README.md", EXPORT_RECORD} if is_ours else set()
        self._ours |= (
            {UNFINISHED, *begun.get("files", ())} if begun.get("format") == asked["format"] else set()
        )
        stranger = next((name for name in sorted(listed) if name not in self._ours), None)
        if stranger is not None and self.there is None:
            raise InputError(
                f"output {url} holds {stranger!r}, which no export of padless wrote: give another address, "
                "or move it away (--force does not touch it either)"
            )

    @property
    def place(self) -> str:
        """Where on this machine the folder is to be made."""
        return os.path.join(cache_folder(), "exports", checksum_bytes(self.storage.url.encode())[5:21])

    def _read(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads(self.storage.read(name))
        except (ValueError, MissingFileError):
            return {}
        return found if isinstance(found, dict) else {}

    def publish(self, folder: str, record: Mapping[str, Any]) -> None:
        """Upload what lies in the folder and commit it by its record; raises BusyError and RemoteError."""
        names = [file["file"] for file in record["files"]] + ["README.md"]
        begun = {"format": record["format"], "files": sorted({*names, *self._ours})}
        self._put(UNFINISHED, json.dumps(begun).encode())
        remove(self.storage, [EXPORT_RECORD])

        def upload(name: str) -> None:
            send(self.storage, os.path.join(folder, name), name)

        send_all(names, upload)
        if self._read(UNFINISHED) != begun:
            raise BusyError(
                f"another export writes to {self.storage.url}: wait for it, or give another address"
            )
        with open(os.path.join(folder, EXPORT_RECORD), "rb") as file:
            self._put(EXPORT_RECORD, file.read())
        remove(self.storage, [*sorted(self._ours - {*names, EXPORT_RECORD, UNFINISHED}), UNFINISHED])

    def _put(self, name: str, data: bytes) -> None:
        self.storage.ask(name, lambda system, path: system.pipe_file(path, data), doing="written")
