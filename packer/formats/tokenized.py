"""`input_ids` that somebody made before, with labels or a mask, loss weights, and a teacher's candidates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from padless.packer import teacher
from padless.packer.errors import RecordError
from padless.packer.formats.conversation import MOST_WEIGHT
from padless.packer.formats.examples import Columns, Example, Tokens, refuse_pixels

IGNORED = -100
MASKS = ("loss_mask", "completion_mask", "assistant_masks")
OTHER_MASKS = ("attention_mask", "special_tokens_mask")
"""Of these nothing follows for what is trained."""
JUDGED = ("label", "advantages")
"""In rows of rated answers and of rollouts: what turns the training of an answer into its opposite."""
NUMBERS = ("segment_ids", "seq_idx")
"""In other packers' rows: which sequence of a pack each token is of."""
BOUNDS = {"seq_start_id": 1, "cu_seqlens": 2, "cu_seq_lens_q": 2}
"""And where sequences begin; the entries that one sequence has."""


def matches(row: Mapping[str, Any], columns: Columns) -> bool:
    return columns.find(row, "input_ids") is not None


def convert(row: Mapping[str, Any], columns: Columns) -> Example:
    if "seq_lengths" in row:
        raise RecordError(
            "seq_lengths says that it is a pack of several sequences: pack-dataset repack DIR packs a packed "
            "folder again; from elsewhere, give one record for each sequence"
        )
    if row.get("is_chosen") in (0, 1) and "pair_id" in row:
        raise RecordError(
            "is_chosen and pair_id say that it is one answer of a pair, and tokenized records are no pairs: "
            "pack-dataset repack DIR packs a packed folder of pairs again; from elsewhere, give one record "
            "for each pair (--format preference)"
        )
    for role in JUDGED:
        name = columns.find(row, role)
        if name is not None and row[name] is not None:
            raise RecordError(
                f"{name} says how good the answer is, and tokenized records are all trained alike: "
                "pack-dataset repack DIR packs a packed folder of such answers again; from elsewhere, give "
                "text (--format preference) or prompt_ids and response_ids (--format rollout), or leave the "
                f"column out with --column {role}="
            )
    _check_one_sequence(row)
    refuse_pixels(row)
    found = _with_labels(row, columns)
    for beside in ("position_ids", *OTHER_MASKS, *NUMBERS):
        if isinstance(row.get(beside), list):  # where lengths differ, one of the two is another row's
            _as_long(row[beside], beside, found.input_ids)
    name = columns.find(row, "loss_weight")
    if name is not None and row[name] is not None:
        found = _weighed(found, row[name], name)
    return found._replace(teacher=teacher.read(row, columns, found.labels or found.input_ids))


def _check_one_sequence(row: Mapping[str, Any]) -> None:
    """See that the row is no pack and not filled up, by what trainers' rows have beside their ids.

    Taken for one sequence, a pack would train on tokens of strangers, and padding on nothing at all.
    """
    positions, mask = row.get("position_ids"), row.get("attention_mask")
    if isinstance(positions, list) and positions != list(range(len(positions))):
        if 0 in positions[1:]:
            raise RecordError(
                f"position_ids begins anew at place {positions.index(0, 1)}: the row is a pack of several "
                "sequences, or filled up. Give one record for each sequence, with its tokens alone"
            )
        place, other = next((place, value) for place, value in enumerate(positions) if value != place)
        raise RecordError(
            f"position_ids has {other} at place {place}: packs count each sequence from 0, and nothing would "
            "be left of other positions. Leave the column out where the usual ones are meant"
        )
    if isinstance(mask, list) and mask.count(1) != len(mask):
        place, other = next((place, value) for place, value in enumerate(mask) if value != 1)
        what = "it numbers the sequences of a pack" if other else "the row is filled up"
        raise RecordError(
            f"attention_mask has {other} at place {place}: {what}. Give one record for each sequence, with "
            "its tokens alone"
        )
    for name in NUMBERS:
        numbers = row.get(name)
        if isinstance(numbers, list) and any(number != numbers[0] for number in numbers):
            raise RecordError(
                f"{name} has several numbers: the row is a pack of several sequences, or filled up. Give one "
                "record for each sequence, with its tokens alone"
            )
    for name, entries in BOUNDS.items():
        bounds = row.get(name)
        if isinstance(bounds, list) and len(bounds) > entries:
            raise RecordError(
                f"{name} has {len(bounds)} entries: the row is a pack of several sequences. Give one record "
                "for each sequence, with its tokens alone"
            )


def _weighed(tokens: Tokens, weights: Any, name: str) -> Tokens:
    """The tokens with their weights; a token of weight 0 is not trained."""
    if not isinstance(weights, list) or not all(
        type(item) in (int, float) and 0 <= item <= MOST_WEIGHT for item in weights
    ):
        raise RecordError(f"{name} must be a list of numbers from 0 to {MOST_WEIGHT:.1e}")
    _as_long(weights, name, tokens.input_ids)
    labels = tokens.labels or tokens.input_ids
    # Weights are stored as float32, in which the smallest ones are 0.
    weights = [float(np.float32(weight)) for weight in weights]
    labels = [label if weight else IGNORED for label, weight in zip(labels, weights, strict=True)]
    differs = any(w != 1 for w, label in zip(weights, labels, strict=True) if label != IGNORED)
    return Tokens(tokens.input_ids, labels, weights if differs else None)


def _with_labels(row: Mapping[str, Any], columns: Columns) -> Tokens:
    ids = _integers(columns.value(row, "input_ids"), "input_ids")
    name = columns.find(row, "labels")
    if name is not None and row[name] is not None:
        labels = _integers(row[name], name)
        _as_long(labels, name, ids)
        for place, (label, token) in enumerate(zip(labels, ids, strict=True)):
            if label not in (IGNORED, token):
                raise RecordError(
                    f"labels[{place}] is {label} where input_ids has {token}: labels must be unshifted, "
                    f"each the token itself or {IGNORED}"
                )
        return Tokens(ids, labels)
    masks = {}
    for role in MASKS:
        name = columns.find(row, role)
        if name is not None and row[name] is not None:
            mask = masks[name] = row[name]
            if not isinstance(mask, list) or not all(item in (0, 1) for item in mask):
                raise RecordError(f"{name} must be a list of 0 and 1 (or true and false)")
            _as_long(mask, name, ids)
    if masks:  # what all of them train, as in TRL
        trained = map(all, zip(*masks.values(), strict=True))
        return Tokens(ids, [token if is_one else IGNORED for token, is_one in zip(ids, trained, strict=True)])
    _refuse_unknown_masks(row, columns, len(ids))
    return Tokens(ids, None)


def _refuse_unknown_masks(row: Mapping[str, Any], columns: Columns, count: int) -> None:
    """RecordError where all tokens would be trained although a column seems to say which ones are."""
    if any(role in columns.named for role in MASKS):  # somebody has looked at the columns
        return
    for name, mask in row.items():
        if not name.endswith(("_mask", "_masks")) or name in OTHER_MASKS:
            continue
        if isinstance(mask, list) and len(mask) == count and 0 in mask and 1 in mask:
            raise RecordError(
                f"{name} seems to say which tokens are trained, and masks are called {', '.join(MASKS)}: "
                f"--column {MASKS[0]}={name} goes by it (1 is trained), --column {MASKS[0]}= trains all"
            )


def _integers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise RecordError(f"{name} must be a list of integers")
    return value


def _as_long(values: list[Any], name: str, ids: list[int]) -> None:
    if len(values) != len(ids):
        raise RecordError(f"{name} has {len(values)} entries for {len(ids)} input_ids")
