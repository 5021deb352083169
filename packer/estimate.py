"""What packing would give, before anything is packed: from records drawn at random.

The records (`sample`) are tokenized as a build would (the same stages, in a folder that is gone afterwards),
without a limit of length; what several lengths and strategies would make of them follows from their lengths.
Each source counts by the records it has; the errors are half of a 95 % interval (`resample`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from padless.packer.alternatives import choices_around, try_plans
from padless.packer.config import INT32_MAX, PackConfig
from padless.packer.errors import InputError
from padless.packer.lengths import Lengths
from padless.packer.lines import DROPPED, STATUSES
from padless.packer.pipeline import pack_dataset
from padless.packer.report import BATCH_SIZES, length_facts
from padless.packer.resample import RESAMPLES, RESAMPLES_OF_PLANS, Part, Population, error_of
from padless.packer.sample import Sample, draw
from padless.packer.sources import BadRecord, Choice, resolve_sources
from padless.packer.sources.splits import are_several
from padless.runtime.format import PadlessError
from padless.runtime.reader import Array, PackedReader

RECORDS = 2000
_FOR_PLANS = 10_000
"""Sequences to plan, at least."""
_AS_IT_IS: dict[str, Any] = {
    # The sample is what these have chosen.
    **dict.fromkeys(("split", "subset", "revision", "limit", "mix_target"), None),
    **{"weights": {}, "max_records": {}, "max_tokens": {}, "max_repeats": 1, "text_by": "line"},
    **{"eval_fraction": 0.0, "eval_sources": ()},
    # Planning comes later.
    **{"max_length": INT32_MAX, "align": 1, "packs_multiple": 1, "plan_window": None},
    **{"homogeneous": False, "strategy": "none", "overflow": "drop"},
    **{"on_bad_record": "drop", "max_drop_share": 1.0, "force": False},
    **{"engine": "local", "ray_address": None},
}
"""Options of a build of the sample that drops nothing but what no build could keep."""


def estimate(config: PackConfig) -> dict[str, Any]:
    """The estimate for `config`, which names the records to draw of a source (`limit`) and the pack length.

    Shares are fractions, `error` beside each is half of its 95 % interval and 0 where all records were taken.
    Raises what a build raises for its sources and tokenizer.
    """
    wanted = max(2, config.limit or RECORDS)  # of one nobody can say how much it may be off
    if are_several(config.split):
        raise InputError(f"an estimate is of one split, and --split is {config.split}: name one")
    generator = np.random.Generator(np.random.PCG64(config.seed))
    choice = Choice(split=config.split, subset=config.subset, revision=config.revision)
    files = resolve_sources(config.sources, text_by=config.text_by, choice=choice)
    samples = [
        draw(
            [file for file in files if file.argument == n],
            wanted,
            generator,
            text_by=config.text_by,
            progress=config.progress,
        )
        for n in range(len(config.sources))
    ]
    parts = _tokenized(config, samples)
    now = Population.of([(part.lengths, part.targets, part.weight) for part in parts], generator)
    if not len(now.lengths):
        raise InputError("no record of the sample gives a sequence; build a few of them to see why (--limit)")
    is_sample = any(sample.how != "all" for sample in samples)
    again = [
        Population.of([part.again(generator) for part in parts], generator)
        for _ in range(RESAMPLES if is_sample else 0)
    ]
    again = [one if len(one.lengths) else now for one in again]

    def witherror_of(of: Callable[[Population], float]) -> dict[str, float]:
        return {"value": of(now), "error": error_of([of(one) for one in again])}

    return {
        "records": sum(len(sample.rows) for sample in samples),
        "sequences": sum(len(part.lengths) for part in parts),
        "tokens": sum(int(part.lengths.sum()) for part in parts),
        "is_sample": is_sample,
        "max_length": config.longest,
        "sources": [
            {
                "source": str(spec),
                "how": part.sample.how,
                "is_sample": part.sample.how != "all",
                "records": len(part.sample.rows),
                "of_records": round(part.sample.records),
                "dropped": part.dropped,
                "sequences": len(part.lengths),
                "tokens": int(part.lengths.sum()),
            }
            for spec, part in zip(config.sources, parts, strict=True)
        ],
        "of_tokens": witherror_of(lambda some: some.tokens),
        "tokens_per_sequence": witherror_of(lambda some: float(some.lengths.mean())),
        "trained_share": now.trained / max(1.0, now.tokens),
        "sequence_lengths": length_facts(Lengths.of(now.lengths))
        | {"max": max(int(part.lengths.max(initial=0)) for part in parts)},
        "padding": {str(size): witherror_of(_padding_at(size)) for size in BATCH_SIZES},
        "plans": _plans(config, now, again[:RESAMPLES_OF_PLANS]),
    }


def _tokenized(config: PackConfig, samples: Sequence[Sample]) -> list[Part]:
    """The samples as one build tokenizes them, in their order."""
    with tempfile.TemporaryDirectory(prefix="padless-estimate-") as scratch:
        files: list[Path] = []
        roots: list[str] = []
        of: list[tuple[int, NDArray[np.int64]]] = []
        """For each file the sample, and which of its rows the file has."""
        for number, (spec, sample) in enumerate(zip(config.sources, samples, strict=True)):
            name = PurePath(spec).name if isinstance(spec, str) else f"object {number}"
            name = "".join(char if char.isprintable() and char not in "/*?[" else "_" for char in name)
            lines = [_line(row) for row in sample.rows]
            for root, places in _by_folder(config, sample, lines):
                files.append(Path(scratch) / str(len(files)) / f"{name[:100]}.sample.jsonl")
                files[-1].parent.mkdir()
                files[-1].write_bytes(b"".join(lines[place] for place in places))
                roots.append(root)
                of.append((number, np.array(places, dtype=np.int64)))
        output = str(Path(scratch) / "sample")
        changed = _AS_IT_IS | {"sources": tuple(map(str, files)), "output": output}
        if config.image_root is None:
            changed["image_root"] = tuple(roots)
        try:
            pack_dataset(replace(config, **changed))
        except PadlessError as error:  # which names files that are gone when it is read
            words = str(error)
            for file, (number, _) in zip(files, of, strict=True):
                named = f"the sample of {config.sources[number]}"
                for name in (str(file), f"{file.parent.name}/{file.name}", file.name):
                    words = words.replace(name, named)
            error.args = (words,)
            raise
        reader = PackedReader(Path(scratch) / "sample")
        names = ("source", "row", "part", "status", "length", "num_targets")
        table = {name: np.asarray(column) for name, column in reader.sequence_columns(*names).items()}
        found: list[list[dict[str, Array]]] = [[] for _ in samples]
        for n, (number, rows) in enumerate(of):
            mine = {name: column[table["source"] == n] for name, column in table.items()}
            found[number].append(mine | {"row": rows[mine["row"]]})
        return [
            _part(sample, {name: np.concatenate([one[name] for one in mine]) for name in names})
            for sample, mine in zip(samples, found, strict=True)
        ]


def _by_folder(config: PackConfig, sample: Sample, lines: list[bytes]) -> list[tuple[str, list[int]]]:
    """A sample's rows by the folders of their files, where paths of images begin; all in one without such."""
    named = config.columns.get("images", "image").encode()
    if config.image_root is not None or not any(named in line or b"image" in line for line in lines):
        return [("", list(range(len(lines))))]
    found: dict[str, list[int]] = {}
    for place, folder in enumerate(sample.folder_of):
        found.setdefault(folder, []).append(place)
    return list(found.items())


def _part(sample: Sample, lines: dict[str, Array]) -> Part:
    kept = lines["length"] > 0
    rows = lines["row"][kept]
    by_block = not sample.is_stratified
    return Part(
        sample=sample,
        lengths=lines["length"][kept].astype(np.int64),
        targets=lines["num_targets"][kept].astype(np.int64),
        unit=np.array(sample.block_of, np.int64)[rows] if by_block else rows,
        units=sample.blocks if by_block else len(sample.rows),
        dropped=int(((lines["status"] == STATUSES[DROPPED]) & (lines["part"] == 0)).sum()),
    )


def _line(row: Any) -> bytes:
    """A record as a JSON line; one that is malformed stays one."""
    if isinstance(row, BadRecord):
        return b"malformed\n"
    try:
        return orjson.dumps(row, default=str, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(row, default=str).encode() + b"\n"


def _plans(config: PackConfig, now: Population, again: list[Population]) -> list[dict[str, Any]]:
    """Several strategies and lengths, each with its errors."""
    choices = choices_around(config.strategy, config.longest, config.align)
    found = []
    for choice in choices:
        populations = (now, *again)
        rows = [row for one in populations if (row := _plan(config, one, choice, is_sample=bool(again)))]
        if len(rows) <= len(again):  # hardly a sequence is so short
            continue
        row, *others = rows
        found.append(
            {
                "strategy": row["strategy"],
                "max_length": row["max_length"],
                "utilization": row["utilization"],
                "utilization_error": error_of([other["utilization"] for other in others]),
                "sequences_per_pack": row["sequences_per_pack"],
                "sequences_per_pack_error": error_of([other["sequences_per_pack"] for other in others]),
                "too_long": row["too_long"],
                "too_long_error": error_of([other["too_long"] for other in others]),
                "packs": max(1, round(row["packs"])),
                "packs_error": error_of([other["packs"] for other in others]),
            }
        )
    return found


def _plan(
    config: PackConfig, some: Population, choice: tuple[str, int], *, is_sample: bool
) -> dict[str, Any] | None:
    """One strategy and length; packs are those of all sources."""
    lengths = some.lengths
    if is_sample:  # of what stands for more, a half-filled pack is no matter
        lengths = np.tile(lengths, -(-_FOR_PLANS // len(lengths)))
    cap, align = config.max_sequences_per_pack, config.align
    rows = try_plans(lengths, [choice], max_sequences_per_pack=cap, align=align)
    if not rows:
        return None
    (row,) = rows
    stands_for = some.tokens / lengths.sum()
    return row | {"packs": row["packs"] * stands_for, "too_long": row["too_long"] / len(lengths)}


def _padding_at(size: int) -> Callable[[Population], float]:
    return lambda some: Lengths.of(some.lengths).padding(size)
