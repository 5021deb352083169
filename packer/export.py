"""`pack-dataset export`: a packed folder in another trainer's form, streamed, complete or not there at all.

What a trainer gets is made from the packs alone, a record batch at a time. The files go to a hidden
folder beside the output, which takes the output's name when everything is on the disk; `export.json`
lists the files with their checksums and says which data they were made from, so that the same command
finds its work done and another one does not overwrite it unasked.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from padless.packer.durable import sync_folder
from padless.packer.errors import InputError
from padless.packer.exports import EXPORTS, target_of
from padless.packer.exports.job import Job, remove_tree
from padless.packer.identity import version_of
from padless.packer.token_store import disk_full
from padless.runtime.format import checksum_file
from padless.runtime.reader import PackedReader

RECORD = "export.json"
_FORMAT = "padless-export"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to export, and as what."""

    folder: str
    to: str
    """A key of EXPORTS."""
    output: str
    split: str | None = None
    plan: str | None = None
    shard_size: int = 512 * 2**20
    """Bytes of a file, about."""
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What was written, or was there already."""

    output: str
    target: str
    packs: int
    sequences: int
    tokens: int
    bytes: int
    files: int
    notes: tuple[str, ...]
    seconds: float
    was_there: bool = False


def export(config: ExportConfig, *, progress: Callable[[int, int], None] | None = None) -> ExportResult:
    """Write the folder; `progress` is told how many packs of how many are done.

    Raises InputError for wrong use and for data that the form cannot tell, DiskFullError where there is
    no room, and what opening a packed folder raises.
    """
    begin = time.perf_counter()
    if config.to not in EXPORTS:
        raise InputError(f"--to {config.to!r} is no form that padless writes; choose {', '.join(EXPORTS)}")
    if config.shard_size < 1:
        raise InputError(f"--shard-size {config.shard_size} is no size; give 1 or more bytes")
    reader = PackedReader(config.folder, plan=config.plan, split=config.split)
    # The columns are part of what is exported, and the plan's hash is of lengths and order alone.
    source = {
        "plan": config.plan,
        "plan_hash": reader.manifest.plan_hash if reader.plan is None else reader.plan.facts["plan_hash"],
        "shards": [shard.checksum for shard in reader.manifest.shards],
        "shard_size": config.shard_size,
    }
    asked = {"format": _FORMAT, "version": VERSION, "target": config.to, "source": source}
    output = os.path.normpath(config.output)
    there = _what_is_there(output, config)
    if there is not None and all(there.get(key) == value for key, value in asked.items()):
        return _result(output, there, time.perf_counter() - begin, was_there=True)
    if there is not None and not config.force:
        raise InputError(
            f"{output} is an export of other data, or in another form ({there.get('target')}): give another "
            "folder, or --force to replace it"
        )
    total, done = len(reader), 0

    def went_by(packs: int) -> None:
        nonlocal done
        done += packs
        if progress is not None:
            progress(done, total)

    with _beside(output) as folder:
        job = Job(reader=reader, folder=folder, shard_bytes=config.shard_size, progress=went_by)
        try:
            target_of(config.to).write(job)
            record = {
                **asked,
                "counts": job.counts,
                "files": [{"file": f.file, "bytes": f.bytes, "checksum": f.checksum} for f in job.files],
                "notes": job.notes,
                "padless_version": version_of("padless"),
            }
            _write_text(folder, "README.md", _readme(config, record))
            _write_text(folder, RECORD, json.dumps(record, indent=2, sort_keys=True) + "\n")
        except OSError as error:  # from a library's own writer
            raise disk_full(error, folder, 0) from error
        sync_folder(folder)
        _put_in_place(folder, output)
    return _result(output, record, time.perf_counter() - begin, was_there=False)


def check_export(folder: str) -> list[str]:
    """What is wrong with an export's files, in words; nothing where every checksum holds."""
    record = _what_is_there(folder, None)
    if record is None:
        raise InputError(f"{folder} is no export of padless: there is no {RECORD}")
    problems = []
    for file in record["files"]:
        path = os.path.join(folder, file["file"])
        if not os.path.exists(path):
            problems.append(f"{path} is missing")
        elif os.path.getsize(path) != file["bytes"] or checksum_file(path) != file["checksum"]:
            problems.append(f"{path} is not as it was written")
    return problems


def _result(output: str, record: dict[str, Any], seconds: float, *, was_there: bool) -> ExportResult:
    return ExportResult(
        output=output,
        target=record["target"],
        **record["counts"],
        bytes=sum(file["bytes"] for file in record["files"]),
        files=len(record["files"]),
        notes=tuple(record["notes"]),
        seconds=round(seconds, 3),
        was_there=was_there,
    )


def _what_is_there(output: str, config: ExportConfig | None) -> dict[str, Any] | None:
    """The record of an export that lies there; None for nothing. InputError for anything else."""
    if not os.path.lexists(output):
        return None
    if not os.path.isdir(output):
        raise InputError(f"output {output} is a file; give a folder (a new one, best)")
    try:
        with open(os.path.join(output, RECORD), "rb") as file:
            record = json.load(file)
    except (OSError, ValueError):
        record = None
    if isinstance(record, dict) and record.get("format") == _FORMAT:
        return record
    if os.listdir(output) or config is None:
        raise InputError(
            f"output {output} holds what no export of padless wrote: give another folder, or move it away "
            "(--force does not touch it either)"
        )
    return None


@contextmanager
def _beside(output: str) -> Iterator[str]:
    """An empty folder beside the output, this process's alone; gone at the end unless it was renamed."""
    parent, name = os.path.split(os.path.abspath(output))
    os.makedirs(parent, exist_ok=True)
    folder = os.path.join(parent, f".{name}.export")
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"another export writes to {output}; wait for it, or give another folder"
            ) from None
        for left in os.listdir(folder):  # by a run that was killed
            os.remove(os.path.join(folder, left))
        try:
            yield folder
        finally:
            if os.path.exists(folder):
                remove_tree(folder)
    finally:
        os.close(descriptor)


def _put_in_place(folder: str, output: str) -> None:
    """Rename; what lay there before goes only when the new one has its name."""
    old = f"{folder}.old"
    if os.path.isdir(old):
        remove_tree(old)
    if os.path.isdir(output):
        os.rename(output, old)
    os.rename(folder, output)
    sync_folder(os.path.dirname(os.path.abspath(output)))
    if os.path.isdir(old):
        remove_tree(old)


def _write_text(folder: str, name: str, content: str) -> None:
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _readme(config: ExportConfig, record: dict[str, Any]) -> str:
    target, counts = target_of(config.to), record["counts"]
    notes = "".join(f"- {note}\n" for note in record["notes"])
    return (
        f"# Packed data for {target.reader}\n\n"
        f"{counts['packs']:,} packs, {counts['sequences']:,} sequences, {counts['tokens']:,} tokens, written "
        f"by `pack-dataset export --to {config.to}`. {target.rows[0].upper()}{target.rows[1:]}.\n\n"
        + target.how.replace("{output}", config.output)
        + ("\n\n" + notes if notes else "\n\n")
        + f"\n`{RECORD}` lists the files with their checksums.\n"
    )
