"""Whether a packed folder is what its manifest says: files, batches, places, labels, the account.

Three rounds, each only when the one before it passed: the files (present, sized, unchanged), the
packs (one pass over the shards, batch by batch, everything in numpy), the account (the sequence
table against the manifest). Memory is one record batch and some 60 bytes a sequence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from padless.packer.errors import InputError
from padless.packer.progress import Report, part_of
from padless.packer.verify_account import account_of, records_of, require
from padless.packer.verify_constraints import keeps_constraints
from padless.packer.verify_files import Files, files_of
from padless.packer.verify_images import images_of_placeholders
from padless.runtime.format import (
    IGNORE_INDEX,
    IMAGES,
    FormatError,
    Manifest,
    PadlessError,
    SplitInfo,
    SplitsManifest,
    max_lengths,
)
from padless.runtime.reader import Array, PackBatch, PackedReader
from padless.runtime.storage import is_url

_STRAY = re.compile(r"shard-.*\.arrow|sequences.*\.parquet")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at, and what was found."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """All checks of a folder; warnings are about things that harm nobody yet."""

    path: str
    checks: tuple[Check, ...]
    warnings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The report for `verify --json`."""
        checks = [vars(check) for check in self.checks]
        return {"path": self.path, "ok": self.ok, "checks": checks, "warnings": [*self.warnings]}


def verify(
    path: str | Path,
    *,
    split: str | None = None,
    plan: str | None = None,
    model: str | Path | None = None,
    trainer: str | None = None,
    progress: Report | None = None,
) -> VerifyReport:
    """Check a packed folder or its URL, or every split of a folder of splits unless one is named.

    With `model`, a config.json or its folder, also that such a model fits the data and keeps sequences apart;
    with `trainer` (trl, hf), that this trainer gives its model what was packed.

    Raises InputError where there is no such model or trainer, or no torch; NotPackedError, ManifestError,
    VersionError, SplitError or PlanError where there is nothing to check, RemoteError where a URL cannot be
    asked for its manifest; everything else that is wrong is a failed check.
    """
    if trainer is not None and is_url(path):
        raise InputError(f"--trainer {trainer} runs its own loader on a folder, and {path} is a URL: copy it")
    whole = files_of(path)
    manifest = whole.manifest()
    if isinstance(manifest, SplitsManifest) and split is None:
        return _verify_splits(
            whole,
            manifest,
            lambda one: verify(one, plan=plan, model=model, trainer=trainer, progress=progress),
        )
    files, packs = whole.of_split(split)
    folder = files.path
    if plan is not None:
        files.need_plan(plan)
    checks = [_check("files", lambda: _files(files, packs, progress))]
    listed = {file.file for file in packs.files}
    warnings = [
        f"{name} is not in the manifest, so nobody reads it; remove it or move it away"
        for name in files.names()
        if _STRAY.fullmatch(name) and name not in listed
    ]
    if checks[-1].ok:
        checks.append(_check("load_from_disk files", lambda: _datasets_files(files, packs)))
        reader = PackedReader(folder)
        table: dict[str, Array] = {}
        checks.append(_check("sequence table", lambda: records_of(reader, table)))
        if checks[-1].ok:
            checks.append(_check("packs", lambda: _packs(reader, table, progress)))
            checks.append(_check("account", lambda: account_of(packs, table)))
            if checks[-2].ok:
                stored = table["pack"]
                checks.append(_check("constraints", lambda: keeps_constraints(reader, table, stored)))
                if any(column.name == IMAGES for column in packs.extras):
                    checks.append(_check("images", lambda: images_of_placeholders(reader)))
            if plan is not None:
                checks.append(_check(f"plan {plan}", lambda: _plan(folder, plan, table)))
            if model is not None:
                checks.append(_check(f"model {model}", lambda: _model(folder, model)))
            if trainer is not None:
                checks.append(_check(f"trainer {trainer}", lambda: _trainer(folder, trainer, plan)))
    return VerifyReport(path=str(path), checks=tuple(checks), warnings=tuple(warnings))


def _verify_splits(
    files: Files, manifest: SplitsManifest, verify_split: Callable[[str], VerifyReport]
) -> VerifyReport:
    checks, warnings = [], []
    for info in manifest.splits:

        def same(info: SplitInfo = info) -> str:
            return f"{files.check_manifest(info)} is the one that was committed"

        checks.append(_check(f"{info.name}: manifest", same))
        if checks[-1].ok:
            report = verify_split(files.at(info.name).path)
            checks += [
                Check(name=f"{info.name}: {check.name}", ok=check.ok, detail=check.detail)
                for check in report.checks
            ]
            warnings += [f"{info.name}/{warning}" for warning in report.warnings]
    return VerifyReport(path=files.path, checks=tuple(checks), warnings=tuple(warnings))


def _check(name: str, run: Callable[[], str]) -> Check:
    try:
        return Check(name=name, ok=True, detail=run())
    except InputError:
        raise
    except PadlessError as problem:
        return Check(name=name, ok=False, detail=str(problem))


def _files(files: Files, manifest: Manifest, progress: Report | None) -> str:
    total = sum(file.bytes for file in manifest.files)
    hashed = part_of(progress, "bytes", total)
    for file in manifest.files:
        files.check(file)
        hashed(file.bytes)
    return f"{len(manifest.files)} files, {total:,} bytes, unchanged"


def _datasets_files(files: Files, manifest: Manifest) -> str:
    """What load_from_disk would read is what the manifest lists."""
    content = {}
    for name in ("state.json", "dataset_info.json"):
        try:
            content[name] = json.loads(files.read(name))
            require(isinstance(content[name], dict), f"{name} is no JSON object")
        except ValueError as problem:
            raise FormatError(f"{name} cannot be read: {problem}") from None
    state = content["state.json"]
    listed = [{"filename": shard.file} for shard in manifest.shards]
    require(state.get("_data_files") == listed, "state.json does not list the manifest's shards")
    fingerprint = manifest.plan_hash.rpartition(":")[2]
    require(state.get("_fingerprint") == fingerprint, "state.json's fingerprint is another plan's")
    features = content["dataset_info.json"].get("features")
    names = {column.name for column in manifest.columns}
    same = isinstance(features, dict) and set(features) == names
    require(same, "dataset_info.json does not have the manifest's columns")
    return "state.json and dataset_info.json agree with the manifest"


def _packs(reader: PackedReader, table: dict[str, Array], progress: Report | None) -> str:
    """Every sequence lies in the shards where the table says, and nothing else does."""
    looked_at = part_of(progress, "packs", len(reader))
    seen = np.zeros(len(table["pack"]), dtype=bool)
    batches = reader.batches()
    first_pack = 0
    for info in reader.manifest.shards:
        sequences = tokens = 0
        for _ in info.batches:
            batch = next(batches)
            _check_batch(batch, table, seen, first_pack, reader.manifest)
            sequences += len(batch.flat("seq_lengths"))
            tokens += len(batch.flat("input_ids"))
            first_pack += batch.num_packs
            looked_at(batch.num_packs)
        same = (info.sequences, info.tokens) == (sequences, tokens)
        require(same, f"{info.file} holds {sequences} sequences and {tokens} tokens")
    lost = np.flatnonzero(seen != (table["pack"] >= 0))
    require(len(lost) == 0, f"{len(lost)} sequences have a pack in the table and are in none")
    return f"{seen.sum():,} sequences in {first_pack:,} packs, each where the table says"


def _check_batch(
    batch: PackBatch, table: dict[str, Array], seen: Array, first_pack: int, manifest: Manifest
) -> None:
    counts, pack_tokens = batch.lengths("seq_lengths"), batch.lengths("input_ids")
    lengths = batch.flat("seq_lengths").astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    rows = np.repeat(np.arange(batch.num_packs), counts)
    pack_starts = np.cumsum(pack_tokens) - pack_tokens
    limits = max_lengths(manifest.buckets)[first_pack : first_pack + batch.num_packs]
    over = np.flatnonzero(pack_tokens > limits)
    if len(over):
        longest, limit = int(pack_tokens[over[0]]), int(limits[over[0]])
        raise FormatError(f"a pack holds {longest} tokens, max_length is {limit}")

    ids, labels = batch.flat("input_ids"), batch.flat_labels()
    trained = labels != IGNORE_INDEX
    begun = starts[trained[starts]]
    require(len(begun) == 0, f"{len(begun)} sequences train their first token")
    require(bool((labels[trained] == ids[trained]).all()), "a label is neither -100 nor its token")
    targets = np.add.reduceat(trained, starts, dtype=np.int64)
    firsts = np.cumsum(counts) - counts
    same = np.array_equal(np.add.reduceat(targets, firsts), batch.flat("num_targets"))
    require(same, f"num_targets is not the count of trained labels (packs from {first_pack})")

    sequence_ids = batch.flat("sequence_ids")
    inside = sequence_ids.min() >= 0 and sequence_ids.max() < len(seen)
    require(inside, f"a sequence id is outside the table's {len(seen)} lines")
    twice = seen[sequence_ids].any() or len(np.unique(sequence_ids)) < len(sequence_ids)
    require(not twice, f"a sequence is in two places (packs from {first_pack})")
    seen[sequence_ids] = True
    found = {
        "pack": rows + first_pack,
        "offset": starts - pack_starts[rows],
        "length": lengths,
        "num_targets": targets,
    }
    for name, values in found.items():
        wrong = np.flatnonzero(table[name][sequence_ids] != values)
        if len(wrong):
            place = wrong[0]
            raise FormatError(
                f"sequence {sequence_ids[place]} has {name} {values[place]} in the shards, the "
                f"table says {table[name][sequence_ids[place]]} ({len(wrong)} such here)"
            )


def _plan(folder: str, name: str, table: dict[str, Array]) -> str:
    """Every packed sequence is in the plan once, whole or in parts, and no pack holds more than it may."""
    reader = PackedReader(folder, plan=name)
    found = reader.plan
    assert found is not None
    whole = table["length"][found.sequences]
    lengths = whole if found.lengths is None else found.lengths
    starts = np.zeros(len(whole), np.int64) if found.starts is None else found.starts.astype(np.int64)
    in_order = np.lexsort((starts, found.sequences))
    sequences, begins = found.sequences[in_order], starts[in_order]
    ends = begins + lengths[in_order]
    first = np.diff(sequences, prepend=-1) != 0
    wrong = int((np.bincount(sequences[first], minlength=len(table["pack"])) != (table["pack"] >= 0)).sum())
    wrong += int((begins != np.where(first, 0, np.roll(ends, 1))).sum())
    wrong += int((ends != whole[in_order])[np.roll(first, -1)].sum())
    require(not wrong, f"{wrong:,} sequences are in the plan twice, or not at all, or were dropped")
    masked = table["num_targets"][found.sequences] != whole - 1
    torn = int((masked & (lengths != whole)).sum())
    require(not torn, f"{torn:,} fragments are of sequences with a loss mask")
    limit = found.facts["max_length"]
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens, limits = np.diff(ends[found.offsets]), max_lengths(found.buckets)
    for pack in np.flatnonzero(tokens > limits)[:1].tolist():
        raise FormatError(f"a pack holds {tokens[pack]:,} tokens, max_length is {limits[pack]:,}")
    pack = np.repeat(np.arange(len(found)), np.diff(found.offsets))
    cap = found.facts.get("max_sequences_per_pack")
    kept = keeps_constraints(PackedReader(folder), table, pack, cap=cap, lines=found.sequences)
    cut = f" ({int((lengths != whole).sum()):,} of them fragments)" if found.starts is not None else ""
    return f"{len(found.sequences):,} sequences{cut} in {len(found):,} packs of at most {limit:,}; {kept}"


def _model(folder: str, model: str | Path) -> str:
    """The model fits the data, and one of its kind keeps packed sequences apart."""
    if not Path(model).exists():
        raise InputError(f"{model} does not exist; --model is a model's config.json or the folder it lies in")
    try:
        from padless.runtime.model_verify import verify_model
    except ImportError as missing:
        raise InputError(
            f"--model runs a model and {missing.name} is missing: pip install 'padless[train]'"
        ) from None
    return verify_model(model, folder)


def _trainer(folder: str, trainer: str, plan: str | None) -> str:
    """The trainer's own loader and loss, with what is packed."""
    try:
        from padless.runtime.trainers.proof import TRAINERS, prove

        if trainer not in TRAINERS:
            raise InputError(f"--trainer {trainer!r} is none that can be run here: {', '.join(TRAINERS)}")
        if IMAGES in {column.name for column in PackedReader(folder).manifest.extras}:
            raise InputError(
                f"{folder} has images, and --trainer runs a tiny model that sees none: leave it out (images "
                "are checked without it), and try a loop as in scripts/examples/vision_language.py"
            )
        return prove(folder, trainer, plan=plan)
    except ImportError as missing:
        raise InputError(
            f"--trainer {trainer} runs that trainer, and {missing.name} is missing: pip install torch "
            "transformers datasets accelerate trl"
        ) from None
