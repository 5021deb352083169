"""What an attention kernel for short packed sequences has to do, worked out from the boundaries alone.

A row's boundaries are known when it is packed, so its tiles are listed once for a batch, on the CPU,
and serve all layers both ways: no program finds out on the device that it has nothing to do, and nobody
needs the longest sequence. Tiles begin with sequences: at an alpaca row's mean of 160 tokens key tiles
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
    at = torch.tensor(bounds)
    first, end, start, _ = _cut(bounds, tiles.query_tokens, last_first=True)
    queries = torch.stack((first, end, start), 1)
    first, end, _, last = _cut(bounds, tiles.key_tokens, last_first=False)
    keys = torch.stack((first, end, last), 1)
    sections = (at[_repeated(at.diff())], queries.flatten(), keys.flatten())
    buffer = torch.zeros(sum(_aligned(len(x)) for x in sections), dtype=torch.int32)
    begin = 0
    for section in sections:
        buffer[begin : begin + len(section)] = section
        begin += _aligned(len(section))
    return WorkList(
        buffer=buffer,
        tokens=bounds[-1],
        tiles=tiles,
        query_tiles=len(queries),
        key_tiles=len(keys),
        max_seqlen=max((b - a for a, b in pairwise(bounds)), default=0),
    )


def _cut(bounds: list[int], size: int, *, last_first: bool) -> tuple[Tensor, ...]:
    """Tiles of at most `size` tokens: first, end, start of the first's sequence, end of the last's.

    A sequence's rest is joined by the sequences after it that fit whole: that fills lanes which would be
    idle, and costs no step more than tiles of their own would.
    """
    # A chain is a sequence that is cut: start, end, first of its last tile, end with those that joined it.
    chains: list[list[int]] = []
    for a, b in pairwise(bounds):
        if chains and b - chains[-1][2] <= size:
            chains[-1][3] = b
        elif b > a:
            chains.append([a, b, b - 1 - (b - 1 - a) % size, b])
    table = torch.tensor(chains, dtype=torch.int64).reshape(-1, 4)
    # Stable, so that tiles of sequences of one length stay by sequence.
    table = table[torch.sort(table[:, 0] - table[:, 1], stable=True).indices]
    counts = torch.div(table[:, 2] - table[:, 0], size, rounding_mode="floor") + 1
    of = _repeated(counts)
    start, end, last, joined = table[of].unbind(1)
    place = torch.arange(len(of)) - (counts.cumsum(0) - counts)[of]
    first = last - place * size if last_first else start + place * size
    is_last = first == last
    return first, torch.where(is_last, joined, first + size), start, torch.where(is_last, joined, end)


def _repeated(counts: Tensor) -> Tensor:
    """0 as often as counts[0] says, 1 as often as counts[1], and so on.

    torch.repeat_interleave wakes a thread for each core, which takes milliseconds on a busy host.
    """
    ends = counts.cumsum(0)
    steps = torch.zeros(int(ends[-1]) + 1 if len(ends) else 1, dtype=torch.int64)
    steps.index_add_(0, ends[:-1], torch.ones_like(ends[:-1]))
    return steps[:-1].cumsum(0)


def _aligned(count: int) -> int:
    """The next multiple of four int32: Triton compiles apart for addresses that are no multiple of 16."""
    return -(-count // 4) * 4
