"""What to pack again and how, and whether the folders can be: asked before anything is read or written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.errors import InputError
from padless.packer.extra_columns import PICTURES, VERDICTS, WEIGHTS
from padless.runtime.format import ColumnInfo, Manifest, SplitsManifest, load_manifest, read_manifest
from padless.runtime.reader import column_to_numpy
from padless.runtime.storage import is_url

PLANNING = (
    *("max_length", "strategy", "eval_strategy", "overflow", "max_sequences_per_pack", "align"),
    *("packs_multiple", "plan_window", "labels", "shard_size", "compression", "seed"),
)
"""Options of a build that need no tokenizer."""
HAVE_DEFAULTS = {WEIGHTS.name: None, **dict.fromkeys(VERDICTS), PICTURES.name: None}.keys()
"""Columns for which a build knows what sequences without a value have, in a build's order."""
NOT_PLANNED = ("labels", "shard_size", "compression")
"""Those of them that say nothing to a plan over the sequences as they are."""


@dataclass(frozen=True, kw_only=True)
class RepackConfig:
    """What to pack again and how; an option that is None is as the (first) folder was built."""

    folders: tuple[str, ...]
    """Packed folders, or folders of splits with the same splits."""
    output: str
    exclude: str | None = None
    """A file of record numbers to leave out: one a line, or a Parquet file's column `record`."""
    max_length: int | tuple[int, ...] | None = None
    strategy: str | None = None
    eval_strategy: str | None = None
    overflow: str | None = None
    max_sequences_per_pack: int | None = None
    align: int | None = None
    packs_multiple: int | None = None
    plan_window: int | None = None
    labels: str | None = None
    shard_size: int | None = None
    compression: str | None = None
    seed: int | None = None
    workers: int | None = None
    force: bool = False
    progress: Callable[[str, Mapping[str, float]], None] | None = None


def splits_of(folder: str) -> dict[str, Manifest]:
    """split -> its manifest; "" for a folder of one.

    Raises InputError for a folder that cannot be repacked, and what opening one raises.
    """
    if is_url(folder):
        raise InputError(f"repack reads folders, and {folder} is a URL: copy it here")
    manifest = load_manifest(folder)
    if isinstance(manifest, SplitsManifest):
        found = {name: read_manifest(folder, name) for name in manifest.names}
    else:
        found = {"": manifest}
    for one in found.values():
        for column in one.extras:
            if column == PICTURES:
                continue
            if column.level == "pack" or any(word in column.type for word in ("bool", "string")):
                raise InputError(
                    f"{folder} has the column {column.name} ({column.type} at {column.level} level), which "
                    "repack cannot carry: build again"
                )
    return found


def extras_of(names: tuple[str, ...], folders: list[dict[str, Manifest]]) -> tuple[ColumnInfo, ...]:
    """The further columns of what folders become together.

    Raises InputError for one that some lack, unless a build would say what those have instead.
    """
    found: dict[str, ColumnInfo] = {}
    for splits in folders:
        for manifest in splits.values():
            for column in manifest.extras:
                if (known := found.setdefault(column.name, column)) != column:
                    raise InputError(
                        f"the column {column.name} is {column.type} in one of the folders and {known.type} "
                        "in another: build again"
                    )
    for folder, splits in zip(names, folders, strict=True):
        for manifest in splits.values():
            lacking = found.keys() - {column.name for column in manifest.extras} - HAVE_DEFAULTS
            if lacking:
                raise InputError(
                    f"{folder} has no column {min(lacking)}, which others have: repack folders with the same "
                    "columns"
                )
    order = [*HAVE_DEFAULTS]
    return tuple(sorted(found.values(), key=lambda c: order.index(c.name) if c.name in order else len(order)))


def check_alike(config: RepackConfig, folders: list[dict[str, Manifest]], firsts: list[Manifest]) -> None:
    """See that folders can be packed together. InputError where they cannot."""
    seen: dict[str, str] = {}
    known_rule: tuple[str, Any] | None = None
    for folder in config.folders:
        if (other := seen.setdefault(os.path.realpath(folder), folder)) is not folder:
            raise InputError(f"{folder} is given twice (as {other}): name each folder once")
    for folder, splits, first in zip(config.folders, folders, firsts, strict=True):
        if first.tokenizer_fingerprint != firsts[0].tokenizer_fingerprint:
            raise InputError(
                f"{folder} was tokenized with another tokenizer ({first.tokenizer_fingerprint}) than "
                f"{config.folders[0]} ({firsts[0].tokenizer_fingerprint}): build it with the same one"
            )
        if (rule := first.options.get("image_rule")) is not None:
            sighted, known = known_rule = known_rule or (folder, rule)
            if rule != known:  # folders without images have none
                raise InputError(
                    f"{folder} was built with the image rule {rule}, {sighted} with {known}: "
                    "build both with one preprocessor_config.json"
                )
        if list(splits) != list(folders[0]):
            names = (", ".join(part).strip() or "none" for part in (splits, folders[0]))
            raise InputError(
                f"{folder} has the splits {next(names)}, {config.folders[0]} has {next(names)}: repack them "
                "one by one"
            )
        for name in PLANNING:
            if getattr(config, name) is None and first.options.get(name) != firsts[0].options.get(name):
                raise InputError(
                    f"{folder} was built with {name} {first.options.get(name)!r}, {config.folders[0]} with "
                    f"{firsts[0].options.get(name)!r}: say which with --{name.replace('_', '-')}"
                )


def read_excluded(path: str) -> NDArray[np.int64]:
    """Record numbers, ascending; InputError where the file cannot be read as such."""
    found: NDArray[Any]
    try:
        if path.endswith(".parquet"):
            import pyarrow.parquet as pq

            column = pq.read_table(path, columns=["record"]).column("record")
            if column.null_count or not str(column.type).startswith(("int", "uint")):
                raise ValueError(f"record is {column.type} with {column.null_count:,} nulls")
            found = column_to_numpy(column)
        else:
            with open(path, encoding="utf-8-sig") as file:  # Windows marks the begin of a text
                found = np.array([_record(*line) for line in enumerate(file, 1) if line[1].strip()], np.int64)
    except (ValueError, KeyError, OverflowError, OSError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise InputError(
            f"--exclude {path}: {reason}; give record numbers (as in sequences.parquet), one a line, or a "
            "Parquet file with a column `record`"
        ) from None
    return np.unique(found.astype(np.int64))


def _record(number: int, line: str) -> int:
    """A record's number, of line `number`."""
    try:
        return int(line)
    except ValueError:
        raise ValueError(f"line {number:,} is {line.strip()[:40]!r}, no whole number") from None
