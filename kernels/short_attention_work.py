"""What an attention kernel for short packed sequences has to do, worked out from the boundaries alone.

A row's boundaries are known when it is packed, so its tiles are listed once for a batch, on the CPU,
and serve all layers both ways: no program finds out on the device that it has nothing to do, and nobody
needs the longest sequence. A CUDA graph lists them on the device by the same steps, none of which looks at
a value. Tiles begin with sequences: at an alpaca row's mean of 160 tokens key tiles
of 64 that begin anywhere compute 1.60 times what the mask leaves, those that begin with their sequence
1.36. The price is four bytes a token and twelve a tile, copied to the device with the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Tiles(NamedTuple):
    """How many tokens a tile has; a query tile holds all heads that share keys, as rows of one product."""

    query_tokens: int
    key_tokens: int


@dataclass(frozen=True, kw_only=True)
class WorkList:
    """A batch's tiles, on the CPU or on a device, in one buffer and so in one copy."""

    buffer: Tensor
    """int32: the three sections below, each begun at a multiple of 16 bytes."""
    tokens: int
    tiles: Tiles
    query_tiles: int
    key_tiles: int
    max_seqlen: int

    @cached_property
    def starts(self) -> Tensor:
        """int32 [T]: for each token the first of its sequence."""
        return self.buffer[: self.tokens]

    @cached_property
    def queries(self) -> Tensor:
        """int32 [query_tiles, 3]: first query, end of the queries, first key that they see."""
        at = _aligned(self.tokens)
        return self.buffer[at : at + 3 * self.query_tiles].view(-1, 3)

    @cached_property
    def keys(self) -> Tensor:
        """int32 [key_tiles, 3]: first key, end of the keys, end of the queries that see them."""
        at = _aligned(self.tokens) + _aligned(3 * self.query_tiles)
        return self.buffer[at : at + 3 * self.key_tiles].view(-1, 3)

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> WorkList:
        """The same list on a device; from pinned memory without waiting."""
        return replace(self, buffer=self.buffer.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> WorkList:
        """The same list in pinned memory; DataLoader calls this by its name."""
        return replace(self, buffer=self.buffer.pin_memory())


def work_list(boundaries: Sequence[int] | Tensor, tiles: Tiles) -> WorkList:
    """The tiles of the sequences between `boundaries` [N + 1] on the CPU; empty sequences have none.

    Tiles of the longest sequences come first, so that the last programs to start are short ones; within a
    sequence the longest tile comes first. Those of one sequence stay together, as they share keys.

    Raises ValueError for boundaries that do not begin at 0, that fall, or that end at 2**31 or beyond.
    """
    bounds = boundaries.tolist() if isinstance(boundaries, Tensor) else list(boundaries)
    if not bounds or bounds[0] != 0 or any(b < a for a, b in pairwise(bounds)) or bounds[-1] >= 2**31:
        shown = bounds if len(bounds) < 12 else [*bounds[:6], "...", *bounds[-5:]]
        raise ValueError(f"boundaries are {shown}; they must begin at 0, never fall and stay below 2**31")
    longest = max((b - a for a, b in pairwise(bounds)), default=0)
    starts, queries, keys, counts = _sections(torch.tensor(bounds), bounds[-1], tiles)
    of_queries, of_keys = counts.tolist()
    return _joined(starts, queries[:of_queries], keys[:of_keys], tiles, longest)


def work_list_on_device(cu_seqlens: Tensor, tokens: int, max_seqlen: int, tiles: Tiles) -> WorkList:
    """`work_list` made where boundaries [N + 1] lie, without a look at them: also in a CUDA graph, which then
    lists the tiles of whatever boundaries it is replayed over.

    The same tiles in the same order, and behind them empty ones, up to as many as N sequences of together
    `tokens` tokens can have: programs that find nothing to do. max_seqlen is as it is told. It takes some
    hundred small launches, where the list of boundaries that are known is one copy.
    """
    starts, queries, keys, _ = _sections(cu_seqlens.long(), tokens, tiles)
    return _joined(starts, queries, keys, tiles, max_seqlen)


def most_tiles(tokens: int, sequences: int, size: int) -> int:
    """As many tiles of at most `size` tokens as there can be.

    Each sequence leaves one tile that is not full; and any two that follow each other in the row hold more
    tokens than one could, or the second's first sequence would have joined the first.
    """
    return min(tokens // size + sequences, 2 * (tokens // (size + 1)) + 1) if tokens else 0


def _joined(starts: Tensor, queries: Tensor, keys: Tensor, tiles: Tiles, max_seqlen: int) -> WorkList:
    """A list whose sections lie in one buffer."""
    sections = (starts, queries.flatten(), keys.flatten())
    size = sum(_aligned(len(section)) for section in sections)
    buffer = torch.zeros(size, dtype=torch.int32, device=starts.device)
    begin = 0
    for section in sections:
        buffer[begin : begin + len(section)] = section
        begin += _aligned(len(section))
    return WorkList(
        buffer=buffer,
        tokens=len(starts),
        tiles=tiles,
        query_tiles=len(queries),
        key_tiles=len(keys),
        max_seqlen=max_seqlen,
    )


def _sections(bounds: Tensor, tokens: int, tiles: Tiles) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """starts [T], query tiles and key tiles, as many as there can be, and how many of either there are [2].

    A sequence's rest is joined by the sequences after it that fit whole: that fills lanes which would be
    idle, and costs no step more than tiles of their own would. Both kinds are cut at once, in rows. Shapes
    follow from the number of boundaries and of tokens: nothing here asks what a tensor holds.
    """
    of_queries, of_keys = (most_tiles(tokens, len(bounds) - 1, size) for size in tiles)
    sizes = torch.cat([bounds.new_full((1, 1), size) for size in tiles])
    # The last of N + 1 sequences is none: it begins and ends where the row does.
    begin, end = bounds, torch.cat((bounds[1:], bounds[-1:]))
    last = end - 1 - (end - 1 - begin) % sizes  # the first token of a sequence's last tile
    after = torch.searchsorted(bounds[1:], last + sizes, right=True)  # the first that does not fit there
    leads = _reached(after, (end <= 0).sum())
    # Longest first; stable, so that tiles of sequences of one length stay by sequence.
    order = torch.sort(torch.where(leads > 0, begin - end, 1), stable=True).indices
    counts = (leads * (torch.div(last - begin, sizes, rounding_mode="floor") + 1)).gather(1, order)
    upto = counts.cumsum(1)
    tile = torch.arange(max(of_queries, of_keys), device=bounds.device)
    at = torch.searchsorted(upto, tile.repeat(2, 1), right=True).clamp_(max=len(bounds) - 1)
    along = (tile - (upto - counts).gather(1, at)) * sizes
    of = order.gather(1, at)
    begin, end, last, joined = begin[of], end[of], last.gather(1, of), bounds[after.gather(1, of)]
    first = torch.stack((last[0] - along[0], begin[1] + along[1]))
    is_last = first == last
    tile_end = torch.where(is_last, joined, first + sizes)
    meets = torch.stack((begin[0], torch.where(is_last[1], joined[1], end[1])))
    live = tile < upto[:, -1:]
    found = torch.stack((first, tile_end, meets), 2) * live[:, :, None]
    starts = bounds.new_zeros(tokens + 1).scatter_(0, bounds, bounds)[:-1].cummax(0).values
    return starts, found[0, :of_queries], found[1, :of_keys], upto[:, -1]


def _reached(after: Tensor, first: Tensor) -> Tensor:
    """1 for sequences that `first` comes to by going from each to the one `after` it, the last apart; else 0.

    By doubling: after k rounds all are marked that 2^k steps reach (Wyllie 1979, list ranking).
    """
    count = after.shape[1]
    marks = (torch.arange(count, device=after.device) == first).long().repeat(len(after), 1)
    for _ in range(count.bit_length()):
        marks.scatter_(1, torch.where(marks > 0, after, count - 1), 1)
        after = after.gather(1, after)
    marks[:, -1] = 0
    return marks


def _aligned(count: int) -> int:
    """The next multiple of four int32: Triton compiles apart for addresses that are no multiple of 16."""
    return -(-count // 4) * 4
