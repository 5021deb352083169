"""One pass over the sequence table: all that a report is made of.

Sequences are only counted (by length, by pack, by source and reason); none is kept but a few examples and
a thinned list of lengths for trying other plans. So memory goes with the packs and sources, at some 50
bytes a pack, and not with the sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from padless.packer.cost import causal_pairs
from padless.packer.lengths import Lengths
from padless.packer.lines import DROPPED, FRAGMENT, PACK_END, REASONS, STATUSES, TOO_LONG, WHOLE
from padless.packer.progress import Report, part_of
from padless.runtime.format import Manifest
from padless.runtime.reader import Array, PackedReader, Plan, column_to_numpy

Integers = NDArray[np.int64]
_COLUMNS = ("source", "row", "part", "status", "reason", "start", "length", "num_targets", "cut", "pack")
SAMPLE = 30_000
"""Lengths for other plans: every one of up to twice as many, otherwise every k-th."""
EXAMPLES = 3
NOTABLE = 5
_LEAST_TOKENS = 16
"""Shorter sequences are no news where hardly a token is trained."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PerPack:
    """Of each pack, [packs] int64."""

    sequences: Integers
    tokens: Integers
    targets: Integers
    longest: Integers
    squares: Integers
    """Sums of squared lengths."""
    near: Integers
    """Pairs of tokens within the window that was asked for; 0 without one."""


@dataclass(kw_only=True, eq=False)
class PerSource:
    """Of one source, over records or tokens."""

    statuses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
    """Records by what became of them."""
    sequences: int = 0
    tokens: int = 0
    trained: int = 0
    drawn: int = 0
    """Sequences that begin a record or a copy of one; its fragments go on with it."""
    cut: int = 0
    dropped_by_reason: dict[str, int] = field(default_factory=dict)
    cut_by_reason: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[int]] = field(default_factory=dict)
    """reason -> the first few rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What the table says, by the stored packs or by a plan."""

    lengths: Lengths
    """Of the sequences as they are packed."""
    before: Lengths
    """Of the same and the dropped ones before anything was cut: fragments joined, cut tokens put back."""
    sample: Array
    """Packed lengths in the table's order, every `thinned`-th of them."""
    thinned: int
    packs: PerPack
    sources: list[PerSource]
    notable: dict[str, list[dict[str, int]]]
    """longest, shortest, least trained and most cut: a few lines of the table each."""


def measure(reader: PackedReader, *, window: int | None = None, progress: Report | None = None) -> Measured:
    """Read the table once; `window` in tokens, of a model's sliding attention.

    Raises what `PackedReader.sequence_lines` raises.
    """
    counting = _Counting(len(reader), len(reader.manifest.sources), window)
    plan = _ByPlan(reader.plan, reader.manifest) if reader.plan is not None else None
    first = 0
    counted = part_of(progress, "sequences", sum(info.lines for info in reader.manifest.sequence_tables))
    for table in reader.sequence_lines(_COLUMNS):
        lines = {name: column_to_numpy(table.column(name)) for name in _COLUMNS if name not in _WORDS}
        for name in _WORDS:
            lines[name] = counting.codes(name, table.column(name))
        lines["line"] = np.arange(first, first + len(table))
        if plan is not None:
            words = [counting.code("reason", REASONS[why]) for why in (TOO_LONG, PACK_END)]
            lines = plan.applied(lines, *words)
        counting.add(lines)
        first += len(table)
        counted(len(table))
    return counting.found()


_WORDS = ("status", "reason")


class _ByPlan:
    """The table as a plan has it: other packs, and a line for every fragment of what it cuts."""

    def __init__(self, plan: Plan, manifest: Manifest) -> None:
        lines = sum(info.lines for info in manifest.sequence_tables)
        starts = np.zeros(len(plan.sequences), np.int64) if plan.starts is None else plan.starts
        in_order = np.lexsort((starts, plan.sequences))
        self.counts = np.bincount(plan.sequences, minlength=lines)
        self.firsts = np.cumsum(self.counts) - self.counts
        self.packs = np.repeat(np.arange(len(plan)), np.diff(plan.offsets))[in_order]
        self.starts = starts[in_order]
        self.lengths = None if plan.lengths is None else plan.lengths[in_order]
        self.max_length = int(plan.facts["max_length"])

    def applied(self, lines: dict[str, Array], too_long: int, pack_end: int) -> dict[str, Array]:
        """The next lines; the numbers of the words for why a sequence is cut."""
        here = lines["line"]
        counts = self.counts[here]
        if self.lengths is None:
            pack = np.full(len(here), -1, np.int64)
            pack[counts > 0] = self.packs[self.firsts[here[counts > 0]]]
            return {**lines, "pack": pack}
        each = np.maximum(counts, 1)
        found = {name: np.repeat(values, each) for name, values in lines.items()}
        number = np.arange(len(found["line"])) - np.repeat(np.cumsum(each) - each, each)
        kept = np.repeat(counts > 0, each)
        entry = (self.firsts[found["line"]] + number)[kept]
        found["pack"] = np.full(len(number), -1, np.int64)
        found["pack"][kept] = self.packs[entry]
        found["start"] = found["start"].astype(np.int64)
        found["start"][kept] += self.starts[entry]
        found["length"][kept] = self.lengths[entry]
        cut = np.repeat(counts > 1, each)
        found["num_targets"][cut] = found["length"][cut] - 1  # only what is trained throughout is cut
        newly = cut & (found["status"] == WHOLE)
        found["status"][newly] = FRAGMENT
        is_over = np.repeat(lines["length"] > self.max_length, each)
        found["reason"][newly] = np.where(is_over[newly], too_long, pack_end)
        found["part"] = found["part"] + number
        found["cut"][number > 0] = 0
        return found


class _Counting:
    """The counts so far."""

    def __init__(self, packs: int, sources: int, window: int | None) -> None:
        self.window = window
        self.packs = {name: np.zeros(packs, np.int64) for name in PerPack.__dataclass_fields__}
        self.sources = [PerSource() for _ in range(sources)]
        self.words: dict[str, list[str | None]] = {"status": list(STATUSES), "reason": [None]}
        self.lengths: list[Lengths] = []
        self.before: list[Lengths] = []
        self.open = 0  # tokens of a record whose fragments go on
        self.sample: list[Array] = []
        self.thinned, self.sampled, self.seen = 1, 0, 0
        self.notable: dict[str, list[tuple[float, int, dict[str, int]]]] = {}

    def code(self, name: str, word: str) -> int:
        """The number of a word of `self.words[name]`."""
        if word not in self.words[name]:
            self.words[name].append(word)
        return self.words[name].index(word)

    def codes(self, name: str, column: pa.ChunkedArray) -> Array:
        """The words of a column as numbers of `self.words[name]`."""
        known = self.words[name]
        parts = []
        for chunk in column.chunks:
            coded = pc.dictionary_encode(chunk, null_encoding="encode")
            words = coded.dictionary.to_pylist()
            known += [word for word in words if word not in known]
            code = np.array([known.index(word) for word in words], np.int64)
            parts.append(code[column_to_numpy(pa.chunked_array([coded.indices]))])
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def add(self, lines: dict[str, Array]) -> None:
        length = lines["length"].astype(np.int64)
        packed = np.flatnonzero((lines["pack"] >= 0) & (length > 0))
        self._add_packs(lines, length, packed)
        for run in _runs(lines["source"]):
            self._add_source({name: column[run] for name, column in lines.items()})
        self._add_lengths(lines, length, packed)
        self._add_notable(lines, length)

    def _add_packs(self, lines: dict[str, Array], length: Integers, packed: Integers) -> None:
        pack, tokens = lines["pack"][packed], length[packed]
        for name, values in (
            ("sequences", np.ones(len(pack), np.int64)),
            ("tokens", tokens),
            ("targets", lines["num_targets"][packed].astype(np.int64)),
            ("squares", tokens * tokens),
        ):
            np.add.at(self.packs[name], pack, values)
        if self.window is not None:
            pairs = causal_pairs(tokens.astype(np.float64), self.window)
            np.add.at(self.packs["near"], pack, pairs.astype(np.int64))
        np.maximum.at(self.packs["longest"], pack, tokens)

    def _add_source(self, lines: dict[str, Array]) -> None:
        here = self.sources[int(lines["source"][0])]
        is_first = lines["part"] == 0
        records = np.bincount(lines["status"][is_first], minlength=len(STATUSES))
        for name, count in zip(STATUSES, records.tolist(), strict=False):
            here.statuses[name] += count
        here.sequences += int((lines["length"] > 0).sum())
        here.tokens += int(lines["length"].sum(dtype=np.int64))
        here.trained += int(lines["num_targets"].sum(dtype=np.int64))
        here.drawn += int(((lines["length"] > 0) & (lines["start"] == 0)).sum())
        here.cut += int(lines["cut"].sum())
        known = self.words["reason"]
        gone = np.bincount(lines["reason"][is_first & (lines["status"] == DROPPED)], minlength=len(known))
        cut = np.zeros(len(known), np.int64)
        np.add.at(cut, lines["reason"], lines["cut"])
        for code, word in enumerate(known):
            if word is None:
                continue
            for counts, number in ((here.dropped_by_reason, gone[code]), (here.cut_by_reason, cut[code])):
                if number:
                    counts[word] = counts.get(word, 0) + int(number)
            examples = here.examples.get(word, [])
            if len(examples) < EXAMPLES:
                rows = lines["row"][is_first & (lines["reason"] == code)][: EXAMPLES - len(examples)]
                if len(rows):
                    here.examples[word] = examples + rows.tolist()

    def _add_lengths(self, lines: dict[str, Array], length: Integers, packed: Integers) -> None:
        self.lengths.append(Lengths.of(length[packed]))
        goes_on = (lines["status"] == FRAGMENT) & (lines["start"] > 0)  # a copy begins at token 0
        whole = length + lines["cut"]
        begins = np.flatnonzero(~goes_on)
        cut_off = int(begins[0]) if len(begins) else len(whole)
        self.open += int(whole[:cut_off].sum())
        if len(begins):
            joined = np.add.reduceat(whole, begins)
            self.before.append(Lengths.of(np.array([self.open])))
            self.before.append(Lengths.of(joined[:-1]))
            self.open = int(joined[-1])
        if len(self.lengths) > 64:
            self.lengths, self.before = [Lengths.together(self.lengths)], [Lengths.together(self.before)]
        self._add_sample(length[packed])

    def _add_sample(self, lengths: Integers) -> None:
        some = lengths[-self.seen % self.thinned :: self.thinned].astype(np.int32)
        self.seen += len(lengths)
        self.sample.append(some)
        self.sampled += len(some)
        while self.sampled > 2 * SAMPLE:
            self.sample = [np.concatenate(self.sample)[::2]]
            self.sampled = len(self.sample[0])
            self.thinned *= 2

    def _add_notable(self, lines: dict[str, Array], length: Integers) -> None:
        whole = (length + lines["cut"]).astype(np.float64)
        rank: dict[str, tuple[NDArray[np.float64], Array]] = {
            "longest": (-whole, whole > 0),
            "shortest": (length.astype(np.float64), length > 0),
            "least_trained": (lines["num_targets"] / np.maximum(length, 1), length >= _LEAST_TOKENS),
            "most_cut": (-lines["cut"].astype(np.float64), lines["cut"] > 0),
        }
        for name, (keys, counts) in rank.items():
            found = self.notable.setdefault(name, [])
            if len(found) == NOTABLE:  # of equal ones the first stay
                counts = counts & (keys < found[-1][0])
            among = np.flatnonzero(counts)
            best = among[_smallest(keys[among], NOTABLE)]
            found += [
                (
                    float(keys[at]),
                    int(lines["line"][at]),
                    {
                        "sequence_id": int(lines["line"][at]),
                        **{
                            column: int(lines[column][at])
                            for column in ("source", "row", "part", "length", "num_targets", "cut", "pack")
                        },
                    },
                )
                for at in best.tolist()
            ]
            found.sort(key=lambda one: one[:2])
            del found[NOTABLE:]

    def found(self) -> Measured:
        self.before.append(Lengths.of(np.array([self.open])))
        return Measured(
            lengths=Lengths.together(self.lengths),
            before=Lengths.together(self.before),
            sample=np.concatenate([np.zeros(0, np.int32), *self.sample]),
            thinned=self.thinned,
            packs=PerPack(**self.packs),
            sources=self.sources,
            notable={name: [line for *_, line in lines] for name, lines in self.notable.items()},
        )


def _runs(values: Array) -> Iterator[slice]:
    """Where runs of one value begin and end."""
    cuts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return (slice(*cut) for cut in zip(cuts, cuts[1:], strict=False) if cut[0] < cut[1])


def _smallest(keys: NDArray[np.float64], count: int) -> Integers:
    """The places of the smallest keys, of equal ones the first."""
    if len(keys) <= count:
        return np.arange(len(keys))
    limit = np.partition(keys, count - 1)[count - 1]
    below, at_limit = np.flatnonzero(keys < limit), np.flatnonzero(keys == limit)
    return np.concatenate([below, at_limit[: count - len(below)]])
