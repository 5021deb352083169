"""Work lists: tiles cover what the mask leaves, once; they begin with sequences, the longest first."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from reads import NothingIsRead  # noqa: E402

from padless.kernels.short_attention import tiles_for  # noqa: E402
from padless.kernels.short_attention_work import (  # noqa: E402
    Tiles,
    WorkList,
    most_tiles,
    work_list,
    work_list_on_device,
)

LENGTHS = st.lists(st.integers(0, 40), max_size=30)


def listed(lengths: list[int], tiles: Tiles) -> WorkList:
    return work_list(torch.tensor([0, *lengths]).cumsum(0), tiles)


def sequences_of(lengths: list[int]) -> list[range]:
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return [range(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True) if b > a]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 16), st.integers(1, 16))
def test_each_token_is_in_one_tile_that_reaches_all_it_must_meet(
    lengths: list[int], query_tokens: int, key_tokens: int
) -> None:
    work = listed(lengths, Tiles(query_tokens, key_tokens))
    owner = {t: s for s in sequences_of(lengths) for t in s}
    assert work.tokens == sum(lengths) and work.max_seqlen == max(lengths, default=0)
    assert work.starts.tolist() == [owner[t].start for t in range(work.tokens)]
    for tiles, size in ((work.queries, query_tokens), (work.keys, key_tokens)):
        covered = [t for first, end, _ in tiles.tolist() for t in range(first, end)]
        assert sorted(covered) == list(range(work.tokens))
        assert all(0 < end - first <= size for first, end, _ in tiles.tolist())
    for first, end, key in work.queries.tolist():
        assert key == min(owner[t].start for t in range(first, end))
    for first, end, last in work.keys.tolist():
        assert last == max(owner[t].stop for t in range(first, end))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 16))
def test_a_tile_begins_with_a_sequence_or_at_a_multiple_of_its_size_within_one(
    lengths: list[int], size: int
) -> None:
    """So that a sequence that fits a tile is cut nowhere."""
    owner = {t: s for s in sequences_of(lengths) for t in s}
    for first, end, _ in listed(lengths, Tiles(size, size)).queries.tolist():
        assert (first - owner[first].start) % size == 0
        assert end == owner[end - 1].stop or (owner[first] == owner[end - 1] and end - first == size)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 4), st.integers(1, 16), st.integers(1, 16))
def test_a_list_that_a_device_makes_is_the_same_and_empty_tiles(
    lengths: list[int], empty: int, query_tokens: int, key_tokens: int
) -> None:
    """Whatever the boundaries of its shape: with empty sequences at the end, as pad_batch makes them."""
    tiles, bounds = Tiles(query_tokens, key_tokens), torch.tensor([0, *lengths, *[0] * empty]).cumsum(0)
    with NothingIsRead():
        found = work_list_on_device(bounds.int(), sum(lengths), 40, tiles)
    wanted = work_list(bounds, tiles)
    assert torch.equal(found.starts, wanted.starts) and found.max_seqlen == 40
    for mine, own in ((found.queries, wanted.queries), (found.keys, wanted.keys)):
        assert torch.equal(mine[: len(own)], own) and not mine[len(own) :].any()
    shape = (sum(lengths), len(bounds) - 1)
    assert (found.query_tiles, found.key_tiles) == tuple(most_tiles(*shape, size) for size in tiles)


@pytest.mark.parametrize(
    ("lengths", "size"), [([16] * 64, 16), ([9] * 64, 16), ([17] * 64, 16), ([1] * 900, 16)]
)
def test_there_are_seldom_more_empty_tiles_than_others(lengths: list[int], size: int) -> None:
    found = len(listed(lengths, Tiles(size, size)).queries)
    assert found <= most_tiles(sum(lengths), len(lengths), size) <= 2 * found + 1


def test_tiles_of_the_longest_sequence_come_first_and_its_longest_tile_before_them() -> None:
    work = listed([4, 10, 7], Tiles(4, 4))
    assert work.queries.tolist() == [[12, 14, 4], [8, 12, 4], [4, 8, 4], [18, 21, 14]] + [
        [14, 18, 14],
        [0, 4, 0],
    ]
    assert work.keys.tolist()[:4] == [[4, 8, 14], [8, 12, 14], [12, 14, 14], [14, 18, 21]]


def test_tiny_sequences_share_tiles() -> None:
    work = listed([1] * 100, Tiles(16, 64))
    assert (work.query_tiles, work.key_tiles) == (7, 2)


def test_a_copy_is_one_tensor_with_aligned_sections() -> None:
    """Triton compiles apart for addresses that are no multiple of 16 bytes."""
    work = listed([3, 2], Tiles(2, 2)).to("cpu")
    for section in (work.starts, work.queries, work.keys):
        assert section.untyped_storage().data_ptr() == work.buffer.untyped_storage().data_ptr()
        assert section.storage_offset() % 4 == 0 and section.dtype == torch.int32


def test_no_tokens_are_no_tiles() -> None:
    for lengths in ([], [0], [0, 0]):
        work = listed(lengths, Tiles(4, 4))
        assert (work.tokens, work.query_tiles, work.key_tiles) == (0, 0, 0)


@pytest.mark.parametrize("bounds", [[], [1, 4], [0, 4, 3], [0, 2**31]])
def test_boundaries_that_are_none_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="begin at 0, never fall and stay below"):
        work_list(bounds, Tiles(4, 4))


def test_tiles_hold_the_rows_of_a_group() -> None:
    assert tiles_for(32, 8, 128) == Tiles(16, 64)
    assert tiles_for(14, 2, 64) == Tiles(8, 64)
    assert tiles_for(8, 8, 256) == Tiles(64, 32)
    with pytest.raises(ValueError, match="no multiple"):
        tiles_for(8, 3, 64)
