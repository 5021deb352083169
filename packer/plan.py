"""Which sequence goes into which pack: the plan, its checks, its bound, its shuffle, its hash.

A plan is two flat arrays, so that planning and gathering need no Python object for a sequence:

    order    [4 0 2 1 3]      numbers of sequences, pack after pack
    offsets  [0 2 5]          pack 0 holds 4 and 0, pack 1 holds 2, 1 and 3

All of it works on lengths alone, at 4 bytes a sequence, and on blocks of packs, so memory stays
near the size of the plan; the price is a short loop around each numpy expression.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from padless.packer.errors import InputError

Integers = NDArray[np.integer[Any]]

# int64 temporaries of this many entries stay in a core's own cache.
BLOCK = 1 << 16
PARTS = 20
"""Up to so many sequences a pack, the bound sees room that no sequence can use."""


@dataclass(frozen=True, eq=False)
class PackPlan:
    """Pack `p` holds the sequences `order[offsets[p]:offsets[p + 1]]`, in that order."""

    order: Integers
    """Numbers of sequences, [entries]: int32 where they fit, otherwise int64."""
    offsets: NDArray[np.int64]
    """Where each pack begins in `order`, and the end, [packs + 1]."""
    starts: Integers | None = None
    """First token of each entry within its sequence, [entries]; None: entries are whole."""
    lengths: Integers | None = None
    """Tokens of each entry, [entries]; None exactly where `starts` is."""
    buckets: tuple[tuple[int, int], ...] | None = None
    """Length in tokens and number of the packs of each length, as they stand: the shortest first.
    None: all packs are of the one length that was planned for."""

    def __len__(self) -> int:
        """Number of packs."""
        return len(self.offsets) - 1

    def part(self, first: int, stop: int) -> PackPlan:
        """Packs [first, stop), as a plan of one length."""
        entries = slice(int(self.offsets[first]), int(self.offsets[stop]))
        return PackPlan(
            self.order[entries],
            self.offsets[first : stop + 1] - entries.start,
            None if self.starts is None else self.starts[entries],
            None if self.lengths is None else self.lengths[entries],
        )

    def by_bucket(self, max_length: int) -> list[tuple[int, PackPlan]]:
        """The packs of each length, shortest first; all of them where there is one, `max_length`."""
        found, first = [], 0
        for length, packs in self.buckets or ((max_length, len(self)),):
            found.append((length, self.part(first, first + packs)))
            first += packs
        return found


def index_type(count: int) -> type[np.signedinteger[Any]]:
    """The smallest of int32 and int64 that numbers `count` things."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def as_lengths(
    seq_lengths: ArrayLike, max_length: int, max_sequences_per_pack: int | None = None, *, cuts: bool = False
) -> Integers:
    """Lengths in tokens as an array, [N], after checking what every strategy relies on.

    `cuts`: the strategy cuts sequences, so none is too long. Raises InputError where a sequence has
    no token or more than a pack, or a limit is below 1.
    """
    lengths = np.asarray(seq_lengths)
    if lengths.ndim != 1 or (lengths.size and not np.issubdtype(lengths.dtype, np.integer)):
        raise InputError(
            f"seq_lengths has type {lengths.dtype} and shape {lengths.shape}; "
            "give one integer, its tokens, for each sequence"
        )
    if max_length < 1:
        raise InputError(f"max_length is {max_length}; a pack needs room for at least 1 token")
    if max_sequences_per_pack is not None and max_sequences_per_pack < 1:
        raise InputError(
            f"max_sequences_per_pack is {max_sequences_per_pack}; give at least 1, or None for no limit"
        )
    if not lengths.size:
        return lengths.astype(np.int32)
    if lengths.min() < 1:
        number = int(lengths.argmin())
        raise InputError(
            f"sequence {number} has {lengths[number]} tokens; "
            "a sequence needs at least 1, leave empty ones out before planning"
        )
    if int(lengths.max()) > max_length and not cuts:
        number = int(lengths.argmax())
        raise InputError(
            f"sequence {number} has {lengths[number]:,} tokens, a pack holds {max_length:,}; "
            "drop, truncate or split it before planning, or raise max_length"
        )
    # uint64 beside int64 would make numpy go on in floats.
    return lengths.astype(np.int64) if lengths.dtype == np.uint64 else lengths


def length_counts(lengths: Integers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The lengths that occur, ascending, and how often each does: [3 1 3] -> [1 3], [1 2]."""
    # One huge sequence must not cost a histogram of its own size.
    if int(lengths.max(initial=0)) > lengths.size + (1 << 20):
        occurring, counts = np.unique(lengths, return_counts=True)
    else:
        longest = int(lengths.max(initial=0))
        histogram = np.zeros(longest + 1, np.int64)
        step = max(BLOCK, 2 * longest)  # numpy widens what it counts to 8 bytes each
        for begin in range(0, len(lengths), step):
            histogram += np.bincount(lengths[begin : begin + step], minlength=longest + 1)
        occurring = np.flatnonzero(histogram)
        counts = histogram[occurring]
    return occurring.astype(np.int64), counts.astype(np.int64)


def lower_bound(seq_lengths: ArrayLike, max_length: int, max_sequences_per_pack: int | None = None) -> int:
    """A number of packs that no plan of whole sequences can go below.

    The largest of what the cap asks for, of Fekete and Schepers' bound (lengths rounded up to parts
    of a pack, so that those of a little more than a fifth are seen to go by four), and of Martello and
    Toth's L2: take any length `a` up to half a pack and forget the shorter sequences. Those longer
    than half a pack need one pack each; the others need the room that these leave, and where that is
    less than `a` none of it. The shortest `a` gives at least all tokens over `max_length`.

    Raises InputError as `as_lengths` does.
    """
    lengths = as_lengths(seq_lengths, max_length, max_sequences_per_pack)
    if not lengths.size:
        return 0
    occurring, counts = length_counts(lengths)
    # [kinds + 1] how many have one of the k shortest lengths, and their tokens
    sequences = np.concatenate(([0], np.cumsum(counts)))
    tokens = np.concatenate(([0], np.cumsum(counts * occurring)))
    # A pack for all is as good as any larger one, and keeps the products within int64.
    max_length = min(max_length, int(tokens[-1]))

    half = int(np.searchsorted(occurring, max_length // 2, side="right"))
    long = int(sequences[-1] - sequences[half])
    # For each `a`: the kinds that leave it room, what they leave, and what is to be put there.
    shared = np.searchsorted(occurring, max_length - occurring[:half], side="right")
    room = (sequences[shared] - sequences[half]) * max_length - (tokens[shared] - tokens[half])
    rest = tokens[half] - tokens[:half]
    more = -((room - rest) // max_length)  # rounded up
    by_parts = max(_by_parts(occurring, counts, max_length, parts) for parts in range(1, PARTS))
    by_cap = -(-lengths.size // (max_sequences_per_pack or lengths.size))
    return max(by_cap, by_parts, long + int(more.max(initial=0)))


def _by_parts(occurring: NDArray[np.int64], counts: NDArray[np.int64], max_length: int, parts: int) -> int:
    """Fekete and Schepers' bound: a length over 1 / (parts + 1) of a pack takes 1 / parts of it.

    Generally, what takes more than m / (parts + 1) of a pack takes m / parts, what takes exactly so
    much keeps it; what filled a pack still fits into one (their u(k), a dual feasible function).
    """
    if max_length > np.iinfo(np.int64).max // (2 * PARTS):
        return 0
    whole, rest = np.divmod(occurring * (parts + 1), max_length)
    taken = np.where(rest == 0, whole * parts, whole * (parts + 1))  # of parts * (parts + 1)
    return -(-int((counts * taken).sum()) // (parts * (parts + 1)))


def in_a_row(plans: Sequence[PackPlan]) -> PackPlan:
    """The packs of at least one plan, plan after plan, over the same sequences; of one length."""
    sizes = np.concatenate([np.diff(plan.offsets) for plan in plans])
    starts = [plan.starts for plan in plans if plan.starts is not None]
    lengths = [plan.lengths for plan in plans if plan.lengths is not None]
    return PackPlan(
        np.concatenate([plan.order for plan in plans]),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        np.concatenate(starts) if starts else None,
        np.concatenate(lengths) if lengths else None,
    )


def shuffle_packs(plan: PackPlan, seed: int) -> PackPlan:
    """The same packs in an order drawn from `seed`, so that alike ones do not follow each other.

    Packs of one length stay together. A strategy asked for `shuffle` may lay its packs out in this order
    at once, which costs less.
    """
    if plan.buckets is not None:
        parts = [shuffle_packs(part, seed) for _, part in plan.by_bucket(0)]
        return replace(in_a_row(parts), buckets=plan.buckets)
    moved = drawn_order(len(plan), seed)
    begins = plan.offsets[:-1][moved]
    offsets = np.zeros_like(plan.offsets)
    np.cumsum(np.diff(plan.offsets)[moved], out=offsets[1:])
    columns = (plan.order, plan.starts, plan.lengths)
    shuffled = [None if column is None else np.empty_like(column) for column in columns]
    for packs, entries in blocks(offsets):
        sizes = np.diff(offsets[packs.start : packs.stop + 1])
        source = np.arange(entries.start, entries.stop)
        source += np.repeat(begins[packs] - offsets[packs], sizes)
        for column, target in zip(columns, shuffled, strict=True):
            if column is not None and target is not None:
                target[entries] = column[source]
    order, starts, lengths = shuffled
    assert order is not None
    return PackPlan(order, offsets, starts, lengths)


def drawn_order(packs: int, seed: int) -> NDArray[np.intp]:
    """The pack that comes at each place, [packs], in an order drawn from `seed`.

    Ranks are PCG64's raw 64 bits: numpy keeps those for ever, `Generator.permutation` it may
    change, and a plan must not depend on numpy's version.
    """
    ranks = np.random.PCG64(seed).random_raw(packs)
    # By their upper 24 bits, in passes of 16 and 8, which numpy sorts by counting; the few that are equal
    # there are then put right by all 64. A few long calls: beside other work each waits for its turn.
    upper = (ranks >> np.uint64(40)).astype(np.uint32)
    order = np.argsort(upper.astype(np.uint16), kind="stable")
    order = order.take(np.argsort((upper >> 16).astype(np.uint8).take(order), kind="stable"))
    upper = upper.take(order)
    same = upper[1:] == upper[:-1]
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    among = order.take(tied)
    order[tied] = among.take(np.argsort(ranks.take(among), kind="stable"))
    return order


def plan_hash(plan: PackPlan, seq_lengths: ArrayLike, max_length: int) -> str:
    """xxh3:<32 hex digits> of what is in which pack and at which place, [N] lengths in tokens.

    Integer types do not count, nor whether whole sequences are spelled out in `starts` and
    `lengths`: plans that give the same packs have the same hash.
    """
    lengths = np.asarray(seq_lengths)
    digest = xxhash.xxh3_128()
    header = (1, max_length, len(lengths), len(plan))  # 1: of this recipe
    digest.update(np.array(header, "<i8").tobytes())
    if plan.buckets is not None:
        digest.update(np.array(plan.buckets, "<i8").tobytes())
    digest.update(np.ascontiguousarray(plan.offsets, "<i8").data)
    for _, entries in blocks(plan.offsets):
        order = plan.order[entries]
        table = np.zeros((len(order), 3), "<i8")  # a row an entry, so blocks leave no trace
        table[:, 0] = order
        table[:, 1] = 0 if plan.starts is None else plan.starts[entries]
        table[:, 2] = lengths.take(order) if plan.lengths is None else plan.lengths[entries]
        digest.update(table.data)
    return f"xxh3:{digest.hexdigest()}"


def check_plan(
    plan: PackPlan,
    seq_lengths: ArrayLike,
    max_length: int,
    max_sequences_per_pack: int | None = None,
) -> None:
    """See that a plan packs every token of every sequence once and keeps both limits.

    Raises AssertionError, also under `python -O`: a plan that fails is a bug of padless.
    """
    lengths = np.asarray(seq_lengths)
    offsets, entries = plan.offsets, len(plan.order)
    sizes = np.diff(offsets)
    _claim(len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == entries, "offsets miss entries")
    _claim(bool((sizes > 0).all()), "a pack is empty")
    if max_sequences_per_pack is not None:
        largest = int(sizes.max(initial=0))
        _claim(largest <= max_sequences_per_pack, f"a pack holds {largest} sequences")
    _claim((plan.starts is None) == (plan.lengths is None), "starts without lengths")
    buckets = plan.buckets or ((max_length, len(plan)),)
    _claim(sum(packs for _, packs in buckets) == len(plan), "packs of all lengths are not all packs")
    limits = np.repeat(*np.array(buckets, np.int64).T)
    if entries:
        known = plan.order.min() >= 0 and plan.order.max() < len(lengths)
        _claim(bool(known), "a number of a sequence does not exist")
    if plan.starts is None or plan.lengths is None:
        seen = np.zeros(len(lengths), bool)
        seen[plan.order] = True
        _claim(entries == len(lengths) and bool(seen.all()), "not every sequence is there once")
    else:
        _check_parts(plan.order, plan.starts, plan.lengths, lengths)
    for packs, block in blocks(offsets):
        order = plan.order[block]
        tokens = lengths[order] if plan.lengths is None else plan.lengths[block]
        begins = offsets[packs] - block.start
        held = np.add.reduceat(tokens.astype(np.int64), begins)
        fullest = int(np.argmax(held - limits[packs]))
        most = int(limits[packs][fullest])
        _claim(int(held[fullest]) <= most, f"a pack holds {held[fullest]} tokens of {most}")


def most_rows(plan: PackPlan, seq_lengths: ArrayLike, beside: int) -> int:
    """The most that a pack holds in tokens and `beside` for each of its sequences, [N] lengths in tokens."""
    lengths, most = np.asarray(seq_lengths), 0
    for packs, block in blocks(plan.offsets):
        tokens = lengths.take(plan.order[block]) if plan.lengths is None else plan.lengths[block]
        begins = plan.offsets[packs] - block.start
        most = max(most, int(np.add.reduceat(tokens.astype(np.int64) + beside, begins).max()))
    return most


def pack_tokens(plan: PackPlan, seq_lengths: ArrayLike) -> NDArray[np.int64]:
    """[packs]: the tokens of each pack, of a plan of whole sequences; [N] lengths in tokens."""
    lengths = np.asarray(seq_lengths)
    found = np.zeros(len(plan), dtype=np.int64)
    for packs, block in blocks(plan.offsets):
        begins = plan.offsets[packs] - block.start
        tokens = lengths.take(plan.order[block])  # half the time of an index
        found[packs] = np.add.reduceat(tokens, begins, dtype=np.int64)
    return found


def _check_parts(order: Integers, starts: Integers, taken: Integers, lengths: Integers) -> None:
    """See that the parts of each sequence, put in order, cover it without gap or overlap."""
    _claim(len(starts) == len(taken) == len(order), "starts or lengths miss entries")
    _claim(bool((taken > 0).all()), "a part is empty")
    sorted_parts = np.lexsort((starts, order))
    order = order[sorted_parts]
    starts = starts[sorted_parts].astype(np.int64)
    ends = starts + taken[sorted_parts]
    first = np.diff(order, prepend=-1) != 0
    last = np.roll(first, -1)
    _claim(np.array_equal(order[first], np.arange(len(lengths))), "a sequence is left out")
    _claim(bool((starts[first] == 0).all()), "a sequence misses its first tokens")
    _claim(np.array_equal(ends[last], lengths), "a sequence does not end where it should")
    _claim(np.array_equal(starts[~first], ends[~last]), "parts leave a gap or overlap")


def _claim(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(f"bad plan: {otherwise}")


def blocks(offsets: NDArray[np.int64]) -> Iterator[tuple[slice, slice]]:
    """Whole packs of about BLOCK entries together: their slice, and that of their entries."""
    pack, packs = 0, len(offsets) - 1
    while pack < packs:
        beyond = int(np.searchsorted(offsets, offsets[pack] + BLOCK, side="right")) - 1
        end = max(beyond, pack + 1)
        yield slice(pack, end), slice(int(offsets[pack]), int(offsets[end]))
        pack = end
