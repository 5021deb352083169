"""`pack-dataset export`: a packed folder in another trainer's form, streamed, complete or not there at all.

What a trainer gets is made from the packs alone, a record batch at a time. The files go to a hidden
folder beside the output, which takes the output's name when everything is on the disk; `export.json`
lists the files with their checksums and says which data they were made from, so that the same command
finds its work done and another one does not overwrite it unasked.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from padless.packer.durable import sync_folder
from padless.packer.errors import DiskFullError, InputError, disk_full, disk_full_message
from padless.packer.export_place import beside, place_of, put_in_place
from padless.packer.export_upload import ExportUpload
from padless.packer.exports import EXPORTS, target_of
from padless.packer.exports.job import Job
from padless.packer.identity import version_of
from padless.packer.progress import Report, part_of
from padless.packer.sources.resolve import EXPORT_RECORD
from padless.runtime.format import checksum_file
from padless.runtime.reader import PackedReader
from padless.runtime.storage import is_url

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


def export(config: ExportConfig, *, progress: Report | None = None) -> ExportResult:
    """Write the folder; `progress` is told of the packs that are done.

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
    make = partial(_make, config, asked, reader, progress)
    if is_url(config.output):
        upload = ExportUpload(config.output.rstrip("/"), asked, force=config.force)
        if upload.there is not None:
            return _result(config.output, upload.there, time.perf_counter() - begin, was_there=True)
        with beside(upload.place, config.output) as folder:
            record = make(folder)
            upload.publish(folder, record)
        return _result(config.output, record, time.perf_counter() - begin, was_there=False)
    output = os.path.normpath(config.output)
    if (there := _finished(output, config, asked)) is not None:
        return _result(output, there, time.perf_counter() - begin, was_there=True)
    place = place_of(output)
    with beside(place, output) as folder:
        # Once more, now that no other export can be about to put its folder in place.
        if (there := _finished(output, config, asked)) is not None:
            return _result(output, there, time.perf_counter() - begin, was_there=True)
        record = make(folder)
        sync_folder(folder)
        put_in_place(folder, place)
    return _result(output, record, time.perf_counter() - begin, was_there=False)


def _make(
    config: ExportConfig, asked: dict[str, Any], reader: PackedReader, progress: Report | None, folder: str
) -> dict[str, Any]:
    """Write the export into an empty folder; its record."""
    target = target_of(config.to)
    job = Job(
        reader=reader,
        folder=folder,
        shard_bytes=config.shard_size,
        further_columns=target.further_columns,
        progress=part_of(progress, "packs", len(reader)),
    )
    try:
        target.write(job)
        if (note := job.left_behind()) is not None:
            job.notes.append(note)
        record = {
            **asked,
            "counts": job.counts,
            "files": [{"file": f.file, "bytes": f.bytes, "checksum": f.checksum} for f in job.files],
            "notes": job.notes,
            "padless_version": version_of("padless"),
        }
        _write_text(folder, "README.md", _readme(config, record))
        _write_text(folder, EXPORT_RECORD, json.dumps(record, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        full = disk_full(error, folder, 0)  # where it came from a library's own writer
        if isinstance(full, DiskFullError):
            told = disk_full_message(full.path or folder, full.missing, then="it begins anew")
            raise DiskFullError(told) from error
        raise
    return record


def check_export(folder: str) -> list[str]:
    """What is wrong with an export's files, in words; nothing where every checksum holds."""
    record = _what_is_there(folder, None)
    if record is None:
        raise InputError(f"{folder} is no export of padless: there is no {EXPORT_RECORD}")
    return list(_problems(folder, record, checksums=True))


def _problems(folder: str, record: dict[str, Any], *, checksums: bool) -> Iterator[str]:
    """What is wrong with the files that the record lists."""
    for file in record["files"]:
        path = os.path.join(folder, file["file"])
        if not os.path.exists(path):
            yield f"{path} is missing"
        elif os.path.getsize(path) != file["bytes"] or (
            checksums and checksum_file(path) != file["checksum"]
        ):
            yield f"{path} is not as it was written"


def _finished(output: str, config: ExportConfig, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The record of this very export, where it lies there whole; None where there is something to do.

    Raises InputError for what may not be replaced.
    """
    there = _what_is_there(output, config)
    if there is None:
        return None
    same = all(there.get(key) == value for key, value in asked.items())
    # With force a same size is not believed: what `check_export` finds must have a way out.
    problem = next(_problems(output, there, checksums=config.force), None) if same else None
    if same and problem is None:
        return there
    if problem is not None and not config.force:
        raise InputError(f"{problem}: --force writes the export anew")
    if not config.force:
        raise InputError(
            f"{output} is an export of other data, or in another form ({there.get('target')}): give another "
            "folder, or --force to replace it"
        )
    listed = {file["file"] for file in there["files"]} | {"README.md", EXPORT_RECORD}
    stranger = next((name for name in sorted(os.listdir(output)) if name not in listed), None)
    if stranger is not None:
        raise InputError(
            f"{output} holds {stranger!r}, which no export of padless wrote: give another folder, or move it "
            "away (--force does not touch it either)"
        )
    return None


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
    if not os.path.exists(output):
        return None
    if not os.path.isdir(output):
        raise InputError(f"output {output} is a file; give a folder (a new one, best)")
    try:
        with open(os.path.join(output, EXPORT_RECORD), "rb") as file:
            record = json.load(file)
    except (OSError, ValueError):
        record = None
    if isinstance(record, dict) and record.get("format") == _FORMAT and "files" in record:
        return record
    if os.listdir(output) or config is None:
        raise InputError(
            f"output {output} holds what no export of padless wrote: give another folder, or move it away "
            "(--force does not touch it either)"
        )
    return None


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
        + target.how.replace("{output}", json.dumps(config.output, ensure_ascii=False)[1:-1])
        + ("\n\n" + notes if notes else "\n\n")
        + f"\n`{EXPORT_RECORD}` lists the files with their checksums.\n"
    )
