"""What packing would give, before anything is packed: from records drawn at random.

The records (`sample`) are tokenized as a build would (the same stages, in a folder that is gone afterwards),
without a limit of length; what several lengths and strategies would make of them follows from their lengths.
Each source counts by the records it has. The errors are half of a 95 % interval by resampling: of the blocks
that were drawn where they are some of many, one fewer than there are (Rao and Wu 1988), otherwise of the
records.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import orjson

from padless.packer.alternatives import choices_around, try_plans
from padless.packer.config import INT32_MAX, PackConfig
from padless.packer.errors import InputError
from padless.packer.lengths import Lengths
from padless.packer.lines import DROPPED, STATUSES
from padless.packer.pipeline import pack_dataset
from padless.packer.report import BATCH_SIZES, length_facts
from padless.packer.sample import Sample, draw
from padless.packer.sources import BadRecord, Choice, resolve_sources
from padless.packer.sources.splits import are_several
from padless.runtime.reader import Array, PackedReader

RECORDS = 2000
RESAMPLES, RESAMPLES_OF_PLANS = 24, 12
_STUDENT = {24: 2.07, 12: 2.2}
"""Half of a 95 % interval in standard deviations that were estimated from so many values."""
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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """A source's sample as it was tokenized."""

    sample: Sample
    lengths: Array
    """[sequences] in the order of the records."""
    targets: Array
    """[sequences] trained tokens of each."""
    unit: Array
    """[sequences] what is resampled together: 0, 1, ... of `units`."""
    units: int
    dropped: int

    @property
    def weight(self) -> float:
        """How many records of the source each stands for."""
        return self.sample.records / max(1, len(self.sample.rows))

    def again(self, generator: np.random.Generator) -> tuple[Array, Array, float]:
        """Lengths, targets and weight in a sample that might as well have been drawn."""
        if self.sample.how == "all":
            return self.lengths, self.targets, self.weight
        drawn = max(1, self.units - 1)
        times = np.bincount(generator.integers(self.units, size=drawn), minlength=self.units)[self.unit]
        return (
            np.repeat(self.lengths, times),
            np.repeat(self.targets, times),
            self.weight * self.units / drawn,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Population:
    """Sequences of all sources, each source with the share that it has."""

    lengths: Array
    """[N]; each stands for `tokens` / their sum."""
    tokens: float
    """In all sources."""
    trained: float

    @classmethod
    def of(cls, parts: Sequence[tuple[Array, Array, float]], generator: np.random.Generator) -> _Population:
        weights = [weight for *_, weight in parts]
        lengths = np.concatenate([lengths for lengths, *_ in parts])
        if max(weights) > min(weights) and len(lengths):
            # As many from each as it has, evenly over its sorted lengths: one number less of chance.
            each = np.repeat(weights, [len(part[0]) for part in parts])
            order = np.argsort(lengths, kind="stable")
            places = np.cumsum(each[order])
            count = max(_FOR_PLANS, len(lengths))
            at = np.searchsorted(places, (np.arange(count) + 0.5) / count * places[-1])
            lengths = generator.permutation(lengths[order][at])
        return cls(
            lengths=lengths,
            tokens=float(sum(weight * lengths.sum() for lengths, _, weight in parts)),
            trained=float(sum(weight * targets.sum() for _, targets, weight in parts)),
        )


def estimate(config: PackConfig) -> dict[str, Any]:
    """The estimate for `config`, which names the records to draw of a source (`limit`) and the pack length.

    Shares are fractions, `error` beside each is half of its 95 % interval and 0 where all records were taken.
    Raises what a build raises for its sources and tokenizer.
    """
    wanted = config.limit or RECORDS
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
    now = _Population.of([(part.lengths, part.targets, part.weight) for part in parts], generator)
    if not len(now.lengths):
        raise InputError("no record of the sample gives a sequence; build a few of them to see why (--limit)")
    is_sample = any(sample.how != "all" for sample in samples)
    again = [
        _Population.of([part.again(generator) for part in parts], generator)
        for _ in range(RESAMPLES if is_sample else 0)
    ]
    again = [one if len(one.lengths) else now for one in again]

    def with_error(of: Callable[[_Population], float]) -> dict[str, float]:
        return {"value": of(now), "error": _error([of(one) for one in again])}

    return {
        "records": sum(len(sample.rows) for sample in samples),
        "sequences": sum(len(part.lengths) for part in parts),
        "tokens": sum(int(part.lengths.sum()) for part in parts),
        "is_sample": is_sample,
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
        "of_tokens": with_error(lambda some: some.tokens),
        "tokens_per_sequence": with_error(lambda some: float(some.lengths.mean())),
        "trained_share": now.trained / max(1.0, now.tokens),
        "sequence_lengths": length_facts(Lengths.of(now.lengths)),
        "padding": {str(size): with_error(_padding_at(size)) for size in BATCH_SIZES},
        "plans": _plans(config, now, again[:RESAMPLES_OF_PLANS]),
    }


def _tokenized(config: PackConfig, samples: Sequence[Sample]) -> list[_Part]:
    """The samples as one build tokenizes them, in their order."""
    with tempfile.TemporaryDirectory(prefix="padless-estimate-") as scratch:
        files = []
        for number, (spec, sample) in enumerate(zip(config.sources, samples, strict=True)):
            name = PurePath(spec).name if isinstance(spec, str) else f"object {number}"
            name = "".join(char if char.isprintable() and char not in "/*?[" else "_" for char in name)
            files.append(Path(scratch) / str(number) / f"{name[:100]}.sample.jsonl")
            files[-1].parent.mkdir()
            files[-1].write_bytes(b"".join(_line(row) for row in sample.rows))
        output = str(Path(scratch) / "sample")
        pack_dataset(replace(config, sources=tuple(map(str, files)), output=output, **_AS_IT_IS))
        reader = PackedReader(Path(scratch) / "sample")
        names = ("source", "row", "part", "status", "length", "num_targets")
        table = {name: np.asarray(column) for name, column in reader.sequence_columns(*names).items()}
        return [
            _part(sample, {name: column[table["source"] == n] for name, column in table.items()})
            for n, sample in enumerate(samples)
        ]


def _part(sample: Sample, lines: dict[str, Array]) -> _Part:
    kept = lines["length"] > 0
    rows = lines["row"][kept]
    by_block = not sample.is_stratified
    return _Part(
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


def _plans(config: PackConfig, now: _Population, again: list[_Population]) -> list[dict[str, Any]]:
    """Several strategies and lengths, each with its errors."""
    choices = choices_around(config.strategy, config.max_length, config.align)
    found = []
    for choice in choices:
        rows = [row for some in (now, *again) if (row := _plan(config, some, choice))]
        if len(rows) <= len(again):  # hardly a sequence is so short
            continue
        row, *others = rows
        found.append(
            {
                "strategy": row["strategy"],
                "max_length": row["max_length"],
                "utilization": row["utilization"],
                "utilization_error": _error([other["utilization"] for other in others]),
                "sequences_per_pack": row["sequences_per_pack"],
                "sequences_per_pack_error": _error([other["sequences_per_pack"] for other in others]),
                "too_long": row["too_long"],
                "too_long_error": _error([other["too_long"] for other in others]),
                "packs": round(row["packs"]),
                "packs_error": _error([other["packs"] for other in others]),
            }
        )
    return found


def _plan(config: PackConfig, some: _Population, choice: tuple[str, int]) -> dict[str, Any] | None:
    """One strategy and length; packs are those of all sources."""
    lengths = np.tile(some.lengths, -(-_FOR_PLANS // len(some.lengths)))  # a half-filled pack is no matter
    cap, align = config.max_sequences_per_pack, config.align
    rows = try_plans(lengths, [choice], max_sequences_per_pack=cap, align=align)
    if not rows:
        return None
    (row,) = rows
    stands_for = some.tokens / lengths.sum()
    return row | {"packs": row["packs"] * stands_for, "too_long": row["too_long"] / len(lengths)}


def _padding_at(size: int) -> Callable[[_Population], float]:
    return lambda some: Lengths.of(some.lengths).padding(size)


def _error(values: list[float]) -> float:
    """Half of a 95 % interval around values that are normally distributed."""
    if not values:
        return 0.0
    error = _STUDENT[len(values)] * float(np.std(values, ddof=1))
    return error if error > 1e-9 * max(1.0, abs(values[0])) else 0.0  # what rounding leaves is none
