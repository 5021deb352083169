"""Tokens of packed folders taken by their places, against taking one sequence after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from padless.packer.folder_tokens import Elements, FolderGather, Segment

COLUMNS = {
    "input_ids": ("<u2", ()),
    "labels": ("<i4", ()),
    "loss_weight": ("<f4", ()),
    "few": ("<f4", (2,)),
    "many": ("<f4", (3,)),
    "small": ("i1", ()),
}
"""Of one, two, four, eight and more bytes a token: views have the shortest sequences in themselves."""


def segments_of(lengths: list[list[int]], asked: list[bool], seed: int) -> tuple[list[Segment], int]:
    """A segment for each list, its sequences numbered in a drawn order; and how many are asked for."""
    generator = np.random.default_rng(seed)
    counts = [len(of) for of in lengths]
    is_asked = np.resize(np.array(asked), sum(counts))
    numbers = np.full(sum(counts), -1, dtype=np.int64)
    numbers[is_asked] = generator.permutation(int(is_asked.sum()))
    found = []
    for of, mine in zip(lengths, np.split(numbers, np.cumsum(counts)[:-1]), strict=True):
        columns: dict[str, NDArray[Any]] = {}
        for name, (kind, shape) in COLUMNS.items():
            columns[name] = generator.integers(1, 100, size=(sum(of), *shape)).astype(kind)
        found.append(Segment(columns, np.array(of, dtype=np.int32), mine))
    return found, int(is_asked.sum())


def one_by_one(segments: list[Segment], name: str, count: int) -> list[NDArray[Any]]:
    """A column of each sequence, by its number."""
    found: list[NDArray[Any]] = [np.zeros(0)] * count
    for segment in segments:
        at = 0
        for length, number in zip(segment.lengths.tolist(), segment.numbers.tolist(), strict=True):
            if number >= 0:
                found[number] = segment.columns[name][at : at + length]
            at += length
    return found


LENGTHS = st.lists(st.lists(st.integers(1, 15), min_size=1, max_size=12), min_size=1, max_size=4)
ASKED = st.lists(st.booleans(), min_size=1, max_size=7).map(lambda flags: [True, *flags])


@settings(max_examples=60, deadline=None)
@given(LENGTHS, ASKED, st.integers(0, 99))
def test_any_sequences_are_taken_from_wherever_they_lie(
    lengths: list[list[int]], asked: list[bool], seed: int
) -> None:
    segments, count = segments_of(lengths, asked, seed)
    elements = Elements.lay(segments, count)
    order = np.random.default_rng(seed).integers(0, count, size=2 * count).astype(np.int32)
    for name, (kind, shape) in COLUMNS.items():
        alone = one_by_one(segments, name, count)
        for asked_for in (order, order[:1], order[:2]):  # more than there are segments, and fewer
            taken = elements.take(name, asked_for)
            assert taken.dtype == np.dtype(kind) and taken.shape[1:] == shape
            np.testing.assert_array_equal(taken, np.concatenate([alone[number] for number in asked_for]))


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 99))
def test_fragments_are_taken_from_within_their_sequences(lengths: list[list[int]], seed: int) -> None:
    segments, count = segments_of(lengths, [True], seed)
    elements = Elements.lay(segments, count)
    generator = np.random.default_rng(seed)
    of = generator.integers(0, count, size=3 * count)
    starts = generator.integers(0, elements.places["size"][of])
    sizes = generator.integers(1, elements.places["size"][of] - starts + 1).astype(np.int32)
    parts = elements.fragments(elements.places[of], starts, sizes)
    everyone = np.arange(len(of))
    for name in COLUMNS:
        alone = one_by_one(segments, name, count)
        cut = [alone[n][at : at + size] for n, at, size in zip(of, starts, sizes, strict=True)]
        np.testing.assert_array_equal(parts.take(name, everyone), np.concatenate(cut))


@pytest.mark.parametrize("cut", [False, True])
def test_only_the_first_token_of_a_fragment_is_masked(cut: bool) -> None:
    segments, count = segments_of([[3, 1], [2]], [True], 0)
    elements = Elements.lay(segments, count)
    lengths = elements.places["size"].copy()
    gather = FolderGather(elements, lengths, None, lengths - 1, {}, cut=cut)
    order = np.array([2, 0, 1])
    labels = elements.take("labels", order)
    if cut:
        labels = elements.take("input_ids", order).astype(np.int32)
        labels[np.cumsum(lengths[order]) - lengths[order]] = -100
    np.testing.assert_array_equal(gather.labels(order), labels)
