"""What is refused of sequences in memory: names, masks, labels and numbers that would train something else.

numpy and torch take all of it without a word, and a loss comes out. Each check is one pass over a whole
column, and only where it finds something is the sequence looked for that is to blame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from padless.runtime.arrays import Array
from padless.runtime.errors import CollateError
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.in_memory_columns import arrays_of


def refuse_further(
    sequences: Sequence[Mapping[str, Any]],
    first: Mapping[str, Any],
    *,
    but: Sequence[str],
    numbers: Sequence[int],
) -> None:
    """CollateError for a name that the first sequence lacks: what it has would be left out in silence."""
    if max(map(len, sequences)) <= len(first) and not but:
        return
    for number, one in zip(numbers, sequences, strict=True):
        if more := [name for name in one if name not in first and name not in but]:
            raise CollateError(f"sequence {number} has {more[0]}, and sequence 0 has none: give all or none")


def refuse_not_finite(
    name: str, values: Array, labels: Array, lengths: Array, numbers: Sequence[int]
) -> None:
    """CollateError where a trained token has NaN or an infinity, which would spoil the whole step's gradient.

    `values` [tokens, ...], or [sequences], each of which is that of all its tokens. Of several values a token
    (a teacher's best) one may be minus infinity: what nobody would say.
    """
    if values.dtype.kind != "f" or np.isfinite([values.min(initial=0), values.max(initial=0)]).all():
        return
    bad = ~np.isfinite(values) if values.ndim == 1 else np.isnan(values) | np.isposinf(values)
    if len(values) == len(lengths) != len(labels):
        bad, values = bad.repeat(lengths, axis=0), values.repeat(lengths, axis=0)
    of_tokens = bad.reshape(len(values), -1).any(axis=1)
    if (places := np.flatnonzero(of_tokens & (labels != IGNORE_INDEX))).size:
        found = values[places[0]][bad[places[0]]].flat[0]
        raise CollateError(
            f"{name} of sequence {whose(places, lengths, numbers)} has {'NaN' if np.isnan(found) else found} "
            "at a trained token: leave the sequence out, or mask the token (response_mask)"
        )


def refuse_ids(ids: Array, lengths: Array, numbers: Sequence[int]) -> None:
    """CollateError for ids below 0, such as those that fill up rows; so are ids over int64 by now."""
    if ids.min(initial=0) < 0:
        places = np.flatnonzero(ids < 0)
        raise CollateError(
            f"sequence {whose(places, lengths, numbers)} has the id {ids[places[0]]}, which is no token's: "
            "give its tokens alone, without padding"
        )


def refuse_labels(labels: Array, ids: Array, lengths: Array, numbers: Sequence[int]) -> None:
    """CollateError for labels that are neither the token itself nor -100, such as shifted ones."""
    if (places := np.flatnonzero((labels != ids) & (labels != IGNORE_INDEX))).size:
        raise CollateError(
            f"labels of sequence {whose(places, lengths, numbers)} have {labels[places[0]]} where its ids "
            f"have {ids[places[0]]}: labels are unshifted, each the token itself or {IGNORE_INDEX}"
        )


def refuse_mask(name: str, mask: Array, lengths: Array, numbers: Sequence[int]) -> None:
    """CollateError for a mask of anything but 0 and 1."""
    if (places := np.flatnonzero((mask != 0) & (mask != 1))).size:
        raise CollateError(
            f"{name} of sequence {whose(places, lengths, numbers)} has {mask[places[0]]}; it is 0 or 1 (or "
            "false and true) for each token"
        )


def refuse_padding(masks: list[Any], numbers: Sequence[int]) -> None:
    """CollateError for an attention mask that leaves out tokens: those would be trained like any others."""
    for number, mask in zip(numbers, arrays_of("attention_mask", masks, numbers), strict=True):
        if not (mask == 1).all():
            raise CollateError(
                f"attention_mask of sequence {number} is not 1 for all its tokens: give them alone, without "
                "padding"
            )


def whose(places: Array, lengths: Array, numbers: Sequence[int]) -> int:
    """The number of the sequence in which the first of these places among all tokens lies."""
    return numbers[int(np.searchsorted(np.cumsum(lengths), places[0], side="right"))]
