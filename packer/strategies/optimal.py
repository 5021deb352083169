"""The fewest packs that several orders find, stopping at the bound.

Longest first, whole patterns at once, each closed exactly with its last few sequences: on real
lengths that is the bound, or one above it. Where the data or a cap keep it away from the bound,
`spread` is drawn a few times from different seeds, and the best of all is taken. Where that is more than
one pack in 10,000 over the bound (few sequences to a pack, as between a quarter and a half of it), the
linear program of the histogram gives a better bound, and its prices guide another plan (see `priced`).

The trade-off is time where the bound cannot be reached: then all of it is tried, which takes seconds. And
longest first, like `bfd`, puts the shortest sequences together.
"""

from __future__ import annotations

from numpy.typing import ArrayLike

from padless.packer.plan import PackPlan, as_lengths, length_counts, lower_bound
from padless.packer.strategies.bfd import bfd, packs_needed
from padless.packer.strategies.closing import Stock, close_longest_first
from padless.packer.strategies.counting import Pattern, plan_of_patterns
from padless.packer.strategies.priced import near_enough, priced_patterns
from padless.packer.strategies.pricing import find_prices
from padless.packer.strategies.spread import draws, spread_patterns


def optimal(
    seq_lengths: ArrayLike,
    max_length: int,
    *,
    max_sequences_per_pack: int | None = None,
    seed: int = 0,
    shuffle: bool = False,
) -> PackPlan:
    """Plan in the order that gives the fewest packs.

    `seq_lengths` [N] in tokens, `max_length` the tokens of a pack. Raises InputError for a
    sequence that fits no pack, an empty one, or a limit below 1.
    """
    lengths = as_lengths(seq_lengths, max_length, max_sequences_per_pack)
    cap = max_sequences_per_pack or max(len(lengths), 1)
    bound = lower_bound(lengths, max_length, max_sequences_per_pack)
    occurring, counts = length_counts(lengths)
    best: list[Pattern] = []
    fewest = len(lengths) + 1
    # Under a cap longest first hardly ever wins, and is tried last.
    seeds = range(seed, seed + draws(len(lengths)))
    for drawn in [*seeds, None] if cap * bound < 4 * len(lengths) else [None, *seeds]:
        if drawn is None:
            stock = Stock(zip(occurring.tolist(), counts.tolist(), strict=True))
            patterns = close_longest_first(stock, max_length, cap)
        else:
            patterns = spread_patterns(occurring, counts, max_length, max_sequences_per_pack, drawn)
        packs = sum(copies for copies, _ in patterns)
        if packs < fewest:
            best, fewest = patterns, packs
        if fewest == bound:
            break
    if not near_enough(fewest, bound):
        prices = find_prices(occurring, counts, max_length, max_sequences_per_pack)
        if prices is not None and not near_enough(fewest, max(bound, prices.bound)):
            patterns = priced_patterns(prices, counts, max_length, cap, seed)
            if sum(copies for copies, _ in patterns) < fewest:
                best, fewest = patterns, sum(copies for copies, _ in patterns)
    if fewest > bound and packs_needed(occurring, counts, max_length, max_sequences_per_pack) < fewest:
        return bfd(
            lengths, max_length, max_sequences_per_pack=max_sequences_per_pack, seed=seed, shuffle=shuffle
        )
    return plan_of_patterns(lengths, best, seed, shuffle=shuffle)
